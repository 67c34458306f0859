"""Attacks by an insider at the hospital, who edits what is to prove what left."""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from site_agent import audit
from site_agent.audit import bundle
from site_agent.audit.sums import check_sum
from site_agent.gateway.service import RequestDispatcher
from tests import commands
from tests.attacks import gone, ledgers
from tests.site_agent.secure_sites import STUDY, SecureSites
from tests.site_agent.site_world import PERSON, SiteWorld
from tests.site_agent.site_world import STUDY as STUDY_HERE
from tests.site_agent.test_several_people import both_verifiers_agree, decide, held, put, two_for_the_policy
from tests.site_agent.test_sum_in_a_bundle import bundled as sums_bundled
from tools import verify_ledger
from tools.evidence_tamper import HEADS, SEGMENT, Made
from tools.world import World
from wardround.errors import BadData, NeedsPerson
from wardround.local.control import ControlServer
from wardround.records.receipt_copy import Statement
from wardround.records.receipts import EMPTY_HEAD, RECEIPT_TYPE
from wardround.signing import canonical, dsse


@pytest.fixture(scope="module")
def made() -> Made:
    return Made(20)


@pytest.fixture
def receipts(tmp_path: Path, made: Made) -> Path:
    """The genuine copy, from the coordinator's operator."""
    path = tmp_path / "receipts.jsonl"
    path.write_bytes(made.copy())
    return path


def continues(made: Made) -> dict[str, object]:
    return {"ledger_id": made.ledger_id, "lines": len(made.lines), "head": made.head}


def receipt_key(made: Made) -> str:
    return made.receipt_key.public_key().public_bytes_raw().hex()


@pytest.mark.attack(promise="P2", refused_by="site_agent/audit/receipts.py")
def test_forged_ledger_that_continues(tmp_path: Path, made: Made, receipts: Path) -> None:
    """An insider without any key shows three lines of his own instead of the ledger, against genuine receipts."""
    folder = tmp_path / "ledger"
    folder.mkdir()
    lines, heads = ledgers.forged(Ed25519PrivateKey.generate(), receipt_key(made), continues(made))
    (folder / SEGMENT).write_bytes(lines)
    (folder / HEADS).write_bytes(heads)
    assert ledgers.both(folder, receipts) == (audit.TAMPERED, 1)
    assert ledgers.both(folder)[0] == audit.CONSISTENT  # and not whose, nor that it is all
    key = dsse.keyid(made.ledger_key.public_key())
    assert ledgers.both(folder, key=key) == (audit.TAMPERED, 1)
    verdict, _ = audit.verify(folder)
    assert not verdict.whose
    assert f"ledger {made.ledger_id}, which this one continues" in verdict.not_shown


@pytest.mark.attack(promise="P2", refused_by="site_agent/audit/receipts.py")
def test_forged_ledger_that_continues__with_the_stolen_ledger_key(tmp_path: Path, made: Made, receipts: Path) -> None:
    """With the key he can sign it; the receipts of the ledger that he hides are counted, and none of them agrees."""
    folder = tmp_path / "ledger"
    folder.mkdir()
    lines, heads = ledgers.forged(made.ledger_key, receipt_key(made), continues(made))
    (folder / SEGMENT).write_bytes(lines)
    (folder / HEADS).write_bytes(heads)
    assert ledgers.both(folder, receipts)[0] == audit.CANNOT_VERIFY
    verdict, _ = audit.verify(folder, receipts)
    assert f"5 of the 5 receipts are not of the ledgers shown: ledger {made.ledger_id}" in verdict.reason
    made.write(tmp_path / f"ledger-{made.ledger_id}")  # shown, as `audit rollover` leaves it
    assert ledgers.both(folder, receipts) == (audit.VERIFIED, None)
    ledgers.cut(tmp_path / f"ledger-{made.ledger_id}", made, 13)
    assert ledgers.both(folder, receipts) == (audit.TAMPERED, 1)


