"""One question to the trainer, asked again where its worker or its listener ended under it."""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from site_agent.gateway.connection.backoff import backoff
from site_agent.gateway.connection.interrupt import Interrupt
from site_agent.handoff import Trainer
from wardround.errors import NeedsPerson, TryAgain, Unavailable
from wardround.local import traces
from wardround.records import trainer as records

Answer = TypeVar("Answer", bound=records.Answer)
TRAINER_TRIES = 8  # some 40 s of waiting in all: a listener is started again in less
LOOK_S = 0.25  # between two looks whether a listener is there
log = logging.getLogger(__name__)


def ask(
    trainer: Trainer,
    request: records.Request[Answer],
    interrupt: Interrupt,
    progress: Callable[[records.Progress], None] | None = None,
) -> Answer:
    """Ask the trainer; again where its worker or its listener ended under the request. A deadline that passes
    meanwhile calls the round off.

    Raises:
        Interrupted: called off; the trainer may still be at it.
        NeedsPerson: the trainer cannot be reached. That is its failure, not the coordinator's.
        WardroundError: what it said.
    """
    for tries, wait_s in enumerate(backoff(0.5), 1):
        interrupt.check()
        try:
            with traces.step(request.command):
                return trainer.ask(request, progress, ending=interrupt.ending)
        except Unavailable as error:
            interrupt.check()  # it was hung up from here
            if tries >= TRAINER_TRIES:
                raise NeedsPerson(
                    f"the trainer does not answer: {error.message}",
                    hint="`site-agent status`; is `site-agent run --only trainer` running?",
                    code=records.TRAINING_FAILED,
                ) from None
            why = error.message
        except TryAgain as error:
            interrupt.check()
            if tries >= TRAINER_TRIES or error.code != records.TRAINING_FAILED:
                raise
            why = error.message
        log.warning("%s; the trainer is asked to %s again in %.1f s", why, request.command, wait_s)
        _wait(trainer, wait_s, interrupt)
    raise AssertionError("backoff never ends")


def _wait(trainer: Trainer, seconds: float, interrupt: Interrupt) -> None:
    """Wait; where no listener is there, only until one is."""
    until, absent = time.monotonic() + seconds, not trainer.available()
    while (left := until - time.monotonic()) > 0:
        interrupt.wait(min(left, LOOK_S))
        if absent and trainer.available():
            return
