"""A request in, its answer or an error of ours out: the trainer's border. No torch or numpy until one needs it.

Nothing but a ``WardroundError`` leaves, and of it only ``code``, a DECLINED name, may go further than the hospital.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from fl_algorithms.engine.hardware import Hardware
from site_agent.handoff import ROUND_REQUESTS, OnProgress
from site_agent.trainer.data import changes
from site_agent.trainer.vault import models
from site_agent.trainer.vault.states import Vault
from wardround.errors import CannotWrite, NeedsPerson, TryAgain, WardroundError
from wardround.records import trainer as records
from wardround.records.trainer import TRAINING_FAILED, Answer, AnyRequest

if TYPE_CHECKING:
    from site_agent.trainer.rounds.training import Rounds

PROGRESS_EVERY_S = 0.2
# What needs neither torch nor patients, so that the listener does it itself while its worker trains.
BOOKKEEPING = (records.Commit, records.Discard, records.StatFiles, records.ListCheckpoints, records.Export)
Bookkeeping = records.Commit | records.Discard | records.StatFiles | records.ListCheckpoints | records.Export
log = logging.getLogger(__name__)


class Requests:
    """Answers one request at a time."""

    def __init__(self, state: Path, hardware: Hardware = Hardware()) -> None:
        self._state, self._hardware = state, hardware

    def answer(self, request: AnyRequest, progress: OnProgress) -> Answer:
        """Do what ``request`` asks.

        Raises:
            WardroundError: always with a message for this hospital; for a round always with a DECLINED code.
        """
        try:
            return self._do(request, progress)
        except WardroundError as error:
            error.code = _code(error, request)
            raise
        except MemoryError:
            log.exception("out of memory")
            raise TryAgain(
                "there is not enough memory for this",
                hint="end other programs, or give this one more",
                code="DECLINED_RESOURCES",
            ) from None
        except Exception:
            # What a library says may hold a patient's value: it stays in this log.
            log.exception("`%s` failed", request.command)
            raise WardroundError(
                f"the trainer failed at `{request.command}`", hint="its log says why", code=TRAINING_FAILED
            ) from None

    def preload(self) -> None:
        """Import torch now, before the first request, and what its optimizers import with their first step."""
        self._rounds.warm_up()

    def _do(self, request: AnyRequest, progress: OnProgress) -> Answer:
        match request:
            case records.Inspect():
                with _installed("reading images needs it"):
                    from site_agent.trainer.data import inspection

                    return inspection.inspect(request.files, _throttled(progress))
            case records.HashFiles():
                return changes.hash_files(self._state, request.data)
            case records.GetDevice():
                return self._rounds.device()
            case records.Describe():
                return self._rounds.describe(request)
            case records.Check():
                return self._rounds.check(request)
            case records.Examine():
                return self._rounds.examine(request)
            case records.Summarize():
                from site_agent.trainer.data import summaries

                return summaries.summarized(self._state, request)
            case records.DraftSummaryMapping():
                from site_agent.trainer.data import drafting

                return drafting.for_request(self._state, request)
            case records.DraftMapping():
                return self._rounds.draft_mapping(request)
            case records.Train():
                return self._rounds.train(request, _throttled(progress))
            case records.Validate():
                return self._rounds.validate(request)
            case records.Finish():
                self._rounds.finish(request)
                return records.Done()
            case records.Predict():
                return self._rounds.predict(request, _throttled(progress))
            case records.WriteProgram():
                return self._rounds.write_program(request)
            case records.GetStatus() | records.Abort():
                raise TryAgain(f"`{request.command}` is for the trainer's listener", hint="is it running?")
            case _:
                return keep_books(self._state, request)

    @cached_property
    def _rounds(self) -> "Rounds":
        with _installed("training and predicting need it"):
            from site_agent.trainer.rounds.training import Rounds
        return Rounds(self._state, self._hardware)


def keep_books(state: Path, request: Bookkeeping) -> Answer:
    """Do what needs neither torch nor patients.

    Raises:
        WardroundError: as the vault and ``changes`` do.
    """
    match request:
        case records.Commit():
            Vault(state, request.study, request.revision).commit(request.round)
            return records.Done()
        case records.Discard():
            Vault(state, request.study, request.revision).discard(request.round)
            return records.Done()
        case records.StatFiles():
            return changes.stat_files(state, request.data)
        case records.ListCheckpoints():
            return models.listing(state, request.study)
        case records.Export():
            return models.export(state, request.study, request.checkpoint, Path(request.out), force=request.force)


@contextmanager
def _installed(why: str) -> Iterator[None]:
    """Say what to install where an import fails, and ``why``."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "torchvision", "sklearn", "PIL"):
            raise
        raise NeedsPerson(
            f"{error.name} is not installed here, and {why}",
            hint="pip install 'wardround[site]'",
            code="DECLINED_RESOURCES",
        ) from None


def _code(error: WardroundError, request: AnyRequest) -> str:
    """The code that may cross: the error's own DECLINED code; for a round never nothing."""
    if error.code.startswith("DECLINED_"):
        return error.code
    if not isinstance(request, ROUND_REQUESTS):
        return ""
    if isinstance(error, CannotWrite):
        return "DECLINED_RESOURCES"
    if error.code.startswith(("MANIFEST_", "PAYLOAD_")):
        return "DECLINED_MODEL_MISMATCH"
    return TRAINING_FAILED


def _throttled(progress: OnProgress) -> Callable[[int, int], None]:
    """Steps become messages, a few a second and the last."""
    last = -PROGRESS_EVERY_S

    def tell(step: int, steps: int) -> None:
        nonlocal last
        now = time.monotonic()
        if step == steps or now - last >= PROGRESS_EVERY_S:
            last = now
            progress(records.Progress(step=step, steps=steps))

    return tell
