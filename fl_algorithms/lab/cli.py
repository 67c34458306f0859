"""`fl-lab`: try a study on one machine before a hospital is asked.

Importing this loads no torch, pydantic or method: help answers at once, and each command imports what it needs.
"""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fl_algorithms.engine.hardware import MOST_WORKERS, DeviceName, Hardware
from fl_algorithms.lab.cli_data import data_app
from fl_algorithms.lab.cli_export import export
from fl_algorithms.lab.cli_partition import partition
from fl_algorithms.lab.cli_program import model, program
from fl_algorithms.lab.cli_schema import schema
from fl_algorithms.lab.cli_tune import tune
from wardround.cli import Json, application, print_json, run, say
from wardround.local import outputs

if TYPE_CHECKING:
    from torch import Tensor

    from fl_algorithms.study import ResolvedStudy


app = application("fl-lab", "Run a federated study in one process: the same methods, the same arithmetic, no network.")
app.add_typer(data_app, name="data")
app.command()(partition)
app.command()(schema)
app.command()(tune)
app.command()(export)
app.command()(program)
app.command()(model)

StudyArgument = Annotated[Path, typer.Argument(metavar="STUDY.toml", help="The study file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key, as training.learning_rate=0.01; repeatable."),
]
VariantOption = Annotated[str, typer.Option("--variant", metavar="NAME", help="Use [variants.NAME] of the file.")]
AloneOption = Annotated[bool, typer.Option("--alone", help="Share nothing: each site trains the same network alone.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace what is there.")]
DataOption = Annotated[Path, typer.Option("--data", metavar="DIR", help="One folder for each site.")]
DeviceOption = Annotated[DeviceName, typer.Option(help="Where to train; auto is CUDA where there is one.")]
WorkersOption = Annotated[
    int,
    typer.Option(min=0, max=MOST_WORKERS, help="Processes that read images ahead, where they do not fit the cache."),
]
JobsOption = Annotated[int | None, typer.Option(min=1, help="Runs side by side, each in a process.")]
ExecutorOption = Annotated[
    Literal["processes", "ray"], typer.Option(help="Where: processes of this machine, or a Ray cluster.")
]
PerCardOption = Annotated[int, typer.Option(min=1, max=64, help="Runs that share one CUDA card.")]
WeightsOption = Annotated[
    Path | None,
    typer.Option(
        "--weights", metavar="FILE.safetensors", help="Start from these shared tensors; others stay as they are drawn."
    ),
]


@app.command()
def init(
    study: StudyArgument,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where to write the tensors.")],
    force: ForceOption = False,
    setting: SetOption = None,
    variant: VariantOption = "",
    weights: WeightsOption = None,
) -> None:
    """Write a study's initial shared tensors, whose digest is part of the study's."""
    outputs.file(out, force=force, keep=[study])
    resolved = _resolved(study, setting, variant, lab=False)
    from fl_algorithms.engine.partition import specs_of
    from fl_algorithms.lab.federation import manifest, payload
    from wardround.tensors.files import file_header

    tensors = _initial(resolved, weights)
    specs = specs_of(tensors)
    pieces = (file_header(specs), *(payload(tensors[spec.key]) for spec in specs))
    outputs.write(out, pieces, force=force, keep=[study], mode=0o644)
    digest = manifest(tensors, specs).digest()
    say(f"{len(specs)} tensors, {sum(spec.bytes for spec in specs):,} bytes, written to {out}")
    say(f"digest {digest}")
    say(f"study  {resolved.digest(digest)}")
    words = ["coordinator", "study", "create", str(study), "--initial", str(out), "--state", "DIR"]
    say(f"next: `{shlex.join([*words, *(word for one in setting or [] for word in ('--set', one))])}`")


