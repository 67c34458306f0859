"""Robust rules in place of the mean: slow versions, how many bad sites each stands, and where each is refused."""

import json
import tracemalloc
from collections.abc import Sequence
from fractions import Fraction
from itertools import permutations
from pathlib import Path
from statistics import median_low
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save_file

from coordinator.models.aggregation import Spooled
from coordinator.models.aggregation import aggregate as at_the_coordinator
from coordinator.storage.blobs import Blobs
from fl_algorithms import registry
from fl_algorithms.engine.session import RoundResult
from fl_algorithms.lab.federation import aggregate as in_the_lab
from fl_algorithms.resolving import resolve
from fl_algorithms.server.aggregator import Round, Update, server_aggregator
from fl_algorithms.server.combining import Combined, squared_distances
from fl_algorithms.server.limits import Account, combine
from fl_algorithms.server.mean import InMemory
from fl_algorithms.server.rules.rows import RULES
from fl_algorithms.study import ResolvedStudy
from site_agent.state.offer import aggregation_in
from tests.fl_algorithms.test_methods_command import lab
from tests.reference import (
    clipped_mean_of,
    geometric_median_of,
    krum_scores,
    median_of,
    sum_of_distances,
    trimmed_mean_of,
)
from wardround.errors import BadData
from wardround.records.aggregation import SETTINGS, AggregationSection
from wardround.records.study import StudyFile
from wardround.tensors.files import TensorFile
from wardround.tensors.manifests import MODEL, TensorSpec

SPECS = (TensorSpec("b", "F32", (1,)), TensorSpec("w", "F32", (2,)))
ROBUST = [rule for rule in RULES if rule != "clipped_mean"]
VALUES = st.floats(-8, 8, width=32)
Values = Sequence[Sequence[float]]


def study(rule: str, sites: int = 5, algorithm: str = "fedavg", **more: Any) -> ResolvedStudy:
    """``more``: settings of the rule, or `study`, `server` and `limits` as tables."""
    plain = {"optimizer": "sgd", "weight_decay": 0.0} if registry.METHODS[algorithm].plain_sgd else {}
    tables = {
        "study": {"name": "small", "sites": names(sites), "rounds": 3, **more.pop("study", {})},
        "task": {"name": "tabular", "label": "y", "classes": ["0", "1"], "features": [{"name": "x"}]},
        "model": {"name": "mlp", "hidden": [2], "norm": "batch"},
        "algorithm": {"name": algorithm, **({"server": server} if (server := more.pop("server", None)) else {})},
        "training": {"local_steps": 1, **plain},
        "limits": more.pop("limits", {}),
        "aggregation": {"rule": rule, **more},
    }
    return resolve(StudyFile.model_validate(tables), lab=True)


def names(sites: int) -> list[str]:
    return [f"s{number:02}" for number in range(sites)]


def updates_of(values: Values, counts: Sequence[int] = ()) -> list[Update]:
    """Three values a site: that of ``b`` and the two of ``w``."""
    return [
        Update(site, count, InMemory({"b": np.array(own[:1], "<f4"), "w": np.array(own[1:], "<f4")}))
        for site, count, own in zip(names(len(values)), counts or [7] * len(values), values, strict=True)
    ]


def made(file: ResolvedStudy, values: Values, counts: Sequence[int] = ()) -> list[float]:
    """What the rule gives, from a model of zeros."""
    aggregator, updates = server_aggregator(file, SPECS), updates_of(values, counts)
    kept = InMemory({spec.key: np.zeros(spec.shape, "<f4") for spec in aggregator.kept_specs})
    combined, out = combine(aggregator, updates, file.limits.max_weight), bytearray()
    aggregator.aggregate(Round(1, kept, updates, out.extend, combined=combined))
    return np.frombuffer(bytes(out), "<f4")[:3].tolist()


def combined_of(file: ResolvedStudy, values: Values, counts: Sequence[int] = ()) -> Combined:
    return combine(server_aggregator(file, SPECS), updates_of(values, counts), file.limits.max_weight)


def exact(values: Values) -> list[list[Fraction]]:
    return [[Fraction(value) for value in own] for own in values]


def to_float32(values: Sequence[Fraction | float]) -> list[float]:
    return [float(np.float32(float(value))) for value in values]


def several(fewest: int, most: int = 9) -> st.SearchStrategy[list[list[float]]]:
    return st.lists(st.lists(VALUES, min_size=3, max_size=3), min_size=fewest, max_size=most)


