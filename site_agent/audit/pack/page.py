"""The pack's own page: picture, what was promised and what was measured, approvals, policies, isolation, software."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from site_agent.audit.facts import when
from site_agent.audit.pack.promises import Promise
from site_agent.audit.verify import VERIFIED, Verdict
from site_agent.state.consent import Consent
from wardround.pages import rendering
from wardround.pages.blocks import (
    Answer,
    Block,
    Claim,
    Code,
    Facts,
    Figure,
    Grid,
    Heading,
    Items,
    Page,
    Paragraph,
    Tone,
)

HOW = """\
coordinator receipts SITE --out receipts.jsonl                        # at the coordinator, by its operator
site-agent audit verify --bundle PACK.tar --receipts receipts.jsonl   # every file of the pack, and the ledger in it
python verify_ledger.py --bundle PACK.tar --receipts receipts.jsonl   # the same by a program that shares no code"""
NOT_HERE = (
    "Whether an allowed tensor encodes a patient's data: no ledger can show that. See what limits it in the policy.",
    "What isolated the trainer in the past: that is as it was when the pack was made, by its own word.",
    "What the coordinator or the other sites did with what they were sent.",
)


@dataclass(frozen=True)
class PolicyChange:
    """A policy that came into force. ``differences``: from the one before it, in words; empty for the first."""

    time: str
    event: str
    sha256: str
    kept: bool
    differences: tuple[str, ...]


@dataclass(frozen=True)
class Isolation:
    """What keeps the trainer from the network and from the gateway, as it said when the pack was made."""

    at: str
    in_force: str
    missing: tuple[str, ...]
    gateway_user: str
    trainer_user: str
    separate: bool
    root: bool
    problem: str

    def rows(self) -> tuple[tuple[str, str], ...]:
        users = f"gateway {self.gateway_user}, trainer {self.trainer_user}"
        users += "" if self.separate else ": one user, so the kernel does not keep the gateway from the patients' files"
        said = {
            "As of": when(self.at),
            "Isolation in force": self.in_force,
            "Not in force": "; ".join(self.missing) or "none is missing",
            "Users": users + (". Running as root" if self.root else ""),
            "Problem": self.problem,
        }
        return tuple((name, value) for name, value in said.items() if value)


@dataclass(frozen=True)
class Pack:
    """All that the page says."""

    site: str
    study: str
    title: str
    federation: str
    made: str
    svg: bytes
    promises: Sequence[Promise]
    consents: Sequence[Consent]
    policies: Sequence[PolicyChange]
    isolation: Isolation
    software: int  # distributions
    version: str


def page(pack: Pack, verdict: Verdict, code: int) -> str:
    """The page as HTML."""
    about = f"Evidence pack · federation {pack.federation} · made {when(pack.made)}"
    title = f"Study {pack.study} at {pack.site}"
    return rendering.html(Page(title, about, tuple(_blocks(pack, verdict, code))))


def _blocks(pack: Pack, verdict: Verdict, code: int) -> Iterator[Block]:
    yield _answer(pack, verdict, code)
    if verdict.not_shown:
        yield Items("Not shown of the ledger:", tuple(verdict.not_shown), open=True)
    yield Heading("Who has what")
    alt = f"Data flow of study {pack.study}: from the patients' files to the trainer, the gateway and the coordinator"
    yield Figure("data-flow", alt, "Numbers are those of the ledger in this pack.", pack.svg)
    yield Heading("Promised and measured")
    yield Paragraph("Promised: by the approvals and the policies below. Measured: over every line of the ledger.")
    rows = tuple((one.name, one.promised, one.measured, one.state) for one in pack.promises)
    yield Grid(("promise", "promised", "measured", "shown"), rows, 4)
    yield Heading("Approvals and withdrawals")
    yield Grid(
        ("time", "what", "by", "revision", "study's digest", "data", "rows"),
        tuple(map(_consent, pack.consents)),
        numbers=(3, 6),
        codes=(4,),
    )
    yield Heading("Policies")
    kept = tuple((when(one.time), one.event, one.sha256[:16], _said(one)) for one in pack.policies)
    yield Grid(("time", "event", "SHA-256", "what is other than before"), kept, 4, codes=(2,))
    yield Heading("What keeps the trainer apart")
    yield Facts(pack.isolation.rows())
    yield Heading("Software")
    yield Paragraph(
        f"wardround {pack.version}, and {pack.software} distributions in all, in evidence/sbom.cdx.json (CycloneDX "
        "1.6), each with the SHA-256 of what its wheel brought, where that can be said."
    )
    yield Items("What this pack cannot show:", NOT_HERE, open=True)
    yield Heading("Check it yourself")
    yield Code(HOW)
    yield Facts(
        (("Last head", verdict.head), ("Ledger key", verdict.ledger_key), ("Receipt key", verdict.receipt_key or "-")),
        codes=True,
    )


def _answer(pack: Pack, verdict: Verdict, code: int) -> Answer:
    broken = [one.name for one in pack.promises if one.state == "broken"]
    open_ = [one.name for one in pack.promises if one.state == "not shown"]
    if broken:
        text = f"{len(broken)} of {len(pack.promises)} promises were broken: {'; '.join(broken)}."
    else:
        text = f"{len(pack.promises) - len(open_)} of {len(pack.promises)} promises were kept"
        text += f"; not shown: {'; '.join(open_)}." if open_ else ", as far as the ledger goes."
    whole = code == VERIFIED
    detail = (
        "The ledger is verified." if whole else f"The ledger is not fully verified: {verdict.reason or 'see below'}."
    )
    tone: Tone = "bad" if broken else "good" if whole and not open_ else "open"
    claims = (
        Claim("Unchanged", "open" if verdict.unsigned_tail else "good", "each line follows from the one before it"),
        Claim("Complete", "good" if verdict.complete else "open", "shown" if verdict.complete else "not shown"),
        Claim("This site's", "good" if verdict.whose else "open", verdict.whose or "not shown"),
    )
    return Answer(tone, text, detail, claims)


def _consent(consent: Consent) -> tuple[str, ...]:
    by, at = consent.withdrawn_by or consent.approved_by, consent.withdrawn_at or consent.approved_at
    return (
        when(at), consent.state, by.text, str(consent.revision), consent.study_digest[:16], consent.data.name,
        str(consent.rows),
    )  # fmt: skip


def _said(change: PolicyChange) -> str:
    if not change.kept:
        return "its text is not kept here"
    return "; ".join(change.differences) or ("nothing" if change.event == "changed" else "-")
