"""Puts a pack together: what a bundle has, and of one study the evidence beside it. Reads the state once."""

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from site_agent.audit import bundle
from site_agent.audit.bundle import Look, look
from site_agent.audit.files import RawLines
from site_agent.audit.form import lines as lines_of
from site_agent.audit.pack import crate
from site_agent.audit.pack.page import Isolation, Pack, PolicyChange, page
from site_agent.audit.pack.picture import Flow, picture
from site_agent.audit.pack.promises import Promise, measured, promises
from site_agent.audit.pack.sbom import sbom
from site_agent.audit.verify import TAMPERED, Copy, Verdict
from site_agent.gateway.consent.facts import size
from site_agent.gateway.policy import policy as policies_
from site_agent.gateway.policy import text as policy_text
from site_agent.gateway.policy.policy import Policy
from site_agent.state.consent import APPROVED, Consent
from site_agent.state.directory import SiteState, now_text
from site_agent.state.site import Site
from wardround import __version__
from wardround.errors import BadData, UsageProblem
from wardround.records.ledger.decided import PolicyEntry
from wardround.records.ledger.lines import Line
from wardround.signing import canonical
from wardround.terminal import many

FOLDER = "evidence"
ABOUT = {
    f"{FOLDER}/index.html": "The pack's page: begin here",
    f"{FOLDER}/data-flow.svg": "Who has what, and what crosses the hospital's border",
    f"{FOLDER}/promised-and-measured.json": "Each promise of approvals and policies, and what the ledger shows of it",
    f"{FOLDER}/isolation.json": "What kept the trainer apart when the pack was made, by its own word",
    f"{FOLDER}/sbom.cdx.json": "The installed software (CycloneDX 1.6)",
    f"{FOLDER}/study.json": "The resolved study that was approved last",
}


def make(
    here: SiteState, site: Site, study: str, isolation: Isolation, key: Ed25519PrivateKey, out: Path, copy: Copy | None
) -> tuple[Verdict, int, list[Promise]]:
    """Write the pack of a study to ``out``. Returns the ledger's verdict, its exit code, and the promises.

    Args:
        copy: of the coordinator's receipts, to judge by and to have in the pack.

    Raises:
        UsageProblem: nobody here ever approved the study.
        BadData: the ledger was changed, or there is none; or a file of the state is damaged.
        NeedsPerson: what writes the bill of software is not installed.
        Unavailable, CannotWrite: a file cannot be read, or the disk does not take it.
    """
    consents = here.consent_history(study)
    if not consents:
        known = ", ".join(consent.study for consent in here.consents()) or "none"
        raise UsageProblem(f"nobody here has approved study `{study}`", hint=f"approved here: {known}")
    looked = look(here.root, copy)
    if looked.code == TAMPERED:
        raise BadData(
            f"the ledger does not verify, so nothing of it is known to be true: {looked.verdict.reason}",
            hint="`site-agent audit bundle` collects the files as they are, for whoever looks into it",
        )
    made = now_text()
    entries = list(chain.from_iterable(map(lines_of, looked.ledgers)))
    texts = dict(_policies(looked, entries))
    found = promises(entries, study, consents, texts)
    changes = tuple(_changes(entries, texts))
    svg = picture(_flow(site, study, consents[-1], entries, isolation)).encode()
    bill = sbom(site.site, datetime.datetime.fromisoformat(made))
    newest = next((consent for consent in reversed(consents) if consent.state == APPROVED), consents[-1])
    title = str(newest.document["study"].get("title", "")) if isinstance(newest.document["study"], dict) else ""
    pack = Pack(
        site.site, study, title, site.federation, made, svg, found, consents, changes, isolation,
        len(json.loads(bill)["components"]), __version__,
    )  # fmt: skip
    files = {
        **looked.files,
        **bundle.sums_of(here.root),
        "report.html": looked.page().encode(),
        f"{FOLDER}/index.html": page(pack, looked.verdict, looked.code).encode(),
        f"{FOLDER}/data-flow.svg": svg,
        f"{FOLDER}/promised-and-measured.json": _json({"study": study, "site": site.site, "made": made,
                                                        "promises": [dataclasses.asdict(one) for one in found]}),
        f"{FOLDER}/isolation.json": _json(dataclasses.asdict(isolation)),
        f"{FOLDER}/sbom.cdx.json": bill,
        f"{FOLDER}/study.json": canonical.dumps(newest.document),
    }  # fmt: skip
    sizes = {path: len(data) for path, data in files.items()} | {bundle.MANIFEST: 0}
    files[crate.METADATA] = crate.metadata(
        f"Evidence pack: study {study} at {site.site}",
        f"What study {study} was approved to do at {site.site}, what the ledger shows that it did, and the proofs.",
        made, sizes, ABOUT,
    )  # fmt: skip
    about = {
        "ledger_id": looked.verdict.ledger_id, "lines": sum(1 for _ in RawLines(looked.ledgers[-1])),
        "head": looked.verdict.head, "verdict": looked.code, "pack": {"study": study, "site": site.site, "made": made},
    }  # fmt: skip
    bundle.write(files, about, key, out)
    return looked.verdict, looked.code, found


def _policies(looked: Look, entries: list[Line]) -> Iterator[tuple[str, Policy]]:
    """The policies that the ledger names, by digest, as far as their texts are kept as they were."""
    named = {line.entry.sha256 for line in entries if isinstance(line.entry, PolicyEntry) and line.entry.sha256}
    for sha256 in sorted(named):
        path = f"policies/{sha256}.toml"
        if hashlib.sha256(looked.files.get(path, b"")).hexdigest() == sha256:
            yield sha256, policies_.parse(looked.files[path], Path(path))


def _changes(entries: list[Line], texts: Mapping[str, Policy]) -> Iterator[PolicyChange]:
    before: Policy | None = None
    for line in entries:
        if isinstance(line.entry, PolicyEntry):
            sha256 = line.entry.sha256 or ""
            now = texts.get(sha256)
            differences = policy_text.differences(before, now) if before is not None and now is not None else []
            yield PolicyChange(line.ts, line.entry.event, sha256, now is not None or not sha256, tuple(differences))
            before = now


def _flow(site: Site, study: str, consent: Consent, entries: list[Line], isolation: Isolation) -> Flow:
    uploads = [one.upload for one in measured(entries, study).uploads]
    sent = sum(upload.payload_bytes for upload in uploads)
    tensors = {(row.bundle, row.name) for upload in uploads for row in upload.tensors}
    metrics = sorted({metric.name for upload in uploads for metric in upload.metrics})
    users, approved = f"user {isolation.trainer_user}", many(len(consent.upload), "approved tensor")
    return Flow(
        site=site.site,
        study=study,
        data=f"{consent.data.name}: {consent.rows} rows, digest {consent.data.digest[:12]}. Read by the trainer alone",
        trainer=f"isolation: {isolation.in_force}; {users}. No network, no keys",
        gateway=f"user {isolation.gateway_user}. Keys, policy, ledger; sees no patient. The one exit",
        coordinator=f"{site.federation}, {site.address}. Makes one model of all sites' updates",
        leaves=(
            f"{many(len(uploads), 'update')}, {size(sent)}: {len(tensors)} of {approved}",
            f"beside them {', '.join(metrics) or 'no metric'}, and two numbers of rows",
        ),
        comes="comes: the model of each round",
        stays=f"every row of the files; {many(len(consent.private), 'tensor')} of the model; keys, ledger and policy",
        others="To the other sites: the model that was made of all updates"
        if not consent.exposure
        else f"Kept apart there: {consent.personalized}",
    )


def _json(document: object) -> bytes:
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"
