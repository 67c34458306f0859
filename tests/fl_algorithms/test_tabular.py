"""A hospital's table becomes numbers: the encoding, the scale, the split, and what is told at its terminal."""

import csv
import hashlib
import io
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as quick
from hypothesis import strategies as st

from fl_algorithms.settings.tabular import TabularSettings
from fl_algorithms.tasks.base import SiteData, Task
from fl_algorithms.tasks.tables.tabular import TabularTask
from tests.fl_algorithms.toys import table_source
from wardround.signing import canonical

AGE = {"name": "age"}
PAIN = {"name": "pain", "kind": "categorical", "categories": ["1", "2", "3"]}
HEADER = ["age", "pain", "ill"]


def task(*features: Any, **changes: Any) -> TabularTask:
    table = {"label": "ill", "classes": ["no", "yes"], "features": list(features or (AGE, PAIN)), **changes}
    return TabularTask(TabularSettings.model_validate(table))


def write(path: Path, rows: Sequence[Sequence[Any]], header: Sequence[str] = HEADER) -> Path:
    text = io.StringIO(newline="")
    csv.writer(text).writerows([header, *rows])
    path.write_text(text.getvalue(), encoding="utf-8", newline="")
    return path


def load(task: TabularTask, table: Path, test: Path | None = None, *, fraction: float = 0.2, **stream: Any) -> SiteData:
    stream = {"site": "ashford", "seed": 1, **stream}
    return task.load(table_source(table, test, "ill"), validation_fraction=fraction, **stream)


def everything(data: SiteData) -> np.ndarray:
    """Training and validation rows, sorted, so that the split does not matter."""
    rows = torch.cat([data.train.x, data.validation.x]).numpy()
    return rows[np.lexsort(rows.T)]


def scaled(column: Sequence[float]) -> list[float]:
    mean, std = statistics.fmean(column), statistics.stdev(column)
    return [(value - mean) / (std + 1e-9) for value in column]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rows = [[20 + 3 * k, 1 + k % 3, "yes" if k % 2 else "no"] for k in range(10)]
    return write(tmp_path / "train.csv", rows)


def test_it_is_a_task(table: Path) -> None:
    found: Task = task(headline="auc")
    assert (found.input_shape, found.classes, found.headline) == ((3,), ("no", "yes"), "auc")


def test_numbers_and_levels_are_standardized_by_the_whole_table(table: Path) -> None:
    """One-hot columns too, as FLamby does; unbiased, before the split."""
    data = load(task(), table)
    age = scaled([20 + 3 * k for k in range(10)])
    two, three = (scaled([float(1 + k % 3 == level) for k in range(10)]) for level in (2, 3))
    expected = np.array(sorted(zip(age, two, three, strict=True), key=lambda row: row[::-1]), dtype=np.float32)
    np.testing.assert_allclose(everything(data), expected, rtol=1e-6)
    assert data.train.x.dtype == torch.float32
    assert data.train.y.dtype == torch.int64


def test_a_scale_that_the_study_gives_is_the_same_at_every_site(table: Path) -> None:
    given = {"name": "age", "mean": 50.0, "std": 10.0}
    ages = everything(load(task(given, PAIN), table))[:, 0]
    np.testing.assert_allclose(np.sort(ages), [(20 + 3 * k - 50) / (10 + 1e-9) for k in range(10)], rtol=1e-6)


def test_a_column_that_is_constant_here_still_tells_something_on_the_studys_scale(tmp_path: Path) -> None:
    constant = write(tmp_path / "table.csv", [[0, 1 + k % 3, "yes" if k % 2 else "no"] for k in range(10)])
    data = load(task({"name": "age", "mean": 50.0, "std": 10.0}, PAIN), constant)
    np.testing.assert_allclose(everything(data)[:, 0], -5.0, rtol=1e-6)


