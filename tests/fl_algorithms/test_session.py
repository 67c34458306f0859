"""A site's rounds: what leaves, what stays, what is kept, and that a restart changes no bit."""

import json
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fl_algorithms import registry
from fl_algorithms.engine.algorithm import Algorithm, Context, Share, compute_logits
from fl_algorithms.engine.encoding import arrived
from fl_algorithms.engine.judging import validation_loss
from fl_algorithms.engine.partition import DTYPES, describe, initial_model, specs_of, task_of
from fl_algorithms.engine.session import Restored, SessionState
from fl_algorithms.engine.training import Diverged
from fl_algorithms.resolving import resolve
from fl_algorithms.settings.targets import CLASS_METRICS
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import SiteData, Split
from tests import reference
from tests.fl_algorithms.toys import FENDA, TWO_NETWORKS, plus, session_of, start_of, study_tables, toy_data, toy_study
from wardround.errors import BadData
from wardround.records.study import StudyFile
from wardround.tensors.manifests import TensorSpec

METHODS = ["fedavg", "fenda", "fedsoup", "silo", "two-networks"]


@pytest.fixture(autouse=True)
def _two_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.METHODS, "two-networks", TWO_NETWORKS)  # type: ignore[arg-type]


def run_rounds(study: ResolvedStudy, *, restart: bool) -> tuple[list[Any], SessionState]:
    """Every round of a federation of one site; with ``restart``, each in a session of its own."""
    session, base, results = session_of(study), start_of(study), []
    for round_number in range(1, study.study.rounds + 1):
        if restart and round_number > 1:
            state = session.export_state()
            state = SessionState(state.tensors, json.loads(json.dumps(state.meta)))
            session = session_of(study, state=state)
        results.append(session.train(round_number, base))
        uplink = arrived(study.encoding, upload_of(study), results[-1].uplink)
        base = plus(base, replace(results[-1], uplink=uplink))
    results.append(session.validate(study.study.rounds + 1, base))
    return results, session.export_state()


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("iterator", ["round", "run"])
@pytest.mark.parametrize("lifetime", ["round", "run"])
@pytest.mark.parametrize("algorithm", METHODS)
def test_save_restart_and_resume_equals_an_uninterrupted_run(algorithm: str, lifetime: str, iterator: str) -> None:
    study = toy_study(algorithm, rounds=4, iterator=iterator, optimizer_lifetime=lifetime)
    whole, whole_state = run_rounds(study, restart=False)
    parts, parts_state = run_rounds(study, restart=True)
    for one, other in zip(whole, parts, strict=True):
        assert one.metrics == other.metrics
        for bundle in one.uplink:
            assert same_bits(one.uplink[bundle], other.uplink[bundle])
        for mine, theirs in zip(one.checkpoints, other.checkpoints, strict=True):
            assert (mine.kind, mine.round, mine.score, mine.val_loss) == (
                theirs.kind, theirs.round, theirs.score, theirs.val_loss,
            )  # fmt: skip
            assert same_bits(mine.tensors, theirs.tensors)
    assert whole_state.meta == parts_state.meta
    assert same_bits(whole_state.tensors, parts_state.tensors)


