"""One study's line in `site-agent studies` and `status`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

from site_agent.handoff import Trainer
from site_agent.state.codec import STRICT
from site_agent.state.consent import Consent
from site_agent.state.directory import SiteState
from site_agent.state.journal import Journal
from site_agent.state.offer import Offer
from site_agent.state.progress import study_state

WORKED_ON = ("approved", "running", "paused", "training")  # states of a study that goes on, or would


@dataclass(frozen=True)
class StudyRow:
    """Where this site stands in a study.

    Attributes:
        id: the study's name.
        state: as ``study_state`` says it; "changed" also where its next round would be declined.
        round: the last that was begun, 0 before the first.
        changes: what changed since it was approved, in words.
        plugins: whose code it runs here besides ours, each with its version and digest.
    """

    id: str
    title: str
    state: str
    round: int
    rounds: int
    revision: int
    study_digest: str
    approved_by: str | None
    data: str | None
    changes: tuple[str, ...]
    plugins: tuple[str, ...] = ()

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


def study_rows(here: SiteState, coordinator: str, *, ask_trainer: bool = True) -> list[StudyRow]:
    """A row for each study that is offered.

    Args:
        coordinator: its URI name.
        ask_trainer: whether the data is looked at too; not by a trainer that is stopped or hung.
    """
    rows = []
    listener = Trainer(here.root)
    ask_trainer = ask_trainer and (not listener.available() or listener.answers())
    for offer in here.offers():
        consent, journal = here.consent(offer.study), here.journal(offer.study)
        journal = journal if journal.study_digest == offer.digest else Journal(offer.study)
        changes = []
        if consent is not None:
            from site_agent.gateway.consent.hindrances import hindrances  # with the policy and all that it judges

            changes = hindrances(here, coordinator, offer, consent, journal, ask_trainer=ask_trainer)
        rows.append(study_row(offer, consent, journal, changes))
    return rows


def study_row(offer: Offer, consent: Consent | None, journal: Journal, changes: Sequence[str]) -> StudyRow:
    """One study's row, from what is kept of it. ``changes`` says in words what changed since it was approved."""
    state = study_state(offer, consent, journal)
    if changes and state in WORKED_ON:
        state = "changed"
    round_ = journal.round if journal.study_digest == offer.digest else 0
    if state != "held":  # the closing numbers come after the last round; held, they are released by their own number
        round_ = min(round_, offer.rounds)
    return StudyRow(
        id=offer.study, title=offer.title, state=state, round=round_, rounds=offer.rounds, revision=offer.revision,
        study_digest=offer.digest, approved_by=consent.approved_by.name if consent is not None else None,
        data=consent.data.name if consent is not None else None, changes=tuple(changes),
        plugins=tuple(str(plugin) for plugin in offer.plugins),
    )  # fmt: skip
