"""Networks that a study cannot use, each with a sentence that says why and what to do."""

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fl_algorithms import registry
from fl_algorithms.engine.algorithm import Algorithm, Share, matching, study_network
from fl_algorithms.engine.partition import describe, initial_model, task_of
from fl_algorithms.lab.federation import run_federation
from fl_algorithms.methods.fedsoup.client import shared_parameters
from fl_algorithms.methods.settings import MethodSettings
from fl_algorithms.models.adapters import BodyHead, TwoExtractors
from fl_algorithms.rows import ModelRow
from fl_algorithms.settings.models import BODY_AND_HEAD, TWO_EXTRACTORS, NetworkSettings
from tests.fl_algorithms.toys import session_of, start_of, toy_data, toy_study
from wardround.errors import BadData

PLACE = "fl_algorithms.models.mlp:mlp"


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


def in_halves(dtype: torch.dtype) -> nn.Module:
    network = plain()
    network[0].to(dtype)
    return network


def with_buffer(tensor: Tensor) -> nn.Module:
    network = plain()
    network.register_buffer("table", tensor)
    return network


def with_whole_numbers() -> nn.Module:
    network = plain()
    network.register_parameter("codes", nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False))
    return network


def with_tied() -> nn.Module:
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    network[1].weight = network[0].weight
    return network


def with_view() -> nn.Module:
    network = plain()
    network.register_buffer("row", network[0].weight.detach()[1])
    return network


def with_slash() -> nn.Module:
    network = plain()
    network.add_module("a/b", nn.Linear(2, 2))
    return network


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., nn.Module]], None]:
    """Puts a network of somebody's in the place of the study's."""

    def put(make: Callable[..., nn.Module]) -> None:
        monkeypatch.setattr(PLACE.replace(":", "."), lambda settings, inputs, outputs: make())

    return put


@pytest.mark.parametrize(
    ("make", "message", "hint"),
    [
        (
            lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1)),
            "model `mlp`: `0.weight` gets its size when the first sample comes, so nobody could say before what leaves",
            "give each layer its size, as `nn.Linear(64, 2)` in place of `nn.LazyLinear(2)`",
        ),
        (
            lambda: in_halves(torch.bfloat16),
            "model `mlp`: parameter `0.weight` is bfloat16, and what sites exchange is float32",
            "`network.float()` where it is made",
        ),
        (
            lambda: in_halves(torch.float64),
            "parameter `0.weight` is float64, and what sites exchange is float32",
            "`net",
        ),
        (
            lambda: in_halves(torch.float16),
            "parameter `0.weight` is float16, and what sites exchange is float32",
            "`net",
        ),
        (
            lambda: with_buffer(torch.zeros(2).double()),
            "buffer `table` is float64, and what sites exchange",
            "`network",
        ),
        (
            lambda: with_buffer(torch.zeros(2, dtype=torch.complex64)),
            "buffer `table` is complex64, and what",
            "`network",
        ),
        (
            with_whole_numbers,
            "model `mlp`: parameter `codes` is int64, and what sites exchange is float32",
            "whole numbers are a buffer: `self.register_buffer(name, tensor)`, and never leave",
        ),
        (
            with_tied,
            "model `mlp`: `0.weight` and `1.weight` are one tensor under two names, so that what is private under one "
            "of them could leave under the other",
            "register it once, or make two tensors",
        ),
        (with_view, "model `mlp`: `row` and `0.weight` are one tensor under two names", "register it once"),
        (
            with_slash,
            "model `mlp`: a tensor is called 'a/b.weight', which is not 1 to 200 of A-Z a-z 0-9 _ -, with single dots "
            "between",
            "give the module another name where the network is made",
        ),
    ],
    ids=["lazy", "bfloat16", "float64", "float16", "buffer", "complex", "integers", "tied", "view", "slash"],
)
def test_a_network_that_cannot_be_used_is_refused_before_anything_leaves(
    make: Callable[[], nn.Module],
    message: str,
    hint: str,
    brought: Callable[[Callable[..., nn.Module]], None],
) -> None:
    brought(make)
    study = toy_study()
    for ask in (lambda: describe(study, "ash"), lambda: initial_model(study), lambda: session_of(study)):
        with pytest.raises(BadData) as caught:
            ask()
        assert message in caught.value.message
        assert caught.value.hint.startswith(hint)


