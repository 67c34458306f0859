"""Hospitals in one process with real ledgers, policies and state directories, and a coordinator that a test leads.

Of a site everything is the program's own from the assignment to what is handed to the connection; the connection is a
call of a function here. ``restart`` makes a site anew from its disk.
"""

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from site_agent import audit
from site_agent.gateway.connection.interrupt import Interrupt
from site_agent.gateway.connection.meter import Meter
from site_agent.gateway.enrolment.rollover import roll_over
from site_agent.gateway.exit import egress
from site_agent.gateway.exit.enforcement import PolicyEnforcement
from site_agent.gateway.exit.ledger import Ledger
from site_agent.gateway.peers import KnownPeers
from site_agent.gateway.policy import text as policy_text
from site_agent.gateway.policy.decisions import StudyRequest
from site_agent.gateway.secure.checks import SumChecks
from site_agent.gateway.secure.exchange import SecureRounds
from site_agent.state.consent import Consent, Shown, TrainedData
from site_agent.state.directory import SiteState
from site_agent.state.journal import Journal
from site_agent.state.offer import Offer
from site_agent.state.person import Person
from site_agent.state.site import Site
from tests.secure_world import key_of, public
from wardround.errors import TryAgain, WardroundError
from wardround.local import durable
from wardround.records import secure_messages as messages
from wardround.records import secure_round
from wardround.records.assignment import TRAIN, Assignment, ModelRef
from wardround.records.ledger.entries import IdentityEntry
from wardround.records.secure_messages import AttemptRef, SecureShown, SecureTold, Told
from wardround.records.secure_messages import Shown as ShownKind
from wardround.records.study import StudyFile, study_digest
from wardround.records.trainer import FilesStatus
from wardround.secure import coordinator
from wardround.secure.layout import ELEMENTS, digests
from wardround.secure.statements import Context
from wardround.secure.sums import Summing, Unmasking, model_values
from wardround.tensors.files import TensorFile, file_header
from wardround.tensors.manifests import Manifest, TensorSpec

STUDY, FEDERATION = "hearts", "test"
SPECS = (TensorSpec("shared.weight", "F32", (3, 4)), TensorSpec("shared.bias", "F32", (3,)))
DPO = Person("dpo", 1000)
METRICS = {"val_loss": "0.6931"}


def study_of(sites: tuple[str, ...], **section: Any) -> StudyFile:
    roster = {site: public(site).hex() for site in sites}
    return StudyFile.from_document({
        "study": {"name": STUDY, "sites": list(sites), "rounds": 5}, "task": {"name": "tabular"},
        "model": {"name": "mlp"}, "algorithm": {"name": "fedavg"}, "training": {"local_steps": 1},
        "reported": {"metrics": ["val_loss"], "ranges": {"val_loss": [0, 100]}, "counts": "uniform"},
        "secure_aggregation": {"largest_weight": 1, "roster": roster, **section},
    })  # fmt: skip


def write_model(path: Path, seed: int, scale: float = 0.1) -> Manifest:
    """A model, or an update, of ``SPECS``."""
    chance = np.random.default_rng(seed)
    values = [chance.uniform(-scale, scale, spec.shape).astype("<f4").tobytes() for spec in SPECS]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file_header(SPECS) + b"".join(values))
    with TensorFile(path) as file:
        return file.manifest()


class FakeSession:
    """In place of the connection. ``meter`` counts nothing."""

    times_connected = 0

    def __init__(self, world: "SecureSites", site: str) -> None:
        self.meter, self._world, self._site = Meter(), world, site

    @contextmanager
    def use(self) -> Iterator["FakeSession"]:
        yield self

    def tell(self, told: SecureTold) -> None:
        self._world.told(self._site, told)

    def evidence(self, study: str, revision: int, round_: int) -> messages.SumEvidence:
        return self._world.evidence

    def blocks(self, wanted: messages.BlocksWanted) -> Iterator[messages.BlockDigests | messages.VectorBlock]:
        blocks = self._world.vectors[wanted.site]
        yield messages.BlockDigests(self._world.digests[wanted.site])
        for index in wanted.blocks:
            yield messages.VectorBlock(index, blocks[index])

    def pause(self, seconds: float, times_connected: int, interrupt: Interrupt) -> None:
        raise TryAgain("no waiting in a test")


