"""Tables as hospitals have them: ranges, an other category, booleans, dates, patients, strata, copies, mappings."""

import datetime
import json
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_algorithms.settings.tabular import TabularSettings
from fl_algorithms.tasks.base import SiteData
from fl_algorithms.tasks.findings import DoesNotFit
from fl_algorithms.tasks.source import Source
from fl_algorithms.tasks.tables.mapping import UNITS, SiteMapping, load_mapping
from fl_algorithms.tasks.tables.splits import shares, split_rows
from fl_algorithms.tasks.tables.tabular import TabularTask
from wardround.errors import BadData
from wardround.records.schema import check

SECRET = "Ottersen"  # stands for what a patient's row holds, and must not come out
FEVER = {"name": "fever", "low": 25, "high": 45}
UNIT = {"name": "unit", "kind": "categorical", "categories": ["icu", "ward", "rest"], "other": "rest"}
SMOKER = {"name": "smoker", "kind": "boolean"}
AGE = {"name": "born", "kind": "date", "until": "admitted", "low": 0, "high": 120}
MEDIAN = {"policy": "median", "indicators": ["fever"]}


def task(*features: Any, **changes: Any) -> TabularTask:
    table = {"label": "died", "classes": ["0", "1"], "features": list(features or ["fever"]), **changes}
    return TabularTask(TabularSettings.model_validate(table))


