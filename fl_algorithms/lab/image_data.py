"""Public clinical images for the lab: one folder per hospital with train.npz and test.npz.

Each maker takes an .npz file in which somebody has put a published set's images and where they come from, and divides
it by hospital with a fixed test part: no lesion, and no slide, is in both. The same bytes come out on every machine.
"""

import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fl_algorithms.lab.data import Made
from fl_algorithms.tasks.images.decoding import Array
from fl_algorithms.tasks.images.files import read_arrays
from wardround.errors import BadData
from wardround.local import durable

MAX_BYTES = 1 << 32  # of one array, unpacked
WBC_TEST_PERCENT = 30  # of each class in each laboratory
NUCLEI_TEST_SHARE = 3  # one slide in three
NUCLEI_LARGE = ("G9", "B0", "HE")  # hospitals with three slides or more


def skin(
    raw: Path, out: Path, size: Literal[32, 64] = 32, *, hospitals: int = 1, at_most: int = 0, public_data: int = 0
) -> Made:
    """Dermoscopy of the four sources of HAM10000, and at 32 pixels the ISIC 2017 archive as a fifth.

    Arrays: images (n, size, size, 3); melanoma (no, yes); diagnosis (unknown where there is none); patient, the lesion.
    Whatever is asked for, no lesion is in two places.

    Args:
        raw: the folder with skin_32.npz and skin_64.npz.
        hospitals: how many each source becomes; of several, they are called SOURCE-1, SOURCE-2 and so on.
        at_most: images that each has to train; 0 for all. Those to test are never fewer for it.
        public_data: images of a set that every party may hold, in ``out/public_data``, with classes but without
            patients, of what the hospitals leave, of each source alike while it lasts; with ``at_most``.

    Raises:
        BadData: the file is missing or of another form, or the hospitals leave too few for the public data set.
        CannotWrite: ``out`` cannot be written.

    Reference:
        Tschandl, Rosendahl, Kittler, The HAM10000 dataset, Sci Data 2018 (CC BY-NC 4.0); Codella et al., ISIC 2017.
        https://arxiv.org/abs/1803.10417, https://arxiv.org/abs/1710.05006
    """
    path = raw / f"skin_{size}.npz"
    found = _arrays(path, ("images", "mel", "dx", "site", "is_test_lesion", "ids", "lesion", "site_names", "dx_names"))
    names = np.array([*found["dx_names"].tolist(), "unknown"])
    lesion = np.where(found["lesion"] == "", found["ids"], found["lesion"])
    arrays = {
        "images": found["images"],
        "melanoma": np.array(["no", "yes"])[found["mel"].astype(int)],
        "diagnosis": names[found["dx"].astype(int)],  # -1 is the last
        "patient": lesion,
    }
    sites, held_out = found["site_names"][found["site"].astype(int)], found["is_test_lesion"].astype(bool)
    made, left = [], ~held_out
    for source in _in_order(found["site_names"], sites):
        for number, rows in enumerate(_dealt(lesion, sites == source, hospitals), start=1):
            train = _first(lesion, rows & ~held_out, at_most)
            left &= ~train
            name = source if hospitals == 1 else f"{source}-{number}"
            made.append(_write(out, name, arrays, train | (rows & held_out), held_out))
    if public_data:
        chosen = _alike(sites, lesion, left & ~np.isin(lesion, lesion[~left]), public_data)
        if chosen.sum() < public_data:
            raise BadData(
                f"{path}: the hospitals leave {int(chosen.sum())} images, a public data set needs {public_data}",
                hint="let each have fewer: a smaller --at-most",
            )
        arrays.pop("patient")
        durable.make_folder(out / "public_data")
        _pack(out / "public_data" / "public_data.npz", arrays, chosen)
    return made


def _dealt(lesion: Array, rows: NDArray[np.bool_], hospitals: int) -> list[NDArray[np.bool_]]:
    """``rows`` divided by lesion, as evenly as lesions go."""
    order = sorted(set(lesion[rows].tolist()), key=lambda group: _shuffled("hospital", group))
    return [rows & np.isin(lesion, order[first::hospitals]) for first in range(hospitals)]


def _first(lesion: Array, rows: NDArray[np.bool_], number: int) -> NDArray[np.bool_]:
    """``number`` of ``rows``, lesion by lesion in an order without meaning; all of them if 0."""
    return np.isin(np.arange(len(rows)), _ordered(lesion, rows)[: number or None])


def _alike(sites: Array, lesion: Array, rows: NDArray[np.bool_], number: int) -> NDArray[np.bool_]:
    """``number`` of ``rows``, one of each source in turn."""
    ranks = {
        row: (rank, source)
        for source in sorted(set(sites[rows].tolist()))
        for rank, row in enumerate(_ordered(lesion, rows & (sites == source)))
    }
    return np.isin(np.arange(len(rows)), sorted(ranks, key=ranks.__getitem__)[:number])


