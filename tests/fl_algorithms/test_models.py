from math import prod

import pytest
import torch

from fl_algorithms.engine.training import seeded
from fl_algorithms.models.ballast import ballast
from fl_algorithms.models.fenda import fenda
from fl_algorithms.models.mlp import mlp
from fl_algorithms.settings.models import BallastSettings, FendaSettings, MlpSettings
from tests import reference


def size(network: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(
    ("network", "parameters"),
    [
        pytest.param(mlp(MlpSettings(), 13, 1), 13 + 1, id="logistic"),
        pytest.param(mlp(MlpSettings(hidden=(5,)), 13, 1), 13 * 5 + 5 + 5 + 1, id="13-5-1"),
        pytest.param(fenda(FendaSettings(), 13, 1), 2 * (13 * 5 + 5) + 10 + 1, id="fenda"),
        pytest.param(mlp(MlpSettings(hidden=(5,)), 13, 3), 13 * 5 + 5 + 3 * 5 + 3, id="three classes"),
    ],
)
def test_a_network_has_as_many_parameters_as_the_paper_counts(network: torch.nn.Module, parameters: int) -> None:
    assert size(network) == parameters


def test_fenda_matches_the_slow_reference() -> None:
    with seeded(3):
        network = fenda(FendaSettings(shared_hidden=(2,), private_hidden=(3,)), 4, 2).eval()
        x = torch.randn(4)
    values = {name: tensor.tolist() for name, tensor in network.state_dict().items()}
    slow = reference.fenda_logits(
        x.tolist(),
        {
            "shared_weight": values["shared_extractor.layers.0.weight"],
            "shared_bias": values["shared_extractor.layers.0.bias"],
            "private_weight": values["private_extractor.layers.0.weight"],
            "private_bias": values["private_extractor.layers.0.bias"],
            "head_weight": values["head.weight"],
            "head_bias": values["head.bias"],
        },
    )
    torch.testing.assert_close(network(x[None])[0], torch.tensor(slow))


def test_without_the_heads_columns_for_them_the_shared_features_do_not_matter() -> None:
    with seeded(3):
        network = fenda(FendaSettings(), 13, 1).eval()
        x = torch.randn(6, 13)
    with torch.no_grad():
        network.get_parameter("head.weight")[:, :5] = 0
        before = network(x)
        network.get_parameter("shared_extractor.layers.0.weight").add_(1.0)
    assert torch.equal(network(x), before)


@pytest.mark.parametrize(
    "network",
    [mlp(MlpSettings(hidden=(64,), dropout=0.5), 8, 1), fenda(FendaSettings(shared_hidden=(64,)), 8, 1)],
    ids=["mlp", "fenda"],
)
def test_dropout_acts_in_training_alone(network: torch.nn.Module) -> None:
    with seeded(1):
        x = torch.randn(5, 8)
        assert torch.equal(network.eval()(x), network(x))
        assert not torch.equal(network.train()(x), network(x))


def test_a_resnet18_of_ballast_has_62_tensors_of_11_million_elements() -> None:
    network = ballast(BallastSettings(layout="resnet18"), 13, 1)
    assert len(list(network.parameters())) == 62
    # torchvision's resnet18 has 11,689,512 parameters, of which 512 * 1000 + 1000 are the last layer's
    assert size(network) == 11_689_512 - 513_000 + 14


def test_flat_ballast_is_as_large_as_asked_and_never_trained() -> None:
    network = ballast(BallastSettings(bytes=4000, tensors=5), 13, 1)
    idle = [parameter for parameter in network.parameters() if not parameter.requires_grad]
    assert [prod(parameter.shape) for parameter in idle] == [200] * 5
    assert size(network) == 1000 + 14
