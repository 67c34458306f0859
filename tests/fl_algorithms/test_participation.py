"""Which sites are in a round of the lab: drawn by streams, judged as a coordinator judges."""

import json
import math
from typing import Any

import pytest

from fl_algorithms.lab.attacks import Attack
from fl_algorithms.lab.participation import Attendance, Participation
from tests.fl_algorithms.toys import toy_study
from wardround.errors import BadData, UsageProblem

SITES = tuple("abcdefghij")


def attendance(participation: Participation, round_number: int = 1, **changes: Any) -> Attendance:
    given: dict[str, Any] = {"seed": 5, "round_number": round_number, "needed": 1, "deadline_s": 60.0} | changes
    return participation.attendance(SITES, **given)


def test_without_a_word_every_site_is_in_every_round() -> None:
    found = attendance(Participation(), needed=10)
    assert found == Attendance(SITES, SITES)
    assert Participation().everyone


def test_a_sample_is_so_many_sites_and_all_have_their_turn() -> None:
    rounds = [attendance(Participation(sample=0.25), number) for number in range(1, 201)]
    assert {len(found.asked) for found in rounds} == {3}  # of 10, rounded up
    counts = [sum(site in found.asked for found in rounds) for site in SITES]
    sd = math.sqrt(200 * 0.3 * 0.7)
    assert all(abs(count - 60) < 4 * sd for count in counts)
    assert rounds[0].status(next(site for site in SITES if site not in rounds[0].asked)) == "idle"


def test_a_site_that_drops_out_is_away_about_as_often_as_was_said() -> None:
    rounds = [attendance(Participation(dropout=0.2), number) for number in range(1, 101)]
    away = sum(len(found.away) for found in rounds)
    assert abs(away - 200) < 4 * math.sqrt(1000 * 0.2 * 0.8)
    assert all(found.status(site) == "away" for found in rounds for site in found.away)
    assert all(found.attempts == 1 for found in rounds)


def test_a_late_site_is_late_as_often_as_the_log_normal_says() -> None:
    """The median is the deadline, so half of the answers are late."""
    rounds = [attendance(Participation(delay_s=60.0), number) for number in range(1, 101)]
    late = sum(len(found.late) for found in rounds)
    assert abs(late - 500) < 4 * math.sqrt(1000 * 0.25)


def test_where_too_few_answer_the_others_are_asked_once_more() -> None:
    calm = Participation(dropout=0.4)
    firsts = [(number, attendance(calm, number)) for number in range(1, 99)]
    number, first = next((number, found) for number, found in firsts if len(found.accepted) == 5)
    second = attendance(calm, number, needed=6)
    assert (first.attempts, second.attempts) == (1, 2)
    assert set(first.accepted) < set(second.accepted)  # what came in time is kept


def test_what_was_late_may_be_in_time_for_the_second_attempt() -> None:
    slow = Participation(delay_s=90.0, delay_spread=0.0)  # 90 s, deadline 60 s: in time at 120 s
    found = attendance(slow, needed=10)
    assert (found.accepted, found.attempts) == (SITES, 2)


def test_too_few_in_both_attempts_is_where_a_coordinator_pauses() -> None:
    with pytest.raises(BadData) as refused:
        attendance(Participation(delay_s=200.0, delay_spread=0.0), 3, needed=4)
    assert refused.value.message == "round 3: 0 updates were in time, 2 times; the study needs 4"
    assert refused.value.hint.startswith("a coordinator would pause here: a smaller quorum")


def test_one_sites_chance_changes_nobody_elses() -> None:
    fewer = Participation(dropout=0.3).attendance(SITES[:5], seed=5, round_number=1, needed=1, deadline_s=60.0)
    assert fewer.away == tuple(site for site in attendance(Participation(dropout=0.3)).away if site in SITES[:5])


def test_a_round_that_asks_fewer_than_the_quorum_is_refused() -> None:
    with pytest.raises(UsageProblem) as refused:
        Participation(sample=0.5).refuse_unfit(toy_study(sites=["ash", "birch", "cedar", "douglas"], quorum=3))
    assert refused.value.message == "a round asks 2 of the 4 sites, and the study needs 3 updates"
    assert refused.value.hint == "a smaller quorum: `--set study.quorum=2`; or a larger `sample`"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sample": 0.0}, "`sample` is 0, not above 0 and at most 1"),
        ({"dropout": 1.0}, "`dropout` is 1, not at least 0 and below 1"),
        ({"delay_s": float("nan")}, "`delay_s` is nan, not a number of seconds, at least 0"),
        ({"delay_spread": -1.0}, "`delay_spread` is -1, not at least 0 and at most 10"),
    ],
    ids=["sample", "dropout", "delay", "spread"],
)
def test_what_is_no_chance_is_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(UsageProblem) as refused:
        Participation(**values)
    assert refused.value.message == message


def test_it_is_the_same_after_being_written_and_read() -> None:
    given = Participation(0.3, 0.1, 12.5, 2.0)
    assert Participation.from_document(given.document()) == given
    assert "attack" not in given.document()
    bad = Participation(attack=Attack(kind="alie", sites=("b", "d"), strength=0.1))
    assert Participation.from_document(json.loads(json.dumps(bad.document()))) == bad