ENCODINGS = [{"name": "bfloat16"}, {"name": "int8", "block": 8}, {"name": "topk", "fraction": 0.3}]


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda encoding: str(encoding["name"]))
def test_what_an_encoding_leaves_out_survives_a_restart_and_is_never_lost(encoding: dict[str, Any]) -> None:
    study = encoded_study("fedavg", encoding)
    whole, whole_state = run_rounds(study, restart=False)
    parts, parts_state = run_rounds(study, restart=True)
    for one, other in zip(whole, parts, strict=True):
        assert one.uplink.keys() == other.uplink.keys()
        assert all(same_bits(one.uplink[bundle], other.uplink[bundle]) for bundle in one.uplink)
    assert same_bits(whole_state.tensors, parts_state.tensors)
    left = [key for key in whole_state.tensors if key.startswith("rest/")]
    assert any(whole_state.tensors[key].any() for key in left)

    session, start = session_of(study), start_of(study)
    first = session.train(1, start)
    specs = upload_of(study)
    sent = arrived(study.encoding, specs, first.uplink)
    rest = session.export_state().tensors
    computed = session_of(encoded_study("fedavg", {"name": "float32"})).train(1, start).uplink
    for spec in specs:  # what left and what is kept are together what was computed
        kept = rest.get(f"rest/{spec.key}", torch.zeros(spec.shape))
        assert torch.allclose(sent["model"][spec.name] + kept, computed["model"][spec.name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda encoding: str(encoding["name"]))
def test_an_encoding_leaves_exactly_what_is_described_and_without_feedback_keeps_nothing(
    encoding: dict[str, Any],
) -> None:
    study = encoded_study("fenda", {**encoding, "error_feedback": False})
    session = session_of(study)
    uplink = session.train(1, start_of(study)).uplink
    described = describe(study, "ash")
    assert {
        (bundle, name, tuple(tensor.shape), DTYPES[tensor.dtype])
        for bundle, tensors in uplink.items()
        for name, tensor in tensors.items()
    } == {(spec.bundle, spec.name, spec.shape, spec.dtype) for spec in described.upload}
    assert not any(key.startswith("rest/") for key in session.export_state().tensors)
    assert not any(row.name.startswith("rest/") for row in described.private)
    kept = describe(encoded_study("fenda", encoding), "ash").private
    assert "what an update leaves out, for the next" in {row.why for row in kept}


def encoded_study(algorithm: str, encoding: dict[str, Any]) -> ResolvedStudy:
    file = StudyFile.model_validate({**study_tables(algorithm), "encoding": encoding})
    return resolve(file, lab=True)


def upload_of(study: ResolvedStudy) -> tuple[TensorSpec, ...]:
    """The float32 tensors that a site says the values of."""
    return tuple(specs_of(initial_model(study)))


def test_a_round_that_is_run_again_gives_the_same_bits() -> None:
    study = toy_study("fenda")
    session = session_of(study)
    state = session.export_state()
    first = session.train(1, start_of(study))
    again = session_of(study, state=state).train(1, start_of(study))
    assert same_bits(first.uplink["model"], again.uplink["model"])


@pytest.mark.parametrize("algorithm", METHODS)
def test_what_leaves_is_exactly_what_was_described(algorithm: str) -> None:
    study = toy_study(algorithm)
    partition = describe(study, "ash")
    uplink = session_of(study).train(1, start_of(study)).uplink
    sent = [
        TensorSpec(name, "F32", tuple(delta.shape), bundle)
        for bundle, deltas in uplink.items()
        for name, delta in deltas.items()
    ]
    assert sorted(sent, key=lambda spec: spec.key) == list(partition.upload)
    assert list(initial_model(study)) == [spec.key for spec in partition.upload]
    assert all(delta.is_contiguous() and not delta.requires_grad for part in uplink.values() for delta in part.values())
    upload_specs = {spec.key for spec in partition.upload}
    assert not upload_specs & {stay.name for stay in partition.private}


def test_only_the_shared_extractor_of_fenda_leaves() -> None:
    partition = describe(toy_study("fenda"), "ash")
    assert [spec.name for spec in partition.upload] == [
        "shared_extractor.layers.0.bias", "shared_extractor.layers.0.weight",
    ]  # fmt: skip
    assert {stay.name.partition(".")[0] for stay in partition.private} == {"private_extractor", "head"}
    assert {stay.why for stay in partition.private} == {"private in fenda"}


def test_the_soup_is_described_as_staying() -> None:
    private = describe(toy_study("fedsoup"), "ash").private
    assert {stay.name for stay in private} == {
        "soup.body.layers.0.weight", "soup.body.layers.0.bias", "soup.head.weight", "soup.head.bias",
    }  # fmt: skip
    assert {(stay.dtype, stay.why) for stay in private} == {("F64", "kept by fedsoup")}


def test_an_integer_buffer_never_leaves_whatever_the_names_say() -> None:
    networks = {"model": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))}
    assert "1.num_batches_tracked" in networks["model"].state_dict()
    assert list(Share().tensors(networks)) == [
        "0.bias", "0.weight", "1.bias", "1.running_mean", "1.running_var", "1.weight",
    ]  # fmt: skip


def test_private_parts_start_different_at_each_site_and_shared_parts_alike() -> None:
    study = toy_study("fenda")
    starts = [session_of(study, site).export_state().tensors for site in ("ash", "birch")]
    assert not torch.equal(starts[0]["private/head.weight"], starts[1]["private/head.weight"])
    common = toy_study("fenda", init_private="common")
    starts = [session_of(common, site).export_state().tensors for site in ("ash", "birch")]
    assert same_bits(*starts)


