"""Importing what a plug-in brought and nothing else: each file is executed as the bytes whose SHA-256 its RECORD has.

    1. every file of the distribution is hashed                      (``distributions.refuse_changed``)
    2. its packages are found by RECORD alone: a module that lies beside them and did not come with them does not exist,
       and another folder of the search path cannot stand before them
    3. a module is compiled from the bytes that were hashed; bytecode on disk is never read

What a plug-in's own code reads or imports besides (its data files after step 1, other distributions, torch) is not
looked at here.
"""

import hashlib
import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from wardround.errors import NeedsPerson
from wardround.local.distributions import IMPORTABLE, Distribution, refuse_changed


class _Source(SourceFileLoader):
    """A module whose source has this SHA-256."""

    def __init__(self, name: str, path: str, sha256: str) -> None:
        super().__init__(name, path)
        self.sha256 = sha256

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        _refuse_other(fullname, source, self.sha256)
        code = self.source_to_code(source, self.path)
        assert isinstance(code, CodeType)
        return code


class _Extension(ExtensionFileLoader):
    """A compiled module whose file has this SHA-256."""

    def __init__(self, name: str, path: str, sha256: str) -> None:
        super().__init__(name, path)
        self.sha256 = sha256

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        _refuse_other(spec.name, Path(self.path).read_bytes(), self.sha256)
        return super().create_module(spec)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of the distributions that were admitted to this process."""

    def __init__(self) -> None:
        self.admitted: dict[str, Distribution] = {}  # by name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for distribution in self.admitted.values():
            if fullname.partition(".")[0] in distribution.packages:
                spec = _spec(fullname, distribution)
                if spec is not None:
                    return spec
                if _is_whole(fullname.rpartition(".")[0], distribution):
                    raise ModuleNotFoundError(f"{distribution} did not bring a module {fullname!r}", name=fullname)
        return None


_FINDER = _Finder()


def admit(distribution: Distribution) -> None:
    """From here on this process imports the packages of ``distribution`` from the files that it brought.

    Raises:
        BadData: one of its files is not what was installed.
        NeedsPerson: this process has imported another build of it, or a module of its name otherwise.
    """
    before = _FINDER.admitted.get(distribution.name)
    if before is not None and before.sha256 != distribution.sha256:
        raise NeedsPerson(
            f"plug-in {distribution.name} is {distribution.version} now, and this process has imported "
            f"{before.version} (SHA-256 {before.sha256[:12]}…)",
            hint="start it again, so that it imports the one that is installed",
            code="DECLINED_MODEL_MISMATCH",
        )
    refuse_changed(distribution)
    _refuse_imported(distribution)
    _FINDER.admitted[distribution.name] = distribution
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def _refuse_imported(distribution: Distribution) -> None:
    """Raises NeedsPerson: a module of its names is in memory that came otherwise, as where another plug-in imported it
    before it was pinned: nobody looked at what was executed.
    """
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] not in distribution.packages:
            continue
        spec = getattr(module, "__spec__", None)
        if spec is not None and spec.origin is None and spec.submodule_search_locations is not None:
            continue  # a folder inside a package: nothing was executed
        loader = getattr(spec, "loader", None)
        if not (isinstance(loader, _Source | _Extension) and _brought(loader, distribution)):
            raise NeedsPerson(
                f"plug-in {distribution}: this process has imported a module `{name}` before, and not from what "
                f"{distribution.name} brought",
                hint="start it again, so that it imports the one that is pinned",
                code="DECLINED_MODEL_MISMATCH",
            )


def _brought(loader: _Source | _Extension, distribution: Distribution) -> bool:
    """Whether it is the distribution whose file a module was executed from, in these bytes."""
    place = Path(loader.path)
    inside = place.is_relative_to(distribution.folder)
    return inside and distribution.files.get(place.relative_to(distribution.folder).as_posix()) == loader.sha256


def admitted() -> list[Distribution]:
    """What was admitted to this process."""
    return list(_FINDER.admitted.values())


class Admitted:
    """What this process admitted. Where it is unpickled, that is admitted too, before what is unpickled after it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _admit_again, (tuple(admitted()),)


def _admit_again(distributions: tuple[Distribution, ...]) -> Admitted:
    for distribution in distributions:
        admit(distribution)
    return Admitted()


def _spec(fullname: str, distribution: Distribution) -> ModuleSpec | None:
    """Where RECORD has this module; None where it has none."""
    place = fullname.replace(".", "/")
    package, module = f"{place}/__init__.py", f"{place}.py"
    for path in (package, module):
        if path in distribution.files:
            file = distribution.folder / path
            loader = _Source(fullname, str(file), distribution.files[path])
            inside = [str(file.parent)] if path == package else None
            return spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=inside)
    for path in (f"{place}{suffix}" for suffix in EXTENSION_SUFFIXES):
        if path in distribution.files:
            extension = _Extension(fullname, str(distribution.folder / path), distribution.files[path])
            return spec_from_file_location(fullname, distribution.folder / path, loader=extension)
    if any(path.startswith(f"{place}/") and path.endswith(IMPORTABLE) for path in distribution.files):
        inner = ModuleSpec(fullname, None, is_package=True)  # a folder inside a package, without ``__init__``
        inner.submodule_search_locations = [str(distribution.folder / place)]
        return inner
    return None


def _is_whole(package: str, distribution: Distribution) -> bool:
    """Whether ``package`` is the distribution's own, and no folder that others share."""
    return f"{package.replace('.', '/')}/__init__.py" in distribution.files


def _refuse_other(name: str, data: bytes, sha256: str) -> None:
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ImportError(f"the file of {name} is not what was installed", name=name)
