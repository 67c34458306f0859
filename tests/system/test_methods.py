"""Every installed method in one running federation, a short study each, against the lab: the same bits."""

import csv
import hashlib
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from coordinator.state_directory import State
from fl_algorithms import registry, rows
from fl_algorithms.engine.partition import describe, initial_model, task_of
from fl_algorithms.lab.federation import run_federation
from fl_algorithms.lab.site_data import load_sites
from fl_algorithms.resolving import resolve
from fl_algorithms.settings.models import DEPTHS
from fl_algorithms.study import ResolvedStudy
from site_agent import audit
from site_agent.state.directory import SiteState
from tools.world import World, in_parallel
from wardround.local import control
from wardround.records.ledger.entries import UploadEntry
from wardround.records.study import StudyFile
from wardround.signing.certificates import Name

pytestmark = pytest.mark.system

SITES = ("ash", "birch", "cedar")
FEATURES = ("age", "dose", "pressure")
LABEL = "ill"
SCALE = ((55.0, 0.0, 120.0), (20.0, 1.0, 15.0))  # mean and std of each feature, where the study gives them
PUBLIC_ROWS = 12
WAIT_S = 60
FEDERATION = "methods"

MLP = {"name": "mlp", "hidden": [4]}
NORMED = {"name": "mlp", "hidden": [4], "norm": "batch"}
FENDA = {"name": "fenda", "shared_hidden": [3], "private_hidden": [2]}

# What a study of a method has beside the defaults, as tables of a study file: to be short, or to use more of it.
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "dsfl": {"algorithm": {"subset": 7}},
    "fedbabu": {"training": {"init_private": "common"}, "algorithm": {"fine_tuning": {"steps": 2}}},
    "fedbn": {"model": NORMED},
    "feddf": {"algorithm": {"distil_steps": 5, "distil_batch_size": 4}},
    "fedmd": {"algorithm": {"transfer": {"steps": 2}, "initial": {"steps": 2}}},
    "fedrep": {"algorithm": {"train_head": {"steps": 2}}},
    "fedsoup": {"algorithm": {"soup": {"start_after": 0}}},  # so that both rounds are soup rounds
    "fenda": {"model": FENDA},
    "ktpfl": {"algorithm": {"initial": {"steps": 2}}},
    "mhpflgb": {
        "algorithm": {"train_local": {"steps": 3}, "train_global": {"steps": 2}},
        "networks": {"deep": {"name": "mlp", "hidden": [5, 3], "norm": "batch"}},  # each site its own
        "assigned": {"birch": "deep"},
    },
    "pfeddf": {"algorithm": {"distil_steps": 5, "distil_batch_size": 4}},
}
BESIDE = ("networks", "assigned", "aggregation", "encoding", "limits", "secure_aggregation")  # tables told as they are
# FedDF and pFedDF once more: networks of unlike shapes, and the coordinator's steps stopped by labelled rows.
UNLIKE: dict[str, dict[str, Any]] = {
    "networks": {"deep": {"name": "mlp", "hidden": [5, 3], "norm": "batch"}},
    "assigned": {"birch": "deep", "cedar": "deep"},
    "algorithm": {
        "distil_steps": 6,
        "distil_batch_size": 4,
        "early_stopping": {"every": 2, "patience": 4, "fraction": 0.25},
    },
}
# Robust rules in place of the mean, also under a server optimizer and where a part of the network is shared.
ROBUST: dict[str, dict[str, Any]] = {
    "fedadam": {"aggregation": {"rule": "trimmed_mean"}},
    "fenda": {"model": FENDA, "aggregation": {"rule": "geometric_median"}},
}
# A site that only evaluates, with a server that counts sites, and with one that does not.
EVALUATED: dict[str, dict[str, Any]] = {
    "fedavg": {"model": NORMED, "study": {"roles": {"cedar": "evaluate"}}},
    "scaffold": {"study": {"roles": {"cedar": "evaluate"}}},
}
# Updates in an encoding, whose rests are kept at the sites from one round to the next.
ENCODED: dict[str, dict[str, Any]] = {
    "fedprox": {"model": NORMED, "encoding": {"name": "bfloat16"}},
    "fedavgm": {"encoding": {"name": "int8", "block": 8}},
    "ditto": {"encoding": {"name": "topk", "fraction": 0.2}},
}
FOR_MASKS = {name for name, row in registry.METHODS.items() if DEPTHS in row.needs}  # test_images.py has them
DISTILLING = sorted(name for name, row in registry.METHODS.items() if row.public_data == rows.COORDINATOR)
AGAIN = [*((name, UNLIKE) for name in DISTILLING), *ROBUST.items(), *EVALUATED.items(), *ENCODED.items()]
METHODS = sorted(name for name, row in registry.METHODS.items() if not row.lab_only and name not in FOR_MASKS)


