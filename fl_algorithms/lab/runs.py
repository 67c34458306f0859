"""One run of a suite, in a worker process: from a job to the bytes of its result file.

Nothing here writes. Importing this needs no torch; a worker imports it with its first job.
"""

import json
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_algorithms.engine.diverged import Diverged
from fl_algorithms.engine.hardware import Hardware
from fl_algorithms.lab.participation import Participation
from fl_algorithms.lab.suite import Job
from fl_algorithms.study import ResolvedStudy
from wardround.errors import WardroundError

if TYPE_CHECKING:
    from fl_algorithms.engine.device import Device
    from fl_algorithms.engine.session import Checkpoint
    from fl_algorithms.lab.federation import Outcome
    from fl_algorithms.tasks.base import SiteData

FORMAT = 1


@dataclass(frozen=True)
class Failed:
    """A job that gave no result. ``trace`` is for a fault in the program."""

    message: str
    hint: str = ""
    trace: str = ""


@dataclass(frozen=True)
class Survey:
    """What all runs in one output folder have in common."""

    versions: dict[str, str]
    data: dict[str, str]  # site -> digest of its tables
    warnings: tuple[str, ...]


def survey(study: ResolvedStudy, folder: Path, hardware: Hardware, test: bool = True) -> Survey:
    """The versions of this process, and the data of ``folder``, read once so that bad data is said once.

    Args:
        test: False leaves what is for testing unopened.

    Raises:
        UsageProblem: the device is not there.
        BadData: a site has no table, or one that the task refuses.
    """
    from fl_algorithms.engine.device import device_for
    from fl_algorithms.engine.partition import task_of
    from fl_algorithms.lab.site_data import load_sites

    device = device_for(hardware)
    sites = load_sites(study, task_of(study), folder, test=test)
    warnings = tuple(f"{site}: {warning}" for site, data in sites.items() for warning in data.warnings)
    return Survey(versions(device), {site: data.digest for site, data in sites.items()}, warnings)


def versions(device: "Device") -> dict[str, str]:
    """What a result depends on beside study and data."""
    import platform

    import numpy as np
    import torch

    from wardround import __version__

    return {
        "wardround": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "device": device.name,
    }


def attempt(job: Job, folder: Path, hardware: Hardware) -> bytes | Failed:
    """The job's result file. A failure is recorded, so that the other jobs go on."""
    try:
        return json.dumps(perform(job, folder, hardware), indent=1, ensure_ascii=False, allow_nan=False).encode()
    except Diverged as error:
        return _without_loss(job) if job.tuning else Failed(error.message, error.hint)
    except WardroundError as error:
        return Failed(error.message, error.hint)
    except Exception as error:
        return Failed(f"a fault in the program: {type(error).__name__}: {error}", trace=traceback.format_exc())


def _without_loss(job: Job) -> bytes:
    """The result of a tuning run that left the finite numbers: its point is not chosen."""
    result = {
        "format": FORMAT, "row": job.row, "kind": job.kind, "tuning": True, "point": job.point,
        "settings": job.settings, "seed": job.seed, "diverged": True, "rows": {}, "checkpoints": {},
    }  # fmt: skip
    return json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False).encode()


def perform(job: Job, folder: Path, hardware: Hardware = Hardware()) -> dict[str, Any]:
    """Run ``job`` on the sites' tables below ``folder``. For tuning no test table is opened, but by a central row."""
    from fl_algorithms.engine.device import deterministic

    with deterministic(job.study.study.threads):
        return _performed(job, folder, hardware)


def _performed(job: Job, folder: Path, hardware: Hardware) -> dict[str, Any]:
    from fl_algorithms.engine.device import device_for
    from fl_algorithms.engine.partition import task_of
    from fl_algorithms.lab.baseline import baseline
    from fl_algorithms.lab.federation import limits_summary, run_federation
    from fl_algorithms.lab.site_data import load_sites

    wall, cpu = time.perf_counter(), time.process_time()
    study = job.study
    device = device_for(hardware)
    task = task_of(study)
    rows: dict[str, dict[str, int]] = {}
    data: dict[str, str] = {}
    measures: dict[str, Any] = {}
    known: dict[str, Any] = {}
    if job.kind == "central":
        from fl_algorithms.lab.central import run_central

        outcome = run_central(study, task, folder, job.normalisation, device=device)
    else:
        sites = load_sites(study, task, folder, test=not job.tuning)
        rows = {site: rows_of(site_data) for site, site_data in sites.items()}
        data = {site: site_data.digest for site, site_data in sites.items()}
        there = Participation(attack=job.attack)
        outcome = run_federation(study, task, sites, device=device, participation=there)
        known = {} if job.tuning else baseline(task, sites)
        protocol = job.protocol
        if job.kind == "silo" and not job.tuning:
            protocol = protocol.model_copy(update={"matrix": True})  # what one site's model is worth at the others
        if protocol.asks:
            from fl_algorithms.lab.protocol import measure

            measures = measure(study, task, sites, outcome, protocol, device)
    return {
        "format": FORMAT,
        "row": job.row,
        "kind": job.kind,
        "tuning": job.tuning,
        "point": job.point,
        "settings": job.settings,
        "seed": job.seed,
        "study": study.document(),
        "study_digest": study.digest(outcome.initial_digest),
        "initial_digest": outcome.initial_digest,
        "model_digest": outcome.digest,
        "best_round": outcome.best_round,
        "limits": limits_summary(outcome.accounts),
        "versions": versions(device) | {"threads": str(study.study.threads)},
        "seconds": {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu},
        "rows": rows,
        "baseline": known,
        "data": data,
        "checkpoints": _checkpoints(outcome, job),
        "measures": measures,
    }


def rows_of(data: "SiteData") -> dict[str, int]:
    """How many rows each split has."""
    from fl_algorithms.tasks.base import samples

    return {
        "train": samples(data.train),
        "validation": samples(data.validation),
        "test": 0 if data.test is None else samples(data.test),
    }


def _checkpoints(outcome: "Outcome", job: Job) -> dict[str, dict[str, Any]]:
    """Site -> kind -> what its model scored. Of a tuning run the validation loss alone, so that no choice sees more."""
    return {
        site: {kind: _checkpoint(kinds[kind], job) for kind in sorted(kinds)}
        for site, kinds in sorted(outcome.checkpoints.items())
    }


def _checkpoint(checkpoint: "Checkpoint", job: Job) -> dict[str, Any]:
    found = {"round": checkpoint.round, "val_loss": checkpoint.val_loss}
    if job.tuning:
        return found
    return found | {
        "split": checkpoint.split,
        "metric": checkpoint.metric,
        "score": checkpoint.score,
        "scores": checkpoint.scores,
        **({"why": checkpoint.why} if checkpoint.why else {}),
        "fit": dict(checkpoint.fit),
    }
