"""The study file, its variants and settings, and the digest that a hospital approves."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wardround.errors import BadData, UsageProblem
from wardround.records.study import ReportedSection, StudyFile, load, study_digest
from wardround.signing import canonical

SMALL = """
[study]
name = "heart"
sites = ["st-olav", "charite"]
rounds = 3

[task]
name = "tabular"
label = "disease"

[model]
name = "mlp"
hidden = [4, 2]

[algorithm]
name = "fedprox"
mu = 0.001
"""
VARIANTS = (
    SMALL
    + """
[training]
local_steps = 5

[variants.fedavg.algorithm]
name = "fedavg"

[variants.fedavg.training]
local_epochs = 2

[variants.slow.training]
local_steps = 50
"""
)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return tmp_path / "study.toml"


def study(text: str, path: Path, *settings: str, variant: str = "") -> StudyFile:
    path.write_text(text)
    return load(path, list(settings), variant)


def fault(text: str, path: Path, *settings: str, variant: str = "") -> BadData | UsageProblem:
    with pytest.raises((BadData, UsageProblem)) as caught:
        study(text, path, *settings, variant=variant)
    return caught.value


def test_sites_are_sorted_and_defaults_are_filled(written: Path) -> None:
    file = study(SMALL, written)
    assert file.study.sites == ("charite", "st-olav")
    assert file.study.needed == 2
    assert file.algorithm.settings == {"mu": 0.001}
    assert file.training.local_epochs == 1
    assert study(SMALL, written, "study.quorum=1").study.needed == 1


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        pytest.param(
            'study.name="Heart Study"',
            "`name` in [study]: 'Heart Study' is not a name of 1 to 64 of a-z, 0-9 and - (not at either end)",
            id="study name",
        ),
        pytest.param(
            'study.sites=["a", "-b"]',
            "`sites` in [study]: site '-b' is not a name of 1 to 64 of a-z, 0-9 and - (not at either end)",
            id="site name",
        ),
        pytest.param('study.sites=["a", "b", "a"]', "`sites` in [study]: site 'a' stands twice", id="site twice"),
        pytest.param(
            "study.sites=[]",
            "`sites` in [study]: tuple should have at least 1 item after validation, not 0",
            id="no site",
        ),
        pytest.param("study.quorum=3", "[study]: quorum is 3, but the study has 2 sites", id="quorum"),
        pytest.param(
            'study.roles={zagreb = "evaluate"}',
            "[study]: `roles` names site 'zagreb', which the study does not have",
            id="role of a stranger",
        ),
        pytest.param(
            'study.roles={basel = "watch"}',
            "`basel` in [study.roles]: input should be 'train' or 'evaluate', found 'watch'",
            id="no such role",
        ),
        pytest.param(
            "study.rounds=0",
            "`rounds` in [study]: input should be greater than or equal to 1, found 0",
            id="rounds",
        ),
        pytest.param(
            "study.max_update_norm=nan",
            "`max_update_norm` in [study]: input should be a finite number, found nan",
            id="norm",
        ),
        pytest.param(
            "training.local_steps=4", "[training]: give either `local_steps` or `local_epochs`", id="two amounts"
        ),
        pytest.param(
            "training.betas=[0.9, 1.0]",
            "[training]: betas [0.9, 1.0] are not both at least 0 and below 1",
            id="betas",
        ),
        pytest.param(
            "training.momentum=0.5", "[training]: `momentum` belongs to sgd, the optimizer is adamw", id="momentum"
        ),
        pytest.param(
            'training.optimizer="lion"',
            "`optimizer` in [training]: input should be 'sgd', 'adam' or 'adamw', found 'lion'",
            id="optimizer",
        ),
        pytest.param(
            'reported.metrics=["val loss"]',
            "`metrics` in [reported]: metric 'val loss' is not 1 to 40 of a-z, 0-9 and _",
            id="metric name",
        ),
        pytest.param(
            "reported.digits=17",
            "`digits` in [reported]: input should be less than or equal to 9, found 17",
            id="digits",
        ),
        pytest.param(
            "checkpoints.validation_fraction=1.0",
            "`validation_fraction` in [checkpoints]: input should be less than 1, found 1.0",
            id="fraction",
        ),
    ],
)
def test_an_impossible_value_is_told(written: Path, setting: str, said: str) -> None:
    text = SMALL + "[training]\nlocal_epochs = 1\n"
    assert fault(text, written, setting).message == f"study.toml: {said}"


def test_a_wrong_key_gets_a_suggestion(written: Path) -> None:
    error = fault(SMALL + "[training]\nlearing_rate = 0.1\nlocal_steps = 1\n", written)
    assert error.message == "study.toml: unknown key `learing_rate` in [training]"
    assert error.hint == "did you mean `learning_rate`?"
    assert fault(SMALL.replace("rounds", "rouds"), written).hint == "did you mean `rounds`?"


def test_a_missing_table_or_name_is_told(written: Path) -> None:
    assert fault(SMALL.replace("[task]", "[tasks]"), written).hint == "did you mean `task`?"
    without = SMALL.replace('[task]\nname = "tabular"\nlabel = "disease"\n', "")
    assert fault(without, written).message == "study.toml: [task] is missing"
    assert fault(SMALL.replace('name = "mlp"\n', ""), written).message == "study.toml: `name` in [model] is missing"


def test_a_variant_replaces_whole_tables(written: Path) -> None:
    file = study(VARIANTS, written, variant="fedavg")
    assert (file.algorithm.name, file.algorithm.settings) == ("fedavg", {})
    assert (file.training.local_steps, file.training.local_epochs) == (None, 2)


def test_another_algorithm_brings_its_variant_and_the_other_settings_come_last(written: Path) -> None:
    file = study(VARIANTS, written, "training.local_epochs=7", "algorithm.name=fedavg")
    assert (file.algorithm.name, file.training.local_epochs) == ("fedavg", 7)


def test_another_algorithm_without_a_variant_does_not_inherit_settings(written: Path) -> None:
    file = study(VARIANTS, written, "algorithm.name=fedsoup")
    assert (file.algorithm.name, file.algorithm.settings) == ("fedsoup", {})
    assert file.training.local_steps == 5
    assert study(VARIANTS, written, "algorithm.name=fedprox").algorithm.settings == {"mu": 0.001}


def test_an_algorithm_and_a_variant_of_another_name_both_count(written: Path) -> None:
    file = study(VARIANTS, written, "algorithm.name=fedsoup", variant="slow")
    assert (file.algorithm.name, file.training.local_steps) == ("fedsoup", 50)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        pytest.param("algorithm.mu=0.5", 0.5, id="number"),
        pytest.param("algorithm.mu = [1, 2]", [1, 2], id="list"),
        pytest.param('algorithm.mu="a b"', "a b", id="quoted"),
        pytest.param("algorithm.mu=a b=c", "a b=c", id="bare text"),
        pytest.param("algorithm.mu=true", True, id="truth"),
    ],
)
def test_a_setting_is_a_toml_value_or_text(written: Path, setting: str, value: Any) -> None:
    assert study(SMALL, written, setting).algorithm.settings == {"mu": value}


@pytest.mark.parametrize("setting", ["rounds=3", "study.rounds", ".rounds=3", "study.=3"])
def test_a_setting_of_another_form_is_refused(written: Path, setting: str) -> None:
    error = fault(SMALL, written, setting)
    assert error.message == f"--set {setting!r} is not TABLE.KEY=VALUE"
    assert error.hint == "as in --set training.learning_rate=0.01"
    assert error.exit_code == 64


def test_a_variant_that_does_not_exist_or_is_no_table_is_told(written: Path) -> None:
    error = fault(VARIANTS, written, variant="quick")
    assert (error.message, error.hint) == ("study.toml has no variant `quick`", "it has: fedavg, slow")
    assert fault(SMALL, written, variant="quick").hint == "it has: none"
    assert (
        fault("variants = 5\n" + SMALL, written, variant="x").message
        == "study.toml: [variants] holds tables, found a value"
    )
    assert (
        fault(SMALL + "[variants]\nx = 5\n", written, variant="x").message
        == "study.toml: [variants.x] holds tables, found a value"
    )
    assert (
        fault(SMALL + "[variants.x.trainig]\n", written, variant="x").message
        == "study.toml: [variants.x.trainig] replaces no table of a study"
    )


def test_a_setting_into_what_is_no_table_is_told(written: Path) -> None:
    assert fault("reported = 5\n" + SMALL, written, "reported.digits=3").message.endswith("[reported] is not a table")


def test_a_document_is_read_back_to_the_same_study_and_digest(written: Path) -> None:
    file = study(VARIANTS, written, "study.max_update_norm=2.5", "training.learning_rate=1e-7")
    document = json.loads(canonical.dumps(file.document()))
    again = StudyFile.from_document(document)
    assert again.training == file.training
    assert again.study == file.study
    assert again.digest("00" * 32) == file.digest("00" * 32)


NAMES = st.from_regex(r"[a-z0-9](-?[a-z0-9]){0,20}", fullmatch=True)
SECTIONS = {
    "study": st.fixed_dictionaries(
        {"name": NAMES, "sites": st.lists(NAMES, min_size=1, max_size=4, unique=True), "rounds": st.integers(1, 99)},
        optional={"seed": st.integers(0, 2**53 - 1), "max_update_norm": st.floats(1e-9, 1e9)},
    ),
    "task": st.fixed_dictionaries({"name": NAMES}, optional={"size": st.lists(st.integers(1, 512), max_size=3)}),
    "model": st.fixed_dictionaries({"name": NAMES}, optional={"dropout": st.booleans() | st.integers(0, 9)}),
    "algorithm": st.fixed_dictionaries({"name": NAMES}),
}
OPTIONAL = {
    "training": st.fixed_dictionaries({"local_steps": st.integers(0, 99), "learning_rate": st.floats(1e-9, 100)}),
    "checkpoints": st.fixed_dictionaries({"validation_fraction": st.floats(0.01, 0.99)}),
    "reported": st.fixed_dictionaries(
        {"digits": st.integers(1, 9), "counts": st.sampled_from(["exact", "bucketed", "uniform"])},
        optional={"ranges": st.just({"val_loss": [0.1, 0.30000000000000004]})},
    ),
    "limits": st.fixed_dictionaries({"max_weight": st.floats(1e-6, 1), "norm_multiple": st.none() | st.floats(2, 1e6)}),
    "public_data": st.fixed_dictionaries({"digest": st.just("ab" * 32), "rows": st.integers(1, 10**7)}),
    "networks": st.dictionaries(NAMES.filter(lambda name: name != "default"), st.fixed_dictionaries({"name": NAMES})),
    "assigned": st.dictionaries(NAMES, NAMES),
}


@given(st.fixed_dictionaries(SECTIONS, optional=OPTIONAL))
def test_whatever_study_is_written_is_read_back_the_same(tables: dict[str, Any]) -> None:
    file = StudyFile.model_validate(tables)
    again = StudyFile.from_document(canonical.loads(canonical.dumps(file.document())))
    assert again.document() == file.document()
    for section in ("study", "training", "checkpoints", "reported", "limits", "public_data", "assigned"):
        assert getattr(again, section) == getattr(file, section)


@pytest.mark.parametrize("foreign", [5, [], "study", {"study": {}}, None])
def test_a_document_of_another_form_is_refused(foreign: object) -> None:
    with pytest.raises(BadData, match=r"^offer: "):
        StudyFile.from_document(foreign, "offer")


def test_a_document_with_tables_deep_within_tables_is_refused_when_it_is_written(written: Path) -> None:
    """It ended `coordinator study create` with a ValueError of a library."""
    deep: object = 1
    for _ in range(300):
        deep = {"a": deep}
    document = {**study(SMALL, written).document(), "model": {"name": "mlp", "hidden": deep}}
    with pytest.raises(BadData, match="holds tables too deep within tables"):
        StudyFile.from_document(document).document()


def test_the_digest_of_a_study_does_not_change_between_releases(written: Path) -> None:
    """Golden: a release that changes it makes every hospital's consent void. The bytes are spelt out here."""
    spelt = (
        '{"initial_model":"' + "ab" * 32 + '","study":{"algorithm":{"mu":"0.001","name":"fedprox"},'
        '"checkpoints":{"alone":false,"loss_reduction":"sample_mean","selection":"none","validation_fraction":"0.2"},'
        '"limits":{"count_growth":"2.0","max_examples":10000000,"max_weight":"0.5","norm_multiple":null},'
        '"model":{"hidden":[4,2],"name":"mlp"},'
        '"reported":{"counts":"exact","digits":4,"metrics":["val_loss"],"ranges":{}},'
        '"study":{"deadlines":"fixed","late_updates":"refuse","max_update_norm":null,"name":"heart","quorum":null,"round_deadline_s":3600,"rounds":3,"seed":1,'
        '"sites":["charite","st-olav"],"start_deadline_s":604800,"threads":1,"title":""},'
        '"task":{"label":"disease","name":"tabular"},'
        '"training":{"batch_size":32,"betas":["0.9","0.999"],"clip_norm":null,"drop_last":false,'
        '"early_stopping":null,"init_private":null,"iterator":"round","learning_rate":"0.001","local_epochs":1,'
        '"local_steps":null,"momentum":"0.0","optimizer":"adamw","optimizer_lifetime":"run",'
        '"sampling":"shuffled","schedule":{"every":10,"factor":"0.1","floor":"0.0","kind":"constant",'
        '"warmup_rounds":"0.0"},"weight_decay":"0.01"}}}'
    )
    file = study(SMALL, written)
    assert canonical.dumps({"initial_model": "ab" * 32, "study": file.document()}).decode() == spelt
    assert (
        file.digest("ab" * 32)
        == hashlib.sha256(spelt.encode()).hexdigest()
        == "a5585181134347e4f53ba1e979fc6213f230bf42a3b181648b03b9ea0b86e1d8"
    )


