"""What sites tell each other through the coordinator in an attempt with secure aggregation, and what checks a sum.

``secure.proto`` has the order of the messages. A signed statement stands in its envelope: whoever is to rely on it
reads it with ``wardround.secure.statements.read``. Here only forms and lengths are checked.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from wardround.errors import BadData
from wardround.records.messages import envelope_from, envelope_message
from wardround.records.study import SITE_NAME, STUDY_NAME
from wardround.secure.keys import LENGTH
from wardround.secure.rules import MOST
from wardround.signing.dsse import Envelope
from wardround.v1 import envelope_pb2
from wardround.v1 import secure_pb2 as pb

MAX_STATEMENT = 64 * 1024  # bytes of a signed statement: an opening of 255 sites has 36 KB
MAX_BLOCKS = 1024  # that are asked for in one call
MAX_BLOCK = 2**20  # bytes; as ``wardround.secure.layout`` has it, which needs numpy
CIPHERTEXT = 92  # bytes of a sealed share; as ``wardround.secure.shares`` has it
DIGEST = 32  # bytes


class Told(StrEnum):
    """What a site tells; each is a field of ``SecureTold``."""

    KEYS = "keys"
    SHARES = "shares"
    AGREEMENT = "agreement"
    OPENING = "opening"


class Shown(StrEnum):
    """What a site is shown; each is a field of ``SecureShown``."""

    KEYS = "keys"
    SHARES = "shares"
    SET = "set"
    AGREEMENTS = "agreements"


@dataclass(frozen=True)
class AttemptRef:
    """One attempt of a round of a study, whose digest (hex) it names."""

    study: str
    revision: int
    digest: str
    round: int
    attempt: int

    @classmethod
    def from_message(cls, message: pb.AttemptRef) -> "AttemptRef":
        """Raises BadData: not of its form."""
        if not STUDY_NAME.fullmatch(message.study) or len(message.digest) != DIGEST:
            raise _misshapen("names no attempt")
        return cls(message.study, message.revision, message.digest.hex(), message.round, message.attempt)

    def to_message(self) -> pb.AttemptRef:
        return pb.AttemptRef(
            study=self.study, revision=self.revision, digest=bytes.fromhex(self.digest), round=self.round,
            attempt=self.attempt,
        )  # fmt: skip


@dataclass(frozen=True)
class SecureTold:
    """What a site tells for an attempt: one signed statement, or receiver -> its sealed share."""

    attempt: AttemptRef
    kind: Told
    statement: Envelope | None = None
    shares: Mapping[str, bytes] | None = None

    @classmethod
    def from_message(cls, message: pb.SecureTold) -> "SecureTold":
        """Raises BadData: nothing is told, or not in its form."""
        kind = message.WhichOneof("kind")
        if kind is None:
            raise _misshapen("says nothing")
        attempt = AttemptRef.from_message(message.attempt)
        if kind == Told.SHARES:
            return cls(attempt, Told.SHARES, shares=_shares_from(message.shares))
        return cls(attempt, Told(kind), _statement_from(getattr(message, kind)))

    def to_message(self) -> pb.SecureTold:
        message = pb.SecureTold(attempt=self.attempt.to_message())
        if self.shares is not None:
            message.shares.CopyFrom(_shares_message(self.shares))
        elif self.statement is not None:
            getattr(message, self.kind).CopyFrom(envelope_message(self.statement))
        return message


@dataclass(frozen=True)
class SecureShown:
    """What a site is shown of an attempt: signed statements of several sites, or dealer -> its share for this one."""

    attempt: AttemptRef
    kind: Shown
    statements: tuple[Envelope, ...] = ()
    shares: Mapping[str, bytes] | None = None

    @classmethod
    def from_message(cls, message: pb.SecureShown) -> "SecureShown | None":
        """None for a kind that this version does not know. Raises BadData: not in its form."""
        kind = message.WhichOneof("kind")
        if kind is None:
            return None
        attempt = AttemptRef.from_message(message.attempt)
        if kind == Shown.SHARES:
            return cls(attempt, Shown.SHARES, shares=_shares_from(message.shares))
        return cls(attempt, Shown(kind), _statements_from(getattr(message, kind)))

    def to_message(self) -> pb.SecureShown:
        message = pb.SecureShown(attempt=self.attempt.to_message())
        if self.shares is not None:
            message.shares.CopyFrom(_shares_message(self.shares))
        else:
            getattr(message, self.kind).CopyFrom(_statements_message(self.statements))
        return message


@dataclass(frozen=True)
class SumEvidence:
    """What a sum is checked with.

    Attributes:
        keys: of the group. submissions: of the set.
        self_masks, mask_keys: what was opened, of the sites in the set and of the group's others.
        base, model: digests (hex) of what the round began with and what it made; "" for a closing validation.
    """

    attempt: AttemptRef
    keys: tuple[Envelope, ...]
    submissions: tuple[Envelope, ...]
    agreements: tuple[Envelope, ...]
    self_masks: Mapping[str, bytes]
    mask_keys: Mapping[str, bytes]
    base: str
    model: str

    @classmethod
    def from_message(cls, message: pb.SumEvidence) -> "SumEvidence":
        """Raises BadData: not in its form."""
        if len(message.base) != DIGEST or len(message.model) not in (0, DIGEST):
            raise _misshapen("names no model")
        return cls(
            AttemptRef.from_message(message.attempt), _statements_from(message.keys), _statements_from(message.set),
            _statements_from(message.agreements),
            _secrets_from(message.self_masks), _secrets_from(message.mask_keys), message.base.hex(),
            message.model.hex(),
        )  # fmt: skip

    def to_message(self) -> pb.SumEvidence:
        return pb.SumEvidence(
            attempt=self.attempt.to_message(), keys=_statements_message(self.keys),
            set=_statements_message(self.submissions), agreements=_statements_message(self.agreements),
            self_masks=_secrets_message(self.self_masks), mask_keys=_secrets_message(self.mask_keys),
            base=bytes.fromhex(self.base), model=bytes.fromhex(self.model),
        )  # fmt: skip

    def document(self) -> dict[str, object]:
        """As a file: the signed statements as text, the opened secrets as hex."""
        return {
            "attempt": asdict(self.attempt),
            "keys": [one.document() for one in self.keys],
            "set": [one.document() for one in self.submissions],
            "agreements": [one.document() for one in self.agreements],
            "self_masks": {site: secret.hex() for site, secret in self.self_masks.items()},
            "mask_keys": {site: secret.hex() for site, secret in self.mask_keys.items()},
            "base": self.base,
            "model": self.model,
        }

    @classmethod
    def from_document(cls, document: Any) -> "SumEvidence":
        """Raises BadData: not what ``document`` gave."""
        try:
            keys, submissions, agreements = (
                tuple(Envelope.from_document(one) for one in document[name]) for name in ("keys", "set", "agreements")
            )
            self_masks, mask_keys = (
                {site: bytes.fromhex(text) for site, text in document[name].items()}
                for name in ("self_masks", "mask_keys")
            )
            attempt, base, model = AttemptRef(**document["attempt"]), document["base"], document["model"]
            found = cls(attempt, keys, submissions, agreements, self_masks, mask_keys, base, model)
            return cls.from_message(found.to_message())
        except (KeyError, TypeError, ValueError, AttributeError):
            raise _misshapen("is no evidence of a sum") from None


@dataclass(frozen=True)
class BlocksWanted:
    """Blocks of one site's masked vector."""

    study: str
    revision: int
    round: int
    site: str
    blocks: tuple[int, ...]

    @classmethod
    def from_message(cls, message: pb.BlocksRequest) -> "BlocksWanted":
        """Raises BadData: not in its form, or more than ``MAX_BLOCKS``."""
        fits = STUDY_NAME.fullmatch(message.study) and SITE_NAME.fullmatch(message.site)
        if not fits or len(message.blocks) > MAX_BLOCKS:
            raise _misshapen(f"asks for no vector, or for more than {MAX_BLOCKS} blocks")
        return cls(message.study, message.revision, message.round, message.site, tuple(message.blocks))

    def to_message(self) -> pb.BlocksRequest:
        return pb.BlocksRequest(
            study=self.study, revision=self.revision, round=self.round, site=self.site, blocks=self.blocks
        )


