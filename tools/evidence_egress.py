"""Whether every byte that leaves is accounted for, over real processes: `python -m tools.evidence_egress`.

One coordinator, one site agent with its trainer, and `site-agent audit relay` between them, which the agent takes for
the coordinator. A study whose training does nothing runs to its end, the agent is stopped, and the commands that an
auditor uses are asked: `coordinator receipts`, `audit verify --receipts`, `audit reconcile --bytes --receipts`. With
``--leak`` the agent runs with a patch in front of it that sends that many bytes more, once, inside its first update
where the ledger does not see them. Prints one JSON line for each study; exits 1 if one came out other than it should.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.studies import study_text, tiny_table
from tools.world import CommandFailed, Service, World, command

SITE = "alpha"
# Python runs a `sitecustomize` that it finds on its path before everything else. This one adds an unknown field to the
# first message of the first upload, behind the meter's back; the coordinator skips unknown fields, so nobody is told.
LEAK = """
import os
import sys

if "run" in sys.orig_argv:
    import grpc
    secure_channel, left = grpc.secure_channel, [{leak}]

    class Leaking:
        def __init__(self, channel):
            self._channel = channel

        def __getattr__(self, name):
            return getattr(self._channel, name)

        def stream_stream(self, method, request_serializer, response_deserializer, **others):
            def serialize(message):
                data = message if request_serializer is None else request_serializer(message)
                if data[:1] != bytes([1 << 3 | 2]) or not left:  # field 1 is `open`
                    return data
                size = left.pop()
                length = bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14 & 127 | 128, size >> 21])
                return data + bytes([15 << 3 | 2]) + length + os.urandom(size)
            return self._channel.stream_stream(method, serialize, response_deserializer, **others)

    grpc.secure_channel = lambda *given, **named: Leaking(secure_channel(*given, **named))
"""
PAYLOADS = {"tiny": 600, "8 MB": 8_000_000, "45 MB": 45_000_000}


@dataclass(frozen=True)
class Passed:
    """What a study left behind that went through the relay. ``code``: with which `audit reconcile` ended."""

    code: int
    found: dict[str, Any]
    ledger: Path
    receipts: Path
    seconds: float

    @property
    def bytes(self) -> dict[str, Any]:
        found: dict[str, Any] = self.found["bytes"]
        return found


def through_relay(
    folder: Path,
    *,
    rounds: int,
    payload: int,
    leak: int = 0,
    patch: str = "",
    run: Callable[[World, str], None] | None = None,
) -> Passed:
    """A study of ``rounds`` rounds with updates of ``payload`` bytes; ``leak`` bytes more leave than the ledger has.

    ``patch``: what the agent runs before everything else, if it is not to leak. ``run``: starts the study that it is
    given and returns when it has ended; it may look at the processes meanwhile.
    """
    study, table = write_study(folder, rounds=rounds, payload=payload)
    count, receipts = folder / "count.json", folder / "receipts.jsonl"
    with World(folder / "state") as world, contextlib.ExitStack() as ending:
        world.init()
        world.serve()
        world.join(SITE)
        world.add_data(SITE, table, "y")
        listening = ("--listen", "127.0.0.1:0", "--to", world.address, "--count", count)
        relay = Service(world.logs / "relay.log", "site-agent", "audit", "relay", *listening)
        ending.callback(relay.stop)
        _lead_through(world.state / SITE, relay.wait_line("ready").split()[1])
        agent = run_patched(world, LEAK.format(leak=leak) if leak else patch)
        name = world.create_study(study)
        world.approve(name, [SITE])
        began = time.monotonic()
        if run is None:
            world.ask_coordinator("study", "start", name)
            world.finish(name, timeout_s=60 + 5 * rounds)
            world.heard(SITE, name)
        else:
            run(world, name)
        seconds = time.monotonic() - began
        agent.stop()
        relay.stop()
        world.ask_coordinator("receipts", SITE, "--out", receipts)
    ledger = folder / "state" / SITE / "ledger"
    code, found = _reconciled("--ledger", ledger, "--bytes", count, "--receipts", receipts)
    return Passed(code, found, ledger, receipts, seconds)


def write_study(folder: Path, *, rounds: int, payload: int) -> tuple[Path, Path]:
    """A study of one site whose training does nothing, and the folder of a table for it."""
    folder.mkdir(parents=True, exist_ok=True)
    study = folder / "study.toml"
    ballast = f'name = "ballast"\nbytes = {payload}\ntensors = 2'
    study.write_text(study_text("egress", [SITE], rounds, model=ballast, more="round_deadline_s = 300"))
    return study, tiny_table(folder / "data")


def _lead_through(site: Path, address: str) -> None:
    """As a name that resolves to the relay would: the agent takes it for the coordinator."""
    file = site / "identity" / "site.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "address": address}, sort_keys=True))


def run_patched(world: World, patch: str) -> Service:
    """Run the site's agent with ``patch`` in front of it; "" for none."""
    environment = {}
    if patch:
        folder = world.state.parent / "patch"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(patch)
        environment["PYTHONPATH"] = ":".join([str(folder), *filter(None, sys.path)])
    log = world.logs / f"{SITE}.log"
    agent = Service(log, "site-agent", "run", "--state", world.state / SITE, environment=environment)
    world.agents[SITE] = agent
    agent.wait_line("ready")
    return agent


def _reconciled(*options: str | Path) -> tuple[int, dict[str, Any]]:
    try:
        return 0, json.loads(command("site-agent", "audit", "reconcile", *options, "--json"))
    except CommandFailed as failed:
        if failed.code != 1:
            raise
        return 1, json.loads(failed.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.evidence_egress", description=__doc__)
    parser.add_argument("--payload", choices=sorted(PAYLOADS), default="tiny")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--leak", type=int, default=0, metavar="BYTES", help="exit 0 then means: it was flagged")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wardround-egress-") as folder:
        passed = through_relay(Path(folder), rounds=chosen.rounds, payload=PAYLOADS[chosen.payload], leak=chosen.leak)
    found = passed.bytes
    print(json.dumps({
        "evidence": "egress", "payload": chosen.payload, "rounds": chosen.rounds, "leak": chosen.leak,
        "reconcile_exit": passed.code, "payload_bytes": found["payload"] + found["sent_again"],
        "counted": found["counted"], "expected": found["expected"],
        "unexplained": found["unexplained"], "allowance": found["allowance"], "calls": found["calls"],
        "connections": found["connections"], "receipts_compared": passed.found["ledger"]["compared"],
        "seconds": round(passed.seconds, 1),
    }))  # fmt: skip
    sys.exit(passed.code != (1 if chosen.leak else 0))


if __name__ == "__main__":
    main()
