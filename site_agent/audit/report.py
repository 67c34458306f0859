"""The page that a data protection officer reads and prints: what left, what stays, and how to check it.

No script, no picture from elsewhere: the page says the same in ten years. It is made from the ledger and the consents
alone, so two makings of the same ledger are the same bytes. It says what the verdict shows and no more: of a ledger
that is not shown to be whole, what "this ledger" accounts for; of a changed one, the first bad line and no number.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from site_agent.audit.facts import Approval, LedgerFacts, StudyFacts, UploadFacts, facts_of, when
from site_agent.audit.files import LedgerFiles
from site_agent.audit.secure import SUM_HEADS
from site_agent.audit.summaries import HEADS, SummaryFacts
from site_agent.audit.verify import TAMPERED, VERIFIED, Verdict
from site_agent.gateway.consent.facts import size
from wardround.pages import rendering
from wardround.pages.blocks import Answer, Block, Claim, Code, Facts, Grid, Heading, Items, Page, Paragraph
from wardround.pages.charts import line_chart
from wardround.terminal import many

ABOUT = "Audit report"
HOW = """\
coordinator receipts SITE --out receipts.jsonl        # at the coordinator
site-agent audit verify --ledger LEDGER --receipts receipts.jsonl
python verify_ledger.py LEDGER --receipts receipts.jsonl"""


def page(ledgers: Sequence[LedgerFiles], consents: Mapping[str, bytes], verdict: Verdict, code: int) -> str:
    """The page as HTML.

    Args:
        ledgers: of one site, oldest first. consents: the approvals, STUDY.json each.
        verdict: what verification said of the ledgers, with its exit code.

    Raises:
        BadData: a line of the ledger, or a consent, cannot be read.
    """
    if code == TAMPERED:
        return rendering.html(Page("This ledger does not verify", ABOUT, tuple(_changed(verdict))))
    facts = facts_of(ledgers, consents)
    about = " · ".join(filter(None, (ABOUT, facts.federation and f"federation {facts.federation}")))
    blocks = (
        _answer(facts, verdict, code),
        *_head(facts, verdict),
        *chain.from_iterable(_study(study, verdict) for study in facts.studies),
        *chain.from_iterable(map(_summary, facts.summaries)),
        *_how(facts, verdict),
    )
    return rendering.html(Page(f"What left {facts.site or 'this site'}", about, blocks))


def _changed(verdict: Verdict) -> Iterator[Block]:
    """Of a ledger that does not verify, the fault is known and nothing else."""
    yield Answer("bad", f"CHANGED: {verdict.reason}.")
    where = f"Line {verdict.first_bad} of {verdict.ledger or 'the ledger'}" if verdict.first_bad else "It"
    yield Paragraph(
        f"{where} is not as it was written, or not what the coordinator's receipts or a given fingerprint say. What "
        "this ledger says is not known to be true, so this page tells nothing of it: no study, no number, no name."
    )
    yield Paragraph("Keep the ledger's folder as it is, and compare it with the last backup.")


def _answer(facts: LedgerFacts, verdict: Verdict, code: int) -> Answer:
    """How much left and what became of it; without all three claims shown, how much the ledger accounts for."""
    dates = f"{when(facts.first_time)} to {when(facts.last_time)}"
    summaries = many(len(facts.summaries), "summary", "summaries") if facts.summaries else ""
    if code == VERIFIED:
        text = f"{many(verdict.uploads, 'update')} left" if verdict.uploads else "Nothing left"
        text = f"No update left, and {summaries} did" if summaries and not verdict.uploads else text
        detail = (
            f"Verified from {dates}: unchanged, complete by the coordinator's receipts of {when(verdict.copied)}, "
            "under this site's key."
        )
    else:
        text = f"This ledger accounts for {many(verdict.uploads, 'update') if verdict.uploads else 'no update'}"
        detail = f"Not fully verified: {verdict.reason}." if verdict.reason else "Unchanged since it was written."
        detail += f" From {dates}."
    if verdict.uploads:
        text += f", {size(verdict.bytes)}: {_outcome(verdict)}"
    if summaries and (verdict.uploads or code != VERIFIED):
        text += f"; and {summaries} of columns"
    numbers = sum(upload.numbers_alone for study in facts.studies for upload in study.uploads)
    if numbers:
        detail += f" {numbers} of the updates held numbers alone, no tensor."
    return Answer("good" if code == VERIFIED else "open", f"{text}.", detail, _claims(verdict))


def _outcome(verdict: Verdict) -> str:
    if verdict.accepted == verdict.uploads:
        return "accepted by the coordinator" if verdict.uploads == 1 else "all accepted by the coordinator"
    counts = {
        "accepted": verdict.accepted,
        "refused by the coordinator": verdict.refused,
        "without an answer, which counts as having left": verdict.unresolved,
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def _claims(verdict: Verdict) -> tuple[Claim, ...]:
    """The verdict's three: consistent, complete, whose. Each says on what it rests, or that it was not shown."""
    signed = "each line follows from the one before it, and signed heads cover every whole one"
    if verdict.unsigned_tail:
        signed = f"as far as signed heads go; none covers the last {many(verdict.unsigned_tail, 'line')}"
    tail = f"; the last {many(verdict.tail, 'line')} came later and are this site's word alone" if verdict.tail else ""
    complete = f"nothing was cut off, by the coordinator's receipts of {when(verdict.copied)}{tail}"
    whose = f"the key is the site's, by {verdict.whose}"
    return (
        Claim("Unchanged", "open" if verdict.unsigned_tail else "good", signed),
        Claim("Complete", "good", complete) if verdict.complete else Claim("Complete", "open", "not shown: see below"),
        Claim("This site's", "good", whose) if verdict.whose else Claim("This site's", "open", "not shown: see below"),
    )


