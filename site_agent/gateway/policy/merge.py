"""A policy that allows one study more: what it says then, and its text with a person's own comments kept.

Judges only: no file, no network. Widened is what the study asks and the policy does not allow yet. Never touched:
what a `deny` rule says, who may have a model that is this site's alone, whose plug-ins may run here, when a person
releases updates, whose figures may leave, and what [veto] and [secure_aggregation] say. These a person writes.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from site_agent.gateway.policy import policy as policies
from site_agent.gateway.policy.decisions import EXACTNESS, StudyRequest, decide, lacks_rule, names_study
from site_agent.gateway.policy.policy import MetricRule, Policy, TensorRule
from site_agent.gateway.policy.text import SENT_AGAIN
from wardround.errors import BadData, UsageProblem
from wardround.records.schema import toml_bytes, toml_value

HEAD = "# What may leave this hospital. Nothing leaves that no rule allows; deny beats allow.\n"


def merged(policy: Policy, request: StudyRequest) -> Policy:
    """``policy``, widened by what ``request`` asks. Equal to it where it allows all of that already.

    Raises:
        UsageProblem: the policy is for another coordinator.
    """
    if request.coordinator != policy.study.coordinator:
        raise UsageProblem(
            f"the policy in force is for {policy.study.coordinator}, and study `{request.study}` is offered by "
            f"{request.coordinator}",
            hint="a site has one coordinator: write [study] by hand if it is now another",
        )
    new = not names_study(policy, request.study)
    size = sum(spec.bytes for spec in request.tensors)
    rules = tuple(
        TensorRule(match=spec.key, dtype=(spec.dtype,), max_bytes=spec.bytes)
        for spec in request.tensors
        if lacks_rule(policy, spec)
    )
    quotas = policy.quotas
    days = {"bytes_per_day": SENT_AGAIN * size * request.rounds}
    days["numbers_per_day"] = SENT_AGAIN * request.numbers * (request.rounds + 1)
    return policy.model_copy(
        update={
            "study": policy.study.model_copy(
                update={"studies": (*([request.study] if new else []), *policy.study.studies)}
            ),
            "tensors": policy.tensors.model_copy(update={"allow": (*rules, *policy.tensors.allow)}),
            "metrics": policy.metrics.model_copy(update={"allow": _metrics(policy.metrics.allow, request)}),
            "counts": policy.counts.model_copy(
                update={"form": max(policy.counts.form, request.counts, key=lambda form: EXACTNESS[form])}
            ),
            "quotas": quotas.model_copy(
                update={
                    "bytes_per_round": max(quotas.bytes_per_round, SENT_AGAIN * size),
                    "numbers_per_round": max(quotas.numbers_per_round, SENT_AGAIN * request.numbers),
                    # Of a day, both studies count: what the new one needs comes on top.
                    **{name: getattr(quotas, name) + more for name, more in days.items() if new},
                }
            ),
        }
    )


def still_denied(policy: Policy, request: StudyRequest) -> list[str]:
    """What of ``request`` the policy does not allow, a sentence each: a person must decide it, and write it."""
    return [f"{one.what}: {one.rule}" for one in decide(policy, request) if not one.allowed]


def _metrics(rules: Sequence[MetricRule], request: StudyRequest) -> tuple[MetricRule, ...]:
    known = {rule.name for rule in rules}
    fresh = [MetricRule(name=name, digits=request.digits) for name in request.metrics if name not in known]
    widened = [
        rule.model_copy(update={"digits": max(rule.digits, request.digits)}) if rule.name in request.metrics else rule
        for rule in rules
    ]
    return (*fresh, *widened)


def merged_text(text: str, old: Policy, new: Policy) -> tuple[str, bool]:
    """The text of ``new``: ``text``, which says ``old``, with the changes written into it, and whether that was
    possible. If it was not, it is written anew, without the comments.
    """
    edited = text
    edited = _insert(edited, "study", "studies", _added(old.study.studies, new.study.studies), "{}")
    edited = _insert(edited, "tensors", "allow", _added(old.tensors.allow, new.tensors.allow), "\n  {}")
    edited = _insert(edited, "metrics", "allow", _added_metrics(old, new), "\n  {}")
    for rule in new.metrics.allow:
        edited = re.sub(
            rf'(name = "{re.escape(rule.name)}", digits = )\d+', rf"\g<1>{rule.digits}", edited
        )  # of a rule as drafts write it
    if old.counts != new.counts:
        edited = _replace(edited, "counts", "form", new.counts.form)
    for key, most in new.quotas:
        if most != getattr(old.quotas, key):
            edited = _replace(edited, "quotas", key, most)
    try:
        if policies.parse(edited.encode(), Path("policy.toml")) == new:
            return edited, True
    except BadData:
        pass  # it is written in a way that these edits do not know
    return HEAD + toml_bytes(new.model_dump(mode="json", exclude_none=True)).decode(), False


def _added(old: Sequence[object], new: Sequence[object]) -> list[str]:
    return [_inline(item) for item in new if item not in old]


def _added_metrics(old: Policy, new: Policy) -> list[str]:
    known = {rule.name for rule in old.metrics.allow}
    return [_inline(rule) for rule in new.metrics.allow if rule.name not in known]


def _inline(item: object) -> str:
    """A text, or a rule as an inline table."""
    if isinstance(item, TensorRule | MetricRule):
        fields = item.model_dump(mode="json", exclude_none=True).items()
        return f"{{ {', '.join(f'{key} = {toml_value(value)}' for key, value in fields)} }}"
    return toml_value(item)


def _insert(text: str, table: str, key: str, items: Iterable[str], form: str) -> str:
    """``items`` at the beginning of an array of a table, so that what stands there keeps its own commas."""
    pieces = "".join(form.format(item) + ("," if form != "{}" else ", ") for item in items)
    start, end = _table(text, table)
    section = re.sub(rf"(?m)^({key}\s*=\s*\[)", lambda found: found[1] + pieces, text[start:end], count=1)
    return text[:start] + section + text[end:]


def _replace(text: str, table: str, key: str, value: str | int) -> str:
    start, end = _table(text, table)
    shown = toml_value(value)
    section = re.sub(
        rf'(?m)^({key}\s*=\s*)("[^"\n]*"|[0-9_]+)', lambda found: found[1] + shown, text[start:end], count=1
    )
    return text[:start] + section + text[end:]


def _table(text: str, name: str) -> tuple[int, int]:
    """Where a table's lines begin and end; (0, 0) where there is none."""
    head = re.search(rf"(?m)^\[{name}\].*$", text)
    if head is None:
        return 0, 0
    following = re.search(r"(?m)^\[", text[head.end() :])
    return head.end(), len(text) if following is None else head.end() + following.start()
