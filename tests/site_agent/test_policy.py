"""The policy as text and as a judge: what it takes, what it denies and by which rule, and what a draft says."""

from dataclasses import replace
from pathlib import Path

import pytest

from site_agent.gateway.policy import policy
from site_agent.gateway.policy.decisions import StudyRequest, decide, quotas
from site_agent.gateway.policy.text import differences, draft
from wardround.errors import BadData, NeedsPerson
from wardround.tensors.manifests import TensorSpec

COORDINATOR = "spiffe://test/coordinator"
WEIGHT = TensorSpec("head.weight", "F32", (4, 8))
BIAS = TensorSpec("head.bias", "F32", (4,))
ASKED = StudyRequest("hearts", COORDINATOR, (WEIGHT, BIAS), ("val_loss",), 4, "bucketed", 100, 3)

LEAST = """
[study]
coordinator = "spiffe://test/coordinator"
studies = ["hearts"]
[quotas]
bytes_per_round = 1000
bytes_per_day = 1000
numbers_per_round = 100
numbers_per_day = 100
"""


def parse(text: str) -> policy.Policy:
    return policy.parse(text.encode(), Path("policy.toml"))


def denials(text: str, request: StudyRequest = ASKED) -> list[tuple[str, str]]:
    return [(one.what, one.rule) for one in decide(parse(text), request) if not one.allowed]


def edited(*edits: tuple[str, str], request: StudyRequest = ASKED) -> str:
    text = draft(request, "st-olav")
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return text


def with_tensor(spec: TensorSpec) -> StudyRequest:
    return StudyRequest("hearts", COORDINATOR, (WEIGHT, spec), ("val_loss",), 4, "bucketed", 100, 3)


def test_a_draft_allows_exactly_what_the_study_asks() -> None:
    assert denials(draft(ASKED, "st-olav")) == []
    (extra,) = denials(draft(ASKED, "st-olav"), with_tensor(TensorSpec("encoder.weight", "F32", (2,))))
    assert extra == ("encoder.weight", "no rule of tensors.allow names it")


def test_a_policy_that_says_nothing_denies_everything() -> None:
    assert [what for what, _ in denials(LEAST)] == [
        "head.weight", "head.bias", "metric val_loss", "counts, bucketed"
    ]  # fmt: skip


def test_deny_beats_allow_and_names_the_rule() -> None:
    text = edited(("deny = []", 'deny = [{ match = "*.bias" }]'))
    assert denials(text) == [("head.bias", "tensors.deny 1: '*.bias'")]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        pytest.param(
            ('"head.weight", dtype = ["F32"]', '"head.weight", dtype = ["F16"]'),
            ("head.weight", "tensors.allow 1: 'head.weight' allows F16, it is F32"),
            id="dtype",
        ),
        pytest.param(
            ("max_bytes = 128", "max_bytes = 127"),
            ("head.weight", "tensors.allow 1: 'head.weight' allows 127 bytes, it has 128"),
            id="size",
        ),
        pytest.param(
            ("digits = 4", "digits = 3"),
            ("metric val_loss", "metrics.allow 'val_loss' allows 3 digits, the study reports 4"),
            id="digits",
        ),
        pytest.param(
            ("min_records = 1", "min_records = 101"),
            ("metric val_loss", "metrics.allow 'val_loss' wants 101 records, there are fewer"),
            id="records",
        ),
        pytest.param(
            ('form = "bucketed"', 'form = "uniform"'),
            ("counts, bucketed", "counts.form = 'uniform'"),
            id="counts",
        ),
        pytest.param(
            ("bytes_per_round = 576", "bytes_per_round = 143"),
            ("144 bytes a round", "quotas.bytes_per_round = 143"),
            id="bytes",
        ),
        pytest.param(
            ("numbers_per_round = 12", "numbers_per_round = 2"),
            ("3 numbers in this round", "quotas.numbers_per_round = 2"),
            id="numbers",
        ),
        pytest.param(
            ('studies = ["hearts"]', 'studies = ["lung*"]'),
            ("study hearts", "study.studies names no such study"),
            id="study",
        ),
        pytest.param(
            (COORDINATOR, "spiffe://other/coordinator"),
            (f"coordinator {COORDINATOR}", "study.coordinator = 'spiffe://other/coordinator'"),
            id="coordinator",
        ),
    ],
)  # fmt: skip
def test_a_denial_names_what_and_the_rule(edit: tuple[str, str], said: tuple[str, str]) -> None:
    assert denials(edited(edit)) == [said]


@pytest.mark.parametrize("name", ["bn.running_mean", "bn.running_var", "bn.num_batches_tracked"])
def test_normalization_statistics_pass_only_when_named_in_full(name: str) -> None:
    request = with_tensor(TensorSpec(name, "F32", (2,)))
    wide = edited(("allow = [\n  { match", 'allow = [\n  { match = "*" },\n  { match'))
    ((what, rule),) = denials(wide, request)
    assert what == name
    assert rule == "tensors.allow 1: '*' matches it, but counters and normalization statistics must be named in full"
    named = edited(("allow = [\n  { match", f'allow = [\n  {{ match = "{name}" }},\n  {{ match'))
    assert denials(named, request) == []


def test_an_integer_tensor_passes_only_when_named_in_full() -> None:
    request = with_tensor(TensorSpec("steps", "I64", (1,)))
    wide = edited(("allow = [\n  { match", 'allow = [\n  { match = "st*", dtype = ["I64"] },\n  { match'))
    assert [what for what, _ in denials(wide, request)] == ["steps"]
    assert denials(wide.replace('"st*"', '"steps"'), request) == []


