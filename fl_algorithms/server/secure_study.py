"""Which studies secure aggregation goes with: those whose coordinator needs sums alone. No numpy.

What a coordinator cannot do when it sees no single update is refused here, each with its reason, before a study runs.
"""

from fl_algorithms import registry
from fl_algorithms.rows import MEAN, MethodRow
from fl_algorithms.study import ResolvedStudy
from wardround.errors import BadData
from wardround.records.secure_aggregation import SecureAggregationSection
from wardround.records.study import StudyFile

PLUGIN = "its server aggregator is a plug-in's own, which is given single updates"
NOTHING = "nothing is sent"


def why_single(row: MethodRow) -> str:
    """Why a method's coordinator needs single updates; "" where sums are enough."""
    if row.single_updates or row.server == MEAN or registry.is_ours("method", row.name):
        return row.single_updates
    return PLUGIN


def averages(study: ResolvedStudy) -> bool:
    """Whether the next model is the last one and the mean of the updates, and nothing else: a sum gives its bits."""
    brought = study.brought_method
    if brought is not None:
        return brought.aggregates == "mean" and study.aggregation.is_mean
    return (study.method.settings.server_wrapper or study.method.row.server) == MEAN and study.aggregation.is_mean


def summable() -> list[str]:
    """The methods whose coordinator needs sums alone."""
    return [name for name, row in registry.METHODS.items() if not why_single(row) and row.upload != "nothing"]


def secure_aggregation_of(study: StudyFile, row: MethodRow, source: str) -> SecureAggregationSection | None:
    """The study's section with its threshold filled in; None where it has none, or where nothing is sent.

    Raises:
        BadData: the method or a setting needs single updates, a round may have too few of them, the threshold does not
            stand the colluding sites.
    """
    section = study.secure_aggregation
    if section is None or row.upload == "nothing":
        return None
    if why := why_single(row):
        raise BadData(
            f"{source}: algorithm `{row.name}` does not go with [secure_aggregation]: {why}",
            hint=f"one of {', '.join(summable())}",
        )
    _refuse_settings(study, row, source)
    try:
        rules = section.rules(len(study.study.sites))
    except BadData as error:
        raise BadData(f"{source}: [secure_aggregation]: {error.message}", hint=error.hint) from None
    if study.study.needed < rules.threshold:
        raise BadData(
            f"{source}: [secure_aggregation] opens sums of at least {rules.threshold} sites, and the study's rounds "
            f"close with {study.study.needed}",
            hint=f"`quorum` of at least {rules.threshold} in [study], or none",
        )
    return section.model_copy(update={"threshold": rules.threshold})


def _refuse_settings(study: StudyFile, row: MethodRow, source: str) -> None:
    limits = study.limits
    found = hint = ""
    if not study.aggregation.is_mean:
        found = f"rule `{study.aggregation.rule}` in [aggregation] compares single updates, which nobody sees"
        hint = "leave [aggregation] out"
    elif limits.norm_multiple:
        found = "`norm_multiple` in [limits] compares the norms of single updates, which nobody sees"
        hint = "`norm_multiple = 0`; `range` in [secure_aggregation] limits each value at its own site"
    elif limits.max_weight < 1 and study.reported.counts != "uniform":
        found = f"`max_weight` {limits.max_weight:g} in [limits] compares the rows of single sites, which nobody sees"
        hint = '`counts = "uniform"` in [reported]: each site counts alike; or `max_weight = 1.0` in [limits]'
    elif study.networks and row.heterogeneous:
        found = "sites whose networks share different tensors have no common sum"
        hint = "leave [networks] out, or a method that exchanges predictions or a bypass"
    if found:
        raise BadData(f"{source}: with [secure_aggregation], {found}", hint=hint)