@dataclass(frozen=True)
class BlockDigests:
    """SHA-256 (hex) of every block of a vector: the first message of an answer."""

    digests: tuple[str, ...]


@dataclass(frozen=True)
class VectorBlock:
    """One block of a vector."""

    index: int
    data: bytes


def blocks_from(message: pb.BlocksReply) -> BlockDigests | VectorBlock:
    """Raises BadData: neither digests nor a block of at most 1 MiB."""
    kind = message.WhichOneof("kind")
    data = message.digests.sha256
    if kind == "digests" and data and len(data) % DIGEST == 0:
        return BlockDigests(tuple(data[at : at + DIGEST].hex() for at in range(0, len(data), DIGEST)))
    if kind == "block" and len(message.block.data) <= MAX_BLOCK:
        return VectorBlock(message.block.index, message.block.data)
    raise _misshapen("is neither digests nor a block")


def blocks_message(part: BlockDigests | VectorBlock) -> pb.BlocksReply:
    if isinstance(part, BlockDigests):
        return pb.BlocksReply(digests=pb.BlockDigests(sha256=bytes.fromhex("".join(part.digests))))
    return pb.BlocksReply(block=pb.VectorBlock(index=part.index, data=part.data))


def statement_from(message: envelope_pb2.Envelope) -> Envelope:
    """A signed statement. Raises BadData: longer than any of ours."""
    return _statement_from(message)


