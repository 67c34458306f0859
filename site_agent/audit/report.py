"""One page that a data protection officer reads and prints: what left, what never left, and how to check it.

No script, no picture from elsewhere, nothing that moves: the page says the same in ten years. It is made from the
ledger and the consents alone, so two makings of the same ledger are the same bytes. Of a changed ledger it says what is
known, the first bad line, and no number: none of them is a fact.
"""

import html
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from site_agent.audit.files import LedgerFiles
from site_agent.audit.form import records
from site_agent.audit.verify import TAMPERED, VERIFIED, Verdict
from site_agent.gateway.consent.facts import size
from site_agent.state.directory import exposed, tensor_rows
from wardround.errors import BadData
from wardround.signing import canonical
from wardround.terminal import escaped

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 200, 70, 30, 14, 14
STYLE = """
:root { color-scheme: light; --ink: #1b1b1b; --faint: #5c5c5c; --line: #cfcfcf; --good: #14632f; --bad: #9c1414;
  --open: #7a4b00; --norm: #1f4e8c; }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, "Segoe UI", "Liberation Sans", Arial, sans-serif; color: var(--ink);
  max-width: 58rem; margin: 2rem auto; padding: 0 1.25rem; background: #fff; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
p { margin: .4rem 0; } .faint { color: var(--faint); }
li { overflow-wrap: anywhere; }
.verdict { border-left: 5px solid; padding: .6rem .9rem; margin: 1rem 0; background: #f6f6f6; font-weight: 600; }
.verified { color: var(--good); } .changed { color: var(--bad); } .open { color: var(--open); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: .4rem 0 1rem; font-size: .875rem; }
th, td { text-align: left; padding: .28rem .6rem .28rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; border-bottom: 2px solid var(--line); } .n { text-align: right; white-space: nowrap; }
td.code { white-space: nowrap; }
td.name, td.code, code, pre { font-family: ui-monospace, "Liberation Mono", Menlo, monospace; font-size: .82rem;
  overflow-wrap: anywhere; }
pre { background: #f6f6f6; padding: .7rem .9rem; white-space: pre-wrap; } svg { max-width: 100%; height: auto; }
dl.facts { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; margin: .8rem 0; }
dl.facts dt { color: var(--faint); } dl.facts dd { margin: 0; overflow-wrap: anywhere; }
@page { margin: 18mm 16mm; }
@media print { .scroll { overflow: visible; }
  body { margin: 0; max-width: none; padding: 0; font-size: 10.5pt; } h2, h3 { break-after: avoid; }
  tr, svg, .verdict, pre { break-inside: avoid; } thead { display: table-header-group; } }
"""


@dataclass
class _Study:
    uploads: list[dict[str, Any]] = field(default_factory=list)
    others: list[dict[str, Any]] = field(default_factory=list)  # blocked, held, released, rejected, consent
    consent: dict[str, Any] | None = None
    tries: dict[str, int] = field(default_factory=dict)  # of uploads that were sent again, by id


def page(ledgers: Sequence[LedgerFiles], consents: Mapping[str, bytes], verdict: Verdict, code: int) -> str:
    """The page.

    Args:
        ledgers: of one site, oldest first. consents: the approvals, STUDY.json each.
        verdict: what verification said of the ledgers, with its exit code.

    Raises:
        BadData: a line of the ledger, or a consent, cannot be read.
    """
    if code == TAMPERED:
        return _document("A ledger that was changed", _changed(verdict))
    studies: dict[str, _Study] = defaultdict(_Study)
    receipts: dict[str, dict[str, Any]] = {}
    identity: dict[str, Any] = {}
    control = 0
    first = last = ""
    for record in chain.from_iterable(map(records, ledgers)):
        first, last = first or record["ts"], record["ts"]
        match record["type"]:
            case "upload":
                studies[record["study"]].uploads.append(record)
            case "resend":
                studies[record["study"]].tries[record["upload_id"]] = record["try"]
            case "receipt":
                receipts[record["upload_id"]] = json.loads(record["envelope"]["payload"])
            case "identity":
                identity = record
            case "control":
                control += record["bytes"]
            case "consent" | "blocked" | "held" | "released" | "rejected":
                studies[record["study"]].others.append(record)
    for name, data in consents.items():
        studies[name.removesuffix(".json")].consent = _approved(name, data)
    body = [
        _head(identity, first, last, verdict, code, control),
        *(_study(name, study, receipts) for name, study in sorted(studies.items())),
        _how(verdict, identity),
    ]
    return _document(f"What left {identity.get('site', 'this site')}", "".join(body))


