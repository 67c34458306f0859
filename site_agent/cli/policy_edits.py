"""``site-agent policy edit`` and ``apply``: another policy in force, with the person who changed it in the ledger."""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from site_agent.cli.options import State
from site_agent.cli.release import Yes
from site_agent.cli.service import ask_or_do, joined
from wardround.cli import Json, print_json, say, say_error, say_next
from wardround.errors import BadData, UsageProblem, WardroundError
from wardround.local.directory import quoted

if TYPE_CHECKING:
    from site_agent.gateway.commands import CommandHandler
    from site_agent.gateway.policy_requests import Proposed
    from site_agent.state.directory import SiteState

EDITOR = "vi"  # where neither VISUAL nor EDITOR is set


def edit(state: State) -> None:
    """Edit the policy in force with $VISUAL or $EDITOR: checked, shown, and put in force with your name in the ledger.

    What is no policy is not put in force. The policy before is kept: `site-agent policy show` lists all.
    """
    here, _ = joined(state)
    if not sys.stdin.isatty():
        raise UsageProblem(
            "there is no terminal for an editor", hint="edit a copy, then `site-agent policy apply FILE --yes`"
        )
    present = in_force(here)
    folder = Path(tempfile.mkdtemp(prefix="wardround-policy-"))
    copy, kept = folder / "policy.toml", False
    try:
        copy.write_bytes(present)
        text = _edited(copy)
        try:
            _put(here, text, present, yes=False)
        except WardroundError:
            kept = True
            say(f"what you wrote is kept in {copy}; when the trouble is over: `site-agent policy apply {quoted(copy)}`")
            raise
    finally:
        if not kept:
            shutil.rmtree(folder)


def _edited(copy: Path) -> bytes:
    """What a person makes of the policy in ``copy`` with the editor, as often as it takes."""
    while True:
        _run_editor(copy)
        text = copy.read_bytes()
        try:
            _checked(text, copy)
            return text
        except WardroundError as error:
            say_error(error)
            typer.confirm("Edit it again? Otherwise nothing is changed.", abort=True, err=True)


def apply(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The policy as it should be.")],
    state: State,
    yes: Yes = False,
) -> None:
    """Put the policy in a file in force, after showing what it says otherwise; with your name in the ledger."""
    from site_agent.gateway.policy import policy

    here, _ = joined(state)
    text = policy.read(file)
    _checked(text, file)
    _put(here, text, in_force(here), yes=yes)


def proposed(
    state: State,
    take_back: Annotated[bool, typer.Option("--take-back", help="Let it count no more.")] = False,
    json: Json = False,
) -> None:
    """Show the change of the policy that waits for further people, or take it back."""
    from site_agent.gateway.consent.recorded import person_entry
    from site_agent.gateway.policy_requests import TakeBackPolicy
    from site_agent.gateway.request_form import Done
    from site_agent.state.person import who

    here, _ = joined(state)
    waiting = _proposed(here)
    if json:
        print_json(waiting.document())
    elif not waiting.sha256:
        print("no change of the policy waits for a person")
    else:
        _print_proposed(waiting)
    if take_back and waiting.sha256:
        person = who()

        def alone(handler: "CommandHandler") -> Done:
            handler.policy.take_back(waiting.sha256, person_entry(person))
            return Done()

        ask_or_do(here, TakeBackPolicy(waiting.sha256, person), alone)
        say(f"taken back by {person.text}: what is in force stays")
    elif waiting.sha256:
        say_next("next: another person runs `site-agent policy agree`")


def agree(state: State, yes: Yes = False) -> None:
    """Agree to the change of the policy that another person proposed, after showing what it says otherwise."""
    here, _ = joined(state)
    waiting = _proposed(here)
    if not waiting.sha256:
        raise UsageProblem("no change of the policy waits for a person")
    _print_proposed(waiting)
    if not yes:
        _confirm()
    _say_put(put_policy(here, waiting.text.encode(), waiting.before))


