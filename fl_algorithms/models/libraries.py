"""Networks of timm, torchvision and MONAI, each by its name there. Nothing is downloaded, and nothing is read.

Each is divided into ``body`` and ``head``, a linear layer or a convolution of the study's number of outputs. Names
inside the body are the library's own, so that its checkpoints fit by name. One that cannot be divided is given as it
is: methods that need no head take it.
"""

import functools
import importlib
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from fl_algorithms.models.adapters import BodyHead, divided, features_shape, of_size, replace_module, with_dropout
from fl_algorithms.models.checks import WHAT_NETWORKS_RAISE
from fl_algorithms.settings.libraries import (
    LIBRARIES,
    ImageLibrarySettings,
    LibrarySettings,
    MonaiSettings,
    TimmSettings,
)
from wardround.errors import BadData, NeedsPerson

Shape = tuple[int, ...]


def timm(name: str, settings: TimmSettings, shape: Shape, outputs: int) -> nn.Module:
    """A classifier of timm; the head is on its pooled features.

    Raises:
        NeedsPerson: timm is not installed.
        BadData: it has no such network, or that does not take these images.
    """
    library = _library("timm", "timm")
    if not library.is_model(name.partition(".")[0]):
        _refuse_unknown("timm", name, library.list_models())
    options: dict[str, Any] = {"drop_path_rate": settings.drop_path} if settings.drop_path else {}
    config = library.get_pretrained_cfg(name)
    if config is not None and config.fixed_input_size:
        options["img_size"] = shape[1:]

    def build() -> nn.Module:
        # "num_classes=0": no head of its own. Its weights are drawn, whatever the name.
        body = library.create_model(name, pretrained=False, num_classes=0, in_chans=shape[0], **options)
        features = features_shape(body, shape)
        if len(features) != 1:
            raise ValueError(f"its features are {list(features)}, not one vector")
        return with_dropout(BodyHead(body, nn.Linear(features[0], outputs)), settings.dropout)

    return _built("timm", name, shape, build)


def torchvision(name: str, settings: ImageLibrarySettings, shape: Shape, outputs: int) -> nn.Module:
    """A classifier of torchvision, without its last layer, or one of its FCN and DeepLabV3 for masks.

    Raises: as ``timm``.
    """
    models: Any = _library("torchvision", "torchvision.models")
    masks = LIBRARIES["torchvision"].masks(name)
    known = [one for one in models.list_models(module=models.segmentation if masks else models) if "lraspp" not in one]
    if name not in known:
        _refuse_unknown("torchvision", name, known)
    if masks:
        return _built("torchvision", name, shape, lambda: _dense(models, name, settings, shape, outputs))
    options: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):
        options = {"aux_logits": False, "init_weights": False}
    elif name.startswith("vit_"):
        options = {"image_size": shape[1]}
    elif name.startswith("maxvit_"):
        options = {"input_size": shape[1:]}

    def build() -> nn.Module:
        whole = models.get_model(name, weights=None, num_classes=outputs, **options)
        _take_channels(whole, shape[0])
        return _divided(("torchvision", name, str(options)), settings, whole, shape, outputs)

    return _built("torchvision", name, shape, build)


def monai(name: str, settings: MonaiSettings, shape: Shape, outputs: int) -> nn.Module:
    """One of MONAI's networks of images and volumes.

    Raises: as ``timm``.
    """
    networks: Any = _library("monai", "monai.networks.nets")
    made: dict[str, Any] = {"spatial_dims": len(shape) - 1}
    if name.startswith("resnet"):
        made |= {"n_input_channels": shape[0], "num_classes": outputs}
    elif name.startswith("SEResNet"):
        made |= {"in_channels": shape[0], "num_classes": outputs}
    else:
        made |= {"in_channels": shape[0], "out_channels": outputs}

    def build() -> nn.Module:
        whole = getattr(networks, name)(**made, **settings.arguments)
        return _divided(("monai", name, settings.model_dump_json()), settings, whole, shape, outputs)

    return _built("monai", name, shape, build)


class DenseBody(nn.Module):
    """The features of torchvision's FCN or DeepLabV3, interpolated to the image's size before they are judged."""

    def __init__(self, backbone: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.backbone, self.classifier = backbone, classifier

    def forward(self, x: Tensor) -> Tensor:
        return of_size(self.classifier(self.backbone(x)["out"]), x.shape[2:])


def _dense(models: Any, name: str, settings: LibrarySettings, shape: Shape, outputs: int) -> nn.Module:
    whole = models.get_model(name, weights=None, weights_backbone=None, num_classes=outputs, aux_loss=False)
    _take_channels(whole, shape[0])
    *layers, head = whole.classifier
    network = BodyHead(DenseBody(whole.backbone, nn.Sequential(*layers)), head)
    features_shape(network, shape)
    return with_dropout(network, settings.dropout)


def _divided(
    key: tuple[str, str, str], settings: LibrarySettings, whole: nn.Module, shape: Shape, outputs: int
) -> nn.Module:
    """``whole`` as body and head, where it can be; else as it is."""
    place = _HEADS.get((*key, shape, outputs))
    if place is None:
        place = _HEADS[(*key, shape, outputs)] = divided(whole, shape) or ""
    if not place:
        if settings.dropout:
            raise ValueError("it cannot be divided into a body and a head, between which `dropout` would be")
        return whole
    head = whole.get_submodule(place)
    replace_module(whole, place, nn.Identity())
    return with_dropout(BodyHead(whole, head), settings.dropout)


_HEADS: dict[tuple[Any, ...], str] = {}  # looked for once: to try a network of volumes takes seconds


def _take_channels(network: nn.Module, channels: int) -> None:
    """Give the first convolution, made for three colors, the study's number of channels."""
    place, first = next((name, one) for name, one in network.named_modules() if isinstance(one, nn.Conv2d))
    if first.in_channels == channels:
        return
    anew = nn.Conv2d(
        channels, first.out_channels, first.kernel_size, first.stride, first.padding,  # type: ignore[arg-type]
        bias=first.bias is not None,
    )  # fmt: skip
    nn.init.kaiming_normal_(anew.weight, mode="fan_out", nonlinearity="relu")
    replace_module(network, place, anew)


def _built(prefix: str, name: str, shape: Shape, build: Callable[[], nn.Module]) -> nn.Module:
    """What ``build`` gives. Raises BadData: the library does not take these images or settings."""
    try:
        return build()
    except WHAT_NETWORKS_RAISE as error:
        said = " ".join(str(error).split())[:200]
        raise BadData(
            f"model `{prefix}:{name}` as it is set cannot be built for images of {' x '.join(map(str, shape))}: {said}",
            hint="another `size`, in [task] or in [model], or another network",
        ) from None


def _refuse_unknown(prefix: str, name: str, known: Iterable[str]) -> None:
    close = get_close_matches(name, list(known), n=3)
    raise BadData(
        f"{LIBRARIES[prefix].title} has no network `{name}`",
        hint=f"did you mean {' or '.join(f'`{prefix}:{one}`' for one in close)}?" if close else "",
    )


@functools.cache
def _library(prefix: str, module: str) -> Any:
    """The imported library. Raises NeedsPerson: it is not installed."""
    try:
        with torch.random.fork_rng(devices=[]):  # what its import draws, if anything, is not the study's
            return importlib.import_module(module)
    except ImportError:
        library = LIBRARIES[prefix]
        raise NeedsPerson(
            f"a network of [model] is from {library.title}, which is not installed",
            hint=f"`pip install 'wardround[{library.extra}]'`",
        ) from None
