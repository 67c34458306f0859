"""May this update count? One table row a refusal, and the slow obvious versions beside the quick ones."""

import uuid
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.numpy import save_file

from coordinator.studies.state import Answer, Kind, Phase, Round, StudyState
from coordinator.studies.study import Study, new_study
from coordinator.studies.terms import UpdateTerms
from coordinator.updates import admission
from coordinator.updates.admission import ADMITTED, Admitted, Refusal
from coordinator.updates.receive import Received
from fl_algorithms.server.aggregator import BLOCK
from fl_algorithms.study import ResolvedStudy
from tests.coordinator.conftest import study_document
from tests.coordinator.fake_site import Ledger
from wardround.records.encoding import EncodingSection
from wardround.records.receipts import LedgerHead
from wardround.records.study import StudyFile
from wardround.records.update import LedgerStatement, UploadHeader
from wardround.tensors import codecs
from wardround.tensors.encodings import Encoding
from wardround.tensors.files import TensorFile, file_header
from wardround.tensors.manifests import Entry, Manifest, TensorSpec

SHARED = (TensorSpec("bias", "F32", (2,)), TensorSpec("weight", "F32", (2, 3)))
SITES = ("alpha", "bravo", "charlie")
OPEN = StudyState(Phase.RUNNING, models=1, ready=frozenset(SITES), round=Round(2, 1, ("alpha", "bravo"), {}, 0.0))
DOCUMENT = study_document()
RANGES = {"val_loss": ["0.0", "1000000.0"], "accuracy": ["0.0", "1.0"]}
DOCUMENT["reported"] = {"metrics": ["val_loss", "accuracy"], "digits": 4, "counts": "exact", "ranges": RANGES}


def manifest(specs: tuple[TensorSpec, ...] = SHARED) -> Manifest:
    return Manifest(tuple(Entry(spec, "0" * 64) for spec in specs))


FILE = ResolvedStudy(StudyFile.from_document(DOCUMENT))
STUDY = replace(new_study(FILE, manifest(), 1, 0), digest="d" * 64, state=OPEN)
HEADER = UploadHeader(
    upload_id="u", study="trial", revision=1, digest="d" * 64, round=2, attempt=1, manifest=manifest(),
    metrics=(("val_loss", "0.1234"),), num_examples=10, num_validation=3,
    ledger=LedgerStatement(LedgerHead("l", 0, "0" * 64), b"", ()),
)  # fmt: skip


OTHER = Answer(Kind.ACCEPTED, "", "v")


def in_state(**changes: Any) -> Study:
    return replace(STUDY, state=replace(OPEN, **changes))


def with_answer(answer: Answer) -> Study:
    assert OPEN.round
    return replace(STUDY, state=replace(OPEN, round=replace(OPEN.round, answers={"alpha": answer})))


def test_an_update_that_is_expected_counts() -> None:
    assert admission.state_refusal("alpha", HEADER, STUDY) is None
    assert admission.declaration_refusal("alpha", HEADER, STUDY) is None
    assert admission.admit_header("alpha", HEADER, STUDY, None, None) == ADMITTED


@pytest.mark.parametrize(
    ("header", "study", "ledger", "code"),
    [
        pytest.param(replace(HEADER, round=3), STUDY, "LEDGER_FORK", "ROUND_NOT_ASKED", id="round, then ledger"),
        pytest.param(
            replace(HEADER, num_examples=0), STUDY, "LEDGER_FORK", "COUNT_INVALID", id="a count, then the ledger"
        ),
        pytest.param(HEADER, STUDY, "LEDGER_FORK", "LEDGER_FORK", id="the ledger last"),
        pytest.param(HEADER, None, "LEDGER_FORK", "STUDY_UNKNOWN", id="no study"),
    ],
)
def test_of_several_refusals_of_a_header_the_first_is_named(
    header: UploadHeader, study: Study | None, ledger: str, code: str
) -> None:
    assert admission.admit_header("alpha", header, study, None, Refusal(ledger)) == Refusal(code)


