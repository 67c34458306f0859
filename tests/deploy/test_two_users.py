"""Gateway and trainer as the two users that deploy/ makes, in the folders that it makes: what they share, and what not.

The users exist in a root folder of their own only (`deploy/systemd/install` with DESTDIR); the kernel asks for no more
than their numbers. The trainer runs without network and without a way to gain rights, as its unit has it.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tools.machines import opening

REPOSITORY = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
NEEDED = ("systemd-sysusers", "systemd-tmpfiles", "unshare", "setpriv")
TIMEOUT_S = 60

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can run programs as two users"),
    pytest.mark.skipif(not all(map(shutil.which, NEEDED)), reason=f"needs {', '.join(NEEDED)}"),
]

STUDY = """
[study]
name = "small"
sites = ["st-olav"]
rounds = 2

[task]
name = "tabular"
label = "ill"
classes = ["no", "yes"]
features = ["age", "dose"]

[model]
name = "mlp"
hidden = [3]

[algorithm]
name = "fedavg"

[training]
local_steps = 2
batch_size = 4
"""

# What the gateway does in a round, as its user: describe, check, put the model into staging, have it trained, copy the
# update to where only it writes, accept it.
ROUND = """
import json, pathlib, sys
from fl_algorithms.resolving import resolve
from site_agent import handoff
from site_agent.gateway.exit.staging import Staging
from site_agent.state.directory import SiteState
from wardround.local import durable
from wardround.records import study, trainer as records
from wardround.tensors.files import TensorFile

state, initial = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
document = resolve(study.load(initial.parent / "study.toml")).document()
trainer = handoff.Trainer(state)
described = trainer.ask(records.Describe(study=document, site="st-olav"))
checked = trainer.ask(records.Check(study=document, site="st-olav", data="small"))
here, staging = SiteState(state), Staging(state / "staging")
here.make_folders()
durable.write_file(here.incoming / "base.safetensors", initial.read_bytes())
with TensorFile(here.incoming / "base.safetensors") as base:
    digest = base.manifest().digest()
staging.give(here.incoming / "base.safetensors", "base.safetensors")
trained = trainer.ask(records.Train(
    study=document, revision=1, study_digest=study.study_digest(document, digest), site="st-olav", round=1,
    base="base.safetensors", base_digest=digest, data=records.ApprovedData(name="small", digest=checked.digest),
))
staging.take(trained.update, here.own_copy("small"), 1 << 20)
with TensorFile(here.own_copy("small")) as file:
    names = [spec.name for spec in file.specs]
trainer.ask(records.Commit(study="small", revision=1, round=1))
staging.remove("base.safetensors")
staging.remove(trained.update)
print(json.dumps({
    "upload": [row.name for row in described.upload], "update": names, "examples": trained.num_examples,
    "status": trainer.ask(records.GetStatus()).to_document(),
}))
"""


def opened(command: list[str], *, net: bool = True) -> list[str]:
    """``command``, run where every user can run this Python; with ``net=False``, without network."""
    return ["unshare", "--mount", *([] if net else ["--net"]), *opening(command)]


@dataclass(frozen=True)
class User:
    """By number; no rights beside these, and none to gain."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()

    def command(self, *command: str | Path, net: bool = True) -> list[str]:
        groups = f"--groups={','.join(map(str, self.groups))}" if self.groups else "--clear-groups"
        become = ["setpriv", f"--reuid={self.uid}", f"--regid={self.gid}", groups, "--no-new-privs"]
        become += ["--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all"]
        return opened([*become, *map(str, command)], net=net)

    def run(self, *command: str | Path, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*command), umask=0o027, capture_output=True, text=True, timeout=TIMEOUT_S, cwd="/", check=False
        )
        assert code is None or done.returncode == code, done.stderr
        return done

    def can_read(self, path: Path) -> bool:
        return self.run("cat", path, code=None).returncode == 0


@dataclass(frozen=True)
class Hospital:
    root: Path
    gateway: User
    trainer: User

    @property
    def state(self) -> Path:
        return self.root / "var/lib/wardround/site"

    @property
    def table(self) -> Path:
        return self.root / "srv/wardround/tables/patients.csv"


