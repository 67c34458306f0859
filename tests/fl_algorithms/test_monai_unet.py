"""MONAI's U-Net: divided and still itself, and trained on volumes of two hospitals that write them differently."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from monai.networks.nets.unet import UNet
from nibabel.orientations import apply_orientation, axcodes2ornt, inv_ornt_aff

from fl_algorithms.engine.algorithm import algorithm_of, compute_logits
from fl_algorithms.engine.partition import build, describe, initial_model, task_of
from fl_algorithms.lab.federation import load_sites, run_federation
from fl_algorithms.models.monai_unet import monai_unet
from fl_algorithms.settings.vision import MonaiUnetSettings
from tests.fl_algorithms.image_toys import MASKS, image_study
from wardround.errors import BadData, NeedsPerson

SIDE = 16
VOLUMES = {**MASKS, "size": [SIDE] * 3, "fit": "crop"}
NETWORK = {"name": "monai_unet", "widths": [4, 8, 16], "residual_units": 1}


@pytest.mark.parametrize("units", [0, 2])
@pytest.mark.parametrize("norm", ["batch", "instance", "group", "none"])
@pytest.mark.parametrize(("shape", "outputs"), [((1, 8, 8, 16), 1), ((3, 16, 8), 4)])
def test_the_divided_network_is_monais(norm: Any, units: int, shape: tuple[int, ...], outputs: int) -> None:
    groups = 1 if units and outputs == 1 else 4  # what divides 4, 8 and 12 and, with a norm on the logits, those
    torch.manual_seed(7)
    theirs = UNet(
        len(shape) - 1, shape[0], outputs, (4, 8, 12), (2, 2), num_res_units=units, dropout=0.1,
        norm={"group": ("group", {"num_groups": groups}), "none": None}.get(norm, norm),
    )  # fmt: skip
    torch.manual_seed(7)
    settings = MonaiUnetSettings(widths=(4, 8, 12), norm=norm, residual_units=units, dropout=0.1)
    ours = monai_unet(settings, shape, outputs)
    x = torch.randn(2, *shape)
    assert torch.equal(ours.eval()(x), theirs.eval()(x))
    assert [tensor.shape for tensor in ours.parameters()] == [tensor.shape for tensor in theirs.parameters()]
    assert {name.split(".")[0] for name in ours.state_dict()} == {"body", "head"}


@pytest.mark.parametrize("algorithm", ["fedper", "lgfedavg", "fedbabu", "fedbn", "moon", "mhpflgb"])
def test_methods_that_divide_a_network_divide_this_one(tmp_path: Path, algorithm: str) -> None:
    settings = {"init_private": "common"} if algorithm == "fedbabu" else {}
    study = image_study({**VOLUMES, "size": [8, 8, 8]}, NETWORK, algorithm, local_steps=1, **settings)
    task = task_of(study)
    for seed, site in enumerate(("ash", "birch")):
        (tmp_path / site).mkdir()
        images = np.random.default_rng(seed).normal(size=(8, 8, 8, 8)).astype(np.float32)
        np.savez(tmp_path / site / "train.npz", images=images, masks=(images > 0.5).astype(np.uint8))
    outcome = run_federation(study, task, load_sites(study, task, tmp_path))
    assert outcome.digest != outcome.initial_digest
    described = describe(study, "ash")
    upload, private = ([spec.name for spec in part] for part in (described.upload, described.private))
    if algorithm in ("fedper", "fedbabu", "lgfedavg"):
        part = "head." if algorithm == "lgfedavg" else "body."
        assert all(name.startswith(part) for name in upload)
        assert any(not name.startswith(part) for name in private)
    if algorithm == "fedbn":
        assert not any(".N." in name for name in upload)  # MONAI's name of a norm
        assert any(".N.weight" in name for name in private)


def test_a_depth_at_which_an_instance_norm_sees_one_voxel_is_refused() -> None:
    with pytest.raises(BadData) as caught:
        image_study({**VOLUMES, "size": [4, 4, 4]}, {**NETWORK, "norm": "instance"})
    assert caught.value.message == (
        "study.toml: model `monai_unet` with 3 `widths` and instance norms needs a side of more than 4, task "
        "`segmentation` gives 1 x 4 x 4 x 4"
    )
    study = image_study({**VOLUMES, "size": [4, 4, 8]}, {**NETWORK, "norm": "instance"})
    network = build(study, task_of(study), algorithm_of(study), "")["model"].train()
    assert network(torch.randn(1, 1, 4, 4, 8)).shape == (1, 1, 4, 4, 8)


def test_the_seed_alone_says_how_it_begins() -> None:
    study = image_study(VOLUMES, NETWORK)
    first = initial_model(study)
    torch.manual_seed(99)
    second = initial_model(study)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_without_its_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    study = image_study(VOLUMES, NETWORK)
    monkeypatch.setitem(sys.modules, "monai.networks.nets.unet", None)
    with pytest.raises(NeedsPerson) as caught:
        describe(study, "ash")
    assert caught.value.message == "model `monai_unet` in [model]: MONAI is not installed"
    assert caught.value.hint == "`pip install 'wardround[monai]'`"


def test_no_extra_is_imported_before_it_is_used() -> None:
    modules = "fl_algorithms.study, fl_algorithms.models.monai_unet, fl_algorithms.tasks.images.segmentation"
    line = f"import sys, {modules}; print({{'monai', 'nibabel', 'pydicom'}} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True).stdout == "set()\n"


def write_head(folder: Path, prefix: str, place: int, seed: int, axes: str, kind: Any) -> None:
    """A round head with two cores, left and right, that differ in their side alone; the mask holds the left one."""
    random = np.random.default_rng(seed)
    x, y, z = np.indices((SIDE,) * 3) - random.uniform(7, 8, 3).reshape(3, 1, 1, 1)
    left, right = (((x - side) ** 2 + y**2 + z**2 < 9) for side in (-3.5, 3.5))
    voxels = 100 * (x**2 + y**2 + z**2 < 49) + 60 * (left | right) + random.normal(0, 8, left.shape)
    way = axcodes2ornt(axes)
    for part, array in (("images", np.rint(voxels).astype(kind)), ("masks", left.astype(np.uint8))):
        (folder / f"{prefix}{part}").mkdir(parents=True, exist_ok=True)
        written = nibabel.Nifti1Image(apply_orientation(array, way), inv_ornt_aff(way, array.shape))
        nibabel.save(written, folder / f"{prefix}{part}" / f"{place:02}.nii.gz")


def test_two_hospitals_that_write_their_volumes_differently_learn_together(tmp_path: Path) -> None:
    for seed, site, axes, kind in ((100, "ash", "LPS", np.int16), (200, "birch", "PIR", np.float32)):
        for place in range(12):
            write_head(tmp_path / site, "", place, seed + place, axes, kind)
        for place in range(4):
            write_head(tmp_path / site, "test_", place, seed + 50 + place, axes, kind)
    training = {"optimizer": "adamw", "learning_rate": 0.02, "local_steps": 25}
    study = image_study({**VOLUMES, "mean": [50.0], "std": [50.0]}, NETWORK, **training)
    task, algorithm = task_of(study), algorithm_of(study)
    sites = load_sites(study, task, tmp_path)
    outcome = run_federation(study, task, sites)
    networks = build(study, task, algorithm, "")
    for site in ("ash", "birch"):
        test, trained = sites[site].test, outcome.checkpoints[site]["latest"].scores["dice"]
        assert test is not None
        drawn = task.metrics(compute_logits(algorithm, networks, test.x), test.y)["dice"]
        assert drawn is not None
        assert trained is not None
        assert drawn < 0.3 < 0.8 < trained