def test_a_buffer_of_whole_numbers_is_private_and_described_so(
    brought: Callable[[Callable[..., nn.Module]], None],
) -> None:
    brought(lambda: with_buffer(torch.arange(2)))
    (stay,) = describe(toy_study(), "ash").private
    assert (stay.name, stay.why) == ("table", "an integer buffer never travels")


def test_slices_of_one_storage_are_not_one_tensor(brought: Callable[[Callable[..., nn.Module]], None]) -> None:
    flat = torch.zeros(8)

    def make() -> nn.Module:
        network = with_buffer(flat[:4])
        network.register_buffer("other", flat[4:])
        return network

    brought(make)
    assert {spec.name for spec in describe(toy_study(), "ash").upload} >= {"table", "other"}


def test_a_network_whose_state_differs_each_time_it_is_made_is_refused(
    brought: Callable[[Callable[..., nn.Module]], None],
) -> None:
    made: list[nn.Module] = []

    def make() -> nn.Module:
        made.append(BodyHead(nn.Linear(3, 4 + len(made)), nn.Linear(4 + len(made), 1)))
        return made[-1]

    brought(make)
    with pytest.raises(BadData) as caught:
        session_of(toy_study("fedper"))
    assert caught.value.message == (
        "model `mlp` has other tensors each time it is made: `body.bias` was [4] and then [5]"
    )
    assert "alone, at every site" in caught.value.hint


def test_a_site_whose_network_is_another_than_the_rounds_model_says_where(
    brought: Callable[[Callable[..., nn.Module]], None],
) -> None:
    """At a hospital the approval is refused before; the lab says it when the first model comes."""
    study = toy_study()
    start = start_of(study)
    brought(plain)
    with pytest.raises(BadData, match=r"model has 4 tensors in `model`, this site shares 4; `0\.bias` stands in one"):
        session_of(study).train(1, start)


def test_a_network_that_turns_out_to_have_no_head_is_refused_by_methods_that_need_one(
    brought: Callable[[Callable[..., nn.Module]], None],
) -> None:
    brought(plain)
    assert describe(toy_study(), "ash").upload
    with pytest.raises(BadData) as caught:
        describe(toy_study("fedper"), "ash")
    assert caught.value.message == (
        "model `mlp`, as it is built, has no `body`, and algorithm `fedper` needs a body and a head"
    )
    assert "`BodyHead`, `TwoExtractors`" in caught.value.hint
    told = toy_study("fedper", algorithm_settings={"head": ["2.*"]})  # the study itself says what the head is
    assert {spec.name for spec in describe(told, "ash").upload} == {"0.weight", "0.bias"}


class Grows(nn.Module):
    """Makes a layer when the first sample comes."""

    def forward(self, x: Tensor) -> Tensor:
        self.late = nn.Linear(x.shape[1], 1)
        logits: Tensor = self.late(x)
        return logits


@pytest.mark.parametrize(
    ("make", "message", "hint"),
    [
        (
            lambda: nn.Linear(3, 2),
            "model `mine` answers [2, 2] to a batch of [2, 3], the task needs [2, 1]",
            "its last layer has the number of outputs that it is called with; one logit for two classes",
        ),
        (
            lambda: nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)),
            "model `mine` answers [2] to a batch of [2, 3]",
            "its l",
        ),
        (lambda: nn.LSTM(3, 1), "model `mine` answers tuple to a batch of [2, 3], the task needs [2, 1]", "its last"),
        (
            lambda: nn.Linear(4, 1),
            "model `mine` does not take a batch of [2, 3]: RuntimeError: ",
            "its first layer takes the inputs that it is called with",
        ),
        (Grows, "model `mine` has a tensor `late.bias` only after it is first used", "make every layer where the netw"),
    ],
    ids=["outputs", "flat", "two answers", "inputs", "grows"],
)
def test_a_brought_network_that_does_not_fit_the_task_is_refused_when_it_is_built(
    make: Callable[[], nn.Module], message: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "made", make)
    row = replace(registry.MODELS["mlp"], name="mine", implementation=f"{__name__}:brought_network")
    monkeypatch.setitem(registry.MODELS, "mine", row)
    with pytest.raises(BadData) as caught:
        describe(toy_study(model={"name": "mine", "hidden": [2]}), "ash")
    assert message in caught.value.message
    assert caught.value.hint.startswith(hint)


