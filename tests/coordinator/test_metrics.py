"""What the sites report over the rounds, as an operator sees it: figures, tables, CSV and the page."""

import csv
import html
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.cli.main import app
from coordinator.cli.metrics import bars
from coordinator.cli.printing import print_status
from coordinator.metric_answers import StudyMetrics, number
from coordinator.studies.metrics import metrics_of
from coordinator.studies.page import page
from coordinator.study_answers import StudyReport, StudyStatus
from tests.coordinator.conftest import Place
from tests.coordinator.fake_site import FakeSite, delta
from tests.coordinator.test_rounds import SPECS

PAIR = ("alpha", "bravo")
LOSS = {
    ("alpha", 1): "0.7", ("bravo", 1): "0.9", ("alpha", 2): "0.5", ("bravo", 2): "null", ("alpha", 3): "0.4",
    ("bravo", 3): "0.6",
}  # fmt: skip


def answer(site: FakeSite) -> None:
    """Do the site's next assignment, with the numbers of ``LOSS``, and one trained row more a round."""
    assignment = site.next_assignment()
    loss = LOSS[site.name, assignment.round]
    update = delta(site.name, assignment.round, () if assignment.HasField("validate") else SPECS)
    site.answer(assignment, replace(update, metrics=(("val_loss", loss),), num_validation=10))


@pytest.fixture
def finished(place: Place) -> Place:
    sites = place.begin(sites=list(PAIR), rounds=2)
    for _ in range(3):
        for site in sites:
            answer(site)
    place.until(lambda status: status["state"] == "finished")
    return place


def command(place: Place, *words: str) -> str:
    made = CliRunner().invoke(app, ["study", "metrics", "trial", *words, "--state", str(place.state.root)])
    assert made.exit_code == 0, made.output
    return made.stdout


def reported(place: Place) -> StudyMetrics:
    return metrics_of(StudyReport.from_document(place.ask("report", study="trial")))


def test_a_round_s_numbers_are_of_the_model_that_the_site_downloaded(finished: Place) -> None:
    known = reported(finished)
    assert known.curve("val_loss", "alpha") == ((0, 0.7), (1, 0.5), (2, 0.4))
    assert known.curve("val_loss", "bravo") == ((0, 0.9), (2, 0.6))  # "null" is no number
    assert [value for _, value in known.mean_curve("val_loss")] == pytest.approx([0.8, 0.5, 0.5])
    assert [(row.site, row.round, row.model, row.closing) for row in known.reported[-2:]] == [
        ("alpha", 3, 2, True), ("bravo", 3, 2, True),
    ]  # fmt: skip
    assert all(row.seconds is not None and row.seconds >= 0 for row in known.reported)
    assert StudyMetrics.from_document(json.loads(json.dumps(known.document()))) == known


def test_what_a_round_under_way_has_brought_so_far_is_there(place: Place) -> None:
    alpha, _ = place.begin(sites=list(PAIR), rounds=2)
    answer(alpha)
    place.until(lambda status: status["sites"]["alpha"]["state"] == "accepted")
    known = reported(place)
    assert known.curve("val_loss", "alpha") == ((0, 0.7),)
    assert known.curve("val_loss", "bravo") == ()


def test_the_table_has_a_line_for_each_site_and_their_mean(finished: Place) -> None:
    lines = [" ".join(line.split()) for line in command(finished).splitlines() if line.strip()]
    assert lines[0] == "trial, revision 1: what the sites reported of each model; model 0 is the initial one"
    assert lines[1:3] == ["val_loss", "site first last (model) lowest highest curve"]
    assert lines[4:7] == [
        "alpha 0.7 0.4 (2) 0.4 0.7 ▅▂▁",
        "bravo 0.9 0.6 (2) 0.6 0.9 █▄",
        "all sites 0.8 0.5 (2) 0.5 0.8 ▇▂▂",
    ]
    every = [line.split() for line in command(finished, "--every").splitlines() if line.strip()]
    assert every[4:7] == [["0", "0.7", "0.9", "0.8"], ["1", "0.5", "0.5"], ["2", "0.4", "0.6", "0.5"]]


