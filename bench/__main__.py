"""`python -m bench`: the measurements that are asked for as JSON lines, and a table of them all.

Without arguments: the cost of a local step, of a table and of images, an idle agent, and rounds of 4 sites with 152
parameters and ResNet-18, as CI runs it. ``--full`` is what docs/performance.md has: more sites and sizes, encodings,
simulated sites, plots.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import line, rounds, sites, starts, step_cost
from bench.peers import flower
from bench.table import plots, table

Measured = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--payloads", nargs="+", choices=list(rounds.PAYLOADS), default=["152", "resnet18"])
    parser.add_argument("--sites", nargs="+", type=int, default=[4], help="agents of real processes, at most 16")
    parser.add_argument("--rounds", type=int, default=12, help="of each study; the first two are not counted")
    parser.add_argument("--crowds", nargs="*", type=int, default=[], help="simulated sites on one coordinator")
    parser.add_argument("--connected", nargs="*", type=int, default=[], help="sites that are connected and idle")
    parser.add_argument("--encodings", nargs="*", default=[], help="of the updates, with the last of the payloads")
    parser.add_argument(
        "--starts", action="store_true", help="how long every command's help and a service's start take"
    )
    parser.add_argument("--secure", action="store_true", help="each round with secure aggregation too, in the same run")
    parser.add_argument("--line", action="store_true", help="how full a line of 10 Mbit/s is, whose answers take 0.3 s")
    parser.add_argument("--peers", action="store_true", help="Flower beside it, in the same run")
    parser.add_argument("--full", action="store_true", help="everything that docs/performance.md has")
    parser.add_argument("--out", type=Path, help="folder for results.jsonl, and plots where matplotlib is installed")
    options = parser.parse_args()
    if options.full:
        options.payloads = list(rounds.PAYLOADS)
        options.sites, options.crowds, options.connected = [2, 4, 8, 16], [4, 16, 64], [1000]
        options.encodings = ["bfloat16", "int8", "topk"]
    found = []
    for one in _measured(options):
        print(json.dumps(one), flush=True)
        found.append(one)
    print(table(found), flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))
        plots(found, options.out)


def _measured(options: argparse.Namespace) -> Iterator[Measured]:
    if options.starts or options.full:
        yield from starts.measure()
    yield from step_cost.measure()
    yield rounds.idle()
    for payload in options.payloads:
        large = payload in ("256 MiB", "1 GiB")
        for count in options.sites[:1] if large else options.sites:
            for secure in (False, True) if options.secure else (False,):
                yield rounds.measure(payload, count, 5 if large else options.rounds, secure=secure)
        if options.peers and not large:
            yield from flower.measured(payload, options.sites[0], rounds=4)
    for encoding in options.encodings:
        yield rounds.measure("resnet18", options.sites[0], options.rounds, encoding)
    for count in options.crowds:
        yield sites.measure(count, options.rounds)
    for count in options.connected:
        yield sites.connected(count)
    if options.line or options.full:
        yield line.measure("resnet18")


if __name__ == "__main__":
    main()
