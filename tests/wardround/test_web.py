"""What the pages of both programs share: passwords, sessions, where they listen, metrics and logs."""

import json
import logging
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.browser import CHEAP, PASSWORD
from tools.world import free_port
from wardround.errors import BadData, NeedsPerson, NotPermitted, UsageProblem
from wardround.local.logs import JsonLines, use_format
from wardround.local.sockets import connect
from wardround.web import metrics_server
from wardround.web.live import Live
from wardround.web.monitoring import Metric, Values, monitored
from wardround.web.passwords import Users
from wardround.web.serving import place, refuse_without_extra
from wardround.web.sessions import (
    IDLE_S,
    LIFE_S,
    MOST_IN_ALL,
    MOST_OF_A_NAME,
    MOST_SESSIONS,
    WINDOW_S,
    Attempts,
    Sessions,
)


@pytest.fixture
def users(tmp_path: Path) -> Users:
    users = Users(tmp_path / "page" / "users.json", CHEAP)
    users.put("dana", PASSWORD, "decide")
    return users


# Passwords


def test_a_password_is_kept_as_a_salted_hash_that_only_its_user_can_read(users: Users, tmp_path: Path) -> None:
    path = tmp_path / "page" / "users.json"
    assert path.stat().st_mode & 0o777 == 0o600
    users.put("lou", PASSWORD, "look")
    dana, lou = users.all()
    assert PASSWORD not in path.read_text()
    assert dana.secret != lou.secret
    path.chmod(0o640)
    with pytest.raises(NotPermitted, match="can be read by others than its owner"):
        users.all()


def test_a_hash_costs_what_the_cheat_sheet_asks(tmp_path: Path) -> None:
    users = Users(tmp_path / "users.json")
    users.put("dana", PASSWORD, "look")
    (dana,) = users.all()
    assert (dana.cost, dana.block, dana.parallel) == (2**15, 8, 3)


def test_the_right_password_logs_in_and_no_other(users: Users) -> None:
    assert users.logged_in("dana", PASSWORD) == users.find("dana")
    assert users.logged_in("dana", PASSWORD + "x") is None
    assert users.logged_in("nobody", PASSWORD) is None
    assert users.logged_in("", "") is None


def test_another_password_or_other_rights_make_another_mark(users: Users) -> None:
    marks = {users.all()[0].mark}
    assert not users.put("dana", PASSWORD, "look")
    marks.add(users.all()[0].mark)
    assert not users.put("dana", PASSWORD[::-1], "look")
    marks.add(users.all()[0].mark)
    assert len(marks) == 3


@pytest.mark.parametrize(
    ("name", "password", "why"),
    [
        pytest.param("dana", "short", "a password of 5 characters, 12 to 1024 are taken", id="a short password"),
        pytest.param("Dana <script>", PASSWORD, "'Dana <script>' is not a user's name", id="a name with marks"),
        pytest.param("-", PASSWORD, "'-' is not a user's name", id="no letter"),
    ],
)
def test_what_can_be_no_user_is_refused(users: Users, name: str, password: str, why: str) -> None:
    with pytest.raises(UsageProblem) as refused:
        users.put(name, password, "look")
    assert refused.value.message.startswith(why)


def test_removing_a_user_who_is_not_there_names_those_who_are(users: Users) -> None:
    with pytest.raises(UsageProblem, match="there is no user `lou`") as refused:
        users.remove("lou")
    assert refused.value.hint == "users: dana"
    users.remove("dana")
    assert users.all() == ()


def test_a_damaged_file_of_users_lets_nobody_in(users: Users, tmp_path: Path) -> None:
    (tmp_path / "page" / "users.json").write_text("{")
    with pytest.raises(BadData, match="it holds no list of users"):
        users.logged_in("dana", PASSWORD)


# Sessions


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_session_ends_when_nothing_is_done_and_at_the_end_of_its_life(users: Users) -> None:
    clock = Clock()
    sessions, user = Sessions(clock), users.all()[0]
    token = sessions.begin(user)
    clock.now += IDLE_S - 1
    assert sessions.find(token) is not None
    clock.now += IDLE_S - 1
    assert sessions.find(token, used=False) is not None  # a browser that listens does nothing
    clock.now += 1
    assert sessions.find(token) is None
    token = sessions.begin(user)
    for _ in range(int(LIFE_S / IDLE_S) * 2):
        sessions.find(token)
        clock.now += IDLE_S / 2
    assert sessions.find(token) is None


