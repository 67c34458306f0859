"""The methods whose server aggregator is not the plain mean: server optimizers, SCAFFOLD, FedFomo and FedSM."""

import json
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_algorithms.engine.algorithm import compute_logits
from fl_algorithms.engine.partition import describe, initial_model, task_of
from fl_algorithms.engine.session import Restored, RoundResult, SessionState, SiteSession
from fl_algorithms.lab.federation import aggregate, downlink, manifest, run_federation
from fl_algorithms.methods.fedfomo import client as fedfomo_client
from fl_algorithms.methods.fedfomo.server import choose_peers
from fl_algorithms.methods.fedsm import client as fedsm_client
from fl_algorithms.methods.scaffold import client as scaffold_client
from fl_algorithms.methods.settings import FineTuning
from fl_algorithms.resolving import resolve
from fl_algorithms.server.aggregator import Round, ServerAggregator, Specs, Update, server_aggregator
from fl_algorithms.server.mean import InMemory
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import SiteData, Split
from tests import reference
from tests.fl_algorithms.image_toys import image_study
from tests.fl_algorithms.toys import FENDA, bundles, session_of, start_of, toy_data, toy_study
from wardround.errors import BadData
from wardround.records.study import StudyFile
from wardround.tensors.files import TensorFile, file_header
from wardround.tensors.manifests import TensorSpec

OPTIMIZERS = ["fedavgm", "fedadam", "fedyogi", "fedadagrad"]
METHODS = [*OPTIMIZERS, "scaffold", "fedfomo", "fedsm"]
SITES = ["ash", "birch", "cedar"]
BATCH_NORM = {"name": "mlp", "hidden": [4], "norm": "batch"}
PLAIN_SGD = {"optimizer": "sgd", "weight_decay": 0.0}
Arrays = dict[str, NDArray[np.float32]]


def study_of(
    method: str, *, sites: int = 3, settings: Mapping[str, Any] | None = None, **changes: Any
) -> ResolvedStudy:
    names = SITES[:sites] if sites <= len(SITES) else [f"site-{number:03}" for number in range(sites)]
    plain = PLAIN_SGD if method == "scaffold" else {}
    return toy_study(method, sites=names, algorithm_settings=dict(settings or {}), **{**plain, **changes})


def aggregator_of(study: ResolvedStudy) -> ServerAggregator:
    return server_aggregator(study, describe(study, study.study.sites[0]).upload)


def random_arrays(specs: Specs, seed: int) -> Arrays:
    """Any values; a second moment is never negative."""
    rng = np.random.default_rng(seed)
    arrays = {spec.key: rng.normal(size=spec.shape).astype("<f4") for spec in specs}
    return {key: abs(array) if key.startswith("moment2") else array for key, array in arrays.items()}