def long(method: str) -> tuple[pytest.MarkDecorator, ...]:
    """A coordinator that distills starts a process with torch for each aggregation."""
    return (pytest.mark.chaos,) if method in DISTILLING else ()


def study_of(method: str, told: dict[str, dict[str, Any]] | None = None) -> ResolvedStudy:
    """A resolved study of two rounds of three steps. ``told``: in place of what SETTINGS has."""
    name = f"short-{method.replace('_', '-')}" + ("" if told is None else "-again")
    told = SETTINGS.get(method, {}) if told is None else told
    plain = {"optimizer": "sgd", "weight_decay": 0.0} if registry.METHODS[method].plain_sgd else {}
    features: list[Any] = list(FEATURES)
    if registry.METHODS[method].public_data:
        features = [{"name": name, "mean": mean, "std": std} for name, mean, std in zip(FEATURES, *SCALE, strict=True)]
    tables: dict[str, Any] = {
        "study": {"name": name, "sites": list(SITES), "rounds": 2, "threads": 1, **told.get("study", {})},
        "task": {"name": "tabular", "label": LABEL, "classes": ["no", "yes"], "features": features},
        "model": told.get("model", MLP),
        "algorithm": {"name": method, **told.get("algorithm", {})},
        "training": {"local_steps": 3, "batch_size": 8, **plain, **told.get("training", {})},
        "reported": {"metrics": ["val_loss", "accuracy"], **told.get("reported", {})},
        "public_data": {"digest": hashlib.sha256(table(PUBLIC_ROWS, seed=9).encode()).hexdigest(), "rows": PUBLIC_ROWS},
        **{table: told[table] for table in BESIDE if table in told},
    }
    return resolve(StudyFile.model_validate(tables))


def table(rows: int, seed: int) -> str:
    draw, text = random.Random(seed), io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow([*FEATURES, LABEL])
    for _ in range(rows):
        patient = [draw.uniform(20, 90), draw.gauss(0, 1), draw.gauss(120, 15)]
        writer.writerow([*(f"{value:.3f}" for value in patient), "yes" if patient[0] / 50 + patient[1] > 1 else "no"])
    return text.getvalue()


def policy_for(studies: list[ResolvedStudy]) -> str:
    """A policy that allows each of ``studies`` all that it asks."""
    shared = {spec for study in studies for site in SITES for spec in describe(study, site).upload}
    statistics = sorted(
        {spec.key for spec in shared if spec.name.rpartition(".")[2] in ("running_mean", "running_var")}
    )
    rules = "".join(f"  {{ match = {json.dumps(match)} }},\n" for match in ["*", *statistics])
    encoded = sorted({(spec.key, spec.dtype) for spec in shared if spec.dtype != "F32"})
    rules += "".join(f"  {{ match = {json.dumps(key)}, dtype = [{json.dumps(dtype)}] }},\n" for key, dtype in encoded)
    return (
        f'[study]\ncoordinator = "{Name(FEDERATION, "coordinator").uri}"\nstudies = ["*"]\n'
        f"[tensors]\nallow = [\n{rules}]\n"
        '[metrics]\nallow = [{ name = "val_loss" }, { name = "accuracy" }]\n'
        '[counts]\nform = "exact"\n'
        "[models]\nkept_by_coordinator = true\nsent_to_other_sites = true\n"
        "[quotas]\nbytes_per_round = 1000000\nbytes_per_day = 1000000000\n"
        "numbers_per_round = 1000\nnumbers_per_day = 100000\n"
    )


