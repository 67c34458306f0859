"""The report of a comparison, its numbers worked out again from the files of the runs."""

import base64
import csv
import io
import json
import re
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fl_algorithms.lab import plots, ranking, report, results, tables
from fl_algorithms.lab.cli import app
from fl_algorithms.lab.markdown import markdown
from tests.fl_algorithms.test_lab_compare import CENTRAL, FEDAVG, FENDA, HEAD, TUNED, compared, hospitals, suite_file
from wardround.errors import BadData, UsageProblem
from wardround.pages.blocks import Answer, Claim, Grid, Paragraph

SITES, SEEDS = ("ash", "birch"), (5, 6, 7)
T_2 = 4.302653  # t(0.975, 2), from a table
SILO = """
[[row]]
name = "silo"
label = "Silo <b> | alone"
kind = "silo"
variant = "fedavg"
"""
PROTOCOL = """
[protocol]
matrix = true
personalisation = [1, 3]
sharpness = true
leave_one_out = true
"""
ROWS = FEDAVG + 'label = "FedAvg"\n' + FENDA + 'label = "FENDA-FL"\n' + SILO + CENTRAL + TUNED


@pytest.fixture(scope="module")
def compared_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five rows, three seeds, and the second hospital's test rows are all healthy, so it has no AUC."""
    folder = tmp_path_factory.mktemp("compared")
    data = hospitals(folder / "data", one_class=True)
    tally = compared(suite_file(folder, HEAD + PROTOCOL + ROWS), data, folder / "out", seeds=3, command="fl-lab again")
    assert not tally.failed
    return folder / "out"


@pytest.fixture(scope="module")
def made(compared_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    report.write(compared_once, out)
    return out


@pytest.fixture
def out(compared_once: Path, tmp_path: Path) -> Path:
    """A copy of the runs, to be changed."""
    return shutil.copytree(compared_once, tmp_path / "out")


def lines_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text(), newline="")))


def run(folder: Path, row: str, seed: int) -> Any:
    return json.loads((folder / "runs" / row / f"{seed}.json").read_text())


def cell(made: Path, table: str, row: str, checkpoint: str, column: str) -> dict[str, str]:
    (found,) = (
        line
        for line in lines_of(made / "tables.csv")
        if (line["table"], line["row"], line["checkpoint"], line["column"]) == (table, row, checkpoint, column)
    )
    return found


def assert_is_mean_of(found: dict[str, str], values: list[float]) -> None:
    """Three runs: mean, s and t s / sqrt(3), the long way."""
    mean = sum(values) / 3
    sd = (sum((value - mean) ** 2 for value in values) / 2) ** 0.5
    assert found["runs"] == "3"
    assert float(found["mean"]) == pytest.approx(mean)
    assert float(found["ci95"]) == pytest.approx(T_2 * sd / 3**0.5, rel=1e-5, abs=1e-12)


@pytest.mark.parametrize("row", ["fedavg", "fenda", "silo", "central", "tuned"])
def test_a_score_is_the_mean_over_runs_of_the_mean_over_sites(row: str, made: Path, compared_once: Path) -> None:
    values = []
    for seed in SEEDS:
        at = run(compared_once, row, seed)["checkpoints"]
        values.append(sum(at[site]["best_local"]["scores"]["accuracy"] for site in SITES) / 2)
    assert_is_mean_of(cell(made, "main", row, "best_local", "mean"), values)
    at_ash = [run(compared_once, row, seed)["checkpoints"]["ash"]["latest"]["score"] for seed in SEEDS]
    assert_is_mean_of(cell(made, "sites", row, "latest", "ash"), at_ash)


def test_differences_are_paired_by_seed(made: Path, compared_once: Path) -> None:
    differences = []
    for seed in SEEDS:
        means = [
            sum(run(compared_once, row, seed)["checkpoints"][site]["latest"]["score"] for site in SITES) / 2
            for row in ("fenda", "fedavg")
        ]
        differences.append(means[0] - means[1])
    found = cell(made, "differences", "fenda", "latest", "minus fedavg")
    assert float(found["mean"]) == pytest.approx(sum(differences) / 3)
    spread = T_2 * statistics.stdev(differences) / 3**0.5
    assert float(found["ci95"]) == pytest.approx(spread, rel=1e-5, abs=1e-12)
    assert int(found["wins"]) == sum(difference > 0 for difference in differences)
    assert not [
        line for line in lines_of(made / "tables.csv") if (line["table"], line["row"]) == ("differences", "fedavg")
    ]


