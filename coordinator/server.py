"""``coordinator serve``: the gRPC server, its certificate, the commands' socket, and a clean end."""

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from cryptography import x509

from coordinator.administration import Operations, Parts
from coordinator.calls import DEFAULT, MAX_BOOTSTRAP_CALLS, MAX_CALLS, Bounds, Calls, handlers
from coordinator.members.enrolment import Authority
from coordinator.servicers import EnrolmentServicer, FederationServicer, Guard
from coordinator.state_directory import State, split_address
from coordinator.studies.streams import TwoLines
from coordinator.updates.decide import Uploads
from wardround import rpc
from wardround.cli import say_error
from wardround.errors import Unavailable, WardroundError
from wardround.local import memory
from wardround.local.control import ControlServer
from wardround.local.durable import StateLock
from wardround.local.event import Latch, set_by_signals
from wardround.signing import certificates
from wardround.terminal import log_to_stderr

MAX_SITES = 256  # as many as a study can list
WORKERS = MAX_SITES * MAX_CALLS + MAX_BOOTSTRAP_CALLS  # threads, each made when it is first needed
SPARE_WORKERS = 4  # judge a peer and end its call, where all others wait for theirs
GRACE_S = 5
log = logging.getLogger(__name__)


class ServerIdentity:
    """The coordinator's own certificate: a key that is never on disk, made anew at half of its life."""

    def __init__(self, authority: Authority, host: str, clock: Callable[[], float]) -> None:
        self._authority = authority
        self._host = host
        self._clock = clock
        self._lock = threading.Lock()
        self._certificate: x509.Certificate | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Every client shows a certificate of our authority; new connections get the newest of ours."""
        first = self.renewed()
        assert first is not None
        fetch: Any = self._fetch  # may return None for "no change", which the stubs do not say
        return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=True)

    def renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """A new certificate if there is none or it is past half of its life; None while it is good."""
        with self._lock:
            now = self._clock()
            if self._certificate is not None:
                begins = self._certificate.not_valid_before_utc.timestamp()
                ends = self._certificate.not_valid_after_utc.timestamp()
                if now < (begins + ends) / 2:
                    return None
            key = certificates.new_key()
            self._certificate = self._authority.server(self._host, key.public_key(), now)
            chain = certificates.certificate_pem(self._certificate)
        return grpc.ssl_server_certificate_configuration([(certificates.key_pem(key), chain)], self._authority.pem)

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        try:
            return self.renewed()
        except Exception:
            log.exception("the server's certificate could not be renewed; the old one stays")  # gRPC would say nothing
            return None


class Coordinator:
    """A running coordinator. The caller holds the state directory's lock."""

    def __init__(
        self,
        state: State,
        *,
        fatal: Callable[[BaseException], None],
        listen: str = "",
        bounds: Bounds = DEFAULT,
        clock: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        """``listen`` is HOST:PORT where it is not the address that the sites dial."""
        self._fatal = fatal
        self.parts = Parts(state, clock=clock, ticks=ticks, fatal=fatal)
        parts = self.parts
        self.listen = listen or parts.config.address
        self.engine = parts.engine
        self.calls = Calls(parts.standing, bounds)
        federation = parts.config.federation
        self.uploads = Uploads(parts.engine, parts.store, parts.blobs, federation, parts.receipt_key, wall_clock=clock)
        guard = Guard(parts.standing, parts.enrolment, self.calls, fatal)
        parts.enrolment.on_two_lines = self._tell_two_lines
        receipt_key = parts.receipt_key.public_key().public_bytes_raw()
        self._pool = ThreadPoolExecutor(WORKERS + SPARE_WORKERS, thread_name_prefix="call")
        self._server = grpc.server(self._pool, options=rpc.SERVER_OPTIONS, maximum_concurrent_rpcs=WORKERS)
        enrolment = EnrolmentServicer(guard, parts.enrolment, parts.authority.pem, receipt_key)
        studies = FederationServicer(guard, parts.engine, self.uploads, parts.store, parts.blobs)
        self._server.add_generic_rpc_handlers(
            (handlers("wardround.v1.Enrolment", enrolment), handlers("wardround.v1.Federation", studies))
        )
        self.operations = Operations(parts, after_revoke=self._after_revoke, judging=self.uploads.receptions.judging)
        self._control: ControlServer | None = None

    def start(self) -> None:
        """Listen and serve.

        Raises:
            Unavailable: the address cannot be listened at.
        """
        host, _ = split_address(self.parts.config.address)
        credentials = ServerIdentity(self.parts.authority, host, self.parts.clock).credentials()
        try:
            port = self._server.add_secure_port(self.listen, credentials)
        except RuntimeError:
            port = 0
        if port == 0:
            self.parts.close()
            raise Unavailable(
                f"cannot listen at {self.listen}: it is in use, or not an address of this machine",
                hint="stop what listens there, or give `serve --listen HOST:PORT`",
            )
        self.engine.start()
        self._server.start()
        self._control = ControlServer(self.parts.state.control, self.operations.run, fatal=self._fatal)

    def stop(self) -> None:
        """Say goodbye to the sites, let the calls under way end, make what came durable, and end."""
        self.engine.say_goodbye()
        self._server.stop(GRACE_S).wait()
        if self._control is not None:
            self._control.close()
        self.engine.stop()
        self._pool.shutdown()
        self.calls.close()
        self.parts.close()

    def _tell_two_lines(self, site: str) -> None:
        since = self.parts.standing.two_lines_since(site)
        if since is not None:
            self.engine.tell(site, TwoLines(since))

    def _after_revoke(self, site: str) -> None:
        self.calls.end_unfit()
        self.uploads.drop_undecided(site)


def serve(state: State, listen: str, bounds: Bounds = DEFAULT) -> None:
    """Serve until SIGTERM or SIGINT. Prints ``ready HOST:PORT`` on stdout."""
    memory.hide()
    log_to_stderr()
    logging.getLogger("alembic").setLevel(logging.WARNING)
    state.config()
    with set_by_signals(Latch()) as ended, StateLock(state.root, "coordinator serve"):
        coordinator = Coordinator(state, fatal=end_now, listen=listen, bounds=bounds)
        coordinator.start()
        print(f"ready {coordinator.listen}", flush=True)
        ended.wait()
        coordinator.stop()


def end_now(error: BaseException) -> None:
    """End the process at once: what is durable is there at the next start, and nothing else may be promised."""
    if isinstance(error, WardroundError):
        say_error(error)
        os._exit(error.exit_code)
    log.critical("the coordinator failed", exc_info=error)
    os._exit(WardroundError.exit_code)
