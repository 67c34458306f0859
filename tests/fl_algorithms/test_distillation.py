"""FedMD, DS-FL and KT-pFL: what the coordinator makes of predictions, and what a site learns. FedDF and pFedDF."""

import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fl_algorithms.engine.algorithm import compute_logits
from fl_algorithms.engine.partition import describe, initial_model, task_of
from fl_algorithms.engine.session import Restored, SiteSession
from fl_algorithms.engine.training import seeded
from fl_algorithms.lab.federation import run_federation
from fl_algorithms.methods.dsfl.server import entropy_reduced
from fl_algorithms.methods.feddf import EarlyStopping, ensemble
from fl_algorithms.methods.feddf.ensemble import distilled, ensemble_targets
from fl_algorithms.methods.feddf.server import require_torch
from fl_algorithms.methods.fedmd import FedMdSettings
from fl_algorithms.methods.ktpfl import KtPflSettings
from fl_algorithms.methods.ktpfl.server import mean_products, moved, nearest_on_simplex, released_step
from fl_algorithms.methods.settings import Amount
from fl_algorithms.server.aggregator import Round, ServerAggregator, Update, server_aggregator
from fl_algorithms.server.mean import InMemory
from fl_algorithms.streams import stream_seed
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import PublicData
from fl_algorithms.tasks.public_data import public_data_digest, read_public_data
from tests import reference
from tests.fl_algorithms.toys import session_of, toy_data, toy_public_data, toy_study
from wardround.errors import BadData
from wardround.tensors.manifests import TensorSpec

METHODS = ["fedmd", "dsfl", "ktpfl"]
SITES = ["ash", "birch", "cedar"]
NAME = {"fedmd": "logits", "dsfl": "probabilities", "ktpfl": "probabilities"}
BUNDLE = {"fedmd": "consensus", "dsfl": "consensus", "ktpfl": "mixture"}
F32 = NDArray[np.float32]


def study_of(method: str, *, sites: int = 3, **settings: Any) -> ResolvedStudy:
    changes = {key: settings.pop(key) for key in ("rounds", "model", "optimizer") if key in settings}
    return toy_study(method, sites=SITES[:sites], algorithm_settings=settings, **changes)


def aggregator_of(study: ResolvedStudy) -> ServerAggregator:
    return server_aggregator(study, describe(study, study.study.sites[0]).upload)


def rows(seed: int, shape: tuple[int, int] = (10, 2)) -> F32:
    """Probabilities."""
    raised = np.exp(np.random.default_rng(seed).normal(size=shape))
    return (raised / raised.sum(axis=1, keepdims=True)).astype("<f4")


def after(aggregator: ServerAggregator, kept: dict[str, F32], sent: dict[str, F32]) -> dict[str, F32]:
    """What is kept after a round in which these sites sent these predictions."""
    payload = bytearray()
    updates = [Update(site, 5, InMemory({aggregator.upload[0].key: array})) for site, array in sorted(sent.items())]
    aggregator.aggregate(Round(1, InMemory(kept), updates, payload.extend))
    return read(aggregator, payload)


def begun(aggregator: ServerAggregator) -> dict[str, F32]:
    payload = bytearray()
    aggregator.start(InMemory({}), payload.extend)
    return read(aggregator, payload)


def read(aggregator: ServerAggregator, payload: bytearray) -> dict[str, F32]:
    found, offset = {}, 0
    for spec in aggregator.kept_specs:
        found[spec.key] = np.frombuffer(payload, "<f4", math.prod(spec.shape), offset).reshape(spec.shape)
        offset += spec.bytes
    assert offset == len(payload)
    return found


def coefficients(kept: dict[str, F32]) -> F32:
    return np.stack([kept[f"coefficients/{i}"] for i in range(sum(key.startswith("coeff") for key in kept))])


def networks_of(session: SiteSession) -> dict[str, torch.Tensor]:
    return session._context.networks["model"].state_dict()


# What the coordinator makes of predictions


