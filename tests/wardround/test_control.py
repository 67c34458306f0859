"""Commands over the Unix socket in a state directory."""

import io
import json
import logging
import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tools.world import wait_until
from wardround import errors
from wardround.errors import (
    BadData,
    CannotWrite,
    NeedsPerson,
    NotPermitted,
    TryAgain,
    Unavailable,
    UsageProblem,
    WardroundError,
)
from wardround.local import control, frames, sockets
from wardround.local.control import ControlServer, call
from wardround.local.durable import StateLock


class Service:
    """What a service does with each command of these tests."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.left = threading.Event()

    def __call__(self, request: dict[str, Any], progress: control.Reply) -> Any:
        match request["command"]:
            case "echo":
                return request["text"]
            case "count":
                for n in range(request["to"]):
                    progress({"step": n})
                return "counted"
            case "fail":
                raise NeedsPerson("the study changed", hint="site-agent preview", code="REVISION_CHANGED")
            case "crash":
                raise ZeroDivisionError("a path and a value")
            case "wait":
                self.release.wait(timeout=30)
                return "late"
            case "talk until nobody listens":
                try:
                    while not self.release.is_set():
                        progress("x" * 100_000)
                finally:
                    self.left.set()
        return None


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def path(tmp_path: Path, service: Service) -> Iterator[Path]:
    server = ControlServer(tmp_path / "control.sock", service)
    yield tmp_path / "control.sock"
    service.release.set()
    server.close()
    assert not (tmp_path / "control.sock").exists()


def test_a_command_gets_its_result(path: Path) -> None:
    assert call(path, {"command": "echo", "text": "ø\n"}) == "ø\n"
    assert call(path, {"command": "nothing"}) is None


def test_progress_comes_before_the_result_in_its_order(path: Path) -> None:
    seen: list[Any] = []
    assert call(path, {"command": "count", "to": 4}, seen.append) == "counted"
    assert seen == [{"step": n} for n in range(4)]
    assert call(path, {"command": "count", "to": 4}) == "counted"


def test_an_error_passes_through_as_itself(path: Path) -> None:
    with pytest.raises(NeedsPerson) as caught:
        call(path, {"command": "fail"})
    error = caught.value
    assert (error.message, error.hint, error.code) == ("the study changed", "site-agent preview", "REVISION_CHANGED")


@pytest.mark.parametrize("kind", errors.BY_EXIT_CODE.values())
def test_every_kind_of_error_passes_through(tmp_path: Path, kind: type[WardroundError]) -> None:
    def handler(request: dict[str, Any], progress: control.Reply) -> Any:
        raise kind("said")

    server = ControlServer(tmp_path / "s", handler)
    with pytest.raises(kind) as caught:
        call(tmp_path / "s", {})
    assert type(caught.value) is kind
    server.close()


def test_a_crash_is_logged_where_it_happened_and_told_without_its_text(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(WardroundError) as caught:
        call(path, {"command": "crash"})
    assert (caught.value.message, caught.value.hint) == ("the service failed at this command", "its log says why")
    assert "a path and a value" in caplog.text


@pytest.mark.parametrize("line", [b"5\n", b"{\n", b"\xff\n", b"[1]\n"])
def test_what_is_no_request_is_refused(path: Path, line: bytes) -> None:
    with sockets.connect(path) as connection, connection.makefile("rb") as stream:
        connection.settimeout(10)
        connection.sendall(line)
        answer = json.loads(stream.readline())
    assert answer["error"]["message"] == "not a request: one JSON object on one line was wanted"
    assert answer["error"]["exit_code"] == UsageProblem.exit_code


def test_a_look_whether_someone_listens_is_no_failed_command(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert control.is_listening(path)
    assert call(path, {"command": "echo", "text": "still here"}) == "still here"
    assert caplog.text == ""
    assert not control.is_listening(path.parent / "other.sock")
    assert not control.is_listening(path.parent / "missing" / "other.sock")


def test_a_command_that_goes_away_does_not_trouble_the_service(
    path: Path, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    connection = sockets.connect(path)
    connection.sendall(b'{"command":"talk until nobody listens"}\n')
    assert connection.recv(10)
    connection.close()
    assert service.left.wait(timeout=30)
    assert call(path, {"command": "echo", "text": "still here"}) == "still here"
    assert caplog.text == ""


def test_an_answer_that_does_not_come_is_said_with_the_time(path: Path) -> None:
    with pytest.raises(Unavailable) as caught:
        call(path, {"command": "wait"}, timeout_s=0.2)
    assert caught.value.message == f"the service at {path.parent} gave no answer in 0.2 s"


@contextmanager
def beating(path: Path, service: Service, monkeypatch: pytest.MonkeyPatch, seconds: float) -> Iterator[Path]:
    """A service that says so often that it is alive."""
    monkeypatch.setattr(control, "BEAT_S", seconds)
    server = ControlServer(path, service)
    try:
        yield path
    finally:
        service.release.set()
        server.close()


def test_a_service_that_says_that_it_is_alive_is_waited_for(
    tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[object] = []
    with beating(tmp_path / "control.sock", service, monkeypatch, 0.02) as path:
        threading.Timer(2, service.release.set).start()
        assert call(path, {"command": "wait"}, said.append, silent_s=1) == "late"
    assert not said  # it is no progress


def test_a_silent_service_is_not_waited_for(tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = beating(tmp_path / "control.sock", service, monkeypatch, 3600)
    with silent as path, pytest.raises(Unavailable, match=r"gave no answer in 0\.2 s"):
        call(path, {"command": "wait"}, silent_s=0.2)


def test_a_service_that_is_alive_and_does_not_answer_is_not_waited_for_without_end(
    tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = beating(tmp_path / "control.sock", service, monkeypatch, 0.02)
    with alive as path, pytest.raises(Unavailable, match=r"gave no answer in 0\.3 s"):
        call(path, {"command": "wait"}, timeout_s=0.3)


def test_nobody_listening_is_said(tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as caught:
        call(tmp_path / "control.sock", {})
    assert caught.value.message == f"no service listens at {tmp_path / 'control.sock'} (No such file or directory)"


def test_a_service_that_takes_nobody_out_of_its_queue_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "QUEUE_S", 0.05)
    path = tmp_path / "control.sock"

    def fill(queue: ExitStack) -> None:
        for _ in range(1000):  # more than its length, which is the kernel's to say
            queue.enter_context(sockets.connect(path))

    with sockets.listen(path), ExitStack() as queue:
        with pytest.raises(Unavailable) as refused:
            fill(queue)
        assert refused.value.message == f"the service at {tmp_path} takes no connection"
        assert refused.value.hint == "it is stopped, or hung: start it again"
        assert control.is_listening(path)
        with pytest.raises(Unavailable, match="takes no connection"):
            call(path, {"command": "status"})


def test_a_service_that_goes_away_is_said(tmp_path: Path) -> None:
    listener = sockets.listen(tmp_path / "s")

    def take_and_leave() -> None:
        connection, _ = listener.accept()
        connection.recv(1)
        connection.close()

    thread = threading.Thread(target=take_and_leave)
    thread.start()
    with pytest.raises(Unavailable) as caught:
        call(tmp_path / "s", {"command": "x"})
    assert caught.value.message == f"the service at {tmp_path} went away before it answered"
    thread.join(timeout=30)
    listener.close()


def test_a_state_folder_may_be_longer_than_a_sockets_path(tmp_path: Path, service: Service) -> None:
    folder = tmp_path / ("a" * 100) / ("b" * 100)
    folder.mkdir(parents=True)
    server = ControlServer(folder / "control.sock", service)
    assert call(folder / "control.sock", {"command": "echo", "text": "far"}) == "far"
    server.close()


def test_a_stale_socket_is_replaced_and_the_mode_is_as_asked(tmp_path: Path, service: Service) -> None:
    sockets.listen(tmp_path / "s").close()
    server = ControlServer(tmp_path / "s", service, mode=0o660)
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o660
    assert call(tmp_path / "s", {"command": "echo", "text": "x"}) == "x"
    server.close()


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(CannotWrite) as caught:
        sockets.listen(tmp_path / "missing" / "s")
    assert (
        caught.value.message == f"{tmp_path / 'missing' / 's'}: no socket can be made there (No such file or directory)"
    )


def test_another_user_is_refused_by_what_the_kernel_says_of_it(tmp_path: Path, service: Service) -> None:
    """Whatever the socket's mode; here this very user is not among those allowed."""
    server = ControlServer(tmp_path / "s", service, users=frozenset({os.geteuid() + 1}))
    with pytest.raises(NotPermitted) as caught:
        call(tmp_path / "s", {"command": "echo", "text": "x"})
    assert caught.value.message == f"user {os.geteuid()} may not command this service"
    assert caught.value.hint == f"run the command as the service's user: `sudo -u '#{os.geteuid()}' ...`"
    server.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_peers_user_is_the_one_that_connected() -> None:
    """The kernel notes the user at the moment of connecting."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        listener = sockets.listen(Path(folder, "s"), mode=0o666)
        os.seteuid(12345)
        try:
            asking = sockets.connect(Path(folder, "s"))
        finally:
            os.seteuid(0)
        connection, _ = listener.accept()
        assert sockets.peer_user(connection) == 12345
        for opened in (asking, connection, listener):
            opened.close()


@pytest.mark.parametrize("size", [frames.PIECE - 20, frames.PIECE, 3 * frames.PIECE, 9 * frames.PIECE + 7])
def test_an_answer_of_any_length_comes_whole(path: Path, size: int) -> None:
    text = ('"\\ø\n' * size)[:size]
    asked = text[: frames.MAX_LINE // 4]
    assert call(path, {"command": "echo", "text": asked}) == asked
    (whole,) = frames.texts(io.BytesIO(b"".join(frames.lines_of({"result": text}))))
    assert frames.parsed(whole) == {"result": text}


def test_an_answer_is_not_longer_than_the_asker_takes(path: Path) -> None:
    text = "x" * (2 * frames.PIECE)
    with pytest.raises(BadData, match="the service's answer is longer than is taken here"):
        call(path, {"command": "echo", "text": text}, most=frames.PIECE)
    with pytest.raises(BadData, match="not an answer: one JSON object on one line was wanted"):
        frames.parsed(b"[1]\n")


def test_a_request_that_does_not_come_is_not_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "REQUEST_S", 0.2)
    with sockets.connect(path) as connection, connection.makefile("rb") as stream:
        connection.settimeout(10)
        connection.sendall(b'{"command":')
        answer = json.loads(stream.readline())
    assert answer["error"]["message"] == "no request came in 0.2 s"


def test_a_request_has_a_length(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_LINE", 1000)
    with sockets.connect(path) as connection, connection.makefile("rb") as stream:
        connection.settimeout(10)
        connection.sendall(b"x" * 1001)
        assert json.loads(stream.readline())["error"]["message"] == "a request of more than 1000 bytes"


def test_connections_are_bounded_and_one_more_is_told_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_CONNECTIONS", 3)
    held = [sockets.connect(path) for _ in range(3)]
    with pytest.raises(TryAgain, match="3 commands are under way here"):
        call(path, {"command": "echo", "text": "x"})
    for connection in held:
        connection.close()
    wait_until(lambda: answered(path), "it answers again", 20)


def answered(path: Path) -> bool:
    try:
        return bool(call(path, {"command": "echo", "text": "again"}) == "again")
    except TryAgain:
        return False


def test_where_no_thread_can_be_started_the_caller_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TryAgain, match="this machine starts no more threads now"):
            call(path, {"command": "echo", "text": "x"})
    assert call(path, {"command": "echo", "text": "x"}) == "x"


def test_an_answer_under_way_is_finished_before_what_it_reads_is_closed(tmp_path: Path) -> None:
    asked, go_on, done = threading.Event(), threading.Event(), []

    def handle(request: control.frames.Document, reply: control.Reply) -> dict[str, bool]:
        asked.set()
        assert go_on.wait(20)
        done.append("answered")
        return {"ok": True}

    server = control.ControlServer(tmp_path / "control.sock", handle)
    caller = threading.Thread(target=control.call, args=(tmp_path / "control.sock", {"command": "x"}))
    caller.start()
    assert asked.wait(20)
    threading.Timer(0.2, go_on.set).start()
    server.close()
    done.append("closed")
    caller.join(20)
    assert done == ["answered", "closed"]


def test_a_service_that_is_only_starting_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the state before it listens; a command in between would say that the state is in use."""
    path = tmp_path / "control.sock"
    assert not control.serves(tmp_path, path)
    with StateLock(tmp_path, "a service"):
        asked = threading.Event()

        def looks(at: Path) -> bool:
            if asked.is_set():
                return True
            asked.set()
            return False

        monkeypatch.setattr(control, "is_listening", looks)
        assert control.serves(tmp_path, path)
        monkeypatch.setattr(control, "is_listening", lambda at: False)
        monkeypatch.setattr(control, "STARTING_S", 0)
        assert not control.serves(tmp_path, path)
    assert not control.is_held(tmp_path)
