"""Protobuf messages to records and back, with the checks of form that need no knowledge of a study or a site.

Who sends a message is never in it: the servicers know the sender from its certificate. Whether an upload may count is
judged later, in ``coordinator.updates.admission``.
"""

from collections.abc import Sequence

from coordinator.calls import SMALL_MESSAGE, parsed
from coordinator.studies.study import Assignment, ModelRef, Study, TwoLines
from coordinator.updates.admission import Claim, LedgerStatement
from wardround import __version__, rpc
from wardround.errors import BadData
from wardround.records.receipts import MAX_NEW_LINES, LedgerHead
from wardround.records.study import METRIC_NAME, STUDY_NAME
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


def claim_from(site: str, message: pb.UploadOpen, most_tensors: int) -> Claim:
    """What a site opens an upload with. Forms and lengths are checked here, the rest by ``admission``.

    Raises:
        BadData: MESSAGE_MALFORMED, or a manifest that is none.
    """
    fits = (
        STUDY_NAME.fullmatch(message.study)
        and len(message.digest) == 32
        and len(message.metrics) <= 64
        and all(METRIC_NAME.fullmatch(metric.name) and len(metric.value) <= 40 for metric in message.metrics)
        and all(count < 2**53 for count in (message.num_examples, message.num_validation))
    )
    if not fits:
        raise BadData("the upload's opening has not its form", code="MESSAGE_MALFORMED")
    return Claim(
        upload_id=upload_id_from(message.upload_id), site=site, study=message.study, revision=message.revision,
        digest=message.digest.hex(), round=message.round, attempt=message.attempt,
        manifest=rpc.manifest_from(message.manifest, most_tensors),
        metrics=tuple((metric.name, metric.value) for metric in message.metrics),
        num_examples=message.num_examples, num_validation=message.num_validation,
        statement=statement_from(message.ledger, message.new_line_hashes),
    )  # fmt: skip


def statement_from(head: pb.LedgerHead, new_lines: Sequence[bytes]) -> LedgerStatement:
    """What a site states about its ledger.

    Raises:
        BadData: MESSAGE_MALFORMED, also for more than ``MAX_NEW_LINES`` lines.
    """
    fits = (
        len(head.head) == 32
        and len(head.signature) == 64
        and 1 <= len(head.ledger_id) <= 64
        and head.lines < 2**53
        and len(new_lines) <= MAX_NEW_LINES
        and all(len(line) == 32 for line in new_lines)
    )
    if not fits:
        raise BadData("what is said of the ledger has not its form", code="MESSAGE_MALFORMED")
    return LedgerStatement(LedgerHead(head.ledger_id, head.lines, head.head.hex()), head.signature, tuple(new_lines))


def upload_id_from(data: bytes) -> str:
    """An upload's id as hex.

    Raises:
        BadData: MESSAGE_MALFORMED, it is not 16 bytes.
    """
    if len(data) != 16:
        raise BadData(f"an upload id of {len(data)} bytes, 16 are wanted", code="MESSAGE_MALFORMED")
    return data.hex()


def offer_message(study: Study) -> pb.StudyOffer:
    """A study as it is offered to its sites."""
    return pb.StudyOffer(
        study=study.name, revision=study.revision, digest=bytes.fromhex(study.digest),
        document=canonical.dumps(study.file.document()), initial_model=rpc.manifest_message(study.manifest),
        state=study.life.phase.value,
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
