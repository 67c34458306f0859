"""``site-agent page``: the hospital's page for a browser of this machine, and who may log in to it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from site_agent.cli.options import State
from site_agent.cli.service import joined
from wardround.cli import LogFormat, PasswordFile, group, new_password, say, say_next

if TYPE_CHECKING:
    from wardround.web.passwords import Users

page_app = group("Show what left and what waits in a browser of this machine; approve and release there.")
user_app = group("Who may log in to the page.")
page_app.add_typer(user_app, name="user")
Name = Annotated[str, typer.Argument(metavar="NAME", help="The user's name: it stands in consents and in the ledger.")]


@page_app.command()
def serve(
    state: State,
    listen: Annotated[
        str, typer.Option(metavar="IP:PORT", help="Where to listen: an address of this machine alone.")
    ] = "127.0.0.1:8090",
    log_format: LogFormat = "text",
) -> None:
    """Serve the page until SIGTERM, on this machine only. Prints `ready URL`."""
    from site_agent.page.application import run
    from wardround.local.logs import use_format
    from wardround.web.serving import begin, place

    use_format(log_format)
    there = place(listen, only_loopback=True)
    here, _ = joined(state)
    begin()
    run(here, there)


@user_app.command()
def add(
    name: Name,
    state: State,
    only_look: Annotated[bool, typer.Option("--only-look", help="This user may decide nothing.")] = False,
    password_file: PasswordFile = None,
) -> None:
    """Let somebody log in, or give another password or other rights. The password is asked for and not shown."""
    is_new = _users(state).put(name, new_password(password_file), "look" if only_look else "decide")
    what = "look" if only_look else "look and decide"
    say(f"`{name}` may {what} now" if is_new else f"`{name}` may {what} with the new password, and is logged out")
    say_next("next: `site-agent page serve`")


@user_app.command()
def remove(name: Name, state: State) -> None:
    """Let somebody log in no more. Sessions of that user end at once."""
    _users(state).remove(name)
    say(f"`{name}` is logged out, and may log in no more")


@user_app.command("list")
def list_(state: State) -> None:
    """Print who may log in, and who may decide."""
    for user in _users(state).all():
        print(f"{user.name}  {'may look and decide' if user.may == 'decide' else 'may look'}")


def _users(state: Path) -> "Users":
    from site_agent.page.application import users_file
    from wardround.web.passwords import Users

    here, _ = joined(state)
    return Users(users_file(here.root))
