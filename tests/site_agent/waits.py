"""An interrupt for tests of what is tried again and again."""

from site_agent.gateway.connection.interrupt import Interrupt, Interrupted


class Waits(Interrupt):
    """It waits for nothing, and knows how long it would have waited; after ``most`` waits it is called off."""

    def __init__(self, most: int = 10) -> None:
        super().__init__()
        self.asked: list[float] = []
        self._most = most

    def wait(self, seconds: float) -> None:
        self.asked.append(seconds)
        if len(self.asked) > self._most:
            raise Interrupted
