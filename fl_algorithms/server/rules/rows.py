"""The rows of the rules: name, paper, and where the code is. No numpy."""

from dataclasses import dataclass

from fl_algorithms import registry
from fl_algorithms.rows import MEAN, MethodRow
from wardround.errors import BadData
from wardround.records.aggregation import AggregationSection, Rule
from wardround.records.study import StudyFile


@dataclass(frozen=True)
class RuleRow:
    """A rule of [aggregation]. ``implementation`` is called with the section, and gives a ``combining.Combine``.

    Attributes:
        needs, tolerates: of n updates and f = ``bad_sites``, for people; ``AggregationSection`` computes them.
    """

    name: Rule
    title: str
    paper: str
    implementation: str
    needs: str
    tolerates: str
    weighted: bool = False


RULES = {
    row.name: row
    for row in (
        RuleRow(
            "clipped_mean",
            "clipped mean",
            "Sun et al., 2019, https://arxiv.org/abs/1911.07963",
            "fl_algorithms.server.rules.clipped_mean:clipped_mean",
            "3",
            "none: each moves the model by at most its share of the norm",
            weighted=True,
        ),
        RuleRow(
            "median",
            "coordinate-wise median",
            "Yin et al., ICML 2018, https://arxiv.org/abs/1803.01498",
            "fl_algorithms.server.rules.coordinate_wise:median",
            "3",
            "fewer than n / 2",
        ),
        RuleRow(
            "trimmed_mean",
            "coordinate-wise trimmed mean",
            "Yin et al., ICML 2018, https://arxiv.org/abs/1803.01498",
            "fl_algorithms.server.rules.coordinate_wise:trimmed_mean",
            "2 f + 1",
            "f",
        ),
        RuleRow(
            "krum",
            "Krum",
            "Blanchard et al., NeurIPS 2017, https://arxiv.org/abs/1703.02757",
            "fl_algorithms.server.rules.krum:krum",
            "2 f + 3",
            "f",
        ),
        RuleRow(
            "multi_krum",
            "multi-Krum",
            "Blanchard et al., NeurIPS 2017, https://arxiv.org/abs/1703.02757",
            "fl_algorithms.server.rules.krum:krum",
            "2 f + 3",
            "f",
        ),
        RuleRow(
            "geometric_median",
            "geometric median (RFA)",
            "Pillutla et al., IEEE TSP 2022, https://arxiv.org/abs/1912.13445",
            "fl_algorithms.server.rules.geometric_median:geometric_median",
            "3",
            "fewer than n / 2",
        ),
    )
}


def takes_rule(row: MethodRow) -> bool:
    """Whether what a method's coordinator does is a mean, or begins with one, in whose place a rule can stand."""
    return row.server == MEAN and row.upload != "nothing"


def aggregation_of(study: StudyFile, row: MethodRow, source: str) -> AggregationSection:
    """The study's rule as it holds; the mean for a method that sends nothing.

    Raises:
        BadData: the method's coordinator does not take a mean, or the study's rounds may have too few updates.
    """
    asked, section = study.aggregation, study.study
    if asked.is_mean or row.upload == "nothing":
        return AggregationSection()
    if not takes_rule(row):
        fitting = ", ".join(name for name, one in registry.METHODS.items() if takes_rule(one))
        raise BadData(
            f"{source}: rule `{asked.rule}` in [aggregation] stands in place of a mean of the updates, and algorithm "
            f"`{row.name}` has a server aggregator of its own",
            hint=f"leave [aggregation] out, or use one of {fitting}",
        )
    if section.needed < asked.fewest:
        sites = len(section.trainers)
        found = f"the study has {sites} sites"
        if section.needed < sites:
            found = f"the study's rounds close with {section.needed} of its {sites} sites"
        smaller = " with fewer `bad_sites`," if (asked.bad_sites or 0) > 1 else ""
        raise BadData(
            f"{source}: rule `{asked.rule}` in [aggregation]{_as_set(asked)} needs {asked.fewest} updates in each "
            f"round, {found}",
            hint=f"`quorum` of at least {asked.fewest} in [study], with as many sites;{smaller} or another rule: "
            "`fl-lab methods` says what each needs",
        )
    return asked


def _as_set(section: AggregationSection) -> str:
    given = {"bad_sites": section.bad_sites, "chosen": section.chosen}
    shown = ", ".join(f"`{key} = {value}`" for key, value in given.items() if value is not None)
    return f" with {shown}" if shown else ""
