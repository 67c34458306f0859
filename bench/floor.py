"""The floor under a round: the same bytes over bare gRPC with mutual TLS, and one weighted sum. Nothing durable.

One process serves; one process stands for all the sites, a thread each, so that on few cores the floor is not made
slower by starting more interpreters than the measured system has doing this work.
"""

import datetime
import ipaddress
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import NameOID

from bench.processes import cpu_seconds
from tools.world import free_port
from wardround.signing import certificates
from wardround.tensors.manifests import CHUNK

OPTIONS = [("grpc.max_receive_message_length", 8 << 20), ("grpc.max_send_message_length", 8 << 20)]


@dataclass(frozen=True)
class Floor:
    """A round of the floor: the median of its seconds, and the CPU seconds of both processes."""

    seconds: float
    cpu_seconds: float


def floor_round(sites: int, payload_bytes: int, rounds: int) -> Floor:
    """Every site takes ``payload_bytes`` down, then up, all at the same time, and one weighted sum is made."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        key, certificate = self_signed()
        (root / "key.pem").write_bytes(key)
        (root / "certificate.pem").write_bytes(certificate)
        port = free_port()
        line = [sys.executable, "-m", "bench.floor", str(root), str(port), str(payload_bytes), str(sites)]
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                server.stdout.readline()
                began = cpu_seconds(server.pid) + time.process_time()
                seconds = client_rounds(root, port, payload_bytes, sites, rounds)
                used = cpu_seconds(server.pid) + time.process_time() - began
                return Floor(statistics.median(seconds), used / rounds)
            finally:
                server.terminate()


def client_rounds(root: Path, port: int, payload_bytes: int, sites: int, rounds: int) -> list[float]:
    key, certificate = (root / "key.pem").read_bytes(), (root / "certificate.pem").read_bytes()
    credentials = grpc.ssl_channel_credentials(certificate, key, certificate)
    payload = values(payload_bytes)
    channels = [grpc.secure_channel(f"127.0.0.1:{port}", credentials, OPTIONS) for _ in range(sites)]
    calls = [(channel.unary_stream("/floor/Down"), channel.stream_unary("/floor/Up")) for channel in channels]

    def one(site: int) -> None:
        down, up = calls[site]
        received = sum(len(piece) for piece in down(b"", wait_for_ready=True, timeout=120))
        assert received == payload_bytes
        up(pieces(payload), timeout=120)

    seconds = []
    with ThreadPoolExecutor(sites) as pool:
        for _ in range(rounds):
            began = time.perf_counter()
            list(pool.map(one, range(sites)))
            seconds.append(time.perf_counter() - began)
    for channel in channels:
        channel.close()
    return seconds[2:]


def pieces(payload: bytes) -> Iterator[bytes]:
    view = memoryview(payload)
    return (bytes(view[offset : offset + CHUNK]) for offset in range(0, len(payload), CHUNK))


def serve(root: Path, port: int, payload_bytes: int, sites: int) -> None:
    payload = values(payload_bytes)
    received = [bytearray(payload_bytes) for _ in range(sites)]
    free = list(range(sites))
    lock = threading.Lock()
    all_in = threading.Barrier(sites)

    def down(_: bytes, __: grpc.ServicerContext) -> Iterator[bytes]:
        return pieces(payload)

    def up(stream: Iterator[bytes], _: grpc.ServicerContext) -> bytes:
        with lock:
            slot = free.pop()
        offset = 0
        for piece in stream:
            received[slot][offset : offset + len(piece)] = piece
            offset += len(piece)
        with lock:
            free.append(slot)
        if all_in.wait(120) == 0:
            weighted_sum([np.frombuffer(update, dtype="<f4") for update in received])
        return b""

    handlers: dict[str, Any] = {
        "Down": grpc.unary_stream_rpc_method_handler(down), "Up": grpc.stream_unary_rpc_method_handler(up),
    }  # fmt: skip
    server = grpc.server(ThreadPoolExecutor(2 * sites + 4), options=OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("floor", handlers),))
    pair = ((root / "key.pem").read_bytes(), (root / "certificate.pem").read_bytes())
    server.add_secure_port(f"127.0.0.1:{port}", grpc.ssl_server_credentials([pair], pair[1], True))
    server.start()
    print("ready", flush=True)
    server.wait_for_termination(600)


def values(payload_bytes: int) -> bytes:
    return np.random.default_rng(1).standard_normal(payload_bytes // 4, dtype=np.float32).tobytes()


def weighted_sum(updates: list[Any]) -> Any:
    total = np.zeros(len(updates[0]), dtype=np.float32)
    for update in updates:
        total += np.float32(0.25) * update
    return total


def self_signed() -> tuple[bytes, bytes]:
    """A key and a certificate that both ends of a loopback measurement use and trust."""
    key = certificates.new_key()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "floor")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(minutes=5))
    builder = builder.not_valid_after(now + datetime.timedelta(hours=1))
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = builder.add_extension(names, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    return certificates.key_pem(key), certificates.certificate_pem(builder.sign(key, hashes.SHA256()))


if __name__ == "__main__":
    serve(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
