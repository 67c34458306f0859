"""What an operator hears about a study: its status, the full report, and the report as a page that prints.

A study that finished without some of its sites in some rounds says which.
"""

import datetime
import html
import json
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from coordinator.answers import (
    AcceptedUpdate,
    AttemptReport,
    BestRound,
    RefusedUpload,
    SiteAnswer,
    SiteReport,
    SiteStatus,
    StudyReport,
    StudyStatus,
    TensorRow,
)
from coordinator.storage import database
from coordinator.storage.database import Records, Upload
from coordinator.studies.lifecycle import Kind, Outcome, Phase, site_states
from coordinator.studies.study import VAL_LOSS, Study, accounts, contributed_rounds, rounds_of
from fl_algorithms.server.best import mean_loss
from fl_algorithms.server.limits import Account
from wardround.terminal import escaped

CHART_WIDTH, CHART_HEIGHT, MARGIN = 640, 200, 44


def status(study: Study, records: Records, busy: frozenset[str], held: frozenset[str] = frozenset()) -> StudyStatus:
    """How a study stands.

    Args:
        busy: the sites whose update is here and not yet decided.
        held: the sites whose update waits for a person there.
    """
    life = study.life
    contributed = contributed_rounds(study, records)
    made = accounts(study, records)
    left_out = rounds_of(study.rules.sites, [(number, account.left_out) for number, account in made])
    capped = rounds_of(study.rules.sites, [(number, account.capped) for number, account in made])
    shown = life.round or life.last
    present = life.round.number if life.round else max(life.models, life.last.number if life.last else 0)
    codes = {site: answer.code for site, answer in shown.answers.items() if answer.code} if shown else {}
    states = site_states(life, study.rules, busy, held)
    return StudyStatus(
        id=study.name,
        title=study.file.study.title,
        state=life.phase.value,
        why=life.why,
        round=min(present, study.rules.rounds),
        rounds=study.rules.rounds,
        attempt=shown.attempt if shown else 0,
        closing=bool(shown and shown.closing),
        revision=study.revision,
        study_digest=study.digest,
        model_digest=study.newest,
        best=_best(study),
        sites={
            site: SiteStatus(
                state=states[site],
                code=codes.get(site, ""),
                ready=site in life.ready,
                rounds_contributed=tuple(contributed[site]),
                rounds_left_out=tuple(left_out[site]),
                rounds_capped=tuple(capped[site]),
            )
            for site in study.rules.sites
        },
        incomplete=incomplete(study, contributed),
    )


def full(
    study: Study, records: Records, busy: frozenset[str], federation: str, held: frozenset[str] = frozenset()
) -> StudyReport:
    """All that is known of a study: its status, and every attempt at every round. Arguments as of ``status``."""
    uploads = {upload.id: upload for upload in records.uploads_of(study.name, study.revision)}
    rows = records.all(database.rounds, study=study.name, revision=study.revision)
    attempts = tuple(_attempt(row, uploads, study.file.limits.max_weight) for row in rows)
    standing = status(study, records, busy, held)
    return StudyReport(
        **{name: getattr(standing, name) for name in StudyStatus.model_fields if name != "sites"},
        sites={site: _site(row, site, uploads.values()) for site, row in standing.sites.items()},
        federation=federation,
        created=_utc(study.created_s),
        told_at=_utc(datetime.datetime.now(datetime.UTC).timestamp()),
        algorithm=study.file.algorithm.name,
        model=study.file.model.name,
        quorum=study.rules.needed,
        limits=tuple(study.file.bounds()),
        best_rule=best_rule(study),
        initial_digest=study.initial,
        bytes_per_update=study.bytes_per_update,
        tensors=tuple(TensorRow(name=spec.key, dtype=spec.dtype, shape=tuple(spec.shape)) for spec in study.shared),
        rounds_closed=tuple(row for row in attempts if row.outcome == Outcome.CLOSED and not row.closing),
        attempts=attempts,
        study=study.file.document(),
    )