def test_fedmds_mean_counts_each_site_alike_and_is_the_slow_one() -> None:
    aggregator = aggregator_of(study_of("fedmd"))
    sent = {site: np.random.default_rng(k).normal(size=(10, 1)).astype("<f4") for k, site in enumerate(SITES)}
    found = after(aggregator, begun(aggregator), sent)["consensus/logits"]
    slow = [sum(float(sent[site][row, 0]) for site in SITES) / 3 for row in range(10)]
    np.testing.assert_allclose(found[:, 0], slow, rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_identical_sites_agree_on_what_they_sent(method: str) -> None:
    settings = {"aggregation": "mean"} if method == "dsfl" else {}
    study = study_of(method, **settings)
    aggregator = aggregator_of(study)
    one = rows(1, aggregator.upload[0].shape)
    kept = after(aggregator, begun(aggregator), dict.fromkeys(SITES, one))
    for site in SITES:
        (source,) = aggregator.sources(InMemory(kept), site, 2)
        np.testing.assert_allclose(kept[source], one, rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("block", [1, 3, 7])
def test_the_size_of_blocks_changes_no_more_than_a_rounding(
    method: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    aggregator = aggregator_of(study_of(method))
    sent = {site: rows(k, aggregator.upload[0].shape) for k, site in enumerate(SITES)}
    whole = after(aggregator, begun(aggregator), sent)
    monkeypatch.setattr("fl_algorithms.server.aggregator.BLOCK", block)
    monkeypatch.setattr("fl_algorithms.methods.ktpfl.server.BLOCK", block)
    pieces = after(aggregator, begun(aggregator), sent)
    assert all(np.allclose(whole[key], pieces[key], rtol=1e-6, atol=1e-7) for key in whole)


@given(st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=5), st.floats(0.05, 20))
def test_era_is_the_slow_one_and_keeps_the_likeliest(qbar: list[list[float]], temperature: float) -> None:
    q = entropy_reduced(np.array(qbar), temperature)
    np.testing.assert_allclose(q, reference.era(qbar, temperature), rtol=1e-9, atol=1e-300)
    np.testing.assert_allclose(q.sum(axis=1), 1)
    assert all(row[int(np.argmax(mean))] == max(row) for row, mean in zip(q.tolist(), qbar, strict=True))


def test_era_leaves_the_even_row_sharpens_the_sure_one_and_flattens_with_temperature() -> None:
    even, sure = np.full((1, 10), 0.1), np.eye(10)[:1]
    np.testing.assert_allclose(entropy_reduced(even, 0.1), even)
    assert entropy_reduced(sure, 0.1)[0, 0] == pytest.approx(1 / (1 + 9 * math.exp(-10)))  # 0.9996
    np.testing.assert_allclose(entropy_reduced(sure, 1e9), even, rtol=1e-6)


def test_dsfl_sends_the_sharpened_mean_or_the_mean() -> None:
    sent = {site: rows(k) for k, site in enumerate(SITES)}
    mean = sum(array.astype(np.float64) for array in sent.values()) / 3
    for aggregation, expected in (("era", reference.era(mean.tolist(), 0.1)), ("mean", mean)):
        aggregator = aggregator_of(study_of("dsfl", aggregation=aggregation))
        found = after(aggregator, begun(aggregator), sent)["consensus/probabilities"]
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-6)


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=6))
def test_the_nearest_point_of_the_simplex_is_that_of_the_bisection(values: list[float]) -> None:
    found = nearest_on_simplex(np.array(values))
    np.testing.assert_allclose(found, reference.on_simplex(values), atol=1e-9)


@pytest.mark.parametrize("rho", [0.0, 0.5, 3.0])
def test_a_step_of_the_coefficients_lowers_the_loss_along_its_slow_gradient(rho: float) -> None:
    predictions = [rows(k).reshape(-1).astype(np.float64) for k in range(4)]
    spec = TensorSpec("p", "F32", (20,))
    updates = [Update(str(k), 1, InMemory({"p": p.astype("<f4")})) for k, p in enumerate(predictions)]
    products = mean_products(updates, spec)
    slow = [p.tolist() for p in predictions]
    c, i, h = np.array([0.4, 0.3, 0.2, 0.1]), 2, 1e-6

    def loss(values: NDArray[np.float64]) -> float:
        return reference.coefficient_loss(values.tolist(), slow, i, rho)

    gradient = np.array([(loss(c + h * e) - loss(c - h * e)) / (2 * h) for e in np.eye(4)])
    curvature = 2 * sum(float((p * p).mean()) for p in predictions) + 2 * rho / 4
    expected = reference.on_simplex((c - gradient / curvature).tolist())
    stepped = moved(c, products, i, KtPflSettings(rho=rho, coefficients="projected"))
    np.testing.assert_allclose(stepped, expected, atol=1e-6)
    assert loss(stepped) < loss(c)


def test_coefficients_end_at_the_site_itself_without_the_pull_and_stay_even_under_a_strong_one() -> None:
    sent = {site: rows(k) for k, site in enumerate(SITES)}
    free, pulled = (aggregator_of(study_of("ktpfl", rho=rho, coefficients="projected")) for rho in (0.0, 1e9))
    kept = begun(free)
    for _ in range(300):
        kept = after(free, kept, sent)
    np.testing.assert_allclose(coefficients(kept), np.eye(3), atol=0.01)
    np.testing.assert_allclose(kept["mixtures/1"], sent["birch"], atol=0.01)
    np.testing.assert_allclose(coefficients(after(pulled, begun(pulled), sent)), 1 / 3, rtol=1e-6)


@pytest.mark.parametrize("way", ["released", "projected"])
def test_rows_of_coefficients_are_shares(way: str) -> None:
    aggregator = aggregator_of(study_of("ktpfl", coefficients=way))
    kept = begun(aggregator)
    np.testing.assert_allclose(coefficients(kept), 1 / 3, rtol=1e-6)
    for number in range(5):
        kept = after(aggregator, kept, {site: rows(10 * number + k) for k, site in enumerate(SITES)})
        c = coefficients(kept)
        assert (c >= 0).all()
        np.testing.assert_allclose(c.sum(axis=1), 1, rtol=1e-5)
        for i in range(3):
            mixed = sum(c[i, j] * rows(10 * number + j).astype(np.float64) for j in range(3))
            np.testing.assert_allclose(kept[f"mixtures/{i}"], mixed, rtol=1e-5)


