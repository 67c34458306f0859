"""What the coordinator answers to a site that enrols or renews its certificate."""

from dataclasses import dataclass

from wardround import __version__
from wardround.errors import BadData
from wardround.v1 import enrolment_pb2 as pb


@dataclass(frozen=True)
class IssuedCertificate:
    """A new certificate. PEM bytes; times are Unix. Whose it is, and who signed it, is for ``identity`` to check.

    Attributes:
        authority: the roots to trust, and the cross-certificates by which a known one vouches for a new one.
        renewal: a certificate over the same key that may renew it after its end; b"" for none.
    """

    certificate: bytes
    authority: bytes
    server_time_s: int
    renew_after_s: int
    renewal: bytes = b""

    @classmethod
    def from_message(cls, message: pb.RenewReply | pb.EnrolReply) -> "IssuedCertificate":
        return cls(
            message.certificate, message.authority, message.server_time_s, message.renew_after_s,
            message.renewal_certificate,
        )  # fmt: skip

    def to_message(self) -> pb.RenewReply:
        return pb.RenewReply(
            certificate=self.certificate, authority=self.authority, server_time_s=self.server_time_s,
            renew_after_s=self.renew_after_s, coordinator_version=__version__, renewal_certificate=self.renewal,
        )  # fmt: skip


@dataclass(frozen=True)
class Enrolled:
    """What makes an installation a site. ``receipt_key`` (Ed25519, 32 bytes) is the coordinator's."""

    issued: IssuedCertificate
    site: str
    federation: str
    receipt_key: bytes

    @classmethod
    def from_message(cls, message: pb.EnrolReply) -> "Enrolled":
        """Raises BadData: it holds no receipt key."""
        issued = IssuedCertificate.from_message(message)
        if len(message.receipt_key) != 32:
            raise BadData("the coordinator's reply holds no receipt key; nothing was kept")
        return cls(issued, message.site, message.federation, message.receipt_key)

    def to_message(self) -> pb.EnrolReply:
        issued = self.issued
        return pb.EnrolReply(
            site=self.site, federation=self.federation, certificate=issued.certificate, authority=issued.authority,
            receipt_key=self.receipt_key, server_time_s=issued.server_time_s, renew_after_s=issued.renew_after_s,
            coordinator_version=__version__, renewal_certificate=issued.renewal,
        )  # fmt: skip
