"""What a trainer whose code was taken over could try, alone or in league with the coordinator."""

import ctypes
import json
import math
import os
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from site_agent import audit, handoff
from site_agent.gateway import estimate
from site_agent.gateway.consent.rows import study_rows
from site_agent.gateway.exit.ledger import Ledger
from site_agent.gateway.exit.measure import measure
from site_agent.handoff import Trainer, trainer_socket
from site_agent.state.consent import Consent, Shown, TrainedData
from site_agent.state.directory import Journal, SiteState
from site_agent.state.offer import encoding_in
from site_agent.trainer.vault import models
from site_agent.trainer.vault.states import Vault
from tests.attacks.exit_world import LARGE, ExitWorld, Spoil, nothing
from tests.attacks.taken_over import SECCOMP_ALONE, as_common_user, inside, on_a_terminal, taken_over
from tests.site_agent.checkpoints import DIGEST, keep_model
from tests.site_agent.fake_trainer import SHARED, write_tensors
from tests.site_agent.secure_sites import study_of
from tests.site_agent.site_world import PERSON, STUDY, SiteWorld
from tests.site_agent.trainer_world import small_study
from tools.world import Service
from wardround.errors import BadData, CannotWrite, NeedsPerson, NotPermitted, TryAgain, Unavailable, WardroundError
from wardround.local import control, durable, sockets
from wardround.records.trainer import BrokenProtocol, Commit, FilesStatus, Progress
from wardround.tensors.codecs import encoded
from wardround.tensors.files import TensorFile, file_header
from wardround.tensors.manifests import Manifest, TensorSpec
from wardround.v1 import federation_pb2 as pb

EGRESS = "site_agent/gateway/exit/egress.py"

STAGING = "site_agent/gateway/exit/staging.py"

EVERY = ('updates = "none"', 'updates = "every"')
pytestmark = pytest.mark.fresh  # what a trainer is, from its first instruction, is the subject


@pytest.fixture
def exit_world(tmp_path: Path) -> Iterator[ExitWorld]:
    world = ExitWorld(tmp_path)
    try:
        yield world
    finally:
        world.close()


@pytest.mark.attack(promise="P2+", refused_by=EGRESS)
@pytest.mark.parametrize(
    "specs", [pytest.param(SHARED, id="16 KiB"), pytest.param(LARGE, id="48 MiB", marks=pytest.mark.chaos)]
)
def test_resent_file_was_rewritten(tmp_path: Path, specs: tuple[TensorSpec, ...]) -> None:
    """The coordinator breaks each stream half way, the trainer writes other data into its file between the tries:
    several times an update would leave under one line. Every byte must be of the one that the ledger holds, and every
    try in the ledger before it begins."""
    world = ExitWorld(tmp_path, specs)
    try:
        world.ready()
        world.hostile.breaks, world.hostile.take = 2, world.size // 2

        def rewrite(broken: int) -> None:
            write_tensors(world.staged(), specs, 1 if broken == 2 else 1000 + broken)  # and back, for the last try

        world.hostile.between = rewrite
        world.coordinator.assign(STUDY, 1)
        world.wait_over()
        recorded = world.payload(1)
        assert [bytes(stream) == recorded[: len(stream)] for stream in world.hostile.streams] == [True] * 3
        world.taken.wait_asked("commit")
        (upload,) = world.lines("upload")
        again = world.lines("resend")
        assert [line["try"] for line in again] == [2, 3]
        assert {line["upload_id"] for line in again} == {upload["upload_id"]}
        for line, stream, opening in zip(
            again, world.hostile.streams[:-1], world.hostile.openings[1:], strict=True
        ):  # what was sent before is told, and the coordinator hears of a ledger that holds the line already
            assert len(stream) <= line["sent"] <= upload["payload_bytes"] == line["payload_bytes"]
            assert opening.ledger.lines > line["seq"]
        assert world.hostile.received <= sum(line["payload_bytes"] for line in (upload, *again))
    finally:
        world.close()


@pytest.mark.attack(promise="P2+", refused_by="site_agent/gateway/exit/enforcement.py")
@pytest.mark.parametrize(
    "specs", [pytest.param(SHARED, id="16 KiB"), pytest.param(LARGE, id="48 MiB", marks=pytest.mark.chaos)]
)
def test_resent_file_was_rewritten__quota(tmp_path: Path, specs: tuple[TensorSpec, ...]) -> None:
    """A coordinator that breaks every stream gets no more than the quota, whatever it asks, also after a restart."""
    world = ExitWorld(tmp_path, specs)
    try:
        world.ready()
        world.hostile.breaks, world.hostile.take = 1000, max(1, world.size - 1)
        world.coordinator.assign(STUDY, 1)
        world.coordinator.wait_declared("DECLINED", "DECLINED_POLICY")
        assert len(world.hostile.streams) == 4  # a drafted policy has room for sending an update four times
        (blocked,) = world.lines("blocked")
        assert blocked["rule"] == f"quotas.bytes_per_round = {4 * world.size}"
        assert (
            study_rows(world.state, "spiffe://test/coordinator")[0].state == "running"
        )  # and not "uploading" for good
        world.coordinator.declared.clear()
        world.restart()
        world.coordinator.wait_connected()
        world.coordinator.assign(STUDY, 1)
        world.coordinator.wait_declared("DECLINED", "DECLINED_POLICY")
        assert world.hostile.received <= 4 * world.size
        assert len(world.hostile.streams) == 4
        assert [line["try"] for line in world.lines("resend")] == [2, 3, 4]
    finally:
        world.close()


