"""Whose update of the round under way is on its way here, or waits for a person at the site. In memory: every
connection says it again.
"""

from collections.abc import Collection

from coordinator.studies.study import Study


class Holding:
    """What the sites of all studies have said."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, str], tuple[int, int, int]] = {}  # (study, site): revision, round, attempt

    def note(self, study: Study, site: str, round_number: int, attempt: int) -> bool:
        """Whether it is news that ``site`` holds its update of that round. Of another round or attempt, or after an
        answer, it is none.
        """
        current, asked = study.state.open_round, (study.revision, round_number, attempt)
        if not current or (current.number, current.attempt) != asked[1:] or site not in current.unanswered:
            return False
        news = self._said.get((study.name, site)) != asked
        self._said[study.name, site] = asked
        return news

    def of(self, study: Study) -> frozenset[str]:
        """The sites that hold their update of the study's round under way."""
        if (current := study.state.round) is None:
            return frozenset()
        asked = (study.revision, current.number, current.attempt)
        return frozenset(site for site in current.unanswered if self._said.get((study.name, site)) == asked)


def arriving_for(study: Study, arriving: Collection[tuple[str, int, int, str]]) -> frozenset[str]:
    """The sites whose update of the attempt under way is being received, where the study lets one come late.

    Args:
        arriving: (study, round, attempt, site) of the updates that are being received.
    """
    if (current := study.state.open_round) is None or not study.rules.finish_late:
        return frozenset()
    under_way = (study.name, current.number, current.attempt)
    return frozenset(site for *attempt, site in arriving if tuple(attempt) == under_way)
