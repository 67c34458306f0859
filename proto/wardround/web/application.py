"""A program's pages as a web application: who is logged in, which page is shown, what a form did.

A program gives its views; each gets a ``Visit`` of somebody who has logged in and returns a page, or, for a form, where
to go on. Views run in threads. What they raise of ours becomes a page with the sentence and the hint.
"""

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from wardround.errors import BadData, NeedsPerson, NotPermitted, TryAgain, Unavailable, UsageProblem, WardroundError
from wardround.local.rate_limit import RateLimitedLog
from wardround.pages import rendering
from wardround.pages.blocks import Answer, Field, Form, Page, Paragraph
from wardround.web.guard import MOST_BODY
from wardround.web.live import Live
from wardround.web.passwords import User, Users
from wardround.web.peer import owner
from wardround.web.provided import ProvidedLogin
from wardround.web.sessions import Attempts, Session, Sessions

if TYPE_CHECKING:
    from wardround.web.oidc import Provider

BEAT_S = 15  # a browser that is told nothing for longer is told that we are there
REST_S = 1  # at least, between two changes that a browser is told of
MOST_LISTENERS, MOST_OF_A_USER = 64, 16  # pages that are told of changes, at a time
MOST_FIELDS = 100  # of a form
STATUS: tuple[tuple[type[WardroundError], int], ...] = (
    (UsageProblem, 400), (NotPermitted, 403), (BadData, 404), (NeedsPerson, 409), (Unavailable, 503), (TryAgain, 503),
)  # fmt: skip
STATIC = {
    "style.css": ("text/css", ("style.css", "web.css")),
    "live.js": ("text/javascript", ("live.js",)),
    "icon.svg": ("image/svg+xml", ("icon.svg",)),
}
log = logging.getLogger(__name__)
failures = RateLimitedLog(log)


@dataclass(frozen=True)
class Visit:
    """One request of somebody who has logged in. ``path``: the parts of the address that a route names."""

    user: User
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Moved:
    """A form did its work: where to go on, and what to say there."""

    to: str
    notice: str


@dataclass(frozen=True)
class View:
    """One address. ``live``: the page may be shown anew under the eyes of whoever reads it.

    Attributes:
        section: the address of the section that it belongs to.
        decides: only for users who may decide.
    """

    path: str
    answer: Callable[[Visit], Page | Moved]
    section: str = "/"
    method: Literal["GET", "POST"] = "GET"
    live: bool = True
    decides: bool = False


