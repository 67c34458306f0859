"""What may leave this hospital: `policy.toml`, written by a person, default deny.

    [study]     which studies, from which coordinator
    [tensors]   `allow` and `deny` rules by name pattern, dtype and size; deny beats allow
    [metrics]   which metrics, with how many digits at most, over how many records at least
    [counts]    how exactly sample counts may be told
    [models]    whether others may have a model that is this hospital's alone
    [quotas]    bytes and numbers, a round and a day
    [release]   whether a person releases updates before they are sent

The policy passes or blocks, and never alters: a study that wants to tell more than the policy allows is blocked, not
trimmed. One denied tensor blocks the whole update. Integer tensors and normalisation statistics are denied unless a
rule names them in full. Judges only: nothing here sends, and only ``load`` reads a file.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from site_agent.state.directory import COUNTS, exposed
from wardround.errors import BadData, NeedsPerson
from wardround.records.schema import Strict, check, parse_toml, toml_value
from wardround.records.study import METRIC_NAME
from wardround.tensors.manifests import ITEM_BYTES, TensorSpec

CHECK = "nothing leaves until it is right: edit it, then `site-agent policy check`"
INTEGER = frozenset({"I64", "I32", "I16", "I8", "U8", "BOOL"})
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
EXPOSURES = {"": 0, "coordinator": 1, "sites": 2}  # how many parties more have this site's own model
EXACTNESS = {"uniform": 0, "bucketed": 1, "exact": 2}
SENT_AGAIN = 4  # how often a drafted quota lets one update be sent: a broken line or a second attempt

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
    numbers_per_round: Whole  # metrics and counts: an update tells each of its metrics and two counts
    numbers_per_day: Whole


class ReleaseTable(Strict):
    updates: Literal["none", "first", "every"] = "none"


class Policy(Strict):
    study: StudyTable
    tensors: TensorTable = TensorTable()
    metrics: MetricTable = MetricTable()
    counts: CountTable = CountTable()
    models: ModelTable = ModelTable()
    quotas: QuotaTable
    release: ReleaseTable = ReleaseTable()


@dataclass(frozen=True)
class Decision:
    """The policy on one thing that would leave: whether it may, and by which rule."""

    what: str
    allowed: bool
    rule: str


@dataclass(frozen=True)
class Asked:
    """What a study would have leave the hospital, each round."""

    study: str
    coordinator: str
    tensors: Sequence[TensorSpec]
    metrics: Sequence[str]
    digits: int
    counts: str
    records: int | None  # rows that a metric is taken over; None before a table is approved
    rounds: int = 1
    exposure: str = ""  # who would have what is this site's own: "", "coordinator" or "sites"
    apart: str = ""  # what that is, in words

    @property
    def numbers(self) -> int:
        """How many are told beside an update: each metric, and how many rows trained and validated."""
        return len(self.metrics) + COUNTS


def load(path: Path) -> Policy:
    """The policy at ``path``.

    Raises:
        NeedsPerson: there is none.
        BadData: as ``parse``, or the file cannot be read.
    """
    return parse(read(path), path)


def read(path: Path) -> bytes:
    """The bytes of the policy at ``path``, not yet looked at. Raises as ``load``."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise NeedsPerson(
            f"there is no policy at {path}: nothing may leave",
            hint="`site-agent policy draft STUDY` writes a proposal for you to read and edit",
            code="DECLINED_POLICY",
        ) from None
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}: nothing may leave", code="DECLINED_POLICY") from None


