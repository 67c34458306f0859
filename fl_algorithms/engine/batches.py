"""Rows in batches: endless, shuffled by named streams, and where they are to be gone on with."""

import itertools
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import NamedTuple

import torch
from torch import Tensor

from fl_algorithms.engine.device import CPU, Device
from fl_algorithms.engine.workers import ahead
from fl_algorithms.streams import stream_seed
from fl_algorithms.study import SiteStudy
from fl_algorithms.tasks.base import FromFiles, Inputs


class Batch(NamedTuple):
    """Rows of a split: ``x`` float32 (b, features) and ``y`` int64 (b,); of images (b, channels, *size), and of masks
    ``y`` uint8 (b, *size).
    """

    x: Tensor
    y: Tensor


class _Coming(NamedTuple):
    """A batch before it is made: its rows, or their places; and where the iterator is after it."""

    x: Tensor
    y: Tensor
    seed: int  # of its augmentation
    order: int
    position: int


class Batches:
    """Endless shuffled batches of a split, a new order each time it is exhausted.

    With ``iterator = "round"`` the orders of a round are drawn from its own stream. With ``"run"`` order number e of
    the whole run is drawn from stream e, and the next round goes on where this one stopped. ``Rows`` are augmented anew
    in each order.
    """

    def __init__(
        self,
        x: Inputs,
        y: Tensor,
        study: SiteStudy,
        site: str,
        round_number: int,
        phase: str,
        place: dict[str, int],
        device: Device = CPU,
        kinds: Tensor | None = None,
    ) -> None:
        """``place`` is {} at first; for "run" it is kept up to date, and is all there is to save. With ``kinds``, int64
        (n,), an order is n draws with replacement in which each kind is as likely as any other.
        """
        self._y, self._device = y, device
        self._rows = None if isinstance(x, Tensor) else x
        self._x = x if isinstance(x, Tensor) else torch.arange(len(y))  # places, whose rows are made in their turn
        self._size = min(study.training.batch_size, len(y))
        self._limit = len(y) - len(y) % self._size if study.training.drop_last else len(y)
        self._place = place
        self._seed, self._site, self._round, self._phase = study.study.seed, site, 0, phase
        self._purpose = f"shuffle.{phase}" if phase else "shuffle"
        self._chances = None if kinds is None else 1 / torch.bincount(kinds)[kinds].double()
        self._own: torch.Generator | None = None
        if study.training.iterator == "round":
            self._own = self._generator(round_number)
            self._round, self._place = round_number, {}
        self._coming = self._orders(self._place.get("order", -1), self._place.get("position", self._limit))

    @property
    def per_epoch(self) -> int:
        """Batches in a pass. A split smaller than a batch is one short batch, also with ``drop_last``."""
        return -(-self._limit // self._size)

    def next(self) -> Batch:
        """The next one, on the device."""
        coming = next(self._coming)
        if self._rows is None:  # in the plain order already, as the whole that they were cut from
            self._place["order"], self._place["position"] = coming.order, coming.position
            return Batch(self._device.bring(coming.x), self._device.bring(coming.y))
        return self._taken(coming, *self._rows.augmented(coming.x, coming.y, coming.seed))

    def take(self, count: int) -> Generator[Batch, None, None]:
        """The next ``count``. Where rows are read from files, the device's workers make them ahead: the same bits.

        Close it when a batch is left untaken.

        Raises:
            TryAgain: a worker was ended from outside.
        """
        workers = min(self._device.workers, count)
        make = self._rows.for_worker() if workers and isinstance(self._rows, FromFiles) else None
        if make is None:
            for _ in range(count):
                yield self.next()
            return
        to_make, to_take = itertools.tee(itertools.islice(self._coming, count))
        requests = ((coming.x.numpy(), coming.y.numpy(), coming.seed) for coming in to_make)
        with closing(ahead(make, requests, workers, torch.get_num_threads())) as made:
            for (x, y), coming in zip(made, to_take, strict=False):
                yield self._taken(coming, torch.from_numpy(x), torch.from_numpy(y))

    def places(self, count: int) -> tuple[Tensor, list[int]]:
        """Where the rows of the first ``count`` lie in the split, one batch after the other, and each batch's size. To
        be asked before anything is taken.
        """
        order, position = self._place.get("order", -1), self._place.get("position", self._limit)
        parts: list[Tensor] = []
        sizes: list[int] = []
        while len(sizes) < count:
            if not 0 < position < self._limit:
                order, position = order + 1, 0
            generator = self._own if self._own is not None else self._generator(order)
            permutation = self._order(generator)
            batches = range(position, self._limit, self._size)[: count - len(sizes)]
            sizes += [min(self._size, self._limit - start) for start in batches]
            parts.append(permutation[position : batches[-1] + sizes[-1]])
            position = batches[-1] + sizes[-1]
        self._place |= {"order": order, "position": position}
        return torch.cat(parts), sizes

    def _taken(self, coming: _Coming, x: Tensor, y: Tensor) -> Batch:
        self._place |= {"order": coming.order, "position": coming.position}
        return Batch(self._device.bring(_plain(x)), self._device.bring(_plain(y)))

    def _orders(self, order: int, position: int) -> Iterator[_Coming]:
        """All batches from ``position`` of ``order`` on."""
        while True:
            if not 0 < position < self._limit:
                order, position = order + 1, 0
            generator = self._own if self._own is not None else self._generator(order)
            permutation = self._order(generator)
            xs = torch.split(_plain(self._x[permutation]), self._size)
            ys = torch.split(_plain(self._y[permutation]), self._size)
            seed = stream_seed(self._seed, self._site, self._round, f"augment.{self._phase}.{order}")
            for start in range(position, self._limit, self._size):
                position = min(start + self._size, self._limit)
                yield _Coming(xs[start // self._size], ys[start // self._size], seed, order, position)

    def _order(self, generator: torch.Generator) -> Tensor:
        if self._chances is None:
            return torch.randperm(len(self._y), generator=generator)
        return torch.multinomial(self._chances, len(self._y), replacement=True, generator=generator)

    def _generator(self, round_number: int) -> torch.Generator:
        seed = stream_seed(self._seed, self._site, round_number, self._purpose)
        return torch.Generator().manual_seed(seed)


def _plain(tensor: Tensor) -> Tensor:
    """In the plain order of memory, sides of length 1 too: how it was made must not choose the kernel."""
    return tensor.reshape(-1).view(tensor.shape)
