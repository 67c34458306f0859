"""What a peer can make grow is bounded, and what an operator can get wrong has its sentence."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator import calls, messages
from coordinator.cli import initial
from coordinator.members.authority import Authority
from coordinator.updates import receive
from tests.coordinator.conftest import Place, refused, study_document
from tests.coordinator.fake_site import delta
from tests.coordinator.test_rounds import SPECS
from tools.world import wait_until
from wardround import __version__, rpc
from wardround.errors import BadData, UsageProblem
from wardround.signing import certificates
from wardround.tensors.files import file_header
from wardround.tensors.manifests import TensorSpec
from wardround.v1 import federation_pb2 as pb


def test_a_site_cannot_hold_more_than_a_few_calls_and_the_others_are_served(place: Place) -> None:
    """Of whatever kind: its stream of events is one of them."""
    alpha, bravo = place.join("alpha"), place.join("bravo")
    place.create(sites=["alpha", "bravo"])
    gate = threading.Event()

    def silent() -> Iterator[Any]:
        gate.wait(20)
        yield from ()

    held = [alpha.federation.Upload(silent(), timeout=20) for _ in range(calls.MAX_CALLS - 1)]
    wait_until(lambda: len(place.coordinator.calls.of("alpha")) == calls.MAX_CALLS, "all have arrived", 20)
    try:
        with refused("TOO_BUSY\nsite `alpha` has 8 calls under way"):
            alpha.offer("trial")
        assert bravo.offer("trial").study == "trial"
    finally:
        gate.set()
        for call in held:
            call.cancel()


def test_a_site_is_offered_more_studies_than_one_reply_holds(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight large ones were more than 4 MiB: the reply did not go out, and the site saw none of them."""
    specs = tuple(TensorSpec(f"{number:05d}.{'w' * 100}", "F32", (1,)) for number in range(4000))
    place.initial.write_bytes(file_header(specs) + bytes(4 * len(specs)))
    alpha = place.join("alpha")
    names = [f"large-{number}" for number in range(8)]
    for name in names:
        place.create(name=name, sites=["alpha"])
    pages = list(alpha.pages())
    assert [offer.study for page in pages for offer in page] == names
    assert sum(offer.ByteSize() for page in pages for offer in page) > 4 * 1024 * 1024
    assert max(sum(offer.ByteSize() for offer in page) for page in pages) < rpc.MAX_MESSAGE
    monkeypatch.setattr(messages, "MAX_OFFERS", 1)
    assert [[offer.study for offer in page] for page in alpha.pages()] == [[name] for name in names]


def test_a_site_has_two_uploads_under_way_at_most(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive, "MAX_ARRIVALS", 1)
    alpha = place.join("alpha")
    for name in ("one", "two"):
        place.create(name=name, sites=["alpha"])
        alpha.declare(name)
        place.ask("start", study=name)
    first, second = alpha.next_assignment(), alpha.next_assignment()
    update = delta("alpha", 1, SPECS)
    gate = threading.Event()

    def held() -> Iterator[Any]:
        yield pb.UploadRequest(open=alpha.opening(first, update))
        gate.wait(20)

    call = alpha.federation.Upload(held(), timeout=20)
    assert next(iter(call)).offset == 0
    with pytest.raises(grpc.RpcError, match="TOO_BUSY"):
        alpha.send(alpha.opening(second, update), update.payload)
    gate.set()
    call.cancel()


def test_the_headers_of_a_call_are_bounded(place: Place) -> None:
    """Before any of our code sees them."""
    alpha = place.join("alpha")
    place.create(sites=["alpha"])
    request = pb.StudiesRequest(agent_version=__version__)
    with pytest.raises(grpc.RpcError) as refused:
        alpha.federation.Studies(request, timeout=20, metadata=(("x-long", "y" * 17_000),))
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert alpha.offer("trial").study == "trial"


def test_a_declaration_that_says_nothing_known_is_refused(place: Place) -> None:
    (alpha,) = place.begin(sites=["alpha"])
    for standing, code in ((0, 0), (pb.DECLINED, pb.TENSOR_NORM)):
        with pytest.raises(grpc.RpcError, match="MESSAGE_MALFORMED"):
            alpha.declare("trial", standing, code=code)
    with pytest.raises(grpc.RpcError, match="STUDY_UNKNOWN"):
        alpha.federation.Declare(pb.DeclareRequest(study="other"), timeout=20)


def test_a_decline_of_another_round_changes_nothing(place: Place) -> None:
    (alpha,) = place.begin(sites=["alpha"])
    assignment = alpha.next_assignment()
    assignment.round = 7
    alpha.decline(assignment, "DECLINED_POLICY")
    assert place.status()["sites"]["alpha"]["state"] == "training"


def test_a_command_of_another_version_is_not_known(place: Place) -> None:
    with pytest.raises(UsageProblem, match="the running service knows no command `dance`"):
        place.ask("dance")


def test_an_authority_whose_files_do_not_fit_is_refused(place: Place, tmp_path: Path) -> None:
    folder = place.state.authority
    other = Authority.create(tmp_path / "other", "north", 0)
    (folder / "certificate.pem").write_bytes(other.pem)
    with pytest.raises(BadData, match=r"certificate\.pem is not the certificate of the key in"):
        Authority(folder, "north")
    (folder / "key.pem").unlink()
    with pytest.raises(BadData, match=r"key\.pem: No such file or directory"):
        Authority(folder, "north")


def test_authority_and_leaves_never_have_names_that_differ_in_case_alone(place: Place) -> None:
    """X.509 compares names without case: such a leaf would look self-issued."""
    authority = place.coordinator.context.authority
    leaf = authority.leaf(certificates.Name("north", "site", "authority"), certificates.new_key().public_key(), 0, 60)
    assert leaf.subject.rfc4514_string().lower() != authority.certificate.subject.rfc4514_string().lower()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import sys; print('error: study.toml: something', file=sys.stderr); sys.exit(65)", "study.toml: something"),
        ("import sys; sys.exit(9)", "exit code 9"),
        ("pass", "exit code 0"),
    ],
)
def test_when_the_lab_cannot_make_the_initial_model_its_words_are_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    monkeypatch.setattr(initial, "LAB", script)
    with pytest.raises(BadData) as failed:
        initial.make_initial(tmp_path / "study.toml", tmp_path, None)
    assert failed.value.message == f"`fl-lab init study.toml` failed: {said}"


def test_a_lab_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial, "INITIAL_S", 0.2)
    monkeypatch.setattr(
        initial, "LAB", "import sys; sys.stdin.readline(); import threading; threading.Event().wait(20)"
    )
    with pytest.raises(BadData, match=r"`fl-lab init study.toml` did not end in 0.2 s"):
        initial.make_initial(tmp_path / "study.toml", tmp_path, None)


def test_a_study_whose_manifest_fits_no_message_is_refused_when_it_is_made(place: Place, tmp_path: Path) -> None:
    specs = [TensorSpec(f"{'long' * 45}.{n}", "F32", (1,)) for n in range(3500)]
    path = tmp_path / "long.safetensors"
    path.write_bytes(file_header(specs) + bytes(4 * len(specs)))
    with pytest.raises(BadData, match="the names and shapes of 3500 tensors do not fit into a message") as refused:
        place.ask("create", document=study_document(), initial=str(path))
    assert refused.value.hint.startswith("a study shares tensors whose manifest has at most 917504 bytes")
