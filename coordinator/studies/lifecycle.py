"""A study's course as a state machine without I/O: what happened goes in, what to do next comes out.

    created ──start──▶ waiting ──all ready, or deadline and quorum──▶ running ──after the closing round──▶ finished
                          ▲                                            │   ▲
                          └──────start, too few ready──── paused ◀─────┘   └──start
    stopped: by the operator. Nothing that a site sends ends a study: what it spoils is left out, or the study pauses.

A round is open until every site that was asked has answered, or until its deadline. It closes when enough answers are
accepted updates; else it is tried once more, and then the study pauses. An accepted update has a receipt, so it counts:
a further attempt at the round keeps it and asks only the others. An update that cannot be averaged is left out by name,
and the round goes on if enough are left; what fails in the coordinator itself pauses the study. After the last round
comes one that only validates.

A site that only evaluates is asked in each round too, and waited for; what it reports is in no model, chooses none and
counts for no quorum.

Where the study measures its deadlines, a round waits ``PATIENCE`` times as long as its slowest site took before, and
four times that for a site that was late when last asked; another attempt has the whole of ``round_deadline_s``. Where
late updates may be finished, the deadline moves on while one of this attempt is arriving, to twice
``round_deadline_s`` at most.

With secure aggregation an attempt has steps, before and after the training: see ``secure_steps``. What it accepted is
masked for it alone, so a further attempt keeps nothing.

Time is a number of seconds on any clock that does not jump; the caller brings it, and who is connected.
"""

from collections.abc import Mapping
from dataclasses import replace

from coordinator.studies import secure_steps
from coordinator.studies.events import (
    Action,
    Aggregate,
    Aggregated,
    Answered,
    Closed,
    Entered,
    Event,
    Expected,
    Gone,
    Halted,
    Now,
    Opened,
    Ready,
    Restarted,
    Resumed,
    Start,
    Stop,
    Tell,
    Told,
    Unusable,
    Unwilling,
)
from coordinator.studies.secure_steps import End
from coordinator.studies.state import ENDED, Answer, Kind, Outcome, Phase, Round, Rules, Step, StudyState
from wardround.records.codes import VETO

ATTEMPTS = 2  # of a round, before the study pauses
PATIENCE, PATIENCE_AFTER_LATE = 4.0, 16.0  # times what the slowest site took
MEASURED = 3  # of the last rounds that a site was accepted in
LEAST_S = 60.0  # of a measured deadline
ARRIVING_S = 10.0  # by which a deadline moves on while a late update is arriving
GRACE_S = 60.0  # after a restart a deadline is at least this far away: the sites must first come back


def advance(state: StudyState, rules: Rules, event: Event, now: Now) -> tuple[StudyState, tuple[Action, ...]]:
    """The state after ``event``, and what to do about it, in order. The same input gives the same output."""
    actions: list[Action] = []
    state = _recorded(state, rules, event, now, actions)
    while True:
        settled = _settled(state, rules, now, actions)
        if settled is state:
            return state, tuple(actions)
        state = settled


def _recorded(state: StudyState, rules: Rules, event: Event, now: Now, actions: list[Action]) -> StudyState:
    """Write down what happened; draw no conclusion yet."""
    match event:
        case Ready(site):
            return replace(state, ready=state.ready | {site})
        case Gone(site, code):
            state = replace(state, ready=state.ready - {site})
            if (current := state.open_round) and site in current.unanswered:
                state = _answered(state, site, Answer(Kind.WITHDRAWN, code))
            return state
        case Answered(site, answer) if state.open_round:
            vetoes = answer.code == VETO and not _overruled(state, site)
            state = _answered(_measured(state, site, answer, now), site, answer)
            return _vetoed(state, site, actions) if vetoes else state
        case Expected() if current := state.open_round:
            if (current.number, current.attempt) == (event.round_number, event.attempt):
                expecting = _expecting(current, rules, event, now)
                return state if expecting is current else replace(state, round=expecting)
        case Told(site, step, is_open) if state.round and not state.aggregating:
            return replace(state, round=secure_steps.told(state.round, site, step, is_open=is_open))
        case Unwilling(site, code) if state.round and not state.aggregating:
            return replace(state, round=secure_steps.unwilling(state.round, site, code))
        case Start() if state.phase in (Phase.CREATED, Phase.PAUSED):
            start_by = now.time + rules.start_deadline_s
            return replace(state, phase=Phase.WAITING, start_by=start_by, tries=0, why="")
        case Stop() if state.phase not in ENDED:
            if state.round:
                actions.append(Closed(state.round, Outcome.STOPPED))
            actions.append(Tell(Phase.STOPPED))
            return replace(
                state, phase=Phase.STOPPED, round=None, aggregating=False, last=state.round or state.last, why=""
            )
        case Aggregated() if state.round and state.aggregating and state.round.closing:
            return _finished(state, actions)
        case Aggregated(left_out) if state.round and state.aggregating:
            return _closed(replace(_without(state, left_out), models=state.round.number), actions)
        case Unusable(why, left_out) if state.round and state.aggregating:
            return _failed(replace(_without(state, left_out), aggregating=False), actions, why)
        case Halted(why) if state.phase in (Phase.WAITING, Phase.RUNNING):
            if state.round and not state.round.waits:
                actions.append(Closed(state.round, Outcome.FAILED))
            actions.append(Tell(Phase.PAUSED))
            return halted(state, why)
        case Restarted():
            return _restarted(state, rules, event, now, actions)
    return state


