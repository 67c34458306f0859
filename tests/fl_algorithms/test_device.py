"""Where a party trains, and how images reach the training: neither may change what it must not."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_algorithms.engine.algorithm import Downlink
from fl_algorithms.engine.device import CPU, Device, at_home, device_for, like
from fl_algorithms.engine.hardware import Hardware
from fl_algorithms.engine.partition import all_tensors, describe, initial_model, task_of
from fl_algorithms.engine.session import Checkpoint, SessionState, SiteSession
from fl_algorithms.engine.training import Batches
from fl_algorithms.lab import runs
from fl_algorithms.lab import sharpness as curvature
from fl_algorithms.lab.federation import Outcome, downlink, run_federation
from fl_algorithms.lab.protocol import measure
from fl_algorithms.lab.protocol_settings import Protocol
from fl_algorithms.lab.site_data import load_sites
from fl_algorithms.lab.suite import Job
from fl_algorithms.methods.feddf import ensemble
from fl_algorithms.resolving import resolve
from fl_algorithms.server.aggregator import server_aggregator
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import SiteData
from fl_algorithms.tasks.images import pixels
from tests.fl_algorithms.far_device import FAR, Far, elsewhere
from tests.fl_algorithms.image_toys import (
    CLASSES,
    IMAGES,
    MASKS,
    RESNET,
    image_study,
    labeled,
    masked,
    pictures,
    write_images,
    write_table,
)
from tests.fl_algorithms.test_every_method import METHODS, noisy, started
from tests.fl_algorithms.toys import data_of, start_of, toy_study
from wardround.errors import BadData, TryAgain, UsageProblem

CHANGES = {
    "flip_horizontal": True, "quarter_turns": True, "rotate_degrees": 20, "shift": 0.1, "zoom": 0.1, "brightness": 0.2,
    "contrast": 0.2,
}  # fmt: skip
SMALL = {"augment": CHANGES, "cache_mib": 500}  # with a MIB of 1 byte: 12 images of 64 bytes do not fit
FORCED = Device(precision=torch.bfloat16, channels_last=True, name="forced")  # what CUDA does, on the CPU


@pytest.fixture
def uncached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels, "MIB", 1)


def folders(root: Path, *, masks: bool) -> Path:
    for seed, site in enumerate(("ash", "birch")):
        if masks:
            masked(root / site)
            continue
        names = write_images(root / site / "images", list(pictures(12, seed)[0]))
        write_table(root / site / "labels.csv", {"image": names, "shape": [CLASSES[n % 2] for n in range(12)]})
    return root


def federate(study: ResolvedStudy, folder: Path, device: Device) -> Outcome:
    task = task_of(study)
    sites = load_sites(study, task, folder)
    assert all(data.train.x.for_worker() is not None for data in sites.values())  # type: ignore[union-attr]
    return run_federation(study, task, sites, device=device)


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# Workers


@pytest.mark.parametrize("iterator", ["round", "run"])
@pytest.mark.parametrize(
    "masks", [pytest.param(False, marks=pytest.mark.chaos, id="images"), pytest.param(True, id="masks")]
)
@pytest.mark.usefixtures("uncached")
def test_any_number_of_workers_gives_the_same_bits(tmp_path: Path, masks: bool, iterator: str) -> None:
    folder = folders(tmp_path, masks=masks)
    table, model = (MASKS, None) if masks else (IMAGES, RESNET | {"dropout": 0.3})
    study = image_study(table | SMALL, model, "fedrep" if not masks else "fedavg", iterator=iterator, local_steps=4)
    outcomes = [federate(study, folder, Device(workers=workers)) for workers in (0, 1, 3)]
    assert outcomes[0].digest == outcomes[1].digest == outcomes[2].digest
    for site, session in outcomes[0].sessions.items():
        for outcome in outcomes[1:]:
            mine, theirs = session.export_state(), outcome.sessions[site].export_state()
            assert mine.meta == theirs.meta
            assert equal(mine.tensors, theirs.tensors)


@pytest.mark.usefixtures("uncached")
def test_batches_made_ahead_keep_their_order_over_epochs_and_the_place_of_what_was_taken(tmp_path: Path) -> None:
    study = image_study(IMAGES | SMALL, iterator="run")
    data = task_of(study).load(labeled(tmp_path), site="ash", seed=1, validation_fraction=0.25)
    places: list[dict[str, int]] = [{}, {}]
    here, ahead = (
        Batches(data.train.x, data.train.y, study, "ash", 1, "", place, Device(workers=workers))
        for place, workers in zip(places, (0, 2), strict=True)
    )
    taken = ahead.take(8)  # 9 images in batches of 4: two orders and two batches of the third
    for batch in taken:
        expected = here.next()
        assert torch.equal(batch.x, expected.x)
        assert torch.equal(batch.y, expected.y)
        assert batch.x.stride() == expected.x.stride()
        assert places[0] == places[1]
    assert places[1] == {"order": 2, "position": 8}


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.usefixtures("uncached")
def test_a_file_that_vanishes_in_the_middle_of_an_epoch_is_told_alike(tmp_path: Path, workers: int) -> None:
    study = image_study(IMAGES | SMALL)
    data = task_of(study).load(labeled(tmp_path), site="ash", seed=1, validation_fraction=0.25)
    order = Batches(data.train.x, data.train.y, study, "ash", 1, "", {})
    batches = Batches(data.train.x, data.train.y, study, "ash", 1, "", {}, Device(workers=workers))
    last = [order.next() for _ in range(3)][-1]
    assert len(last.x) == 1  # of nine
    for path in (tmp_path / "images").iterdir():
        path.rename(path.with_suffix(".gone"))
    taken = batches.take(3)
    with pytest.raises(BadData, match=r"/images/\d{3}\.png: No such file or directory"):
        next(taken)


def test_images_that_are_kept_decoded_need_no_workers(tmp_path: Path) -> None:
    study = image_study()
    data = task_of(study).load(labeled(tmp_path), site="ash", seed=1, validation_fraction=0.25)
    assert data.train.x.for_worker() is None  # type: ignore[union-attr]


# The device


def test_a_device_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageProblem, match="finds no CUDA device") as told:
        device_for(Hardware("cuda"))
    assert "--device cpu" in told.value.hint
    assert told.value.code == "DECLINED_RESOURCES"
    assert device_for(Hardware("auto", 3)) == device_for(Hardware("cpu", 3)) == Device(workers=3)


def test_a_device_that_cannot_be_used_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA driver initialization failed\nand much more")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", broken)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    for name in ("auto", "cuda"):
        with pytest.raises(UsageProblem, match=r"the CUDA device cannot be used: CUDA driver initialization failed$"):
            device_for(Hardware(name))  # type: ignore[arg-type]


def session_on(device: Device, study: ResolvedStudy, data: SiteData, state: SessionState | None = None) -> SiteSession:
    return SiteSession(study, "ash", task_of(study), data, state, device=device)


def first_download(study: ResolvedStudy) -> Downlink:
    aggregator = server_aggregator(study, describe(study, "ash").upload)
    return downlink(aggregator, started(aggregator, initial_model(study)), "ash", 1)


@dataclass(frozen=True)
class Stay:
    """What a site gave on a device: in two rounds with a restart between them, in the closing one and at the end."""

    uplinks: list[dict[str, Tensor]]
    checkpoints: list[Checkpoint]
    states: list[SessionState]
    sessions: list[SiteSession]


def stay(study: ResolvedStudy, device: Device) -> Stay:
    data, base = data_of(study, "ash"), first_download(study)
    before = session_on(device, study, data)
    results, states = [before.train(1, base)], [before.export_state()]
    after = session_on(device, study, data, states[0])
    results += [after.train(2, base), after.validate(3, base)]
    states.append(after.export_state())
    checkpoints = [*(one for result in results for one in result.checkpoints), *after.finish(1, base)]
    uplinks = [
        {f"{bundle}/{name}": delta for bundle, deltas in result.uplink.items() for name, delta in deltas.items()}
        for result in results
    ]
    return Stay(uplinks, checkpoints, states, [before, after])


@pytest.mark.parametrize("algorithm", METHODS)
def test_every_method_keeps_to_its_device_and_hands_out_what_the_cpu_would(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = noisy(algorithm, rounds=2, local_steps=2, optimizer_lifetime="run")
    here = stay(study, CPU)
    with elsewhere(monkeypatch):
        there = stay(study, FAR)
    assert all(equal(ours, theirs) for ours, theirs in zip(here.uplinks, there.uplinks, strict=True))
    for mine, yours in zip(here.checkpoints, there.checkpoints, strict=True):
        assert equal(mine.tensors, yours.tensors)
        assert replace(mine, tensors={}) == replace(yours, tensors={})
    for kept, found in zip(here.states, there.states, strict=True):
        assert equal(kept.tensors, found.tensors)
        assert kept.meta == found.meta
    handed = [*there.uplinks, *(one.tensors for one in (*there.checkpoints, *there.states))]
    assert not any(isinstance(tensor, Far) for tensors in handed for tensor in tensors.values())
    for session in there.sessions:
        assert all(isinstance(tensor, Far) for tensor in all_tensors(session._context.networks).values())


@pytest.mark.parametrize("weights", ["balanced", [1.0, 2.0]], ids=["balanced", "the study's"])
def test_images_keep_to_their_device(weights: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = {"fine_tuning": {"steps": 2}, "soup": {"start_after": 1, "statistics": "estimate"}}
    study = image_study(IMAGES | {"augment": CHANGES, "class_weights": weights}, batch_size=5)
    study = resolve(study.changed(algorithm=tuning).file)
    task, folder = task_of(study), folders(tmp_path, masks=False)
    here = run_federation(study, task, load_sites(study, task, folder))
    with elsewhere(monkeypatch):
        there = run_federation(study, task, load_sites(study, task, folder), device=FAR)
    assert here.digest == there.digest
    assert set(there.checkpoints["ash"]) >= {"latest", "fine_tuned"}
    for kind, checkpoint in here.checkpoints["ash"].items():
        assert equal(checkpoint.tensors, there.checkpoints["ash"][kind].tensors)


@pytest.mark.parametrize("algorithm", ["feddf", "pfeddf"])
def test_distillation_keeps_to_its_device_and_gives_the_cpus_bits(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = noisy(algorithm, rounds=2)
    task, data = task_of(study), {site: data_of(study, site) for site in study.study.sites}
    here = run_federation(study, task, data)
    places: list[bool] = []
    real = ensemble.run_steps

    def seen(batches: Batches, steps: int, optimizer: torch.optim.Optimizer, *rest: Any, **options: Any) -> int:
        places.append(all(isinstance(one, Far) for group in optimizer.param_groups for one in group["params"]))
        return real(batches, steps, optimizer, *rest, **options)

    monkeypatch.setattr(ensemble, "run_steps", seen)
    with elsewhere(monkeypatch):
        there = run_federation(study, task, data, device=FAR)
    assert here.digest == there.digest
    assert places
    assert all(places)


def test_what_the_lab_measures_keeps_to_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curvature, "ITERATIONS", 2)
    study = noisy("fedavg", rounds=1)
    protocol = Protocol(matrix=True, personalisation=(1,), tent=True, sharpness=True, leave_one_out=True)
    task, data = task_of(study), {site: data_of(study, site) for site in study.study.sites}
    here = measure(study, task, data, run_federation(study, task, data), protocol)
    with elsewhere(monkeypatch):
        there = measure(study, task, data, run_federation(study, task, data, device=FAR), protocol, FAR)
    assert here == there


def test_tensors_of_two_devices_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    with elsewhere(monkeypatch):
        far = FAR.bring(torch.ones(3))
        assert torch.equal(at_home(far + far), torch.full((3,), 2.0))
        with pytest.raises(RuntimeError, match="tensors of two devices"):
            far + torch.ones(3)
        with pytest.raises(RuntimeError):
            far.numpy()


@pytest.mark.parametrize("algorithm", METHODS)
def test_every_method_trains_in_bfloat16_with_float32_deltas(algorithm: str) -> None:
    study = noisy(algorithm)
    data, base = data_of(study, "ash"), first_download(study)
    plain = session_on(CPU, study, data).train(1, base)
    result = session_on(FORCED, study, data).train(1, base)
    assert result.metrics == plain.metrics  # of what came, in float32
    for bundle, deltas in result.uplink.items():
        for name, delta in deltas.items():
            assert delta.dtype == torch.float32
            assert delta.is_contiguous()
            assert torch.isfinite(delta).all()
            assert delta.shape == plain.uplink[bundle][name].shape
    moved = [delta for deltas in result.uplink.values() for delta in deltas.values()]
    exact = [delta for deltas in plain.uplink.values() for delta in deltas.values()]
    if moved:
        assert any(not torch.equal(a, b) for a, b in zip(moved, exact, strict=True))


@pytest.mark.parametrize(("optimizer", "momentum"), [("sgd", 0.9), ("adam", 0.0)])
def test_a_session_goes_on_from_its_state_with_weights_in_another_order_of_memory(
    tmp_path: Path, optimizer: str, momentum: float
) -> None:
    study = image_study(algorithm="fedbn", optimizer=optimizer, momentum=momentum, batch_size=3)
    data = task_of(study).load(labeled(tmp_path), site="ash", seed=1, validation_fraction=0.25)
    base = start_of(study)
    session = session_on(FORCED, study, data)
    weights = [p for p in session._context.networks["model"].parameters() if p.dim() == 4 and min(p.shape[1:]) > 1]
    assert weights
    assert all(p.is_contiguous(memory_format=torch.channels_last) and not p.is_contiguous() for p in weights)
    session.train(1, base)
    state = session.export_state()
    assert all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in state.tensors.values())
    again = session_on(FORCED, study, data, state)
    one, other = session.train(2, base), again.train(2, base)
    assert equal(one.uplink["model"], other.uplink["model"])
    assert equal(session.export_state().tensors, again.export_state().tensors)
    for kept, found in zip(one.checkpoints, other.checkpoints, strict=True):
        assert all(tensor.is_contiguous() for tensor in kept.tensors.values())
        assert replace(kept, tensors={}) == replace(found, tensors={})


def test_a_copy_at_home_is_plain_and_one_beside_a_parameter_is_as_that() -> None:
    parameter = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    home = at_home(parameter)
    assert (home.is_contiguous(), home.requires_grad) == (True, False)
    assert torch.equal(home, parameter)
    back = like(home, parameter)
    assert (back.stride(), back.requires_grad) == (parameter.stride(), False)
    assert torch.equal(back, home)
    assert like(torch.tensor(3.0), parameter).item() == 3.0


def test_weights_rounded_without_a_gradient_carry_one_later() -> None:
    layer, x = nn.Linear(3, 2), torch.ones(1, 3)
    with FORCED.arithmetic():
        with torch.no_grad():
            assert layer(x).dtype == torch.bfloat16
        layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


def test_what_a_device_cannot_do_is_said_in_a_sentence() -> None:
    torch.use_deterministic_algorithms(True)
    with pytest.raises(BadData) as told, FORCED.explaining_errors():
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))  # has none on the CPU either
    assert told.value.message == (
        "the study's network or loss needs `put_`, which forced cannot compute to the same bits twice"
    )
    assert told.value.hint == "train this study on the CPU: `--device cpu`"
    with pytest.raises(TryAgain, match="the memory of forced is full"), FORCED.explaining_errors():
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(RuntimeError, match="something else"), FORCED.explaining_errors():
        raise RuntimeError("something else")


def test_a_model_trained_in_bfloat16_is_near_the_exact_one() -> None:
    study = toy_study(optimizer="sgd", weight_decay=0.0, rounds=5)
    task, data = task_of(study), {site: data_of(study, site) for site in study.study.sites}
    start = initial_model(study)
    exact, rounded = (run_federation(study, task, data, device=device).shared for device in (CPU, FORCED))
    moved, apart = (torch.cat([(exact[n] - other[n]).flatten() for n in exact]).norm() for other in (start, rounded))
    assert 0 < apart < 0.05 * moved  # a bfloat16 has 8 bits: each product is off by at most 2^-8


def test_the_lab_refuses_a_device_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    job = Job("row", "federated", "matched", False, 0, {}, image_study(), Protocol(), "row.json")
    failed = runs.attempt(job, tmp_path, Hardware("cuda"))
    assert isinstance(failed, runs.Failed)
    assert "finds no CUDA device" in failed.message
    with pytest.raises(UsageProblem, match="finds no CUDA device"):
        runs.survey(image_study(), tmp_path, Hardware("cuda"))


def test_hardware_is_told_on_a_command_line() -> None:
    assert Hardware().options == []
    assert Hardware("cuda", 2).options == ["--device", "cuda", "--workers", "2"]
