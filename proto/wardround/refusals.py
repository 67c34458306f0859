"""What a refusal of the coordinator means at a site, in our own words, and what it may make this program do.

A failed call carries a code of ``RefusalCode`` and nothing else that is looked at: no sentence, no path, no exit code.
By the code a site does one of three things, and for a code or status that is none of these the second:

    for good   end, for a person: only what concerns this site's own standing (FOR_GOOD)
    later      try the same again, with longer and longer pauses: the coordinator's own trouble (LATER)
    not this   give this one thing up: the study, the round, the upload, the invitation
"""

from dataclasses import dataclass

from wardround import __version__
from wardround.errors import Refused, RefusedForGood, TryAgain, WardroundError

TROUBLE = "COORDINATOR_TROUBLE"
ENDED_LEDGERS = frozenset({"LEDGER_ROLLBACK", "LEDGER_FORK"})
FOR_GOOD = frozenset({"SITE_REVOKED", "CERTIFICATE_EXPIRED", "VERSION_UNSUPPORTED"}) | ENDED_LEDGERS
LATER = frozenset({
    TROUBLE, "TOO_BUSY", "CERTIFICATE_UNKNOWN", "CERTIFICATE_PROFILE", "CALL_NOT_ALLOWED", "SITE_CONNECTED_TWICE",
})  # fmt: skip


@dataclass(frozen=True)
class Meaning:
    """A sentence for people, and what to do."""

    sentence: str
    hint: str = ""


_ASK = "ask the coordinator's operator"
_REINVITE = "ask the coordinator's operator for a new invitation"
_VERSIONS = "compare the versions: `site-agent --version`, `coordinator --version`"
_RESTORED = (
    "was this machine restored from a backup, or copied? If it is the one that goes on: `site-agent audit rollover` "
    "begins a new ledger that cites this one, and the coordinator's operator confirms it"
)

MEANINGS: dict[str, Meaning] = {
    "VERSION_UNSUPPORTED": Meaning(
        f"this is wardround {__version__}, and the coordinator is more than one minor version apart",
        "update the older one",
    ),
    "CERTIFICATE_PROFILE": Meaning("the coordinator does not know this site's certificate by its names", _ASK),
    "CERTIFICATE_EXPIRED": Meaning(
        "this site's certificate has expired by the coordinator's clock",
        f"check this machine's clock; if the site was away for long, {_REINVITE}, and redeem it here, where "
        "everything is kept: `site-agent join --invitation FILE`",
    ),
    "CERTIFICATE_UNKNOWN": Meaning(
        "the coordinator has this site's certificate not in its records",
        f"if this site was invited again, use the newer identity; else {_ASK}",
    ),
    "SITE_REVOKED": Meaning("the coordinator's operator has revoked this site", f"nothing here was deleted; {_ASK}"),
    "CALL_NOT_ALLOWED": Meaning("the coordinator does not let this identity make the call", _ASK),
    "MESSAGE_MALFORMED": Meaning("the coordinator cannot read the message", _VERSIONS),
    "SITE_CONNECTED_TWICE": Meaning(
        "another program with this site's identity is connected, which started later",
        "was this machine, or its state directory, copied? stop one of the two",
    ),
    TROUBLE: Meaning(
        "the coordinator has trouble of its own", f"nothing is wrong here; its operator's log says why: {_ASK}"
    ),
    "INVITATION_UNKNOWN": Meaning(
        "the coordinator does not know the invitation: it is another's, or was withdrawn for a newer one", _REINVITE
    ),
    "INVITATION_EXPIRED": Meaning("the invitation has expired", _REINVITE),
    "INVITATION_USED": Meaning(
        "the invitation was used already",
        "if that was not you, tell the coordinator's operator at once, who revokes the site; else ask for a new one",
    ),
    "SIGNING_REQUEST_WEAK": Meaning("the coordinator does not take this site's key for a certificate", _VERSIONS),
    "LEDGER_KEY_PROOF": Meaning("the coordinator does not take the proof of this site's ledger key", _VERSIONS),
    "STUDY_UNKNOWN": Meaning("the coordinator has no such study for this site", "`site-agent studies` lists them"),
    "REVISION_CHANGED": Meaning(
        "the study is another at the coordinator now", "look at it again: `site-agent studies`, then `preview`"
    ),
    "STUDY_NOT_RUNNING": Meaning("the study does not run"),
    "ROUND_CLOSED": Meaning("the round is closed"),
    "ROUND_NOT_ASKED": Meaning("this site was not asked in this round and attempt"),
    "UPLOAD_ID_CONFLICT": Meaning("the coordinator has another upload of the same id"),
    "UPLOAD_DUPLICATE": Meaning("another upload of this site is accepted in this round"),
    "MANIFEST_NAMES": Meaning("the tensors are not exactly those that the study shares", _VERSIONS),
    "MANIFEST_SHAPE": Meaning("a tensor has another shape than the study's", _VERSIONS),
    "MANIFEST_DTYPE": Meaning("a tensor is of another type than the study's", _VERSIONS),
    "METRICS_UNDECLARED": Meaning("a metric is not one of the study's, or not in the form that it says"),
    "COUNT_INVALID": Meaning("a count is not in the form that the study says"),
    "PAYLOAD_INCOMPLETE": Meaning("the coordinator has not all bytes of the upload"),
    "PAYLOAD_DIGEST": Meaning("the bytes that came are not those that were announced"),
    "TENSOR_NOT_FINITE": Meaning("a tensor holds a value that is no number"),
    "TENSOR_NORM": Meaning("the update is larger than the study's limit"),
    "TENSOR_ENCODING": Meaning("a tensor holds what the study's encoding never writes", _VERSIONS),
    "LEDGER_ROLLBACK": Meaning("the coordinator has seen a longer ledger of this site", _RESTORED),
    "LEDGER_FORK": Meaning("the coordinator has seen another ledger of this site", _RESTORED),
    "LEDGER_SIGNATURE": Meaning("the coordinator does not know the key that signs this site's ledger", _ASK),
    "SUMMARY_UNKNOWN": Meaning(
        "the coordinator has no open summary request of that name for this site",
        "`site-agent data summaries` lists them",
    ),
    "SUMMARY_CHANGED": Meaning(
        "the summary request is another at the coordinator now", "look at it again: `site-agent data summary`"
    ),
    "SUMMARY_INVALID": Meaning("the coordinator does not take the figures in this form", _VERSIONS),
    "TOO_BUSY": Meaning("the coordinator is busy"),
    "NOT_RECEIVED": Meaning("the coordinator does not know the upload"),
}


def said_of(error: WardroundError) -> str:
    """The code under which the coordinator tells a site of an error: its own, where it is for sites to know."""
    return error.code if error.code in MEANINGS else TROUBLE


def refused(code: str, doing: str) -> WardroundError:
    """What the coordinator's refusal of a call makes of it here: RefusedForGood, TryAgain or Refused.

    Its message, and so each log that has it, says our sentence and the code; nothing else that the coordinator said.

    Args:
        code: any text that it may have sent.
    """
    meaning = MEANINGS.get(code)
    if meaning is None:
        code, meaning = TROUBLE, MEANINGS[TROUBLE]
    kind: type[WardroundError] = Refused
    if code in FOR_GOOD:
        kind = RefusedForGood
    elif code in LATER:
        kind = TryAgain
    return kind(f"{doing}: {meaning.sentence} ({code})", hint=meaning.hint, code=code)


def explained(code: str) -> str:
    """A code in words; "" for one that is none of ours."""
    meaning = MEANINGS.get(code)
    return meaning.sentence if meaning is not None else ""
