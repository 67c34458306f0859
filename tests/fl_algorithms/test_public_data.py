"""The public data set: which file it is, how tasks read it, and how a study that lacks it is refused."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from fl_algorithms import rows
from fl_algorithms.engine.algorithm import compute_logits
from fl_algorithms.engine.partition import task_of
from fl_algorithms.lab.cli import app
from fl_algorithms.lab.federation import run_federation
from fl_algorithms.lab.site_data import load_sites
from fl_algorithms.methods.distillation.client import rows_of_round
from fl_algorithms.resolving import resolve
from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.public_data import public_data_digest, read_public_data
from tests.fl_algorithms.image_toys import IMAGES, image_study, image_task, packed, pictures, public_bytes
from tests.fl_algorithms.toys import session_of, start_of, study_tables, toy_data, toy_study
from wardround.errors import BadData
from wardround.records.study import SITE_NAME, StudyFile

HEAD = "u,v,w,ill"
ROWS = [f"{k},{-k}.5,{k * k},{'yes' if k % 3 else 'no'}" for k in range(8)]


def write(path: Path, lines: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def study_with(path: Path, rows: int = len(ROWS), algorithm: str = "fedmd", **settings: Any) -> ResolvedStudy:
    """A study whose public data set is ``path``."""
    tables = study_tables(algorithm, algorithm_settings=settings)
    tables["public_data"] = {"digest": public_data_digest(path), "rows": rows}
    return resolve(StudyFile.model_validate(tables))


def lab_folder(folder: Path) -> Path:
    for seed, site in enumerate(("ash", "birch")):
        write(
            folder / site / "train.csv",
            [HEAD, *(f"{k + seed},{k % 5},{k},{'yes' if k % 2 else 'no'}" for k in range(20))],
        )
    write(folder / "public_data" / "public_data.csv", [HEAD, *ROWS])
    return folder


def test_the_digest_of_a_file_is_what_sha256sum_prints(tmp_path: Path) -> None:
    path = write(tmp_path / "public_data.csv", [HEAD, *ROWS])
    assert public_data_digest(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_classes_that_a_method_needs_and_the_set_lacks_are_said_with_the_way_out(tmp_path: Path) -> None:
    """FedMD begins with them; a set without classes is for a study that leaves that out."""
    path = write(tmp_path / "public_data.csv", ["u,v,w", *(row.rpartition(",")[0] for row in ROWS)])
    study = study_with(path, transfer={"epochs": 1})
    with pytest.raises(BadData) as refusal:
        read_public_data(study, task_of(study), path)
    assert "ill" in refusal.value.message
    assert refusal.value.hint.endswith(
        "algorithm `fedmd` as it is set also needs the classes of these rows: `fl-lab methods fedmd`"
    )
    without = study_with(path)
    assert read_public_data(without, task_of(without), path).y is None


def test_the_digest_of_a_folder_depends_on_every_name_and_byte(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(b"first")
    (tmp_path / "two" / "a.png").write_bytes(b"other")
    (tmp_path / "three" / "a.png").rename(tmp_path / "three" / "b.png")
    digests = {public_data_digest(tmp_path / name) for name in ("one", "two", "three")}
    assert len(digests) == 3
    (tmp_path / "two" / "a.png").write_bytes(b"first")
    assert public_data_digest(tmp_path / "two") == public_data_digest(tmp_path / "one")


def test_rows_of_a_table_are_on_the_studys_scale_in_the_files_order(tmp_path: Path) -> None:
    path = write(tmp_path / "public_data.csv", [HEAD, *ROWS])
    tables = study_tables("fedmd")
    tables["task"]["features"] = [
        {"name": "w", "mean": 10.0, "std": 4.0},
        {"name": "ill", "kind": "categorical", "categories": ["no", "yes"]},
    ]
    tables["task"]["label"] = "u"
    tables["task"]["classes"] = [str(k) for k in range(8)]
    study = resolve(StudyFile.model_validate(tables | {"public_data": {"digest": "00" * 32, "rows": 8}}))
    public_data = read_public_data(study, task_of(study), path)
    expected = [[(k * k - 10) / 4, 1.0 if k % 3 else 0.0] for k in range(8)]
    assert isinstance(public_data.x, torch.Tensor)
    torch.testing.assert_close(public_data.x, torch.tensor(expected))
    assert public_data.y is None


def test_a_site_feeds_its_network_the_same_numbers_as_the_public_data_set_does(tmp_path: Path) -> None:
    """Categories too: with the study's scale for each number, no statistics of a site enter."""
    rows = [f"{k},{'a' if k % 4 else 'b'},{'yes' if k % 3 else 'no'}" for k in range(10)]
    path = write(tmp_path / "public_data.csv", ["u,kind,ill", *rows])
    tables = study_tables("fedmd")
    tables["task"]["features"] = [
        {"name": "u", "mean": 3.0, "std": 2.0},
        {"name": "kind", "kind": "categorical", "categories": ["a", "b"]},
    ]
    study = resolve(StudyFile.model_validate(tables))
    task = task_of(study)
    data = task.load(source_of(path), site="ash", seed=5, validation_fraction=0.2)
    own = torch.cat([part.x for part in (data.train, data.validation) if isinstance(part.x, torch.Tensor)])
    public_data = read_public_data(study, task, path).x
    assert sorted(own.tolist()) == sorted(torch.as_tensor(public_data).tolist())