@app.command()
def convert(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A file of PyTorch, or of safetensors.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.safetensors", help="Where to write the tensors.")],
    study: Annotated[
        Path | None, typer.Option("--study", metavar="STUDY.toml", help="Take what fits this study, by its names.")
    ] = None,
    prefix: Annotated[str, typer.Option("--prefix", metavar="TEXT", help="Without a study: before each name.")] = "",
    gray: Annotated[bool, typer.Option("--gray", help="A first layer for colors becomes one for gray.")] = False,
    force: ForceOption = False,
    setting: SetOption = None,
    variant: VariantOption = "",
) -> None:
    """Write the weights of a torchvision or timm checkpoint as a safetensors file; code in it is never run."""
    from fl_algorithms.lab.cli_convert import run_convert

    run_convert(checkpoint, out, study, prefix, setting, variant, gray=gray, force=force)


@app.command()
def public_data(
    study: StudyArgument,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The set: a CSV or .npz file, or a folder of images.")],
    setting: SetOption = None,
    variant: VariantOption = "",
) -> None:
    """Read a set without patients as the study's task does, and print the [public_data] table that pins it."""
    from fl_algorithms.study import ResolvedStudy
    from wardround.records import study as study_file
    from wardround.records.schema import toml_bytes

    loaded = ResolvedStudy(
        study_file.load(study, setting, variant).model_copy(update={"public_data": None}), study.name
    )
    from fl_algorithms.engine.partition import task_of
    from fl_algorithms.tasks.public_data import public_data_digest, read_public_data

    found = read_public_data(loaded, task_of(loaded), path)
    section = study_file.PublicDataSection(digest=public_data_digest(path), rows=len(found.x))
    print(toml_bytes({"public_data": section.model_dump()}).decode(), end="")
    say(f"next: put this into {study}, and give every site a copy of {path.name}")


@app.command("run")
def run_study(
    study: StudyArgument,
    data: DataOption,
    seeds: Annotated[int, typer.Option(min=1, max=10_000, help="Runs, with the study's seed and those after it.")] = 1,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Keep curves and models; called again, it goes on.")
    ] = None,
    force: ForceOption = False,
    setting: SetOption = None,
    variant: VariantOption = "",
    alone: AloneOption = False,
    weights: WeightsOption = None,
    private_weights: Annotated[
        Path | None, typer.Option(metavar="FILE.safetensors", help="Start what stays at each site from these tensors.")
    ] = None,
    sample: Annotated[float, typer.Option(help="Share of the sites that each round asks.")] = 1.0,
    dropout: Annotated[float, typer.Option(help="Chance that a site that is asked does not answer.")] = 0.0,
    delay_s: Annotated[float, typer.Option(help="Median seconds to an answer; late after `round_deadline_s`.")] = 0.0,
    delay_spread: Annotated[float, typer.Option(help="How unlike the delays are: sd of their logarithm.")] = 1.0,
    attack: Annotated[
        Literal["sign_flip", "scaling", "label_flip", "alie"] | None, typer.Option(help="What the bad sites do.")
    ] = None,
    bad_site: Annotated[
        list[str] | None, typer.Option("--bad-site", metavar="SITE", help="One of them; repeatable.")
    ] = None,
    strength: Annotated[
        float | None, typer.Option(help="Of the attack: times its update; of alie z, in standard deviations.")
    ] = None,
    masked: Annotated[
        bool, typer.Option("--masked", help="Secure aggregation with its masks; without them the sums are the same.")
    ] = False,
    jobs: JobsOption = None,
    executor: ExecutorOption = "processes",
    per_card: PerCardOption = 1,
    device: DeviceOption = "cpu",
    workers: WorkersOption = 0,
    engine: Annotated[
        Literal["plain", "batched"],
        typer.Option(help="batched: all sites and seeds as one batch of small networks; faster, not the same bits."),
    ] = "plain",
    as_json: Json = False,
) -> None:
    """Run a study's method on the sites' data and score each site's checkpoints."""
    from fl_algorithms.lab import cli_run
    from fl_algorithms.lab.attacks import attacked
    from fl_algorithms.lab.participation import Participation

    if out is not None:
        outputs.folder(out, force=force, keep=[study, data], goes_on="run.json")
    resolved = _resolved(study, setting, variant, alone=alone)
    if weights is not None:
        _initial(resolved, weights)
    hardware = Hardware(device, workers)
    there = Participation(sample, dropout, delay_s, delay_spread, attacked(attack, bad_site, strength), masked)
    cli_run.run_and_print(
        resolved, data, seeds, out, hardware, weights, private_weights, there, jobs, executor, per_card, as_json, engine
    )


