"""What the policy says of one study: a decision on each thing that would leave, and the rule that made it.

Judges only: no file, no network.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from site_agent.gateway.policy.policy import Policy
from site_agent.state.directory import COUNTS
from wardround.records.plugins import Plugin
from wardround.tensors.manifests import TensorSpec

INTEGER = frozenset({"I64", "I32", "I16", "I8", "U8", "BOOL"})
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
EXPOSURES = {"": 0, "coordinator": 1, "sites": 2}  # how many parties more have this site's own model
EXACTNESS = {"uniform": 0, "bucketed": 1, "exact": 2}


@dataclass(frozen=True)
class Decision:
    """The policy on one thing that would leave: whether it may, and by which rule."""

    what: str
    allowed: bool
    rule: str


@dataclass(frozen=True)
class StudyRequest:
    """What a study would have leave the hospital, each round, and whose code it runs.

    Attributes:
        exposure: who would have what is this site's own: "", "coordinator" or "sites"; None where nobody has asked
            the trainer, which says so from the installed code.
        personalized: what that is, in words.
        secure: whether its updates leave with masks that only a sum is without.
    """

    study: str
    coordinator: str
    tensors: Sequence[TensorSpec]
    metrics: Sequence[str]
    digits: int
    counts: str
    records: int | None  # rows that a metric is taken over; None before a table is approved
    rounds: int = 1
    exposure: str | None = ""
    personalized: str = ""
    plugins: Sequence[Plugin] = ()
    secure: bool = False

    @property
    def numbers(self) -> int:
        """How many go with an update: each metric, and how many rows trained and validated."""
        return len(self.metrics) + COUNTS


def decide(policy: Policy, request: StudyRequest) -> list[Decision]:
    """The decision on each thing that a study would have leave, in the order of the study's own list.

    All of them must be allowed for anything to leave.
    """
    decisions = [_study(policy, request), *plugin_decisions(policy, request.plugins), *_secure(policy, request)]
    decisions += [_tensor(policy, spec) for spec in request.tensors]
    decisions += [_metric(policy, name, request) for name in request.metrics]
    decisions.append(_counts(policy, request))
    decisions += _models(policy, request)
    decisions.append(_round_bytes(policy, sum(spec.bytes for spec in request.tensors)))
    decisions.append(number_quotas(policy, request.numbers, 0, 0)[0])
    return decisions


def decide_approval(policy: Policy, persons: int) -> Decision:
    """The decision on a study that so many different people approved."""
    wanted = policy.approval.persons
    said = f"{persons} {'person' if persons == 1 else 'people'} approved"
    return Decision(said, persons >= wanted, f"approval.persons: {wanted}")


def decide_fit(policy: Policy, study: str, coordinator: str, counts: str) -> list[Decision]:
    """The decision on the word that this site's data fits a study, with its rows in the form ``counts``."""
    request = StudyRequest(study, coordinator, (), (), 1, counts, None)
    return [_study(policy, request), _counts(policy, request)]


def decide_summary(
    policy: Policy, request: str, coordinator: str, columns: Iterable[tuple[str, str]], numbers: int, of_day: int
) -> list[Decision]:
    """The decision on figures of a table, for a summary request.

    Args:
        columns: what the request calls each column that is read, and what this site does; "" where it has none.
        numbers: how many would leave, after ``of_day`` others of this day (UTC).
    """
    table = policy.statistics
    decisions = [_coordinator(policy, coordinator)]
    named = next((pattern for pattern in table.requests if fnmatchcase(request, pattern)), None)
    rule = f"statistics.requests = {named!r}" if named else "statistics.requests names no such request"
    decisions.append(Decision(f"figures for `{request}`", named is not None, rule))
    for name, here in columns:
        denied = next((text for text in table.deny for one in (name, here) if one and fnmatchcase(one, text)), None)
        if denied is not None:
            decisions.append(Decision(f"column `{name}`", False, f"statistics.deny {denied!r}"))
    decisions.append(_quota("numbers", "day", of_day + numbers, policy.quotas.numbers_per_day))
    return decisions


def plugin_decisions(policy: Policy, plugins: Iterable[Plugin]) -> list[Decision]:
    """The decision on each plug-in that a study would run here."""
    return [_plugin(policy, plugin) for plugin in plugins]


def _plugin(policy: Policy, plugin: Plugin) -> Decision:
    what = f"code of plug-in {plugin.name} {plugin.version}"
    if policy.plugins.allows(plugin):
        return Decision(what, True, f"plugins.allow {plugin.name!r}")
    if not plugin.sha256:
        return Decision(what, False, "the study pins no SHA-256 of it")
    return Decision(what, False, f"{policy.plugins.instead(plugin)}; to allow it, add {plugin.line} there")


