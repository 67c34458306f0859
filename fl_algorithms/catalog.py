"""What is installed: a row for each task, network and method, and a study checked against them.

Rows name their implementations as "module:attribute" and import them only when they are used, so reading the catalogue
needs no torch: the coordinator and every `--help` can afford it. A study chooses rows by name; it can never name a
module. Tasks of other distributions come by the entry point ``wardround.tasks``, whose value is a ``TaskRow``.
"""

import difflib
import functools
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, TypeVar

from fl_algorithms.settings.images import ImageSettings
from fl_algorithms.settings.methods import (
    ApflSettings,
    CommonSettings,
    DittoSettings,
    DsFlSettings,
    FedAdagradSettings,
    FedAdamSettings,
    FedAvgMSettings,
    FedBabuSettings,
    FedDfSettings,
    FedFomoSettings,
    FedMdSettings,
    FedProxSettings,
    FedRepSettings,
    FedSmSettings,
    FedSoupSettings,
    FedYogiSettings,
    HeadSettings,
    KtPflSettings,
    LcFedSettings,
    MeanSettings,
    MethodSettings,
    MhPflgbSettings,
    MoonSettings,
    ScaffoldSettings,
)
from fl_algorithms.settings.models import (
    BODY_AND_HEAD,
    DEPTHS,
    NORM_LAYERS,
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
    SeesImages,
    SqueezeNetSettings,
    UnetSettings,
    UShapeSettings,
    VggSettings,
    VisionSettings,
)
from wardround.errors import BadData
from wardround.schema import Strict, check
from wardround.study import DEFAULT_NETWORK, Named, StudyFile

VAL_LOSS = "val_loss"
COMMON = "common"  # the folder of the common set in the lab's data
SITES, COORDINATOR = "sites", "coordinator"
COLUMNS, IMAGES, MASKS = "columns", "images", "masks"  # what a task gives to a network: numbers, one image, or one
# image of which every pixel is judged


