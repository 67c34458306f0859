from wardround.v1 import envelope_pb2 as _envelope_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttemptRef(_message.Message):
    __slots__ = ("study", "revision", "digest", "round", "attempt")
    STUDY_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    study: str
    revision: int
    digest: bytes
    round: int
    attempt: int
    def __init__(self, study: _Optional[str] = ..., revision: _Optional[int] = ..., digest: _Optional[bytes] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class SecureTold(_message.Message):
    __slots__ = ("attempt", "keys", "shares", "agreement", "opening")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    attempt: AttemptRef
    keys: _envelope_pb2.Envelope
    shares: SealedShares
    agreement: _envelope_pb2.Envelope
    opening: _envelope_pb2.Envelope
    def __init__(self, attempt: _Optional[_Union[AttemptRef, _Mapping]] = ..., keys: _Optional[_Union[_envelope_pb2.Envelope, _Mapping]] = ..., shares: _Optional[_Union[SealedShares, _Mapping]] = ..., agreement: _Optional[_Union[_envelope_pb2.Envelope, _Mapping]] = ..., opening: _Optional[_Union[_envelope_pb2.Envelope, _Mapping]] = ...) -> None: ...

class SecureToldReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SecureShown(_message.Message):
    __slots__ = ("attempt", "keys", "shares", "set", "agreements")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    AGREEMENTS_FIELD_NUMBER: _ClassVar[int]
    attempt: AttemptRef
    keys: Envelopes
    shares: SealedShares
    set: Envelopes
    agreements: Envelopes
    def __init__(self, attempt: _Optional[_Union[AttemptRef, _Mapping]] = ..., keys: _Optional[_Union[Envelopes, _Mapping]] = ..., shares: _Optional[_Union[SealedShares, _Mapping]] = ..., set: _Optional[_Union[Envelopes, _Mapping]] = ..., agreements: _Optional[_Union[Envelopes, _Mapping]] = ...) -> None: ...

class Envelopes(_message.Message):
    __slots__ = ("envelopes",)
    ENVELOPES_FIELD_NUMBER: _ClassVar[int]
    envelopes: _containers.RepeatedCompositeFieldContainer[_envelope_pb2.Envelope]
    def __init__(self, envelopes: _Optional[_Iterable[_Union[_envelope_pb2.Envelope, _Mapping]]] = ...) -> None: ...

class SealedShares(_message.Message):
    __slots__ = ("shares",)
    SHARES_FIELD_NUMBER: _ClassVar[int]
    shares: _containers.RepeatedCompositeFieldContainer[SealedShare]
    def __init__(self, shares: _Optional[_Iterable[_Union[SealedShare, _Mapping]]] = ...) -> None: ...

class SealedShare(_message.Message):
    __slots__ = ("site", "ciphertext")
    SITE_FIELD_NUMBER: _ClassVar[int]
    CIPHERTEXT_FIELD_NUMBER: _ClassVar[int]
    site: str
    ciphertext: bytes
    def __init__(self, site: _Optional[str] = ..., ciphertext: _Optional[bytes] = ...) -> None: ...

class EvidenceRequest(_message.Message):
    __slots__ = ("study", "revision", "round")
    STUDY_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    study: str
    revision: int
    round: int
    def __init__(self, study: _Optional[str] = ..., revision: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class SumEvidence(_message.Message):
    __slots__ = ("attempt", "keys", "set", "agreements", "self_masks", "mask_keys", "base", "model")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    AGREEMENTS_FIELD_NUMBER: _ClassVar[int]
    SELF_MASKS_FIELD_NUMBER: _ClassVar[int]
    MASK_KEYS_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    attempt: AttemptRef
    keys: Envelopes
    set: Envelopes
    agreements: Envelopes
    self_masks: _containers.RepeatedCompositeFieldContainer[OpenedSecret]
    mask_keys: _containers.RepeatedCompositeFieldContainer[OpenedSecret]
    base: bytes
    model: bytes
    def __init__(self, attempt: _Optional[_Union[AttemptRef, _Mapping]] = ..., keys: _Optional[_Union[Envelopes, _Mapping]] = ..., set: _Optional[_Union[Envelopes, _Mapping]] = ..., agreements: _Optional[_Union[Envelopes, _Mapping]] = ..., self_masks: _Optional[_Iterable[_Union[OpenedSecret, _Mapping]]] = ..., mask_keys: _Optional[_Iterable[_Union[OpenedSecret, _Mapping]]] = ..., base: _Optional[bytes] = ..., model: _Optional[bytes] = ...) -> None: ...

class OpenedSecret(_message.Message):
    __slots__ = ("site", "secret")
    SITE_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    site: str
    secret: bytes
    def __init__(self, site: _Optional[str] = ..., secret: _Optional[bytes] = ...) -> None: ...

class BlocksRequest(_message.Message):
    __slots__ = ("study", "revision", "round", "site", "blocks")
    STUDY_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    study: str
    revision: int
    round: int
    site: str
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, study: _Optional[str] = ..., revision: _Optional[int] = ..., round: _Optional[int] = ..., site: _Optional[str] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class BlocksReply(_message.Message):
    __slots__ = ("digests", "block")
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    digests: BlockDigests
    block: VectorBlock
    def __init__(self, digests: _Optional[_Union[BlockDigests, _Mapping]] = ..., block: _Optional[_Union[VectorBlock, _Mapping]] = ...) -> None: ...

class BlockDigests(_message.Message):
    __slots__ = ("sha256",)
    SHA256_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    def __init__(self, sha256: _Optional[bytes] = ...) -> None: ...

class VectorBlock(_message.Message):
    __slots__ = ("index", "data")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    index: int
    data: bytes
    def __init__(self, index: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
