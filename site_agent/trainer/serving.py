"""The worker's loop: a line in, lines out, until the other end closes. Runs in an isolated process."""

import json
import logging
import os
import socket
import sys
from io import BufferedRWPair
from pathlib import Path
from typing import Any

from fl_algorithms.hardware import Hardware
from site_agent.handoff import MAX_LINE
from site_agent.trainer.requests import Requests
from wardround.durable import StorageFailed
from wardround.errors import WardroundError

log = logging.getLogger(__name__)


def serve(descriptor: int, state: str, isolation: str, hardware: Hardware, *, warm: bool) -> None:
    """Answer what comes on the inherited socket ``descriptor``. A disk that failed ends the process."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="trainer: %(message)s")
    os.umask(0o027)
    requests = Requests(Path(state), hardware)
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rwb") as stream:
        try:
            _send(stream, {"hello": {"isolation": isolation, "pid": os.getpid()}})
            if warm:
                _preload(requests)
            while line := stream.readline(MAX_LINE):
                _answer(requests, json.loads(line), stream)
        except (BrokenPipeError, ConnectionResetError):
            return  # whoever wanted the answer is gone


def _answer(requests: Requests, request: dict[str, Any], stream: BufferedRWPair) -> None:
    try:
        result = requests.answer(request, lambda item: _send(stream, {"progress": item}))
        _send(stream, {"result": result})
    except WardroundError as error:
        said = {"message": error.message, "hint": error.hint, "exit_code": error.exit_code, "code": error.code}
        _send(stream, {"error": said})
        if isinstance(error, StorageFailed):
            raise SystemExit(error.exit_code) from None


def _preload(requests: Requests) -> None:
    try:
        requests.preload()
    except WardroundError as error:
        log.warning("%s; %s", error.message, error.hint)  # each request will say so too


def _send(stream: BufferedRWPair, item: Any) -> None:
    stream.write(json.dumps(item, separators=(",", ":")).encode() + b"\n")
    stream.flush()
