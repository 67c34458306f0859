"""Which studies an encoding goes with: those whose coordinator can do its part with rounded values. No numpy.

What does not go together is refused here, each with its reason, before a study runs.
"""

from fl_algorithms import registry
from fl_algorithms.rows import MEAN, MethodRow
from fl_algorithms.server.rules.rows import takes_rule
from wardround.errors import BadData
from wardround.records.encoding import EncodingSection
from wardround.records.study import StudyFile

TOPK_RULES = ("mean", "clipped_mean")  # the others compare updates value by value


def encoding_of(study: StudyFile, row: MethodRow, source: str) -> EncodingSection:
    """The study's encoding as it holds; float32 for a method that sends nothing.

    Raises:
        BadData: the method, its rule of [aggregation] or [secure_aggregation] does not go with it.
    """
    section = study.encoding
    if not section.encoding.is_lossy or row.upload == "nothing":
        return EncodingSection()
    given = f"{source}: encoding `{section.name}` in [encoding]"
    if row.server != MEAN:
        fitting = ", ".join(name for name, one in registry.METHODS.items() if takes_rule(one))
        raise BadData(
            f"{given} rounds what leaves, and the server aggregator of algorithm `{row.name}` is its own: it needs "
            "each value as the site computed it",
            hint=f"leave [encoding] out, or use one of {fitting}",
        )
    if study.secure_aggregation is not None:
        raise BadData(
            f"{given} is decoded one update at a time, and with [secure_aggregation] nobody sees one: its masked "
            "integers are an encoding of their own",
            hint="leave out one of the two",
        )
    if section.name == "topk" and study.aggregation.rule not in TOPK_RULES:
        raise BadData(
            f"{given} leaves out most values of an update, and rule `{study.aggregation.rule}` in [aggregation] would "
            "take each for a zero that a site chose",
            hint="`bfloat16` or `int8` in [encoding], or leave [aggregation] out",
        )
    return section
