"""One revision of a study at this site: its private states, and where its checkpoints are put.

    STATE/studies/STUDY/REVISION/
        study.json                             the resolved study
        index.json                             which state counts; replaced whole, so this is where a round becomes true
        state-00003-9f2c41d0aa07.safetensors   a round's private state, never changed once the index names it
        state-00003-….safetensors.accepted     that its update was accepted; the next index says so too
        checkpoints/best_local/
            model.safetensors                  with its card in the header, so that model and card change together
            card.json                          the same card, for people
            preprocessing-44136fa355b3.json    how rows are encoded; computed from patients, and named by its digest, so
                                               that a model always has its own, and the one before it too

A round is trained from the newest committed state before it, and first becomes *pending*. ``commit`` (its update was
accepted) makes it current; ``discard`` drops it. The two newest committed states are kept, so that a round which the
coordinator has to repeat starts where it started. A crash at any instant leaves the index as it was or as it was meant.
A loss of power may take the word that a round was accepted; it is durable when the next round is pending, and until
then the gateway says it again. It may also take the newest ``latest`` model, and leaves the one before it; the next
round writes one.

A damaged state is refused by name and never passed over: whoever wants to go on from the one before deletes its file.
"""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from site_agent.trainer.vault.cards import (
    CARD_FILE,
    MODEL_FILE,
    PREPROCESSING_FILES,
    Card,
    CheckpointFile,
    Rounds,
    holds,
    preprocessing_file,
    read,
)
from site_agent.trainer.vault.index import STATE_FILE, Index, Kept, Origin, Pending
from wardround.errors import BadData, NeedsPerson, UsageProblem
from wardround.local import durable
from wardround.local.writing import Buffer
from wardround.records.study import STUDY_NAME
from wardround.records.trainer import CHECKPOINT_KINDS, TRAINING_FAILED, Validated
from wardround.signing import canonical
from wardround.tensors.files import TensorFile, file_header
from wardround.tensors.manifests import TensorSpec

ACCEPTED = ".accepted"
LATEST = "latest"  # the checkpoint that every round replaces
MODEL_MISMATCH = "DECLINED_MODEL_MISMATCH"
log = logging.getLogger(__name__)


