"""A trainer whose code was taken over: attacks that run inside the isolated process, and what is around it."""

import os
import pty
import select
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tools.world import free_port

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60

# As on a system without user namespaces, whose kernel has no Landlock: seccomp is all there is.
SECCOMP_ALONE = """
from site_agent.trainer.isolation import kernel
kernel._enter_own_namespace = kernel._without_interfaces = lambda: False
kernel._restrict_scopes = lambda: 0
kernel.isolate()
"""


def inside(script: str, *words: object, before: str = SECCOMP_ALONE) -> str:
    """What ``script`` prints in an isolated child of this process; ``words`` are its arguments."""
    line = [sys.executable, "-P", "-c", before + textwrap.dedent(script), *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=WAIT_S, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def taken_over(folder: Path, act: str) -> dict[str, str]:
    """An environment in which each worker of the trainer does ``act`` once it is isolated, and then goes on."""
    folder.mkdir(exist_ok=True)
    # .pth lines and sitecustomize are the only code that runs in it before its own
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'site_agent.trainer.process' in ' '.join(sys.orig_argv):\n"
        "    from site_agent.trainer.isolation import kernel\n"
        "    honest = kernel.die_with_parent\n"
        "    def evil(*words):\n"
        "        honest(*words)\n" + textwrap.indent(textwrap.dedent(act), " " * 8) + "\n"
        "    kernel.die_with_parent = evil\n"
    )
    return {**os.environ, "PYTHONPATH": str(folder)}


def on_a_terminal(line: list[str], environment: dict[str, str] | None = None, typed: bytes = b"") -> tuple[bytes, int]:
    """Run a command on a terminal of its own. Every byte that the terminal got, echoed ones too, and the exit code."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.execve(line[0], line, environment or dict(os.environ))
    shown = b""
    if typed:
        os.write(terminal, typed)
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        try:
            piece = os.read(terminal, 65536) if ready else b""
        except OSError:  # EIO: the last process has closed it
            break
        if not piece:
            break
        shown += piece
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    return shown, os.waitstatus_to_exitcode(status)


@dataclass
class CommonUser:
    """A user of this machine without rights, and programs of ours that run as that user."""

    folder: Path
    become: list[str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def run(self, *words: str, stdin: str = "") -> str:
        done = subprocess.run(
            [*self.become, *words], input=stdin, capture_output=True, text=True, timeout=WAIT_S, check=False, cwd="/"
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def can_open(self, path: str) -> bool:
        line = [*self.become, sys.executable, "-c", "import sys; open(sys.argv[1], 'rb').close()", path]
        return subprocess.run(line, capture_output=True, timeout=WAIT_S, check=False, cwd="/").returncode == 0

    def start(self, program: str) -> subprocess.Popen[str]:
        """Start a service and return when it is ready."""
        coordinator, site = str(self.folder / "coordinator"), str(self.folder / "site")
        if program != "sleep" and not Path(coordinator).exists():
            address = f"127.0.0.1:{free_port()}"
            self.run(command("coordinator"), "init", "--state", coordinator, "--federation", "f", "--address", address)
        lines = {
            "coordinator": [command("coordinator"), "serve", "--state", coordinator],
            "gateway": [command("site-agent"), "run", "--only", "gateway", "--state", site],
            "listener": [command("site-agent"), "run", "--only", "trainer", "--state", site],
            "sleep": ["sh", "-c", "echo ready; exec sleep 60"],
        }
        if program == "gateway":
            self.start("coordinator")
            invitation = self.run(command("coordinator"), "invite", "st-olav", "--state", coordinator)
            self.run(command("site-agent"), "join", "--invitation", "-", "--state", site, stdin=invitation)
        if program == "listener":
            self.run("mkdir", site)
        process = subprocess.Popen([*self.become, *lines[program]], stdout=subprocess.PIPE, text=True, cwd="/")
        self.started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready")
        return process


def command(name: str) -> str:
    return str(Path(sys.executable).parent / name)


@contextmanager
def as_common_user(folder: Path) -> Iterator[CommonUser]:
    """Whoever runs the tests, if that is not root; else a user by number, in a folder that is open to it."""
    place: Path | None = None
    if os.geteuid() != 0:
        user = CommonUser(folder, [])
    elif not all(map(shutil.which, ("unshare", "setpriv"))):
        pytest.skip("only root can become a common user, with unshare and setpriv")
    else:
        from tests.deploy.test_two_users import User

        place = Path(tempfile.mkdtemp(prefix="wardround-"))  # pytest's own are for the user that runs it alone
        place.chmod(0o755)
        home = place / "home"
        home.mkdir()
        os.chown(home, 4711, 4711)
        user = CommonUser(home, User(4711, 4711).command())
    try:
        yield user
    finally:
        for process in reversed(user.started):
            process.terminate()
            process.wait(WAIT_S)
            if process.stdout is not None:
                process.stdout.close()
        if place is not None:
            shutil.rmtree(place)
