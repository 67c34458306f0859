"""The vault keeps the old or the new, whatever instant the process ends at."""

import errno
import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings

from fl_algorithms.engine.session import SessionState
from site_agent.trainer.rounds import sessions
from site_agent.trainer.rounds.tensorfiles import beside_in, file_of, from_bytes
from site_agent.trainer.vault import models
from site_agent.trainer.vault.cards import Card
from site_agent.trainer.vault.index import Index, Origin
from site_agent.trainer.vault.states import Vault
from tests.drawn_records import of
from tests.site_agent.checkpoints import DIGEST, keep_model
from tests.site_agent.trainer_world import small_study
from wardround.errors import BadData, CannotWrite, NeedsPerson, UsageProblem
from wardround.local import durable
from wardround.records.trainer import Trained
from wardround.signing import canonical
from wardround.tensors.files import TensorFile

CRC32 = "ab" * 4
ORIGIN = Origin(command="train", base_digest="ba" * 32, data_digest="da" * 32)


class Crash(BaseException):
    """The process ends here."""


@contextmanager
def crash_at(monkeypatch: pytest.MonkeyPatch, instant: int) -> Iterator[None]:
    """End at the ``instant``-th fsync, of a file or of a folder."""
    done: list[int] = []
    really = durable._sync

    def sync(descriptor: int, path: Path) -> None:
        done.append(1)
        if len(done) == instant:
            raise Crash
        really(descriptor, path)

    with monkeypatch.context() as patched:
        patched.setattr(durable, "_sync", sync)
        yield


def crashed_everywhere(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[Vault], None],
    act: Callable[[Vault], None],
    *,
    at_least: int,
) -> Iterator[Vault]:
    """For each fsync of ``act``, a vault as it is found after the process ended there."""
    for instant in itertools.count(1):
        state = tmp_path / str(instant)
        before(Vault(state, "small", 1))
        with crash_at(monkeypatch, instant):
            try:
                act(Vault(state, "small", 1))
            except Crash:
                pass
            else:
                assert instant > at_least
                return
        yield Vault(state, "small", 1)


def tensors(value: int) -> dict[str, torch.Tensor]:
    return {"private/w": torch.full((3, 2), float(value)), "optimizer/step": torch.tensor(value)}


def answer(number: int) -> Trained:
    return Trained(num_examples=8, num_validation=2, metrics={"val_loss": "0.5"}, update=f"u{number}")


def keep(vault: Vault, number: int) -> None:
    """Train round ``number``, in pretence."""
    vault.keep_pending(number, file_of(tensors(number), {"round": str(number)}), ORIGIN, answer(number), CRC32)


def current(vault: Vault, before: int = 100) -> int:
    """The round whose state counts, read and verified; 0 for none."""
    kept = vault.start_of(before)
    if kept is None:
        return 0
    stored = vault.load(kept)
    assert beside_in(stored) == {"round": str(kept.round)}
    assert torch.equal(from_bytes(stored)["private/w"], tensors(kept.round)["private/w"])
    return kept.round


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    vault = Vault(tmp_path, "small", 1)
    vault.open(DIGEST, {"study": "small"})
    return vault


def test_state_comes_back_bit_for_bit(vault: Vault) -> None:
    odd = {
        "a/b": torch.tensor([float("nan"), -0.0, 1e-45]), "half": torch.ones(2, dtype=torch.bfloat16),
        "empty": torch.zeros((0, 3)), "scalar": torch.tensor(7), "flags": torch.tensor([True, False]),
    }  # fmt: skip
    kept = vault.keep_pending(1, file_of(odd), ORIGIN, answer(1), CRC32)
    back = from_bytes(vault.load(kept))
    assert back.keys() == odd.keys()
    for name, tensor in odd.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        assert back[name].reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()


def test_pending_state_counts_only_when_it_is_committed(vault: Vault) -> None:
    keep(vault, 1)
    assert current(vault) == 0
    vault.commit(1)
    vault.commit(1)
    assert current(vault) == 1


def test_pending_answer_is_given_for_the_same_question_alone(vault: Vault) -> None:
    keep(vault, 1)
    pending = vault.pending(1, ORIGIN)
    assert pending is not None
    assert (pending.answer, pending.update_crc32) == (answer(1), CRC32)
    assert vault.pending(1, ORIGIN.model_copy(update={"base_digest": "cc" * 32})) is None
    assert vault.pending(2, ORIGIN) is None


def test_discarded_state_is_gone(vault: Vault) -> None:
    keep(vault, 1)
    vault.discard(1)
    assert vault.pending(1, ORIGIN) is None
    assert not list(vault.folder.glob("state-*"))
    Vault(vault.folder, "other", 1).discard(1)  # a study that was never begun here