def test_the_initial_model_is_the_seeds_and_no_sites() -> None:
    assert same_bits(initial_model(toy_study()), initial_model(toy_study()))
    assert not same_bits(initial_model(toy_study()), initial_model(toy_study(seed=6)))


def test_zero_steps_leave_the_model_as_it_was() -> None:
    study = toy_study(local_steps=0)
    result = session_of(study).train(1, start_of(study))
    assert all(not delta.any() for delta in result.uplink["model"].values())


def test_an_epoch_is_every_batch_once() -> None:
    told: list[tuple[int, int]] = []
    study = toy_study(local_epochs=2)
    session_of(study).train(1, start_of(study), lambda done, total: told.append((done, total)))
    assert told[-1] == (12, 12)  # 22 rows in batches of 4, twice


def test_one_site_of_fenda_is_local_training_of_the_same_network() -> None:
    """Bitwise in the first round; then each weight has passed through a float32 delta."""
    fenda, silo = (toy_study(algorithm, FENDA, init_private="common") for algorithm in ("fenda", "silo"))
    federated, alone = session_of(fenda), session_of(silo)
    start = start_of(fenda)
    result = federated.train(1, start)
    alone.train(1, start_of(silo))
    state, private = alone.export_state().tensors, federated.export_state().tensors
    for name, delta in result.uplink["model"].items():
        assert torch.equal(delta, state[f"private/{name}"] - start["model"][name])
    for name in ("private/head.weight", "private/private_extractor.layers.0.weight"):
        assert torch.equal(private[name], state[name])
    base = start
    for round_number in (2, 3):
        base = plus(base, result)
        result = federated.train(round_number, base)
        alone.train(round_number, start_of(silo))
    shared = plus(base, result)["model"]
    for name, tensor in alone.export_state().tensors.items():
        if name.startswith("private/shared"):
            torch.testing.assert_close(shared[name.removeprefix("private/")], tensor, rtol=1e-4, atol=1e-5)


def test_the_uplink_is_a_copy_and_the_download_is_never_written() -> None:
    study = toy_study()
    session, start = session_of(study), start_of(study)
    before = {name: tensor.clone() for name, tensor in start["model"].items()}
    uplink = session.train(1, start).uplink["model"]
    kept = {name: delta.clone() for name, delta in uplink.items()}
    session.train(2, start)
    assert same_bits(uplink, kept)
    assert same_bits(dict(start["model"]), before)


def test_the_initial_model_is_judged_but_is_no_checkpoint() -> None:
    study = toy_study()
    result = session_of(study).train(1, start_of(study))
    assert result.metrics["val_loss"] is not None
    assert set(result.metrics) == {"val_loss", *CLASS_METRICS}
    assert result.checkpoints == ()
    assert (result.num_examples, result.num_validation) == (22, 9)


def test_the_loss_that_comes_with_a_round_is_that_of_the_model_before() -> None:
    results, _ = run_rounds(toy_study(), restart=False)
    latest = [next(c for c in result.checkpoints if c.kind == "latest") for result in results[1:]]
    assert [checkpoint.round for checkpoint in latest] == [1, 2, 3]
    assert [checkpoint.val_loss for checkpoint in latest] == [result.metrics["val_loss"] for result in results[1:]]


def test_best_local_has_the_lowest_own_validation_loss() -> None:
    results, _ = run_rounds(toy_study(rounds=6, learning_rate=0.5), restart=False)
    best = [c for result in results for c in result.checkpoints if c.kind == "best_local"][-1]
    assert best.val_loss == min(result.metrics["val_loss"] for result in results[1:])


def test_a_later_equal_loss_becomes_the_best_local() -> None:
    results, _ = run_rounds(toy_study(local_steps=0), restart=False)
    assert [[c.round for c in r.checkpoints if c.kind == "best_local"] for r in results] == [[], [1], [2], [3]]


def test_a_score_is_on_the_test_rows_where_there_are_any() -> None:
    study = toy_study()
    for data, split in ((toy_data("ash"), "test"), (toy_data("ash", test=False), "validation")):
        session = session_of(study, data=data)
        session.train(1, start_of(study))
        (latest, best) = session.train(2, start_of(study)).checkpoints
        assert (latest.kind, best.kind) == ("latest", "best_local")
        assert (latest.split, latest.metric) == (split, "accuracy")
        rows = data.validation if data.test is None else data.test
        right = Restored(study, task_of(study), latest.tensors).probabilities(rows.x).argmax(1) == rows.y
        assert latest.score == pytest.approx(right.double().mean().item())


