"""The pack as a research object: RO-Crate 1.1 metadata, which says what each file is, in JSON-LD."""

import json
from collections.abc import Mapping

from wardround import __version__

METADATA = "ro-crate-metadata.json"
CONTEXT, PROFILE = "https://w3id.org/ro/crate/1.1/context", "https://w3id.org/ro/crate/1.1"
FORMATS = {
    "json": "application/json", "jsonl": "application/jsonl", "html": "text/html", "svg": "image/svg+xml",
    "toml": "application/toml",
}  # fmt: skip
ABOUT = {
    "ledger/": "The site's own ledger of what left, or what it keeps as evidence",
    "consents/": "What a person approved or withdrew",
    "policies/": "A policy's text, by its SHA-256",
    "policy.toml": "The policy in force",
    "receipts.jsonl": "The coordinator's signed receipts",
    "report.html": "What left the site, for people",
    "MANIFEST.json": "SHA-256 of every other file, signed with the site's ledger key (DSSE)",
}


def metadata(title: str, about: str, when: str, files: Mapping[str, int], described: Mapping[str, str]) -> bytes:
    """The metadata file.

    Args:
        files: every file of the pack, the manifest too -> its bytes; 0 where that is not known yet.
        described: what is said of a file, beside what ``ABOUT`` says.
    """
    license_ = {"@id": "#not-for-publication", "@type": "CreativeWork", "name": "Not for publication",
                "description": "This pack belongs to the hospital that made it."}  # fmt: skip
    tool = {"@id": "#site-agent", "@type": "SoftwareApplication", "name": "site-agent", "softwareVersion": __version__}
    root = {
        "@id": "./", "@type": "Dataset", "name": title, "description": about, "datePublished": when,
        "license": {"@id": license_["@id"]}, "creator": {"@id": tool["@id"]},
        "hasPart": [{"@id": path} for path in sorted(files)],
    }  # fmt: skip
    descriptor = {"@id": METADATA, "@type": "CreativeWork", "conformsTo": {"@id": PROFILE}, "about": {"@id": "./"}}
    graph = [descriptor, root, license_, tool, *(_file(path, files[path], described) for path in sorted(files))]
    return json.dumps({"@context": CONTEXT, "@graph": graph}, indent=1, sort_keys=True).encode() + b"\n"


def _file(path: str, size: int, described: Mapping[str, str]) -> dict[str, object]:
    said = described.get(path) or next((text for start, text in ABOUT.items() if path.startswith(start)), path)
    entry: dict[str, object] = {
        "@id": path, "@type": "File", "name": said,
        "encodingFormat": FORMATS.get(path.rpartition(".")[2], "application/octet-stream"),
    }  # fmt: skip
    return {**entry, "contentSize": str(size)} if size else entry
