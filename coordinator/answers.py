"""What the coordinator answers its commands, one record for each answer, and how it stands on the control socket.

``document()`` is also what ``--json`` prints. Light enough for a command's start: no gRPC, no database, no numpy.
"""

from collections.abc import Mapping
from typing import Self

from pydantic import JsonValue, ValidationError

from wardround.errors import Unavailable
from wardround.records.schema import Strict


class Answer(Strict):
    """What all answers have in common."""

    def document(self) -> dict[str, JsonValue]:
        """Plain JSON; ``from_document`` reads it."""
        return self.model_dump(mode="json")

    @classmethod
    def from_document(cls, document: object) -> Self:
        """What ``document()`` gave. Raises Unavailable: it is no such answer, the service is of another version."""
        try:
            return cls.model_validate(document)
        except ValidationError:
            raise Unavailable(
                "the running service gave an answer that this command does not know",
                hint="the service and the command are of different versions: restart the service",
            ) from None


class InvitationMade(Answer):
    """A new invitation, as the line that the site uses.

    Attributes:
        expires: until when it can be used (UTC).
        replaces: the site is enrolled; using the invitation replaces its identity.
    """

    invitation: str
    expires: str
    replaces: bool


class SiteRow(Answer):
    """One site in the list of sites.

    Attributes:
        state: invited, enrolled (and not connected), connected, ready (approved a study that goes on) or revoked.
        certificate_expires: when its newest certificate does (UTC).
        last_seen: when it last connected or disconnected (UTC).
        certificate_fork_since: since when two machines hold its keys (UTC).
        copied_since: since when two programs with its identity were connected in turn (UTC).
        ledger_key: SHA-256 fingerprint of the key that signs its ledger.
    """

    site: str
    state: str
    certificate_expires: str | None = None
    last_seen: str | None = None
    certificate_fork_since: str | None = None
    copied_since: str | None = None
    ledger_key: str | None = None


class SiteList(Answer):
    """Every site. ``receipt_key`` is the fingerprint of the key that signs receipts."""

    sites: tuple[SiteRow, ...]
    receipt_key: str


class Revoked(Answer):
    """A site that is refused from now on. ``was_enrolled``: until now it had valid certificates."""

    site: str
    was_enrolled: bool


class StudyCreated(Answer):
    """A study that its sites are offered. ``new``: False where it was known with exactly this content.

    Attributes:
        bytes_per_round: of the largest update.
        not_enrolled: its sites that have not enrolled, or were revoked.
    """

    id: str
    revision: int
    study_digest: str
    initial_digest: str
    bytes_per_round: int
    new: bool
    not_enrolled: tuple[str, ...]


class StudyRow(Answer):
    """A study in the list of studies.

    Attributes:
        round: of its newest model. archived: no site is told of it.
        sites: how many it lists. approved: how many of these approved this revision and did not withdraw.
        why: why it paused, "" otherwise.
    """

    id: str
    revision: int
    state: str
    round: int
    rounds: int
    archived: bool
    title: str = ""
    sites: int = 0
    approved: int = 0
    why: str = ""


class StudyList(Answer):
    """The studies of a coordinator, by their names."""

    studies: tuple[StudyRow, ...]


class Changed(Answer):
    """Something is not as it was: a study, or who is connected. ``times``: how often since the watch began."""

    times: int


class StudyRenewed(Answer):
    """A new revision of a study. ``model``: the round of the old one that it begins from, 0 for its first model."""

    id: str
    revision: int
    study_digest: str
    model: int
    rounds: int


class StudyEdited(StudyRenewed):
    """A new revision of a study with other settings.

    Attributes:
        changes: the settings that are others, as ``study.rounds: 20 -> 30``.
        approve_again: the sites that had approved the revision before. approve_first: the others.
        gone: the sites that are not in it any more.
        started: it waits for its sites, for the one before was waiting or running.
    """

    changes: tuple[str, ...]
    approve_again: tuple[str, ...]
    approve_first: tuple[str, ...]
    gone: tuple[str, ...]
    started: bool


class SnapshotMade(Answer):
    """A folder in the state directory with all that a backup is made of beside keys and settings.

    Attributes:
        made_s: Unix time of the copy.
        models: their digests. uploads: each accepted update's id, and its manifest's digest.
    """

    folder: str
    made_s: int
    federation: str
    models: tuple[str, ...]
    uploads: Mapping[str, str]
