"""How much one site may move a model: the cap and the norm limit, against slow versions, and alike in both places."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from coordinator.models.aggregation import DamagedSpools, Spooled, aggregate
from coordinator.storage.blobs import Blobs
from fl_algorithms.resolving import resolve
from fl_algorithms.server.aggregator import Round, ServerAggregator, Update, averaging_weights, server_aggregator
from fl_algorithms.server.best import BestGlobal
from fl_algorithms.server.combining import Combined
from fl_algorithms.server.limits import Account, TooFewLeft, averaged
from fl_algorithms.server.mean import InMemory
from fl_algorithms.study import ResolvedStudy
from tests.reference import capped_shares
from wardround.records.study import LimitsSection, StudyFile
from wardround.tensors.files import TensorFile
from wardround.tensors.manifests import TensorSpec

SITES = ("ash", "birch", "cedar", "douglas")
SPECS = (TensorSpec("w", "F32", (3,)),)


def study(algorithm: str = "fedavg", limits: dict[str, Any] | None = None, **section: Any) -> ResolvedStudy:
    tables = {
        "study": {"name": "small", "sites": list(SITES), "rounds": 3, "quorum": 3, **section},
        "task": {"name": "tabular", "label": "y", "classes": ["0", "1"], "features": [{"name": "x"}]},
        "model": {"name": "mlp"},
        "algorithm": {"name": algorithm},
        "training": {"local_steps": 1},
        "limits": limits or {},
    }
    return resolve(StudyFile.model_validate(tables))


def sent(*values: float, counts: tuple[int, ...] = (10, 10, 10, 10)) -> list[Update]:
    """One update a site, each value everywhere: a norm of sqrt(3) times it."""
    return [
        Update(site, count, InMemory({"w": np.full(3, value, "<f4")}))
        for site, value, count in zip(SITES, values, counts, strict=False)
    ]


def run(
    updates: list[Update], before: tuple[Account, ...] = (), file: ResolvedStudy | None = None
) -> tuple[np.ndarray[Any, Any], Account]:
    """The next model's values from zeros, and the account."""
    file = file or study()
    aggregator = server_aggregator(file, SPECS)

    kept = InMemory({spec.key: np.zeros(spec.shape, "<f4") for spec in aggregator.kept_specs})

    def make(chosen: Any, combined: Combined) -> np.ndarray[Any, Any]:
        out = bytearray()
        aggregator.aggregate(Round(1, kept, chosen, out.extend, None, file.limits.max_weight, combined=combined))
        return np.frombuffer(bytes(out), "<f4")[:3]

    return averaged(file, aggregator, updates, before, make, kept=kept, round_number=1)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=12), st.fractions(Fraction(1, 20), 1))
def test_the_cap_is_water_filling(counts: list[int], most: Fraction) -> None:
    weights = averaging_weights(counts, float(most))
    found = [weight / sum(weights) for weight in weights]
    wanted = capped_shares(counts, Fraction(float(most)))
    assert found == pytest.approx([float(share) for share in wanted], rel=1e-9)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=8))
def test_where_nobody_is_above_the_cap_every_count_is_its_weight_to_the_bit(counts: list[int]) -> None:
    weights = averaging_weights(counts, 0.5)
    if len(counts) < 3 or 2 * max(counts) <= sum(counts):
        assert weights == [float(count) for count in counts]
    assert averaging_weights(counts, 1.0) == [float(count) for count in counts]


def test_no_update_or_one_of_no_rows_has_no_mean() -> None:
    with pytest.raises(ValueError, match="that each count for at least 1"):
        averaging_weights([], 0.5)
    with pytest.raises(ValueError, match="that each count for at least 1"):
        averaging_weights([3, 0, 4], 0.5)


