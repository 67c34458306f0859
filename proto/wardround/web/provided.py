"""The log-in page's link to a provider of OpenID Connect, and where the provider sends the browser back.

The way there and back is bound to one browser by a cookie of its own. It is `SameSite=Lax`, because the provider's page
leads back to us; the session's is `Strict`, so the page after the log-in is loaded from one of ours.

Whoever comes may ask the provider by us, without a name. So a few may at a time: where it does not answer, all others
are told so at once, and the pages' threads stay free for who is logged in.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from wardround.errors import NotPermitted, TryAgain, WardroundError
from wardround.local.rate_limit import RateLimitedLog
from wardround.pages import rendering
from wardround.pages.blocks import Links, Page
from wardround.web.passwords import User

if TYPE_CHECKING:
    from wardround.web.oidc import Provider

BEGIN, BACK = "/login/provider", "/login/provider/back"
COOKIE = "wardround-login"
WAIT_S = 600
MOST_AT_ONCE = 8  # questions to the provider
Answer = TypeVar("Answer")
log = logging.getLogger(__name__)


class LoginPages(Protocol):
    """What the pages do for it."""

    @property
    def secure(self) -> bool: ...
    @property
    def program(self) -> str: ...
    def login_page(self, why: str, status: int = 200) -> Response: ...
    def let_in(self, request: Request, user: User, answer: Response, *, provided: bool = False) -> Response: ...


class ProvidedLogin:
    """The two addresses of a log-in with ``provider``."""

    def __init__(self, provider: "Provider", pages: LoginPages) -> None:
        self._provider = provider
        self._pages = pages
        self._asking = 0
        self._log = RateLimitedLog(log)
        self.routes = (Route(BEGIN, self._begin, methods=["GET"]), Route(BACK, self._back, methods=["GET"]))
        self.link = Links(((f"Log in with {provider.name}", BEGIN),))

    @property
    def _cookie(self) -> str:
        return f"__Host-{COOKIE}" if self._pages.secure else COOKIE

    async def _begin(self, request: Request) -> Response:
        try:
            address, browser = await self._asked(self._provider.begin)
        except WardroundError as error:
            return self._failed(error)
        answer = RedirectResponse(address, 303)
        answer.set_cookie(
            self._cookie, browser, max_age=WAIT_S, path="/", httponly=True, samesite="lax", secure=self._pages.secure
        )
        return answer

    async def _back(self, request: Request) -> Response:
        names = [name for name, _ in request.query_params.multi_items()]
        answer = {name: value for name, value in request.query_params.items() if names.count(name) == 1}
        try:
            browser = request.cookies.get(self._cookie, "")
            user = await self._asked(lambda: self._provider.end(answer, browser))
        except WardroundError as error:
            return self._failed(error)
        page = Page("Logged in", self._pages.program, (Links((("Go on", "/"),)),))
        text = rendering.served(page, rendering.Around(self._pages.program))
        went = self._pages.let_in(request, user, HTMLResponse(text, headers={"Refresh": "0; url=/"}), provided=True)
        went.delete_cookie(self._cookie, path="/", httponly=True, samesite="lax", secure=self._pages.secure)
        return went

    async def _asked(self, question: Callable[[], Answer]) -> Answer:
        """What the provider is asked. Raises TryAgain: too many are asking it."""
        if self._asking >= MOST_AT_ONCE:
            raise TryAgain(f"{MOST_AT_ONCE} log-ins are asking it, and it does not answer")
        self._asking += 1
        try:
            return await run_in_threadpool(question)
        finally:
            self._asking -= 1

    def _failed(self, error: WardroundError) -> Response:
        if isinstance(error, NotPermitted):
            return self._pages.login_page(f"{error.message[:1].upper()}{error.message[1:]}: {error.hint}.", 403)
        self._log.error("nobody can log in with %s: %s", self._provider.name, error.message)
        return self._pages.login_page("Nobody can log in with the provider now; the log of this page says why.", 503)