@pytest.mark.parametrize("size", [0.0, 1e-9, 3e-6, 0.004, 0.0101, 0.04, 0.06, 1.0, 100.0])
def test_the_released_codes_step_is_the_smallest_power_of_five_that_reaches_a_hundredth(size: float) -> None:
    rate, left = 1.0, size
    for _ in range(5):  # as the released code has it
        if left > 0.01:
            rate, left = rate / 5, left / 5
        if left < 0.01:
            rate, left = rate * 5, left * 5
    assert size * released_step(size) == pytest.approx(size * rate)


def opposed(size: float, seed: int, noise: float = 0.1) -> list[NDArray[np.float64]]:
    """What two pairs of sites say of 40 rows, softened by T = 10; one pair's logits, of that size, are the other's
    turned round.
    """
    rng = np.random.default_rng(seed)
    logits = size * np.random.default_rng(0).normal(size=40)
    said = [sign * logits + noise * rng.normal(size=40) for sign in (1, 1, -1, -1)]
    return [np.stack((1 / (1 + np.exp(one / 10)), 1 / (1 + np.exp(-one / 10))), axis=1).reshape(-1) for one in said]


def test_opposed_pairs_of_sites_part_as_in_the_released_code() -> None:
    settings, c = KtPflSettings(), np.full((4, 4), 0.25)
    slow: list[list[float]] = c.tolist()
    for number in range(8):
        predictions = opposed(5.0, number)
        updates = [Update(str(k), 1, InMemory({"p": p.astype("<f4")})) for k, p in enumerate(predictions)]
        products = mean_products(updates, TensorSpec("p", "F32", (80,)))
        c = np.stack([moved(c[i], products, i, settings) for i in range(4)])
        slow = reference.released_coefficients(
            slow, [p.tolist() for p in predictions], settings.rho, settings.sharpness
        )
        np.testing.assert_allclose(c, slow, atol=5e-3)
    for i, partner in ((0, 1), (1, 0), (2, 3), (3, 2)):
        others = [j for j in range(4) if j not in (i, partner)]
        assert min(c[i, i], c[i, partner]) > 2 * max(c[i, others])


def test_on_the_simplex_the_pull_keeps_softened_predictions_together() -> None:
    """What KT-pFL's coefficients did until they moved as the released code moves them."""
    c, settings = np.full((4, 4), 0.25), KtPflSettings(coefficients="projected")
    updates = [Update(str(k), 1, InMemory({"p": p.astype("<f4")})) for k, p in enumerate(opposed(2.0, 1))]
    products = mean_products(updates, TensorSpec("p", "F32", (80,)))
    for _ in range(100):
        c = np.stack([moved(c[i], products, i, settings) for i in range(4)])
    assert 0.23 < c.min() < c.max() < 0.27


def test_identical_predictions_move_no_coefficient() -> None:
    aggregator = aggregator_of(study_of("ktpfl"))
    kept = begun(aggregator)
    for _ in range(20):
        kept = after(aggregator, kept, dict.fromkeys(SITES, rows(1)))
    np.testing.assert_allclose(coefficients(kept), 1 / 3, rtol=1e-6)


def test_a_site_that_did_not_answer_keeps_its_coefficients_and_learns_from_the_others() -> None:
    aggregator = aggregator_of(study_of("ktpfl"))
    first = after(aggregator, begun(aggregator), {site: rows(k) for k, site in enumerate(SITES)})
    kept = after(aggregator, first, {"ash": rows(7), "cedar": rows(8)})
    before, c = coefficients(first), coefficients(kept)
    np.testing.assert_array_equal(c[1], before[1])
    np.testing.assert_array_equal(c[:, 1], before[:, 1])
    np.testing.assert_allclose(c.sum(axis=1), 1, rtol=1e-5)
    ash, cedar = before[1, 0], before[1, 2]
    np.testing.assert_allclose(kept["mixtures/1"], (ash * rows(7) + cedar * rows(8)) / (ash + cedar), rtol=1e-5)


# What a site does


@pytest.mark.parametrize("method", METHODS)
def test_without_distillation_each_site_trains_alone(method: str) -> None:
    data = {site: toy_data(site) for site in SITES}
    alone = toy_study("silo", sites=SITES)
    separate = run_federation(alone, task_of(alone), data)
    study = study_of(method, distil={"steps": 0})
    together = run_federation(study, task_of(study), data)
    for site in SITES:
        ours, theirs = (networks_of(outcome.sessions[site]) for outcome in (together, separate))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("method", METHODS)
