"""FedProx, FedBN, LG-FedAvg, FedPer, FedRep, FedBABU, APFL, Ditto and MOON against their papers' formulas."""

from dataclasses import replace
from math import exp, log
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_algorithms import registry
from fl_algorithms.engine.algorithm import frozen_copy
from fl_algorithms.engine.device import CPU
from fl_algorithms.engine.partition import describe, initial_model, task_of
from fl_algorithms.engine.session import Checkpoint, Restored, SessionState
from fl_algorithms.engine.training import seeded
from fl_algorithms.lab.federation import Outcome, run_federation
from fl_algorithms.methods.apfl.client import Mixture, alpha_gradient, mixed_outputs, mixed_weights
from fl_algorithms.methods.fedbn.client import norm_layers
from fl_algorithms.methods.fedprox.client import proximal_term
from fl_algorithms.methods.moon.client import contrast
from fl_algorithms.resolving import resolve
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import SiteData
from tests import reference
from tests.fl_algorithms.toys import fit, plus, session_of, start_of, study_tables, toy_data, toy_study
from wardround.errors import BadData
from wardround.records.study import StudyFile

NORMED: dict[str, Any] = {"name": "mlp", "hidden": [4, 3], "norm": "batch"}
LOGISTIC: dict[str, Any] = {"name": "mlp", "hidden": []}
PLAIN: dict[str, Any] = {"optimizer": "sgd", "weight_decay": 0.0}
BODY = {"body.layers.0.bias", "body.layers.0.weight"}
HEAD = {"head.bias", "head.weight"}


def federation(study: ResolvedStudy) -> Outcome:
    return run_federation(study, task_of(study), {site: toy_data(site) for site in study.study.sites})


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_same_models(one: Outcome, other: Outcome) -> None:
    """What is shared and each checkpoint, score and loss, bit for bit."""
    assert one.digest == other.digest
    assert same_bits(one.shared, other.shared)
    for site, kinds in one.checkpoints.items():
        for kind, checkpoint in kinds.items():
            twin = other.checkpoints[site][kind]
            assert same_bits(checkpoint.tensors, twin.tensors)
            assert replace(checkpoint, tensors={}) == replace(twin, tensors={})


def norm_of(deltas: dict[str, Tensor]) -> float:
    return sum(float(delta.double().square().sum()) for delta in deltas.values()) ** 0.5


def private_of(study: ResolvedStudy, rounds: int, data: SiteData | None = None) -> dict[str, Tensor]:
    """What site ash keeps to itself after ``rounds`` rounds of a federation of its own."""
    session, base = session_of(study, data=data), start_of(study)
    for number in range(1, rounds + 1):
        base = plus(base, session.train(number, base))
    tensors = session.export_state().tensors
    return {key.removeprefix("private/"): tensor for key, tensor in tensors.items() if key.startswith("private/")}


def of_slot(tensors: dict[str, Tensor], slot: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{slot}.."): tensor for key, tensor in tensors.items() if key.startswith(f"{slot}..")}


def flat(tensors: list[Tensor]) -> list[float]:
    return [value for tensor in tensors for value in tensor.double().flatten().tolist()]


# FedProx


@pytest.mark.parametrize("model", [LOGISTIC, NORMED], ids=["logistic", "with norms"])
def test_fedprox_with_zero_mu_is_fedavg(model: dict[str, Any]) -> None:
    prox = federation(toy_study("fedprox", model, algorithm_settings={"mu": 0.0}))
    assert_same_models(prox, federation(toy_study("fedavg", model)))
    assert prox.digest != federation(toy_study("fedprox", model, algorithm_settings={"mu": 0.1})).digest


def test_the_proximal_term_and_its_gradient_match_the_slow_reference() -> None:
    with seeded(3):
        network, anchor = nn.Linear(4, 2).double(), nn.Linear(4, 2).double().state_dict()
    term = proximal_term(network, anchor, 0.3)
    term.backward()  # type: ignore[no-untyped-call]
    local, start = flat(list(network.parameters())), flat([anchor["weight"], anchor["bias"]])
    assert term.item() == pytest.approx(reference.proximal_term(local, start, 0.3), rel=1e-12)
    found = flat([parameter.grad for parameter in network.parameters() if parameter.grad is not None])
    assert found == pytest.approx(reference.proximal_gradient(local, start, 0.3), rel=1e-12)


def test_the_proximal_term_counts_neither_statistics_nor_fixed_parameters() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    anchor = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    anchor["1.running_mean"] += 1
    network[0].bias.requires_grad_(False).add_(1)
    assert proximal_term(network, anchor, 1.0).item() == 0


def test_the_larger_mu_is_the_nearer_the_site_stays_to_the_rounds_model() -> None:
    """With eta mu = 1 a step is w <- anchor - eta grad L: the site ends one plain step away, however many it took."""
    moved = []
    for mu in (0.0, 1.0, 10.0, 100.0):
        study = toy_study("fedprox", algorithm_settings={"mu": mu}, learning_rate=0.01, local_steps=50, **PLAIN)
        moved.append(norm_of(session_of(study).train(1, start_of(study)).uplink["model"]))
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] < moved[0] / 20


