"""Files: a site's own, damaged; those that a person writes; those that come from another party."""

import base64
import io
import json
import shutil
import tarfile
import zlib
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from site_agent import audit
from site_agent.audit import bundle, export, reconcile, show
from site_agent.gateway.consent import approvals as consents
from site_agent.gateway.consent.account import account
from site_agent.gateway.consent.account import changes as changed
from site_agent.gateway.consent.changes import data_differences, differences, since_shown
from site_agent.gateway.consent.rows import study_row
from site_agent.gateway.enrolment.identity import Identity
from site_agent.gateway.exit import evidence
from site_agent.gateway.exit.ledger import Ledger
from site_agent.gateway.policy import decisions
from site_agent.gateway.policy import policy as policies
from site_agent.gateway.policy import text as policy_text
from site_agent.state import codec
from site_agent.state.directory import SiteState, study_state
from site_agent.trainer.data import sources as data_files
from site_agent.trainer.requests import Requests
from site_agent.trainer.vault import models
from site_agent.trainer.vault.cards import Card, preprocessing_file
from site_agent.trainer.vault.index import Index, Kept, Origin, Pending
from site_agent.trainer.vault.states import Vault
from tools import verify_ledger
from tools.fuzz.engine import Broken, Door, Target
from tools.fuzz.examples import (
    STUDY,
    FullLedger,
    SiteFiles,
    described,
    ledger_key,
    ledger_key_pem,
    study_document,
    tensor_file,
    tensors,
)
from tools.fuzz.formats import in_csv, in_pem, in_safetensors, in_toml, of_tar
from tools.fuzz.mutate import BYTES, JSON_LINES, Mutator, frames, in_json, inside_text, of_frames, of_lines, parts, pick
from wardround.errors import BadData, WardroundError
from wardround.records.invitation import PREFIX, Invitation
from wardround.records.ledger.entries import IdentityEntry, UploadEntry
from wardround.records.receipts import EMPTY_HEAD, LedgerHead, Receipt, line_hash, next_head
from wardround.records.study import load
from wardround.records.trainer import DataFiles, Trained, request_from
from wardround.signing import canonical, certificates, dsse
from wardround.tensors.codecs import Decoded, encoded, fault
from wardround.tensors.encodings import Encoding
from wardround.tensors.files import TensorFile, file_header
from wardround.tensors.manifests import TensorSpec

LINES, HEADS = "000001.jsonl", "heads.jsonl"

OF_A_STUDY = (  # requests that need a whole study
    "describe", "check", "examine", "draft_mapping", "train", "validate", "finish", "predict", "device",
)  # fmt: skip