def test_the_first_download_is_nobodys_and_teaches_nothing(method: str) -> None:
    study = study_of(method)
    shape = describe(study, "ash").upload[0].shape
    trained = []
    for filling in (0.0, 0.7):
        session = session_of(study)
        session.train(1, {BUNDLE[method]: {NAME[method]: torch.full(shape, filling)}})
        trained.append(networks_of(session))
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])
    session.train(2, {BUNDLE[method]: {NAME[method]: torch.full(shape, 0.5)}})
    other = session_of(study)
    for number, filling in ((1, 0.7), (2, 0.1)):
        other.train(number, {BUNDLE[method]: {NAME[method]: torch.full(shape, filling)}})
    ours, theirs = networks_of(session), networks_of(other)
    assert any(not torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("method", METHODS)
def test_distillation_brings_a_sites_predictions_to_what_came(method: str) -> None:
    study = study_of(method, distil={"epochs": 300}, distil_learning_rate=0.05)
    study = study.changed(training={"local_steps": 0})
    shape = describe(study, "ash").upload[0].shape
    with seeded(8):
        logits = torch.randn(10, 1)
    soft = task_of(study).probabilities(logits / (10.0 if method == "ktpfl" else 1.0)).float()
    target = logits if method == "fedmd" else soft
    assert target.shape == shape
    session = session_of(study)
    start = compute_logits(session._context.algorithm, session._context.networks, toy_public_data().x)
    session.train(2, {BUNDLE[method]: {NAME[method]: target}})
    end = compute_logits(session._context.algorithm, session._context.networks, toy_public_data().x)
    assert (end - logits).abs().mean() < 0.5 * (start - logits).abs().mean()


def test_softened_predictions_leave_kt_pfl() -> None:
    study = study_of("ktpfl", temperature=4.0)
    session = session_of(study)
    result = session.train(1, {"mixture": {"probabilities": torch.zeros(10, 2)}})
    logits = compute_logits(session._context.algorithm, session._context.networks, toy_public_data().x)[:, 0]
    sent = result.uplink["predictions"]["probabilities"]
    torch.testing.assert_close(sent[:, 1], torch.sigmoid(logits / 4))
    torch.testing.assert_close(sent.sum(dim=1), torch.ones(10))


def test_the_transfer_is_done_once_by_whoever_comes_late_too() -> None:
    plain, transfer = study_of("fedmd"), study_of("fedmd", transfer={"epochs": 3})
    consensus = {"consensus": {"logits": torch.zeros(10, 1)}}
    first, plainly = session_of(transfer), session_of(plain)
    for session in (first, plainly):
        session.train(1, consensus)
    ours, theirs = networks_of(first), networks_of(plainly)
    assert any(not torch.equal(ours[name], theirs[name]) for name in ours)
    assert first.export_state().meta["notes"] == {"begun": True}
    steps: list[int] = []
    first.train(2, consensus, lambda step, total: steps.append(total))
    assert steps == [1, 6]  # one batch of the public rows, then [training]
    late, told = session_of(transfer), []
    late.train(3, consensus, lambda step, total: told.append(total))
    assert told == [3, 1, 6]


@pytest.mark.parametrize("method", ["fedmd", "ktpfl"])
def test_private_training_comes_before_the_first_exchange_and_once(method: str) -> None:
    settings: dict[str, Any] = {"initial": {"epochs": 2}, **({"transfer": {"epochs": 3}} if method == "fedmd" else {})}
    study, plain = study_of(method, **settings), study_of(method)
    download = {BUNDLE[method]: {NAME[method]: torch.zeros(describe(study, "ash").upload[0].shape)}}

    def steps(study: ResolvedStudy, rounds: tuple[int, ...]) -> list[list[int]]:
        """For each round how many steps each phase had."""
        session, found = session_of(study), []
        for number in rounds:
            told: list[tuple[int, int]] = []
            session.train(number, download, lambda *now, told=told: told.append(now))  # type: ignore[misc]
            found.append([total for done, total in told if done == total])
        return found

    first = [3, 12] if method == "fedmd" else [12]  # a batch of the public rows, six of 22 rows in batches of 4
    assert steps(study, (1, 2)) == [[*first, 6], [1, 6]]
    assert steps(study, (2, 3)) == [[*first, 1, 6], [1, 6]], "who comes late begins so too, and learns what came"
    assert steps(plain, (1,)) == [[6]]


def test_fedmd_and_ktpfl_begin_as_their_authors_code_does_unless_told_otherwise() -> None:
    assert FedMdSettings().initial == KtPflSettings().initial == Amount(epochs=25)
    assert FedMdSettings().transfer == Amount(epochs=20)
    assert FedMdSettings().labeled
    assert not FedMdSettings(transfer=Amount(epochs=0)).labeled


def test_the_transfer_learns_the_classes_of_the_public_data_set() -> None:
    study = study_of("fedmd", transfer={"epochs": 150}, distil_learning_rate=0.05)
    study = study.changed(training={"local_steps": 0})
    session, public_data = session_of(study), toy_public_data()
    session.train(1, {"consensus": {"logits": torch.zeros(10, 1)}})
    logits = compute_logits(session._context.algorithm, session._context.networks, public_data.x)
    assert public_data.y is not None
    assert torch.equal((logits[:, 0] > 0).long(), public_data.y)


@pytest.mark.parametrize("method", METHODS)
def test_sites_with_other_networks_work_together(method: str) -> None:
    """Nothing of a network leaves: the coordinator's tensors and another site's are the same whatever this one has."""
    small, large = (study_of(method, sites=2, model={"name": "mlp", "hidden": hidden}) for hidden in ([], [7, 5]))
    assert describe(small, "ash").upload == describe(large, "ash").upload
    assert describe(small, "ash").download == describe(large, "ash").download
    aggregator = aggregator_of(small)
    sessions = {"ash": session_of(small, "ash"), "birch": session_of(large, "birch")}
    kept: dict[str, Any] = begun(aggregator)
    for number in (1, 2, 3):
        sent = {}
        for site, session in sessions.items():
            (source,) = aggregator.sources(InMemory(kept), site, number)
            base = {BUNDLE[method]: {NAME[method]: torch.from_numpy(kept[source].copy())}}
            sent[site] = session.train(number, base).uplink["predictions"][NAME[method]].numpy()
        kept = after(aggregator, kept, sent)
    assert all(np.isfinite(array).all() for array in kept.values())


def test_a_last_batch_of_one_row_is_left_out_for_the_sake_of_batch_norms() -> None:
    normed = {"name": "mlp", "hidden": [4], "norm": "batch"}
    study = study_of("fedmd", model=normed, distil_batch_size=9)  # 10 rows
    told: list[int] = []
    session_of(study).train(2, {"consensus": {"logits": torch.zeros(10, 1)}}, lambda _, total: told.append(total))
    assert told == [1, 6]


@pytest.mark.parametrize("method", METHODS)
def test_several_classes_are_exchanged_as_many(method: str) -> None:
    study = study_of(method, sites=2)
    study = study.changed(task={"classes": ["a", "b", "c"]})
    assert describe(study, "ash").upload[0].shape == (10, 3)
    data = {}
    for site in ("ash", "birch"):
        one = toy_data(site)
        data[site] = replace(one, train=replace(one.train, y=torch.arange(len(one.train)) % 3), test=None)
    outcome = run_federation(study, task_of(study), data)
    assert all(torch.isfinite(tensor).all() for tensor in outcome.shared.values())


# FedDF and pFedDF: distilling at the coordinator


def both(study: ResolvedStudy, sites: list[str] | None = None) -> Any:
    return run_federation(study, task_of(study), {site: toy_data(site) for site in sites or SITES})


def targets_of(study: ResolvedStudy, public_data: PublicData, teachers: list[Any]) -> torch.Tensor:
    """What teachers of one network say together."""
    return ensemble_targets(public_data, [(study, teacher) for teacher in teachers])


def models(study: ResolvedStudy, seeds: list[int]) -> list[dict[str, torch.Tensor]]:
    """Whole networks of the study, unlike each other."""
    sections = [study.study.model_copy(update={"seed": seed}) for seed in seeds]
    return [initial_model(ResolvedStudy(study.file.model_copy(update={"study": section}))) for section in sections]


def test_feddf_without_steps_is_fedavg() -> None:
    fedavg, feddf = toy_study("fedavg", sites=SITES), study_of("feddf", distil_steps=0)
    assert both(fedavg).digest == both(feddf).digest
    assert both(study_of("feddf")).digest != both(feddf).digest


def test_pfeddf_without_steps_is_each_site_alone() -> None:
    alone = toy_study("silo", sites=SITES, init_private="common")
    separate, together = both(alone), both(study_of("pfeddf", distil_steps=0))
    for position, site in enumerate(SITES):
        theirs = networks_of(separate.sessions[site])
        for name, tensor in theirs.items():
            torch.testing.assert_close(together.shared[f"site_{position}/{name}"], tensor, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(networks_of(together.sessions[site])[name], tensor, rtol=1e-5, atol=1e-6)


def test_the_ensembles_target_is_the_slow_one_whatever_the_teachers_order() -> None:
    study = study_of("feddf")
    teachers, public_data = models(study, [1, 2, 3]), toy_public_data()
    found = targets_of(study, public_data, teachers)
    backwards = targets_of(study, public_data, teachers[::-1])
    logits = [Restored(study, task_of(study), teacher).logits(public_data.x)[:, 0].tolist() for teacher in teachers]
    slow = [1 / (1 + math.exp(-sum(row) / 3)) for row in zip(*logits, strict=True)]
    np.testing.assert_allclose(found[:, 1], slow, rtol=1e-5)
    np.testing.assert_allclose(found.sum(dim=1), 1, rtol=1e-6)
    torch.testing.assert_close(found, backwards)


def test_a_student_that_says_what_the_teachers_say_stays() -> None:
    """The gradient is nought but for rounding, of which Adam makes steps as of any other: plain distances are small."""
    study = study_of("feddf", distil_steps=1, distil_learning_rate=1e-4)
    (network,) = models(study, [4])
    targets = targets_of(study, toy_public_data(), [network, network, network])
    after = distilled(study, toy_public_data(), network, targets, 1)
    assert all((after[name] - network[name]).abs().max() <= 1.1e-4 for name in network)


def test_a_student_comes_to_say_what_the_teachers_say() -> None:
    study, public_data = (
        study_of("feddf", distil_steps=400, distil_learning_rate=0.05, distil_batch_size=10),
        toy_public_data(),
    )
    student, *teachers = models(study, [1, 2, 3])
    targets = targets_of(study, public_data, teachers)
    task = task_of(study)
    gaps = [
        float((Restored(study, task, network).probabilities(public_data.x).float() - targets).abs().mean())
        for network in (student, distilled(study, public_data, student, targets, 1))
    ]
    assert gaps[1] < 0.2 * gaps[0]


def test_the_student_never_sees_a_class_and_no_step_is_long() -> None:
    study, public_data = study_of("feddf", distil_steps=4), toy_public_data()
    student, *teachers = models(study, [1, 2, 3])
    targets = targets_of(study, public_data, teachers)
    unlabeled = replace(public_data, y=None)
    one, other = (distilled(study, held, student, targets, 1) for held in (public_data, unlabeled))
    assert all(torch.equal(one[name], other[name]) for name in one)
    # Adam moves a weight by little more than its rate, and the rates of the cosine sum to less than all steps' first.
    assert all((one[name] - student[name]).abs().max() <= 4 * 1.1e-3 for name in one)


def test_a_site_that_did_not_answer_keeps_its_student_in_pfeddf() -> None:
    study = study_of("pfeddf")
    aggregator = aggregator_of(study)
    start, (moved_model,) = models(study, [1])[0], models(study, [2])
    payload = bytearray()
    aggregator.start(InMemory({key: tensor.numpy() for key, tensor in start.items()}), payload.extend)
    kept = read(aggregator, payload)
    deltas = InMemory({key: (moved_model[key] - start[key]).numpy() for key in start})
    out = bytearray()
    aggregator.aggregate(Round(1, InMemory(kept), [Update("ash", 5, deltas)], out.extend, toy_public_data()))
    after = read(aggregator, out)
    assert all((after[f"site_1/{key}"] == kept[f"site_1/{key}"]).all() for key in start)
    assert any((after[f"site_0/{key}"] != kept[f"site_0/{key}"]).any() for key in start)
    assert aggregator.sources(InMemory(after), "cedar", 2) == tuple(
        f"site_2/{spec.key}" for spec in aggregator.download
    )


def test_one_student_that_begins_as_the_mean_is_feddf() -> None:
    study = study_of("feddf")
    base, *sites = models(study, [1, 2, 3, 4])
    updates = [
        Update(site, 5, InMemory({key: (model[key] - base[key]).numpy() for key in base}))
        for site, model in zip(SITES, sites, strict=True)
    ]
    out = bytearray()
    aggregator = aggregator_of(study)
    kept = InMemory({key: tensor.numpy() for key, tensor in base.items()})
    aggregator.aggregate(Round(2, kept, updates, out.extend, toy_public_data()))
    mean = {key: sum(model[key].double() for model in sites) / 3 for key in base}
    targets = targets_of(study, toy_public_data(), sites)
    expected = distilled(study, toy_public_data(), {key: value.float() for key, value in mean.items()}, targets, 2)
    found = read(aggregator, out)
    assert all(np.allclose(found[key], expected[key], atol=1e-5) for key in base)


def slow_student(
    study: ResolvedStudy, public_data: PublicData, student: Any, targets: torch.Tensor, round_number: int
) -> Any:
    """Of a table and 3 steps: every batch, gradient, cut and step written out."""
    model = Restored(study, task_of(study), student)
    (network,) = model.networks.values()
    network.train()
    assert isinstance(public_data.x, torch.Tensor)
    generator = torch.Generator().manual_seed(stream_seed(study.study.seed, "", round_number, "shuffle.distil"))
    batches = [torch.randperm(10, generator=generator)[:8].split(4) for _ in range(2)]
    optimizer = torch.optim.Adam(network.parameters())
    for step, places in enumerate((*batches[0], *batches[1])[:3]):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 + math.cos(math.pi * step / 3)) / 2
        one = network(public_data.x[places])
        logits = torch.cat((torch.zeros_like(one), one), dim=1)
        wanted = targets[places]
        loss = (wanted * (wanted.log() - torch.log_softmax(logits, dim=1))).sum() / len(places)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in network.parameters()]
        norm = torch.stack([gradient.square().sum() for gradient in gradients if gradient is not None]).sum().sqrt()
        for gradient in gradients:
            assert gradient is not None
            gradient *= min(1.0, 5.0 / (float(norm) + 1e-6))
        optimizer.step()
    return network.state_dict()


