"""What an operator is told about a study: the status, the full report, and the report as a page that prints.

Participation is told truthfully: a study that finished without some of its sites in some rounds says which.
"""

import datetime
import html
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from sqlalchemy.orm import Session

from coordinator.storage import tables
from coordinator.studies.history import accounts, contributed_rounds, rounds_naming, rounds_of, uploads_of
from coordinator.studies.state import Outcome, Phase, site_states
from coordinator.studies.study import VAL_LOSS, Study
from fl_algorithms.server.best import mean_loss
from fl_algorithms.server.limits import Account
from wardround.terminal import escaped

CHART_WIDTH, CHART_HEIGHT, MARGIN = 640, 200, 44


def status(study: Study, session: Session, busy: frozenset[str], held: frozenset[str] = frozenset()) -> dict[str, Any]:
    """How a study stands, in plain JSON.

    ``busy``: the sites whose update is here and not yet decided; ``held``: where it waits for a person.
    """
    state = study.state
    contributed = contributed_rounds(session, study)
    made = accounts(session, study)
    left_out = rounds_naming(study.rules.sites, [(number, account.left_out) for number, account in made])
    capped = rounds_naming(study.rules.sites, [(number, account.capped) for number, account in made])
    shown = state.round or state.last
    present = state.round.number if state.round else max(state.models, state.last.number if state.last else 0)
    codes = {site: answer.code for site, answer in shown.answers.items() if answer.code} if shown else {}
    states = site_states(state, study.rules, busy, held)
    return {
        "id": study.name,
        "title": study.file.study.title,
        "state": state.phase.value,
        "why": state.why,
        "round": min(present, study.rules.rounds),
        "rounds": study.rules.rounds,
        "attempt": shown.attempt if shown else 0,
        "closing": bool(shown and shown.closing),
        "revision": study.revision,
        "study_digest": study.digest,
        "model_digest": study.newest,
        "best": _best(study),
        "sites": {
            site: {
                "state": states[site],
                "code": codes.get(site, ""),
                "ready": site in state.ready,
                "rounds_contributed": contributed[site],
                "rounds_left_out": left_out[site],
                "rounds_capped": capped[site],
            }
            for site in study.rules.sites
        },
        "incomplete": incomplete(study, contributed),
    }


