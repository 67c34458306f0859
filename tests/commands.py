"""Our commands in processes of their own, without the half second in which each would import its modules.

``run`` gives what ``subprocess.run`` gives. Behind it stands one process for each pytest worker that has imported the
commands and forks for each: the command has its own process id, files, environment and end. What a fresh
interpreter would do otherwise (imports, how soon help answers) is tested with ``subprocess`` itself.
"""

import atexit
import importlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NoReturn

MAINS = {"coordinator": "coordinator.cli.main", "site-agent": "site_agent.cli.main"}
PRELOADED = (
    *MAINS.values(), "coordinator.administration", "coordinator.creation", "coordinator.backups",
    "site_agent.gateway.setup", "site_agent.gateway.enrolment", "site_agent.audit.verify", "site_agent.audit.report",
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[1]
PYTHONPATH = os.environ.get("PYTHONPATH")  # before any test


def run(
    program: str, *line: str | Path, stdin: str = "", timeout: float = 60, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command of ours to its end.

    Args:
        program: "coordinator" or "site-agent".
        timeout: in seconds; then it is killed.
        env: its whole environment; this process's without.

    Raises:
        subprocess.TimeoutExpired: it did not end in time.
    """
    words = [program, *map(str, line)]
    environment = dict(os.environ if env is None else env)
    if environment.get("PYTHONPATH") != PYTHONPATH:  # other modules than those that were imported
        return subprocess.run(
            [sys.executable, "-m", MAINS[program], *words[1:]], input=stdin, capture_output=True, text=True,
            timeout=timeout, env=environment, check=False,
        )  # fmt: skip
    request = json.dumps({"line": words, "env": environment, "cwd": str(Path.cwd())})
    with (
        tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking,
    ):  # fmt: skip
        given.write(stdin.encode())
        given.seek(0)
        asking.connect(_server())
        asking.settimeout(timeout)
        socket.send_fds(asking, [b"\0"], [given.fileno(), out.fileno(), errors.fileno()])
        asking.sendall(request.encode() + b"\n")
        with asking.makefile() as answers:
            process = int(answers.readline())
            try:
                code = int(answers.readline())
            except TimeoutError:
                os.kill(process, signal.SIGKILL)
                raise subprocess.TimeoutExpired(words, timeout) from None
        printed = []
        for file in (out, errors):
            file.seek(0)
            printed.append(io.TextIOWrapper(io.BytesIO(file.read()), encoding="utf-8").read())
    return subprocess.CompletedProcess(words, code, *printed)


@cache
def _server() -> str:
    """The address of this worker's server, which ends with it."""
    address = str(Path(tempfile.mkdtemp(prefix="wardround-commands-")) / "socket")
    theirs, ours = socket.socketpair()
    line = [sys.executable, "-m", "tests.commands", address]
    process = subprocess.Popen(line, stdin=theirs, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    theirs.close()
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.stdout.close()

    def end() -> None:
        ours.close()
        process.wait(60)

    atexit.register(end)
    return address


def serve(address: str) -> None:
    for module in PRELOADED:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(address)
        listening.listen(64)
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([listening, sys.stdin], [], [])
            if sys.stdin in ready:  # whoever began this has ended
                Path(address).unlink()
                Path(address).parent.rmdir()
                return
            asking, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                _answer(asking)
            asking.close()


def _answer(asking: socket.socket) -> NoReturn:
    """Run one command in a child, and say its process id and then its code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, files, _, _ = socket.recv_fds(asking, 1, 3)
    with asking.makefile() as lines:
        request = json.loads(lines.readline())
    process = os.fork()
    if process == 0:
        asking.close()
        _become(request["line"], request["env"], request["cwd"], files)
    asking.sendall(f"{process}\n".encode())
    _, status = os.waitpid(process, 0)
    asking.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _become(line: list[str], environment: dict[str, str], folder: str, files: list[int]) -> NoReturn:
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = line
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, buffering, encoding="utf-8", closefd=False)
        for number, mode, buffering in ((0, "r", -1), (1, "w", -1), (2, "w", 1))
    )
    code: object = 70
    try:
        importlib.import_module(MAINS[line[0]]).main()
        code = 0
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    serve(sys.argv[1])
