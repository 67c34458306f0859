"""A whole study in one process, with the code that runs at the hospitals and at the coordinator.

What crosses between them is what would cross the network: float32 deltas, counts and losses as the study reports them,
sites in sorted order. So the final model is the same bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fl_algorithms.engine.algorithm import Downlink
from fl_algorithms.engine.beside import Session, session_at
from fl_algorithms.engine.device import CPU, Device, at_home, deterministic
from fl_algorithms.engine.encoding import arrived
from fl_algorithms.engine.partition import initial_model, specs_of, task_at
from fl_algorithms.engine.selection import SELECTED
from fl_algorithms.engine.session import Checkpoint, RoundResult, SessionState
from fl_algorithms.lab.choices import choice
from fl_algorithms.lab.curves import Curves
from fl_algorithms.lab.participation import EVERYONE, Participation
from fl_algorithms.lab.round_sums import RoundSums, Summed
from fl_algorithms.rows import VAL_LOSS
from fl_algorithms.server.aggregator import BlockSource, Round, ServerAggregator, Specs, Update, server_aggregator
from fl_algorithms.server.best import BestGlobal
from fl_algorithms.server.combining import Combined
from fl_algorithms.server.limits import Account, TooFewLeft, averaged
from fl_algorithms.server.mean import InMemory
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import PublicData, SiteData, Task
from wardround.errors import BadData
from wardround.tensors.manifests import Manifest, PayloadHasher, TensorSpec

Progress = Callable[[float, int], None]  # (rounds done, those of a part of the sites in part; rounds in all)


@dataclass(frozen=True)
class Outcome:
    """What a study left: at each site its checkpoints by kind, and the shared model."""

    initial_digest: str
    digest: str | None  # of what the coordinator keeps at the end; None where nothing is shared
    best_round: int | None  # of the global checkpoint
    checkpoints: dict[str, dict[str, Checkpoint]]
    shared: dict[str, Tensor]  # what the coordinator keeps, by name as in a safetensors file
    sessions: dict[str, Session]  # as they are after the closing round
    accounts: tuple[Account, ...] = ()  # of each round: whose update was capped, or left out


@dataclass(frozen=True)
class RunState:
    """All that a run is between two rounds: another process goes on from it to the same bits.

    Attributes:
        round: the last one that closed.
        model: what the coordinator keeps.
        best_model: that of ``best``'s round.
        kept: site -> kind -> checkpoint.
        sites: each site's own state.
    """

    round: int
    model: dict[str, Tensor]
    best: BestGlobal
    best_model: dict[str, Tensor]
    accounts: tuple[Account, ...]
    kept: dict[str, dict[str, Checkpoint]]
    sites: dict[str, SessionState]


Keep = Callable[[int, Callable[[], RunState]], None]  # after each round: its number, and what makes the state of it


def run_federation(
    study: ResolvedStudy,
    task: Task,
    data: Mapping[str, SiteData],
    progress: Progress | None = None,
    start: Mapping[str, Tensor] | None = None,
    device: Device = CPU,
    *,
    participation: Participation = EVERYONE,
    curves: Curves | None = None,
    state: RunState | None = None,
    keep: Keep | None = None,
    own: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> Outcome:
    """Run a resolved study and its closing validation. The study's limits hold as at the coordinator: a site beyond
    them trains on, and is not in that round's model. Torch's global settings are afterwards as they were.

    Args:
        task: the study's; the sites' own ones are made of it.
        data: site -> its data, for each of the study's sites; with the public data set, if the method needs one.
        progress: called after each round, and after each site in it.
        start: the initial model; without it as the study's seed draws it.
        participation: who is in a round. A site that is not in it downloads nothing and stays as it is; what it did
            too late leaves no trace, as at a hospital whose update is refused. Every site validates at the end.
        curves: takes the learning curves.
        state: go on after its round, with the same study, data and start.
        keep: called after each round.
        own: site -> private tensors that it begins with, in place of those drawn.

    Raises:
        BadData: so many updates are late, or beyond the study's limits, that a coordinator would pause it.
        UsageProblem: ``participation`` asks fewer sites than the study needs, or its attack is none for the study.
    """
    participation.refuse_unfit(study)
    with deterministic(study.study.threads):
        run = Run(study, task, data, start, device, participation, curves or Curves())
        run.begin(state, own or {})
        for round_number in range(run.closed + 1, study.study.rounds + 1):
            run.round(round_number, progress)
            if keep is not None:
                keep(round_number, run.state)
        return run.end()


class Run:
    """A study under way: the coordinator's part and the sites'."""

    def __init__(
        self,
        study: ResolvedStudy,
        task: Task,
        data: Mapping[str, SiteData],
        start: Mapping[str, Tensor] | None,
        device: Device,
        participation: Participation,
        curves: Curves,
    ) -> None:
        self._study, self._participation, self._curves = study, participation, curves
        self._row, self._task, self._device, self._attack = study.method.row, task, device, participation.attack
        self._data = data if self._attack is None else self._attack.data_of(study, data)
        self._start = initial_model(study) if start is None else start
        self._aggregator = server_aggregator(study, specs_of(self._start))
        self._public_data = next(iter(data.values())).public_data if study.distills else None
        self._sums = RoundSums(study, self._aggregator, masked=participation.masked)

    def begin(self, state: RunState | None, own: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Before the first round, or after that of ``state``."""
        aggregator, sites = self._aggregator, {} if state is None else state.sites
        self.sessions = {
            site: session_at(
                self._study,
                site,
                task_at(self._study, self._task, site),
                self._data[site],
                sites.get(site),
                own.get(site),
                self._device,
                score_at_once=False,  # of what is kept at the end alone
            )
            for site in self._study.study.sites
        }
        if state is None:
            model = _tensors(aggregator.kept_specs, lambda sink: aggregator.start(_source(self._start), sink))
            state = RunState(0, model, BestGlobal(), model, (), {site: {} for site in self.sessions}, {})
        self.closed, self._model, self._accounts = state.round, dict(state.model), list(state.accounts)
        self._best, self._best_model = state.best, state.best_model
        self._kept = {site: dict(kinds) for site, kinds in state.kept.items()}

    def state(self) -> RunState:
        """As it is between two rounds."""
        sites = {site: session.export_state() for site, session in self.sessions.items()}
        kept = {site: dict(kinds) for site, kinds in self._kept.items()}
        return RunState(self.closed, self._model, self._best, self._best_model, tuple(self._accounts), kept, sites)

    def round(self, round_number: int, progress: Progress | None) -> None:
        """Train where the round asks for it, and average."""
        study, rounds = self._study.study, self._study.study.rounds
        there = self._participation.attendance(
            study.trainers,
            seed=study.seed,
            round_number=round_number,
            needed=study.needed,
            deadline_s=study.round_deadline_s,
        )
        results = {}
        for place, site in enumerate(there.accepted):
            result, losses = self._watched(round_number, site)
            results[site] = result
            self.trained(round_number, site, result, losses)
            if progress is not None and place + 1 < len(there.accepted):
                progress(round_number - 1 + (place + 1) / len(there.accepted), rounds)
        for site in study.evaluators:
            self._judged(round_number, site, self.sessions[site].validate(round_number, self.base(round_number, site)))
        self.close(round_number, results)
        if progress is not None:
            progress(round_number, rounds)

    def _watched(self, round_number: int, site: str) -> tuple[RoundResult, dict[str, list[float]]]:
        """The site's round, and phase -> the loss of each step."""
        losses: dict[str, list[Tensor]] = {}
        base = self.base(round_number, site)
        result = self.sessions[site].train(
            round_number, base, watch=lambda phase, loss: losses.setdefault(phase, []).append(loss)
        )
        return result, {phase: at_home(torch.stack(of)).tolist() for phase, of in losses.items()}

    def base(self, round_number: int, site: str) -> Downlink:
        """What ``site`` downloads in a round."""
        return downlink(self._aggregator, self._model, site, round_number)

    def trained(self, round_number: int, site: str, result: RoundResult, losses: Mapping[str, Sequence[float]]) -> None:
        """Take note of what a site did. ``losses``: phase -> that of each step."""
        self._judged(round_number, site, result)
        self._curves.trained(round_number, site, losses)
        sent = sum(spec.bytes for spec in self._study.encoding.encoding.sent(self._aggregator.upload_of(site)))
        received = sum(spec.bytes for spec in self._aggregator.download_of(site))
        self._curves.moved(round_number, site, sent=sent, received=received)

    def close(self, round_number: int, results: Mapping[str, RoundResult]) -> None:
        """Average what the round's sites sent."""
        sent = {
            site: replace(result, uplink=arrived(self._study.encoding, self._aggregator.upload_of(site), result.uplink))
            for site, result in results.items()
        }
        sent = sent if self._attack is None else self._attack.sent(sent)
        summed = self._sums.of(round_number, self._digest(), sent)
        self._offer(round_number, results, summed)
        try:
            self._model, account = aggregate(
                self._study, self._aggregator, self._model, round_number, sent, self._public_data, self._accounts,
                self._device, summed,
            )  # fmt: skip
        except TooFewLeft as error:
            raise _paused(self._study, round_number, error) from None
        self._accounts.append(account)
        self._curves.averaged(round_number, self._study.study.sites, results.keys() - account.left_out.keys())
        self.closed = round_number

    def end(self) -> Outcome:
        """The closing validation, at every site."""
        closing, results = self._study.study.rounds + 1, {}
        for site, session in self.sessions.items():
            results[site] = session.validate(closing, self.base(closing, site))
            self._judged(closing, site, results[site])
        trained = {site: results[site] for site in self._study.study.trainers}
        self._offer(closing, trained, self._sums.of(closing, self._digest(), trained))
        for site, session in self.sessions.items():
            best = downlink(self._aggregator, self._best_model, site, closing)
            self._keep(site, session.finish(self._best.round, best))
            self._kept[site] = {kind: session.scored(one) for kind, one in self._kept[site].items()}
            if self._study.checkpoints.selection != "none":
                self._kept[site][SELECTED] = choice(self._study, self._task, site, self._data[site], self._kept[site])
        return Outcome(
            manifest(self._start, self._aggregator.upload).digest(),
            self._digest() if self._model else None,
            self._best.round,
            self._kept,
            self._model,
            self.sessions,
            tuple(self._accounts),
        )

    def _judged(self, round_number: int, site: str, result: RoundResult) -> None:
        self._curves.judged(round_number - 1, site, result.metrics)
        self._keep(site, result.checkpoints)

    def _keep(self, site: str, checkpoints: Sequence[Checkpoint]) -> None:
        self._kept[site] |= {checkpoint.kind: checkpoint for checkpoint in checkpoints}

    def _digest(self) -> str:
        return manifest(self._model, self._aggregator.kept_specs).digest()

    def _offer(self, round_number: int, results: Mapping[str, RoundResult], summed: Summed | None) -> None:
        """Let the model before this round compete to be the best."""
        if self._row.one_global_model:
            losses = reported_losses(self._study, results) if summed is None else summed.losses
            judged = self._best.offered(round_number - 1, losses, self._study.limits.max_weight)
            if judged is not self._best:
                self._best, self._best_model = judged, self._model


