"""A malicious coordinator against the gateways of three hospitals: real ledgers, policies and files at each of them."""

import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from site_agent import audit
from site_agent.gateway.connection.interrupt import Interrupt
from site_agent.gateway.downloads import Downloads
from site_agent.gateway.enrolment.identity import Identity
from site_agent.gateway.enrolment.rollover import roll_over
from site_agent.gateway.exit import egress
from site_agent.gateway.round import Rounds
from site_agent.gateway.secure import checking, checks, terms
from site_agent.gateway.secure.due import MOST
from site_agent.state.directory import WITHDRAWN, Journal, SiteState, now_text
from tests.secure_world import key_of, public
from tests.site_agent import secure_sites
from tests.site_agent.secure_sites import DPO, SPECS, STUDY, Hospital, SecureSites, write_model
from tools import verify_ledger
from wardround.errors import BadData, NotPermitted, TryAgain, UsageProblem
from wardround.records.assignment import STOP, Assignment, ModelRef, StopReason
from wardround.records.secure_messages import SecureShown, SecureTold, Shown, SumEvidence, Told
from wardround.records.trainer import Finish
from wardround.secure import coordinator, layout, sums
from wardround.secure.statements import Submission
from wardround.signing.dsse import Envelope
from wardround.tensors.files import TensorFile
from wardround.tensors.manifests import TensorSpec


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SecureSites]:
    world = SecureSites(tmp_path, section={})
    yield world
    world.close()


@pytest.fixture
def four(tmp_path: Path) -> Iterator[SecureSites]:
    """With one more than a sum needs."""
    world = SecureSites(tmp_path, ("amsterdam", "bergen", "charite", "dublin"))
    yield world
    world.close()


@pytest.mark.attack(promise="P12", refused_by="site_agent/gateway/secure/exchange.py")
def test_a_second_opening_of_a_round_after_a_restart(world: SecureSites) -> None:
    """The pledge is the ledger's own line: without the round's file it stands all the same."""
    world.run(1)
    hospital = world.hospitals["bergen"] = world.hospitals["bergen"].restart()
    world.open(1, attempt=2)
    world.upload(1, world.sites, attempt=2)
    world.agree(world.sites)
    hospital = world.hospitals["bergen"]
    assert [line["attempt"] for line in hospital.lines("agreed")] == [1]
    assert hospital.declined
    with pytest.raises(TryAgain):
        coordinator.unmasking(world.attempt)


@pytest.mark.attack(promise="P12", refused_by="site_agent/gateway/secure/exchange.py")
def test_an_older_state_directory_that_was_restored_signs_no_second_set_with_the_others(world: SecureSites) -> None:
    """It forgets its pledge and is one of those that may: the others' signatures do not suffice. Its masks are new, for
    its secrets lie in no backup."""
    backup = world.folder / "backup"
    world.hospitals["bergen"].ledger.close()
    shutil.copytree(world.folder / "bergen", backup, ignore=shutil.ignore_patterns("secure"))
    world.hospitals["bergen"] = world.hospitals["bergen"].restart()
    world.run(1)
    before = world.vectors["bergen"]
    world.hospitals["bergen"].ledger.close()
    shutil.rmtree(world.folder / "bergen")
    shutil.copytree(backup, world.folder / "bergen")
    world.hospitals["bergen"] = world.hospitals["bergen"].restart()
    world.models.pop()
    world.open(1, attempt=2)
    world.upload(1, world.sites, attempt=2)
    assert world.vectors["bergen"] != before
    world.agree(world.sites)
    assert set(world.attempt.agreements) == {"bergen"}
    assert not world.attempt.is_agreed


@pytest.mark.attack(promise="P12", refused_by="site_agent/gateway/peers.py")
def test_a_ghost_member_among_those_that_nobody_here_knows(world: SecureSites) -> None:
    """An invented member signs whatever it is asked: who is unknown counts as colluding before anybody approves."""
    hospital = world.hospitals["bergen"]
    hospital.peers.forget("charite", DPO)
    offer = hospital.state.offer(STUDY)
    with pytest.raises(NotPermitted, match="nobody here knows `charite`"):
        hospital.peers.refuse_roster(offer, hospital.policy.policy())
    with pytest.raises(NotPermitted, match="nobody here knows `charite`"):
        hospital.begin(1)
    assert not hospital.lines("keys")


