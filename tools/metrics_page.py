"""Writes the tables of docs/metrics.md from the programs; a test compares. ``python -m tools.metrics_page``"""

import re
from pathlib import Path

from coordinator import monitoring as coordinator
from site_agent.gateway import monitoring as site
from wardround.web.monitoring import Metric

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "metrics.md"
TABLES: dict[str, tuple[Metric, ...]] = {"coordinator": coordinator.METRICS, "site": site.METRICS}


def table(metrics: tuple[Metric, ...]) -> str:
    """One program's metrics, in the order in which it tells them."""
    rows = [
        f"| `{metric.name}` | {metric.kind} | {', '.join(f'`{label}`' for label in metric.labels) or 'none'} "
        f"| {metric.help} |"
        for metric in metrics
    ]
    return "\n".join(["| metric | kind | labels | what it is |", "|---|---|---|---|", *rows])


def page(text: str) -> str:
    """``text`` with the tables between their marks as the programs have them."""
    for name, metrics in TABLES.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        made = f"{begin}\n{table(metrics)}\n{end}"
        text = pattern.sub(lambda _, made=made: made, text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
