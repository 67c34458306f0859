"""The gRPC servicer of secure aggregation: what sites tell, and what a sum is checked with. It judges nothing."""

from collections.abc import Iterator
from functools import lru_cache

from coordinator.authenticator import Authenticator
from coordinator.calls import Call, permitted
from coordinator.members.certificate_status import Peer
from coordinator.models.downloads import Downloads
from coordinator.models.vectors import block_of, blocks_of
from coordinator.storage.blobs import Blobs
from coordinator.storage.database import Store
from coordinator.studies import evidence
from coordinator.studies.engine import Engine
from coordinator.studies.study import Study
from wardround.errors import BadData
from wardround.records.secure_messages import (
    MAX_STATEMENT,
    BlockDigests,
    BlocksWanted,
    SecureTold,
    VectorBlock,
    blocks_message,
)
from wardround.secure.layout import digests
from wardround.tensors.files import TensorFile
from wardround.v1 import secure_pb2 as pb
from wardround.v1 import secure_pb2_grpc

MOST_DIGESTS = 64  # vectors whose blocks' digests are kept, one for each MiB
MAX_TOLD = 2 * MAX_STATEMENT  # bytes of what a site tells: an opening, or shares of 255 sites


class SecureServicer(secure_pb2_grpc.SecureAggregationServicer):
    """Keys, shares, agreements and openings in; the evidence of a sum out."""

    def __init__(self, authenticator: Authenticator, engine: Engine, records: Store, blobs: Blobs) -> None:
        self.authenticator = authenticator
        self._status = authenticator.certificate_status
        self._engine, self._records, self._blobs = engine, records, blobs
        self._downloads = Downloads(records, blobs)
        self._digests = lru_cache(maxsize=MOST_DIGESTS)(self._digests_of)

    @permitted("site", pb.SecureTold, most=MAX_TOLD)
    def Tell(self, peer: Peer, request: pb.SecureTold, call: Call) -> pb.SecureToldReply:  # noqa: N802
        told = SecureTold.from_message(request)
        self._study(peer, told.attempt.study)
        self._engine.told(peer.site, told)
        return pb.SecureToldReply()

    @permitted("site", pb.EvidenceRequest)
    def Evidence(self, peer: Peer, request: pb.EvidenceRequest, call: Call) -> pb.SumEvidence:  # noqa: N802
        study = self._study(peer, request.study, request.revision)
        with self._records.read() as session:
            found = evidence.summed(session, study, request.round)
        model = ""
        if request.round == study.state.models:
            model = self._downloads.digest(study.aggregator, peer.site, request.round, study.newest)
        return evidence.evidence_of(study, found, model).to_message()

    @permitted("site", pb.BlocksRequest)
    def Blocks(  # noqa: N802
        self, peer: Peer, request: pb.BlocksRequest, call: Call
    ) -> Iterator[pb.BlocksReply]:
        wanted = BlocksWanted.from_message(request)
        study = self._study(peer, wanted.study, wanted.revision)
        with self._records.read() as session:
            uploads = evidence.summed(session, study, wanted.round).uploads
        if wanted.site not in uploads:
            raise BadData(f"site `{wanted.site}` is not in that sum", code="ROUND_NOT_ASKED")
        with TensorFile(self._blobs.spool(uploads[wanted.site])) as vector:  # while it is open, its room is taken
            yield blocks_message(BlockDigests(self._digests(uploads[wanted.site])))
            for index in wanted.blocks:
                self._status.check(peer)
                yield blocks_message(VectorBlock(index, block_of(vector, index)))

    def _digests_of(self, upload: str) -> tuple[str, ...]:
        """Of an accepted vector's blocks. Each member asks for those of each site, several times in a round."""
        with TensorFile(self._blobs.spool(upload)) as vector:
            return digests(data for _, data in blocks_of(vector)).digests

    def _study(self, peer: Peer, name: str, revision: int | None = None) -> Study:
        study = self._engine.find(name)
        if study is None or peer.site not in study.rules.sites:
            raise BadData(f"no study `{name[:64]}` lists site `{peer.site}`", code="STUDY_UNKNOWN")
        if revision is not None and revision != study.revision:
            raise BadData(f"study `{name}` is at revision {study.revision} now", code="REVISION_CHANGED")
        return study
