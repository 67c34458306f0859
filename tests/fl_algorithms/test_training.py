"""Batches, phases and optimizers of the local loop."""

import pytest
import torch
from torch import nn

from fl_algorithms.engine.device import make_deterministic
from fl_algorithms.engine.partition import task_of
from fl_algorithms.engine.training import Batches, Optimizers, only_trainable, run_steps, seeded, trainable_parameters
from fl_algorithms.study import ResolvedStudy
from tests.fl_algorithms.toys import toy_study
from wardround.errors import BadData
from wardround.records.study import TrainingSection


def batches_of(rows: int, study: ResolvedStudy, round_number: int = 1, place: dict[str, int] | None = None) -> Batches:
    x = torch.arange(rows, dtype=torch.float32)[:, None]
    return Batches(x, torch.arange(rows), study, "ash", round_number, "", {} if place is None else place)


def rows_of(batches: Batches, count: int) -> list[list[int]]:
    return [batches.next().y.tolist() for _ in range(count)]


@pytest.mark.parametrize(
    ("rows", "drop_last", "sizes"),
    [
        (1, False, [1]),
        (3, False, [3]),
        (4, False, [4]),
        (5, False, [4, 1]),
        (1, True, [1]),  # a split smaller than a batch is one short batch: no hospital trains zero steps
        (3, True, [3]),
        (4, True, [4]),
        (5, True, [4]),
    ],
)
def test_a_pass_over_a_tiny_split(rows: int, drop_last: bool, sizes: list[int]) -> None:
    batches = batches_of(rows, toy_study(drop_last=drop_last))
    drawn = rows_of(batches, batches.per_epoch)
    assert [len(batch) for batch in drawn] == sizes
    assert len({row for batch in drawn for row in batch}) == sum(sizes)


def test_an_exhausted_iterator_shuffles_again() -> None:
    drawn = [row for batch in rows_of(batches_of(20, toy_study()), 10) for row in batch]
    first, second = drawn[:20], drawn[20:]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


def test_with_iterator_round_every_round_begins_a_new_order_of_its_own() -> None:
    study = toy_study(iterator="round")
    again = [rows_of(batches_of(20, study, round_number), 3) for round_number in (1, 2, 1)]
    assert again[0] == again[2] != again[1]


def test_with_iterator_run_the_next_round_goes_on_where_the_last_one_stopped() -> None:
    study = toy_study(iterator="run")
    whole = rows_of(batches_of(10, study), 8)
    place: dict[str, int] = {}
    parts = rows_of(batches_of(10, study, 1, place), 2)
    parts += rows_of(batches_of(10, study, 2, place), 1)
    parts += rows_of(batches_of(10, study, 3, dict(place)), 5)
    assert parts == whole


def test_features_and_labels_stay_together_when_shuffled() -> None:
    batch = batches_of(20, toy_study()).next()
    assert batch.x[:, 0].tolist() == batch.y.tolist()


def test_drawing_from_a_stream_leaves_torchs_own_generator_alone() -> None:
    before = torch.random.get_rng_state()
    with seeded(1):
        torch.randn(3)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_stream_draws_as_a_generator_of_its_seed_without_a_word_to_devices_that_nobody_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of them would write the whole stack down, for an error that may come later."""
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("a device was told of a seed"))
    with seeded(7):
        drawn = torch.randn(5)
    assert torch.equal(drawn, torch.randn(5, generator=torch.Generator().manual_seed(7)))


def test_a_study_says_how_many_threads_torch_may_use() -> None:
    make_deterministic(1)
    assert torch.get_num_threads() == 1
    assert torch.are_deterministic_algorithms_enabled()


def test_a_frozen_part_keeps_its_weights_statistics_and_dropout_still() -> None:
    frozen = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    head = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5))
    network = nn.Sequential(frozen, head).eval()
    networks = {"model": network}
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    parameters = trainable_parameters(networks, ["model/1.*"])
    assert list(parameters) == ["model/1.0.weight", "model/1.0.bias"]
    study = toy_study()
    with seeded(1):
        data = Batches(torch.randn(12, 3), torch.arange(12), study, "ash", 1, "", {})
        optimizer = Optimizers(study.training).get("main", parameters)
        with only_trainable(networks, parameters):
            assert (frozen[2].training, head[1].training) == (False, True)
            run_steps(data, 4, optimizer, lambda batch: network(batch.x).mean())
    changed = {name for name, tensor in network.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"1.0.weight", "1.0.bias"}
    assert all(parameter.requires_grad for parameter in network.parameters())
    assert not any(module.training for module in network.modules())


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_an_optimizer_goes_on_from_what_was_exported(optimizer: str) -> None:
    study = toy_study(optimizer=optimizer, momentum=0.9 if optimizer == "sgd" else 0.0)

    def train(network: nn.Module, optimizers: Optimizers, round_number: int) -> None:
        data = Batches(torch.ones(8, 2), torch.zeros(8), study, "ash", round_number, "", {})
        parameters = trainable_parameters({"model": network}, ["*"])
        run_steps(data, 3, optimizers.get("main", parameters), lambda batch: (network(batch.x) ** 2).mean())

    with seeded(1):
        one = nn.Linear(2, 1)
    other = nn.Linear(2, 1)
    optimizers = Optimizers(study.training)
    train(one, optimizers, 1)
    other.load_state_dict(one.state_dict())
    restored = Optimizers(study.training)
    restored.load(optimizers.export())
    assert restored.export().keys() == optimizers.export().keys()  # also before it is first used
    train(one, optimizers, 2)
    train(other, restored, 2)
    assert torch.equal(one.weight, other.weight)


def test_an_optimizer_that_lives_a_round_forgets() -> None:
    network = {"model": nn.Linear(2, 1)}
    optimizers = Optimizers(TrainingSection(local_steps=1, optimizer_lifetime="round"))
    parameters = trainable_parameters(network, ["*"])
    first = optimizers.get("main", parameters)
    assert optimizers.get("main", parameters) is first
    optimizers.begin_round()
    assert optimizers.get("main", parameters) is not first


def test_kept_moments_of_another_network_are_refused() -> None:
    optimizers = Optimizers(TrainingSection(local_steps=1))
    optimizers.load({"main..model..weight.exp_avg": torch.zeros(7, 7)})
    with pytest.raises(BadData) as refusal:
        optimizers.get("main", trainable_parameters({"model": nn.Linear(2, 1)}, ["*"]))
    said = "the kept state does not fit the study's network: optimizer state `main..model..weight.exp_avg`"
    assert refusal.value.message == said


def test_progress_is_told_now_and_then_and_at_the_end() -> None:
    study, network, told = toy_study(), nn.Linear(1, 1), list[tuple[int, int]]()
    optimizer = Optimizers(study.training).get("main", trainable_parameters({"model": network}, ["*"]))
    run_steps(
        batches_of(8, study), 25, optimizer, lambda batch: network(batch.x).mean(),
        progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert told == [(10, 25), (20, 25), (25, 25)]


def test_the_task_gives_one_loss_for_each_row() -> None:
    losses = task_of(toy_study()).losses(torch.zeros(3, 1), torch.tensor([0, 1, 1]))
    torch.testing.assert_close(losses, torch.full((3,), 2.0).log())
