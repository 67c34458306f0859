"""A study as the programs installed here understand it, at one site."""

from dataclasses import dataclass

from fl_algorithms import plugins, registry
from fl_algorithms.engine.partition import Partition, describe, task_of
from fl_algorithms.resolving import resolve
from fl_algorithms.rows import SITES
from fl_algorithms.study import ResolvedStudy, SiteStudy
from fl_algorithms.tasks.base import Task
from wardround.errors import BadData
from wardround.records.study import StudyFile
from wardround.signing import canonical

REMEMBERED_STUDIES = 16


@dataclass(frozen=True)
class Installed:
    """A study at one site that trains one of its networks."""

    file: ResolvedStudy
    own: SiteStudy  # the same with that network alone
    network: str  # its label; "" where the study has one network
    digest: str  # of the document alone
    site: str
    task: Task
    partition: Partition

    @property
    def name(self) -> str:
        return self.file.study.name

    @property
    def evaluates(self) -> bool:
        """Whether nothing is trained at this site: it judges each round's model on all of its rows."""
        return self.site in self.file.study.evaluators

    @property
    def needs_public_data(self) -> bool:
        """Whether its method needs the public data set at each site."""
        return self.file.method.row.public_data == SITES


class Studies:
    """The studies that were asked for; building the networks of one, to see what they share, is done once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str], Installed] = {}  # by digest, site and chosen network

    def at(self, document: object, site: str, chosen: str) -> Installed:
        """The study of a resolved ``document`` at ``site``, which chose the network of that label, "" for none.

        Raises:
            BadData: as ``installed``, or the site may not choose that network.
            NeedsPerson: as ``installed``.
        """
        if isinstance(document, dict) and document.get("plugins"):
            verify(StudyFile.from_document(document))  # each time: a wheel may be changed between two rounds
        digest = canonical.digest(document)
        key = (digest, site, chosen)
        if key not in self._known:
            study = installed(document)
            if len(self._known) >= REMEMBERED_STUDIES:
                self._known.clear()
            own = study.at(site, chosen)
            partition = describe(study, site, chosen)
            label = network_label(study, site, chosen)
            self._known[key] = Installed(study, own, label, digest, site, task_of(own), partition)
        return self._known[key]


def installed(document: object) -> ResolvedStudy:
    """The study of a resolved document, as the programs installed here understand it.

    Raises:
        BadData: it names something that is not installed, or means something else here; or runs code of others that it
            does not pin, or that is not here what it pins.
        NeedsPerson: this process has imported another build of that code.
    """
    written = StudyFile.from_document(document)
    verify(written)
    study = resolve(written)
    if study.document() != document:
        raise BadData(
            f"study `{study.study.name}` was written for another version of the installed task, network or method",
            hint="compare `site-agent --version` with the coordinator's",
            code="DECLINED_MODEL_MISMATCH",
        )
    return study


def verify(study: StudyFile) -> None:
    """Before any of it is imported: the code of others is what the study, and so the consent, pins. Raises as
    ``plugins.verify``.
    """
    plugins.verify(registry.uses(study), study.plugins)


def network_label(study: ResolvedStudy, site: str, chosen: str) -> str:
    """What the site's network is called; "" where the study has one network. Raises BadData: not allowed."""
    return study.label_of(site, chosen) if study.networks or chosen else ""
