"""The policy as text: a draft for a person to edit, its lines in a study's account, and how two policies differ."""

from collections.abc import Iterator

from pydantic import JsonValue

from site_agent.gateway.policy.decisions import EXPOSURES, StudyRequest, decide, first_denial
from site_agent.gateway.policy.policy import Policy
from site_agent.state.consent import exposed
from wardround.records.schema import toml_value
from wardround.secure.rules import FEWEST

SENT_AGAIN = 4  # how often a drafted quota lets one update be sent: a broken line or a second attempt


def lines(policy: Policy, request: StudyRequest) -> dict[str, str]:
    """What the policy says of a study, line by line, for the study's account."""
    denial = first_denial(decide(policy, request))
    verdict = "allows all of it" if denial is None else f"DENIES {denial.what}: {denial.rule}"
    more = {"approval"} if policy.approval.persons > 1 else set()
    more |= {"veto"} if policy.veto.loss_rise is not None else set()
    more |= {"secure_aggregation"} if request.secure or policy.secure_aggregation.required else set()
    tables = policy.model_dump(mode="json", include={"quotas", "release", "models"} | more)
    if policy.release.persons == 1:
        del tables["release"]["persons"]
    return {"verdict": verdict} | {
        f"{table}.{key}": _quota(value) for table, content in tables.items() for key, value in content.items()
    }


def draft(request: StudyRequest, site: str) -> str:
    """A proposal for a person to read and edit: what the study asks, tensor by tensor, and nothing more."""
    size = sum(spec.bytes for spec in request.tensors)
    lines = [
        f"# What may leave {site}. A draft from study `{request.study}`: read it, edit it, and it is yours.",
        "# Nothing leaves that no rule allows; deny beats allow; one denied tensor blocks the whole update.",
        "",
        "[study]",
        f"coordinator = {toml_value(request.coordinator)}",
        f"studies = [{toml_value(request.study)}]",
        "",
        "[tensors]",
        "deny = []",
        "allow = [",
        *(
            f"  {{ match = {toml_value(spec.key)}, dtype = [{toml_value(spec.dtype)}], max_bytes = {spec.bytes} }},"
            for spec in request.tensors
        ),
        "]",
        "",
        "[metrics]",
        "allow = [",
        *(
            f"  {{ name = {toml_value(name)}, digits = {request.digits}, min_records = 1 }},"
            for name in request.metrics
        ),
        "]",
        "",
        "[counts]                       # exact, bucketed (a power of two) or uniform (1)",
        f"form = {toml_value(request.counts)}",
        "",
        *_drafted_models(request),
        *_drafted_plugins(request),
        "",
        f"[quotas]                       # an update is {size} bytes; a broken line may have it sent again",
        f"bytes_per_round = {SENT_AGAIN * size}",
        f"bytes_per_day = {SENT_AGAIN * size * request.rounds}",
        f"numbers_per_round = {SENT_AGAIN * request.numbers}          # {request.numbers} go with each update",
        f"numbers_per_day = {SENT_AGAIN * request.numbers * (request.rounds + 1)}",
        "",
        "[release]                      # none, first (a person releases a study's first update) or every",
        'updates = "none"',
        *(_DRAFTED_SECURE if request.secure else ()),
    ]
    return "\n".join(lines) + "\n"


_DRAFTED_SECURE = (
    "",
    "[secure_aggregation]           # `site-agent peers list STUDY`: whom people here know; others count as colluding",
    "required = true                # nothing ever leaves this site without masks",
    f"min_sites = {FEWEST}                  # the fewest sites in a sum that this site helps to open",
    "min_known = 2                  # of these, the fewest beside itself whom people here know",
    "colluding = 1                  # how many of those may work with the coordinator",
)


def _drafted_models(request: StudyRequest) -> list[str]:
    needed = ("", "; it needs `kept_by_coordinator = true`", "; it needs `true` twice")
    if request.exposure is None:
        about = "`site-agent preview` says who would have what of this study, when its plug-ins may run here"
    else:
        about = f"in this study {exposed(request.exposure, request.personalized)}{needed[EXPOSURES[request.exposure]]}"
    return [
        f"# {about}",
        "[models]                       # nobody else has it unless a person writes so here",
        "kept_by_coordinator = false",
        "sent_to_other_sites = false",
    ]


def _drafted_plugins(request: StudyRequest) -> list[str]:
    """What a person would have to write, as a comment: nobody's code runs here by a draft."""
    if not request.plugins:
        return []
    return [
        "",
        "# This study runs code that is not Wardround's, on this hospital's patients. None may run unless a person",
        "# takes the # away from its line here:",
        "[plugins]",
        "allow = [",
        *(f"  # {plugin.line}," for plugin in request.plugins),
        "]",
    ]


def differences(old: Policy, new: Policy) -> list[str]:
    """What the new policy says otherwise than the old, a sentence each; [] where they say the same."""
    return list(_differences(old.model_dump(mode="json"), new.model_dump(mode="json"), ""))


def _differences(old: JsonValue, new: JsonValue, name: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(key), new.get(key), f"{name}.{key}".lstrip("."))
    elif isinstance(old, list) and isinstance(new, list):
        yield from (f"{name}: no longer {_rule(item)}" for item in old if item not in new)
        yield from (f"{name}: now {_rule(item)}" for item in new if item not in old)
    elif old != new:
        yield f"{name}: {_value(old)} before, {_value(new)} now"


def _rule(item: JsonValue) -> str:
    return ", ".join(f"{key} {value}" for key, value in item.items()) if isinstance(item, dict) else str(item)


def _value(value: JsonValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _quota(value: JsonValue) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else _value(value)
