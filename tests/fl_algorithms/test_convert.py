"""`fl-lab convert`: checkpoints of PyTorch become safetensors files with a study's names, and no code in them runs."""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from fl_algorithms.engine.partition import initial_model
from fl_algorithms.engine.weights import own_weights
from fl_algorithms.lab import checkpoint, convert
from fl_algorithms.lab.checkpoint import state_in, tensors_of
from fl_algorithms.lab.convert import fitted, renamed, theirs, unwrapped
from fl_algorithms.lab.weights import weighted
from fl_algorithms.resolving import resolve
from fl_algorithms.study import ResolvedStudy
from tests.fl_algorithms.image_toys import IMAGES, image_study, packed
from tests.fl_algorithms.test_weights import STUDY, lab
from wardround.errors import BadData, CannotWrite
from wardround.records.study import StudyFile

SMALL = {"name": "resnet10", "width": 0.0625, "stem": "large"}


def torchvisions(channels: int = 3) -> dict[str, Tensor]:
    """A ResNet of torchvision's names with four blocks, as narrow as the studies here."""
    from torchvision.models.resnet import BasicBlock, ResNet

    torch.manual_seed(7)
    network = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10)
    state = network.state_dict()
    generator = torch.Generator().manual_seed(8)
    narrow = {}
    for name, tensor in state.items():
        shape = tuple(max(1, size // 16) if size >= 64 else size for size in tensor.shape)
        drawn = torch.rand(shape, generator=generator)
        narrow[name] = drawn if tensor.is_floating_point() else tensor
    narrow["conv1.weight"] = torch.rand(4, channels, 7, 7, generator=generator)
    return narrow


def skin(model: dict[str, Any] | None = None, algorithm: str = "fedavg", channels: int = 3) -> ResolvedStudy:
    study = image_study({**IMAGES, "channels": channels}, model or SMALL)
    tables = study.file.model_dump(mode="json") | {"algorithm": {"name": algorithm}}
    return resolve(StudyFile.model_validate(tables))


def saved(loaded: Any, path: Path) -> Path:
    torch.save(loaded, path)
    return path


# What is taken


def test_a_torchvision_checkpoint_fits_a_network_of_its_names() -> None:
    theirs = torchvisions()
    found = fitted(theirs, skin(), gray=False)
    assert torch.equal(found.tensors["body.conv1.weight"], theirs["conv1.weight"])
    assert torch.equal(found.tensors["body.layer4.0.bn2.running_var"], theirs["layer4.0.bn2.running_var"])
    assert found.drawn.keys() == {"head.weight", "head.bias"}
    assert found.drawn["head.weight"] == "not in the checkpoint"
    assert found.unused == ("fc.weight", "fc.bias")


def mobilenet() -> dict[str, Tensor]:
    from torchvision.models import MobileNetV2

    return dict(MobileNetV2(width_mult=0.1, num_classes=10).state_dict())


def shufflenet() -> dict[str, Tensor]:
    from torchvision.models import ShuffleNetV2

    return dict(ShuffleNetV2([4, 8, 4], [2, 12, 24, 46, 102], num_classes=10).state_dict())


def densenet() -> dict[str, Tensor]:
    from torchvision.models import DenseNet

    return dict(DenseNet(growth_rate=4, block_config=(2, 2), num_init_features=8, num_classes=10).state_dict())


def of_timm() -> dict[str, Tensor]:
    import timm

    return dict(timm.create_model("resnet10t", num_classes=10).state_dict())


@pytest.mark.parametrize(
    ("make", "model"),
    [
        (mobilenet, {"name": "mobilenet_v2", "width": 0.1, "stem": "large"}),
        (shufflenet, {"name": "shufflenet_v2", "width": 0.1, "stem": "large"}),
        (densenet, {"name": "densenet", "width": 0.125, "blocks": [2, 2], "stem": "large"}),
        (of_timm, {"name": "timm:resnet10t"}),
    ],
)
def test_each_tensor_of_a_librarys_body_is_found(make: Callable[[], dict[str, Tensor]], model: dict[str, Any]) -> None:
    study = image_study({**IMAGES, "channels": 3, "size": [32, 32]}, model)
    found = fitted(make(), study, gray=False)
    assert found.drawn.keys() == {"head.weight", "head.bias"}
    assert all(name.startswith(("fc.", "classifier.", "features.norm5.")) for name in found.unused), found.unused


def test_both_extractors_of_fenda_begin_with_it_and_each_side_takes_its_own(tmp_path: Path) -> None:
    study = skin({"name": "fenda_images", "shared": SMALL}, "fenda")
    theirs = torchvisions()
    path = tmp_path / "w.safetensors"
    safetensors.torch.save_file(fitted(theirs, study, gray=False).tensors, path)
    start = weighted(study, path)
    assert torch.equal(start.tensors["shared_extractor.conv1.weight"], theirs["conv1.weight"])
    assert start.drawn == ()
    own = own_weights(study.at("ash"), "ash", path)
    assert torch.equal(own.tensors["private_extractor.conv1.weight"], theirs["conv1.weight"])
    assert own.drawn == ("head.bias", "head.weight")
    assert not own.tensors.keys() & initial_model(study).keys()


def test_a_first_layer_for_colors_becomes_one_for_gray_only_where_it_is_asked_for() -> None:
    study, colors = skin(channels=1), torchvisions()
    assert fitted(colors, study, gray=False).drawn["body.conv1.weight"] == (
        "`conv1.weight` is [4, 3, 7, 7], the study's is [4, 1, 7, 7]"
    )
    gray = fitted(colors, study, gray=True).tensors["body.conv1.weight"]
    torch.testing.assert_close(gray[:, 0], colors["conv1.weight"].sum(1))


def test_a_checkpoint_of_another_network_is_refused() -> None:
    with pytest.raises(BadData) as caught:
        fitted({"encoder.weight": torch.zeros(2)}, skin(), gray=False)
    assert caught.value.message == "none of the checkpoint's 1 tensors fits model `resnet10`"
    assert caught.value.hint.startswith("the checkpoint has `encoder.weight`; the study's network has `body.conv1.wei")


def test_numbers_that_are_none_are_refused() -> None:
    theirs = torchvisions() | {"bn1.weight": torch.full((4,), torch.nan)}
    with pytest.raises(BadData, match=r"the checkpoint's tensor for `body\.bn1\.weight` holds nan or infinite numbers"):
        fitted(theirs, skin(), gray=False)


def test_names_in_libraries_are_tried_in_their_order() -> None:
    assert [*theirs("body.0.0.0.weight")] == [
        "0.0.0.weight", "features.0.0.weight", "0.0.weight", "body.0.0.0.weight",
    ]  # fmt: skip
    assert [*theirs("personal/head.weight")] == ["head.weight"]


def test_wrappers_of_training_loops_fall_off_where_all_names_have_them() -> None:
    one = torch.zeros(1)
    assert unwrapped({"module._orig_mod.conv.weight": one}).keys() == {"conv.weight"}
    assert unwrapped({"module.conv.weight": one, "fc.weight": one}).keys() == {"module.conv.weight", "fc.weight"}
    assert renamed({"conv.weight": one}, "body.").tensors.keys() == {"body.conv.weight"}


# What is read


def test_a_networks_state_is_found_in_what_training_loops_save(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "n": torch.tensor(3)}
    for loaded in (state, {"epoch": 3, "state_dict": state}, {"model": {"module": state}}):
        assert tensors_of(saved(loaded, tmp_path / "c.pt")).keys() == {"w", "n"}
    safetensors.torch.save_file(state, tmp_path / "c.safetensors")
    assert tensors_of(tmp_path / "c.safetensors").keys() == {"w", "n"}
    assert state_in({"epoch": 3}) is None
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(tensors_of(tmp_path / "old.pt")["w"], torch.ones(2))


class Evil:
    """What a file could ask its reader to run."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["WARDROUND_TEST_EVIL"],)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_that_asks_for_code_is_refused_by_the_name_of_what_it_asks_for(
    tmp_path: Path, zipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARDROUND_TEST_EVIL", str(tmp_path / "made"))
    path = tmp_path / "evil.pt"
    torch.save({"w": torch.ones(2), "x": Evil()}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(BadData) as caught:
        tensors_of(path)
    assert caught.value.message == (
        f"{path} holds more than tensors: to read it, code of `posix.mkdir` would have to run"
    )
    assert "`torch.save(network.state_dict(), FILE)`" in caught.value.hint
    assert not (tmp_path / "made").exists()


def test_a_whole_network_is_refused_by_its_class(tmp_path: Path) -> None:
    with pytest.raises(BadData, match=r"code of `torch\.nn\.modules\.linear\.Linear` would have to run"):
        tensors_of(saved(nn.Linear(2, 2), tmp_path / "whole.pt"))


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"\x80\x04K\x01.", b"PK\x03\x04 and no more"])
def test_what_is_no_checkpoint_is_said_so(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.pt"
    path.write_bytes(content)
    with pytest.raises(BadData, match=r"not a checkpoint of PyTorch, or damaged|holds no network's state"):
        tensors_of(path)
    with pytest.raises(BadData, match="No such file"):
        tensors_of(tmp_path / "absent.pt")


def test_more_numbers_than_a_file_may_hold_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "MAX_BYTES", 1 << 20)
    one = tmp_path / "one.pt"
    saved({"w": torch.zeros(1).expand(1 << 20)}, one)
    with pytest.raises(BadData, match="its tensors claim more than 1 MiB"):
        tensors_of(one)
    packed = tmp_path / "packed.pt"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(3 << 20))
    with pytest.raises(BadData, match="unpacks to 3 MiB; a checkpoint may have 1"):
        tensors_of(packed)


def test_tied_and_strided_tensors_become_each_its_own(tmp_path: Path) -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    found = tensors_of(saved({"a": whole, "b": whole.t(), "c": whole}, tmp_path / "tied.pt"))
    safetensors.torch.save(found)  # which takes no tensors that share memory
    assert torch.equal(found["b"], whole.t())


# The command


def test_the_command_reads_apart_and_says_what_it_took(tmp_path: Path) -> None:
    file, out = tmp_path / "study.toml", tmp_path / "out.safetensors"
    file.write_text(STUDY.replace("channels = 1", "channels = 3").replace("0.0625", '0.0625\nstem = "large"'))
    state = {f"module.{name}": _halved(tensor) for name, tensor in torchvisions().items()}
    path = saved({"state_dict": state, "epoch": 4}, tmp_path / "c.pth")
    said = lab("convert", path, out, "--study", file).stderr
    assert f"tensors written to {out}" in said
    assert "as drawn: head.bias (not in the checkpoint)" in said
    assert "not used: fc.bias" in said
    assert f"`fl-lab init {file} --out initial.safetensors --weights {out}`" in said
    written = safetensors.torch.load_file(out)
    assert written["body.conv1.weight"].dtype == torch.float32
    assert lab("init", file, "--out", tmp_path / "initial.safetensors", "--weights", out).exit_code == 0
    with pytest.raises(CannotWrite, match="exists already; nothing was written"):
        lab("convert", path, out, "--study", file)


def test_the_lab_begins_what_stays_with_a_file_too(tmp_path: Path) -> None:
    file, weights, name = tmp_path / "study.toml", tmp_path / "w.safetensors", "private_extractor.conv1.weight"
    plain, two = (
        'name = "resnet10"\nwidth = 0.0625',
        'name = "fenda_images"\nshared = { name = "resnet10", width = 0.0625 }',
    )
    text = STUDY.replace(plain, two).replace('"fedbn"', '"fenda"').replace("local_steps = 1", "local_steps = 0")
    file.write_text(text)
    safetensors.torch.save_file({name: torch.full((4, 1, 3, 3), 0.5)}, weights)
    for seed, site in enumerate(("ash", "birch")):
        packed(tmp_path / "data" / site / "train.npz", seed=seed)
    found = []
    for number, options in enumerate(((), ("--private-weights", weights))):
        lab("run", file, "--data", tmp_path / "data", "--out", tmp_path / f"{number}", *options)
        (model,) = (tmp_path / f"{number}").rglob("ash*/latest.safetensors")
        found.append(safetensors.torch.load_file(model)[name])
    assert torch.equal(found[1], torch.full_like(found[1], 0.5))
    assert not torch.equal(*found)


def _halved(tensor: Tensor) -> Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor


def test_the_process_that_reads_is_isolated_and_its_refusal_is_the_commands(tmp_path: Path) -> None:
    with pytest.raises(BadData) as caught:
        convert.read_apart(saved(nn.Linear(2, 2), tmp_path / "whole.pt"))
    assert "code of `torch.nn.modules.linear.Linear` would have to run" in caught.value.message
    assert "`torch.save(network.state_dict(), FILE)`" in caught.value.hint
    assert checkpoint.READ.index("kernel.isolate()") < checkpoint.READ.index("fl_algorithms")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--study", "s.toml", "--prefix", "body."], "--prefix is for a file without a study"),
        (["--gray"], "--gray needs --study, which says where one channel is wanted"),
    ],
)
def test_options_that_exclude_each_other(words: list[str], message: str, tmp_path: Path) -> None:
    from fl_algorithms.lab.cli_convert import run_convert
    from wardround.errors import UsageProblem

    study = Path("s.toml") if "--study" in words else None
    with pytest.raises(UsageProblem, match=message):
        run_convert(
            tmp_path / "c.pt",
            tmp_path / "o",
            study,
            "body." if study else "",
            None,
            "",
            gray=study is None,
            force=False,
        )
