"""What scripts ask of a study by name, and the sentences about it that several commands print."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from site_agent.state import consent as consents
from site_agent.state.codec import STRICT
from site_agent.state.consent import Exposure
from site_agent.state.offer import Offer
from site_agent.state.tensors import Specs, specs_from
from wardround.records.trainer import Described, PrivateTensor, Weights

SHOWN_NAMES = 6


@dataclass(frozen=True)
class Facts:
    """What a study computes here and takes out; ``Account`` has all of it, line by line.

    Attributes:
        upload, download: the tensors of every update, and those that a round begins with.
        private: what the installed model keeps here.
        exposure: who else has a model of this site alone; ``personalized`` is what that is, in words.
    """

    sites: tuple[str, ...]
    algorithm: str
    rounds: int
    bytes_per_round: int
    upload: Annotated[Specs, Field(alias="leaves")]
    metrics: tuple[str, ...]
    metric_digits: int
    counts: str
    download: Annotated[Specs, Field(alias="comes")]
    exposure: Exposure
    personalized: Annotated[str, Field(alias="apart")]
    private: Annotated[tuple[PrivateTensor, ...], Field(alias="stays")]
    network: str
    model: str
    parameters: int
    weights: Weights | None

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


def facts(offer: Offer, described: Described) -> Facts:
    """The facts of ``offer``. ``described`` is what this site's trainer says of the installed model."""
    return Facts(
        sites=offer.sites, algorithm=offer.algorithm, rounds=offer.rounds,
        bytes_per_round=sum(spec.bytes for spec in offer.upload), upload=offer.upload, metrics=offer.metrics,
        metric_digits=offer.reported.digits, counts=offer.reported.counts, download=specs_from(described.download),
        exposure=described.exposure, personalized=described.personalized, private=tuple(described.private),
        network=described.network, model=described.model, parameters=described.parameters, weights=described.weights,
    )  # fmt: skip


def exposed(exposure: str, personalized: str) -> str:
    """Who else has a model of this site alone, as a sentence; "" where nobody has."""
    text = consents.exposed(exposure, personalized)
    return f"{text[0].upper()}{text[1:]}." if exposure else ""


def trains(described: Described) -> str:
    """Which network this site trains, and how large it is, as a sentence."""
    label = f" `{described.network}`" if described.network else ""
    return f"This site trains network{label} {described.model}: {number(described.parameters)} parameters"


def begins_with(weights: Weights) -> str:
    """What a file of weights gives to the tensors that stay here, as a sentence."""
    text = f"{weights.used} of the tensors that stay here begin with the weights of SHA-256 {weights.digest}"
    for what, names in (("not in the file", weights.drawn), ("in it and not used", weights.unused)):
        if names:
            more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
            text += f"; {what}: {', '.join(names[:SHOWN_NAMES])}{more}"
    return f"{text}. The file is read once, before this site's first round"


def number(count: int) -> str:
    """A whole number as a person reads it: "9999", "10,000,000"."""
    return f"{count:,}" if abs(count) >= 10_000 else str(count)


def size(count: int) -> str:
    """Bytes as a person reads them: "608 B", "44.7 MiB"."""
    amount, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while amount >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{count} B" if units[0] == "B" else f"{amount:.1f} {units[0]}"
