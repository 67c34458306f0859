"""Small studies and made-up patients for the tests of the methods."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_algorithms import registry, rows
from fl_algorithms.engine.algorithm import Algorithm, Context, Downlink, Share, matching, study_network
from fl_algorithms.engine.partition import initial_model, task_of
from fl_algorithms.engine.session import RoundResult, SiteSession
from fl_algorithms.engine.training import Phase
from fl_algorithms.methods.lgfedavg.client import lg_fedavg
from fl_algorithms.methods.settings import HeadSettings, MethodSettings
from fl_algorithms.resolving import resolve
from fl_algorithms.streams import stream_seed
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import PublicData, SiteData, Source, Split
from tests.fl_algorithms.image_toys import MASKS, SIDE
from wardround.records.study import StudyFile
from wardround.tensors.manifests import MODEL

FEATURES = 3
PUBLIC_ROWS = 10
FENDA: dict[str, Any] = {"name": "fenda", "shared_hidden": [4], "private_hidden": [3]}
MLP: dict[str, Any] = {"name": "mlp", "hidden": [4]}
U: dict[str, Any] = {"name": "unet", "widths": [2, 4], "norm": "none"}
MODEL_OF: dict[str, dict[str, Any]] = {"fenda": FENDA, "lcfed": U}
TABLE: dict[str, Any] = {"name": "tabular", "label": "ill", "classes": ["no", "yes"], "features": ["u", "v", "w"],
    "headline": "accuracy",
}  # fmt: skip
TASK_OF = {"lcfed": MASKS}  # of a method that is not for tables
TWO = {"steps": 2}
NONE = {"steps": 0}
SETTINGS_OF: dict[str, dict[str, Any]] = {  # of methods whose own amounts are long
    "fedmd": {"transfer": NONE, "initial": NONE},
    "ktpfl": {"initial": NONE},
    "lcfed": {"train_head": TWO, "train_body": TWO, "train_calibration": TWO},
    "mhpflgb": {"train_local": TWO, "train_global": TWO},
}


def study_tables(algorithm: str = "fedavg", model: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The tables of a small study file.

    ``changes``: keys of [study] and [training], or ``told``, ``checkpoints`` and ``algorithm_settings`` as tables.
    """
    study = {"name": "toy", "sites": ["ash", "birch"], "rounds": 3, "seed": 5}
    training: dict[str, Any] = {"learning_rate": 0.05, "batch_size": 4, "local_steps": 6}
    settings = SETTINGS_OF.get(algorithm, {}) | changes.pop("algorithm_settings", {})
    tables: dict[str, Any] = {"reported": changes.pop("reported", {}), "checkpoints": changes.pop("checkpoints", {})}
    for key, value in changes.items():
        (study if key in study or key == "quorum" else training)[key] = value
    if "local_epochs" in training:
        training.pop("local_steps")
    features: list[Any] = ["u", "v", "w"]
    if algorithm in registry.METHODS and registry.METHODS[algorithm].public_data:
        features = [{"name": name, "mean": 0.0, "std": 1.0} for name in features]
        tables["public_data"] = {"digest": "c0" * 32, "rows": PUBLIC_ROWS}
        if registry.METHODS[algorithm].public_data == rows.COORDINATOR:
            settings = {"distil_steps": 3, "distil_batch_size": 4, **settings}
    return {
        "study": study,
        "task": TASK_OF.get(algorithm, {**TABLE, "features": features}),
        "model": model or MODEL_OF.get(algorithm, MLP),
        "algorithm": {"name": algorithm, **settings},
        "training": training,
        **tables,
    }


def table_source(table: Path, test: Path | None, label: str) -> Source:
    return Source({"table": table} if test is None else {"table": table, "test": test}, label)


def toy_study(algorithm: str = "fedavg", model: dict[str, Any] | None = None, **changes: Any) -> ResolvedStudy:
    """A resolved small study."""
    return resolve(StudyFile.model_validate(study_tables(algorithm, model, **changes)), lab=True)


