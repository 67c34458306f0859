"""The page that shows an auditor how a changed byte is found: its commands, as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.evidence_tamper import Made

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tampering.md"


@pytest.fixture
def shell(tmp_path: Path) -> "Shell":
    return Shell(tmp_path)


class Shell:
    """Runs the page's blocks one after another, with a site's state directory and a copy of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        Made(20).write(folder / "site" / "ledger")
        programs = folder / "bin"
        programs.mkdir()
        for name, line in (("site-agent", "-m site_agent.cli.main"), ("python", "")):
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {line} "$@"\n')
            (programs / name).chmod(0o755)
        state = {"WARDROUND_STATE": str(folder / "site"), "PATH": f"{programs}:{os.environ['PATH']}"}
        self._environment = {**os.environ, **state}

    def run(self, block: str) -> list[tuple[int, str]]:
        """The exit code and the output of each command."""
        done = []
        for line in block.strip().splitlines():
            command = line.replace("/tmp/copy", str(self._folder / "copy"))
            ran = subprocess.run(command, shell=True, cwd=ROOT, env=self._environment, capture_output=True, text=True)
            assert ran.stderr == ""
            done.append((ran.returncode, ran.stdout))
        return done


def test_every_command_of_the_page_does_what_the_page_says(shell: Shell) -> None:
    first, edit, found, cut, both = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    whole = shell.run(first)
    assert [code for code, _ in whole] == [0, 4, 4]
    assert whole[1][1].startswith("consistent; completeness NOT SHOWN: site st-olav of f, 2026-01-01 00:00:00 UTC to ")
    assert shell.run(edit) == [(0, "")]
    (one, said), (two, also) = shell.run(found)
    assert (one, two) == (1, 1)
    assert said.startswith("CHANGED: ")
    assert "line 3 names" in said
    assert "What it says from line 2 on is not known to be true" in said
    assert also.startswith("TAMPERED: copy line 2 ")
    (one, said), (two, also) = shell.run(cut)[2:]
    assert (one, two) == (1, 1)
    assert "the ledger has 19 lines, a signed head covers 20" in said
    assert also.startswith("TAMPERED: copy line 20 is missing: a signed head covers 20 lines")
    (one, said), (two, also) = shell.run(both)[3:]
    assert (one, two) == (4, 4)
    assert "consistent: yes: 7 lines" in said
    assert also.endswith("CONSISTENT, COMPLETENESS NOT SHOWN\n")
