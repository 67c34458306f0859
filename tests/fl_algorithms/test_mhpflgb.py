"""MH-pFLGB: the bypass that is shared, the fusion that stays, and the two stages of a round."""

from collections.abc import Mapping
from math import exp
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_algorithms import registry, rows
from fl_algorithms.engine.algorithm import algorithm_of
from fl_algorithms.engine.partition import build, describe, initial_model, task_of
from fl_algorithms.engine.session import SiteSession
from fl_algorithms.engine.training import Batch
from fl_algorithms.lab.federation import run_federation
from fl_algorithms.methods.mhpflgb.client import BYPASS, FUSION, fused, own_head
from fl_algorithms.models.bypass import Bypass, Fusion, Resample, source_weights
from fl_algorithms.resolving import resolve
from fl_algorithms.settings.extractors import CLASSIFIERS, SEGMENTERS
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import SiteData, Split
from tests.fl_algorithms.image_toys import IMAGES, MASKS, RESNET
from tests.fl_algorithms.toys import U, bundles, session_of, start_of, toy_data, toy_masks, toy_study
from wardround.errors import BadData
from wardround.records.study import Named, StudyFile
from wardround.tensors.manifests import MODEL

NORMED: dict[str, Any] = {"name": "mlp", "hidden": [4], "norm": "batch", "dropout": 0.2}


def study_of(task: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **settings: Any) -> ResolvedStudy:
    """Of two sites and one round of two local and one global step; ``settings`` of [algorithm]."""
    tables = {
        "study": {"name": "toy", "sites": ["ash", "birch"], "rounds": 1, "seed": 5},
        "task": task or {"name": "tabular", "label": "ill", "classes": ["no", "yes"], "features": ["u", "v", "w"]},
        "model": model or NORMED,
        "algorithm": {"name": "mhpflgb", "train_local": {"steps": 2}, "train_global": {"steps": 1}, **settings},
        "training": {"batch_size": 4, "local_steps": 1},
    }
    return resolve(StudyFile.model_validate(tables))


def networks_of(study: ResolvedStudy, site: str = "ash") -> dict[str, nn.Module]:
    return build(study, task_of(study), algorithm_of(study), site)


def kept(session: SiteSession, part: str) -> dict[str, Tensor]:
    """What the session keeps of a slot; the whole private state holds no tensor of the bypass."""
    tensors = session.export_state().tensors
    prefix = "private/" if part == MODEL else f"private/{part}.."
    others = (f"private/{FUSION}..",) if part == MODEL else ()
    return {key: value for key, value in tensors.items() if key.startswith(prefix) and not key.startswith(others)}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# The fusion


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 4, 6), (2, 3, 4, 4, 4)], ids=["vectors", "maps", "volumes"])
def test_the_weights_of_the_two_sources_sum_to_one_in_every_channel(shape: tuple[int, ...]) -> None:
    local, raised = torch.randn(shape), torch.randn(shape)
    a, b = source_weights(local, raised)
    assert a.shape == b.shape == (*shape[:2], *(1 for _ in shape[2:]))
    torch.testing.assert_close(a + b, torch.ones_like(a))
    assert 0 < a.min() <= a.max() < 1


def test_a_channels_weight_is_the_softmax_of_its_two_means() -> None:
    """Equation 4 by hand; the other channels do not matter."""
    local, raised = torch.zeros(1, 2, 2, 2), torch.zeros(1, 2, 2, 2)
    local[0, 0] = torch.tensor([[1.0, 2.0], [3.0, 6.0]])  # mean 3
    raised[0, 0] = 1.0
    local[0, 1] = 9.0
    a, b = source_weights(local, raised)
    assert a[0, 0].item() == pytest.approx(exp(3) / (exp(3) + exp(1)))
    assert b[0, 0].item() == pytest.approx(exp(1) / (exp(3) + exp(1)))


