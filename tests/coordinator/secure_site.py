"""A hospital without patients in a study with secure aggregation: ``FakeSite`` with the site's side of the protocol."""

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.coordinator.conftest import Place
from tests.coordinator.fake_site import WAIT_S, FakeSite, Update, delta
from wardround.records import secure_round
from wardround.records.messages import envelope_message
from wardround.records.offer import StudyOffer
from wardround.records.receipts import Receipt
from wardround.records.secure_messages import AttemptRef, SecureShown, SecureTold, Shown, Told
from wardround.secure import site as protocol
from wardround.secure.layout import Layout, digests, masked
from wardround.secure.policy import Pledges, Policy
from wardround.secure.site import Party, SiteRound
from wardround.v1 import secure_pb2, secure_pb2_grpc

RANGE = 8.0


@dataclass
class Member:
    """One site in one study. ``shown``: what it was shown of the attempt under way, in order."""

    fake: FakeSite
    study: str
    party: Party = field(init=False)
    state: SiteRound = field(init=False)
    pledges: Pledges = field(default_factory=Pledges)
    ref: AttemptRef = field(init=False)
    closing: bool = False
    upload_id: bytes = b""
    blocks: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.offer = StudyOffer.from_message(self.fake.offer(self.study))
        file = self.offer.file
        roster, rules = secure_round.roster_of(file), secure_round.rules_of(file)
        known = frozenset(roster.fingerprint(site) for site in roster.sites)
        self.party = Party(self.fake.name, self.fake.ledger.key, roster, rules, Policy(known))

    @property
    def stub(self) -> Any:
        return secure_pb2_grpc.SecureAggregationStub(self.fake.channel)

    @property
    def layout(self) -> Layout:
        return secure_round.layout_of(self.offer.file, () if self.closing else self.offer.initial_model.specs)

    def begin(self, assignment: Any) -> None:
        """Take an assignment, and tell keys."""
        self.assignment, self.closing = assignment, assignment.HasField("validate")
        self.ref = AttemptRef(self.study, self.offer.revision, self.offer.digest, assignment.round, assignment.attempt)
        context = secure_round.context_of(
            self.offer.file, "north", self.offer.digest, assignment.round, assignment.attempt,
            assignment.base.digest.hex(), self.layout,
        )  # fmt: skip
        self.state, envelope = protocol.begin(self.party, context, os.urandom(32))
        self.upload_id = uuid.uuid4().bytes
        self.keys = envelope
        self.tell(Told.KEYS, envelope)

    def next_shown(self, kind: Shown) -> SecureShown:
        """The next that it is shown of a kind; others are passed over."""
        while True:
            shown = SecureShown.from_message(self.fake.next_event("secure"))
            assert shown is not None
            if shown.kind == kind and shown.attempt == self.ref:
                return shown

    def deal(self) -> None:
        shown = self.next_shown(Shown.KEYS)
        self.state, dealt = protocol.shares(self.party, self.state, shown.statements)
        self.stub.Tell(SecureTold(self.ref, Told.SHARES, shares=dealt).to_message(), timeout=WAIT_S)

    def join(self) -> None:
        shown = self.next_shown(Shown.SHARES)
        self.state = protocol.join(self.party, self.state, shown.shares or {})

    def upload(self, **changed: Any) -> Receipt:
        """Mask the update, and send it. ``changed``: fields of the opening that are other than they should be."""
        opening, payload = self.opening()
        for name, value in changed.items():
            opening.ClearField(name)
            opening.MergeFrom(type(opening)(**{name: value}))
        receipt = self.fake.send(opening, payload)
        assert receipt is not None
        return receipt

    def opening(self) -> tuple[Any, bytes]:
        layout, update = self.layout, self.update()
        tensors = {spec.key: np.frombuffer(data, "<f4") for spec, data in update.tensors}
        weight = secure_round.weight_of(self.offer.file, update.num_examples, closing=self.closing)
        metrics = {name: (float(value), update.num_validation) for name, value in update.metrics}
        own = layout.numbers(weight, metrics)
        masks = protocol.masks(self.party, self.state)
        read = lambda key, first, count: tensors[key][first : first + count]  # noqa: E731
        self.blocks = list(masked(layout, read, weight, own, masks))
        self.state, envelope = protocol.submit(self.party, self.state, digests(self.blocks))
        specs = secure_round.vector_specs(layout)
        parts = [b"".join(self.blocks[:-1]), self.blocks[-1]] if len(specs) == 2 else [self.blocks[-1]]
        sent = Update(tuple(zip(specs, parts, strict=True)), (), 0, 0)
        opening = self.fake.opening(self.assignment, sent, self.upload_id)
        opening.submission.CopyFrom(envelope_message(envelope))
        return opening, sent.payload

    def update(self) -> Update:
        update = delta(self.fake.name, self.ref.round, self.offer.initial_model.specs)
        return replace(update, tensors=()) if self.closing else update

    def agree(self) -> None:
        shown = self.next_shown(Shown.SET)
        self.state, self.pledges, envelope = protocol.agree(self.party, self.state, shown.statements, self.pledges)
        self.tell(Told.AGREEMENT, envelope)

    def open(self) -> None:
        shown = self.next_shown(Shown.AGREEMENTS)
        self.state, envelope = protocol.open_(self.party, self.state, shown.statements)
        self.tell(Told.OPENING, envelope)

    def tell(self, kind: Told, envelope: Any) -> secure_pb2.SecureToldReply:
        reply: secure_pb2.SecureToldReply = self.stub.Tell(
            SecureTold(self.ref, kind, envelope).to_message(), timeout=WAIT_S
        )
        return reply


def begun(place: Place, **study: Any) -> list[Member]:
    """A study with secure aggregation that runs, and its members, none of which has done anything yet."""
    secure = study.pop("secure_aggregation", {"range": RANGE, "largest_weight": 1000})
    sites = [place.join(site) for site in study.get("sites", ("alpha", "bravo", "charlie"))]
    name = place.create(secure_aggregation=secure, **study)
    members = [Member(site, name) for site in sites]
    for site in sites:
        site.declare(name)
    place.ask("start", study=name)
    return members


def train(members: Sequence[Member]) -> None:
    """A round as far as the vectors."""
    for member in members:
        member.begin(member.fake.next_assignment())
    for member in members:
        member.deal()
    for member in members:
        member.join()
    for member in members:
        assert member.upload().decision == "accepted"


def whole_round(members: Sequence[Member]) -> None:
    train(members)
    for member in members:
        member.agree()
    for member in members:
        member.open()
