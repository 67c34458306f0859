"""What the one exit costs for each update: `python -m tools.evidence_cost`.

Real processes, updates of 45 MB (ResNet-18). The agent runs with a patch in front of it that reads the clock of its
process (all threads: gRPC's too) around the steps of an update, and counts fsyncs by the file they are for:

    trained   the trainer's file, hashed as it is taken over
    record    checked, hashed, norms, and written into the ledger
    send      read again, hashed again, TLS and HTTP/2, until the receipt is in the ledger

Prints one JSON line with medians over the updates, the first of which is not counted, and beside them what one SHA-256,
one norm, and sending over bare gRPC with mutual TLS cost for the same bytes on this machine.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from bench import floor
from bench.processes import cpu_seconds
from tools.evidence_egress import PAYLOADS, SITE, run_patched, write_study
from tools.world import World, free_port

CLOCK = """
import json
import sys
import threading
import time

if "run" in sys.orig_argv:
    from pathlib import Path

    from site_agent.gateway import round as rounds
    from site_agent.gateway.exit import egress
    from wardround.local import durable

    out, lock, syncs = Path({out!r}), threading.Lock(), []

    def timed(name, act):
        def measured(*given, **named):
            syncs.clear()
            wall, began = time.monotonic(), time.process_time()
            try:
                return act(*given, **named)
            finally:
                row = {{"step": name, "cpu_s": time.process_time() - began, "wall_s": time.monotonic() - wall,
                       "syncs": list(syncs)}}
                with lock, out.open("a") as file:
                    file.write(json.dumps(row) + "\\n")
        return measured

    def counted(descriptor, path, sync=durable._sync):
        syncs.append(f"{{path.parent.name}}/{{path.name}}")
        sync(descriptor, path)

    durable._sync = counted
    egress.record, egress.send = timed("record", egress.record), timed("send", egress.send)
    rounds.Rounds._take_result = timed("trained", rounds.Rounds._take_result)
"""
STEPS = ("trained", "record", "send")
TARGET_CPU_MS, TARGET_SYNCS = 60, 2


def measure(folder: Path, *, rounds: int, payload: int) -> dict[str, Any]:
    study, table = write_study(folder, rounds=rounds, payload=payload)
    out = folder / "steps.jsonl"
    with World(folder / "state") as world:
        world.init()
        world.serve()
        world.join(SITE)
        world.add_data(SITE, table, "y")
        agent = run_patched(world, clock(out))
        name = world.create_study(study)
        world.approve(name, [SITE])
        before = cpu_seconds(agent.process.pid)
        world.ask_coordinator("study", "start", name)
        world.finish(name, timeout_s=60 + 10 * rounds)
        world.heard(SITE, name)
        whole = (cpu_seconds(agent.process.pid) - before) / rounds
    return summary(out, rounds) | {"agent_cpu_ms_per_round": round(whole * 1e3)}


def clock(out: Path) -> str:
    """The patch that writes a row of JSON to ``out`` for each step."""
    return CLOCK.format(out=str(out))


def summary(out: Path, rounds: int) -> dict[str, Any]:
    """Medians over the updates after the first; the closing validation, which has no update, is left out."""
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    steps = {step: [row for row in rows if row["step"] == step][1:rounds] for step in STEPS}
    cpu = {step: statistics.median(row["cpu_s"] for row in found) * 1e3 for step, found in steps.items()}
    updates = [[sync for row in update for sync in row["syncs"]] for update in zip(*steps.values(), strict=True)]
    all_syncs = statistics.median(len(update) for update in updates)
    in_ledger = statistics.median(sum(sync.startswith("ledger/") for sync in update) for update in updates)
    return {
        "updates": len(updates), "cpu_ms": {step: round(ms, 1) for step, ms in cpu.items()},
        "egress_cpu_ms": round(cpu["record"] + cpu["send"], 1), "ledger_fsyncs": in_ledger,
        "other_fsyncs": all_syncs - in_ledger,
        "fsyncs_of_the_last": updates[-1],
    }  # fmt: skip


def cpu_ms(act: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        began = time.process_time()
        act()
        times.append((time.process_time() - began) * 1e3)
    return round(statistics.median(times), 1)


def floors(size: int) -> dict[str, float]:
    """CPU of one SHA-256 and of one norm with largest magnitude, over ``size`` bytes of float32 in one piece."""
    values = np.random.default_rng(1).standard_normal(size // 4, dtype=np.float32)
    return {
        "sha256_ms": cpu_ms(lambda: hashlib.sha256(values.data).digest()),
        "norm_float32_ms": cpu_ms(lambda: (np.dot(values, values), values.max(), values.min())),
    }


def bare_send_ms(size: int) -> float:
    """CPU of a process that sends ``size`` bytes over bare gRPC with mutual TLS: no hashing, no disk, no ledger."""
    with tempfile.TemporaryDirectory() as folder:
        root, port = Path(folder), free_port()
        key, certificate = floor.self_signed()
        (root / "key.pem").write_bytes(key)
        (root / "certificate.pem").write_bytes(certificate)
        line = [sys.executable, "-m", "bench.floor", folder, str(port), str(size), "1"]
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                server.stdout.readline()
                credentials = grpc.ssl_channel_credentials(certificate, key, certificate)
                with grpc.secure_channel(f"127.0.0.1:{port}", credentials, floor.OPTIONS) as channel:
                    up, payload = channel.stream_unary("/floor/Up"), floor.values(size)
                    return cpu_ms(lambda: up(floor.pieces(payload), wait_for_ready=True, timeout=120))
            finally:
                server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.evidence_cost", description=__doc__)
    parser.add_argument("--payload", choices=sorted(PAYLOADS), default="45 MB")
    parser.add_argument("--rounds", type=int, default=12)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wardround-cost-") as folder:
        found = measure(Path(folder), rounds=chosen.rounds, payload=PAYLOADS[chosen.payload])
    met = found["egress_cpu_ms"] <= TARGET_CPU_MS, found["ledger_fsyncs"] <= TARGET_SYNCS
    print(json.dumps({
        "evidence": "cost", "payload": chosen.payload, **found, **floors(PAYLOADS[chosen.payload]),
        "bare_send_ms": bare_send_ms(PAYLOADS[chosen.payload]),
        "target_cpu_ms": TARGET_CPU_MS, "target_fsyncs": TARGET_SYNCS, "cpu_met": met[0], "fsyncs_met": met[1],
        "load": round(os.getloadavg()[0], 1),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
