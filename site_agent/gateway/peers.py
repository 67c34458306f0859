"""Whom this hospital's people know among a study's members: what `site-agent peers` shows and records."""

import re
import threading
from dataclasses import dataclass, field

from site_agent.gateway.consent.recorded import person_entry
from site_agent.gateway.exit.ledger import Ledger
from site_agent.gateway.peer_requests import PeerRow, ShownPeers
from site_agent.gateway.policy.policy import Policy
from site_agent.gateway.secure import terms
from site_agent.state import peers
from site_agent.state.directory import SiteState, now_text
from site_agent.state.offer import Offer
from site_agent.state.peers import Peer
from site_agent.state.person import Person
from site_agent.state.site import Site
from wardround.errors import NotPermitted, UsageProblem
from wardround.records.ledger.secure import FORGOTTEN, KNOWN, PeerEntry
from wardround.records.secure_round import roster_of, rules_of
from wardround.secure.statements import Roster


@dataclass(frozen=True)
class KnownPeers:
    """The list of one site. Safe to use from several threads."""

    state: SiteState
    site: Site
    ledger: Ledger
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def fingerprints(self) -> frozenset[str]:
        """Of the keys that people here know."""
        return peers.load(self.state.peers).fingerprints

    def of_study(self, study: str) -> ShownPeers:
        """Every member of a study with the fingerprint of its ledger key, and who of them is known.

        Raises:
            UsageProblem: no such study, or one without secure aggregation, whose members show no keys.
        """
        offer = self.state.offer(study)
        roster, known = _roster(offer), peers.load(self.state.peers)
        rows = []
        for member in roster.sites:
            peer = known.of(member, mark := roster.fingerprint(member))
            by, at = (peer.by.text, peer.at) if peer is not None else ("", "")
            rows.append(PeerRow(member, mark, member == self.site.site, by, at))
        rules = rules_of(offer.file)
        return ShownPeers(tuple(rows), rules.threshold, rules.most)

    def know(self, site: str, fingerprint: str, person: Person) -> None:
        """Record that ``person`` compared a member's fingerprint with that member's people.

        Args:
            fingerprint: 64 hexadecimal digits, with or without colons and spaces, as it was heard.

        Raises:
            UsageProblem: it is no fingerprint, or that site is a member of no study by this key.
        """
        mark = re.sub("[: ]", "", fingerprint).lower()
        if not re.fullmatch("[0-9a-f]{64}", mark):
            raise UsageProblem(
                f"{fingerprint[:80]!r} is no fingerprint: 64 of 0-9 and a-f, all of them",
                hint="`site-agent peers list STUDY` shows it, as the other site's `site-agent status` does",
            )
        shown = {
            _roster(offer).fingerprint(site)
            for offer in self.state.offers()
            if offer.is_secure and site in _roster(offer).sites
        }
        if mark not in shown:
            what = f"its key there is {sorted(shown)[0]}" if shown else "it is a member of no study with such keys"
            raise UsageProblem(
                f"`{site[:64]}` has no key with the fingerprint {mark[:16]}…: {what}",
                hint="if you heard this one from their people, the coordinator shows another: approve nothing, and ask "
                "its operator",
            )
        if site == self.site.site:
            raise UsageProblem(f"`{site}` is this site itself")
        with self._lock:
            known = peers.load(self.state.peers)
            if known.of(site, mark) is not None:
                return
            self.ledger.append(PeerEntry(event=KNOWN, site=site, fingerprint=mark, by=person_entry(person)))
            self.ledger.sign()
            peers.save(self.state.peers, known.plus(Peer(site, mark, person, now_text())))

    def forget(self, site: str, person: Person) -> None:
        """Take it back: from now on this site counts as a stranger.

        Raises:
            UsageProblem: it is not known.
        """
        with self._lock:
            known = peers.load(self.state.peers)
            peer = next((one for one in known.known if one.site == site), None)
            if peer is None:
                raise UsageProblem(f"`{site[:64]}` is not among the peers that people here know")
            self.ledger.append(
                PeerEntry(event=FORGOTTEN, site=site, fingerprint=peer.fingerprint, by=person_entry(person))
            )
            self.ledger.sign()
            peers.save(self.state.peers, known.minus(site))

    def refuse_roster(self, offer: Offer, policy: Policy) -> None:
        """Before a study is approved.

        Raises:
            NotPermitted: its members whom nobody here knows, and those that the policy takes to collude, could have
                this site's update laid open; or it has another key for this site than its own.
        """
        if not offer.is_secure:
            return
        roster = _roster(offer)
        judged = terms.policy_of(policy.secure_aggregation, peers.load(self.state.peers))
        judged.refuse_roster(roster, self.site.site, rules_of(offer.file))
        if roster.fingerprint(self.site.site) != self.ledger.key_id:
            raise NotPermitted(
                f"study `{offer.study}` has another key for `{self.site.site}` than this site's own",
                hint="the coordinator would sign in this site's place: show its operator `site-agent status`",
                code="DECLINED_POLICY",
            )


def _roster(offer: Offer) -> Roster:
    if not offer.is_secure:
        raise UsageProblem(
            f"study `{offer.study}` is without secure aggregation: the coordinator sees each update in clear, and "
            "members show each other no keys"
        )
    return roster_of(offer.file)
