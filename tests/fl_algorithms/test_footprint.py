"""Passes outside training have as many rows as fit: what a row takes, what a pass takes, and the same scores."""

from collections.abc import Mapping
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fl_algorithms.engine.algorithm import compute_logits, judged
from fl_algorithms.engine.footprint import row_bytes
from fl_algorithms.engine.judging import evaluation_parts
from fl_algorithms.engine.partition import task_of
from fl_algorithms.engine.taking import have_same_bits
from fl_algorithms.tasks.selection import chosen
from tests.fl_algorithms.toys import U, data_of, plus, session_of, start_of, toy_masks, toy_study

BYTES = "fl_algorithms.engine.judging.EVALUATION_BYTES"


def infer(networks: Mapping[str, nn.Module], x: Tensor) -> Tensor:
    found: Tensor = networks["model"](x)
    return found


def test_a_row_takes_what_each_module_gives_for_it_and_itself() -> None:
    network = {"model": nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))}
    numbers = 36 + 8 * 36 + 8 * 36 + 8 * 36 + 2 + 2  # the image; convolution, its ReLU, flat; the output, twice
    assert row_bytes(infer, network, torch.zeros(5, 1, 6, 6)) == 0  # while it learns
    network["model"].eval()
    assert row_bytes(infer, network, torch.zeros(5, 1, 6, 6)) == 4 * numbers
    assert row_bytes(infer, network, torch.zeros(0, 1, 6, 6)) == 0


def test_where_a_norm_looks_at_the_rows_of_a_pass_these_are_not_fewer() -> None:
    norm = nn.BatchNorm1d(3, track_running_stats=False).eval()
    assert row_bytes(infer, {"model": norm}, torch.zeros(5, 3)) == 0
    assert row_bytes(infer, {"model": nn.BatchNorm1d(3).eval()}, torch.zeros(5, 3)) > 0


def test_a_row_is_counted_once_for_a_network_and_a_shape() -> None:
    network, asked = {"model": nn.Linear(3, 1).eval()}, []

    def counted(networks: Mapping[str, nn.Module], x: Tensor) -> Tensor:
        asked.append(tuple(x.shape))
        return infer(networks, x)

    first = row_bytes(counted, network, torch.zeros(9, 3))
    assert first == row_bytes(counted, network, torch.zeros(4, 3)) > 0
    assert asked == [(1, 3)]
    assert not network["model"]._forward_hooks


@pytest.mark.parametrize(("each", "passes"), [(0, [7]), (100, [7]), (1000, [3, 3, 1]), (10**9, [1] * 7)])
def test_a_pass_has_as_many_rows_as_fit_and_at_least_one(each: int, passes: list[int]) -> None:
    with mock.patch(BYTES, 3500):
        assert [len(part) for part in evaluation_parts(torch.zeros(7, 2), each)] == passes


@pytest.mark.parametrize(("method", "model"), [("fedavg", None), ("fenda", None), ("lcfed", U)])
def test_scores_are_the_same_however_little_fits(method: str, model: dict[str, object] | None) -> None:
    study = toy_study(method, model)
    session = session_of(study, data=data_of(study, "ash"))
    context, split = session._context, data_of(study, "ash").train
    for network in context.networks.values():
        network.eval()
    rows: list[int] = []

    def watched(networks: Mapping[str, nn.Module], x: Tensor) -> Tensor:
        rows.append(len(x))
        return context.algorithm.infer(networks, x)

    whole = judged(context.algorithm, context.networks, split, task_of(study.at("ash"))).metrics()
    logits = compute_logits(context.algorithm, context.networks, split.x)
    each = row_bytes(context.algorithm.infer, context.networks, split.x)
    with mock.patch(BYTES, 4 * each + each // 2):
        small = replace(context.algorithm, infer=watched)
        assert judged(small, context.networks, split, task_of(study.at("ash"))).metrics() == pytest.approx(whole)
        torch.testing.assert_close(compute_logits(small, context.networks, split.x), logits)
    assert max(rows) == 4  # and so no pass takes more than was allowed
    assert sum(rows) == 2 * len(split)


def test_masks_are_judged_a_few_at_a_time() -> None:
    """Their logits are never held at once: what each row counts for is."""
    study = toy_study("lcfed", U)
    data = toy_masks("ash")
    context = session_of(study, data=data)._context
    found = judged(context.algorithm, context.networks, chosen(data.train, torch.arange(5)), task_of(study.at("ash")))
    assert found.logits is None
    assert found.rows is not None
    assert len(found.rows) == 5


@pytest.mark.parametrize("method", ["fedavg", "fenda", "fedbn", "moon", "ditto"])
def test_a_checkpoint_shares_what_came_and_is_the_same_to_the_bit(method: str) -> None:
    """Whoever writes it down at once needs no copy of the model; training goes on beside it and does not change it."""
    study = toy_study(method)
    base = start_of(study)
    with_copies, sharing = session_of(study), session_of(study, shares_download=True)
    after = [session.train(1, base) for session in (with_copies, sharing)]
    base = plus(base, after[0])
    kept = {name: tensor.clone() for name, tensor in base["model"].items()}
    copied, shared = (session.train(2, base).checkpoints for session in (with_copies, sharing))
    for one, other in zip(copied, shared, strict=True):
        assert (one.kind, one.round) == (other.kind, other.round)
        assert one.tensors.keys() == other.tensors.keys()
        assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())
    came = {tensor.data_ptr() for part in base.values() for tensor in part.values() if tensor.numel()}
    (latest,) = (one for one in shared if one.kind == "latest")
    assert came <= {tensor.data_ptr() for tensor in latest.tensors.values()}
    assert not came & {tensor.data_ptr() for one in copied for tensor in one.tensors.values()}
    assert all(torch.equal(tensor, kept[name]) for name, tensor in base["model"].items())


def test_what_differs_in_a_sign_of_nothing_is_copied() -> None:
    zero, minus = torch.zeros(3), -torch.zeros(3)
    assert torch.equal(zero, minus)
    assert not have_same_bits(zero, minus)
    assert have_same_bits(minus, minus.clone())
    assert have_same_bits(torch.full((2,), float("nan")), torch.full((2,), float("nan")))
    assert not have_same_bits(torch.zeros(2, 3).T, torch.zeros(3, 2))
    assert not have_same_bits(torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
