"""Identities under load: `python -m tools.evidence_identity renewals` and `... redemptions`.

    renewals     sites whose certificates live seconds and are renewed again and again, while each makes calls without a
                 pause and keeps its stream of events; a call that fails in any way is counted
    redemptions  one invitation redeemed from many threads at the same time, again and again; certificates are counted

The real coordinator and the real gateways, over real TLS on loopback, in this one process. One JSON line is printed;
the exit code is 1 where a call failed, or where an invitation gave any number of certificates but one.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator import state_directory
from coordinator.members.authority import Lifetimes
from coordinator.requests import Invite
from coordinator.server import Coordinator
from site_agent.gateway.agent import Agent
from site_agent.gateway.connection.client import Connection
from site_agent.gateway.connection.interrupt import Interrupt
from site_agent.gateway.connection.meter import Meter
from site_agent.gateway.enrolment.join import enrolment_proof, join
from site_agent.state.directory import SiteState
from tools.world import free_port
from wardround.errors import TryAgain, WardroundError
from wardround.records.invitation import Invitation
from wardround.records.schema import toml_bytes
from wardround.signing import certificates

INVITED_S = 3600


@dataclass(frozen=True)
class Renewals:
    """What became of the calls of all sites while their certificates were renewed."""

    sites: int
    life_s: int
    renewals: tuple[int, ...]  # of each site
    calls: int
    failed: tuple[str, ...]
    certificate_forks: int
    seconds: float


@dataclass(frozen=True)
class Redemptions:
    """How many certificates each invitation gave to the threads that redeemed it at one time."""

    times: int
    threads: int
    certificates: int
    refused_as_used: int
    other: tuple[str, ...]


@contextmanager
def served(folder: Path, lifetimes: Lifetimes) -> Iterator[Coordinator]:
    """A coordinator on loopback whose certificates live so long."""
    state = state_directory.State(folder / "coordinator")
    state_directory.create(state, "north", f"127.0.0.1:{free_port()}", time.time())
    written = toml_bytes({"certificates": lifetimes.model_dump()})
    state.config_file.write_bytes(state.config_file.read_bytes() + b"\n" + written)
    failures: list[BaseException] = []
    coordinator = Coordinator(state, fatal=failures.append)
    coordinator.start()
    try:
        yield coordinator
    finally:
        coordinator.stop()
        if failures:
            raise failures[0]


def invite(coordinator: Coordinator, site: str) -> str:
    answer = coordinator.administration.run(Invite(site=site, expires_s=INVITED_S).to_document(), lambda item: None)
    assert isinstance(answer, dict)
    return str(answer["invitation"])


def renewals(folder: Path, *, sites: int, wanted: int, life_s: int, limit_s: float) -> Renewals:
    """Run until each of the sites has renewed its certificate ``wanted`` times, or until ``limit_s`` is over."""
    lifetimes = Lifetimes(life_s=life_s, renewal_window_s=0)  # nothing but the renewal in time keeps a site in
    with served(folder, lifetimes) as coordinator:
        began = time.monotonic()
        members: list[Member] = []
        try:
            for number in range(sites):
                members.append(Member(folder / f"site{number}", invite(coordinator, f"site{number}")))
                members[-1].start()
            while time.monotonic() - began < limit_s and any(member.renewed < wanted for member in members):
                time.sleep(0.1)
        finally:
            for member in members:
                member.stop()
        rows = coordinator.administration.sites().sites
        return Renewals(
            sites=sites, life_s=life_s, renewals=tuple(member.renewed for member in members),
            calls=sum(member.calls for member in members),
            failed=tuple(why for member in members for why in member.failed),
            certificate_forks=sum(row.certificate_fork_since is not None for row in rows),
            seconds=round(time.monotonic() - began, 1),
        )  # fmt: skip


class Member:
    """One site: its agent, and a thread that makes calls without a pause."""

    def __init__(self, folder: Path, invitation: str) -> None:
        self._state = SiteState(folder)
        join(self._state, invitation)
        self._agent = Agent(self._state, least_renewal_s=0.2)
        self.calls = 0
        self.failed: list[str] = []
        self.finished = threading.Event()
        self._thread = threading.Thread(target=self._call)
        self._before = self._certificates()

    def start(self) -> None:
        self._agent.start()
        self._thread.start()

    def stop(self) -> None:
        self.finished.set()
        self._thread.join()
        if self._agent.stopped.is_set():
            self.failed.append(str(self._agent.wait()))
        self._agent.stop()

    @property
    def renewed(self) -> int:
        return self._certificates() - self._before

    def _certificates(self) -> int:
        """Each has a line in the ledger."""
        return (self._state.ledger / "000001.jsonl").read_bytes().count(b'"type":"identity"')

    def _call(self) -> None:
        asking = Interrupt()
        while not self.finished.is_set():
            try:
                self._agent.commands.refresh(asking)
            except WardroundError as error:
                self.failed.append(error.message)
            self.calls += 1
            self.finished.wait(0.01)


def redemptions(folder: Path, *, times: int, threads: int) -> Redemptions:
    """Redeem ``times`` invitations, each from so many threads at one time, every one with keys of its own."""
    given = used = 0
    other: list[str] = []
    with served(folder, Lifetimes()) as coordinator, ThreadPoolExecutor(threads) as pool:
        for number in range(times):
            text = invite(coordinator, f"site{number}")
            invitation = Invitation.decode(text)
            pems = (invitation.authority.encode(), invitation.key.encode(), invitation.certificate.encode())
            connections = [Connection(invitation.address, *pems, Meter()) for _ in range(threads)]

            def redeem(connection: Connection, invitation: Invitation = invitation) -> str:
                key, ledger_key = certificates.new_key(), Ed25519PrivateKey.generate()
                request = certificates.signing_request(key)
                proof = ledger_key.sign(enrolment_proof(invitation, request))
                while True:
                    try:
                        connection.enrol(invitation.id, request, ledger_key.public_key().public_bytes_raw(), proof)
                    except TryAgain:
                        continue  # more than eight calls of one invitation at a time are asked to come again
                    except WardroundError as error:
                        return error.code or error.message
                    return "enrolled"

            said = list(pool.map(redeem, connections))
            for connection in connections:
                connection.close()
            given += said.count("enrolled")
            used += said.count("INVITATION_USED")
            other += [code for code in said if code not in ("enrolled", "INVITATION_USED")]
    return Redemptions(times, threads, given, used, tuple(other))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["renewals", "redemptions"])
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--renewals", type=int, default=100, help="of each site")
    parser.add_argument("--life-s", type=int, default=10, help="of a certificate")
    parser.add_argument("--limit-s", type=float, default=1200)
    parser.add_argument("--times", type=int, default=200, help="invitations that are redeemed")
    parser.add_argument("--threads", type=int, default=64, help="that redeem each at one time")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.what == "renewals":
            kept = renewals(
                Path(folder), sites=given.sites, wanted=given.renewals, life_s=given.life_s, limit_s=given.limit_s
            )
            good = not kept.failed and not kept.certificate_forks and min(kept.renewals) >= given.renewals
            print(json.dumps(asdict(kept)))
        else:
            redeemed = redemptions(Path(folder), times=given.times, threads=given.threads)
            good = redeemed.certificates == redeemed.times and not redeemed.other
            print(json.dumps(asdict(redeemed)))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
