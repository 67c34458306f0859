"""An HTTP proxy on the way to the coordinator: with a password, without one, and what goes wrong with it."""

import base64
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from site_agent.cli import main
from site_agent.gateway.connection.diagnosis import diagnose
from site_agent.gateway.connection.proxy import Proxy, proxy_from, read_proxy
from site_agent.gateway.enrolment import join as joining
from tests.site_agent.fake_coordinator import Authority, FakeCoordinator
from tests.site_agent.site_world import STUDY, SiteWorld
from wardround.errors import BadData, NeedsPerson, NotPermitted, Unavailable

USER, PASSWORD = "st olav", "p@ss:w/ord"
LINE = "http://st%20olav:p%40ss%3Aw%2Ford@"


class FakeProxy:
    """Forwards by CONNECT. ``secret``: what it wants as Proxy-Authorization, or "". ``asked``: each address."""

    def __init__(self, secret: str = "", reply: bytes = b"") -> None:
        self.secret, self.reply = secret, reply
        self.asked: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(20)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                end, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(end,), daemon=True).start()

    def _serve(self, site: socket.socket) -> None:
        with site, suppress(OSError):
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                if not (piece := site.recv(1)):
                    return
                head += piece
            first, *lines = head.decode().split("\r\n")
            if self.reply:
                site.sendall(self.reply)
                return
            if self.secret and f"Proxy-Authorization: Basic {self.secret}".lower() not in map(str.lower, lines):
                site.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
                return
            address = first.split(" ")[1]
            self.asked.append(address)
            host, _, port = address.rpartition(":")
            with socket.create_connection((host, int(port))) as coordinator:
                site.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                down = threading.Thread(target=pump, args=(coordinator, site), daemon=True)
                down.start()
                pump(site, coordinator)
                down.join()


def pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@contextmanager
def proxy(secret: str = "", reply: bytes = b"") -> Iterator[FakeProxy]:
    fake = FakeProxy(secret, reply)
    try:
        yield fake
    finally:
        fake.close()


SECRET = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


def test_a_site_joins_and_works_through_a_proxy_with_a_password(
    world: SiteWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the environment says of proxies."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    with proxy(SECRET) as fake:
        (world.folder / "invitation").write_text(world.coordinator.invite("st-olav"))
        (world.folder / "proxy").write_text(f"{LINE}{fake.address}\n")
        line = ["join", "--state", world.state.root, "--invitation", world.folder / "invitation"]
        line += ["--proxy", world.folder / "proxy"]
        done = CliRunner().invoke(main.app, list(map(str, line)), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        kept = world.state.identity / "proxy"
        assert kept.stat().st_mode & 0o777 == 0o600
        monkeypatch.setattr(joining, "join", lambda *given: None)
        monkeypatch.setattr("tests.site_agent.site_world.join", lambda *given: None)
        world.join()
        world.offer()
        world.start()
        world.approve()
        world.coordinator.wait_declared("READY")
        world.coordinator.assign(STUDY, 1)
        world.coordinator.wait_receipts(1)
        assert set(fake.asked) == {world.coordinator.address}
        assert len(fake.asked) == 2  # one to join, one since


@pytest.mark.parametrize(
    ("line", "said", "error"),
    [
        ("http://", "wants a password (407): a user name and one", NeedsPerson),
        ("http://other:word@", "wants a password (407): others than", NeedsPerson),
    ],
)
def test_a_proxy_that_wants_another_password_is_said(line: str, said: str, error: type[Exception]) -> None:
    with proxy(SECRET) as fake:
        found = diagnose("127.0.0.1:9", Authority().pem, proxy=proxy_from(f"{line}{fake.address}", "proxy"))
    assert isinstance(found, error)
    assert said in found.message
    assert "word" not in found.message.replace("password", "")


@pytest.mark.parametrize(
    ("reply", "said", "error"),
    [
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "does not let connections to 127.0.0.1:9 through (403)", NeedsPerson),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n", "does not reach 127.0.0.1:9 (502)", Unavailable),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "does not reach 127.0.0.1:9 (no HTTP)", Unavailable),
        (b"x" * 20_000, "does not reach 127.0.0.1:9 (no HTTP)", Unavailable),
    ],
    ids=["forbidden", "bad gateway", "no HTTP", "endless"],
)
def test_a_proxy_that_does_not_let_us_through_is_said(reply: bytes, said: str, error: type[Exception]) -> None:
    with proxy(reply=reply) as fake:
        found = diagnose("127.0.0.1:9", Authority().pem, proxy=proxy_from(f"http://{fake.address}", "proxy"))
    assert isinstance(found, error)
    assert said in found.message


def test_a_proxy_that_is_not_there_is_said() -> None:
    found = diagnose("127.0.0.1:9", Authority().pem, proxy=Proxy("127.0.0.1", 9))
    assert "the proxy 127.0.0.1:9 cannot be reached (Connection refused)" in found.message


def test_what_is_behind_a_proxy_is_looked_at_as_without_one() -> None:
    coordinator = FakeCoordinator()
    try:
        with proxy() as fake:
            found = diagnose(
                coordinator.address, Authority("other").pem, proxy=proxy_from(f"http://{fake.address}", "proxy")
            )
    finally:
        coordinator.stop()
    assert "presents another authority" in found.message


def test_a_join_through_a_proxy_that_refuses_says_so(world: SiteWorld) -> None:
    with proxy(reply=b"HTTP/1.1 403 Forbidden\r\n\r\n") as fake:
        way = proxy_from(f"http://{fake.address}", "proxy")
        with pytest.raises(NeedsPerson, match="does not let connections to"):
            joining.join(world.state, world.coordinator.invite("st-olav"), way)


@pytest.mark.parametrize(
    "text",
    ["", "proxy:3128", "https://proxy:3128", "http://proxy", "http://proxy:99999", "http://a@b:1", "http://p:1/x",
     "http://p:1\nhttp://q:2", "http://hunter2:@x@y:1", "http://ø:1"],
)  # fmt: skip
def test_a_line_that_names_no_proxy_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(BadData, match=r"proxy.txt names no proxy: it has one line, http://HOST:PORT") as refused:
        proxy_from(text, "proxy.txt")
    assert not text or text not in refused.value.message + refused.value.hint


def test_a_proxy_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "proxy"
    assert read_proxy(path) is None
    for named in (Proxy("proxy.example", 3128), Proxy("::1", 8080, USER, PASSWORD)):
        path.write_text(named.url + "\n")
        path.chmod(0o600)
        assert read_proxy(path) == named
        assert PASSWORD not in repr(named)
    path.chmod(0o640)
    with pytest.raises(NotPermitted, match="can be read by others than its owner"):
        read_proxy(path)
    path.write_text("http://proxy.example:3128")
    assert read_proxy(path) == Proxy("proxy.example", 3128)
