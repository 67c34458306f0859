import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fl_algorithms import registry, rows
from fl_algorithms.engine.partition import describe
from fl_algorithms.resolving import need_hint, resolve
from fl_algorithms.server.aggregator import server_aggregator
from fl_algorithms.settings.models import BODY_AND_HEAD, DEPTHS, NORM_LAYERS, TWO_EXTRACTORS
from tests.fl_algorithms.toys import study_tables, toy_study
from wardround.errors import BadData
from wardround.records.study import StudyFile, load

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SOUP = {"compat": False, "moments": "keep", "statistics": "keep"}
SERVER_OPTIMIZERS = {"fedavgm": "momentum", "fedadam": "adam", "fedyogi": "yogi", "fedadagrad": "adagrad"}


def test_the_registry_the_server_aggregator_and_the_labs_help_need_no_torch() -> None:
    code = (
        "import sys, fl_algorithms.registry, fl_algorithms.study, fl_algorithms.lab.cli\n"
        "import fl_algorithms.server.aggregator, fl_algorithms.server.best\n"
        "sys.exit('torch' in sys.modules or 'sklearn' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_row_leads_to_its_implementation() -> None:
    for row in (*registry.METHODS.values(), *registry.MODELS.values()):
        path = row.client if isinstance(row, rows.MethodRow) else row.implementation
        assert callable(registry.load(path)), row.name
    for task in (registry.TABULAR, registry.IMAGE_CLASSES, registry.SEGMENTATION):
        assert registry.load(task.implementation)


@pytest.mark.parametrize("algorithm", ["fedavg", "fenda", "fedsoup", "silo"])
def test_resolving_twice_and_through_the_document_changes_nothing(algorithm: str) -> None:
    once = toy_study(algorithm)
    assert resolve(once.file, lab=True) == once
    again = resolve(StudyFile.from_document(once.document()), lab=True)
    assert again == once
    assert again.digest("0" * 64) == once.digest("0" * 64)


def test_a_default_of_the_network_is_part_of_the_digest() -> None:
    written = {"name": "fenda", "shared_hidden": [4], "private_hidden": [3], "dropout": 0.3}
    assert toy_study("fenda", written).digest("0") == toy_study("fenda").digest("0")
    assert toy_study("fenda", {**written, "dropout": 0.4}).digest("0") != toy_study("fenda").digest("0")


@pytest.mark.parametrize(("rounds", "last_plain_round"), [(15, 11), (10, 7), (1, 0), (4, 3)])
def test_souping_starts_after_three_quarters_of_the_rounds(rounds: int, last_plain_round: int) -> None:
    assert toy_study("fedsoup", rounds=rounds).file.algorithm.settings == {
        "judged": "downloaded",
        "soup": {**SOUP, "start_after": last_plain_round},
    }


def test_a_written_start_of_souping_stays() -> None:
    study = toy_study("fedsoup", algorithm_settings={"soup": {"start_after": 1}})
    assert study.file.algorithm.settings == {"judged": "downloaded", "soup": {**SOUP, "start_after": 1}}


def test_a_soup_on_another_method_is_filled_like_fedsoups() -> None:
    study = toy_study("fenda", rounds=8, algorithm_settings={"soup": {"moments": "reset"}})
    assert study.file.algorithm.settings == {
        "judged": "downloaded",
        "soup": {**SOUP, "moments": "reset", "start_after": 6},
    }


@pytest.mark.parametrize(("name", "optimizer"), SERVER_OPTIMIZERS.items())
def test_a_method_with_a_server_optimizer_is_fedavg_with_its_settings(name: str, optimizer: str) -> None:
    study = toy_study(name)
    assert study.file.algorithm.settings["server"]["optimizer"] == optimizer
    assert study.method.row.client == registry.METHODS["fedavg"].client


@pytest.mark.parametrize("name", SERVER_OPTIMIZERS)
def test_another_optimizer_than_the_methods_own_is_refused(name: str) -> None:
    other = "adam" if name == "fedavgm" else "momentum"
    with pytest.raises(BadData, match=r"`optimizer` in \[algorithm.server\]"):
        toy_study(name, algorithm_settings={"server": {"optimizer": other}})


@pytest.mark.parametrize(
    ("training", "found"),
    [
        ({"optimizer": "adamw"}, "adamw, momentum 0, weight decay 0.01"),
        ({"optimizer": "sgd", "weight_decay": 0.0, "momentum": 0.9}, "sgd, momentum 0.9, weight decay 0"),
        ({"optimizer": "sgd", "weight_decay": 0.1}, "sgd, momentum 0, weight decay 0.1"),
    ],
)
def test_scaffold_takes_plain_sgd_alone(training: dict[str, Any], found: str) -> None:
    with pytest.raises(BadData) as refusal:
        toy_study("scaffold", **training)
    assert refusal.value.message == (
        f"study.toml: algorithm `scaffold` needs plain SGD at the sites, [training] has {found}"
    )


@pytest.mark.parametrize("name", ["fedfomo", "fedsm"])
def test_a_method_that_sends_a_sites_own_model_to_others_says_so(name: str) -> None:
    assert describe(toy_study(name), "ash").exposure == "sites"


@pytest.mark.parametrize("name", [name for name, row in registry.METHODS.items() if not row.lab_only])
def test_what_is_kept_apart_is_said_of_exactly_the_methods_that_keep_something_of_each_site(name: str) -> None:
    """Of what a coordinator keeps once for each site, it keeps more when there is another site."""
    kept = {}
    for sites in (["ash", "birch"], ["ash", "birch", "cedar"]):
        study = toy_study(name, sites=sites, optimizer="sgd", weight_decay=0.0, init_private="common")
        partition = describe(study, "ash")
        kept[len(sites)] = len(server_aggregator(study, partition.upload).keeps)
    assert bool(partition.personalized) == bool(partition.exposure) == (kept[3] > kept[2]), kept


def test_what_is_kept_apart_is_not_said_where_the_method_as_it_is_set_keeps_nothing() -> None:
    settings = {"calibration": False, "train_calibration": {"steps": 0}}
    found = describe(toy_study("lcfed", algorithm_settings=settings), "ash")
    assert (found.exposure, found.personalized) == ("", "")


def test_a_mixture_of_predictions_is_called_so_and_not_a_model() -> None:
    found = describe(toy_study("ktpfl"), "ash")
    assert [spec.bundle for spec in found.upload] == ["predictions"]
    assert found.personalized.startswith("the mixture of all sites' predictions")


@pytest.mark.parametrize(
    ("need", "gives", "hint"),
    [
        (BODY_AND_HEAD, rows.COLUMNS, "model `mlp` has, with hidden layers: `hidden = [5]` in [model]"),
        (DEPTHS, rows.MASKS, 'models `unet` and `resunet` have: `name = "unet"` in [model]'),
        (DEPTHS, rows.IMAGES, "models `unet` and `resunet` have, for the class of each pixel"),
        (TWO_EXTRACTORS, rows.IMAGES, 'model `fenda_images` has: `name = "fenda_images"` in [model]'),
        (TWO_EXTRACTORS, rows.COLUMNS, 'model `fenda` has: `name = "fenda"` in [model]'),
        (
            NORM_LAYERS, rows.MASKS,
            "models `unet`, `resunet`, `unetpp`, `fcn`, `monai_unet` and `fenda_masks` have: "
            '`name = "unet"` in [model]',
        ),
    ],
)  # fmt: skip
def test_a_hint_names_networks_that_take_what_the_task_gives(need: str, gives: str, hint: str) -> None:
    assert need_hint(need, gives) == hint


def test_networks_for_images_with_norm_layers_are_named_and_squeezenet_is_not() -> None:
    hint = need_hint(NORM_LAYERS, rows.IMAGES)
    assert "`resnet10`, " in hint
    assert "squeezenet" not in hint
    assert hint.endswith('`name = "resnet10"` in [model]')


@pytest.mark.parametrize(
    ("tables", "message", "hint"),
    [
        pytest.param(
            study_tables("fedavgg"),
            "study.toml: there is no algorithm `fedavgg`",
            "did you mean `fedavg`?",
            id="algorithm",
        ),
        pytest.param(
            study_tables(model={"name": "transformer"}),
            "study.toml: there is no model `transformer`",
            f"there are: {', '.join(sorted(registry.MODELS))}",
            id="model",
        ),
        pytest.param(
            {**study_tables(), "task": {"name": "tabula"}},
            "study.toml: there is no task `tabula`",
            "did you mean `tabular`?",
            id="task",
        ),
        pytest.param(
            study_tables(model={"name": "mlp", "hiden": [3]}),
            "study.toml: unknown key `hiden` in [model]",
            "did you mean `hidden`?",
            id="unknown key of the model",
        ),
        pytest.param(
            study_tables(algorithm_settings={"mu": 0.1}),
            "study.toml: unknown key `mu` in [algorithm]",
            "known keys there: fine_tuning, judged, server, soup",
            id="unknown key of the algorithm",
        ),
        pytest.param(
            study_tables(model={"name": "ballast", "bytes": 6, "tensors": 1}),
            "study.toml: [model]: `bytes` is 6, not a multiple of 4 for each of 1 tensors",
            "",
            id="ballast of a broken number",
        ),
        pytest.param(
            study_tables(model={"name": "ballast", "bytes": 8, "tensors": 0}),
            "study.toml: [model]: `bytes` is 8, but `tensors` is 0",
            "",
            id="ballast without tensors",
        ),
        pytest.param(
            study_tables("fenda", {"name": "mlp"}),
            "study.toml: algorithm `fenda` needs a network with a shared and a private extractor, model `mlp` as it is "
            "set has none",
            'model `fenda` has: `name = "fenda"` in [model]',
            id="network without extractors",
        ),
        pytest.param(
            study_tables(reported={"metrics": ["val_loss", "acuracy"]}),
            "study.toml: `metrics` in [reported] names `acuracy`, which task `tabular` does not have",
            "did you mean `accuracy`?",
            id="metric",
        ),
        pytest.param(
            study_tables(reported={"metrics": ["val_loss"], "ranges": {"val_los": [0, 1]}}),
            "study.toml: `ranges` in [reported] names `val_los`, which the study does not report",
            "did you mean `val_loss`?",
            id="range of no metric",
        ),
        pytest.param(
            study_tables(reported={"metrics": ["accuracy"], "ranges": {"accuracy": [0, 2]}}),
            "study.toml: `ranges` in [reported] gives `accuracy` 0 to 2, the task has 0 to 1",
            "a study may narrow a range and not widen it",
            id="wider range",
        ),
        pytest.param(
            study_tables("silo"),
            "study.toml: algorithm `silo` runs only in the lab",
            "`fl-lab run study.toml --data DIR --set algorithm.name=silo`",
            id="lab only",
        ),
    ],
)
def test_a_study_that_cannot_run_is_refused_with_what_to_do(tables: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(BadData) as refusal:
        resolve(StudyFile.model_validate(tables))
    assert (refusal.value.message, refusal.value.hint) == (message, hint)


def test_resolving_writes_each_told_metrics_range_and_keeps_a_narrower_one() -> None:
    told = {"metrics": ["val_loss", "auc"], "ranges": {"val_loss": [0, 20]}}
    study = resolve(StudyFile.model_validate(study_tables(reported=told)))
    assert study.reported.ranges == {"auc": (0.0, 1.0), "val_loss": (0.0, 20.0)}
    assert study.document()["reported"]["ranges"] == {"auc": ["0.0", "1.0"], "val_loss": ["0.0", "20.0"]}
    assert resolve(study.file) == study


def test_every_metric_of_our_own_tasks_has_a_range() -> None:
    for row in registry.TASKS.values():
        for name in row.metrics:
            low, high = row.range_of(name) or (0.0, 0.0)
            assert low < high, f"{row.name} has no range for {name}"
        assert row.range_of("val_loss") == (0.0, 1e6)


@pytest.mark.parametrize("name", ["heart_disease.toml", "breast_cancer.toml"])
@pytest.mark.parametrize("algorithm", ["fenda", "fedavg", "fedsoup", "silo"])
def test_the_shipped_studies_run_with_every_method(name: str, algorithm: str) -> None:
    study = resolve(load(EXAMPLES / name, [f"algorithm.name={algorithm}"]), lab=algorithm == "silo")
    assert study.method.row.name == algorithm
    assert describe(study, study.study.sites[0]).upload or algorithm == "silo"


@pytest.mark.parametrize(("algorithm", "parameters"), [("fenda", 151), ("fedavg", 14), ("fedsoup", 76), ("silo", 14)])
def test_the_heart_disease_networks_have_the_papers_number_of_parameters(algorithm: str, parameters: int) -> None:
    study = resolve(load(EXAMPLES / "heart_disease.toml", [f"algorithm.name={algorithm}"]), lab=True)
    partition = describe(study, "va")
    kept_by_method = [stay for stay in partition.private if stay.why.startswith("kept")]
    elements = sum(t.bytes for t in (*partition.upload, *partition.private)) - sum(t.bytes for t in kept_by_method)
    assert elements // 4 == parameters