def aggregated(aggregator: ServerAggregator, kept: Arrays, updates: dict[str, tuple[int, Arrays]]) -> Arrays:
    """What is kept next, by key."""
    told = [Update(site, n, InMemory(deltas)) for site, (n, deltas) in sorted(updates.items())]
    out, new, offset = bytearray(), {}, 0
    aggregator.aggregate(Round(1, InMemory(kept), told, out.extend))
    for spec in aggregator.kept_specs:
        new[spec.key] = np.frombuffer(out, "<f4", spec.bytes // 4, offset).reshape(spec.shape)
        offset += spec.bytes
    assert offset == len(out)
    return new


def random_round(
    study: ResolvedStudy, answered: int | None = None
) -> tuple[ServerAggregator, Arrays, dict[str, tuple[int, Arrays]]]:
    aggregator = aggregator_of(study)
    updates = {
        site: (3 + place, random_arrays(aggregator.upload, 10 + place))
        for place, site in enumerate(study.study.sites[:answered])
    }
    kept = random_arrays(aggregator.kept_specs, 1)  # with variances that no update makes negative
    kept |= {key: np.abs(values) + 8 for key, values in kept.items() if key.endswith(".running_var")}
    return aggregator, kept, updates


@dataclass
class Federation:
    """A federation in steps, so that tests can look between the rounds."""

    study: ResolvedStudy
    aggregator: ServerAggregator
    data: dict[str, SiteData]
    sessions: dict[str, SiteSession]
    kept: dict[str, Tensor]
    results: list[dict[str, RoundResult]]

    @classmethod
    def of(cls, study: ResolvedStudy, data: dict[str, SiteData] | None = None) -> "Federation":
        aggregator, began, offset = aggregator_of(study), bytearray(), 0
        aggregator.start(InMemory({key: tensor.numpy() for key, tensor in initial_model(study).items()}), began.extend)
        kept = {}
        for spec in aggregator.kept_specs:
            values = np.frombuffer(bytes(began), "<f4", spec.bytes // 4, offset)
            kept[spec.key] = torch.from_numpy(values.copy()).reshape(spec.shape)
            offset += spec.bytes
        data = data or {site: toy_data(site) for site in study.study.sites}
        sessions = {site: session_of(study, site, data[site]) for site in study.study.sites}
        return cls(study, aggregator, data, sessions, kept, [])

    def base(self, site: str) -> Any:
        return downlink(self.aggregator, self.kept, site, len(self.results) + 1)

    def round(self) -> dict[str, RoundResult]:
        number = len(self.results) + 1
        results = {site: session.train(number, self.base(site)) for site, session in self.sessions.items()}
        self.kept, _ = aggregate(self.study, self.aggregator, self.kept, number, results)
        self.results.append(results)
        return results

    def restart(self) -> None:
        """Every site goes on in a new process, from what it stored."""
        for site, session in self.sessions.items():
            state = session.export_state()
            state = SessionState(state.tensors, json.loads(json.dumps(state.meta)))
            self.sessions[site] = session_of(self.study, site, self.data[site], state=state)

    def digest(self) -> str:
        return manifest(self.kept, self.aggregator.kept_specs).digest()


# What holds for each of them


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("block", [1, 3, 7])
def test_the_size_of_the_blocks_does_not_matter(method: str, block: int) -> None:
    aggregator, kept, updates = random_round(study_of(method))
    whole = aggregated(aggregator, kept, updates)
    with mock.patch("fl_algorithms.server.aggregator.BLOCK", block):
        parts = aggregated(aggregator, kept, updates)
    assert all(np.array_equal(whole[key], parts[key]) for key in whole)


@pytest.mark.parametrize("method", METHODS)
def test_the_coordinators_files_give_the_labs_bits(method: str, tmp_path: Path) -> None:
    study = study_of(method)
    aggregator, kept, updates = random_round(study)

    def written(name: str, specs: Specs, arrays: Arrays) -> TensorFile:
        path = tmp_path / name
        path.write_bytes(file_header(specs) + b"".join(arrays[spec.key].tobytes() for spec in specs))
        return TensorFile(path)

    files = [written(site, aggregator.upload, deltas) for site, (_, deltas) in updates.items()]
    told = [Update(site, n, file) for (site, (n, _)), file in zip(updates.items(), files, strict=True)]
    out, base = bytearray(), written("kept", aggregator.kept_specs, kept)
    aggregator.aggregate(Round(1, base, told, out.extend))
    wanted = aggregated(aggregator, kept, updates)
    assert bytes(out) == b"".join(wanted[spec.key].tobytes() for spec in aggregator.kept_specs)
    assert aggregator.sources(base, "birch", 2) == aggregator.sources(InMemory(kept), "birch", 2)
    for file in (*files, base):
        file.close()


class Endless:
    """Tensors of any size that take no memory until they are read."""

    def block(self, key: str, start: int, count: int) -> NDArray[np.float32]:
        return np.full(count, 0.5, dtype=np.float32)


@pytest.mark.parametrize("method", METHODS)
def test_memory_grows_neither_with_the_sites_nor_with_the_model(method: str) -> None:
    def peak(sites: int, width: int) -> int:
        aggregator = aggregator_of(study_of(method, sites=sites, model={"name": "mlp", "hidden": [width]}))
        told = [Update(f"site-{number:03}", 1, Endless()) for number in range(sites)]
        tracemalloc.start()
        try:
            aggregator.aggregate(Round(1, Endless(), told, len))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    with mock.patch("fl_algorithms.server.aggregator.BLOCK", 4096):
        few = peak(4, 4096)
        assert peak(12, 4096) < 1.2 * few
        assert peak(4, 40960) < 1.2 * few


@pytest.mark.parametrize("method", METHODS)
def test_every_site_downloads_the_same_names_out_of_what_is_kept(method: str) -> None:
    study = study_of(method, sites=4, settings={"peers": 2} if method == "fedfomo" else {})
    aggregator = aggregator_of(study)
    kept, shapes = random_arrays(aggregator.kept_specs, 1), {spec.key: spec.shape for spec in aggregator.kept_specs}
    assert len(shapes) == len(aggregator.kept_specs)
    for site in study.study.sites:
        for round_number in (1, 2, 9):
            sources = aggregator.sources(InMemory(kept), site, round_number)
            assert [shapes[source] for source in sources] == [spec.shape for spec in aggregator.download]
            assert sources == aggregator.sources(InMemory(kept), site, round_number)


@pytest.mark.parametrize("iterator", ["round", "run"])
@pytest.mark.parametrize("method", METHODS)
def test_save_restart_and_resume_equals_an_uninterrupted_run(method: str, iterator: str) -> None:
    study = study_of(method, rounds=4, iterator=iterator)
    whole, parts = Federation.of(study), Federation.of(study)
    for _ in range(4):
        one, other = whole.round(), parts.round()
        parts.restart()
        for site in study.study.sites:
            assert one[site].metrics == other[site].metrics
            assert [(c.kind, c.score) for c in one[site].checkpoints] == [
                (c.kind, c.score) for c in other[site].checkpoints
            ]
        assert whole.digest() == parts.digest()
    for site, session in whole.sessions.items():
        state, restored = session.export_state(), parts.sessions[site].export_state()
        assert state.meta == restored.meta
        assert state.tensors.keys() == restored.tensors.keys()
        assert all(torch.equal(tensor, restored.tensors[name]) for name, tensor in state.tensors.items())


@pytest.mark.parametrize("method", METHODS)
def test_the_lab_gives_the_same_digest_again_and_the_steps_one_by_one(method: str) -> None:
    study = study_of(method)
    data = {site: toy_data(site) for site in study.study.sites}
    once, again = (run_federation(study, task_of(study), data) for _ in range(2))
    federation = Federation.of(study, data)
    for _ in range(study.study.rounds):
        federation.round()
    assert once.digest == again.digest == federation.digest()
    for site in study.study.sites:
        assert {"latest", "best_local"} <= once.checkpoints[site].keys()


@pytest.mark.parametrize("method", METHODS)
def test_what_leaves_is_exactly_what_was_described(method: str) -> None:
    study = study_of(method)
    for site, result in Federation.of(study).round().items():
        partition = describe(study, site)
        sent = {(bundle, name): tensor for bundle, part in result.uplink.items() for name, tensor in part.items()}
        assert {(spec.bundle, spec.name): spec.shape for spec in partition.upload} == {
            key: tuple(tensor.shape) for key, tensor in sent.items()
        }
        assert all(tensor.is_contiguous() and tensor.dtype == torch.float32 for tensor in sent.values())
        assert not {stay.name for stay in partition.private} & {spec.key for spec in partition.upload}


@pytest.mark.parametrize("method", METHODS)
def test_a_value_beyond_float32_is_refused_by_name(method: str) -> None:
    study = study_of(method)
    aggregator = aggregator_of(study)
    settings = {spec.key: np.full(spec.shape, 3e38, dtype=np.float32) for spec in aggregator.kept_specs}
    deltas = {spec.key: np.full(spec.shape, 3e38, dtype=np.float32) for spec in aggregator.upload}
    with pytest.raises(BadData, match="would be beyond float32, though each update is finite"):
        aggregated(aggregator, settings, dict.fromkeys(study.study.sites, (1, deltas)))


# Server optimizers


def server_of(method: str, specs: Specs, **server: float) -> ServerAggregator:
    study = study_of(method, settings={"server": server})
    return server_aggregator(study, specs)


def steps(aggregator: ServerAggregator, x: float, target: float, rounds: int) -> float:
    """One weight, of which every round every site sends what is missing to ``target``."""
    kept = {kept.spec.key: np.full(1, kept.value, np.float32) for kept in aggregator.keeps}
    kept |= {"w": np.array([x], np.float32)}
    for _ in range(rounds):
        delta = np.array([target], np.float32) - kept["w"]
        kept = aggregated(aggregator, kept, {"ash": (3, {"w": delta}), "birch": (8, {"w": delta})})
    return float(kept["w"][0])


WEIGHT = (TensorSpec("w", "F32", (1,)),)


def test_fedadam_gives_the_golden_value_of_thirty_rounds() -> None:
    """x0 = 2, target 0.1, b1 = b2 = 0.9, tau = 1e-9, eta = 0.1; a bias correction would lead to -0.3128."""
    aggregator = server_of("fedadam", WEIGHT, beta1=0.9, beta2=0.9, learning_rate=0.1, tau=1e-9)
    derived = reference.server_steps("adam", 2.0, lambda x: 0.1 - x, 30, eta=0.1, b1=0.9, b2=0.9, tau=1e-9)
    assert derived == pytest.approx(-0.2046, abs=5e-5)
    assert steps(aggregator, 2.0, 0.1, 30) == pytest.approx(derived, abs=1e-5)


@pytest.mark.parametrize("v_0", [None, 0.0, 0.7])
@pytest.mark.parametrize("rounds", [1, 2, 7])
@pytest.mark.parametrize("method", OPTIMIZERS)
def test_the_server_optimizers_match_the_slow_reference(method: str, rounds: int, v_0: float | None) -> None:
    begun = {} if v_0 is None else {"v_0": v_0}
    aggregator = server_of(method, WEIGHT, learning_rate=0.3, beta1=0.8, beta2=0.7, tau=0.3, **begun)
    optimizer = study_of(method).file.algorithm.settings["server"]["optimizer"]
    slow = reference.server_steps(optimizer, 2.0, lambda x: 0.1 - x, rounds, eta=0.3, b1=0.8, b2=0.7, tau=0.3, v_0=v_0)
    assert steps(aggregator, 2.0, 0.1, rounds) == pytest.approx(slow, rel=1e-5)


@pytest.mark.parametrize("delta", [1e-4, 3.0, -250.0])
def test_the_first_step_of_fedadam_has_one_size_whatever_was_trained(delta: float) -> None:
    eta, beta1, beta2 = 0.1, 0.9, 0.99
    aggregator = server_of("fedadam", WEIGHT, learning_rate=eta, beta1=beta1, beta2=beta2)
    step = steps(aggregator, 0.0, delta, 1)
    assert step == pytest.approx(np.sign(delta) * eta * (1 - beta1) / (1 - beta2) ** 0.5, rel=1e-4)


@pytest.mark.parametrize("method", OPTIMIZERS)
def test_without_a_delta_and_without_moments_nothing_moves(method: str) -> None:
    assert steps(server_of(method, WEIGHT), 1.25, 1.25, 3) == 1.25


numbers = st.lists(st.floats(-100, 100, width=32), min_size=5, max_size=5)


@given(base=numbers, updates=st.lists(st.tuples(st.integers(1, 10_000), numbers), min_size=1, max_size=3))
def test_momentum_of_zero_with_rate_one_is_the_mean_bit_for_bit(
    base: list[float], updates: list[tuple[int, list[float]]]
) -> None:
    specs = (TensorSpec("w", "F32", (5,)),)
    sent = {f"site-{place}": (n, {"w": np.array(delta, np.float32)}) for place, (n, delta) in enumerate(updates)}
    kept = {"w": np.array(base, np.float32), "moment1/w": np.array(base, np.float32)}
    moved = aggregated(server_of("fedavgm", specs, beta1=0.0, learning_rate=1.0), kept, sent)
    plain = aggregated(server_aggregator(toy_study(), specs), {"w": kept["w"]}, sent)
    assert moved["w"].tobytes() == plain["w"].tobytes()


def test_a_federation_with_momentum_of_zero_is_fedavg_bit_for_bit() -> None:
    runs = [Federation.of(study_of("fedavgm", settings={"server": {"beta1": 0.0}})), Federation.of(study_of("fedavg"))]
    for _ in range(3):
        for run in runs:
            run.round()
    assert all(torch.equal(runs[0].kept[key], tensor) for key, tensor in runs[1].kept.items())


@pytest.mark.parametrize("method", OPTIMIZERS)
def test_running_statistics_are_plain_means_without_moments(method: str) -> None:
    study = study_of(method, model=BATCH_NORM)
    aggregator, kept, updates = random_round(study)
    plain = aggregated(aggregator_of(study_of("fedavg", model=BATCH_NORM)), kept, updates)
    moved = aggregated(aggregator, kept, updates)
    statistics = [spec.key for spec in aggregator.upload if ".running_" in spec.key]
    assert len(statistics) == 2
    for spec in aggregator.upload:
        assert np.array_equal(moved[spec.key], plain[spec.key]) == (spec.key in statistics)
    orders = [spec.bundle for spec in aggregator.kept_specs if spec.bundle != "model"]
    assert len(orders) == (len(aggregator.upload) - 2) * (1 if method == "fedavgm" else 2)
    assert not any("running" in spec.name for spec in aggregator.kept_specs if spec.bundle != "model")


def test_moments_are_kept_at_the_coordinator_alone() -> None:
    aggregator = aggregator_of(study_of("fedadam"))
    assert aggregator.download == aggregator.upload
    assert not aggregator.passes
    assert {kept.value for kept in aggregator.keeps if kept.source == ""} == {0.0, 1e-18}  # m, and v at tau^2


def test_the_second_moment_of_yogi_is_never_negative() -> None:
    rng, aggregator = np.random.default_rng(1), server_of("fedyogi", WEIGHT, beta2=0.1)
    kept = {spec.key: np.zeros(1, np.float32) for spec in aggregator.kept_specs}
    for _ in range(200):
        delta = (rng.normal(size=1) * 10 ** rng.uniform(-3, 3)).astype(np.float32)
        kept = aggregated(aggregator, kept, {"ash": (1, {"w": delta})})
        assert kept["moment2/w"][0] >= 0


def test_a_server_optimizer_may_follow_the_mean_of_any_method() -> None:
    study = toy_study("fenda", FENDA, algorithm_settings={"server": {"optimizer": "yogi"}})
    aggregator = aggregator_of(study)
    bundles_kept = {spec.bundle for spec in aggregator.kept_specs}
    assert bundles_kept == {"model", "moment1", "moment2"}
    assert all(spec.name.startswith("shared_extractor.") for spec in aggregator.kept_specs)


# SCAFFOLD


def control_of(session: SiteSession) -> dict[str, Tensor]:
    return {key.removeprefix("control."): tensor for key, tensor in session._context.kept.items()}


def global_control(federation: Federation) -> dict[str, Tensor]:
    return {k.removeprefix("control/"): tensor for k, tensor in federation.kept.items() if k.startswith("control/")}


def test_a_control_variate_is_the_mean_of_the_rounds_raw_gradients() -> None:
    federation = Federation.of(study_of("scaffold"))
    raw: list[dict[str, Tensor]] = []
    session = federation.sessions["ash"]
    context = session._context

    def recording(given_context: Any, batch: Any) -> None:
        named = scaffold_client.controlled(given_context.networks).items()
        raw.append({name: p.grad.clone() for name, p in named if p.grad is not None})
        scaffold_client.correct(given_context, batch)

    context.algorithm = replace(context.algorithm, after_backward=recording)
    for round_number in (1, 2, 3):
        raw.clear()
        federation.round()
        assert len(raw) == 6
        for name, control in control_of(session).items():
            mean = torch.stack([step[name].double() for step in raw]).mean(0).float()
            torch.testing.assert_close(control, mean, rtol=1e-4, atol=1e-5)
        corrections = context.scratch["correction"].values()
        assert any(correction.any() for correction in corrections) == (round_number > 1)


def test_with_every_site_the_global_control_is_the_mean_of_the_sites() -> None:
    """And so the corrections c - c_i of all sites sum to zero."""
    federation = Federation.of(study_of("scaffold"))
    for _ in range(3):
        federation.round()
        own = [control_of(session) for session in federation.sessions.values()]
        for name, c in global_control(federation).items():
            assert c.any()
            torch.testing.assert_close(c, torch.stack([site[name] for site in own]).mean(0), rtol=1e-5, atol=1e-6)
            total = sum((c - site[name] for site in own), torch.zeros_like(c))
            torch.testing.assert_close(total, torch.zeros_like(c), rtol=0, atol=1e-5)


def test_the_first_round_of_scaffold_is_fedavg_of_sites_that_count_alike() -> None:
    data = {site: toy_data(site, rows=rows) for site, rows in zip(SITES, (22, 40, 13), strict=True)}
    mean = Federation.of(study_of("fedavg", reported={"counts": "uniform"}, **PLAIN_SGD), data)
    controlled = Federation.of(study_of("scaffold"), data)
    mean.round()
    controlled.round()
    assert all(torch.equal(controlled.kept[key], tensor) for key, tensor in mean.kept.items())
    controlled.round()
    mean.round()
    assert not all(torch.equal(controlled.kept[key], tensor) for key, tensor in mean.kept.items())


def test_one_site_of_scaffold_is_local_sgd() -> None:
    controlled = Federation.of(study_of("scaffold", sites=1))
    plain = Federation.of(study_of("fedavg", sites=1, **PLAIN_SGD))
    for _ in range(4):
        controlled.round()
        plain.round()
        correction = controlled.sessions["ash"]._context.scratch["correction"]
        assert not any(tensor.any() for tensor in correction.values())
        assert all(torch.equal(controlled.kept[key], tensor) for key, tensor in plain.kept.items())


def test_without_steps_no_control_moves() -> None:
    federation = Federation.of(study_of("scaffold", local_steps=0))
    before = federation.digest()
    federation.round()
    assert federation.digest() == before
    assert not any(tensor.any() for tensor in control_of(federation.sessions["ash"]).values())


def test_the_server_rate_scales_parameters_and_the_share_of_the_sites_the_control() -> None:
    """Two of three sites, of different size: uniform means; statistics as they are averaged."""
    study = study_of("scaffold", settings={"server_learning_rate": 0.25}, model=BATCH_NORM)
    aggregator, kept, updates = random_round(study, answered=2)
    assert aggregator.passes
    new = aggregated(aggregator, kept, updates)
    for spec in aggregator.upload:
        mean = np.mean([deltas[spec.key].astype(np.float64) for _, deltas in updates.values()], axis=0)
        rate = 2 / 3 if spec.bundle == "control" else 1.0 if ".running_" in spec.name else 0.25
        np.testing.assert_allclose(new[spec.key], kept[spec.key] + rate * mean, rtol=1e-6, atol=1e-6)
    assert not any("running" in spec.name for spec in aggregator.upload if spec.bundle == "control")


def test_fine_tuning_after_scaffold_is_not_corrected() -> None:
    federation = Federation.of(study_of("scaffold"))
    for _ in range(2):
        federation.round()
    tensors = {key: tensor for key, tensor in federation.kept.items() if not key.startswith("control/")}
    plain = Federation.of(study_of("fedavg", **PLAIN_SGD)).sessions["ash"]
    plain._context.round_number = 2
    tuning = FineTuning(steps=5)
    mine, theirs = (session.tuned(tensors, tuning) for session in (federation.sessions["ash"], plain))
    assert all(torch.equal(mine[key], tensor) for key, tensor in theirs.items())
    assert not torch.equal(mine["head.weight"], tensors["head.weight"])


# FedFomo


def test_a_site_downloads_its_own_last_model_and_those_of_all_others() -> None:
    federation = Federation.of(study_of("fedfomo"))
    sent = {}
    for site, result in federation.round().items():
        start = start_of(federation.study)["model"]
        sent[site] = {name: start[name] + delta for name, delta in result.uplink["model"].items()}
    for position, site in enumerate(SITES):
        base = federation.base(site)
        assert all(torch.equal(base["model"][name], tensor) for name, tensor in sent[site].items())
        others = [other for other in range(3) if other != position]
        assert [int(base["peers"][str(place)].item()) for place in range(2)] == others
        for place, other in enumerate(others):
            theirs = sent[SITES[other]]
            assert all(torch.equal(base[f"peer_{place}"][name], tensor) for name, tensor in theirs.items())


def loss_at(federation: Federation, site: str, model: Mapping[str, Tensor]) -> float:
    """Of a site's validation rows, through a checkpoint."""
    task, rows = task_of(federation.study), federation.data[site].validation
    return float(task.losses(Restored(federation.study, task, model).logits(rows.x), rows.y).double().mean())


def flat(model: Mapping[str, Tensor]) -> list[float]:
    return [value for name in sorted(model) for value in model[name].double().flatten().tolist()]


def before(session: SiteSession) -> dict[str, Tensor]:
    """The model with which a site's last training began."""
    kept = session._context.kept
    return {key.removeprefix("before."): tensor for key, tensor in kept.items() if key.startswith("before.")}


def test_the_mixed_model_matches_the_slow_reference_and_is_what_is_judged() -> None:
    federation, kept = Federation.of(study_of("fedfomo", rounds=4, learning_rate=0.3)), set()
    for _ in range(4):
        federation.round()
        for site, session in federation.sessions.items():
            base, began = federation.base(site), before(session)
            models = [base["model"], base["peer_0"], base["peer_1"]]
            losses = [loss_at(federation, site, model) for model in models]
            raw, wanted = reference.fomo_mix(
                flat(began), [flat(model) for model in models], loss_at(federation, site, began), losses, guard=1e-5
            )
            session = session_of(federation.study, site, federation.data[site], state=session.export_state())
            judged = session.validate(len(federation.results) + 1, base)
            latest = next(c for c in judged.checkpoints if c.kind == "latest")
            assert list(session._context.scratch["weights"].values()) == pytest.approx(raw, rel=1e-4, abs=1e-6)
            np.testing.assert_allclose(flat(latest.tensors), wanted, rtol=1e-4, atol=1e-6)
            assert judged.metrics["val_loss"] == latest.val_loss == loss_at(federation, site, latest.tensors)
            kept.add(raw[0] > 0)
    assert kept == {True, False}, "the made-up patients should show training that helps and training that does not"


def lowered(federation: Federation, site: str, model: Mapping[str, Tensor], steps: int) -> dict[str, Tensor]:
    """``model`` after a few small steps down its loss on the site's validation rows."""
    task, rows = task_of(federation.study), federation.data[site].validation
    restored = Restored(federation.study, task, model)
    network = restored.networks["model"]
    for _ in range(steps):
        network.zero_grad()
        task.loss(network(rows.x), rows.y).backward()  # type: ignore[no-untyped-call]
        for parameter in network.parameters():
            assert parameter.grad is not None
            parameter.data -= 1e-4 * parameter.grad
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}


def test_a_peer_that_is_barely_better_does_not_replace_what_the_site_has_learned() -> None:
    """The site's own training is one of the candidates, held like the others against the model before it."""
    federation = Federation.of(study_of("fedfomo", sites=2, local_steps=20))
    federation.round()
    base = dict(federation.base("ash"))
    began, own = before(federation.sessions["ash"]), base["model"]
    base["peer_0"] = lowered(federation, "ash", own, steps=1)
    losses = [loss_at(federation, "ash", model) for model in (base["peer_0"], own, began)]
    assert losses == sorted(losses)
    assert losses[1] - losses[0] < 1e-3 * (losses[2] - losses[1])
    federation.sessions["ash"].validate(2, base)
    mixed = fedfomo_client.normalized(federation.sessions["ash"]._context.scratch["weights"])
    assert mixed == pytest.approx({0: 0.5, 1: 0.5}, abs=0.01)


def test_exploration_draws_from_the_studys_seed() -> None:
    settings = {"peers": 2, "explore": 1.0, "explore_decay": 0.0}
    picks = []
    for seed in (5, 6, 5):
        aggregator = aggregator_of(study_of("fedfomo", sites=8, settings=settings, seed=seed))
        kept = InMemory(random_arrays(aggregator.kept_specs, 1))
        rounds = [aggregator.sources(kept, "site-000", number) for number in range(1, 9)]
        picks.append([[s for s in sources if s.startswith("numbers/")] for sources in rounds])
    assert picks[0] == picks[2] != picks[1]


@given(weights=st.dictionaries(st.integers(0, 9), st.floats(-1e3, 1e3)))
def test_mixing_weights_are_positive_and_sum_to_one_or_there_are_none(weights: dict[int, float]) -> None:
    mixed = fedfomo_client.normalized(weights)
    assert mixed.keys() == {position for position, weight in weights.items() if weight > 0}
    assert all(weight >= 0 for weight in mixed.values())
    assert not mixed or sum(mixed.values()) == pytest.approx(1)


def test_where_no_peer_is_better_what_the_site_has_learned_stays_to_the_bit() -> None:
    federation = Federation.of(study_of("fedfomo", local_steps=20))
    federation.round()
    base = federation.base("ash")
    broken = {name: 1e6 * torch.ones_like(tensor) for name, tensor in base["model"].items()}
    not_numbers = {name: torch.full_like(tensor, torch.nan) for name, tensor in base["model"].items()}
    session = federation.sessions["ash"]
    result = session.train(2, {**base, "peer_0": broken, "peer_1": not_numbers})
    latest = next(c for c in result.checkpoints if c.kind == "latest")
    assert all(torch.equal(latest.tensors[name], tensor) for name, tensor in base["model"].items())
    weights = result.uplink["affinity"]["weights"]
    assert weights[0] == 0
    assert weights[1] < 0
    assert weights[2] == 0, "a loss that is no number counts for nothing"


def test_a_copy_of_the_own_model_has_weight_zero() -> None:
    federation = Federation.of(study_of("fedfomo"))
    uplinks = federation.round()  # in the first round every site's model is the initial one
    for result in uplinks.values():
        assert not result.uplink["affinity"]["weights"].any()


def test_the_coordinator_sums_what_peers_are_worth_and_keeps_who_did_not_answer() -> None:
    study = study_of("fedfomo")
    aggregator, kept, updates = random_round(study, answered=2)
    for position in range(3):
        kept[f"numbers/{position}"] = np.array([position], np.float32)
    new = aggregated(aggregator, kept, updates)
    for position, site in enumerate(SITES):
        assert new[f"numbers/{position}"] == position
        deltas = updates[site][1] if site in updates else None
        for key in new:
            bundle, _, name = key.rpartition("/")
            leaf = {f"site_{position}": name, "affinity": "affinity/weights"}.get(bundle)
            if leaf is None or (bundle == "affinity" and name != str(position)):
                continue
            wanted = kept[key] if deltas is None else kept[key] + deltas[leaf]
            np.testing.assert_allclose(new[key], wanted, rtol=1e-6, atol=1e-6)


def test_without_exploring_the_best_peers_come() -> None:
    affinities = np.array([9.0, 0.5, -1.0, 0.25, 0.75], np.float32)
    for seed in range(20):
        assert choose_peers(affinities, 0, 2, 0.0, np.random.default_rng(seed)) == [1, 4]
        assert choose_peers(affinities, 4, 2, 0.0, np.random.default_rng(seed)) == [0, 1]
        assert choose_peers(affinities, 0, 4, 1.0, np.random.default_rng(seed)) == [1, 2, 3, 4]


def test_exploring_and_ties_bring_every_peer_now_and_then() -> None:
    ranked, equal = np.array([0.0, 3.0, 2.0, 1.0], np.float32), np.zeros(4, np.float32)
    for affinities, chance in ((ranked, 1.0), (equal, 0.0)):
        drawn = [tuple(choose_peers(affinities, 0, 1, chance, np.random.default_rng(seed))) for seed in range(300)]
        counts = [drawn.count((position,)) for position in (1, 2, 3)]
        assert sum(counts) == 300
        assert min(counts) > 70


def test_exploring_ends_when_its_chance_has_fallen_to_nothing() -> None:
    study = study_of("fedfomo", sites=8, settings={"peers": 2, "explore": 1.0, "explore_decay": 0.1})
    aggregator = aggregator_of(study)
    kept = random_arrays(aggregator.kept_specs, 1)
    own = kept["affinity/0"].copy()
    own[0] = -np.inf
    best = {f"numbers/{position}" for position in np.argsort(own)[-2:]}
    picks = [
        {s for s in aggregator.sources(InMemory(kept), "site-000", round_number) if s.startswith("numbers/")}
        for round_number in range(1, 31)
    ]
    assert any(pick != best for pick in picks[:5])
    assert all(pick == best for pick in picks[10:])


def test_one_site_of_fedfomo_trains_alone_and_goes_back_where_that_made_it_worse() -> None:
    alone = Federation.of(study_of("fedfomo", sites=1, learning_rate=0.3, rounds=6))
    went = set()
    for _ in range(6):
        alone.round()
        session, own = alone.sessions["ash"], alone.base("ash")["model"]
        began = before(session)
        better = loss_at(alone, "ash", own) < loss_at(alone, "ash", began)
        again = session_of(alone.study, "ash", alone.data["ash"], state=session.export_state())
        again.validate(len(alone.results) + 1, alone.base("ash"))
        mixed = again._context.networks["model"].state_dict()
        assert all(torch.equal(mixed[name], (own if better else began)[name]) for name in began)
        went.add(better)
    assert went == {True, False}


@pytest.mark.parametrize("number", [0, 3, -1, 2], ids=["itself", "beyond", "negative", "twice"])
def test_a_peer_that_cannot_be_is_refused(number: int) -> None:
    federation = Federation.of(study_of("fedfomo"))
    base = federation.base("ash")
    with pytest.raises(BadData, match="which is no peer"):
        federation.sessions["ash"].train(1, {**base, "peers": {**base["peers"], "0": torch.tensor([float(number)])}})


# FedSM


def personal_of(arrays: Mapping[str, Any], position: int) -> dict[str, Any]:
    prefix = f"personals/{position}."
    return {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}


def pulled(lam: float, sites: int, answered: int | None = None) -> tuple[list[Arrays], list[Arrays]]:
    """The personal networks as trained and after SoftPull, for each site."""
    aggregator, kept, updates = random_round(study_of("fedsm", sites=sites, settings={"lam": lam}), answered)
    new, trained = aggregated(aggregator, kept, updates), []
    for position, site in enumerate(half_sites(sites)):
        own = personal_of(kept, position)
        if site in updates:
            own = {name: array + updates[site][1][f"personal/{name}"] for name, array in own.items()}
        trained.append(own)
    return trained, [personal_of(new, position) for position in range(sites)]


def half_sites(sites: int) -> tuple[str, ...]:
    return study_of("fedsm", sites=sites).study.sites


@pytest.mark.parametrize("answered", [None, 2], ids=["all answered", "two of three"])
@pytest.mark.parametrize("lam", [0.0, 0.25, 0.7, 1.0])
def test_soft_pull_matches_the_slow_reference_and_conserves_the_sum(lam: float, answered: int | None) -> None:
    trained, new = pulled(lam, 3, answered)
    for name in trained[0]:
        slow = reference.soft_pull([model[name].flatten().tolist() for model in trained], Fraction(lam))
        for model, wanted in zip(new, slow, strict=True):
            np.testing.assert_allclose(model[name].flatten(), [float(v) for v in wanted], rtol=1e-5, atol=1e-6)
        before, after = (np.sum([model[name] for model in models], axis=0) for models in (trained, new))
        np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-5)


