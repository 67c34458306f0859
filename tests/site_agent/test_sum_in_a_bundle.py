"""A round's sum checked away from the hospital: from a bundle, and vectors in it or beside it."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from site_agent import audit
from site_agent.audit import bundle
from site_agent.audit.sums import check_sum
from site_agent.gateway.connection.interrupt import Interrupt
from tests import commands
from tests.secure_world import key_of
from tests.site_agent.secure_sites import STUDY, SecureSites
from tools import verify_ledger
from wardround.errors import BadData, NotPermitted, Unavailable, UsageProblem
from wardround.records.ledger.entries import ConsentEntry
from wardround.records.secure_messages import SumEvidence
from wardround.signing import canonical
from wardround.tensors.files import TensorFile

NAME = f"{STUDY}.1.1"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SecureSites]:
    """After a round, whose sum `bergen` has checked."""
    world = SecureSites(tmp_path)
    world.run(1)
    world.check("bergen", 2)
    yield world
    world.close()


def bundled(world: SecureSites, change: Callable[[dict[str, bytes]], object] = lambda files: None) -> Path:
    """A bundle of `bergen`'s, signed by it. ``change``: what it makes of its files first."""
    hospital = world.hospitals["bergen"]
    consent = hospital.state.root / "consents" / f"{STUDY}.json"
    sha256 = hashlib.sha256(consent.read_bytes()).hexdigest()
    hospital.ledger.append(ConsentEntry(event="approved", study=STUDY, consent_sha256=sha256))
    hospital.ledger.sign()
    looked = bundle.look(hospital.state.root)
    files = {**looked.files, **bundle.sums_of(hospital.state.root)}
    change(files)
    head = hospital.ledger.head
    about = {"ledger_id": head.ledger_id, "lines": head.lines, "head": head.head, "verdict": looked.code}
    bundle.write(files, about, key_of("bergen"), world.folder / "b.tar")
    assert verify_ledger.judge(world.folder / "b.tar", bundle=True)[0] == audit.UNRESOLVED  # nobody answers uploads
    return world.folder / "b.tar"


def keep(world: SecureSites) -> Path:
    """As `audit sum --keep`; the folder."""
    hospital = world.hospitals["bergen"]
    found = hospital.sums.by_hand(world.consent_of(hospital), 1, None, Interrupt(), keep=True)
    assert found.result == "same"
    return hospital.state.sums / NAME


def said(world: SecureSites, path: Path, *more: str, code: int = 0) -> list[str]:
    return asked("--bundle", str(path), *more, code=code).splitlines()


def asked(*words: str, code: int) -> str:
    env = {name: value for name, value in os.environ.items() if name != "WARDROUND_STATE"}
    done = commands.run("site-agent", "audit", "sum", STUDY, "--round", "1", *words, env=env)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_with_the_vectors_in_it_a_bundle_shows_that_the_model_is_their_sum(world: SecureSites) -> None:
    keep(world)
    path = bundled(world)
    world.hospitals["bergen"].ledger.close()
    shutil.rmtree(world.hospitals["bergen"].folder)  # nothing of the hospital is needed
    shown = check_sum(path, STUDY, 1, None)
    assert shown.checked is not None
    assert (shown.signed, shown.checked.result, shown.checked.looked_at, shown.not_shown) == (3, "same", (0,), ())


def test_without_the_vectors_it_says_what_cannot_be_checked(world: SecureSites) -> None:
    shown = check_sum(bundled(world), STUDY, 1, None)
    assert (shown.signed, shown.checked) == (3, None)
    assert shown.not_shown == (
        "that the model is what the updates give: the masked vectors are not in the bundle; `--vectors DIR`, "
        f"a copy of the hospital's `sums/{NAME}`",
    )


def test_the_vectors_may_lie_beside_the_bundle(world: SecureSites) -> None:
    path = bundled(world)
    beside = shutil.copytree(keep(world), world.folder / "beside")
    shown = check_sum(path, STUDY, 1, 16, beside)
    assert shown.checked is not None
    assert (shown.checked.result, shown.not_shown) == ("same", ())
    with pytest.raises(UsageProblem, match="there are no vectors in"):
        check_sum(path, STUDY, 1, 16, world.folder)
    (beside / "model.safetensors").unlink()
    shown = check_sum(path, STUDY, 1, 16, beside)
    assert shown.checked is not None
    assert shown.checked.result == "blocks_alone"
    assert shown.not_shown == ("that the model is what the updates give: the one that the round made is not there",)


@pytest.mark.parametrize("site", ["amsterdam", "bergen", "charite"])
def test_an_altered_byte_of_any_vector_is_found(world: SecureSites, site: str) -> None:
    keep(world)

    def alter(files: dict[str, bytes]) -> None:
        data = bytearray(files[f"sums/{NAME}/{site}.vector"])
        data[5] ^= 1
        files[f"sums/{NAME}/{site}.vector"] = bytes(data)

    with pytest.raises(BadData, match=f"the blocks' digests of site `{site}` are not what it had signed"):
        check_sum(bundled(world, alter), STUDY, 1, None)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("base.safetensors", "is not the model that the round began with"),
        ("model.safetensors", "is not the model that the round made"),
    ],
)
def test_another_model_in_its_place_is_found(world: SecureSites, name: str, found: str) -> None:
    keep(world)
    path = f"sums/{NAME}/{name}"
    with pytest.raises(BadData, match=found):
        check_sum(bundled(world, lambda files: files.update({path: files[path][:-1] + b"\x01"})), STUDY, 1, None)


