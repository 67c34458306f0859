"""The worker's loop: a line in, lines out, until the other end closes. Runs in an isolated process."""

import json
import logging
import os
import socket
from io import BufferedRWPair
from pathlib import Path
from typing import Any

from fl_algorithms.hardware import Hardware
from site_agent.handoff import MAX_LINE
from site_agent.trainer.isolation.kernel import InForce
from site_agent.trainer.requests import Requests
from wardround.errors import WardroundError
from wardround.local.durable import StorageFailed
from wardround.records import trainer
from wardround.terminal import log_to_stderr

log = logging.getLogger(__name__)


def serve(descriptor: int, state: str, in_force: InForce, hardware: Hardware, *, warm: bool) -> None:
    """Answer what comes on the inherited socket ``descriptor``. A disk that failed ends the process."""
    log_to_stderr("trainer: %(message)s")
    os.umask(0o027)
    requests = Requests(Path(state), hardware)
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rwb") as stream:
        try:
            _send(
                stream, {"hello": {"isolation": in_force.kind, "missing": list(in_force.missing), "pid": os.getpid()}}
            )
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
        _send(stream, {"error": trainer.said(error)})
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
