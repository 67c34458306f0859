"""Rounds at one hospital: what leaves, what stays, and what is the same after a restart."""

import csv
import json
import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from fl_algorithms.engine.partition import Partition, initial_model, task_of
from fl_algorithms.engine.session import SiteSession
from fl_algorithms.lab.federation import run_federation
from fl_algorithms.resolving import resolve
from fl_algorithms.server.aggregator import Round, Update, server_aggregator
from fl_algorithms.study import ResolvedStudy
from site_agent.handoff import staged
from site_agent.trainer.data.sources import digest_now, name_mapping, sources
from site_agent.trainer.rounds import installing, training
from site_agent.trainer.vault import models
from tests.fl_algorithms.toys import table_source
from tests.site_agent.trainer_world import NAME, STUDY_DIGEST, Hospital, small_study, write_table
from wardround.errors import (
    BadData,
    CannotWrite,
    NeedsPerson,
    NotPermitted,
    TryAgain,
    UsageProblem,
    WardroundError,
)
from wardround.records.study import Named
from wardround.records.trainer import Checkpoint, Progress, request_from
from wardround.tensors.files import TensorFile, file_header
from wardround.tensors.manifests import TensorSpec

CONTROL = TensorSpec("c", "F32", (2,), "control")


@pytest.fixture
def hospital(tmp_path: Path) -> Hospital:
    return Hospital.make(tmp_path)


def run(hospital: Hospital, first: int, last: int, *, restarts: bool = False) -> list[str]:
    """Train and commit these rounds; the updates' digests."""
    digests = []
    for number in range(first, last + 1):
        if restarts:
            hospital = hospital.restarted()
        digests.append(hospital.update_digest(hospital.train(number)))
        hospital.commit(number)
    return digests


def listed(hospital: Hospital) -> dict[str, Checkpoint]:
    return {row.kind: row for row in models.listing(hospital.state, NAME).checkpoints}


def test_at_a_site_that_only_evaluates_nothing_is_trained(tmp_path: Path) -> None:
    hospital = Hospital.make(tmp_path, "fedavg")
    hospital.study = small_study("fedavg", roles={"north": "evaluate"})
    with pytest.raises(NotPermitted, match="in study `small` this site only evaluates: nothing is trained") as refused:
        hospital.train(1)
    assert refused.value.code == "DECLINED_BEYOND_CONSENT"
    said = hospital.ask("check", study=hospital.document, site="north", data="patients")
    assert (said["rows"], said["train_rows"], said["validation_rows"]) == (60, 0, 60)
    described = hospital.ask("describe", study=hospital.document, site="north", data="patients")
    assert described["upload"] == []
    assert len(described["download"]) == 4
    found = [hospital.answer(hospital.round(number, "validate")) for number in (1, 2)]
    assert [(row["num_examples"], row["num_validation"]) for row in found] == [(0, 60), (0, 60)]
    assert found[0]["metrics"] != found[1]["metrics"]
    assert not list((hospital.state / "staging").glob("update*"))


def test_description_says_which_tensors_leave_and_why_the_others_stay(hospital: Hospital) -> None:
    said = hospital.ask("describe", study=hospital.document, site="north")
    assert [leaf["name"] for leaf in said["upload"]] == sorted(leaf["name"] for leaf in said["upload"])
    assert all(leaf["dtype"] == "F32" and leaf["bundle"] == "model" for leaf in said["upload"])
    kept = {stay["name"]: stay["why"] for stay in said["private"]}
    assert {name.split(".")[0] for name in kept} == {"private_extractor", "head"}
    assert all(kept.values())


def test_update_holds_exactly_the_tensors_that_were_described_in_the_order_of_the_base(hospital: Hospital) -> None:
    said = hospital.ask("describe", study=hospital.document, site="north")
    answer = hospital.train(1)
    with TensorFile(hospital.state / "staging" / answer["update"]) as update:
        with TensorFile(hospital.state / "staging" / "base-1.safetensors") as base:
            assert update.specs == base.specs
        assert [spec.name for spec in update.specs] == [leaf["name"] for leaf in said["upload"]]


