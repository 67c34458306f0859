"""A site's state directory: where things are, and the small JSON files in it.

    identity/            key.pem  certificate.pem  authority.pem  ledger_key.pem  site.json
    offers/STUDY.json    what the coordinator offers, checked before it is kept
    previews/STUDY.json  the account of it that a person was shown last
    consents/STUDY.json  what a person approved or withdrew last; consents/STUDY/ has each time, for good
    policy.toml          what may leave, written by a person; policies/SHA256.toml has each that was in force
    journal/STUDY.json   how far the current round is
    receipts.jsonl       the coordinator's copy of this site's receipts, when it was asked for
    outgoing/STUDY.safetensors   the gateway's own copy of an update: what is measured, recorded and sent
    incoming/            models that are being downloaded
    staging/             the one folder that the trainer's user writes too
    ledger/  studies/  data.toml  control.sock

Nothing here needs the network, torch or cryptography, so the commands stay quick.
"""

import datetime
import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import AfterValidator, Field, TypeAdapter

from wardround.errors import BadData, NeedsPerson, TryAgain, UsageProblem
from wardround.local import descriptors, directory, durable
from wardround.local.directory import quoted
from wardround.records.study import STUDY_NAME, StudyFile
from wardround.signing import canonical

APPROVED, WITHDRAWN = "approved", "withdrawn"
DATA_CHANGED = "DECLINED_DATA_CHANGED"
GATEWAY_FOLDERS = (
    "identity", "offers", "previews", "consents", "policies", "journal", "ledger", "staging", "incoming", "outgoing",
)  # fmt: skip
COUNTS = 2  # numbers that go with each update beside its metrics: how many rows trained, how many validated
OWN_MODEL = "this site's own model"
SHARED_MODE = 0o640  # a file in staging: the trainer's user reads it through the group

Record = TypeVar("Record")


def tensor_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Raises ValueError: one is not the account of a tensor."""
    for row in rows:
        texts, shape, size = [row.get(key) for key in ("name", "dtype")], row.get("shape"), row.get("bytes")
        numbers = [*shape, size] if isinstance(shape, list) else [None]
        if not all(isinstance(text, str) for text in texts) or not all(_is_count(one) for one in numbers):
            raise ValueError("a tensor without its name, dtype, shape or bytes")
    return rows


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= canonical.MAX_INTEGER


def _leaving_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not all(isinstance(row.get("bundle"), str) for row in rows):
        raise ValueError("a tensor without its bundle")
    return tensor_rows(rows)


def _with_keys(**kinds: type) -> AfterValidator:
    """A table in which these keys are there and of that kind."""

    def check(table: dict[str, Any]) -> dict[str, Any]:
        if any(type(table.get(key)) is not kind for key, kind in kinds.items()):
            raise ValueError("a key is missing or of another kind")
        return table

    return AfterValidator(check)


def _resolved(document: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError: not the document of a resolved study."""
    if StudyFile.from_document(document).document() != document:
        raise ValueError("not a resolved study")
    return document


