"""A network's graph as the text of a Python module that needs torch alone: ``model.py`` beside ``model.safetensors``.

``torch.export`` gives the graph, in torch's own operators; each becomes one line. Nothing is pickled, and whoever reads
the file sees all that it computes. The class's tensors are those of the safetensors file, by name, so that
``load_state_dict`` is strict.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec
from torch.fx import Node

from fl_algorithms.engine.selection import Model, Together
from wardround import __version__
from wardround.errors import BadData, NeedsPerson
from wardround.tensors.manifests import MODEL

EXAMPLES = 3  # rows of the batch that a graph is made with; any number may be given to it
MOST_NUMBERS = 4096  # of a constant that is written into the text
ASSERTS = ("aten._assert_scalar.default", "aten._assert_tensor_metadata.default", "aten._assert_async.msg")
OPERATORS = ("add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "getitem", "pow")
HINT = "the export is whole without it: weights, card and study; build the network yourself, and load them by name"

HEAD = '''\
"""{title}: its network in plain PyTorch. Needs torch, and safetensors to read the weights; nothing of Wardround.

    from safetensors.torch import load_file
    from model import Model
    model = Model()
    model.load_state_dict(load_file("model.safetensors"))
    logits = model(x)

``x`` is float32 {shape}, n rows on the network's scale{scale}; the logits are float32
{outputs}. Each line of ``forward`` is one operator of torch; the network is as it judges, so dropout does nothing.

Written by wardround {version} with torch {torch}.
"""

import operator

import torch
from torch import nn

aten = torch.ops.aten
TENSORS = {{  # name: shape, dtype, whether it is trained
{tensors}
}}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        for name, (shape, dtype, trained) in TENSORS.items():
            *parents, last = name.split(".")
            place = self
            for parent in parents:
                if parent not in place._modules:
                    place.add_module(parent, nn.Module())
                place = place._modules[parent]
            if trained:
                place.register_parameter(last, nn.Parameter(torch.zeros(shape, dtype=dtype)))
            else:
                place.register_buffer(last, torch.zeros(shape, dtype=dtype))

    def forward(self, x):
        w = self.state_dict(keep_vars=True)
{lines}
'''


class Whole(nn.Module):
    """A model's networks as one module, whose output are the logits."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = model
        self.names: dict[str, str] = {}
        for number, (slot, network) in enumerate(model.networks.items()):
            self.add_module(f"n{number}", network)
            prefix = "" if slot == MODEL else f"{slot}/"
            self.names |= {f"n{number}.{name}": prefix + name for name in network.state_dict()}

    def forward(self, x: Tensor) -> Tensor:
        return _infer(self._model, x)


def _infer(model: Model, x: Tensor) -> Tensor:
    if isinstance(model, Together):
        return torch.stack([_infer(member, x) for member in model.members.values()]).mean(dim=0)
    return model.algorithm.infer(model.networks, x)


@dataclass(frozen=True)
class Graph:
    """A model's graph. ``names``: of each tensor, its own name -> that in a checkpoint."""

    program: ExportedProgram
    names: Mapping[str, str]
    whole: Whole

    @property
    def used(self) -> set[str]:
        """The tensors that the logits depend on, by their names in a checkpoint."""
        asked = {node.name for node in self.program.graph.nodes if node.users}
        specs = self.program.graph_signature.input_specs
        return {self.names[spec.target] for spec in specs if spec.target in self.names and _name_of(spec) in asked}


def captured(model: Model, shape: Sequence[int]) -> Graph:
    """The graph of a model for any number of rows of ``shape``.

    Raises:
        BadData: torch cannot make one graph of it, or the graph gives other logits than the model.
    """
    whole = Whole(model).eval()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(EXAMPLES, *shape, generator=generator)
    rows = ({0: torch.export.Dim.DYNAMIC},)
    try:
        with torch.no_grad():
            program = torch.export.export(whole, (x,), dynamic_shapes=rows, strict=False)
    except Exception as error:  # whatever a network does that torch cannot follow
        kind = type(error).__name__
        raise BadData(f"torch makes no one graph of this network for any number of rows ({kind})", hint=HINT) from None
    other = torch.randn(EXAMPLES + 2, *shape, generator=generator)
    with torch.no_grad():
        if not torch.allclose(program.module()(other), model.logits(other), rtol=1e-5, atol=1e-6):
            raise BadData("the network's graph gives other logits than the network", hint=HINT)
    return Graph(program, whole.names, whole)


