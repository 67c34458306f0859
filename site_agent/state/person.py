"""Which person is behind a command. The account that it runs as is often the service's own, and nobody's name.

    loginuid   the kernel's word on who logged in; only a privileged program can set it, and only once
    sudo       SUDO_UID in the environment: whoever is that account could write it too
    polkit     PKEXEC_UID, likewise
    account    nobody else is known: the account itself

The first that is there is taken, and its name kept beside the person's, with the account.
"""

import os
import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Any

UNSET = 2**32 - 1  # of a process that no login began: a service, a container
NOBODY_ELSE = "account"


def who() -> dict[str, Any]:
    """The person at this command: name, uid, ``source`` as above, and the ``account`` that it runs as."""
    return judged(login_of("self"), os.environ, os.geteuid())


def behind(claimed: dict[str, Any], pid: int, uid: int) -> dict[str, Any]:
    """The person whom a command names, as far as the kernel bears it out.

    Args:
        claimed: what ``who`` gave in the command's process.
        pid, uid: of that process, by the kernel.
    """
    login = login_of(str(pid))
    if login is not None:
        return judged(login, {}, uid)
    return {**claimed, "account": _user(uid)}


def text(by: Mapping[str, Any]) -> str:
    """A person as people read it: "dpo", or "dpo (sudo), as wardround" where the account is another."""
    account = by.get("account", {}).get("name", by["name"])
    source = by.get("source", "by its own word")
    return str(by["name"]) if account == by["name"] else f"{by['name']} ({source}), as {account}"


def judged(login: int | None, environment: Mapping[str, str], account: int) -> dict[str, Any]:
    """``who``, from a login's uid if the kernel has one, the environment and the account's uid."""
    found = [("loginuid", login)]
    found += [("sudo", _uid(environment, "SUDO_UID")), ("polkit", _uid(environment, "PKEXEC_UID"))]
    source, uid = next(((source, uid) for source, uid in found if uid is not None), (NOBODY_ELSE, account))
    return {**_user(uid), "source": source, "account": _user(account)}


def login_of(process: str) -> int | None:
    """The uid with which the login of a process began; None where there was none, or no kernel that says."""
    try:
        uid = int(Path(f"/proc/{process}/loginuid").read_text())
    except (OSError, ValueError):
        return None
    return None if uid == UNSET else uid


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def _user(uid: int) -> dict[str, Any]:
    return {"name": user_name(uid), "uid": uid}


def _uid(environment: Mapping[str, str], name: str) -> int | None:
    written = environment.get(name, "")
    return int(written) if written.isascii() and written.isdigit() and int(written) < UNSET else None
