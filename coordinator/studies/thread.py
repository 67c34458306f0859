"""One thread that does jobs in the order in which they come, and wakes up by itself when a deadline is due.

Before ``start``, and after ``stop``, a job runs in the caller's thread, one at a time.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from wardround.local.durable import StorageFailed

T = TypeVar("T")


class OneThread:
    """The thread ``name``.

    Args:
        patience: seconds until it must wake up without a job; None while it need not.
        wake: what it does after each job and whenever its patience ends.
        fatal: called with an error after which the process must end, a failed disk.
    """

    def __init__(
        self,
        name: str,
        *,
        patience: Callable[[], float | None],
        wake: Callable[[], None],
        fatal: Callable[[BaseException], None],
    ) -> None:
        self._patience = patience
        self._wake = wake
        self._fatal = fatal
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._alone = threading.RLock()
        self._gate = threading.Lock()
        self._running = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, first: Callable[[], None]) -> None:
        """Do ``first`` in the caller's thread while the jobs of others are queued, then begin with those."""
        self._running = True
        first()
        self._thread.start()

    def stop(self) -> None:
        """Do the jobs that are queued, and end."""
        if not self._running:
            return
        self._jobs.put(None)
        self._thread.join()

    def call(self, act: Callable[[], T]) -> T:
        """Run ``act`` in the thread, and return or raise what it does."""
        done: Future[T] = Future()

        def job() -> None:
            try:
                done.set_result(act())
            except BaseException as error:
                if isinstance(error, StorageFailed):
                    self._fatal(error)  # before the next job, which would stand on what the disk may not have
                done.set_exception(error)

        with self._gate:
            queued = self._running and threading.current_thread() is not self._thread
            if queued:
                self._jobs.put(job)
        if not queued:
            with self._alone:
                return act()
        return done.result()

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._patience())
                if job is None:
                    break
                job()
            except queue.Empty:
                pass
            try:
                self._wake()
            except StorageFailed as error:
                self._fatal(error)
                return
        with self._gate:
            self._running = False
        while not self._jobs.empty():
            if job := self._jobs.get():
                job()
