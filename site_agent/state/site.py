"""Who this installation is: `identity/site.json`."""

from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

from site_agent.state.codec import STRICT


@dataclass(frozen=True)
class Site:
    """What the enrolment answered. ``receipt_key`` is hex; ``renew_after_s`` is Unix time."""

    site: str
    federation: str
    address: str
    receipt_key: str
    authority_fingerprint: str
    renew_after_s: int

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
