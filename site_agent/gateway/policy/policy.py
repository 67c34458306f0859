"""What may leave this hospital: `policy.toml`, written by a person, default deny.

    [study]     which studies, from which coordinator
    [tensors]   `allow` and `deny` rules by name pattern, dtype and size; deny beats allow
    [metrics]   which metrics, with how many digits at most, over how many records at least
    [counts]    how exactly sample counts may be reported
    [models]    whether others may have a model that is this hospital's alone
    [quotas]    bytes and numbers, a round and a day
    [release]   whether a person releases updates before they are sent, and how many different people must
    [approval]  how many different people approve a study before anything of it leaves
    [policy]    how many different people must agree to another policy
    [plugins]   whose code may run here besides ours
    [statistics] for which requests a person may let figures of a table leave, and how coarse they are
    [veto]      how much worse than before this site may find a new model
    [secure_aggregation] whether updates leave with masks alone, and which sums this site helps to open

The policy passes or blocks, and never alters: a study that wants to report more than the policy allows is blocked, not
trimmed. One denied tensor blocks the whole update. Integer tensors and normalization statistics are denied unless a
rule names them in full: see ``decisions``. Nothing here sends, and only ``load`` and ``read`` read a file.
"""

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from wardround.errors import BadData, NeedsPerson
from wardround.records.plugins import PluginTable
from wardround.records.schema import Strict, check, parse_toml
from wardround.records.study import METRIC_NAME
from wardround.records.summaries.figures import LARGEST_COUNT, LEAST_COUNT, MOST_DIGITS
from wardround.secure.rules import FEWEST, MOST
from wardround.tensors.manifests import ITEM_BYTES

CHECK = "nothing leaves until it is right: edit it, then `site-agent policy check`"

MOST_PERSONS = 5  # who decide one thing
Whole = Annotated[int, Field(strict=True, ge=0)]
Pattern = Annotated[str, Field(min_length=1, max_length=200)]


class TensorRule(Strict):
    """A rule matches a tensor's name as a shell pattern; ``dtype`` and ``max_bytes`` bind an allow rule further."""

    match: Pattern
    dtype: tuple[str, ...] = ("F32",)
    max_bytes: Whole | None = None

    @field_validator("dtype")
    @classmethod
    def _known(cls, dtype: tuple[str, ...]) -> tuple[str, ...]:
        for name in dtype:
            if name not in ITEM_BYTES:
                raise ValueError(f"{name[:20]!r} is none of {', '.join(ITEM_BYTES)}")
        return dtype


class DenyRule(Strict):
    match: Pattern


class TensorTable(Strict):
    allow: tuple[TensorRule, ...] = ()
    deny: tuple[DenyRule, ...] = ()


class MetricRule(Strict):
    name: str = Field(pattern=f"^{METRIC_NAME.pattern}$")
    digits: int = Field(default=4, ge=1, le=9, strict=True)
    min_records: int = Field(default=1, ge=1, strict=True)


class MetricTable(Strict):
    allow: tuple[MetricRule, ...] = ()

    @model_validator(mode="after")
    def _once(self) -> Self:
        names = [rule.name for rule in self.allow]
        if len(set(names)) != len(names):
            raise ValueError(f"metric {next(name for name in names if names.count(name) > 1)!r} stands twice")
        return self


class StudyTable(Strict):
    coordinator: Pattern  # its URI name, exactly
    studies: tuple[Pattern, ...]  # shell patterns of study ids


class CountTable(Strict):
    form: Literal["exact", "bucketed", "uniform"] = "uniform"


class ModelTable(Strict):
    kept_by_coordinator: bool = Field(default=False, strict=True)
    sent_to_other_sites: bool = Field(default=False, strict=True)


class QuotaTable(Strict):
    bytes_per_round: Whole
    bytes_per_day: Whole
    numbers_per_round: Whole  # metrics and counts: an update has each of its metrics and two counts
    numbers_per_day: Whole


Persons = Annotated[int, Field(strict=True, ge=1, le=MOST_PERSONS)]


