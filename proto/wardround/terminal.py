"""What may reach a terminal or a log: text on one line, without a character that a terminal would obey or hide.

Whatever a peer says is data. It is shown ``quoted``, so that nobody takes it for ours, and cut. The rest here is the
last net for what was overlooked: ``Screen`` is what commands print through, ``OneLine`` what services log with.
"""

import logging
import re
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from wardround.errors import BadData

MOST = 200  # characters of a peer's words
_STYLE = re.compile(r"\x1b\[[0-9;]*m")  # how Rich sets a color; it moves nothing and answers nothing


def is_plain(text: str) -> bool:
    """Whether ``text`` can be shown as it is: no control character, line break, bidirectional or invisible mark."""
    return text.isprintable() or all(one.isprintable() or unicodedata.category(one) == "Zs" for one in text)


def refuse_control_characters(value: Any, what: str) -> None:
    """Refuse a document of a peer's with a text, or a key, that cannot be shown as it is.

    Raises:
        BadData: naming ``what`` it is, and the text, escaped.
    """
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str) and not is_plain(item):
            raise BadData(f"{what} holds a control character or an invisible one: {quoted(item, 80)}")
        if isinstance(item, dict):
            left += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            left += item


def escaped(text: str, most: int | None = None) -> str:
    """``text`` on one line: each character that ``is_plain`` refuses as its escape, and no more than ``most``."""
    shown = text if most is None else text[: most + 1]
    if not shown.isprintable():
        shown = "".join(one if one.isprintable() else _escape(one) for one in shown)
    return shown if most is None or len(shown) <= most else shown[: most - 1] + "…"


def quoted(text: str, most: int = MOST) -> str:
    """A peer's words, in quotation marks that it cannot end."""
    return '"' + escaped(text, most).replace('"', "'") + '"'


def _escape(character: str) -> str:
    """As Python writes it, such as ``\\n``, ``\\x1b`` or ``\\u202e``; every blank that ends no line is a space."""
    if unicodedata.category(character) == "Zs":
        return " "
    return character.encode("unicode_escape").decode()


class OneLine(logging.Formatter):
    """A record is one line, whatever its message holds; a traceback's lines come after it, indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  named by logging
        """The record's line."""
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """The traceback."""
        return "\n".join("  " + escaped(line) for line in super().formatException(ei).splitlines())


class Screen:
    """A text stream whose every ``write`` is escaped, but for line ends and tabs. All else is the stream's own."""

    def __init__(self, stream: TextIO, *, styles: bool = False) -> None:
        self._stream = stream
        self._styles = styles

    @property
    def rich_proxied_file(self) -> "Screen":
        """What Rich writes to instead: there its colors pass."""
        return self if self._styles else Screen(self._stream, styles=True)

    def write(self, text: str) -> int:
        """Returns the length of what was given."""
        if text.isprintable():
            self._stream.write(text)
            return len(text)
        kept = _STYLE.findall(text) if self._styles else []
        pieces = _STYLE.split(text) if self._styles else [text]
        clean = [_screened(piece) for piece in pieces]
        self._stream.write(clean[0] + "".join(style + piece for style, piece in zip(kept, clean[1:], strict=True)))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Each through ``write``."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def screened() -> Iterator[None]:
    """While it lasts, all that is printed passes a ``Screen``."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Screen(before[0]), Screen(before[1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _screened(text: str) -> str:
    return "".join(one if one.isprintable() or one in "\n\t" else _escape(one) for one in text)


def many(count: int, what: str, several: str = "") -> str:
    """A number of things in words: "1 study", "2 studies". ``several``: where an "s" at the end is not enough."""
    return f"{count} {what if count == 1 else several or what + 's'}"
