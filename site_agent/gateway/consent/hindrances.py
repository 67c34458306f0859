"""What keeps an approved study from being worked on, looked at before a round is lost to it."""

from pathlib import Path

from site_agent import handoff
from site_agent.gateway.consent.approvals import study_request
from site_agent.gateway.consent.changes import differences
from site_agent.gateway.policy import veto
from site_agent.gateway.policy.decisions import decide, first_denial
from site_agent.gateway.policy.policy import Policy, load
from site_agent.state.consent import APPROVED, Consent, data_changed
from site_agent.state.directory import SiteState
from site_agent.state.journal import Journal
from site_agent.state.offer import Offer
from wardround.errors import BadData, WardroundError
from wardround.local import distributions
from wardround.records.codes import VETO
from wardround.records.plugins import refuse_other
from wardround.records.trainer import FileDigests, FilesStatus, HashFiles, StatFiles

SOON_READ = 1 << 30  # bytes of data that are read again for a look, which takes seconds


def hindrances(
    here: SiteState, coordinator: str, offer: Offer, consent: Consent, journal: Journal, *, ask_trainer: bool = True
) -> list[str]:
    """What changed since ``consent`` so that its next round would be declined; each with what to do."""
    changes = differences(consent, offer)
    if changes or consent.state != APPROVED or journal.ended:
        return changes
    changes = _policy(here.policy, coordinator, offer, consent, journal) + _plugins(consent)
    if data_changed(consent, journal):
        return [
            *changes,
            f"what it trains on is not what was approved, so round {journal.round} was declined; `site-agent data "
            f"check {consent.data.name} --study {offer.study}` looks at it",
        ]
    return changes + _data(here.root, consent, begun=journal.round > 0) if ask_trainer else changes


def _policy(path: Path, coordinator: str, offer: Offer, consent: Consent, journal: Journal) -> list[str]:
    try:
        policy = load(path, offer.study)
    except WardroundError as error:
        return [f"{error.message}; {error.hint}"]
    request = study_request(offer, coordinator, consent.validation_rows, consent.exposure)
    denial = first_denial(decide(policy, request))
    if denial is None:
        return _veto(policy, journal)
    return [f"the policy denies {denial.what}: {denial.rule}; `site-agent policy explain {offer.study}`"]


def _veto(policy: Policy, journal: Journal) -> list[str]:
    if journal.declined != VETO or not veto.is_worse(policy.veto, journal):
        return []
    return [
        f"this site vetoes the model that round {journal.round} begins with: its validation loss here is "
        f"{float(journal.own_loss):.4g}, and the lowest before was {float(journal.lowest_loss):.4g}; the coordinator "
        "knows neither; the study goes on here if `loss_rise` in [veto] of the policy is raised"
    ]


def _plugins(consent: Consent) -> list[str]:
    """By the metadata of those that this process finds: they may be installed for the trainer alone, which looks at
    their files too before it imports them.
    """
    changes = []
    for plugin in consent.plugins:
        if distributions.find(plugin.name) is None:
            continue
        try:
            refuse_other(plugin)
        except BadData as error:
            changes.append(f"{error.message}; {error.hint}")
    return changes


def _data(root: Path, consent: Consent, *, begun: bool) -> list[str]:
    """The trainer looks at the files' status, and reads them again only where that is another."""
    name, study = consent.data.name, consent.study
    check = f"`site-agent data check {name} --study {study}`"
    ways = f"restore it, or {check}, then `site-agent approve {study} --data {name}`"
    listens = handoff.Trainer(root).available()
    try:
        now = handoff.ask(root, StatFiles(data=name))
        if now.missing or (now.unreadable and listens):
            gone = ", ".join([*now.missing, *now.unreadable])
            return [f"of data `{name}`, what data.toml calls {gone} is not there for the trainer; {ways}"]
        if now.unreadable:
            return []  # only the trainer's user may look, and its listener does not run
        touched = _touched(now.status, consent.files, begun=begun)
        if not touched:
            return []
        if now.bytes > SOON_READ:
            return [
                f"the files of data `{name}` are not as they lay there at the approval (size, time or inode); {ways}"
            ]
        return _read_again(handoff.ask(root, HashFiles(data=name)), touched, consent, ways)
    except WardroundError as error:
        return [f"data `{name}`: {error.message}; {ways}"]


def _touched(now: FilesStatus, approved: FilesStatus, *, begun: bool) -> list[str]:
    """Which of them have another status. The weights are read once, before the first round."""
    touched = ["data"] if now.data != approved.data else []
    return touched + (["weights"] if now.weights != approved.weights and not begun else [])


def _read_again(now: FileDigests, touched: list[str], consent: Consent, ways: str) -> list[str]:
    same = {"data": now.data == consent.data.digest, "weights": now.weights == consent.data.weights}
    other = [what for what in touched if not same[what]]
    if not other:
        return []
    return [f"the {' and the '.join(other)} of `{consent.data.name}` are not what was approved; {ways}"]
