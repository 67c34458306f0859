"""Time and memory of `site-agent audit verify` over a long ledger: `python -m tools.evidence_verify_speed`.

The ledger is made as an agent makes it: a third of the lines are uploads, a third receipts, two signed heads for each
upload. It is verified with the coordinator's copy of the receipts.
The command runs as a process of its own; its memory is the largest resident set that the kernel saw.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

from tools.evidence_tamper import Made


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--lines", type=int, default=100_000)
    options.add_argument("--seconds", type=float, default=10.0)
    options.add_argument("--mebibytes", type=float, default=256.0)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # in a process of its own: a child starts with its parent's size as its largest
        maker = multiprocessing.get_context("spawn").Process(target=make, args=(chosen.lines, Path(folder) / "ledger"))
        maker.start()
        maker.join()
        size = sum(file.stat().st_size for file in (Path(folder) / "ledger").iterdir())
        line = [sys.executable, "-m", "site_agent.cli.main", "audit", "verify",
                "--ledger", str(Path(folder) / "ledger"),
                "--receipts", str(Path(folder) / "receipts.jsonl")]  # fmt: skip
        began = time.monotonic()
        pid = os.posix_spawn(sys.executable, line, os.environ)
        _, status, used = os.wait4(pid, 0)
        took = time.monotonic() - began
    code = os.waitstatus_to_exitcode(status)
    largest = used.ru_maxrss / 1024
    cpu = used.ru_utime + used.ru_stime
    spent = f"{took:.1f} s ({cpu:.1f} s of CPU), {largest:.0f} MiB of memory"
    print(f"{chosen.lines} lines, {size / 2**20:.0f} MiB: {spent}")
    sys.exit(0 if code == 0 and took <= chosen.seconds and largest <= chosen.mebibytes else 1)


def make(lines: int, folder: Path) -> None:
    made = Made(lines)
    made.write(folder)
    (folder.parent / "receipts.jsonl").write_bytes(made.copy())


if __name__ == "__main__":
    main()
