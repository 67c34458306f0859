"""Requests of ``handoff`` in, answers or our own errors out: the trainer's border. No torch until a request needs it.

Nothing but a ``WardroundError`` leaves, and of it only ``code``, a DECLINED name, may go further than the hospital.
"""

import logging
import os
import pwd
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_algorithms.hardware import Hardware
from site_agent.handoff import ROUND_COMMANDS
from site_agent.trainer import vault
from site_agent.trainer.data import changes, inspection
from site_agent.trainer.data.kinds import PREDICTABLE
from wardround.errors import CannotWrite, NeedsPerson, TryAgain, WardroundError
from wardround.records.trainer import TRAINING_FAILED

if TYPE_CHECKING:
    from site_agent.trainer.rounds import Rounds

PROGRESS_EVERY_S = 0.2
Request = dict[str, Any]
Reply = Callable[[Any], None]
log = logging.getLogger(__name__)


class Requests:
    """Answers one request at a time."""

    def __init__(self, state: Path, hardware: Hardware = Hardware()) -> None:
        self._state, self._hardware = state, hardware

    def answer(self, request: Request, progress: Reply) -> Any:
        """Do what ``request`` asks.

        Raises:
            WardroundError: always with a message for this hospital; for a round always with a DECLINED code.
        """
        command = str(request.get("command"))
        try:
            return self._do(command, request, progress)
        except WardroundError as error:
            error.code = _code(error, command)
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
            log.exception("`%s` failed", command)
            raise WardroundError(
                f"the trainer failed at `{command}`", hint="its log says why", code=TRAINING_FAILED
            ) from None

    def preload(self) -> None:
        """Import torch now, before the first request, and what its optimizers import with their first step."""
        self._rounds.warm_up()

    def _do(self, command: str, request: Request, progress: Reply) -> Any:
        if command in BOOKKEEPING:
            return BOOKKEEPING[command](self._state, request)
        match command:
            case "inspect":
                return asdict(_inspected({key: value for key, value in request.items() if key != "command"}))
            case "device":
                return self._rounds.device()
            case "describe":
                return self._rounds.describe(request["study"], request["site"], request.get("data", ""))
            case "check":
                return self._rounds.check(request["study"], request["site"], request["data"])
            case "digests":
                return changes.digests(self._state, request["data"])
            case "train":
                return self._rounds.train(request, _seldom(progress))
            case "validate":
                return self._rounds.validate(request)
            case "finish":
                return self._rounds.finish(request)
            case "predict":
                given = {form: Path(request[form]) for form in PREDICTABLE if request.get(form)}
                out, force = Path(request["out"]), bool(request.get("force"))
                return self._rounds.predict(request["study"], request["checkpoint"], given, out, force=force)
            case _:
                raise TryAgain(
                    f"the trainer knows no request `{command[:40]}`",
                    hint="gateway and trainer must be of the same release; start both again",
                )

    @cached_property
    def _rounds(self) -> "Rounds":
        with _installed("training and predicting need it"):
            from site_agent.trainer.rounds import Rounds
        return Rounds(self._state, self._hardware)


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


def _inspected(fields: Request) -> inspection.Inspection:
    with _installed("reading images needs it"):
        return inspection.inspect(fields)


def _commit(state: Path, request: Request) -> dict[str, Any]:
    vault.Vault(state, request["study"], request["revision"]).commit(request["round"])
    return {}


def _discard(state: Path, request: Request) -> dict[str, Any]:
    vault.Vault(state, request["study"], request["revision"]).discard(request["round"])
    return {}


def _checkpoints(state: Path, request: Request) -> dict[str, Any]:
    return vault.listing(state, request["study"])


def _export(state: Path, request: Request) -> dict[str, Any]:
    out, force = Path(request["out"]), bool(request.get("force"))
    return vault.export(state, request["study"], request["checkpoint"], out, force=force)


def _look(state: Path, request: Request) -> dict[str, Any]:
    return changes.look(state, request["data"])


# What needs neither torch nor patients, so that the listener does it itself while its worker trains.
BOOKKEEPING: dict[str, Callable[[Path, Request], Any]] = {
    "commit": _commit,
    "look": _look,
    "discard": _discard,
    "checkpoints": _checkpoints,
    "export": _export,
}


def whoami() -> dict[str, Any]:
    """The user that this process runs as."""
    uid = os.geteuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    return {"user": name, "uid": uid}


def _code(error: WardroundError, command: str) -> str:
    """The code that may cross: the error's own DECLINED code; for a round never nothing."""
    if error.code.startswith("DECLINED_"):
        return error.code
    if command not in ROUND_COMMANDS:
        return ""
    if isinstance(error, CannotWrite):
        return "DECLINED_RESOURCES"
    if error.code.startswith(("MANIFEST_", "PAYLOAD_")):
        return "DECLINED_MODEL_MISMATCH"
    return TRAINING_FAILED


def _seldom(progress: Reply) -> Callable[[int, int], None]:
    """Steps become messages, a few a second and the last."""
    last = -PROGRESS_EVERY_S

    def tell(step: int, steps: int) -> None:
        nonlocal last
        now = time.monotonic()
        if step == steps or now - last >= PROGRESS_EVERY_S:
            last = now
            progress({"step": step, "steps": steps})

    return tell
