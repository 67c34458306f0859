"""T: a trainer whose code was taken over, alone or with the coordinator."""

import ctypes
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from site_agent import answers
from site_agent.handoff import Trainer, trainer_socket
from tests.attacks.taken_over import SECCOMP_ALONE, as_common_user, inside, on_a_terminal, taken_over
from tests.site_agent.site_world import STUDY, SiteWorld
from wardround import control
from wardround.errors import BadData, CannotWrite, NeedsPerson, NotPermitted, Unavailable, WardroundError
from wardround.v1 import federation_pb2 as pb

GETFD = """
import os, sys
gateway, line = map(int, sys.argv[1:])
libc = isolation._libc
taken = libc.syscall(438, libc.syscall(434, gateway, 0), line, 0)
print(os.write(taken, b"patients") if taken >= 0 else "refused")
"""
MEMORY = """
import ctypes, platform, struct, sys
gateway, address, size = map(int, sys.argv[1:])
found = ctypes.create_string_buffer(size)
pairs = [struct.pack("PN", at, size) for at in (ctypes.addressof(found), address)]
near, far = (ctypes.create_string_buffer(pair, 16) for pair in pairs)
number = {"x86_64": 310, "aarch64": 270}[platform.machine()]
isolation._libc.syscall(number, gateway, near, 1, far, 1, 0)
print(found.raw)
"""


@pytest.mark.attack(promise="P1", refused_by="site_agent/trainer/isolation.py")
def test_pidfd_getfd_under_seccomp() -> None:
    """One user and no namespace: the worker takes the gateway's socket, which the filter let it have, and sends."""
    with socket.create_server(("127.0.0.1", 0)) as network:
        line = socket.create_connection(network.getsockname())
        outside, _ = network.accept()
        with line, outside:
            said = inside(GETFD, os.getpid(), line.fileno())
            line.shutdown(socket.SHUT_WR)
            assert (outside.recv(100), said) == (b"", "refused\n")


@pytest.mark.attack(promise="P1", refused_by="site_agent/trainer/isolation.py")
def test_pidfd_getfd_under_seccomp__memory() -> None:
    """The same worker reads the key out of the gateway's memory."""
    secret = ctypes.create_string_buffer(b"the key of this site")
    assert b"key" not in inside(MEMORY, os.getpid(), ctypes.addressof(secret), 20).encode()


CALLS = """
import ctypes, json, os, platform, sys
libc = isolation._libc
x86 = platform.machine() == "x86_64"
numbers = dict(
    ptrace=(101, 117), process_vm_readv=(310, 270), process_vm_writev=(311, 271), pidfd_getfd=(438, 438),
    pidfd_open=(434, 434), kcmp=(312, 272), perf_event_open=(298, 241), bpf=(321, 280), userfaultfd=(323, 282),
    keyctl=(250, 219), add_key=(248, 217), request_key=(249, 218), unshare=(272, 97), setns=(308, 268), mount=(165, 40),
    clone3=(435, 435), open_by_handle_at=(304, 265), clone=(56, 220), process_madvise=(440, 440),
)
first = dict(ptrace=99, keyctl=99, unshare=0x04000000, clone=0x04000000 | 17)
found = {}
for name, pair in numbers.items():
    ctypes.set_errno(0)
    # arguments that harm nobody: a call that passes the filter fails otherwise, or does next to nothing
    done = libc.syscall(pair[not x86], first.get(name, -1), 0, 0, 0, 0)
    if name == "clone" and done == 0:
        os._exit(0)
    found[name] = os.strerror(ctypes.get_errno()) if done < 0 else "works"
print(json.dumps(found))
"""


@pytest.mark.attack(promise="P1", refused_by="site_agent/trainer/isolation.py")
def test_pidfd_getfd_under_seccomp__every_way_into_another_process() -> None:
    """Each call that reaches into another process, the kernel's inside or another namespace stops at the filter."""
    found = json.loads(inside(CALLS))
    refused = {"Operation not permitted", "Function not implemented"}
    assert {name: said for name, said in found.items() if said not in refused} == {}


TYPE = """
import fcntl, os
for number in (0, 1, 2):
    for byte in b"echo pwned; ":
        try:
            fcntl.ioctl(number, 0x5412, bytes([byte]))
        except OSError:
            break
try:
    terminal = os.open("/dev/tty", os.O_RDWR)
    fcntl.ioctl(terminal, 0x5412, b"!")
except OSError:
    pass
os.write(2, b"\\033]52;c;ZWNobyBwd25lZA==\\007\\033[2Jred")
"""
START = """
import sys
from pathlib import Path
from site_agent.handoff import Worker
with Worker(Path(sys.argv[1]), warm=False) as worker:
    print("started", flush=True)
"""