def test_a_silo_row_also_gives_each_sites_model_at_every_site(made: Path, compared_once: Path) -> None:
    for site in SITES:
        values = []
        for seed in SEEDS:
            matrix = run(compared_once, "silo", seed)["measures"]["matrix"]["kinds"]["best_local"]["matrix"]["accuracy"]
            values.append((matrix[site]["ash"] + matrix[site]["birch"]) / 2)
        assert_is_mean_of(cell(made, "main", f"silo:{site}", "best_local", "mean"), values)


@pytest.mark.parametrize(
    ("table", "column", "path"),
    [
        ("local_global", "global", ("matrix", "kinds", "latest", "global", "accuracy")),
        ("local_global", "other sites", ("matrix", "kinds", "latest", "ood", "accuracy")),
        ("personalisation", "local at 3", ("personalisation", "latest", "3", "local", "accuracy")),
        ("personalisation", "global at 0", ("personalisation", "latest", "0", "global", "accuracy")),
        ("sharpness", "median", ("sharpness", "latest", "median")),
        ("sharpness", "birch", ("sharpness", "latest", "sites", "birch")),
        ("leave_one_out", "mean", ("leave_one_out", "mean", "latest", "accuracy")),
        ("leave_one_out", "ash", ("leave_one_out", "sites", "ash", "kinds", "latest", "accuracy")),
    ],
)
def test_what_the_protocol_measured_is_meant_over_the_runs(
    table: str, column: str, path: tuple[str, ...], made: Path, compared_once: Path
) -> None:
    values = []
    for seed in SEEDS:
        value = run(compared_once, "fenda", seed)["measures"]
        for key in path:
            value = value[key]
        values.append(value)
    assert_is_mean_of(cell(made, table, "fenda", "latest", column), values)


CHOOSING = """
[[row]]
name = "choosing"
label = "Choosing"
variant = "fedavg"
set = ["checkpoints.alone=true", 'checkpoints.selection="hedged"']
"""


def test_what_each_site_chose_is_counted_and_weighed_against_what_it_did_not_choose(tmp_path: Path) -> None:
    data = hospitals(tmp_path / "data")
    suite = suite_file(tmp_path, HEAD.replace('"fedavg"', '"choosing"') + CHOOSING)
    assert not compared(suite, data, tmp_path / "out", seeds=3).failed
    report.write(tmp_path / "out", tmp_path / "made")
    at = {seed: run(tmp_path / "out", "choosing", seed)["checkpoints"] for seed in SEEDS}
    for kind in ("alone", "best_global"):
        differences = [
            sum(sites[site]["selected"]["score"] - sites[site][kind]["score"] for site in SITES) / 2
            for sites in at.values()
        ]
        assert_is_mean_of(cell(tmp_path / "made", "selection", "choosing", kind, "mean: selected minus"), differences)
        at_birch = [sites["birch"]["selected"]["score"] - sites["birch"][kind]["score"] for sites in at.values()]
        assert_is_mean_of(cell(tmp_path / "made", "selection", "choosing", kind, "birch: selected minus"), at_birch)
    names = [sites[site]["selected"]["why"].split(":")[0] for sites in at.values() for site in SITES]
    said = (tmp_path / "made" / "report.md").read_text()
    for name in set(names):
        assert f"| Choosing | {name} | {names.count(name)} |" in said


def test_a_report_of_rows_without_a_choice_does_not_speak_of_one(made: Path) -> None:
    assert "What each site chose" not in (made / "report.md").read_text()


