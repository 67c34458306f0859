"""``coordinator dashboard``: pages for a browser, and who may log in to them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.asking import refuse_no_coordinator
from coordinator.cli.options import State
from wardround.cli import Certificate, Key, LogFormat, Origin, PasswordFile, group, new_password, say, say_next
from wardround.errors import NeedsPerson, UsageProblem

if TYPE_CHECKING:
    from wardround.web.oidc import Provider
    from wardround.web.passwords import Users
    from wardround.web.serving import Place

app = group("Show studies, rounds and sites in a browser, to people who log in.")
users = group("Who may log in to the dashboard.")
app.add_typer(users, name="user")
Name = Annotated[str, typer.Argument(metavar="NAME", help="The user's name.")]
Apart = Annotated[
    Path | None,
    typer.Option(
        "--users",
        metavar="DIR",
        help="Where the names are, for a dashboard that runs as a user of its own: nothing is looked for in --state.",
    ),
]


@app.command()
def serve(
    state: State,
    listen: Annotated[
        str, typer.Option(metavar="IP:PORT", help="Where to listen; beyond this machine with TLS alone.")
    ] = "127.0.0.1:8080",
    origin: Origin = "",
    certificate: Certificate = None,
    key: Key = None,
    read_socket: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The service's socket for readers, if not DIR/read.sock.")
    ] = None,
    apart: Apart = None,
    oidc: Annotated[
        Path | None,
        typer.Option("--oidc", metavar="FILE", help="Let people log in with a provider of OpenID Connect as well."),
    ] = None,
    log_format: LogFormat = "text",
) -> None:
    """Serve the dashboard until SIGTERM. Prints `ready URL`. It asks the running service, and changes nothing."""
    from coordinator.dashboard.application import run
    from coordinator.requests import READ_SOCKET
    from wardround.local.logs import use_format
    from wardround.web.serving import begin, place

    use_format(log_format)
    there = place(listen, origin=origin, certificate=certificate, key=key, only_loopback=False)
    known = _users(state, apart)
    if apart is not None and read_socket is None:
        raise UsageProblem(
            "with --users the dashboard does not look into the state directory, and no --read-socket is given",
            hint="as in `coordinator serve --read-socket PATH --reader USER`",
        )
    begin()
    provider = _provider(oidc, there) if oidc is not None else None
    run(None if apart is not None else state, read_socket or state / READ_SOCKET, known, there, provider)


@users.command()
def add(name: Name, state: State, password_file: PasswordFile = None, apart: Apart = None) -> None:
    """Let somebody log in, or give another password. It is asked for and not shown."""
    is_new = _users(state, apart).put(name, new_password(password_file), "look")
    say(f"`{name}` {'may log in now' if is_new else 'has another password now, and is logged out'}")
    say_next("next: `coordinator dashboard serve`")


@users.command()
def remove(name: Name, state: State, apart: Apart = None) -> None:
    """Let somebody log in no more. Sessions of that user end at once."""
    _users(state, apart).remove(name)
    say(f"`{name}` is logged out, and may log in no more")


@users.command("list")
def list_(state: State, apart: Apart = None) -> None:
    """Print who may log in."""
    for user in _users(state, apart).all():
        print(user.name)


def _provider(file: Path, there: "Place") -> "Provider":
    """Raises UsageProblem: not one origin. NeedsPerson: the extra is not installed. BadData: as ``Provider``."""
    from wardround.web.provided import BACK

    if len(there.origins) != 1:
        raise UsageProblem(
            "with --oidc the dashboard must know its own address, to which the provider sends people back",
            hint="--origin https://NAME, as people type it",
        )
    try:
        from wardround.web.oidc import Provider
    except ModuleNotFoundError as error:
        raise NeedsPerson(f"--oidc needs {error.name}", hint="`pip install 'wardround[dashboard,oidc]'`") from None
    return Provider(file, f"{next(iter(there.origins))}{BACK}")


def _users(state: Path, apart: Path | None) -> "Users":
    from coordinator.state_directory import State
    from wardround.web.passwords import Users

    if apart is not None:
        return Users(apart / "users.json")
    refuse_no_coordinator(state)
    return Users(State(state).users_file)