@dataclass(frozen=True)
class TaskRow:
    """A learning problem that a hospital may have data for."""

    name: str
    settings: type[Strict]
    implementation: str  # called with the settings
    metrics: tuple[str, ...]  # the names that a study may tell, beside val_loss
    gives: str = COLUMNS  # of IMAGES and MASKS, the settings have ``size`` and ``input_shape``


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
        leaves, stays: for people.
        client: called with its settings; the site half.
        server: called with its settings, the study's sites and the leaving tensors; the server half. One with a
            common set at the coordinator is called with the study in place of its sites.
        needs: of the network.
        plain_sgd: the site's optimizer must be SGD without momentum and weight decay.
        same_start: private tensors must start equal everywhere.
        common: who holds a copy of the study's [common] set, SITES or COORDINATOR; "": the method has no use for one.
        exposure: whether the coordinator keeps a site's own model apart ("coordinator"), and also sends it to the
            other sites ("sites"); a site's policy must allow that.
    """

    name: str
    title: str
    paper: str
    leaves: str
    stays: str
    client: str
    settings: type[MethodSettings] = MeanSettings
    server: str = "fl_algorithms.server.mean:mean"
    one_global_model: bool = False
    needs: frozenset[str] = frozenset()
    plain_sgd: bool = False
    same_start: bool = False
    validation: bool = False  # also used by the method itself, not only to choose checkpoints
    exposure: str = ""
    common: str = ""
    lab_only: bool = False


WHOLE = "the whole network"
DIVIDED = frozenset({BODY_AND_HEAD})
MCMAHAN = "McMahan et al., AISTATS 2017, https://arxiv.org/abs/1602.05629"
REDDI = "Reddi et al., ICLR 2021, https://arxiv.org/abs/2003.00295"


def _method(name: str, title: str, paper: str, leaves: str, stays: str, **more: Any) -> MethodRow:
    client = more.pop("client", name)
    return MethodRow(name, title, paper, leaves, stays, f"fl_algorithms.client.{client}:{client}", **more)


METHODS: Mapping[str, MethodRow] = {
    row.name: row
    for row in (
        _method("fedavg", "FedAvg", MCMAHAN, WHOLE, "records, optimizer state", one_global_model=True),
        _method(
            "fedavgm", "FedAvgM", "Hsu et al., 2019, https://arxiv.org/abs/1909.06335", WHOLE,
            "records, optimizer state", client="fedavg", settings=FedAvgMSettings, one_global_model=True,
        ),
        _method(
            "fedadam", "FedAdam", REDDI, WHOLE, "records, optimizer state", client="fedavg", settings=FedAdamSettings,
            one_global_model=True,
        ),
        _method(
            "fedyogi", "FedYogi", REDDI, WHOLE, "records, optimizer state", client="fedavg", settings=FedYogiSettings,
            one_global_model=True,
        ),
        _method(
            "fedadagrad", "FedAdagrad", REDDI, WHOLE, "records, optimizer state", client="fedavg",
            settings=FedAdagradSettings, one_global_model=True,
        ),
        _method(
            "scaffold", "SCAFFOLD", "Karimireddy et al., ICML 2020, https://arxiv.org/abs/1910.06378",
            "the whole network, the change of the site's control variate", "records, the control variate",
            settings=ScaffoldSettings, server="fl_algorithms.server.scaffold:scaffold", one_global_model=True,
            plain_sgd=True,
        ),
        _method(
            "fedfomo", "FedFomo", "Zhang et al., ICLR 2021, https://arxiv.org/abs/2012.08565",
            "the whole network, kept apart and sent to other sites; what others' networks are worth here",
            "records, validation losses, optimizer state", settings=FedFomoSettings,
            server="fl_algorithms.server.fedfomo:fedfomo", validation=True, exposure="sites",
        ),
        _method(
            "fedsm", "FedSM", "Xu et al., CVPR 2022, https://arxiv.org/abs/2203.10144",
            "a global network, a personal one that is kept apart and sent to all sites, the selector and its moments",
            "records, optimizer state", settings=FedSmSettings, server="fl_algorithms.server.fedsm:fedsm",
            exposure="sites",
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
            settings=FedSoupSettings, one_global_model=True, validation=True,
        ),
        _method(
            "fedprox", "FedProx", "Li et al., MLSys 2020, https://arxiv.org/abs/1812.06127", WHOLE,
            "records, optimizer state", settings=FedProxSettings, one_global_model=True,
        ),
        _method(
            "fedbn", "FedBN", "Li et al., ICLR 2021, https://arxiv.org/abs/2102.07623",
            "the network without its norm layers (of one that has none, the whole network, as in FedAvg)",
            "records, norm layers with their statistics, optimizer state",
        ),
        _method(
            "lgfedavg", "LG-FedAvg", "Liang et al., 2020, https://arxiv.org/abs/2001.01523", "the head",
            "records, the body, optimizer state", client="lg_fedavg", settings=HeadSettings, needs=DIVIDED,
        ),
        _method(
            "fedper", "FedPer", "Arivazhagan et al., 2019, https://arxiv.org/abs/1912.00818", "the body",
            "records, the head, optimizer state", settings=HeadSettings, needs=DIVIDED,
        ),
        _method(
            "fedrep", "FedRep", "Collins et al., ICML 2021, https://arxiv.org/abs/2102.07078", "the body",
            "records, the head, optimizer state", settings=FedRepSettings, needs=DIVIDED,
        ),
        _method(
            "fedbabu", "FedBABU", "Oh et al., ICLR 2022, https://arxiv.org/abs/2106.06042", "the body",
            "records, the head, the fine-tuned network, optimizer state", settings=FedBabuSettings,
            one_global_model=True, needs=DIVIDED, same_start=True,
        ),
        _method(
            "apfl", "APFL", "Deng et al., 2020, https://arxiv.org/abs/2003.13461", "the global one of two networks",
            "records, the personal network, the weight of the mixture, optimizer state", settings=ApflSettings,
        ),
        _method(
            "ditto", "Ditto", "Li et al., ICML 2021, https://arxiv.org/abs/2012.04221",
            "the global one of two networks", "records, the personal network, optimizer state", settings=DittoSettings,
        ),
        _method(
            "moon", "MOON", "Li et al., CVPR 2021, https://arxiv.org/abs/2103.16257", WHOLE,
            "records, the network as trained in the round before, optimizer state", settings=MoonSettings,
            one_global_model=True, needs=DIVIDED,
        ),
        _method(
            "mhpflgb", "MH-pFLGB", "Xie et al., MICCAI 2024, https://arxiv.org/abs/2407.00474",
            "the bypass: a small network beside the site's own",
            "records, the site's own network, which may be another at each site, the fusion layers, optimizer state",
            settings=MhPflgbSettings, needs=DIVIDED,
        ),
        _method(
            "lcfed", "LC-Fed", "Wang, Jin, Wang, ECCV 2022, https://arxiv.org/abs/2207.04655",
            "the body with the channel selection; the head, kept apart and sent to all sites (not without calibration)",
            "records, the calibration, optimizer state", settings=LcFedSettings,
            server="fl_algorithms.server.lcfed:lcfed", needs=frozenset({BODY_AND_HEAD, DEPTHS}), exposure="sites",
        ),
        _method(
            "fedmd", "FedMD", "Li and Wang, 2019, https://arxiv.org/abs/1910.03581",
            "its scores (logits) of rows of the common set", "records, the whole network, optimizer state",
            settings=FedMdSettings, server="fl_algorithms.server.fedmd:fedmd", common=SITES,
        ),
        _method(
            "dsfl", "DS-FL", "Itahara et al., IEEE TMC 2023, https://arxiv.org/abs/2008.06180",
            "its class probabilities of rows of the common set", "records, the whole network, optimizer state",
            settings=DsFlSettings, server="fl_algorithms.server.dsfl:dsfl", common=SITES,
        ),
        _method(
            "ktpfl", "KT-pFL", "Zhang et al., NeurIPS 2021, https://arxiv.org/abs/2111.02625",
            "its softened class probabilities of rows of the common set, kept apart",
            "records, the whole network, optimizer state", settings=KtPflSettings,
            server="fl_algorithms.server.ktpfl:ktpfl", common=SITES, exposure="coordinator",
        ),
        _method(
            "feddf", "FedDF", "Lin et al., NeurIPS 2020, https://arxiv.org/abs/2006.07242", WHOLE,
            "records, optimizer state", client="fedavg", settings=FedDfSettings,
            server="fl_algorithms.server.feddf:feddf", one_global_model=True, common=COORDINATOR,
        ),
        _method(
            "pfeddf", "pFedDF", "FedDF with a student for each site: an interpretation of a baseline of KT-pFL, "
            "https://arxiv.org/abs/2111.02625", "the whole network, kept apart", "records, optimizer state",
            client="fedavg", settings=FedDfSettings, server="fl_algorithms.server.feddf:pfeddf", common=COORDINATOR,
            exposure="coordinator",
        ),
        _method(
            "silo", "Silo", "no federation: each site trains alone", "nothing", "everything", lab_only=True,
            settings=MethodSettings,
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
    implementation="fl_algorithms.tasks.tabular:TabularTask",
    metrics=("accuracy", "balanced_accuracy", "auc", "macro_f1"),
)

IMAGE_CLASSES = TaskRow(
    name="images",
    settings=ImageSettings,
    implementation="fl_algorithms.tasks.images:ImageTask",
    metrics=TABULAR.metrics,
    gives=IMAGES,
)

SEGMENTATION = TaskRow(
    name="segmentation",
    settings=SegmentationSettings,
    implementation="fl_algorithms.tasks.segmentation:SegmentationTask",
    metrics=("dice",),
    gives=MASKS,
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


def task(study: StudyFile) -> TaskRow:
    """The row of the study's task. Raises BadData: not installed."""
    return _row(tasks(), study.task, "task", "study.toml")


