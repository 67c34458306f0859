"""`make demo`: the main job on one machine, with the commands that people use.

A coordinator and four site agents start as separate processes on loopback, join each other over mutual TLS, train a
study to its end, and what came of it is printed: the models' scores, what left and what stayed, and whether every
ledger verifies. Nothing here is imported from the programs but their commands' output.
"""

import argparse
import json
import subprocess
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tools.world import BIN, World, command, in_parallel

ROOT = Path(__file__).resolve().parent.parent
SECURE = ROOT / "examples" / "breast_cancer_secure.toml"
VERIFIER_S = 600  # of which it needs one, on a machine that has nothing else to do
KINDS = ("best_local", "fine_tuned", "latest", "best_global")


def main() -> None:
    options = arguments()
    console = Console(stderr=True)
    began = time.monotonic()
    with working_folder(options.state) as folder:
        study, data = prepare_data(options.data, folder)
        if options.secure:
            study = SECURE
        with study.open("rb") as file:
            tables = tomllib.load(file)
        sites, label, name = sorted(tables["study"]["sites"]), tables["task"]["label"], tables["study"]["name"]
        with World(folder) as world:
            with narrated(console, f"One coordinator and {len(sites)} hospitals start and join over mutual TLS"):
                world.start(data, label, sites)
            with narrated(console, f"Each hospital reads study `{name}` ({options.algorithm}) and approves it"):
                world.create_study(study, "--set", f"algorithm.name={options.algorithm}")
                if options.secure:
                    world.know_peers(name, sites)
                world.approve(name, sites)
            alone = TrainingAlone(study, data, options.algorithm)
            world.ask_coordinator("study", "start", name)
            status = follow(console, world, name, tables["study"]["rounds"])
            for site in sites:
                world.heard(site, name)
            with narrated(console, "For comparison, each hospital alone: the same network and steps"):
                alone_scores = alone.scores()
            report = folder / "report.html"
            world.ask_coordinator("study", "report", name, "--out", report, ok=(0, 3))
            show(Console(), world, name, sites, status, alone_scores)
            verified = show_egress(Console(), world, name, sites, folder)
            if options.secure:
                show_sum(Console(), world, sites[0])
        print(f"\nReport:   {report}")
        print(f"Models:   {folder}/{sites[0]}/studies/{name}/ and so on; the card beside each says what it is")
        print(f"Look:     {BIN}/site-agent models list {name} --state {folder}/{sites[0]}")
        print(f"          {BIN}/site-agent audit show --state {folder}/{sites[0]}")
        print(f"Finished in {time.monotonic() - began:.0f} s")
    if not verified:
        raise SystemExit(1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make demo")
    parser.add_argument("--algorithm", default="fenda", choices=("fenda", "fedavg", "fedsoup"))
    parser.add_argument("--data", type=Path, help="the UCI heart disease folder; default: scikit-learn's breast cancer")
    parser.add_argument("--secure", action="store_true", help="the coordinator learns sums alone, and one is checked")
    parser.add_argument("--state", type=Path, help="keep everything in this folder")
    options = parser.parse_args()
    if options.secure and (options.data or options.algorithm == "fedsoup"):
        parser.error("--secure is of scikit-learn's breast cancer, with fenda or fedavg")
    return options


@contextmanager
def working_folder(state: Path | None) -> Iterator[Path]:
    """``state``, which must be new or empty, or a new temporary folder. It is left for a person to look at."""
    if state is None:
        yield Path(tempfile.mkdtemp(prefix="wardround-demo-"))
        return
    state = state.resolve()
    state.mkdir(parents=True, exist_ok=True)
    if any(state.iterdir()):
        raise SystemExit(f"error: {state} is not empty\nhint: name a new folder, as in `make demo STATE=/tmp/demo`")
    yield state


def prepare_data(raw: Path | None, folder: Path) -> tuple[Path, Path]:
    """The study file, and a folder with one folder a hospital in it."""
    out = folder / "data"
    if raw is None:
        command("fl-lab", "data", "breast-cancer", "--out", out)
        return ROOT / "examples" / "breast_cancer.toml", out
    command("fl-lab", "data", "heart-disease", raw, "--out", out)
    return ROOT / "examples" / "heart_disease.toml", out


class TrainingAlone:
    """The lab's yardstick, in a process of its own that starts now: this study's network and steps, nothing shared."""

    def __init__(self, study: Path, data: Path, algorithm: str) -> None:
        method = ["--set", f"algorithm.name={algorithm}"]
        line = [BIN / "fl-lab", "run", study, "--data", data, *method, "--alone", "--json"]
        self._process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def scores(self) -> dict[str, float | None]:
        out, errors = self._process.communicate(timeout=120)
        if self._process.returncode:
            raise SystemExit(errors)
        scores: dict[str, float | None] = json.loads(out)["scores"]["best_local"]["per_site"]
        return scores


def follow(console: Console, world: World, study: str, rounds: int) -> dict[str, Any]:
    """Show the rounds as they close, until the study has ended."""
    columns = (
        SpinnerColumn(), TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[sites]}"),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("rounds", total=rounds, sites="")
        line = [BIN / "coordinator", "study", "status", study, "--follow", "--json", "--state", world.coordinator_state]
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
            watchdog = threading.Timer(300, process.terminate)
            watchdog.start()
            assert process.stdout is not None
            for text in process.stdout:
                status = json.loads(text)
                closed = max((len(row["rounds_contributed"]) for row in status["sites"].values()), default=0)
                marks = " ".join(f"{site}: {row['state']}" for site, row in status["sites"].items())
                progress.update(bar, completed=closed, sites=marks)
            watchdog.cancel()
    return world.finish(study)


@contextmanager
def narrated(console: Console, what: str) -> Iterator[None]:
    began = time.monotonic()
    with console.status(what):
        yield
    console.print(f"[green]✓[/green] {what} [dim]({time.monotonic() - began:.1f} s)[/dim]", soft_wrap=True)


def show(
    console: Console, world: World, study: str, sites: list[str], status: dict[str, Any], alone: dict[str, float | None]
) -> None:
    """The table of scores."""
    listed: dict[str, list[dict[str, Any]]] = {}

    def ask(site: str) -> None:
        listed[site] = world.site_json(site, "models", "list", study)["checkpoints"]

    in_parallel(ask, sites)
    rows = {site: {row["kind"]: row for row in listed[site]} for site in sites}
    any_row = listed[sites[0]][0]
    kinds = [kind for kind in KINDS if any(kind in rows[site] for site in sites)]
    table = Table(title=f"{any_row['metric']} on each hospital's own {any_row['split']} patients", title_justify="left")
    table.add_column("hospital")
    table.add_column("rounds", justify="right")
    for kind in [*kinds, "training alone"]:
        table.add_column(kind, justify="right")
    columns: dict[str, list[float]] = {kind: [] for kind in [*kinds, "training alone"]}
    for site in sites:
        scores = {kind: rows[site].get(kind, {}).get("score") for kind in kinds} | {"training alone": alone[site]}
        contributed = f"{len(status['sites'][site]['rounds_contributed'])}/{status['rounds']}"
        table.add_row(site, contributed, *("-" if value is None else f"{value:.3f}" for value in scores.values()))
        for kind, value in scores.items():
            if value is not None:
                columns[kind].append(value)
    table.add_section()
    table.add_row("mean", "", *(f"{sum(found) / len(found):.3f}" if found else "-" for found in columns.values()))
    console.print()
    console.print(table)
    if "best_global" not in kinds:
        console.print("[dim]This method has no one global model: each hospital's model has private parts.[/dim]")


def show_egress(console: Console, world: World, study: str, sites: list[str], folder: Path) -> bool:
    """What left, what stayed, and what two verifiers and the coordinator's receipts say of each ledger."""
    audits = {}

    def ask(site: str) -> None:
        audits[site] = Audit(world, site, folder / f"receipts-{site}.jsonl")

    in_parallel(ask, sites)
    table = Table(title="What left each hospital, by its own ledger", title_justify="left")
    for heading in ("hospital", "updates", "bytes"):
        table.add_column(heading, justify="left" if heading == "hospital" else "right", no_wrap=True)
    for heading in ("verifier", "2nd verifier", "receipts"):
        table.add_column(heading)
    for site in sites:
        found = audits[site]
        table.add_row(site, str(found.uploads), f"{found.bytes:,}", *(mark(said) for said in found.words))
    console.print()
    console.print(table)
    preview = world.site_json(sites[0], "preview", study)
    left = ", ".join(leaf["name"] for leaf in preview["leaves"])
    stayed = ", ".join(stay["name"] for stay in preview["stays"]) or "nothing of the model"
    console.print(f"Left, each round: {left}; and the metrics {', '.join(preview['metrics'])}")
    console.print(f"Never left: {stayed}; and every patient's record")
    console.print(
        "[dim]Receipts: the coordinator's own copy of what it took, held against the hospital's ledger.[/dim]"
    )
    return all(found.ok for found in audits.values())


def show_sum(console: Console, world: World, site: str) -> None:
    """What one hospital's own ledger says of each sum, which its agent checked before it trained on."""
    shown = world.ask_site(site, "audit", "show").splitlines()
    checks = [line.partition("sum_checked")[2].strip() for line in shown if "sum_checked" in line]
    if not checks:
        raise SystemExit(f"error: {site} has checked no sum")
    console.print(f"\nThe coordinator saw masked vectors and sums alone. By {site}'s ledger:", soft_wrap=True)
    for line in checks:
        console.print(line, soft_wrap=True)


class Audit:
    """One hospital's ledger, looked at by two verifiers that share no code and held against the coordinator's copy."""

    def __init__(self, world: World, site: str, receipts: Path) -> None:
        world.ask_coordinator("receipts", site, "--out", receipts)
        verdict = world.site_json(site, "audit", "verify", "--receipts", receipts, ok=(0, 1, 2, 3, 4))
        program = [BIN / "python", ROOT / "tools" / "verify_ledger.py"]
        line = [*program, world.state / site / "ledger", "--receipts", receipts]
        second = subprocess.run(line, capture_output=True, text=True, timeout=VERIFIER_S, check=False)
        self.bytes, self.uploads = verdict.get("bytes", 0), verdict.get("uploads", 0)
        self.codes = (0 if verdict["ok"] else 1, second.returncode)
        self.agrees = receipts_agree(verdict)
        agree = f"{verdict['compared']} agree" if self.agrees else "do not agree"
        last = second.stdout.strip().splitlines()[-1:] or ["crashed"]
        self.words = ("verified" if verdict["ok"] else verdict["reason"] or "not fully shown", last[0].lower(), agree)
        self.ok = self.codes == (0, 0) and self.agrees


def receipts_agree(verdict: Mapping[str, Any]) -> bool:
    """Whether the coordinator's copy has a receipt for each upload that it decided on, by ``audit verify --json``.

    Of an upload that never arrived the coordinator says so to the site alone, and has nothing to copy.
    """
    return bool(verdict["ok"]) and verdict["compared"] == verdict["accepted"] + verdict["refused"]


def mark(said: str) -> str:
    good = said == "verified" or (said.endswith("agree") and said[0].isdigit())
    return f"[green]{said}[/green]" if good else f"[red]{said}[/red]"


if __name__ == "__main__":
    main()
