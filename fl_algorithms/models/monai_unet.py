"""MONAI's U-Net of images and volumes, divided: ``body`` is all below its last layer up, ``head`` that layer.

The body's features have half the input's sides, so the head is what brings them to the full size: a transposed
convolution to the logits and, with residual units, a norm and one more convolution.

Kerfoot, Clough, Oksuz, Lee, King, Schnabel, Left-Ventricle Quantification Using Residual U-Net, STACOM 2018.
https://doi.org/10.1007/978-3-030-12029-0_40
"""

from math import gcd
from typing import Any

import torch
from torch import nn

from fl_algorithms.models.adapters import BodyHead
from fl_algorithms.models.vision import GROUPS
from fl_algorithms.settings.vision import MonaiUnetSettings
from wardround.errors import NeedsPerson


def monai_unet(settings: MonaiUnetSettings, shape: tuple[int, ...], outputs: int) -> nn.Module:
    """(n, channels, *size) float32 to logits (n, outputs, *size).

    Raises:
        NeedsPerson: MONAI is not installed.
    """
    try:
        with torch.random.fork_rng(devices=[]):  # what its import draws, if anything, is not the study's
            from monai.networks.nets.unet import UNet
    except ImportError:
        raise NeedsPerson(
            "model `monai_unet` in [model]: MONAI is not installed", hint="`pip install 'wardround[monai]'`"
        ) from None
    norm: Any = None if settings.norm == "none" else settings.norm
    if settings.norm == "group":
        # One number of groups for all layers, of which the last norm, with residual units, is on the logits.
        judged = [outputs] if settings.residual_units else []
        norm = ("group", {"num_groups": gcd(GROUPS, *settings.widths, *judged)})
    whole = UNet(
        spatial_dims=len(shape) - 1,
        in_channels=shape[0],
        out_channels=outputs,
        channels=settings.widths,
        strides=[2] * (len(settings.widths) - 1),
        num_res_units=settings.residual_units,
        norm=norm,
        dropout=settings.dropout,
    )
    down, below, up = whole.model
    return BodyHead(nn.Sequential(down, below), up)
