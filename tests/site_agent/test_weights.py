"""A site's own weights: a file that a hospital names, which the tensors that stay begin with, pinned by the consent."""

import hashlib
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner, Result

from fl_algorithms.engine import weights as files
from fl_algorithms.engine.algorithm import algorithm_of
from fl_algorithms.engine.partition import all_tensors, build, describe, task_of
from fl_algorithms.engine.session import SiteSession
from fl_algorithms.resolving import resolve
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.source import Source
from site_agent.audit.show import words
from site_agent.cli import data
from site_agent.state.consent import TrainedData
from site_agent.state.directory import Offer, Site, SiteState
from site_agent.trainer.data import sources
from tests.fl_algorithms.toys import start_of
from tests.site_agent.site_world import DPO, STUDY, SiteWorld
from tests.site_agent.trainer_world import NAME, STUDY_DIGEST, Hospital, small_study
from wardround.errors import BadData
from wardround.records.ledger.lines import Line
from wardround.records.study import StudyFile
from wardround.tensors.files import TensorFile
from wardround.tensors.manifests import Manifest

app = typer.Typer()
app.add_typer(data.data_app, name="data")


@pytest.fixture
def hospital(tmp_path: Path) -> Hospital:
    return Hospital.make(tmp_path)


def networks_of(study: ResolvedStudy) -> dict[str, Tensor]:
    return all_tensors(build(study, task_of(study), algorithm_of(study), "north"))


def private(study: ResolvedStudy) -> list[str]:
    return [tensor.name for tensor in describe(study, "north").private]


