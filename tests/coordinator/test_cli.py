"""The commands, as processes: what they print, their exit codes, with and without a running service."""

import json
import re
import shutil
import socket
import sqlite3
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.answers import SiteList, SiteRow
from coordinator.cli import asking, members, models
from coordinator.cli.main import app
from coordinator.member_answers import Noted
from coordinator.requests import NoteExport
from coordinator.state_directory import State
from coordinator.storage import tables
from coordinator.storage.database import Store
from coordinator.storage.schema import newest_schema
from tests import commands as processes
from tests.coordinator.fake_site import FakeSite, write_initial
from tools.world import Service, free_port
from wardround.errors import NeedsPerson, TryAgain
from wardround.local import control, directory
from wardround.records.invitation import Invitation
from wardround.signing import certificates
from wardround.tensors.files import TensorFile

BIN = Path(sys.executable).parent
STUDY = """
[study]
name = "trial"
sites = ["alpha", "bravo"]
rounds = 2
quorum = 1
round_deadline_s = 2
[task]
name = "tabular"
label = "y"
classes = ["0", "1"]
features = [{ name = "x" }]
[model]
name = "mlp"
[algorithm]
name = "fedavg"
[training]
local_steps = 1
"""


class Commands:
    """``coordinator`` on one state directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.address = f"127.0.0.1:{free_port()}"
        self.study = folder / "study.toml"
        self.study.write_text(STUDY)
        self.initial = folder / "initial.safetensors"
        write_initial(self.initial)
        self.service: Service | None = None

    def run(self, *args: str | Path, code: int = 0) -> tuple[str, str]:
        line = args if args[:2] == ("study", "check") else (*args, "--state", self.state)
        done = processes.run("coordinator", *line)
        assert done.returncode == code, (line, done.returncode, done.stdout, done.stderr)
        return done.stdout, done.stderr

    def serve(self) -> Service:
        self.service = Service(self.folder / "log", "coordinator", "serve", "--state", self.state)
        assert self.service.wait_line("ready") == f"ready {self.address}"
        return self.service

    def create(self) -> str:
        return self.run("study", "create", self.study, "--initial", self.initial)[0]


@pytest.fixture(scope="module")
def initialized(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    """A coordinator's state as ``init`` makes it, to be copied."""
    commands = Commands(tmp_path_factory.mktemp("initialized"))
    commands.run("init", "--federation", "north", "--address", commands.address)
    return commands


@pytest.fixture
def commands(tmp_path: Path, initialized: Commands) -> Iterator[Commands]:
    commands = Commands(tmp_path)
    commands.address = initialized.address
    shutil.copytree(initialized.state, commands.state)
    yield commands
    if commands.service:
        commands.service.kill()


def test_init_writes_keys_that_only_this_user_reads_and_names_the_next_step(tmp_path: Path) -> None:
    commands = Commands(tmp_path)
    out, said = commands.run("init", "--federation", "north", "--address", commands.address)
    assert out == ""
    assert re.search(r"fingerprint [0-9a-f]{64}\nnext: `coordinator serve", said)
    for name in ("authority/key.pem", "keys/receipt.pem", "coordinator.db"):
        assert (commands.state / name).stat().st_mode & 0o777 == 0o600
    assert commands.state.stat().st_mode & 0o777 == 0o700


def test_several_sites_are_invited_at_once_and_each_invitation_is_a_file_of_its_own(commands: Commands) -> None:
    out, _ = commands.run("invite", "alpha", "bravo", "alpha")
    assert [Invitation.decode(line).site for line in out.split()] == ["alpha", "bravo"]
    folder = commands.folder / "invitations"
    out, said = commands.run("invite", "alpha", "bravo", "--out", folder)
    assert out == ""
    assert f"Invitation written to {folder / 'alpha.invitation'}: send it to `alpha` alone, then delete it" in said
    for site in ("alpha", "bravo"):
        path = folder / f"{site}.invitation"
        assert Invitation.decode(path.read_text()).site == site
        assert path.stat().st_mode & 0o777 == 0o600


