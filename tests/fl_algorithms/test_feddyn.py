"""FedDyn: Algorithm 1 of its paper, step by step and to its end; and what it promises, that the sites' optima agree."""

import pytest
import torch
from torch import Tensor

from fl_algorithms import registry
from fl_algorithms.engine.partition import initial_model, task_of
from fl_algorithms.engine.session import SiteSession
from fl_algorithms.lab.federation import aggregate, downlink, run_federation
from fl_algorithms.lab.methods import card
from fl_algorithms.server.aggregator import server_aggregator
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import SiteData, Split, Task
from tests.fl_algorithms.toys import toy_data, toy_study
from wardround.errors import BadData
from wardround.tensors.manifests import TensorSpec

SITES = ["ash", "birch", "cedar"]
LINEAR = {"name": "mlp", "hidden": []}
NORMED = {"name": "mlp", "hidden": [4], "norm": "batch"}
WHOLE = 64  # a batch that takes all rows
PLAIN = {"optimizer": "sgd", "weight_decay": 0.0}


class Squares:
    """A study's task with half the squared distance of the logit to the label as loss: a quadratic of each site."""

    headline = "distance"

    def __init__(self, task: Task) -> None:
        self.input_shape, self.outputs = task.input_shape, 1

    def at(self, data: SiteData) -> "Squares":
        return self

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        return (logits[:, 0] - y).square() / 2

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return self.losses(logits, y).mean()

    def fit_outputs(self, outputs_of: object, data: SiteData) -> dict[str, str]:
        return {}

    def metrics(self, logits: Tensor, y: Tensor, fit: object = None) -> dict[str, float | None]:
        return {"distance": float(self.losses(logits, y).mean())}


def unlike(site: str) -> SiteData:
    """Rows whose sizes and plane are each site's own: quadratics of unlike curvature with unlike minima."""
    place = SITES.index(site)
    generator = torch.Generator().manual_seed(place)
    x = torch.randn(12, 3, generator=generator) * torch.tensor(
        [[1.5, 0.5, 1.0], [0.4, 1.5, 1.0], [1.0, 1.0, 0.3]][place]
    )
    y = (x @ torch.tensor([[3.0, -2.0, 1.0], [-3.0, 2.0, 2.0], [0.0, 1.0, -4.0]][place])).round().long()
    return SiteData(Split(x, y), Split(x, y), None, digest="0" * 64)


def optimum() -> Tensor:
    """Where the mean of the sites' losses is least: weights, then the bias."""
    curvature, slope = torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for site in SITES:
        rows = unlike(site).train
        assert isinstance(rows.x, Tensor)
        x = torch.cat((rows.x.double(), torch.ones(len(rows), 1)), dim=1)
        curvature, slope = curvature + x.T @ x / len(rows), slope + x.T @ rows.y.double() / len(rows)
    return torch.linalg.solve(curvature, slope)


def study_of(method: str = "feddyn", model: dict[str, object] = LINEAR, **changes: object) -> ResolvedStudy:
    settings = {"alpha": changes.pop("alpha", 0.5)} if method == "feddyn" else {}
    told = {"sites": SITES, "learning_rate": 0.2, "local_steps": 30, "batch_size": WHOLE, **PLAIN, **changes}
    return toy_study(method, dict(model), algorithm_settings=settings, **told)


class Rounds:
    """A federation on ``unlike`` data, of which some sites may answer."""

    def __init__(self, study: ResolvedStudy) -> None:
        self.study = study
        task: Task = Squares(task_of(study))  # type: ignore[assignment]  # what a session asks of a task
        self.sessions = {site: SiteSession(study, site, task, unlike(site)) for site in SITES}
        initial = initial_model(study)
        specs = tuple(TensorSpec(name, "F32", tuple(tensor.shape)) for name, tensor in initial.items())
        self.aggregator = server_aggregator(study, specs)
        self.kept = {k.spec.key: initial.get(k.source, torch.zeros(k.spec.shape)) for k in self.aggregator.keeps}
        self.number = 0

    def round(self, answering: list[str] = SITES) -> dict[str, dict[str, Tensor]]:
        """Site -> what it sends."""
        self.number += 1
        results = {
            site: self.sessions[site].train(self.number, downlink(self.aggregator, self.kept, site, self.number))
            for site in answering
        }
        self.kept, _ = aggregate(self.study, self.aggregator, self.kept, self.number, results)
        return {site: result.uplink["model"] for site, result in results.items()}

    def model(self) -> Tensor:
        return torch.cat((self.kept["head.weight"].flatten(), self.kept["head.bias"])).double()


def test_feddyn_is_found_without_being_named_anywhere() -> None:
    row = registry.METHODS["feddyn"]
    assert row.client.startswith("fl_algorithms.methods.feddyn.client:")
    assert card("feddyn")["server"].startswith("FedDyn's server aggregator")


