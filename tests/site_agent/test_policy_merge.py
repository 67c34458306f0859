"""A policy that is widened for one study more: what changes, what never does, and whose comments stay."""

from dataclasses import replace
from pathlib import Path

import pytest

from site_agent.gateway.policy.decisions import decide
from site_agent.gateway.policy.merge import merged, merged_text, still_denied
from site_agent.gateway.policy.policy import Policy, parse
from site_agent.gateway.policy.text import differences, draft
from tests.site_agent.test_policy import ASKED, BIAS, LEAST, WEIGHT
from wardround.errors import UsageProblem
from wardround.tensors.manifests import TensorSpec

FILE = Path("policy.toml")
MASK = TensorSpec("decoder.weight", "F32", (100,))
LUNGS = replace(ASKED, study="lungs", tensors=(WEIGHT, MASK), metrics=("val_loss", "dice"), digits=5, rounds=2)


def in_force(*edits: tuple[str, str]) -> tuple[str, Policy]:
    text = draft(ASKED, "st-olav")
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return text, parse(text.encode(), FILE)


def test_a_merged_policy_allows_both_studies_and_its_differences_are_what_was_asked() -> None:
    _, old = in_force()
    new = merged(old, LUNGS)
    assert [one for request in (ASKED, LUNGS) for one in decide(new, request) if not one.allowed] == []
    assert differences(old, new) == [
        "metrics.allow: no longer name val_loss, digits 4, min_records 1",
        "metrics.allow: now name dice, digits 5, min_records 1",
        "metrics.allow: now name val_loss, digits 5, min_records 1",
        f"quotas.bytes_per_day: {4 * 144 * 3} before, {4 * 144 * 3 + 4 * 528 * 2} now",
        f"quotas.bytes_per_round: {4 * 144} before, {4 * 528} now",
        f"quotas.numbers_per_day: {4 * 3 * 4} before, {4 * 3 * 4 + 4 * 4 * 3} now",
        "quotas.numbers_per_round: 12 before, 16 now",
        "study.studies: now lungs",
        f"tensors.allow: now match {MASK.key}, dtype ['F32'], max_bytes 400",
    ]


def test_a_persons_comments_and_rules_stay() -> None:
    text, old = in_force(("deny = []", 'deny = [{ match = "*.bias" }]  # our board said so'))
    edited, commented = merged_text(text, old, merged(old, LUNGS))
    assert commented
    assert "# our board said so" in edited
    assert parse(edited.encode(), FILE) == merged(old, LUNGS)
    assert {line for line in text.splitlines() if line.startswith("#")} <= set(edited.splitlines())


def test_what_cannot_be_edited_is_written_anew_and_says_the_same() -> None:
    old = parse(LEAST.encode(), FILE)  # has no [metrics], and its comments would have no place
    edited, commented = merged_text(LEAST, old, merged(old, ASKED))
    assert not commented
    assert parse(edited.encode(), FILE) == merged(old, ASKED)


def test_a_second_merge_changes_nothing() -> None:
    _, old = in_force()
    once = merged(old, LUNGS)
    assert merged(once, LUNGS) == once
    assert merged(old, ASKED) == old


def test_a_merge_never_touches_what_a_person_denied_or_must_write() -> None:
    _, old = in_force(("deny = []", 'deny = [{ match = "decoder.*" }]'), ('updates = "none"', 'updates = "every"'))
    request = replace(LUNGS, exposure="sites")
    new = merged(old, request)
    assert (new.tensors.deny, new.models, new.release, new.plugins) == (
        old.tensors.deny, old.models, old.release, old.plugins
    )  # fmt: skip
    assert still_denied(new, request) == [
        f"{MASK.key}: tensors.deny 1: 'decoder.*'",
        "this site's own model, kept apart by the coordinator: models.kept_by_coordinator = false",
        "this site's own model, sent to the other sites: models.sent_to_other_sites = false",
    ]


def test_counts_become_no_less_exact_than_before() -> None:
    _, old = in_force(('form = "bucketed"', 'form = "exact"'))
    assert merged(old, LUNGS).counts.form == "exact"
    assert merged(old, replace(LUNGS, counts="uniform")).counts.form == "exact"


def test_a_study_of_another_coordinator_is_no_merge() -> None:
    _, old = in_force()
    with pytest.raises(UsageProblem, match="is for spiffe://test/coordinator, and study `lungs` is offered by spiffe"):
        merged(old, replace(LUNGS, coordinator="spiffe://other/coordinator"))


def test_an_allow_rule_that_fits_is_not_written_twice() -> None:
    _, old = in_force()
    assert [rule.match for rule in merged(old, replace(LUNGS, tensors=(WEIGHT, BIAS))).tensors.allow] == [
        WEIGHT.key, BIAS.key
    ]  # fmt: skip
