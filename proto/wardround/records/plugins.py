"""The code of others that a study runs, as resolving writes it down: which distribution, and the digest of its files.

Plain data, which coordinator and gateway read without importing any of that code.
"""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from wardround.errors import BadData
from wardround.local import distributions
from wardround.local.distributions import MISMATCH, NAME, VERSION, Distribution
from wardround.records.schema import Strict

MOST = 64  # plug-ins of one study
ROW = r"^(task|model|method) [^\s`]{1,60}$"


def _version(version: str) -> str:
    if not VERSION.fullmatch(version):
        raise ValueError(f"{version[:64]!r} is no version")
    return version


Version = Annotated[str, AfterValidator(_version)]


class PluginMethod(Strict):
    """What a coordinator has to know of a plug-in's method, which is not installed there, or not allowed to run.

    Attributes:
        aggregates: "mean", or "own": by code of the plug-in, which the coordinator must have and allow.
        one_global_model: whether its sites' losses judge one model.
        distills: whether the coordinator distills on the study's public data set.
    """

    aggregates: Literal["mean", "own"] = "mean"
    one_global_model: bool = Field(default=False, strict=True)
    distills: bool = Field(default=False, strict=True)


class PluginSection(Strict):
    """``[plugins.NAME]``: a distribution other than ours whose code a study runs. NAME is normalized.

    Attributes:
        version: the one that is installed.
        sha256: over the files that it brought, as ``wardround.local.distributions`` has it; "" of what cannot be
            pinned, which runs in the lab alone.
        brings: which rows of the study are its own, each as "model lungnet".
    """

    version: Version
    sha256: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    brings: tuple[Annotated[str, Field(pattern=ROW)], ...] = Field(default=(), max_length=MOST)
    method: PluginMethod | None = None


class Plugin(Strict):
    """One plug-in as a person allows it: ``{ name = "...", version = "...", sha256 = "..." }``. What a study names
    without a digest, nobody can allow.
    """

    name: str
    version: Version
    sha256: str = Field(pattern=r"^([0-9a-f]{64})?$")

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        if not NAME.fullmatch(name):
            raise ValueError(f"{name[:100]!r} is not a distribution's name: a-z, 0-9 and - between words")
        return name

    @property
    def line(self) -> str:
        """As it stands in ``allow``."""
        return f'{{ name = "{self.name}", version = "{self.version}", sha256 = "{self.sha256}" }}'

    def __str__(self) -> str:
        return f"{self.name} {self.version}, " + (f"SHA-256 {self.sha256}" if self.sha256 else "which is not pinned")


class PluginTable(Strict):
    """``[plugins]``: which may run here. None, unless a person writes it."""

    allow: tuple[Plugin, ...] = ()

    @model_validator(mode="after")
    def _once(self) -> Self:
        if len(set(self.allow)) != len(self.allow):
            raise ValueError("a plug-in stands twice in `allow`")
        for plugin in self.allow:
            if not plugin.sha256:
                raise ValueError(f"`allow` has no `sha256` for {plugin.name} {plugin.version}: a version pins no code")
        return self

    def allows(self, plugin: Plugin) -> bool:
        """Exactly this name, version and digest."""
        return plugin in self.allow

    def instead(self, plugin: Plugin) -> str:
        """What of that name is allowed, in words."""
        others = [
            f"{other.version} (SHA-256 {other.sha256[:12]}…)" for other in self.allow if other.name == plugin.name
        ]
        return f"plugins.allow has {plugin.name} {', '.join(others)}" if others else "no rule of plugins.allow names it"


def plugin_names(plugins: dict[str, PluginSection]) -> dict[str, PluginSection]:
    """Raises ValueError: one is not called as distributions are."""
    for name in plugins:
        if not NAME.fullmatch(name):
            raise ValueError(f"{name[:100]!r} is not a distribution's name: a-z, 0-9 and - between words")
    return plugins


def plugins_of(sections: dict[str, PluginSection]) -> tuple[Plugin, ...]:
    """The plug-ins of a study, by name."""
    return tuple(
        Plugin(name=name, version=section.version, sha256=section.sha256) for name, section in sorted(sections.items())
    )


def refuse_other(plugin: Plugin) -> Distribution:
    """The installed distribution that a study pins, by its metadata: its files are not looked at, and nothing is
    imported.

    Raises:
        BadData: it is not installed, or is another version or build, or nothing of it can be pinned.
    """
    found, what = distributions.find(plugin.name), f"plug-in {plugin.name}"
    if found is None:
        raise BadData(
            f"{what} {plugin.version} is not installed here",
            hint=f"`pip install --no-deps {plugin.name}=={plugin.version}` where the trainer runs",
            code=MISMATCH,
        )
    refuse_unpinned(found)
    if found.version != plugin.version:
        raise BadData(
            f"{what} is {found.version} here, the study pins {plugin.version}",
            hint=f"`pip install --no-deps {plugin.name}=={plugin.version}`; or the study is created anew with "
            f"{found.version}, and approved again",
            code=MISMATCH,
        )
    if found.sha256 != plugin.sha256:
        raise BadData(
            f"{what} {plugin.version} has SHA-256 {found.sha256[:12]}… here, the study pins {plugin.sha256[:12]}…: "
            "another build under one version",
            hint="install the wheel with which the study was created; or it is created anew, and approved again",
            code=MISMATCH,
        )
    return found


def refuse_unpinned(found: Distribution) -> None:
    """Raises BadData: nothing of an installed distribution can be pinned."""
    if found.fault:
        raise BadData(
            f"plug-in {found} cannot be pinned: {found.fault}",
            hint="build a wheel of it (`pip wheel --no-deps DIR`) and install that",
            code=MISMATCH,
        )
