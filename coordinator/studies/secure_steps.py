"""Where an attempt with secure aggregation goes next: pure judgements beside ``lifecycle``, which asks them.

    keys ──▶ shares ──▶ training ──▶ agreement ──▶ opening ──▶ the sum
      too few by the deadline: void     │
                                        └ from here on nothing is void: it waits until enough sites have come back

Keys are closed when all who were asked have told theirs, or at a quarter of the round's time; shares at its half; with
too few of them, each waits until the round's deadline.
"""

from dataclasses import replace
from enum import StrEnum

from coordinator.studies.state import Round, Rules, Step

CLOSED_BY = {Step.KEYS: 0.25, Step.SHARES: 0.5}  # of the time from a round's opening to its deadline


class End(StrEnum):
    """How an attempt ends."""

    VOID = "void"  # too few went on, and nothing was opened
    SUM = "sum"  # the sum can be made
    STUCK = "stuck"  # so many do not sign or open that too few are left


def begun(opened: Round) -> Round:
    """The first step of a new attempt."""
    return _entered(opened, Step.KEYS)


def resumed(waiting: Round, now_s: float, deadline_s: float) -> Round:
    """An attempt whose set was chosen before its study paused: it goes on where it was."""
    return replace(waiting, unwilling={}, opened=now_s, deadline=now_s + deadline_s)


def told(current: Round, site: str, step: Step, *, is_open: bool) -> Round:
    """A site did what a step wants. Of a step that is over, it changes nothing here."""
    if current.step != step or site in current.told:
        return replace(current, is_open=True) if is_open and not current.is_open else current
    return replace(current, told=tuple(sorted({*current.told, site})), is_open=current.is_open or is_open)


def unwilling(current: Round, site: str, code: str) -> Round:
    """A site of the group says that it does not sign or open."""
    if not current.waits or site not in current.group or site in current.told:
        return current
    return replace(current, unwilling={**current.unwilling, site: code})


def following(current: Round, rules: Rules, now_s: float) -> Round | End:
    """The attempt in its next step, or its end; the same object while it waits.

    Asked of an attempt that is training only when that is over.
    """
    late = now_s >= current.deadline
    match current.step:
        case Step.KEYS | Step.SHARES:
            return _closed(current, rules, now_s, late=late)
        case Step.TRAINING:
            enough = len(current.accepted) >= _needed(current, rules)
            return _entered(current, Step.AGREEMENT) if enough else End.VOID
    if current.closing and late:
        return End.VOID
    if current.is_open:
        return End.SUM
    if current.step == Step.AGREEMENT and len(current.told) >= rules.threshold:
        return _entered(current, Step.OPENING)
    left = set(current.group) - current.unwilling.keys()
    return End.STUCK if len(left) < rules.threshold else current


def why_stuck(current: Round, threshold: int) -> str:
    """In words, for the study's status."""
    refused = ", ".join(f"{site} ({code})" for site, code in sorted(current.unwilling.items()))
    return (
        f"round {current.number} needs {threshold} sites to sign and open its sum, and these do not: {refused}; when "
        "they do, `coordinator study start` goes on with the same sum"
    )


def _closed(current: Round, rules: Rules, now_s: float, *, late: bool) -> Round | End:
    waited = [site for site in current.unanswered if site not in current.told]
    enough = len(current.told) >= _needed(current, rules)
    if waited and now_s < current.step_by:
        return current
    if enough:
        following_step = Step.SHARES if current.step == Step.KEYS else Step.TRAINING
        return _entered(replace(current, group=current.told), following_step)
    if late or not waited:
        return End.VOID
    return current if current.step_by == current.deadline else replace(current, step_by=current.deadline)


def _entered(current: Round, step: Step) -> Round:
    share = CLOSED_BY.get(step)
    step_by = current.deadline if share is None else current.opened + share * (current.deadline - current.opened)
    return replace(current, step=step, step_by=step_by, told=())


def _needed(current: Round, rules: Rules) -> int:
    return rules.threshold if current.closing else max(rules.needed, rules.threshold)
