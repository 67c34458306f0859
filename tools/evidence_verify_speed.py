"""Time and memory of `site-agent audit verify` over a long ledger: `python -m tools.evidence_verify_speed`.

The ledger is made as an agent makes it: a third of the lines are uploads, a third receipts, two signed heads for each
upload. The command runs as a process of its own; its memory is the largest resident set that the kernel saw.
"""

import argparse
import os
import resource
import subprocess
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
        Made(chosen.lines).write(Path(folder) / "ledger")
        size = sum(file.stat().st_size for file in (Path(folder) / "ledger").iterdir())
        line = [sys.executable, "-m", "site_agent.cli", "audit", "verify", "--ledger", str(Path(folder) / "ledger")]
        began = time.monotonic()
        done = subprocess.run(line, capture_output=True, text=True, env=os.environ)
        took = time.monotonic() - began
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(done.stdout.strip() or done.stderr.strip())
    print(f"{chosen.lines} lines, {size / 2**20:.0f} MiB: {took:.1f} s, {largest:.0f} MiB of memory")
    sys.exit(0 if done.returncode == 0 and took <= chosen.seconds and largest <= chosen.mebibytes else 1)


if __name__ == "__main__":
    main()