@pytest.mark.parametrize("algorithm", ["fedprox", "moon"])
def test_a_trained_model_is_judged_by_the_tasks_loss_alone(algorithm: str) -> None:
    """A soup judges models right after training, where the penalty is not zero."""
    study, data = toy_study(algorithm, algorithm_settings={"mu": 5.0, "soup": {"start_after": 0}}), toy_data("ash")
    best = session_of(study, data=data).train(1, start_of(study)).checkpoints[-1]
    logits = Restored(study, task_of(study), best.tensors).logits(data.validation.x)
    assert best.kind == "best_local"
    assert best.val_loss == task_of(study).losses(logits, data.validation.y).double().mean().item()


# FedBN


class Odd(nn.Module):
    """Norm layers of every kind under names that do not say so, and a layer whose name lies."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.Linear(4, 4)
        self.downsample = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm2d(4))
        self.a = nn.LayerNorm(4)
        self.b = nn.GroupNorm(2, 4)
        self.c = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        self.d = nn.SyncBatchNorm(4)
        self.e = nn.RMSNorm(4)
        self.again = self.a


def test_norm_layers_are_told_by_their_type() -> None:
    found = set(norm_layers(Odd()))
    places = {name.rpartition(".")[0] for name in found}
    assert places == {"downsample.1", "a", "b", "c", "d", "e", "again"}
    assert {"downsample.1.running_var", "downsample.1.num_batches_tracked", "c.running_mean"} <= found
    assert norm_layers(nn.LayerNorm(3)) == ["weight", "bias"]


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_no_tensor_of_a_norm_layer_leaves_with_fedbn(norm: str) -> None:
    study = toy_study("fedbn", {**NORMED, "norm": norm})
    partition = describe(study, "ash")
    assert {spec.name for spec in partition.upload} == {
        f"{layer}.{part}" for layer in ("body.layers.0", "body.layers.1", "head") for part in ("weight", "bias")
    }
    assert {stay.name.rpartition(".")[0] for stay in partition.private} == {"body.norms.0", "body.norms.1"}


def test_with_fedbn_the_norm_layers_of_two_sites_part_and_the_rest_is_one_model() -> None:
    outcome = federation(toy_study("fedbn", NORMED))
    ash, birch = (outcome.checkpoints[site]["latest"].tensors for site in ("ash", "birch"))
    for name in ash:
        if name.endswith("num_batches_tracked"):
            continue
        assert torch.equal(ash[name], birch[name]) == (".norms." not in name), name


def test_fedbn_of_a_network_without_norm_layers_is_fedavg() -> None:
    one, other = (federation(toy_study(algorithm)) for algorithm in ("fedbn", "fedavg"))
    assert one.digest == other.digest
    for site in ("ash", "birch"):
        assert same_bits(one.checkpoints[site]["latest"].tensors, other.checkpoints[site]["latest"].tensors)


def test_a_batch_norm_that_would_meet_a_single_row_is_refused_before_training() -> None:
    with pytest.raises(BadData) as refusal:
        session_of(toy_study("fedbn", NORMED), data=toy_data("ash", rows=1))
    assert refusal.value.message == (
        "1 training rows in batches of 4 give a batch of one row, which a batch norm cannot learn from"
    )
    assert refusal.value.hint == "in the study's [training]: `drop_last = true`, or another `batch_size`"


# LG-FedAvg, FedPer, FedRep


def upload_specs(algorithm: str, **settings: Any) -> set[str]:
    return {spec.name for spec in describe(fit(algorithm, algorithm_settings=settings), "ash").upload}


def test_lg_fedavg_shares_what_fedrep_and_fedper_keep() -> None:
    assert upload_specs("lgfedavg") == HEAD
    for algorithm in ("fedrep", "fedper", "fedbabu"):
        assert upload_specs(algorithm) == BODY
    assert upload_specs("lgfedavg") | upload_specs("fedrep") == upload_specs("fedavg")
    assert upload_specs("lgfedavg", head=["*.bias"]) == {"body.layers.0.bias", "head.bias"}


def test_lg_fedavg_that_shares_everything_is_fedavg() -> None:
    one = federation(toy_study("lgfedavg", algorithm_settings={"head": ["*"]}))
    other = federation(toy_study("fedavg"))
    assert one.digest == other.digest
    for site in ("ash", "birch"):
        assert same_bits(one.checkpoints[site]["best_local"].tensors, other.checkpoints[site]["best_local"].tensors)


def test_lg_fedavg_that_shares_nothing_is_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    client = "tests.fl_algorithms.toys:lg_that_shares_nothing"
    row = replace(registry.METHODS["silo"], name="lg-nothing", client=client)
    monkeypatch.setitem(registry.METHODS, "lg-nothing", row)  # type: ignore[arg-type]
    assert_same_models(federation(toy_study("lg-nothing")), federation(toy_study("silo")))


def test_fedper_trains_head_and_body_together() -> None:
    """In the first round, from one start, its body moves as FedAvg's does."""
    fedper, fedavg = fit("fedper", init_private="common"), toy_study("fedavg")
    mine = session_of(fedper).train(1, start_of(fedper)).uplink["model"]
    theirs = session_of(fedavg).train(1, start_of(fedavg)).uplink["model"]
    assert same_bits(mine, {name: theirs[name] for name in BODY})


