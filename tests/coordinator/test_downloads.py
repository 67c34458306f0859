"""Sites that each download a view of their own out of one kept file, over real gRPC; and the state that is kept."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import numpy as np
import pytest
from safetensors.numpy import load_file

from coordinator.models.downloads import Download, Downloads
from coordinator.storage import tables
from coordinator.studies import conclusion
from coordinator.studies.assignments import Assignments
from tests.coordinator.conftest import SITES, Place
from tests.coordinator.fake_site import FakeSite, delta
from tests.coordinator.test_damaged_files import damage
from tests.coordinator.test_rounds import SPECS
from tests.coordinator.toy_half import neighbour, toy_half
from wardround.local.durable import StorageFailed
from wardround.records.messages import manifest_from
from wardround.tensors.manifests import Manifest
from wardround.v1 import federation_pb2 as pb

COMES = ("layer.bias", "layer.weight", "neighbour/layer.bias", "state/examples")
Tensors = dict[str, np.ndarray[Any, Any]]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr("coordinator.studies.study.server_aggregator", toy_half)
    place = Place(tmp_path)
    try:
        yield place
    finally:
        place.close()


def kept_after(rounds: list[tuple[str, ...]], of: tuple[str, ...] = SITES) -> Tensors:
    """The plain formula: each site's own model after the rounds in which these sites were accepted."""
    start = {"layer.bias": np.zeros(2, "<f4"), "layer.weight": np.ones((2, 3), "<f4")}
    kept = {f"{site}/{key}": values.copy() for site in of for key, values in start.items()}
    examples = 0
    for number, sites in enumerate(rounds, start=1):
        for site in sites:
            update = delta(site, number, SPECS)
            examples += update.num_examples
            for spec, data in update.tensors:
                kept[f"{site}/{spec.key}"] += np.frombuffer(data, "<f4").reshape(spec.shape)
    return {**kept, "state/examples": np.array([examples], "<f4")}


def kept_now(place: Place) -> Tensors:
    return load_file(place.coordinator.context.blobs.model(place.status()["model_digest"]))


def same(found: Tensors, wanted: Tensors) -> bool:
    return found.keys() == wanted.keys() and all(found[key].tobytes() == wanted[key].tobytes() for key in found)


def view_of(kept: Tensors, site: str, round_number: int) -> bytes:
    keys = [f"{site}/layer.bias", f"{site}/layer.weight"]
    keys += [f"{neighbour(SITES, site, round_number)}/layer.bias", "state/examples"]
    return b"".join(kept[key].tobytes() for key in keys)


def ask_for(site: FakeSite, assignment: Any, model: Any) -> tuple[Manifest, bytes]:
    request = pb.DownloadRequest(study=assignment.study, revision=assignment.revision, model=model)
    first, *chunks = site.federation.Download(request, timeout=20)
    return manifest_from(first.manifest), b"".join(reply.chunk.data for reply in chunks)


def test_each_site_downloads_its_own_view_and_the_kept_state_is_the_plain_formula(place: Place) -> None:
    sites = place.begin()
    for number in (1, 2):
        before = kept_after([SITES] * (number - 1))
        for site in sites:
            assignment = site.next_assignment()
            manifest, payload = site.download(assignment)
            assert tuple(spec.key for spec in manifest.specs) == COMES
            assert payload == view_of(before, site.name, number)
            assert site.answer(assignment).decision == "accepted"
    place.until(lambda status: status["closing"])
    assert same(kept_now(place), kept_after([SITES, SITES]))


def test_a_site_that_is_not_accepted_leaves_its_own_model_as_it_was(place: Place) -> None:
    alpha, bravo, charlie = place.begin(quorum=2, rounds=1)
    alpha.decline(alpha.next_assignment(), "DECLINED_DATA_CHANGED")
    for site in (bravo, charlie):
        site.answer(site.next_assignment())
    place.until(lambda status: status["closing"])
    found = kept_now(place)
    assert same(found, kept_after([("bravo", "charlie")]))
    assert found["alpha/layer.weight"].tolist() == np.ones((2, 3)).tolist()


def test_an_update_still_holds_what_leaves_and_nothing_of_what_came(place: Place) -> None:
    alpha, *_ = place.begin()
    assignment = alpha.next_assignment()
    manifest, _ = alpha.download(assignment)
    receipt = alpha.answer(assignment, delta("alpha", 1, manifest.specs))
    assert (receipt.decision, receipt.code, receipt.tensor) == ("refused", "MANIFEST_NAMES", "neighbour/layer.bias")


def test_a_site_cannot_download_what_is_for_another(place: Place) -> None:
    sites = place.begin()
    for site in sites:  # in the first round all begin with the initial model
        site.answer(site.next_assignment())
    alpha, bravo, _ = sites
    theirs = bravo.next_assignment()
    assert alpha.next_assignment().base.digest != theirs.base.digest
    with pytest.raises(grpc.RpcError, match="REVISION_CHANGED"):
        ask_for(alpha, theirs, theirs.base)
    kept = pb.ModelRef(round=0, digest=bytes.fromhex(place.status()["model_digest"]))
    with pytest.raises(grpc.RpcError, match="REVISION_CHANGED"):
        ask_for(alpha, theirs, kept)


def test_a_download_goes_on_from_any_byte_of_the_view(place: Place) -> None:
    alpha, *_ = place.begin()
    assignment = alpha.next_assignment()
    _, whole = alpha.download(assignment)
    for offset in (1, 8, 33, len(whole), len(whole) + 5):
        assert alpha.download(assignment, offset)[1] == whole[offset:]


