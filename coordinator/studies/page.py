"""A study's full report as one page: how it stands and who took part, then the rounds that show it.

Participation is told truthfully: a site's round counts as contributed where its update is in that round's model.
"""

from collections.abc import Iterator, Sequence

from coordinator.metric_answers import VAL_LOSS, StudyMetrics
from coordinator.studies.page_facts import AttemptFacts, SiteFacts, StudyFacts
from coordinator.studies.state import Outcome, Phase
from coordinator.study_answers import StudyReport
from wardround.pages import rendering
from wardround.pages.blocks import Answer, Block, Claim, Facts, Grid, Heading, Page, Paragraph, Tone
from wardround.pages.charts import LineChart, line_chart

MOST_COLUMNS = 40  # attempts in the table of marks
MOST_CHARTS = 12  # of metrics beside the loss
SUMS = (
    "The mean over all validation rows of the sites in each sum. With secure aggregation that is all that is known: "
    "nobody knows one site's."
)
MOST_ABSENCES = 200  # in the table of them
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


def page(report: StudyReport, metrics: StudyMetrics | None = None) -> str:
    """The full report as one HTML file: no scripts, nothing fetched, fit for paper.

    ``metrics``: what the sites reported, as ``metrics_of`` takes it from the report; without it only the loss is drawn.
    """
    return rendering.html(blocks_of(report, metrics))


def blocks_of(report: StudyReport, metrics: StudyMetrics | None = None) -> Page:
    """What the page shows, for a file and for the dashboard. Arguments as of ``page``."""
    study = StudyFacts.from_report(report, metrics)
    blocks = (
        _answer(study), *_head(study), *_losses(study), *_metrics(study), *_participation(study), *_lateness(study),
        *_absences(study), *_rounds(study),
    )  # fmt: skip
    return Page(study.title, f"Study report · federation {study.federation}", blocks)


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
        Claim("Lateness", "open" if any(site.late for site in study.sites) else "good", _late(study) or "none"),
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
    note = SUMS if study.sums_alone else (
        "Each site validates a round's base model on its own validation rows; the mean counts sites by these rows, "
        "under the study's limit of one site's share."
    )  # fmt: skip
    note += " The values' axis need not begin at 0."
    marked = study.best[0] if study.best else None
    if study.best:
        note += f" The ring is the best global model, round {marked}."
    return line_chart(
        "Validation loss by round", sorted(losses.items()), x_label="model after round (0: the initial model)",
        y_label="validation loss, mean over the sites, no unit", note=note, marked=marked,
        further=_curves(study, VAL_LOSS),
    )  # fmt: skip


def _curves(study: StudyFacts, metric: str) -> dict[str, Sequence[tuple[int, float]]]:
    """Each site's curve of a metric."""
    known = study.metrics
    if known is None or known.sums_alone:
        return {}
    return {site: known.curve(metric, site) for site in known.sites}


def _metrics(study: StudyFacts) -> Iterator[Block]:
    """A chart for each metric beside the loss: the mean over the sites, and each site's own line."""
    if study.metrics is None:
        return
    names = [name for name in study.metrics.metrics if name != VAL_LOSS]
    note = SUMS if study.sums_alone else (
        "Each site's numbers are of its own validation rows, and its line is the broken one. The strong line is the "
        "mean by these rows, under the study's limit of one site's share."
    )  # fmt: skip
    charts = [
        line_chart(
            f"{name} by round", study.metrics.mean_curve(name), x_label="model after round (0: the initial model)",
            y_label=f"{name}, mean over the sites", note=note, further=_curves(study, name),
        )
        for name in names[:MOST_CHARTS]
    ]  # fmt: skip
    drawn = [chart for chart in charts if chart is not None]
    if drawn:
        sums = f"What the sums over {study.metrics.summed} hospitals say of each model"
        yield Heading(sums if study.sums_alone else "What the sites reported of each model")
        yield from drawn
    if len(names) > MOST_CHARTS:
        yield Paragraph(f"The first {MOST_CHARTS} of {len(names)} metrics are drawn here.", faint=True)


def _lateness(study: StudyFacts) -> Iterator[Block]:
    """How long each site takes, and in which rounds it did not answer in time."""
    if not any(site.late or site.seconds is not None for site in study.sites):
        return
    yield Heading("Lateness")
    rows = tuple(
        (
            site.name, "" if site.seconds is None else f"{site.seconds:.1f}", _rounds_of(site.late) or "never",
            "always late" if site.always_late else "slow" if site.slow else "",
        )
        for site in study.sites
    )  # fmt: skip
    yield Grid(("site", "seconds a round", "late in", "remark"), rows, numbers=(1,))
    yield Paragraph(
        "Seconds: from a round's opening to the site's accepted update, the median of its last rounds. A site is slow "
        "that takes more than twice as long as the others do, and always late that was so in each of its last three "
        "rounds.",
        faint=True,
    )


def _absences(study: StudyFacts) -> Iterator[Block]:
    """Who was asked and is not in the model, and why, by code."""
    rows = [
        (site.name, str(absence.round), str(absence.attempt), absence.why, absence.code, absence.tensor)
        for site in study.sites
        for absence in site.absent
    ]
    if rows:
        yield Heading("Asked, and not in the model")
        columns = ("site", "round", "attempt", "why", "code", "tensor")
        yield Grid(columns, tuple(rows[-MOST_ABSENCES:]), numbers=(1, 2), codes=(5,))
    if len(rows) > MOST_ABSENCES:
        yield Paragraph(f"The last {MOST_ABSENCES} of {len(rows)}; the JSON report has all.", faint=True)


def _late(study: StudyFacts) -> str:
    return "; ".join(f"{site.name} in {_rounds_of(site.late)}" for site in study.sites if site.late)


def _participation(study: StudyFacts) -> Iterator[Block]:
    yield Heading("Sites")
    columns = ("site", "state", "approved", "rounds in the model", "left out", "capped", "bytes received", "refused")
    closed = len(study.closed)
    rows = tuple(
        (
            site.name, site.state, "attempts spent" if site.spent else "yes" if site.approved else "no",
            _share(site, closed), _rounds_of(site.left_out) or "never",
            _rounds_of(site.capped) or "never", f"{site.bytes_received:,}", ", ".join(site.refused) or "none",
        )
        for site in study.sites
    )  # fmt: skip
    yield Grid(columns, rows, numbers=(3, 6))
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
    return f"{site}: {row.answers.get(site, 'no answer yet' if row.outcome == 'open' else 'no answer')}"


def _rounds_of(numbers: Sequence[int]) -> str:
    """ "round 3", "rounds 3, 4", or how many where that is long."""
    if len(numbers) > 8:
        return f"{len(numbers)} rounds"
    return f"round{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}" if numbers else ""