def test_a_student_takes_the_slow_steps() -> None:
    study, public_data = study_of("feddf", distil_steps=3), toy_public_data()
    student, *teachers = models(study, [1, 2, 3])
    targets = targets_of(study, public_data, teachers)
    found = distilled(study, public_data, student, targets, 2)
    slow = slow_student(study, public_data, student, targets, 2)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, slow[name], rtol=0, atol=1e-6)
        assert not torch.equal(tensor, student[name])


# Early stopping

STOPPING = {"every": 2, "patience": 6, "fraction": 0.3}


@pytest.mark.parametrize(
    ("losses", "steps", "looks", "kept"),
    [
        pytest.param([9, 8, 7, 6, 5, 4, 3], 12, 7, 12, id="ever better: all steps"),
        pytest.param([9, 8, 7, 7, 7, 7, 0], 20, 6, 4, id="no gain for six steps: the rest is never made"),
        pytest.param([9, 8, 9, 9, 7, 9, 9, 9, 0], 40, 8, 8, id="a gain in time begins the count anew"),
        pytest.param([1, 2, 3, 4, 0], 40, 4, 0, id="the start is best"),
        pytest.param([9, 8, 7, 6], 5, 4, 5, id="a last part of one step"),
        pytest.param([math.nan, math.inf, 8, math.nan, 9, 9], 40, 6, 4, id="what is not finite is no gain"),
    ],
)
def test_steps_end_without_gain_and_the_best_is_kept(losses: list[float], steps: int, looks: int, kept: int) -> None:
    network = torch.nn.Linear(1, 1)
    with torch.no_grad():
        network.weight.zero_()
    told: list[float] = []

    def train(more: int) -> None:
        with torch.no_grad():
            network.weight.add_(more)

    def judged() -> float:
        told.append(losses[len(told)])
        return told[-1]

    ensemble.keep_best({"model": network}, train, judged, steps, EarlyStopping.model_validate(STOPPING))
    assert (len(told), int(network.weight)) == (looks, kept)


