"""What a study chooses of what is installed: its rows, its settings as objects, and each site's network. No torch."""

from fl_algorithms.methods.settings import MethodSettings
from fl_algorithms.registry import METHODS, MODELS, row_of, tasks
from fl_algorithms.rows import MethodRow, ModelRow, TaskRow
from wardround.errors import BadData
from wardround.records.schema import Strict, check
from wardround.records.study import DEFAULT_NETWORK, Named, StudyFile


def task(study: StudyFile) -> TaskRow:
    """The row of the study's task. Raises BadData: not installed."""
    return row_of(tasks(), study.task, "task", "study.toml")


def model(study: StudyFile) -> ModelRow:
    """The row of the study's network. Raises BadData: not installed."""
    return row_of(MODELS, study.model, "model", "study.toml")


def method(study: StudyFile) -> MethodRow:
    """The row of the study's method. Raises BadData: there is none of that name."""
    return row_of(METHODS, study.algorithm, "algorithm", "study.toml")


def exposure(study: StudyFile) -> str:
    """Who has a site's own model, as in ``MethodRow``; "" where the method as it is set shows none."""
    _, _, settings = settings_of(study)
    return method(study).exposure if settings.exposes else ""


def personalized(study: StudyFile) -> str:
    """What the coordinator keeps of each single site, in words; "" where the method as it is set keeps nothing so."""
    return method(study).personalized if exposure(study) else ""


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
    task_row = row_of(tasks(), study.task, "task", source)
    model_row = row_of(MODELS, study.model, "model", source)
    method_row = row_of(METHODS, study.algorithm, "algorithm", source)
    return (
        check(task_row.settings, study.task.settings, source, "task"),
        check(model_row.settings, study.model.settings, source, "model"),
        check(method_row.settings, study.algorithm.settings, source, "algorithm").filled(study.study.rounds),
    )
