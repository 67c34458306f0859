"""What the three commands share: errors become a sentence, a hint and an exit code; results go to stdout."""

import errno
import getpass
import json
import os
import re
import shlex
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperGroup

from wardround import __version__
from wardround.errors import BadData, CannotWrite, NeedsPerson, UsageProblem, WardroundError
from wardround.local import memory
from wardround.local.directory import default_state, described_default
from wardround.terminal import escaped, screened

SITE_EXTRA = ("torch", "torchvision", "sklearn")
INSTALL_SITE = "`pip install 'wardround[site]'`"
OF_THE_MACHINE = frozenset(
    {
        errno.EIO,
        errno.EUCLEAN,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ESTALE,
    }
)  # fmt: skip  its disk, or its room: no fault of the program, wherever it is met
MACHINE_HINT = "check the disk, free space and this machine's log, then give the command again"
USAGE, CRASH, INTERRUPTED = UsageProblem.exit_code, 70, 130
READER_GONE = 141  # as of a program that SIGPIPE ended: what was printed is not the whole answer
STATELESS = (  # without a --state
    "site-agent policy diff", "site-agent audit relay", "site-agent audit verifier", "site-agent --version",
    "coordinator study check", "coordinator study new", "coordinator journal verify", "coordinator authority sign",
    "coordinator authority new-root",
)  # fmt: skip
LogFormat = Annotated[
    Literal["text", "json"],
    typer.Option(
        envvar="WARDROUND_LOG_FORMAT", help="How the log is written: a line of text, or one JSON object each."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Metrics = Annotated[
    str,
    typer.Option(
        "--metrics",
        metavar="HOST:PORT|unix:PATH",
        help="Answer /metrics, /healthz and /readyz there. Without it, nothing listens.",
    ),
]
Traces = Annotated[
    str,
    typer.Option(
        "--traces",
        metavar="http://HOST:PORT",
        help="Send the spans of rounds to this collector of OpenTelemetry. Without it, none are made.",
    ),
]
Origin = Annotated[
    str,
    typer.Option(metavar="https://NAME", help="What browsers call the page, where a proxy with TLS stands before it."),
]
Certificate = Annotated[
    Path | None, typer.Option(metavar="FILE.pem", help="For TLS of its own: the certificate, with its chain.")
]
Key = Annotated[Path | None, typer.Option(metavar="FILE.pem", help="The certificate's private key.")]
PasswordFile = Annotated[
    str | None,
    typer.Option(metavar="FILE|-", help="Take the password from a file's first line, or - for stdin; for scripts."),
]
_program = ""  # whose command this process is
# Typer carries its own copy of Click, or uses the installed one, by version; its public BadParameter leads to either.
_UNSEEN = re.compile(r"[^ -~]")
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class _Group(TyperGroup):
    """Commands whose first sentence stands whole in the list of them; Click would cut it at the line's end."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As it is, without pydantic: Typer loads that to judge a flag that is None, in as long as help takes."""
        for option in self.get_params(ctx):
            if getattr(option, "is_bool_flag", False) and option.default is None:
                option.default = False
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        known = [(name, command) for name in self.list_commands(ctx) if (command := self.get_command(ctx, name))]
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(limit=400)) for name, command in known])


def group(purpose: str) -> typer.Typer:
    """A group of commands. Its help is plain text, so that a bracket in it stays."""
    return typer.Typer(
        help=purpose, cls=_Group, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
    )


def application(name: str, purpose: str) -> typer.Typer:
    """The command ``name``, with ``--version`` and the completion of shells."""
    app = group(purpose)
    app.info.name = name

    def say_version(wanted: bool) -> None:
        if wanted:
            print(f"{name} {__version__}")
            raise typer.Exit

    @app.callback()
    def options(
        version: Annotated[
            bool, typer.Option("--version", callback=say_version, is_eager=True, help="Show the version and exit.")
        ] = False,
    ) -> None:
        pass

    return app


def state_option(program: str, purpose: str) -> Any:
    """The option ``--state`` of a program; without it, its default place."""
    return typer.Option(
        "--state",
        envvar="WARDROUND_STATE",
        metavar="DIR",
        default_factory=lambda: default_state(program),
        show_default=described_default(program),
        readable=False,  # each command says itself what it cannot read, and `dashboard --users` reads none of it
        help=purpose,
    )


def run(app: typer.Typer) -> None:
    """Run a Typer application as this process's command and exit with its code.

    Exit codes are those of ``wardround.errors``; usage errors that Click finds are 64 too, and a crash is 70. A reader
    that goes away before the end (``| head``) makes it 141, and never 0 or 1, which may be a verdict.

    Its memory is hidden from the other processes of its user, and what it prints has no character that a terminal
    would obey.
    """
    global _program
    _program = app.info.name if isinstance(app.info.name, str) else ""
    memory.hide()
    with screened():
        _run(app)


