"""Who this site is, what isolates its trainer, and where it stands in each study: what `site-agent status` shows."""

import os
from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

from site_agent import handoff
from site_agent.gateway.consent.rows import StudyRow, study_rows
from site_agent.gateway.enrolment.identity import Identity
from site_agent.gateway.exit import evidence
from site_agent.gateway.service_requests import ServiceStatus
from site_agent.state.codec import STRICT
from site_agent.state.directory import SiteState
from site_agent.state.person import user_name
from site_agent.state.site import Site
from wardround.records.trainer import GetStatus, Status
from wardround.signing.certificates import Name
from wardround.signing.certificates import fingerprint as fingerprint_of
from wardround.signing.dsse import fingerprint, keyid

UNKNOWN = "unknown"  # of a trainer that does not answer


@dataclass(frozen=True)
class Users:
    """As which users the two processes run: whether these are two, and whether one is root."""

    gateway: str
    trainer: str
    separate: bool
    root: bool

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class DisputedUpload:
    """A receipt that cannot stand in the ledger, and the upload that it answers.

    Attributes:
        file: what came, in ``ledger/evidence``.
        left_out: how many more about that upload were counted and not kept.
    """

    at: str
    study: str
    round: str
    upload_id: str
    why: str
    file: str
    left_out: int

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class SiteStatus:
    """What `site-agent status --json` prints.

    Attributes:
        coordinator: its address.
        running: whether the service runs; ``connected`` whether it reaches the coordinator.
        certificate_fork_since: since when the coordinator sees two holders of this site's keys.
        trainer_problem: why the trainer does not answer now; None while it does. What it would say of itself is then
            "unknown".
        isolation_missing: the measures that are not in force, by their names in ``trainer.isolation``.
    """

    site: str
    federation: str
    coordinator: str
    authority_fingerprint: str
    ledger_key: str
    receipt_key: str
    certificate_expires: str
    running: bool
    connected: bool
    certificate_fork_since: str | None
    trainer_problem: str | None
    isolation: str
    isolation_missing: tuple[str, ...]
    device: str
    users: Users
    studies: tuple[StudyRow, ...]
    disputed: tuple[DisputedUpload, ...]

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


def site_status(here: SiteState, site: Site, service: ServiceStatus | None) -> SiteStatus:
    """The status of a site. ``service`` is what the running service answers, None where none runs."""
    trainer = _trainer(here, service)
    problem = "" if trainer is not None else (service.trainer_problem if service is not None else "")
    gateway_uid = service.uid if service is not None else os.geteuid()
    own = Identity(here.identity)
    return SiteStatus(
        site=site.site, federation=site.federation, coordinator=site.address,
        authority_fingerprint=fingerprint_of(own.roots()[0]), ledger_key=keyid(own.ledger_key().public_key()),
        receipt_key=fingerprint(bytes.fromhex(site.receipt_key)),
        certificate_expires=own.certificate().not_valid_after_utc.isoformat().replace("+00:00", "Z"),
        running=service is not None, connected=service is not None and service.connected,
        certificate_fork_since=(service.certificate_fork_since if service is not None else "") or None,
        trainer_problem=None if trainer is not None else problem or "it is stopped, hangs, or has ended",
        isolation=trainer.isolation if trainer is not None else UNKNOWN,
        isolation_missing=tuple(trainer.missing) if trainer is not None else (),
        device=trainer.device if trainer is not None else UNKNOWN, users=_users(gateway_uid, trainer),
        studies=tuple(study_rows(here, Name(site.federation, "coordinator").uri, ask_trainer=trainer is not None)),
        disputed=_disputed(here),
    )  # fmt: skip


def _trainer(here: SiteState, service: ServiceStatus | None) -> Status | None:
    """What the trainer says of itself, at once; None where it should be there and does not answer."""
    listener = handoff.Trainer(here.root)
    if service is None and not listener.available():
        return handoff.one_shot(here.root, GetStatus())
    return listener.status()


def _users(gateway_uid: int, trainer: Status | None) -> Users:
    if trainer is None:
        return Users(user_name(gateway_uid), UNKNOWN, separate=False, root=gateway_uid == 0)
    return Users(
        user_name(gateway_uid), trainer.user, separate=gateway_uid != trainer.uid, root=0 in (gateway_uid, trainer.uid)
    )


def _disputed(here: SiteState) -> tuple[DisputedUpload, ...]:
    return tuple(
        DisputedUpload(
            at=kept.at, study=kept.study, round=kept.round, upload_id=kept.upload_id, why=kept.why, file=kept.file,
            left_out=kept.left_out,
        )
        for kept in evidence.read(here.ledger)
    )  # fmt: skip