def _settled(state: StudyState, rules: Rules, now: Now, actions: list[Action]) -> StudyState:
    """The next conclusion from what is known; the same object when there is none."""
    if state.phase == Phase.WAITING:
        return _begun(state, rules, now, actions)
    if state.phase != Phase.RUNNING or state.aggregating:
        return state
    if state.round is None:
        return _opened(state, rules, now, actions)
    if state.round.step != Step.TRAINING:
        return _stepped(state, rules, now, actions)
    if state.round.unanswered and now.time < state.round.deadline:
        return state
    if rules.finish_late and now.arriving & set(state.round.unanswered):
        latest = state.round.opened + 2 * rules.round_deadline_s
        if now.time < latest:
            return replace(state, round=replace(state.round, deadline=min(now.time + ARRIVING_S, latest)))
    if rules.threshold:
        return _stepped(state, rules, now, actions)
    if state.round.closing:
        return _finished(state, actions)
    if len(state.round.accepted) >= rules.needed:
        actions.append(Aggregate(state.round))
        return replace(state, aggregating=True)
    return _failed(state, actions)


def _stepped(state: StudyState, rules: Rules, now: Now, actions: list[Action]) -> StudyState:
    """The next step of an attempt with secure aggregation, or its end."""
    assert state.round
    current = state.round
    following = secure_steps.following(current, rules, now.time)
    if following is current:
        return state
    match following:
        case End.SUM:
            actions.append(Aggregate(current))
            return replace(state, aggregating=True)
        case End.VOID:
            return _finished(state, actions) if current.closing else _failed(state, actions)
        case End.STUCK:
            actions.append(Tell(Phase.PAUSED))
            return halted(state, secure_steps.why_stuck(current, rules.threshold))
        case Round() if following.step != current.step:
            actions.append(Entered(following))
    return replace(state, round=following)


def _begun(state: StudyState, rules: Rules, now: Now, actions: list[Action]) -> StudyState:
    """Waiting ends when all are ready. At the deadline, and when a round was open before, the quorum is enough."""
    enough = len(state.ready - rules.evaluators) >= rules.needed
    if set(rules.sites) <= state.ready or (enough and (state.last or now.time >= state.start_by)):
        return replace(state, phase=Phase.RUNNING)
    if now.time >= state.start_by:
        actions.append(Tell(Phase.PAUSED))
        there = len(state.ready - rules.evaluators)
        why = f"{there} of the {rules.needed} sites that it needs were ready at the start deadline"
        return replace(state, phase=Phase.PAUSED, why=why)
    return state


def _opened(state: StudyState, rules: Rules, now: Now, actions: list[Action]) -> StudyState:
    """Open the next attempt: whoever is ready is asked, but for those that missed the last one and are still away."""
    number, closing = state.models + 1, state.models == rules.rounds
    before = state.last if state.last and state.last.number == number else None
    if before and before.waits:
        resumed = secure_steps.resumed(before, now.time, rules.round_deadline_s)
        actions.append(Resumed(resumed))
        return replace(state, round=resumed)
    kept = {site: before.answers[site] for site in before.accepted} if before and not rules.threshold else {}
    candidates = state.ready - (state.missed - now.connected)
    if not closing and len((candidates | kept.keys()) - rules.evaluators) < rules.needed:
        candidates = state.ready  # only with those that are away can the quorum be met: give them the time
    if not closing and len((candidates | kept.keys()) - rules.evaluators) < rules.needed:
        actions.append(Tell(Phase.PAUSED))
        why = f"{len(state.ready - rules.evaluators)} of the {rules.needed} sites that it needs are ready"
        return replace(state, phase=Phase.PAUSED, why=why)
    opened = Round(
        number=number,
        attempt=before.attempt + 1 if before else 1,
        asked=tuple(sorted(candidates | kept.keys())),
        answers=kept,
        deadline=now.time + _patience_s(state, rules, candidates, again=before is not None),
        closing=closing,
        opened=now.time,
    )
    opened = secure_steps.begun(opened) if rules.threshold else opened
    actions.append(Opened(opened))
    return replace(state, round=opened, tries=state.tries + 1)


def _patience_s(state: StudyState, rules: Rules, asked: frozenset[str], *, again: bool) -> float:
    """How long a round waits for its sites. One of which nothing is known yet has all the time that there is."""
    if not rules.measured or again or not asked or not all(state.took.get(site) for site in asked):
        return rules.round_deadline_s
    wanted_s = max(
        max(state.took[site]) * (PATIENCE_AFTER_LATE if site in state.missed else PATIENCE) for site in asked
    )
    return min(max(wanted_s, LEAST_S), rules.round_deadline_s)


