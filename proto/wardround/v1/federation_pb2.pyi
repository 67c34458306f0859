from wardround.v1 import envelope_pb2 as _envelope_pb2
from wardround.v1 import secure_pb2 as _secure_pb2
from wardround.v1 import tensors_pb2 as _tensors_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union
from wardround.v1.envelope_pb2 import Envelope as Envelope

DESCRIPTOR: _descriptor.FileDescriptor

class RefusalCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_UNSPECIFIED: _ClassVar[RefusalCode]
    VERSION_UNSUPPORTED: _ClassVar[RefusalCode]
    CERTIFICATE_PROFILE: _ClassVar[RefusalCode]
    CERTIFICATE_EXPIRED: _ClassVar[RefusalCode]
    CERTIFICATE_UNKNOWN: _ClassVar[RefusalCode]
    SITE_REVOKED: _ClassVar[RefusalCode]
    CALL_NOT_ALLOWED: _ClassVar[RefusalCode]
    MESSAGE_MALFORMED: _ClassVar[RefusalCode]
    COORDINATOR_TROUBLE: _ClassVar[RefusalCode]
    SITE_CONNECTED_TWICE: _ClassVar[RefusalCode]
    INVITATION_UNKNOWN: _ClassVar[RefusalCode]
    INVITATION_EXPIRED: _ClassVar[RefusalCode]
    INVITATION_USED: _ClassVar[RefusalCode]
    SIGNING_REQUEST_WEAK: _ClassVar[RefusalCode]
    LEDGER_KEY_PROOF: _ClassVar[RefusalCode]
    STUDY_UNKNOWN: _ClassVar[RefusalCode]
    REVISION_CHANGED: _ClassVar[RefusalCode]
    STUDY_NOT_RUNNING: _ClassVar[RefusalCode]
    ROUND_CLOSED: _ClassVar[RefusalCode]
    ROUND_NOT_ASKED: _ClassVar[RefusalCode]
    UPLOAD_ID_CONFLICT: _ClassVar[RefusalCode]
    UPLOAD_DUPLICATE: _ClassVar[RefusalCode]
    MANIFEST_NAMES: _ClassVar[RefusalCode]
    MANIFEST_SHAPE: _ClassVar[RefusalCode]
    MANIFEST_DTYPE: _ClassVar[RefusalCode]
    METRICS_UNDECLARED: _ClassVar[RefusalCode]
    COUNT_INVALID: _ClassVar[RefusalCode]
    PAYLOAD_INCOMPLETE: _ClassVar[RefusalCode]
    PAYLOAD_DIGEST: _ClassVar[RefusalCode]
    TENSOR_NOT_FINITE: _ClassVar[RefusalCode]
    TENSOR_NORM: _ClassVar[RefusalCode]
    LEDGER_ROLLBACK: _ClassVar[RefusalCode]
    LEDGER_FORK: _ClassVar[RefusalCode]
    LEDGER_SIGNATURE: _ClassVar[RefusalCode]
    TOO_BUSY: _ClassVar[RefusalCode]
    NOT_RECEIVED: _ClassVar[RefusalCode]
    TENSOR_ENCODING: _ClassVar[RefusalCode]
    DECLINED_NOT_APPROVED: _ClassVar[RefusalCode]
    DECLINED_WITHDRAWN: _ClassVar[RefusalCode]
    DECLINED_DATA_CHANGED: _ClassVar[RefusalCode]
    DECLINED_DATA_INVALID: _ClassVar[RefusalCode]
    DECLINED_MODEL_MISMATCH: _ClassVar[RefusalCode]
    DECLINED_POLICY: _ClassVar[RefusalCode]
    DECLINED_TRAINING_FAILED: _ClassVar[RefusalCode]
    DECLINED_RESOURCES: _ClassVar[RefusalCode]
    DECLINED_HELD: _ClassVar[RefusalCode]
    DECLINED_BEYOND_CONSENT: _ClassVar[RefusalCode]
    DECLINED_VETO: _ClassVar[RefusalCode]
    DECLINED_UNKNOWN: _ClassVar[RefusalCode]
    SUMMARY_UNKNOWN: _ClassVar[RefusalCode]
    SUMMARY_CHANGED: _ClassVar[RefusalCode]
    SUMMARY_INVALID: _ClassVar[RefusalCode]

class SiteStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SITE_STATUS_UNSPECIFIED: _ClassVar[SiteStatus]
    READY: _ClassVar[SiteStatus]
    WITHDRAWN: _ClassVar[SiteStatus]
    DECLINED: _ClassVar[SiteStatus]
    HELD: _ClassVar[SiteStatus]
    FITS: _ClassVar[SiteStatus]
    DOES_NOT_FIT: _ClassVar[SiteStatus]
    TRAINING: _ClassVar[SiteStatus]
REFUSAL_UNSPECIFIED: RefusalCode
VERSION_UNSUPPORTED: RefusalCode
CERTIFICATE_PROFILE: RefusalCode
CERTIFICATE_EXPIRED: RefusalCode
CERTIFICATE_UNKNOWN: RefusalCode
SITE_REVOKED: RefusalCode
CALL_NOT_ALLOWED: RefusalCode
MESSAGE_MALFORMED: RefusalCode
COORDINATOR_TROUBLE: RefusalCode
SITE_CONNECTED_TWICE: RefusalCode
INVITATION_UNKNOWN: RefusalCode
INVITATION_EXPIRED: RefusalCode
INVITATION_USED: RefusalCode
SIGNING_REQUEST_WEAK: RefusalCode
LEDGER_KEY_PROOF: RefusalCode
STUDY_UNKNOWN: RefusalCode
REVISION_CHANGED: RefusalCode
STUDY_NOT_RUNNING: RefusalCode
ROUND_CLOSED: RefusalCode
ROUND_NOT_ASKED: RefusalCode
UPLOAD_ID_CONFLICT: RefusalCode
UPLOAD_DUPLICATE: RefusalCode
MANIFEST_NAMES: RefusalCode
MANIFEST_SHAPE: RefusalCode
MANIFEST_DTYPE: RefusalCode
METRICS_UNDECLARED: RefusalCode
COUNT_INVALID: RefusalCode
PAYLOAD_INCOMPLETE: RefusalCode
PAYLOAD_DIGEST: RefusalCode
TENSOR_NOT_FINITE: RefusalCode
TENSOR_NORM: RefusalCode
LEDGER_ROLLBACK: RefusalCode
LEDGER_FORK: RefusalCode
LEDGER_SIGNATURE: RefusalCode
TOO_BUSY: RefusalCode
NOT_RECEIVED: RefusalCode
TENSOR_ENCODING: RefusalCode
DECLINED_NOT_APPROVED: RefusalCode
DECLINED_WITHDRAWN: RefusalCode
DECLINED_DATA_CHANGED: RefusalCode
DECLINED_DATA_INVALID: RefusalCode
DECLINED_MODEL_MISMATCH: RefusalCode
DECLINED_POLICY: RefusalCode
DECLINED_TRAINING_FAILED: RefusalCode
DECLINED_RESOURCES: RefusalCode
DECLINED_HELD: RefusalCode
DECLINED_BEYOND_CONSENT: RefusalCode
DECLINED_VETO: RefusalCode
DECLINED_UNKNOWN: RefusalCode
SUMMARY_UNKNOWN: RefusalCode
SUMMARY_CHANGED: RefusalCode
SUMMARY_INVALID: RefusalCode
SITE_STATUS_UNSPECIFIED: SiteStatus
READY: SiteStatus
WITHDRAWN: SiteStatus
DECLINED: SiteStatus
HELD: SiteStatus
FITS: SiteStatus
DOES_NOT_FIT: SiteStatus
TRAINING: SiteStatus

