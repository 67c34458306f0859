"""Finds and opens the files of a site's ledgers: in folders, or in a bundle that is held in memory.

An agent may be writing. It writes lines first and signs them then, so how far the signed heads go is looked at before a
line is read: each of those heads covers lines that are there.
"""

import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from wardround.errors import Unavailable

HEADS = "heads.jsonl"
SEGMENT = re.compile(r"[0-9]+\.jsonl")
LEDGER_ID = re.compile(r"[0-9a-f]{32}")


class NoLedger(Unavailable):
    """There is nothing to read, which is another thing than what cannot be read."""


@dataclass(frozen=True)
class LedgerFiles:
    """One ledger: its segments in their order, and its signed heads with how many bytes of them count."""

    name: str
    segments: tuple[tuple[str, Callable[[], BinaryIO]], ...]
    heads: Callable[[], BinaryIO] = io.BytesIO
    heads_bytes: int = 0

    def signatures(self) -> Iterator[bytes]:
        """The whole lines of the signed heads, as far as they went at first."""
        with self.heads() as file:
            left = self.heads_bytes
            for line in file:
                left -= len(line)
                if left < 0 or not line.endswith(b"\n"):
                    return
                yield line[:-1]


def in_folder(folder: Path) -> LedgerFiles:
    """The ledger in a folder.

    Raises:
        Unavailable: there is none, or it cannot be read.
    """
    try:
        heads = folder / HEADS
        size = heads.stat().st_size if heads.is_file() else 0
        names = sorted(path.name for path in folder.iterdir() if SEGMENT.fullmatch(path.name) and path.is_file())
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except OSError as error:
        raise Unavailable(f"{folder} cannot be read ({error.strerror})") from None
    if not names:
        raise NoLedger(f"there is no ledger in {folder}", hint="give the site's --state, or the copy's folder")
    opened = tuple((name, _opener(folder / name)) for name in names)
    return LedgerFiles(folder.name, opened, _opener(heads) if size else io.BytesIO, size)


def in_archive(name: str, files: Mapping[str, bytes]) -> LedgerFiles | None:
    """The ledger in an archive's folder ``name``, or None."""
    here = {path.removeprefix(f"{name}/"): data for path, data in files.items() if path.startswith(f"{name}/")}
    segments = tuple((part, _held(data)) for part, data in sorted(here.items()) if SEGMENT.fullmatch(part))
    heads = here.get(HEADS, b"")
    return LedgerFiles(name, segments, _held(heads), len(heads)) if segments else None


def beside(folder: Path) -> Callable[[str], LedgerFiles | None]:
    """Finds, by its id, an older ledger where `audit rollover` left it: beside ``folder``, as ``ledger-ID``."""

    def find(ledger_id: str) -> LedgerFiles | None:
        if not LEDGER_ID.fullmatch(ledger_id):
            return None
        try:
            return in_folder(folder.absolute().parent / f"ledger-{ledger_id}")
        except NoLedger:
            return None

    return find


def within(files: Mapping[str, bytes]) -> Callable[[str], LedgerFiles | None]:
    """Finds an older ledger in an archive, by its id."""
    return lambda ledger_id: in_archive(f"ledger-{ledger_id}", files) if LEDGER_ID.fullmatch(ledger_id) else None


class RawLines:
    """The whole lines of a ledger, without their newlines; ``torn`` is set when the last one has none.

    Reads a line at a time: a ledger may be larger than memory.

    Raises:
        Unavailable: there is no ledger, or it cannot be read.
    """

    def __init__(self, ledger: LedgerFiles | Path) -> None:
        self._files = in_folder(ledger) if isinstance(ledger, Path) else ledger
        self.torn = False

    def __iter__(self) -> Iterator[bytes]:
        carried = b""
        for name, opened in self._files.segments:
            try:
                with opened() as file:
                    for piece in file:
                        carried += piece
                        if carried.endswith(b"\n"):
                            yield carried[:-1]
                            carried = b""
            except OSError as error:
                raise Unavailable(f"{self._files.name}/{name} cannot be read ({error.strerror})") from None
        self.torn = bool(carried)


def _opener(path: Path) -> Callable[[], BinaryIO]:
    return lambda: path.open("rb")


def _held(data: bytes) -> Callable[[], BinaryIO]:
    return lambda: io.BytesIO(data)
