"""Our commands, each in a process of its own; ``forked`` says how that costs little."""

import subprocess
import sys
from pathlib import Path

BIN = Path(sys.executable).parent


def run(
    program: str, *line: str | Path, stdin: str = "", timeout: float = 60, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command of ours to its end.

    Args:
        program: "coordinator" or "site-agent".
        timeout: in seconds; then it is killed.
        env: its whole environment; this process's without.

    Raises:
        subprocess.TimeoutExpired: it did not end in time.
    """
    words = [str(BIN / program), *map(str, line)]
    return subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=timeout, env=env, check=False)