def test_the_digest_does_not_depend_on_the_order_in_the_file_and_depends_on_all_in_it(written: Path) -> None:
    digest = study(SMALL, written).digest("00" * 32)
    head, _, task = SMALL.partition("[task]")
    assert study("[task]" + task + head, written).digest("00" * 32) == digest
    assert study(SMALL, written, "algorithm.mu=0.002").digest("00" * 32) != digest
    assert study(SMALL, written).digest("01" * 32) != digest
    assert study_digest(study(SMALL, written).document(), "00" * 32) == digest


@given(st.integers(0, 10**9))
def test_counts_are_told_in_the_studys_form(n: int) -> None:
    assert ReportedSection(counts="exact").count(n) == n
    assert ReportedSection(counts="uniform").count(n) == 1
    told = ReportedSection(counts="bucketed").count(n)
    assert told <= n < 2 * told or told == n == 0
    assert told & (told - 1) == 0


@given(st.floats(-1e300, 1e300), st.integers(1, 9))
def test_a_metric_is_told_with_no_more_digits_than_the_study_says(value: float, digits: int) -> None:
    told = ReportedSection(digits=digits).number(value)
    mantissa = told.partition("e")[0].lstrip("-").replace(".", "").lstrip("0")
    assert len(mantissa) <= digits
    assert math.isclose(float(told), value, rel_tol=0.5 * 10 ** (1 - digits) * 1.001, abs_tol=5e-324)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), float("-inf"), 1.797e308])
