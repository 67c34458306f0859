"""Protobuf messages to records and back, with the checks of form that need no knowledge of a study or a site.

Who sends a message is never in it: the servicers know the sender from its certificate. Whether an upload may count is
judged later, in ``coordinator.updates.admission``.
"""

from collections.abc import Sequence

from coordinator.calls import SMALL_MESSAGE, parsed
from coordinator.studies.assignments import Assignment, ModelRef
from coordinator.studies.streams import TwoLines
from coordinator.studies.study import Study
from wardround import __version__, rpc
from wardround.errors import BadData
from wardround.signing import canonical
from wardround.v1 import federation_pb2 as pb

MAX_CHUNK = 1024 * 1024
MAX_OFFERS = 1024 * 1024  # bytes of a page of studies, unless it holds one study alone


def later_upload_message(data: bytes) -> pb.UploadRequest:
    """A message of an upload after the first one.

    One that is not small must be a chunk and nothing else, which is seen before it is parsed: parsing a long message
    with structure in it costs many times its length in memory.

    Raises:
        BadData: it is neither a chunk of at most 1 MiB nor a small message (MESSAGE_MALFORMED).
    """
    if len(data) > SMALL_MESSAGE and not rpc.is_one_field(data, pb.UploadRequest.CHUNK_FIELD_NUMBER):
        raise out_of_order()
    message = parsed(pb.UploadRequest, data)
    if len(message.chunk.data) > MAX_CHUNK:
        raise out_of_order()
    return message


def out_of_order() -> BadData:
    """The error for a message that has no place in an upload."""
    return BadData("after `open` come chunks of at most 1 MiB and one commit", code="MESSAGE_MALFORMED")


def offer_message(study: Study) -> pb.StudyOffer:
    """A study as it is offered to its sites."""
    return pb.StudyOffer(
        study=study.name, revision=study.revision, digest=bytes.fromhex(study.digest),
        document=canonical.dumps(study.file.document()), initial_model=rpc.manifest_message(study.manifest),
        state=study.state.phase.value,
    )  # fmt: skip


def page_of_offers(studies: Sequence[Study]) -> tuple[list[pb.StudyOffer], bool]:
    """As many of ``studies`` as one reply may hold, at least the first; and whether some are left for the next page."""
    offers: list[pb.StudyOffer] = []
    size = 0
    for study in studies:
        offer = offer_message(study)
        size += offer.ByteSize()
        if offers and size > MAX_OFFERS:
            return offers, True
        offers.append(offer)
    return offers, False


def event_message(item: Study | Assignment | TwoLines) -> pb.Event:
    """One item of a site's stream: a study, an assignment, or the warning that two hold its keys."""
    if isinstance(item, TwoLines):
        return pb.Event(two_lines=pb.TwoLines(since_s=item.since_s), coordinator_version=__version__)
    if isinstance(item, Study):
        return pb.Event(offer=offer_message(item), coordinator_version=__version__)
    return pb.Event(assignment=assignment_message(item), coordinator_version=__version__)


def goodbye_message() -> pb.Event:
    """The last item of a stream when the coordinator goes down."""
    return pb.Event(goodbye=pb.Goodbye(), coordinator_version=__version__)


def assignment_message(assignment: Assignment) -> pb.Assignment:
    """What a site is asked to do."""
    message = pb.Assignment(
        study=assignment.study, revision=assignment.revision, digest=bytes.fromhex(assignment.digest),
        base=_model_message(assignment.base), round=assignment.round, attempt=assignment.attempt,
    )  # fmt: skip
    if assignment.best is not None:
        message.best.CopyFrom(_model_message(assignment.best))
    if assignment.kind == "stop":
        contributions = [
            pb.Contribution(
                site=site, rounds=rounds,
                capped=assignment.capped.get(site, ()), left_out=assignment.left_out.get(site, ()),
            )
            for site, rounds in assignment.contributed.items()
        ]  # fmt: skip
        message.stop.CopyFrom(pb.Stop(reason=assignment.reason, contributions=contributions))
    elif assignment.kind == "validate":
        message.validate.SetInParent()
    else:
        message.train.SetInParent()
    return message


def _model_message(model: ModelRef) -> pb.ModelRef:
    return pb.ModelRef(round=model.round, digest=bytes.fromhex(model.digest))