def _statement_from(message: envelope_pb2.Envelope) -> Envelope:
    if message.ByteSize() > MAX_STATEMENT:
        raise _misshapen("has a statement that is too long")
    return envelope_from(message)


def _statements_from(message: pb.Envelopes) -> tuple[Envelope, ...]:
    if len(message.envelopes) > MOST:
        raise _misshapen("has more statements than there are sites")
    return tuple(_statement_from(one) for one in message.envelopes)


def _statements_message(statements: tuple[Envelope, ...]) -> pb.Envelopes:
    return pb.Envelopes(envelopes=[envelope_message(one) for one in statements])


def _shares_from(message: pb.SealedShares) -> dict[str, bytes]:
    found = {one.site: one.ciphertext for one in message.shares}
    fits = all(SITE_NAME.fullmatch(site) and len(data) == CIPHERTEXT for site, data in found.items())
    if not fits or not len(found) == len(message.shares) <= MOST:
        raise _misshapen("has shares of another form, or two of one site")
    return found


def _shares_message(shares: Mapping[str, bytes]) -> pb.SealedShares:
    return pb.SealedShares(shares=[pb.SealedShare(site=site, ciphertext=data) for site, data in sorted(shares.items())])


def _secrets_from(messages: Collection[pb.OpenedSecret]) -> dict[str, bytes]:
    found = {one.site: one.secret for one in messages}
    fits = all(SITE_NAME.fullmatch(site) and len(data) == LENGTH for site, data in found.items())
    if not fits or not len(found) == len(messages) <= MOST:
        raise _misshapen("has opened secrets of another form, or two of one site")
    return found


def _secrets_message(secrets: Mapping[str, bytes]) -> list[pb.OpenedSecret]:
    return [pb.OpenedSecret(site=site, secret=data) for site, data in sorted(secrets.items())]


def _misshapen(what: str) -> BadData:
    return BadData(f"a message of secure aggregation {what}", code="MESSAGE_MALFORMED")
