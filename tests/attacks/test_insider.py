"""Attacks by an insider at the hospital, who edits what is to prove what left."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from site_agent import audit
from site_agent.audit import bundle
from tests.attacks import ledgers
from tools import verify_ledger
from tools.evidence_tamper import HEADS, SEGMENT, Made
from tools.world import World
from wardround import canonical, dsse


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
    made.write(tmp_path / f"ledger-{made.ledger_id}")  # shown, as `audit reopen` leaves it
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
    assert "the lines of 2 receipts: they were lost before a ledger was opened anew" in verdict.not_shown


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


@pytest.mark.attack(promise="P2", refused_by="site_agent/cli_audit.py")
def test_truncated_without_a_key__an_old_copy_says_of_when_it_is(tmp_path: Path, made: Made) -> None:
    """An old ledger with a copy of the receipts as old as itself is right as of then: the date is the first it says."""
    folder, old = tmp_path / "ledger", tmp_path / "old.jsonl"
    made.write(folder)
    ledgers.cut(folder, made, 13)
    old.write_bytes(made.copy(3, time="2025-06-01T12:00:00Z"))
    done = subprocess.run(
        [sys.executable, "-m", "site_agent.cli", "audit", "verify", "--ledger", folder, "--receipts", old],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    first, _, complete, *_ = done.stdout.splitlines()
    assert done.returncode == audit.VERIFIED
    assert first == "verified: site st-olav of f, 2026-01-01 00:00:00 UTC to 2026-01-01 00:00:00 UTC"
    assert complete.startswith("complete: as of 2025-06-01 12:00:00 UTC")


@pytest.mark.chaos
@pytest.mark.system
@pytest.mark.attack(promise="P2", refused_by="coordinator/receipt_copies.py")
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
    (state / "consents" / "hearts.json").write_text('{"leaves": [], "study": "hearts"}')
    (state / "consents" / "history" / "hearts-1.json").write_text('{"leaves": []}')
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
        "VERIFY.py in the bundle is not the file": ledgers.pack({**files, "VERIFY.py": b"print('VERIFIED')\n"}),
        "policy.toml of its MANIFEST.json is not in the bundle": ledgers.pack(less),
        "is not the archive that its files make": ledgers.pack(files, link="consents/link.json"),
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


@pytest.mark.attack(promise="P6", refused_by="docs/auditors.md")
def test_verify_py_from_the_audited__the_page_names_the_auditors_own() -> None:
    """The page says to run one's own copy, and its digest for this release."""
    root = Path(verify_ledger.__file__).parents[1]
    page = (root / "docs" / "auditors.md").read_text()
    assert hashlib.sha256((root / "tools" / "verify_ledger.py").read_bytes()).hexdigest() in page
    assert "VERIFY.py" not in page
