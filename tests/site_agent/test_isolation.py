"""The process that reads patients has no network: each way out is tried from inside."""

import json
import os
import platform
import re
import select
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from site_agent.cli import status
from site_agent.doctor.trainer import MEASURES
from site_agent.gateway.status import SiteStatus, Users
from site_agent.trainer.isolation import kernel, seccomp

WAYS_OUT = """
import errno, json, os, socket, sys
from site_agent.trainer.isolation import kernel

{before}
in_force = kernel.isolate()
found = {{"isolation": in_force.kind, "missing": in_force.missing}}

def tried(act):
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "works"

def unix(path):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)

found["tcp"] = tried(lambda: socket.create_connection(("127.0.0.1", {port}), timeout=5))
found["tcp6"] = tried(lambda: socket.socket(socket.AF_INET6, socket.SOCK_STREAM))
found["udp"] = tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", {port})))
found["raw"] = tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))
found["packet"] = tried(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
found["netlink"] = tried(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
found["vsock"] = tried(lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM))
found["abstract"] = tried(lambda: unix("\\0{abstract}"))
found["path"] = tried(lambda: unix("{path}"))
found["setns"] = tried(lambda: kernel._check(kernel._libc.setns(os.open("/proc/self/ns/net", os.O_RDONLY), 0)))
found["io_uring"] = tried(lambda: kernel._check(0 if kernel._libc.syscall(425, 1, None) == 0 else 1))
import subprocess
child = "import socket; socket.socket(socket.AF_INET)"
found["child"] = subprocess.run([sys.executable, "-c", child], stderr=subprocess.DEVNULL).returncode
import resource
found["core"] = resource.getrlimit(resource.RLIMIT_CORE)[0]
{after}
print(json.dumps(found))
"""
WITHOUT_NAMESPACE = "kernel._enter_own_namespace = kernel._without_interfaces = lambda: False"
WITHOUT_ANYTHING = WITHOUT_NAMESPACE + "\nkernel._forbid_calls = lambda: False"
TRAIN = """
import torch
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    (weight * weight).sum().backward()
    optimizer.step()
found["trained"] = weight[0].item()
"""


def child(tmp_path: Path, *, before: str = "", after: str = "") -> dict[str, Any]:
    """Isolate a child and let it try every way out, with someone listening at the end of each."""
    path, abstract = str(tmp_path / "s"), f"wardround-test-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as unnamed,
    ):
        named.bind(path)
        named.listen()
        unnamed.bind("\0" + abstract)
        unnamed.listen()
        script = WAYS_OUT.format(before=before, after=after, port=tcp.getsockname()[1], abstract=abstract, path=path)
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path
        )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def assert_no_way_out(found: dict[str, Any]) -> None:
    for way in ("tcp", "tcp6", "udp", "raw", "packet", "netlink", "vsock", "setns"):
        assert found[way] != "works", way
    assert found["io_uring"] != "works"
    assert found["child"] != 0
    assert found["core"] == 0
    assert found["path"] == "works"


def test_isolated_child_has_no_way_out_but_a_unix_socket_with_a_path(tmp_path: Path) -> None:
    found = child(tmp_path)
    assert found["isolation"] in (kernel.NETWORK_NAMESPACE, kernel.SECCOMP)
    assert_no_way_out(found)
    if found["isolation"] == kernel.NETWORK_NAMESPACE:
        assert found["abstract"] != "works"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no table of its system calls")
def test_seccomp_alone_has_no_way_out_where_namespaces_are_forbidden(tmp_path: Path) -> None:
    found = child(tmp_path, before=WITHOUT_NAMESPACE)
    assert found["isolation"] == kernel.SECCOMP
    assert_no_way_out(found)


def test_process_that_can_have_neither_says_so(tmp_path: Path) -> None:
    assert child(tmp_path, before=WITHOUT_ANYTHING)["isolation"] == kernel.NONE