def test_two_states_are_kept_so_that_a_round_can_be_repeated(vault: Vault) -> None:
    for number in range(1, 6):
        keep(vault, number)
        vault.commit(number)
    assert (current(vault, before=6), current(vault, before=5)) == (5, 4)
    keep(vault, 6)
    assert [path.name[:11] for path in sorted(vault.folder.glob("state-*"))] == [
        "state-00004",
        "state-00005",
        "state-00006",
    ]


def test_a_loss_of_power_may_take_the_word_that_a_round_was_accepted_and_it_is_said_again(vault: Vault) -> None:
    """The index is durable, the word beside it is not; from the next round on the index has both."""
    keep(vault, 1)
    vault.commit(1)
    (word,) = vault.folder.glob("*.accepted")
    word.unlink()
    assert current(vault) == 0
    vault.commit(1)
    assert current(vault) == 1
    keep(vault, 2)
    assert not list(vault.folder.glob("*.accepted"))
    assert (current(vault), vault.index().committed[-1].round) == (1, 1)
    vault.commit(1)  # said again by a gateway that was started anew
    assert (current(vault), vault.pending(2, ORIGIN) is not None) == (1, True)


def test_crash_while_a_round_is_kept_and_committed_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(vault: Vault) -> None:
        vault.open(DIGEST, {"study": "small"})
        keep(vault, 1)
        vault.commit(1)

    def second(vault: Vault) -> None:
        keep(vault, 2)
        vault.commit(2)

    for vault in crashed_everywhere(tmp_path, monkeypatch, first, second, at_least=3):
        vault.open(DIGEST, {"study": "small"})
        assert current(vault) in (1, 2)
        if current(vault) == 1:
            if vault.pending(2, ORIGIN) is None:
                keep(vault, 2)
            vault.commit(2)
        assert current(vault) == 2
        keep(vault, 3)
        assert len(list(vault.folder.glob("state-*"))) == 3


def test_crash_while_a_checkpoint_is_replaced_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(vault: Vault) -> None:
        keep_model(vault, 1, "best_local")

    def second(vault: Vault) -> None:
        keep_model(vault, 2, "best_local")

    for vault in crashed_everywhere(tmp_path, monkeypatch, first, second, at_least=2):
        (found,) = vault.checkpoints()
        assert found.card.round in (1, 2)
        found.verify_model()
        assert found.preprocessing() == {"mean": ["0.5"]}


def test_crash_while_a_revision_is_opened_leaves_one_that_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(vault: Vault) -> None:
        vault.open(DIGEST, {"study": "small"})

    for vault in crashed_everywhere(tmp_path, monkeypatch, lambda _: None, begin, at_least=4):
        assert vault.open(DIGEST, {"study": "small"}).study_digest == DIGEST


