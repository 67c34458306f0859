"""What is installed: a row for each task, network and method.

Rows name their implementations as "module:attribute" and import them only when they are used, so reading the registry
needs no torch: the coordinator and every `--help` can afford it. A study chooses rows by name; it can never name a
module. Tasks of other distributions come by the entry point ``wardround.tasks``, whose value is a ``TaskRow``.
"""

import difflib
import functools
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, TypeVar

from fl_algorithms.settings import methods
from fl_algorithms.settings.images import ImageSettings
from fl_algorithms.settings.models import (
    BODY_AND_HEAD,
    DEPTHS,
    TWO_EXTRACTORS,
    BallastSettings,
    FendaSettings,
    MlpSettings,
    NetworkSettings,
)
from fl_algorithms.settings.segmentation import SegmentationSettings
from fl_algorithms.settings.tabular import TabularSettings
from fl_algorithms.settings.vision import (
    DenseNetSettings,
    MonaiUnetSettings,
    SqueezeNetSettings,
    UnetSettings,
    UShapeSettings,
    VggSettings,
    VisionSettings,
)
from wardround.errors import BadData
from wardround.records.schema import Strict
from wardround.records.study import Named

VAL_LOSS = "val_loss"
LOSS_RANGE = (0.0, 1e6)  # of a loss that is never negative; a model that is further off is lost anyway
SHARE = (0.0, 1.0)
PUBLIC_DATA = "public_data"  # the folder of the public data set in the lab's data; no site can have this name
SITES, COORDINATOR = "sites", "coordinator"
COLUMNS, IMAGES, MASKS = "columns", "images", "masks"  # what a task gives to a network: numbers, one image, or one
# image of which every pixel is judged


@dataclass(frozen=True)
class TaskRow:
    """A learning problem that a hospital may have data for.

    ``ranges`` has, for each metric that a study may report, its lowest and highest value: what lies outside is
    reported as the bound, and a site or the coordinator refuses anything beyond. Without one ``val_loss`` has
    ``LOSS_RANGE``.
    """

    name: str
    settings: type[Strict]
    implementation: str  # called with the settings
    metrics: tuple[str, ...]  # the names that a study may report, beside val_loss
    gives: str = COLUMNS  # of IMAGES and MASKS, the settings have ``size`` and ``input_shape``
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def range_of(self, metric: str) -> tuple[float, float] | None:
        """The lowest and highest value of a metric; None where nobody said."""
        return self.ranges.get(metric, LOSS_RANGE if metric == VAL_LOSS else None)


@dataclass(frozen=True)
class ModelRow:
    """A network. ``implementation`` is called with its settings, its inputs and the number of outputs; inputs are the
    number of columns, or an image's shape (channels, *size).
    """

    name: str
    settings: type[NetworkSettings]
    implementation: str
    takes: str = COLUMNS


@dataclass(frozen=True)
class MethodRow:
    """A method.

    Attributes:
        upload, private: what a site sends and what never leaves it, for people.
        client: called with its settings, gives the ``Algorithm`` that sites run.
        server: called with its settings, the study's sites and the leaving tensors; gives the
            server aggregator. One with a public data set at the coordinator is called with the study in place of its
            sites.
        needs: of the network.
        plain_sgd: the site's optimizer must be SGD without momentum and weight decay.
        same_start: private tensors must start equal everywhere.
        heterogeneous: sites' networks may share different tensors; the server aggregator then averages each
            architecture by itself.
        public_data: who holds a copy of the study's public data set, SITES or COORDINATOR; "": the method needs none.
        exposure: whether the coordinator keeps something of each single site ("coordinator"), and also sends it to
            the other sites ("sites"); a site's policy must allow that.
        personalized: what that is, for people.
    """

    name: str
    title: str
    paper: str
    upload: str
    private: str
    client: str
    settings: type[methods.MethodSettings] = methods.MeanSettings
    server: str = "fl_algorithms.server.mean:mean"
    one_global_model: bool = False
    needs: frozenset[str] = frozenset()
    plain_sgd: bool = False
    same_start: bool = False
    validation: bool = False  # also used by the method itself, not only to choose checkpoints
    heterogeneous: bool = False
    exposure: str = ""
    personalized: str = ""
    public_data: str = ""
    lab_only: bool = False


