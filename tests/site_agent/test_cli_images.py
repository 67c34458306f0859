"""Images in ``data`` and ``predict``: as a person names them, and as the trainer then finds them."""

import csv
import gzip
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pydicom
import pydicom.data
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner, Result

from fl_algorithms.engine.partition import task_of
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.images.files import mask_at
from fl_algorithms.tasks.images.nifti import packed_mask
from fl_algorithms.tasks.source import Source
from site_agent import handoff
from site_agent.cli import data
from site_agent.state.directory import Offer, Site, SiteState
from site_agent.trainer.data import sources
from site_agent.trainer.requests import Requests
from tests.fl_algorithms.image_toys import IMAGES, MASKS, image_study, labeled, mask_task, masked, packed, write_table
from tests.fl_algorithms.volume_toys import CANARY, ball, write_nifti, write_series
from tests.site_agent.trainer_world import STUDY_DIGEST, Hospital
from tests.site_agent.trainer_world import write_table as write_rows
from wardround.errors import BadData, CannotWrite, NotPermitted, UsageProblem
from wardround.records.trainer import Request, request_from
from wardround.tensors.manifests import Manifest

app = typer.Typer()
app.add_typer(data.data_app, name="data")
app.command("predict")(data.predict)


class ImageHospital(Hospital):
    """``small`` of ``trainer_world`` with images; its site is `ash`."""

    def name(self, *options: str | Path) -> Result:
        return self.give("data", "add", "patients", *options)

    def give(self, *words: str | Path) -> Result:
        result = CliRunner().invoke(app, [*map(str, words), "--state", str(self.state)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    def request(self, number: int) -> dict[str, Any]:
        return self.round(number, site="ash")

    def refused(self, request: dict[str, Any]) -> BadData:
        with pytest.raises(BadData) as refused:
            self.answer(request)
        return refused.value

    def trained(self) -> None:
        for number in (1, 2):
            self.answer(self.request(number))
            self.ask("commit", study="toy", revision=1, round=number)


def hospital_of(folder: Path, study: ResolvedStudy) -> ImageHospital:
    state = folder / "state"
    for name in ("staging", "studies", "offers", "identity"):
        (state / name).mkdir(parents=True)
    SiteState(state).save_offer(Offer("toy", 1, STUDY_DIGEST, "waiting", study.document(), Manifest(())))
    SiteState(state).save_site(Site("ash", "demo", "127.0.0.1:1", "00", "00", 0))
    return ImageHospital(state, folder / "none", folder / "none", study, Requests(state))


@pytest.fixture
def hospital(tmp_path: Path) -> ImageHospital:
    return hospital_of(tmp_path, image_study())


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's answers without a child, where a test is about what is said and not about who says it."""

    def ask(state: Path, request: Request[Any], progress: Any = None) -> Any:
        document = json.loads(json.dumps(request.to_document()))
        return Requests(state).answer(request_from(document), lambda _: None)

    monkeypatch.setattr(handoff, "ask", ask)
    monkeypatch.setattr(handoff, "one_shot", ask)


def options_of(source: Source) -> list[str | Path]:
    return [word for role, path in source.paths.items() for word in (f"--{role.replace('_', '-')}", path)]


MIXTURES = {
    "nothing": ("", "no data is named"),
    "columns alone": ("--label a", "no data is named"),
    "table and images": ("--table t --label a --images i --labels l", "`--table` and `--images` do not go together"),
    "table and arrays": ("--table t --arrays a", "`--table` and `--arrays` do not go together"),
    "arrays and images": ("--arrays a --images i", "`--arrays` and `--images` do not go together"),
    "table without label": ("--table t", "`--table` needs `--label` beside it"),
    "table with masks": ("--table t --label a --masks m", "`--masks` does not go with a table"),
    "table with the arrays' test": ("--table t --label a --test-arrays x", "`--test-arrays` does not go with a table"),
    "arrays with the table's test": ("--arrays a --test t", "`--test` does not go with arrays"),
    "arrays with labels": ("--arrays a --labels l", "`--labels` does not go with arrays"),
    "images alone": ("--images i", "`--images` needs `--labels` or `--masks` beside it"),
    "labels alone": ("--labels l", "`--labels` needs `--images` beside it"),
    "masks alone": ("--masks m", "`--masks` needs `--images` beside it"),
    "test alone": ("--test t", "`--test` needs `--table` beside it"),
    "test images alone": ("--test-images t --test-labels l", "`--test-images` needs `--images` beside it"),
    "test images without labels": ("--images i --labels l --test-images t", "`--test-images` needs `--test-labels`"),
    "test labels without images": ("--images i --labels l --test-labels t", "`--test-labels` needs `--test-images`"),
    "test masks for labels": ("--images i --labels l --test-masks t", "`--test-masks` does not go with images with"),
    "images with a table's test": ("--images i --labels l --test t", "`--test` does not go with images with labels"),
    "masks with a label": ("--images i --masks m --label a", "`--label` does not go with images with masks"),
    "masks with a patient and no table": ("--images i --masks m --patient p", "`--patient` needs `--labels` beside it"),
    "masks half tested": ("--images i --masks m --test-images t", "`--test-images` needs `--test-masks` beside it"),
    "masks tested without patients": (
        "--images i --masks m --labels l --test-images t --test-masks u", "`--test-images` needs `--test-labels`",
    ),
    "network of another form": (
        "--images i --masks m --network Big!", "'Big!' is not a network's label of 1 to 40 of a-z, 0-9 and -",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MIXTURES)
def test_mixture_is_refused_before_anything_is_read(
    case: str, hospital: ImageHospital, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("something was read")

    monkeypatch.setattr(handoff, "ask", never)
    words, message = MIXTURES[case]
    with pytest.raises(UsageProblem) as refused:
        hospital.name(*words.split())
    assert message in refused.value.message
    assert not (hospital.state / "data.toml").exists()


def test_mixture_in_data_toml_is_refused_by_its_keys(hospital: ImageHospital) -> None:
    digest = f'digest = "{"0" * 64}"'
    (hospital.state / "data.toml").write_text(f'[x]\nimages = "/i"\ntest_images = "/t"\nlabels = "/l"\n{digest}\n')
    with pytest.raises(BadData, match=r"data\.toml: \[x\]: `test_images` needs `test_labels` beside it"):
        sources.sources(hospital.state)


def test_images_are_named_in_an_isolated_child_and_pinned_as_the_task_pins_them(
    hospital: ImageHospital, tmp_path: Path
) -> None:
    source = labeled(tmp_path / "train", who=[f"p{place // 2}" for place in range(12)])
    tested = labeled(tmp_path / "test", 4, seed=2, who=list("abcd"))
    options = ["--test-images", tested.path("images"), "--test-labels", tested.path("labels")]
    result = hospital.name(*options_of(source), *options, "--patient", "who", "--network", "small")
    assert "Data `patients`: 12 images of 6 patients, and 4 images held out for scores" in result.stderr
    named = sources.sources(hospital.state)["patients"]
    assert (named.network, named.patient, named.label) == ("small", "who", "")
    loaded = task_of(hospital.study).load(named.source, site="ash", seed=5, validation_fraction=0.2)
    assert named.digest == loaded.digest == sources.digest_now(named)
    listed = json.loads(hospital.give("data", "list", "--json").stdout)["data"]
    assert listed == [{"name": "patients", **named.entry()}]
    assert f"patients: images {tmp_path / 'train' / 'images'}, labels " in hospital.give("data", "list").stdout


def test_own_column_names_are_another_digest_and_are_used(
    hospital: ImageHospital, tmp_path: Path, in_process: None
) -> None:
    source = labeled(tmp_path)
    table = source.path("labels")
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    own = {"file": [row["image"] for row in rows], "finding": [row["shape"] for row in rows]}
    write_table(table, own)
    options = ["--image", "file", "--label", "finding"]
    assert "12 images\n" in hospital.name(*options_of(source), *options).stderr
    found = json.loads(hospital.give("data", "check", "patients", "--study", "toy", "--json").stdout)
    assert (found["rows"], found["gives"], found["classes"]) == (12, "images", {"round": 6, "oval": 6})
    assert found["digest"] == sources.sources(hospital.state)["patients"].digest
    plain = sources.DataSource(images=str(source.path("images")), labels=str(table), digest="0" * 64)
    assert sources.digest_now(plain) != found["digest"]


def test_arrays_are_named(hospital: ImageHospital, tmp_path: Path, in_process: None) -> None:
    train, test = packed(tmp_path / "train.npz", who=np.arange(12) // 3), packed(tmp_path / "test.npz", 5)
    said = hospital.name("--arrays", train, "--test-arrays", test, "--label", "shape").stderr
    assert "Data `patients`: 12 images, and 5 images held out for scores" in said
    shown = hospital.give("data", "check", "patients", "--study", "toy").stdout
    assert "12 images: 10 to train, 2 to validate; 5 held out for scores" in shown
    assert "classes: round: 6, oval: 6" in shown
    assert "12 images of 4 patients" in hospital.name("--arrays", train, "--patient", "who", "--replace").stderr


def test_masks_are_named_and_counted_by_image(tmp_path: Path, in_process: None) -> None:
    hospital = hospital_of(tmp_path, image_study(MASKS))
    assert "Data `patients`: 12 images\n" in hospital.name(*options_of(masked(tmp_path / "train"))).stderr
    shown = hospital.give("data", "check", "patients", "--study", "toy").stdout
    assert "masks with: background: 12, foreground: 12" in shown


def drop_row(source: Source) -> None:
    table = source.path("labels")
    table.write_text("\n".join(table.read_text().splitlines()[:-1]) + "\n")


def odd_file(source: Source) -> None:
    (source.path("images") / "notes.txt").write_text("Ines")


def no_images(source: Source) -> None:
    for path in source.path("images").iterdir():
        path.unlink()


FAULTS: dict[str, tuple[Callable[[Source], None], tuple[str, ...], str]] = {
    "fewer rows": (drop_row, (), r"labels\.csv: 11 rows, .*images has 12 images"),
    "a row for each name": (drop_row, ("--image", "image"), r"images: 011\.png has no row in .*labels\.csv"),
    "another file": (odd_file, (), r"images: notes\.txt: no image that a study reads"),
    "an empty folder": (no_images, (), r"images: no files in it"),
    "no such label": (lambda _: None, ("--label", "grade"), r"labels\.csv: no column `grade`"),
    "no such patient": (lambda _: None, ("--patient", "who"), r"labels\.csv: no column `who`"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faulty_folder_is_refused_with_file_and_column(
    case: str, hospital: ImageHospital, tmp_path: Path, in_process: None
) -> None:
    spoil, options, message = FAULTS[case]
    source = labeled(tmp_path)
    spoil(source)
    with pytest.raises(BadData, match=message) as refused:
        hospital.name(*options_of(source), *options)
    assert "Ines" not in refused.value.message + refused.value.hint


@pytest.mark.parametrize(
    ("name", "arrays", "options", "message"),
    [
        ("a.npz", {"shape": np.zeros(3)}, ("--label", "shape"), r"`images` is \[12, 8, 8\], but `shape` is \[3\]"),
        ("a.npz", {}, ("--label", "grade"), r"a\.npz: no array `grade`"),
        ("a.npz", {"who": np.array([None] * 12)}, ("--patient", "who"), "Python objects"),
        ("a.dat", {}, (), r"a\.dat: not a \.npz file by its name"),
    ],
)
def test_faulty_arrays_are_refused(
    name: str, arrays: dict[str, Any], options: tuple[str, ...], message: str,
    hospital: ImageHospital, tmp_path: Path, in_process: None,
) -> None:  # fmt: skip
    path = packed(tmp_path / "a.npz", **arrays).rename(tmp_path / name)
    with pytest.raises(BadData, match=message):
        hospital.name("--arrays", path, *options)


def test_image_without_a_mask_is_refused_when_it_is_named(
    hospital: ImageHospital, tmp_path: Path, in_process: None
) -> None:
    source = masked(tmp_path)
    (source.path("masks") / "003.png").unlink()
    with pytest.raises(BadData, match=r"images: 003\.png has no mask in .*masks"):
        hospital.name(*options_of(source))


def grey(path: Path, value: int = 7) -> None:
    Image.fromarray(np.full((8, 8), value, dtype=np.uint8)).save(path)


def test_image_changed_added_or_gone_since_approval_declines_the_round(
    hospital: ImageHospital, tmp_path: Path, in_process: None
) -> None:
    source = labeled(tmp_path)
    hospital.name(*options_of(source))
    hospital.answer(hospital.request(1))
    request, image = hospital.request(1), source.path("images") / "000.png"
    before = image.read_bytes()
    grey(image)
    refused = hospital.refused(request)
    assert (refused.code, str(image) in refused.message) == ("DECLINED_DATA_CHANGED", False)
    assert refused.message.startswith("data `patients` is not what was approved for study `toy`")
    image.write_bytes(before)
    grey(image.with_name("more.png"))
    assert hospital.refused(request).code == "DECLINED_DATA_CHANGED"
    image.with_name("more.png").unlink()
    assert hospital.answer(request)["num_examples"] == 10
    image.unlink()
    assert hospital.refused(request).code == "DECLINED_DATA_CHANGED"


def test_folder_that_is_gone_declines_as_invalid(hospital: ImageHospital, tmp_path: Path, in_process: None) -> None:
    source = labeled(tmp_path)
    hospital.name(*options_of(source))
    source.path("images").rename(tmp_path / "elsewhere")
    refused = hospital.refused(hospital.request(1))
    assert refused.code == "DECLINED_DATA_INVALID"
    assert refused.message == f"{source.path('images')}: No such file or directory"


def test_table_for_a_study_of_images_is_declined(hospital: ImageHospital, tmp_path: Path, in_process: None) -> None:
    hospital.name("--table", write_rows(tmp_path / "rows.csv", 20, 1), "--label", "ill")
    refused = hospital.refused(hospital.request(1))
    assert (refused.code, refused.message) == ("DECLINED_DATA_INVALID", "this site's data has no images")


def test_predictions_of_images_have_their_names(hospital: ImageHospital, tmp_path: Path) -> None:
    source = labeled(tmp_path)
    hospital.name(*options_of(source))
    hospital.trained()
    out = tmp_path / "out.csv"
    words = ["predict", "toy", "--checkpoint", "latest", "--images", source.path("images"), "--out", out]
    said = hospital.give(*words).stderr.replace("\n", " ")
    assert "12 predictions written to" in said
    threshold = re.search(r"`oval` is predicted from a probability of ([0-9.]+) on, chosen on", said)
    assert threshold is not None
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["image"] for row in rows] == [f"{place:03}.png" for place in range(12)]
    for row in rows:
        likely = float(row["probability_oval"])
        assert float(row["probability_round"]) + likely == pytest.approx(1, abs=2e-6)
        assert row["predicted"] == ("oval" if likely >= float(threshold[1]) else "round")


def test_predictions_go_nowhere_but_where_they_may(hospital: ImageHospital, tmp_path: Path, in_process: None) -> None:
    source, arrays = labeled(tmp_path), packed(tmp_path / "new.npz", 3)
    images = source.path("images")
    hospital.name(*options_of(source))
    hospital.trained()

    def said(*words: str | Path) -> str:
        with pytest.raises(UsageProblem) as refused:
            hospital.give("predict", "toy", "--checkpoint", "latest", *words, "--force")
        return refused.value.message

    out = tmp_path / "out.csv"
    assert said("--out", out) == "one of `--table`, `--images`, `--arrays` and `--files` is needed, found none"
    assert said("--images", images, "--arrays", arrays, "--out", out).endswith("found `--images` and `--arrays`")
    assert said("--table", images, "--out", out) == (
        "study `toy` predicts from `--images` or `--arrays`, found `--table`"
    )
    assert said("--images", arrays, "--out", out).endswith("new.npz: not a folder")
    assert said("--arrays", images, "--out", out).endswith("images: not a .npz file by its name")
    for words in (("--images", images, "--out", images / "out.csv"), ("--arrays", arrays, "--out", arrays)):
        with pytest.raises((NotPermitted, UsageProblem), match=r"is never written over|is the file of images itself"):
            hospital.give("predict", "toy", "--checkpoint", "latest", *words, "--force")
    hospital.give("predict", "toy", "--checkpoint", "latest", "--arrays", arrays, "--out", out)
    assert [line.split(",")[0] for line in out.read_text().splitlines()] == ["image", "0", "1", "2"]


def test_masks_are_predicted_at_their_images_size_and_never_written_over(tmp_path: Path, in_process: None) -> None:
    hospital = hospital_of(tmp_path, image_study({**MASKS, "values": [0, 300]}))
    images = np.random.default_rng(1).integers(0, 255, (12, 8, 8)).astype(np.uint8)
    train = packed(tmp_path / "train.npz", images=images, masks=np.where(images > 128, 300, 0).astype(np.uint16))
    hospital.name("--arrays", train)
    hospital.trained()
    new = tmp_path / "new"
    (new / "ward").mkdir(parents=True)
    Image.fromarray(np.kron(images[0], np.ones((2, 3), dtype=np.uint8))).save(new / "ward" / "a.tiff")
    Image.fromarray(images[0]).save(new / "b.png")
    out = tmp_path / "masks"
    words = ["predict", "toy", "--checkpoint", "latest", "--images", new, "--out", out]
    assert "2 predictions written to" in hospital.give(*words).stderr
    large, small = (np.asarray(Image.open(out / name)) for name in ("ward/a.png", "b.png"))
    assert (large.shape, small.shape) == ((16, 24), (8, 8))
    assert (small.dtype, set(np.unique(small)) <= {0, 300}) == (np.uint16, True)
    with pytest.raises(CannotWrite, match="masks exists already"):
        hospital.give(*words)
    Image.fromarray(images[1]).save(new / "b.tiff")
    with pytest.raises(BadData, match="b: two images have this name but for the ending"):
        hospital.give(*words[:-1], tmp_path / "again")


def test_masks_of_volumes_are_arrays(tmp_path: Path, in_process: None) -> None:
    hospital = hospital_of(tmp_path, image_study({**MASKS, "size": [4, 8, 8], "fit": "crop"}))
    volumes = np.random.default_rng(1).integers(0, 255, (12, 6, 8, 8)).astype(np.uint8)
    train = packed(tmp_path / "train.npz", images=volumes, masks=(volumes > 128).astype(np.uint8))
    hospital.name("--arrays", train)
    hospital.trained()
    out = tmp_path / "masks"
    hospital.give("predict", "toy", "--checkpoint", "latest", "--arrays", train, "--out", out)
    assert len(list(out.iterdir())) == 12
    with np.load(out / "11.npz") as file:
        mask = file["mask"]
    assert (mask.shape, mask.dtype, mask[[0, 5]].any()) == ((6, 8, 8), np.uint8, False)


def test_masks_of_nifti_volumes_lie_where_their_volumes_do(tmp_path: Path, in_process: None) -> None:
    task = {**MASKS, "size": [4, 8, 8], "fit": "crop", "values": [0, 300]}
    hospital = hospital_of(tmp_path, image_study(task, {"name": "monai_unet", "widths": [4, 8]}))
    places = np.array([[0, 0, 2.0, 7], [-1, 0, 0, 5], [0, 3, 0, 0], [0, 0, 0, 1]])  # back, up, right
    volumes = np.random.default_rng(1).normal(300, 100, (12, 8, 6, 8)).astype(np.float32)
    masks = np.where(volumes > 300, 300, 0).astype(np.uint16)
    for part, arrays in (("images", volumes), ("masks", masks)):
        (tmp_path / part).mkdir()
        for place, array in enumerate(arrays):
            nibabel.save(nibabel.Nifti1Image(array, places), tmp_path / part / f"{place}.nii.gz")
    hospital.name("--images", tmp_path / "images", "--masks", tmp_path / "masks")
    hospital.trained()
    out = tmp_path / "predicted"
    words = ["predict", "toy", "--checkpoint", "latest", "--images", tmp_path / "images", "--out", out]
    assert "12 predictions written to" in hospital.give(*words).stderr
    assert sorted(path.name for path in out.iterdir()) == sorted(f"{place}.nii.gz" for place in range(12))
    given, found = (nibabel.load(tmp_path / folder / "11.nii.gz") for folder in ("images", "predicted"))
    assert np.allclose(found.affine, given.affine)
    mask = np.asarray(found.dataobj)
    assert (mask.shape, mask.dtype, set(np.unique(mask)) <= {0, 300}) == (given.shape, np.uint16, True)
    assert not mask[:, [0, 5]].any()  # the study sees the middle 4 of 6, from the feet to the head


VOLUMES = {
    **MASKS, "size": [8, 8, 8], "fit": "patches", "spacing": [2.0, 1.5, 1.5], "normalize": "foreground",
    "window": {"center": 100, "width": 400}, "patches": {"per_image": 2},
}  # fmt: skip


def series_with_masks(folder: Path, n: int = 6) -> dict[str, Any]:
    """Their affines, places (column, row, slice) to mm."""
    affine = np.array([[-1.0, 0, 0, 7], [0, -1, 0, -5], [0, 0, 2, 0], [0, 0, 0, 1]])
    for place in range(n):
        volume, mask = ball(place, (9 + place % 2, 12, 16))
        write_series(folder / "images" / f"p{place}", volume, (2.0, 1.0, 1.0))
        write_nifti(folder / "masks" / f"p{place}.nii.gz", mask, affine=affine)
    return {f"p{place}": ((16, 12, 9 + place % 2), affine) for place in range(n)}


def test_series_are_counted_checked_trained_on_and_their_masks_come_back_where_they_lie(
    tmp_path: Path, in_process: None
) -> None:
    hospital, lies = hospital_of(tmp_path, image_study(VOLUMES)), series_with_masks(tmp_path)
    told = hospital.name("--images", tmp_path / "images", "--masks", tmp_path / "masks").stderr
    assert "Data `patients`: 6 images\n" in told
    assert "  kind: DICOM series (6)\n  modality: CT (6)\n" in told
    assert "  size: 9 x 12 x 16 (3), 10 x 12 x 16 (3)\n  spacing in mm: 2 x 1 x 1 (6)\n" in told
    checked = hospital.give("data", "check", "patients", "--study", "toy")
    assert "6 images: 5 to train, 1 to validate" in checked.stdout
    assert "masks with: background: 6, foreground: 6" in checked.stdout
    hospital.trained()
    out = tmp_path / "predicted"
    words = ["predict", "toy", "--checkpoint", "latest", "--images", tmp_path / "images", "--out", out]
    assert "6 predictions written to" in hospital.give(*words).stderr
    for name, (shape, affine) in lies.items():
        found = nibabel.load(out / f"{name}.nii.gz")
        assert found.shape == shape
        assert np.allclose(found.affine, affine)
        assert set(np.unique(np.asarray(found.dataobj))) <= {0, 1}
    assert CANARY.encode() in (tmp_path / "images" / "p0" / "IM0000").read_bytes()
    assert CANARY not in told + checked.output


def test_a_perfect_network_gives_the_mask_that_was_drawn_back_at_the_images_own_spacing(tmp_path: Path) -> None:
    series_with_masks(tmp_path, 2)
    task = mask_task(**{key: value for key, value in VOLUMES.items() if key not in ("name", "channels", "normalize")})
    rows, names = task.read_new(tmp_path / "images", {"shape": [1, 8, 8, 8], "mean": ["0.0"], "std": ["1.0"]})
    for name, (mask, origin) in zip(names, task.masks(rows, lambda x: x - 0.5), strict=True):  # 100 HU is in the middle
        drawn = nibabel.load(tmp_path / "masks" / f"{name}.nii.gz")
        found = nibabel.Nifti1Image.from_bytes(gzip.decompress(packed_mask(mask, origin.places, origin.affine)))
        ours, theirs = np.asarray(found.dataobj), np.asarray(drawn.dataobj)
        assert 2 * (ours & theirs).sum() / (ours.sum() + theirs.sum()) > 0.9


def test_a_series_with_a_gap_is_refused_when_it_is_named(tmp_path: Path, in_process: None) -> None:
    series_with_masks(tmp_path)
    hospital = hospital_of(tmp_path, image_study(VOLUMES))
    folder = tmp_path / "images" / "p0"
    next(path for path in folder.iterdir() if pydicom.dcmread(path).ImagePositionPatient[2] == 4).unlink()
    with pytest.raises(BadData, match=f"^{folder}: 4 mm between .* elsewhere 2 mm: 1 slice missing"):
        hospital.name("--images", tmp_path / "images", "--masks", tmp_path / "masks")


def test_slices_with_a_row_each_are_so_many_images(tmp_path: Path, in_process: None) -> None:
    write_series(tmp_path / "images" / "p0", ball(1, (4, 8, 8))[0])
    names = [f"p0/IM{place:04}" for place in range(4)]
    table = write_table(tmp_path / "labels.csv", {"image": names, "shape": ["round", "oval"] * 2})
    told = hospital_of(tmp_path, image_study()).name("--images", tmp_path / "images", "--labels", table).stderr
    assert "Data `patients`: 4 images\n  kind: DICOM (4)\n  modality: CT (4)\n  size: 8 x 8 (4)\n" in told


@pytest.mark.chaos
def test_patient_in_a_dicom_header_is_told_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    canary, hospital = "Canary^Yellow", hospital_of(tmp_path, image_study({**IMAGES, "fit": "resize"}))
    folder, names = tmp_path / "images", [f"{place:02}.dcm" for place in range(12)]
    folder.mkdir()
    header = pydicom.dcmread(pydicom.data.get_testdata_file("MR_small.dcm", download=False))
    stored = header.pixel_array
    for place, name in enumerate(names):
        header.PatientName = header.PatientID = header.StudyDescription = canary
        header.PixelData = np.roll(stored, place, axis=place % 2).tobytes()
        header.save_as(folder / name)
        assert canary.encode() in (folder / name).read_bytes()
    table = write_table(tmp_path / "labels.csv", {"image": names, "shape": ["round", "oval"] * 6})
    said = hospital.name("--images", folder, "--labels", table)
    assert "Data `patients`: 12 images\n" in said.stderr
    checked = hospital.give("data", "check", "patients", "--study", "toy")
    assert "classes: round: 6, oval: 6" in checked.stdout
    answers = []
    for number in (1, 2):
        answers.append(hospital.answer(hospital.request(number)))
        hospital.ask("commit", study="toy", revision=1, round=number)
    out = tmp_path / "out.csv"
    told = hospital.give("predict", "toy", "--checkpoint", "latest", "--images", folder, "--out", out)
    (folder / "00.dcm").write_bytes((folder / "00.dcm").read_bytes()[:5000])
    refused = hospital.refused(hospital.request(3))
    with pytest.raises(BadData) as broken:
        hospital.give("data", "check", "patients", "--study", "toy")
    texts = [repr(answers), refused.message, broken.value.message, broken.value.hint, caplog.text, out.read_text()]
    for result in (said, checked, told):
        texts += [result.stdout, result.stderr]
    assert not any("Canary" in text for text in texts)
    written = [path for path in hospital.state.rglob("*") if path.is_file()]
    assert any(path.suffix == ".safetensors" for path in written)
    assert not any(b"Canary" in path.read_bytes() for path in written)


def test_mask_goes_back_to_where_the_study_cut_it_from() -> None:
    mask = np.array([[1, 2], [3, 1]], dtype=np.uint8)
    resized = mask_at(mask, (4, 2), "resize")
    assert resized.tolist() == [[1, 2], [1, 2], [3, 1], [3, 1]]
    assert mask_at(mask, (4, 2), "crop").tolist() == [[0, 0], [1, 2], [3, 1], [0, 0]]
    assert mask_at(mask, (2, 2), "exact") is mask
    volume = mask_at(np.ones((1, 2, 2), dtype=np.uint8), (3, 2, 2), "crop")
    assert volume[:, 0, 0].tolist() == [0, 1, 0]


def test_commands_need_neither_torch_nor_numpy_nor_pillow() -> None:
    line = "import sys, site_agent.cli.data; print({'torch', 'numpy', 'PIL'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True).stdout == "set()\n"
