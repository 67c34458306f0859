"""A line of a known speed between a site and the coordinator: what is sent to it arrives slowly, in order and whole."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PIECE = 2048
BUFFER = 8192  # of the kernel's, so that what waits there does not count as delivered


@contextmanager
def shaped(address: str, *, up: float) -> Iterator[str]:
    """The address of a line to ``address`` that delivers ``up`` bytes a second to it, and at full speed from it."""
    host, _, port = address.rpartition(":")
    ended = threading.Event()
    sockets: list[socket.socket] = []

    def pump(source: socket.socket, target: socket.socket, rate: float | None) -> None:
        due = time.monotonic()
        with suppress(OSError):  # either side has gone
            while data := source.recv(PIECE):
                if rate is not None:
                    due = max(due, time.monotonic()) + len(data) / rate
                    if ended.wait(due - time.monotonic()):
                        break
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        while not ended.is_set():
            try:
                near, _ = listener.accept()
            except OSError:
                return  # closed
            far = socket.create_connection((host, int(port)))
            sockets.extend((near, far))
            for source, target, rate in ((near, far, up), (far, near, None)):
                thread = threading.Thread(target=pump, args=(source, target, rate))
                threads.append(thread)
                thread.start()

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    threads = [threading.Thread(target=accept)]
    threads[0].start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        ended.set()
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for end in sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(20)
        for end in sockets:
            end.close()