def test_answer_of_a_round_has_counts_and_declared_metrics_in_the_form_that_the_study_says(hospital: Hospital) -> None:
    answer = hospital.train(1)
    assert set(answer) == {"update", "num_examples", "num_validation", "metrics", "own_loss"}
    assert (answer["num_examples"], answer["num_validation"]) == (48, 12)  # 60 rows, a fifth to validate
    assert set(answer["metrics"]) == {"val_loss", "accuracy"}
    assert answer["metrics"]["val_loss"] == f"{float(answer['own_loss']):.4g}"  # exact for this site's own gateway


def test_progress_ends_with_the_last_step(hospital: Hospital) -> None:
    steps: list[Progress] = []
    hospital.requests.answer(request_from(hospital.round(1)), steps.append)
    assert steps[-1] == Progress(step=5, steps=5)


@pytest.mark.parametrize("algorithm", ["fedavg", "fenda", "fedsoup"])
def test_rounds_with_a_restart_before_each_are_the_same_bits(tmp_path: Path, algorithm: str) -> None:
    (tmp_path / "warm").mkdir()
    (tmp_path / "cold").mkdir()
    warm = run(Hospital.make(tmp_path / "warm", algorithm), 1, 4)
    cold = run(Hospital.make(tmp_path / "cold", algorithm), 1, 4, restarts=True)
    assert warm == cold
    assert len(set(warm)) == 4


@pytest.mark.parametrize("algorithm", ["fedavg", "fenda", "fedsoup"])
def test_two_hospitals_and_the_mean_of_their_updates_reach_the_labs_model(tmp_path: Path, algorithm: str) -> None:
    hospitals = {}
    for site in ("north", "south"):
        (tmp_path / site).mkdir()
        hospitals[site] = Hospital.make(tmp_path / site, algorithm)
    study = hospitals["north"].study
    task = task_of(study)
    data = {
        site: task.load(table_source(hospital.table, hospital.test, "ill"), site=site, seed=7, validation_fraction=0.2)
        for site, hospital in hospitals.items()
    }
    lab = run_federation(study, task, data)

    base = tmp_path / "model-0"
    safetensors.torch.save_file(dict(sorted(initial_model(study).items())), base)
    for number in range(1, 5):
        updates = []
        for site, hospital in hospitals.items():
            shutil.copy(base, hospital.state / "staging" / "model.safetensors")
            with TensorFile(base) as file:
                digest, specs = file.manifest().digest(), file.specs
            answer = hospital.train(number, site=site, base="model.safetensors", base_digest=digest)
            hospital.commit(number)
            sent = TensorFile(hospital.state / "staging" / answer["update"])
            updates.append(Update(site, answer["num_examples"], sent))
        after = tmp_path / f"model-{number}"
        with TensorFile(base) as model, after.open("wb") as out:
            out.write(file_header(specs))
            server_aggregator(study, specs).aggregate(Round(number, model, updates, out.write))
        for update in updates:
            update.deltas.close()  # type: ignore[attr-defined]
        base = after
    with TensorFile(base) as file:
        assert file.manifest().digest() == lab.digest


