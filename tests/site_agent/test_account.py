"""The one account of a study: every setting in it, what changed marked, and what its numbers can carry."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fl_algorithms.resolving import resolve
from site_agent.gateway.consent import account as accounts
from site_agent.gateway.consent.account import Account, account, attempt_bits, changes, number_bits, settings
from site_agent.state.directory import Offer
from tests.secure_world import key_of, public
from tests.site_agent.secure_sites import study_of
from wardround.records.study import ReportedSection, load
from wardround.records.trainer import Described
from wardround.signing import dsse
from wardround.tensors.manifests import Entry, Manifest, TensorSpec

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.toml"))
DESCRIBED = Described(
    upload=[],
    download=[],
    private=[],
    exposure="",
    personalized="",
    network="",
    model="mlp",
    parameters=12,
    weights=None,
)
MODEL = Manifest((Entry(TensorSpec("w", "F32", (2, 3)), "00" * 32),))


def offer(document: dict[str, Any], revision: int = 1, digest: str = "ab" * 32) -> Offer:
    return Offer(document["study"]["name"], revision, digest, "created", document, MODEL)


def small(**training: Any) -> dict[str, Any]:
    return {
        "study": {"name": "hearts", "title": "", "rounds": 3, "sites": ["a", "b"]},
        "training": {"local_steps": 1, "learning_rate": "0.001", **training},
        "reported": {"metrics": ["val_loss"], "digits": 4, "counts": "exact"},
    }


def of(document: dict[str, Any], **more: Any) -> Account:
    return account(offer(document), DESCRIBED, {"verdict": "allows all of it"}, 8, **more)


def slow_leaves(value: Any) -> list[Any]:
    """Every value of a document that is neither a table nor a list."""
    if isinstance(value, dict | list):
        inside = value.values() if isinstance(value, dict) else value
        return [leaf for item in inside for leaf in slow_leaves(item)]
    return [value]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_leaf_of_a_resolved_study_stands_in_its_account(path: Path) -> None:
    document = resolve(load(path), lab=True).document()
    if "secure_aggregation" in document:  # the coordinator puts its members' keys there
        document["secure_aggregation"]["roster"] = {site: public(site).hex() for site in document["study"]["sites"]}
    lines = of(document).lines
    if "secure_aggregation" in document:  # a key stands there as its fingerprint
        assert {f"member {site}" for site in document["secure_aggregation"].pop("roster")} <= lines.keys()
    for table, content in document.items():
        for key in content:
            under = [name for name in lines if name == f"{table}.{key}" or name.startswith(f"{table}.{key}")]
            assert under, (table, key)
    assert len(lines) >= len(settings(document))
    text = "\n".join(lines.values())
    for leaf in slow_leaves(document):
        assert accounts._value(leaf) in text, leaf


def test_a_table_that_nobody_thought_of_stands_in_it_under_a_heading_of_its_own() -> None:
    document = small() | {"secrets": {"deep": {"er": [{"a": 1}, {"b": []}]}, "empty": {}}}
    made = of(document)
    (other,) = [group.lines for group in made.groups if group.heading == "Other settings of the study"]
    assert [(line.name, line.value) for line in other] == [
        ("secrets.deep.er[1]", "a 1"), ("secrets.deep.er[2]", "b none"), ("secrets.empty", "none")
    ]  # fmt: skip


def test_each_change_of_one_leaf_changes_the_digest_and_is_said() -> None:
    before = of(small())
    for name, value in settings(small()).items():
        table, key = name.split(".")
        document = small()
        old = document[table][key]
        document[table][key] = (
            [*old, "more"] if isinstance(old, list) else 9 if isinstance(old, int) else "bucketed" if key == "counts"
            else f"{old}9"
        )  # fmt: skip
        if name == "study.name":
            continue  # another study
        after = of(document, before=before.shown(), since="approved")
        assert after.digest != before.digest
        assert any(change.startswith(f"{name} {value} -> ") for change in changes(after)), (name, changes(after))


def test_changed_new_and_gone_lines_are_told_apart() -> None:
    before = of(small()).shown()
    document = small(local_steps=10000, momentum="0.9")
    del document["training"]["learning_rate"]
    after = of(document, before=before, since="approved")
    assert changes(after) == [
        "training.local_steps 1 -> 10,000", "training.momentum 0.9 is new", "training.learning_rate 0.001 is gone"
    ]  # fmt: skip
    assert of(small(), before=before, since="approved").digest == before.digest


def test_the_digest_covers_what_the_trainer_and_the_policy_say() -> None:
    digests = {
        of(small()).digest,
        account(
            offer(small()), DESCRIBED.model_copy(update={"exposure": "sites"}), {"verdict": "allows all of it"}, 8
        ).digest,
        account(offer(small()), DESCRIBED, {"verdict": "DENIES w"}, 8).digest,
        account(offer(small()), DESCRIBED, {"verdict": "allows all of it"}, 9).digest,
        account(offer(small(), digest="cd" * 32), DESCRIBED, {"verdict": "allows all of it"}, 8).digest,
        account(replace(offer(small()), revision=2), DESCRIBED, {"verdict": "allows all of it"}, 8).digest,
    }
    assert len(digests) == 6


def test_what_a_number_can_carry_is_the_count_of_what_can_be_told() -> None:
    """Every decimal that ``ReportedSection.number`` can write for a value in the range, counted one by one."""
    told = ReportedSection(digits=1)
    smallest = [float(f"{m}e{e}") for m, e in itertools.product(range(1, 10), range(-323, 1)) if float(f"{m}e{e}") <= 1]
    written = {told.number(value) for value in [0.0, -0.0, *smallest]} | {"null"}
    assert number_bits(1, 0, 1) == (len(written) - 1).bit_length()
    assert number_bits(4, 0.0, 1.0) == 22
    assert number_bits(4) == 24
    assert number_bits(9) == 41
    assert number_bits(4, 1, 1) == 1  # that, or null


def test_an_attempt_says_what_its_numbers_carry_and_that_a_range_is_missing() -> None:
    reported = ReportedSection(metrics=("loss", "accuracy"), digits=4, counts="bucketed", ranges={"accuracy": (0, 1)})
    assert attempt_bits(reported) == [
        ("loss", "any number, 4 digits", 24), ("accuracy", "from 0.0 to 1.0, 4 digits", 22),
        ("rows trained", "bucketed", 6), ("rows validated", "bucketed", 6),
    ]  # fmt: skip
    lines = of(small()).lines
    assert lines["numbers in all"] == (
        "3 numbers beside the tensors, each attempt at a round and at the closing one: at most 130 bits each attempt"
    )


def test_a_setting_stands_under_the_heading_that_its_table_has() -> None:
    made = of(small() | {"algorithm": {"name": "fedprox", "mu": "0.1"}})
    headings = {line.name: group.heading for group in made.groups for line in group.lines}
    assert headings["algorithm.mu"] == "What is computed here, on this hospital's patients"
    assert headings["study.rounds"] == "Who takes part, how often and until when"
    assert headings["reported.metrics"] == headings["leaves model/w"] == "What leaves this hospital, each round"


def test_a_robust_rule_stands_in_it_with_the_number_of_bad_sites_that_it_tolerates() -> None:
    document = small()
    assert "bad sites" not in of(document).lines
    document["study"] = {"name": "hearts", "rounds": 3, "sites": ["ash", "birch", "cedar", "douglas"], "quorum": 3}
    document["study"]["title"] = ""
    lines = of(document | {"aggregation": {"rule": "median"}}).lines
    assert lines["aggregation.rule"] == "median"
    assert lines["bad sites"] == (
        "a round's model is the median of each value, each site counting alike: it tolerates 1 of 4 and 1 of 3 sites "
        "being bad"
    )


def test_a_list_of_small_tables_has_a_line_for_each_and_no_value_can_pass_for_another() -> None:
    rows = [{"kinds": ["a, b", "c"], "name": "age"}, {"name": "x, kinds [y]", "kinds": []}, {"deep": {"er": 1}}]
    assert settings({"task": {"features": rows}}) == {
        "task.features[1]": 'name age, kinds ["a, b", c]',
        "task.features[2]": 'name "x, kinds [y]", kinds none',
        "task.features[3].deep.er": "1",
    }


def test_with_secure_aggregation_it_says_what_the_coordinator_will_see_and_behind_whom_one_hides() -> None:
    document = study_of(("amsterdam", "bergen", "charite")).document()
    known = dsse.keyid(key_of("charite").public_key())
    shown = account(offer(document), DESCRIBED, {}, 8, site="bergen", known=frozenset([known])).lines
    assert shown["seen by"] == (
        "the coordinator, as the sum over at least 3 hospitals, with the numbers below; never this hospital's own "
        "update. Every member may check the sum, and learns from it the sum of the others"
    )
    assert shown["member charite"] == f"{known}: known to people here"
    assert shown["member amsterdam"].endswith(": nobody here knows it")
    assert shown["member bergen"].endswith(": this site")
