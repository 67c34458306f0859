"""A trainer that is stopped, hangs or ends: noticed within 35 s, replaced, and never waited for by a person."""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from site_agent.gateway import agent as agents
from site_agent.gateway.service_requests import ServiceStatus
from site_agent.gateway.status import site_status
from site_agent.gateway.trainer_process import TrainerApart, TrainerProcess
from site_agent.handoff import HELLO_TIMEOUT_S, Trainer
from site_agent.trainer import listener as listeners
from site_agent.trainer.listener import Listener
from tests.site_agent.fake_trainer import FakeTrainer
from tests.site_agent.site_world import PERSON, STUDY, SiteWorld
from tests.site_agent.test_handoff import ask_in_thread, ended, endless, listener_process, listening
from tests.site_agent.trainer_world import STUDY_DIGEST, Hospital
from tools.world import descendants, wait_until
from wardround import __version__
from wardround.errors import TryAgain, Unavailable, UsageProblem, WardroundError
from wardround.local import control, liveness
from wardround.local.event import Latch
from wardround.local.liveness import Look, Watch
from wardround.records.trainer import Abort, Answer, AnyRequest, Check, Describe, Done, GetStatus, request_from
from wardround.v1 import federation_pb2 as pb

NOTICED_S = 35
AT_ONCE_S = 2


@pytest.fixture
def hospital(tmp_path: Path) -> Hospital:
    return Hospital.make(tmp_path)


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


# what is judged


class Process:
    """A process as the kernel would show it, on a clock that the test moves."""

    def __init__(self) -> None:
        self.now, self.state, self.used = 0.0, "S", 0
        self.watch = Watch(1, see=lambda _: Look(self.state, (self.used,)), now=lambda: self.now)

    def after(self, seconds: float, *, works: bool = False, beats: bool = False) -> str:
        """What is thought of it at the end, looked at every two seconds."""
        verdict = ""
        for _ in range(int(seconds / 2)):
            self.now += 2
            self.used += works
            if beats:
                self.watch.heard()
            verdict = verdict or self.watch.frozen()
        return verdict


def test_a_process_that_says_that_it_is_alive_is_left_alone_however_idle() -> None:
    assert Process().after(3600, beats=True) == ""


def test_a_process_that_computes_without_a_word_is_left_alone() -> None:
    assert Process().after(3600, works=True) == ""


def test_a_process_that_waits_for_its_disk_is_left_alone() -> None:
    process = Process()
    process.state = "D"
    assert process.after(3600) == ""


def test_a_process_that_neither_speaks_nor_computes_is_hung_within_35_s() -> None:
    process = Process()
    assert process.after(3600, beats=True) == ""
    assert process.after(18) == ""
    assert process.after(NOTICED_S - 18) == "has said and done nothing for 20 s"


def test_a_judge_that_was_stopped_itself_begins_anew() -> None:
    """Ctrl-Z in a terminal stops all of them, and `fg` lets them go on."""
    process = Process()
    assert process.after(10, beats=True) == ""
    process.now += 600
    assert process.after(18) == ""
    assert process.after(6) == "has said and done nothing for 20 s"


def test_a_stopped_process_is_told_from_one_that_was_stopped_for_a_moment() -> None:
    process = Process()
    process.state = "T"
    assert process.after(2) == ""
    process.state = "S"
    assert process.after(2, beats=True) == ""
    process.state = "T"
    assert process.after(6, beats=True) == "is stopped"


def test_the_kernel_says_that_a_process_is_stopped(hospital: Hospital) -> None:
    with listener_process(hospital.state) as process:
        assert not liveness.is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: liveness.is_stopped(process.pid), "it is stopped", 10)
    assert liveness.look(process.pid).state == "X"


# the worker


@pytest.mark.chaos
def test_a_worker_that_is_stopped_mid_round_is_ended_and_the_next_request_has_another(
    hospital: Hospital, caplog: pytest.LogCaptureFixture
) -> None:
    request = endless(hospital)
    with listening(hospital.state) as trainer, at_most(NOTICED_S + 60):  # 60: two starts of torch on a busy machine
        future, begun = ask_in_thread(trainer, request)
        assert begun.wait(60)
        worker = trainer.ask(GetStatus()).worker
        assert worker is not None
        os.kill(worker, signal.SIGSTOP)
        with at_most(NOTICED_S), pytest.raises(TryAgain, match="the trainer's worker is stopped while") as told:
            future.result(NOTICED_S)
        assert told.value.code == "DECLINED_TRAINING_FAILED"
        assert f"the trainer's worker (process {worker}) is stopped: it is ended" in caplog.text
        trainer.ask(Describe(study=hospital.document, site="north"))
        idle = trainer.ask(GetStatus()).worker
        assert idle not in (worker, None)
        os.kill(idle, signal.SIGSTOP)
        wait_until(lambda: liveness.is_stopped(idle), "it is stopped", 10)
        trainer.ask(Describe(study=hospital.document, site="north"))  # by another: it is not even asked
        assert ended(idle)