def source(graph: Graph, tensors: Mapping[str, Tensor], title: str, *, tables: bool) -> str:
    """The text of ``model.py``.

    Args:
        tensors: those of the safetensors file; at least all that ``graph.used`` names.
        title: which study's which model, one plain line.
        tables: whether ``predict.py`` beside it prepares rows.

    Raises:
        BadData: the graph has an operator that is not torch's own, or a constant that is too large to be written.
    """
    given, trained, lines = {}, set(), []
    for spec in graph.program.graph_signature.input_specs:
        name = graph.names.get(spec.target or "")
        if name is not None:
            given[_name_of(spec)] = f"w[{name!r}]"
            if spec.kind == InputKind.PARAMETER:
                trained.add(name)
        elif spec.kind == InputKind.USER_INPUT:
            given[_name_of(spec)] = "x"
        else:
            given[_name_of(spec)] = _name_of(spec)
            lines.append(f"{_name_of(spec)} = {_constant(graph.program, spec)}")
    nodes = list(graph.program.graph.nodes)
    lines += _lines(nodes, given)
    rows = [
        f"    {name!r}: ({tuple(tensor.shape)!r}, {tensor.dtype}, {name in trained}),"
        for name, tensor in sorted(tensors.items())
    ]
    placed = next(node for node in reversed(nodes) if node.op == "placeholder")
    result = next(node for node in nodes if node.op == "output").args[0][0]
    return HEAD.format(
        title=title, shape=_shape(placed), outputs=_shape(result), version=__version__, torch=torch.__version__,
        scale=", as predict.py makes them" if tables else "", tensors="\n".join(rows),
        lines="\n".join(f"        {line}" for line in lines),
    )  # fmt: skip


def onnx_bytes(graph: Graph, shape: Sequence[int]) -> bytes:
    """The same as an ONNX model with its weights: input ``x``, output ``logits``.

    Raises:
        NeedsPerson: what writes ONNX is not installed.
        BadData: ONNX has no such operators, or its own checker refuses the model.
    """
    try:
        import onnx
        import onnxscript  # noqa: F401  torch's exporter needs it
    except ModuleNotFoundError as error:
        raise NeedsPerson(
            f"{error.name} is not installed here, and writing ONNX needs it", hint="pip install 'wardround[onnx]'"
        ) from None
    try:
        with torch.no_grad():
            made = torch.onnx.export(
                graph.whole, (torch.zeros(EXAMPLES, *shape),), dynamo=True, external_data=False, verbose=False,
                dynamic_shapes=({0: torch.export.Dim("rows")},), input_names=["x"], output_names=["logits"],
            )  # fmt: skip
        assert made is not None
        data: bytes = made.model_proto.SerializeToString()
        onnx.checker.check_model(onnx.load_from_string(data), full_check=True)
    except Exception as error:  # of torch, its converter or the checker
        raise BadData(f"this network cannot be written as ONNX ({type(error).__name__})", hint=HINT) from None
    return data


def _lines(nodes: Sequence[Node], given: dict[str, str]) -> Iterator[str]:
    """A line for each operator, each value dropped after its last use."""
    last = {used: node for node in nodes for used in node.all_input_nodes}
    for node in nodes:
        if node.op == "placeholder" or (not node.users and str(node.target) in ASSERTS):
            continue
        if node.op == "output":
            yield f"return {_text(node.args[0][0], given)}"  # type: ignore[index]  # a graph's outputs are a tuple
            continue
        given[node.name] = node.name
        arguments = [_text(value, given) for value in node.args]
        arguments += [f"{key}={_text(value, given)}" for key, value in node.kwargs.items()]
        yield f"{node.name} = {_function(node)}({', '.join(arguments)})"
        done = sorted(
            used.name for used in node.all_input_nodes if last[used] is node and given[used.name] == used.name
        )
        if done:
            yield f"del {', '.join(done)}"


def _function(node: Node) -> str:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
        return str(target)
    name = getattr(target, "__name__", "")
    if node.op == "call_function" and name in OPERATORS and target.__module__ in ("operator", "_operator"):
        return f"operator.{name}"
    raise BadData(f"the network has an operator that is not torch's own, {str(target)[:60]!r}", hint=HINT)


def _text(value: Any, given: Mapping[str, str]) -> str:
    """An argument as Python writes it."""
    if isinstance(value, Node):
        return given[value.name]
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(one, given) for one in value)}]"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.layout | torch.memory_format):
        return repr(value)
    raise BadData(f"the network has an argument of type {type(value).__name__}, which has no text", hint=HINT)


def _constant(program: ExportedProgram, spec: InputSpec) -> str:
    value = program.constants.get(spec.target or "")
    if not isinstance(value, Tensor) or value.numel() > MOST_NUMBERS:
        raise BadData("the network has a large constant beside its tensors", hint=HINT)
    return f"torch.tensor({value.tolist()!r}, dtype={value.dtype})"


def _shape(node: Any) -> str:
    sizes = itemgetter("val")(node.meta).shape[1:]
    return f"(n, {', '.join(str(size) for size in sizes)})"


def _name_of(spec: InputSpec) -> str:
    return str(spec.arg.name)
