"""The policy at the exit, and a person at the door: what is blocked, held, released, rejected; what the ledger says."""

import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from site_agent import audit
from site_agent.gateway import room
from site_agent.gateway.enrolment.rollover import roll_over
from site_agent.gateway.exit.ledger import Ledger
from site_agent.state.directory import SiteState, study_state
from tests.site_agent.fake_trainer import SHARED, write_tensors
from tests.site_agent.site_world import DPO, PERSON, STUDY, SiteWorld, document
from wardround.errors import BadData, CannotWrite, NeedsPerson, NotPermitted, UsageProblem
from wardround.local import durable
from wardround.records.ledger.entries import Entry, UploadEntry
from wardround.tensors.manifests import TensorSpec

SIZE = sum(spec.bytes for spec in SHARED)
EVERY = ('updates = "none"', 'updates = "every"')
FIRST = ('updates = "none"', 'updates = "first"')


def declined(world: SiteWorld, code: str) -> None:
    """The coordinator heard a code, and not a byte of an update."""
    world.coordinator.wait_declared("DECLINED", code)
    assert not world.coordinator.uploads
    assert not world.lines("upload")


def held(world: SiteWorld, *edits: tuple[str, str]) -> str:
    """A world whose first round waits for a person; the update's digest."""
    world.join()
    world.offer()
    world.start()
    world.draft(*edits)
    world.approve()
    world.coordinator.wait_declared("READY")
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_declared("HELD")
    return str(world.command("waiting", study=STUDY, round=1)["update"])


# Approving.


def test_approving_without_a_policy_is_refused_with_the_command_that_drafts_one(world: SiteWorld) -> None:
    world.join()
    world.offer()
    world.start()
    with pytest.raises(NeedsPerson, match="there is no policy at") as refused:
        world.command("approve", study=STUDY, data="patients", digest=world.shown(), by=PERSON)
    assert refused.value.hint.startswith("`site-agent policy draft hearts` writes a proposal")
    assert not world.lines("consent")


def test_approving_what_the_policy_denies_is_refused_with_the_rule(world: SiteWorld) -> None:
    world.join()
    world.offer()
    world.start()
    world.draft(("deny = []", 'deny = [{ match = "shared.b*" }]'))
    with pytest.raises(NotPermitted, match=r"shared\.bias: tensors\.deny 1: 'shared\.b\*'; nothing was approved"):
        world.approve()
    assert world.state.consent(STUDY) is None


def test_too_few_records_for_a_metric_are_refused_at_approval(world: SiteWorld) -> None:
    world.join()
    world.offer()
    world.start()
    world.draft(("min_records = 1", "min_records = 21"))  # the table has 20 to validate with
    with pytest.raises(NotPermitted, match="wants 21 records, there are fewer"):
        world.approve()


def test_a_consent_keeps_who_what_leaves_and_what_stays(world: SiteWorld) -> None:
    world.ready()
    consent = world.state.consent(STUDY)
    assert consent is not None
    assert consent.approved_by == DPO
    assert [tensor.name for tensor in consent.private] == ["private.weight"]
    assert consent.upload == tuple(SHARED)
    assert (consent.rows, consent.validation_rows) == (100, 20)


def test_approving_again_says_what_changed_tensor_by_tensor(world: SiteWorld) -> None:
    world.ready()
    wider = (SHARED[0], TensorSpec("shared.bias", "F32", (65,)), TensorSpec("extra.weight", "F32", (2, 2)))
    assert world.trainer is not None
    assert world.agent is not None
    world.trainer.described = wider
    world.coordinator.offer(
        document(title="another"), write_tensors(world.folder / "wider.safetensors", wider, 1), revision=2
    )
    world.command("refresh")
    said: list[str] = []
    with pytest.raises(NotPermitted, match=r"shared\.bias: tensors\.allow 2: .* allows 256 bytes, it has 260"):
        world.agent.commands.approve(STUDY, "patients", world.shown(), DPO, said.append)
    assert said[:3] == [
        "changed since it was approved: revision 2, approved was 1",
        "changed since it was approved: `extra.weight` is added (F32 [2, 2])",
        "changed since it was approved: `shared.bias` is F32 [65], was F32 [64]",
    ]
    world.draft()
    assert world.agent.commands.approve(STUDY, "patients", world.shown(), DPO, said.append).revision == 2


