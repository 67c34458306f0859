"""``coordinator authority``: the root's key away from the service, and the way to a new intermediate or root."""

from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.asking import ask, refuse_no_coordinator
from coordinator.cli.options import Force, State
from coordinator.cli.passphrases import Passphrase, passphrase_from, read
from wardround.cli import Json, group, print_json, say

app = group("Keep the root's key away from the service, and roll over to a new intermediate or root.")
Root = Annotated[Path, typer.Option(metavar="FILE", help="The root's key, as `export-root` wrote it.")]


@app.command()
def show(state: State, json: Json = False) -> None:
    """What signs the sites' certificates, and which sites have not renewed since the newest root came."""
    from coordinator.member_answers import AuthorityStatus
    from coordinator.requests import ShowAuthority

    status = ask(state, ShowAuthority(), AuthorityStatus)
    if json:
        print_json(status.document())
        return
    print(f"signs: {status.signs}, until {status.expires}")
    for number, root in enumerate(status.roots):
        print(f"root{'' if number == 0 else ' before it'}: {root.fingerprint}, until {root.expires}")
    if len(status.roots) > 1:
        print(f"sites that have not renewed since: {', '.join(status.behind) or 'none'}")


@app.command()
def export_root(
    state: State,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write it, best on a medium that you take away.")],
    passphrase: Passphrase = None,
    force: Force = False,
) -> None:
    """Write the root's key to a file under a passphrase, and let an intermediate sign in its place."""
    from coordinator.member_answers import AuthorityStatus, Noted
    from coordinator.members.authority import Authority
    from coordinator.members.roots import RootFile, root_in_service
    from coordinator.requests import LeaveRoot, NoteRootExport
    from coordinator.state_directory import State as Place
    from wardround.local import outputs

    refuse_no_coordinator(state)
    place = Place(state)
    outputs.file(out, force=force, keep=[state])
    root = root_in_service(Authority(place.authority, place.config().federation))
    secret = passphrase_from(passphrase, "Passphrase for the root's key: ", new=True)
    ask(state, NoteRootExport(), Noted)  # no key leaves that the journal does not say
    outputs.write(out, [root.encrypted(secret)], force=force, keep=[state])
    RootFile.decrypted(out.read_bytes(), secret, str(out))
    ask(state, LeaveRoot(), AuthorityStatus)
    say(f"The root's key is in {out} and no longer in {state}; an intermediate signs from now on, for a year")
    say("next: take that file away, with a copy at another place; keep the passphrase apart from both")


@app.command()
def request(
    state: State,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the request. It is no secret.")],
    force: Force = False,
) -> None:
    """Ask for the certificate of a new intermediate. Its key is made here and stays here."""
    from coordinator.member_answers import IntermediateRequested
    from coordinator.requests import RequestIntermediate
    from wardround.local import outputs

    refuse_no_coordinator(state)
    outputs.file(out, force=force, keep=[state])
    answer = ask(state, RequestIntermediate(), IntermediateRequested)
    outputs.write(out, [answer.request.encode()], force=force, keep=[state])
    say(f"Request written to {out}")
    say(f"next: where the root's file is, `coordinator authority sign --root FILE --request {out.name} --out FILE`")


@app.command()
def sign(
    root: Root,
    request: Annotated[Path, typer.Option(metavar="FILE", help="What `request` wrote.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the certificate. It is no secret.")],
    passphrase: Passphrase = None,
    force: Force = False,
) -> None:
    """Where the root's file is: sign the certificate of a new intermediate. Needs no state directory and no network."""
    import time

    from coordinator.members.roots import RootFile
    from wardround.local import outputs

    outputs.file(out, force=force, keep=[])
    held = RootFile.decrypted(read(root), passphrase_from(passphrase, f"Passphrase of {root}: "), str(root))
    outputs.write(out, [held.signs(read(request), time.time())], force=force, keep=[])
    say(f"Certificate written to {out}")
    say(f"next: at the coordinator, `coordinator authority install {out.name}`")


@app.command()
def new_root(
    root: Root,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the new root's key.")],
    passphrase: Passphrase = None,
    new_passphrase: Annotated[
        Path | None, typer.Option(metavar="FILE", help="As --passphrase, for the new root; without it, the same one.")
    ] = None,
    force: Force = False,
) -> None:
    """Where the root's file is: make a new root, for which the present one vouches. Needs no state directory."""
    import time

    from coordinator.members.roots import RootFile
    from wardround.local import outputs
    from wardround.signing.certificates import fingerprint

    outputs.file(out, force=force, keep=[root])
    secret = passphrase_from(passphrase, f"Passphrase of {root}: ")
    fresh = RootFile.decrypted(read(root), secret, str(root)).successor(time.time())
    if new_passphrase is not None:
        secret = passphrase_from(new_passphrase, "", new=True)
    outputs.write(out, [fresh.encrypted(secret)], force=force, keep=[root])
    say(f"A new root's key is in {out}; fingerprint {fingerprint(fresh.certificate)}")
    say(f"next: at the coordinator, `coordinator authority request`; then here, `sign --root {out.name}`")


@app.command()
def install(
    state: State,
    certificate: Annotated[Path, typer.Argument(metavar="FILE", help="What `sign` wrote.")],
) -> None:
    """Take a new intermediate into service, and its root if that is a new one. No connection ends."""
    from coordinator.member_answers import AuthorityStatus
    from coordinator.requests import InstallIntermediate

    refuse_no_coordinator(state)
    status = ask(state, InstallIntermediate(bundle=read(certificate).decode(errors="replace")), AuthorityStatus)
    say(f"Another intermediate signs from now on, until {status.expires}")
    if len(status.roots) > 1:
        say(f"The new root {status.roots[0].fingerprint} is trusted beside the one before it")
        say("next: when every site has renewed (`coordinator authority show`), `coordinator authority retire`")


@app.command()
def retire(
    state: State,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Also where sites did not renew; each needs a new invitation then.")
    ] = False,
) -> None:
    """Trust the newest root alone."""
    from coordinator.member_answers import AuthorityStatus
    from coordinator.requests import RetireRoot

    status = ask(state, RetireRoot(anyway=anyway), AuthorityStatus)
    say(f"Only root {status.roots[0].fingerprint} is trusted from now on")
    for site in status.behind:
        say(f"next: `coordinator invite {site}`, which the site redeems in its own state directory")