def made() -> nn.Module:
    return nn.Linear(3, 1)


def brought_network(settings: object, inputs: int, outputs: int) -> nn.Module:
    return made()


def divided_network(settings: object, inputs: int, outputs: int) -> nn.Module:
    return BodyHead(nn.Sequential(nn.Linear(inputs, 4), nn.LayerNorm(4), nn.Tanh()), nn.Linear(4, outputs))


def twice(settings: object, inputs: int, outputs: int) -> nn.Module:
    return TwoExtractors(lambda: nn.Sequential(nn.Linear(inputs, 3), nn.Tanh()), (inputs,), outputs, dropout=0.1)


@pytest.mark.parametrize("algorithm", ["fedper", "fedrep", "fedbabu", "moon", "lgfedavg", "mhpflgb", "fedbn", "fenda"])
def test_a_brought_network_in_an_adapter_trains_with_methods_that_need_its_parts(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, offers = (twice, TWO_EXTRACTORS) if algorithm == "fenda" else (divided_network, BODY_AND_HEAD)

    class Mine(NetworkSettings):
        @property
        def offers(self) -> frozenset[str]:
            return frozenset({offers})

    monkeypatch.setitem(registry.MODELS, "mine", ModelRow("mine", Mine, f"{__name__}:{make.__name__}"))
    same_start = {"init_private": "common"} if registry.METHODS[algorithm].same_start else {}
    study = toy_study(algorithm, {"name": "mine"}, **same_start)
    outcome = run_federation(study, task_of(study), {site: toy_data(site) for site in ("ash", "birch")})
    assert outcome.digest != outcome.initial_digest


# Names


class Personal(nn.Module):
    """A network with a part that is called as a method's other network is."""

    def __init__(self) -> None:
        super().__init__()
        self.personal, self.model = plain(), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(self.personal(x))
        return logits


def two_private(settings: MethodSettings) -> Algorithm:
    """A method that shares one layer; its second network is called as a part of the first is."""
    slots = {"model": study_network, "personal": lambda study, task: plain()}
    infer = lambda networks, x: networks["model"](x) + networks["personal"](x)  # noqa: E731
    return Algorithm(slots=slots, shares=(Share(names=matching("model.*")),), infer=infer)


def test_parts_called_as_a_methods_slots_are_kept_apart_from_them(
    brought: Callable[[Callable[..., nn.Module]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of "personal/0.weight" and "personal.0.weight" one replaced the other in what a site keeps."""
    brought(Personal)
    row = replace(registry.METHODS["fedavg"], name="toy", client=f"{__name__}:two_private")
    monkeypatch.setitem(registry.METHODS, "toy", row)
    study = toy_study("toy", optimizer="adam")
    private = describe(study, "ash").private
    base = start_of(study)
    session = session_of(study)
    session.train(1, base)
    state = session.export_state()
    assert sum(name.startswith("private/") for name in state.tensors) == len(private) == 8
    assert sum(name.startswith("optimizer/") for name in state.tensors) == 3 * 10
    again = session_of(study, state=state)
    on, resumed = session.train(2, base), again.train(2, base)
    assert all(torch.equal(on.uplink["model"][name], resumed.uplink["model"][name]) for name in on.uplink["model"])
    one, other = session.export_state().tensors, again.export_state().tensors
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_two_slots_parameters_are_two_even_where_a_name_holds_the_others_slot() -> None:
    """Of a soup: "personal.0.weight" of one network, and "0.weight" of the slot "personal"."""
    algorithm = Algorithm(shares=(Share(), Share("personal")))
    assert len(shared_parameters(algorithm, {"model": Personal(), "personal": plain()})) == 6 + 4