def test_a_site_above_the_cap_counts_for_the_cap_and_that_is_told() -> None:
    model, account = run(sent(1, 2, 3, 4, counts=(1, 2, 1, 1_000_000)))
    assert model == pytest.approx((1 * 1 + 2 * 2 + 1 * 3) / 8 + 4 / 2)
    assert account.capped == ("douglas",)
    assert account.shares == {"ash": 0.125, "birch": 0.25, "cedar": 0.125, "douglas": 0.5}
    assert Account.from_document(account.document()) == account


@pytest.mark.parametrize("algorithm", ["fedavg", "fedavgm", "fedadam"])
def test_every_mean_that_is_weighted_by_counts_is_capped(algorithm: str) -> None:
    file = study(algorithm)
    assert server_aggregator(file, SPECS).weighted
    counts = (1, 1, 1, 10**6)
    _, account = run(sent(1, 1, 1, 1, counts=counts), file=file)
    assert account.capped == ("douglas",)
    as_cut, _ = run(sent(1, 1, 1, 4, counts=(1, 1, 1, 3)), file=file)
    assert np.array_equal(run(sent(1, 1, 1, 4, counts=counts), file=file)[0], as_cut)


def test_a_method_whose_sites_count_alike_has_no_shares_to_cap() -> None:
    tables = study("fedavg").file.model_dump()
    tables["algorithm"] = {"name": "scaffold"}
    tables["training"] |= {"optimizer": "sgd", "weight_decay": 0.0}
    assert not server_aggregator(resolve(StudyFile.model_validate(tables)), SPECS).weighted


def test_an_update_of_many_medians_is_left_out_by_name_and_the_round_goes_on() -> None:
    model, account = run(sent(1, 1, 1, 10.01))
    assert model == pytest.approx(1)
    assert account.left_out == {"douglas": "norm 17.34, the limit is 17.32: 10 medians"}
    assert run(sent(1, 1, 1, 9.99))[1].left_out == {}


def test_two_of_four_cannot_lift_the_median() -> None:
    assert set(run(sent(1, 1, 1e6, 1e6), file=study(quorum=2))[1].left_out) == {"cedar", "douglas"}


def test_norms_fall_while_a_model_learns_and_a_site_that_still_learns_is_no_offender() -> None:
    """Without the rounds before, 1 is a thousand medians of this one; with them it is one."""
    first = run(sent(1, 1, 1, 1))[1]
    late = sent(1e-3, 1e-3, 1e-3, 1)
    assert run(late)[1].left_out
    assert not run(late, (first,))[1].left_out
    assert run(late, (first, *[run(sent(1e-3, 1e-3, 1e-3, 1e-3))[1]] * 5))[1].left_out  # five rounds are remembered


def test_what_was_left_out_is_not_learned_from() -> None:
    offended = run(sent(1, 1, 1, 1e9))[1]
    assert set(run(sent(1, 1, 1, 1e9), (offended, offended, offended))[1].left_out) == {"douglas"}


def test_fewer_than_three_norms_teach_nothing_and_then_history_does() -> None:
    file = study(quorum=1, limits={"max_weight": 1.0})
    first = run(sent(1, 1000), file=file)[1]
    assert (first.limits, first.left_out) == ({}, {})
    second = run(sent(1, 1), (first,), file=file)[1]
    assert second.left_out == {}
    assert set(run(sent(1, 1000), (first, second), file=file)[1].left_out) == {"birch"}


def test_where_no_one_moves_nobody_is_an_offender() -> None:
    assert run(sent(0, 0, 0, 5))[1].left_out == {}


@pytest.mark.parametrize("file", [study(limits={"norm_multiple": 0}), study(max_update_norm=1e9)])
def test_a_study_may_have_no_learned_limit(file: ResolvedStudy) -> None:
    assert run(sent(1, 1, 1, 1000), file=file)[1].limits == {}


