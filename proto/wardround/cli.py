"""What the three commands share: errors become a sentence, a hint and an exit code; results go to stdout."""

import json
import os
import sys
import traceback
from typing import Any

import click
import typer

from wardround.errors import UsageProblem, WardroundError

USAGE, CRASH, INTERRUPTED = UsageProblem.exit_code, 70, 130


def run(app: typer.Typer) -> None:
    """Run a Typer application as this process's command and exit with its code.

    Exit codes are those of ``wardround.errors``; Click's own usage errors are 64 too, and a crash is 70.
    """
    try:
        code = app(standalone_mode=False)
    except WardroundError as error:
        say_error(error)
        code = error.exit_code
    except click.ClickException as error:
        code = USAGE if isinstance(error, click.UsageError) else 1
        context = getattr(error, "ctx", None)
        print(f"error: {_lowered(error.format_message())}", file=sys.stderr)
        if context is not None:
            print(f"hint: `{context.command_path} --help`", file=sys.stderr)
    except (click.Abort, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:
        if os.environ.get("WARDROUND_DEBUG"):
            traceback.print_exc()
        print(f"error: this is a fault in the program: {type(error).__name__}: {error}", file=sys.stderr)
        print("hint: run it again with WARDROUND_DEBUG=1 and send us what it prints, after reading it", file=sys.stderr)
        code = CRASH
    sys.exit(code if isinstance(code, int) else 0)


def say_error(error: WardroundError) -> None:
    """The error and its hint, on stderr."""
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)


def say(text: str) -> None:
    """A line of narration, on stderr."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """One object on stdout, for scripts."""
    print(json.dumps(value, indent=2, ensure_ascii=False), flush=True)


def _lowered(text: str) -> str:
    return (text[:1].lower() + text[1:]).rstrip(".")
