"""The networks for images and for masks by name, and FENDA's two extractors, each of which is the body of one."""

import difflib
from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import Field, field_validator

from fl_algorithms.settings.libraries import in_library
from fl_algorithms.settings.models import BODY_AND_HEAD, NORM_LAYERS, TWO_EXTRACTORS, Dropout
from fl_algorithms.settings.vision import (
    DenseNetSettings,
    MonaiUnetSettings,
    SeesImages,
    SqueezeNetSettings,
    UnetSettings,
    UShapeSettings,
    VggSettings,
    VisionSettings,
)
from wardround.errors import BadData
from wardround.records.schema import check
from wardround.records.study import Named

CLASSIFIERS: Mapping[str, type[SeesImages]] = {
    "resnet10": VisionSettings,
    "resnet18": VisionSettings,
    "resnext": VisionSettings,
    "seresnet": VisionSettings,
    "efficientnet_b0": VisionSettings,
    "mobilenet_v2": VisionSettings,
    "shufflenet_v2": VisionSettings,
    "densenet": DenseNetSettings,
    "squeezenet": SqueezeNetSettings,
    "vgg": VggSettings,
}
SEGMENTERS: Mapping[str, type[SeesImages]] = {
    "unet": UShapeSettings,
    "resunet": UShapeSettings,
    "unetpp": UnetSettings,
    "fcn": UnetSettings,
    "monai_unet": MonaiUnetSettings,
}


class TwoExtractorsSettings(SeesImages):
    """Two networks, of each of which the body alone is used.

    Attributes:
        shared: a table as [model] is one.
        private: the same; without it, as the shared one.
    """

    networks: ClassVar[Mapping[str, type[SeesImages]]] = {}
    masks: ClassVar[bool] = False

    shared: Named
    private: Named | None = None
    dropout: Dropout = 0.0  # on the concatenated features

    @field_validator("shared", "private")
    @classmethod
    def _filled(cls, table: Named | None) -> Named | None:
        if table is None:
            return None
        settings = cls.extractor(table)
        if settings.size is not None:
            raise ValueError("`size` stands in [model]: both extractors see the same images")
        if BODY_AND_HEAD not in settings.offers:
            raise ValueError(f"network `{table.name[:60]}` as it is set has no body")
        return Named.model_validate({"name": table.name, **settings.model_dump(mode="json", exclude_none=True)})

    @classmethod
    def extractor(cls, table: Named) -> SeesImages:
        """The settings of a table of this kind. Raises ValueError: there is no such network, or it cannot be so."""
        found = cls.networks.get(table.name)
        if found is None and (other := in_library(table.name)) is not None and other[0].masks(other[1]) == cls.masks:
            found = other[0].settings
        if found is None:
            close = difflib.get_close_matches(table.name, cls.networks, n=1)
            said = f"did you mean `{close[0]}`?" if close else f"there are: {', '.join(cls.networks)}"
            raise ValueError(f"there is no network `{table.name[:60]}` for this; {said}")
        try:
            return check(found, table.settings, f"`{table.name[:60]}`")
        except BadData as error:
            raise ValueError("; ".join(filter(None, (error.message, error.hint)))) from None

    @property
    def both(self) -> tuple[Named, Named]:
        """The shared extractor's table, and the private one's."""
        return self.shared, self.private or self.shared

    @property
    def offers(self) -> frozenset[str]:
        norms = all(NORM_LAYERS in self.extractor(table).offers for table in self.both)
        return frozenset({TWO_EXTRACTORS, NORM_LAYERS} if norms else {TWO_EXTRACTORS})

    def misfit(self, shape: tuple[int, ...]) -> str:
        for part, table in zip(("shared", "private"), self.both, strict=True):
            if needs := self.extractor(table).misfit(shape):
                return f"with `{table.name}` as its {part} extractor {needs}"
        return ""

    def built_for(self, shape: tuple[int, ...]) -> Self:
        built = [
            Named.model_validate({"name": table.name, **self.extractor(table).built_for(shape).model_dump()})
            for table in self.both
        ]
        return self.model_copy(update={"shared": built[0], "private": built[1]})


class FendaImagesSettings(TwoExtractorsSettings):
    """For classes. A body that ends in the mean over the image, twice."""

    networks = CLASSIFIERS

    shared: Named = Field(default_factory=lambda: Named(name="resnet18"), validate_default=True)
    dropout: Dropout = 0.3


class FendaMasksSettings(TwoExtractorsSettings):
    """For masks. A body whose features are maps, twice; the head is a convolution of one pixel."""

    networks = SEGMENTERS
    masks = True

    shared: Named = Field(default_factory=lambda: Named(name="unet"), validate_default=True)
