"""``coordinator study``: make, start, stop and look at studies."""

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.asking import ask, refuse_no_coordinator
from coordinator.cli.backups import renew_one
from coordinator.cli.edit import edit
from coordinator.cli.initial import has_torch, make_initial
from coordinator.cli.metrics import metrics
from coordinator.cli.new_study import new
from coordinator.cli.options import Force, State
from coordinator.cli.printing import print_fits, print_progress, print_report, print_status, print_studies
from coordinator.cli.second_person import waiting
from wardround.cli import Json, group, print_json, say
from wardround.errors import BadData, NeedsPerson, UsageProblem
from wardround.signing import canonical

if TYPE_CHECKING:
    from coordinator.study_answers import StudyStatus
    from fl_algorithms.study import ResolvedStudy

RESOLVED = ".json"
INCOMPLETE = 3  # exit code: finished without some sites in some rounds

app = group("Make, start, stop and look at studies.")
Setting = Annotated[
    list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Change a key of the study, as in the lab.")
]
Study = Annotated[str, typer.Argument(metavar="ID", help="The study's name.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="The study file (TOML).")]
FileOrResolved = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="The study file (TOML); or, as .json, what `coordinator study check` printed."),
]


@app.command()
def check(file: File, setting: Setting = None) -> None:
    """Check a study file and print it with all defaults. Several networks must share the same parts."""
    study = _resolved(file, setting)
    if study.networks and has_torch():
        with tempfile.TemporaryDirectory(prefix="wardround-initial-") as folder:
            make_initial(file, Path(folder), setting)  # which compares what the networks share
    print_json(study.document())
    section = study.study
    say(f"{file.name}: {section.rounds} rounds of {study.method.name}, sites {', '.join(section.sites)}")
    for limit in study.file.bounds():
        say(f"limit: {limit}")
    if not setting:
        say(f"next: `coordinator study create {file}`")


@app.command()
def create(
    file: FileOrResolved,
    state: State,
    initial: Annotated[
        Path | None, typer.Option(metavar="FILE.safetensors", help="The initial shared tensors, made by `fl-lab init`.")
    ] = None,
    public_data: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="The public data set, where the method distills here (.csv, .npz)."),
    ] = None,
    setting: Setting = None,
) -> None:
    """Offer a study to its sites. Prints its id and its digest."""
    from coordinator.answers import StudyCreated
    from coordinator.requests import CreateStudy

    refuse_no_coordinator(state)
    study = _resolved(file, setting) if file.suffix != RESOLVED else resolved_elsewhere(file, initial, setting)
    with tempfile.TemporaryDirectory(prefix="wardround-initial-") as folder:
        path = initial.resolve() if initial is not None else make_initial(file, Path(folder), setting)
        here = None if public_data is None else str(public_data.resolve())
        request = CreateStudy(document=study.document(), initial=str(path), public_data=here)
        answer = ask(state, request, StudyCreated)
    print(f"{answer.id} {answer.study_digest}", flush=True)
    if not answer.new:
        say(f"Study `{answer.id}` is known with exactly this content, at revision {answer.revision}")
    else:
        say(f"Study `{answer.id}`, revision {answer.revision}: in each round {answer.bytes_per_round:,} bytes each way")
    if answer.not_enrolled:
        say(f"Not enrolled yet: {', '.join(answer.not_enrolled)}")
        say(f"next: `coordinator invite {' '.join(answer.not_enrolled)}`, if they have no invitation")
    say(f"{'then' if answer.not_enrolled else 'next'}: each site runs `site-agent approve {answer.id} --data NAME`")
    say(f"then: `coordinator study start {answer.id}`")


@app.command()
def start(study: Study, state: State) -> None:
    """Start a study, or continue a paused one. It begins when all its sites are ready."""
    from coordinator.requests import StartStudy
    from coordinator.study_answers import StudyStatus

    _say_state(ask(state, StartStudy(study=study), StudyStatus))


@app.command()
def stop(study: Study, state: State) -> None:
    """Stop a study for good. The models made so far stay."""
    from coordinator.requests import StopStudy
    from coordinator.study_answers import StudyStatus

    _say_state(ask(state, StopStudy(study=study), StudyStatus))


@app.command()
def archive(study: Study, state: State) -> None:
    """Tell no site of an ended study any more. Its models, receipts and report stay here."""
    from coordinator.requests import ArchiveStudy
    from coordinator.study_answers import StudyStatus

    status = ask(state, ArchiveStudy(study=study), StudyStatus)
    say(f"Study `{study}`, which is {status.state}, is archived: no site is told of it, and `study list` leaves it out")
    say(f"next: `coordinator study report {study}` still shows it")


@app.command("list")
def list_studies(
    state: State,
    as_json: Json = False,
    archived: Annotated[bool, typer.Option("--archived", help="Show the archived ones too.")] = False,
) -> None:
    """List the studies."""
    from coordinator.answers import StudyList
    from coordinator.requests import ListStudies

    answer = ask(state, ListStudies(archived=archived), StudyList)
    print_json(answer.document()) if as_json else print_studies(answer)


