"""Made-up patients for tasks of which no open data of several hospitals can be shipped."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fl_algorithms.lab.data import Made, write_site

COLUMNS = ("age", "grade", "size_mm", "nodes", "er", "pr", "marker", "bmi", "days", "died")
TEST_ROWS = 200  # at each hospital: so many that a score hardly depends on who is in them
LONGEST = 3650.0  # days that anybody is followed


@dataclass(frozen=True)
class Hospital:
    """Whom it sees, and how it measures and follows them.

    Attributes:
        rows: to train with.
        age, late: the mean age, and how far the tumors are when found: shifts grade, size and nodes.
        hazard: deaths a day of a patient whose risk is 0.
        marker: how the hazard's logarithm rises with the marker, which is measured by one of two assays.
        followed: mean days until a patient is lost from sight.
    """

    rows: int
    age: float
    late: float
    hazard: float
    marker: float
    followed: float


# As many hospitals as FLamby's TCGA-BRCA has. The last two have another assay of the marker, whose scale is turned
# around.
SURVIVAL = {
    "alder": Hospital(250, 58, 0.0, 2.0e-4, 0.7, 1800),
    "beech": Hospital(160, 62, 0.3, 2.5e-4, 0.7, 1400),
    "cedar": Hospital(165, 55, -0.3, 1.5e-4, 0.7, 2200),
    "damson": Hospital(130, 66, 0.5, 3.0e-4, 0.7, 1000),
    "elm": Hospital(130, 60, 0.0, 2.5e-4, -0.7, 1600),
    "fir": Hospital(45, 57, 0.2, 2.5e-4, -0.7, 1800),
}


def survival(out: Path) -> Made:
    """Six hospitals that differ: a stand-in for a registry of breast cancer. No patient of it ever lived.

    Times to death are exponential, and the hazard's logarithm is linear; patients are lost from sight at random.

    Raises:
        CannotWrite: ``out`` cannot be written.
    """
    made: Made = []
    for number, (site, hospital) in enumerate(SURVIVAL.items()):
        generator = np.random.default_rng([2026, number])
        rows = [_patient(generator, hospital) for _ in range(hospital.rows + TEST_ROWS)]
        made.append(write_site(out, site, COLUMNS, rows[: hospital.rows], rows[hospital.rows :]))
    return made


def _patient(generator: np.random.Generator, hospital: Hospital) -> list[str]:
    age = float(np.clip(generator.normal(hospital.age, 11), 25, 92))
    grade = int(np.clip(round(generator.normal(2 + 0.5 * hospital.late, 0.7)), 1, 3))
    size = float(np.clip(generator.gamma(3, 8) * (1 + 0.4 * hospital.late), 2, 120))
    nodes = int(generator.poisson(max(0.2, 1.5 + hospital.late)))
    er = int(generator.random() < 0.7)
    pr = int(generator.random() < (0.8 if er else 0.2))
    marker, bmi = float(generator.normal()), float(generator.normal(26, 4.5))
    risk = 0.025 * (age - 60) + 0.5 * (grade - 2) + 0.015 * (size - 24) + 0.12 * (nodes - 1.5) - 0.5 * (er - 0.7)
    risk += hospital.marker * marker
    death = float(generator.exponential(1 / (hospital.hazard * np.exp(risk))))
    seen = min(float(generator.exponential(hospital.followed)), LONGEST)
    days, died = max(1.0, min(death, seen)), int(death <= seen)
    numbers = (f"{age:.0f}", grade, f"{size:.0f}", nodes, er, pr, f"{marker:.2f}", f"{bmi:.1f}", f"{days:.0f}", died)
    return [str(number) for number in numbers]
