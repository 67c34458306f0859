"""Secure aggregation at the gateway: real ledgers, policies and files of three hospitals, a coordinator in memory."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from site_agent import audit
from site_agent.audit.bundle import look
from site_agent.audit.facts import facts_of
from site_agent.audit.files import in_folder
from site_agent.audit.show import words
from site_agent.gateway.connection.interrupt import Interrupt
from site_agent.gateway.exit import egress
from site_agent.gateway.policy import policy as policies
from site_agent.gateway.policy import text as policy_text
from site_agent.gateway.policy.decisions import StudyRequest, decide, first_denial
from site_agent.state import formats
from tests.site_agent.secure_sites import DPO, SPECS, STUDY, SecureSites, write_model
from tools import verify_ledger
from wardround.errors import BadData, CannotWrite, NotPermitted, UsageProblem
from wardround.records.assignment import ModelRef
from wardround.records.secure_messages import SecureShown
from wardround.records.secure_messages import Shown as ShownKind
from wardround.signing import canonical
from wardround.tensors.files import TensorFile

COORDINATOR = "spiffe://test/coordinator"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SecureSites]:
    world = SecureSites(tmp_path)
    yield world
    world.close()


def test_the_sum_is_opened_and_the_next_model_follows_from_it(world: SecureSites) -> None:
    world.run(1)
    assert world.numbers.weight == 3
    assert abs(world.numbers.metrics["val_loss"] - 0.6931) < 1e-6
    plain = []
    for site in world.sites:
        with TensorFile(world.hospitals[site].state.own_copy(STUDY)) as file:
            plain.append(np.concatenate([file.block(spec.key, 0, spec.bytes // 4) for spec in SPECS]))
    mean = np.mean(np.stack(plain).astype(np.float64), axis=0)
    assert np.abs(world.layout.quantizer.mean(world.total, 3) - mean).max() < world.layout.quantizer.step


def test_the_ledger_says_what_left_and_neither_count_nor_metric_stands_beside_it(world: SecureSites) -> None:
    world.run(1)
    hospital = world.hospitals["bergen"]
    (upload,) = hospital.lines("upload")
    assert (upload["metrics"], upload["num_examples"], upload["num_validation"]) == ([], 0, 0)
    assert [row["name"] for row in upload["tensors"]] == ["tensors", "numbers"]
    assert upload["masked"]["weighting"] == "equal"
    (keys,), (agreed,), (opened,) = (hospital.lines(kind) for kind in ("keys", "agreed", "opened"))
    assert keys["context"] == upload["masked"]["context"] == agreed["context"]
    assert agreed["sites"] == list(world.sites)
    assert agreed["known"] == ["amsterdam", "charite"]
    assert opened["self_masks"] == list(world.sites)
    assert "mask_keys" in opened
    assert audit.verify(hospital.state.ledger)[1] != audit.TAMPERED


def test_a_restart_before_every_message_changes_nothing(world: SecureSites) -> None:
    world.restarts = True
    world.run(1)
    for site in world.sites:
        world.check(site, 2)
    world.run(2)
    for hospital in world.hospitals.values():
        assert [line["round"] for line in hospital.lines("agreed")] == [1, 2]
        assert [line["round"] for line in hospital.lines("opened")] == [1, 2]
        assert verify_ledger.judge(hospital.state.ledger)[0] == audit.verify(hospital.state.ledger)[1] != audit.TAMPERED


def test_the_secrets_of_an_attempt_lie_in_one_file_of_the_gateway_alone_and_go_with_the_study(
    world: SecureSites,
) -> None:
    world.run(1)
    hospital = world.hospitals["bergen"]
    (path,) = hospital.state.secure.glob("*.json")
    assert path.stat().st_mode & 0o777 == 0o600
    assert "secure" not in formats.KEPT
    root = json.loads(path.read_bytes())["state"]["root"]
    found = [one for one in hospital.folder.rglob("*") if one.is_file() and root.encode() in one.read_bytes()]
    assert found == [path]
    hospital.rounds.ended(STUDY)
    assert not list(hospital.state.secure.iterdir())


def test_the_sum_of_a_round_is_checked_before_the_next_model_is_trained_on(world: SecureSites) -> None:
    world.run(1)
    world.check("bergen", 2)
    (line,) = world.hospitals["bergen"].lines("sum_checked")
    assert (line["result"], line["looked_at"], line["of"], line["model"]) == ("same", [0], 1, world.models[1])
    world.check("bergen", 2)  # asked again: it was checked
    assert len(world.hospitals["bergen"].lines("sum_checked")) == 1


def test_without_its_check_the_next_rounds_set_is_not_signed(world: SecureSites) -> None:
    world.run(1)
    for site in ("amsterdam", "charite"):
        world.check(site, 2)
    world.open(2)
    world.upload(2, world.sites)
    world.agree(world.sites)
    hospital = world.hospitals["bergen"]
    assert hospital.declined == ["the sum of round 1 of `hearts` was not checked, so none of round 2 is signed"]
    assert [line["round"] for line in hospital.lines("agreed")] == [1]
    assert [line["what"] for line in hospital.lines("blocked")] == ["secure aggregation: set"]


def test_a_round_that_went_on_without_this_site_is_said_to_be_unchecked(tmp_path: Path) -> None:
    world = four_sites(tmp_path)
    hospital, others = world.hospitals["bergen"], ("amsterdam", "charite", "dublin")
    for site in others:
        world.check(site, 2)
    world.run(2, others)
    hospital.sums.before_training(world.consent_of(hospital), hospital.assignment(3), Interrupt())
    assert [line["result"] for line in hospital.lines("sum_checked")] == ["missed"]
    world.close()


@pytest.mark.parametrize("round_", [2, 0])
def test_a_model_of_a_round_that_never_was_is_not_trained_on(tmp_path: Path, round_: int) -> None:
    """Named as of another round than this site's last one, no sum would be checked that gives it."""
    world = four_sites(tmp_path)
    hospital = world.hospitals["bergen"]
    assignment = replace(hospital.assignment(3), base=ModelRef(round_, "ef" * 32))
    with pytest.raises(NotPermitted, match="shows signatures for another round" if round_ else "goes back behind"):
        hospital.sums.before_training(world.consent_of(hospital), assignment, Interrupt())
    assert not hospital.lines("sum_checked")
    world.close()