def test_torch_trains_inside(tmp_path: Path) -> None:
    found = child(tmp_path, after=TRAIN)
    assert found["trained"] == pytest.approx(0.8**3)  # each step takes a fifth: w - 0.1 * 2 w
    assert_no_way_out(found)


def test_namespace_given_by_the_service_manager_is_recognised(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        from site_agent.trainer.isolation import kernel
        if not kernel._enter_own_namespace():
            print("forbidden")
        else:
            kernel._enter_own_namespace = lambda: False
            print(kernel.isolate().kind)
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    if done.stdout.strip() == "forbidden":
        pytest.skip("this system allows no network namespace")
    assert done.stdout.strip() == kernel.NETWORK_NAMESPACE


@pytest.mark.parametrize(
    ("interfaces", "alone"),
    [
        pytest.param(["lo"], True, id="PrivateNetwork or network_mode: none"),
        pytest.param(["lo", "sit0", "ip6tnl0"], True, id="tunnels that are always there"),
        pytest.param(["lo", "eth0"], False, id="a network"),
        pytest.param(["tailscale0"], False, id="a tunnel of someone's"),
    ],
)
def test_namespace_without_interfaces_is_told_from_one_with(tmp_path: Path, interfaces: list[str], alone: bool) -> None:
    listing = tmp_path / "dev"
    listing.write_text("Inter-| Receive\n face |bytes\n" + "".join(f"{name:>6}: 0 0\n" for name in interfaces))
    assert kernel._without_interfaces(listing) is alone


def test_other_processes_of_the_user_cannot_read_its_memory(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may")
    script = "from site_agent.trainer.isolation import kernel; kernel.isolate(); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(PermissionError):
            Path(f"/proc/{process.pid}/environ").read_bytes()
        process.communicate("\n", timeout=30)


def verdict(machine: str, number: int, arguments: tuple[int, int] = (0, 0), arch: int | None = None) -> int:
    words = {0: number, 4: seccomp.ARCHITECTURES[machine] if arch is None else arch, 16: arguments[0], 24: arguments[1]}
    return interpret(seccomp.program(machine), words)


@pytest.mark.parametrize("machine", seccomp.MACHINES)
def test_filter_refuses_what_its_table_says_and_nothing_else(machine: str) -> None:
    """A slow reading of the program, instruction by instruction, as the kernel's documentation describes them."""
    allow, eperm, enosys = 0x7FFF0000, 0x00050001, 0x00050026
    socket_call, clone, ioctl = seccomp.SOCKET[machine], seccomp.CLONE[machine], seccomp.IOCTL[machine]
    for family in range(64):
        assert verdict(machine, socket_call, (family, 0)) == (allow if family == socket.AF_UNIX else eperm)
    for bit in range(32):
        made = verdict(machine, clone, (1 << bit | 17, 0))
        assert made == (eperm if 1 << bit & seccomp.NEW_NAMESPACES else allow), bit
    assert {verdict(machine, ioctl, (0, command)) for command in (0x5412, 0x541C, 0x540E)} == {eperm}
    assert {verdict(machine, ioctl, (0, command)) for command in (0, 0x5401, 0x5411, 0x5413)} == {allow}
    refused = {pair[seccomp.MACHINES.index(machine)] for pair in seccomp.REFUSED.values()}
    assert {verdict(machine, number) for number in refused} == {eperm}
    assert {verdict(machine, number) for number in (425, 426, 427, 435)} == {enosys}
    assert verdict(machine, socket_call, (socket.AF_UNIX, 0), arch=0x40000003) == eperm  # i386 on x86_64
    assert verdict(machine, 0x40000000 | socket_call, (socket.AF_UNIX, 0)) == eperm
    others = set(range(500)) - refused - {socket_call, 425, 426, 427, 435}
    assert {verdict(machine, number) for number in others} == {allow}


@pytest.mark.parametrize(
    ("header", "column"),
    [("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", 0), ("/usr/include/asm-generic/unistd.h", 1)],
)
def test_numbers_of_the_calls_are_the_kernels(header: str, column: int) -> None:
    if not Path(header).exists():
        pytest.skip(f"{header} is not installed")
    known = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text()))
    machine = seccomp.MACHINES[column]
    ours = {name: pair[column] for name, pair in seccomp.REFUSED.items()} | seccomp.ABSENT
    ours |= {"socket": seccomp.SOCKET[machine], "clone": seccomp.CLONE[machine], "ioctl": seccomp.IOCTL[machine]}
    assert {name: int(known[name]) for name in ours} == ours