def test_lambda_one_pulls_nothing_and_one_over_n_makes_all_equal() -> None:
    trained, new = pulled(1.0, 4)
    for own, model in zip(trained, new, strict=True):
        for name in own:
            np.testing.assert_array_max_ulp(model[name], own[name], maxulp=1)
    trained, new = pulled(0.25, 4)
    for name in trained[0]:
        mean = np.mean([own[name] for own in trained], axis=0)
        for model in new:
            np.testing.assert_allclose(model[name], mean, rtol=1e-5, atol=1e-6)


def test_one_site_alone_keeps_its_personal_network() -> None:
    trained, new = pulled(0.3, 1)
    for name in trained[0]:
        np.testing.assert_array_max_ulp(new[0][name], trained[0][name], maxulp=1)
    federation = Federation.of(study_of("fedsm", sites=1))
    for _ in range(2):
        result = federation.round()["ash"]
    assert result.metrics["val_loss"] is not None


def test_the_global_network_of_fedsm_is_fedavgs_bit_for_bit() -> None:
    both = [Federation.of(study_of(method)) for method in ("fedsm", "fedavg")]
    for _ in range(3):
        for federation in both:
            federation.round()
    assert all(torch.equal(both[0].kept[key], tensor) for key, tensor in both[1].kept.items())


