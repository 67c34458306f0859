"""A site's veto: its own validation of a new model is worse than its policy takes. Judges only.

The loss is the trainer's, of the downloaded model with this site's private parts, on rows that nobody trains on. It
never leaves: the coordinator is told a code, and pauses the study.
"""

import math

from site_agent.gateway.policy.policy import VetoTable
from site_agent.state.consent import Consent
from site_agent.state.journal import Journal
from wardround.errors import BadData


def lowest_loss(last: Journal, consent: Consent) -> str:
    """The lowest loss that this site has found under a consent, that of the model of ``last`` too; "" for none."""
    if last.consent != consent.digest:
        return ""
    known = [text for text in (last.lowest_loss, last.own_loss) if text]
    return min(known, key=_number, default="")


def is_worse(table: VetoTable, journal: Journal) -> bool:
    """Whether the journal's model is worse than a policy takes; not where there is nothing to compare it with."""
    if table.loss_rise is None or not journal.own_loss or not journal.lowest_loss:
        return False
    return _number(journal.own_loss) - _number(journal.lowest_loss) > table.loss_rise


def _number(text: str) -> float:
    """A loss that is none counts as infinite. Raises BadData: the trainer gave no number."""
    try:
        value = float(text)
    except ValueError:
        raise BadData("the trainer gave a loss that is no number", code="DECLINED_TRAINING_FAILED") from None
    return math.inf if math.isnan(value) else value
