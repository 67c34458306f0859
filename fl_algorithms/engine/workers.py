"""Worker processes that make coming batches while this one trains. No torch until one begins.

They are forked from a server that has imported torch, so that starting them for each phase is cheap. What crosses are
numpy arrays through pipes: shared memory is small in many containers.
"""

import ctypes
import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, parent_process
from typing import Any, TypeVar

from fl_algorithms.pinned_imports import Admitted
from wardround.errors import TryAgain

AHEAD = 2  # results for each worker that are under way or wait to be taken
PRELOADED = [  # the last is what torch imports, for a second, when it is made deterministic
    "fl_algorithms.tasks.images.rows",
    "fl_algorithms.engine.training",
    "torch._inductor.config",
]
Result = TypeVar("Result")
_PR_SET_DUMPABLE = 4  # linux/prctl.h

_make: Callable[..., Any]  # in a worker: what it was begun with


def ahead(
    make: Callable[..., Result], requests: Iterable[tuple[Any, ...]], workers: int, threads: int = 1
) -> Generator[Result, None, None]:
    """``make(*request)`` of each request, in their order; what it raises, in its turn. Closing ends the workers.

    Args:
        make: picklable; given to each worker once.
        threads: of torch in each worker. Sums can depend on it, so it is this process's own number.

    Raises:
        TryAgain: a worker was ended from outside.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    pool = ProcessPoolExecutor(workers, context, _begin, (Admitted(), make, threads))
    under_way: deque[Future[Any]] = deque()
    coming = iter(requests)
    try:
        while True:
            for request in itertools.islice(coming, AHEAD * workers - len(under_way)):
                under_way.append(pool.submit(_made, request))
            if not under_way:
                return
            yield under_way.popleft().result()
    except BrokenProcessPool:
        raise TryAgain(
            "a worker process that reads images was ended from outside",
            hint="most often memory ran out: fewer `--workers`",
            code="DECLINED_RESOURCES",
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def follow_parent() -> None:
    """End this process when the one that wanted it is gone, however it went."""
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


def _begin(plugins: Admitted, make: Callable[..., Any], threads: int) -> None:
    """Patients' images will be in this memory: no core dump, and no other process may look.

    ``plugins`` comes before ``make``, which may be of one of them.
    """
    global _make
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent, which ends this process
    follow_parent()
    from fl_algorithms.engine.device import make_deterministic

    make_deterministic(threads)
    _make = make


def _made(request: tuple[Any, ...]) -> Any:
    return _make(*request)
