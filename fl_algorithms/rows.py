"""The rows of the registry: what there is to know of a task, a network and a method before it is used. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fl_algorithms.methods.settings import MeanSettings, MethodSettings
from fl_algorithms.settings.dataset import ClassDatasetSettings, DatasetSettings
from fl_algorithms.settings.models import NetworkSettings
from fl_algorithms.settings.targets import (
    CLASS_METRICS,
    LABEL_METRICS,
    NUMBER_METRICS,
    ORDINAL_METRICS,
    RANGES,
    SMALLER_IS_BETTER,
    SURVIVAL_METRICS,
    ClassTarget,
    LabelsTarget,
    NumberTarget,
    OrdinalTarget,
    SurvivalTarget,
)  # fmt: skip
from wardround.records.schema import Strict

VAL_LOSS = "val_loss"
LOSS_RANGE = (0.0, 1e6)  # of a loss that is never negative; a model that is further off is lost anyway
PUBLIC_DATA = "public_data"  # the folder of the public data set in the lab's data; no site can have this name
SITES, COORDINATOR = "sites", "coordinator"
MEAN = "fl_algorithms.server.mean:mean"  # the server aggregator of most methods
COLUMNS, IMAGES, MASKS = "columns", "images", "masks"  # what a task gives to a network: numbers, one image, or one
# image of which every pixel is judged
FILES = "files"  # read by a plug-in's own code


@dataclass(frozen=True)
class TaskRow:
    """A learning problem that a hospital may have data for.

    ``ranges`` has, for each metric that a study may report, its lowest and highest value: what lies outside is
    reported as the bound, and a site or the coordinator refuses anything beyond. Without one ``val_loss`` has
    ``LOSS_RANGE``. Settings may have ``metrics`` of their own: those of the row that a study so set has.

    Attributes:
        classes: whether each row is of one of the settings' ``classes``, as methods that compare classes need.
        smaller_is_better: of the metrics, errors rather than merits.
        reads: how a site's data lies: FILES, which only the task's own code can read; "": as what it gives.
    """

    name: str
    settings: type[Strict]
    implementation: str  # called with the settings
    metrics: tuple[str, ...]  # the names that a study may report, beside val_loss
    gives: str = COLUMNS  # of IMAGES and MASKS, the settings have ``size`` and ``input_shape``
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    reads: str = ""
    classes: bool = False
    smaller_is_better: frozenset[str] = SMALLER_IS_BETTER

    @property
    def kinds(self) -> bool:
        """Whether each row is of a kind, so that kinds may be drawn equally often."""
        return self.classes or issubclass(self.settings, OrdinalTarget | SurvivalTarget)

    def range_of(self, metric: str) -> tuple[float, float] | None:
        """The lowest and highest value of a metric; None where nobody said."""
        return self.ranges.get(metric, LOSS_RANGE if metric == VAL_LOSS else None)


@dataclass(frozen=True)
class ModelRow:
    """A network. ``implementation`` is called with its settings, its inputs and the number of outputs; inputs are the
    number of columns, or an image's shape (channels, *size). One of a library is called with its name there first.
    """

    name: str
    settings: type[NetworkSettings]
    implementation: str
    takes: str = COLUMNS
    within: str = ""  # the name within its library


@dataclass(frozen=True)
class MethodRow:
    """A method.

    Attributes:
        upload, private: what a site sends and what never leaves it, for people.
        client: called with its settings, gives the ``Algorithm`` that sites run.
        server: called with its settings, the resolved study and the leaving tensors; gives the server aggregator.
        differs: in what it is not as the paper has it, for people; "": in nothing that is known.
        needs: of the network.
        plain_sgd: the site's optimizer must be SGD without momentum and weight decay.
        same_start: private tensors must start equal everywhere.
        heterogeneous: sites' networks may share different tensors; the server aggregator then averages each
            architecture by itself.
        public_data: who holds a copy of the study's public data set, SITES or COORDINATOR; "": the method needs none.
        exposure: whether the coordinator keeps something of each single site ("coordinator"), and also sends it to
            the other sites ("sites"); a site's policy must allow that.
        personalized: what that is, for people.
        single_updates: why its coordinator needs each site's update by itself, for people; "" where sums are enough, so
            that it goes with secure aggregation.
    """

    name: str
    title: str
    paper: str
    upload: str
    private: str
    client: str
    settings: type[MethodSettings] = MeanSettings
    server: str = MEAN
    one_global_model: bool = False
    needs: frozenset[str] = frozenset()
    plain_sgd: bool = False
    same_start: bool = False
    validation: bool = False  # also used by the method itself, not only to choose checkpoints
    heterogeneous: bool = False
    exposure: str = ""
    personalized: str = ""
    public_data: str = ""
    single_updates: str = ""
    lab_only: bool = False
    differs: str = ""


def dataset_row(
    name: str, implementation: str, settings: type[DatasetSettings] = ClassDatasetSettings, *, gives: str = COLUMNS
) -> TaskRow:
    """The row of a task whose rows come from a ``torch.utils.data.Dataset`` of one's own.

    Args:
        implementation: "module:attribute" of the class that derives from ``fl_algorithms.tasks.dataset.DatasetTask``.
        settings: what [task] may say: one of ``fl_algorithms.settings.dataset``, or a class derived from one.
        gives: COLUMNS for rows (features,), IMAGES for rows (channels, *size).
    """
    metrics = next(metrics for target, metrics in METRICS_OF.items() if issubclass(settings, target))
    return TaskRow(
        name, settings, implementation, metrics, gives, RANGES, FILES, classes=issubclass(settings, ClassTarget)
    )


METRICS_OF: Mapping[type[Strict], tuple[str, ...]] = {
    ClassTarget: CLASS_METRICS,
    OrdinalTarget: ORDINAL_METRICS,
    NumberTarget: NUMBER_METRICS,
    LabelsTarget: LABEL_METRICS,
    SurvivalTarget: SURVIVAL_METRICS,
}
