"""What the tests of a site share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.site_agent.shell import Shell
from tests.site_agent.site_world import SiteWorld


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SiteWorld]:
    """A site against a coordinator that the test plays; empty at first."""
    world = SiteWorld(tmp_path)
    try:
        yield world
    finally:
        world.close()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """The command line of a site that has joined and is offered a study."""
    shell = Shell(tmp_path)
    try:
        shell.join()
        shell.offer()
        yield shell
    finally:
        shell.close()
