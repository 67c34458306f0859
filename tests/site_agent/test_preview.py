"""One study's line in `studies` and `status`."""

import pytest

from site_agent.gateway.consent.facts import row
from site_agent.state.directory import Journal, Offer

OFFER = Offer("trial", 1, "d", "running", {"study": {"title": "", "rounds": 3}, "reported": {"metrics": []}}, [])


@pytest.mark.parametrize(("journal", "round_"), [(2, 2), (3, 3), (4, 3)])
def test_the_closing_numbers_are_no_round_of_their_own(journal: int, round_: int) -> None:
    shown = row(OFFER, None, Journal("trial", 1, "d", journal, phase="decided"), [])
    assert (shown["round"], shown["rounds"]) == (round_, 3)


def test_a_journal_of_another_revision_says_nothing_of_this_one() -> None:
    assert row(OFFER, None, Journal("trial", 1, "other", 2), [])["round"] == 0
