"""The hospitals of the demo and of the papers, made from what is embedded or published."""

import csv
import hashlib
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

from fl_algorithms.lab.data import BREAST_CANCER, HEART_SOURCE, breast_cancer, heart_disease
from fl_algorithms.lab.made_up import SURVIVAL, TEST_ROWS, survival
from fl_algorithms.settings.tabular import TabularSettings
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import SiteData
from fl_algorithms.tasks.tables.tabular import TabularTask
from tests.fl_algorithms.toys import table_source
from wardround.errors import BadData, NeedsPerson
from wardround.records import study

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def task_of(name: str) -> TabularTask:
    settings = ResolvedStudy(study.load(EXAMPLES / f"{name}.toml")).task.settings
    assert isinstance(settings, TabularSettings)
    return TabularTask(settings)


def load(task: TabularTask, folder: Path) -> SiteData:
    table, test, label = folder / "train.csv", folder / "test.csv", task.settings.label
    return task.load(table_source(table, test, label), site=folder.name, seed=1, validation_fraction=0.2)


# Breast cancer: embedded in scikit-learn.


@pytest.fixture(scope="module")
def breast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("breast") / "new" / "folder"
    made = breast_cancer(out)
    assert made == [("ashford", 180, 76), ("birchwood", 108, 46), ("calder", 71, 31), ("dunmore", 40, 17)]
    return out


def patients(breast: Path, site: str) -> list[dict[str, str]]:
    return rows_of(breast / site / "train.csv") + rows_of(breast / site / "test.csv")


def test_every_breast_cancer_patient_is_at_one_hospital(breast: Path) -> None:
    everyone = [row["diagnosis"] for site in BREAST_CANCER for row in patients(breast, site)]
    assert Counter(everyone) == {"benign": 357, "malignant": 212}


def test_the_breast_cancer_hospitals_differ_in_case_mix_alike_in_training_and_test(breast: Path) -> None:
    for site, hospital in BREAST_CANCER.items():
        share = hospital.malignant / (hospital.malignant + hospital.benign)
        for part in ("train.csv", "test.csv"):
            rows = rows_of(breast / site / part)
            assert sum(row["diagnosis"] == "malignant" for row in rows) / len(rows) == pytest.approx(share, abs=0.02)


def test_the_breast_cancer_hospitals_differ_in_scale(breast: Path) -> None:
    means = {}
    for site in BREAST_CANCER:
        benign = [row for row in patients(breast, site) if row["diagnosis"] == "benign"]
        means[site] = {name: sum(float(row[name]) for row in benign) / len(benign) for name in benign[0] if "_" in name}
    published = means["ashford"]
    assert means["birchwood"]["mean_radius"] == pytest.approx(published["mean_radius"] / 10, rel=0.1)
    assert means["birchwood"]["worst_area"] == pytest.approx(published["worst_area"] / 100, rel=0.1)
    assert means["calder"]["mean_texture"] == pytest.approx(published["mean_texture"] + 4, rel=0.1)
    assert means["calder"]["mean_perimeter"] == pytest.approx(published["mean_perimeter"] * 1.15, rel=0.1)
    for row in patients(breast, "dunmore"):
        assert all(float(f"{float(value):.2g}") == float(value) for name, value in row.items() if name != "diagnosis")


def test_breast_cancer_is_the_same_bytes_on_every_machine(breast: Path) -> None:
    """Whoever changes who goes where changes every figure that was ever printed from it."""
    files = [breast / site / part for site in BREAST_CANCER for part in ("train.csv", "test.csv")]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    assert digest == "03a79caa1ebebe798859e17b4ea4a9196adea26d4d970cac44f643304a581c95"


def test_the_shipped_breast_cancer_study_reads_every_hospital(breast: Path) -> None:
    task = task_of("breast_cancer")
    for site in BREAST_CANCER:
        data = load(task, breast / site)
        assert data.warnings == ()
        assert data.train.x.shape[1] == 30


