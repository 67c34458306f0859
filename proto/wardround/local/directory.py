"""Whose state directory a folder is. Every command of both programs ends with 78 where ``--state`` is not its own."""

import shlex
from pathlib import Path

from wardround.errors import NeedsPerson

SITE = Path("identity") / "site.json"
COORDINATOR = Path("config.toml")
AUTHORITY = Path("authority")


def quoted(path: Path) -> str:
    """A path as a word of a command that can be pasted."""
    return shlex.quote(str(path))


def exists(path: Path) -> bool:
    """Whether there is ``path``, a file or folder of a state directory.

    Raises:
        NeedsPerson: this user may not look there.
    """
    try:
        return path.exists()
    except PermissionError:
        raise NeedsPerson(
            f"this user may not read {path.parent}",
            hint="give the command as the user that the service runs as, or is it another --state?",
        ) from None


def refuse_other(root: Path, program: str) -> None:
    """Refuse a place where ``program`` cannot keep its things: a file, or the other program's directory.

    Raises:
        NeedsPerson: it is one.
    """
    what = ""
    if exists(root) and not root.is_dir():
        what = "is not a folder"
    elif program == "site-agent" and exists(root / AUTHORITY):
        what = "is a coordinator's state directory"
    elif program == "coordinator" and exists(root / SITE):
        what = "is a site's state directory"
    if what:
        raise NeedsPerson(f"{root} {what}", hint=f"give `{program}` another --state")
