"""A round waits for room on the disk."""

from collections.abc import Callable

import pytest

from site_agent.gateway import room
from site_agent.gateway.connection.interrupt import Interrupted
from site_agent.gateway.room import with_room
from tests.site_agent.waits import Waits
from wardround.errors import CannotWrite
from wardround.local.durable import StorageFailed


def failing(times: int, error: CannotWrite) -> Callable[[], bool]:
    left = [error] * times

    def act() -> bool:
        if left:
            raise left.pop()
        return True

    return act


FULL = CannotWrite("/data has 3 MiB free, a round needs 120 MiB", hint="free some space", code="DECLINED_RESOURCES")


def test_a_round_goes_on_when_there_is_room_again(caplog: pytest.LogCaptureFixture) -> None:
    waits = Waits()
    assert with_room(failing(3, FULL), "round 2 of `trial`", waits)
    assert len(waits.asked) == 3
    said = "round 2 of `trial` waits for the disk: /data has 3 MiB free, a round needs 120 MiB; free some space"
    assert said in caplog.text


def test_a_disk_that_stays_full_is_said_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "ROOM_S", 0)
    with pytest.raises(CannotWrite, match="3 MiB free"):
        with_room(failing(3, FULL), "round 2 of `trial`", Waits())


def test_a_disk_that_failed_is_not_waited_for() -> None:
    waits = Waits()
    with pytest.raises(StorageFailed):
        with_room(failing(1, StorageFailed("the disk failed")), "round 2 of `trial`", waits)
    assert not waits.asked


def test_a_round_that_is_called_off_waits_no_longer() -> None:
    with pytest.raises(Interrupted):
        with_room(failing(9, FULL), "round 2 of `trial`", Waits(most=2))