@pytest.mark.attack(promise="P2", refused_by="site_agent/audit/receipts.py")
@pytest.mark.parametrize("more", [0, 9], ids=["cut", "rewritten"])
def test_forged_ledger_that_continues__a_ledger_that_was_cut_before(
    tmp_path: Path, made: Made, receipts: Path, more: int
) -> None:
    """With the key he cuts the older ledger, signs it again and lets a new one continue it: two updates are in none."""
    older = tmp_path / f"ledger-{made.ledger_id}"
    made.write(older)
    head = ledgers.cut_and_sign(older, made, 13, more)
    folder = tmp_path / "ledger"
    folder.mkdir()
    cited = {"ledger_id": made.ledger_id, "lines": 13 + more, "head": head}
    lines, heads = ledgers.forged(made.ledger_key, receipt_key(made), cited)
    (folder / SEGMENT).write_bytes(lines)
    (folder / HEADS).write_bytes(heads)
    assert ledgers.both(folder, receipts)[0] == audit.CONSISTENT
    verdict, _ = audit.verify(folder, receipts)
    assert (verdict.lost, verdict.complete) == (2, False)
    assert "the lines of 2 receipts: they were lost before a ledger rollover" in verdict.not_shown


@pytest.mark.attack(promise="P2", refused_by="site_agent/audit/receipts.py")
@pytest.mark.parametrize("keep", [4, 7, 13, 16])
def test_truncated_without_a_key(tmp_path: Path, made: Made, receipts: Path, keep: int) -> None:
    """Lines and signed heads are cut at the same place: what is left holds together, and is not all of it."""
    folder = tmp_path / "ledger"
    made.write(folder)
    ledgers.cut(folder, made, keep)
    code, _ = ledgers.both(folder)
    assert code in (audit.CONSISTENT, audit.UNRESOLVED)
    verdict, _ = audit.verify(folder)
    assert verdict.not_shown[0] == "that this is all of it: no copy of the coordinator's receipts was given"
    assert ledgers.both(folder, receipts) == (audit.TAMPERED, keep + 1)


@pytest.mark.attack(promise="P2", refused_by="site_agent/audit/receipts.py")
def test_truncated_without_a_key__the_copy_too(tmp_path: Path, made: Made, receipts: Path) -> None:
    """The insider cuts the copy of the receipts at the same place: its signed statement counts them."""
    folder = tmp_path / "ledger"
    made.write(folder)
    ledgers.cut(folder, made, 13)
    whole = receipts.read_bytes().splitlines(keepends=True)
    receipts.write_bytes(b"".join(whole[:3]))
    assert ledgers.both(folder, receipts)[0] == audit.CANNOT_VERIFY
    receipts.write_bytes(b"".join([*whole[:3], whole[-1]]))
    assert ledgers.both(folder, receipts)[0] == audit.CANNOT_VERIFY


@pytest.mark.attack(promise="P2", refused_by="site_agent/cli/audit.py")
def test_truncated_without_a_key__an_old_copy_says_of_when_it_is(tmp_path: Path, made: Made) -> None:
    """An old ledger with a copy of the receipts as old as itself is right as of then: the date is the first it says."""
    folder, old = tmp_path / "ledger", tmp_path / "old.jsonl"
    made.write(folder)
    ledgers.cut(folder, made, 13)
    old.write_bytes(made.copy(3, time="2025-06-01T12:00:00Z"))
    done = commands.run("site-agent", "audit", "verify", "--ledger", folder, "--receipts", old)
    first, _, complete, *_ = done.stdout.splitlines()
    assert done.returncode == audit.VERIFIED
    assert first == "verified: site st-olav of f, 2026-01-01 00:00:00 UTC to 2026-01-01 00:00:00 UTC"
    assert complete.startswith("complete: as of 2025-06-01 12:00:00 UTC")