@pytest.mark.parametrize(
    ("site", "header", "study", "code"),
    [
        pytest.param("alpha", HEADER, None, "STUDY_UNKNOWN", id="no such study"),
        pytest.param("mallory", HEADER, STUDY, "STUDY_UNKNOWN", id="a site that is not in it"),
        pytest.param("alpha", replace(HEADER, revision=2), STUDY, "REVISION_CHANGED", id="another revision"),
        pytest.param("alpha", replace(HEADER, digest="e" * 64), STUDY, "REVISION_CHANGED", id="another digest"),
        pytest.param("alpha", HEADER, in_state(phase=Phase.PAUSED), "STUDY_NOT_RUNNING", id="paused"),
        pytest.param("alpha", replace(HEADER, round=1), STUDY, "ROUND_CLOSED", id="the round before"),
        pytest.param("alpha", replace(HEADER, round=0), STUDY, "ROUND_CLOSED", id="round nought"),
        pytest.param("alpha", replace(HEADER, attempt=0), STUDY, "ROUND_CLOSED", id="the attempt before"),
        pytest.param(
            "alpha",
            HEADER,
            in_state(aggregating=True),
            "ROUND_CLOSED",
            id="being aggregated",
        ),
        pytest.param("alpha", replace(HEADER, round=3), STUDY, "ROUND_NOT_ASKED", id="the round after"),
        pytest.param("alpha", replace(HEADER, attempt=2), STUDY, "ROUND_NOT_ASKED", id="an attempt that was not made"),
        pytest.param("charlie", HEADER, STUDY, "ROUND_NOT_ASKED", id="a site that was not asked"),
        pytest.param("alpha", HEADER, with_answer(Answer(Kind.WITHDRAWN)), "ROUND_NOT_ASKED", id="withdrawn"),
        pytest.param("alpha", HEADER, with_answer(OTHER), "UPLOAD_DUPLICATE", id="another was accepted"),
    ],
)
def test_an_update_that_is_not_expected_is_refused_by_name(
    site: str, header: UploadHeader, study: Study | None, code: str
) -> None:
    assert admission.state_refusal(site, header, study) == Refusal(code)


@pytest.mark.parametrize("kind", [Kind.REFUSED, Kind.DECLINED])
def test_a_site_that_was_refused_or_declined_may_still_send_a_good_update_while_the_round_is_open(kind: Kind) -> None:
    assert admission.state_refusal("alpha", HEADER, with_answer(Answer(kind, "TENSOR_NOT_FINITE", "v"))) is None


def test_of_unlike_networks_a_site_sends_its_own_alone() -> None:
    """Alpha trains [model], bravo [networks.wide]: what would be right of the other is refused."""
    named = {"name": "mlp"}
    file = StudyFile.from_document({**DOCUMENT, "networks": {"wide": named}, "assigned": {"bravo": "wide"}})
    wide = TensorSpec("weight", "F32", (5, 3))
    shared = (*SHARED, replace(wide, bundle="network_0"))
    study = replace(STUDY, resolved=ResolvedStudy(file), manifest=manifest(shared))
    of_bravo = replace(HEADER, manifest=manifest((wide,)))
    assert admission.declaration_refusal("alpha", HEADER, study) is None
    assert admission.declaration_refusal("bravo", of_bravo, study) is None
    for site, header, refusal in (
        ("alpha", of_bravo, Refusal("MANIFEST_NAMES")),
        ("bravo", HEADER, Refusal("MANIFEST_NAMES", "bias")),
        (
            "bravo",
            replace(HEADER, manifest=manifest((replace(wide, shape=(2, 3)),))),
            Refusal("MANIFEST_SHAPE", "weight"),
        ),
        ("bravo", replace(HEADER, manifest=manifest(shared)), Refusal("MANIFEST_NAMES", "bias")),
    ):
        assert admission.declaration_refusal(site, header, study) == refusal


BIAS, WEIGHT = SHARED


