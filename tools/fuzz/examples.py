"""Valid examples of everything, the same bytes each time: keys, times and names are drawn from a seed, not by chance.

``CoordinatorWorld`` is a real coordinator without its port and its engine's thread: what would be done there is done in
the caller's. After a case ``restore`` makes it what it was. ``site_files`` are the files of a site that has joined.
"""

import hashlib
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock
from uuid import UUID

import grpc
import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator import state_directory as places
from coordinator.administration import Administration
from coordinator.authenticator import Authenticator
from coordinator.calls import Calls
from coordinator.context import Context
from coordinator.members.authority import Authority
from coordinator.servicers import EnrolmentServicer, FederationServicer, SummariesServicer
from coordinator.updates.decide import Uploads
from fl_algorithms.resolving import resolve
from site_agent.gateway.connection.client import offer_from
from site_agent.gateway.consent.approvals import ATTEMPTS, study_request
from site_agent.gateway.policy import text
from site_agent.state import codec
from site_agent.state.consent import APPROVED, Consent, Shown, TrainedData
from site_agent.state.journal import Journal
from site_agent.state.offer import Offer
from site_agent.state.person import Person
from site_agent.state.site import Site
from site_agent.state.tensors import spec_document
from tools.evidence_tamper import Made
from tools.fuzz.engine import Broken, Uncoded
from wardround import __version__, refusals
from wardround.errors import BadData
from wardround.records import receipts
from wardround.records.invitation import Invitation
from wardround.records.messages import manifest_message
from wardround.records.receipts import EMPTY_HEAD, LedgerHead, line_hash
from wardround.records.study import StudyFile
from wardround.records.summaries.figures import ColumnFigures, SiteFigures
from wardround.records.summaries.request import SummaryRequest
from wardround.records.trainer import Described, FilesStatus, PrivateTensor, TensorRow
from wardround.signing import canonical, certificates
from wardround.tensors.files import file_header
from wardround.tensors.manifests import Entry, Manifest, TensorSpec
from wardround.v1 import enrolment_pb2, tensors_pb2
from wardround.v1 import federation_pb2 as pb

NOW = 1_780_000_000.0  # a day in 2026
SPECS = (TensorSpec("layer.bias", "F32", (2,)), TensorSpec("layer.weight", "F32", (2, 3)))
STUDY, SITES = "trial", ("alpha", "charlie")


def described(specs: Sequence[TensorSpec], private: Sequence[PrivateTensor] = ()) -> Described:
    """What a trainer would send of an installed model with these tensors, whose bounds are not checked."""
    rows = [TensorRow.model_construct(**spec_document(spec)) for spec in specs]
    return Described.model_construct(
        upload=rows, download=rows, private=list(private), exposure="", personalized="", network="", model="mlp",
        parameters=8, weights=None,
    )  # fmt: skip


@contextmanager
def drawn(seed: str) -> Iterator[None]:
    """What the programs draw by chance comes of ``seed`` in here: keys, serials, ids, signatures, the time."""
    random, serial = Random(seed), count(1000)
    sign, request = x509.CertificateBuilder.sign, x509.CertificateSigningRequestBuilder.sign

    def fixed(method: Any) -> Any:
        return lambda self, key, algorithm, **more: method(
            self, key, algorithm, **{**more, "ecdsa_deterministic": True}
        )

    with (
        mock.patch.object(certificates, "new_key", lambda: private_key(f"{seed} {random.random()}")),
        mock.patch("cryptography.x509.random_serial_number", lambda: next(serial)),
        mock.patch.object(x509.CertificateBuilder, "sign", fixed(sign)),
        mock.patch.object(x509.CertificateSigningRequestBuilder, "sign", fixed(request)),
        mock.patch("secrets.token_hex", lambda size=16: random.randbytes(size).hex()),
        mock.patch("uuid.uuid4", lambda: UUID(bytes=random.randbytes(16))),
        mock.patch("time.time", lambda: NOW),
    ):
        yield


def private_key(seed: str) -> certificates.PrivateKey:
    return ec.derive_private_key(int.from_bytes(hashlib.sha256(seed.encode()).digest(), "big") >> 1, ec.SECP256R1())


def ledger_key(seed: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(seed.encode()).digest())


def ledger_key_pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def study_document(**study: Any) -> dict[str, Any]:
    """A resolved study."""
    tables = {
        "study": {"name": STUDY, "sites": list(SITES), "rounds": 3, **study},
        "task": {"name": "tabular", "label": "y", "classes": ["0", "1"], "features": [{"name": "x"}]},
        "model": {"name": "mlp"},
        "algorithm": {"name": "fedavg"},
        "training": {"local_steps": 1},
        "reported": {"metrics": ["val_loss", "accuracy"]},
    }
    return resolve(StudyFile.model_validate(tables)).document()