class Site:
    """A hospital's files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def source(self, rows: str, *, mapping: str = "", test: str = "", label: str = "", patient: str = "") -> Source:
        files = {"table": ("train.csv", rows), "test": ("test.csv", test), "mapping": ("mapping.toml", mapping)}
        paths = {}
        for role, (name, text) in files.items():
            if text:
                paths[role] = self.folder / name
                paths[role].write_text(text)
        return Source(paths, label=label, patient=patient)

    def load(self, task: TabularTask, rows: str, **options: Any) -> SiteData:
        seed = options.pop("seed", 1)
        source = self.source(rows, **options)
        return task.load(source, site="ash", seed=seed, validation_fraction=0.2)

    def refused(self, task: TabularTask, rows: str, **options: Any) -> list[str]:
        """What does not fit, as sentences; and that neither message nor sentence holds a cell."""
        source = self.source(rows, **options)
        with pytest.raises(DoesNotFit) as caught:
            task.load(source, site="ash", seed=1, validation_fraction=0.2)
        findings = caught.value.findings
        said = [finding.sentence for finding in findings]
        assert SECRET not in caught.value.message + caught.value.hint + "".join(said)
        assert SECRET not in "".join(finding.hint for finding in findings)
        return said


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def table(header: str, rows: list[str]) -> str:
    return "\n".join([header, *rows]) + "\n"


def temperatures(numbers: list[Any]) -> str:
    return table("fever,died", [f"{number},{place % 2}" for place, number in enumerate(numbers)])


NORMAL = [36 + k / 10 for k in range(10)]


def inputs(data: SiteData) -> list[list[float]]:
    return sorted(torch.cat([data.train.x, data.validation.x]).tolist())  # type: ignore[list-item]


# All at once.


def test_everything_that_does_not_fit_is_said_at_once_in_both_tables(site: Site) -> None:
    several = task("fever", UNIT, SMOKER, "dose", "weight", missing={"policy": "refuse"})
    rows = [f"37,icu,yes,{k},{k % 2}" for k in range(10)]
    bad = [f"{SECRET},icu,{SECRET},,0", f",icu,no,{SECRET},{SECRET}"]
    said = site.refused(
        several, table("fever,unit,smoker,dose,died", [*rows, *bad]), test=table("fever,unit,smoker,dose,died", bad)
    )
    of_one_file = [
        "no column `weight`",
        "line 13, column `fever`: no value",
        "line 12, column `dose`: no value",
        "line 12, column `fever`: text where a number belongs",
        "line 12, column `smoker`: neither yes nor no",
        "line 13, column `dose`: text where a number belongs",
        "line 13, column `died`: no class of the study",
    ]
    in_test = [text.replace("13", "3").replace("12", "2") for text in of_one_file]
    assert said == of_one_file + in_test


def test_the_message_of_many_faults_is_short(site: Site) -> None:
    rows = table("a,b,c,d,died", [*(f"{k},1,1,1,{k % 2}" for k in range(9)), "x,x,x,x,0"])
    with pytest.raises(DoesNotFit) as caught:
        site.load(task("a", "b", "c", "d"), rows)
    fault = "text where a number belongs"
    said = "; ".join(f"line 11, column `{name}`: {fault}" for name in "abc")
    assert caught.value.message == f"{site.folder}/train.csv: {said}; and 1 more that do not fit"


def test_warnings_of_many_columns_are_one_sentence(site: Site) -> None:
    names = [f"c{k}" for k in range(40)]
    rows = [",".join(["7"] * 40) + f",{k},{k % 2}" for k in range(10)]
    data = site.load(task(*names, "dose"), table(",".join([*names, "dose", "died"]), rows))
    assert data.warnings == (
        "train.csv: `c0`, `c1`, `c2`, `c3`, `c4`, `c5` and 34 more are the same in every row, "
        "so they are 0 for the model, in the test table too",
    )


# Ranges.


def test_fahrenheit_does_not_pass_where_the_study_has_a_range(site: Site) -> None:
    rows = temperatures([*NORMAL, 98.6, 101.2])
    assert site.refused(task(FEVER), rows) == ["lines 12 and 13, column `fever`: a number outside of the study's range"]
    with pytest.raises(DoesNotFit) as caught:
        site.load(task(FEVER), rows)
    assert caught.value.hint == "the range is 25 to 45; what is in another unit is converted by a mapping"


@pytest.mark.parametrize(("low", "high"), [(36, None), (None, 36.9), (36, 36.9)])
def test_both_ends_of_a_range_are_in_it(site: Site, low: float | None, high: float | None) -> None:
    ends = {key: value for key, value in {"low": low, "high": high}.items() if value is not None}
    site.load(task({"name": "fever", **ends}), temperatures(NORMAL))


def test_a_number_outside_may_count_as_missing(site: Site) -> None:
    lenient = {**FEVER, "outside": "missing"}
    filled = site.load(task(lenient, missing=MEDIAN), temperatures([*NORMAL, 98.6]))
    plain = site.load(task(FEVER, missing=MEDIAN), temperatures([*NORMAL, ""]))
    assert inputs(filled) == inputs(plain)
    said = "train.csv: `fever`: a number outside of the study's range, counted as missing (1 row)"
    assert said in filled.warnings
    dropped = site.load(task(lenient, missing={"policy": "drop_row"}), temperatures([*NORMAL, 98.6]))
    assert "train.csv: 1 of 11 rows dropped for missing values" in dropped.warnings


def test_rows_to_predict_keep_to_the_range_too(site: Site, tmp_path: Path) -> None:
    known = task(FEVER)
    fitted = known.fitted(site.load(known, temperatures(NORMAL)))
    new = tmp_path / "new.csv"
    new.write_text("fever\n37\n98.6\n")
    with pytest.raises(BadData, match=r"new\.csv: line 3, column `fever`: a number outside of the study's range"):
        known.read_new(new, fitted)


# An other category, booleans, dates.


def test_categories_that_nobody_foresaw_are_other_and_are_counted(site: Site) -> None:
    rows = [f"{unit},{k % 2}" for k, unit in enumerate(["icu", "ward", "rest", "burns", "stroke"] * 3)]
    data = site.load(task(UNIT), table("unit,died", rows))
    whole = [f"{unit},{k % 2}" for k, unit in enumerate(["icu", "ward", "rest", "rest", "rest"] * 3)]
    assert inputs(data) == inputs(site.load(task(UNIT), table("unit,died", whole)))
    assert data.warnings == ("train.csv: `unit`: a category that the study does not know, counted as `rest` (6 rows)",)


@pytest.mark.parametrize(
    "words", [("yes", "no"), ("Y", "n"), ("t", "F"), ("1", "0"), ("1.0", "0.0"), ("TRUE", "false")]
)
def test_any_usual_boolean_is_one_input(site: Site, words: tuple[str, str]) -> None:
    rows = [f"{words[k % 3 == 0]},7,{k % 2}" for k in range(12)]
    data = site.load(task(SMOKER, "dose"), table("smoker,dose,died", rows))
    numbers = np.array([float(k % 3 != 0) for k in range(12)])
    expected = (numbers - numbers.mean()) / (numbers.std(ddof=1) + 1e-9)
    np.testing.assert_allclose([row[0] for row in inputs(data)], np.sort(expected), rtol=1e-6)


def test_missing_booleans_are_filled_with_the_commoner(site: Site) -> None:
    known = task(SMOKER, missing={"policy": "median", "indicators": ["smoker"]})
    data = site.load(
        known, table("smoker,died", [f"{word},{k % 2}" for k, word in enumerate(["yes", "no"] * 4 + [""])])
    )
    assert data.preprocessing["medians"] == {"smoker": "0.0"}


@pytest.mark.parametrize(
    ("until", "cells", "unit", "expected"),
    [
        pytest.param("admitted", ("1950-03-01", "2020-03-01 08:15"), None, 25_568 / 365.25, id="years to a column"),
        pytest.param("2020-03-01", ("1950-03-01T00:00:00Z", "x"), "years", 25_568 / 365.25, id="years to one date"),
        pytest.param("admitted", ("2020-02-25", "2020-03-01"), "days", 5.0, id="days between two columns"),
    ],
)
def test_a_date_is_the_time_from_it_to_another(
    site: Site, until: str, cells: tuple[str, str], unit: str | None, expected: float
) -> None:
    """25,568 days: 70 years of 365 and the 18 leap days of 1952 to 2020."""
    feature = {
        "name": "born",
        "kind": "date",
        "until": until,
        "mean": 0.0,
        "std": 1.0,
        **({"unit": unit} if unit else {}),
    }
    data = site.load(task(feature), table("born,admitted,died", [f"{cells[0]},{cells[1]},{k % 2}" for k in range(5)]))
    assert inputs(data)[0][0] == pytest.approx(expected, rel=1e-6)


def test_a_date_of_another_form_and_an_age_beyond_any_are_refused(site: Site) -> None:
    good = [f"19{50 + k}-03-01,2020-03-01,{k % 2}" for k in range(8)]
    bad = ["01.03.1950,2020-03-01,0", "1950-03-01,2020-13-01,0", "1850-03-01,2020-03-01,0", ",2020-03-01,1"]
    said = site.refused(task(AGE), table("born,admitted,died", [*good, *bad]))
    assert said == [
        "line 13, column `born`: no value",
        "line 10, column `born`: no date of the form YYYY-MM-DD",
        "line 11, column `admitted`: no date of the form YYYY-MM-DD",
        "line 12, column `born`: a number outside of the study's range",
    ]


# Patients, strata, copies.


def visits(patients: int, each: int) -> str:
    rows = [f"{36 + (k * 7 % 50) / 10},{k // each % 2},p{k // each}" for k in range(patients * each)]
    return table("fever,died,who", rows)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_patient_is_in_two_parts(site: Site, seed: int) -> None:
    """Each patient's temperature tells who it is."""
    rows = [f"{36 + k // 3 / 10},{k % 2},p{k // 3}" for k in range(60)]
    known = task("fever", patient="who")
    data = site.load(known, table("fever,died,who", rows), seed=seed)
    train, validation = ({row[0] for row in part.x.tolist()} for part in (data.train, data.validation))  # type: ignore[union-attr]
    assert not train & validation
    assert (len(train), len(validation)) == (16, 4)
    assert (len(data.train), len(data.validation)) == (48, 12)


