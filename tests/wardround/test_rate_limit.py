"""What a peer can make a library log is bounded."""

import logging
import os
import subprocess
import sys
from typing import Any

import pytest
from grpc import _common

from wardround.local.rate_limit import BURST, LimitedLibrary
from wardround.terminal import OneLine
from wardround.v1 import federation_pb2 as pb


class Kept(logging.Handler):
    """A handler that keeps the lines that it would write."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(OneLine("%(message)s"))
        self.addFilter(LimitedLibrary("grpc", lambda: 0.0))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def kept() -> Any:
    handler = Kept()
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


def test_messages_that_cannot_be_decoded_leave_a_bounded_number_of_short_lines(kept: Kept) -> None:
    """Each left a traceback of some 400 bytes."""
    for _ in range(1000):
        assert _common.deserialize(b"\xff\xff", pb.StudiesReply.FromString) is None
    assert kept.lines == ["Exception deserializing message! (DecodeError)"] * BURST


def test_what_our_own_programs_log_passes_whole(kept: Kept) -> None:
    for number in range(2 * BURST):
        logging.getLogger("coordinator.test").warning("number %d of %s", number, "100 %")
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("coordinator.test").exception("it failed")
    assert kept.lines[2 * BURST - 1] == f"number {2 * BURST - 1} of 100 %"
    assert "ValueError: why" in kept.lines[-1]


def test_a_librarys_line_keeps_its_arguments(kept: Kept) -> None:
    try:
        raise ValueError
    except ValueError:
        logging.getLogger("grpc._server").exception("at %d %%", 7)
    assert kept.lines == ["at 7 % (ValueError)"]


def test_failed_handshakes_of_strangers_leave_no_line() -> None:
    """gRPC's core wrote some 200 bytes for each, past every log of ours."""
    look = "import os, wardround; print(os.environ['GRPC_VERBOSITY'])"
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    said = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True, env=environment)
    assert said.stdout == "ERROR\n"
