"""The worker's loop: a line in, lines out, until the other end closes. Runs in an isolated process."""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedRWPair
from pathlib import Path

from fl_algorithms.engine.hardware import Hardware
from site_agent.trainer.isolation.kernel import InForce
from site_agent.trainer.requests import Requests
from wardround.errors import WardroundError
from wardround.local import frames
from wardround.local.durable import StorageFailed
from wardround.local.liveness import BEAT_S
from wardround.local.logs import log_to_stderr
from wardround.records.trainer import Alive, Answer, Failure, Hello, Progress, reply_document, request_from

log = logging.getLogger(__name__)


def serve(descriptor: int, state: str, in_force: InForce, hardware: Hardware, *, warm: bool) -> None:
    """Answer each request on the inherited socket ``descriptor``. A disk that failed ends the process."""
    log_to_stderr("trainer")
    os.umask(0o027)
    requests = Requests(Path(state), hardware)
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rwb") as stream:
        replies = Replies(stream)
        try:
            replies.send(Hello.model_validate({"isolation": in_force.kind, "missing": list(in_force.missing)}))
            with replies.beating():
                if warm:
                    _preload(requests)
            while line := stream.readline(frames.MAX_LINE):
                with replies.beating():
                    _answer(requests, line, replies)
        except (BrokenPipeError, ConnectionResetError):
            return  # whoever wanted the answer is gone


class Replies:
    """What is sent to whoever asked, by the thread that answers and by one that says that this process is alive."""

    def __init__(self, stream: BufferedRWPair) -> None:
        self._stream = stream
        self._turn = threading.Lock()
        self._busy = False
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def send(self, reply: Hello | Alive | Progress | Answer | Failure) -> None:
        with self._turn:
            self._stream.write(json.dumps(reply_document(reply), separators=(",", ":")).encode() + b"\n")
            self._stream.flush()

    @contextmanager
    def beating(self) -> Iterator[None]:
        """While the block lasts, say every few seconds that this process is neither stopped nor hung."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _beat(self) -> None:
        """Runs until this process ends."""
        while True:
            time.sleep(BEAT_S)
            try:
                if self._busy:
                    self.send(Alive())
            except OSError:
                return  # whoever asked is gone, as the other thread will find


def _answer(requests: Requests, line: bytes, replies: Replies) -> None:
    try:
        request = request_from(frames.request_from(line))
        replies.send(requests.answer(request, replies.send))
    except WardroundError as error:
        replies.send(Failure.of(error))
        if isinstance(error, StorageFailed):
            raise SystemExit(error.exit_code) from None


def _preload(requests: Requests) -> None:
    try:
        requests.preload()
    except WardroundError as error:
        log.warning("%s; %s", error.message, error.hint)  # each request will say so too
