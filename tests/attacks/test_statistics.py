"""Whoever would see a patient in a table's figures: a coordinator that asks, a trainer that tells, a site that lies."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fl_algorithms.tasks.tables.summary import Disclosure, figures_of
from fl_algorithms.tasks.tables.table import Table
from site_agent.cli import main
from tests.attacks.places import placed
from tests.coordinator.conftest import refused
from tests.site_agent import test_fit as fits
from tests.site_agent import test_summarizing as trained
from tests.site_agent.site_world import STUDY, SiteWorld
from tests.site_agent.test_summaries import AGE, POLICY, WARD, answered, asked, open_world, show, tell
from tools.world import wait_until
from wardround.errors import BadData, NeedsPerson, NotPermitted, WardroundError
from wardround.records.summaries.request import MOST_BYTES, MOST_OPEN, SummaryRequest
from wardround.signing import canonical
from wardround.v1 import summaries_pb2, summaries_pb2_grpc


def read(columns: dict[str, list[str]], *wanted: Any, min_count: int = 10) -> Any:
    """What leaves of a table at most."""
    rows = len(next(iter(columns.values())))
    request = SummaryRequest.from_document({"name": "x", "sites": ["a"], "columns": list(wanted)})
    return figures_of(Table(Path("t"), "", columns, list(range(rows))), request, Disclosure(min_count, 3))


@pytest.mark.attack(promise="P2", refused_by="fl_algorithms/tasks/tables/summary.py")
def test_names_of_patients_as_categories() -> None:
    """The operator names people as categories of a column: whether one is a patient here must not be told."""
    people = [f"person {number}" for number in range(200)]
    column = {"name": "name", "kind": "categorical", "categories": [*people[:40], "nobody"]}
    found = read({"name": people}, column)
    assert set(found.columns[0].categories) == {0}
    assert found.columns[0].other == 160


@pytest.mark.attack(promise="P2", refused_by="fl_algorithms/tasks/tables/summary.py")
@pytest.mark.parametrize("kind", ["boolean", "categorical", "missing", "unfit"])
def test_a_cell_of_one(kind: str) -> None:
    """A count of 1 must look as a count of 0 does, in itself and as the difference of the others."""
    odd = {"boolean": "1", "categorical": "yes", "missing": "", "unfit": "text"}[kind]
    usual = {"boolean": "0", "categorical": "no", "missing": "7", "unfit": "7"}[kind]
    column: dict[str, Any] = {"name": "x", "kind": kind if kind in ("boolean", "categorical") else "numeric"}
    column |= {"categories": ["no", "yes"]} if kind == "categorical" else {}
    cells = [[odd] * count + [usual] * (100 - count) for count in range(5)]
    answers = [read({"x": one}, column) for one in cells]
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.attack(promise="P2", refused_by="fl_algorithms/tasks/tables/summary.py")
def test_a_range_that_is_one_patient() -> None:
    """A request that leaves the range open, to read the oldest patient's age and the heaviest one's weight."""
    cells = [[str(40 + number % 30) for number in range(200)] for _ in range(2)]
    cells[1][0] = "69"
    cells[0][0] = "112"
    answers = [read({"x": one}, "x").columns[0] for one in cells]
    assert (answers[0].low, answers[0].high) == (answers[1].low, answers[1].high)
    assert "112" not in answers[0].decimals


@pytest.mark.attack(promise="P1", refused_by="site_agent/trainer/data/summaries.py")
def test_the_column_of_identifiers(tmp_path: Path) -> None:
    """The request asks for the column that says who a patient is, under its own name or by way of a mapping."""
    state = trained.table_in(tmp_path)
    trained.add(state, patient="mrn")
    with pytest.raises(BadData, match="says here who a patient is: nothing is told of it"):
        trained.ask(state, "sex", "mrn")
    trained.add(state)  # nobody said that it is one
    answer = trained.ask(state, "row")
    assert answer.columns[0].decimals == ()


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/summaries.py")
def test_overlapping_requests(site: SiteWorld) -> None:
    """The difference of two answers about almost the same patients is about the few who are in one alone."""
    open_world(site, policy=POLICY.replace("= 100\n", "= 1000\n"))
    tell(site)
    narrower: list[Any] = [{"name": "age", "high": 89}, {"name": "years"}, {"name": "alter", "low": 18}]
    for number, column in enumerate(narrower):
        request = asked(f"icu-{number}", columns=[column])
        site.coordinator.summary_requests = [canonical.dumps(request.document())]
        assert site.trainer is not None
        site.trainer.summary = answered(AGE, sources=("years",))
        with pytest.raises(NeedsPerson, match="figures of these columns have left already"):
            tell(site, request.name)
    site.restart()
    with pytest.raises(NeedsPerson, match="figures of these columns have left already"):
        tell(site, "icu-2")
    assert len(site.coordinator.told) == 1


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/exit/ledger_state.py")
def test_overlapping_requests__after_a_rollover(site: SiteWorld) -> None:
    """The coordinator takes the ledger no longer, so that people begin a new one, as the hint says: in that no figures
    have left yet, and the narrower request was answered without a word."""
    open_world(site, policy=POLICY.replace("= 100\n", "= 1000\n"))
    tell(site)
    site.roll_over()
    site.coordinator.wait_connected()
    site.coordinator.summary_requests = [canonical.dumps(asked("icu-2", columns=[{"name": "alter"}]).document())]
    assert site.trainer is not None
    site.trainer.summary = answered(AGE, sources=("years",))
    with pytest.raises(NeedsPerson, match="figures of these columns have left already: `years` on "):
        tell(site, "icu-2")
    assert len(site.coordinator.told) == 1


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/summaries.py")
def test_request_swapped_before_it_is_sent(site: SiteWorld) -> None:
    """What a person looked at is one request; what the coordinator offers a second later is another."""
    open_world(site)
    digest = show(site)["digest"]
    columns: list[Any] = ["age", {"name": "ward", "kind": "categorical", "categories": ["icu", "hospice"]}]
    site.coordinator.summary_requests = [canonical.dumps(asked(columns=columns).document())]
    with pytest.raises(NeedsPerson, match="not those that were shown"):
        tell(site, digest=digest)
    assert not site.coordinator.told


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/commands.py")
def test_request_swapped_before_it_is_sent__whether_data_fits(site: SiteWorld) -> None:
    """Somebody looks at what would be told of a study, 100 rows, and tells it. By then the coordinator offers another
    study of that name, whose ranges leave the one patient in whom it is interested; or a trainer that was taken over
    says another number. That was told, unseen."""
    fits.offered(site)
    assert site.trainer is not None
    shown = site.digest
    site.offer(title="of those aged 89 alone")
    wait_until(lambda: site.state.offer(STUDY).digest != shown, "the other study is kept", 20)
    with pytest.raises(
        NeedsPerson, match=r"is not what was shown: the study, the data or its mapping changed; nothing"
    ):
        fits.fit(site, digest=shown)
    assert not site.trainer.commands("examine")
    with pytest.raises(NeedsPerson, match="is not what was shown"):
        fits.fit(site, rows=99)
    with pytest.raises(NeedsPerson, match="is not what was shown"):
        fits.fit(site, fits=False, rows=0)
    assert not site.coordinator.declared
    assert not site.lines("declare")
    assert fits.fit(site)["rows"] == 100


@pytest.mark.attack(promise="P2", refused_by="site_agent/gateway/policy/decisions.py")
def test_request_without_a_policy(site: SiteWorld) -> None:
    """A coordinator asks where nobody allowed it: statistics are off until a person writes otherwise."""
    open_world(site, policy=POLICY.partition("[statistics]")[0])
    with pytest.raises(NotPermitted, match=r"statistics\.requests names no such request; nothing was sent"):
        tell(site)
    assert not site.coordinator.told


HOSTILE = [
    pytest.param({"title": "\x1b[2J"}, id="escape"), pytest.param({"title": "a\u202eb"}, id="direction"),
    pytest.param({"name": "../x"}, id="name"), pytest.param({"columns": ["a\nb"]}, id="line break"),
    pytest.param({"columns": [{"name": "a", "until": "x" * 300, "kind": "date"}]}, id="long"),
    pytest.param({"sites": ["elsewhere"]}, id="another site's"), pytest.param({"more": 1}, id="unknown key"),
    pytest.param({"missing": ["x" * 100]}, id="token"), pytest.param({"columns": []}, id="nothing"),
]  # fmt: skip


@pytest.mark.attack(promise="P11", refused_by="proto/wardround/records/summaries/request.py")
@pytest.mark.parametrize("change", HOSTILE)
def test_hostile_request(site: SiteWorld, change: dict[str, Any]) -> None:
    """A request that a terminal would obey, or that has no end, is left out; the others are there."""
    open_world(site)
    document = {**asked("icu-bad").document(), **change}
    site.coordinator.summary_requests += [canonical.dumps(document), b"{", b"[" * 60000, b" " * (MOST_BYTES + 1)]
    assert [one["name"] for one in site.command("summaries")["requests"]] == ["icu-columns"]
    site.coordinator.summary_requests = [b"{"] * (MOST_OPEN + 1)
    with pytest.raises(BadData, match=f"more than {MOST_OPEN} summary requests"):
        site.command("summaries")


SMUGGLED = [
    pytest.param(answered({**AGE, "values": 1}, WARD), id="a cell of one"),
    pytest.param(answered({**AGE, "mean": "60.2137"}, WARD), id="in the digits"),
    pytest.param(answered({**AGE, "mean": "Smith"}, WARD), id="as text"),
    pytest.param(answered({**AGE, "name": "Smith"}, WARD), id="in a field of its own"),
    pytest.param(answered(AGE, {**WARD, "categories": [60, 0, 10, 20, 30]}), id="in further categories"),
    pytest.param(answered(AGE, WARD, AGE), id="in further columns"),
    pytest.param(answered({**AGE, "values": 2**53 - 1}, WARD), id="in a large count"),
    pytest.param(answered({**AGE, "absent": True}, WARD), id="in a column that is not there"),
    pytest.param(answered(AGE, {**WARD, "low": "1e99", "high": "1e99"}), id="in bounds of a category"),
    pytest.param(answered(sources=("a\x1b[2Jb", "ward")), id="to the terminal"),
]


@pytest.mark.attack(promise="P2", refused_by="proto/wardround/records/summaries/figures.py")
@pytest.mark.parametrize("answer", SMUGGLED)
def test_trainer_that_lies(site: SiteWorld, answer: dict[str, Any]) -> None:
    """A trainer that was taken over puts a patient into the figures; a person would let it leave unseen."""
    open_world(site, service=False)
    assert site.trainer is not None
    site.trainer.summary = answer
    line = ["data", "summary", "patients", "--request", "icu-columns", "--send", "--state", str(site.state.root)]
    done = CliRunner().invoke(main.app, line)
    assert isinstance(done.exception, WardroundError)
    assert not site.coordinator.told
    assert not site.lines("summary")


@pytest.mark.attack(promise="P2", refused_by="site_agent/gateway/summaries.py")
def test_words_beside_the_figures(site: SiteWorld) -> None:
    """What a trainer says to the person, and where a column comes from, stays at the hospital."""
    open_world(site)
    assert site.trainer is not None
    site.trainer.summary = answered(sources=("smith", "jones"), notes=["miller"])
    tell(site)
    heard = b"".join(site.coordinator.heard)
    assert not [word for word in (b"smith", b"jones", b"miller", b"surgical") if word in heard]


@pytest.mark.attack(promise="P11", refused_by="coordinator/summaries/keeping.py")
def test_site_that_lies(tmp_path: Path) -> None:
    """A member tells figures without end, of others' requests, or of no request: nothing of it is kept."""
    with placed(tmp_path) as place:
        alpha, bravo = place.join("alpha"), place.join("bravo")
        request = asked(sites=["alpha"])
        place.ask("summary_create", document=request.document())
        message = summaries_pb2.SiteSummary(
            request=request.name, digest=bytes.fromhex(request.digest), min_count=10, digits=3, rows=100,
            columns=[summaries_pb2.ColumnSummary(values=100), summaries_pb2.ColumnSummary(categories=[100, 0])],
        )  # fmt: skip
        with refused("SUMMARY_UNKNOWN"):
            summaries_pb2_grpc.SummariesStub(bravo.channel).TellSummary(message, timeout=60)
        stub = summaries_pb2_grpc.SummariesStub(alpha.channel)
        for change, code in (
            ({"min_count": 1}, "MESSAGE_MALFORMED"), ({"digits": 9}, "MESSAGE_MALFORMED"),
            ({"request": "x" * 70}, "MESSAGE_MALFORMED"), ({"rows": 2**63}, "MESSAGE_MALFORMED"),
            ({"rows": 7}, "SUMMARY_INVALID"), ({"request": "other"}, "SUMMARY_UNKNOWN"),
            ({"digest": b"x"}, "MESSAGE_MALFORMED"), ({"digest": b"x" * 32}, "SUMMARY_CHANGED"),
        ):  # fmt: skip
            other = summaries_pb2.SiteSummary()
            other.CopyFrom(message)
            for name, value in change.items():
                setattr(other, name, value)
            with refused(code):
                stub.TellSummary(other, timeout=60)
        large = summaries_pb2.SiteSummary(columns=[summaries_pb2.ColumnSummary(categories=[2**50] * 1000)] * 20)
        with refused("MESSAGE_MALFORMED"):
            stub.TellSummary(large, timeout=60)
        assert place.ask("summary_list")["requests"][0]["told"] == 0
        stub.TellSummary(message, timeout=60)


