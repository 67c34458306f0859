"""`fl-lab partition`: one data set divided into sites by a rule."""

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fl_algorithms.lab.cli import app
from fl_algorithms.lab.partitioning import Units, divided
from wardround.errors import BadData, UsageProblem

ROWS = 120
CLASSES = ("no", "maybe", "yes")


def table(path: Path, rows: int = ROWS) -> Path:
    """Three classes, forty patients of three rows each, two wards."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "patient", "ward", "ill"])
        writer.writerows(
            [row, f"p{row // 3}", ("Ward A", "Ward B")[row % 6 < 3], CLASSES[row // 3 % 3]] for row in range(rows)
        )
    return path


def partition(*words: Any) -> str:
    done = CliRunner().invoke(app, ["partition", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return done.stderr


def read(folder: Path) -> dict[str, dict[str, list[dict[str, str]]]]:
    """Site -> file -> its rows."""
    found: dict[str, dict[str, list[dict[str, str]]]] = {}
    for path in sorted(folder.rglob("*.csv")):
        with path.open(newline="") as file:
            found.setdefault(path.parent.name, {})[path.stem] = list(csv.DictReader(file))
    return found


def mixes(folder: Path) -> list[dict[str, int]]:
    return [Counter(row["ill"] for rows in files.values() for row in rows) for files in read(folder).values()]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--by", "iid"], id="iid"),
        pytest.param(["--by", "dirichlet", "--label", "ill"], id="dirichlet"),
        pytest.param(["--by", "labels", "--label", "ill"], id="labels"),
        pytest.param(["--by", "quantity"], id="quantity"),
        pytest.param(["--by", "column", "--column", "ward"], id="column"),
    ],
)
def test_every_row_goes_to_one_site_and_one_part_and_a_patients_rows_stay_together(
    words: list[str], tmp_path: Path
) -> None:
    partition(table(tmp_path / "all.csv"), "--out", tmp_path / "out", "--patient", "patient", "--at-least", 3, *words)
    found = read(tmp_path / "out")
    parts = {
        (site, part): {row["patient"] for row in rows} for site, files in found.items() for part, rows in files.items()
    }
    everyone = [row["id"] for files in found.values() for rows in files.values() for row in rows]
    assert sorted(map(int, everyone)) == list(range(ROWS))
    assert sum(len(patients) for patients in parts.values()) == ROWS // 3  # no patient is in two parts
    assert all("train" in files for files in found.values())


def test_a_small_alpha_makes_sites_unlike_and_a_large_one_alike(tmp_path: Path) -> None:
    source, spread = table(tmp_path / "all.csv", 900), {}
    for alpha in (0.1, 1000):
        out = tmp_path / str(alpha)
        partition(source, "--out", out, "--label", "ill", "--alpha", alpha, "--at-least", 1, "--sites", 3)
        shares = [[mix[name] / sum(mix.values()) for name in CLASSES] for mix in mixes(out)]
        spread[alpha] = float(np.std(shares, axis=0).max())
    assert spread[1000] < 0.05 < 0.25 < spread[0.1]


def test_label_skew_gives_each_site_so_many_classes(tmp_path: Path) -> None:
    partition(
        table(tmp_path / "all.csv", 117), "--out", tmp_path / "out", "--by", "labels", "--label", "ill",
        "--classes", 1, "--sites", 3,
    )  # fmt: skip
    assert [len(mix) for mix in mixes(tmp_path / "out")] == [1, 1, 1]


def test_a_column_names_the_sites_and_the_same_command_writes_the_same_bytes(tmp_path: Path) -> None:
    source = table(tmp_path / "all.csv")
    for out in ("a", "b"):
        said = partition(source, "--out", tmp_path / out, "--by", "column", "--column", "ward", "--label", "ill")
    found = read(tmp_path / "a")
    assert list(found) == ["ward-a", "ward-b"]
    assert {row["ward"] for rows in found["ward-b"].values() for row in rows} == {"Ward B"}
    for path in (tmp_path / "a").rglob("*.csv"):
        assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes()
    assert "ward-a: 49 rows to train, 11 to test; maybe 21, no 21, yes 18" in said
    assert 'next: `sites = ["ward-a", "ward-b"]` in [study]' in said


def test_arrays_are_divided_as_tables_are(tmp_path: Path) -> None:
    labels = np.arange(60) % 3
    np.savez(tmp_path / "all.npz", images=np.arange(240).reshape(60, 2, 2), labels=labels)
    for out in ("a", "b"):
        partition(tmp_path / "all.npz", "--out", tmp_path / out, "--label", "labels", "--sites", 2, "--alpha", 5)
    seen = []
    for path in sorted((tmp_path / "a").rglob("*.npz")):
        with np.load(path) as file:
            assert (file["images"][:, 0, 0] // 4 % 3 == file["labels"]).all()
            seen += (file["images"][:, 0, 0] // 4).tolist()
        assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes()
    assert sorted(seen) == list(range(60))


def test_shares_of_a_tiny_alpha_are_numbers() -> None:
    units = Units.of(["x"] * 50)
    place = divided(units, 3, "quantity", seed=1, alpha=1e-9, classes=2, at_least=0)
    assert sorted(np.bincount(place, minlength=3).tolist()) == [0, 0, 50]


@pytest.mark.parametrize(
    ("words", "kind", "message", "hint"),
    [
        pytest.param(
            ["--by", "dirichlet"], UsageProblem, "--by dirichlet divides by class",
            "`--label COLUMN` says which column that is", id="no-label",
        ),
        pytest.param(
            ["--by", "column"], UsageProblem, "--by column and --column NAME go together", "`fl-lab partition --help`",
            id="no-column",
        ),
        pytest.param(
            ["--label", "il"], UsageProblem, "{table} has no column `il`", "there are: id, patient, ward, ill",
            id="unknown-column",
        ),
        pytest.param(
            ["--by", "iid", "--sites", "13"], BadData,
            "120 rows or patients are too few for 13 sites with at least 10 each", "", id="too-many-sites",
        ),
        pytest.param(
            ["--label", "ill", "--alpha", "0.01", "--sites", "12"], BadData,
            "in 100 drawings a site had fewer than 10 rows or patients",
            "a larger `--alpha`, fewer sites, or a smaller `--at-least`", id="too-unlike",
        ),
        pytest.param(
            ["--by", "column", "--column", "empty"], BadData,
            "{table}: row 1 has nothing in `empty` that a site could be called", "", id="empty-name",
        ),
        pytest.param(
            ["--by", "column", "--column", "twice"], BadData,
            "{table}: two values of `twice` both give the site `a-b`", "", id="two-names-become-one",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_said(
    words: list[str], kind: type[Exception], message: str, hint: str, tmp_path: Path
) -> None:
    source = table(tmp_path / "all.csv")
    if words[-1] in ("empty", "twice"):
        lines = source.read_text().splitlines()
        cells = ["", ""] if words[-1] == "empty" else ["A b", "a-B"]
        source.write_text(
            "\n".join([f"{lines[0]},{words[-1]}", *(f"{x},{cells[i % 2]}" for i, x in enumerate(lines[1:]))])
        )
    with pytest.raises(kind) as refused:
        partition(source, "--out", tmp_path / "out", *words)
    error: Any = refused.value
    assert (error.message, error.hint) == (message.format(table=source), hint)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param("x.csv", b"a,b\n1\n", "{path}: line 2 has 1 cells, the header has 2", id="ragged"),
        pytest.param("x.csv", b"a,b\n", "{path} has no row", id="no-row"),
        pytest.param("x.csv", b"\xff\xfe\x00", "{path}: not a CSV table in UTF-8", id="not-text"),
        pytest.param("x.npz", b"nothing", "{path}: not an .npz file of plain arrays", id="not-npz"),
    ],
)
def test_a_file_that_is_no_data_set_is_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadData) as refused:
        partition(path, "--by", "iid", "--out", tmp_path / "out")
    assert refused.value.message == message.format(path=path)


def test_arrays_of_unlike_length_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", images=np.zeros((3, 2)), labels=np.zeros(2))
    with pytest.raises(BadData, match="its arrays have unlike numbers of rows: `images` 3, `labels` 2"):
        partition(tmp_path / "x.npz", "--by", "iid", "--out", tmp_path / "out")