def test_with_lambda_one_a_personal_network_learns_from_its_own_site_alone() -> None:
    study = study_of("fedsm", settings={"lam": 1.0})
    others = {site: toy_data(site, seed=1 if site == "ash" else 2) for site in SITES}
    one, other = Federation.of(study), Federation.of(study, others)
    for _ in range(3):
        one.round()
        other.round()
    mine, theirs = personal_of(one.kept, 0), personal_of(other.kept, 0)
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
    assert not torch.equal(one.kept["head.weight"], other.kept["head.weight"])


class Fixed(nn.Module):
    """A selector with logits of its own for the rows 0, 1, 2, ..., or a network that says one number."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = values

    def forward(self, x: Tensor) -> Tensor:
        return self.values[x[:, 0].long()] if self.values.dim() == 2 else self.values.expand(len(x), 1)


def answers(probabilities: list[list[float]], gamma: float) -> list[float]:
    """Of the super model, a row for each of the selector's answers; the global network says 9, personal i says i."""
    selector = Fixed(torch.tensor(probabilities).log())
    personals = nn.ModuleList(Fixed(torch.tensor([float(i)])) for i in range(len(probabilities[0])))
    networks = {"model": Fixed(torch.tensor([9.0])), "selector": selector, "personals": personals}
    rows = torch.arange(float(len(probabilities)))[:, None]
    return [float(value) for value in fedsm_client.super_model(networks, rows, gamma)[:, 0]]


