"""The evidence pack: what was promised against what was measured, and that nothing in it can be changed unseen."""

import datetime
import errno
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from site_agent.audit.bundle import gather, verify_bundle
from site_agent.audit.form import lines
from site_agent.audit.pack import assemble, crate, sbom
from site_agent.audit.pack.page import Isolation
from site_agent.audit.pack.picture import Flow, picture
from site_agent.audit.pack.promises import Promise, promises
from site_agent.cli import pack as command
from site_agent.cli.audit import audit_app
from site_agent.gateway.policy import policy as policies
from site_agent.state.directory import SiteState
from tests.attacks import ledgers
from tests.site_agent.site_world import STUDY, SiteWorld
from tools.world import wait_until
from wardround.errors import BadData, CannotWrite, NeedsPerson, UsageProblem
from wardround.local.half_written import beside
from wardround.records.ledger.entries import ConsentEntry, PolicyEntry, UploadEntry
from wardround.records.ledger.lines import Line
from wardround.signing import canonical

ISOLATION = Isolation("2026-01-02T03:04:05.000Z", "network-namespace", (), "wardround", "trainer", True, False, "")


@pytest.fixture(scope="module")
def hospital(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, bytes]]:
    """The state of a hospital that took part in two rounds, and the coordinator's copy of its receipts."""
    world = SiteWorld(tmp_path_factory.mktemp("pack"))
    try:
        world.ready()
        for round_ in (1, 2):
            world.coordinator.assign(STUDY, round_)
            world.coordinator.wait_receipts(round_)
        assert world.trainer is not None
        trainer = world.trainer  # it may be told of a round twice
        wait_until(lambda: trainer.commands("commit")[-1:] and trainer.commands("commit")[-1]["round"] == 2, "kept", 20)
        world.stop()
        copy = b"".join(canonical.dumps(envelope.document()) + b"\n" for envelope in world.coordinator.copy())
        yield world.state.root, copy
    finally:
        world.close()