@pytest.mark.attack(promise="P12", refused_by="site_agent/gateway/peers.py")
def test_another_key_than_the_one_that_was_read_out_by_telephone(world: SecureSites) -> None:
    """The coordinator shows its own key as a member's: the fingerprint that people heard is another, and it says so."""
    hospital = world.hospitals["bergen"]
    with pytest.raises(UsageProblem, match=r"`charite` has no key with the fingerprint .*: its key there is") as error:
        hospital.peers.know("charite", public("dublin").hex(), DPO)
    assert "the coordinator shows another: approve nothing" in error.value.hint


@pytest.mark.attack(promise="P12", refused_by="site_agent/gateway/secure/checks.py")
def test_an_altered_model_is_not_trained_on(world: SecureSites) -> None:
    """One value of the published model is another than the sum gives: the site says so and goes no further."""
    world.run(1)
    path = world.model_file(1)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with TensorFile(path) as file:
        world.models[-1] = file.manifest().digest()
    world.evidence = replace(world.evidence, model=world.models[-1])
    with pytest.raises(NotPermitted, match=r"is not what the sum of its updates gives: block 0, `shared\.bias`"):
        world.check("bergen", 2)
    hospital = world.hospitals["bergen"]
    assert [line["result"] for line in hospital.lines("sum_checked")] == ["other"]
    with pytest.raises(NotPermitted):  # asked again: it stays so
        world.check("bergen", 2)


