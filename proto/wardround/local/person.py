"""Which person is behind a command. The account that it runs as is often the service's own, and nobody's name.

    loginuid   the kernel's word on who logged in; only a privileged program can set it, and only once
    sudo       SUDO_UID in the environment: whoever is that account could write it too
    polkit     PKEXEC_UID, likewise
    account    nobody else is known: the account itself

The first that is there is taken, and its name kept beside the person's, with the account.
"""

import json
import os
import pwd
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, PlainSerializer, TypeAdapter

from wardround.errors import NotPermitted, UsageProblem

STRICT = ConfigDict(extra="forbid", strict=True)
UNSET = 2**32 - 1  # of a process that no login began: a service, a container
NOBODY_ELSE = "account"
PAGE = "page"  # of a site: the page that somebody logged in to names the person


@dataclass(frozen=True)
class Account:
    """A user of this machine."""

    name: str
    uid: int

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class Person:
    """Who gave a command: ``source`` says how that is known, ``account`` as which user the command runs."""

    name: str
    uid: int
    source: str = ""
    account: Account | None = None

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    @classmethod
    def from_document(cls, document: object) -> "Person":
        """What ``document`` gave. Raises ValueError: it is no person."""
        return document if isinstance(document, cls) else _person().validate_json(json.dumps(document))

    def document(self) -> dict[str, Any]:
        """As a consent, the ledger and the operator's journal have it; without what is not known."""
        known: dict[str, Any] = {"name": self.name, "uid": self.uid}
        if self.source:
            known["source"] = self.source
        if self.account is not None:
            known["account"] = {"name": self.account.name, "uid": self.account.uid}
        return known

    @property
    def identity(self) -> tuple[str, str | int]:
        """By what people are counted: the log-in to a page that runs as a service; else the uid.

        A page that somebody began by hand is in that person's power, and so are the names that it tells.
        """
        if self.source != PAGE:
            return "uid", self.uid
        if self.account is not None and self.account.uid != self.uid:
            return "uid", self.account.uid
        return PAGE, self.name

    def may_be(self, other: "Person") -> bool:
        """Whether both may be one person: by their identity, or of the same name at the page and at a terminal."""
        return self.identity == other.identity or (
            self.name == other.name and PAGE in (self.identity[0], other.identity[0])
        )

    @property
    def text(self) -> str:
        """As people read it: "dpo", or "dpo (sudo), as wardround" where the account is another."""
        account = self.account.name if self.account is not None else self.name
        alone = account == self.name and self.source != PAGE
        return self.name if alone else f"{self.name} ({self.source or 'by its own word'}), as {account}"


KnownPerson = Annotated[Person, PlainSerializer(Person.document)]


@cache
def _person() -> TypeAdapter[Person]:
    return TypeAdapter(Person)


def who() -> Person:
    """The person at this command."""
    return judged(login_of("self"), os.environ, os.geteuid())


def behind(claimed: Person, pid: int, uid: int) -> Person:
    """The person whom a command names, as far as the kernel bears it out.

    Args:
        claimed: what ``who`` gave in the command's process.
        pid, uid: of that process, by the kernel.

    Raises:
        NotPermitted: as ``login_behind``.
    """
    login = login_behind(pid)
    if login is not None:
        return judged(login, {}, uid)
    return replace(claimed, account=_account(uid))


def together(
    before: Sequence[Person], person: Person, wanted: int, did: str, again: str, *, wants: str = "the policy wants"
) -> tuple[Person, ...]:
    """Those who decided before, and ``person``, who must be somebody else.

    Args:
        wanted: how many different people must decide. wants: who says so, as the sentence has it.
        did: what they did, as in "approved study `hearts`". again: what another person runs.

    Raises:
        UsageProblem: this person has done it already.
    """
    if any(other.may_be(person) for other in before):
        raise UsageProblem(f"{person.text} has {did} already; {wants} {wanted} different people", hint=again)
    return (*before, person)


def judged(login: int | None, environment: Mapping[str, str], account: int) -> Person:
    """``who``, from a login's uid if the kernel has one, the environment and the account's uid."""
    known = [("loginuid", login)]
    known += [("sudo", _uid(environment, "SUDO_UID")), ("polkit", _uid(environment, "PKEXEC_UID"))]
    source, uid = next(((source, uid) for source, uid in known if uid is not None), (NOBODY_ELSE, account))
    return Person(user_name(uid), uid, source, _account(account))


def login_of(process: str) -> int | None:
    """The uid with which the login of a process began; None where there was none, or no kernel that says."""
    try:
        uid = int(Path(f"/proc/{process}/loginuid").read_text())
    except (OSError, ValueError):
        return None
    return None if uid == UNSET else uid


def login_behind(pid: int) -> int | None:
    """``login_of`` a process that waits for an answer. 0: one that cannot be seen from here, as in another container.

    Raises:
        NotPermitted: it has ended, so that its own word would count for the kernel's.
    """
    login = login_of(str(pid))
    if login is None and pid:
        try:
            os.kill(pid, 0)  # no signal: whether there is one
        except ProcessLookupError:
            raise NotPermitted(
                "the process that gave this command has ended, and whose login it was cannot be known any more",
                hint="nothing was done; give the command again, and wait for its answer",
            ) from None
        except PermissionError:
            pass  # another user's
    return login


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def _account(uid: int) -> Account:
    return Account(user_name(uid), uid)


def _uid(environment: Mapping[str, str], name: str) -> int | None:
    written = environment.get(name, "")
    return int(written) if written.isascii() and written.isdigit() and int(written) < UNSET else None
