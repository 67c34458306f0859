"""Machines for a tutorial: each with its own users, folders, services and power switch, on one network of their own.

Namespaces of the kernel, for root alone. A machine has its own /etc, /var/lib, /var/tmp, /srv, /mnt, /run and /opt;
/opt/wardround is this environment. Nothing that is installed or written there is seen on the real machine, and what
runs there ends when the machine is switched off. The network has no way out.

Systemd does not boot in them. ``systemctl`` and ``sudo`` are stand-ins: a unit's program is run with its variables and
drop-ins, as its user with the groups of that user, and without network where the unit says so. Its other restrictions
are checked elsewhere and not applied here.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

from tools.machine_services import AGAIN
from tools.tutorials import Shell
from tools.world import descendants, wait_until

REPOSITORY = Path(__file__).resolve().parent.parent
NEEDED = ("unshare", "nsenter", "setpriv", "mount", "ip", "systemd-sysusers", "systemd-tmpfiles")
OWN = ("etc", "var/lib", "var/tmp", "srv", "mnt", "opt")
BOOT_S = 60
OFF_S = 30
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
SERVICES = REPOSITORY / "tools" / "machine_services.py"

# Python and the checkout may lie where only root may look, which /opt/wardround does not. What is needed is bound again
# under a folder that is open.  $1: closed folder, $2...: needed below it, then --
OPENED = """
set -eu
closed=$1; shift
mount --make-rprivate /
kept=$(mktemp -d); mount -t tmpfs -o mode=0700 none "$kept"
n=0; needed=""
while [ "$1" != -- ]; do
  n=$((n + 1)); mkdir "$kept/$n"; mount --bind "$1" "$kept/$n"; needed="$needed $1"; shift
done
shift
mount -t tmpfs -o mode=0755 none "$closed"
n=0
for path in $needed; do n=$((n + 1)); (umask 022; mkdir -p "$path"); mount --bind "$kept/$n" "$path"; done
umount -l "$kept"; rmdir "$kept"
exec "$@"
"""

# This machine's folders over those of the real one.  $1: the machine's, $2: the environment, then --
BOOT = """
set -eu
folder=$1 environment=$2; shift 3
mount --make-rprivate /
mount --bind "$environment" "$folder/opt/wardround"
local=$(mktemp -d); mount --bind /usr/local/bin "$local"
programs=$folder/programs
for path in "$local"/*; do
  name=${path##*/}
  if [ -L "$path" ]; then cp -a "$path" "$programs/$name"
  elif [ -f "$path" ]; then : > "$programs/$name"; mount --bind "$path" "$programs/$name"; fi
done
mount --rbind "$programs" /usr/local/bin
mount -t tmpfs -o mode=0755 none /usr/local/share
for own in @OWN@; do mount --rbind "$folder/$own" "/$own"; done
mount -t tmpfs -o mode=0755 none /run
exec "$@"
""".replace("@OWN@", " ".join(OWN))

SUDO = r"""#!/bin/sh
# Stands in for sudo: root is who asks.
set -eu
user=root
if [ "${1-}" = -u ]; then user=$2; shift 2; fi
export SUDO_UID=0 SUDO_USER=root
exec setpriv --reuid="$user" --regid="$(id -g "$user")" --init-groups -- "$@"
"""

SYSTEMCTL = f"""#!/bin/sh
exec {sys.executable} {REPOSITORY}/tools/machine_services.py ask "$@"
"""


def missing() -> bool:
    """Whether no other machine can be made of this one."""
    if os.geteuid() != 0 or not all(map(shutil.which, NEEDED)):
        return True
    probe = ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "true"]
    return subprocess.run(probe, stderr=subprocess.DEVNULL, check=False).returncode != 0


def opening(command: list[str]) -> list[str]:
    """``command``, run in a mount namespace where every user can run this Python then."""
    closed: dict[str, list[str]] = {}
    for path in dict.fromkeys([sys.base_prefix, sys.prefix, str(REPOSITORY)]):
        folder = next((str(parent) for parent in reversed(Path(path).parents) if not parent.stat().st_mode & 1), "")
        if folder:
            closed.setdefault(folder, []).append(path)
    for folder, paths in closed.items():
        command = ["sh", "-c", OPENED, "sh", folder, *paths, "--", *command]
    return command


class Network:
    """A network of machines. Ended with the block."""

    def __init__(self, folder: Path, names: dict[str, tuple[str, ...]]) -> None:
        """``names``: what the machines call an address, or several."""
        addresses = sorted({address for found in names.values() for address in found})
        made = " && ".join(["ip link set lo up", *(f"ip addr add {address}/32 dev lo" for address in addresses)])
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", f"{made} && echo up && exec sleep infinity"], stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        with self._holder.stdout as said:
            assert said.readline() == b"up\n"
        self.hosts = "".join(f"{address} {name}\n" for name, found in names.items() for address in found)
        self.namespace = f"/proc/{self._holder.pid}/ns/net"
        self.machines: dict[str, Machine] = {}
        self._folder = folder

    def machine(self, name: str, shared: Path | None = None) -> "Machine":
        """The machine of that name; with ``shared``, that folder is in its /mnt. Switched off."""
        self.machines[name] = Machine(self, self._folder / name, shared)
        return self.machines[name]

    def shell(self, name: str, home: Path) -> Shell:
        """A person's terminal at the machine of that name, in the checkout; whoever opens it switches it on first."""
        machine = self.machines[name]
        machine.switch_on()
        return Shell(name, Path("/var/tmp"), machine.entering(REPOSITORY), PATH)

    def left(self, name: str) -> None:
        """The terminal at a machine ended: if that is starting again, wait until it has."""
        machine = self.machines[name]
        if machine.is_starting_again():
            machine.switch_on()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for machine in self.machines.values():
            machine.pull_the_plug()
        self._holder.kill()
        self._holder.wait()


