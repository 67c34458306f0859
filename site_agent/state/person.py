"""Which person is behind a command at a site: ``wardround.local.person``, which the coordinator shares.

Here somebody may also have logged in to the hospital's page: then the page names the person (``page``), and the account
is the one that the page runs as, or the login with which somebody began it.
"""

import os
from dataclasses import replace

from wardround.local import person
from wardround.local.person import PAGE, Account, KnownPerson, Person, together, user_name, who

__all__ = ["Account", "KnownPerson", "Person", "at_page", "behind", "together", "user_name", "who"]


def at_page(name: str) -> Person:
    """Somebody who logged in to the page, which this process serves."""
    return Person(name, os.geteuid(), PAGE, Account(user_name(os.geteuid()), os.geteuid()))


def behind(claimed: Person, pid: int, uid: int) -> Person:
    """``wardround.local.person.behind``; of whoever logged in to the page, the kernel knows who began the page.

    Raises:
        NotPermitted: that process has ended.
    """
    if claimed.source != PAGE:
        return person.behind(claimed, pid, uid)
    login = person.login_behind(pid)
    account = uid if login is None else login
    return replace(claimed, uid=uid, account=Account(user_name(account), account))