def test_a_revision_after_a_round_that_nobody_opened_may_have_other_sites(tmp_path: Path) -> None:
    world = SecureSites(tmp_path, ("amsterdam", "bergen", "charite", "dublin"))
    world.open(1)
    world.upload(1, world.sites)
    world.agree(world.sites)
    world.revise(rounds=6)
    world.run(1, ("amsterdam", "bergen", "charite"))
    assert len(world.models) == 2
    world.close()


def four_sites(folder: Path) -> SecureSites:
    """Of which three are enough; after a round."""
    world = SecureSites(folder, ("amsterdam", "bergen", "charite", "dublin"))
    world.run(1)
    return world


def test_another_attempt_masks_the_same_update_with_other_secrets(world: SecureSites) -> None:
    world.open(1)
    first = world.hospitals["bergen"].upload(1)
    world.open(1, attempt=2)
    second = world.hospitals["bergen"].upload(1, attempt=2)
    assert first.header.manifest != second.header.manifest
    commitments = {line["masked"]["plain"] for line in world.hospitals["bergen"].lines("upload")}
    assert len(commitments) == 2


def test_what_the_commitment_is_made_of_stays_here_and_opens_it(world: SecureSites) -> None:
    world.run(1)
    hospital = world.hospitals["charite"]
    (line,) = hospital.lines("upload")
    kept = json.loads((hospital.folder / "commitments" / f"{line['upload_id']}.json").read_bytes())
    assert canonical.digest({"salt": kept["salt"], "left": kept["left"]}) == line["masked"]["plain"]
    assert kept["left"]["metrics"] == [{"name": "val_loss", "value": "0.6931"}]


def test_a_value_beyond_the_range_is_named_and_nothing_is_recorded(world: SecureSites) -> None:
    world.open(1)
    hospital = world.hospitals["bergen"]
    write_model(hospital.state.own_copy(STUDY), 1, scale=40.0)
    masking = hospital.rounds.masking(hospital.journal(1), world.consent_of(hospital), Interrupt())
    with pytest.raises(BadData, match=r"in `shared\.weight` is beyond the study's range of 1$"):
        egress.record(
            hospital.ledger, hospital.policy, hospital.session.meter, hospital.journal(1), world.consent_of(hospital),
            hospital.state.own_copy(STUDY), masking=masking,
        )  # fmt: skip
    assert not hospital.lines("upload")


