"""Many rounds in a row with faults, and what grows: `python -m tools.evidence_soak`.

Two sites train a tiny study through a line that is cut now and then; a trainer's worker is killed now and then. The
coordinator and the gateways run through. Every so many rounds their memory, descriptors and threads are noted, the
bytes of the state directories, and the time of a round. The first tenth is warming up. Prints a line for each note and
a JSON line with the drift between the first and the last third of the rest; exits 1 if memory drifted by more than 5 %,
descriptors or the time of a round by more than their bound, or the last model is not that of the same study in the lab.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bad_line import BadLine
from tools.faults import Disturbed, Plan, Stuck, Template, lab_digest, resources, size_of
from tools.world import free_port

MEMORY, DESCRIPTORS, SLOWER = 0.05, 4, 1.25
UNITS = ("coordinator", "gateway:alpha", "gateway:bravo")


@dataclass(frozen=True)
class Note:
    """How things stood at a round. ``seconds``: of a round, in the mean since the note before. The coordinator's report
    would say each round's, and takes memory for all of them."""

    round: int
    seconds: float
    held: dict[str, dict[str, int]]
    bytes: dict[str, int]


def soak(folder: Path, rounds: int, each: int, stuck_s: float = 300) -> tuple[list[Note], list[str], dict[str, int]]:
    """A study with a note after ``each`` rounds; what is wrong; and how many faults there were."""
    plan = Plan(sites=2, rounds=rounds)
    template = Template(folder, plan)
    study = plan.study_names[0]
    notes: list[Note] = []
    faults = {"cuts": 0, "workers": 0}
    with Disturbed(template.copy(), plan) as world:
        world.listen = f"127.0.0.1:{free_port()}"
        world.poll_s = 0.5
        with BadLine(world.listen, listen=template.address) as line:
            world.begin()
            done, since = 0, time.monotonic()

            def disturb() -> None:
                nonlocal done, since
                status = world.look(study)
                if status is None or status.round < done + each:
                    return
                now = time.monotonic()
                notes.append(note(world, status.round, (now - since) / (status.round - done)))
                print(json.dumps(vars(notes[-1])), file=sys.stderr, flush=True)
                done, since = status.round, now
                line.cut()
                faults["cuts"] += 1
                if len(notes) % 4 == 0:
                    faults["workers"] += world.kill("worker:alpha")

            try:
                world.until(study, lambda status: False, stuck_s=stuck_s, act=disturb)
                digests = {row.round: str(row.model_digest) for row in world.report(study).rounds_closed}
                wrong = world.judge(study, digests)
                if digests[rounds] != lab_digest(template):
                    wrong.append("the last model is another than that of the same study in the lab")
            except (Stuck, TimeoutError) as stuck:
                wrong = [str(stuck)]
    return notes, wrong, faults


def note(world: Disturbed, number: int, seconds: float) -> Note:
    folders = {"coordinator": world.coordinator_state, "alpha": world.state / "alpha", "logs": world.logs}
    return Note(
        number, seconds, {unit: resources(world.pid(unit)) for unit in UNITS},
        {name: size_of(place) for name, place in folders.items()},
    )  # fmt: skip


def drift(notes: Sequence[Note]) -> dict[str, Any]:
    """What changed between the first and the last third, after the first tenth; bytes a round over all of that."""
    steady = notes[max(1, len(notes) // 10) :]
    third = max(1, len(steady) // 3)
    early, late = steady[:third], steady[-third:]

    def middle(part: Sequence[Note], value: Callable[[Note], float]) -> float:
        return statistics.median(value(one) for one in part)

    found: dict[str, Any] = {"rounds": notes[-1].round, "seconds": {}}
    found["seconds"] = [round(middle(part, lambda one: one.seconds), 3) for part in (early, late)]
    for unit in UNITS:
        for key in ("kib", "descriptors", "threads"):
            values = [middle(part, lambda one, unit=unit, key=key: one.held[unit][key]) for part in (early, late)]
            found[f"{unit} {key}"] = values
    rounds = steady[-1].round - steady[0].round
    for name in steady[0].bytes:
        found[f"{name} bytes a round"] = round((steady[-1].bytes[name] - steady[0].bytes[name]) / max(1, rounds))
    return found


def verdict(found: dict[str, Any]) -> list[str]:
    """What drifted beyond its bound."""
    wrong = []
    early, late = found["seconds"]
    if late > SLOWER * early:
        wrong.append(f"a round took {early} s and takes {late} s")
    for unit in UNITS:
        before, after = found[f"{unit} kib"]
        if after > (1 + MEMORY) * before:
            wrong.append(f"{unit} had {before} KiB and has {after}")
        before, after = found[f"{unit} descriptors"]
        if after > before + DESCRIPTORS:
            wrong.append(f"{unit} had {before} descriptors and has {after}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.evidence_soak", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--each", type=int, default=50, help="rounds between two notes")
    chosen = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="wardround-soak-") as folder:
        notes, wrong, faults = soak(Path(folder), chosen.rounds, chosen.each)
    found = drift(notes)
    wrong += verdict(found)
    print(json.dumps({
        "evidence": "soak", **found, **faults, "load": os.getloadavg()[2], "wall_s": round(time.monotonic() - began),
        "wrong": wrong,
    }))  # fmt: skip
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
