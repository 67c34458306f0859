"""A study with every default filled in, or the first thing in it that does not fit together. No torch.

What is installed, and what it needs, stands in ``fl_algorithms.registry``.
"""

from collections.abc import Callable

from fl_algorithms import plugins
from fl_algorithms.methods.settings import HeadSettings
from fl_algorithms.registry import MODELS, nearest, row_of, uses
from fl_algorithms.rows import COLUMNS, IMAGES, MASKS, VAL_LOSS, MethodRow, ModelRow, TaskRow
from fl_algorithms.server.encoding import encoding_of
from fl_algorithms.server.rules.rows import aggregation_of
from fl_algorithms.server.secure_study import secure_aggregation_of
from fl_algorithms.settings.models import BODY_AND_HEAD, NORM_LAYERS, NetworkSettings
from fl_algorithms.study import Choice, ResolvedStudy
from wardround.errors import BadData
from wardround.records.aggregation import AggregationSection
from wardround.records.schema import Strict, check
from wardround.records.study import DEFAULT_NETWORK, LimitsSection, ReportedSection, StudyFile, TrainingSection

Network = Choice[ModelRow, NetworkSettings]
Form = Callable[[StudyFile, str], ResolvedStudy]
MULTIPLE_OF_STEPS, MULTIPLE_OF_EPOCHS = 10.0, 200.0  # docs/decisions/0011-one-sites-influence.md has what was measured


def resolve(
    study: StudyFile, *, lab: bool = False, source: str = "study.toml", form: Form = ResolvedStudy
) -> ResolvedStudy:
    """The study with every default filled in: what is hashed and approved. Resolving twice changes nothing.

    [public_data] is left out where the method has no use for it, so that one file can be run with methods of both
    kinds.

    Args:
        lab: also take the methods that run only in the lab.
        source: the file's name, for messages.
        form: what looks up what the study names, where that is not installed but brought, as a notebook does.

    Raises:
        BadData: a name is not installed, a key unknown, a value impossible, a reported metric that the task does not
            have, a plug-in that cannot be had or pinned, a network that does not take the task's data, a network, a
            training or a public data set that lacks what the method needs, images of several sizes where it needs one,
            an assignment of a network that the study does not have or to a site that is not in it, a rule of
            [aggregation] that the method or the number of updates does not go with, what does not go with
            [encoding] or [secure_aggregation], or what runs only in the lab.
    """
    pinned = plugins.pins(uses(study), study.plugins, lab=lab, source=source)
    method = form(study, source).method
    study = study.model_copy(update={"training": _with_start(study.training, method.row)})
    asked = form(study, source)
    task = asked.task
    if method.row.lab_only and not lab:
        raise BadData(
            f"{source}: algorithm `{method.name}` runs only in the lab",
            hint=f"`fl-lab run {source} --data DIR --set algorithm.name={method.name}`",
        )
    aggregation = aggregation_of(study, method.row, source)
    encoding = encoding_of(study, method.row, source)
    secure = secure_aggregation_of(study, method.row, source)
    networks = {}
    for label, own in {DEFAULT_NETWORK: study.model, **study.networks}.items():
        table = "model" if label == DEFAULT_NETWORK else f"networks.{label}"
        where = source if label == DEFAULT_NETWORK else f"{source}: [{table}]"
        network = asked.model
        if label != DEFAULT_NETWORK:
            row = row_of(MODELS, own, "model", where)
            network = Choice(row, check(row.settings, own.settings, source, table))
        _refuse_misfit(asked, network, where, table)
        _refuse_unfit(asked, network, where)
        networks[label] = network.named()
    _refuse_unknown_assignment(study, source)
    _refuse_without_public_data(asked, source)
    _refuse_different_sizes(asked, source)
    _refuse_unfit_to_evaluate(asked, source)
    return form(
        study.model_copy(
            update={
                "task": task.named(),
                "model": networks.pop(DEFAULT_NETWORK),
                "networks": dict(sorted(networks.items())),
                "assigned": dict(sorted(study.assigned.items())),
                "algorithm": method.named(),
                "reported": _with_ranges(study.reported, task, source),
                "limits": _filled(study, aggregation),
                "aggregation": aggregation,
                "encoding": encoding,
                "secure_aggregation": secure,
                "public_data": study.public_data if method.row.public_data else None,
                "plugins": plugins.with_method(pinned, method.row, method.settings),
            }
        ),
        source,
    )


def _with_start(training: TrainingSection, row: MethodRow) -> TrainingSection:
    """With how private tensors begin: as the method needs it, else each site's its own way."""
    return training.model_copy(
        update={"init_private": training.init_private or ("common" if row.same_start else "site")}
    )


