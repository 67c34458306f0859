"""The attacks that were thought of, one file for each party that could gain by them.

Each test carries one out and wears ``@pytest.mark.attack(promise=..., refused_by=...)``: the promise of
``docs/security.md`` that it would break, and the file of ours that refuses it. ``make attacks`` runs them all and
prints a table of these.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from tests.site_agent.site_world import SiteWorld
from tools.world import World

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--attack-table", action="store_true", help="print attack, promise, refused by, result")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "attack(promise, refused_by): what an attack would break, and the file of ours that refuses it"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent != FOLDER:
            continue
        marker = item.get_closest_marker("attack")
        if marker is None or set(marker.kwargs) != {"promise", "refused_by"}:
            raise pytest.UsageError(f"{item.nodeid} wears no @pytest.mark.attack(promise=..., refused_by=...)")
        if not (ROOT / marker.kwargs["refused_by"]).is_file():
            raise pytest.UsageError(f"{item.nodeid}: there is no file {marker.kwargs['refused_by']}")
        name = getattr(item, "originalname", item.name).removeprefix("test_")
        party = item.path.stem.removeprefix("test_")
        item.user_properties.append(("attack", (party, name, marker.kwargs["promise"], marker.kwargs["refused_by"])))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.getoption("--attack-table"):
        return
    results: dict[tuple[str, ...], list[str]] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            attack = dict(report.user_properties).get("attack")
            if attack is not None:
                results.setdefault(tuple(attack), []).append(outcome)
    table = Table(title="Attacks", show_lines=False)
    for heading in ("by", "attack", "promise", "refused by", "result"):
        table.add_column(heading, overflow="fold")
    for attack, outcomes in sorted(results.items()):
        worst = next(outcome for outcome in ("error", "failed", "skipped", "passed") if outcome in outcomes)
        shown = "refused" if worst == "passed" else worst.upper()
        table.add_row(*attack, shown if len(outcomes) == 1 else f"{shown} ({len(outcomes)} forms)")
    terminalreporter.ensure_newline()
    Console(width=160).print(table)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A federation of real processes over mutual TLS on loopback; empty until something is started in it."""
    with World(tmp_path) as world:
        yield world


@pytest.fixture
def site(tmp_path: Path) -> Iterator[SiteWorld]:
    """One hospital over real TLS, with a coordinator and a trainer that do as a test says."""
    world = SiteWorld(tmp_path)
    try:
        yield world
    finally:
        world.close()
