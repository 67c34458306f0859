"""How well hazards and survival probabilities fit what happened, by torchsurv (the extra `survival`)."""

import warnings
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from wardround.errors import NeedsPerson


def require() -> None:
    """Raises NeedsPerson: torchsurv is not installed."""
    if find_spec("torchsurv") is None:
        raise NeedsPerson(
            "task `survival` needs torchsurv for its scores, which is not installed here",
            hint="pip install 'wardround[survival]'",
        )


@cache
def _library() -> tuple[Any, Any, Any]:
    require()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it compiles with torch.jit, which torch calls deprecated
        from torchsurv.metrics.brier_score import BrierScore
        from torchsurv.metrics.cindex import ConcordanceIndex
        from torchsurv.stats.ipcw import get_ipcw
    return ConcordanceIndex, BrierScore, get_ipcw


def concordance(risk: Tensor, event: Tensor, time: Tensor) -> float | None:
    """Harrell's C: of the pairs of which one had the event before the other's time, the share in which that one has the
    greater risk, ties of risk counting half. None where there is no such pair.

    Args:
        risk, time: float64 (n,).
        event: bool (n,).
    """
    if not event.any() or not (time > time[event].min()).any():
        return None
    concordance_index, _, _ = _library()
    return float(concordance_index(tied_tol=0.0)(risk, event, time))


def integrated_brier(survival: Tensor, event: Tensor, time: Tensor, horizons: Tensor) -> float | None:
    """The Brier score of the survival probabilities at ``horizons``, integrated over those before the last time and
    divided by their span; the score itself where there is one. Each row is weighted by the inverse of its probability
    of not being censored (Kaplan-Meier, of these rows). None where no horizon is before the last time, or no event.

    Args:
        survival: (n, horizons).
        event, time: as ``concordance``.

    Reference:
        Graf, Schmoor, Sauerbrei, Schumacher, Statistics in Medicine 1999.
    """
    seen = horizons < time.max()
    if not event.any() or not seen.any():
        return None
    _, brier_score, ipcw = _library()
    score = brier_score()
    at = horizons[seen]
    score(survival[:, seen], event, time, at, ipcw(event, time), ipcw(event, time, at))
    found = float(score.integral())
    return found if torch.isfinite(torch.tensor(found)) else None
