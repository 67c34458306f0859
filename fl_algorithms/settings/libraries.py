"""Networks of other libraries by name, as "timm:convnext_tiny". No torch: whether a library has that name, and what the
network has, is looked at when it is built.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pydantic import Field, field_validator

from fl_algorithms.settings.models import BODY_AND_HEAD, NORM_LAYERS, Dropout
from fl_algorithms.settings.vision import SeesImages

NAME = re.compile(r"[A-Za-z0-9_.]{1,100}")  # no scheme and no slash, so that nothing is looked for anywhere else

WORD = re.compile(r"[A-Za-z0-9_]{1,40}")
Value = bool | int | float | str
NOT_THE_STUDYS = frozenset(  # what the task says, and whatever could make a library read or fetch something
    {
        "pretrained", "progress", "weights", "spatial_dims", "in_channels", "n_input_channels", "out_channels",
        "num_classes", "img_size",
    }
)  # fmt: skip


class LibrarySettings(SeesImages):
    """Any network of a library. Channels and outputs are the study's."""

    dropout: Dropout = 0.0  # on the features, before the head

    @property
    def offers(self) -> frozenset[str]:
        """What most of them have; a network that has not is refused when it is built."""
        return frozenset({BODY_AND_HEAD, NORM_LAYERS})


class ImageLibrarySettings(LibrarySettings):
    """For images alone."""

    def misfit(self, shape: tuple[int, ...]) -> str:
        return "" if len(shape) == 3 else "takes images, not volumes"


class TimmSettings(ImageLibrarySettings):
    drop_path: Dropout = 0.0  # chance that a block is left out in training, where the network has that


class MonaiSettings(LibrarySettings):
    """For images and volumes.

    Attributes:
        arguments: those of the network's class, as ``features`` of BasicUNet.
    """

    arguments: dict[str, Value | tuple[Value, ...]] = Field(default_factory=dict, max_length=20)

    @field_validator("arguments")
    @classmethod
    def _own(cls, arguments: dict[str, Value | tuple[Value, ...]]) -> dict[str, Value | tuple[Value, ...]]:
        for name in sorted(arguments.keys() & NOT_THE_STUDYS):
            raise ValueError(f"`{name}` cannot be given: the task says it, or it would fetch something")
        for name, value in arguments.items():
            for text in (name, *(value if isinstance(value, tuple) else (value,))):
                if isinstance(text, str) and not WORD.fullmatch(text):
                    raise ValueError(f"{text[:40]!r} is not 1 to 40 of A-Z a-z 0-9 _")
        return arguments


@dataclass(frozen=True)
class Library:
    """Where networks come from.

    Attributes:
        title: as people write it.
        extra: of `pip install 'wardround[EXTRA]'`.
        implementation: "module:attribute", called with the name within the library, the settings, the inputs and the
            number of outputs.
        masks: whether the network of that name judges each pixel.
        names: those that are known to fit; (): only the library knows.
    """

    title: str
    extra: str
    settings: type[LibrarySettings]
    implementation: str
    masks: Callable[[str], bool]
    names: tuple[str, ...] = field(default=())


MONAI_MASKS = ("AttentionUnet", "BasicUNet", "SegResNet", "VNet")
MONAI_CLASSES = (
    "DenseNet121", "DenseNet169", "DenseNet201", "DenseNet264", "SEResNet50", "resnet10", "resnet18", "resnet34",
    "resnet50",
)  # fmt: skip
LIBRARIES: Mapping[str, Library] = {
    "timm": Library("timm", "timm", TimmSettings, "fl_algorithms.models.libraries:timm", lambda name: False),
    "torchvision": Library(
        "torchvision", "site", ImageLibrarySettings, "fl_algorithms.models.libraries:torchvision",
        lambda name: name.startswith(("fcn_", "deeplabv3_")),
    ),
    "monai": Library(
        "MONAI", "monai", MonaiSettings, "fl_algorithms.models.libraries:monai", lambda name: name in MONAI_MASKS,
        (*MONAI_MASKS, *MONAI_CLASSES),
    ),
}  # fmt: skip


def in_library(name: str) -> tuple[Library, str] | None:
    """The library of "PREFIX:NAME", and NAME; None where ``name`` has no such form."""
    prefix, colon, within = name.partition(":")
    if not colon or prefix not in LIBRARIES or not NAME.fullmatch(within):
        return None
    return LIBRARIES[prefix], within
