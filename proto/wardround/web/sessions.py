"""Who is logged in, and how often somebody may try to be.

A session is kept here and nowhere else: its cookie is 256 random bits, of which this process keeps the hash. So there
is nothing in a cookie that could be forged, and a log-out counts at once. A restart logs everybody out.
"""

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from wardround.web.passwords import User

IDLE_S = 30 * 60
LIFE_S = 12 * 3600
MOST_SESSIONS = 500
WINDOW_S = 5 * 60
MOST_OF_A_NAME, MOST_IN_ALL = 5, 40  # failed log-ins in WINDOW_S
Clock = Callable[[], float]


@dataclass
class Session:
    """One person in one browser. ``csrf`` is in each of the forms that this person is shown."""

    name: str
    mark: str
    began: float
    seen: float
    peer: int | None = None  # the user of this machine who logged in, where the kernel says who that is
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    notice: str = ""  # shown on the next page, once
    user: User | None = None  # of whom a provider told us; else the users' file knows

    def is_form_of(self, token: str) -> bool:
        """Whether a form was made for this session."""
        return hmac.compare_digest(token.encode(), self.csrf.encode())


class Sessions:
    """All sessions of one process. Safe to use from several threads."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[str, Session] = {}

    def begin(self, user: User, peer: int | None = None, *, provided: bool = False) -> str:
        """A new session of ``user`` at ``peer``; what its cookie says. The one that was idle longest makes room.

        Args:
            provided: a provider told us of the user, whom the users' file does not know.
        """
        token, now = secrets.token_urlsafe(32), self._clock()
        with self._lock:
            self._held = {key: session for key, session in self._held.items() if self._lasts(session, now)}
            if len(self._held) >= MOST_SESSIONS:
                del self._held[min(self._held, key=lambda key: self._held[key].seen)]
            self._held[_key(token)] = Session(user.name, user.mark, now, now, peer, user=user if provided else None)
        return token

    def find(self, token: str, peer: int | None = None, *, used: bool = True) -> Session | None:
        """The session of a cookie, unless it has ended or is of another user of this machine.

        Args:
            used: somebody did something; it is idle no longer.
        """
        now = self._clock()
        with self._lock:
            session = self._held.get(_key(token))
            if session is None or not self._lasts(session, now):
                self._held.pop(_key(token), None)
                return None
            if session.peer != peer:
                return None
            if used:
                session.seen = now
            return session

    def end(self, token: str) -> None:
        """Log out."""
        with self._lock:
            self._held.pop(_key(token), None)

    def _lasts(self, session: Session, now: float) -> bool:
        return now - session.seen < IDLE_S and now - session.began < LIFE_S


class Attempts:
    """Log-ins of the last minutes that failed, or are under way: so many of a name, and so many in all, from each user
    of this machine and from all others together. Safe to use from several threads."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._tried: list[tuple[float, str, int | None]] = []

    def begin(self, name: str, peer: int | None = None) -> float:
        """Count one more, which fails until ``succeeded``: 0, or how long until ``name`` may try again from there.

        One that must wait is not counted.
        """
        with self._lock:
            now = self._clock()
            self._tried = [one for one in self._tried if now - one[0] < WINDOW_S]
            there = [(at, who) for at, who, where in self._tried if where == peer]
            own = [at for at, who in there if who == name]
            waits = [
                times[-most] + WINDOW_S - now
                for times, most in ((own, MOST_OF_A_NAME), ([at for at, _ in there], MOST_IN_ALL))
                if len(times) >= most
            ]
            if not waits:
                self._tried.append((now, name, peer))
            return max(waits, default=0.0)

    def succeeded(self, name: str, peer: int | None = None) -> None:
        """Whoever knows the password is let in again at once."""
        with self._lock:
            self._tried = [one for one in self._tried if one[1:] != (name, peer)]


def _key(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
