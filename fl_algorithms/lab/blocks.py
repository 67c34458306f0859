"""A report as a list of blocks, which make the same Markdown and HTML."""

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass

STYLE = """
:root { color-scheme: light; --ink: #1b1b1b; --faint: #5c5c5c; --line: #cfcfcf; --warn: #7a4b00; }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, "Segoe UI", "Liberation Sans", Arial, sans-serif; color: var(--ink);
  max-width: 66rem; margin: 2rem auto; padding: 0 1.25rem; background: #fff; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .5rem; }
p { margin: .4rem 0; max-width: 48rem; }
p.warning { border-left: 5px solid var(--warn); padding: .5rem .9rem; background: #fbf6ee; max-width: none; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .6rem 0 1rem; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .28rem 1.1rem .28rem 0; border-bottom: 1px solid var(--line); white-space: nowrap;
  vertical-align: top; }
td.long { white-space: normal; overflow-wrap: anywhere; }
th { font-weight: 600; border-bottom: 2px solid var(--line); } .n { text-align: right; }
pre { background: #f6f6f6; padding: .7rem .9rem; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .82rem;
  font-family: ui-monospace, "Liberation Mono", Menlo, monospace; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; } figcaption { color: var(--faint); max-width: 48rem; }
@page { margin: 16mm; }
@media print { body { margin: 0; max-width: none; padding: 0; font-size: 10pt; } h2 { break-after: avoid; }
  tr, figure, .warning, pre { break-inside: avoid; }
  thead { display: table-header-group; } .wide { overflow: visible; } }
"""


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Paragraph:
    text: str
    warning: bool = False


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Grid:
    """A table of text. The first ``names`` columns are words, the others numbers, set to the right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: int = 1


@dataclass(frozen=True)
class Figure:
    """A picture: ``name``.png and ``name``.svg lie beside the report."""

    name: str
    alt: str
    caption: str
    svg: bytes


Block = Heading | Paragraph | Code | Grid | Figure


def markdown(title: str, blocks: Sequence[Block]) -> str:
    return "\n".join([f"# {_cell(title)}\n", *(_markdown(block) for block in blocks)])


def page(title: str, blocks: Sequence[Block]) -> str:
    """One HTML page that asks for nothing else: pictures inside, no script."""
    body = "".join(map(_html, blocks))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{_e(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">\n"
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{_e(title)}</h1>\n{body}</body>\n</html>\n"
    )


def _markdown(block: Block) -> str:
    match block:
        case Heading(text):
            return f"## {_cell(text)}\n"
        case Paragraph(text, warning):
            return f"**Warning:** {text}\n" if warning else f"{text}\n"
        case Code(text):
            return f"```\n{text}\n```\n"
        case Grid(columns, rows, names):
            rule = ["---" if number < names else "---:" for number in range(len(columns))]
            lines = [columns, tuple(rule), *rows]
            return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines) + "\n"
        case Figure(name, alt, caption, _):
            return f"![{_cell(alt)}]({name}.png)\n\n{caption}\n"


def _html(block: Block) -> str:
    match block:
        case Heading(text):
            return f"<h2>{_e(text)}</h2>\n"
        case Paragraph(text, warning):
            return (
                f'<p class="warning"><strong>Warning:</strong> {_e(text)}</p>\n' if warning else f"<p>{_e(text)}</p>\n"
            )
        case Code(text):
            return f"<pre>{_e(text)}</pre>\n"
        case Grid(columns, rows, names):
            head = "".join(f"<th{_aligned(number, names)}>{_e(column)}</th>" for number, column in enumerate(columns))
            body = "".join(
                f"<tr>{''.join(_html_cell(text, number, names) for number, text in enumerate(row))}</tr>\n"
                for row in rows
            )
            return (
                f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>\n'
            )
        case Figure(_, alt, caption, svg):
            source = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
            return f'<figure><img src="{source}" alt="{_e(alt)}"><figcaption>{_e(caption)}</figcaption></figure>\n'


def _html_cell(text: str, number: int, names: int) -> str:
    if number < names and len(text) > 48:
        return f'<td class="long">{_e(text)}</td>'
    return f"<td{_aligned(number, names)}>{_e(text)}</td>"


def _aligned(number: int, names: int) -> str:
    return "" if number < names else ' class="n"'


def _e(text: str) -> str:
    return html.escape(text)


def _cell(text: str) -> str:
    """One line that Markdown takes as it stands."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