def test_the_super_model_answers_each_row_with_whom_the_selector_is_sure_of() -> None:
    said = answers([[0.95, 0.03, 0.02], [0.05, 0.92, 0.03], [0.4, 0.5, 0.1], [0.02, 0.03, 0.95]], gamma=0.9)
    assert said == [0.0, 1.0, 9.0, 2.0]


def test_fedsm_can_answer_with_the_sites_own_personal_network() -> None:
    said = {}
    for answer in ("super", "personal"):
        study = study_of("fedsm", settings={"answer": answer, "gamma": 2.0})
        outcome = run_federation(study, task_of(study), {site: toy_data(site) for site in study.study.sites})
        latest, x = outcome.checkpoints["ash"]["latest"], toy_data("ash").train.x
        model = Restored(study, task_of(study), latest.tensors)
        said[answer] = outcome.digest
        alone = model.networks["personal" if answer == "personal" else "model"]
        torch.testing.assert_close(model.logits(x), alone(x).detach(), rtol=0, atol=0)
    assert said["super"] == said["personal"]


@pytest.mark.parametrize(("gamma", "wanted"), [(0.0, [0.0, 1.0]), (1.0, [9.0, 9.0]), (2.0, [9.0, 9.0])])
def test_gamma_zero_is_always_personal_and_gamma_one_always_global(gamma: float, wanted: list[float]) -> None:
    assert answers([[1.0, 0.0], [0.5 - 1e-3, 0.5 + 1e-3]], gamma) == wanted


