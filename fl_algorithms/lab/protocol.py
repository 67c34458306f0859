"""The evaluation protocol: what a run's checkpoints are worth away from home, after tuning, and how flat they lie.

A site's *held-out* rows are those of its test table, or its validation split where it has none. They stay on the site's
own scale, and images of its own size, whichever model is asked about them; where that model's network does not take
images of such a size its scores are undefined.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fl_algorithms.engine.algorithm import Algorithm, algorithm_of, judged
from fl_algorithms.engine.beside import ALONE
from fl_algorithms.engine.device import CPU, Device
from fl_algorithms.engine.partition import build, task_at, task_of
from fl_algorithms.engine.selection import SELECTED
from fl_algorithms.engine.session import Restored
from fl_algorithms.lab.baseline import bootstrap
from fl_algorithms.lab.federation import Outcome, run_federation
from fl_algorithms.lab.protocol_settings import Protocol
from fl_algorithms.lab.sharpness import sharpness
from fl_algorithms.lab.tent import adapted_logits, with_batch_statistics
from fl_algorithms.methods.settings import FineTuning
from fl_algorithms.settings.models import NetworkSettings
from fl_algorithms.streams import stream_seed
from fl_algorithms.study import ResolvedStudy, SiteStudy
from fl_algorithms.tasks.base import OwnSizes, SiteData, Split, Task
from fl_algorithms.tasks.selection import chosen, joined, row_shape
from wardround.errors import BadData

BESIDE = (ALONE, SELECTED)
Tensors: TypeAlias = Mapping[str, Tensor]
Score: TypeAlias = float | None  # None where a metric is undefined; it is left out of means
Scores: TypeAlias = dict[str, Score]  # metric -> score
Data: TypeAlias = Mapping[str, SiteData]
Judge: TypeAlias = Callable[[str, Tensors, Split], Scores]  # (site of the model, its tensors, rows)


def measure(
    study: ResolvedStudy, task: Task, data: Data, outcome: Outcome, protocol: Protocol, device: Device = CPU
) -> dict[str, Any]:
    """What ``protocol`` asks of one run, as plain JSON; {} where it asks nothing.

    Each part has, for each kind of checkpoint, metric -> number, or what is shown here; None is an undefined score.

        matrix           site -> split of its held-out rows, under "splits"; and under "kinds":
                         matrix (M), diagonal, rows, ood, as of ``Matrix``; local and global, as of ``LocalGlobal``
        personalisation  amount of fine-tuning -> local and global; "0" is the checkpoint itself
        tent             local and global, as the adapting model answers
        sharpness        sites -> eigenvalue, and their median
        bootstrap        metric -> site -> a score for each sample of the patients of the site's held-out rows
        leave_one_out    see ``leave_one_out``

    Raises:
        BadData: the outcome is of central training; Tent for a network without batch norms; one site left out of one.
    """
    if not protocol.asks:
        return {}
    if alone := sorted(outcome.checkpoints.keys() - outcome.sessions.keys()):
        raise BadData(
            f"site `{alone[0]}` trained no model here, so there is none to compare with the other sites'",
            hint="central training has the scores of its checkpoints alone; leave out the suite's [protocol] for it",
        )
    found: dict[str, Any] = {}
    asked = Asked(study, task, device)
    rows = LocalGlobal.draw(study, data)
    kinds = _by_kind(outcome)
    if protocol.matrix:
        found["matrix"] = {
            "splits": {site: "validation" if of_site.test is None else "test" for site, of_site in data.items()},
            "kinds": {
                kind: Matrix.of(models, data, asked.scores).document() | rows.mean_scores(models, asked.scores)
                for kind, models in kinds.items()
            },
        }
    if protocol.personalisation:
        found["personalisation"] = {
            kind: dict(_personalised(models, outcome, rows, asked, protocol)) for kind, models in kinds.items()
        }
    if protocol.tent:
        judge = asked.adapting(protocol)
        found["tent"] = {kind: rows.mean_scores(models, judge) for kind, models in kinds.items()}
    if protocol.sharpness:
        found["sharpness"] = {
            kind: _sharpness(models, data, asked, protocol.sharpness_batches) for kind, models in kinds.items()
        }
    if protocol.bootstrap:
        asked_metrics = protocol.bootstrap_metrics or (task.headline,)
        found["bootstrap"] = bootstrap(
            study, task, data, outcome.checkpoints, protocol.bootstrap, asked_metrics, device
        )  # fmt: skip
    if protocol.leave_one_out:
        found["leave_one_out"] = leave_one_out(study, task, data, device)
    return found


@dataclass(frozen=True)
class Matrix:
    """The generalization matrix, metric -> M; ``M[j][i]`` is the score of site j's model on site i's held-out rows.

    FENDA-FL, 2023, figure 2, https://arxiv.org/abs/2309.16825. Of runs that share nothing, the mean of M's diagonal is
    Silo and that of row j is Client j.
    """

    scores: dict[str, dict[str, dict[str, Score]]]

    @classmethod
    def of(cls, models: Mapping[str, Tensors], data: Data, judge: Judge) -> "Matrix":
        """Of each site's model, on each site's held-out rows."""
        judged = {
            j: {i: judge(j, tensors, held_out(of_site)) for i, of_site in data.items()} for j, tensors in models.items()
        }
        metrics = next(iter(next(iter(judged.values())).values()))
        return cls(
            {
                metric: {j: {i: scores[metric] for i, scores in row.items()} for j, row in judged.items()}
                for metric in metrics
            }
        )

    def diagonal(self, metric: str) -> Score:
        """The mean over the sites of their own model at home."""
        m = self.scores[metric]
        return mean(m[j][j] for j in m)

    def rows(self, metric: str) -> dict[str, Score]:
        """For each site's model, the mean over all sites' rows."""
        return {j: mean(row.values()) for j, row in self.scores[metric].items()}

    def ood(self, metric: str) -> Score:
        """The mean over the sites of their model's mean at the other sites."""
        m = self.scores[metric]
        return mean(mean(score for i, score in m[j].items() if i != j) for j in m)

    def document(self) -> dict[str, Any]:
        metrics = list(self.scores)
        return {
            "matrix": self.scores,
            "diagonal": {metric: self.diagonal(metric) for metric in metrics},
            "rows": {metric: self.rows(metric) for metric in metrics},
            "ood": {metric: self.ood(metric) for metric in metrics},
        }


