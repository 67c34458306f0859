"""A malicious coordinator: it may say anything to a site, and offer and ask for whatever it likes."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from site_agent import audit
from site_agent.gateway import evidence
from site_agent.gateway.ledger import Ledger
from tests.attacks.hostile_receipts import LyingCoordinator, a_head, head, lying_world
from tests.site_agent.site_world import STUDY, SiteWorld
from tools import verify_ledger
from tools.world import command
from wardround import receipts

LIES: list[Any] = [
    pytest.param({"changes": {"previous": "11" * 32}}, id="previous"),
    pytest.param({"changes": {"ledger": head(3)}}, id="another head"),
    pytest.param({"changes": {"ledger": head("x")}}, id="lines is text"),
    pytest.param({"changes": {"ledger": head(True)}}, id="lines is a bool"),
    pytest.param({"changes": {"ledger": head(2**53 - 1)}}, id="lines is huge"),
    pytest.param({"changes": {"ledger": head(-1)}}, id="lines is negative"),
    pytest.param({"changes": {"ledger": head(3, ["x"])}}, id="head is a list"),
    pytest.param({"changes": {"ledger": {"lines": 3}}}, id="half a head"),
    pytest.param({"changes": {"ledger": {**head(3), "more": 1}}}, id="more than a head"),
    pytest.param({"changes": {"ledger": [1]}}, id="ledger is a list"),
    pytest.param({"changes": {"ledger": "a_head"}}, id="a head before the upload"),
    pytest.param({"changes": {"decision": "maybe"}}, id="decision"),
    pytest.param({"changes": {"decision": ["accepted"]}}, id="decision is a list"),
    pytest.param({"changes": {"decision": "refused", "code": "NO_SUCH_CODE"}}, id="a code that no list has"),
    pytest.param({"changes": {"decision": "refused", "code": "patient 4711 is ill"}}, id="a code in words"),
    pytest.param({"changes": {"decision": "refused", "code": ""}}, id="refused for nothing"),
    pytest.param({"changes": {"code": "TENSOR_NORM"}}, id="accepted, with a code"),
    pytest.param(
        {"changes": {"decision": "refused", "code": "TENSOR_NORM", "tensor": "private.weight"}}, id="another tensor"
    ),
    pytest.param({"changes": {"decision": "refused", "code": "TENSOR_NORM", "tensor": {}}}, id="tensor is an object"),
    pytest.param({"changes": {"site": "charite"}}, id="another site"),
    pytest.param({"changes": {"federation": "other"}}, id="another federation"),
    pytest.param({"changes": {"upload_id": "00" * 16}}, id="another upload"),
    pytest.param({"changes": {"round": 2}}, id="another round"),
    pytest.param({"changes": {"round": "1"}}, id="round is text"),
    pytest.param({"changes": {"attempt": True}}, id="attempt is a bool"),
    pytest.param({"changes": {"payload_bytes": 1}}, id="other bytes"),
    pytest.param({"changes": {"time": "\x1b]52;c;eA==\x07"}}, id="an escape sequence"),
    pytest.param({"changes": {"receipt_id": "x" * 100_000}}, id="a long text"),
    pytest.param({"changes": {"extra": 1}}, id="a field too many"),
    pytest.param({"removes": ("previous",)}, id="a field too few"),
    pytest.param({"raw": b"\xff\xfe\x00"}, id="no text"),
    pytest.param({"raw": b"[" * 50_000}, id="deep"),
    pytest.param({"raw": b'{"a": 1}'}, id="not canonical"),
    pytest.param({"kind": receipts.HEAD_TYPE}, id="signed as a head"),
]


@pytest.fixture
def lied_to(tmp_path: Path) -> Iterator[tuple[SiteWorld, LyingCoordinator]]:
    world, lying = lying_world(tmp_path)
    try:
        yield world, lying
    finally:
        world.close()


@pytest.mark.attack(promise="P2", refused_by="proto/wardround/receipts.py")
@pytest.mark.parametrize("lie", LIES)
def test_hostile_receipt(lied_to: tuple[SiteWorld, LyingCoordinator], lie: dict[str, Any]) -> None:
    """A receipt that cannot stand in an honest ledger made it one that both verifiers call changed, or that the agent
    could never open again. It is kept aside, the site says who lied, and nothing more of that study is sent."""
    world, lying = lied_to
    world.ready()
    if lie.get("changes", {}).get("ledger") == "a_head":
        lie = {"changes": {"ledger": a_head(world)}}
    for name, value in lie.items():
        setattr(lying, name, value)
    lying.assign(STUDY, 1)
    lying.wait_declared("DECLINED", "DECLINED_POLICY")
    assert world.trainer is not None
    assert not world.trainer.commands("commit", "discard")
    lying.assign(STUDY, 1, attempt=2)  # and again: declined before anything is sent
    lying.wait_for(lambda: sum(said.code != 0 for said in lying.declared) == 2, "declined twice")
    assert len(lying.uploads) == 1
    world.restart()
    lying.wait_connected()
    assert world.agent is not None
    world.agent.stop()
    world.agent = None
    verdict, code = audit.verify(world.state.ledger)
    assert (code, verdict.unresolved, verdict.first_bad) == (audit.UNRESOLVED, 1, None), verdict.reason
    assert verify_ledger.judge(world.state.ledger)[0] == audit.UNRESOLVED
    Ledger(world.state.ledger, world.identity_key()).close()
    (kept,) = evidence.read(world.state.ledger)
    assert base64.b64decode(kept["payload_base64"]) == lying.told[0][: evidence.MAX_PAYLOAD]
    assert (kept["study"], kept["round"]) == (STUDY, "1")


@pytest.mark.attack(promise="P2", refused_by="site_agent/gateway/evidence.py")
def test_hostile_receipt__and_then_the_truth(lied_to: tuple[SiteWorld, LyingCoordinator]) -> None:
    """When the coordinator answers honestly later, the upload is resolved, and the study goes on."""
    world, lying = lied_to
    world.ready()
    lying.changes = {"previous": "11" * 32}
    lying.assign(STUDY, 1)
    lying.wait_declared("DECLINED", "DECLINED_POLICY")
    said = command("site-agent", "status", "--state", world.state.root)
    assert "THE COORDINATOR'S RECEIPT CANNOT BE BELIEVED" in said
    assert f"round 1 of {STUDY}): this receipt does not follow the one before it: one is missing" in said
    lying.truth()
    world.restart()
    assert world.trainer is not None
    world.trainer.wait_asked("commit")
    lying.assign(STUDY, 2)
    world.trainer.wait_asked("commit", 2)
    assert world.agent is not None
    world.agent.stop()
    world.agent = None
    assert world.verdict().ok
    assert [json.loads(line["envelope"]["payload"])["round"] for line in world.lines("receipt")] == [1, 2]


@pytest.mark.attack(promise="P2", refused_by="site_agent/gateway/evidence.py")
def test_hostile_receipt__without_end(lied_to: tuple[SiteWorld, LyingCoordinator]) -> None:
    """A coordinator that invents another lie each time it is asked fills no disk: the first ones are kept."""
    world, lying = lied_to
    world.ready()
    lying.changes = {"previous": "11" * 32}
    lying.assign(STUDY, 1)
    lying.wait_declared("DECLINED", "DECLINED_POLICY")
    assert world.agent is not None
    world.agent.stop()
    world.agent = None
    ledger = Ledger(world.state.ledger, world.identity_key())
    (upload,) = ledger.unresolved
    for number in range(2 * evidence.MAX_FILES):
        lying.changes = {"receipt_id": f"{number}-" + "x" * 200_000}
        envelope = lying._lie(lying._receipt(bytes.fromhex(upload), None, "accepted", "", None))
        error = ledger.dispute(upload, envelope, "made up")
    assert "what came could not be kept" in error.message
    ledger.close()
    kept = list((world.state.ledger / "evidence").iterdir())
    assert len(kept) == evidence.MAX_FILES
    assert sum(path.stat().st_size for path in kept) < evidence.MAX_FILES * 2 * evidence.MAX_PAYLOAD
    assert "made up" in {row["why"] for row in evidence.read(world.state.ledger)}