class Slow:
    """In a worker's place: is at one request until the test, or an abort, ends it."""

    made: "ClassVar[list[Slow]]"

    def __init__(self, *_: Any, **__: Any) -> None:
        self.isolation, self.missing, self.pid = "none", (), 1
        self.asked: list[str] = []
        self.begun, self.go, self.killed = threading.Event(), threading.Event(), threading.Event()
        Slow.made.append(self)

    def alive(self) -> bool:
        return not self.killed.is_set()

    def ask(self, request: AnyRequest, progress: Any) -> Answer:
        self.asked.append(request.command)
        self.begun.set()
        self.go.wait(60)
        if self.killed.is_set():
            raise TryAgain("it was ended")
        return Done()

    def end(self) -> None:
        self.killed.set()
        self.go.set()

    close = end

    def __enter__(self) -> "Slow":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


@pytest.fixture
def slow(hospital: Hospital, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Listener, Callable[..., Any]]]:
    """A listener whose worker is slow, and how to ask it in a thread: the answer, or the error, is appended."""
    monkeypatch.setattr(listeners, "Worker", Slow)
    Slow.made = []

    def ask(listener: Listener, request: AnyRequest) -> list[Any]:
        told: list[Any] = []

        def act() -> None:
            try:
                told.append(listener.answer_request(request, lambda _: None))
            except WardroundError as error:
                told.append(error)

        threading.Thread(target=act, daemon=True).start()
        return told

    with Listener(hospital.state, threading.Event()) as listener:  # type: ignore[arg-type]
        yield listener, ask


def test_a_round_called_off_behind_a_persons_check_is_dropped_and_the_check_goes_on(
    hospital: Hospital, slow: tuple[Listener, Callable[..., Any]]
) -> None:
    listener, ask = slow
    checked = ask(listener, Check(study=hospital.document, site="north", data="patients"))
    wait_until(lambda: len(Slow.made) == 2 and Slow.made[1].begun.is_set(), "the check begins", 10)
    trained = ask(listener, request_from(hospital.round(1)))
    wait_until(lambda: len(listener._jobs) == 2, "the round waits", 10)
    listener.answer_request(Abort(study_digest=STUDY_DIGEST, revision=1, round=1), lambda _: None)
    wait_until(lambda: trained, "the round is answered", 10)
    assert str(trained[0]) == "this `train` was called off before it began"
    assert not checked
    Slow.made[1].go.set()
    wait_until(lambda: checked, "the check is answered", 10)
    assert checked == [Done()]
    assert [worker.asked for worker in Slow.made] == [[], ["check"]]


def test_an_abort_of_one_round_leaves_the_next_studys_training_alone(
    hospital: Hospital, slow: tuple[Listener, Callable[..., Any]]
) -> None:
    listener, ask = slow
    trained = ask(listener, request_from(hospital.round(2)))
    wait_until(lambda: len(Slow.made) == 2 and Slow.made[1].begun.is_set(), "the round begins", 10)
    for digest, revision, round_ in (("ab" * 32, 1, 2), (STUDY_DIGEST, 2, 2), (STUDY_DIGEST, 1, 1)):
        listener.answer_request(Abort(study_digest=digest, revision=revision, round=round_), lambda _: None)
    assert Slow.made[1].alive()
    listener.answer_request(Abort(study_digest=STUDY_DIGEST, revision=1, round=2), lambda _: None)
    wait_until(lambda: trained, "the round is answered", 10)
    assert str(trained[0]) == "it was ended"


# the listener


@pytest.fixture
def kept(hospital: Hospital) -> Iterator[TrainerProcess]:
    trainer = TrainerProcess(hospital.state)
    try:
        trainer.keep(lambda error: None)
        yield trainer
    finally:
        trainer.stop()


