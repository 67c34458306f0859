"""The networks for images: their parts, their sizes, and that they train."""

import math

import pytest
import torch
from torch import nn

from fl_algorithms import registry
from fl_algorithms.settings import extractors
from fl_algorithms.settings.models import BODY_AND_HEAD, NORM_LAYERS
from tests.fl_algorithms.image_toys import IMAGES, image_study
from wardround.errors import BadData

CLASSIFIERS, SEGMENTERS = list(extractors.CLASSIFIERS), list(extractors.SEGMENTERS)
SMALL = {"densenet": {"blocks": (2, 2)}}


def made(name: str, shape: tuple[int, ...] = (3, 32, 32), outputs: int = 4, **settings: object) -> nn.Module:
    row = registry.MODELS[name]
    network: nn.Module = registry.load(row.implementation)(row.settings.model_validate(settings), shape, outputs)
    return network


def parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize("stem", ["small", "medium", "large"])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_is_a_body_and_a_linear_head(name: str, stem: str) -> None:
    torch.manual_seed(1)
    network = made(name, (2, 64, 48), 5, width=0.125, stem=stem, **SMALL.get(name, {})).train()
    x = torch.randn(3, 2, 64, 48)
    logits = network(x)
    assert logits.shape == (3, 5)
    logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
    assert {part for part, _ in network.named_children()} == {"body", "head"}
    network.eval()
    assert torch.equal(network(x), network.head(network.body(x)))
    assert isinstance(network.head, nn.Linear)


@pytest.mark.parametrize("name", [*CLASSIFIERS, *SEGMENTERS])
def test_a_network_offers_norm_layers_only_if_it_has_them(name: str) -> None:
    settings = registry.MODELS[name].settings()
    small = {"widths": (4, 8)} if name in SEGMENTERS else {"width": 0.125, **SMALL.get(name, {})}
    has = any(isinstance(module, nn.BatchNorm2d) for module in made(name, **small).modules())
    assert (NORM_LAYERS in settings.offers) == has
    assert BODY_AND_HEAD in settings.offers


@pytest.mark.parametrize("name", [name for name in (*CLASSIFIERS, *SEGMENTERS) if name != "squeezenet"])
def test_group_norm_replaces_every_batch_norm(name: str) -> None:
    small = {"widths": (4, 8)} if name in SEGMENTERS else {"width": 0.125, **SMALL.get(name, {})}
    kinds = {type(module) for module in made(name, norm="group", **small).modules()}
    assert nn.BatchNorm2d not in kinds
    assert nn.GroupNorm in kinds


def test_squeezenet_takes_no_norm() -> None:
    with pytest.raises(BadData, match="`norm` in"):
        image_study({**IMAGES, "size": [16, 16]}, {"name": "squeezenet", "norm": "batch"})


# Parameters of the published networks for 1000 classes, without what the heads here leave out.
@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("resnet18", 11_689_512),  # He et al. 2016
        ("resnext", 25_028_904),  # ResNeXt-50 32x4d
        ("efficientnet_b0", 5_288_548),
        ("mobilenet_v2", 3_504_872),
        ("shufflenet_v2", 2_278_604),
        ("densenet", 7_978_856),  # 121
        ("squeezenet", 1_235_496),  # its last convolution has as many as the linear head
    ],
)
def test_at_full_width_a_network_has_the_published_number_of_parameters(name: str, published: int) -> None:
    assert parameters(made(name, (3, 224, 224), 1000)) == published


def test_a_residual_network_has_torchvisions_tensors_in_its_body() -> None:
    from torchvision.models import resnet18, resnext50_32x4d

    for name, theirs in (("resnet18", resnet18()), ("resnext", resnext50_32x4d())):
        ours = made(name, (3, 224, 224), 1000).state_dict()
        body = {key.removeprefix("body."): tuple(tensor.shape) for key, tensor in ours.items() if "body." in key}
        assert body == {key: tuple(tensor.shape) for key, tensor in theirs.state_dict().items() if "fc." not in key}


def test_resnet18_computes_what_torchvisions_does() -> None:
    from torchvision.models import resnet18

    torch.manual_seed(3)
    theirs, ours = resnet18(num_classes=4).eval(), made("resnet18", (3, 96, 96)).eval()
    state = theirs.state_dict()
    ours.load_state_dict({("head." + k[3:] if k.startswith("fc.") else f"body.{k}"): v for k, v in state.items()})
    x = torch.randn(2, 3, 96, 96)
    assert torch.allclose(ours(x), theirs(x), atol=1e-5)


@pytest.mark.parametrize("name", SEGMENTERS)
@pytest.mark.parametrize("shape", [(3, 16, 24), (1, 8, 8, 16)])
@pytest.mark.parametrize("norm", ["batch", "none"])
def test_a_segmenter_judges_every_pixel_of_images_and_volumes(name: str, shape: tuple[int, ...], norm: str) -> None:
    network = made(name, shape, 3, widths=(4, 6, 8), norm=norm, dropout=0.1).train()
    logits = network(torch.randn(2, *shape))
    assert logits.shape == (2, 3, *shape[1:])
    logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
    assert {part for part, _ in network.named_children()} == {"body", "head"}


def test_unet_has_the_parameters_of_its_formula() -> None:
    widths, channels, outputs = (4, 8, 16), 3, 2

    def double(a: int, b: int) -> int:
        return 9 * a * b + 9 * b * b + 4 * b  # two convolutions without bias, two norms of scale and shift

    down = sum(double(a, b) for a, b in zip((channels, *widths), widths, strict=False))
    up = sum(4 * a * b + b + double(2 * b, b) for a, b in ((16, 8), (8, 4)))
    assert parameters(made("unet", outputs=outputs, widths=widths)) == down + up + 4 * outputs + outputs


def test_sides_that_cannot_be_halved_are_refused() -> None:
    task = {"name": "segmentation", "size": [12, 20], "channels": 1}
    with pytest.raises(BadData) as caught:
        image_study(task, {"name": "unet", "widths": [4, 8, 16, 32]})
    assert caught.value.message == (
        "study.toml: model `unet` with 4 `widths` needs sides that 8 divides, task `segmentation` gives 1 x 12 x 20"
    )


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_smallest_size_that_a_network_allows_works(name: str) -> None:
    settings = registry.MODELS[name].settings.model_validate({"width": 0.125, **SMALL.get(name, {})})
    for stem in ("small", "medium", "large"):
        chosen = settings.model_copy(update={"stem": stem})
        side = next(side for side in range(4, 65) if not chosen.misfit((1, side, side)))
        network = made(name, (1, side, side), **{**chosen.model_dump(), "stem": stem}).train()
        assert math.prod(network(torch.randn(3, 1, side, side)).shape) == 12


def test_networks_that_start_from_one_seed_start_equal() -> None:
    from fl_algorithms.engine.partition import initial_model

    study = image_study(model={"name": "efficientnet_b0", "width": 0.125})
    first, second = initial_model(study), initial_model(study)
    assert all(torch.equal(first[name], second[name]) for name in first)