def _settings(document: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError: not a study's settings, nor none."""
    study = document.get("study")
    if document and not (isinstance(study, dict) and type(study.get("rounds")) is int):
        raise ValueError("settings without the study's rounds")
    return document


def _an_account(shown: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError: not the fields of ``Shown``, nor none."""
    if shown:
        adapters = _adapters(Shown)
        if set(shown) != set(adapters):
            raise ValueError("not an account")
        for name, adapter in adapters.items():
            adapter.validate_python(shown[name], strict=True)
    return shown


# What a dataclass below says of its fields is checked when it is read from its file.
Leaving = Annotated[list[dict[str, Any]], AfterValidator(_leaving_rows)]
Staying = Annotated[list[dict[str, Any]], AfterValidator(tensor_rows)]
Settings = Annotated[dict[str, Any], AfterValidator(_settings)]
ShownFields = Annotated[dict[str, Any], AfterValidator(_an_account)]
Exposure = Annotated[str, Field(pattern="^(coordinator|sites)?$")]


@dataclass(frozen=True)
class Site:
    """Who this installation is, as its enrolment said. ``receipt_key`` is hex; ``renew_after_s`` is Unix time."""

    site: str
    federation: str
    address: str
    receipt_key: str
    authority_fingerprint: str
    renew_after_s: int


@dataclass(frozen=True)
class Offer:
    """One exact study as the coordinator offers it: ``document`` is the resolved study, and of its initial model
    ``initial_model`` is this site's part.
    """

    study: str
    revision: int
    digest: str
    state: str  # the coordinator's word: created, waiting, running, paused, finished, stopped, failed
    document: Annotated[dict[str, Any], AfterValidator(_resolved)]
    initial_model: Leaving

    def kept_as(self) -> bytes:
        """The bytes of its file."""
        return canonical.dumps(asdict(self))

    @property
    def leaves(self) -> list[dict[str, Any]]:
        """The tensors that every update has, in the payload's order, without digests."""
        return [{key: row[key] for key in ("bundle", "name", "dtype", "shape", "bytes")} for row in self.initial_model]

    @property
    def metrics(self) -> list[str]:
        return list(self.document["reported"]["metrics"])

    @property
    def rounds(self) -> int:
        return int(self.document["study"]["rounds"])


@dataclass(frozen=True)
class Shown:
    """An account of a study as a person was shown it: its digest, when, and its lines."""

    digest: str
    study_digest: str
    revision: int
    at: str
    lines: dict[str, str]


@dataclass(frozen=True)
class Consent:
    """What a person approved: one exact study, the exact tensors and numbers that leave, and one table."""

    study: str
    revision: int
    study_digest: str
    leaves: Leaving
    metrics: list[str]
    counts: str
    stays: Staying  # what the installed model keeps here: name, dtype, shape, bytes, why
    data: Annotated[dict[str, str], _with_keys(name=str, digest=str)]  # as ``gateway.consent.trained_on`` makes it
    rows: int
    validation_rows: int
    approved_by: Annotated[dict[str, Any], _with_keys(name=str, uid=int)]  # as ``person.who`` gives it
    approved_at: str
    state: str  # approved, withdrawn
    comes: Leaving  # the tensors that a round begins with, as `leaves` has them
    exposure: Exposure  # who has what is this site's own: "", "coordinator" or "sites"; see ``exposed``
    apart: str = ""  # what that is, in words
    document: Settings = field(default_factory=dict)  # the resolved study, every setting of it
    attempts: int = 0  # how often each of its rounds may be asked for
    account: ShownFields = field(default_factory=dict)  # what was shown: the fields of ``Shown``
    seen: dict[str, str] = field(default_factory=dict)  # how the files lay there, as ``trainer.looking`` says
    withdrawn_by: dict[str, Any] = field(default_factory=dict)
    withdrawn_at: str = ""

    @property
    def rounds(self) -> int:
        """How many rounds were approved; one more, the closing one, may ask for numbers."""
        return int(self.document["study"]["rounds"]) if self.document else 0

    def kept_as(self) -> bytes:
        """The bytes of its file."""
        return canonical.dumps(asdict(self))

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of its file: another each time that somebody approves."""
        return hashlib.sha256(self.kept_as()).hexdigest()

    def shown(self) -> Shown | None:
        """The account that was approved; None of a consent from before there were any."""
        return Shown(**self.account) if self.account else None

    @property
    def train_rows(self) -> int:
        """The rows that a study trains on: all but those that it validates with. The data's digest pins both."""
        return self.rows - self.validation_rows


@dataclass
class Journal:
    """How far a study's current assignment is. Written before each step that a crash must not repeat.

    ``phase``: "" | downloading | training | trained | held (waits for a person) | uploading | decided. ``applied``:
    the trainer has heard the decision. ``ended``: the coordinator's last word on the study (finished, stopped,
    failed), once acted upon. ``declined``: the code with which this site declined the assignment, and when.
    """

    study: str
    revision: int = 0
    study_digest: str = ""
    round: int = 0
    attempt: int = 0
    kind: str = ""
    phase: str = ""
    base_digest: str = ""
    update: str = ""  # the trainer's file in staging, "" for a closing validation
    update_digest: str = ""  # of the manifest of the gateway's own copy of it, in ``outgoing``
    num_examples: int = 0
    num_validation: int = 0
    metrics: dict[str, str] = field(default_factory=dict)
    upload_id: str = ""
    decision: str = ""
    applied: bool = True
    ended: str = ""
    declined: str = ""
    declined_at: str = ""
    consent: str = ""  # the digest of the consent under which it was begun


@dataclass(frozen=True)
class SiteState:
    """The paths under one ``--state``."""

    root: Path

    @property
    def control(self) -> Path:
        return self.root / "control.sock"

    @property
    def identity(self) -> Path:
        return self.root / "identity"

    @property
    def site_file(self) -> Path:
        return self.identity / "site.json"

    @property
    def receipts(self) -> Path:
        """The coordinator's copy of this site's receipts, as it was when it was asked last."""
        return self.root / "receipts.jsonl"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger"

    @property
    def policy(self) -> Path:
        return self.root / "policy.toml"

    @property
    def left_file(self) -> Path:
        return self.identity / "left.json"

    @property
    def staging(self) -> Path:
        return self.root / "staging"

    @property
    def incoming(self) -> Path:
        return self.root / "incoming"

    def own_copy(self, study: str) -> Path:
        """Where the gateway keeps its copy of a study's update."""
        return self._file("outgoing", study, "safetensors")

    def make_folders(self) -> None:
        """Make what the gateway owns. Folders that an administrator made keep their owner and mode."""
        for name in GATEWAY_FOLDERS:
            durable.make_folder(self.root / name)

    def joined(self) -> bool:
        """Whether a site is here. Raises NeedsPerson: this user may not look, or it is no place for a site."""
        directory.refuse_other(self.root, "site-agent")
        return directory.exists(self.site_file)

    def not_joined(self) -> NeedsPerson:
        return NeedsPerson(
            f"{self.root} has not joined a federation",
            hint=f"`site-agent join --state {quoted(self.root)}` with the invitation from the coordinator's operator; "
            "or is it another --state?",
        )

    def require_folder(self) -> None:
        """For commands that need no membership. Raises NeedsPerson: it is no directory, or a coordinator's."""
        directory.refuse_other(self.root, "site-agent")
        if not directory.exists(self.root):
            raise NeedsPerson(
                f"{self.root} is not a site's state directory",
                hint=f"`site-agent join --state {quoted(self.root)}` makes one; or is it another --state?",
            )

    def require_used(self) -> None:
        """For commands about what is here, by the trainer's user too, who sees no identity, and after a site left.

        Raises:
            NeedsPerson: nothing of a site is here.
        """
        self.require_folder()
        if not any(directory.exists(self.root / name) for name in ("identity", "studies", "data.toml")):
            raise self.not_joined()

    def site(self) -> Site:
        """Raises NeedsPerson: this directory belongs to no site yet, or to one that left."""
        if not self.joined():
            raise self.not_joined()
        site = _read(self.site_file, Site)
        if self.left_file.exists():
            raise NeedsPerson(
                f"site `{site.site}` in {self.root} left federation `{site.federation}`: nothing more is sent",
                hint="what it holds stays readable (`site-agent audit show`); to take part again, `site-agent join` "
                "with another --state and a new invitation",
            )
        return site

    def save_site(self, site: Site) -> None:
        durable.write_file(self.site_file, canonical.dumps(asdict(site)))

    def save_left(self, person: dict[str, Any]) -> None:
        """From now on this directory is an archive."""
        durable.write_file(self.left_file, canonical.dumps({"at": now_text(), "by": person}))

    def offers(self) -> list[Offer]:
        return [_read(path, Offer) for path in sorted((self.root / "offers").glob("*.json"))]

    def offer(self, study: str) -> Offer:
        """Raises UsageProblem: the coordinator has offered no such study."""
        path = self._file("offers", study)
        if not path.exists():
            known = ", ".join(offer.study for offer in self.offers()) or "none yet"
            raise UsageProblem(f"no study `{study}` has been offered to this site", hint=f"offered: {known}")
        return _read(path, Offer)

    def known_offer(self, study: str) -> Offer | None:
        """The offer as it is kept, if there is one."""
        path = self._file("offers", study)
        return _read(path, Offer) if path.exists() else None

    def save_offer(self, offer: Offer) -> None:
        durable.write_file(self._file("offers", offer.study), offer.kept_as())

    def drop_offer(self, study: str) -> None:
        durable.remove(self._file("offers", study))
        durable.remove(self._file("previews", study))

    def offer_sizes(self) -> dict[str, int]:
        """How many bytes each offer takes, oldest first."""
        found = [(path.stat().st_mtime_ns, path.stem, path.stat().st_size)
                 for path in (self.root / "offers").glob("*.json")]  # fmt: skip
        return {study: size for _, study, size in sorted(found)}

    def consents(self) -> list[Consent]:
        return [_read(path, Consent, _newer_consent) for path in sorted((self.root / "consents").glob("*.json"))]

    def consent(self, study: str) -> Consent | None:
        path = self._file("consents", study)
        return _read(path, Consent, _newer_consent) if path.exists() else None

    def save_consent(self, consent: Consent) -> None:
        """Make it the one that counts; those before it are kept beside it."""
        folder = self._file("consents", consent.study).with_suffix("")
        durable.make_folder(folder)
        number = len(list(folder.glob("*.json"))) + 1
        name = f"{number:04}-{consent.state}-{consent.revision}-{consent.study_digest[:16]}.json"
        durable.write_file(folder / name, consent.kept_as())
        durable.write_file(self._file("consents", consent.study), consent.kept_as())

    def consent_history(self, study: str) -> list[Consent]:
        """Each approval and withdrawal of a study, oldest first."""
        folder = self._file("consents", study).with_suffix("")
        return [_read(path, Consent, _newer_consent) for path in sorted(folder.glob("*.json"))]

    def consent_histories(self) -> list[Consent]:
        """The same of every study."""
        return [one for consent in self.consents() for one in self.consent_history(consent.study)]

    def policy_text(self, sha256: str) -> bytes | None:
        """A policy that was in force, by its digest."""
        path = self.root / "policies" / f"{sha256}.toml"
        return path.read_bytes() if path.exists() else None

    def preview(self, study: str) -> Shown | None:
        """The account of ``study`` that was shown last."""
        path = self._file("previews", study)
        return _read(path, Shown) if path.exists() else None

    def save_preview(self, study: str, shown: Shown) -> None:
        durable.make_folder(self.root / "previews")
        durable.write_file(self._file("previews", study), canonical.dumps(asdict(shown)))

    def journal(self, study: str) -> Journal:
        path = self._file("journal", study)
        return _read(path, Journal, _newer_journal) if path.exists() else Journal(study)

    def save_journal(self, journal: Journal) -> None:
        durable.write_file(self._file("journal", journal.study), canonical.dumps(asdict(journal)))

    def _file(self, folder: str, study: str, ending: str = "json") -> Path:
        if not STUDY_NAME.fullmatch(study):
            raise UsageProblem(f"{study[:80]!r} is not a study's name: 1 to 64 of a-z, 0-9 and -")
        return self.root / folder / f"{study}.{ending}"


def study_state(offer: Offer, consent: Consent | None, journal: Journal) -> str:
    """Where this site stands in a study, in one word.

    offered, changed (since it was approved; it, or what is trained on), withdrawn, approved (waits), training, held
    (waits for a person), uploading, then the coordinator's: running, paused, finished, stopped, failed.
    """
    if consent is None:
        return "offered"
    if consent.state == WITHDRAWN:
        return WITHDRAWN
    if consent.study_digest != offer.digest:
        return "changed"
    mine = journal if journal.study_digest == offer.digest else Journal(offer.study)
    if mine.ended:
        return mine.ended
    if data_changed(consent, mine):
        return "changed"
    if mine.phase in ("downloading", "training", "trained") and not mine.declined:
        return "training"
    if mine.phase == "held" or (mine.phase == "uploading" and not mine.declined):
        return mine.phase
    return offer.state if offer.state in ("running", "paused") else APPROVED


def data_changed(consent: Consent, journal: Journal) -> bool:
    """Whether the last assignment was declined because what would be trained on is not what was approved, and nobody
    has approved since.
    """
    return journal.declined == DATA_CHANGED and consent.approved_at <= journal.declined_at


def exposed(exposure: str, apart: str = "") -> str:
    """Who has what is this site's own, by the study's exposure.

    Args:
        apart: what that is, as the trainer says; "" in consents of older versions.
    """
    if not exposure:
        return "the coordinator keeps nothing that is this site's alone"
    said = f"the coordinator keeps apart {apart or OWN_MODEL}"
    return f"{said}, and sends it to the other sites" if exposure == "sites" else said


def now_text() -> str:
    """RFC 3339, UTC, milliseconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _newer_consent(document: dict[str, Any]) -> dict[str, Any]:
    """A stored consent in today's form. One that names no rounds is for none: it must be given again."""
    return {
        "comes": document.get("leaves"),
        "exposure": "",
        "apart": "",
        "document": {},
        "attempts": 0,
        "account": {},
        "seen": {},
        "withdrawn_by": {},
        "withdrawn_at": "",
        **document,
    }


def _newer_journal(document: dict[str, Any]) -> dict[str, Any]:
    return {"declined": "", "declined_at": "", "consent": "", **document}


def _as_it_is(document: dict[str, Any]) -> dict[str, Any]:
    return document


@cache
def _adapters(kind: type[Any]) -> dict[str, TypeAdapter[Any]]:
    """What checks each field of a record by its type; its keys are the record's fields."""
    hints = get_type_hints(kind, include_extras=True)
    return {item.name: TypeAdapter(hints[item.name]) for item in fields(kind)}


def _read(path: Path, kind: type[Record], newer: Callable[[dict[str, Any]], dict[str, Any]] = _as_it_is) -> Record:
    """The record at ``path``.

    Raises:
        BadData: the file is damaged; it says which, and that nothing was changed.
        TryAgain: there is no file descriptor for it now.
    """
    try:
        document = newer(canonical.read(path.read_bytes()))
        adapters = _adapters(kind)  # type: ignore[arg-type]
        if set(document) != set(adapters):
            raise ValueError("fields")
        for name, adapter in adapters.items():
            adapter.validate_python(document[name], strict=True)
        return kind(**document)
    except (BadData, ValueError, TypeError, AttributeError, OSError) as error:  # pydantic's is a ValueError
        if descriptors.ran_out(error):
            raise TryAgain(f"{path} cannot be read now: no file descriptor is left") from None
        raise BadData(
            f"{path} is damaged or of another version: it does not hold the fields of {kind.__name__.lower()}",
            hint="restore it from a backup; the ledger and the models beside it are untouched",
        ) from None
