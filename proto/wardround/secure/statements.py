"""What sites sign in a round, and what is sent beside it: one record each, with its canonical form.

    Keys        a site's public keys for one attempt, with the model that it was given
    Submission  "this masked vector is mine"
    Agreement   "I open this set of submissions, no other in this round, and none of other sites from this model"
    Opened      shares of the self masks of the set, and of the mask keys of the others

Each is a DSSE envelope by the site's ledger key. Canonical JSON, so that one statement has one form and one digest.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol, Self, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from wardround.errors import BadData
from wardround.signing import canonical, dsse
from wardround.signing.dsse import Envelope

HEX = frozenset("0123456789abcdef")


def _is_hex(text: object, size: int = 32) -> bool:
    return isinstance(text, str) and len(text) == 2 * size and set(text) <= HEX


@dataclass(frozen=True)
class Roster:
    """A study's sites, each with its ledger key (32 public bytes). A consent's digest covers it."""

    members: tuple[tuple[str, bytes], ...]

    def __post_init__(self) -> None:
        names, keys = [site for site, _ in self.members], {key for _, key in self.members}
        if names != sorted(set(names)) or len(keys) != len(names) or any(len(key) != 32 for key in keys):
            raise BadData("a roster has each site once, in order, with a key of its own")

    @classmethod
    def of(cls, members: Mapping[str, bytes]) -> "Roster":
        return cls(tuple(sorted(members.items())))

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(site for site, _ in self.members)

    def key(self, site: str) -> Ed25519PublicKey:
        """Raises BadData: it is not in the roster."""
        for name, key in self.members:
            if name == site:
                return Ed25519PublicKey.from_public_bytes(key)
        raise BadData(f"site `{site[:64]}` is not in the study's roster")

    def point(self, site: str) -> int:
        """Where a site's shares stand, 1 to n. Raises BadData: it is not in the roster."""
        if site not in self.sites:
            raise BadData(f"site `{site[:64]}` is not in the study's roster")
        return self.sites.index(site) + 1

    def fingerprint(self, site: str) -> str:
        """What people read to each other on the telephone."""
        return dsse.keyid(self.key(site))

    @cached_property
    def digest(self) -> str:
        return canonical.digest([[site, key.hex()] for site, key in self.members])


@dataclass(frozen=True)
class Context:
    """What one attempt of a round is about. Everything in it is the same at all sites, or no mask cancels.

    Attributes:
        study, roster, base, layout: digests (hex): of the resolved study with its initial model, of the roster, of the
            model that the update is made from, of the vectors' form.
    """

    federation: str
    study: str
    roster: str
    round: int
    attempt: int
    base: str
    layout: str

    def document(self) -> dict[str, object]:
        return {
            "federation": self.federation, "study": self.study, "roster": self.roster, "round": self.round,
            "attempt": self.attempt, "base": self.base, "layout": self.layout,
        }  # fmt: skip

    @classmethod
    def from_document(cls, document: Any) -> "Context":
        """Raises BadData: not a context."""
        try:
            context = cls(**document)
        except TypeError:
            raise BadData("not the context of a round of secure aggregation") from None
        digests = (context.study, context.roster, context.base, context.layout)
        numbers = (context.round, context.attempt)
        if (
            not isinstance(context.federation, str)
            or not all(_is_hex(one) for one in digests)
            or not all(type(one) is int and 1 <= one < 2**31 for one in numbers)
        ):
            raise BadData("not the context of a round of secure aggregation")
        return context

    @cached_property
    def digest(self) -> str:
        return canonical.digest(self.document())

    def differs(self, other: "Context") -> str:
        """The first field in which another context is not this one, or ""."""
        mine, theirs = self.document(), other.document()
        return next((name for name in mine if mine[name] != theirs[name]), "")


class Statement(Protocol):
    """A record that a site signs."""

    TYPE: ClassVar[str]

    @property
    def site(self) -> str: ...

    def document(self) -> dict[str, object]: ...

    @classmethod
    def from_document(cls, document: Any) -> Self: ...


Kind = TypeVar("Kind", bound=Statement)


def signed(statement: Statement, key: Ed25519PrivateKey) -> Envelope:
    """The same bytes each time: Ed25519 draws nothing."""
    return dsse.sign(statement.TYPE, statement.document(), key)


def read(kind: type[Kind], envelope: Envelope, roster: Roster) -> Kind:
    """The statement, signed by the site that it names.

    Raises:
        BadData: it is another kind, not in its form, or not signed with the key that the roster has for that site.
    """
    if envelope.payload_type != kind.TYPE:
        raise BadData(f"signed as {envelope.payload_type[:60]!r}, wanted {kind.TYPE!r}")
    statement = kind.from_document(canonical.loads(envelope.payload))
    dsse.verify(envelope, kind.TYPE, roster.key(statement.site))
    return statement


def known(kind: type[Kind], envelope: Envelope) -> Kind:
    """The statement of an envelope that ``read`` has judged before. Raises BadData: not in its form."""
    return kind.from_document(canonical.loads(envelope.payload))