def _proposed(here: "SiteState") -> "Proposed":
    from site_agent.gateway.policy_requests import GetProposed

    return ask_or_do(here, GetProposed(), lambda handler: handler.policy.proposed())


def _print_proposed(waiting: "Proposed") -> None:
    for change in waiting.changes:
        print(change)
    print(f"policy {waiting.sha256[:12]}…: agreed to by {' and '.join(waiting.by)}; {waiting.persons} must")


def in_force(here: "SiteState") -> bytes:
    """The text of the policy in force; empty where there is none.

    Where several people must agree to each change, what lies there may have been changed by hand: then it is the one to
    which they agreed last.
    """
    from site_agent.audit.policies import agreed
    from site_agent.gateway.policy import policy

    if (last := agreed(here.ledger)) is not None:
        return here.policy_text(last.sha256) or b""
    return policy.read(here.policy) if here.policy.exists() else b""


def put_policy(here: "SiteState", text: bytes, before: str) -> str:
    """Put a policy in force in the place of the one with the digest ``before``, which the person saw; its digest.

    Whoever runs the command is named in the ledger.

    Args:
        before: "" for none.

    Raises:
        BadData: it is no policy.
        NeedsPerson: another one is in force than ``before``; or further people must agree.
    """
    from site_agent.gateway.consent.recorded import person_entry
    from site_agent.gateway.requests import PolicyPut, PutPolicy
    from site_agent.state.person import who

    person = who()
    try:
        request = PutPolicy(text.decode(), before, person)
    except UnicodeDecodeError:
        raise BadData("a policy is UTF-8 text") from None
    return ask_or_do(
        here, request, lambda handler: PolicyPut(handler.policy.put(text, before, person_entry(person)))
    ).sha256


def _put(here: "SiteState", text: bytes, before: bytes, *, yes: bool) -> None:
    if text == before:
        print("the policy says exactly this already; nothing was changed")
        return
    for change in _changes(here, text, before):
        print(change)
    if not yes:
        _confirm()
    digest = put_policy(here, text, digest_of(before))
    _say_put(digest)
    if before:
        say(f"the one before is kept: `site-agent policy show {digest_of(before)[:12]}`")
    say_next("next: `site-agent policy explain STUDY`")


def digest_of(text: bytes) -> str:
    """Of a policy; "" for none."""
    return hashlib.sha256(text).hexdigest() if text else ""


def _confirm() -> None:
    """Raises UsageProblem: there is no terminal."""
    if not sys.stdin.isatty():
        raise UsageProblem("there is no terminal to ask at; nothing was changed", hint="read it, then give --yes")
    typer.confirm("Put this policy in force?", abort=True, err=True)


def _say_put(digest: str) -> None:
    from site_agent.state.person import who

    print(f"policy {digest[:12]}… is in force, put there by {who().text}")


def _changes(here: "SiteState", text: bytes, before: bytes) -> list[str]:
    """What it says otherwise, in sentences."""
    from site_agent.gateway.policy import policy
    from site_agent.gateway.policy import text as policy_text

    try:
        old = policy.parse(before, here.policy) if before else None
    except BadData:
        return ["what was in force was no policy, and let nothing out"]
    if old is None:
        return ["there was no policy, and nothing could leave"]
    return policy_text.differences(old, policy.parse(text, here.policy)) or ["the two say the same in other words"]


def _checked(text: bytes, path: Path) -> None:
    """Raises BadData: it is no policy."""
    from site_agent.gateway.policy import policy

    policy.parse(text, path)


def _run_editor(path: Path) -> None:
    """Raises UsageProblem: the editor cannot be started, or failed."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or EDITOR
    try:
        done = subprocess.run([*shlex.split(editor), str(path)], check=False)
    except (OSError, ValueError) as error:
        raise UsageProblem(
            f"the editor `{editor[:80]}` cannot be started: {getattr(error, 'strerror', None) or error}",
            hint="set EDITOR, or edit a copy and give it to `site-agent policy apply FILE`",
        ) from None
    if done.returncode != 0:
        raise UsageProblem(f"the editor `{editor[:80]}` ended with {done.returncode}; nothing was changed")
