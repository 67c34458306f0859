"""Taking the network away from this process, by the kernel, before anything is imported that could use it.

    1. a user and a network namespace of its own: no interface but a loopback that is down
    2. seccomp: ``socket`` makes Unix sockets only, ``io_uring`` does not exist, no way into another namespace
    3. Landlock, where the kernel has it: no abstract Unix sockets and no signals to processes outside
    4. no core dumps, and no other process of this user may read this one's memory

Each step is taken where the system allows it; ``isolate`` says what is in force. Step 1 works only while the process
has one thread, so this comes before torch. What stays reachable is every Unix socket with a path that file permissions
allow; that is why the service units also hide ``/run``.
"""

import ctypes
import errno
import os
import platform
import resource
import socket
import struct
from pathlib import Path

NETWORK_NAMESPACE, SECCOMP, NONE = "network-namespace", "seccomp", "none"

_libc = ctypes.CDLL(None, use_errno=True)

# linux/sched.h, linux/prctl.h
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2

# The loopback, and the tunnels that a kernel with those modules puts, down, into each new network namespace.
_NO_WAY_OUT = frozenset(
    {"lo", "sit0", "tunl0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0", "ip6tnl0", "ip6gre0"}
)

# linux/landlock.h; the numbers are the same on every architecture
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446
_LANDLOCK_CREATE_RULESET_VERSION = 1
_LANDLOCK_ABI_WITH_SCOPES = 6
_LANDLOCK_ACCESS_NET = 0b11  # bind and connect of TCP
_LANDLOCK_SCOPES = 0b11  # abstract Unix sockets, signals

# linux/audit.h and the system call tables: machine -> (audit architecture, socket, setns)
_ARCHITECTURES = {"x86_64": (0xC000003E, 41, 308), "aarch64": (0xC00000B7, 198, 268)}
_IO_URING = (425, 426, 427)  # setup, enter, register; the same on both
_X32_BIT = 0x40000000  # x86_64's second table, with the same calls under other numbers

# linux/bpf_common.h, linux/seccomp.h
_LOAD_WORD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _FIRST_ARGUMENT_OFFSET = 0, 4, 16
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def isolate() -> str:
    """Take the network from this process and all its children, for good.

    Returns:
        What keeps it so: "network-namespace" (seccomp too, where allowed), "seccomp", or "none".
    """
    alone = _enter_own_namespace() or _without_interfaces()
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    filtered = _forbid_sockets()
    _restrict_scopes()
    if resource.getrlimit(resource.RLIMIT_CORE) != (0, 0):  # where a service unit says so, it may also forbid the call
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))
    if alone:
        return NETWORK_NAMESPACE
    return SECCOMP if filtered else NONE


def die_with_parent(parent: int, signal_number: int) -> None:
    """Have the kernel send ``signal_number`` to this process when the thread that started it ends.

    Comes after ``isolate``: entering a user namespace clears the wish.
    """
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0))
    if os.getppid() != parent:
        raise SystemExit("the process that wanted this worker is gone")


def _enter_own_namespace() -> bool:
    """Step 1. False where the system forbids it. This user stays who it is, and is nobody else.

    Tried in a child first: a process that may unshare but not write its maps could never again make a file.
    """
    child = os.fork()
    if child == 0:
        try:
            _unshare()
        except OSError:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status != 0:
        return False
    _unshare()
    return True


def _unshare() -> None:
    uid, gid = os.geteuid(), os.getegid()
    _check(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _without_interfaces(listing: Path = Path("/proc/self/net/dev")) -> bool:
    """Whether the service manager or the container gave this process a namespace without a network interface."""
    names = {line.partition(":")[0].strip() for line in listing.read_text().splitlines()[2:]}
    return names <= _NO_WAY_OUT


def _forbid_sockets() -> bool:
    """Step 2. False where the kernel has no seccomp filter, or on a machine whose system calls we have no table of."""
    if platform.machine() not in _ARCHITECTURES:
        return False
    program = socket_filter(platform.machine())
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
    passed = ctypes.create_string_buffer(header, len(header))
    return bool(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, passed, 0, 0) == 0)


def socket_filter(machine: str) -> bytes:
    """The BPF program for ``machine``: each instruction is ``struct sock_filter``, 8 bytes."""
    architecture, socket_call, setns = _ARCHITECTURES[machine]
    refuse, absent = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    program: list[bytes] = []

    def add(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> None:
        program.append(struct.pack("HBBI", code, if_true, if_false, operand))

    add(_LOAD_WORD, _ARCHITECTURE_OFFSET)
    add(_JUMP_EQUAL, architecture, if_true=1)
    add(_RETURN, refuse)  # another architecture's calls have other numbers
    add(_LOAD_WORD, _NUMBER_OFFSET)
    add(_JUMP_AT_LEAST, _X32_BIT, if_false=1)
    add(_RETURN, refuse)
    for number in _IO_URING:
        add(_JUMP_EQUAL, number, if_false=1)
        add(_RETURN, absent)
    add(_JUMP_EQUAL, setns, if_false=1)
    add(_RETURN, refuse)
    add(_JUMP_EQUAL, socket_call, if_true=1)
    add(_RETURN, _ALLOW)
    add(_LOAD_WORD, _FIRST_ARGUMENT_OFFSET)  # the family, an int: its low word
    add(_JUMP_EQUAL, socket.AF_UNIX, if_true=1)
    add(_RETURN, refuse)
    add(_RETURN, _ALLOW)
    return b"".join(program)


def _restrict_scopes() -> None:
    """Step 3, where the kernel has it."""
    version = _libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_CREATE_RULESET_VERSION)
    if version < _LANDLOCK_ABI_WITH_SCOPES:
        return
    attributes = struct.pack("QQQ", 0, _LANDLOCK_ACCESS_NET, _LANDLOCK_SCOPES)
    passed = ctypes.create_string_buffer(attributes, len(attributes))
    ruleset = _libc.syscall(_LANDLOCK_CREATE_RULESET, passed, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        return
    try:
        _libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
