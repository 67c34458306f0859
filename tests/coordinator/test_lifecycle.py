"""A study's course, without I/O: events in, actions out."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.studies.events import (
    Action,
    Aggregate,
    Aggregated,
    Answered,
    Clock,
    Closed,
    Event,
    Expected,
    Gone,
    Halted,
    Now,
    Opened,
    Ready,
    Restarted,
    Start,
    Stop,
    Tell,
    Unusable,
)
from coordinator.studies.lifecycle import advance
from coordinator.studies.state import (
    ENDED,
    Answer,
    Kind,
    Outcome,
    Phase,
    Round,
    Rules,
    StudyState,
    site_states,
)

SITES = ("a", "b", "c")
RULES = Rules(SITES, rounds=2, needed=2, round_deadline_s=100, start_deadline_s=1000)
YES = Answer(Kind.ACCEPTED, upload="u")
NO = Answer(Kind.REFUSED, "TENSOR_NOT_FINITE", "u")
DECLINED = Answer(Kind.DECLINED, "DECLINED_DATA_CHANGED")


class Story:
    """A study, and what happened to it so far."""

    def __init__(self, rules: Rules = RULES, connected: tuple[str, ...] = SITES) -> None:
        self.rules = rules
        self.state = StudyState()
        self.time = 0.0
        self.connected = frozenset(connected)
        self.done: list[Action] = []

    def happens(self, *events: Event) -> "Story":
        for event in events:
            self.state, actions = advance(self.state, self.rules, event, Now(self.time, self.connected))
            self.done += actions
        return self

    def passes(self, seconds: float) -> "Story":
        self.time += seconds
        return self.happens(Clock())

    def begins(self) -> "Story":
        return self.happens(*(Ready(site) for site in SITES), Start())

    def accepts(self, *sites: str) -> "Story":
        return self.happens(*(Answered(site, replace(YES, upload=site)) for site in sites))

    @property
    def round(self) -> Round:
        assert self.state.round
        return self.state.round

    def actions(self) -> list[Action]:
        """Those since the last look."""
        done, self.done = self.done, []
        return done


def test_a_study_waits_for_all_its_sites() -> None:
    story = Story().happens(Start(), Ready("a"), Ready("b"))
    assert story.state.phase == Phase.WAITING
    assert story.actions() == []
    story.happens(Ready("c"))
    assert story.state.phase == Phase.RUNNING
    assert story.actions() == [Opened(Round(1, 1, SITES, {}, deadline=100))]


def test_at_the_start_deadline_the_quorum_is_enough() -> None:
    story = Story().happens(Start(), Ready("a"), Ready("c")).passes(999.9)
    assert story.state.phase == Phase.WAITING
    assert story.passes(0.1).round.asked == ("a", "c")


def test_at_the_start_deadline_without_quorum_the_study_pauses_and_says_why() -> None:
    story = Story().happens(Start(), Ready("a")).passes(1000)
    assert story.state.phase == Phase.PAUSED
    assert story.state.why == "1 of the 2 sites that it needs were ready at the start deadline"
    assert story.happens(Start()).state.start_by == 2000


def test_a_round_closes_when_everyone_answered_without_waiting_for_the_deadline() -> None:
    story = Story().begins().accepts("a", "b")
    story.actions()
    story.happens(Answered("c", NO))
    assert [type(action) for action in story.actions()] == [Aggregate]
    story.happens(Aggregated())
    closed, opened = story.actions()
    assert isinstance(closed, Closed)
    assert closed.outcome == Outcome.CLOSED
    assert closed.round.accepted == ("a", "b")
    assert isinstance(opened, Opened)
    assert (opened.round.number, opened.round.attempt) == (2, 1)
    assert story.state.models == 1


def test_a_round_waits_for_the_last_site_although_the_quorum_is_there() -> None:
    story = Story().begins().accepts("a", "b").passes(99)
    assert not story.state.aggregating
    assert story.passes(1).state.aggregating


EVALUATED = Answer(Kind.EVALUATED, upload="c")
JUDGED = replace(RULES, evaluators=frozenset({"c"}))


def test_a_site_that_only_evaluates_counts_for_no_quorum() -> None:
    story = Story(JUDGED).begins()
    assert story.round.asked == SITES
    assert site_states(story.state, JUDGED) == {"a": "training", "b": "training", "c": "evaluating"}
    story.happens(Answered("c", EVALUATED)).accepts("a").passes(100)
    assert story.round.attempt == 2  # of the two that it needs one answered
    assert story.round.asked == SITES  # and what was evaluated is asked anew
    story.accepts("b").happens(Answered("c", EVALUATED))
    assert story.state.aggregating
    assert story.round.accepted == ("a", "b")


def test_a_round_waits_for_a_site_that_evaluates_until_its_deadline() -> None:
    story = Story(JUDGED).begins().accepts("a", "b").passes(99)
    assert not story.state.aggregating
    assert story.passes(1).state.aggregating


def test_sites_that_only_evaluate_begin_no_study() -> None:
    story = Story(JUDGED).happens(Start(), Ready("a"), Ready("c")).passes(1000)
    assert story.state.why == "1 of the 2 sites that it needs were ready at the start deadline"


def test_a_study_of_which_a_trainer_left_pauses_whoever_evaluates() -> None:
    story = Story(JUDGED).begins().happens(Gone("a", "DECLINED_WITHDRAWN")).passes(100)
    assert story.state.why == "1 of the 2 sites that it needs are ready"


def test_a_round_without_quorum_is_tried_once_more_and_then_the_study_pauses() -> None:
    story = Story().begins().accepts("a").passes(100)
    assert (story.round.number, story.round.attempt) == (1, 2)
    assert story.state.phase == Phase.RUNNING
    story.passes(100)
    assert story.state.phase == Phase.PAUSED
    assert story.state.why == "round 1 had too few accepted updates, 2 times"
    assert Tell(Phase.PAUSED) in story.actions()


def test_an_accepted_update_counts_in_the_next_attempt_and_its_site_is_not_asked_again() -> None:
    story = Story().begins().accepts("a").passes(100)
    assert story.round.answers == {"a": replace(YES, upload="a")}
    assert "a" not in story.round.unanswered
    story.accepts("b", "c")
    assert story.state.aggregating
    assert story.round.accepted == SITES


def test_an_accepted_update_counts_after_a_pause_too() -> None:
    story = Story().begins().accepts("a").passes(100).passes(100).happens(Start())
    assert (story.round.attempt, story.round.accepted) == (3, ("a",))


def test_all_refused_or_declined_fails_the_round_at_once() -> None:
    story = Story().begins().happens(*(Answered(site, DECLINED) for site in SITES))
    assert story.round.attempt == 2
    assert story.happens(*(Answered(site, NO) for site in SITES)).state.phase == Phase.PAUSED
    assert site_states(story.state, story.rules) == dict.fromkeys(SITES, "refused")


def test_a_site_that_missed_a_round_and_is_away_is_not_asked_in_the_next() -> None:
    story = Story().begins().accepts("a", "b")
    story.connected = frozenset("ab")
    story.passes(100).happens(Aggregated())
    assert story.round.asked == ("a", "b")
    assert site_states(story.state, story.rules)["c"] == "late"
    story.connected = frozenset(SITES)
    assert story.accepts("a", "b").happens(Aggregated()).round.asked == SITES


def test_a_site_that_went_away_costs_one_deadline_in_all() -> None:
    rounds = 5
    story = Story(replace(RULES, rounds=rounds)).begins()
    story.connected = frozenset("ab")
    story.accepts("a", "b").passes(100).happens(Aggregated())
    for _ in range(rounds - 1):
        story.accepts("a", "b").happens(Aggregated())
    assert story.accepts("a", "b").state.phase == Phase.FINISHED
    assert story.time == 100


def test_a_site_that_is_away_is_asked_when_the_quorum_needs_it() -> None:
    story = Story().begins().accepts("a")
    story.connected = frozenset("a")
    assert story.passes(100).round.asked == SITES


def test_a_withdrawn_site_is_waited_for_no_longer_and_never_asked_again() -> None:
    story = Story().begins().accepts("a", "b").happens(Gone("c", "DECLINED_WITHDRAWN"))
    assert story.state.aggregating
    assert story.happens(Aggregated()).round.asked == ("a", "b")
    assert site_states(story.state, story.rules)["c"] == "absent"


def test_a_site_withdrawn_after_its_update_was_accepted_contributed_to_that_round_only() -> None:
    story = Story().begins().accepts("a").happens(Gone("a", "DECLINED_WITHDRAWN")).accepts("b", "c")
    assert story.round.accepted == SITES
    assert story.happens(Aggregated()).round.asked == ("b", "c")


def test_with_too_few_sites_left_the_study_pauses_and_goes_on_when_one_is_back() -> None:
    gone = (Gone("b", "SITE_REVOKED"), Gone("c", "SITE_REVOKED"))
    story = Story().begins().accepts(*SITES).happens(*gone, Aggregated())
    assert story.state.phase == Phase.PAUSED
    assert story.state.why == "1 of the 2 sites that it needs are ready"
    assert story.happens(Start()).state.phase == Phase.WAITING
    assert story.happens(Ready("b")).round.number == 2


def test_a_site_that_is_ready_late_joins_at_the_next_round() -> None:
    story = Story().happens(Start(), Ready("a"), Ready("b")).passes(1000).happens(Ready("c"))
    assert story.round.asked == ("a", "b")
    assert site_states(story.state, story.rules)["c"] == "waiting"
    assert story.accepts("a", "b").happens(Aggregated()).round.asked == SITES


def closing() -> Story:
    story = Story().begins()
    for _ in range(2):
        story.accepts(*SITES).happens(Aggregated())
    assert story.round.closing
    return story


def test_after_the_last_round_one_more_only_validates_and_then_the_study_is_finished() -> None:
    story = closing()
    assert story.round.number == 3
    story.actions()
    story.accepts(*SITES)
    assert story.state.phase == Phase.FINISHED
    closed, told = story.actions()
    assert isinstance(closed, Closed)
    assert told == Tell(Phase.FINISHED)
    assert story.state.models == 2


def test_the_closing_round_needs_no_quorum() -> None:
    assert closing().passes(100).state.phase == Phase.FINISHED


def test_the_closing_round_is_skipped_when_nobody_is_left() -> None:
    story = Story().begins().accepts(*SITES).happens(Aggregated()).accepts(*SITES)
    story.happens(*(Gone(site, "DECLINED_WITHDRAWN") for site in SITES), Aggregated())
    assert story.state.phase == Phase.FINISHED


@pytest.mark.parametrize("where", ["created", "waiting", "running", "aggregating", "paused"])
def test_the_operator_can_stop_a_study_anywhere(where: str) -> None:
    story = Story()
    if where == "waiting":
        story.happens(Start())
    elif where != "created":
        story.begins()
    if where == "aggregating":
        story.accepts(*SITES)
    if where == "paused":
        story.passes(100).passes(100)
    story.actions()
    story.happens(Stop())
    assert story.state.phase == Phase.STOPPED
    assert story.actions()[-1] == Tell(Phase.STOPPED)
    frozen = story.state
    assert (
        story.happens(Start(), Aggregated(), Unusable("late", {"a": "TENSOR_NORM"}), Halted("late"), Clock()).state
        == frozen
    )


def test_an_update_that_cannot_be_averaged_is_left_out_and_the_round_goes_on() -> None:
    story = Story().begins().accepts(*SITES).happens(Aggregated({"b": "TENSOR_NORM"}))
    assert story.state.last
    assert story.state.last.accepted == ("a", "c")
    assert story.state.last.answers["b"] == Answer(Kind.LEFT_OUT, "TENSOR_NORM", "b")
    assert (story.state.models, story.round.number, story.round.asked) == (1, 2, SITES)


def test_when_too_few_updates_are_left_the_round_is_tried_again_and_the_others_keep_theirs() -> None:
    story = Story(replace(RULES, needed=3)).begins().accepts(*SITES)
    story.happens(Unusable("too large", {"b": "TENSOR_NORM"}))
    assert (story.round.attempt, story.round.accepted, story.round.unanswered) == (2, ("a", "c"), ("b",))
    story.accepts("b").happens(Unusable("too large again", {"b": "TENSOR_NORM"}))
    assert (story.state.phase, story.state.why) == (Phase.PAUSED, "too large again")
    assert story.actions()[-2:] == [Closed(story.state.last, Outcome.FAILED), Tell(Phase.PAUSED)]
    assert story.happens(Start()).round.accepted == ("a", "c")


def test_an_answer_that_comes_while_the_round_is_averaged_changes_nothing() -> None:
    story = Story().begins().accepts("a", "b").passes(100)
    assert story.state.aggregating
    before = story.state
    assert story.happens(Answered("c", DECLINED)).state is before
    story.happens(Aggregated())
    assert (story.state.models, story.state.missed) == (1, {"c"})


@pytest.mark.parametrize("aggregating", [True, False])
def test_a_fault_in_the_coordinator_pauses_the_study_and_keeps_what_was_accepted(aggregating: bool) -> None:
    story = Story().begins().accepts(*(SITES if aggregating else ("a", "b"))).happens(Halted("no disk"))
    assert (story.state.phase, story.state.why) == (Phase.PAUSED, "no disk")
    assert story.actions()[-2:] == [Closed(story.state.last, Outcome.FAILED), Tell(Phase.PAUSED)]
    story.happens(Start())
    assert story.round.attempt == 2
    assert story.round.accepted == (SITES if aggregating else ("a", "b"))


VETO = Answer(Kind.DECLINED, "DECLINED_VETO")


def test_a_veto_pauses_the_study_once_for_a_model_and_start_goes_on_without_that_site() -> None:
    story = Story().begins().accepts(*SITES).happens(Aggregated()).accepts("a")
    story.actions()
    story.happens(Answered("b", VETO))
    closed, told = story.actions()
    assert isinstance(closed, Closed)
    assert (closed.round.number, closed.outcome, told) == (2, Outcome.FAILED, Tell(Phase.PAUSED))
    assert (story.state.phase, story.state.round) == (Phase.PAUSED, None)
    assert story.state.why == (
        "site `b` vetoes the model of round 1: by its own validation it is worse than its policy takes; ask its "
        "people. `coordinator study start` goes on with this model, without `b` as long as it vetoes it"
    )
    assert site_states(story.state, RULES)["b"] == "declined"
    story.happens(Start())
    assert (story.round.attempt, story.round.accepted) == (2, ("a",))  # what was accepted has its receipt, and counts
    story.happens(Answered("b", VETO)).accepts("c")
    assert story.state.aggregating
    assert story.happens(Aggregated()).round.number == 3
    assert story.happens(Answered("b", VETO)).state.phase == Phase.PAUSED  # of another model


def test_another_sites_veto_of_the_same_model_pauses_again() -> None:
    story = Story().begins().happens(Answered("b", VETO), Start(), Answered("c", VETO))
    assert story.state.why.startswith("site `c` vetoes the model of round 0: ")


def test_after_a_restart_the_rest_of_a_deadline_counts_but_the_sites_get_time_to_come_back() -> None:
    story = Story().begins()
    story.time = 5
    assert story.happens(Restarted(away_s=10, round_left_s=90, start_left_s=0)).round.deadline == 5 + 80
    assert story.happens(Restarted(away_s=500, round_left_s=90, start_left_s=0)).round.deadline == 5 + 60


def test_a_restart_in_the_middle_of_an_aggregation_does_it_again() -> None:
    story = Story().begins().accepts(*SITES)
    aggregate = story.actions()[-1]
    assert story.happens(Restarted(1, 0, 0)).actions() == [aggregate]


def test_each_site_is_told_in_one_word() -> None:
    story = Story()
    assert set(site_states(story.state, story.rules).values()) == {"waiting"}
    story.begins().accepts("a").happens(Answered("b", Answer(Kind.DECLINED, "DECLINED_HELD")))
    assert site_states(story.state, story.rules) == {"a": "accepted", "b": "held", "c": "training"}
    assert site_states(story.state, story.rules, frozenset("c"))["c"] == "uploaded"


EVENTS = st.one_of(
    st.sampled_from(SITES).map(Ready),
    st.sampled_from(SITES).map(lambda site: Gone(site, "DECLINED_WITHDRAWN")),
    st.tuples(st.sampled_from(SITES), st.sampled_from([YES, NO, DECLINED, VETO])).map(lambda pair: Answered(*pair)),
    st.sampled_from([Start(), Stop(), Aggregated(), Halted("x"), Clock()]),
    st.sampled_from(SITES).map(lambda site: {site: "TENSOR_NORM"}),
    st.floats(0, 2000),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, max_size=60), st.sets(st.sampled_from(SITES)))
def test_whatever_happens_the_life_stays_sound(
    events: list[Event | float | dict[str, str]], connected: set[str]
) -> None:
    story = Story(connected=tuple(connected))
    models = 0
    for event in events:
        if isinstance(event, float):
            story.passes(event)
        elif isinstance(event, Answered):
            before = story.state
            if before.round and event.site in before.round.unanswered:
                story.happens(event)  # admission lets nothing else through
                assert story.state is before or not before.aggregating
        elif isinstance(event, dict):
            if story.state.aggregating and set(event) <= set(story.round.accepted):
                enough = len(story.round.accepted) > RULES.needed
                story.happens(Aggregated(event) if enough else Unusable("x", event))
        else:
            before = story.state
            story.happens(event)
            if before.phase in ENDED and not isinstance(event, Ready | Gone):
                assert story.state == before
        state = story.state
        assert StudyState.from_document(state.document()) == state
        assert state.models in (models, models + 1)
        models = state.models
        assert models <= RULES.rounds
        assert (state.round is not None) == (state.phase == Phase.RUNNING)
        assert not state.aggregating or len(state.round.accepted) >= RULES.needed  # type: ignore[union-attr]
        if state.phase == Phase.RUNNING and not state.aggregating:
            assert state.next_deadline is not None
            assert story.round.unanswered
    for action in story.done:
        if isinstance(action, Closed) and action.outcome == Outcome.CLOSED and not action.round.closing:
            assert len(action.round.accepted) >= RULES.needed


# Deadlines that follow what the sites need, and late updates.

MEASURED = replace(RULES, round_deadline_s=3600, measured=True)


def two_rounds(seconds: float) -> Story:
    """Two rounds, each of which took its slowest site, b, so many seconds."""
    story = Story(replace(MEASURED, rounds=9)).begins()
    for _ in range(2):
        story.accepts("a", "c")
        story.time += seconds
        story.accepts("b").happens(Aggregated())
    return story


def test_a_measured_deadline_is_four_times_what_the_slowest_site_took() -> None:
    story = Story(replace(MEASURED, rounds=9)).begins()
    assert story.round.deadline == 3600  # nothing is known yet
    story = two_rounds(100)
    assert story.round.deadline - story.time == 400
    assert two_rounds(1).round.deadline - 2 == 60  # at least a minute
    assert two_rounds(1000).round.deadline - 2000 == 3600  # at most what the study says


def test_a_site_that_was_late_once_has_more_time_and_a_further_attempt_has_all() -> None:
    story = two_rounds(100).accepts("a", "c").passes(400).happens(Aggregated())
    assert story.state.missed == {"b"}
    assert story.round.deadline - story.time == 1600
    story.passes(1600)  # nobody answered at all
    assert story.round.attempt == 2
    assert story.round.deadline - story.time == 3600


def test_a_site_that_never_contributed_has_all_the_time() -> None:
    story = Story(replace(MEASURED, rounds=9, needed=1)).begins().accepts("a", "c").passes(3600).happens(Aggregated())
    assert story.round.deadline - story.time == 3600


def test_only_the_last_three_rounds_are_measured() -> None:
    story = two_rounds(100)
    for _ in range(3):
        story.accepts("a", "c")
        story.time += 20
        story.accepts("b").happens(Aggregated())
    assert story.round.deadline - story.time == 80


def late(finish: bool) -> tuple[Story, StudyState]:
    """At the deadline a and b are accepted, and c's update is on its way."""
    story = Story(replace(RULES, finish_late=finish)).begins().accepts("a", "b")
    story.time = 100
    state, _ = advance(story.state, story.rules, Clock(), Now(100, story.connected, frozenset({"c"})))
    return story, state