def quotas(policy: Policy, size: int, of_round: int, of_day: int) -> list[Decision]:
    """Whether ``size`` more bytes may leave, after so many of this round and of this day (UTC)."""
    table = policy.quotas
    return [
        _quota("bytes", "round", of_round + size, table.bytes_per_round),
        _quota("bytes", "day", of_day + size, table.bytes_per_day),
    ]


def number_quotas(policy: Policy, numbers: int, of_round: int, of_day: int) -> list[Decision]:
    """Whether so many more numbers may be reported, after so many of this round and of this day (UTC)."""
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


def names_study(policy: Policy, study: str) -> bool:
    """Whether a pattern of `study.studies` matches a study's name."""
    return any(fnmatchcase(study, pattern) for pattern in policy.study.studies)


def lacks_rule(policy: Policy, spec: TensorSpec) -> bool:
    """Whether a tensor may not leave because no allow rule fits it, rather than by a deny rule."""
    denied = any(fnmatchcase(spec.key, rule.match) for rule in policy.tensors.deny)
    return not denied and not _tensor(policy, spec).allowed


def _study(policy: Policy, request: StudyRequest) -> Decision:
    table = policy.study
    if request.coordinator != table.coordinator:
        return _coordinator(policy, request.coordinator)
    named = next((pattern for pattern in table.studies if fnmatchcase(request.study, pattern)), None)
    rule = f"study.studies = {named!r}" if named else "study.studies names no such study"
    return Decision(f"study {request.study}", named is not None, rule)


def _coordinator(policy: Policy, coordinator: str) -> Decision:
    wanted = policy.study.coordinator
    return Decision(f"coordinator {coordinator}", coordinator == wanted, f"study.coordinator = {wanted!r}")


def _tensor(policy: Policy, spec: TensorSpec) -> Decision:
    """A deny rule wins over an allow rule; a tensor that no rule names is denied."""
    for number, denied in enumerate(policy.tensors.deny, 1):
        if fnmatchcase(spec.key, denied.match):
            return Decision(spec.key, False, f"tensors.deny {number}: {denied.match!r}")
    denial = "no rule of tensors.allow names it"
    for number, rule in enumerate(policy.tensors.allow, 1):
        if not fnmatchcase(spec.key, rule.match):
            continue
        where = f"tensors.allow {number}: {rule.match!r}"
        if _needs_naming(spec) and rule.match != spec.key:
            denial = f"{where} matches it, but counters and normalization statistics must be named in full"
        elif spec.dtype not in rule.dtype:
            denial = f"{where} allows {', '.join(rule.dtype)}, it is {spec.dtype}"
        elif rule.max_bytes is not None and spec.bytes > rule.max_bytes:
            denial = f"{where} allows {rule.max_bytes} bytes, it has {spec.bytes}"
        else:
            return Decision(spec.key, True, where)
    return Decision(spec.key, False, denial)


def _secure(policy: Policy, request: StudyRequest) -> list[Decision]:
    """One decision, where this site sends nothing without masks."""
    if not policy.secure_aggregation.required:
        return []
    what = "updates with masks" if request.secure else "updates in clear"
    return [Decision(what, request.secure, "secure_aggregation.required = true")]


def _needs_naming(spec: TensorSpec) -> bool:
    return spec.dtype in INTEGER or spec.name.rpartition(".")[2] in STATISTICS


def _metric(policy: Policy, name: str, request: StudyRequest) -> Decision:
    what = f"metric {name}"
    rule = next((rule for rule in policy.metrics.allow if rule.name == name), None)
    if rule is None:
        return Decision(what, False, "no rule of metrics.allow names it")
    if request.digits > rule.digits:
        return Decision(
            what, False, f"metrics.allow {name!r} allows {rule.digits} digits, the study reports {request.digits}"
        )
    if request.records is not None and request.records < rule.min_records:
        return Decision(what, False, f"metrics.allow {name!r} wants {rule.min_records} records, there are fewer")
    return Decision(what, True, f"metrics.allow {name!r}")


def _counts(policy: Policy, request: StudyRequest) -> Decision:
    allowed = EXACTNESS[request.counts] <= EXACTNESS[policy.counts.form]
    return Decision(f"counts, {request.counts}", allowed, f"counts.form = {policy.counts.form!r}")


def _models(policy: Policy, request: StudyRequest) -> list[Decision]:
    """One decision for each further party that would have this site's own model."""
    table = policy.models
    parties = [
        ("kept apart by the coordinator", "kept_by_coordinator", table.kept_by_coordinator),
        ("sent to the other sites", "sent_to_other_sites", table.sent_to_other_sites),
    ]
    decisions = [
        Decision(f"this site's own model, {what}", allowed, f"models.{key} = {str(allowed).lower()}")
        for what, key, allowed in parties
    ]
    return decisions[: EXPOSURES[request.exposure or ""]]


def _round_bytes(policy: Policy, size: int) -> Decision:
    quota = policy.quotas.bytes_per_round
    return Decision(f"{size} bytes a round", size <= quota, f"quotas.bytes_per_round = {quota}")
