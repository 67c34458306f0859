"""MONAI's U-Net: divided and still itself, and trained on volumes of two hospitals that write them differently."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from monai.data.meta_tensor import MetaTensor
from monai.inferers.utils import sliding_window_inference
from monai.metrics.hausdorff_distance import compute_hausdorff_distance
from monai.networks.nets.unet import UNet
from monai.transforms.intensity.array import NormalizeIntensity, ScaleIntensityRange, ScaleIntensityRangePercentiles
from monai.transforms.spatial.array import Spacing
from nibabel.orientations import apply_orientation, axcodes2ornt, inv_ornt_aff

from fl_algorithms.engine.algorithm import algorithm_of, compute_logits
from fl_algorithms.engine.partition import build, describe, initial_model, task_of
from fl_algorithms.lab.federation import run_federation
from fl_algorithms.lab.site_data import load_sites
from fl_algorithms.models.monai_unet import monai_unet
from fl_algorithms.settings.images import Window
from fl_algorithms.settings.segmentation import Patches
from fl_algorithms.settings.vision import MonaiUnetSettings
from fl_algorithms.tasks.images.intensity import normalized, windowed
from fl_algorithms.tasks.images.segmentation import hausdorff95
from fl_algorithms.tasks.images.volumes.spacing import respaced, spaced_sides
from fl_algorithms.tasks.images.volumes.windows import in_windows
from tests.fl_algorithms.image_toys import MASKS, image_study
from tests.fl_algorithms.volume_toys import ball
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


# What is written again, so that no process waits for MONAI's import, is MONAI's all the same.


@pytest.mark.parametrize(
    ("spacing", "wanted"), [((3.0, 0.7, 0.7), (1.5, 1.0, 1.0)), ((1.0, 1.0, 2.0), (2.0, 1.0, 0.9))]
)
def test_a_new_spacing_is_monais(spacing: tuple[float, ...], wanted: tuple[float, ...]) -> None:
    volume = np.random.default_rng(1).normal(size=(9, 11, 8)).astype(np.float32)
    grid = np.diag([*spacing, 1.0])
    theirs = Spacing(wanted, mode="bilinear", padding_mode="border", align_corners=True)(
        MetaTensor(torch.from_numpy(volume)[None], affine=torch.from_numpy(grid))
    )
    assert spaced_sides(volume.shape, spacing, wanted) == tuple(theirs.shape[1:])
    ours = respaced(volume, spacing, wanted, tuple(theirs.shape[1:]))
    assert np.allclose(ours, theirs[0].numpy(), atol=1e-4)


@pytest.mark.parametrize("sides", [(13, 9, 8), (21, 17)])
@pytest.mark.parametrize("weight", ["gaussian", "constant"])
def test_windows_over_an_image_are_monais(sides: tuple[int, ...], weight: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(2, *sides, generator=generator)
    size = (8,) * len(sides)
    field = torch.randn(2, *size, generator=generator)  # what a window says depends on where in it

    def answer(x: torch.Tensor) -> torch.Tensor:
        return x * field

    theirs = sliding_window_inference(image[None], size, 4, answer, overlap=0.4, mode=weight)[0]
    ours = in_windows(image, size, Patches(overlap=0.4, weight=weight), answer)
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_windows_and_scales_of_brightness_are_monais() -> None:
    image = np.random.default_rng(1).normal(50, 300, (6, 7, 8, 1)).astype(np.float32)
    image[image < -100] = 0

    def first() -> Any:
        return np.moveaxis(image.copy(), -1, 0)  # MONAI changes some in place

    for ours, theirs in (
        (windowed(image, Window(center=40, width=400)), ScaleIntensityRange(-160, 240, 0, 1, clip=True)(first())),
        (windowed(image, Window(percentiles=(1, 95))), ScaleIntensityRangePercentiles(1, 95, 0, 1, clip=True)(first())),
        (normalized(image, foreground=True), NormalizeIntensity(nonzero=True, channel_wise=True)(first())),
        (normalized(image, foreground=False), NormalizeIntensity(channel_wise=True)(first())),
    ):
        assert np.allclose(np.moveaxis(ours, -1, 0), theirs, atol=1e-5)


@pytest.mark.filterwarnings("ignore:monai.metrics.utils get_mask_edges:FutureWarning")  # what it says of itself
def test_the_distance_of_surfaces_is_monais() -> None:
    random = np.random.default_rng(1)
    one, other = (ball(seed, (12, 10, 8))[1] > 0 for seed in (1, 2))
    other = other & (random.random(other.shape) > 0.1)
    spacing = (2.0, 1.0, 0.5)
    pair = (torch.from_numpy(mask)[None, None].float() for mask in (one, other))
    theirs = compute_hausdorff_distance(*pair, include_background=True, percentile=95, spacing=list(spacing))
    assert hausdorff95(one, other, spacing) == pytest.approx(float(theirs), rel=1e-4)
    assert np.isnan(hausdorff95(one, np.zeros_like(one), spacing))
