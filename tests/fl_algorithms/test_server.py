"""The mean's invariants A1 to A4, and the choice of the best global model."""

import itertools
from fractions import Fraction
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fl_algorithms.methods.settings import MeanSettings
from fl_algorithms.server.aggregator import BlockSource, Round, ServerAggregator, Specs, Update
from fl_algorithms.server.best import BestGlobal
from fl_algorithms.server.mean import InMemory
from fl_algorithms.server.mean import mean as mean_half
from tests import reference
from wardround.errors import BadData
from wardround.tensors.files import TensorFile, file_header
from wardround.tensors.manifests import TensorSpec

SPEC = (TensorSpec("w", "F32", (5,)),)
floats = st.lists(st.floats(-100, 100, width=32), min_size=5, max_size=5)
counts = st.integers(1, 10_000)


def aggregator_of(specs: Specs) -> ServerAggregator:
    return mean_half(MeanSettings(), ("a", "b", "c"), specs)


def mean(
    base: list[float], updates: list[tuple[int, list[float]]], block: int = 2, specs: tuple[TensorSpec, ...] = SPEC
) -> NDArray[np.float32]:
    def source(values: list[float]) -> BlockSource:
        return InMemory({"w": np.array(values, dtype=np.float32)})

    out = bytearray()
    told = [Update(f"site-{place}", n, source(delta)) for place, (n, delta) in enumerate(updates)]
    with mock.patch("fl_algorithms.server.aggregator.BLOCK", block):
        aggregator_of(specs).aggregate(Round(1, source(base), told, out.extend))
    return np.frombuffer(bytes(out), dtype="<f4")


@given(base=floats, updates=st.lists(st.tuples(counts, floats), min_size=1, max_size=4))
def test_the_mean_matches_the_slow_reference(base: list[float], updates: list[tuple[int, list[float]]]) -> None:
    exact = reference.weighted_mean(base, updates)
    for value, wanted in zip(mean(base, updates), exact, strict=True):
        spacing = Fraction(float(np.spacing(np.float32(abs(float(wanted)) + 1e-3))))
        assert abs(Fraction(float(value)) - wanted) <= spacing


@given(base=floats, delta=floats, weights=st.lists(counts, min_size=1, max_size=4))
def test_equal_updates_come_out_unchanged(base: list[float], delta: list[float], weights: list[int]) -> None:
    alone = (np.array(base, np.float64) + np.array(delta, np.float64)).astype(np.float32)
    together = mean(base, [(n, delta) for n in weights])
    np.testing.assert_allclose(together, alone, rtol=1e-6, atol=1e-6)


@given(base=floats, updates=st.lists(st.tuples(counts, floats), min_size=1, max_size=4))
def test_each_element_lies_between_the_sites(base: list[float], updates: list[tuple[int, list[float]]]) -> None:
    local = np.array([np.array(base, np.float64) + np.array(delta) for _, delta in updates])
    result = mean(base, updates).astype(np.float64)
    slack = 1e-6 * (1 + np.abs(local).max())
    assert (result >= local.min(axis=0) - slack).all()
    assert (result <= local.max(axis=0) + slack).all()


@given(base=floats, delta=floats, n=counts)
def test_one_site_alone_gets_its_own_model_to_one_rounding(base: list[float], delta: list[float], n: int) -> None:
    own = (np.array(base, np.float64) + np.array(delta, np.float64)).astype(np.float32)
    np.testing.assert_array_max_ulp(mean(base, [(n, delta)]), own, maxulp=1)


def test_permuting_the_sites_changes_nothing_but_roundings() -> None:
    updates = [(3, [0.1] * 5), (5, [0.2] * 5), (11, [-0.3] * 5)]
    results = [mean([1.0] * 5, list(order)) for order in itertools.permutations(updates)]
    for result in results:
        np.testing.assert_array_max_ulp(result, results[0], maxulp=1)


@given(block=st.integers(1, 7))
def test_the_size_of_the_blocks_does_not_matter(block: int) -> None:
    updates = [(3, [0.1, 0.2, 0.3, 0.4, 0.5]), (7, [1.0, -1.0, 1e-7, 5.5, 0.0])]
    assert mean([1.0] * 5, updates, block).tobytes() == mean([1.0] * 5, updates, 5).tobytes()