def reported_losses(study: ResolvedStudy, results: Mapping[str, RoundResult]) -> list[tuple[str, int]]:
    """What each site tells of the model it downloaded; none where the study tells no validation loss."""
    if VAL_LOSS not in study.reported.metrics:
        return []
    form = study.reported
    return [
        (form.metric(VAL_LOSS, result.metrics[VAL_LOSS]), form.count(result.num_validation))
        for _, result in sorted(results.items())
    ]


def aggregate(
    study: ResolvedStudy,
    aggregator: ServerAggregator,
    model: Mapping[str, Tensor],
    round_number: int,
    results: Mapping[str, RoundResult],
    public_data: PublicData | None = None,
    before: Sequence[Account] = (),
    device: Device = CPU,
    summed: Summed | None = None,
) -> tuple[dict[str, Tensor], Account]:
    """What the coordinator keeps next, by the code that it runs, with counts as they are reported; and whose updates
    are in it.

    Args:
        public_data: the public data set, where the coordinator distills.
        before: the accounts of the rounds before.
        device: where the coordinator distills.
        summed: what it has in place of the updates, under secure aggregation.

    Raises:
        TooFewLeft: fewer updates than the study's quorum are within its limits.
    """
    updates = [
        Update(
            site,
            study.reported.count(result.num_examples),
            _source({spec.key: result.uplink[spec.bundle][spec.name] for spec in aggregator.upload_of(site)}),
        )
        for site, result in sorted(results.items())
    ]
    kept = _source(model)

    def make(chosen: Sequence[Update], combined: Combined) -> dict[str, Tensor]:
        def write(sink: Callable[[bytes], object]) -> None:
            largest = study.limits.max_weight
            aggregator.aggregate(Round(round_number, kept, chosen, sink, public_data, largest, device, combined))

        return _tensors(aggregator.kept_specs, write)

    if summed is not None:
        return make(updates, summed.combined), summed.account
    return averaged(study, aggregator, updates, before, make, kept=kept, round_number=round_number)


