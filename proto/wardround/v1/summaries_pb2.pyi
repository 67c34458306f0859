from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SummaryRequestsRequest(_message.Message):
    __slots__ = ("agent_version",)
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    agent_version: str
    def __init__(self, agent_version: _Optional[str] = ...) -> None: ...

class SummaryRequestsReply(_message.Message):
    __slots__ = ("documents",)
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    documents: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, documents: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SiteSummary(_message.Message):
    __slots__ = ("request", "digest", "min_count", "digits", "rows", "columns")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MIN_COUNT_FIELD_NUMBER: _ClassVar[int]
    DIGITS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    request: str
    digest: bytes
    min_count: int
    digits: int
    rows: int
    columns: _containers.RepeatedCompositeFieldContainer[ColumnSummary]
    def __init__(self, request: _Optional[str] = ..., digest: _Optional[bytes] = ..., min_count: _Optional[int] = ..., digits: _Optional[int] = ..., rows: _Optional[int] = ..., columns: _Optional[_Iterable[_Union[ColumnSummary, _Mapping]]] = ...) -> None: ...

class ColumnSummary(_message.Message):
    __slots__ = ("absent", "values", "missing", "unfit", "mean", "std", "low", "high", "categories", "other")
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    UNFIT_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    STD_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    CATEGORIES_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    absent: bool
    values: int
    missing: int
    unfit: int
    mean: str
    std: str
    low: str
    high: str
    categories: _containers.RepeatedScalarFieldContainer[int]
    other: int
    def __init__(self, absent: _Optional[bool] = ..., values: _Optional[int] = ..., missing: _Optional[int] = ..., unfit: _Optional[int] = ..., mean: _Optional[str] = ..., std: _Optional[str] = ..., low: _Optional[str] = ..., high: _Optional[str] = ..., categories: _Optional[_Iterable[int]] = ..., other: _Optional[int] = ...) -> None: ...

class TellSummaryReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
