"""Two programs with one site's identity: a copied machine is noticed, and one of the two is served."""

import logging

import pytest

from coordinator.members.instances import Instances
from wardround.errors import TryAgain

OLD, NEW = "0a" * 16, "0b" * 16


@pytest.fixture
def instances() -> Instances:
    return Instances(lambda: 1_700_000_000.0)


def test_a_program_that_starts_again_takes_the_place_of_the_one_before(instances: Instances) -> None:
    with instances.connected("alpha", OLD), instances.connected("alpha", NEW):
        instances.refuse_copy("alpha", NEW)
    assert instances.copied_since("alpha") is None


def test_a_broken_connection_of_one_program_is_no_copy(instances: Instances) -> None:
    with instances.connected("alpha", OLD), instances.connected("alpha", OLD):
        instances.refuse_copy("alpha", OLD)
    assert instances.copied_since("alpha") is None


def test_a_program_that_comes_back_beside_its_successor_is_refused_and_the_site_is_named(
    instances: Instances, caplog: pytest.LogCaptureFixture
) -> None:
    with instances.connected("alpha", OLD), instances.connected("alpha", NEW), caplog.at_level(logging.WARNING):
        for _ in range(100):
            with pytest.raises(TryAgain, match="another program with the identity of site `alpha`") as refused:
                instances.refuse_copy("alpha", OLD)
        with pytest.raises(TryAgain), instances.connected("alpha", OLD):
            pass
        instances.refuse_copy("alpha", NEW)
        instances.refuse_copy("bravo", OLD)
    assert refused.value.code == "SITE_CONNECTED_TWICE"
    assert instances.copied_since("alpha") == 1_700_000_000
    warnings = [
        record for record in caplog.records if "site alpha: two programs run with its identity" in record.message
    ]
    assert 1 <= len(warnings) <= 20  # however often it comes


def test_when_the_younger_program_has_gone_the_older_one_is_taken(instances: Instances) -> None:
    with instances.connected("alpha", OLD), instances.connected("alpha", NEW):
        pass
    with instances.connected("alpha", OLD):
        instances.refuse_copy("alpha", OLD)


def test_an_agent_that_does_not_name_itself_is_never_refused(instances: Instances) -> None:
    with instances.connected("alpha", ""), instances.connected("alpha", NEW), instances.connected("alpha", ""):
        instances.refuse_copy("alpha", "")
