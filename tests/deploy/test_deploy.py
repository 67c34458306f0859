"""The files of deploy/ agree with each other, and the checker finds what is wrong with them."""

import configparser
import os
import re
import shutil
import subprocess
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator import turns
from coordinator.server import SPARE_WORKERS, WORKERS
from tools import check_deploy
from tools.check_deploy import DEPLOY, EXPOSURE

UNITS = {path.name: path for path in (DEPLOY / "systemd").glob("*.service")}
STATE = {"site": "/var/lib/wardround/site", "coordinator": "/var/lib/wardround/coordinator"}
with_systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not on this machine")


class Values(OrderedDict[str, Any]):
    """A directive may stand more than once: its values are joined."""

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, list) and key in self:
            self[key].extend(value)
        else:
            super().__setitem__(key, value)


def unit(name: str) -> dict[str, str]:
    parser = configparser.RawConfigParser(strict=False, dict_type=Values, delimiters=["="], comment_prefixes=["#"])
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNITS[name])
    return {key: " ".join(value.split()) for key, value in parser["Service"].items()}


def role_of(name: str) -> str:
    return "coordinator" if name in ("wardround-coordinator.service", "wardround-dashboard.service") else "site"


def rows(name: str) -> list[list[str]]:
    lines = (DEPLOY / "systemd" / name).read_text().splitlines()
    return [line.split() for line in lines if line and not line.startswith("#")]


def folders() -> dict[str, list[str]]:
    """Path -> mode, user, group."""
    return {row[1]: row[2:5] for role in STATE for row in rows(f"{role}.tmpfiles.conf")}


def changed(tmp_path: Path, name: str, change: Callable[[str], str]) -> Path:
    """A copy of deploy/ with one file changed."""
    copy = tmp_path / "deploy"
    shutil.copytree(DEPLOY, copy)
    (copy / name).write_text(change((copy / name).read_text()))
    assert (copy / name).read_text() != (DEPLOY / name).read_text()
    return copy


def test_the_process_that_sees_patients_has_no_network() -> None:
    trainer = unit("wardround-trainer.service")
    assert trainer["PrivateNetwork"] == "yes"
    assert trainer["RestrictAddressFamilies"] == "AF_UNIX"
    assert trainer["TemporaryFileSystem"] == "/run:ro"


def test_the_process_that_has_the_network_sees_no_patients() -> None:
    gateway, trainer = unit("wardround-gateway.service"), unit("wardround-trainer.service")
    assert gateway["InaccessiblePaths"].split() == ["-/srv/wardround", f"-{STATE['site']}/studies"]
    assert gateway["User"] != trainer["User"]
    assert folders()["/srv/wardround"] == ["0750", "root", trainer["Group"]]
    assert folders()[f"{STATE['site']}/studies"] == ["0700", trainer["User"], trainer["Group"]]
    assert "SupplementaryGroups" not in gateway


@pytest.mark.parametrize(
    ("name", "port", "hidden"),
    [
        ("wardround-page.service", 8090, ("studies", "staging", "identity/key.pem", "identity/ledger_key.pem")),
        ("wardround-dashboard.service", 8080, ("authority", "keys", "blobs", "coordinator.db")),
    ],
)
def test_a_page_is_reached_from_this_machine_alone_writes_nowhere_and_sees_no_key(
    name: str, port: int, hidden: tuple[str, ...]
) -> None:
    page, state = unit(name), STATE[role_of(name)]
    assert (page["IPAddressDeny"], page["IPAddressAllow"]) == ("any", "localhost")
    assert (page["SocketBindDeny"], page["SocketBindAllow"]) == ("any", f"ipv4:tcp:{port}")
    assert page["ProtectSystem"] == "strict"
    assert "ReadWritePaths" not in page
    assert {f"-{state}/{path}" for path in hidden} <= set(page["InaccessiblePaths"].split())


