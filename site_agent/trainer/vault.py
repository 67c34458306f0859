"""What a site keeps of a study: the private state after each round, and the checkpoints. No torch.

    STATE/studies/STUDY/REVISION/
        study.json                             the resolved study
        index.json                             which state counts; replaced whole, so this is where a round becomes true
        state-00003-9f2c41d0aa07/              a round's private state, never changed once the index names it
            tensors.safetensors  meta.json
        checkpoints/best_local/
            model.safetensors                  with its card in the header, so that model and card change together
            card.json                          the same card, for people
            preprocessing.json                 how rows are encoded; computed from patients

A round is trained from the newest committed state before it, and first becomes *pending*. ``commit`` (its update was
accepted) makes it current; ``discard`` drops it. The two newest committed states are kept, so that a round which the
coordinator has to repeat starts where it started. A crash at any instant leaves the index as it was or as it was meant.

A damaged state is refused by name and never passed over: whoever wants to go on from the one before deletes its folder.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from site_agent.trainer import KINDS
from site_agent.trainer.data.sources import protected
from wardround.errors import BadData, NeedsPerson, UsageProblem
from wardround.local import durable, outputs
from wardround.local.durable import Buffer
from wardround.records.study import STUDY_NAME
from wardround.signing import canonical
from wardround.tensors.manifests import TensorFile, TensorSpec, file_header

KEPT_STATES = 2
MODEL_FILE, CARD_FILE, PREPROCESSING_FILE = "model.safetensors", "card.json", "preprocessing.json"
TRAINING_FAILED, MODEL_MISMATCH = "DECLINED_TRAINING_FAILED", "DECLINED_MODEL_MISMATCH"
CARD_FIELDS = frozenset(
    {"kind", "round", "score", "metric", "split", "val_loss", "model_digest", "preprocessing_sha256"}
)
_STATE_FOLDER = re.compile(r"state-[0-9]{5,6}-[0-9a-f]{12}")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kept:
    """A state on disk. ``tensors`` and ``meta`` are the SHA-256 (hex) of its two files."""

    round: int
    folder: str
    tensors: str
    meta: str


@dataclass(frozen=True)
class Pending:
    """A trained round whose update has no receipt yet.

    ``asked`` says what it was trained from, ``answer`` what the gateway was told; both plain JSON.
    """

    state: Kept
    asked: dict[str, Any]
    answer: dict[str, Any]


@dataclass(frozen=True)
class Index:
    """Which states count. ``forgotten`` is the newest round whose state was dropped for its age, 0 for none."""

    study_digest: str
    committed: tuple[Kept, ...] = ()  # by round, the newest last
    pending: Pending | None = None
    forgotten: int = 0

    def document(self) -> dict[str, Any]:
        return {"v": 1, **asdict(self), "committed": [asdict(kept) for kept in self.committed]}

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> "Index":
        """Raises KeyError or TypeError: it is none."""
        pending = document["pending"]
        index = cls(
            document["study_digest"],
            tuple(Kept(**kept) for kept in document["committed"]),
            None if pending is None else Pending(Kept(**pending["state"]), pending["asked"], pending["answer"]),
            document["forgotten"],
        )
        states = [*index.committed, *([index.pending.state] if index.pending is not None else [])]
        named = all(isinstance(one.folder, str) and _STATE_FOLDER.fullmatch(one.folder) for one in states)
        counted = all(type(number) is int for number in (index.forgotten, *(one.round for one in states)))
        if not named or not counted or not isinstance(index.study_digest, str):
            raise TypeError("a state without its folder or round")
        return index


@dataclass(frozen=True)
class StoredState:
    """A state as it was read and verified: a safetensors file's bytes, and plain JSON."""

    kept: Kept
    tensors: bytes
    meta: dict[str, Any]


