"""One signed archive that holds all an auditor needs, and the program to check it with.

    ledger/          the lines and the signed heads, as they are
    consents/        what was approved, by whom; a folder a study has each approval and withdrawal
    policies/        each policy that was in force, by its SHA-256
    policy.toml      what may leave, if the site has one
    receipts.jsonl   the coordinator's copy of its receipts, if it was given
    report.html      the same for people
    VERIFY.py        the second verifier: `python VERIFY.py ledger`
    MANIFEST.json    SHA-256 of each of them, signed with the ledger key (DSSE)

The archive is the same bytes whenever it is made of the same files: sorted names, no times, no owners.
"""

import hashlib
import io
import tarfile
from importlib import resources
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from site_agent.audit import report
from site_agent.audit.form import HEADS
from site_agent.audit.verify import CANNOT_VERIFY, verify
from wardround import canonical, dsse, durable
from wardround.errors import BadData, Unavailable

BUNDLE_TYPE = "application/vnd.wardround.audit-bundle.v1+json"
VERIFIER = "verify_ledger.txt"  # tools/verify_ledger.py under a name that no import finds


def write(state: Path, key: Ed25519PrivateKey, out: Path, receipts: Path | None = None) -> int:
    """Write the archive of a site's state directory. Returns what verification said: its exit code.

    Raises:
        BadData: there is nothing to verify, or a line cannot be read.
        CannotWrite: the disk does not take it.
    """
    verdict, code = verify(state / "ledger", receipts)
    if code == CANNOT_VERIFY:
        raise BadData(f"nothing was bundled: {verdict.reason}", hint="`site-agent audit verify` says more")
    files = _files(state, receipts)
    files["report.html"] = report.page(state / "ledger", state / "consents", verdict, code).encode()
    manifest = {
        "ledger_id": verdict.ledger_id,
        "lines": verdict.lines,
        "head": verdict.head,
        "verdict": code,
        "files": [
            {"path": path, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for path, data in sorted(files.items())
        ],
    }
    files["MANIFEST.json"] = canonical.dumps(dsse.sign(BUNDLE_TYPE, manifest, key).document()) + b"\n"
    durable.write_file(out, _archive(files))
    return code


def _files(state: Path, receipts: Path | None) -> dict[str, bytes]:
    verifier = resources.files("site_agent.audit").joinpath(VERIFIER).read_bytes()
    files = {"VERIFY.py": verifier}
    wanted = [*(state / "ledger").glob("[0-9]*.jsonl"), state / "ledger" / HEADS, *(state / "consents").rglob("*.json")]
    wanted += (state / "policies").glob("*.toml")
    try:
        for path in [*wanted, state / "policy.toml"]:
            if path.exists():
                files[path.relative_to(state).as_posix()] = path.read_bytes()
        if receipts is not None:
            files["receipts.jsonl"] = receipts.read_bytes()
    except OSError as error:
        raise Unavailable(f"{error.filename} cannot be read ({error.strerror})") from None
    return files


def _archive(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path, data in sorted(files.items()):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode, entry.mtime = len(data), 0o644, 0
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()
