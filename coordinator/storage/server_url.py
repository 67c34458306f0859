"""The address of a PostgreSQL database: what it may say, how it is shown, and the connections that are made by it.

A password is never in it: it is in the file ``keys/database-password`` of the state directory, or where PostgreSQL's
own programs look for it (PGPASSWORD, PGPASSFILE, ~/.pgpass). A server elsewhere must show a certificate for its name.
"""

import ipaddress
import os
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import URL

from coordinator.storage.lease import Server
from wardround.errors import NeedsPerson, UsageProblem
from wardround.signing.certificates import refuse_readable

DRIVER = "postgresql+psycopg"
KNOWN = ("postgresql", DRIVER)
AS_IN = "as in postgresql://wardround@db.example.org/wardround?sslrootcert=/etc/wardround/db-ca.pem"
IDLE_S = 10


def checked(text: str) -> URL:
    """An address of a PostgreSQL database, without a password.

    Raises:
        UsageProblem: it is none, or has one; a message never repeats it.
    """
    try:
        url = sa.make_url(text)
    except sa.exc.ArgumentError:
        raise UsageProblem("the database's address is no URL", hint=AS_IN) from None
    if url.drivername not in KNOWN:
        raise UsageProblem(f"the database's address begins with `{url.drivername[:40]}`, not `postgresql`", hint=AS_IN)
    if url.password is not None or {"password", "sslpassword"} & url.query.keys():
        raise UsageProblem(
            "the database's address has a password in it, which others could read",
            hint="leave it out, and give a file with it: `--database-password FILE`; PGPASSWORD and ~/.pgpass work too",
        )
    if not url.database:
        raise UsageProblem("the database's address names no database", hint=AS_IN)
    return url.set(drivername=DRIVER)


def shown(text: str) -> str:
    """The address for people: without the driver and its options."""
    url = checked(text)
    return url.set(drivername="postgresql", query={}).render_as_string(hide_password=True)


def is_local(url: URL) -> bool:
    """Whether the server is on this machine, so that what is sent to it crosses no network. What the address leaves
    out, libpq takes from the environment; of a service's file nothing is known here."""
    if "service" in url.query or os.environ.get("PGSERVICE"):
        return False
    given = url.query.get("host", url.host or os.environ.get("PGHOST", ""))
    behind = url.query.get("hostaddr", os.environ.get("PGHOSTADDR", ""))  # where it leads to, whatever it is called
    named = [text for several in (given, behind) for text in ([several] if isinstance(several, str) else several)]
    for host in [one for text in named for one in text.split(",")]:
        try:
            local = ipaddress.ip_address(host).is_loopback
        except ValueError:
            local = host in ("", "localhost") or host.startswith("/")
        if not local:
            return False
    return True


def new_engine(server: Server, connections: int) -> sa.Engine:
    """Connections to a server, at most so many at a time.

    Raises:
        UsageProblem: not such an address. NeedsPerson: the driver is not installed.
    """
    url = checked(server.url)
    try:
        engine = sa.create_engine(url, pool_size=connections, max_overflow=0, pool_timeout=30)
    except ImportError:
        raise NeedsPerson(
            "PostgreSQL needs a driver that is not installed", hint="`pip install 'wardround[postgres]'`"
        ) from None
    defaults = _defaults(server)
    if not is_local(url):
        defaults["sslmode"] = "verify-full"

    @sa.event.listens_for(engine, "do_connect")
    def add(
        dialect: object, record: object, arguments: object, named: dict[str, object]
    ) -> None:  # codec of libpq's names
        for name, value in defaults.items():
            named.setdefault(name, value)
        if (password := _password(server.password_file)) is not None:
            named["password"] = password

    return engine


def _defaults(server: Server) -> dict[str, object]:
    """What a connection says, where the address does not say otherwise: a peer that is gone is noticed in time."""
    idle_ms = int(1000 * max(server.lease_s, IDLE_S))
    return {
        "application_name": "wardround-coordinator", "client_encoding": "UTF8", "connect_timeout": 5,
        "target_session_attrs": "read-write",
        "keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 10_000,
        "options": f"-c idle_in_transaction_session_timeout={idle_ms} -c lock_timeout={idle_ms} "
        "-c tcp_keepalives_idle=5 -c tcp_keepalives_interval=2 -c tcp_keepalives_count=3",
    }  # fmt: skip


def _password(path: Path) -> str | None:
    """Read anew for each connection, so that it can be changed. Raises NotPermitted: others may read it."""
    refuse_readable(path)
    try:
        return path.read_text(encoding="utf-8").split("\n", 1)[0].strip("\r")
    except FileNotFoundError:
        return None