def test_an_upload_under_way_is_masked_again_with_the_same_bytes_after_a_restart(world: SecureSites) -> None:
    world.open(1)
    upload = world.hospitals["bergen"].upload(1)
    hospital = world.hospitals["bergen"] = world.hospitals["bergen"].restart()
    hospital.state.masked_copy(STUDY).unlink()
    masking = hospital.rounds.masking(hospital.journal(1), world.consent_of(hospital), Interrupt())
    with TensorFile(hospital.state.own_copy(STUDY)) as file:
        journal = replace(
            hospital.journal(1), upload_id=upload.header.upload_id, update_digest=file.manifest().digest()
        )
    again = egress.recorded(hospital.ledger, journal, hospital.policy.coordinator, None, masking)
    assert again is not None
    assert (again.header.manifest, again.header.submission) == (upload.header.manifest, upload.header.submission)
    assert again.line_spent
    assert again.update == upload.update


def test_the_policy_in_force_decides_and_a_study_in_clear_is_refused_where_it_wants_masks() -> None:
    asked = StudyRequest("hearts", COORDINATOR, SPECS, ("val_loss",), 4, "uniform", 100, 5)
    drafted = policies.parse(policy_text.draft(replace(asked, secure=True), "bergen").encode(), Path("policy.toml"))
    denial = first_denial(decide(drafted, asked))
    assert denial is not None
    assert (denial.what, denial.rule) == ("updates in clear", "secure_aggregation.required = true")
    assert first_denial(decide(drafted, replace(asked, secure=True))) is None


def test_a_policy_in_which_somebody_stands_alone_is_none() -> None:
    text = policy_text.draft(StudyRequest("hearts", COORDINATOR, SPECS, (), 4, "uniform", 100, secure=True), "bergen")
    with pytest.raises(BadData, match="with `colluding` 2, a sum in which nobody stands alone needs `min_sites` of at"):
        policies.parse(text.replace("colluding = 1 ", "colluding = 2 ").encode(), Path("policy.toml"))


def test_the_report_says_of_each_round_with_whom_what_was_opened_and_whether_the_sum_was_checked(
    world: SecureSites,
) -> None:
    world.run(1)
    for site in world.sites:
        world.check(site, 2)
    world.run(2)
    (study,) = facts_of([in_folder(world.hospitals["bergen"].state.ledger)], {}).studies
    everyone = "amsterdam, bergen, charite"
    assert study.sums == (
        ("1", everyone, "2", "self masks of the sum's sites", "1 of 1 blocks: is the model that came of it"),
        ("2", everyone, "2", "self masks of the sum's sites", "not yet"),
    )
    page = look(world.hospitals["bergen"].state.root).page()
    assert "Beside them: no metric; no number of rows: masked numbers have them." in page
    assert (
        page.index("the sum checked")
        < page.index("1 of 1 blocks: is the model that came of it")
        < page.index("not yet")
    )
    shown = [words(line) for line in audit.lines(world.hospitals["bergen"].state.ledger) if line.type == "sum_checked"]
    assert shown == ["hearts round 1.1: the sum is the model that came of it: 1 of 1 blocks looked at"]


def test_peers_are_listed_with_who_compared_their_keys(world: SecureSites) -> None:
    hospital = world.hospitals["bergen"]
    shown = hospital.peers.of_study(STUDY)
    assert [(row.site, row.here, bool(row.by)) for row in shown.members] == [
        ("amsterdam", False, True), ("bergen", True, False), ("charite", False, True)
    ]  # fmt: skip
    assert (shown.threshold, shown.colluding) == (3, 1)
    assert [line["site"] for line in hospital.lines("peer")] == ["amsterdam", "charite"]
    hospital.peers.know("charite", world.roster.fingerprint("charite").upper(), DPO)  # known already
    assert len(hospital.lines("peer")) == 2
    for site, mark, why in (
        ("charite", "ab" * 20, "is no fingerprint: 64 of 0-9 and a-f, all of them"),
        ("nowhere", "ab" * 32, "it is a member of no study with such keys"),
        ("bergen", world.roster.fingerprint("bergen"), "`bergen` is this site itself"),
    ):
        with pytest.raises(UsageProblem, match=why):
            hospital.peers.know(site, mark, DPO)
    with pytest.raises(UsageProblem, match="`dublin` is not among the peers that people here know"):
        hospital.peers.forget("dublin", DPO)
    hospital.peers.forget("charite", DPO)
    assert [line["event"] for line in hospital.lines("peer")] == ["known", "known", "forgotten"]