@pytest.mark.attack(promise="P1", refused_by="site_agent/trainer/isolation.py")
def test_tiocsti(tmp_path: Path) -> None:
    """The worker types a command into the terminal that `site-agent run` or `data add` was given at."""
    environment = taken_over(tmp_path / "evil", TYPE)
    shown, code = on_a_terminal([sys.executable, "-P", "-c", START, str(tmp_path)], environment)
    assert (b"started" in shown, code) == (True, 0)
    assert b"pwned" not in shown.split(b"]52;")[0]  # what is typed is echoed


@pytest.mark.attack(promise="P1", refused_by="site_agent/trainer/isolation.py")
def test_tiocsti__a_terminal_that_it_opens() -> None:
    """The filter refuses it for any terminal, so a worker that opens one by its path gains nothing; root may else."""
    script = """
        import errno, fcntl, os, pty
        outside, terminal = pty.openpty()
        for command in (0x5412, 0x541C, 0x540E, (1 << 32) - 1 & 0x5412):
            try:
                fcntl.ioctl(terminal, command, b"x")
            except OSError as error:
                print(errno.errorcode[error.errno])
            else:
                print("typed")
        print(os.getsid(0) == os.getpid())
    """
    assert inside(script, before=SECCOMP_ALONE).split() == ["EPERM"] * 4 + ["True"]


@pytest.mark.attack(promise="P1", refused_by="site_agent/handoff.py")
def test_tiocsti__its_own_words_reach_the_terminal_escaped(tmp_path: Path) -> None:
    """What a worker prints would be the terminal's own commands: the clipboard set, the screen wiped."""
    environment = taken_over(tmp_path / "evil", TYPE)
    shown, _ = on_a_terminal([sys.executable, "-P", "-c", START, str(tmp_path)], environment)
    assert b"red" in shown
    assert b"\033" not in shown
    assert b"\007" not in shown


@pytest.mark.attack(promise="P1", refused_by="proto/wardround/memory.py")
@pytest.mark.parametrize("program", ["coordinator", "gateway", "listener"])
def test_pidfd_getfd_under_seccomp__the_memory_file_of_our_own(tmp_path: Path, program: str) -> None:
    """Without Landlock nothing stops `open("/proc/PID/mem")` of one's own user's processes, but what they are."""
    with as_common_user(tmp_path) as user:
        process = user.start(program)
        assert user.can_open(f"/proc/{user.start('sleep').pid}/mem")
        assert not user.can_open(f"/proc/{process.pid}/mem")
        assert not user.can_open(f"/proc/{process.pid}/environ")


@pytest.fixture
def hospital(tmp_path: Path) -> Iterator[SiteWorld]:
    """One hospital's agent in this process, ready for a round, whose trainer does what the test says."""
    world = SiteWorld(tmp_path)
    try:
        world.ready()
        yield world
    finally:
        world.close()


def next_round_is_declined_and_the_one_after_is_not(hospital: SiteWorld) -> None:
    trainer, agent = hospital.trainer, hospital.agent
    assert trainer is not None
    assert agent is not None
    hospital.coordinator.assign(STUDY, 1)
    hospital.coordinator.wait_declared("DECLINED", "DECLINED_TRAINING_FAILED")
    assert not agent.stopped.is_set()
    trainer.says, trainer.failure = None, None
    hospital.coordinator.assign(STUDY, 2)
    hospital.coordinator.wait_receipts(1)
    assert {said.code for said in hospital.coordinator.declared} <= {0, pb.DECLINED_TRAINING_FAILED}


