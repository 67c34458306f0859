"""A study of several networks at one hospital: which one it trains, who says so, and what of it leaves."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_algorithms.engine.partition import initial_model, specs_of, task_of
from fl_algorithms.engine.session import SiteSession
from fl_algorithms.resolving import resolve
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.source import Source
from site_agent.gateway.connection.client import offer_from
from site_agent.gateway.consent.approvals import grant, refuse_other_tensors
from site_agent.state.consent import Shown, TrainedData
from site_agent.state.person import Person
from site_agent.state.tensors import specs_from
from site_agent.trainer.data import inspection, sources
from site_agent.trainer.rounds.tensorfiles import manifest_of
from site_agent.trainer.vault.cards import Card
from site_agent.trainer.vault.states import Vault
from tests.fl_algorithms.image_toys import IMAGES, RESNET, packed, pictures, write_images
from tests.fl_algorithms.toys import start_of
from tests.site_agent.site_world import STUDY, SiteWorld
from tests.site_agent.trainer_world import NAME, Hospital
from wardround.errors import BadData, NeedsPerson
from wardround.records.messages import manifest_message
from wardround.records.study import StudyFile
from wardround.records.trainer import Checked, DataFiles, Described, FilesStatus
from wardround.signing import canonical
from wardround.tensors.files import TensorFile
from wardround.v1 import federation_pb2 as pb


def several(**tables: Any) -> ResolvedStudy:
    """Sites train an mlp of [4], and north `deep`."""
    small = {"name": "mlp", "hidden": [2]}
    return resolve(
        StudyFile.model_validate(
            {
                "study": {"name": NAME, "sites": ["north", "south"], "rounds": 4, "seed": 7},
                "task": {"name": "tabular", "label": "ill", "classes": ["no", "yes"], "features": ["age", "dose"]},
                "model": {"name": "mlp", "hidden": [4]},
                "networks": {"deep": {"name": "mlp", "hidden": [5, 3]}, "small": small},
                "assigned": {"north": "deep"},
                "algorithm": {"name": "mhpflgb", "train_local": {"steps": 2}, "train_global": {"steps": 1}},
                "training": {"local_steps": 5, "batch_size": 8},
                **tables,
            }
        )
    )


@pytest.fixture
def hospital(tmp_path: Path) -> Hospital:
    found = Hospital.make(tmp_path)
    found.study = several()
    return found


def choose(hospital: Hospital, network: str) -> None:
    known = sources.sources(hospital.state)["patients"]
    sources.add(hospital.state, "patients", known.model_copy(update={"network": network}), replace=True)


def train(hospital: Hospital, number: int, network: str) -> dict[str, Any]:
    approved = {**hospital.round(number)["data"], "network": network}
    return hospital.train(number, data=approved)


def card(hospital: Hospital, kind: str = "latest") -> Card:
    vault = Vault(hospital.state, NAME, 1)
    return next(kept.card for kept in vault.checkpoints() if kept.card.kind == kind)


def hidden(hospital: Hospital, **asked: Any) -> tuple[str, list[int]]:
    """The network that a description is of, and the outputs of its first layer."""
    said = hospital.ask("describe", study=hospital.document, site="north", **asked)
    first = next(stay["shape"] for stay in said["private"] if stay["name"] == "body.layers.0.weight")
    return said["network"], first


def test_the_description_is_of_the_assigned_network_until_the_data_chooses_another(hospital: Hospital) -> None:
    assert hidden(hospital) == hidden(hospital, data="patients") == ("deep", [5, 2])
    choose(hospital, "small")
    assert hidden(hospital, data="patients") == ("small", [2, 2])
    assert hidden(hospital) == ("deep", [5, 2])
    choose(hospital, "default")
    assert hidden(hospital, data="patients") == ("default", [4, 2])


def test_what_leaves_does_not_depend_on_the_choice(hospital: Hospital) -> None:
    before = hospital.ask("describe", study=hospital.document, site="north", data="patients")["upload"]
    choose(hospital, "small")
    assert hospital.ask("describe", study=hospital.document, site="north", data="patients")["upload"] == before


def test_a_study_of_one_network_says_none_and_a_choice_that_it_does_not_have_is_refused(hospital: Hospital) -> None:
    hospital.study = several(networks={}, assigned={})
    assert hidden(hospital, data="patients") == ("", [4, 2])
    choose(hospital, "small")
    for command in ("describe", "check"):
        with pytest.raises(BadData, match=f"study `{NAME}` has no network `small`"):
            hospital.ask(command, study=hospital.document, site="north", data="patients")


def test_the_choice_is_kept_in_data_toml_and_must_be_a_label(hospital: Hospital) -> None:
    choose(hospital, "small")
    assert sources.sources(hospital.state)["patients"].network == "small"
    path = hospital.state / "data.toml"
    path.write_text(path.read_text().replace('"small"', '"no/label"'))
    with pytest.raises(BadData, match=r"data\.toml: `network` in \[patients\]"):
        sources.sources(hospital.state)


def test_a_round_trains_the_approved_network_as_the_lab_does(hospital: Hospital) -> None:
    choose(hospital, "small")
    answer = train(hospital, 1, "small")
    hospital.commit(1)
    study = hospital.study
    task = task_of(study)
    files = Source({"table": hospital.table, "test": hospital.test}, "ill")
    fraction = study.checkpoints.validation_fraction
    found = task.load(files, site="north", seed=study.study.seed, validation_fraction=fraction)
    session = SiteSession(study.at("north", "small"), "north", task, found)
    uplink = session.train(1, start_of(study)).uplink["bypass"]
    with TensorFile(hospital.state / "staging" / answer["update"]) as update:
        for name, delta in uplink.items():
            sent = update.block(f"bypass/{name}", 0, delta.numel())
            assert torch.equal(torch.from_numpy(sent.copy()), delta.reshape(-1))


@pytest.mark.parametrize("approved", ["deep", ""])
def test_another_network_than_the_approved_one_is_not_trained(hospital: Hospital, approved: str) -> None:
    """Without a label in the consent, what is assigned was approved."""
    choose(hospital, "small")
    with pytest.raises(BadData) as refusal:
        train(hospital, 1, approved)
    said = f"network `small` of study `{NAME}` is what `patients` would train; `deep` was approved"
    assert (refusal.value.message, refusal.value.code) == (said, "DECLINED_DATA_CHANGED")
    assert refusal.value.hint == f"`site-agent approve {NAME} --data patients` if the change is meant"


@pytest.mark.parametrize("restarted", [False, True])
def test_a_site_that_changes_its_network_begins_anew_with_it_and_goes_on(hospital: Hospital, restarted: bool) -> None:
    train(hospital, 1, "deep")
    hospital.commit(1)
    choose(hospital, "small")
    later = hospital.restarted() if restarted else hospital
    assert train(later, 2, "small")["num_examples"] == 48
    later.commit(2)
    assert card(hospital).network == "small"
    train(later, 3, "small")
    later.commit(3)


def test_an_undecided_round_is_not_answered_with_another_networks_update(hospital: Hospital) -> None:
    first = hospital.update_digest(train(hospital, 1, "deep"))
    choose(hospital, "small")
    assert hospital.update_digest(train(hospital, 1, "small")) != first


def test_predictions_are_those_of_the_network_that_the_card_names(hospital: Hospital, tmp_path: Path) -> None:
    choose(hospital, "small")
    for number in (1, 2):
        train(hospital, number, "small")
        hospital.commit(number)
    choose(hospital, "deep")
    out = tmp_path / "out.csv"
    told = hospital.ask("predict", study=NAME, checkpoint="latest", table=str(hospital.test), out=str(out))
    assert told["rows"] == len(out.read_text().splitlines()) - 1 == 20
    assert card(hospital).network == "small"


def test_a_card_of_a_study_of_one_network_names_none(hospital: Hospital) -> None:
    hospital.study = several(networks={}, assigned={})
    for number in (1, 2):
        hospital.train(number)
        hospital.commit(number)
    assert card(hospital).network == ""
    assert json.loads(card(hospital).to_text())["kind"] == "latest"


@pytest.mark.parametrize(("chosen", "label", "side"), [("", "large", 16), ("default", "default", 8)])
def test_images_are_trained_and_predicted_at_the_size_of_the_sites_network(
    hospital: Hospital, tmp_path: Path, chosen: str, label: str, side: int
) -> None:
    large = {**RESNET, "size": [16, 16]}
    hospital.study = several(task=IMAGES, model=RESNET, networks={"large": large}, assigned={"north": "large"})
    fields = {"arrays": str(packed(tmp_path / "train.npz", n=20)), "label": "shape"}
    source = sources.DataSource(**fields, digest=inspection.inspect(DataFiles(**fields)).digest, network=chosen)
    sources.add(hospital.state, "patients", source, replace=True)
    assert hospital.ask("check", study=hospital.document, site="north", data="patients")["rows"] == 20
    for number in (1, 2):
        train(hospital, number, label)
        hospital.commit(number)
    [latest] = [kept for kept in Vault(hospital.state, NAME, 1).checkpoints() if kept.card.kind == "latest"]
    assert (latest.card.network, latest.preprocessing()["inputs"]["shape"]) == (label, [1, side, side])
    write_images(tmp_path / "new", list(pictures(3, side=24)[0]))
    out = tmp_path / "out.csv"
    told = hospital.ask("predict", study=NAME, checkpoint="latest", images=str(tmp_path / "new"), out=str(out))
    assert told["rows"] == 3


def test_the_consent_has_the_network_and_another_one_is_another_consent(world: SiteWorld) -> None:
    world.ready()
    consents = [world.state.consent(STUDY)]
    assert world.trainer is not None
    for world.trainer.network in ("deep", "small"):
        world.approve()
        consents.append(world.state.consent(STUDY))
    found = [consent for consent in consents if consent is not None]
    assert [consent.data.network for consent in found] == ["", "deep", "small"]
    assert len({consent.data.digest for consent in found}) == 1
    assert all(consent.upload == found[0].upload for consent in found)


# Unlike networks, of which the study's initial model has each in a bundle of its own


def apart() -> ResolvedStudy:
    """FedDF: north trains `deep`, south the default network."""
    features = [{"name": name, "mean": 0.0, "std": 1.0} for name in ("age", "dose")]
    task = {"name": "tabular", "label": "ill", "classes": ["no", "yes"], "features": features}
    return several(task=task, algorithm={"name": "feddf"}, public_data={"digest": "c0" * 32, "rows": 10})


def offered(study: ResolvedStudy) -> pb.StudyOffer:
    start = initial_model(study)
    manifest = manifest_of(start, specs_of(start))
    digest = bytes.fromhex(study.digest(manifest.digest()))
    return pb.StudyOffer(
        study=NAME,
        revision=1,
        digest=digest,
        document=canonical.dumps(study.document()),
        initial_model=manifest_message(manifest),
        state="created",
    )


@pytest.mark.parametrize("site", ["north", "south"])
def test_an_offer_asks_a_site_for_exactly_what_its_own_network_shares(site: str, hospital: Hospital) -> None:
    hospital.study = apart()
    offer = offer_from(offered(hospital.study), site)
    described = Described.model_validate(hospital.ask("describe", study=hospital.document, site=site))
    assert offer.upload == specs_from(described.upload)
    assert {spec.bundle for spec in offer.upload} == {"model"}
    first = next(spec.shape for spec in offer.upload if spec.name == "body.layers.0.weight")
    assert first == {"north": (5, 2), "south": (4, 2)}[site]
    other = offer_from(offered(hospital.study), {"north": "south", "south": "north"}[site])
    with pytest.raises(NeedsPerson) as refused:
        refuse_other_tensors(other, described)
    assert refused.value.code == "DECLINED_MODEL_MISMATCH"
    refuse_other_tensors(offer, described)
    checked = Checked(
        digest="ab" * 32, rows=1, train_rows=0, validation_rows=1, test_rows=None, gives="columns", classes={},
        common="", weights=None, warnings=[], status=FilesStatus(data="ab" * 32, weights=""),
    )  # fmt: skip
    consent = grant(offer, described, TrainedData("", ""), checked, Person("dpo", 1), Shown("", "", 1, "", {}))
    assert consent.exposure == "coordinator"


def test_a_site_that_chose_another_network_is_told_that_the_method_does_not_take_it(hospital: Hospital) -> None:
    hospital.study = apart()
    choose(hospital, "small")
    with pytest.raises(BadData, match="averages each network by itself, so this site trains the one that the study"):
        hospital.ask("describe", study=hospital.document, site="north", data="patients")
