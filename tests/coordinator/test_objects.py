"""Models and updates in an object store too: a standby without a common folder goes on with what it finds there."""

import contextlib
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.core import url_to_fs

from coordinator import standby_file
from coordinator.state_directory import State, Storage, blobs_from
from coordinator.storage.blobs import Blobs, DamagedModel
from coordinator.storage.objects import ObjectStore
from tests.coordinator.conftest import SITES, Place
from tests.coordinator.fake_site import write_initial
from tests.coordinator.postgres import Postgres
from tests.coordinator.test_damaged_files import flip
from tests.coordinator.test_restore import backup_of
from tests.coordinator.test_rounds import expected_model, model_bytes
from tools.world import wait_until
from wardround.errors import BadData, NeedsPerson, TryAgain, UsageProblem
from wardround.tensors.files import TensorFile

SECRET = b"a passphrase of some length"


S3 = pytest.param("s3", marks=pytest.mark.chaos)  # a server of its own, of which the start alone takes seconds


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A bucket of a server on loopback that speaks S3, as the environment of the machine names it."""
    with pytest.MonkeyPatch.context() as environment, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        address = f"http://127.0.0.1:{port}"
        for name, value in {
            "AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "of-the-test", "AWS_SECRET_ACCESS_KEY": "of-the-test",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true", "NO_PROXY": "127.0.0.1",
        }.items():  # fmt: skip
            environment.setenv(name, value)
        taken.close()
        line = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
            try:
                wait_until(lambda: _listens(port), "the store listens", 60)
                url_to_fs("s3://")[0].mkdir("of-north")
                yield "s3://of-north"
            finally:
                server.terminate()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
        return True
    return False


def address_in(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if kind == "file":
        return f"file://{tmp_path}/objects"
    place = request.getfixturevalue("s3") if kind == "s3" else "memory:/"
    return f"{place}/{uuid.uuid4().hex}"


@pytest.fixture(params=["memory", "file", S3])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return address_in(request.param, request, tmp_path)


@pytest.mark.parametrize("kind", ["memory", S3])
def test_a_standby_goes_on_in_the_middle_of_a_round_with_what_it_fetches(
    kind: str, tmp_path: Path, postgres: Postgres, request: pytest.FixtureRequest
) -> None:
    url = address_in(kind, request, tmp_path)
    place = Place(tmp_path, Storage(database=postgres.new_database(), blobs=url))
    sites = place.begin(rounds=2)
    assignments = [site.next_assignment() for site in sites]
    for site, assignment in zip(sites, assignments, strict=True):
        site.answer(assignment)
    place.until(lambda status: status["round"] == 2)
    first = sites[0].answer(sites[0].next_assignment())
    second = State(tmp_path / "second")
    standby_file.imported(second, standby_file.exported(place.state, SECRET), SECRET)
    place.coordinator.stop()
    place.state.root.rename(tmp_path / "gone")  # with the disk of that machine
    place.state = second
    place.serve()
    for site in sites:
        site.watch_again()
    for site in sites[1:]:
        assert site.answer(site.next_assignment()).decision == "accepted"
    place.until(lambda status: status["closing"])
    assert model_bytes(place) == expected_model([SITES, SITES])
    assert first.decision == "accepted"
    for site in sites:
        site.answer(site.next_assignment())
    place.until(lambda status: status["state"] == "finished")
    contents = backup_of(place, tmp_path / "backup")
    assert len([name for name in contents.files if name.startswith("blobs/models/")]) >= 2
    place.close()
    store = ObjectStore(url)
    assert store.names("uploads") == set()  # each is removed when its round's model is durable
    assert all((second.blobs / name).exists() for name in store.names("models"))


def model_in(blobs: Blobs, folder: Path) -> str:
    write_initial(folder / "initial.safetensors")
    with TensorFile(folder / "initial.safetensors") as file:
        return blobs.keep_model(file, "initial").digest()


def test_a_model_that_is_fetched_is_hashed_before_it_is_used(tmp_path: Path) -> None:
    objects = tmp_path / "objects"
    digest = model_in(Blobs(tmp_path / "one", ObjectStore(f"file://{objects}")), tmp_path)
    (kept,) = (objects / "models").iterdir()
    whole = flip(kept)
    two = Blobs(tmp_path / "two", ObjectStore(f"file://{objects}"))
    with pytest.raises(DamagedModel):
        two.whole_model(digest)
    kept.write_bytes(whole)
    assert two.whole_model(digest).read_bytes() == whole
    flip(two.model(digest))
    flip(two.spare(digest))
    assert two.whole_model(digest, again=True).read_bytes() == whole


def test_an_accepted_update_is_there_before_its_receipt_and_without_the_store_there_is_none(
    tmp_path: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"file://{tmp_path}/objects"
    place = Place(tmp_path, Storage(database=postgres.new_database(), blobs=url))
    try:
        (site,) = place.begin(sites=["alpha"], rounds=1)
        assignment = site.next_assignment()

        def away(*_: object) -> None:
            raise ConnectionError("somewhere")

        objects = place.coordinator.context.blobs._objects
        assert objects is not None
        with monkeypatch.context() as broken:
            broken.setattr(objects._files, "put_file", away)
            with pytest.raises(Exception, match="TOO_BUSY"):
                site.answer(assignment)
        assert site.receipts == []
        said = "the object store did not answer as it should (ConnectionError); see to the store and to"
        assert f"trial: the update of site alpha for round 1 is not accepted now: {url}/uploads/" in caplog.text
        assert said in caplog.text
        put: list[Path] = []
        real = objects.put

        def noted(source: Path, name: str) -> None:
            put.append(source)
            real(source, name)

        monkeypatch.setattr(objects, "put", noted)
        receipt = site.answer(assignment)
        assert put[0].name == f"{receipt.upload_id}.safetensors"
    finally:
        place.close()


def test_names_are_put_listed_fetched_and_removed(url: str, tmp_path: Path) -> None:
    store, source, target = ObjectStore(url), tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"abc" * 1000)
    assert store.names("models") == set()
    assert not store.fetch("models/a", target)
    store.put(source, "models/a")
    store.put(source, "models/b")
    assert store.names("models") == {"models/a", "models/b"}
    assert store.fetch("models/a", target)
    assert target.read_bytes() == source.read_bytes()
    store.remove(["models/a", "models/not there"])
    store.close()
    assert ObjectStore(url).names("models") == {"models/b"}


def test_what_did_not_arrive_whole_is_said_to_have_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, source = ObjectStore(f"file://{tmp_path}/objects"), tmp_path / "source"
    source.write_bytes(b"abc")
    monkeypatch.setattr(store._files, "put_file", lambda source, target: Path(target).write_bytes(b"a"))
    with pytest.raises(TryAgain, match="models/a has 1 bytes there, 3 were sent"):
        store.put(source, "models/a")


@pytest.mark.parametrize("when", ["before it is sent", "after it was sent"])
def test_a_bucket_that_is_gone_is_tried_again_as_a_store_that_does_not_answer(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packages of stores say so with the error of a missing file: it is no fault of the program, which would pause
    each study of which an update or a model came meanwhile."""
    store, source = ObjectStore("memory://bucket/of-north"), tmp_path / "source"
    source.write_bytes(b"abc")

    def gone(*_: object) -> None:
        raise FileNotFoundError("The specified bucket does not exist")

    sent = store._files.put_file
    monkeypatch.setattr(store._files, "put_file", gone if when.startswith("before") else sent)
    monkeypatch.setattr(store._files, "info", gone)
    with pytest.raises(TryAgain) as refusal:
        store.put(source, "models/a")
    assert refusal.value.message == "memory://bucket/of-north/models/a did not arrive: nothing is there by that name"
    assert (refusal.value.hint, refusal.value.code) == (
        "does the bucket, or the folder, still exist? what was to be copied stays here", "TOO_BUSY",
    )  # fmt: skip