@pytest.mark.attack(promise="P12", refused_by="site_agent/gateway/secure/checks.py")
def test_an_altered_model_asked_again_until_the_sample_misses_it(
    twenty: SecureSites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a model's blocks are the coordinator's own. The site found one, and said that it goes on no further. It
    was asked again, drew other blocks, and trained on it: each try is another draw, and nothing counted them."""
    hospital, drawn = twenty.hospitals["bergen"], checking.drawn
    twenty.models[-1] = craft(twenty, 13)
    twenty.evidence = replace(twenty.evidence, model=twenty.models[-1])
    monkeypatch.setattr(checks, "drawn", lambda layout, count: (13,))
    with pytest.raises(NotPermitted, match=r"is not what the sum of its updates gives: block 13"):
        twenty.check("bergen", 2)
    monkeypatch.setattr(checks, "drawn", lambda layout, count: (1, 2, 3, 4))
    for attempt in (1, 2):
        with pytest.raises(NotPermitted, match=r"round 1 of `hearts` was found to be another than its sum gives"):
            hospital.sums.before_training(
                twenty.consent_of(hospital), hospital.assignment(2, attempt=attempt), Interrupt()
            )
    monkeypatch.setattr(checks, "drawn", drawn)
    for begun_anew in (Hospital.restart, Hospital.roll_over):
        hospital = twenty.hospitals["bergen"] = begun_anew(hospital)
        twenty.models[-1] = craft(twenty, 14)  # another one each time
        with pytest.raises(NotPermitted, match="was found to be another"):
            twenty.check("bergen", 2)
    assert [line["result"] for line in hospital.lines("sum_checked")] == []  # of the new ledger


@pytest.mark.attack(promise="P12", refused_by="site_agent/gateway/secure/checks.py")
def test_another_best_model_at_the_end(
    world: SecureSites, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every sum was checked. At the end the coordinator calls a model of its own that of round 1, the best: no site
    trains on it, so none compared it, and it was what each hospital kept, and would use."""
    world.run(1)
    world.check("bergen", 2)
    hospital, asked = world.hospitals["bergen"], list[Any]()
    monkeypatch.setattr(Downloads, "fetch", lambda self, assignment, ref, *more: ref.digest)
    monkeypatch.setattr(Rounds, "_ask", lambda self, request, *more: asked.append(request))
    own = write_model(world.folder / "own.safetensors", 99).digest()
    for round_, model in ((1, own), (0, own), (77, own), (1, world.models[1])):
        rounds = Rounds(
            hospital.state, hospital.site, hospital.session, hospital.ledger, cast(Any, None), print, hospital.rounds
        )
        end = replace(hospital.assignment(2), kind=STOP, reason=StopReason.FINISHED, best=ModelRef(round_, model))
        rounds.do(end, Interrupt())
        hospital.state.save_journal(Journal(STUDY, 1, world.digest))
    kept = [request.best for request in asked if isinstance(request, Finish)]
    assert [best and (best.round, best.file) for best in kept] == [None, None, None, (1, world.models[1])]
    assert caplog.text.count("is not the one that was checked here") == 3
    hospital = hospital.roll_over()
    assert hospital.sums.believed(world.consent_of(hospital), ModelRef(1, own)) is None
    world.hospitals["bergen"] = hospital


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/round.py")
def test_models_of_no_sum_without_end(world: SecureSites, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that no sum gives is not trained on. But it was kept beside those that sums are checked with: one more
    for each round that the study has, until the hospital's disk was full."""
    world.run(1)
    world.check("bergen", 2)
    hospital = world.hospitals["bergen"]
    before = sorted(path.name for path in hospital.state.secure.glob("*.safetensors"))

    def fetch(self: Downloads, assignment: Assignment, model: ModelRef, *more: Any) -> str:
        more[-1].write_bytes(world.folder.joinpath("crafted.safetensors").read_bytes())
        return "base"

    monkeypatch.setattr(Downloads, "fetch", fetch)
    rounds = Rounds(
        hospital.state, hospital.site, hospital.session, hospital.ledger, cast(Any, None), print, hospital.rounds
    )
    for round_ in (2, 3, 4, 5):
        model = write_model(world.folder / "crafted.safetensors", 100 + round_).digest()
        with pytest.raises(NotPermitted, match=r"another model of round 1|shows signatures for another round"):
            rounds.do(replace(hospital.assignment(round_), base=ModelRef(round_ - 1, model)), Interrupt())
    assert sorted(path.name for path in hospital.state.secure.glob("*.safetensors")) == before


def craft(world: SecureSites, block: int) -> str:
    """Make the model of round 1 another one in that block. Its digest."""
    world.model_file(1).write_bytes(altered(world, block))
    with TensorFile(world.model_file(1)) as file:
        return file.manifest().digest()


def crafted(world: SecureSites, round_: int, of: int) -> Assignment:
    """An assignment with a model that no sum gives, said to be that of round ``of``; and evidence that says so too."""
    model = write_model(world.folder / "crafted.safetensors", 99).digest()
    world.evidence = replace(world.evidence, model=model)
    return replace(world.hospitals["bergen"].assignment(round_), base=ModelRef(of, model))


@pytest.mark.attack(promise="P12", refused_by="site_agent/gateway/secure/checks.py")
@pytest.mark.parametrize("of", [1, 0])
def test_a_crafted_model_once_the_true_one_was_checked(world: SecureSites, of: int) -> None:
    """Every site has checked round 1 with the true model; then the coordinator gives round 2 up, and asks round 3 from
    a model of its own, which it calls that of round 1, or the one that the study begins with. All trained on it."""
    world.run(1)
    world.check("bergen", 2)
    hospital = world.hospitals["bergen"]
    with pytest.raises(NotPermitted, match="another model of round 1" if of else "goes back behind round 1"):
        hospital.sums.before_training(world.consent_of(hospital), crafted(world, 3, of), Interrupt())
    hospital = hospital.restart()
    with pytest.raises(NotPermitted):
        hospital.sums.before_training(world.consent_of(hospital), crafted(world, 3, of), Interrupt())
    world.hospitals["bergen"] = hospital
    hospital.sums.before_training(world.consent_of(hospital), hospital.assignment(2, attempt=2), Interrupt())


@pytest.mark.attack(promise="P12", refused_by="site_agent/gateway/secure/checking.py")
def test_a_crafted_model_of_a_round_that_was_signed_and_never_opened(world: SecureSites) -> None:
    """All sign the set of round 2; the coordinator shows nobody the signatures, so that nobody opens it and has its sum
    to check, and asks round 3 from a model of its own. The signatures were all that was looked at."""
    world.run(1)
    for site in world.sites:
        world.check(site, 2)
    world.open(2)
    world.upload(2, world.sites)
    world.agree(world.sites)
    assert world.attempt.is_agreed
    world.evidence = SumEvidence(
        world.ref, tuple(world.attempt.keys[site] for site in world.attempt.group), world.attempt.shown_set(),
        world.attempt.shown_agreements(), dict.fromkeys(world.sites, bytes(32)), {}, world.models[-1], "",
    )  # fmt: skip
    hospital = world.hospitals["bergen"]
    with pytest.raises(BadData, match="what was opened as the self mask of site `amsterdam` is another"):
        hospital.sums.before_training(world.consent_of(hospital), crafted(world, 3, 2), Interrupt())


@pytest.mark.attack(promise="P12", refused_by="site_agent/gateway/secure/checking.py")
def test_an_altered_block_of_one_sites_vector_is_found(world: SecureSites) -> None:
    """What is shown of a vector must be what its site signed, whoever asks."""
    world.run(1)
    block = bytearray(world.vectors["amsterdam"][0])
    block[0] ^= 1
    world.vectors["amsterdam"][0] = bytes(block)
    hospital, found = world.hospitals["bergen"], "block 0 of site `amsterdam` is not what it had signed"
    with pytest.raises(BadData, match=found):
        world.check("bergen", 2)
    assert not hospital.lines("sum_checked")
    with pytest.raises(BadData, match=found):
        hospital.sums.by_hand(world.consent_of(hospital), 1, None, Interrupt())


@pytest.mark.attack(promise="P12", refused_by="site_agent/gateway/secure/exchange.py")
def test_a_set_without_this_sites_vector_as_it_sent_it(world: SecureSites) -> None:
    """A site signs no set in which its own update is missing or another."""
    world.open(1)
    world.upload(1, world.sites)
    without = tuple(world.attempt.submissions[site] for site in ("amsterdam", "charite"))
    hospital = world.hospitals["bergen"]
    hospital.answer(SecureShown(world.ref, Shown.SET, without))
    assert hospital.declined == ["the set does not hold this site's vector as it sent it"]
    assert not hospital.lines("agreed")


@pytest.mark.attack(promise="P12", refused_by="proto/wardround/secure/policy.py")
def test_a_lower_threshold_than_the_sites_policy_stands(tmp_path: Path) -> None:
    """A study may name its threshold; that it stands who may collude is each site's own arithmetic."""
    world = SecureSites(tmp_path, section={"threshold": 2})
    hospital = world.hospitals["bergen"]
    with pytest.raises(BadData, match=r"a threshold of 2 of 3 sites does not stand 1 that collude"):
        hospital.begin(1)
    assert not hospital.lines("keys")
    world.close()


@pytest.mark.attack(promise="P12", refused_by="proto/wardround/secure/policy.py")
def test_another_revision_from_the_same_model_with_one_site_less(tmp_path: Path) -> None:
    """All four approve another revision, which has a round more. It begins with the same model, and dublin is said to
    be late: the difference of the two sums was dublin's update, to the bit."""
    world = SecureSites(tmp_path, ("amsterdam", "bergen", "charite", "dublin"))
    world.run(1)
    total = world.total
    with TensorFile(world.hospitals["dublin"].state.own_copy(STUDY)) as own:
        alone = world.layout.quantized(own.block, 1, 0, world.layout.elements)
    world.revise(rounds=6)
    there = world.open(1, sites=("amsterdam", "bergen", "charite"))
    world.upload(1, there)
    world.agree(there)
    told = [world.hospitals[site].declined for site in there]
    if not any(told):
        world.unmask(there)
        assert not np.array_equal(total - world.total, alone), "dublin's update is the difference of two sums"
    assert all("of the study with digest" in one and "began with the same model" in one for (one,) in told)
    assert not world.attempt.agreements
    world.close()


def rolled_over(world: SecureSites, site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`audit rollover` at a site, which is started again."""
    monkeypatch.setattr(SiteState, "site", lambda self: None)
    monkeypatch.setattr(Identity, "ledger_key", lambda self: key_of(site))
    world.hospitals[site].ledger.close()
    roll_over(world.hospitals[site].state)
    world.hospitals[site] = world.hospitals[site].restart()


@pytest.mark.attack(promise="P2", refused_by="site_agent/gateway/secure/exchange.py")
def test_an_honest_ledger_called_changed_for_it_was_rolled_over_in_a_round(
    world: SecureSites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator takes a ledger no longer between signature and opening. The new one had an opening of a set that
    no line of it agrees to: both verifiers called the hospital's ledger changed."""
    world.open(1)
    world.upload(1, world.sites)
    world.agree(world.sites)
    rolled_over(world, "bergen", monkeypatch)
    world.unmask(world.sites)
    hospital = world.hospitals["bergen"]
    assert [line["round"] for line in hospital.lines("opened")] == [1]
    verdict, code = audit.verify(hospital.state.ledger)
    assert code != audit.TAMPERED, verdict.reason
    assert verify_ledger.judge(hospital.state.ledger)[0] == code


@pytest.mark.attack(promise="P12", refused_by="site_agent/gateway/exit/pledged.py")
def test_a_second_set_after_the_ledgers_were_rolled_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of round 1 is opened. Then the coordinator takes three ledgers no longer, so that their people begin new
    ones, as the hint says, in which no set was ever signed: round 1 again, without dublin."""
    world = SecureSites(tmp_path, ("amsterdam", "bergen", "charite", "dublin"))
    world.run(1)
    there = ("amsterdam", "bergen", "charite")
    for site in there:
        world.check(site, 2)
        rolled_over(world, site, monkeypatch)
        assert not world.hospitals[site].lines("agreed")
    world.models.pop()
    world.open(1, attempt=2, sites=there)
    world.upload(1, there, attempt=2)
    world.agree(there)
    for site in there:
        assert world.hospitals[site].declined == [
            "this site has signed another set for round 1 and signs no second one"
        ]
    assert not world.attempt.agreements
    world.close()


@pytest.mark.attack(promise="P12", refused_by="site_agent/gateway/policy/decisions.py")
def test_a_study_in_clear_where_the_policy_wants_masks(world: SecureSites) -> None:
    """The coordinator offers the same study without its table: nothing of it is recorded, nothing leaves."""
    hospital = world.hospitals["bergen"]
    consent = world.consent_of(hospital)
    document = {name: table for name, table in consent.document.items() if name != "secure_aggregation"}
    own = hospital.state.own_copy(STUDY)
    write_model(own, 1)
    with pytest.raises(NotPermitted, match=r"updates in clear: secure_aggregation\.required = true"):
        egress.record(
            hospital.ledger, hospital.policy, hospital.session.meter, hospital.journal(1),
            replace(consent, document=document), own,
        )  # fmt: skip
    assert not hospital.lines("upload")


@pytest.mark.attack(promise="P2", refused_by="site_agent/gateway/secure/exchange.py")
@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('studies = ["hearts"]', 'studies = ["kidneys"]', "the policy blocks round 1 of `hearts`: "),
        ("min_sites = 3", "min_sites = 4", "a set of 3 sites, at least 4 are summed"),
    ],
)
def test_a_sum_opened_after_the_policy_forbade_it(world: SecureSites, before: str, after: str, said: str) -> None:
    """Vectors are there and the set is signed; the hospital sees with whom, and forbids it. Its shares left all the
    same: the policy was asked about the signature alone."""
    world.open(1)
    world.upload(1, world.sites)
    world.agree(world.sites)
    hospital = world.hospitals["bergen"]
    text = hospital.state.policy.read_text()
    assert before in text
    hospital.state.policy.write_text(text.replace(before, after))
    hospital.answer(SecureShown(world.ref, Shown.AGREEMENTS, world.attempt.shown_agreements()))
    assert "bergen" not in world.attempt.openings
    assert not hospital.lines("opened")
    (declined,) = hospital.declined
    assert declined.startswith(said)
    hospital.state.policy.write_text(text)  # and again as it was: the round goes on
    hospital.answer(SecureShown(world.ref, Shown.AGREEMENTS, world.attempt.shown_agreements()))
    assert "bergen" in world.attempt.openings


def withdraws(hospital: Hospital) -> None:
    consent = hospital.world.consent_of(hospital)
    hospital.state.save_consent(replace(consent, state=WITHDRAWN, withdrawn_by=DPO, withdrawn_at=now_text()))


def forbids(hospital: Hospital) -> None:
    hospital.state.policy.write_text(hospital.state.policy.read_text().replace('["hearts"]', '["lungs"]'))


@pytest.mark.attack(promise="P6", refused_by="site_agent/gateway/secure/exchange.py")
@pytest.mark.parametrize("people", [withdraws, forbids])
@pytest.mark.parametrize("step", [Told.SHARES, Told.AGREEMENT, Told.OPENING])
def test_told_after_it_was_withdrawn(
    four: SecureSites, people: Callable[[Hospital], None], step: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator does not take what a site tells, so that it is told again and again. The hospital withdraws the
    study, or its policy forbids it; then the coordinator takes it: shares, a signature, what opens the sum."""
    hospital = four.hospitals["bergen"]
    tell, told = hospital.session.tell, list[Told]()

    def tells(one: SecureTold) -> None:
        if one.kind == step and not told:
            told.append(one.kind)
            raise TryAgain("it is in trouble", code="TOO_BUSY")
        tell(one)

    monkeypatch.setattr(hospital.session, "tell", tells)
    monkeypatch.setattr(hospital.session, "pause", lambda *_: people(hospital))
    four.open(1)
    if step != Told.SHARES:
        four.upload(1, four.sites)
        four.agree(four.sites)
        for site in four.sites if step == Told.OPENING else ():
            four.show(site, SecureShown(four.ref, Shown.AGREEMENTS, four.attempt.shown_agreements()))
    assert told == [step]
    attempt = four.attempt
    taken = {Told.SHARES: attempt.group, Told.AGREEMENT: attempt.agreements, Told.OPENING: attempt.openings}[step]
    assert "amsterdam" in taken
    assert "bergen" not in taken
    assert hospital.declined


@pytest.mark.attack(promise="P11", refused_by="proto/wardround/signing/canonical.py")
@pytest.mark.parametrize(
    "payload", [b'{"\\ud800":1.5}', b'{"%s":1.5}' % (b"x" * 9000), b'{"\\u001b[2J":1.5}', b'{"site":"\\udfff"}']
)
def test_half_a_character_in_a_statement_that_is_shown(world: SecureSites, payload: bytes) -> None:
    """The sentence about a statement that is none names the place, by a key of the coordinator's. With half a character
    in it, it could not stand in the ledger, and the agent ended; started again, it was shown the same."""
    world.open(1)
    hospital = world.hospitals["bergen"]
    hospital.answer(SecureShown(world.ref, Shown.SET, (Envelope(Submission.TYPE, payload, "ab", bytes(64)),)))
    (line,) = hospital.lines("blocked")
    assert len(line["rule"]) < 300
    assert line["rule"].isprintable()
    assert len(hospital.declined) == 1
    world.open(1, attempt=2)
    world.upload(1, world.sites, attempt=2)
    world.agree(world.sites)
    world.unmask(world.sites)


@pytest.mark.attack(promise="P11", refused_by="site_agent/gateway/secure/due.py")
def test_shown_without_end(world: SecureSites, caplog: pytest.LogCaptureFixture) -> None:
    """A coordinator shows more than a site can look at: each message was kept until its turn, and had its line in the
    log. Of each step the newest waits; what this site has to tell itself is never left out."""
    world.open(1)
    hospital = world.hospitals["bergen"]
    garbage = tuple(Envelope("x", b"{}", "ab", bytes(64)) for _ in range(3))
    for number in range(2000):
        hospital.rounds.shown(SecureShown(replace(world.ref, study=f"s{number}"), Shown.KEYS, garbage))
        hospital.rounds.shown(SecureShown(world.ref, Shown.SET, garbage))
    hospital.rounds.begin(hospital.assignment(1), world.consent_of(hospital))
    due = hospital.rounds._due
    assert len(due._waiting) <= MOST + 1
    assert any(isinstance(one, SecureTold) for one in due._waiting.values())
    for _ in range(200):
        hospital.answer(SecureShown(world.ref, Shown.SET, garbage))
    said = [record for record in caplog.records if "secure aggregation" in record.getMessage()]
    assert len(said) < 50
    assert len(hospital.lines("blocked")) < 50


@pytest.mark.attack(promise="P12", refused_by="site_agent/audit/secure.py")
def test_a_ledger_that_opens_both_secrets_of_a_site_passes_no_verifier(world: SecureSites) -> None:
    """Written by a program that was changed: both verifiers name the line."""
    world.run(1)
    hospital = world.hospitals["bergen"]
    (line,) = [one for one in audit.lines(hospital.state.ledger) if one.type == "opened"]
    hospital.ledger.append(replace(line.entry, mask_keys=("charite",), more={}))
    hospital.ledger.sign()
    first, code = audit.verify(hospital.state.ledger)
    assert (code, first.reason.endswith("shares of both kinds of site `charite` were opened")) == (audit.TAMPERED, True)
    assert verify_ledger.judge(hospital.state.ledger)[:2] == (audit.TAMPERED, first.first_bad)


@pytest.mark.attack(promise="P12", refused_by="site_agent/gateway/exit/masked.py")
def test_planted_numbers_of_one_site_stand_in_nothing_that_was_sent(world: SecureSites) -> None:
    """The search finds the same bytes in the hospital's own copy, so it works."""
    world.open(1)
    upload = world.hospitals["bergen"].upload(1)
    world.take("bergen", upload)
    with TensorFile(world.hospitals["bergen"].state.own_copy(STUDY)) as file:
        planted = [file.block(spec.key, 0, 2).tobytes() for spec in SPECS]
        own = b"".join(data for _, data in file.chunks())
    sent = upload.header.to_message().SerializeToString() + b"".join(world.vectors["bergen"])
    assert all(one in own for one in planted)
    assert not any(one in sent for one in planted)
    assert b"0.6931" not in sent
    assert (upload.header.metrics, upload.header.num_examples, upload.header.num_validation) == ((), 0, 0)


@pytest.fixture
def twenty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SecureSites]:
    """A round of vectors of twenty blocks, which are of eight elements here."""
    for module in (layout, sums, checking, secure_sites):
        monkeypatch.setattr(module, "ELEMENTS", 8)
    monkeypatch.setattr(secure_sites, "SPECS", (TensorSpec("shared.weight", "F32", (13, 12)),))
    world = SecureSites(tmp_path)
    assert world.layout.blocks == BLOCKS
    world.run(1)
    yield world
    world.close()


BLOCKS = 20


@pytest.mark.attack(promise="P12", refused_by="site_agent/gateway/secure/checking.py")
def test_an_altered_block_of_one_sites_vector_in_the_model_is_found_by_the_full_check_always(
    twenty: SecureSites,
) -> None:
    """It shows what the sites signed, and made the model of something else: the full check says in which block."""
    hospital, found = twenty.hospitals["bergen"], []
    for number in (0, 1):
        twenty.download("bergen", number)
    for block in range(BLOCKS):
        hospital.rounds.attempts.model(STUDY, twenty.models[1]).write_bytes(altered(twenty, block))
        found.append(looked(twenty, range(BLOCKS)))
    assert found == [("other", block) for block in range(BLOCKS)]
    for site in twenty.sites:
        for block in range(BLOCKS):
            honest = twenty.vectors[site][block]
            twenty.vectors[site][block] = bytes([honest[0] ^ 1]) + honest[1:]
            with pytest.raises(BadData, match=f"block {block} of site `{site}` is not what it had signed"):
                looked(twenty, range(BLOCKS))
            twenty.vectors[site][block] = honest


@pytest.mark.attack(promise="P12", refused_by="site_agent/gateway/secure/checking.py")
def test_an_altered_block_is_found_by_samples_at_the_rate_that_the_page_computes(twenty: SecureSites) -> None:
    """A sample finds it exactly if it looks at that block; and the blocks are drawn with the chance of the page."""
    hospital, bad = twenty.hospitals["bergen"], 13
    twenty.download("bergen", 0)
    hospital.rounds.attempts.model(STUDY, twenty.models[1]).write_bytes(altered(twenty, bad))
    for block in range(BLOCKS):
        sample = [block, (block + 1) % BLOCKS, (block + 2) % BLOCKS]
        assert looked(twenty, sorted(sample)) == (("other", bad) if bad in sample else ("same", None))
    draws, rate = 20_000, 1 - sums.chance_to_miss(BLOCKS, 1, checking.SAMPLE)
    assert rate == pytest.approx(checking.SAMPLE / BLOCKS)
    met = sum(bad in checking.drawn(twenty.layout, checking.SAMPLE) for _ in range(draws))
    assert abs(met / draws - rate) < 5 * math.sqrt(rate * (1 - rate) / draws)


def altered(world: SecureSites, block: int) -> bytes:
    """The round's model with another value in a block."""
    data = bytearray(world.model_file(1).read_bytes())
    place = len(data) - 4 * world.layout.elements + 4 * 8 * block
    data[place] ^= 1
    return bytes(data)


def looked(world: SecureSites, blocks: Iterable[int]) -> tuple[str, int | None]:
    """What a look at some blocks finds, and in which."""
    hospital = world.hospitals["bergen"]
    ((agreed, _),) = hospital.ledger.pledged.sets()
    base, model = (hospital.rounds.attempts.model(STUDY, digest) for digest in world.models)
    sum_ = terms.sum_of(world.consent_of(hospital), agreed, base, model)
    found = checking.check(sum_, world.evidence, hospital.session, list(blocks))
    return found.result, int(found.why.split()[1].rstrip(",")) if found.why else None