# Each rule against its slow version


@settings(max_examples=60, deadline=None)
@given(several(3))
def test_the_median_is_that_of_each_value(values: Values) -> None:
    columns = zip(*exact(values), strict=True)
    assert made(study("median", len(values)), values) == to_float32([median_of(list(column)) for column in columns])


@settings(max_examples=60, deadline=None)
@given(several(5), st.integers(1, 2))
def test_the_trimmed_mean_leaves_out_the_largest_and_smallest_of_each_value(values: Values, f: int) -> None:
    wanted = to_float32([trimmed_mean_of(list(column), f) for column in zip(*exact(values), strict=True)])
    assert made(study("trimmed_mean", len(values), bad_sites=f), values) == pytest.approx(wanted, rel=1e-6, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(several(7), st.integers(1, 2))
def test_krum_is_the_update_of_the_smallest_score_and_multi_krum_the_mean_of_the_best(values: Values, f: int) -> None:
    scores, n = krum_scores(exact(values), f), len(values)
    combined = combined_of(study("krum", n, bad_sites=f), values)
    (chosen,) = (names(n).index(site) for site, share in combined.shares.items() if share)
    assert float(scores[chosen]) == pytest.approx(float(min(scores)), rel=1e-9)
    assert made(study("krum", n, bad_sites=f), values) == list(values[chosen])
    shares = combined_of(study("multi_krum", n, bad_sites=f), values).shares
    best = [names(n).index(site) for site, share in shares.items() if share]
    assert len(best) == n - f - 2
    assert float(sum(scores[place] for place in best)) == pytest.approx(float(sum(sorted(scores)[: n - f - 2])))
    wanted = [sum(values[place][axis] for place in best) / len(best) for axis in range(3)]
    assert made(study("multi_krum", n, bad_sites=f), values) == pytest.approx(wanted, rel=1e-6, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(several(3), st.lists(st.integers(1, 50), min_size=9, max_size=9))
def test_the_clipped_mean_shortens_what_is_longer_than_the_median_norm(values: Values, counts: list[int]) -> None:
    most = 2 * median_low([sum(value**2 for value in own) ** 0.5 for own in values])
    counts = counts[: len(values)]
    file = study("clipped_mean", len(values), clip=2.0, limits={"max_weight": 1.0})
    if most:
        wanted = clipped_mean_of(list(zip(counts, values, strict=True)), most)
        assert made(file, values, counts) == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_a_clipped_mean_may_have_a_norm_of_its_own_and_says_who_counts_for_less() -> None:
    file = study("clipped_mean", 3, clip_norm=2.0)
    combined = combined_of(file, [[1, 0, 0], [0, 8, 0], [0, 0, 2]], counts=(1, 2, 1))
    assert combined.shares == {"s00": 0.25, "s01": 0.5 / 4, "s02": 0.25}
    assert combined.capped == ("s01",)
    assert made(file, [[1, 0, 0], [0, 8, 0], [0, 0, 2]], counts=(1, 2, 1)) == [0.25, 1.0, 0.5]


@settings(max_examples=15, deadline=None)
@given(several(3, 6))
def test_the_geometric_median_has_the_smallest_sum_of_distances(values: Values) -> None:
    found = made(study("geometric_median", len(values)), values)
    points = [list(own) for own in values]
    slow = geometric_median_of(points)
    scale = 1 + sum_of_distances(slow, points)
    assert sum_of_distances(found, points) <= sum_of_distances(slow, points) + 1e-4 * scale


def test_the_geometric_median_of_three_corners_is_the_point_of_fermat() -> None:
    corners = [[0.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 1.0, 3**0.5]]  # of an equal-sided triangle: its center
    assert made(study("geometric_median", 3), corners) == pytest.approx([0, 1, 3**-0.5], abs=1e-6)


# Order, blocks, memory


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_the_sites_does_not_matter(rule: str) -> None:
    values = [[1.5, 2.0, -1.0], [1.0, 2.5, -1.5], [0.5, 1.75, -0.5], [1.25, 2.25, -1.75], [9.0, -9.0, 4.0]]
    first = made(study(rule), values)
    for order in list(permutations(range(5)))[::7]:
        found = made(study(rule), [values[place] for place in order])
        assert found == (first if rule in ("median", "trimmed_mean", "krum") else pytest.approx(first, rel=1e-6))


@pytest.mark.parametrize("rule", RULES)
def test_the_size_of_the_blocks_does_not_matter(rule: str) -> None:
    file, draw = study(rule), np.random.default_rng(1)
    specs = (TensorSpec("w", "F32", (501,)),)
    tensors = [draw.normal(size=501).astype("<f4") for _ in range(5)]
    updates = [Update(site, 7, InMemory({"w": own})) for site, own in zip(names(5), tensors, strict=True)]

    def all_of_it(pieces: Sequence[tuple[int, int]]) -> NDArray[np.float64]:
        combined = combine(server_aggregator(file, specs), updates, 1.0)
        assert combined.delta is not None
        return np.concatenate([combined.delta("w", start, count) for start, count in pieces])

    whole = all_of_it([(0, 501)])
    with mock.patch("fl_algorithms.server.combining.ROOM", 60):
        assert all_of_it([(0, 100), (100, 1), (101, 400)]) == pytest.approx(whole, rel=1e-12)


class Endless:
    """Tensors of any size that take no memory until they are read."""

    def __init__(self, value: float) -> None:
        self._value = value

    def block(self, key: str, start: int, count: int) -> NDArray[np.float32]:
        return np.full(count, self._value, dtype=np.float32)


@pytest.mark.parametrize("rule", RULES)
def test_memory_grows_neither_with_the_sites_nor_with_the_model(rule: str) -> None:
    def peak(sites: int, width: int) -> int:
        specs = (TensorSpec("w", "F32", (width,)),)
        aggregator = server_aggregator(study(rule, sites), specs)
        updates = [Update(site, 1, Endless(float(place))) for place, site in enumerate(names(sites))]
        tracemalloc.start()
        try:
            aggregator.aggregate(Round(1, Endless(0.5), updates, len, combined=combine(aggregator, updates, 1.0)))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    with mock.patch("fl_algorithms.server.combining.ROOM", 2**16):
        few = peak(5, 100_000)
        assert peak(20, 100_000) < 1.3 * few
        assert peak(5, 400_000) < 1.3 * few


# How many bad sites


@pytest.mark.parametrize("far", [10.0, 1e6, 1e30])
@pytest.mark.parametrize("rule", ROBUST)
def test_as_many_bad_sites_as_it_says_do_not_carry_the_model_away_and_one_more_does(rule: str, far: float) -> None:
    honest = [[1.0 + 0.1 * place, -2.0 + 0.1 * place, 0.1 * place] for place in range(6)]
    file = study(rule, 9, **({"bad_sites": 3} if "bad_sites" in SETTINGS[rule] else {}))
    assert file.aggregation.tolerates(9) == (4 if rule in ("median", "geometric_median") else 3)
    found = made(file, [*honest, *[[far, far, far]] * 3])
    assert found == pytest.approx([1.25, -1.75, 0.25], abs=1.5)
    if far > 1e5:
        more = [*honest[: 8 - file.aggregation.tolerates(9)], *[[far, far, far]] * (file.aggregation.tolerates(9) + 1)]
        taken = made(file, more)
        assert max(taken) > 1e3 or (rule in ("krum", "multi_krum") and far not in taken)


@pytest.mark.parametrize("rule", ["clipped_mean", "mean"])
def test_a_weighted_mean_says_that_it_tolerates_none(rule: str) -> None:
    section = AggregationSection(rule=rule)
    assert section.tolerates(9) == 0
    assert "it tolerates no bad site" in section.sentence(9, 9)


def test_a_clipped_mean_bounds_how_far_one_site_moves_the_model() -> None:
    honest = [[1.0, 0, 0]] * 4
    assert made(study("clipped_mean", 5), [*honest, [0, 1e30, 0]]) == pytest.approx([0.8, 0.2, 0.0])


@pytest.mark.parametrize(
    ("rule", "more", "fewest", "of"),
    [
        ("median", {}, 3, {2: 0, 3: 1, 4: 1, 5: 2, 12: 5}),
        ("geometric_median", {}, 3, {3: 1, 12: 5}),
        ("trimmed_mean", {}, 3, {2: 0, 3: 1, 12: 1}),
        ("trimmed_mean", {"bad_sites": 3}, 7, {6: 0, 7: 3}),
        ("krum", {}, 5, {4: 0, 5: 1, 12: 1}),
        ("krum", {"bad_sites": 2}, 7, {7: 2}),
        ("multi_krum", {"bad_sites": 2, "chosen": 6}, 10, {9: 0, 10: 2}),
        ("clipped_mean", {}, 3, {3: 0}),
        ("clipped_mean", {"clip_norm": 1.0}, 1, {3: 0}),
    ],
)
def test_what_each_rule_needs_and_tolerates(rule: str, more: dict[str, Any], fewest: int, of: dict[int, int]) -> None:
    section = AggregationSection.model_validate({"rule": rule, **more})
    assert section.fewest == fewest
    assert {n: section.tolerates(n) for n in of} == of


# What it goes with


@pytest.mark.parametrize("rule", RULES)
def test_a_server_optimizer_steps_by_what_the_rule_gives(rule: str) -> None:
    values = [[1.5, 2.0, -1.0], [1.0, 2.5, -1.5], [0.5, 1.75, -0.5], [1.25, 2.25, -1.25], [9.0, -9.0, 4.0]]
    server = {"optimizer": "momentum", "learning_rate": 0.5, "beta1": 0.0}
    assert made(study(rule, server=server), values) == pytest.approx([0.5 * v for v in made(study(rule), values)])


def test_every_method_whose_coordinator_takes_a_mean_takes_a_rule_and_the_others_refuse_it_by_name() -> None:
    assert study("median", algorithm="fedprox").aggregation.rule == "median"
    for name in ("scaffold", "feddyn"):
        with pytest.raises(BadData) as refusal:
            study("krum", algorithm=name)
        assert refusal.value.message == (
            "study.toml: rule `krum` in [aggregation] stands in place of a mean of the updates, and algorithm "
            f"`{name}` has a server aggregator of its own"
        )
        fitting = (refusal.value.hint or "").removeprefix("leave [aggregation] out, or use one of ").split(", ")
        assert {"fedavg", "fedprox", "fenda", "ditto", "fedadam", "fedsoup"} <= set(fitting)
        assert not {name, "silo", "feddf", "fedsm", "fedmd"} & set(fitting)


def test_a_method_that_sends_nothing_has_no_use_for_a_rule() -> None:
    assert study("krum", algorithm="silo").aggregation.is_mean


@pytest.mark.parametrize(
    ("rule", "sites", "more", "said"),
    [
        ("krum", 4, {}, "with `bad_sites = 1` needs 5 updates in each round, the study has 4 sites"),
        ("median", 2, {}, " needs 3 updates in each round, the study has 2 sites"),
        (
            "trimmed_mean", 6, {"bad_sites": 2, "study": {"quorum": 4}},
            "with `bad_sites = 2` needs 5 updates in each round, the study's rounds close with 4 of its 6 sites",
        ),
        (
            "multi_krum", 6, {"chosen": 4}, "with `bad_sites = 1`, `chosen = 4` needs 7 updates in each round, the "
            "study has 6 sites",
        ),
    ],
)  # fmt: skip
def test_a_study_of_too_few_sites_is_refused(rule: str, sites: int, more: dict[str, Any], said: str) -> None:
    with pytest.raises(BadData) as refusal:
        study(rule, sites, **more)
    assert refusal.value.message.startswith(f"study.toml: rule `{rule}` in [aggregation]")
    assert refusal.value.message.endswith(said)
    assert refusal.value.hint is not None
    assert "`quorum` of at least" in refusal.value.hint


def test_a_round_of_too_few_updates_is_refused_where_nobody_has_checked_the_study() -> None:
    """As where the lab leaves one site out after another."""
    with pytest.raises(BadData) as refusal:
        combined_of(study("krum"), [[1.0, 2.0, 3.0]] * 4)
    assert refusal.value.message == "the study's rule in [aggregation] needs 5 updates, a round has 4"
    assert refusal.value.hint == "more sites, or another rule: `fl-lab methods` says what each needs"


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            {"rule": "median", "bad_sites": 1},
            "`bad_sites` belongs to `trimmed_mean`, `krum`, `multi_krum`, the rule is `median`",
        ),
        ({"clip": 2.0}, "`clip` belongs to `clipped_mean`, the rule is `mean`"),
        ({"rule": "clipped_mean", "clip": 1.0, "clip_norm": 3.0}, "give either `clip` or `clip_norm`"),
    ],
)  # fmt: skip
def test_a_setting_of_another_rule_is_refused(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="Value error") as refusal:
        AggregationSection.model_validate(table)
    assert said in str(refusal.value)