def test_the_global_checkpoint_is_offered_only_where_there_is_one_global_model() -> None:
    for algorithm, kinds in (("fedavg", ["best_global"]), ("fedsoup", ["best_global"]), ("fenda", [])):
        study = toy_study(algorithm)
        session = session_of(study)
        session.train(1, start_of(study))
        finished = session.finish(2, start_of(study))
        assert [checkpoint.kind for checkpoint in finished] == kinds
        assert session.finish(None, None) == ()
        for checkpoint in finished:
            assert checkpoint.round == 2
            assert same_bits(checkpoint.tensors, dict(start_of(study)["model"]))


def test_a_model_whose_loss_is_not_finite_is_never_the_best() -> None:
    study = toy_study()
    session, start = session_of(study), start_of(study)
    session.train(1, start)
    broken = {"model": {name: torch.full_like(tensor, torch.nan) for name, tensor in start["model"].items()}}
    result = session.validate(2, broken)
    assert result.metrics["val_loss"] is None
    assert [checkpoint.kind for checkpoint in result.checkpoints] == ["latest"]


def test_a_loss_that_is_not_finite_ends_the_round_with_a_sentence_and_a_code() -> None:
    study = toy_study()
    start = start_of(study)
    broken = {"model": {name: torch.full_like(tensor, torch.nan) for name, tensor in start["model"].items()}}
    with pytest.raises(Diverged) as refused:
        session_of(study).train(1, broken)
    assert refused.value.message == "the loss is not finite in the first batch already"
    assert refused.value.hint.startswith("look for extreme values in the data")
    assert refused.value.code == "DECLINED_TRAINING_FAILED"
    steep = toy_study(optimizer="sgd", learning_rate=100.0, local_steps=400, model={"name": "mlp", "hidden": [40, 40]})
    data = toy_data("ash")
    wide = replace(data, train=Split(torch.as_tensor(data.train.x) * 1e6, data.train.y))
    with pytest.raises(Diverged, match=r"the loss is not finite in step \d+ of 400") as refused:
        session_of(steep, data=wide).train(1, start_of(steep))
    assert refused.value.hint == "a smaller `learning_rate`, or `clip_norm` in the study's [training]"


@pytest.mark.parametrize("reduction", ["sample_mean", "batch_mean"])
def test_the_validation_loss_matches_the_slow_reference(reduction: str) -> None:
    study = toy_study(checkpoints={"loss_reduction": reduction})
    logits, labels = [0.3, -1.2, 2.0, 0.1, -0.7], [1, 0, 0, 1, 1]
    split = Split(torch.zeros(5, 3), torch.tensor(labels))
    slow = [reference.binary_loss(z, y) for z, y in zip(logits, labels, strict=True)]
    wanted = reference.mean_of_batch_means(slow, 4) if reduction == "batch_mean" else sum(slow) / 5
    found = validation_loss(torch.tensor(logits)[:, None], split, task_of(study), study)
    assert found == pytest.approx(wanted, rel=1e-6)