@pytest.mark.parametrize("amount", [{"steps": 0}, {"epochs": 0}])
def test_fedrep_without_body_steps_never_moves_the_shared_body(amount: dict[str, int]) -> None:
    study = toy_study(
        "fedrep", {**NORMED, "dropout": 0.3}, algorithm_settings={"train_body": amount, "train_head": {"steps": 5}}
    )
    outcome = federation(study)
    assert same_bits(outcome.shared, initial_model(study))
    start = session_of(study).export_state().tensors
    assert not torch.equal(private_of(study, 1)["head.weight"], start["private/head.weight"])


def test_while_fedrep_trains_the_body_no_tensor_of_the_head_moves() -> None:
    study = toy_study("fedrep", NORMED, algorithm_settings={"train_head": {"steps": 0}})
    start, after = session_of(study).export_state().tensors, private_of(study, 2)
    assert all(torch.equal(after[name], start[f"private/{name}"]) for name in HEAD)
    assert not same_bits(federation(study).shared, initial_model(study))


def test_fedrep_trains_the_head_first_and_the_body_under_it() -> None:
    def study(**settings: Any) -> ResolvedStudy:
        return toy_study("fedrep", algorithm_settings=settings)

    whole = study(train_head={"epochs": 2}, train_body={"steps": 3})
    uplink = session_of(whole).train(1, start_of(whole)).uplink["model"]

    head_only = session_of(study(train_head={"epochs": 2}, train_body={"steps": 0}))
    head_only.train(1, start_of(whole))
    state = head_only.export_state()
    body_only = session_of(study(train_head={"steps": 0}, train_body={"steps": 3}), state=state)
    assert same_bits(uplink, body_only.train(1, start_of(whole)).uplink["model"])
    assert all(delta.any() for delta in uplink.values())


def test_fedrep_trains_ten_passes_of_the_head_and_then_as_long_as_the_study_says() -> None:
    told: list[tuple[int, int]] = []
    study = toy_study("fedrep", local_steps=7)
    session_of(study).train(1, start_of(study), lambda done, total: told.append((done, total)))
    assert [total for done, total in told if done == total] == [60, 7]  # 22 rows in batches of 4, ten times


def test_fedreps_best_is_judged_right_after_its_local_steps_before_the_mean() -> None:
    """As downloaded, its head is one of the body before, and a site's best was chosen among such models."""
    study = toy_study("fedrep", rounds=2)
    assert study.method.settings.judged == "trained"
    session, base = session_of(study), start_of(study)
    result = session.train(1, base)
    (best,) = (checkpoint for checkpoint in result.checkpoints if checkpoint.kind == "best_local")
    torch.testing.assert_close({name: best.tensors[name] for name in base["model"]}, dict(plus(base, result)["model"]))
    assert torch.equal(best.tensors["head.weight"], session.export_state().tensors["private/head.weight"])
    assert best.round == 1
    later = session.validate(2, base)
    assert "best_local" not in {checkpoint.kind for checkpoint in later.checkpoints}


def test_fedrep_ends_with_a_round_of_the_head_on_the_last_body() -> None:
    study = toy_study("fedrep", NORMED, algorithm_settings={"train_head": {"epochs": 3}})
    assert study.file.algorithm.settings["fine_tuning"] == {"epochs": 3, "train": ["head.*"]}
    for site, kinds in federation(study).checkpoints.items():
        last, fitted = kinds["latest"].tensors, kinds["fine_tuned"].tensors
        unlike = {name for name in last if not torch.equal(last[name], fitted[name])}
        assert unlike == {"head.weight", "head.bias"}, site
    without = toy_study("fedrep", algorithm_settings={"fine_tuning": {"epochs": 0}})
    assert without.file.algorithm.settings["fine_tuning"] == {"epochs": 0, "train": ["*"]}


@pytest.mark.parametrize("soup", [None, {"start_after": 1}])
def test_any_method_may_judge_what_training_leaves(soup: dict[str, int] | None) -> None:
    settings: dict[str, Any] = {"judged": "trained", **({} if soup is None else {"soup": soup})}
    study = toy_study("fedavg", algorithm_settings=settings)
    session, base = session_of(study), start_of(study)
    for number in (1, 2, 3):
        result = session.train(number, base)
        base = plus(base, result)
        bests = [checkpoint for checkpoint in result.checkpoints if checkpoint.kind == "best_local"]
        for best in bests:
            torch.testing.assert_close(best.tensors, dict(base["model"]))
            assert best.round == number
        assert bests or number > 1


# FedBABU


def test_with_fedbabu_the_head_never_moves_and_there_is_one_model_for_all() -> None:
    study = fit("fedbabu", optimizer="sgd", momentum=0.9, weight_decay=0.1)
    start, outcome = session_of(study).export_state().tensors, federation(study)
    ash, birch = (outcome.checkpoints[site]["latest"].tensors for site in ("ash", "birch"))
    assert same_bits(ash, birch)
    for name in HEAD:
        assert torch.equal(ash[name], start[f"private/{name}"])
    assert not same_bits(outcome.shared, initial_model(study))