def test_torch_may_make_code_and_a_worker_may_leave_for_namespaces_of_its_own() -> None:
    trainer = unit("wardround-trainer.service")
    assert "MemoryDenyWriteExecute" not in trainer
    assert trainer["RestrictNamespaces"] == "user net"
    assert "PrivateUsers" not in trainer  # it would make every peer the same user


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_stops_by_sigterm_and_is_not_started_again_where_that_changes_nothing(name: str) -> None:
    service = unit(name)
    assert service["KillSignal"] == "SIGTERM"
    assert service["Restart"] == "on-failure"
    assert set(service["RestartPreventExitStatus"].split()) == {"64", "65", "77", "78"}


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_runs_as_a_user_that_is_made_and_writes_where_a_folder_is_made(name: str) -> None:
    role, service = role_of(name), unit(name)
    made = {row[1] for row in rows(f"{role}.sysusers.conf") if row[0] == "u"}
    assert service["User"] in made
    for path in service.get("ReadWritePaths", "").split():
        assert path.removeprefix("-") in folders()
    assert f"WARDROUND_STATE={STATE[role]}" in (DEPLOY / "systemd" / f"{role}.env").read_text().splitlines()
    assert service["EnvironmentFile"] == f"/etc/wardround/{role}.env"
    assert service["ExecStart"].endswith("--state ${WARDROUND_STATE}")


def test_the_coordinators_unit_allows_a_thread_for_each_call_that_there_may_be() -> None:
    most = int(unit("wardround-coordinator.service")["TasksMax"])
    assert most >= WORKERS + SPARE_WORKERS + 256  # gRPC's own, the database's, commands and metrics
    assert re.findall(r"pids_limit: (\d+)", (DEPLOY / "compose.yaml").read_text()) == [str(most)]


def test_the_coordinators_unit_shows_it_what_its_processors_have_left() -> None:
    """``ProcSubset=pid`` leaves no /proc/stat, without which a busy machine's transfers take no turns."""
    assert turns.STAT.is_relative_to("/proc")
    assert "ProcSubset" not in unit("wardround-coordinator.service")


def test_both_users_of_a_site_meet_in_one_group_and_in_staging_only() -> None:
    members = [row[1:] for row in rows("site.sysusers.conf") if row[0] == "m"]
    assert members == [["wardround-trainer", "wardround"]]
    assert folders()[f"{STATE['site']}/staging"] == ["2770", "wardround", "wardround"]
    writable = [path for path, (mode, *_) in folders().items() if int(mode, 8) & 0o022]
    assert writable == [f"{STATE['site']}/staging"]


def test_the_container_has_the_folders_of_the_units() -> None:
    """Same modes; users by number."""
    numbers = {"10001": "wardround", "10002": "wardround-trainer"}
    text = (DEPLOY / "containers" / "Containerfile.site").read_text()
    made = re.findall(r"install -d -m (\d+) -o (\d+) -g (\d+) (/var\S+)", text)
    assert {path: [mode, numbers[user], numbers[group]] for mode, user, group, path in made} == {
        path: entry for path, entry in folders().items() if path.startswith(STATE["site"])
    }


def test_the_readme_tells_the_limits_that_are_checked() -> None:
    text = (DEPLOY / "README.md").read_text()
    told = re.findall(r"^\| (wardround-\S+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert {f"{name}.service": float(limit) * 10 for name, _, limit in told} == EXPOSURE
    assert all(float(score) <= float(limit) for _, score, limit in told)


@with_systemd
def test_the_units_pass() -> None:
    assert check_deploy.check_systemd(DEPLOY) == []


@with_systemd
@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        pytest.param(
            "systemd/wardround-trainer.service",
            lambda text: text.replace("PrivateNetwork=", "PrivatNetwork="),
            "PrivatNetwork",
            id="misspelt directive",
        ),
        pytest.param(
            "systemd/wardround-gateway.service",
            lambda text: text.replace("ProtectSystem=strict", "ProtectSystem=very"),
            "Failed to parse protect system value",
            id="impossible value",
        ),
        pytest.param(
            "systemd/wardround-gateway.service",
            lambda text: text.replace("SystemCallFilter=", "#").replace("CapabilityBoundingSet=", "#"),
            "wardround-gateway.service: exposure",
            id="more exposed than allowed",
        ),
        pytest.param(
            "systemd/site.sysusers.conf",
            lambda text: text.replace("u wardround -", "x wardround -"),
            "site.sysusers.conf",
            id="user of no kind",
        ),
    ],
)
def test_the_checker_finds_what_is_wrong_with_a_unit(
    tmp_path: Path, name: str, change: Callable[[str], str], said: str
) -> None:
    faults = check_deploy.check_systemd(changed(tmp_path, name, change))
    assert any(said in fault for fault in faults), faults


@with_systemd
def test_a_unit_without_a_limit_is_a_fault(tmp_path: Path) -> None:
    copy = tmp_path / "deploy"
    shutil.copytree(DEPLOY, copy)
    shutil.copy(UNITS["wardround-gateway.service"], copy / "systemd" / "other.service")
    assert any("other.service" in fault for fault in check_deploy.check_systemd(copy))


