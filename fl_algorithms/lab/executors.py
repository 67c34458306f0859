"""Where runs are made side by side: in processes of this machine, or on a Ray cluster.

An executor here takes calls as ``concurrent.futures.Executor`` does. What it adds is an answer to each call: where a
worker ends before it answers, the call is made again by another one, and after ``TRIES`` times the call's future raises
``TryAgain``. The other calls go on. Importing this needs neither torch nor Ray.
"""

import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Literal

from fl_algorithms.engine.hardware import Hardware
from wardround.errors import NeedsPerson, TryAgain, UsageProblem

TRIES = 3  # of a call whose workers end before they answer
CARDS = "CUDA_VISIBLE_DEVICES"
ExecutorName = Literal["processes", "ray"]
Pool = Callable[[int], AbstractContextManager[Executor]]  # of a number of jobs


@dataclass(frozen=True)
class Placement:
    """Which card a worker has, where runs train on CUDA.

    Attributes:
        cards: as ``CUDA_VISIBLE_DEVICES`` names them; () where runs train on the CPU.
        per_card: runs that share one.
    """

    cards: tuple[str, ...] = ()
    per_card: int = 1

    def jobs(self, wanted: int | None, cores: int) -> int:
        """How many runs at once: what was asked for, else one a core, or as many as the cards take.

        Raises:
            UsageProblem: more than the cards take.
        """
        if not self.cards:
            return wanted or cores
        room = len(self.cards) * self.per_card
        if wanted is not None and wanted > room:
            cards = "1 card" if len(self.cards) == 1 else f"{len(self.cards)} cards"
            raise UsageProblem(
                f"--jobs {wanted} on {cards} with {self.per_card} runs each: there is room for {room}",
                hint=f"`--jobs {room}`, or `--per-card {-(-wanted // len(self.cards))}`",
            )
        return wanted or room

    def card_of(self, slot: int) -> str | None:
        """The card of worker ``slot`` (from 0): neighbors go to different cards. None: on the CPU."""
        return self.cards[slot % len(self.cards)] if self.cards else None


NO_CARDS = Placement()


def placement(hardware: Hardware, per_card: int, visible: str | None = None, devices: Path = Path("/dev")) -> Placement:
    """The cards of this machine, without touching them: those that ``CUDA_VISIBLE_DEVICES`` leaves, else all.

    Args:
        visible: of the environment; None where it is not set.
        devices: where the driver lists the cards.
    """
    if hardware.device == "cpu":
        return NO_CARDS
    if visible is not None:
        return Placement(tuple(card.strip() for card in visible.split(",") if card.strip()), per_card)
    numbers = sorted(int(path.name[6:]) for path in devices.glob("nvidia[0-9]*") if path.name[6:].isdigit())
    return Placement(tuple(map(str, numbers)), per_card)


def card_share(hardware: Hardware, per_card: int) -> float:
    """Of a card, for one run on a cluster, whose cards nobody here knows. "auto" takes the CPU there."""
    return 1 / per_card if hardware.device == "cuda" else 0.0


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def processes(jobs: int, where: Placement = NO_CARDS) -> Iterator[Executor]:
    """``jobs`` fresh processes, each with its own torch. Leaving by an exception ends them at once."""
    workers = _Workers(where)
    pool = _Processes(jobs, workers)
    try:
        yield pool
    except BaseException:
        workers.end()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        workers.end()


class _Processes(ThreadPoolExecutor):
    """A thread for each worker process: it hands the calls over, and starts another where one has ended."""

    def __init__(self, jobs: int, workers: "_Workers") -> None:
        super().__init__(jobs, "fl-lab", workers.begin)
        self._of = workers

    def submit(self, call: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        return super().submit(self._of.answer, call, args, options)


class _Workers:
    """The worker processes, one for each thread that asks."""

    def __init__(self, where: Placement) -> None:
        self._where, self._slots, self._mine = where, itertools.count(), threading.local()
        self._lock, self._all, self._ended = threading.Lock(), set[SpawnProcess](), False

    def begin(self) -> None:
        self._mine.slot, self._mine.worker = next(self._slots), None

    def answer(self, call: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """What the call gives in this thread's worker. Raises what it raises; TryAgain: its workers ended."""
        for _ in range(TRIES):
            process, pipe = self._worker()
            try:
                pipe.send((call, args, options))
                connection.wait([pipe, process.sentinel])
                good, value = pipe.recv()
            except (EOFError, OSError):  # it ended, maybe between two answers
                self._forget(process, pipe)
                continue
            if good:
                return value
            raise value
        raise TryAgain(
            f"its worker process was ended from outside, {TRIES} times",
            hint="most often memory ran out: fewer --jobs; what is done stays done",
        )

    def end(self) -> None:
        """End every worker, with what it is at."""
        with self._lock:
            self._ended = True
            for process in self._all:
                process.kill()
            for process in self._all:
                process.join()

    def _worker(self) -> tuple[SpawnProcess, Connection]:
        if self._mine.worker is None:
            context = multiprocessing.get_context("spawn")
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, self._where.card_of(self._mine.slot)), daemon=True)
            with self._lock:
                if self._ended:
                    raise TryAgain("the runs were stopped")
                with _deaf_children():
                    process.start()
                self._all.add(process)
            there.close()
            self._mine.worker = process, here
        worker: tuple[SpawnProcess, Connection] = self._mine.worker
        return worker

    def _forget(self, process: SpawnProcess, pipe: Connection) -> None:
        pipe.close()
        process.kill()
        process.join()
        self._mine.worker = None
        with self._lock:
            self._all.discard(process)