@pytest.mark.parametrize(
    ("specs", "refusal"),
    [
        pytest.param((BIAS,), Refusal("MANIFEST_NAMES"), id="one missing"),
        pytest.param(
            (*SHARED, TensorSpec("head", "F32", (1,))), Refusal("MANIFEST_NAMES", "head"), id="a private one too"
        ),
        pytest.param((WEIGHT, BIAS), Refusal("MANIFEST_NAMES"), id="reordered"),
        pytest.param((BIAS, replace(WEIGHT, bundle="soup")), Refusal("MANIFEST_NAMES", "soup/weight"), id="bundle"),
        pytest.param((BIAS, replace(WEIGHT, shape=(3, 2))), Refusal("MANIFEST_SHAPE", "weight"), id="shape"),
        pytest.param((BIAS, replace(WEIGHT, shape=(0,))), Refusal("MANIFEST_SHAPE", "weight"), id="empty"),
        pytest.param((replace(BIAS, dtype="F64"), WEIGHT), Refusal("MANIFEST_DTYPE", "bias"), id="dtype"),
        pytest.param((), Refusal("MANIFEST_NAMES"), id="nothing"),
    ],
)
def test_exactly_the_shared_tensors_are_taken(specs: tuple[TensorSpec, ...], refusal: Refusal) -> None:
    assert admission.declaration_refusal("alpha", replace(HEADER, manifest=manifest(specs)), STUDY) == refusal


def test_a_closing_validation_takes_no_tensors() -> None:
    assert OPEN.round
    closing = replace(STUDY, state=replace(OPEN, round=replace(OPEN.round, closing=True)))
    assert admission.declaration_refusal("alpha", replace(HEADER, manifest=Manifest(())), closing) is None
    assert admission.declaration_refusal("alpha", HEADER, closing) == Refusal("MANIFEST_NAMES", "bias")


@pytest.mark.parametrize("value", ["0.1234", "null", "12", "1.234e-05", "1e+06", "0"])
def test_a_number_as_the_study_tells_it_is_taken(value: str) -> None:
    assert admission.declaration_refusal("alpha", replace(HEADER, metrics=(("val_loss", value),)), STUDY) is None


@pytest.mark.parametrize(
    "metrics",
    [
        pytest.param((("val_loss", "0.12345"),), id="a digit too many"),
        pytest.param((("val_loss", "0.10"),), id="another form"),
        pytest.param((("val_loss", "nan"),), id="nan"),
        pytest.param((("val_loss", "inf"),), id="infinity"),
        pytest.param((("val_loss", "1e999"),), id="beyond a float"),
        pytest.param((("val_loss", "0,5"),), id="comma"),
        pytest.param((("val_loss", "０.5"),), id="digits of another script"),
        pytest.param((("val_loss", " 0.5"),), id="space"),
        pytest.param((("val_loss", "0.5"), ("val_loss", "0.5")), id="twice"),
        pytest.param((("patients", "3"),), id="undeclared"),
        pytest.param((("val_loss", "-0.5"),), id="a loss below its range"),
        pytest.param((("val_loss", "1.001e+06"),), id="a loss above its range"),
        pytest.param((("accuracy", "1.001"),), id="more than all are right"),
        pytest.param((("val_loss", "1e+308"),), id="what no mean could hold"),
    ],
)
def test_numbers_that_were_not_declared_are_refused(metrics: tuple[tuple[str, str], ...]) -> None:
    assert admission.declaration_refusal("alpha", replace(HEADER, metrics=metrics), STUDY) == Refusal(
        "METRICS_UNDECLARED"
    )


@pytest.mark.parametrize(
    ("form", "count", "taken"),
    [
        ("exact", 10, True), ("exact", 0, False), ("exact", 10**7, True), ("exact", 10**7 + 1, False),
        ("bucketed", 8, True),
        ("bucketed", 10, False), ("uniform", 1, True), ("uniform", 10, False),
    ],
)  # fmt: skip
def test_counts_come_in_the_studys_form(form: str, count: int, taken: bool) -> None:
    told = STUDY.resolved.reported.model_copy(update={"counts": form})
    study = replace(STUDY, resolved=ResolvedStudy(STUDY.resolved.file.model_copy(update={"reported": told})))
    header = replace(HEADER, num_examples=count, num_validation=0)
    assert admission.declaration_refusal("alpha", header, study) == (None if taken else Refusal("COUNT_INVALID"))


@pytest.mark.parametrize(
    ("counts", "taken"),
    [((10, 3), True), ((20, 6), True), ((21, 3), False), ((10, 7), False), ((2, 1), True)],
    ids=["as before", "twice", "more than twice", "more than twice to validate", "fewer"],
)
def test_a_sites_counts_do_not_grow_beyond_what_it_reported_first(counts: tuple[int, int], taken: bool) -> None:
    header = replace(HEADER, num_examples=counts[0], num_validation=counts[1])
    assert admission.declaration_refusal("alpha", header, STUDY, (10, 3)) == (
        None if taken else Refusal("COUNT_INVALID")
    )


