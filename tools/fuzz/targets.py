"""Every door by name. A new one is a ``Target`` in one of the ``*_doors`` modules."""

import os
import signal
from pathlib import Path

from tools.fuzz import coordinator_doors, file_doors, secure_doors, site_doors
from tools.fuzz.engine import Door, Target
from tools.fuzz.mutate import BYTES

TARGETS: list[Target] = [
    *coordinator_doors.TARGETS, *site_doors.TARGETS, *secure_doors.TARGETS, *file_doors.TARGETS
]  # fmt: skip
BY_NAME = {target.name: target for target in TARGETS}


def _death(folder: Path) -> Door:
    """A door whose third case ends its process, as a fault in a library's C code would."""
    taken = [0]

    def take(data: bytes) -> None:
        taken[0] += 1
        if taken[0] == 3 and not (folder.parent.parent / "died").exists():
            (folder.parent.parent / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return Door([b"a"], BYTES, take)


if os.environ.get("WARDROUND_FUZZ_PLANTED"):  # for the fuzzer's own tests
    BY_NAME["planted.death"] = Target("planted.death", "a fault that was planted", _death)
