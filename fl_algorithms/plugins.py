"""What other distributions bring by entry points: rows like our own, and the pin of the code that a study runs.

    [project.entry-points."wardround.models"]
    lungnet = "lungnets:LUNGNET"          # a ModelRow of that name; wardround.tasks and wardround.methods likewise

Which distributions bring what is read from their metadata. One is imported when a study uses it: its files must then be
what was installed (``pinned_imports``). No torch.
"""

import importlib
import logging
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from fl_algorithms import pinned_imports
from fl_algorithms.methods.settings import MethodSettings
from fl_algorithms.rows import COORDINATOR, MEAN, MethodRow, ModelRow, TaskRow
from wardround.errors import BadData, WardroundError
from wardround.local import distributions
from wardround.local.distributions import MISMATCH, Distribution, EntryPoint
from wardround.records.plugins import Plugin, PluginMethod, PluginSection, refuse_other, refuse_unpinned
from wardround.terminal import escaped

GROUPS = {"task": "wardround.tasks", "model": "wardround.models", "method": "wardround.methods"}
MOST_SHOWN = 200  # characters of what a plug-in's import failed with
Row = TypeVar("Row", bound=TaskRow | ModelRow | MethodRow)
log = logging.getLogger(__name__)
_linked: dict[str, Distribution] = {}  # first name of a package -> which distribution was imported from its sources


@dataclass(frozen=True)
class Use:
    """A row that a study names and that is not ours: its kind ("task", "model", "method") and its name."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def names(kind: str) -> list[str]:
    """What plug-ins bring of a kind, by name. Imports nothing."""
    return sorted({entry.name for entry in distributions.entry_points(GROUPS[kind])})


def entry_of(use: Use) -> EntryPoint | None:
    """Who brings a row; None where nobody does. Imports nothing.

    Raises:
        BadData: two distributions do.
    """
    entries = [entry for entry in distributions.entry_points(GROUPS[use.kind]) if entry.name == use.name]
    if len(entries) > 1:
        who = " and ".join(f"`{entry.distribution}`" for entry in entries)
        raise BadData(
            f"{who} both bring a {use.kind} `{use.name}`, and a study could mean either",
            hint=f"uninstall one of them: `pip uninstall {entries[-1].distribution}`",
            code=MISMATCH,
        )
    return entries[0] if entries else None


def pins(uses: list[Use], pinned: dict[str, PluginSection], *, lab: bool, source: str) -> dict[str, PluginSection]:
    """The plug-ins that bring ``uses``, as they are installed here. Imports nothing.

    Args:
        pinned: what the study pins already, which must be what is installed.
        lab: also take what cannot be pinned, with a warning.

    Raises:
        BadData: a pinned plug-in is not installed, is another one here, or brings nothing of the study; one cannot be
            pinned; or two bring one row.
    """
    for name, section in pinned.items():
        if not (lab and not section.sha256):
            refuse_other(Plugin(name=name, version=section.version, sha256=section.sha256))
    brought: dict[str, list[Use]] = {}
    for use in uses:
        if (entry := entry_of(use)) is not None:
            brought.setdefault(entry.distribution, []).append(use)
    for name in pinned:
        if name not in brought:
            raise BadData(
                f"{source}: [plugins.{name}] is pinned, and no task, model or method of the study is its own",
                hint="take that table away; resolving writes what is needed",
                code=MISMATCH,
            )
    return {name: _pin(name, brought[name], lab=lab) for name in sorted(brought)}


def verify(uses: list[Use], pinned: dict[str, PluginSection]) -> None:
    """Check that the code of others which a study runs is pinned by it, and is what is installed, file by file; nothing
    is imported before that.

    Raises:
        BadData: it is not: as ``pins`` and ``pinned_imports.admit``.
        NeedsPerson: this process has imported another build.
    """
    for name, section in pins(uses, pinned, lab=False, source="study").items():
        if name not in pinned:
            raise BadData(
                f"the study names {', '.join(section.brings)} of plug-in {name} {section.version}, and does not pin it",
                hint="whoever created it does so where that plug-in is installed: its digest is part of the study",
                code=MISMATCH,
            )
    for name, section in pinned.items():
        pinned_imports.admit(refuse_other(Plugin(name=name, version=section.version, sha256=section.sha256)))


def with_method(pinned: dict[str, PluginSection], row: MethodRow, settings: MethodSettings) -> dict[str, PluginSection]:
    """The pins, and in that of the plug-in which brings the method what a coordinator must know of it."""
    brings = str(Use("method", row.name))
    aggregates: Literal["mean", "own"] = "mean" if (settings.server_wrapper or row.server) == MEAN else "own"
    about = PluginMethod(
        aggregates=aggregates, one_global_model=row.one_global_model, distills=row.public_data == COORDINATOR
    )
    return {
        name: section.model_copy(update={"method": about}) if brings in section.brings else section
        for name, section in pinned.items()
    }


def _pin(name: str, uses: list[Use], *, lab: bool) -> PluginSection:
    found = distributions.find(name)
    assert found is not None, "it has an entry point"
    if found.fault and lab:
        log.warning("plug-in %s: %s; this runs in the lab alone", found, found.fault)
    else:
        refuse_unpinned(found)
    return PluginSection(version=found.version, sha256=found.sha256, brings=tuple(sorted(str(use) for use in uses)))


def row(use: Use, form: type[Row]) -> Row | None:
    """The row that a plug-in brings; None where nobody brings it. Imports the plug-in, from the files that it brought.

    Raises:
        BadData: two bring it, its files are not what was installed, it cannot be imported, or what it brings is no
            such row.
        NeedsPerson: this process has imported another build of it.
    """
    entry = entry_of(use)
    if entry is None:
        return None
    distribution = distributions.find(entry.distribution)
    assert distribution is not None, "it has an entry point"
    if distribution.fault:
        _linked[entry.value.partition(":")[0].partition(".")[0]] = distribution
    else:
        pinned_imports.admit(distribution)
    found = load(entry.value)
    if not isinstance(found, form) or found.name != use.name:
        raise BadData(
            f"plug-in {distribution}: its entry point `{entry.name}` in {GROUPS[use.kind]} ({entry.value}) is no "
            f"{form.__name__} of that name",
            hint=f"tell whoever made it, or `pip uninstall {distribution.name}`; other studies are not affected",
            code=MISMATCH,
        )
    return found


def load(implementation: str) -> Any:
    """What "module:attribute" leads to, of a row of ours or of a plug-in's.

    Raises:
        BadData: it is a plug-in's and cannot be imported.
    """
    module, _, attribute = implementation.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
    except WardroundError:
        raise
    except Exception as error:
        owner = _owner(module)
        if owner is None:
            raise
        said = escaped(f"{type(error).__name__}: {error}", MOST_SHOWN)
        raise BadData(
            f"plug-in {owner} cannot be imported ({implementation}): {said}",
            hint=f"install it again with what it needs: `pip install --force-reinstall {owner.name}=={owner.version}`; "
            "other studies are not affected",
            code=MISMATCH,
        ) from error
    return found


def _owner(module: str) -> Distribution | None:
    top = module.partition(".")[0]
    pinned = (distribution for distribution in pinned_imports.admitted() if top in distribution.packages)
    return next(pinned, _linked.get(top))
