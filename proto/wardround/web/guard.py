"""What every request must be before a page hears of it, and what every answer says to the browser.

A request is refused: 1. whose Host is not one of ours (DNS rebinding); 2. whose path is too long, or whose method is
another than GET, HEAD and POST; 3. that posts from another origin than ours, or does not say from which; 4. whose body
is no form, too long, or too slow.
Whoever gets past this is still nobody: pages ask for the session, and each form for its token.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BODY = 64 * 1024
MOST_PATH = 1024
BODY_S = 20  # in which a form must have come
FORM = "application/x-www-form-urlencoded"
OPEN = ("/healthz", "/readyz")  # asked by machines, under any name; they tell nothing of anybody
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}


class Guard:
    """Stands before an application. ``origins``: what a browser calls us, such as "https://fed.example.org"."""

    def __init__(self, app: ASGIApp, origins: Iterable[str]) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._hosts = frozenset(origin.partition("://")[2] for origin in self._origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        status, why = self._refused(scope)
        if status:
            await _say(guarded, status, why)
            return
        await self._app(scope, _bounded(receive), guarded)

    def _refused(self, scope: Scope) -> tuple[int, str]:
        """The status and the sentence of a refusal; (0, "") for none."""
        hosts = _values(scope, b"host")
        if scope["path"] not in OPEN and (len(hosts) != 1 or hosts[0].lower() not in self._hosts):
            return 421, "this server is not known under that name"
        if len(scope["path"]) > MOST_PATH:
            return 414, "no page has so long an address"
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return 405, "only GET, HEAD and POST are answered"
        if scope["method"] != "POST":
            return 0, ""
        if set(_values(scope, b"origin")) - self._origins or not _values(scope, b"origin"):
            return 403, "this form was not sent from one of our pages"
        if [value.partition(";")[0].strip() for value in _values(scope, b"content-type")] != [FORM]:
            return 415, "only a form is taken"
        lengths = _values(scope, b"content-length")
        if len(lengths) != 1 or not lengths[0].isdigit() or int(lengths[0]) > MOST_BODY:
            return 413, f"a form of more than {MOST_BODY} bytes, or of a length that is not said"
        return 0, ""


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def _bounded(receive: Receive) -> Receive:
    """No more of a body than is taken, whatever its length was said to be, and no later."""
    came, whole = 0, False
    until: float | None = None

    async def bounded() -> Message:
        nonlocal came, whole, until
        if whole:
            return await receive()  # when the browser goes
        until = until or asyncio.get_running_loop().time() + BODY_S
        try:
            async with asyncio.timeout_at(until):
                message = await receive()
        except TimeoutError:
            return {"type": "http.disconnect"}
        came += len(message.get("body", b""))
        whole = not message.get("more_body", False)
        return {"type": "http.disconnect"} if came > MOST_BODY else message

    return bounded


async def _say(send: Send, status: int, why: str) -> None:
    body = f"{why}\n".encode()
    headers: list[Any] = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
