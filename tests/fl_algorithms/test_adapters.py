"""Adapters for anybody's network, FENDA of images and masks, and networks of other libraries by name."""

import builtins
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_algorithms import architectures, registry
from fl_algorithms.engine.algorithm import algorithm_of
from fl_algorithms.engine.partition import build, describe, initial_model, task_of
from fl_algorithms.engine.session import SiteSession
from fl_algorithms.lab.federation import run_federation
from fl_algorithms.lab.site_data import load_sites
from fl_algorithms.models import libraries
from fl_algorithms.models.adapters import BodyHead, TwoExtractors, divided, replace_module
from fl_algorithms.models.fenda import fenda
from fl_algorithms.resolving import resolve
from fl_algorithms.settings.libraries import LIBRARIES, MONAI_MASKS
from fl_algorithms.settings.models import FendaSettings
from fl_algorithms.study import ResolvedStudy
from tests.fl_algorithms.image_toys import IMAGES, MASKS, image_study, packed
from wardround.errors import BadData, NeedsPerson
from wardround.records.schema import check
from wardround.records.study import Named, StudyFile

SMALL = {"name": "resnet10", "width": 0.0625}
FENDA_IMAGES: dict[str, Any] = {"name": "fenda_images", "shared": SMALL, "private": {**SMALL, "width": 0.05}}
FENDA_MASKS: dict[str, Any] = {"name": "fenda_masks", "shared": {"name": "unet", "widths": [2, 4]}}
VOLUMES: dict[str, Any] = {**MASKS, "size": [4, 8, 8], "fit": "exact"}


def made(name: str, shape: tuple[int, ...], outputs: int = 2, **settings: Any) -> nn.Module:
    """The network of a name as [model] has it."""
    row = registry.row_of(registry.MODELS, Named(name=name), "model", "study.toml")
    chosen = check(row.settings, settings, "study.toml", "model")
    network: nn.Module = architectures.built(row, chosen, shape, outputs)
    return network.eval()


# Adapters


def test_fenda_of_any_body_takes_two_of_them_and_a_head_on_both() -> None:
    network = TwoExtractors(lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU()), (5,), 3)
    x = torch.randn(4, 5)
    features = torch.cat([network.shared_extractor(x), network.private_extractor(x)], dim=1)
    assert torch.equal(network(x), network.head(features))
    assert network.head.weight.shape == (3, 14)
    assert not torch.equal(network.shared_extractor[0].weight, network.private_extractor[0].weight)
    assert {name.partition(".")[0] for name in network.state_dict()} == {
        "shared_extractor", "private_extractor", "head",
    }  # fmt: skip


def test_maps_of_two_sizes_are_brought_to_the_images_size() -> None:
    network = TwoExtractors(
        lambda: nn.Conv2d(1, 3, 3, padding=1), (1, 8, 6), 2, private=lambda: nn.Conv2d(1, 5, 3, 2, 1)
    )
    assert network.head.weight.shape == (2, 8, 1, 1)
    assert network(torch.randn(4, 1, 8, 6)).shape == (4, 2, 8, 6)


def test_a_vector_beside_a_map_is_refused() -> None:
    with pytest.raises(BadData) as caught:
        TwoExtractors(lambda: nn.Flatten(), (1, 2, 2), 1, private=lambda: nn.Conv2d(1, 3, 1))
    assert caught.value.message == (
        "the shared extractor gives features [4] of a sample, the private one [3, 2, 2]: they cannot stand beside each "
        "other"
    )
    assert caught.value.hint == "two bodies that both give one vector for a sample, or both maps"


def test_dropout_falls_on_the_features_of_both_while_training() -> None:
    network = TwoExtractors(lambda: nn.Linear(2, 50, bias=False), (2,), 1, dropout=0.5)
    seen: list[Tensor] = []
    network.head.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    x = torch.ones(1, 2)
    network.eval()(x)
    network.train()(x)
    assert 20 < int((seen[1] == 0).sum()) < 80
    assert not (seen[0] == 0).any()


