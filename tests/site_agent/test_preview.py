"""One study's line in `studies` and `status`."""

import os
import re
import sys
from types import SimpleNamespace

import pytest
from rich.cells import cell_len

from site_agent.cli.study import print_account, wrapped
from site_agent.gateway.consent.account import Account, Group, Line
from site_agent.gateway.consent.rows import study_row
from site_agent.state.directory import Journal, Offer
from wardround.tensors.manifests import Manifest
from wardround.terminal import escaped

OFFER = Offer(
    "trial", 1, "d", "running", {"study": {"title": "", "rounds": 3}, "reported": {"metrics": []}}, Manifest(())
)


@pytest.mark.parametrize(("journal", "round_"), [(2, 2), (3, 3), (4, 3)])
def test_the_closing_numbers_are_no_round_of_their_own(journal: int, round_: int) -> None:
    shown = study_row(OFFER, None, Journal("trial", 1, "d", journal, phase="decided"), [])
    assert (shown.round, shown.rounds) == (round_, 3)


def test_a_journal_of_another_revision_says_nothing_of_this_one() -> None:
    assert study_row(OFFER, None, Journal("trial", 1, "other", 2), []).round == 0


WIDE = {
    "words": "how a study of hearts is called that has a very long title, in words",
    "Chinese": "\u5fc3\u810f\u75c5" * 30,
    "Chinese among words": "a study of " + "\u5fc3\u810f\u75c5" * 12 + " in three hospitals",
    "emoji": "\u2764\ufe0f\U0001f3e5" * 20 + " and " + "\U0001f1f3\U0001f1f4" * 30,
    "accents": "a\u0301\u0302" * 90 + " e\u0301" * 20,
    "commands": "\x1b[2J" * 20 + "\u202e" * 9 + " \x07",
}


@pytest.mark.parametrize("width", [12, 40, 60])
@pytest.mark.parametrize("text", WIDE.values(), ids=WIDE)
def test_no_line_is_wider_than_the_terminal_and_no_character_is_lost(text: str, width: int) -> None:
    lines = list(wrapped(text, width, "* ", "    "))
    assert max(cell_len(line) for line in lines) <= width
    assert all(line.isprintable() for line in lines)
    assert lines[0].startswith("* ")
    assert all(line.startswith("    ") for line in lines[1:])
    shown = "".join(line.removeprefix("    " if number else "* ") for number, line in enumerate(lines))
    assert re.sub(" ", "", shown) == re.sub(" ", "", escaped(text))
    for line in lines[1:]:
        assert cell_len(line[4:5]) > 0, "an accent has lost its letter"


def test_words_are_kept_whole_and_spaces_within_a_line_as_they_are() -> None:
    assert list(wrapped("a  b cccc ddd", 8)) == ["a  b", "cccc ddd"]
    assert list(wrapped("aa bbbbbbbbbb c", 8, "> ", "  ")) == ["> aa", "  bbbbbb", "  bbbb c"]
    assert list(wrapped("", 8, "* ")) == ["*"]
    assert list(wrapped("one line", 1 << 20, "- ")) == ["- one line"]


def test_an_account_in_wide_characters_keeps_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page was measured in characters: a Chinese title was twice as wide as the terminal."""
    monkeypatch.setattr("site_agent.cli.study.shutil.get_terminal_size", lambda *_, **__: os.terminal_size((80, 24)))
    monkeypatch.setattr(sys, "stdout", terminal := SimpleNamespace(written=[], isatty=lambda: True))
    terminal.write, terminal.flush = terminal.written.append, lambda: None
    lines = tuple(Line("metric " + "\u5fc3" * n, "\u810f" * 99) for n in (3, 12, 13, 60))
    print_account(Account("hearts", 1, "ab" * 32, "\u75c5" * 70, (Group("What", lines),)))
    shown = "".join(terminal.written).splitlines()
    assert max(map(cell_len, shown)) <= 80
    firsts = [line for line in shown if "\u5fc3" in line and "\u810f" in line]
    assert [cell_len(line[: line.index("\u810f")]) for line in firsts] == [36, 36]