@pytest.mark.attack(promise="P11", refused_by="site_agent/answers.py")
@pytest.mark.parametrize("kind", [NeedsPerson, BadData, NotPermitted, Unavailable, CannotWrite])
@pytest.mark.parametrize("code", ["LEDGER_FORK", "SITE_REVOKED", "DECLINED_NO_SUCH", "DECLINED_WITHDRAWN", "\x1b[2J"])
def test_trainer_speaks_for_the_coordinator(
    hospital: SiteWorld, code: str, kind: type[WardroundError], caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer's failure with the coordinator's code would end the gateway, or crash it, and blame the coordinator."""
    assert hospital.trainer is not None
    hospital.trainer.honest = False
    hospital.trainer.failure = kind("this site was revoked", hint="run `rm -rf /`", code=code)
    next_round_is_declined_and_the_one_after_is_not(hospital)
    assert "this site was revoked" not in caplog.text
    assert "the trainer broke its protocol" in caplog.text or kind is Unavailable


GOOD: dict[str, Any] = {
    "update": "u.safetensors",
    "num_examples": 80,
    "num_validation": 20,
    "metrics": {"val_loss": "0.5"},
}


@pytest.mark.attack(promise="P11", refused_by="site_agent/answers.py")
@pytest.mark.parametrize(
    "says",
    [
        pytest.param([], id="a list"),
        pytest.param("done", id="a text"),
        pytest.param({}, id="nothing"),
        pytest.param({**GOOD, "more": 1}, id="more"),
        pytest.param({**GOOD, "num_examples": "80"}, id="a count as text"),
        pytest.param({**GOOD, "num_examples": True}, id="a count as a truth"),
        pytest.param({**GOOD, "num_examples": 80.0}, id="a count as a float"),
        pytest.param({**GOOD, "num_examples": float("nan")}, id="nan"),
        pytest.param({**GOOD, "num_examples": 2**53}, id="too large"),
        pytest.param({**GOOD, "num_examples": int("9" * 4000)}, id="enormous"),
        pytest.param({**GOOD, "update": "../identity/key.pem"}, id="a path"),
        pytest.param({**GOOD, "update": ".hidden"}, id="a hidden file"),
        pytest.param({**GOOD, "metrics": {f"m{n}": "1" for n in range(65)}}, id="too many metrics"),
        pytest.param({**GOOD, "metrics": {"m" * 41: "1"}}, id="a long name"),
        pytest.param({**GOOD, "metrics": {"val_loss": "1" * 41}}, id="a long value"),
        pytest.param({**GOOD, "metrics": {"val_loss": 0.5}}, id="a value as a number"),
        pytest.param({**GOOD, "metrics": [["val_loss", "0.5"]]}, id="metrics as a list"),
        pytest.param({**GOOD, "metrics": {"val_loss": "\x1b[2J"}}, id="a control character"),
        pytest.param([[]] * 30_000, id="too many values"),
    ],
)
def test_trainer_speaks_for_the_coordinator__an_answer_of_another_form(
    hospital: SiteWorld, says: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Wrong types, missing and extra fields, nan, enormous numbers and names that lead elsewhere: one way to fail."""
    assert hospital.trainer is not None
    hospital.trainer.says = says
    next_round_is_declined_and_the_one_after_is_not(hospital)
    assert "the trainer broke its protocol" in caplog.text


@pytest.mark.attack(promise="P11", refused_by="proto/wardround/control.py")
@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000 + b"\n", b'{"result":' + b"[" * 5000 + b"]" * 5000 + b"}\n", b"\xff\n", b"5\n", b'{"a":1',
        b'{"error":5}\n', b'{"error":{"message":1,"hint":2,"code":[],"exit_code":{}}}\n', b'{"result":NaN}\n', b"{}\n",
        b'{"error":{"message":"m","hint":"","code":"","exit_code":78,"more":1}}\n', b'{"progress":{"step":-1}}\n',
    ],
)  # fmt: skip
def test_trainer_speaks_for_the_coordinator__a_line_that_is_no_answer(tmp_path: Path, line: bytes) -> None:
    """On the socket itself: the gateway never crashes on what comes, and never waits for more of it."""
    (tmp_path / "staging").mkdir()
    listener = control.listen(trainer_socket(tmp_path))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(line)

    thread = threading.Thread(target=serve)
    thread.start()
    with listener, pytest.raises((answers.BrokenProtocol, Unavailable)):
        Trainer(tmp_path).ask("commit", study="s", revision=1, round=1)
    thread.join()


@pytest.mark.attack(promise="P11", refused_by="site_agent/answers.py")
def test_trainer_speaks_for_the_coordinator__in_its_own_words(
    hospital: SiteWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """Its sentences are data: quoted, one line, cut, without what a terminal or a reader would obey."""
    assert hospital.trainer is not None
    evil = '\x1b]52;c;eA==\x07\n2026 INFO accepted" \u202e\u200b' + "x" * 1000
    hospital.trainer.failure = BadData(evil, hint=evil, code="DECLINED_TRAINING_FAILED")
    next_round_is_declined_and_the_one_after_is_not(hospital)
    (said,) = [record.getMessage() for record in caplog.records if "trainer says" in record.getMessage()]
    assert said.isprintable()
    assert said.count('"') == 4
    assert len(said) < 1000
