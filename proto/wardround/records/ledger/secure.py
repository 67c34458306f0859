"""What a site's ledger says of secure aggregation: whom its people know, and each round's keys, signature and opening.

The `agreed` lines are this site's pledges: written before the signature leaves, and read again before another is made.
"""

from dataclasses import dataclass

from wardround.records.ledger.base import BaseEntry, Person
from wardround.records.ledger.form import Digest, Record
from wardround.secure.policy import Pledge

KNOWN, FORGOTTEN = "known", "forgotten"
# What a check of a sum found: the model is what its sum gives, or another; the coordinator keeps more than the model,
# so that blocks and secrets alone were looked at; nobody here could look, for a round went on without this site.
SAME, OTHER, BLOCKS_ALONE, MISSED = "same", "other", "blocks_alone", "missed"


@dataclass(frozen=True, kw_only=True)
class MaskedUpload(Record):
    """What an upload's bytes are: integers with masks.

    ``plain`` commits to the tensors before the masks, with a salt that stays at the site. ``blocks`` is the digest that
    this site signed. ``bits``: a value times its weight is rounded to multiples of 2^-bits.
    """

    context: Digest
    group: Digest
    blocks: Digest
    plain: Digest
    weighting: str  # rows, equal
    bits: int


@dataclass(frozen=True, kw_only=True)
class PeerEntry(BaseEntry):
    """A person compared the fingerprint of another site's ledger key with that site's people, or takes it back."""

    type = "peer"
    event: str  # known, forgotten
    site: str
    fingerprint: Digest
    by: Person | None = None


@dataclass(frozen=True, kw_only=True)
class SecureEntry(BaseEntry):
    """About one attempt of a round. ``study_sha256`` is the study's digest, ``context`` that of the attempt."""

    study: str
    revision: int
    study_sha256: Digest
    round: int
    attempt: int
    context: Digest


@dataclass(frozen=True, kw_only=True)
class KeysEntry(SecureEntry):
    """This site's public keys for an attempt leave, with the model (``base``) and the roster that it was given."""

    type = "keys"
    base: Digest
    roster: Digest


@dataclass(frozen=True, kw_only=True)
class AgreedEntry(SecureEntry):
    """This site signs the set (``chosen``) whose sum it helps to open: the only one of this round.

    ``known``: those of its sites whom people here know. The bounds are those that held when it was signed, by the study
    (``threshold``) and by the policy in force (``policy_sha256``).
    """

    type = "agreed"
    group: Digest
    base: Digest
    chosen: Digest
    sites: tuple[str, ...]
    known: tuple[str, ...]
    threshold: int
    min_sites: int
    min_known: int
    policy_sha256: Digest

    @property
    def pledge(self) -> Pledge:
        return Pledge(self.study_sha256, self.round, self.base, self.context, self.chosen, self.sites)


@dataclass(frozen=True, kw_only=True)
class OpenedEntry(SecureEntry):
    """Shares that this site holds leave: of the self masks of the set's sites, of the mask keys of the others."""

    type = "opened"
    chosen: Digest
    self_masks: tuple[str, ...]
    mask_keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SumCheckedEntry(SecureEntry):
    """This site compared blocks of a round's sum with the model that came of it (``model``), of so many (``of``).

    ``looked_at``: which; the numbers beside the tensors are looked at each time.
    """

    type = "sum_checked"
    chosen: Digest
    model: Digest
    looked_at: tuple[int, ...]
    of: int
    result: str  # same, other, blocks_alone, missed