def _joined(lines: list[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def _written(folder: Path, names: tuple[str, ...], data: bytes) -> None:
    """The frames of a case as files; an empty frame is no file."""
    found = parts(data)
    for number, name in enumerate(names):
        path = folder / name
        if number < len(found) and found[number]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(found[number])
            path.chmod(0o600)
        else:
            path.unlink(missing_ok=True)


def chained_again(made: FullLedger) -> Mutator:
    """One record of the lines changed, and then every line after it and the last head made right again, as somebody
    with the ledger's key would."""

    ledger_id = json.loads(made.lines[0])["ledger_id"]

    def mutate(random: Random, data: bytes) -> bytes:
        lines, *rest = parts(data) or [b""]
        changed = JSON_LINES(random, lines).split(b"\n")
        head, out = EMPTY_HEAD, []
        for number, line in enumerate(one for one in changed if one):
            try:
                record = json.loads(line)
                record.update(prev=head, seq=number)
                line = canonical.dumps(record)
            except Exception:
                pass
            head = next_head(head, line_hash(line))
            out.append(line)
        signed = LedgerHead(ledger_id, len(out), head).sign(made.ledger_key).document()
        return frames([_joined(out), canonical.dumps(signed) + b"\n", *rest[1:]])

    return mutate


def signed_again(made: FullLedger) -> Mutator:
    """The text of one envelope changed and signed with the coordinator's key: the coordinator itself says it."""

    def envelope(random: Random, line: bytes) -> bytes:
        try:
            document = json.loads(line)
            payload = in_json(random, document["payload"].encode())
            signature = made.receipt_key.sign(dsse.encoding(document["payload_type"], payload))
            document.update(payload=payload.decode(), signature=base64.b64encode(signature).decode())
            return canonical.dumps(document)
        except (WardroundError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return inside_text("payload", in_json)(random, line)

    return of_lines(envelope)


def _ledger_mutator(made: FullLedger) -> Mutator:
    text = of_lines(inside_text("payload", in_json))
    plain = of_frames(text, text, of_lines(in_json), order=False)
    again, coordinator = chained_again(made), of_frames(text, text, signed_again(made), order=False)

    def mutate(random: Random, data: bytes) -> bytes:
        return pick(random, again, again, plain, coordinator)(random, data)

    return mutate


def _verify(folder: Path) -> Door:
    """Both verifiers on a changed ledger, without the coordinator's receipts and with them: they must agree."""
    mades = [FullLedger(), FullLedger(1, tail=2), FullLedger(cites=True), FullLedger(again=True)]
    names = (LINES, HEADS, "receipts.jsonl")

    def take(data: bytes) -> None:
        _written(folder, names, data)
        for receipts in (None, folder / names[2]):
            if receipts is not None and not receipts.exists():
                continue
            code = audit.verify(folder, receipts)[1]
            theirs = verify_ledger.judge(folder, receipts=receipts)[0]
            if code != theirs:
                raise Broken(f"the verifiers disagree: {code} and {theirs}{' with receipts' if receipts else ''}")

    seeds = [frames([_joined(made.lines), _joined(made.heads), made.copy()]) for made in mades]
    return Door(seeds, _ledger_mutator(mades[0]), take)


def _open(folder: Path) -> Door:
    """The ledger as the agent opens it at its start: repaired, or refused as it is. With evidence beside it."""
    mades = [FullLedger(), FullLedger(1, tail=2), FullLedger(again=True)]
    said = {"at": "2026-01-01T00:00:00.000Z", "why": "it is for another upload", "upload_id": "ab" * 16,
            "study": "hearts", "revision": 1, "round": 1, "payload_bytes": 2, "payload_sha256": "cd" * 32,
            "payload_base64": "e30=", "payload_type": "", "keyid": "", "signature_base64": ""}  # fmt: skip

    def take(data: bytes) -> None:
        _written(folder, (LINES, HEADS, "evidence/one.json"), data)
        for path in (folder / "torn").glob("*"):
            path.unlink()
        evidence.read(folder)
        ledger = Ledger(folder, mades[0].ledger_key)
        try:
            ledger.refuse_unbegun()
            list(ledger.entries(IdentityEntry))
            ledger.statement()
            for upload_id, upload in ledger.unresolved.items():
                ledger.tries(upload_id)
                ledger.disputed(upload.study, upload.revision)
        finally:
            ledger.close()

    seeds = [frames([_joined(made.lines), _joined(made.heads), canonical.dumps(said)]) for made in mades]
    return Door(seeds, _ledger_mutator(mades[0]), take)


def _show(folder: Path) -> Door:
    """Everything that shows a ledger: `audit show`, `export`, `report`, `reconcile`."""
    site, made = SiteFiles(), FullLedger(again=True)
    consent = codec.to_bytes(replace(site.consent, study="hearts"))
    names = ("ledger/" + LINES, "ledger/" + HEADS, "consents/hearts.json", "receipts.jsonl")

    def take(data: bytes) -> None:
        _written(folder, names, data)
        ledger = folder / "ledger"
        for line in show.chosen(ledger):
            show.words(line)
            for tensor in line.entry.tensors if isinstance(line.entry, UploadEntry) else ():
                show.tensor_words(tensor)
        list(show.chosen(ledger, study="hearts", round_=1, tensor="shared*"))
        for form in export.FORMATS.values():
            form(show.chosen(ledger)).encode()
        reconcile.reconcile(ledger, reconcile.Count(1000))
        copy = folder / names[3]
        page = bundle.look(folder, audit.Copy(copy.read_bytes(), "receipts", True) if copy.exists() else None).page()
        if "<script" in page:
            raise Broken("the page holds a script")

    again, text = chained_again(made), of_lines(inside_text("payload", in_json))
    plain = of_frames(text, BYTES, in_json, signed_again(made), order=False)

    def mutate(random: Random, data: bytes) -> bytes:
        return (again if random.random() < 0.4 else plain)(random, data)

    whole = [_joined(made.lines), _joined(made.heads), consent]
    return Door([frames(whole), frames([*whole, made.copy()])], mutate, take)


def _bundle(folder: Path) -> Door:
    """An auditor's archive, by both verifiers: they must agree. Many are made and signed again with the ledger's key,
    as by a site that lies."""
    made = FullLedger(again=True)
    state, out = folder / "site", folder / "bundle.tar"
    SiteFiles().write(state)
    made.write(state / "ledger")
    (state / "ledger" / "evidence").mkdir()
    (state / "ledger" / "evidence" / "one.json").write_bytes(b"{}\n")
    seeds = []
    for copy in (None, audit.Copy(made.copy(), "receipts", True)):
        bundle.make(state, made.ledger_key, out, copy)
        seeds.append(out.read_bytes())

    def take(data: bytes) -> None:
        out.write_bytes(data)
        code = bundle.verify_bundle(out)[1]
        theirs = verify_ledger.judge(out, bundle=True)[0]
        if code != theirs:
            raise Broken(f"the verifiers disagree: {code} and {theirs}")

    def inner(name: str) -> Mutator:
        return JSON_LINES if name.endswith(("jsonl", "json")) else in_toml if name.endswith("toml") else BYTES

    plain = of_tar(inner)

    def signed(random: Random, data: bytes) -> bytes:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            files = {entry.name: (tar.extractfile(entry) or io.BytesIO()).read() for entry in tar}
        manifest = json.loads(json.loads(files.pop(bundle.MANIFEST))["payload"])
        name = random.choice(sorted(files))
        change = signed_again(made) if name == bundle.RECEIPTS else inner(name)
        files[name] = change(random, files[name])
        if random.random() < 0.1:
            del files[name]
        about = {**manifest, "files": bundle._rows(files)}
        if random.random() < 0.3:
            about = json.loads(in_json(random, canonical.dumps(about)))
        envelope = dsse.sign(bundle.BUNDLE_TYPE, about, made.ledger_key)
        return bundle.archive({**files, bundle.MANIFEST: canonical.dumps(envelope.document()) + b"\n"})

    def mutate(random: Random, data: bytes) -> bytes:
        if random.random() < 0.5:
            try:
                return signed(random, data)
            except (WardroundError, ValueError, RecursionError):
                pass  # a manifest that cannot be written
        return plain(random, data)

    return Door(seeds, mutate, take)


def _receipt_document(folder: Path) -> Door:
    """A signed envelope, as it lies in a ledger or a copy of the receipts."""
    made = FullLedger()
    key = made.receipt_key

    def take(data: bytes) -> None:
        envelope = dsse.Envelope.from_document(canonical.loads(data))
        Receipt.verified(envelope, key.public_key()).sign(key)

    def mutate(random: Random, data: bytes) -> bytes:
        if random.random() < 0.5:
            return inside_text("payload", in_json)(random, data)
        payload = in_json(random, json.loads(data)["payload"].encode())  # and signed again
        signature = key.sign(dsse.encoding("application/vnd.wardround.receipt.v1+json", payload))
        document = {**json.loads(data), "payload": payload.decode("utf-8", "replace"),
                    "signature": base64.b64encode(signature).decode()}  # fmt: skip
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    return Door(list(made.receipts), mutate, take)


def _canonical(folder: Path) -> Door:
    """Canonical JSON: what is read is what would be written."""

    def take(data: bytes) -> None:
        if canonical.dumps(canonical.loads(data)) != data:
            raise Broken("read, and written otherwise")

    seeds = [canonical.dumps(study_document()), *FullLedger().lines[:8]]
    return Door(seeds, in_json, take)


def _invitation(folder: Path) -> Door:
    """An invitation as it is pasted; half of the changed ones have check digits that are right again."""
    site = SiteFiles()
    text = Invitation(
        "ab" * 16, "north", "alpha", "127.0.0.1:9000", 1_780_003_600, site.authority.pem.decode(),
        certificates.certificate_pem(site.certificate).decode(), certificates.key_pem(site.key).decode(),
    ).encode()  # fmt: skip

    def take(data: bytes) -> None:
        import datetime

        try:
            said = data.decode()
        except UnicodeDecodeError:
            return
        invitation = Invitation.decode(said)
        invitation.refuse_expired(datetime.datetime.fromtimestamp(1_780_000_000, datetime.UTC))
        repr(invitation)

    def mutate(random: Random, data: bytes) -> bytes:
        if random.random() < 0.4:
            return BYTES(random, data)
        body = data.split(b".")[1]
        value = in_json(random, base64.urlsafe_b64decode(body + b"=" * (-len(body) % 4)))
        body = base64.urlsafe_b64encode(value).rstrip(b"=")
        return b"%s.%s.%08x" % (PREFIX.encode(), body, zlib.crc32(body))

    return Door([text.encode()], mutate, take)


def _keys(folder: Path) -> Door:
    """The keys and the certificate of a site's identity folder."""
    site = SiteFiles()
    names = ("key.pem", "ledger_key.pem", "certificate.pem")
    whole = [
        certificates.key_pem(site.key),
        ledger_key_pem(site.ledger_key),
        certificates.certificate_pem(site.certificate),
    ]

    def take(data: bytes) -> None:
        _written(folder, names, data)
        own = Identity(folder)
        own.key()
        own.ledger_key()
        certificate = own.certificate()
        certificates.client_name(certificate)
        certificates.not_after(certificate)
        own.credentials() if (folder / "authority.pem").exists() else None

    return Door([frames(whole)], of_frames(in_pem, order=False), take)


def _state(folder: Path) -> Door:
    """The small JSON files of a site's state directory, damaged, and what `studies` and a round make of them."""
    site = SiteFiles()
    state = SiteState(folder)
    names = tuple(site.files())
    policy = policies.parse(site.policy, Path("policy.toml"))

    def take(data: bytes) -> None:
        shutil.rmtree(folder / "consents" / STUDY, ignore_errors=True)
        _written(folder, names, data)
        here = state.site()
        consent, journal = state.consent(STUDY), state.journal(STUDY)
        for offer in state.offers():
            study_state(offer, consent, journal)
            wanted = consents.study_request(offer, f"spiffe://{here.federation}/coordinator", 5, "")
            decisions.decide(policy, wanted)
            changes = differences(consent, offer) if consent is not None else []
            study_row(offer, consent, journal, changes)
            before = state.preview(STUDY)
            lines = policy_text.lines(policy, wanted)
            for shown in (before, consent.account if consent is not None else None):
                made = account(offer, described(offer.upload), lines, consents.ATTEMPTS, shown, "shown")
                canonical.dumps(made.document())
                changed(made)
                if shown is not None:
                    since_shown(shown, made)
        for kept in state.consents():
            data_differences(kept.data, kept.data)
        for act in state.consent_histories():
            act.rounds, act.to_bytes()
        offer = state.offer(STUDY)
        known = consents.require(consent, STUDY, offer.digest)
        told = offer.reported
        consents.check_numbers(journal.metrics, journal.num_examples, journal.num_validation, known, told)
        state.save_journal(journal)
        state.save_consent(known)
        state.save_offer(offer)
        state.save_site(here)

    return Door([frames(list(site.files().values()))], of_frames(in_json, order=False), take)


def _policy(folder: Path) -> Door:
    site = SiteFiles()
    first = policies.parse(site.policy, Path("policy.toml"))

    def take(data: bytes) -> None:
        policy = policies.parse(data, Path("policy.toml"))
        decisions.decide(policy, site.request)
        decisions.quotas(policy, 1000, 1, 2)
        decisions.number_quotas(policy, 4, 1, 2)
        policy_text.lines(policy, site.request)
        policy_text.differences(first, policy)

    rich = site.policy.replace(b"deny = []", b'deny = [{ match = "private.*" }]')
    return Door([site.policy, rich], in_toml, take)


def _study_file(folder: Path) -> Door:
    """A study file, its variants and the defaults of what it names."""
    from fl_algorithms.resolving import resolve

    root = Path(__file__).resolve().parents[2] / "examples"
    names = ("heart_disease.toml", "skin.toml", "nuclei.toml", "heart_disease_methods.toml", "skin_networks.toml")
    seeds = [(root / name).read_bytes() for name in names]
    path = folder / "study.toml"

    def take(data: bytes) -> None:
        path.write_bytes(data)
        study = resolve(load(path))
        canonical.dumps(study.document())

    return Door(seeds, in_toml, take)


def _settings(folder: Path) -> Door:
    """`--set TABLE.KEY=VALUE` on a command line, one a line."""
    from fl_algorithms.resolving import resolve

    path = Path(__file__).resolve().parents[2] / "examples" / "heart_disease.toml"

    def take(data: bytes) -> None:
        settings = data.decode("utf-8", "surrogateescape").replace("\x00", "").split("\n")
        resolve(load(path, settings))

    seeds = [
        b"training.learning_rate=0.01",
        b"algorithm.name=fedprox\nalgorithm.mu=0.1",
        b"study.rounds=3\nstudy.title=a",
    ]
    return Door(seeds, in_toml, take)


def _tensor_files(folder: Path) -> Door:
    """safetensors: opened, hashed, read in blocks."""
    path = folder / "x.safetensors"

    def take(data: bytes) -> None:
        path.write_bytes(data)
        with TensorFile(path) as file:
            if file.bytes > 1 << 24:
                raise Broken(f"{file.bytes} bytes in a file of {len(data)}")
            file.manifest()
            for spec in file.specs[:20]:
                if spec.dtype == "F32" and spec.bytes:
                    file.block(spec.key, 0, spec.bytes // 4)
            file_header(file.specs, file.note)

    return Door([tensor_file(0), tensor_file(1, note={"card": "{}"})], in_safetensors, take)


def _encoded(folder: Path) -> Door:
    """The payload of an update in an encoding, as the coordinator judges it and then reads values out of it."""
    path = folder / "encoded.safetensors"
    weight = TensorSpec("weight", "F32", (6, 50))
    encodings = (Encoding("bfloat16"), Encoding("int8", block=32), Encoding("topk", fraction=0.1))
    values = np.random.default_rng(1).standard_normal(300).astype("<f4")

    def seed(number: int, encoding: Encoding) -> bytes:
        numbers = encoded(encoding, weight, values)
        return bytes([number]) + b"".join(numbers[spec.key].tobytes() for spec in encoding.sent((weight,)))

    def take(data: bytes) -> None:
        encoding = encodings[(data[0] if data else 0) % len(encodings)]
        specs = encoding.sent((weight,))
        size = sum(spec.bytes for spec in specs)
        path.write_bytes(file_header(specs) + data[1 : 1 + size].ljust(size, b"\0"))
        with TensorFile(path) as file:
            if strange := fault(encoding, (weight,), file):
                raise BadData(f"`{strange}` holds what the encoding never writes", code="TENSOR_ENCODING")
            read = Decoded(encoding, (weight,), file)
            pieces = [read.block("weight", start, min(70, 300 - start)) for start in range(0, 300, 70)]
            if np.concatenate(pieces).tobytes() != read.block("weight", 0, 300).tobytes():
                raise Broken("in pieces it has other values")

    return Door([seed(number, one) for number, one in enumerate(encodings)], BYTES, take)


def _vault(folder: Path) -> Door:
    """The trainer's private state and checkpoints of a study, damaged."""
    manifest, _ = tensors(1)
    preprocessing = b"{}"
    card = Card(
        study=STUDY, revision=1, study_digest="ab" * 32, site="alpha", kind="best_local", round=1, score=0.5,
        metric="auc", split="validation", scores={"auc": 0.5}, val_loss=0.5, model_digest=manifest.digest(),
        data_digest="ab" * 32, created="2026-01-01T00:00:00+00:00", wardround="0.1", torch="2", device="cpu",
        threads=1, instruction_set="AVX2",
        preprocessing_sha256="44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
    )  # fmt: skip
    text = card.to_text()
    kept = Kept(round=1, file="state-00001-0123456789ab.safetensors", sha256="ab" * 32)
    origin = Origin(command="train", base_digest="ab" * 32, data_digest="cd" * 32)
    answer = Trained(num_examples=8, num_validation=2, metrics={"val_loss": "0.5"}, update="update.safetensors")
    last = kept.model_copy(update={"round": 2, "file": "state-00002-0123456789ab.safetensors"})
    pending = Pending(state=last, origin=origin, answer=answer, update_crc32="ef" * 4)
    index = Index(study_digest="ab" * 32, committed=(kept,), pending=pending)
    state, base = folder / "state", f"studies/{STUDY}/1"
    best = f"{base}/checkpoints/best_local"
    beside = f"{best}/{preprocessing_file(card.preprocessing_sha256)}"
    names = (f"{base}/index.json", f"{best}/model.safetensors", f"{best}/card.json", beside, f"{base}/study.json")
    study = canonical.dumps(study_document())
    whole = [index.to_bytes(), tensor_file(1, note={"card": text}), text.encode() + b"\n", preprocessing, study]

    def take(data: bytes) -> None:
        _written(state, names, data)
        here = Vault(state, STUDY, 1)
        models.listing(state, STUDY)
        models.export(state, STUDY, "best_local", folder / "out", force=True)
        models.checkpoint(state, STUDY, "best_local")[1].preprocessing()
        here.start_of(3)
        here.pending(2, origin)
        here.name_contributors({"alpha": [1]}, {"alpha": [1]}, {})
        here.commit(2)

    def card_changed(random: Random, data: bytes) -> bytes:
        if random.random() < 0.5:
            return in_safetensors(random, data)
        changed = in_json(random, text.encode()).decode("utf-8", "replace")
        return tensor_file(1, note={"card": changed})

    return Door([frames(whole)], of_frames(in_json, card_changed, in_json, in_json, in_json, order=False), take)


def _requests(folder: Path) -> Door:
    """What the gateway, or whoever reaches the trainer's socket, asks of the trainer; only what needs no torch."""
    requests = Requests(folder)
    (folder / "train.csv").write_bytes(b"y,x\n0,1\n1,2\n")
    named = f'[patients]\ntable = "{folder}/train.csv"\nlabel = "y"\ndigest = "{"ab" * 32}"\n'
    (folder / "data.toml").write_text(named)
    asked: list[dict[str, Any]] = [
        {"command": "commit", "study": STUDY, "revision": 1, "round": 1},
        {"command": "discard", "study": STUDY, "revision": 1, "round": 1},
        {"command": "list_checkpoints", "study": STUDY},
        {"command": "export", "study": STUDY, "checkpoint": "best_local", "out": "out", "force": False},
        {"command": "inspect", "files": {"table": "/nowhere/train.csv", "label": "y"}},
        {"command": "stat_files", "data": "patients"},
        {"command": "hash_files", "data": "patients"},
    ]

    def take(data: bytes) -> None:
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            return  # ``control`` refuses it: see the control targets
        request = request_from(document)
        if request_from(request.to_document()) != request:
            raise Broken("a request that does not survive being written")
        if request.command not in OF_A_STUDY:
            requests.answer(request, lambda step: None)

    return Door([json.dumps(one).encode() for one in asked], in_json, take, refusals=frozenset({0, 2, 3, 4}))


def _data_file(folder: Path) -> Door:
    table = b'[patients]\ntable = "/srv/train.csv"\nlabel = "disease"\ntest = "/srv/test.csv"\ndigest = "%b"\n'
    images = b'[lesions]\nimages = "/srv/images"\nlabels = "/srv/labels.csv"\npatient = "lesion"\ndigest = "%b"\n'
    text = table % (b"ab" * 32) + images % (b"cd" * 32) + b'network = "small"\n'

    def take(data: bytes) -> None:
        (folder / "data.toml").write_bytes(data)
        for named in data_files.sources(folder).values():
            named.layout, named.paths, named.source, named.entry()

    return Door([text], in_toml, take)


def _count(folder: Path) -> Door:
    """What the relay counted, or a person wrote into a file."""
    ledger = folder / "ledger"
    ledger.mkdir()
    FullLedger().write(ledger)
    told = {"up": 1000, "down": 20, "began": "2026-01-01T00:00:00.000Z", "until": "2026-01-01T01:00:00.000Z",
            "connections": [{"opened": "2026-01-01T00:00:00.000Z", "closed": None, "up": 1000, "down": 20},
                            {"opened": "2026-01-01T00:00:00.000Z", "closed": "2026-01-01T00:10:00.000Z"}]}  # fmt: skip
    path = folder / "count.json"

    def take(data: bytes) -> None:
        path.write_bytes(data)
        count = reconcile.count_from(str(path))
        found = reconcile.reconcile(ledger, count)
        json.dumps(found.document(), allow_nan=False)

    return Door([json.dumps(told).encode(), b"12345\n"], in_json, take)


def _table(folder: Path) -> Door:
    """A table of patients, as `data add` looks at it."""
    from site_agent.trainer.data import inspection

    path = folder / "train.csv"
    rows = b"".join(
        b"%d,%.3f,%s\n" % (number % 2, number * 0.37, b"abc"[number % 3 : number % 3 + 1]) for number in range(20)
    )

    def take(data: bytes) -> None:
        path.write_bytes(data)
        inspection.inspect(DataFiles(table=str(path), label="y"))

    return Door([b"y,x,kind\n" + rows, b"y;x\n1;2\n"], in_csv, take, refusals=frozenset({1}))


TARGETS = [
    Target("ledger.verify", "a ledger with its receipts, by both verifiers", _verify, 50),
    Target("ledger.open", "a ledger, as the agent opens it", _open, 30),
    Target("ledger.show", "a ledger: show, export, report, reconcile", _show, 25),
    Target("receipt", "a signed envelope and the receipt in it", _receipt_document, 60),
    Target("canonical", "canonical JSON", _canonical, 100),
    Target("invitation", "an invitation as pasted", _invitation, 80),
    Target("keys", "keys and certificates of a site", _keys, 20),
    Target("site.state", "site.json, offers, consents, journals", _state, 50),
    Target("policy", "policy.toml", _policy, 60),
    Target("study.file", "study files", _study_file, 20),
    Target("study.settings", "--set", _settings, 15),
    Target("tensors", "safetensors files", _tensor_files, 40),
    Target("tensors.encoded", "payloads of encoded updates", _encoded, 40),
    Target("bundle", "an auditor's archive, by both verifiers", _bundle, 20),
    Target("trainer.vault", "private state and checkpoints", _vault, 15),
    Target("trainer.request", "requests to the trainer", _requests, 20),
    Target("trainer.data", "data.toml", _data_file, 25),
    Target("relay.count", "what a relay counted", _count, 15),
    Target("table", "a table of patients", _table, 10),
]  # fmt: skip
__all__ = ["TARGETS", "ledger_key"]
