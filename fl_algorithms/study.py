"""A resolved study: what it names looked up, its settings checked; and the same as one site trains it. No torch.

``fl_algorithms.resolving.resolve`` makes one of a study file, or says what in it does not fit together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, Self, TypeVar

from fl_algorithms.methods.settings import MethodSettings
from fl_algorithms.registry import METHODS, MODELS, TASKS, row_of
from fl_algorithms.rows import COORDINATOR, MethodRow, ModelRow, TaskRow
from fl_algorithms.settings.models import NetworkSettings
from wardround.errors import BadData
from wardround.records.aggregation import AggregationSection
from wardround.records.encoding import EncodingSection
from wardround.records.plugins import Plugin, PluginMethod, plugins_of
from wardround.records.schema import Strict, check
from wardround.records.study import (
    DEFAULT_NETWORK,
    CheckpointSection,
    LimitsSection,
    Named,
    PublicDataSection,
    ReportedSection,
    SecureAggregationSection,
    StudyFile,
    StudySection,
    TrainingSection,
)

Row = TypeVar("Row", TaskRow, ModelRow, MethodRow)
Settings = TypeVar("Settings", bound=Strict)


@dataclass(frozen=True)
class Choice(Generic[Row, Settings]):
    """What a table of the study names: its row in the registry, and its settings with every default filled in."""

    row: Row
    settings: Settings

    @property
    def name(self) -> str:
        return self.row.name

    def named(self) -> Named:
        """The table that says so."""
        return Named.model_validate({"name": self.name, **self.settings.model_dump(mode="json", exclude_none=True)})


@dataclass(frozen=True)
class ResolvedStudy:
    """A study that ``resolve`` has checked. ``file`` is what is hashed, sent and approved.

    A row is looked up when it is first asked for, so that a coordinator can hold a study whose task it does not have.
    """

    file: StudyFile
    source: str = field(default="study.toml", compare=False)  # for messages

    @property
    def study(self) -> StudySection:
        return self.file.study

    @property
    def training(self) -> TrainingSection:
        return self.file.training

    @property
    def checkpoints(self) -> CheckpointSection:
        return self.file.checkpoints

    @property
    def reported(self) -> ReportedSection:
        return self.file.reported

    @property
    def limits(self) -> LimitsSection:
        return self.file.limits

    @property
    def aggregation(self) -> AggregationSection:
        return self.file.aggregation

    @property
    def encoding(self) -> EncodingSection:
        return self.file.encoding

    @property
    def secure_aggregation(self) -> SecureAggregationSection | None:
        return self.file.secure_aggregation

    @property
    def public_data(self) -> PublicDataSection | None:
        return self.file.public_data

    @property
    def networks(self) -> Mapping[str, Named]:
        return self.file.networks

    @property
    def assigned(self) -> Mapping[str, str]:
        return self.file.assigned

    @cached_property
    def task(self) -> Choice[TaskRow, Strict]:
        """Raises BadData: not installed, or settings that it does not have."""
        row = row_of(TASKS, self.file.task, "task", self.source)
        return Choice(row, check(row.settings, self.file.task.settings, self.source, "task"))

    @cached_property
    def model(self) -> Choice[ModelRow, NetworkSettings]:
        """The default network. Raises BadData: not installed, or settings that it does not have."""
        row = row_of(MODELS, self.file.model, "model", self.source)
        return Choice(row, check(row.settings, self.file.model.settings, self.source, "model"))

    @cached_property
    def method(self) -> Choice[MethodRow, MethodSettings]:
        """Raises BadData: there is none of that name, or settings that it does not have."""
        row = self.method_row
        settings = check(row.settings, self.file.algorithm.settings, self.source, "algorithm")
        return Choice(row, settings.filled(self.study.rounds))

    @cached_property
    def method_row(self) -> MethodRow:
        """The method's row, whatever its settings are. Raises BadData: there is none of that name."""
        return row_of(METHODS, self.file.algorithm, "algorithm", self.source)

    @property
    def brought_method(self) -> PluginMethod | None:
        """What the study itself says of its method where that is a plug-in's; None of one of ours."""
        brings = f"method {self.file.algorithm.name}"
        return next((pin.method for pin in self.file.plugins.values() if brings in pin.brings), None)

    @property
    def one_global_model(self) -> bool:
        """Whether the sites' losses judge one model. Imports no plug-in."""
        brought = self.brought_method
        return self.method_row.one_global_model if brought is None else brought.one_global_model

    @property
    def distills(self) -> bool:
        """Whether its method distills at the coordinator. Imports no plug-in."""
        brought = self.brought_method
        return self.method_row.public_data == COORDINATOR if brought is None else brought.distills

    @property
    def coordinators_plugins(self) -> tuple[Plugin, ...]:
        """Whose code the coordinator itself runs for it: none to add updates up, the method's where it aggregates by
        code of its own, and all of them where the coordinator distills, with the sites' networks.
        """
        brought = {
            name: section
            for name, section in self.file.plugins.items()
            if self.distills or (section.method is not None and section.method.aggregates == "own")
        }
        return plugins_of(brought)

    @property
    def exposure(self) -> str:
        """Who has a site's own model, as in ``MethodRow``; "" where the method as it is set shows none."""
        return self.method.row.exposure if self.method.settings.exposes else ""

    @property
    def personalized(self) -> str:
        """What the coordinator keeps of each single site, in words; "" where the method as it is set keeps nothing."""
        return self.method.row.personalized if self.exposure else ""

    def label_of(self, site: str, chosen: str = "") -> str:
        """What the network that ``site`` trains is called: as the site chose, else as [assigned] says, else "default".

        Raises:
            BadData: the study allows no network of the chosen label.
        """
        label = chosen or self.assigned.get(site, DEFAULT_NETWORK)
        if label != DEFAULT_NETWORK and label not in self.networks:
            raise BadData(
                f"study `{self.study.name}` has no network `{label[:60]}`",
                hint=f"it has: {', '.join((DEFAULT_NETWORK, *sorted(self.networks)))}",
            )
        return label

    def at(self, site: str, chosen: str = "") -> "SiteStudy":
        """The study as ``site`` trains it. ``site = ""``: with the default network.

        Args:
            chosen: the label of the network that the site itself chose, if any.

        Raises:
            BadData: as ``label_of``.
        """
        file = self.file
        if self.networks or self.assigned or chosen:
            label = self.label_of(site, chosen)
            own = file.model if label == DEFAULT_NETWORK else file.networks[label]
            file = file.model_copy(update={"model": own, "networks": {}, "assigned": {}})
        size = file.model.settings.get("size")
        if size is not None:
            sized = {"name": file.task.name, **file.task.settings, "size": size}
            file = file.model_copy(update={"task": Named.model_validate(sized)})
        return SiteStudy(file, self.source)

    def each_network(self) -> "dict[str, SiteStudy]":
        """Label -> the study as a site with that network trains it; "default" first."""
        return {label: self.at("", label) for label in (DEFAULT_NETWORK, *self.networks)}

    def changed(self, **tables: Mapping[str, Any]) -> Self:
        """With other values in some of its tables: ``training={"batch_size": 4}``. They are not checked again."""
        update = {name: getattr(self.file, name).model_copy(update=values) for name, values in tables.items()}
        return replace(self, file=self.file.model_copy(update=update))

    def document(self) -> dict[str, Any]:
        """As ``StudyFile.document``."""
        return self.file.document()

    def digest(self, initial_model: str) -> str:
        """As ``StudyFile.digest``."""
        return self.file.digest(initial_model)


@dataclass(frozen=True)
class SiteStudy(ResolvedStudy):
    """The study as one site trains it: one network, which is its own, and images of that network's size, if it has one.

    ``ResolvedStudy.at`` makes one.
    """

    @property
    def trains_alone(self) -> bool:
        """Whether the site also trains a network that never meets another site's."""
        return self.checkpoints.alone and not self.method.row.lab_only

    def alone(self) -> "SiteStudy":
        """The same study without a federation, as the lab's `silo`."""
        checkpoints = self.checkpoints.model_copy(update={"alone": False, "selection": "none"})
        silo = Named(name="silo")
        return replace(self, file=self.file.model_copy(update={"algorithm": silo, "checkpoints": checkpoints}))