def test_norms_are_compared_among_sites_that_send_the_same_tensors() -> None:
    """A large network's norms say nothing about a small one's."""
    file = study()
    aggregator = server_aggregator(file, SPECS)
    small = (TensorSpec("v", "F32", (1,)),)
    unlike = replace(aggregator, per_site=dict.fromkeys(SITES[:3], small))
    updates = [
        *(Update(site, 1, InMemory({"v": np.full(1, 1e-6, "<f4")})) for site in SITES[:3]),
        *sent(1, 1, 1, 1)[3:],
    ]
    made = averaged(file, unlike, updates, (), lambda chosen, combined: None, kept=InMemory({}), round_number=1)
    assert made[1].left_out == {}


NORMED = (TensorSpec("norm.weight", "F32", (2,)), TensorSpec("norm.running_var", "F32", (2,)))


def normed(variances: dict[str, tuple[float, float]], start: float, algorithm: str = "fedavg") -> tuple[bytes, Account]:
    """The next model of a norm layer whose running variance is ``start``, after these updates of it."""
    file = study(algorithm)
    aggregator = server_aggregator(file, NORMED)
    values = {
        spec.key: np.full(spec.shape, start if "var" in spec.key else 0.0, "<f4") for spec in aggregator.kept_specs
    }
    kept = InMemory(values)
    updates = [
        Update(site, 10, InMemory({"norm.weight": np.ones(2, "<f4"), "norm.running_var": np.array(change, "<f4")}))
        for site, change in variances.items()
    ]

    def make(chosen: Any, combined: Combined) -> bytes:
        out = bytearray()
        aggregator.aggregate(Round(1, kept, chosen, out.extend, None, file.limits.max_weight, combined=combined))
        return bytes(out)

    return averaged(file, aggregator, updates, (), make, kept=kept, round_number=1)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedadam", "fedavgm"])
def test_an_update_whose_model_has_a_negative_variance_is_left_out(algorithm: str) -> None:
    """1 - 1.1 is within every norm limit, and so is the mean with three honest sites."""
    honest = dict.fromkeys(SITES[:3], (-0.5, 0.25))
    made, account = normed({**honest, "douglas": (-1.1, 0.0)}, 1.0, algorithm)
    said = "norm 1.792, and `norm.running_var` of its model, a variance, is negative"
    assert account.left_out == {"douglas": said}
    assert made == normed(honest, 1.0, algorithm)[0]


def test_a_variance_that_only_rounding_made_negative_is_written_as_zero() -> None:
    start, change = np.float32(0.1), np.nextafter(np.float32(-0.1), np.float32(-1))
    assert start + change < 0
    made, account = normed(dict.fromkeys(SITES, (float(change), 1.0)), float(start))
    assert account.left_out == {}
    assert np.frombuffer(made, "<f4")[2:].tolist() == [0.0, pytest.approx(1.1)]


@pytest.mark.parametrize("algorithm", ["fedavg", "fedadam", "fedyogi", "fedadagrad", "fedavgm"])
def test_a_result_beyond_float32_leaves_out_the_largest_update(algorithm: str) -> None:
    """Also where nothing is learned: one finite 3e38 beside small ones."""
    file = study(algorithm, limits={"norm_multiple": 0})
    plain, _ = run(sent(1, 1, 1), file=file)
    values = sent(1, 1, 1, 3e38)
    values[3] = Update("douglas", 10, InMemory({"w": np.full(3, np.finfo("<f4").max)}))
    model, account = run(values, file=file)
    assert np.isfinite(model).all()
    if account.left_out:
        assert account.left_out["douglas"].startswith("norm 5.894e+38, the largest of a sum in which ")
        assert np.array_equal(model, plain)
    assert account.left_out or algorithm in ("fedavg", "fedavgm")  # a mean of it is still a float32


def test_when_too_few_are_left_all_that_were_left_out_are_named() -> None:
    with pytest.raises(TooFewLeft) as refusal:
        run(sent(1, 1, 1, 1e9), file=study(quorum=4))
    assert refusal.value.message == "site douglas: norm 1.732e+09, the limit is 17.32: 10 medians"
    assert set(refusal.value.account.norms) == set(SITES)