def _ordered(lesion: Array, rows: NDArray[np.bool_]) -> list[int]:
    return sorted(np.flatnonzero(rows).tolist(), key=lambda row: (_shuffled("lesion", str(lesion[row])), row))


def wbc(raw: Path, out: Path) -> Made:
    """White blood cells of two laboratories, with other stains and cameras; without the four basophils.

    Arrays: images (n, 128, 128, 3); label, the kind of cell; masks (0 rest, 1 cytoplasm, 2 nucleus). 30 % of each kind
    are for testing.

    Raises:
        BadData: the file is missing or of another form.
        CannotWrite: ``out`` cannot be written.

    Reference:
        Zheng, Wang, Wang, Liu, Micron 107 (2018) 55-71; images of Jiangxi Tecom and of the CellaVision blog.
    """
    found = _arrays(raw / "wbc_128.npz", ("images", "masks", "labels", "site", "ids", "site_names", "label_names"))
    label = found["label_names"][found["labels"].astype(int)]
    sites = found["site_names"][found["site"].astype(int)]
    kept, held_out = label != "basophil", np.zeros(len(label), dtype=bool)
    for site in found["site_names"]:
        for kind in found["label_names"]:
            places = np.flatnonzero((sites == site) & (label == kind)).tolist()
            places.sort(key=lambda place: _shuffled("white blood cell", str(found["ids"][place])))
            held_out[places[: round(len(places) * WBC_TEST_PERCENT / 100)]] = True
    arrays = {"images": found["images"], "label": label, "masks": found["masks"]}
    return [
        _write(out, site, arrays, kept & (sites == site), held_out) for site in _in_order(found["site_names"], sites)
    ]


def nuclei(raw: Path, out: Path, by: Literal["organ", "hospital"] = "organ") -> Made:
    """Tiles of H&E slides with their nuclei: the four organs of six slides each, or three hospitals and the others.

    Arrays: images (n, 128, 128, 3); masks (0, 1); patient, the slide. One slide in three is for testing, so that an
    organ has four to train, and a study of patients needs a `validation_fraction` of 0.25.

    Raises:
        BadData: the file is missing or of another form.
        CannotWrite: ``out`` cannot be written.

    Reference:
        Kumar et al., A Dataset and a Technique for Generalized Nuclear Segmentation, IEEE TMI 2017 (CC BY-NC-SA 4.0).
    """
    found = _arrays(
        raw / "nuclei_128.npz", ("images", "masks", "site", "organ", "image", "image_ids", "site_names", "organ_names")
    )
    slide = found["image_ids"][found["image"].astype(int)]
    if by == "organ":
        groups = found["organ_names"][found["organ"].astype(int)]
        wanted = [name for name in found["organ_names"] if len(set(slide[groups == name])) >= 6]
    else:
        code = found["site_names"][found["site"].astype(int)]
        groups = np.where(np.isin(code, NUCLEI_LARGE), code, "others")
        wanted = [*NUCLEI_LARGE, "others"]
    arrays = {"images": found["images"], "masks": found["masks"].astype(np.uint8), "patient": slide}
    made = []
    for name in wanted:
        slides = sorted(set(slide[groups == name].tolist()), key=lambda name: _shuffled("slide", name))
        tested = slides[: max(1, len(slides) // NUCLEI_TEST_SHARE)]
        made.append(_write(out, str(name), arrays, groups == name, np.isin(slide, tested)))
    return made


def _arrays(path: Path, names: Sequence[str]) -> dict[str, Array]:
    if not path.is_file():
        raise BadData(f"{path} does not exist", hint="name the folder that holds it")
    _, found = read_arrays(path, dict.fromkeys(names, True), MAX_BYTES)
    return found


def _in_order(names: Iterable[str], present: NDArray[np.str_]) -> list[str]:
    occurring = set(present.tolist())
    return [str(name) for name in names if str(name) in occurring]


def _write(
    out: Path, site: str, arrays: dict[str, Array], rows: NDArray[np.bool_], held_out: NDArray[np.bool_]
) -> tuple[str, int, int]:
    """One hospital's folder; its name is a site's, as in a study."""
    name = re.sub("[^a-z0-9]+", "-", site.lower()).strip("-")
    folder = out / name
    durable.make_folder(folder)
    for file, chosen in (("train.npz", rows & ~held_out), ("test.npz", rows & held_out)):
        _pack(folder / file, arrays, chosen)
    return name, int((rows & ~held_out).sum()), int((rows & held_out).sum())


def _pack(path: Path, arrays: dict[str, Array], chosen: NDArray[np.bool_]) -> None:
    packed = io.BytesIO()
    chosen_arrays: dict[str, Any] = {key: array[chosen] for key, array in arrays.items()}
    np.savez(packed, **chosen_arrays)
    durable.write_file(path, packed.getbuffer())


def _shuffled(what: str, name: str) -> bytes:
    """A key that sorts into an order without meaning, the same on every machine and with every library."""
    return hashlib.sha256(f"{what} {name}".encode()).digest()
