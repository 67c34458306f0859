"""A whole study in one process, with the code that runs at the hospitals and at the coordinator.

What crosses between them is what would cross the network: float32 deltas, counts and losses as the study reports them,
sites in sorted order. So the final model is the same bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fl_algorithms.engine.algorithm import Downlink
from fl_algorithms.engine.beside import Session, session_at
from fl_algorithms.engine.device import CPU, Device
from fl_algorithms.engine.partition import initial_model, specs_of, task_at
from fl_algorithms.engine.selection import SELECTED, Kept, selected
from fl_algorithms.engine.session import Checkpoint, RoundResult
from fl_algorithms.lab.sources import find, find_public_data
from fl_algorithms.rows import COORDINATOR, VAL_LOSS
from fl_algorithms.server.aggregator import BlockSource, Round, ServerAggregator, Specs, Update, server_aggregator
from fl_algorithms.server.best import BestGlobal
from fl_algorithms.server.limits import Account, TooFewLeft, averaged
from fl_algorithms.server.mean import InMemory
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import PublicData, SiteData, Task
from fl_algorithms.tasks.public_data import read_public_data, require_public_data
from wardround.errors import BadData
from wardround.tensors.manifests import Manifest, PayloadHasher, TensorSpec

Progress = Callable[[int, int], None]  # (rounds done, rounds in all)


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


def run_federation(
    study: ResolvedStudy,
    task: Task,
    data: Mapping[str, SiteData],
    progress: Progress | None = None,
    start: Mapping[str, Tensor] | None = None,
    device: Device = CPU,
) -> Outcome:
    """Run a resolved study with every site in every round, and its closing validation. The study's limits hold as at
    the coordinator: a site beyond them trains on, and is not in that round's model.

    Args:
        task: the study's; the sites' own ones are made of it.
        data: site -> its data, for each of the study's sites; with the public data set, if the method needs one.
        start: the initial model; without it as the study's seed draws it.

    Raises:
        BadData: so many updates are beyond the study's limits that a coordinator would pause it.
    """
    rounds, row = study.study.rounds, study.method.row
    sessions = {
        site: session_at(study, site, task_at(study, task, site), data[site], device=device)
        for site in study.study.sites
    }
    kept: dict[str, dict[str, Checkpoint]] = {site: {} for site in sessions}
    start = initial_model(study) if start is None else start
    aggregator = server_aggregator(study, specs_of(start))
    model = _tensors(aggregator.kept_specs, lambda sink: aggregator.start(_source(start), sink))
    best, best_model = BestGlobal(), model
    accounts: list[Account] = []
    public_data = next(iter(data.values())).public_data if row.public_data == COORDINATOR else None

    for round_number in range(1, rounds + 2):
        results = {}
        for site, session in sessions.items():
            base = downlink(aggregator, model, site, round_number)
            step = session.train if round_number <= rounds else session.validate
            results[site] = step(round_number, base)
            kept[site] |= {checkpoint.kind: checkpoint for checkpoint in results[site].checkpoints}
        if row.one_global_model:
            judged = best.offered(round_number - 1, reported_losses(study, results), study.limits.max_weight)
            if judged is not best:
                best, best_model = judged, model
        if round_number <= rounds:
            try:
                model, account = aggregate(study, aggregator, model, round_number, results, public_data, accounts)
            except TooFewLeft as error:
                raise _paused(study, round_number, error) from None
            accounts.append(account)
            if progress is not None:
                progress(round_number, rounds)

    for site, session in sessions.items():
        finished = session.finish(best.round, downlink(aggregator, best_model, site, rounds + 1))
        kept[site] |= {checkpoint.kind: checkpoint for checkpoint in finished}
        if study.checkpoints.selection != "none":
            own = task_at(study, task, site).at(data[site])
            models = {kind: Kept(found.round, found.tensors) for kind, found in kept[site].items()}
            kept[site][SELECTED] = selected(study.at(site), own, data[site], models, device)
    digest = manifest(model, aggregator.kept_specs).digest() if model else None
    return Outcome(
        manifest(start, aggregator.upload).digest(), digest, best.round, kept, model, sessions, tuple(accounts)
    )


def load_sites(study: ResolvedStudy, task: Task, folder: Path, *, test: bool = True) -> dict[str, SiteData]:
    """Each site's data from what ``folder/SITE`` has for the study's task; ``sources.find`` says what that may be. With
    it comes the public data set in ``folder/public_data``, where the method needs one. Images are of the size that the
    site's network sees, those of the public data set too.

    Args:
        test: False leaves what is for testing unopened.

    Raises:
        BadData: a site has nothing there, or what the task refuses; or the public data set is not the study's.
    """
    sources = find(study, folder, test=test)
    tasks = {site: task_at(study, task, site) for site in sources}
    public_data: dict[tuple[int, ...], PublicData] = {}  # by a sample's shape
    if study.method.row.public_data:
        path = find_public_data(folder)
        require_public_data(study, path, "`fl-lab public-data STUDY.toml PATH` prints the table for this one")
        by_shape = {own.input_shape: own for own in tasks.values()}
        public_data = {shape: read_public_data(study, own, path) for shape, own in by_shape.items()}
    fraction = study.checkpoints.validation_fraction
    data = {
        site: own.load(sources[site], site=site, seed=study.study.seed, validation_fraction=fraction)
        for site, own in tasks.items()
    }
    return {site: replace(found, public_data=public_data.get(tasks[site].input_shape)) for site, found in data.items()}


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
) -> tuple[dict[str, Tensor], Account]:
    """What the coordinator keeps next, by the code that it runs, with counts as they are reported; and whose updates
    are in it.

    Args:
        public_data: the public data set, where the coordinator distills.
        before: the accounts of the rounds before.

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

    def make(chosen: Sequence[Update]) -> dict[str, Tensor]:
        def write(sink: Callable[[bytes], object]) -> None:
            aggregator.aggregate(Round(round_number, kept, chosen, sink, public_data, study.limits.max_weight))

        return _tensors(aggregator.kept_specs, write)

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
