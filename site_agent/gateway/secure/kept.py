"""What a round's sum is checked with, as it lies in a folder: `sums/STUDY.REVISION.ROUND/` at a site, or a copy of it.

    evidence.json       what the members signed, and what was opened: whenever this site has checked a sum
    SITE.vector         a masked vector, its blocks end to end: where a person asked for it (`audit sum --keep`)
    base.safetensors    likewise, the model that the round began with
    model.safetensors   and the one that came of it

Whoever reads it needs neither key nor connection. Nothing in it is secret, but vectors are as well hidden as X25519
hides them: so they lie only where somebody wanted them.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from site_agent.gateway.secure.checking import HELD, Blockwise
from wardround.errors import BadData, Unavailable
from wardround.local import durable
from wardround.records.secure_messages import BlockDigests, BlocksWanted, SumEvidence, VectorBlock
from wardround.secure.layout import BLOCK, ITEM, Layout
from wardround.signing import canonical
from wardround.tensors.manifests import CHUNK

EVIDENCE, BASE, MODEL, VECTOR = "evidence.json", "base.safetensors", "model.safetensors", ".vector"


def name_of(study: str, revision: int, round_: int) -> str:
    """Of a sum's folder."""
    return f"{study}.{revision}.{round_}"


@dataclass(frozen=True)
class KeptSum:
    """The files of one sum."""

    folder: Path

    def evidence(self) -> SumEvidence | None:
        """None where nothing was kept. Raises BadData: it is damaged."""
        try:
            return SumEvidence.from_document(json.loads((self.folder / EVIDENCE).read_bytes()))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RecursionError):
            raise BadData(f"{self.folder / EVIDENCE} is damaged: it shows nothing of a sum") from None

    def model(self, name: str) -> Path | None:
        """The file of ``BASE`` or ``MODEL``, where it was kept."""
        path = self.folder / name
        return path if path.is_file() else None

    def has_vectors(self) -> bool:
        return any(self.folder.glob(f"*{VECTOR}"))

    def save(self, evidence: SumEvidence) -> None:
        """Keep what is shown of the sum."""
        durable.make_folder(self.folder.parent)
        durable.make_folder(self.folder)
        durable.write_file(self.folder / EVIDENCE, canonical.dumps(evidence.document()))

    def save_model(self, name: str, source: Path | None) -> None:
        """Keep a copy of a model, unless it is kept. Raises CannotWrite: the disk is full."""
        if source is not None and self.model(name) is None:
            with source.open("rb") as file:
                durable.write_file(self.folder / name, iter(lambda: file.read(CHUNK), b""))

    def save_vector(self, layout: Layout, source: Blockwise, wanted: BlocksWanted) -> None:
        """Keep the whole masked vector of the site that ``wanted`` names. Memory holds ``HELD`` blocks.

        Raises:
            BadData: another block is shown than was asked for; what was kept before is still there.
            CannotWrite: the disk is full.
        """
        durable.write_file(self.folder / f"{wanted.site}{VECTOR}", _pieces(layout, source, wanted))


@dataclass(frozen=True)
class KeptVectors:
    """The vectors of a kept sum, read as they are asked for."""

    kept: KeptSum
    layout: Layout
    _digests: dict[str, tuple[str, ...]] = field(default_factory=dict, init=False)

    def blocks(self, wanted: BlocksWanted) -> Iterator[BlockDigests | VectorBlock]:
        """Raises Unavailable: that vector is not there, or it is cut."""
        path = self.kept.folder / f"{wanted.site}{VECTOR}"
        if wanted.site not in self._digests:
            every = range(self.layout.blocks + 1)
            self._digests[wanted.site] = tuple(hashlib.sha256(self._block(path, at)).hexdigest() for at in every)
        yield BlockDigests(self._digests[wanted.site])
        for index in wanted.blocks:
            yield VectorBlock(index, self._block(path, index))

    def _block(self, path: Path, index: int) -> bytes:
        place, size = _place(self.layout, index)
        try:
            with path.open("rb") as file:
                file.seek(place)
                data = file.read(size)
        except OSError as error:
            raise Unavailable(f"{path} cannot be read ({error.strerror})") from None
        if len(data) != size:
            raise Unavailable(f"{path} is cut: block {index} is not in it")
        return data


def _pieces(layout: Layout, source: Blockwise, wanted: BlocksWanted) -> Iterator[bytes]:
    """The blocks of the site that ``wanted`` names, end to end. Raises BadData: another is shown than was asked for."""
    for start in range(0, layout.blocks + 1, HELD):
        indices = tuple(range(start, min(start + HELD, layout.blocks + 1)))
        some = BlocksWanted(wanted.study, wanted.revision, wanted.round, wanted.site, indices)
        shown = [part for part in source.blocks(some) if isinstance(part, VectorBlock)]
        if tuple((part.index, len(part.data)) for part in shown) != tuple(
            (index, _place(layout, index)[1]) for index in indices
        ):
            raise BadData(f"other blocks of site `{wanted.site}` are shown than were asked for")
        yield from (part.data for part in shown)


def _place(layout: Layout, index: int) -> tuple[int, int]:
    """Where a block stands in a vector's file, and its bytes."""
    tensors = layout.elements * ITEM
    if index == layout.blocks:
        return tensors, 8 * (1 + 2 * len(layout.metrics))
    return index * BLOCK, min(BLOCK, tensors - index * BLOCK)
