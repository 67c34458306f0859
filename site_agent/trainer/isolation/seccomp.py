"""The system calls that the process which reads patients does not have, as a program for the kernel's filter.

    refused (EPERM)   sockets but Unix ones; whatever reaches into another process, into another namespace or into the
                      kernel's inside; typing into a terminal; every call of another architecture
    absent (ENOSYS)   io_uring, whose calls a filter does not see, and clone3, whose flags it cannot read: the C library
                      then uses clone

What reaches into another process is refused whichever process it is: a worker has no use for it, and its user may be
the gateway's.
"""

import ctypes
import errno
import platform
import socket
import struct

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2

# linux/audit.h and the system call tables of x86-64 and aarch64 (the kernel's generic one)
MACHINES = ("x86_64", "aarch64")
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000  # x86_64's second table, with the same calls under other numbers
SOCKET, CLONE, IOCTL = ({"x86_64": x86, "aarch64": arm} for x86, arm in ((41, 198), (56, 220), (16, 29)))
REFUSED: dict[str, tuple[int, int]] = {  # name -> (x86-64, aarch64)
    # another process: its memory, its descriptors, what it runs
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424),
    "process_madvise": (440, 440), "process_mrelease": (448, 448),
    # the kernel's inside, and its keys
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "syslog": (103, 116), "acct": (163, 89), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    # other namespaces, and the tree of files
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
}  # fmt: skip
ABSENT = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "clone3": 435}
# asm-generic/ioctls.h: types into a terminal, does so on a console, and takes one as one's own
TERMINAL = {"TIOCSTI": 0x5412, "TIOCLINUX": 0x541C, "TIOCSCTTY": 0x540E}
NEW_NAMESPACES = 0x7E020000  # linux/sched.h: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET

# linux/bpf_common.h, linux/seccomp.h
_LOAD_WORD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_IF_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_OFFSET, ARCHITECTURE_OFFSET, ARGUMENT_OFFSETS = 0, 4, (16, 24)  # of an argument its low word: little endian
ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
REFUSE, ABSENT_HERE = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS

_libc = ctypes.CDLL(None, use_errno=True)


def install() -> bool:
    """Filter this process and all its children, for good. It must have given up gaining privileges.

    Returns:
        False where the kernel has no such filter, or on a machine whose system calls we have no table of.
    """
    if platform.machine() not in MACHINES:
        return False
    code = program(platform.machine())
    instructions = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(instructions))
    passed = ctypes.create_string_buffer(header, len(header))
    return bool(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, passed, 0, 0) == 0)


def program(machine: str) -> bytes:
    """The filter for ``machine``: each instruction is ``struct sock_filter``, 8 bytes."""
    code: list[bytes] = []

    def add(instruction: int, operand: int, if_true: int = 0, if_false: int = 0) -> None:
        code.append(struct.pack("HBBI", instruction, if_true, if_false, operand))

    add(_LOAD_WORD, ARCHITECTURE_OFFSET)
    add(_JUMP_EQUAL, ARCHITECTURES[machine], if_true=1)
    add(_RETURN, REFUSE)  # another architecture's calls have other numbers
    add(_LOAD_WORD, NUMBER_OFFSET)
    add(_JUMP_AT_LEAST, X32_BIT, if_false=1)
    add(_RETURN, REFUSE)
    for number in ABSENT.values():
        add(_JUMP_EQUAL, number, if_false=1)
        add(_RETURN, ABSENT_HERE)
    for numbers in REFUSED.values():
        add(_JUMP_EQUAL, numbers[MACHINES.index(machine)], if_false=1)
        add(_RETURN, REFUSE)
    add(_JUMP_EQUAL, SOCKET[machine], if_false=4)
    add(_LOAD_WORD, ARGUMENT_OFFSETS[0])  # the family, an int
    add(_JUMP_EQUAL, socket.AF_UNIX, if_true=1)
    add(_RETURN, REFUSE)
    add(_RETURN, ALLOW)
    add(_JUMP_EQUAL, CLONE[machine], if_false=4)
    add(_LOAD_WORD, ARGUMENT_OFFSETS[0])  # the flags
    add(_JUMP_IF_BITS, NEW_NAMESPACES, if_false=1)
    add(_RETURN, REFUSE)
    add(_RETURN, ALLOW)
    add(_JUMP_EQUAL, IOCTL[machine], if_true=1)
    add(_RETURN, ALLOW)
    add(_LOAD_WORD, ARGUMENT_OFFSETS[1])  # the command, of which the kernel reads 32 bits
    for command in TERMINAL.values():
        add(_JUMP_EQUAL, command, if_false=1)
        add(_RETURN, REFUSE)
    add(_RETURN, ALLOW)
    return b"".join(code)