def test_an_update_that_is_on_its_way_at_the_deadline_is_finished_where_the_study_says_so() -> None:
    story, state = late(finish=True)
    assert not state.aggregating
    assert state.round is not None
    assert state.round.deadline == 110
    answered, _ = advance(state, story.rules, Answered("c", replace(YES, upload="c")), Now(105, story.connected))
    assert answered.aggregating
    assert answered.round is not None
    assert answered.round.accepted == SITES


def test_it_is_not_waited_for_without_end_nor_where_the_study_does_not_say_so() -> None:
    _, state = late(finish=False)
    assert state.aggregating
    story, state = late(finish=True)
    for time in range(110, 200, 10):
        state, _ = advance(state, story.rules, Clock(), Now(time, story.connected, frozenset({"c"})))
        assert not state.aggregating
    state, _ = advance(state, story.rules, Clock(), Now(200, story.connected, frozenset({"c"})))
    assert state.aggregating
    assert state.round is not None
    assert state.round.unanswered == ("c",)


def test_an_update_whose_line_broke_is_waited_for_a_moment_only() -> None:
    story, state = late(finish=True)
    state, _ = advance(state, story.rules, Clock(), Now(110, story.connected))
    assert state.aggregating


def test_what_was_measured_and_when_the_round_opened_survive_the_store() -> None:
    state = two_rounds(100).state
    again = StudyState.from_document(json.loads(json.dumps(state.document())))
    assert again == state
    assert again.round is not None
    assert state.round is not None
    assert again.round.opened == state.round.opened


