"""Studies that have ended: no site is told of them, and they can be archived. Two commands that create one at once."""

import json
import threading
from typing import Any

import pytest

from coordinator import messages
from coordinator.administration import Administration
from tests.coordinator.conftest import Place, on_both, study_document
from wardround.errors import BadData, NeedsPerson, TryAgain
from wardround.v1 import federation_pb2 as pb


def many_tensors(count: int) -> dict[str, Any]:
    import numpy as np

    return {f"block{number:03d}.layer.weight": np.zeros(1, "<f4") for number in range(count)}


@pytest.mark.parametrize("count", [8, pytest.param(130, marks=pytest.mark.chaos)])
def test_ended_studies_of_400_tensors_keep_no_site_out(place: Place, count: int) -> None:
    """Their offers outgrew one message, and no site could connect any more: "the coordinator is busy"."""
    from safetensors.numpy import save_file

    alpha = place.join("alpha")
    save_file(many_tensors(400), place.initial)
    for number in range(count):
        place.create(name=f"old-{number:03d}", sites=["alpha"])
        place.ask("stop", study=f"old-{number:03d}")
    place.create(name="young", sites=["alpha"])
    pages = list(alpha.pages())
    assert [[offer.study for offer in page] for page in pages] == [["young"]]
    alpha.unwatch()
    alpha.watch()
    assert alpha.next_event("offer").study == "young"
    assert len(place.ask("studies")["studies"]) == count + 1
    for number in range(count):
        place.ask("archive", study=f"old-{number:03d}")
    place.restart()
    assert [row["id"] for row in place.ask("studies")["studies"]] == ["young"]
    assert len(place.ask("studies", archived=True)["studies"]) == count + 1
    assert place.status("old-007")["state"] == "stopped"
    assert place.coordinator.engine.find("old-007") is None


def test_what_goes_on_is_listed_in_pages(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_OFFERS", 100_000)
    from safetensors.numpy import save_file

    alpha = place.join("alpha")
    save_file(many_tensors(400), place.initial)
    names = [f"new-{number:03d}" for number in range(6)]
    for name in names:
        place.create(name=name, sites=["alpha"])
    pages = list(alpha.pages())
    assert len(pages) > 1
    assert [offer.study for page in pages for offer in page] == names


def test_only_an_ended_study_is_archived_and_its_report_and_models_stay(place: Place) -> None:
    (site,) = place.begin(sites=["alpha"], rounds=1)
    with pytest.raises(NeedsPerson) as refusal:
        place.ask("archive", study="trial")
    assert refusal.value.message == "study `trial` is running: only one that has ended can be archived"
    assert refusal.value.hint == "`coordinator study stop trial` ends it for good"
    for _ in range(2):
        site.answer(site.next_assignment())
    before = place.until(lambda status: status["state"] == "finished")
    assert place.ask("archive", study="trial")["state"] == "finished"
    assert place.ask("archive", study="trial")["state"] == "finished"
    place.restart()
    before["sites"]["alpha"]["connected"] = False
    assert place.status() == before
    assert place.ask("report", study="trial")["rounds_closed"]
    assert place.coordinator.context.blobs.model(before["model_digest"]).exists()
    site.unwatch()
    site.watch_again()
    with pytest.raises(NeedsPerson, match="study `trial` is finished: it cannot be started again"):
        place.ask("start", study="trial")
    with pytest.raises(BadData, match="there is no study `trail` here"):
        place.status("trail")
    created = place.ask("create", document=study_document(sites=["alpha"]), initial=str(place.initial))
    assert (created["revision"], created["new"]) == (2, True)
    assert site.next_event("offer").revision == 2


def test_a_site_that_was_away_when_its_study_ended_hears_of_it_without_an_offer(place: Place) -> None:
    alpha, bravo = place.begin(sites=["alpha", "bravo"], rounds=1, quorum=1, round_deadline_s=3)
    bravo.unwatch()
    for _ in range(2):
        alpha.answer(alpha.next_assignment())
    place.until(lambda status: status["state"] == "finished")
    bravo.watch()
    event = bravo.events.get(timeout=20)
    assert event.assignment.stop.reason == pb.Stop.FINISHED


@on_both
def test_of_two_commands_that_create_a_study_of_one_name_one_wins_and_the_other_says_so(place: Place) -> None:
    """The second one failed with an error of the database, or both wrote the same file."""
    place.join("alpha")
    titles = [f"title {number}" for number in range(4)]
    together = threading.Barrier(len(titles))
    won: list[int] = []
    said: list[TryAgain] = []

    def create(title: str) -> None:
        administration = Administration(place.coordinator.context)
        document = study_document(sites=["alpha"], title=title)
        together.wait()
        try:
            won.append(
                administration.run(  # type: ignore[index]
                    {"command": "create", "document": document, "initial": str(place.initial)}, lambda item: None
                )["revision"]
            )
        except TryAgain as error:
            said.append(error)

    threads = [threading.Thread(target=create, args=(title,)) for title in titles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(won) + len(said) == len(titles)
    assert sorted(won) == list(range(1, len(won) + 1))
    for error in said:
        assert error.message == "study `trial` was created by another command at the same time; here nothing changed"
        assert error.hint == "`coordinator study status trial` shows which it is"
    assert place.ask("studies")["studies"][0]["revision"] == len(won)
    assert json.dumps(place.ask("report", study="trial"))
