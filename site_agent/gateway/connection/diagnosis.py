"""Why the coordinator cannot be reached: gRPC says "unavailable" for everything, so this looks step by step."""

import datetime
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509

from site_agent.gateway.connection.proxy import Proxy
from wardround.errors import NeedsPerson, Unavailable, WardroundError
from wardround.records.invitation import stamp
from wardround.signing import certificates
from wardround.terminal import escaped

TIMEOUT_S = 10
NAME, PROXY, PORT, TLS, CERTIFICATE = STEPS = ("name", "proxy", "port", "tls", "certificate")


@dataclass(frozen=True)
class Look:
    """How far a look at the coordinator came: the step of ``STEPS`` that failed, and why; "" and None if none did."""

    step: str
    error: WardroundError | None


def diagnose(
    address: str,
    authority: bytes,
    certificate: Path | None = None,
    key: Path | None = None,
    proxy: Proxy | None = None,
) -> WardroundError:
    """What keeps the coordinator from being reached. Takes what ``look`` does."""
    why = look(address, authority, certificate, key, proxy).error
    return why or Unavailable(f"the coordinator at {address} is there, but did not answer the call")


def look(
    address: str,
    authority: bytes,
    certificate: Path | None = None,
    key: Path | None = None,
    proxy: Proxy | None = None,
) -> Look:
    """Whether the coordinator can be reached, by a TLS handshake in which the authority is verified.

    Nothing is sent. With ``certificate`` and ``key`` it also finds out whether the coordinator takes them.
    """
    host = address.rpartition(":")[0]
    context = _context(authority)
    if certificate is not None and key is not None:
        context.load_cert_chain(certificate, key)
    step = PORT if proxy is None else PROXY
    try:
        with _connected(address, proxy) as plain:
            step = TLS
            accepted = _is_accepted(context, plain, host.strip("[]"))
    except WardroundError as error:
        return Look(step, error)
    except ssl.SSLCertVerificationError as error:
        return Look(step, _not_verified(address, error))
    except TimeoutError:
        return Look(
            step,
            Unavailable(
                f"{address} does not answer in {TIMEOUT_S} s", hint="a firewall between here and there may drop it"
            ),
        )
    except socket.gaierror:
        return Look(
            NAME, Unavailable(f"the name {host} is not known here", hint="check the name service of this machine")
        )
    except ConnectionRefusedError:
        return Look(
            step, Unavailable(f"nobody listens at {address}", hint="is the coordinator running? ask its operator")
        )
    except ssl.SSLError as error:
        return Look(
            step,
            Unavailable(
                f"what listens at {address} does not speak TLS 1.3 as a coordinator does ({_words(error)})",
                hint="is the address right, and is there a proxy between here and there?",
            ),
        )
    except OSError as error:
        return Look(step, Unavailable(f"{address} cannot be reached ({error.strerror or error})"))
    if certificate is None or accepted:
        return Look("", None)
    return Look(CERTIFICATE, _not_taken(address, certificate))


def issuer_at(address: str, proxy: Proxy | None = None) -> str:
    """Who signed the certificate that whoever answers at ``address`` shows, as it says; "" where that cannot be seen.

    For a person to recognize a proxy that looks into TLS. Nothing is verified and nothing is sent.
    """
    context = _context(None)
    try:
        with _connected(address, proxy) as plain, context.wrap_socket(plain) as secure:
            shown = secure.getpeercert(binary_form=True) or b""
        return escaped(x509.load_der_x509_certificate(shown).issuer.rfc4514_string(), 120)
    except (OSError, WardroundError, ValueError):
        return ""


def _context(authority: bytes | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    if authority is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=authority.decode())
    return context


def _not_taken(address: str, certificate: Path) -> NeedsPerson:
    if ended := _ended(certificate):
        return NeedsPerson(
            f"this site's certificate ended on {ended}, and the coordinator at {address} does not take it any more",
            hint="ask the coordinator's operator for a new invitation, and redeem it here, where everything is kept: "
            "`site-agent join --invitation FILE`; if that date is not past, set this machine's clock (`timedatectl`)",
            code="CERTIFICATE_EXPIRED",
        )
    return NeedsPerson(
        f"the coordinator at {address} does not take this site's certificate",
        hint="check this machine's clock, then ask the coordinator's operator for a new invitation",
    )


def _connected(address: str, proxy: Proxy | None) -> socket.socket:
    if proxy is not None:
        return proxy.connect(address, TIMEOUT_S)
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT_S)


def _ended(path: Path) -> str:
    """When a certificate ended, by this machine's clock; "" while it is valid."""
    end = certificates.load_certificate(path.read_bytes(), str(path)).not_valid_after_utc
    return stamp(end) if datetime.datetime.now(datetime.UTC) >= end else ""


def _is_accepted(context: ssl.SSLContext, plain: socket.socket, name: str) -> bool:
    """Whether the other side keeps the connection after the handshake.

    Under TLS 1.3 it refuses our certificate only then, with an alert or by closing; a coordinator that takes it sends
    the first frame of HTTP/2.
    """
    with context.wrap_socket(plain, server_hostname=name) as secure:
        secure.settimeout(1)
        try:
            return secure.recv(1) != b""
        except TimeoutError:
            return True
        except (ConnectionResetError, ssl.SSLError):
            return False


def _not_verified(address: str, error: ssl.SSLCertVerificationError) -> WardroundError:
    if error.verify_code in (62, 64):
        return NeedsPerson(
            f"the coordinator's certificate is not for {address}: {_words(error)}",
            hint="its operator must use the address it was made with (`coordinator init --address`)",
        )
    if error.verify_code in (9, 10):
        return NeedsPerson(
            f"the coordinator's certificate is not valid by this machine's clock ({_words(error)})",
            hint="check the clock here (`timedatectl`) and there",
        )
    return NeedsPerson(
        f"the coordinator at {address} presents another authority than the one this site trusts ({_words(error)}); "
        "nothing was sent",
        hint="do not go on: ask the coordinator's operator to read you the authority's fingerprint",
    )


def _words(error: ssl.SSLError) -> str:
    text: Any = getattr(error, "verify_message", "") or error.reason or "no reason given"
    return str(text).lower().replace("_", " ")