def test_fedbabu_fine_tunes_the_whole_network_for_five_passes_unless_told_otherwise() -> None:
    study = fit("fedbabu")
    assert study.file.algorithm.settings["fine_tuning"] == {"epochs": 5, "train": ["*"]}
    kept = federation(study).checkpoints["ash"]
    for name in BODY | HEAD:
        assert not torch.equal(kept["fine_tuned"].tensors[name], kept["latest"].tensors[name])


def test_untuned_fedbabu_predicts_alike_at_all_sites() -> None:
    study = fit("fedbabu", algorithm_settings={"fine_tuning": {"epochs": 0}})
    outcome = federation(study)
    ash, birch = (outcome.checkpoints[site]["fine_tuned"].tensors for site in ("ash", "birch"))
    assert same_bits(ash, birch)


# APFL


def alpha_study(alpha: float, rate: float = 0.0, mixing: str = "outputs", **changes: Any) -> ResolvedStudy:
    settings = {"alpha": alpha, "alpha_learning_rate": rate, "mixing": mixing}
    return toy_study("apfl", algorithm_settings=settings, **changes)


@pytest.mark.parametrize("mixing", ["outputs", "weights"])
def test_apfl_with_alpha_one_trains_the_private_network_alone(mixing: str) -> None:
    alone = private_of(toy_study("silo", iterator="run", init_private="common"), 3)
    assert same_bits(of_slot(private_of(alpha_study(1.0, mixing=mixing, iterator="run"), 3), "personal"), alone)


@pytest.mark.parametrize("mixing", ["outputs", "weights"])
def test_apfl_with_alpha_zero_predicts_as_fedavg_and_leaves_the_private_network_alone(mixing: str) -> None:
    study = alpha_study(0.0, mixing=mixing, **PLAIN)
    apfl, fedavg = federation(study), federation(toy_study("fedavg", **PLAIN))
    assert apfl.digest == fedavg.digest
    for site in ("ash", "birch"):
        mine, theirs = apfl.checkpoints[site]["latest"], fedavg.checkpoints[site]["latest"]
        assert (mine.val_loss, mine.scores) == (theirs.val_loss, theirs.scores)
    start = session_of(study).export_state().tensors
    for name, tensor in private_of(study, 2).items():
        assert torch.equal(tensor, start[f"private/{name}"])  # its gradient is zero, and plain SGD adds nothing


@pytest.mark.parametrize("mixing", ["outputs", "weights"])
def test_what_apfl_sends_is_fedavgs_whatever_alpha_is(mixing: str) -> None:
    assert federation(alpha_study(0.3, 0.5, mixing)).digest == federation(toy_study("fedavg")).digest


@pytest.mark.parametrize("mixing", ["outputs", "weights"])
@pytest.mark.parametrize("rate", [0.1, 1e3, 1e9])
def test_alpha_stays_between_zero_and_one(rate: float, mixing: str) -> None:
    study = alpha_study(0.5, rate, mixing)
    alphas = [private_of(study, rounds)["mixture..alpha"].item() for rounds in (1, 2, 3)]
    assert all(0 <= alpha <= 1 for alpha in alphas)
    assert alphas[0] != 0.5


def test_nothing_private_of_apfl_leaves() -> None:
    partition = describe(toy_study("apfl"), "ash")
    assert {spec.key for spec in partition.upload} == BODY | HEAD
    assert {stay.name for stay in partition.private} == {f"personal/{name}" for name in BODY | HEAD} | {"mixture/alpha"}


def test_alpha_moves_at_the_first_step_of_a_round_only() -> None:
    alphas = [private_of(alpha_study(0.5, 0.5, local_steps=steps), 1)["mixture..alpha"] for steps in (1, 6)]
    assert torch.equal(*alphas)
    assert alphas[0] != 0.5


def twins(alpha: float) -> dict[str, nn.Module]:
    with seeded(7):
        networks = {slot: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)) for slot in ("model", "personal")}
    mixture = Mixture(alpha).double()
    mixture.alpha.fill_(alpha)  # as float64, not as rounded to float32
    return {**{slot: network.double() for slot, network in networks.items()}, "mixture": mixture}


def rows() -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def parameters(networks: dict[str, nn.Module], slot: str) -> list[nn.Parameter]:
    return list(networks[slot].parameters())


def grads(networks: dict[str, nn.Module], slot: str) -> list[float]:
    return flat([parameter.grad for parameter in parameters(networks, slot) if parameter.grad is not None])


def test_alphas_gradient_matches_the_slow_reference() -> None:
    networks, alpha = twins(0.3), 0.3
    mixed_outputs(networks, rows()).square().sum().backward()  # type: ignore[no-untyped-call]
    v, w = (parameters(networks, slot) for slot in ("personal", "model"))
    found = alpha_gradient(torch.tensor(alpha, dtype=torch.float64), v, w, by_weights=False)
    wanted, _ = reference.apfl_alpha(
        alpha, 0.0, flat(list(v)), flat(list(w)), grads(networks, "personal"), grads(networks, "model")
    )
    assert found.item() == pytest.approx(wanted, rel=1e-12)