def toy_data(site: str, rows: int = 22, test: bool = True, seed: int = 1) -> SiteData:
    """Patients of which each site has its own kind: labels follow a plane that differs a little from site to site."""
    generator = torch.Generator().manual_seed(stream_seed(seed, site, 0, "toy"))
    plane = torch.tensor([1.0, -1.0, 0.5]) + 0.3 * torch.randn(FEATURES, generator=generator)

    def split(n: int) -> Split:
        x = torch.randn(n, FEATURES, generator=generator)
        y = (x @ plane + 0.5 * torch.randn(n, generator=generator) > 0).long()
        return Split(x, y)

    return SiteData(split(rows), split(9), split(12) if test else None, digest="0" * 64, public_data=toy_public_data())


def toy_public_data(rows: int = PUBLIC_ROWS) -> PublicData:
    """Rows of nobody, the same at every site."""
    x = torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(3))
    return PublicData(x, (x.sum(dim=1) > 0).long())


def toy_masks(site: str, rows: int = 22, seed: int = 1) -> SiteData:
    """Gray images with a block to be found, of which each site's are lighter or darker."""
    generator = torch.Generator().manual_seed(stream_seed(seed, site, 0, "toy"))
    light = torch.rand(1, generator=generator)

    def split(n: int) -> Split:
        y = torch.zeros(n, SIDE, SIDE, dtype=torch.uint8)
        for mask in y:
            row, column = torch.randint(0, SIDE - 3, (2,), generator=generator).tolist()
            mask[row : row + 3, column : column + 3] = 1
        x = y + light + 0.5 * torch.randn(n, SIDE, SIDE, generator=generator)
        return Split(x.unsqueeze(1), y)

    return SiteData(split(rows), split(9), split(12), digest="0" * 64)


def data_of(study: ResolvedStudy, site: str, rows: int = 22) -> SiteData:
    """Patients as the study's task has them: of a table, or images with masks."""
    return (toy_masks if study.task.name == MASKS["name"] else toy_data)(site, rows)


def start_of(study: ResolvedStudy) -> Downlink:
    """The first round's download."""
    return bundles(initial_model(study))


def bundles(tensors: dict[str, Tensor]) -> Downlink:
    """Tensors by their names in a file, as a download."""
    base: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        bundle, _, name = key.rpartition("/")
        base.setdefault(bundle or MODEL, {})[name] = tensor
    return base


def session_of(study: ResolvedStudy, site: str = "ash", data: SiteData | None = None, **options: Any) -> SiteSession:
    return SiteSession(study, site, task_of(study), data or data_of(study, site), **options)


def plus(base: Downlink, result: RoundResult) -> Downlink:
    """The next model of a federation of one site."""
    return {
        bundle: {name: tensor + result.uplink[bundle][name] for name, tensor in tensors.items()}
        for bundle, tensors in base.items()
    }


def two_networks(settings: MethodSettings) -> Algorithm:
    """A method with two shared networks and a private one, each with its own phase: what the hooks must carry."""

    def phases(context: Context) -> tuple[Phase, ...]:
        return (
            Phase(trainable=("model/*",)),
            Phase("bypass", ("bypass/*",), steps=2, optimizer="bypass"),
            Phase("personal", ("personal/*",), epochs=1, optimizer="personal"),
        )

    def infer(networks: Any, x: Tensor) -> Tensor:
        total: Tensor = sum(network(x) for network in networks.values())
        return total

    slots = {"model": study_network, "bypass": study_network, "personal": study_network}
    return Algorithm(slots=slots, shares=(Share(), Share("bypass", matching("head.*"))), phases=phases, infer=infer)


TWO_NETWORKS = rows.MethodRow(
    name="two-networks",
    title="Two networks",
    paper="none",
    upload="two networks",
    private="one",
    client="tests.fl_algorithms.toys:two_networks",
)


def fit(algorithm: str, **changes: Any) -> ResolvedStudy:
    """A small study of any installed method, with the training that the method asks for."""
    row = registry.METHODS[algorithm]
    if row.plain_sgd:
        changes |= {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0}
    if row.same_start:
        changes |= {"init_private": "common"}
    return toy_study(algorithm, **changes)


def lg_that_shares_nothing(settings: MethodSettings) -> Algorithm:
    """LG-FedAvg with an empty shared part."""
    return replace(lg_fedavg(HeadSettings()), shares=(Share(names=matching()),))


def alone_with_dittos_stream(settings: MethodSettings) -> Algorithm:
    """Training alone with the batches that Ditto's private network sees."""
    return Algorithm(shares=(), phases=lambda context: (Phase("personal"),))