def read_all(kind: type[Kind], envelopes: Iterable[Envelope], roster: Roster) -> tuple[Kind, ...]:
    """One statement each of some sites, in the order of their names.

    Raises:
        BadData: as ``read``, or two of one site.
    """
    found = [read(kind, envelope, roster) for envelope in envelopes]
    if len({one.site for one in found}) != len(found):
        raise BadData("two statements of one site, where one is wanted")
    return tuple(sorted(found, key=lambda one: one.site))


def _fields(document: Any, what: str, **forms: Callable[[Any], bool]) -> dict[str, Any]:
    """Raises BadData: other fields, or one not in its form."""
    if not isinstance(document, dict) or document.keys() != forms.keys():
        raise BadData(f"{what} has other fields than {', '.join(forms)}")
    for name, fits in forms.items():
        if not fits(document[name]):
            raise BadData(f"{what}: `{name}` has not its form")
    return document


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= 64


def _is_table(value: object) -> bool:
    return isinstance(value, dict) and all(_is_name(site) and _is_hex(one) for site, one in value.items())


@dataclass(frozen=True)
class Keys:
    """``mask_key``, ``share_key``: X25519 public keys (hex). ``self_mask``: the commitment to the self mask (hex)."""

    TYPE: ClassVar[str] = "application/vnd.wardround.secure-keys.v1+json"
    context: Context
    site: str
    mask_key: str
    share_key: str
    self_mask: str

    def document(self) -> dict[str, object]:
        return {
            "context": self.context.document(), "site": self.site, "mask_key": self.mask_key,
            "share_key": self.share_key, "self_mask": self.self_mask,
        }  # fmt: skip

    @classmethod
    def from_document(cls, document: Any) -> "Keys":
        fields = _fields(
            document, "a statement of keys", context=lambda value: isinstance(value, dict), site=_is_name,
            mask_key=_is_hex, share_key=_is_hex, self_mask=_is_hex,
        )  # fmt: skip
        return cls(**{**fields, "context": Context.from_document(fields["context"])})

    @cached_property
    def digest(self) -> str:
        return canonical.digest(self.document())


@dataclass(frozen=True)
class Submission:
    """A masked vector by the digest of its blocks' digests. context, group: digests."""

    TYPE: ClassVar[str] = "application/vnd.wardround.secure-submission.v1+json"
    context: str
    group: str
    site: str
    blocks: str

    def document(self) -> dict[str, object]:
        return {"context": self.context, "group": self.group, "site": self.site, "blocks": self.blocks}

    @classmethod
    def from_document(cls, document: Any) -> "Submission":
        return cls(**_fields(document, "a submission", context=_is_hex, group=_is_hex, site=_is_name, blocks=_is_hex))


@dataclass(frozen=True)
class Agreement:
    """``chosen``: the digest of the set (``set_digest``)."""

    TYPE: ClassVar[str] = "application/vnd.wardround.secure-agreement.v1+json"
    context: str
    group: str
    site: str
    chosen: str

    def document(self) -> dict[str, object]:
        return {"context": self.context, "group": self.group, "site": self.site, "chosen": self.chosen}

    @classmethod
    def from_document(cls, document: Any) -> "Agreement":
        return cls(**_fields(document, "an agreement", context=_is_hex, group=_is_hex, site=_is_name, chosen=_is_hex))


@dataclass(frozen=True)
class Opened:
    """The shares (hex) that ``site`` holds: of the self masks of the set's sites, of the mask keys of the group's
    others. No site is in both: the record cannot be made otherwise.
    """

    TYPE: ClassVar[str] = "application/vnd.wardround.secure-opened.v1+json"
    context: str
    chosen: str
    site: str
    self_masks: Mapping[str, str]
    mask_keys: Mapping[str, str]

    def __post_init__(self) -> None:
        if both := sorted(self.self_masks.keys() & self.mask_keys.keys()):
            raise BadData(f"shares of both kinds of site `{both[0]}`, which would lay its vector open")

    def document(self) -> dict[str, object]:
        return {
            "context": self.context, "chosen": self.chosen, "site": self.site, "self_masks": dict(self.self_masks),
            "mask_keys": dict(self.mask_keys),
        }  # fmt: skip

    @classmethod
    def from_document(cls, document: Any) -> "Opened":
        fields = _fields(
            document, "an opening", context=_is_hex, chosen=_is_hex, site=_is_name, self_masks=_is_table,
            mask_keys=_is_table,
        )  # fmt: skip
        return cls(**fields)


def group_digest(context: Context, members: Iterable[Keys]) -> str:
    """Of the sites whose masks a vector has, by the keys that each of them stated."""
    return canonical.digest([context.digest, sorted([one.site, one.digest] for one in members)])


def set_digest(group: str, submissions: Iterable[Submission]) -> str:
    """Of the submissions that are to be summed."""
    return canonical.digest([group, sorted([one.site, one.blocks] for one in submissions)])


def payload_digest(envelope: Envelope) -> str:
    return hashlib.sha256(envelope.payload).hexdigest()
