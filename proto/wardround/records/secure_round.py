"""What follows from a study about its rounds with secure aggregation, the same at the coordinator and at every site.

The roster and the largest weight stand in the resolved study, where the coordinator has written them when the study was
created; so a consent's digest covers them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from wardround.errors import BadData
from wardround.records.secure_aggregation import SecureAggregationSection
from wardround.records.study import StudyFile
from wardround.secure.rules import Rules
from wardround.secure.statements import Context, Roster
from wardround.tensors.manifests import TensorSpec

if TYPE_CHECKING:  # with numpy, which no command needs that only tells who is in a study
    from wardround.secure.layout import Layout

BUNDLE = "masked"
TENSORS, NUMBERS = f"{BUNDLE}/tensors", f"{BUNDLE}/numbers"  # the keys of a masked vector's two parts


def section_of(file: StudyFile) -> SecureAggregationSection:
    """Raises BadData: the study is without secure aggregation."""
    if file.secure_aggregation is None:
        raise BadData(f"study `{file.study.name}` is without secure aggregation", code="MESSAGE_MALFORMED")
    return file.secure_aggregation


def roster_of(file: StudyFile) -> Roster:
    """The study's sites with their ledger keys.

    Raises:
        BadData: they are not exactly the sites that the study lists, or a key is none.
    """
    section = section_of(file)
    if set(section.roster) != set(file.study.sites):
        raise BadData(f"study `{file.study.name}` has not the key of each of its sites")
    return Roster.of({site: bytes.fromhex(key) for site, key in section.roster.items()})


def rules_of(file: StudyFile) -> Rules:
    """Raises BadData: its threshold does not stand so many colluding sites."""
    return section_of(file).rules(len(file.study.sites))


def layout_of(file: StudyFile, specs: Sequence[TensorSpec], largest_weight: int | None = None) -> "Layout":
    """The form of a study's vectors.

    Args:
        specs: the tensors of an update, in the order of its manifest; () for the closing validation.
        largest_weight: None: as the study says.
    """
    from wardround.secure.layout import Layout
    from wardround.secure.quantizing import Quantizer

    section, reported = section_of(file), file.reported
    weight = section.largest_weight if largest_weight is None else largest_weight
    quantizer = Quantizer(len(file.study.sites), section.range, weight)
    metrics = {name: max(abs(low), abs(high)) for name, (low, high) in reported.ranges.items()}
    rows = 1 if reported.counts == "uniform" else file.limits.max_examples
    return Layout.of(quantizer, specs, metrics, rows)


def weight_of(file: StudyFile, num_examples: int, *, closing: bool) -> int:
    """What a site counts for: its rows as the study has them told, or 1 where all count alike; 0 in a closing one."""
    if closing:
        return 0
    return file.reported.count(num_examples) if section_of(file).largest_weight > 1 else 1


def context_of(
    file: StudyFile, federation: str, digest: str, round_number: int, attempt: int, base: str, layout: "Layout"
) -> Context:
    """What one attempt is about.

    Args:
        digest: of the study, with its initial model. base: of the model that the assignment names as its base.
    """
    return Context(federation, digest, roster_of(file).digest, round_number, attempt, base, layout.digest)


def vector_specs(layout: "Layout") -> tuple[TensorSpec, ...]:
    """The two parts of a masked vector, as an upload's manifest has them: its payload is the blocks, end to end."""
    numbers = TensorSpec("numbers", "U64", (1 + 2 * len(layout.metrics),), BUNDLE)
    if not layout.elements:
        return (numbers,)
    return TensorSpec("tensors", "U32", (layout.elements,), BUNDLE), numbers