def test_with_mixed_weights_alphas_gradient_is_the_losss_slope_and_the_shrinkage() -> None:
    x, alpha, step = rows(), 0.3, 1e-6
    networks = twins(alpha)
    mixed_weights(networks, x).square().sum().backward()  # type: ignore[no-untyped-call]
    v, w = (parameters(networks, slot) for slot in ("personal", "model"))
    found = alpha_gradient(torch.tensor(alpha, dtype=torch.float64), v, w, by_weights=True)
    up, down = (mixed_weights(twins(alpha + by), x).square().sum().item() for by in (step, -step))
    assert found.item() == pytest.approx((up - down) / (2 * step) + 0.02 * alpha, rel=1e-5)


@pytest.mark.parametrize("by_weights", [False, True])
def test_between_equal_twins_alpha_only_shrinks(by_weights: bool) -> None:
    networks = twins(0.3)
    networks["model"].load_state_dict(networks["personal"].state_dict())
    infer = mixed_weights if by_weights else mixed_outputs
    infer(networks, rows()).square().sum().backward()  # type: ignore[no-untyped-call]
    v, w = (parameters(networks, slot) for slot in ("personal", "model"))
    found = alpha_gradient(torch.tensor(0.3, dtype=torch.float64), v, w, by_weights=by_weights)
    assert found.item() == pytest.approx(0.02 * 0.3, rel=1e-12)


def test_apfl_mixes_the_probabilities_of_several_classes() -> None:
    with seeded(3):
        networks: dict[str, nn.Module] = {slot: nn.Linear(3, 4).double() for slot in ("model", "personal")}
    networks["mixture"] = Mixture(0.25).double()
    x = rows()
    wanted = 0.25 * networks["personal"](x).softmax(1) + 0.75 * networks["model"](x).softmax(1)
    torch.testing.assert_close(mixed_outputs(networks, x).softmax(1), wanted, rtol=1e-12, atol=0)


def test_apfl_mixes_outputs_or_weights() -> None:
    networks, x = twins(0.25), rows()
    v, w = networks["personal"], networks["model"]
    alpha = networks["mixture"].get_parameter("alpha").item()
    torch.testing.assert_close(
        torch.sigmoid(mixed_outputs(networks, x)), alpha * torch.sigmoid(v(x)) + (1 - alpha) * torch.sigmoid(w(x)),
        rtol=1e-12, atol=0,
    )  # fmt: skip
    mean = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    mean.load_state_dict({k: alpha * v.state_dict()[k] + (1 - alpha) * w.state_dict()[k] for k in v.state_dict()})
    torch.testing.assert_close(mixed_weights(networks, x), mean(x), rtol=1e-12, atol=0)


def test_a_step_of_apfl_matches_the_slow_reference() -> None:
    """Logistic regression, one step on all rows: w's step, then alpha's and v's with the mixture of v and the new w."""
    rate, alpha, alpha_rate = 0.5, 0.4, 0.7
    study = alpha_study(alpha, alpha_rate, model=LOGISTIC, learning_rate=rate, local_steps=1, batch_size=64, **PLAIN)
    data, begun = toy_data("ash"), start_of(study)["model"]
    rows, labels = data.train.x.double().tolist(), data.train.y.tolist()
    start = {name: tensor + 0.3 for name, tensor in begun.items()}  # the second round's download
    w, v = (flat([tensors["head.weight"], tensors["head.bias"]]) for tensors in (start, begun))
    assert w != v
    gradient = reference.logistic_gradient(w[:-1], w[-1], rows, labels)
    w = [a - rate * g for a, g in zip(w, gradient, strict=True)]
    of_v, of_w = reference.mixed_logistic_gradients(alpha, v, w, rows, labels)
    _, new_alpha = reference.apfl_alpha(alpha, alpha_rate, v, w, of_v, of_w)
    v = [a - rate * g for a, g in zip(v, of_v, strict=True)]

    session = session_of(study)
    session.validate(1, {"model": begun})
    found_w = plus({"model": start}, session.train(2, {"model": start}))["model"]
    kept = session.export_state().tensors
    assert flat([found_w["head.weight"], found_w["head.bias"]]) == pytest.approx(w, rel=1e-5)
    assert flat([kept["private/personal..head.weight"], kept["private/personal..head.bias"]]) == pytest.approx(
        v, rel=1e-5
    )
    assert kept["private/mixture..alpha"].item() == pytest.approx(new_alpha, rel=1e-5)
    assert 0 < new_alpha < 1


def test_no_gradient_of_apfl_is_taken_in_the_reduced_arithmetic() -> None:
    """torch's autocast is for the loss alone: a backward pass inside rounds what it should not, and warns of it."""
    study = toy_study("apfl")
    session = session_of(study, device=replace(CPU, precision=torch.bfloat16))
    inside: list[bool] = []
    for network in session._context.networks.values():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: inside.append(torch.is_autocast_enabled("cpu")))
    session.train(1, start_of(study))
    assert inside
    assert not any(inside)


