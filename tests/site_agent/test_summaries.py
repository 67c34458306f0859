"""Figures of a table for a coordinator's summary request: shown whole, let go by a person, in the ledger first."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from site_agent import audit
from site_agent.audit.facts import facts_of
from site_agent.audit.files import in_folder
from site_agent.audit.report import page
from site_agent.audit.show import words
from site_agent.cli import main
from tests.site_agent.site_world import DPO, PERSON, SiteWorld
from wardround.errors import BadData, NeedsPerson, NotPermitted, Unavailable, UsageProblem
from wardround.records.summaries.request import SummaryRequest
from wardround.signing import canonical

POLICY = """\
[study]
coordinator = "spiffe://test/coordinator"
studies = []
[quotas]
bytes_per_round = 0
bytes_per_day = 0
numbers_per_round = 0
numbers_per_day = 100
[statistics]
requests = ["icu-*"]
"""
AGE = {"values": 90, "missing": 10, "mean": "60.2", "std": "11.6", "low": "40", "high": "80"}
WARD = {"values": 100, "categories": [60, 0], "other": 40}


def asked(name: str = "icu-columns", **changes: Any) -> SummaryRequest:
    columns: list[Any] = ["age", {"name": "ward", "kind": "categorical", "categories": ["icu", "surgical"]}]
    return SummaryRequest.from_document(
        {"name": name, "title": "Which columns?", "sites": ["st-olav"], "columns": columns, **changes}
    )


def answered(*columns: dict[str, Any], sources: tuple[str, ...] = ("years", "ward"), **changes: Any) -> dict[str, Any]:
    return {"rows": 100, "columns": list(columns or (AGE, WARD)), "sources": list(sources), "notes": [], **changes}


def open_world(world: SiteWorld, *, policy: str = POLICY, service: bool = True) -> None:
    world.join()
    assert world.trainer is not None
    world.trainer.summary = answered()
    world.coordinator.summary_requests = [canonical.dumps(asked().document())]
    if policy:
        world.state.policy.write_text(policy)
    if service:
        world.start()
        world.coordinator.wait_connected()


def show(world: SiteWorld, request: str = "icu-columns") -> Any:
    return world.command("summary", request=request, data="patients")


def tell(world: SiteWorld, request: str = "icu-columns", *, digest: str = "", again: bool = False) -> Any:
    digest = digest or show(world, request)["digest"]
    return world.command("tell", request=request, data="patients", digest=digest, again=again, by=PERSON)


def test_figures_leave_as_they_were_shown_and_the_ledger_has_each_before(world: SiteWorld) -> None:
    open_world(world)
    shown = show(world)
    assert (shown["denied"], shown["before"], shown["rows"]) == ("", [], 100)
    assert [(column["column"], column["here"]) for column in shown["columns"]] == [("age", "years"), ("ward", "ward")]
    assert not world.coordinator.told
    assert tell(world, digest=shown["digest"]) == {"numbers": 1 + 4 + 4 + 6}

    [told] = world.coordinator.told
    assert (told.request, told.digest.hex(), told.min_count, told.digits) == ("icu-columns", asked().digest, 10, 3)
    assert [list(column.categories) for column in told.columns] == [[], [60, 0]]
    for word in (b"years", b"surgical", b"ward", b"patients"):  # no word of the table, and none of the request
        assert word not in b"".join(world.coordinator.heard)
    [line] = world.lines("summary")
    assert (line["summary_sha256"], line["sources"], line["by"]["name"]) == (
        shown["digest"],
        ["years", "ward"],
        DPO.name,
    )
    assert line["columns"][1]["categories"] == [{"category": "icu", "rows": 60}, {"category": "surgical", "rows": 0}]
    assert world.verdict().first_bad is None


def test_the_ledger_has_the_line_where_the_coordinator_breaks_off(world: SiteWorld) -> None:
    open_world(world)
    world.coordinator.break_summaries = True
    with pytest.raises(Unavailable, match="telling the summary for `icu-columns`"):
        tell(world)
    assert not world.coordinator.told
    assert [line["request"] for line in world.lines("summary")] == ["icu-columns"]


@pytest.mark.parametrize(
    ("edit", "rule"),
    [
        pytest.param(("[statistics]\n", "[statistics]\n#"), "statistics.requests names no such request", id="off"),
        pytest.param(('"icu-*"', '"other"'), "statistics.requests names no such request", id="another request"),
        pytest.param(('["icu-*"]', '["icu-*"]\ndeny = ["years"]'), "column `age`: statistics.deny 'years'", id="deny"),
        pytest.param(("test/coor", "else/coor"), "study.coordinator = 'spiffe://else/coordinator'", id="coordinator"),
        pytest.param(("= 100\n", "= 14\n"), "15 numbers in this day: quotas.numbers_per_day = 14", id="quota"),
    ],
)
def test_what_the_policy_does_not_let_leave_is_shown_and_stays(
    world: SiteWorld, edit: tuple[str, str], rule: str
) -> None:
    open_world(world, policy=POLICY.replace(*edit))
    shown = show(world)
    assert rule in shown["denied"]
    with pytest.raises(NotPermitted, match="the policy does not let figures leave for `icu-columns`: ") as caught:
        tell(world, digest=shown["digest"])
    assert rule in caught.value.message
    assert caught.value.message.endswith("; nothing was sent")
    assert not world.coordinator.told
    assert not world.lines("summary")


def test_without_a_policy_all_is_shown_and_nothing_leaves(world: SiteWorld) -> None:
    open_world(world, policy="")
    assert "there is no policy at" in show(world)["denied"]
    with pytest.raises(NeedsPerson, match=r"there is no policy at .*: nothing may leave") as caught:
        tell(world)
    assert caught.value.hint == "write one with [study], [quotas] and [statistics]: docs/summaries.md"


def test_the_policy_says_how_coarse_figures_are_and_the_trainer_is_told(world: SiteWorld) -> None:
    open_world(world, policy=POLICY + "min_count = 20\ndigits = 2\n")
    assert world.trainer is not None
    world.trainer.summary = answered({"values": 80, "missing": 20, "mean": "60", "std": "12"}, {**WARD})
    assert show(world)["min_count"] == 20
    [asked_for, *_] = world.trainer.commands("summarize")
    assert (asked_for["min_count"], asked_for["digits"]) == (20, 2)


@pytest.mark.parametrize("text", ["min_count = 4", "digits = 5", "min_count = 10.0", "allow = true"])
def test_a_policy_that_would_be_too_fine_or_has_unknown_keys_is_an_error(world: SiteWorld, text: str) -> None:
    open_world(world, policy=f"{POLICY}{text}\n")
    assert "in [statistics]" in show(world)["denied"]
    with pytest.raises(BadData, match=r"in \[statistics\]"):
        tell(world)


def test_what_changed_since_it_was_shown_does_not_leave(world: SiteWorld) -> None:
    open_world(world)
    digest = show(world)["digest"]
    assert world.trainer is not None
    world.trainer.summary = answered({**AGE, "mean": "60.3"}, WARD)
    with pytest.raises(NeedsPerson, match="the figures for `icu-columns` are not those that were shown"):
        tell(world, digest=digest)
    world.trainer.summary = answered()
    world.coordinator.summary_requests = [canonical.dumps(asked(title="Another question").document())]
    with pytest.raises(NeedsPerson, match="not those that were shown") as caught:
        tell(world, digest=digest)
    assert caught.value.hint == "look again: `site-agent data summary patients --request icu-columns`"
    assert not world.coordinator.told


def test_figures_of_a_column_leave_a_second_time_only_when_a_person_says_so(world: SiteWorld) -> None:
    open_world(world)
    tell(world)
    renamed = asked("icu-more", columns=[{"name": "alter"}, "weight"])  # this site's `years` under another name
    world.coordinator.summary_requests += [canonical.dumps(renamed.document())]
    assert world.trainer is not None
    world.trainer.summary = answered(AGE, {"absent": True}, sources=("years", ""))
    world.restart()
    assert [one["told"][:2] for one in world.command("summaries")["requests"]] == ["20", ""]
    [before] = show(world, "icu-more")["before"]
    assert before.startswith("`years` on 20")
    assert before.endswith(" for `icu-columns`")
    with pytest.raises(NeedsPerson, match="figures of these columns have left already: `years` on ") as caught:
        tell(world, "icu-more")
    assert "`--again`" in caught.value.hint
    assert len(world.coordinator.told) == 1
    tell(world, "icu-more", again=True)
    assert [line["request"] for line in world.lines("summary")] == ["icu-columns", "icu-more"]


def test_the_day_s_numbers_are_counted_from_the_ledger(world: SiteWorld) -> None:
    open_world(world, policy=POLICY.replace("= 100\n", "= 29\n"))
    tell(world)
    world.restart()
    with pytest.raises(NotPermitted, match="30 numbers in this day"):
        tell(world, again=True)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        pytest.param(answered(AGE), "they are of 1 columns, the request has 2", id="columns"),
        pytest.param(answered({**AGE, "values": 1}, WARD), "column `age`: a count is no multiple of 10", id="count"),
        pytest.param(answered(AGE, {**WARD, "categories": [60]}), "1 categories, the request has 2", id="words"),
        pytest.param(answered({**AGE, "mean": "60.213"}, WARD), "has not its form: 3 significant", id="digits"),
        pytest.param(answered({**AGE, "std": ""}, WARD), "one of two decimals that belong together", id="pair"),
        pytest.param(answered({**AGE, "low": "90"}, WARD), "its lower bound is above its upper one", id="bounds"),
        pytest.param(answered({**AGE, "std": "-1"}, WARD), "a decimal is beyond any measurement", id="spread"),
        pytest.param(answered({**AGE, "values": 200}, WARD), "larger than the number of rows", id="rows"),
        pytest.param(answered({**AGE, "other": 10}, WARD), "only a categorical column has others", id="other"),
        pytest.param(answered({**AGE, "absent": True}, WARD), "it is absent, and something is told of it", id="absent"),
        pytest.param(answered(AGE, {**WARD, "mean": "1", "std": "1"}), "of what has no numbers", id="decimals"),
        pytest.param(answered(rows=101), "the number of rows is no multiple of 10", id="all rows"),
        pytest.param(answered(sources=("x", "x")), "two columns of the request are `x` here", id="one column twice"),
        pytest.param(answered(sources=("years",)), "it does not say where each column is from", id="sources"),
    ],
)
def test_a_trainer_s_answer_that_is_not_what_was_asked_does_not_leave(
    world: SiteWorld, answer: dict[str, Any], why: str
) -> None:
    open_world(world)
    assert world.trainer is not None
    world.trainer.summary = answer
    with pytest.raises(BadData) as caught:
        show(world)
    assert caught.value.message.startswith("the trainer's answer cannot leave: ")
    assert why in caught.value.message
    assert not world.coordinator.told


def test_a_request_that_is_unknown_or_not_for_this_site_is_refused(world: SiteWorld) -> None:
    open_world(world)
    world.coordinator.summary_requests += [canonical.dumps(asked("icu-others", sites=["charite"]).document())]
    assert [one["name"] for one in world.command("summaries")["requests"]] == ["icu-columns"]
    with pytest.raises(UsageProblem, match="the coordinator has no summary request `icu-others` here") as caught:
        show(world, "icu-others")
    assert caught.value.hint == "it has: icu-columns"


def test_the_commands_show_a_table_and_let_it_leave(world: SiteWorld) -> None:
    open_world(world, service=False)
    assert world.trainer is not None
    world.trainer.summary = answered(notes=["`age`: a note"])
    state = ["--state", str(world.state.root)]
    listed = CliRunner().invoke(main.app, ["data", "summaries", *state], catch_exceptions=False)
    assert "icu-columns  2        never  Which columns?" in listed.output
    line = ["data", "summary", "patients", "--request", "icu-columns", *state]
    shown = CliRunner().invoke(main.app, line, catch_exceptions=False)
    rows = [" ".join(row.split()) for row in shown.output.splitlines()]
    assert rows[0] == "For `icu-columns` (Which columns?), of data `patients`:"
    assert rows[3] == "age (here years) numeric 90 10 <10 60.2 11.6 40 to 80"
    assert rows[4] == "ward categorical 100 <10 <10 icu 60, surgical <10, other 40"
    assert "<10 is told as fewer than 10, perhaps none; other counts are rounded to multiples of 10" in rows
    assert "note: `age`: a note" in rows
    assert rows[-1] == "next: `site-agent data summary patients --request icu-columns --send` lets exactly this leave"
    assert not world.coordinator.told

    sent = CliRunner().invoke(main.app, [*line, "--send", "--json"], catch_exceptions=False)
    assert (json.loads(sent.stdout)["sent"], json.loads(sent.stdout)["numbers"]) == (True, 15)
    assert len(world.coordinator.told) == 1
    again = CliRunner().invoke(main.app, line, catch_exceptions=False)
    assert "figures of these columns have left already: `years` on " in again.output
    assert again.output.endswith("--send --again` lets exactly this leave once more\n")
    sent = CliRunner().invoke(main.app, [*line, "--send", "--again"], catch_exceptions=False)
    assert "15 numbers left, and nothing else" in sent.output
    world.state.policy.unlink()
    shown = CliRunner().invoke(main.app, line, catch_exceptions=False)
    assert "the policy does not let this leave: there is no policy at" in shown.output
    plain = CliRunner().invoke(main.app, [*line, "--json"], catch_exceptions=False)
    assert json.loads(plain.stdout)["sent"] is False
    world.coordinator.summary_requests = []
    none = CliRunner().invoke(main.app, ["data", "summaries", *state], catch_exceptions=False)
    assert none.output == "the coordinator has no summary request for this site\n"


def test_a_date_is_shown_with_what_it_is_counted_until(world: SiteWorld) -> None:
    open_world(world, service=False)
    request = asked(columns=[{"name": "admission", "kind": "date", "until": "birth"}])
    world.coordinator.summary_requests = [canonical.dumps(request.document())]
    assert world.trainer is not None
    world.trainer.summary = answered(AGE, sources=("adm", "birth"))
    line = ["data", "summary", "patients", "--request", "icu-columns", "--state", str(world.state.root)]
    shown = CliRunner().invoke(main.app, line, catch_exceptions=False)
    assert "admission (here adm) until birth" in shown.output


def test_the_audit_shows_what_left(world: SiteWorld) -> None:
    open_world(world)
    tell(world)
    [line] = [line for line in audit.lines(world.state.ledger) if line.type == "summary"]
    assert words(line) == (
        "summary for icu-columns by dpo: 100 rows; age: 90 values, 10 missing, <10 do not fit, mean 60.2, sd 11.6, "
        "nine in ten 40 to 80; ward: 100 values, <10 missing, <10 do not fit, icu 60, surgical <10, other 40"
    )
    world.stop()
    verdict, code = audit.verify(world.state.ledger)
    assert verdict.summaries == 1
    said = CliRunner().invoke(main.app, ["audit", "verify", "--ledger", str(world.state.ledger)])
    assert "0 uploads (0 accepted, 0 refused), 0 B in all; and 1 summaries of columns\n" in said.output
    shown = page([in_folder(world.state.ledger)], {}, verdict, code)
    assert "Summary for icu-columns" in shown
    assert "This ledger accounts for no update; and 1 summary of columns." in shown
    assert "icu 60, surgical &lt;10, other 40" in shown
    assert facts_of([in_folder(world.state.ledger)], {}).summaries[0].by == "dpo"
