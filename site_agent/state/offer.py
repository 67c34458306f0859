"""One study as the coordinator offers it: `offers/STUDY.json`."""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

from pydantic import AfterValidator, ConfigDict, JsonValue

from site_agent.state import codec
from site_agent.state.codec import STRICT
from site_agent.state.tensors import TensorManifest
from wardround.records.aggregation import AggregationSection
from wardround.records.encoding import EncodingSection
from wardround.records.plugins import Plugin, PluginSection, plugins_of
from wardround.records.schema import check
from wardround.records.study import ReportedSection, StudyFile, StudySection
from wardround.tensors.manifests import TensorSpec

StudyDocument = dict[str, JsonValue]  # the resolved study as JSON, of which a digest is made


def table_of(document: StudyDocument, name: str) -> dict[str, JsonValue]:
    """A table of a resolved study."""
    table = document[name]
    assert isinstance(table, dict)
    return table


def rounds_of(document: StudyDocument) -> int:
    """How many rounds a resolved study has."""
    rounds = table_of(document, "study")["rounds"]
    assert isinstance(rounds, int)
    return rounds


def reported_of(document: StudyDocument, study: str) -> ReportedSection:
    """Which numbers go with an update of a resolved study. Raises BadData: this release does not know its form."""
    return check(ReportedSection, document.get("reported"), f"study `{study}`", "reported")


def aggregation_in(document: StudyDocument) -> str:
    """What the coordinator makes of the sites' updates, and how many bad sites that tolerates; "" where it is the mean.

    Raises:
        BadData: this release does not know its form.
    """
    rule = check(AggregationSection, document.get("aggregation", {}), "study", "aggregation")
    if rule.is_mean:
        return ""
    section = check(StudySection, table_of(document, "study"), "study", "study")
    return rule.sentence(len(section.trainers), section.needed)


def encoding_in(document: StudyDocument) -> EncodingSection:
    """How the values of a resolved study's updates leave. Raises BadData: this release does not know it."""
    return check(EncodingSection, document.get("encoding", {}), "study", "encoding")


def plugins_in(document: StudyDocument) -> tuple[Plugin, ...]:
    """Whose code a resolved study runs besides ours. Raises BadData: this release does not know their form."""
    tables = document.get("plugins", {})
    assert isinstance(tables, dict)
    return plugins_of({name: check(PluginSection, table, "study", f"plugins.{name}") for name, table in tables.items()})


def _resolved(document: StudyDocument) -> StudyDocument:
    if StudyFile.from_document(document).document() != document:
        raise ValueError("not a resolved study")
    return document


@dataclass(frozen=True)
class Offer:
    """One exact study, and of its initial model the part that is this site's.

    Attributes:
        state: as the coordinator says: created, waiting, running, paused, finished, stopped, failed.
    """

    study: str
    revision: int
    digest: str
    state: str
    document: Annotated[StudyDocument, AfterValidator(_resolved)]
    initial_model: TensorManifest

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    def to_bytes(self) -> bytes:
        """The bytes of its file."""
        return codec.to_bytes(self)

    @property
    def title(self) -> str:
        return str(table_of(self.document, "study")["title"])

    @property
    def sites(self) -> tuple[str, ...]:
        sites = table_of(self.document, "study")["sites"]
        assert isinstance(sites, list)
        return tuple(str(site) for site in sites)

    @property
    def algorithm(self) -> str:
        return str(table_of(self.document, "algorithm")["name"])

    @property
    def rounds(self) -> int:
        return rounds_of(self.document)

    @property
    def upload(self) -> tuple[TensorSpec, ...]:
        """The tensors of every update, in the study's encoding and the payload's order."""
        return self.encoding.encoding.sent(self.initial_model.specs)

    @cached_property
    def encoding(self) -> EncodingSection:
        """How the values of an update leave."""
        return encoding_in(self.document)

    @cached_property
    def reported(self) -> ReportedSection:
        """Which numbers go with an update, and how exactly."""
        return reported_of(self.document, self.study)

    @cached_property
    def file(self) -> StudyFile:
        """Its settings, typed."""
        return StudyFile.from_document(self.document)

    @property
    def is_secure(self) -> bool:
        """Whether updates leave with masks alone."""
        return self.document.get("secure_aggregation") is not None

    @property
    def plugins(self) -> tuple[Plugin, ...]:
        """Whose code it runs here besides ours."""
        return plugins_in(self.document)

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(self.reported.metrics)