def test_logits_come_in_pieces_of_bounded_size() -> None:
    sizes: list[int] = []

    def infer(networks: Any, x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return x[:, :1]

    x = torch.randn(2500, 3)
    assert torch.equal(compute_logits(Algorithm(infer=infer), {}, x), x[:, :1])
    assert sizes == [1024, 1024, 452]


# FedSoup


BATCH_NORM = {"name": "mlp", "hidden": [4], "norm": "batch"}


def souping(rounds: int, start_after: int, soup: dict[str, Any] | None = None, **changes: Any) -> ResolvedStudy:
    settings = {"soup": {"start_after": start_after, **(soup or {})}}
    return toy_study("fedsoup", rounds=rounds, algorithm_settings=settings, **changes)


@pytest.mark.parametrize("start_after", [3, 7], ids=["until the last round", "beyond it"])
def test_before_it_soups_fedsoup_is_fedavg_bit_for_bit(start_after: int) -> None:
    soup, soup_state = run_rounds(souping(3, start_after), restart=False)
    plain, plain_state = run_rounds(toy_study("fedavg"), restart=False)
    for one, other in zip(soup, plain, strict=True):
        assert one.metrics == other.metrics
        assert same_bits(one.uplink.get("model", {}), other.uplink.get("model", {}))
        assert [c.val_loss for c in one.checkpoints] == [c.val_loss for c in other.checkpoints]
    assert same_bits(soup_state.tensors, plain_state.tensors)


def test_the_patched_model_matches_the_slow_reference() -> None:
    """The list of accepted globals, re-averaged each round, against the running sum; the local steps by a twin."""
    study, data = souping(8, 2, learning_rate=1.0), toy_data("ash", seed=2)
    session, base, accepted, outcomes = session_of(study, data=data), start_of(study), [], []
    names = [spec.name for spec in describe(study, "ash").upload]

    def flat(tensors: dict[str, torch.Tensor]) -> list[float]:
        return [value for name in names for value in tensors[name].double().flatten().tolist()]

    def accuracy(values: list[Any]) -> float:
        tensors, start = {}, 0
        for spec in describe(study, "ash").upload:
            size = spec.bytes // 4
            tensors[spec.name] = torch.tensor([float(v) for v in values[start : start + size]]).reshape(spec.shape)
            start += size
        said = Restored(study, task_of(study), tensors).probabilities(data.validation.x).argmax(1)
        return float((said == data.validation.y).double().mean())

    for round_number in range(1, 9):
        state = session.export_state()
        plain = SessionState(
            {name: tensor for name, tensor in state.tensors.items() if not name.startswith("kept/")},
            {**state.meta, "algorithm": "fedavg", "notes": {}},
        )
        twin = session_of(toy_study("fedavg", rounds=8, learning_rate=1.0), data=data, state=plain)
        local = plus(base, twin.train(round_number, base))
        result = session.train(round_number, base)
        patched = plus(base, result)
        if round_number > 2:
            count = len(accepted)
            accepted, wanted = reference.soup_choice(
                accepted, flat(dict(base["model"])), flat(dict(local["model"])), accuracy
            )
            outcomes.append(len(accepted) > count)
            found = torch.tensor(flat(dict(patched["model"])))
            torch.testing.assert_close(found, torch.tensor([float(v) for v in wanted]), rtol=1e-4, atol=1e-5)
            assert session.export_state().meta["notes"].get("soup_models", 0) == len(accepted)
        base = patched
    assert set(outcomes) == {True, False}, "the made-up patients should show both branches"


def test_a_tie_adds_the_global_model() -> None:
    """With no local steps a and b are the same model, and the paper's comparison is >=."""
    study = souping(5, 1, local_steps=0)
    _, state = run_rounds(study, restart=False)
    assert state.meta["notes"]["soup_models"] == 4


def test_if_global_local_and_soup_are_one_model_patching_is_the_identity() -> None:
    results, _ = run_rounds(souping(6, 0, local_steps=0), restart=False)
    assert all(not delta.any() for result in results[:-1] for delta in result.uplink["model"].values())


def test_the_soup_never_shrinks_and_is_never_larger_than_its_rounds() -> None:
    study = souping(9, 3, learning_rate=0.5)
    session, base, counts = session_of(study), start_of(study), []
    for round_number in range(1, 10):
        result = session.train(round_number, base)
        base = plus(base, result)
        counts.append(session.export_state().meta["notes"].get("soup_models", 0))
    assert counts == sorted(counts)
    assert counts[2] == 0
    assert counts[-1] <= 6


def test_the_stored_sum_is_the_sum_of_the_accepted_global_models() -> None:
    study = souping(4, 0, local_steps=0)
    session, sums = session_of(study), {}
    for round_number in range(1, 5):
        base = {"model": {name: tensor + round_number for name, tensor in start_of(study)["model"].items()}}
        session.train(round_number, base)
        for name, tensor in base["model"].items():
            sums[f"kept/soup.{name}"] = sums.get(f"kept/soup.{name}", 0) + tensor.double()
    state = session.export_state()
    assert state.meta["notes"]["soup_models"] == 4
    kept = {name: tensor for name, tensor in state.tensors.items() if name.startswith("kept/")}
    for name, tensor in kept.items():
        torch.testing.assert_close(tensor, sums[name], rtol=0, atol=1e-12)


def test_from_the_first_soup_round_on_the_patched_models_compete_to_be_the_best() -> None:
    study = souping(5, 2)
    results, _ = run_rounds(study, restart=False)
    rounds = [[c.round for c in result.checkpoints if c.kind == "best_local"] for result in results]
    assert rounds[2][-1] == 3, "the first patched model ends the competition of the downloaded ones"
    patched = results[2].checkpoints[-1]
    start = run_rounds(souping(2, 2), restart=False)[0][-1].checkpoints[0].tensors
    for name, delta in results[2].uplink["model"].items():
        torch.testing.assert_close(patched.tensors[name], start[name] + delta, rtol=1e-5, atol=1e-6)
    assert rounds[5] == [], "the closing download is no patched model"


def test_a_tie_adds_nothing_as_the_released_code_compares() -> None:
    _, state = run_rounds(souping(5, 1, {"compat": True}, local_steps=0), restart=False)
    assert state.meta["notes"].get("soup_models", 0) == 0


def test_as_the_released_code_compares_a_better_model_is_still_added() -> None:
    study, data = souping(8, 2, {"compat": True}, learning_rate=1.0), toy_data("ash", seed=2)
    session, base = session_of(study, data=data), start_of(study)
    for round_number in range(1, 9):
        base = plus(base, session.train(round_number, base))
    assert 0 < session.export_state().meta["notes"]["soup_models"] < 7


@pytest.mark.parametrize(("compat", "first"), [(False, 3), (True, 2)])
def test_as_the_released_code_counts_souping_starts_a_round_earlier(compat: bool, first: int) -> None:
    results, _ = run_rounds(souping(4, 2, {"compat": compat}), restart=False)
    patched = [
        round_number
        for round_number, result in enumerate(results, start=1)
        if any((c.kind, c.round) == ("best_local", round_number) for c in result.checkpoints)
    ]
    assert patched[0] == first, "a patched model competes in the round in which it was made"


@pytest.mark.parametrize("compat", [False, True])
def test_without_a_score_the_paper_adds_the_model_and_the_released_code_does_not(compat: bool) -> None:
    """An undefined headline metric is a tie."""
    study = souping(1, 0, {"compat": compat})
    session = session_of(study)
    with mock.patch.object(Context, "headline", return_value=None):
        session.train(1, start_of(study))
    assert session.export_state().meta["notes"].get("soup_models", 0) == int(not compat)


@pytest.mark.parametrize("moments", ["keep", "reset"])
def test_a_patch_forgets_the_moments_if_asked_to(moments: str) -> None:
    study = souping(3, 1, {"moments": moments})
    session, base, counts = session_of(study), start_of(study), []
    for round_number in (1, 2):
        base = plus(base, session.train(round_number, base))
        counts.append(sum(name.startswith("optimizer/") for name in session.export_state().tensors))
    assert counts[0] > 0
    assert (counts[1] == 0) == (moments == "reset")


def test_a_patch_leaves_the_statistics_of_norm_layers_as_they_were_trained() -> None:
    soup = session_of(souping(1, 0, model=BATCH_NORM)).train(1, start_of(souping(1, 0, model=BATCH_NORM)))
    plain_study = toy_study("fedavg", model=BATCH_NORM, rounds=1)
    plain = session_of(plain_study).train(1, start_of(plain_study))
    for name in ("body.norms.0.running_mean", "body.norms.0.running_var"):
        assert torch.equal(soup.uplink["model"][name], plain.uplink["model"][name])
    assert not torch.equal(soup.uplink["model"]["head.weight"], plain.uplink["model"]["head.weight"])


def test_a_patch_takes_the_statistics_of_norm_layers_anew_if_asked_to() -> None:
    """The mean over batches of 64 of each batch's mean and unbiased variance, of what the patched layer puts out."""
    study = souping(2, 0, {"statistics": "estimate"}, model=BATCH_NORM)
    data = toy_data("ash", rows=150)
    session = session_of(study, data=data)
    base = start_of(study)
    sent = plus(base, session.train(1, base))["model"]
    before_norm = data.train.x @ sent["body.layers.0.weight"].T + sent["body.layers.0.bias"]
    parts = [before_norm[:64], before_norm[64:128], before_norm[128:]]
    for name, wanted in (
        ("body.norms.0.running_mean", torch.stack([part.mean(0) for part in parts]).mean(0)),
        ("body.norms.0.running_var", torch.stack([part.var(0) for part in parts]).mean(0)),
    ):
        torch.testing.assert_close(sent[name], wanted, rtol=1e-4, atol=1e-5)
    network = session._context.networks["model"]
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm1d)]
    assert [norm.momentum for norm in norms] == [0.1]
    assert not any(module.training for module in network.modules())


