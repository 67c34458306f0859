"""What the readers of foreign files have in common: how they refuse."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from numpy.typing import NDArray

from wardround.errors import BadData, NeedsPerson

Array = NDArray[Any]
Result = TypeVar("Result")
AGAIN = "export or copy it again"
TOO_LARGE = "is it meant? then the study's author raises `max_pixels` in [task]; else take the file out"


def guarded(path: Path, decoded: Callable[[], Result]) -> Result:
    """Decoders of foreign bytes fail in many ways; only our own errors leave here, and nothing that they quote."""
    try:
        return decoded()
    except (BadData, NeedsPerson):
        raise
    except MemoryError:
        raise BadData(f"{path}: not enough memory to decode it") from None
    except Exception as error:
        raise BadData(f"{path}: damaged or cut off ({type(error).__name__})", hint=AGAIN) from None


def require_pixels(path: Path, shape: tuple[int, ...], max_pixels: int) -> None:
    """Raises BadData: a header says that there are more than ``max_pixels``."""
    if math.prod(shape) > max_pixels:
        sides = " x ".join(map(str, shape))
        raise BadData(f"{path}: its header says {sides} pixels, the study takes {max_pixels:,}", hint=TOO_LARGE)
