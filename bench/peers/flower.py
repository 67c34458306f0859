"""Flower beside us: SuperLink and SuperNodes as processes, over TLS with authenticated nodes, moving the same bytes.

Flower runs in an environment of its own, because its pins and ours need not agree: ``FLOWER_VENV`` names one that has
it (`python -m venv DIR && DIR/bin/pip install flwr`), else one is made. Where that cannot be done, a line says so.
"""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from bench.floor import self_signed
from bench.processes import cpu_seconds
from tools.world import descendants, free_port, wait_until

APP = Path(__file__).with_name("flower_app")
VALUES = {"152": 152, "1 MiB": 2**18, "resnet18": 11_689_512}
WAIT_S = 900
UNCOUNTED = 1


class CannotMeasure(Exception):
    """Flower is not there, or did not do its rounds; the message says why."""


def measured(payload: str, sites: int, rounds: int) -> Iterator[dict[str, Any]]:
    """One line: what a round costs with Flower, or why it was not measured."""
    about = {"bench": "flower", "payload": payload, "sites": sites}
    try:
        with tempfile.TemporaryDirectory(prefix="wardround-flower-") as folder:
            yield about | _measure(_environment(), Path(folder), VALUES[payload], sites, rounds)
    except (CannotMeasure, OSError, subprocess.SubprocessError) as error:
        yield about | {"skipped": str(error)[:300]}


def _environment() -> Path:
    """The folder of programs of an environment that has Flower."""
    given = os.environ.get("FLOWER_VENV")
    root = Path(given) if given else Path(tempfile.gettempdir()) / f"wardround-flower-venv-{os.getuid()}"
    if not given and not (root / "bin" / "flower-superlink").exists():
        subprocess.run([sys.executable, "-m", "venv", str(root)], check=True, capture_output=True)
        pip = [str(root / "bin" / "pip"), "install", "--quiet", "flwr", "numpy"]
        made = subprocess.run(pip, capture_output=True, text=True, timeout=WAIT_S)
        if made.returncode:
            shutil.rmtree(root, ignore_errors=True)
            said = (made.stderr.strip().splitlines() or [""])[-1]
            raise CannotMeasure(f"`pip install flwr` failed: {said}; FLOWER_VENV=DIR names an environment that has it")
    if not (root / "bin" / "flower-superlink").exists():
        raise CannotMeasure(f"{root} has no bin/flower-superlink: `{root}/bin/pip install flwr`")
    return root / "bin"


def _measure(programs: Path, folder: Path, values: int, sites: int, rounds: int) -> dict[str, Any]:
    key, certificate = self_signed()
    (folder / "key.pem").write_bytes(key)
    (folder / "certificate.pem").write_bytes(certificate)
    home, port, stamps = folder / "home", free_port(), folder / "stamps.jsonl"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "bench"\n\n[superlink.bench]\naddress = "127.0.0.1:{port}"\n'
        f'root-certificates = "{folder}/certificate.pem"\n'
    )
    environment = os.environ | {
        "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": f"{programs}:{os.environ['PATH']}", "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1",
    }  # fmt: skip

    def cli(*words: str) -> None:
        done = subprocess.run(
            [str(programs / "flwr"), *words], env=environment, cwd=folder, capture_output=True, text=True, timeout=180
        )
        if done.returncode:
            raise CannotMeasure(f"flwr {words[0]}: {(done.stdout + done.stderr).strip()[-250:]}")

    with ExitStack() as stack:
        running: list[subprocess.Popen[bytes]] = []

        def start(program: str, *words: str) -> None:
            log = stack.enter_context((folder / f"{len(running)}.log").open("wb"))
            line = [str(programs / program), *words]
            process = subprocess.Popen(
                line, env=environment, cwd=folder, stdout=log, stderr=log, start_new_session=True
            )
            running.append(process)
            stack.callback(_end, process)

        start(
            "flower-superlink", "--host", "127.0.0.1", "--port", str(port),
            "--ssl-certfile", f"{folder}/certificate.pem",
            "--ssl-keyfile", f"{folder}/key.pem", "--ssl-ca-certfile", f"{folder}/certificate.pem",
            "--enable-supernode-auth",
        )  # fmt: skip
        wait_until(lambda: _listens(port), "the SuperLink to listen", timeout_s=120)
        for number in range(sites):
            node = folder / f"node{number}"
            _node_key(node)
            cli("supernode", "register", f"{node}.pub")
            start(
                "flower-supernode", "--superlink", f"127.0.0.1:{port}", "--port", str(free_port()),
                "--root-certificates", f"{folder}/certificate.pem", "--auth-supernode-private-key", str(node),
            )  # fmt: skip
        shutil.copytree(APP, folder / "app", ignore=shutil.ignore_patterns("__pycache__"))
        config = f'rounds={rounds} sites={sites} values={values} stamps="{stamps}"'
        cli("run", str(folder / "app"), "bench", "-c", config)
        began, last = 0.0, time.monotonic() + WAIT_S
        while not stamps.exists() or '"done"' not in stamps.read_text():
            if time.monotonic() > last or any(process.poll() is not None for process in running):
                raise CannotMeasure(f"its rounds did not end; {_tail(folder)}")
            if not began and stamps.exists() and stamps.read_text().count('"end"') >= UNCOUNTED:
                began = _cpu(running)
            time.sleep(0.2)
        used = _cpu(running) - began
    marks = [json.loads(line) for line in stamps.read_text().splitlines()]
    begins = [at for what, _, at in marks if what == "begin"]
    ends = [(answered, at) for what, answered, at in marks if what == "end"]
    seconds = [end - begin for begin, (_, end) in zip(begins, ends, strict=False)][UNCOUNTED:]
    return {
        "rounds": len(seconds), "served": min(answered for answered, _ in ends),
        "seconds": round(statistics.median(seconds), 3), "cpu_seconds": round(used / len(seconds), 3),
    }  # fmt: skip


def _cpu(running: list[subprocess.Popen[bytes]]) -> float:
    """Of all its processes that are there now; one that ends between two looks is missed, to Flower's advantage."""
    total = 0.0
    for pid in {pid for process in running for pid in (process.pid, *descendants(process.pid))}:
        try:
            total += cpu_seconds(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def _node_key(path: Path) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    form = serialization.PrivateFormat.OpenSSH
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    path.chmod(0o600)
    public = serialization.PublicFormat.OpenSSH
    Path(f"{path}.pub").write_bytes(key.public_key().public_bytes(serialization.Encoding.OpenSSH, public) + b"\n")


def _listens(port: int) -> bool:
    listening = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    return f":{port:04X} " in listening


def _tail(folder: Path) -> str:
    return " ".join(line for log in sorted(folder.glob("*.log")) for line in log.read_text().splitlines()[-2:])[-200:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and what it started: they are a session of their own."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(10)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        process.kill()
        process.wait(10)