def test_to_look_at_a_bodys_features_draws_nothing_and_trains_nothing() -> None:
    torch.manual_seed(3)
    first = fenda(FendaSettings(dropout=0.0), 3, 1)
    torch.manual_seed(3)
    plain = [nn.Linear(3, 5), nn.Linear(3, 5), nn.Linear(10, 1)]
    for ours, theirs in zip(first.parameters(), [p for layer in plain for p in layer.parameters()], strict=True):
        assert torch.equal(ours, theirs)
    with_norm = TwoExtractors(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), (3,), 1)
    assert with_norm.training
    assert not with_norm.shared_extractor[1].num_batches_tracked.item()


class Softened(nn.Module):
    """Its last layer is not its answer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.layer(x), dim=1)


def test_a_network_is_divided_only_where_its_last_layer_is_its_answer() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 2)))
    assert divided(network, (1, 2, 2)) == "2.1"
    head, x = network[2][1], torch.randn(5, 1, 2, 2)
    whole = network(x)
    replace_module(network, "2.1", nn.Identity())
    assert torch.equal(BodyHead(network, head)(x), whole)
    assert divided(Softened(), (4,)) is None
    assert divided(nn.ReLU(), (4,)) is None


# FENDA of images and masks


CASES = [
    pytest.param(IMAGES, FENDA_IMAGES, id="images"),
    pytest.param(MASKS, FENDA_MASKS, id="masks"),
    pytest.param(VOLUMES, FENDA_MASKS, id="volumes"),
]


def study_of(task: dict[str, Any], model: dict[str, Any], algorithm: str = "fenda", **settings: Any) -> ResolvedStudy:
    study = image_study(task, model)
    tables = study.file.model_dump(mode="json") | {"algorithm": {"name": algorithm, **settings}}
    tables["training"]["init_private"] = None  # as the method needs it
    return resolve(StudyFile.model_validate(tables), lab=True)


@pytest.mark.parametrize(("task", "model"), CASES)
def test_the_shared_extractor_leaves_alone(task: dict[str, Any], model: dict[str, Any]) -> None:
    study = study_of(task, model)
    partition = describe(study, "ash")
    assert {spec.name.partition(".")[0] for spec in partition.upload} == {"shared_extractor"}
    floats = {stay.name.partition(".")[0] for stay in partition.private if stay.dtype == "F32"}
    assert floats == {"private_extractor", "head"}
    networks = [build(study, task_of(study), algorithm_of(study), site)["model"] for site in ("ash", "birch")]
    drawn = [network.get_submodule("private_extractor").state_dict() for network in networks]
    assert any(not torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])


def test_the_private_extractor_may_be_another_network() -> None:
    model = {**FENDA_IMAGES, "private": {"name": "densenet", "width": 0.125, "blocks": [2, 2]}}
    study = study_of({**IMAGES, "size": [16, 16]}, model)
    names = {stay.name for stay in describe(study, "ash").private}
    assert any("denseblock1" in name for name in names)
    assert study.file.model.settings["shared"]["stem"] == "auto"  # every default is in what is approved
    private = study.file.model.settings["private"]
    assert private["name"] == "densenet"
    assert study_of({**IMAGES, "size": [16, 16]}, model) == study


def site_folders(folder: Path) -> Path:
    for seed, site in enumerate(("ash", "birch")):
        packed(folder / site / "train.npz", n=18, seed=seed)
        packed(folder / site / "test.npz", n=6, seed=seed + 10)
    return folder


METHODS = [
    pytest.param("fenda", {}, id="fenda"),
    pytest.param("fenda", {"soup": {"start_after": 1}}, id="fenda with a soup"),
    pytest.param("apfl", {}, id="apfl"),
]


@pytest.mark.parametrize(("algorithm", "settings"), METHODS)
@pytest.mark.parametrize(("task", "model"), CASES[:2])
def test_methods_train_and_go_on_after_a_restart_as_if_nothing_had_been(
    tmp_path: Path, task: dict[str, Any], model: dict[str, Any], algorithm: str, settings: dict[str, Any]
) -> None:
    study = study_of(task, model, algorithm, **settings)
    ready, folder = task_of(study), site_folders(tmp_path)
    sites = load_sites(study, ready, folder)
    outcome = run_federation(study, ready, sites)
    assert outcome.digest != outcome.initial_digest
    assert outcome.digest == run_federation(study, ready, sites).digest
    base = {"model": initial_model(study)}
    session = SiteSession(study, "ash", ready, sites["ash"])
    session.train(1, base)
    resumed = SiteSession(study, "ash", ready, sites["ash"], session.export_state())
    on, again = session.train(2, base), resumed.train(2, base)
    assert all(torch.equal(on.uplink["model"][name], again.uplink["model"][name]) for name in on.uplink["model"])
    if settings:
        kept = {name for name in session.export_state().tensors if name.startswith("kept/soup.")}
        assert all(name.startswith("kept/soup.shared_extractor.") for name in kept)
        assert bool(kept) or session.export_state().meta["notes"] == {}


@pytest.mark.parametrize(
    ("task", "model", "message"),
    [
        (
            IMAGES, {"name": "fenda_images", "shared": {"name": "resnet8"}},
            "study.toml: [model.shared]: there is no network `resnet8` for this; did you mean `resnet18`?",
        ),
        (
            MASKS, {"name": "fenda_masks", "shared": {"name": "vgg"}},
            "study.toml: [model.shared]: there is no network `vgg` for this; there are: unet, resunet, unetpp, fcn, "
            "monai_unet",
        ),
        (
            IMAGES, {"name": "fenda_images", "private": {"name": "resnet10", "widht": 1}},
            "study.toml: [model.private]: `resnet10`: unknown key `widht`; did you mean `width`?",
        ),
        (
            IMAGES, {"name": "fenda_images", "private": {"name": "resnet10", "size": [16, 16]}},
            "study.toml: [model.private]: `size` stands in [model]: both extractors see the same images",
        ),
        (
            {**MASKS, "size": [12, 12]}, {"name": "fenda_masks", "shared": {"name": "unet", "widths": [2, 2, 2, 2]}},
            "study.toml: model `fenda_masks` with `unet` as its shared extractor with 4 `widths` needs sides that 8 "
            "divides, task `segmentation` gives 1 x 12 x 12",
        ),
        (
            IMAGES, FENDA_MASKS,
            "study.toml: model `fenda_masks` is for the class of each pixel, task `images` asks for the class of an "
            "image",
        ),
    ],
    ids=["unknown", "for masks", "key", "size", "misfit", "task"],
)  # fmt: skip
def test_extractors_that_cannot_be_are_refused(task: dict[str, Any], model: dict[str, Any], message: str) -> None:
    with pytest.raises(BadData) as caught:
        image_study(task, model)
    assert caught.value.message == message


def test_an_image_of_another_size_is_judged_by_what_the_stems_were_chosen_for() -> None:
    study = study_of({**IMAGES, "size": [96, 96]}, {**FENDA_IMAGES, "shared": {"name": "vgg", "width": 0.125}})
    settings = study.model.settings.built_for((1, 96, 96))
    assert "large stem needs images of 32 x 32" in settings.misfit((1, 16, 16))


# Other libraries


@pytest.mark.parametrize(
    ("name", "shape", "settings", "known"),
    [
        ("timm:resnet10t", (1, 32, 32), {}, "body.conv1.0.weight"),
        ("timm:convnext_atto", (4, 32, 32), {"drop_path": 0.1}, "body.stem.0.weight"),
        ("timm:vit_tiny_patch16_224", (1, 32, 32), {}, "body.cls_token"),
        ("torchvision:mnasnet0_5", (1, 32, 32), {}, "body.layers.0.weight"),
        ("torchvision:shufflenet_v2_x0_5", (3, 32, 32), {}, "body.conv1.0.weight"),
        ("torchvision:deeplabv3_mobilenet_v3_large", (1, 32, 32), {}, "body.backbone.0.0.weight"),
        (
            "monai:BasicUNet",
            (1, 32, 16),
            {"arguments": {"features": [4, 4, 4, 4, 4, 4]}},
            "body.conv_0.conv_0.conv.weight",
        ),
        (
            "monai:AttentionUnet",
            (1, 8, 8, 8),
            {"arguments": {"channels": [2, 4], "strides": [2]}},
            "body.model.0.conv.0.conv.weight",
        ),
        ("monai:SegResNet", (1, 8, 16, 16), {"arguments": {"init_filters": 8}}, "body.convInit.conv.weight"),
        ("monai:resnet10", (1, 16, 16, 16), {"arguments": {"widen_factor": 0.1}}, "body.conv1.weight"),
    ],
)
def test_a_network_of_a_library_is_a_body_and_a_head_of_the_studys_sizes(
    name: str, shape: tuple[int, ...], settings: dict[str, Any], known: str
) -> None:
    network = made(name, shape, 3, **settings)
    assert isinstance(network, BodyHead)
    x = torch.randn(2, *shape)
    logits = network(x)
    masks = registry.row_of(registry.MODELS, Named(name=name), "model", "").takes == "masks"
    assert logits.shape == ((2, 3, *shape[1:]) if masks else (2, 3))
    assert torch.equal(logits, network.head(network.body(x)))
    assert known in network.state_dict()
    assert all(parameter.requires_grad for parameter in network.parameters())


def test_dropout_of_a_librarys_network_changes_no_name() -> None:
    plain, dropped = made("timm:resnet10t", (1, 32, 32)), made("timm:resnet10t", (1, 32, 32), dropout=0.9)
    assert plain.state_dict().keys() == dropped.state_dict().keys()
    x = torch.randn(4, 1, 32, 32)
    assert torch.equal(dropped(x), dropped(x))
    assert (dropped.train().body(x) == 0).float().mean() > 0.7


def test_a_librarys_network_can_be_an_extractor() -> None:
    network = made(
        "fenda_images", (1, 32, 32), shared={"name": "timm:resnet10t"}, private={"name": "resnet10", "width": 0.0625}
    )
    assert network(torch.randn(2, 1, 32, 32)).shape == (2, 2)
    with pytest.raises(BadData, match="there is no network `monai:BasicUNet` for this"):
        made("fenda_images", (1, 32, 32), shared={"name": "monai:BasicUNet"})
    with pytest.raises(BadData) as caught:
        made("fenda_images", (1, 32, 32), shared={"name": "torchvision:squeezenet1_1"})
    assert caught.value.message == (
        "network `torchvision:squeezenet1_1` cannot be an extractor: its last layer is not where its answer comes "
        "from, so nobody knows its features"
    )
    assert caught.value.hint.startswith("another one: resnet10, ")


def test_a_network_that_cannot_be_divided_is_taken_by_methods_that_need_no_head() -> None:
    study = image_study({**IMAGES, "size": [32, 32]}, {"name": "torchvision:squeezenet1_1"})
    assert describe(study, "ash").upload
    with pytest.raises(BadData, match="as it is built, has no `body`, and algorithm `fedper` needs a body and a head"):
        describe(image_study({**IMAGES, "size": [32, 32]}, {"name": "torchvision:squeezenet1_1"}, "fedper"), "ash")
    with pytest.raises(BadData, match="cannot be divided into a body and a head, between which `dropout` would be"):
        made("torchvision:squeezenet1_1", (1, 32, 32), dropout=0.1)


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("timm:convnext_tini", "timm has no network `convnext_tini`", "did you mean `timm:convnext_tiny`"),
        ("torchvision:resnet5o", "torchvision has no network `resnet5o`", "did you mean `torchvision:resnet50`"),
        ("monai:BasicUnet", "study.toml: there is no model `monai:BasicUnet`", "did you mean `monai:BasicUNet`?"),
        ("monai:Transformer9", "study.toml: there is no model `monai:Transformer9`", "there are: AttentionUnet, Basic"),
        ("keras:resnet", "there is no model `keras:resnet`", "networks of other libraries: `timm:NAME`, `torchvision"),
        ("timm:hf-hub:a/b", "there is no model `timm:hf-hub:a/b`", "as in `timm:resnet50`: a name has letters, digits"),
        ("timm:../x", "there is no model `timm:../x`", "as in `timm:resnet50`: a name has letters, digits, _ and . al"),
    ],
)
def test_a_name_that_does_not_exist_is_said_with_the_nearest(name: str, message: str, hint: str) -> None:
    with pytest.raises(BadData) as caught:
        made(name, (1, 32, 32))
    assert message in caught.value.message
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize(
    ("name", "shape", "settings", "message"),
    [
        (
            "timm:inception_v3",
            (1, 32, 32),
            {},
            "cannot be built for images of 1 x 32 x 32: Calculated padded input size",
        ),
        ("timm:vgg11", (1, 32, 32), {"drop_path": 0.5}, "unexpected keyword argument 'drop_path_rate'"),
        ("monai:AttentionUnet", (1, 32, 32), {}, "missing 2 required positional arguments: 'channels' and 'strides'"),
        ("monai:BasicUNet", (1, 32, 32), {"arguments": {"pretrained": True}}, "`pretrained` cannot be given"),
        (
            "monai:BasicUNet",
            (1, 32, 32),
            {"arguments": {"act": "../x"}},
            "`arguments` in [model]: '../x' is not 1 to 40 of A-Z a-z 0-9 _",
        ),
    ],
)
def test_what_a_library_does_not_take_is_said_in_its_words(
    name: str, shape: tuple[int, ...], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadData) as caught:
        made(name, shape, **settings)
    assert message in caught.value.message


@pytest.mark.parametrize("prefix", ["timm", "monai"])
def test_a_library_that_is_not_installed_is_said_with_its_extra(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == prefix:
            raise ImportError(name)
        return real(name, *rest)

    libraries._library.cache_clear()
    for module in [name for name in sys.modules if name.partition(".")[0] == prefix]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(NeedsPerson) as caught:
        made(f"{prefix}:{'resnet18' if prefix == 'timm' else 'BasicUNet'}", (1, 32, 32))
    assert f"a network of [model] is from {LIBRARIES[prefix].title}, which is not installed" in caught.value.message
    assert caught.value.hint == f"`pip install 'wardround[{LIBRARIES[prefix].extra}]'`"
    libraries._library.cache_clear()


def test_a_study_of_a_librarys_network_resolves_without_torch_and_without_the_library() -> None:
    lines = (
        "import sys",
        "from fl_algorithms import registry, resolving",
        "from wardround.records.study import Named",
        "rows = [registry.row_of(registry.MODELS, Named(name=name), 'model', '') "
        "for name in ('timm:x', 'torchvision:y', 'monai:BasicUNet', 'fenda_images')]",
        "assert not {'torch', 'timm', 'torchvision', 'monai'} & sys.modules.keys()",
        "print([row.takes for row in rows])",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['images', 'images', 'masks', 'images']"


def test_the_pages_own_network_works_as_it_stands() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "networks.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    x = torch.randn(2, 1, 8, 8)
    assert names["mine"](None, (1, 8, 8), 3)(x).shape == names["mine_twice"](None, (1, 8, 8), 3)(x).shape == (2, 3)


def test_the_page_names_every_network_and_library() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "networks.md").read_text(encoding="utf-8")
    names = {name for name in registry.MODELS if name != "ballast"} | {f"{prefix}:" for prefix in LIBRARIES}
    assert [name for name in sorted(names) if f"`{name}" not in page] == []
    assert [name for name in MONAI_MASKS if f"`{name}`" not in page] == []