def test_data_makers_say_that_scikit_learn_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(NeedsPerson, match=r"^scikit-learn is not installed$") as caught:
        breast_cancer(tmp_path)
    assert caught.value.hint == "`pip install 'wardround[site]'`"


# Heart disease: the four files that UCI publishes. Numbers: FLamby's, and another program's table of these patients.

ROWS = {"cleveland": (199, 104), "hungarian": (172, 89), "switzerland": (30, 16), "va": (85, 45)}
ILL = {"cleveland": (91, 48), "hungarian": (65, 33), "switzerland": (30, 15), "va": (66, 35)}
TEST_ROWS_BEGIN = {
    "cleveland": [5, 13, 16, 24],
    "hungarian": [3, 7, 16, 21],
    "switzerland": [5, 6, 7, 8],
    "va": [1, 5, 6, 9],
}
TEST_ROWS_SUM = {"cleveland": 16832, "hungarian": 11704, "switzerland": 326, "va": 3089}
AGE = {
    "cleveland": (54.1759, 9.1444),
    "hungarian": (47.5, 8.0710),
    "switzerland": (57.0667, 9.4465),
    "va": (59.6706, 7.6367),
}
CHOL = {
    "cleveland": (248.5628, 48.6520),
    "hungarian": (247.0581, 68.2091),
    "switzerland": (0.0, 0.0),
    "va": (175.0941, 113.3366),
}


@pytest.fixture(scope="module")
def heart(hospital_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("heart")
    assert heart_disease(hospital_data / "heart_disease", out) == [(site, *count) for site, count in ROWS.items()]
    return out


@pytest.mark.data
@pytest.mark.parametrize("site", ROWS)
def test_heart_disease_has_the_rows_of_the_papers(heart: Path, site: str) -> None:
    parts = [rows_of(heart / site / part) for part in ("train.csv", "test.csv")]
    assert tuple(map(len, parts)) == ROWS[site]
    assert tuple(sum(row["disease"] == "1" for row in part) for part in parts) == ILL[site]


@pytest.mark.data
@pytest.mark.parametrize("site", ROWS)
def test_heart_disease_is_the_table_that_another_program_made(heart: Path, hospital_data: Path, site: str) -> None:
    """Row for row, and the test rows are FLamby's: their numbers among the kept rows begin and sum so."""
    theirs = [row for row in rows_of(hospital_data / "heart_disease" / "heart_disease.csv") if row["site"] == site]
    for part in ("train", "test"):
        ours = rows_of(heart / site / f"{part}.csv")
        for own, other in zip(ours, (row for row in theirs if row["split"] == part), strict=True):
            assert own.pop("disease") == other["y"]
            cp, restecg = own.pop("cp"), own.pop("restecg")
            assert [other[f"cp_{k}"] for k in (2, 3, 4)] == [str(int(cp == str(k))) for k in (2, 3, 4)]
            assert [other[f"restecg_{k}"] for k in (1, 2)] == [str(int(restecg == str(k))) for k in (1, 2)]
            assert all(float(value) == float(other[name]) for name, value in own.items())
    held_out = [number for number, row in enumerate(theirs) if row["split"] == "test"]
    assert held_out[:4] == TEST_ROWS_BEGIN[site]
    assert sum(held_out) == TEST_ROWS_SUM[site]


@pytest.mark.data
@pytest.mark.parametrize("site", ROWS)
def test_the_shipped_heart_disease_study_standardises_as_flamby(heart: Path, site: str) -> None:
    task = task_of("heart_disease")
    data = load(task, heart / site)
    fitted = task.fitted(data)
    assert fitted["columns"] == [
        "age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak",
        "cp=2", "cp=3", "cp=4", "restecg=1", "restecg=2",
    ]  # fmt: skip
    for column, golden in ((0, AGE), (3, CHOL)):
        found = float(fitted["mean"][column]), float(fitted["std"][column])
        assert found == pytest.approx(golden[site], abs=6e-5)
    parts = {"cleveland": (160, 39), "hungarian": (138, 34), "switzerland": (24, 6), "va": (68, 17)}
    assert (len(data.train), len(data.validation)) == parts[site]


@pytest.mark.data
def test_switzerland_warns_of_the_column_and_the_class_that_say_nothing(heart: Path) -> None:
    assert load(task_of("heart_disease"), heart / "switzerland").warnings == (
        "train.csv: `chol` is the same in every row, so it is 0 for the model, in the test table too",
        "The training part (24 rows) has one class only, `1`: AUC is undefined there and left out of means",
        "The validation part (6 rows) has one class only, `1`: AUC is undefined there and left out of means",
    )


@pytest.mark.data
def test_the_published_folder_and_its_parent_are_both_taken(heart: Path, hospital_data: Path, tmp_path: Path) -> None:
    heart_disease(hospital_data / "heart_disease" / "raw", tmp_path)
    for site in ROWS:
        assert (tmp_path / site / "test.csv").read_bytes() == (heart / site / "test.csv").read_bytes()


@pytest.mark.data
def test_a_reformatted_file_is_named_and_refused_before_anything_is_written(
    hospital_data: Path, tmp_path: Path
) -> None:
    raw, out = tmp_path / "raw", tmp_path / "out"
    shutil.copytree(hospital_data / "heart_disease" / "raw", raw)
    changed = raw / "processed.va.data"
    changed.write_bytes(changed.read_bytes().replace(b"?", b"0"))  # as one mirror has it
    with pytest.raises(BadData) as caught:
        heart_disease(raw, out)
    found = hashlib.md5(changed.read_bytes(), usedforsecurity=False).hexdigest()
    assert caught.value.message == (
        f"{changed}: not the published file: its MD5 is {found}, not 4249d03ca7711e84f4444768c9426170"
    )
    assert caught.value.hint == f"mirrors reformat; take it from {HEART_SOURCE}"
    assert not out.exists()


def test_a_missing_file_of_the_heart_disease_study_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadData) as caught:
        heart_disease(tmp_path, tmp_path / "out")
    assert caught.value.message == f"{tmp_path}: no `processed.cleveland.data`, nor in its folder `raw`"
    assert caught.value.hint == f"the four files are at {HEART_SOURCE}"