WHOLE = "the whole network"
OWN = "the site's own network"
DIVIDED = frozenset({BODY_AND_HEAD})
MCMAHAN = "McMahan et al., AISTATS 2017, https://arxiv.org/abs/1602.05629"
REDDI = "Reddi et al., ICLR 2021, https://arxiv.org/abs/2003.00295"


def _method(name: str, title: str, paper: str, upload: str, private: str, **more: Any) -> MethodRow:
    client = more.pop("client", name)
    return MethodRow(name, title, paper, upload, private, f"fl_algorithms.client.{client}:{client}", **more)


METHODS: Mapping[str, MethodRow] = {
    row.name: row
    for row in (
        _method("fedavg", "FedAvg", MCMAHAN, WHOLE, "records, optimizer state", one_global_model=True),
        _method(
            "fedavgm", "FedAvgM", "Hsu et al., 2019, https://arxiv.org/abs/1909.06335", WHOLE,
            "records, optimizer state", client="fedavg", settings=methods.FedAvgMSettings, one_global_model=True,
        ),
        _method(
            "fedadam", "FedAdam", REDDI, WHOLE, "records, optimizer state", client="fedavg",
            settings=methods.FedAdamSettings, one_global_model=True,
        ),
        _method(
            "fedyogi", "FedYogi", REDDI, WHOLE, "records, optimizer state", client="fedavg",
            settings=methods.FedYogiSettings, one_global_model=True,
        ),
        _method(
            "fedadagrad", "FedAdagrad", REDDI, WHOLE, "records, optimizer state", client="fedavg",
            settings=methods.FedAdagradSettings, one_global_model=True,
        ),
        _method(
            "scaffold", "SCAFFOLD", "Karimireddy et al., ICML 2020, https://arxiv.org/abs/1910.06378",
            "the whole network, the change of the site's control variate", "records, the control variate",
            settings=methods.ScaffoldSettings, server="fl_algorithms.server.scaffold:scaffold", one_global_model=True,
            plain_sgd=True,
        ),
        _method(
            "fedfomo", "FedFomo", "Zhang et al., ICLR 2021, https://arxiv.org/abs/2012.08565",
            "the whole network, kept apart and sent to other sites; what others' networks are worth here",
            "records, validation losses, optimizer state", settings=methods.FedFomoSettings,
            server="fl_algorithms.server.fedfomo:fedfomo", validation=True, exposure="sites", personalized=OWN,
        ),
        _method(
            "fedsm", "FedSM", "Xu et al., CVPR 2022, https://arxiv.org/abs/2203.10144",
            "a global network, a personal one that is kept apart and sent to all sites, the selector and its moments",
            "records, optimizer state", settings=methods.FedSmSettings, server="fl_algorithms.server.fedsm:fedsm",
            exposure="sites", personalized="the site's personal network",
        ),
        _method(
            "fenda", "FENDA-FL", "Fatemi Tavakoli et al., 2023, https://arxiv.org/abs/2309.16825",
            "the shared extractor", "records, the private extractor, the head, optimizer state",
            needs=frozenset({TWO_EXTRACTORS}),
        ),
        _method(
            "fedsoup", "FedSoup", "Chen et al., MICCAI 2023, https://arxiv.org/abs/2307.10507",
            "the whole network, patched with the soup",
            "records, the soup and its count, validation scores, optimizer state", client="fedavg",
            settings=methods.FedSoupSettings, one_global_model=True, validation=True,
        ),
        _method(
            "fedprox", "FedProx", "Li et al., MLSys 2020, https://arxiv.org/abs/1812.06127", WHOLE,
            "records, optimizer state", settings=methods.FedProxSettings, one_global_model=True,
        ),
        _method(
            "fedbn", "FedBN", "Li et al., ICLR 2021, https://arxiv.org/abs/2102.07623",
            "the network without its norm layers (of one that has none, the whole network, as in FedAvg)",
            "records, norm layers with their statistics, optimizer state",
        ),
        _method(
            "lgfedavg", "LG-FedAvg", "Liang et al., 2020, https://arxiv.org/abs/2001.01523", "the head",
            "records, the body, optimizer state", client="lg_fedavg", settings=methods.HeadSettings, needs=DIVIDED,
        ),
        _method(
            "fedper", "FedPer", "Arivazhagan et al., 2019, https://arxiv.org/abs/1912.00818", "the body",
            "records, the head, optimizer state", settings=methods.HeadSettings, needs=DIVIDED,
        ),
        _method(
            "fedrep", "FedRep", "Collins et al., ICML 2021, https://arxiv.org/abs/2102.07078", "the body",
            "records, the head, optimizer state", settings=methods.FedRepSettings, needs=DIVIDED,
        ),
        _method(
            "fedbabu", "FedBABU", "Oh et al., ICLR 2022, https://arxiv.org/abs/2106.06042", "the body",
            "records, the head, the fine-tuned network, optimizer state", settings=methods.FedBabuSettings,
            one_global_model=True, needs=DIVIDED, same_start=True,
        ),
        _method(
            "apfl", "APFL", "Deng et al., 2020, https://arxiv.org/abs/2003.13461", "the global one of two networks",
            "records, the personal network, the weight of the mixture, optimizer state", settings=methods.ApflSettings,
        ),
        _method(
            "ditto", "Ditto", "Li et al., ICML 2021, https://arxiv.org/abs/2012.04221",
            "the global one of two networks", "records, the personal network, optimizer state",
            settings=methods.DittoSettings,
        ),
        _method(
            "moon", "MOON", "Li et al., CVPR 2021, https://arxiv.org/abs/2103.16257", WHOLE,
            "records, the network as trained in the round before, optimizer state", settings=methods.MoonSettings,
            one_global_model=True, needs=DIVIDED,
        ),
        _method(
            "mhpflgb", "MH-pFLGB", "Xie et al., MICCAI 2024, https://arxiv.org/abs/2407.00474",
            "the bypass: a small network beside the site's own",
            "records, the site's own network, which may be another at each site, the fusion layers, optimizer state",
            settings=methods.MhPflgbSettings, needs=DIVIDED,
        ),
        _method(
            "lcfed", "LC-Fed", "Wang, Jin, Wang, ECCV 2022, https://arxiv.org/abs/2207.04655",
            "the body with the channel selection; the head, kept apart and sent to all sites (not without calibration)",
            "records, the calibration, optimizer state", settings=methods.LcFedSettings,
            server="fl_algorithms.server.lcfed:lcfed", needs=frozenset({BODY_AND_HEAD, DEPTHS}), exposure="sites",
            personalized="the site's head",
        ),
        _method(
            "fedmd", "FedMD", "Li and Wang, 2019, https://arxiv.org/abs/1910.03581",
            "its scores (logits) of rows of the public data set", "records, the whole network, optimizer state",
            settings=methods.FedMdSettings, server="fl_algorithms.server.fedmd:fedmd", public_data=SITES,
        ),
        _method(
            "dsfl", "DS-FL", "Itahara et al., IEEE TMC 2023, https://arxiv.org/abs/2008.06180",
            "its class probabilities of rows of the public data set", "records, the whole network, optimizer state",
            settings=methods.DsFlSettings, server="fl_algorithms.server.dsfl:dsfl", public_data=SITES,
        ),
        _method(
            "ktpfl", "KT-pFL", "Zhang et al., NeurIPS 2021, https://arxiv.org/abs/2111.02625",
            "its softened class probabilities of rows of the public data set; the mixture made for it is kept apart",
            "records, the whole network, optimizer state", settings=methods.KtPflSettings,
            server="fl_algorithms.server.ktpfl:ktpfl", public_data=SITES, exposure="coordinator",
            personalized="the mixture of all sites' predictions made for the site, and how much of each is in it",
        ),
        _method(
            "feddf", "FedDF", "Lin et al., NeurIPS 2020, https://arxiv.org/abs/2006.07242", WHOLE,
            "records, optimizer state", client="fedavg", settings=methods.FedDfSettings,
            server="fl_algorithms.server.feddf:feddf", one_global_model=True, heterogeneous=True,
            public_data=COORDINATOR,
        ),
        _method(
            "pfeddf", "pFedDF", "FedDF with a student for each site: an interpretation of a baseline of KT-pFL, "
            "https://arxiv.org/abs/2111.02625", "the whole network, kept apart", "records, optimizer state",
            client="fedavg", settings=methods.FedDfSettings, server="fl_algorithms.server.feddf:pfeddf",
            heterogeneous=True, public_data=COORDINATOR, exposure="coordinator",
            personalized="the site's own network, after it has learned from the others'",
        ),
        _method(
            "silo", "Silo", "no federation: each site trains alone", "nothing", "everything", lab_only=True,
            settings=methods.MethodSettings,
        ),
    )
}  # fmt: skip

