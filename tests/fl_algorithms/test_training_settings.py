"""[training]: schedules, clipping, balanced sampling, early stopping, the optimizer's own weight decay."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_algorithms.engine.algorithm import compute_logits, kinds_of
from fl_algorithms.engine.judging import validation_loss
from fl_algorithms.engine.schedule import rate_factor
from fl_algorithms.engine.session import SiteSession
from fl_algorithms.engine.training import Batches, Optimizers
from fl_algorithms.resolving import resolve
from tests.fl_algorithms.toys import plus, session_of, start_of, study_tables, toy_data, toy_study
from wardround.errors import BadData
from wardround.records.study import StudyFile
from wardround.records.training import Schedule, TrainingSection

# Schedules.


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        pytest.param({}, [1.0] * 8, id="constant"),
        pytest.param(
            {"kind": "step", "every": 1, "factor": 0.5}, [1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125], id="step"
        ),
        pytest.param(
            {"kind": "cosine", "floor": 0.2},
            [0.2 + 0.8 * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(8)],
            id="cosine",
        ),
        pytest.param({"warmup_rounds": 2}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1], id="warmup"),
        pytest.param(
            {"kind": "cosine", "warmup_rounds": 1},
            [0.5, 1.0, *((1 + math.cos(math.pi * k / 6)) / 2 for k in range(6))],
            id="warmup and cosine",
        ),
    ],
)
def test_a_schedule_is_a_function_of_round_and_step(schedule: dict[str, Any], expected: list[float]) -> None:
    """Four rounds of two steps."""
    found = [rate_factor(Schedule(**schedule), 4, r, step, 2) for r in range(1, 5) for step in (0, 1)]
    assert found == pytest.approx(expected)


def test_each_step_is_taken_at_the_rate_of_its_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    real = torch.optim.AdamW.step

    def seen(self: torch.optim.Optimizer, *given: Any) -> Any:
        rates.append(self.param_groups[0]["lr"])
        return real(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.optim.AdamW, "step", seen)
    schedule = {"kind": "step", "every": 1, "factor": 0.5}
    study = toy_study(schedule=schedule, local_steps=2, optimizer_lifetime="run")
    session, base = session_of(study), start_of(study)
    for number in (1, 2, 3):
        base = plus(base, session.train(number, base))
    assert rates == pytest.approx([0.05, 0.05, 0.025, 0.025, 0.0125, 0.0125])


def test_a_schedule_survives_a_restart_bit_for_bit() -> None:
    study = toy_study(schedule={"kind": "cosine", "warmup_rounds": 0.5})
    whole, base = session_of(study), start_of(study)
    after = plus(base, whole.train(1, base))
    state = whole.export_state()
    there = whole.train(2, after).uplink["model"]
    again = session_of(study, state=state).train(2, after).uplink["model"]
    assert all(torch.equal(there[name], again[name]) for name in there)


def test_an_optimizer_that_is_made_later_has_the_factor_too() -> None:
    optimizers = Optimizers(TrainingSection(local_steps=1, learning_rate=0.4))
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizers.scale(0.5)
    assert optimizers.get("late", {"w": weight}).param_groups[0]["lr"] == 0.2
    optimizers.scale(1.0)
    assert optimizers.get("late", {"w": weight}).param_groups[0]["lr"] == 0.4


# Clipping.


def steps_of(session: SiteSession, study: Any) -> float:
    """The norm of what one SGD step of rate 1 moved."""
    uplink = session.train(1, start_of(study)).uplink["model"]
    return float(torch.cat([delta.flatten() for delta in uplink.values()]).norm())


def test_a_gradient_is_no_longer_than_the_study_says() -> None:
    plain = {"optimizer": "sgd", "learning_rate": 1.0, "local_steps": 1}
    free, bound = toy_study(**plain), toy_study(**plain, clip_norm=0.01)
    loose = toy_study(**plain, clip_norm=1e6)
    unbound = steps_of(session_of(free), free)
    assert unbound > 0.05
    assert steps_of(session_of(bound), bound) == pytest.approx(0.01, rel=1e-4)
    assert steps_of(session_of(loose), loose) == unbound


# Weight decay.


@pytest.mark.parametrize(("optimizer", "decay"), [("sgd", 0.0), ("adam", 0.0), ("adamw", 0.01)])
def test_weight_decay_is_torchs_own_unless_a_study_says_otherwise(optimizer: Any, decay: float) -> None:
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimizer]
    own = kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1).param_groups[0]["weight_decay"]
    section = TrainingSection(optimizer=optimizer, local_steps=1)
    assert section.weight_decay == own == decay
    assert TrainingSection(optimizer=optimizer, local_steps=1, weight_decay=0.3).weight_decay == 0.3
    study = toy_study(optimizer=optimizer)
    assert study.document()["training"]["weight_decay"] == repr(decay)  # a consent shows it


# Balanced sampling.


def test_balanced_sampling_draws_each_class_equally_often_and_the_same_again() -> None:
    study = toy_study(sampling="balanced", batch_size=50)
    y = torch.cat([torch.zeros(950), torch.ones(50)]).long()

    def drawn(place: dict[str, int], count: int) -> list[Tensor]:
        batches = Batches(torch.arange(1000.0)[:, None], y, study, "ash", 1, "", place, kinds=y)
        return [batches.next().x.flatten() for _ in range(count)]

    rows = torch.cat(drawn({}, 20)).long()
    assert y[rows].float().mean() == pytest.approx(0.5, abs=0.05)
    assert torch.equal(rows, torch.cat(drawn({}, 20)).long())
    shuffled = torch.cat([Batches(torch.arange(1000.0)[:, None], y, study, "ash", 1, "", {}).next().x.flatten()])
    assert not torch.equal(shuffled.long(), rows[:50])


def test_a_session_balances_by_its_own_training_rows() -> None:
    data = toy_data("ash", rows=40)
    rare = torch.zeros(40).long()
    rare[:2] = 1
    data = replace(data, train=replace(data.train, y=rare))
    means = []
    for sampling in ("shuffled", "balanced"):
        study = toy_study(sampling=sampling, local_steps=10)
        session = session_of(study, data=data)
        kinds = kinds_of(session._context)
        assert (kinds is None) is (sampling == "shuffled")
        session.train(1, start_of(study))
        logits = compute_logits(session._context.algorithm, session._context.networks, data.train.x)
        means.append(float(logits.mean()))
    assert means[1] > means[0] + 0.5


# Early stopping.


def test_a_site_stops_where_its_own_validation_loss_rises_and_goes_back_to_its_least() -> None:
    steep = {"optimizer": "sgd", "learning_rate": 3.0, "momentum": 0.9, "local_steps": 60}
    study = toy_study(**steep, early_stopping={"every": 2, "patience": 3})
    session = session_of(study)
    session.train(1, start_of(study))
    context, split = session._context, session._context.data.validation
    stopped = context.steps
    assert 0 < stopped < 60
    assert stopped % 2 == 0
    found = validation_loss(compute_logits(context.algorithm, context.networks, split.x), split, context.task, study)
    losses = []
    for steps in range(2, stopped + 1, 2):
        plain = toy_study(**{**steep, "local_steps": steps})
        other = session_of(plain)
        other.train(1, start_of(plain))
        logits = compute_logits(other._context.algorithm, other._context.networks, split.x)
        losses.append(validation_loss(logits, split, context.task, study))
    assert found == pytest.approx(min(losses))
    assert losses.index(min(losses)) == len(losses) - 4


def test_a_look_at_the_validation_rows_changes_no_step() -> None:
    calm = {"optimizer": "sgd", "learning_rate": 0.05, "local_steps": 12}
    plain, watched = toy_study(**calm), toy_study(**calm, early_stopping={"every": 12})
    one, other = session_of(plain).train(1, start_of(plain)), session_of(watched).train(1, start_of(watched))
    assert all(torch.equal(one.uplink["model"][name], other.uplink["model"][name]) for name in one.uplink["model"])


@pytest.mark.parametrize("method", ["ditto", "apfl", "moon", "fenda", "fedper", "fedrep"])
def test_methods_of_several_phases_take_all_of_these_settings(method: str) -> None:
    options: dict[str, Any] = {"early_stopping": {"every": 2}, "clip_norm": 0.5, "sampling": "balanced"}
    study = toy_study(method, schedule={"kind": "cosine", "warmup_rounds": 1}, rounds=2, **options)
    session, base = session_of(study), start_of(study)
    for number in (1, 2):
        result = session.train(number, base)
        base = plus(base, result)
    assert all(torch.isfinite(delta).all() for part in result.uplink.values() for delta in part.values())


# What cannot be.


@pytest.mark.parametrize(
    ("method", "changes", "said", "hint"),
    [
        pytest.param(
            "scaffold",
            {"optimizer": "sgd", "weight_decay": 0.0, "clip_norm": 1.0},
            "algorithm `scaffold` needs the same step everywhere, [training] has a `schedule`, a `clip_norm` or "
            "`early_stopping`",
            "leave them out of [training]",
            id="scaffold",
        ),
        pytest.param(
            "lcfed",
            {"sampling": "balanced"},
            '`sampling = "balanced"` in [training] draws classes equally often, and the rows of task `segmentation` '
            "are of none",
            '`sampling = "shuffled"`',
            id="masks",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(method: str, changes: dict[str, Any], said: str, hint: str) -> None:
    with pytest.raises(BadData) as refused:
        resolve(StudyFile.model_validate(study_tables(method, **changes)))
    assert (refused.value.message, refused.value.hint) == (f"study.toml: {said}", hint)