def test_a_site_may_name_its_patient_column_where_the_study_does_not(site: Site) -> None:
    by_study = site.load(task("fever", patient="who"), visits(10, 3))
    by_site = site.load(task("fever"), visits(10, 3), patient="who")
    assert torch.equal(by_study.validation.y, by_site.validation.y)
    assert by_study.digest != by_site.digest  # its own choice is in the digest of its data


def test_each_row_knows_that_it_is_of_the_same_patient_as_another(site: Site) -> None:
    """By a number that says nothing of who it is: for drawing patients, and not rows."""
    data = site.load(task("fever", patient="who"), visits(10, 3), test=visits(4, 2).replace(",p", ",q"))
    for split, each in ((data.train, 3), (data.validation, 3), (data.test, 2)):
        assert split is not None
        assert split.groups is not None
        assert split.groups.bincount().unique().tolist()[-1] == each
        assert len(split.groups) == len(split)
    assert site.load(task("fever"), visits(10, 3)).train.groups is None


def test_a_patient_without_a_name_is_refused(site: Site) -> None:
    said = site.refused(task("fever", patient="who"), visits(5, 2) + "37,1,\n")
    assert said == ["line 12, column `who`: no value"]


def test_patients_in_both_tables_are_a_warning_or_a_refusal(site: Site) -> None:
    test = table("fever,died,who", ["40,0,p1", "41,1,new"])
    data = site.load(task("fever", patient="who"), visits(10, 3), test=test)
    assert "test.csv: 1 patient is in the training table too" in data.warnings
    said = site.refused(task("fever", patient="who", duplicates="refuse"), visits(10, 3), test=test)
    assert said == ["1 patient is in the training table too"]