@pytest.mark.attack(promise="P2+", refused_by=EGRESS)
@pytest.mark.parametrize(
    "specs", [pytest.param(SHARED, id="16 KiB"), pytest.param(LARGE, id="48 MiB", marks=pytest.mark.chaos)]
)
def test_resent_file_was_rewritten__gateway_killed(tmp_path: Path, specs: tuple[TensorSpec, ...]) -> None:
    """The gateway, a process of its own, is killed in the middle of each try, and the trainer rewrites its file before
    the next begins. What was sent is not known any more then, so each try counts for all that it could have sent."""
    world = ExitWorld(tmp_path, specs)
    gateway: Service | None = None
    try:
        world.ready()
        world.stop()
        world.hostile.breaks, world.hostile.take = 1000, world.size // 2

        def strike(broken: int) -> None:
            assert gateway is not None
            gateway.kill()
            write_tensors(world.staged(), specs, 1000 + broken)
            with world.hostile.changed:
                world.hostile.changed.notify_all()

        world.hostile.between = strike
        for _ in range(5):
            gateway = world.gateway()
            world.coordinator.assign(STUDY, 1)
            world.coordinator.wait_for(
                lambda process=gateway.process: (
                    process.poll() is not None or any(said.code for said in world.coordinator.declared)
                ),
                "the gateway was killed, or declined",
            )
            gateway.kill()
        recorded = world.payload(1)
        assert len(world.hostile.streams) == 4
        assert all(bytes(stream) == recorded[: len(stream)] for stream in world.hostile.streams)
        assert world.hostile.received <= 4 * world.size  # the quota of a drafted policy
        assert [(line["try"], line.get("sent")) for line in world.lines("resend")] == [(2, None), (3, None), (4, None)]
        assert len(world.lines("upload")) == len(world.taken.commands("train")) == 1
        assert world.lines("blocked")[0]["rule"] == f"quotas.bytes_per_round = {4 * world.size}"
        assert audit.verify(world.state.ledger)[0].first_bad is None
    finally:
        if gateway is not None:
            gateway.kill()
        world.close()


@pytest.mark.attack(promise="P2+", refused_by="site_agent/gateway/exit/ledger.py")
def test_resent_file_was_rewritten__numbers_alone(exit_world: ExitWorld) -> None:
    """A closing validation has no payload that a quota could count; each time that it is told is a line all the same,
    and they come to an end."""
    exit_world.ready()
    exit_world.hostile.refuse_to_answer = 3
    exit_world.coordinator.assign(STUDY, 4, kind="validate")
    exit_world.coordinator.wait_receipts(1)
    (upload,) = exit_world.lines("upload")
    assert [(line["try"], line["sent"], line["payload_bytes"]) for line in exit_world.lines("resend")] == [
        (2, 0, 0), (3, 0, 0), (4, 0, 0),
    ]  # fmt: skip
    assert upload["seq"] < exit_world.lines("resend")[0]["seq"]