MODELS: Mapping[str, ModelRow] = {
    row.name: row
    for row in (
        ModelRow("mlp", MlpSettings, "fl_algorithms.models.mlp:mlp"),
        ModelRow("fenda", FendaSettings, "fl_algorithms.models.fenda:fenda"),
        ModelRow("ballast", BallastSettings, "fl_algorithms.models.ballast:ballast"),
        *(
            ModelRow(name, settings, f"fl_algorithms.models.vision:{name}", IMAGES)
            for name, settings in (
                ("resnet10", VisionSettings),
                ("resnet18", VisionSettings),
                ("resnext", VisionSettings),
                ("seresnet", VisionSettings),
                ("efficientnet_b0", VisionSettings),
                ("mobilenet_v2", VisionSettings),
                ("shufflenet_v2", VisionSettings),
                ("densenet", DenseNetSettings),
                ("squeezenet", SqueezeNetSettings),
                ("vgg", VggSettings),
            )
        ),
        *(
            ModelRow(name, settings, f"fl_algorithms.models.unet:{name}", MASKS)
            for name, settings in (
                ("unet", UShapeSettings),
                ("resunet", UShapeSettings),
                ("unetpp", UnetSettings),
                ("fcn", UnetSettings),
            )
        ),
        ModelRow("monai_unet", MonaiUnetSettings, "fl_algorithms.models.monai_unet:monai_unet", MASKS),
    )
}

