"""The fields that requests and answers are made of, each with its bounds."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from wardround.terminal import escaped, is_plain

MOST_SHOWN = 400  # characters of a trainer's sentence that a person is shown
MOST_TENSORS = 20_000
BIG = 2**53 - 1  # what every JSON reader keeps exactly


def _plain(text: str) -> str:
    if not is_plain(text):
        raise ValueError("holds a control character")
    return text


class Strict(BaseModel):
    """Frozen; nothing is converted, unknown fields and numbers that are not finite are refused."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True, defer_build=True
    )


Count = Annotated[int, Field(ge=0, le=BIG)]
Reported = Annotated[int, Field(ge=-BIG, le=BIG)]  # a count that the exit compares with the approved data's
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
NoDigest = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]  # "" where there is nothing to hash
Words = Annotated[str, Field(max_length=65536), AfterValidator(lambda text: escaped(text, MOST_SHOWN))]  # prose, cut
Place = Annotated[str, Field(max_length=4096), AfterValidator(_plain)]
Shape = Annotated[list[Count], Field(max_length=16)]
Staged = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}$")]  # a file's name in the staging folder
Metric = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,40}$")]
Key = Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,40}$")]
Value = Annotated[str, Field(max_length=40), AfterValidator(_plain)]
Dtype = Annotated[str, Field(max_length=8), AfterValidator(_plain)]
Bundle = Annotated[str, Field(max_length=40), AfterValidator(_plain)]
TensorName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,200}$")]
NetworkLabel = Annotated[str, Field(pattern=r"^[a-z0-9-]{0,40}$")]  # "" where a study has one network
UserName = Annotated[str, Field(max_length=64), AfterValidator(_plain)]
Isolation = Literal["network-namespace", "seccomp", "none"]
Measures = Annotated[list[Annotated[str, Field(pattern=r"^[a-z_]{1,40}$")]], Field(max_length=16)]

# What the gateway sends comes from this hospital: its bounds keep a request within one line.
Path = Annotated[str, Field(max_length=4096)]
Name = Annotated[str, Field(max_length=1024)]
SiteName = Annotated[str, Field(max_length=64)]
