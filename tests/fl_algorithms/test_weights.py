"""An initial model from a file of weights: `fl-lab init --weights` and `fl-lab run --weights`."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from fl_algorithms.engine.algorithm import algorithm_of
from fl_algorithms.engine.partition import all_tensors, build, describe, initial_model, task_of
from fl_algorithms.lab.cli import app
from fl_algorithms.lab.federation import manifest
from fl_algorithms.lab.weights import weighted
from fl_algorithms.study import ResolvedStudy
from tests.fl_algorithms.image_toys import image_study, packed
from wardround.errors import BadData
from wardround.tensors.files import TensorFile

STUDY = """
[study]
name = "toy"
sites = ["ash", "birch"]
rounds = 1
seed = 5

[task]
name = "images"
size = [8, 8]
channels = 1
label = "shape"
classes = ["round", "oval"]

[model]
name = "resnet10"
width = 0.0625

[algorithm]
name = "fedbn"

[training]
batch_size = 4
local_steps = 1
drop_last = true

[checkpoints]
validation_fraction = 0.25
"""
CONV = "body.conv1.weight"


@pytest.fixture
def study() -> ResolvedStudy:
    return image_study(algorithm="fedbn")


def pretrained(study: ResolvedStudy) -> dict[str, Tensor]:
    """A whole network of the study's form with other numbers, as another study's checkpoint has it."""
    network = build(study, task_of(study), algorithm_of(study), site="")
    generator = torch.Generator().manual_seed(1)
    return {
        key: torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() else tensor.clone()
        for key, tensor in all_tensors(network).items()
    }


def saved(tensors: dict[str, Tensor], path: Path) -> Path:
    safetensors.torch.save_file(tensors, path)
    return path


def lab(*words: str | Path) -> Result:
    result = CliRunner().invoke(app, [*map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_shared_tensors_are_the_files_and_private_ones_are_listed_as_unused(
    study: ResolvedStudy, tmp_path: Path
) -> None:
    whole = pretrained(study)
    found = weighted(study, saved(whole, tmp_path / "w.safetensors"))
    drawn = initial_model(study)
    assert list(found.tensors) == list(drawn)
    assert all(torch.equal(found.tensors[name], whole[name]) for name in drawn)
    assert (found.drawn, found.unused) == ((), tuple(sorted(whole.keys() - drawn.keys())))
    assert any("bn1" in name for name in found.unused)


def test_tensors_that_the_file_lacks_stay_as_drawn(study: ResolvedStudy, tmp_path: Path) -> None:
    body = {name: tensor for name, tensor in pretrained(study).items() if not name.startswith("head.")}
    found = weighted(study, saved(body, tmp_path / "w.safetensors"))
    assert found.drawn == ("head.bias", "head.weight")
    assert torch.equal(found.tensors["head.weight"], initial_model(study)["head.weight"])
    assert torch.equal(found.tensors[CONV], body[CONV])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"fc.weight": torch.zeros(2)}, r"the study's network has no tensor `fc\.weight`"),
        ({CONV: torch.zeros(4, 3, 3, 3)}, rf"`{CONV}` is F32 \[4, 3, 3, 3\], the study's is F32 \[4, 1, 3, 3\]"),
        ({CONV: torch.zeros(4, 1, 3, 3).double()}, rf"`{CONV}` is F64 .*, the study's is F32"),
        ({CONV: torch.full((4, 1, 3, 3), torch.nan)}, rf"36 of the 36 numbers of `{CONV}` are nan or infinite"),
    ],
)
def test_file_that_does_not_fit_is_refused_by_its_tensor(
    changed: dict[str, Tensor], message: str, study: ResolvedStudy, tmp_path: Path
) -> None:
    path = saved({**pretrained(study), **changed}, tmp_path / "w.safetensors")
    with pytest.raises(BadData, match=message):
        weighted(study, path)


def test_file_with_private_tensors_alone_is_refused(study: ResolvedStudy, tmp_path: Path) -> None:
    private = {name: tensor for name, tensor in pretrained(study).items() if name not in initial_model(study)}
    with pytest.raises(BadData, match=f"none of its {len(private)} tensors is one that the study shares"):
        weighted(study, saved(private, tmp_path / "w.safetensors"))


def test_only_safetensors_are_read(study: ResolvedStudy, tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save(pretrained(study), path)
    with pytest.raises(BadData, match="not a safetensors file, or damaged") as refused:
        weighted(study, path)
    assert "pickles are never read" in refused.value.hint
    with pytest.raises(BadData, match="No such file"):
        weighted(study, tmp_path / "absent")


def test_init_writes_what_run_starts_from(study: ResolvedStudy, tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text(STUDY)
    whole = pretrained(study)
    del whole["head.bias"]
    weights, out = saved(whole, tmp_path / "w.safetensors"), tmp_path / "initial.safetensors"
    said = lab("init", file, "--out", out, "--weights", weights).stderr
    assert f"shared tensors are from {weights}" in said
    assert "as drawn, not in the file: head.bias" in said
    assert "not used, stays at each site: body.bn1.weight" in said
    specs = describe(study, "ash").upload
    expected = {**initial_model(study), **{spec.key: whole[spec.key] for spec in specs if spec.key in whole}}
    with TensorFile(out) as written:
        digest = written.manifest().digest()
    assert digest == manifest(expected, specs).digest()
    assert f"digest {digest}" in said

    for seed, site in enumerate(("ash", "birch")):
        packed(tmp_path / "data" / site / "train.npz", seed=seed)
    from_file, drawn = (
        lab("run", file, "--data", tmp_path / "data", *options, "--json").stdout
        for options in (("--weights", weights), ())
    )
    study_digest = next(line.split()[1] for line in said.splitlines() if line.startswith("study "))
    assert study_digest in from_file
    assert study_digest not in drawn
