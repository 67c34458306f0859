"""A study's learning curves for other tools: each metric of each site and its mean, by the model that it is of.

Judges only. A point's step is the round whose model was validated, 0 for the initial one.
"""

import math

from coordinator.metric_answers import StudyMetrics
from coordinator.study_answers import StudyReport
from fl_algorithms.tracking import Exported, flat


def curves(report: StudyReport, metrics: StudyMetrics) -> Exported:
    """One run, with a series for each metric of each site, and one for its mean over the sites."""
    series = {f"mean/{name}": metrics.mean_curve(name) for name in metrics.metrics}
    series |= {f"{site}/{name}": metrics.curve(name, site) for site in metrics.sites for name in metrics.metrics}
    finite = {
        name: [(step, value) for step, value in points if math.isfinite(value)] for name, points in series.items()
    }
    section = report.study.get("study")
    seed = section.get("seed") if isinstance(section, dict) else None
    return Exported(
        f"{report.id}-{report.revision}", seed if isinstance(seed, int) else 0, flat(report.study),
        {name: points for name, points in finite.items() if points},
    )  # fmt: skip