def test_a_model_that_no_place_has_is_said_to_be_missing_in_the_store_too(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path, ObjectStore("memory://bucket/of-nobody"))
    with pytest.raises(DamagedModel, match="and memory://bucket/of-nobody has none that is whole") as refusal:
        blobs.whole_model("0" * 64)
    assert refusal.value.hint.startswith("check the disk, and the address of the object store; restore ")


def test_what_goes_wrong_in_the_store_is_said_in_words_and_what_cannot_be_removed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = ObjectStore("memory://bucket/of-north")

    def denied(*_: object, **named: object) -> None:
        raise PermissionError("secret detail")

    for name in ("open", "ls", "rm_file"):
        monkeypatch.setattr(store._files, name, denied)
    said = "the object store did not answer as it should (PermissionError)"
    with pytest.raises(TryAgain) as refusal:
        store.fetch("models/a", tmp_path / "a")
    assert refusal.value.message == f"memory://bucket/of-north/models/a: {said}"
    with pytest.raises(TryAgain):
        store.names("models")
    store.remove(["models/a"])
    store.close()
    assert f"memory://bucket/of-north/models/a: {said}; it stays there until the next start" in caplog.text
    Blobs(tmp_path / "blobs", store).tidy(set(), set())
    assert "what is needless there stays until the next start" in caplog.text


@pytest.mark.parametrize(
    ("url", "kind", "said"),
    [
        ("s3://key:geheim@bucket/prefix", UsageProblem, "has a key in it, which others could read"),
        ("simplecache::s3://key:geheim@bucket/prefix", UsageProblem, "is a chain of several, as fsspec has them"),
        ("s3://", UsageProblem, "names no bucket or folder"),
        ("nonsense://bucket", UsageProblem, "Protocol not known: nonsense"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_and_its_key_not_repeated(
    url: str, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said) as refusal:
        ObjectStore(url)
    assert "geheim" not in str(refusal.value)


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **named: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", absent)
    with pytest.raises(NeedsPerson, match="s3://bucket/of-north: Install s3fs to access S3") as refusal:
        ObjectStore("s3://bucket/of-north")
    assert refusal.value.hint == "for s3:// that is `pip install s3fs`"


def test_a_folder_or_an_object_store_is_told_apart_in_the_settings(tmp_path: Path) -> None:
    state = State(tmp_path)
    assert blobs_from("") == ""
    assert blobs_from("here") == str(Path("here").absolute())
    assert blobs_from("s3://bucket/of-north") == "s3://bucket/of-north"
    assert state.blob_folder(Storage(blobs="/mnt/shared")) == Path("/mnt/shared")
    assert state.blob_folder(Storage(blobs="s3://bucket/of-north")) == state.blobs
    for wrong in ("relative/folder", "s3://key:geheim@bucket"):
        with pytest.raises(ValueError, match=r"no absolute path of a folder|has a key in it"):
            Storage(blobs=wrong)
    (tmp_path / "config.toml").write_text(
        'federation = "north"\naddress = "h:1"\n[storage]\nblobs = "s3://key:geheim@bucket"\n'
    )
    with pytest.raises(BadData, match="has a key in it") as refusal:
        state.config()
    assert "geheim" not in refusal.value.message
