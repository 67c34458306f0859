"""A coordinator that dies by SIGKILL at its N-th durable step.

    python -m tests.coordinator.crashing STATE WHERE N HALF

WHERE is "sync" (before an fsync of ours), "before-commit" or "after-commit" (of a database transaction). It never dies
with N = 0. HALF is "mean" or "toy": the server half of its studies.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coordinator import roster, server
from coordinator.state import State
from coordinator.store import Records, Store
from tests.coordinator.toy_half import toy_half
from wardround import durable


class Countdown:
    def __init__(self, steps: int) -> None:
        self._left = steps
        self._lock = threading.Lock()

    def step(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    state, where, steps = Path(sys.argv[1]), sys.argv[2], Countdown(int(sys.argv[3]))
    real_sync, real_write = durable._sync, Store.write

    def sync(descriptor: int, path: Path) -> None:
        if where == "sync":
            steps.step()
        real_sync(descriptor, path)

    @contextmanager
    def write(self: Store) -> Iterator[Records]:
        with real_write(self) as records:
            yield records
            if where == "before-commit":
                steps.step()
        if where == "after-commit":
            steps.step()

    if sys.argv[4] == "toy":
        roster.server_half = toy_half
    patched: Any = durable
    patched._sync = sync
    Store.write = write  # type: ignore[method-assign]
    server.serve(State(state), "")


if __name__ == "__main__":
    main()
