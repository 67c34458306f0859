"""A coordinator in the test's own process for the attacks on it, and what its attackers have in common."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from tests.coordinator.conftest import Place
from tests.coordinator.fake_site import FakeSite
from wardround import rpc
from wardround.records.invitation import Invitation
from wardround.signing import certificates


@contextmanager
def placed(folder: Path) -> Iterator[Place]:
    """A coordinator on loopback with nobody in it yet."""
    place = Place(folder)
    try:
        yield place
    finally:
        place.close()


def open_channel(place: Place, pems: tuple[bytes, bytes, bytes], address: str = "") -> grpc.Channel:
    """A connection of its own with these credentials: authority, certificate, key. ``address``: of a line to it."""
    authority, certificate, key = pems
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    return grpc.secure_channel(
        address or place.address, credentials, [*rpc.CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    )


def own_pems(site: FakeSite) -> tuple[bytes, bytes, bytes]:
    return site.reply.authority, site.reply.certificate, certificates.key_pem(site.key)


def bootstrap_pems(text: str) -> tuple[bytes, bytes, bytes]:
    invitation = Invitation.decode(text)
    return invitation.authority.encode(), invitation.certificate.encode(), invitation.key.encode()


class Hung:
    """Calls whose first message never comes, over as many connections as that takes."""

    def __init__(self, place: Place, pems: tuple[bytes, bytes, bytes], method: str, count: int) -> None:
        self._release = threading.Event()
        self._channels = [open_channel(place, pems) for _ in range(-(-count // 30))]
        self.calls = [
            self._channels[number // 30].stream_stream(f"/wardround.v1.{method}")(self._never())
            for number in range(count)
        ]

    def _never(self) -> Iterator[bytes]:
        self._release.wait(120)
        yield from ()

    def codes(self) -> list[grpc.StatusCode]:
        """How each ended; waits for all."""
        return [call.code() for call in self.calls]

    def close(self) -> None:
        self._release.set()
        for call in self.calls:
            call.cancel()
        for channel in self._channels:
            channel.close()