@dataclass
class Hospital:
    """One site, from its disk."""

    world: "SecureSites"
    name: str
    folder: Path

    def __post_init__(self) -> None:
        self.state = SiteState(self.folder)
        self.state.make_folders()
        self.session: Any = FakeSession(self.world, self.name)
        self.site = Site(self.name, FEDERATION, "127.0.0.1:1", "ab" * 32, "ab" * 32, 3600)
        self.ledger = Ledger(self.state.ledger, key_of(self.name))
        self.rounds = SecureRounds(self.state, self.site, key_of(self.name), self.session, self.ledger)
        self.sums = SumChecks(self.session, self.ledger, self.rounds.attempts, self.state.sums)
        self.peers = KnownPeers(self.state, self.site, self.ledger)
        self.policy = PolicyEnforcement.of(self.state, self.site, self.ledger)
        self.declined: list[str] = []

    def set_up(self) -> None:
        """Approved, with every peer known."""
        world = self.world
        self.ledger.begin()
        self.ledger.append(IdentityEntry(event="issued", site=self.name, federation=FEDERATION, receipt_key="ab" * 32))
        request = StudyRequest(
            STUDY, f"spiffe://{FEDERATION}/coordinator", SPECS, ("val_loss",), 4, "uniform", 100, 5, secure=True
        )
        self.state.policy.write_text(policy_text.draft(request, self.name))
        self.approve()
        for other in world.sites:
            if other != self.name:
                self.peers.know(other, world.roster.fingerprint(other), DPO)

    def approve(self) -> None:
        """The study as its coordinator has it now."""
        world = self.world
        self.state.save_offer(Offer(STUDY, 1, world.digest, "running", world.file.document(), world.initial))
        account = Shown("ab" * 32, world.digest, 1, "2026-01-01T00:00:00.000Z", {})
        self.state.save_consent(world.consent(account))

    def begin(self, round_: int, attempt: int = 1, base: str = "") -> None:
        self.rounds.begin(self.assignment(round_, attempt, base), self.world.consent_of(self))

    def assignment(self, round_: int, attempt: int = 1, base: str = "") -> Assignment:
        world = self.world
        return Assignment(
            STUDY, 1, world.digest, round_, attempt, TRAIN, base=ModelRef(round_ - 1, base or world.models[-1])
        )

    def journal(self, round_: int, attempt: int = 1) -> Journal:
        return Journal(
            STUDY, 1, self.world.digest, round_, attempt, TRAIN, phase="trained", update="u", num_examples=1,
            num_validation=1, metrics=dict(METRICS),
        )  # fmt: skip

    def upload(self, round_: int, attempt: int = 1, seed: int | None = None) -> egress.PendingUpload:
        """Train, mask and record: what would be sent."""
        own = self.state.own_copy(STUDY)
        write_model(own, self.world.sites.index(self.name) + 100 * round_ if seed is None else seed)
        journal, consent = self.journal(round_, attempt), self.world.consent_of(self)
        masking = self.rounds.masking(journal, consent, Interrupt())
        upload = egress.record(self.ledger, self.policy, self.session.meter, journal, consent, own, masking=masking)
        assert upload is not None
        return upload

    def answer(self, shown: SecureShown | None = None) -> None:
        """Answer what is due, as the thread does."""
        if shown is not None:
            self.rounds.shown(shown)
        self.rounds.close()
        self.rounds.answer(Interrupt(), self._decline)

    def _decline(self, ref: AttemptRef, error: WardroundError) -> None:
        self.declined.append(error.message)

    def restart(self) -> "Hospital":
        """The same site, from what is on its disk."""
        self.ledger.close()
        return Hospital(self.world, self.name, self.folder)

    def roll_over(self) -> "Hospital":
        """`audit rollover`, and the same site after it."""
        self.ledger.close()
        pem = key_of(self.name).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        durable.make_folder(self.state.identity)
        durable.write_file(self.state.identity / "ledger_key.pem", pem)
        self.state.save_site(self.site)
        roll_over(self.state)
        return Hospital(self.world, self.name, self.folder)

    def lines(self, kind: str) -> list[dict[str, Any]]:
        return [line.document() for line in audit.lines(self.state.ledger) if line.type == kind]