def stopped(steps: int = 12, **changes: Any) -> ResolvedStudy:
    return study_of("feddf", distil_steps=steps, distil_learning_rate=0.05, early_stopping=STOPPING | changes)


def held_out_rows(study: ResolvedStudy) -> list[int]:
    generator = torch.Generator().manual_seed(stream_seed(study.study.seed, "", 0, "distil.split"))
    return torch.randperm(10, generator=generator)[-3:].tolist()


def test_the_held_out_rows_say_which_step_is_kept() -> None:
    """Teachers who call every row the last class: where that is so the student ever improves, else every step harms."""
    study = stopped()
    (student,) = models(study, [1])
    targets = torch.tensor([0.01, 0.99]).expand(10, 2)
    agreeing, contrary = (replace(toy_public_data(), y=torch.full((10,), label)) for label in (1, 0))
    unchanged = distilled(study, contrary, student, targets, 1)
    assert all(torch.equal(unchanged[name], student[name]) for name in student)
    moved_on = distilled(study, agreeing, student, targets, 1)
    assert not all(torch.equal(moved_on[name], student[name]) for name in student)
    one_look = distilled(stopped(every=12), agreeing, student, targets, 1)
    assert all(torch.equal(moved_on[name], one_look[name]) for name in student)


def test_classes_are_asked_of_the_held_out_rows_alone_and_these_are_in_no_batch() -> None:
    study, public_data = stopped(), toy_public_data()
    out = held_out_rows(study)
    student, *teachers = models(study, [1, 2, 3])
    targets = targets_of(study, public_data, teachers)
    assert public_data.y is not None
    y = targets.argmax(dim=1)
    found = distilled(study, replace(public_data, y=y), student, targets, 1)
    turned, other = 1 - y, targets.clone()
    turned[out], other[out] = y[out], 1 - targets[out]
    again = distilled(study, replace(public_data, y=turned), student, other, 1)
    assert all(torch.equal(found[name], again[name]) for name in student)
    with pytest.raises(BadData, match="`early_stopping` in \\[algorithm\\] needs the public data set's classes"):
        distilled(study, replace(public_data, y=None), student, targets, 1)


