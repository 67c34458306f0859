"""A site's side of one attempt of a round, as functions without input or output: a state and a message in, the next
state and messages out.

    begin          keys                          the coordinator collects them, and shows everyone's to everyone
    shares         a share for each peer         the coordinator carries them
    join           nothing                       from here on, the site can mask its vector over this group
    submit         the signed digest of it       the vector itself goes as any update goes
    agree          the signature of the set      one for a round, and of the same sites for a model
    open_          shares                        after t signatures of the same set
    over           nothing                       the secrets are erased

**The state is made durable before a message is sent.** Then the site may be restarted at any place: the same message
in gives the same messages out, and one that says another thing than the first is refused. All randomness comes from
``root``, so whoever has the state has all, and an erased root leaves nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from wardround.errors import BadData, NotPermitted
from wardround.secure import shares as sealed
from wardround.secure.keys import Secrets, commitment, public_of
from wardround.secure.layout import NUMBERS, TENSORS, Blocks
from wardround.secure.masking import Mask
from wardround.secure.opening import Group, own_masks
from wardround.secure.policy import Pledge, Pledges, Policy
from wardround.secure.rules import Rules
from wardround.secure.statements import (
    Agreement,
    Context,
    Keys,
    Opened,
    Roster,
    Submission,
    read_all,
    set_digest,
    signed,
)
from wardround.signing.dsse import Envelope, keyid

MODEL_MISMATCH = "DECLINED_MODEL_MISMATCH"


@dataclass(frozen=True)
class Party:
    """A site that takes part, and what it holds to. Making one checks that the roster suits the policy.

    Raises:
        NotPermitted: the roster has too many strangers, or another key for this site than its own.
    """

    site: str
    key: Ed25519PrivateKey = field(repr=False)
    roster: Roster
    rules: Rules
    policy: Policy

    def __post_init__(self) -> None:
        self.policy.refuse_roster(self.roster, self.site, self.rules)
        if self.roster.fingerprint(self.site) != keyid(self.key.public_key()):
            raise NotPermitted(f"the roster has another key for `{self.site}` than its own", code="DECLINED_POLICY")


@dataclass(frozen=True)
class SiteRound:
    """The state of one attempt at a site.

    Attributes:
        root: 32 random bytes, drawn for this attempt; empty once erased.
        peers: the keys of all sites that sent some.
        group: those of them over whom this site masks.
        received: dealer -> its encrypted share for this site.
        submission: the digest of this site's masked vector's blocks, "" before.
        chosen: the set that it signed: sites, and the digest; empty before.
        opened: whether it has opened the set.
    """

    context: Context
    root: bytes = field(repr=False)
    peers: tuple[Keys, ...] = ()
    group: tuple[str, ...] = ()
    received: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    submission: str = ""
    chosen: tuple[str, ...] = ()
    chosen_digest: str = ""
    opened: bool = False

    @property
    def secrets(self) -> Secrets:
        """Raises BadData: they are erased."""
        return Secrets(self.root, self.context.digest)

    @property
    def members(self) -> Group:
        return Group(self.context, tuple(one for one in self.peers if one.site in self.group))


def begin(party: Party, context: Context, root: bytes) -> tuple[SiteRound, Envelope]:
    """The first state, and this site's keys.

    Args:
        root: 32 bytes of ``os.urandom``, drawn for this attempt and never used for another.

    Raises:
        BadData: the context is of another roster.
    """
    if context.roster != party.roster.digest:
        raise BadData("the round is of another roster than this site consented to")
    return SiteRound(context, root), signed(_own_keys(party, SiteRound(context, root)), party.key)


def shares(party: Party, state: SiteRound, envelopes: Iterable[Envelope]) -> tuple[SiteRound, dict[str, bytes]]:
    """Everyone's keys came: the shares for each of them.

    Raises:
        BadData: a statement is not of a roster's member, or of another round, or this site's own is another.
        NotPermitted: a site was given another model; fewer than the threshold; or other keys than those before.
    """
    peers = read_all(Keys, envelopes, party.roster)
    own = _own_keys(party, state)
    for one in peers:
        _refuse_other_context(state.context, one)
        if one.site == party.site and one != own:
            raise BadData("what came as this site's own keys is something else")
    if own not in peers:
        raise NotPermitted("this site is not among those whose keys count in this attempt", code="DECLINED_POLICY")
    if len(peers) < party.rules.threshold:
        raise NotPermitted(
            f"keys of {len(peers)} sites, and {party.rules.threshold} are needed to open anything",
            code="DECLINED_POLICY",
        )
    if state.peers and state.peers != peers:
        raise NotPermitted("other keys than those that were shown before in this attempt", code="DECLINED_POLICY")
    dealt = sealed.deal(state.secrets, own, peers, party.roster, party.rules.threshold)
    return replace(state, peers=peers), dealt


def join(party: Party, state: SiteRound, received: Mapping[str, bytes]) -> SiteRound:
    """The shares for this site came: their dealers are the group. Only sites that dealt are masked with, since a mask
    with another could never be taken out.

    Raises:
        BadData: a share is not from whom it says, or not for this site in this attempt.
        NotPermitted: fewer than the threshold, without this site, or another group than before.
    """
    group = tuple(sorted(received))
    known = {one.site: one for one in state.peers}
    if not set(group) <= known.keys():
        raise BadData("a share of a site whose keys were not shown")
    if party.site not in group or len(group) < party.rules.threshold:
        raise NotPermitted(
            f"a group of {len(group)} sites; it holds this one, and at least {party.rules.threshold}",
            code="DECLINED_POLICY",
        )
    own = known[party.site]
    for site, ciphertext in received.items():
        sealed.open_share(state.secrets, own, known[site], ciphertext)
    if state.group:
        if state.group != group:
            raise NotPermitted("another group than the one before in this attempt", code="DECLINED_POLICY")
        return state
    return replace(state, group=group, received=dict(sorted(received.items())))


def masks(party: Party, state: SiteRound) -> dict[str, list[Mask]]:
    """Label -> the masks of that part of this site's vector.

    Raises:
        NotPermitted: there is no group yet, or this site has signed a set already.
    """
    _refuse_without_group(state)
    if state.chosen_digest and not state.submission:
        raise NotPermitted(
            "a set was signed without this site's vector; it is not sent any more", code="DECLINED_POLICY"
        )
    return {label: own_masks(state.secrets, party.site, state.members, label) for label in (TENSORS, NUMBERS)}


def submit(party: Party, state: SiteRound, blocks: Blocks) -> tuple[SiteRound, Envelope]:
    """The signed digest of the masked vector. One vector for one attempt: under the same masks a second one would tell
    the difference.

    Raises:
        NotPermitted: another vector was masked before, or a set without this one is signed.
    """
    masks(party, state)
    if state.submission and state.submission != blocks.root:
        raise NotPermitted("another vector than before under the same masks is not sent", code="DECLINED_POLICY")
    return replace(state, submission=blocks.root), signed(_submission(party, state, blocks.root), party.key)


def agree(
    party: Party, state: SiteRound, envelopes: Iterable[Envelope], pledges: Pledges
) -> tuple[SiteRound, Pledges, Envelope]:
    """The set came: this site's signature of it. State and pledges are made durable together.

    A site that has sent nothing yet may sign a set without it, and help to open it; then it sends nothing more.

    Raises:
        BadData: a submission is not signed by its site, or of another group.
        NotPermitted: this site's vector is not in it, or another; it is too small or of strangers; or another set is
            signed for this round, or one of other sites from this model.
    """
    _refuse_without_group(state)
    group, found = state.members, read_all(Submission, envelopes, party.roster)
    for one in found:
        group.of(one.site)
        if (one.context, one.group) != (state.context.digest, group.digest):
            raise BadData(f"what site `{one.site}` submitted is of another round or group")
    own = next((one for one in found if one.site == party.site), None)
    if (own.blocks if own else "") != state.submission:
        raise NotPermitted("the set does not hold this site's vector as it sent it", code="DECLINED_POLICY")
    chosen = tuple(one.site for one in found)
    party.policy.refuse_set(party.roster, party.site, chosen, party.rules)
    digest = set_digest(group.digest, found)
    context = state.context
    pledged = pledges.plus(Pledge(context.study, context.round, context.base, context.digest, digest, chosen))
    agreement = Agreement(context.digest, group.digest, party.site, digest)
    return replace(state, chosen=chosen, chosen_digest=digest), pledged, signed(agreement, party.key)


def open_(party: Party, state: SiteRound, envelopes: Iterable[Envelope]) -> tuple[SiteRound, Envelope]:
    """The signatures came: what this site opens, which it computes itself and nobody asks for by name.

    Raises:
        BadData: a signature is not its site's, or of another round or group.
        NotPermitted: this site has signed no set, one signed another, fewer than the threshold signed this one, or the
            policy does not let it be opened any more.
    """
    group = state.members
    if not state.chosen_digest:
        raise NotPermitted("this site has signed no set of this attempt", code="DECLINED_POLICY")
    found = read_all(Agreement, envelopes, party.roster)
    for one in found:
        group.of(one.site)
        if (one.context, one.group) != (state.context.digest, group.digest):
            raise BadData(f"what site `{one.site}` signed is of another round or group")
    party.policy.refuse_set(party.roster, party.site, state.chosen, party.rules)  # it may be another policy by now
    same = [one for one in found if one.chosen == state.chosen_digest]
    if len(same) != len(found):
        raise NotPermitted("sites have signed other sets than this one has", code="DECLINED_POLICY")
    if len(same) < party.rules.threshold:
        raise NotPermitted(
            f"{len(same)} sites have signed the set, and {party.rules.threshold} are needed", code="DECLINED_POLICY"
        )
    secrets = state.secrets
    held = {
        site: sealed.open_share(secrets, group.of(party.site), group.of(site), ciphertext)
        for site, ciphertext in state.received.items()
    }
    opened = Opened(
        state.context.digest,
        state.chosen_digest,
        party.site,
        {site: held[site].self_mask.hex() for site in state.group if site in state.chosen},
        {site: held[site].mask_key.hex() for site in state.group if site not in state.chosen},
    )
    return replace(state, opened=True), signed(opened, party.key)


def over(state: SiteRound) -> SiteRound:
    """Without secrets: nothing of this attempt can be masked or opened here any more."""
    return replace(state, root=b"", received={})


def _refuse_other_context(context: Context, keys: Keys) -> None:
    """Raises NotPermitted: the statement is about another attempt; ``base`` is a site that was given another model."""
    if not (field := context.differs(keys.context)):
        return
    if field == "base":
        raise NotPermitted(
            f"site `{keys.site}` states that it was given another model in this round than this site was",
            hint="both statements are signed: show them to the coordinator's operator, and to that site's people",
            code=MODEL_MISMATCH,
        )
    raise BadData(f"the keys of site `{keys.site}` are for another {field}")


def _own_keys(party: Party, state: SiteRound) -> Keys:
    secrets = state.secrets
    return Keys(
        state.context,
        party.site,
        public_of(secrets.mask_key),
        public_of(secrets.share_key),
        commitment(secrets.self_mask, state.context.digest),
    )


def _submission(party: Party, state: SiteRound, root: str) -> Submission:
    return Submission(state.context.digest, state.members.digest, party.site, root)


def _refuse_without_group(state: SiteRound) -> None:
    if not state.group:
        raise NotPermitted("this site has no group in this attempt", code="DECLINED_POLICY")