# Blocking.


def test_a_policy_changed_after_the_approval_blocks_the_round_before_any_training(world: SiteWorld) -> None:
    world.ready()
    world.draft(("deny = []", 'deny = [{ match = "shared.bias" }]'))
    world.coordinator.assign(STUDY, 1)
    declined(world, "DECLINED_POLICY")
    assert world.trainer is not None
    assert not world.trainer.commands("train")
    (line,) = world.lines("blocked")
    assert (line["study"], line["revision"], line["round"], line["attempt"]) == (STUDY, 1, 1, 1)
    assert (line["what"], line["rule"]) == ("shared.bias", "tensors.deny 1: 'shared.bias'")


def test_a_broken_policy_blocks_everything_and_a_mended_one_lets_the_next_round_pass(world: SiteWorld) -> None:
    world.ready()
    world.state.policy.write_text("[study\n")
    world.coordinator.assign(STUDY, 1)
    declined(world, "DECLINED_POLICY")
    (line,) = world.lines("blocked")
    assert line["what"] == "everything"
    assert "policy.toml: not TOML: " in line["rule"]
    world.draft()
    world.coordinator.assign(STUDY, 2)
    world.coordinator.wait_receipts(1)


def test_the_ledger_says_which_policy_was_in_force(world: SiteWorld) -> None:
    world.ready()
    world.draft(("digits = 4", "digits = 5"))
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    world.state.policy.unlink()
    world.coordinator.assign(STUDY, 2)
    world.coordinator.wait_declared("DECLINED", "DECLINED_POLICY")
    lines = world.lines("policy")
    assert [line["event"] for line in lines] == ["seen", "changed", "removed"]
    assert len({line["sha256"] for line in lines}) == 3


def test_a_spent_quota_blocks_the_next_round(world: SiteWorld) -> None:
    world.join()
    world.offer()
    world.start()
    world.draft((f"bytes_per_day = {12 * SIZE}", f"bytes_per_day = {2 * SIZE - 1}"))
    world.approve()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    world.coordinator.assign(STUDY, 2)
    world.coordinator.wait_declared("DECLINED", "DECLINED_POLICY")
    (line,) = world.lines("blocked")
    assert (line["what"], line["rule"]) == (f"{2 * SIZE} bytes in this day", f"quotas.bytes_per_day = {2 * SIZE - 1}")
    assert len(world.lines("upload")) == 1
    world.stop()
    assert world.verdict().ok


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        pytest.param((*SHARED, TensorSpec("private.weight", "F32", (8, 8))), "`private.weight` is added", id="extra"),
        pytest.param(SHARED[:1], "`shared.bias` is gone", id="missing"),
        pytest.param(
            (SHARED[0], TensorSpec("shared.bias", "F32", (8, 8))), "`shared.bias` is F32 [8, 8], was F32 [64]",
            id="a private tensor under a shared name",
        ),
    ],
)  # fmt: skip
def test_other_tensors_than_approved_are_blocked_and_in_the_ledger(
    world: SiteWorld, specs: tuple[TensorSpec, ...], said: str
) -> None:
    world.ready()
    assert world.trainer is not None
    world.trainer.specs = specs
    world.coordinator.assign(STUDY, 1)
    declined(world, "DECLINED_MODEL_MISMATCH")
    (line,) = world.lines("blocked")
    assert line["what"] == "the update"
    assert said in line["rule"]


@pytest.mark.parametrize("value", ["nan", "inf", "0.123456789", "patient 17"])
def test_a_metric_that_is_no_told_decimal_is_blocked_and_its_value_is_nowhere(world: SiteWorld, value: str) -> None:
    world.ready()
    assert world.trainer is not None
    world.trainer.metrics = {"val_loss": value}
    world.coordinator.assign(STUDY, 1)
    declined(world, "DECLINED_POLICY")
    (line,) = world.lines("blocked")
    assert "metric `val_loss` is not a decimal of at most 4 digits" in line["rule"]
    assert value not in line["rule"]


