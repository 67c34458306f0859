"""A disk that is full in the middle of a round, on either side: `python -m tools.evidence_disk`.

Two sites train a long study. The state directory of one side lies on a small file system of its own (a tmpfs, which
needs the right to mount one). Between two random instants it is filled until so many bytes are left, and then there is
room again. What has ended is started again, as a service manager would. The study must go on without any other help:
rounds must have the models of an undisturbed run, no receipted update may be missing, and both verifiers must accept
every ledger. Prints a line for each time and a JSON line at the end; exits 1 if something came out otherwise.
"""

import argparse
import contextlib
import errno
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tools.faults import Disturbed, Plan, Stuck, Template, seeds, size_of, undisturbed

SIDES = {"coordinator": "coordinator", "site": "alpha"}
ROOM = 160 * 1024 * 1024  # beside what the state needs at rest; a coordinator keeps 64 MiB free of updates
LEFT = (0, 4096, 16 * 1024, 64 * 1024)
FULL_S = (0.5, 4.0)
PAUSE_S = (0.3, 2.0)
PIECE = b"\0" * 65536


@dataclass
class Tally:
    """How often a disk was full, and what came of it."""

    times: int = 0
    exits: Counter[str] = field(default_factory=Counter)
    paused: int = 0
    wrong: list[str] = field(default_factory=list)


@contextlib.contextmanager
def small_disk(folder: Path, room: int = ROOM) -> Iterator[None]:
    """Move what is in ``folder`` onto a file system with ``room`` bytes beside it.

    Raises:
        PermissionError: this user may not mount one.
    """
    aside = folder.with_name(f"{folder.name}.aside")
    folder.rename(aside)
    folder.mkdir()
    size = size_of(aside) + room
    line = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "wardround", str(folder)]
    if subprocess.run(line, capture_output=True, check=False).returncode:
        raise PermissionError("a tmpfs cannot be mounted here")
    try:
        shutil.copytree(aside, folder, symlinks=True, dirs_exist_ok=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def available() -> bool:
    """Whether this user may mount a tmpfs."""
    with tempfile.TemporaryDirectory() as folder:
        disk = Path(folder) / "disk"
        disk.mkdir()
        try:
            with small_disk(disk):
                return True
        except PermissionError:
            return False


def fill(folder: Path, left: int) -> None:
    """Leave about ``left`` bytes in the file system of ``folder``."""
    with (folder / "ballast").open("ab", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(PIECE)
        for size in (4096, 1):
            try:
                while True:
                    file.write(PIECE[:size])
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
        file.truncate(max(0, file.tell() - left))


def filled(
    template: Template, digests: Mapping[int, str], side: str, times: int, seed: int, kept: Path | None = None
) -> Tally:
    """Fill the disk of ``side`` so many times, in as many federations as that takes."""
    study = template.plan.study_names[0]
    tally = Tally()
    for number, chance in seeds(seed):
        if tally.times >= times or tally.wrong:
            return tally
        copy = template.copy()
        with small_disk(copy / SIDES[side]), Disturbed(copy, template.plan) as world:
            try:
                world.begin()
                world.until(study, lambda status: status.round >= 1)
                _fill_and_free(world, side, study, chance, times, tally)
                world.until(study, lambda status: False)
                wrong = world.judge(study, digests)
            except (Stuck, TimeoutError) as stuck:
                wrong = [str(stuck)]
            for unit, code in world.seen.exits:
                tally.exits[f"{unit} {code}"] += 1
            tally.paused += world.seen.paused
            print(f"{side}, federation {number}, {tally.times} times: {'; '.join(wrong) or 'whole'}", file=sys.stderr)
            tally.wrong += wrong
            if wrong and kept is not None:
                print(f"kept in {world.retain(kept)}", file=sys.stderr, flush=True)
    return tally


def _fill_and_free(world: Disturbed, side: str, study: str, chance: random.Random, times: int, tally: Tally) -> None:
    """Fill and free the disk at random instants until the study nears its end."""
    folder = world.state / SIDES[side]
    while tally.times < times:
        _pass(world, chance.uniform(*PAUSE_S))
        status = world.look(study)
        if status is not None and status.round > world.plan.rounds - 10:
            return
        fill(folder, chance.choice(LEFT))
        _pass(world, chance.uniform(*FULL_S))
        (folder / "ballast").unlink()
        tally.times += 1
        before = world.until(study, lambda status: True).round
        world.until(study, lambda status, before=before: status.round > before)


def _pass(world: Disturbed, seconds: float) -> None:
    """Let time pass; what ends is started again."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        world.tend()
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.evidence_disk", description=__doc__)
    parser.add_argument("--side", choices=sorted(SIDES), default="coordinator")
    parser.add_argument("--times", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="copy the state of what failed here")
    chosen = parser.parse_args()
    if not available():
        raise SystemExit("error: no tmpfs can be mounted here\nhint: run it as root, or in a container that may mount")
    with tempfile.TemporaryDirectory(prefix="wardround-disk-") as folder:
        template = Template(Path(folder), Plan(sites=2, rounds=100))
        tally = filled(template, undisturbed(template), chosen.side, chosen.times, chosen.seed, chosen.keep)
    print(json.dumps({"evidence": "disk", "side": chosen.side, "seed": chosen.seed, **vars(tally)}))
    sys.exit(bool(tally.wrong))


if __name__ == "__main__":
    main()
