"""Every site's data, read as the sites would read it."""

from dataclasses import replace
from pathlib import Path

from fl_algorithms.engine.partition import task_at
from fl_algorithms.lab.sources import find, find_public_data
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.base import PublicData, SiteData, Task
from fl_algorithms.tasks.public_data import read_public_data, require_public_data
from fl_algorithms.tasks.selection import to_evaluate


def load_sites(study: ResolvedStudy, task: Task, folder: Path, *, test: bool = True) -> dict[str, SiteData]:
    """Each site's data from what ``folder/SITE`` has for the study's task; ``sources.find`` says what that may be. With
    it comes the public data set in ``folder/public_data``, where the method needs one. Images are of the size that the
    site's network sees, those of the public data set too.

    Args:
        test: False leaves what is for testing unopened.

    Raises:
        BadData: a site has nothing there, or what the task refuses; or the public data set is not the study's.
    """
    sources = find(study, folder, test=test)
    tasks = {site: task_at(study, task, site) for site in sources}
    public_data: dict[tuple[int, ...], PublicData] = {}  # by a sample's shape
    if study.method.row.public_data:
        path = find_public_data(folder)
        require_public_data(study, path, "`fl-lab public-data STUDY.toml PATH` prints the table for this one")
        by_shape = {own.input_shape: own for own in tasks.values()}
        public_data = {shape: read_public_data(study, own, path) for shape, own in by_shape.items()}
    fraction = study.checkpoints.validation_fraction
    data = {
        site: own.load(sources[site], site=site, seed=study.study.seed, validation_fraction=fraction)
        for site, own in tasks.items()
    }
    data |= {site: to_evaluate(data[site]) for site in study.study.evaluators if site in data}
    return {site: replace(found, public_data=public_data.get(tasks[site].input_shape)) for site, found in data.items()}
