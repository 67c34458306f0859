"""The commands as a person or a script gives them, in processes of their own."""

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import commands
from tests.site_agent.shell import AGENT, WAIT_S, Shell
from tests.site_agent.site_world import STUDY, document
from tools.world import wait_until
from wardround.v1 import federation_pb2 as pb


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    try:
        yield shell
    finally:
        shell.close()


@pytest.mark.parametrize(
    ("modules", "without"),
    [
        pytest.param("site_agent.cli.main", {"torch", "grpc", "numpy", "cryptography"}, id="help"),
        pytest.param(
            "site_agent.cli.status, site_agent.gateway.status, site_agent.gateway.requests",
            {"torch", "grpc", "numpy", "sqlalchemy"},
            id="a command that asks the service",
        ),
        pytest.param(
            "site_agent.cli.status, site_agent.gateway.status, site_agent.gateway.service_requests",
            {"google.protobuf", "wardround.records.ledger.entries", "site_agent.gateway.policy"},
            id="status",
        ),
        pytest.param("site_agent.gateway.service", {"torch", "sqlalchemy", "http.server"}, id="the gateway"),
        pytest.param(
            "site_agent.trainer.listener",
            {"torch", "grpc", "numpy", "cryptography", "google.protobuf"},
            id="the trainer's listener",
        ),
    ],
)
def test_what_answers_or_waits_loads_no_library_that_it_does_not_need(modules: str, without: set[str]) -> None:
    look = f"import {modules}, sys; print({without!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_join_says_what_it_wrote_and_what_is_next(shell: Shell) -> None:
    said = shell.join().stdout
    assert f"Coordinator {shell.coordinator.address} of federation `test` verified" in said
    assert "Authority's fingerprint " in said
    assert f"Key written to {shell.state}/identity/key.pem, readable by this user only" in said
    assert f"Certificate for `st-olav` written to {shell.state}/identity/certificate.pem, valid to " in said
    assert said.splitlines()[-1].startswith("next: `site-agent data add")


def test_join_reads_the_invitation_from_a_file(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "invitation").write_text(shell.coordinator.invite("st-olav") + "\n")
    shell.run("join", "--invitation", str(tmp_path / "invitation"))


def test_join_asks_for_the_invitation_and_does_not_show_it(shell: Shell) -> None:
    invitation = shell.coordinator.invite("st-olav")
    ours, theirs = pty.openpty()
    line = [*AGENT, "join", "--state", str(shell.state)]
    with subprocess.Popen(
        line, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, text=True, start_new_session=True
    ) as process:
        shown = os.read(ours, 1000).decode()
        assert shown == "Invitation (not shown): "
        os.write(ours, invitation.encode() + b"\n")
        out, _ = process.communicate(timeout=WAIT_S)
    os.write(theirs, b"end")
    shown += os.read(ours, 100_000).decode()
    os.close(ours)
    os.close(theirs)
    assert process.returncode == 0, shown
    assert invitation[:40] not in shown + out


def test_join_never_takes_the_invitation_as_an_argument(shell: Shell) -> None:
    said = shell.run("join", "--invitation", shell.coordinator.invite("st-olav"), code=64).stderr
    assert "error: the invitation is a secret and must not be an argument" in said
    assert "--invitation FILE" in said
    wrapped = shell.run("join", "--invitation", "Here it is: " + shell.coordinator.invite("st-olav"), code=64).stderr
    assert "wr1." not in wrapped


def test_join_without_a_terminal_or_a_file_says_how(shell: Shell) -> None:
    said = shell.run("join", code=64).stderr
    assert said.startswith(
        "error: no invitation was given, and there is no terminal to ask at\nhint: give --invitation FILE"
    )


def test_a_missing_invitation_file_is_named(shell: Shell) -> None:
    said = shell.run("join", "--invitation", "/nowhere/invitation", code=65).stderr
    assert "error: /nowhere/invitation: No such file or directory" in said


def test_commands_before_a_join_say_that_there_is_none(shell: Shell) -> None:
    for line in (["studies"], ["status"], ["run"], ["preview", "x"], ["approve", "x", "--data", "d"]):
        said = shell.run(*line, code=78).stderr
        assert f"error: {shell.state} has not joined a federation" in said
        assert "hint: `site-agent join" in said


