"""Two hospitals and a coordinator, by what people type: the count that the README gives, run as it stands there."""

from pathlib import Path

import pytest

from tools.first_round import SITES, first_round

AIM = 10  # commands, with the three installations


@pytest.mark.chaos
@pytest.mark.system
def test_two_hospitals_close_their_first_round_in_ten_commands(tmp_path: Path) -> None:
    count = first_round(tmp_path)
    assert count.total == AIM
    assert [len(count.commands[site]) for site in SITES] == [2, 2]
    assert [len(count.answers[site]) for site in SITES] == [7, 7]