def limits_summary(accounts: Sequence[Account]) -> list[str]:
    """Whom the study's limits touched, a sentence each."""
    capped: dict[str, list[int]] = {}
    said = []
    for number, account in enumerate(accounts, start=1):
        said += [f"site {site} is not in round {number}'s model: {why}" for site, why in account.left_out.items()]
        for site in account.capped:
            capped.setdefault(site, []).append(number)
    for site, rounds in sorted(capped.items()):
        said.append(f"site {site} counted for less than its rows in {len(rounds)} of {len(accounts)} rounds")
    return said


def _paused(study: ResolvedStudy, round_number: int, error: TooFewLeft) -> BadData:
    return BadData(
        f"round {round_number}: only {len(error.account.norms) - len(error.account.left_out)} of the "
        f"{study.study.needed} updates that it needs are within the study's limits: {error.message}",
        hint="a coordinator would pause here: look at the site's data, or raise `norm_multiple` in [limits]",
    )


def downlink(aggregator: ServerAggregator, model: Mapping[str, Tensor], site: str, round_number: int) -> Downlink:
    """What ``site`` downloads of the kept tensors, by bundle and name."""
    bundles: dict[str, dict[str, Tensor]] = {}
    for spec, source in zip(
        aggregator.download_of(site), aggregator.sources(_source(model), site, round_number), strict=True
    ):
        bundles.setdefault(spec.bundle, {})[spec.name] = model[source]
    return bundles


def _source(tensors: Mapping[str, Tensor]) -> BlockSource:
    return InMemory({key: tensor.numpy() for key, tensor in tensors.items()})


def _tensors(specs: Specs, write: Callable[[Callable[[bytes], object]], None]) -> dict[str, Tensor]:
    """The tensors whose payload ``write`` gives to the sink it is called with."""
    payload, new, offset = bytearray(), {}, 0
    write(payload.extend)
    for spec in specs:
        array = np.frombuffer(payload, dtype="<f4", count=spec.bytes // 4, offset=offset)
        new[spec.key] = torch.from_numpy(array.copy()).reshape(spec.shape)
        offset += spec.bytes
    return new


def manifest(model: Mapping[str, Tensor], specs: tuple[TensorSpec, ...]) -> Manifest:
    """The manifest whose digest is the model's."""
    hasher = PayloadHasher(specs)
    for spec in specs:
        hasher.update(payload(model[spec.key]))
    return hasher.manifest()


def payload(tensor: Tensor) -> bytes:
    """A float32 tensor's bytes, little-endian."""
    return tensor.detach().contiguous().numpy().astype("<f4", copy=False).tobytes()
