"""One data set divided into sites: whose rows go where, by what rule. Pure numpy; the same on every machine.

    dirichlet   each class is divided by shares from Dir(alpha): a small alpha gives unlike sites. Hsu, Qi, Brown 2019,
                https://arxiv.org/abs/1909.06335
    labels      each site has few classes: the rows, sorted by class, are cut into shards. McMahan et al. 2017, sec. 3,
                https://arxiv.org/abs/1602.05629
    quantity    sites differ in size alone, by shares from Dir(alpha)
    iid         equal shares
    column      a column says whose row it is

Rows of one patient go together: to one site, and there to one part. Draws come from ``numpy.random.RandomState``, whose
numbers numpy keeps as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fl_algorithms.streams import stream_seed
from wardround.errors import BadData

Rule = Literal["dirichlet", "labels", "quantity", "iid"]
ATTEMPTS = 100  # drawings until every site has enough
I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Units:
    """What goes together: rows, or the rows of a patient.

    Attributes:
        of_row: (rows,) which unit each row is of.
        label: (units,) the class of each unit's first row.
    """

    of_row: I64
    label: I64

    @classmethod
    def of(cls, labels: Sequence[str], patients: Sequence[str] | None = None) -> "Units":
        """Of each row's label, and its patient where that is known; in the order in which they first occur."""
        codes = _codes(labels)
        if patients is None:
            return cls(np.arange(len(codes)), codes)
        of_row = _codes(patients)
        first = np.unique(of_row, return_index=True)[1]
        return cls(of_row, codes[first])


def divided(units: Units, sites: int, rule: Rule, *, seed: int, alpha: float, classes: int, at_least: int) -> I64:
    """Which site (from 0) each row goes to.

    Args:
        alpha: of "dirichlet" and "quantity".
        classes: of "labels": how many each site has, about.
        at_least: units that every site must have; drawn again until it is so.

    Raises:
        BadData: the data set is too small, or no drawing gives every site enough.
    """
    count = len(units.label)
    if count < sites * at_least:
        raise BadData(f"{count} rows or patients are too few for {sites} sites with at least {at_least} each")
    for attempt in range(ATTEMPTS):
        random = np.random.RandomState(stream_seed(seed, "", 0, f"partition.{rule}.{attempt}") % 2**32)
        if rule == "dirichlet":
            place = _by_class(units.label, sites, alpha, random)
        elif rule == "labels":
            place = _shards(units.label, sites, classes, random)
        else:
            shares = _shares(sites, alpha, random) if rule == "quantity" else np.full(sites, 1 / sites)
            place = _cut(random.permutation(count), shares)
        if np.bincount(place, minlength=sites).min() >= at_least:
            return place[units.of_row]
    raise BadData(
        f"in {ATTEMPTS} drawings a site had fewer than {at_least} rows or patients",
        hint="a larger `--alpha`, fewer sites, or a smaller `--at-least`",
    )


def held_out(units: Units, rows: I64, fraction: float, *, seed: int, site: str) -> NDArray[np.bool_]:
    """Which of a site's ``rows`` are for testing: ``fraction`` of each class's units, rounded down.

    Returns:
        (len(rows),)
    """
    random = np.random.RandomState(stream_seed(seed, site, 0, "partition.test") % 2**32)
    mine = np.unique(units.of_row[rows])
    chosen: list[int] = []
    for label in np.unique(units.label[mine]):
        of_class = random.permutation(mine[units.label[mine] == label])
        chosen += of_class[: int(fraction * len(of_class) + 1e-9)].tolist()
    return np.isin(units.of_row[rows], chosen)


def _codes(words: Sequence[str]) -> I64:
    """A number for each word, in the order in which the words first occur."""
    known: dict[str, int] = {}
    return np.array([known.setdefault(word, len(known)) for word in words], dtype=np.int64)


def _by_class(labels: I64, sites: int, alpha: float, random: np.random.RandomState) -> I64:
    place = np.zeros(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        shares = _shares(sites, alpha, random)
        ends = np.floor(np.cumsum(shares) * len(members) + 0.5).astype(np.int64)
        place[members] = np.searchsorted(ends[:-1], np.arange(len(members)), side="right")
    return place


def _shares(sites: int, alpha: float, random: np.random.RandomState) -> NDArray[np.float64]:
    """Dir(alpha); where a tiny alpha leaves the floats, its limit: all to one site."""
    drawn = np.asarray(random.gamma(alpha, size=sites), dtype=np.float64)
    if not drawn.any():
        drawn[random.randint(sites)] = 1
    shares: NDArray[np.float64] = drawn / drawn.sum()
    return shares


def _shards(labels: I64, sites: int, classes: int, random: np.random.RandomState) -> I64:
    order = random.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    owners = random.permutation(np.repeat(np.arange(sites), classes))
    place = np.zeros(len(labels), dtype=np.int64)
    for owner, shard in zip(owners, np.array_split(order, sites * classes), strict=True):
        place[shard] = owner
    return place


def _cut(order: I64, shares: NDArray[np.float64]) -> I64:
    ends = np.floor(np.cumsum(shares) * len(order) + 0.5).astype(np.int64)
    place = np.zeros(len(order), dtype=np.int64)
    place[order] = np.searchsorted(ends[:-1], np.arange(len(order)), side="right")
    return place