def test_the_columns_are_found_by_name_and_others_are_ignored(table: Path, tmp_path: Path) -> None:
    rows = [["x", "yes" if k % 2 else "no", f" {1 + k % 3}.0 ", "", f"{20 + 3 * k}.0"] for k in range(10)]
    other = write(tmp_path / "other.csv", rows, ["name", "ill", "pain", "", "age"])
    np.testing.assert_array_equal(everything(load(task(), other)), everything(load(task(), table)))


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_a_byte_order_mark_blank_lines_and_any_line_ending_are_taken(table: Path, tmp_path: Path, ending: str) -> None:
    lines = table.read_text(encoding="utf-8").splitlines()
    other = tmp_path / "other.csv"
    other.write_bytes(("\ufeff" + ending.join(["", *lines[:4], "", *lines[4:]])).encode())
    np.testing.assert_array_equal(everything(load(task(), other)), everything(load(task(), table)))


def test_the_test_table_is_scaled_by_the_training_table(table: Path, tmp_path: Path) -> None:
    test = write(tmp_path / "test.csv", [[47, 1, "no"], [20, 3, "yes"]])
    data = load(task(), table, test)
    ages = scaled([20 + 3 * k for k in range(10)])
    assert data.test is not None
    assert data.test.x[:, 0].tolist() == pytest.approx([ages[9], ages[0]])
    assert data.test.y.tolist() == [0, 1]
    assert data.preprocessing == load(task(), table).preprocessing


def test_a_column_that_is_constant_in_the_table_is_zero_in_the_test_table_whatever_it_holds(tmp_path: Path) -> None:
    """Unguarded, a difference of 0.1 would become 1e8."""
    table = write(tmp_path / "train.csv", [[0.1, 1 + k % 3, "no"] for k in range(10)])
    data = load(task(), table, write(tmp_path / "test.csv", [[0.2, 1, "no"], [1e30, 1, "yes"]]))
    assert data.test is not None
    assert data.train.x[:, 0].abs().max() == 0
    assert data.test.x[:, 0].abs().max() == 0
    assert "train.csv: `age` is the same in every row, so it is 0 for the model, in the test table too" in data.warnings


def test_a_value_far_outside_of_a_nearly_constant_column_stays_finite(tmp_path: Path) -> None:
    table = write(tmp_path / "train.csv", [[1 + k * 1e-14, 1, "no"] for k in range(10)])
    data = load(task(), table, write(tmp_path / "test.csv", [[1e99, 1, "no"]]))
    assert data.test is not None
    assert data.test.x[0, 0] == 1e6


@pytest.mark.parametrize(
    ("rows", "fraction", "parts"),
    [
        (199, 0.2, (160, 39)),
        (172, 0.2, (138, 34)),
        (30, 0.2, (24, 6)),
        (85, 0.2, (68, 17)),
        (5, 0.2, (4, 1)),
        (2, 0.5, (1, 1)),
        (11, 0.33, (8, 3)),
    ],
)
def test_the_validation_part_counts_as_random_split_does(
    tmp_path: Path, rows: int, fraction: float, parts: tuple[int, int]
) -> None:
    table = write(tmp_path / "train.csv", [[k, 1, "no"] for k in range(rows)])
    data = load(task(), table, fraction=fraction)
    theirs = torch.utils.data.random_split(range(rows), [1 - fraction, fraction])
    assert (len(data.train), len(data.validation)) == parts == tuple(map(len, theirs))
    assert len(np.unique(everything(data)[:, 0])) == rows


def test_the_split_is_keyed_by_seed_and_site_alone(table: Path) -> None:
    first = load(task(), table).validation.x
    torch.manual_seed(99)
    assert torch.equal(load(task(), table).validation.x, first)
    others = [load(task(), table, **stream).validation.x for stream in ({"seed": 2}, {"seed": 3}, {"site": "calder"})]
    assert not all(torch.equal(other, first) for other in others)


def test_the_digest_pins_the_bytes_of_both_files_and_the_label(table: Path, tmp_path: Path) -> None:
    test = write(tmp_path / "test.csv", [[47, 1, "no"]])
    table_hash, test_hash = (hashlib.sha256(path.read_bytes()).hexdigest() for path in (table, test))
    assert load(task(), table, test).digest == canonical.digest(
        {"label": "ill", "table": table_hash, "test": test_hash}
    )
    assert load(task(), table).digest == canonical.digest({"label": "ill", "table": table_hash, "test": None})