def update_file(path: Path, **tensors: np.ndarray) -> TensorFile:
    save_file({name: value.astype("<f4") for name, value in tensors.items()}, path)
    return TensorFile(path)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 6])
def test_one_value_that_is_not_finite_is_found_and_its_tensor_named(tmp_path: Path, bad: float, place: int) -> None:
    weight = np.ones(2 * BLOCK + 7)
    weight[place] = bad
    with update_file(tmp_path / "u", bias=np.zeros(2), weight=weight) as file:
        assert admission.judged_values(file, None) == Refusal("TENSOR_NOT_FINITE", "weight")


def test_zeros_of_both_signs_denormals_and_the_largest_floats_are_finite(tmp_path: Path) -> None:
    values = np.array([0.0, -0.0, 1e-45, np.finfo("<f4").max, -np.finfo("<f4").max])
    with update_file(tmp_path / "u", weight=values) as file:
        assert isinstance(admission.judged_values(file, None), Admitted)


def test_the_norm_may_reach_the_limit_but_not_pass_it(tmp_path: Path) -> None:
    with update_file(tmp_path / "u", a=np.array([3.0]), b=np.array([4.0])) as file:  # norm 5, over both
        assert admission.judged_values(file, 5.0) == Admitted(5.0)
        assert admission.judged_values(file, np.nextafter(5.0, 0)) == Refusal("TENSOR_NORM")


def test_a_tensor_with_other_bytes_than_announced_is_named() -> None:
    sent = Manifest((Entry(BIAS, "0" * 64), Entry(WEIGHT, "1" * 64)))
    assert admission.digest_refusal(sent, HEADER.manifest) == Refusal("PAYLOAD_DIGEST", "weight")
    assert admission.digest_refusal(manifest(), HEADER.manifest) is None


def received(path: Path, **changes: object) -> Received:
    """A whole payload as it was announced, in a spool."""
    with update_file(path, bias=np.zeros(2), weight=np.ones((2, 3))) as file:
        whole = file.manifest()
    given = {
        "site": "alpha", "header": replace(HEADER, manifest=whole), "spool": path, "bytes": whole.bytes,
        "manifest": whole, "committed": whole.digest(), **changes,
    }  # fmt: skip
    return Received(**given)  # type: ignore[arg-type]


def test_a_payload_is_admitted_if_it_is_whole_and_as_announced(tmp_path: Path) -> None:
    path = tmp_path / "u"
    nothing = replace(HEADER, manifest=Manifest(()))
    terms = UpdateTerms(3.0)
    assert admission.admit_payload(received(path), terms) == Admitted(sqrt(6))
    assert admission.admit_payload(received(path), UpdateTerms(2.0)) == Refusal("TENSOR_NORM")
    assert admission.admit_payload(received(path, manifest=None), terms) == Refusal("PAYLOAD_INCOMPLETE")
    assert admission.admit_payload(received(path, committed="0" * 64), terms) == Refusal("PAYLOAD_DIGEST")
    assert admission.admit_payload(received(path, manifest=manifest()), terms) == Refusal("PAYLOAD_DIGEST", "bias")
    closing = received(path, header=nothing, spool=None, manifest=None, committed=Manifest(()).digest())
    assert admission.admit_payload(closing, terms) == ADMITTED


INT8, TOPK, BFLOAT16 = Encoding("int8", block=8), Encoding("topk", fraction=0.25), Encoding("bfloat16")
MATRIX = TensorSpec("weight", "F32", (4, 8))
INDEX = "model_index/weight"