def _serve(pipe: Connection, card: str | None) -> None:
    """A worker: take calls, answer them, end with the parent."""
    if card is not None:
        os.environ[CARDS] = card  # before torch looks
    from fl_algorithms.engine.workers import follow_parent

    follow_parent()
    while True:
        try:
            call, args, options = pipe.recv()
        except EOFError:
            return
        try:
            answer = True, call(*args, **options)
        except Exception as error:
            answer = False, error
        pipe.send(answer)


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes started here never see Ctrl-C, which a terminal sends to all: this process ends them.

    The mask is inherited; a signal that comes meanwhile is taken when it is lifted.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def on_ray(jobs: int, *, threads: int = 1, card: float = 0.0) -> Iterator[Executor]:
    """A Ray cluster: the one that ``RAY_ADDRESS`` names, that this process is in already, or one on this machine.

    Every node needs this package in the same version, and the data at the same path. Ray itself makes a call again
    whose worker or node is gone.

    Args:
        jobs: of a cluster that is started here: its processors.
        threads: processors that a run needs.
        card: share of a card that it needs.

    Raises:
        NeedsPerson: Ray is not installed.
        TryAgain: the cluster does not answer.
    """
    ray = _ray()
    started = not ray.is_initialized()
    if started:
        address = os.environ.get("RAY_ADDRESS")
        local = {} if address else {"num_cpus": jobs * threads, "include_dashboard": False}
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False, **local)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise TryAgain(
                f"the Ray cluster at {address or 'this machine'} does not answer: {type(error).__name__}",
                hint="`ray status` says whether it runs; RAY_ADDRESS names it",
            ) from None
    executor = RayExecutor(ray, {"num_cpus": threads, "num_gpus": card, "max_retries": TRIES - 1})
    try:
        yield executor
    except BaseException:
        executor.shutdown(cancel_futures=True)
        raise
    finally:
        if started:
            ray.shutdown()


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise NeedsPerson("Ray is not installed", hint="`pip install 'wardround[ray]'`, on every node") from None
    return ray


class RayExecutor(Executor):
    """Calls as Ray tasks.

    Args:
        ray: the module, or what stands in for it in a test.
        options: of each task.
    """

    def __init__(self, ray: Any, options: dict[str, Any]) -> None:
        self._ray, self._options = ray, options
        self._refs: set[Any] = set()

    def submit(self, call: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        task = self._ray.remote(answered).options(**self._options).remote(call, args, options)
        self._refs.add(task)
        outer: Future[Any] = Future()
        outer.set_running_or_notify_cancel()

        def settle(inner: Future[Any]) -> None:
            self._refs.discard(task)
            try:
                good, value = inner.result()
            except Exception as error:
                outer.set_exception(_lost(error))
                return
            outer.set_result(value) if good else outer.set_exception(value)

        task.future().add_done_callback(settle)
        return outer

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for task in list(self._refs) if cancel_futures else ():
            self._ray.cancel(task, force=True)


def answered(call: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> tuple[bool, Any]:
    """In a Ray worker: what the call gives, or the exception that it raises, as a value: Ray would wrap it."""
    try:
        return True, call(*args, **options)
    except Exception as error:
        return False, error


def _lost(error: Exception) -> TryAgain:
    return TryAgain(
        f"Ray lost its worker or its node, {TRIES} times: {type(error).__name__}",
        hint="`ray status` says which nodes are there; what is done stays done",
    )
