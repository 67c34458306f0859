"""What a person asked to be written with ``--out``: never over something that they have, unless they say so.

    a file that is there     only with --force
    a folder                 new or empty, or with --force
    a state directory        never: keys, ledgers, consents, policies and models are the programs' own
    registered data          never, by whatever name: files are compared as the kernel knows them, through links too

Whoever writes asks here, in the process that writes: the user, and so what may be written, may be another.
"""

import errno
import os
import pwd
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from wardround.errors import CannotWrite, NotPermitted
from wardround.local.durable import make_folder, remove, write_file, write_files
from wardround.local.half_written import becomes, is_half_written
from wardround.local.writing import Buffer
from wardround.terminal import escaped

MARKS = (("identity", "site.json"), ("identity", "key.pem"), ("ledger", "000001.jsonl"), ("authority", "key.pem"))
ELSEWHERE = "write it elsewhere"
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")


def inert(text: str) -> str:
    """A cell that no spreadsheet runs: text that begins as a formula, and is no number, has an apostrophe before it.
    It is on one line, since what follows a line's end may be read as another cell.

    Source: OWASP, CSV injection. https://owasp.org/www-community/attacks/CSV_Injection
    """
    return "'" + escaped(text) if text.startswith(FORMULA) and not _NUMBER.fullmatch(text) else escaped(text)


def file(out: Path, *, force: bool, keep: Iterable[Path] = ()) -> Path:
    """``out``, if a file may be written there.

    Args:
        keep: files and folders that are never written onto: a state directory, registered data.

    Raises:
        NotPermitted: it is one of those, lies in one, or in any state directory; or this user may not write there.
        CannotWrite: it exists, and ``force`` is not given; it is a folder, or its folder is missing.
    """
    _refuse_unreachable(out)
    _refuse_kept(out, keep)
    if out.is_dir():
        raise CannotWrite(f"{out} is a folder, a file is to be written", hint=f"--out {out}/NAME")
    if not force and os.path.lexists(out):
        raise CannotWrite(f"{out} exists already; nothing was written", hint="another name, or --force to replace it")
    _refuse_unwritable(out.parent)
    return out


def folder(out: Path, *, force: bool, keep: Iterable[Path] = (), goes_on: str = "") -> Path:
    """``out``, if files may be written into such a folder, which need not exist. What a killed command had half written
    there does not count.

    Args:
        goes_on: the name of a file that says that what lies there was begun by the same command.

    Raises:
        NotPermitted, CannotWrite: as ``file`` does; an empty folder may exist.
    """
    _refuse_unreachable(out)
    _refuse_kept(out, keep)
    if os.path.lexists(out) and not out.is_dir():
        raise CannotWrite(f"{out} is a file, a folder is to be written", hint=ELSEWHERE)
    begun = bool(goes_on) and (out / goes_on).exists()
    if out.is_dir():
        _refuse_unwritable(out)
        if not (force or begun) and not all(map(is_half_written, out.iterdir())):
            raise CannotWrite(
                f"{out} exists already and is not empty; nothing was written",
                hint="a new or an empty folder, or --force to replace what has the same names",
            )
        return out
    _refuse_unwritable(next(parent for parent in out.absolute().parents if os.path.lexists(parent)))
    return out


def either(out: Path, *, force: bool, keep: Iterable[Path] = ()) -> Path:
    """``out``, where whoever writes will know whether it is a file or a folder: what holds for both."""
    _refuse_unreachable(out)
    if out.is_dir():
        _refuse_kept(out, keep)
        return out
    return file(out, force=force, keep=keep)


def write(
    out: Path, data: Buffer | Iterable[Buffer], *, force: bool, keep: Iterable[Path] = (), mode: int = 0o600
) -> None:
    """``file``, and ``data`` into it, whole or not at all. Without ``force`` nobody's file is replaced, however quick.

    Raises:
        NotPermitted, CannotWrite: as ``file`` does.
    """
    write_file(file(out, force=force, keep=keep), data, mode=mode, replace=force)


def fill(
    place: Path,
    files: Mapping[str, Buffer | Iterable[Buffer]],
    *,
    force: bool,
    keep: Iterable[Path] = (),
    mode: int = 0o600,
) -> list[Path]:
    """Write files by their names into the folder ``place``, all or none; the last is there beside all others alone.
    A folder that had to be made is gone again where it got none. Returns the files.

    Raises:
        NotPermitted, CannotWrite: as ``file`` does.
    """
    made, kept = not place.is_dir(), list(keep)
    make_folder(place)
    for path in list(place.iterdir()):
        if becomes(path) in files:
            remove(path)
    try:
        write_files(
            {file(place / name, force=force, keep=kept): files[name] for name in files}, mode=mode, replace=force
        )
    except BaseException:
        if made:
            with suppress(OSError):
                place.rmdir()
        raise
    return [place / name for name in files]


def _refuse_unreachable(out: Path) -> None:
    try:
        out.stat()
    except PermissionError:
        raise NotPermitted(
            f"user `{_user()}`, who writes it, may not enter the folder of {out}",
            hint="name a folder that this user may write in; beside patients it is the trainer's user who writes",
        ) from None
    except (OSError, RuntimeError):
        pass  # not there, or a link that leads nowhere: the next steps say so


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _refuse_kept(out: Path, keep: Iterable[Path]) -> None:
    place = _real(out)
    for above in (place, *place.parents):
        if any(above.joinpath(*mark).exists() for mark in MARKS):
            raise NotPermitted(
                f"{out} lies in the state directory {above}, where only the programs write", hint=ELSEWHERE
            )
    target = _identity(out)
    for kept in keep:
        if place.is_relative_to(_real(kept)):
            raise NotPermitted(f"{out} is {kept}, or lies in it, and is never written over", hint=ELSEWHERE)
        if target is not None and target in _identities(kept):
            raise NotPermitted(f"{out} is another name of a file of {kept}, and is never written over", hint=ELSEWHERE)


def _refuse_unwritable(place: Path) -> None:
    if not place.is_dir():
        what = "is not a folder" if os.path.lexists(place) else "does not exist"
        raise CannotWrite(f"{place} {what}", hint=f"make it first, or {ELSEWHERE}")
    if not os.access(place, os.W_OK | os.X_OK):
        raise NotPermitted(f"user `{_user()}` may not write in {place}", hint=ELSEWHERE)


def _real(path: Path) -> Path:
    """The path without links; where it cannot be followed (a loop, a folder that may not be read), as it is written."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path.absolute()


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of what ``path`` leads to."""
    try:
        status = path.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG):
            return None
        raise CannotWrite(f"{path}: {error.strerror}", hint=ELSEWHERE) from None
    return status.st_dev, status.st_ino


def _identities(kept: Path) -> set[tuple[int, int]]:
    """Those of a file, or of every file below a folder."""
    identities = {_identity(kept)}
    with suppress(OSError):
        identities |= {_identity(path) for path in kept.rglob("*") if kept.is_dir()}
    return {identity for identity in identities if identity is not None}
