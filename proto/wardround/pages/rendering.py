"""A page's blocks as one HTML file, which asks nobody for anything: no script, no link, no picture from elsewhere.

The same blocks can be served: then a page has links and forms, and asks its own server alone.
"""

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from wardround.pages.blocks import Page
from wardround.terminal import escaped

if TYPE_CHECKING:
    from jinja2 import Environment

_CODE = re.compile(r"(?:(?<=[\s(\[;:,/=])|^)`([^`]+)`(?![\w`])")


@dataclass(frozen=True)
class Around:
    """What stands around a page that is served.

    Attributes:
        program: what the pages are of. ``sections``: the pages that every page leads to, with their paths.
        section: the path of the one that this page belongs to.
        user: who is logged in; "" for nobody.
        csrf: in each form. ``notice``: what became of what was done last.
        version: of what the page shows. ``live``: it is shown anew when that changes; else only said to be old.
    """

    program: str
    sections: tuple[tuple[str, str], ...] = ()
    section: str = ""
    user: str = ""
    csrf: str = ""
    notice: str = ""
    version: int = 0
    live: bool = True


def html(page: Page) -> str:
    """The page. The same blocks give the same text."""
    return _environment().get_template("page.html").render(page=page)


def served(page: Page, around: "Around") -> str:
    """The page as a server gives it to somebody's browser: the same blocks, with links, forms, style and script."""
    return _environment().get_template("web.html").render(page=page, around=around)


def template(name: str) -> str:
    """A template's text, or the stylesheet's, as it lies in this package."""
    return files("wardround.pages").joinpath("templates", name).read_text(encoding="utf-8")


@cache
def _environment() -> "Environment":
    """Templates in which every value is escaped, and a name that is not there is an error."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined  # slow to import, and most commands make no page

    environment = Environment(
        loader=FunctionLoader(template), autoescape=True, undefined=StrictUndefined, finalize=_shown,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters["parts"] = _parts
    return environment


def _parts(text: str) -> list[str]:
    """A sentence as a page shows it, cut at its code: text, code, text, and so on, without the backticks.

    Backticks within a word stay, so that a stranger's name that has some is shown as it is.
    """
    return _CODE.split(_shown(text))


def _shown(value: Any) -> Any:
    """A value as a page shows it: on one line, without a character that a reader's screen would obey or hide.

    Raises:
        TypeError: it is neither text nor a number; a ``None`` would otherwise stand on the page as a word.
    """
    if hasattr(value, "__html__"):  # what a macro made: escaped already
        return value
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, int | float):
        return value
    raise TypeError(f"a page shows text and numbers, not {type(value).__name__}")
