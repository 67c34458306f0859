"""A study's offer, as both sides read and write it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wardround.test_update import NUMBERS, manifests
from wardround.errors import BadData
from wardround.records.offer import MAX_DEPTH, STATES, StudyOffer, is_too_deep
from wardround.records.study import StudyFile
from wardround.signing import canonical
from wardround.tensors.manifests import Manifest
from wardround.v1 import federation_pb2 as pb


def study(rounds: int, name: str = "heart") -> StudyFile:
    tables = {
        "study": {"name": name, "sites": ["alpha", "beta"], "rounds": rounds}, "task": {"name": "tabular"},
        "model": {"name": "mlp"}, "algorithm": {"name": "fedavg"}, "training": {"local_steps": 1},
    }  # fmt: skip
    return StudyFile.from_document(tables)


def offer(file: StudyFile, manifest: Manifest, revision: int = 1, state: str = "created") -> StudyOffer:
    return StudyOffer(revision, file.digest(manifest.digest()), state, file, manifest)


OFFER = offer(study(3), Manifest(()))


@given(st.integers(1, 1000), manifests(), NUMBERS, st.sampled_from(STATES))
def test_an_offer_arrives_as_it_was_sent(rounds: int, manifest: Manifest, revision: int, state: str) -> None:
    sent = offer(study(rounds), manifest, revision, state)
    message = pb.StudyOffer.FromString(sent.to_message().SerializeToString())
    assert StudyOffer.from_message(message) == sent
    assert StudyOffer.from_message(message).to_message() == message


def damaged(**fields: object) -> pb.StudyOffer:
    message = OFFER.to_message()
    for name, value in fields.items():
        setattr(message, name, value)
    return message


def nested(depth: int) -> object:
    document: object = 1
    for _ in range(depth):
        document = {"a": document}
    return document


@pytest.mark.parametrize(
    ("message", "says"),
    [
        pytest.param(damaged(study="../x"), "a study whose name is not of our form", id="name"),
        pytest.param(damaged(study="lung"), "offers `lung` with another study's file", id="another's file"),
        pytest.param(damaged(state="over"), "in a state of no known name", id="state"),
        pytest.param(damaged(digest=bytes(32)), "under a digest that is not its own: 000000000000…", id="digest"),
        pytest.param(damaged(document=canonical.dumps(nested(MAX_DEPTH))), "too deep within tables", id="depth"),
        pytest.param(
            damaged(document=canonical.dumps({**study(3).document(), "x": 1})), "unknown", id="a table that is none"
        ),
    ],
)
def test_an_offer_of_another_form_is_refused(message: pb.StudyOffer, says: str) -> None:
    with pytest.raises(BadData, match=says):
        StudyOffer.from_message(message)


def test_an_offer_is_of_the_study_that_its_file_names() -> None:
    assert replace(OFFER, file=study(3, "lung")).study == "lung"


@pytest.mark.parametrize(("depth", "refused"), [(MAX_DEPTH - 1, False), (MAX_DEPTH, True), (900, True)])
def test_tables_within_tables_are_bounded(depth: int, refused: bool) -> None:
    assert is_too_deep(nested(depth)) is refused