def model(study: StudyFile) -> ModelRow:
    """The row of the study's network. Raises BadData: not installed."""
    return _row(MODELS, study.model, "model", "study.toml")


def method(study: StudyFile) -> MethodRow:
    """The row of the study's method. Raises BadData: there is none of that name."""
    return _row(METHODS, study.algorithm, "algorithm", "study.toml")


def exposure(study: StudyFile) -> str:
    """Who has a site's own model, as in ``MethodRow``; "" where the method as it is set shows none."""
    _, _, settings = settings_of(study)
    return method(study).exposure if settings.exposes else ""


def network_label(study: StudyFile, site: str, chosen: str = "") -> str:
    """What the network that ``site`` trains is called: as the site chose, else as [assigned] says, else "default".

    Raises:
        BadData: the study allows no network of the chosen label.
    """
    label = chosen or study.assigned.get(site, DEFAULT_NETWORK)
    if label != DEFAULT_NETWORK and label not in study.networks:
        raise BadData(
            f"study `{study.study.name}` has no network `{label[:60]}`",
            hint=f"it has: {', '.join((DEFAULT_NETWORK, *sorted(study.networks)))}",
        )
    return label


def network_of(study: StudyFile, site: str, chosen: str = "") -> StudyFile:
    """The study as ``site`` trains it: with one network, which is its own, and images of that network's size, where it
    has one. ``site = ""``: with the default network.

    Args:
        chosen: the label that the site itself chose, if any.

    Raises:
        BadData: as ``network_label``.
    """
    if study.networks or study.assigned or chosen:
        label = network_label(study, site, chosen)
        own = study.model if label == DEFAULT_NETWORK else study.networks[label]
        study = study.model_copy(update={"model": own, "networks": {}, "assigned": {}})
    size = study.model.settings.get("size")
    if size is None:
        return study
    sized = {"name": study.task.name, **study.task.settings, "size": size}
    return study.model_copy(update={"task": Named.model_validate(sized)})