@app.command()
def renew(study: Study, state: State) -> None:
    """Begin a new revision from the newest model here, where its rounds cannot go on. Each site approves it again."""
    renew_one(state, study)
    say(f"next: each site runs `site-agent approve {study} --data NAME`")
    say(f"then: `coordinator study start {study}`")


@app.command()
def status(
    study: Study,
    state: State,
    as_json: Json = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Print it again after changes, until the study has ended or paused.")
    ] = False,
) -> None:
    """Show how a study stands. With --follow, exits 3 if it finished without some sites, 78 if it paused."""
    from coordinator.requests import FollowStudy, ShowStatus
    from coordinator.study_answers import StudyStatus

    if not follow:
        now = ask(state, ShowStatus(study=study), StudyStatus)
        if as_json:
            print_json(now.document())
            return
        print_status(now)
        for row in waiting(state).waiting:
            if study in (row.about.get("study"), row.about.get("name")):
                print(f"waits for a second person: {row.what}, proposed by {row.by}, until {row.until}")
        return

    def show(document: object) -> None:
        now = StudyStatus.from_document(document)
        print(json.dumps(now.document()), flush=True) if as_json else print_progress(now)

    last = ask(state, FollowStudy(study=study), StudyStatus, progress=show, timeout_s=None)
    _exit_incomplete(last)
    if last.state == "paused":
        raise NeedsPerson(
            f"study `{last.id}` is paused: {last.why}",
            hint=f"`coordinator study report {last.id}` says which site did what",
        )


@app.command()
def fit(study: Study, state: State, as_json: Json = False) -> None:
    """Show whose data fits a study, as far as the sites have said so with `site-agent data fit`."""
    from coordinator.requests import ShowFits
    from coordinator.study_answers import StudyFits

    fits = ask(state, ShowFits(study=study), StudyFits)
    print_json(fits.document()) if as_json else print_fits(fits)


app.command()(metrics)
app.command()(edit)
app.command()(new)


@app.command()
def report(
    study: Study,
    state: State,
    as_json: Json = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write the report as a page.")] = None,
    force: Force = False,
) -> None:
    """Show which site contributed to which round, or write it as a page. Exits 3 if it finished without some sites."""
    from coordinator.requests import ShowReport
    from coordinator.study_answers import StudyReport
    from wardround.local import outputs

    refuse_no_coordinator(state)
    if out is not None:
        outputs.file(out, force=force, keep=[state])
    answer = ask(state, ShowReport(study=study), StudyReport)
    if out is not None:
        from coordinator.studies.metrics import metrics_of
        from coordinator.studies.page import page

        outputs.write(out, page(answer, metrics_of(answer)).encode(), force=force, keep=[state], mode=0o644)
        say(f"Report written to {out}")
    print_json(answer.document()) if as_json else print_report(answer)
    if answer.incomplete:
        raise typer.Exit(INCOMPLETE)


def _resolved(file: Path, settings: list[str] | None) -> "ResolvedStudy":
    from fl_algorithms.resolving import resolve
    from wardround.records import study as study_files

    return resolve(study_files.load(file, settings), source=file.name)


def resolved_elsewhere(file: Path, initial: Path | None, settings: list[str] | None) -> "ResolvedStudy":
    """A study that was resolved where its plug-ins are installed. Each site resolves it again, and refuses another."""
    from fl_algorithms.study import ResolvedStudy
    from wardround.records.study import StudyFile

    if initial is None or settings:
        raise UsageProblem(
            f"{file.name} is a resolved study: it takes `--initial` and no `--set`",
            hint="where its plug-ins are: `fl-lab init STUDY.toml --out initial.safetensors`, and "
            f"`coordinator study check STUDY.toml > {file.name}`",
        )
    try:
        data = file.read_bytes()
    except OSError as error:
        raise BadData(f"{file}: {error.strerror}") from None
    try:
        return ResolvedStudy(StudyFile.from_document(canonical.read(data), file.name), file.name)
    except BadData as error:
        raise BadData(f"{file.name} is no resolved study: {error.message}", hint=error.hint) from None


def _say_state(status: "StudyStatus") -> None:
    not_ready = [name for name, site in status.sites.items() if not site.ready]
    waiting = f" for {', '.join(not_ready)} to approve it" if status.state == "waiting" and not_ready else ""
    say(f"Study `{status.id}` is {status.state}{waiting}")
    if spent := [name for name, site in status.sites.items() if site.attempts_spent]:
        say(f"{', '.join(spent)}: the attempts at round {status.round} that were approved are spent, so no further one")
        say(f"is answered; `coordinator study renew {status.id}` begins a new revision, which each site approves")
    say(f"next: `coordinator study status {status.id} --follow`")


def _exit_incomplete(status: "StudyStatus") -> None:
    if status.incomplete:
        say(f"Finished without some sites in some rounds: {', '.join(status.incomplete)}")
        raise typer.Exit(INCOMPLETE)