TABULAR = TaskRow(
    name="tabular",
    settings=TabularSettings,
    implementation="fl_algorithms.tasks.tables.tabular:TabularTask",
    metrics=("accuracy", "balanced_accuracy", "auc", "macro_f1"),
    ranges={"accuracy": SHARE, "balanced_accuracy": SHARE, "auc": SHARE, "macro_f1": SHARE},
)

IMAGE_CLASSES = TaskRow(
    name="images",
    settings=ImageSettings,
    implementation="fl_algorithms.tasks.images.classification:ImageTask",
    metrics=TABULAR.metrics,
    gives=IMAGES,
    ranges=TABULAR.ranges,
)

SEGMENTATION = TaskRow(
    name="segmentation",
    settings=SegmentationSettings,
    implementation="fl_algorithms.tasks.images.segmentation:SegmentationTask",
    metrics=("dice",),
    gives=MASKS,
    ranges={"dice": SHARE},
)


@functools.cache  # a scan of the installed distributions takes milliseconds
def tasks() -> dict[str, TaskRow]:
    """The installed tasks by name: ours, and those that other distributions bring.

    Raises:
        BadData: an entry point does not lead to a ``TaskRow`` of its name.
    """
    found = {row.name: row for row in (TABULAR, IMAGE_CLASSES, SEGMENTATION)}
    for entry in entry_points(group="wardround.tasks"):
        if entry.name in found:
            continue
        row = entry.load()
        if not isinstance(row, TaskRow) or row.name != entry.name:
            raise BadData(
                f"the installed task `{entry.name}` ({entry.value}) is not a TaskRow of that name",
                hint="uninstall that distribution, or ask whoever made it",
            )
        found[entry.name] = row
    return found


def load(implementation: str) -> Any:
    """What "module:attribute" of a row leads to. Never called with a name that came from outside the catalog."""
    module, _, attribute = implementation.partition(":")
    return getattr(importlib.import_module(module), attribute)


Row = TypeVar("Row", TaskRow, ModelRow, MethodRow)


def row_of(rows: Mapping[str, Row], table: Named, kind: str, source: str) -> Row:
    """The row that ``table`` names. Raises BadData: nothing of that name is installed."""
    if table.name not in rows:
        raise BadData(f"{source}: there is no {kind} `{table.name[:60]}`", hint=nearest(table.name, rows))
    return rows[table.name]


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint after an unknown name."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean `{close[0]}`?" if close else f"there are: {', '.join(names)}"