@pytest.mark.parametrize(
    ("encoding", "changed", "refusal"),
    [
        (BFLOAT16, {}, None),
        (BFLOAT16, {"weight": np.full((4, 8), 0x7F80, "<u2")}, Refusal("TENSOR_NOT_FINITE", "weight")),
        (BFLOAT16, {"weight": np.full((4, 8), 0x4170, "<u2")}, Refusal("TENSOR_NORM")),  # of 15
        (INT8, {}, None),
        (INT8, {"weight": np.full((4, 8), -128, "i1")}, Refusal("TENSOR_ENCODING", "weight")),
        (INT8, {"model_scale/weight": np.full(4, -1, "<f4")}, Refusal("TENSOR_ENCODING", "model_scale/weight")),
        (INT8, {"model_scale/weight": np.full(4, np.nan, "<f4")}, Refusal("TENSOR_NOT_FINITE", "weight")),
        (INT8, {"model_scale/weight": np.full(4, np.inf, "<f4")}, Refusal("TENSOR_NOT_FINITE", "weight")),
        (INT8, {"model_scale/weight": np.full(4, 1e38, "<f4")}, Refusal("TENSOR_NOT_FINITE", "weight")),
        (INT8, {"model_scale/weight": np.full(4, 9, "<f4")}, Refusal("TENSOR_NORM")),
        (TOPK, {}, None),
        (TOPK, {INDEX: np.array([*range(7), 32], "<i4")}, Refusal("TENSOR_ENCODING", INDEX)),
        (TOPK, {INDEX: np.array([-1, *range(7)], "<i4")}, Refusal("TENSOR_ENCODING", INDEX)),
        (TOPK, {INDEX: np.array([0, *range(7)], "<i4")}, Refusal("TENSOR_ENCODING", INDEX)),
        (TOPK, {INDEX: np.arange(8)[::-1].astype("<i4")}, Refusal("TENSOR_ENCODING", INDEX)),
        (TOPK, {"weight": np.full(8, np.nan, "<f4")}, Refusal("TENSOR_NOT_FINITE", "weight")),
        (TOPK, {"weight": np.full(8, 50, "<f4")}, Refusal("TENSOR_NORM")),
    ],
)  # fmt: skip
def test_what_an_encoding_never_writes_is_refused_and_the_values_are_judged_as_they_are_read(
    encoding: Encoding, changed: dict[str, np.ndarray], refusal: Refusal | None, tmp_path: Path
) -> None:
    numbers = codecs.encoded(encoding, MATRIX, np.linspace(-1, 1, 32, dtype="<f4")) | changed
    specs = encoding.sent((MATRIX,))
    (tmp_path / "u").write_bytes(file_header(specs) + b"".join(numbers[spec.key].tobytes() for spec in specs))
    with TensorFile(tmp_path / "u") as file:
        whole = file.manifest()
    update = received(
        tmp_path / "v", header=replace(HEADER, manifest=whole), spool=tmp_path / "u", manifest=whole,
        committed=whole.digest(),
    )  # fmt: skip
    found = admission.admit_payload(update, UpdateTerms(20.0, encoding, (MATRIX,)))
    assert found == refusal if refusal else isinstance(found, Admitted)


def test_a_study_with_an_encoding_takes_its_tensors_and_no_others() -> None:
    shared = (MATRIX,)
    file = FILE.file.model_copy(update={"encoding": EncodingSection.model_validate({"name": "bfloat16"})})
    study = replace(STUDY, resolved=ResolvedStudy(file), manifest=manifest(shared))
    as_float32 = replace(HEADER, manifest=manifest(shared))
    assert admission.declaration_refusal("alpha", as_float32, study) == Refusal("MANIFEST_DTYPE", "weight")
    as_bfloat16 = replace(HEADER, manifest=manifest((TensorSpec("weight", "BF16", (4, 8)),)))
    assert admission.declaration_refusal("alpha", as_bfloat16, study) is None
    assert study.bytes_per_update == 64


def test_a_good_payload_of_a_round_that_closed_meanwhile_does_not_count() -> None:
    closed = replace(STUDY, state=replace(OPEN, models=2, round=None))
    assert admission.admit_now("alpha", HEADER, STUDY, ADMITTED) == ADMITTED
    assert admission.admit_now("alpha", HEADER, closed, ADMITTED) == Refusal("ROUND_CLOSED")
    assert admission.admit_now("alpha", HEADER, STUDY, Refusal("TENSOR_NORM")) == Refusal("TENSOR_NORM")
    assert admission.admit_now("alpha", HEADER, closed, Refusal("TENSOR_NORM")) == Refusal("ROUND_CLOSED")