def test_evidence_that_names_another_model_than_the_ledger_is_found(world: SecureSites) -> None:
    keep(world)
    folder = f"sums/{NAME}"

    def swap(files: dict[str, bytes]) -> None:
        evidence = replace(world.evidence, model=world.evidence.base)
        files[f"{folder}/evidence.json"] = evidence_bytes(evidence)
        files[f"{folder}/model.safetensors"] = files[f"{folder}/base.safetensors"]

    with pytest.raises(BadData, match="the hospital's ledger names another model of round 1 than the evidence does"):
        check_sum(bundled(world, swap), STUDY, 1, None)


def test_a_model_that_is_not_the_sum_is_shown_by_the_bundle(tmp_path: Path) -> None:
    """The coordinator published it, the hospital found it out, and anybody can see it in its bundle."""
    world = SecureSites(tmp_path)
    world.run(1)
    path = world.model_file(1)
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with TensorFile(path) as file:
        world.models[-1] = file.manifest().digest()
    world.evidence = replace(world.evidence, model=world.models[-1])
    with pytest.raises(NotPermitted, match="is not what the sum of its updates gives"):
        world.check("bergen", 2)
    hospital = world.hospitals["bergen"]
    hospital.sums.by_hand(world.consent_of(hospital), 1, None, Interrupt(), keep=True)
    said = asked("--bundle", str(bundled(world)), code=77)
    assert "1 of 1 blocks looked at: the model is NOT what they give" in said
    assert "is not what its sum gives: block 0, `shared.bias`: the model has other values than the sum" in said
    world.close()


def evidence_bytes(evidence: SumEvidence) -> bytes:
    return canonical.dumps(evidence.document())


def test_opened_secrets_that_are_not_the_sites_are_found_without_any_vector(world: SecureSites) -> None:
    other = replace(world.evidence, self_masks={**world.evidence.self_masks, "charite": bytes(32)})
    change = {f"sums/{NAME}/evidence.json": evidence_bytes(other)}
    with pytest.raises(BadData, match="what was opened as the self mask of site `charite` is another than it had"):
        check_sum(bundled(world, lambda files: files.update(change)), STUDY, 1, None)


def test_too_few_signatures_are_found(world: SecureSites) -> None:
    few = replace(world.evidence, agreements=world.evidence.agreements[:2])
    change = {f"sums/{NAME}/evidence.json": evidence_bytes(few)}
    with pytest.raises(BadData, match="fewer than 3 sites have signed the set that was opened"):
        check_sum(bundled(world, lambda files: files.update(change)), STUDY, 1, None)


def test_what_a_bundle_lacks_is_named(world: SecureSites) -> None:
    path = bundled(world, lambda files: files.pop(f"sums/{NAME}/evidence.json"))
    with pytest.raises(BadData, match="holds nothing that the sum of round 1 of `hearts` can be checked with") as error:
        check_sum(path, STUDY, 1, None)
    assert error.value.hint == (
        "at the hospital, before round 3 begins: `site-agent audit sum hearts --round 1 --keep`; then a new bundle"
    )
    with pytest.raises(UsageProblem, match="the ledger in the bundle has no set of round 4 of `hearts`"):
        check_sum(path, STUDY, 4, None)

    def forget(files: dict[str, bytes]) -> None:
        for path in [path for path in files if path.startswith("consents/")]:
            del files[path]

    path = bundled(world, forget)
    with pytest.raises(BadData, match="the bundle has no approval of revision 1 of `hearts`, whose sum this is"):
        check_sum(path, STUDY, 1, None)
    data = bytearray(path.read_bytes())
    data[600] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises((BadData, Unavailable), match="does not verify"):
        check_sum(path, STUDY, 1, None)


def test_a_cut_vector_and_a_damaged_evidence_are_named(world: SecureSites) -> None:
    keep(world)
    vector = f"sums/{NAME}/bergen.vector"
    with pytest.raises(Unavailable, match=r"bergen\.vector is cut: block 1 is not in it"):
        check_sum(bundled(world, lambda files: files.update({vector: files[vector][:-3]})), STUDY, 1, None)
    evidence = f"sums/{NAME}/evidence.json"
    for damage in (b"{}", b"no", b"[]", b'{"attempt":7}'):
        with pytest.raises(BadData):
            check_sum(bundled(world, lambda files, damage=damage: files.update({evidence: damage})), STUDY, 1, None)  # type: ignore[misc]


def test_vectors_for_which_there_is_no_room_stay_outside(world: SecureSites, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(world)
    root = world.hospitals["bergen"].state.root
    assert {Path(path).name for path in bundle.sums_of(root)} == {
        "evidence.json", "amsterdam.vector", "bergen.vector", "charite.vector", "base.safetensors", "model.safetensors",
    }  # fmt: skip
    monkeypatch.setattr(bundle, "ROOM", 100)
    assert {Path(path).name for path in bundle.sums_of(root)} == {"evidence.json"}


def test_the_command_says_it_and_its_exit_code_too(world: SecureSites) -> None:
    path = bundled(world)
    first = "round 1 of `hearts`: the sum over amsterdam, bergen, charite"
    second = (
        "3 members signed exactly this set; what was opened is what its sites had signed; 2 of the others are known to "
        "the hospital's people"
    )
    assert said(world, path, code=4)[:2] == [first, second]
    assert said(world, path, code=4)[2].startswith("not shown: that the model is what the updates give")
    beside = keep(world)
    looked = "1 of 1 blocks looked at: the model is what they give, bit by bit"
    assert said(world, path, "--vectors", str(beside)) == [first, second, looked]
    assert "--keep goes without --bundle" in asked("--bundle", "b", "--keep", code=64)
    assert "--vectors goes with --bundle alone" in asked("--vectors", "v", code=64)
