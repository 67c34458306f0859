"""Training alone beside the federation: what a site would have by itself, for it to compare and to use.

A study asks for it by ``[checkpoints] alone = true``. Each round the site also takes the round's local steps with a
network of its own that never meets another site's. Nothing of it leaves, and what the federation gets is the same bits.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from fl_algorithms.engine.algorithm import Downlink
from fl_algorithms.engine.device import CPU, Device
from fl_algorithms.engine.session import Checkpoint, OpenRound, RoundResult, SessionState, SiteSession
from fl_algorithms.engine.training import Progress, Watch
from fl_algorithms.methods.settings import FineTuning
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import SiteData, Task

ALONE = "alone"  # kind of checkpoint; and the part of a state that is the second session's
JOINT = "__"  # between a member's kind and its slot, in the bundles of a checkpoint that has members
SINGLE = ("fine_tuned", "best_global", "best_local", "latest", ALONE)  # kinds of one model


class Beside:
    """Two sessions of one site, one in the federation and one alone; from outside one, as ``SiteSession``."""

    def __init__(self, federated: SiteSession, alone: SiteSession) -> None:
        self.federated, self._alone = federated, alone

    def train(
        self, round_number: int, base: Downlink, progress: Progress | None = None, watch: Watch | None = None
    ) -> RoundResult:
        """As ``SiteSession.train``; ``watch`` sees the federation's steps."""
        result = self.federated.train(round_number, base, progress, watch)
        return _with(result, self._alone.train(round_number, {}, progress))

    def validate(self, round_number: int, base: Downlink) -> RoundResult:
        """As ``SiteSession.validate``."""
        return _with(self.federated.validate(round_number, base), self._alone.validate(round_number, {}))

    def open(self, round_number: int, base: Downlink) -> OpenRound:
        """As ``SiteSession.open``."""
        return self.federated.open(round_number, base)

    def close(self, opened: OpenRound) -> RoundResult:
        """As ``SiteSession.close``."""
        return _with(self.federated.close(opened), self._alone.train(opened.context.round_number, {}))

    def scored(self, checkpoint: Checkpoint) -> Checkpoint:
        """As ``SiteSession.scored``."""
        if checkpoint.kind != ALONE:
            return self.federated.scored(checkpoint)
        own = replace(checkpoint, tensors=members_of(checkpoint.tensors)[ALONE])
        return replace(self._alone.scored(own), tensors=checkpoint.tensors)

    def tuned(self, tensors: Mapping[str, Tensor], tuning: FineTuning) -> dict[str, Tensor]:
        """As ``SiteSession.tuned``, of a checkpoint of the federation."""
        return self.federated.tuned(tensors, tuning)

    def finish(self, best_round: int | None, best: Downlink | None) -> tuple[Checkpoint, ...]:
        """As ``SiteSession.finish``."""
        return self.federated.finish(best_round, best)

    def export_state(self, *, copies: bool = True) -> SessionState:
        """Of both, as ``SiteSession.export_state``."""
        state, alone = self.federated.export_state(copies=copies), self._alone.export_state(copies=copies)
        tensors = state.tensors | {f"{ALONE}/{name}": tensor for name, tensor in alone.tensors.items()}
        return SessionState(tensors, {**state.meta, ALONE: alone.meta})


Session = SiteSession | Beside


def session_at(
    study: ResolvedStudy,
    site: str,
    task: Task,
    data: SiteData,
    state: SessionState | None = None,
    own: Mapping[str, Tensor] | None = None,
    device: Device = CPU,
    *,
    score_at_once: bool = True,
    shares_download: bool = False,
) -> Session:
    """The site's session, with one beside it where the study asks for that. Arguments and errors as ``SiteSession``."""
    at_site = study.at(site)
    session = partial(SiteSession, score_at_once=score_at_once, shares_download=shares_download)
    if not at_site.trains_alone:
        return session(study, site, task, data, state, own, device)
    first, second = (None, None) if state is None else _divided(state)
    first_session = session(study, site, task, data, first, own, device)
    alone = session(at_site.alone(), site, task, data, second, device=device)
    return Beside(first_session, alone)


def federated(session: Session) -> SiteSession:
    """The part of ``session`` that is in the federation."""
    return session.federated if isinstance(session, Beside) else session


def joined(members: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Members' tensors by kind, as one checkpoint's: "alone__model/head.weight"."""
    found = {}
    for kind, tensors in members.items():
        for key, tensor in tensors.items():
            slot, _, name = key.rpartition("/")
            found[f"{kind}{JOINT}{slot or 'model'}/{name}"] = tensor
    return found


def members_of(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """What ``joined`` put together, by kind; {} for the tensors of one model."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        bundle, _, name = key.rpartition("/")
        kind, joint, slot = bundle.partition(JOINT)
        if joint and kind in SINGLE:
            found.setdefault(kind, {})[name if slot == "model" else f"{slot}/{name}"] = tensor
    return found


def _with(result: RoundResult, alone: RoundResult) -> RoundResult:
    """``result`` with the best model of the session alone as a checkpoint of its own kind."""
    bests = [checkpoint for checkpoint in alone.checkpoints if checkpoint.kind == "best_local"]
    named = [replace(best, kind=ALONE, tensors=joined({ALONE: best.tensors})) for best in bests]
    return replace(result, checkpoints=(*result.checkpoints, *named))


def _divided(state: SessionState) -> tuple[SessionState, SessionState]:
    prefix = f"{ALONE}/"
    alone = {name.removeprefix(prefix): tensor for name, tensor in state.tensors.items() if name.startswith(prefix)}
    others = {name: tensor for name, tensor in state.tensors.items() if not name.startswith(prefix)}
    meta = dict(state.meta)
    beside = meta.pop(ALONE, {})
    return SessionState(others, meta), SessionState(alone, beside)
