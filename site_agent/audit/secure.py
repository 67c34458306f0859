"""Judges what a ledger's lines say of secure aggregation, one after the other: no round was agreed twice, no site's two
secrets were opened, and each signature was within the policy in force.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from wardround.errors import BadData
from wardround.records.ledger.decided import PolicyEntry
from wardround.records.ledger.entries import Entry
from wardround.records.ledger.secure import (
    BLOCKS_ALONE,
    MISSED,
    OTHER,
    SAME,
    AgreedEntry,
    KeysEntry,
    OpenedEntry,
    PeerEntry,
    SecureEntry,
    SumCheckedEntry,
)

FOUND = {
    SAME: "is the model that came of it", OTHER: "is NOT the model that came of it",
    BLOCKS_ALONE: "is of what its sites signed; the model is more than it",
    MISSED: "was not checked: this site was away",
}  # fmt: skip


def words_of_secure(entry: PeerEntry | SecureEntry) -> str:
    """One such line in a few words."""
    if isinstance(entry, PeerEntry):
        return f"the key of {entry.site}, {entry.fingerprint[:12]}…, is {entry.event}"
    about = f"{entry.study} round {entry.round}.{entry.attempt}: "
    match entry:
        case KeysEntry():
            return f"{about}keys for masks"
        case AgreedEntry():
            known = f"{len(entry.known)} of them known here beside this one"
            return f"{about}signed the sum over {', '.join(entry.sites)}: {known}"
        case OpenedEntry():
            gone = f", and of the mask keys of {', '.join(entry.mask_keys)}" if entry.mask_keys else ""
            return f"{about}opened shares of the self masks of {', '.join(entry.self_masks)}{gone}"
        case SumCheckedEntry():
            found = FOUND.get(entry.result, "was looked at")
            return f"{about}the sum {found}: {len(entry.looked_at)} of {entry.of} blocks looked at"
    raise AssertionError(entry.type)


SUM_HEADS = ("round", "the sum over", "known here", "opened", "the sum checked")


def sums_in(entries: Sequence[SecureEntry]) -> tuple[tuple[str, ...], ...]:
    """Of each sum that this site signed what ``SUM_HEADS`` names, in the order of the lines."""
    rows = []
    for agreed in (one for one in entries if isinstance(one, AgreedEntry)):
        same = [one for one in entries if (one.study_sha256, one.context) == (agreed.study_sha256, agreed.context)]
        opened = next((one for one in same if isinstance(one, OpenedEntry)), None)
        checked = [one for one in same if isinstance(one, SumCheckedEntry)]
        gone = f", mask keys of {', '.join(opened.mask_keys)}" if opened is not None and opened.mask_keys else ""
        rows.append((
            str(agreed.round), ", ".join(agreed.sites), str(len(agreed.known)),
            "nothing" if opened is None else f"self masks of the sum's sites{gone}",
            "not yet" if not checked else f"{len(checked[-1].looked_at)} of {checked[-1].of} blocks: "
            + FOUND.get(checked[-1].result, checked[-1].result),
        ))  # fmt: skip
    return tuple(rows)


@dataclass(frozen=True)
class Agreed:
    """The first `agreed` line of a round in a ledger, counted from 1."""

    line: int
    entry: AgreedEntry


class SecureLines:
    """What was agreed in a ledger so far, by study and round, and the policy in force."""

    def __init__(self) -> None:
        self._policy = ""
        self.agreed: dict[tuple[str, int], Agreed] = {}

    def take(self, number: int, entry: Entry) -> None:
        """Line ``number``, counted from 1. Raises BadData: it cannot stand after what was taken before."""
        match entry:
            case PolicyEntry():
                self._policy = entry.sha256 or ""
            case AgreedEntry():
                self._agree(number, entry)
            case OpenedEntry():
                self._open(entry)

    def _agree(self, number: int, entry: AgreedEntry) -> None:
        first = self.agreed.setdefault((entry.study_sha256, entry.round), Agreed(number, entry)).entry
        if first.chosen != entry.chosen:
            raise BadData(f"round {entry.round} was agreed twice, with two sets")
        if entry.policy_sha256 != self._policy:
            raise BadData("it names another policy than the one in force")
        sites = set(entry.sites)
        if len(sites) < max(entry.threshold, entry.min_sites):
            raise BadData(f"a set of {len(sites)} sites, fewer than study and policy want")
        if (known := len(sites & set(entry.known))) < entry.min_known:
            raise BadData(f"a set with {known} sites that people knew, fewer than the policy wants")

    def _open(self, entry: OpenedEntry) -> None:
        found = self.agreed.get((entry.study_sha256, entry.round))
        if found is None or found.entry.chosen != entry.chosen:
            raise BadData("it opens a set that no line before it agrees to")
        self_masks = set(entry.self_masks)
        if both := sorted(self_masks & set(entry.mask_keys)):
            raise BadData(f"shares of both kinds of site `{both[0][:64]}` were opened")
        if self_masks != set(found.entry.sites):
            raise BadData("it opens the self masks of other sites than the set's")


def agreed_again(older: SecureLines, newer: SecureLines) -> int | None:
    """The first line of ``newer`` that agrees to another set of a round than ``older``, a ledger before it, does."""
    found = ((key, older.agreed.get(key), agreed) for key, agreed in newer.agreed.items())
    return next(
        (agreed.line for _, before, agreed in found if before and before.entry.chosen != agreed.entry.chosen), None
    )
