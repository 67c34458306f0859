"""A site's state directory: where things are, and the small JSON files in it.

    identity/            key.pem  certificate.pem  authority.pem  ledger_key.pem  site.json
    offers/STUDY.json    what the coordinator offers, checked before it is kept
    previews/STUDY.json  the account of it that a person was shown last
    consents/STUDY.json  what a person approved or withdrew last; consents/STUDY/ has each time, for good
    policy.toml          what may leave, written by a person; policies/SHA256.toml has each that was in force
    journal/STUDY.json   how far the current round is; STUDY.now, while it counts, says how far it is since then
    peers.json           the other hospitals whose ledger keys people here have compared
    receipts.jsonl       the coordinator's copy of this site's receipts, when it was asked for
    outgoing/STUDY.safetensors   the gateway's own copy of an update: what is measured, recorded and sent
    outgoing/STUDY.masked.safetensors   with secure aggregation, the same with masks: this one leaves
    secure/              of secure aggregation: secrets of the attempts under way, and the models that a sum is checked
                         with; in no backup
    sums/STUDY.REVISION.ROUND/  what a round's sum was checked with
    commitments/UPLOAD.json   the salt of a masked upload's commitment, and what it commits to
    incoming/            models that are being downloaded
    staging/             the one folder that the trainer's user writes too
    page/users.json      who may log in to the hospital's page; salted hashes
    format.json          which version wrote all this; see ``site_agent.state.formats``
    ledger/  studies/  data.toml  control.sock

Nothing here needs the network, torch or cryptography, so the commands stay quick.
"""

import datetime
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from site_agent.state import codec, formats
from site_agent.state.consent import APPROVED, WITHDRAWN, Consent, Endorsement, Shown, data_changed, exposed
from site_agent.state.journal import Journal, step_after, taken_after
from site_agent.state.offer import Offer
from site_agent.state.person import Person
from site_agent.state.progress import study_state
from site_agent.state.site import Site
from site_agent.state.tensors import tensor_rows
from wardround.errors import NeedsPerson, UsageProblem
from wardround.local import directory, durable
from wardround.local.directory import quoted
from wardround.records.study import STUDY_NAME
from wardround.signing import canonical

__all__ = [  # what other packages import from here
    "APPROVED", "COUNTS", "SHARED_MODE", "WITHDRAWN", "Consent", "Journal", "Offer", "Shown", "Site", "SiteState",
    "data_changed", "exposed", "now_text", "study_state", "tensor_rows",
]  # fmt: skip

