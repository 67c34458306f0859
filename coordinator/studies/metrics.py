"""A study's reported metrics over its rounds, from its report. Judges only."""

from collections.abc import Iterable, Iterator

from coordinator.metric_answers import ModelMeans, ReportedNumbers, StudyMetrics
from coordinator.study_answers import AcceptedUpdate, AttemptReport, StudyReport
from fl_algorithms.server.best import mean_loss
from wardround.records.study import ReportedSection, StudyFile


def metrics_of(report: StudyReport) -> StudyMetrics:
    """What the sites of a study reported, model by model.

    Raises:
        BadData: the report holds no study.
    """
    file = StudyFile.from_document(report.study)
    sums_alone = file.secure_aggregation is not None
    reported = () if sums_alone else tuple(_reported(report.attempts))
    names = _names(file.reported, reported)
    models = sorted({row.model for row in reported})
    by_model = {model: [row for row in reported if row.model == model] for model in models}
    means = tuple(_means(model, rows, names, file.limits.max_weight) for model, rows in by_model.items())
    return StudyMetrics(
        id=report.id, title=report.title, revision=report.revision, state=report.state, rounds=report.rounds,
        sites=tuple(report.sites), metrics=names, counts=file.reported.counts, reported=reported,
        means=tuple(_sums(report.attempts)) if sums_alone else means, sums_alone=sums_alone,
    )  # fmt: skip


def _sums(attempts: Iterable[AttemptReport]) -> Iterator[ModelMeans]:
    """What the sums of a study with secure aggregation say of each model: nothing else was reported."""
    for row in attempts:
        if row.metrics:
            yield ModelMeans(model=row.round - 1, metrics=row.metrics, sites=len(row.contributors))


def _reported(attempts: Iterable[AttemptReport]) -> Iterator[ReportedNumbers]:
    """Each site's numbers of each round, once: an update that a later attempt kept stands in both."""
    newest: dict[tuple[int, str], ReportedNumbers] = {}
    for row in attempts:
        for site, answer in row.answers.items():
            if isinstance(answer, AcceptedUpdate):
                newest[row.round, site] = ReportedNumbers(
                    site=site, model=row.round - 1, round=row.round, attempt=answer.attempt, closing=row.closing,
                    rows=answer.num_examples, validation_rows=answer.num_validation, metrics=answer.metrics,
                    seconds=answer.seconds,
                )  # fmt: skip
    yield from (newest[key] for key in sorted(newest))


def _names(section: ReportedSection, reported: Iterable[ReportedNumbers]) -> tuple[str, ...]:
    """As the study lists them, then whatever else was reported."""
    further = {name for row in reported for name in row.metrics} - set(section.metrics)
    return (*section.metrics, *sorted(further))


def _means(model: int, rows: list[ReportedNumbers], names: Iterable[str], max_weight: float) -> ModelMeans:
    means = {
        name: mean_loss([(row.metrics[name], row.validation_rows) for row in rows if name in row.metrics], max_weight)
        for name in names
    }
    known = {name: mean for name, mean in means.items() if mean is not None}
    return ModelMeans(model=model, metrics=known, sites=len(rows))