def source_of(path: Path) -> Any:
    from fl_algorithms.tasks.base import Source

    return Source({"table": path})


def test_images_are_on_the_studys_scale_and_never_augmented(tmp_path: Path) -> None:
    path = tmp_path / "public_data.npz"
    path.write_bytes(public_bytes())
    study = image_study({**IMAGES, "augment": {"shift": 0.4, "brightness": 1.0}}, algorithm="dsfl")
    public_data = read_public_data(study, task_of(study), path)
    expected = (pictures(9, seed=77)[0][:, None] / 255 - 0.25) / 0.25
    places = torch.arange(9)
    assert not isinstance(public_data.x, torch.Tensor)
    np.testing.assert_allclose(public_data.x.take(places), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(public_data.x.augmented(places, places, 3)[0], public_data.x.take(places))


def test_a_folder_of_images_is_read_in_the_order_of_the_names(tmp_path: Path) -> None:
    images = pictures(9, seed=77)[0]
    for place in (4, 0, 8, 1, 2, 3, 5, 6, 7):
        Image.fromarray(images[place]).save(tmp_path / f"{place}.png")
    study = image_study(algorithm="dsfl")
    public_data = read_public_data(study, task_of(study), tmp_path)
    expected = (images[:, None] / 255 - 0.25) / 0.25
    assert not isinstance(public_data.x, torch.Tensor)
    np.testing.assert_allclose(public_data.x.take(torch.arange(9)), expected, rtol=1e-5, atol=1e-6)


def test_classes_are_read_where_the_method_learns_them(tmp_path: Path) -> None:
    path = write(tmp_path / "public_data.csv", [HEAD, *ROWS])
    study = study_with(path, transfer={"epochs": 1})
    y = read_public_data(study, task_of(study), path).y
    assert y is not None
    assert y.tolist() == [1 if k % 3 else 0 for k in range(8)]
    found = image_task(mean=[0.25], std=[0.25]).read_public_data(
        packed(tmp_path / "public_data.npz", n=6), labeled=True
    )
    assert found.y is not None
    assert found.y.tolist() == [0, 1, 0, 1, 0, 1]
    with pytest.raises(BadData, match="a folder has no classes"):
        image_task(mean=[0.25], std=[0.25]).read_public_data(tmp_path, labeled=True)


@pytest.mark.parametrize(
    ("lines", "said", "hint"),
    [
        pytest.param(
            [HEAD, *ROWS[:-1]], "7 rows, [public_data] of study `toy` says 8", "`fl-lab public-data", id="a row less"
        ),
        pytest.param(
            [HEAD, "1,,3,no", *ROWS[1:]],
            "line 2, column `v`: no value",
            "has every value",
            id="a gap",
        ),
        pytest.param(["u,v,ill", *ROWS], "no column `w`", "", id="a column less"),
        pytest.param([HEAD, "1,2,3,maybe", *ROWS[1:]], "column `ill`: no class of the study", "", id="label"),
    ],
)
def test_a_set_that_the_task_cannot_use_is_refused(tmp_path: Path, lines: list[str], said: str, hint: str) -> None:
    path = write(tmp_path / "public_data.csv", lines)
    study = study_with(path, transfer={"epochs": 1})
    with pytest.raises(BadData) as refused:
        read_public_data(study, task_of(study), path)
    assert said in refused.value.message
    assert hint in refused.value.hint


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"public_data": None}, "needs a public data set: [public_data] with `digest`", id="no table"),
        pytest.param({"features": ["u", "v", "w"]}, "gives none for `u`, `v`, `w`", id="no scale"),
        pytest.param({"subset": 11}, "is 11, the public data set has 10 rows", id="too many rows"),
    ],
)  # fmt: skip
def test_a_study_that_lacks_what_the_method_needs_is_refused(changes: dict[str, Any], said: str) -> None:
    tables = study_tables("fedmd", algorithm_settings={k: v for k, v in changes.items() if k == "subset"})
    tables["task"] |= {key: value for key, value in changes.items() if key == "features"}
    tables |= {key: value for key, value in changes.items() if key == "public_data"}
    with pytest.raises(BadData) as refused:
        resolve(StudyFile.model_validate(tables))
    assert said in refused.value.message


def test_no_site_can_be_called_as_the_labs_folder_of_the_public_data_set() -> None:
    assert not SITE_NAME.fullmatch(rows.PUBLIC_DATA)


def test_pixels_and_images_without_a_scale_are_refused() -> None:
    for task, said in (("segmentation", "judges pixels"), ("images", "gives none for `channels`")):
        tables = study_tables("dsfl") | {"task": {"name": task, "size": [8, 8], "channels": 1}}
        if task == "images":
            tables["task"]["classes"] = ["no", "yes"]
        tables["model"] = {"name": "unet" if task == "segmentation" else "resnet10"}
        with pytest.raises(BadData) as refused:
            resolve(StudyFile.model_validate(tables))
        assert said in refused.value.message


