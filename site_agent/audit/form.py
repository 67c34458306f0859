"""The form of a ledger: its lines, and what each record must hold. docs/auditors.md says the same in words.

Known fields are held to their form; types and fields of a later version pass, so that an old verifier reads a new
ledger, and says what it does not know.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from site_agent.audit.files import LedgerFiles, Lines
from wardround.errors import BadData
from wardround.signing.canonical import MAX_DEPTH, MAX_INTEGER, refuse_deep

TYPE = re.compile("[a-z][a-z_]{0,31}")
DIGEST = re.compile("[0-9a-f]{64}")
MANIFEST_FIELDS = ("bundle", "name", "dtype", "shape", "encoding", "bytes", "sha256")


def records(ledger: LedgerFiles | Path) -> Iterator[dict[str, Any]]:
    """A ledger's records, oldest first, for showing; not judged.

    Raises:
        Unavailable: there is no ledger.
        BadData: a line has not the form of a record; the message says which.
    """
    for number, line in enumerate(Lines(ledger), 1):
        try:
            record = record_in(line)
            if record["type"] == "receipt":
                receipt_in(record)
            yield record
        except BadData as error:
            raise BadData(
                f"ledger line {number} cannot be read: {error.message}", hint="`site-agent audit verify` says more"
            ) from None


def receipt_in(record: dict[str, Any]) -> dict[str, Any]:
    """What the receipt in a `receipt` record says, unsigned, for showing.

    Raises:
        BadData: it is none.
    """
    receipt = read(record["envelope"]["payload"].encode())
    for name, form in RECEIPT.items():
        if not isinstance(receipt, dict) or not form(receipt.get(name)):
            raise BadData(f"its envelope holds no receipt: {name}")
    return receipt  # type: ignore[no-any-return]


def record_in(line: bytes) -> dict[str, Any]:
    """The record in a line.

    Raises:
        BadData: not canonical JSON, no record, or one of its fields has not its form.
    """
    record = read(line)
    check(record)
    return record  # type: ignore[no-any-return]


def digest(value: Any) -> str:
    """SHA-256 (hex) of the canonical JSON of a value that ``read`` gave."""
    return hashlib.sha256(_ENCODER.encode(value).encode()).hexdigest()


def read(data: bytes) -> Any:
    """The value of canonical JSON. As ``wardround.signing.canonical.loads``, three times as fast.

    It is canonical exactly if writing what was read gives the same bytes: a double key, a space, another order or
    escape do not survive that. Only numbers must be looked at one by one, and how deep it is, where it can be deep: how
    far a parser goes depends on the Python that runs it.
    """
    try:
        text = data.decode()
        value = _DECODER.decode(text)
        written = _ENCODER.encode(value)
    except (ValueError, RecursionError) as error:
        raise BadData(f"not JSON: {str(error)[:120]}") from None
    if written != text:
        raise BadData("JSON, but not in canonical form")
    if text.count("[") + text.count("{") > MAX_DEPTH:  # else it cannot be
        refuse_deep(value)
    return value


def check(record: Any) -> None:
    """Raises BadData: not a record, or one of its fields has not its form. A type of a later version passes."""
    kind = record.get("type") if isinstance(record, dict) and record.get("v") == 1 else None
    if not isinstance(kind, str) or not TYPE.fullmatch(kind):
        raise BadData("it is no record")
    for name in (*COMMON, *REQUIRED.get(kind, ())):
        if name not in record:
            raise BadData(f"it does not have the form of a `{kind}` record: no {name}")
    for name, value in record.items():
        form = FORMS.get(name)
        if form is not None and not form(value):
            raise BadData(f"it does not have the form of a `{kind}` record: {name}")


def _integer(text: str) -> int:
    value = int(text) if len(text) < 20 else MAX_INTEGER + 1
    if abs(value) > MAX_INTEGER:
        raise ValueError("an integer beyond 2^53 - 1")
    return value


def _no_number(text: str) -> Any:
    raise ValueError(f"{text[:20]} is no integer")


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _digest(value: Any) -> bool:
    return isinstance(value, str) and DIGEST.fullmatch(value) is not None


def _object(**wanted: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        for name, form in wanted.items():  # noqa: SIM110  of every tensor of every line: a generator takes longer
            if name not in value or not form(value[name]):
                return False
        return True

    return fits


def _list(form: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(form(item) for item in value)


_DECODER = json.JSONDecoder(parse_float=_no_number, parse_int=_integer, parse_constant=_no_number)
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, check_circular=False)

COMMON = ("v", "seq", "ts", "type", "prev")
REQUIRED: dict[str, tuple[str, ...]] = {
    "genesis": ("ledger_id",),
    "identity": ("receipt_key",),
    "session": ("event",),
    "consent": ("event", "study"),
    "policy": ("event",),
    "declare": ("study", "standing"),
    "control": ("bytes",),
    "upload": (
        "upload_id", "study", "revision", "round", "attempt", "manifest_sha256", "payload_bytes", "tensors", "metrics",
    ),
    "resend": ("upload_id", "study", "revision", "round", "attempt", "try", "payload_bytes"),
    "receipt": ("upload_id", "envelope"),
    "blocked": ("study",),
    "held": ("study",),
    "released": ("study",),
    "rejected": ("study",),
    "left": (),
    "recovered": (),
}  # fmt: skip
FORMS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("ts", "event", "site", "federation", "software", "peer", "study", "standing", "code", "destination",
         "not_after", "upload_id", "ledger_id", "rule", "kind"), _text,
    ),
    **dict.fromkeys(
        ("seq", "revision", "round", "attempt", "payload_bytes", "num_examples", "num_validation", "bytes_up", "bytes",
         "torn_bytes", "try", "sent", "left_out"), _count,
    ),
    **dict.fromkeys(("prev", "manifest_sha256", "ledger_key", "receipt_key", "update"), _digest),
    "by": _object(name=_text, uid=_count),
    "tensors": _list(
        _object(bundle=_text, name=_text, dtype=_text, shape=_list(_count), encoding=_text, bytes=_count,
                sha256=_digest)
    ),
    "metrics": _list(_object(name=_text, value=_text)),
    "methods": _list(_object(method=_text, count=_count, bytes=_count)),
    "envelope": _object(payload_type=_text, payload=_text, keyid=_text, signature=_text),
    "continues": _object(ledger_id=_text, lines=_count, head=_digest),
}  # fmt: skip
RECEIPT: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("receipt_id", "study", "decision", "code", "upload_id"), _text),
    **dict.fromkeys(("revision", "round", "attempt"), _count),
}
