"""What workers are asked in the tests of the executors: plain functions, which another process can import."""

import os
import signal
import time
from pathlib import Path

from wardround.errors import BadData


def double(value: int) -> int:
    return 2 * value


def card_and_process(wait_for: Path, count: int) -> tuple[str, int]:
    """The card that the worker was given, and which process it is; not before ``count`` workers are here."""
    (wait_for / str(os.getpid())).touch()
    while len(list(wait_for.iterdir())) < count:
        time.sleep(0.01)
    return os.environ.get("CUDA_VISIBLE_DEVICES", ""), os.getpid()


def refuse(what: str) -> None:
    raise BadData(f"not {what}", hint="another", code="MANIFEST_NAMES")


def die_until(times: int, folder: Path) -> int:
    """End this worker as a full memory does, ``times`` times."""
    tried = len(list(folder.iterdir()))
    (folder / f"try-{tried}").touch()
    if tried < times:
        os.kill(os.getpid(), signal.SIGKILL)
    return tried
