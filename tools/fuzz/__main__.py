"""Foreign bytes at every door of both programs: `python -m tools.fuzz [--minutes M | --cases N]`.

Each case is a valid example, changed by what it is, and is made again from (target, seed, number):
`python -m tools.fuzz --target NAME --seed S --case N`. Wanted is that each is taken, or refused by an error of ours
with a code, within a second of processor time and 64 MiB. Exit 1 on anything else, with the command that shows it.
"""

import argparse
import json
import sys
import tempfile
import time
import traceback
from itertools import count
from pathlib import Path

from tools.fuzz.engine import GROWTH, Runner, case, scratch
from tools.fuzz.pool import Job, Pool, Results
from tools.fuzz.targets import BY_NAME, TARGETS

SHARE = 60  # cases of a job, for each unit of its target's weight


def main() -> None:
    options = argparse.ArgumentParser(
        prog="python -m tools.fuzz", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    options.add_argument("--minutes", type=float, default=10.0, help="how long, without --cases (10)")
    options.add_argument("--cases", type=int, default=0, help="how many cases over all targets, however long it takes")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--target", action="append", default=[], help="only these; a name or its beginning")
    options.add_argument("--jobs", type=int, default=2, help="worker processes (2)")
    options.add_argument("--case", type=int, default=None, help="run this one case here, and show it")
    options.add_argument("--json", action="store_true", help="the results as JSON on stdout")
    options.add_argument("--markdown", action="store_true", help="the results as docs/evidence.md has them")
    options.add_argument("--list", action="store_true", help="the targets")
    options.add_argument(
        "--atheris", action="store_true", help="guided by coverage, one target; needs `pip install atheris`"
    )
    chosen = options.parse_args()
    targets = [one for one in TARGETS if not chosen.target or any(one.name.startswith(name) for name in chosen.target)]
    exact = [BY_NAME[name] for name in chosen.target if name in BY_NAME]
    targets = exact if exact and len(exact) == len(chosen.target) else targets
    if not targets:
        options.error(f"no target {', '.join(chosen.target)}; there is: {', '.join(sorted(BY_NAME))}")
    if chosen.list:
        print("\n".join(f"{one.name:28} {one.about}" for one in TARGETS))
        return
    if chosen.case is not None:
        sys.exit(show(targets[0].name, chosen.seed, chosen.case))
    if chosen.atheris:
        from tools.fuzz.guided import guided

        sys.exit(guided([one.name for one in targets], chosen.minutes, chosen.seed))
    weights = {one.name: one.weight for one in targets}
    began = time.monotonic()
    results = run(weights, chosen.seed, chosen.jobs, cases=chosen.cases, minutes=chosen.minutes)
    seconds = time.monotonic() - began
    if chosen.json:
        print(json.dumps(document(results, chosen.seed, seconds), indent=1))
    elif chosen.markdown:
        print(markdown(results))
    else:
        print(table(results, seconds))
    for finding in sorted(results.findings.values(), key=lambda one: one.target):
        times = results.times[finding.cause]
        print(
            f"\n{finding.kind} at `{finding.target}` ({times} cases): {finding.command()}\n{finding.detail}",
            file=sys.stderr,
        )
    sys.exit(1 if results.findings else 0)


def run(weights: dict[str, int], seed: int, jobs: int, *, cases: int, minutes: float) -> Results:
    """All targets in turn, each by its weight, until so many cases or minutes are over."""
    until = time.monotonic() + minutes * 60
    share = cases / sum(weights.values()) if cases else SHARE

    def every() -> "count[int]":
        return count(0)

    def planned() -> "list[Job]":
        """For a number of cases: each target's own number, in jobs of at most SHARE for each unit of weight."""
        made = []
        for name, weight in weights.items():
            wanted, step = max(1, round(share * weight)), SHARE * weight
            made += [Job(name, seed, first, min(step, wanted - first)) for first in range(0, wanted, step)]
        return sorted(made, key=lambda job: job.first)

    fixed = iter(planned()) if cases else None
    rounds = ((name, turn) for turn in every() for name in weights)

    def next_job() -> Job | None:
        if fixed is not None:
            return next(fixed, None)
        if time.monotonic() > until:
            return None
        name, turn = next(rounds)
        step = SHARE * weights[name]
        return Job(name, seed, turn * step, step)

    began = said = time.monotonic()

    known: set[tuple[str, str, str]] = set()

    def told(results: Results) -> None:
        nonlocal said
        now = time.monotonic()
        for finding in [one for cause, one in results.findings.items() if cause not in known]:
            known.add(finding.cause)
            print(f"found: {finding.kind} at `{finding.target}`: {finding.command()}", file=sys.stderr, flush=True)
        if now - said > 10:
            said = now
            print(
                f"{now - began:5.0f} s  {results.cases} cases, {results.cases / (now - began):.0f} a second, "
                f"{len(results.findings)} findings", file=sys.stderr, flush=True,
            )  # fmt: skip

    pool = Pool(jobs)
    try:
        return pool.run(next_job, told)
    finally:
        pool.close()


def table(results: Results, seconds: float) -> str:
    head = f"{'target':28} {'cases':>8} {'taken':>8} {'refused':>8} {'slowest':>9} {'memory':>8} {'kept':>8}  findings"
    lines = [head]
    for name, tally in sorted(results.tallies.items()):
        found = sum(times for cause, times in results.times.items() if cause[0] == name)
        lines.append(
            f"{name:28} {tally.cases:>8} {tally.taken:>8} {tally.refused:>8} {tally.slowest_ms:>6.0f} ms "
            f"{tally.grown / 2**20:>4.1f} MiB {tally.kept / 2**20:>4.1f} MiB  {found or ''}"
        )
    rate = results.cases / seconds if seconds else 0
    lines.append(
        f"{results.cases} cases of {len(results.tallies)} targets in {seconds:.0f} s ({rate:.0f} a second): "
        f"{len(results.findings)} findings"
    )
    return "\n".join(lines)


def markdown(results: Results) -> str:
    lines = ["| door | cases | taken | refused | slowest | most memory |", "|---|---|---|---|---|---|"]
    for name, tally in sorted(results.tallies.items()):
        lines.append(
            f"| {name} | {tally.cases:,} | {tally.taken:,} | {tally.refused:,} | {tally.slowest_ms:.0f} ms | "
            f"{tally.grown / 2**20:.1f} MiB |"
        )
    return "\n".join(lines)


def document(results: Results, seed: int, seconds: float) -> dict[str, object]:
    return {
        "seed": seed, "cases": results.cases, "seconds": round(seconds, 1), "limit_memory": GROWTH,
        "targets": {name: tally.document() for name, tally in sorted(results.tallies.items())},
        "findings": [
            {"target": one.target, "kind": one.kind, "where": one.where, "case": one.number,
             "times": results.times[one.cause],
             "command": one.command(), "detail": one.detail}
            for one in results.findings.values()
        ],
    }  # fmt: skip


def show(name: str, seed: int, number: int) -> int:
    """One case in this process: its bytes, and what became of it. 1 if it is a finding."""
    target = BY_NAME[name]
    with tempfile.TemporaryDirectory(dir=scratch()) as folder:
        door = target.opens(Path(folder))
        data = case(door, name, seed, number)
        print(f"{len(data)} bytes:\n{data[:6000]!r}{'…' if len(data) > 6000 else ''}\n")
        runner = Runner(target, door, seed)
        (finding, *_) = runner.run([number])
        tally = runner.tally
        print(f"taken {tally.taken}, refused {tally.refused} {tally.codes or ''}, {tally.slowest_ms:.1f} ms, "
              f"{tally.grown / 2**20:.1f} MiB")  # fmt: skip
        if finding is None:
            try:
                door.take(data)
            except BaseException:
                traceback.print_exc(limit=-4)
        else:
            print(f"{finding.kind}: {finding.detail}")
        door.close()
    return 0 if finding is None else 1


if __name__ == "__main__":
    main()
