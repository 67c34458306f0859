"""Long transfers take turns while they are fast, and nobody waits for a slow one."""

import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest

from coordinator import turns
from coordinator.turns import SMALL, Turns
from tools.world import wait_until

LONG = 100 * SMALL
WAIT_S = 20


def with_time_left() -> float:
    """Of processors that are idle all the time."""
    return 16 * time.monotonic()


def with_none_left() -> float:
    """Of processors that never are."""
    return 1000.0


class Transfers:
    """Transfers in threads of their own: each begins when it has its turn, and ends when it is told to."""

    def __init__(self, of: Turns) -> None:
        self._turns = of
        self._end: dict[str, threading.Event] = {}
        self._threads: list[threading.Thread] = []
        self.went: list[str] = []
        self.going: set[str] = set()

    def begin(self, site: str, size: int = LONG, *, moved: int = 10**15) -> None:
        """``moved``: bytes, at its beginning."""
        self._end[site] = threading.Event()
        self._threads.append(threading.Thread(target=self._go, args=(site, size, moved)))
        self._threads[-1].start()

    def _go(self, site: str, size: int, moved: int) -> None:
        with self._turns.taken(site, size) as turn:
            self.went.append(site)
            self.going.add(site)
            turn.moved(moved)
            assert self._end[site].wait(WAIT_S)
            self.going.remove(site)

    def end(self, *sites: str) -> None:
        for site in sites or self._end:
            self._end[site].set()
        if not sites:
            for thread in self._threads:
                thread.join(WAIT_S)

    def wait_going(self, *sites: str) -> None:
        wait_until(lambda: self.going == set(sites), f"{sites} go, and no other", WAIT_S)


@pytest.fixture
def transfers() -> Transfers:
    return Transfers(Turns(places=2, patience_s=WAIT_S, idle=with_time_left))


@pytest.fixture
def busy() -> Transfers:
    """On a machine whose processors have no time left."""
    return Transfers(Turns(places=2, patience_s=WAIT_S, idle=with_none_left))


def begin_one_after_the_other(transfers: Transfers, *sites: str, moved: int = 10**15) -> None:
    """Each waits, or goes, before the next one comes."""
    for site in sites:
        wanted = arrived(transfers) + 1
        transfers.begin(site, moved=moved)
        wait_arrived(transfers, wanted)


def wait_arrived(transfers: Transfers, wanted: int) -> None:
    wait_until(lambda: arrived(transfers) >= wanted, f"{wanted} wait or go", WAIT_S)


def arrived(transfers: Transfers) -> int:
    return waiting(transfers) + len(transfers.going)


def waiting(transfers: Transfers) -> int:
    return len(transfers._turns._waiting)


def test_two_fast_ones_go_and_the_others_follow_in_the_order_in_which_they_came(transfers: Transfers) -> None:
    begin_one_after_the_other(transfers, "a", "b", "c", "d")
    transfers.wait_going("a", "b")
    transfers.end("b")
    transfers.wait_going("a", "c")
    transfers.end("a")
    transfers.wait_going("c", "d")
    transfers.end()
    assert transfers.went in (["a", "b", "c", "d"], ["b", "a", "c", "d"])


def test_one_that_stands_still_gives_its_place_up(transfers: Transfers) -> None:
    transfers.begin("still", moved=0)
    transfers.begin("as still", moved=0)
    transfers.wait_going("still", "as still")
    began = time.monotonic()
    transfers.begin("a")
    transfers.wait_going("still", "as still", "a")
    assert time.monotonic() - began < WAIT_S / 2
    transfers.end()


