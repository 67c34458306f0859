"""What holds for every installed method, whatever it does."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_algorithms import registry
from fl_algorithms.engine.partition import describe, initial_model, task_of
from fl_algorithms.engine.session import Checkpoint, Restored, RoundResult, SessionState, SiteSession
from fl_algorithms.lab.federation import aggregate, downlink, manifest, run_federation
from fl_algorithms.methods.settings import MeanSettings
from fl_algorithms.server.aggregator import ServerAggregator, server_aggregator
from fl_algorithms.server.mean import InMemory
from fl_algorithms.settings.models import DEPTHS, TWO_EXTRACTORS
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import SiteData, Split
from tests.fl_algorithms.toys import U, data_of, fit, session_of, toy_public_data
from wardround.tensors.manifests import TensorSpec

METHODS = list(registry.METHODS)
FEDERATED = [name for name, row in registry.METHODS.items() if not row.lab_only]
MEANS = [name for name, row in registry.METHODS.items() if issubclass(row.settings, MeanSettings)]
NOISY: dict[str, Any] = {"name": "mlp", "hidden": [4, 3], "dropout": 0.3, "norm": "batch"}


def noisy(algorithm: str, **changes: Any) -> ResolvedStudy:
    """A study whose network has all that could go wrong: dropout, statistics, an integer buffer."""
    needs = registry.METHODS[algorithm].needs
    if TWO_EXTRACTORS not in needs:
        changes["model"] = {**U, "norm": "batch", "dropout": 0.3} if DEPTHS in needs else NOISY
    return fit(algorithm, **changes)


@dataclass(frozen=True)
class Run:
    digest: str | None  # of what the coordinator keeps at the end
    results: list[dict[str, RoundResult]]  # of each round, by site; the last is the closing one
    states: dict[str, SessionState]


def run(study: ResolvedStudy, data: dict[str, SiteData] | None = None, *, restart: bool = False) -> Run:
    """A federation round by round; with ``restart`` every site is killed and started anew after each round."""
    data = data or {site: data_of(study, site) for site in study.study.sites}
    sessions = {site: session_of(study, site, data[site]) for site in data}
    aggregator = server_aggregator(study, describe(study, study.study.sites[0]).upload)
    kept = started(aggregator, initial_model(study))
    results: list[dict[str, RoundResult]] = []
    for number in range(1, study.study.rounds + 2):
        if restart:
            sessions = {site: session_of(study, site, data[site], state=stored(sessions[site])) for site in sessions}
        closing = number > study.study.rounds
        results.append({})
        for site, session in sessions.items():
            step = session.validate if closing else session.train
            results[-1][site] = step(number, downlink(aggregator, kept, site, number))
        if not closing:
            kept, _ = aggregate(study, aggregator, kept, number, results[-1], toy_public_data())
    digest = manifest(kept, aggregator.kept_specs).digest() if kept else None
    return Run(digest, results, {site: session.export_state() for site, session in sessions.items()})


@cache
def plain(algorithm: str) -> Run:
    """The run of ``noisy(algorithm)``, which several tests look at and none changes."""
    return run(noisy(algorithm))


def started(aggregator: ServerAggregator, initial: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the coordinator keeps before the first round."""
    payload, kept, offset = bytearray(), {}, 0
    aggregator.start(InMemory({key: tensor.numpy() for key, tensor in initial.items()}), payload.extend)
    for spec in aggregator.kept_specs:
        kept[spec.key] = torch.frombuffer(payload[offset : offset + spec.bytes], dtype=torch.float32).reshape(
            spec.shape
        )
        offset += spec.bytes
    return kept


def stored(session: SiteSession) -> SessionState:
    """The session's state as a vault gives it back."""
    state = session.export_state()
    return SessionState(state.tensors, json.loads(json.dumps(state.meta)))


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_same(one: Run, other: Run) -> None:
    assert one.digest == other.digest
    for ours, theirs in zip(one.results, other.results, strict=True):
        for site, result in ours.items():
            assert result.metrics == theirs[site].metrics
            assert result.uplink.keys() == theirs[site].uplink.keys()
            assert all(same_bits(deltas, theirs[site].uplink[bundle]) for bundle, deltas in result.uplink.items())
            for mine, yours in zip(result.checkpoints, theirs[site].checkpoints, strict=True):
                assert same_bits(mine.tensors, yours.tensors)
                assert replace(mine, tensors={}) == replace(yours, tensors={})
    for site, state in one.states.items():
        assert state.meta == other.states[site].meta
        assert same_bits(state.tensors, other.states[site].tensors)