def test_a_study_without_a_rule_is_written_as_ever_and_one_with_a_rule_says_no_more_than_it_has() -> None:
    assert "aggregation" not in study("mean").document()
    document = study("trimmed_mean").document()
    assert document["aggregation"] == {"rule": "trimmed_mean", "bad_sites": 1}
    assert StudyFile.from_document(document).document() == document
    assert study("geometric_median").document()["aggregation"] == {"rule": "geometric_median", "smoothing": "1e-06"}


# What people read


def test_the_number_of_bad_sites_is_said_before_anybody_approves() -> None:
    file = study("trimmed_mean", 7, study={"quorum": 5}, bad_sites=2)
    said = (
        "a round's model is the mean of each value without its 2 smallest and 2 largest, each site counting alike: it "
        "tolerates 2 of 7 and 2 of 5 sites being bad"
    )
    assert file.file.bounds()[:2] == (said, "each site counts alike, whatever its rows")
    assert aggregation_in(json.loads(json.dumps(file.document()))) == said
    assert aggregation_in(study("mean").document()) == ""
    assert file.limits.norm_multiple == 0
    assert file.file.bounds()[2] == "no update is left out for its norm"
    assert study("median", limits={"norm_multiple": 5.0}).limits.norm_multiple == 5
    weight = "one site's averaging weight is at most 0.5 of a mean of three or more sites"
    assert study("clipped_mean").file.bounds()[1] == weight


