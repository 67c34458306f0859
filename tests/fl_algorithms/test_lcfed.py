"""LC-Fed: channels chosen by the site's code, heads that all sites see, and the correction where they disagree."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_algorithms.engine.algorithm import algorithm_of
from fl_algorithms.engine.partition import build, describe, initial_model, task_of
from fl_algorithms.engine.session import SessionState
from fl_algorithms.engine.training import seeded
from fl_algorithms.lab.federation import aggregate, downlink, run_federation
from fl_algorithms.methods.lcfed.client import CALIBRATION
from fl_algorithms.methods.lcfed.server import HEAD, HEADS
from fl_algorithms.models.lcnet import Calibration, SelectingBody, Selection, disagreement
from fl_algorithms.resolving import resolve
from fl_algorithms.server.aggregator import server_aggregator
from fl_algorithms.study import ResolvedStudy
from tests.fl_algorithms.image_toys import MASKS
from tests.fl_algorithms.toys import U, session_of, toy_masks, toy_study
from tests.reference import calibrated, gaussian_blur
from wardround.errors import BadData
from wardround.records.study import StudyFile
from wardround.tensors.manifests import MODEL

NORMED = {**U, "norm": "batch"}
STILL = {"steps": 0}


def study_of(model: dict[str, Any] | None = None, sites: int = 3, **settings: Any) -> ResolvedStudy:
    names = ["ash", "birch", "cedar"][:sites]
    return toy_study("lcfed", model, sites=names, rounds=2, algorithm_settings=settings)


def networks_of(study: ResolvedStudy, site: str = "ash") -> dict[str, nn.Module]:
    return build(study, task_of(study), algorithm_of(study), site)


class Rounds:
    """A federation round by round, with what the coordinator keeps in between."""

    def __init__(self, study: ResolvedStudy, rows: dict[str, int] | None = None) -> None:
        self.study = study
        sites = study.study.sites
        data = {site: toy_masks(site, (rows or {}).get(site, 8)) for site in sites}
        self.sessions = {site: session_of(study, site, data[site]) for site in sites}
        self.aggregator = server_aggregator(study, describe(study, sites[0]).upload)
        first = initial_model(study)
        self.kept = {kept.spec.key: first[kept.source].clone() for kept in self.aggregator.keeps}
        self.number = 0

    def run(self, only: tuple[str, ...] | None = None) -> dict[str, Any]:
        self.number += 1
        results = {
            site: session.train(self.number, downlink(self.aggregator, self.kept, site, self.number))
            for site, session in self.sessions.items()
            if only is None or site in only
        }
        self.kept, _ = aggregate(self.study, self.aggregator, self.kept, self.number, results)
        return results


# The selection of channels


def test_the_weights_lie_between_0_and_1_and_a_channel_is_at_most_doubled() -> None:
    selection, x = Selection(6, 3, 16), torch.randn(4, 6, 5, 5)
    h = selection.weights(x, 1)
    assert h.shape == (4, 6)
    assert 0 < h.min() <= h.max() < 1
    torch.testing.assert_close(selection(x, 1), x * h[:, :, None, None] + x)


def test_another_sites_code_chooses_other_channels() -> None:
    with seeded(1):  # a squeeze this narrow may be at rest, whatever the code
        selection, x = Selection(6, 3, 4), torch.randn(2, 6, 5, 5)
    assert not torch.allclose(selection.weights(x, 0), selection.weights(x, 2))


def test_the_squeeze_is_narrower_by_the_reduction() -> None:
    assert [m.out_features for m in Selection(32, 3, 16).squeeze if isinstance(m, nn.Linear)] == [4, 32]  # 2 * 32 / 16


def test_every_depths_selection_is_shared_and_trained() -> None:
    """In the published code those of the deeper network are neither."""
    study = study_of()
    shared = {spec.name for spec in describe(study, "ash").upload if spec.bundle == MODEL}
    for depth in range(len(U["widths"])):
        assert f"select.{depth}.embed.0.weight" in shared
    deltas = Rounds(study).run()["ash"].uplink[MODEL]
    for depth in range(len(U["widths"])):
        assert deltas[f"select.{depth}.squeeze.2.weight"].any()


def test_each_site_uses_its_own_code_and_keeps_it() -> None:
    rounds = Rounds(study_of())
    rounds.run()
    codes = [rounds.sessions[s].export_state().tensors["private/position"].item() for s in ("ash", "birch", "cedar")]
    assert codes == [0, 1, 2]
    assert "position" in {stay.name for stay in describe(rounds.study, "ash").private}


def test_the_distance_of_the_codes_is_the_mean_over_depths_and_other_sites() -> None:
    study = study_of()
    network = networks_of(study)[MODEL]
    assert isinstance(network, SelectingBody)
    network.get_buffer("position").fill_(1)
    x = torch.randn(2, 1, 8, 8)
    seen: list[Tensor] = []
    for selection in network.select:
        selection.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    features, distance = network.with_distance(x)
    by_hand = []
    for selection, at_depth in zip(network.select, seen, strict=True):
        assert isinstance(selection, Selection)
        own = selection.weights(at_depth, 1)
        by_hand += [((own - selection.weights(at_depth, other)) ** 2).mean().item() for other in (0, 2)]
    assert distance.item() == pytest.approx(sum(by_hand) / 4)
    assert torch.equal(features, network(x))


def test_alpha_drives_the_codes_apart() -> None:
    study = study_of(train_head=STILL, train_calibration=STILL, train_body={"steps": 15}, alpha=20.0)
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    rounds = Rounds(study)
    network = rounds.sessions["ash"]._context.networks[MODEL]
    assert isinstance(network, SelectingBody)
    before = network.with_distance(x)[1].item()
    rounds.run(only=("ash",))
    assert network.with_distance(x)[1].item() > before


# The correction


def test_heads_that_agree_leave_no_disagreement() -> None:
    p = torch.rand(2, 3, 4, 4)
    assert torch.equal(disagreement(p, [p, p]), torch.zeros_like(p))
    assert torch.equal(disagreement(p, []), torch.zeros_like(p))


def test_the_disagreement_is_the_root_mean_square_over_its_largest() -> None:
    own = torch.tensor([[[[0.5, 0.5], [0.5, 0.1]]]])
    others = [torch.tensor([[[[0.5, 0.8], [0.9, 0.1]]]]), torch.tensor([[[[0.5, 0.1], [0.5, 0.1]]]])]
    raw = np.sqrt(np.array([[0.0, (0.3**2 + 0.4**2) / 2], [0.4**2 / 2, 0.0]]))
    found = disagreement(own, others)
    np.testing.assert_allclose(found[0, 0].numpy(), raw / raw.max(), rtol=1e-6)


def test_the_blur_is_a_gaussian_along_each_side() -> None:
    calibration = Calibration(2, 1, 2, blur=5, sigma=1.5)
    maps = torch.rand(1, 2, 7, 6)
    expected = [[gaussian_blur(one.tolist(), 5, 1.5) for one in row] for row in maps]
    np.testing.assert_allclose(calibration._soft(maps).numpy(), np.array(expected), rtol=1e-5)


@pytest.mark.parametrize("outputs", [1, 3], ids=["foreground", "three classes"])
def test_the_correction_matches_the_slow_reference(outputs: int) -> None:
    generator = torch.Generator().manual_seed(4)
    features = torch.randn(2, 3, 5, 5, generator=generator)
    own, *others = (torch.randn(2, outputs, 5, 5, generator=generator) for _ in range(3))
    calibration = Calibration(3, outputs, 2, blur=3, sigma=1.0)
    kernels = [(m.weight[0].tolist(), m.bias.item()) for m in calibration.correct if isinstance(m, nn.Conv2d)]
    found = calibration(features, own, others)
    for n in range(2):
        expected = calibrated(features[n].tolist(), own[n].tolist(), [o[n].tolist() for o in others], kernels, 3, 1.0)
        np.testing.assert_allclose(found[n].detach().numpy(), np.array(expected), rtol=1e-4, atol=1e-5)


def test_the_correction_of_volumes_has_their_size() -> None:
    calibration = Calibration(2, 1, 3, blur=31, sigma=4.0)
    shape = (2, 1, 4, 6, 2)
    assert calibration(torch.randn(2, 2, 4, 6, 2), torch.randn(shape), [torch.randn(shape)]).shape == shape


def test_the_correction_is_shown_the_other_sites_heads_and_not_the_own() -> None:
    study = study_of()
    networks = networks_of(study)
    seen: list[list[Tensor]] = []
    networks[CALIBRATION].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[2]))
    networks[MODEL].get_buffer("position").fill_(1)
    x = torch.randn(2, 1, 8, 8)
    algorithm_of(study).infer(networks, x)
    first, _, third = networks[HEADS].children()
    features = networks[MODEL](x)
    assert len(seen[0]) == 2
    assert torch.equal(seen[0][0], first(features))
    assert torch.equal(seen[0][1], third(features))


# The phases


@pytest.mark.parametrize(
    ("phase", "moves"), [("train_head", HEAD), ("train_body", MODEL), ("train_calibration", CALIBRATION)]
)
def test_each_phase_moves_its_own_part_alone(phase: str, moves: str) -> None:
    amounts = dict.fromkeys(("train_head", "train_body", "train_calibration"), STILL) | {phase: {"steps": 3}}
    rounds = Rounds(study_of(NORMED, **amounts))
    session = rounds.sessions["ash"]
    before = session.export_state().tensors
    uplink = rounds.run()["ash"].uplink
    moved = {bundle for bundle, deltas in uplink.items() if any(delta.any() for delta in deltas.values())}
    after = session.export_state().tensors
    corrected = {key for key in before if key.startswith(f"private/{CALIBRATION}..")}
    assert corrected
    if any(not torch.equal(before[key], after[key]) for key in corrected):
        moved.add(CALIBRATION)
    assert moved == {moves}


def test_without_selection_and_calibration_a_site_does_as_in_fedrep() -> None:
    """The same head, body, batches and amounts give the same body and head, bit for bit."""
    ours = study_of(NORMED, selection=False, calibration=False, train_head={"steps": 3}, train_body={"steps": 4})
    tables = ours.file.model_dump(mode="json") | {
        "algorithm": {"name": "fedrep", "train_head": {"steps": 3}, "train_body": {"steps": 4}}
    }
    theirs = resolve(StudyFile.model_validate(tables))
    data = toy_masks("ash")
    fedrep = session_of(theirs, "ash", data)
    fresh, own = session_of(ours, "ash", data).export_state(), fedrep.export_state().tensors
    heads = {f"private/{HEAD}..{name}": own[f"private/head.{name}"] for name in ("weight", "bias")}
    lcfed = session_of(ours, "ash", data, state=SessionState({**fresh.tensors, **heads}, fresh.meta))
    base = initial_model(theirs)
    a = fedrep.train(1, {MODEL: base})
    b = lcfed.train(1, {MODEL: {name: base[name] for name in initial_model(ours)}})
    assert a.metrics == b.metrics
    assert a.uplink.keys() == b.uplink.keys() == {MODEL}
    assert all(torch.equal(delta, b.uplink[MODEL][name]) for name, delta in a.uplink[MODEL].items())
    for key in heads:
        assert torch.equal(fedrep.export_state().tensors[key.replace("..", ".")], lcfed.export_state().tensors[key])


# What leaves, and what the coordinator makes of it


def test_with_calibration_the_head_leaves_beside_the_body_and_nothing_else() -> None:
    partition = describe(study_of(), "ash")
    assert {spec.bundle for spec in partition.upload} == {MODEL, HEAD}
    assert {spec.name for spec in partition.upload if spec.bundle == HEAD} == {"weight", "bias"}
    assert {stay.name.split("/")[0] for stay in partition.private} >= {CALIBRATION}
    assert partition.exposure == "sites"


def test_without_calibration_no_head_leaves_and_nobody_is_shown_a_sites_own() -> None:
    partition = describe(study_of(calibration=False), "ash")
    assert {spec.bundle for spec in partition.upload} == {MODEL}
    assert partition.download == partition.upload
    assert {"head/weight", "head/bias"} <= {stay.name for stay in partition.private}
    assert partition.exposure == ""


def test_the_bodies_are_averaged_with_equal_weights_whatever_the_rows() -> None:
    rounds = Rounds(study_of(), rows={"ash": 4, "birch": 12})
    before = dict(rounds.kept)
    results = rounds.run()
    for name, delta in results["ash"].uplink[MODEL].items():
        mean = np.mean([r.uplink[MODEL][name].double().numpy() for r in results.values()], axis=0)
        expected = (before[name].double().numpy() + mean).astype(np.float32)
        np.testing.assert_array_equal(rounds.kept[name].numpy(), expected)
        assert delta.shape == expected.shape


def test_every_site_sees_every_sites_head_as_it_last_was() -> None:
    rounds = Rounds(study_of())
    rounds.run()
    heads = {place: rounds.kept[f"{HEADS}/{place}.weight"] for place in range(3)}
    assert not torch.equal(heads[0], heads[1])
    rounds.run(only=("birch",))
    assert torch.equal(rounds.kept[f"{HEADS}/0.weight"], heads[0])  # ash did not answer
    assert not torch.equal(rounds.kept[f"{HEADS}/1.weight"], heads[1])
    for place, site in enumerate(rounds.study.study.sites):
        base = downlink(rounds.aggregator, rounds.kept, site, 3)
        assert torch.equal(base[HEAD]["weight"], rounds.kept[f"{HEADS}/{place}.weight"])
        for other in heads:
            assert torch.equal(base[HEADS][f"{other}.weight"], rounds.kept[f"{HEADS}/{other}.weight"])


def test_a_study_of_volumes_and_three_classes_runs() -> None:
    tables = study_of(sites=2).file.model_dump(mode="json")
    tables["task"] = {**MASKS, "size": [4, 4, 4], "fit": "exact", "classes": ["none", "left", "right"]}
    study = resolve(StudyFile.model_validate(tables))
    networks = networks_of(study)
    assert algorithm_of(study).infer(networks, torch.randn(2, 1, 4, 4, 4)).shape == (2, 3, 4, 4, 4)


# What is refused


@pytest.mark.parametrize("model", ["unetpp", "fcn"])
def test_a_network_that_is_no_u_is_refused(model: str) -> None:
    with pytest.raises(BadData) as refusal:
        study_of({"name": model, "widths": [2, 4]})
    said = f"algorithm `lcfed` needs a network with depths of a U, model `{model}` as it is set has none"
    assert refusal.value.message.endswith(said)
    assert refusal.value.hint == 'models `unet` and `resunet` have: `name = "unet"` in [model]'


def test_a_table_is_refused() -> None:
    with pytest.raises(BadData, match="needs a network with a body and a head"):
        resolve(StudyFile.model_validate({
            **study_of().file.model_dump(mode="json"),
            "task": {"name": "tabular", "label": "ill", "classes": ["no", "yes"], "features": ["u"]},
            "model": {"name": "mlp"},
        }))  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"blur": 30}, "`blur` is 30; a kernel has a middle, so it is odd"),
        ({"alpha": 0.1, "selection": False}, "`alpha` drives the selections of sites apart, and `selection` is off"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(BadData) as refusal:
        study_of(**settings)
    assert refusal.value.message.endswith(said)


def test_masks_are_learned_better_than_before_training() -> None:
    amounts = {"train_head": {"steps": 5}, "train_body": {"steps": 15}, "train_calibration": {"steps": 15}}
    study = study_of(U | {"norm": "group"}, sites=2, **amounts)
    data = {site: toy_masks(site) for site in study.study.sites}
    outcome = run_federation(study, task_of(study), data)
    rounds = Rounds(study)
    before = session_of(study, "ash", data["ash"]).validate(1, downlink(rounds.aggregator, rounds.kept, "ash", 1))
    after, start = outcome.checkpoints["ash"]["latest"].val_loss, before.metrics["val_loss"]
    assert after is not None
    assert start is not None
    assert after < start