def test_sessions_are_bounded_and_the_idle_one_makes_room(users: Users) -> None:
    clock = Clock()
    sessions, user = Sessions(clock), users.all()[0]
    tokens = []
    for _ in range(MOST_SESSIONS + 1):
        tokens.append(sessions.begin(user))
        clock.now += 0.001
    assert sessions.find(tokens[0]) is None
    assert sessions.find(tokens[-1]) is not None
    assert len(set(tokens)) == len(tokens)


def test_failed_log_ins_are_counted_by_name_and_in_all() -> None:
    clock = Clock()
    attempts = Attempts(clock)
    for _ in range(MOST_OF_A_NAME):
        assert attempts.begin("dana") == 0
    assert attempts.begin("dana") == WINDOW_S
    assert attempts.begin("dana", 1000) == 0  # from another user of this machine
    attempts.succeeded("dana")
    for number in range(MOST_IN_ALL):
        assert attempts.begin(f"name-{number}") == 0
    assert attempts.begin("lou") == WINDOW_S
    clock.now += WINDOW_S
    assert attempts.begin("lou") == 0


# Where it listens


@pytest.mark.parametrize(
    ("listen", "options", "only_loopback", "why"),
    [
        pytest.param("0.0.0.0:8080", {}, True, "0.0.0.0:8080 is not an address of this machine alone", id="any"),
        pytest.param("192.0.2.1:80", {}, True, "192.0.2.1:80 is not an address of this machine alone", id="network"),
        pytest.param("[::]:8080", {}, True, "[::]:8080 is not an address of this machine alone", id="any, IPv6"),
        pytest.param("0.0.0.0:8080", {}, False, "0.0.0.0:8080 can be reached by others, and there is no TLS", id="TLS"),
        pytest.param("hospital:80", {}, False, "'hospital:80' is no IP address with a port", id="a name"),
        pytest.param("127.0.0.1", {}, False, "'127.0.0.1' is no IP address with a port", id="no port"),
        pytest.param("127.0.0.1:99999", {}, False, "'127.0.0.1:99999' is no IP address with a port", id="a port"),
        pytest.param("127.0.0.1:0", {"origin": "fed.example"}, False, "'fed.example' is no origin", id="origin"),
        pytest.param("127.0.0.1:0", {"key": Path("k")}, False, "--certificate and --key belong together", id="half"),
        pytest.param(
            "0.0.0.0:1", {"certificate": Path("/"), "key": Path("/")}, False,
            "0.0.0.0:1 can be reached under any name", id="no name",
        ),
    ],
)  # fmt: skip
def test_an_address_that_a_page_must_not_have_is_refused(
    listen: str, options: dict[str, object], only_loopback: bool, why: str
) -> None:
    with pytest.raises(UsageProblem) as refused:
        place(listen, only_loopback=only_loopback, **options)  # type: ignore[arg-type]
    assert refused.value.message.startswith(why)


def test_a_page_of_this_machine_has_a_place(tmp_path: Path) -> None:
    assert not place("127.0.0.1:8080", only_loopback=True).secure
    assert not place("localhost:8080", only_loopback=True).secure
    assert place("[::1]:0", origin="https://Fed.example", only_loopback=False).origins == {"https://fed.example"}
    assert place("[::1]:0", origin="https://fed.example", only_loopback=False).secure
    with pytest.raises(BadData, match="there is no such file"):
        place("127.0.0.1:0", certificate=tmp_path / "none", key=tmp_path / "none", only_loopback=False)


# Live


def test_whoever_waits_is_told_of_a_change_by_any_thread() -> None:
    import asyncio

    live = Live()

    async def wait() -> list[bool]:
        live.begin()
        threading.Thread(target=live.tell).start()
        told = [await live.beyond(1, 20)]
        told.append(await live.beyond(live.version, 0.01))
        threading.Thread(target=live.end).start()
        await live.until_ended(20)
        return [*told, live.ended]

    assert asyncio.run(wait()) == [True, False, True]


# Metrics

COUNT = Metric("wardround_test_things_total", "counter", "Things", ("kind",))
LEVEL = Metric("wardround_test_level", "gauge", "A level")


