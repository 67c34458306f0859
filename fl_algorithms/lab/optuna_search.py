"""Optuna's proposals for a search. Akiba et al., Optuna, KDD 2019, https://arxiv.org/abs/1907.10902.

Optuna keeps nothing here: each proposal comes from a study made anew of the trials before it, with a sampler seeded by
the search's seed and the trial's number. So a search that was stopped goes on with the proposals it would have had.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fl_algorithms.lab.space import Among, Range, Settings, Space
from fl_algorithms.streams import stream_seed
from wardround.errors import NeedsPerson

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


def require() -> None:
    """Raises NeedsPerson: Optuna is not installed."""
    try:
        import optuna
    except ImportError:
        raise NeedsPerson(
            "a search with Optuna needs optuna, which is not installed", hint="`pip install 'wardround[optuna]'`"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def proposed(space: Space, seed: int, number: int, before: Sequence[tuple[Settings, float | None]]) -> Settings:
    """The settings of trial ``number``, after those ``before``, each with its loss; None for one that has none."""
    import optuna

    sampler = optuna.samplers.TPESampler(seed=stream_seed(seed, "", number, "search.optuna") % 2**32)
    study = optuna.create_study(direction="minimize", sampler=sampler)
    distributions = {key: _distribution(among) for key, among in space.items()}
    for settings, loss in before:
        study.add_trial(
            optuna.trial.create_trial(
                params={key: _told(among, settings[key]) for key, among in space.items()},
                distributions=distributions,
                value=loss,
                state=optuna.trial.TrialState.FAIL if loss is None else optuna.trial.TrialState.COMPLETE,
            )
        )
    asked = study.ask(distributions).params
    return {
        key: among.rounded(asked[key]) if isinstance(among, Range) else among[asked[key]]
        for key, among in space.items()
    }


def _distribution(among: Among) -> "BaseDistribution":
    """Values of a list by their places, since Optuna takes no lists as values."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(among, Range):
        return CategoricalDistribution(range(len(among)))
    if among.whole:
        return IntDistribution(int(among.low), int(among.high), log=among.log)
    return FloatDistribution(float(among.low), float(among.high), log=among.log)


def _told(among: Among, value: object) -> object:
    return value if isinstance(among, Range) else among.index(value)
