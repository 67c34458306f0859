"""Stands in for systemd in a machine of ``tools.machines``: the first process, and ``systemctl`` that asks it.

    machine_services.py boot NAME       start what is enabled, and what is asked for; ends with 3 to be started again
    machine_services.py ask VERB ...    `systemctl VERB ...`

Needs nothing but Python. A unit's program gets its variables and drop-ins, its user with all groups of that user, its
umask, no capability, and no network where the unit says so; it is started again where its unit says so. Whoever starts
one here goes on when it has said its first word: people type more slowly than a service starts, and tests do not.
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ENABLED, UNITS, ASKED = Path("/etc/enabled"), Path("/etc/systemd/system"), Path("/run/asked")
LOGS = Path("/var/tmp")
VERBS = ("enable", "start", "restart", "stop", "reboot", "poweroff", "daemon-reload", "is-active")
START_S = STOP_S = 60
AGAIN = 3
FOR_GOOD = (0, 64, 65, 77, 78)  # exit codes after which a unit is not started again
LOOK_S = 0.05


def settings(name: str) -> dict[str, list[str]]:
    """What a unit and its drop-ins set, each directive with its values; an empty one forgets those before."""
    found: dict[str, list[str]] = {}
    for path in [UNITS / f"{name}.service", *sorted((UNITS / f"{name}.service.d").glob("*.conf"))]:
        for line in path.read_text().splitlines():
            key, is_setting, value = line.partition("=")
            if is_setting and key.isalpha():
                found[key] = [*found.get(key, ()), value] if value else []
    return found


class Services:
    """The programs of the units that run."""

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        unit = settings(name)
        values = dict(os.environ, PATH="/usr/bin:/bin", HOME="/")
        for file in unit.get("EnvironmentFile", ()):
            lines = [line for line in Path(file).read_text().splitlines() if "=" in line and line[0] != "#"]
            values |= dict(line.split("=", 1) for line in lines)
        line = shlex.split(unit["ExecStart"][-1])
        for key, value in values.items():
            line = [word.replace(f"${{{key}}}", value) for word in line]
        become = ["setpriv", f"--reuid={unit['User'][-1]}", f"--regid={unit['Group'][-1]}", "--init-groups"]
        become += ["--no-new-privs", "--bounding-set=-all", "--"]
        alone = ["unshare", "--net"] if unit.get("PrivateNetwork") == ["yes"] else []
        with (LOGS / f"{name}.log").open("ab") as log:
            before = log.tell()
            self._running[name] = subprocess.Popen(
                [*alone, *become, *line], env=values, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/",
                umask=int(unit.get("UMask", ["0022"])[-1], 8), start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + START_S
        while (LOGS / f"{name}.log").stat().st_size == before and self._running[name].poll() is None:
            if time.monotonic() > deadline:
                return
            time.sleep(LOOK_S)

    def stop(self, name: str) -> None:
        process = self._running.pop(name, None)
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _runs(self, name: str) -> bool:
        return name in self._running and self._running[name].poll() is None

    def start_those_that_failed(self) -> None:
        for name, process in list(self._running.items()):
            if (code := process.poll()) is not None:
                del self._running[name]
                if code not in FOR_GOOD:
                    self.start(name)

    def answer(self, verb: str, options: list[str], names: list[str]) -> str:
        """Do what `systemctl` was asked; what is wrong with it."""
        if verb in ("reboot", "poweroff"):
            if options.count("--force") < 2:
                for name in list(self._running):
                    self.stop(name)
            os._exit(AGAIN if verb == "reboot" else 0)  # the kernel ends everything that is left
        for name in names:
            if not (UNITS / f"{name}.service").exists():
                return f"Unit {name}.service not found."
            if verb == "is-active" and not self._runs(name):
                return "inactive"
            if verb == "enable":
                ENABLED.mkdir(exist_ok=True)
                (ENABLED / name).touch()
            if verb in ("stop", "restart"):
                self.stop(name)
            if verb in ("start", "restart") or (verb == "enable" and "--now" in options):
                self.start(name)
        return ""


def boot(name: str) -> None:
    socket.sethostname(name)
    services = Services()
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    ASKED.mkdir()
    for enabled in sorted(ENABLED.glob("*")):
        services.start(enabled.name)
    Path("/run/booted").touch()
    while True:
        for asked in sorted(ASKED.glob("*.asked")):
            verb, *words = asked.read_text().split()
            options = [word for word in words if word.startswith("-")]
            said = services.answer(verb, options, [word for word in words if not word.startswith("-")])
            asked.with_suffix(".answer").write_text(said)
            asked.unlink()
        services.start_those_that_failed()
        time.sleep(LOOK_S)


def ask(verb: str, *words: str) -> None:
    """Raises SystemExit: with what is wrong."""
    if verb not in VERBS:
        sys.exit(f"the stand-in for systemctl knows no `{verb}`")
    part = ASKED / f"{time.monotonic_ns()}.new"
    part.write_text(" ".join([verb, *(word.removesuffix(".service") for word in words)]))
    asked = part.rename(part.with_suffix(".asked"))
    while asked.exists():
        time.sleep(LOOK_S)
    if said := asked.with_suffix(".answer").read_text():
        sys.exit(said)
    if verb == "is-active":
        print("active")


if __name__ == "__main__":
    boot(sys.argv[2]) if sys.argv[1] == "boot" else ask(*sys.argv[2:])
