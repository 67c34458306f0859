"""Which rows train and which validate: at random, by patient, by class."""

import math
from collections.abc import Hashable, Sequence
from pathlib import Path

import torch
from torch import Generator, Tensor

from wardround.errors import BadData


def split_rows(
    count: int,
    fraction: float,
    generator: Generator,
    path: Path,
    *,
    patients: Sequence[Hashable] = (),
    strata: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The rows (int64, indices) of the training part and of the validation part.

    One permutation of the patients in the order of their first row, or of the rows; validation is its end,
    floor(fraction * patients). With ``strata``, the end of each stratum's own part of the permutation: as many of each
    as ``shares`` says.

    Args:
        patients: of each row; () where each row is one.
        strata: of each row; a patient's is the largest of theirs.

    Raises:
        BadData: there are too few for both parts.
    """
    numbers: dict[Hashable, int] = {}
    unit_of = [numbers.setdefault(who, len(numbers)) for who in patients] if patients else list(range(count))
    units = len(numbers) if patients else count
    held_out = math.floor(fraction * units)
    if held_out == 0:
        what = "patient" if patients else "usable row"
        raise BadData(
            f"{path}: {units} {what}{'s' if units > 1 else ''}; a validation part of "
            f"{fraction:g} needs at least {math.ceil(1 / fraction)}"
        )
    order = torch.randperm(units, generator=generator)
    if strata is None:
        train, validation = order[:-held_out], order[-held_out:]
    else:
        train, validation = _by_stratum(order, _of_units(strata, unit_of, units), held_out)
    if not patients:
        return train, validation
    rows: list[list[int]] = [[] for _ in range(units)]
    for row, unit in enumerate(unit_of):
        rows[unit].append(row)
    return _rows_of(train, rows), _rows_of(validation, rows)


def shares(sizes: Sequence[int], total: int) -> list[int]:
    """``total`` divided in proportion to ``sizes``: each at least its share rounded down, the largest rests first."""
    whole = sum(sizes)
    given = [size * total // whole for size in sizes]
    rests = sorted(range(len(sizes)), key=lambda place: (-(sizes[place] * total % whole), place))
    for place in rests[: total - sum(given)]:
        given[place] += 1
    return given


def _of_units(strata: Sequence[int], unit_of: Sequence[int], units: int) -> list[int]:
    of = [min(strata)] * units
    for row, unit in enumerate(unit_of):
        of[unit] = max(of[unit], strata[row])
    return of


def _by_stratum(order: Tensor, of: Sequence[int], held_out: int) -> tuple[Tensor, Tensor]:
    places: dict[int, list[int]] = {}
    for unit in order.tolist():
        places.setdefault(of[unit], []).append(unit)
    names = sorted(places)
    counts = shares([len(places[name]) for name in names], held_out)
    chosen = {
        unit for name, count in zip(names, counts, strict=True) for unit in places[name][len(places[name]) - count :]
    }
    inside = torch.tensor([unit in chosen for unit in order.tolist()])
    return order[~inside], order[inside]


def _rows_of(units: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor([row for unit in units.tolist() for row in rows[unit]])
