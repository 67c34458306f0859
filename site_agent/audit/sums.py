"""The check of a round's sum away from the hospital: from its bundle, and the vectors in it or in a folder beside it.

From a bundle alone follows who was summed, that enough members signed this very set, what was opened, and which model
the hospital says came of it. That the model is what the vectors give takes the vectors.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from site_agent.audit.bundle import Bundle, continued, read_bundle, verify_bundle
from site_agent.audit.chain import Changed
from site_agent.audit.files import in_archive, within
from site_agent.audit.form import lines
from site_agent.audit.verify import CANNOT_VERIFY, TAMPERED, Shown
from site_agent.gateway.secure import terms
from site_agent.gateway.secure.checking import Checked, Sum, check, drawn, evidence_of
from site_agent.gateway.secure.kept import BASE, EVIDENCE, MODEL, KeptSum, KeptVectors, name_of
from site_agent.state import codec
from site_agent.state.consent import Consent
from wardround.errors import BadData, Unavailable, UsageProblem
from wardround.records.ledger.secure import AgreedEntry, SumCheckedEntry
from wardround.records.secure_messages import SumEvidence
from wardround.records.study import SITE_NAME
from wardround.tensors.files import TensorFile
from wardround.terminal import quoted

FOLDER = "sums"


@dataclass(frozen=True)
class SumShown:
    """What a bundle shows of a sum.

    Attributes:
        agreed: the hospital's own line. signed: how many members signed this set.
        checked: what the vectors gave; None without them.
        not_shown: in sentences, what cannot be checked from what is there.
    """

    agreed: AgreedEntry
    signed: int
    checked: Checked | None
    not_shown: tuple[str, ...]


def check_sum(path: Path, study: str, round_: int, blocks: int | None, vectors: Path | None = None) -> SumShown:
    """Check a round's sum with what is in a bundle.

    Args:
        blocks: how many to look at; None: all.
        vectors: a copy of what `audit sum --keep` kept, where it is not in the bundle.

    Raises:
        UsageProblem: the bundle's ledgers have no set of that round.
        Unavailable: it is no bundle, or a vector is cut.
        BadData: the bundle was changed, or lacks the approval or the evidence; a name in it is none of a site;
            something is not what its site signed.
        NotPermitted: what is shown is another set than the one that the ledger says.
    """
    verdict, code = verify_bundle(path)
    if code in (TAMPERED, CANNOT_VERIFY):
        error = BadData if code == TAMPERED else Unavailable
        raise error(f"{path} does not verify: {verdict.reason}", hint="`site-agent audit verify --bundle` says more")
    bundle = _read(path)
    agreed, noted = _lines(bundle, study, round_)
    consent, where = _approval(bundle, agreed)
    not_shown = [one for one in verdict.not_shown if where in one]
    with _unpacked(bundle, agreed) as inside:
        beside = KeptSum(vectors) if vectors is not None else inside
        if vectors is not None and not beside.has_vectors():
            raise UsageProblem(f"there are no vectors in {vectors}", hint="the folder that `audit sum --keep` names")
        shown = inside.evidence() or beside.evidence()
        if shown is None:
            raise BadData(
                f"{path} holds nothing that the sum of round {round_} of `{study}` can be checked with",
                hint=f"at the hospital, before round {round_ + 2} begins: `site-agent audit sum {study} --round "
                f"{round_} --keep`; then a new bundle",
            )
        sum_ = terms.sum_of(consent, agreed, beside.model(BASE), beside.model(MODEL))
        signed = _signatures(sum_, shown)
        if noted is None:
            not_shown.append("that the hospital compared this sum with its model: its ledger has no such line")
        elif noted.model != shown.model and sum_.averages:
            raise BadData(f"the hospital's ledger names another model of round {round_} than the evidence does")
        if not beside.has_vectors():
            not_shown.append(
                "that the model is what the updates give: the masked vectors are not in the bundle; `--vectors DIR`, "
                f"a copy of the hospital's `{FOLDER}/{name_of(study, agreed.revision, round_)}`"
            )
            return SumShown(agreed, signed, None, tuple(not_shown))
        sum_ = _of_these_models(sum_, shown, not_shown)
        found = check(sum_, shown, KeptVectors(beside, sum_.layout), drawn(sum_.layout, blocks))
        if left := found.of - len(found.looked_at):
            not_shown.append(f"anything of the {left} blocks that were not drawn: `--blocks all` looks at them")
        return SumShown(agreed, signed, found, tuple(not_shown))


def _read(path: Path) -> Bundle:
    try:
        return read_bundle(path)
    except Changed as error:
        raise BadData(f"{path} was changed while it was read: {error.reason}") from None


def _lines(bundle: Bundle, study: str, round_: int) -> tuple[AgreedEntry, SumCheckedEntry | None]:
    """What the ledgers say of the sum, of the newest revision that has one."""
    newest = in_archive("ledger", bundle.files)
    assert newest is not None
    entries = [line.entry for one in (*continued(Shown(newest, within(bundle.files))), newest) for line in lines(one)]
    sets = [one for one in entries if isinstance(one, AgreedEntry) and (one.study, one.round) == (study, round_)]
    if not sets:
        raise UsageProblem(
            f"the ledger in the bundle has no set of round {round_} of `{study}`",
            hint="`site-agent audit report`, or report.html in the bundle, lists every sum",
        )
    agreed = max(sets, key=lambda one: one.revision)
    for site in agreed.sites:  # files have their names
        if not SITE_NAME.fullmatch(site):
            raise BadData(f"the ledger names a site that is none: {quoted(site, 80)}")
    checked = [one for one in entries if isinstance(one, SumCheckedEntry) and one.chosen == agreed.chosen]
    return agreed, checked[-1] if checked else None


def _approval(bundle: Bundle, agreed: AgreedEntry) -> tuple[Consent, str]:
    """The approval of exactly this study, and its path."""
    for path, data in bundle.files.items():
        if path.startswith("consents/") and path.endswith(".json"):
            try:
                consent = codec.from_bytes(Consent, data)
            except (BadData, ValueError):
                continue  # of another release, or none: the one that is wanted is still looked for
            if consent.study_digest == agreed.study_sha256:
                return consent, path
    raise BadData(f"the bundle has no approval of revision {agreed.revision} of `{agreed.study}`, whose sum this is")


@contextmanager
def _unpacked(bundle: Bundle, agreed: AgreedEntry) -> Iterator[KeptSum]:
    """The sum's files in the bundle, in a folder that is gone afterwards."""
    with TemporaryDirectory() as place:
        for name, data in _files(bundle, agreed).items():
            (Path(place) / name).write_bytes(data)
        yield KeptSum(Path(place))


