"""``site-agent setup``: each step once, in order, and only what a person said yes to."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from site_agent import handoff
from site_agent.cli import listening, naming
from site_agent.cli.setup import setup
from site_agent.gateway.service import RequestDispatcher
from site_agent.state.consent import APPROVED
from site_agent.trainer.data import sources
from tests.site_agent.fake_trainer import SHARED, FakeTrainer, write_tensors
from tests.site_agent.site_world import STUDY, SiteWorld, document
from wardround.errors import BadData, NeedsPerson, NotPermitted, UsageProblem
from wardround.local import control

YES, NO = True, False


class Person:
    """Answers questions in the order in which they come; anything else that is asked fails the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: tuple[str, Any]) -> None:
        self.answers = list(answers)
        self.became: list[list[str]] = []
        monkeypatch.setattr("sys.stdin.isatty", lambda: True)
        monkeypatch.setattr(typer, "prompt", self.prompted)
        monkeypatch.setattr(typer, "confirm", self.confirmed)
        monkeypatch.setattr(os, "execv", lambda program, line: self.became.append(line))

    def prompted(self, question: str, default: Any = None, err: bool = False) -> Any:
        answer = self._next(question)
        return default if answer is None else answer

    def confirmed(self, question: str, default: bool = False, abort: bool = False, err: bool = False) -> bool:
        answer = bool(self._next(question))
        if abort and not answer:
            raise typer.Abort
        return answer

    def _next(self, question: str) -> Any:
        assert self.answers, f"nobody expected {question!r}"
        part, answer = self.answers.pop(0)
        assert part in question
        return answer


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Person]:
    return lambda *answers: Person(monkeypatch, *answers)


DATA = [("Your data", "/srv/train.csv"), ("column of the class", "ill"), ("What you will call it", None)]
DECIDE = [("Put this in force", YES), ("Approve exactly this for data `patients`?", YES)]
RUN = ("Run it now", NO)


