"""What the commands share: exit codes, error sentences, results on stdout."""

import errno
import io
import json
import os
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest
import typer

from wardround import cli, errors


def application() -> typer.Typer:
    app = cli.application("program", "Greet, or fail.")

    @app.command()
    def greet(name: str, times: int = 1) -> None:
        """Greet by name, in the words that [words.NAME] of no file has, so long that no line of 80 takes it whole."""
        cli.say("greeting")
        cli.print_json({"greeting": f"hallo {name}", "times": times})

    @app.command()
    def fail(how: str) -> None:
        match how:
            case "ours":
                raise errors.NeedsPerson("the study changed", hint="site-agent preview", code="REVISION_CHANGED")
            case "plain":
                raise errors.Unavailable("no line")
            case "partial":
                raise typer.Exit(3)
            case "interrupt":
                raise KeyboardInterrupt
            case "without torch":
                raise ModuleNotFoundError("No module named 'torch'", name="torch")
            case "disk":
                raise OSError(errno.EIO, os.strerror(errno.EIO), "/srv/table.csv")
            case _:
                raise ZeroDivisionError("division by zero")

    return app


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.run(application())
    return int(caught.value.code or 0)


def test_version_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"program {version('wardround')}\n"


def test_the_list_of_commands_has_whole_sentences_with_their_brackets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--help") == 0
    listed = " ".join(capsys.readouterr().out.split())
    assert "the words that [words.NAME] of no file has, so long that no line of 80 takes it whole. fail" in listed
    assert "--install-completion" in listed


def test_a_result_is_on_stdout_and_narration_on_stderr(monkeypatch: Any, capsys: Any) -> None:
    assert run(monkeypatch, "greet", "Ødegård") == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"greeting": "hallo Ødegård", "times": 1}
    assert said.err == "greeting\n"


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        pytest.param("ours", 78, "error: the study changed\nhint: site-agent preview\n", id="with a hint"),
        pytest.param("plain", 69, "error: no line\n", id="without a hint"),
        pytest.param("partial", 3, "", id="a code of its own"),
        pytest.param(
            "without torch",
            78,
            "error: this needs torch, which is not installed\nhint: `pip install 'wardround[site]'`\n",
            id="the base install",
        ),
        pytest.param(
            "disk",
            73,
            "error: /srv/table.csv: Input/output error\n"
            "hint: check the disk, free space and this machine's log, then give the command again\n",
            id="the machine's fault",
        ),
        pytest.param("interrupt", 130, "", id="interrupted"),
        pytest.param(
            "else",
            70,
            "error: this is a fault in the program: ZeroDivisionError: division by zero\n"
            "hint: run it again with WARDROUND_DEBUG=1 and send us what it prints, after reading it\n",
            id="a fault of ours",
        ),
    ],
)
def test_an_error_becomes_a_sentence_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str, code: int, said: str
) -> None:
    monkeypatch.delenv("WARDROUND_DEBUG", raising=False)
    assert run(monkeypatch, "fail", how) == code
    assert capsys.readouterr() == ("", said)


def test_a_fault_of_ours_shows_where_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WARDROUND_DEBUG", "1")
    assert run(monkeypatch, "fail", "else") == 70
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["greet"], ["greet", "x", "--times", "many"], ["greet", "x", "--tims", "1"], ["gret"], ["greet", "x", "y"]],
)
def test_a_command_given_wrongly_exits_64_in_our_form(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run(monkeypatch, *arguments) == 64
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert "Traceback" not in said.err


def test_a_reader_that_has_enough_is_told_nothing() -> None:
    """As in `coordinator sites --json | head -1`."""
    program = (
        "import sys, typer; from wardround import cli; app = typer.Typer()\n"
        "@app.command()\n"
        "def main():\n"
        "    sys.stdin.read()\n"
        "    cli.print_json(['x' * 1000] * 1000)\n"
        "cli.run(app)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141


def test_every_exit_code_stands_for_one_kind_of_error() -> None:
    assert {code: kind.__name__ for code, kind in errors.BY_EXIT_CODE.items()} == {
        70: "WardroundError",
        64: "UsageProblem",
        65: "BadData",
        69: "Unavailable",
        73: "CannotWrite",
        75: "TryAgain",
        77: "NotPermitted",
        78: "NeedsPerson",
    }


TELLS = """
import sys, typer
from wardround import cli
app = typer.Typer()

@app.command()
def tell(lines: int, code: int) -> None:
    for number in range(lines):
        print("line", number)
    raise typer.Exit(code)

cli.run(app)
"""


@pytest.mark.parametrize(
    ("lines", "code", "wanted"),
    [
        pytest.param(1, 2, 2, id="all was said, and the command's own code stands"),
        pytest.param(1, 0, 0, id="all was said and all is well"),
        pytest.param(100_000, 0, 141, id="only a part of it was said"),
    ],
)
def test_a_reader_that_goes_away_is_not_a_verdict(lines: int, code: int, wanted: int) -> None:
    line = [sys.executable, "-c", TELLS, str(lines), str(code)]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        program.stdout.close()
        said = program.stderr.read()
        assert (program.wait(30), said) == (wanted, b"")


def test_a_command_without_words_shows_its_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch) == 64
    said = capsys.readouterr()
    assert "greet" in said.out + said.err
    assert "error:" not in said.err


def test_an_error_that_cannot_be_said_keeps_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log lies on the disk that failed: a service manager goes by the code."""

    class Failing(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(sys, "stderr", Failing())
    assert run(monkeypatch, "fail", "ours") == errors.NeedsPerson.exit_code


COORDINATOR, SITE, LAB = "coordinator.cli.main", "site_agent.cli.main", "fl_algorithms.lab.cli"


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (COORDINATOR, []), (COORDINATOR, ["study"]), (COORDINATOR, ["study", "new"]), (COORDINATOR, ["sites"]),
        (COORDINATOR, ["authority", "show"]), (SITE, []), (SITE, ["audit"]), (SITE, ["audit", "show"]),
        (SITE, ["status"]), (LAB, []), (LAB, ["tune"]), (LAB, ["data", "skin"]),
    ],
)  # fmt: skip
def test_help_loads_nothing_that_only_a_command_needs(module: str, words: list[str]) -> None:
    look = (
        f"import sys\nfrom {module} import main\nsys.argv = ['program', *{words}, '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n"
        "    print(end.code, {'pydantic', 'torch', 'grpc', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 set()"