def checkpoints(one: Run, site: str) -> dict[str, Checkpoint]:
    return {checkpoint.kind: checkpoint for results in one.results for checkpoint in results[site].checkpoints}


@pytest.mark.parametrize(
    ("lifetime", "iterator"),
    [
        ("round", "round"),
        ("run", "run"),
        pytest.param("round", "run", marks=pytest.mark.chaos),
        pytest.param("run", "round", marks=pytest.mark.chaos),
    ],
)
@pytest.mark.parametrize("algorithm", METHODS)
def test_killed_after_every_round_and_resumed_equals_an_uninterrupted_run(
    algorithm: str, lifetime: str, iterator: str
) -> None:
    study = noisy(algorithm, optimizer_lifetime=lifetime, iterator=iterator)
    assert_same(run(study), run(study, restart=True))


@pytest.mark.parametrize("algorithm", METHODS)
def test_two_runs_of_a_study_leave_the_same_digest_and_another_seed_leaves_another(algorithm: str) -> None:
    once = plain(algorithm)
    assert_same(once, run(noisy(algorithm)))
    if algorithm in FEDERATED:
        assert run(noisy(algorithm, seed=6)).digest != once.digest


@pytest.mark.parametrize("algorithm", METHODS)
def test_what_leaves_is_what_was_described_and_holds_nothing_private(algorithm: str) -> None:
    study = noisy(algorithm)
    partition = describe(study, "ash")
    private = {stay.name for stay in partition.private}
    for results in plain(algorithm).results[:-1]:
        for result in results.values():
            sent = [
                TensorSpec(name, "F32", tuple(delta.shape), bundle)
                for bundle, deltas in result.uplink.items()
                for name, delta in deltas.items()
            ]
            assert sorted(sent, key=lambda spec: spec.key) == list(partition.upload)
            assert not {spec.key for spec in sent} & private
            deltas = [delta for bundle in result.uplink.values() for delta in bundle.values()]
            assert all(delta.dtype == torch.float32 and delta.is_contiguous() for delta in deltas)
            assert all(not delta.requires_grad for delta in deltas)
    assert list(initial_model(study)) == [spec.key for spec in partition.upload]


@pytest.mark.parametrize("algorithm", METHODS)
def test_everything_that_a_site_keeps_is_described_as_staying(algorithm: str) -> None:
    study = noisy(algorithm)
    described = {stay.name.replace("/", "..") for stay in describe(study, "ash").private}
    tensors = plain(algorithm).states["ash"].tensors
    kept = {key.partition("/")[2] for key in tensors if not key.startswith("optimizer/")}
    assert kept <= described


@pytest.mark.parametrize("algorithm", METHODS)
def test_no_hook_writes_into_the_download(algorithm: str) -> None:
    study = noisy(algorithm)
    aggregator = server_aggregator(study, describe(study, "ash").upload)
    base = downlink(aggregator, started(aggregator, initial_model(study)), "ash", 1)
    before = {bundle: {name: tensor.clone() for name, tensor in part.items()} for bundle, part in base.items()}
    session_of(study).train(1, base)
    assert all(same_bits(before[bundle], part) for bundle, part in base.items())


@pytest.mark.parametrize("algorithm", METHODS)
def test_training_moves_the_model_of_which_the_scores_are(algorithm: str) -> None:
    results = plain(algorithm).results
    assert results[0]["ash"].metrics["val_loss"] != results[-1]["ash"].metrics["val_loss"]


@pytest.mark.parametrize("algorithm", METHODS)
def test_a_checkpoint_restores_to_the_scores_that_it_was_kept_with(algorithm: str) -> None:
    study = noisy(algorithm)
    data = data_of(study, "ash")
    assert data.test is not None
    one = plain(algorithm)
    for kind, checkpoint in checkpoints(one, "ash").items():
        logits = Restored(study, task_of(study), checkpoint.tensors).logits(data.test.x)
        assert task_of(study).metrics(logits, data.test.y) == checkpoint.scores, kind


