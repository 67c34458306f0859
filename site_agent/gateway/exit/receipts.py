"""The coordinator's receipts, from what was answered to the ledger's line: judged, put in order, and what they mean."""

import logging
from collections.abc import Mapping

from site_agent.gateway.connection.client import Connection
from site_agent.gateway.exit.evidence import HostileReceipt
from site_agent.gateway.exit.ledger import Ledger
from wardround import refusals
from wardround.errors import BadData, TryAgain
from wardround.local import traces
from wardround.records.receipts import OutOfOrder, Receipt
from wardround.signing.dsse import Envelope
from wardround.terminal import quoted

log = logging.getLogger(__name__)


@traces.step("receipt")
def take(upload_id: str, envelope: Envelope, connection: Connection, ledger: Ledger) -> Receipt:
    """The receipt of one upload, in the ledger.

    If it follows receipts of other uploads, the coordinator is asked for those too. What is wrong with them does not
    undo this one: they stay unresolved, and are asked about with the next connection.

    Raises: as ``take_all``, where this upload's receipt is not in the ledger.
    """
    try:
        return take_all({upload_id: envelope}, connection, ledger)[upload_id]
    except (TryAgain, HostileReceipt) as error:
        receipt = ledger.receipt(upload_id)
        if receipt is None:
            raise
        log.error("%s", error.message)
        return receipt


def take_all(envelopes: Mapping[str, Envelope], connection: Connection, ledger: Ledger) -> dict[str, Receipt]:
    """What the coordinator answered, by upload id: judged, and in the ledger in the order of the receipts' chain.

    Where a receipt follows one that is not here, the coordinator is asked about the other uploads that have none: the
    connection may have broken before that one came.

    Raises:
        HostileReceipt: one of them cannot stand in the ledger. It is kept as evidence, its upload stays unresolved, and
            the others are in the ledger.
        RefusedForGood: one says that this ledger is refused (LEDGER_...), and follows a receipt that this ledger lost.
        TryAgain: one follows a receipt of an upload that the coordinator has not decided yet; what could be taken is in
            the ledger.
    """
    taken, early = _append_in_order(envelopes, ledger)
    if not early:
        return taken
    replies = {upload_id: connection.inquire(upload_id) for upload_id in ledger.unresolved if upload_id not in early}
    answers = {upload_id: envelope for upload_id, envelope in replies.items() if envelope is not None}
    more, early = _append_in_order(answers | {upload_id: envelopes[upload_id] for upload_id in early}, ledger)
    if early and len(answers) < len(replies):
        raise TryAgain("the coordinator decided uploads in another order than it tells of them")
    for upload_id, error in early.items():
        disputed = ledger.dispute(upload_id, (answers | {**envelopes})[upload_id], error.message)
        refuse_if_ledger_refused(error.receipt)
        raise disputed
    return taken | more


def _append_in_order(
    envelopes: Mapping[str, Envelope], ledger: Ledger
) -> tuple[dict[str, Receipt], dict[str, OutOfOrder]]:
    """Append what follows the ledger's last receipt, then what follows that. Returns it, and what follows neither."""
    taken: dict[str, Receipt] = {}
    hostile: HostileReceipt | None = None
    waiting = dict(envelopes)
    early: dict[str, OutOfOrder] = {}
    count = -1
    while count != len(waiting):
        count, early = len(waiting), {}
        for upload_id, envelope in list(waiting.items()):
            try:
                taken[upload_id] = ledger.resolve(upload_id, envelope)
            except OutOfOrder as error:
                early[upload_id] = error
                continue
            except BadData as error:
                hostile = ledger.dispute(upload_id, envelope, error.message)
            del waiting[upload_id]
    if hostile is not None:
        raise hostile
    return taken, early


def refuse_if_ledger_refused(receipt: Receipt) -> None:
    """Raises RefusedForGood: the coordinator does not take this site's ledger, and no retry helps."""
    if receipt.code in refusals.ENDED_LEDGERS:
        raise refusals.refused(receipt.code, f"round {receipt.round} of `{receipt.study}`")


def explain_refusal(receipt: Receipt) -> str:
    """A refusal in words, for the site's log."""
    tensor = f" (tensor {quoted(receipt.tensor)})" if receipt.tensor else ""
    why = refusals.explained(receipt.code)
    code = f"{receipt.code}, {why}" if why else quoted(receipt.code)
    return f"round {receipt.round} of `{receipt.study}` was refused: {code}{tensor}"
