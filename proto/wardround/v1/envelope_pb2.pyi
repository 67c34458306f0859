from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Envelope(_message.Message):
    __slots__ = ("payload_type", "payload", "keyid", "signature")
    PAYLOAD_TYPE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    KEYID_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    payload_type: str
    payload: bytes
    keyid: str
    signature: bytes
    def __init__(self, payload_type: _Optional[str] = ..., payload: _Optional[bytes] = ..., keyid: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...
