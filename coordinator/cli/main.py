"""``coordinator``: the commands of whoever runs the service. Importing this loads no gRPC and no database.

Each command speaks to the service that runs on its state directory; when none runs, it takes the directory's lock and
does the same itself.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from fl_algorithms.resolving import resolve
from wardround.cli import print_json, run, say
from wardround.errors import BadData, NeedsPerson, Unavailable, UsageProblem
from wardround.local.directory import quoted

INCOMPLETE = 3
INITIAL_S = 600
MAKE_INITIAL = "from fl_algorithms.lab.cli import main; main()"  # `fl-lab`, wherever its script was installed
_SPAN = re.compile(r"(\d{1,6})(s|m|min|h|d)")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}

app = typer.Typer(
    name="coordinator",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Invite hospitals and run the rounds of their studies.",
)
study_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Make, start, stop and look at studies.")
app.add_typer(study_app, name="study")

StateOption = Annotated[
    Path, typer.Option("--state", envvar="WARDROUND_STATE", metavar="DIR", help="Where the coordinator keeps things.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Change the study, as in the lab.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace a file that is there; never one of --state.")]
StudyArgument = Annotated[str, typer.Argument(metavar="ID", help="The study's name.")]
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The study file (TOML).")]


@app.command()
def init(
    state: StateOption,
    federation: Annotated[str, typer.Option(metavar="NAME", help="The federation's name, as in every certificate.")],
    address: Annotated[str, typer.Option(metavar="HOST:PORT", help="What the sites will dial.")],
) -> None:
    """Make a coordinator: its authority, its keys and its database."""
    from coordinator import state_directory as places
    from wardround.signing.certificates import fingerprint

    authority = places.create(places.State(state), federation, address, time.time())
    say(f"Authority of `{federation}` written to {state / 'authority'}, its key readable by this user only")
    say(f"fingerprint {fingerprint(authority.certificate)}")
    say("next: `coordinator serve`, then `coordinator invite SITE`")


@app.command()
def upgrade(state: StateOption) -> None:
    """Bring the database of an older version to this one's form. Copy the state directory before."""
    from coordinator.state_directory import State
    from coordinator.storage import database
    from wardround.local.durable import StateLock

    place = State(state)
    place.config()
    with StateLock(state, "coordinator upgrade"):
        database.upgrade(place.database)
    say(f"{place.database} is ready for this version")


@app.command()
def serve(
    state: StateOption,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Listen here, not at the sites' address.")] = "",
    first_message_s: Annotated[int, typer.Option(min=1, help="How long a call's first message may take.")] = 5,
    rate_bytes: Annotated[int, typer.Option(min=1024, help="What an upload moves at least in each --rate-s.")] = 524288,
    rate_s: Annotated[int, typer.Option(min=1, help="And how long a site may take for one reply.")] = 300,
    burst: Annotated[int, typer.Option(min=50, help="Calls that a peer may make at once.")] = 2000,
    calls_a_second: Annotated[int, typer.Option(min=1, help="And from then on.")] = 100,
) -> None:
    """Serve the federation until SIGTERM. Prints `ready HOST:PORT`."""
    from coordinator.calls import Bounds
    from coordinator.server import serve as serve_forever
    from coordinator.state_directory import State

    bounds = Bounds(first_message_s, rate_bytes, rate_s, burst, calls_a_second, left_s=rate_s)
    serve_forever(State(state), listen, bounds)


@app.command()
def invite(
    site: Annotated[str, typer.Argument(help="The hospital's name in this federation.")],
    state: StateOption,
    expires: Annotated[str, typer.Option(metavar="SPAN", help="How long it is good: 30m, 24h, 7d.")] = "24h",
) -> None:
    """Print an invitation, good once, for one site. It is a secret: send it by a way that you trust."""
    answer = _ask(state, "invite", site=site, expires_s=_seconds(expires))
    if answer["replaces"]:
        say(f"Site `{site}` is enrolled already: whoever uses this replaces its identity")
    say(f"Good once, until {answer['expires']}; an older unused invitation for `{site}` no longer works")
    print(answer["invitation"], flush=True)


