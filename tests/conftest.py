"""Where the public hospital data is, for the tests marked ``data``.

``WARDROUND_DATA`` names the folder; without it, ``shared/data`` beside the checkout. Where there is none these tests
are deselected and a line says so; under CI that is an error, so that no green run has silently tested less.
"""

import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import forked

# How fast a machine is at this moment is no property of the code: a busy one must not fail a test.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

REPOSITORY = Path(__file__).resolve().parents[1]


def data_folder() -> Path:
    return Path(os.environ.get("WARDROUND_DATA") or REPOSITORY.parent / "shared" / "data")


def data_exists() -> bool:
    return (data_folder() / "heart_disease").is_dir()


def pytest_configure(config: pytest.Config) -> None:
    forked.install()
    if not data_exists() and os.environ.get("CI"):
        raise pytest.UsageError(f"no hospital data at {data_folder()}: set WARDROUND_DATA (under CI it must be there)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    forked.Forked.enabled = item.get_closest_marker("fresh") is None
    return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("system") is None)  # the long ones first, so that none is last
    if data_exists():
        return
    marked = [item for item in items if item.get_closest_marker("data")]
    config.hook.pytest_deselected(items=marked)
    items[:] = [item for item in items if not item.get_closest_marker("data")]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not data_exists():
        terminalreporter.write_line(
            f"tests marked `data` were deselected: no hospital data at {data_folder()}; set WARDROUND_DATA"
        )


@pytest.fixture(scope="session")
def hospital_data() -> Path:
    """The folder of the public hospital data. For tests marked ``data``."""
    return data_folder()
