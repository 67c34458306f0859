"""How bright a pixel is for a network: windows, and each image's own mean and deviation. No torch.

The definitions are those of MONAI's ``ScaleIntensityRange``, ``ScaleIntensityRangePercentiles`` and
``NormalizeIntensity`` (with ``clip``, ``channel_wise`` and ``nonzero``); the tests hold each against it.
"""

import numpy as np
from numpy.typing import NDArray

from fl_algorithms.settings.images import PixelSettings, Window
from fl_algorithms.tasks.images.decoding import Array

SMALLEST = 1e-6  # a deviation below it counts as none: the image is only centred


def changes(settings: PixelSettings) -> bool:
    """Whether the study wants anything of the below, so that images are kept as float32."""
    return settings.window is not None or settings.normalize != "site"


def adjusted(array: Array, settings: PixelSettings) -> Array:
    """``array`` (*sides, channels) on the scale of ``files.unit``, in the study's window and normalized: float32."""
    out = array if settings.window is None else windowed(array, settings.window)
    if settings.normalize == "site":
        return out
    return normalized(out, foreground=settings.normalize == "foreground")


def windowed(array: Array, window: Window) -> NDArray[np.float32]:
    """Of what lies in the window 0 to 1, below 0, above 1. A window without width is 0 throughout."""
    if window.percentiles is not None:
        low, high = (float(edge) for edge in np.percentile(array, window.percentiles))
    else:
        assert window.center is not None
        assert window.width is not None
        low, high = window.center - window.width / 2, window.center + window.width / 2
    out = array.astype(np.float32)
    if high <= low:
        return np.zeros_like(out)
    out -= np.float32(low)
    out /= np.float32(high - low)
    return np.clip(out, 0, 1, out=out)


def normalized(array: Array, *, foreground: bool) -> NDArray[np.float32]:
    """Each channel minus its mean, over its deviation; of its pixels other than 0 alone, if ``foreground``."""
    out = array.astype(np.float32)
    for channel in range(out.shape[-1]):
        plane = out[..., channel]
        chosen = plane != 0 if foreground else np.ones(plane.shape, dtype=bool)
        values = plane[chosen].astype(np.float64)
        if values.size:
            deviation = float(values.std())
            plane[chosen] = (values - values.mean()) / (deviation if deviation > SMALLEST else 1.0)
    return out