def test_units_are_left_out_with_a_line_where_systemd_is_missing_and_never_under_ci(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_deploy.shutil, "which", lambda name: None)
    monkeypatch.setattr(check_deploy, "check_containers", lambda deploy: [])
    monkeypatch.setattr(check_deploy, "check_kubernetes", lambda deploy: [])
    monkeypatch.setattr(check_deploy, "_services", lambda deploy: {})
    monkeypatch.delenv("CI", raising=False)
    assert check_deploy.main() == 0
    assert (
        capsys.readouterr().err == "left out: systemd-analyze is not on this machine, so the units were not checked\n"
    )
    monkeypatch.setenv("CI", "true")
    assert check_deploy.main() == 1
    assert "systemd-analyze is missing" in capsys.readouterr().err


def test_a_checker_that_is_missing_is_a_fault_and_says_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_deploy, "_tool", lambda name: f"no-such-{name}")
    assert check_deploy.check_containers(DEPLOY) == [
        f"no-such-{name} is missing; `make lint-deploy` installs it"
        for name in ("hadolint", "check-jsonschema", "yamllint")
    ]


SERVICE = {
    "read_only": True,
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "user": "10002:10002",
    "network_mode": "none",
    "volumes": ["./tables:/srv/wardround/tables:ro"],
}


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        pytest.param("a-trainer", {}, [], id="as it should be"),
        pytest.param(
            "a-trainer", {"network_mode": "bridge"}, ["network_mode is 'bridge', wanted 'none'"], id="network"
        ),
        pytest.param("a-trainer", {"user": "0:0"}, ["runs as root"], id="root"),
        pytest.param("a-trainer", {"privileged": True}, ["privileged is True, wanted None"], id="privileged"),
        pytest.param("a-trainer", {"read_only": False}, ["read_only is False, wanted True"], id="writable"),
        pytest.param(
            "a-gateway",
            {"network_mode": None, "networks": ["federation"]},
            ["has a network and sees patients"],
            id="patients",
        ),
    ],
)
def test_the_rules_of_the_compose_file(name: str, changes: dict[str, Any], said: list[str]) -> None:
    faults = check_deploy.check_compose_rules({name: {**SERVICE, **changes}})
    assert len(faults) == len(said), faults
    assert all(part in fault for part, fault in zip(said, faults, strict=True))


def test_an_image_copies_nothing_that_its_build_leaves_out(tmp_path: Path) -> None:
    assert check_deploy.check_build_contexts(DEPLOY) == []
    name = "containers/Containerfile.site.dockerignore"
    copy = changed(tmp_path, name, lambda text: text.replace("!tools/verify_ledger.py\n", ""))
    assert check_deploy.check_build_contexts(copy) == [
        "Containerfile.site: copies tools/verify_ledger.py, which its .dockerignore leaves out"
    ]


def test_an_image_installs_what_a_lock_says(tmp_path: Path) -> None:
    assert check_deploy.check_locks(DEPLOY) == []
    name = "containers/Containerfile.coordinator"
    copy = changed(tmp_path, name, lambda text: text.replace("--require-hashes ", "", 1))
    assert [fault.partition(" `")[0] for fault in check_deploy.check_locks(copy)] == ["Containerfile.coordinator:"]


DASHBOARD = {
    **SERVICE, "user": "10003:10003", "network_mode": None, "networks": ["pages"], "ports": ["127.0.0.1:8080:8080"],
    "volumes": ["dashboard:/var/lib/wardround/dashboard", "read:/run/wardround:ro", "./tls:/etc/wardround/tls:ro"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({}, "", id="as it should be"),
        pytest.param({"networks": ["federation"]}, "networks is ['federation']", id="the sites' network"),
        pytest.param({"ports": ["8080:8080"]}, "ports is ['8080:8080']", id="every address"),
        pytest.param({"volumes": ["coordinator:/state"]}, "the dashboard sees", id="the coordinator's state"),
    ],
)
def test_the_rules_of_the_dashboard_in_the_compose_file(changes: dict[str, Any], said: str) -> None:
    faults = check_deploy.check_compose_rules({"dashboard": {**DASHBOARD, **changes}})
    assert len(faults) == bool(said), faults
    assert said in "".join(faults)


CONTAINER: dict[str, Any] = {
    "name": "it",
    "securityContext": {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    },
    "volumeMounts": [{"name": "tables", "readOnly": True}],
}  # fmt: skip
POD: dict[str, Any] = {
    "automountServiceAccountToken": False,
    "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
}


