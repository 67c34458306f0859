"""Whether data fits a study, told before anybody approved: a word and a number, under the policy, in the ledger."""

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from site_agent.cli import main
from site_agent.gateway.fitting import fit_of
from site_agent.gateway.policy.decisions import decide_fit
from site_agent.gateway.policy.policy import load
from tests.site_agent.site_world import DPO, PERSON, STUDY, SiteWorld, document
from wardround.errors import NeedsPerson, NotPermitted, Unavailable, UsageProblem
from wardround.records.trainer import Examined
from wardround.v1 import federation_pb2 as pb

MISFIT = {
    "file": "train.csv", "column": "fever", "here": "", "what": "text where a number belongs", "rows": 3,
    "lines": [2, 3, 4], "hint": "",
}  # fmt: skip


def offered(world: SiteWorld, **study: Any) -> None:
    world.join()
    world.offer(**study)
    world.start()
    world.wait_offered(STUDY)
    world.draft()


def fit(world: SiteWorld, study: str = STUDY, **shown: Any) -> Any:
    """As it was shown, or as ``shown`` says."""
    assert world.trainer is not None
    fits = not world.trainer.misfits
    found = {"digest": world.digest, "fits": fits, "rows": 100 if fits else 0, **shown}
    return world.command("fit", study=study, data="patients", by=PERSON, **found)


def last_declared(world: SiteWorld) -> pb.DeclareRequest:
    return world.coordinator.declared[-1]


def test_the_coordinator_hears_one_word_and_one_number_and_the_ledger_has_them_first(world: SiteWorld) -> None:
    offered(world)
    assert fit(world) == {"fits": True, "rows": 100}
    told = last_declared(world)
    assert (told.study, told.status, told.rows, told.code, told.round) == (STUDY, pb.FITS, 100, 0, 0)
    assert told.digest.hex() == world.digest
    [line] = world.lines("declare")
    assert (line["standing"], line["num_examples"], line["by"]["name"]) == ("fits", 100, DPO.name)
    assert world.state.consent(STUDY) is None  # nothing was approved by it
    assert world.verdict().first_bad is None


def test_of_data_that_does_not_fit_nothing_but_that_is_told(world: SiteWorld) -> None:
    offered(world)
    assert world.trainer is not None
    world.trainer.misfits = [MISFIT]
    assert fit(world) == {"fits": False, "rows": 0}
    assert (last_declared(world).status, last_declared(world).rows) == (pb.DOES_NOT_FIT, 0)
    assert b"fever" not in b"".join(world.coordinator.heard)
    [line] = world.lines("declare")
    assert "num_examples" not in line


def test_without_a_policy_nothing_is_told(world: SiteWorld) -> None:
    offered(world)
    world.state.policy.unlink()
    with pytest.raises(NeedsPerson, match=r"there is no policy at .*: nothing may leave"):
        fit(world)
    assert not world.coordinator.declared


@pytest.mark.parametrize(
    ("edit", "rule"),
    [
        pytest.param((f'studies = ["{STUDY}"]', "studies = []"), "study.studies names no such study", id="study"),
        pytest.param(('form = "exact"', 'form = "bucketed"'), "counts.form = 'bucketed'", id="counts"),
    ],
)
def test_a_policy_that_does_not_let_it_be_told_is_obeyed_before_the_data_is_read(
    world: SiteWorld, edit: tuple[str, str], rule: str
) -> None:
    offered(world)
    world.draft(edit)
    with pytest.raises(NotPermitted) as caught:
        fit(world)
    assert f"the policy does not let it be said whether data fits `{STUDY}`" in caught.value.message
    assert caught.value.message.endswith(f"{rule}; nothing was sent")
    assert world.trainer is not None
    assert not world.trainer.commands("examine")
    assert not world.coordinator.declared


def test_each_time_is_a_number_of_the_day(world: SiteWorld) -> None:
    offered(world)
    text = world.state.policy.read_text()
    [quota] = [line for line in text.splitlines() if line.startswith("numbers_per_day")]
    world.state.policy.write_text(text.replace(quota, "numbers_per_day = 2"))
    fit(world)
    fit(world)
    with pytest.raises(NotPermitted, match=r"3 numbers in this day: quotas\.numbers_per_day = 2; nothing was sent"):
        fit(world)
    world.restart()
    with pytest.raises(NotPermitted, match="3 numbers in this day"):
        fit(world)


def test_a_word_that_could_not_be_sent_has_a_line_all_the_same(world: SiteWorld) -> None:
    offered(world)
    world.coordinator.stop()
    with pytest.raises(Unavailable):
        fit(world)
    assert [line["standing"] for line in world.lines("declare")] == ["fits"]


def test_a_study_that_is_over_or_unknown_is_refused(world: SiteWorld) -> None:
    offered(world)
    with pytest.raises(UsageProblem, match="no study `other` has been offered"):
        fit(world, "other")
    offer = world.state.offer(STUDY)
    assert world.agent is not None
    world.agent.commands.coordinator_says(STUDY, offer.digest, "stopped")
    with pytest.raises(UsageProblem, match=f"study `{STUDY}` is stopped: there is nothing left to look at"):
        fit(world)


def test_counts_leave_in_the_form_of_the_study_and_no_more_exactly(world: SiteWorld) -> None:
    offered(world)
    assert world.trainer is not None
    examined = Examined.model_validate(world.trainer._examine({}))
    offer = world.state.offer(STUDY)
    for form, rows in (("exact", 100), ("bucketed", 64), ("uniform", 1)):
        tables = document()
        tables["reported"]["counts"] = form
        assert fit_of(replace(offer, document=tables), examined).rows == rows
        decisions = decide_fit(load(world.state.policy), STUDY, "spiffe://test/coordinator", form)
        assert all(decision.allowed for decision in decisions)


def test_the_command_shows_what_it_would_tell_and_tells_it_only_when_asked(world: SiteWorld) -> None:
    offered(world)
    line = ["data", "fit", "patients", "--study", STUDY, "--state", str(world.state.root)]
    shown = CliRunner().invoke(main.app, line)
    assert shown.output.splitlines() == [
        "fits, 100 rows",
        f"next: `site-agent data fit patients --study {STUDY} --send` tells the coordinator this line",
    ]
    assert not world.coordinator.declared

    assert world.trainer is not None
    world.trainer.misfits = [MISFIT]
    shown = CliRunner().invoke(main.app, line)
    assert shown.output.splitlines() == [
        "does not fit", f"next: `site-agent data check patients --study {STUDY}` says why",
    ]  # fmt: skip


def test_without_a_service_the_command_tells_it_itself(world: SiteWorld) -> None:
    world.join()
    world.offer()
    state = ["--state", str(world.state.root)]
    CliRunner().invoke(main.app, ["studies", *state], catch_exceptions=False)
    world.draft()
    line = ["data", "fit", "patients", "--study", STUDY, "--send", "--json", *state]
    sent = CliRunner().invoke(main.app, line, catch_exceptions=False)
    assert json.loads(sent.stdout) == {"study": STUDY, "data": "patients", "fits": True, "rows": 100, "sent": True}
    assert (last_declared(world).status, last_declared(world).rows) == (pb.FITS, 100)
    assert [line["standing"] for line in world.lines("declare")] == ["fits"]
