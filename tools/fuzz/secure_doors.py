"""Secure aggregation: what sites tell, what they are shown, and what a sum is checked with, in both directions.

Half of the changed statements are signed again by the site whose they are: what a member of ill will can send.
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError, Message

from coordinator.authenticator import Authenticator
from coordinator.servicers_secure import SecureServicer
from coordinator.studies.secure_rounds import with_told
from site_agent.gateway.secure.checking import Sum, evidence_of
from tools.fuzz.coordinator_doors import called
from tools.fuzz.engine import Door, Target
from tools.fuzz.examples import SPECS, CoordinatorWorld, drawn, ledger_key, study_document
from tools.fuzz.mutate import Mutator, in_json
from tools.fuzz.site_doors import FakeCall, connection
from tools.fuzz.wire import in_message
from wardround.records import secure_round
from wardround.records.secure_messages import (
    AttemptRef,
    BlockDigests,
    BlocksWanted,
    SecureShown,
    SecureTold,
    Shown,
    SumEvidence,
    Told,
    VectorBlock,
    blocks_message,
)
from wardround.records.study import StudyFile
from wardround.secure import coordinator
from wardround.secure import site as protocol
from wardround.secure.coordinator import Attempt
from wardround.secure.layout import Layout, digests, masked
from wardround.secure.policy import Pledges, Policy
from wardround.secure.site import Party, SiteRound
from wardround.signing import dsse
from wardround.v1 import envelope_pb2
from wardround.v1 import federation_pb2 as federation
from wardround.v1 import secure_pb2 as pb

MEMBERS = ("alpha", "bravo", "charlie")
SITE = "alpha"
KEYS = {dsse.keyid(ledger_key(site).public_key()): ledger_key(site) for site in MEMBERS}
Step = Callable[[SiteRound, SecureShown], object]


@dataclass
class Steps:
    """One attempt among three sites, step by step; what each side was, and what was said, before each step."""

    told: dict[Told, tuple[Attempt, SecureTold]]  # of `alpha`, and the coordinator's state before it
    shown: dict[Shown, tuple[SiteRound, SecureShown]]  # to `alpha`, and its state before it
    party: Party
    layout: Layout
    evidence: SumEvidence
    vector: list[bytes]


@functools.cache
def steps() -> Steps:
    """A whole round. The same at every making."""
    roster = {site: ledger_key(site).public_key().public_bytes_raw().hex() for site in MEMBERS}
    file = StudyFile.from_document({
        **study_document(sites=list(MEMBERS)), "limits": {"norm_multiple": 0, "max_weight": 1.0},
        "secure_aggregation": {"range": 8.0, "largest_weight": 1000, "roster": roster, "threshold": 3},
    })  # fmt: skip
    members, layout = secure_round.roster_of(file), secure_round.layout_of(file, SPECS)
    known = Policy(frozenset(members.fingerprint(site) for site in MEMBERS))
    parties = {site: Party(site, ledger_key(site), members, secure_round.rules_of(file), known) for site in MEMBERS}
    context = secure_round.context_of(file, "north", "ab" * 32, 1, 1, "cd" * 32, layout)
    ref, state = AttemptRef("trial", 1, "ab" * 32, 1, 1), Attempt(context, members, secure_round.rules_of(file))
    sites: dict[str, SiteRound] = {}
    told: dict[Told, tuple[Attempt, SecureTold]] = {}
    shown: dict[Shown, tuple[SiteRound, SecureShown]] = {}

    def tell(site: str, kind: Told, said: Any) -> None:
        nonlocal state
        message = SecureTold(ref, kind, **({"shares": said} if kind == Told.SHARES else {"statement": said}))
        told.update({} if site != SITE else {kind: (state, message)})
        state = with_told(state, site, message)

    def show(site: str, message: SecureShown) -> SecureShown:
        shown.update({} if site != SITE else {message.kind: (sites[site], message)})
        return message

    for number, site in enumerate(MEMBERS):
        sites[site], envelope = protocol.begin(parties[site], context, bytes([number]) * 32)
        tell(site, Told.KEYS, envelope)
    state = coordinator.close_keys(state)
    for site in MEMBERS:
        one = show(site, SecureShown(ref, Shown.KEYS, state.shown_keys()))
        sites[site], dealt = protocol.shares(parties[site], sites[site], one.statements)
        tell(site, Told.SHARES, dealt)
    state = coordinator.close_shares(state)
    vectors = {}
    for site in MEMBERS:
        one = show(site, SecureShown(ref, Shown.SHARES, shares=state.shares_for(site)))
        sites[site] = protocol.join(parties[site], sites[site], one.shares or {})
        own = layout.numbers(5, {})
        masks = protocol.masks(parties[site], sites[site])
        vectors[site] = list(masked(layout, lambda key, first, count: np.ones(count, np.float32), 5, own, masks))
        sites[site], envelope = protocol.submit(parties[site], sites[site], digests(vectors[site]))
        state = coordinator.submission(state, site, envelope)
    state = coordinator.choose(state)
    for site in MEMBERS:
        one = show(site, SecureShown(ref, Shown.SET, state.shown_set()))
        sites[site], _, envelope = protocol.agree(parties[site], sites[site], one.statements, Pledges())
        tell(site, Told.AGREEMENT, envelope)
    for site in reversed(MEMBERS):
        one = show(site, SecureShown(ref, Shown.AGREEMENTS, state.shown_agreements()))
        sites[site], envelope = protocol.open_(parties[site], sites[site], one.statements)
        tell(site, Told.OPENING, envelope)
    opened, _ = coordinator.unmasking(state)
    evidence = SumEvidence(
        ref, tuple(state.keys[site] for site in state.group), state.shown_set(), state.shown_agreements(),
        opened.self_masks, opened.mask_keys, context.base, "ef" * 32,
    )  # fmt: skip
    return Steps(told, shown, parties[SITE], layout, evidence, vectors[SITE])


def in_statements(kind: type[Message]) -> Mutator:
    """A mutator of messages with signed statements: half of the changes are in one's text, which is signed again."""
    plain = in_message(kind.DESCRIPTOR)

    def mutate(random: Random, data: bytes) -> bytes:
        if random.random() < 0.5:
            return plain(random, data)
        try:
            message = kind.FromString(data)
        except DecodeError:
            return plain(random, data)
        envelopes = list(_envelopes(message))
        if not envelopes:
            return plain(random, data)
        one = random.choice(envelopes)
        one.payload = in_json(random, one.payload)
        if (key := KEYS.get(one.keyid)) is not None:
            one.signature = key.sign(dsse.encoding(one.payload_type, one.payload))
        return message.SerializeToString()

    return mutate