def pretrained(study: ResolvedStudy, seed: int = 1) -> dict[str, Tensor]:
    """A whole network of the study's form with other numbers."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=draw) if tensor.is_floating_point() else tensor.clone()
        for name, tensor in networks_of(study).items()
    }


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def name_weights(hospital: Hospital, tensors: dict[str, Tensor]) -> Path:
    path = hospital.table.with_name("pretrained.safetensors")
    safetensors.torch.save_file(tensors, path)
    known = sources.sources(hospital.state)["patients"]
    sources.add(hospital.state, "patients", known.model_copy(update={"weights": str(path)}), replace=True)
    return path


def train(hospital: Hospital, number: int, weights: str) -> dict[str, Any]:
    approved = {**hospital.round(number)["data"], **({"weights": weights} if weights else {})}
    return hospital.train(number, data=approved)


def deltas(hospital: Hospital, answer: dict[str, Any]) -> dict[str, Tensor]:
    with TensorFile(hospital.state / "staging" / answer["update"]) as update:
        return {
            spec.key: torch.from_numpy(update.block(spec.key, 0, spec.bytes // 4).copy()).reshape(spec.shape)
            for spec in update.specs
        }


def give(hospital: Hospital, *words: str | Path) -> Result:
    result = CliRunner().invoke(app, [*map(str, words), "--state", str(hospital.state)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_private_tensors_begin_with_the_file_and_shared_ones_with_the_download(hospital: Hospital) -> None:
    study, tensors = hospital.study, pretrained(hospital.study)
    path = name_weights(hospital, tensors)
    answer = train(hospital, 1, sha256(path))
    task = task_of(study)
    files_ = Source({"table": hospital.table, "test": hospital.test}, "ill")
    fraction = study.checkpoints.validation_fraction
    found = task.load(files_, site="north", seed=study.study.seed, validation_fraction=fraction)
    own = {name: tensors[name] for name in private(study)}
    expected = SiteSession(study, "north", task, found, own=own).train(1, start_of(study)).uplink["model"]
    sent = deltas(hospital, answer)
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[name], expected[name]) for name in sent)
    drawn = SiteSession(study, "north", task, found).train(1, start_of(study)).uplink["model"]
    assert any(not torch.equal(sent[name], drawn[name]) for name in sent)


def test_a_session_begins_with_its_own_tensors_exactly(hospital: Hospital) -> None:
    study, tensors = hospital.study, pretrained(hospital.study)
    task = task_of(study)
    found = task.load(
        Source({"table": hospital.table}, "ill"), site="north", seed=study.study.seed, validation_fraction=0.2
    )
    own = {name: tensors[name] for name in private(study)}
    kept = SiteSession(study, "north", task, found, own=own).export_state().tensors
    assert {name.removeprefix("private/") for name in kept if name.startswith("private/")} == own.keys()
    assert all(torch.equal(kept[f"private/{name}"], tensor) for name, tensor in own.items())


def test_the_file_is_read_before_the_first_round_alone(hospital: Hospital) -> None:
    path = name_weights(hospital, pretrained(hospital.study))
    approved = sha256(path)
    train(hospital, 1, approved)
    hospital.commit(1)
    path.unlink()
    warm = hospital.update_digest(train(hospital, 2, approved))
    hospital.discard(2)
    assert hospital.update_digest(train(hospital.restarted(), 2, approved)) == warm


def test_other_weights_than_the_approved_decline_until_approved_again(hospital: Hospital) -> None:
    path = name_weights(hospital, pretrained(hospital.study))
    approved = sha256(path)
    before = hospital.update_digest(train(hospital, 1, approved))
    hospital.discard(1)
    safetensors.torch.save_file(pretrained(hospital.study, seed=2), path)
    found = sha256(path)
    with pytest.raises(BadData) as refused:
        train(hospital.restarted(), 1, approved)
    assert (refused.value.message, refused.value.code) == (
        f"the weights that data `patients` names are not what was approved for study `{NAME}`: digest {found[:12]}…, "
        f"{approved[:12]}… was approved",
        "DECLINED_DATA_CHANGED",
    )
    assert refused.value.hint == f"`site-agent approve {NAME} --data patients` if the change is meant"
    with pytest.raises(BadData, match=r"digest .*, none was approved"):
        train(hospital, 1, "")
    assert hospital.update_digest(train(hospital, 1, found)) != before


def test_weights_that_are_no_longer_named_or_are_gone_decline(hospital: Hospital) -> None:
    path = name_weights(hospital, pretrained(hospital.study))
    approved = sha256(path)
    path.unlink()
    with pytest.raises(BadData, match="No such file") as gone:
        train(hospital, 1, approved)
    assert gone.value.code == "DECLINED_DATA_INVALID"
    hospital.name_data()
    with pytest.raises(BadData, match=r"none, .* was approved") as unnamed:
        train(hospital, 1, approved)
    assert unnamed.value.code == "DECLINED_DATA_CHANGED"


def test_an_undecided_round_is_not_answered_with_an_update_of_other_weights(hospital: Hospital) -> None:
    first = hospital.update_digest(train(hospital, 1, sha256(name_weights(hospital, pretrained(hospital.study)))))
    path = name_weights(hospital, pretrained(hospital.study, seed=2))
    assert hospital.update_digest(train(hospital, 1, sha256(path))) != first


@pytest.mark.parametrize("command", ["describe", "check"])
def test_what_of_the_file_is_used_is_said(hospital: Hospital, command: str) -> None:
    """Of the private tensors one is not in the file; shared and unknown ones are not used, whatever their shapes."""
    names = private(hospital.study)
    shared = sorted(networks_of(hospital.study).keys() - set(names))
    tensors = {name: tensor for name, tensor in pretrained(hospital.study).items() if name in names[1:]}
    path = name_weights(hospital, {**tensors, shared[0]: torch.zeros(1), "fc.weight": torch.zeros(2)})
    said = hospital.ask(command, study=hospital.document, site="north", data="patients")["weights"]
    assert said == {
        "digest": sha256(path), "used": len(names) - 1, "drawn": [names[0]], "unused": sorted([shared[0], "fc.weight"]),
    }  # fmt: skip
    assert hospital.ask("describe", study=hospital.document, site="north")["weights"] is None


def test_a_tensor_that_does_not_fit_is_refused_by_its_name(hospital: Hospital) -> None:
    name = private(hospital.study)[0]
    wanted = networks_of(hospital.study)[name]
    for value, said in (
        (torch.zeros(9), rf"`{name}` is F32 \[9\], the study's is F32 "),
        (wanted.double(), rf"`{name}` is F64 .*, the study's is F32"),
        (torch.full_like(wanted, torch.inf), rf"{wanted.numel()} of the {wanted.numel()} numbers of `{name}` are nan"),
    ):
        name_weights(hospital, {**pretrained(hospital.study), name: value})
        with pytest.raises(BadData, match=said) as refused:
            hospital.ask("check", study=hospital.document, site="north", data="patients")
        assert refused.value.code == "DECLINED_DATA_INVALID"


def test_a_file_of_shared_tensors_alone_is_refused(hospital: Hospital) -> None:
    shared = {
        name: tensor for name, tensor in pretrained(hospital.study).items() if name not in private(hospital.study)
    }
    name_weights(hospital, shared)
    said = f"none of its {len(shared)} tensors is one that stays here in study `{NAME}`"
    with pytest.raises(BadData, match=said) as refused:
        hospital.ask("check", study=hospital.document, site="north", data="patients")
    assert private(hospital.study)[0] in refused.value.hint
    whole = replace(hospital, study=small_study("fedavg"))
    with pytest.raises(BadData, match="is one that stays here") as nothing:
        whole.ask("check", study=whole.document, site="north", data="patients")
    assert "without `--weights`" in nothing.value.hint


def test_a_method_that_begins_alike_at_every_site_takes_no_weights_of_one(hospital: Hospital) -> None:
    tables = small_study("fedavg").file.model_dump()
    tables |= {"algorithm": {"name": "fedbabu"}}
    tables["training"]["init_private"] = "common"
    alike = replace(hospital, study=resolve(StudyFile.model_validate(tables)))
    name_weights(hospital, {"head.weight": torch.zeros(1, 4)})
    with pytest.raises(BadData, match="algorithm `fedbabu` needs the same initial weights at every site"):
        alike.ask("check", study=alike.document, site="north", data="patients")


def test_only_whole_safetensors_of_bounded_size_are_read(hospital: Hospital, monkeypatch: pytest.MonkeyPatch) -> None:
    path = name_weights(hospital, pretrained(hospital.study))
    torch.save(pretrained(hospital.study), path)
    with pytest.raises(BadData, match="not a safetensors file, or damaged") as refused:
        hospital.ask("check", study=hospital.document, site="north", data="patients")
    assert "pickles are never read" in refused.value.hint
    with pytest.raises(BadData, match="is no file"):
        files.read(path.parent)
    monkeypatch.setattr(files, "MAX_BYTES", 1 << 20)
    path.write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(BadData, match=r"has 1 MiB; a file of weights may have 1$"):
        files.read(path)


def test_data_add_names_the_weights_and_data_list_shows_them_and_the_public_data_set(hospital: Hospital) -> None:
    path = hospital.table.with_name("w.safetensors")
    words = ("data", "add", "patients", "--table", hospital.table, "--label", "ill", "--weights", path, "--replace")
    with pytest.raises(BadData, match=r"w\.safetensors: No such file"):
        give(hospital, *words)
    safetensors.torch.save_file(pretrained(hospital.study), path)
    assert f"Weights: SHA-256 {sha256(path)}" in give(hospital, *words).stderr
    written = tomllib.loads((hospital.state / "data.toml").read_text())["patients"]
    found = sources.source(hospital.state, "patients")
    assert (written["weights"], written["digest"]) == (str(path), sources.digest_now(found))
    give(hospital, "data", "public-data", "patients", "/srv/public_data.csv")
    said = give(hospital, "data", "list").stdout
    assert f"weights {path}" in said
    assert "public data set /srv/public_data.csv" in said
    listed = json.loads(give(hospital, "data", "list", "--json").stdout)["data"][0]
    assert (listed["public_data"], listed["weights"]) == ("/srv/public_data.csv", str(path))


def test_data_check_says_what_begins_with_the_weights(hospital: Hospital) -> None:
    state = SiteState(hospital.state)
    state.save_offer(Offer(NAME, 1, STUDY_DIGEST, "waiting", hospital.document, Manifest(())))
    state.save_site(Site("north", "demo", "127.0.0.1:1", "00", "00", 0))
    path = name_weights(hospital, {name: pretrained(hospital.study)[name] for name in private(hospital.study)[:2]})
    said = give(hospital, "data", "check", "patients", "--study", NAME).stdout
    assert f"2 of the tensors that stay here begin with the weights of SHA-256 {sha256(path)}" in said
    assert f"not in the file: {private(hospital.study)[2]}" in said


def test_consent_and_ledger_have_network_public_data_set_and_weights_and_the_coordinator_hears_of_none(
    world: SiteWorld,
) -> None:
    world.ready()
    assert world.trainer is not None
    plain = world.lines("consent")[-1]
    assert not {"network", "common_digest", "weights_digest"} & plain.keys()
    world.trainer.network, world.trainer.common = "the-smallest", "c0" * 32
    world.trainer.weights = {"digest": "3e" * 32, "used": 1, "drawn": [], "unused": ["fc.weight"]}
    told: list[str] = []
    assert world.agent is not None
    consent = world.agent.commands.approve(STUDY, "patients", world.shown(), DPO, told.append)
    assert consent.data == TrainedData("patients", "ab" * 32, "the-smallest", "c0" * 32, "3e" * 32)
    change = f"its own tensors begin with the weights {'3e' * 6}…, approved was: what the study's seed draws"
    assert f"changed since it was approved: {change}" in told
    assert any("3e" * 32 in line and "not used: fc.weight" in line for line in told)
    line = world.lines("consent")[-1]
    assert (line["network"], line["common_digest"], line["weights_digest"]) == ("the-smallest", "c0" * 32, "3e" * 32)
    assert (
        words(Line.from_document(line)) == f"{STUDY} approved by {DPO.name}, network the-smallest, weights {'3e' * 6}"
    )
    assert world.agent.approved(consent)
    world.coordinator.assign(STUDY, 1)
    world.coordinator.wait_receipts(1)
    (asked,) = world.trainer.wait_asked("train")
    assert asked["data"] == {"name": "patients", "digest": "ab" * 32, "network": "the-smallest", "weights": "3e" * 32}
    world.trainer.wait_asked("commit")
    world.agent.stop()
    world.agent = None
    verdict = world.verdict()
    assert verdict.ok, verdict
    everything = b"\n".join(world.coordinator.heard)
    assert STUDY.encode() in everything
    for secret in (b"the-smallest", b"3e" * 32, bytes.fromhex("3e" * 32), b"fc.weight"):
        assert secret not in everything
