"""The networks that a study may name: ours, and by "LIBRARY:NAME" those of timm, torchvision and MONAI. No torch."""

import difflib
from collections.abc import Mapping
from typing import Any

from fl_algorithms.plugins import load
from fl_algorithms.rows import IMAGES, MASKS, ModelRow
from fl_algorithms.settings.extractors import CLASSIFIERS, SEGMENTERS, FendaImagesSettings, FendaMasksSettings
from fl_algorithms.settings.libraries import LIBRARIES, in_library
from fl_algorithms.settings.models import BallastSettings, FendaSettings, MlpSettings, NetworkSettings

MODULE_OF = {"monai_unet": "monai_unet"}  # of those for masks
FENDA_OF_BODIES = "fl_algorithms.models.fenda:fenda_of_bodies"

ROWS: Mapping[str, ModelRow] = {
    row.name: row
    for row in (
        ModelRow("mlp", MlpSettings, "fl_algorithms.models.mlp:mlp"),
        ModelRow("fenda", FendaSettings, "fl_algorithms.models.fenda:fenda"),
        ModelRow("ballast", BallastSettings, "fl_algorithms.models.ballast:ballast"),
        *(
            ModelRow(name, settings, f"fl_algorithms.models.vision:{name}", IMAGES)
            for name, settings in CLASSIFIERS.items()
        ),
        *(
            ModelRow(name, settings, f"fl_algorithms.models.{MODULE_OF.get(name, 'unet')}:{name}", MASKS)
            for name, settings in SEGMENTERS.items()
        ),
        ModelRow("fenda_images", FendaImagesSettings, FENDA_OF_BODIES, IMAGES),
        ModelRow("fenda_masks", FendaMasksSettings, FENDA_OF_BODIES, MASKS),
    )
}


def library_row(name: str) -> ModelRow | None:
    """The row of "LIBRARY:NAME"; None where that cannot be a library's network."""
    found = in_library(name)
    if found is None:
        return None
    library, within = found
    if library.names and within not in library.names:
        return None
    takes = MASKS if library.masks(within) else IMAGES
    return ModelRow(name, library.settings, library.implementation, takes, within)


def library_hint(name: str) -> str:
    """A hint after an unknown name that looks like a library's; "" where it does not."""
    prefix, colon, within = name.partition(":")
    if not colon:
        return ""
    if prefix not in LIBRARIES:
        return f"networks of other libraries: {', '.join(f'`{library}:NAME`' for library in LIBRARIES)}"
    names = LIBRARIES[prefix].names
    if not names:
        return f"as in `{prefix}:resnet50`: a name has letters, digits, _ and . alone, and nothing is ever downloaded"
    close = difflib.get_close_matches(within, names, n=1)
    return f"did you mean `{prefix}:{close[0]}`?" if close else f"there are: {', '.join(names)}"


def built(row: ModelRow, settings: NetworkSettings, inputs: int | tuple[int, ...], outputs: int) -> Any:
    """The network (``torch.nn.Module``) of a row, as its implementation makes it. Imports torch."""
    make = load(row.implementation)
    return make(row.within, settings, inputs, outputs) if row.within else make(settings, inputs, outputs)
