"""A real PostgreSQL server on loopback, started by the tests that need one, as a user who is not root.

It fsyncs as a real one does. It can be stopped and started again in the middle of a test.
"""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import Self

import psycopg

from coordinator.storage import database, tables
from coordinator.storage.lease import Server
from tools.world import free_port, wait_until

PLACES = (Path("/usr/lib/postgresql/15/bin"), Path("/usr/local/bin"), Path("/usr/bin"))
SHORT_LIVED = Path("/dev/shm")  # where thousands of small files come and go quickly
USER = "wardround"
START_S = 60


def missing() -> bool:
    """Whether no server is installed here."""
    return _program("postgres") is None


def _program(name: str) -> Path | None:
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder / name for folder in (*PLACES, *versions) if (folder / name).exists()), None)


class Postgres:
    """One server, with its own folder. Everyone on this machine may connect without a password."""

    def __init__(self, tables: Path | None = None, log: Path | None = None) -> None:
        """``tables`` and ``log``: existing folders for its tables and its write-ahead log, each a disk of its own."""
        self.folder = Path(
            tempfile.mkdtemp(prefix="wardround-postgres-", dir=SHORT_LIVED if SHORT_LIVED.is_dir() else None)
        )
        self.port = free_port()
        self._as = _as_other_user(self.folder, *filter(None, (tables, log)))
        self.data = (tables or self.folder) / "data"
        apart = [] if log is None else ["--waldir", str(log / "wal"), "--wal-segsize=1"]
        options = ["-U", USER, "--auth=trust", "--no-sync", "--locale=C", "-E", "UTF8", *apart]
        self._run("initdb", "-D", str(self.data), *options)
        self._used_again = ""
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def _run(self, name: str, *args: str) -> None:
        program = _program(name)
        assert program is not None, "no PostgreSQL server is installed"
        line = [*self._as, str(program), *args]
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL, cwd=self.folder, timeout=START_S)

    def start(self, *settings: str) -> None:
        """Run it, and wait until it takes connections."""
        program = _program("postgres")
        assert program is not None
        options = ["listen_addresses=127.0.0.1", f"port={self.port}", "unix_socket_directories=", *settings]
        options.append("recovery_init_sync_method=syncfs")  # else it opens each file after a crash
        line = [*self._as, str(program), "-D", str(self.data), *(word for option in options for word in ("-c", option))]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stderr=log, cwd=self.folder)
        wait_until(self._answers, "the server answers", START_S)

    def _answers(self) -> bool:
        try:
            psycopg.connect(self._url("postgres"), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def stop(self, how: str = "immediate") -> None:
        """End it. "immediate" is as a power cut is to it; "fast" breaks all connections, and tidies up."""
        if self.process is not None:
            self.process.send_signal(signal.SIGQUIT if how == "immediate" else signal.SIGINT)
            self.process.wait(START_S)
            self.process = None

    def new_database(self) -> str:
        """The address of a new, empty database."""
        name = f"d{uuid.uuid4().hex[:12]}"
        self.execute(f"CREATE DATABASE {name}")
        return self._url(name)

    def database_with_tables(self) -> str:
        """The address of a database as `coordinator init` makes it: always the same one, emptied."""
        if not self._used_again:
            self._used_again = self.new_database()
            database.upgrade(Server(self._used_again, self.folder / "no-password", "nobody"))
        url = self._used_again
        self.execute(f"ALTER DATABASE {url.rpartition('/')[2]} RESET ALL")
        names = ", ".join(table.name for table in tables.Base.metadata.sorted_tables if table.name != "leadership")
        self.execute(f"TRUNCATE {names}", url)
        self.execute("UPDATE leadership SET token = 0, writes = 0, holder = '', receipt_key = '', root = ''", url)
        return url

    def execute(self, statement: str, url: str = "") -> list[tuple[object, ...]]:
        """Run one statement as the owner of it all; the rows that it gives."""
        with psycopg.connect(url or self._url("postgres"), autocommit=True) as connection:
            cursor = connection.execute(statement)  # type: ignore[call-overload]
            return cursor.fetchall() if cursor.description else []

    def _url(self, name: str) -> str:
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{name}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        shutil.rmtree(self.folder)


def _as_other_user(*folders: Path) -> list[str]:
    """What begins a command that must not be root's, as the server refuses to be; ``folders`` are that user's then.

    A command that changes the user itself: Python would fork for it, which gRPC's threads do not survive.
    """
    if os.geteuid() != 0:
        return []
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    entry = known.get("postgres") or known["nobody"]
    for folder in folders:
        os.chown(folder, entry.pw_uid, entry.pw_gid)
    return ["setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups"]
