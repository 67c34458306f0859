"""How far a study's current assignment is: `journal/STUDY.json`, and since then `journal/STUDY.now`.

Written before each step that a crash must not repeat. A step that nobody need know of after a loss of power is not
fsynced, so it has a file of its own, which is written over: a torn one is passed over, and the last step that was
fsynced stands whole. It names that by its digest, so that it counts for as long as no later step was fsynced.
"""

import hashlib
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import ConfigDict

from site_agent.state.codec import STRICT


@dataclass
class Journal:
    """One study's current assignment.

    Attributes:
        phase: "", training (from the download on), trained, held (waits for a person), uploading, decided.
        update: the trainer's file in staging; "" for a closing validation.
        update_digest: of the manifest of the gateway's own copy of it, in ``outgoing``.
        applied: whether the trainer has heard the decision.
        ended: the coordinator's last word on the study (finished, stopped, failed), once acted upon.
        declined: the code with which this site declined the assignment; ``declined_at`` says when.
        consent: the digest of the consent under which it was begun.
        own_loss: of the downloaded model, on this site's validation rows; "" where it is not known. It stays here.
        lowest_loss: the lowest of those before it in this study.
        untold: the round before this one, whose update was accepted: its trainer heard that, but may have forgotten it
            with the power until it keeps this round; 0 for none.
    """

    study: str
    revision: int = 0
    study_digest: str = ""
    round: int = 0
    attempt: int = 0
    kind: str = ""
    phase: str = ""
    base_digest: str = ""
    update: str = ""
    update_digest: str = ""
    num_examples: int = 0
    num_validation: int = 0
    metrics: dict[str, str] = field(default_factory=dict)
    upload_id: str = ""
    decision: str = ""
    applied: bool = True
    ended: str = ""
    declined: str = ""
    declined_at: str = ""
    consent: str = ""
    own_loss: str = ""
    lowest_loss: str = ""
    untold: int = 0

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


def step_after(kept: bytes, step: bytes) -> bytes:
    """The bytes of `STUDY.now`: ``step``, which was taken after the one in the file with the bytes ``kept``."""
    return b"%s %s\n%s" % (_digest(kept), _digest(step), step)


def taken_after(kept: bytes, now: bytes) -> bytes:
    """The step in ``now``, if it is whole and was taken after the one in ``kept``; else nothing."""
    line, _, step = now.rstrip(b"\n").partition(b"\n")
    return step if line == b"%s %s" % (_digest(kept), _digest(step)) else b""


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()
