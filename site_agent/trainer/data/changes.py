"""Is what a site trains on still there and the same? A cheap answer from the files' status, and a sure one.

The cheap one reads no patient: the size, time and inode of each file, and what data.toml has. The gateway cannot see
even that, so it asks the trainer, and compares with the answer at the time when the data was approved.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from site_agent.trainer.data.sources import DataSource, digest_now, source, weights_now
from wardround.records.trainer import FileDigests, FilesStat, FilesStatus
from wardround.signing import canonical


def stat_files(state: Path, name: str) -> FilesStat:
    """How the files of the data called ``name`` lie there now.

    Raises:
        UsageProblem: there is no data of that name.
    """
    return stat(source(state, name))


def stat(named: DataSource) -> FilesStat:
    """``stat_files``, of the files that ``named`` has."""
    missing: list[str] = []
    unreadable: list[str] = []

    def status_of(role: str, path: Path) -> Iterator[tuple[str, int, str, str]]:
        try:
            yield from _status(path)
        except FileNotFoundError:
            missing.append(role)
        except OSError:
            unreadable.append(role)

    paths = {**named.paths, **({"public_data": Path(named.public_data)} if named.public_data is not None else {})}
    rows = sorted((role, *row) for role, path in paths.items() for row in status_of(role, path))
    entry = {key: text for key, text in named.entry().items() if key not in ("digest", "weights")}
    weights = ""
    if named.weights is not None:
        weights = canonical.digest([named.weights, list(status_of("weights", Path(named.weights)))])
    return FilesStat(
        status=FilesStatus(data=canonical.digest({"named": entry, "files": rows}), weights=weights),
        bytes=sum(size for _, _, size, _, _ in rows), missing=missing, unreadable=unreadable,
    )  # fmt: skip


def hash_files(state: Path, name: str) -> FileDigests:
    """The digests of the data called ``name`` and of its weights, from every byte. Raises BadData: one is not read."""
    named = source(state, name)
    return FileDigests(data=digest_now(named), weights=weights_now(named))


def _status(path: Path) -> Iterator[tuple[str, int, str, str]]:
    """Name, size, time and inode of a file, or of each below a folder. Raises OSError: that cannot be had."""
    files = [path] if not path.is_dir() else [Path(at, name) for at, _, names in os.walk(path) for name in names]
    for file in files:
        status = file.stat()
        name = file.relative_to(path).as_posix() if file != path else ""
        yield name, status.st_size, str(status.st_mtime_ns), str(status.st_ino)
