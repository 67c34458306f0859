"""A study's model as files for people: weights, card, study, and the scale where the study gives it. No torch.

The weights are what a site downloads: of most methods all that a network shares. What stays at each site is not here,
nor any statistics of patients; the card says so.
"""

import datetime
import json
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

from coordinator.models import Which
from coordinator.storage.blobs import Blobs
from coordinator.study_answers import AcceptedUpdate, AttemptReport, StudyReport
from fl_algorithms.portable import card as cards
from fl_algorithms.portable.card import CARD_FILE, MODEL_FILE, PAGE_FILE, STUDY_FILE
from fl_algorithms.server.aggregator import ServerAggregator, everything, server_aggregator
from fl_algorithms.study import ResolvedStudy
from wardround import __version__
from wardround.errors import UsageProblem
from wardround.local import outputs
from wardround.local.writing import Buffer
from wardround.records.schema import Strict
from wardround.records.study import StudyFile
from wardround.signing import canonical
from wardround.tensors.files import TensorFile, ViewFile, file_header
from wardround.tensors.manifests import MODEL, TensorSpec, view

NOT_HERE = (
    "The digests of the sites' data are not known at the coordinator: each site's ledger and model card name its own.",
    "Scores are what the sites reported of this model on their own validation rows, as the study lets them leave.",
)


class Lineage(Strict):
    """A round that this model is made of. ``left_out``: sites whose update was accepted and is not in it."""

    round: int
    attempt: int
    closed: str | None
    model_digest: str | None
    contributors: tuple[str, ...]
    left_out: tuple[str, ...]
    absent: tuple[str, ...]


class ModelCard(Strict):
    """Where a study's model comes from, and how good the sites said it is.

    Attributes:
        model: which one it is of the study's. ``round``: that made it.
        state: of the study when the card was made: it may go on.
        site: whose download it is, where sites download different tensors; "" where they do not.
        model_digest: of the exported tensors. ``kept_digest``: of what the coordinator keeps, which may be more.
        evaluators: the sites that train nothing.
        contributors, capped, left_out: by site the rounds to which it contributed, in which it counted for less than
            its rows, and in which its update is not in the model; of those rounds that made this model.
        scores: by site the metrics that it reported of this model.
        why: which model is the best one, in words; "" of the latest.
    """

    study: str
    title: str
    revision: int
    study_digest: str
    federation: str
    model: Which
    round: int
    rounds: int
    state: str
    site: str
    algorithm: str
    architecture: str
    model_digest: str
    kept_digest: str
    initial_digest: str
    contributors: Mapping[str, tuple[int, ...]]
    capped: Mapping[str, tuple[int, ...]]
    left_out: Mapping[str, tuple[int, ...]]
    evaluators: tuple[str, ...]
    lineage: tuple[Lineage, ...]
    scores: Mapping[str, Mapping[str, str]]
    why: str
    limits: tuple[str, ...]
    created: str
    wardround: str


