"""What a party trains with: its own choice, in no study. No torch."""

from dataclasses import dataclass
from typing import Literal

DeviceName = Literal["auto", "cpu", "cuda"]
MOST_WORKERS = 64


@dataclass(frozen=True)
class Hardware:
    """``device``: "auto" is CUDA where there is a usable one. ``workers``: processes that read coming batches."""

    device: DeviceName = "cpu"
    workers: int = 0

    @property
    def options(self) -> list[str]:
        """As a command line has it; [] for what every command does anyway."""
        words = ["--device", self.device] if self.device != "cpu" else []
        return [*words, *(["--workers", str(self.workers)] if self.workers else [])]
