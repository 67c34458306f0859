"""How long to wait before a call to the coordinator is tried again."""

import random
from collections.abc import Iterator

TRIES_IN_TROUBLE = 8  # some 30 s: a coordinator that fails at one thing must not keep a site from its other studies

_RANDOM = random.SystemRandom()


def backoff(shortest_s: float = 0.2, longest_s: float = 10.0) -> Iterator[float]:
    """Seconds before each next try, without end: doubling, within a quarter, so that sites do not come back in step."""
    wait_s = shortest_s
    while True:
        yield wait_s * _RANDOM.uniform(0.75, 1.25)
        wait_s = min(wait_s * 2, longest_s)