@dataclass(frozen=True)
class CheckpointFile:
    """A checkpoint on disk, with its card."""

    folder: Path
    card: dict[str, Any] = field(repr=False)

    @property
    def model(self) -> Path:
        return self.folder / MODEL_FILE

    def row(self) -> dict[str, Any]:
        """What ``models list`` shows of it."""
        shown = {key: self.card[key] for key in ("kind", "round", "score", "metric", "split", "val_loss")}
        return {**shown, "path": str(self.model), "digest": self.card["model_digest"]}

    def preprocessing(self) -> dict[str, Any]:
        """How rows were encoded for this model.

        Raises:
            BadData: it is not the file that was written with the model.
        """
        data = _read(self.folder / PREPROCESSING_FILE)
        if hashlib.sha256(data).hexdigest() != self.card["preprocessing_sha256"]:
            raise BadData(
                f"{self.folder / PREPROCESSING_FILE} does not belong to the model beside it",
                hint="restore the folder from a backup, or wait for the next round's checkpoint",
            )
        value: dict[str, Any] = json.loads(data)
        return value


class Vault:
    """One revision of one study at this site."""

    def __init__(self, state: Path, study: str, revision: int) -> None:
        self.study = study
        self.revision = revision
        self.folder = study_folder(state, study) / str(int(revision))

    def open(self, study_digest: str, document: dict[str, Any]) -> Index:
        """The index, made if this is the revision's first round.

        Raises:
            BadData: this revision was begun as another study.
            NeedsPerson: the index is damaged.
        """
        if not (self.folder / "index.json").exists():
            durable.make_folder(self.folder)
            durable.write_file(self.folder / "study.json", canonical.dumps(document))
            self._write(Index(study_digest))
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
            return Index.from_document(canonical.loads(path.read_bytes()))
        except (OSError, BadData, KeyError, TypeError):
            raise NeedsPerson(
                f"{path} is missing or damaged, so it is not known which private state of study `{self.study}` counts",
                hint="restore that folder from a backup",
                code=TRAINING_FAILED,
            ) from None

    def document(self) -> Any:
        """The resolved study that this revision was begun with."""
        return canonical.loads(_read(self.folder / "study.json"))

    def start_of(self, round_number: int) -> Kept | None:
        """The state that ``round_number`` is trained from: the newest committed one before it, None for a first round.

        Raises:
            NeedsPerson: it is too old and was dropped.
        """
        index = self.index()
        for kept in reversed(index.committed):
            if kept.round < round_number:
                if (self.folder / kept.folder).is_dir():
                    return kept
                log.warning("%s was deleted: round %d goes on without it", self.folder / kept.folder, round_number)
        if index.forgotten and round_number <= index.forgotten + 1:
            oldest = index.committed[0].round
            raise NeedsPerson(
                f"round {round_number} of study `{self.study}` was asked again, but the oldest private state kept here "
                f"is that of round {oldest}",
                hint="the coordinator went back in time; ask its operator whether it was restored from a backup",
                code=TRAINING_FAILED,
            )
        return None

    def load(self, kept: Kept) -> StoredState:
        """Read a state and verify it.

        Raises:
            NeedsPerson: it is damaged.
        """
        folder = self.folder / kept.folder
        tensors, meta = _read(folder / "tensors.safetensors"), _read(folder / "meta.json")
        for name, data, wanted in (("tensors.safetensors", tensors, kept.tensors), ("meta.json", meta, kept.meta)):
            found = hashlib.sha256(data).hexdigest()
            if found != wanted:
                raise NeedsPerson(
                    f"{folder / name} is damaged: its SHA-256 is {found[:12]}…, {wanted[:12]}… was written",
                    hint=f"restore it from a backup; or, to go on from the state before it, delete {folder}",
                    code=TRAINING_FAILED,
                )
        return StoredState(kept, tensors, canonical.loads(meta))

    def keep_pending(
        self, round_number: int, tensors: bytes, meta: dict[str, Any], asked: dict[str, Any], answer: dict[str, Any]
    ) -> Kept:
        """Keep the state after ``round_number`` until its update is decided. Another pending round is dropped."""
        text = canonical.dumps(meta)
        hashes = hashlib.sha256(tensors).hexdigest(), hashlib.sha256(text).hexdigest()
        name = f"state-{round_number:05d}-{canonical.digest(list(hashes))[:12]}"
        folder = self.folder / name
        durable.make_folder(folder)
        durable.write_file(folder / "tensors.safetensors", tensors)
        durable.write_file(folder / "meta.json", text)
        kept = Kept(round_number, name, *hashes)
        index = self.index()
        self._write(Index(index.study_digest, index.committed, Pending(kept, asked, answer), index.forgotten))
        return kept

    def pending(self, round_number: int, asked: dict[str, Any]) -> dict[str, Any] | None:
        """The answer of ``round_number``, if it was trained from just what is ``asked`` and is not decided yet."""
        pending = self.index().pending
        if pending is None or pending.state.round != round_number or pending.asked != asked:
            return None
        return pending.answer

    def commit(self, round_number: int) -> None:
        """Make the pending state of ``round_number`` current. Said twice, the second changes nothing.

        Raises:
            NeedsPerson: no such state is here.
        """
        index = self.index()
        if index.pending is not None and index.pending.state.round == round_number:
            committed = [kept for kept in index.committed if kept.round < round_number] + [index.pending.state]
            dropped, kept = committed[:-KEPT_STATES], committed[-KEPT_STATES:]
            forgotten = dropped[-1].round if dropped else index.forgotten
            self._write(Index(index.study_digest, tuple(kept), None, forgotten))
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
            self._write(Index(index.study_digest, index.committed, None, index.forgotten))

    def keep_checkpoint(
        self, card: dict[str, Any], specs: Iterable[TensorSpec], payload: Iterable[Buffer], preprocessing: bytes
    ) -> None:
        """Put a checkpoint in place of the one of its kind.

        Args:
            card: plain JSON with ``kind``; the preprocessing's digest is added here.
            specs, payload: the tensors in the order of their bytes.
            preprocessing: JSON.
        """
        folder = self.folder / "checkpoints" / card["kind"]
        durable.make_folder(folder)
        card = {**card, "preprocessing_sha256": hashlib.sha256(preprocessing).hexdigest()}
        if not _holds(folder / PREPROCESSING_FILE, preprocessing):
            durable.write_file(folder / PREPROCESSING_FILE, preprocessing)
        self._write_model(folder, card, specs, payload)

    def checkpoints(self) -> list[CheckpointFile]:
        """The checkpoints that are here. Raises BadData: one is damaged."""
        folders = [self.folder / "checkpoints" / kind for kind in KINDS]
        return [CheckpointFile(folder, _card(folder)) for folder in folders if (folder / MODEL_FILE).exists()]

    def name_contributors(
        self, contributors: dict[str, list[int]], capped: dict[str, list[int]], left_out: dict[str, list[int]]
    ) -> None:
        """Write into each card which sites contributed to which rounds; and in which a site counted for less than its
        rows, or its update was beyond the study's limits.
        """
        for checkpoint in self.checkpoints():
            with TensorFile(checkpoint.model) as model:
                card = {**checkpoint.card, "contributors": contributors, "capped": capped, "left_out": left_out}
                payload = (data for _, data in model.chunks())
                self._write_model(checkpoint.folder, card, model.specs, payload)

    def _write_model(
        self, folder: Path, card: dict[str, Any], specs: Iterable[TensorSpec], payload: Iterable[Buffer]
    ) -> None:
        text = json.dumps(card, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
        durable.write_file(folder / MODEL_FILE, _chained(file_header(specs, {"card": text}), payload))
        durable.write_file(folder / CARD_FILE, text.encode() + b"\n")

    def _write(self, index: Index) -> None:
        """Replace the index, then remove the states that it no longer names."""
        durable.write_file(self.folder / "index.json", canonical.dumps(index.document()))
        named = {kept.folder for kept in index.committed}
        if index.pending is not None:
            named.add(index.pending.state.folder)
        for folder in self.folder.iterdir():
            if _STATE_FOLDER.fullmatch(folder.name) and folder.name not in named:
                durable.remove(folder)


def study_folder(state: Path, study: str) -> Path:
    """Where everything of a study is kept.

    Raises:
        UsageProblem: that is no study's name.
    """
    if not STUDY_NAME.fullmatch(study):
        raise UsageProblem(f"{study[:80]!r} is not a study's name: 1 to 64 of a-z, 0-9 and -")
    return state / "studies" / study


def newest(state: Path, study: str) -> Vault:
    """The newest revision of ``study`` that has a checkpoint.

    Raises:
        UsageProblem: there is none yet.
    """
    folder = study_folder(state, study)
    revisions = sorted((int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit()), reverse=True)
    for revision in revisions:
        if any((folder / str(revision) / "checkpoints" / kind / MODEL_FILE).exists() for kind in KINDS):
            return Vault(state, study, revision)
    raise UsageProblem(
        f"study `{study}` has no models here yet",
        hint="the first ones are kept in its second round; `site-agent status`",
    )


def checkpoint(state: Path, study: str, kind: str) -> tuple[Vault, CheckpointFile]:
    """The checkpoint of ``kind`` in the newest revision that has any.

    Raises:
        UsageProblem: there is none of that kind; the hint says which there are.
        BadData: it is damaged.
    """
    vault = newest(state, study)
    found = {item.folder.name: item for item in vault.checkpoints()}
    if kind not in found:
        raise UsageProblem(f"study `{study}` has no checkpoint `{kind[:40]}`", hint=f"it has: {', '.join(found)}")
    return vault, found[kind]


def listing(state: Path, study: str) -> dict[str, Any]:
    """What ``models list`` prints. Raises as ``newest``."""
    return {"checkpoints": [item.row() for item in newest(state, study).checkpoints()]}


def export(state: Path, study: str, kind: str, out: Path, *, force: bool = False) -> dict[str, Any]:
    """Copy a checkpoint's model, card and preprocessing into the folder ``out``, new or empty unless ``force``.

    Raises:
        UsageProblem: there is no such checkpoint.
        BadData: it is damaged.
        CannotWrite: ``out`` does not take it. NotPermitted: it is, or lies in, what is never written over.
    """
    outputs.folder(out, force=force, keep=protected(state))
    _, found = checkpoint(state, study, kind)
    verify_model(found)
    durable.make_folder(out)
    files = []
    for name in (MODEL_FILE, CARD_FILE, PREPROCESSING_FILE):
        outputs.write(out / name, _read(found.folder / name), force=force, keep=protected(state))
        files.append(str(out / name))
    return {"files": files}


def verify_model(found: CheckpointFile) -> None:
    """Raises BadData: the model's tensors are not those that its card was written for."""
    with TensorFile(found.model) as model:
        digest = model.manifest().digest()
    if digest != found.card["model_digest"]:
        raise BadData(
            f"{found.model} is damaged: its digest is {digest[:12]}…, its card says {found.card['model_digest'][:12]}…",
            hint="restore it from a backup",
        )


def _card(folder: Path) -> dict[str, Any]:
    with TensorFile(folder / MODEL_FILE) as model:
        text = model.note.get("card", "")
    try:
        card: dict[str, Any] = canonical.read(text)
        missing = CARD_FIELDS - card.keys()
        digests = [card["model_digest"], card["preprocessing_sha256"]] if not missing else []
        json.dumps(card, allow_nan=False)
        if missing or card["kind"] != folder.name or not all(isinstance(one, str) for one in digests):
            raise ValueError("not a card")
    except (BadData, ValueError, TypeError, KeyError, AttributeError):
        raise BadData(
            f"{folder / MODEL_FILE} has no card of a {folder.name} checkpoint in its header",
            hint="restore it from a backup",
        ) from None
    if not _holds(folder / CARD_FILE, text.encode() + b"\n"):
        log.info("%s is of an older checkpoint; the card inside %s counts", folder / CARD_FILE, MODEL_FILE)
    return card


def _holds(path: Path, data: bytes) -> bool:
    return path.exists() and path.read_bytes() == data


def _chained(first: bytes, rest: Iterable[Buffer]) -> Iterator[Buffer]:
    yield first
    yield from rest


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}", hint="restore it from a backup", code=TRAINING_FAILED) from None