def _with_ranges(reported: ReportedSection, task: Choice[TaskRow, Strict], source: str) -> ReportedSection:
    """With the range of each reported metric, as the study narrows it or as the task has it."""
    row, metrics = task.row, getattr(task.settings, "metrics", task.row.metrics)
    for name in reported.metrics:
        if name not in (VAL_LOSS, *metrics):
            raise BadData(
                f"{source}: `metrics` in [reported] names `{name}`, which task `{row.name}` does not have",
                hint=nearest(name, (VAL_LOSS, *metrics)),
            )
    for name in reported.ranges:
        if name not in reported.metrics:
            raise BadData(
                f"{source}: `ranges` in [reported] names `{name[:40]}`, which the study does not report",
                hint=nearest(name, reported.metrics),
            )
    ranges = {}
    for name in sorted(reported.metrics):
        whole = row.range_of(name)
        if whole is None:
            raise BadData(
                f"{source}: task `{row.name}` says no range for its metric `{name}`, so it cannot be reported",
                hint="whoever made that task adds it to `ranges` of its TaskRow; until then leave the metric out",
            )
        low, high = ranges[name] = reported.ranges.get(name, whole)
        if low < whole[0] or high > whole[1]:
            raise BadData(
                f"{source}: `ranges` in [reported] gives `{name}` {low:g} to {high:g}, the task has {whole[0]:g} to "
                f"{whole[1]:g}",
                hint="a study may narrow a range and not widen it",
            )
    return reported.model_copy(update={"ranges": ranges})


def _filled(study: StudyFile, aggregation: AggregationSection) -> LimitsSection:
    """The limits with the multiple of the median norm: where sites pass over their own data, a hospital that has a
    hundred times the rows takes a hundred times the steps, and its update may honestly be as much larger. None where
    the study has a rule that stands updates of any norm: what is left out would be missing among those it counts.
    """
    if study.limits.norm_multiple is not None:
        return study.limits
    multiple = MULTIPLE_OF_STEPS if study.training.local_steps is not None else MULTIPLE_OF_EPOCHS
    filled = multiple if aggregation.is_mean and study.secure_aggregation is None else 0.0
    return study.limits.model_copy(update={"norm_multiple": filled})


def _refuse_misfit(study: ResolvedStudy, network: Network, source: str, table: str) -> None:
    """What a network asks of the task's data.

    Args:
        source, table: for messages: where to look, and the network's own table.
    """
    task, gives = study.task, study.task.row.gives
    shape: tuple[int, ...] = getattr(task.settings, "input_shape", ())
    given = f"task `{task.name}` gives {COLUMNS if gives == COLUMNS else ' x '.join(map(str, shape))}"
    if network.row.takes != gives:
        wanted = f"takes {network.row.takes}, {given}"
        if COLUMNS not in (network.row.takes, gives):
            wanted = f"is for {JUDGES[network.row.takes]}, task `{task.name}` asks for {JUDGES[gives]}"
        fitting = sorted(row.name for row in MODELS.values() if row.takes == gives)
        raise BadData(
            f"{source}: model `{network.name}` {wanted}", hint=f"networks for task `{task.name}`: {', '.join(fitting)}"
        )
    size: tuple[int, ...] | None = getattr(network.settings, "size", None)
    if size is not None:
        file = source.removesuffix(f": [{table}]")
        if len(size) != len(shape) - 1:
            raise BadData(
                f"{file}: `size` in [{table}] has {len(size)} numbers, that in [task] has {len(shape) - 1}",
                hint="(height, width), or of volumes (depth, height, width)",
            )
        sized = {**study.file.task.settings, "size": list(size)}
        data = check(task.row.settings, sized, f"{file}: `size` in [{table}]", "task")
        shape = getattr(data, "input_shape", ())
        given = f"its `size` gives {' x '.join(map(str, shape))}"
    if shape and (needs := network.settings.misfit(shape)):
        raise BadData(f"{source}: model `{network.name}` {needs}, {given}")


def _refuse_different_sizes(study: ResolvedStudy, source: str) -> None:
    """A coordinator that distills asks every site's network about the same images."""
    sizes = {label: tuple(own.file.task.settings.get("size", ())) for label, own in study.each_network().items()}
    if not study.distills or len(set(sizes.values())) == 1:
        return
    found = ", ".join(f"`{label}` {' x '.join(map(str, size))}" for label, size in sizes.items())
    raise BadData(
        f"{source}: algorithm `{study.method.name}` needs networks that see images of one size, found {found}",
        hint="`size` alike in [model] and in each of [networks], or in none of them",
    )


def _refuse_unfit_to_evaluate(study: ResolvedStudy, source: str) -> None:
    """Where sites only evaluate there is one whole model to be judged, and nothing is trained beside it."""
    if not study.study.evaluators:
        return
    who = f"{source}: site `{study.study.evaluators[0]}` only evaluates"
    if not study.one_global_model or study.distills or study.networks:
        raise BadData(
            f"{who}, and algorithm `{study.method.name}` as it is set has no one model that every site could judge",
            hint="a method that shares the whole network, as fedavg, and no [networks]",
        )
    if study.secure_aggregation is not None:
        raise BadData(
            f"{who}, and with [secure_aggregation] its numbers would have to be hidden among those of sites that train",
            hint="leave out one of the two",
        )
    if study.checkpoints.alone or study.checkpoints.selection != "none":
        raise BadData(f"{who}, and [checkpoints] has each site train a model of its own or choose among them")
    if study.method.settings.fine_tuning is not None:
        raise BadData(f"{who}, and [algorithm.fine_tuning] trains at each site")


