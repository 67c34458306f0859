"""Whoever can reach the coordinator's port, with or without a certificate."""

import socket
import ssl
from pathlib import Path

import pytest

from tests.attacks.places import bootstrap_pems, placed
from wardround import rpc


@pytest.mark.attack(promise="P11", refused_by="proto/wardround/rpc.py")
def test_hung_first_messages__before_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that says nothing, stops in the handshake, or shakes hands and calls nothing, is closed."""
    quick = {"grpc.server_handshake_timeout_ms": 1000, "grpc.max_connection_idle_ms": 1000}
    assert {name: dict(rpc.SERVER_OPTIONS)[name] for name in quick} == {
        "grpc.server_handshake_timeout_ms": 10_000, "grpc.max_connection_idle_ms": 300_000,
    }  # fmt: skip
    monkeypatch.setattr(rpc, "SERVER_OPTIONS", [*({**dict(rpc.SERVER_OPTIONS), **quick}).items()])
    with placed(tmp_path) as place:
        host, port = place.address.split(":")
        authority, certificate, key = bootstrap_pems(place.invite("alpha"))
        for name, pem in (("certificate.pem", certificate), ("key.pem", key)):
            (tmp_path / name).write_bytes(pem)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=authority.decode())
        context.load_cert_chain(tmp_path / "certificate.pem", tmp_path / "key.pem")
        context.set_alpn_protocols(["h2"])
        silent, half, preface, idle = (socket.create_connection((host, int(port)), timeout=20) for _ in range(4))
        half.sendall(b"\x16\x03\x01\x02\x00\x01")
        secure = context.wrap_socket(preface, server_hostname=host)
        speaking = context.wrap_socket(idle, server_hostname=host)
        speaking.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
        for connection in (silent, half, secure, speaking):
            with connection:
                assert closed(connection)


def closed(connection: socket.socket) -> bool:
    """Whether the other side ends it; it may say something before."""
    try:
        while connection.recv(4096):
            pass
    except (ConnectionResetError, ssl.SSLError):
        pass
    except TimeoutError:
        return False
    return True