def test_scores_csv_holds_every_defined_score_once(made: Path, compared_once: Path) -> None:
    found = {
        (line["row"], int(line["seed"]), line["site"], line["checkpoint"], line["metric"]): line
        for line in lines_of(made / "scores.csv")
    }
    assert len(found) == len(lines_of(made / "scores.csv"))
    for row in ("fedavg", "fenda", "silo", "central", "tuned"):
        for seed in SEEDS:
            for site, kinds in run(compared_once, row, seed)["checkpoints"].items():
                for kind, checkpoint in kinds.items():
                    for metric, score in checkpoint["scores"].items():
                        line = found.pop((row, seed, site, kind, metric), None)
                        assert (None if line is None else float(line["value"])) == score
                        assert line is None or line["split"] == "test"
                    assert float(found.pop((row, seed, site, kind, "val_loss"))["value"]) == checkpoint["val_loss"]
    assert {row for row, *_ in found} == {"silo:ash", "silo:birch"}


def test_an_undefined_score_is_named_and_left_out(made: Path) -> None:
    said = (made / "report.md").read_text()
    assert "auc is undefined at birch and left out of every mean: fedavg in 3 of 3 runs, " in said
    assert not [line for line in lines_of(made / "scores.csv") if (line["metric"], line["site"]) == ("auc", "birch")]


def test_every_point_of_a_grid_is_shown_and_the_chosen_one_marked(made: Path, compared_once: Path) -> None:
    means = []
    for point in (0, 1):
        losses = []
        for seed in (1005, 1006):
            tuning = json.loads((compared_once / "runs/tuned" / f"{seed}-tuning-{point}.json").read_text())
            weights = {site: tuning["rows"][site]["validation"] for site in SITES}
            told = {site: tuning["checkpoints"][site]["best_global"]["val_loss"] for site in SITES}
            losses.append(sum(weights[site] * told[site] for site in SITES) / sum(weights.values()))
        means.append(sum(losses) / 2)
    said = (made / "report.md").read_text()
    for point, rate in enumerate(("0.001", "0.3")):
        mark = "chosen" if means[point] == min(means) else ""
        shown = f"| tuned | training.learning_rate={rate} | {mark} | best_global, 2 runs | {means[point]:.6g} |"
        assert shown in said


def test_the_report_says_what_repeats_it(made: Path, compared_once: Path) -> None:
    said = (made / "report.md").read_text()
    record = json.loads((compared_once / "suite.json").read_text())
    assert "```\nfl-lab again\n```" in said
    for fact in (record["digest"], *record["versions"].values(), *record["data"].values()):
        assert fact in said
    assert f"| FENDA-FL | 5 | {run(compared_once, 'fenda', 5)['study_digest']} |" in said


def test_missing_and_failed_runs_are_named(out: Path, tmp_path: Path) -> None:
    (out / "runs/fenda/6.json").unlink()
    failure = {"format": 1, "run": "fenda: seed 6", "message": "birch: the disk is full", "trace": ""}
    (out / "runs/fenda/6.failed.json").write_text(json.dumps(failure))
    for path in (out / "runs/tuned").glob("1006-*.json"):
        path.unlink()
    for path in (out / "runs/tuned").glob("?.json"):
        path.unlink()
    report.write(out, tmp_path / "report")
    said = (tmp_path / "report/report.md").read_text()
    assert "- FENDA-FL: 2 of 3 seeds; missing are 6; 1 runs failed, see below." in said
    assert "- tuned: 0 of 3 seeds, for its tuning is not complete; missing are 5, 6, 7." in said
    assert "| fenda: seed 6 | birch: the disk is full |" in said
    assert cell(tmp_path / "report", "main", "fenda", "latest", "mean")["runs"] == "2"
    assert cell(tmp_path / "report", "differences", "fenda", "latest", "minus fedavg")["runs"] == "2"


def test_identical_runs_raise_a_warning(out: Path) -> None:
    for seed in SEEDS[1:]:
        (out / f"runs/fenda/{seed}.json").write_text((out / "runs/fenda/5.json").read_text())
    said = [text.partition(":")[0] for text in report.warnings(results.load(out)) if "FENDA-FL" in text]
    bits = "so its interval is 0, and their final models are the same bits"
    assert said == [f"The 3 runs of FENDA-FL have the same {kind} score, {bits}" for kind in ("latest", "best_local")]