def test_a_metric_that_is_undefined_is_told_as_null(value: float | None) -> None:
    assert ReportedSection(digits=2).number(value) == "null"


def test_a_metric_beyond_its_range_is_told_as_the_bound_and_nothing_else_is_in_range() -> None:
    told = ReportedSection(metrics=("val_loss",), ranges={"val_loss": (0.0, 1e6)})
    cases = {0.12345: "0.1235", 1e9: "1e+06", -3.0: "0", float("nan"): "null", float("inf"): "null", 999_999.0: "1e+06"}
    assert {value: told.metric("val_loss", value) for value in cases} == cases
    assert all(told.is_in_range("val_loss", text) for text in cases.values())
    assert told.metric("val_loss", None) == "null"
    assert not any(told.is_in_range("val_loss", text) for text in ("-1e-09", "1.001e+06"))
    assert not told.is_in_range("auc", "0.5")


@pytest.mark.parametrize("digits", range(1, 10))
@given(st.floats(-10, 10))
def test_what_is_told_of_a_range_is_in_it_however_it_is_rounded(digits: int, value: float) -> None:
    told = ReportedSection(digits=digits, ranges={"x": (-0.123456789, 1.987654321)})
    text = told.metric("x", value)
    assert told.has_form(text)
    assert told.is_in_range("x", text)


