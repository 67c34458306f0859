"""What fuzzing found at the site's doors: damaged files and strange messages end in an error of ours now."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from site_agent import audit
from site_agent.audit import facts, reconcile, report, show
from site_agent.audit.files import in_folder
from site_agent.audit.form import line_in
from site_agent.gateway.connection.client import offer_from
from site_agent.gateway.enrolment.identity import Identity
from site_agent.gateway.exit import evidence
from site_agent.gateway.exit.ledger import Ledger
from site_agent.gateway.service import RequestDispatcher
from site_agent.state.directory import SiteState
from site_agent.trainer.vault.index import Index, Kept
from site_agent.trainer.vault.states import Vault
from tools import verify_ledger
from tools.fuzz.examples import STUDY, FullLedger, SiteFiles, tensor_file
from wardround.errors import BadData, NeedsPerson, UsageProblem
from wardround.records.ledger.entries import TensorRow
from wardround.records.receipts import EMPTY_HEAD, line_hash, next_head
from wardround.signing import canonical
from wardround.v1 import federation_pb2 as pb


@pytest.fixture(scope="module")
def site() -> SiteFiles:
    return SiteFiles()


@pytest.fixture
def state(tmp_path: Path, site: SiteFiles) -> SiteState:
    site.write(tmp_path / "site")
    return SiteState(tmp_path / "site")


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))


ROW = {"name": "a", "dtype": "F32", "shape": [1], "bytes": 4, "bundle": "model"}


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("identity/site.json", "renew_after_s", "soon"), ("identity/site.json", "receipt_key", None),
        (f"offers/{STUDY}.json", "revision", True), (f"offers/{STUDY}.json", "document", {}),
        (f"offers/{STUDY}.json", "initial_model", 7), (f"offers/{STUDY}.json", "initial_model", [{**ROW,
        "shape": ["1"]}]),
        (f"offers/{STUDY}.json", "initial_model", [{**ROW, "bytes": 10**400}]),
        (f"consents/{STUDY}.json", "stays", [{**ROW, "shape": [-1]}]),
        (f"offers/{STUDY}.json", "initial_model", [{"name": "a"}]), (f"offers/{STUDY}.json", "state", []),
        (f"consents/{STUDY}.json", "leaves", [{**ROW, "bundle": None}]), (f"consents/{STUDY}.json", "comes", None),
        (f"consents/{STUDY}.json", "stays", [1]), (f"consents/{STUDY}.json", "metrics", 0.5),
        (f"consents/{STUDY}.json", "data", {"name": "patients"}), (f"consents/{STUDY}.json", "approved_by",
        {"name": "dpo"}),
        (f"consents/{STUDY}.json", "document", {"study": "trial"}),
        (f"consents/{STUDY}.json", "document", {"study": {"rounds": "3"}}),
        (f"consents/{STUDY}.json", "account", {"digest": "ab" * 32}),
        (f"consents/{STUDY}/0001-approved-1-{SiteFiles().offer.digest[:16]}.json", "account", {"lines": []}),
        (f"previews/{STUDY}.json", "lines", {"a": 1}),
        (f"consents/{STUDY}.json", "exposure", "everybody"), (f"consents/{STUDY}.json", "study_digest", 1),
        (f"journal/{STUDY}.json", "metrics", "0.5"), (f"journal/{STUDY}.json", "num_examples", 1.5),
        (f"journal/{STUDY}.json", "study", 3),
    ],
)  # fmt: skip
def test_a_field_of_another_type_in_a_file_of_the_state_directory_is_named(
    state: SiteState, file: str, key: str, value: Any
) -> None:
    """They were read as they stood, and ended a command or a round with a TypeError somewhere else."""

    def look() -> None:
        state.site(), state.offers(), state.consents(), state.journal(STUDY)
        state.consent_histories(), state.preview(STUDY)

    look()
    edit(state.root / file, lambda document: document.update({key: value}))
    with pytest.raises(BadData, match=f"{Path(file).name} is damaged"):
        look()


def test_a_file_that_is_nested_deeply_is_damaged(state: SiteState) -> None:
    state.site_file.write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(BadData, match="is damaged"):
        state.site()


def test_an_offer_whose_document_is_not_resolved_is_refused(site: SiteFiles) -> None:
    """Its digest is right, and a table that is left out has defaults: only who shows it would have missed the table."""
    message = pb.StudyOffer.FromString(site.offer_message.SerializeToString())
    document = canonical.loads(message.document)
    del document["reported"]
    message.document = canonical.dumps(document)
    initial = site.offer.initial_model.digest()
    message.digest = bytes.fromhex(canonical.digest({"initial_model": initial, "study": document}))
    with pytest.raises(BadData, match="without some of its settings"):
        offer_from(message, "alpha")


def lines_with(made: FullLedger, number: int, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The ledger's lines with one record changed, and chained again."""
    head, out = EMPTY_HEAD, b""
    for place, line in enumerate(made.lines):
        record = json.loads(line)
        if place == number:
            change(record)
        record["prev"] = head
        line = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
        head, out = next_head(head, line_hash(line)), out + line + b"\n"
    return out


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("held", lambda record: record.pop("round")), ("upload", lambda record: record.update(study=["hearts"])),
        ("receipt", lambda record: record["envelope"].update(payload="")),
        ("receipt", lambda record: record["envelope"].update(payload="[" * 100_000)),
        ("receipt", lambda record: record["envelope"].update(payload='{"decision":"accepted","ledger":{"lines":"x"}}')),
        ("policy", lambda record: record.pop("sha256")),
    ],
)  # fmt: skip
def test_a_ledger_with_a_line_that_is_no_record_does_not_open_and_is_not_changed(
    tmp_path: Path, kind: str, change: Callable[[dict[str, Any]], object]
) -> None:
    """The agent ended with a KeyError or a TypeError, and nobody was told that the ledger is broken."""
    made = FullLedger()
    number = next(place for place, line in enumerate(made.lines) if json.loads(line)["type"] == kind)
    data = lines_with(made, number, change)
    (tmp_path / "000001.jsonl").write_bytes(data)
    with pytest.raises(NeedsPerson, match="is broken"):
        Ledger(tmp_path, made.ledger_key)
    assert (tmp_path / "000001.jsonl").read_bytes() == data