@pytest.mark.chaos
@pytest.mark.system
@pytest.mark.attack(promise="P2", refused_by="coordinator/updates/receipts.py")
def test_truncated_without_a_key__asked_live(world: World) -> None:
    """The coordinator itself is asked, over the site's own mutual TLS connection, and knows of lines that were cut."""
    agent = ledgers.study_of_two_rounds(world)
    asked = world.site_json(ledgers.SITE, "audit", "verify", "--ask", ok=(audit.VERIFIED, audit.UNRESOLVED))
    assert (asked["complete"], asked["whose"], asked["unresolved"]) == (True, "the coordinator's receipts", 0)
    agent.stop()
    assert world.site_json(ledgers.SITE, "audit", "verify", "--ask")["ok"]
    kept = world.site_json(ledgers.SITE, "audit", "verify", ok=(audit.CONSISTENT,))
    assert "the receipts kept here, copied at " in kept["not_shown"][0]
    ledgers.cut_at_the_second_head(world.state / ledgers.SITE / "ledger")
    assert world.site_json(ledgers.SITE, "audit", "verify", "--ask", ok=(audit.TAMPERED,))["first_bad"] is not None


@pytest.fixture
def bundled(tmp_path: Path, made: Made) -> Path:
    """A bundle of a site with consents, their history, policies and the receipts that it had asked for."""
    state = tmp_path / "site"
    made.write(state / "ledger")
    (state / "consents" / "history").mkdir(parents=True)
    (state / "consents" / "hearts.json").write_text('{"leaves": [], "stays": [], "study": "hearts"}')
    (state / "consents" / "history" / "hearts-1.json").write_text('{"leaves": [], "stays": []}')
    (state / "policies").mkdir()
    (state / "policies" / ("ab" * 32 + ".toml")).write_text("# older\n")
    (state / "policy.toml").write_text("# nothing may leave\n")
    bundle.make(state, made.ledger_key, tmp_path / "b.tar", audit.Copy(made.copy(), "the copy", True))
    return tmp_path / "b.tar"


EDITED = [
    "consents/hearts.json", "consents/history/hearts-1.json", f"policies/{'ab' * 32}.toml", "policy.toml",
    "report.html", "receipts.jsonl",
]  # fmt: skip


@pytest.mark.attack(promise="P6", refused_by="site_agent/audit/bundle.py")
@pytest.mark.parametrize("path", EDITED)
def test_verify_py_from_the_audited(bundled: Path, receipts: Path, path: str) -> None:
    """A file inside the signed bundle is edited after it was made; the program in the bundle looked at none of them."""
    files = ledgers.files_of(bundled)
    assert not any(name.endswith(".py") for name in files)
    assert ledgers.both_of_bundle(bundled)[0] == audit.CONSISTENT  # its receipts came from the site too
    assert ledgers.both_of_bundle(bundled, receipts) == (audit.VERIFIED, "")
    bundled.write_bytes(ledgers.pack({**files, path: files[path].replace(b"e", b"E", 1)}))
    code, reason = ledgers.both_of_bundle(bundled, receipts)
    assert (code, reason) == (audit.TAMPERED, f"{path} in the bundle is not the file that its MANIFEST.json names")