def test_init_again_changes_nothing(commands: Commands) -> None:
    before = (commands.state / "authority" / "key.pem").read_bytes()
    _, said = commands.run("init", "--federation", "north", "--address", commands.address, code=78)
    assert said.startswith(f"error: {commands.state} holds a coordinator already; nothing was changed\n")
    assert (commands.state / "authority" / "key.pem").read_bytes() == before


@pytest.mark.parametrize(
    ("federation", "address", "said"),
    [
        ("North", "127.0.0.1:8443", "'North' is not a name of 1 to 63 of a-z, 0-9, . and -"),
        ("north", "127.0.0.1", "'127.0.0.1' is not HOST:PORT"),
        ("north", "127.0.0.1:99999", "'127.0.0.1:99999' is not HOST:PORT"),
        ("north", "a_b:8443", "'a_b' is neither a host name nor an IP address"),
    ],
)
def test_init_with_a_wrong_name_or_address_is_a_usage_error(
    tmp_path: Path, federation: str, address: str, said: str
) -> None:
    commands = Commands(tmp_path)
    _, errors = commands.run("init", "--federation", federation, "--address", address, code=64)
    assert said in errors
    assert "hint: as in --federation north --address fed.example.org:8443" in errors
    assert not commands.state.exists()


@pytest.mark.parametrize("address", ["fed.example.org:8443", "[::1]:8443", "10.0.0.7:443"])
def test_names_and_addresses_of_either_kind_are_taken(tmp_path: Path, address: str) -> None:
    Commands(tmp_path).run("init", "--federation", "north.example", "--address", address)


def test_a_command_where_no_coordinator_is_says_how_to_make_one(tmp_path: Path) -> None:
    _, said = Commands(tmp_path).run("sites", code=78)
    assert said.startswith(f"error: {tmp_path / 'state'} holds no coordinator\nhint: make one: `coordinator init ")


def test_invite_prints_the_invitation_and_only_it(commands: Commands) -> None:
    out, said = commands.run("invite", "alpha", "--expires", "2h")
    invitation = Invitation.decode(out)
    assert (invitation.site, invitation.address, invitation.federation) == ("alpha", commands.address, "north")
    assert out.count("\n") == 1
    assert said.startswith("It can be used once, until 20")
    _, said = commands.run("invite", "alpha", "--expires", "soon", code=64)
    assert said == "error: `--expires soon` is not a span of time\nhint: as in 30m, 24h or 7d\n"


@pytest.mark.parametrize("served", [False, True], ids=["alone", "with a service"])
@pytest.mark.chaos
def test_the_commands_do_the_same_with_and_without_a_service(commands: Commands, served: bool) -> None:
    if served:
        commands.serve()
    commands.run("invite", "alpha")
    told = json.loads(commands.run("sites", "--json")[0])
    unsaid = ("certificate_expires", "last_seen", "certificate_fork_since", "copied_since", "ledger_key")
    nothing = dict.fromkeys(unsaid)
    assert told["sites"] == [{"site": "alpha", "state": "invited", **nothing}]
    assert len(bytes.fromhex(told["receipt_key"])) == 32
    said = commands.run("sites")[0]
    assert "alpha   invited" in said
    assert f"receipt key: {told['receipt_key']}\n" in said
    name, digest = commands.create().split()
    assert (name, len(digest)) == ("trial", 64)
    _, said = commands.run("study", "start", "trial")
    assert said.startswith("Study `trial` is waiting for alpha, bravo to approve it\n")
    status = json.loads(commands.run("study", "status", "trial", "--json")[0])
    assert (status["id"], status["state"], status["round"], status["rounds"]) == ("trial", "waiting", 0, 2)
    assert status["study_digest"] == digest
    assert len(status["model_digest"]) == 64
    assert status["sites"]["alpha"] == {
        "state": "waiting", "code": "", "ready": False, "rounds_contributed": [], "rounds_left_out": [],
        "rounds_capped": [], "rounds_late": [], "always_late": False, "expected": None, "expects_to_be_late": False,
        "connected": False, "fit": None, "seconds": None, "slow": False, "absences": {}, "attempts_spent": False,
        "evaluates": False, "rounds_evaluated": [],
    }  # fmt: skip
    told = json.loads(commands.run("study", "report", "trial", "--json")[0])
    assert told["rounds_closed"] == []
    commands.run("study", "stop", "trial")
    assert "trial (revision 1): stopped, round 0 of 2" in commands.run("study", "status", "trial")[0]
    commands.run("revoke", "alpha")
    assert json.loads(commands.run("sites", "--json")[0])["sites"] == []