def _document(title: str, body: str) -> str:
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{_e(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<style>{STYLE}</style>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )


def _approved(name: str, data: bytes) -> dict[str, Any]:
    """A consent as far as the page shows it: ``leaves``, ``stays`` and ``apart``.

    Raises:
        BadData: the file is damaged.
    """
    try:
        consent = canonical.read(data)
        tensor_rows(consent["stays"])
        if not isinstance(consent["leaves"], list):
            raise TypeError
    except (BadData, KeyError, TypeError, ValueError, AttributeError):
        raise BadData(
            f"consents/{escaped(name, 80)} is damaged: it holds no consent", hint="restore it from a backup"
        ) from None
    return consent  # type: ignore[no-any-return]


def _head(
    identity: dict[str, Any], first: str, last: str, verdict: Verdict, code: int, control: int
) -> str:  # fmt: skip
    made = f"the coordinator's receipts of {_when(verdict.copied)}" if verdict.copied else ""
    if code == VERIFIED:
        kind = "verified"
        said = f"Verified from {_when(first)} to {_when(last)}: unchanged, complete by {made}, under this site's key."
    else:
        kind = "open"
        said = f"Not fully verified: {verdict.reason}." if verdict.reason else "Unchanged since it was written."
        said += f" From {_when(first)} to {_when(last)}."
    missing = "".join(f"<li>{_e(one)}</li>" for one in verdict.not_shown)
    shown = f'<p class="verdict open">Not shown:</p>\n<ul>{missing}</ul>\n' if missing else ""
    facts = {
        "Site": identity.get("site", "not known"),
        "Federation": identity.get("federation", "not known"),
        "From": f"{_when(first)} to {_when(last)}, by this site's clock",
        "Receipts": f"{verdict.compared} of the coordinator's, copied {_when(verdict.copied)} by its clock; "
        f"{verdict.tail} lines at its end are newer than the newest of them"
        if verdict.compared is not None
        else "no copy of the coordinator's was compared",
        "Ledger key": f"{verdict.ledger_key}, the site's by {verdict.whose or 'nothing that was shown'}",
        "Updates": f"{verdict.uploads}: {verdict.accepted} accepted, {verdict.refused} refused by the coordinator, "
        f"{verdict.unresolved} without an answer",
        "Payload": f"{size(verdict.bytes)} ({verdict.bytes} bytes) of model updates",
        **({"Sent again": _again(verdict)} if verdict.resends else {}),
        "Beside it": f"{size(control)} of messages (announcements, metrics, questions)" if control else "not counted",
        "Ledger": f"{verdict.ledger_id}, {verdict.lines} lines" if verdict.ledger_id else f"{verdict.lines} lines",
    }
    listed = "".join(f"<dt>{_e(name)}</dt><dd>{_e(value)}</dd>" for name, value in facts.items())
    return (
        f"<h1>What left {_e(identity.get('site', 'this site'))}</h1>\n"
        "<p class=faint>From this site's own ledger: everything is written there before its first byte is sent. "
        "No patient record is in it, and none is on this page.</p>\n"
        f'<p class="verdict {kind}">{_e(said)}</p>\n{shown}<dl class="facts">{listed}</dl>\n'
    )


def _study(name: str, study: _Study, receipts: dict[str, dict[str, Any]]) -> str:
    parts = [f"<h2>Study {_e(name)}</h2>\n", _approval(study)]
    if study.uploads:
        parts += ["<h3>What left</h3>\n", _left(study.uploads), _norms(study.uploads), _updates(study, receipts)]
    else:
        parts.append("<p>Nothing of this study left.</p>\n")
    if study.consent is not None:
        parts.append(_stayed(study.consent))
    decisions = [record for record in study.others if record["type"] != "consent"]
    if decisions:
        rows = [
            (_when(record["ts"]), str(record.get("round", "")), record["type"], _decision(record))
            for record in decisions
        ]
        parts += ["<h3>Held back or blocked here</h3>\n", _table(("time", "round", "what", "why, by whom"), rows, (1,))]
    return "".join(parts)


def _approval(study: _Study) -> str:
    said = [
        f"{record['event']} by {record.get('by', {}).get('name', 'somebody')} on {_when(record['ts'])}"
        for record in study.others
        if record["type"] == "consent"
    ]
    if not said:
        return "<p>No approval is in the ledger.</p>\n"
    exposures = [str(record.get("exposure", "")) for record in study.others if record["type"] == "consent"]
    apart = str((study.consent or {}).get("apart", ""))
    shown = f" In it, {exposed(exposures[-1], apart)}." if exposures[-1] else ""
    return f"<p>This study was {_e('; then '.join(said))}.{_e(shown)}</p>\n"


def _left(uploads: list[dict[str, Any]]) -> str:
    """Each tensor that ever left: how often, how many bytes in all."""
    tensors: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for upload in uploads:
        for row in upload["tensors"]:
            tensors[row["name"], row["dtype"], " × ".join(map(str, row["shape"])) or "1"].append(row["bytes"])
    rows = [(*key, str(len(sizes)), str(sum(sizes))) for key, sizes in tensors.items()]
    told = sorted({metric["name"] for upload in uploads for metric in upload["metrics"]})
    numbers = f"Beside them: {', '.join(told) or 'no metric'}; the numbers of training and validation rows."
    return _table(("tensor", "type", "shape", "times", "bytes in all"), rows, (3, 4), (0,)) + f"<p>{_e(numbers)}</p>\n"


def _stayed(consent: dict[str, Any]) -> str:
    if consent.get("stays"):
        rows = [
            (row["name"], row["dtype"], " × ".join(map(str, row["shape"])) or "1", row.get("why", ""))
            for row in consent["stays"]
        ]
        shown = _table(("tensor", "type", "shape", "why"), rows, (), (0,))
    else:
        shown = f"<p>Everything but the {len(consent['leaves'])} approved tensors above.</p>\n"
    return (
        "<h3>What never left</h3>\n<p>The patients' table, every row and every value of it; the site's keys; and of "
        f"the model:</p>\n{shown}"
    )


def _updates(study: _Study, receipts: dict[str, dict[str, Any]]) -> str:
    rows = []
    for upload in study.uploads:
        receipt = receipts.get(upload["upload_id"])
        answer = "no answer: counts as left" if receipt is None else f"{receipt['decision']} {receipt['code']}".strip()
        told = ", ".join(f"{metric['name']} {metric['value']}" for metric in upload["metrics"])
        signed = receipt["receipt_id"][:12] if receipt is not None else ""
        tries = str(study.tries.get(upload["upload_id"], 1))
        rows.append((
            _when(upload["ts"]), _round(upload), str(upload["payload_bytes"]), tries, _norm_text(upload), told,
            answer, signed,
        ))  # fmt: skip
    closing = "" if all(upload["tensors"] for upload in study.uploads) else "Rows of 0 bytes told metrics alone."
    return f"<h3>Every update, and its receipt</h3>\n<p class=faint>{closing}</p>\n" + _table(
        ("time", "round", "bytes", "tries", "norm", "metrics", "coordinator's answer", "receipt"), rows, (1, 2, 3, 4),
        (), (7,),
    )  # fmt: skip


def _round(upload: dict[str, Any]) -> str:
    return "closing" if upload.get("kind") == "validate" else str(upload["round"])


def _again(verdict: Verdict) -> str:
    times = "once" if verdict.resends == 1 else f"{verdict.resends} times"
    return f"{times}, after a broken line or a restart: {size(verdict.resent_bytes)} at most"


def _decision(record: dict[str, Any]) -> str:
    by = f"by {record['by']['name']}" if "by" in record else ""
    return "; ".join(text for text in (str(record.get("what", "")), str(record.get("rule", "")), by) if text)


def _norm(upload: dict[str, Any]) -> float | None:
    """The L2 norm of a whole update, from its tensors' norms; None where there is none."""
    try:
        squares = [float(row["l2"]) ** 2 for row in upload["tensors"]]
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    norm = math.sqrt(sum(squares))
    return norm if squares and math.isfinite(norm) else None


def _norm_text(upload: dict[str, Any]) -> str:
    norm = _norm(upload)
    return f"{norm:.3g}" if norm is not None else ""


def _norms(uploads: list[dict[str, Any]]) -> str:
    """The updates' norms over the rounds, as a drawing that needs no script."""
    points = [(upload["round"], norm) for upload in uploads if (norm := _norm(upload)) is not None]
    if len(points) < 2:
        return ""
    top = max(norm for _, norm in points) or 1.0
    step = 10 ** math.floor(math.log10(top))
    step = step / 2 if top / step < 3 else step * 2 if top / step > 6 else step
    ceiling = math.ceil(top / step) * step
    low, high = min(round_ for round_, _ in points), max(round_ for round_, _ in points)
    across = (WIDTH - LEFT - RIGHT) / max(1, high - low)

    def place(round_: int, norm: float) -> tuple[float, float]:
        return LEFT + (round_ - low) * across, HEIGHT - BOTTOM - norm / ceiling * (HEIGHT - BOTTOM - TOP)

    drawn = []
    for index in range(round(ceiling / step) + 1):
        _, y = place(low, index * step)
        drawn.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dcdcdc"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{index * step:.3g}</text>'
        )
    for round_ in range(low, high + 1, max(1, (high - low) // 10)):
        x, _ = place(round_, 0)
        drawn.append(f'<text x="{x:.1f}" y="{HEIGHT - 10}" text-anchor="middle">{round_}</text>')
    line = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in points)
    drawn.append(f'<polyline points="{line}" fill="none" stroke="#1f4e8c" stroke-width="1.5"/>')
    drawn += ['<circle cx="{:.1f}" cy="{:.1f}" r="2.5" fill="#1f4e8c"/>'.format(*place(*point)) for point in points]
    label = f"Norm of each update over the rounds, {low} to {high}; the largest is {top:.3g}"
    return (
        f'<h3>How far each update moved the model</h3>\n<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img" aria-label="{label}" font-size="11" fill="#5c5c5c">{"".join(drawn)}</svg>\n'
        f"<p class=faint>{label}. An update that is much larger than its neighbours deserves a question.</p>\n"
    )


def _changed(verdict: Verdict) -> str:
    where = f"Line {verdict.first_bad} of {verdict.ledger or 'the ledger'}" if verdict.first_bad else "It"
    return (
        "<h1>This ledger was changed</h1>\n"
        f'<p class="verdict changed">CHANGED: {_e(verdict.reason)}.</p>\n'
        f"<p>{_e(where)} is not as it was written. What the ledger says after that is not known to be true, so this "
        "page tells nothing of it: no study, no number, no name.</p>\n"
        "<p>Keep the ledger's folder as it is, and compare it with the last backup.</p>\n"
    )


def _how(verdict: Verdict, identity: dict[str, Any]) -> str:
    return (
        "<h2>Check it yourself</h2>\n<p>Offline, on a machine that is not this site's, with your own copy of either "
        "program; the second shares no code with the first:</p>\n"
        "<pre>site-agent audit verify --ledger LEDGER --receipts receipts.jsonl\n"
        "python verify_ledger.py LEDGER --receipts receipts.jsonl</pre>\n"
        "<p>Ask the coordinator's operator for <code>coordinator receipts SITE --out receipts.jsonl</code>, not this "
        "site: without it nobody can tell whether the end was cut off. Compare these with what each side told you on "
        'paper:</p>\n<dl class="facts">'
        f"<dt>Last head</dt><dd><code>{_e(verdict.head)}</code></dd>"
        f"<dt>Ledger key</dt><dd><code>{_e(verdict.ledger_key)}</code></dd>"
        f"<dt>Receipt key</dt><dd><code>{_e(verdict.receipt_key or 'not known')}</code></dd>"
        f"<dt>Authority</dt><dd><code>{_e(identity.get('authority_sha256', 'not known'))}</code></dd></dl>\n"
    )


def _table(
    head: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    right: tuple[int, ...] = (),
    names: tuple[int, ...] = (),
    codes: tuple[int, ...] = (),
) -> str:
    """``right``: columns of numbers; ``names``: in a fixed-width face; ``codes``: the same, never broken."""
    kinds = [
        "n" if index in right else "name" if index in names else "code" if index in codes else ""
        for index in range(len(head))
    ]
    marks = [f' class="{kind}"' if kind else "" for kind in kinds]
    top = "".join(f"<th{mark if kind == 'n' else ''}>{_e(text)}</th>"
                  for mark, kind, text in zip(marks, kinds, head, strict=True))  # fmt: skip
    lines = "".join(
        "<tr>" + "".join(f"<td{mark}>{_e(text)}</td>" for mark, text in zip(marks, row, strict=True)) + "</tr>\n"
        for row in rows
    )
    return f"<div class=scroll>\n<table>\n<thead><tr>{top}</tr></thead>\n<tbody>\n{lines}</tbody>\n</table>\n</div>\n"


def _when(text: str) -> str:
    """A time as a person reads it: to the minute, UTC."""
    return f"{text[:10]} {text[11:16]} UTC" if len(text) >= 16 else text


def _e(text: Any) -> str:
    return html.escape(escaped(str(text)))
