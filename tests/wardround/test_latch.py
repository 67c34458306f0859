"""The event that a signal handler may set."""

import os
import signal
import threading

from wardround.local.event import Latch, set_by_signals


def test_a_storm_of_signals_while_the_main_thread_waits_does_not_hang_it() -> None:
    pid, done = os.getpid(), threading.Event()

    def storm() -> None:
        while not done.is_set():
            os.kill(pid, signal.SIGTERM)

    with set_by_signals(Latch()) as latch:
        thread = threading.Thread(target=storm)
        thread.start()
        for _ in range(2000):
            assert latch.wait(10)
        done.set()
        thread.join(10)
    assert latch.is_set()


def test_a_signal_that_the_kernel_gives_to_another_thread_ends_the_wait() -> None:
    with set_by_signals(Latch()) as latch:
        thread = threading.Thread(target=lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM))
        thread.start()
        assert latch.wait(10)
        thread.join(10)


def test_a_wait_ends_when_another_thread_sets_it_and_not_before() -> None:
    latch = Latch()
    assert not latch.is_set()
    assert not latch.wait(0.01)
    thread = threading.Timer(0.05, latch.set)
    thread.start()
    assert latch.wait(10)
    assert latch.wait(10)  # and it stays set


def test_the_handlers_from_before_are_back_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with set_by_signals(Latch()):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_being_set_very_often_is_no_error() -> None:
    latch = Latch()
    for _ in range(100_000):
        latch.set()
    assert latch.is_set()
