"""Where the lab finds each site's data: one folder for each site, with files of fixed names."""

from collections.abc import Mapping
from pathlib import Path

from fl_algorithms.rows import COLUMNS, FILES, IMAGES, MASKS, PUBLIC_DATA, TaskRow
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.source import Source
from wardround.errors import BadData

# role -> name in the site's folder; the first role must be there, and those that share a prefix with it
TABLES = ({"table": "train.csv", "test": "test.csv", "mapping": "mapping.toml"},)
ARRAYS = {"arrays": "train.npz", "test": "test.npz"}
LABELED = {
    "images": "images", "labels": "labels.csv", "test_images": "test_images", "test_labels": "test_labels.csv",
}  # fmt: skip
MASKED = {
    "images": "images", "masks": "masks", "labels": "patients.csv",
    "test_images": "test_images", "test_masks": "test_masks", "test_labels": "test_patients.csv",
}  # fmt: skip
OWN = {"files": "train", "test_files": "test"}  # or with any ending
LAYOUTS = {COLUMNS: TABLES, IMAGES: (ARRAYS, LABELED), MASKS: (ARRAYS, MASKED), FILES: (OWN,)}


def find(study: ResolvedStudy, folder: Path, *, test: bool = True) -> dict[str, Source]:
    """Each site's files in ``folder/SITE``.

    Tables are train.csv and test.csv, and mapping.toml where the columns are the site's own. Images are train.npz and
    test.npz, or the folder images with labels.csv (for masks: with the folder masks, and perhaps patients.csv) and the
    same names with ``test_`` before them. What a plug-in's own code reads is train and test, files of any ending or
    folders. What is for testing may be absent.

    Args:
        test: False leaves out what is for testing.

    Raises:
        BadData: a site has nothing there that the study's task could read.
    """
    row = study.task.row
    layouts, sources = LAYOUTS[_reads(row)], {}
    for site in study.study.sites:
        found = next((paths for layout in layouts if (paths := _present(folder / site, layout))), None)
        if found is None:
            first = [str(folder / site / next(iter(layout.values()))) for layout in layouts]
            absent = f"{first[0]} does not exist" if len(first) == 1 else f"neither {' nor '.join(first)} exists"
            raise BadData(
                f"{folder} has no {WHAT[_reads(row)]} for site `{site}`: {absent}",
                hint=HINTS[_reads(row)],
            )
        sources[site] = Source({role: path for role, path in found.items() if test or not role.startswith("test")})
    return sources


def require_tests(study: ResolvedStudy, folder: Path, sources: Mapping[str, Source]) -> None:
    """Raises BadData: in what ``find`` found, a site has nothing to test."""
    reads = _reads(study.task.row)
    for site, source in sources.items():
        layout = next(layout for layout in LAYOUTS[reads] if next(iter(layout)) in source.paths)
        role = next(role for role in layout if role.startswith("test"))
        if role not in source.paths:
            raise BadData(
                f"{folder} has no test {WHAT[reads]} for site `{site}`: {folder / site / layout[role]} does not exist",
                hint="central training is judged on each site's test rows, for its validation rows come from the pool",
            )


def find_public_data(folder: Path) -> Path:
    """The lab's copy of the public data set, in ``folder/public_data``: public_data.csv, public_data.npz or images.

    Raises:
        BadData: there is none of them.
    """
    there = [folder / PUBLIC_DATA / name for name in ("public_data.csv", "public_data.npz", "images")]
    found = next((path for path in there if path.exists()), None)
    if found is None:
        names = ", ".join(map(str, there[:-1])) + f" nor {there[-1]}"
        raise BadData(f"the study needs a public data set, and there is neither {names}", hint="put a copy of it there")
    return found


_IMAGES = (
    "one folder for each site, with train.npz and test.npz, or images and labels.csv or masks; "
    "`fl-lab data --help` makes examples"
)
HINTS = {
    COLUMNS: "one folder for each site, with train.csv and test.csv; `fl-lab data --help` makes examples",
    IMAGES: _IMAGES,
    MASKS: _IMAGES,
    FILES: "one folder for each site, with train and test: files of any one ending, or folders",
}
WHAT = {COLUMNS: "table", IMAGES: "images", MASKS: "images", FILES: "files"}


def _reads(row: TaskRow) -> str:
    return row.reads or row.gives


def _present(folder: Path, layout: dict[str, str]) -> dict[str, Path]:
    """The layout's roles that are there; {} where the first is not."""
    named = {role: folder / name for role, name in layout.items()}
    if layout is OWN:
        named = {role: next(iter(sorted(folder.glob(f"{name}.*"))), folder / name) for role, name in layout.items()}
    paths = {role: path for role, path in named.items() if path.exists()}
    return paths if next(iter(layout)) in paths else {}
