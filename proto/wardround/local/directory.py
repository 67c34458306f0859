"""Where a program keeps its state, and whose state directory a folder is.

Every command of both programs ends with 78 where ``--state`` is not its own.
"""

import os
import shlex
from pathlib import Path

from wardround.errors import NeedsPerson

SITE = Path("identity") / "site.json"
COORDINATOR = Path("config.toml")
AUTHORITY = Path("authority")
SYSTEM = Path("/var/lib/wardround")  # where `deploy/systemd/install` makes the folders of services
ROLES = {"site-agent": "site", "coordinator": "coordinator"}


def default_state(program: str) -> Path:
    """Where ``program`` keeps its things unless ``--state`` or WARDROUND_STATE says otherwise.

    The folder of the service that is installed on this machine, if there is one; else this user's own, by the XDG base
    directory specification. https://specifications.freedesktop.org/basedir-spec/
    """
    role = ROLES[program]
    if os.path.lexists(SYSTEM / role):
        return SYSTEM / role
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not base.is_absolute():
        base = Path.home() / ".local" / "state"
    return base / "wardround" / role


def described_default(program: str) -> str:
    """The same in words, for the help of a command."""
    return f"{SYSTEM / ROLES[program]} where that exists, else ~/.local/state/wardround/{ROLES[program]}"


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
