"""Taking the network away from this process, by the kernel, before anything is imported that could use it.

    1. a session of its own, without a terminal
    2. a user and a network namespace of its own: no interface but a loopback that is down
    3. seccomp: ``socket`` makes Unix sockets only, ``io_uring`` does not exist, no way into another process, another
       namespace or a terminal (``seccomp`` has the list)
    4. Landlock, where the kernel has it: no look into processes outside; with its newer versions no abstract Unix
       sockets and no signals to processes outside
    5. no core dumps, and no other process of this user may read this one's memory

Each step is taken where the system allows it; ``isolate`` says what is in force and what is not. Step 2 works only
while the process has one thread, so this comes before torch. What stays reachable is every Unix socket with a path that
file permissions allow; that is why the service units also hide ``/run``.
"""

import ctypes
import os
import resource
import struct
from dataclasses import dataclass
from pathlib import Path

from site_agent.trainer.isolation import seccomp
from wardround.local import memory

NETWORK_NAMESPACE, SECCOMP, NONE = "network-namespace", "seccomp", "none"
# What may not be in force, by name; `site-agent status` says each in words.
NO_NAMESPACE, NO_FILTER, READS_PROCESSES = "no_namespace", "no_system_call_filter", "reads_processes"
ABSTRACT_SOCKETS, SIGNALS, SHARED_SESSION = "abstract_sockets", "signals", "shared_session"

_libc = ctypes.CDLL(None, use_errno=True)

# linux/sched.h, linux/prctl.h
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38

# The loopback, and the tunnels that a kernel with those modules puts, down, into each new network namespace.
_NO_WAY_OUT = frozenset(
    {"lo", "sit0", "tunl0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0", "ip6tnl0", "ip6gre0"}
)

# linux/landlock.h; the numbers are the same on every architecture
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446
_LANDLOCK_CREATE_RULESET_VERSION = 1
_LANDLOCK_ABI_WITH_NET, _LANDLOCK_ABI_WITH_SCOPES = 4, 6
_LANDLOCK_ACCESS_FS = (
    1 << 6 | 1 << 11
)  # making devices, which no trainer does: a ruleset of the first versions must refuse something
_LANDLOCK_ACCESS_NET = 0b11  # bind and connect of TCP
_LANDLOCK_SCOPES = 0b11  # abstract Unix sockets, signals


@dataclass(frozen=True)
class InForce:
    """What keeps the network away: "network-namespace" (with seccomp, where allowed), "seccomp" or "none"; and by name
    each measure that this system did not allow.
    """

    kind: str
    missing: tuple[str, ...]


def isolate() -> InForce:
    """Take the network from this process and all its children, for good."""
    own_session = _leave_terminal()
    alone = _enter_own_namespace() or _without_interfaces()
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    filtered = _forbid_calls()
    landlock = _restrict_scopes()
    if resource.getrlimit(resource.RLIMIT_CORE) != (0, 0):  # where a service unit says so, it may also forbid the call
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    memory.hide()
    scoped = landlock >= _LANDLOCK_ABI_WITH_SCOPES
    measures = {
        NO_NAMESPACE: alone, NO_FILTER: filtered, READS_PROCESSES: landlock > 0, ABSTRACT_SOCKETS: alone or scoped,
        SIGNALS: scoped, SHARED_SESSION: own_session,
    }  # fmt: skip
    kind = NETWORK_NAMESPACE if alone else SECCOMP if filtered else NONE
    return InForce(kind, tuple(name for name, taken in measures.items() if not taken))


def die_with_parent(parent: int, signal_number: int) -> None:
    """Have the kernel send ``signal_number`` to this process when the thread that started it ends.

    Comes after ``isolate``: entering a user namespace clears the wish.
    """
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0))
    if os.getppid() != parent:
        raise SystemExit("the process that wanted this worker is gone")


def _leave_terminal() -> bool:
    """Step 1. Whoever started it may have done so already."""
    if os.getsid(0) != os.getpid():
        try:
            os.setsid()
        except PermissionError:
            return False  # the first of a group of processes cannot leave it
    return True


def _enter_own_namespace() -> bool:
    """Step 2. False where the system forbids it. This user stays who it is, and is nobody else.

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


def _forbid_calls() -> bool:
    """Step 3. False where it cannot be."""
    return seccomp.install()


def _restrict_scopes() -> int:
    """Step 4: the version of Landlock that is in force, 0 for none. Any version keeps other processes' insides away."""
    version = _libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_CREATE_RULESET_VERSION)
    if version < 1:
        return 0
    fields = [_LANDLOCK_ACCESS_FS]
    if version >= _LANDLOCK_ABI_WITH_NET:
        fields = [0, _LANDLOCK_ACCESS_NET]
    if version >= _LANDLOCK_ABI_WITH_SCOPES:
        fields.append(_LANDLOCK_SCOPES)
    attributes = struct.pack(f"{len(fields)}Q", *fields)
    passed = ctypes.create_string_buffer(attributes, len(attributes))
    ruleset = _libc.syscall(_LANDLOCK_CREATE_RULESET, passed, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        return 0
    try:
        return int(version) if _libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0) == 0 else 0
    finally:
        os.close(ruleset)


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