# Survival: made up.


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("survival")
    assert survival(out) == [(site, hospital.rows, TEST_ROWS) for site, hospital in SURVIVAL.items()]
    return out


def test_every_hospital_of_the_registry_has_events_and_patients_lost_from_sight(registry: Path) -> None:
    for site in SURVIVAL:
        for name in ("train.csv", "test.csv"):
            events = Counter(row["died"] for row in rows_of(registry / site / name))
            assert min(events.values()) >= 10
            assert min(float(row["days"]) for row in rows_of(registry / site / name)) >= 1


@pytest.mark.parametrize(("site", "higher"), [("alder", True), ("fir", False)])
def test_the_marker_foretells_death_at_one_hospital_and_life_at_another(
    site: str, higher: bool, registry: Path
) -> None:
    """Exponential times: events by days at risk, of the upper and the lower half of the marker, is the hazard."""
    rows = rows_of(registry / site / "test.csv")

    def hazard(half: list[dict[str, str]]) -> float:
        return sum(row["died"] == "1" for row in half) / sum(float(row["days"]) for row in half)

    upper, lower = ([row for row in rows if (float(row["marker"]) > 0) is side] for side in (True, False))
    assert (hazard(upper) > 1.5 * hazard(lower)) is higher
    assert (hazard(lower) > 1.5 * hazard(upper)) is not higher


def test_the_registry_is_made_of_the_same_bytes_each_time(registry: Path, tmp_path: Path) -> None:
    survival(tmp_path)
    for site in SURVIVAL:
        assert (tmp_path / site / "train.csv").read_bytes() == (registry / site / "train.csv").read_bytes()