def test_on_a_machine_without_time_left_a_transfer_that_is_not_fast_keeps_its_place(busy: Transfers) -> None:
    """It is the machine that is slow then, and more at a time would hold more memory and bring nothing."""
    begin_one_after_the_other(busy, "a", "b", "c", moved=LONG // 5)
    time.sleep(3 * turns.JUDGED_S)  # 20 MiB in this time are less than a fast line's
    assert (busy.going, waiting(busy)) == ({"a", "b"}, 1)
    busy.end()
    assert not busy._turns._slow


def test_on_a_machine_without_time_left_too_one_that_stands_still_gives_its_place_up(
    busy: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "STANDING_S", 0.3)
    begin_one_after_the_other(busy, "still", "as still", moved=0)
    busy.wait_going("still", "as still")
    busy.begin("a")
    busy.wait_going("still", "as still", "a")
    busy.end()


@pytest.mark.parametrize("idle", [with_time_left, with_none_left])
def test_one_that_was_fast_and_stands_still_now_gives_its_place_up(
    idle: Callable[[], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has gone of a large model would else hold the others back for minutes, long after its line broke."""
    monkeypatch.setattr(turns, "STILL_S", 0.5)
    transfers = Transfers(Turns(places=2, patience_s=WAIT_S, idle=idle))
    begin_one_after_the_other(transfers, "stops", "as well", "a")
    began = time.monotonic()
    transfers.wait_going("stops", "as well", "a")
    assert time.monotonic() - began < WAIT_S / 2
    transfers.end()


@pytest.mark.parametrize("text", [None, "", "cpu\n", "cpu a b c d e\n", "cpu  0 0 0 0 0 0\n"])
def test_a_system_that_does_not_tell_its_idle_time_leaves_the_speed_alone_to_say_what_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    monkeypatch.setattr(turns, "STAT", tmp_path / "stat")
    if text is not None:
        turns.STAT.write_text(text)
    assert turns.idle_seconds() == math.inf
    monkeypatch.setattr(turns, "JUDGED_S", 0.0)
    turn = turns.Turn()
    assert turn.is_slow
    turn.moved(10**15)
    assert not turn.is_slow


def test_this_system_tells_the_idle_time_of_all_its_processors_together() -> None:
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert 0 < turns.idle_seconds() < (os.cpu_count() or 1) * since_boot + 1


def test_however_many_wait_one_of_them_looks_at_those_who_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look reads what the system says of its processors, in a time in which these have nothing left."""
    looks = 0

    def idle() -> float:
        nonlocal looks
        looks += 1
        return with_none_left()

    monkeypatch.setattr(turns, "JUDGED_S", 0.0)
    many = Transfers(Turns(places=2, patience_s=WAIT_S, idle=idle))
    sites = [f"site-{number}" for number in range(30)]
    begin_one_after_the_other(many, "a", "b", *sites, moved=LONG // 10)
    time.sleep(0.5)  # 10 MiB in this time are less than a fast line's
    assert waiting(many) == 30
    before = looks
    time.sleep(20 * turns.LOOK_S)
    looked = looks - before
    many.end()
    assert looked <= 2 * 25  # two go
    assert len(many.went) == 32


def test_a_site_on_a_slow_line_waits_for_nobody_until_it_is_fast_again(
    transfers: Transfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "JUDGED_S", 0.0)
    transfers.begin("slow", moved=0)
    transfers.wait_going("slow")
    transfers.end("slow")
    transfers.wait_going()
    begin_one_after_the_other(transfers, "a", "b", "c")
    transfers.begin("slow")
    transfers.wait_going("a", "b", "slow")
    transfers.end("slow")
    transfers.wait_going("a", "b")
    transfers.begin("slow")
    wait_until(lambda: waiting(transfers) == 2, "it waits", WAIT_S)
    transfers.end()


def test_a_short_one_waits_for_nobody(transfers: Transfers) -> None:
    begin_one_after_the_other(transfers, "a", "b", "c")
    transfers.begin("short", SMALL - 1)
    transfers.wait_going("a", "b", "short")
    transfers.end()


def test_a_short_one_asks_the_system_nothing() -> None:
    """What it says of its processors takes it longer, the more of them it has; a small round is 128 short transfers."""
    of = Turns(idle=lambda: pytest.fail("it was asked"))
    with of.taken("a", SMALL - 1) as turn:
        turn.moved(SMALL - 1)


def test_who_has_waited_for_long_goes_without_a_turn() -> None:
    impatient = Transfers(Turns(places=1, patience_s=0.1))
    impatient.begin("a")
    impatient.wait_going("a")
    impatient.begin("b")
    impatient.wait_going("a", "b")
    impatient.end()


def test_one_whose_peer_is_gone_waits_no_longer(transfers: Transfers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "GONE_S", 0.1)
    begin_one_after_the_other(transfers, "a", "b", "c")
    here = threading.Event()
    here.set()
    gone = threading.Thread(target=partial(take, transfers._turns, here.is_set))
    gone.start()
    wait_until(lambda: waiting(transfers) == 2, "both wait", WAIT_S)
    here.clear()
    gone.join(WAIT_S / 2)
    assert not gone.is_alive()
    assert (transfers.going, waiting(transfers)) == ({"a", "b"}, 1)
    transfers.end("a")
    transfers.wait_going("b", "c")
    transfers.end()


def take(of: Turns, is_active: Callable[[], bool]) -> None:
    with of.taken("d", LONG, is_active):
        pass


@pytest.mark.parametrize("places", [1, 2, 5])
def test_never_more_than_its_places_go_at_once_and_all_come_through(places: int) -> None:
    of, lock = Turns(places=places, patience_s=WAIT_S), threading.Lock()
    now = most = done = 0

    def go(number: int) -> None:
        nonlocal now, most, done
        with of.taken(f"site-{number}", LONG) as turn:
            turn.moved(10**15)
            with lock:
                now += 1
                most = max(most, now)
            time.sleep(0.002)
            with lock:
                now, done = now - 1, done + 1

    run_all(partial(go, number) for number in range(40))
    assert (most, done) == (places, 40)


def test_one_that_fails_gives_its_place_up() -> None:
    of = Turns(places=1, patience_s=WAIT_S)
    with pytest.raises(ConnectionError), of.taken("a", LONG):
        raise ConnectionError
    began = time.monotonic()
    with of.taken("b", LONG):
        assert time.monotonic() - began < WAIT_S / 2


def run_all(acts: Iterable[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=act) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