def tensors(seed: int, specs: Sequence[TensorSpec] = SPECS) -> tuple[Manifest, bytes]:
    """A manifest and its payload."""
    values = np.random.default_rng(seed)
    pieces = [(spec, values.standard_normal(spec.shape).astype("<f4").tobytes()) for spec in specs]
    entries = tuple(Entry(spec, hashlib.sha256(data).hexdigest()) for spec, data in pieces)
    return Manifest(entries), b"".join(data for _, data in pieces)


def tensor_file(seed: int, specs: Sequence[TensorSpec] = SPECS, note: dict[str, str] | None = None) -> bytes:
    return file_header(specs, note) + tensors(seed, specs)[1]


class Refused(BadData):
    """A call that was ended with a code of ours, as its caller hears it."""


class Aborted(Exception):
    """What ``abort`` raises; gRPC raises a bare Exception there."""

    def __init__(self, status: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.status = status
        self.details = details

    def refused(self) -> Exception:
        """As a refusal, if it is one of ours: exactly a code, and not that of the coordinator's own trouble."""
        if self.details not in refusals.MEANINGS:
            return Broken(f"{self.status.name}: the caller hears more than a code: {self.details[:300]}")
        if self.details == refusals.TROUBLE or self.status == grpc.StatusCode.INTERNAL:
            return Uncoded(f"{self.status.name}: {self.details}")
        return Refused(self.details, code=self.details)


class FakeContext:
    """A call's context as the servicers use it."""

    def __init__(self, pem: bytes) -> None:
        self._pem = pem
        self._active = True
        self._callbacks: list[Any] = []

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_pem_cert": [self._pem]} if self._pem else {}

    def peer(self) -> str:
        return "ipv4:127.0.0.1:50000"

    def is_active(self) -> bool:
        return self._active

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def add_callback(self, callback: Any) -> bool:
        if self._active:
            self._callbacks.append(callback)
        return self._active

    def cancel(self) -> bool:
        self.end()
        return True

    def abort(self, status: grpc.StatusCode, details: str) -> None:
        raise Aborted(status, details)

    def end(self) -> None:
        """The call is over."""
        if self._active:
            self._active = False
            for callback in self._callbacks:
                callback()


def summary_request() -> SummaryRequest:
    """A summary request to both sites, with a column of each kind."""
    columns: list[Any] = [
        "age", {"name": "ward", "kind": "categorical", "categories": ["icu", "surgical"]},
        {"name": "died", "kind": "boolean"}, {"name": "born", "kind": "date", "until": "2026-01-01", "low": 0},
    ]  # fmt: skip
    return SummaryRequest.from_document({"name": "columns", "sites": list(SITES), "columns": columns})


def site_figures() -> SiteFigures:
    """What a site tells for it."""
    columns = (
        ColumnFigures(values=90, missing=10, unfit=10, mean="60.2", std="11.6", low="40", high="80"),
        ColumnFigures(values=100, categories=(50, 30), other=20), ColumnFigures(values=100, categories=(80, 20)),
        ColumnFigures(absent=True),
    )  # fmt: skip
    asked = summary_request()
    return SiteFigures(
        request=asked.name, digest=asked.digest, min_count=10, digits=3, rows=110, columns=columns
    )  # fmt: skip


class CoordinatorWorld:
    """A coordinator with two sites in one running study, round 1 open, and an invitation that nobody used."""

    def __init__(self, folder: Path) -> None:
        with drawn("coordinator"):
            self.state = places.State(folder / "state")
            places.create(self.state, "north", "127.0.0.1:9000", NOW)
            self.receipt_key = ledger_key("receipts")
            self.state.receipt_key_file.write_bytes(ledger_key_pem(self.receipt_key))
            context = Context(self.state, wall_clock=lambda: NOW, monotonic=lambda: 1000.0, fatal=self._fatal)
            self.context = context
            self.uploads = Uploads(
                context.engine, context.store, context.blobs, "north", context.receipt_key, wall_clock=lambda: NOW
            )
            self.calls = Calls(context.certificate_status)
            authenticator = Authenticator(context.certificate_status, context.enrolment, self.calls, self._fatal)
            public = self.receipt_key.public_key().public_bytes_raw()
            self.enrolment = EnrolmentServicer(authenticator, context.enrolment, context.authority, public)
            self.federation = FederationServicer(
                authenticator, context.engine, self.uploads, context.store, context.blobs, context.instances
            )
            self.summaries = SummariesServicer(authenticator, context.store)
            self.administration = Administration(context, undecided=self.uploads.receptions.judging)
            self.initial = folder / "initial.safetensors"
            self.initial.write_bytes(tensor_file(0))
            self.pems = {site: self._join(site) for site in SITES}
            self.unused = self.invite("bravo")
            document = study_document()
            self.administration.studies.create(document, str(self.initial))
            study = self.study
            for site in SITES:
                ready = pb.DeclareRequest(study=STUDY, revision=1, digest=bytes.fromhex(study.digest), status=pb.READY)
                self.call("Declare", [ready.SerializeToString()], site)
            self.administration.studies.start(STUDY)
            self.administration.run({"command": "summary_create", "document": summary_request().document()}, print)
        self._database = sqlite3.connect(self.state.database, isolation_level=None)
        self._database.execute("PRAGMA wal_autocheckpoint=0")  # whoever else writes the main file ends the coordinator
        self.fatal: BaseException | None = None
        self.keep()

    def keep(self) -> None:
        """From here on ``restore`` goes back to what is now."""
        self._rows = self._snapshot()
        self._studies = dict(self.context.engine._studies)
        self._version = self._data_version()
        self._forget()

    def call(self, method: str, messages: list[bytes], site: str) -> list[Any]:
        """A site's call, and all that is answered."""
        context = FakeContext(self.pems[site])
        answer = getattr(self.federation, method)(iter(messages), context)
        answers = list(answer) if isinstance(answer, Iterator) else [answer]
        context.end()
        return answers

    @property
    def study(self) -> Any:
        return self.context.engine.find(STUDY)

    def invite(self, site: str) -> Invitation:
        return Invitation.decode(self.administration.invite(site, 3600).invitation)

    def enrol_request(self, invitation: Invitation, site: str) -> enrolment_pb2.EnrolRequest:
        with drawn(f"request of {site}"):
            request = certificates.signing_request(private_key(site))
        key = ledger_key(site)
        signed = b"wardround-enrol-v1\0" + invitation.id.encode() + b"\0" + hashlib.sha256(request).digest()
        return enrolment_pb2.EnrolRequest(
            invitation_id=invitation.id, agent_version=__version__, signing_request=request,
            ledger_key=key.public_key().public_bytes_raw(), proof=key.sign(signed),
        )  # fmt: skip

    def _join(self, site: str) -> bytes:
        invitation = self.invite(site)
        context = FakeContext(invitation.certificate.encode())
        request = self.enrol_request(invitation, site).SerializeToString()
        reply = self.enrolment.Enrol(iter([request]), context)
        context.end()
        return bytes(reply.certificate)

    def opening(self, site: str, upload: bytes, seed: int = 1, lines: int = 3, **fields: Any) -> pb.UploadOpen:
        """A valid opening of an upload in round 1."""
        manifest, _ = tensors(seed)
        page = self.page(site, lines)
        values: dict[str, Any] = {
            "upload_id": upload, "study": STUDY, "revision": 1, "digest": bytes.fromhex(self.study.digest), "round": 1,
            "attempt": 1, "manifest": manifest_message(manifest), "num_examples": 12, "num_validation": 5,
            "metrics": [pb.Metric(name="val_loss", value="0.5"), pb.Metric(name="accuracy", value="0.75")],
            "ledger": page.ledger, "new_line_hashes": page.new_line_hashes,
        }  # fmt: skip
        return pb.UploadOpen(**{**values, **fields})

    def page(self, site: str, lines: int) -> pb.LedgerPage:
        """The first lines of a site's ledger."""
        hashes = [line_hash(f"{site} {number}".encode()) for number in range(lines)]
        head = LedgerHead(hashlib.md5(site.encode()).hexdigest(), lines, receipts.head_after(EMPTY_HEAD, hashes))
        signed = pb.LedgerHead(
            ledger_id=head.ledger_id, lines=lines, head=bytes.fromhex(head.head),
            signature=head.sign(ledger_key(site)).signature,
        )  # fmt: skip
        return pb.LedgerPage(ledger=signed, new_line_hashes=hashes)

    def stream(self, site: str, upload: bytes, seed: int = 1) -> list[bytes]:
        """The messages of a whole upload."""
        manifest, payload = tensors(seed)
        half = len(payload) // 2
        messages = [
            pb.UploadRequest(open=self.opening(site, upload, seed)),
            pb.UploadRequest(chunk=tensors_pb2.Chunk(offset=0, data=payload[:half])),
            pb.UploadRequest(chunk=tensors_pb2.Chunk(offset=half, data=payload[half:])),
            pb.UploadRequest(commit=pb.UploadCommit(manifest_sha256=bytes.fromhex(manifest.digest()))),
        ]
        return [message.SerializeToString() for message in messages]

    def restore(self) -> None:
        """What it was before the case.

        Raises:
            Broken: the case would have ended the coordinator, or left a slot occupied.
        """
        engine, fatal = self.context.engine, self.fatal
        self.fatal = None
        taken = [f"{call.method} of {call.peer.name.id}" for call in self.calls.all()]
        arrivals = len(self.uploads.receptions)
        streams = len(engine._streams)
        self._forget()
        if self._data_version() != self._version or engine._studies != self._studies:
            self._database.execute("BEGIN IMMEDIATE")
            for table, rows in self._rows.items():
                self._database.execute(f"DELETE FROM {table}")
                if rows:
                    marks = ",".join("?" * len(rows[0]))
                    self._database.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
            self._database.execute("COMMIT")
            engine._studies = dict(self._studies)
            self.context.certificate_status.load()
            for path in (self.state.blobs / "uploads").iterdir():
                path.unlink()
            self._version = self._data_version()
        if fatal is not None:
            raise Broken(f"it would have ended the coordinator: {type(fatal).__name__}: {fatal}") from fatal
        if taken or arrivals or streams:
            raise Broken(f"a slot stays occupied: calls {taken}, arrivals {arrivals}, streams {streams}")

    def _forget(self) -> None:
        """What is in memory alone."""
        engine, uploads = self.context.engine, self.uploads
        self.calls._calls.clear()
        uploads.receptions._under_way.clear()
        uploads._idle._times.clear()
        uploads.ledgers._pages._times.clear()
        uploads.ledgers._turns.clear()
        engine._streams._of_sites.clear()
        engine._holding._said.clear()
        uploads.returned._taken._times.clear()
        engine._later.clear()
        engine._streams._followers.clear()

    def close(self) -> None:
        self.calls.close()
        self._database.close()
        self.context.close()

    def _fatal(self, error: BaseException) -> None:
        self.fatal = error

    def _data_version(self) -> int:
        return int(self._database.execute("PRAGMA data_version").fetchone()[0])

    def _snapshot(self) -> dict[str, list[tuple[Any, ...]]]:
        found = self._database.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        )
        return {name: self._database.execute(f"SELECT * FROM {name}").fetchall() for (name,) in found.fetchall()}