@pytest.mark.parametrize("init_private", [None, "common"])
@pytest.mark.parametrize("method", ["apfl", "ditto"])
def test_the_private_network_begins_as_the_shared_one(method: str, init_private: str | None) -> None:
    """As the authors' code begins it; also where the shared one is not as the study's seed draws it."""
    study = toy_study(method, NORMED, **({} if init_private is None else {"init_private": init_private}))
    assert study.training.init_private == "common"
    session, base = session_of(study), start_of(study)
    pretrained = {"model": {name: tensor + 0.5 for name, tensor in base["model"].items()}}
    session.validate(1, pretrained)
    own = of_slot(session.export_state().tensors, "private/personal")
    assert same_bits({name: own[name] for name in pretrained["model"]}, dict(pretrained["model"]))
    session.train(1, pretrained)
    moved = of_slot(session.export_state().tensors, "private/personal")
    session.validate(2, base)
    assert same_bits(of_slot(session.export_state().tensors, "private/personal"), moved), "it begins once"


@pytest.mark.parametrize("method", ["apfl", "ditto"])
def test_a_private_network_that_would_begin_apart_is_refused(method: str) -> None:
    with pytest.raises(BadData, match=f"algorithm `{method}` needs the same initial weights at every site"):
        toy_study(method, init_private="site")


# Ditto


@pytest.mark.parametrize("iterator", ["round", "run"])
@pytest.mark.parametrize("lam", [0.0, 1.0, 100.0])
def test_what_ditto_sends_is_fedavgs_whatever_lambda_is(lam: float, iterator: str) -> None:
    changes: dict[str, Any] = {"iterator": iterator, "model": {**NORMED, "dropout": 0.2}}
    ditto = federation(toy_study("ditto", algorithm_settings={"lam": lam}, **changes))
    assert ditto.digest == federation(toy_study("fedavg", **changes)).digest


def test_ditto_with_zero_lambda_trains_the_private_network_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    client = "tests.fl_algorithms.toys:alone_with_dittos_stream"
    monkeypatch.setitem(registry.METHODS, "silo", replace(registry.METHODS["silo"], client=client))  # type: ignore[arg-type]
    alone = private_of(toy_study("silo", init_private="common"), 3)
    ditto = toy_study("ditto", algorithm_settings={"lam": 0.0})
    assert same_bits(of_slot(private_of(ditto, 3), "personal"), alone)


def test_a_large_lambda_pins_the_private_network_to_the_global_one() -> None:
    """With eta lambda = 1 a step lands at theta - eta grad L, whatever v was."""
    far = []
    for lam in (0.0, 1.0, 100.0):
        study = toy_study("ditto", algorithm_settings={"lam": lam}, learning_rate=0.01, local_steps=50, **PLAIN)
        mine = of_slot(private_of(study, 1), "personal")
        far.append(norm_of({name: mine[name] - theta for name, theta in start_of(study)["model"].items()}))
    assert far == sorted(far, reverse=True)
    assert far[-1] < 0.02


def test_a_step_of_ditto_matches_the_slow_reference() -> None:
    rate, lam = 0.3, 0.6
    study = toy_study(
        "ditto", LOGISTIC, algorithm_settings={"lam": lam}, learning_rate=rate, local_steps=2, batch_size=64, **PLAIN
    )
    data, begun = toy_data("ash"), start_of(study)["model"]
    start = {name: tensor + 0.3 for name, tensor in begun.items()}  # the second round's download
    theta, v = (flat([tensors["head.weight"], tensors["head.bias"]]) for tensors in (start, begun))
    assert theta != v
    for _ in range(2):
        gradient = reference.logistic_gradient(v[:-1], v[-1], data.train.x.double().tolist(), data.train.y.tolist())
        v = reference.ditto_step(v, theta, gradient, rate, lam)  # theta stays the downloaded one
    session = session_of(study)
    session.validate(1, {"model": begun})
    session.train(2, {"model": start})
    found = of_slot(session.export_state().tensors, "private/personal")
    assert flat([found["head.weight"], found["head.bias"]]) == pytest.approx(v, rel=1e-5, abs=1e-7)


def test_dittos_predictions_are_the_private_networks() -> None:
    study = toy_study("ditto")
    latest: Checkpoint = federation(study).checkpoints["ash"]["latest"]
    x = toy_data("ash").validation.x
    logits = Restored(study, task_of(study), latest.tensors).logits(x)
    other = {name: torch.zeros_like(t) if "/" not in name else t for name, t in latest.tensors.items()}
    assert torch.equal(Restored(study, task_of(study), other).logits(x), logits)
    assert {spec.key for spec in describe(study, "ash").upload} == BODY | HEAD


# MOON


def test_moon_with_zero_mu_is_fedavg() -> None:
    moon = federation(toy_study("moon", algorithm_settings={"mu": 0.0}))
    assert_same_models(moon, federation(toy_study("fedavg")))
    assert moon.digest != federation(toy_study("moon", algorithm_settings={"mu": 1.0})).digest
    assert describe(toy_study("moon", algorithm_settings={"mu": 0.0}), "ash").private == ()


