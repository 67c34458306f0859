"""What the lab's loop adds to a local step, beside the same step in bare PyTorch.

Both train logistic regression on 13 features with AdamW in batches of 4: a hospital's smallest model, where the loop's
own cost shows most. They take turns in one process, and the medians of their processor times are compared.
"""

import statistics
import time
from typing import Any

from fl_algorithms.resolving import resolve

STEPS, TURNS = 2000, 7
ROWS, FEATURES, BATCH = 200, 13, 4

STUDY: dict[str, Any] = {
    "study": {"name": "step-cost", "sites": ["alpha"], "rounds": 1000, "threads": 1},
    "task": {
        "name": "tabular", "label": "y", "classes": ["0", "1"],
        "features": [f"x{number}" for number in range(FEATURES)],
    },
    "model": {"name": "mlp", "hidden": []},
    "algorithm": {"name": "fedavg"},
    "training": {"learning_rate": 1e-3, "batch_size": BATCH, "local_steps": STEPS},
}  # fmt: skip


def measure() -> dict[str, Any]:
    """Microseconds a step of the two loops, and the overhead as a share."""
    import torch

    from fl_algorithms.engine.partition import initial_model, task_of
    from fl_algorithms.engine.session import SiteSession
    from fl_algorithms.tasks.base import SiteData, Split
    from wardround.records.study import StudyFile

    study = resolve(StudyFile.model_validate(STUDY))
    x, y = torch.randn(ROWS, FEATURES), torch.randint(0, 2, (ROWS,))
    data = SiteData(Split(x, y), Split(x[:20], y[:20]), None, digest="0" * 64)
    session = SiteSession(study, "alpha", task_of(study), data)
    base = {"model": initial_model(study)}
    network = torch.nn.Linear(FEATURES, 1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)

    ours, bare = [], []
    for turn in range(TURNS):
        began = time.process_time()
        session.train(turn + 1, base)
        between = time.process_time()
        _bare_loop(network, optimizer, x, y.float())
        ours.append(between - began)
        bare.append(time.process_time() - between)
    lab, plain = statistics.median(ours[1:]) / STEPS, statistics.median(bare[1:]) / STEPS
    return {
        "bench": "local step", "model": f"{FEATURES}-1", "batch": BATCH, "lab_us": round(lab * 1e6, 1),
        "bare_us": round(plain * 1e6, 1), "overhead": round(lab / plain - 1, 3), "steps": STEPS, "turns": TURNS - 1,
    }  # fmt: skip


def _bare_loop(network: Any, optimizer: Any, x: Any, y: Any) -> None:
    """What one would write by hand: shuffled batches, loss, gradient, step."""
    import torch
    import torch.nn.functional as F  # noqa: N812  its name everywhere

    done = 0
    while done < STEPS:
        order = torch.randperm(len(y))
        shuffled_x, shuffled_y = x[order], y[order]
        for start in range(0, len(y), BATCH):
            if done == STEPS:
                break
            batch, labels = shuffled_x[start : start + BATCH], shuffled_y[start : start + BATCH]
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(network(batch).squeeze(1), labels).backward()
            optimizer.step()
            done += 1
