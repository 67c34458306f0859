"""Secure aggregation in the lab: each method's model with masks and without, and what it does not go with."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_algorithms import registry
from fl_algorithms.engine.partition import task_of
from fl_algorithms.lab import methods as cards
from fl_algorithms.lab.federation import Outcome, run_federation
from fl_algorithms.lab.participation import Participation
from fl_algorithms.lab.round_sums import range_summary
from fl_algorithms.resolving import resolve
from fl_algorithms.server.aggregator import Round, server_aggregator
from fl_algorithms.server.mean import InMemory
from fl_algorithms.server.secure_study import averages, secure_aggregation_of, summable, why_single
from fl_algorithms.server.secure_sums import Vector, added, layout_of, vector
from fl_algorithms.study import ResolvedStudy
from tests import reference
from tests.fl_algorithms.toys import data_of, study_tables
from wardround.errors import BadData, UsageProblem
from wardround.records.study import StudyFile
from wardround.secure.sums import model_values
from wardround.tensors.manifests import TensorSpec

SITES = ["ash", "birch", "cedar"]
MASKED = Participation(masked=True)
WANTED = {
    "fedavg", "fedavgm", "fedprox", "fedadam", "fedyogi", "fedadagrad", "feddyn", "scaffold", "fenda", "fedsoup",
    "fedbn", "fedper", "fedrep", "fedbabu", "lgfedavg", "ditto", "apfl", "moon", "mhpflgb", "fedmd", "dsfl",
}  # fmt: skip


def tables(algorithm: str, *, counts: str = "uniform", **section: Any) -> dict[str, Any]:
    row = registry.METHODS[algorithm]
    changes: dict[str, Any] = {
        "sites": SITES,
        "rounds": 2,
        "reported": {"counts": counts, "metrics": ["val_loss", "auc"]},
    }
    if row.plain_sgd:
        changes |= {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0}
    found = study_tables(algorithm, **changes)
    if algorithm == "lcfed":
        found["reported"]["metrics"] = ["val_loss"]
    return found | {"secure_aggregation": {"range": 64.0, **section}, "limits": {"max_weight": 1.0}}


def study(algorithm: str = "fedavg", **changes: Any) -> ResolvedStudy:
    return resolve(StudyFile.model_validate(tables(algorithm, **changes)), lab=True)


def run(one: ResolvedStudy, participation: Participation = Participation()) -> Outcome:
    data = {site: data_of(one, site) for site in one.study.sites}
    return run_federation(one, task_of(one), data, participation=participation)


def test_the_methods_that_need_sums_alone_are_these() -> None:
    assert set(summable()) == WANTED


@pytest.mark.parametrize("algorithm", sorted(WANTED))
def test_a_method_gives_the_same_model_with_masks_and_without(algorithm: str) -> None:
    one = study(algorithm)
    plain, masked = run(one), run(one, MASKED)
    assert plain.digest is not None
    assert (plain.digest, plain.best_round) == (masked.digest, masked.best_round)
    assert plain.accounts == masked.accounts


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_with_rows_as_weights_the_model_is_that_of_the_plain_mean_but_for_the_rounding(algorithm: str) -> None:
    one = study(algorithm, counts="exact", largest_weight=64)
    clear = {key: table for key, table in tables(algorithm, counts="exact").items() if key != "secure_aggregation"}
    clear["limits"] = {"max_weight": 1.0, "norm_multiple": 0}
    plain, summed = run(resolve(StudyFile.model_validate(clear), lab=True)), run(one, MASKED)
    for name, tensor in plain.shared.items():
        assert np.allclose(tensor, summed.shared[name], atol=2e-4), name


@pytest.mark.parametrize("algorithm", sorted(set(registry.METHODS) - WANTED - {"silo"}))
def test_a_method_that_needs_single_updates_is_refused_by_name_with_its_reason(algorithm: str) -> None:
    with pytest.raises(BadData) as error:
        study(algorithm)
    reason = why_single(registry.METHODS[algorithm])
    assert reason
    assert error.value.message == f"study.toml: algorithm `{algorithm}` does not go with [secure_aggregation]: {reason}"
    assert error.value.hint.startswith("one of ")
    assert cards.card(algorithm)["single_updates"] == reason


def test_the_page_names_the_methods_whose_model_no_member_can_compare_with_the_sum() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "privacy.md").read_text()
    section = page.partition("## What a member's check compares\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", section)) == {name for name in WANTED if not averages(study(name))}


def test_a_method_that_sends_nothing_has_no_section() -> None:
    assert study("silo").secure_aggregation is None


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        (
            {"limits": {"max_weight": 0.5}, "reported": {"counts": "exact"}},
            "`max_weight` 0.5 in [limits] compares the rows of single sites, which nobody sees",
            '`counts = "uniform"` in [reported]: each site counts alike; or `max_weight = 1.0` in [limits]',
        ),
        (
            {"limits": {"max_weight": 1.0, "norm_multiple": 5.0}},
            "`norm_multiple` in [limits] compares the norms of single updates, which nobody sees",
            "`norm_multiple = 0`; `range` in [secure_aggregation] limits each value at its own site",
        ),
        (
            {"aggregation": {"rule": "median"}},
            "rule `median` in [aggregation] compares single updates, which nobody sees",
            "leave [aggregation] out",
        ),
    ],
    ids=["max_weight", "norm_multiple", "a robust rule"],
)
def test_a_setting_that_needs_single_updates_is_refused(change: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(BadData) as error:
        resolve(StudyFile.model_validate(tables("fedavg") | change), lab=True)
    assert error.value.message == f"study.toml: with [secure_aggregation], {message}"
    assert error.value.hint == hint


def test_a_threshold_that_does_not_hold_is_refused() -> None:
    with pytest.raises(BadData) as error:
        study(threshold=2)
    assert error.value.message.startswith(
        "study.toml: [secure_aggregation]: a threshold of 2 of 3 sites does not stand 1 that collude: two different"
    )
    assert error.value.hint == "`threshold` of at least 3, more sites, or a smaller `colluding`"


def test_a_round_of_fewer_sites_than_the_threshold_is_refused() -> None:
    found = tables("fedavg")
    found["study"]["quorum"] = 2
    with pytest.raises(BadData) as error:
        resolve(StudyFile.model_validate(found), lab=True)
    assert error.value.message == (
        "study.toml: [secure_aggregation] opens sums of at least 3 sites, and the study's rounds close with 2"
    )
    assert error.value.hint == "`quorum` of at least 3 in [study], or none"
    found["study"] |= {"sites": ["ash", "birch"]}
    with pytest.raises(BadData, match="secure aggregation is for 3 to 255 sites, the study has 2"):
        resolve(StudyFile.model_validate(found), lab=True)


def test_networks_that_share_different_tensors_have_no_common_sum() -> None:
    file = StudyFile.model_validate(tables("fedavg") | {"networks": {"other": {"name": "mlp", "hidden": [2]}}})
    row = replace(registry.METHODS["fedavg"], heterogeneous=True)  # as one of a plug-in may be; ours distill
    with pytest.raises(BadData) as error:
        secure_aggregation_of(file, row, "study.toml")
    assert error.value.message == (
        "study.toml: with [secure_aggregation], sites whose networks share different tensors have no common sum"
    )
    assert error.value.hint == "leave [networks] out, or a method that exchanges predictions or a bypass"


def test_the_section_is_in_the_studys_digest_with_its_threshold_filled_in() -> None:
    one = study()
    assert one.document()["secure_aggregation"] == {
        "range": "64.0", "largest_weight": 65536, "threshold": 3, "colluding": 1,
    }  # fmt: skip
    assert resolve(StudyFile.from_document(one.document()), lab=True) == one
    assert one.digest("00" * 32) != study(range=32.0).digest("00" * 32)
    clear = resolve(StudyFile.model_validate(study_tables("fedavg")), lab=True)
    assert "secure_aggregation" not in clear.document()


# Numbers


SPEC = TensorSpec("w", "F32", (4,))


def vectors(one: ResolvedStudy, rows: list[tuple[list[float], int]]) -> list[Vector]:
    aggregator = server_aggregator(one, (SPEC,))
    return [
        vector(one, aggregator, site, InMemory({"w": np.array(values, np.float32)}), count, {"val_loss": 0.5}, 2)
        for site, (values, count) in zip(SITES, rows, strict=True)
    ]


def test_a_sum_is_that_of_the_slow_reference_and_its_mean_is_weighted_by_rows() -> None:
    one = study(counts="exact", range=2.0, largest_weight=100)
    rows = [([0.5, -1.25, 1e-3, 2.0], 7), ([0.1, 0.2, 0.3, -2.0], 100), ([0.0, 1.0, -1.0, 0.7], 1)]
    layout = layout_of(one, server_aggregator(one, (SPEC,)))
    found = added(layout, vectors(one, rows))
    bits = layout.quantizer.bits
    exact = [
        sum(reference.fixed_point(float(np.float32(values[place])), n, bits) for values, n in rows)
        for place in range(4)
    ]
    assert found.tensors.view(np.int32).tolist() == exact
    assert found.numbers.weight == 108
    assert found.mean("w", 1, 2).tolist() == [total / 2**bits / 108 for total in exact[1:3]]
    assert found.numbers.metrics == {"val_loss": 0.5}


def test_a_member_that_has_the_sum_computes_the_bits_of_the_next_model() -> None:
    one, chance = study(counts="exact", range=2.0, largest_weight=100), np.random.default_rng(4)
    for name in ("w", "running_var"):
        spec = TensorSpec(name, "F32", (50,))
        aggregator = server_aggregator(one, (spec,))
        base = InMemory({name: chance.uniform(0, 1, 50).astype(np.float32)})
        some = [
            Vector(site, InMemory({name: chance.uniform(-2, 2, 50).astype(np.float32)}), place + 1, {})
            for place, site in enumerate(SITES)
        ]
        found, payload = added(layout_of(one, aggregator), some), bytearray()
        aggregator.aggregate(Round(1, base, (), payload.extend, combined=found.combined))
        own = base.block(name, 0, 50)
        values = model_values(found.layout, found.tensors, found.numbers.weight, own, variance=name == "running_var")
        assert values.tobytes() == bytes(payload)


def test_where_all_sites_count_alike_no_count_is_in_the_sum() -> None:
    one = study(counts="uniform")
    assert (
        added(layout_of(one, server_aggregator(one, (SPEC,))), vectors(one, [([0.0] * 4, 9)] * 3)).numbers.weight == 3
    )


@pytest.mark.parametrize(
    ("rows", "message", "hint"),
    [
        (
            [([0.0] * 4, 1), ([0.0, 3.0, 0.0, 0.0], 1), ([0.0] * 4, 1)],
            "site birch: a value of size 3 in `w` is beyond the study's range of 2",
            "`range = 8` in [secure_aggregation] would hold it",
        ),
        (
            [([0.0] * 4, 1), ([0.0] * 4, 101), ([0.0] * 4, 1)],
            "site birch: a weight of 101 rows, the study takes 0 to 100",
            'a larger `largest_weight` in [secure_aggregation], or `counts = "uniform"` in [reported]',
        ),
    ],
    ids=["range", "rows"],
)
def test_what_the_ring_does_not_hold_is_refused_with_site_and_tensor(
    rows: list[tuple[list[float], int]], message: str, hint: str
) -> None:
    one = study(counts="exact", range=2.0, largest_weight=100)
    with pytest.raises(BadData) as error:
        added(layout_of(one, server_aggregator(one, (SPEC,))), vectors(one, rows))
    assert (error.value.message, error.value.hint) == (message, hint)


def test_a_sum_of_no_rows_has_no_mean() -> None:
    one = study(counts="exact")
    with pytest.raises(BadData, match="count for no rows together, so their sum has no mean"):
        _ = added(layout_of(one, server_aggregator(one, (SPEC,))), vectors(one, [([0.0] * 4, 0)] * 3)).combined


def test_a_run_says_which_range_it_would_have_needed() -> None:
    one = study()
    outcome = run(one)
    largest = max(account.largest for account in outcome.accounts)
    assert 0 < largest < 64
    assert range_summary(one, outcome.accounts).startswith(f"the largest value of an update was {largest:.3g}, `range`")
    assert range_summary(resolve(StudyFile.model_validate(study_tables("fedavg")), lab=True), ()) == ""


def test_masks_are_for_a_study_with_secure_aggregation() -> None:
    with pytest.raises(UsageProblem) as error:
        MASKED.refuse_unfit(resolve(StudyFile.model_validate(study_tables("fedavg")), lab=True))
    assert error.value.message == "`--masked` is for a study with secure aggregation, and this one has none"
    assert error.value.hint == "`--set secure_aggregation.range=1.0` gives it that table for one run"
    assert Participation.from_document(MASKED.document()) == MASKED
    assert "masked" not in Participation().document()


def test_the_page_of_methods_has_a_column_for_it() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "methods.md").read_text()
    assert "| sums alone |" in page
    assert "* `fedfomo`: the coordinator keeps each site's network and sends it to others." in page
