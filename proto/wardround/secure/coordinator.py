"""The coordinator's side of one attempt, as functions without input or output. It carries messages and chooses when to
go on; nothing in it is trusted by a site.

    keys, close_keys             whoever sent keys in time is a peer
    shares, close_shares         whoever dealt to all of them is in the group
    submission, choose           whoever sent a vector in time is in the set, which is chosen once
    agreement, opening           t signatures, then t openings
    unmasking                    what is to be taken out of the sum

**The state is made durable before a message is sent**, above all the set. A message that comes twice changes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from wardround.errors import BadData, TryAgain
from wardround.secure.opening import Group, OpenedSecrets, combined
from wardround.secure.rules import Rules
from wardround.secure.shares import CIPHERTEXT
from wardround.secure.statements import Agreement, Context, Keys, Opened, Roster, Submission, known, read, set_digest
from wardround.signing.dsse import Envelope


@dataclass(frozen=True)
class Attempt:
    """The state of one attempt at the coordinator. Each table is by site.

    Attributes:
        peers, group, chosen: those who stand; empty while they may still grow.
        dealt: dealer -> receiver -> ciphertext.
    """

    context: Context
    roster: Roster
    rules: Rules
    keys: Mapping[str, Envelope] = field(default_factory=dict)
    peers: tuple[str, ...] = ()
    dealt: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    group: tuple[str, ...] = ()
    submissions: Mapping[str, Envelope] = field(default_factory=dict)
    chosen: tuple[str, ...] = ()
    agreements: Mapping[str, Envelope] = field(default_factory=dict)
    openings: Mapping[str, Envelope] = field(default_factory=dict)

    @property
    def members(self) -> Group:
        return Group(self.context, tuple(known(Keys, self.keys[site]) for site in self.group))

    @property
    def submitted(self) -> tuple[Submission, ...]:
        """The set's."""
        return tuple(known(Submission, self.submissions[site]) for site in self.chosen)

    @property
    def set_digest(self) -> str:
        return set_digest(self.members.digest, self.submitted)

    def shown_keys(self) -> tuple[Envelope, ...]:
        """What every peer is sent after ``close_keys``."""
        return tuple(self.keys[site] for site in self.peers)

    def shares_for(self, site: str) -> dict[str, bytes]:
        """What a site of the group is sent after ``close_shares``."""
        return {dealer: self.dealt[dealer][site] for dealer in self.group}

    def shown_set(self) -> tuple[Envelope, ...]:
        """What every site of the group is sent after ``choose``."""
        return tuple(self.submissions[site] for site in self.chosen)

    @property
    def is_agreed(self) -> bool:
        return bool(self.chosen) and len(self.agreements) >= self.rules.threshold

    def shown_agreements(self) -> tuple[Envelope, ...]:
        """What every site of the group is sent once ``is_agreed``."""
        return tuple(self.agreements[site] for site in sorted(self.agreements))


def keys(state: Attempt, sender: str, envelope: Envelope) -> Attempt:
    """Raises BadData: not the sender's, of another attempt, or other keys than its first. TryAgain: too late."""
    statement = read(Keys, envelope, state.roster)
    _refuse_other_sender(sender, statement.site)
    if field := state.context.differs(statement.context):
        raise BadData(f"the keys of site `{sender}` are for another {field}")
    return replace(state, keys=_once(state.keys, sender, envelope, closed=bool(state.peers)))


def close_keys(state: Attempt) -> Attempt:
    """Raises TryAgain: fewer than the threshold have sent keys."""
    if state.peers:
        return state
    return replace(state, peers=_enough(state, state.keys, "sent keys"))


def shares(state: Attempt, sender: str, ciphertexts: Mapping[str, bytes]) -> Attempt:
    """Raises BadData: not one for each peer, in its form, or from a site that is no peer. TryAgain: too late."""
    _refuse_outside(sender, state.peers)
    if ciphertexts.keys() != set(state.peers) or any(len(one) != CIPHERTEXT for one in ciphertexts.values()):
        raise BadData(f"the shares of site `{sender}` are not one for each of {len(state.peers)} sites")
    if sender in state.dealt:
        return state  # dealt again they are encrypted anew, and say the same
    if state.group:
        raise TryAgain(f"the shares of site `{sender}` came too late for this attempt", code="ROUND_CLOSED")
    return replace(state, dealt={**state.dealt, sender: dict(ciphertexts)})