class FullLedger(Made):
    """A ledger with a line of every type. ``cites``: its first line names an older one that it continues."""

    def __init__(self, rounds: int = 2, *, tail: int = 0, cites: bool = False, again: bool = False) -> None:
        self._cites = cites
        super().__init__(15 + (3 + again) * rounds, tail=tail, again=again)

    def _line(self, kind: str, /, **fields: Any) -> None:
        if kind == "genesis" and self._cites:
            fields["continues"] = {"ledger_id": "ab" * 16, "lines": 9, "head": "cd" * 32}
        super()._line(kind, **fields)

    def _begin(self) -> None:
        super()._begin()
        by, place = {"name": "dpo", "uid": 1000}, {"study": "hearts", "revision": 1, "round": 1, "attempt": 1}
        held = {**place, "update": "ab" * 32}
        self._line("policy", event="seen", sha256="cd" * 32)
        self._line("declare", study="hearts", revision=1, standing="ready", round=0, attempt=0, code="")
        self._summary(by)
        self._line("blocked", what="metric x", rule="metrics.allow", **place)
        self._line("held", **held)
        self._line("released", by=by, **held)
        self._line("rejected", by=by, **{**held, "round": 2})
        self._line("recovered", torn_bytes=12)
        self._line("session", event="closed", peer="127.0.0.1:9000", bytes_up=64)
        self._line("consent", event="withdrawn", study="hearts", revision=1, study_digest="ab" * 32, by=by,
                   data_digest="ef" * 32, exposure="", network="small", weights_digest="01" * 32)  # fmt: skip
        self._line("left", by=by)

    def _summary(self, by: dict[str, Any]) -> None:
        told: dict[str, Any] = {
            "request": "icu-columns", "request_sha256": "ab" * 32, "destination": "spiffe://x/coordinator",
            "min_count": 10, "digits": 3, "rows": 120,
            "columns": [
                {"column": "age", "values": 110, "missing": 10, "unfit": 0, "mean": "60.2", "std": "11.6", "other": 0},
                {"column": "ward", "values": 120, "missing": 0, "unfit": 0, "other": 20,
                 "categories": [{"category": "icu", "rows": 60}, {"category": "surgical", "rows": 40}]},
            ],
        }  # fmt: skip
        self._line("summary", sources=["years", "ward"], by=by, summary_sha256=canonical.digest(told), **told)