@pytest.mark.attack(promise="P6", refused_by="site_agent/audit/bundle.py")
def test_verify_py_from_the_audited__other_forms(bundled: Path, receipts: Path, made: Made) -> None:
    """A file more, a file less, a link, a manifest signed by another key, bytes between the files."""
    files = ledgers.files_of(bundled)
    whole = bundled.read_bytes()
    payload = json.loads(json.loads(files["MANIFEST.json"])["payload"])
    other = canonical.dumps(dsse.sign(bundle.BUNDLE_TYPE, payload, Ed25519PrivateKey.generate()).document()) + b"\n"
    less = {name: data for name, data in files.items() if name != "policy.toml"}
    without = {name: data for name, data in files.items() if name != "MANIFEST.json"}
    at = whole.index(b"# nothing may leave\n") + len(b"# nothing may leave\n")
    forms = {
        "VERIFY.py is in the bundle, and its MANIFEST.json names no": ledgers.pack(
            {**files, "VERIFY.py": b"print('VERIFIED')\n"}
        ),
        "policy.toml of its MANIFEST.json is not in the bundle": ledgers.pack(less),
        "consents/link.json in the bundle is no plain file": ledgers.pack(files, link="consents/link.json"),
        "MANIFEST.json is not what the ledger's key signed": ledgers.pack({**files, "MANIFEST.json": other}),
        "archive that its files make: something": whole[:at] + b"x" + whole[at + 1 :],
    }
    for said, data in forms.items():
        bundled.write_bytes(data)
        code, reason = ledgers.both_of_bundle(bundled, receipts)
        assert code == audit.TAMPERED
        assert said in reason
    for data in (ledgers.pack(without), b"", b"no archive", whole[:512]):
        bundled.write_bytes(data)
        assert ledgers.both_of_bundle(bundled, receipts)[0] == audit.CANNOT_VERIFY


@pytest.mark.attack(promise="P6", refused_by="site_agent/audit/bundle.py")
def test_approval_put_into_a_bundle_afterwards(tmp_path: Path) -> None:
    """With the stolen key he signs a bundle in which more was approved, by a policy that allowed more, than was. The
    ledger and its receipts are whole, and the bundle was what its manifest said: nothing told it from an honest one."""
    approved, policy = b'{"leaves":["head.bias"],"state":"approved"}', b"# no tensor\n"
    key = Ed25519PrivateKey.generate()
    records = [
        {"type": "genesis", "ledger_id": "ab" * 16, "ledger_key": hex_of(key)},
        {"type": "consent", "event": "approved", "study": "hearts", "consent_sha256": sha256(approved)},
    ]
    folder, out = tmp_path / "site" / "ledger", tmp_path / "b.tar"
    covered = ledgers.written(folder, key, records)
    about = {"ledger_id": covered.ledger_id, "lines": covered.lines, "head": covered.head, "verdict": 4}
    files = {f"ledger/{path.name}": path.read_bytes() for path in folder.iterdir()}
    honest = {"consents/hearts.json": approved, f"policies/{sha256(policy)}.toml": policy}
    said = []
    for more in (honest, {name: data + b" " for name, data in honest.items()}):
        bundle.write({**files, **more}, about, key, out)
        assert ledgers.both_of_bundle(out)[0] == audit.CONSISTENT
        verdict, _ = bundle.verify_bundle(out)
        said.append([line for line in verdict.not_shown if line.startswith(("that consents/", "that policies/"))])
    assert said[0] == []
    assert said[1] == [
        "that consents/hearts.json is what was approved or withdrawn: no line of the ledgers in it has its digest",
        f"that policies/{sha256(policy)}.toml was ever in force: its digest is not its name",
    ]
    second = verify_ledger.judge(out, bundle=True)[2].splitlines()
    assert [line for line in second if line.startswith("not shown: ")] == [
        "not shown: that consents/hearts.json was approved, or in force",
        f"not shown: that policies/{sha256(policy)}.toml was approved, or in force",
    ]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.attack(promise="P6", refused_by="docs/auditors.md")
def test_verify_py_from_the_audited__the_page_names_the_auditors_own() -> None:
    """The page says to run one's own copy, and its digest for this release."""
    root = Path(verify_ledger.__file__).parents[1]
    page = (root / "docs" / "auditors.md").read_text()
    assert hashlib.sha256((root / "tools" / "verify_ledger.py").read_bytes()).hexdigest() in page
    assert "VERIFY.py" not in page


