"""Is what a site trains on still there and the same? A cheap answer from the files' status, and a sure one.

The cheap one reads no patient: the size, time and inode of each file, and what data.toml says. The gateway cannot see
even that, so it asks the trainer, and compares with what stood in the answer when the data was approved.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from site_agent.trainer.data.sources import DataSource, digest_now, source, weights_now
from wardround.signing import canonical


def look(state: Path, name: str) -> dict[str, Any]:
    """How the data called ``name`` lies there now.

    Returns:
        ``data`` and ``weights``: a digest over the files' status, "" where none are named. ``bytes`` of the data.
        ``missing``, ``unreadable``: the keys of data.toml whose files are gone, or cannot be looked at by this user.

    Raises:
        UsageProblem: there is no data of that name.
    """
    return at(source(state, name))


def at(named: DataSource) -> dict[str, Any]:
    """``look``, at what ``named`` says."""
    found: dict[str, Any] = {"bytes": 0, "missing": [], "unreadable": []}
    paths = {**named.paths, **({"public_data": Path(named.public_data)} if named.public_data is not None else {})}
    rows = [(role, *row) for role, path in paths.items() for row in _status(role, path, found)]
    found["bytes"] = sum(row[2] for row in rows)
    said = {key: text for key, text in named.told().items() if key not in ("digest", "weights")}
    found["data"] = canonical.digest({"named": said, "files": sorted(rows)})
    weights = [] if named.weights is None else list(_status("weights", Path(named.weights), found))
    found["weights"] = canonical.digest([named.weights, weights]) if named.weights is not None else ""
    return found


def digests(state: Path, name: str) -> dict[str, str]:
    """The digests of the data called ``name`` and of its weights, from every byte. Raises BadData: one is not read."""
    named = source(state, name)
    return {"digest": digest_now(named), "weights": weights_now(named)}


def _status(role: str, path: Path, found: dict[str, Any]) -> Iterator[tuple[str, int, str, str]]:
    """Name, size, time and inode of a file, or of each below a folder. Where that cannot be had, ``found`` says so."""
    try:
        files = [path] if not path.is_dir() else [Path(at, name) for at, _, names in os.walk(path) for name in names]
        for file in files:
            status = file.stat()
            name = file.relative_to(path).as_posix() if file != path else ""
            yield name, status.st_size, str(status.st_mtime_ns), str(status.st_ino)
    except FileNotFoundError:
        found["missing"].append(role)
    except OSError:
        found["unreadable"].append(role)
