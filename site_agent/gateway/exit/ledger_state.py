"""What the lines of this site's ledger say so far, in memory: heads, open uploads, quotas, release decisions. No I/O.

The writer of the ledger (``ledger``) shows it each line, at its start and as it appends. ``site_agent.audit`` judges
ledgers by itself, from the files alone.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from site_agent.state.directory import COUNTS
from site_agent.state.person import Person as LoggedIn
from wardround.errors import BadData
from wardround.records.ledger.base import Person
from wardround.records.ledger.decided import (
    HeldEntry,
    HoldEntry,
    PolicyEntry,
    ProposalEntry,
    RejectedEntry,
    ReleasedEntry,
)
from wardround.records.ledger.entries import (
    CitedHead,
    DeclareEntry,
    Entry,
    GenesisEntry,
    IdentityEntry,
    ReceiptEntry,
    ResendEntry,
    UploadEntry,
)
from wardround.records.ledger.lines import Line
from wardround.records.ledger.secure import MISSED, OTHER, AgreedEntry, OpenedEntry, SumCheckedEntry
from wardround.records.ledger.summary import SummaryEntry
from wardround.records.receipts import EMPTY_HEAD, NOT_RECEIVED, Awaited, LedgerHead, next_head

DIGEST = 32  # bytes of a SHA-256
PROPOSED, TAKEN_BACK = "proposed", "taken back"  # what may have happened to a proposal
Held = tuple[str, int, int, str]  # study, revision, round, digest of the update
Part = str | tuple[str, int, int]  # a UTC day ("2026-01-31"), or a round: study, revision, round


@dataclass
class Charge:
    """What the last line that let an upload out counts for: ``bytes`` in each of ``parts``."""

    parts: tuple[Part, ...]
    bytes: int
    tries: int


def refuse_incomplete(entry: Entry) -> None:
    """Raises BadData: it lacks what the agent's own lines have and a verifier does not ask for."""
    match entry:
        case PolicyEntry(sha256=None):
            raise BadData("it names no policy")
        case HoldEntry():
            _update_of(entry)
        case ReceiptEntry():
            entry.refuse_no_receipt()


def _update_of(hold: HoldEntry) -> Held:
    if hold.revision is None or hold.round is None or hold.update is None:
        raise BadData("it names no update")
    return hold.study, hold.revision, hold.round, hold.update


def is_among(by: Person, people: Sequence[Person]) -> bool:
    """Whether somebody whom the ledger names is, or may be, one of these."""
    person = LoggedIn.from_document(by.document())
    return any(person.may_be(LoggedIn.from_document(other.document())) for other in people)


class Digests(Sequence[bytes]):
    """SHA-256 digests in a row, in 32 bytes each: a ledger of years has millions."""

    def __init__(self, digests: Iterable[bytes] = ()) -> None:
        self._data = bytearray().join(digests)

    def append(self, digest: bytes) -> None:
        self._data += digest

    def __len__(self) -> int:
        return len(self._data) // DIGEST

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        places = range(len(self))[index]
        if isinstance(places, int):
            return bytes(self._data[places * DIGEST : (places + 1) * DIGEST])
        return [self[place] for place in places]


