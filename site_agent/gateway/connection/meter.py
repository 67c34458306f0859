"""How much is sent beside the updates' payloads: every message of every call, counted as it is handed to gRPC.

A message counts with its serialized size, less the tensor bytes in it: those are in the ledger's `upload` line. So the
`control` and `upload` records together account for every byte of every message.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from google.protobuf.message import Message

from wardround.records.ledger.entries import MethodBytes


class Meter:
    """Counts by method: calls, messages and bytes since the last record. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[str, list[int]] = {}

    def call(self, method: str) -> None:
        """A call begins."""
        with self._lock:
            self._row(method)[0] += 1

    def message(self, method: str, message: Message) -> None:
        """A message goes out."""
        self.sent(method, message.ByteSize())

    def sent(self, method: str, size: int, payload: int = 0) -> None:
        """A message of ``size`` bytes goes out; ``payload`` of them are an update's tensors."""
        with self._lock:
            row = self._row(method)
            row[1] += 1
            row[2] += size - payload

    @contextmanager
    def taken(self) -> Iterator[list[MethodBytes]]:
        """What was counted since the last time, to be recorded in the block; it stays counted if the block raises."""
        with self._lock:
            rows, self._rows = self._rows, {}
        try:
            yield [
                MethodBytes(method=method, count=calls, messages=messages, bytes=size)
                for method, (calls, messages, size) in sorted(rows.items())
            ]
        except BaseException:
            with self._lock:
                for method, counted in rows.items():
                    row = self._row(method)
                    row[:] = [before + more for before, more in zip(row, counted, strict=True)]
            raise

    def _row(self, method: str) -> list[int]:
        return self._rows.setdefault(method, [0, 0, 0])
