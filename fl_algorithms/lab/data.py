"""Real patients for the lab and the demo: one folder per hospital with train.csv and test.csv.

``breast_cancer`` divides what scikit-learn embeds and needs no network; ``heart_disease`` rebuilds four real hospitals
from the files that UCI publishes. Both write the same bytes on every machine.
"""

import csv
import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from wardround.errors import BadData, NeedsPerson
from wardround.local import durable

Made = list[tuple[str, int, int]]  # site, rows in train.csv, rows in test.csv
Measurements = Mapping[str, float]  # column -> what was measured, of one patient


@dataclass(frozen=True)
class _Hospital:
    """Whom a hospital of the breast cancer study sees, and how it measures."""

    benign: int
    malignant: int
    measure: Callable[[str, float], float]


def _as_published(column: str, value: float) -> float:
    return value


def _in_centimetres(column: str, value: float) -> float:
    """Lengths a tenth and areas a hundredth of the published number."""
    if "radius" in column or "perimeter" in column:
        return value / 10
    return value / 100 if "area" in column else value


def _miscalibrated(column: str, value: float) -> float:
    """A scanner that reads 15 % high, on gray values that start at 4."""
    if "texture" in column and "error" not in column:
        return value + 4
    return value * 1.15


def _two_digits(column: str, value: float) -> float:
    """Read off a printed form: two significant digits."""
    return float(f"{value:.2g}")


# Together the 357 benign and 212 malignant patients: a large hospital with the published mix, one that screens, a
# referral center where most are ill, and a small one.
BREAST_CANCER = {
    "ashford": _Hospital(benign=168, malignant=88, measure=_as_published),
    "birchwood": _Hospital(benign=119, malignant=35, measure=_in_centimetres),
    "calder": _Hospital(benign=36, malignant=66, measure=_miscalibrated),
    "dunmore": _Hospital(benign=34, malignant=23, measure=_two_digits),
}
BREAST_CANCER_TEST_PERCENT = 30  # of each class at each hospital

HEART_COLUMNS = (
    "age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope", "ca", "thal",
    "num",
)  # fmt: skip
HEART_KEPT = ("age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak", "cp", "restecg")
HEART_MD5 = {
    "cleveland": "2d91a8ff69cfd9616aa47b59d6f843db",
    "hungarian": "22e96bee155b5973568101c93b3705f6",
    "switzerland": "9a87f7577310b3917730d06ba9349e20",
    "va": "4249d03ca7711e84f4444768c9426170",
}
HEART_SOURCE = "https://archive.ics.uci.edu/dataset/45/heart+disease"


def breast_cancer(out: Path) -> Made:
    """The Wisconsin breast cancer patients, divided into four hospitals that differ in size, case mix and scale.

    30 measurements and ``diagnosis`` (benign, malignant). Who goes where depends on nothing but the patients' numbers.

    Raises:
        NeedsPerson: scikit-learn is not installed.
        CannotWrite: ``out`` cannot be written.

    Reference:
        Street, Wolberg, Mangasarian 1993, as ``sklearn.datasets.load_breast_cancer``.
    """
    _need_scikit_learn()
    from sklearn.datasets import load_breast_cancer

    published = load_breast_cancer()
    columns = [str(name).replace(" ", "_") for name in published.feature_names]
    waiting: dict[str, list[Measurements]] = {"benign": [], "malignant": []}
    for patient in sorted(range(len(published.target)), key=lambda number: _shuffled("breast cancer", number)):
        row = dict(zip(columns, map(float, published.data[patient]), strict=True))
        waiting[str(published.target_names[published.target[patient]])].append(row)
    made: Made = []
    for site, hospital in BREAST_CANCER.items():
        train: list[Sequence[str]] = []
        test: list[Sequence[str]] = []
        for diagnosis, count in (("benign", hospital.benign), ("malignant", hospital.malignant)):
            patients, waiting[diagnosis] = waiting[diagnosis][:count], waiting[diagnosis][count:]
            rows = [
                [*(f"{hospital.measure(name, value):.7g}" for name, value in patient.items()), diagnosis]
                for patient in patients
            ]
            held_out = round(count * BREAST_CANCER_TEST_PERCENT / 100)
            test += rows[:held_out]
            train += rows[held_out:]
        made.append(write_site(out, site, [*columns, "diagnosis"], _mixed(train), _mixed(test)))
    return made


