"""A report's blocks as Markdown, which says the same as the HTML page that is made of them."""

from collections.abc import Sequence

from wardround.pages.blocks import Answer, Code, Figure, Grid, Heading, Items, Paragraph

Block = Answer | Heading | Paragraph | Items | Code | Grid | Figure


def markdown(title: str, blocks: Sequence[Block]) -> str:
    return "\n".join([f"# {_cell(title)}\n", *(_markdown(block) for block in blocks)])


def _markdown(block: Block) -> str:
    match block:
        case Answer(_, text, detail, claims):
            lines = [f"- {_cell(claim.name)}: {_cell(claim.text)}" for claim in claims]
            return "\n".join([f"**{_cell(text)}**\n", *([f"{detail}\n"] if detail else []), *lines, ""])
        case Heading(text, level):
            return f"{'#' * level} {_cell(text)}\n"
        case Paragraph(text, warning):
            return f"**Warning:** {text}\n" if warning else f"{text}\n"
        case Items(intro, texts, is_open):
            lines = [f"- {text}" for text in texts]
            return "\n".join([f"**Warning:** {intro}\n" if is_open else f"{intro}\n", *lines, ""])
        case Code(text):
            return f"```\n{text}\n```\n"
        case Grid(columns, rows):
            rule = ["---:" if look == "n" else "---" for look in block.looks]
            lines = [" | ".join(map(_cell, line)) for line in (columns, tuple(rule), *rows)]
            return "\n".join(f"| {line} |" for line in lines) + "\n"
        case Figure(name, alt, caption):
            return f"![{_cell(alt)}]({name}.png)\n\n{caption}\n"


def _cell(text: str) -> str:
    """One line that Markdown takes as it stands."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
