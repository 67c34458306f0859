"""Judges what a ledger's lines say of secure aggregation, one after the other: no set was agreed twice, no site's two
secrets were opened, each signature was within the policy in force, and each sum was checked before the next was signed.
"""

from wardround.errors import BadData
from wardround.records.ledger.entries import Entry, PolicyEntry
from wardround.records.ledger.secure import (
    BLOCKS_ALONE,
    KNOWN,
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
    BLOCKS_ALONE: "is of what its sites signed; the model is more than it", MISSED: "was not checked: this site was away",
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


class SecureLines:
    """``continues``: an older ledger, which may hold what people said of peers and what was opened last."""

    def __init__(self) -> None:
        self.continues = False
        self._policy = ""
        self._known: dict[str, bool] = {}  # site -> whether its key is known to people; not in it: nothing was said
        self._agreed: dict[tuple[str, int], AgreedEntry] = {}  # (study, round)
        self._unchecked: dict[str, str] = {}  # study -> the set that was opened last and has no checked sum yet

    def take(self, entry: Entry) -> None:
        """Raises BadData: it cannot stand after what was taken before."""
        match entry:
            case PolicyEntry():
                self._policy = entry.sha256 or ""
            case PeerEntry():
                self._known[entry.site] = entry.event == KNOWN
            case AgreedEntry():
                self._agree(entry)
            case OpenedEntry():
                self._open(entry)
            case SumCheckedEntry():
                if entry.result != OTHER and self._unchecked.get(entry.study_sha256) == entry.chosen:
                    del self._unchecked[entry.study_sha256]

    def _agree(self, entry: AgreedEntry) -> None:
        study, sites = entry.study_sha256, set(entry.sites)
        for (of, round_), before in self._agreed.items():
            if of == study and round_ == entry.round and before.chosen != entry.chosen:
                raise BadData(f"round {round_} was agreed twice, with two sets")
            if of == study and before.base == entry.base and set(before.sites) != sites:
                raise BadData(f"sets of other sites were agreed in rounds {round_} and {entry.round} from one model")
        if self._unchecked.get(study, entry.chosen) != entry.chosen:
            raise BadData("it was signed before the sum of the round before was checked")
        self._refuse_beyond_policy(entry, sites)
        self._agreed[study, entry.round] = entry

    def _refuse_beyond_policy(self, entry: AgreedEntry, sites: set[str]) -> None:
        if entry.policy_sha256 != self._policy:
            raise BadData("it names another policy than the one in force")
        if len(sites) < max(entry.threshold, entry.min_sites):
            raise BadData(f"a set of {len(sites)} sites, fewer than study and policy want")
        known = set(entry.known)
        if not known <= sites or len(known) < entry.min_known:
            raise BadData(f"a set with {len(known & sites)} sites that people knew, fewer than the policy wants")
        if unknown := sorted(site for site in known if not self._known.get(site, self.continues)):
            raise BadData(f"it counts `{unknown[0][:64]}` as known, and no line says that anybody knew its key")

    def _open(self, entry: OpenedEntry) -> None:
        agreed = self._agreed.get((entry.study_sha256, entry.round))
        if agreed is None or (agreed.context, agreed.chosen) != (entry.context, entry.chosen):
            raise BadData("it opens a set that no line before it agrees to")
        self_masks, mask_keys = set(entry.self_masks), set(entry.mask_keys)
        if both := sorted(self_masks & mask_keys):
            raise BadData(f"shares of both kinds of site `{both[0][:64]}` were opened")
        if self_masks != set(agreed.sites):
            raise BadData("it opens the self masks of other sites than the set's")
        self._unchecked[entry.study_sha256] = entry.chosen