class Witness:
    """What the coordinator remembers of one site's ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.key = ledger.key.public_key()
        self.ledger_id = ""
        self.known: dict[int, str] = {}

    def looks(self, ledger: Ledger, since: int, *, lines: int | None = None) -> str:
        """Sees the ledger's first ``lines`` lines, with the hashes from ``since`` on. Returns the refusal's code."""
        head = ledger.head(lines)
        statement = LedgerStatement(head, head.sign(ledger.key).signature, tuple(ledger.hashes[since : head.lines]))
        newest = max(self.known.items()) if self.known else None
        known = {count: value for count, value in self.known.items() if since <= count <= head.lines}
        refusal = admission.ledger_refusal(statement, self.key, self.ledger_id, newest, known)
        if refusal:
            return refusal.code
        self.ledger_id, self.known = head.ledger_id, {**self.known, head.lines: head.head}  # a receipt names it
        return ""


def grown(ledger: Ledger, lines: int) -> Ledger:
    for _ in range(lines):
        ledger.write()
    return ledger


def test_a_ledger_that_grows_is_followed_from_any_head_that_was_seen() -> None:
    ledger = grown(Ledger(Ed25519PrivateKey.generate()), 5)
    witness = Witness(ledger)
    assert witness.looks(ledger, 0) == ""
    grown(ledger, 4)
    assert witness.looks(ledger, 5) == ""
    assert witness.looks(ledger, 5) == ""  # the receipt for lines 6 to 9 was lost on its way
    assert witness.looks(ledger, 0) == ""
    assert witness.looks(ledger, 9) == ""
    assert witness.looks(ledger, 3) == "LEDGER_FORK"  # no receipt names that head


def test_a_head_that_is_not_the_newest_known_is_a_rollback() -> None:
    """Whatever it begins with, and although it was good before: a receipt would countersign a shorter ledger."""
    ledger = grown(Ledger(Ed25519PrivateKey.generate()), 5)
    witness = Witness(ledger)
    for lines in (5, 9):
        assert witness.looks(grown(ledger, lines - len(ledger.hashes)), 0) == ""
    for since, lines in ((0, 5), (5, 5), (0, 7), (5, 7), (5, 8)):
        assert witness.looks(ledger, since, lines=lines) == "LEDGER_ROLLBACK"
    assert witness.looks(ledger, 9) == ""


def test_a_ledger_restored_from_a_backup_is_a_rollback() -> None:
    ledger = grown(Ledger(Ed25519PrivateKey.generate()), 9)
    witness = Witness(ledger)
    witness.looks(ledger, 0)
    ledger.hashes = ledger.hashes[:4]
    grown(ledger, 2)
    assert witness.looks(ledger, 0) == "LEDGER_ROLLBACK"
    assert witness.looks(ledger, 4) == "LEDGER_ROLLBACK"


def test_a_ledger_with_another_past_is_a_fork() -> None:
    ledger = grown(Ledger(Ed25519PrivateKey.generate()), 5)
    witness = Witness(ledger)
    witness.looks(ledger, 0)
    ledger.hashes[4] = b"x" * 32
    grown(ledger, 3)
    assert witness.looks(ledger, 0) == "LEDGER_FORK"
    assert witness.looks(ledger, 5) == "LEDGER_FORK"


def test_hashes_that_leave_a_gap_are_a_fork() -> None:
    ledger = grown(Ledger(Ed25519PrivateKey.generate()), 5)
    witness = Witness(ledger)
    witness.looks(ledger, 0)
    grown(ledger, 4)
    assert witness.looks(ledger, 7) == "LEDGER_FORK"


def test_another_ledger_of_the_same_key_is_a_fork() -> None:
    ledger = grown(Ledger(Ed25519PrivateKey.generate()), 5)
    witness = Witness(ledger)
    witness.looks(ledger, 0)
    other = grown(Ledger(ledger.key), 9)
    assert witness.looks(other, 0) == "LEDGER_FORK"


def test_a_head_that_another_key_signed_is_refused() -> None:
    ledger = grown(Ledger(Ed25519PrivateKey.generate(), ledger_id=uuid.uuid4().hex), 5)
    witness = Witness(ledger)
    ledger.key = Ed25519PrivateKey.generate()
    assert witness.looks(ledger, 0) == "LEDGER_SIGNATURE"