def test_what_a_person_asks_about_a_sum_is_answered_in_numbers(world: SecureSites) -> None:
    world.run(1)
    world.check("bergen", 2)
    hospital = world.hospitals["bergen"]
    found = hospital.sums.by_hand(world.consent_of(hospital), 1, None, Interrupt())
    assert (found.result, found.looked_at, found.of, found.sites) == ("same", (0,), 1, world.sites)
    with pytest.raises(UsageProblem, match="this site signed no set of round 4 of `hearts`"):
        hospital.sums.by_hand(world.consent_of(hospital), 4, None, Interrupt())
    hospital.rounds.attempts.keep_models(STUDY, ())
    with pytest.raises(BadData, match="the models of round 1 of `hearts` are not kept here any more"):
        hospital.sums.by_hand(world.consent_of(hospital), 1, None, Interrupt())


def torn(path: Path, older: bytes) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def emptied(path: Path, older: bytes) -> None:
    path.write_bytes(b"")


def of_another_round(path: Path, older: bytes) -> None:
    path.write_bytes(older)


def nested(path: Path, older: bytes) -> None:
    path.write_bytes(b"[" * 100_000)


def removed(path: Path, older: bytes) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [torn, emptied, of_another_round, nested, removed])
def test_a_damaged_file_of_an_attempt_costs_that_attempt_alone(
    damage: Callable[[Path, bytes], None], world: SecureSites, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody has to remove it first, and the agent does not end by it: what it signed before stands in the ledger."""
    world.run(1)
    for site in world.sites:
        world.check(site, 2)
    hospital = world.hospitals["bergen"]
    (path,) = hospital.state.secure.glob("*.json")
    older = path.read_bytes()
    world.open(2)
    hospital.begin(2)  # told again: it is due when the file is damaged
    damage(path, older)
    hospital.answer()
    hospital.answer(SecureShown(world.ref, ShownKind.SHARES, shares=world.attempt.shares_for("bergen")))
    found = damage in (torn, emptied, nested)
    assert bool(hospital.declined) == found
    with pytest.raises(BadData if found else NotPermitted, match="is damaged" if found else "has no secrets"):
        hospital.upload(2)
    world.open(2, attempt=2)
    assert (f"{path} is damaged" in caplog.text) == found
    world.upload(2, world.sites, attempt=2)
    world.agree(world.sites)
    world.unmask(world.sites)
    assert [(line["round"], line["attempt"]) for line in hospital.lines("opened")] == [(1, 1), (2, 2)]
    assert verify_ledger.judge(hospital.state.ledger)[0] == audit.verify(hospital.state.ledger)[1] != audit.TAMPERED


@pytest.mark.parametrize("file", ["evidence.json", "base.safetensors", "charite.vector"])
def test_a_disk_that_is_full_while_a_sum_is_kept_leaves_no_half_file(
    file: str, world: SecureSites, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run(1)
    world.check("bergen", 2)
    hospital = world.hospitals["bergen"]

    def full(real: Callable[..., int]) -> Callable[..., int]:
        def write(descriptor: int, *given: Any) -> int:
            if file in Path(f"/proc/self/fd/{descriptor}").readlink().name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, *given)

        return write

    with monkeypatch.context() as disk:
        for name in ("write", "pwrite", "sendfile"):
            disk.setattr(os, name, full(getattr(os, name)))
        with pytest.raises(CannotWrite, match="No space left on device"):
            hospital.sums.by_hand(world.consent_of(hospital), 1, None, Interrupt(), keep=True)
    (folder,) = hospital.state.sums.iterdir()
    vectors = [f"{site}.vector" for site in world.sites]
    names = ["evidence.json", "base.safetensors", "model.safetensors", *vectors]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names[: max(1, names.index(file))])
    found = hospital.sums.by_hand(world.consent_of(hospital), 1, None, Interrupt(), keep=True)
    assert found.result == "same"
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
