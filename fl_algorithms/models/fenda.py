"""FENDA's network: what a site learns with the others beside what it learns alone.

The dropout on the concatenated features is in the authors' code, not in the paper (FENDA-FL, 2023,
https://arxiv.org/abs/2309.16825). Of images and masks each extractor is the body of a network that can be chosen by
itself, as in the paper's experiments on skin and on brains.
"""

from collections.abc import Callable

from torch import nn

from fl_algorithms import architectures
from fl_algorithms.models.adapters import BodyHead, TwoExtractors
from fl_algorithms.models.mlp import Extractor
from fl_algorithms.settings.extractors import TwoExtractorsSettings
from fl_algorithms.settings.models import FendaSettings
from wardround.errors import BadData
from wardround.records.study import Named


def fenda(settings: FendaSettings, inputs: int, outputs: int) -> nn.Module:
    """(n, inputs) float32 to logits (n, outputs)."""
    return TwoExtractors(
        lambda: Extractor(inputs, settings.shared_hidden),
        (inputs,),
        outputs,
        private=lambda: Extractor(inputs, settings.private_hidden),
        dropout=settings.dropout,
    )


def fenda_of_bodies(settings: TwoExtractorsSettings, shape: tuple[int, ...], outputs: int) -> nn.Module:
    """(n, channels, *size) float32 to logits (n, outputs), or for masks (n, outputs, *size).

    Raises:
        BadData, NeedsPerson: as the networks whose bodies these are; or one of them cannot be divided.
    """

    def maker(table: Named) -> Callable[[], nn.Module]:
        return lambda: body_of(table, settings, shape, outputs)

    shared, private = settings.both
    return TwoExtractors(maker(shared), shape, outputs, private=maker(private), dropout=settings.dropout)


def body_of(table: Named, settings: TwoExtractorsSettings, shape: tuple[int, ...], outputs: int) -> nn.Module:
    """The body of the network that ``table`` names, by itself."""
    row = architectures.ROWS.get(table.name) or architectures.library_row(table.name)
    assert row is not None  # the settings have looked
    network = architectures.built(row, settings.extractor(table), shape, outputs)
    if not isinstance(network, BodyHead):
        raise BadData(
            f"network `{table.name}` cannot be an extractor: its last layer is not where its answer comes from, so "
            "nobody knows its features",
            hint=f"another one: {', '.join(settings.networks)}",
        )
    return network.body
