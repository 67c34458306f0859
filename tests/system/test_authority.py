"""The authority's key away from the service, and its successors: the commands of docs/operators.md, one after another,
against a coordinator that serves, with sites that keep calling.
"""

import datetime
import re
import shlex
from pathlib import Path

import pytest

from coordinator.members.authority import Authority
from coordinator.members.roots import RootFile, install, leave_root, request_intermediate, root_in_service
from site_agent.gateway.connection.interrupt import Interrupt
from site_agent.gateway.enrolment import renewal
from site_agent.gateway.enrolment.identity import Identity
from site_agent.gateway.enrolment.join import join
from site_agent.gateway.exit.ledger import Ledger
from site_agent.gateway.setup import open_session
from site_agent.state.directory import SiteState
from tests.coordinator.conftest import Place
from tools.world import CommandFailed, command
from wardround.errors import BadData, NeedsPerson, Unavailable, UsageProblem, WardroundError
from wardround.signing import certificates, chains

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operators.md"
SECRET = b"correct horse battery"


class Member:
    """A site that joined, and its connection, which it keeps."""

    def __init__(self, place: Place, folder: Path, name: str) -> None:
        self.state = SiteState(folder / name)
        join(self.state, place.invite(name))
        self.site, self.own = self.state.site(), Identity(self.state.identity)
        self.ledger = Ledger(self.state.ledger, self.own.ledger_key())
        self.session = open_session(self.site, self.own)

    def call(self) -> None:
        with self.session.use() as connection:
            connection.studies(Interrupt(), patient=False)

    def call_anew(self) -> None:
        """On a connection of its own, with the handshake."""
        fresh = open_session(self.site, self.own)
        try:
            with fresh.use() as connection:
                connection.studies(Interrupt(), patient=False)
        finally:
            fresh.close()

    def renew(self) -> None:
        renewal.renew(self.own, self.site, self.session, self.ledger)
        self.call()

    def roots(self) -> list[str]:
        return [certificates.fingerprint(root) for root in self.own.roots()]

    def close(self) -> None:
        self.session.close()
        self.ledger.close()


def commands_under(heading: str) -> list[str]:
    """The commands of the first code block under a heading of the page."""
    section = PAGE.read_text().partition(f"# {heading}\n")[2]
    block = re.search(r"```\n(.*?)```", section, re.DOTALL)
    assert block is not None
    return block[1].splitlines()


def run(line: str, folder: Path, place: Place, ok: tuple[int, ...] = (0,)) -> str:
    """A command of the page, with its files in ``folder`` and the coordinator's directory in the place of DIR."""
    program, *words = shlex.split(line)
    here = [
        str(place.state.root) if word == "DIR" else str(folder / word) if re.fullmatch(r"[\w-]+\.\w+", word) else word
        for word in words
    ]
    return command(program, *here, ok=ok)


def test_the_commands_of_the_page_take_the_root_away_and_roll_over_while_everybody_goes_on(
    place: Place, tmp_path: Path
) -> None:
    (tmp_path / "passphrase.txt").write_bytes(SECRET + b"\n")
    early, late = (Member(place, tmp_path, name) for name in ("early", "late"))
    members = (early, late)
    try:
        for heading in ("Keep the root's key elsewhere", "A new intermediate, each year"):
            for line in commands_under(heading):
                run(line, tmp_path, place)
                for member in members:
                    member.call()
                    member.call_anew()
        assert not (place.state.authority / "key.pem").exists()
        assert b"ENCRYPTED PRIVATE KEY" in (tmp_path / "root.pem").read_bytes()
        early.renew()
        first = early.roots()
        assert len(chains.load_chain(early.own.certificate_file.read_bytes(), "")) == 2

        *steps, retire = commands_under("A new root")
        for line in steps:
            shown = run(line, tmp_path, place)
            for member in members:
                member.call()
                member.call_anew()
        assert "sites that have not renewed since: early, late" in shown
        early.renew()
        early.call_anew()
        new = certificates.fingerprint(place.coordinator.context.authority.certificate)
        assert early.roots() == [new, *first]
        with pytest.raises(CommandFailed, match="have not renewed their certificate since the newest root came: late"):
            run(retire, tmp_path, place)
        late.call_anew()
        late.renew()
        newcomer = Member(place, tmp_path, "newcomer")
        members = (*members, newcomer)
        newcomer.call()
        assert newcomer.roots() == [new]

        run(retire, tmp_path, place)
        for member in members:
            member.call()
            member.call_anew()
            member.renew()
            member.call_anew()
            assert member.roots() == [new]
        place.restart()
        for member in members:
            member.call_anew()
    finally:
        for member in members:
            member.close()