def test_sites_says_where_two_hold_the_keys(commands: Commands) -> None:
    opened = Store(State(commands.state).database)
    with opened.write() as session:
        session.add(
            tables.Site(name="alpha", enrolled_s=0, ledger_key="", last_receipt="", certificate_fork_s=1_790_000_000)
        )
    opened.close()
    out, said = commands.run("sites")
    assert "alpha   enrolled" in out
    assert said == (
        "Site `alpha`: two machines hold its keys since 2026-09-21T14:13:20Z (a copy, or a theft)\n"
        "next: ask its people; if nobody there knows of a copy, "
        f"`coordinator revoke alpha --state {commands.state}`\n"
    )


def test_sites_says_where_two_programs_run_with_one_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = SiteRow(site="alpha", state="connected", copied_since="2026-09-21T14:13:20Z")
    monkeypatch.setattr(members, "ask", lambda *_: SiteList(sites=(row,), receipt_key="ab"))
    members.sites(tmp_path)
    assert capsys.readouterr().err == (
        "Site `alpha`: two programs run with its identity, seen since 2026-09-21T14:13:20Z\n"
        "next: ask its people which of the two machines goes on, and have the other one stopped\n"
    )


def test_unknown_studies_and_sites_are_named(commands: Commands) -> None:
    _, said = commands.run("study", "status", "nothing", code=65)
    assert said == "error: there is no study `nothing` here\nhint: studies here: none yet\n"
    _, said = commands.run("revoke", "nobody", code=65)
    assert said == (
        f"error: no site `nobody` is known here\nhint: `coordinator sites --state {commands.state}` lists them\n"
    )


def test_following_without_a_service_says_how_to_start_one(commands: Commands) -> None:
    commands.create()
    _, said = commands.run("study", "status", "trial", "--follow", code=69)
    assert said.startswith(f"error: the coordinator at {commands.state} does not run\n")


def test_study_check_prints_the_study_with_its_defaults_and_refuses_a_wrong_key(commands: Commands) -> None:
    out, said = commands.run("study", "check", commands.study)
    assert json.loads(out)["training"]["batch_size"] == 32
    weight = "limit: one site's averaging weight is at most 0.5 of a mean of three or more sites"
    assert f"{weight}\nlimit: an update's norm is " in said
    assert said.endswith(f"next: `coordinator study create {commands.study}`\n")
    commands.study.write_text(STUDY.replace("local_steps", "local_step"))
    _, said = commands.run("study", "check", commands.study, code=65)
    assert "error: study.toml: unknown key `local_step` in [training]\nhint: did you mean `local_steps`?" in said


def test_a_study_with_secure_aggregation_waits_until_its_sites_have_enrolled(commands: Commands) -> None:
    commands.study.write_text(
        STUDY.replace('"bravo"]', '"bravo", "carol"]').replace("quorum = 1\n", "")
        + "[limits]\nmax_weight = 1.0\n[secure_aggregation]\nrange = 1.0\n"
    )
    _, said = commands.run("study", "create", commands.study, "--initial", commands.initial, code=78)
    assert "with [secure_aggregation] a study names its sites' keys, and alpha, bravo, carol have not enrolled" in said
    assert (
        f"hint: `coordinator invite alpha --state {commands.state}`, and create the study when all have joined" in said
    )
    out, _ = commands.run("study", "list", "--json")
    assert json.loads(out) == {"studies": []}


def test_study_check_compares_what_several_networks_share_where_torch_is(commands: Commands) -> None:
    pytest.importorskip("torch")
    two = STUDY.replace('name = "mlp"', 'name = "mlp"\nhidden = [3]\n[networks.wide]\nname = "mlp"\nhidden = [5]')
    commands.study.write_text(two)
    _, said = commands.run("study", "check", commands.study, code=65)
    assert (
        "error: `fl-lab init study.toml` failed: network `wide` of [networks] shares `body.layers.0.bias` [5]" in said
    )
    assert "\nhint: methods for different networks: mhpflgb" in said


