"""``coordinator doctor``: what keeps the federation from being served, each thing with its cause and its fix.

Looks, and changes nothing. What the service knows comes in as its answers; whoever asks it is the command.
"""

import datetime
import errno
import os
import resource
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from coordinator.answers import SiteList, SiteRow, StudyList, StudyRow
from coordinator.member_answers import AuthorityStatus
from coordinator.members.authority import Authority
from coordinator.state_directory import State, split_address
from wardround import checkup
from wardround.checkup import Finding, of_error, ok, problem, warning
from wardround.errors import WardroundError
from wardround.terminal import many

INSTALLED = ("wardround", "grpcio", "protobuf", "cryptography", "sqlalchemy", "torch")
TIMEOUT_S = 5
AWAY = datetime.timedelta(days=3)  # a site that was not seen for so long does not renew its certificate in time
RENEW = datetime.timedelta(days=30)
FILES_EACH, FILES_ELSE = 8, 128  # open files: of a site, and of the service itself
MODELS_KEPT = 2  # copies of a round's model, beside an update of each site


@dataclass(frozen=True)
class Answers:
    """What the running service, or the command in its place, says. Each raises WardroundError."""

    sites: Callable[[], SiteList]
    studies: Callable[[], StudyList]
    authority: Callable[[], AuthorityStatus]


def examine(place: State, answers: Answers, now_s: Callable[[], float] = time.time) -> Iterator[Finding]:
    """A finding for each thing, as it is looked at."""
    now = datetime.datetime.fromtimestamp(now_s(), datetime.UTC)
    yield checkup.versions(INSTALLED)
    if find_spec("torch") is None:
        yield ok("torch", "is not needed here; without it, `study create` is given --initial")
    try:
        config = place.config()
        authority = Authority(place.authority, config.federation)
    except WardroundError as error:
        yield of_error("state", error)
        return
    held = [path for path in (*sorted(place.authority.glob("*key*.pem")), place.receipt_key_file) if path.exists()]
    yield from checkup.owner([place.root, *held], os.geteuid())
    yield from checkup.private(held)
    runs = checkup.service(place.root, place.control, "coordinator", "no site is served", "`coordinator serve`")
    yield runs
    yield checkup.temporary()
    yield checkup.clock(now, None, checkup.is_synchronized())
    yield signing(authority, now)
    yield port(config.address) if runs.state != checkup.OK else reached(config.address, authority.pem)
    yield from _known(place, answers, now)


def _known(place: State, answers: Answers, now: datetime.datetime) -> Iterator[Finding]:
    """What the database has. Where it cannot be asked, why."""
    try:
        listed, offered, roots = answers.sites(), answers.studies(), answers.authority()
    except WardroundError as error:
        yield of_error("database", error)
        yield checkup.disk(place.root, checkup.room_at(place.root))
        return
    yield ok("database", f"{many(len(listed.sites), 'site')}, {many(len(offered.studies), 'study', 'studies')}")
    blobs = place.blob_folder(place.config().storage)
    models = [path.stat().st_size for path in (blobs / "models").glob("*") if path.is_file()]
    needed = max(models, default=0) * (len(listed.sites) + MODELS_KEPT)
    where = place.root if blobs == place.blobs else blobs
    yield checkup.disk(where, checkup.room_at(where), needed)
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(listed.sites))
    if roots.behind:
        yield warning(
            "authority",
            f"sites that have not renewed since the newest root came: {', '.join(roots.behind)}",
            "wait, or have these start their agents; then `coordinator authority retire`",
        )
    yield from sites(listed.sites, now)
    yield from studies(offered.studies)


def signing(authority: Authority, now: datetime.datetime) -> Finding:
    """Whether what signs the sites' certificates is valid, and for long enough."""
    end = authority.signing.certificate.not_valid_after_utc
    fix = "`coordinator authority request`, then sign it with the root's file and `install` it"
    return checkup.ending("authority", end, now, RENEW, fix)


def port(address: str) -> Finding:
    """Whether the service, which does not run, could listen at its address. Frees it at once."""
    host, number = split_address(address)
    try:
        family, _, _, _, where = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except socket.gaierror:
        return _unknown(host)
    except OSError as error:
        return _not_bound(address, error)
    return ok("port", f"{address} is free")