class Federation:
    """One coordinator and its agents, which run all the studies, and the tables that they train on."""

    def __init__(self, world: World, data: Path) -> None:
        self.world = world
        self.data = data
        self._coordinator = State(world.coordinator_state).control

    def site(self, name: str) -> SiteState:
        return SiteState(self.world.state / name)

    def run(self, study: ResolvedStudy, folder: Path) -> dict[str, Any]:
        """Create, approve and start a study, and wait for its end. Returns its status."""
        name, initial = study.study.name, folder / "initial.safetensors"
        safetensors.torch.save_file(initial_model(study), initial)
        distills = study.method.row.public_data == rows.COORDINATOR
        public_data = str(self.data / "public_data" / "public_data.csv") if distills else None
        self._ask("create", document=study.document(), initial=str(initial), public_data=public_data)

        def approve(site: str) -> None:
            service = self.site(site).control
            control.call(service, {"command": "refresh"}, timeout_s=WAIT_S)
            person = {"name": "dpo", "uid": 1000, "source": "sudo"}
            about = {"study": name, "data": "patients"}
            self.before_approval(site, name)
            shown = control.call(service, {"command": "preview", **about}, timeout_s=WAIT_S)["digest"]
            request = {"command": "approve", **about, "digest": shown, "by": person}
            assert control.call(service, request, timeout_s=WAIT_S)["reported"]

        in_parallel(approve, SITES)
        self._ask("start", study=name)
        status: dict[str, Any] = self._ask("follow", study=name)
        return status

    def before_approval(self, site: str, study: str) -> None:
        """What its people do first."""

    def _ask(self, command: str, **fields: Any) -> Any:
        return control.call(self._coordinator, {"command": command, **fields}, timeout_s=WAIT_S)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("methods")
    again = [study_of(method, told) for method, told in AGAIN]
    with World(folder / "world", FEDERATION) as world:
        federation = Federation(world, tables_in(folder / "data"))
        begin(federation, policy_for([*(study_of(method) for method in METHODS), *again]))
        yield federation


def tables_in(data: Path) -> Path:
    """The sites' tables and the public rows, in a new folder."""
    (data / "public_data").mkdir(parents=True)
    (data / "public_data" / "public_data.csv").write_bytes(table(PUBLIC_ROWS, seed=9).encode())
    for seed, site in enumerate(SITES):
        (data / site).mkdir()
        (data / site / "train.csv").write_bytes(table(30 + 10 * seed, seed).encode())
    return data


def same_as_in_the_lab(study: ResolvedStudy, federation: Federation, folder: Path) -> None:
    """The agents' study finishes with every site, with the lab's model and its best round."""
    status = federation.run(study, folder)
    assert (status["state"], status["incomplete"]) == ("finished", []), status
    task = task_of(study)
    outcome = run_federation(study, task, load_sites(study, task, federation.data))
    assert status["model_digest"] == outcome.digest
    assert (status["best"] or {}).get("round") == outcome.best_round


def begin(federation: Federation, policy: str) -> None:
    """A coordinator that serves, and agents with their data and this policy."""
    world, data = federation.world, federation.data
    world.start(data, LABEL, SITES)
    for site in SITES:
        federation.site(site).policy.write_text(policy)
        world.ask_site(site, "data", "public-data", "patients", data / "public_data" / "public_data.csv")


@pytest.mark.parametrize(
    ("method", "told"),
    [pytest.param(name, None, id=name, marks=long(name)) for name in METHODS]
    + [pytest.param(name, told, marks=long(name)) for name, told in AGAIN],
)
def test_a_federation_reaches_the_same_bits_as_the_lab(
    method: str, told: Any, federation: Federation, tmp_path: Path
) -> None:
    study = study_of(method, told)
    same_as_in_the_lab(study, federation, tmp_path)
    for site in SITES:
        consent = federation.site(site).consent(study.study.name)
        assert consent is not None
        assert consent.evaluates == (site in study.study.evaluators)
        alone = told is UNLIKE and site not in UNLIKE["assigned"]
        assert consent.exposure == ("coordinator" if alone else registry.METHODS[method].exposure)


def test_every_ledger_of_that_federation_verifies(federation: Federation) -> None:
    for site in SITES:
        federation.world.agents[site].stop()
        verdict = audit.verify(federation.site(site).ledger)[0]
        assert (verdict.consistent, verdict.reason) == (True, ""), verdict
        assert verdict.unresolved == 0
    uploads = [line.entry for line in audit.lines(federation.site("cedar").ledger) if line.type == "upload"]
    names = {study_of(method, told).study.name for method, told in EVALUATED.items()}
    evaluated = [entry for entry in uploads if isinstance(entry, UploadEntry) and entry.study in names]
    if evaluated:  # where their tests ran
        assert {(entry.kind, entry.tensors, entry.num_examples) for entry in evaluated} == {("validate", (), 0)}
        assert {entry.num_validation for entry in evaluated} == {50}  # all of its rows
        assert {entry.round for entry in evaluated} == {1, 2, 3}
