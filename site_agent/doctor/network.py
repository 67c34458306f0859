"""The way to the coordinator, step by step: name, proxy, port, TLS, this site's certificate, a call."""

import datetime
from collections.abc import Callable, Iterator, Mapping

from cryptography import x509

from site_agent.gateway.connection import diagnosis
from site_agent.gateway.connection.diagnosis import CERTIFICATE, NAME, PORT, PROXY, STEPS, TLS, Look
from site_agent.gateway.connection.proxy import Proxy
from site_agent.gateway.enrolment.identity import Identity
from wardround.checkup import Finding, of_error, ok, problem, warning
from wardround.errors import BadData, NeedsPerson, WardroundError
from wardround.records.invitation import stamp
from wardround.signing import chains

ENVIRONMENT = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
DONE = {
    NAME: "{host} is known here",
    PROXY: "{proxy} lets {address} through",
    PORT: "{address} takes the connection",
    TLS: "TLS 1.3, and the federation's own authority stands behind the coordinator's certificate",
    CERTIFICATE: "the coordinator takes this site's certificate",
}


def way(address: str, own: Identity, environment: Mapping[str, str]) -> tuple[list[Finding], bool]:
    """What lies on the way to the coordinator, and whether it is open."""
    try:
        proxy = own.proxy()
    except WardroundError as error:
        return [of_error("proxy", error)], False
    authority = own.authority_file.read_bytes()
    looked = diagnosis.look(address, authority, own.certificate_file, own.key_file, proxy)
    issuer = diagnosis.issuer_at(address, proxy) if looked.step == TLS else ""
    return steps(address, looked, issuer, proxy, environment), looked.error is None


def steps(
    address: str, looked: Look, issuer: str, proxy: Proxy | None, environment: Mapping[str, str]
) -> list[Finding]:
    """A line for each step that was gone, and one for the step that failed.

    Args:
        issuer: who signed what was shown, where TLS failed; "" where it is not known.
        environment: of this process.
    """
    kinds = [PROXY, TLS, CERTIFICATE] if proxy is not None else [NAME, PORT, TLS, CERTIFICATE]
    reached = [step for step in kinds if not looked.step or STEPS.index(step) < STEPS.index(looked.step)]
    host = address.rpartition(":")[0]
    words = {"address": address, "host": host, "proxy": proxy.address if proxy is not None else ""}
    findings = [ok(step, DONE[step].format(**words)) for step in reached]
    if looked.error is not None:
        findings.append(_failed(looked.step, looked.error, issuer))
    named = [name for name in ENVIRONMENT if environment.get(name)]
    if looked.error is not None and named and proxy is None:
        findings.append(
            warning(
                PROXY,
                f"the environment names a proxy ({named[0]}), and what it says counts for nothing here",
                "write the proxy, one line, into this site's `identity/proxy`: http://HOST:PORT",
            )
        )
    return findings


def _failed(step: str, error: WardroundError, issuer: str) -> Finding:
    if step == TLS and issuer and isinstance(error, NeedsPerson):
        return problem(
            step,
            f"{error.message}; what answers there is signed by `{issuer}`",
            "if that is a firewall or proxy of your own that looks into TLS, it must leave this address alone; if not, "
            f"{error.hint}",
        )
    return of_error(step, error)


def certificate(own: Identity, now: datetime.datetime) -> Iterator[Finding]:
    """Whether the certificate is over this key, of this authority, and valid; and the authority itself."""
    try:
        held, roots = chains.load_chain(own.certificate_file.read_bytes(), str(own.certificate_file)), own.roots()
        over_this_key = held[0].public_key() == own.key().public_key()
    except WardroundError as error:
        yield of_error("certificate", error)
        return
    except OSError as error:
        yield problem("certificate", f"{own.certificate_file}: {error.strerror}", "restore the identity folder")
        return
    if not over_this_key:
        yield problem(
            "certificate",
            f"{own.certificate_file} is not over the key beside it: the two are of different times",
            "restore both from one backup, or join again with a new invitation",
        )
        return
    yield _validity(held[0], own.renewal_credentials(now) is not None, now)
    try:
        chains.refuse_unchained(held, roots, max(held[0].not_valid_before_utc, min(now, held[0].not_valid_after_utc)))
    except BadData as error:
        yield problem(
            "authority",
            f"this site's certificate is of another authority than {own.authority_file} holds: {error.message}",
            "restore the identity folder from one backup, or ask the operator for a new invitation",
        )
    end = max(root.not_valid_after_utc for root in roots)
    if end - now < datetime.timedelta(days=30):
        yield problem("authority", f"it ends on {stamp(end)}", "tell the coordinator's operator, who renews it")


def _validity(held: x509.Certificate, renewable: bool, now: datetime.datetime) -> Finding:
    begin, end = held.not_valid_before_utc, held.not_valid_after_utc
    if now < begin:
        return problem(
            "certificate",
            f"valid from {stamp(begin)} on, and this machine's clock says {stamp(now)}",
            "set the clock: `timedatectl`",
        )
    if now < end:
        return ok("certificate", f"valid until {stamp(end)}; a running agent renews it")
    if renewable:
        return warning("certificate", f"ended on {stamp(end)}", "`site-agent run` renews it with the same key")
    return problem(
        "certificate",
        f"ended on {stamp(end)}, too long ago to be renewed",
        "ask the operator for a new invitation, and redeem it here: `site-agent join --invitation FILE`",
    )


def call(refresh: Callable[[], object]) -> Finding:
    """Whether the coordinator answers a call of this site: revoked, another version and the like show here."""
    try:
        refresh()
    except WardroundError as error:
        return of_error("coordinator", error)
    return ok("coordinator", "answers this site's calls")
