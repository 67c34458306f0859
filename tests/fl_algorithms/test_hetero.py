"""Different networks at different sites: how a study says so, what must be alike, and who trains which."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fl_algorithms.engine.algorithm import algorithm_of
from fl_algorithms.engine.partition import build, describe, initial_model, specs_of, task_of
from fl_algorithms.engine.session import Restored, SiteSession
from fl_algorithms.lab.central import pooled_study
from fl_algorithms.lab.cli import app
from fl_algorithms.lab.federation import Outcome, aggregate, downlink, run_federation
from fl_algorithms.lab.protocol import measure, without
from fl_algorithms.lab.protocol_settings import Protocol
from fl_algorithms.lab.sizes import sizes
from fl_algorithms.methods.feddf.ensemble import distilled, ensemble_targets
from fl_algorithms.resolving import resolve
from fl_algorithms.server.aggregator import server_aggregator
from fl_algorithms.study import ResolvedStudy
from tests.fl_algorithms.toys import start_of, study_tables, toy_data, toy_study
from wardround.errors import BadData
from wardround.records.architectures import own_tensors
from wardround.records.study import Named, StudyFile, load

WIDE: dict[str, Any] = {"name": "mlp", "hidden": [6]}
NORMED: dict[str, Any] = {"name": "mlp", "hidden": [5, 3], "norm": "batch"}


def tables_of(method: str = "mhpflgb", **tables: Any) -> dict[str, Any]:
    """Ash trains an mlp of [4], birch `deep`; `wide` is allowed and trained by nobody."""
    return {
        **study_tables(method),
        "networks": {"wide": WIDE, "deep": NORMED},
        "assigned": {"birch": "deep"},
        **tables,
    }


def study_of(method: str = "mhpflgb", **tables: Any) -> ResolvedStudy:
    """``tables`` replace those of ``tables_of``."""
    return resolve(StudyFile.model_validate(tables_of(method, **tables)), lab=True)


def federate(study: ResolvedStudy) -> Outcome:
    return run_federation(study, task_of(study), {site: toy_data(site) for site in study.study.sites})


def hidden(networks: dict[str, nn.Module] | Any) -> list[int]:
    return [m.out_features for m in networks["model"].get_submodule("body").modules() if isinstance(m, nn.Linear)]


# What a study may say


def test_the_networks_defaults_are_filled_and_resolving_twice_changes_nothing() -> None:
    study = study_of()
    assert study.networks["wide"].settings == {"hidden": [6], "dropout": 0.0, "norm": "none"}
    assert resolve(StudyFile.from_document(study.document())) == study


def test_a_study_of_one_network_has_the_document_that_it_always_had() -> None:
    assert not {"networks", "assigned"} & toy_study().document().keys()


def test_the_networks_and_who_trains_them_are_part_of_the_digest() -> None:
    digests = {
        study_of(**changed).digest("0" * 64)
        for changed in ({}, {"assigned": {"ash": "deep"}}, {"networks": {"wide": WIDE, "deep": WIDE}})
    }
    assert len(digests) == 3


def test_a_file_says_networks_by_label_and_a_setting_or_a_variant_changes_them(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text(
        '[study]\nname = "toy"\nsites = ["ash", "birch"]\nrounds = 1\n'
        '[task]\nname = "tabular"\nlabel = "ill"\nclasses = ["no", "yes"]\nfeatures = ["u"]\n'
        '[model]\nname = "mlp"\nhidden = [4]\n'
        '[networks.small]\nname = "mlp"\nhidden = [2]\n[assigned]\nbirch = "small"\n'
        '[algorithm]\nname = "mhpflgb"\n[variants.alike.assigned]\n'
    )
    study = load(file, ["networks.small.hidden=[3]", "assigned.ash=small"])
    assert (study.networks["small"].settings, study.assigned) == ({"hidden": [3]}, {"birch": "small", "ash": "small"})
    assert load(file, [], "alike").assigned == {}


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"assigned": {"oak": "deep"}}, "[assigned] names site `oak`, which the study does not have"),
        (
            {"assigned": {"ash": "dep"}},
            "[assigned] gives `ash` the network `dep`, which [networks] does not have",
        ),
        ({"networks": {"deep": {"name": "mpl"}}}, "[networks.deep]: there is no model `mpl`"),
        ({"networks": {"deep": {**WIDE, "hiden": [3]}}}, "unknown key `hiden` in [networks.deep]"),
        (
            {"networks": {"deep": {"name": "mlp"}}},
            "[networks.deep]: algorithm `mhpflgb` needs a network with a body and a head, model `mlp` as it is set "
            "has none",
        ),
        (
            {"networks": {"deep": {"name": "resnet10"}}},
            "[networks.deep]: model `resnet10` takes images, task `tabular` gives columns",
        ),
    ],
    ids=["unknown site", "unknown label", "unknown network", "unknown key", "what the method needs", "another task's"],
)
def test_a_network_or_an_assignment_that_cannot_be_is_refused(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(BadData) as refusal:
        study_of(**tables)
    assert refusal.value.message == f"study.toml: {said}"


@pytest.mark.parametrize("label", ["Small", "", "a" * 41, "a_b", "default"])
def test_a_label_is_1_to_40_of_small_letters_digits_and_dashes(label: str) -> None:
    with pytest.raises(ValueError, match="is not a label of 1 to 40 of a-z, 0-9 and -, other than 'default'"):
        StudyFile.model_validate(tables_of(networks={label: WIDE}))


# Who trains which


def test_a_site_trains_what_is_assigned_and_else_the_default() -> None:
    study = study_of()
    own = {site: study.at(site) for site in ("ash", "birch", "")}
    file = study.file
    assert [one.file.model for one in own.values()] == [file.model, file.networks["deep"], file.model]
    assert all(not one.networks and not one.assigned for one in own.values())
    assert own["birch"].at("birch") == own["birch"]


@pytest.mark.parametrize("label", ["wide", "default"])
def test_what_a_site_chose_wins_over_what_is_assigned(label: str) -> None:
    study = study_of()
    chosen = study.at("birch", label)
    assert chosen.file.model == {"wide": study.networks["wide"], "default": study.file.model}[label]
    assert study.label_of("birch", label) == label
    assert study.label_of("birch") == "deep"


@pytest.mark.parametrize("study", [study_of(), toy_study("mhpflgb")], ids=["several", "one"])
def test_a_label_that_the_study_does_not_allow_is_refused(study: ResolvedStudy) -> None:
    with pytest.raises(BadData) as refusal:
        study.at("ash", "huge")
    assert refusal.value.message == "study `toy` has no network `huge`"
    assert refusal.value.hint == f"it has: {', '.join(('default', *sorted(study.networks)))}"


# What must be alike


def test_what_leaves_is_the_same_list_at_every_site() -> None:
    study = study_of()
    ash, birch = (describe(study, site) for site in ("ash", "birch"))
    assert ash.upload == birch.upload == describe(study, "ash", "wide").upload
    assert list(initial_model(study)) == [spec.key for spec in ash.upload]
    shapes = [next(stay.shape for stay in p.private if stay.name == "body.layers.0.weight") for p in (ash, birch)]
    assert shapes == [(4, 3), (5, 3)]


def test_a_site_that_chooses_another_network_keeps_that_ones_tensors() -> None:
    private = describe(study_of(), "birch", "wide").private
    assert next(stay.shape for stay in private if stay.name == "body.layers.0.weight") == (6, 3)


@pytest.mark.parametrize("looked_at", [lambda study: describe(study, "ash"), initial_model], ids=["describe", "init"])
@pytest.mark.parametrize(
    ("algorithm", "network", "said"),
    [
        ("fedavg", WIDE, "shares `body.layers.0.bias` [6], the default network shares it as [4]"),
        ("fedavg", {"name": "mlp"}, "shares no `body.layers.0.bias`, the default network shares `body.layers.0.bias` "
         "[4]"),
        ("fedavg", {"name": "mlp", "hidden": [4, 4]}, "shares `body.layers.1.bias` [4], the default network shares no "
         "`body.layers.1.bias`"),
        ("fedper", WIDE, "shares `body.layers.0.bias` [6], the default network shares it as [4]"),
    ],
    ids=["another shape", "one is missing", "one more", "the shared part alone"],
)  # fmt: skip
def test_networks_that_share_other_tensors_are_refused_by_name(
    algorithm: str, network: dict[str, Any], said: str, looked_at: Any
) -> None:
    study = study_of(algorithm, networks={"other": network}, assigned={})
    with pytest.raises(BadData) as refusal:
        looked_at(study)
    assert refusal.value.message == (
        f"network `other` of [networks] {said}; algorithm `{algorithm}` needs one architecture"
    )
    assert "mhpflgb" in refusal.value.hint


@pytest.mark.parametrize("algorithm", ["lgfedavg", "silo"])
def test_whether_networks_may_differ_is_decided_by_what_the_method_shares(algorithm: str) -> None:
    """Two bodies under heads of one shape: LG-FedAvg shares the heads alone, and training alone shares nothing."""
    study = study_of(algorithm, networks={"deep": {"name": "mlp", "hidden": [7, 4]}})
    outcome = federate(study)
    assert outcome.checkpoints["birch"]["latest"].tensors["body.layers.0.weight"].shape == (7, 3)
    assert set(outcome.shared) == ({"head.bias", "head.weight"} if algorithm == "lgfedavg" else set())


def test_private_parts_are_the_sites_own_network_with_the_sites_own_seed() -> None:
    study = study_of(assigned={"ash": "deep", "birch": "deep"})
    task, algorithm = task_of(study), algorithm_of(study)
    one, other = (build(study.at(site), task, algorithm, site) for site in ("ash", "birch"))
    assert hidden(one) == hidden(other) == [5, 3]
    assert not torch.equal(one["model"].state_dict()["head.weight"], other["model"].state_dict()["head.weight"])
    assert torch.equal(one["bypass"].state_dict()["head.weight"], other["bypass"].state_dict()["head.weight"])


# Sessions and the lab


def test_a_federation_of_unlike_networks_shares_one_bypass_and_keeps_two_networks() -> None:
    study = study_of()
    outcome = federate(study)
    ash, birch = (outcome.checkpoints[site]["latest"].tensors for site in ("ash", "birch"))
    assert ash["body.layers.0.weight"].shape == (4, 3)
    assert birch["body.layers.0.weight"].shape == (5, 3)
    for name, tensor in outcome.shared.items():
        assert torch.equal(ash[name], tensor)
        assert torch.equal(birch[name], tensor)


def test_a_site_whose_network_the_study_gives_to_all_trains_the_same_bits() -> None:
    """An assignment is only another way to say [model]."""
    deep = toy_study("mhpflgb", NORMED)
    theirs, ours = federate(deep), federate(study_of(assigned={"ash": "deep", "birch": "deep"}))
    assert theirs.digest == ours.digest
    for site in ("ash", "birch"):
        left, right = (one.checkpoints[site]["latest"].tensors for one in (theirs, ours))
        assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def test_a_session_goes_on_with_the_sites_own_network() -> None:
    study, data = study_of(), toy_data("birch")
    base = start_of(study)
    whole = SiteSession(study, "birch", task_of(study), data)
    whole.train(1, base)
    again = SiteSession(study, "birch", task_of(study), data, whole.export_state())
    assert again.train(2, base).metrics == whole.train(2, base).metrics


def test_a_state_of_another_network_is_refused() -> None:
    study, data = study_of(), toy_data("birch")
    state = SiteSession(study, "birch", task_of(study), data).export_state()
    with pytest.raises(BadData, match="the kept state does not fit the study's network"):
        SiteSession(study.at("birch", "wide"), "birch", task_of(study), data, state)


def test_the_matrix_asks_each_sites_model_in_its_own_network() -> None:
    study = study_of()
    data = {site: toy_data(site) for site in study.study.sites}
    outcome = federate(study)
    asked = Protocol(matrix=True, personalisation=(1,), sharpness=True, leave_one_out=True)
    found = measure(study, task_of(study), data, outcome, asked)
    split = data["ash"].test
    assert split is not None
    for site in ("ash", "birch"):
        own = Restored(study.at(site), task_of(study), outcome.checkpoints[site]["latest"].tensors)
        score = task_of(study).metrics(own.logits(split.x), split.y)["accuracy"]
        assert found["matrix"]["kinds"]["latest"]["matrix"]["accuracy"][site]["ash"] == score
    assert set(found["leave_one_out"]["sites"]) == {"ash", "birch"}


def test_the_study_without_a_site_assigns_it_nothing_and_the_pool_trains_the_default() -> None:
    study = study_of()
    assert without(study, "birch").assigned == {}
    pooled = pooled_study(study)
    assert (pooled.model, pooled.networks, pooled.assigned) == (study.model, {}, {})


# How large they are


def test_the_sizes_are_those_of_the_layers() -> None:
    rows = {row["network"]: row for row in sizes(study_of("fedavg", networks={}, assigned={}))}
    (default,) = rows.values()
    weights = 3 * 4 + 4 * 1  # the hidden layer, and the head with its one logit
    assert default["parameters"] == default["shared"] == weights + 4 + 1
    assert default["private"] == 0
    assert default["mflops"] == 2 * weights / 1e6


def test_the_bypass_is_counted_apart() -> None:
    found = {row["network"]: row for row in sizes(study_of(algorithm={"name": "mhpflgb", "widths": [5]}))}
    assert list(found) == ["default", "deep", "wide"]
    for label, own in (("default", 3 * 4 + 4), ("wide", 3 * 6 + 6)):
        parts = {part["part"]: part for part in found[label]["parts"]}
        width = {"default": 4, "wide": 6}[label]
        assert parts["model"] | {"mflops": 0} == _part("model", 0, own + width + 1)
        assert parts["bypass"] | {"mflops": 0} == _part("bypass", (3 * 5 + 5) + (5 + 1), 0)
        assert parts["model"]["mflops"] == 2 * own / 1e6
        assert parts["bypass"]["mflops"] == 2 * 3 * 5 / 1e6  # its body; its head is not asked
        assert parts["fusion"]["mflops"] == 2 * 5 * width / 1e6
        assert found[label]["mflops"] == pytest.approx(sum(part["mflops"] for part in parts.values()))
        assert found[label]["shared"] == parts["bypass"]["shared"]


def _part(name: str, shared: int, private: int) -> dict[str, Any]:
    return {"part": name, "parameters": shared + private, "shared": shared, "private": private, "mflops": 0}


# The commands


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "study.toml"
    path.write_text(
        '[study]\nname = "toy"\nsites = ["ash", "birch"]\nrounds = 1\n'
        '[task]\nname = "images"\nsize = [8, 8]\nchannels = 1\nclasses = ["round", "oval"]\n'
        '[model]\nname = "resnet10"\nwidth = 0.0625\n'
        '[networks.small]\nname = "squeezenet"\nwidth = 0.0625\n[assigned]\nbirch = "small"\n'
        '[algorithm]\nname = "mhpflgb"\n'
    )
    return path


def lab(*args: Any) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)


def test_size_prints_each_network_with_its_parts(file: Path) -> None:
    found = json.loads(lab("size", file, "--json").stdout)
    assert found["method"] == "mhpflgb"
    assert [(row["network"], row["model"]) for row in found["networks"]] == [
        ("default", "resnet10"), ("small", "squeezenet"),
    ]  # fmt: skip
    bypass = [part for row in found["networks"] for part in row["parts"] if part["part"] == "bypass"]
    assert bypass[0] == bypass[1]
    shown = lab("size", file).stdout
    for word in ("default: resnet10", "small: squeezenet", "bypass", "fusion", f"{bypass[0]['parameters']:,}"):
        assert word in shown
    alone = lab("size", file, "--set", "algorithm.name=silo", "--json")
    assert [row["shared"] for row in json.loads(alone.stdout)["networks"]] == [0, 0]


def test_init_refuses_networks_that_share_other_tensors_and_writes_no_file(file: Path) -> None:
    with pytest.raises(BadData, match="algorithm `fedavg` needs one architecture"):
        lab("init", file, "--set", "algorithm.name=fedavg", "--out", file.parent / "initial.safetensors")
    assert not (file.parent / "initial.safetensors").exists()


# Unlike networks, each averaged by itself: FedDF and pFedDF

TRIO = {"name": "toy", "sites": ["ash", "birch", "cedar"], "rounds": 3, "seed": 5}
SHARING = {"birch": "deep", "cedar": "deep"}  # ash trains the default network


def distilling(method: str = "feddf", *, steps: int = 0, **tables: Any) -> ResolvedStudy:
    settings = {"name": method, "distil_steps": steps, "distil_batch_size": 4}
    return study_of(method, **{"study": TRIO, "assigned": SHARING, "algorithm": settings, **tables})


def alone(study: ResolvedStudy, sites: list[str], method: str) -> Outcome:
    """These sites, which train one network, in a federation of their own."""
    one = study.at(sites[0])
    section = one.study.model_copy(update={"sites": tuple(sites)})
    algorithm = Named(name=method)
    one = resolve(one.file.model_copy(update={"study": section, "algorithm": algorithm}), lab=True)
    return federate(one)


@pytest.mark.parametrize("method", ["feddf", "pfeddf"])
def test_an_initial_model_of_unlike_networks_has_each_that_a_site_trains(method: str) -> None:
    study = distilling(method)
    start = initial_model(study)
    assert {key.rpartition("/")[0] for key in start} == {"", "network_0"}  # `deep` is the first label, `wide` unused
    assert list(start) == sorted(start)
    for site in study.study.sites:
        own = own_tensors(study.file, site, specs_of(start))
        assert tuple(own.values()) == describe(study, site).upload == describe(study, site).download
        one = initial_model(study.at(site))
        assert all(torch.equal(start[key], one[spec.key]) for key, spec in own.items())
    assert own.keys() == {key for key in start if key.startswith("network_0/")}


def test_feddf_without_steps_is_fedavg_of_each_network() -> None:
    study = distilling()
    outcome = federate(study)
    for sites, bundle in ((["ash"], ""), (["birch", "cedar"], "network_0/")):
        mean = alone(study, sites, "fedavg").shared
        assert {key for key in outcome.shared if key.rpartition("/")[0] == bundle.rstrip("/")} == {
            bundle + key for key in mean
        }
        assert all(torch.equal(outcome.shared[bundle + key], tensor) for key, tensor in mean.items())


def test_pfeddf_without_steps_is_each_site_alone_with_its_own_network() -> None:
    study = distilling("pfeddf", training={**study_tables()["training"], "init_private": "common"})
    outcome = federate(study)
    for place, site in enumerate(study.study.sites):
        theirs = alone(study, [site], "fedavg").shared
        assert {key for key in outcome.shared if key.startswith(f"site_{place}/")} == {
            f"site_{place}/{key}" for key in theirs
        }
        for key, tensor in theirs.items():
            torch.testing.assert_close(outcome.shared[f"site_{place}/{key}"], tensor, rtol=1e-5, atol=1e-6)


def a_round(study: ResolvedStudy, sites: list[str]) -> tuple[Any, Any, Any]:
    """The kept tensors, what is kept after the first round with these sites, and what each of them made."""
    start = initial_model(study)
    aggregator = server_aggregator(study, specs_of(start))
    sessions = {site: SiteSession(study, site, task_of(study), toy_data(site)) for site in sites}
    results = {site: session.train(1, downlink(aggregator, start, site, 1)) for site, session in sessions.items()}
    public_data = toy_data("ash").public_data
    made = {
        site: (
            study.at(site),
            {
                spec.key: start[source] + results[site].uplink[spec.bundle][spec.name]
                for source, spec in own_tensors(study.file, site, specs_of(start)).items()
            },
        )
        for site in sites
    }
    return start, aggregate(study, aggregator, start, 1, results, public_data)[0], made


def test_every_student_learns_what_all_networks_say_together() -> None:
    study = distilling(steps=6, networks={"deep": {"name": "mlp", "hidden": [5, 3]}})
    start, after, made = a_round(study, ["ash", "birch", "cedar"])
    public_data = toy_data("ash").public_data
    assert public_data is not None
    targets = ensemble_targets(public_data, list(made.values()))
    logits = [Restored(one, task_of(one), model).logits(public_data.x) for one, model in made.values()]
    torch.testing.assert_close(targets[:, 1], torch.sigmoid(sum(logits) / 3).squeeze(1))
    for sites, bundle in ((["ash"], ""), (["birch", "cedar"], "network_0/")):
        one, own = made[sites[0]]
        begins = {key: sum(made[site][1][key] for site in sites) / len(sites) for key in own}
        wanted = distilled(one, public_data, begins, targets, 1)
        for key, tensor in wanted.items():
            torch.testing.assert_close(after[bundle + key], tensor, rtol=1e-4, atol=1e-5)
            assert not torch.equal(after[bundle + key], start[bundle + key])


@pytest.mark.parametrize("steps", [0, 3])
def test_a_network_of_which_no_site_answered_stays_and_learns_from_the_others(steps: int) -> None:
    start, after, _ = a_round(distilling(steps=steps), ["ash"])
    moved = {key for key in start if not torch.equal(start[key], after[key])}
    assert {key for key in start if "/" not in key} <= moved
    assert (moved & {key for key in start if "/" in key} != set()) == (steps > 0)


def test_a_network_that_all_sites_train_but_which_is_not_the_default_one_is_averaged() -> None:
    """The default network is nobody's and so not in the model."""
    study = distilling(assigned=dict.fromkeys(("ash", "birch", "cedar"), "deep"))
    mean = alone(study, ["ash", "birch", "cedar"], "fedavg").shared
    shared = federate(study).shared
    assert shared.keys() == {f"network_0/{key}" for key in mean}
    assert all(torch.equal(shared[f"network_0/{key}"], tensor) for key, tensor in mean.items())


