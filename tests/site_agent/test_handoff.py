"""Gateway and trainer as processes: one is asked, the other may die."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from io import BufferedRWPair, BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from site_agent import handoff
from site_agent.handoff import Trainer
from site_agent.trainer import listener as listeners
from site_agent.trainer import serving
from site_agent.trainer.listener import Listener
from tests.site_agent.trainer_world import NAME, STUDY_DIGEST, Hospital, small_study
from tools.world import wait_until
from wardround.errors import BadData, TryAgain, Unavailable
from wardround.local import control, sockets
from wardround.local.durable import StorageFailed
from wardround.records.trainer import (
    AnyRequest,
    BrokenProtocol,
    Commit,
    DataFiles,
    Describe,
    Discard,
    Done,
    GetDevice,
    GetStatus,
    Hello,
    Inspect,
    ListCheckpoints,
    Progress,
    Status,
    Train,
    request_from,
)

WAIT_S = 60
LISTEN = [sys.executable, "-m", "site_agent.cli.main", "run", "--only", "trainer", "--state"]


@pytest.fixture
def hospital(tmp_path: Path) -> Hospital:
    return Hospital.make(tmp_path)


@contextmanager
def listening(state: Path) -> Iterator[Trainer]:
    """A listener in this process; its workers are processes."""
    stop = threading.Event()
    with Listener(state, stop) as listener:
        server = control.ControlServer(handoff.trainer_socket(state), listener.answer)
        try:
            yield Trainer(state)
        finally:
            server.close()


@contextmanager
def listener_process(state: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([*LISTEN, str(state)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait(WAIT_S)
        process.stdout.close()


def ask_in_thread(trainer: Trainer, request: AnyRequest) -> tuple["Future[Any]", threading.Event]:
    """Ask for a round and return when it has made progress."""
    begun = threading.Event()
    pool = ThreadPoolExecutor(1)
    future = pool.submit(trainer.ask, request, lambda _: begun.set())
    pool.shutdown(wait=False)
    return future, begun


def endless(hospital: Hospital) -> AnyRequest:
    """A round of a million steps, which no test waits for."""
    study = small_study()
    hospital.study = study.changed(training={"local_steps": 1_000_000})
    return request_from(hospital.round(1))


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


@pytest.mark.fresh  # it imports torch when it is isolated
def test_rounds_in_an_isolated_worker_are_the_same_bits_as_in_this_process(hospital: Hospital, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Hospital.make(tmp_path / "other")
    steps: list[Progress] = []
    with listening(hospital.state) as trainer:
        for number in (1, 2):
            request = Train.model_validate(hospital.round(number))
            answer = trainer.ask(request, steps.append)
            assert hospital.update_digest(answer.to_document()) == other.update_digest(other.train(number))
            assert trainer.ask(Commit(study=NAME, revision=1, round=number)) == Done()
            other.commit(number)
        assert trainer.ask(ListCheckpoints(study=NAME)).checkpoints[0].kind == "best_local"
    assert steps[-1] == Progress(step=5, steps=5)


def test_worker_starts_with_the_first_request_that_needs_it_and_stays(hospital: Hospital) -> None:
    with listening(hospital.state) as trainer:
        status = trainer.ask(GetStatus())
        assert status.isolation in ("network-namespace", "seccomp", "none")
        assert (status.uid, status.worker) == (os.geteuid(), None)
        trainer.ask(Describe(study=hospital.document, site="north"))
        first = trainer.ask(GetStatus()).worker
        trainer.ask(Describe(study=hospital.document, site="north"))
        assert isinstance(first, int)
        assert trainer.ask(GetStatus()).worker == first
    assert ended(first)
    assert not Trainer(hospital.state).available()


def test_one_thread_watches_a_worker_whatever_it_is_asked(hospital: Hospital, monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = list[str](), threading.Thread.start

    def note(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    with listening(hospital.state) as trainer:
        trainer.ask(Describe(study=hospital.document, site="north"))
        monkeypatch.setattr(threading.Thread, "start", note)
        trainer.ask(Describe(study=hospital.document, site="north"))
        monkeypatch.undo()
    assert "control-call" in started  # the listener's, for the connection
    assert "worker-watch" not in started


def test_a_worker_says_that_it_is_alive_while_it_is_at_work_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "BEAT_S", 0.01)
    said = BytesIO()
    replies = serving.Replies(cast(BufferedRWPair, said))
    before = threading.active_count()
    time.sleep(0.1)
    assert not said.getvalue()
    with replies.beating():
        assert threading.active_count() == before
        wait_until(lambda: said.getvalue().count(b"alive") > 1, "it beats", WAIT_S)
    time.sleep(0.1)  # one may have been under way
    after = len(said.getvalue())
    time.sleep(0.1)
    assert len(said.getvalue()) == after


class QuickWorker:
    """A worker without a process."""

    made = 0
    isolation, missing = "seccomp", ()

    def __init__(self, state: Path, *, warm: bool, options: object = (), given_up: object = None) -> None:
        type(self).made += warm
        self.pid = 1000 + type(self).made
        self.closed = threading.Event()

    def __enter__(self) -> "QuickWorker":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def alive(self) -> bool:
        return not self.closed.is_set()

    def ask(self, request: AnyRequest, progress: object) -> Done:
        return Done()

    def close(self) -> None:
        self.closed.set()

    end = close


def test_a_worker_that_had_nothing_to_do_is_ended_and_the_next_request_has_another(
    hospital: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty sites on one machine held 8 GiB for idle workers."""
    monkeypatch.setattr(listeners, "Worker", QuickWorker)
    describe = Describe(study=hospital.document, site="north")

    def worker(listener: Listener) -> int | None:
        status = listener.answer_request(GetStatus(), lambda _: None)
        assert isinstance(status, Status)
        return status.worker

    with Listener(hospital.state, threading.Event(), idle_s=1) as listener:
        for number in (1, 2):
            listener.answer_request(describe, lambda _: None)
            assert worker(listener) == 1000 + number
            listener.answer_request(describe, lambda _: None)
            wait_until(lambda: worker(listener) is None, "the listener has let it go", WAIT_S)
    with Listener(hospital.state, threading.Event()) as listener:
        listener.answer_request(describe, lambda _: None)
        assert worker(listener) == 1003  # without the option it stays