def test_a_hospital_may_call_its_label_otherwise_and_write_the_classes_as_numbers(tmp_path: Path) -> None:
    table = write(tmp_path / "train.csv", [[k, 1, f"{k % 2}.0"] for k in range(10)], ["age", "pain", "outcome"])
    data = task(classes=[0, 1]).load(table_source(table, None, "outcome"), site="a", seed=1, validation_fraction=0.2)
    assert int(data.train.y.sum() + data.validation.y.sum()) == 5


# Missing values.


def test_drop_row_leaves_out_rows_with_a_gap_in_a_feature_or_the_label_and_says_so(table: Path, tmp_path: Path) -> None:
    rows = list(csv.reader(table.read_text(encoding="utf-8").splitlines()))[1:]
    holed = write(tmp_path / "holed.csv", [["", 1, "no"], [3, " na ", "no"], [3, 1, "?"], *rows])
    data = load(task(missing={"policy": "drop_row"}), holed)
    np.testing.assert_array_equal(everything(data), everything(load(task(), table)))
    assert "holed.csv: 3 of 13 rows dropped for missing values" in data.warnings


def test_median_fills_from_the_sites_own_table_and_tells_so_in_an_indicator(tmp_path: Path) -> None:
    filled = task(missing={"policy": "median", "indicators": ["age", "pain"]})
    table = write(tmp_path / "train.csv", [[10, 2, "no"], [20, 2, "no"], ["", "", "no"], [60, 3, "no"], [30, 1, "no"]])
    data = load(filled, table, write(tmp_path / "test.csv", [["?", "?", "no"], [25, 2, "no"]]))
    by_hand = [scaled([10, 20, 25, 60, 30]), scaled([1, 1, 1, 0, 0]), scaled([0, 0, 0, 1, 0])]
    by_hand += [scaled([0, 0, 1, 0, 0])] * 2
    expected = np.array(sorted(zip(*by_hand, strict=True), key=lambda row: row[::-1]), dtype=np.float32)
    np.testing.assert_allclose(everything(data), expected, rtol=1e-5)
    assert data.test is not None
    assert data.test.x[0, :3].tolist() == data.test.x[1, :3].tolist()  # 25 is the median, 2 the commonest
    assert (data.test.x[0, 3:] > data.test.x[1, 3:]).all()


def test_a_feature_that_a_hospital_never_measured_is_zero_there(tmp_path: Path) -> None:
    filled = task(missing={"policy": "median", "indicators": ["age", "pain"]})
    data = load(filled, write(tmp_path / "train.csv", [["", "", "yes" if k % 2 else "no"] for k in range(20)]))
    assert not data.train.x.any()
    assert "train.csv: `age` and `pain` have no value in any row; they tell nothing here" in data.warnings


def test_a_number_may_stand_for_a_missing_value(tmp_path: Path) -> None:
    filled = task(AGE, missing={"policy": "median", "tokens": ["-9"], "indicators": ["age"]})
    data = load(filled, write(tmp_path / "train.csv", [[-9, 1, "no"], *([k, 1, "no"] for k in range(9))]))
    assert data.preprocessing["medians"] == {"age": "4.0"}


# What the hospital is told.


def test_one_class_only_is_a_warning_for_each_part(tmp_path: Path) -> None:
    table = write(tmp_path / "train.csv", [[k, 1 + k % 3, "yes"] for k in range(10)])
    test = write(tmp_path / "test.csv", [[1, 1, "no"], [2, 1, "no"]])
    undefined = "AUC is undefined there and left out of means"
    assert load(task(), table, test).warnings == (
        f"The training part (8 rows) has one class only, `yes`: {undefined}",
        f"The validation part (2 rows) has one class only, `yes`: {undefined}",
        f"The test table (2 rows) has one class only, `no`: {undefined}",
    )


def test_a_test_table_that_is_the_training_table_is_a_warning(table: Path) -> None:
    assert (
        "train.csv: the test table is the training table, so its scores will be too good"
        in load(task(), table, table).warnings
    )


# Rows to predict.