@pytest.mark.parametrize("form", ["exact", "bucketed", "uniform"])
def test_counts_may_be_told_less_exactly_than_the_policy_allows(form: str) -> None:
    request = StudyRequest("hearts", COORDINATOR, (), (), 4, "uniform", 100)
    assert denials(edited(('form = "bucketed"', f'form = "{form}"')), request) == []


@pytest.mark.parametrize("exposure", ["", "coordinator", "sites"])
def test_a_draft_says_what_a_study_needs_and_lets_nobody_have_the_sites_own_model(exposure: str) -> None:
    request = replace(ASKED, exposure=exposure)
    text = draft(request, "st-olav")
    found = parse(text).models
    assert (found.kept_by_coordinator, found.sent_to_other_sites) == (False, False)
    assert ("it needs" in text) == bool(exposure)
    assert len(denials(text, request)) == {"": 0, "coordinator": 1, "sites": 2}[exposure]


def test_a_policy_that_does_not_speak_of_models_lets_nobody_have_the_sites_own() -> None:
    kept = ("this site's own model, kept apart by the coordinator", "models.kept_by_coordinator = false")
    sent = ("this site's own model, sent to the other sites", "models.sent_to_other_sites = false")
    least = replace(ASKED, tensors=(), metrics=(), counts="uniform")
    assert denials(LEAST, least) == []
    assert denials(LEAST, replace(least, exposure="coordinator")) == [kept]
    assert denials(LEAST, replace(least, exposure="sites")) == [kept, sent]


def test_what_is_sent_to_other_sites_is_kept_by_the_coordinator_too() -> None:
    request = replace(ASKED, exposure="sites")
    text = edited(("sent_to_other_sites = false", "sent_to_other_sites = true"), request=request)
    assert [rule for _, rule in denials(text, request)] == ["models.kept_by_coordinator = false"]


def test_quotas_count_what_left_before() -> None:
    found = parse(LEAST)
    assert [one.allowed for one in quotas(found, 400, 600, 600)] == [True, True]
    assert [one.allowed for one in quotas(found, 400, 601, 601)] == [False, False]
    assert quotas(found, 1, 0, 1000)[1].what == "1001 bytes in this day"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "policy.toml: empty, and a policy says at least [study] and [quotas]", id="empty"),
        pytest.param("# all in a comment\n", "policy.toml: empty", id="comments"),
        pytest.param("[study\n", "policy.toml: not TOML: ", id="not TOML"),
        pytest.param(LEAST + "[models]\nkept_by_coordinator = 1\n", "kept_by_coordinator", id="a number for a word"),
        pytest.param(LEAST + "bytes_per_day = 5\n", "policy.toml: not TOML: Cannot overwrite a value", id="key twice"),
        pytest.param(LEAST + "[quotas]\n", "policy.toml: not TOML: Cannot declare ('quotas',) twice", id="table twice"),
        pytest.param(LEAST + "[tensor]\n", "policy.toml: unknown key `tensor`", id="unknown table"),
        pytest.param(LEAST + "bytes = 1\n", "policy.toml: unknown key `bytes` in [quotas]", id="unknown key"),
        pytest.param("[study]\n", "policy.toml: `coordinator` in [study] is missing", id="missing"),
        pytest.param(LEAST.replace("1000", '"1000"', 1), "policy.toml: `bytes_per_round` in [quotas]: ", id="text"),
        pytest.param(LEAST.replace("1000", "-1", 1), "policy.toml: `bytes_per_round` in [quotas]: ", id="negative"),
        pytest.param(
            LEAST + '[metrics]\nallow = [{ name = "a" }, { name = "a" }]', "metric 'a' stands twice", id="metric twice"
        ),
        pytest.param(
            LEAST + '[tensors]\nallow = [{ match = "a", dtype = ["F31"] }]', "'F31' is none of F64, F32", id="dtype"
        ),
        pytest.param(LEAST + '[tensors]\nallow = [{ match = "" }]', "`match` in [tensors.allow]: ", id="no pattern"),
        pytest.param(LEAST + '[counts]\nform = "about"', "`form` in [counts]: ", id="form"),
        pytest.param(LEAST + '[release]\nupdates = "last"', "`updates` in [release]: ", id="release"),
    ],
)  # fmt: skip
def test_a_broken_policy_is_refused_and_says_where(text: str, message: str) -> None:
    with pytest.raises(BadData) as refused:
        parse(text)
    assert message in refused.value.message
    assert refused.value.code == "DECLINED_POLICY"
    assert refused.value.hint


def test_a_policy_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(BadData, match=r"policy\.toml: not UTF-8 text"):
        policy.load(tmp_path / "policy.toml")


def test_a_missing_policy_names_the_command_that_drafts_one(tmp_path: Path) -> None:
    with pytest.raises(NeedsPerson, match=r"there is no policy at .*: nothing may leave") as refused:
        policy.load(tmp_path / "policy.toml")
    assert refused.value.hint.startswith("`site-agent policy draft STUDY`")


def test_differences_are_sentences() -> None:
    old = parse(edited())
    new = parse(edited(("digits = 4", "digits = 5"), ('updates = "none"', 'updates = "every"')))
    assert differences(old, new) == [
        "metrics.allow: no longer name val_loss, digits 4, min_records 1",
        "metrics.allow: now name val_loss, digits 5, min_records 1",
        "release.updates: none before, every now",
    ]
    assert differences(old, old) == []


def test_a_drafted_name_cannot_break_out_of_its_string() -> None:
    request = StudyRequest('x"]\n[release', COORDINATOR, (WEIGHT,), (), 4, "exact", None)
    with pytest.raises(BadData):
        parse(draft(request, "st-olav"))
