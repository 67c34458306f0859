"""Tent on a small network with a batch norm."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_algorithms.engine.algorithm import one_model
from fl_algorithms.engine.partition import all_tensors
from fl_algorithms.lab.tent import Tent, adapted_logits, entropy, with_batch_statistics
from tests.reference import entropy_of_softmax
from wardround.errors import BadData


@pytest.fixture
def networks() -> dict[str, nn.Module]:
    torch.manual_seed(4)
    network = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 2))
    network.train()
    for _ in range(20):  # running statistics that differ from any batch's
        network(3 * torch.randn(32, 3) + 1)
    return {"model": network.eval()}


def rows(n: int, seed: int = 8) -> Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))


def tensors(networks: Any) -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in all_tensors(networks).items()}


def test_only_the_norms_scale_and_shift_move_and_only_in_the_copy(networks: dict[str, nn.Module]) -> None:
    before = tensors(networks)
    tent = Tent(networks, one_model)
    for _ in range(3):
        tent(rows(16))
    after, adapted = tensors(networks), tensors(tent.networks)
    assert all(torch.equal(before[name], after[name]) for name in before)
    moved = {name for name in adapted if not torch.equal(adapted[name], before[name])}
    assert moved == {"1.weight", "1.bias"}
    assert adapted.keys() == before.keys() - {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_a_learning_rate_of_zero_is_batch_statistics_only(networks: dict[str, nn.Module]) -> None:
    x = rows(40)
    found = adapted_logits(networks, one_model, x, batch=16, learning_rate=0.0)
    layers = list(networks["model"].children())
    slow = []
    for part in (x[:16], x[16:32], x[32:]):
        hidden = layers[0](part)
        scaled = (hidden - hidden.mean(0)) / torch.sqrt(hidden.var(0, unbiased=False) + layers[1].eps)
        slow.append(layers[4](torch.relu(scaled * layers[1].weight + layers[1].bias)))
    torch.testing.assert_close(found, torch.cat(slow), rtol=1e-4, atol=1e-5)
    by_batches = [one_model(with_batch_statistics(networks), part) for part in torch.split(x, 16)]
    assert torch.equal(found, torch.cat(by_batches))


def test_answers_are_given_before_the_step(networks: dict[str, nn.Module]) -> None:
    x = rows(16)
    first, second = Tent(networks, one_model, learning_rate=0.1), Tent(networks, one_model, learning_rate=0.0)
    assert torch.equal(first(x), second(x))
    assert not torch.equal(first(x), second(x))


def test_an_episodic_answer_does_not_depend_on_what_came_before(networks: dict[str, nn.Module]) -> None:
    a, b = rows(16, seed=1), rows(16, seed=2)
    for episodic in (True, False):
        options: dict[str, Any] = {"learning_rate": 0.1, "episodic": episodic}
        one_way, other_way = Tent(networks, one_model, **options), Tent(networks, one_model, **options)
        (a_first, b_second), (b_first, a_second) = (one_way(a), one_way(b)), (other_way(b), other_way(a))
        assert (torch.equal(a_first, a_second), torch.equal(b_first, b_second)) == (episodic, episodic)


def test_an_episode_steps_from_the_start_with_no_moments_of_another(networks: dict[str, nn.Module]) -> None:
    a, b = rows(16, seed=1), rows(16, seed=2)
    alone, after = (Tent(networks, one_model, learning_rate=0.1, episodic=True) for _ in range(2))
    after(b)
    for tent in (alone, after):
        tent(a)
    mine, theirs = tensors(alone.networks), tensors(after.networks)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_entropy_falls_with_a_step(networks: dict[str, nn.Module]) -> None:
    x = rows(16)
    tent = Tent(networks, one_model)
    means = [float(entropy(tent(x)).mean()) for _ in range(3)]
    assert means[0] > means[1] > means[2]


def test_entropy_is_that_of_the_softmax_also_for_one_logit() -> None:
    for logit in (-3.0, 0.0, 0.7):
        assert float(entropy(torch.tensor([[logit]]))) == pytest.approx(entropy_of_softmax([0.0, logit]), rel=1e-6)
    three = [0.5, -1.0, 2.0]
    assert float(entropy(torch.tensor([three]))) == pytest.approx(entropy_of_softmax(three), rel=1e-6)
    assert float(entropy(torch.tensor([[500.0, -500.0]]))) == 0


def test_a_single_last_row_joins_the_batch_before_it(networks: dict[str, nn.Module]) -> None:
    x = rows(17)
    found = adapted_logits(networks, one_model, x, batch=16, learning_rate=0.1)
    assert torch.equal(found, one_model(with_batch_statistics(networks), x))


def test_one_row_alone_is_refused(networks: dict[str, nn.Module]) -> None:
    with pytest.raises(BadData, match="given 1 row"):
        adapted_logits(networks, one_model, rows(1))


def test_a_network_without_batch_norms_is_refused() -> None:
    with pytest.raises(BadData, match="the study's network has none"):
        Tent({"model": nn.Linear(3, 1)}, one_model)
