"""What the coordinator sends on a `Watch`: offers, assignments, what is shown of a secure
aggregation, a warning about certificates, and its goodbye."""

import datetime
from dataclasses import dataclass

from wardround import __version__
from wardround.errors import BadData
from wardround.records.assignment import Assignment
from wardround.records.offer import StudyOffer
from wardround.records.secure_messages import SecureShown
from wardround.v1 import federation_pb2 as pb


@dataclass(frozen=True)
class Goodbye:
    """The coordinator is going down; connect again."""


@dataclass(frozen=True)
class CertificateFork:
    """Two certificates of one site, both renewed from the same one, are in use since ``since_s`` (Unix time)."""

    since_s: int

    @property
    def since(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self.since_s, datetime.UTC)


Event = StudyOffer | Assignment | SecureShown | CertificateFork | Goodbye


def event_from(message: pb.Event) -> Event | None:
    """What an event is; None for a kind that this version does not know.

    Raises:
        BadData: it has not its form.
    """
    kind = message.WhichOneof("kind")
    if kind == "offer":
        return StudyOffer.from_message(message.offer)
    if kind == "assignment":
        return Assignment.from_message(message.assignment)
    if kind == "secure":
        return SecureShown.from_message(message.secure)
    if kind == "certificate_fork":
        since_s = message.certificate_fork.since_s
        if not 0 < since_s < 2**33:
            raise BadData("the coordinator's warning of a certificate fork has no time", code="MESSAGE_MALFORMED")
        return CertificateFork(since_s)
    return Goodbye() if kind == "goodbye" else None


def event_message(event: Event) -> pb.Event:
    """The event as it is sent."""
    message = pb.Event(coordinator_version=__version__)
    if isinstance(event, StudyOffer):
        message.offer.CopyFrom(event.to_message())
    elif isinstance(event, Assignment):
        message.assignment.CopyFrom(event.to_message())
    elif isinstance(event, SecureShown):
        message.secure.CopyFrom(event.to_message())
    elif isinstance(event, CertificateFork):
        message.certificate_fork.since_s = event.since_s
    else:
        message.goodbye.SetInParent()
    return message