@dataclass
class SecureSites:
    """``sites`` and their coordinator, which keeps what they tell."""

    folder: Path
    sites: tuple[str, ...] = ("amsterdam", "bergen", "charite")
    section: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.file = study_of(self.sites, **self.section)
        self.initial = write_model(self.folder / "model-0.safetensors", 0)
        self.digest = study_digest(self.file.document(), self.initial.digest())
        self.roster = secure_round.roster_of(self.file)
        self.layout = secure_round.layout_of(self.file, SPECS)
        self.models: list[str] = [self.initial.digest()]
        self.vectors: dict[str, list[bytes]] = {}
        self.digests: dict[str, tuple[str, ...]] = {}
        self.inbox: queue.SimpleQueue[tuple[str, SecureTold]] = queue.SimpleQueue()
        self.restarts = False
        self.hospitals = {site: Hospital(self, site, self.folder / site) for site in self.sites}
        for hospital in self.hospitals.values():
            hospital.set_up()

    def revise(self, rounds: int) -> None:
        """Another revision of the study, from the same first model, which every site has approved."""
        study = self.file.study.model_copy(update={"rounds": rounds})
        self.file = self.file.model_copy(update={"study": study})
        self.digest = study_digest(self.file.document(), self.initial.digest())
        self.models = self.models[:1]
        for hospital in self.hospitals.values():
            hospital.approve()

    def close(self) -> None:
        for hospital in self.hospitals.values():
            hospital.ledger.close()

    def consent(self, account: Shown) -> Consent:
        fields: dict[str, Any] = {
            "study": STUDY, "revision": 1, "study_digest": self.digest, "metrics": ("val_loss",), "counts": "uniform",
            "data": TrainedData("patients", "ab" * 32), "rows": 100, "validation_rows": 20, "approved_by": DPO,
            "approved_at": "2026-01-01T00:00:00.000Z", "state": "approved", "exposure": "", "attempts": 8,
            "document": self.file.document(), "account": account, "averages": True, "upload": SPECS, "private": (),
            "download": SPECS, "personalized": "", "files": FilesStatus(data="ab" * 32, weights=""),
        }  # fmt: skip
        return Consent(**fields)

    def consent_of(self, hospital: Hospital) -> Consent:
        consent = hospital.state.consent(STUDY)
        assert consent is not None
        return consent

    # the coordinator

    def told(self, site: str, told: SecureTold) -> None:
        statement = told.statement if told.shares is None else told.shares
        step = {
            Told.KEYS: coordinator.keys, Told.SHARES: coordinator.shares, Told.AGREEMENT: coordinator.agreement,
            Told.OPENING: coordinator.opening,
        }[told.kind]  # fmt: skip
        self.attempt = step(self.attempt, site, statement)  # type: ignore[arg-type]

    def open(self, round_: int, attempt: int = 1, sites: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Begin an attempt, up to the vectors of ``sites``. They are who has joined."""
        sites = sites or self.sites
        rules = secure_round.rules_of(self.file)
        context = Context(
            FEDERATION, self.digest, self.roster.digest, round_, attempt, self.models[-1], self.layout.digest
        )
        self.ref = AttemptRef(STUDY, 1, self.digest, round_, attempt)
        self.attempt = coordinator.Attempt(context, self.roster, rules)
        for site in sites:
            self.at(site).begin(round_, attempt)
            self.show(site)
        self.attempt = coordinator.close_keys(self.attempt)
        for site in sites:
            self.show(site, SecureShown(self.ref, ShownKind.KEYS, self.attempt.shown_keys()))
        self.attempt = coordinator.close_shares(self.attempt)
        for site in sites:
            self.show(site, SecureShown(self.ref, ShownKind.SHARES, shares=self.attempt.shares_for(site)))
        return sites

    def at(self, site: str) -> Hospital:
        """The site; made anew from its disk each time, where ``restarts`` is set."""
        if self.restarts:
            self.hospitals[site] = self.hospitals[site].restart()
        return self.hospitals[site]

    def show(self, site: str, shown: SecureShown | None = None) -> None:
        hospital = self.hospitals[site] if shown is None else self.at(site)
        hospital.answer(shown)

    def upload(self, round_: int, sites: tuple[str, ...], attempt: int = 1) -> None:
        for site in sites:
            upload = self.at(site).upload(round_, attempt)
            self.take(site, upload)

    def take(self, site: str, upload: egress.PendingUpload) -> None:
        """What a coordinator keeps of a masked update that was sent to it."""
        assert upload.file is not None
        assert upload.header.submission is not None
        with TensorFile(upload.file) as file:
            payload = b"".join(data for _, data in file.chunks())
            assert file.manifest() == upload.header.manifest
        size = 4 * self.layout.elements
        starts = range(0, size, 4 * ELEMENTS)
        self.vectors[site] = [payload[at : min(at + 4 * ELEMENTS, size)] for at in starts] + [payload[size:]]
        self.digests[site] = digests(self.vectors[site]).digests
        self.attempt = coordinator.submission(self.attempt, site, upload.header.submission)

    def agree(self, sites: tuple[str, ...]) -> None:
        self.attempt = coordinator.choose(self.attempt)
        for site in sites:
            self.show(site, SecureShown(self.ref, ShownKind.SET, self.attempt.shown_set()))

    def unmask(self, sites: tuple[str, ...]) -> None:
        """Everything opened, and the next model made."""
        for site in sites:
            self.show(site, SecureShown(self.ref, ShownKind.AGREEMENTS, self.attempt.shown_agreements()))
        opened, wrong = coordinator.unmasking(self.attempt)
        assert not wrong
        chosen = self.attempt.chosen
        summing = Summing(self.layout, Unmasking.of(opened, self.attempt.members, chosen))
        vectors, blocks = [self.vectors[site] for site in chosen], range(self.layout.blocks)
        self.total = np.concatenate([summing.tensors(index, [one[index] for one in vectors]) for index in blocks])
        self.numbers = summing.numbers([self.vectors[site][-1] for site in chosen])
        with TensorFile(self.model_file(len(self.models) - 1)) as base:
            flat = np.concatenate([base.block(spec.key, 0, spec.bytes // 4) for spec in SPECS])
        values = model_values(self.layout, self.total, self.numbers.weight, flat)
        path = self.model_file(len(self.models))
        path.write_bytes(file_header(SPECS) + values.astype("<f4").tobytes())
        with TensorFile(path) as file:
            self.models.append(file.manifest().digest())
        self.evidence = messages.SumEvidence(
            self.ref, tuple(self.attempt.keys[site] for site in self.attempt.group), self.attempt.shown_set(),
            self.attempt.shown_agreements(), opened.self_masks, opened.mask_keys, self.attempt.context.base,
            self.models[-1],
        )  # fmt: skip

    def model_file(self, number: int) -> Path:
        return self.folder / f"model-{number}.safetensors"

    def download(self, site: str, number: int) -> None:
        """The site has that model, as its download keeps it."""
        target = self.hospitals[site].rounds.attempts.model(STUDY, self.models[number])
        target.write_bytes(self.model_file(number).read_bytes())

    def check(self, site: str, round_: int) -> None:
        """As the agent does before it trains in ``round_``."""
        hospital = self.at(site)
        self.download(site, round_ - 2)
        self.download(site, round_ - 1)
        hospital.sums.before_training(self.consent_of(hospital), hospital.assignment(round_), Interrupt())

    def run(self, round_: int, sites: tuple[str, ...] = ()) -> None:
        """A whole round."""
        there = self.open(round_, sites=sites)
        self.upload(round_, there)
        self.agree(there)
        self.unmask(there)