def test_equal_sources_fuse_to_themselves() -> None:
    fusion = Fusion((3, 4, 4), (3, 4, 4), up=True, down=False, weighed=True)
    fusion.up = nn.Identity()  # type: ignore[assignment]
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(fusion(x, x), x)


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [((5,), (3,)), ((5, 3, 2), (4, 12, 8)), ((5, 12, 8), (4, 3, 2)), ((5, 3, 3), (4, 10, 7)), ((5, 10, 7), (4, 3, 3)),
     ((2, 2, 2, 2), (3, 4, 4, 8))],
    ids=["vectors", "up", "down", "up to odd sides", "down from odd sides", "volumes"],
)  # fmt: skip
def test_features_of_any_shape_are_brought_to_the_others(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
    assert Resample(inputs, outputs)(torch.randn(2, *inputs)).shape == (2, *outputs)


# The bypass


@pytest.mark.parametrize(("masks", "millions"), [(False, 0.03), (True, 0.2)])
def test_the_bypass_has_the_papers_number_of_parameters(masks: bool, millions: float) -> None:
    bypass = Bypass((3, 32, 32), 8, (), masks=masks)
    assert round(sum(p.numel() for p in bypass.parameters()) / 1e6, 2 - masks) == millions


@pytest.mark.parametrize("masks", [False, True])
def test_the_bypass_is_the_same_for_images_of_every_size(masks: bool) -> None:
    small, large = (Bypass((1, side, side + 3), 2, (4, 8), masks=masks).state_dict() for side in (8, 33))
    assert {name: t.shape for name, t in small.items()} == {name: t.shape for name, t in large.items()}
    bypass = Bypass((1, 8, 11), 2, (4, 8), masks=masks)
    bypass.load_state_dict(large)
    assert bypass.body is not None
    assert bypass.body(torch.randn(2, 1, 33, 36)).shape[:2] == (2, 8)


def test_the_bypass_has_no_statistics_and_can_be_smaller() -> None:
    names = Bypass((3, 8, 8), 1, (2, 4), masks=True).state_dict()
    assert not [name for name in names if "running" in name or "num_batches" in name]
    assert names["body.0.weight"].shape == (2, 3, 3, 3)


# What leaves


@pytest.mark.parametrize(
    ("task", "model"),
    [(None, NORMED), (IMAGES, RESNET), (MASKS, U)],
    ids=["columns", "images", "masks"],
)
def test_only_the_bypass_leaves(task: dict[str, Any] | None, model: dict[str, Any]) -> None:
    study = study_of(task, model, widths=[3, 4])
    partition = describe(study, "ash")
    assert {spec.bundle for spec in partition.upload} == {BYPASS}
    assert {spec.name.split(".")[0] for spec in partition.upload} == {"body", "head"}
    sent = sum(spec.bytes for spec in partition.upload) // 4
    assert sent == sum(p.numel() for p in networks_of(study)[BYPASS].parameters())
    assert partition.download == partition.upload
    private = {stay.name.split("/")[0] for stay in partition.private}
    assert {"fusion", BYPASS} & private == {"fusion"}


def test_the_bypass_starts_alike_at_sites_whose_own_networks_do_not() -> None:
    study = study_of()
    ash, birch = networks_of(study), networks_of(study, "birch")
    assert same(ash[BYPASS].state_dict(), birch[BYPASS].state_dict())
    assert not same(ash[MODEL].state_dict(), birch[MODEL].state_dict())
    assert not same(ash[FUSION].state_dict(), birch[FUSION].state_dict())


# The stages


@pytest.mark.parametrize(("stage", "moves"), [("train_local", {MODEL, FUSION}), ("train_global", {BYPASS})])
def test_each_stage_moves_its_own_part_alone(stage: str, moves: set[str]) -> None:
    """Buffers too: the statistics of the own network's batch norms stand still in the global stage."""
    amounts = {"train_local": {"steps": 0}, "train_global": {"steps": 0}, stage: {"steps": 3}}
    study = study_of(**amounts)
    session = session_of(study)
    before = {part: kept(session, part) for part in (MODEL, FUSION)}
    result = session.train(1, start_of(study))
    moved = {part for part in (MODEL, FUSION) if not same(before[part], kept(session, part))}
    if any(delta.any() for delta in result.uplink[BYPASS].values()):
        moved.add(BYPASS)
    assert moved == moves
    if BYPASS in moves:
        assert all(delta.any() for delta in result.uplink[BYPASS].values())  # body and head


def gradients_of(study: ResolvedStudy, phase: int) -> dict[str, Tensor | None]:
    """Of everything, for one stage's loss of one batch, nothing frozen."""
    context = session_of(study)._context
    loss = context.algorithm.phases(context)[phase].loss
    assert loss is not None
    data = context.data.train
    assert isinstance(data.x, Tensor)
    loss(context, Batch(data.x[:4], data.y[:4])).backward()  # type: ignore[no-untyped-call]
    return {
        f"{slot}/{name}": None if p.grad is None else p.grad.clone()
        for slot, network in context.networks.items()
        for name, p in network.named_parameters()
    }


def test_a_stages_loss_is_nine_tenths_its_own_heads_and_one_tenth_the_others() -> None:
    """The local head hears the local loss alone, so its gradient is in proportion to the stage's weight of it."""
    local, globally = (gradients_of(study_of(), phase) for phase in (0, 1))
    for name, factor in ((f"{MODEL}/head.weight", 9.0), (f"{BYPASS}/head.weight", 1 / 9)):
        ours, theirs = local[name], globally[name]
        assert ours is not None
        assert theirs is not None
        torch.testing.assert_close(ours, factor * theirs)


def test_the_frozen_bypass_passes_gradients_through_to_the_own_body() -> None:
    """With the other head's loss alone: what reaches the own body came through the bypass's head."""
    gradients = gradients_of(study_of(own=0.0, other=1.0), phase=0)
    reached = gradients[f"{MODEL}/body.layers.0.weight"]
    assert reached is not None
    assert reached.any()
    head = gradients[f"{MODEL}/head.weight"]
    assert head is None or not head.any()


def test_the_default_amounts_and_rates_are_the_cards() -> None:
    study = resolve(study_of().file.model_copy(update={"algorithm": Named(name="mhpflgb")}))
    local, globally = algorithm_of(study).phases(session_of(study)._context)
    assert (local.epochs, globally.epochs) == (4, 1)
    assert (local.learning_rate, globally.learning_rate) == (1e-4, 1e-5)
    settings = study.method.settings.model_dump()
    assert (settings["own"], settings["other"]) == (0.9, 0.1)


# What answers


def test_the_global_head_is_not_asked() -> None:
    networks = networks_of(study_of())
    x = torch.randn(3, 3)
    before = own_head(networks, x)
    for parameter in networks[BYPASS].get_submodule("head").parameters():
        nn.init.constant_(parameter, float("nan"))
    assert torch.equal(own_head(networks, x), before)


def test_the_answer_hears_the_global_body() -> None:
    networks = networks_of(study_of())
    x = torch.randn(3, 3)
    before = own_head(networks, x)
    for parameter in networks[BYPASS].get_submodule("body").parameters():
        nn.init.constant_(parameter, 1.0)
    assert not torch.equal(own_head(networks, x), before)


# The ablations of the paper's Table 4


def test_without_a_global_head_the_own_head_alone_is_asked_and_the_body_alone_leaves() -> None:
    study = study_of(global_head=False)
    assert {spec.name.split(".")[0] for spec in describe(study, "ash").upload} == {"body"}
    assert not [stay.name for stay in describe(study, "ash").private if "down" in stay.name]
    assert all(delta.any() for delta in session_of(study).train(1, start_of(study)).uplink[BYPASS].values())


def test_without_a_global_body_the_own_bodys_features_are_not_mixed_with_anything() -> None:
    study = study_of(global_body=False)
    assert {spec.name.split(".")[0] for spec in describe(study, "ash").upload} == {"head"}
    networks = networks_of(study)
    x = torch.randn(3, 3)
    assert torch.equal(own_head(networks, x), networks[MODEL](x))
    assert all(delta.any() for delta in session_of(study).train(1, start_of(study)).uplink[BYPASS].values())


def test_without_feature_fusion_both_sources_count_alike() -> None:
    study = study_of(feature_fusion=False)
    networks = networks_of(study)
    x = torch.randn(3, 3)
    local, bypass = (networks[slot].get_submodule("body")(x) for slot in (MODEL, BYPASS))
    raised = networks[FUSION].get_submodule("up")(bypass)
    torch.testing.assert_close(fused(networks, x), (local + raised) / 2)
    assert describe(study, "ash").upload == describe(study_of(), "ash").upload


def test_without_both_nothing_would_be_shared() -> None:
    with pytest.raises(BadData, match="without `global_body` and `global_head` nothing is shared"):
        study_of(global_body=False, global_head=False)


# Which networks fit


@pytest.mark.parametrize("name", [*CLASSIFIERS, *SEGMENTERS])
def test_every_network_for_images_takes_part(name: str) -> None:
    task = IMAGES if registry.MODELS[name].takes == rows.IMAGES else MASKS
    model: dict[str, Any] = {"name": name, "stem": "small", "width": 0.1} if task is IMAGES else {**U, "name": name}
    task = {**task, "size": [16, 16]}
    study = study_of(task, model, widths=[2, 3])
    data = SiteData(*(_images(study, n) for n in (6, 3)), test=None, digest="0" * 64)
    result = SiteSession(study, "ash", task_of(study), data).train(1, bundles(initial_model(study)))
    assert result.metrics["val_loss"] is not None
    assert all(delta.any() for delta in result.uplink[BYPASS].values())


def _images(study: ResolvedStudy, n: int) -> Split:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, *task_of(study).input_shape, generator=generator)
    masks = study.task.name == MASKS["name"]
    return Split(x, (x[:, 0] > 0).to(torch.uint8) if masks else torch.arange(n) % 2)