def _run(app: typer.Typer) -> NoReturn:
    code: Any
    try:
        code = app(standalone_mode=False)
    except WardroundError as error:
        say_error(error)
        code = error.exit_code
    except _UsageError as error:
        code = USAGE
        _say_usage(error)
    except (typer.Abort, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:
        code = READER_GONE
    except SystemExit as ended:  # what Typer and Rich make of a closed pipe
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        code = READER_GONE
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in SITE_EXTRA:
            say_error(NeedsPerson(f"this needs {error.name}, which is not installed", hint=INSTALL_SITE))
            sys.exit(NeedsPerson.exit_code)
        if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
            say_error(CannotWrite(f"{error.filename or 'this machine'}: {error.strerror}", hint=MACHINE_HINT))
            sys.exit(CannotWrite.exit_code)
        if os.environ.get("WARDROUND_DEBUG"):
            traceback.print_exc()
        print(f"error: this is a fault in the program: {type(error).__name__}: {error}", file=sys.stderr)
        print("hint: run it again with WARDROUND_DEBUG=1 and send us what it prints, after reading it", file=sys.stderr)
        code = CRASH
    _flush()
    sys.exit(code if isinstance(code, int) else 0)


def new_password(source: str | None) -> str:
    """A password that somebody chose: from a file, stdin, or typed twice and not shown.

    Raises:
        UsageProblem: it was typed otherwise the second time, or there is no terminal to ask at.
        BadData: the file cannot be read.
    """
    if source is not None:
        try:
            text = sys.stdin.readline(4096) if source == "-" else Path(source).read_text()[:4096]
        except (OSError, UnicodeDecodeError) as error:
            raise BadData(f"{source}: no password can be read there ({error})") from None
        return text.partition("\n")[0]
    if not sys.stdin.isatty():
        raise UsageProblem("there is no terminal to ask for a password at", hint="give --password-file FILE, or -")
    password = getpass.getpass("Password (not shown): ")
    if getpass.getpass("The same again: ") != password:
        raise UsageProblem("the two passwords are not the same; nothing was changed")
    return password


def say_error(error: WardroundError) -> None:
    """The error and its hint, on stderr, a line each. Where that cannot be written, the exit code still says its kind:
    a log may lie on the disk that failed.
    """
    with suppress(OSError):
        print(f"error: {escaped(error.message)}", file=sys.stderr)
        if error.hint:
            print(f"hint: {escaped(pasted(error.hint))}", file=sys.stderr)


def say(text: str) -> None:
    """A line of narration, on stderr."""
    print(pasted(text), file=sys.stderr, flush=True)


def say_next(text: str) -> None:
    """A line on stdout that quotes commands, as they can be pasted."""
    print(pasted(text))


def pasted(text: str) -> str:
    """``text`` with each command of this program that it quotes as it must be given here: with the same ``--state``.

    Where the state directory is in the environment, or the command is another program's, nothing is added.
    """
    state = _state_given(sys.argv[1:])
    if not (_program and state):
        return text

    def whole(match: re.Match[str]) -> str:
        command = match[1]
        if command.startswith(STATELESS) or re.search(r"--(state|ledger)\b", command):
            return match[0]
        return f"`{command} --state {shlex.quote(state)}`"

    return re.sub(rf"`({re.escape(_program)} [^`]*)`", whole, text)


def _state_given(words: list[str]) -> str:
    for number, word in enumerate(words):
        if word == "--state" and number + 1 < len(words):
            return words[number + 1]
        if word.startswith("--state="):
            return word.removeprefix("--state=")
    return ""


def print_json(value: Any) -> None:
    """One object on stdout, for scripts."""
    print(_UNSEEN.sub(_as_json_escape, json.dumps(value, indent=2, ensure_ascii=False)), flush=True)


def _as_json_escape(match: re.Match[str]) -> str:
    """A character that a terminal may obey, or hide, as JSON has it; what the JSON says stays the same."""
    if match[0].isprintable() or match[0] == "\n":
        return match[0]
    return json.dumps(match[0])[1:-1]


def _flush() -> None:
    """Hand over what is still to be read. If nobody reads, drop it: the interpreter would end with 120."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _say_usage(error: Exception) -> None:
    """What Click found wrong with the words of a command. A command without any shows its help."""
    context = getattr(error, "ctx", None)
    text = getattr(error, "format_message", lambda: str(error))()
    if context is not None and type(error).__name__ == "NoArgsIsHelpError":
        print(context.get_help(), file=sys.stderr)
        return
    print(f"error: {_lowered(text)}", file=sys.stderr)
    if context is not None:
        print(f"hint: `{context.command_path} --help`", file=sys.stderr)


def _lowered(text: str) -> str:
    return (text[:1].lower() + text[1:]).rstrip(".")
