"""What fails by itself: a disk, a table that is full, a race."""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from site_agent import audit
from tests.attacks import failing_disk
from tests.coordinator.test_crash import interrupted_at_one_step_after_the_other
from tests.site_agent.site_world import PERSON, STUDY, SiteWorld
from tools import verify_ledger
from tools.world import wait_until
from wardround import control
from wardround.errors import CannotWrite

LIMIT_S = 60


@pytest.fixture
def hospital(tmp_path: Path) -> Iterator[SiteWorld]:
    """One hospital that approved a study; its agent is started by the test as a process."""
    world = SiteWorld(tmp_path)
    try:
        world.ready()
        assert world.agent is not None
        world.agent.stop()
        world.agent = None
        yield world
    finally:
        world.close()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(LIMIT_S)
    assert process.stdout is not None
    process.stdout.close()


def gateway(world: SiteWorld, part: str = "", nth: int = 0) -> subprocess.Popen[str]:
    log = world.folder / "agent.log"
    return failing_disk.start("site-agent", part, nth, log, "run", "--only", "gateway", "--state", world.state.root)


def ask(world: SiteWorld, process: subprocess.Popen[str], round_: int) -> None:
    """Ask for a round, as often as the agent connects anew, until the trainer heard that it counts or it ended."""
    assert world.trainer is not None
    asked = 0

    def settled() -> bool:
        nonlocal asked
        assert world.trainer is not None
        streams = len(world.coordinator._streams)
        if streams and not asked:
            world.coordinator.assign(STUDY, round_)
            asked = streams
        rounds = {request["round"] for request in world.trainer.commands("commit")}
        journal = world.state.journal(STUDY)
        return process.poll() is not None or (round_ in rounds and journal.round == round_ and journal.applied)

    wait_until(settled, f"round {round_} counts, or the agent ended", LIMIT_S)


def ends_with_73_and_goes_on(world: SiteWorld, part: str, nth: int) -> bool:
    """Run into the failing fsync and start again. Whether there was one; all that must hold has been asserted."""
    process = gateway(world, part, nth)
    try:
        ask(world, process, 1)
        asked_to_end = process.poll() is None
        if asked_to_end:
            process.terminate()
        code = process.wait(LIMIT_S)
    finally:
        end(process)
    log = (world.folder / "agent.log").read_text()
    failed = code != 0
    if failed:
        assert code == 73 or (asked_to_end and code == -signal.SIGTERM), log  # ours, while it was ending already
        assert "the disk failed to keep what was written (Input/output error)" in log
        assert "Traceback" not in log
        assert audit.verify(world.state.ledger)[1] in (audit.VERIFIED, audit.UNRESOLVED)
        assert verify_ledger.judge(world.state.ledger)[0] in (audit.VERIFIED, audit.UNRESOLVED)
    wait_until(lambda: not world.coordinator._streams, "the line is down", LIMIT_S)
    process = gateway(world)
    try:
        for round_ in (1, 2):
            ask(world, process, round_)
        assert process.poll() is None, (world.folder / "agent.log").read_text()
        process.terminate()
        assert process.wait(LIMIT_S) == 0
    finally:
        end(process)
    verdict, code = audit.verify(world.state.ledger)
    assert code == audit.VERIFIED, verdict.reason
    assert verify_ledger.judge(world.state.ledger)[0] == audit.VERIFIED
    assert verdict.accepted == 2  # once a round, whatever was asked again
    lines = world.lines()
    assert len({line["upload_id"] for line in lines if line["type"] == "upload"}) == verdict.uploads
    assert [line["seq"] for line in lines] == list(range(len(lines)))
    return failed


@pytest.mark.attack(promise="P4", refused_by="site_agent/gateway/ledger.py")
@pytest.mark.parametrize(
    ("part", "nth"),
    [
        pytest.param("000001.jsonl", 3, id="the upload's line"),
        pytest.param("000001.jsonl", 4, id="the receipt's line"),
        pytest.param("heads.jsonl", 1, id="a signed head"),
        pytest.param(".tmp", 3, id="the journal"),
    ],
)
def test_fsync_fails_once(hospital: SiteWorld, part: str, nth: int) -> None:
    """A failed fsync left a line on the disk that the program did not know of: two lines later the ledger was broken
    for good."""
    assert ends_with_73_and_goes_on(hospital, part, nth)


@pytest.mark.chaos
@pytest.mark.attack(promise="P4", refused_by="proto/wardround/durable.py")
@pytest.mark.timeout(1200)
def test_fsync_fails_once__at_every_one_of_a_round(tmp_path: Path) -> None:
    """One after the other, until a run needs no more of them."""
    for nth in range(1, 100):
        folder = tmp_path / str(nth)
        folder.mkdir()
        world = SiteWorld(folder)
        try:
            world.ready()
            assert world.agent is not None
            world.agent.stop()
            world.agent = None
            if not ends_with_73_and_goes_on(world, "", nth):
                break
        finally:
            world.close()
    assert nth > 10


@pytest.mark.attack(promise="P4", refused_by="proto/wardround/control.py")
def test_fsync_fails_once__under_a_command(hospital: SiteWorld) -> None:
    """A person's command met the failed disk; the service answered it and went on as if nothing had happened."""
    process = gateway(hospital, "consents", 1)
    try:
        wait_until(lambda: control.is_listening(hospital.state.control), "the service listens", LIMIT_S)
        with pytest.raises(CannotWrite, match="the disk failed to keep what was written"):
            control.call(hospital.state.control, {"command": "withdraw", "study": STUDY, "by": PERSON})
        assert process.wait(LIMIT_S) == 73
    finally:
        end(process)


@pytest.mark.attack(promise="P4", refused_by="coordinator/store.py")
@pytest.mark.parametrize("where", ["fails-sync", "fails-before-commit", "fails-after-commit"])
def test_fsync_fails_once__at_the_coordinator(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its disk fails at one durable step after the other: each time it ends with 73, and no accepted update is lost."""
    interrupted_at_one_step_after_the_other(tmp_path, where, "mean", monkeypatch, code=73)