def _head(facts: LedgerFacts, verdict: Verdict) -> Iterator[Block]:
    if verdict.not_shown:
        yield Items("Not shown:", tuple(verdict.not_shown), open=True)
    yield Paragraph(
        "From this site's own ledger: everything is written there before its first byte is sent. No patient record is "
        "in it, and none is on this page.",
        faint=True,
    )
    newer = f"{many(verdict.tail, 'line')} at its end {'is' if verdict.tail == 1 else 'are'} newer"
    copied = (
        f"{verdict.compared} of the coordinator's, copied {when(verdict.copied)} by its clock; {newer} than the newest "
        "of them"
    )
    control = f"{size(facts.control_bytes)} of messages (announcements, metrics, questions)"
    again = "once" if verdict.resends == 1 else f"{verdict.resends} times"
    rows = {
        "Site": facts.site or "not known",
        "Federation": facts.federation or "not known",
        "From": f"{when(facts.first_time)} to {when(facts.last_time)}, by this site's clock",
        "Receipts": copied if verdict.compared is not None else "no copy of the coordinator's was compared",
        "Ledger key": f"{verdict.ledger_key}, the site's by {verdict.whose or 'nothing that was shown'}",
        "Updates": f"{verdict.uploads}: {verdict.accepted} accepted, {verdict.refused} refused by the coordinator, "
        f"{verdict.unresolved} without an answer",
        "Payload": f"{size(verdict.bytes)} ({verdict.bytes} bytes) of model updates",
        "Sent again": f"{again}, after a broken line or a restart: {size(verdict.resent_bytes)} at most"
        if verdict.resends
        else "",
        "Beside it": control if facts.control_bytes else "not counted",
        "Ledger": ", ".join(filter(None, (verdict.ledger_id, many(verdict.lines, "line")))),
    }
    yield Facts(tuple((name, value) for name, value in rows.items() if value))


def _study(study: StudyFacts, verdict: Verdict) -> Iterator[Block]:
    yield Heading(f"Study {study.name}")
    if study.consents:
        own = f" In it, {study.exposure}." if study.exposure else ""
        yield Paragraph(f"This study was {'; then '.join(study.consents)}.{own}")
    else:
        yield Paragraph("No approval is in the ledger.")
    if study.uploads:
        yield from _left(study)
    else:
        nothing = "Nothing of this study left." if verdict.ok else "This ledger has no update of this study."
        yield Paragraph(nothing)
    if study.approval is not None:
        yield from _stays(study, study.approval)
    if study.decisions:
        yield Heading("Held back or blocked here", 3)
        rows = tuple((decision.time, decision.round, decision.what, decision.why) for decision in study.decisions)
        yield Grid(("time", "round", "what", "why, by whom"), rows, numbers=(1,))