@pytest.mark.parametrize(
    ("alone", "landlock", "filtered", "missing"),
    [
        pytest.param(True, 7, True, set(), id="all of it"),
        pytest.param(False, 7, True, {"no_namespace"}, id="no user namespaces"),
        pytest.param(True, 5, True, {"signals"}, id="an older Landlock"),
        pytest.param(False, 1, True, {"no_namespace", "abstract_sockets", "signals"}, id="the first, and no namespace"),
        pytest.param(False, 0, False, set(MEASURES) - {"shared_session"}, id="nothing"),
    ],
)
def test_what_is_not_in_force_is_named(alone: bool, landlock: int, filtered: bool, missing: set[str]) -> None:
    script = (
        "from site_agent.trainer.isolation import kernel\n"
        f"kernel._enter_own_namespace = kernel._without_interfaces = lambda: {alone}\n"
        f"kernel._restrict_scopes, kernel._forbid_calls = lambda: {landlock}, lambda: {filtered}\n"
        "print(*kernel.isolate().missing)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert set(done.stdout.split()) == missing


def test_the_first_of_its_group_says_that_it_could_not_leave_its_session() -> None:
    script = (
        "import os; os.setpgid(0, 0)\nfrom site_agent.trainer.isolation import kernel\nprint(*kernel.isolate().missing)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "shared_session" in done.stdout.split()
    assert "shared_session" in MEASURES


def interpret(program: bytes, words: dict[int, int]) -> int:
    import struct

    at, accumulator = 0, 0
    while True:
        code, if_true, if_false, operand = struct.unpack_from("HBBI", program, at * 8)
        at += 1
        if code == 0x20:
            accumulator = words[operand]
        elif code == 0x15:
            at += if_true if accumulator == operand else if_false
        elif code == 0x35:
            at += if_true if accumulator >= operand else if_false
        elif code == 0x45:
            at += if_true if accumulator & operand else if_false
        elif code == 0x06:
            return operand
        else:
            raise AssertionError(f"instruction {code:#x}")


def test_worker_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        from site_agent.handoff import Worker
        worker = Worker(Path(sys.argv[1]), warm=False)
        print(worker.pid, flush=True)
        input()
    """)
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "state")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        worker = os.pidfd_open(int(process.stdout.readline()))
        try:
            assert not gone(worker, within_s=0)
            process.kill()
            assert gone(worker, within_s=30)
        finally:
            os.close(worker)


def gone(process: int, *, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    ready, _, _ = select.select([process], [], [], max(0.0, deadline - time.monotonic()))
    return bool(ready)


def test_status_says_in_words_what_is_not_in_force(capsys: pytest.CaptureFixture[str]) -> None:
    shown = SiteStatus(
        site="s", federation="f", coordinator="c:1", authority_fingerprint="", ledger_key="ab" * 32,
        receipt_key="cd" * 32,
        certificate_expires="", running=True, connected=False, certificate_fork_since=None, isolation="seccomp",
        isolation_missing=("signals", "new_one"), device="cpu", users=Users("a", "b", separate=True, root=False),
        studies=(), disputed=(), trainer_problem=None,
    )  # fmt: skip
    status._print_status(shown)
    said = capsys.readouterr().out
    assert "  not in force: Landlock from version 6: it can send signals to this user's other processes\n" in said
    assert "  not in force: a measure that this version does not know\n" in said