def families() -> Iterator[tuple[Metric, Values]]:
    yield COUNT, {("a",): 2, ('b\n"',): 1}
    yield LEVEL, {(): 0.5}


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_metrics_health_and_readiness_are_told_on_this_machine() -> None:
    ready, at = [True], f"127.0.0.1:{free_port()}"
    with monitored(at, families, lambda: ready[0], only_here=True):
        status, text = get(f"http://{at}/metrics")
        assert status == 200
        assert 'wardround_test_things_total{kind="a"} 2.0' in text
        assert 'wardround_test_things_total{kind="b\\n\\""} 1.0' in text
        assert "wardround_test_level 0.5" in text
        assert "process_resident_memory_bytes" in text
        assert get(f"http://{at}/readyz") == (200, "ready\n")
        ready[0] = False
        assert get(f"http://{at}/readyz") == (503, "not ready\n")
        assert get(f"http://{at}/healthz") == (200, "ok\n")
        assert get(f"http://{at}/../../etc/passwd")[0] == 404
        assert get(f"http://{at}/metrics", Host="rebound.example")[0] == 421
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://{at}/healthz", timeout=5)


def test_metrics_are_told_on_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sock"
    with monitored(f"unix:{path}", families, lambda: True, only_here=True), connect(path) as connection:
        connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert connection.makefile("rb").read().endswith(b"ok\n")
    assert not path.exists()


@pytest.mark.parametrize("address", ["0.0.0.0:9464", "192.0.2.1:9464", "[::]:9464"])
def test_a_site_tells_metrics_to_no_network(address: str) -> None:
    with (
        pytest.raises(UsageProblem, match="a site listens on no network"),
        monitored(address, families, lambda: True, only_here=True),
    ):
        pass


def test_what_is_no_address_of_metrics_is_refused() -> None:
    with pytest.raises(UsageProblem, match="'9464' is no address"), monitored("9464", families, lambda: True):
        pass


def test_whoever_says_nothing_keeps_nobody_from_metrics() -> None:
    at = f"127.0.0.1:{free_port()}"
    host, port = at.split(":")
    with monitored(at, families, lambda: True):
        held = [socket.create_connection((host, int(port))) for _ in range(4)]
        assert get(f"http://{at}/healthz") == (200, "ok\n")
        for connection in held:
            connection.close()


def test_metrics_are_told_again_after_there_was_no_room_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a limit of tasks is met for a while; health is asked all the time, and each try had kept a place."""

    def failing(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    at = f"127.0.0.1:{free_port()}"
    with monitored(at, families, lambda: True):
        with monkeypatch.context() as patched:
            patched.setattr(ThreadingHTTPServer, "process_request", failing)
            for _ in range(metrics_server.MOST):
                with pytest.raises(OSError):  # noqa: PT011  # it is hung up on, in one way or another
                    urllib.request.urlopen(f"http://{at}/healthz", timeout=5)
        assert get(f"http://{at}/healthz") == (200, "ok\n")


def monitored_once() -> None:
    with monitored(f"127.0.0.1:{free_port()}", families, lambda: True):
        pass


@pytest.mark.parametrize(
    ("package", "needs", "hint"),
    [
        ("starlette", "a page needs starlette, which is not installed", "`pip install 'wardround[dashboard]'`"),
        ("uvicorn", "a page needs uvicorn, which is not installed", "`pip install 'wardround[dashboard]'`"),
        ("prometheus_client", "metrics need prometheus_client", "`pip install 'wardround[metrics]'`"),
    ],
)
def test_an_extra_that_is_not_installed_is_named_with_the_command(
    package: str, needs: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    needing = refuse_without_extra if package != "prometheus_client" else monitored_once
    with pytest.raises(NeedsPerson, match=needs) as refused:
        needing()
    assert refused.value.hint == hint


# Logs


def test_a_process_and_its_children_log_in_the_form_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARDROUND_LOG_FORMAT", "text")
    code = "import logging; from wardround.local.logs import *; log_to_stderr('trainer'); logging.warning('hello')"
    for form, said in (("text", "trainer: hello"), ("json", '"message": "hello", "part": "trainer"}')):
        use_format(form)  # type: ignore[arg-type]
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        assert ran.stderr.strip().endswith(said)


def test_a_log_line_is_one_json_object() -> None:
    try:
        raise ValueError("one\ntwo")
    except ValueError as error:
        record = logging.LogRecord(
            "wardround.x", logging.WARNING, "", 1, "site %s\x1b[0m", ("a\nb",), (ValueError, error, error.__traceback__)
        )
    line = JsonLines().format(record)
    assert "\n" not in line
    said = json.loads(line)
    assert (said["level"], said["logger"], said["message"]) == ("warning", "wardround.x", "site a\\nb\\x1b[0m")
    assert said["exception"].splitlines()[-2:] == ["ValueError: one", "two"]
    assert said["time"].endswith("Z")
    assert json.loads(JsonLines("trainer").format(record))["part"] == "trainer"