class Vault:
    """One revision of one study at this site."""

    def __init__(self, state: Path, study: str, revision: int) -> None:
        self.study = study
        self.revision = revision
        self.folder = study_folder(state, study) / str(int(revision))

    def open(self, study_digest: str, document: object) -> Index:
        """The index, made if this is the revision's first round.

        Raises:
            BadData: this revision was begun as another study.
            NeedsPerson: the index is damaged.
        """
        if not (self.folder / "index.json").exists():
            durable.make_folder(self.folder)
            durable.write_file(self.folder / "study.json", canonical.dumps(document))
            self._write(Index(study_digest=study_digest))
        index = self.index()
        if index.study_digest != study_digest:
            raise BadData(
                f"revision {self.revision} of study `{self.study}` was begun with digest {index.study_digest[:12]}…, "
                f"now it has {study_digest[:12]}…",
                hint="the coordinator must give changed content a new revision; ask its operator",
                code=MODEL_MISMATCH,
            )
        return index

    def index(self) -> Index:
        """Raises NeedsPerson: it is missing or damaged."""
        path = self.folder / "index.json"
        try:
            index = Index.from_bytes(path.read_bytes())
        except (OSError, BadData):
            raise NeedsPerson(
                f"{path} is missing or damaged, so it is not known which private state of study `{self.study}` counts",
                hint="restore that folder from a backup",
                code=TRAINING_FAILED,
            ) from None
        if index.pending is not None and self._accepted(index.pending.state).exists():
            return index.accepted(index.pending)
        return index

    def document(self) -> object:
        """The resolved study that this revision was begun with."""
        return canonical.loads(read(self.folder / "study.json"))

    def start_of(self, round_number: int) -> Kept | None:
        """The state that ``round_number`` is trained from: the newest committed one before it, None for a first round.

        Raises:
            NeedsPerson: it is too old and was dropped.
        """
        index = self.index()
        for kept in reversed(index.committed):
            if kept.round < round_number:
                if (self.folder / kept.file).exists():
                    return kept
                log.warning("%s was deleted: round %d goes on without it", self.folder / kept.file, round_number)
        if index.forgotten and round_number <= index.forgotten + 1:
            oldest = index.committed[0].round
            raise NeedsPerson(
                f"round {round_number} of study `{self.study}` was asked again, but the oldest private state kept here "
                f"is that of round {oldest}",
                hint="the coordinator went back in time; ask its operator whether it was restored from a backup",
                code=TRAINING_FAILED,
            )
        return None

    def load(self, kept: Kept) -> bytes:
        """Read a state and verify it.

        Raises:
            NeedsPerson: it is damaged.
        """
        path = self.folder / kept.file
        data = read(path)
        sha256 = hashlib.sha256(data).hexdigest()
        if sha256 != kept.sha256:
            raise NeedsPerson(
                f"{path} is damaged: its SHA-256 is {sha256[:12]}…, {kept.sha256[:12]}… was written",
                hint="restore it from a backup; or, to go on from the state before it, delete it",
                code=TRAINING_FAILED,
            )
        return data

    def keep_pending(
        self, round_number: int, state: Iterable[Buffer], origin: Origin, answer: Validated, update_crc32: str
    ) -> Kept:
        """Keep the state after ``round_number`` until its update is decided. Another pending round is dropped.

        Args:
            state: its file in pieces.
        """
        pieces, hasher = tuple(state), hashlib.sha256()
        for piece in pieces:
            hasher.update(piece)
        sha256 = hasher.hexdigest()
        kept = Kept(round=round_number, file=f"state-{round_number:05d}-{sha256[:12]}.safetensors", sha256=sha256)
        durable.remove(self._accepted(kept), lasting=False)
        durable.sweep(self.folder, STATE_FILE)  # the listener writes the other files too
        pending = Pending(state=kept, origin=origin, answer=answer, update_crc32=update_crc32)
        self._write(self.index().model_copy(update={"pending": pending}), {self.folder / kept.file: pieces})
        return kept

    def pending(self, round_number: int, origin: Origin) -> Pending | None:
        """The round ``round_number``, if it was made from just this ``origin`` and is not decided yet.

        A loss of power may have left the index without the file that it names; then nobody was told of that round.
        """
        pending = self.index().pending
        if pending is None or pending.state.round != round_number or pending.origin != origin:
            return None
        return pending if (self.folder / pending.state.file).exists() else None

    def commit(self, round_number: int) -> None:
        """Make the pending state of ``round_number`` current. Asked again, nothing more changes.

        It lasts as long as the power, and for good from the next pending round on.

        Raises:
            NeedsPerson: no such state is here.
        """
        index = self.index()
        if index.pending is not None and index.pending.state.round == round_number:
            durable.write_file(self._accepted(index.pending.state), b"", lasting="nothing")
        elif not any(kept.round >= round_number for kept in index.committed):
            raise NeedsPerson(
                f"the update of round {round_number} of study `{self.study}` was accepted, "
                f"but its private state is not in {self.folder}",
                hint="restore that folder from a backup; without it the next round starts from an older private state",
                code=TRAINING_FAILED,
            )

    def discard(self, round_number: int) -> None:
        """Drop the pending state of ``round_number``. Without one, nothing changes."""
        if not (self.folder / "index.json").exists():
            return
        index = self.index()
        if index.pending is not None and index.pending.state.round == round_number:
            self._write(index.model_copy(update={"pending": None}))

    def keep_checkpoint(
        self, card: Card, specs: Iterable[TensorSpec], payload: Iterable[Buffer], preprocessing: bytes
    ) -> None:
        """Put a checkpoint in place of the one of its kind.

        Args:
            card: of this ``preprocessing``, which is JSON.
            specs, payload: the tensors in the order of their bytes.
        """
        folder = self.folder / "checkpoints" / card.kind
        durable.make_folder(folder)
        durable.sweep(folder)
        beside = folder / preprocessing_file(card.preprocessing_sha256)
        earlier = [path for path in folder.glob(PREPROCESSING_FILES) if path != beside]
        needed = {beside, *(_beside(folder) if earlier else ())}
        if not holds(beside, preprocessing):
            durable.write_file(beside, preprocessing)
        _write_model(folder, card, specs, payload, lasting=card.kind != LATEST)
        for path in earlier:
            if path not in needed:  # a loss of power may bring the model before this one back
                durable.remove(path, lasting=False)

    def checkpoints(self) -> list[CheckpointFile]:
        """The checkpoints that are here. Raises BadData: one is damaged."""
        folders = [self.folder / "checkpoints" / kind for kind in CHECKPOINT_KINDS]
        return [CheckpointFile.at(folder) for folder in folders if (folder / MODEL_FILE).exists()]

    def name_contributors(self, contributors: Rounds, capped: Rounds, left_out: Rounds) -> None:
        """Write into each card which sites contributed to which rounds; and in which a site counted for less than its
        rows, or its update was beyond the study's limits.
        """
        named = {"contributors": contributors, "capped": capped, "left_out": left_out}
        for checkpoint in self.checkpoints():
            with TensorFile(checkpoint.model) as model:
                payload = (data for _, data in model.chunks())
                _write_model(checkpoint.folder, checkpoint.card.model_copy(update=named), model.specs, payload)

    def _write(self, index: Index, states: Mapping[Path, Iterable[Buffer]] = MappingProxyType({})) -> None:
        """Replace the index, with the states that it is the first to name; then remove what it no longer names."""
        durable.write_files({**states, self.folder / "index.json": [index.to_bytes()]})
        named = index.files
        for path in self.folder.iterdir():
            if STATE_FILE.fullmatch(path.name.removesuffix(ACCEPTED)) and path.name not in named:
                durable.remove(path, lasting=False)

    def _accepted(self, kept: Kept) -> Path:
        """The file that says, by being there, that the update of a pending round was accepted."""
        return self.folder / f"{kept.file}{ACCEPTED}"


def study_folder(state: Path, study: str) -> Path:
    """Where everything of a study is kept.

    Raises:
        UsageProblem: that is no study's name.
    """
    if not STUDY_NAME.fullmatch(study):
        raise UsageProblem(f"{study[:80]!r} is not a study's name: 1 to 64 of a-z, 0-9 and -")
    return state / "studies" / study


def _write_model(
    folder: Path, card: Card, specs: Iterable[TensorSpec], payload: Iterable[Buffer], *, lasting: bool = True
) -> None:
    """The model with its card in the header, then the same card for people.

    Without ``lasting``, after a loss of power it may be the one before, whole.
    """
    text = card.to_text()
    model = _chained(file_header(specs, {"card": text}), payload)
    durable.write_file(folder / MODEL_FILE, model, lasting="content")
    durable.write_file(folder / CARD_FILE, text.encode() + b"\n", lasting="nothing")  # the one inside counts
    if lasting:
        durable.sync_folder(folder)


def _beside(folder: Path) -> Iterator[Path]:
    """The preprocessing of the model that is in a checkpoint's folder, where that has a card."""
    with suppress(BadData):
        yield CheckpointFile.at(folder).beside


def _chained(first: bytes, rest: Iterable[Buffer]) -> Iterator[Buffer]:
    yield first
    yield from rest
