"""Our programs in processes of their own, without the seconds in which each would import its modules.

``install`` puts ``Forked`` in the place of ``subprocess.Popen``: a line that starts a program of ours is not given to a
fresh interpreter, but to a *nursery*, a process with one thread that has imported what our programs import; one has
torch too, for what trains. It makes the process as a sibling of its own (``CLONE_PARENT``), so that it is a child of
whoever asked, as it would be without: with its own process id, files, environment, words in ``/proc`` and end. A
service has a nursery of its own, from which its listener, the isolated worker and the lab come in the same way.

Not so: every other line; an environment that would make the interpreter another; a system that does not allow it; and
whatever a test marked ``fresh`` starts. What depends on a fresh interpreter (what is imported when, how soon help
answers, what a trainer can do before it is isolated) is tested there. The demo and the first round, which CI runs,
start nothing in this way.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NoReturn

PYTHON = sys.executable  # before any test
BIN = Path(PYTHON).parent
LAB, WORKER = "fl_algorithms.lab.cli", "site_agent.trainer.process"
SCRIPTS = {"coordinator": "coordinator.cli.main", "site-agent": "site_agent.cli.main", "fl-lab": LAB}
LEAVES = frozenset({LAB, WORKER, "fl_algorithms.methods.feddf.ensemble"})  # with torch, and no program of ours below
MODULES = LEAVES | {*SCRIPTS.values(), "tests.attacks.failing_disk", "tests.coordinator.crashing"}
PRELOADED = (
    *SCRIPTS.values(), "coordinator.administration", "coordinator.creation", "coordinator.backups",
    "coordinator.server", "site_agent.gateway.service", "site_agent.gateway.setup", "site_agent.gateway.enrolment",
    "site_agent.audit.verify", "site_agent.audit.report", "site_agent.trainer.listener",
)  # fmt: skip
WITH_TORCH = (  # the last is what torch imports, for a second, when it is made deterministic
    "site_agent.trainer.serving", "site_agent.trainer.requests", "site_agent.trainer.rounds.training",
    "fl_algorithms.lab.federation", "fl_algorithms.tasks.images.rows", "torch._inductor.config",
)  # fmt: skip
STARTING = frozenset({"serve", "run", "create", "data", "predict"})  # commands that start a worker or the lab
DRAWN = {"site_agent.gateway.connection.client": "INSTANCE"}  # 16 bytes that a module draws for its process
OF_THE_INTERPRETER = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "MALLOC_", "LC_", "LANG")
WORDS_ROOM = 4096  # for the words that /proc shows
CLONE_PARENT = 0x8000  # linux/sched.h
CLONE = {"x86_64": 56, "aarch64": 220}
ROOT = Path(__file__).resolve().parents[1]
HIDDEN: list[types.ModuleType] = []  # kept from its end, in a program that has no torch

Fresh = subprocess.Popen  # as it was before ``install``
_execute_child = inspect.signature(Fresh._execute_child)  # type: ignore[attr-defined]


def _interpreter(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(OF_THE_INTERPRETER)}


OURS = _interpreter(dict(os.environ))  # before any test


@dataclass(frozen=True)
class Program:
    """What a line would have a fresh interpreter run."""

    words: tuple[str, ...]  # as /proc shows them
    argv: tuple[str, ...]
    module: str = ""  # whose ``main`` it is; "": ``code``
    code: str = ""

    @property
    def package(self) -> str:
        return self.module.rpartition(".")[0] if "-m" in self.words[:3] else ""

    @property
    def leaf(self) -> bool:
        """Whether it has torch itself."""
        return not self.module or self.module in LEAVES

    @property
    def starts(self) -> bool:
        """Whether it starts what has torch."""
        return not self.leaf and not STARTING.isdisjoint(self.words) and "gateway" not in self.words


def program_of(line: object) -> Program | None:
    """The program of ours that a command line starts; None: something else."""
    if isinstance(line, str | bytes | os.PathLike) or not isinstance(line, Sequence):
        return None
    words = tuple(os.fsdecode(word) for word in line)
    script = Path(words[0])
    if script.parent == BIN and script.name in SCRIPTS:
        return Program((PYTHON, *words), words, SCRIPTS[script.name])
    match words:
        case [first, "-P", "-m", module, *given] | [first, "-m", module, *given] if (
            first == PYTHON and module in MODULES
        ):
            return Program(words, (str(find_spec(module).origin), *given), module)  # type: ignore[union-attr]
        case [first, "-P", "-c", code, *given] if first == PYTHON:  # with -P none but our own programs begin one
            return Program(words, ("-c", *given), code=code)
    return None


class Nursery:
    """The process that makes those of whoever holds this. It ends with its owner."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._turn = threading.Lock()

    @classmethod
    def started(cls, torch: bool) -> "Nursery":
        """Of this process, which may have threads: a fresh interpreter. It dies with the thread that calls this."""
        ours, theirs = socket.socketpair()
        with theirs:
            line = [
                PYTHON,
                "-m",
                "tests.forked",
                "." * WORDS_ROOM,
                str(theirs.fileno()),
                *(WITH_TORCH if torch else ()),
            ]
            process = Fresh(line, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, cwd=ROOT)

        def end() -> None:
            ours.close()
            process.wait(60)

        atexit.register(end)
        return cls(ours)

    @classmethod
    def forked(cls) -> "Nursery":
        """Of this process, which has one thread and has imported what is needed."""
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            _only(theirs.fileno())
            _show(["nursery"])
            serve(theirs)
        theirs.close()
        return cls(ours)

    def make(self, request: dict[str, Any], files: list[int]) -> int:
        """The id of a process that is a child of this one; 0: it cannot be had, as where a terminal's Ctrl-C has ended
        the nursery too.
        """
        text = json.dumps(request).encode()
        with self._turn, contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._connection, [len(text).to_bytes(4)], files)
            self._connection.sendall(text)
            return int.from_bytes(_exactly(self._connection, 4))
        return 0


