"""Whose code this coordinator may run beside ours: what its configuration allows, verified before it is imported.

Most studies need none here, whatever their sites train: adding updates up is ours. See ``docs/plugins.md``.
"""

from fl_algorithms import pinned_imports
from fl_algorithms.study import ResolvedStudy
from wardround.errors import NotPermitted
from wardround.records.plugins import PluginTable, refuse_other


def admit_allowed(study: ResolvedStudy, allowed: PluginTable) -> None:
    """Let the code of others that a study needs at the coordinator be imported, from the files that it pins.

    Raises:
        NotPermitted: the configuration does not allow it; nothing was imported.
        BadData: it is not what is installed here.
        NeedsPerson: this process has imported another build of it.
    """
    for plugin in study.coordinators_plugins:
        if not allowed.allows(plugin):
            raise NotPermitted(
                f"study `{study.study.name}` runs code of plug-in {plugin.name} {plugin.version} at the coordinator: "
                f"{allowed.instead(plugin)}",
                hint=f"if you trust it: install it here, write `allow = [{plugin.line}]` under [plugins] in "
                "config.toml, and start the service again",
            )
        pinned_imports.admit(refuse_other(plugin))
