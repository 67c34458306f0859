"""Power iteration against eigenvalues that are known, or that a dense Hessian gives."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_algorithms.engine.training import Networks
from fl_algorithms.lab.sharpness import extreme_eigenvalue, sharpness
from tests.reference import hessian


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def quadratic(eigenvalues: list[float], factor: float = 1.0) -> float:
    """The extreme eigenvalue found of 0.5 w'Aw, at a random w, for an A with these eigenvalues."""
    draw = torch.randn(len(eigenvalues), len(eigenvalues), dtype=torch.float64, generator=generator())
    basis, _ = torch.linalg.qr(draw)
    a = basis @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ basis.T
    w = torch.randn(len(eigenvalues), dtype=torch.float64, generator=generator()).requires_grad_()
    return extreme_eigenvalue(factor * 0.5 * (w @ a @ w), [w], generator())


@pytest.mark.parametrize(
    ("eigenvalues", "extreme"), [([5.0, 1.0, -2.0, 0.0], 5.0), ([2.0, 1.0, -5.0, 0.5], -5.0), ([3.0], 3.0)]
)
def test_a_quadratic_gives_its_extreme_eigenvalue_with_its_sign(eigenvalues: list[float], extreme: float) -> None:
    assert quadratic(eigenvalues) == pytest.approx(extreme, rel=1e-2)


def test_a_scaled_loss_has_a_scaled_curvature() -> None:
    plain = quadratic([5.0, 1.0, -2.0])
    assert quadratic([5.0, 1.0, -2.0], factor=7.0) == pytest.approx(7 * plain, rel=1e-6)


def test_a_loss_without_curvature_gives_zero() -> None:
    w = torch.ones(3, requires_grad=True)
    unused = torch.ones(2, requires_grad=True)
    assert extreme_eigenvalue((2 * w).sum(), [w, unused], generator()) == 0
    assert extreme_eigenvalue((w * 0 * w).sum(), [w, unused], generator()) == 0


def test_a_loss_that_is_not_finite_gives_nan() -> None:
    networks = {"model": nn.Linear(2, 1)}
    x, y = torch.full((4, 2), math.inf), torch.zeros(4)
    assert math.isnan(sharpness(networks, squared_error, x, y, 2, seed=1))


def test_a_small_network_agrees_with_its_dense_hessian() -> None:
    torch.manual_seed(2)
    network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Dropout(0.5), nn.Linear(3, 1)).double()
    x, y = torch.randn(5, 2, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    parameters = list(network.parameters())

    def loss_at(values: list[float]) -> float:
        torch.nn.utils.vector_to_parameters(torch.tensor(values, dtype=torch.float64), parameters)
        with torch.no_grad():
            return float(squared_error({"model": network.eval()}, x, y))

    at = torch.nn.utils.parameters_to_vector(parameters).tolist()
    eigenvalues = np.linalg.eigvalsh(np.array(hessian(loss_at, at)))
    loss_at(at)
    found = sharpness({"model": network.train()}, squared_error, x, y, batch=5, seed=1)
    assert network.training  # it worked on a copy
    assert found == pytest.approx(max(eigenvalues, key=abs), rel=1e-2)


def test_the_batches_median_is_told() -> None:
    network = nn.Linear(1, 1, bias=False)  # the loss of one row is (w x - y)^2, its curvature 2 x^2
    x = torch.tensor([[1.0], [2.0], [5.0]])
    assert sharpness({"model": network}, squared_error, x, torch.zeros(3), 1, seed=1) == pytest.approx(8.0)


def squared_error(networks: Networks, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = ((networks["model"](x)[:, 0] - y) ** 2).mean()
    return loss
