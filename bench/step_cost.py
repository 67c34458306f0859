"""What the lab's loop adds to a local step, beside the same step in bare PyTorch.

Of a table: logistic regression on 13 features in batches of 4, a hospital's smallest model, where the loop's own cost
shows most. Here a turn is a whole round: what is judged and what leaves counts too.

Of images: the residual networks of ``NETWORKS`` on made-up tiles in batches of 16. Both sides take their batches from
the same rows, decoded in memory and augmented as the example ``skin`` has it; bare PyTorch shuffles them itself. Here a
turn is the steps alone, as a validation part takes what its number of images takes; ``round_ms`` is a round's rest.

Both train with AdamW on one thread, in turns in a process of its own. Said are the medians of their processor times,
and of the overhead in each pair of turns, without the first. torch is held to deterministic kernels in the lab's turns
only: it is the lab's wish. What is freed stays with that process, else the heap's chance order decides which side gets
its gradients, 45 MB of a ResNet-18, from the kernel anew in each step: 10,000 page faults, up to a tenth of the time.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from fl_algorithms.resolving import resolve
from wardround.records.study import StudyFile

Measured = dict[str, Any]
Batches = Iterator[tuple[Any, Any]]
Turn = Callable[[int], float]  # the turn's number, from 0 -> processor seconds of its steps

KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}  # glibc's; another allocator ignores them

STEPS, TURNS = 2000, 7
ROWS, FEATURES, BATCH = 200, 13, 4
RATE = 1e-3

STUDY: dict[str, Any] = {
    "study": {"name": "step-cost", "sites": ["alpha"], "rounds": 1000, "threads": 1},
    "task": {
        "name": "tabular", "label": "y", "classes": ["0", "1"],
        "features": [f"x{number}" for number in range(FEATURES)],
    },
    "model": {"name": "mlp", "hidden": []},
    "algorithm": {"name": "fedavg"},
    "training": {"learning_rate": RATE, "batch_size": BATCH, "local_steps": STEPS},
}  # fmt: skip

IMAGES, HELD_OUT, SIDE, IMAGE_BATCH = 160, 32, 64, 16
NETWORKS: dict[str, tuple[dict[str, Any], int, int]] = {  # as said -> [model] of the study, steps of a turn, turns
    "resnet10 of a quarter's width": ({"name": "resnet10", "width": 0.25, "stem": "medium"}, 8, 15),
    "resnet18": ({"name": "resnet18", "stem": "large"}, 3, 9),
}
IMAGE_TASK: dict[str, Any] = {
    "name": "images", "label": "y", "classes": ["0", "1"], "size": [SIDE, SIDE],
    "mean": [0.75, 0.55, 0.55], "std": [0.15, 0.15, 0.17],
    "augment": {
        "flip_horizontal": True, "flip_vertical": True, "quarter_turns": True, "brightness": 0.1, "contrast": 0.1,
    },
}  # fmt: skip


def measure() -> Iterator[Measured]:
    """Microseconds a step of the two loops, and the overhead as a share: of a table, then of images."""
    command = [sys.executable, "-m", "bench.step_cost"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **KEEPING}) as process:
        assert process.stdout is not None
        yield from map(json.loads, process.stdout)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def _measured() -> Iterator[Measured]:
    yield _of_a_table()
    for name in NETWORKS:
        yield _of_images(name)


def _of_a_table() -> Measured:
    import torch

    from fl_algorithms.engine.partition import initial_model, task_of
    from fl_algorithms.engine.session import SiteSession
    from fl_algorithms.tasks.base import SiteData, Split

    study = resolve(StudyFile.model_validate(STUDY))
    x, y = torch.randn(ROWS, FEATURES), torch.randint(0, 2, (ROWS,))
    data = SiteData(Split(x, y), Split(x[:20], y[:20]), None, digest="0" * 64)
    session = SiteSession(study, "alpha", task_of(study), data)
    base, labels = {"model": initial_model(study)}, y.float()

    def whole_round(turn: int) -> float:
        began = time.process_time()
        session.train(turn + 1, base)
        return time.process_time() - began

    def batches() -> Batches:
        order = torch.randperm(ROWS)
        shuffled_x, shuffled_y = x[order], labels[order]
        for start in range(0, ROWS, BATCH):
            yield shuffled_x[start : start + BATCH], shuffled_y[start : start + BATCH]

    bare = _bare_loop(torch.nn.Linear(FEATURES, 1), batches, STEPS)
    return _compared(f"{FEATURES}-1", BATCH, STEPS, TURNS, whole_round, bare)


def _of_images(name: str) -> Measured:
    import torch

    from fl_algorithms.engine.algorithm import algorithm_of
    from fl_algorithms.engine.partition import build, initial_model, task_of
    from fl_algorithms.engine.phases import run_phase
    from fl_algorithms.engine.session import SiteSession

    model, steps, turns = NETWORKS[name]
    training = {**STUDY["training"], "batch_size": IMAGE_BATCH, "local_steps": steps}
    study = resolve(StudyFile.model_validate({**STUDY, "task": IMAGE_TASK, "model": model, "training": training}))
    task, own = task_of(study), study.at("alpha")
    data = _tiles(task)
    session = SiteSession(study, "alpha", task, data)
    base, rest = {"model": initial_model(study)}, []

    def steps_of_a_round(turn: int) -> float:
        began = time.process_time()
        opened = session.open(turn + 1, base)
        ready = time.process_time()
        for phase in opened.phases:
            run_phase(opened.context, phase, session.place(phase), lambda done, of: None)
        trained = time.process_time()
        session.close(opened)
        rest.append(ready - began + time.process_time() - trained)
        return trained - ready

    def batches() -> Batches:
        seed = int(torch.randint(1 << 62, ()))
        for places in torch.split(torch.randperm(len(data.train)), IMAGE_BATCH):
            x, y = data.train.x.augmented(places, data.train.y[places], seed)
            yield x, y.float()

    (network,) = build(own, task, algorithm_of(own), "alpha").values()
    bare = _bare_loop(network, batches, steps)
    found = _compared(f"{name}, {SIDE} pixels", IMAGE_BATCH, steps, turns, steps_of_a_round, bare)
    return {**found, "round_ms": round(statistics.median(rest[1:]) * 1e3, 1)}


def _tiles(task: Any) -> Any:
    """A site's images as they are once its files have been read: decoded, 8 bit."""
    import numpy as np
    import torch

    from fl_algorithms.tasks.base import SiteData, Split
    from fl_algorithms.tasks.images.pixels import Pixels
    from fl_algorithms.tasks.images.rows import ImageRows
    from fl_algorithms.tasks.images.rows import statistics as scale_of

    made = np.random.default_rng(7).integers(0, 256, (IMAGES, 3, SIDE, SIDE), dtype=np.uint8)
    pixels, y = Pixels(task.settings, made, []), torch.arange(IMAGES) % 2
    train, validation = (
        Split(ImageRows(pixels, places, task.settings, *scale_of(pixels, task.settings)), y[places])
        for places in torch.split(torch.arange(IMAGES), [IMAGES - HELD_OUT, HELD_OUT])
    )
    return SiteData(train, validation, None, digest="0" * 64)