def with_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the installed method begin a round with one tensor more than leaves."""
    real = installing.describe

    def describe(study: ResolvedStudy, site: str, chosen: str) -> Partition:
        partition = real(study, site, chosen)
        return replace(partition, download=(*partition.upload, CONTROL), exposure="coordinator")

    monkeypatch.setattr(installing, "describe", describe)


def stage_view(hospital: Hospital) -> dict[str, Any]:
    """The base of round 1 as a site downloads it then; what to ask of it."""
    tensors = {**initial_model(hospital.study), CONTROL.key: torch.ones(CONTROL.shape)}
    path = hospital.state / "staging" / "view.safetensors"
    safetensors.torch.save_file(tensors, path)
    with TensorFile(path) as file:
        return {"base": path.name, "base_digest": file.manifest().digest()}


def test_more_may_come_than_leaves_and_the_update_holds_what_leaves(
    hospital: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_control(monkeypatch)
    said = hospital.ask("describe", study=hospital.document, site="north")
    assert [row for row in said["download"] if row not in said["upload"]] == [
        {"bundle": "control", "name": "c", "dtype": "F32", "shape": [2], "bytes": 8}
    ]
    assert said["exposure"] == "coordinator"
    answer = hospital.train(1, **stage_view(hospital))
    with TensorFile(hospital.state / "staging" / answer["update"]) as update:
        assert [spec.name for spec in update.specs] == [leaf["name"] for leaf in said["upload"]]


def test_download_of_other_tensors_than_the_installed_method_begins_with_is_refused(
    hospital: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = stage_view(hospital)
    with pytest.raises(BadData, match="`control/c`, which this study does not share") as refused:
        hospital.train(1, **view)
    assert refused.value.code == "DECLINED_MODEL_MISMATCH"
    with_control(monkeypatch)
    with pytest.raises(BadData, match="the downloaded model lacks `control/c`") as refused:
        hospital.restarted().train(1)
    assert refused.value.code == "DECLINED_MODEL_MISMATCH"


def test_closing_round_of_a_study_that_fine_tunes_keeps_the_tuned_copy_too(hospital: Hospital) -> None:
    plain = hospital.study
    tuned = Named.model_validate({"name": plain.method.name, "fine_tuning": {"steps": 2}})
    hospital.study = resolve(plain.file.model_copy(update={"algorithm": tuned}))
    run(hospital, 1, 4)
    answer = hospital.ask(**hospital.round(5, "validate"))
    assert "update" not in answer
    rows = listed(hospital)
    assert list(rows) == ["best_local", "fine_tuned", "latest"]
    assert (rows["fine_tuned"].round, rows["latest"].round) == (4, 4)
    assert rows["fine_tuned"].digest != rows["latest"].digest


def test_round_asked_again_before_it_is_decided_is_not_trained_again(
    hospital: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hospital.train(1)
    again = hospital.restarted()
    monkeypatch.setattr(SiteSession, "train", lambda *_: pytest.fail("trained again"))
    assert again.train(1) == first


@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_round_whose_update_file_is_not_whole_is_trained_again_to_the_same_bits(
    hospital: Hospital, damage: str
) -> None:
    first = hospital.train(1)
    digest = hospital.update_digest(first)
    path = hospital.state / "staging" / first["update"]
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(whole[:-3] if damage == "cut" else whole[:-1] + bytes([whole[-1] ^ 1]))
    assert hospital.restarted().train(1) == first
    assert hospital.update_digest(first) == digest


def test_discarded_round_is_trained_again_from_the_state_before_it(hospital: Hospital) -> None:
    run(hospital, 1, 1)
    first = hospital.update_digest(hospital.train(2))
    hospital.discard(2)
    hospital.discard(2)
    assert hospital.update_digest(hospital.train(2)) == first


def test_committed_round_that_the_coordinator_repeats_starts_where_it_started(hospital: Hospital) -> None:
    first = run(hospital, 1, 2)
    assert hospital.update_digest(hospital.train(2)) == first[1]
    hospital.commit(2)
    assert run(hospital, 3, 3) == run(hospital.restarted(), 3, 3)


def test_committed_update_stays_in_staging_for_the_gateway_to_remove(hospital: Hospital) -> None:
    """It may have to send it again, if the coordinator repeats the round."""
    answer = hospital.train(1)
    digest = hospital.update_digest(answer)
    hospital.commit(1)
    hospital.commit(1)
    assert hospital.update_digest(answer) == digest


def test_commit_of_a_round_that_was_never_trained_is_refused(hospital: Hospital) -> None:
    run(hospital, 1, 1)
    with pytest.raises(NeedsPerson, match="update of round 2 of study `small` was accepted, but its private state"):
        hospital.commit(2)


def test_table_changed_since_approval_is_refused_with_the_command_that_approves_it(hospital: Hospital) -> None:
    run(hospital, 1, 1)
    request = hospital.round(2)
    hospital.table.write_text(hospital.table.read_text() + "50,0.1,no,Ines\n")
    with pytest.raises(BadData, match=r"data `patients` is not what was approved for study `small`") as refused:
        hospital.answer(request)
    assert refused.value.code == "DECLINED_DATA_CHANGED"
    assert refused.value.hint.startswith("`site-agent approve small --data patients`")


def test_a_mapping_changed_since_approval_is_refused_as_a_table_is(hospital: Hospital) -> None:
    mapping = hospital.table.with_name("mapping.toml")
    mapping.write_text("missing = []\n")
    named = sources(hospital.state)["patients"].model_copy(update={"mapping": str(mapping)})
    name_mapping(hospital.state, "patients", mapping, digest_now(named))
    run(hospital, 1, 1)
    request, status = hospital.round(2), hospital.ask("stat_files", data="patients")["status"]
    mapping.write_text('missing = ["50"]\n')
    assert hospital.ask("stat_files", data="patients")["status"] != status
    with pytest.raises(BadData, match=r"data `patients` is not what was approved for study `small`") as refused:
        hospital.answer(request)
    assert refused.value.code == "DECLINED_DATA_CHANGED"


def test_table_that_is_gone_is_refused_by_name(hospital: Hospital) -> None:
    request = hospital.round(1)
    hospital.table.unlink()
    with pytest.raises(BadData, match=r"train\.csv: No such file") as refused:
        hospital.answer(request)
    assert refused.value.code == "DECLINED_DATA_INVALID"


def test_data_without_a_name_here_is_refused(hospital: Hospital) -> None:
    with pytest.raises(UsageProblem, match="no data is called `others` here") as refused:
        hospital.train(1, data={"name": "others", "digest": "0" * 64})
    assert refused.value.code == "DECLINED_DATA_INVALID"
    assert refused.value.hint == "there is: patients"


def test_base_that_is_not_the_announced_model_is_refused(hospital: Hospital) -> None:
    with pytest.raises(BadData, match=r"base-1\.safetensors is not the announced model") as refused:
        hospital.train(1, base_digest="0" * 64)
    assert refused.value.code == "DECLINED_MODEL_MISMATCH"


def test_base_of_another_network_is_refused_by_the_tensors_name(hospital: Hospital, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Hospital.make(tmp_path / "other", "fedavg")
    digest = other.stage_base("base-9.safetensors")
    (other.state / "staging" / "base-9.safetensors").rename(hospital.state / "staging" / "base-9.safetensors")
    with pytest.raises(BadData, match=r"the downloaded model lacks `shared_extractor") as refused:
        hospital.train(1, base="base-9.safetensors", base_digest=digest)
    assert refused.value.code == "DECLINED_MODEL_MISMATCH"


@pytest.mark.parametrize("name", ["../base", "a/b", "", ".hidden", "a b"])
def test_name_that_could_leave_the_staging_folder_is_refused(hospital: Hospital, name: str) -> None:
    with pytest.raises(TryAgain, match='not a request `train` to the trainer: "base": string_pattern') as refused:
        hospital.train(1, base=name)
    assert refused.value.code.startswith("DECLINED_")
    with pytest.raises(BadData, match="no file name of the staging folder"):
        staged(hospital.state, name)


def test_revision_with_another_digest_is_refused(hospital: Hospital) -> None:
    run(hospital, 1, 1)
    with pytest.raises(BadData, match="revision 1 of study `small` was begun with digest 5d5d5d5d5d5d…"):
        hospital.train(2, study_digest="0" * 64)


def test_new_revision_starts_fresh_in_a_folder_of_its_own(hospital: Hospital) -> None:
    first = run(hospital, 1, 2)
    assert hospital.update_digest(hospital.train(1, revision=2, study_digest="0" * 64)) == first[0]
    assert {path.name for path in (hospital.state / "studies" / NAME).iterdir()} == {"1", "2"}


def test_study_resolved_by_another_version_is_refused(hospital: Hospital) -> None:
    document = hospital.document
    del document["algorithm" if "start_after" in document["algorithm"] else "model"]["dropout"]
    with pytest.raises(BadData, match="study `small` was written for another version") as refused:
        hospital.train(1, study=document)
    assert refused.value.code == "DECLINED_MODEL_MISMATCH"


def test_full_disk_is_found_before_the_training(hospital: Hospital, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "RESERVED_BYTES", 1 << 60)
    monkeypatch.setattr(SiteSession, "train", lambda *_: pytest.fail("trained"))
    with pytest.raises(CannotWrite, match=r"staging has \d+ MiB free, a round needs \d+ MiB") as refused:
        hospital.train(1)
    assert refused.value.code == "DECLINED_RESOURCES"


def test_damaged_private_state_is_refused_by_name_and_deleting_it_goes_back_one_round(
    hospital: Hospital, caplog: pytest.LogCaptureFixture
) -> None:
    run(hospital, 1, 2)
    kept = next((hospital.state / "studies" / NAME / "1").glob("state-00002-*.safetensors"))
    kept.write_bytes(kept.read_bytes()[:-1] + b"\x00")
    with pytest.raises(NeedsPerson, match=r"state-00002-\w+\.safetensors is damaged: its SHA-256 is") as refused:
        hospital.restarted().train(3)
    assert refused.value.hint.endswith("to go on from the state before it, delete it")
    assert refused.value.code == "DECLINED_TRAINING_FAILED"
    kept.unlink()
    with caplog.at_level(logging.WARNING):
        hospital.restarted().train(3)
    assert "was deleted: round 3 goes on without it" in caplog.text


def test_round_older_than_what_is_kept_is_refused(hospital: Hospital) -> None:
    run(hospital, 1, 4)
    with pytest.raises(NeedsPerson, match="round 2 of study `small` was asked again, but the oldest private state"):
        hospital.train(2)


def test_closing_round_tells_metrics_and_no_update(hospital: Hospital) -> None:
    run(hospital, 1, 4)
    answer = hospital.answer(hospital.round(5, "validate"))
    assert set(answer) == {"num_examples", "num_validation", "metrics", "own_loss"}  # the last one for its gateway
    hospital.commit(5)
    assert listed(hospital)["latest"].round == 4


def test_cards_say_where_a_model_comes_from_and_in_the_end_who_contributed(hospital: Hospital) -> None:
    run(hospital, 1, 2)
    fields = {key: hospital.round(3)[key] for key in ("study", "revision", "study_digest", "site", "data")}
    contributors = {"north": [1, 2], "south": [1]}
    limited = {"capped": {"north": [2]}, "left_out": {"south": [2]}}
    assert hospital.ask("finish", **fields, best=None, contributors=contributors, **limited) == {}
    row = listed(hospital)["latest"]
    folder = Path(row.path).parent
    card = json.loads((folder / "card.json").read_text())
    assert card["study_digest"] == STUDY_DIGEST
    assert card["contributors"] == contributors
    assert {key: card[key] for key in limited} == limited
    assert card["torch"] == torch.__version__
    assert (card["device"], card["threads"], card["split"], card["metric"]) == ("cpu", 1, "test", "accuracy")
    assert card["data_digest"] == sources(hospital.state)["patients"].digest
    with TensorFile(Path(row.path)) as model:
        assert json.loads(model.note["card"]) == card
        assert model.manifest().digest() == row.digest == card["model_digest"]


def test_best_global_model_is_kept_where_the_method_has_one(tmp_path: Path) -> None:
    hospital = Hospital.make(tmp_path, "fedavg")
    run(hospital, 1, 4)
    hospital.stage_base("best.safetensors", 1 / 3)
    fields = {key: hospital.round(5)[key] for key in ("study", "revision", "study_digest", "site", "data")}
    best = {"round": 2, "file": "best.safetensors"}
    hospital.ask("finish", **fields, best=best)
    rows = listed(hospital)
    hospital.restarted().ask("finish", **fields, best=best)
    again = listed(hospital)
    assert set(rows) == {"best_local", "latest", "best_global"}
    assert rows["best_global"].round == 2
    assert {kind: row.digest for kind, row in again.items()} == {kind: row.digest for kind, row in rows.items()}


def test_a_site_trains_alone_beside_and_selects_in_the_end_what_it_uses(tmp_path: Path) -> None:
    """Killed after each round; the selected model is what ``predict`` is asked for unless a person says otherwise."""
    hospital = Hospital.make(tmp_path, "fedavg")
    hospital.study = hospital.study.changed(checkpoints={"alone": True, "selection": "hedged"})
    (tmp_path / "plain").mkdir()
    plain = Hospital.make(tmp_path / "plain", "fedavg")
    assert run(hospital, 1, 4, restarts=True) == run(plain, 1, 4), "what leaves is what it was"
    hospital.answer(hospital.round(5, "validate"))
    hospital.commit(5)
    hospital.stage_base("best.safetensors", 1 / 3)
    fields = {key: hospital.round(5)[key] for key in ("study", "revision", "study_digest", "site", "data")}
    hospital.restarted().ask("finish", **fields, best={"round": 2, "file": "best.safetensors"})
    rows = listed(hospital)
    assert set(rows) == {"selected", "best_local", "latest", "best_global", "alone"}
    assert rows["selected"].why.split(":")[0] in ("best_global", "best_local", "latest", "alone") or (
        " and alone:" in rows["selected"].why
    )
    out = tmp_path / "out.csv"
    hospital.ask("predict", study=NAME, checkpoint="selected", table=str(hospital.test), out=str(out))
    with hospital.test.open() as truth, out.open() as found:
        pairs = list(zip(csv.DictReader(truth), csv.DictReader(found), strict=True))
    right = sum((row["ill"] == "yes") == (float(said["probability_yes"]) > 0.5) for row, said in pairs)
    assert right / len(pairs) == rows["selected"].score


def test_a_loss_that_is_not_finite_declines_the_round_by_a_code_and_leaves_no_update(hospital: Hospital) -> None:
    request = hospital.round(1)
    request["base_digest"] = hospital.stage_base(request["base"], scale=3.4e38)  # finite, as a gateway lets it through
    with pytest.raises(BadData) as refused:
        hospital.answer(request)
    assert refused.value.message == "the loss is not finite in the first batch already"
    assert refused.value.code == "DECLINED_TRAINING_FAILED"
    assert [path.name for path in (hospital.state / "staging").iterdir()] == [request["base"]]


@pytest.mark.parametrize("kind", ["latest", "best_local"])
def test_predictions_for_the_test_table_have_the_checkpoints_own_score(
    hospital: Hospital, tmp_path: Path, kind: str
) -> None:
    run(hospital, 1, 3)
    out = tmp_path / "out.csv"
    said = hospital.ask("predict", study=NAME, checkpoint=kind, table=str(hospital.test), out=str(out))
    (note,) = said.pop("notes")
    assert said == {"rows": 20, "out": str(out)}
    with hospital.test.open() as truth, out.open() as found:
        pairs = list(zip(csv.DictReader(truth), csv.DictReader(found), strict=True))
    assert [int(row["line"]) for _, row in pairs] == list(range(2, 22))
    for _, row in pairs:
        assert float(row["probability_no"]) + float(row["probability_yes"]) == pytest.approx(1, abs=2e-6)
    likely = ["yes" if float(said["probability_yes"]) > 0.5 else "no" for _, said in pairs]
    right = sum(row["ill"] == likelier for (row, _), likelier in zip(pairs, likely, strict=True))
    assert right / len(pairs) == listed(hospital)[kind].score
    found = re.fullmatch(
        r"`yes` is predicted from a probability of (0\.[0-9]+) on, chosen on this site's 12 validation rows for the "
        r"best balanced accuracy",
        note,
    )
    assert found is not None
    for _, row in pairs:
        assert (row["predicted"] == "yes") is (float(row["probability_yes"]) >= float(found[1]))


def test_predictions_do_not_need_the_training_table(hospital: Hospital, tmp_path: Path) -> None:
    run(hospital, 1, 2)
    hospital.table.unlink()
    table = tmp_path / "new.csv"
    table.write_text("dose,age\n0.5,70\n")
    assert (
        hospital.ask("predict", study=NAME, checkpoint="latest", table=str(table), out=str(tmp_path / "o"))["rows"] == 1
    )


def test_predictions_never_replace_the_table_itself(hospital: Hospital) -> None:
    run(hospital, 1, 2)
    with pytest.raises(UsageProblem, match=r"test\.csv is the table itself"):
        hospital.ask("predict", study=NAME, checkpoint="latest", table=str(hospital.test), out=str(hospital.test))


def test_check_says_what_the_study_would_make_of_a_table(hospital: Hospital) -> None:
    said = hospital.ask("check", study=hospital.document, site="north", data="patients")
    assert (said["rows"], said["train_rows"], said["validation_rows"], said["test_rows"]) == (60, 48, 12, 20)
    assert sum(said["classes"].values()) == 60
    assert said["warnings"] == []
    write_table(hospital.table, 30, seed=3)
    said = hospital.ask("check", study=hospital.document, site="north", data="patients")
    assert (
        "the files of `patients` have changed since `data add`; approving pins them as they are now" in said["warnings"]
    )


def test_check_of_a_table_that_the_study_cannot_use_is_a_data_error(hospital: Hospital) -> None:
    hospital.table.write_text("age,ill\n50,no\n")
    with pytest.raises(BadData, match="no column `dose`") as refused:
        hospital.ask("check", study=hospital.document, site="north", data="patients")
    assert refused.value.code == "DECLINED_DATA_INVALID"


def test_what_a_library_says_stays_in_the_hospitals_log(
    hospital: Hospital, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("value 71.3 of Ines")

    monkeypatch.setattr(SiteSession, "train", fail)
    with pytest.raises(WardroundError) as failed:
        hospital.train(1)
    assert (failed.value.message, failed.value.code) == ("the trainer failed at `train`", "DECLINED_TRAINING_FAILED")
    assert "71.3" in caplog.text


def test_running_out_of_memory_is_declined_for_resources(hospital: Hospital, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(SiteSession, "train", fail)
    with pytest.raises(TryAgain, match="there is not enough memory for this") as failed:
        hospital.train(1)
    assert failed.value.code == "DECLINED_RESOURCES"


def test_round_that_failed_halfway_is_trained_anew_from_the_kept_state(
    hospital: Hospital, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    whole = run(Hospital.make(tmp_path / "other"), 1, 2)
    run(hospital, 1, 1)
    request = hospital.round(2)

    def stop(_: object) -> None:
        raise RuntimeError("interrupted in the middle of the steps")

    monkeypatch.setattr("site_agent.trainer.requests._throttled", lambda _: lambda *_: stop(None))
    with pytest.raises(WardroundError):
        hospital.answer(request)
    monkeypatch.undo()
    assert hospital.update_digest(hospital.train(2)) == whole[1]


def test_unknown_request_is_refused(hospital: Hospital) -> None:
    with pytest.raises(TryAgain, match='the trainer knows no request "fly"'):
        hospital.ask("fly")


def test_site_without_torch_is_told_what_to_install(hospital: Hospital, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "site_agent.trainer.rounds.training", None)

    class Missing(ModuleNotFoundError):
        name = "torch"

    monkeypatch.setattr("builtins.__import__", _refusing(__import__, Missing("No module named 'torch'")))
    with pytest.raises(NeedsPerson, match="torch is not installed here") as refused:
        hospital.ask("describe", study=small_study().document(), site="north")
    assert refused.value.hint == "pip install 'wardround[site]'"


def _refusing(really, error):  # type: ignore[no-untyped-def]
    def importing(name, *args, **kwargs):  # type: ignore[no-untyped-def]
        if name == "site_agent.trainer.rounds.training":
            raise error
        return really(name, *args, **kwargs)

    return importing
