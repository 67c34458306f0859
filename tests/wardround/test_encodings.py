"""Encodings of what leaves: their tensors, their arithmetic, and what of [encoding] goes with what."""

from math import ceil, prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fl_algorithms.resolving import resolve
from tests.fl_algorithms.toys import study_tables
from wardround.errors import BadData
from wardround.records.encoding import EncodingSection
from wardround.records.study import StudyFile
from wardround.tensors.codecs import Decoded, InMemoryNumbers, encoded, fault
from wardround.tensors.encodings import Encoding
from wardround.tensors.manifests import TensorSpec

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
KEPT = "the rest is kept here and added to the next update"
VALUES = arrays.arrays(np.float32, st.integers(3, 300), elements=FINITE)
ENCODINGS = st.sampled_from([
    Encoding("bfloat16"), Encoding("int8", block=8), Encoding("int8", block=256), Encoding("topk", fraction=0.1),
    Encoding("topk", fraction=0.5),
])  # fmt: skip


def spec_of(values: Any) -> TensorSpec:
    return TensorSpec("weight", "F32", (len(values),))


@settings(max_examples=60, deadline=None)
@given(ENCODINGS, VALUES, st.integers(1, 50))
def test_what_is_encoded_is_as_announced_is_admitted_and_reads_alike_in_any_pieces(
    encoding: Encoding, values: Any, piece: int
) -> None:
    spec = spec_of(values)
    numbers = encoded(encoding, spec, values)
    dtypes = {"F32": "<f4", "BF16": "<u2", "I8": "|i1", "I32": "<i4"}
    assert {key: (array.shape, array.dtype.str) for key, array in numbers.items()} == {
        part.key: (part.shape, dtypes[part.dtype]) for part in encoding.parts(spec)
    }
    source = InMemoryNumbers(numbers)
    assert fault(encoding, (spec,), source) == ""
    decoded = Decoded(encoding, (spec,), source)
    whole = decoded.block("weight", 0, len(values))
    assert whole.dtype == np.float32
    pieces = [decoded.block("weight", at, min(piece, len(values) - at)) for at in range(0, len(values), piece)]
    assert np.concatenate(pieces).tobytes() == whole.tobytes()
    if encoding.name == "topk" and len(numbers) == 2:
        kept = np.flatnonzero(np.isin(np.arange(len(values)), numbers["model_index/weight"]))
        assert whole[kept].tobytes() == values[kept].tobytes()
        assert np.abs(np.delete(values, kept)).max(initial=0) <= np.abs(values[kept]).min()
        assert not np.delete(whole, kept).any()
    if encoding.name == "int8" and len(numbers) == 2:
        scales = np.repeat(numbers["model_scale/weight"].astype(np.float64), encoding.block)[: len(values)]
        with np.errstate(invalid="ignore"):  # at the very end of float32, the largest value may be beyond it
            assert (np.abs(whole.astype(np.float64) - values) <= 0.51 * scales + 1e-40)[np.isfinite(whole)].all()


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_bfloat16_rounds_as_torch_does_and_never_to_infinity(values: Any) -> None:
    spec = spec_of(values)
    found = Decoded(Encoding("bfloat16"), (spec,), InMemoryNumbers(encoded(Encoding("bfloat16"), spec, values)))
    theirs = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    largest = np.float32(3.3895314e38)
    assert found.block("weight", 0, len(values)).tobytes() == np.clip(theirs, -largest, largest).tobytes()


