"""What the commands do: in the running service, or in the command itself when none runs. The same either way."""

import datetime
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from coordinator.members.certificate_status import Standing
from coordinator.members.enrolment import Authority, Enrolment
from coordinator.models import public_data as public_data_sets
from coordinator.models.aggregation import begin
from coordinator.models.kept import add_model
from coordinator.state_directory import State
from coordinator.storage import tables
from coordinator.storage.blobs import Blobs
from coordinator.storage.database import Store
from coordinator.studies import report
from coordinator.studies.engine import Engine
from coordinator.studies.lifecycle import Start, Stop
from coordinator.studies.state import ENDED, Phase
from coordinator.studies.study import Study, new_study
from coordinator.updates.admission import values_refusal
from coordinator.updates.ledgers import newest_head
from coordinator.updates.receipts import copy_of
from wardround import rpc
from wardround.errors import BadData, NeedsPerson, Unavailable, UsageProblem, WardroundError
from wardround.local.control import Reply, wanted
from wardround.records.study import StudyFile
from wardround.signing.dsse import fingerprint
from wardround.tensors.manifests import TensorFile

LEDGER_ID = re.compile(r"[0-9a-f]{32}")
MAX_MANIFEST = rpc.MAX_STRUCTURED - 128 * 1024  # beside it an opening has a ledger's lines and metrics
FIELDS: dict[str, dict[str, type]] = {  # of a request, where it is not {study}
    "invite": {"site": str, "expires_s": int}, "sites": {}, "revoke": {"site": str},
    "create": {"document": dict, "initial": str}, "reopen": {"site": str, "ledger": str},
}  # fmt: skip
RUNS = (Phase.WAITING, Phase.RUNNING, Phase.PAUSED)


class Parts:
    """A state directory, opened: what both the service and a command without one stand on."""

    def __init__(
        self,
        state: State,
        *,
        clock: Callable[[], float],
        ticks: Callable[[], float],
        fatal: Callable[[BaseException], None],
    ) -> None:
        """The caller holds the directory's lock.

        Raises:
            NeedsPerson: no coordinator here, or its database is damaged or of another version.
            BadData: its keys or configuration are not as they should be.
        """
        self.config = state.config()
        self.state = state
        self.clock = clock
        self.authority = Authority.load(state.authority, self.config.federation)
        self.receipt_key = state.receipt_key()
        self.store = Store(state.database)
        try:
            self.store.refuse_other_schema()
            self.store.settle()
            self.blobs = Blobs(state.blobs)
            self.standing = Standing(self.store, self.config.federation, clock)
            self.standing.load()
            self.enrolment = Enrolment(self.store, self.authority, self.standing, self.config.address)
            self.engine = Engine(self.store, self.blobs, fatal=fatal, wall_clock=clock, monotonic=ticks)
        except BaseException:
            self.store.close()
            raise

    def close(self) -> None:
        self.store.close()


