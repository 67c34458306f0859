"""`fl-lab size`: how large a study's networks are, what of them is shared, and what an answer costs."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fl_algorithms.engine.algorithm import Algorithm, algorithm_of
from fl_algorithms.engine.partition import build, has_heterogeneous_networks, task_of, upload_specs
from fl_algorithms.engine.training import Networks
from fl_algorithms.study import ResolvedStudy
from wardround.tensors.manifests import MODEL


def sizes(study: ResolvedStudy) -> list[dict[str, Any]]:
    """For each network that a resolved study allows, the default one first:

        network, model  its label and name
        parameters      numbers that training moves, of all the method's networks; shared and private are its parts
        mflops          of one sample's answer, in millions; see ``flops``
        parts           the same of each of the method's networks (``part`` names it)

    Raises:
        BadData: as ``describe``.
    """
    has_heterogeneous_networks(study)
    found = []
    for label, one in study.each_network().items():
        algorithm, task = algorithm_of(one), task_of(one)
        networks = build(one, task, algorithm, site="")
        upload = {spec.key for spec in upload_specs(one, algorithm, networks)}
        cost = flops(algorithm, networks, torch.zeros(1, *task.input_shape))
        parts = []
        for slot, network in networks.items():
            counts = {True: 0, False: 0}
            for name, parameter in network.named_parameters():
                counts[(name if slot == MODEL else f"{slot}/{name}") in upload] += parameter.numel()
            parts.append({"part": slot, **_row(counts[True], counts[False], cost[slot])})
        total = _row(sum(p["shared"] for p in parts), sum(p["private"] for p in parts), sum(cost.values()))
        found.append({"network": label, "model": one.model.name, **total, "parts": parts})
    return found


def flops(algorithm: Algorithm, networks: Networks, x: Tensor) -> dict[str, int]:
    """Slot -> floating-point operations of its convolutions and matrix products when the method answers ``x``.

    A multiplication and an addition are two. Norms, activations and resampling without weights are not counted.
    """
    spent = dict.fromkeys(networks, 0)
    entered: list[tuple[nn.Module, int]] = []  # the outermost module that is running, and the count at its start
    with FlopCounterMode(display=False) as counter, torch.no_grad():

        def enter(module: nn.Module, inputs: Any) -> None:
            if not entered:
                entered.append((module, counter.get_total_flops()))

        hooks = [m.register_forward_pre_hook(enter) for network in networks.values() for m in network.modules()]
        for slot, network in networks.items():

            def leave(module: nn.Module, inputs: Any, output: Any, slot: str = slot) -> None:
                if entered[-1][0] is module:
                    spent[slot] += counter.get_total_flops() - entered.pop()[1]

            hooks += [module.register_forward_hook(leave) for module in network.modules()]
        try:
            algorithm.infer(networks, x)
        finally:
            for hook in hooks:
                hook.remove()
    return spent


def print_sizes(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("network", "part", "parameters", "shared", "private", "MFLOPs a sample")
    for row in rows:
        _add(table, f"{row['network']}: {row['model']}", "all", row)
        for part in row["parts"] if len(row["parts"]) > 1 else []:
            _add(table, "", part["part"], part)
    for column in table.columns[2:]:
        column.justify = "right"
    Console(highlight=False, markup=False).print(table)


def _add(table: Any, network: str, part: str, row: dict[str, Any]) -> None:
    counts = (f"{row[key]:,}" for key in ("parameters", "shared", "private"))
    table.add_row(network, part, *counts, f"{row['mflops']:,.3f}")


def _row(shared: int, private: int, cost: int) -> dict[str, Any]:
    return {"parameters": shared + private, "shared": shared, "private": private, "mflops": cost / 1e6}