@pytest.fixture(scope="module")
def hospital() -> Iterator[Hospital]:
    """The folders as `deploy/systemd/install site` makes them, and a table that root put there as README.md says."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        root.mkdir()
        Path(folder).chmod(0o755)
        subprocess.run(
            [REPOSITORY / "deploy/systemd/install", "site"], env={**os.environ, "DESTDIR": str(root)}, check=True,
            capture_output=True, timeout=TIMEOUT_S,
        )  # fmt: skip
        uid, gid = _numbers(root / "etc/passwd", 3), _numbers(root / "etc/group", 2)
        made = Hospital(
            root,
            User(uid["wardround"], gid["wardround"]),
            User(uid["wardround-trainer"], gid["wardround-trainer"], (gid["wardround"],)),
        )
        rows = [f"{30 + n},{n % 5},{'yes' if n % 3 else 'no'}" for n in range(40)]
        made.table.write_text("\n".join(["age,dose,ill", *rows]) + "\n")
        os.chown(made.table, 0, made.trainer.gid)
        made.table.chmod(0o640)
        yield made


@pytest.fixture(scope="module")
def listening(hospital: Hospital) -> Iterator[Hospital]:
    """The trainer, run as its unit runs it: its user, the group, no network, no rights to gain."""
    serve = [BIN / "site-agent", "run", "--only", "trainer", "--state", hospital.state]
    command = hospital.trainer.command(*serve, net=False)
    with subprocess.Popen(command, stdout=subprocess.PIPE, umask=0o027, cwd="/", text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        yield hospital
        process.terminate()
        assert process.wait(timeout=TIMEOUT_S) == 0


def _numbers(path: Path, column: int) -> dict[str, int]:
    rows = [line.split(":") for line in path.read_text().splitlines()]
    return {row[0]: int(row[2]) for row in rows if len(row) > column}


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_patients_are_open_to_the_trainer_and_closed_to_the_gateway(hospital: Hospital) -> None:
    assert hospital.trainer.can_read(hospital.table)
    assert not hospital.gateway.can_read(hospital.table)


def test_keys_and_ledger_are_open_to_the_gateway_and_closed_to_the_trainer(hospital: Hospital) -> None:
    make = "import pathlib, sys; from wardround.local import durable; p = pathlib.Path(sys.argv[1]); "
    make += "durable.make_folder(p.parent); durable.write_file(p, b'secret')"
    for place in ("identity/key.pem", "ledger/000001.jsonl", "outgoing/hearts.safetensors", "incoming/base-hearts-0"):
        hospital.gateway.run(sys.executable, "-c", make, hospital.state / place)
        assert hospital.gateway.can_read(hospital.state / place)
        assert not hospital.trainer.can_read(hospital.state / place)
        (hospital.state / place).unlink()
        (hospital.state / place).parent.rmdir()


def test_a_round_goes_through_between_the_two_users(listening: Hospital) -> None:
    shared = listening.root.parent / "operator"
    shared.mkdir(mode=0o755)
    (shared / "study.toml").write_text(STUDY)
    initial = shared / "initial.safetensors"
    subprocess.run(
        [BIN / "fl-lab", "init", shared / "study.toml", "--out", initial], check=True, timeout=TIMEOUT_S,
        capture_output=True,
    )  # fmt: skip
    initial.chmod(0o644)

    gateway, state = listening.gateway, listening.state
    add = ["data", "add", "small", "--table", listening.table, "--label", "ill", "--state", state]
    gateway.run(BIN / "site-agent", *add)
    assert _mode(state / "data.toml") == 0o640
    assert (state / "data.toml").stat().st_gid == gateway.gid

    said: dict[str, Any] = json.loads(gateway.run(sys.executable, "-c", ROUND, state, initial).stdout)
    assert said["update"] == said["upload"]
    assert said["examples"] == 32  # four fifths of 40
    assert said["status"]["isolation"] == "network-namespace"
    assert said["status"]["uid"] == listening.trainer.uid != gateway.uid

    studies = state / "studies"
    assert {path.stat().st_uid for path in studies.rglob("*")} == {listening.trainer.uid}
    assert not gateway.can_read(next(path for path in studies.rglob("*") if path.is_file()))
    assert [path.name for path in (state / "staging").iterdir()] == ["trainer.sock"]
    copy = state / "outgoing" / "small.safetensors"  # the trainer's user can neither read, replace nor remove it
    assert (copy.stat().st_uid, _mode(copy), _mode(copy.parent)) == (gateway.uid, 0o600, 0o700)
    assert not listening.trainer.can_read(copy)
    assert listening.trainer.run("rm", "-f", copy, code=None).returncode != 0
    assert listening.trainer.run("touch", copy.parent / "another", code=None).returncode != 0


def test_another_user_of_the_machine_reaches_neither(listening: Hospital) -> None:
    stranger = User(12345, 12345)
    assert stranger.run("ls", listening.state, code=None).returncode != 0
    assert stranger.run("ls", listening.table.parent, code=None).returncode != 0
