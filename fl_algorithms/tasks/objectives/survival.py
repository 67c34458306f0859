"""The time to an event by Cox's proportional hazards: hazard(t | x) = baseline(t) exp(f(x)).

A network gives f(x); the baseline is each site's own (Breslow's estimate from its training rows) and stays there.

Cox, Regression Models and Life-Tables, JRSS B 1972, with Breslow's discussion for the baseline. Ties: Efron, JASA 1977.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_algorithms.settings.targets import SURVIVAL_METRICS, SurvivalTarget
from fl_algorithms.tasks.base import OutputsOf, Predictions, Scores, SiteData
from fl_algorithms.tasks.survival_scores import concordance, integrated_brier, require
from wardround.errors import BadData

FARTHEST = 50.0  # of f(x) from the training rows' mean, where exp still has room


class SurvivalObjective:
    """Outputs are (n, 1), f(x); ``y`` is float32 (n, 2): the time, and 1 where the event happened then."""

    def __init__(self, settings: SurvivalTarget) -> None:
        """Raises NeedsPerson: what scores it is not installed."""
        require()
        self.settings = settings
        self.outputs = 1
        self.headline: str = settings.headline

    def at(self, data: SiteData) -> "SurvivalObjective":
        """Itself.

        Raises:
            BadData: no event happened among the training rows, so that nothing can be learned of them.
        """
        if not data.train.y[:, 1].any():
            raise BadData(
                f"no event among the {len(data.train)} training rows, so there is nothing to learn from here",
                hint="is `happened` in [task] what the file says? otherwise a longer follow-up, or a site that has no "
                "part in this study",
                code="DECLINED_DATA_INVALID",
            )
        return self

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        """Each row's part in the negative log partial likelihood of all given rows, per event: (n,). Their mean is
        that likelihood divided by the number of events; 0 where none happened.
        """
        terms, events = partial_likelihood_terms(logits.squeeze(1), y), max(1.0, float(y[:, 1].sum()))
        return terms * (len(y) / events)

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return self.losses(logits, y).mean()

    def metrics(self, logits: Tensor, y: Tensor, fit: Mapping[str, Any] | None = None) -> Scores:
        """c_index (Harrell's) and integrated_brier (over the study's horizons, weighted for censoring). The second
        needs the baseline in ``fit``.
        """
        if len(y) == 0 or not torch.isfinite(logits).all():
            return dict.fromkeys(SURVIVAL_METRICS, None)
        risk, time, event = logits.detach().double().squeeze(1).cpu(), y[:, 0].double().cpu(), y[:, 1].cpu() > 0
        brier = None
        if fit:
            survival = torch.from_numpy(self._survival(risk.numpy(), fit))
            brier = integrated_brier(survival, event, time, torch.tensor(self.settings.horizons, dtype=torch.float64))
        return {"c_index": concordance(risk, event, time), "integrated_brier": brier}

    def fit_outputs(self, outputs_of: OutputsOf, data: SiteData) -> dict[str, Any]:
        """The cumulative baseline hazard at the study's horizons, by Breslow's estimate from the training rows."""
        risk = outputs_of(data.train).double().squeeze(1).numpy()
        time, event = data.train.y[:, 0].double().numpy(), data.train.y[:, 1].numpy() > 0
        if not np.isfinite(risk).all():
            return {}
        center = math.fsum(risk.tolist()) / len(risk)
        hazard = np.exp((risk - center).clip(-FARTHEST, FARTHEST))
        horizons = np.array(self.settings.horizons)
        times, deaths = np.unique(time[event], return_counts=True)
        at_risk = np.array([math.fsum(hazard[time >= moment].tolist()) for moment in times])
        cumulative = [math.fsum((deaths / at_risk)[times <= horizon].tolist()) for horizon in horizons]
        return {
            "center": repr(center),
            "cumulative_hazard": [repr(value) for value in cumulative],
            "beyond_follow_up": int((horizons > time.max()).sum()),
        }

    def _survival(self, risk: np.ndarray[Any, Any], fit: Mapping[str, Any]) -> np.ndarray[Any, Any]:
        """The probability that the event has not happened at each horizon: (n, horizons)."""
        relative = np.exp((risk - float(fit["center"])).clip(-FARTHEST, FARTHEST))
        cumulative = np.array([float(text) for text in fit["cumulative_hazard"]])
        survival: np.ndarray[Any, Any] = np.exp(-np.outer(relative, cumulative))
        return survival

    def predictions(self, logits: Tensor, fit: Mapping[str, Any]) -> Predictions:
        """The hazard in multiples of the training rows' mean one, and survival at each horizon."""
        if "center" not in fit:
            raise BadData(
                "the checkpoint has no baseline hazard, so survival cannot be predicted from it",
                hint="predict from another checkpoint: `site-agent models list`",
            )
        risk = logits.double().squeeze(1).numpy()
        relative = np.exp((risk - float(fit["center"])).clip(-FARTHEST, FARTHEST))
        header = ("relative_hazard", *(f"survival_{horizon:g}" for horizon in self.settings.horizons))
        survival = self._survival(risk, fit).tolist()
        notes = ["the baseline hazard is this site's own, from its training rows"]
        if beyond := int(fit.get("beyond_follow_up", 0)):
            last = f"last {beyond} horizons lie" if beyond > 1 else "last horizon lies"
            notes.append(f"the {last} beyond the longest follow-up of these rows: survival there is that of its end")
        rows = [(f"{value:.6g}", *row) for value, row in zip(relative.tolist(), survival, strict=True)]
        return Predictions(header, rows, tuple(notes))

    def kinds(self, y: Tensor) -> Tensor | None:
        return y[:, 1].long()

    def counts(self, y: Tensor) -> dict[str, int]:
        """Rows with the event, and rows seen no longer."""
        events = int(y[:, 1].sum())
        return {"event": events, "censored": len(y) - events}

    def about(self, part: str, y: Tensor) -> list[str]:
        """A warning where no event happened."""
        if y[:, 1].any():
            return []
        return [f"The {part} ({len(y)} rows) has no event: the C-index is undefined there and left out of means"]


def partial_likelihood_terms(f: Tensor, y: Tensor) -> Tensor:
    """Of each row its part in Cox's negative log partial likelihood, ties as Efron: (n,); 0 of a row without event.

    Of m events at one moment, with S the sum of exp(f) over all rows that are still observed then and D that over the
    m: log(S - l/m D) - f for the l-th of them, l = 0 ... m - 1. Summed in float64 and on the CPU, so that every device
    gives the same.

    Args:
        f: (n,).
        y: (n, 2): time, event.
    """
    time, event, own = y[:, 0].cpu(), y[:, 1].cpu() > 0, f.double().cpu()
    moments, moment = torch.unique(time, return_inverse=True)
    latest_first = torch.argsort(time, descending=True, stable=True)
    log_sums = torch.logcumsumexp(own[latest_first], 0)
    tied_rows = torch.bincount(moment, minlength=len(moments))
    still = log_sums[tied_rows.flip(0).cumsum(0).flip(0) - 1]  # log S of each moment
    places = torch.nonzero(event).flatten()
    places = places[torch.argsort(moment[places], stable=True)]
    when = moment[places]
    share = torch.zeros_like(still).index_add(0, when, torch.exp(own[places] - still[when]))  # D / S
    tied = torch.bincount(when, minlength=len(moments))
    order = (torch.arange(len(places)) - (tied.cumsum(0) - tied)[when]) / tied[when]  # l / m
    terms = still[when] + torch.log1p(-order * share[when]) - own[places]
    return (own * 0).index_add(0, places, terms).to(f.dtype).to(f.device)