@app.command()
def sites(state: StateOption, as_json: JsonOption = False) -> None:
    """List the sites: invited, enrolled, connected, ready or revoked."""
    answer = _ask(state, "sites")
    if as_json:
        print_json(answer)
        return
    _print_table(
        ("site", "state", "certificate until", "last seen"),
        [
            (row["site"], row["state"], row["certificate_expires"] or "", row["last_seen"] or "")
            for row in answer["sites"]
        ],
    )
    for row in answer["sites"]:
        if row["two_lines_since"]:
            say(f"Site `{row['site']}`: since {row['two_lines_since']} two hold its keys, or it was copied")
            say(f"next: ask its people; if nobody there knows of a copy, `coordinator revoke {row['site']}`")
        if row["ledger_key"]:
            print(f"ledger key of {row['site']}: {row['ledger_key']}")
    print(f"receipt key: {answer['receipt_key']}")


@app.command()
def revoke(site: Annotated[str, typer.Argument(help="The site to refuse from now on.")], state: StateOption) -> None:
    """Refuse a site from its next call on, and end the calls that it has under way."""
    answer = _ask(state, "revoke", site=site)
    said = (
        "is revoked" if answer["was_in_good_standing"] else "has no certificate in use; its invitation no longer works"
    )
    say(f"Site `{site}` {said}")
    say(f"next: its studies go on without it; to let it in again, `coordinator invite {site}`")


@app.command()
def receipts(
    site: Annotated[str, typer.Argument(help="The site whose receipts they are.")],
    state: StateOption,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write them here, one JSON line each, oldest first.")],
    force: ForceOption = False,
) -> None:
    """Write every receipt of a site to a file: the coordinator's side, for an auditor to hold against the ledger."""
    from wardround.local import outputs
    from wardround.signing import canonical

    _require(state)
    outputs.file(out, force=force, keep=[state])
    lines: list[bytes] = []
    answer = _ask(
        state, "receipts", progress=lambda envelope: lines.append(canonical.dumps(envelope) + b"\n"), site=site
    )
    outputs.write(out, lines, force=force, keep=[state])
    say(f"{answer['receipts']} receipts of site `{site}`, and a signed statement of their number, written to {out}")
    say(f"next: at the site, `site-agent audit verify --receipts {out.name}`")


@app.command()
def reopen(
    site: Annotated[str, typer.Argument(help="The site that opened a new ledger.")],
    ledger: Annotated[str, typer.Option(metavar="ID", help="The new ledger's id, as the site's people read it out.")],
    state: StateOption,
) -> None:
    """Confirm that a site keeps a new ledger from now on. Ask its people why, by a way that you trust, before."""
    answer = _ask(state, "reopen", site=site, ledger=ledger)
    say(f"Site `{site}` keeps ledger {answer['ledger']} from now on; {answer['before'] or 'none'} is refused")
    say("next: the site runs `site-agent run` again")


@study_app.command("check")
def study_check(file: FileArgument, setting: SetOption = None) -> None:
    """Check a study file and print the study with all its defaults. Of several networks, whether they share alike."""
    resolved = _resolved(file, setting)
    if resolved.networks and find_spec("torch") is not None:
        with tempfile.TemporaryDirectory(prefix="wardround-initial-") as folder:
            _make_initial(file, Path(folder), setting)  # which compares what the networks share
    print_json(resolved.document())
    section = resolved.study
    say(f"{file.name}: {section.rounds} rounds of {resolved.algorithm.name}, sites {', '.join(section.sites)}")
    for bound in resolved.bounds():
        say(f"limit: {bound}")


@study_app.command("create")
def study_create(
    file: FileArgument,
    state: StateOption,
    initial: Annotated[
        Path | None, typer.Option(metavar="FILE.safetensors", help="The initial shared tensors, of `fl-lab init`.")
    ] = None,
    public_data: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="The public data set, for a method that distills here (.csv, .npz)."),
    ] = None,
    setting: SetOption = None,
) -> None:
    """Make a study known to its sites. Prints its id and its digest."""
    _require(state)
    resolved = _resolved(file, setting)
    with tempfile.TemporaryDirectory(prefix="wardround-initial-") as folder:
        path = initial.resolve() if initial is not None else _make_initial(file, Path(folder), setting)
        here = None if public_data is None else str(public_data.resolve())
        answer = _ask(state, "create", document=resolved.document(), initial=str(path), public_data=here)
    print(f"{answer['id']} {answer['study_digest']}", flush=True)
    if not answer["new"]:
        say(f"Study `{answer['id']}` is known with exactly this content, at revision {answer['revision']}")
    else:
        say(
            f"Study `{answer['id']}`, revision {answer['revision']}: {answer['bytes_per_round']} bytes each way a round"
        )
    if answer["not_enrolled"]:
        say(f"Not enrolled yet: {', '.join(answer['not_enrolled'])}")
    say(f"next: each site runs `site-agent approve {answer['id']} --data NAME`")
    say(f"then: `coordinator study start {answer['id']}`")


