"""A study's learning curves, from its report: what each site reported of each model, and the mean validation loss.

Judges only. A point's step is the round whose model was validated, 0 for the initial one.
"""

import math
from collections import defaultdict

from coordinator.answers import AcceptedUpdate, StudyReport
from fl_algorithms.tracking import Exported, flat

MEAN = "mean/val_loss"


def curves(report: StudyReport) -> Exported:
    """One run, with a series for each metric of each site; of a round that was tried again, what came last."""
    points: dict[str, dict[int, float]] = defaultdict(dict)
    for row in report.attempts:
        if row.val_loss is not None:
            points[MEAN][row.round - 1] = row.val_loss
        for site, answer in row.answers.items():
            if isinstance(answer, AcceptedUpdate):
                for name, text in answer.metrics.items():
                    points[f"{site}/{name}"][row.round - 1] = float(text)
    series = {
        name: [(step, value) for step, value in sorted(values.items()) if math.isfinite(value)]
        for name, values in sorted(points.items())
    }
    study = report.study
    section = study.get("study")
    seed = section.get("seed") if isinstance(section, dict) else None
    return Exported(f"{report.id}-{report.revision}", seed if isinstance(seed, int) else 0, flat(study), series)
