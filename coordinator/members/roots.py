"""The root's key away from the service: an intermediate that signs in its place, and the way to a newer root.

    export    the root's key goes into a file under a passphrase, and an intermediate signs from then on
    request   a key for the next intermediate is made here; only its request leaves
    sign      elsewhere, with the root's file: the intermediate's certificate
    install   the intermediate comes into service; with a newer root, the sites learn of that when they renew
    retire    the older root is no longer trusted

A newer root comes with a cross-certificate that the older one signed. A site that trusts only the older root believes
the newer one by it, and one that has renewed since trusts both. So no order of renewals and outages locks a site out
before the older root is retired. A thief of the service's key can name no root of his own: a root must vouch for it.

Files are written whole, what is trusted before what depends on it: a crash between leaves a service that works.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InternalError, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coordinator.members.authority import (
    DAY_S,
    Authority,
    Signing,
    authority_certificate,
    authority_name,
    new_root,
    read,
)
from wardround.errors import BadData, NeedsPerson, UsageProblem
from wardround.local import durable
from wardround.signing import certificates, chains
from wardround.signing.chains import Chain

INTERMEDIATE_S = 366 * DAY_S
LEAST_PASSPHRASE = 12  # characters
_EXPORT = "`coordinator authority export-root --out FILE` first: a key that stays here need not be replaced"


@dataclass(frozen=True)
class RootFile:
    """A root with its key. ``crosses``: the certificates by which an older root vouches for it."""

    key: certificates.PrivateKey
    certificate: x509.Certificate
    crosses: Chain = ()

    def encrypted(self, passphrase: bytes) -> bytes:
        """PEM: the key under ``passphrase``, and the certificates. Raises UsageProblem: the passphrase is too short."""
        if len(passphrase.decode(errors="replace")) < LEAST_PASSPHRASE:
            raise UsageProblem(f"the passphrase has fewer than {LEAST_PASSPHRASE} characters")
        encryption = serialization.BestAvailableEncryption(passphrase)
        pem = self.key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
        return pem + chains.chain_pem((self.certificate, *self.crosses))

    @classmethod
    def decrypted(cls, pem: bytes, passphrase: bytes, source: str) -> "RootFile":
        """Raises BadData: not such a file, or another passphrase."""
        chain = chains.load_chain(pem, source)
        try:
            key = serialization.load_pem_private_key(pem, passphrase)
        except (ValueError, TypeError, UnsupportedAlgorithm, InternalError):
            raise BadData(f"{source}: not a root's key, or under another passphrase") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != chain[0].public_key():
            raise BadData(f"{source}: the certificate in it is not of the key in it")
        return cls(key, chain[0], chain[1:])

    def signs(self, request: bytes, now_s: float) -> bytes:
        """The certificate of an intermediate, PEM, with this root and what vouches for it: what ``install`` takes.

        Args:
            request: what ``request`` made, PEM.

        Raises:
            BadData: not a request of a P-256 key that signed it.
        """
        try:
            der = x509.load_pem_x509_csr(request).public_bytes(serialization.Encoding.DER)
        except ValueError:
            raise BadData("not a request for an intermediate's certificate") from None
        certificate = self.intermediate(certificates.requested_key(der), now_s)
        return chains.chain_pem((certificate, self.certificate, *self.crosses))

    def intermediate(self, key: ec.EllipticCurvePublicKey, now_s: float) -> x509.Certificate:
        """A certificate of a year that signs leaves alone."""
        name = authority_name("intermediate", self._federation, key)
        issuer = (self.key, self.certificate.subject)
        return authority_certificate(name, key, issuer, now_s, INTERMEDIATE_S, path_length=0)

    @property
    def _federation(self) -> str:
        """Its name, as the subject has it: for people."""
        return str(self.certificate.subject.rdns[0].rfc4514_string()).rpartition(" of ")[2]

    def successor(self, now_s: float) -> "RootFile":
        """A newer root, for which this one vouches until its own end."""
        key, certificate = new_root(self._federation, now_s)
        left_s = self.certificate.not_valid_after_utc.timestamp() - now_s
        issuer = (self.key, self.certificate.subject)
        cross = authority_certificate(certificate.subject, key.public_key(), issuer, now_s, left_s, path_length=1)
        return RootFile(key, certificate, (cross,))


def root_in_service(authority: Authority) -> RootFile:
    """The root with its key, to be written elsewhere. Raises NeedsPerson: its key is not here."""
    path = authority.folder / "key.pem"
    if not path.exists():
        raise NeedsPerson(
            f"the root's key is not in {authority.folder}: it was exported before",
            hint="`coordinator authority show` says what signs now",
        )
    certificates.refuse_readable(path)
    return RootFile(certificates.load_key(read(path), str(path)), authority.certificate)


def leave_root(authority: Authority, now_s: float) -> None:
    """Let an intermediate sign from now on, and remove the root's key. The caller has written it elsewhere, and read it
    again.

    Raises:
        NeedsPerson: it is not here.
    """
    root = root_in_service(authority)
    if not authority.signing.above:
        key = certificates.new_key()
        certificate = root.intermediate(key.public_key(), now_s)
        _write_service(authority.folder, key, (certificate,))
    durable.remove(authority.folder / "key.pem")
    authority.reload()


def request_intermediate(authority: Authority) -> bytes:
    """A request (PEM) for a new intermediate's certificate. Its key is made and stays here; asked again, it is another.

    Raises:
        NeedsPerson: the root's key is still here.
    """
    _refuse_root_here(authority)
    key = certificates.new_key()
    durable.write_file(_requested_key(authority), certificates.key_pem(key))
    request = x509.load_der_x509_csr(certificates.signing_request(key))
    return request.public_bytes(serialization.Encoding.PEM)


def install(authority: Authority, bundle: bytes) -> None:
    """Take an intermediate into service, and its root if that is a newer one.

    1. it is over the key that was requested here   2. its root signed it   3. the root is the present one, or the
    present one vouches for it and no older one is still trusted

    Raises:
        NeedsPerson: nothing was requested, the root's key is still here, or an older root is to be retired first.
        BadData: one of the other checks; nothing was changed.
    """
    _refuse_root_here(authority)
    path = _requested_key(authority)
    if not path.exists():
        raise NeedsPerson("no certificate was requested here", hint="`coordinator authority request --out FILE`")
    key = certificates.load_key(read(path), str(path))
    intermediate, *further = chains.load_chain(bundle, "the certificate to install")
    if intermediate.public_key() != key.public_key():
        raise BadData("the certificate is not of the key that was requested here last")  # 1
    roots = [certificate for certificate in further if chains.is_root(certificate)]
    if not chains.is_authority(intermediate) or len(roots) != 1 or not chains.is_issued_by(intermediate, roots[0]):
        raise BadData("the certificate is not an intermediate with the one root that signed it")  # 2
    signing = authority.signing
    above: Chain = (intermediate, *signing.above[1:])
    if roots[0] != signing.roots[0]:
        if len(signing.roots) > 1:
            raise NeedsPerson(
                "the root before the present one is still trusted", hint="`coordinator authority retire` first"
            )
        chains.vouched_roots(tuple(further), signing.roots)  # 3
        crosses = [certificate for certificate in further if certificate != roots[0]]
        above = (intermediate, *crosses)
        durable.write_file(
            authority.folder / "certificate.pem", chains.chain_pem((roots[0], *signing.roots)), mode=0o644
        )
    _write_service(authority.folder, key, above)
    durable.remove(path)
    authority.reload()


def retire(authority: Authority, behind: Mapping[str, str], *, anyway: bool) -> tuple[str, ...]:
    """Trust the newest root alone from now on. The sites that cannot connect any more then.

    Args:
        behind: site -> fingerprint of the root behind the newest certificate that it used.
        anyway: also where sites did not renew since the newest root came; they need a new invitation then.

    Raises:
        NeedsPerson: there is one root only, or sites are behind and not ``anyway``.
    """
    signing = authority.signing
    if len(signing.roots) == 1:
        raise NeedsPerson("one root is trusted, there is no older one to retire", hint="`coordinator authority show`")
    newest = certificates.fingerprint(signing.roots[0])
    late = tuple(sorted(site for site, root in behind.items() if root != newest))
    if late and not anyway:
        raise NeedsPerson(
            f"these sites have not renewed their certificate since the newest root came: {', '.join(late)}",
            hint="wait until they have (half of a certificate's life); with `--anyway` each of them needs a new "
            "invitation",
        )
    _write_service(authority.folder, signing.key, signing.above[:1])
    durable.write_file(authority.folder / "certificate.pem", chains.chain_pem(signing.roots[:1]), mode=0o644)
    authority.reload()
    return late


def describe(signing: Signing) -> str:
    """What signs now, in words."""
    if not signing.above:
        return "the root itself; its key is in this state directory"
    return "an intermediate; the root's key is not needed here"


def _refuse_root_here(authority: Authority) -> None:
    if (authority.folder / "key.pem").exists():
        raise NeedsPerson(f"the root's key is still in {authority.folder}", hint=_EXPORT)


def _requested_key(authority: Authority) -> Path:
    return authority.folder / "requested-key.pem"


def _write_service(folder: Path, key: certificates.PrivateKey, above: Chain) -> None:
    durable.write_file(folder / "service.pem", certificates.key_pem(key) + chains.chain_pem(above))
