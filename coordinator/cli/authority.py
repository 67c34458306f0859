"""``coordinator authority``: the root's key away from the service, and the way to a new intermediate or root."""

from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.asking import ask, refuse_no_coordinator
from coordinator.cli.options import Force, Json, State
from coordinator.member_answers import AuthorityStatus, IntermediateRequested
from coordinator.requests import (
    InstallIntermediate,
    LeaveRoot,
    RequestIntermediate,
    RetireRoot,
    ShowAuthority,
)
from wardround.cli import print_json, say
from wardround.errors import BadData, UsageProblem

MAX_FILE = 64 * 1024
app = typer.Typer(
    help="Keep the root's key away from the service, and roll over to a new intermediate or root.",
    no_args_is_help=True,
    add_completion=False,
)
Passphrase = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A file whose first line is the passphrase; without it, you are asked."),
]
Root = Annotated[Path, typer.Option(metavar="FILE", help="The root's key, as `export-root` wrote it.")]


@app.command()
def show(state: State, json: Json = False) -> None:
    """What signs the sites' certificates, and which sites have not renewed since the newest root came."""
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
    from coordinator.members.authority import Authority
    from coordinator.members.roots import RootFile, root_in_service
    from coordinator.state_directory import State as Place
    from wardround.local import outputs

    refuse_no_coordinator(state)
    place = Place(state)
    outputs.file(out, force=force, keep=[state])
    root = root_in_service(Authority(place.authority, place.config().federation))
    secret = _passphrase(passphrase, "Passphrase for the root's key: ", new=True)
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
    held = RootFile.decrypted(_read(root), _passphrase(passphrase, f"Passphrase of {root}: "), str(root))
    outputs.write(out, [held.signs(_read(request), time.time())], force=force, keep=[])
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
    secret = _passphrase(passphrase, f"Passphrase of {root}: ")
    fresh = RootFile.decrypted(_read(root), secret, str(root)).successor(time.time())
    if new_passphrase is not None:
        secret = _passphrase(new_passphrase, "", new=True)
    outputs.write(out, [fresh.encrypted(secret)], force=force, keep=[root])
    say(f"A new root's key is in {out}; fingerprint {fingerprint(fresh.certificate)}")
    say(f"next: at the coordinator, `coordinator authority request`; then here, `sign --root {out.name}`")


@app.command()
def install(
    state: State,
    certificate: Annotated[Path, typer.Argument(metavar="FILE", help="What `sign` wrote.")],
) -> None:
    """Take a new intermediate into service, and its root if that is a new one. No connection ends."""
    refuse_no_coordinator(state)
    status = ask(state, InstallIntermediate(bundle=_read(certificate).decode(errors="replace")), AuthorityStatus)
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
    status = ask(state, RetireRoot(anyway=anyway), AuthorityStatus)
    say(f"Only root {status.roots[0].fingerprint} is trusted from now on")
    for site in status.behind:
        say(f"next: `coordinator invite {site}`, which the site redeems in its own state directory")


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE)
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}") from None


def _passphrase(path: Path | None, prompt: str, *, new: bool = False) -> bytes:
    """The passphrase, from a file or an unseen prompt; a new one is typed twice."""
    import getpass
    import sys

    if path is not None:
        return _read(path).partition(b"\n")[0].rstrip(b"\r")
    if not sys.stdin.isatty():
        raise UsageProblem("no passphrase was given, and there is no terminal to ask at", hint="give --passphrase FILE")
    typed = getpass.getpass(prompt)
    if new and getpass.getpass("Again: ") != typed:
        raise UsageProblem("the two passphrases differ; nothing was changed")
    return typed.encode()
