"""The running service: the gRPC server, its TLS certificate, the socket for commands, and a clean shutdown."""

import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
from cryptography import x509

from coordinator import standby
from coordinator.administration import Administration
from coordinator.authenticator import Authenticator
from coordinator.calls import DEFAULT, MAX_BOOTSTRAP_CALLS, MAX_CALLS, Bounds, Calls, handlers
from coordinator.connections import Connections, room
from coordinator.context import Context, leading_store
from coordinator.members.authority import DAY_S, Authority, Lifetimes, Signing
from coordinator.monitoring import families
from coordinator.reading import Readers, questions_alone
from coordinator.servicers import EnrolmentServicer, FederationServicer, SummariesServicer
from coordinator.servicers_secure import SecureServicer
from coordinator.state_directory import State, split_address
from coordinator.storage.database import Store
from coordinator.updates.decide import Uploads
from wardround import rpc
from wardround.cli import say_error
from wardround.errors import Unavailable, WardroundError
from wardround.local import memory
from wardround.local.control import ControlServer
from wardround.local.durable import StateLock
from wardround.local.event import Latch, set_by_signals
from wardround.local.logs import log_to_stderr
from wardround.records.event import CertificateFork
from wardround.records.invitation import stamp
from wardround.signing import certificates
from wardround.web.monitoring import monitored
from wardround.web.tracing import traced

MAX_SITES = 256  # as many as a study can list
WORKERS = MAX_SITES * MAX_CALLS + MAX_BOOTSTRAP_CALLS  # threads, each made when it is first needed
SPARE_WORKERS = 4  # refuse calls while all the others are taken
GRACE_S = 5
ARENAS = 2  # for malloc; with eight sites that send a ResNet-18 the peak is a fifth lower, at no more CPU
WARN_S = 60 * DAY_S  # before the end of what signs
log = logging.getLogger(__name__)


