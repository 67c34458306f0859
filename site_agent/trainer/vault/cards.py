"""A checkpoint's card: where a model comes from and how good it is, in the header of the model's own file."""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field, ValidationError

from wardround.errors import BadData
from wardround.records.trainer import TRAINING_FAILED, Checkpoint, CheckpointKind
from wardround.records.trainer.fields import Count, Digest, NetworkLabel, Strict
from wardround.signing import canonical
from wardround.tensors.files import TensorFile

MODEL_FILE, CARD_FILE, PREPROCESSING_FILE = "model.safetensors", "card.json", "preprocessing.json"
PREPROCESSING_FILES = "preprocessing*.json"  # of a checkpoint's folder
Rounds = dict[str, list[Count]]  # by site
log = logging.getLogger(__name__)


class Card(Strict):
    """Where a model comes from, and how good it is on this site's own data.

    Attributes:
        network: the label of the one that this site trains; "" where the study has one.
        why: of a selected one, the reason in words.
        scores: every metric on ``split``; ``score`` is the headline ``metric``. None where undefined.
        contributors, capped, left_out: by site the rounds to which it contributed, in which it counted for less than
            its rows, and in which its update was beyond the study's limits; ``contributors`` is None until the study
            has ended.
        created: RFC 3339, UTC.
        preprocessing_sha256: (hex) of the file beside the model, whose name has its beginning.
    """

    study: str
    revision: Count
    study_digest: Digest
    site: str
    network: NetworkLabel = ""
    kind: CheckpointKind
    round: Count
    score: float | None
    metric: str
    split: str
    scores: dict[str, float | None]
    why: str = ""
    val_loss: float | None
    model_digest: Digest
    data_digest: Digest
    contributors: Rounds | None = None
    capped: Rounds = Field(default_factory=dict)
    left_out: Rounds = Field(default_factory=dict)
    created: str
    wardround: str
    torch: str
    device: str
    threads: Count
    instruction_set: str
    preprocessing_sha256: Digest

    def to_text(self) -> str:
        """JSON for people; ``card.json`` has the same and a line end."""
        return json.dumps(self.model_dump(), sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_text(cls, text: str) -> "Card":
        """Raises BadData: it is no card."""
        document = canonical.read(text)
        try:
            return cls.model_validate(document)
        except ValidationError:
            raise BadData("not a card") from None


@dataclass(frozen=True)
class CheckpointFile:
    """A checkpoint on disk, with its card."""

    folder: Path
    card: Card = field(repr=False)

    @property
    def model(self) -> Path:
        return self.folder / MODEL_FILE

    @property
    def beside(self) -> Path:
        """The preprocessing that the model was written with, under its own name or as all were named before."""
        own, older = self.folder / preprocessing_file(self.card.preprocessing_sha256), self.folder / PREPROCESSING_FILE
        return older if older.exists() and not own.exists() else own

    @classmethod
    def at(cls, folder: Path) -> "CheckpointFile":
        """The checkpoint in ``folder``, whose name is its kind.

        Raises:
            BadData: the model has no card of that kind.
        """
        with TensorFile(folder / MODEL_FILE) as model:
            text = model.note.get("card", "")
        try:
            card = Card.from_text(text)
            if card.kind != folder.name:
                raise BadData("another kind's card")
        except BadData:
            raise BadData(
                f"{folder / MODEL_FILE} has no card of a {folder.name} checkpoint in its header",
                hint="restore it from a backup",
            ) from None
        if not holds(folder / CARD_FILE, text.encode() + b"\n"):
            log.info("%s is of an older checkpoint; the card inside %s counts", folder / CARD_FILE, MODEL_FILE)
        return cls(folder, card)

    def row(self) -> Checkpoint:
        """What ``models list`` shows of it."""
        card = self.card
        return Checkpoint(
            kind=card.kind, round=card.round, score=card.score, metric=card.metric, split=card.split,
            val_loss=card.val_loss, path=str(self.model), digest=card.model_digest, why=card.why,
        )  # fmt: skip

    def verify_model(self) -> None:
        """Raises BadData: the model's tensors are not those that its card was written for."""
        with TensorFile(self.model) as model:
            self._verify(model)

    def model_data(self) -> bytes:
        """The model's file, the one that was verified. Raises BadData: as ``verify_model``."""
        with TensorFile(self.model) as model:
            self._verify(model)
            return b"".join(model.everything())

    def _verify(self, model: TensorFile) -> None:
        digest = model.manifest().digest()
        if digest != self.card.model_digest:
            raise BadData(
                f"{self.model} is damaged: its digest is {digest[:12]}…, its card says {self.card.model_digest[:12]}…",
                hint="restore it from a backup",
            )

    def preprocessing(self) -> Mapping[str, Mapping[str, object]]:
        """How rows were encoded for this model, "inputs", and what was fitted to its outputs, "outputs", as its task
        wrote them.

        Raises:
            BadData: as ``preprocessing_data``.
        """
        fitted: Mapping[str, Mapping[str, object]] = json.loads(self.preprocessing_data())
        return fitted

    def preprocessing_data(self) -> bytes:
        """The same as the file has it.

        Raises:
            BadData: it is not the file that was written with the model.
        """
        path = self.beside
        data = read(path)
        if hashlib.sha256(data).hexdigest() != self.card.preprocessing_sha256:
            raise BadData(
                f"{path} does not belong to the model beside it",
                hint="restore the folder from a backup, or wait for the next round's checkpoint",
            )
        return data


def preprocessing_file(sha256: str) -> str:
    """The name of the preprocessing with this digest, in a checkpoint's folder."""
    return f"preprocessing-{sha256[:12]}.json"


def holds(path: Path, data: bytes) -> bool:
    """Whether ``path`` is a file of just these bytes, as far as it can be read."""
    try:
        return path.read_bytes() == data
    except OSError:
        return False


def read(path: Path) -> bytes:
    """Raises BadData: it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}", hint="restore it from a backup", code=TRAINING_FAILED) from None