def heart_disease(raw: Path, out: Path) -> Made:
    """The four hospitals of the UCI heart disease study, cleaned and split as FLamby's Fed-Heart-Disease does.

    Columns ``slope``, ``ca`` and ``thal`` go, then every patient with a missing value; ``disease`` is 1 where ``num``
    is not 0; 66 % train, with scikit-learn's split at random_state 43, stratified where both classes have more than two
    patients. Rows stay in the file's order, and ``cp`` and ``restecg`` stay categories.

    Args:
        raw: the folder with ``processed.SITE.data``, or one that holds it as ``raw``.

    Raises:
        BadData: a file is missing or is not the published one.
        NeedsPerson: scikit-learn is not installed.
        CannotWrite: ``out`` cannot be written.

    Reference:
        Janosi, Steinbrunn, Pfisterer, Detrano 1988 (CC BY 4.0). Ogier du Terrail et al., FLamby, NeurIPS 2022,
        https://arxiv.org/abs/2210.04620
    """
    patients = {site: _heart_patients(_published(raw, site)) for site in HEART_MD5}
    _need_scikit_learn()
    made: Made = []
    for site, rows in patients.items():
        held_out = _heart_test_rows([row[-1] for row in rows])
        train = [row for number, row in enumerate(rows) if number not in held_out]
        test = [row for number, row in enumerate(rows) if number in held_out]
        made.append(write_site(out, site, [*HEART_KEPT, "disease"], train, test))
    return made


def _published(raw: Path, site: str) -> Path:
    """The hospital's file, known by its MD5: mirrors reformat, and one has 0 for every missing value."""
    name = f"processed.{site}.data"
    found = next((path for path in (raw / name, raw / "raw" / name) if path.is_file()), None)
    if found is None:
        raise BadData(f"{raw}: no `{name}`, nor in its folder `raw`", hint=f"the four files are at {HEART_SOURCE}")
    digest = hashlib.md5(found.read_bytes(), usedforsecurity=False).hexdigest()
    if digest != HEART_MD5[site]:
        raise BadData(
            f"{found}: not the published file: its MD5 is {digest}, not {HEART_MD5[site]}",
            hint=f"mirrors reformat; take it from {HEART_SOURCE}",
        )
    return found


def _heart_patients(path: Path) -> list[list[str]]:
    """The complete rows, in the file's order: ``HEART_KEPT`` and the label, numbers in their shortest form."""
    patients = []
    for line in path.read_text(encoding="ascii").splitlines():
        row = dict(zip(HEART_COLUMNS, line.split(","), strict=True))
        kept = [row[name] for name in (*HEART_KEPT, "num")]
        if "?" not in kept:
            *values, num = (float(cell) for cell in kept)
            patients.append([*(f"{value:.12g}" for value in values), "1" if num else "0"])
    return patients


def _heart_test_rows(labels: Sequence[str]) -> set[int]:
    from sklearn.model_selection import train_test_split

    counts = [labels.count(label) for label in sorted(set(labels))]
    stratify = labels if len(counts) > 1 and min(counts) > 2 else None
    _, test = train_test_split(
        range(len(labels)), train_size=0.66, test_size=1 - 0.66, random_state=43, shuffle=True, stratify=stratify
    )
    return set(test)


def _need_scikit_learn() -> None:
    try:
        import sklearn  # noqa: F401 - the callers need parts of it; here its absence gets a sentence
    except ImportError:
        raise NeedsPerson("scikit-learn is not installed", hint="`pip install 'wardround[site]'`") from None


def _shuffled(what: str, number: int) -> bytes:
    """A key that sorts into an order without meaning, the same on every machine and with every library."""
    return hashlib.sha256(f"{what} {number}".encode()).digest()


def _mixed(rows: list[Sequence[str]]) -> list[Sequence[str]]:
    """The classes interleaved, as patients come."""
    return [rows[number] for number in sorted(range(len(rows)), key=lambda number: _shuffled("row", number))]


def write_site(
    out: Path, site: str, header: Sequence[str], train: Sequence[Sequence[str]], test: Sequence[Sequence[str]]
) -> tuple[str, int, int]:
    folder = out / site
    durable.make_folder(folder)
    for name, rows in (("train.csv", train), ("test.csv", test)):
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
        durable.write_file(folder / name, text.getvalue().encode())
    return site, len(train), len(test)
