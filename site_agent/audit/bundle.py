"""Makes and verifies a bundle: one signed archive of all that an auditor needs, but the program to check it with.

    ledger/          the lines and the signed heads, as they are, and what else was kept as evidence; ledger-ID/ for
                     each older one that it continues
    consents/        what was approved, by whom; all that the folder holds
    policies/        the policies' texts by digest, where the site keeps them
    policy.toml      what may leave, if the site has one
    sums/            with secure aggregation, what each sum was checked with; its vectors as far as there is room
    receipts.jsonl   the coordinator's copy of its receipts, if it was given or the site has one
    report.html      the same for people
    MANIFEST.json    SHA-256 of each of them, signed with the ledger key (DSSE)

The archive is the same bytes whenever it is made of the same files: sorted names, no times, no owners. So a reader
makes it again of what it read, and any other byte in it is seen.
"""

import hashlib
import io
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from site_agent.audit import report
from site_agent.audit.chain import Account, Changed, signed_value
from site_agent.audit.files import HEADS, SEGMENT, LedgerFiles, RawLines, in_archive, within
from site_agent.audit.form import lines, read
from site_agent.audit.verify import CANNOT_VERIFY, TAMPERED, Copy, Pins, Shown, Verdict, given_copy, judge, judged
from wardround.errors import BadData, Unavailable
from wardround.local import durable
from wardround.local.half_written import is_half_written
from wardround.records.ledger.entries import CitedHead, ConsentEntry, GenesisEntry
from wardround.signing import canonical, dsse
from wardround.terminal import escaped

BUNDLE_TYPE = "application/vnd.wardround.audit-bundle.v1+json"
MANIFEST = "MANIFEST.json"
RECEIPTS = "receipts.jsonl"
LARGEST = 2**30  # bytes of an archive that is read
ROOM = 2**28  # bytes of the vectors and models of sums in an archive; others are given beside it
CONSENT = re.compile(r"consents/[^/]+\.json")


@dataclass(frozen=True)
class Bundle:
    """An archive's files by path, MANIFEST.json among them; the archive is the one that these files make."""

    files: dict[str, bytes]


@dataclass(frozen=True)
class Look:
    """One look at a site's state directory: the files as they were, and the verdict. ``ledgers``: oldest first."""

    files: dict[str, bytes]
    ledgers: list[LedgerFiles]
    verdict: Verdict
    code: int

    def page(self) -> str:
        """The report on what was looked at. Raises BadData: a line cannot be read."""
        approvals = {
            path.removeprefix("consents/"): data for path, data in self.files.items() if CONSENT.fullmatch(path)
        }
        return report.page(self.ledgers, approvals, self.verdict, self.code)


def look(state: Path, copy: Copy | None = None, pins: Pins = Pins()) -> Look:
    """Read a site's files once, and judge what was read.

    Args:
        copy: the coordinator's receipts, to judge by and to have in the bundle.

    Raises:
        BadData: there is nothing to verify.
        Unavailable: a file cannot be read.
    """
    files = gather(state, copy.data if copy is not None else None)
    newest = in_archive("ledger", files)
    if newest is None:
        raise BadData(f"there is no ledger in {state / 'ledger'}", hint="give the site's --state")
    shown = Shown(newest, within(files))
    verdict, code = judged(lambda verdict: judge(verdict, shown, [copy] if copy is not None else [], pins))
    if code == CANNOT_VERIFY:
        raise BadData(f"there is nothing to report: {verdict.reason}", hint="`site-agent audit verify` says more")
    older = [] if code == TAMPERED else continued(shown)
    return Look(files, [*older, newest], verdict, code)


def make(state: Path, key: Ed25519PrivateKey, out: Path, copy: Copy | None = None) -> tuple[Verdict, int]:
    """Write the archive of a site's state directory. Returns the verdict on what is in it, and its exit code.

    Raises:
        BadData: there is nothing to verify, or a line cannot be read.
        Unavailable: a file cannot be read.
        CannotWrite: the disk does not take it.
    """
    looked = look(state, copy)
    verdict = looked.verdict
    files = {**looked.files, **sums_of(state), "report.html": looked.page().encode()}
    about = {
        "ledger_id": verdict.ledger_id, "lines": sum(1 for _ in RawLines(looked.ledgers[-1])), "head": verdict.head,
        "verdict": looked.code,
    }  # fmt: skip
    write(files, about, key, out)
    return verdict, looked.code


