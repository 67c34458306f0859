"""A study as the coordinator offers it to a site: its settings, its initial model, and the digest over both."""

from dataclasses import dataclass

from wardround.errors import BadData
from wardround.records.messages import manifest_from, manifest_message
from wardround.records.study import STUDY_NAME, StudyFile, study_digest
from wardround.signing import canonical
from wardround.tensors.manifests import Manifest
from wardround.v1 import federation_pb2 as pb

STATES = ("created", "waiting", "running", "paused", "finished", "stopped", "failed")
MAX_DEPTH = 32  # tables within tables of a study


@dataclass(frozen=True)
class StudyOffer:
    """One exact study. ``digest`` (hex) is over the settings and the initial model.

    ``initial_model`` has what is shared: every update has exactly these tensors, or where the sites' architectures
    differ, its own site's part of them.
    """

    revision: int
    digest: str
    state: str  # one of ``STATES``
    file: StudyFile
    initial_model: Manifest

    @property
    def study(self) -> str:
        """The study's name."""
        return self.file.study.name

    @classmethod
    def from_message(cls, message: pb.StudyOffer) -> "StudyOffer":
        """An offer whose parts agree: the document is a whole study of that name, and the digest is over it.

        Raises:
            BadData: a name, document, state or manifest of another form, or a digest that is not over them.
        """
        study, digest = message.study, message.digest.hex()
        if not STUDY_NAME.fullmatch(study):
            raise BadData("the coordinator offers a study whose name is not of our form", code="MESSAGE_MALFORMED")
        document = canonical.loads(message.document)
        if is_too_deep(document):
            raise BadData(
                f"the coordinator offers `{study}` with tables too deep within tables", code="MESSAGE_MALFORMED"
            )
        file = StudyFile.from_document(document, f"study `{study}`")
        initial_model = manifest_from(message.initial_model)
        if file.document() != document:
            raise BadData(f"the coordinator offers `{study}` without some of its settings", code="MESSAGE_MALFORMED")
        if message.state not in STATES:
            raise BadData(f"the coordinator offers `{study}` in a state of no known name", code="MESSAGE_MALFORMED")
        if file.study.name != study:
            raise BadData(f"the coordinator offers `{study}` with another study's file", code="MESSAGE_MALFORMED")
        if study_digest(document, initial_model.digest()) != digest:
            raise BadData(
                f"the coordinator offers `{study}` under a digest that is not its own: {digest[:12]}…",
                code="REVISION_CHANGED",
            )
        return cls(message.revision, digest, message.state, file, initial_model)

    def to_message(self) -> pb.StudyOffer:
        return pb.StudyOffer(
            study=self.study, revision=self.revision, digest=bytes.fromhex(self.digest), state=self.state,
            document=canonical.dumps(self.file.document()), initial_model=manifest_message(self.initial_model),
        )  # fmt: skip


def is_too_deep(document: object) -> bool:
    """Whether tables lie within tables deeper than any study of ours has them."""
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [item for table in level if isinstance(table, dict | list) for item in _items(table)]
        if not level:
            return False
    return True


def _items(table: dict[object, object] | list[object]) -> list[object]:
    return list(table.values()) if isinstance(table, dict) else table
