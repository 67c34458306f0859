"""Whose update waits for a person at its site: it may still come. In memory; every connection says it again."""

from coordinator.studies.study import Study


class HeldUpdates:
    """The updates that wait, of all studies."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, str], tuple[int, int, int]] = {}  # (study, site): revision, round, attempt

    def note(self, study: Study, site: str, round_number: int, attempt: int) -> bool:
        """A site says that its update of an attempt waits. Whether that is news, and of the attempt that is open."""
        current, asked = study.state.open_round, (study.revision, round_number, attempt)
        if not current or (current.number, current.attempt) != asked[1:] or site not in current.unanswered:
            return False
        known = self._asked.get((study.name, site))
        self._asked[study.name, site] = asked
        return known != asked

    def of(self, study: Study) -> frozenset[str]:
        """The sites whose update of the round under way waits."""
        if (current := study.state.round) is None:
            return frozenset()
        asked = (study.revision, current.number, current.attempt)
        return frozenset(site for site in current.unanswered if self._asked.get((study.name, site)) == asked)