def _summary(summary: SummaryFacts) -> Iterator[Block]:
    yield Heading(f"Summary for {summary.request}")
    yield Paragraph(
        f"On {summary.time}, {summary.by} let these figures of {summary.counted} rows leave. No value of a patient is "
        f"among them; <{summary.least} was told as fewer than {summary.least}, perhaps none. The names here did not "
        "leave."
    )
    yield Grid(HEADS, summary.rows, numbers=(2, 3, 4, 5, 6))


def _left(study: StudyFacts) -> Iterator[Block]:
    yield Heading("What left", 3)
    rows = tuple((row.name, row.dtype, row.shape, str(row.times), str(row.bytes)) for row in study.tensors)
    if rows:
        yield Grid(("tensor", "type", "shape", "times", "bytes in all"), rows, numbers=(3, 4), codes=(0,))
    metrics = sorted({name for upload in study.uploads for name, _ in upload.metrics})
    counts = (
        "no number of rows: masked numbers have them" if study.sums else "the numbers of training and validation rows"
    )
    yield Paragraph(f"Beside them: {', '.join(metrics) or 'no metric'}; {counts}.")
    points = [(upload.round, upload.norm) for upload in study.uploads if upload.norm is not None]
    chart = line_chart(
        "How far each update moved the model", points, x_label="round", y_label="L2 norm of the update, no unit",
        note="An update that is much larger than its neighbors deserves a question.", from_zero=True,
    )  # fmt: skip
    if chart is not None:
        yield chart
    if study.sums:
        yield from _sums(study)
    yield Heading("Every update, and its receipt", 3)
    if any(upload.numbers_alone for upload in study.uploads):
        yield Paragraph("Rows of 0 bytes held metrics alone.", faint=True)
    evaluates = all(upload.validated for upload in study.uploads)
    columns = ("time", "round", "bytes", "tries", "norm", "metrics", "coordinator's answer", "receipt")
    yield Grid(columns, tuple(_row(upload, evaluates) for upload in study.uploads), numbers=(1, 2, 3, 4), codes=(7,))


def _sums(study: StudyFacts) -> Iterator[Block]:
    yield Heading("With whom they were summed", 3)
    yield Paragraph("These updates left with masks: the coordinator learned sums alone, and no update of this site.")
    yield Grid(SUM_HEADS, study.sums, numbers=(0, 2))


def _row(upload: UploadFacts, evaluates: bool) -> tuple[str, ...]:
    return (
        upload.time,
        (f"{upload.round}, evaluated" if evaluates else "closing") if upload.validated else str(upload.round),
        str(upload.bytes),
        str(upload.tries),
        f"{upload.norm:#.3g}".rstrip(".") if upload.norm is not None else "",
        ", ".join(f"{name} {value}" for name, value in upload.metrics),
        upload.answer or "no answer: counts as left",
        upload.receipt[:12],
    )


def _stays(study: StudyFacts, approval: Approval) -> Iterator[Block]:
    """What was approved to stay. That it did is what the tables above show: every tensor that left is in them."""
    yield Heading("What stays here", 3)
    yield Paragraph(
        "The patients' table, every row and every value of it; the site's keys; and, by the approval, of the model:"
    )
    if approval.stays:
        rows = tuple((row.name, row.dtype, row.shape, row.why) for row in approval.stays)
        yield Grid(("tensor", "type", "shape", "why"), rows, 4, codes=(0,))
    else:
        yield Paragraph(f"Everything but the {many(approval.tensors, 'approved tensor')}.")
    both = sorted({row.name for row in approval.stays} & {row.name for row in study.tensors})
    if both:
        yield Paragraph(
            f"Above, these left, under another approval than the newest, which keeps them here: {', '.join(both)}.",
            warning=True,
        )


def _how(facts: LedgerFacts, verdict: Verdict) -> Iterator[Block]:
    yield Heading("Check it yourself")
    yield Paragraph(
        "Offline, on a machine that is not this site's, with your own copy of either program; the second shares no "
        "code with the first. Have the coordinator's operator, not this site, make the copy of the receipts: without "
        "it nobody can tell whether the end was cut off."
    )
    yield Code(HOW)
    yield Paragraph("Compare these with what each side told you on paper:")
    rows = (
        ("Last head", verdict.head),
        ("Ledger key", verdict.ledger_key),
        ("Receipt key", verdict.receipt_key or "not known"),
        ("Authority", facts.authority or "not known"),
    )
    yield Facts(rows, codes=True)