GATEWAY_FOLDERS = (
    "identity", "offers", "previews", "consents", "endorsements", "policies", "journal", "ledger", "staging",
    "incoming", "outgoing", "secure", "commitments", "sums",
)  # fmt: skip
COUNTS = 2  # numbers that go with each update beside its metrics: how many rows trained, how many validated
SHARED_MODE = 0o640  # a file in staging: the trainer's user reads it through the group


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

    def masked_copy(self, study: str) -> Path:
        """Where the gateway keeps that update with its masks, which leaves in its place."""
        return self._file("outgoing", study, "masked.safetensors")

    def remove_copies(self, study: str) -> None:
        """What has left, or will not, lies in ``outgoing`` no longer."""
        for copy in (self.own_copy(study), self.masked_copy(study)):
            durable.remove(copy, lasting=False)

    @property
    def peers(self) -> Path:
        return self.root / "peers.json"

    @property
    def secure(self) -> Path:
        """The secrets of secure aggregation."""
        return self.root / "secure"

    @property
    def sums(self) -> Path:
        """What sums were checked with."""
        return self.root / "sums"

    def save_commitment(self, upload_id: str, document: object) -> None:
        """Keep what a masked upload's commitment is made of, with its salt."""
        durable.make_folder(self.root / "commitments")
        durable.write_file(self.root / "commitments" / f"{upload_id}.json", canonical.dumps(document))

    def make_folders(self) -> None:
        """Make what the gateway owns. Folders that an administrator made keep their owner and mode."""
        for name in GATEWAY_FOLDERS:
            durable.make_folder(self.root / name)

    def joined(self) -> bool:
        """Whether a site is here. Raises NeedsPerson: this user may not look, or it is no place for a site."""
        directory.refuse_other(self.root, "site-agent")
        return directory.exists(self.site_file)

    def require_joined(self) -> None:
        """Raises NeedsPerson: no site is here."""
        if not self.joined():
            raise self.not_joined()

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
        """Raises NeedsPerson: this directory belongs to no site yet, to one that left, or to a newer version."""
        self.require_joined()
        formats.refuse_newer(self.root)
        site = codec.read(self.site_file, Site)
        if self.left_file.exists():
            raise NeedsPerson(
                f"site `{site.site}` in {self.root} left federation `{site.federation}`: nothing more is sent",
                hint="what it holds stays readable (`site-agent audit show`); to take part again, `site-agent join` "
                "with another --state and a new invitation",
            )
        return site

    def save_site(self, site: Site) -> None:
        durable.write_file(self.site_file, codec.to_bytes(site))

    def save_left(self, person: Person) -> None:
        """From now on this directory is an archive."""
        durable.write_file(self.left_file, canonical.dumps({"at": now_text(), "by": person.document()}))

    def offers(self) -> list[Offer]:
        return [codec.read(path, Offer) for path in sorted((self.root / "offers").glob("*.json"))]

    def offer(self, study: str) -> Offer:
        """Raises UsageProblem: the coordinator has offered no such study."""
        path = self._file("offers", study)
        if not path.exists():
            known = ", ".join(offer.study for offer in self.offers()) or "none yet"
            raise UsageProblem(f"no study `{study}` has been offered to this site", hint=f"offered: {known}")
        return codec.read(path, Offer)

    def known_offer(self, study: str) -> Offer | None:
        """The offer as it is kept, if there is one."""
        path = self._file("offers", study)
        return codec.read(path, Offer) if path.exists() else None

    def save_offer(self, offer: Offer) -> None:
        durable.write_file(self._file("offers", offer.study), offer.to_bytes())

    def drop_offer(self, study: str) -> None:
        durable.remove(self._file("offers", study))
        durable.remove(self._file("previews", study))

    def offer_sizes(self) -> dict[str, int]:
        """How many bytes each offer takes, oldest first."""
        paths = [(path.stat().st_mtime_ns, path) for path in (self.root / "offers").glob("*.json")]
        return {path.stem: path.stat().st_size for _, path in sorted(paths)}

    def consents(self) -> list[Consent]:
        return [codec.read(path, Consent) for path in sorted((self.root / "consents").glob("*.json"))]

    def consent(self, study: str) -> Consent | None:
        path = self._file("consents", study)
        return codec.read(path, Consent) if path.exists() else None

    def endorsement(self, study: str) -> Endorsement | None:
        """What of a study some people approved who are not enough yet."""
        path = self._file("endorsements", study)
        return codec.read(path, Endorsement) if path.exists() else None

    def save_endorsement(self, study: str, endorsement: Endorsement) -> None:
        durable.make_folder(self.root / "endorsements")
        durable.write_file(self._file("endorsements", study), codec.to_bytes(endorsement))

    def remove_endorsement(self, study: str) -> None:
        durable.remove(self._file("endorsements", study))

    def save_consent(self, consent: Consent) -> None:
        """Make it the one that counts; those before it are kept beside it, and no endorsement is open any more."""
        folder = self._file("consents", consent.study).with_suffix("")
        durable.make_folder(folder)
        number = len(list(folder.glob("*.json"))) + 1
        name = f"{number:04}-{consent.state}-{consent.revision}-{consent.study_digest[:16]}.json"
        durable.write_file(folder / name, consent.to_bytes())
        durable.write_file(self._file("consents", consent.study), consent.to_bytes())
        self.remove_endorsement(consent.study)

    def consent_history(self, study: str) -> list[Consent]:
        """Each approval and withdrawal of a study, oldest first."""
        folder = self._file("consents", study).with_suffix("")
        return [codec.read(path, Consent) for path in sorted(folder.glob("*.json"))]

    def consent_histories(self) -> list[Consent]:
        """The same of every study."""
        return [act for consent in self.consents() for act in self.consent_history(consent.study)]

    def policy_text(self, sha256: str) -> bytes | None:
        """A policy that was in force, by its digest."""
        path = self.root / "policies" / f"{sha256}.toml"
        return path.read_bytes() if path.exists() else None

    def preview(self, study: str) -> Shown | None:
        """The account of ``study`` that was shown last."""
        path = self._file("previews", study)
        return codec.read(path, Shown) if path.exists() else None

    def save_preview(self, study: str, shown: Shown) -> None:
        durable.make_folder(self.root / "previews")
        durable.write_file(self._file("previews", study), codec.to_bytes(shown))

    def journal(self, study: str) -> Journal:
        path, since = self._file("journal", study), self._file("journal", study, "now")
        for _ in range(2):  # a step that is just being written over another is whole at the second look
            now = codec.content(since, Journal) if since.exists() else b""  # first: a kept one that is newer counts
            kept = codec.content(path, Journal) if path.exists() else None
            if step := taken_after(kept or b"", now):
                return codec.parsed(since, Journal, step)
            if not now.strip():
                break
        return codec.parsed(path, Journal, kept) if kept is not None else Journal(study)

    def save_journal(self, journal: Journal, lasting: durable.Lasting = "all") -> None:
        """Write it down.

        With "content", after a loss of power it may be the one before. With "nothing" it lasts as long as the power:
        after a loss of that it is the last one that was to last longer.
        """
        path, since = self._file("journal", journal.study), self._file("journal", journal.study, "now")
        data = codec.to_bytes(journal)
        if lasting == "nothing":
            kept = path.read_bytes() if path.exists() else b""
            _write_over(since, step_after(kept, data))
        else:
            durable.write_file(path, data, lasting=lasting)
            if since.exists():
                _write_over(since, b"")

    def _file(self, folder: str, study: str, ending: str = "json") -> Path:
        return _file_of(self.root, folder, study, ending)


@lru_cache(maxsize=64)  # a round asks for some twenty, again and again the same ones
def _file_of(root: Path, folder: str, study: str, ending: str) -> Path:
    if not STUDY_NAME.fullmatch(study):
        raise UsageProblem(f"{study[:80]!r} is not a study's name: 1 to 64 of a-z, 0-9 and -")
    return root / folder / f"{study}.{ending}"


def _write_over(path: Path, step: bytes) -> None:
    """Write a step where the one before it stands, without a file of its own; what is longer there is blank then."""
    with durable.SpoolFile(path, lasting=False) as file:
        file.write_at(0, step.ljust(file.size(), b"\n"))


def now_text() -> str:
    """RFC 3339, UTC, milliseconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
