"""Chains of certificates: from a leaf to a root that is trusted, and from a trusted root to its successor.

    leaf ◀─ root                                    the root signs by itself
    leaf ◀─ intermediate ◀─ root                    the root's key is kept elsewhere
    leaf ◀─ intermediate ◀─ new root ◀─ old root    a cross-certificate: the old root vouches for the new one

In a file or message the leaf comes first, then the others. Dates and signatures are checked here; a TLS library checks
the same of its peer by itself.
"""

import datetime
import re
from collections.abc import Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

from wardround.errors import BadData
from wardround.signing.certificates import MAX_PEM, certificate_pem, load_certificate

MOST = 8  # certificates in one chain or list of roots
_ONE = re.compile(rb"-----BEGIN CERTIFICATE-----[^-]{1,16384}-----END CERTIFICATE-----\s*")

Chain = tuple[x509.Certificate, ...]


def load_chain(pem: bytes, source: str) -> Chain:
    """The certificates of ``pem``, one or more. What stands between them is not read.

    Raises:
        BadData: there is none, one is damaged, or there are more than ``MOST``.
    """
    if len(pem) > MAX_PEM:
        raise BadData(f"{source}: {len(pem)} bytes are no certificates in PEM")
    parts = _ONE.findall(pem)
    if not parts:
        raise BadData(f"{source}: not a certificate in PEM")
    if len(parts) > MOST:
        raise BadData(f"{source}: {len(parts)} certificates in PEM, at most {MOST} are taken")
    return tuple(load_certificate(part, source) for part in parts)


def chain_pem(chain: Sequence[x509.Certificate]) -> bytes:
    return b"".join(certificate_pem(certificate) for certificate in chain)


def is_authority(certificate: x509.Certificate) -> bool:
    """Whether a certificate may sign others."""
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError):
        return False


def is_root(certificate: x509.Certificate) -> bool:
    """Whether it is an authority that signed itself."""
    return is_authority(certificate) and is_issued_by(certificate, certificate)


def is_issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    """Whether ``issuer`` signed it. Of the issuer nothing else is checked."""
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def refuse_unchained(chain: Chain, roots: Sequence[x509.Certificate], now: datetime.datetime) -> None:
    """Refuse a chain whose first certificate no trusted root stands behind.

    Raises:
        BadData: none of ``roots`` signed it, nor an authority in the rest of the chain that a root stands behind.
    """
    certificate, further = chain[0], list(chain[1:])
    while not any(is_issued_by(certificate, root) for root in roots):
        issuers = [
            issuer
            for issuer in further
            if is_authority(issuer)
            and issuer.not_valid_before_utc <= now < issuer.not_valid_after_utc
            and is_issued_by(certificate, issuer)
        ]
        if not issuers:
            raise BadData("no authority that is trusted here stands behind the certificate")
        certificate = issuers[0]
        further.remove(certificate)


def vouched_roots(offered: Chain, trusted: Sequence[x509.Certificate]) -> Chain:
    """The roots among ``offered`` that are trusted already or have a trusted root's cross-certificate; others are left
    out.

    Raises:
        BadData: there is none.
    """
    roots = tuple(
        root
        for root in offered
        if is_root(root) and (root in trusted or any(_vouches(cross, root, trusted) for cross in offered))
    )
    if not roots:
        raise BadData("the coordinator names another authority than the one this site trusts")
    return roots


def _vouches(cross: x509.Certificate, root: x509.Certificate, trusted: Sequence[x509.Certificate]) -> bool:
    return (
        is_authority(cross)
        and cross.subject == root.subject
        and cross.public_key() == root.public_key()
        and any(is_issued_by(cross, known) for known in trusted)
    )
