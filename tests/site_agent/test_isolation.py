"""The process that reads patients has no network: each way out is tried from inside."""

import json
import os
import platform
import select
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from site_agent.trainer import isolation

WAYS_OUT = """
import errno, json, os, socket, sys
from site_agent.trainer import isolation

{before}
found = {{"isolation": isolation.isolate()}}

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
found["setns"] = tried(lambda: isolation._check(isolation._libc.setns(os.open("/proc/self/ns/net", os.O_RDONLY), 0)))
found["io_uring"] = tried(lambda: isolation._check(0 if isolation._libc.syscall(425, 1, None) == 0 else 1))
import subprocess
child = "import socket; socket.socket(socket.AF_INET)"
found["child"] = subprocess.run([sys.executable, "-c", child], stderr=subprocess.DEVNULL).returncode
import resource
found["core"] = resource.getrlimit(resource.RLIMIT_CORE)[0]
{after}
print(json.dumps(found))
"""
WITHOUT_NAMESPACE = "isolation._enter_own_namespace = isolation._without_interfaces = lambda: False"
WITHOUT_ANYTHING = WITHOUT_NAMESPACE + "\nisolation._forbid_sockets = lambda: False"
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
    assert found["isolation"] in (isolation.NETWORK_NAMESPACE, isolation.SECCOMP)
    assert_no_way_out(found)
    if found["isolation"] == isolation.NETWORK_NAMESPACE:
        assert found["abstract"] != "works"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no table of its system calls")
def test_seccomp_alone_has_no_way_out_where_namespaces_are_forbidden(tmp_path: Path) -> None:
    found = child(tmp_path, before=WITHOUT_NAMESPACE)
    assert found["isolation"] == isolation.SECCOMP
    assert_no_way_out(found)


def test_process_that_can_have_neither_says_so(tmp_path: Path) -> None:
    assert child(tmp_path, before=WITHOUT_ANYTHING)["isolation"] == isolation.NONE


def test_torch_trains_inside(tmp_path: Path) -> None:
    found = child(tmp_path, after=TRAIN)
    assert found["trained"] == pytest.approx(0.8**3)  # each step takes a fifth: w - 0.1 * 2 w
    assert_no_way_out(found)


def test_namespace_given_by_the_service_manager_is_recognised(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        from site_agent.trainer import isolation
        if not isolation._enter_own_namespace():
            print("forbidden")
        else:
            isolation._enter_own_namespace = lambda: False
            print(isolation.isolate())
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    if done.stdout.strip() == "forbidden":
        pytest.skip("this system allows no network namespace")
    assert done.stdout.strip() == isolation.NETWORK_NAMESPACE


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
    assert isolation._without_interfaces(listing) is alone


def test_other_processes_of_the_user_cannot_read_its_memory(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may")
    script = "from site_agent.trainer import isolation; isolation.isolate(); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(PermissionError):
            Path(f"/proc/{process.pid}/environ").read_bytes()
        process.communicate("\n", timeout=30)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filter_refuses_every_family_but_unix(machine: str) -> None:
    """A slow reading of the program, instruction by instruction, as the kernel's documentation describes them."""
    architecture, socket_call, setns = isolation._ARCHITECTURES[machine]
    allow, eperm, enosys = 0x7FFF0000, 0x00050001, 0x00050026

    def verdict(number: int, argument: int = 0, arch: int = architecture) -> int:
        return interpret(isolation.socket_filter(machine), {0: number, 4: arch, 16: argument})

    for family in range(64):
        assert verdict(socket_call, family) == (allow if family == socket.AF_UNIX else eperm)
    assert {verdict(number) for number in (425, 426, 427)} == {enosys}
    assert verdict(setns) == eperm
    assert verdict(socket_call, socket.AF_UNIX, arch=0x40000003) == eperm  # i386 on x86_64
    assert verdict(0x40000000 | socket_call, socket.AF_UNIX) == eperm
    others = set(range(500)) - {socket_call, setns, 425, 426, 427}
    assert {verdict(number) for number in others} == {allow}


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