@pytest.mark.attack(promise="P2+", refused_by=EGRESS)
def test_resent_file_was_rewritten__line_without_end(exit_world: ExitWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that begins each stream and sends nothing back cannot fill the ledger with tries."""
    monkeypatch.setattr("site_agent.gateway.exit.egress.MAX_TRIES", 3)
    exit_world.ready()
    exit_world.hostile.refuse_to_answer = 1000
    exit_world.coordinator.assign(STUDY, 4, kind="validate")
    exit_world.coordinator.wait_declared("DECLINED", "DECLINED_POLICY")
    assert [line["try"] for line in exit_world.lines("resend")] == [2, 3]
    assert exit_world.lines("blocked")[0]["rule"] == "it was begun 3 times"


def to_link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def to_key(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parents[1] / "identity" / "key.pem")


def to_second_name(path: Path) -> None:
    os.link(path, path.with_name("elsewhere"))


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def to_socket(path: Path) -> None:
    path.unlink()
    sockets.listen(path).close()


def to_holes(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(1 << 40)


def to_longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


SPOILT = [
    pytest.param(to_link, "is a link", "DECLINED_TRAINING_FAILED", id="a link"),
    pytest.param(to_key, "is a link", "DECLINED_TRAINING_FAILED", id="a link to the key"),
    pytest.param(to_second_name, "has 2 names", "DECLINED_TRAINING_FAILED", id="a second name"),
    pytest.param(to_pipe, "is no plain file", "DECLINED_TRAINING_FAILED", id="a pipe"),
    pytest.param(to_folder, "is no plain file", "DECLINED_TRAINING_FAILED", id="a folder"),
    pytest.param(to_socket, "the trainer hands over plain files", "DECLINED_TRAINING_FAILED", id="a socket"),
    pytest.param(to_holes, "the approved tensors at most", "DECLINED_MODEL_MISMATCH", id="1 TiB of holes"),
    pytest.param(to_longer, "its header says", "DECLINED_TRAINING_FAILED", id="a byte too many"),
    pytest.param(Path.unlink, "no such file or directory", "DECLINED_TRAINING_FAILED", id="nothing"),
]


@pytest.mark.attack(promise="P2+", refused_by=STAGING)
@pytest.mark.parametrize(("spoil", "said", "code"), SPOILT)
def test_resent_file_was_rewritten__no_plain_file(
    exit_world: ExitWorld, spoil: Spoil, said: str, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What lies under the staged name is something that blocks its reader, leads elsewhere, or fills the disk."""
    exit_world.ready()
    exit_world.taken.spoil = spoil
    exit_world.coordinator.assign(STUDY, 1)
    exit_world.coordinator.wait_declared("DECLINED", code)
    assert not exit_world.hostile.streams
    assert said in caplog.text
    assert not list((exit_world.state.root / "outgoing").glob(".*"))
    exit_world.taken.spoil = nothing
    exit_world.coordinator.assign(STUDY, 2)  # and the next round is as ever
    exit_world.coordinator.wait_receipts(1)


@pytest.mark.attack(promise="P2+", refused_by=STAGING)
@pytest.mark.parametrize(
    "name", ["../identity/key.pem", "/etc/passwd", ".", "..", ".hidden", "a/b", "", "x\n", "x" * 201]
)
def test_resent_file_was_rewritten__name_leads_out(
    exit_world: ExitWorld, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer names a file that is not in the staging folder."""
    exit_world.ready()
    exit_world.taken.lies = {"update": name}
    exit_world.coordinator.assign(STUDY, 1)
    exit_world.coordinator.wait_declared("DECLINED", "DECLINED_TRAINING_FAILED")
    assert not exit_world.hostile.streams
    assert 'the trainer broke its protocol: its answer to `train`: "update"' in caplog.text


@pytest.mark.attack(promise="P2+", refused_by=STAGING)
def test_resent_file_was_rewritten__while_it_is_copied(exit_world: ExitWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file changes under the copying hand: what is measured and sent is the mixture that was copied, not what the
    file is now."""
    copy_open = durable.copy_open

    def torn(source: int, target: Path, size: int) -> int:
        found = copy_open(source, target, size)
        write_tensors(exit_world.staged(), SHARED, 1000)
        with exit_world.staged().open("r+b") as file:
            file.write(bytes(8))
        return found

    monkeypatch.setattr(durable, "copy_open", torn)
    exit_world.ready()
    exit_world.coordinator.assign(STUDY, 1)
    exit_world.coordinator.wait_receipts(1)
    assert bytes(exit_world.hostile.streams[0]) == exit_world.payload(1)


def released(world: ExitWorld, kind: str, round_: int) -> str:
    """A world whose first update or closing numbers were held, and released; their digest."""
    world.join()
    world.offer()
    world.start()
    world.draft(EVERY)
    world.approve()
    world.coordinator.assign(STUDY, round_, kind=kind)
    world.coordinator.wait_declared("HELD")
    update = str(world.command("waiting", study=STUDY, round=round_)["update"])
    assert len(update) == 64
    world.coordinator.declared.clear()
    return update


@pytest.mark.attack(promise="P2+", refused_by=EGRESS)
def test_release_covers_other_bytes(exit_world: ExitWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Just after the gateway saw that a person had released an update, the trainer writes other tensors into its file.
    They were measured, recorded and sent under that release."""
    update = released(exit_world, "train", 1)
    decision = Ledger.release_decision

    def too_late(self: Ledger, *update: Any) -> str:
        said = decision(self, *update)
        if said == "released":
            write_tensors(exit_world.staged(), SHARED, 1000)
        return said

    monkeypatch.setattr(Ledger, "release_decision", too_late)
    exit_world.command("decide", study=STUDY, round=1, decision="released", update=update, by=PERSON)
    exit_world.wait_over()
    assert bytes(exit_world.hostile.streams[0]) == exit_world.payload(1)
    assert [line["update"] for kind in ("held", "released", "upload") for line in exit_world.lines(kind)] == [
        update
    ] * 3


@pytest.mark.attack(promise="P2+", refused_by="site_agent/gateway/exit/enforcement.py")
def test_release_covers_other_bytes__closing_numbers(exit_world: ExitWorld) -> None:
    """One release of a closing validation let four different answers out: the coordinator refused each and asked again,
    and the trainer told other numbers each time."""
    exit_world.hostile.refuse_with = "ROUND_CLOSED"
    update = released(exit_world, "validate", 4)
    exit_world.command("decide", study=STUDY, round=4, decision="released", update=update, by=PERSON)
    exit_world.coordinator.wait_receipts(1)
    exit_world.taken.wait_asked("discard", 0)
    digests = {update}
    for attempt in (2, 3, 4):
        exit_world.taken.metrics = {"val_loss": f"0.{attempt}"}
        exit_world.coordinator.declared.clear()
        exit_world.coordinator.assign(STUDY, 4, attempt=attempt, kind="validate")
        exit_world.coordinator.wait_declared("HELD")
        digests.add(exit_world.command("waiting", study=STUDY, round=4)["update"])
    assert len(digests) == 4
    assert len(exit_world.hostile.openings) == 1
    assert len(exit_world.lines("upload")) == 1


@pytest.mark.attack(promise="P2+", refused_by="site_agent/gateway/exit/enforcement.py")
@pytest.mark.parametrize("change", ["metrics", "num_examples"])
def test_release_covers_other_bytes__same_tensors_other_numbers(exit_world: ExitWorld, change: str) -> None:
    """The tensors are those that a person released; what is told beside them is not."""
    exit_world.hostile.refuse_with = "ROUND_CLOSED"
    update = released(exit_world, "train", 1)
    exit_world.command("decide", study=STUDY, round=1, decision="released", update=update, by=PERSON)
    exit_world.coordinator.wait_receipts(1)
    exit_world.coordinator.declared.clear()
    exit_world.taken.lies = {"metrics": {"val_loss": "0.1234"}} if change == "metrics" else {"num_examples": 4711}
    exit_world.coordinator.assign(STUDY, 1, attempt=2)
    if change == "metrics":
        exit_world.coordinator.wait_declared("HELD")
        first, second = exit_world.lines("held")
        assert first["update"] == update != second["update"]
    else:  # the gateway knows the counts of the approved data: it does not come to a hold
        exit_world.coordinator.wait_declared("DECLINED", "DECLINED_POLICY")
        assert [line["update"] for line in exit_world.lines("held")] == [update]
    assert len(exit_world.hostile.openings) == 1


@pytest.mark.attack(promise="P2+", refused_by=EGRESS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, -1])
def test_nonfinite_leaves(exit_world: ExitWorld, value: float, place: int, caplog: pytest.LogCaptureFixture) -> None:
    """One value that is no number, first or last in the last tensor: 2^22 kinds of NaN carry what they like."""

    def poison(path: Path) -> None:
        bias = np.zeros(64, "<f4")
        bias[place] = value
        durable.write_file(path, [file_header(SHARED), np.zeros((64, 64), "<f4").tobytes(), bias.tobytes()])

    exit_world.ready()
    exit_world.taken.spoil = poison
    exit_world.coordinator.assign(STUDY, 1)
    exit_world.coordinator.wait_declared("DECLINED", "DECLINED_TRAINING_FAILED")
    assert not exit_world.hostile.streams
    assert not exit_world.lines("upload")
    (blocked,) = exit_world.lines("blocked")
    assert (blocked["what"], blocked["rule"]) == ("shared.bias", "1 of 64 values are not finite")
    assert (
        "tensor `shared.bias` of the update for `hearts`: 1 of 64 values are not finite; nothing was sent"
        in caplog.text
    )


UNWRITTEN: dict[str, tuple[dict[str, Any], str, Callable[[Any], None]]] = {
    "order of the places": ({"name": "topk", "fraction": 0.25}, "model_index/w", lambda places: places[::-1].sort()),
    "a place twice": ({"name": "topk", "fraction": 0.25}, "model_index/w", lambda places: places.fill(3)),
    "a place outside": ({"name": "topk", "fraction": 0.25}, "model_index/w", lambda places: places[-1:].fill(64)),
    "signs of both": ({"name": "int8", "block": 16}, "model_scale/w", lambda scales: np.negative(scales, out=scales)),
    "a number of no value": ({"name": "int8", "block": 16}, "w", lambda numbers: numbers[:1].fill(-128)),
}


@pytest.mark.attack(promise="P6", refused_by="site_agent/gateway/estimate.py")
def test_told_counts_are_false__by_the_time_that_is_left(site: SiteWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a round will still take is a number of the trainer's own: 26 of them in each try, of 15 bits each, that
    no policy, quota or preview had; and after the first twenty the ledger left some out."""
    monkeypatch.setattr(estimate, "FIRST_S", 0.0)
    site.ready()
    assert site.trainer is not None
    site.trainer.progress = [Progress(step=1, steps=10 ** (power // 4)) for power in range(8, 56)]
    tries = 3
    for attempt in range(1, 1 + tries):
        site.trainer.dies.append(BadData("the training failed", code="DECLINED_TRAINING_FAILED"))
        site.coordinator.assign(STUDY, 1, attempt=attempt)
        site.coordinator.wait_for(lambda n=attempt: declared(site, pb.DECLINED) == n, "declined again")  # type: ignore[misc]
    said = [one.estimate_s for one in site.coordinator.declared if one.status == pb.TRAINING]
    preview = site.command("preview", study=STUDY, data="patients")
    site.stop()
    assert [line["estimate_s"] for line in site.lines("declare") if "estimate_s" in line] == said
    assert len(said) == estimate.MOST_TOLD
    assert {one // 60 for one in said} <= set(estimate.MINUTES)
    bits = estimate.MOST_TOLD * math.ceil(math.log2(len(estimate.MINUTES)))
    assert f"at most {bits} bits a round" in json.dumps(preview)


def declared(site: SiteWorld, status: int) -> int:
    return [one.status for one in site.coordinator.declared].count(status)


@pytest.mark.attack(promise="P2+", refused_by="site_agent/gateway/exit/measure.py")
@pytest.mark.parametrize("form", UNWRITTEN)
def test_more_than_the_values_in_an_encoding(tmp_path: Path, form: str) -> None:
    """The order of ten thousand places is a hundred thousand bits beside the update, and the mean is the same: only an
    honest coordinator refused it, after it had come."""
    settings, where, spoil = UNWRITTEN[form]
    document = {**study_of(("amsterdam", "bergen", "charite")).document(), "encoding": settings}
    del document["secure_aggregation"]
    encoding, shared = encoding_in(document).encoding, (TensorSpec("w", "F32", (8, 8)),)
    upload = encoding.sent(shared)
    values = np.random.default_rng(1).normal(size=64).astype("<f4")
    parts = encoded(encoding, shared[0], values)
    path, consent = tmp_path / "update.safetensors", held_consent(document, upload, shared)

    def write() -> None:
        durable.write_file(path, [file_header(upload), *(np.ascontiguousarray(parts[s.key]).tobytes() for s in upload)])

    write()
    measure(path, consent)
    parts[where] = parts[where].copy()
    spoil(parts[where].reshape(-1))
    write()
    with pytest.raises(BadData, match="never writes"):
        measure(path, consent)


def held_consent(document: Any, upload: tuple[TensorSpec, ...], shared: tuple[TensorSpec, ...]) -> Consent:
    """A consent to a study of these tensors."""
    return Consent(
        study="hearts", revision=1, study_digest="ab" * 32, metrics=(), counts="uniform", rows=1, validation_rows=1,
        data=TrainedData("patients", "ab" * 32), approved_by=PERSON, approved_at="2026-01-01T00:00:00.000Z",
        state="approved", exposure="", attempts=8, document=document, averages=True, upload=upload, private=(),
        download=shared, personalized="", files=FilesStatus(data="ab" * 32, weights=""),
        account=Shown("ab" * 32, "ab" * 32, 1, "2026-01-01T00:00:00.000Z", {}),
    )  # fmt: skip


@pytest.mark.attack(promise="P1", refused_by="site_agent/gateway/downloads.py")
def test_chmod_follows_a_link(exit_world: ExitWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Just after the gateway opened the model's file, its name in staging becomes a link to the site's key, which then
    was made readable to the trainer's group; and the next start refused a key of that mode."""
    exit_world.ready()
    key = exit_world.state.identity / "key.pem"
    before = key.read_bytes()
    model = exit_world.state.staging / f"base-{STUDY}-0.safetensors"

    class Swapped(durable.SpoolFile):
        def __init__(self, path: Path, *, mode: int = 0o600, lasting: bool = True, size: int = 0) -> None:
            super().__init__(path, mode=mode, lasting=lasting, size=size)
            if path.name == model.name:
                model.unlink(missing_ok=True)
                model.symlink_to(key)

    monkeypatch.setattr(durable, "SpoolFile", Swapped)
    exit_world.coordinator.assign(STUDY, 1)
    exit_world.wait_over()
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert key.read_bytes() == before
    assert exit_world.coordinator.decided()
    exit_world.restart()


@pytest.mark.attack(promise="P2", refused_by=STAGING)
@pytest.mark.parametrize("plant", ["link", "second name"])
def test_chmod_follows_a_link__planted(exit_world: ExitWorld, plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name under which the model will be handed over leads to the ledger before the gateway writes it."""
    exit_world.ready()
    ledger = exit_world.state.ledger / "000001.jsonl"
    model = exit_world.state.staging / f"base-{STUDY}-0.safetensors"
    before = ledger.read_bytes()
    save = SiteState.save_journal

    def plant_it(self: SiteState, journal: Journal, lasting: durable.Lasting = "all") -> None:
        if journal.phase == "training" and plant == "link":
            model.symlink_to(ledger)
        elif journal.phase == "training":
            os.link(ledger, model)
        save(self, journal, lasting)

    monkeypatch.setattr(SiteState, "save_journal", plant_it)
    exit_world.coordinator.assign(STUDY, 1)
    exit_world.coordinator.wait_receipts(1)
    exit_world.taken.wait_asked("commit")
    assert ledger.read_bytes().startswith(before)
    assert stat.S_IMODE(ledger.stat().st_mode) == 0o600
    assert not model.exists()
    exit_world.stop()
    assert exit_world.verdict().ok


@pytest.mark.attack(promise="P1", refused_by="proto/wardround/local/sockets.py")
def test_chmod_follows_a_link__socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket's name becomes a link between its making and its mode, in a folder that another user writes."""
    secret, path = tmp_path / "secret", tmp_path / "staging" / "trainer.sock"
    secret.write_text("x")
    secret.chmod(0o600)
    path.parent.mkdir()
    bind = socket.socket.bind

    class Swapping(socket.socket):
        def bind(self, address: object) -> None:
            bind(self, address)  # type: ignore[arg-type]
            path.unlink()
            path.symlink_to(secret)

    monkeypatch.setattr(sockets.socket, "socket", Swapping)
    with pytest.raises(CannotWrite, match=r"trainer\.sock: no socket can be made there"):
        sockets.listen(path, mode=0o660)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


@pytest.mark.attack(promise="P1", refused_by="proto/wardround/local/sockets.py")
def test_chmod_follows_a_link__called_elsewhere(exit_world: ExitWorld) -> None:
    """The trainer's socket is a link to one that only the gateway's user may call: the gateway does not call it."""
    exit_world.ready()
    listener = control.ControlServer(exit_world.folder / "other.sock", lambda request, _: {"heard": request})
    path = exit_world.state.staging / "trainer.sock"
    try:
        path.unlink()
        path.symlink_to(exit_world.folder / "other.sock")
        with pytest.raises(Unavailable, match="no service listens at"):
            control.call(path, {"command": "status"})
    finally:
        listener.close()


GETFD = """
import os, sys
gateway, line = map(int, sys.argv[1:])
libc = kernel._libc
taken = libc.syscall(438, libc.syscall(434, gateway, 0), line, 0)
print(os.write(taken, b"patients") if taken >= 0 else "refused")
"""

MEMORY = """
import ctypes, platform, struct, sys
gateway, address, size = map(int, sys.argv[1:])
found = ctypes.create_string_buffer(size)
pairs = [struct.pack("PN", at, size) for at in (ctypes.addressof(found), address)]
near, far = (ctypes.create_string_buffer(pair, 16) for pair in pairs)
number = {"x86_64": 310, "aarch64": 270}[platform.machine()]
kernel._libc.syscall(number, gateway, near, 1, far, 1, 0)
print(found.raw)
"""


@pytest.mark.attack(promise="P1", refused_by="site_agent/trainer/isolation/kernel.py")
def test_pidfd_getfd_under_seccomp() -> None:
    """One user and no namespace: the worker takes the gateway's socket, which the filter let it have, and sends."""
    with socket.create_server(("127.0.0.1", 0)) as network:
        line = socket.create_connection(network.getsockname())
        outside, _ = network.accept()
        with line, outside:
            said = inside(GETFD, os.getpid(), line.fileno())
            line.shutdown(socket.SHUT_WR)
            assert (outside.recv(100), said) == (b"", "refused\n")


@pytest.mark.attack(promise="P1", refused_by="site_agent/trainer/isolation/kernel.py")
def test_pidfd_getfd_under_seccomp__memory() -> None:
    """The same worker reads the key out of the gateway's memory."""
    secret = ctypes.create_string_buffer(b"the key of this site")
    assert b"key" not in inside(MEMORY, os.getpid(), ctypes.addressof(secret), 20).encode()


CALLS = """
import ctypes, json, os, platform, sys
libc = kernel._libc
x86 = platform.machine() == "x86_64"
numbers = dict(
    ptrace=(101, 117), process_vm_readv=(310, 270), process_vm_writev=(311, 271), pidfd_getfd=(438, 438),
    pidfd_open=(434, 434), kcmp=(312, 272), perf_event_open=(298, 241), bpf=(321, 280), userfaultfd=(323, 282),
    keyctl=(250, 219), add_key=(248, 217), request_key=(249, 218), unshare=(272, 97), setns=(308, 268), mount=(165, 40),
    clone3=(435, 435), open_by_handle_at=(304, 265), clone=(56, 220), process_madvise=(440, 440),
)
first = dict(ptrace=99, keyctl=99, unshare=0x04000000, clone=0x04000000 | 17)
found = {}
for name, pair in numbers.items():
    ctypes.set_errno(0)
    # arguments that harm nobody: a call that passes the filter fails otherwise, or does next to nothing
    done = libc.syscall(pair[not x86], first.get(name, -1), 0, 0, 0, 0)
    if name == "clone" and done == 0:
        os._exit(0)
    found[name] = os.strerror(ctypes.get_errno()) if done < 0 else "works"
print(json.dumps(found))
"""


@pytest.mark.attack(promise="P1", refused_by="site_agent/trainer/isolation/kernel.py")
def test_pidfd_getfd_under_seccomp__every_way_into_another_process() -> None:
    """Each call that reaches into another process, the kernel's inside or another namespace stops at the filter."""
    found = json.loads(inside(CALLS))
    refused = {"Operation not permitted", "Function not implemented"}
    assert {name: said for name, said in found.items() if said not in refused} == {}


TYPE = """
import fcntl, os
for number in (0, 1, 2):
    for byte in b"echo pwned; ":
        try:
            fcntl.ioctl(number, 0x5412, bytes([byte]))
        except OSError:
            break
try:
    terminal = os.open("/dev/tty", os.O_RDWR)
    fcntl.ioctl(terminal, 0x5412, b"!")
except OSError:
    pass
os.write(2, b"\\033]52;c;ZWNobyBwd25lZA==\\007\\033[2Jred")
"""

START = """
import sys
from pathlib import Path
from site_agent.handoff import Worker
with Worker(Path(sys.argv[1]), warm=False) as worker:
    print("started", flush=True)
"""


@pytest.mark.attack(promise="P1", refused_by="site_agent/trainer/isolation/kernel.py")
def test_tiocsti(tmp_path: Path) -> None:
    """The worker types a command into the terminal that `site-agent run` or `data add` was given at."""
    environment = taken_over(tmp_path / "evil", TYPE)
    shown, code = on_a_terminal([sys.executable, "-P", "-c", START, str(tmp_path)], environment)
    assert (b"started" in shown, code) == (True, 0)
    assert b"pwned" not in shown.split(b"]52;")[0]  # what is typed is echoed


@pytest.mark.attack(promise="P1", refused_by="site_agent/trainer/isolation/kernel.py")
def test_tiocsti__a_terminal_that_it_opens() -> None:
    """The filter refuses it for any terminal, so a worker that opens one by its path gains nothing; root may else."""
    script = """
        import errno, fcntl, os, pty
        outside, terminal = pty.openpty()
        for command in (0x5412, 0x541C, 0x540E, (1 << 32) - 1 & 0x5412):
            try:
                fcntl.ioctl(terminal, command, b"x")
            except OSError as error:
                print(errno.errorcode[error.errno])
            else:
                print("typed")
        print(os.getsid(0) == os.getpid())
    """
    assert inside(script, before=SECCOMP_ALONE).split() == ["EPERM"] * 4 + ["True"]


@pytest.mark.attack(promise="P1", refused_by="site_agent/handoff.py")
def test_tiocsti__its_own_words_reach_the_terminal_escaped(tmp_path: Path) -> None:
    """What a worker prints would be the terminal's own commands: the clipboard set, the screen wiped."""
    environment = taken_over(tmp_path / "evil", TYPE)
    shown, _ = on_a_terminal([sys.executable, "-P", "-c", START, str(tmp_path)], environment)
    assert b"red" in shown
    assert b"\033" not in shown
    assert b"\007" not in shown


@pytest.mark.attack(promise="P1", refused_by="proto/wardround/local/memory.py")
@pytest.mark.parametrize("program", ["coordinator", "gateway", "listener"])
@pytest.mark.chaos
def test_pidfd_getfd_under_seccomp__the_memory_file_of_our_own(tmp_path: Path, program: str) -> None:
    """Without Landlock nothing stops `open("/proc/PID/mem")` of one's own user's processes, but what they are."""
    with as_common_user(tmp_path) as user:
        process = user.start(program)
        assert user.can_open(f"/proc/{user.start('sleep').pid}/mem")
        assert not user.can_open(f"/proc/{process.pid}/mem")
        assert not user.can_open(f"/proc/{process.pid}/environ")


@pytest.fixture
def hospital(tmp_path: Path) -> Iterator[SiteWorld]:
    """One hospital's agent in this process, ready for a round, whose trainer does what the test says."""
    world = SiteWorld(tmp_path)
    try:
        world.ready()
        yield world
    finally:
        world.close()


def next_round_is_declined_and_the_one_after_is_not(hospital: SiteWorld) -> None:
    trainer, agent = hospital.trainer, hospital.agent
    assert trainer is not None
    assert agent is not None
    hospital.coordinator.assign(STUDY, 1)
    hospital.coordinator.wait_declared("DECLINED", "DECLINED_TRAINING_FAILED")
    assert not agent.stopped.is_set()
    trainer.says, trainer.failure = None, None
    hospital.coordinator.assign(STUDY, 2)
    hospital.coordinator.wait_receipts(1)
    assert {said.code for said in hospital.coordinator.declared} <= {0, pb.DECLINED_TRAINING_FAILED}


@pytest.mark.attack(promise="P2", refused_by="site_agent/handoff.py")
@pytest.mark.parametrize("command", ["preview", "approve", "fit"])
def test_its_code_as_the_gateways_user(site: SiteWorld, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer has a user of its own, who may write in the folder in which its socket is: it removes that. When
    somebody looks at a study, the gateway started a worker of its own, with torch and the study's plug-ins, as the user
    who has the keys, the ledger and the policy."""
    site.ready()
    more = {"approve": {"digest": site.shown()}, "fit": {"digest": site.digest, "fits": True, "rows": 100}}
    by = {} if command == "preview" else {"by": PERSON}
    trainer_socket(site.state.root).unlink()
    (site.state.root / "studies").mkdir()
    started: list[Any] = []

    def worker(*words: Any, **options: Any) -> None:
        started.append(words)
        raise TryAgain("it would have been started")

    monkeypatch.setattr(handoff, "Worker", worker)
    with monkeypatch.context() as another:
        another.setattr(os, "geteuid", lambda: 4321)
        with pytest.raises(NeedsPerson) as refused:
            site.command(command, study=STUDY, data="patients", **more.get(command, {}), **by)
    assert refused.value.message == (
        f"{site.state.root / 'studies'} belongs to the trainer's user, and the trainer does not run"
    )
    assert not started
    with pytest.raises(TryAgain, match="it would have been started"):  # with one user for both there is nobody else
        site.command(command, study=STUDY, data="patients", **more.get(command, {}), **by)


@pytest.mark.attack(promise="P11", refused_by="proto/wardround/records/trainer/failures.py")
@pytest.mark.parametrize("kind", [NeedsPerson, BadData, NotPermitted, Unavailable, CannotWrite])
@pytest.mark.parametrize("code", ["LEDGER_FORK", "SITE_REVOKED", "DECLINED_NO_SUCH", "DECLINED_WITHDRAWN", "\x1b[2J"])
def test_trainer_speaks_for_the_coordinator(
    hospital: SiteWorld, code: str, kind: type[WardroundError], caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer's failure with the coordinator's code would end the gateway, or crash it, and blame the coordinator."""
    assert hospital.trainer is not None
    hospital.trainer.honest = False
    hospital.trainer.failure = kind("this site was revoked", hint="run `rm -rf /`", code=code)
    next_round_is_declined_and_the_one_after_is_not(hospital)
    assert "this site was revoked" not in caplog.text
    assert "the trainer broke its protocol" in caplog.text or kind is Unavailable


GOOD: dict[str, Any] = {
    "update": "u.safetensors",
    "num_examples": 80,
    "num_validation": 20,
    "metrics": {"val_loss": "0.5"},
}


@pytest.mark.attack(promise="P11", refused_by="proto/wardround/records/trainer/answers.py")
@pytest.mark.parametrize(
    "says",
    [
        pytest.param([], id="a list"),
        pytest.param("done", id="a text"),
        pytest.param({}, id="nothing"),
        pytest.param({**GOOD, "more": 1}, id="more"),
        pytest.param({**GOOD, "num_examples": "80"}, id="a count as text"),
        pytest.param({**GOOD, "num_examples": True}, id="a count as a truth"),
        pytest.param({**GOOD, "num_examples": 80.0}, id="a count as a float"),
        pytest.param({**GOOD, "num_examples": float("nan")}, id="nan"),
        pytest.param({**GOOD, "num_examples": 2**53}, id="too large"),
        pytest.param({**GOOD, "num_examples": int("9" * 4000)}, id="enormous"),
        pytest.param({**GOOD, "update": "../identity/key.pem"}, id="a path"),
        pytest.param({**GOOD, "update": ".hidden"}, id="a hidden file"),
        pytest.param({**GOOD, "metrics": {f"m{n}": "1" for n in range(65)}}, id="too many metrics"),
        pytest.param({**GOOD, "metrics": {"m" * 41: "1"}}, id="a long name"),
        pytest.param({**GOOD, "metrics": {"val_loss": "1" * 41}}, id="a long value"),
        pytest.param({**GOOD, "metrics": {"val_loss": 0.5}}, id="a value as a number"),
        pytest.param({**GOOD, "metrics": [["val_loss", "0.5"]]}, id="metrics as a list"),
        pytest.param({**GOOD, "metrics": {"val_loss": "\x1b[2J"}}, id="a control character"),
        pytest.param([[]] * 30_000, id="too many values"),
    ],
)
def test_trainer_speaks_for_the_coordinator__an_answer_of_another_form(
    hospital: SiteWorld, says: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Wrong types, missing and extra fields, nan, enormous numbers and names that lead elsewhere: one way to fail."""
    assert hospital.trainer is not None
    hospital.trainer.says = says
    next_round_is_declined_and_the_one_after_is_not(hospital)
    assert "the trainer broke its protocol" in caplog.text


@pytest.mark.attack(promise="P11", refused_by="proto/wardround/local/frames.py")
@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000 + b"\n", b'{"result":' + b"[" * 5000 + b"]" * 5000 + b"}\n", b"\xff\n", b"5\n", b'{"a":1',
        b'{"error":5}\n', b'{"error":{"message":1,"hint":2,"code":[],"exit_code":{}}}\n', b'{"result":NaN}\n', b"{}\n",
        b'{"error":{"message":"m","hint":"","code":"","exit_code":78,"more":1}}\n', b'{"progress":{"step":-1}}\n',
    ],
)  # fmt: skip
def test_trainer_speaks_for_the_coordinator__a_line_that_is_no_answer(tmp_path: Path, line: bytes) -> None:
    """On the socket itself: the gateway never crashes on what comes, and never waits for more of it."""
    (tmp_path / "staging").mkdir()
    listener = sockets.listen(trainer_socket(tmp_path))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(line)

    thread = threading.Thread(target=serve)
    thread.start()
    with listener, pytest.raises((BrokenProtocol, Unavailable)):
        Trainer(tmp_path).ask(Commit(study="s", revision=1, round=1))
    thread.join()


@pytest.mark.attack(promise="P11", refused_by="proto/wardround/records/trainer/failures.py")
def test_trainer_speaks_for_the_coordinator__in_its_own_words(
    hospital: SiteWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """Its sentences are data: quoted, one line, cut, without what a terminal or a reader would obey."""
    assert hospital.trainer is not None
    evil = '\x1b]52;c;eA==\x07\n2026 INFO accepted" \u202e\u200b' + "x" * 1000
    hospital.trainer.failure = BadData(evil, hint=evil, code="DECLINED_TRAINING_FAILED")
    next_round_is_declined_and_the_one_after_is_not(hospital)
    (said,) = [record.getMessage() for record in caplog.records if "trainer says" in record.getMessage()]
    assert said.isprintable()
    assert said.count('"') == 4
    assert len(said) < 1000


@pytest.mark.attack(promise="P6", refused_by="site_agent/gateway/consent/approvals.py")
@pytest.mark.parametrize(
    "told",
    [
        pytest.param({"num_examples": 2**53 - 1}, id="as many rows as a message holds"),
        pytest.param({"num_examples": 81}, id="one row more"),
        pytest.param({"num_validation": 2**40}, id="validation rows"),
        pytest.param({"num_validation": 0}, id="no validation rows"),
        pytest.param({"metrics": {"val_loss": "1.234e+300"}}, id="a loss that is none"),
        pytest.param({"metrics": {"val_loss": "-1"}}, id="a loss below nought"),
        pytest.param({"metrics": {"val_loss": "0.5", "accuracy": "17"}}, id="more than all are right"),
    ],
)
def test_told_counts_are_false(hospital: SiteWorld, told: dict[str, Any]) -> None:
    """Counts and metrics that the data cannot give: two channels of 53 bits a round, and more in each metric."""
    assert hospital.trainer is not None
    for name, value in told.items():
        setattr(hospital.trainer, name, value)
    hospital.coordinator.assign(STUDY, 1)
    hospital.coordinator.wait_declared("DECLINED", "DECLINED_POLICY")
    assert not hospital.coordinator.uploads
    assert not hospital.lines("upload")


@pytest.mark.attack(promise="P2+", refused_by="site_agent/gateway/exit/enforcement.py")
@pytest.mark.parametrize(
    "edit",
    [
        ("deny = []", 'deny = [{ match = "shared.bias" }]'),
        ('{ name = "val_loss"', '{ name = "other_loss"'),
        ('updates = "none"', 'updates = "every"'),
    ],
    ids=["a tensor", "a metric", "a person"],
)
@pytest.mark.parametrize("silent", [False, True], ids=["answered", "without a word"])
def test_resent_file_was_rewritten__after_the_policy_was(
    exit_world: ExitWorld, edit: tuple[str, str], silent: bool
) -> None:
    """The coordinator breaks each stream, or does not answer for days; the hospital sees it and forbids what is being
    sent. It went on being sent: only the quotas were asked again, and of a stream that was not answered nothing was."""

    def forbid(broken: int) -> None:
        text = exit_world.state.policy.read_text()
        assert broken > 1 or edit[0] in text
        exit_world.state.policy.write_text(text.replace(*edit))

    exit_world.ready()
    exit_world.hostile.breaks, exit_world.hostile.between, exit_world.hostile.silent = 1, forbid, silent
    exit_world.coordinator.assign(STUDY, 1)
    exit_world.wait_over()
    assert len(exit_world.hostile.streams) == 1
    assert exit_world.hostile.received <= (0 if silent else exit_world.size)
    assert not exit_world.lines("resend")
    assert exit_world.lines("blocked")[0]["what"] in ("shared.bias", "metric val_loss", "the update")


@pytest.mark.attack(promise="P1", refused_by="site_agent/trainer/vault/cards.py")
@pytest.mark.parametrize("place", ["beside", "model"])
def test_export_of_the_gateways_files(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own is the trainer's to write. In a checkpoint it puts a link to the site's keys, just after what
    was there was looked at: whoever may read both, as root may, exported them with the model, and gave them away."""
    state, out = tmp_path / "state", tmp_path / "out"
    vault = Vault(state, "small", 1)
    vault.open(DIGEST, small_study().document())
    keep_model(vault, 1)
    key = state / "identity" / "key.pem"
    key.parent.mkdir()
    key.write_text("-----BEGIN PRIVATE KEY-----")
    (found,) = vault.checkpoints()
    really = TensorFile.manifest

    def too_late(model: TensorFile) -> Manifest:
        manifest = really(model)
        getattr(found, place).unlink()
        getattr(found, place).symlink_to(key)
        return manifest

    monkeypatch.setattr(TensorFile, "manifest", too_late)
    with suppress(BadData):
        models.export(state, "small", "latest", out)
    assert not [file for file in out.rglob("*") if b"PRIVATE" in file.read_bytes()]