@pytest.mark.chaos
def test_a_listener_that_is_to_end_does_not_wait_for_a_worker_that_only_starts(
    hospital: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under load a worker needs long for its first word; it was waited for, for up to a minute."""
    told: list[TryAgain] = []

    def ask() -> None:
        try:
            listener.answer_request(request_from(hospital.round(1)), lambda _: None)
        except TryAgain as error:
            told.append(error)

    with Listener(hospital.state, Latch()) as listener:
        mute = hospital.state / "mute"
        mute.write_text("#!/bin/sh\nexec sleep 600\n")
        mute.chmod(0o700)
        monkeypatch.setattr("sys.executable", str(mute))
        threading.Thread(target=ask, daemon=True).start()
        wait_until(lambda: listener._current is not None and descendants(os.getpid()), "a worker starts", 10)
        began = time.monotonic()
    assert time.monotonic() - began < HELLO_TIMEOUT_S / 2
    wait_until(lambda: told, "whoever asked is told", 10)


def test_a_listener_that_is_killed_or_stopped_is_started_again(
    hospital: Hospital, kept: TrainerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for signal_, words in ((signal.SIGKILL, r"ended (SIGKILL)"), (signal.SIGSTOP, "is stopped and was ended")):
        before = kept.pid
        os.kill(before, signal_)
        wait_until(lambda words=words: words in kept.problem, f"it is said: {words}", NOTICED_S)
        wait_until(lambda: not kept.problem, "another listens", 60)
        assert kept.pid != before
        assert Trainer(hospital.state).answers()
        assert f"the trainer's listener (process {before}) {words}; another is started in " in caplog.text
    assert f"the trainer's listener runs again (process {kept.pid})" in caplog.text


def test_a_listener_that_somebody_else_started_is_said_to_be_stopped_and_to_answer_again(
    hospital: Hospital, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    watched = TrainerApart(hospital.state, look_s=0.1, silent_s=0.5)
    with listener_process(hospital.state) as listener:
        watched.keep(lambda _: None)
        listener.send_signal(signal.SIGSTOP)
        wait_until(lambda: watched.problem, "it is said", NOTICED_S)
        assert watched.problem == "the trainer's listener has not answered for 0.5 s"
        assert "start it again, for instance `systemctl restart wardround-trainer`" in caplog.text
        listener.send_signal(signal.SIGCONT)
        wait_until(lambda: not watched.problem, "it answers again", NOTICED_S)
    wait_until(lambda: "the trainer's listener answers again" in caplog.text, "it is said", 10)
    wait_until(lambda: watched.problem, "its end is said too", NOTICED_S)
    watched.stop()


def test_a_stopped_listener_does_not_keep_the_agent_from_ending(hospital: Hospital) -> None:
    trainer = TrainerProcess(hospital.state)
    trainer.keep(lambda error: None)
    os.kill(trainer.pid, signal.SIGSTOP)
    wait_until(lambda: liveness.is_stopped(trainer.pid), "it is stopped", 10)
    with at_most(10):
        trainer.stop()


def test_status_and_what_needs_the_trainer_answer_at_once_while_it_is_stopped(world: SiteWorld) -> None:
    world.ready()
    assert world.trainer is not None
    world.trainer.close()
    world.trainer = None
    site = world.state.site()
    with listener_process(world.state.root) as process:
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: liveness.is_stopped(process.pid), "it is stopped", 10)
        service = ServiceStatus(True, 0, "", "the trainer's listener is stopped and was ended; another is started")
        with at_most(AT_ONCE_S):
            shown = site_status(world.state, site, service)
        assert (shown.isolation, shown.device, shown.users.trainer) == ("unknown",) * 3
        assert shown.trainer_problem == service.trainer_problem
        assert [row.state for row in shown.studies] == ["approved"]
        with at_most(AT_ONCE_S), pytest.raises(Unavailable, match="the trainer does not answer"):
            world.command("preview", study=STUDY, data="patients")


# the gateway


def hung(world: SiteWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round is under way at a trainer that hears nothing and says nothing any more."""
    assert world.trainer is not None
    monkeypatch.setattr(control, "BEAT_S", 3600)
    world.trainer.hold.set()
    world.coordinator.assign(STUDY, 1)
    world.trainer.wait_asked("train")
    world.trainer.deaf.set()


def test_a_withdrawal_is_done_and_told_at_once_while_the_trainer_hangs(
    world: SiteWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ready()
    hung(world, monkeypatch)
    with at_most(AT_ONCE_S):
        assert world.command("withdraw", study=STUDY, by=PERSON) == {"reported": True}
    assert world.coordinator.wait_declared("WITHDRAWN")
    with pytest.raises(UsageProblem, match="is not approved here"):
        world.command("withdraw", study=STUDY, by=PERSON)


def test_the_agent_ends_in_a_bounded_time_while_the_trainer_hangs(
    world: SiteWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ready()
    hung(world, monkeypatch)
    assert world.agent is not None
    with at_most(agents.STOP_S):
        world.agent.stop()
    assert world.verdict().complete


def test_a_thread_that_does_not_end_keeps_the_ledger_as_it_is(
    world: SiteWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It could still write into it. What the next start finds is what a crash leaves."""
    world.ready()
    assert world.agent is not None
    monkeypatch.setattr(agents, "STOP_S", 0.1)
    stuck = threading.Event()
    thread = threading.Thread(target=stuck.wait, args=(60,), name="_work", daemon=True)
    thread.start()
    world.agent._threads.append(thread)
    world.agent.stop()
    assert "the agent's thread work does not end; the ledger is left as it is" in caplog.text
    stuck.set()
    thread.join(10)
    monkeypatch.undo()
    world.restart()
    assert world.verdict().consistent


def test_a_round_whose_worker_ended_is_trained_again_at_the_site(
    world: SiteWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world.ready()
    assert world.trainer is not None
    died = "the trainer's worker ended (SIGKILL) while it was asked to train"
    world.trainer.dies = [TryAgain(died, code="DECLINED_TRAINING_FAILED") for _ in range(2)]
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    assert len(world.trainer.commands("train")) == 3
    assert "DECLINED" not in str(world.coordinator.declared)
    assert caplog.text.count("; the trainer is asked to train again in ") == 2


def test_a_round_whose_deadline_passed_is_not_trained_again(world: SiteWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator calls it off; the next one is not disturbed by what became of it."""
    world.ready()
    assert world.trainer is not None
    monkeypatch.setattr("site_agent.gateway.asking.backoff", lambda *_: iter([60.0] * 8))
    world.trainer.dies = [TryAgain("it ended", code="DECLINED_TRAINING_FAILED")]
    world.coordinator.assign(STUDY, 1)
    world.trainer.wait_asked("train")
    world.coordinator.assign(STUDY, 2)
    assert [train["round"] for train in world.trainer.wait_asked("train", 2)] == [1, 2]
    world.coordinator.wait_receipts(1)


def test_a_worker_that_ends_each_time_declines_the_round(world: SiteWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world.ready()
    assert world.trainer is not None
    monkeypatch.setattr("site_agent.gateway.asking.backoff", lambda *_: iter([0.0] * 8))
    world.trainer.failure = TryAgain("it ended", code="DECLINED_TRAINING_FAILED")
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_declared("DECLINED", "DECLINED_TRAINING_FAILED")
    assert len(world.trainer.commands("train")) == 8


def test_a_trainer_that_comes_back_is_waited_for(world: SiteWorld) -> None:
    world.ready()
    assert world.trainer is not None
    world.trainer.close()
    world.coordinator.assign(STUDY, 1)
    wait_until(lambda: world.state.journal(STUDY).phase == "training", "the round wants its trainer", 20)
    world.trainer = FakeTrainer(world.state.root)
    world.coordinator.wait_receipts(1)


def test_a_trainer_that_comes_back_is_asked_as_soon_as_it_is_there(
    world: SiteWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However long the wait would be: after some tries these are ten seconds."""
    world.ready()
    assert world.trainer is not None
    monkeypatch.setattr("site_agent.gateway.asking.backoff", lambda *_: iter([60.0] * 8))
    world.trainer.close()
    world.coordinator.assign(STUDY, 1)
    wait_until(lambda: "again in 60.0 s" in caplog.text, "the round wants its trainer", 20)
    world.trainer = FakeTrainer(world.state.root)
    with at_most(10):
        world.coordinator.wait_receipts(1)
    assert caplog.text.count("again in 60.0 s") == 1


# a peer's trouble


def test_a_list_of_studies_that_cannot_be_used_ends_nothing(world: SiteWorld, caplog: pytest.LogCaptureFixture) -> None:
    world.join()
    world.coordinator.studies = lambda request: pb.StudiesReply(coordinator_version=__version__, more=True)
    agent = world.start()
    wait_until(lambda: "pages of studies do not go on by name; trying again" in caplog.text, "it is said", 20)
    assert not agent.stopped.is_set()
    world.coordinator.studies = None
    wait_until(lambda: agent.connected, "it is connected", 30)