def _refuse_unknown_assignment(study: StudyFile, source: str) -> None:
    for site, label in study.assigned.items():
        if site not in study.study.sites:
            raise BadData(
                f"{source}: [assigned] names site `{site[:60]}`, which the study does not have",
                hint=nearest(site, study.study.sites),
            )
        if label != DEFAULT_NETWORK and label not in study.networks:
            raise BadData(
                f"{source}: [assigned] gives `{site}` the network `{label[:60]}`, which [networks] does not have",
                hint=nearest(label, (DEFAULT_NETWORK, *study.networks)),
            )


JUDGES = {IMAGES: "the class of an image", MASKS: "the class of each pixel"}


def _refuse_unfit(study: ResolvedStudy, network: Network, source: str) -> None:
    """What the method asks of a network and of the training."""
    row, offers = study.method.row, network.settings.offers
    if study.method.settings.head_patterns not in ((), HeadSettings().head):
        offers |= {BODY_AND_HEAD}  # the study itself says what the head is
    for need in sorted(row.needs - offers):
        raise BadData(
            f"{source}: algorithm `{row.name}` needs a network with {need}, model `{network.name}` as it is set "
            "has none",
            hint=need_hint(need, study.task.row.gives),
        )
    training = study.training
    plain = training.optimizer == "sgd" and not training.momentum and not training.weight_decay
    if training.sampling == "balanced" and not study.task.row.kinds:
        raise BadData(
            f'{source}: `sampling = "balanced"` in [training] draws classes equally often, and the rows of task '
            f"`{study.task.name}` are of none",
            hint='`sampling = "shuffled"`',
        )
    if study.method.settings.compares_classes and not (study.task.row.classes or study.task.row.gives == MASKS):
        raise BadData(
            f"{source}: algorithm `{row.name}` as it is set compares the classes of rows, task `{study.task.name}` has "
            "none",
            hint=study.method.settings.without_classes,
        )
    steady = training.schedule.is_constant and training.clip_norm is None and training.early_stopping is None
    if row.plain_sgd and not steady:
        raise BadData(
            f"{source}: algorithm `{row.name}` needs the same step everywhere, [training] has a `schedule`, a "
            "`clip_norm` or `early_stopping`",
            hint="leave them out of [training]",
        )
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


def _refuse_without_public_data(study: ResolvedStudy, source: str) -> None:
    """What a method that works on a public data set asks of it, and of the task: the same input at every party."""
    row, task = study.method.row, study.task
    if not row.public_data:
        return
    if study.public_data is None:
        raise BadData(
            f"{source}: algorithm `{row.name}` needs a public data set: [public_data] with `digest` and `rows`",
            hint=f"`fl-lab public-data {source} PATH` reads one and prints that table",
        )
    if task.row.gives == MASKS:
        raise BadData(
            f"{source}: algorithm `{row.name}` compares the classes of rows, task `{task.name}` judges pixels"
        )
    unscaled: tuple[str, ...] = getattr(task.settings, "unscaled", ())
    if unscaled:
        raise BadData(
            f"{source}: algorithm `{row.name}` needs every input on one scale at all parties, [task] gives none for "
            f"{', '.join(f'`{name}`' for name in unscaled[:SHOWN_NAMES])}"
            + (f" and {len(unscaled) - SHOWN_NAMES} more" if len(unscaled) > SHOWN_NAMES else ""),
            hint="`mean` and `std` of each, from the literature or from the public data set itself",
        )
    problem, hint = study.method.settings.public_data_misfit(study.public_data.rows)
    if problem:
        raise BadData(f"{source}: {problem}", hint=hint)


SHOWN_NAMES = 3
JUDGED = {COLUMNS: "columns", **JUDGES}
ASIDE = {  # the mlp as it is set by default has neither
    BODY_AND_HEAD: "model `mlp` has, with hidden layers: `hidden = [5]` in [model]",
    NORM_LAYERS: 'model `mlp` has, with hidden layers and `norm = "batch"` in [model]',
}


def need_hint(need: str, gives: str) -> str:
    """Which networks have what a method needs, of those that take what the task gives."""
    if gives == COLUMNS and need in ASIDE:
        return ASIDE[need]
    having = [row for row in MODELS.values() if need in row.settings().offers]
    fitting = [row for row in having if row.takes == gives]
    named = [f"`{row.name}`" for row in fitting or having]
    said = f"models {', '.join(named[:-1])} and {named[-1]} have" if len(named) > 1 else f"model {named[0]} has"
    if not fitting:
        return f"{said}, for {JUDGED[having[0].takes]}"
    return f'{said}: `name = "{fitting[0].name}"` in [model]'