def test_repeated_rows_and_test_rows_copied_from_train_are_counted(site: Site) -> None:
    rows, test = temperatures([*NORMAL, 36.0, "36.1"]), temperatures([36.0, 36.1, 50, 36.3])
    data = site.load(task("fever"), rows, test=test)
    copies = [
        "train.csv: 2 rows are the same as another in all that the study reads",
        "test.csv: 3 rows are in the training table too, so scores will be too good",
    ]
    assert [text for text in data.warnings if "rows are" in text] == copies
    said = site.refused(task("fever", duplicates="refuse"), rows, test=test)
    assert said == [text.split(": ", 1)[1] for text in copies]


def test_rows_without_a_number_are_not_called_copies(site: Site) -> None:
    rows = table("fever,smoker,died", [f",{'yn'[k % 2]},{k % 2}" for k in range(10)] + ["37,y,0"])
    data = site.load(task("fever", SMOKER, missing=MEDIAN), rows)
    assert not [text for text in data.warnings if "the same as another" in text]


@pytest.mark.parametrize("patient", ["", "who"])
def test_a_stratified_validation_part_has_each_classs_share(site: Site, patient: str) -> None:
    rows = table("fever,died,who", [f"{36 + k / 100},{int(k % 20 == 0)},p{k}" for k in range(100)])
    for seed in range(5):
        data = site.load(task("fever", stratified=True, patient=patient), rows, seed=seed)
        assert Counter(data.validation.y.tolist()) == {0: 19, 1: 1}
        assert Counter(data.train.y.tolist()) == {0: 76, 1: 4}


