"""The form of a site's state directory, by a number in ``format.json``: an older one is brought forward, a newer one
refused.

Before anything is changed, what the gateway owns is copied to ``before-format-N``, and stays there. The trainer's
folder ``studies`` is not touched: its files are named by digest and never changed in place. A step may be done again
after a crash in the middle of it: the number is written when all steps are done.
"""

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from wardround import __version__
from wardround.errors import BadData, NeedsPerson
from wardround.local import durable
from wardround.signing import canonical

FORMAT = 1  # of this version
STEPS: Mapping[int, Callable[[Path], None]] = {}  # number -> brings a directory of that form to the next one
KEPT = (  # not `secure`: what is masked twice under one secret has a difference without a mask
    "identity", "offers", "previews", "consents", "policies", "journal", "ledger", "policy.toml", "data.toml",
    "receipts.jsonl", "peers.json", "commitments", "format.json",
)  # fmt: skip
log = logging.getLogger(__name__)


def refuse_newer(root: Path) -> None:
    """Refuse a directory that a newer version has changed.

    Raises:
        NeedsPerson: it has.
    """
    number, version = _format_of(root)
    if number > FORMAT:
        raise NeedsPerson(
            f"{root} was written by wardround {version} (format {number}), which this version {__version__} "
            f"(format {FORMAT}) cannot read; nothing was changed",
            hint=f"install the newer version again, or put back the copy in {root / f'before-format-{FORMAT}'}",
        )


def bring_forward(root: Path) -> None:
    """Bring a directory of an older version to this one's form, with a copy kept. The caller holds its lock.

    Raises:
        NeedsPerson: a newer version has changed it.
        CannotWrite: there is no room for the copy; nothing was changed.
    """
    refuse_newer(root)
    number, version = _format_of(root)
    if number < FORMAT:
        kept = _kept(root, number)
        for step in range(number, FORMAT):
            STEPS[step](root)
        log.warning("%s was of wardround %s; it is of %s now, and %s is a copy", root, version, __version__, kept)
    if (number, version) != (FORMAT, __version__):
        durable.write_file(_file(root), canonical.dumps({"format": FORMAT, "version": __version__}))


def _kept(root: Path, number: int) -> Path:
    """Copy what the gateway owns, whole or not at all; a copy that is there is left as it is."""
    copy = root / f"before-format-{number}"
    if copy.exists():
        return copy
    partial = root / f"before-format-{number}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    durable.make_folder(partial)
    for name in (*KEPT, *sorted(path.name for path in root.glob("ledger-*"))):  # what was signed before a rollover
        if (root / name).is_dir():
            shutil.copytree(root / name, partial / name)
        elif (root / name).exists():
            shutil.copy2(root / name, partial / name)
    for path in sorted(partial.rglob("*")):
        durable.sync_folder(path) if path.is_dir() else durable.sync_file(path)
    durable.move(partial, copy)
    return copy


def _format_of(root: Path) -> tuple[int, str]:
    """The number and version in ``format.json``; a directory without one is of the first form."""
    path = _file(root)
    if not path.exists():
        return 1, ""
    try:
        document = json.loads(path.read_bytes())
        return int(document["format"]), str(document["version"])[:40]
    except (OSError, ValueError, KeyError, TypeError):
        raise BadData(f"{path} is damaged", hint="restore it from a backup") from None


def _file(root: Path) -> Path:
    return root / "format.json"