def each_network(study: StudyFile) -> dict[str, StudyFile]:
    """Label -> the study as a site with that network trains it; "default" first."""
    return {label: network_of(study, "", label) for label in (DEFAULT_NETWORK, *study.networks)}


def settings_of(study: StudyFile, source: str = "study.toml") -> tuple[Strict, Strict, MethodSettings]:
    """The study's task, model and method settings as objects, defaults filled.

    Raises:
        BadData: a name is not installed, a key unknown or a value impossible.
    """
    task_row = _row(tasks(), study.task, "task", source)
    model_row = _row(MODELS, study.model, "model", source)
    method_row = _row(METHODS, study.algorithm, "algorithm", source)
    return (
        check(task_row.settings, study.task.settings, source, "task"),
        check(model_row.settings, study.model.settings, source, "model"),
        check(method_row.settings, study.algorithm.settings, source, "algorithm").filled(study.study.rounds),
    )


def resolve(study: StudyFile, *, lab: bool = False, source: str = "study.toml") -> StudyFile:
    """The study with every default filled in: what is hashed and approved. Resolving twice changes nothing.

    [common] is left out where the method has no use for it, so that one file can be run with methods of both kinds.

    Args:
        lab: also take the methods that run only in the lab.
        source: the file's name, for messages.

    Raises:
        BadData: a name is not installed, a key unknown, a value impossible, a told metric that the task does not have,
            a network that does not take the task's data, a network, a training or a common set that lacks what the
            method needs, images of several sizes where it needs one, an assignment of a network that the study does not
            have or to a site that is not in it, or a method that runs only in the lab.
    """
    task_settings, _, method_settings = settings_of(study, source)
    task_row, method_row = task(study), method(study)
    if method_row.lab_only and not lab:
        raise BadData(
            f"{source}: algorithm `{method_row.name}` runs only in the lab",
            hint=f"`fl-lab run {source} --data DIR --set algorithm.name={method_row.name}`",
        )
    networks = {}
    for label, one in each_network(study).items():
        table = "model" if label == DEFAULT_NETWORK else f"networks.{label}"
        where = source if label == DEFAULT_NETWORK else f"{source}: [{table}]"
        row = _row(MODELS, one.model, "model", where)
        found = check(row.settings, one.model.settings, source, table)
        _refuse_misfit(one, task_settings, found, where, table)
        _refuse_unfit(one, method_row, found, method_settings, where)
        networks[label] = _named(row.name, found)
    _refuse_odd_assignment(study, source)
    _refuse_without_common_set(study, method_row, task_settings, method_settings, source)
    _refuse_unlike_sizes(study, method_row, source)
    for name in study.told.metrics:
        if name not in (VAL_LOSS, *task_row.metrics):
            raise BadData(
                f"{source}: `metrics` in [told] names `{name}`, which task `{task_row.name}` does not have",
                hint=_nearest(name, (VAL_LOSS, *task_row.metrics)),
            )
    return study.model_copy(
        update={
            "task": _named(task_row.name, task_settings),
            "model": networks.pop(DEFAULT_NETWORK),
            "networks": dict(sorted(networks.items())),
            "assigned": dict(sorted(study.assigned.items())),
            "algorithm": _named(method_row.name, method_settings),
            "common": study.common if method_row.common else None,
        }
    )


