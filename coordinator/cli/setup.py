"""``coordinator init``, ``upgrade`` and ``serve``: the state directory, and the service on it."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.options import Blobs, Database, DatabasePassword, State, password_from
from wardround.cli import LogFormat, Metrics, Traces, say
from wardround.errors import UsageProblem

if TYPE_CHECKING:
    from coordinator.journal_records import Known
    from coordinator.state_directory import State as Place


def init(
    state: State,
    federation: Annotated[str, typer.Option(metavar="NAME", help="The federation's name. It is in every certificate.")],
    address: Annotated[str, typer.Option(metavar="HOST:PORT", help="The address that the sites connect to.")],
    database: Database = "",
    database_password: DatabasePassword = None,
    blobs: Blobs = "",
) -> None:
    """Make a coordinator: its certificate authority, its keys and its database."""
    from coordinator import state_directory
    from wardround.signing.certificates import fingerprint

    place = state_directory.State(state)
    storage, password = state_directory.storage_from(database, blobs), password_from(database_password)
    authority = state_directory.create(place, federation, address, time.time(), storage, password)
    write_journal(place, "init", {"federation": federation, "address": address})
    say(f"Certificate authority of `{federation}` written to {state / 'authority'}; only this user can read its key")
    say(f"fingerprint {fingerprint(authority.certificate)}")
    say("next: `coordinator serve`, then `coordinator invite SITE`")


def write_journal(place: "Place", act: str, about: "dict[str, Known]") -> None:
    """Write into the operator's journal what this command has done to the state directory itself."""
    from coordinator.context import leading_store
    from coordinator.journal import Journal
    from wardround.local.person import who

    store = leading_store(place)
    try:
        Journal(store, time.time).done(who(), act, about)
    finally:
        store.close()


def upgrade(state: State) -> None:
    """Bring the database of an older version to the form of this version. A copy of the older one is kept."""
    from coordinator.state_directory import State as Place
    from coordinator.storage import database
    from coordinator.storage.schema import newest_schema
    from wardround.local.durable import StateLock

    place = Place(state)
    where = place.place(place.config().storage)
    with StateLock(state, "coordinator upgrade"):
        kept = database.upgrade(where, place.root)
        if kept is not None:
            write_journal(place, "upgrade", {"schema": newest_schema()})
    if kept is not None:
        say(f"the database as it was is kept as {kept}")
    say(f"{database.name_of(where)} is ready for this version")


def serve(
    state: State,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Listen here, if not at the address that the sites connect to.")
    ] = "",
    first_message_s: Annotated[
        int, typer.Option(min=1, metavar="SECONDS", help="Time for a call's first message to come.")
    ] = 5,
    rate_bytes: Annotated[
        int, typer.Option(min=1024, metavar="BYTES", help="What an upload must move in each --rate-s seconds.")
    ] = 524288,
    rate_s: Annotated[
        int, typer.Option(min=1, metavar="SECONDS", help="Time for --rate-bytes of an upload, and to read one reply.")
    ] = 300,
    burst: Annotated[int, typer.Option(min=50, metavar="N", help="Calls that one peer may make in a burst.")] = 2000,
    calls_a_second: Annotated[
        int, typer.Option(min=1, metavar="N", help="Calls that one peer may make each second after a burst.")
    ] = 100,
    read_socket: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="The socket of the dashboard, if not DIR/read.sock: questions alone."),
    ] = None,
    reader: Annotated[
        str, typer.Option(metavar="USER", help="The user that the dashboard runs as, if it has one of its own.")
    ] = "",
    metrics: Metrics = "",
    traces: Traces = "",
    log_format: LogFormat = "text",
) -> None:
    """Serve the federation until SIGTERM. Prints `ready HOST:PORT`."""
    from coordinator.calls import Bounds
    from coordinator.reading import Readers
    from coordinator.server import serve as serve_forever
    from coordinator.state_directory import State as Place
    from wardround.local.logs import use_format

    use_format(log_format)
    bounds = Bounds(first_message_s, rate_bytes, rate_s, burst, calls_a_second, left_s=rate_s)
    readers = Readers(read_socket or Place(state).read, _uid(reader) if reader else None)
    serve_forever(Place(state), listen, bounds, readers=readers, metrics=metrics, traces=traces)


def _uid(user: str) -> int:
    import pwd

    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise UsageProblem(f"this machine has no user `{user[:64]}`", hint="--reader USER") from None
