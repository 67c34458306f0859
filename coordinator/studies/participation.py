"""Who took part in a study's rounds and who did not, who is slow, and whose consent is spent. Judges only."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from coordinator.storage import tables
from coordinator.studies.state import ENDED, Kind, Outcome, StudyState
from coordinator.study_answers import Absence
from fl_algorithms.server.limits import LEFT_OUT, Account
from wardround.records.assignment import ATTEMPTS_APPROVED

LATE = "late"
SLOW = 2.0  # times as long as the other sites' median
SLOW_LEAST_S = 10.0  # beyond it: in a round of a few seconds nobody waits for a site


def absences(rounds: Sequence[tables.Round]) -> dict[str, list[Absence]]:
    """Site -> the attempts in which it was asked and its update is in no model, in their order.

    Args:
        rounds: attempts in their order; those that are open, were stopped, or only validate do not count. An update
            that was accepted in an attempt that failed waits for the next one, and is no absence.
    """
    found: dict[str, list[Absence]] = {}
    for row in rounds:
        if row.closed_s is None or row.closing or row.outcome == Outcome.STOPPED:
            continue
        answers = json.loads(row.answers or "{}")
        account = Account.from_document(json.loads(row.account)) if row.account else Account()
        for site in json.loads(row.asked):
            kind, code, _ = answers.get(site, (LATE, "", ""))
            if kind == Kind.EVALUATED or (kind == Kind.ACCEPTED and site not in account.left_out):
                continue
            why, code = (Kind.LEFT_OUT.value, LEFT_OUT) if kind == Kind.ACCEPTED else (str(kind), code)
            found.setdefault(site, []).append(Absence(round=row.number, attempt=row.attempt, why=why, code=code))
    return found


def reasons(absent: Sequence[Absence]) -> dict[str, int]:
    """How often each reason stands among a site's absences: "late", or what it answered and the code."""
    return dict(Counter(f"{absence.why} {absence.code}".strip() for absence in absent))


def attempts_left(state: StudyState) -> int:
    """How often the present round can still be asked before the sites' consents to it are spent."""
    return 0 if state.phase in ENDED else max(0, ATTEMPTS_APPROVED - _attempts(state))


def attempts_spent(state: StudyState) -> frozenset[str]:
    """The sites that were asked for the present round as often as a consent allows, and have no accepted update in it.

    Whatever attempt follows, each of them declines it.
    """
    shown = state.round or state.last
    open_last = state.round is not None and _attempts(state) == ATTEMPTS_APPROVED
    if shown is None or attempts_left(state) or open_last or state.phase in ENDED:
        return frozenset()
    answered = (Kind.ACCEPTED, Kind.EVALUATED)
    return frozenset(
        site for site in shown.asked if site not in shown.answers or shown.answers[site].kind not in answered
    )


def _attempts(state: StudyState) -> int:
    """At the present round, so far."""
    present = state.round or state.last
    return present.attempt if present is not None and present.number == state.models + 1 else 0


def usual_seconds(took: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Each site's median from a round's opening to its accepted update. ``took``: of its last rounds."""
    return {site: median(seconds) for site, seconds in took.items() if seconds}


def slow_sites(seconds: Mapping[str, float]) -> frozenset[str]:
    """The sites that take much longer than the others. ``seconds``: as of ``usual_seconds``."""
    slow = set()
    for site, own in seconds.items():
        others = [other for name, other in seconds.items() if name != site]
        if others and own > SLOW * median(others) and own > median(others) + SLOW_LEAST_S:
            slow.add(site)
    return frozenset(slow)
