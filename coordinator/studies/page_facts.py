"""What a study's page shows of its report, as plain facts."""

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.metric_answers import StudyMetrics
from coordinator.studies.state import Outcome, Phase
from coordinator.study_answers import Absence, AttemptReport, SiteReport, StudyReport


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
    approved: bool
    late: tuple[int, ...]
    always_late: bool
    slow: bool
    seconds: float | None
    spent: bool
    absent: tuple[Absence, ...]
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
    metrics: StudyMetrics | None

    @property
    def sums_alone(self) -> bool:
        """Whether nobody knows what one site reported."""
        return self.metrics is not None and self.metrics.sums_alone

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
    def from_report(cls, report: StudyReport, metrics: StudyMetrics | None = None) -> "StudyFacts":
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
            metrics=metrics,
        )


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
        approved=site.ready,
        late=site.rounds_late,
        always_late=site.always_late,
        slow=site.slow,
        seconds=site.seconds,
        spent=site.attempts_spent,
        absent=site.absent,
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
