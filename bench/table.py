"""Measurements as one table for people, and as plots."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Measured = dict[str, Any]
COLUMNS = (
    ("what", "what"), ("sites", "sites"), ("seconds", "s a round"), ("ratio", "x floor"), ("cpu_seconds", "CPU s"),
    ("cpu_ratio", "x floor"), ("coordinator_peak_mib", "coordinator MiB"), ("gateway_peak_mib", "gateway MiB"),
    ("trainer_peak_mib", "trainer MiB"),
)  # fmt: skip


def table(found: Sequence[Measured]) -> str:
    """A Markdown table of the rounds, and a sentence for each of the others."""
    lines = [
        f"| {' | '.join(title for _, title in COLUMNS)} |",
        "|---|" + "---:|" * (len(COLUMNS) - 1),
    ]
    said = []
    for one in found:
        if "seconds" in one:
            row = {"what": _what(one), **one}
            row.setdefault("cpu_seconds", one.get("coordinator_cpu_seconds"))
            lines.append(f"| {' | '.join(_cell(row.get(key)) for key, _ in COLUMNS)} |")
        else:
            said.append(", ".join(f"{key} {_cell(value)}" for key, value in one.items()))
    return "\n".join([*lines, "", *said])


def plots(found: Sequence[Measured], folder: Path) -> None:
    """Seconds of a round against model size, and against the number of sites; nothing where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullLocator, StrMethodFormatter
    except ImportError:
        print("no plots: matplotlib is not installed")
        return
    plain = [one for one in found if one["bench"] == "round" and one["encoding"] == "float32"]
    few = min((one["sites"] for one in plain), default=0)
    crowds = [one for one in found if one["bench"] == "simulated sites"]
    by_size = [(one["bytes_up"] / 2**20, one) for one in plain if one["sites"] == few]
    views = {
        "size": (f"MiB of the model, {few} sites", [
            ("a round", by_size, "seconds"), ("the floor", by_size, "floor_seconds"),
        ]),
        "sites": ("sites", [
            ("152 parameters, agents", _by_sites(plain, "152"), "seconds"),
            ("ResNet-18, agents", _by_sites(plain, "resnet18"), "seconds"),
            ("152 parameters, simulated sites", [(one["sites"], one) for one in crowds], "seconds"),
        ]),
    }  # fmt: skip
    for name, (label, series) in views.items():
        figure = Figure(figsize=(5, 3.2), layout="constrained")
        axes = figure.subplots()
        for title, points, key in series:
            if len(points) > 1:
                axes.loglog([x for x, _ in points], [one[key] for _, one in points], marker="o", label=title)
        measured = sorted({x for _, points, _ in series for x, _ in points})
        axes.set_xticks(measured, [f"{x:.1g}" if x < 1 else f"{x:.0f}" for x in measured])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.set_xlabel(label)
        axes.set_ylabel("seconds a round, median")
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.legend(fontsize=8)
        figure.savefig(folder / f"{name}.png", dpi=110)


def _by_sites(rounds: Sequence[Measured], payload: str) -> list[tuple[int, Measured]]:
    return [(one["sites"], one) for one in rounds if one["payload"] == payload]


def _what(one: Measured) -> str:
    parts = [one["bench"], one.get("payload"), one.get("encoding"), "masked" if one.get("secure") else ""]
    return ", ".join(part for part in parts if part and part != "float32")


def _cell(value: object) -> str:
    return "–" if value is None else str(value)