def test_abort_ends_a_round_at_once_and_another_can_begin(hospital: Hospital) -> None:
    request = endless(hospital)
    with listening(hospital.state) as trainer:
        future, begun = ask_in_thread(trainer, request)
        assert begun.wait(WAIT_S)
        trainer.abort(STUDY_DIGEST, 1, 1)
        with pytest.raises(
            TryAgain, match=r"the trainer's worker ended \(SIGKILL\) while it was asked to train"
        ) as told:
            future.result(WAIT_S)
        assert told.value.code == "DECLINED_TRAINING_FAILED"
        assert trainer.ask(Discard(study=NAME, revision=1, round=1)) == Done()
        assert trainer.ask(Describe(study=hospital.document, site="north")).upload


def test_worker_that_dies_is_started_again_with_the_next_request(hospital: Hospital) -> None:
    request = endless(hospital)
    with listening(hospital.state) as trainer:
        future, begun = ask_in_thread(trainer, request)
        assert begun.wait(WAIT_S)
        first = trainer.ask(GetStatus()).worker
        assert first is not None
        os.kill(first, signal.SIGSEGV)  # as a bug in a library would
        with pytest.raises(TryAgain, match="SIGSEGV"):
            future.result(WAIT_S)
        trainer.ask(Describe(study=hospital.document, site="north"))
        assert trainer.ask(GetStatus()).worker not in (first, None)


def test_what_concerns_no_round_is_answered_while_one_is_trained(hospital: Hospital) -> None:
    request = endless(hospital)
    with listening(hospital.state) as trainer:
        future, begun = ask_in_thread(trainer, request)
        assert begun.wait(WAIT_S)
        inspected = trainer.ask(Inspect(files=DataFiles(table=str(hospital.table), label="ill")))
        assert (inspected.rows, inspected.columns) == (60, 4)
        assert trainer.ask(Discard(study=NAME, revision=1, round=9)) == Done()
        assert not future.done()
        trainer.abort(STUDY_DIGEST, 1, 1)
        with pytest.raises(TryAgain):
            future.result(WAIT_S)


def test_round_goes_on_when_whoever_asked_is_gone(hospital: Hospital) -> None:
    request = hospital.round(1)
    with listening(hospital.state) as trainer:
        with sockets.connect(handoff.trainer_socket(hospital.state)) as gone:
            gone.sendall(control.json.dumps(request).encode() + b"\n")
        assert trainer.ask(Train.model_validate(request)).num_examples == 48


def test_error_of_the_worker_arrives_as_itself(hospital: Hospital) -> None:
    with listening(hospital.state) as trainer, pytest.raises(BadData, match="no column `disease`") as refused:
        trainer.ask(Inspect(files=DataFiles(table=str(hospital.table), label="disease")))
    assert refused.value.hint