@study_app.command("start")
def study_start(study: StudyArgument, state: StateOption) -> None:
    """Start a study, or go on with a paused one. It begins when all its sites are ready."""
    _say_standing(_ask(state, "start", study=study))


@study_app.command("stop")
def study_stop(study: StudyArgument, state: StateOption) -> None:
    """Stop a study for good. The models made so far stay."""
    _say_standing(_ask(state, "stop", study=study))


@study_app.command("status")
def study_status(
    study: StudyArgument,
    state: StateOption,
    as_json: JsonOption = False,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the study has ended or paused.")] = False,
) -> None:
    """Show how a study stands. With --follow, exits 3 if it finished without some sites, 78 if it paused."""
    if not follow:
        status = _ask(state, "status", study=study)
        print_json(status) if as_json else _print_status(status)
        return
    show: Callable[[Any], None] = _print_line if not as_json else lambda one: print(json.dumps(one), flush=True)
    status = _ask(state, "follow", progress=show, timeout_s=None, study=study)
    _end(status)


@study_app.command("report")
def study_report(
    study: StudyArgument,
    state: StateOption,
    as_json: JsonOption = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write the report as a page.")] = None,
    force: ForceOption = False,
) -> None:
    """Show who contributed to which round, and write it as a page. Exits 3 when it finished without some sites."""
    from coordinator.studies.page import page
    from wardround.local import outputs

    _require(state)
    if out is not None:
        outputs.file(out, force=force, keep=[state])
    told = _ask(state, "report", study=study)
    if out is not None:
        outputs.write(out, page(told).encode(), force=force, keep=[state], mode=0o644)
        say(f"Report written to {out}")
    if as_json:
        print_json(told)
    else:
        _print_status(told)
        for bound in told["limits"]:
            print(f"limit: {bound}")
        _print_table(
            ("round", "outcome", "contributed", "did not", "seconds"),
            [
                (
                    "closing" if row["closing"] else f"{row['round']}.{row['attempt']}", row["outcome"],
                    " ".join(row["contributors"]), " ".join(s for s in row["asked"] if s not in row["contributors"]),
                    "" if row["seconds"] is None else f"{row['seconds']:.2f}",
                )
                for row in told["attempts"]
            ],
        )  # fmt: skip
    if told["incomplete"]:
        raise typer.Exit(INCOMPLETE)


def main() -> None:
    """The command."""
    run(app)


def _ask(
    state: Path,
    command: str,
    *,
    progress: Callable[[Any], None] | None = None,
    timeout_s: float | None = 120,
    **fields: Any,
) -> Any:
    """Ask the running service; when none runs, own the state directory for as long as it takes.

    Raises:
        NeedsPerson: there is no coordinator at ``state``.
        WardroundError: what the command itself says.
    """
    from wardround.local import control, directory

    request = {"command": command, **fields}
    socket = state / "control.sock"
    directory.refuse_other(state, "coordinator")  # a site's agent that runs there would answer
    if control.is_listening(socket):
        return control.call(socket, request, progress, timeout_s=timeout_s)
    _require(state)
    if command == "follow":
        raise Unavailable(
            f"the coordinator at {state} does not run", hint=f"`coordinator serve --state {quoted(state)}`"
        )
    return _do_alone(state, request, progress or (lambda item: None))


def _require(state: Path) -> None:
    """Raises NeedsPerson: there is no coordinator at ``state``, or this user may not look."""
    from wardround.local import directory

    directory.refuse_other(state, "coordinator")
    if not directory.exists(state / directory.COORDINATOR):
        raise NeedsPerson(
            f"{state} holds no coordinator",
            hint=f"make one: `coordinator init --state {quoted(state)} --federation NAME --address HOST:PORT`",
        )


def _do_alone(state: Path, request: dict[str, Any], progress: Callable[[Any], None]) -> Any:
    from coordinator.administration import Operations, Parts, ends_here
    from coordinator.state_directory import State
    from wardround.local.durable import StateLock

    with StateLock(state, f"coordinator {request['command']}"):
        parts = Parts(State(state), clock=time.time, ticks=time.monotonic, fatal=ends_here)
        try:
            return Operations(parts).run(request, progress)
        finally:
            parts.close()


def _resolved(file: Path, settings: list[str] | None) -> Any:
    from wardround.records import study

    return resolve(study.load(file, settings), source=file.name)