def parse(data: bytes, path: Path) -> Policy:
    """The policy in ``data``, which came from ``path``.

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


def decide(policy: Policy, asked: Asked) -> list[Decision]:
    """The decision on each thing that a study would have leave, in the order of the study's own list.

    All of them must be allowed for anything to leave.
    """
    decisions = [_study(policy, asked)]
    decisions += [_tensor(policy, spec) for spec in asked.tensors]
    decisions += [_metric(policy, name, asked) for name in asked.metrics]
    decisions.append(_counts(policy, asked))
    decisions += _models(policy, asked)
    decisions.append(_round_bytes(policy, sum(spec.bytes for spec in asked.tensors)))
    decisions.append(number_quotas(policy, asked.numbers, 0, 0)[0])
    return decisions


def quotas(policy: Policy, size: int, of_round: int, of_day: int) -> list[Decision]:
    """Whether ``size`` more bytes may leave, after so many of this round and of this day (UTC)."""
    table = policy.quotas
    return [
        _quota("bytes", "round", of_round + size, table.bytes_per_round),
        _quota("bytes", "day", of_day + size, table.bytes_per_day),
    ]


def number_quotas(policy: Policy, numbers: int, of_round: int, of_day: int) -> list[Decision]:
    """Whether so many more numbers may be told, after so many of this round and of this day (UTC)."""
    table = policy.quotas
    return [
        _quota("numbers", "round", of_round + numbers, table.numbers_per_round),
        _quota("numbers", "day", of_day + numbers, table.numbers_per_day),
    ]


def _quota(unit: str, period: str, amount: int, most: int) -> Decision:
    return Decision(f"{amount} {unit} in this {period}", amount <= most, f"quotas.{unit}_per_{period} = {most}")


def first_denial(decisions: Iterable[Decision]) -> Decision | None:
    """The first thing that may not leave, None when all may."""
    return next((decision for decision in decisions if not decision.allowed), None)


def _study(policy: Policy, asked: Asked) -> Decision:
    table = policy.study
    if asked.coordinator != table.coordinator:
        return Decision(f"coordinator {asked.coordinator}", False, f"study.coordinator = {table.coordinator!r}")
    named = next((pattern for pattern in table.studies if fnmatchcase(asked.study, pattern)), None)
    rule = f"study.studies = {named!r}" if named else "study.studies names no such study"
    return Decision(f"study {asked.study}", named is not None, rule)


def _tensor(policy: Policy, spec: TensorSpec) -> Decision:
    """Deny beats allow; nothing said is a denial."""
    for number, denied in enumerate(policy.tensors.deny, 1):
        if fnmatchcase(spec.key, denied.match):
            return Decision(spec.key, False, f"tensors.deny {number}: {denied.match!r}")
    refused = "no rule of tensors.allow names it"
    for number, rule in enumerate(policy.tensors.allow, 1):
        if not fnmatchcase(spec.key, rule.match):
            continue
        where = f"tensors.allow {number}: {rule.match!r}"
        if _needs_naming(spec) and rule.match != spec.key:
            refused = f"{where} matches it, but counters and normalisation statistics must be named in full"
        elif spec.dtype not in rule.dtype:
            refused = f"{where} allows {', '.join(rule.dtype)}, it is {spec.dtype}"
        elif rule.max_bytes is not None and spec.bytes > rule.max_bytes:
            refused = f"{where} allows {rule.max_bytes} bytes, it has {spec.bytes}"
        else:
            return Decision(spec.key, True, where)
    return Decision(spec.key, False, refused)


def _needs_naming(spec: TensorSpec) -> bool:
    return spec.dtype in INTEGER or spec.name.rpartition(".")[2] in STATISTICS


def _metric(policy: Policy, name: str, asked: Asked) -> Decision:
    what = f"metric {name}"
    rule = next((rule for rule in policy.metrics.allow if rule.name == name), None)
    if rule is None:
        return Decision(what, False, "no rule of metrics.allow names it")
    if asked.digits > rule.digits:
        return Decision(
            what, False, f"metrics.allow {name!r} allows {rule.digits} digits, it is told with {asked.digits}"
        )
    if asked.records is not None and asked.records < rule.min_records:
        return Decision(what, False, f"metrics.allow {name!r} wants {rule.min_records} records, there are fewer")
    return Decision(what, True, f"metrics.allow {name!r}")


def _counts(policy: Policy, asked: Asked) -> Decision:
    allowed = EXACTNESS[asked.counts] <= EXACTNESS[policy.counts.form]
    return Decision(f"counts, {asked.counts}", allowed, f"counts.form = {policy.counts.form!r}")


def _models(policy: Policy, asked: Asked) -> list[Decision]:
    """One decision for each further party that would have this site's own model."""
    kept, sent = policy.models.kept_by_coordinator, policy.models.sent_to_other_sites
    decisions = [
        Decision(
            "this site's own model, kept apart by the coordinator", kept, f"models.kept_by_coordinator = {_word(kept)}"
        ),
        Decision("this site's own model, sent to the other sites", sent, f"models.sent_to_other_sites = {_word(sent)}"),
    ]
    return decisions[: EXPOSURES[asked.exposure]]