@app.command()
def compare(
    suite: Annotated[Path, typer.Argument(metavar="SUITE.toml", help="What is compared.")],
    data: DataOption,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where the runs are kept; called again, it goes on.")
    ],
    force: ForceOption = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Runs of each row, in place of the suite's.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Worker processes, in place of one a core.")] = None,
    executor: ExecutorOption = "processes",
    per_card: PerCardOption = 1,
    only: Annotated[list[str] | None, typer.Option("--only", metavar="ROW", help="This row; repeatable.")] = None,
    device: DeviceOption = "cpu",
    workers: WorkersOption = 0,
) -> None:
    """Run every row of a suite with every seed, and keep each run. Ctrl-C keeps what is done."""
    from fl_algorithms.lab.cli_compare import run_compare

    outputs.folder(out, force=force, keep=[suite, data], goes_on="suite.json")
    run_compare(suite, data, out, seeds, jobs, only or [], Hardware(device, workers), executor, per_card)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `fl-lab compare --out` filled.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where to; without it DIR/report.")] = None,
    force: ForceOption = False,
    metric: Annotated[str, typer.Option(help="Which score; without it the suite's.", show_default=False)] = "",
    reference: Annotated[str, typer.Option(metavar="ROW", help="Compare with this row.", show_default=False)] = "",
) -> None:
    """Write tables, plots and a page of a comparison, of the runs that are there."""
    from fl_algorithms.lab.report import write

    if out is not None:
        outputs.folder(out, force=force)
    for path in write(folder, out or folder / "report", metric, reference):
        say(f"written: {path}")


@app.command()
def size(
    study: StudyArgument,
    setting: SetOption = None,
    variant: VariantOption = "",
    as_json: Json = False,
) -> None:
    """Count each network's parameters, shared and private, and the operations of one answer."""
    resolved = _resolved(study, setting, variant)
    from fl_algorithms.lab import sizes

    found = sizes.sizes(resolved)
    print_json({"method": resolved.method.name, "networks": found}) if as_json else sizes.print_sizes(found)


@app.command()
def methods(
    name: Annotated[str, typer.Argument(metavar="NAME", help="One method, with its settings.")] = "",
    as_json: Json = False,
) -> None:
    """List the methods: what leaves, what stays, what each needs; or show one's card."""
    from fl_algorithms.lab import methods as cards

    if as_json:
        print_json(cards.card(name) if name else cards.overview())
    elif name:
        cards.print_card(cards.card(name))
    else:
        cards.print_overview(cards.overview())


@app.command()
def plugins(as_json: Json = False) -> None:
    """List what other distributions bring, each with its digest; imports none of it."""
    from fl_algorithms.lab import plugins as listing

    print_json(listing.overview()) if as_json else listing.print_overview(listing.brought())


def _resolved(
    path: Path, settings: list[str] | None, variant: str, *, alone: bool = False, lab: bool = True
) -> "ResolvedStudy":
    """The study in a file; ``lab``: also one that only the lab can run."""
    from fl_algorithms.resolving import resolve
    from wardround.records import study as study_file

    study = study_file.load(path, settings, variant)
    if alone:
        study = study.model_copy(update={"algorithm": study_file.Named(name="silo")})
    return resolve(study, lab=lab, source=path.name)


def _initial(study: "ResolvedStudy", weights: Path | None, *, verbose: bool = True) -> "dict[str, Tensor]":
    """The study's initial model, from ``weights`` where they have it; ``verbose``: say what is from where."""
    if weights is None:
        from fl_algorithms.engine.partition import initial_model

        return initial_model(study)
    from fl_algorithms.lab.weights import weighted

    start = weighted(study, weights)
    if verbose:
        say(f"{len(start.tensors) - len(start.drawn)} of {len(start.tensors)} shared tensors are from {weights}")
        for name in start.drawn:
            say(f"as drawn, not in the file: {name}")
        for name in start.unused:
            say(f"not used, stays at each site: {name}")
    return start.tensors


def main() -> None:
    run(app)