def test_a_method_without_use_for_the_set_resolves_without_it() -> None:
    tables = study_tables("fedavg")
    plain = resolve(StudyFile.model_validate(tables))
    given = resolve(StudyFile.model_validate(tables | {"public_data": {"digest": "ab" * 32, "rows": 3}}))
    assert given == plain
    assert "public_data" not in plain.document()
    assert resolve(StudyFile.from_document(plain.document())) == plain


def test_another_public_data_set_is_another_study() -> None:
    tables = study_tables("fedmd")
    studies = [
        resolve(StudyFile.model_validate(tables | {"public_data": {"digest": digest, "rows": rows}}))
        for digest, rows in (("ab" * 32, 8), ("ab" * 32, 9), ("ac" * 32, 8))
    ]
    assert len({study.digest("00" * 32) for study in studies}) == 3
    assert resolve(StudyFile.from_document(studies[0].document())) == studies[0]


def test_the_rows_of_a_round_are_drawn_anew_and_alike_everywhere() -> None:
    study = toy_study("fedmd", algorithm_settings={"subset": 4})
    drawn = [tuple(rows_of_round(study, number).tolist()) for number in range(1, 9)]
    assert len(set(drawn)) > 1
    assert all(len(set(rows)) == 4 and list(rows) == sorted(rows) and max(rows) < 10 for rows in drawn)
    assert drawn == [tuple(rows_of_round(study, number).tolist()) for number in range(1, 9)]
    whole = toy_study("fedmd")
    assert rows_of_round(whole, 3).tolist() == list(range(10))


def test_what_leaves_is_of_the_next_rounds_rows() -> None:
    study = toy_study("fedmd", algorithm_settings={"subset": 4})
    session = session_of(study)
    result = session.train(1, {"consensus": {"logits": torch.zeros(4, 1)}})
    context, data = session._context, toy_data("ash")
    assert data.public_data is not None
    expected = compute_logits(context.algorithm, context.networks, data.public_data.x)[rows_of_round(study, 2)]
    assert torch.equal(result.uplink["predictions"]["logits"], expected)
    assert start_of(study)["predictions"]["logits"].count_nonzero() == 0


def test_a_session_without_the_set_says_so() -> None:
    study = toy_study("dsfl")
    session = session_of(study, data=replace(toy_data("ash"), public_data=None))
    with pytest.raises(BadData, match="algorithm `dsfl` needs the study's public data set, which was not read"):
        session.train(1, {})


def test_the_lab_reads_the_set_beside_the_sites_and_compares_its_digest(tmp_path: Path) -> None:
    folder = lab_folder(tmp_path)
    path = folder / "public_data" / "public_data.csv"
    study = study_with(path)
    task = task_of(study)
    sites = load_sites(study, task, folder)
    assert sites["ash"].public_data is sites["birch"].public_data
    outcome = run_federation(study, task, sites)
    assert outcome.shared["consensus/logits"].shape == (8, 1)
    path.write_text(path.read_text().replace("0.5", "0.6", 1))
    with pytest.raises(BadData) as refused:
        load_sites(study, task, folder)
    assert "is not the public data set of study `toy`: its digest is " in refused.value.message
    assert public_data_digest(path)[:12] in refused.value.message
    assert study.public_data is not None
    assert study.public_data.digest[:12] in refused.value.message
    path.unlink()
    with pytest.raises(BadData, match=r"there is neither .*public_data\.csv, .*public_data\.npz nor .*images"):
        load_sites(study, task, folder)
    without = toy_study("fedavg")
    assert load_sites(without, task_of(without), folder)["ash"].public_data is None


def test_fl_lab_public_data_prints_the_table_that_the_study_needs(tmp_path: Path) -> None:
    path = write(tmp_path / "public_data.csv", [HEAD, *ROWS])
    features = "\n".join(f'{{ name = "{name}", mean = 0.0, std = 1.0 }},' for name in "uvw")
    study = write(
        tmp_path / "study.toml",
        [
            '[study]\nname = "toy"\nsites = ["ash"]\nrounds = 1',
            f'[task]\nname = "tabular"\nlabel = "ill"\nclasses = ["no", "yes"]\nfeatures = [{features}]',
            '[model]\nname = "mlp"\n[algorithm]\nname = "fedmd"',
        ],
    )
    before = CliRunner().invoke(app, ["init", str(study), "--out", str(tmp_path / "initial")])
    assert isinstance(before.exception, BadData)
    assert before.exception.hint == "`fl-lab public-data study.toml PATH` reads one and prints that table"
    done = CliRunner().invoke(app, ["public-data", str(study), str(path)])
    assert done.exit_code == 0
    study.write_text(study.read_text() + done.stdout)
    after = CliRunner().invoke(app, ["init", str(study), "--out", str(tmp_path / "initial")])
    assert after.exit_code == 0, after.exception
