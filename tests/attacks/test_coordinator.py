"""A malicious coordinator: it may say anything to a site, and offer and ask for whatever it likes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from site_agent.gateway import offers
from tests.attacks.approving import swap
from tests.site_agent.site_world import PERSON, STUDY, SiteWorld, document
from tests.site_agent.test_cli import Shell
from wardround.errors import NeedsPerson, UsageProblem

LAST_UINT32 = 2**32 - 1


@pytest.fixture
def site(tmp_path: Path) -> Iterator[SiteWorld]:
    """One hospital over real TLS, with a coordinator and a trainer that do as a test says."""
    world = SiteWorld(tmp_path)
    try:
        yield world
    finally:
        world.close()


def refused_beyond(site: SiteWorld, uploads: int) -> None:
    """The site said that it is asked beyond its consent, and sent nothing more than so many uploads."""
    site.coordinator.wait_declared("DECLINED", "DECLINED_BEYOND_CONSENT")
    site.coordinator.declared.clear()
    assert len(site.coordinator.uploads) == len(site.lines("upload")) == uploads


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/consent.py")
def test_rounds_beyond_consent(site: SiteWorld) -> None:
    """A study of three rounds is asked for rounds that it has not, for its first round again, and after a restart."""
    site.ready()
    for asked in (4711, 4712, LAST_UINT32 - 1, 0):
        site.coordinator.assign(STUDY, asked)
        refused_beyond(site, 0)
    site.coordinator.assign(STUDY, 2)
    site.coordinator.wait_receipts(1)
    site.coordinator.assign(STUDY, 1)
    refused_beyond(site, 1)
    site.restart()
    site.coordinator.wait_connected()
    site.coordinator.assign(STUDY, 1, attempt=2)
    refused_beyond(site, 1)
    (site.state.root / "journal" / f"{STUDY}.json").unlink()  # the ledger alone knows enough
    site.coordinator.assign(STUDY, 1, attempt=3)
    refused_beyond(site, 1)


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/consent.py")
def test_rounds_beyond_consent__validations(site: SiteWorld) -> None:
    """Numbers of models that the coordinator chooses, without a byte of an update: 40 were answered."""
    site.ready()
    site.coordinator.assign(STUDY, 2, kind="validate")
    refused_beyond(site, 0)
    site.coordinator.assign(STUDY, 4, kind="validate")
    site.coordinator.wait_receipts(1)
    site.coordinator.models[1] = site.another_model(seed=1)
    site.coordinator.assign(STUDY, 4, attempt=2, kind="validate", base=1)
    refused_beyond(site, 1)
    site.coordinator.assign(STUDY, 5, kind="validate")
    refused_beyond(site, 1)


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/consent.py")
def test_rounds_beyond_consent__attempts(site: SiteWorld) -> None:
    """One round is asked again and again, by an attempt far away or one that was before."""
    site.ready()
    site.coordinator.assign(STUDY, 1, attempt=2)
    site.coordinator.wait_receipts(1)
    for attempt in (1, 0, 9, LAST_UINT32):
        site.coordinator.assign(STUDY, 1, attempt=attempt)
        refused_beyond(site, 1)


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/consent.py")
def test_rounds_beyond_consent__revision(site: SiteWorld) -> None:
    """The same digest under a revision that nobody saw would begin every round, and every quota, anew."""
    site.ready()
    site.coordinator.assign(STUDY, 1)
    site.coordinator.wait_receipts(1)
    site.coordinator.offers[STUDY].revision = 77
    site.coordinator.assign(STUDY, 1)
    refused_beyond(site, 1)


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/policy.py")
def test_rounds_beyond_consent__numbers(site: SiteWorld) -> None:
    """What tells no tensor is counted too: each attempt at the closing round tells its numbers again."""
    site.join()
    site.offer()
    site.start()
    site.draft(("numbers_per_round = 16", "numbers_per_round = 9"))  # two metrics and two counts, told three times
    site.approve()
    assert site.trainer is not None
    site.trainer.metrics = {"val_loss": "0.5", "accuracy": "0.7"}
    for attempt in (1, 2):
        site.coordinator.assign(STUDY, 4, attempt=attempt, kind="validate")
        site.coordinator.wait_receipts(attempt)
    site.coordinator.assign(STUDY, 4, attempt=3, kind="validate")
    site.coordinator.wait_declared("DECLINED", "DECLINED_POLICY")
    assert len(site.coordinator.uploads) == 2
    (line,) = site.lines("blocked")
    assert (line["what"], line["rule"]) == ("12 numbers in this round", "quotas.numbers_per_round = 9")


def kept(site: SiteWorld) -> set[str]:
    return {path.stem for path in (site.state.root / "offers").iterdir()}


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/offers.py")
def test_offers_without_end(site: SiteWorld, caplog: pytest.LogCaptureFixture) -> None:
    """Two hundred offers of 100 kB each fill a disk; those that are kept cannot push out what was approved."""
    site.ready()
    model = site.another_model(seed=0)
    for number in range(80):
        site.coordinator.offer(document(name=f"study-{number}", title="x" * 100_000), model)
    site.coordinator.offer(document(name="one-too-large", title="x" * offers.MAX_BYTES), model)
    site.coordinator.assign(STUDY, 1)
    site.coordinator.wait_receipts(1)  # what was offered before it was looked at by now
    assert kept(site) == {STUDY, *(f"study-{number}" for number in range(offers.MAX_OFFERS))}
    assert "the coordinator's offer of study `study-64` is not kept: 64 offers of " in caplog.text
    assert "the coordinator's offer of study `one-too-large` is not kept: it has 1049" in caplog.text


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/offers.py")
def test_offers_without_end__bytes(site: SiteWorld) -> None:
    """Fewer and larger ones: together they are bounded too."""
    site.join()
    site.start()
    model = site.another_model(seed=0)
    for number in range(20):
        site.coordinator.offer(document(name=f"study-{number}", title="x" * 1_000_000), model)
    site.coordinator.offer(document(name="small"), model)
    site.wait_offered("small")
    found = kept(site)
    assert sum(path.stat().st_size for path in (site.state.root / "offers").iterdir()) <= offers.MAX_TOTAL_BYTES
    assert found == {"small", *(f"study-{number}" for number in range(16))}


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/consent.py")
def test_approved_is_not_what_was_previewed(site: SiteWorld) -> None:
    """Between the look and the approval one local step became 10,000 epochs at rate 100, and was approved unseen."""
    site.join()
    site.offer()
    site.start()
    site.draft()
    seen = site.shown()
    offered = swap(site.coordinator, site.another_model(seed=0))
    site.command("refresh")
    with pytest.raises(NeedsPerson, match="is not what was shown at ") as refused:
        site.command("approve", study=STUDY, data="patients", digest=seen, by=PERSON)
    for change in (
        "revision 1 -> 2", "training.local_steps 1 -> none", "training.local_epochs none -> 10000",
        "training.learning_rate 0.001 -> 100.0",
    ):  # fmt: skip
        assert change in refused.value.message
    with pytest.raises(UsageProblem, match="is the digest of study `hearts`; to approve takes that of the whole"):
        site.command("approve", study=STUDY, data="patients", digest=offered, by=PERSON)
    assert site.state.consent(STUDY) is None
    assert not site.lines("consent")


@pytest.mark.attack(promise="P6+", refused_by="site_agent/cli_study.py")
def test_approved_is_not_what_was_previewed__from_a_script(tmp_path: Path) -> None:
    """A script that names no digest approved whatever was offered that second."""
    shell = Shell(tmp_path)
    try:
        shell.join()
        shell.offer()
        shell.run("policy", "draft", STUDY)
        seen = shell.shown()
        swap(shell.coordinator, tmp_path / "initial.safetensors")
        said = shell.run("approve", STUDY, "--data", "patients", code=64).stderr
        assert "nothing was approved: there is no terminal to ask at, and no --digest says what was shown" in said
        assert f"hint: `site-agent preview {STUDY} --data patients`, read it, then `site-agent approve " in said
        said = shell.run("approve", STUDY, "--data", "patients", "--digest", seen[:16], code=78).stderr
        assert "training.local_epochs none -> 10000" in said
        assert shell.json("studies")["studies"][0]["state"] == "offered"
    finally:
        shell.close()


@pytest.mark.attack(promise="P6+", refused_by="site_agent/gateway/desk.py")
def test_approved_is_not_what_was_previewed__while_the_data_is_read(site: SiteWorld) -> None:
    """Reading the patients takes minutes, in which another revision is offered."""
    site.join()
    site.offer()
    site.start()
    site.draft()
    seen = site.shown()
    assert site.trainer is not None
    site.trainer.before_check = lambda: (
        swap(site.coordinator, site.another_model(seed=0)), site.command("refresh")
    )  # fmt: skip
    with pytest.raises(NeedsPerson, match=r"changed while it was approved: .*training\.local_steps 1 -> none"):
        site.command("approve", study=STUDY, data="patients", digest=seen, by=PERSON)
    assert site.state.consent(STUDY) is None
    assert not site.lines("consent")


@pytest.mark.attack(promise="P6+", refused_by="site_agent/account.py")
def test_approved_is_not_what_was_previewed__lines_that_are_not_there(site: SiteWorld) -> None:
    """A title that writes further lines, moves the cursor or turns the text around; a key that looks like another."""
    site.join()
    settings = document(title="x\n  training.local_steps  1\x1b[2K\u202e")
    settings["algorithm"] |= {"mu\n": 1, "a.b": {"c": 1}, "a": {"b.c": 2}}
    site.coordinator.offer(settings, site.another_model(seed=0))
    site.start()
    shown = site.command("preview", study=STUDY, data="patients")
    lines = {line["name"]: line["value"] for group in shown["groups"] for line in group["lines"]}
    assert lines["study.title"] == r'"x\n  training.local_steps  1\u001b[2K\u202e"'
    assert lines[r'algorithm."mu\n"'] == "1"
    assert (lines['algorithm."a.b".c'], lines['algorithm.a."b.c"']) == ("1", "2")
    assert all(text.isprintable() for line in lines.items() for text in line)