def test_when_the_ledger_cannot_be_written_nothing_is_sent(world: SiteWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.ready()
    append_all = Ledger.append_all

    def full(self: Ledger, entries: Sequence[Entry]) -> None:
        if any(isinstance(entry, UploadEntry) for entry in entries):
            raise CannotWrite("ledger/000001.jsonl: No space left on device")
        append_all(self, entries)

    monkeypatch.setattr(Ledger, "append_all", full)
    monkeypatch.setattr(room, "ROOM_S", 0)
    world.coordinator.assign(STUDY, 1)
    declined(world, "DECLINED_RESOURCES")
    monkeypatch.undo()
    world.coordinator.assign(STUDY, 1, attempt=2)
    world.coordinator.wait_receipts(1)
    assert world.trainer is not None
    assert len(world.trainer.commands("train")) == 1


def test_a_disk_that_is_full_for_a_moment_costs_no_round(world: SiteWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.ready()
    append_all, tries = Ledger.append_all, 0

    def full_twice(self: Ledger, entries: Sequence[Entry]) -> None:
        nonlocal tries
        tries += any(isinstance(entry, UploadEntry) for entry in entries)
        if tries in (1, 2):
            raise CannotWrite("ledger/000001.jsonl: No space left on device")
        append_all(self, entries)

    monkeypatch.setattr(Ledger, "append_all", full_twice)
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    assert world.trainer is not None
    assert (tries, len(world.trainer.commands("train"))) == (3, 1)


# A person at the door.


def test_a_held_update_leaves_when_it_is_released_and_not_before(world: SiteWorld) -> None:
    update = held(world, EVERY)
    assert not world.coordinator.uploads
    assert study_state(world.state.offer(STUDY), world.state.consent(STUDY), world.state.journal(STUDY)) == "held"
    shown = world.command("waiting", study=STUDY, round=1)
    assert [row["name"] for row in shown["tensors"]] == [spec.name for spec in SHARED]
    assert all(float(row["l2"]) > 0 for row in shown["tensors"])
    assert (shown["metrics"], shown["num_examples"], shown["payload_bytes"]) == ({"val_loss": "0.5"}, 80, SIZE)
    assert world.command("decide", study=STUDY, round=1, decision="released", update=update, by=PERSON) == {
        "goes_on": True
    }
    world.coordinator.wait_receipts(1)
    (held_line,), (released,) = world.lines("held"), world.lines("released")
    assert held_line["update"] == released["update"] == update
    assert released["by"] == PERSON
    assert released["seq"] < world.lines("upload")[0]["seq"]


def test_a_rejected_update_never_leaves_and_the_round_goes_on_without_it(world: SiteWorld) -> None:
    update = held(world, EVERY)
    world.command("decide", study=STUDY, round=1, decision="rejected", update=update, by=PERSON)
    declined(world, "DECLINED_POLICY")
    assert world.lines("rejected")[0]["by"] == PERSON
    with pytest.raises(UsageProblem, match="was already rejected"):
        world.command("decide", study=STUDY, round=1, decision="released", update=update, by=PERSON)


def test_only_the_first_update_of_a_study_waits_where_the_policy_says_so(world: SiteWorld) -> None:
    update = held(world, FIRST)
    world.command("decide", study=STUDY, round=1, decision="released", update=update, by=PERSON)
    world.coordinator.wait_receipts(1)
    world.coordinator.assign(STUDY, 2)
    world.coordinator.wait_receipts(2)
    assert len(world.lines("held")) == 1


def test_a_release_while_the_agent_is_down_counts_when_it_is_back(world: SiteWorld) -> None:
    update = held(world, EVERY)
    assert world.agent is not None
    world.agent.commands.releases.decide(STUDY, 1, "released", update, DPO)
    world.restart()
    world.coordinator.wait_connected()
    world.coordinator.assign(STUDY, 1)  # as the real one does on every connection
    world.coordinator.wait_receipts(1)
    assert world.trainer is not None
    assert len(world.trainer.commands("train")) == 1


def test_a_held_update_is_said_again_after_a_restart_and_held_once(world: SiteWorld) -> None:
    held(world, EVERY)
    world.coordinator.declared.clear()
    world.restart()
    world.coordinator.wait_connected()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_declared("HELD")
    assert len(world.lines("held")) == 1


def test_where_no_update_waits_a_person_is_told_so(world: SiteWorld) -> None:
    world.ready()
    with pytest.raises(UsageProblem, match="no update of `hearts` waits for a person to release it") as refused:
        world.command("waiting", study=STUDY, round=1)
    assert refused.value.hint == "`site-agent studies` shows what waits"


def test_another_update_than_the_one_shown_is_not_released(world: SiteWorld) -> None:
    held(world, EVERY)
    with pytest.raises(UsageProblem, match="another update of round 1 of `hearts` waits than the one that was shown"):
        world.command("decide", study=STUDY, round=1, decision="released", update="00" * 32, by=PERSON)
    with pytest.raises(UsageProblem, match="round 7 of `hearts` does not wait for a person; round 1 does") as refused:
        world.command("waiting", study=STUDY, round=7)
    assert refused.value.hint == "`site-agent release hearts --round 1`"


def test_a_round_that_closed_without_the_held_update_drops_it(world: SiteWorld) -> None:
    update = held(world, FIRST)
    world.coordinator.declared.clear()
    world.coordinator.assign(STUDY, 2)
    world.coordinator.wait_declared("HELD")
    with pytest.raises(UsageProblem, match="round 1 of `hearts` does not wait"):
        world.command("decide", study=STUDY, round=1, decision="released", update=update, by=PERSON)
    assert world.trainer is not None
    assert world.trainer.commands("discard")[0]["round"] == 1


# Leaving.


def test_a_site_that_left_told_the_coordinator_and_does_not_run_again(world: SiteWorld) -> None:
    world.ready()
    assert world.command("leave", by=PERSON) == {"unreported": []}
    world.coordinator.wait_declared("WITHDRAWN")
    assert world.agent is not None
    error = world.agent.wait()
    assert isinstance(error, NeedsPerson)
    assert error.message == "site `st-olav` left federation `test`"
    world.agent.stop()
    world.agent = None
    assert world.lines("left")[0]["by"] == PERSON
    with pytest.raises(NeedsPerson, match="left federation `test`: nothing more is sent") as refused:
        world.start()
    assert "`site-agent join` with another --state and a new invitation" in refused.value.hint
    assert world.verdict().ok


# Control traffic.


def test_every_byte_of_every_message_is_in_the_ledger(world: SiteWorld) -> None:
    world.ready()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    world.coordinator.assign(STUDY, 4, kind="validate")
    world.coordinator.wait_receipts(2)
    world.stop()
    said = sum(line["bytes"] for line in world.lines("control"))
    payload = sum(line["payload_bytes"] for line in world.lines("upload"))
    heard = sum(len(message) for message in world.coordinator.heard[::2])  # every other one is a call's headers
    assert said + payload == heard
    methods = {row["method"] for line in world.lines("control") for row in line["methods"]}
    assert methods == {"Enrol", "Studies", "Watch", "Declare", "Download", "Upload"}
    before_upload = [line["type"] for line in world.lines()]
    for seq, kind in enumerate(before_upload):
        if kind == "upload":
            assert before_upload[seq - 1] == "control"


# What crosses beside it.


def test_no_text_of_an_error_no_path_and_no_host_name_reaches_the_coordinator(
    world: SiteWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Canaries in what the trainer raises, in the state's path, in the policy and in the person's name."""
    monkeypatch.setattr(room, "ROOM_S", 0)
    canary = "CANARY-7f3a"
    world.state = SiteState(world.folder / canary)
    world.join()
    world.offer(rounds=5)
    world.start()
    world.draft(("[tensors]", f"# {canary}\n[tensors]"))
    world.command("approve", study=STUDY, data=canary, digest=world.shown(), by={"name": canary, "uid": 1000})
    assert world.trainer is not None
    failures = [
        BadData(f"/data/{canary}.csv: row 3: {canary}", code="DECLINED_DATA_INVALID", hint=canary),
        NeedsPerson(canary),
        CannotWrite(f"{world.state.staging}: {canary}"),
    ]
    for round_, failure in enumerate(failures, 1):
        world.trainer.failure = failure
        world.coordinator.assign(STUDY, round_)
        world.coordinator.wait_for(
            lambda wanted=round_: sum(said.status == 3 for said in world.coordinator.declared) >= wanted, "declined"
        )
    world.trainer.failure = None
    world.trainer.metrics = {"val_loss": canary}
    world.coordinator.assign(STUDY, 4)
    world.coordinator.wait_declared("DECLINED", "DECLINED_POLICY")
    world.trainer.metrics = {"val_loss": "0.5"}
    world.coordinator.assign(STUDY, 5)
    world.coordinator.wait_receipts(1)
    world.command("withdraw", study=STUDY, by={"name": canary, "uid": 1000})
    world.coordinator.wait_declared("WITHDRAWN")
    everything = b"\n".join(world.coordinator.heard)
    assert b"st-olav" not in everything  # not even who it is: the certificate says
    name = socket.gethostname()
    hosts = (name,) if len(name) > 5 else ()  # a few letters stand in any key by chance
    for secret in (canary, str(world.folder), *hosts, "patients"):
        assert secret.encode() not in everything, secret


# A ledger from yesterday.


def test_a_ledger_restored_from_a_backup_is_refused_and_the_refusal_names_the_way_out(world: SiteWorld) -> None:
    world.ready()
    world.stop()
    yesterday = {path: path.read_bytes() for path in world.state.ledger.iterdir() if path.is_file()}
    journal = world.state.root / "journal"
    world.start()
    world.coordinator.wait_connected()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    world.agent.stop()
    for path, data in yesterday.items():
        path.write_bytes(data)
    for path in journal.iterdir():
        path.unlink()
    agent = world.start()
    world.coordinator.wait_connected()
    world.coordinator.assign(STUDY, 2)
    error = agent.wait()
    assert isinstance(error, NeedsPerson)
    assert error.code == "LEDGER_ROLLBACK"
    assert "`site-agent audit rollover` begins a new ledger that cites this one" in error.hint
    agent.stop()
    world.agent = None
    done = roll_over(world.state)
    assert done.continues.lines == len(
        (world.state.root / f"ledger-{done.continues.ledger_id}/000001.jsonl").read_bytes().splitlines()
    )
    genesis, identity = world.lines()
    assert genesis["continues"]["head"] == done.continues.head
    assert genesis["ledger_id"] == done.ledger_id != done.continues.ledger_id
    assert identity["event"] == "reopened"
    alone = world.folder / "alone"
    shutil.copytree(world.state.ledger, alone)
    assert audit.verify(alone)[0].consistent


def test_a_ledger_without_an_identity_line_is_not_rolled_over(world: SiteWorld) -> None:
    """It ended in an IndexError."""
    world.join()
    key = world.identity_key()
    shutil.rmtree(world.state.ledger)
    ledger = Ledger(world.state.ledger, key)
    ledger.begin()
    ledger.close()
    before = (world.state.ledger / "000001.jsonl").read_bytes()
    with pytest.raises(NeedsPerson, match="has no `identity` line, so nobody's receipts can stand") as refused:
        roll_over(world.state)
    assert refused.value.hint == "restore the folder from the last backup, then `site-agent audit rollover`"
    assert (world.state.ledger / "000001.jsonl").read_bytes() == before
    assert not (world.state.root / "ledger-new").exists()


def test_a_rollover_that_broke_off_is_finished_by_the_same_command(
    world: SiteWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.join()
    move = durable.move

    def once(source: Path, target: Path) -> None:
        move(source, target)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(durable, "move", once)
    with pytest.raises(KeyboardInterrupt):
        roll_over(world.state)
    assert not world.state.ledger.exists()
    done = roll_over(world.state)
    assert world.lines()[0]["ledger_id"] == done.ledger_id


def test_an_agent_without_a_ledger_does_not_begin_another(world: SiteWorld) -> None:
    world.join()
    (world.state.ledger / "000001.jsonl").unlink()
    (world.state.ledger / "heads.jsonl").unlink()
    with pytest.raises(NeedsPerson, match="there is no ledger in") as refused:
        world.start()
    assert "restore the folder from the last backup" in refused.value.hint