@given(
    st.lists(st.integers(0, 3), min_size=5, max_size=60),
    st.sampled_from([0.2, 0.33, 0.5]),
    st.booleans(),
    st.booleans(),
)
def test_a_split_has_each_row_once_and_each_patient_in_one_part(
    strata: list[int], fraction: float, stratified: bool, by_patient: bool
) -> None:
    patients = [place // 2 for place in range(len(strata))] if by_patient else []
    units = len(set(patients)) if by_patient else len(strata)
    generator = torch.Generator().manual_seed(3)
    if int(fraction * units) == 0:
        return
    train, validation = split_rows(
        len(strata), fraction, generator, Path("x"), patients=patients, strata=strata if stratified else None
    )
    assert sorted([*train.tolist(), *validation.tolist()]) == list(range(len(strata)))
    who = patients or list(range(len(strata)))
    held_out = {who[row] for row in validation.tolist()}
    assert not held_out & {who[row] for row in train.tolist()}
    assert len(held_out) == int(fraction * units)


def test_shares_are_in_proportion_and_whole() -> None:
    """20 of 95 and 5: 19 and 1. 3 of 5, 5 and 1: 1.36, 1.36 and 0.27."""
    assert shares([95, 5], 20) == [19, 1]
    assert shares([5, 5, 1], 3) == [2, 1, 0]


# Mappings.


MAPPED = task(FEVER, UNIT, SMOKER, AGE, "dose", patient="person", missing=MEDIAN)
MAPPING = """
missing = ["unknown", "-9999"]
[columns.fever]
column = "temp_f"
unit = "fahrenheit -> celsius"
[columns.unit]
values = { "1" = "icu", "2" = "ward" }
[columns.smoker]
column = "Raucher"
values = { J = "yes", N = "no" }
[columns.born]
column = "geboren"
date = "%d.%m.%Y"
[columns.admitted]
column = "aufnahme"
date = "%d.%m.%Y %H:%M"
[columns.dose]
decimal = ","
factor = 2
offset = 1
missing = ["n.b."]
[columns.person]
column = "mrn"
[columns.died]
values = { tot = "1", lebt = "0" }
"""
OURS = table("fever,unit,smoker,born,admitted,dose,died,person", [
    f"{37 + k / 4},{('icu', 'ward', 'rest')[k % 3]},{'yes' if k % 2 else 'no'},19{40 + k}-02-01,2020-03-01,"
    f"{4 + k},{k % 2},p{k // 2}"
    for k in range(20)
])  # fmt: skip
THEIRS = table("mrn,temp_f,unit,Raucher,geboren,aufnahme,dose,exitus", [
    f"p{k // 2},{(37 + k / 4) * 1.8 + 32},{('1', '2', '7')[k % 3]},{'J' if k % 2 else 'N'},01.02.19{40 + k},"
    f"01.03.2020 07:30,"
    f"\"{str((3 + k) / 2).replace('.', ',')}\",{'tot' if k % 2 else 'lebt'}"
    for k in range(20)
])  # fmt: skip


def test_a_mapped_table_is_the_study_s_own(site: Site) -> None:
    mapped = site.load(MAPPED, THEIRS, mapping=MAPPING, label="exitus", patient="mrn")
    plain = site.load(MAPPED, OURS)
    for part in ("train", "validation"):
        torch.testing.assert_close(getattr(mapped, part).x, getattr(plain, part).x, rtol=1e-5, atol=1e-5)
        assert torch.equal(getattr(mapped, part).y, getattr(plain, part).y)


def test_new_rows_are_read_by_the_mapping_of_the_model(site: Site, tmp_path: Path) -> None:
    data = site.load(MAPPED, THEIRS, mapping=MAPPING, label="exitus", patient="mrn", test=THEIRS)
    fitted = json.loads(json.dumps(MAPPED.fitted(data)))
    (tmp_path / "mapping.toml").unlink()
    x, lines = MAPPED.read_new(tmp_path / "test.csv", fitted)
    assert data.test is not None
    assert torch.equal(x, data.test.x)  # type: ignore[arg-type]
    assert lines == list(range(2, 22))


def test_tokens_and_sentinels_of_the_site_are_missing_values(site: Site) -> None:
    known = task("fever", missing=MEDIAN)
    rows = temperatures([*NORMAL, "unknown", "-9999", "-9999.0", "UNKNOWN"])
    mapped = site.load(known, rows, mapping='missing = ["unknown", "-9999"]\n')
    assert inputs(mapped) == inputs(site.load(known, temperatures([*NORMAL, "", "", "", ""])))


def test_the_mapping_is_a_part_of_the_datas_digest(site: Site) -> None:
    rows, known = temperatures(NORMAL), task("fever")
    digests = {site.load(known, rows, mapping=text).digest for text in ("", "missing = []\n", 'missing = ["x"]\n')}
    assert len(digests) == 3


def test_ages_and_spans_are_made_of_dates_for_a_study_that_wants_numbers(site: Site) -> None:
    known = task({"name": "age", "mean": 0.0, "std": 1.0}, {"name": "stay", "mean": 0.0, "std": 1.0})
    mapping = """
    [columns.age]
    column = "born"
    date = "%d/%m/%Y"
    until = "2020-03-01"
    unit = "years"
    [columns.stay]
    column = "in"
    date = "%d/%m/%Y"
    until = "out"
    unit = "days"
    """
    rows = table("born,in,out,died", [f"01/03/1950,01/0{k}/2020,10/0{k}/2020,{k % 2}" for k in range(1, 7)])
    found = inputs(site.load(known, rows, mapping=mapping))
    assert all(row == pytest.approx([25_568 / 365.25, 9.0]) for row in found)


def test_what_is_open_in_a_mapping_is_said_with_everything_else(site: Site) -> None:
    mapping = """
    [columns.fever]
    column = ""
    [columns.unit]
    values = { a = "icu", b = "", c = "" }
    [columns.gone]
    [columns.born]
    date = "%d.%m.%Y"
    """
    several = task(FEVER, {**UNIT, "other": "rest"}, {**AGE, "until": "2020-01-01"}, "dose")
    rows = table(
        "temp,unit,born,dose,died", [*(f"37,a,01.02.1950,{k},{k % 2}" for k in range(9)), "37,b,1950-02-01,x,1"]
    )
    assert site.refused(several, rows, mapping=mapping) == [
        "column `fever`: still open in the mapping: this site's column",
        "column `unit`: still open in the mapping: 2 of 3 codes",
        "line 11, column `born`: no date of the mapping's form",
        "line 11, column `dose`: text where a number belongs",
    ]


def test_a_mapped_column_is_called_as_the_site_calls_it(site: Site) -> None:
    said = site.refused(
        task(FEVER), table("temp,died", ["37,0"] * 5 + ["99,1"]), mapping='columns.fever.column = "temp"\n'
    )
    assert said == ["line 7, column `fever` (here `temp`): a number outside of the study's range"]
    said = site.refused(task(FEVER), table("tmp,died", ["37,0"] * 5), mapping='columns.fever.column = "temp"\n')
    assert said == ["no column `temp`"]


def test_a_mapping_for_more_than_the_study_reads_says_so(site: Site) -> None:
    data = site.load(task("fever"), temperatures(NORMAL), mapping='columns.fevre.column = "temp"\n')
    assert data.warnings == ("train.csv: the mapping has columns that this study does not: `fevre`",)


def test_data_and_mapping_cannot_name_two_labels(site: Site) -> None:
    rows = table("fever,died,exitus", [f"{k},0,1" for k in range(9)])
    said = site.refused(task("fever"), rows, label="exitus", mapping='columns.died.column = "died"\n')
    assert said == ["column `died`: the data and its mapping name two different columns"]


def test_a_feature_that_is_the_label_by_another_name_is_refused(site: Site) -> None:
    mapping = 'columns.fever.column = "exitus"\n'
    with pytest.raises(BadData, match="`exitus` is named as the label, but the study uses it as a feature"):
        site.load(task("fever"), table("exitus,fever", ["1,37"] * 9), label="exitus", mapping=mapping)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("[columns", "not TOML: ", id="no TOML"),
        pytest.param("[column.a]\n", "unknown key `column`", id="unknown table"),
        pytest.param('columns.a.colum = "x"\n', "unknown key `colum` in [columns.a]", id="unknown key"),
        pytest.param(
            'columns.a.unit = "fahrenheit"\n',
            "there is no unit `fahrenheit`; there are: `fahrenheit -> celsius`",
            id="unit",
        ),
        pytest.param(
            'columns.a = { unit = "m -> cm", factor = 2 }\n',
            "`unit` says what `factor` and `offset` are",
            id="unit twice",
        ),
        pytest.param("columns.a.factor = 0\n", "a `factor` of 0 makes every number the same", id="nothing"),
        pytest.param(
            'columns.a.date = "%B"\n', "`date` is made of %d, %m, %Y, %y, %H, %M, %S and %f", id="month names"
        ),
        pytest.param(
            'columns.a = { date = "%d", factor = 2 }\n', "`date` does not go with `factor`", id="date times two"
        ),
        pytest.param('columns.a.until = "2020-01-01"\n', "`until` needs `date`", id="no date"),
        pytest.param(
            'columns.a = { date = "%d", until = "b" }\n',
            "a `date` has both or neither of `until` and `unit`",
            id="no unit",
        ),
        pytest.param(
            'columns.a = { date = "%d", until = "b", unit = "weeks" }\n',
            "there is no unit `weeks`; there are: `years`, `days`",
            id="weeks",
        ),
        pytest.param('columns.a.values = { "1" = "x", "1.0" = "y" }\n', "`values` has one code twice", id="code twice"),
        pytest.param(
            'columns.a.decimal = ";"\n', "`decimal` in [columns.a]: string should match pattern", id="decimal"
        ),
        pytest.param('columns.a.column = " x"\n', "the column ' x' is not 1 to 200 printable characters", id="spaces"),
    ],
)
def test_a_mapping_that_cannot_be_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mapping.toml"
    path.write_text(text)
    with pytest.raises(BadData) as caught:
        load_mapping(path)
    assert message in caught.value.message
    assert "mapping.toml" in caught.value.message


