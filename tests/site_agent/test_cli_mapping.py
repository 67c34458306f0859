"""``data map`` and ``data check`` as a person gives them: a registry whose columns are the hospital's own."""

import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from fl_algorithms.resolving import resolve
from site_agent import handoff
from site_agent.cli import data, findings
from site_agent.gateway.requests import OfferedSummaries, OfferedSummary
from site_agent.state.directory import Offer, Site, SiteState
from site_agent.trainer.data import sources
from tests.site_agent.trainer_world import NAME, STUDY_DIGEST, Hospital
from wardround.errors import BadData, CannotWrite, NeedsPerson, UsageProblem
from wardround.records.plugins import Plugin
from wardround.records.study import StudyFile
from wardround.records.summaries.request import SummaryRequest
from wardround.records.trainer import Finding, Summarize
from wardround.tensors.manifests import Manifest

SECRET = "Ottersen"  # stands for what a patient's row holds
app = typer.Typer()
app.add_typer(data.data_app, name="data")
app.command("predict")(data.predict)

TASK: dict[str, Any] = {
    "name": "tabular", "label": "ill", "classes": ["no", "yes"],
    "features": [
        {"name": "fever", "low": 25, "high": 45},
        {"name": "ward", "kind": "categorical", "categories": ["icu", "other"], "other": "other"},
    ],
}  # fmt: skip