def _refuse_misfit(study: StudyFile, data: Strict, network: Strict, source: str, table: str) -> None:
    """What the network asks of the task's data.

    Args:
        study: as a site with this network trains it; ``data`` are the settings of [task].
        source, table: for messages: where to look, and the network's own table.
    """
    task_row, model_row = task(study), model(study)
    shape: tuple[int, ...] = getattr(data, "input_shape", ())
    given = f"task `{task_row.name}` gives {COLUMNS if task_row.gives == COLUMNS else ' x '.join(map(str, shape))}"
    if model_row.takes != task_row.gives:
        wanted = f"takes {model_row.takes}, {given}"
        if COLUMNS not in (model_row.takes, task_row.gives):
            wanted = f"is for {JUDGES[model_row.takes]}, task `{task_row.name}` asks for {JUDGES[task_row.gives]}"
        fitting = sorted(row.name for row in MODELS.values() if row.takes == task_row.gives)
        raise BadData(
            f"{source}: model `{model_row.name}` {wanted}",
            hint=f"networks for task `{task_row.name}`: {', '.join(fitting)}",
        )
    if isinstance(network, SeesImages) and network.size is not None:
        file = source.removesuffix(f": [{table}]")
        if len(network.size) != len(shape) - 1:
            raise BadData(
                f"{file}: `size` in [{table}] has {len(network.size)} numbers, that in [task] has {len(shape) - 1}",
                hint="(height, width), or of volumes (depth, height, width)",
            )
        data = check(task_row.settings, study.task.settings, f"{file}: `size` in [{table}]", "task")
        shape = getattr(data, "input_shape", ())
        given = f"its `size` gives {' x '.join(map(str, shape))}"
    if isinstance(network, NetworkSettings) and shape and (needs := network.misfit(shape)):
        raise BadData(f"{source}: model `{model_row.name}` {needs}, {given}")


def _refuse_unlike_sizes(study: StudyFile, row: MethodRow, source: str) -> None:
    """A coordinator that distils asks every site's network about the same images."""
    sizes = {label: tuple(one.task.settings.get("size", ())) for label, one in each_network(study).items()}
    if row.common != COORDINATOR or len(set(sizes.values())) == 1:
        return
    found = ", ".join(f"`{label}` {' x '.join(map(str, size))}" for label, size in sizes.items())
    raise BadData(
        f"{source}: algorithm `{row.name}` needs networks that see images of one size, found {found}",
        hint="`size` alike in [model] and in each of [networks], or in none of them",
    )


def _refuse_odd_assignment(study: StudyFile, source: str) -> None:
    for site, label in study.assigned.items():
        if site not in study.study.sites:
            raise BadData(
                f"{source}: [assigned] names site `{site[:60]}`, which the study does not have",
                hint=_nearest(site, study.study.sites),
            )
        if label != DEFAULT_NETWORK and label not in study.networks:
            raise BadData(
                f"{source}: [assigned] gives `{site}` the network `{label[:60]}`, which [networks] does not have",
                hint=_nearest(label, (DEFAULT_NETWORK, *study.networks)),
            )


JUDGES = {IMAGES: "the class of an image", MASKS: "the class of each pixel"}