def test_after_a_restart_a_round_opened_as_long_before_its_deadline_as_before() -> None:
    story = two_rounds(100)
    state, _ = advance(story.state, story.rules, Restarted(10, 390, 0), Now(5000, story.connected))
    assert state.round is not None
    assert state.round.deadline == 5380
    assert state.round.deadline - state.round.opened == 400


def test_what_a_site_expects_moves_a_measured_deadline_within_the_studys_time() -> None:
    story = two_rounds(100)
    opened = story.time
    story.happens(Expected("b", 3, 1, 600))
    assert story.round.deadline == opened + 1200
    story.happens(Expected("b", 3, 1, 9000))
    assert story.round.deadline == opened + 3600
    assert story.round.expected == {"b": opened + 9000}


def test_what_a_site_expects_moves_no_fixed_deadline_and_is_kept_for_the_operator() -> None:
    story = Story().begins().happens(Expected("b", 1, 1, 600))
    assert story.round.deadline == 100
    assert story.round.expected == {"b": 600}


@pytest.mark.parametrize("event", [Expected("b", 1, 2, 600), Expected("b", 2, 1, 600), Expected("a", 1, 1, 600)])
def test_an_expectation_of_another_attempt_or_after_an_answer_changes_nothing(event: Expected) -> None:
    story = Story().begins().accepts("a")
    before = story.state
    assert story.happens(event).state is before


def test_the_same_expectation_again_changes_nothing() -> None:
    story = Story().begins().happens(Expected("b", 1, 1, 600))
    before = story.state
    story.time = 10
    assert story.happens(Expected("b", 1, 1, 600)).state is before
