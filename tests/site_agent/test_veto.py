"""A hospital's veto: a new model is worse by its own validation than its policy takes. No number leaves with it."""

import pytest

from site_agent.gateway.consent.rows import study_rows
from site_agent.gateway.policy import text as policy_text
from site_agent.gateway.policy import veto
from site_agent.gateway.policy.policy import VetoTable, parse
from site_agent.state.journal import Journal
from tests.site_agent.site_world import STUDY, SiteWorld
from wardround.errors import BadData

COORDINATOR = "spiffe://test/coordinator"
RISE = "[release]", "[veto]\nloss_rise = 0.25\n\n[release]"


def round_with(world: SiteWorld, number: int, loss: str) -> None:
    assert world.trainer is not None
    world.trainer.own_loss = loss
    world.coordinator.assign(STUDY, number)


def accepted_until(world: SiteWorld, number: int) -> None:
    """Each round's loss is a little lower than that of the one before."""
    assert world.trainer is not None
    for done in range(1, number + 1):
        round_with(world, done, f"{1.0 - done / 10}")
        world.trainer.wait_committed(done)


def journal(own: str, lowest: str) -> Journal:
    return Journal(STUDY, round=2, own_loss=own, lowest_loss=lowest)


@pytest.mark.parametrize(
    ("own", "lowest", "worse"),
    [
        ("0.75", "0.5", False), ("0.7500001", "0.5", True), ("0.1", "0.5", False), ("nan", "0.5", True),
        ("inf", "0.5", True), ("0.9", "", False), ("", "0.5", False), ("0.5", "inf", False), ("-3.0", "-3.5", True),
    ],
)  # fmt: skip
def test_a_model_is_worse_where_its_loss_has_risen_by_more_than_the_policy_takes(
    own: str, lowest: str, worse: bool
) -> None:
    assert veto.is_worse(VetoTable(loss_rise=0.25), journal(own, lowest)) == worse
    assert not veto.is_worse(VetoTable(), journal(own, lowest))


def test_a_loss_that_is_no_number_is_the_trainers_fault() -> None:
    with pytest.raises(BadData, match="the trainer gave a loss that is no number") as refused:
        veto.is_worse(VetoTable(loss_rise=0.25), journal("low", "0.5"))
    assert refused.value.code == "DECLINED_TRAINING_FAILED"


def test_a_model_that_is_worse_here_is_vetoed_by_a_code_and_goes_on_where_the_policy_takes_it(world: SiteWorld) -> None:
    world.join()
    world.offer()
    world.start()
    world.draft(RISE)
    world.approve()
    world.coordinator.wait_declared("READY")
    accepted_until(world, 2)
    sent = len(world.coordinator.uploads)
    round_with(world, 3, "1.0625")  # 0.2625 above 0.8
    said = world.coordinator.wait_declared("DECLINED", "DECLINED_VETO")
    assert (said.round, said.rows, said.estimate_s) == (3, 0, 0)
    assert len(world.coordinator.uploads) == sent
    (line,) = world.lines("blocked")
    assert (line["round"], line["what"], line["rule"]) == (3, "the model", "veto.loss_rise")
    everything = b"".join(path.read_bytes() for path in world.state.ledger.glob("*.jsonl"))
    assert b"1.0625" not in everything + said.SerializeToString()
    (row,) = study_rows(world.state, COORDINATOR)
    assert (row.state, row.changes) == (
        "changed",
        (
            "this site vetoes the model that round 3 begins with: its validation loss here is 1.062, and the lowest "
            "before was 0.8; the coordinator knows neither; the study goes on here if `loss_rise` in [veto] of the "
            "policy is raised",
        ),
    )
    assert world.trainer is not None
    world.coordinator.declared.clear()
    world.coordinator.assign(STUDY, 3, attempt=2)  # the operator has started it again: it is vetoed again, untrained
    world.coordinator.wait_declared("DECLINED", "DECLINED_VETO")
    trained = len(world.trainer.commands("train"))
    world.state.policy.write_text(world.state.policy.read_text().replace("0.25", "0.5"))
    (row,) = study_rows(world.state, COORDINATOR)
    assert row.changes == ()
    world.coordinator.assign(STUDY, 3, attempt=3)
    world.trainer.wait_committed(3)
    assert len(world.trainer.commands("train")) == trained  # the update that was trained is sent
    assert world.state.journal(STUDY).lowest_loss == "0.8"


def test_the_accounts_lines_and_a_merged_policy_keep_what_a_person_wrote_of_it(world: SiteWorld) -> None:
    world.ready()
    text = world.state.policy.read_text()
    old, new = parse(text.encode(), world.state.policy), parse(text.replace(*RISE).encode(), world.state.policy)
    assert policy_text.differences(old, new) == ["veto.loss_rise: None before, 0.25 now"]
    with pytest.raises(BadData, match=r"`loss_rise` in \[veto\]: input should be greater than 0"):
        parse(text.replace("[release]", "[veto]\nloss_rise = -1.0\n\n[release]").encode(), world.state.policy)