@pytest.mark.parametrize(
    ("task", "body", "said"),
    [
        (IMAGES, nn.Conv2d(1, 4, 3), "fuses features that are one vector for each sample; the body of model `resnet10` "
         "gives [4, 6, 6]"),
        (MASKS, nn.Flatten(), "fuses features that are one map for each channel; the body of model `unet` gives [64]"),
    ],
    ids=["maps where vectors are wanted", "vectors where maps are wanted"],
)  # fmt: skip
def test_a_network_whose_features_do_not_fit_is_refused(
    task: dict[str, Any], body: nn.Module, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = nn.Module()
    odd.body = body
    monkeypatch.setattr("fl_algorithms.methods.mhpflgb.client.study_network", lambda study, task: odd)
    study = study_of(task, RESNET if task is IMAGES else U)
    with pytest.raises(BadData) as refusal:
        algorithm_of(study).slots[FUSION](study, task_of(study))
    assert refusal.value.message == f"algorithm `mhpflgb` {said}"


def test_the_fusion_is_drawn_from_its_own_stream_whatever_the_network_draws() -> None:
    """Two networks whose bodies give as many features have the same fusion layers at a site."""
    one, other = (networks_of(study_of(model={"name": "mlp", "hidden": [*first, 4]}))[FUSION] for first in ([], [9]))
    assert same(one.state_dict(), other.state_dict())


# A federation


def test_after_a_round_the_bypass_is_one_and_the_own_networks_are_two() -> None:
    study = toy_study("mhpflgb", rounds=2, algorithm_settings={"local_learning_rate": 0.05})
    outcome = run_federation(study, task_of(study), {site: toy_data(site) for site in study.study.sites})
    latest = [outcome.checkpoints[site]["latest"].tensors for site in study.study.sites]
    for name, tensor in outcome.shared.items():
        assert all(torch.equal(tensors[name], tensor) for tensors in latest)
    assert not torch.equal(latest[0]["head.weight"], latest[1]["head.weight"])
    assert not torch.equal(latest[0]["fusion/up.layer.weight"], latest[1]["fusion/up.layer.weight"])


def test_masks_are_learned_better_than_before_training() -> None:
    settings = {"widths": [4, 8], "local_learning_rate": 0.02, "global_learning_rate": 0.01}
    study = study_of(MASKS, U, **settings, train_local={"steps": 25}, train_global={"steps": 5})
    outcome = run_federation(study, task_of(study), {site: toy_masks(site) for site in study.study.sites})
    fresh = SiteSession(study, "ash", task_of(study), toy_masks("ash")).validate(1, start_of(study))
    trained = outcome.checkpoints["ash"]["latest"].val_loss
    before = fresh.metrics["val_loss"]
    assert trained is not None
    assert before is not None
    assert trained < before
