"""The worker's loop: a line in, lines out, until the other end closes. Runs in an isolated process."""

import json
import logging
import os
import socket
from io import BufferedRWPair
from pathlib import Path

from fl_algorithms.engine.hardware import Hardware
from site_agent.trainer.isolation.kernel import InForce
from site_agent.trainer.requests import Requests
from wardround.errors import WardroundError
from wardround.local import frames
from wardround.local.durable import StorageFailed
from wardround.local.logs import log_to_stderr
from wardround.records.trainer import Answer, Failure, Hello, Progress, reply_document, request_from

log = logging.getLogger(__name__)


def serve(descriptor: int, state: str, in_force: InForce, hardware: Hardware, *, warm: bool) -> None:
    """Answer each request on the inherited socket ``descriptor``. A disk that failed ends the process."""
    log_to_stderr("trainer: %(message)s")
    os.umask(0o027)
    requests = Requests(Path(state), hardware)
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rwb") as stream:
        try:
            hello = Hello.model_validate({"isolation": in_force.kind, "missing": list(in_force.missing)})
            _send(stream, hello)
            if warm:
                _preload(requests)
            while line := stream.readline(frames.MAX_LINE):
                _answer(requests, line, stream)
        except (BrokenPipeError, ConnectionResetError):
            return  # whoever wanted the answer is gone


def _answer(requests: Requests, line: bytes, stream: BufferedRWPair) -> None:
    try:
        request = request_from(frames.request_from(line))
        answer = requests.answer(request, lambda step: _send(stream, step))
        _send(stream, answer)
    except WardroundError as error:
        _send(stream, Failure.of(error))
        if isinstance(error, StorageFailed):
            raise SystemExit(error.exit_code) from None


def _preload(requests: Requests) -> None:
    try:
        requests.preload()
    except WardroundError as error:
        log.warning("%s; %s", error.message, error.hint)  # each request will say so too


def _send(stream: BufferedRWPair, reply: Hello | Progress | Answer | Failure) -> None:
    stream.write(json.dumps(reply_document(reply), separators=(",", ":")).encode() + b"\n")
    stream.flush()