def continued(shown: Shown) -> list[LedgerFiles]:
    """The ledgers that a verified one continues, oldest first, as far as they are shown."""
    older: list[LedgerFiles] = []
    here = shown.newest
    while (cited := _cited(here)) is not None:
        files = shown.find(cited.ledger_id)
        if files is None:
            break
        older.insert(0, here := files)
    return older


def _cited(ledger: LedgerFiles) -> CitedHead | None:
    first = next(lines(ledger)).entry
    return first.continues if isinstance(first, GenesisEntry) else None


def verify_bundle(path: Path, receipts: Path | None = None, pins: Pins = Pins()) -> tuple[Verdict, int]:
    """The verdict on an archive that ``make`` wrote: its ledgers, its manifest, and each of its files."""

    def judge_it(verdict: Verdict) -> int:
        bundle = read_bundle(path)
        newest = in_archive("ledger", bundle.files)
        if newest is None:
            raise Unavailable(f"{path} holds no ledger")
        given = []
        if (own := bundle.files.get(RECEIPTS)) is not None:
            given.append(Copy(own, "the receipts in the bundle", independent=False))
        given += [given_copy(receipts)] if receipts is not None else []
        shown = Shown(newest, within(bundle.files), partial(check_manifest, bundle))
        code = judge(verdict, shown, given, pins)
        verdict.not_shown += _not_of_the_ledger(bundle.files, [newest, *continued(shown)])
        return code

    return judged(judge_it)


def _not_of_the_ledger(files: Mapping[str, bytes], ledgers: list[LedgerFiles]) -> Iterator[str]:
    """The approvals and policies in a bundle that are not what its ledgers have the digest of, a sentence each.

    Whoever has the ledger's key can sign another file in their place; the ledger's line is what receipts confirm.
    """
    entries = (line.entry for ledger in ledgers for line in lines(ledger))
    named = {entry.consent_sha256 for entry in entries if isinstance(entry, ConsentEntry)}
    for path, data in sorted(files.items()):
        sha256, shown = hashlib.sha256(data).hexdigest(), escaped(path, 80)
        if path.startswith("consents/") and sha256 not in named:
            yield f"that {shown} is what was approved or withdrawn: no line of the ledgers in it has its digest"
        if path.startswith("policies/") and path != f"policies/{sha256}.toml":
            yield f"that {shown} was ever in force: its digest is not its name"


def gather(state: Path, receipts: bytes | None) -> dict[str, bytes]:
    """A site's files by their path in a bundle. An agent may be writing: approvals are read before the lines that name
    them, and signed heads before lines; policies' texts after those; and what is only being written is not read.

    Raises:
        Unavailable: one of them cannot be read.
    """
    files: dict[str, bytes] = {}
    try:
        _take_below(state, [state / "consents"], files)
        for folder in [state / "ledger", *sorted(state.glob("ledger-*"))]:
            names = [HEADS, *sorted(path.name for path in folder.glob("*.jsonl") if SEGMENT.fullmatch(path.name))]
            for path in [folder / name for name in names]:
                if path.is_file():
                    files[path.relative_to(state).as_posix()] = path.read_bytes()
        _take_below(state, [*sorted(state.glob("ledger*/evidence")), state / "policies"], files)
        _take(state, state / "policy.toml", files)
    except OSError as error:
        raise Unavailable(f"{error.filename} cannot be read ({error.strerror})") from None
    if receipts is not None:
        files[RECEIPTS] = receipts
    return files


def _take_below(state: Path, folders: list[Path], files: dict[str, bytes]) -> None:
    """Put what lies below each of ``folders`` into ``files``."""
    for path in [path for folder in folders for path in sorted(folder.rglob("*"))]:
        _take(state, path, files)


def _take(state: Path, path: Path, files: dict[str, bytes]) -> None:
    if path.is_file() and not path.is_symlink() and not is_half_written(path):
        files[path.relative_to(state).as_posix()] = path.read_bytes()