def close_shares(state: Attempt) -> Attempt:
    """Raises TryAgain: fewer than the threshold have dealt."""
    if state.group:
        return state
    return replace(state, group=_enough(state, state.dealt, "dealt shares"))


def submission(state: Attempt, sender: str, envelope: Envelope) -> Attempt:
    """Raises BadData: not the sender's, of another group, or another than its first. TryAgain: too late."""
    _refuse_outside(sender, state.group)
    statement = read(Submission, envelope, state.roster)
    _refuse_other_sender(sender, statement.site)
    if (statement.context, statement.group) != (state.context.digest, state.members.digest):
        raise BadData(f"what site `{sender}` submitted is of another round or group")
    return replace(state, submissions=_once(state.submissions, sender, envelope, closed=bool(state.chosen)))


def choose(state: Attempt) -> Attempt:
    """The set: everyone who has submitted. Once.

    Raises:
        TryAgain: fewer than the threshold have submitted; no set was chosen, so another attempt may be made.
    """
    if state.chosen:
        return state
    return replace(state, chosen=_enough(state, state.submissions, "submitted a vector"))


def agreement(state: Attempt, sender: str, envelope: Envelope) -> Attempt:
    """Raises BadData: not the sender's, or of another set."""
    _refuse_outside(sender, state.group)
    statement = read(Agreement, envelope, state.roster)
    _refuse_other_sender(sender, statement.site)
    if not state.chosen or (statement.context, statement.chosen) != (state.context.digest, state.set_digest):
        raise BadData(f"what site `{sender}` signed is another set")
    return replace(state, agreements=_once(state.agreements, sender, envelope))


def opening(state: Attempt, sender: str, envelope: Envelope) -> Attempt:
    """Raises BadData: not the sender's, of another set, or not a share of each site of the group."""
    _refuse_outside(sender, state.group)
    statement = read(Opened, envelope, state.roster)
    _refuse_other_sender(sender, statement.site)
    within = set(state.chosen)
    right = (
        state.chosen
        and (statement.context, statement.chosen) == (state.context.digest, state.set_digest)
        and statement.self_masks.keys() == within
        and statement.mask_keys.keys() == set(state.group) - within
    )
    if not right:
        raise BadData(f"what site `{sender}` opened is not of this set")
    return replace(state, openings=_once(state.openings, sender, envelope))


def unmasking(state: Attempt) -> tuple[OpenedSecrets, tuple[str, ...]]:
    """What was opened, for the sum and for every member who checks it; and the sites that gave a wrong share.

    Raises:
        TryAgain: too few have opened yet. The set stands, and waits until enough sites are back.
    """
    found = [known(Opened, state.openings[site]) for site in sorted(state.openings)]
    return combined(found, state.members, state.chosen, state.roster, state.rules.threshold)


def _enough(state: Attempt, found: Mapping[str, object], did: str) -> tuple[str, ...]:
    if len(found) < state.rules.threshold:
        raise TryAgain(f"{len(found)} sites have {did}, and {state.rules.threshold} are needed")
    return tuple(sorted(found))


def _once(held: Mapping[str, Envelope], site: str, envelope: Envelope, *, closed: bool = False) -> dict[str, Envelope]:
    if site in held:
        if held[site] != envelope:
            raise BadData(f"site `{site}` says another thing than the first time")
        return dict(held)
    if closed:
        raise TryAgain(f"what site `{site}` sends came too late for this attempt", code="ROUND_CLOSED")
    return {**held, site: envelope}


def _refuse_other_sender(sender: str, signer: str) -> None:
    if sender != signer:
        raise BadData(f"site `{sender}` sends what site `{signer}` signed")


def _refuse_outside(sender: str, sites: tuple[str, ...]) -> None:
    if sender not in sites:
        raise BadData(f"site `{sender}` is not in this attempt")
