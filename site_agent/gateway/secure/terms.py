"""What one site holds to in a study with secure aggregation: its key, the roster, the study's rules, its own policy."""

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from site_agent.gateway.policy.policy import SecureAggregationTable
from site_agent.gateway.secure.checking import Sum
from site_agent.state.consent import Consent
from site_agent.state.offer import StudyDocument
from site_agent.state.peers import Peers
from wardround.records import secure_round
from wardround.records.ledger.secure import AgreedEntry
from wardround.records.study import StudyFile
from wardround.secure.layout import Layout
from wardround.secure.policy import Policy
from wardround.secure.site import Party
from wardround.secure.statements import Context


def file_of(document: StudyDocument) -> StudyFile:
    """A resolved study's settings, typed. Raises BadData: this release does not know their form."""
    return StudyFile.from_document(document, "study")


def policy_of(table: SecureAggregationTable, peers: Peers) -> Policy:
    """What a hospital's policy and its people's list of peers say together."""
    return Policy(peers.fingerprints, table.min_sites, table.min_known, table.colluding)


def party_of(site: str, key: Ed25519PrivateKey, file: StudyFile, policy: Policy) -> Party:
    """This site in a study.

    Raises:
        NotPermitted: the roster has too many sites whom nobody here knows, or another key for this site than its own.
        BadData: the study names not each site's key, or its threshold does not stand.
    """
    return Party(site, key, secure_round.roster_of(file), secure_round.rules_of(file), policy)


def layout_of(consent: Consent, file: StudyFile, *, closing: bool) -> Layout:
    """The form of an approved study's vectors."""
    return secure_round.layout_of(file, () if closing else consent.upload)


def sum_of(consent: Consent, agreed: AgreedEntry, base: Path | None, model: Path | None) -> Sum:
    """What a round's sum, whose set this site signed, is checked against.

    Args:
        base, model: files of what the round began with and what it made; None where they are not at hand.
    """
    file, closing = file_of(consent.document), agreed.round > consent.rounds
    return Sum(
        layout_of(consent, file, closing=closing), secure_round.roster_of(file), secure_round.rules_of(file).threshold,
        agreed.context, agreed.chosen, base, model, consent.averages and not closing,
    )  # fmt: skip


def context_of(
    consent: Consent, file: StudyFile, federation: str, round_: int, attempt: int, base: str, *, closing: bool
) -> Context:
    """What an attempt at a round of an approved study is about. ``base``: digest of the model that it begins with."""
    layout = layout_of(consent, file, closing=closing)
    return secure_round.context_of(file, federation, consent.study_digest, round_, attempt, base, layout)
