"""What the process that reads patients could send: `python -m tools.evidence_isolation`.

A real federation of one site runs a study. When it has ended, the kernel is asked what each process of the trainer
has sent and received in its network namespace (`/proc/PID/net/dev`), whether that namespace is another than the
agent's, and whether a seccomp filter is in force. Then a process isolated in the same way tries to open a socket of
each family that the kernel knows, and each system call that the filter refuses; and one that is not isolated opens
what sockets it can, to see that there were some to be had. Prints one JSON line; exits 1 if a byte passed, a socket was
had or a call passed.
"""

import argparse
import errno
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.evidence_egress import SITE, write_study
from tools.world import World, command_line, descendants, wait_until

FAMILIES = 46  # AF_UNSPEC to AF_MCTP, linux/socket.h
TRY_ALL = """
import ctypes, errno, json, platform, socket
from site_agent.trainer.isolation import kernel, seccomp

in_force, missing, had = {isolate}, {{}}
for family in range({families}):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET, socket.SOCK_RDM):
        if family == socket.AF_UNIX:
            continue
        try:
            socket.socket(family, kind).close()
            had[f"{{family}}/{{int(kind)}}"] = 0
        except OSError as error:
            had[f"{{family}}/{{int(kind)}}"] = error.errno
passed = []
if {calls}:  # with arguments that name nothing: what passes the filter fails with another error
    libc = ctypes.CDLL(None, use_errno=True)
    numbers = {{name: pair[seccomp.MACHINES.index(platform.machine())] for name, pair in seccomp.REFUSED.items()}}
    for name, number in (numbers | seccomp.ABSENT).items():
        libc.syscall(number, -1, 0, 0, 0, 0, 0)
        if ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
            passed.append(name)
print(json.dumps({{
    "isolation": in_force, "missing": missing, "tried": had, "calls_tried": len(seccomp.REFUSED | seccomp.ABSENT),
    "calls_passed": passed,
}}))
"""


def bytes_of(pid: int) -> dict[str, int]:
    """Received and sent, over all interfaces of the namespace that ``pid`` is in."""
    rows = [line.partition(":")[2].split() for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]]
    return {"received": sum(int(row[0]) for row in rows), "sent": sum(int(row[8]) for row in rows)}


def seen_from_outside(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Each process under an agent that trains: its namespace, its filter, its bytes after the last round."""
    study, table = write_study(folder, rounds=rounds, payload=600)
    with World(folder / "state") as world:
        world.init()
        world.serve()
        world.join(SITE)
        world.add_data(SITE, table, "y")
        world.run_agent(SITE)
        name = world.create_study(study)
        world.approve(name, [SITE])
        return seen_while_it_runs(world, name)


def seen_while_it_runs(world: World, study: str) -> list[dict[str, Any]]:
    """Start a study. The processes that train are looked up in its course, and looked at when it has ended."""
    agent = world.agents[SITE].process.pid
    world.ask_coordinator("study", "start", study)
    wait_until(lambda: world.study_status(study)["round"] >= 2, "round 2", 60)
    workers = [pid for pid in descendants(agent) if "site_agent.trainer.process" in command_line(pid)]
    world.finish(study)
    world.heard(SITE, study)
    return [_seen(pid, agent) for pid in workers]


def _namespace(pid: int) -> int:
    return Path(f"/proc/{pid}/ns/net").stat().st_ino


def _seen(pid: int, agent: int) -> dict[str, Any]:
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    return {
        "own_namespace": _namespace(pid) != _namespace(agent),
        "seccomp": status["Seccomp"] == "2", "no_new_privileges": status["NoNewPrivs"] == "1",
        **bytes_of(pid), "sent_in_agents_namespace": bytes_of(agent)["sent"],
    }  # fmt: skip


def seen_from_inside(*, isolated: bool = True) -> dict[str, Any]:
    """Which families' sockets a process can open once it is isolated, and which refused calls it can make."""
    isolate = "(lambda found: (found.kind, found.missing))(kernel.isolate())" if isolated else '("none", ())'
    script = TRY_ALL.format(families=FAMILIES, isolate=f"*{isolate}", calls=isolated)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    tried = found["tried"]
    return {
        "isolation": found["isolation"], "not_in_force": found["missing"], "sockets_tried": len(tried),
        "calls_tried": found["calls_tried"], "calls_passed": found["calls_passed"],
        "sockets_had": sorted(name for name, code in tried.items() if code == 0),
        "refused_by": sorted({errno.errorcode[code] for code in tried.values() if code}),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.evidence_isolation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wardround-isolation-") as folder:
        workers = seen_from_outside(Path(folder), chosen.rounds)
    inside = seen_from_inside()
    without = len(seen_from_inside(isolated=False)["sockets_had"])
    print(json.dumps({
        "evidence": "isolation", "rounds": chosen.rounds, "workers": workers, **inside, "had_without_isolation": without
    }))  # fmt: skip
    quiet = bool(workers) and all(one["own_namespace"] and not one["sent"] + one["received"] for one in workers)
    sys.exit(not quiet or bool(inside["sockets_had"] or inside["calls_passed"]))


if __name__ == "__main__":
    main()