def _not_bound(address: str, error: OSError) -> Finding:
    if error.errno == errno.EADDRINUSE:
        return problem("port", f"another program listens at {address}", "stop that program, or `serve --listen`")
    if error.errno == errno.EACCES:
        return problem(
            "port",
            f"this user may not listen at {address}: the port is below 1024",
            "take another port, or give the unit CAP_NET_BIND_SERVICE (deploy/README.md)",
        )
    return warning(
        "port",
        f"{address} is no address of this machine ({error.strerror or error})",
        "`coordinator serve --listen 0.0.0.0:PORT`, where a port forward brings the sites here",
    )


def _unknown(host: str) -> Finding:
    return warning(
        "name", f"the name {host} is not known on this machine", "check that it is known where the hospitals are"
    )


def reached(address: str, roots: bytes) -> Finding:
    """Whether the running service answers at its address, and nobody else does. Nothing is sent."""
    host, number = split_address(address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=roots.decode())
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, number), timeout=TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return ok("port", f"{address} is answered by this coordinator")
    except ssl.SSLCertVerificationError as error:
        return problem(
            "tls",
            f"who answers at {address} is not this coordinator ({error.verify_message})",
            "another program has that address, or something on the way looks into TLS: it must pass the connection on",
        )
    except socket.gaierror:
        return _unknown(host)
    except OSError as error:
        return warning(
            "port",
            f"{address} cannot be reached from this machine ({error.strerror or error})",
            "have a hospital try: `site-agent doctor` there says how far it comes. A firewall, or a port forward?",
        )


def open_files(limit: int, count: int) -> Finding:
    """Whether this user may open as many files as ``count`` sites take."""
    needed = FILES_ELSE + FILES_EACH * count
    if limit != resource.RLIM_INFINITY and limit < needed:
        return problem(
            "open files", f"this user may open {limit}, and {count} sites take {needed}", "LimitNOFILE= in the unit"
        )
    return ok("open files", f"{limit} may be open")


def sites(rows: Sequence[SiteRow], now: datetime.datetime) -> Iterator[Finding]:
    """The sites with which something is."""
    for row in rows:
        about = f"site {row.site}"
        if row.certificate_fork_since:
            yield problem(
                about,
                f"two machines hold its keys since {row.certificate_fork_since}: a copy, or a theft",
                f"ask its people; if nobody there knows of a copy, `coordinator revoke {row.site}`",
            )
        if row.copied_since:
            yield warning(
                about,
                f"two programs run with its identity, seen since {row.copied_since}",
                "ask its people which machine goes on, and have the other one stopped",
            )
        if row.state == "enrolled":
            yield from _away(about, row, now)


def _away(about: str, row: SiteRow, now: datetime.datetime) -> Iterator[Finding]:
    end, seen = (_time(text) for text in (row.certificate_expires, row.last_seen))
    if end is not None and now >= end:
        yield warning(
            about,
            f"its certificate ended on {end:%Y-%m-%d}, and it does not connect",
            f"it renews it by itself for a while; later `coordinator invite {row.site}`",
        )
    elif seen is None or now - seen > AWAY:
        when = f"since {seen:%Y-%m-%d %H:%M} UTC" if seen is not None else "yet"
        yield warning(about, f"was not connected {when}", "have its people give `site-agent doctor`")


def _time(text: str | None) -> datetime.datetime | None:
    return datetime.datetime.fromisoformat(text) if text else None


def studies(rows: Sequence[StudyRow]) -> Iterator[Finding]:
    """The studies that do not go on by themselves."""
    for row in rows:
        if row.state == "paused":
            yield problem(
                f"study {row.id}",
                f"paused after round {row.round} of {row.rounds}",
                f"`coordinator study report {row.id}` says why; then `coordinator study start {row.id}`",
            )
        elif row.state == "waiting":
            yield warning(
                f"study {row.id}",
                "waits until its sites are ready",
                f"`coordinator study status {row.id}` shows which is not",
            )
