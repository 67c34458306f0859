"""Who makes a call, by its client certificate; and what a caller hears when its call fails.

TLS has checked that the certificate is signed by our authority and that the peer has its key. The rest is here. A
caller hears a refusal's code and nothing else: the sentence stays in this process.
"""

import logging
from collections.abc import Callable
from functools import lru_cache

import grpc
from cryptography import x509

from coordinator.calls import Calls
from coordinator.members.certificate_status import MOST_SHOWN, CertificateStatus, Peer
from coordinator.members.enrolment import Enrolment
from wardround import refusals, rpc
from wardround.errors import BadData, NotPermitted, WardroundError
from wardround.local.durable import StorageFailed
from wardround.signing import certificates

log = logging.getLogger(__name__)


class Authenticator:
    """Authenticates the peer of every call, and ends every call that fails.

    Args:
        fatal: called with an error after which the process must end (a failed disk).
    """

    def __init__(
        self,
        certificate_status: CertificateStatus,
        enrolment: Enrolment,
        calls: Calls,
        fatal: Callable[[BaseException], None],
    ) -> None:
        self.certificate_status = certificate_status
        self.calls = calls
        self._enrolment = enrolment
        self._fatal = fatal

    def peer(self, context: grpc.ServicerContext, kind: str | tuple[str, ...]) -> Peer:
        """The peer of a call. See ``CertificateStatus.admit`` for the checks.

        Raises:
            NotPermitted: its certificate is not valid now, or not of the kind that may call this method.
        """
        shown = [bytes(value) for value in context.auth_context().get("x509_pem_cert", [])]
        if not shown:
            raise NotPermitted("the call carries no client certificate", code="CERTIFICATE_PROFILE")
        try:
            certificate = _certificate(shown[0])
        except BadData as error:
            raise NotPermitted(error.message, code="CERTIFICATE_PROFILE") from None
        peer = self.certificate_status.admit(certificate, _host(context))
        if peer.name.kind not in ((kind,) if isinstance(kind, str) else kind):
            raise NotPermitted(f"a certificate of kind `{peer.name.kind}` may not call this", code="CALL_NOT_ALLOWED")
        self._enrolment.note_use(peer)
        return peer

    def abort(self, context: grpc.ServicerContext, error: Exception) -> None:
        """End a call with an error. A failed disk ends the process: nothing more may be promised."""
        if isinstance(error, StorageFailed):
            self._fatal(error)
        if not context.is_active():
            return  # the connection broke, or the peer canceled the call: nobody would hear it
        if not isinstance(error, WardroundError):
            log.error("a call failed", exc_info=error)
            error = WardroundError("a fault in the program")
        elif refusals.said_of(error) == refusals.TROUBLE:
            log.error("a call failed: %s; %s", error.message, error.hint)  # the site hears a code and nothing of this
        rpc.abort(context, error)


@lru_cache(MOST_SHOWN)
def _certificate(pem: bytes) -> x509.Certificate:
    """A client's certificate, as each of its calls shows it. Raises BadData: it is none."""
    return certificates.load_certificate(pem, "the client's certificate")


def _host(context: grpc.ServicerContext) -> str:
    """The peer's host without its port: 10.0.0.7 of ``ipv4:10.0.0.7:51234``."""
    kind, _, rest = context.peer().partition(":")
    host = rest.rpartition(":")[0]
    return host.strip("[]").replace("%5B", "").replace("%5D", "") if kind in ("ipv4", "ipv6") else kind
