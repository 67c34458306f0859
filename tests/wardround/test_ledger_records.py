"""The ledger's entries as typed records: what was written is read, and written again byte for byte."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools import verify_ledger
from tools.evidence_tamper import Made
from wardround.errors import BadData
from wardround.records.ledger import form
from wardround.records.ledger.base import Person
from wardround.records.ledger.entries import (
    ConsentEntry,
    ControlEntry,
    Entry,
    GenesisEntry,
    IdentityEntry,
    MethodBytes,
    ReceiptEntry,
    SessionEntry,
    UnknownEntry,
    UploadEntry,
)
from wardround.records.ledger.lines import COMMON, FORMS, JUDGED, TYPES, Line
from wardround.records.receipts import EMPTY_HEAD
from wardround.signing import canonical

ROOT = Path(__file__).parents[2]
GOLDEN = (Path(__file__).parent / "golden" / "ledger.jsonl").read_bytes().splitlines()  # of the writer before records

TEXTS = st.text(max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2**53 - 1) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)


COUNTS = st.integers(0, 2**53 - 1)
DIGESTS = st.text("0123456789abcdef", min_size=64, max_size=64)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    if isinstance(kind, type) and issubclass(kind, form.Record):
        return records(kind)
    if get_origin(kind) is tuple:
        return st.lists(values(get_args(kind)[0]), max_size=3).map(tuple)
    if type(None) in get_args(kind):
        return st.none() | values(next(one for one in get_args(kind) if one is not type(None)))
    return {str: TEXTS, form.Unjudged: TEXTS, int: COUNTS, form.Digest: DIGESTS}[kind]


def later(known: form.Form) -> st.SearchStrategy[dict[str, Any]]:
    """Fields of a later version."""
    taken = {*known.attributes, *JUDGED, *COMMON}
    return st.dictionaries(TEXTS.filter(lambda name: name not in taken), VALUES, max_size=2)


def records(kind: type[form.Record]) -> st.SearchStrategy[Any]:
    """Records of one class, with and without what may be missing, and with fields of a later version."""
    fields = {item.name: values(item.type) for item in dataclasses.fields(kind) if item.name != "more"}
    return st.builds(kind, more=later(form.form_of(kind)), **fields)


def lines(entries: st.SearchStrategy[Any]) -> st.SearchStrategy[Line]:
    return st.builds(Line, COUNTS, TEXTS, DIGESTS, entries)


@pytest.mark.parametrize("name", sorted(TYPES))
def test_every_type_of_entry_is_read_as_it_was_written(name: str) -> None:
    @given(lines(records(TYPES[name])))
    def check(line: Line) -> None:
        data = line.encoded()
        assert Line.from_document(canonical.loads(data)) == line
        assert line.type == json.loads(data)["type"] == name

    check()


@given(lines(st.builds(UnknownEntry, unknown_type=st.just("of_a_later_version"), more=later(form.NOTHING))))
def test_an_entry_of_a_later_version_is_written_again_as_it_was(line: Line) -> None:
    assert Line.from_document(canonical.loads(line.encoded())) == line


def test_lines_of_the_writer_before_the_records_are_written_again_byte_for_byte() -> None:
    assert {json.loads(line)["type"] for line in GOLDEN} == set(TYPES)
    for data in [*GOLDEN, *Made(20).lines, *Made(8, again=True).lines, *Made(8, before=Made(8)).lines]:
        line = Line.from_document(canonical.loads(data))
        assert line.encoded() == data
        assert not line.entry.more


def test_each_class_has_every_field_that_its_lines_have() -> None:
    """None of them is kept only as a field of a later version."""
    entries = [Line.from_document(canonical.loads(data)).entry for data in GOLDEN]
    (upload, _) = (entry for entry in entries if isinstance(entry, UploadEntry))
    assert not upload.tensors[0].more
    assert not upload.metrics[0].more
    (control,) = (entry for entry in entries if isinstance(entry, ControlEntry))
    assert control.methods == (MethodBytes(method="Declare", count=2, bytes=90, messages=2),)
    (consent,) = (entry for entry in entries if isinstance(entry, ConsentEntry))
    assert consent.by is not None
    assert (consent.by.words(), consent.by.more) == ("dpo (sudo), as wardround", {})
    assert upload.update == canonical.digest(upload.left())
    assert upload.manifest_sha256 == canonical.digest(upload.manifest())
    answers = [entry for entry in entries if isinstance(entry, ReceiptEntry)]
    assert [answer.receipt.decision for answer in answers] == ["accepted", "not_received"]
    genesis = entries[0]
    assert isinstance(genesis, GenesisEntry)
    assert genesis.continues is not None
    assert genesis.continues.ledger_head().lines == 7


def test_both_verifiers_hold_the_same_fields_to_their_form_and_want_the_same() -> None:
    assert set(JUDGED) == set(verify_ledger.FORM_OF)
    assert {name: set(known.needed) for name, known in FORMS.items()} == {
        name: set(text.split()) for name, text in verify_ledger.FIELDS_OF.items()
    }
    wrong = {"text": 1, "count": -1, "digest": "ab"}
    for name, kind in verify_ledger.FORM_OF.items():
        value = wrong[kind] if isinstance(kind, str) else "none"
        document = {"v": 1, "seq": 0, "ts": "", "prev": EMPTY_HEAD, "type": "of_a_later_version", name: value}
        with pytest.raises(BadData, match=f"`of_a_later_version` record: {name}$"):
            Line.from_document(document)
        assert not verify_ledger.has_form(value, kind)


def test_the_auditors_page_names_every_field_of_every_type() -> None:
    page = (ROOT / "docs" / "auditors.md").read_text()
    listed = re.findall(r"^\| (`genesis`|`\w+`(?:, `\w+`)*) \| (.*) \|$", page, re.MULTILINE)
    rows = {kinds: told for kinds, told in listed if set(re.findall(r"`(\w+)`", kinds)) <= set(TYPES)}
    for kinds, told in rows.items():
        for kind in re.findall(r"`(\w+)`", kinds):
            known = FORMS[kind]
            assert set(re.findall(r"\*\*(\w+)\*\*", told)) == set(known.needed), kind
            for name in known.attributes.keys() - {"left_out"}:
                assert re.search(rf"\b{name}\b", told), (kind, name)
    assert {kind for kinds in rows for kind in re.findall(r"`(\w+)`", kinds)} == set(TYPES)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seq": -1}, "form of a `session` record: seq"), ({"event": 1}, "form of a `session` record: event"),
        ({"event": None}, "no event"), ({"prev": "ab"}, "record: prev"), ({"ts": 1}, "record: ts"),
        ({"v": 2}, "no record"),
        ({"type": "Session"}, "it is no record"), ({"bytes_up": True}, "record: bytes_up"),
        ({"by": {"name": "dpo"}}, "record: by"),
    ],
)  # fmt: skip
def test_a_line_that_has_not_its_form_is_refused(change: dict[str, Any], said: str) -> None:
    document = {"v": 1, "seq": 0, "ts": "", "prev": EMPTY_HEAD, "type": "session", "event": "opened", **change}
    document = {name: value for name, value in document.items() if value is not None}
    with pytest.raises(BadData, match=said):
        Line.from_document(document)
    for nothing in (None, [], "x", {}):
        with pytest.raises(BadData, match="it is no record"):
            Line.from_document(nothing)


def test_what_no_verifier_judges_is_kept_as_it_is_and_not_read() -> None:
    document = {
        "v": 1, "seq": 0, "ts": "", "prev": EMPTY_HEAD, "type": "consent", "event": "approved", "study": "s",
        "exposure": ["x"], "by": {"name": "dpo", "uid": 1, "account": 7}, "try_": 1, "more": {}, "unknown_type": "x",
    }  # fmt: skip
    line = Line.from_document(document)
    assert isinstance(line.entry, ConsentEntry)
    assert line.entry.exposure is None
    assert line.entry.by is not None
    assert (line.entry.by.account, line.entry.by.words()) == (None, "dpo")
    assert line.document() == document


def test_an_entry_that_no_verifier_would_read_is_not_written() -> None:
    entries: tuple[Entry, ...] = (
        SessionEntry(event="opened", bytes_up=-1), IdentityEntry(receipt_key="ab"), SessionEntry(event="\ud800"),
        SessionEntry(event="opened", more={"seq": 7, "note": 1.5}),
    )  # fmt: skip
    for entry in entries:
        with pytest.raises(BadData):
            Line(0, "", EMPTY_HEAD, entry).encoded()


def test_a_person_without_a_name_is_refused() -> None:
    for document in (None, {}, {"name": "dpo"}, {"name": 1, "uid": 1}, {"name": "dpo", "uid": -1}):
        with pytest.raises(BadData, match="it does not have the form of"):
            Person.from_document(document)
