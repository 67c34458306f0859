"""docs/metrics.md and the Grafana dashboard name the metrics that there are, and what is told is what they list."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from coordinator import monitoring as coordinator
from site_agent.gateway import monitoring as site
from site_agent.gateway.service_requests import ServiceStatus
from tests.coordinator.conftest import Place
from tests.site_agent.site_world import STUDY, SiteWorld
from tools.metrics_page import PAGE, TABLES, page
from tools.world import wait_until
from wardround.web.monitoring import Metric, Values

ROOT = Path(__file__).resolve().parents[2]
GRAFANA = ROOT / "deploy" / "grafana" / "wardround.json"
NAMES = {metric.name for metrics in TABLES.values() for metric in metrics}
NAMED = re.compile(r"wardround_(?:coordinator|site)_\w+")
SECRETS = re.compile(r"[0-9a-f]{32}|/|\.csv")


def test_the_tables_of_the_page_are_those_of_the_programs() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "write it again: `python -m tools.metrics_page`"


def test_every_metric_that_the_page_and_the_dashboard_name_is_told() -> None:
    assert set(NAMED.findall(PAGE.read_text(encoding="utf-8"))) == NAMES
    board = json.loads(GRAFANA.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(queries) > 20
    for query in queries:
        assert set(NAMED.findall(query)) <= NAMES, query
        assert NAMED.search(query), query


def test_the_labels_of_a_query_are_those_of_its_metric() -> None:
    labels = {metric.name: set(metric.labels) for metrics in TABLES.values() for metric in metrics}
    for panel in json.loads(GRAFANA.read_text(encoding="utf-8"))["panels"]:
        for target in panel.get("targets", []):
            (name,) = NAMED.findall(target["expr"])
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            grouped = {label for by in re.findall(r"by \(([\w, ]+)\)", target["expr"]) for label in by.split(", ")}
            assert shown | grouped <= labels[name], target


def test_the_panels_of_the_dashboard_do_not_lie_on_each_other() -> None:
    places = [panel["gridPos"] for panel in json.loads(GRAFANA.read_text(encoding="utf-8"))["panels"]]
    cells = [
        (place["x"] + dx, place["y"] + dy) for place in places for dx in range(place["w"]) for dy in range(place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def refuse_other_than(table: tuple[Metric, ...], told: list[tuple[Metric, Values]]) -> dict[str, Values]:
    """What is told is what is listed, with those labels; no label holds a path, a digest or a file's name."""
    assert [metric for metric, _ in told] == list(table)
    for metric, values in told:
        for labels, value in values.items():
            assert len(labels) == len(metric.labels)
            assert float(value) == value
            assert not any(SECRETS.search(label) for label in labels), (metric.name, labels)
    return {metric.name: values for metric, values in told}


@pytest.fixture
def place(tmp_path: Path) -> Any:
    place = Place(tmp_path)
    yield place
    place.close()


@pytest.fixture
def world(tmp_path: Path) -> Any:
    world = SiteWorld(tmp_path)
    yield world
    world.close()


def test_a_coordinator_tells_its_table_and_nothing_of_what_was_reported(place: Place) -> None:
    sites = place.begin()
    for one in sites:
        one.answer(one.next_assignment())
    place.until(lambda status: status["round"] == 2)
    running = place.coordinator
    told = refuse_other_than(coordinator.METRICS, list(coordinator.families(running.administration, running.context)))
    assert told["wardround_coordinator_uploads_total"] == {("trial", "accepted", ""): 3}
    assert told["wardround_coordinator_rounds_total"] == {("trial", "closed"): 1}
    assert told["wardround_coordinator_study_round"] == {("trial",): 2}
    assert told["wardround_coordinator_site_connected"] == {(site,): 1 for site in ("alpha", "bravo", "charlie")}
    assert told["wardround_coordinator_upload_bytes_total"] == {("trial",): 96}
    assert set(told["wardround_coordinator_round_seconds"]) == {("trial",)}
    assert running.is_ready()


def test_a_site_tells_its_table_and_nothing_of_its_data(world: SiteWorld) -> None:
    world.ready()
    world.coordinator.assign(STUDY, 1)
    wait_until(lambda: world.lines("receipt"), "the receipt is in the ledger", 20)
    before = len(world.lines())
    status = ServiceStatus(connected=True, uid=0, certificate_fork_since="", trainer_problem="")
    told = refuse_other_than(site.METRICS, list(site.Monitoring(world.state, lambda: status).families()))
    assert told["wardround_site_updates_total"] == {(STUDY,): 1}
    assert told["wardround_site_update_bytes_total"] == {(STUDY,): 4 * (64 * 64 + 64)}
    assert told["wardround_site_waits_for_release"] == {(STUDY,): 0}
    assert told["wardround_site_receipts_total"] == {(STUDY, "accepted"): 1}
    assert before <= told["wardround_site_ledger_lines"][()] <= len(world.lines())
    assert site.Monitoring(world.state, lambda: status).is_ready()
    stopped = ServiceStatus(connected=False, uid=0, certificate_fork_since="", trainer_problem="it hangs")
    told = refuse_other_than(site.METRICS, list(site.Monitoring(world.state, lambda: stopped).families()))
    assert told["wardround_site_connected"] == told["wardround_site_trainer_answers"] == {(): 0}
    assert not site.Monitoring(world.state, lambda: stopped).is_ready()