def test_the_best_model_is_offered_as_each_sites_own_view_of_it(place: Place) -> None:
    sites = place.begin()
    losses = {2: "0.3", 3: "0.4"}  # of models 1 and 2
    for _ in range(3):
        for site, assignment in [(site, site.next_assignment()) for site in sites]:
            update = delta(site.name, assignment.round, SPECS if assignment.HasField("train") else ())
            loss = losses.get(assignment.round, "0.1")
            site.answer(assignment, replace(update, metrics=(("val_loss", loss),)))
    for site in sites:
        stop = site.next_assignment()
        assert stop.best.round == 1
        manifest, payload = ask_for(site, stop, stop.best)
        assert manifest.digest() == stop.best.digest.hex()
        assert payload == view_of(kept_after([SITES]), site.name, 2)


def test_kept_files_that_nobody_needs_any_more_are_gone(place: Place) -> None:
    sites = place.begin()
    started = place.status()["model_digest"]
    models = place.state.blobs / "models"
    study = place.coordinator.engine.find("trial")
    assert study is not None
    assert started != study.initial
    assert {path.stem for path in models.iterdir()} == {study.initial, started}
    for _ in range(2):
        for site in sites:
            site.answer(site.next_assignment())
    place.until(lambda status: status["closing"])
    study = place.coordinator.engine.find("trial")
    assert study is not None
    assert {path.stem for path in models.iterdir()} == study.models
    assert started not in study.models


def test_after_a_restart_each_site_is_asked_the_same_again(place: Place) -> None:
    sites = place.begin()
    for site in sites:
        site.answer(site.next_assignment())
    second = [site.next_assignment() for site in sites]
    place.restart()
    for site, assignment in zip(sites, second, strict=True):
        site.watch()
        assert site.next_assignment() == assignment
        site.answer(assignment)
    place.until(lambda status: status["closing"])
    assert same(kept_now(place), kept_after([SITES, SITES]))


def test_a_crash_between_the_kept_file_and_its_commit_is_done_again_to_the_same_bits(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made, went_on = conclusion.aggregate, threading.Event(), threading.Event()

    def cut_off(*given: Any) -> Manifest:
        real(*given)
        made.set()
        went_on.wait(20)
        raise StorageFailed("as if the process had ended here")

    sites = place.begin(rounds=1)
    monkeypatch.setattr("coordinator.studies.conclusion.aggregate", cut_off)
    for site in sites:
        site.answer(site.next_assignment())
    assert made.wait(20)
    monkeypatch.setattr("coordinator.studies.conclusion.aggregate", real)
    went_on.set()
    place.restart()
    assert isinstance(place.failures.pop(), StorageFailed)
    place.until(lambda status: status["closing"])
    assert same(kept_now(place), kept_after([SITES]))


def test_a_site_whose_model_cannot_be_read_is_asked_nothing_and_the_log_says_why(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.begin()
    study = place.coordinator.engine.find("trial")
    assert study is not None
    parts = place.coordinator.context
    assignments = Assignments(parts.store, Downloads(parts.store, parts.blobs))
    assert assignments.of(study, "alpha") is not None
    damage(place, study.newest)
    parts.blobs.doubt(study.newest)
    assert assignments.of(study, "alpha") is None
    assert "trial: the model for site alpha: " in caplog.text


def test_when_what_is_kept_is_damaged_the_study_pauses_and_the_sites_hear_it(place: Place) -> None:
    sites = place.begin()
    assignments = [site.next_assignment() for site in sites]
    for site, assignment in zip(sites[:2], assignments, strict=False):
        site.answer(assignment)
    update = delta(sites[2].name, 1, SPECS)
    damage(place, place.status()["model_digest"])
    sites[2].send(sites[2].opening(assignments[2], update), update.payload)
    place.until(lambda status: status["state"] == "paused")
    assert {site.next_assignment().stop.reason for site in sites} == {pb.Stop.PAUSED}


def test_a_study_whose_settings_are_not_known_any_more_hides_no_other(place: Place) -> None:
    """An older release may have stored settings that its method has no more; what is over can still be looked up."""
    place.create()
    place.create(name="other")
    with place.coordinator.context.store.write() as session:
        row = session.get(tables.Study, ("trial", 1))
        assert row is not None
        document = json.loads(row.document)
        document["algorithm"] = {"name": "fedsoup", "soup_after": 3}
        row.document = json.dumps(document)
    place.restart()
    assert place.status("trial")["state"] == "created"
    assert place.ask("report", study="trial")["algorithm"] == "fedsoup"
    alpha = place.join("alpha")
    assert {alpha.next_event("offer").study for _ in range(2)} == {"trial", "other"}


def test_the_view_that_another_call_finds_meanwhile_is_not_given() -> None:
    """Calls of sites of several studies look for their models at the same time, each in a thread of its own."""
    own, others = (Download(Manifest(()), name * 64, ()) for name in "ab")
    downloads = Downloads(Mock(), Mock())
    downloads._passed = own

    class Interrupted(str):
        """While it is compared, another thread goes on."""

        def __eq__(self, other: object) -> bool:
            downloads._passed = others
            return super().__eq__(other)

        __hash__ = str.__hash__

    assert downloads.find(Mock(passes=True), [(1, own.kept)], "alpha", Interrupted(own.kept)) is own
