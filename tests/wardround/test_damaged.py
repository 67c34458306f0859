"""What fuzzing found in the parsers that both programs use: each ends in an error of ours now."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from wardround.errors import BadData, UsageProblem, WardroundError
from wardround.local import control, frames
from wardround.records.schema import parse_toml, read_toml
from wardround.records.study import load
from wardround.signing import canonical, certificates

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "heart_disease.toml"
DEEP = 5000


def nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def test_a_document_has_at_most_64_levels_read_or_written() -> None:
    deepest = nested(64)
    assert canonical.loads(canonical.dumps(deepest)) == canonical.read(b"[" * 64 + b"0" + b"]" * 64) == deepest
    for act in (canonical.dumps, canonical.refuse_deep):
        with pytest.raises(BadData, match="nested more than 64 levels"):
            act(nested(65))


@pytest.mark.parametrize("levels", [65, 900, 100_000])
@pytest.mark.parametrize("read", [canonical.loads, canonical.read])
def test_json_that_is_nested_deeply_is_refused(read: Callable[[bytes], Any], levels: int) -> None:
    """It was a RecursionError, here or in whoever wrote it again."""
    with pytest.raises(BadData, match=r"nested|not JSON"):
        read(b"[" * levels + b"0" + b"]" * levels)
    with pytest.raises(BadData, match=r"nested|not JSON"):
        read(b'{"a":' * levels + b"0" + b"}" * levels)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\xff", "not UTF-8"), (b"a = ", "not TOML"), (b"a = " + b"[" * DEEP, "not TOML"), (b"a = " + b"9" * 5000,
        "not TOML"),
        (b"a = " + b"[" * 100 + b"]" * 100, "nested more than 64"),
    ],
    ids=["bytes", "no value", "brackets", "digits", "levels"],
)  # fmt: skip
def test_toml_that_ends_a_reader_is_refused(data: bytes, why: str, tmp_path: Path) -> None:
    with pytest.raises(BadData, match=why):
        parse_toml(data)
    path = tmp_path / "x.toml"
    path.write_bytes(data)
    with pytest.raises(BadData, match=f"x.toml: {why}"):
        read_toml(path)


@pytest.mark.parametrize("value", ["[" * DEEP, "9" * 5000, "[" * 100 + "]" * 100], ids=["brackets", "digits", "levels"])
def test_a_setting_that_ends_a_reader_is_refused(value: str) -> None:
    with pytest.raises(UsageProblem, match=r"--set training\.learning_rate"):
        load(EXAMPLE, [f"training.learning_rate={value}"])


def test_a_key_or_certificate_of_an_unknown_kind_is_refused() -> None:
    """Cryptography raises four kinds of error, one of which is no ValueError, and reads some parts only later."""
    key = certificates.new_key()
    pem = certificates.key_pem(key)
    other = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    for bad in (b"", pem[:60], pem * 100, other):
        with pytest.raises(BadData, match=r"^key\.pem"):
            certificates.load_key(bad, "key.pem")
    for bad in (
        b"",
        pem,
        b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        b"a" * (certificates.MAX_PEM + 1),
    ):
        with pytest.raises(BadData, match=r"^c\.pem"):
            certificates.load_certificate(bad, "c.pem")


def test_a_signing_request_of_another_version_is_refused() -> None:
    request = bytearray(certificates.signing_request(certificates.new_key()))
    request[request.index(b"\x02\x01\x00") + 2] = 32  # the version
    with pytest.raises(BadData) as refused:
        certificates.requested_key(bytes(request))
    assert refused.value.code == "SIGNING_REQUEST_WEAK"


def answered(data: bytes) -> Any:
    """What a command makes of these bytes from a service."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with mock.patch.object(control, "connect", return_value=ours.dup()):
            return control.call(Path("control.sock"), {"command": "status"}, lambda item: None)


@pytest.mark.parametrize(
    "line",
    [
        b"1", b"[]", b"{", b"\xff", b"[" * DEEP, b'{"error": 1}', b'{"error": {}}', b'{"error": {"message": "no"}}',
        b'{"error": {"message": "", "hint": "", "code": "", "exit_code": 65}}',
        b'{"error": {"message": {}, "hint": "", "code": "", "exit_code": 65}}',
        b'{"error": {"message": "no", "hint": "", "code": "", "exit_code": "65"}}',
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_refused(line: bytes) -> None:
    with pytest.raises(BadData, match="not an answer"):
        answered(line + b"\n")


def test_an_error_crosses_the_control_socket_as_itself() -> None:
    error = frames.failure_from({"message": "no", "hint": "look", "code": "STUDY_UNKNOWN", "exit_code": 65})
    assert (type(error), error.message, error.hint, error.code) == (BadData, "no", "look", "STUDY_UNKNOWN")
    assert type(frames.failure_from({"message": "no", "hint": "", "code": "", "exit_code": 1000})) is WardroundError


def test_a_requests_fields_are_of_their_kind() -> None:
    assert control.wanted({"study": "a", "round": 2}, study=str, round=int) == ("a", 2)
    for request in ({}, {"study": 1, "round": 2}, {"study": "a", "round": True}, {"study": "a", "round": None}):
        with pytest.raises(UsageProblem, match=r"the request's `(study|round)` is not a (text|whole number)"):
            control.wanted(request, study=str, round=int)


def test_a_message_is_cut_whatever_it_quotes() -> None:
    """A key of 5,000 characters in a file or an offer stood in the sentence, and in a trailer of gRPC."""
    error = BadData("a" * 5000, hint="b" * 5000)
    assert (len(error.message), len(error.hint), len(str(error))) == (2001, 2001, 2001)
    with pytest.raises(BadData) as refused:
        canonical.dumps({"a" * 5000: 1.5})
    assert len(refused.value.message) < 200


@pytest.mark.parametrize("line", [b'{"command":"revoke","site":"\\ud800"}', b"[" * DEEP, b"7", b"\xff"])
def test_a_request_that_is_none_is_refused(line: bytes) -> None:
    """Half a character in a site's name reached the database, which failed."""
    with pytest.raises(UsageProblem, match="not a request"):
        frames.request_from(line)