class ServerIdentity:
    """The coordinator's own TLS certificate. Its key is never on disk; both are made anew at half of their life, and
    when the authority's files changed. Connections that are open stay so."""

    def __init__(
        self, authority: Authority, host: str, wall_clock: Callable[[], float], life_s: float = Lifetimes().life_s
    ) -> None:
        self._authority = authority
        self._host = host
        self._wall_clock = wall_clock
        self._life_s = life_s
        self._lock = threading.Lock()
        self._certificate: x509.Certificate | None = None
        self._signing: Signing | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Every client must show a certificate of our authority; new connections get our newest certificate."""
        first = self.renewed()
        assert first is not None
        fetch: Any = self._fetch  # may return None for "no change", which the stubs do not say
        return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=True)

    def renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """A new certificate if there is none, or it is past half of its life, or the authority is another; None while
        the present one stays."""
        with self._lock:
            now, signing = self._wall_clock(), self._authority.signing
            if self._certificate is not None and signing is self._signing:
                begins = self._certificate.not_valid_before_utc.timestamp()
                ends = self._certificate.not_valid_after_utc.timestamp()
                if now < (begins + ends) / 2:
                    return None
            key = certificates.new_key()
            self._certificate = self._authority.server(self._host, key.public_key(), now, self._life_s)
            self._signing, chain = signing, self._authority.chained(self._certificate)
            if signing.certificate.not_valid_after_utc.timestamp() < now + WARN_S:
                log.warning(
                    "the certificate that signs the sites' certificates ends on %s: `coordinator authority request`",
                    stamp(signing.certificate.not_valid_after_utc),
                )
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
        readers: Readers | None = None,
        wall_clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        store: Store | None = None,
    ) -> None:
        """
        Args:
            listen: HOST:PORT, where it is not the address that the sites connect to.
            store: its database, if this process leads on it already.
        """
        self._fatal = fatal
        self._readers = readers or Readers(state.read)
        context = self.context = Context(
            state, wall_clock=wall_clock, monotonic=monotonic, fatal=fatal, store=store or leading_store(state, fatal)
        )
        self.listen = listen or context.config.address
        self.engine = context.engine
        self.calls = Calls(context.certificate_status, bounds)
        self.uploads = Uploads(
            context.engine, context.store, context.blobs, context.config.federation, context.receipt_key,
            wall_clock=wall_clock,
        )  # fmt: skip
        self.administration = Administration(
            context, after_revoke=self._after_revoke, undecided=self.uploads.receptions.judging
        )
        context.engine.arriving = self.uploads.receptions.arriving
        context.enrolment.on_certificate_fork = self._warn_of_certificate_fork
        self._pool = ThreadPoolExecutor(WORKERS + SPARE_WORKERS, thread_name_prefix="call")
        self._room = room()
        options = [*rpc.SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", self._room.connections)]
        self._server = grpc.server(self._pool, options=options, maximum_concurrent_rpcs=WORKERS)
        self._add_servicers()
        self._control: list[ControlServer] = []
        self._connections: Connections | None = None

    def start(self) -> None:
        """Begin to serve calls and commands.

        Raises:
            Unavailable: it cannot listen at its address.
        """
        host, _ = split_address(self.context.config.address)
        context, life_s = self.context, self.context.config.certificates.life_s
        credentials = ServerIdentity(context.authority, host, context.wall_clock, life_s).credentials()
        try:
            port = self._server.add_secure_port(self.listen, credentials)
        except RuntimeError:
            port = 0
        if port == 0:
            self.context.close()
            raise Unavailable(
                f"cannot listen at {self.listen}: it is in use, or not an address of this machine",
                hint="stop what listens there, or give `serve --listen HOST:PORT`",
            )
        self.engine.start()
        self._server.start()
        self._connections = Connections(port, self.calls.peers, self._room)
        commands, readers = self.administration.run, self._readers
        self._control.append(ControlServer(self.context.state.control, commands, fatal=self._fatal))
        self._control.append(
            ControlServer(
                readers.socket, questions_alone(commands), fatal=self._fatal, users=readers.users, mode=readers.mode
            )
        )

    def stop(self) -> None:
        """Say goodbye to the sites, let the calls under way end, make durable what has arrived, and end."""
        self.engine.say_goodbye()
        self._server.stop(GRACE_S).wait()
        if self._connections is not None:
            self._connections.close()
        for socket in self._control:
            socket.close()
        self.engine.stop()
        self._pool.shutdown()
        self.calls.close()
        self.context.close()

    def is_ready(self) -> bool:
        """Whether the thread of the studies and the database answer."""
        try:
            self.administration.studies.listed(archived=False)
            self.administration.sites()
        except WardroundError:
            return False
        return True

    def _add_servicers(self) -> None:
        context = self.context
        authenticator = Authenticator(context.certificate_status, context.enrolment, self.calls, self._fatal)
        receipt_key = context.receipt_key.public_key().public_bytes_raw()
        enrolment = EnrolmentServicer(authenticator, context.enrolment, context.authority, receipt_key)
        federation = FederationServicer(
            authenticator, context.engine, self.uploads, context.store, context.blobs, context.instances
        )
        self._server.add_generic_rpc_handlers((
            handlers("wardround.v1.Enrolment", enrolment), handlers("wardround.v1.Federation", federation),
            handlers("wardround.v1.Summaries", SummariesServicer(authenticator, context.store)),
            handlers(
                "wardround.v1.SecureAggregation",
                SecureServicer(authenticator, context.engine, context.store, context.blobs),
            ),
        ))  # fmt: skip

    def _warn_of_certificate_fork(self, site: str) -> None:
        since = self.context.certificate_status.certificate_fork_since(site)
        if since is not None:
            self.engine.tell(site, CertificateFork(since))

    def _after_revoke(self, site: str) -> None:
        self.calls.cancel_invalid()
        self.uploads.drop_undecided(site)


def serve(
    state: State, listen: str, bounds: Bounds = DEFAULT, *, readers: Readers | None = None, metrics: str = "",
    traces: str = "",
) -> None:  # fmt: skip
    """Serve until SIGTERM or SIGINT. Prints ``ready HOST:PORT`` on stdout, as standby once it has taken over.

    Args:
        readers: who else may ask, and where; None for this user in the state directory.
        metrics: the address of metrics and health; "" for none.
        traces: that of a collector for spans; "" for none.

    Raises:
        Unavailable: it cannot listen at an address.
    """
    memory.hide()
    memory.share_arenas(ARENAS)
    log_to_stderr()
    logging.getLogger("alembic").setLevel(logging.WARNING)
    state.config()
    with set_by_signals(Latch()) as ended, StateLock(state.root, "coordinator serve"):
        store = standby.wait_to_lead(state, ended, end_now)
        if store is None:
            return
        coordinator = Coordinator(state, fatal=end_now, listen=listen, bounds=bounds, readers=readers, store=store)
        coordinator.start()
        told = partial(families, coordinator.administration, coordinator.context)
        try:
            with monitored(metrics, told, coordinator.is_ready), traced(traces, "wardround-coordinator"):
                gc.freeze()  # what is loaded by now stays: to look through it for garbage holds every site up for 0.1 s
                print(f"ready {coordinator.listen}", flush=True)
                ended.wait()
        finally:
            coordinator.stop()


def end_now(error: BaseException) -> None:
    """End the process at once. What is durable is there at the next start, and nothing else was promised."""
    if isinstance(error, WardroundError):
        say_error(error)
        os._exit(error.exit_code)
    log.critical("the coordinator failed", exc_info=error)
    os._exit(WardroundError.exit_code)