@pytest.mark.parametrize("encoding", [Encoding("bfloat16"), Encoding("int8"), Encoding("topk", fraction=0.1)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_stays_one_that_the_exit_finds(encoding: Encoding, bad: float) -> None:
    values = np.ones(100, dtype=np.float32)
    values[7] = bad
    spec = spec_of(values)
    read = Decoded(encoding, (spec,), InMemoryNumbers(encoded(encoding, spec, values))).block("weight", 0, 100)
    assert not np.isfinite(read).all()


def test_bfloat16_halves_the_bytes_but_for_what_stays_as_it_is() -> None:
    weight, variance = TensorSpec("bn.weight", "F32", (64,)), TensorSpec("bn.running_var", "F32", (64,))
    scalar = TensorSpec("scale", "F32", ())
    halved = Encoding("bfloat16").sent((variance, weight, scalar))
    assert [(spec.name, spec.dtype) for spec in halved] == [
        ("bn.running_var", "F32"), ("bn.weight", "BF16"), ("scale", "BF16"),
    ]  # fmt: skip
    assert sum(spec.bytes for spec in halved) == variance.bytes + weight.bytes // 2 + 2


def test_what_an_encoding_would_not_make_smaller_leaves_as_it_is() -> None:
    assert Encoding("int8").parts(TensorSpec("bias", "F32", (1,))) == (TensorSpec("bias", "F32", (1,)),)
    assert Encoding("topk", fraction=0.5).parts(TensorSpec("b", "F32", (8,))) == (TensorSpec("b", "F32", (8,)),)
    empty = TensorSpec("none", "F32", (0, 3))
    assert all(Encoding(name).parts(empty) == (empty,) for name in ("bfloat16", "int8", "topk"))  # type: ignore[arg-type]


def test_the_bytes_of_int8_and_topk() -> None:
    spec = TensorSpec("w", "F32", (100, 100))
    count = prod(spec.shape)
    assert sum(part.bytes for part in Encoding("int8", block=256).parts(spec)) == count + 4 * ceil(count / 256)
    assert sum(part.bytes for part in Encoding("topk", fraction=0.01).parts(spec)) == 8 * 100


def test_a_bundle_that_stands_beside_another_is_not_taken_twice() -> None:
    ours = TensorSpec("w", "F32", (100,))
    with pytest.raises(BadData, match="encoding `int8` puts a bundle beside each, and the study has one of its name"):
        Encoding("int8").sent((ours, TensorSpec("w", "F32", (100,), "model_scale")))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "int8", "fraction": 0.1}, "`fraction` belongs to `topk`, the encoding is `int8`"),
        ({"error_feedback": True}, "`error_feedback` belongs to `bfloat16`, `int8`, `topk`, the encoding is `float32`"),
        ({"name": "zstandard"}, "name"),
        ({"name": "topk", "fraction": 0.6}, "fraction"),
    ],
)
def test_a_setting_that_an_encoding_does_not_have_is_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EncodingSection.model_validate(table)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({}, "values leave as float32, as they were computed"),
        (
            {"name": "bfloat16"},
            f"values leave as bfloat16, rounded to 8 significant bits; {KEPT}",
        ),
        (
            {"name": "int8", "error_feedback": False},
            "values leave as whole numbers of 8 bits, with one scale for 256 of them; the rest is dropped",
        ),
        (
            {"name": "topk", "fraction": 0.01},
            f"of each tensor the largest 1 % of the values leave; {KEPT}",
        ),
    ],
)
def test_each_encoding_is_told_in_a_sentence(table: dict[str, Any], sentence: str) -> None:
    assert EncodingSection.model_validate(table).sentence == sentence


@pytest.mark.parametrize(
    ("algorithm", "tables", "message", "hint"),
    [
        (
            "scaffold",
            {"encoding": {"name": "bfloat16"}, "training": {"optimizer": "sgd", "weight_decay": 0.0, "local_steps": 2}},
            "encoding `bfloat16` in [encoding] rounds what leaves, and the server aggregator of algorithm `scaffold` "
            "is its own: it needs each value as the site computed it",
            "leave [encoding] out, or use one of ",
        ),
        (
            "fedavg",
            {"encoding": {"name": "int8"}, "secure_aggregation": {}, "limits": {"max_weight": 1.0}},
            "encoding `int8` in [encoding] is decoded one update at a time, and with [secure_aggregation] "
            "nobody sees one",
            "leave out one of the two",
        ),
        (
            "fedavg",
            {"encoding": {"name": "topk"}, "aggregation": {"rule": "median"}},
            "encoding `topk` in [encoding] leaves out most values of an update, and rule `median` in [aggregation] "
            "would take each for a zero that a site chose",
            "`bfloat16` or `int8` in [encoding], or leave [aggregation] out",
        ),
    ],
)
def test_what_an_encoding_does_not_go_with_is_refused_with_the_reason(
    algorithm: str, tables: dict[str, Any], message: str, hint: str
) -> None:
    given = study_tables(algorithm)
    given["study"]["sites"] = ["ash", "birch", "cedar"]
    with pytest.raises(BadData) as raised:
        resolve(StudyFile.model_validate({**given, **tables}), lab=True)
    assert message in raised.value.message
    assert hint in raised.value.hint


def test_a_study_says_its_encoding_in_its_document_where_it_has_one() -> None:
    plain = resolve(StudyFile.model_validate(study_tables()), lab=True)
    assert "encoding" not in plain.document()
    chosen = StudyFile.model_validate({**study_tables(), "encoding": {"name": "int8"}})
    study = resolve(chosen, lab=True)
    assert study.document()["encoding"] == {"name": "int8", "block": 256, "error_feedback": True}
    assert StudyFile.from_document(study.document()).document() == study.document()
    assert study.encoding.sentence in study.file.bounds()
    silo = resolve(StudyFile.model_validate({**study_tables("silo"), "encoding": {"name": "int8"}}), lab=True)
    assert "encoding" not in silo.document()  # it sends nothing