def test_a_mapping_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match=r"gone\.toml: No such file"):
        load_mapping(tmp_path / "gone.toml")


def test_named_units_turn_back_where_both_ways_are_named() -> None:
    for name, (factor, offset) in UNITS.items():
        one, other = name.split(" -> ")
        *substance, unit = one.split(" ")
        back = UNITS.get(" ".join([*substance, other]) + f" -> {unit}")
        if back is not None:
            assert back[0] * factor == pytest.approx(1, rel=1e-6)
            assert back[0] * offset + back[1] == pytest.approx(0, abs=1e-6)
    assert UNITS["fahrenheit -> celsius"][0] * 98.6 + UNITS["fahrenheit -> celsius"][1] == pytest.approx(37)


# The draft.


def test_a_draft_takes_what_is_sure_and_leaves_the_rest_open(site: Site) -> None:
    rows = [
        f"{36.5 + k / 10},{('ICU', 'w', 'x')[k % 3]},{'JN'[k % 2]},{14 + k}.02.1950,2020-03-01,"
        f"{'-9999' if k == 3 else 5},{k % 2},m{k}"
        for k in range(12)
    ]
    known = task(
        {"name": "fever", "low": 90, "high": 110},
        {**UNIT, "other": None},
        SMOKER,
        AGE,
        {"name": "dose", "low": 0, "high": 9},
        "sodium",
    )
    source = site.source(table("Fever,unit,smoker,born,admitted,dose,exitus,mrn", rows), label="exitus", patient="mrn")
    drafted = known.draft_mapping(source)
    read = check(SiteMapping, tomllib.loads(drafted.text), "draft")
    assert {name: rule.model_dump(exclude_defaults=True) for name, rule in read.columns.items()} == {
        "fever": {"column": "Fever"},
        "unit": {"values": {"ICU": "icu", "w": "", "x": ""}},
        "smoker": {"values": {"J": ""}},
        "born": {"date": "%d.%m.%Y"},
        "sodium": {"column": ""},
        "died": {"column": "exitus"},
        "patient": {"column": "mrn"},
    }
    assert '# perhaps `unit = "celsius -> fahrenheit"`: 12 of 12 rows would be in the range' in drafted.text
    assert '# dose: perhaps `missing = ["-9999"]`: 1 rows outside the range' in drafted.text
    assert "# As they are: admitted, dose" in drafted.text
    assert (drafted.columns, drafted.as_they_are, drafted.open) == (9, 2, 3)