def test_without_a_listener_a_one_shot_worker_answers(hospital: Hospital) -> None:
    files = DataFiles(table=str(hospital.table), test=str(hospital.test), label="ill")
    inspected = handoff.ask(hospital.state, Inspect(files=files))
    assert (inspected.rows, inspected.test_rows) == (60, 20)
    with pytest.raises(Unavailable, match=r"no service listens at .*trainer\.sock"):
        Trainer(hospital.state).ask(GetStatus())


def test_a_worker_that_died_while_it_was_told_is_closed_without_a_word(hospital: Hospital) -> None:
    """What is left of the request cannot be sent any more, and that must not be the listener's end."""
    with handoff.Worker(hospital.state, warm=False) as worker:
        worker.kill()
        with pytest.raises(handoff.Died):
            worker.ask(GetDevice())


def test_worker_that_does_not_start_is_told(hospital: Hospital, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff.sys, "executable", "/bin/false")
    with pytest.raises(TryAgain, match="the trainer's worker did not start") as told:
        handoff.one_shot(hospital.state, Inspect(files=DataFiles(table="t", label="l")))
    assert told.value.code == "DECLINED_TRAINING_FAILED"


def test_process_without_isolation_is_told_loudly(
    hospital: Hospital, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handoff.Worker, "_read", lambda _: Hello(isolation="none", missing=[]))
    with handoff.Worker(hospital.state, warm=False) as worker:
        assert worker.isolation == "none"
    assert "NO ISOLATION" in caplog.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param(b'{"progress":{"step":-1,"steps":2}}', 'its progress: "step": greater_than_equal', id="progress"),
        pytest.param(
            b'{"hello":{"isolation":"none","missing":[]}}', "its first words, for the second time", id="hello"
        ),
        pytest.param(b"[]", "not an answer: one JSON object on one line was wanted", id="no object"),
    ],
)
def test_worker_that_breaks_its_protocol_is_ended_for_its_next_line_could_answer_another_request(
    monkeypatch: pytest.MonkeyPatch, line: bytes, message: str
) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(handoff.Worker, "kill", lambda worker: ended.append(True))
    ours, workers = socket.socketpair()
    worker = handoff.Worker.__new__(handoff.Worker)
    with ours, workers, ours.makefile("rwb") as stream:
        worker._stream, worker._turn = stream, threading.Lock()
        worker._process = SimpleNamespace(pid=os.getpid())  # type: ignore[assignment]
        workers.sendall(line + b'\n{"result":{}}\n')
        with pytest.raises(BrokenProtocol, match=message):
            worker.ask(Commit(study=NAME, revision=1, round=1))
    assert ended == [True]


def test_sigterm_ends_listener_and_worker_cleanly(hospital: Hospital) -> None:
    with listener_process(hospital.state) as process:
        trainer = Trainer(hospital.state)
        trainer.ask(Describe(study=hospital.document, site="north"))
        worker = trainer.ask(GetStatus()).worker
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
        assert ended(worker)
        assert not handoff.trainer_socket(hospital.state).exists()


def test_worker_dies_with_a_listener_that_is_killed_and_the_next_one_goes_on(hospital: Hospital) -> None:
    request = endless(hospital)
    with listener_process(hospital.state) as process:
        trainer = Trainer(hospital.state)
        future, begun = ask_in_thread(trainer, request)
        assert begun.wait(WAIT_S)
        worker = trainer.ask(GetStatus()).worker
        process.kill()
        with pytest.raises(Unavailable, match="went away before it answered"):
            future.result(WAIT_S)
        assert ended(worker)
    with listener_process(hospital.state):
        assert trainer.ask(GetStatus()).worker is None


@pytest.mark.chaos
def test_second_trainer_of_a_state_directory_is_refused(hospital: Hospital) -> None:
    with listener_process(hospital.state):
        line = [*LISTEN, str(hospital.state)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert "is in use by site-agent run --only trainer" in done.stderr


def test_disk_that_failed_stops_the_listener(hospital: Hospital, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise StorageFailed("the disk failed")

    monkeypatch.setattr(listeners, "keep_books", fail)
    stop = threading.Event()
    with Listener(hospital.state, stop) as listener:
        with pytest.raises(StorageFailed):
            listener.answer(Commit(study=NAME, revision=1, round=1).to_document(), lambda _: None)
        assert stop.is_set()
        assert listener.failed is not None


def test_listener_and_commands_do_not_import_torch_or_grpc() -> None:
    look = (
        "import site_agent.trainer.listener, site_agent.cli.data, sys;"
        "print([name for name in ('torch', 'grpc', 'ssl') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout == "[]\n"
