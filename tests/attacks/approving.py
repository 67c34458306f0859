"""A coordinator that changes its offer while a hospital looks at it."""

from pathlib import Path

from tests.site_agent.fake_coordinator import FakeCoordinator
from tests.site_agent.site_world import document


def swap(coordinator: FakeCoordinator, model: Path) -> str:
    """One local step becomes ten thousand epochs at a rate of 100, under the next revision."""
    settings = document()
    settings["training"] |= {"local_steps": None, "local_epochs": 10_000, "learning_rate": "100.0"}
    return coordinator.offer(settings, model, revision=2)