def test_csv_has_each_number_as_it_was_sent(finished: Place) -> None:
    rows = list(csv.DictReader(io.StringIO(command(finished, "--csv"))))
    assert {(row["site"], int(row["round"])): row["value"] for row in rows} == LOSS
    assert rows[0] | {"seconds": ""} == {
        "study": "trial", "revision": "1", "site": "alpha", "model": "0", "round": "1", "attempt": "1",
        "closing": "no", "metric": "val_loss", "value": "0.7", "rows": "15", "validation_rows": "10", "seconds": "",
    }  # fmt: skip


def test_a_metric_that_the_study_does_not_report_is_named(finished: Place) -> None:
    words = ["study", "metrics", "trial", "--metric", "auc", "--state", str(finished.state.root)]
    made = CliRunner().invoke(app, words)
    assert str(made.exception) == "study `trial` reports no `auc`"
    assert getattr(made.exception, "hint", "") == "it reports: val_loss"


def test_a_study_of_which_nothing_was_reported_says_so(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.begin(sites=list(PAIR))
    made = CliRunner().invoke(app, ["study", "metrics", "trial", "--state", str(place.state.root)])
    assert made.exit_code == 0
    assert "No site has reported anything of study `trial` yet" in made.output


def test_the_page_has_each_site_s_line_and_the_numbers(finished: Place) -> None:
    report = StudyReport.from_document(finished.ask("report", study="trial"))
    text = html.unescape(page(report, metrics_of(report)))
    assert text.count('<polyline class="further"') == 2
    assert "<title>alpha</title>" in text
    assert '<tr><td class="n">1</td><td class="n">0.5</td><td class="n">0.5</td><td class="n"></td></tr>' in text
    assert "seconds a round" in text
    assert "Asked, and not in the model" not in text


def test_bars_are_at_most_forty_and_end_with_the_last() -> None:
    assert bars([0, 1], 0, 1) == "▁█"
    assert bars([2, 2, 2], 2, 2) == "▄▄▄"
    assert len(bars(list(range(1000)), 0, 999)) <= 41
    assert bars(list(range(1000)), 0, 999)[-1] == "█"


@pytest.mark.parametrize("text", ["null", "nan", "inf", "", "x"])
def test_what_is_no_finite_number_is_none(text: str) -> None:
    assert number(text) is None


def test_the_list_and_the_status_say_who_approved_whose_data_fits_and_why_a_site_is_out(
    place: Place, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from wardround.v1 import federation_pb2 as pb

    alpha, bravo, _ = (place.join(site) for site in ("alpha", "bravo", "charlie"))
    place.create(quorum=1, round_deadline_s=30)
    alpha.declare("trial", pb.FITS, rows=412)
    bravo.declare("trial", pb.DOES_NOT_FIT)
    alpha.declare("trial")
    bravo.declare("trial")
    row = place.ask("studies")["studies"][0]
    assert (row["approved"], row["sites"], row["why"]) == (2, 3, "")
    place.sites["charlie"].declare("trial")
    place.ask("start", study="trial")
    for site in (alpha, bravo, place.sites["charlie"]):
        if site is bravo:
            site.decline(site.next_assignment(), "DECLINED_DATA_CHANGED")
        else:
            site.answer(site.next_assignment())
    place.until(lambda status: status["round"] == 2)
    print_status(StudyStatus.from_document(place.status()))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert "site approved data state rounds seconds code" in lines
    assert any(line.startswith("alpha yes fits, 412 ") for line in lines)
    assert any(line.startswith("bravo yes does not fit ") for line in lines)
    assert "not in the model: bravo: declined DECLINED_DATA_CHANGED, once" in lines
    report = StudyReport.from_document(place.ask("report", study="trial"))
    assert [(absence.round, absence.why) for absence in report.sites["bravo"].absent] == [(1, "declined")]
    assert "Asked, and not in the model" in page(report, metrics_of(report))