def test_the_multiple_follows_what_the_sites_do() -> None:
    """Steps are alike everywhere; passes over one's own data are not."""
    tables = study().file.model_dump(exclude={"limits"})
    assert resolve(StudyFile.model_validate(tables)).limits.norm_multiple == 10
    tables["training"] |= {"local_steps": None, "local_epochs": 1}
    assert resolve(StudyFile.model_validate(tables)).limits.norm_multiple == 200
    tables["limits"] = {"norm_multiple": 3}
    assert resolve(StudyFile.model_validate(tables)).limits.norm_multiple == 3


@pytest.mark.parametrize("multiple", [1.9, -1, 0.5])
def test_a_multiple_that_would_hit_the_median_site_is_refused(multiple: float) -> None:
    with pytest.raises(ValueError, match="is neither at least 2 nor 0, which is no limit"):
        LimitsSection(norm_multiple=multiple)


def test_the_coordinator_and_the_lab_leave_out_the_same_to_the_same_bits(tmp_path: Path) -> None:
    file = study()
    blobs = Blobs(tmp_path)
    values = sent(0.25, -1.5, 0.75, 1e20, counts=(1, 2, 50, 3))
    in_memory, account = run(values)
    kept, spooled = files(blobs, values)
    aggregator = server_aggregator(file, SPECS)
    manifest, found = aggregate(blobs, file, aggregator, kept, spooled, (), 1, "x")
    assert found == account
    assert (account.capped, set(account.left_out)) == (("cedar",), {"douglas"})
    with TensorFile(blobs.model(manifest.digest())) as model:
        assert model.block("w", 0, 3).tobytes() == in_memory.tobytes()


@pytest.mark.parametrize("place", [-1, -12, 3], ids=["the last byte", "the first value", "the header"])
def test_a_byte_that_changed_in_a_spool_is_found_before_anything_is_averaged(tmp_path: Path, place: int) -> None:
    blobs = Blobs(tmp_path)
    kept, spooled = files(blobs, sent(1, 2, 3, 4))
    path = blobs.spool(spooled[2].upload_id)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedSpools) as refusal:
        aggregate(blobs, study(), aggregator_of(), kept, spooled, (), 1, "x")
    assert refusal.value.sites == ("cedar",)
    said = "what is kept here of the accepted update of `cedar` is damaged; it was not averaged"
    assert (refusal.value.message, refusal.value.hint) == (
        said, "check the disk; the sites are asked for their updates again"
    )  # fmt: skip
    path.unlink()
    with pytest.raises(DamagedSpools):
        aggregate(blobs, study(), aggregator_of(), kept, spooled, (), 1, "x")


def aggregator_of() -> ServerAggregator:
    return server_aggregator(study(), SPECS)


def files(blobs: Blobs, updates: list[Update]) -> tuple[str, list[Spooled]]:
    """The updates as spools, and a model of zeros: its digest."""
    spooled = []
    for update in updates:
        path = blobs.spool(f"{update.site}-upload")
        save_file({"w": np.array(update.deltas.block("w", 0, 3))}, path)
        with TensorFile(path) as file:
            digest = file.manifest().digest()
        spooled.append(Spooled(update.site, update.num_examples, f"{update.site}-upload", digest))
    with blobs.new_model(SPECS, "zeros") as new:
        new.write(bytes(12))
        return new.keep().digest(), spooled


def test_no_sum_of_losses_raises_and_no_site_decides_alone_which_round_is_best() -> None:
    best = BestGlobal().offered(1, [("0.5", 10), ("0.5", 10), ("0.5", 10)], 0.5)
    assert best.offered(2, [("2.2e+307", 8), ("2.2e+307", 8)]) == best
    assert best.offered(2, [("1e308", 1000), ("-1e308", 1000)]) == best
    heavy = best.offered(2, [("0", 10**7), ("0.9", 10), ("0.9", 10)], 0.5)
    assert heavy.loss == pytest.approx(0.45)