class Forked(Fresh):  # type: ignore[type-arg]
    """A ``Popen`` that has our programs from a nursery."""

    nurseries: ClassVar[dict[bool, Nursery]] = {}  # of this process, by whether it has torch
    enabled = True
    begins = True  # a nursery where it has none

    def _execute_child(self, *given: Any, **named: Any) -> None:
        call = _execute_child.bind(self, *given, **named).arguments
        request = _request(call) if Forked.enabled else None
        nursery = _nursery(request["torch"]) if request is not None else None
        if request is not None and nursery is not None:
            ends = (("p2cread", 0), ("c2pwrite", 1), ("errwrite", 2))
            files = [call[name] if call[name] != -1 else number for name, number in ends]
            pid = nursery.make(request, [*files, *call["pass_fds"]])
            if pid:
                self.pid = pid
                self._child_created = True
                pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
                self._close_pipe_fds(*(call[name] for name in pipes))  # type: ignore[attr-defined]
                return
        super()._execute_child(*given, **named)  # type: ignore[misc]


def install() -> None:
    """From now on, in this process."""
    if platform.machine() in CLONE:
        subprocess.Popen = Forked  # type: ignore[misc]


def _request(call: dict[str, Any]) -> dict[str, Any] | None:
    """What a nursery must know; None where it cannot do what is asked."""
    program = program_of(call["args"])
    environment = dict(os.environ if call["env"] is None else call["env"])
    before = call["preexec_fn"]
    usual = {"shell": False, "executable": None, "uid": None, "gid": None, "gids": None, "umask": -1}
    unusual = any(call.get(name, value) != value for name, value in usual.items())
    if program is None or unusual or _interpreter(environment) != OURS or (call.get("process_group") or -1) != -1:
        return None
    return {
        "program": asdict(program), "torch": program.leaf or program.starts, "environment": environment,
        "folder": os.fspath(call["cwd"] or Path.cwd()), "session": bool(call["start_new_session"]),
        "before": None if before is None else [before.__module__, before.__qualname__],
        "numbers": [0, 1, 2, *call["pass_fds"]],
    }  # fmt: skip


def _nursery(torch: bool) -> Nursery | None:
    """This process's, begun at the first call by the main thread: what it makes may die with that thread."""
    found = Forked.nurseries
    if Forked.begins and torch not in found and threading.current_thread() is threading.main_thread():
        found[torch] = Nursery.started(torch)
    return found.get(torch)


