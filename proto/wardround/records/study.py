"""The study file: one TOML file that the lab and the federation both read.

    [study]        who takes part, how many rounds, until when
    [task]         an installed task and its schema
    [model]        an installed network and its sizes
    [networks.X]   another network that sites may train, called X
    [assigned]     site = X; the others train [model]
    [algorithm]    an installed method and its settings
    [training]     the local steps
    [checkpoints]  how the best models are chosen
    [reported]     which numbers leave beside the tensors, and how exactly
    [limits]       how much one site may move the model
    [aggregation]  how the sites' updates become one, where it is not their mean
    [encoding]     how exactly the values of an update leave
    [secure_aggregation]  that the coordinator learns sums alone
    [public_data]  a set without patients that every party holds a copy of, for the methods that need one
    [plugins.X]    the code of others that the study runs; resolving writes it, with a digest
    [variants.X]   whole tables that replace the ones above when X is chosen

``[task]``, ``[model]``, ``[networks.X]`` and ``[algorithm]`` name something installed; their other keys are checked by
``fl_algorithms.catalog``, which also fills their defaults. A study is *resolved* when all that is done; the digest of a
resolved study, with its initial model, is what a hospital approves.
"""

import math
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from wardround.errors import BadData, UsageProblem
from wardround.records.aggregation import AggregationSection
from wardround.records.encoding import EncodingSection as EncodingSection
from wardround.records.participation import SITE_NAME as SITE_NAME
from wardround.records.participation import STUDY_NAME as STUDY_NAME
from wardround.records.participation import StudySection as StudySection
from wardround.records.plugins import MOST, PluginSection, plugin_names
from wardround.records.schema import Strict, check, read_toml
from wardround.records.secure_aggregation import SecureAggregationSection as SecureAggregationSection
from wardround.records.settings import apply, read_settings
from wardround.records.training import TrainingSection as TrainingSection
from wardround.signing import canonical
from wardround.terminal import refuse_control_characters

DECIMAL = re.compile(r"-?[0-9]{1,12}(\.[0-9]{1,12})?(e[+-][0-9]{1,3})?")
METRIC_NAME = re.compile(r"[a-z0-9_]{1,40}")
NETWORK_LABEL = re.compile(r"[a-z0-9-]{1,40}")
DEFAULT_NETWORK = "default"  # the label of [model]


