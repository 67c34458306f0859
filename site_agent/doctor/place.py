"""What lies in the state directory, who owns it, and whether the two users of a site can work together in it."""

import datetime
import grp
import json
import os
import pwd
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from site_agent.state.directory import GATEWAY_FOLDERS, SiteState
from wardround import checkup
from wardround.checkup import Finding, ok, owner, problem, warning

KEYS = ("key.pem", "ledger_key.pem", "proxy")
TAIL = 64 * 1024  # bytes of the ledger's end, in which its last line lies
LEDGER = "000001.jsonl"


@dataclass(frozen=True)
class Place:
    """A file or folder, as the kernel has it."""

    path: Path
    uid: int
    gid: int
    mode: int


def place_of(path: Path) -> Place | None:
    """None where there is nothing."""
    try:
        found = path.stat()
    except OSError:
        return None
    return Place(path, found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode))


def keys(identity: Path, uid: int) -> list[Finding]:
    """Whether the keys are this user's alone."""
    return owner([identity / name for name in KEYS], uid) or checkup.private([identity / name for name in KEYS])


def folders(here: SiteState, uid: int) -> list[Finding]:
    """Whether the gateway's own folders are its user's."""
    return owner([here.root / name for name in GATEWAY_FOLDERS], uid)


def users(
    gateway_uid: int, trainer_uid: int, groups: Collection[int], places: Mapping[str, Place | None]
) -> list[Finding]:
    """Whether gateway and trainer can work together, and are apart.

    Args:
        groups: those that the trainer's user is in.
        places: "state", "staging", "studies" and "data.toml".
    """
    if trainer_uid == gateway_uid:
        who = f"one user ({user_name(gateway_uid)}) for gateway and trainer"
        fix = "give each a user of its own: `deploy/systemd/install site` makes them"
        return [warning("users", f"{who}: the kernel does not keep the gateway from the patients' files", fix)]
    trainer = user_name(trainer_uid)
    findings = []
    state, staging, studies, data = (places[name] for name in ("state", "staging", "studies", "data.toml"))
    if state is not None and not _may(state, trainer_uid, groups, 0o1):
        findings.append(_closed(state, trainer, "may not pass through", "g+x"))
    if staging is not None and not _may(staging, trainer_uid, groups, 0o7):
        findings.append(_closed(staging, trainer, "may not write in", "2770"))
    if data is not None and not _may(data, trainer_uid, groups, 0o4):
        findings.append(_closed(data, trainer, "may not read", "640"))
    if studies is not None and studies.uid != trainer_uid:
        findings.append(
            problem(
                "permissions",
                f"{studies.path} belongs to {user_name(studies.uid)}, and the trainer runs as {trainer}",
                f"`chown -R {trainer} {studies.path}`, if it was the trainer's before",
            )
        )
    return findings or [ok("users", f"gateway {user_name(gateway_uid)}, trainer {trainer}")]


def _closed(place: Place, trainer: str, what: str, mode: str) -> Finding:
    return problem(
        "permissions",
        f"user {trainer} {what} {place.path} (mode {place.mode:o}, group {_group_name(place.gid)})",
        f"`chmod {mode} {place.path}`, and put {trainer} into group {_group_name(place.gid)}",
    )


def _may(place: Place, uid: int, groups: Collection[int], bits: int) -> bool:
    """Whether a user has all of ``bits`` (rwx) there."""
    if uid == 0:
        return True
    shift = 6 if place.uid == uid else 3 if place.gid in groups else 0
    return (place.mode >> shift) & bits == bits


def groups_of(uid: int) -> set[int]:
    """The groups of a user, as this machine lists them; none of a user that it does not know."""
    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return set()
    return set(os.getgrouplist(user.pw_name, user.pw_gid))


def user_name(uid: int) -> str:
    """Its name, or its number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def service(here: SiteState) -> Finding:
    """Whether the service runs, or a process holds its place without answering."""
    return checkup.service(here.root, here.control, "site-agent", "no round is taken part in", "`site-agent run`")


def last_line(ledger: Path) -> datetime.datetime | None:
    """When the ledger's last whole line was written; None where there is none, or it is none (`audit verify`)."""
    try:
        with (ledger / LEDGER).open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL))
            lines = file.read().split(b"\n")
        return datetime.datetime.fromisoformat(json.loads(lines[-2])["ts"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None
