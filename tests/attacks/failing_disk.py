"""A program whose disk fails once: its N-th fsync of a file whose path ends with PART gives EIO, and does not write.

    python -m tests.attacks.failing_disk site-agent PART N ARGUMENTS...
    python -m tests.attacks.failing_disk coordinator PART N ARGUMENTS...

PART "" is any file. N = 0: it never fails, and its last line on stderr says how many fsyncs there were.
"""

import atexit
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path


def start(program: str, part: str, nth: int, log: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    """The program as a child; its stderr goes to ``log``."""
    line = [sys.executable, "-m", "tests.attacks.failing_disk", program, part, str(nth), *map(str, arguments)]
    with log.open("w") as errors:
        return subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True)


def main() -> None:
    program, part, nth = sys.argv[1], sys.argv[2], int(sys.argv[3])
    lock, real, count = threading.Lock(), os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal count
        if Path(f"/proc/self/fd/{descriptor}").readlink().as_posix().endswith(part):
            with lock:
                count += 1
                fails = count == nth
            if fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    os.fsync = fsync
    if nth == 0:
        atexit.register(lambda: print(f"fsyncs {count}", file=sys.stderr))
    sys.argv = [program, *sys.argv[4:]]
    if program == "coordinator":
        from coordinator.cli.main import main as run
    else:
        from site_agent.cli.main import main as run
    run()


if __name__ == "__main__":
    main()
