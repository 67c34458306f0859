"""What reaches a terminal or a log."""

import io
import json
import logging
import platform
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from wardround import cli
from wardround.errors import BadData
from wardround.local import memory
from wardround.terminal import OneLine, Screen, escaped, is_plain, quoted, refuse_control_characters, screened

OBEYED = ["\x1b", "\x07", "\x00", "\r", "\x7f", "\x9b", "\u202e", "\u2066", "\u200b", "\ufeff", "\u2028", "\ud800"]


@pytest.mark.parametrize("character", [*OBEYED, "\n", "\t"])
def test_what_a_terminal_obeys_or_hides_becomes_visible(character: str) -> None:
    shown = escaped(f"a{character}b")
    assert shown.isprintable()
    assert shown == "a" + character.encode("unicode_escape").decode() + "b"
    assert not is_plain(character)


@pytest.mark.parametrize("text", ["Universitetssykehuset Nord-Norge", "北大医院", "Hôpital\u00a0:", "[red]x[/red]"])
def test_what_people_write_stays(text: str) -> None:
    assert is_plain(text)
    assert escaped(text) == text.replace("\u00a0", " ")


@given(st.text(), st.integers(2, 50))
def test_a_peers_words_are_one_line_quoted_and_cut(text: str, most: int) -> None:
    shown = quoted(text, most)
    assert shown.isprintable()
    assert (shown[0], shown[-1], shown.count('"')) == ('"', '"', 2)
    assert len(shown) <= most + 2


def test_what_is_cut_says_so() -> None:
    assert quoted("x" * 300) == '"' + "x" * 199 + '…"'


@pytest.mark.parametrize("value", [{"a": ["b", {"c\x1b": 1}]}, ["\u202e"], "\n", {"a": ("\x00",)}])
def test_a_document_with_such_a_text_is_refused_and_says_which(value: object) -> None:
    with pytest.raises(BadData, match="study `x` holds a control character or an invisible one: ") as refused:
        refuse_control_characters(value, "study `x`")
    assert refused.value.message.isprintable()
    refuse_control_characters({"a": [1, None, True, 0.5, "b"]}, "study `x`")


@given(st.text())
def test_nothing_but_text_line_ends_and_tabs_passes_the_screen(text: str) -> None:
    for styles in (False, True):
        out = io.StringIO()
        assert Screen(out, styles=styles).write("\x1b[31m" + text) == len(text) + 5
        shown = out.getvalue()
        assert shown.startswith("\x1b[31m") is styles
        assert all(one.isprintable() or one in "\n\t\x1b" for one in shown)
        assert ("\x1b" in shown.replace("\x1b[", "")) is False


def test_rich_keeps_its_colors_and_nothing_else() -> None:
    out = io.StringIO()
    screen = Screen(out)
    Console(file=screen, force_terminal=True, color_system="standard", legacy_windows=False).print(  # type: ignore[arg-type]
        "[red]x[/red]\x1b]52;c;eA==\x07"
    )
    assert "\x1b]52" not in out.getvalue()
    screen.writelines(["a\x1b", "b"])
    assert out.getvalue().endswith("a\\x1bb")
    assert screen.getvalue() == out.getvalue()


def test_commands_print_through_the_screen_and_give_it_back(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with screened():
        print("out\x1b[2J")
        print("err\x07", file=sys.stderr)
    assert sys.stdout is before
    assert capsys.readouterr() == ("out\\x1b[2J\n", "err\\x07\n")


def test_an_error_and_its_hint_are_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    cli.say_error(BadData("one\nhint: two", hint="three\nnext: four"))
    assert capsys.readouterr().err == "error: one\\nhint: two\nhint: three\\nnext: four\n"


def test_json_says_the_same_without_a_character_to_obey(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"a": "".join(OBEYED[:-1]) + "ø[x]\U000e0041"}
    cli.print_json(value)
    shown = capsys.readouterr().out
    assert json.loads(shown) == value
    assert all(one.isprintable() or one == "\n" for one in shown)
    assert "ø" in shown


def test_a_record_is_one_line_and_its_traceback_is_indented() -> None:
    handler = logging.StreamHandler(out := io.StringIO())
    handler.setFormatter(OneLine("%(levelname)s %(message)s"))
    log = logging.Logger("t")
    log.addHandler(handler)
    try:
        raise ValueError("two\nERROR lines\x1b[2J")
    except ValueError:
        log.exception("a\nERROR b")
    first, *rest = out.getvalue().splitlines()
    assert first == "ERROR a\\nERROR b"
    assert rest
    assert all(line.startswith("  ") and line.isprintable() for line in rest)


def test_a_hidden_process_says_so() -> None:
    before = memory.is_hidden()
    memory.hide()
    assert memory.is_hidden()
    assert before in (True, False)


def test_a_process_may_let_its_threads_share_what_they_gave_back() -> None:
    assert memory.share_arenas(2) == (platform.libc_ver()[0] == "glibc")
