"""How full a long slow line is while one site takes a model down and sends its update up, over real processes.

The site's agent reaches the coordinator through a proxy that passes so many bytes a second in each direction, and each
of them later by half of the time that an answer takes. The training does nothing.
"""

import socket
import tempfile
import threading
import time
from bisect import bisect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from bench.rounds import NAMES, PAYLOADS, study_of, tiny_tables
from tools.bad_line import BadLine
from tools.world import World, free_port

MEGABITS, ANSWER_S = 10.0, 0.3
LOOK_S = 0.05
BARE_S = 10.0  # how long a plain connection sends
QUIET = 0.05  # of the line's rate, over a second: under it nothing long is on its way
Sample = tuple[float, int]  # seconds, and the bytes that have passed until then


def measure(payload: str, rounds: int = 1, megabits: float = MEGABITS, answer_s: float = ANSWER_S) -> dict[str, Any]:
    """Shares of the line's rate in the longest transfer of each direction, from its first byte to its last.

    ``bare_share``: that of a plain TCP connection over such a line, in the same run.
    """
    names, rate = NAMES[:1], megabits * 1e6 / 8
    with tempfile.TemporaryDirectory(prefix="wardround-bench-") as folder:
        root = Path(folder)
        study = root / "study.toml"
        study.write_text(study_of("bench", names, rounds, PAYLOADS[payload]))
        with World(root / "state") as world:
            world.listen = f"127.0.0.1:{free_port()}"
            with BadLine(world.listen, listen=world.address, delay_s=answer_s / 2, bytes_a_second=rate) as line:
                world.start(tiny_tables(root / "data", names), "y", names)
                name = world.create_study(study)
                world.approve(name, names)
                with Watch(line) as watch:
                    world.ask_coordinator("study", "start", name)
                    world.finish(name, timeout_s=1200)
    up, down = (longest(watch.samples[direction], rate) for direction in ("up", "down"))
    return {
        "bench": "line", "payload": payload, "megabits": megabits, "answer_s": answer_s,
        "up_share": round(up[1] / up[0] / rate, 3), "down_share": round(down[1] / down[0] / rate, 3),
        "bare_share": round(_bare(rate, answer_s) / rate, 3), "up_s": round(up[0], 1), "down_s": round(down[0], 1),
    }  # fmt: skip


def _bare(rate: float, answer_s: float) -> float:
    """Bytes a second that one TCP connection moves over such a line, from its first byte to its last."""
    size = int(BARE_S * rate)
    with socket.create_server(("127.0.0.1", 0)) as server:
        to = f"127.0.0.1:{server.getsockname()[1]}"
        with BadLine(to, delay_s=answer_s / 2, bytes_a_second=rate) as line:
            host, _, port = line.address.rpartition(":")
            with socket.create_connection((host, int(port))) as near:
                far, _ = server.accept()
                sender = threading.Thread(target=near.sendall, args=(bytes(size),))
                with far:
                    sender.start()
                    left = size - len(far.recv(1))
                    began = time.monotonic()
                    while left:
                        left -= len(far.recv(min(left, 1 << 16)))
                    seconds = time.monotonic() - began
                sender.join()
    return size / seconds


class Watch:
    """Looks, while it is open, at what a line has carried."""

    def __init__(self, line: BadLine) -> None:
        self.samples: dict[Literal["up", "down"], list[Sample]] = {"up": [], "down": []}
        self._line = line
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch")

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            now = time.monotonic()
            for direction, samples in self.samples.items():
                samples.append((now, self._line.carried[direction]))


def longest(samples: Sequence[Sample], rate: float) -> tuple[float, int]:
    """Seconds and bytes of the stretch that moved most, in which no second was quiet.

    Args:
        rate: bytes a second.
    """
    times = [now for now, _ in samples]
    best, begins = (1.0, 0), None
    for index, (now, carried) in enumerate(samples):
        later = bisect(times, now + 1)
        is_quiet = later == len(times) or samples[later][1] - carried < QUIET * rate * (times[later] - now)
        if begins is None and not is_quiet:
            begins = index
        elif begins is not None and is_quiet:
            best = max(best, _stretch(samples, begins, index), key=lambda one: one[1])
            begins = None
    return best


def _stretch(samples: Sequence[Sample], begins: int, quiet: int) -> tuple[float, int]:
    """From the last sample before the first byte to the first with the last one; a quiet second begins at ``quiet``."""
    begins = max(index for index in range(begins, quiet) if samples[index][1] == samples[begins][1])
    ends = next(index for index in range(begins, quiet + 1) if samples[index][1] == samples[quiet][1])
    return samples[ends][0] - samples[begins][0], samples[ends][1] - samples[begins][1]
