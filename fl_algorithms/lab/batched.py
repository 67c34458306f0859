"""Several seeds of one study at once, with their sites' networks trained as one batch of models.

``fl_algorithms.engine.together`` says how, what it refuses, and why its bits are not a hospital's. All but the training
steps is the code of a single run: downloads, judging, limits and means are the same.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from fl_algorithms.engine.device import CPU, deterministic
from fl_algorithms.engine.together import Together
from fl_algorithms.lab.curves import Curves
from fl_algorithms.lab.federation import Outcome, Run
from fl_algorithms.lab.participation import EVERYONE
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import SiteData, Task


def run_batched(
    studies: Sequence[ResolvedStudy],
    task: Task,
    data: Sequence[Mapping[str, SiteData]],
    progress: Callable[[int, int], None] | None = None,
    starts: Sequence[Mapping[str, Tensor]] | None = None,
) -> list[Outcome]:
    """Run the same study with several seeds, every site in every round.

    Args:
        studies: resolved; they differ in their seed alone.
        data: for each, site -> its data.
        progress: called after each round with (rounds done, rounds in all).
        starts: for each its initial model; without it as the seed draws it.

    Raises:
        BadData: as ``run_federation``; or the study is not one for the batched engine.
    """
    rounds = studies[0].study.rounds
    begun = starts or [None] * len(studies)
    with deterministic(studies[0].study.threads):
        runs = [
            Run(study, task, of_study, start, CPU, EVERYONE, Curves())
            for study, of_study, start in zip(studies, data, begun, strict=True)
        ]
        for run in runs:
            run.begin(None)
        together = Together()
        for round_number in range(1, rounds + 1):
            asked = [(run, site) for run in runs for site in run.sessions]
            opened = [run.sessions[site].open(round_number, run.base(round_number, site)) for run, site in asked]
            pairs = [(run.sessions[site], one) for (run, site), one in zip(asked, opened, strict=True)]
            losses = together.train(pairs)
            results = [session.close(one) for session, one in pairs]
            for (run, site), result, of_site in zip(asked, results, losses, strict=True):
                run.trained(round_number, site, result, of_site)
            for number, run in enumerate(runs):
                own = range(number * len(run.sessions), (number + 1) * len(run.sessions))
                run.close(round_number, {asked[place][1]: results[place] for place in own})
            if progress is not None:
                progress(round_number, rounds)
        return [run.end() for run in runs]