def sums_of(state: Path) -> dict[str, bytes]:
    """What each sum was checked with: the evidence always; of the last sums that fit, the vectors and models too.

    Raises:
        Unavailable: one of them cannot be read.
    """
    room, files = ROOM, dict[str, bytes]()
    try:
        folders = [path for path in (state / "sums").glob("*") if path.is_dir()]
        for folder in sorted(folders, key=lambda path: path.stat().st_mtime_ns, reverse=True):
            plain = sorted(path for path in folder.iterdir() if path.is_file() and not path.is_symlink())
            whole = [path for path in plain if path.suffix in (".vector", ".safetensors")]
            size = sum(path.stat().st_size for path in whole)
            room -= size if (fits := size <= room) else 0
            for path in [path for path in plain if path.suffix == ".json"] + (whole if fits else []):
                files[path.relative_to(state).as_posix()] = path.read_bytes()
    except OSError as error:
        raise Unavailable(f"{error.filename} cannot be read ({error.strerror})") from None
    return files


def write(files: dict[str, bytes], about: Mapping[str, object], key: Ed25519PrivateKey, out: Path) -> None:
    """Write the archive of these files, with a manifest signed by the ledger key.

    Args:
        about: what the manifest says beside the files: ``ledger_id``, ``lines``, ``head`` and the ``verdict``.

    Raises:
        CannotWrite: the disk does not take it.
    """
    manifest = canonical.dumps(dsse.sign(BUNDLE_TYPE, {**about, "files": _rows(files)}, key).document()) + b"\n"
    durable.write_file(out, archive({**files, MANIFEST: manifest}))


def read_bundle(path: Path) -> Bundle:
    """The files of an archive. Nothing is written anywhere; links, devices and sparse files are not read.

    Raises:
        Unavailable: it cannot be read, or is no bundle.
        Changed: it is a bundle, but not the archive that its files make.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise Unavailable(f"{path} is larger than {LARGEST} bytes: unpack it, and verify the folders in it")
        data = path.read_bytes()
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            files: dict[str, bytes] = {}
            others = []
            for entry in tar:
                held = tar.extractfile(entry) if entry.isreg() and not entry.issparse() else None
                if held is None or entry.name in files:
                    others.append(entry.name)
                else:
                    files[entry.name] = held.read()
        made = archive(files)
    except OSError as error:
        raise Unavailable(f"{path} cannot be read ({error.strerror})") from None
    except (tarfile.TarError, ValueError, OverflowError, RecursionError, MemoryError) as error:  # what no archive is
        raise Unavailable(f"{path} is no bundle: {error}") from None
    if MANIFEST not in files:
        raise Unavailable(f"{path} is no bundle: it has no {MANIFEST}")
    if made != data:
        if others:
            raise Changed(None, f"{others[0]} in the bundle is no plain file, or is there twice", "")
        raise Changed(None, f"{path.name} is not the archive that its files make: something in it was changed", "")
    return Bundle(files)


def check_manifest(bundle: Bundle, ledger: Account) -> None:
    """Raises Changed: the manifest is not signed with the ledger's key, or files or head are not those in it; naming
    the first file that was changed, added or taken out.
    """
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(ledger.key))
    try:
        data = bundle.files[MANIFEST].removesuffix(b"\n")
        manifest = signed_value(dsse.Envelope.from_document(read(data)), BUNDLE_TYPE, dsse.keyid(key), key)
        listed = {row["path"]: row for row in manifest["files"]}
        head = (manifest["ledger_id"], manifest["lines"], manifest["head"])
    except (BadData, KeyError, TypeError) as error:
        raise Changed(None, f"the bundle's {MANIFEST} is not what the ledger's key signed: {error}", "") from None
    rows = _rows({path: data for path, data in bundle.files.items() if path != MANIFEST})
    for row in rows:
        if row["path"] not in listed:
            raise Changed(None, f"{row['path']} is in the bundle, and its {MANIFEST} names no such file", "")
        if listed[row["path"]] != row:
            raise Changed(None, f"{row['path']} in the bundle is not the file that its {MANIFEST} names", "")
    if manifest["files"] != rows:
        missing = sorted(map(str, listed.keys() - bundle.files.keys()))
        raise Changed(None, f"{', '.join(missing) or 'a file'} of its {MANIFEST} is not in the bundle", "")
    if head != (ledger.ledger_id, ledger.lines, ledger.heads[-1].hex()):
        raise Changed(None, f"the bundle's ledger has another head than its {MANIFEST} says", "")


def _rows(files: dict[str, bytes]) -> list[dict[str, object]]:
    return [
        {"path": path, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for path, data in sorted(files.items())
    ]


def archive(files: dict[str, bytes]) -> bytes:
    """The one archive that these files make: ustar, sorted by path, mode 0644, no time and no owner."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path, data in sorted(files.items()):
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return out.getvalue()