def _files(bundle: Bundle, agreed: AgreedEntry) -> Mapping[str, bytes]:
    """By their names, which are plain ones of ours."""
    folder = f"{FOLDER}/{name_of(agreed.study, agreed.revision, agreed.round)}/"
    found = {path.removeprefix(folder): data for path, data in bundle.files.items() if path.startswith(folder)}
    plain = {EVIDENCE, BASE, MODEL, *(f"{site}.vector" for site in agreed.sites)}
    return {name: data for name, data in found.items() if name in plain}


def _signatures(sum_: Sum, shown: SumEvidence) -> int:
    """How many members signed the set; what was opened is what its sites had signed."""
    evidence = evidence_of(sum_, shown)
    evidence.refuse_other_secrets()
    return len(shown.agreements)


def _of_these_models(sum_: Sum, shown: SumEvidence, not_shown: list[str]) -> Sum:
    """With the models, if they are those that the round's digests name."""
    if not sum_.averages:
        not_shown.append("that the model follows from the sum: its study's coordinator keeps more than the mean")
        return sum_
    for path, digest, what in ((sum_.base, shown.base, "began with"), (sum_.model, shown.model, "made")):
        if path is None:
            not_shown.append(f"that the model is what the updates give: the one that the round {what} is not there")
            return replace(sum_, averages=False)
        with TensorFile(path) as file:
            if file.manifest().digest() != digest:
                raise BadData(f"{path.name} is not the model that the round {what}")
    return sum_