def serve(connection: socket.socket) -> NoReturn:
    """Make a process for each request, until nobody can ask any more."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as in a process that has begun no Python yet
    while True:
        try:
            head, files, _, _ = socket.recv_fds(connection, 4, 64)
            request = json.loads(_exactly(connection, int.from_bytes(head + _exactly(connection, 4 - len(head)))))
        except (EOFError, ConnectionResetError):
            os._exit(0)
        process = _clone()
        if process == 0:
            connection.close()
            _become(request, files)
        for file in files:
            os.close(file)
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(max(0, process).to_bytes(4))


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Raises EOFError: whoever sends it is gone."""
    found = b""
    while len(found) < count:
        piece = connection.recv(count - len(found))
        if not piece and count:
            raise EOFError
        found += piece
    return found


def _clone() -> int:
    """As ``os.fork``, but what it makes is a child of this process's parent. Negative: the system refuses."""
    python, kernel = ctypes.pythonapi, ctypes.PyDLL(None).syscall  # which does not let go of the interpreter's lock
    python.PyOS_BeforeFork()
    process = int(kernel(CLONE[platform.machine()], CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if process == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return process


def _only(kept: int) -> None:
    """Let go of every file but this one, for nobody must wait for the end of a pipe that this process holds."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    for number in {int(entry.name) for entry in Path("/proc/self/fd").iterdir()} - {0, 1, 2, kept}:
        with contextlib.suppress(OSError):  # that of the listing itself
            os.close(number)


def _become(request: dict[str, Any], files: list[int]) -> NoReturn:
    """Be the program, to its end."""
    program = Program(**request["program"])
    code = 255
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if request["session"]:
            os.setsid()
        _take(files, request["numbers"])
        if program.starts:
            Forked.nurseries = dict.fromkeys((True, False), Nursery.forked())
            HIDDEN.append(sys.modules.pop("torch"))
            install()
        Forked.begins = False
        for module, name in DRAWN.items():
            setattr(sys.modules[module], name, os.urandom(16))
        os.environ.clear()
        os.environ.update(request["environment"])
        time.tzset()
        os.chdir(request["folder"])
        _show(program.words)
        sys.modules["__main__"] = main = types.ModuleType(
            "__main__"
        )  # not this one, by which a usage line would name it
        main.__package__ = program.package
        sys.argv = list(program.argv)
        sys.orig_argv = list(program.words)
        if request["before"] is not None:
            module, name = request["before"]
            getattr(importlib.import_module(module), name)()
        code = _ended(_main(program))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _take(files: list[int], numbers: list[int]) -> None:
    """Have each file under the number that it has in the process that asked."""
    beyond = max([*files, *numbers]) + 1
    for file, number in zip([os.dup2(file, beyond + index) for index, file in enumerate(files)], numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    for file in set(files) - set(numbers):
        os.close(file)
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        before = getattr(sys, name)
        lines = 1 if number == 2 or os.isatty(number) else -1
        stream = os.fdopen(number, mode, lines, encoding=before.encoding, errors=before.errors, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _show(words: Sequence[str]) -> None:
    """Have /proc show the program's own words in place of those that the first of these processes was started with."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    shown = b"\0".join(word.encode() for word in words)[: end - start - 1]
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def _main(program: Program) -> Callable[[], object]:
    if program.module:
        main: Callable[[], object] = importlib.import_module(program.module).main
        return main
    return lambda: exec(program.code, {"__name__": "__main__"})


def _ended(main: Callable[[], object]) -> int:
    """Run it, and then what an interpreter does at its end. The exit code."""
    code: object = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
    return (code or 0) & 0xFF


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    child = os.fork()  # before which a library ends threads that it began when it was imported; ``_clone`` asks nobody
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert len(os.listdir("/proc/self/task")) == 1, "something that is imported begins a thread"  # noqa: PTH208
    gc.collect()
    gc.freeze()  # what is never looked at again is never written to, and so stays shared


if __name__ == "__main__":
    from tests import forked  # not this copy of it

    forked._import([*PRELOADED, *sys.argv[3:]])
    forked.serve(socket.socket(fileno=int(sys.argv[2])))
