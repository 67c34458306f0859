"""How many offers are kept, so that no coordinator fills this hospital's disk with them. No file, no network.

What somebody here approved is not counted and never makes room for anything: only a person lets it in.
"""

from collections.abc import Mapping
from dataclasses import dataclass

MAX_OFFERS = 64  # that nobody here approved
MAX_BYTES = 1 << 20  # of one; a network of 900 tensors takes a fifth of it
MAX_TOTAL_BYTES = 16 << 20  # of all that nobody here approved


@dataclass(frozen=True)
class Kept:
    """An offer on the disk. ``ended``: the coordinator says that its study is over."""

    bytes: int
    approved: bool
    ended: bool


def room_for(study: str, size: int, kept: Mapping[str, Kept]) -> tuple[list[str], str]:
    """The offers to drop so that one of ``size`` bytes can be kept, and why it cannot be kept, "" if it can.

    Args:
        kept: the offers on the disk, oldest first.
    """
    if size > MAX_BYTES:
        return [], f"it has {size} bytes, and an offer may have {MAX_BYTES}"
    if study in kept and kept[study].approved:
        return [], ""
    others = {name: offer.bytes for name, offer in kept.items() if name != study and not offer.approved}
    dropped = []
    for name in [name for name in others if kept[name].ended]:
        if _fits(size, others):
            break
        del others[name]
        dropped.append(name)
    if _fits(size, others):
        return dropped, ""
    return [], (
        f"{len(others)} offers of {sum(others.values())} bytes are kept that nobody approved, and at most {MAX_OFFERS} "
        f"of {MAX_TOTAL_BYTES} are"
    )


def _fits(size: int, others: Mapping[str, int]) -> bool:
    return len(others) < MAX_OFFERS and sum(others.values()) + size <= MAX_TOTAL_BYTES
