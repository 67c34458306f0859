"""The session that a round continues, and the data that it is trained on.

Both come from memory where they are the same as in the round before, else from the vault and the disk.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from pydantic import JsonValue

from fl_algorithms.engine.beside import Session, session_at
from fl_algorithms.engine.device import Device
from fl_algorithms.engine.session import SessionState
from fl_algorithms.tasks.base import SiteData
from site_agent.trainer.data import sources
from site_agent.trainer.rounds.installing import Installed, network_label
from site_agent.trainer.rounds.reading import load, load_weights
from site_agent.trainer.rounds.tensorfiles import beside_in, file_of, from_bytes
from site_agent.trainer.vault.index import Kept
from site_agent.trainer.vault.states import Vault
from wardround.local.writing import Buffer
from wardround.records.trainer import ApprovedData
from wardround.records.trainer.fields import NetworkLabel, Strict
from wardround.signing import canonical

META = "session"  # beside the tensors in the header of a state's file
log = logging.getLogger(__name__)


class Meta(Strict):
    """A private state but for its tensors: the label of the network that it is of, and what its session notes."""

    network: NetworkLabel
    session: dict[str, JsonValue]


@dataclass(frozen=True)
class RoundContext:
    """One round as the gateway asks for it, and the private state that it begins with."""

    study: Installed
    study_digest: str
    approved: ApprovedData
    vault: Vault
    start: Kept | None


class Sessions:
    """The last session and its data, kept in memory between rounds."""

    def __init__(self, state: Path, device: Device) -> None:
        self._state = state
        self._device = device
        self._session: tuple[tuple[str, ...], Session] | None = None  # what it continues, and the session
        self._data: tuple[tuple[str, ...], SiteData] | None = None

    def data(self, context: RoundContext) -> SiteData:
        """The data, which must be what a person approved; read anew only when another study had its turn.

        Raises:
            BadData: DECLINED_DATA_CHANGED, or DECLINED_DATA_INVALID.
        """
        study, approved = context.study, context.approved
        source = sources.source(self._state, approved.name)
        network = network_label(study.file, study.site, source.network)
        sources.refuse_other_network(study.name, approved.name, study.network, network)
        sources.refuse_other_data(study.name, approved.name, approved.digest, sources.digest_now(source))
        if study.needs_public_data:
            sources.public_data_of(study.file, approved.name, source)
        key = (study.digest, study.site, canonical.digest(source.model_dump()), approved.digest)
        if self._data is None or self._data[0] != key:
            data = load(study, approved.name, source)
            sources.refuse_other_data(study.name, approved.name, approved.digest, data.digest)
            self._data = (key, data)
        return self._data[1]

    def resume(self, context: RoundContext, data: SiteData) -> Session:
        """The session as it was after the state that the round starts from: the one in memory, or the vault's.

        It is taken out of memory, so that a round which fails halfway leaves nothing behind.
        """
        warm, self._session = self._session, None
        if warm is not None and warm[0] == _key(context, data, context.start):
            return warm[1]
        study, state = context.study, None
        if context.start is not None:
            state, network = decoded(context.vault.load(context.start))
            if network != study.network:
                log.warning(
                    "study `%s`: this site trains network `%s` from here on and begins anew; what it kept was of `%s`",
                    study.name, study.network, network,
                )  # fmt: skip
                state = None
        own = None if state is not None else self._begin(context)
        return session_at(study.own, study.site, study.task, data, state, own, self._device, shares_download=True)

    def remember(self, context: RoundContext, data: SiteData, after: Kept, session: Session) -> None:
        """Keep ``session``, as it is ``after`` a round, for the next one."""
        self._session = (_key(context, data, after), session)

    def _begin(self, context: RoundContext) -> dict[str, torch.Tensor] | None:
        """The private tensors that a person approved to begin with; None for as they are drawn.

        Raises:
            BadData: the file is not what was approved, or not what the network needs.
        """
        name, approved = context.study.name, context.approved
        source = sources.source(self._state, approved.name)
        refuse_other = partial(sources.refuse_other_weights, name, approved.name, approved.weights)
        refuse_other(sources.weights_now(source))
        if source.weights is None:
            return None
        weights = load_weights(context.study, source.weights)
        refuse_other(weights.digest)
        return weights.tensors


def encoded(state: SessionState, network: str) -> Iterator[Buffer]:
    """A session's state, of the network of that label, as the vault keeps it: a file in pieces sharing its memory."""
    meta = Meta(network=network, session=state.meta)
    return file_of(state.tensors, {META: canonical.dumps(meta.model_dump()).decode()})


def decoded(stored: bytes) -> tuple[SessionState, str]:
    """The state, and the label of its network. Its bytes are those that ``encoded`` made, by their digest."""
    meta = Meta.model_validate(canonical.loads(beside_in(stored)[META].encode()))
    return SessionState(from_bytes(stored), meta.session), meta.network


def _key(context: RoundContext, data: SiteData, state: Kept | None) -> tuple[str, ...]:
    """What a session continues. A state's file is named by its content."""
    start = "" if state is None else state.file
    study = context.study
    return (str(context.vault.folder), context.study_digest, study.site, study.network, data.digest, start)
