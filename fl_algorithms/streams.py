"""Random streams by name, so that a killed round replays exactly and adding a method changes no other's numbers.

Every draw belongs to one (seed, site, round, purpose). No stream is shared and none depends on how often another was
used, on the order of the sites, or on how many times a round was attempted.
"""

import hashlib

from wardround.signing import canonical


def stream_seed(seed: int, site: str, round_number: int, purpose: str) -> int:
    """The seed of one stream, 0 to 2**63 - 1.

    Args:
        seed: the study's.
        site: its name; "" for what all sites have in common.
        round_number: 0 for what happens once, before the first round.
        purpose: "init", "split", "shuffle", "noise", or a method's own word.
    """
    digest = hashlib.sha256(canonical.dumps([seed, site, round_number, purpose])).digest()
    return int.from_bytes(digest[:8], "big") >> 1