def test_feddyn_reaches_the_optimum_of_all_sites_and_fedavg_does_not() -> None:
    far = {}
    for method in ("fedavg", "feddyn"):
        federation = Rounds(study_of(method, rounds=30))
        for _ in range(30):
            federation.round()
        far[method] = float((federation.model() - optimum()).norm())
    assert far["feddyn"] < 1e-3
    assert far["fedavg"] > 0.1


def test_feddyn_reaches_it_though_in_each_round_a_site_is_away() -> None:
    federation = Rounds(study_of(rounds=60))
    for number in range(60):
        federation.round([site for place, site in enumerate(SITES) if place != number % 3])
    assert float((federation.model() - optimum()).norm()) < 1e-2


def test_three_rounds_match_the_slow_algorithm() -> None:
    """Algorithm 1 in plain loops, with the local problem solved by the same steps of gradient descent."""
    study = study_of(local_steps=7, alpha=0.3, rounds=3)
    federation, alpha, rate = Rounds(study), 0.3, 0.2
    theta, h = federation.model(), torch.zeros(4, dtype=torch.float64)
    own = {site: torch.zeros(4, dtype=torch.float64) for site in SITES}
    for answering in (SITES, ["ash", "cedar"], ["birch"]):
        federation.round(answering)
        found = {}
        for site in answering:
            rows, w = unlike(site).train, theta.clone()
            assert isinstance(rows.x, Tensor)
            x = torch.cat((rows.x.double(), torch.ones(len(rows), 1)), dim=1)
            for _ in range(7):
                gradient = x.T @ (x @ w - rows.y) / len(rows)
                w = w - rate * (gradient - own[site] + alpha * (w - theta))
            own[site] = own[site] - alpha * (w - theta)
            found[site] = w
        h = h - alpha * sum(w - theta for w in found.values()) / len(SITES)
        theta = sum(found.values()) / len(found) - h / alpha  # type: ignore[assignment]
        torch.testing.assert_close(federation.model(), theta, rtol=1e-4, atol=1e-4)
        for site in SITES:
            kept = federation.sessions[site].export_state().tensors
            if "kept/gradient.head.weight" in kept:
                torch.testing.assert_close(
                    torch.cat((kept["kept/gradient.head.weight"].flatten(), kept["kept/gradient.head.bias"])).double(),
                    own[site], rtol=1e-4, atol=1e-4,
                )  # fmt: skip


def test_where_the_local_steps_end_at_the_minimum_what_a_site_keeps_is_its_gradient() -> None:
    federation = Rounds(study_of(local_steps=400))
    sent = federation.round()
    for site in SITES:
        start = initial_model(federation.study)
        trained = torch.cat([(start[n] + sent[site][n]).flatten() for n in ("head.weight", "head.bias")]).double()
        rows, kept = unlike(site).train, federation.sessions[site].export_state().tensors
        assert isinstance(rows.x, Tensor)
        x = torch.cat((rows.x.double(), torch.ones(len(rows), 1)), dim=1)
        gradient = x.T @ (x @ trained - rows.y) / len(rows)
        found = torch.cat((kept["kept/gradient.head.weight"].flatten(), kept["kept/gradient.head.bias"])).double()
        torch.testing.assert_close(found, gradient, rtol=1e-3, atol=1e-4)


def test_neither_the_gradient_of_a_site_nor_h_crosses() -> None:
    federation = Rounds(study_of())
    for _ in range(2):
        assert all(sent.keys() == {"head.weight", "head.bias"} for sent in federation.round().values())
    assert {spec.key for spec in federation.aggregator.download} == {"head.weight", "head.bias"}
    assert federation.kept["h/head.weight"].any()


def test_without_steps_nothing_moves() -> None:
    federation = Rounds(study_of(local_steps=0))
    before = federation.model()
    federation.round()
    assert torch.equal(federation.model(), before)
    assert not any(
        t.any() for k, t in federation.sessions["ash"].export_state().tensors.items() if k.startswith("kept/")
    )


def test_running_statistics_are_plain_means() -> None:
    study = study_of(model=NORMED, local_steps=6, batch_size=4)
    outcome = run_federation(study, task_of(study), {site: toy_data(site) for site in SITES})
    assert not any("running" in key for key in outcome.shared if key.startswith("h/"))
    assert all((tensor >= 0).all() for key, tensor in outcome.shared.items() if key.endswith("running_var"))


@pytest.mark.parametrize("alpha", [0.0, -1.0])
def test_an_alpha_that_divides_by_nothing_is_refused(alpha: float) -> None:
    with pytest.raises(BadData, match=r"`alpha`.*greater than 0"):
        study_of(alpha=alpha)