def test_a_soup_of_fendas_shared_extractor_touches_nothing_private() -> None:
    souped = toy_study("fenda", algorithm_settings={"soup": {"start_after": 0}}, rounds=1)
    private = describe(souped, "ash").private
    soup = {stay.name for stay in private if stay.name.startswith("soup.")}
    assert soup == {"soup.shared_extractor.layers.0.weight", "soup.shared_extractor.layers.0.bias"}
    plain = toy_study("fenda", rounds=1)
    one, other = session_of(souped), session_of(plain)
    start = start_of(plain)
    patched, trained = one.train(1, start).uplink["model"], other.train(1, start).uplink["model"]
    for name, delta in patched.items():  # with an empty soup b is half of the way that was trained
        shares = delta / trained[name]
        torch.testing.assert_close(shares[trained[name] != 0], torch.full_like(shares, 0.5)[trained[name] != 0])
    mine, theirs = one.export_state().tensors, other.export_state().tensors
    private = [name for name in theirs if name.startswith("private/")]
    assert len(private) == 4
    assert all(torch.equal(mine[name], theirs[name]) for name in private)


# What cannot be


def refusal_of(study: ResolvedStudy, base: Any = None, state: SessionState | None = None) -> str:
    with pytest.raises(BadData) as refusal:
        session_of(study, state=state).train(1, base if base is not None else start_of(study))
    return refusal.value.message