class Named(BaseModel):
    """A table that names something installed; its other keys are that thing's settings, checked by the catalog."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False, defer_build=True)

    name: str

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class CheckpointSection(Strict):
    """How a site's best models are chosen.

    Attributes:
        validation_fraction: of a site's training rows, those that choose models and are never trained on.
        loss_reduction: the mean over rows, or over batches, whose last may be smaller.
    """

    validation_fraction: float = Field(default=0.2, gt=0, lt=1)
    loss_reduction: Literal["sample_mean", "batch_mean"] = "sample_mean"
    alone: bool = False  # each site also trains by itself, beside the federation
    selection: Literal["none", "hedged"] = "none"  # how a site chooses among its models in the end


class ReportedSection(Strict):
    """The numbers that leave beside the tensors, and how exactly they are reported.

    Attributes:
        metrics: their names: val_loss, and those of the task.
        counts: of rows: as they are, the power of two below, or 1 for every site.
        ranges: metric -> (lowest, highest). Resolving fills it from the task; a study may only narrow it.
    """

    metrics: tuple[str, ...] = ("val_loss",)
    digits: int = Field(default=4, ge=1, le=9)  # significant decimal digits
    counts: Literal["exact", "bucketed", "uniform"] = "exact"
    ranges: dict[str, tuple[float, float]] = Field(default_factory=dict, max_length=256)

    @field_validator("metrics")
    @classmethod
    def _metrics(cls, metrics: tuple[str, ...]) -> tuple[str, ...]:
        for name in metrics:
            if not METRIC_NAME.fullmatch(name):
                raise ValueError(f"metric {name!r} is not 1 to 40 of a-z, 0-9 and _")
        return metrics

    @field_validator("ranges")
    @classmethod
    def _ranges(cls, ranges: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        for name, (low, high) in ranges.items():
            if not low < high:
                raise ValueError(f"the range of {name[:40]!r} is {low:g} to {high:g}: give the lowest value first")
        return ranges

    def count(self, n: int) -> int:
        """A number of records as it is reported: itself, the nearest power of two below or at it, or 1."""
        if self.counts == "uniform":
            return 1
        return 1 << (n.bit_length() - 1) if self.counts == "bucketed" and n > 0 else n

    def number(self, value: float | None) -> str:
        """A metric as it is reported: a decimal string of ``digits`` significant digits, or "null"."""
        if value is None:
            return "null"
        text = f"{value:.{self.digits}g}"
        return text if math.isfinite(float(text)) else "null"  # after rounding, which can reach infinity

    def metric(self, name: str, value: float | None) -> str:
        """Metric ``name`` as it is reported: cut to its range, then as ``number``. What is not finite is "null"."""
        if value is None or not math.isfinite(value):
            return "null"
        low, high = self.ranges.get(name, (-math.inf, math.inf))
        return self.number(min(max(value, low), high))

    def has_form(self, text: str) -> bool:
        """Whether ``text`` is a number as this study reports numbers: "null", or so many digits and no more."""
        return text == "null" or (bool(DECIMAL.fullmatch(text)) and self.number(float(text)) == text)

    def is_in_range(self, name: str, text: str) -> bool:
        """Whether ``text``, which has the form, is in the range of metric ``name``; one without a range never is."""
        if text == "null":
            return True
        if name not in self.ranges:
            return False
        low, high = (float(self.number(bound)) for bound in self.ranges[name])
        return low <= float(text) <= high


class LimitsSection(Strict):
    """How much one site may move the model. Always on unless a study says otherwise, so that a consent shows it.

    ``fl_algorithms.server.limits`` applies the first two, at the coordinator and in the lab.
    """

    max_weight: float = Field(default=0.5, gt=0, le=1)  # of one site in a mean of three or more; 1: no cap
    norm_multiple: float | None = (
        None  # an update's largest norm in medians; 0: none is learned; None: resolving fills it
    )
    max_examples: int = Field(default=10_000_000, ge=1, le=10**9)  # that one site reports, of training or validation
    count_growth: float = Field(
        default=2.0, ge=1, le=1000
    )  # of a site's counts over those of its first accepted update

    @field_validator("norm_multiple")
    @classmethod
    def _multiple(cls, multiple: float | None) -> float | None:
        if multiple is not None and multiple != 0 and multiple < 2:
            raise ValueError(f"{multiple:g} is neither at least 2 nor 0, which is no limit")
        return multiple


class PublicDataSection(Strict):
    """A data set without patients, of which each party reads its own copy. ``fl_algorithms.tasks.public_data`` computes
    the digest.

    Attributes:
        digest: SHA-256 (hex) over its rows as the task reads them: what `fl-lab public-data` prints.
        rows: how many there are.
    """

    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    rows: int = Field(ge=1, le=10_000_000)


class StudyFile(Strict):
    """A study with its variant applied. ``source`` says where it came from and is no part of it."""

    study: StudySection
    task: Named
    model: Named
    algorithm: Named
    training: TrainingSection = Field(default_factory=lambda: TrainingSection(local_epochs=1))
    checkpoints: CheckpointSection = Field(default_factory=CheckpointSection)
    reported: ReportedSection = Field(default_factory=ReportedSection)
    limits: LimitsSection = Field(default_factory=LimitsSection)
    aggregation: AggregationSection = Field(default_factory=AggregationSection)
    encoding: EncodingSection = Field(default_factory=EncodingSection)
    secure_aggregation: SecureAggregationSection | None = None
    public_data: PublicDataSection | None = None
    networks: dict[str, Named] = Field(default_factory=dict, max_length=256)  # label -> a network beside [model]
    assigned: dict[str, str] = Field(default_factory=dict)  # site -> label
    plugins: dict[str, PluginSection] = Field(default_factory=dict, max_length=MOST)  # distribution -> its pin

    _plugins = field_validator("plugins")(plugin_names)

    @field_validator("networks")
    @classmethod
    def _networks(cls, networks: dict[str, Named]) -> dict[str, Named]:
        for label in networks:
            if not NETWORK_LABEL.fullmatch(label) or label == DEFAULT_NETWORK:
                raise ValueError(
                    f"{label[:60]!r} is not a label of 1 to 40 of a-z, 0-9 and -, other than {DEFAULT_NETWORK!r}"
                )
        return networks

    def document(self) -> dict[str, Any]:
        """What is sent and hashed: plain JSON, floats as text. Meaningful for a resolved study.

        A table that a study may do without stands in it where the study uses it; [limits] always, because it holds
        where nobody wrote it.

        Raises:
            BadData: a setting holds tables too deep within tables.
        """
        try:
            dumped = self.model_dump(mode="json")
        except ValueError:
            raise BadData(f"study `{self.study.name}` holds tables too deep within tables to be written") from None
        document = canonical.with_text_floats(dumped)
        assert isinstance(document, dict)
        for table in ("networks", "assigned", "plugins"):
            if not document[table]:
                del document[table]
        for plugin in document.get("plugins", {}).values():
            if plugin["method"] is None:
                del plugin["method"]
        if not self.study.roles:
            del document["study"]["roles"]
        for table in ("public_data", "secure_aggregation"):
            if document[table] is None:
                del document[table]
        if self.secure_aggregation is not None and not self.secure_aggregation.roster:
            del document["secure_aggregation"]["roster"]
        if self.aggregation.is_mean:
            del document["aggregation"]
        else:
            rule = document["aggregation"]
            document["aggregation"] = {key: value for key, value in rule.items() if value is not None}
        if self.encoding.encoding.is_lossy:
            chosen = document["encoding"]
            document["encoding"] = {key: value for key, value in chosen.items() if value is not None}
        else:
            del document["encoding"]
        return document

    def bounds(self) -> tuple[str, ...]:
        """How much one site may move the model, in words."""
        limits, given, rule = self.limits, self.study.max_update_norm, self.aggregation
        weight = f"one site's averaging weight is at most {limits.max_weight:g} of a mean of three or more sites"
        if limits.max_weight == 1:
            weight = "nothing limits one site's averaging weight"
        if not rule.is_weighted:
            weight = "each site counts alike, whatever its rows"
        if given is not None:
            norm = f"an update's norm is at most {given:g}"
        elif limits.norm_multiple:
            norm = f"an update's norm is at most {limits.norm_multiple:g} times the median of this and the last rounds"
        else:
            norm = "nothing limits an update's norm" if rule.is_mean else "no update is left out for its norm"
        rows = (
            f"a site reports at most {limits.max_examples:,} rows, and {limits.count_growth:g} times its first report"
        )
        said = () if rule.is_mean else (rule.sentence(len(self.study.trainers), self.study.needed),)
        written = (self.encoding.sentence,) if self.encoding.encoding.is_lossy else ()
        return (*said, weight, norm, rows, *written)

    def digest(self, initial_model: str) -> str:
        """The study's digest (hex) with the digest (hex) of its initial model."""
        return study_digest(self.document(), initial_model)

    @classmethod
    def from_document(cls, document: Any, source: str = "study") -> "StudyFile":
        """The study of a document that ``document()`` made.

        Raises:
            BadData: it is not one, or one of its texts cannot be shown.
        """
        refuse_control_characters(document, source)
        return check(cls, document, source)