@pytest.mark.parametrize("text", ["0.12345", "0.10", "nan", "inf", "1e999", "0,5", " 0.5", "０.5", "", "1" * 30])
def test_text_in_another_form_is_no_number_of_the_study(text: str) -> None:
    assert not ReportedSection().has_form(text)


def test_a_range_is_given_lowest_first(written: Path) -> None:
    error = fault(SMALL + "[reported]\nranges = { val_loss = [1, 0] }\n", written)
    assert "the range of 'val_loss' is 1 to 0: give the lowest value first" in error.message


def test_the_limits_are_said_in_words(written: Path) -> None:
    rows = "a site reports at most 10,000,000 rows, and 2 times its first report"
    weight = "one site's averaging weight is at most 0.5 of a mean of three or more sites"
    learned = "an update's norm is at most 10 times the median of this and the last rounds"
    assert study(SMALL, written, "limits.norm_multiple=10").bounds() == (weight, learned, rows)
    given_norm = study(SMALL, written, "study.max_update_norm=2.5", "limits.max_weight=1")
    assert given_norm.bounds()[:2] == ("nothing limits one site's averaging weight", "an update's norm is at most 2.5")
    assert study(SMALL, written, "limits.norm_multiple=0").bounds()[1] == "nothing limits an update's norm"