@dataclass(frozen=True)
class LocalGlobal:
    """FedSoup's two tests, which have no row in common. Chen et al. 2023, https://arxiv.org/abs/2307.10507.

    Attributes:
        everyone: equally many held-out rows of each site; about as many in all as a site keeps for itself, and at most
            half of any site's. None where a site has but one row, or sites see images at different sizes.
        own: site -> the rest of its held-out rows.
    """

    everyone: Split | None
    own: dict[str, Split]

    @classmethod
    def draw(cls, study: ResolvedStudy, data: Data) -> "LocalGlobal":
        """The same rows for every method and setting of a seed."""
        held = {site: held_out(data[site]) for site in sorted(data)}
        sizes = [len(split) for split in held.values()]
        each = min(min(sizes) // 2, max(1, round(fmean(sizes) / (len(sizes) + 1))))
        own, common = {}, []
        for site, split in held.items():
            generator = torch.Generator().manual_seed(stream_seed(study.study.seed, site, 0, "protocol.global"))
            order = torch.randperm(len(split), generator=generator)
            common.append(chosen(split, order[:each]))
            own[site] = chosen(split, order[each:])
        alike = len({row_shape(split.x) for split in held.values()}) == 1
        return cls(joined(common) if each and alike else None, own)

    def mean_scores(self, models: Mapping[str, Tensors], judge: Judge) -> dict[str, Scores]:
        """Metric -> the mean over the sites' models: "local" on each one's own rows, "global" on everyone's."""
        local = [judge(site, tensors, self.own[site]) for site, tensors in models.items()]
        everyone = self.everyone
        if everyone is None:
            return {"local": _means(local), "global": dict.fromkeys(local[0])}
        return {
            "local": _means(local),
            "global": _means([judge(site, tensors, everyone) for site, tensors in models.items()]),
        }


class Asked:
    """A study's models, out of their tensors."""

    def __init__(self, study: ResolvedStudy, task: Task, device: Device = CPU) -> None:
        self.study, self.task, self.device = study, task, device
        self.algorithm: Algorithm = algorithm_of(study)

    def model(self, site: str, tensors: Tensors) -> Restored:
        """The model of ``site``, in the site's own network."""
        task = task_at(self.study, self.task, site)
        return Restored(self.study.at(site), task, tensors, self.device)

    def takes(self, site: str, split: Split) -> bool:
        """Whether the network of ``site`` takes rows of that shape: images may be of another site's size."""
        own = self.study.at(site)
        sizes = own.model.settings
        if not isinstance(sizes, NetworkSettings):
            return True
        return not sizes.built_for(task_of(own).input_shape).misfit(row_shape(split.x))

    def scores(self, site: str, tensors: Tensors, split: Split) -> Scores:
        """Every metric of the model as it is."""
        if not self.takes(site, split):
            return self._undefined()
        return self.model(site, tensors).metrics(split)

    def batch_statistics_scores(self, site: str, tensors: Tensors, split: Split) -> Scores:
        """Every metric, with the rows' own statistics in the batch norms."""
        if not self.takes(site, split):
            return self._undefined()
        networks = with_batch_statistics(self.model(site, tensors).networks)
        return judged(self.algorithm, networks, split, self.task).metrics()

    def adapting(self, protocol: Protocol) -> Judge:
        """Every metric of the model under Tent. The rows come in an order that is the same in every run of the seed."""

        def judge(site: str, tensors: Tensors, split: Split) -> Scores:
            generator = torch.Generator().manual_seed(stream_seed(self.study.study.seed, "", 0, "protocol.tent"))
            if isinstance(split.x, OwnSizes):  # whose rows are no batches with labels
                return self._undefined()
            stream = chosen(split, torch.randperm(len(split), generator=generator))
            logits = adapted_logits(
                self.model(site, tensors).networks,
                self.algorithm.infer,
                stream.x,
                batch=protocol.tent_batch,
                learning_rate=protocol.tent_learning_rate,
                episodic=protocol.episodic,
            )
            return self.task.metrics(logits, stream.y)

        return judge

    def sharpness(self, tensors: Tensors, site: str, data: SiteData, batches: int) -> Score:
        """Of the site's loss in batches of its training rows; None where a loss has left the finite numbers.

        Args:
            batches: how many, from the first on; 0 for all.
        """
        seed, size = stream_seed(self.study.study.seed, site, 0, "protocol.sharpness"), self.study.training.batch_size
        split, task = data.train, self.task.at(data)
        if isinstance(split.x, OwnSizes):  # whose rows' labels are drawn
            return None
        if batches:
            split = chosen(split, torch.arange(min(batches * size, len(split))))
        value = sharpness(
            self.model(site, tensors).networks,
            lambda networks, x, y: task.losses(self.algorithm.infer(networks, x), y).mean(),
            split.x,
            split.y,
            size,
            seed,
        )
        return value if math.isfinite(value) else None

    def _undefined(self) -> Scores:
        task = self.study.task
        return dict.fromkeys(getattr(task.settings, "metrics", task.row.metrics))

    def misses_norms(self) -> bool:
        """Whether an unseen site has no statistics for a network: the sites share it, but not its batch norms'."""
        return any(self._misses_norms(study) for study in self.study.each_network().values())

    def _misses_norms(self, study: SiteStudy) -> bool:
        networks = build(study, task_of(study), self.algorithm, site="")
        for slot, network in networks.items():
            chosen = {name for share in self.algorithm.shares if share.slot == slot for name in share.tensors(networks)}
            if chosen and any(name.endswith("running_mean") for name in network.state_dict().keys() - chosen):
                return True
        return False


def leave_one_out(study: ResolvedStudy, task: Task, data: Data, device: Device = CPU) -> dict[str, Any]:
    """Each site in turn as one that the federation has never seen, and all of its rows as evaluation data.

    The others federate without it: it takes no step and sends nothing. Each of their models is asked about the unseen
    site's training, validation and test rows, which stand on that site's own scale, as its own loading puts them; with
    private batch norms (FedBN) there is no model for an unseen site, so they take the rows' statistics, and
    "batch_statistics" says so.

    Returns:
        "batch_statistics"; "mean": kind -> metric -> mean over the unseen sites; "sites": unseen site -> its rows, the
        participants' final shared model's digest, and kind -> metric -> mean over the participants' models.

    Raises:
        BadData: the study has one site.
    """
    sites = study.study.sites
    if len(sites) < 2:
        raise BadData(
            f"the study has one site, `{sites[0]}`; without it there is no federation",
            hint="in the suite's [protocol]: `leave_one_out = false`",
        )
    missing = Asked(study, task, device).misses_norms()
    found: dict[str, dict[str, Any]] = {}
    for unseen in sites:
        fewer = without(study, unseen)
        asked = Asked(fewer, task, device)
        judge = asked.batch_statistics_scores if missing else asked.scores
        outcome = run_federation(fewer, task, {site: data[site] for site in fewer.study.sites}, device=device)
        rows = every_row(data[unseen])
        found[unseen] = {
            "rows": len(rows),
            "digest": outcome.digest,
            "kinds": {
                kind: _means([judge(site, tensors, rows) for site, tensors in models.items()])
                for kind, models in _by_kind(outcome).items()
            },
        }
    by_kind: dict[str, list[Scores]] = {}
    for one in found.values():
        for kind, scores in one["kinds"].items():
            by_kind.setdefault(kind, []).append(scores)
    return {
        "batch_statistics": missing,
        "mean": {kind: _means(scores) for kind, scores in by_kind.items()},
        "sites": found,
    }


def without(study: ResolvedStudy, site: str) -> ResolvedStudy:
    """The study of the other sites."""
    sites = tuple(name for name in study.study.sites if name != site)
    assigned = {name: label for name, label in study.assigned.items() if name != site}
    roles = {name: role for name, role in study.study.roles.items() if name != site}
    fewer = study.changed(study={"sites": sites, "quorum": None, "roles": roles})
    return replace(fewer, file=fewer.file.model_copy(update={"assigned": assigned}))


def held_out(data: SiteData) -> Split:
    """A site's test rows, or its validation rows where it has none."""
    return data.validation if data.test is None else data.test


def every_row(data: SiteData) -> Split:
    """All of a site's rows: training, validation, test."""
    return joined([data.train, data.validation, *([] if data.test is None else [data.test])])


def mean(scores: Iterable[Score]) -> Score:
    """The mean of those that are defined; None where none is."""
    defined = [score for score in scores if score is not None]
    return fmean(defined) if defined else None


def _personalised(
    models: Mapping[str, Tensors], outcome: Outcome, rows: LocalGlobal, asked: Asked, protocol: Protocol
) -> Iterator[tuple[str, dict[str, Scores]]]:
    yield "0", rows.mean_scores(models, asked.scores)
    for amount in protocol.personalisation:
        tuning = FineTuning.model_validate({protocol.personalisation_unit: amount})
        tuned = {site: outcome.sessions[site].tuned(tensors, tuning) for site, tensors in models.items()}
        yield str(amount), rows.mean_scores(tuned, asked.scores)


def _sharpness(models: Mapping[str, Tensors], data: Data, asked: Asked, batches: int) -> dict[str, Any]:
    sites = {site: asked.sharpness(tensors, site, data[site], batches) for site, tensors in models.items()}
    defined = [value for value in sites.values() if value is not None]
    return {"median": median(defined) if defined else None, "sites": sites}


def _by_kind(outcome: Outcome) -> dict[str, dict[str, Tensors]]:
    """Kind -> site -> the checkpoint's tensors, of the sites that have one. What is no model of the federation's is
    left out: its scores stand with its checkpoint.
    """
    kinds: dict[str, dict[str, Tensors]] = {}
    for site, checkpoints in outcome.checkpoints.items():
        for kind, checkpoint in sorted(checkpoints.items()):
            if kind in BESIDE:
                continue
            kinds.setdefault(kind, {})[site] = checkpoint.tensors
    return kinds


def _means(scores: list[Scores]) -> Scores:
    """Metric -> mean."""
    return {metric: mean(one[metric] for one in scores) for metric in scores[0]}
