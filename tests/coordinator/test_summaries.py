"""Summary requests at the coordinator: what an operator may ask, what a site may tell, and what is made of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.cli.main import app
from coordinator.summaries.pooling import pooled
from coordinator.summary_answers import SummaryList, SummaryShown
from fl_algorithms.resolving import resolve
from tests.coordinator.conftest import Place, refused
from tests.coordinator.fake_site import FakeSite
from wardround import __version__
from wardround.errors import BadData, NeedsPerson
from wardround.records.schema import parse_toml
from wardround.records.study import StudyFile
from wardround.records.summaries.figures import ColumnFigures, SiteFigures
from wardround.records.summaries.request import MOST_OPEN, SummaryRequest, from_bytes, load
from wardround.signing import canonical
from wardround.v1 import summaries_pb2, summaries_pb2_grpc

FILE = """\
name = "icu-columns"
title = "Which columns?"
sites = ["alpha", "bravo"]
label = "died"
columns = [
  "age",
  { name = "ward", kind = "categorical", categories = ["icu", "surgical"] },
  { name = "died", kind = "boolean" },
  { name = "lactate", low = 0, high = 30 },
]
"""
AGE, WARD = (
    ColumnFigures(values=90, missing=10, mean="60", std="10"),
    ColumnFigures(values=100, categories=(60, 0), other=40),
)
MORE = ColumnFigures(values=30, mean="40", std="20", low="10", high="70")
DIED, ABSENT = ColumnFigures(values=100, categories=(80, 20)), ColumnFigures(absent=True)


@dataclass
class Asked:
    """A request in a file, and one site's figures for it."""

    path: Path
    request: SummaryRequest

    def figures(self, *columns: ColumnFigures, **changes: Any) -> SiteFigures:
        told = {
            "request": self.request.name, "digest": self.request.digest, "min_count": 10, "digits": 3, "rows": 100,
            "columns": columns or (AGE, WARD, DIED, ABSENT), **changes,
        }  # fmt: skip
        return SiteFigures.model_validate(told)


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    path = tmp_path / "request.toml"
    path.write_text(FILE)
    return Asked(path, load(path))


def create(place: Place, request: SummaryRequest) -> Any:
    return place.ask("summary_create", document=request.document())


def stub(site: FakeSite) -> Any:
    return summaries_pb2_grpc.SummariesStub(site.channel)


def tell(site: FakeSite, figures: SiteFigures) -> None:
    stub(site).TellSummary(figures.to_message(), timeout=60)


def offered(site: FakeSite) -> list[str]:
    reply = stub(site).SummaryRequests(summaries_pb2.SummaryRequestsRequest(agent_version=__version__), timeout=60)
    return [from_bytes(data).name for data in reply.documents]


def command(place: Place, *line: str) -> Any:
    return CliRunner().invoke(app, ["summary", *line, "--state", str(place.state.root)])


def test_a_request_reaches_its_sites_alone_and_their_figures_are_kept_through_a_restart(
    place: Place, asked: Asked
) -> None:
    alpha, bravo, charlie = (place.join(site) for site in ("alpha", "bravo", "charlie"))
    made = command(place, "create", str(asked.path))
    assert made.stdout == f"icu-columns {asked.request.digest}\n"
    assert [offered(site) for site in (alpha, bravo, charlie)] == [["icu-columns"], ["icu-columns"], []]
    tell(alpha, asked.figures(rows=90))
    tell(alpha, asked.figures())
    with refused("SUMMARY_UNKNOWN\nno open summary request `icu-columns` lists site `charlie`"):
        tell(charlie, asked.figures())
    place.restart()
    shown = SummaryShown.from_document(place.ask("summary_show", name="icu-columns"))
    assert {site: told.figures.rows if told else None for site, told in shown.sites.items()} == {
        "alpha": 100, "bravo": None,
    }  # fmt: skip
    listed = SummaryList.from_document(place.ask("summary_list"))
    assert [(row.name, row.open, row.columns, row.sites, row.told) for row in listed.requests] == [
        ("icu-columns", True, 4, 2, 1)
    ]


def test_figures_for_another_request_or_in_another_form_are_refused(place: Place, asked: Asked) -> None:
    alpha = place.join("alpha")
    create(place, asked.request)
    with refused("SUMMARY_CHANGED\nsummary request `icu-columns` is another one now"):
        tell(alpha, asked.figures(digest="ab" * 32))
    with refused("SUMMARY_INVALID\nthese figures are not what the request asks: they are of 1 columns, the request"):
        tell(alpha, asked.figures(AGE))
    with refused("SUMMARY_INVALID\nthese figures are not what the request asks: column `age`: a count is no multiple"):
        tell(alpha, asked.figures(AGE.model_copy(update={"values": 91}), WARD, DIED, ABSENT))
    broken = asked.figures().to_message()
    broken.columns[0].mean = "sixty"
    with refused("MESSAGE_MALFORMED\na summary has not its form"):
        stub(alpha).TellSummary(broken, timeout=60)
    broken = asked.figures().to_message()
    broken.columns.extend([summaries_pb2.ColumnSummary()] * 200)
    with refused("MESSAGE_MALFORMED\na summary has not its form"):
        stub(alpha).TellSummary(broken, timeout=60)
    assert all(site is None for site in place.ask("summary_show", name="icu-columns")["sites"].values())


