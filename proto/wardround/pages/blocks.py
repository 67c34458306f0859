"""What a report is made of: frozen blocks of plain text, which the template shows and a program fills in.

Every text may come from a stranger: the template escapes it, so none of them is markup.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from wardround.pages.charts import LineChart

Tone = Literal["good", "open", "bad", "plain"]  # shown, not shown, contradicted, not a matter of either


@dataclass(frozen=True)
class Claim:
    """One line of an answer: whether something was shown, and how far. ``tone`` is never told by color alone."""

    name: str
    tone: Tone
    text: str


@dataclass(frozen=True)
class Answer:
    """What the reader came for, in a sentence; ``detail`` says on what it rests."""

    kind: ClassVar[str] = "answer"
    tone: Tone
    text: str
    detail: str = ""
    claims: tuple[Claim, ...] = ()


@dataclass(frozen=True)
class Heading:
    """``level`` is 2 or 3; the page's title is the only heading of level 1."""

    kind: ClassVar[str] = "heading"
    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    kind: ClassVar[str] = "paragraph"
    text: str
    warning: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Items:
    """A list of sentences under an introduction; ``open`` marks it as something that was not shown."""

    kind: ClassVar[str] = "items"
    intro: str
    texts: tuple[str, ...]
    open: bool = False


@dataclass(frozen=True)
class Facts:
    """Names and values; ``codes`` sets the values, such as digests, in a fixed-width face."""

    kind: ClassVar[str] = "facts"
    rows: tuple[tuple[str, str], ...]
    codes: bool = False


@dataclass(frozen=True)
class Code:
    """Lines to be typed or copied as they stand."""

    kind: ClassVar[str] = "code"
    text: str

    @property
    def lines(self) -> list[str]:
        """The text line by line; any other character that a screen would obey is shown as its escape."""
        return self.text.split("\n")


@dataclass(frozen=True)
class Grid:
    """A table of text.

    Args:
        names: so many first columns are words, the others numbers, set to the right.
        numbers: the columns of numbers, where ``names`` does not say it.
        codes: the columns of digests and tensors' names, in a fixed-width face.
        narrow: every column as wide as its widest word: a table of marks.
        links: of each row, where its first text leads to; none on a page that is a file.
    """

    kind: ClassVar[str] = "grid"
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: int = 1
    numbers: tuple[int, ...] | None = None
    codes: tuple[int, ...] = ()
    narrow: bool = False
    links: tuple[str, ...] = ()

    @property
    def looks(self) -> tuple[str, ...]:
        """The class of each column: "n" for numbers, "code", or ""."""
        numbers = range(self.names, len(self.columns)) if self.numbers is None else self.numbers
        return tuple(
            "n" if index in numbers else "code" if index in self.codes else "" for index in range(len(self.columns))
        )


@dataclass(frozen=True)
class Links:
    """Texts and where they lead to, for a page that is served."""

    kind: ClassVar[str] = "links"
    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Field:
    """What a form asks for. ``hidden``: it is sent, and not shown. ``secret``: what is typed is not shown."""

    name: str
    label: str = ""
    value: str = ""
    hidden: bool = False
    secret: bool = False
    fills_in: str = ""  # the browser's word for what may be filled in, such as "username"


@dataclass(frozen=True)
class Form:
    """Something that a person can do on a page that is served, with the button that does it.

    Attributes:
        asks: it changes nothing and shows another page; the fields stand in that page's address.
        tone: "bad" for what cannot be taken back.
    """

    kind: ClassVar[str] = "form"
    action: str
    button: str
    fields: tuple[Field, ...] = ()
    note: str = ""
    asks: bool = False
    tone: Tone = "plain"


@dataclass(frozen=True)
class Figure:
    """A picture: ``name``.png and ``name``.svg lie beside the report; the page holds the SVG itself."""

    kind: ClassVar[str] = "figure"
    name: str
    alt: str
    caption: str
    svg: bytes

    @property
    def source(self) -> str:
        """The picture as a data: URI; a browser runs nothing and fetches nothing of an SVG in an ``img``."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.svg).decode()}"


Block = Answer | Heading | Paragraph | Items | Facts | Code | Grid | Links | Form | Figure | LineChart


@dataclass(frozen=True)
class Page:
    """A report. ``about`` says above the title what kind of report of whom it is; an ``Answer`` comes first."""

    title: str
    about: str
    blocks: Sequence[Block]

    @property
    def contents(self) -> list[str]:
        """The headings of level 2, in order."""
        return [block.text for block in self.blocks if isinstance(block, Heading) and block.level == 2]
