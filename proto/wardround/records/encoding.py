"""[encoding] of a study: how exactly the values of an update leave, in how many bytes.

``wardround.tensors`` computes. What people read before they approve is said here, where the gateway can read it.
"""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from wardround.records.schema import Strict
from wardround.tensors.encodings import Encoding, Name

SETTINGS: Mapping[str, Mapping[str, float | bool]] = {  # of each encoding, with its default
    "float32": {},
    "bfloat16": {"error_feedback": True},
    "int8": {"block": 256, "error_feedback": True},
    "topk": {"fraction": 0.1, "error_feedback": True},
}


class EncodingSection(Strict):
    """How the values of an update are written as it leaves a site. Downloads are float32 always.

    Attributes:
        block: of int8: how many values have one scale.
        fraction: of topk: the part of each tensor's values that leaves, the largest ones.
        error_feedback: of all but float32: what an update leaves out is kept at the site and added to the next one.
    """

    name: Name = "float32"  # float32: the values as they are; topk: the largest ones alone
    block: int | None = Field(default=None, ge=8, le=65_536)
    fraction: float | None = Field(default=None, gt=0, le=0.5)
    error_feedback: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, table: Any) -> Any:
        if not isinstance(table, dict):
            return table
        given = {key: value for key, value in table.items() if value is not None}
        return {**SETTINGS.get(str(table.get("name", "float32")), {}), **given}

    @model_validator(mode="after")
    def _of_the_encoding(self) -> Self:
        for key in self.model_fields_set - {"name"} - SETTINGS[self.name].keys():
            names = ", ".join(f"`{name}`" for name, settings in SETTINGS.items() if key in settings)
            raise ValueError(f"`{key}` belongs to {names}, the encoding is `{self.name}`")
        return self

    @property
    def encoding(self) -> Encoding:
        """What computes it."""
        given = {"block": self.block, "fraction": self.fraction}
        return Encoding(self.name, **{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]

    @property
    def keeps_rest(self) -> bool:
        """Whether a site keeps what an update leaves out."""
        return bool(self.error_feedback)

    @property
    def sentence(self) -> str:
        """What it does to an update, in words."""
        said = {
            "float32": "values leave as float32, as they were computed",
            "bfloat16": "values leave as bfloat16, rounded to 8 significant bits",
            "int8": f"values leave as whole numbers of 8 bits, with one scale for {self.block} of them",
            "topk": f"of each tensor the largest {100 * (self.fraction or 0):g} % of the values leave",
        }[self.name]
        if self.name == "float32":
            return said
        rest = "the rest is kept here and added to the next update" if self.keeps_rest else "the rest is dropped"
        return f"{said}; {rest}"