@pytest.mark.parametrize(
    ("name", "pod", "container", "said"),
    [
        pytest.param("trainer", {}, {}, "", id="as it should be"),
        pytest.param("trainer", {"securityContext": {}}, {}, "may run as root, or without seccomp", id="root"),
        pytest.param("trainer", {"hostNetwork": True}, {}, "the node's network", id="network"),
        pytest.param("trainer", {"automountServiceAccountToken": True}, {}, "has a token", id="token"),
        pytest.param("trainer", {}, {"securityContext": {}}, "container it is not closed", id="open"),
        pytest.param("trainer", {}, {"volumeMounts": [{"name": "tables"}]}, "tables can be written", id="writable"),
        pytest.param("gateway", {}, {}, "sees patients or private modules", id="patients"),
        pytest.param(
            "coordinator",
            {},
            {"name": "dashboard", "volumeMounts": [{"name": "state"}]},
            "the coordinator's state",
            id="dashboard",
        ),
    ],
)
def test_the_rules_of_pods(name: str, pod: dict[str, Any], container: dict[str, Any], said: str) -> None:
    template = {"spec": {**POD, "containers": [{**CONTAINER, **container}], **pod}}
    document = {"kind": "StatefulSet", "metadata": {"name": name}, "spec": {"replicas": 1, "template": template}}
    faults = check_deploy.pod_faults([document])
    assert len(faults) == bool(said), faults
    assert said in "".join(faults)


def policy(app: str = "", **spec: Any) -> dict[str, Any]:
    selector = {"matchLabels": {"app.kubernetes.io/name": app}} if app else {}
    spec = {"podSelector": selector, "policyTypes": ["Ingress", "Egress"], **spec}
    return {"kind": "NetworkPolicy", "metadata": {"name": app or "all"}, "spec": spec}


def test_the_rules_of_network_policies() -> None:
    way = {"to": [{"ipBlock": {"cidr": "203.0.113.7/32"}}], "ports": [{"port": 8443}]}
    assert check_deploy.network_faults([policy(), policy("wardround-gateway", egress=[way])]) == []
    assert check_deploy.network_faults([policy("wardround-gateway", egress=[way])]) == [
        "no policy closes every pod of the namespace"
    ]
    assert check_deploy.network_faults([policy(), policy("wardround-trainer", egress=[way])]) == [
        "a policy opens the trainer"
    ]
    assert check_deploy.network_faults([policy(), policy("coordinator", ingress=[{"ports": [{"port": 8080}]}])]) == [
        "policy coordinator lets more in than the sites"
    ]
    assert check_deploy.network_faults([policy(), policy("wardround-gateway", egress=[{"ports": [{"port": 53}]}])]) == [
        "policy wardround-gateway lets its pods reach anything"
    ]


def test_the_installer_refuses_another_role_and_a_machine_without_the_program() -> None:
    installer = DEPLOY / "systemd" / "install"
    environment = {"PATH": os.environ["PATH"]}
    refused = subprocess.run([installer, "hospital"], env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode == 64
    assert refused.stderr == f"usage: {installer} site|coordinator\n"
    if not Path("/opt/wardround").exists():
        refused = subprocess.run([installer, "site"], env=environment, capture_output=True, text=True, check=False)
        assert refused.returncode == 78
        assert refused.stderr.splitlines() == [
            "error: /opt/wardround/bin/site-agent is missing",
            "hint: deploy/README.md, first command: a virtual environment in /opt/wardround",
        ]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make users and their folders")
@pytest.mark.skipif(not shutil.which("systemd-tmpfiles"), reason="systemd-tmpfiles is not on this machine")
@pytest.mark.parametrize("role", STATE)
def test_installing_twice_keeps_what_a_person_changed(tmp_path: Path, role: str) -> None:
    command = [DEPLOY / "systemd" / "install", role]
    environment = {**os.environ, "DESTDIR": str(tmp_path)}
    settings = tmp_path / "etc/wardround" / f"{role}.env"
    subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)
    settings.write_text("WARDROUND_STATE=/elsewhere\n")
    subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)
    assert settings.read_text() == "WARDROUND_STATE=/elsewhere\n"
    assert (tmp_path / STATE[role].lstrip("/")).is_dir()
    assert {path.name for path in (tmp_path / "etc/systemd/system").iterdir()} == {
        name for name in UNITS if role_of(name) == role
    }