def test_a_request_that_was_answered_never_changes(place: Place, asked: Asked) -> None:
    alpha = place.join("alpha")
    assert create(place, asked.request)["new"]
    assert not create(place, asked.request)["new"]
    other = asked.request.model_copy(update={"title": "Others"})
    assert create(place, other)["new"]  # nobody had answered
    create(place, asked.request)
    tell(alpha, asked.figures())
    with pytest.raises(NeedsPerson, match="sites have told their figures for another summary request `icu-columns`"):
        create(place, other)
    assert command(place, "close", "icu-columns").exit_code == 0
    assert offered(alpha) == []
    with refused("SUMMARY_UNKNOWN"):
        tell(alpha, asked.figures())
    again = command(place, "create", str(asked.path))
    assert "Summary request `icu-columns` is known with exactly this content, and is open" in again.output
    assert "Not enrolled yet: bravo" in again.output
    assert offered(alpha) == ["icu-columns"]


def test_no_more_requests_are_open_than_a_site_takes(place: Place, asked: Asked) -> None:
    for number in range(MOST_OPEN):
        create(place, asked.request.model_copy(update={"name": f"r{number}"}))
    create(place, asked.request.model_copy(update={"name": "r0", "title": "instead"}))
    with pytest.raises(NeedsPerson, match=f"{MOST_OPEN} summary requests are open already"):
        create(place, asked.request)
    place.ask("summary_close", name="r0")
    create(place, asked.request)
    with pytest.raises(BadData, match="there is no summary request `none` here"):
        place.ask("summary_close", name="none")


BAD = [
    ('name = "icu', 'name = "ICU', "`name`: 'ICU-columns' is not 1 to 64 of a-z, 0-9 and -"),
    ('"bravo"]', '"alpha"]', "site `alpha` stands twice"),
    ('"bravo"]', '"Bravo!"]', "site 'Bravo!' is not 1 to 64 of a-z, 0-9 and -"),
    ('label = "died"', 'label = "dead"', "the label `dead` is none of the columns"),
    ('  "age",', '  "died",', "column `died` stands twice"),
    ('  "age",', '  " age",', "' age' is not 1 to 200 printable characters without spaces around"),
    ('["icu", "surgical"]', '["icu"]', "column `ward` needs at least 2 categories, found 1"),
    ('["icu", "surgical"]', '["icu", "icu"]', "a category stands twice"),
    (', categories = ["icu", "surgical"]', "", "`categories` belong to the kind categorical, which needs them"),
    ('kind = "boolean"', 'kind = "date"', "`until` belongs to the kind date, which needs it"),
    ('kind = "boolean"', 'kind = "date", until = "died"', "column `died` is counted until itself"),
    ('kind = "boolean"', 'unit = "days"', "`unit` belongs to the kind date"),
    ('kind = "boolean"', 'kind = "boolean", low = 0', "`low` and `high` belong to numbers and dates"),
    ("low = 0", "low = 40", "column `lactate`: `low` is 40 and `high` 30; low is the lower"),
    ("title", "titel", "unknown key `titel`"),
    ('"Which columns?"', '"a\\u0007"', "it holds a character that cannot be printed"),
    (
        '  "age",',
        f'  {{ name = "x", kind = "categorical", categories = {[str(n) for n in range(51)]} }},',
        "at most 50",
    ),
]


@pytest.mark.parametrize(("old", "new", "said"), BAD)
def test_a_request_that_cannot_be_is_refused_with_its_key(
    place: Place, asked: Asked, old: str, new: str, said: str
) -> None:
    assert old in FILE
    asked.path.write_text(FILE.replace(old, new))
    made = command(place, "create", str(asked.path))
    assert made.exit_code == BadData.exit_code or isinstance(made.exception, BadData)
    assert said in getattr(made.exception, "message", made.output)