def test_networks_that_share_the_same_tensors_are_averaged_together_and_may_be_chosen() -> None:
    """They differ in dropout alone, so there is one student, as there is without [networks]."""
    study = distilling(networks={"deep": {"name": "mlp", "hidden": [4], "dropout": 0.5}})
    assert list(initial_model(study)) == list(initial_model(study.at("ash")))
    assert describe(study, "ash", "deep").upload == describe(study, "birch").upload
    assert not any("/" in key for key in federate(study).shared)


@pytest.mark.parametrize(("site", "chosen"), [("birch", "wide"), ("birch", "default"), ("ash", "deep")])
def test_a_sites_own_choice_is_refused_where_networks_are_averaged_apart(site: str, chosen: str) -> None:
    study = distilling()
    with pytest.raises(BadData) as refusal:
        describe(study, site, chosen)
    assigned = SHARING.get(site, "default")
    assert refusal.value.message == (
        "algorithm `feddf` averages each network by itself, so this site trains the one that the study gives it, "
        f"`{assigned}`, and not `{chosen}`"
    )
    assert "data.toml" in refusal.value.hint
    assert describe(study, site, assigned).upload == describe(study, site).upload


@pytest.mark.parametrize(
    ("method", "exposures"), [("feddf", ("coordinator", "", "")), ("pfeddf", ("coordinator",) * 3)]
)
def test_a_network_that_one_site_alone_trains_is_kept_as_that_sites_own_model(
    method: str, exposures: tuple[str, ...]
) -> None:
    study = distilling(method)
    assert tuple(describe(study, site).exposure for site in study.study.sites) == exposures