def _round_bytes(policy: Policy, size: int) -> Decision:
    quota = policy.quotas.bytes_per_round
    return Decision(f"{size} bytes a round", size <= quota, f"quotas.bytes_per_round = {quota}")


def lines(policy: Policy, asked: Asked) -> dict[str, str]:
    """What the policy says of a study, line by line, for the study's account."""
    denial = first_denial(decide(policy, asked))
    verdict = "allows all of it" if denial is None else f"DENIES {denial.what}: {denial.rule}"
    tables = policy.model_dump(mode="json", include={"quotas", "release", "models"})
    return {"verdict": verdict} | {
        f"{table}.{key}": _word(value) for table, content in tables.items() for key, value in content.items()
    }


def draft(asked: Asked, site: str) -> str:
    """A proposal for a person to read and edit: what the study asks, tensor by tensor, and nothing more."""
    size = sum(spec.bytes for spec in asked.tensors)
    lines = [
        f"# What may leave {site}. A draft from study `{asked.study}`: read it, edit it, and it is yours.",
        "# Nothing leaves that no rule allows; deny beats allow; one denied tensor blocks the whole update.",
        "",
        "[study]",
        f"coordinator = {toml_value(asked.coordinator)}",
        f"studies = [{toml_value(asked.study)}]",
        "",
        "[tensors]",
        "deny = []",
        "allow = [",
        *(
            f"  {{ match = {toml_value(spec.key)}, dtype = [{toml_value(spec.dtype)}], max_bytes = {spec.bytes} }},"
            for spec in asked.tensors
        ),
        "]",
        "",
        "[metrics]",
        "allow = [",
        *(f"  {{ name = {toml_value(name)}, digits = {asked.digits}, min_records = 1 }}," for name in asked.metrics),
        "]",
        "",
        "[counts]                       # exact, bucketed (a power of two) or uniform (1)",
        f"form = {toml_value(asked.counts)}",
        "",
        *_drafted_models(asked),
        "",
        f"[quotas]                       # an update is {size} bytes; a broken line may have it sent again",
        f"bytes_per_round = {SENT_AGAIN * size}",
        f"bytes_per_day = {SENT_AGAIN * size * asked.rounds}",
        f"numbers_per_round = {SENT_AGAIN * asked.numbers}          # {asked.numbers} are told beside each",
        f"numbers_per_day = {SENT_AGAIN * asked.numbers * (asked.rounds + 1)}",
        "",
        "[release]                      # none, first (a person releases a study's first update) or every",
        'updates = "none"',
    ]
    return "\n".join(lines) + "\n"


def _drafted_models(asked: Asked) -> list[str]:
    needed = ("", "; it needs `kept_by_coordinator = true`", "; it needs `true` twice")
    return [
        f"# in this study {exposed(asked.exposure, asked.apart)}{needed[EXPOSURES[asked.exposure]]}",
        "[models]                       # nobody else has it unless a person writes so here",
        "kept_by_coordinator = false",
        "sent_to_other_sites = false",
    ]


def differences(old: Policy, new: Policy) -> list[str]:
    """What the new policy says otherwise than the old, a sentence each; [] where they say the same."""
    return list(_differences(old.model_dump(mode="json"), new.model_dump(mode="json"), ""))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], table: str) -> Iterable[str]:
    for key in sorted(old.keys() | new.keys()):
        before, after, name = old.get(key), new.get(key), f"{table}.{key}".lstrip(".")
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, name)
        elif isinstance(before, list) and isinstance(after, list):
            yield from (f"{name}: no longer {_shown(item)}" for item in before if item not in after)
            yield from (f"{name}: now {_shown(item)}" for item in after if item not in before)
        elif before != after:
            yield f"{name}: {_word(before)} before, {_word(after)} now"


def _shown(item: Any) -> str:
    return ", ".join(f"{key} {value}" for key, value in item.items()) if isinstance(item, dict) else str(item)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