@pytest.mark.parametrize("temperature", [0.07, 0.5, 5.0])
def test_the_contrast_matches_the_slow_reference(temperature: float) -> None:
    z, toward, away = torch.randn(3, 9, 4, generator=torch.Generator().manual_seed(1)).double()
    wanted = [
        reference.model_contrast(*row, temperature)
        for row in zip(z.tolist(), toward.tolist(), away.tolist(), strict=True)
    ]
    found = [contrast(z[[n]], toward[[n]], away[[n]], temperature).item() for n in range(9)]
    assert found == pytest.approx(wanted, rel=1e-9)
    assert contrast(z, toward, away, temperature).item() == pytest.approx(sum(wanted) / 9, rel=1e-9)
    assert all(0 < term <= log(1 + exp(2 / temperature)) for term in found)


def test_the_contrast_of_one_reference_with_itself_is_log_two() -> None:
    z, other = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1)).double()
    for n in range(6):
        assert contrast(z[[n]], other[[n]], other[[n]], 0.5).item() == pytest.approx(log(2), rel=1e-12)


def test_features_that_are_all_zero_have_a_finite_gradient() -> None:
    """A row for which every ReLU is closed has no direction; its cosine is 0."""
    z = torch.full((2, 3), -1.0, requires_grad=True)
    term = contrast(torch.relu(z), torch.ones(2, 3), -torch.ones(2, 3), 0.5)
    term.backward()  # type: ignore[no-untyped-call]
    assert term.item() == pytest.approx(log(2))
    assert z.grad is not None
    assert not z.grad.any()


def test_moons_reference_networks_drop_nothing_and_learn_nothing() -> None:
    network = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).train()
    twin = frozen_copy(network, {"0.bias": torch.ones(3)})
    assert not any(module.training for module in twin.modules())
    assert not any(parameter.requires_grad for parameter in twin.parameters())
    assert torch.equal(twin.state_dict()["0.bias"], torch.ones(3))
    assert not torch.equal(network.state_dict()["0.bias"], torch.ones(3))
    assert torch.equal(twin.state_dict()["0.weight"], network.state_dict()["0.weight"])


def test_in_the_first_round_moon_trains_as_fedavg() -> None:
    """The network before is the one downloaded, so the two pulls cancel, but for rounding."""
    moon, fedavg = (toy_study(algorithm, **PLAIN) for algorithm in ("moon", "fedavg"))
    mine = session_of(moon).train(1, start_of(moon)).uplink["model"]
    theirs = session_of(fedavg).train(1, start_of(fedavg)).uplink["model"]
    for name, delta in mine.items():
        torch.testing.assert_close(delta, theirs[name], rtol=1e-4, atol=1e-6)


def test_moon_keeps_the_network_as_its_training_left_it() -> None:
    study = toy_study("moon", NORMED)
    session, start = session_of(study), start_of(study)
    left = plus(start, session.train(1, start))["model"]
    kept = {k: t for k, t in session.export_state().tensors.items() if k.startswith("kept/")}
    assert {k.removeprefix("kept/") for k in kept} == {
        s.name for s in describe(study, "ash").private if "previous" in s.name
    }
    for name, tensor in left.items():
        torch.testing.assert_close(kept[f"kept/previous.{name}"], tensor)
    session.train(2, start)
    again = session.export_state().tensors
    assert not torch.equal(again["kept/previous.head.weight"], kept["kept/previous.head.weight"])


def test_a_step_of_moon_matches_the_slow_reference() -> None:
    """One step from a start where global, previous and current network differ, by a numerical gradient in float64."""
    rate, mu, temperature = 0.1, 2.0, 0.5
    study = toy_study(
        "moon", algorithm_settings={"mu": mu, "temperature": temperature}, learning_rate=rate, local_steps=2,
        batch_size=64, **PLAIN,
    )  # fmt: skip
    data, start = toy_data("ash"), start_of(study)["model"]
    session = session_of(study)
    session.train(1, {"model": start})
    previous = {k.removeprefix("kept/previous."): t.double() for k, t in session.export_state().tensors.items()
                if k.startswith("kept/")}  # fmt: skip
    base = {name: tensor + 0.3 * torch.ones_like(tensor) for name, tensor in start.items()}
    found = session.train(2, {"model": base}).uplink["model"]

    def features(at: dict[str, Tensor]) -> Tensor:
        return torch.relu(data.train.x.double() @ at["body.layers.0.weight"].T + at["body.layers.0.bias"])

    def loss(at: dict[str, Tensor]) -> Tensor:
        z = features(at)
        logits = z @ at["head.weight"].T + at["head.bias"]
        plain = torch.nn.functional.binary_cross_entropy_with_logits(logits.squeeze(1), data.train.y.double())
        with torch.no_grad():
            toward, away = features(anchor), features(previous)
        return plain + mu * contrast(z, toward, away, temperature)

    anchor = {name: tensor.double() for name, tensor in base.items()}
    at = {name: tensor.clone().requires_grad_() for name, tensor in anchor.items()}
    for _ in range(2):
        gradient = torch.autograd.grad(loss(at), list(at.values()))
        at = {k: (t - rate * g).detach().requires_grad_() for (k, t), g in zip(at.items(), gradient, strict=True)}
    for name, delta in found.items():
        torch.testing.assert_close(delta.double(), (at[name] - anchor[name]).detach(), rtol=1e-4, atol=1e-6)


