"""The check of a round's sum: blocks of every site's masked vector, each as its site signed it, give the model's bits.

What is looked at is drawn here and told nobody before. A model of up to 16 blocks is looked at whole.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from wardround.errors import BadData, NotPermitted
from wardround.records.ledger.secure import BLOCKS_ALONE, OTHER, SAME
from wardround.records.secure_messages import BlockDigests, BlocksWanted, SumEvidence, VectorBlock
from wardround.secure.layout import ELEMENTS, Blocks, Layout
from wardround.secure.opening import Group, OpenedSecrets
from wardround.secure.statements import Agreement, Keys, Roster, Submission, read_all, set_digest
from wardround.secure.sums import Evidence, model_values
from wardround.tensors.files import TensorFile

WHOLE = 16  # blocks of a model that is looked at whole
SAMPLE = 4  # blocks of a larger one
HELD = 32  # blocks of all sites that are in memory at once: 1 MiB each
VARIANCE = "running_var"  # the last part of its name, in torch's norm layers


class Blockwise(Protocol):
    """Where blocks of masked vectors come from: the connection, or a bundle."""

    def blocks(self, wanted: BlocksWanted) -> Iterator[BlockDigests | VectorBlock]: ...


@dataclass(frozen=True)
class Sum:
    """A round's sum that is to be checked.

    Attributes:
        chosen: the digest of the set that this site signed, ``context`` that of its attempt; "": whichever set
            ``threshold`` members signed.
        base, model: files of what the round began with and what it made; None where there is none, or not here.
        averages: whether the model is the base and the mean.
    """

    layout: Layout
    roster: Roster
    threshold: int
    context: str
    chosen: str
    base: Path | None
    model: Path | None
    averages: bool


@dataclass(frozen=True)
class Checked:
    """``result``: as the ledger's `sum_checked` line says it. ``of``: how many blocks there are. ``sites``: summed."""

    result: str
    looked_at: tuple[int, ...]
    of: int
    sites: tuple[str, ...]
    why: str = ""


def drawn(layout: Layout, count: int | None) -> tuple[int, ...]:
    """The blocks to look at. ``count``: so many; None: all."""
    blocks = layout.blocks
    count = blocks if count is None else count
    return tuple(sorted(random.SystemRandom().sample(range(blocks), min(count, blocks))))


def check(sum_: Sum, shown: SumEvidence, source: Blockwise, looked_at: Sequence[int]) -> Checked:
    """Compare blocks of a sum with the model. Memory holds ``HELD`` blocks, and one of each file.

    Raises:
        BadData: what is shown is not what the sites signed, or blocks are missing.
        NotPermitted: it is of another set than this site signed.
        WardroundError: what ``source`` raises.
    """
    evidence = evidence_of(sum_, shown)
    sites = tuple(one.site for one in evidence.submissions)
    answer = (tuple(looked_at), sum_.layout.blocks, sites)
    wanted = BlocksWanted(shown.attempt.study, shown.attempt.revision, shown.attempt.round, "", ())
    (last,) = _fetched(source, wanted, sites, [sum_.layout.blocks])
    weight = evidence.numbers(last[1]).weight
    compared = sum_.averages and sum_.base is not None and sum_.model is not None
    with _opened(sum_.base if compared else None) as base, _opened(sum_.model if compared else None) as model:
        for index, blocks in _fetched(source, wanted, sites, looked_at):
            total = evidence.block(index, blocks)
            place = 0
            for key, start, count in sum_.layout.spans(index * ELEMENTS, total.size):
                part = total[place : place + count]
                place += count
                if base is None or model is None:
                    continue
                variance = key.rpartition(".")[2] == VARIANCE
                gives = model_values(sum_.layout, part, weight, base.block(key, start, count), variance=variance)
                if not np.array_equal(gives, model.block(key, start, count)):
                    return Checked(OTHER, *answer, f"block {index}, `{key}`: the model has other values than the sum")
    return Checked(SAME if compared else BLOCKS_ALONE, *answer)


def evidence_of(sum_: Sum, shown: SumEvidence) -> Evidence:
    """What is shown, each statement verified by its site's key in the roster, and held against this site's own word.

    Raises:
        BadData: a statement is not signed by its site, of another round or group; too few signed the set; or it is
            not opened.
        NotPermitted: it is another set than the one that this site signed.
    """
    keys = read_all(Keys, shown.keys, sum_.roster)
    if not keys or any(one.context != keys[0].context for one in keys):
        raise BadData("the keys that are shown of a sum are of several attempts")
    group = Group(keys[0].context, keys)
    submissions = read_all(Submission, shown.submissions, sum_.roster)
    chosen = set_digest(group.digest, submissions)
    if sum_.chosen and (group.context.digest, chosen) != (sum_.context, sum_.chosen):
        raise NotPermitted(
            "what is shown as the sum is of another set than the one that this site signed", code="DECLINED_POLICY"
        )
    if group.context.layout != sum_.layout.digest:
        raise BadData("what is shown as the sum is of vectors of another form")
    for one in submissions:
        if (one.context, one.group) != (group.context.digest, group.digest):
            raise BadData(f"what site `{one.site}` submitted is of another round or group")
    signers = read_all(Agreement, shown.agreements, sum_.roster)
    if sum(one.chosen == chosen for one in signers) < sum_.threshold:
        raise BadData(f"fewer than {sum_.threshold} sites have signed the set that was opened")
    opened = OpenedSecrets(shown.self_masks, shown.mask_keys)
    opened.refuse_other(group, (one.site for one in submissions))
    return Evidence(sum_.layout, group, submissions, opened)


def _fetched(
    source: Blockwise, wanted: BlocksWanted, sites: Sequence[str], indices: Sequence[int]
) -> Iterator[tuple[int, dict[str, tuple[Blocks, bytes]]]]:
    """Of each block in turn what every site has there, with the digests of all its blocks."""
    at_once = max(1, HELD // max(1, len(sites)))
    for start in range(0, len(indices), at_once):
        some = tuple(indices[start : start + at_once])
        found = {site: _of_site(source.blocks(_of(wanted, site, some)), some, site) for site in sites}
        for index in some:
            yield index, {site: (digests, blocks[index]) for site, (digests, blocks) in found.items()}


def _of(wanted: BlocksWanted, site: str, indices: tuple[int, ...]) -> BlocksWanted:
    return BlocksWanted(wanted.study, wanted.revision, wanted.round, site, indices)


def _of_site(
    parts: Iterable[BlockDigests | VectorBlock], indices: Sequence[int], site: str
) -> tuple[Blocks, Mapping[int, bytes]]:
    digests: Blocks | None = None
    blocks: dict[int, bytes] = {}
    for part in parts:
        if isinstance(part, BlockDigests):
            digests = Blocks(part.digests)
        elif part.index in indices and part.index not in blocks:
            blocks[part.index] = part.data
        else:
            raise BadData(f"a block of site `{site}` is shown that was not asked for")
    if digests is None or len(blocks) != len(indices):
        raise BadData(f"blocks of site `{site}` are not shown")
    return digests, blocks


def _opened(path: Path | None) -> AbstractContextManager[TensorFile | None]:
    """A model's file, or nothing."""
    return TensorFile(path) if path is not None else nullcontext()