@pytest.mark.parametrize("rule", SETTINGS)
def test_every_rule_has_words_and_a_sentence(rule: str) -> None:
    section = AggregationSection(rule=rule)
    assert section.words in section.sentence(5, 5)
    if rule != "mean":
        assert RULES[rule].name == rule


def test_an_account_says_what_each_update_counted_for() -> None:
    values = [[1.0, 1, 1], [1.1, 1, 1], [0.9, 1, 1], [1, 1.1, 1], [-9, -9, -9]]
    combined = combined_of(study("krum"), values)
    assert combined.shares == {"s00": 1.0, "s01": 0, "s02": 0, "s03": 0, "s04": 0}
    assert combined.capped == ("s01", "s02", "s03", "s04")
    shares = combined_of(study("geometric_median"), values).shares
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["s04"] < 0.05
    assert combined_of(study("median"), values).shares == {}


# The coordinator and the lab


@pytest.mark.parametrize("rule", RULES)
def test_the_coordinator_and_the_lab_make_the_same_bits(rule: str, tmp_path: Path) -> None:
    file, blobs, draw = study(rule, limits={"norm_multiple": 2.0}), Blobs(tmp_path), np.random.default_rng(3)
    file = file.changed(study={"quorum": 5, "sites": tuple(names(6))})
    tensors = [{"w": draw.normal(size=700).astype("<f4")} for _ in range(6)]
    tensors[2]["w"] *= np.float32(50)  # beyond the limit: the rule never sees it
    specs = (TensorSpec("w", "F32", (700,)),)
    aggregator = server_aggregator(file, specs)
    spooled, results = [], {}
    for site, own in zip(names(6), tensors, strict=True):
        path = blobs.spool(f"{site}-upload")
        save_file(own, path)
        with TensorFile(path) as held:
            spooled.append(Spooled(site, 9, f"{site}-upload", held.manifest().digest()))
        results[site] = mock.Mock(
            spec=RoundResult, num_examples=9, uplink={MODEL: {"w": torch.from_numpy(own["w"].copy())}}
        )
    with blobs.new_model(specs, "zeros") as new:
        new.write(bytes(2800))
        kept = new.keep().digest()
    manifest, account = at_the_coordinator(blobs, file, aggregator, kept, spooled[::-1], (), 1, "x")
    shared, same = in_the_lab(file, aggregator, {"w": torch.zeros(700)}, 1, results)
    assert account == same
    assert set(account.left_out) == {"s02"}
    assert Account.from_document(json.loads(json.dumps(account.document()))) == account
    with TensorFile(blobs.model(manifest.digest())) as model:
        assert model.block("w", 0, 700).tobytes() == shared["w"].numpy().tobytes()


def test_distances_are_symmetric_and_zero_to_oneself() -> None:
    found = squared_distances(updates_of([[0, 0, 0], [3, 4, 0], [0, 0, 1]]), SPECS)
    assert found.tolist() == [[0, 25, 1], [25, 0, 26], [1, 26, 0]]


def test_the_command_lists_the_rules_with_what_each_needs_and_tolerates() -> None:
    listed = lab()
    for row in RULES.values():
        assert row.name in listed
    assert "tolerates" in listed