def test_a_request_that_is_too_large_is_refused() -> None:
    long = [f"{'x' * 190}{number}" for number in range(200)]
    many = [
        {"name": f"c{column}", "kind": "categorical", "categories": [str(number) for number in range(50)]}
        for column in range(21)
    ]
    categories = [{**one, "categories": [f"{'y' * 60}{number}" for number in range(50)]} for one in many[:20]]
    for columns, said in (
        (many, "more than 1000 categories together"),
        ([*long, *categories], "at most"),
        (["x"] * 201, "at most 200"),
    ):
        with pytest.raises(BadData, match=said):
            SummaryRequest.from_document({"name": "large", "sites": ["a"], "columns": columns})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"title": 5}, "a summary request has not its form", id="form"),
        pytest.param(
            {"columns": [{"name": "age", "kind": "numeric"}]}, "not written as its digest wants it", id="written"
        ),
    ],
)
def test_a_request_on_the_wire_is_in_its_one_form(asked: Asked, change: dict[str, Any], said: str) -> None:
    document = {**asked.request.document(), "label": "", **change}
    with pytest.raises(BadData, match=said) as caught:
        from_bytes(canonical.dumps(document))
    assert caught.value.code == "MESSAGE_MALFORMED"
    with pytest.raises(BadData, match="a summary request is too long"):
        from_bytes(b" " * (64 * 1024 + 1))
    assert from_bytes(canonical.dumps(asked.request.document())) == asked.request


def test_pooled_figures_are_those_of_all_rows_together(asked: Asked) -> None:
    ward = ColumnFigures(values=30, categories=(20, 10))
    age, wards, died, lactate = pooled(
        asked.request,
        [asked.figures(), asked.figures(MORE, ward, ColumnFigures(categories=(0, 0)), ABSENT, rows=30, digits=2)],
    )
    mean = (90 * 60 + 30 * 40) / 120
    std = ((90 * 10**2 + 30 * 20**2 + 90 * (60 - mean) ** 2 + 30 * (40 - mean) ** 2) / 120) ** 0.5
    assert (age.values, age.missing, age.sites, age.mean, age.std) == (120, 10, 2, f"{mean:.2g}", f"{std:.2g}")
    assert (age.low, age.high) == ("10", "70")
    assert (wards.categories, wards.other) == ((80, 10), 40)
    assert (died.below, died.categories) == (1, (80, 20))
    assert (lactate.sites, lactate.absent, lactate.mean) == (0, 2, "")


def test_the_operator_sees_each_site_and_all_together(place: Place, asked: Asked) -> None:
    alpha, bravo = (place.join(site) for site in ("alpha", "bravo"))
    create(place, asked.request)
    listed = command(place, "list").stdout
    assert [" ".join(line.split()) for line in listed.splitlines()][-2] == "icu-columns open 4 0 of 2 Which columns?"
    empty = command(place, "draft", "icu-columns")
    assert "no site has told anything for `icu-columns` yet" in getattr(empty.exception, "message", empty.output)
    tell(alpha, asked.figures())
    half = command(place, "show", "icu-columns").stdout
    assert half.startswith("icu-columns (open): 1 of 2 sites have told their figures\n")
    assert half.endswith("not told: bravo\n")
    tell(
        bravo,
        asked.figures(MORE, WARD, DIED, DIED.model_copy(update={"categories": ()})),
    )
    rows = [" ".join(line.split()) for line in command(place, "show", "icu-columns").stdout.splitlines()]
    assert "age alpha 90 10 <10 60 10" in rows
    assert "bravo 30 <10 <10 40 20 10 to 70" in rows
    assert "all 120 10 0 55 15.8 10 to 70" in rows
    assert "ward alpha 100 <10 <10 icu 60, surgical <10, other 40" in rows
    assert "lactate alpha no such column" in rows
    assert any(
        row.startswith("alpha: 100 rows, told 20") and row.endswith("counts are multiples of 10") for row in rows
    )


def test_a_study_is_drafted_from_what_the_sites_told(place: Place, asked: Asked) -> None:
    alpha = place.join("alpha")
    create(place, asked.request)
    told = AGE.model_copy(update={"low": "40", "high": "80", "unfit": 10})
    tell(alpha, asked.figures(told, WARD, DIED, ABSENT, rows=110))
    drafted = command(place, "draft", "icu-columns").stdout
    assert drafted.startswith("# Drafted from the summary `icu-columns` of 1 of 2 sites: read it")
    assert (
        '{ name = "age", low = 0, high = 120 },  # unit?; about 9 % missing; about 9 % do not fit: another ' in drafted
    )
    assert (
        '{ name = "ward", kind = "categorical", categories = ["icu", "surgical", "other"], other = "other" }' in drafted
    )
    assert '# "lactate" is left out: no site has it' in drafted
    tables = parse_toml(drafted.encode())
    tables |= {
        "study": {"name": "drafted", "sites": ["alpha"], "rounds": 1}, "model": {"name": "mlp"},
        "algorithm": {"name": "fedavg"}, "training": {"local_steps": 1},
    }  # fmt: skip
    study = resolve(StudyFile.model_validate(tables))
    assert study.document()["task"]["classes"] == ["0", "1"]
    wrong = command(place, "draft", "icu-columns", "--label", "none")
    assert "--label none: the request has no such column" in getattr(wrong.exception, "message", wrong.output)
