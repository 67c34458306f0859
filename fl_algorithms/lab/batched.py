"""Several seeds of one study at once, with their sites' networks trained as one batch of models.

``fl_algorithms.engine.together`` says how, what it refuses, and why its bits are not a hospital's. All but the training
steps is the code of a single run: downloads, judging, limits and means are the same.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from fl_algorithms.engine.beside import federated
from fl_algorithms.engine.device import CPU, deterministic
from fl_algorithms.engine.session import RoundResult
from fl_algorithms.engine.together import PLAIN, Together
from fl_algorithms.lab.curves import Curves
from fl_algorithms.lab.federation import Outcome, Run
from fl_algorithms.lab.participation import EVERYONE
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import SiteData, Task
from wardround.errors import BadData

METHODS = (
    "fedavg", "fedavgm", "fedadam", "fedadagrad", "fedyogi", "fedprox", "fenda", "fedper", "fedbabu", "fedrep",
    "lgfedavg", "ditto", "apfl", "fedsoup", "silo",
)  # fmt: skip
"""The methods whose loss is known to need of a site only its networks, its download and its batch."""


def run_batched(
    studies: Sequence[ResolvedStudy],
    task: Task,
    data: Sequence[Mapping[str, SiteData]],
    progress: Callable[[float, int], None] | None = None,
    starts: Sequence[Mapping[str, Tensor] | None] = (),
    curves: Sequence[Curves] = (),
) -> list[Outcome]:
    """Run the same study with several seeds, every site in every round.

    Args:
        studies: they differ in their seed alone.
        data: for each, site -> its data.
        progress: called after each round with (rounds done, rounds in all).
        starts: for each its initial model; without it as the seed draws it.
        curves: for each, what takes its learning curves.

    Raises:
        BadData: as ``run_federation``; or the study is not one for the batched engine.
    """
    if studies[0].method.name not in METHODS:
        raise BadData(
            f"the batched engine does not train method `{studies[0].method.name}`: only {', '.join(METHODS)}",
            hint=PLAIN,
        )
    if studies[0].networks:
        raise BadData("the batched engine does not train several architectures in one study", hint=PLAIN)
    rounds = studies[0].study.rounds
    begun, told = starts or [None] * len(studies), curves or [Curves() for _ in studies]
    with deterministic(studies[0].study.threads):
        runs = [
            Run(study, task, of_study, start, CPU, EVERYONE, to)
            for study, of_study, start, to in zip(studies, data, begun, told, strict=True)
        ]
        for run in runs:
            run.begin(None, {})
        together = Together()
        for round_number in range(1, rounds + 1):
            _round(runs, together, round_number)
            if progress is not None:
                progress(round_number, rounds)
        return [run.end() for run in runs]


def _round(runs: Sequence[Run], together: Together, round_number: int) -> None:
    """One round of every run."""
    asked = [(run, site) for run in runs for site in run.sessions]
    opened = [run.sessions[site].open(round_number, run.base(round_number, site)) for run, site in asked]
    losses = together.train(
        [(federated(run.sessions[site]), one) for (run, site), one in zip(asked, opened, strict=True)]
    )
    results: list[dict[str, RoundResult]] = [{} for _ in runs]
    for (run, site), one, of_site in zip(asked, opened, losses, strict=True):
        result = run.sessions[site].close(one)
        run.trained(round_number, site, result, of_site)
        results[runs.index(run)][site] = result
    for run, of_run in zip(runs, results, strict=True):
        run.close(round_number, of_run)
