"""When a site's model is judged: after the download, as by default, or right after the site's own training."""

from dataclasses import replace

from fl_algorithms.engine.algorithm import Algorithm, Candidate, Context
from wardround.records.schema import Strict


def judged_after_training(algorithm: Algorithm, settings: Strict) -> Algorithm:
    """``algorithm``, of which the model that training leaves competes to be the site's best, before the round's mean.

    What is reported of each download stays as it is.
    """

    def candidates(context: Context, trained: bool) -> tuple[Candidate, ...]:
        return (Candidate("trained", context.networks),) if trained else ()

    return replace(algorithm, candidates=candidates)
