"""What ``fl-lab plugins`` prints: what other distributions bring here, with its digest, and what is in its way."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fl_algorithms.plugins import GROUPS
from fl_algorithms.registry import is_ours
from wardround.cli import say
from wardround.local import distributions
from wardround.local.distributions import Distribution
from wardround.records.plugins import Plugin


@dataclass(frozen=True)
class Brought:
    """A row of a plug-in. ``problem``: why no study can use it, or no study of a federation; "" where nothing is."""

    kind: str
    name: str
    distribution: Distribution
    problem: str = ""


def brought() -> list[Brought]:
    """Each row that a plug-in brings, by kind and name. Imports no plug-in."""
    rows = []
    for kind, group in GROUPS.items():
        points = distributions.entry_points(group)
        count = Counter(point.name for point in points)
        for point in points:
            found = distributions.find(point.distribution)
            if found is not None:
                problem = _problem(kind, point.name, count[point.name], found)
                rows.append(Brought(kind, point.name, found, problem))
    return rows


def _problem(kind: str, name: str, count: int, found: Distribution) -> str:
    if is_ours(kind, name):
        return f"Wardround has a {kind} of that name, which every study means"
    if count > 1:
        return "another plug-in brings one of that name too"
    return f"in the lab alone: {found.fault}" if found.fault else ""


def overview() -> dict[str, object]:
    """All of it as JSON."""
    rows = [
        {
            "kind": row.kind, "name": row.name, "distribution": row.distribution.name,
            "version": row.distribution.version, "sha256": row.distribution.sha256, "problem": row.problem,
        }
        for row in brought()
    ]  # fmt: skip
    return {"plugins": rows}


def print_overview(rows: Sequence[Brought]) -> None:
    """A line for each row; for each distribution that can be pinned, the line with which a hospital allows it."""
    for row in rows:
        print(f"{row.kind} {row.name}: {row.distribution}" + (f"; {row.problem}" if row.problem else ""))
    pinned = {row.distribution.name: row.distribution for row in rows if row.distribution.sha256}
    for found in pinned.values():
        print(Plugin(name=found.name, version=found.version, sha256=found.sha256).line)
    if not rows:
        print("no other distribution brings a task, a model or a method")
    if pinned:
        say("a hospital that trusts one has its line in `allow` of [plugins] in policy.toml")
