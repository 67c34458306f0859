"""Images in a running federation against the lab: the same bits, and no word of a path or a name anywhere but here."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
from PIL import Image

from coordinator.state_directory import State
from fl_algorithms import registry
from fl_algorithms.engine.partition import initial_model, task_of
from fl_algorithms.lab.federation import Outcome, run_federation
from fl_algorithms.lab.site_data import load_sites
from fl_algorithms.resolving import resolve
from fl_algorithms.settings.models import DEPTHS
from fl_algorithms.study import ResolvedStudy
from site_agent import audit
from site_agent.state.directory import SiteState
from tests.fl_algorithms.image_toys import packed, pictures, write_images, write_table
from tests.fl_algorithms.volume_toys import CANARY, ball, write_nifti, write_series
from tools.world import World, in_parallel
from wardround.local import control
from wardround.records import study as study_file
from wardround.signing.certificates import Name

pytestmark = [pytest.mark.system, pytest.mark.chaos]

FEDERATION = "images"
SITES = ("ash", "birch")
WAIT_S = 60
ROWS = {"ash": 16, "birch": 22}
COMMON = """
[study]
name = "{name}"
sites = ["ash", "birch"]
rounds = 2
threads = 1

[training]
batch_size = 4
local_steps = 3
drop_last = true

[checkpoints]
validation_fraction = 0.25
"""
SHAPES = (
    COMMON.format(name="shapes")
    + """
[task]
name = "images"
size = [8, 8]
channels = 1
label = "shape"
patient = "patient"
classes = ["round", "oval"]
class_weights = "balanced"
augment = { flip_horizontal = true, rotate_degrees = 10 }

[model]
name = "resnet10"
width = 0.0625

[algorithm]
name = "fedbn"

[reported]
metrics = ["val_loss", "auc"]
"""
)
MASKS = """
[task]
name = "segmentation"
size = [8, 8]
channels = 1

[model]
name = "unet"
widths = [4, 8]

[reported]
metrics = ["val_loss", "dice"]

[algorithm]
"""
BLOCKS = COMMON.format(name="blocks") + MASKS + 'name = "fedavg"\n'
ORGANS = (
    COMMON.format(name="organs")
    + MASKS.replace(
        "size = [8, 8]",
        """size = [8, 8, 8]
fit = "patches"
spacing = [2.0, 1.0, 1.0]
window = { center = 100, width = 400 }
normalize = "foreground"
patches = { per_image = 2 }""",
    )
    + 'name = "fedavg"\n'
)
# FENDA-FL: a network of ours beside one of torchvision, with a soup of the shared one; and two U-Nets.
OF_TWO = {
    "fenda-images": """
[task]
name = "images"
size = [8, 8]
channels = 1
label = "shape"
classes = ["round", "oval"]

[model]
name = "fenda_images"
shared = { name = "resnet10", width = 0.0625 }
private = { name = "torchvision:shufflenet_v2_x0_5" }

[algorithm]
name = "fenda"
soup = { start_after = 1 }
""",
    "fenda-masks": f"""{MASKS.partition("[model]")[0]}
[model]
name = "fenda_masks"
shared = {{ name = "unet", widths = [4, 8] }}
private = {{ name = "unet", widths = [2, 4] }}

