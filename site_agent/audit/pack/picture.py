"""The data-flow picture of a study at a site: who has what, what crosses the hospital's border, and what does not. SVG
without a script or a link, made of numbers alone.
"""

from dataclasses import dataclass
from html import escape

from wardround.terminal import escaped

WIDTH, HEIGHT = 1010, 430
BOX_W, BOX_H, TOP = 190, 152, 96
LEFTS = (20, 260, 500, 790)  # of the boxes; the border lies between the third and the fourth
BORDER = 740
LETTERS = 22  # of a line in a box
INK, FAINT, ACCENT, PAPER = "#1f2933", "#52606d", "#0b6b4f", "#ffffff"


@dataclass(frozen=True)
class Flow:
    """What the picture shows, in words and numbers.

    Attributes:
        stays, leaves, comes: what is said under the boxes and at the arrows.
    """

    site: str
    study: str
    data: str
    trainer: str
    gateway: str
    coordinator: str
    leaves: tuple[str, ...]
    comes: str
    stays: str
    others: str


def picture(flow: Flow) -> str:
    """The picture as SVG."""
    boxes = (
        ("Patients' files", flow.data),
        ("Trainer", flow.trainer),
        ("Gateway", flow.gateway),
        ("Coordinator", flow.coordinator),
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{_plain(f"Data flow of study {flow.study} at {flow.site}")}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>',
        f'<rect x="8" y="44" width="{BORDER - 8}" height="{HEIGHT - 60}" rx="10" fill="#f2f7f5" stroke="{ACCENT}" '
        'stroke-width="1.5" stroke-dasharray="7 5"/>',
        _text(20, 32, f"Inside {flow.site}", weight=600),
        _text(BORDER + 12, 32, "Outside", weight=600),
    ]
    for left, (name, text) in zip(LEFTS, boxes, strict=True):
        parts.append(
            f'<rect x="{left}" y="{TOP}" width="{BOX_W}" height="{BOX_H}" rx="8" fill="{PAPER}" stroke="{INK}"/>'
        )
        parts.append(_text(left + 12, TOP + 24, name, weight=600))
        parts += [
            _text(left + 12, TOP + 46 + 17 * row, line, FAINT) for row, line in enumerate(_wrapped(text, LETTERS))
        ]
    parts += [
        _arrow(LEFTS[0] + BOX_W, LEFTS[1], TOP + 59, "reads"),
        _arrow(LEFTS[1] + BOX_W, LEFTS[2], TOP + 40, "update"),
        _arrow(LEFTS[2], LEFTS[1] + BOX_W, TOP + 84, "model"),
        _arrow(LEFTS[2] + BOX_W, LEFTS[3], TOP + 40, ""),
        _arrow(LEFTS[3], LEFTS[2] + BOX_W, TOP + 84, ""),
    ]
    parts.append(_text(LEFTS[2], TOP + BOX_H + 30, "Leaves, in the ledger first:", weight=600))
    leaves = [line for sentence in flow.leaves for line in _wrapped(sentence, 32)]
    parts += [_text(LEFTS[2], TOP + BOX_H + 50 + 17 * row, line) for row, line in enumerate(leaves[:6])]
    parts.append(_text(20, TOP + BOX_H + 30, "Stays, whatever happens:", weight=600))
    parts += [_text(20, TOP + BOX_H + 50 + 17 * row, line) for row, line in enumerate(_wrapped(flow.stays, 62)[:6])]
    parts.append(_text(LEFTS[2], TOP - 14, flow.comes, FAINT))
    others = _wrapped(flow.others, 25)[:5]
    parts += [_text(LEFTS[3] + 2, TOP + BOX_H + 50 + 17 * row, line, FAINT) for row, line in enumerate(others)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: int, y: int, text: str, color: str = INK, weight: int = 400) -> str:
    return f'<text x="{x}" y="{y}" fill="{color}" font-weight="{weight}">{_plain(text)}</text>'


def _arrow(start: int, end: int, y: int, label: str) -> str:
    back = 7 if end > start else -7
    line = f'<path d="M{start} {y} H{end - back}" stroke="{ACCENT}" stroke-width="2" fill="none"/>'
    head = f'<path d="M{end} {y} l{-2 * back} -5 v10 z" fill="{ACCENT}"/>'
    middle = (start + end) // 2
    said = f'<text x="{middle}" y="{y - 7}" font-size="12" text-anchor="middle">{label}</text>' if label else ""
    return line + head + said


def _plain(text: str) -> str:
    return escape(escaped(text), quote=True)


def _wrapped(text: str, width: int) -> list[str]:
    """The text in lines; a word that is wider than one is cut, so that it stays inside."""
    lines = [""]
    for piece in text.split():
        for word in (piece[:width], piece[width : 2 * width]):
            if lines[-1] and word and len(lines[-1]) + 1 + len(word) > width:
                lines.append("")
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
