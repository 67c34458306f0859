"""An HTTP proxy between the site and the coordinator, by CONNECT, with or without a user name and a password.

The proxy sees the coordinator's address and TLS; the certificates of both ends go through it unchanged. It is named in
``identity/proxy``, one line: ``http://[USER:PASSWORD@]HOST:PORT``. What the environment says of proxies counts for
nothing here.
"""

import base64
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

from wardround.errors import BadData, NeedsPerson, Unavailable, WardroundError
from wardround.signing.certificates import refuse_readable

MAX_FILE = 4096
MAX_REPLY = 16 * 1024
_LINE = re.compile(
    r"http://(?:(?P<user>[^\s:@/]{1,255}):(?P<password>[^\s:@/]{0,255})@)?"
    r"(?P<host>[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):(?P<port>[0-9]{1,5})/?"
)
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})[ \r]")


@dataclass(frozen=True)
class Proxy:
    """An HTTP proxy. ``user`` and ``password`` are "" where it asks for none."""

    host: str
    port: int
    user: str = ""
    password: str = field(default="", repr=False)

    @property
    def address(self) -> str:
        """HOST:PORT, for messages."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """As gRPC takes it, with the password."""
        credentials = f"{quote(self.user, safe='')}:{quote(self.password, safe='')}@" if self.user else ""
        return f"http://{credentials}{self.address}"

    def connect(self, address: str, timeout_s: float) -> socket.socket:
        """A connection to ``address`` through the proxy.

        Raises:
            Unavailable: the proxy cannot be reached, or does not reach the coordinator.
            NeedsPerson: it wants a name and a password, others than it was given, or does not let this address through.
        """
        try:
            end = socket.create_connection((self.host, self.port), timeout=timeout_s)
        except OSError as error:
            why = "it does not answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
            raise Unavailable(
                f"the proxy {self.address} cannot be reached ({why})",
                hint="is it named right in this site's `identity/proxy`?",
            ) from None
        try:
            end.sendall(self._request(address))
            code = _status(end)
            if code != 200:
                raise self._refused(address, code)
        except OSError:
            end.close()
            raise Unavailable(f"the proxy {self.address} ended the connection without an answer") from None
        except BaseException:
            end.close()
            raise
        return end

    def _request(self, address: str) -> bytes:
        lines = [f"CONNECT {address} HTTP/1.1", f"Host: {address}"]
        if self.user:
            secret = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
            lines.append(f"Proxy-Authorization: Basic {secret}")
        return "\r\n".join([*lines, "", ""]).encode()

    def _refused(self, address: str, code: int) -> WardroundError:
        if code == 407:
            given = "others than the user name and password that it was given" if self.user else "a user name and one"
            return NeedsPerson(
                f"the proxy {self.address} wants a password (407): {given}",
                hint="write http://USER:PASSWORD@HOST:PORT into this site's `identity/proxy`",
            )
        if code in (401, 403, 405):
            return NeedsPerson(
                f"the proxy {self.address} does not let connections to {address} through ({code})",
                hint="ask whoever runs it to allow CONNECT to that address, without looking into its TLS",
            )
        return Unavailable(f"the proxy {self.address} does not reach {address} ({code or 'no HTTP'})")


def proxy_from(text: str, source: str) -> Proxy:
    """The proxy that a line names.

    Raises:
        BadData: it is no ``http://[USER:PASSWORD@]HOST:PORT``. The message does not repeat it: it may be a secret.
    """
    found = _LINE.fullmatch(text.strip()) if text.isascii() else None
    port = int(found["port"]) if found else 0
    if not found or not 0 < port < 65536:
        raise BadData(
            f"{source} names no proxy: it has one line, http://HOST:PORT or http://USER:PASSWORD@HOST:PORT",
            hint="a character that is no letter and no digit is written as % and two hex digits in name and password",
        )
    host = found["host"].removeprefix("[").removesuffix("]")
    return Proxy(host, port, unquote(found["user"] or ""), unquote(found["password"] or ""))


def read_proxy(path: Path) -> Proxy | None:
    """The proxy that a file names; None if there is no such file.

    Raises:
        BadData: it names none.
        NotPermitted: it holds a password that others may read.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}") from None
    proxy = proxy_from(text, str(path))
    if proxy.password:
        refuse_readable(path)
    return proxy


def _status(end: socket.socket) -> int:
    """The status of the reply to CONNECT, read to the end of its headers and no byte further; 0: it is no HTTP."""
    reply = b""
    while not reply.endswith(b"\r\n\r\n"):
        piece = end.recv(1)
        if not piece or len(reply) >= MAX_REPLY:
            break
        reply += piece
    found = _STATUS.match(reply)
    return int(found[1]) if found else 0