def test_a_download_of_other_tensors_is_refused_by_name() -> None:
    study = toy_study("fenda")
    assert refusal_of(study, start_of(toy_study("fedavg"))) == (
        "the round's model has 4 tensors in `model`, this site shares 2; "
        "`body.layers.0.bias` stands in one of them only"
    )


def test_a_download_of_another_shape_is_refused_by_name() -> None:
    start = start_of(toy_study())
    odd = {"model": {**start["model"], "head.bias": torch.zeros(2)}}
    assert refusal_of(toy_study(), odd) == "`head.bias` in the round's model is [2], here it is [1]"


def test_a_state_of_another_algorithm_is_refused() -> None:
    state = session_of(toy_study("fedsoup")).export_state()
    said = "the kept state is of algorithm `fedsoup`, the study's is `fedavg`"
    assert refusal_of(toy_study("fedavg"), state=state) == said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"private/head.bias": None}, "the kept state does not fit the study's network: `head.bias` is missing"),
        (
            {"private/tail": torch.zeros(1)},
            "the kept state does not fit the study's network: `tail` belongs to no tensor of this network",
        ),
        (
            {"private/head.bias": torch.zeros(2)},
            "the kept state does not fit the study's network: `head.bias` is F32 [2], the network's is F32 [1]",
        ),
        ({"odd/x": torch.zeros(1)}, "the kept state has a tensor `odd/x` of no known part"),
    ],
)
def test_a_state_of_another_network_is_refused_by_name(changes: dict[str, torch.Tensor | None], message: str) -> None:
    study = toy_study("fenda")
    state = session_of(study).export_state()
    tensors = {name: tensor for name, tensor in {**state.tensors, **changes}.items() if tensor is not None}
    assert refusal_of(study, state=SessionState(tensors, state.meta)) == message


def test_a_checkpoint_of_another_network_is_refused_by_name() -> None:
    study = toy_study()
    with pytest.raises(BadData) as refusal:
        Restored(study, task_of(study), {"head.weight": torch.zeros(1, 4)}).probabilities(torch.zeros(1, 3))
    said = "the checkpoint does not fit the study's network: `body.layers.0.bias` is missing"
    assert refusal.value.message == said


def test_probabilities_of_each_row_sum_to_one() -> None:
    study = toy_study("two-networks")
    session = session_of(study)
    session.train(1, start_of(study))
    latest = session.train(2, start_of(study)).checkpoints[0]
    assert {name.partition("/")[0] for name in latest.tensors} >= {"bypass", "personal"}
    said = Restored(study, task_of(study), latest.tensors).probabilities(torch.randn(7, 3))
    torch.testing.assert_close(said.sum(1), torch.ones(7, dtype=said.dtype))


def test_a_site_with_one_training_row_trains() -> None:
    study = toy_study(optimizer="sgd")
    one: SiteData = toy_data("ash", rows=1)
    result = session_of(study, data=one).train(1, start_of(study))
    assert result.num_examples == 1
    assert any(delta.any() for delta in result.uplink["model"].values())