@pytest.fixture
def hospital(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hospital:
    """Its requests are answered in this process: a worker would import torch for each."""
    hospital = Hospital.make(tmp_path)

    def ask(state: Path, request: Any, progress: Any = None) -> Any:
        return hospital.requests.answer(request, lambda _: None)

    monkeypatch.setattr(handoff, "ask", ask)
    monkeypatch.setattr(handoff, "one_shot", ask)
    tables = hospital.study.document() | {"task": TASK, "model": {"name": "mlp", "hidden": []}}
    tables["algorithm"] = {"name": "fedavg"}
    tables["reported"] = {"metrics": ["val_loss", "accuracy"]}
    hospital.study = resolve(StudyFile.model_validate(tables))
    write(hospital, [f"{97 + k / 10},{'iw'[k % 2]},{'jn'[k // 2 % 2]},m{k // 4}" for k in range(40)])
    state = SiteState(hospital.state)
    state.save_offer(Offer(NAME, 1, STUDY_DIGEST, "waiting", hospital.document, Manifest(())))
    state.save_site(Site("north", "demo", "127.0.0.1:1", "00", "00", 0))
    (hospital.state / "data.toml").unlink()
    give(hospital, "data", "add", "patients", "--table", hospital.table, "--label", "krank", "--patient", "mrn")
    return hospital


def write(hospital: Hospital, rows: list[str], header: str = "temp_f,ward,krank,mrn") -> None:
    hospital.table.write_text("\n".join([header, *rows]) + "\n")


def give(hospital: Hospital, *words: str | Path) -> Result:
    """The command's output; its error is raised as itself."""
    result = CliRunner().invoke(app, [*map(str, words), "--state", str(hospital.state)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def mapping(hospital: Hospital) -> Path:
    return hospital.table.with_name("mapping.toml")


def test_a_table_of_the_hospitals_own_becomes_the_studys_in_three_commands(hospital: Hospital) -> None:
    path = mapping(hospital)
    drafted = give(hospital, "data", "map", "patients", path, "--study", NAME)
    assert f"Drafted {path}: 4 columns, 1 as they are, 2 for you to fill in" in drafted.stderr
    assert f"next: edit {path}, then `site-agent data check patients --study {NAME}`" in drafted.stderr
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert tomllib.loads((hospital.state / "data.toml").read_text())["patients"]["mapping"] == str(path)

    with pytest.raises(BadData, match="data `patients` does not fit study `small`: 2 things") as refused:
        give(hospital, "data", "check", "patients", "--study", NAME)
    assert "`site-agent data map patients FILE --study small`" in refused.value.hint

    text = path.read_text().replace('column = ""', 'column = "temp_f"\nunit = "fahrenheit -> celsius"')
    path.write_text(text.replace('j = ""', 'j = "yes"').replace('n = ""', 'n = "no"'))
    checked = give(hospital, "data", "check", "patients", "--study", NAME)
    assert "40 rows: 32 to train, 8 to validate\nclasses: no: 20, yes: 20\n" in checked.stdout
    assert "warning: train.csv: `ward`: a category that the study does not know, counted as `other` (40 rows)" in (
        checked.stdout
    )
    assert "warning: the files of `patients` have changed since `data add`" in checked.stdout


def test_all_that_does_not_fit_is_a_table_of_columns_and_counts_without_a_value(hospital: Hospital) -> None:
    good = [f"{36 + k / 10},icu,{'no' if k % 2 else 'yes'}" for k in range(20)]
    write(hospital, [*good, f"{SECRET},icu,yes", "98.6,icu,yes", "99.1,icu,no", f"37,icu,{SECRET}"], "fever,ward,ill")
    give(hospital, "data", "add", "plain", "--table", hospital.table, "--label", "ill")
    result = CliRunner().invoke(app, ["data", "check", "plain", "--study", NAME, "--state", str(hospital.state)])
    assert isinstance(result.exception, BadData)
    assert result.exception.exit_code == 65
    assert SECRET not in result.stdout + str(result.exception)
    assert [line.split("  ")[0:2] + line.split()[-1:] for line in result.stdout.splitlines()[1:4]]
    shown = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert shown == [
        "file column what does not fit rows lines",
        "train.csv fever text where a number belongs 1 22",
        "train.csv fever a number outside of the study's range 2 23, 24",
        "train.csv ill no class of the study 1 25",
        "fever: numbers have a decimal point and no thousands separator",
        "fever: the range is 25 to 45; what is in another unit is converted by a mapping",
        "ill: the classes are: no, yes",
    ]


def test_what_does_not_fit_is_told_to_programs_too(hospital: Hospital) -> None:
    words = ["data", "check", "patients", "--study", NAME, "--json", "--state", str(hospital.state)]
    result = CliRunner().invoke(app, words)
    said = json.loads(result.stdout)
    assert said["fits"] is False
    assert [(found["what"], found["rows"]) for found in said["findings"]] == [
        ("no column `fever`", None),
        ("no class of the study", 40),
    ]
    assert isinstance(result.exception, BadData)


def test_a_mapping_that_is_there_is_named_and_not_drafted_again(hospital: Hospital) -> None:
    path = mapping(hospital)
    path.write_text("missing = []\n")
    before = sources.sources(hospital.state)["patients"].digest
    give(hospital, "data", "map", "patients", path)
    named = sources.sources(hospital.state)["patients"]
    assert path.read_text() == "missing = []\n"
    assert named.digest == sources.digest_now(named) != before
    assert named.patient == "mrn"


def test_a_mapping_is_drafted_for_a_summary_request_before_there_is_a_study(
    hospital: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The label is what `data add` called so; a code that is none of the request's words is counted as other anyway."""
    ward = {"name": "ward", "kind": "categorical", "categories": ["I", "surgical"]}
    columns = [{"name": "fever", "low": 25, "high": 45}, ward, {"name": "ill", "kind": "boolean"}]
    request = SummaryRequest.from_document(
        {"name": "icu-columns", "sites": ["st-olav"], "label": "ill", "columns": columns}
    )
    offered = OfferedSummaries((OfferedSummary("icu-columns", "", 3, "", request.document()),))
    monkeypatch.setattr("site_agent.cli.summary.ask_or_do", lambda *_: offered)
    path = mapping(hospital)
    with pytest.raises(UsageProblem, match="no summary request `other` here") as refused:
        give(hospital, "data", "map", "patients", path, "--request", "other")
    assert refused.value.hint == "it has: icu-columns"
    with pytest.raises(UsageProblem, match="found `--study` and `--request`"):
        give(hospital, "data", "map", "patients", path, "--request", "icu-columns", "--study", NAME)
    assert not path.exists()

    drafted = give(hospital, "data", "map", "patients", path, "--request", "icu-columns")
    assert f"Drafted {path}: 3 columns, 0 as they are, 2 for you to fill in" in drafted.stderr
    assert f"next: edit {path}, then `site-agent data summary patients --request icu-columns`" in drafted.stderr
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    rules = tomllib.loads(path.read_text())["columns"]
    assert rules["fever"] == {"column": ""}
    assert rules["ward"] == {"values": {"i": "I"}}
    assert rules["ill"] == {"column": "krank", "values": {"j": ""}}  # n is no to everybody
    assert "becomes summary request `icu-columns`'s" in path.read_text()

    text = path.read_text().replace('column = ""', 'column = "temp_f"\nunit = "fahrenheit -> celsius"')
    path.write_text(text.replace('j = ""', 'j = "yes"').replace('n = ""', 'n = "no"'))
    asked = Summarize(request=request.document(), data="patients", min_count=5, digits=3)
    fever, wards, ill = hospital.requests.answer(asked, lambda _: None).columns
    assert (fever.values, wards.categories, wards.other, ill.categories) == (40, (20, 0), 20, (20, 20))


def test_a_mapping_that_is_not_there_needs_a_study_to_be_drafted_for(hospital: Hospital) -> None:
    with pytest.raises(UsageProblem, match=r"there is no .*mapping\.toml") as refused:
        give(hospital, "data", "map", "patients", mapping(hospital))
    assert refused.value.hint == "add `--study ID` to draft it for a study, or `--request ID` for a summary request"


def test_a_mapping_that_is_no_mapping_is_not_named(hospital: Hospital) -> None:
    mapping(hospital).write_text("[colums]\n")
    with pytest.raises(BadData, match=r"mapping\.toml: unknown key `colums`"):
        give(hospital, "data", "map", "patients", mapping(hospital))
    assert sources.sources(hospital.state)["patients"].mapping is None


def test_a_draft_is_not_written_where_it_cannot_be(hospital: Hospital) -> None:
    with pytest.raises(CannotWrite, match="does not exist"):
        give(hospital, "data", "map", "patients", hospital.table.parent / "gone" / "m.toml", "--study", NAME)


def test_a_table_is_added_with_its_mapping_and_its_patients_are_counted(hospital: Hospital) -> None:
    mapping(hospital).write_text('columns.fever.column = "temp_f"\n')
    files = ["--table", hospital.table, "--label", "krank", "--patient", "mrn", "--mapping", mapping(hospital)]
    added = give(hospital, "data", "add", "mapped", *files)
    assert "Data `mapped`: 40 rows, 4 columns of 10 patients" in added.stderr
    named = sources.sources(hospital.state)["mapped"]
    assert named.digest == sources.digest_now(named)
    assert f"mapping {mapping(hospital)}" in give(hospital, "data", "list").stdout


def test_a_study_of_images_takes_no_mapping(hospital: Hospital) -> None:
    """Its task says so, not the file."""
    from site_agent.trainer.rounds import examining

    class Study:
        task, name = object(), "skin"

    with pytest.raises(UsageProblem, match="study `skin` reads no table of columns, so there is nothing to map"):
        examining._drafting(Study())  # type: ignore[arg-type]


def test_brackets_in_a_columns_name_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    found = Finding(file="a.csv", column="[red]x", here="[b]y", what="no value", rows=9, lines=[2, 3, 4], hint="")
    findings.show([found])
    assert "[red]x (here [b]y)  no value           9     2, 3, 4, ..." in capsys.readouterr().out


def test_the_trainers_user_writes_the_draft_where_only_it_may_read(
    hospital: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root every folder can be read, so what the system would say is said here."""
    asked: list[Any] = []

    def listener(state: Path, request: Any) -> Any:
        asked.append(request.command)
        return handoff.one_shot(state, request)

    monkeypatch.setattr(data, "_may_read", lambda _: False)
    monkeypatch.setattr(data, "ask_listener", listener)
    give(hospital, "data", "map", "patients", mapping(hospital), "--study", NAME)
    assert asked == ["draft_mapping"]
    assert os.path.exists(mapping(hospital))  # noqa: PTH110


def test_a_mapping_is_not_drafted_by_code_that_may_not_run_here(
    hospital: Hospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = Plugin(name="lungs", version="1", sha256="ab" * 32)
    monkeypatch.setattr(Offer, "plugins", property(lambda _: (plugin,)))
    with pytest.raises(NeedsPerson, match="there is no policy at"):
        give(hospital, "data", "map", "patients", mapping(hospital), "--study", NAME)
    assert not mapping(hospital).exists()