class Operations:
    """The commands by name. Each takes plain JSON and returns plain JSON.

    Args:
        after_revoke: ends the live calls of a revoked site; nothing to end without a service.
        judging: (study, site) of the updates that are here and not yet decided.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        after_revoke: Callable[[str], None] = lambda site: None,
        judging: Callable[[], frozenset[tuple[str, str]]] = frozenset,
    ) -> None:
        self._parts = parts
        self._engine = parts.engine
        self._store = parts.store
        self._after_revoke = after_revoke
        self._judging = judging
        self._commands: dict[str, Callable[..., Any]] = {
            "invite": self.invite, "sites": self.sites, "revoke": self.revoke, "create": self.create,
            "start": self.start, "stop": self.stop, "status": self.status, "report": self.report,
            "reopen": self.reopen,
        }  # fmt: skip

    def run(self, request: dict[str, Any], progress: Reply) -> Any:
        """One command of a control connection.

        Raises:
            UsageProblem: it is not known here, or not of its form.
        """
        fields = dict(request)
        name = str(fields.pop("command", ""))
        if name == "follow":
            (followed,) = wanted(fields, study=str)
            return self.follow(followed, progress)
        if name == "receipts":
            (site,) = wanted(fields, site=str)
            return self.receipts(site, progress)
        if name not in self._commands:
            raise UsageProblem(
                f"the running service knows no command `{name[:40]}`",
                hint="the service and the command are of different versions: restart the service",
            )
        wanted(fields, **FIELDS.get(name, {"study": str}))
        if name == "create" and fields.get("public_data") is not None:
            wanted(fields, public_data=str)
        if unknown := fields.keys() - {*FIELDS.get(name, ("study",)), *(("public_data",) if name == "create" else ())}:
            raise UsageProblem(f"the command `{name}` takes no `{min(unknown)[:40]}`")
        return self._commands[name](**fields)

    def invite(self, site: str, expires_s: int) -> dict[str, Any]:
        with self._store.read() as session:
            present = session.get(tables.Site, site)
        invitation = self._parts.enrolment.invite(site, expires_s)
        replaces = present is not None and present.revoked_s is None
        return {"invitation": invitation.encode(), "expires": _utc(invitation.expires_s), "replaces": replaces}

    def sites(self) -> dict[str, Any]:
        """Every site in one word: invited, enrolled, connected, ready or revoked. With the fingerprints of the keys
        that an auditor compares: each site's ledger key, and the one that signs receipts; and since when two hold a
        site's keys.
        """
        connected = self._engine.connected()
        ready = {
            site for study in self._engine.studies() if study.state.phase not in ENDED for site in study.state.ready
        }
        with self._store.read() as session:
            enrolled = {row.name: row for row in session.scalars(sa.select(tables.Site))}
            ends: dict[str, int] = {}
            for certificate in session.scalars(sa.select(tables.Certificate)):
                ends[certificate.site] = max(ends.get(certificate.site, 0), certificate.not_after_s)
            unused = sa.and_(tables.Invitation.withdrawn.is_(False), tables.Invitation.used_s.is_(None))
            invited = set(session.scalars(sa.select(tables.Invitation.site).where(unused))) - enrolled.keys()
        nothing = {"certificate_expires": None, "last_seen": None, "two_lines_since": None, "ledger_key": None}
        rows = [{"site": site, "state": "invited", **nothing} for site in invited]
        for site, row in enrolled.items():
            state = "enrolled"
            if row.revoked_s is not None:
                state = "revoked"
            elif site in connected:
                state = "ready" if site in ready else "connected"
            seen = row.last_seen_s
            rows.append(
                {
                    "site": site, "state": state, "certificate_expires": _utc(ends[site]) if site in ends else None,
                    "last_seen": _utc(seen) if seen is not None else None,
                    "two_lines_since": _utc(row.two_lines_s) if row.two_lines_s is not None else None,
                    "ledger_key": fingerprint(bytes.fromhex(row.ledger_key)),
                }
            )  # fmt: skip
        key = fingerprint(self._parts.receipt_key.public_key().public_bytes_raw())
        return {"sites": sorted(rows, key=lambda row: str(row["site"])), "receipt_key": key}

    def revoke(self, site: str) -> dict[str, Any]:
        fresh = self._parts.enrolment.revoke(site)
        self._engine.revoked(site)
        self._after_revoke(site)
        return {"site": site, "was_in_good_standing": fresh}

    def receipts(self, site: str, progress: Reply) -> dict[str, Any]:
        """Every receipt of a site's present enrolment, one ``progress`` each, and last the signed statement about them.

        Raises:
            BadData: no such site has ever enrolled.
        """
        with self._store.read() as session:
            self._enrolled(session, site)
        parts, count = self._parts, 0
        for envelope in copy_of(self._store, site, parts.config.federation, parts.receipt_key, parts.clock()):
            progress(envelope.document())
            count += 1
        return {"site": site, "receipts": count - 1}

    def reopen(self, site: str, ledger: str) -> dict[str, Any]:
        """Take a site's new ledger for the one before it, as its operator and ours agreed.

        From now on uploads must come with ledger ``ledger``; with the old one they are refused LEDGER_FORK.

        Raises:
            BadData: no such site, no id of a ledger, or one that was seen before: there is no way back to it.
        """
        if not LEDGER_ID.fullmatch(ledger):
            raise BadData(
                f"{ledger[:64]!r} is not a ledger's id: 32 hex digits", hint="`site-agent audit reopen` prints it"
            )
        with self._store.write() as session:
            row = self._enrolled(session, site)
            if newest_head(session, site, ledger) is not None:
                raise BadData(
                    f"ledger {ledger[:12]}… of site `{site}` was seen before: a site cannot go back to it",
                    hint="the site makes a new one: `site-agent audit reopen`",
                )
            before, row.ledger_id = row.ledger_id, ledger
        return {"site": site, "ledger": ledger, "before": before}

    def _enrolled(self, session: Session, site: str) -> tables.Site:
        row = session.get(tables.Site, site)
        if row is None:
            known = ", ".join(sorted(session.scalars(sa.select(tables.Site.name)))) or "none yet"
            raise BadData(f"no site `{site[:64]}` has enrolled here", hint=f"sites here: {known}")
        return row

    def create(self, document: Any, initial: str, public_data: str | None = None) -> dict[str, Any]:
        """Make a resolved study known to its sites.

        Args:
            initial: path of the initial shared tensors, a safetensors file.
            public_data: path of the public data set, where the coordinator distills on it.

        Raises:
            NeedsPerson: a study of that name runs.
            BadData: the document is no study, the tensors are not finite float32, or what distilling needs is missing.
        """
        file = StudyFile.from_document(document)
        public_data_sets.prepare(file, self._parts.blobs, None if public_data is None else Path(public_data))
        with TensorFile(Path(initial)) as tensors:
            _refuse_unusable(tensors)
            digest = file.digest(tensors.manifest().digest())
            if (why := self._engine.unreadable().get(file.study.name)) is not None:
                raise _unreadable(file.study.name, why)
            present = self._engine.find(file.study.name)
            if present and present.digest == digest:
                return self._created(present, new=False)
            if present and present.state.phase in RUNS:
                raise NeedsPerson(
                    f"study `{present.name}` is {present.state.phase}, and this is another revision of it",
                    hint=f"`coordinator study stop {present.name}` first; the sites must approve the new revision",
                )
            manifest = self._parts.blobs.keep_model(tensors, f"initial-{file.study.name}-{os.getpid()}")
        now = int(self._parts.clock())
        study = new_study(file, manifest, present.revision + 1 if present else 1, now)
        kept = begin(self._parts.blobs, study.aggregator, manifest, f"kept-{study.name}-{os.getpid()}")
        study = replace(study, newest=kept.digest())

        def write(session: Session) -> None:
            for model in (manifest, kept):
                add_model(session, model, now)

        self._engine.add(study, write)
        return self._created(study, new=True)

    def _created(self, study: Study, *, new: bool) -> dict[str, Any]:
        with self._store.read() as session:
            known = set(session.scalars(sa.select(tables.Site.name).where(tables.Site.revoked_s.is_(None))))
        return {
            "id": study.name, "revision": study.revision, "study_digest": study.digest,
            "initial_digest": study.initial, "bytes_per_round": study.bytes_per_update, "new": new,
            "not_enrolled": [site for site in study.rules.sites if site not in known],
        }  # fmt: skip

    def start(self, study: str) -> dict[str, Any]:
        found = self._study(study)
        if found.state.phase in ENDED:
            raise NeedsPerson(
                f"study `{study}` is {found.state.phase}: it cannot be started again",
                hint="change the study file (a title is enough) and create it as a new revision",
            )
        if found.state.phase in (Phase.CREATED, Phase.PAUSED):
            self._engine.happened(study, Start())
        return self.status(study)

    def stop(self, study: str) -> dict[str, Any]:
        if self._study(study).state.phase not in ENDED:
            self._engine.happened(study, Stop())
        return self.status(study)

    def status(self, study: str) -> dict[str, Any]:
        found, held = self._study(study), self._engine.holding(study)
        with self._store.read() as session:
            return report.status(found, session, self._busy(study), held)

    def report(self, study: str) -> dict[str, Any]:
        found, held = self._study(study), self._engine.holding(study)
        with self._store.read() as session:
            return report.full(found, session, self._busy(study), self._parts.config.federation, held)

    def follow(self, study: str, progress: Reply) -> dict[str, Any]:
        """The status now and after each change, until the study has ended or paused.

        Raises:
            Unavailable: the service goes down before.
        """
        self._study(study)
        changes = self._engine.follow(study)
        try:
            while True:
                status = self.status(study)
                progress(status)
                if status["state"] in (*ENDED, Phase.PAUSED):
                    return status
                if not changes.get():
                    raise Unavailable(
                        "the service goes down, and the study goes on when it is back",
                        hint=f"then: `coordinator study status {study} --follow`",
                    )
        finally:
            self._engine.unfollow(changes)

    def _study(self, name: str) -> Study:
        found = self._engine.find(name)
        if found is None and (why := self._engine.unreadable().get(name)) is not None:
            raise _unreadable(name, why)
        if found is None:
            known = ", ".join(study.name for study in self._engine.studies()) or "none yet"
            raise BadData(f"there is no study `{name[:64]}` here", hint=f"studies here: {known}")
        return found

    def _busy(self, study: str) -> frozenset[str]:
        return frozenset(site for name, site in self._judging() if name == study)


def ends_here(error: BaseException) -> None:
    """``fatal`` for a command without a service: its own error, to be said and to end it."""
    raise error if isinstance(error, WardroundError) else RuntimeError("the engine failed") from error


def _unreadable(study: str, why: str) -> NeedsPerson:
    return NeedsPerson(
        f"what is kept here of study `{study}` is damaged: {why}",
        hint="the other studies go on; restore the state directory from a backup, or give the new study another name",
    )


def _refuse_unusable(tensors: TensorFile) -> None:
    if not tensors.specs:
        raise BadData(f"{tensors.path} holds no tensors: nothing would be shared")
    for spec in tensors.specs:
        if spec.dtype != "F32":
            raise BadData(f"{tensors.path}: `{spec.key}` is {spec.dtype}, shared tensors are F32")
    if rpc.manifest_most_bytes(tensors.specs) > MAX_MANIFEST:
        raise BadData(
            f"{tensors.path}: the names and shapes of {len(tensors.specs)} tensors do not fit into a message",
            hint=f"a study shares tensors whose manifest has at most {MAX_MANIFEST} bytes: shorter names, or fewer",
        )
    if refusal := values_refusal(tensors, None):
        raise BadData(f"{tensors.path}: `{refusal.tensor}` is not finite")


def _utc(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
