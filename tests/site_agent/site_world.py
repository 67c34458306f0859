"""One hospital on loopback: a joined state directory, the agent in this process, a fake coordinator and trainer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from site_agent import audit
from site_agent.gateway.agent import Agent
from site_agent.gateway.consent.approvals import study_request
from site_agent.gateway.enrolment.identity import Identity
from site_agent.gateway.enrolment.join import join
from site_agent.gateway.enrolment.rollover import roll_over
from site_agent.gateway.policy import text as policy_text
from site_agent.gateway.service import RequestDispatcher
from site_agent.state.directory import SiteState
from site_agent.state.person import Person
from tests.site_agent.fake_coordinator import FakeCoordinator
from tests.site_agent.fake_trainer import SHARED, FakeTrainer, write_tensors
from tools.world import wait_until
from wardround.records.ledger.form import Record
from wardround.records.study import StudyFile
from wardround.signing import canonical

PERSON = {"name": "dpo", "uid": 1000}  # as a command says it
DPO = Person("dpo", 1000)
STUDY = "hearts"


def document(**study: Any) -> dict[str, Any]:
    """A small resolved study."""
    tables = {
        "study": {"name": STUDY, "sites": ["st-olav"], "rounds": 3, **study},
        "task": {"name": "tabular"},
        "model": {"name": "mlp"},
        "algorithm": {"name": "fedavg"},
        "training": {"local_steps": 1},
        "reported": {"metrics": ["val_loss", "accuracy"], "ranges": {"val_loss": [0, 1e6], "accuracy": [0, 1]}},
    }
    return StudyFile.from_document(tables).document()


def unknown_fields(record: Record) -> Iterator[str]:
    """Fields of a ledger's record that no class of this version has."""
    yield from record.more
    for value in vars(record).values():
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Record):
                yield from unknown_fields(item)


class SiteWorld:
    """Everything a test of the gateway needs; ``close`` ends it all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.coordinator = FakeCoordinator()
        self.state = SiteState(folder / "site")
        self.agent: Agent | None = None
        self.trainer: FakeTrainer | None = None
        self.digest = ""

    def join(self) -> None:
        join(self.state, self.coordinator.invite("st-olav"))
        self.trainer = FakeTrainer(self.state.root)

    def offer(self, **study: Any) -> str:
        model = write_tensors(self.folder / "initial.safetensors", SHARED, 0)
        self.digest = self.coordinator.offer(document(**study), model)
        return self.digest

    def wait_offered(self, study: str) -> None:
        """Until the running agent has kept an offer of ``study``."""
        wait_until(lambda: self.state.known_offer(study) is not None, f"`{study}` is kept", 20)

    def wait_ended(self) -> None:
        wait_until(lambda: self.state.journal(STUDY).ended, "the end is noted", 20)

    def evaluates(self) -> None:
        """Joined, running, and approved for a study in which this site only evaluates."""
        self.join()
        assert self.trainer is not None
        self.trainer.described, self.trainer.comes = (), SHARED
        self.trainer.train_rows, self.trainer.num_examples, self.trainer.num_validation = 0, 0, 100
        self.offer(sites=["oslo", "st-olav"], roles={"st-olav": "evaluate"})
        self.start()
        self.approve()
        self.coordinator.wait_declared("READY")

    def another_model(self, seed: int) -> Path:
        """A model of the same tensors."""
        return write_tensors(self.folder / f"model-{seed}.safetensors", SHARED, seed)

    def start(self) -> Agent:
        self.agent = Agent(self.state)
        self.agent.start()
        return self.agent

    def stop(self) -> None:
        """End the agent, so that the ledger's last lines are signed."""
        assert self.agent is not None
        self.agent.stop()
        self.agent = None

    def restart(self) -> Agent:
        self.stop()
        return self.start()

    def roll_over(self) -> Agent:
        """`audit rollover`, and the agent after it."""
        self.stop()
        roll_over(self.state)
        return self.start()

    def command(self, name: str, **fields: Any) -> Any:
        """What `site-agent NAME` asks of the running service."""
        assert self.agent is not None
        return RequestDispatcher(self.state, self.agent).answer_document({"command": name, **fields}, lambda _: None)

    def draft(self, *edits: tuple[str, str]) -> None:
        """Write the policy that `site-agent policy draft` proposes, with some of its text replaced."""
        assert self.trainer is not None
        request = study_request(self.state.offer(STUDY), "spiffe://test/coordinator", None, self.trainer.exposure)
        text = policy_text.draft(request, "st-olav")
        for old, new in edits:
            assert old in text
            text = text.replace(old, new)
        self.state.policy.write_text(text)

    def approve(self) -> Any:
        if not self.state.policy.exists():
            self.draft()
        return self.command("approve", study=STUDY, data="patients", digest=self.shown(), by=PERSON)

    def shown(self) -> str:
        """Show what is offered now; the digest of the account."""
        return str(self.command("preview", study=STUDY, data="patients")["digest"])

    def ready(self) -> None:
        """Joined, offered, running, approved: the next thing is an assignment."""
        self.join()
        self.offer()
        self.start()
        self.approve()
        self.coordinator.wait_declared("READY")

    def lines(self, kind: str = "") -> list[dict[str, Any]]:
        """The ledger's records; each of their fields is one that their class has."""
        lines = [line for line in audit.lines(self.state.ledger) if not kind or line.type == kind]
        assert not [unknown for line in lines for unknown in unknown_fields(line.entry)]
        return [line.document() for line in lines]

    def identity_key(self) -> Any:
        """The hospital's ledger key."""
        return Identity(self.state.identity).ledger_key()

    def verdict(self) -> audit.Verdict:
        """With the coordinator's copy of the receipts, unless it signs them with another key."""
        copy = b"".join(canonical.dumps(envelope.document()) + b"\n" for envelope in self.coordinator.copy())
        verdict, code = audit.verify(self.state.ledger, copy=audit.Copy(copy, "the coordinator's", True))
        return verdict if code != audit.CANNOT_VERIFY else audit.verify(self.state.ledger)[0]

    def close(self) -> None:
        if self.agent is not None:
            self.agent.stop()
        if self.trainer is not None:
            self.trainer.close()
        self.coordinator.stop()
