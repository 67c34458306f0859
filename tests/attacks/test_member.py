"""A member site, or whoever holds its stolen credentials."""

import json
import struct
import uuid
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from tests.attacks.held import NAMES_OUT, served
from tests.coordinator.conftest import Place
from tests.coordinator.fake_site import FakeSite, delta
from wardround import rpc
from wardround.errors import BadData
from wardround.receipts import NOT_RECEIVED
from wardround.tensors import TensorFile, TensorSpec
from wardround.v1 import federation_pb2 as pb

__all__ = ["served"]


@pytest.mark.attack(promise="P1", refused_by="coordinator/downloads.py")
def test_another_sites_view(served: Place) -> None:
    """A site asks for the model that is another site's own, by its true digest: it is not offered to it."""
    alpha, bravo = served.join("alpha"), served.join("bravo")
    served.create(sites=["alpha", "bravo"], name="fomo")
    served.coordinator.stop()
    served.serve()
    study = served.coordinator.engine.find("fomo")
    assert study is not None
    strange = pb.ModelRef(round=0, digest=b"\x07" * 32)
    for site in (alpha, bravo):
        request = pb.DownloadRequest(study="fomo", revision=1, model=strange)
        with pytest.raises(grpc.RpcError) as refused:
            list(site.federation.Download(request, timeout=20))
        assert (refused.value.details() or "").startswith("REVISION_CHANGED")


@pytest.mark.attack(promise="P4", refused_by="coordinator/uploads.py")
def test_another_sites_receipt(served: Place) -> None:
    """A site that knows another's upload id asks for its receipt, and opens the id as its own."""
    alpha, bravo = served.begin(sites=["alpha", "bravo"])
    theirs = alpha.next_assignment()
    opening = alpha.opening(theirs, delta("alpha", 1, served.specs))
    assert alpha.send(opening, delta("alpha", 1, served.specs).payload) is not None
    answer = bravo.inquire(opening.upload_id)
    assert json.loads(answer.receipt.payload)["decision"] == NOT_RECEIVED
    assert "alpha" not in answer.receipt.payload.decode()
    mine = bravo.next_assignment()
    with pytest.raises(grpc.RpcError) as refused:
        bravo.send(bravo.opening(mine, delta("bravo", 1, served.specs), opening.upload_id), b"")
    assert (refused.value.details() or "").startswith("UPLOAD_ID_CONFLICT")


def _answer(site: FakeSite, opening: pb.UploadOpen, payload: bytes) -> str:
    """The code with which an upload is refused, by the call or by a receipt."""
    try:
        receipt = site.send(opening, payload)
    except grpc.RpcError as error:
        return (error.details() or "").split("\n")[0]
    return receipt.code if receipt is not None else ""


@pytest.mark.attack(promise="P3", refused_by="coordinator/service.py")
@pytest.mark.parametrize("name", NAMES_OUT, ids=ascii)
def test_path_in_a_name(served: Place, name: str) -> None:
    """A study, a tensor, a bundle or an upload id is a path: nothing is written outside of the state directory."""
    (site,) = served.begin(sites=["alpha"])
    assignment = site.next_assignment()
    update = delta("alpha", 1, served.specs)
    opening = site.opening(assignment, update)
    changed = [pb.UploadOpen.FromString(opening.SerializeToString()) for _ in range(4)]
    changed[0].study = name
    changed[1].manifest.bundles[0].tensors[0].name = name
    changed[2].manifest.bundles[0].name = name or "../x"  # the empty name is the model's
    changed[3].upload_id = name.encode()[:15]
    before = {path for path in served.state.root.parent.rglob("*") if "blobs" not in path.parts}
    answers = [_answer(site, one, update.payload) for one in changed]
    assert set(answers) <= {"MESSAGE_MALFORMED", "MANIFEST_NAMES", "STUDY_UNKNOWN"}
    assert {path for path in served.state.root.parent.rglob("*") if "blobs" not in path.parts} - before == set()
    assert not list((served.state.blobs / "uploads").iterdir())


@pytest.mark.attack(promise="P4", refused_by="coordinator/admission.py")
def test_replayed_and_stale_rounds(served: Place) -> None:
    """Last round's update again, under a new id: for its own round, for this one's name, for one to come."""
    (site,) = served.begin(sites=["alpha"])
    first = site.next_assignment()
    update = delta("alpha", 1, served.specs)
    assert site.send(site.opening(first, update), update.payload) is not None
    second = site.next_assignment()
    assert second.round == 2
    for round_, attempt, code in ((1, 1, "ROUND_CLOSED"), (3, 1, "ROUND_NOT_ASKED"), (2, 2, "ROUND_NOT_ASKED")):
        asked = pb.Assignment(study=second.study, revision=1, digest=second.digest, round=round_, attempt=attempt)
        receipt = site.send(site.opening(asked, update, uuid.uuid4().bytes), update.payload)
        assert receipt is not None
        assert (receipt.decision, receipt.code) == ("refused", code)
    assert served.status()["round"] == 2


ONE = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
BOMBS = {
    "a header of 2^63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "a header longer than the file": struct.pack("<Q", 10**6) + b"{}",
    "a tensor of 2^62 elements": b'{"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,4]}}',
    "dimensions whose product wraps": b'{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}',
    "seventeen dimensions": b'{"a":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]}}',
    "two that overlap": b'{"a":%b,"b":%b}' % (ONE, ONE),
    "a hole": b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
    "a name twice": b'{"a":%b,"a":{"dtype":"F32","shape":[0],"data_offsets":[4,4]}}' % ONE,
    "brackets without end": b"[" * 500_000,
}


@pytest.mark.attack(promise="P3", refused_by="proto/wardround/tensors.py")
@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_safetensors_bomb(tmp_path: Path, bomb: bytes) -> None:
    """A file that claims to be larger than it is, or otherwise than it is: refused from its header alone."""
    path = tmp_path / "bomb.safetensors"
    whole = bomb if bomb[8:] == b"{}" else struct.pack("<Q", len(bomb)) + bomb + b"\0\0\0\0"
    path.write_bytes(whole)
    with pytest.raises(BadData):
        TensorFile(path)


@pytest.mark.attack(promise="P11", refused_by="proto/wardround/tensors.py")
def test_manifest_bomb(served: Place) -> None:
    """An opening whose manifest speaks of a model of exabytes is refused before a byte is kept for it."""
    (site,) = served.begin(sites=["alpha"])
    assignment = site.next_assignment()
    update = delta("alpha", 1, served.specs)
    opening = site.opening(assignment, update)
    entry = opening.manifest.bundles[0].tensors[0]
    for shape in ([2**40, 2**40], [2**63], [1] * 17, [2**32, 2**33]):
        del entry.shape[:]
        entry.shape.extend(shape)
        entry.bytes = 2**64 - 4
        with pytest.raises(grpc.RpcError) as refused:
            site.send(opening, update.payload)
        assert (refused.value.details() or "").startswith("MANIFEST_SHAPE")
    with pytest.raises(BadData):
        replace(TensorSpec("a", "F32", (1,)), shape=(2**41,))
    assert rpc.MAX_MESSAGE < 5 * 1024 * 1024