def _make_initial(file: Path, folder: Path, settings: list[str] | None) -> Path:
    """Have the lab make the initial tensors, in a process of its own: this one stays without torch.

    Raises:
        NeedsPerson: torch is not installed here. BadData: the lab could not make them.
    """
    by_hand = f"where it is: `fl-lab init {file.name} --out initial.safetensors`; here: `--initial initial.safetensors`"
    if find_spec("torch") is None:
        raise NeedsPerson("making a study's initial model needs torch, which is not installed here", hint=by_hand)
    folder.chmod(0o755)  # the service that reads it may be another user; nothing in it is secret
    out = folder / "initial.safetensors"
    line = [
        sys.executable,
        "-P",
        "-c",
        MAKE_INITIAL,
        "init",
        str(file.resolve()),
        "--out",
        str(out),
        *(word for setting in settings or [] for word in ("--set", setting)),
    ]
    try:
        done = subprocess.run(
            line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=INITIAL_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise BadData(f"`fl-lab init {file.name}` did not end in {INITIAL_S} s", hint=by_hand) from None
    if done.returncode != 0 or not out.exists():
        first = next((row.removeprefix("error: ") for row in done.stderr.splitlines() if row.startswith("error: ")), "")
        hint = next(
            (row.removeprefix("hint: ") for row in done.stderr.splitlines() if row.startswith("hint: ")), by_hand
        )
        raise BadData(f"`fl-lab init {file.name}` failed: {first or f'exit code {done.returncode}'}", hint=hint)
    out.chmod(0o644)
    return out


def _seconds(span: str) -> int:
    match = _SPAN.fullmatch(span)
    if not match:
        raise UsageProblem(f"`--expires {span[:40]}` is not a span of time", hint="as in 30m, 24h or 7d")
    return int(match[1]) * _SECONDS[match[2]]


def _end(status: dict[str, Any]) -> None:
    if status["incomplete"]:
        say(f"Finished without some sites in some rounds: {', '.join(status['incomplete'])}")
        raise typer.Exit(INCOMPLETE)
    if status["state"] == "paused":
        raise NeedsPerson(
            f"study `{status['id']}` is {status['state']}: {status['why']}",
            hint=f"`coordinator study report {status['id']}` says who did what",
        )


def _say_standing(status: dict[str, Any]) -> None:
    not_ready = [site for site, row in status["sites"].items() if not row["ready"]]
    waiting = f", waiting for {', '.join(not_ready)}" if status["state"] == "waiting" and not_ready else ""
    say(f"Study `{status['id']}` is {status['state']}{waiting}")
    say(f"next: `coordinator study status {status['id']} --follow`")


def _print_line(status: dict[str, Any]) -> None:
    """One line of progress."""
    where = "closing" if status["closing"] else f"round {status['round']}/{status['rounds']}"
    again = f" (attempt {status['attempt']})" if status["attempt"] > 1 else ""
    marks = "  ".join(f"{site}: {row['state']}" for site, row in status["sites"].items())
    print(f"{status['state']}  {where}{again}  {marks}", flush=True)


def _print_status(status: dict[str, Any]) -> None:
    best = f"; best global model of round {status['best']['round']}" if status["best"] else ""
    print(f"{status['id']} (revision {status['revision']}): {status['state']}, ", end="")
    print(f"round {status['round']} of {status['rounds']}{best}")
    if status["why"]:
        print(status["why"])
    print(f"study {status['study_digest']}\nmodel {status['model_digest']}")
    rows = [
        (site, row["state"], f"{len(row['rounds_contributed'])}/{status['rounds']}", row["code"])
        for site, row in status["sites"].items()
    ]
    _print_table(("site", "state", "rounds", "code"), rows)
    for site, row in status["sites"].items():
        if row["rounds_left_out"]:
            print(f"accepted and left out of the model: {site} in {_rounds(row['rounds_left_out'])}")
        if row["rounds_capped"]:
            print(f"counted for less than its rows: {site} in {_rounds(row['rounds_capped'])}")
    if status["incomplete"]:
        print(f"not in every round: {', '.join(status['incomplete'])}")


def _rounds(numbers: Sequence[int]) -> str:
    return f"round {numbers[0]}" if len(numbers) == 1 else f"rounds {', '.join(map(str, numbers))}"


def _print_table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*heads, box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    Console(markup=False, highlight=False, emoji=False, soft_wrap=True).print(table)


if __name__ == "__main__":
    main()
