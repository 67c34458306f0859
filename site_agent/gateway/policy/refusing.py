"""What the policy refuses before anything of a study runs or is approved, where nothing has to be in the ledger."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from site_agent.gateway.policy.decisions import Decision, first_denial, plugin_decisions
from site_agent.gateway.policy.policy import Policy, load
from wardround.errors import NotPermitted
from wardround.records.plugins import Plugin


def refuse_plugins(
    plugins: Sequence[Plugin], study: str, path: Path, policy: Callable[[str], Policy] | None = None
) -> None:
    """Refuse a study whose code may not run here, before the trainer is asked to import any of it.

    Args:
        path: the policy's. policy: gives the one in force; if not given, it is what lies at ``path``.

    Raises:
        NotPermitted: the policy does not allow one of them; the message has the line that would.
        WardroundError: there is no policy, or it is broken.
    """
    if not plugins:
        return
    in_force = policy(study) if policy is not None else load(path, study)
    denial = first_denial(plugin_decisions(in_force, plugins))
    if denial is not None:
        raise NotPermitted(
            f"the policy does not let study `{study}` run here: {denial.what}: {denial.rule}; "
            "nothing of it was imported",
            hint=f"if this hospital trusts that code, write the line into `allow` of [plugins] in {path}",
            code="DECLINED_POLICY",
        )


def refuse_study(decisions: Iterable[Decision], study: str, path: Path) -> None:
    """Raises NotPermitted: the policy denies something that the study would have leave."""
    denial = first_denial(decisions)
    if denial is not None:
        raise NotPermitted(
            f"the policy does not let study `{study}` take out what it asks: {denial.what}: {denial.rule}; "
            "nothing was approved",
            hint=f"`site-agent policy explain {study}`; edit {path} if it should leave",
            code="DECLINED_POLICY",
        )