def _refuse_unfit(study: StudyFile, row: MethodRow, network: Strict, method: MethodSettings, source: str) -> None:
    """What the method asks of the network and of the training."""
    offers = network.offers if isinstance(network, NetworkSettings) else frozenset()
    if isinstance(method, HeadSettings) and method.head != HeadSettings().head:
        offers |= {BODY_AND_HEAD}  # the study itself says what the head is
    for need in sorted(row.needs - offers):
        raise BadData(
            f"{source}: algorithm `{row.name}` needs a network with {need}, model `{study.model.name}` as it is set "
            "has none",
            hint=NEED_HINTS[need],
        )
    training = study.training
    plain = training.optimizer == "sgd" and not training.momentum and not training.weight_decay
    if row.plain_sgd and not plain:
        found = f"{training.optimizer}, momentum {training.momentum:g}, weight decay {training.weight_decay:g}"
        raise BadData(
            f"{source}: algorithm `{row.name}` needs plain SGD at the sites, [training] has {found}",
            hint='in [training]: `optimizer = "sgd"`, `momentum = 0.0`, `weight_decay = 0.0`',
        )
    if row.same_start and training.init_private != "common":
        raise BadData(
            f"{source}: algorithm `{row.name}` needs the same initial weights at every site, [training] says "
            f'`init_private = "{training.init_private}"`',
            hint='in [training]: `init_private = "common"`',
        )


def _refuse_without_common_set(
    study: StudyFile, row: MethodRow, data: Strict, method: MethodSettings, source: str
) -> None:
    """What a method that works on a common set asks of it, and of the task: the same input at every party."""
    if not row.common:
        return
    if study.common is None:
        raise BadData(
            f"{source}: algorithm `{row.name}` needs a common set: [common] with `digest` and `rows`",
            hint=f"`fl-lab common {source} PATH` reads one and prints that table",
        )
    if COMMON in study.study.sites:
        raise BadData(f"{source}: a site is called `{COMMON}`, as the common set is in the lab", hint="rename the site")
    if task(study).gives == MASKS:
        raise BadData(
            f"{source}: algorithm `{row.name}` compares the classes of rows, task `{task(study).name}` judges pixels"
        )
    unscaled: tuple[str, ...] = getattr(data, "unscaled", ())
    if unscaled:
        raise BadData(
            f"{source}: algorithm `{row.name}` needs every input on one scale at all parties, [task] gives none for "
            f"{', '.join(f'`{name}`' for name in unscaled[:SHOWN_NAMES])}"
            + (f" and {len(unscaled) - SHOWN_NAMES} more" if len(unscaled) > SHOWN_NAMES else ""),
            hint="`mean` and `std` of each, from the literature or from the common set itself",
        )
    if isinstance(method, CommonSettings) and (method.subset or 0) > study.common.rows:
        raise BadData(
            f"{source}: `subset` in [algorithm] is {method.subset}, the common set has {study.common.rows} rows"
        )


SHOWN_NAMES = 3
NEED_HINTS = {
    TWO_EXTRACTORS: 'model `fenda` has: `name = "fenda"` in [model]',
    BODY_AND_HEAD: "model `mlp` has, with hidden layers: `hidden = [5]` in [model]",
    DEPTHS: 'models `unet` and `resunet` have: `name = "unet"` in [model]',
    NORM_LAYERS: 'model `mlp` has, with hidden layers and `norm = "batch"` in [model]',
}


def load(implementation: str) -> Any:
    """What "module:attribute" of a row leads to. Never called with a name that came from outside the catalogue."""
    module, _, attribute = implementation.partition(":")
    return getattr(importlib.import_module(module), attribute)


Row = TypeVar("Row", TaskRow, ModelRow, MethodRow)


def _row(rows: Mapping[str, Row], table: Named, kind: str, source: str) -> Row:
    if table.name not in rows:
        raise BadData(f"{source}: there is no {kind} `{table.name[:60]}`", hint=_nearest(table.name, rows))
    return rows[table.name]


def _named(name: str, settings: Strict) -> Named:
    return Named.model_validate({"name": name, **settings.model_dump(mode="json", exclude_none=True)})


def _nearest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean `{close[0]}`?" if close else f"there are: {', '.join(names)}"