class Application:
    """The pages of one program.

    Args:
        program: what the pages are called. ``cookie``: its own, for pages of two programs on one machine.
        sections: the pages that each page leads to.
        secure: browsers reach us by HTTPS alone.
        is_ready: whether what stands behind the pages answers.
        provider: of OpenID Connect, with which people may log in as well.
        add_user: the command that lets somebody log in.
    """

    def __init__(
        self,
        program: str,
        cookie: str,
        sections: tuple[tuple[str, str], ...],
        views: tuple[View, ...],
        users: Users,
        live: Live,
        *,
        secure: bool = False,
        is_ready: Callable[[], bool] = lambda: True,
        provider: "Provider | None" = None,
        add_user: str,
    ) -> None:
        self._add_user = add_user
        self._program = program
        self._secure = secure
        self._cookie = f"__Host-{cookie}" if secure else cookie
        self._sections = sections
        self._users = users
        self._live = live
        self._is_ready = is_ready
        self.sessions = Sessions()
        self._attempts = Attempts()
        self._provided = ProvidedLogin(provider, self) if provider is not None else None
        self._listeners: Counter[str] = Counter()  # by user
        self.app = Starlette(
            routes=[
                Route("/login", self._show_login, methods=["GET"]),
                Route("/login", self._log_in, methods=["POST"]),
                *(self._provided.routes if self._provided is not None else ()),
                Route("/logout", self._log_out, methods=["POST"]),
                Route("/events", self._events, methods=["GET"]),
                Route("/healthz", _healthy, methods=["GET"]),
                Route("/readyz", self._ready, methods=["GET"]),
                Route("/static/{name}", _static, methods=["GET"]),
                *(Route(view.path, partial(self._view, view), methods=[view.method]) for view in views),
            ],
            exception_handlers={404: self._nothing, 500: _failed},
        )

    # Who is it

    def _session(self, request: Request, *, used: bool = True) -> tuple[Session, User] | None:
        """The session of a request's cookie, and its user as the file has it now."""
        token = request.cookies.get(self._cookie, "")
        session = self.sessions.find(token, _peer(request), used=used) if token else None
        user = (session.user or self._users.find(session.name)) if session is not None else None
        if session is None or user is None or user.mark != session.mark:
            return None
        return session, user

    def _is_in(self, request: Request) -> bool:
        return self._session(request, used=False) is not None

    def nobody_yet(self) -> str:
        """What to type where nobody can log in; "" where somebody can.

        Raises:
            BadData, NotPermitted: as ``Users.all``.
        """
        if self._provided is not None or self._users.all():
            return ""
        return f"Nobody can log in yet. This lets somebody, and counts at once: `{self._add_user}`"

    async def _show_login(self, request: Request) -> Response:
        if self._session(request) is not None:
            return RedirectResponse("/", 303)
        try:
            return self.login_page(self.nobody_yet())
        except WardroundError as error:
            log.error("nobody can log in: %s", error.message)
            return self.login_page("Nobody can log in now; the log of this page says why.", 503)

    def login_page(self, why: str, status: int = 200) -> Response:
        fields = (
            Field("name", "Name", fills_in="username"),
            Field("password", "Password", secret=True, fills_in="current-password"),
        )
        said = (Paragraph(why, warning=True),) if why else ()
        by = (self._provided.link,) if self._provided is not None else ()
        page = Page("Log in", self._program, (*said, *by, Form("/login", "Log in", fields)))
        return HTMLResponse(rendering.served(page, rendering.Around(self._program)), status)

    async def _log_in(self, request: Request) -> Response:
        """The guard has seen that the form came from our own page."""
        form = await _form(request)
        name, password = form.get("name", ""), form.get("password", "")
        peer = _peer(request)
        wait_s = self._attempts.begin(name, peer)
        if wait_s > 0:
            return self.login_page(f"Too many log-ins failed. Try again in {int(wait_s) + 1} seconds.", 429)
        try:
            user = await run_in_threadpool(self._users.logged_in, name, password)
        except WardroundError as error:
            log.error("nobody can log in: %s", error.message)
            return self.login_page("Nobody can log in now; the log of this page says why.", 503)
        if user is None:
            log.warning("a log-in failed")  # without the name: a password may stand in its place
            return self.login_page("This name and password are not known here.", 403)
        self._attempts.succeeded(name, peer)
        return self.let_in(request, user, RedirectResponse("/", 303))

    def let_in(self, request: Request, user: User, answer: Response, *, provided: bool = False) -> Response:
        """Begin a session of whoever has shown who they are, with ``answer``."""
        self.sessions.end(request.cookies.get(self._cookie, ""))
        log.info("`%s` logged in", user.name)
        token = self.sessions.begin(user, _peer(request), provided=provided)
        answer.set_cookie(self._cookie, token, path="/", httponly=True, samesite="strict", secure=self._secure)
        return answer

    @property
    def secure(self) -> bool:
        """Whether browsers reach us by HTTPS alone."""
        return self._secure

    @property
    def program(self) -> str:
        """What the pages are called."""
        return self._program

    async def _log_out(self, request: Request) -> Response:
        found = self._session(request)
        form = await _form(request)
        if found is not None and not found[0].is_form_of(form.get("csrf", "")):
            return self._error(found, NotPermitted("this form was not made for this session"))
        self.sessions.end(request.cookies.get(self._cookie, ""))
        answer = RedirectResponse("/login", 303)
        answer.delete_cookie(self._cookie, path="/", httponly=True, samesite="strict", secure=self._secure)
        return answer

    # Pages

    async def _view(self, view: View, request: Request) -> Response:
        found = await run_in_threadpool(self._session, request)
        if found is None:
            return RedirectResponse("/login", 303)
        session, user = found
        version = self._live.version  # before the page is made: what changes meanwhile is told
        try:
            form = await _form(request) if view.method == "POST" else {}
            if view.method == "POST" and not session.is_form_of(form.get("csrf", "")):
                raise NotPermitted("this form was not made for this session", hint="go back, and load the page again")
            if view.decides and user.may != "decide":
                raise NotPermitted(f"`{user.name}` may look, and decide nothing")
            path = {name: str(part) for name, part in request.path_params.items()}
            visit = Visit(user, path, dict(request.query_params), form)
            answer = await run_in_threadpool(view.answer, visit)
        except WardroundError as error:
            return self._error(found, error)
        if isinstance(answer, Moved):
            session.notice = answer.notice
            return RedirectResponse(answer.to, 303)
        return self._page(answer, found, view.section, version, live=view.live)

    def _page(
        self, page: Page, found: tuple[Session, User], section: str, version: int, *, live: bool, status: int = 200
    ) -> Response:
        session, user = found
        around = rendering.Around(
            self._program, self._sections, section, user.name, session.csrf, session.notice, version, live
        )
        session.notice = ""
        return HTMLResponse(rendering.served(page, around), status)

    def _error(self, found: tuple[Session, User], error: WardroundError) -> Response:
        status = next((number for kind, number in STATUS if isinstance(error, kind)), 500)
        page = Page("This did not work", self._program, (Answer("bad", f"{_sentence(error.message)}", error.hint),))
        return self._page(page, found, "", self._live.version, live=status == 503, status=status)

    async def _nothing(self, request: Request, error: Exception) -> Response:
        found = await run_in_threadpool(self._session, request)
        if found is None:
            return RedirectResponse("/login", 303)
        return self._error(found, BadData("there is no page at this address"))

    # What is live

    async def _events(self, request: Request) -> Response:
        found = self._session(request, used=False)
        if found is None:
            return PlainTextResponse("log in first\n", 401)
        name = found[1].name
        if self._listeners.total() >= MOST_LISTENERS or self._listeners[name] >= MOST_OF_A_USER:
            return PlainTextResponse("too many pages are open\n", 503)
        unbuffered = {"X-Accel-Buffering": "no"}  # at a proxy before us
        return StreamingResponse(self._told(request, name), media_type="text/event-stream", headers=unbuffered)

    async def _told(self, request: Request, name: str) -> AsyncIterator[str]:
        """A line to ``name`` for each version from the present one on; until the session or the server ends."""
        self._listeners[name] += 1
        try:
            told = 0
            while not self._live.ended and await run_in_threadpool(self._is_in, request):
                if self._live.version > told:
                    told = self._live.version
                    yield f"data: {told}\n\n"
                    await self._live.until_ended(REST_S)
                elif not await self._live.beyond(told, BEAT_S):
                    yield ": here\n\n"
        finally:
            self._listeners[name] -= 1

    async def _ready(self, request: Request) -> Response:
        is_ready = await run_in_threadpool(self._is_ready)
        return PlainTextResponse("ready\n" if is_ready else "not ready\n", 200 if is_ready else 503)