class LedgerState:
    """Not safe for several threads: the writer has a lock."""

    def __init__(self) -> None:
        self.hashes = Digests()
        self.heads = Digests([bytes.fromhex(EMPTY_HEAD)])  # after 0, 1, 2 ... lines
        self.witnessed = 0  # lines under the last head that a receipt names
        self.ledger_id = ""
        self.policy = ""  # digest of the one in force
        self.last_policy, self.policy_persons = "", 1  # the last that was none but "", and who must agree to another
        self.proposal: ProposalEntry | None = None  # the policy to which not enough people have agreed yet
        self.receipt_key: Ed25519PublicKey | None = None
        self.open: dict[str, UploadEntry] = {}  # uploads without a receipt
        self.charges: dict[str, Charge] = {}  # of each of them
        self.bytes: Counter[Part] = Counter()  # payloads that may have left
        self.numbers: Counter[Part] = Counter()  # metrics and counts
        self.estimates: Counter[Part] = Counter()  # of how long a round will still take
        self.last: dict[tuple[str, int], tuple[int, int]] = {}  # (study, revision) -> its last round and attempt
        self.held: set[Held] = set()
        self.rejected: set[Held] = set()
        self.let_out: set[Held] = set()  # released, by as many as the policy wanted then
        self.released_by: dict[Held, tuple[Person, ...]] = {}  # who would have each leave, once, enough of them or not
        self.summarized: dict[str, tuple[str, str]] = {}  # column of this site -> its last summary's request, and when
        self.agreed: dict[tuple[str, int], AgreedEntry] = {}  # (digest of the study, round) -> the set that was signed
        self.agreed_here: set[tuple[str, int]] = set()  # those of them whose line is in this ledger
        self.opened: set[tuple[str, int]] = set()  # those of them that this site has opened
        self.unchecked: dict[str, OpenedEntry] = {}  # digest of the study -> what was opened last, its sum unchecked
        self.checked: dict[str, SumCheckedEntry] = {}  # digest of the study -> the sum that was checked last
        self.models: dict[tuple[str, int], str] = {}  # (digest of the study, round) -> the model that was checked
        self.refuted: dict[str, SumCheckedEntry] = {}  # likewise -> the first whose model was another than it gives
        self.continues: CitedHead | None = None
        self.missing = ""  # id of a ledger that this one continues, and that is not there
        self._places: dict[str, int] = {}  # the line's number (seq) of each open upload
        self._site = self._federation = self._ledger_key = ""
        self._previous: str | None = EMPTY_HEAD  # SHA-256 of the last accepted or refused receipt's payload

    @property
    def lines(self) -> int:
        return len(self.hashes)

    @property
    def last_receipt(self) -> str:
        """SHA-256 of the payload of the last receipt of a decided upload; "" where it lies in an earlier ledger."""
        return self._previous or ""

    @property
    def head(self) -> LedgerHead:
        return self.head_at(self.lines)

    def head_at(self, lines: int) -> LedgerHead:
        """The head after its first ``lines`` lines."""
        return LedgerHead(self.ledger_id, lines, self.heads[lines].hex())

    def head_after(self, lines: int) -> str | None:
        """The same in hex alone; None where there are not so many lines."""
        return self.heads[lines].hex() if 0 <= lines < len(self.heads) else None

    def take(self, line: Line, hash_of_line: bytes) -> None:
        """The next line.

        Raises:
            BadData: as ``refuse_incomplete``; the line counts for nothing.
        """
        refuse_incomplete(line.entry)
        match line.entry:
            case GenesisEntry() as genesis:
                self.ledger_id, self._ledger_key = genesis.ledger_id, genesis.ledger_key or ""
                self._previous = EMPTY_HEAD if genesis.continues is None else None
                self.continues = genesis.continues
            case IdentityEntry() as identity:
                self.receipt_key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(identity.receipt_key))
                self._site, self._federation = identity.site or "", identity.federation or ""
            case UploadEntry() as upload:
                self._upload(line, upload)
            case ResendEntry() as resend:
                if resend.sent is not None and resend.upload_id in self.charges:
                    self.sent(resend.upload_id, resend.sent)
                self._charge(line.ts, resend, resend.try_)
            case DeclareEntry(num_examples=int()):
                self.numbers[line.ts[:10]] += 1
            case DeclareEntry(estimate_s=int()) as declared:
                self.estimates[declared.study, declared.revision or 0, declared.round or 0] += 1
            case SummaryEntry() as summary:
                self.numbers[line.ts[:10]] += summary.numbers
                absent = {place for place, column in enumerate(summary.columns) if column.absent}
                told = [own for place, own in enumerate(summary.sources or ()) if own and place not in absent]
                self.summarized |= dict.fromkeys(told, (summary.request, line.ts))
            case PolicyEntry() as policy:
                self._policy(policy)
            case ProposalEntry() as proposal:
                self.proposal = proposal if proposal.event == PROPOSED else None
            case HoldEntry() as hold:
                self._hold(hold)
            case AgreedEntry() as agreed:
                self.agreed[agreed.study_sha256, agreed.round] = agreed
                self.agreed_here.add((agreed.study_sha256, agreed.round))
            case OpenedEntry() as opened:
                self.unchecked[opened.study_sha256] = opened
                self.opened.add((opened.study_sha256, opened.round))
            case SumCheckedEntry() as checked if checked.result == OTHER:
                self.refuted.setdefault(checked.study_sha256, checked)
            case SumCheckedEntry() as checked:
                self._checked(checked)
            case ReceiptEntry() as answer:
                self._receipt(line.seq, answer)
        self.heads.append(bytes.fromhex(next_head(self.heads[-1].hex(), hash_of_line)))
        self.hashes.append(hash_of_line)  # last: who looks meanwhile sees no line without its head

    def remember(self, before: "LedgerState") -> None:
        """Take over what a ledger before this one says and a new one would forget: what left, and what was decided
        against something leaving. Before this one's own lines. What was released waits for people again.
        """
        self.bytes, self.numbers, self.estimates = before.bytes, before.numbers, before.estimates
        self.last, self.summarized, self.rejected = before.last, before.summarized, before.rejected
        self.last_policy, self.policy_persons = before.last_policy, before.policy_persons
        self.agreed |= before.agreed
        self.opened |= before.opened
        self.unchecked |= before.unchecked
        self.checked |= before.checked
        self.models |= before.models
        self.refuted |= before.refuted
        self.missing = before.missing

    def release_decision(self, update: Held, persons: int) -> str:
        """What people decided about an update: rejected; released, by so many at least; or "" while they did not.

        Args:
            persons: how many different people the policy in force wants now, whatever it wanted when they decided.
        """
        if update in self.rejected:
            return RejectedEntry.type
        enough = len(self.released_by.get(update, ())) >= persons or persons == 1
        return ReleasedEntry.type if update in self.let_out and enough else ""

    def is_first(self, update: Held, persons: int) -> bool:
        """Whether no other update of this study's revision was released, by so many people at least."""
        others = (other for other in self.let_out if other[:2] == update[:2] and other != update)
        return not any(self.release_decision(other, persons) == ReleasedEntry.type for other in others)

    def sent(self, upload_id: str, size: int) -> None:
        """Count no more than ``size`` bytes for the last line that let this upload out."""
        charge = self.charges[upload_id]
        for part in charge.parts:
            self.bytes[part] -= charge.bytes - size
        charge.bytes = size

    def awaited(self, upload_id: str) -> Awaited:
        """What a receipt for an open upload is judged against."""
        return Awaited(
            self.open[upload_id].recorded(self._places[upload_id]), self.ledger_id, self.head_after, self._previous,
            self._site, self._federation, self._ledger_key,
        )  # fmt: skip

    def _upload(self, line: Line, upload: UploadEntry) -> None:
        self.open[upload.upload_id], self._places[upload.upload_id] = upload, line.seq
        self._charge(line.ts, upload, 1)
        numbers = len(upload.metrics) + COUNTS
        for part in self.charges[upload.upload_id].parts:
            self.numbers[part] += numbers
        study = upload.study, upload.revision
        self.last[study] = max(self.last.get(study, (0, 0)), (upload.round, upload.attempt))

    def _charge(self, time: str, entry: UploadEntry | ResendEntry, tries: int) -> None:
        """Count what a line lets out, by its day and its round."""
        parts = (time[:10], (entry.study, entry.revision, entry.round))
        for part in parts:
            self.bytes[part] += entry.payload_bytes
        self.charges[entry.upload_id] = Charge(parts, entry.payload_bytes, tries)

    def _policy(self, policy: PolicyEntry) -> None:
        self.policy, self.proposal = policy.sha256 or "", None
        if self.policy:
            self.last_policy, self.policy_persons = self.policy, policy.persons or 1

    def _hold(self, hold: HoldEntry) -> None:
        key = _update_of(hold)
        if isinstance(hold, HeldEntry):
            self.held.add(key)
        elif isinstance(hold, RejectedEntry):
            self.rejected.add(key)
        else:
            before = self.released_by.get(key, ())
            is_new = hold.by is not None and not is_among(hold.by, before)
            self.released_by[key] = (*before, hold.by) if is_new and hold.by is not None else before
        if isinstance(hold, ReleasedEntry):
            self.let_out.add(key)

    def _checked(self, checked: SumCheckedEntry) -> None:
        self.checked[checked.study_sha256] = checked
        if checked.result != MISSED:
            self.models[checked.study_sha256, checked.round] = checked.model
        opened = self.unchecked.get(checked.study_sha256)
        if opened is not None and opened.chosen == checked.chosen:
            del self.unchecked[checked.study_sha256]

    def _receipt(self, seq: int, answer: ReceiptEntry) -> None:
        receipt = answer.receipt
        for kept in (self.open, self.charges, self._places):
            kept.pop(answer.upload_id, None)
        if receipt.decision == NOT_RECEIVED:
            return
        self._previous = hashlib.sha256(answer.envelope.payload.encode()).hexdigest()
        if receipt.ledger is not None:
            self.witnessed = max(self.witnessed, min(receipt.ledger.lines, seq + 1))