def _bare_loop(network: Any, batches: Callable[[], Batches], steps: int) -> Turn:
    """What one would write by hand: shuffled batches, loss, gradient, step. ``batches``: of one pass over the data."""
    import torch
    import torch.nn.functional as F  # noqa: N812  its name everywhere

    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, fused=True)

    def turn(number: int) -> float:
        began, done = time.process_time(), 0
        torch.use_deterministic_algorithms(False)
        network.train()
        while done < steps:
            for batch, labels in batches():
                if done == steps:
                    break
                optimizer.zero_grad()
                loss = F.binary_cross_entropy_with_logits(network(batch).squeeze(1), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                done += 1
        torch.use_deterministic_algorithms(True)
        return time.process_time() - began

    return turn


def _compared(model: str, batch: int, steps: int, turns: int, lab: Turn, bare: Turn) -> Measured:
    """Both in turns; each is the first of every other pair."""
    ours: list[float] = []
    plain: list[float] = []
    for turn in range(turns):
        for loop, found in ((lab, ours), (bare, plain))[:: 1 if turn % 2 else -1]:
            found.append(loop(turn) / steps)
    lab_s, bare_s = statistics.median(ours[1:]), statistics.median(plain[1:])
    overhead = statistics.median(one / other - 1 for one, other in zip(ours[1:], plain[1:], strict=True))
    return {
        "bench": "local step", "model": model, "batch": batch, "lab_us": round(lab_s * 1e6, 1),
        "bare_us": round(bare_s * 1e6, 1), "overhead": round(overhead, 3), "steps": steps,
        "turns": turns - 1,
    }  # fmt: skip


if __name__ == "__main__":
    for one in _measured():
        print(json.dumps(one), flush=True)