@pytest.mark.parametrize(
    "line",
    [
        ("data", "list"), ("data", "check", "p", "--study", "x"), ("data", "public-data", "p", "/rows.csv"),
        ("models", "list", "x"), ("policy", "check"), ("audit", "show"), ("audit", "rollover"),
        ("audit", "report", "--out", "page.html"), ("leave",),
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_command_in_a_folder_that_is_no_sites_exits_78_and_names_it(
    line: tuple[str, ...], tmp_path: Path
) -> None:
    nowhere = tmp_path / "nowhere"
    done = commands.run("site-agent", *line, "--state", nowhere, timeout=WAIT_S)
    assert done.returncode == 78, done.stderr
    assert str(nowhere) in done.stderr.splitlines()[0]
    assert not nowhere.exists()


def test_a_study_goes_from_offer_to_consent_without_a_service(shell: Shell) -> None:
    shell.join()
    digest = shell.offer()
    (row,) = shell.json("studies")["studies"]
    assert (row["id"], row["state"], row["study_digest"]) == (STUDY, "offered", digest)
    shown = shell.json("preview", STUDY)
    assert shown["study_digest"] == digest
    assert (shown["rounds"], shown["bytes_per_round"]) == (3, 64 * 64 * 4 + 64 * 4)
    assert [(leaf["name"], leaf["shape"]) for leaf in shown["leaves"]] == [
        ("shared.weight", [64, 64]), ("shared.bias", [64])
    ]  # fmt: skip
    assert shown["metrics"] == ["val_loss", "accuracy"]
    assert [stay["name"] for stay in shown["stays"]] == ["private.weight"]
    done = shell.approve()
    assert "warning: one class" in done.stderr
    assert done.stdout.splitlines()[-1] == "The coordinator is told at the next connection; next: `site-agent run`"
    assert shell.json("status")["studies"][0]["state"] == "approved"
    assert "withdrawn: nothing more of it leaves" in shell.run("withdraw", STUDY).stdout
    assert shell.json("status")["studies"][0]["state"] == "withdrawn"


def test_what_people_read_has_the_same_facts(shell: Shell) -> None:
    shell.join()
    digest = shell.offer()
    said = shell.run("preview", STUDY).stdout
    assert f"Study's digest: {digest[:16]}, revision 1" in said
    assert f"Digest of this account: {shell.json('preview', STUDY)['digest'][:16]}\n" in said
    assert "shared.weight" in said
    assert "private.weight" in said
    assert "2 tensors, 16.2 KiB each attempt, 3 rounds: 48.8 KiB in all with one attempt at each" in said
    assert "this site                         trains network mlp: 4224 parameters\n" in said
    assert said.splitlines()[-1] == f"next: `site-agent policy draft {STUDY}`, to say what may leave"
    assert shell.run("studies").stdout.splitlines()[-1] == f"next: `site-agent preview {STUDY}`"
    status = shell.run("status", NO_COLOR="1").stdout
    assert "Trainer's isolation: network-namespace" in status
    assert "\x1b[" not in status
    assert "genesis" in shell.run("audit", "show").stdout


def test_preview_and_approve_say_which_network_and_weights_the_data_has(shell: Shell) -> None:
    shell.join()
    shell.offer()
    assert shell.trainer is not None
    shell.trainer.network = "small"
    shell.trainer.weights = {"digest": "3e" * 32, "used": 1, "drawn": [], "unused": [f"fc.{i}" for i in range(8)]}
    begins = (
        f"1 of the tensors that stay here begin with the weights of SHA-256 {'3e' * 32}; in it and not used: fc.0, "
        "fc.1, fc.2, fc.3, fc.4, fc.5 and 2 more. The file is read once, before this site's first round\n"
    )
    said = shell.run("preview", STUDY, "--data", "patients").stdout
    assert "trains network `small` mlp: 4224 parameters\n" in said
    assert begins in said
    shown = shell.json("preview", STUDY)
    assert (shown["network"], shown["model"], shown["parameters"]) == ("small", "mlp", 4224)
    assert begins in shell.approve().stderr
    shell.run("preview", STUDY)
    asked = [request.get("data", "") for request in shell.trainer.commands("describe")]
    assert (asked[:2], asked[-1]) == (["patients", ""], "patients")  # without --data, as approved


def test_an_unknown_study_is_named_with_the_known_ones(shell: Shell) -> None:
    shell.join()
    shell.offer()
    said = shell.run("preview", "lungs", code=64).stderr
    assert "error: no study `lungs` has been offered to this site\nhint: offered: hearts" in said


def test_status_has_the_keys_that_scripts_rely_on(shell: Shell) -> None:
    shell.join()
    shell.offer()
    away = f"Coordinator {shell.coordinator.address}: not connected: the agent does not run\n"
    assert away in shell.run("status").stdout
    service = shell.serve("--only", "gateway")
    status = shell.json("status")
    assert status["site"] == "st-olav"
    assert status["coordinator"] == shell.coordinator.address
    assert status["connected"] is True
    assert f"Ledger key {status['ledger_key']}\nCoordinator's receipt key {status['receipt_key']}\n" in (
        shell.run("status").stdout
    )
    assert status["certificate_expires"].endswith("Z")
    assert status["isolation"] == "network-namespace"
    assert {"gateway", "trainer"} <= set(status["users"])
    assert {"id", "state", "round", "study_digest"} <= set(status["studies"][0])
    assert status["certificate_fork_since"] is None
    shell.coordinator.tell(pb.Event(certificate_fork=pb.CertificateFork(since_s=1_790_000_000)))
    wait_until(lambda: shell.json("status")["certificate_fork_since"] == "2026-09-21 14:13 UTC", "status has it", 20)
    shown = shell.run("status", NO_COLOR="1").stdout
    assert "SOMEBODY ELSE HOLDS THIS SITE'S KEYS, or this machine was copied: since 2026-09-21 14:13 UTC" in shown
    assert "If nobody here knows of a copy, tell the coordinator's operator; then join again with a new" in shown
    shell.trainer.deaf.set()
    status = shell.json("status")
    assert (status["trainer_problem"], status["isolation"]) == ("it is stopped, hangs, or has ended", "unknown")
    shown = shell.run("status", NO_COLOR="1").stdout
    assert "THE TRAINER DOES NOT ANSWER: it is stopped, hangs, or has ended; rounds wait\n" in shown
    shell.trainer.deaf.clear()
    assert shell.json("status")["trainer_problem"] is None
    shell.stop(service)
    assert shell.json("status")["connected"] is False


def test_a_running_service_takes_approvals_and_rounds_and_stops_cleanly(shell: Shell) -> None:
    shell.join()
    shell.offer()
    service = shell.serve("--only", "gateway")
    assert "The coordinator knows" in shell.approve().stdout
    shell.coordinator.wait_declared("READY")
    shell.coordinator.assign(STUDY, 1)
    shell.coordinator.wait_receipts(1)
    assert shell.trainer is not None
    shell.trainer.wait_asked("commit")
    shell.stop(service)
    verdict = shell.json("audit", "verify", "--ask")
    assert verdict["ok"], verdict
    assert set(verdict) >= {"ok", "consistent", "complete", "whose", "lines", "unsigned_tail", "first_bad", "bytes"}
    assert (verdict["unsigned_tail"], verdict["first_bad"], verdict["bytes"]) == (0, None, 64 * 64 * 4 + 64 * 4)
    kept = shell.run("audit", "verify", code=4).stdout
    assert kept.startswith("consistent; completeness NOT SHOWN: site st-olav of test, ")
    assert "not shown: that this is all of it: the receipts kept here, copied at" in kept
    shown = shell.run("audit", "show").stdout
    assert "hearts round 1.1: 2 tensors" in shown
    assert "hearts round 1: accepted" in shown


def test_the_service_runs_while_the_coordinator_is_away_and_says_so(shell: Shell) -> None:
    shell.join()
    shell.coordinator.stop()
    service = shell.serve("--only", "gateway")
    assert shell.json("status")["connected"] is False
    said = shell.run("studies").stderr
    assert "the coordinator cannot be reached now" in said
    assert f"nobody listens at {shell.coordinator.address}" in shell.stop(service)


def test_a_second_service_is_refused(shell: Shell) -> None:
    shell.join()
    shell.serve("--only", "gateway")
    said = shell.run("run", "--only", "gateway", code=75).stderr
    assert f"error: {shell.state} is in use by site-agent run" in said


def test_a_revoked_site_exits_78_and_keeps_everything(shell: Shell) -> None:
    shell.join()
    service = shell.serve("--only", "gateway")
    shell.coordinator.revoked = True
    shell.coordinator.stop()
    shell.coordinator.start()
    _, said = service.communicate(timeout=WAIT_S)
    assert service.returncode == 78
    assert "refuses site `st-olav` (SITE_REVOKED)" in said
    assert (shell.state / "identity" / "key.pem").exists()
    assert shell.json("audit", "verify", code=4)["consistent"]


def test_a_changed_ledger_exits_1_and_names_the_line(shell: Shell) -> None:
    shell.join()
    ledger = shell.state / "ledger" / "000001.jsonl"
    ledger.write_bytes(ledger.read_bytes().replace(b"wardround 0", b"wardround 9", 1))
    verdict = shell.json("audit", "verify", code=1)
    assert (verdict["ok"], verdict["first_bad"]) == (False, 1)
    assert "lines" not in verdict  # no number of a changed ledger is a fact
    assert "CHANGED: " in shell.run("audit", "verify", code=1).stdout


def test_a_missing_ledger_exits_78_where_no_site_is(shell: Shell) -> None:
    assert "has not joined a federation" in shell.run("audit", "verify", code=78).stderr


@pytest.mark.fresh
def test_gateway_and_trainer_run_together_as_one_command(shell: Shell) -> None:
    shell.join()
    assert shell.trainer is not None
    shell.trainer.close()
    service = shell.serve()
    status = shell.json("status")
    assert status["isolation"] in ("network-namespace", "seccomp")
    assert status["users"]["separate"] is False
    shell.stop(service)
    shell.trainer = None


def at_a_terminal(shell: Shell, answer: str, *line: str) -> tuple[str, int]:
    """What a person at a terminal of 80 columns sees who answers so, and the exit code."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 80, 0, 0))
    os.write(ours, answer.encode())
    command = [*AGENT, *line, "--state", str(shell.state)]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        said = b""
        with contextlib.suppress(OSError):  # how a terminal ends
            while data := os.read(ours, 65536):
                said += data
        code = process.wait(WAIT_S)
    os.close(ours)
    return said.decode().replace("\r", ""), code


def test_approve_at_a_terminal_shows_the_account_and_asks(shell: Shell) -> None:
    shell.join()
    shell.offer()
    shell.run("policy", "draft", STUDY)
    said, code = at_a_terminal(shell, "n\n", "approve", STUDY, "--data", "patients")
    assert code == 130
    assert "\n  training.local_steps              1\n" in said
    assert "Approve exactly this for data `patients`? [y/N]:" in said
    assert shell.json("studies")["studies"][0]["state"] == "offered"
    said, code = at_a_terminal(shell, "y\n", "approve", STUDY, "--data", "patients")
    assert code == 0, said
    assert shell.json("studies")["studies"][0]["state"] == "approved"
    changed = document()
    changed["training"]["local_steps"] = 10000
    shell.coordinator.offer(changed, shell.folder / "initial.safetensors", revision=2)
    said, _ = at_a_terminal(shell, "", "preview", STUDY)
    page = said[said.index("Study `hearts`") :].splitlines()[:-1]  # between the log and `next:`
    assert max(len(text) for text in page) <= 80
    assert said.count("\n* training.local_steps              1 -> 10,000\n") == 2  # where it stands, and at the end
    assert "\nWhat changed since it was approved, 20" in said
    assert "hearts changed since it was approved: training.local_steps 1 -> 10,000" in shell.run("studies").stdout


def test_a_digest_that_is_none_is_refused(shell: Shell) -> None:
    shell.join()
    shell.offer()
    shell.run("policy", "draft", STUDY)
    digest = shell.shown()
    for wrong in (digest[:15], "XYZ", digest + "0"):
        said = shell.run("approve", STUDY, "--data", "patients", "--digest", wrong, code=64).stderr
        assert f"'{wrong}' is not a digest of 16 to 64 of 0-9 and a-f" in said
    other = "0" * 16
    said = shell.run("approve", STUDY, "--data", "patients", "--digest", other, code=78).stderr
    assert f"what is offered now was not shown under {other}" in said
    assert "hint: `site-agent preview hearts --data patients` shows what is offered now" in said