class SiteFiles:
    """What lies in the state directory of site ``alpha``, as bytes by path, and the keys that it was made with."""

    def __init__(self) -> None:
        with drawn("site"):
            self.coordinator_key = private_key("authority")
            self.key, self.ledger_key = private_key("alpha"), ledger_key("alpha")
            self.receipt_key = ledger_key("receipts")
            self.authority = _authority("north", self.coordinator_key)
            name = certificates.Name("north", "site", "alpha")
            self.certificate = self.authority.leaf(name, self.key.public_key(), NOW, 7 * 86400)
            document = study_document()
            manifest, _ = tensors(0)
            digest = StudyFile.from_document(document).digest(manifest.digest())
            self.offer_message = pb.StudyOffer(
                study=STUDY, revision=1, digest=bytes.fromhex(digest), document=canonical.dumps(document),
                initial_model=manifest_message(manifest), state="running",
            )  # fmt: skip
            self.offer = offer_from(self.offer_message, "alpha")
        self.site = Site(
            "alpha", "north", "127.0.0.1:9000", self.receipt_key.public_key().public_bytes_raw().hex(),
            certificates.fingerprint(self.authority.certificate), int(NOW) + 86400,
        )  # fmt: skip
        self.consent = consent_to(self.offer)
        self.journal = Journal(
            STUDY, 1, self.offer.digest, 1, 1, "train", "uploading", "ab" * 32, "update-1.safetensors", "cd" * 32,
            self.consent.train_rows, self.consent.validation_rows, {"val_loss": "0.5"}, "ef" * 16,
        )  # fmt: skip
        self.request = study_request(self.offer, "spiffe://north/coordinator", 5, "")
        self.policy = text.draft(self.request, "alpha").encode()
        self.shown = self.consent.account

    def files(self) -> dict[str, bytes]:
        return {
            "identity/site.json": codec.to_bytes(self.site),
            f"offers/{STUDY}.json": codec.to_bytes(self.offer),
            f"consents/{STUDY}.json": codec.to_bytes(self.consent),
            f"journal/{STUDY}.json": codec.to_bytes(self.journal),
            f"previews/{STUDY}.json": codec.to_bytes(self.shown),
            f"consents/{STUDY}/0001-approved-1-{self.offer.digest[:16]}.json": codec.to_bytes(self.consent),
        }

    def write(self, root: Path) -> None:
        """All of it, with keys and certificates, as a joined site's directory."""
        pems = {
            "identity/key.pem": certificates.key_pem(self.key),
            "identity/ledger_key.pem": ledger_key_pem(self.ledger_key),
            "identity/certificate.pem": certificates.certificate_pem(self.certificate),
            "identity/authority.pem": self.authority.pem,
            "policy.toml": self.policy,
        }
        for name, data in {**self.files(), **pems}.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o600)
        for name in ("staging", "incoming", "outgoing", "ledger", "studies"):
            (root / name).mkdir(exist_ok=True)