def test_a_federation_with_early_stopping_reads_the_classes(tmp_path: Path) -> None:
    path = tmp_path / "public_data.csv"
    path.write_text("\n".join(["u,v,w", *(f"{k},1,2" for k in range(10))]) + "\n")
    study = stopped()
    assert len(read_public_data(study_of("feddf"), task_of(study), path).x) == 10
    with pytest.raises(BadData, match="no column `ill`"):
        read_public_data(study, task_of(study), path)
    assert both(study).digest == both(study).digest
    assert "early_stopping" not in study_of("feddf").file.algorithm.settings


@pytest.mark.parametrize(("fraction", "count"), [(0.09, 0), (0.9, 9)])
def test_a_public_data_set_too_small_for_early_stopping_is_refused(fraction: float, count: int) -> None:
    with pytest.raises(BadData) as refused:
        stopped(fraction=fraction)
    assert (
        f"`early_stopping` in [algorithm] holds out {count} of the public data set's 10 rows" in refused.value.message
    )


COORDINATOR = """
import json, sys
from pathlib import Path
from fl_algorithms.server.aggregator import Round, Update, server_aggregator
from fl_algorithms.server.mean import InMemory
from wardround.errors import BadData
from fl_algorithms.study import ResolvedStudy
from wardround.records.study import StudyFile
from wardround.tensors.files import TensorFile
folder = Path(sys.argv[1])
study = ResolvedStudy(StudyFile.from_document(json.loads((folder / "study.json").read_text())))
base, delta = (TensorFile(folder / f"{name}.safetensors").__enter__() for name in ("base", "delta"))
aggregator = server_aggregator(study, base.specs)
out = bytearray()
public_data = folder / "public_data.csv"
try:
    aggregator.aggregate(Round(1, base, [Update("ash", 5, delta), Update("birch", 7, base)], out.extend, public_data))
except BadData as error:
    print(error.message, "|", error.hint)
assert "torch" not in sys.modules
(folder / "out").write_bytes(out)
"""


