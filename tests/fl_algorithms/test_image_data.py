"""The makers of hospitals from public images: made-up sets of their form, and the real ones where they are."""

from pathlib import Path

import numpy as np
import pytest

from fl_algorithms.lab.image_data import nuclei, skin, wbc
from wardround.errors import BadData


def arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def made_up_skin(folder: Path, size: int = 32) -> None:
    n = 40
    np.savez(
        folder / f"skin_{size}.npz",
        images=np.random.default_rng(1).integers(0, 255, (n, size, size, 3)).astype(np.uint8),
        mel=np.arange(n, dtype=np.int8) % 2,
        dx=np.array([-1, 0, 1, 2] * 10, dtype=np.int8),
        site=np.repeat(np.arange(2, dtype=np.int8), 20),
        is_test_lesion=np.arange(n) // 2 % 5 == 0,
        ids=np.array([f"i{place}" for place in range(n)]),
        lesion=np.array([f"l{place // 2}" if place < 30 else "" for place in range(n)]),
        site_names=np.array(["first_place", "second", "absent"]),
        dx_names=np.array(["nv", "mel", "bkl"]),
    )


def test_skin_is_divided_by_source_and_lesion(tmp_path: Path) -> None:
    made_up_skin(tmp_path)
    assert skin(tmp_path, tmp_path / "out") == [("first-place", 16, 4), ("second", 16, 4)]
    train, test = (arrays(tmp_path / "out" / "first-place" / f"{part}.npz") for part in ("train", "test"))
    assert not set(train["patient"]) & set(test["patient"])
    assert set(train["melanoma"]) == {"no", "yes"}
    assert set(train["diagnosis"]) == {"unknown", "nv", "mel", "bkl"}
    second = arrays(tmp_path / "out" / "second" / "train.npz")
    assert "" not in second["patient"]


def test_the_same_bytes_come_out_again(tmp_path: Path) -> None:
    made_up_skin(tmp_path)
    for name in ("a", "b"):
        skin(tmp_path, tmp_path / name)
    first, second = (sorted((tmp_path / name).rglob("*.npz")) for name in ("a", "b"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert len(first) == 4


def test_blood_cells_are_stratified_and_basophils_left_out(tmp_path: Path) -> None:
    labels = np.array([0] * 20 + [1] * 10 + [4] * 3, dtype=np.int8)
    n = len(labels)
    np.savez(
        tmp_path / "wbc_128.npz",
        images=np.zeros((n, 128, 128, 3), np.uint8),
        masks=np.zeros((n, 128, 128), np.uint8),
        labels=labels,
        site=np.zeros(n, np.int8),
        ids=np.array([f"1/{place:03}" for place in range(n)]),
        site_names=np.array(["tecom", "cellavision"]),
        label_names=np.array(["neutrophil", "lymphocyte", "monocyte", "eosinophil", "basophil"]),
    )
    assert wbc(tmp_path, tmp_path / "out") == [("tecom", 21, 9)]  # 30 % of 20 and of 10
    test = arrays(tmp_path / "out" / "tecom" / "test.npz")
    assert sorted(test["label"]) == ["lymphocyte"] * 3 + ["neutrophil"] * 6


def test_a_missing_or_foreign_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match=r"skin_64\.npz does not exist"):
        skin(tmp_path, tmp_path / "out", 64)
    np.savez(tmp_path / "nuclei_128.npz", images=np.zeros(3))
    with pytest.raises(BadData, match="no array `masks`"):
        nuclei(tmp_path, tmp_path / "out")


@pytest.mark.data
def test_the_published_skin_images_make_five_hospitals(tmp_path: Path, hospital_data: Path) -> None:
    made = skin(hospital_data / "skin", tmp_path)
    assert [site for site, _, _ in made] == ["rosendahl", "vidir-modern", "vidir-molemax", "vienna-dias", "isic2017"]
    assert sum(train + test for _, train, test in made) == 8304
    for site, _, _ in made:
        train, test = (arrays(tmp_path / site / f"{part}.npz")["patient"] for part in ("train", "test"))
        assert not set(train) & set(test)


@pytest.mark.data
def test_the_published_slides_are_divided_by_slide(tmp_path: Path, hospital_data: Path) -> None:
    organs = nuclei(hospital_data / "nuclei", tmp_path / "organs")
    assert organs == [(site, 64, 32) for site in ("breast", "kidney", "liver", "prostate")]
    hospitals = nuclei(hospital_data / "nuclei", tmp_path / "hospitals", "hospital")
    assert sum(train + test for _, train, test in hospitals) == 480
    train, test = (arrays(tmp_path / "hospitals" / "g9" / f"{part}.npz")["patient"] for part in ("train", "test"))
    assert not set(train) & set(test)


@pytest.mark.data
def test_the_published_blood_cells_make_two_laboratories(tmp_path: Path, hospital_data: Path) -> None:
    assert wbc(hospital_data / "wbc", tmp_path) == [("tecom", 209, 90), ("cellavision", 68, 29)]


def test_a_source_becomes_several_hospitals_with_so_many_images_and_a_public_data_set(tmp_path: Path) -> None:
    made_up_skin(tmp_path)
    made = skin(tmp_path, tmp_path / "out", hospitals=2, at_most=4, public_data=6)
    assert [(site, train) for site, train, _ in made] == [
        ("first-place-1", 4), ("first-place-2", 4), ("second-1", 4), ("second-2", 4)
    ]  # fmt: skip
    assert sum(test for _, _, test in made) == 8  # nothing to test is left out
    whole = arrays(tmp_path / "skin_32.npz")
    lesions = [lesion or f"image {place}" for place, lesion in enumerate(whole["lesion"])]
    lesion_of = dict(zip(map(np.ndarray.tobytes, whole["images"]), lesions, strict=True))
    files = (tmp_path / "out").rglob("*.npz")
    shown = {file: {lesion_of[image.tobytes()] for image in arrays(file)["images"]} for file in files}
    assert sum(map(len, shown.values())) == len(set().union(*shown.values()))  # each in one file
    public_data = arrays(tmp_path / "out" / "public_data" / "public_data.npz")
    assert len(public_data["images"]) == 6
    assert "patient" not in public_data


def test_a_public_data_set_larger_than_what_is_left_is_refused(tmp_path: Path) -> None:
    made_up_skin(tmp_path)
    with pytest.raises(BadData, match=r"the hospitals leave \d+ images, a public data set needs 30"):
        skin(tmp_path, tmp_path / "out", at_most=10, public_data=30)