def test_full_disk_keeps_what_was_there(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(vault, 1)
    vault.commit(1)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(durable.os, "write", full)
        with pytest.raises(CannotWrite, match="No space left on device"):
            keep(vault, 2)
    assert current(vault) == 1


def test_damaged_index_is_refused(vault: Vault) -> None:
    (vault.folder / "index.json").write_bytes(b'{"v":1')
    with pytest.raises(NeedsPerson, match=r"index\.json is missing or damaged, so it is not known which"):
        vault.start_of(1)


def test_damaged_state_is_refused_and_never_passed_over(vault: Vault) -> None:
    for number in (1, 2):
        keep(vault, number)
        vault.commit(number)
    kept = vault.start_of(3)
    assert kept is not None
    path = vault.folder / kept.file
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(NeedsPerson, match=f"{kept.file} is damaged: its SHA-256 is") as refused:
        vault.load(kept)
    assert refused.value.hint.endswith("to go on from the state before it, delete it")
    path.unlink()
    with pytest.raises(BadData, match=f"{kept.file}: No such file"):
        vault.load(kept)


def test_card_inside_the_model_counts_and_other_tools_read_the_model(vault: Vault) -> None:
    keep_model(vault, 3)
    (found,) = vault.checkpoints()
    (found.folder / "card.json").write_text("{}")
    (again,) = vault.checkpoints()
    assert again.row().round == 3
    assert safetensors.torch.load_file(again.model)["w"].tolist() == [3.0, 3.0]


def test_a_card_that_a_loss_of_power_tore_is_exported_as_it_stands_in_the_model(vault: Vault, tmp_path: Path) -> None:
    keep_model(vault, 3)
    (found,) = vault.checkpoints()
    whole = (found.folder / "card.json").read_bytes()
    (found.folder / "card.json").write_bytes(b"")
    out = tmp_path.with_name(f"{tmp_path.name}-out")
    (vault.folder / "study.json").write_bytes(canonical.dumps(small_study().document()))
    models.export(tmp_path, "small", "latest", out)
    assert (out / "card.json").read_bytes() == whole


def test_a_round_whose_file_a_loss_of_power_took_is_done_again(vault: Vault) -> None:
    """The index may be there without the file beside it: then its round was answered to nobody."""
    keep(vault, 1)
    pending = vault.pending(1, ORIGIN)
    assert pending is not None
    (vault.folder / pending.state.file).unlink()
    assert vault.pending(1, ORIGIN) is None
    keep(vault, 1)
    vault.commit(1)
    assert current(vault) == 1


def test_a_round_takes_four_fsyncs_and_two_more_where_its_model_is_the_best(
    vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("latest", "best_local"):
        keep_model(vault, 1, kind)
    synced, really = list[Path](), durable._sync

    def note(descriptor: int, path: Path) -> None:
        synced.append(path)
        really(descriptor, path)

    monkeypatch.setattr(durable, "_sync", note)
    keep_model(vault, 2)
    keep(vault, 2)
    vault.commit(2)
    (state,) = (path.name for path in vault.folder.glob("state-*.safetensors"))
    assert [path.name for path in synced] == ["model.safetensors", state, "index.json", "1"]
    synced.clear()
    keep_model(vault, 2, "best_local")
    assert [path.name for path in synced] == ["model.safetensors", "best_local"]


def test_model_without_a_card_or_with_anothers_is_refused(vault: Vault) -> None:
    keep_model(vault, 1)
    (found,) = vault.checkpoints()
    other = vault.folder / "checkpoints" / "best_local"
    other.mkdir()
    (other / "model.safetensors").write_bytes(found.model.read_bytes())
    with pytest.raises(BadData, match="has no card of a best_local checkpoint in its header"):
        vault.checkpoints()
    safetensors.torch.save_file({"w": torch.ones(1)}, other / "model.safetensors")
    with pytest.raises(BadData, match="has no card of a best_local checkpoint in its header"):
        vault.checkpoints()


def test_model_whose_tensors_were_changed_is_refused(vault: Vault) -> None:
    keep_model(vault, 1)
    (found,) = vault.checkpoints()
    data = found.model.read_bytes()
    found.model.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(BadData, match=r"model\.safetensors is damaged: its digest is"):
        found.verify_model()


def test_preprocessing_of_another_model_is_refused(vault: Vault, tmp_path: Path) -> None:
    keep_model(vault, 1)
    (found,) = vault.checkpoints()
    found.beside.write_text("[]")
    with pytest.raises(BadData, match=r"preprocessing-\w{12}\.json does not belong to the model beside it"):
        found.preprocessing()
    (vault.folder / "study.json").write_bytes(canonical.dumps(small_study().document()))
    with pytest.raises(BadData, match=r"preprocessing-\w{12}\.json does not belong to the model beside it"):
        models.export(tmp_path, "small", "latest", tmp_path.with_name(f"{tmp_path.name}-out"))


@pytest.mark.parametrize("kind", ["latest", "best_local"])
def test_a_checkpoint_has_its_own_preprocessing_wherever_its_keeping_was_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Its threshold differs from round to round, and a model is of no use with another's."""

    def cut(act: Callable[..., None], *, after: bool) -> Callable[..., None]:
        def acts(*words: Any, **options: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0 and not after:
                raise InterruptedError
            act(*words, **options)
            if left == 0:
                raise InterruptedError

        return acts

    cuts = 0
    for after, number in itertools.product((False, True), range(1, 20)):
        vault = Vault(tmp_path / f"{after}-{number}", "small", 1)
        vault.open(DIGEST, {"study": "small"})
        for round_number in (1, 2, 3):
            keep_model(vault, round_number, kind, b'{"threshold": %d}' % round_number)
        left = number
        with monkeypatch.context() as patched, suppress(InterruptedError):
            for name in ("write_file", "remove", "sync_folder"):
                patched.setattr(durable, name, cut(getattr(durable, name), after=after))
            keep_model(vault, 4, kind, b'{"threshold": 4}')
        cuts += left <= 0
        (found,) = vault.checkpoints()
        assert found.preprocessing() == {"threshold": found.card.round}
        assert found.card.round in (3, 4)
    assert cuts > 6


def test_of_preprocessing_only_the_models_and_the_one_before_it_are_kept(vault: Vault) -> None:
    for number in range(1, 6):
        keep_model(vault, number, "latest", b'{"threshold": %d}' % number)
    (found,) = vault.checkpoints()
    kept = {path.read_bytes() for path in found.folder.glob("preprocessing*")}
    assert kept == {b'{"threshold": 4}', b'{"threshold": 5}'}
    keep_model(vault, 6, "latest", b'{"threshold": 5}')
    assert {path.read_bytes() for path in found.folder.glob("preprocessing*")} == {b'{"threshold": 5}'}


def test_a_card_beside_the_model_that_cannot_be_read_hinders_nothing(
    vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is for people, and not fsynced; the one inside the model counts."""
    for number in (1, 2):
        keep_model(vault, number, "best_local", b'{"threshold": %d}' % number)
    (found,) = vault.checkpoints()
    read_bytes = Path.read_bytes

    def failing(path: Path) -> bytes:
        if path.name == "card.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read_bytes(path)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", failing)
        assert vault.checkpoints() == [found]
        keep_model(vault, 3, "best_local", b'{"threshold": 3}')
    (kept,) = vault.checkpoints()
    assert (kept.card.round, kept.preprocessing()) == (3, {"threshold": 3})
    assert json.loads((kept.folder / "card.json").read_text())["round"] == 3


def test_what_a_killed_worker_had_half_written_goes_with_the_next_round(vault: Vault) -> None:
    """As large as a model each, and a round that is called off ends its worker wherever that is."""
    keep_model(vault, 1)
    (found,) = vault.checkpoints()
    halves = [found.folder / f".{found.model.name}.7.8.tmp", found.folder / f".{found.beside.name}.7.8.tmp"]
    halves.append(vault.folder / ".state-00001-9f2c41d0aa07.safetensors.7.8.tmp")
    others = vault.folder / ".state-00001-9f2c41d0aa07.safetensors.accepted.7.8.tmp"  # the listener's
    for path in (*halves, others):
        path.write_bytes(b"half")
    keep_model(vault, 2)
    keep(vault, 2)
    assert [path for path in halves if path.exists()] == []
    assert others.exists()


def test_preprocessing_under_the_name_that_version_0_1_gave_it_is_read_and_then_goes(vault: Vault) -> None:
    keep_model(vault, 1)
    (found,) = vault.checkpoints()
    found.beside.rename(found.folder / "preprocessing.json")
    assert found.preprocessing() == {"mean": ["0.5"]}
    for number in (2, 3):
        keep_model(vault, number, "latest", b'{"threshold": %d}' % number)
    assert not (found.folder / "preprocessing.json").exists()


def test_export_copies_model_card_preprocessing_and_study_and_writes_a_page(tmp_path: Path) -> None:
    vault, study = Vault(tmp_path, "small", 1), small_study().document()
    vault.open(DIGEST, study)
    keep_model(vault, 1)
    exported = models.export(tmp_path, "small", "latest", tmp_path.with_name(f"{tmp_path.name}-out"))
    files = [Path(file) for file in exported.files]
    names = ["card.json", "preprocessing.json", "study.json", "MODEL_CARD.md", "model.safetensors"]
    assert [file.name for file in files] == names
    assert json.loads(files[2].read_text()) == study
    with TensorFile(files[4]) as model:
        assert model.manifest().digest() == json.loads(files[0].read_text())["model_digest"]


def test_missing_models_are_told_with_what_there_is(vault: Vault, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="study `small` has no models here yet"):
        models.listing(tmp_path, "small")
    keep_model(vault, 1)
    with pytest.raises(UsageProblem, match="study `small` has no checkpoint `best_global`") as refused:
        models.checkpoint(tmp_path, "small", "best_global")
    assert refused.value.hint == "it has: latest"
    with pytest.raises(UsageProblem, match="is not a study's name"):
        models.listing(tmp_path, "../small")


def test_newest_revision_with_a_model_is_shown(vault: Vault, tmp_path: Path) -> None:
    keep_model(vault, 1)
    second: Any = Vault(tmp_path, "small", 10)
    second.open(DIGEST, {"study": "small"})
    assert models.newest(tmp_path, "small").revision == 1
    keep_model(second, 4)
    assert models.newest(tmp_path, "small").revision == 10


@settings(max_examples=50)
@given(of(Index), of(Card))
def test_index_and_card_survive_being_written(index: dict[str, Any], card: dict[str, Any]) -> None:
    kept = Index.model_validate({**index, "forgotten": index["forgotten"] if index["committed"] else 0})
    assert Index.from_bytes(kept.to_bytes()) == kept
    written = Card.model_validate(card)
    assert Card.from_text(written.to_text()) == written


def test_session_survives_being_kept() -> None:
    state = SessionState({"private/w": torch.ones(2)}, {"algorithm": "fedavg", "round": 3, "notes": {"mu": "0.1"}})
    back, network = sessions.decoded(b"".join(sessions.encoded(state, "small")))
    assert (network, back.meta) == ("small", state.meta)
    assert torch.equal(back.tensors["private/w"], state.tensors["private/w"])
