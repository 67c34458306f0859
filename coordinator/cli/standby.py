"""``coordinator standby``: the second coordinator, which waits on the same database and takes over."""

from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.asking import ask, refuse_no_coordinator
from coordinator.cli.options import Blobs, Force, State
from coordinator.cli.passphrases import Passphrase, passphrase_from, read
from wardround.cli import group, say

app = group("Make a second coordinator, which waits on the same database and takes over.")


@app.command("export")
def export_file(
    state: State,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write it.")],
    passphrase: Passphrase = None,
    force: Force = False,
) -> None:
    """Write this coordinator's keys and settings to a file under a passphrase, for the machine of the standby."""
    from coordinator import standby_file
    from coordinator.member_answers import Noted
    from coordinator.requests import NoteExport
    from coordinator.state_directory import State as Place
    from wardround.local import outputs

    refuse_no_coordinator(state)
    outputs.file(out, force=force, keep=[state])
    secret = passphrase_from(passphrase, "Passphrase for the file: ", new=True)
    sealed = standby_file.exported(Place(state), secret)
    ask(state, NoteExport(), Noted)  # no key leaves that the journal does not say
    outputs.write(out, [sealed], force=force, keep=[state])
    say(f"The federation's keys are in {out}, under the passphrase: delete it when the standby has them")
    say(f"next: on the other machine, `coordinator standby import {out.name} --state DIR`")


@app.command("import")
def import_file(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `export` wrote.")],
    state: State,
    passphrase: Passphrase = None,
    blobs: Blobs = "",
    force: Annotated[bool, typer.Option("--force", help="Give newer keys to a standby that is there.")] = False,
) -> None:
    """Make the state directory of a standby from that file."""
    from coordinator import standby_file
    from coordinator.state_directory import State as Place
    from coordinator.state_directory import blobs_from

    data = read(file, standby_file.MAX_FILE)
    secret = passphrase_from(passphrase, f"Passphrase of {file}: ")
    config = standby_file.imported(Place(state), data, secret, blobs_from(blobs), force=force)
    say(f"A standby of federation `{config.federation}` is in {state}; delete {file}")
    say(f"next: {standby_file.next_step(Place(state))}")