@pytest.fixture
def state(hospital: tuple[Path, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, to be spoiled; what isolates its trainer is said here."""
    shutil.copytree(hospital[0], tmp_path / "site", ignore=shutil.ignore_patterns("*.sock", "lock"))
    (tmp_path / "receipts.jsonl").write_bytes(hospital[1])
    monkeypatch.setattr(command, "_isolation", lambda here, site: ISOLATION)
    return tmp_path / "site"


@pytest.fixture
def bill(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one: the true one takes seconds."""
    found = sbom._installed()
    monkeypatch.setattr(sbom, "_installed", lambda: [one for one in found if one.name in ("typer", "numpy")])


def give(state: Path, *words: str | Path, code: int = 0) -> Result:
    line = ["pack", STUDY, "--state", state, "--out", state.parent / "pack.tar", *words]
    result = CliRunner().invoke(audit_app, [str(word) for word in line])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


audit_app.command("pack")(command.pack)


def test_a_pack_shows_that_every_promise_was_kept(state: Path, bill: None) -> None:
    receipts = state.parent / "receipts.jsonl"
    said = give(state, "--receipts", receipts).stdout
    assert "     kept  One exact study, approved by a person: promised 1 approved: " in said
    assert "broken" not in said
    assert "begin with evidence/index.html in it" in said
    place = state.parent / "pack.tar"
    assert ledgers.both_of_bundle(place, receipts) == (0, "")
    files = ledgers.files_of(place)
    for name in assemble.ABOUT:
        assert name in files
    told = json.loads(files["evidence/promised-and-measured.json"])["promises"]
    assert {one["state"] for one in told} == {"kept"}
    by_name = {one["name"]: one for one in told}
    assert by_name["These tensors and no others"]["measured"] == "2 left; none other"
    assert by_name["Each update has the coordinator's signed receipt"]["measured"] == "2 of 2"
    page = files["evidence/index.html"].decode()
    assert "13 of 13 promises were kept, as far as the ledger goes." in page
    assert "The ledger is verified." in page
    assert "data:image/svg+xml;base64," in page
    assert "<script" not in page
    assert "network-namespace" in page
    assert "approved" in page
    graph = {one["@id"]: one for one in json.loads(files[crate.METADATA])["@graph"]}
    assert graph[crate.METADATA]["conformsTo"] == {"@id": "https://w3id.org/ro/crate/1.1"}
    assert {part["@id"] for part in graph["./"]["hasPart"]} == set(files) - {crate.METADATA}
    assert all(graph[name]["@type"] == "File" for name in files if name != crate.METADATA)
    assert graph["policy.toml"]["name"] == "The policy in force"


def test_every_file_of_a_pack_is_checked_by_name(state: Path, bill: None) -> None:
    give(state)
    place = state.parent / "pack.tar"
    files = ledgers.files_of(place)
    assert len(files) > 12
    for name in sorted(files):
        if name == "MANIFEST.json" or name.startswith(("ledger/", "receipts")):
            continue  # the signature, the chain and the receipts say it of these; see tests/attacks
        place.write_bytes(ledgers.pack({**files, name: files[name] + b" "}))
        assert verify_bundle(place)[0].reason == f"{name} in the bundle is not the file that its MANIFEST.json names"
        place.write_bytes(ledgers.pack({other: data for other, data in files.items() if other != name}))
        assert verify_bundle(place)[0].reason == f"{name} of its MANIFEST.json is not in the bundle"
    place.write_bytes(ledgers.pack({**files, "evidence/more.html": b"all is well"}))
    reason = "evidence/more.html is in the bundle, and its MANIFEST.json names no such file"
    assert verify_bundle(place)[0].reason == reason


def test_what_is_only_being_written_is_in_no_pack(state: Path, bill: None) -> None:
    """An approval, or what a killed process left of one: gone before it is read, or half of it."""
    half = beside(state / "consents" / STUDY / "3.json")
    half.write_bytes(b'{"study": "hea')
    gone = beside(state / "policies" / "of-a-moment-ago.toml")
    gone.mkdir()
    give(state)
    assert [name for name in ledgers.files_of(state.parent / "pack.tar") if name.endswith(".tmp")] == []
    assert verify_bundle(state.parent / "pack.tar")[0].not_shown == verified_before(state)


def verified_before(state: Path) -> list[str]:
    """What a pack without it does not show."""
    for half in state.rglob("*.tmp"):
        half.unlink() if half.is_file() else half.rmdir()
    give(state, "--force")
    return verify_bundle(state.parent / "pack.tar")[0].not_shown


def test_an_approval_that_comes_while_a_pack_is_made_is_not_in_it_without_its_line(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line stands in the ledger first; a bundle of an older ledger and a newer approval looks like a forgery."""
    real, later = Path.read_bytes, [state / "consents" / "of-a-later-moment.json"]

    def approved_meanwhile(path: Path) -> bytes:
        data = real(path)
        if path.name.startswith("0") and later:
            later.pop().write_bytes(b"{}")
        return data

    monkeypatch.setattr(Path, "read_bytes", approved_meanwhile)
    files = gather(state, None)
    assert not later
    assert "consents/of-a-later-moment.json" not in files


def test_a_promise_is_not_judged_by_a_policy_whose_text_was_changed(state: Path, bill: None) -> None:
    """The ledger has the digest of the one that was in force."""
    (text,) = (state / "policies").glob("*.toml")
    text.write_text(text.read_text().replace("spiffe://test/coordinator", "spiffe://elsewhere/coordinator"))
    give(state)
    told = json.loads(ledgers.files_of(state.parent / "pack.tar")["evidence/promised-and-measured.json"])["promises"]
    by_name = {one["name"]: (one["state"], one["measured"]) for one in told}
    said = "to no other; of 2 updates the policy's text is not kept"
    assert by_name["To this coordinator alone"] == ("not shown", said)


def test_a_disk_that_is_full_leaves_the_pack_of_before(
    state: Path, bill: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(state)
    place = state.parent / "pack.tar"
    before, beside_it = place.read_bytes(), sorted(path.name for path in place.parent.iterdir())
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        if "pack.tar" in name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CannotWrite, match=f"{place}: No space left on device"):
        give(state, "--force")
    assert place.read_bytes() == before
    assert sorted(path.name for path in place.parent.iterdir()) == beside_it


def test_of_a_changed_ledger_no_pack_is_made(state: Path) -> None:
    """A page of promises would contradict itself: nothing of such a ledger is known to be true."""
    path = state / "ledger" / "000001.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"round":2', b'"round":3', 1))
    with pytest.raises(BadData, match="the ledger does not verify, so nothing of it is known to be true: ") as refused:
        give(state)
    assert "`site-agent audit bundle` collects the files as they are" in refused.value.hint
    assert not (state.parent / "pack.tar").exists()


def test_a_study_that_nobody_approved_has_no_evidence(state: Path) -> None:
    with pytest.raises(UsageProblem, match="nobody here has approved study `lungs`") as refused:
        CliRunner().invoke(
            audit_app,
            ["pack", "lungs", "--state", str(state), "--out", str(state.parent / "x")],
            catch_exceptions=False,
        )
    assert refused.value.hint == "approved here: hearts"


# What breaks each promise


def found(state: Path, *, change: Any = None, drop: type | None = None) -> dict[str, Promise]:
    """The promises of the hospital's ledger, each line of it passed through ``change``."""
    here = SiteState(state)
    entries: list[Line] = []
    for line in lines(state / "ledger"):
        if drop is None or not isinstance(line.entry, drop):
            entries.append(replace(line, entry=change(line.entry)) if change is not None else line)
    texts = {path.stem: policies.parse(path.read_bytes(), path) for path in (state / "policies").glob("*.toml")}
    return {one.name: one for one in promises(entries, STUDY, here.consent_history(STUDY), texts)}


def of_uploads(**changed: Any) -> Any:
    def change(entry: Any) -> Any:
        return replace(entry, **changed) if isinstance(entry, UploadEntry) else entry

    return change


def renamed(entry: Any) -> Any:
    if not isinstance(entry, UploadEntry) or not entry.tensors:
        return entry
    return replace(entry, tensors=(replace(entry.tensors[0], name="private.head"), *entry.tensors[1:]))


def longer(entry: Any) -> Any:
    if not isinstance(entry, UploadEntry):
        return entry
    return replace(entry, metrics=tuple(replace(one, value="0.123456789") for one in entry.metrics))


def strange(entry: Any) -> Any:
    if not isinstance(entry, UploadEntry):
        return entry
    return replace(entry, metrics=tuple(replace(one, name="patient_age") for one in entry.metrics))


@pytest.mark.parametrize(
    ("change", "name", "measured"),
    [
        (of_uploads(study_digest="ff" * 32), "One exact study, approved by a person", "2 updates of ffffffffffff"),
        (renamed, "These tensors and no others", "not approved: private.head"),
        (strange, "These metrics and no others", "patient_age"),
        (longer, "Metrics with so many digits at most", "otherwise: val_loss 0.123456789"),
        (of_uploads(round=9), "So many rounds, and one that only validates", "2 updates beyond"),
        (of_uploads(round=1), "So many updates of one round at most", "2"),
        (of_uploads(destination="spiffe://elsewhere/coordinator"), "To this coordinator alone", "also to spiffe://else"),
        (of_uploads(payload_bytes=10**9), "At most so many bytes in a round", "1,000,000,000 in the largest"),
    ],
)  # fmt: skip
def test_what_the_ledger_shows_of_a_broken_promise_is_said(state: Path, change: Any, name: str, measured: str) -> None:
    told = found(state, change=change)[name]
    if name == "So many updates of one round at most":
        assert told.measured == measured
        return
    assert told.state == "broken"
    assert measured in told.measured


def test_an_update_after_the_withdrawal_breaks_a_promise(state: Path) -> None:
    def withdrawn(entry: Any) -> Any:
        return replace(entry, event="withdrawn") if isinstance(entry, ConsentEntry) else entry

    told = found(state, change=withdrawn)["Nothing leaves without an approval in force"]
    assert (told.state, told.measured) == ("broken", "2 updates so")


def test_where_a_policys_text_is_gone_nothing_of_it_is_shown(state: Path) -> None:
    told = found(state, drop=PolicyEntry)["To this coordinator alone"]
    assert (told.state, told.measured) == ("not shown", "to no other; of 2 updates the policy's text is not kept")


def test_a_broken_promise_ends_the_command_with_1(state: Path, bill: None, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [Promise("These stay at the site", "2 tensors", "1 of them left", "broken")]
    monkeypatch.setattr(assemble, "promises", lambda *given: broken)
    assert (
        "   broken  These stay at the site: promised 2 tensors; measured 1 of them left" in give(state, code=1).stdout
    )
    page = ledgers.files_of(state.parent / "pack.tar")["evidence/index.html"].decode()
    assert "1 of 1 promises were broken: These stay at the site." in page


# Its parts


def test_the_bill_of_software_is_of_this_environment_and_valid() -> None:
    now = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    bill = json.loads(sbom.sbom("st-olav", now))
    assert bill["specVersion"] == "1.6"
    assert {"grpcio", "numpy", "pydantic"} <= {one["name"] for one in bill["components"]}


def test_the_bill_of_the_same_software_is_the_same_bytes(bill: None) -> None:
    now = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    assert sbom.sbom("st-olav", now) == sbom.sbom("st-olav", now)  # the serial number too


def test_without_the_extra_the_bill_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cyclonedx.model", None)
    with pytest.raises(NeedsPerson, match=r"is not installed here, and the pack's bill") as refused:
        sbom.sbom("x", datetime.datetime.now(datetime.UTC))
    assert refused.value.hint == "pip install 'wardround[sbom]'"


def test_the_picture_holds_no_markup_of_a_stranger() -> None:
    flow = Flow("<b>", 'a"><script>', "x" * 200, "t", "g", "c & d", ("one",), "model", "rows", "others")
    svg = picture(flow)
    assert "<script" not in svg
    assert "c &amp; d" in svg
    assert max(map(len, svg.split(">"))) < 400
