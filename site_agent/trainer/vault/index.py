"""Which private states of a study count, as ``index.json`` says: records and their codec."""

import re
from functools import lru_cache
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from wardround.errors import BadData
from wardround.records.trainer import Trained, Validated
from wardround.records.trainer.failures import first_fault
from wardround.records.trainer.fields import Count, Digest, NetworkLabel, NoDigest, Strict
from wardround.signing import canonical

STATE_FILE = re.compile(r"state-[0-9]{5,6}-[0-9a-f]{12}\.safetensors")
KEPT_STATES = 2


class Kept(Strict):
    """A state on disk: its file, and the SHA-256 (hex) of that."""

    round: Count
    file: Annotated[str, Field(pattern=rf"^{STATE_FILE.pattern}$")]
    sha256: Digest


class Origin(Strict):
    """What a round was made from. The same origin gives the same update, bit for bit.

    Attributes:
        start: the file of the private state that it began with; "" for none.
        network, weights: as in ``ApprovedData``.
    """

    command: Literal["train", "validate"]
    base_digest: Digest
    data_digest: Digest
    start: str = ""
    network: NetworkLabel = ""
    weights: NoDigest = ""


class Pending(Strict):
    """A round whose update has no receipt yet: what it was made from, and what the gateway was answered.

    ``update_crc32`` (hex) is of the update's file, to see whether a loss of power tore it: the gateway hashes what it
    takes. "" for a closing validation.
    """

    state: Kept
    origin: Origin
    answer: Trained | Validated
    update_crc32: Annotated[str, Field(pattern=r"^([0-9a-f]{8})?$")] = ""


class Index(Strict):
    """Which states count. ``forgotten`` is the newest round whose state was dropped for its age, 0 for none."""

    v: Literal[1] = 1
    study_digest: Digest
    committed: Annotated[tuple[Kept, ...], Field(strict=False)] = ()  # by round, the newest last
    pending: Pending | None = None
    forgotten: Count = 0

    @model_validator(mode="after")
    def _refuse_forgotten_without_kept(self) -> Self:
        if self.forgotten and not self.committed:
            raise ValueError("a state was dropped for its age, and no newer one is kept")
        return self

    def to_bytes(self) -> bytes:
        """The bytes of its file."""
        return canonical.dumps(self.model_dump())

    @classmethod
    def from_bytes(cls, data: bytes) -> "Index":
        """Raises BadData: these are none."""
        return _parsed(data)

    @property
    def files(self) -> set[str]:
        """The files of the states that it names."""
        pending = {self.pending.state.file} if self.pending is not None else set()
        return {kept.file for kept in self.committed} | pending

    def accepted(self, pending: Pending) -> "Index":
        """As it is when the pending round was accepted: its state is the newest, and the oldest is dropped."""
        committed = [kept for kept in self.committed if kept.round < pending.state.round] + [pending.state]
        dropped, kept = committed[:-KEPT_STATES], committed[-KEPT_STATES:]
        forgotten = dropped[-1].round if dropped else self.forgotten
        return Index(study_digest=self.study_digest, committed=tuple(kept), forgotten=forgotten)


@lru_cache(maxsize=2)
def _parsed(data: bytes) -> Index:
    """The index in ``data``, which each step of a round reads and only its last one changes."""
    document = canonical.loads(data)
    try:
        return Index.model_validate(document)
    except ValidationError as error:
        raise BadData(f"not an index of states: {first_fault(error)}") from None
