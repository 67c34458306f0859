"""The invitation: one line that a hospital pastes, with all it needs to join, good once.

    wr1.<base64url of canonical JSON>.<CRC-32 of the middle part, 8 hex digits>

It holds the coordinator's address, the authority's certificate (so the first connection is already verified) and a
short-lived bootstrap certificate with its key. It is a secret: it is read from a file or an unseen prompt, never from
the command line, and never logged. The id inside it is not secret.
"""

import base64
import binascii
import datetime
import zlib
from dataclasses import asdict, dataclass, fields

from wardround.errors import BadData
from wardround.signing import canonical

PREFIX = "wr1"
_LAST_SECOND = 253402300799  # of the year 9999, the last that dates here can say


@dataclass(frozen=True)
class Invitation:
    """Whose, for whom, where, until when; PEM texts."""

    id: str
    federation: str
    site: str
    address: str  # HOST:PORT
    expires_s: int  # Unix time
    authority: str
    certificate: str
    key: str

    def __repr__(self) -> str:
        return f"Invitation(id={self.id!r}, site={self.site!r})"  # never the key

    def encode(self) -> str:
        body = base64.urlsafe_b64encode(canonical.dumps(asdict(self))).decode().rstrip("=")
        return f"{PREFIX}.{body}.{zlib.crc32(body.encode()):08x}"

    @classmethod
    def decode(cls, text: str) -> "Invitation":
        """Read an invitation as pasted: white space anywhere in it is dropped.

        Raises:
            BadData: cut short, mistyped, or not an invitation.
        """
        text = "".join(text.split())
        parts = text.split(".")
        again = "copy the whole line again, from `wr1.` to its last character"
        if not text.startswith(PREFIX + "."):
            raise BadData("this is not an invitation: it does not begin with `wr1.`", hint=again)
        if len(parts) != 3 or not text.isascii() or f"{zlib.crc32(parts[1].encode()):08x}" != parts[2]:
            raise BadData("the invitation is cut short or changed: its check digits do not match", hint=again)
        try:
            padded = parts[1] + "=" * (-len(parts[1]) % 4)
            body = canonical.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
            wanted = {field.name: field.type for field in fields(cls)}
            if not isinstance(body, dict) or set(body) != set(wanted):
                raise BadData("fields")
            if any(not isinstance(body[name], int if kind is int else str) for name, kind in wanted.items()):
                raise BadData("types")
            if not (0 <= body["expires_s"] <= _LAST_SECOND):
                raise BadData("time")
            if not all(body[name].isprintable() for name in ("id", "federation", "site", "address")):
                raise BadData("names")
        except (BadData, binascii.Error, ValueError):
            raise BadData(
                "the invitation is whole, but its contents are not known to this version",
                hint="update this agent, or ask the coordinator's operator for a new invitation",
            ) from None
        return cls(**body)

    def refuse_expired(self, now: datetime.datetime) -> None:
        """Raises BadData: it is past its time by this machine's clock, which the message shows."""
        expires = datetime.datetime.fromtimestamp(self.expires_s, datetime.UTC)
        if now >= expires:
            raise BadData(
                f"invitation for site `{self.site}` expired {ago(now - expires)} ago ({stamp(expires)}; "
                f"this machine's clock says {stamp(now)})",
                hint=f"ask the coordinator's operator for a new one: `coordinator invite {self.site}`",
                code="INVITATION_EXPIRED",
            )


def stamp(time: datetime.datetime) -> str:
    return time.astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def ago(span: datetime.timedelta) -> str:
    """A length of time as a person says it: "40 s", "3 min", "2 h", "5 days"."""
    seconds = int(span.total_seconds())
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds // unit} {name}"
    return f"{seconds} s"