def test_a_site_that_a_retired_root_locks_out_comes_back_with_an_invitation_and_a_fingerprint(
    place: Place, tmp_path: Path
) -> None:
    authority = place.coordinator.context.authority
    late = Member(place, tmp_path, "late")
    late.call()
    try:
        old = root_in_service(authority)
        leave_root(authority, now())
        new = old.successor(now())
        install(authority, new.signs(request_intermediate(authority), now()))
        answer = place.ask("authority-retire", anyway=True)
        assert answer["behind"] == ["late"]
        with pytest.raises(Unavailable):
            late.call_anew()
    finally:
        late.close()
    fingerprint = certificates.fingerprint(new.certificate)
    text = place.invite("late")
    with pytest.raises(NeedsPerson, match="names another authority"):
        join(late.state, text)
    join(late.state, text, authority=fingerprint)
    again = Identity(late.state.identity)
    assert [certificates.fingerprint(root) for root in again.roots()] == [fingerprint]


def now() -> float:
    return datetime.datetime.now(datetime.UTC).timestamp()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "authority", "north", now())


def test_a_stranger_cannot_bring_a_root_of_his_own_into_service(authority: Authority, tmp_path: Path) -> None:
    leave_root(authority, now())
    stranger = Authority.create(tmp_path / "stranger", "north", now())
    bundle = root_in_service(stranger).signs(request_intermediate(authority), now())
    before = {path: path.read_bytes() for path in authority.folder.iterdir()}
    with pytest.raises(BadData, match="another authority"):
        install(authority, bundle)
    assert {path: path.read_bytes() for path in authority.folder.iterdir()} == before


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("unasked", "no certificate was requested here"),
        ("key", "not of the key that was requested here last"),
        ("leaf", "is not an intermediate with the one root that signed it"),
        ("text", "not a certificate in PEM"),
    ],
)
def test_what_is_not_the_certificate_that_was_asked_for_is_not_installed(
    authority: Authority, spoil: str, said: str
) -> None:
    root = root_in_service(authority)
    leave_root(authority, now())
    if spoil != "unasked":
        request = request_intermediate(authority)
    bundle = b"hello"
    if spoil == "key":
        bundle = root.signs(request, now())
        request_intermediate(authority)
    elif spoil == "leaf":
        key = certificates.load_key((authority.folder / "requested-key.pem").read_bytes(), "")
        name = certificates.Name("north", "site", "alpha")
        bundle = chains.chain_pem((authority.leaf(name, key.public_key(), now(), 600), authority.certificate))
    with pytest.raises(WardroundError, match=said):
        install(authority, bundle)


def test_a_second_new_root_waits_until_the_first_one_is_alone(authority: Authority) -> None:
    root = root_in_service(authority)
    leave_root(authority, now())
    second = root.successor(now())
    install(authority, second.signs(request_intermediate(authority), now()))
    third = second.successor(now())
    with pytest.raises(NeedsPerson, match="the root before the present one is still trusted"):
        install(authority, third.signs(request_intermediate(authority), now()))


def test_the_roots_file_opens_with_its_passphrase_alone(authority: Authority) -> None:
    root = root_in_service(authority)
    with pytest.raises(UsageProblem, match="fewer than 12 characters"):
        root.encrypted(b"short")
    pem = root.encrypted(SECRET)
    assert RootFile.decrypted(pem, SECRET, "root.pem").certificate == authority.certificate
    for wrong in (b"", b"another passphrase"):
        with pytest.raises(BadData, match="not a root's key, or under another passphrase"):
            RootFile.decrypted(pem, wrong, "root.pem")
    leave_root(authority, now())
    with pytest.raises(NeedsPerson, match="it was exported before"):
        root_in_service(authority)


def test_while_the_roots_key_is_in_service_nothing_is_requested(authority: Authority) -> None:
    with pytest.raises(NeedsPerson, match="the root's key is still in"):
        request_intermediate(authority)


def test_a_leaf_never_outlives_what_signs_it_and_nothing_is_signed_after_its_end(authority: Authority) -> None:
    leave_root(authority, now())
    name, key = certificates.Name("north", "site", "alpha"), certificates.new_key().public_key()
    end = authority.signing.certificate.not_valid_after_utc
    leaf = authority.leaf(name, key, end.timestamp() - 60, 7 * 86400)
    assert leaf.not_valid_after_utc == end
    with pytest.raises(NeedsPerson, match="the certificate that signs ended on"):
        authority.leaf(name, key, end.timestamp() + 1, 7 * 86400)
