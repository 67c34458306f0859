"""What is installed beside us: distributions by their metadata, a digest of what each brought, and whether its files
are still that. Nothing of theirs is imported here.

The digest is over what the wheel brought, as the installation's RECORD lists it: each file's path and SHA-256. Left out
is what differs from one machine to the next with the same wheel: notes of the installer, compiled bytecode, and
scripts outside the folder of packages. Whoever imports a distribution that is pinned reads its files by this list
(``fl_algorithms.plugins``): bytecode beside them and files that RECORD does not name are never executed.
"""

import base64
import csv
import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path, PurePosixPath

from wardround.errors import BadData

LONGEST_RECORD = 16 * 1024 * 1024  # characters
NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,98}[a-z0-9])?")  # of a distribution, normalized
VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]{0,63}")
OURS = "wardround"
log = logging.getLogger(__name__)
MISMATCH = "DECLINED_MODEL_MISMATCH"
OUR_PACKAGES = frozenset({"wardround", "coordinator", "site_agent", "fl_algorithms"})
AT_EVERY_START = frozenset({"sitecustomize.py", "usercustomize.py"})  # and *.pth: each Python process executes them
IMPORTABLE = (".py", *EXTENSION_SUFFIXES)
ABOUT = frozenset({"METADATA", "entry_points.txt"})  # what counts of its own folder of metadata


@dataclass(frozen=True)
class Distribution:
    """An installed distribution.

    Attributes:
        name: as its metadata have it, normalized: lower case, with "-" between words.
        folder: where its packages lie.
        files: path below ``folder`` -> SHA-256 (hex), of what its wheel brought.
        fault: why nothing can be pinned of it, "" where it can.
    """

    name: str
    version: str
    folder: Path
    files: Mapping[str, str] = field(default_factory=dict, repr=False)
    fault: str = ""

    @cached_property
    def sha256(self) -> str:
        """The digest (hex) of what was installed; "" where nothing can be pinned."""
        if self.fault:
            return ""
        return hashlib.sha256(
            "".join(f"{path} {self.files[path]}\n" for path in sorted(self.files)).encode()
        ).hexdigest()

    @property
    def packages(self) -> frozenset[str]:
        """The first names under which it can be imported."""
        return frozenset(_top(path) for path in self.files if not _about(path))

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True)
class EntryPoint:
    """What a distribution offers under a name: ``value`` is "module:attribute"."""

    name: str
    value: str
    distribution: str


def normalized(name: str) -> str:
    """A distribution's name as indexes compare them."""
    return re.sub(r"[-_.]+", "-", name).lower()


def find(name: str) -> Distribution | None:
    """The installed distribution of that name; None where there is none. Read anew each time."""
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    return described(found) if _name(found) else None  # a folder of metadata that was left without any


def entry_points(group: str) -> list[EntryPoint]:
    """What all other distributions than ours offer in a group, by name and distribution.

    One whose metadata cannot be read offers nothing, and is in nobody's way.
    """
    points = {point for found in metadata.distributions() for point in _points(found, group)}
    return sorted(points, key=lambda point: (point.name, point.distribution, point.value))


def _points(found: metadata.Distribution, group: str) -> list[EntryPoint]:
    try:
        if group not in (found.read_text("entry_points.txt") or ""):
            return []
        name = _name(found)
        offered = [EntryPoint(entry.name, entry.value, name) for entry in found.entry_points.select(group=group)]
    except Exception as error:  # of whatever form its file has, and Python's reader does not expect
        log.warning("%s: its entry points cannot be read: %s", found.locate_file(""), type(error).__name__)
        return []
    return offered if name not in ("", OURS) else []


def described(found: metadata.Distribution) -> Distribution:
    """A distribution from its metadata, of which nothing is believed that would lead out of its folder."""
    name, version, folder = _name(found), _text(found, "Version"), Path(str(found.locate_file("")))
    if not (NAME.fullmatch(name) and VERSION.fullmatch(version)):
        return Distribution(name, version, folder, fault="its metadata name no version of the usual form")
    if _is_editable(found):
        fault = "it is installed as a link to its sources (editable), which can change at any time"
        return Distribution(name, version, folder, fault=fault)
    try:
        return Distribution(name, version, folder, _files(found))
    except BadData as error:
        return Distribution(name, version, folder, fault=error.message)


