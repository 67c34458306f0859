"""How much memory a row takes on its way through networks, so that a pass has as many rows as fit and no more.

It is what the modules give for one row, counted and not measured: a function of the networks and of the row's shape
alone, so that every machine makes the same passes, and the same bits.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from fl_algorithms.engine.device import device_of
from fl_algorithms.engine.training import Networks
from fl_algorithms.tasks.base import Inputs, in_parts
from fl_algorithms.tasks.selection import row_shape

_known: WeakKeyDictionary[nn.Module, dict[tuple[int, ...], int]] = WeakKeyDictionary()


def row_bytes(infer: Callable[[Networks, Tensor], Tensor], networks: Networks, x: Inputs) -> int:
    """The bytes of a row of ``x`` and of all that networks' modules give for it; 0 where there is no row, or where a
    module takes statistics over the rows of a pass: fewer would change what it says.

    Nothing is freed in this count, so a pass without gradient takes less. Counted once for a network and a shape.
    """
    modules = [module for network in networks.values() for module in network.modules()]
    if not modules or not len(x) or any(map(_looks_at_the_pass, modules)):
        return 0
    shapes, shape = _known.setdefault(next(iter(networks.values())), {}), row_shape(x)
    if shape not in shapes:
        row = next(in_parts(x, 1)).to(device_of(networks))
        seen: list[Tensor] = [row]
        with _watched(networks, seen):
            seen.append(infer(networks, row))
        shapes[shape] = sum(tensor.numel() * tensor.element_size() for tensor in seen)
    return shapes[shape]


def _looks_at_the_pass(module: nn.Module) -> bool:
    return module.training or (isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None)


@contextmanager
def _watched(networks: Networks, seen: list[Tensor]) -> Iterator[None]:
    """Append what each module without modules of its own gives."""

    def note(module: nn.Module, given: object, made: object) -> None:
        if isinstance(made, Tensor):
            seen.append(made)
        elif isinstance(made, tuple | list):
            seen.extend(part for part in made if isinstance(part, Tensor))

    with ExitStack() as hooks:
        for network in networks.values():
            for module in network.modules():
                if not list(module.children()):
                    hooks.callback(module.register_forward_hook(note).remove)
        yield
