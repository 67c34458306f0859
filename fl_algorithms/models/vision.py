"""Classifiers of images. Each is a ``body`` that ends in the mean over the image, and a linear ``head``.

The residual networks are built here, so that their width can be chosen; the names inside their bodies are those of
torchvision. The others are torchvision's own, with a first layer for small images where one is wanted. What sets them
apart from the published networks is the head: a linear layer on the pooled features, also where the paper has more
(VGG) or a convolution (SqueezeNet).
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from math import gcd

import torch.nn.functional as F  # noqa: N812  its name everywhere
from torch import Tensor, nn

from fl_algorithms.models.adapters import BodyHead
from fl_algorithms.settings.vision import DenseNetSettings, SqueezeNetSettings, VggSettings, VisionSettings

Shape = tuple[int, ...]
STRIDES = {"small": 1, "medium": 2}  # of the first convolution, 3x3, in place of the published one
GROUPS = 8  # of a group norm, or the largest number below that divides the channels


class Pool(nn.Module):
    """(n, channels, height, width) to their means, (n, channels)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def conv3(inputs: int, outputs: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, 1, groups=groups, bias=False)


class Squeeze(nn.Module):
    """Channels weighed by what the whole image says. Hu, Shen, Sun, CVPR 2018, https://arxiv.org/abs/1709.01507"""

    def __init__(self, channels: int, reduction: int = 16) -> None:
        super().__init__()
        self.fc1 = nn.Linear(channels, max(1, channels // reduction))
        self.fc2 = nn.Linear(self.fc1.out_features, channels)

    def forward(self, x: Tensor) -> Tensor:
        scale: Tensor = self.fc2(F.relu(self.fc1(x.mean((2, 3))))).sigmoid()
        return x * scale[:, :, None, None]


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut: He et al., CVPR 2016, Figure 5, left. https://arxiv.org/abs/1512.03385"""

    expansion: int = 1

    def __init__(self, inputs: int, channels: int, stride: int, *, squeeze: bool = False) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv3(inputs, channels, stride), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = conv3(channels, channels), nn.BatchNorm2d(channels)
        self.se = Squeeze(channels) if squeeze else None
        self.downsample = _shortcut(inputs, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.se is not None:
            out = self.se(out)
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1x1, grouped 3x3, 1x1 convolutions beside a shortcut: Xie et al., Aggregated Residual Transformations, CVPR 2017,
    Figure 3c. https://arxiv.org/abs/1611.05431
    """

    expansion: int = 4

    def __init__(self, inputs: int, channels: int, stride: int, *, groups: int, per_group: float) -> None:
        super().__init__()
        middle = max(1, round(channels * per_group / 64)) * groups
        self.conv1, self.bn1 = nn.Conv2d(inputs, middle, 1, bias=False), nn.BatchNorm2d(middle)
        self.conv2, self.bn2 = conv3(middle, middle, stride, groups), nn.BatchNorm2d(middle)
        outputs = channels * self.expansion
        self.conv3, self.bn3 = nn.Conv2d(middle, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn3(self.conv3(F.relu(self.bn2(self.conv2(out)))))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module | None:
    if inputs == outputs and stride == 1:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


def _residual(
    settings: VisionSettings,
    shape: Shape,
    outputs: int,
    blocks: Sequence[int],
    block: Callable[..., Block | Bottleneck],
) -> nn.Module:
    """Four stages of ``blocks``, of 64, 128, 256, 512 channels times the width."""
    inputs, stem = _scaled(64, settings.width), settings.stem_for(shape)
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    if stem == "large":
        parts["conv1"] = nn.Conv2d(shape[0], inputs, 7, 2, 3, bias=False)
    else:
        parts["conv1"] = conv3(shape[0], inputs, STRIDES[stem])
    parts["bn1"], parts["relu"] = nn.BatchNorm2d(inputs), nn.ReLU()
    if stem == "large":
        parts["maxpool"] = nn.MaxPool2d(3, 2, 1)
    for place, count in enumerate(blocks):
        channels, stage = _scaled(64 * 2**place, settings.width), nn.Sequential()
        for number in range(count):
            made = block(inputs, channels, 2 if place and not number else 1)
            stage.append(made)
            inputs = channels * made.expansion
        parts[f"layer{place + 1}"] = stage
    parts["pool"] = Pool()
    body = nn.Sequential(parts)
    for module in body.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return _classifier(settings, body, inputs, outputs)


def resnet10(settings: VisionSettings, shape: Shape, outputs: int) -> nn.Module:
    return _residual(settings, shape, outputs, (1, 1, 1, 1), Block)


def resnet18(settings: VisionSettings, shape: Shape, outputs: int) -> nn.Module:
    return _residual(settings, shape, outputs, (2, 2, 2, 2), Block)


def seresnet(settings: VisionSettings, shape: Shape, outputs: int) -> nn.Module:
    """SE-ResNet-18."""
    return _residual(settings, shape, outputs, (2, 2, 2, 2), partial(Block, squeeze=True))


def resnext(settings: VisionSettings, shape: Shape, outputs: int) -> nn.Module:
    """ResNeXt-50: 32 groups of 4 channels in its first stage, fewer groups for less width."""
    groups = max(1, round(32 * min(1.0, settings.width)))
    per_group = 4 * 32 / groups if settings.width > 1 else 4 / settings.width
    return _residual(settings, shape, outputs, (3, 4, 6, 3), partial(Bottleneck, groups=groups, per_group=per_group))


def efficientnet_b0(settings: VisionSettings, shape: Shape, outputs: int) -> nn.Module:
    """Tan, Le, ICML 2019, Table 1. https://arxiv.org/abs/1905.11946"""
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig  # type: ignore[import-untyped]

    stage = partial(MBConvConfig, width_mult=settings.width, depth_mult=1.0)
    stages = [
        stage(1, 3, 1, 32, 16, 1),
        stage(6, 3, 2, 16, 24, 2),
        stage(6, 5, 2, 24, 40, 2),
        stage(6, 3, 2, 40, 80, 3),
        stage(6, 5, 1, 80, 112, 3),
        stage(6, 5, 2, 112, 192, 4),
        stage(6, 3, 1, 192, 320, 1),
    ]
    whole = EfficientNet(stages, dropout=0.0, stochastic_depth_prob=0.2)
    return _features(settings, shape, outputs, whole.features, whole.features[0][0], whole.features[-1][0].out_channels)


def mobilenet_v2(settings: VisionSettings, shape: Shape, outputs: int) -> nn.Module:
    """Sandler et al., CVPR 2018, Table 2. https://arxiv.org/abs/1801.04381"""
    from torchvision.models import MobileNetV2  # type: ignore[import-untyped]

    whole = MobileNetV2(width_mult=settings.width)
    return _features(settings, shape, outputs, whole.features, whole.features[0][0], whole.last_channel)


def shufflenet_v2(settings: VisionSettings, shape: Shape, outputs: int) -> nn.Module:
    """Ma et al., ECCV 2018, Table 5, 1x. https://arxiv.org/abs/1807.11164"""
    from torchvision.models import ShuffleNetV2

    channels = [2 * _scaled(half, settings.width) for half in (12, 58, 116, 232, 512)]
    whole = ShuffleNetV2([4, 8, 4], channels)
    parts = OrderedDict[str, nn.Module](
        (name, getattr(whole, name)) for name in ("conv1", "maxpool", "stage2", "stage3", "stage4", "conv5")
    )
    if settings.stem_for(shape) != "large":
        del parts["maxpool"]
    return _features(settings, shape, outputs, nn.Sequential(parts), whole.conv1[0], channels[-1])


def densenet(settings: DenseNetSettings, shape: Shape, outputs: int) -> nn.Module:
    """DenseNet-121 unless ``blocks`` says otherwise. Huang et al., CVPR 2017. https://arxiv.org/abs/1608.06993"""
    from torchvision.models import DenseNet

    whole = DenseNet(
        growth_rate=_scaled(32, settings.width),
        block_config=settings.blocks,
        num_init_features=2 * _scaled(32, settings.width),
        num_classes=1,
    )
    first, width = whole.features.conv0, whole.classifier.in_features
    if settings.stem_for(shape) != "large":
        del whole.features.pool0
    whole.features.add_module("relu", nn.ReLU())
    return _features(settings, shape, outputs, whole.features, first, width)


def squeezenet(settings: SqueezeNetSettings, shape: Shape, outputs: int) -> nn.Module:
    """SqueezeNet 1.1. Iandola et al., 2016. https://arxiv.org/abs/1602.07360"""
    from torchvision.models.squeezenet import Fire  # type: ignore[import-untyped]

    def fire(inputs: int, squeeze: int, expand: int) -> nn.Module:
        thin, thick = _scaled(squeeze, settings.width), _scaled(expand, settings.width)
        layer: nn.Module = Fire(
            first_width if inputs == 64 else 2 * _scaled(inputs // 2, settings.width), thin, thick, thick
        )
        return layer

    def pool() -> nn.Module:
        return nn.MaxPool2d(3, 2, ceil_mode=True)

    first_width = _scaled(64, settings.width)
    first = nn.Conv2d(3, first_width, 3, 2)
    parts: list[nn.Module] = [first, nn.ReLU()]
    if settings.stem_for(shape) == "large":
        parts.append(pool())
    parts += [fire(64, 16, 64), fire(128, 16, 64), pool(), fire(128, 32, 128), fire(256, 32, 128), pool()]
    parts += [fire(256, 48, 192), fire(384, 48, 192), fire(384, 64, 256), fire(512, 64, 256)]
    return _features(settings, shape, outputs, nn.Sequential(*parts), first, 2 * _scaled(256, settings.width))


def vgg(settings: VggSettings, shape: Shape, outputs: int) -> nn.Module:
    """VGG-11 with batch norm. Simonyan, Zisserman, ICLR 2015, Table 1, A. https://arxiv.org/abs/1409.1556"""
    from torchvision.models.vgg import make_layers  # type: ignore[import-untyped]

    plan: list[int | str] = [64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"]
    scaled = [item if isinstance(item, str) else _scaled(item, settings.width) for item in plan]
    layers = make_layers(scaled if settings.stem_for(shape) == "large" else scaled[:-1], batch_norm=True)
    return _features(settings, shape, outputs, layers, layers[0], _scaled(512, settings.width))


def _features(
    settings: VisionSettings, shape: Shape, outputs: int, body: nn.Module, first: nn.Conv2d, width: int
) -> nn.Module:
    """A classifier of torchvision's convolutions, whose ``first`` one is made anew for the study's images."""
    stem, bias = settings.stem_for(shape), first.bias is not None
    kernel, stride, padding = first.kernel_size[0], first.stride[0], int(first.padding[0])
    if stem != "large":
        kernel, stride, padding = 3, STRIDES[stem], 1
    anew = nn.Conv2d(shape[0], first.out_channels, kernel, stride, padding, bias=bias)
    nn.init.kaiming_normal_(anew.weight, mode="fan_out", nonlinearity="relu")
    return _classifier(settings, nn.Sequential(_replaced(body, first, anew), Pool()), width, outputs)


def _classifier(settings: VisionSettings, body: nn.Sequential, width: int, outputs: int) -> nn.Module:
    """(n, channels, height, width) float32 to logits (n, outputs). ``body`` gives (n, ``width``)."""
    if settings.norm == "group":
        for module in list(body.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.BatchNorm2d):
                    setattr(module, name, nn.GroupNorm(gcd(GROUPS, child.num_features), child.num_features))
    if settings.dropout:
        body.add_module("dropout", nn.Dropout(settings.dropout))
    return BodyHead(body, nn.Linear(width, outputs))


def _replaced(body: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    for module in list(body.modules()):
        for name, child in list(module.named_children()):
            if child is old:
                setattr(module, name, new)
    return body


def _scaled(channels: int, width: float) -> int:
    return max(1, round(channels * width))
