"""What the coordinator keeps of a study's model, before the first round and after each: files in, a file out.

The server aggregator of the study's method computes. Here are only the files: opened, fed in site order, and the result
made durable. It can be cut off anywhere and done again, to the same bits.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coordinator.models.vectors import VectorSum
from coordinator.storage.blobs import Blobs
from fl_algorithms.server.aggregator import BlockSource, Round, ServerAggregator, Update
from fl_algorithms.server.combining import Combined
from fl_algorithms.server.limits import Account, averaged
from fl_algorithms.study import ResolvedStudy
from wardround.errors import BadData
from wardround.secure.layout import Layout, Numbers
from wardround.secure.sums import Unmasking
from wardround.tensors.codecs import Decoded
from wardround.tensors.files import TensorFile
from wardround.tensors.manifests import Manifest


def begin(blobs: Blobs, aggregator: ServerAggregator, initial: Manifest, label: str) -> Manifest:
    """Make durable what is kept before the first round, and return its manifest.

    Args:
        initial: of the initial model, which is there. label: of the file while it is written.
    """
    if aggregator.passes:
        return initial
    with TensorFile(blobs.whole_model(initial.digest())) as model, blobs.new_model(aggregator.kept_specs, label) as new:
        aggregator.start(model, new.write)
        return new.keep()


class DamagedSpools(BadData):
    """Updates whose bytes here are no longer those that came; ``sites`` says whose."""

    def __init__(self, sites: Sequence[str]) -> None:
        super().__init__(
            f"what is kept here of the accepted update of {' and '.join(f'`{site}`' for site in sites)} is damaged; it "
            "was not averaged",
            hint="check the disk; the sites are asked for their updates again",
        )
        self.sites = tuple(sites)


@dataclass(frozen=True)
class Spooled:
    """An accepted update as it was accepted: whose, its number of examples as reported, and its manifest's digest."""

    site: str
    num_examples: int
    upload_id: str
    manifest_sha256: str


@dataclass(frozen=True)
class Opened:
    """A set that its sites have opened: which, the form of their vectors, and the masks that the sum still has."""

    layout: Layout
    unmasking: Unmasking


class NotSeen:
    """In place of a single update that nobody here can see."""

    def block(self, key: str, start: int, count: int) -> NDArray[np.float32]:
        """Raises BadData: always."""
        raise BadData(f"a single update's `{key}` is asked for, and with secure aggregation there are sums alone")


def add_up(
    blobs: Blobs,
    aggregator: ServerAggregator,
    kept: str,
    spooled: Sequence[Spooled],
    opened: Opened,
    round_number: int,
    label: str,
    public_data: Path | None = None,
    *,
    closing: bool,
) -> tuple[Manifest | None, Numbers]:
    """Make durable what is kept after a round with secure aggregation. Returns its manifest, None of a closing one; and
    the sums of the sites' weights and metrics.

    Raises:
        DamagedSpools: some vectors are not what was accepted.
        DamagedModel: what was kept is damaged on disk, in both copies.
        BadData: the sites count for nothing together, or what the aggregator needs is missing.
    """
    spooled = sorted(spooled, key=lambda one: one.site)
    if damaged := [one.site for one in spooled if not blobs.whole_spool(one.upload_id, one.manifest_sha256)]:
        raise DamagedSpools(damaged)
    with ExitStack() as stack:
        vectors = {one.site: stack.enter_context(TensorFile(blobs.spool(one.upload_id))) for one in spooled}
        total = VectorSum(opened.layout, vectors, opened.unmasking)
        if closing:
            return None, total.numbers
        if total.numbers.weight < 1:
            raise BadData("the sites of this round count for no rows together, so their sum has no mean")
        newest = stack.enter_context(TensorFile(blobs.whole_model(kept, again=True)))
        updates = [Update(one.site, 1, NotSeen()) for one in spooled]
        with blobs.new_model(aggregator.kept_specs, label) as new:
            combined = Combined(total.mean)
            aggregator.aggregate(Round(round_number, newest, updates, new.write, public_data, combined=combined))
            return new.keep(), total.numbers


def aggregate(
    blobs: Blobs,
    study: ResolvedStudy,
    aggregator: ServerAggregator,
    kept: str,
    spooled: Sequence[Spooled],
    before: Sequence[Account],
    round_number: int,
    label: str,
    public_data: Path | None = None,
) -> tuple[Manifest, Account]:
    """Make durable what is kept after a round. Returns its manifest, and what became of each update.

    All bytes of every update are looked at again first: one that changed on disk since is never averaged.

    Args:
        kept: digest of what was kept when the round opened.
        spooled: the accepted updates, in any order. before: the accounts of the closed rounds, the last one last.
        label: of the file while it is written.
        public_data: the coordinator's copy of the study's public data set, for an aggregator that distills.

    Raises:
        DamagedSpools: some updates are not what was accepted.
        TooFewLeft: fewer than the quorum are within the study's limits.
        DamagedModel: what was kept is damaged on disk, in both copies.
        BadData: what the aggregator needs is missing.
    """
    spooled = sorted(spooled, key=lambda update: update.site)
    if damaged := [one.site for one in spooled if not blobs.whole_spool(one.upload_id, one.manifest_sha256)]:
        raise DamagedSpools(damaged)

    def values(one: Spooled, file: TensorFile) -> BlockSource:
        encoding = study.encoding.encoding
        return Decoded(encoding, aggregator.upload_of(one.site), file) if encoding.is_lossy else file

    with ExitStack() as stack:
        newest = stack.enter_context(TensorFile(blobs.whole_model(kept, again=True)))
        accepted = []
        for one in spooled:
            file = stack.enter_context(TensorFile(blobs.spool(one.upload_id)))
            alike = file.specs == aggregator.upload_of(one.site)
            norm = blobs.norm_of(one.upload_id, one.manifest_sha256) if alike else None
            accepted.append(Update(one.site, one.num_examples, values(one, file), norm))

        def make(chosen: Sequence[Update], combined: Combined) -> Manifest:
            with blobs.new_model(aggregator.kept_specs, label) as new:
                largest = study.limits.max_weight
                aggregator.aggregate(
                    Round(round_number, newest, chosen, new.write, public_data, largest, combined=combined)
                )
                return new.keep()

        return averaged(study, aggregator, accepted, before, make, kept=newest, round_number=round_number)
