"""The figures of a table that may be told: right where many patients make them, and nothing where few do."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_algorithms.tasks.tables.summary import Disclosure, TableFigures, coarse_range, figures_of, spread
from fl_algorithms.tasks.tables.table import Table
from wardround.errors import BadData
from wardround.records.summaries.figures import ColumnFigures, SiteFigures
from wardround.records.summaries.request import SummaryRequest

TEN = Disclosure(10, 3)


def asked(*columns: Any, **changes: Any) -> SummaryRequest:
    return SummaryRequest.from_document({"name": "x", "sites": ["a"], "columns": list(columns), **changes})


def table(**columns: list[Any]) -> Table:
    cells = {name: [str(cell) for cell in values] for name, values in columns.items()}
    rows = len(next(iter(cells.values())))
    return Table(Path("t.csv"), "", cells, list(range(2, rows + 2)))


def told(column: Any, cells: list[Any], disclosure: Disclosure = TEN, patients: Any = ()) -> ColumnFigures:
    request = asked(column)
    return figures_of(table(x=cells), request, disclosure, patients).columns[0]


def drawn(rows: int, seed: int = 1) -> list[float]:
    return np.random.default_rng(seed).normal(60, 12, rows).round(1).tolist()


def test_mean_and_spread_are_those_of_the_values_to_so_many_digits() -> None:
    cells = drawn(200)
    figures = told("x", [*cells, "NA", "?", "sixty"])
    assert (figures.mean, figures.std) == (f"{np.mean(cells):.3g}", f"{np.std(cells, ddof=1):.3g}")
    assert told("x", cells, Disclosure(10, 1)).mean == f"{np.mean(cells):.1g}"


@pytest.mark.parametrize(("rows", "count"), [(0, 0), (1, 0), (9, 0), (10, 10), (14, 10), (16, 20), (104, 100)])
def test_a_count_of_fewer_than_ten_is_none_and_others_are_rounded(rows: int, count: int) -> None:
    cells = ["yes"] * rows + ["no"] * 200
    figures = told({"name": "x", "kind": "boolean"}, cells)
    assert figures.categories == (200, count)
    assert told("x", ["7"] * 200 + ["many"] * rows).unfit == count
    assert told("x", ["7"] * 200 + [""] * rows).missing == count


def test_a_category_that_the_request_does_not_name_is_counted_as_other_and_has_no_name() -> None:
    cells = ["icu"] * 40 + ["1"] * 20 + ["1.0"] * 10 + ["Mr. Smith's own ward"] * 30 + ["palliative"] * 3
    figures = told({"name": "x", "kind": "categorical", "categories": ["icu", 1, "absent"]}, cells)
    assert figures == ColumnFigures(values=100, categories=(40, 30, 0), other=30)


def test_a_number_outside_of_the_range_does_not_fit() -> None:
    figures = told({"name": "x", "low": 25, "high": 45}, [*np.linspace(35, 40, 100).round(2), *[98.6] * 50])
    assert (figures.values, figures.unfit, figures.mean) == (100, 50, "37.5")


def test_a_date_is_told_as_the_time_to_another() -> None:
    cells = [f"19{year}-01-01" for year in range(40, 90)] + ["the first of May"] * 10
    column = {"name": "x", "kind": "date", "until": "2000-01-01"}
    figures = told(column, cells)
    assert (figures.values, figures.unfit, figures.mean) == (50, 10, "35.5")
    assert figures_of(table(x=cells, y=cells), asked({**column, "until": "z"}), TEN).columns[0].absent


FEW = [
    pytest.param(["5"] * 100, id="all the same"),
    pytest.param(["0"] * 96 + ["1"] * 4, id="four of another value"),
    pytest.param(["0"] * 99 + ["5000"], id="one far away"),
    pytest.param([*map(str, drawn(90)), "9000"], id="one that makes most of the spread"),
    pytest.param([*map(str, drawn(90)), "9000", "-9000"], id="two that make most of the spread"),
    pytest.param(list(map(str, drawn(9))), id="nine rows"),
    pytest.param([str(n) for n in range(400_000, 400_100)], id="numbers that were given out"),
]


@pytest.mark.parametrize("cells", FEW)
def test_no_mean_is_told_in_which_few_patients_could_be_seen(cells: list[str]) -> None:
    figures = told("x", cells)
    assert figures.decimals == ()


def test_what_looks_like_an_identifier_is_said_to_the_person() -> None:
    found = figures_of(table(x=list(range(1000, 1100))), asked("x"), TEN)
    assert found.notes == (
        "`x`: almost every row has another whole number, as an identifier has: no mean and no range is told",
    )


def test_the_range_is_of_ten_patients_on_either_side_and_lies_on_a_coarse_grid() -> None:
    cells = np.array(drawn(500))
    figures = told("x", cells.tolist())
    low, high = float(figures.low), float(figures.high)
    assert low < np.quantile(cells, 0.05) < np.quantile(cells, 0.95) < high
    step = 10  # the first of 1, 2, 5 times a power of ten above half of the spread
    assert low % step == high % step == 0
    others = np.arange(500)
    far = np.where(cells == cells.max(), 1e6, cells)  # the largest value could be any
    assert coarse_range(far, others, 12.0, 10) == coarse_range(cells, others, 12.0, 10)
    assert coarse_range(cells[:39], others[:39], 12.0, 10) is None


def test_patients_are_counted_and_not_their_rows() -> None:
    cells, many = drawn(200), [f"p{row % 8}" for row in range(200)]
    assert figures_of(table(x=cells), asked("x"), TEN, many) == TableFigures(0, (ColumnFigures(),), ())
    patients = [f"p{row % 50}" for row in range(200)]
    figures = told("x", cells, patients=patients)
    assert (figures.values, figures.mean) == (200, f"{np.mean(cells):.3g}")
    one = np.array([0] * 100 + list(range(1, 101)))
    values = np.concatenate([np.full(100, 90.0), np.random.default_rng(0).normal(60, 5, 100)])
    assert spread(values, one, TEN) is None  # a hundred rows of one patient make most of the spread


def test_a_column_that_is_not_there_is_absent() -> None:
    assert figures_of(table(x=["1"]), asked("y"), TEN).columns == (ColumnFigures(absent=True),)


def test_two_categories_that_a_study_takes_for_one_are_refused() -> None:
    with pytest.raises(BadData, match="column `x`: feature `x` has `1` twice"):
        told({"name": "x", "kind": "categorical", "categories": ["1", "1.0"]}, ["1"])


@pytest.mark.parametrize("seed", range(20))
def test_figures_of_any_table_have_the_form_that_may_leave(seed: int) -> None:
    generator = np.random.default_rng(seed)
    rows = int(generator.integers(1, 300))
    numbers = (generator.standard_normal(rows) * 10.0 ** generator.integers(-8, 8)).tolist()
    words = generator.choice(["icu", "ward", "", "x", "5"], rows).tolist()
    disclosure = Disclosure(int(generator.integers(5, 30)), int(generator.integers(1, 5)))
    request = asked(
        "n", {"name": "w", "kind": "categorical", "categories": ["icu", "ward"]}, {"name": "b", "kind": "boolean"},
        "none",
    )  # fmt: skip
    patients = [f"p{patient}" for patient in generator.integers(0, rows, rows)] if seed % 2 else ()
    found = figures_of(table(n=numbers, w=words, b=words), request, disclosure, patients)
    figures = SiteFigures(
        request="x", digest=request.digest, min_count=disclosure.min_count, digits=disclosure.digits, rows=found.rows,
        columns=found.columns,
    )  # fmt: skip
    figures.refuse_misfit(request)
    assert SiteFigures.from_message(figures.to_message()) == figures
    if found.columns[0].mean:
        assert math.isclose(float(found.columns[0].mean), np.mean(numbers), rel_tol=0.6, abs_tol=1e-9)