def test_a_draft_of_a_table_that_fits_maps_nothing(site: Site) -> None:
    drafted = task(FEVER).draft_mapping(site.source(temperatures(NORMAL)))
    assert tomllib.loads(drafted.text) == {"missing": []}


def test_a_draft_asks_where_a_date_could_be_read_in_two_ways(site: Site) -> None:
    known = task({**AGE, "until": "2020-01-01"})
    drafted = known.draft_mapping(site.source(table("born,died", ["01/02/1950,0", "03/04/1960,1"])))
    assert '# could also be "%m/%d/%Y"' in drafted.text
    assert drafted.open == 1


def test_a_draft_of_a_file_without_a_header_is_refused(site: Site) -> None:
    with pytest.raises(BadData, match="the first line holds numbers; it must name the columns") as caught:
        task(FEVER).draft_mapping(site.source(f"{SECRET},41\n" * 5))
    assert SECRET not in caught.value.message


def test_a_column_of_free_text_is_not_drafted_as_codes(site: Site) -> None:
    rows = table("unit,died", [f"{SECRET} {k},{k % 2}" for k in range(50)])
    drafted = task({**UNIT, "other": None}).draft_mapping(site.source(rows))
    assert SECRET not in drafted.text
    assert "# 50 different texts here are none of these: the right column?" in drafted.text


def test_dates_are_the_calendars(site: Site) -> None:
    assert (datetime.date(2020, 3, 1) - datetime.date(1950, 3, 1)).days == 25_568


# The page.

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tables.md").read_text()


def test_the_page_has_every_conversion_or_says_that_it_has_a_way_back() -> None:
    listed = set(re.findall(r"`([^`\n]+ -> [^`\n]+)`", PAGE))
    short = {f"{substance} mg/dL -> mmol/L" for substance in ("cholesterol", "triglycerides", "calcium", "lactate")}
    back = ("glucose mmol/L", "cholesterol mmol/L", "triglycerides mmol/L", "creatinine umol/L", "bilirubin umol/L")
    assert listed | short == {name for name in UNITS if not name.startswith(back)}


def test_the_pages_examples_are_a_mapping_and_a_study() -> None:
    mapping, task_table = (tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL))
    assert set(check(SiteMapping, mapping, "page").columns) == {"temperature", "sex", "glucose", "age"}
    table = task_table["task"]
    assert table.pop("name") == "tabular"
    assert check(TabularSettings, table, "page", "task").patient == "person"
