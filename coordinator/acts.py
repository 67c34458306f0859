"""Which commands change something, so that the operator's journal has them: what each is about, and what it came to."""

import hashlib

from coordinator import requests
from coordinator.answers import Answer, InvitationMade, Revoked, SnapshotMade, StudyCreated, StudyRenewed
from coordinator.journal_records import Known
from coordinator.member_answers import RolledOver
from coordinator.study_answers import StudyStatus
from coordinator.summary_answers import SummaryCreated
from wardround.signing import canonical

READING = (
    requests.ListSites, requests.ShowAuthority, requests.CopyReceipts, requests.ListStudies, requests.ShowStatus,
    requests.ShowFits, requests.ShowReport, requests.FollowStudy, requests.ListSummaries, requests.ShowSummary,
    requests.CopyJournal,
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
    if isinstance(request, READING):
        return None
    return {"study": request.study} if isinstance(request, requests.StudyRequest) else {}


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
    return {}


def _name(document: object) -> str:
    """Of a study or a request, as it says; the command has not looked at it yet."""
    table = document.get("study", document) if isinstance(document, dict) else {}
    name = table.get("name", "") if isinstance(table, dict) else ""
    return name[:64] if isinstance(name, str) else ""
