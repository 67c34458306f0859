"""Which user of this machine is at the other end of a connection on the loopback, as the kernel has it.

A cookie is for a host and for all its ports: a browser also sends ours to a page that another user serves at another
port of this machine. So a session is of the user who logged in, and a copied cookie is worth nothing to others.
"""

import ipaddress
import socket
import struct
from pathlib import Path

TABLES = {4: Path("/proc/self/net/tcp"), 6: Path("/proc/self/net/tcp6")}
LOOKS = 2  # a table that changes while it is read may lack a row
LOCAL, REMOTE, UID, INODE = 1, 2, 7, 9  # columns

Address = tuple[str, int | None]


def owner(client: Address | None, server: Address | None) -> int | None:
    """The user of the process that connected.

    None where it is on another machine or in another network namespace, has closed its end, or where the kernel's table
    cannot be read.
    """
    try:
        version = ipaddress.ip_address(client[0]).version if client and server else 0
        if client is None or server is None or not ipaddress.ip_address(client[0]).is_loopback:
            return None
        ends = _hex(client), _hex(server)
        for _ in range(LOOKS):
            for row in TABLES[version].read_text().splitlines()[1:]:
                cells = row.split()
                if (cells[LOCAL], cells[REMOTE]) == ends and cells[INODE] != "0":
                    return int(cells[UID])
    except (OSError, ValueError, IndexError):
        return None
    return None


def _hex(address: Address) -> str:
    """As the kernel writes it: words in its own order of bytes."""
    host, port = address
    packed = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return f"{''.join(f'{word:08X}' for word in words)}:{port or 0:04X}"
