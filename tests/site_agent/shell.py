"""``site-agent`` on the command line, against a coordinator that the test plays."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import commands
from tests.site_agent.fake_coordinator import FakeCoordinator
from tests.site_agent.fake_trainer import SHARED, FakeTrainer, write_tensors
from tests.site_agent.site_world import STUDY, document

AGENT = [sys.executable, "-m", "site_agent.cli.main"]
WAIT_S = 60


class Shell:
    """A coordinator, a state directory, and ``site-agent`` on the command line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.coordinator = FakeCoordinator()
        self.state = folder / "site"
        self.services: list[subprocess.Popen[str]] = []
        self.trainer: FakeTrainer | None = None

    def run(self, *line: str, stdin: str = "", code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "WARDROUND_STATE": str(self.state), **environment}
        done = commands.run("site-agent", *line, stdin=stdin, timeout=WAIT_S, env=env)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def json(self, *line: str, code: int = 0) -> dict[str, Any]:
        answer = json.loads(self.run(*line, "--json", code=code).stdout)
        assert isinstance(answer, dict)
        return answer

    def join(self) -> subprocess.CompletedProcess[str]:
        done = self.run("join", "--invitation", "-", stdin=self.coordinator.invite("st-olav"))
        self.trainer = FakeTrainer(self.state)
        return done

    def offer(self) -> str:
        model = write_tensors(self.folder / "initial.safetensors", SHARED, 0)
        return self.coordinator.offer(document(), model)

    def approve(self) -> subprocess.CompletedProcess[str]:
        """Draft the policy that the study asks for, and approve it."""
        self.run("policy", "draft", STUDY)
        return self.run("approve", STUDY, "--data", "patients", "--digest", self.shown())

    def shown(self) -> str:
        """Show what is offered now; the digest of the account."""
        return str(self.json("preview", STUDY, "--data", "patients")["digest"])

    def serve(self, *options: str) -> subprocess.Popen[str]:
        line = [*AGENT, "run", *options, "--state", str(self.state)]
        service = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.services.append(service)
        assert service.stdout is not None
        first = service.stdout.readline()
        assert first == "ready\n", first
        return service

    def stop(self, service: subprocess.Popen[str], code: int = 0) -> str:
        service.send_signal(signal.SIGTERM)
        _, said = service.communicate(timeout=WAIT_S)
        assert service.returncode == code, said
        return said

    def close(self) -> None:
        for service in self.services:
            if service.poll() is None:
                service.kill()
            service.communicate(timeout=WAIT_S)
        if self.trainer is not None:
            self.trainer.close()
        self.coordinator.stop()