class StudiesRequest(_message.Message):
    __slots__ = ("agent_version", "after", "instance")
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    agent_version: str
    after: str
    instance: bytes
    def __init__(self, agent_version: _Optional[str] = ..., after: _Optional[str] = ..., instance: _Optional[bytes] = ...) -> None: ...

class StudiesReply(_message.Message):
    __slots__ = ("studies", "coordinator_version", "more", "last_receipt")
    STUDIES_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_VERSION_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    LAST_RECEIPT_FIELD_NUMBER: _ClassVar[int]
    studies: _containers.RepeatedCompositeFieldContainer[StudyOffer]
    coordinator_version: str
    more: bool
    last_receipt: bytes
    def __init__(self, studies: _Optional[_Iterable[_Union[StudyOffer, _Mapping]]] = ..., coordinator_version: _Optional[str] = ..., more: _Optional[bool] = ..., last_receipt: _Optional[bytes] = ...) -> None: ...

class StudyOffer(_message.Message):
    __slots__ = ("study", "revision", "digest", "document", "initial_model", "state")
    STUDY_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    INITIAL_MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    study: str
    revision: int
    digest: bytes
    document: bytes
    initial_model: _tensors_pb2.Manifest
    state: str
    def __init__(self, study: _Optional[str] = ..., revision: _Optional[int] = ..., digest: _Optional[bytes] = ..., document: _Optional[bytes] = ..., initial_model: _Optional[_Union[_tensors_pb2.Manifest, _Mapping]] = ..., state: _Optional[str] = ...) -> None: ...

class DeclareRequest(_message.Message):
    __slots__ = ("study", "revision", "digest", "status", "round", "attempt", "code", "rows", "estimate_s")
    STUDY_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_S_FIELD_NUMBER: _ClassVar[int]
    study: str
    revision: int
    digest: bytes
    status: SiteStatus
    round: int
    attempt: int
    code: RefusalCode
    rows: int
    estimate_s: int
    def __init__(self, study: _Optional[str] = ..., revision: _Optional[int] = ..., digest: _Optional[bytes] = ..., status: _Optional[_Union[SiteStatus, str]] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ..., code: _Optional[_Union[RefusalCode, str]] = ..., rows: _Optional[int] = ..., estimate_s: _Optional[int] = ...) -> None: ...

class DeclareReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("agent_version", "instance")
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    agent_version: str
    instance: bytes
    def __init__(self, agent_version: _Optional[str] = ..., instance: _Optional[bytes] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("offer", "assignment", "goodbye", "certificate_fork", "secure", "coordinator_version")
    OFFER_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FORK_FIELD_NUMBER: _ClassVar[int]
    SECURE_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_VERSION_FIELD_NUMBER: _ClassVar[int]
    offer: StudyOffer
    assignment: Assignment
    goodbye: Goodbye
    certificate_fork: CertificateFork
    secure: _secure_pb2.SecureShown
    coordinator_version: str
    def __init__(self, offer: _Optional[_Union[StudyOffer, _Mapping]] = ..., assignment: _Optional[_Union[Assignment, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., certificate_fork: _Optional[_Union[CertificateFork, _Mapping]] = ..., secure: _Optional[_Union[_secure_pb2.SecureShown, _Mapping]] = ..., coordinator_version: _Optional[str] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CertificateFork(_message.Message):
    __slots__ = ("since_s",)
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    since_s: int
    def __init__(self, since_s: _Optional[int] = ...) -> None: ...

class ModelRef(_message.Message):
    __slots__ = ("round", "digest")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    round: int
    digest: bytes
    def __init__(self, round: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("study", "revision", "digest", "base", "best", "round", "attempt", "train", "validate", "stop")
    STUDY_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    study: str
    revision: int
    digest: bytes
    base: ModelRef
    best: ModelRef
    round: int
    attempt: int
    train: Train
    validate: Validate
    stop: Stop
    def __init__(self, study: _Optional[str] = ..., revision: _Optional[int] = ..., digest: _Optional[bytes] = ..., base: _Optional[_Union[ModelRef, _Mapping]] = ..., best: _Optional[_Union[ModelRef, _Mapping]] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ..., train: _Optional[_Union[Train, _Mapping]] = ..., validate: _Optional[_Union[Validate, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ...) -> None: ...

class Train(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Validate(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Stop(_message.Message):
    __slots__ = ("reason", "contributions")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Stop.Reason]
        FINISHED: _ClassVar[Stop.Reason]
        STOPPED: _ClassVar[Stop.Reason]
        FAILED: _ClassVar[Stop.Reason]
        PAUSED: _ClassVar[Stop.Reason]
        ROUND_FAILED: _ClassVar[Stop.Reason]
    REASON_UNSPECIFIED: Stop.Reason
    FINISHED: Stop.Reason
    STOPPED: Stop.Reason
    FAILED: Stop.Reason
    PAUSED: Stop.Reason
    ROUND_FAILED: Stop.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    reason: Stop.Reason
    contributions: _containers.RepeatedCompositeFieldContainer[Contribution]
    def __init__(self, reason: _Optional[_Union[Stop.Reason, str]] = ..., contributions: _Optional[_Iterable[_Union[Contribution, _Mapping]]] = ...) -> None: ...

class Contribution(_message.Message):
    __slots__ = ("site", "rounds", "capped", "left_out")
    SITE_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    CAPPED_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    site: str
    rounds: _containers.RepeatedScalarFieldContainer[int]
    capped: _containers.RepeatedScalarFieldContainer[int]
    left_out: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, site: _Optional[str] = ..., rounds: _Optional[_Iterable[int]] = ..., capped: _Optional[_Iterable[int]] = ..., left_out: _Optional[_Iterable[int]] = ...) -> None: ...

class DownloadRequest(_message.Message):
    __slots__ = ("study", "revision", "model", "offset")
    STUDY_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    study: str
    revision: int
    model: ModelRef
    offset: int
    def __init__(self, study: _Optional[str] = ..., revision: _Optional[int] = ..., model: _Optional[_Union[ModelRef, _Mapping]] = ..., offset: _Optional[int] = ...) -> None: ...

class DownloadReply(_message.Message):
    __slots__ = ("manifest", "chunk")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    manifest: _tensors_pb2.Manifest
    chunk: _tensors_pb2.Chunk
    def __init__(self, manifest: _Optional[_Union[_tensors_pb2.Manifest, _Mapping]] = ..., chunk: _Optional[_Union[_tensors_pb2.Chunk, _Mapping]] = ...) -> None: ...

class UploadRequest(_message.Message):
    __slots__ = ("open", "chunk", "commit", "inquire")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    INQUIRE_FIELD_NUMBER: _ClassVar[int]
    open: UploadOpen
    chunk: _tensors_pb2.Chunk
    commit: UploadCommit
    inquire: UploadInquire
    def __init__(self, open: _Optional[_Union[UploadOpen, _Mapping]] = ..., chunk: _Optional[_Union[_tensors_pb2.Chunk, _Mapping]] = ..., commit: _Optional[_Union[UploadCommit, _Mapping]] = ..., inquire: _Optional[_Union[UploadInquire, _Mapping]] = ...) -> None: ...

class UploadOpen(_message.Message):
    __slots__ = ("upload_id", "study", "revision", "digest", "round", "attempt", "manifest", "metrics", "num_examples", "num_validation", "ledger", "new_line_hashes", "submission")
    UPLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    STUDY_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_VALIDATION_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    NEW_LINE_HASHES_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    upload_id: bytes
    study: str
    revision: int
    digest: bytes
    round: int
    attempt: int
    manifest: _tensors_pb2.Manifest
    metrics: _containers.RepeatedCompositeFieldContainer[Metric]
    num_examples: int
    num_validation: int
    ledger: LedgerHead
    new_line_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    submission: _envelope_pb2.Envelope
    def __init__(self, upload_id: _Optional[bytes] = ..., study: _Optional[str] = ..., revision: _Optional[int] = ..., digest: _Optional[bytes] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ..., manifest: _Optional[_Union[_tensors_pb2.Manifest, _Mapping]] = ..., metrics: _Optional[_Iterable[_Union[Metric, _Mapping]]] = ..., num_examples: _Optional[int] = ..., num_validation: _Optional[int] = ..., ledger: _Optional[_Union[LedgerHead, _Mapping]] = ..., new_line_hashes: _Optional[_Iterable[bytes]] = ..., submission: _Optional[_Union[_envelope_pb2.Envelope, _Mapping]] = ...) -> None: ...

class LedgerPage(_message.Message):
    __slots__ = ("ledger", "new_line_hashes")
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    NEW_LINE_HASHES_FIELD_NUMBER: _ClassVar[int]
    ledger: LedgerHead
    new_line_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, ledger: _Optional[_Union[LedgerHead, _Mapping]] = ..., new_line_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LedgerKnown(_message.Message):
    __slots__ = ("lines",)
    LINES_FIELD_NUMBER: _ClassVar[int]
    lines: int
    def __init__(self, lines: _Optional[int] = ...) -> None: ...

class UploadInquire(_message.Message):
    __slots__ = ("upload_id",)
    UPLOAD_ID_FIELD_NUMBER: _ClassVar[int]
    upload_id: bytes
    def __init__(self, upload_id: _Optional[bytes] = ...) -> None: ...

class UploadCommit(_message.Message):
    __slots__ = ("manifest_sha256",)
    MANIFEST_SHA256_FIELD_NUMBER: _ClassVar[int]
    manifest_sha256: bytes
    def __init__(self, manifest_sha256: _Optional[bytes] = ...) -> None: ...

class UploadReply(_message.Message):
    __slots__ = ("offset", "receipt")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    offset: int
    receipt: _envelope_pb2.Envelope
    def __init__(self, offset: _Optional[int] = ..., receipt: _Optional[_Union[_envelope_pb2.Envelope, _Mapping]] = ...) -> None: ...

class Metric(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class LedgerHead(_message.Message):
    __slots__ = ("ledger_id", "lines", "head", "signature")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    ledger_id: str
    lines: int
    head: bytes
    signature: bytes
    def __init__(self, ledger_id: _Optional[str] = ..., lines: _Optional[int] = ..., head: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class ReceiptsRequest(_message.Message):
    __slots__ = ("agent_version",)
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    agent_version: str
    def __init__(self, agent_version: _Optional[str] = ...) -> None: ...

class ReceiptsReply(_message.Message):
    __slots__ = ("envelopes",)
    ENVELOPES_FIELD_NUMBER: _ClassVar[int]
    envelopes: _containers.RepeatedCompositeFieldContainer[_envelope_pb2.Envelope]
    def __init__(self, envelopes: _Optional[_Iterable[_Union[_envelope_pb2.Envelope, _Mapping]]] = ...) -> None: ...

class ReturnRequest(_message.Message):
    __slots__ = ("envelopes",)
    ENVELOPES_FIELD_NUMBER: _ClassVar[int]
    envelopes: _containers.RepeatedCompositeFieldContainer[_envelope_pb2.Envelope]
    def __init__(self, envelopes: _Optional[_Iterable[_Union[_envelope_pb2.Envelope, _Mapping]]] = ...) -> None: ...

class ReturnReply(_message.Message):
    __slots__ = ("last_receipt",)
    LAST_RECEIPT_FIELD_NUMBER: _ClassVar[int]
    last_receipt: bytes
    def __init__(self, last_receipt: _Optional[bytes] = ...) -> None: ...