# What cannot be


AT_LEAST_0 = "input should be greater than or equal to 0"
ONE_AMOUNT = "give either `steps` or `epochs`"


@pytest.mark.parametrize(
    ("algorithm", "settings", "message"),
    [
        ("fedprox", {"mu": -0.1}, f"`mu` in [algorithm]: {AT_LEAST_0}, found -0.1"),
        ("fedprox", {"mu": float("inf")}, "`mu` in [algorithm]: input should be a finite number, found inf"),
        ("apfl", {"alpha": 1.5}, "`alpha` in [algorithm]: input should be less than or equal to 1, found 1.5"),
        ("apfl", {"alpha_learning_rate": -1.0}, f"`alpha_learning_rate` in [algorithm]: {AT_LEAST_0}, found -1.0"),
        ("apfl", {"mixing": "all"}, "`mixing` in [algorithm]: input should be 'outputs' or 'weights', found 'all'"),
        ("ditto", {"lam": -1.0}, f"`lam` in [algorithm]: {AT_LEAST_0}, found -1.0"),
        ("moon", {"temperature": 0.0}, "`temperature` in [algorithm]: input should be greater than 0, found 0.0"),
        ("moon", {"mu": -2}, f"`mu` in [algorithm]: {AT_LEAST_0}, found -2"),
        ("fedrep", {"train_head": {}}, f"[algorithm.train_head]: {ONE_AMOUNT}"),
        ("fedrep", {"train_body": {"steps": 1, "epochs": 1}}, f"[algorithm.train_body]: {ONE_AMOUNT}"),
        ("fedrep", {"train_head": {"epochs": -1}}, f"`epochs` in [algorithm.train_head]: {AT_LEAST_0}, found -1"),
        ("fedper", {"head": []}, "`head` in [algorithm]: tuple should have at least 1 item after validation, not 0"),
    ],
)
def test_a_setting_out_of_its_range_is_refused_with_its_key(
    algorithm: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadData) as refusal:
        fit(algorithm, algorithm_settings=settings)
    assert refusal.value.message == f"study.toml: {message}"


@pytest.mark.parametrize("algorithm", ["lgfedavg", "fedper", "fedrep", "fedbabu", "moon"])
def test_logistic_regression_has_no_body_to_divide(algorithm: str) -> None:
    with pytest.raises(BadData) as refusal:
        fit(algorithm, model=LOGISTIC)
    assert refusal.value.message == (
        f"study.toml: algorithm `{algorithm}` needs a network with a body and a head, model `mlp` as it is set has none"
    )
    assert refusal.value.hint == "model `mlp` has, with hidden layers: `hidden = [5]` in [model]"


def test_fedbabu_whose_heads_would_start_apart_is_refused() -> None:
    with pytest.raises(BadData) as refusal:
        resolve(StudyFile.model_validate(study_tables("fedbabu", init_private="site")))
    assert refusal.value.message == (
        "study.toml: algorithm `fedbabu` needs the same initial weights at every site, [training] says "
        '`init_private = "site"`'
    )
    assert refusal.value.hint == 'in [training]: `init_private = "common"`'


NAMES = "there are: body.layers.0.bias, body.layers.0.weight, head.bias, head.weight"


@pytest.mark.parametrize(
    ("algorithm", "settings", "message", "hint"),
    [
        pytest.param(
            "fedrep", {"head": ["head.*", "haed.*"]},
            "`head` in [algorithm] has `haed.*`, which no parameter of model `mlp` is called", NAMES, id="head",
        ),
        pytest.param(
            "fedavg", {"fine_tuning": {"epochs": 1, "train": ["classifier.*"]}},
            "`fine_tuning.train` in [algorithm] has `classifier.*`, which no parameter of model `mlp` is called", NAMES,
            id="fine-tuning",
        ),
        pytest.param(
            "fedper", {"head": ["*"]}, "algorithm `fedper` as it is set shares no parameter of model `mlp`",
            "`head` in [algorithm] takes all of them", id="nothing to share",
        ),
    ],
)  # fmt: skip
def test_patterns_that_choose_nothing_are_refused_before_anything_runs(
    algorithm: str, settings: dict[str, Any], message: str, hint: str
) -> None:
    study = fit(algorithm, algorithm_settings=settings)
    for attempt in (lambda: describe(study, "ash"), lambda: initial_model(study), lambda: session_of(study)):
        with pytest.raises(BadData) as refusal:
            attempt()
        assert (refusal.value.message, refusal.value.hint) == (message, hint)


@pytest.mark.parametrize("algorithm", ["apfl", "ditto", "fedrep"])
def test_a_state_that_lacks_a_private_tensor_is_refused(algorithm: str) -> None:
    study = fit(algorithm)
    state = session_of(study).export_state()
    missing = sorted(state.tensors)[0]
    tensors = {key: tensor for key, tensor in state.tensors.items() if key != missing}
    with pytest.raises(BadData) as refusal:
        session_of(study, state=SessionState(tensors, state.meta))
    assert refusal.value.message == (
        f"the kept state does not fit the study's network: `{missing.removeprefix('private/')}` is missing"
    )