def _envelopes(message: Message) -> Iterator[Any]:
    if isinstance(message, envelope_pb2.Envelope):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if field.is_repeated else [value]:
                yield from _envelopes(inner)


class SecureWorld(CoordinatorWorld):
    """With a second study, which has secure aggregation; its first round waits for keys."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with drawn("secure"):
            self.pems["delta"] = self._join("delta")
            document = study_document(name="masked", sites=["alpha", "charlie", "delta"])
            document |= {"limits": {**document["limits"], "norm_multiple": 0, "max_weight": 1.0}}
            document |= {"secure_aggregation": {"range": 8.0, "largest_weight": 1000}}
            self.administration.studies.create(document, str(self.initial))
            self.masked: Any = self.context.engine.find("masked")
            ready = federation.DeclareRequest(
                study="masked", revision=1, digest=bytes.fromhex(self.masked.digest), status=federation.READY
            )
            for site in ("alpha", "charlie", "delta"):
                self.call("Declare", [ready.SerializeToString()], site)
            self.administration.studies.start("masked")
            self.masked = self.context.engine.find("masked")
        authenticator = Authenticator(self.context.certificate_status, self.context.enrolment, self.calls, self._fatal)
        self.secure = SecureServicer(authenticator, self.context.engine, self.context.store, self.context.blobs)
        self.keep()

    def keys(self) -> SecureTold:
        """Those of `alpha`."""
        study, file = self.masked, self.masked.resolved.file
        context = secure_round.context_of(
            file, "north", study.digest, 1, 1, study.initial, secure_round.layout_of(file, SPECS)
        )
        members, rules = secure_round.roster_of(file), secure_round.rules_of(file)
        known = Policy(frozenset(members.fingerprint(site) for site in members.sites))
        _, envelope = protocol.begin(Party(SITE, ledger_key(SITE), members, rules, known), context, bytes(32))
        return SecureTold(AttemptRef("masked", 1, study.digest, 1, 1), Told.KEYS, envelope)


def _called_with(
    method: str, kind: type[Message], seed: Callable[[SecureWorld], Message], refusals: frozenset[int] = frozenset()
) -> Callable[[Path], Door]:
    """A door for a call of the real servicer."""

    def opens(folder: Path) -> Door:
        world = SecureWorld(folder)

        def take(data: bytes) -> None:
            called(world, lambda context: getattr(world.secure, method)(iter([data]), context), world.pems[SITE])

        seeds = [seed(world).SerializeToString()]
        return Door(seeds, in_statements(kind), take, refusals=refusals, close=world.close)

    return opens


def _told(folder: Path) -> Door:
    """What a site tells at each of the four steps, as the coordinator judges it."""
    made = steps()

    def take(data: bytes) -> None:
        told = SecureTold.from_message(pb.SecureTold.FromString(data))
        after = with_told(made.told[told.kind][0], SITE, told)
        if told.kind == Told.OPENING:  # it is the last: now everything is combined
            coordinator.unmasking(after)

    seeds = [message.to_message().SerializeToString() for _, message in made.told.values()]
    return Door(seeds, in_statements(pb.SecureTold), take, (DecodeError,))


def _shown(folder: Path) -> Door:
    """What a site is shown at each of the four steps."""
    made = steps()
    party = made.party
    take_of: Mapping[Shown, Step] = {
        Shown.KEYS: lambda state, shown: protocol.shares(party, state, shown.statements),
        Shown.SHARES: lambda state, shown: protocol.join(party, state, shown.shares or {}),
        Shown.SET: lambda state, shown: protocol.agree(party, state, shown.statements, Pledges()),
        Shown.AGREEMENTS: lambda state, shown: protocol.open_(party, state, shown.statements),
    }

    def take(data: bytes) -> None:
        shown = SecureShown.from_message(pb.SecureShown.FromString(data))
        if shown is not None:
            take_of[shown.kind](made.shown[shown.kind][0], shown)

    seeds = [message.to_message().SerializeToString() for _, message in made.shown.values()]
    return Door(seeds, in_statements(pb.SecureShown), take, (DecodeError,))


def _sum() -> Sum:
    made = steps()
    return Sum(made.layout, made.party.roster, 3, "", "", None, None, averages=False)


def _evidence(folder: Path) -> Door:
    """What the coordinator shows of a sum, as a member looks at it."""

    def take(data: bytes) -> None:
        answer = pb.SumEvidence.FromString(data)
        made = connection([])
        made._secure = SimpleNamespace(Evidence=lambda *rest, **more: answer)  # type: ignore[assignment]
        _look(made.evidence("trial", 1, 1))

    seeds = [steps().evidence.to_message().SerializeToString()]
    return Door(seeds, in_statements(pb.SumEvidence), take, (DecodeError,))


def _kept(folder: Path) -> Door:
    """The same as it lies in a file, in a bundle."""

    def take(data: bytes) -> None:
        _look(SumEvidence.from_document(json.loads(data)))

    seeds = [json.dumps(steps().evidence.document()).encode()]
    return Door(seeds, in_json, take, (ValueError, RecursionError))


def _look(shown: SumEvidence) -> None:
    evidence = evidence_of(_sum(), shown)
    evidence.refuse_other_secrets()
    json.dumps(shown.document())


def _blocks(folder: Path) -> Door:
    """Blocks of a masked vector, as the coordinator sends them."""
    made = steps()
    parts = [BlockDigests(digests(made.vector).digests), *(VectorBlock(*one) for one in enumerate(made.vector))]

    def take(data: bytes) -> None:
        reply = pb.BlocksReply.FromString(data)
        site = connection([])
        site._secure = SimpleNamespace(Blocks=lambda *rest, **more: FakeCall([reply]))  # type: ignore[assignment]
        list(site.blocks(BlocksWanted("trial", 1, 1, SITE, (0, 1))))

    seeds = [blocks_message(part).SerializeToString() for part in parts]
    return Door(seeds, in_message(pb.BlocksReply.DESCRIPTOR), take, (DecodeError,))


NO_SUM = frozenset({0})  # the round is not over: refused, with a code
TARGETS = [
    Target("coordinator.tell", "SecureTold, before its study's first step is over",
           _called_with("Tell", pb.SecureTold, lambda world: world.keys().to_message()), 12),
    Target("coordinator.evidence", "EvidenceRequest", _called_with(
        "Evidence", pb.EvidenceRequest,
        lambda world: pb.EvidenceRequest(study="masked", revision=1, round=1), NO_SUM), 4),
    Target("coordinator.blocks", "BlocksRequest", _called_with(
        "Blocks", pb.BlocksRequest,
        lambda world: pb.BlocksRequest(study="masked", revision=1, round=1, site=SITE, blocks=[0, 1]), NO_SUM), 4),
    Target("secure.told", "what a site tells at each step", _told, 40),
    Target("secure.shown", "what a site is shown at each step", _shown, 40),
    Target("secure.evidence", "SumEvidence, and what a member makes of it", _evidence, 40),
    Target("secure.kept", "the same in a bundle", _kept, 30),
    Target("secure.blocks", "BlocksReply", _blocks, 10),
]  # fmt: skip