class Machine:
    """One machine. What is in its folder stays when it is switched off."""

    def __init__(self, network: Network, folder: Path, shared: Path | None) -> None:
        self.folder, self._network, self._shared = folder, network, shared
        self._process: subprocess.Popen[bytes] | None = None
        for own in (*OWN, "programs", "opt/wardround"):
            (folder / own).mkdir(parents=True, exist_ok=True)
        (folder / "var/tmp").chmod(0o1777)
        subprocess.run(["cp", "-a", "/etc/.", folder / "etc"], check=True)
        (folder / "etc/hosts").write_text(f"127.0.0.1 localhost\n{network.hosts}")
        for name, text in (("sudo", SUDO), ("systemctl", SYSTEMCTL)):
            (folder / "programs" / name).write_text(text)
            (folder / "programs" / name).chmod(0o755)
        if shared is not None:
            (folder / "mnt" / shared.name).mkdir()

    def switch_on(self) -> None:
        """Start it, unless it runs, and wait until what is enabled was started."""
        if self._process is not None and self._process.poll() is None:
            return
        share = []
        if self._shared is not None:
            share = ["sh", "-c", 'mount --bind "$1" "$2"; shift 2; exec "$@"', "sh"]
            share += [str(self._shared), str(self.folder / "mnt" / self._shared.name)]
        boot = [
            "sh",
            "-c",
            BOOT,
            "sh",
            str(self.folder),
            sys.prefix,
            "--",
            sys.executable,
            str(SERVICES),
            "boot",
            self.folder.name,
        ]
        namespaces = ["unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
        self._process = subprocess.Popen(
            ["nsenter", f"--net={self._network.namespace}", *namespaces, *share, *opening(boot)],
            stdin=subprocess.DEVNULL, cwd="/",
        )  # fmt: skip
        wait_until(self._has_booted, f"{self.folder.name} has booted", BOOT_S)

    def _first(self) -> int | None:
        assert self._process is not None
        return next(iter(descendants(self._process.pid)), None)

    def _has_booted(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise OSError(f"{self.folder.name} did not start")
        first = self._first()
        return first is not None and Path("/proc", str(first), "root", "run", "booted").exists()

    def is_starting_again(self) -> bool:
        """Whether it was told to, and went off; waits until it is off if somebody switched it off."""
        assert self._process is not None
        try:
            return self._process.wait(OFF_S) == AGAIN
        except subprocess.TimeoutExpired:
            return False

    def entering(self, folder: Path = Path("/")) -> list[str]:
        """What begins a command that is run on it, in ``folder``."""
        return ["nsenter", f"--target={self._first()}", "--mount", "--uts", "--pid", "--net", f"--wdns={folder}", "--"]

    def run(self, *command: str, timeout_s: float = BOOT_S) -> str:
        """Run a command on it, as root. Returns its stdout."""
        line = [*self.entering(), *command]
        return subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True, timeout=timeout_s, cwd="/").stdout

    def pull_the_plug(self) -> None:
        """Everything on it ends at once."""
        if self._process is not None and self._process.poll() is None:
            if (first := self._first()) is not None:
                os.kill(first, signal.SIGKILL)
            self._process.wait(OFF_S)
