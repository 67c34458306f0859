"""A hospital whose trainer was taken over, and a coordinator that is in league with it, over real TLS on loopback."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from site_agent.gateway.enrolment.join import join
from tests.site_agent.fake_coordinator import FakeCoordinator, Taken
from tests.site_agent.fake_trainer import SHARED, FakeTrainer, write_tensors
from tests.site_agent.site_world import STUDY, SiteWorld, document
from tools.world import Service
from wardround.tensors.files import TensorFile
from wardround.tensors.manifests import TensorSpec
from wardround.v1 import federation_pb2 as pb

LARGE = (TensorSpec("shared.weight", "F32", (3072, 4095)), TensorSpec("shared.bias", "F32", (3072,)))  # 48 MiB
Spoil = Callable[[Path], None]


def nothing(_path: Path) -> None:
    """Leave what was handed over as it is."""


class BreakingCoordinator(FakeCoordinator):
    """Asks for each upload from its beginning, breaks the first streams after ``take`` bytes, and keeps every byte."""

    def __init__(self) -> None:
        self.breaks = 0
        self.silent = False  # it breaks them before it has said a word
        self.take = 1
        self.between: Callable[[int], None] = lambda _: None  # after so many streams were broken
        self.streams: list[bytearray] = []
        self.openings: list[pb.UploadOpen] = []
        self.refuse_to_answer = 0  # streams that it begins, and ends without a receipt
        super().__init__()

    @property
    def watching(self) -> list[Any]:
        """The streams that are told of assignments, those of the dead too until that is noticed."""
        return list(self._streams)

    @property
    def received(self) -> int:
        return sum(map(len, self.streams))

    def Upload(self, requests: Iterator[pb.UploadRequest], context: Any) -> Iterator[pb.UploadReply]:
        first = next(requests)
        if first.WhichOneof("kind") == "inquire":
            yield self._inquired(first.inquire.upload_id)
            return
        opening = first.open
        stream = bytearray()
        with self.changed:
            self.openings.append(opening)
            self.streams.append(stream)
            self.changed.notify_all()
        taken = self.uploads.setdefault(opening.upload_id, Taken(opening))
        taken.payload = stream
        broken = len(self.streams)
        if self.silent and broken <= self.breaks:
            self.between(broken)
            context.abort(grpc.StatusCode.UNAVAILABLE, "the line breaks")
        yield pb.UploadReply(offset=0)
        for request in requests:
            if request.WhichOneof("kind") == "commit":
                break
            stream += request.chunk.data
            if broken <= self.breaks and len(stream) >= self.take:
                self.between(broken)
                context.abort(grpc.StatusCode.UNAVAILABLE, "the line breaks")
        else:
            return
        if broken <= self.refuse_to_answer:
            context.abort(grpc.StatusCode.UNAVAILABLE, "no receipt")
        taken.receipt = self._decide(opening, bytes(stream))
        with self.changed:
            self.changed.notify_all()
        yield pb.UploadReply(receipt=taken.receipt)

    def _hear(self, context: Any, request: Any) -> None:
        """Keep nothing: 48 MiB several times over."""


class TakenTrainer(FakeTrainer):
    """``spoil`` is done to the staged file before it is handed over; ``lies`` replace what the answer says."""

    def __init__(self, state: Path) -> None:
        self.spoil: Spoil = nothing
        self.lies: dict[str, Any] = {}
        super().__init__(state)

    def _train(self, request: dict[str, Any]) -> dict[str, Any]:
        answer = super()._train(request)
        self.spoil(self.state / "staging" / answer["update"])
        return {**answer, **self.lies}


class ExitWorld(SiteWorld):
    """As ``SiteWorld``, with these two, and a study of any tensors."""

    trainer: TakenTrainer | None

    def __init__(self, folder: Path, specs: tuple[TensorSpec, ...] = SHARED) -> None:
        super().__init__(folder)
        self.coordinator.stop()
        self.hostile = BreakingCoordinator()
        self.coordinator = self.hostile
        self.specs = specs

    def join(self) -> None:
        join(self.state, self.coordinator.invite("st-olav"))
        self.trainer = TakenTrainer(self.state.root)
        self.trainer.specs = self.trainer.described = self.specs

    def offer(self, **study: Any) -> str:
        model = write_tensors(self.folder / "initial.safetensors", self.specs, 0)
        self.digest = self.coordinator.offer(document(**study), model)
        return self.digest

    def gateway(self) -> Service:
        """The gateway as a process of its own, connected."""
        before = list(self.hostile.watching)
        service = Service(
            self.folder / "gateway.log", "site-agent", "run", "--only", "gateway", "--state", self.state.root
        )
        service.wait_line("ready")
        self.coordinator.wait_for(lambda: set(self.hostile.watching) - set(before), "the gateway watches")
        return service

    @property
    def taken(self) -> TakenTrainer:
        assert self.trainer is not None
        return self.trainer

    @property
    def size(self) -> int:
        return sum(spec.bytes for spec in self.specs)

    def wait_over(self) -> None:
        """Until an upload is decided, or the round declined."""
        self.coordinator.wait_for(
            lambda: self.coordinator.decided() or any(said.code for said in self.coordinator.declared), "it is over"
        )

    def staged(self, round_: int = 1) -> Path:
        return self.state.staging / f"update-{STUDY}-{round_}.safetensors"

    def payload(self, seed: int) -> bytes:
        """What the trainer's file for this seed holds."""
        with TensorFile(write_tensors(self.folder / f"{seed}.safetensors", self.specs, seed)) as file:
            return b"".join(data for _, data in file.chunks())
