"""The same doors under atheris, which looks for inputs that reach new lines: `python -m tools.fuzz --atheris`.

atheris is no dependency of ours (`pip install atheris`; it needs Python 3.11 to 3.13 on Linux). Each target runs in a
process of its own, for its share of the time; the mutators are ours, and atheris chooses what is worth changing again.
Our own modules are imported in there alone, under its instruments.
"""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

MISSING = "atheris is not installed, so nothing was run guided by coverage: `pip install atheris`, or leave it out"
OURS = ["wardround", "coordinator", "site_agent", "fl_algorithms"]
STOPPED = 77  # of atheris: an input made the target fail


def guided(names: list[str], minutes: float, seed: int) -> int:
    """Run each target for its share of the time. 1 if anything was found; 0 too where atheris is missing."""
    if importlib.util.find_spec("atheris") is None:
        print(MISSING, file=sys.stderr)
        return 0
    failed = 0
    for name in names:
        seconds = max(5, int(minutes * 60 / len(names)))
        line = [sys.executable, "-W", "ignore", "-m", "tools.fuzz.guided", name, str(seconds), str(seed)]
        done = subprocess.run(line, timeout=seconds + 300, check=False)
        print(f"{name:28} {seconds} s  {'nothing found' if done.returncode == 0 else f'ended with {done.returncode}'}")
        failed |= int(done.returncode != 0)
    return failed


def _one(name: str, seconds: int, seed: int) -> None:
    import atheris

    with atheris.instrument_imports(include=OURS):
        from tools.fuzz.engine import Runner, scratch
        from tools.fuzz.targets import BY_NAME
    target = BY_NAME[name]
    with tempfile.TemporaryDirectory(dir=scratch()) as root:
        corpus = Path(root) / "corpus"
        corpus.mkdir()
        door = target.opens(Path(root))
        for number, example in enumerate(door.seeds):
            (corpus / str(number)).write_bytes(example)
        runner = Runner(target, door, seed)
        runner.ready()

        def take(data: bytes) -> None:
            finding = runner.judge(-1, data)
            if finding is not None:
                kept = Path(tempfile.gettempdir()) / f"wardround-fuzz-{name}.bin"
                kept.write_bytes(data)
                print(f"{finding.kind} at `{name}`: {finding.detail}\nthe input is in {kept}", file=sys.stderr)
                raise SystemExit(STOPPED)

        def mutate(data: bytes, size: int, drawn: int) -> bytes:
            return door.mutate(Random(drawn), bytes(data))[:size]

        line = ["fuzz", f"-max_total_time={seconds}", f"-seed={seed}", "-max_len=65536", "-verbosity=0", str(corpus)]
        atheris.Setup(line, take, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    _one(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