def test_a_record_whose_type_is_no_text_is_no_record_to_both_verifiers(tmp_path: Path) -> None:
    line = canonical.dumps({"v": 1, "seq": 0, "prev": EMPTY_HEAD, "ts": "", "type": {"genesis": 1}})
    with pytest.raises(BadData, match="it is no record"):
        line_in(line)
    (tmp_path / "000001.jsonl").write_bytes(line + b"\n")
    assert audit.verify(tmp_path)[1] == verify_ledger.judge(tmp_path)[0] == audit.TAMPERED


@pytest.mark.parametrize("payload", ["", "1", "{}", '{"study":"hearts"}', "[" * 100_000])
def test_a_receipt_that_is_none_is_not_shown(tmp_path: Path, payload: str) -> None:
    made = FullLedger()
    number = next(place for place, line in enumerate(made.lines) if json.loads(line)["type"] == "receipt")
    data = lines_with(made, number, lambda record: record["envelope"].update(payload=payload))
    (tmp_path / "000001.jsonl").write_bytes(data)
    with pytest.raises(BadData, match=f"ledger line {number + 1} cannot be read"):
        list(show.chosen(tmp_path))


@pytest.mark.parametrize(
    "data", [b"\xff", b"7", b"{}", b'{"leaves":[],"stays":7}', b'{"leaves":7,"stays":[]}', b"[" * 100_000]
)
def test_a_damaged_consent_beside_a_ledger_is_named(tmp_path: Path, data: bytes) -> None:
    FullLedger().write(tmp_path / "ledger")
    verdict, code = audit.verify(tmp_path / "ledger")
    with pytest.raises(BadData, match=r"hearts\.json is damaged"):
        report.page([in_folder(tmp_path / "ledger")], {"hearts.json": data}, verdict, code)


@pytest.mark.parametrize("norm", [["1"], {}, "1e308", "nan", "x"])
def test_a_norm_that_is_none_is_left_out_of_the_report(norm: Any) -> None:
    assert facts.norm_of([TensorRow.from_document({**TENSOR, "l2": norm})]) is None


@pytest.mark.parametrize(
    "told",
    [
        b"[" * 100_000, b'{"connections":[{"opened":[],"closed":null}],"until":"","up":1,"down":1,"began":""}',
        b'{"connections":[{"opened":{},"closed":"x"}],"up":1,"down":1,"began":""}',
        b'{"connections":[],"up":1e999,"down":1,"began":""}',
        b'{"connections":[],"up":1,"down":1%b,"began":""}' % (b"0" * 400), b"1" + b"0" * 400, b"-1",
    ],
)  # fmt: skip
def test_a_count_that_is_none_is_refused(tmp_path: Path, told: bytes) -> None:
    path = tmp_path / "count.json"
    path.write_bytes(told)
    with pytest.raises(BadData, match="is no count"):
        reconcile.count_from(str(path))


TENSOR = {**ROW, "encoding": "raw", "sha256": "ab" * 32}
BY = {"name": "dpo", "uid": 1000}