def _peer(request: Request) -> int | None:
    """The user of this machine who asks; see ``owner``."""
    return owner(request.scope.get("client"), request.scope.get("server"))


async def _form(request: Request) -> dict[str, str]:
    """A form's fields; of one that stands there twice, none.

    Raises:
        HTTPException: the browser went away in the middle of it, or was too slow; or it has more fields than any.
    """
    body = b""
    try:
        async for piece in request.stream():
            body += piece
    except ClientDisconnect:
        raise HTTPException(408, "the form did not come whole\n") from None
    try:
        text = body[:MOST_BODY].decode("utf-8", "replace")
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=MOST_FIELDS)
    except ValueError:
        raise HTTPException(413, f"a form of more than {MOST_FIELDS} fields\n") from None
    names = [name for name, _ in pairs]
    return {name: value for name, value in pairs if names.count(name) == 1}


async def _healthy(request: Request) -> Response:
    return PlainTextResponse("ok\n")


async def _static(request: Request) -> Response:
    kind, parts = STATIC.get(request.path_params["name"], ("", ()))
    if not kind:
        return PlainTextResponse("there is no such file\n", 404)
    return Response("".join(map(rendering.template, parts)), media_type=kind)


async def _failed(request: Request, error: Exception) -> Response:
    failures.error("a page failed", exc_info=error)
    return PlainTextResponse("this page failed; the log of its server says why\n", 500)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."