def refuse_changed(distribution: Distribution) -> None:
    """Hash every file of a distribution that can be pinned.

    Raises:
        BadData: one is not what was installed, is gone, or lies among its packages without having come with it.
    """
    again = f"install it again: `pip install --force-reinstall --no-deps {distribution.name}=={distribution.version}`"
    for path, wanted in sorted(distribution.files.items()):
        found = _sha256(distribution.folder / path)
        if found != wanted:
            how = f"has SHA-256 {found[:12]}…, installed was {wanted[:12]}…" if found else "cannot be read"
            raise BadData(f"{distribution}: its file `{path}` {how}", hint=again, code=MISMATCH)
    for path in _among_packages(distribution):
        raise BadData(
            f"{distribution}: `{path}` lies among its files and did not come with it", hint=again, code=MISMATCH
        )


def _among_packages(distribution: Distribution) -> Iterator[str]:
    """Files in its own packages that it did not bring. Bytecode does not count: it is not executed."""
    own = {str(PurePosixPath(path).parent) for path in distribution.files if path.endswith("/__init__.py")}
    for package in sorted(own):
        for path in sorted((distribution.folder / package).rglob("*")):
            place = path.relative_to(distribution.folder).as_posix()
            if path.is_file() and place not in distribution.files and not _is_bytecode(place):
                yield place


def _files(found: metadata.Distribution) -> dict[str, str]:
    """Raises BadData: RECORD is missing, not of its form, or lists what cannot be pinned."""
    try:
        text = found.read_text("RECORD")
    except ValueError:
        raise BadData("its RECORD is not UTF-8 text") from None
    if text is None:
        raise BadData("it has no RECORD of its files: it was not installed from a wheel")
    if len(text) > LONGEST_RECORD:
        raise BadData(f"its RECORD has more than {LONGEST_RECORD} characters")
    files: dict[str, str] = {}
    try:
        rows = [row for row in csv.reader(text.splitlines(), strict=True) if row]
    except csv.Error:
        raise BadData("its RECORD is not a table of files") from None
    for row in rows:
        if len(row) != 3:
            raise BadData("its RECORD has a line that is not path, hash and size")
        path, digest, _ = row
        if not _counts(path):
            continue
        if path in files:
            raise BadData(f"its RECORD names `{path[:120]}` twice")
        files[path] = _hex(path, digest)
    _refuse_reach(files)
    return files


def _counts(path: str) -> bool:
    """Whether a line of RECORD says of the wheel what holds on every machine, and of a file below its folder."""
    place = PurePosixPath(path)
    outside = place.is_absolute() or ".." in place.parts or "\\" in path or str(place) != path
    return not (outside or _is_bytecode(path) or (_about(path) and place.name not in ABOUT))


def _refuse_reach(files: Mapping[str, str]) -> None:
    for path in files:
        if path in AT_EVERY_START or (path.endswith(".pth") and "/" not in path):
            raise BadData(f"it brings `{path[:120]}`, which every Python process executes at its start")
        top, slash, _ = path.partition("/")
        if _top(path) in OUR_PACKAGES:
            raise BadData(f"it brings `{path[:120]}`, a file among our own")
        if slash and path.endswith(IMPORTABLE) and f"{top}/__init__.py" not in files:
            raise BadData(f"its package `{top[:80]}` has no __init__.py, so that others can add to it")
    if not any(not _about(path) for path in files):
        raise BadData("its RECORD lists no file that could be imported")


def _hex(path: str, digest: str) -> str:
    kind, equals, value = digest.partition("=")
    try:
        decoded = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4))
    except ValueError:
        decoded = b""
    if kind != "sha256" or not equals or len(decoded) != 32:
        raise BadData(f"its RECORD has no SHA-256 of `{path[:120]}`")
    return decoded.hex()


def _name(found: metadata.Distribution) -> str:
    return normalized(_text(found, "Name"))


def _text(found: metadata.Distribution, key: str) -> str:
    """A line of its metadata; "" where it has none: a folder that some installer left half."""
    try:
        return str(found.metadata[key]) if key in found.metadata else ""
    except ValueError:  # not UTF-8
        return ""
    except FileNotFoundError:  # without a METADATA, where a library has put the backport in place of Python's own
        return ""


def _is_editable(found: metadata.Distribution) -> bool:
    try:
        origin = json.loads(found.read_text("direct_url.json") or "{}")
    except (ValueError, RecursionError):
        return False
    about = origin.get("dir_info") if isinstance(origin, dict) else None
    return isinstance(about, dict) and about.get("editable") is True


def _is_bytecode(path: str) -> bool:
    place = PurePosixPath(path)
    return place.suffix == ".pyc" and place.parent.name == "__pycache__"


def _about(path: str) -> bool:
    return _top(path).endswith(".dist-info")


def _top(path: str) -> str:
    first, slash, _ = path.partition("/")
    return first if slash else first.partition(".")[0]


def _sha256(path: Path) -> str:
    """Of a file; "" where it cannot be read: it is gone, or a pipe, or has a name that no file can have."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):
        return ""
