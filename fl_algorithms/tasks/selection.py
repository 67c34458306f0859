"""Splits made of other splits' rows, for the lab's evaluation; the same for tables and for images."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fl_algorithms.tasks.base import Inputs, OwnSizes, Rows, SiteData, Split


def rows_at(x: Inputs, places: Tensor) -> Tensor:
    """(k, *shape): the rows at ``places``, int64 (k,), as a network takes them."""
    return x[places] if isinstance(x, Tensor) else x.take(places)


def row_shape(x: Inputs) -> tuple[int, ...]:
    """Of one row."""
    return tuple(x.shape[1:]) if isinstance(x, Tensor) else x.shape


def chosen(split: Split, places: Tensor) -> Split:
    """The rows at ``places``, in that order."""
    x, groups = split.x, None if split.groups is None else split.groups[places]
    if not isinstance(x, Tensor):
        return Split(_selected([x], torch.zeros_like(places), places), split.y[places], groups)
    return Split(x[places], split.y[places], groups)


def _selected(parts: Sequence[Rows], of: Tensor, places: Tensor) -> "Selected":
    return (SelectedImages if all(isinstance(part, OwnSizes) for part in parts) else Selected)(parts, of, places)


def joined(splits: Sequence[Split]) -> Split:
    """All rows of ``splits``, of one kind and shape, after one another; whose they are is not kept."""
    y = torch.cat([split.y for split in splits])
    tensors = [split.x for split in splits if isinstance(split.x, Tensor)]
    if len(tensors) == len(splits):
        return Split(torch.cat(tensors), y)
    parts = [split.x for split in splits if not isinstance(split.x, Tensor)]
    of = torch.cat([torch.full((len(part),), number) for number, part in enumerate(parts)])
    return Split(_selected(parts, of, torch.cat([torch.arange(len(part)) for part in parts])), y)


def to_evaluate(data: SiteData) -> SiteData:
    """The data of a site that trains nothing: models are judged on all rows, those also that others would train on."""
    return replace(data, validation=joined([data.train, data.validation]))


class Selected:
    """``Rows`` out of others': row i is row ``places[i]`` of ``parts[of[i]]``."""

    def __init__(self, parts: Sequence[Rows], of: Tensor, places: Tensor) -> None:
        self._parts, self._of, self._places = parts, of, places

    @property
    def shape(self) -> tuple[int, ...]:
        return self._parts[0].shape

    def __len__(self) -> int:
        return len(self._places)

    def take(self, places: Tensor) -> Tensor:
        out = torch.empty(len(places), *self.shape)
        for rows, part, own in self._by_part(places):
            out[rows] = part.take(own)
        return out

    def augmented(self, places: Tensor, y: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """As each part's own: rows at the same place of two parts draw alike."""
        out, labels = torch.empty(len(places), *self.shape), y.clone()
        for rows, part, own in self._by_part(places):
            out[rows], labels[rows] = part.augmented(own, y[rows], seed)
        return out, labels

    def _by_part(self, places: Tensor) -> list[tuple[Tensor, Rows, Tensor]]:
        """For each part that is asked for: which of ``places``, the part, and its own places."""
        of = self._of[places]
        groups = [(torch.nonzero(of == number).flatten(), part) for number, part in enumerate(self._parts)]
        return [(rows, part, self._places[places[rows]]) for rows, part in groups if len(rows)]


class SelectedImages(Selected):
    """``OwnSizes`` out of others'."""

    @property
    def images(self) -> int:
        return len(self._images())

    @property
    def pixels_by_class(self) -> Tensor:
        parts = [part for part in self._parts if isinstance(part, OwnSizes)]
        return torch.stack([parts[part].pixels_by_class[image] for part, image in self._images()])

    def augmented(self, places: Tensor, y: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """As each part's own: rows at the same place of two parts draw alike."""
        made = [(rows, *part.augmented(own, y[rows], seed)) for rows, part, own in self._by_part(places)]
        order = torch.cat([rows for rows, _, _ in made]).argsort()
        return torch.cat([x for _, x, _ in made])[order], torch.cat([labels for _, _, labels in made])[order]

    def middle(self, places: Tensor) -> tuple[Tensor, Tensor]:
        pieces = [self._part(place).middle(self._places[place][None]) for place in places.tolist()]
        return torch.cat([x for x, _ in pieces]), torch.cat([y for _, y in pieces])

    def judged(self, place: int, infer: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        return self._part(place).judged(int(self._places[place]), infer)

    def _part(self, place: int) -> OwnSizes:
        part = self._parts[int(self._of[place])]
        assert isinstance(part, OwnSizes)
        return part

    def _images(self) -> list[tuple[int, int]]:
        """Part and place of each image that a row is of, in the rows' order."""
        each = [len(part) // part.images if isinstance(part, OwnSizes) else 1 for part in self._parts]
        pairs = zip(self._of.tolist(), self._places.tolist(), strict=True)
        return list(dict.fromkeys((of, place // each[of]) for of, place in pairs))
