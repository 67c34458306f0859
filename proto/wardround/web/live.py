"""A number that grows with each change of what the pages show, and the browsers that wait for the next one."""

import asyncio
import threading


class Live:
    """Told by any thread, waited for by the server's event loop."""

    def __init__(self) -> None:
        self.version = 1
        self.ended = False
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()

    def begin(self) -> None:
        """From the event loop that serves."""
        self._loop = asyncio.get_running_loop()

    def tell(self) -> None:
        """Something is not as it was."""
        with self._lock:
            self.version += 1
        self._wake()

    def end(self) -> None:
        """The server goes down: nobody waits any more."""
        self.ended = True
        self._wake()

    async def beyond(self, version: int, timeout_s: float) -> bool:
        """Whether there is a later version, or the end, at the latest after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.version <= version and not self.ended:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def until_ended(self, timeout_s: float) -> None:
        """Rest for ``timeout_s``, and no longer than the server serves."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.ended:
                    await self._changed.wait()
        except TimeoutError:
            return

    def _wake(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
