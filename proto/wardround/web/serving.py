"""Serves an application until SIGTERM: where it listens, under which names, with or without TLS of its own."""

import asyncio
import ipaddress
import logging
import os
import socket
import threading
import types
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from wardround.cli import say
from wardround.errors import BadData, NeedsPerson, Unavailable, UsageProblem
from wardround.local import memory
from wardround.local.event import Latch, set_by_signals
from wardround.local.logs import log_to_stderr

if TYPE_CHECKING:
    from wardround.web.application import Application
    from wardround.web.live import Live

MOST_CONNECTIONS = 200
HEAD_S = 20.0  # in which a connection must have said what it wants, each time
GRACE_S = 3
LATE_S = 2  # after which the process ends as it is
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where pages are served: HOST and PORT, and the names that browsers reach them by.

    Attributes:
        certificate, key: PEM files, for TLS; None where there is none.
        origins: of the addresses in browsers, such as "https://fed.example.org".
    """

    host: str
    port: int
    certificate: Path | None
    key: Path | None
    origins: frozenset[str]

    @property
    def secure(self) -> bool:
        """Whether each browser comes by HTTPS."""
        return self.certificate is not None or any(origin.startswith("https://") for origin in self.origins)


def split(listen: str) -> tuple[str, int]:
    """HOST and PORT, the host an IP address without brackets.

    Raises:
        UsageProblem: it is no such pair.
    """
    host, _, port = listen.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host.strip("[]")
    try:
        ipaddress.ip_address(host)
        number = int(port)
    except ValueError:
        number = -1
    if not 0 <= number < 65536:
        raise UsageProblem(f"{listen[:80]!r} is no IP address with a port", hint="as in --listen 127.0.0.1:8080")
    return host, number


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    return ipaddress.ip_address(host).is_loopback


def place(
    listen: str, *, origin: str = "", certificate: Path | None = None, key: Path | None = None, only_loopback: bool
) -> Place:
    """Where to serve.

    Args:
        origin: what browsers call us, where something stands before us that speaks TLS.
        only_loopback: no other address is taken, whatever else is given.

    Raises:
        UsageProblem: an address that passwords must not travel to, or options that do not belong together.
        BadData: the certificate's or the key's file cannot be read.
    """
    host, port = split(listen)
    if not is_loopback(host):
        if only_loopback:
            raise UsageProblem(
                f"{listen[:80]} is not an address of this machine alone: the page is for this machine, and no other",
                hint="`--listen 127.0.0.1:PORT`; from another machine, `ssh -L PORT:127.0.0.1:PORT THIS-MACHINE`",
            )
        if certificate is None:
            raise UsageProblem(
                f"{listen[:80]} can be reached by others, and there is no TLS: passwords would be read on the way",
                hint="give --certificate and --key; or listen at 127.0.0.1 behind a proxy that speaks TLS, with "
                "--origin https://NAME",
            )
        if not origin:
            raise UsageProblem(
                f"{listen[:80]} can be reached under any name, and a page must know its own",
                hint="--origin https://NAME, as people type it",
            )
    if (certificate is None) != (key is None):
        raise UsageProblem("--certificate and --key belong together")
    for path in filter(None, (certificate, key)):
        if not path.is_file():
            raise BadData(f"{path}: there is no such file", hint="a file in PEM")
    if origin and not _is_origin(origin):
        raise UsageProblem(f"{origin[:80]!r} is no origin", hint="as in --origin https://fed.example.org")
    return Place(host, port, certificate, key, frozenset({origin.lower()} if origin else ()))


def _is_origin(origin: str) -> bool:
    scheme, _, name = origin.partition("://")
    return scheme in ("http", "https") and bool(name) and name.isascii() and not set(name) & set("/?#@ \\\"'<>")


def serve(there: Place, application: "Application", live: "Live") -> None:
    """Serve until SIGTERM or SIGINT. Prints ``ready URL`` on stdout, and on stderr if nobody can log in yet.

    Raises:
        Unavailable: it cannot listen there.
        BadData, NotPermitted: the file of those who may log in is damaged, or others may read it.
    """
    import uvicorn

    from wardround.web.guard import Guard

    nobody_yet = application.nobody_yet()
    family = socket.AF_INET6 if ":" in there.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((there.host, there.port))
    except OSError as error:
        listener.close()
        raise Unavailable(
            f"cannot listen at {there.host}:{there.port}: {error.strerror}",
            hint="stop what listens there, or give another port",
        ) from None
    port = listener.getsockname()[1]
    scheme = "https" if there.certificate is not None else "http"
    name = f"[{there.host}]" if ":" in there.host else there.host
    guarded = Guard(application.app, there.origins or {f"{scheme}://{host}:{port}" for host in (*LOOPBACK, name)})

    class Server(uvicorn.Server):
        """One that tells the browsers that wait for changes when it ends, and waits for no view that does not return:
        one that asks a service which does not answer waits for minutes, and nothing else ends its thread."""

        late = threading.Timer(GRACE_S + LATE_S, _end_now)

        def handle_exit(self, sig: int, frame: types.FrameType | None) -> None:
            live.end()
            super().handle_exit(sig, frame)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            live.begin()
            await super().startup(sockets)
            print(f"ready {scheme}://{name}:{port}", flush=True)
            if nobody_yet:
                say(nobody_yet)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            self.late.start()
            await super().shutdown(sockets)

    config = uvicorn.Config(
        guarded, http=prompt(), ws="none", lifespan="off", loop="asyncio", interface="asgi3", log_config=None,
        log_level="warning", access_log=False, server_header=False, proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS, timeout_keep_alive=20, timeout_graceful_shutdown=GRACE_S,
        ssl_certfile=there.certificate, ssl_keyfile=there.key,
    )  # fmt: skip
    server = Server(config)
    server.late.daemon = True
    with listener, set_by_signals(Latch()):  # uvicorn raises the signal once more when it has ended
        server.run(sockets=[listener])


def _end_now() -> None:
    """End the process at once. What a page was asked to change is done, or not, by the service that it asked."""
    log.warning("ended while a page waits for an answer that does not come")
    os._exit(0)


def prompt() -> "type[asyncio.Protocol]":
    """HTTP as uvicorn speaks it, on connections that end when they have not said what they want after ``HEAD_S``.

    uvicorn waits for ever; as many as it takes would keep everybody out.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Prompt(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._await_head()

        def on_response_complete(self) -> None:
            self._await_head()  # first: what follows may begin the next request at once
            super().on_response_complete()

        def _await_head(self) -> None:
            waiting = self.cycle
            self.loop.call_later(HEAD_S, lambda: self.transport.abort() if self.cycle is waiting else None)

    return Prompt


def begin() -> None:
    """What the process of a page does first.

    Raises:
        NeedsPerson: the extra is not installed.
    """
    refuse_without_extra()
    memory.hide()
    log_to_stderr()


def refuse_without_extra() -> None:
    """Raises NeedsPerson: the extra is not installed."""
    for package in ("starlette", "uvicorn"):
        try:
            import_module(package)
        except ModuleNotFoundError:
            raise NeedsPerson(
                f"a page needs {package}, which is not installed", hint="`pip install 'wardround[dashboard]'`"
            ) from None