@pytest.mark.parametrize("settings", [{}, {"early_stopping": STOPPING}], ids=["all-steps", "early-stopping"])
def test_a_coordinator_distils_in_another_process_to_the_same_bits(tmp_path: Path, settings: dict[str, Any]) -> None:
    rows = [f"{k},{-k}.5,{k * k / 10},no" for k in range(10)]
    (tmp_path / "public_data.csv").write_text("\n".join(["u,v,w,ill", *rows]) + "\n")
    study = study_of("feddf", sites=2, **settings)
    public_data = study.public_data
    assert public_data is not None
    right = public_data.model_copy(update={"digest": public_data_digest(tmp_path / "public_data.csv")})
    study = ResolvedStudy(study.file.model_copy(update={"public_data": right}))
    (tmp_path / "study.json").write_text(json.dumps(study.document()))
    base, delta = models(study, [1, 2])
    for name, tensors in (("base", base), ("delta", delta)):
        safetensors.torch.save_file(tensors, tmp_path / f"{name}.safetensors")
    done = subprocess.run([sys.executable, "-c", COORDINATOR, tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
    here, arrays = bytearray(), [InMemory({k: t.numpy() for k, t in one.items()}) for one in (base, delta)]
    held = read_public_data(study, task_of(study), tmp_path / "public_data.csv")
    updates = [Update("ash", 5, arrays[1]), Update("birch", 7, arrays[0])]
    aggregator_of(study).aggregate(Round(1, arrays[0], updates, here.extend, held))
    assert (tmp_path / "out").read_bytes() == here


def test_the_other_process_says_whose_network_is_no_number(tmp_path: Path) -> None:
    (tmp_path / "public_data.csv").write_text(
        "u,v,w,ill\n" + "".join(f"{k},{-k}.5,{k * k / 10},no\n" for k in range(10))
    )
    study = study_of("feddf", sites=2, model={"name": "mlp", "hidden": [4], "norm": "batch"})
    assert study.public_data is not None
    right = study.public_data.model_copy(update={"digest": public_data_digest(tmp_path / "public_data.csv")})
    study = ResolvedStudy(study.file.model_copy(update={"public_data": right}))
    (tmp_path / "study.json").write_text(json.dumps(study.document()))
    (base,) = models(study, [1])
    delta = {key: torch.zeros_like(tensor) for key, tensor in base.items()}
    delta["head.weight"].fill_(3e38)  # finite, and the first logit is not
    for name, tensors in (("base", base), ("delta", delta)):
        safetensors.torch.save_file(tensors, tmp_path / f"{name}.safetensors")
    script = COORDINATOR.replace('print(error.message, "|", error.hint)', "print(error.site, error.message)")
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=False)
    said = "ash the network says of the public data set what is no number\n"
    assert (done.returncode, done.stderr, done.stdout) == (0, "", said)


def test_a_set_that_changed_at_the_coordinator_is_the_answers_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "public_data.csv").write_text("u,v,w,ill\n")
    study = study_of("feddf")
    head = {
        "study": study.document(),
        "round": 1,
        "public_data": str(tmp_path / "public_data.csv"),
        "students": ["ash"],
        "teachers": [],
    }
    out = SimpleNamespace(buffer=io.BytesIO())
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(json.dumps(head).encode() + b"\n")))
    monkeypatch.setattr(sys, "stdout", out)
    ensemble.main()
    said = json.loads(out.buffer.getvalue())
    assert "is not the public data set of study `toy`" in said["error"]
    assert said["hint"] == "create the study again with the right file"
    assert study.public_data is not None
    right = study.public_data.model_copy(update={"digest": public_data_digest(tmp_path / "public_data.csv")})
    head["study"] = study.file.model_copy(update={"public_data": right}).document()
    (tmp_path / "public_data.csv").write_text("")
    with pytest.raises(BadData):
        ensemble.answer(io.BytesIO(json.dumps(head).encode() + b"\n"), io.BytesIO())
    with pytest.raises(BadData, match="what is to be distilled was cut short"):
        ensemble.answer(io.BytesIO(json.dumps(head).encode() + b"\n\0\0"), io.BytesIO(), toy_public_data())


def test_a_coordinator_without_torch_or_the_set_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    study = study_of("feddf", sites=1)
    (base,) = models(study, [1])
    kept = InMemory({key: tensor.numpy() for key, tensor in base.items()})
    with pytest.raises(
        BadData, match="algorithm `feddf` distills at the coordinator, which has no copy of the public data"
    ):
        aggregator_of(study).aggregate(Round(1, kept, [Update("ash", 5, kept)], len))
    monkeypatch.setattr("fl_algorithms.methods.feddf.server.find_spec", lambda name: None)
    with pytest.raises(BadData) as refused:
        require_torch("feddf")
    assert refused.value.message.startswith("algorithm `feddf` distills at the coordinator, which needs torch")
    assert "pip install 'wardround[site]'" in refused.value.hint
