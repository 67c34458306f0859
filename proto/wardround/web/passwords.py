"""Who may log in: a file of names and scrypt hashes that only its user can read, changed by commands alone.

The parameters of scrypt are OWASP's for 32 MiB (Password Storage Cheat Sheet); each row keeps its own, so that later
ones can be stronger. The file is read at each log-in and each request: a command counts at once.
"""

import hashlib
import hmac
import re
import secrets
import threading
from functools import cached_property
from pathlib import Path
from typing import Literal

from wardround.errors import BadData, UsageProblem
from wardround.local import durable
from wardround.records.schema import Strict
from wardround.signing.certificates import refuse_readable

NAME = re.compile(r"[a-z0-9](?:[a-z0-9._@-]{0,62}[a-z0-9])?")
SHORTEST, LONGEST = 12, 1024  # characters of a password
COST, BLOCK, PARALLEL = 2**15, 8, 3
MEMORY = 64 * 1024 * 1024  # what one hash may take
MOST_USERS = 1000
May = Literal["look", "decide"]
_one_at_a_time = threading.Lock()  # a crowd of log-ins takes one core and 32 MiB, not all of them


class User(Strict):
    """Somebody who may log in. ``may``: look at the pages alone, or decide as well. ``secret``: a salted hash, hex."""

    name: str
    may: May
    salt: str
    secret: str
    cost: int = COST
    block: int = BLOCK
    parallel: int = PARALLEL

    @property
    def mark(self) -> str:
        """Another one once the password or what this user may do is another."""
        return hashlib.sha256(f"{self.secret} {self.may}".encode()).hexdigest()


class UsersFile(Strict):
    """The form of the file."""

    users: tuple[User, ...] = ()


class Users:
    """The users in one file. ``cost``: scrypt's N for new passwords."""

    def __init__(self, path: Path, cost: int = COST) -> None:
        self._path = path
        self._cost = cost

    @cached_property
    def _stranger(self) -> User:
        """Whose password is tried where a name is not known."""
        return self._new("-", "", "look")

    def all(self) -> tuple[User, ...]:
        """Everybody, by name.

        Raises:
            BadData: the file is damaged.
            NotPermitted: others may read it.
        """
        if not self._path.exists():
            return ()
        refuse_readable(self._path)
        try:
            return UsersFile.model_validate_json(self._path.read_bytes()).users
        except (OSError, ValueError):
            raise BadData(
                f"{self._path} is damaged: it holds no list of users", hint="restore it from a backup, or remove it"
            ) from None

    def find(self, name: str) -> User | None:
        """Raises as ``all``."""
        return next((user for user in self.all() if user.name == name), None)

    def put(self, name: str, password: str, may: May) -> bool:
        """Add a user, or give one another password. Whether the name is new.

        Raises:
            UsageProblem: no such name can be, or the password is too short; there are too many users.
        """
        if not NAME.fullmatch(name):
            raise UsageProblem(
                f"{name[:64]!r} is not a user's name: 1 to 64 of a-z, 0-9, `.`, `_`, `@` and `-`, "
                "beginning and ending with a letter or digit"
            )
        if not SHORTEST <= len(password) <= LONGEST:
            raise UsageProblem(
                f"a password of {len(password)} characters, {SHORTEST} to {LONGEST} are taken",
                hint="four words that do not belong together are easy to keep",
            )
        others = [user for user in self.all() if user.name != name]
        is_new = len(others) == len(self.all())
        if len(others) >= MOST_USERS:
            raise UsageProblem(f"{MOST_USERS} users are in {self._path} already", hint="remove those who left")
        self._write((*others, self._new(name, password, may)))
        return is_new

    def remove(self, name: str) -> None:
        """Take a user out; sessions of that user end.

        Raises:
            UsageProblem: there is no such user.
        """
        known = self.all()
        if name not in [user.name for user in known]:
            names = ", ".join(user.name for user in known) or "none yet"
            raise UsageProblem(f"there is no user `{name[:64]}`", hint=f"users: {names}")
        self._write(tuple(user for user in known if user.name != name))

    def logged_in(self, name: str, password: str) -> User | None:
        """The user of that name, if the password is right. A name that is not known takes as long."""
        user = self.find(name)
        with _one_at_a_time:
            tried = _hashed(user or self._stranger, password[:LONGEST])
        right = hmac.compare_digest(tried.secret, (user or self._stranger).secret)
        return user if right else None

    def _new(self, name: str, password: str, may: May) -> User:
        return _hashed(User(name=name, may=may, salt=secrets.token_hex(16), secret="", cost=self._cost), password)

    def _write(self, users: tuple[User, ...]) -> None:
        durable.make_folder(self._path.parent)
        kept = UsersFile(users=tuple(sorted(users, key=lambda user: user.name)))
        durable.write_file(self._path, kept.model_dump_json(indent=1).encode())


def _hashed(user: User, password: str) -> User:
    secret = hashlib.scrypt(
        password.encode(), salt=bytes.fromhex(user.salt), n=user.cost, r=user.block, p=user.parallel, maxmem=MEMORY,
        dklen=32,
    )  # fmt: skip
    return user.model_copy(update={"secret": secret.hex()})
