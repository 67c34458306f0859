"""A program from a nursery is what a fresh interpreter would have been, as far as a test can see."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import BIN, DRAWN, PYTHON, ROOT, Forked, program_of

AGENT = str(BIN / "site-agent")
WAIT_S = 60
LOOK = (
    "import os, pathlib, sys; print(os.getppid(), os.getpid(), pathlib.Path.cwd(), os.environ['WORD'], sys.argv[1:], "
    "pathlib.Path('/proc/self/cmdline').read_text().rstrip('\\0').split('\\0')[4:], sys.stdin.read())"
)


def run(*line: str, **how: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(line, capture_output=True, text=True, timeout=WAIT_S, check=False, **how)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("words", [["--help"], ["audit", "--help"], ["no-such-command"], ["status", "--state", "none"]])
def test_a_command_says_the_same_and_ends_the_same_as_from_a_fresh_interpreter(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = run(AGENT, *words, cwd=tmp_path)
    monkeypatch.setattr(Forked, "enabled", False)
    assert (ours.returncode, ours.stdout, ours.stderr) == _of(run(AGENT, *words, cwd=tmp_path))


def _of(done: "subprocess.CompletedProcess[str]") -> tuple[int, str, str]:
    return done.returncode, done.stdout, done.stderr


def test_it_is_a_child_with_files_folder_environment_and_words_of_its_own(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [PYTHON, "-P", "-c", LOOK, "a word"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "WORD": "given"},
    )  # fmt: skip
    said, _ = process.communicate("typed", timeout=WAIT_S)
    assert said == f"{os.getpid()} {process.pid} {tmp_path} given ['a word'] ['a word'] typed\n"
    assert process.returncode == 0


def test_its_end_is_told() -> None:
    assert run(PYTHON, "-P", "-c", "import sys; sys.exit(7)").returncode == 7
    said = run(PYTHON, "-P", "-c", "import sys; sys.exit('a reason')")
    assert (said.returncode, said.stderr) == (1, "a reason\n")
    assert "ZeroDivisionError" in run(PYTHON, "-P", "-c", "1 / 0").stderr
    with subprocess.Popen([PYTHON, "-P", "-c", "import time; time.sleep(60)"]) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == -signal.SIGTERM


def test_what_it_registered_for_its_end_is_done_and_its_threads_are_waited_for() -> None:
    code = (
        "import atexit, threading; atexit.register(print, 'last'); go = threading.Event(); "
        "threading.Thread(target=lambda: (go.wait(), print('thread'))).start(); go.set()"
    )
    assert run(PYTHON, "-P", "-c", code).stdout.split() == ["thread", "last"]


def test_what_a_module_draws_for_its_process_is_drawn_anew() -> None:
    chance = re.compile(r"^(\w+)[^=\n]*= .*(urandom|secrets\.|uuid[14]\(|getpid|time\(\)|getrandbits)", re.MULTILINE)
    found = {
        ".".join(path.relative_to(ROOT / ("proto" if room == "proto/wardround" else "")).with_suffix("").parts): one[1]
        for room in ("proto/wardround", "coordinator", "site_agent", "fl_algorithms")
        for path in (ROOT / room).rglob("*.py")
        for one in chance.finditer(path.read_text())
    }
    assert found == DRAWN
    code = f"import {next(iter(DRAWN))} as client; print(client.INSTANCE.hex())"
    assert len({run(PYTHON, "-P", "-c", code).stdout for _ in range(2)}) == 2


@pytest.mark.parametrize(
    "line",
    [
        [sys.executable, "-c", "pass"],
        [sys.executable, "-m", "pytest"],
        ["/usr/bin/strace", AGENT],
        ["/elsewhere/site-agent"],
        AGENT,
    ],
)
def test_other_lines_get_a_fresh_interpreter(line: object) -> None:
    assert program_of(line) is None


def test_another_interpreter_is_wanted_where_its_variables_are_others(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('first')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert run(AGENT, "--version", env=environment).stdout.startswith("first\n")


@pytest.mark.fresh
def test_a_test_may_ask_for_fresh_interpreters() -> None:
    assert run(PYTHON, "-P", "-c", "import sys; print('wardround' in sys.modules)").stdout == "False\n"