def _expecting(current: Round, rules: Rules, event: Expected, now: Now) -> Round:
    """Where deadlines follow what the sites need, a round waits twice as long as a site says, within its time."""
    known = current.expected.get(event.site, 0.0)
    if event.site not in current.unanswered or abs(now.time + event.left_s - known) < LEAST_S:
        return current
    expected = {**current.expected, event.site: now.time + event.left_s}
    deadline = current.deadline
    if rules.measured:
        deadline = max(deadline, min(now.time + 2 * event.left_s, current.opened + rules.round_deadline_s))
    return replace(current, expected=expected, deadline=deadline)


def _measured(state: StudyState, site: str, answer: Answer, now: Now) -> StudyState:
    """Remember how long an accepted update took."""
    assert state.round
    if answer.kind not in (Kind.ACCEPTED, Kind.EVALUATED):
        return state
    took = (*state.took.get(site, ()), now.time - state.round.opened)[-MEASURED:]
    return replace(state, took={**state.took, site: took})


def _closed(state: StudyState, actions: list[Action]) -> StudyState:
    assert state.round
    ended = state.round
    actions.append(Closed(ended, Outcome.CLOSED))
    summed = state.summed
    if ended.is_open:  # the closing validation makes no model, so the sum before it is the newest model's still
        summed = (*summed[-1:], ended) if ended.closing else (ended,)
    missed = _missed(state, ended)
    return replace(state, round=None, aggregating=False, last=ended, missed=missed, tries=0, summed=summed)


def _finished(state: StudyState, actions: list[Action]) -> StudyState:
    """The closing round needs no quorum: whoever validated the last model has judged it."""
    state = replace(_closed(state, actions), phase=Phase.FINISHED)
    actions.append(Tell(Phase.FINISHED))
    return state


def _failed(state: StudyState, actions: list[Action], why: str = "") -> StudyState:
    """``why``: what to say if that was the last attempt; "" where too few updates were accepted."""
    assert state.round
    actions.append(Closed(state.round, Outcome.FAILED))
    state = replace(state, round=None, last=state.round, missed=_missed(state, state.round))
    if state.tries < ATTEMPTS:
        return state
    assert state.last
    actions.append(Tell(Phase.PAUSED))
    why = why or f"round {state.last.number} had too few accepted updates, {state.last.attempt} times"
    return replace(state, phase=Phase.PAUSED, why=why)


def halted(state: StudyState, why: str) -> StudyState:
    """Paused, with what was accepted kept for the next attempt."""
    return replace(state, phase=Phase.PAUSED, round=None, aggregating=False, last=state.round or state.last, why=why)


def _overruled(state: StudyState, site: str) -> bool:
    """Whether the site's veto of this round's model has paused the study before: it is as any other decline now."""
    assert state.round
    before = state.last.answers.get(site) if state.last and state.last.number == state.round.number else None
    return before is not None and before.code == VETO


def _vetoed(state: StudyState, site: str, actions: list[Action]) -> StudyState:
    assert state.round
    actions += [Closed(state.round, Outcome.FAILED), Tell(Phase.PAUSED)]
    return halted(state, why_vetoed(state.round.number - 1, site))


def why_vetoed(model: int, site: str) -> str:
    """In words, for the study's status."""
    return (
        f"site `{site}` vetoes the model of round {model}: by its own validation it is worse than its policy takes; "
        f"ask its people. `coordinator study start` goes on with this model, without `{site}` as long as it vetoes it"
    )


def _without(state: StudyState, left_out: Mapping[str, str]) -> StudyState:
    for site, code in left_out.items():
        assert state.round
        state = _answered(state, site, replace(state.round.answers[site], kind=Kind.LEFT_OUT, code=code))
    return state


def _missed(state: StudyState, ended: Round) -> frozenset[str]:
    """Who did not answer when last asked: a site that was not asked this time is still as it was."""
    return (state.missed - set(ended.asked)) | set(ended.late)


def _answered(state: StudyState, site: str, answer: Answer) -> StudyState:
    assert state.round
    return replace(state, round=replace(state.round, answers={**state.round.answers, site: answer}))


def _restarted(state: StudyState, rules: Rules, event: Restarted, now: Now, actions: list[Action]) -> StudyState:
    """Deadlines go on from where they were, by the wall clock, but leave the sites time to come back."""

    def left(before_s: float, full_s: float) -> float:
        return now.time + min(max(before_s - event.away_s, min(GRACE_S, full_s)), full_s)

    state = replace(state, start_by=left(event.start_left_s, rules.start_deadline_s))
    if state.round is None:
        return state
    if state.aggregating:
        actions.append(Aggregate(state.round))
        return state
    deadline = left(event.round_left_s, rules.round_deadline_s)
    opened = deadline - (state.round.deadline - state.round.opened)
    later = opened - state.round.opened
    expected = {site: time + later for site, time in state.round.expected.items()}
    step_by = min(deadline, max(state.round.step_by + later, now.time + GRACE_S / 2))
    moved = replace(state.round, deadline=deadline, opened=opened, expected=expected, step_by=step_by)
    return replace(state, round=moved)