def full(
    study: Study, session: Session, busy: frozenset[str], federation: str, held: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """All that is known of a study, in plain JSON: the status and every attempt at every round."""
    uploads = {upload.id: upload for upload in uploads_of(session, study.name, study.revision)}
    rows = rounds_of(session, study)
    attempts = [_attempt(row, uploads, study.file.limits.max_weight) for row in rows]
    said = status(study, session, busy, held)
    for site, row in said["sites"].items():
        own = [upload for upload in uploads.values() if upload.site == site]
        row["bytes_received"] = sum(
            upload.received if upload.decision != "accepted" else upload.payload_bytes for upload in own
        )
        row["refused"] = [
            {"round": upload.round, "attempt": upload.attempt, "code": upload.code, "tensor": upload.tensor}
            for upload in own
            if upload.decision == "refused"
        ]
    return said | {
        "federation": federation,
        "created": _utc(study.created_s),
        "told_at": _utc(datetime.datetime.now(datetime.UTC).timestamp()),
        "algorithm": study.file.algorithm.name,
        "model": study.file.model.name,
        "quorum": study.rules.needed,
        "limits": list(study.file.bounds()),
        "initial_digest": study.initial,
        "bytes_per_update": study.bytes_per_update,
        "tensors": [{"name": spec.key, "dtype": spec.dtype, "shape": list(spec.shape)} for spec in study.shared],
        "rounds_closed": [row for row in attempts if row["outcome"] == Outcome.CLOSED and not row["closing"]],
        "attempts": attempts,
        "study": study.file.document(),
    }


def incomplete(study: Study, contributed: dict[str, list[int]]) -> list[str]:
    """The sites of a finished study that are not in every one of its rounds."""
    if study.state.phase != Phase.FINISHED:
        return []
    return [site for site, rounds in contributed.items() if len(rounds) < study.rules.rounds]


def _best(study: Study) -> dict[str, Any] | None:
    if study.best.round is None:
        return None
    return {"round": study.best.round, "val_loss": study.best.loss, "digest": study.best_digest}


def _attempt(row: tables.Round, uploads: dict[str, tables.Upload], max_weight: float) -> dict[str, Any]:
    account = Account.from_document(json.loads(row.account)) if row.account else Account()
    answers = {}
    for site, (kind, code, upload_id) in json.loads(row.answers or "{}").items():
        upload = uploads.get(upload_id)
        answers[site] = {"answer": kind, "code": code, "tensor": upload.tensor if upload else ""}
        if upload and kind == "accepted":
            answers[site] |= {
                "attempt": upload.attempt, "num_examples": upload.num_examples,
                "num_validation": upload.num_validation, "metrics": dict(upload.reported_metrics),
                "update_digest": upload.manifest_sha256,
            }  # fmt: skip
    asked = json.loads(row.asked)
    closed = row.closed_s
    return {
        "round": row.number,
        "attempt": row.attempt,
        "closing": row.closing,
        "outcome": row.outcome or "open",
        "opened": _utc(row.opened_s),
        "closed": _utc(closed) if closed is not None else None,
        "seconds": round(closed - row.opened_s, 4) if closed is not None else None,
        "asked": asked,
        "contributors": [site for site, answer in answers.items() if answer["answer"] == "accepted"],
        "unanswered": [site for site in asked if site not in answers] if closed is not None else [],
        "answers": answers,
        "base_digest": row.base,
        "model_digest": row.model,
        "val_loss": _mean_loss(answers, max_weight),
        **account.document(),
    }


def _mean_loss(answers: dict[str, Any], max_weight: float) -> float | None:
    """The sites' told validation losses of the base model, weighted as the best global model's are."""
    told = [answer for answer in answers.values() if VAL_LOSS in answer.get("metrics", {})]
    return mean_loss([(answer["metrics"][VAL_LOSS], answer["num_validation"]) for answer in told], max_weight)


def page(told: dict[str, Any]) -> str:
    """The full report as one HTML file: no scripts, nothing fetched, fit for paper."""
    title = told["title"] or told["id"]
    missing = ", ".join(told["incomplete"])
    warning = f'<p class="warn">Not in every round: {_text(missing)}</p>' if missing else ""
    why = f" ({_text(told['why'])})" if told["why"] else ""
    best = told["best"]
    facts = [
        ("Study", f"{told['id']}, revision {told['revision']}, federation {told['federation']}"),
        ("State", f"{told['state']}, round {told['round']} of {told['rounds']}"),
        (
            "Method",
            f"{told['algorithm']} on model {told['model']}; quorum {told['quorum']} of {len(told['sites'])} sites",
        ),
        ("Limits", "; ".join(told["limits"])),
        ("Each update", f"{told['bytes_per_update']:,} bytes in {len(told['tensors'])} tensors"),
        ("Best global model", f"round {best['round']}, validation loss {best['val_loss']:.4g}" if best else "none"),
        ("Study digest", told["study_digest"]),
        ("Initial model", told["initial_digest"]),
        ("Newest model", told["model_digest"]),
    ]
    sites = [_site_row(site, row, told["rounds"]) for site, row in told["sites"].items()]
    rounds = [_round_row(row) for row in told["attempts"]]
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{_text(title)}</h1><p>{_text(told['state'])}{why}; told at {_text(told['told_at'])}</p>{warning}",
            _table((), facts, "facts"),
            "<h2>Validation loss of each round's base model</h2>",
            _chart([(row["round"] - 1, row["val_loss"]) for row in told["attempts"] if row["val_loss"] is not None]),
            "<h2>Sites</h2>",
            _table(("site", "state", "rounds", "bytes received", "refused"), sites, "sites"),
            "<h2>Rounds</h2>",
            _table(
                ("round", "attempt", "outcome", "contributed", "did not", "seconds", "loss of base", "model"),
                rounds,
                "rounds",
            ),
            "</body></html>\n",
        ]
    )