def study_digest(document: Any, initial_model: str) -> str:
    """SHA-256 (hex) over the resolved study and its initial model's digest (hex)."""
    return canonical.digest({"initial_model": initial_model, "study": document})


def load(path: Path, settings: list[str] | None = None, variant: str = "") -> StudyFile:
    """Read a study file, apply its variant and the ``KEY=VALUE`` settings. Not resolved yet.

    Order: ``algorithm.name`` among the settings, the variant of that name (or ``variant``), the other settings.

    Raises:
        BadData: the file is not a study; the message names file, table and key.
        UsageProblem: a setting is not ``table.key=value``, or the variant does not exist.
    """
    tables = read_toml(path)
    source = path.name
    variants = tables.pop("variants", {})
    if not isinstance(variants, dict):
        raise BadData(f"{source}: [variants] holds tables, found a value")
    pairs = read_settings(settings or [])
    name = next((str(value) for table, key, value in reversed(pairs) if (table, key) == ("algorithm", "name")), "")
    if variant and variant not in variants:
        known = ", ".join(sorted(variants)) or "none"
        raise UsageProblem(f"{source} has no variant `{variant}`", hint=f"it has: {known}")
    algorithm = tables.get("algorithm")
    if name and not (isinstance(algorithm, dict) and algorithm.get("name") == name):
        tables["algorithm"] = {"name": name}  # the other method's settings are not this one's
    chosen = variants.get(variant or name, {})
    if not isinstance(chosen, dict):
        raise BadData(f"{source}: [variants.{variant or name}] holds tables, found a value")
    for replaced, content in chosen.items():
        if replaced not in StudyFile.model_fields:
            raise BadData(f"{source}: [variants.{variant or name}.{replaced}] replaces no table of a study")
        tables[replaced] = content
    apply(pairs, tables, source)
    return check(StudyFile, tables, source)