@pytest.mark.parametrize("algorithm", METHODS)
def test_a_federation_of_one_site_runs(algorithm: str) -> None:
    study = noisy(algorithm, sites=["ash"])
    outcome = run_federation(study, task_of(study), {"ash": data_of(study, "ash")})
    assert (outcome.digest is None) == (algorithm not in FEDERATED)
    assert outcome.checkpoints["ash"]["latest"].round == 3


@pytest.mark.parametrize("algorithm", METHODS)
def test_a_site_that_missed_a_round_goes_on(algorithm: str) -> None:
    study = noisy(algorithm)
    aggregator = server_aggregator(study, describe(study, "ash").upload)
    kept = started(aggregator, initial_model(study))
    session = session_of(study)
    session.train(1, downlink(aggregator, kept, "ash", 1))
    result = session.train(3, downlink(aggregator, kept, "ash", 3))
    assert all(torch.isfinite(delta).all() for part in result.uplink.values() for delta in part.values())


@pytest.mark.parametrize("rows", [1, 3], ids=["one patient", "fewer than a batch"])
@pytest.mark.parametrize("algorithm", METHODS)
def test_a_tiny_site_trains(algorithm: str, rows: int) -> None:
    study = fit(algorithm)
    data = {"ash": data_of(study, "ash", rows), "birch": data_of(study, "birch")}
    results = run(study, data).results
    assert results[0]["ash"].num_examples == rows
    assert all(torch.isfinite(delta).all() for part in results[-2]["ash"].uplink.values() for delta in part.values())


@pytest.mark.parametrize("algorithm", METHODS)
def test_a_site_whose_patients_are_all_of_one_class_trains(algorithm: str) -> None:
    study = noisy(algorithm)
    data = {site: data_of(study, site) for site in ("ash", "birch")}
    data["ash"] = replace(data["ash"], train=well(data["ash"].train), validation=well(data["ash"].validation))
    results = run(study, data).results
    assert results[-1]["ash"].metrics.get("auc") is None  # masks have none
    assert results[-1]["ash"].metrics["val_loss"] is not None


def well(split: Split) -> Split:
    return Split(split.x, torch.zeros_like(split.y))


@pytest.mark.parametrize("algorithm", MEANS)
def test_a_soup_works_with_every_mean_and_its_models_stay(algorithm: str) -> None:
    study = noisy(algorithm, rounds=4, algorithm_settings={"soup": {"start_after": 1, "statistics": "estimate"}})
    one = run(study)
    assert_same(one, run(study, restart=True))
    upload = describe(study, "ash").upload
    plain = describe(noisy(algorithm, algorithm_settings={"soup": {"start_after": 9}}), "ash")
    assert upload == plain.upload
    soup = {stay.name.removeprefix("soup.") for stay in describe(study, "ash").private if stay.name.startswith("soup.")}
    assert soup <= {spec.key for spec in upload}
    assert soup
    assert all(0 <= state.meta["notes"].get("soup_models", 0) <= 3 for state in one.states.values())


@pytest.mark.parametrize("algorithm", [name for name in MEANS if name != "fedsoup"])
def test_a_soup_that_never_starts_changes_no_bit(algorithm: str) -> None:
    souped = noisy(algorithm, algorithm_settings={"soup": {"start_after": 9}})
    assert run(souped).digest == plain(algorithm).digest


@pytest.mark.parametrize("algorithm", METHODS)
def test_fine_tuning_changes_the_tuned_copy_alone(algorithm: str) -> None:
    untuned = run(noisy(algorithm, algorithm_settings={"fine_tuning": {"steps": 0}}))
    tuned = run(noisy(algorithm, algorithm_settings={"fine_tuning": {"epochs": 2}}))
    assert tuned.digest == untuned.digest
    for site in ("ash", "birch"):
        before, after = (checkpoints(one, site) for one in (untuned, tuned))
        assert same_bits(before["fine_tuned"].tensors, before["latest"].tensors)
        assert before["fine_tuned"].scores == before["latest"].scores
        assert same_bits(after["latest"].tensors, before["latest"].tensors)
        assert not same_bits(after["fine_tuned"].tensors, before["latest"].tensors)
        assert same_bits(tuned.states[site].tensors, untuned.states[site].tensors)
