"""A passphrase from a file or an unseen prompt, for the commands that seal or open a file with it."""

import getpass
import sys
from pathlib import Path
from typing import Annotated

import typer

from wardround.errors import BadData, UsageProblem

MAX_FILE = 64 * 1024
Passphrase = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A file whose first line is the passphrase; without it, you are asked."),
]


def read(path: Path, most: int = MAX_FILE) -> bytes:
    """What a file holds. Raises BadData: it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}") from None


def passphrase_from(path: Path | None, prompt: str, *, new: bool = False) -> bytes:
    """The passphrase, from a file or an unseen prompt; a new one is typed twice."""
    if path is not None:
        return read(path).partition(b"\n")[0].rstrip(b"\r")
    if not sys.stdin.isatty():
        raise UsageProblem("no passphrase was given, and there is no terminal to ask at", hint="give --passphrase FILE")
    typed = getpass.getpass(prompt)
    if new and getpass.getpass("Again: ") != typed:
        raise UsageProblem("the two passphrases differ; nothing was changed")
    return typed.encode()