def test_without_torch_study_create_names_the_command_that_makes_the_initial_model(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from coordinator.cli import initial, main

    monkeypatch.setattr(initial, "find_spec", lambda name: None)
    monkeypatch.setattr(
        sys, "argv", ["coordinator", "study", "create", str(commands.study), "--state", str(commands.state)]
    )
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 78
    said = capsys.readouterr().err
    assert "error: making a study's initial model needs torch, which is not installed here\n" in said
    assert "`fl-lab init study.toml --out initial.safetensors`" in said
    assert "`--initial initial.safetensors`" in said


@pytest.mark.chaos
def test_study_create_makes_the_initial_model_where_torch_is(commands: Commands) -> None:
    pytest.importorskip("torch")
    out, _ = commands.run("study", "create", commands.study)
    again, said = commands.run("study", "create", commands.study)
    assert out == again
    assert "known with exactly this content, at revision 1" in said


def test_an_initial_file_that_is_none_is_refused(commands: Commands) -> None:
    commands.initial.write_bytes(b"not tensors")
    _, said = commands.run("study", "create", commands.study, "--initial", commands.initial, code=65)
    assert f"error: {commands.initial}: not a safetensors file" in said


def test_a_second_service_on_the_same_state_is_refused(commands: Commands) -> None:
    service = commands.serve()
    _, said = commands.run("serve", code=75)
    assert f"{commands.state} is in use by coordinator serve (process {service.process.pid})" in said


def test_an_address_in_use_is_named(commands: Commands) -> None:
    host, port = commands.address.split(":")
    with socket.create_server((host, int(port))):
        _, said = commands.run("serve", code=69)
    assert f"error: cannot listen at {commands.address}: it is in use, or not an address of this machine\n" in said


@pytest.mark.fresh
def test_the_service_stops_cleanly_on_sigterm_and_can_listen_elsewhere(commands: Commands) -> None:
    assert commands.serve().stop() == 0
    listen = f"127.0.0.1:{free_port()}"
    other = Service(commands.folder / "log", "coordinator", "serve", "--state", commands.state, "--listen", listen)
    assert other.wait_line("ready") == f"ready {listen}"
    assert other.stop() == 0
    assert not (commands.state / "control.sock").exists()


def test_a_study_that_finishes_without_some_sites_exits_3_and_the_report_names_them(commands: Commands) -> None:
    commands.serve()
    alpha = FakeSite(commands.run("invite", "alpha")[0])
    bravo = FakeSite(commands.run("invite", "bravo")[0])
    commands.create()
    alpha.watch()
    bravo.declare("trial")
    worker = alpha.work("trial")
    commands.run("study", "start", "trial")
    out, said = commands.run("study", "status", "trial", "--follow", code=3)
    assert out.splitlines()[-1].startswith("finished  closing  alpha: accepted  bravo: ")
    assert "Finished without some sites in some rounds: bravo" in said
    page = commands.folder / "report.html"
    out, _ = commands.run("study", "report", "trial", "--out", page, code=3)
    assert "not in every round: bravo" in out
    rule = (
        "best global model: the one whose validation losses at the sites have the smallest mean, where each site's "
        "loss is weighted by its validation rows as reported; of three or more sites none weighs more than 0.5 of all\n"
    )
    assert rule in out
    html = page.read_text()
    assert "Not in every round: bravo" in html
    assert "bravo: no answer" in html
    assert "<script" not in html
    assert "<svg" in html
    told = json.loads(commands.run("study", "report", "trial", "--json", code=3)[0])
    assert [row["contributors"] for row in told["rounds_closed"]] == [["alpha"], ["alpha"]]
    assert all(row["seconds"] > 0 for row in told["rounds_closed"])
    assert told["sites"]["alpha"]["bytes_received"] == 2 * 32
    assert told["sites"]["bravo"]["bytes_received"] == 0
    worker.join(20)
    for site in (alpha, bravo):
        site.close()
    exported(commands.state, commands.folder / "model", told)


def exported(state: Path, folder: Path, told: dict[str, Any]) -> None:
    """The model of a study in which one of two sites took part, where there is no torch."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(models, "has_torch", lambda: False)
        words = ["models", "export", "trial", "--out", folder, "--state", state]
        done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
        with pytest.raises(NeedsPerson, match="the weights are written, and ONNX is not: torch is not installed here"):
            CliRunner().invoke(app, [*map(str, words), "--force", "--onnx"], catch_exceptions=False)
    names = ("card.json", "study.json", "MODEL_CARD.md", "model.safetensors")
    assert done.stdout.split() == [str(folder / name) for name in names]
    assert "warning: without a program: torch is not installed here; where it is: `fl-lab program" in done.stderr
    card = json.loads((folder / "card.json").read_text())
    assert (card["round"], card["rounds"], card["state"]) == (told["best"]["round"], 2, "finished")
    assert card["kept_digest"] == told["best"]["digest"]
    assert card["contributors"] == {"alpha": list(range(1, card["round"] + 1)), "bravo": []}
    assert set(card["scores"]) == {"alpha"}
    with TensorFile(folder / "model.safetensors") as file:
        assert file.manifest().digest() == card["model_digest"] == card["kept_digest"]
        assert json.loads(file.note["card"]) == card
    page = (folder / "MODEL_CARD.md").read_text()
    assert f"- bravo: in 0 of {card['round']} rounds\n" in page
    assert "are not known at the coordinator" in page
    assert "| alpha | bravo |" in page


def handshake(site: FakeSite, folder: Path, version: ssl.TLSVersion) -> str | None:
    """The TLS version of a connection on which the server answers, None where it closes."""
    for name, data in (("key", certificates.key_pem(site.key)), ("leaf", site.reply.certificate)):
        (folder / name).write_bytes(data)
    context = ssl.create_default_context(cadata=site.reply.authority.decode())
    context.minimum_version = context.maximum_version = version
    context.load_cert_chain(folder / "leaf", folder / "key")
    context.set_alpn_protocols(["h2"])
    host, port = site.invitation.address.split(":")
    with socket.create_connection((host, int(port)), timeout=20) as raw:
        try:
            with context.wrap_socket(raw, server_hostname=host) as tls:
                tls.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
                return tls.version() if tls.recv(9) else None
        except ssl.SSLError:
            return None


def test_tls_1_3_with_a_sites_certificate_is_served_and_tls_1_2_refused(commands: Commands, tmp_path: Path) -> None:
    commands.serve()
    alpha = FakeSite(commands.run("invite", "alpha")[0])
    assert handshake(alpha, tmp_path, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
    assert handshake(alpha, tmp_path, ssl.TLSVersion.TLSv1_2) is None
    alpha.close()


def edit(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()


@pytest.mark.parametrize(
    ("spoil", "said", "hint"),
    [
        pytest.param(
            lambda path: edit(path, "UPDATE alembic_version SET version_num = '9999'"),
            "has schema 9999, which this program does not know: a newer one wrote it",
            "install the newer version again",
            id="newer",
        ),
        pytest.param(
            lambda path: edit(path, "DELETE FROM alembic_version"),
            f"has schema none, this program needs {newest_schema()}",
            "`coordinator upgrade --state",
            id="older",
        ),
        pytest.param(
            lambda path: path.write_bytes(b"x" * 4096), "is damaged", "`coordinator restore BACKUP", id="no database"
        ),
        pytest.param(
            lambda path: path.unlink(),
            "the database is missing or cannot be opened",
            "if you have it, put it back; else keep",
            id="gone",
        ),
    ],
)
def test_a_database_that_is_not_ours_is_refused_and_never_made_anew(
    commands: Commands, spoil: Any, said: str, hint: str
) -> None:
    path = commands.state / "coordinator.db"
    spoil(path)
    kept = path.read_bytes() if path.exists() else None
    for command in (("serve",), ("sites",)):
        _, errors = commands.run(*command, code=78)
        assert said in errors
        assert hint in errors
    assert (path.read_bytes() if path.exists() else None) == kept


@pytest.mark.chaos
def test_a_backup_is_restored_and_each_study_that_went_on_has_a_new_revision(commands: Commands) -> None:
    commands.create()
    commands.run("study", "start", "trial")
    backup = commands.folder / "backup"
    _, said = commands.run("backup", "--out", backup)
    assert re.match(r"\d+ files, as they were at \d{4}-.*Z, written to .*backup\nit holds the federation's keys", said)
    _, said = commands.run("restore", backup, code=64)
    assert f"{commands.state} is there already; nothing was changed" in said
    assert f"hint: keep it aside first: `mv {commands.state} {commands.state}.old`" in said
    commands.state.rename(commands.state.with_name("old"))
    out, said = commands.run("restore", backup)
    assert re.fullmatch(r"trial [0-9a-f]{64}\n", out)
    assert re.search(r"restored what was backed up at \S+Z, \d+ files, all whole\n", said)
    assert "Study `trial`, revision 2: begins from its first model, 2 rounds\n" in said
    assert "sites that were invited or revoked since then: invite or revoke them again\n" in said
    assert re.search(
        r"next: `coordinator serve.*`\nthen: each site runs `site-agent approve trial --data NAME`, and ", said
    )
    assert "created" in commands.run("study", "list")[0]
    _, said = commands.run("study", "renew", "trial")
    assert "Study `trial`, revision 3: begins from its first model, 2 rounds\n" in said
    commands.run("study", "stop", "trial")
    _, said = commands.run("study", "archive", "trial")
    assert said.startswith(
        "Study `trial`, which is stopped, is archived: no site is told of it, and `study list` leaves"
    )
    assert "trial" not in commands.run("study", "list")[0]
    (row,) = json.loads(commands.run("study", "list", "--archived", "--json")[0])["studies"]
    assert row == {
        "id": "trial", "revision": 3, "state": "stopped", "round": 0, "rounds": 2, "archived": True, "title": "",
        "sites": 2, "approved": 0, "why": "",
    }  # fmt: skip


def test_upgrade_brings_an_older_database_to_this_version(commands: Commands) -> None:
    commands.run("invite", "alpha")
    _, said = commands.run("upgrade")
    assert said == f"{commands.state / 'coordinator.db'} is ready for this version\n"
    assert "alpha" in commands.run("sites")[0]


@pytest.mark.parametrize(
    ("name", "said"),
    [("authority/key.pem", "not a private key in PEM"), ("keys/receipt.pem", "not a private key in PEM")],
)
def test_a_damaged_key_is_named(commands: Commands, name: str, said: str) -> None:
    (commands.state / name).write_bytes(b"nonsense")
    _, errors = commands.run("serve", code=65)
    assert errors.startswith(f"error: {commands.state / name}: {said}")


def test_help_loads_no_grpc_no_database_and_no_numpy() -> None:
    look = (
        "import sys, coordinator.cli.main\n"
        "print([m for m in ('grpc', 'sqlalchemy', 'numpy', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_service_loads_no_torch_nothing_that_changes_a_schema_no_server_of_metrics_and_no_other_database() -> None:
    look = (
        "import sys, coordinator.server\n"
        "print({'torch', 'alembic', 'mako', 'pygments', 'jinja2', 'http.server', 'sqlalchemy.dialects.postgresql'}"
        " & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_sites_directory_is_refused_also_while_its_agent_listens_there(commands: Commands) -> None:
    record = commands.state / directory.SITE
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(commands.state / "control.sock"))
        agent.listen()
        _, said = commands.run("sites", code=78)
    assert "is a site's state directory" in said


def test_a_command_that_is_given_while_the_service_starts_is_answered_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`systemctl start` returns before there is a socket; the command finds none, and then the lock taken."""
    (tmp_path / directory.COORDINATOR).write_text("")
    answers = iter([False, True])
    monkeypatch.setattr(control, "serves", lambda state, socket: next(answers))
    monkeypatch.setattr(control, "call", lambda *args, **options: {"federation": "north"})

    def taken(*args: object) -> object:
        raise TryAgain("in use")

    monkeypatch.setattr(asking, "_answer_here", taken)
    assert asking.ask(tmp_path, NoteExport(), Noted) == Noted(federation="north")
    answers = iter([False, False])
    with pytest.raises(TryAgain, match="in use"):
        asking.ask(tmp_path, NoteExport(), Noted)