AGES: list[Any] = [{"name": "admission", "kind": "date", "until": "birth"}]


def ages(folder: Path, columns: list[Any], mapping: str = "") -> dict[str, Any]:
    """What a site's own trainer answers where a table has dates of birth."""
    rows = [f"{1930 + n % 50}-0{1 + n % 9}-11,2020-0{1 + n % 9}-2{n % 10}" for n in range(100)]
    (folder / "table.csv").write_text("\n".join(["birth,admission", *rows]) + "\n")
    (folder / "mapping.toml").write_text(mapping)
    trained.add(folder, label="birth", **({"mapping": str(folder / "mapping.toml")} if mapping else {}))
    answer: dict[str, Any] = trained.ask(folder, *columns).to_document()
    return {key: answer[key] for key in ("rows", "columns", "sources", "notes")}


@pytest.mark.attack(promise="P2", refused_by="site_agent/gateway/policy/decisions.py")
@pytest.mark.parametrize("by", ["the request", "the mapping"])
def test_denied_column_as_the_end_of_a_date(site: SiteWorld, tmp_path: Path, by: str) -> None:
    """A hospital denies a column. The coordinator asks for the time from another one until that: the patients' ages."""
    columns = AGES if by == "the request" else ["age"]
    rule = '[columns.age]\ncolumn = "admission"\ndate = "%Y-%m-%d"\nuntil = "birth"\nunit = "years"\n'
    open_world(site, policy=POLICY + 'deny = ["birth"]\n')
    request = asked(columns=columns)
    site.coordinator.summary_requests = [canonical.dumps(request.document())]
    assert site.trainer is not None
    site.trainer.summary = ages(tmp_path, columns, "" if by == "the request" else rule)
    assert site.trainer.summary["columns"][0]["mean"]  # there is something to tell
    with pytest.raises(NotPermitted, match=r"column `birth`: statistics\.deny 'birth'; nothing was sent"):
        tell(site)
    assert not site.coordinator.told


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/summaries.py")
def test_overlapping_requests__by_the_end_of_a_date(site: SiteWorld, tmp_path: Path) -> None:
    """The same times again, counted from their end: no column is asked for twice by its name."""
    open_world(site)
    turned = [{"name": "birth", "kind": "date", "until": "admission"}]
    for number, columns in enumerate((AGES, turned)):
        site.coordinator.summary_requests = [canonical.dumps(asked(f"icu-{number}", columns=columns).document())]
        assert site.trainer is not None
        site.trainer.summary = ages(tmp_path, columns)
        if number == 0:
            assert [(one["column"], one["until"]) for one in show(site, "icu-0")["columns"]] == [("admission", "birth")]
            tell(site, "icu-0")
    site.restart()
    with pytest.raises(NeedsPerson, match="figures of these columns have left already: `birth` on "):
        tell(site, "icu-1")
    assert len(site.coordinator.told) == 1