def test_a_rows_answer_does_not_depend_on_the_rows_beside_it() -> None:
    study = study_of("fedsm", settings={"gamma": 0.4, "selector_learning_rate": 0.05, "selector_epochs": 5})
    federation = Federation.of(study)
    for _ in range(3):
        federation.round()
    session, x = federation.sessions["ash"], torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    session.validate(4, federation.base("ash"))
    algorithm, networks = session._context.algorithm, session._context.networks
    together = compute_logits(algorithm, networks, x)
    alone = torch.cat([compute_logits(algorithm, networks, row[None]) for row in x])
    torch.testing.assert_close(together, alone)
    assert not torch.equal(together, networks["model"](x)), "some rows should be answered by a personal network"


@pytest.mark.parametrize("epochs", [1, 3])
def test_the_selector_takes_one_adam_step_on_all_rows_for_each_epoch(epochs: int) -> None:
    study = study_of("fedsm", settings={"selector_epochs": epochs, "selector_learning_rate": 0.01})
    session, base, data = session_of(study, "birch"), start_of(study), toy_data("birch")
    zero = {f"{place}.{name}": t for place in range(3) for name, t in base["personal"].items()}
    twin = session._context.networks["selector"].__class__(3, 3, (16,), 0.0, "none")
    twin.load_state_dict(dict(base["selector"]))
    adam = torch.optim.Adam(twin.parameters(), lr=0.01)
    for round_number in range(1, 5):
        uplink = session.train(round_number, {**base, "personals": zero}).uplink
        base = bundles(
            {
                name if bundle == "model" else f"{bundle}/{name}": base[bundle][name] + delta
                for bundle, part in uplink.items()
                for name, delta in part.items()
            }
        )
        for _ in range(epochs):
            adam.zero_grad()
            nn.functional.cross_entropy(twin(data.train.x), torch.full((len(data.train),), 1)).backward()
            adam.step()
        for name, parameter in twin.named_parameters():
            torch.testing.assert_close(base["selector"][name], parameter.detach(), rtol=1e-4, atol=1e-5)
            state = adam.state[parameter]
            torch.testing.assert_close(base["selector_m"][name], state["exp_avg"], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(base["selector_v"][name], state["exp_avg_sq"], rtol=1e-4, atol=1e-7)


def test_the_selector_learns_to_tell_the_sites_apart_though_each_has_one_class() -> None:
    def moved(split: Split, shift: float) -> Split:
        return Split(split.x + shift, split.y)

    study = study_of("fedsm", rounds=30, settings={"selector_learning_rate": 0.03})
    data = {}
    for site, shift in zip(SITES, (-4.0, 0.0, 4.0), strict=True):
        plain = toy_data(site)
        data[site] = replace(plain, train=moved(plain.train, shift), validation=moved(plain.validation, shift))
    federation = Federation.of(study, data)
    for _ in range(30):
        federation.round()
    for position, (site, session) in enumerate(federation.sessions.items()):
        session.validate(31, federation.base(site))
        with torch.no_grad():
            said = session._context.networks["selector"](data[site].validation.x).argmax(1)
        assert (said == position).double().mean() > 0.85


def test_a_session_stores_none_of_the_other_sites_networks() -> None:
    federation = Federation.of(study_of("fedsm"))
    federation.round()
    assert not any(name.startswith("private/") for name in federation.sessions["ash"].export_state().tensors)
    partition = describe(federation.study, "ash")
    assert partition.private == ()
    assert {spec.bundle for spec in partition.download} - {spec.bundle for spec in partition.upload} == {"personals"}


def test_a_checkpoint_of_fedsm_is_the_whole_super_model() -> None:
    study = study_of("fedsm", settings={"gamma": 0.0})
    federation = Federation.of(study)
    for _ in range(2):
        latest = next((c for c in federation.round()["ash"].checkpoints if c.kind == "latest"), None)
    assert latest is not None
    x = federation.data["ash"].validation.x
    restored = Restored(study, task_of(study), latest.tensors)
    selector = restored.networks["selector"]
    for row in x:
        own = int(selector(row[None]).argmax())
        personal = list(restored.networks["personals"].children())[own]
        torch.testing.assert_close(restored.logits(row[None]), personal(row[None]).detach())


def test_what_is_kept_begins_as_the_initial_model_or_as_zero() -> None:
    federation = Federation.of(study_of("fedsm"))
    start = initial_model(federation.study)
    for position in range(3):
        for name, tensor in personal_of(federation.kept, position).items():
            assert torch.equal(tensor, start[f"personal/{name}"])
    assert not any(t.any() for key, t in federation.kept.items() if key.startswith(("selector_m", "selector_v")))


@pytest.mark.parametrize("method", ["fedfomo", "fedsm"])
def test_the_closing_round_tunes_a_copy_of_what_was_judged(method: str) -> None:
    study = study_of(method, settings={"fine_tuning": {"steps": 0}})
    federation = Federation.of(study)
    federation.round()
    judged = federation.sessions["ash"].validate(2, federation.base("ash")).checkpoints
    latest, tuned = (next(c for c in judged if c.kind == kind) for kind in ("latest", "fine_tuned"))
    assert all(torch.equal(tuned.tensors[name], tensor) for name, tensor in latest.tensors.items())
    more = federation.sessions["ash"].tuned(latest.tensors, FineTuning(steps=3))
    assert not all(torch.equal(more[name], tensor) for name, tensor in latest.tensors.items())


def selector_of(study: ResolvedStudy) -> nn.Module:
    networks = session_of(study, data=image_data()) if study.task.name == "images" else session_of(study)
    return networks._context.networks["selector"]


def image_data() -> SiteData:
    generator = torch.Generator().manual_seed(0)
    split = Split(torch.randn(12, 1, 8, 8, generator=generator), torch.arange(12) % 2)
    return SiteData(split, split, None, digest="0" * 64)


def test_the_selector_is_convolutional_for_images_and_an_mlp_for_tables() -> None:
    """A place in an image means little to whose it is; as an MLP of its pixels the selector learned just that."""
    images = selector_of(image_study(algorithm="fedsm"))
    assert [type(layer) for layer in images.modules() if isinstance(layer, nn.Conv2d)] == 3 * [nn.Conv2d]
    assert images(torch.randn(2, 1, 5, 9)).shape == images(torch.randn(2, 1, 1, 1)).shape == (2, 2)
    tables = image_study(algorithm="fedsm").file.model_dump()
    told = resolve(StudyFile.model_validate({**tables, "algorithm": {"name": "fedsm", "selector": "mlp"}}))
    for of_rows in (selector_of(told), selector_of(study_of("fedsm"))):
        assert not any(isinstance(layer, nn.Conv2d) for layer in of_rows.modules())
    volumes = fedsm_client.ConvolutionalSelector((1, 4, 4, 4), 3, (2,))
    assert volumes(torch.randn(2, 1, 4, 4, 4)).shape == (2, 3)
    with pytest.raises(BadData, match="which is for images") as refusal:
        session_of(study_of("fedsm", settings={"selector": "convolutional"}))
    assert refusal.value.hint == 'leave it out, or `selector = "mlp"`'


def test_the_selectors_gradient_does_not_depend_on_the_pieces() -> None:
    study = study_of("fedsm")
    context = session_of(study)._context
    whole = fedsm_client.selector_gradient(context)
    with mock.patch("fl_algorithms.engine.judging.EVALUATION_BATCH", 5):
        pieces = fedsm_client.selector_gradient(context)
    assert all(gradient.any() for gradient in whole.values())
    for name, gradient in whole.items():
        torch.testing.assert_close(pieces[name], gradient)