def test_setup_goes_from_an_invitation_to_an_approval(
    world: SiteWorld, asked: Callable[..., Person], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    invitation = tmp_path / "invitation"
    invitation.write_text(world.coordinator.invite("st-olav"))
    asked()
    with pytest.raises(AssertionError, match="Your data"):  # as far as it goes without an answer
        setup(world.state.root, str(invitation))
    assert world.state.joined()
    world.trainer = FakeTrainer(world.state.root)
    world.offer()
    person = asked(*DATA, *DECIDE, RUN)
    setup(world.state.root)
    assert not person.answers
    consent = world.state.consent(STUDY)
    assert consent is not None
    assert (consent.state, consent.data.name) == (APPROVED, "patients")
    assert sources.sources(world.state.root)["patients"].label == "ill"
    shown = capsys.readouterr()
    assert "This is site `st-olav` of federation `test`" in shown.out
    assert "Data `patients`: 100 rows, 3 columns" in shown.err
    assert [line.split("]")[0] for line in shown.err.splitlines() if line.startswith("[")][-5:] == [
        "[1 of 5", "[2 of 5", "[3 of 5", "[4 of 5", "[5 of 5"
    ]  # fmt: skip
    assert shown.out.splitlines()[-1] == "next: `site-agent run`, as a service"


def test_setup_again_asks_nothing_that_is_done_and_becomes_the_service(
    world: SiteWorld, asked: Callable[..., Person], capsys: pytest.CaptureFixture[str]
) -> None:
    world.join()
    world.offer()
    asked(*DATA, *DECIDE, RUN)
    setup(world.state.root)
    person = asked(("Run it now", YES))
    setup(world.state.root)
    assert person.became[0][-3:] == ["run", "--state", str(world.state.root)]
    said = capsys.readouterr()
    assert f"Study `{STUDY}` is approved already, by" in said.err
    assert "Data `patients` has a name here" in said.out
    service = asked()
    dispatcher = RequestDispatcher(world.state, world.start())
    server = control.ControlServer(world.state.control, dispatcher.answer_document)
    try:
        setup(world.state.root)
    finally:
        server.close()
    assert not service.became
    assert capsys.readouterr().out.splitlines()[-1] == "The service runs already, and knows"


def test_a_second_study_takes_one_look(
    world: SiteWorld, asked: Callable[..., Person], capsys: pytest.CaptureFixture[str]
) -> None:
    world.join()
    world.offer()
    asked(*DATA, *DECIDE, RUN)
    setup(world.state.root)
    world.coordinator.offer(document(name="lungs"), write_tensors(world.folder / "lungs.safetensors", SHARED, 0))
    capsys.readouterr()
    asked(("Write this to", YES), ("Approve exactly this", YES), RUN)
    setup(world.state.root)
    shown = capsys.readouterr().out
    assert "* study.studies: now lungs" in shown
    assert (consent := world.state.consent("lungs")) is not None
    assert consent.state == APPROVED


def test_of_several_studies_a_person_chooses(world: SiteWorld, asked: Callable[..., Person]) -> None:
    world.join()
    world.offer()
    world.coordinator.offer(document(name="lungs"), write_tensors(world.folder / "lungs.safetensors", SHARED, 0))
    asked(("Several studies are offered: hearts, lungs", "lungs"), *DATA, *DECIDE, RUN)
    setup(world.state.root)
    assert world.state.consent("hearts") is None
    with pytest.raises(UsageProblem, match="no study `kidneys` has been offered"):
        setup(world.state.root, study="kidneys")
    asked(("Write this to", NO))
    with pytest.raises(typer.Abort):
        setup(world.state.root, study="hearts")
    assert world.state.consent("hearts") is None


def test_data_that_cannot_be_read_is_asked_for_again(
    world: SiteWorld, asked: Callable[..., Person], capsys: pytest.CaptureFixture[str]
) -> None:
    world.join()
    assert world.trainer is not None
    world.trainer.unreadable = [BadData("/srv/train.csv: Permission denied")]
    images = [("Your data", "/srv/skin"), ("What the images show", "/srv/labels.csv"), ("call it", "lesions"), RUN]
    asked(*DATA, *images)
    setup(world.state.root)
    said = capsys.readouterr().err
    assert "hint: the user who looked may not read it. With two users, let the trainer look: start it" in said
    assert "Once more; Ctrl-C ends this" in said
    assert "No study is offered to this site yet. When one is: `site-agent setup` again" in said
    assert sources.sources(world.state.root)["lesions"].labels == "/srv/labels.csv"


def test_a_policy_that_denies_the_study_ends_setup_with_what_to_write(
    world: SiteWorld, asked: Callable[..., Person]
) -> None:
    world.join()
    world.offer()
    asked(*DATA, ("Put this in force", YES), ("Approve", NO))
    with pytest.raises(typer.Abort):
        setup(world.state.root)
    policy = world.state.policy
    policy.write_text(policy.read_text().replace("deny = []", 'deny = [{ match = "*bias" }]'))
    asked()
    with pytest.raises(NotPermitted, match="the policy blocks study `hearts`: shared") as blocked:
        setup(world.state.root)
    assert "`site-agent setup` again" in blocked.value.hint


def test_with_two_users_systemd_starts_the_service(
    world: SiteWorld, asked: Callable[..., Person], capsys: pytest.CaptureFixture[str]
) -> None:
    world.join()
    (world.state.root / "studies").mkdir()
    os.chown(world.state.root / "studies", 12345, 12345)
    asked(*DATA)
    setup(world.state.root)
    next_ = capsys.readouterr().out.splitlines()[-1]
    assert next_ == "next: `sudo systemctl enable --now wardround-trainer wardround-gateway`"


def test_without_a_terminal_setup_names_the_commands(world: SiteWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    with pytest.raises(UsageProblem, match="`setup` asks questions, and there is no terminal") as refused:
        setup(world.state.root)
    assert "join, data add, policy draft, preview, approve, run" in refused.value.hint


def test_data_of_the_trainers_user_waits_for_its_listener(
    world: SiteWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended in "Permission denied", which said nothing of the second user."""
    world.join()
    monkeypatch.setattr(naming, "is_open", lambda _: False)
    named = {"table": "/srv/train.csv", "label": "ill"}
    naming.name_data(world.state.root, "patients", named)  # the listener looks
    assert world.trainer is not None
    world.trainer.close()
    world.trainer = None
    with pytest.raises(NeedsPerson, match="belongs to the trainer's user, and the trainer does not run") as refused:
        naming.name_data(world.state.root, "others", named)
    assert "`site-agent run --only trainer`" in refused.value.hint
    assert listening.is_open(world.state.root)
    monkeypatch.setattr(naming, "is_open", lambda _: True)

    def somebody_else_reads(*_: object) -> None:
        raise BadData("/srv/train.csv: No such file or directory")

    monkeypatch.setattr(handoff, "ask", somebody_else_reads)
    with pytest.raises(BadData) as missing:
        naming.name_data(world.state.root, "others", named)
    assert missing.value.hint == ""