@given(scale=st.integers(1, 1000))
def test_weights_scaled_alike_give_the_same_mean(scale: int) -> None:
    updates = [(3, [0.1] * 5), (7, [0.4] * 5)]
    scaled = [(n * scale, delta) for n, delta in updates]
    np.testing.assert_array_max_ulp(mean([1.0] * 5, scaled), mean([1.0] * 5, updates), maxulp=1)


def test_the_coordinators_files_give_the_labs_bits(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    specs = (TensorSpec("a", "F32", (3, 7)), TensorSpec("b", "F32", ()), TensorSpec("x", "F32", (4,), "extra"))
    arrays = [{spec.key: rng.normal(size=spec.shape).astype("<f4") for spec in specs} for _ in range(3)]
    files = []
    for number, tensors in enumerate(arrays):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(file_header(specs) + b"".join(tensors[spec.key].tobytes() for spec in specs))
        files.append(TensorFile(path))
    memory = [InMemory({key: np.asarray(array) for key, array in tensors.items()}) for tensors in arrays]
    from_files, from_memory = bytearray(), bytearray()
    aggregator = aggregator_of(specs)
    with mock.patch("fl_algorithms.server.aggregator.BLOCK", 4):
        aggregator.aggregate(
            Round(1, files[0], [Update("a", 2, files[1]), Update("b", 5, files[2])], from_files.extend)
        )
    aggregator.aggregate(
        Round(1, memory[0], [Update("a", 2, memory[1]), Update("b", 5, memory[2])], from_memory.extend)
    )
    assert from_files == from_memory
    for file in files:
        file.close()


def test_a_mean_beyond_float32_is_refused_by_name() -> None:
    with pytest.raises(BadData) as refusal:
        mean([3e38] * 5, [(1, [3e38] * 5)])
    assert refusal.value.message == "`w` would be beyond float32, though each update is finite"


@pytest.mark.parametrize("updates", [[], [(0, [0.0] * 5)]], ids=["no update", "weight zero"])
def test_a_mean_of_nothing_is_a_mistake_of_the_caller(updates: list[tuple[int, list[float]]]) -> None:
    with pytest.raises(ValueError, match="a mean needs updates that each count for at least 1"):
        mean([0.0] * 5, updates)


def test_the_mean_keeps_what_is_sent_and_sends_it_to_every_site_as_it_is() -> None:
    aggregator, began = aggregator_of(SPEC), bytearray()
    initial = InMemory({"w": np.arange(5, dtype=np.float32)})
    aggregator.start(initial, began.extend)
    assert aggregator.passes
    assert aggregator.sources(initial, "a", 3) == ("w",)
    assert bytes(began) == np.arange(5, dtype="<f4").tobytes()


def test_the_best_round_has_the_lowest_mean_loss_weighted_by_validation_rows() -> None:
    best = BestGlobal().offered(1, [("0.5", 30), ("0.9", 10)])  # (15 + 9) / 40
    assert best == BestGlobal(1, 0.6)
    assert best.offered(2, [("0.7", 30), ("0.4", 10)]) is best  # (21 + 4) / 40 = 0.625
    assert best.offered(2, [("0.4", 30), ("0.7", 10)]).round == 2


def test_a_later_equal_loss_replaces() -> None:
    assert BestGlobal().offered(1, [("0.5", 3)]).offered(2, [("0.5", 3)]).round == 2


def test_the_initial_model_does_not_compete() -> None:
    assert BestGlobal().offered(0, [("0.1", 3)]) == BestGlobal()


@pytest.mark.parametrize("text", ["null", "nan", "inf", "-inf", "", "0,5"])
def test_a_site_without_a_loss_is_left_out(text: str) -> None:
    assert BestGlobal().offered(1, [("0.5", 3), (text, 1000)]) == BestGlobal(1, 0.5)
    assert BestGlobal().offered(1, [(text, 1000)]) == BestGlobal()


def test_the_order_of_the_sites_does_not_matter_to_the_best_round() -> None:
    told = [("0.1", 3), ("0.2", 7), ("0.7", 1), ("0.30000001", 13)]
    assert len({BestGlobal().offered(1, order) for order in itertools.permutations(told)}) == 1


@pytest.mark.parametrize("best", [BestGlobal(), BestGlobal(4, 1 / 3)])
def test_the_best_round_survives_being_written_down(best: BestGlobal) -> None:
    assert BestGlobal.from_document(best.document()) == best
