"""Looks at everything, in the order in which a site needs it. Each look is a module's; nothing is judged here."""

import datetime
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from site_agent import handoff
from site_agent.doctor import network, place, studies, trainer
from site_agent.gateway.consent.rows import study_rows
from site_agent.gateway.enrolment.identity import Identity
from site_agent.gateway.exit import evidence
from site_agent.gateway.service_requests import ServiceStatus
from site_agent.state.consent import APPROVED
from site_agent.state.directory import SiteState
from site_agent.state.site import Site
from site_agent.trainer.data import sources
from wardround import checkup
from wardround.checkup import Finding, of_error, ok, problem
from wardround.errors import WardroundError
from wardround.records.trainer import FilesStat, GetStatus, StatFiles, Status
from wardround.signing.certificates import Name

INSTALLED = ("wardround", "grpcio", "protobuf", "cryptography", "torch")
ROUNDS_KEPT = 4  # copies of an update on the disk: made, handed over, sent, and a model that comes


def examine(
    here: SiteState,
    site: Site,
    service: ServiceStatus | None,
    refresh: Callable[[], object],
    environment: Mapping[str, str] = os.environ,
) -> Iterator[Finding]:
    """A finding for each thing, as it is looked at.

    Args:
        service: what the running service says of itself; None where none runs.
        refresh: makes a call to the coordinator, by the service if one runs.
    """
    now, uid = datetime.datetime.now(datetime.UTC), os.geteuid()
    yield checkup.versions(INSTALLED)
    yield from place.folders(here, uid)
    yield from place.keys(here.identity, uid)
    yield place.service(here) if service is None else ok("service", "runs")
    yield from _machine(here, environment, now)
    try:
        own = Identity(here.identity)
    except WardroundError:
        return  # `place.keys` has said why
    yield from network.certificate(own, now)
    lines, is_open = network.way(site.address, own, environment)
    yield from lines
    if is_open:
        yield network.call(refresh)
    if service is not None and service.certificate_fork_since:
        yield problem(
            "identity",
            f"somebody else holds this site's keys, or this machine was copied: since {service.certificate_fork_since}",
            "if nobody here knows of a copy, tell the coordinator's operator; then join again with a new invitation",
        )
    yield from _disputed(here)
    yield from _trainer(here, service, environment)
    yield studies.in_force(here.policy, here.ledger)
    coordinator = Name(site.federation, "coordinator").uri
    yield from studies.studies(study_rows(here, coordinator))


def _machine(here: SiteState, environment: Mapping[str, str], now: datetime.datetime) -> Iterator[Finding]:
    largest = _largest(here)
    yield checkup.disk(here.root, checkup.room_at(here.root), ROUNDS_KEPT * largest)
    yield checkup.temporary()
    yield checkup.clock(now, place.last_line(here.ledger), checkup.is_synchronized())
    free = shutil.disk_usage(trainer.SHM).free if os.access(trainer.SHM, os.W_OK) else None
    workers = environment.get("WARDROUND_WORKERS", "")
    yield trainer.shared_memory(free, int(workers) if workers.isdecimal() else 0)
    if (available := trainer.available_memory()) is not None:
        yield trainer.memory(available, largest)


def _largest(here: SiteState) -> int:
    """Bytes of the largest model that is approved here."""
    approved = {consent.study for consent in here.consents() if consent.state == APPROVED}
    sizes = [sum(spec.bytes for spec in offer.upload) for offer in here.offers() if offer.study in approved]
    return max(sizes, default=0)


def _disputed(here: SiteState) -> Iterator[Finding]:
    for kept in evidence.read(here.ledger):
        yield problem(
            "receipts",
            f"the coordinator's receipt for round {kept.round} of {kept.study} cannot be believed: {kept.why}",
            f"show ledger/evidence/{kept.file} to the coordinator's operator",
        )


def _trainer(here: SiteState, service: ServiceStatus | None, environment: Mapping[str, str]) -> Iterator[Finding]:
    listener = handoff.Trainer(here.root)
    listens = listener.available()
    if not listens and find_spec("torch") is None:
        yield problem("trainer", "torch is not installed here, and no trainer runs", "`pip install 'wardround[site]'`")
        return
    status, why = _status(here, listener, listens, service)
    yield from trainer.answers(status, why)
    if status is None:
        return
    gateway_uid = service.uid if service is not None else os.geteuid()
    named = {"state": here.root, "staging": here.staging, "studies": here.root / "studies"}
    places = {name: place.place_of(path) for name, path in (*named.items(), ("data.toml", here.root / "data.toml"))}
    yield from place.users(gateway_uid, status.uid, place.groups_of(status.uid), places)
    yield trainer.gpu(environment.get("WARDROUND_DEVICE", ""), status.device, trainer.cards())
    try:
        names = list(sources.sources(here.root))
    except WardroundError as error:
        yield of_error("data", error)
        return
    yield from trainer.data(names, partial(_stat, here.root), listens=listens)


def _stat(root: Path, name: str) -> FilesStat:
    return handoff.ask(root, StatFiles(data=name))


def _status(
    here: SiteState, listener: handoff.Trainer, listens: bool, service: ServiceStatus | None
) -> tuple[Status | None, str]:
    """What the trainer says of itself, or why it does not."""
    try:
        if listens or service is not None:
            return listener.status(), service.trainer_problem if service is not None else ""
        return handoff.one_shot(here.root, GetStatus()), ""
    except WardroundError as error:
        return None, error.message
