"""Which commands change something, so that the operator's journal has them: what each is about, and what it came to."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from coordinator import requests
from coordinator.answers import Answer, InvitationMade, Revoked, SnapshotMade, StudyCreated, StudyRenewed
from coordinator.context import Context
from coordinator.journal_records import Known, SecondPersonApplied
from coordinator.member_answers import RolledOver
from coordinator.second_person import Terms
from coordinator.storage import tables
from coordinator.study_answers import StudyStatus
from coordinator.summary_answers import SummaryCreated
from wardround.signing import canonical
from wardround.tensors.files import TensorFile

READING = (
    requests.ListSites, requests.ShowAuthority, requests.CopyReceipts, requests.ListStudies, requests.ShowStatus,
    requests.ShowFits, requests.ShowReport, requests.FollowStudy, requests.ListSummaries, requests.ShowSummary,
    requests.CopyJournal, requests.ListWaiting, requests.WatchAll,
)  # fmt: skip


def about(request: requests.Request) -> dict[str, Known] | None:
    """What a command is about, in names, numbers and digests; None of one that only reads."""
    match request:
        case requests.Invite(site=site, expires_s=expires_s):
            return {"site": site, "expires_s": min(expires_s, canonical.MAX_INTEGER)}
        case requests.Revoke(site=site):
            return {"site": site}
        case requests.RollOver(site=site, ledger=ledger):
            return {"site": site, "ledger": ledger}
        case requests.CreateStudy(document=document) | requests.CreateSummary(document=document):
            text = canonical.dumps(canonical.with_text_floats(document))
            return {"name": _name(document), "document_sha256": hashlib.sha256(text).hexdigest()}
        case requests.EditStudy(study=study, document=document):
            text = canonical.dumps(canonical.with_text_floats(document))
            return {"study": study, "document_sha256": hashlib.sha256(text).hexdigest()}
        case requests.InstallIntermediate(bundle=bundle):
            return {"bundle_sha256": hashlib.sha256(bundle.encode()).hexdigest()}
        case requests.RetireRoot(anyway=anyway):
            return {"anyway": anyway}
        case requests.CloseSummary(name=name):
            return {"name": name}
        case requests.NoteModelExport(study=study, round=made_by, model_digest=digest, site=site):
            return {"study": study, "round": made_by, "model_digest": digest, "of_site": site}
        case requests.TakeBack(number=number):
            return {"proposal": number}
    if isinstance(request, READING):
        return None
    return {"study": request.study} if isinstance(request, requests.StudyRequest) else {}


def bound(request: requests.Request, context: Context, revision: Callable[[str], int]) -> dict[str, Known]:
    """What two people must agree in beside ``about``: the tensors that lie in files, and what the command meets now.

    Args:
        revision: of a study that is here. It raises BadData for any other.

    Raises:
        BadData: there is no such study; or the tensors cannot be read.
    """
    known: dict[str, Known] = {}
    if isinstance(request, requests.StudyRequest):
        known["revision"] = revision(request.study)
    if isinstance(request, requests.EditStudy):
        known["all_rounds"] = request.rounds
    if isinstance(request, requests.CreateStudy | requests.EditStudy) and request.initial is not None:
        with TensorFile(Path(request.initial)) as tensors:
            known["initial_digest"] = tensors.manifest().digest()
    if isinstance(request, requests.Invite | requests.Revoke):
        with context.store.read() as session:
            row = session.get(tables.Site, request.site)
        known["enrolled"] = row is not None and row.revoked_s is None
    if isinstance(request, requests.ApplySecondPerson):
        known |= Terms.of(context.config.second_person).known()
    return known


def came_to(answer: Answer) -> dict[str, Known]:
    """What an answer says of what was done. An invitation is a secret, and not in it."""
    match answer:
        case InvitationMade(expires=expires, replaces=replaces):
            return {"expires": expires, "replaces": replaces}
        case Revoked(was_enrolled=was_enrolled):
            return {"was_enrolled": was_enrolled}
        case RolledOver(before=before):
            return {"before": before}
        case StudyCreated() | StudyRenewed():
            known: dict[str, Known] = {"revision": answer.revision, "study_digest": answer.study_digest}
            return known | ({"new": answer.new} if isinstance(answer, StudyCreated) else {"model": answer.model})
        case StudyStatus(state=state, revision=revision):
            return {"state": state, "revision": revision}
        case SnapshotMade(models=models, uploads=uploads):
            return {"models": len(models), "uploads": len(uploads)}
        case SummaryCreated(digest=digest, new=new):
            return {"digest": digest, "new": new}
        case SecondPersonApplied(needed_for=needed_for, lapse_s=lapse_s):
            return Terms(frozenset(needed_for), lapse_s).known()
    return {}


def _name(document: object) -> str:
    """Of a study or a request, as it says; the command has not looked at it yet."""
    table = document.get("study", document) if isinstance(document, dict) else {}
    name = table.get("name", "") if isinstance(table, dict) else ""
    return name[:64] if isinstance(name, str) else ""
