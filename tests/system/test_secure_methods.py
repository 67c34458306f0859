"""Every method that goes with secure aggregation, between real agents that send sums alone: the bits of the lab."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fl_algorithms.server.secure_study import averages, summable
from fl_algorithms.study import ResolvedStudy
from site_agent import audit
from tests.system import test_methods as methods
from tests.system.test_methods import FOR_MASKS, SETTINGS, SITES, Federation
from tools.world import World
from wardround.local import control
from wardround.records.ledger.entries import UploadEntry
from wardround.records.ledger.secure import BLOCKS_ALONE, SAME, OpenedEntry, SumCheckedEntry

pytestmark = [pytest.mark.system, pytest.mark.chaos]

SECURE: dict[str, Any] = {
    "reported": {"counts": "uniform"},
    "limits": {"norm_multiple": 0},
    "secure_aggregation": {"range": 64.0},
}
LIKE_FEDADAM = {"fedyogi", "fedadagrad"}  # but for one line of arithmetic, which the lab's tests have
METHODS = sorted(set(summable()) - FOR_MASKS - LIKE_FEDADAM)


def study_of(method: str) -> ResolvedStudy:
    study = methods.study_of(method, SETTINGS.get(method, {}) | SECURE)
    assert study.secure_aggregation is not None
    return study


class SecureFederation(Federation):
    """Each site's people know the others from the first study on."""

    def before_approval(self, site: str, study: str) -> None:
        service = self.site(site).control
        members = control.call(service, {"command": "peers", "study": study}, timeout_s=methods.WAIT_S)["members"]
        person = {"name": "dpo", "uid": 1000, "source": "sudo"}
        for row in members:
            if not row["here"] and not row["by"]:
                about = {"site": row["site"], "fingerprint": row["fingerprint"]}
                control.call(service, {"command": "know", **about, "by": person}, timeout_s=methods.WAIT_S)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureFederation]:
    folder = tmp_path_factory.mktemp("secure")
    policy = methods.policy_for([study_of(method) for method in METHODS])
    with World(folder / "world", methods.FEDERATION) as world:
        federation = SecureFederation(world, methods.tables_in(folder / "data"))
        methods.begin(federation, policy.replace('form = "exact"', 'form = "uniform"'))
        yield federation


@pytest.mark.parametrize("method", METHODS)
def test_sums_alone_between_agents_give_the_bits_of_the_lab(
    method: str, federation: SecureFederation, tmp_path: Path
) -> None:
    study = study_of(method)
    methods.same_as_in_the_lab(study, federation, tmp_path)
    for site in SITES:
        lines = [line.entry for line in audit.lines(federation.site(site).ledger)]
        own = [entry for entry in lines if getattr(entry, "study", "") == study.study.name]
        uploads = [entry for entry in own if isinstance(entry, UploadEntry)]
        assert [entry.round for entry in uploads] == [1, 2, 3]
        assert {(entry.num_examples, entry.metrics) for entry in uploads} == {(0, ())}
        assert [entry.round for entry in own if isinstance(entry, OpenedEntry)] == [1, 2, 3]
        checked = [(entry.round, entry.result) for entry in own if isinstance(entry, SumCheckedEntry)]
        assert checked == [(round_, SAME if averages(study) else BLOCKS_ALONE) for round_ in (1, 2)]


def test_every_ledger_of_sums_alone_verifies(federation: SecureFederation) -> None:
    for site in SITES:
        federation.world.agents[site].stop()
        verdict = audit.verify(federation.site(site).ledger)[0]
        assert (verdict.consistent, verdict.reason, verdict.unresolved) == (True, "", 0), verdict