def incomplete(study: Study, contributed: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    """The sites of a finished study that are not in every one of its rounds."""
    if study.life.phase != Phase.FINISHED:
        return ()
    return tuple(site for site, rounds in contributed.items() if len(rounds) < study.rules.rounds)


def best_rule(study: Study) -> str:
    """How the best global model is chosen, in words; "" for a method that has no one global model."""
    if not study.one_global_model:
        return ""
    most = study.file.limits.max_weight
    capped = f"; where three or more report one, no site weighs more than {most:g}" if most < 1 else ""
    return (
        "the best global model is that of the round with the smallest mean of the sites' validation losses, "
        f"each weighted by the site's validation rows as reported{capped}"
    )


def _best(study: Study) -> BestRound | None:
    if study.best.round is None:
        return None
    return BestRound(round=study.best.round, val_loss=study.best.loss, digest=study.best_digest)


def _site(standing: SiteStatus, site: str, uploads: Collection[Upload]) -> SiteReport:
    own = [upload for upload in uploads if upload.site == site]
    return SiteReport(
        **{name: getattr(standing, name) for name in SiteStatus.model_fields},
        bytes_received=sum(
            upload.received if upload.decision != "accepted" else upload.payload_bytes for upload in own
        ),
        refused=tuple(
            RefusedUpload(round=upload.round, attempt=upload.attempt, code=upload.code, tensor=upload.tensor)
            for upload in own
            if upload.decision == "refused"
        ),
    )


def _attempt(row: database.Row, uploads: Mapping[str, Upload], max_weight: float) -> AttemptReport:
    account = Account.from_document(json.loads(row["account"])) if row["account"] else Account()
    answers = {
        site: _answer(kind, code, uploads.get(upload_id))
        for site, (kind, code, upload_id) in json.loads(row["answers"] or "{}").items()
    }
    asked = json.loads(row["asked"])
    closed = row["closed_s"]
    return AttemptReport(
        round=row["number"],
        attempt=row["attempt"],
        closing=row["closing"],
        outcome=row["outcome"] or "open",
        opened=_utc(row["opened_s"]),
        closed=_utc(closed) if closed is not None else None,
        seconds=round(closed - row["opened_s"], 4) if closed is not None else None,
        asked=tuple(asked),
        contributors=tuple(site for site, answer in answers.items() if answer.answer == Kind.ACCEPTED),
        unanswered=tuple(site for site in asked if site not in answers) if closed is not None else (),
        answers=answers,
        base_digest=row["base"],
        model_digest=row["model"],
        val_loss=_mean_loss(answers, max_weight),
        norms=account.norms,
        limits=account.limits,
        shares=account.shares,
        capped=account.capped,
        left_out=account.left_out,
    )


def _answer(kind: str, code: str, upload: Upload | None) -> SiteAnswer:
    tensor = upload.tensor if upload else ""
    if upload is None or kind != Kind.ACCEPTED:
        return SiteAnswer(answer=kind, code=code, tensor=tensor)
    return AcceptedUpdate(
        answer=kind, code=code, tensor=tensor, attempt=upload.attempt, num_examples=upload.num_examples,
        num_validation=upload.num_validation, metrics=dict(upload.metrics), update_digest=upload.manifest_sha256,
    )  # fmt: skip


def _mean_loss(answers: Mapping[str, SiteAnswer], max_weight: float) -> float | None:
    """The mean of the sites' validation losses of the model that they downloaded, by the rule of ``best_rule``."""
    reported = [
        (answer.metrics[VAL_LOSS], answer.num_validation)
        for answer in answers.values()
        if isinstance(answer, AcceptedUpdate) and VAL_LOSS in answer.metrics
    ]
    return mean_loss(reported, max_weight)


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
        ("Rule", told["best_rule"]),
        ("Study digest", told["study_digest"]),
        ("Initial model", told["initial_digest"]),
        ("Newest model", told["model_digest"]),
    ]
    sites = [_site_row(site, row, told["rounds"]) for site, row in told["sites"].items()]
    rounds = [_round_row(row) for row in told["attempts"]]
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
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
    return f'<div class="scroll"><table class="{kind}">{head}{body}</table></div>'


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
th, td { border-bottom: 1px solid #ccc; padding: .25rem .5rem; vertical-align: top }
th, .rounds td:first-child, .rounds td:nth-child(3) { white-space: nowrap }
.scroll { overflow-x: auto } .facts td, .sites td:last-child { overflow-wrap: anywhere }
.facts td:first-child { white-space: nowrap; font-weight: 600 }
.rounds td:last-child { font: 11px monospace; overflow-wrap: anywhere; min-width: 16em }
.warn { border: 2px solid #b00; padding: .5rem } svg { width: 100%; max-width: 40rem }
svg line { stroke: #125; stroke-width: 2 } svg circle { fill: #125 } svg text { font: 11px sans-serif }
@media print { .scroll { overflow: visible } body { margin: 0; max-width: none } tr { break-inside: avoid } }
"""
