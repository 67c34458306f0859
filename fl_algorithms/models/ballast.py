"""Logistic regression with ballast: the payload of a large network at the training cost of a small one."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fl_algorithms.settings.models import BallastSettings


class Ballast(nn.Module):
    """(n, inputs) float32 to logits (n, outputs). The ballast is drawn at random and never trained."""

    def __init__(self, inputs: int, outputs: int, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.head = nn.Linear(inputs, outputs)
        self.ballast = nn.ParameterList(nn.Parameter(torch.randn(shape), requires_grad=False) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x)
        return logits


def ballast(settings: BallastSettings, inputs: int, outputs: int) -> nn.Module:
    if settings.layout == "resnet18":
        shapes = list(resnet18_shapes())
    else:
        shapes = [(settings.bytes // (4 * settings.tensors),)] * settings.tensors if settings.bytes else []
    return Ballast(inputs, outputs, shapes)


def resnet18_shapes() -> Iterator[tuple[int, ...]]:
    """The 60 parameters of a ResNet-18 before its last layer, 11,176,512 elements; the head makes 62 tensors.

    He et al., Deep Residual Learning for Image Recognition, CVPR 2016, Table 1.
    """

    def convolution_and_norm(outputs: int, inputs: int, kernel: int) -> Iterator[tuple[int, ...]]:
        yield (outputs, inputs, kernel, kernel)
        yield (outputs,)
        yield (outputs,)

    yield from convolution_and_norm(64, 3, 7)
    inputs = 64
    for outputs in (64, 128, 256, 512):
        yield from convolution_and_norm(outputs, inputs, 3)
        yield from convolution_and_norm(outputs, outputs, 3)
        if outputs != inputs:
            yield from convolution_and_norm(outputs, inputs, 1)
        yield from convolution_and_norm(outputs, outputs, 3)
        yield from convolution_and_norm(outputs, outputs, 3)
        inputs = outputs