def export(
    report: StudyReport, blobs: Blobs, which: Which, site: str, out: Path, *, force: bool = False, keep: Path
) -> list[Path]:
    """Write a study's model into the folder ``out``, new or empty unless ``force``. Returns the files.

    Args:
        site: whose download, where sites download different tensors; "" for the only one.
        keep: the state directory, which is never written into.

    Raises:
        UsageProblem: there is no such model yet, or ``site`` must be given, or is none of the study's.
        DamagedModel: neither copy of it is whole.
        CannotWrite, NotPermitted: ``out`` does not take it.
    """
    outputs.folder(out, force=force, keep=[keep])
    number, digest = chosen(report, which)
    study = ResolvedStudy(StudyFile.from_document(report.study))
    aggregator = server_aggregator(study, _specs(report))
    site = _site(report, aggregator, site)
    with TensorFile(blobs.whole_model(digest)) as kept:
        sources = aggregator.sources(kept, site, number + 1)
        manifest = view(kept.manifest(), sources, aggregator.download_of(site))
        card = card_of(report, which, number, digest, site, manifest.digest())
        text = json.dumps(card.model_dump(mode="json"), sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
        header = file_header([entry.spec for entry in manifest.entries], {"card": text})
        files: dict[str, Buffer | Iterable[Buffer]] = {
            CARD_FILE: f"{text}\n".encode(),
            STUDY_FILE: canonical.dumps(report.study),
            PAGE_FILE: page(card).encode(),
            MODEL_FILE: chain([header], (data for _, data in ViewFile(kept, sources).chunks())),
        }
        return outputs.fill(out, files, force=force, keep=[keep], mode=0o644)


def card_of(
    report: StudyReport, which: Which, number: int, kept_digest: str, site: str, model_digest: str
) -> ModelCard:
    """The card of the model that round ``number`` made."""
    made = [row for row in report.rounds_closed if row.round <= number]

    def of_sites(rounds: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        return {name: tuple(one for one in numbers if one <= number) for name, numbers in rounds.items()}

    return ModelCard(
        study=report.id,
        title=report.title,
        revision=report.revision,
        study_digest=report.study_digest,
        federation=report.federation,
        model=which,
        round=number,
        rounds=report.rounds,
        state=report.state,
        site=site,
        algorithm=report.algorithm,
        architecture=report.model,
        model_digest=model_digest,
        kept_digest=kept_digest,
        initial_digest=report.initial_digest,
        contributors=of_sites({name: row.rounds_contributed for name, row in report.sites.items()}),
        capped=of_sites({name: row.rounds_capped for name, row in report.sites.items()}),
        left_out=of_sites({name: row.rounds_left_out for name, row in report.sites.items()}),
        evaluators=tuple(name for name, row in report.sites.items() if row.evaluates),
        lineage=tuple(_lineage(row, report) for row in made),
        scores=_scores(report, kept_digest),
        why=report.best_rule if which == "best" else "",
        limits=report.limits,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        wardround=__version__,
    )


def page(card: ModelCard) -> str:
    """The card for people."""
    facts = {
        "study": f"{card.study}, revision {card.revision}, of federation {card.federation}",
        "study's digest": card.study_digest,
        "method": card.algorithm,
        "architecture": card.architecture,
        "model": f"{'the best global one' if card.model == 'best' else 'the newest'}, made by round {card.round} of "
        f"{card.rounds}; the study is {card.state}",
        "chosen by": card.why,
        "as this site downloads it": card.site,
        "model's digest": card.model_digest,
        "digest of what the coordinator keeps": card.kept_digest if card.kept_digest != card.model_digest else "",
        "began from": card.initial_digest,
        "exported": f"{card.created}, by wardround {card.wardround}",
    }
    scores = [
        {"site": site, "metric": name, "on its own validation rows": value}
        for site, metrics in sorted(card.scores.items())
        for name, value in sorted(metrics.items())
    ]
    lineage = [
        {
            "round": row.round,
            "attempt": row.attempt,
            "closed": row.closed,
            "model": (row.model_digest or "")[:12],
            "in it": ", ".join(row.contributors) or "nobody",
            "not in it": ", ".join((*row.left_out, *row.absent)) or "-",
        }
        for row in card.lineage
    ]
    return cards.page(
        f"{card.title or card.study}: the shared model",
        facts,
        scores,
        cards.took_part(card.round, card.contributors, card.capped, card.left_out, card.evaluators),
        lineage,
        (*NOT_HERE, *card.limits),
    )


def chosen(report: StudyReport, which: Which) -> tuple[int, str]:
    """The number of the model's round and the digest of what is kept of it. Raises UsageProblem: there is none."""
    if which == "best" and report.best is not None:
        return report.best.round, report.best.digest
    if which == "best":
        raise UsageProblem(
            f"study `{report.id}` has no best global model" + ("" if report.best_rule else ": its method makes none"),
            hint="the newest one: `--model latest`",
        )
    made = [row for row in report.rounds_closed if row.model_digest == report.model_digest]
    if not made:
        raise UsageProblem(
            f"study `{report.id}` has made no model yet: no round has closed",
            hint=f"`coordinator study status {report.id} --follow`",
        )
    return made[-1].round, report.model_digest


def _site(report: StudyReport, aggregator: ServerAggregator, site: str) -> str:
    """Whose download is exported, "" where all download the same tensors."""
    if site and site not in report.sites:
        raise UsageProblem(f"study `{report.id}` has no site `{site[:64]}`", hint=f"it has: {', '.join(report.sites)}")
    alike = not aggregator.per_site and aggregator.chosen is everything
    if alike or site:
        return "" if alike else site
    raise UsageProblem(
        f"in study `{report.id}` each site downloads a model of its own",
        hint=f"`--site`, one of: {', '.join(report.sites)}",
    )


def _specs(report: StudyReport) -> tuple[TensorSpec, ...]:
    """The shared tensors, as the study's updates have them."""
    parts = ((row, row.name.rpartition("/")) for row in report.tensors)
    return tuple(TensorSpec(name, row.dtype, row.shape, bundle or MODEL) for row, (bundle, _, name) in parts)


def _lineage(row: AttemptReport, report: StudyReport) -> Lineage:
    in_it = [name for name in row.contributors if name not in row.left_out]
    return Lineage(
        round=row.round,
        attempt=row.attempt,
        closed=row.closed,
        model_digest=row.model_digest,
        contributors=tuple(in_it),
        left_out=tuple(row.left_out),
        absent=tuple(
            name
            for name, site in report.sites.items()
            if name not in in_it and name not in row.left_out and not site.evaluates
        ),
    )


def _scores(report: StudyReport, kept_digest: str) -> dict[str, dict[str, str]]:
    """By site what it last reported of a model: in the round that began from it."""
    found: dict[str, dict[str, str]] = {}
    for row in report.attempts:
        if row.base_digest == kept_digest:
            accepted = {name: one for name, one in row.answers.items() if isinstance(one, AcceptedUpdate)}
            found |= {name: dict(one.metrics) for name, one in accepted.items()}
    return found