def consent_to(offer: Offer) -> Consent:
    lines = {"study.rounds": "3", "reported.counts": "exact"}
    return Consent(
        study=offer.study, revision=offer.revision, study_digest=offer.digest, upload=offer.upload,
        metrics=offer.metrics, counts="exact",
        private=(PrivateTensor(name="private.weight", dtype="F32", shape=[8, 8], bytes=256, why="private"),),
        data=TrainedData("patients", "ab" * 32), rows=20, validation_rows=5,
        approved_by=Person("dpo", 1000), approved_at="2026-06-01T10:00:00.000Z", state=APPROVED,
        download=offer.upload, exposure="", personalized="", document=offer.document, attempts=ATTEMPTS,
        account=Shown("cd" * 32, offer.digest, 1, "2026-06-01T09:00:00.000Z", lines),
        files=FilesStatus(data="ab" * 32, weights=""),
    )  # fmt: skip


def _authority(federation: str, key: certificates.PrivateKey) -> Authority:
    import tempfile

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(certificates, "new_key", lambda: key):
        return Authority.create(Path(folder) / "authority", federation, NOW)


__all__ = [
    "NOW", "SPECS", "STUDY", "Aborted", "CoordinatorWorld", "FakeContext", "FullLedger", "SiteFiles", "consent_to",
    "described", "drawn", "ledger_key", "private_key", "study_document", "tensor_file", "tensors",
]  # fmt: skip