@pytest.mark.parametrize(
    "request_",
    [
        {"command": "approve", "study": STUDY, "by": BY}, {"command": "approve", "study": 1, "data": "patients",
        "by": BY},
        {"command": "withdraw", "study": STUDY}, {"command": "withdraw", "study": STUDY, "by": {"name": "dpo"}},
        {"command": "withdraw", "study": STUDY, "by": {"name": 1, "uid": 1}}, {"command": "leave", "by": {**BY,
        "uid": -1}},
        {"command": "waiting", "study": STUDY, "round": "1"}, {"command": "decide", "study": STUDY, "round": 1,
        "by": BY}, {"command": "decide", "study": STUDY, "round": 1, "update": "", "decision": "kept", "by": BY},
        {"command": "leave"}, {"command": "leave", "by": []},
    ],
    ids=str,
)  # fmt: skip
def test_a_command_that_is_not_of_its_form_is_refused(state: SiteState, request_: dict[str, Any]) -> None:
    """Who a command says that it is from goes into the ledger, whose verifiers refuse another form for good."""
    with pytest.raises(UsageProblem, match="the request's"):
        RequestDispatcher(state, mock.MagicMock()).answer_document(request_, lambda item: None)


def test_a_damaged_index_or_card_of_the_vault_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "studies" / STUDY / "1"
    kept = Kept(round=1, file="state-00001-0123456789ab.safetensors", sha256="ab" * 32)
    good = canonical.loads(Index(study_digest="ab" * 32, committed=(kept,)).to_bytes())
    folder.mkdir(parents=True)
    here = Vault(tmp_path, STUDY, 1)
    for change in ({"forgotten": "0"}, {"forgotten": 3, "committed": []},
                   {"committed": [{**kept.model_dump(), "round": "1"}]}, {"study_digest": 1},
                   {"committed": [{**kept.model_dump(), "folder": "../../../x"}]}):  # fmt: skip
        (folder / "index.json").write_bytes(canonical.dumps({**good, **change}))
        with pytest.raises(NeedsPerson, match=r"index\.json is missing or damaged"):
            here.index()
    (folder / "index.json").write_bytes(canonical.dumps(good))
    assert here.index().committed == (kept,)
    checkpoint = folder / "checkpoints" / "best_local"
    for card in ("{}", '{"kind": "best_local"}', "[" * 100_000, '{"kind": NaN}'):
        shutil.rmtree(checkpoint, ignore_errors=True)
        checkpoint.mkdir(parents=True)
        (checkpoint / "model.safetensors").write_bytes(tensor_file(1, note={"card": card}))
        with pytest.raises(BadData, match="has no card of a best_local checkpoint"):
            here.checkpoints()


@pytest.mark.parametrize("lines", ["-100", "1e999", '"x"', "[]"])
def test_a_signed_head_of_no_number_of_lines_is_no_head(tmp_path: Path, lines: str) -> None:
    """Signatures are the verifiers' to check; the number decides how many lines a crash may have torn."""
    made = FullLedger()
    made.write(tmp_path)
    payload = f'{{"head":"{EMPTY_HEAD}","ledger_id":"x","lines":{lines}}}'
    head = {**json.loads(made.heads[0]), "payload": payload}
    (tmp_path / "heads.jsonl").write_text(json.dumps(head) + "\n")
    with pytest.raises(NeedsPerson, match="holds a line that is no signed head"):
        Ledger(tmp_path, made.ledger_key)


@pytest.mark.parametrize("data", [b"", b"7", b"{}", b"\xff", b"[" * 100_000, b'{"a":' * 100_000])
def test_damaged_evidence_keeps_no_ledger_from_opening(tmp_path: Path, data: bytes) -> None:
    """A file of tables deep within tables ended the agent at its start."""
    made = FullLedger()
    made.write(tmp_path)
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence" / "one.json").write_bytes(data)
    Ledger(tmp_path, made.ledger_key).close()
    assert evidence.read(tmp_path) == []


@pytest.mark.parametrize("name", ["key.pem", "certificate.pem", "authority.pem"])
def test_an_identity_that_lost_a_file_says_which_and_what_to_do(tmp_path: Path, name: str) -> None:
    """A lost key ended `status` and `run` with a traceback."""
    identity = Identity(tmp_path)
    identity.make_keys()
    for path in (identity.certificate_file, identity.authority_file):
        path.write_bytes(b"there")
    (tmp_path / name).unlink()
    with pytest.raises(NeedsPerson) as refused:
        identity.credentials()
    assert refused.value.message == (
        f"{tmp_path / name} cannot be read (No such file or directory): this site has no identity without it"
    )
    assert refused.value.hint.startswith("restore it from the backup of the identity folder")
    if name == "key.pem":
        with pytest.raises(NeedsPerson, match=r"key\.pem cannot be read"):
            identity.key()


def test_an_index_is_judged_once_for_its_bytes_and_anew_for_others() -> None:
    data = Index(study_digest="ab" * 32).to_bytes()
    assert Index.from_bytes(data) is Index.from_bytes(bytes(bytearray(data)))
    assert Index.from_bytes(data.replace(b"abab", b"abad", 1)).study_digest.startswith("abad")
    for _ in range(2):
        with pytest.raises(BadData, match="not an index of states"):
            Index.from_bytes(data.replace(b"abab", b"ABAB", 1))