class ReleaseTable(Strict):
    updates: Literal["none", "first", "every"] = "none"
    persons: Persons = 1

    @model_validator(mode="after")
    def _counted(self) -> Self:
        if self.persons > 1 and self.updates == "none":
            raise ValueError(f'`persons` {self.persons} counts nothing while `updates` is "none": nobody is asked')
        return self


class ApprovalTable(Strict):
    persons: Persons = 1


class PolicyTable(Strict):
    persons: Persons = 1


class StatisticsTable(Strict):
    requests: tuple[Pattern, ...] = ()  # shell patterns of summary requests' names; none: no figures leave
    deny: tuple[Pattern, ...] = ()  # columns of which nothing is told, as a request or this site calls them
    min_count: int = Field(default=10, ge=LEAST_COUNT, le=LARGEST_COUNT, strict=True)
    digits: int = Field(default=3, ge=1, le=MOST_DIGITS, strict=True)


class VetoTable(Strict):
    """By how much this site's own validation loss of a new model may be above the lowest before; None: by anything."""

    loss_rise: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class SecureAggregationTable(Strict):
    """``wardround.secure.policy`` judges rosters and sets by it; whom people here know, `site-agent peers` has."""

    required: bool = Field(default=False, strict=True)  # nothing of this site ever leaves without masks
    min_sites: int = Field(default=FEWEST, ge=FEWEST, le=MOST, strict=True)
    min_known: int = Field(default=2, ge=2, le=MOST, strict=True)
    colluding: int = Field(default=1, ge=1, le=MOST, strict=True)

    @model_validator(mode="after")
    def _nobody_alone(self) -> Self:
        if self.min_sites < self.colluding + 2 or self.min_known < self.colluding + 1:
            raise ValueError(
                f"with `colluding` {self.colluding}, a sum in which nobody stands alone needs `min_sites` of at least "
                f"{self.colluding + 2} and `min_known` of at least {self.colluding + 1}"
            )
        return self


class Policy(Strict):
    study: StudyTable
    tensors: TensorTable = TensorTable()
    metrics: MetricTable = MetricTable()
    counts: CountTable = CountTable()
    models: ModelTable = ModelTable()
    quotas: QuotaTable
    release: ReleaseTable = ReleaseTable()
    plugins: PluginTable = PluginTable()
    statistics: StatisticsTable = StatisticsTable()
    approval: ApprovalTable = ApprovalTable()
    policy: PolicyTable = PolicyTable()
    veto: VetoTable = VetoTable()
    secure_aggregation: SecureAggregationTable = SecureAggregationTable()


def load(path: Path, study: str = "STUDY") -> Policy:
    """The policy at ``path``.

    Args:
        study: for which it is asked, so that the hint names the next command in full.

    Raises:
        NeedsPerson: there is none.
        BadData: as ``parse``, or the file cannot be read.
    """
    return parse(read(path, study), path)


def read(path: Path, study: str = "STUDY") -> bytes:
    """The bytes of the policy at ``path``, not yet looked at. Takes and raises what ``load`` does."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise NeedsPerson(
            f"there is no policy at {path}: nothing may leave",
            hint=f"`site-agent policy draft {study}` writes a proposal for you to read and edit",
            code="DECLINED_POLICY",
        ) from None
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}: nothing may leave", code="DECLINED_POLICY") from None


@lru_cache(maxsize=2)
def parse(data: bytes, path: Path) -> Policy:
    """The policy in ``data``, which came from ``path``; of the same bytes, which are judged often in a round, the same.

    Raises:
        BadData: not text, not TOML (a key twice included), empty, or not a policy; the message names line or key.
    """
    try:
        tables = parse_toml(data)
    except BadData as error:
        raise BadData(f"{path}: {error.message}", hint=CHECK, code="DECLINED_POLICY") from None
    if not tables:
        raise BadData(
            f"{path}: empty, and a policy says at least [study] and [quotas]", hint=CHECK, code="DECLINED_POLICY"
        )
    try:
        return check(Policy, tables, str(path))
    except BadData as error:
        raise BadData(error.message, hint=error.hint or CHECK, code="DECLINED_POLICY") from None
