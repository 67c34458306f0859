"""What a method that distills at the coordinator needs before its study is made known."""

import hashlib
from pathlib import Path

import pytest

from coordinator.models import public_data
from coordinator.storage.blobs import Blobs
from fl_algorithms import registry
from fl_algorithms.study import ResolvedStudy
from tests.fl_algorithms.toys import fit, toy_study
from wardround.errors import BadData

CONTENT = b"u,v,w\n1,2,3\n"


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(tmp_path / "state")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.CSV"
    path.write_bytes(CONTENT)
    return path


def study_of(algorithm: str = "feddf") -> ResolvedStudy:
    study = toy_study(algorithm)
    if study.public_data is None:
        return study
    digest = hashlib.sha256(CONTENT).hexdigest()
    return study.changed(public_data={"digest": digest})


@pytest.mark.parametrize("algorithm", ["feddf", "pfeddf"])
def test_the_set_is_copied_once_under_its_digest(algorithm: str, blobs: Blobs, rows: Path) -> None:
    study = study_of(algorithm)
    assert public_data.copy_of(study, blobs) is None
    public_data.prepare(study, blobs, rows)
    kept = public_data.copy_of(study, blobs)
    assert kept is not None
    assert (kept.name, kept.read_bytes()) == (f"{hashlib.sha256(CONTENT).hexdigest()}.csv", CONTENT)
    rows.unlink()
    public_data.prepare(study, blobs, None)
    assert public_data.copy_of(study, blobs) == kept


def test_another_set_none_and_a_folder_are_refused_with_the_command(blobs: Blobs, rows: Path, tmp_path: Path) -> None:
    study = study_of()
    rows.write_bytes(CONTENT + b"4,5,6\n")
    found, wanted = (hashlib.sha256(data).hexdigest() for data in (rows.read_bytes(), CONTENT))
    for path, said in (
        (
            rows,
            f"is not the public data set of study `toy`: its digest is {found[:12]}…, the study's is {wanted[:12]}…",
        ),
        (None, "algorithm `feddf` distills at the coordinator, which has no copy of the public data set"),
        (tmp_path, "the coordinator keeps a public data set that is one .csv or .npz file"),
        (tmp_path / "absent.csv", "absent.csv: No such file or directory"),
    ):
        with pytest.raises(BadData) as refused:
            public_data.prepare(study, blobs, path)
        assert said in refused.value.message
        assert "`coordinator study create STUDY.toml --public-data PATH`" in refused.value.hint
    assert public_data.copy_of(study, blobs) is None


@pytest.mark.parametrize("algorithm", ["fedavg", "fedmd"])
def test_a_method_that_does_not_distill_here_takes_no_set(algorithm: str, blobs: Blobs, rows: Path) -> None:
    public_data.prepare(study_of(algorithm), blobs, None)
    with pytest.raises(BadData, match=f"algorithm `{algorithm}` does not distill at the coordinator"):
        public_data.prepare(study_of(algorithm), blobs, rows)
    assert not blobs.public_data.exists()


def test_torch_is_asked_for_before_any_site_hears_of_the_study(
    blobs: Blobs, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fl_algorithms.methods.feddf.server.find_spec", lambda name: None)
    with pytest.raises(BadData, match="distills at the coordinator, which needs torch, and it is not installed here"):
        public_data.prepare(study_of(), blobs, rows)
    public_data.prepare(study_of("fedavg"), blobs, None)


def test_only_feddf_and_pfeddf_distill_here() -> None:
    distilling = {name for name in registry.METHODS if fit(name).distills}
    assert distilling == {"feddf", "pfeddf"}
