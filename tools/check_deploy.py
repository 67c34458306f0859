"""Checks what is in deploy/, offline: units, users and folders, container files, the compose file, Kubernetes.

Each checker is the tool's own: systemd-analyze, systemd-sysusers, hadolint, check-jsonschema, yamllint,
kubernetes-validate. What no tool knows (a trainer has no network, nothing runs as root, no file that an image copies is
left out of its build) is checked here. Without systemd its checks are left out with a line that says so; under CI they
may not be.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
EXPOSURE = {  # ten times the most that `systemd-analyze security` may say; deploy/README.md has the scores
    "wardround-gateway.service": 13,
    "wardround-trainer.service": 10,
    "wardround-coordinator.service": 13,
    "wardround-page.service": 13,
    "wardround-dashboard.service": 13,
}
SITES_PORT = 8443
DASHBOARD_SEES = {"dashboard", "read", "./tls"}  # its users, the folder of the service's socket, its certificate
NO_SUCH_PROGRAM = re.compile(r"^ExecStart=/opt/wardround/bin/[a-z-]+", re.MULTILINE)


def check_systemd(deploy: Path) -> list[str]:
    """What systemd says against the units, and against the users and folders that they need.

    ``systemd-analyze verify`` returns 0 for a directive that it does not know, and only says so: any line is a fault.
    The programs are not installed where this runs, so another stands in for them.
    """
    faults = []
    with tempfile.TemporaryDirectory() as folder:
        for unit in sorted((deploy / "systemd").glob("*.service")):
            copy = Path(folder, unit.name)
            copy.write_text(NO_SUCH_PROGRAM.sub("ExecStart=/bin/true", unit.read_text()))
        units = sorted(Path(folder).glob("*.service"))
        if {unit.name for unit in units} != set(EXPOSURE):
            faults.append(f"units {[unit.name for unit in units]}, exposure is limited for {sorted(EXPOSURE)}")
        verified = _run(["systemd-analyze", "verify", "--man=no", *map(str, units)])
        lines = (verified.stdout + verified.stderr).replace(folder + "/", "").splitlines()
        faults += [line for line in dict.fromkeys(lines) if line.strip()]
        for unit in units:
            limit = EXPOSURE.get(unit.name, 13)
            said = _run(
                ["systemd-analyze", "security", "--offline=yes", "--no-pager", f"--threshold={limit}", str(unit)]
            )
            score = re.search(r"exposure level for \S+: ([\d.]+)", said.stdout)
            shown = score[1] if score else "unknown"
            print(f"exposure {unit.name}: {shown} (at most {limit / 10})")
            if said.returncode != 0:
                faults.append(f"{unit.name}: exposure {shown}, at most {limit / 10} is allowed")
        for users in sorted((deploy / "systemd").glob("*.sysusers.conf")):
            tried = _run(["systemd-sysusers", "--dry-run", f"--root={folder}", str(users)])
            if tried.returncode != 0:
                faults.append(f"{users.name}: {tried.stderr.strip()}")
    return faults


def check_containers(deploy: Path) -> list[str]:
    """What hadolint, the compose specification's schema and yamllint say."""
    files = sorted((deploy / "containers").glob("Containerfile.*"))
    containerfiles = [str(file) for file in files if file.suffix != ".dockerignore"]
    compose = str(deploy / "compose.yaml")
    faults = []
    for command in (
        [_tool("hadolint"), "--config", str(deploy / ".hadolint.yaml"), *containerfiles],
        [_tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", compose],
        [_tool("yamllint"), "--strict", "--config-file", str(deploy / ".yamllint.yaml"), compose],
    ):
        said = _run(command)
        if said.returncode != 0:
            faults.append((said.stdout + said.stderr).strip() or f"{command[0]} exited {said.returncode}")
    return faults


def check_build_contexts(deploy: Path) -> list[str]:
    """What a container file copies from the checkout, and its .dockerignore leaves out."""
    faults = []
    for file in sorted((deploy / "containers").glob("Containerfile.*")):
        if file.suffix == ".dockerignore":
            continue
        kept = re.findall(r"^!(\S+)$", file.with_name(f"{file.name}.dockerignore").read_text(), re.MULTILINE)
        for line in re.findall(r"^COPY (?!--from)(.+)$", file.read_text(), re.MULTILINE):
            for source in line.split()[:-1]:
                if not any(source == name or source.startswith(f"{name}/") for name in kept):
                    faults.append(f"{file.name}: copies {source}, which its .dockerignore leaves out")
    return faults


def check_locks(deploy: Path) -> list[str]:
    """Where a container file installs something else than a lock says, or a wheel that it made."""
    faults = []
    for file in sorted((deploy / "containers").glob("Containerfile.*")):
        text = "" if file.suffix == ".dockerignore" else file.read_text().replace("\\\n", " ")
        for line in re.findall(r"\bpip (?:install|wheel)\b[^&\n]*", text):
            named = re.findall(r"--requirement \S*?(deploy/lock/\S+)", line)
            is_locked = named and "--require-hashes" in line and all((deploy.parent / name).exists() for name in named)
            if not is_locked and "--no-index" not in line:
                faults.append(f"{file.name}: `{' '.join(line.split())}` takes what an index has, not what a lock says")
    return faults


def check_kubernetes(deploy: Path) -> list[str]:
    """What the schemas of Kubernetes and yamllint say, and what the manifests promise about pods and their network."""
    import yaml

    folder = deploy / "kubernetes"
    said = _run(
        [_tool("yamllint"), "--strict", "--config-file", str(deploy / ".yamllint.yaml"), str(folder)],
    )
    faults = [] if said.returncode == 0 else [(said.stdout + said.stderr).strip()]
    for room in sorted(path for path in folder.iterdir() if path.is_dir()):
        kustomization = yaml.safe_load((room / "kustomization.yaml").read_text())
        present = {path.name for path in room.glob("*.yaml")} - {"kustomization.yaml"}
        if present != set(kustomization["resources"]):
            faults.append(f"kubernetes/{room.name}: has {sorted(present)}, lists {sorted(kustomization['resources'])}")
        documents = []
        for file in sorted(present):
            valid = _run([_tool("kubernetes-validate"), "--strict", "--quiet", str(room / file)])
            if valid.returncode != 0:
                faults.append(f"kubernetes/{room.name}/{file}: {(valid.stdout + valid.stderr).strip()}")
            documents += list(yaml.safe_load_all((room / file).read_text()))
        faults += [f"kubernetes/{room.name}: {fault}" for fault in pod_faults(documents) + network_faults(documents)]
    return faults


def pod_faults(documents: list[dict[str, Any]]) -> list[str]:
    """Every pod closed, and patients mounted where no gateway is."""
    faults = []
    for document in (one for one in documents if one["kind"] == "StatefulSet"):
        name, pod = document["metadata"]["name"], document["spec"]["template"]["spec"]
        user = pod.get("securityContext", {})
        if not user.get("runAsNonRoot") or user.get("seccompProfile") != {"type": "RuntimeDefault"}:
            faults.append(f"{name} may run as root, or without seccomp")
        if (
            pod.get("automountServiceAccountToken") is not False
            or pod.get("hostNetwork")
            or document["spec"]["replicas"] != 1
        ):
            faults.append(f"{name} has a token of the cluster, the node's network, or more than one replica")
        for container in pod["containers"] + pod.get("initContainers", []):
            closed = dict(container.get("securityContext", {}))
            user = (closed.pop("runAsUser", None), closed.pop("runAsGroup", None))
            if 0 in user or closed != {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
            }:  # fmt: skip
                faults.append(f"{name}: container {container['name']} is not closed")
            mounts = {mount["name"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
            if name != "trainer" and mounts.keys() & {"tables", "studies", "results"}:
                faults.append(f"{name}: container {container['name']} sees patients or private modules")
            if name == "trainer" and not mounts["tables"]:
                faults.append(f"{name}: the tables can be written")
            if container["name"] == "dashboard" and ("state" in mounts or None in user or not mounts["read"]):
                faults.append(
                    f"{name}: the dashboard sees the coordinator's state, is its user, or writes in its folder"
                )
    return faults


def network_faults(documents: list[dict[str, Any]]) -> list[str]:
    """Every pod refused by default; the trainer, and the coordinator on its way out, without exception."""
    policies = [one for one in documents if one["kind"] == "NetworkPolicy"]
    closed = [one for one in policies if one["spec"]["podSelector"] == {}]
    faults = []
    if not any(
        set(one["spec"]["policyTypes"]) == {"Ingress", "Egress"} and "egress" not in one["spec"] for one in closed
    ):
        faults.append("no policy closes every pod of the namespace")
    for policy in policies:
        label = policy["spec"]["podSelector"].get("matchLabels", {}).get("app.kubernetes.io/name", "")
        if label == "wardround-trainer":
            faults.append("a policy opens the trainer")
        for rule in policy["spec"].get("ingress", []):
            if not rule.get("ports") or any(port.get("port") != SITES_PORT for port in rule["ports"]):
                faults.append(f"policy {policy['metadata']['name']} lets more in than the sites")
        for rule in policy["spec"].get("egress", []):
            if not rule.get("to") or not rule.get("ports"):
                faults.append(f"policy {policy['metadata']['name']} lets its pods reach anything")
    return faults


def check_compose_rules(services: dict[str, dict[str, Any]]) -> list[str]:
    """What the compose file promises about every service, and about trainers."""
    faults = []
    for name, service in services.items():
        wanted: dict[str, object] = {
            "read_only": True,
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges:true"],
            "privileged": None,
            "cap_add": None,
            "pid": None,
            "ipc": None,
        }
        if name.endswith("-trainer"):
            wanted |= {"network_mode": "none", "networks": None, "ports": None}
        elif name == "dashboard":
            wanted |= {"network_mode": None, "networks": ["pages"], "ports": ["127.0.0.1:8080:8080"]}
        else:
            wanted |= {"network_mode": None, "networks": ["federation"], "ports": None}
        faults += [
            f"compose.yaml: service {name}: {key} is {service.get(key)!r}, wanted {value!r}"
            for key, value in wanted.items()
            if service.get(key) != value
        ]
        if str(service.get("user", "0")).split(":")[0] in ("0", "root"):
            faults.append(f"compose.yaml: service {name} runs as root")
        patients = [volume for volume in service.get("volumes", []) if "/srv/wardround" in volume]
        if patients and not name.endswith("-trainer"):
            faults.append(f"compose.yaml: service {name} has a network and sees patients: {patients}")
        if name == "dashboard" and {volume.split(":")[0] for volume in service["volumes"]} != DASHBOARD_SEES:
            faults.append(f"compose.yaml: the dashboard sees {service['volumes']}, wanted {sorted(DASHBOARD_SEES)}")
    return faults


def _services(deploy: Path) -> dict[str, dict[str, Any]]:
    import yaml  # comes with yamllint, which only this check needs

    services: dict[str, dict[str, Any]] = yaml.safe_load((deploy / "compose.yaml").read_text())["services"]
    return services


def main() -> int:
    faults = []
    if shutil.which("systemd-analyze"):
        faults += check_systemd(DEPLOY)
    elif os.environ.get("CI"):
        faults.append("systemd-analyze is missing; `apt-get install systemd` has it, and under CI it is not left out")
    else:
        print("left out: systemd-analyze is not on this machine, so the units were not checked", file=sys.stderr)
    faults += check_containers(DEPLOY)
    faults += check_build_contexts(DEPLOY)
    faults += check_locks(DEPLOY)
    faults += check_compose_rules(_services(DEPLOY))
    faults += check_kubernetes(DEPLOY)
    syntax = _run(["sh", "-n", str(DEPLOY / "systemd" / "install")])
    if syntax.returncode != 0:
        faults.append(syntax.stderr.strip())
    for fault in faults:
        print(f"error: deploy: {fault}", file=sys.stderr)
    if not faults:
        print("deploy: every check passed")
    return 1 if faults else 0


def _tool(name: str) -> str:
    """A checker of this environment; its full path where it is installed, else its name, to be found or to fail by."""
    installed = Path(sysconfig.get_path("scripts"), name)
    return str(installed) if installed.exists() else name


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]} is missing; `make lint-deploy` installs it")


if __name__ == "__main__":
    sys.exit(main())
