"""Worker processes: order, what goes wrong in them, and their end."""

import itertools
import os
import select
import subprocess
import sys
from collections.abc import Iterator

import pytest

from fl_algorithms.engine.workers import AHEAD, ahead
from wardround.errors import TryAgain

WAIT_S = 60
PROGRAM = """
import itertools, os, sys
from fl_algorithms.engine.workers import ahead
made = ahead(os.getpid, itertools.repeat(()), 1)
print(next(made), flush=True)
sys.stdin.read()
"""


def ended(pid: int) -> bool:
    """Wait, a bounded while, for a process that may be gone already."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ready, _, _ = select.select([descriptor], [], [], WAIT_S)
    finally:
        os.close(descriptor)
    return bool(ready)


def alone(expression: str) -> object:
    """What ``expression`` is in a worker."""
    (found,) = ahead(eval, [(expression,)], 1, threads=2)
    return found


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_the_order_of_the_requests(workers: int) -> None:
    assert list(ahead(pow, ((2, n) for n in range(20)), workers)) == [2**n for n in range(20)]


def test_no_more_is_asked_for_than_the_workers_can_begin() -> None:
    asked: list[int] = []

    def requests() -> Iterator[tuple[int]]:
        for number in itertools.count():
            asked.append(number)
            yield (number,)

    made = ahead(str, requests(), 2)
    for taken in range(1, 6):
        assert next(made) == str(taken - 1)
        assert len(asked) == AHEAD * 2 + taken - 1
    made.close()


def test_a_failure_is_raised_in_its_turn() -> None:
    made = ahead(int, [("1",), ("2",), ("three",), ("4",)], 2)
    assert [next(made), next(made)] == [1, 2]
    with pytest.raises(ValueError, match="three"):
        next(made)


def test_a_worker_that_dies_is_an_error_and_no_hang() -> None:
    with pytest.raises(TryAgain, match="a worker process that reads images was ended from outside") as told:
        list(ahead(os._exit, [(9,)] * 4, 2))
    assert told.value.hint == "most often memory ran out: fewer `--workers`"
    assert told.value.code == "DECLINED_RESOURCES"


def test_workers_end_when_no_more_is_wanted() -> None:
    made = ahead(os.getpid, itertools.repeat(()), 1)
    worker = next(made)
    assert worker != os.getpid()
    made.close()
    assert ended(worker)


def test_workers_end_with_the_process_that_wanted_them_however_it_ends() -> None:
    line = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        process.kill()
    assert ended(worker)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        pytest.param("__import__('ctypes').CDLL(None).prctl(3, 0, 0, 0, 0)", 0, id="nobody may read their memory"),
        pytest.param("__import__('signal').getsignal(2).name", "SIG_IGN", id="Ctrl-C is for the parent"),
        pytest.param("__import__('torch').get_num_threads()", 2, id="as many threads as the parent"),
        pytest.param("__import__('torch').are_deterministic_algorithms_enabled()", True, id="deterministic"),
    ],
)
def test_what_a_worker_is_like(expression: str, value: object) -> None:
    assert alone(expression) == value