def test_one_seed_has_no_interval(out: Path) -> None:
    record = json.loads((out / "suite.json").read_text())
    (out / "suite.json").write_text(json.dumps(record | {"seeds": 1}))
    found = results.load(out)
    assert "There is one seed, so no interval." in report.warnings(found)
    assert {stat.ci95 for stat in tables.main(found).cells.values()} == {None}


class Outside(HTMLParser):
    """What a page asks others for, and whether its tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.open: list[str] = []
        self.seen: dict[str, int] = defaultdict(int)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] += 1
        for name, value in attrs:
            if name in ("src", "href", "data", "action", "srcset", "poster") and not str(value).startswith(
                ("data:", "#")
            ):
                self.asked.append(f"{tag} {name}={value}")
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_asks_for_nothing_else_and_shows_every_plot(made: Path) -> None:
    text = (made / "index.html").read_text()
    parsed = Outside()
    parsed.feed(text)
    assert (parsed.asked, parsed.open) == ([], [])
    assert parsed.seen["script"] == parsed.seen["link"] == parsed.seen["b"] == 0
    assert "url(" not in text
    pictures = [base64.b64decode(found) for found in re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', text)]
    assert len(pictures) == parsed.seen["img"] == 7
    drawn = ("scores", "differences", "matrix", "local_global", "personalisation", "sharpness", "unseen")
    for name in drawn:
        assert (made / f"{name}.svg").read_bytes() in pictures
        assert (made / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    for picture in pictures:  # what a picture links to is inside it
        assert all(link.startswith((b"#", b"data:")) for link in re.findall(rb'xlink:href="([^"]+)"', picture))


def test_a_row_without_a_mean_takes_no_line_of_a_picture() -> None:
    series = {"local": {"Silo": tables.Stat(3, 0.6, 0.05, 0.02)}, "global": {"Silo": tables.Stat(3, 0.5, None, None)}}
    with plots.style():
        assert plots.dots(["FedMD", "Silo", "KT-pFL"], series, "auc") == plots.dots(["Silo"], series, "auc")


def test_another_metric_is_shown_on_request_and_an_unknown_one_refused(compared_once: Path, tmp_path: Path) -> None:
    report.write(compared_once, tmp_path, "accuracy")
    lines = lines_of(tmp_path / "tables.csv")
    assert {line["metric"] for line in lines} == {"accuracy", "eigenvalue"}
    found = cell(tmp_path, "main", "fedavg", "latest", "mean")
    runs = [run(compared_once, "fedavg", seed)["checkpoints"] for seed in SEEDS]
    assert_is_mean_of(
        found, [statistics.fmean(r[site]["latest"]["scores"]["accuracy"] for site in SITES) for r in runs]
    )
    with pytest.raises(UsageProblem, match="have no metric `dice`") as refused:
        report.write(compared_once, tmp_path, "dice")
    assert "accuracy" in str(refused.value.hint)


def test_another_row_can_be_compared_with(compared_once: Path, made: Path, tmp_path: Path) -> None:
    report.write(compared_once, tmp_path, reference="fenda")
    there = cell(tmp_path, "differences", "fedavg", "latest", "minus fenda")
    back = cell(made, "differences", "fenda", "latest", "minus fedavg")
    assert float(there["mean"]) == pytest.approx(-float(back["mean"]))
    with pytest.raises(UsageProblem, match="has no row `fedsgd`"):
        report.write(compared_once, tmp_path, reference="fedsgd")


def test_labels_are_text_in_every_form(made: Path) -> None:
    assert "Silo &lt;b&gt; | alone" in (made / "index.html").read_text()
    assert "| Silo <b> \\| alone |" in (made / "report.md").read_text()
    assert markdown("t", [Paragraph("p", warning=True)]) == "# t\n\n**Warning:** p\n"
    rows = Grid(("a", "b"), (("<i>", "1|2"),))
    assert markdown("t", [rows]) == "# t\n\n| a | b |\n| --- | ---: |\n| <i> | 1\\|2 |\n"
    answer = Answer("plain", "A is first", "B is near.", (Claim("Runs", "open", "3 of 4"),))
    assert markdown("t", [answer]) == "# t\n\n**A is first**\n\nB is near.\n\n- Runs: 3 of 4\n"


def test_the_best_row_comes_first_with_its_interval(made: Path, compared_once: Path) -> None:
    rows = ranking.ranked(results.load(compared_once))
    shown = dict.fromkeys(("fedavg", "fenda", "silo", "central", "tuned"), "best_local")
    means = {row: float(cell(made, "main", row, kind, "mean")["mean"]) for row, kind in shown.items()}
    best = max(means, key=means.__getitem__)
    assert rows[0].stat.mean == pytest.approx(max(means.values()), abs=0.2)  # a single site's model can be above it
    assert [row.stat.mean for row in rows] == sorted((row.stat.mean for row in rows), reverse=True)
    labels = {"fedavg": "FedAvg", "fenda": "FENDA-FL", "silo": "Silo <b> | alone", "central": "central"}
    first = next(row for row in rows if row.label in (*labels.values(), "tuned"))
    assert first.label == labels.get(best, best)
    said = (made / "report.md").read_text().splitlines()
    assert said[2].startswith(
        f"**Highest mean accuracy: {rows[0].label.replace('|', chr(92) + '|')}, {rows[0].stat.text()} ("
    )
    page = (made / "index.html").read_text()
    assert page.index('class="said"') < page.index("<table")


def test_where_intervals_overlap_the_answer_says_so(compared_once: Path) -> None:
    found = results.load(compared_once)
    apart = [ranked("A", 0.9, 0.01), ranked("B", 0.8, 0.05)]
    answer = ranking.answer(apart, found, 0)
    assert (answer.tone, answer.detail) == ("plain", "No interval of the other 1 rows reaches its own.")
    near = [ranked("A", 0.9, 0.01), ranked("B", 0.85, 0.05), ranked("C", 0.2, None)]
    assert ranking.answer(near, found, 2).detail.startswith("Its interval overlaps that of B: differences run by run")
    assert ranking.answer(near, found, 2).tone == "open"
    assert ranking.answer([], found, 0).text == "No row has a defined accuracy."


def ranked(label: str, mean: float, ci95: float | None) -> ranking.Ranked:
    return ranking.Ranked(label, "best_local", True, tables.Stat(3, mean, ci95, None), None)


def test_the_same_runs_make_the_same_report(compared_once: Path, made: Path, tmp_path: Path) -> None:
    for path in report.write(compared_once, tmp_path):
        assert path.read_bytes() == (made / path.name).read_bytes(), path.name


def test_a_folder_without_runs_is_refused_with_the_next_command(out: Path, tmp_path: Path) -> None:
    with pytest.raises(BadData) as refused:
        results.load(tmp_path / "nothing")
    assert refused.value.message == f"{tmp_path / 'nothing'} holds no comparison: it has no suite.json"
    shutil.rmtree(out / "runs")
    with pytest.raises(BadData) as refused:
        results.load(out)
    assert (refused.value.message, refused.value.hint) == (f"{out} has no finished run yet", "`fl-lab again`")


def test_a_file_that_is_not_a_run_is_named(out: Path) -> None:
    (out / "runs/fenda/5.json").write_text("{")
    with pytest.raises(BadData) as refused:
        results.load(out)
    assert refused.value.message.startswith(f"{out / 'runs/fenda/5.json'}: not JSON: ")


def test_without_matplotlib_the_command_says_what_to_install(out: Path) -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None\nfrom fl_algorithms.lab.cli import main\n"
        f"sys.argv = ['fl-lab', 'report', {str(out)!r}]\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 78
    assert done.stderr == (
        "error: the plots of a report need matplotlib, which is not installed\nhint: `pip install 'wardround[lab]'`\n"
    )


def test_the_command_writes_beside_the_runs_unless_told(out: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(out)], catch_exceptions=False)
    assert (out / "report" / "index.html").is_file()
    assert f"written: {out / 'report' / 'index.html'}" in done.stderr