def _site_row(site: str, row: dict[str, Any], rounds: int) -> tuple[str, ...]:
    refused = (f"round {one['round']}: {one['code']} {one['tensor']}".strip() for one in row["refused"])
    state = f"{row['state']} ({row['code']})" if row["code"] else row["state"]
    return (
        site,
        state,
        f"{len(row['rounds_contributed'])} of {rounds}",
        f"{row['bytes_received']:,}",
        ", ".join(refused),
    )


def _round_row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        "closing" if row["closing"] else str(row["round"]),
        str(row["attempt"]),
        row["outcome"],
        ", ".join(_contributor(site, row) for site in row["contributors"]),
        "; ".join(_absence(site, row) for site in row["asked"] if site not in row["contributors"]),
        "" if row["seconds"] is None else f"{row['seconds']:.2f}",
        "" if row["val_loss"] is None else f"{row['val_loss']:.4g}",
        row["model_digest"] or "",
    )


def _contributor(site: str, row: dict[str, Any]) -> str:
    return f"{site} (counts for {row['shares'][site]:.3g}, less than its rows)" if site in row["capped"] else site


def _absence(site: str, row: dict[str, Any]) -> str:
    answer = row["answers"].get(site)
    if site in row["left_out"]:
        return f"{site}: accepted and left out, {row['left_out'][site]}"
    return f"{site}: {answer['answer']} {answer['code']} {answer['tensor']}".strip() if answer else f"{site}: no answer"


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], kind: str) -> str:
    head = "<tr>" + "".join(f"<th>{_text(text)}</th>" for text in heads) + "</tr>" if heads else ""
    body = "".join("<tr>" + "".join(f"<td>{_text(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f'<table class="{kind}">{head}{body}</table>'


def _chart(points: list[tuple[int, float]]) -> str:
    """A line of the losses by round, as inline SVG."""
    if len(points) < 2:
        return "<p>Too few rounds have told a loss.</p>"
    first, last = points[0][0], points[-1][0]
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    across, up = max(1, last - first), (high - low) or 1.0

    def place(number: int, loss: float) -> tuple[float, float]:
        x = MARGIN + (number - first) / across * (CHART_WIDTH - 2 * MARGIN)
        return x, CHART_HEIGHT - MARGIN / 2 - (loss - low) / up * (CHART_HEIGHT - MARGIN)

    places = [place(number, loss) for number, loss in points]
    lines = "".join(
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>' for (x1, y1), (x2, y2) in pairwise(places)
    )
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>model {number}: {loss:.4g}</title></circle>'
        for (x, y), (number, loss) in zip(places, points, strict=True)
    )
    labels = (
        f'<text x="2" y="14">{high:.4g}</text><text x="2" y="{CHART_HEIGHT - 8}">{low:.4g}</text>'
        f'<text x="{MARGIN}" y="{CHART_HEIGHT - 2}">model {first}</text>'
        f'<text x="{CHART_WIDTH - MARGIN}" y="{CHART_HEIGHT - 2}" text-anchor="end">model {last}</text>'
    )
    return f'<svg viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT}" role="img">{lines}{dots}{labels}</svg>'


def _text(text: str) -> str:
    return html.escape(escaped(str(text)))


def _utc(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #111 }
table { border-collapse: collapse; width: 100%; margin: 0 0 1rem } th { text-align: left }
th, td { border-bottom: 1px solid #ccc; padding: .25rem .5rem; vertical-align: top; overflow-wrap: anywhere }
th, .rounds td:first-child, .rounds td:nth-child(3) { overflow-wrap: normal; white-space: nowrap }
.facts td:first-child { white-space: nowrap; font-weight: 600 } .rounds td:last-child { font: 11px monospace }
.warn { border: 2px solid #b00; padding: .5rem } svg { width: 100%; max-width: 40rem }
svg line { stroke: #125; stroke-width: 2 } svg circle { fill: #125 } svg text { font: 11px sans-serif }
@media print { body { margin: 0; max-width: none } tr { break-inside: avoid } }
"""
