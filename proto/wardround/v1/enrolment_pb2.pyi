from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class EnrolRequest(_message.Message):
    __slots__ = ("invitation_id", "agent_version", "signing_request", "ledger_key", "proof")
    INVITATION_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    SIGNING_REQUEST_FIELD_NUMBER: _ClassVar[int]
    LEDGER_KEY_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    invitation_id: str
    agent_version: str
    signing_request: bytes
    ledger_key: bytes
    proof: bytes
    def __init__(self, invitation_id: _Optional[str] = ..., agent_version: _Optional[str] = ..., signing_request: _Optional[bytes] = ..., ledger_key: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class EnrolReply(_message.Message):
    __slots__ = ("site", "federation", "certificate", "authority", "receipt_key", "server_time_s", "renew_after_s", "coordinator_version", "renewal_certificate")
    SITE_FIELD_NUMBER: _ClassVar[int]
    FEDERATION_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_KEY_FIELD_NUMBER: _ClassVar[int]
    SERVER_TIME_S_FIELD_NUMBER: _ClassVar[int]
    RENEW_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_VERSION_FIELD_NUMBER: _ClassVar[int]
    RENEWAL_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    site: str
    federation: str
    certificate: bytes
    authority: bytes
    receipt_key: bytes
    server_time_s: int
    renew_after_s: int
    coordinator_version: str
    renewal_certificate: bytes
    def __init__(self, site: _Optional[str] = ..., federation: _Optional[str] = ..., certificate: _Optional[bytes] = ..., authority: _Optional[bytes] = ..., receipt_key: _Optional[bytes] = ..., server_time_s: _Optional[int] = ..., renew_after_s: _Optional[int] = ..., coordinator_version: _Optional[str] = ..., renewal_certificate: _Optional[bytes] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("agent_version", "signing_request")
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    SIGNING_REQUEST_FIELD_NUMBER: _ClassVar[int]
    agent_version: str
    signing_request: bytes
    def __init__(self, agent_version: _Optional[str] = ..., signing_request: _Optional[bytes] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("certificate", "authority", "server_time_s", "renew_after_s", "coordinator_version", "renewal_certificate")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    SERVER_TIME_S_FIELD_NUMBER: _ClassVar[int]
    RENEW_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_VERSION_FIELD_NUMBER: _ClassVar[int]
    RENEWAL_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    authority: bytes
    server_time_s: int
    renew_after_s: int
    coordinator_version: str
    renewal_certificate: bytes
    def __init__(self, certificate: _Optional[bytes] = ..., authority: _Optional[bytes] = ..., server_time_s: _Optional[int] = ..., renew_after_s: _Optional[int] = ..., coordinator_version: _Optional[str] = ..., renewal_certificate: _Optional[bytes] = ...) -> None: ...