[algorithm]
name = "fenda"
""",
}
# What each method that is for masks alone needs beside the defaults; test_methods.py has the others.
FOR_MASKS = {"lcfed": "train_head = { steps = 2 }\ntrain_calibration = { steps = 2 }\nblur = 3\nblur_sigma = 1.0\n"}


def make_folders(folder: Path, rows: int, seed: int) -> None:
    """PNG files with a table of labels, two images a patient; some apart for testing."""
    for prefix, count, first in (("", rows, "p"), ("test_", 6, "q")):
        names = write_images(folder / f"{prefix}images", list(pictures(count, seed + count)[0]))
        labels = [("round", "oval")[place % 2] for place in range(count)]
        patients = [f"{first}{place // 2}" for place in range(count)]
        write_table(folder / f"{prefix}labels.csv", {"image": names, "shape": labels, "patient": patients})


def make_series(folder: Path, seed: int) -> None:
    """DICOM series with masks drawn on them."""
    affine = np.array([[-1.0, 0, 0, 7], [0, -1, 0, -5], [0, 0, 1, 0], [0, 0, 0, 1]])
    for place in range(4):
        volume, mask = ball(seed + place, (9 + place % 2, 12, 10))
        write_series(folder / "images" / f"p{place}", volume)
        write_nifti(folder / "masks" / f"p{place}.nii.gz", mask, affine=affine)


def for_masks(method: str) -> str:
    if method not in FOR_MASKS:
        pytest.fail(f"method `{method}` is for masks and not in FOR_MASKS of {Path(__file__).name}: add it")
    return f'{COMMON.format(name=f"blocks-{method}")}{MASKS}name = "{method}"\n{FOR_MASKS[method]}'


def of_two(name: str) -> str:
    return COMMON.format(name=name) + OF_TWO[name]


def study_of(text: str, folder: Path) -> ResolvedStudy:
    path = folder / "study.toml"
    path.write_text(text)
    return resolve(study_file.load(path))


def policy_for(studies: list[ResolvedStudy]) -> str:
    """A policy that allows ``studies`` what they ask."""
    shared = {key for study in studies for key in initial_model(study)}
    statistics = sorted(key for key in shared if key.rpartition(".")[2] in ("running_mean", "running_var"))
    rules = "".join(f"  {{ match = {json.dumps(match)} }},\n" for match in ["*", *statistics])
    metrics = sorted({metric for study in studies for metric in study.reported.metrics})
    return (
        f'[study]\ncoordinator = "{Name(FEDERATION, "coordinator").uri}"\nstudies = ["*"]\n'
        f"[tensors]\nallow = [\n{rules}]\n"
        f"[metrics]\nallow = [{', '.join(f'{{ name = {json.dumps(metric)} }}' for metric in metrics)}]\n"
        '[counts]\nform = "exact"\n'
        "[models]\nkept_by_coordinator = true\nsent_to_other_sites = true\n"
        "[quotas]\nbytes_per_round = 1000000\nbytes_per_day = 10000000\n"
        "numbers_per_round = 1000\nnumbers_per_day = 100000\n"
    )


class Federation:
    """A coordinator and the agents of two sites, each with its folders and its arrays."""

    def __init__(self, world: World, data: Path) -> None:
        self.world, self.data = world, data
        self._coordinator = State(world.coordinator_state).control

    def run(self, study: ResolvedStudy, name: str) -> dict[str, Any]:
        """Create, approve and run a study on the data called ``name``. Returns its status."""
        initial = self.world.state / f"{name}.safetensors"
        safetensors.torch.save_file(initial_model(study), initial)
        self._ask("create", document=study.document(), initial=str(initial))

        def approve(site: str) -> None:
            service = SiteState(self.world.state / site).control
            control.call(service, {"command": "refresh"}, timeout_s=WAIT_S)
            person = {"name": "dpo", "uid": 1000, "source": "sudo"}
            about = {"study": study.study.name, "data": name}
            shown = control.call(service, {"command": "preview", **about}, timeout_s=WAIT_S)["digest"]
            request = {"command": "approve", **about, "digest": shown, "by": person}
            assert control.call(service, request, timeout_s=WAIT_S)["reported"]

        in_parallel(approve, SITES)
        self._ask("start", study=study.study.name)
        status: dict[str, Any] = self._ask("follow", study=study.study.name)
        return status

    def lab(self, study: ResolvedStudy, name: str) -> Outcome:
        task = task_of(study)
        return run_federation(study, task, load_sites(study, task, self.data / name))

    def _ask(self, command: str, **fields: Any) -> Any:
        return control.call(self._coordinator, {"command": command, **fields}, timeout_s=WAIT_S)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("images")
    data = folder / "data"
    for seed, site in enumerate(SITES):
        make_folders(data / "folders" / site, ROWS[site], seed)
        packed(data / "arrays" / site / "train.npz", ROWS[site], seed)
        make_series(data / "series" / site, 10 * seed)
    others = (*map(for_masks, FOR_MASKS), *map(of_two, OF_TWO))
    policy = policy_for([study_of(text, folder) for text in (SHAPES, BLOCKS, ORGANS, *others)])
    with World(folder / "world", FEDERATION) as world:
        world.init()
        world.serve()

        def admit(site: str) -> None:
            world.join(site)
            for name in ("folders", "arrays", "series"):
                world.add_data(site, data / name / site, "", name)
            (world.state / site / "policy.toml").write_text(policy)
            world.run_agent(site)

        in_parallel(admit, SITES)
        yield Federation(world, data)


@pytest.mark.chaos
def test_folders_of_images_reach_the_same_bits_as_the_lab(federation: Federation, tmp_path: Path) -> None:
    study = study_of(SHAPES, tmp_path)
    status = federation.run(study, "folders")
    assert (status["state"], status["incomplete"]) == ("finished", []), status
    outcome = federation.lab(study, "folders")
    assert status["model_digest"] == outcome.digest
    for site in SITES:
        leaves = {leaf["name"] for leaf in federation.world.site_json(site, "preview", "shapes")["leaves"]}
        assert leaves
        assert not any(".bn" in name for name in leaves), leaves
    listed = federation.world.site_json("ash", "models", "list", "shapes")["checkpoints"]
    ours = {row["kind"]: row["score"] for row in listed}
    assert ours == {kind: checkpoint.score for kind, checkpoint in outcome.checkpoints["ash"].items()}

    images, out = federation.data / "folders" / "ash" / "test_images", tmp_path / "predictions.csv"
    federation.world.ask_site("ash", "predict", "shapes", "--checkpoint", "latest", "--images", images, "--out", out)
    with out.open(newline="") as file:
        assert [row["image"] for row in csv.DictReader(file)] == sorted(path.name for path in images.iterdir())

    # An image that changes after the approval is said by the commands.
    image = federation.data / "folders" / "birch" / "images" / "000.png"
    Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(image)
    said = json.loads(federation.world.ask_site("birch", "data", "check", "folders", "--study", "shapes", "--json"))
    assert any("have changed since `data add`" in warning for warning in said["warnings"])


def test_arrays_with_masks_reach_the_same_bits_as_the_lab(federation: Federation, tmp_path: Path) -> None:
    study = study_of(BLOCKS, tmp_path)
    status = federation.run(study, "arrays")
    assert (status["state"], status["incomplete"]) == ("finished", []), status
    outcome = federation.lab(study, "arrays")
    assert (status["model_digest"], (status["best"] or {}).get("round")) == (outcome.digest, outcome.best_round)

    new, out = federation.data / "arrays" / "ash" / "train.npz", tmp_path / "masks"
    federation.world.ask_site("ash", "predict", "blocks", "--checkpoint", "best_global", "--arrays", new, "--out", out)
    assert {np.asarray(Image.open(path)).shape for path in out.iterdir()} == {(8, 8)}
    assert len(list(out.iterdir())) == ROWS["ash"]


def test_dicom_series_seen_in_pieces_reach_the_same_bits_as_the_lab(federation: Federation, tmp_path: Path) -> None:
    study = study_of(ORGANS, tmp_path)
    status = federation.run(study, "series")
    assert (status["state"], status["incomplete"]) == ("finished", []), status
    assert status["model_digest"] == federation.lab(study, "series").digest


@pytest.mark.parametrize("method", [name for name, row in registry.METHODS.items() if DEPTHS in row.needs])
def test_a_method_for_masks_reaches_the_same_bits_as_the_lab(
    method: str, federation: Federation, tmp_path: Path
) -> None:
    study = study_of(for_masks(method), tmp_path)
    status = federation.run(study, "arrays")
    assert (status["state"], status["incomplete"]) == ("finished", []), status
    outcome = federation.lab(study, "arrays")
    assert (status["model_digest"], (status["best"] or {}).get("round")) == (outcome.digest, outcome.best_round)
    for site in SITES:
        consent = SiteState(federation.world.state / site).consent(study.study.name)
        assert consent is not None
        assert (consent.exposure, consent.personalized) == (
            registry.METHODS[method].exposure,
            registry.METHODS[method].personalized,
        )


@pytest.mark.parametrize("name", OF_TWO)
def test_of_two_extractors_the_shared_one_alone_leaves(name: str, federation: Federation, tmp_path: Path) -> None:
    study = study_of(of_two(name), tmp_path)
    status = federation.run(study, "arrays")
    assert (status["state"], status["incomplete"]) == ("finished", []), status
    assert status["model_digest"] == federation.lab(study, "arrays").digest
    account = federation.world.site_json("ash", "preview", name)
    assert {leaf["name"].partition(".")[0] for leaf in account["leaves"]} == {"shared_extractor"}


def test_no_path_and_no_images_name_is_at_the_coordinator_or_in_a_ledger(federation: Federation) -> None:
    """After the studies. What the coordinator keeps, and what left a site, are searched byte by byte."""
    secrets = [str(federation.data).encode(), b"000.png", b"labels.csv", b"train.npz", b"IM0000", CANARY.encode()]
    places = [federation.world.coordinator_state, *(federation.world.state / site / "ledger" for site in SITES)]
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    assert files
    for path in files:
        content = path.read_bytes()
        assert not [secret for secret in secrets if secret in content], path


def test_every_ledger_of_that_federation_verifies(federation: Federation) -> None:
    for site in SITES:
        federation.world.agents[site].stop()
        verdict = audit.verify(federation.world.state / site / "ledger")[0]
        assert (verdict.consistent, verdict.reason) == (True, ""), verdict