def hex_of(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


def no_receipts(key: Ed25519PrivateKey, receipt_key: Ed25519PrivateKey) -> bytes:
    """A whole copy without a receipt, for the site with that ledger key, as ``receipt_key`` signs it."""
    said = Statement("f", "st-olav", hex_of(key), 0, EMPTY_HEAD, 0, "2026-02-01T00:00:00Z")
    return canonical.dumps(said.sign(receipt_key).document()) + b"\n"


@pytest.mark.attack(promise="P2", refused_by="site_agent/audit/verify.py")
def test_receipt_key_of_an_older_ledger(tmp_path: Path) -> None:
    """Without any key of the site's or the coordinator's he makes two ledgers: the newer one names the receipt key that
    the auditor compares, the older one a key of his own, with which he signs a copy. Both verifiers said 0."""
    key, his, genuine = (Ed25519PrivateKey.generate() for _ in range(3))
    first = ledgers.first_lines(key, hex_of(his))
    cited = ledgers.written(tmp_path / f"ledger-{first[0]['ledger_id']}", key, first)
    ledgers.written(tmp_path / "ledger", key, ledgers.first_lines(key, hex_of(genuine), continues=asdict(cited)))
    (tmp_path / "receipts.jsonl").write_bytes(no_receipts(key, his))
    told = dsse.keyid(genuine.public_key())
    said = ledgers.both(tmp_path / "ledger", tmp_path / "receipts.jsonl", receipt_key=told)
    assert said == (audit.TAMPERED, 2)
    verdict, _ = audit.verify(tmp_path / "ledger", None, audit.Pins(receipt_key=told))
    assert verdict.ledger == f"ledger-{first[0]['ledger_id']}"


@pytest.mark.attack(promise="P2", refused_by="site_agent/audit/verify.py")
@pytest.mark.parametrize("ledger_id", ["", "../ledger", "\x1b[2J"])
def test_continues_a_ledger_without_a_name(tmp_path: Path, ledger_id: str) -> None:
    """With the stolen key he cites a ledger whose id is no id, so that none can be missing: complete was shown."""
    key, receipt_key = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    cited = {"ledger_id": ledger_id, "lines": 7, "head": "ab" * 32}
    ledgers.written(tmp_path / "ledger", key, ledgers.first_lines(key, hex_of(receipt_key), continues=cited))
    (tmp_path / "receipts.jsonl").write_bytes(no_receipts(key, receipt_key))
    assert ledgers.both(tmp_path / "ledger", tmp_path / "receipts.jsonl") == (audit.CONSISTENT, None)


@pytest.mark.attack(promise="P2", refused_by="site_agent/audit/form.py")
@pytest.mark.parametrize("levels", [61, 62, 63, 64, 900, 940, 960, 980, 5000])
def test_verdict_that_depends_on_the_reader(tmp_path: Path, levels: int) -> None:
    """A line is nested as deep as one verifier, or one Python, reads it and another does not."""
    key = Ed25519PrivateKey.generate()
    records = ledgers.first_lines(key, hex_of(Ed25519PrivateKey.generate()))
    deep: object = None
    for _ in range(min(levels, 900)):
        deep = [deep]
    ledgers.written(tmp_path / "ledger", key, [*records, {"type": "later", "deep": deep}])
    if levels > 900:  # more than Python writes: as bytes, without a signed head over it
        lines = (tmp_path / "ledger" / SEGMENT).read_bytes().replace(b"[" * 900, b"[" * levels)
        (tmp_path / "ledger" / SEGMENT).write_bytes(lines.replace(b"]" * 900, b"]" * levels))
        (tmp_path / "ledger" / HEADS).write_bytes(b"")
    code, line = ledgers.both(tmp_path / "ledger")
    # the record itself is a level
    assert (code, line) == ((audit.CONSISTENT, None) if levels < 64 else (audit.TAMPERED, 3))


@pytest.mark.attack(promise="P2", refused_by="tools/verify_ledger.py")
@pytest.mark.parametrize("more", ["folder", "pipe", "dangling link"])
def test_segment_that_is_no_file(tmp_path: Path, made: Made, more: str) -> None:
    """He puts something beside an honest ledger that no program can read: one verifier waited for ever, or said 3."""
    folder = tmp_path / "ledger"
    made.write(folder)
    path = folder / "000002.jsonl"
    if more == "folder":
        path.mkdir()
    elif more == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("nowhere")
    assert ledgers.both(folder) == (audit.CONSISTENT, None)


@pytest.mark.attack(promise="P2", refused_by="tools/verify_ledger.py")
@pytest.mark.parametrize("more", ["garbage", "5", '"[["', "deep"])
def test_two_faults_and_which_is_first(tmp_path: Path, made: Made, more: str) -> None:
    """The line before the last is edited, and something is added after the signed heads: the verifiers disagreed on the
    first bad line, or one of them ended without a verdict, with the exit code of a changed ledger."""
    folder = tmp_path / "ledger"
    made.write(folder)
    lines = [*made.lines[:-2], made.lines[-2].replace(b'"ts":"2026-01-01', b'"ts":"2026-01-02'), made.lines[-1]]
    (folder / SEGMENT).write_bytes(b"".join(line + b"\n" for line in lines))
    payload = "[" * 100_000 if more == "deep" else more
    told = canonical.dumps({"keyid": "", "payload": payload, "payload_type": "", "signature": ""})
    (folder / HEADS).write_bytes(b"".join(head + b"\n" for head in [*made.heads, told]))
    assert ledgers.both(folder) == (audit.TAMPERED, len(lines) - 1)
    (folder / HEADS).write_bytes(b"".join(head + b"\n" for head in [told, *made.heads]))
    assert ledgers.both(folder) == (audit.TAMPERED, len(lines))  # who cannot be read says nothing


@pytest.mark.attack(promise="P2", refused_by="tools/verify_ledger.py")
def test_fingerprint_in_another_form(tmp_path: Path, made: Made) -> None:
    """A fingerprint as people write it, or a typing error, made one verifier call an honest ledger changed."""
    folder = tmp_path / "ledger"
    made.write(folder)
    key = dsse.keyid(made.ledger_key.public_key())
    colons = ":".join(key[at : at + 2] for at in range(0, 64, 2)).upper()
    for given, code in ((key, 4), (colons, 4), ("ab" * 32, 1), ("ab", 64), ("ä" * 64, 64)):
        for option in ("--key", "--receipt-key"):
            told = given if option == "--key" or given != key else dsse.keyid(made.receipt_key.public_key())
            wanted = 1 if option == "--receipt-key" and given == colons else code
            line = [sys.executable, "-m", "tools.verify_ledger", folder, option, told]
            second = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
            first = commands.run("site-agent", "audit", "verify", "--ledger", folder, option, told)
            assert (first.returncode, second.returncode) == (wanted, wanted), (option, told, first, second)


@pytest.mark.attack(promise="P2", refused_by="tools/verify_ledger.py")
def test_terminal_escape__in_a_ledger(tmp_path: Path) -> None:
    """Times, names and ids in a ledger are free text: with line ends or control characters in them, what a person reads
    is another verdict than the exit code. Nothing but our own lines begins a line."""
    key, receipt_key = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    lie = "\nVERIFIED\nverified: \x1b[8m\r"
    first = ledgers.first_lines(key, hex_of(receipt_key), continues={"ledger_id": lie, "lines": 7, "head": "ab" * 32})
    first[1] |= {"site": f"x{lie}", "federation": f"y{lie}"}
    ledgers.written(tmp_path / "ledger", key, [one | {"ts": lie} for one in first])
    said = Statement(f"y{lie}", f"x{lie}", hex_of(key), 0, EMPTY_HEAD, 0, lie).sign(receipt_key)
    (tmp_path / "receipts.jsonl").write_bytes(canonical.dumps(said.document()) + b"\n")
    for more in ([], ["--receipts", tmp_path / "receipts.jsonl"]):
        line = [sys.executable, "-m", "tools.verify_ledger", tmp_path / "ledger", *more]
        for done in (
            subprocess.run(line, capture_output=True, text=True, timeout=60, check=False),
            commands.run("site-agent", "audit", "verify", "--ledger", tmp_path / "ledger", *more),
        ):
            assert done.returncode == audit.CONSISTENT, done.stdout + done.stderr
            assert "\x1b" not in done.stdout
            assert not [line for line in done.stdout.split("\n") if line.lower().startswith("verified")]


def header(kind: bytes, size: bytes) -> bytes:
    """The header of an entry of a tar archive, with any size."""
    entry = tarfile.TarInfo("x")
    entry.type = kind
    block = bytearray(entry.tobuf(tarfile.USTAR_FORMAT)[:512])
    block[124:136], block[148:156] = size, b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


ARCHIVES = {
    "a size beyond memory": header(b"0", b"\x80" + b"\xff" * 11),
    "a long name beyond memory": header(b"L", b"\x80" + b"\0" * 3 + b"\x7f" + b"\xff" * 7),
    "a size below nothing": header(b"0", b"\xff" * 12),
    "long names without end": (header(b"L", b"00000000004\0") + b"abc".ljust(512, b"\0")) * 3000,
    "attributes without end": (header(b"x", b"00000000010\0") + b"8 pa=b\n\n".ljust(512, b"\0")) * 3000,
    "attributes that say a size": header(b"x", b"00000000044\0") + (b"36 size=" + b"9" * 27 + b"\n").ljust(512, b"\0"),
}


@pytest.mark.attack(promise="P2", refused_by="site_agent/audit/bundle.py")
@pytest.mark.parametrize("data", ARCHIVES.values(), ids=ARCHIVES)
def test_archive_that_no_reader_reads(tmp_path: Path, data: bytes) -> None:
    """A bundle made by hand ended both verifiers without a verdict, the second with the exit code of a changed one."""
    (tmp_path / "b.tar").write_bytes(data + header(b"0", b"00000000000\0") + b"\0" * 1024)
    assert ledgers.both_of_bundle(tmp_path / "b.tar")[0] == audit.CANNOT_VERIFY


@pytest.mark.attack(promise="P2", refused_by="site_agent/audit/bundle.py")
@pytest.mark.parametrize("path", [None, 5, ["x"], {"x": 1}, "consents/\x1b[2J"])
def test_manifest_of_other_things_than_files(bundled: Path, made: Made, path: object) -> None:
    """With the stolen key he signs a manifest whose paths are none: no verifier ends without a verdict."""
    files = ledgers.files_of(bundled)
    payload = json.loads(json.loads(files["MANIFEST.json"])["payload"])
    row = {"path": path, "bytes": 1, "sha256": "ab" * 32}
    for rows in ([*payload["files"], row], [*payload["files"], row, {**row, "path": "x"}], [row], row, [path]):
        signed = dsse.sign(bundle.BUNDLE_TYPE, {**payload, "files": rows}, made.ledger_key)
        bundled.write_bytes(ledgers.pack({**files, "MANIFEST.json": canonical.dumps(signed.document()) + b"\n"}))
        assert ledgers.both_of_bundle(bundled)[0] == audit.TAMPERED


@pytest.mark.attack(promise="P2", refused_by="site_agent/audit/receipts.py")
def test_copy_that_answers_twice(tmp_path: Path, made: Made) -> None:
    """The coordinator signs a second answer to an upload that the site holds the first answer to, and a statement over
    both: the honest ledger was called changed. The copy alone shows who contradicts himself."""
    made.write(tmp_path / "ledger")
    last = json.loads(json.loads(made.receipts[-1])["payload"])
    again = {**last, "previous": hashlib.sha256(canonical.dumps(last)).hexdigest(), "receipt_id": "another"}
    envelope = dsse.sign(RECEIPT_TYPE, again, made.receipt_key)
    rows = [*made.receipts, canonical.dumps(envelope.document())]
    newest = hashlib.sha256(envelope.payload).hexdigest()
    said = Statement("f", "st-olav", hex_of(made.ledger_key), len(rows), newest, 0, "2026-02-01T00:00:00Z")
    rows.append(canonical.dumps(said.sign(made.receipt_key).document()))
    (tmp_path / "copy.jsonl").write_bytes(b"".join(row + b"\n" for row in rows))
    assert ledgers.both(tmp_path / "ledger", tmp_path / "copy.jsonl") == (audit.CANNOT_VERIFY, None)
    verdict, _ = audit.verify(tmp_path / "ledger", tmp_path / "copy.jsonl")
    assert f"the coordinator answered upload {last['upload_id'][:12]}… twice" in verdict.reason


@pytest.mark.attack(promise="P3", refused_by="site_agent/audit/sums.py")
def test_path_in_a_set_of_a_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the ledger's key he signs a set whose sites are paths. Whoever checked that sum, away from the hospital, had
    a file of his written where he liked, by `audit sum --bundle`."""
    world = SecureSites(tmp_path)
    world.run(1)
    world.check("bergen", 2)
    hospital, there = world.hospitals["bergen"], tmp_path / "temporary"
    there.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(there))
    ((agreed, _),) = hospital.ledger.pledged.sets()
    paths = ("../written", str(tmp_path / "absolute"))
    hospital.ledger.append(replace(agreed, round=2, sites=(*agreed.sites, *paths)))
    vectors = {f"sums/{STUDY}.1.2/{path}.vector": b"#!" for path in paths}
    with pytest.raises(BadData, match=r"the ledger names a site that is none: \"\.\./written\""):
        check_sum(sums_bundled(world, lambda files: files.update(vectors)), STUDY, 2, None)
    assert not [*tmp_path.rglob("written*"), *tmp_path.rglob("absolute*")]
    world.close()


@pytest.mark.attack(promise="P6", refused_by="site_agent/gateway/exit/ledger_state.py")
def test_policy_of_one_person_in_a_new_ledger(site: SiteWorld) -> None:
    """Two people must agree to another policy. One writes it by hand and begins a new ledger, which one person may do:
    it began with what lay there."""
    before = two_for_the_policy(site)
    site.coordinator.wait_declared("READY")
    alone = before.replace(b"persons = 2", b"persons = 1")
    site.state.policy.write_bytes(alone)
    site.roll_over()
    site.coordinator.wait_connected()
    site.coordinator.assign(STUDY, 1)
    site.coordinator.wait_declared("DECLINED", "DECLINED_POLICY")
    with pytest.raises(NeedsPerson, match="the policy in force wants 2 different people to change it"):
        site.approve()
    assert not site.lines("upload")
    with pytest.raises(NeedsPerson, match="agreed to by dpo, 1 of the 2 people"):
        put(site, alone, before, PERSON)
    site.state.policy.write_bytes(before)  # what they agreed to counts in the new ledger too
    site.coordinator.assign(STUDY, 2)
    site.coordinator.wait_receipts(1)
    assert site.lines("policy")[-1]["persons"] == 2
    both_verifiers_agree(site)


@pytest.mark.attack(promise="P6", refused_by="proto/wardround/local/person.py")
@pytest.mark.parametrize("source", ["sudo", "page"])
def test_two_people_by_one_login(site: SiteWorld, source: str) -> None:
    """Two people must release an update. One of them does, and gives the command again under another's name, from a
    process that ends at once: the kernel had nothing to say of it, so the name counted as another person."""
    update = held(site)
    with pytest.raises(NeedsPerson):
        decide(site, update, PERSON)
    assert site.agent is not None
    server = ControlServer(site.state.control, RequestDispatcher(site.state, site.agent).answer_document)
    try:
        other = {"name": "head of it", "uid": 1001, "source": source}
        release = {"command": "decide", "study": STUDY_HERE, "round": 1, "decision": "released", "update": update}
        answer = gone.asked(site.state.control, {**release, "by": other})
    finally:
        server.close()
    assert "has ended, and whose login it was cannot be known" in answer["error"]["message"]
    assert not site.lines("released")
    assert not site.lines("upload")
