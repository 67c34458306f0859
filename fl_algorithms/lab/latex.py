"""A report's table as LaTeX, with the rules of the package booktabs."""

from wardround.pages.blocks import Grid

SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--", "<": r"$<$", ">": r"$>$",
}  # fmt: skip


def latex(grid: Grid, caption: str, label: str) -> str:
    """A ``table`` environment: words to the left, numbers to the right."""
    looks = "".join("r" if look == "n" else "l" for look in grid.looks)
    lines = [" & ".join(map(escaped, row)) + r" \\" for row in grid.rows]
    return "\n".join(
        [
            r"\begin{table}", r"\centering", rf"\caption{{{escaped(caption)}}}", rf"\label{{tab:{label}}}",
            rf"\begin{{tabular}}{{{looks}}}", r"\toprule", " & ".join(map(escaped, grid.columns)) + r" \\", r"\midrule",
            *lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", "",
        ]
    )  # fmt: skip


def escaped(text: str) -> str:
    """``text`` so that LaTeX sets it as it stands."""
    return "".join(SPECIAL.get(letter, letter) for letter in " ".join(text.split()))
