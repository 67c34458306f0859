"""A study's full report as one page: how it stands and who took part, then the rounds that show it.

Participation is told truthfully: a site's round counts as contributed where its update is in that round's model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from coordinator.answers import AttemptReport, SiteReport, StudyReport
from coordinator.studies.state import Outcome, Phase
from wardround.pages import rendering
from wardround.pages.blocks import Answer, Block, Claim, Facts, Grid, Heading, Page, Paragraph, Tone
from wardround.pages.charts import LineChart, line_chart

MOST_COLUMNS = 40  # attempts in the table of marks
LEGEND = (
    "● in the model",
    "◐ in the model, for less than its rows would count",
    "○ accepted, and no model of this attempt has it",
    "✓ its numbers alone: of the closing round, or of a site that evaluates",
    "✕ refused",
    "– declined or withdrawn",
    "? no answer",
    "empty: not asked",
)


@dataclass(frozen=True)
class SiteFacts:
    """``contributed``: the rounds whose model has this site's update in it. ``evaluated``: those whose model, as it
    began, it has judged, where it only ``evaluates``.
    """

    name: str
    state: str
    contributed: tuple[int, ...]
    left_out: tuple[int, ...]
    capped: tuple[int, ...]
    bytes_received: int
    refused: tuple[str, ...]
    evaluates: bool
    evaluated: tuple[int, ...]


@dataclass(frozen=True)
class AttemptFacts:
    """One attempt at a round. ``answers``: what each site that answered did, in words."""

    round: int
    attempt: int
    closing: bool
    outcome: str
    asked: tuple[str, ...]
    contributors: tuple[str, ...]
    answers: Mapping[str, str]
    refused: tuple[str, ...]
    shares: Mapping[str, float]
    capped: tuple[str, ...]
    left_out: Mapping[str, str]
    seconds: float | None
    loss: float | None
    model: str

    @property
    def label(self) -> str:
        number = "closing" if self.closing else str(self.round)
        return number if self.attempt <= 1 else f"{number}.{self.attempt}"


@dataclass(frozen=True)
class StudyFacts:
    title: str
    phase: Phase
    why: str
    round: int
    rounds: int
    federation: str
    reported_at: str
    best: tuple[int, float] | None  # the round and loss of the best global model
    limits: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    digests: tuple[tuple[str, str], ...]
    sites: tuple[SiteFacts, ...]
    attempts: tuple[AttemptFacts, ...]

    @property
    def closed(self) -> list[int]:
        """The rounds that have a model."""
        return [row.round for row in self.attempts if row.outcome == Outcome.CLOSED and not row.closing]

    @property
    def absent(self) -> list[SiteFacts]:
        """The sites that train and are not in every model that was made."""
        return [site for site in self.trainers if len(site.contributed) < len(self.closed)]

    @property
    def trainers(self) -> list[SiteFacts]:
        return [site for site in self.sites if not site.evaluates]

    @classmethod
    def from_report(cls, report: StudyReport) -> "StudyFacts":
        """What the page shows of a report."""
        best, tensors = report.best, len(report.tensors)
        evaluators = sum(site.evaluates for site in report.sites.values())
        quorum = f"quorum {report.quorum} of {len(report.sites) - evaluators} sites"
        quorum += f", and {evaluators} that only evaluate{'s' if evaluators == 1 else ''}" if evaluators else ""
        return cls(
            title=report.title or report.id,
            phase=Phase(report.state),
            why=report.why,
            round=report.round,
            rounds=report.rounds,
            federation=report.federation,
            reported_at=report.told_at,
            best=(best.round, best.val_loss) if best else None,
            limits=report.limits,
            facts=(
                ("Study", f"{report.id}, revision {report.revision}, federation {report.federation}"),
                ("Created", report.created),
                ("Method", f"{report.algorithm} on model {report.model}; {quorum}"),
                ("Each update", f"{report.bytes_per_update:,} bytes in {tensors} tensors"),
                ("Best global model", report.best_rule or "none: this method makes no one global model"),
            ),
            digests=(
                ("Study digest", report.study_digest),
                ("Initial model", report.initial_digest),
                ("Newest model", report.model_digest),
            ),
            sites=tuple(_site(name, site) for name, site in report.sites.items()),
            attempts=tuple(map(_attempt, report.attempts)),
        )


def page(report: StudyReport) -> str:
    """The full report as one HTML file: no scripts, nothing fetched, fit for paper."""
    study = StudyFacts.from_report(report)
    blocks = (_answer(study), *_head(study), *_losses(study), *_participation(study), *_rounds(study))
    return rendering.html(Page(study.title, f"Study report · federation {study.federation}", blocks))


def _site(name: str, site: SiteReport) -> SiteFacts:
    refused = (f"round {upload.round}: {upload.code} {upload.tensor}".strip() for upload in site.refused)
    return SiteFacts(
        name=name,
        state=f"{site.state} ({site.code})" if site.code else site.state,
        contributed=tuple(number for number in site.rounds_contributed if number not in site.rounds_left_out),
        left_out=site.rounds_left_out,
        capped=site.rounds_capped,
        bytes_received=site.bytes_received,
        refused=tuple(refused),
        evaluates=site.evaluates,
        evaluated=site.rounds_evaluated,
    )


def _attempt(row: AttemptReport) -> AttemptFacts:
    return AttemptFacts(
        round=row.round,
        attempt=row.attempt,
        closing=row.closing,
        outcome=row.outcome,
        asked=row.asked,
        contributors=tuple(site for site in row.contributors if site not in row.left_out),
        answers={
            site: f"{answer.answer} {answer.code} {answer.tensor}".strip() for site, answer in row.answers.items()
        },
        refused=tuple(site for site, answer in row.answers.items() if answer.answer == "refused"),
        shares=row.shares,
        capped=row.capped,
        left_out=row.left_out,
        seconds=row.seconds,
        loss=row.val_loss,
        model=row.model_digest or "",
    )


def _answer(study: StudyFacts) -> Answer:
    """How the study stands, and whether every site is in every model."""
    closed = len(study.closed)
    said = {
        Phase.CREATED: "Created; it has not been started",
        Phase.WAITING: "Waiting for its sites to be ready",
        Phase.RUNNING: f"Running: round {study.round} of {study.rounds}",
        Phase.PAUSED: f"Paused in round {study.round} of {study.rounds}",
        Phase.FINISHED: f"Finished: {closed} of {study.rounds} rounds",
        Phase.STOPPED: f"Stopped after {closed} of {study.rounds} rounds",
    }[study.phase]
    if study.phase == Phase.FINISHED:
        said += f", {len(study.trainers) - len(study.absent)} of {len(study.trainers)} sites in every one"
    missing = f"Not in every round: {', '.join(site.name for site in study.absent)}. " if study.absent else ""
    because = f"{study.why}. " if study.why else ""
    tone: Tone = "plain"
    if study.phase in (Phase.PAUSED, Phase.STOPPED):
        tone = "bad"
    elif study.absent:
        tone = "open"
    elif study.phase == Phase.FINISHED:
        tone = "good"
    return Answer(tone, f"{said}.", f"{missing}{because}As of {study.reported_at}.", _claims(study))


def _claims(study: StudyFacts) -> tuple[Claim, ...]:
    closed, absent = len(study.closed), study.absent
    present = f"{len(study.trainers) - len(absent)} of {len(study.trainers)} sites in every model"
    lacking = "; ".join(f"{site.name} in {len(site.contributed)} of {closed}" for site in absent)
    capped = "; ".join(f"{site.name} in {_rounds_of(site.capped)}" for site in study.sites if site.capped)
    refused = sum(len(site.refused) for site in study.sites)
    left_out = sum(len(site.left_out) for site in study.sites)
    return (
        Claim("Participation", "open" if absent else "good", "; ".join(filter(None, (present, lacking))))
        if closed
        else Claim("Participation", "plain", "no round has a model yet"),
        Claim("Capped shares", "open" if capped else "good", capped or "none: every update counts for its whole share"),
        Claim(
            "Refused or left out", "open" if refused or left_out else "good",
            f"{refused} refused, {left_out} accepted and left out" if refused or left_out else "none",
        ),
        Claim(
            "Best global model", "plain",
            f"round {study.best[0]}, validation loss {study.best[1]:.4g}" if study.best else "none",
        ),
    )  # fmt: skip


def _head(study: StudyFacts) -> Iterator[Block]:
    yield Facts((*study.facts, ("Limits", "; ".join(study.limits))))
    yield Facts(study.digests, codes=True)


def _losses(study: StudyFacts) -> Iterator[Block]:
    yield Heading("Validation loss of each model")
    yield _loss_chart(study) or Paragraph("Too few rounds have reported a loss that can be drawn.")


def _loss_chart(study: StudyFacts) -> LineChart | None:
    """One point for each model that sites validated; where a round was tried again, what its last attempt reported."""
    losses = {row.round - 1: row.loss for row in study.attempts if row.loss is not None}
    note = (
        "Each site validates a round's base model on its own validation rows; the mean counts sites by these rows, "
        "under the study's limit of one site's share. The values' axis need not begin at 0."
    )
    marked = study.best[0] if study.best else None
    if study.best:
        note += f" The ring is the best global model, round {marked}."
    return line_chart(
        "Validation loss by round", sorted(losses.items()), x_label="model after round (0: the initial model)",
        y_label="validation loss, mean over the sites, no unit", note=note, marked=marked,
    )  # fmt: skip


def _participation(study: StudyFacts) -> Iterator[Block]:
    yield Heading("Sites")
    columns = ("site", "state", "rounds in the model", "left out", "capped", "bytes received", "refused")
    closed = len(study.closed)
    rows = tuple(
        (
            site.name, site.state, _share(site, closed), _rounds_of(site.left_out) or "never",
            _rounds_of(site.capped) or "never", f"{site.bytes_received:,}", ", ".join(site.refused) or "none",
        )
        for site in study.sites
    )  # fmt: skip
    yield Grid(columns, rows, numbers=(2, 5))
    if 0 < len(study.attempts) <= MOST_COLUMNS:
        yield Heading("Who took part in which round", 3)
        marks = tuple((site.name, *(_mark(site.name, row) for row in study.attempts)) for site in study.sites)
        yield Grid(("site", *(row.label for row in study.attempts)), marks, numbers=(), narrow=True)
        yield Paragraph("; ".join(LEGEND) + ".", faint=True)


def _share(site: SiteFacts, closed: int) -> str:
    """In how many models it is; of a site that evaluates, how often it has judged one."""
    if site.evaluates:
        return f"evaluates: {len(site.evaluated)} times"
    return f"{len(site.contributed)} of {closed}"


def _mark(site: str, row: AttemptFacts) -> str:
    """What became of a site in an attempt, as one of the marks of ``LEGEND``."""
    if site in row.contributors and row.closing:
        return "✓"
    if site in row.contributors and row.outcome == Outcome.CLOSED:
        return "◐" if site in row.capped else "●"
    if site in row.contributors or site in row.left_out:
        return "○"
    if row.answers.get(site) == "evaluated":
        return "✓"
    if site in row.answers:
        return "✕" if site in row.refused else "–"
    return "?" if site in row.asked else ""


def _rounds(study: StudyFacts) -> Iterator[Block]:
    yield Heading("Rounds")
    columns = ("round", "attempt", "outcome", "contributed", "did not", "seconds", "loss of base", "model")
    yield Grid(columns, tuple(map(_round_row, study.attempts)), numbers=(1, 5, 6), codes=(7,))


def _round_row(row: AttemptFacts) -> tuple[str, ...]:
    return (
        "closing" if row.closing else str(row.round),
        str(row.attempt),
        row.outcome,
        ", ".join(_contributor(site, row) for site in row.contributors),
        "; ".join(_absence(site, row) for site in row.asked if site not in row.contributors),
        "" if row.seconds is None else f"{row.seconds:.2f}",
        "" if row.loss is None else f"{row.loss:.4g}",
        row.model,
    )


def _contributor(site: str, row: AttemptFacts) -> str:
    return f"{site} (counts for {row.shares[site]:.3g}, less than its rows)" if site in row.capped else site


def _absence(site: str, row: AttemptFacts) -> str:
    if site in row.left_out:
        return f"{site}: accepted and left out, {row.left_out[site]}"
    return f"{site}: {row.answers.get(site, 'no answer')}"


def _rounds_of(numbers: Sequence[int]) -> str:
    """ "round 3", "rounds 3, 4", or how many where that is long."""
    if len(numbers) > 8:
        return f"{len(numbers)} rounds"
    return f"round{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}" if numbers else ""
