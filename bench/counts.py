"""Counts that do not depend on a machine's speed, held against the most that they may be: `python -m bench.counts`.

Two sites do rounds of 8 MiB of which the training does nothing. Counted for one round and site, after rounds that warm
everything up: passes over the model's bytes by reads and writes of files, fsyncs, calls that move bytes to and from
the network for each chunk, threads, and the bytes of each encoding for a parameter. `make bench-counts` ends with 1 if
one is beyond ``MOST``. Whoever makes a hot path cheaper writes the new number there.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bench.processes import role_processes, threads
from bench.rounds import study_of, tiny_tables
from tools.world import World
from wardround.tensors.encodings import Encoding
from wardround.tensors.manifests import CHUNK, TensorSpec

SITES, ROUNDS, MODEL_BYTES = ("alpha", "bravo"), 10, 8 * 2**20
SYNCS = ("fsync", "fdatasync", "sync_file_range", "syncfs")
NETWORK = ("sendmsg", "recvmsg", "sendto", "recvfrom")
PARAMETERS = 2**20

# The most that each may be, with room for what timing changes: reads and writes are of files, in models.
MOST: Mapping[str, float] = {
    "coordinator: models read, of files, for a site's round": 5.6,
    "coordinator: models written, to files, for a site's round": 2.2,
    "coordinator: fsyncs for a site's round": 9.5,
    "coordinator: network calls for a chunk": 6.0,
    "coordinator: threads": 24,
    "gateway: models read, of files, a round": 3.2,
    "gateway: models written, to files, a round": 2.4,
    "gateway: fsyncs a round": 4.6,
    "gateway: network calls for a chunk": 6.0,
    "gateway: threads": 17,
    "trainer: models read, of files, a round": 0.5,
    "trainer: models written, to files, a round": 3.7,
    "trainer: fsyncs a round": 9.5,
    "trainer: threads": 8,
    "bytes up for a parameter, float32": 4.0,
    "bytes up for a parameter, bfloat16": 2.0,
    "bytes up for a parameter, int8": 1.016,
    "bytes up for a parameter, top 10 %": 0.81,
}


def bytes_up() -> dict[str, float]:
    """The payload of an update for each parameter, by encoding."""
    spec = TensorSpec("weight", "F32", (PARAMETERS,))
    encodings = {"float32": Encoding(), "bfloat16": Encoding("bfloat16"), "int8": Encoding("int8"),
                 "top 10 %": Encoding("topk", fraction=0.1)}  # fmt: skip
    return {
        f"bytes up for a parameter, {name}": sum(part.bytes for part in encoding.sent((spec,))) / PARAMETERS
        for name, encoding in encodings.items()
    }


def of_rounds() -> dict[str, float]:
    """What each program does for one round of one site; fsyncs and network calls where strace is installed."""
    with tempfile.TemporaryDirectory(prefix="wardround-counts-") as folder, World(Path(folder) / "state") as world:
        world.start(tiny_tables(Path(folder) / "data", SITES), "y", SITES)
        _run(world, Path(folder), "warm", 2)
        for site in SITES:  # the draft is of the first study, and of as many bytes as that has
            policy = world.state / site / "policy.toml"
            text = policy.read_text().replace('studies = ["warm"]', 'studies = ["*"]')
            policy.write_text(re.sub(r"(?m)^((?:bytes|numbers)_per_day = )(\d+)", r"\g<1>9\2", text))
        roles = role_processes(world)
        name = _ready(world, Path(folder), "counted", ROUNDS)
        before = {pid: _io(pid) for pids in roles.values() for pid in pids}
        calls: dict[str, dict[str, int]] = {role: {} for role in roles}
        with _traced(roles, Path(folder), calls):
            world.ask_coordinator("study", "start", name)
            world.finish(name, timeout_s=600)
        found: dict[str, float] = {}
        for role, pids in roles.items():
            read, written = (sum(_io(pid)[at] - before[pid][at] for pid in pids) for at in (0, 1))
            per, of = len(SITES) * ROUNDS, "for a site's round" if role == "coordinator" else "a round"
            found[f"{role}: models read, of files, {of}"] = read / per / MODEL_BYTES
            found[f"{role}: models written, to files, {of}"] = written / per / MODEL_BYTES
            if calls[role]:
                found[f"{role}: fsyncs {of}"] = sum(calls[role].get(call, 0) for call in SYNCS) / per
                network = sum(calls[role].get(call, 0) for call in NETWORK)
                if role != "trainer":  # both ways
                    found[f"{role}: network calls for a chunk"] = network / per / (2 * MODEL_BYTES / CHUNK)
            found[f"{role}: threads"] = max(threads(pid) for pid in pids)
        return found


def beyond(found: Mapping[str, float]) -> list[str]:
    """What is more than it may be, a sentence each."""
    return [
        f"{name}: {value:.3g}, at most {MOST[name]:g} is expected; bench/counts.py has the table"
        for name, value in found.items()
        if value > MOST[name]
    ]


def main() -> None:
    found = bytes_up() | of_rounds()
    print(json.dumps({"bench": "counts", **{name: round(value, 3) for name, value in found.items()}}), flush=True)
    wrong = beyond(found)
    for sentence in wrong:
        print(f"beyond: {sentence}", file=sys.stderr)
    sys.exit(bool(wrong))


def _ready(world: World, folder: Path, name: str, rounds: int) -> str:
    study = folder / f"{name}.toml"
    study.write_text(study_of(name, SITES, rounds, f"bytes = {MODEL_BYTES}\ntensors = 2"))
    created = world.create_study(study)
    world.approve(created, SITES)
    return created


def _run(world: World, folder: Path, name: str, rounds: int) -> None:
    created = _ready(world, folder, name, rounds)
    world.ask_coordinator("study", "start", created)
    world.finish(created, timeout_s=600)


def _io(pid: int) -> tuple[int, int]:
    """Bytes that it has read and written by read and write calls: files and pipes, no sockets of gRPC."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["rchar"]), int(fields["wchar"])


@contextmanager
def _traced(roles: Mapping[str, list[int]], folder: Path, calls: dict[str, dict[str, int]]) -> Iterator[None]:
    """Count the calls of each role while the block lasts; nothing where strace is missing or may not."""
    if shutil.which("strace") is None:
        yield
        return
    tracers = []
    for role, pids in roles.items():
        attach = [word for pid in pids for word in ("-p", str(pid))]
        line = ["strace", "-f", "-c", "-e", f"trace={','.join((*SYNCS, *NETWORK))}", "-o", str(folder / role), *attach]
        tracer = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
        assert tracer.stderr is not None
        tracer.stderr.readline()  # "attached": from here on it counts
        tracers.append(tracer)
    try:
        yield
    finally:
        for tracer in tracers:
            tracer.send_signal(signal.SIGINT)
            tracer.wait(60)
    for role in roles:
        text = (folder / role).read_text() if (folder / role).exists() else ""
        rows = re.findall(r"^ *[0-9.]+ +[0-9.]+ +\d+ +(\d+) +(?:\d+ +)?(\w+)$", text, re.M)
        calls[role] = {name: int(count) for count, name in rows if name != "total"}


if __name__ == "__main__":
    main()