def test_new_rows_are_encoded_as_the_test_table_was_from_json_that_went_through_a_file(
    table: Path, tmp_path: Path
) -> None:
    known = task(missing={"policy": "median", "indicators": ["age"]})
    test = write(tmp_path / "test.csv", [[47, 1, "no"], ["", 3, "yes"], [20, 2, "yes"]])
    data = load(known, table, test)
    fitted = json.loads(canonical.dumps(known.fitted(data)))
    new = write(tmp_path / "new.csv", [[1, 47], [3, ""], [2, 20]], ["pain", "age"])
    x, lines = known.read_new(new, fitted)
    assert data.test is not None
    assert torch.equal(x, data.test.x)
    assert lines == [2, 3, 4]


def test_lines_of_new_rows_are_those_of_the_file_and_dropped_rows_have_none(table: Path, tmp_path: Path) -> None:
    known = task(missing={"policy": "drop_row"})
    fitted = known.fitted(load(known, table))
    new = tmp_path / "new.csv"
    new.write_text('age,note,pain\n\n20,"two\nlines",1\n,x,1\n30,x,2\n')
    x, lines = known.read_new(new, fitted)
    assert (x.shape[0], lines) == (2, [3, 6])


FINITE = st.floats(-1e100, 1e100, allow_nan=False) | st.integers(-5, 5).map(float)
ROW = st.tuples(FINITE | st.none(), st.sampled_from(["1", "2", "3", "?"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return tmp_path_factory.mktemp("tables")


@given(st.lists(ROW, min_size=2, max_size=12), st.lists(ROW, min_size=1, max_size=4))
@quick(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_no_table_standardises_to_nan_or_infinity_and_new_rows_equal_the_test_tables(
    folder: Path, rows: list[tuple[float | None, str]], test_rows: list[tuple[float | None, str]]
) -> None:
    known = task(missing={"policy": "median", "indicators": ["age", "pain"]})
    table, test = (
        write(folder / name, [["" if age is None else repr(age), pain, "no"] for age, pain in part])
        for name, part in (("train.csv", rows), ("test.csv", test_rows))
    )
    data = load(known, table, test, fraction=0.5)
    assert data.test is not None
    assert all(torch.isfinite(part.x).all() for part in (data.train, data.validation, data.test))
    x, _ = known.read_new(test, known.fitted(data))
    assert torch.equal(x, data.test.x)


# Losses and probabilities.


def test_binary_losses_and_probabilities_come_from_one_logit_of_the_last_class() -> None:
    logits, y = torch.tensor([[2.0], [-1.0]], requires_grad=True), torch.tensor([1, 1])
    binary = task()
    sigmoid = [1 / (1 + math.exp(-value)) for value in (2.0, -1.0)]
    assert binary.losses(logits, y).tolist() == pytest.approx([-math.log(p) for p in sigmoid])
    assert binary.losses(logits, y).requires_grad
    assert binary.probabilities(logits)[:, 1].tolist() == pytest.approx(sigmoid)
    assert binary.metrics(logits, y)["accuracy"] == 0.5


def test_multiclass_losses_and_probabilities_are_a_softmax() -> None:
    logits, y = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([1])
    three = task(classes=["a", "b", "c"])
    share = [math.exp(k) / sum(math.exp(j) for j in (1, 2, 3)) for k in (1, 2, 3)]
    assert three.losses(logits, y).tolist() == pytest.approx([-math.log(share[1])])
    assert three.probabilities(logits)[0].tolist() == pytest.approx(share)
    brier = sum((p - (k == 1)) ** 2 for k, p in enumerate(share))
    assert three.metrics(logits, y) == {
        "accuracy": 0.0, "balanced_accuracy": 0.0, "auc": None, "macro_f1": 0.0, "auprc": None,
        "brier": pytest.approx(brier), "calibration_slope": None, "calibration_intercept": None,
    }  # fmt: skip


def test_a_logit_too_small_for_float32_probabilities_is_still_the_class_that_it_leans_to() -> None:
    """Else a prediction file, which takes the likeliest class, could differ from the checkpoint's own accuracy."""
    binary = task()
    logits = torch.tensor([[1e-9], [-1e-9]])
    assert binary.probabilities(logits).argmax(1).tolist() == [1, 0]
    assert binary.metrics(logits, torch.tensor([1, 0]))["accuracy"] == 1.0
