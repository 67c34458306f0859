"""A hospital's data and weights, read as a study needs them."""

from dataclasses import replace
from pathlib import Path

from fl_algorithms.engine.weights import OwnWeights, own_weights
from fl_algorithms.tasks.base import SiteData
from fl_algorithms.tasks.public_data import read_public_data
from fl_algorithms.tasks.selection import to_evaluate
from site_agent.trainer.data.sources import DATA_INVALID, DataSource, public_data_of
from site_agent.trainer.rounds.installing import Installed
from wardround.errors import BadData
from wardround.records.trainer import Weights


def load(study: Installed, name: str, source: DataSource) -> SiteData:
    """The data called ``name``, and the public data set where the study needs it.

    Raises:
        BadData: it is not what the study needs; DECLINED_DATA_INVALID. Or the public data set is not the study's.
    """
    path = public_data_of(study.file, name, source) if study.needs_public_data else None
    try:
        data = study.task.load(
            source.source, site=study.site, seed=study.file.study.seed,
            validation_fraction=study.file.checkpoints.validation_fraction,
        )  # fmt: skip
        data = to_evaluate(data) if study.evaluates else data
        return data if path is None else replace(data, public_data=read_public_data(study.file, study.task, path))
    except BadData as error:
        error.code = DATA_INVALID
        raise


def load_weights(study: Installed, path: str) -> OwnWeights:
    """Raises BadData: they do not fit; DECLINED_DATA_INVALID."""
    try:
        return own_weights(study.own, study.site, Path(path))
    except BadData as error:
        raise BadData(error.message, hint=error.hint, code=DATA_INVALID) from None


def weights_of(study: Installed, source: DataSource) -> Weights | None:
    """What the file of weights gives to the study's private tensors; None where the data names none."""
    if source.weights is None:
        return None
    own = load_weights(study, source.weights)
    return Weights(digest=own.digest, used=len(own.tensors), drawn=list(own.drawn), unused=list(own.unused))
