"""What bad sites do in the lab, to see what a rule of [aggregation] stands. No study asks for it, no site does it.

    sign_flip    sends -s times its update; s = 1
    scaling      sends s times its update; s = 10
    label_flip   trains on the classes in reverse order: y becomes K - 1 - y
    alie         all bad sites send mu - z sigma of each value, over the honest updates of all sites, their own too.
                 z is the largest that hides: Phi(z) = (n - f - s) / (n - f) with s = floor(n / 2 + 1) - f

alie: Baruch, Baruch, Goldberg, A Little Is Enough: Circumventing Defenses For Distributed Learning, NeurIPS 2019,
algorithm 3. https://arxiv.org/abs/1902.06156. There mu and sigma are over the bad sites' own updates; these know more.

What a bad site reports beside its update stays honest: its counts, and its validation loss. No torch by itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fl_algorithms.study import ResolvedStudy
from wardround.errors import UsageProblem
from wardround.records.schema import Strict

if TYPE_CHECKING:
    from torch import Tensor

    from fl_algorithms.engine.session import RoundResult
    from fl_algorithms.tasks.base import SiteData

AttackKind = Literal["sign_flip", "scaling", "label_flip", "alie"]
STRENGTHS = {"sign_flip": 1.0, "scaling": 10.0}
MOST_STRENGTH = 1e30
Uplink = dict[str, dict[str, "Tensor"]]


class Attack(Strict):
    """Which sites are bad, and what they do.

    Attributes:
        strength: s of sign_flip and scaling; of alie z, in place of the one that hides.
    """

    kind: AttackKind
    sites: tuple[str, ...] = Field(min_length=1, max_length=256)
    strength: float | None = Field(default=None, gt=0, le=MOST_STRENGTH)

    def refuse_unfit(self, study: ResolvedStudy) -> None:
        """Raises UsageProblem: a site is not in the study, all are bad, or the attack cannot be made there."""
        sites = study.study.sites
        if unknown := [site for site in self.sites if site not in sites]:
            raise UsageProblem(f"the study has no site `{unknown[0][:60]}` that could be bad", hint=", ".join(sites))
        if set(self.sites) == set(sites):
            raise UsageProblem("all sites of the study are bad", hint="leave one honest")
        if self.kind == "label_flip" and self.strength is not None:
            raise UsageProblem("`label_flip` has no strength", hint="leave it out")
        if self.kind == "label_flip" and not study.task.row.classes:
            raise UsageProblem(
                f"`label_flip` reverses the classes of rows, task `{study.task.name}` has none", hint="another attack"
            )
        if self.kind == "alie" and study.networks:
            raise UsageProblem("`alie` takes the mean of all updates, and this study has several networks")
        if self.kind == "alie" and self.strength is None and hidden(len(sites), len(set(self.sites))) <= 0:
            raise UsageProblem(
                f"`alie` with {len(set(self.sites))} of {len(sites)} sites has no room to hide: its z is not above 0",
                hint="more bad sites, or a strength, which is z",
            )

    def data_of(self, study: ResolvedStudy, data: "Mapping[str, SiteData]") -> "dict[str, SiteData]":
        """The sites' data as they train on it."""
        if self.kind != "label_flip":
            return dict(data)
        classes = len(getattr(study.task.settings, "classes", ()))
        flipped = {}
        for site in self.sites:
            train = data[site].train
            flipped[site] = replace(data[site], train=replace(train, y=classes - 1 - train.y))
        return {**data, **flipped}

    def sent(self, results: "Mapping[str, RoundResult]") -> "dict[str, RoundResult]":
        """What the sites of a round send, of what they would have sent."""
        bad = [site for site in results if site in self.sites]
        if self.kind == "label_flip" or not bad:
            return dict(results)
        if self.kind == "alie":
            z = self.strength if self.strength is not None else hidden(len(results), len(bad))
            shifted = _shifted([result.uplink for result in results.values()], z)
            return {**results, **{site: replace(results[site], uplink=shifted) for site in bad}}
        factor = (-1 if self.kind == "sign_flip" else 1) * (self.strength or STRENGTHS[self.kind])
        moved = {site: replace(results[site], uplink=_times(results[site].uplink, factor)) for site in bad}
        return {**results, **moved}


def attacked(kind: AttackKind | None, sites: Sequence[str] | None, strength: float | None) -> Attack | None:
    """The attack that a command asks for.

    Raises:
        UsageProblem: a part of it is missing, or its strength is no number above 0.
    """
    if kind is None and not sites and strength is None:
        return None
    if kind is None or not sites:
        raise UsageProblem("--attack and --bad-site go together", hint="`--attack sign_flip --bad-site SITE`")
    if strength is not None and not 0 < strength <= MOST_STRENGTH:
        raise UsageProblem(f"--strength is {strength:g}, not above 0 and at most {MOST_STRENGTH:g}")
    return Attack(kind=kind, sites=tuple(sites), strength=strength)


def hidden(sites: int, bad: int) -> float:
    """The largest z with which ``bad`` of ``sites`` hide: as many honest ones lie further off as a majority needs."""
    honest = sites - bad
    share = (honest - (sites // 2 + 1 - bad)) / honest if honest else 0.0
    return NormalDist().inv_cdf(share) if 0 < share < 1 else 0.0


def _times(uplink: Uplink, factor: float) -> Uplink:
    return {bundle: {name: tensor * factor for name, tensor in tensors.items()} for bundle, tensors in uplink.items()}


def _shifted(uplinks: list[Uplink], z: float) -> Uplink:
    """mu - z sigma of each value, in float64 and rounded once."""
    import torch

    def of(bundle: str, name: str) -> "Tensor":
        values = torch.stack([uplink[bundle][name] for uplink in uplinks]).double()
        return (values.mean(dim=0) - z * values.std(dim=0, correction=0)).float()

    return {bundle: {name: of(bundle, name) for name in tensors} for bundle, tensors in uplinks[0].items()}
