"""Unlike networks in one initial model: which part of it is whose."""

from typing import Any

import pytest

from wardround.records.architectures import bundle_of, own_manifest, own_tensors
from wardround.records.study import StudyFile
from wardround.tensors.manifests import Entry, Manifest, TensorSpec

SMALL, WIDE = TensorSpec("w", "F32", (2,), "network_1"), TensorSpec("w", "F32", (6,), "network_0")
DEFAULT = TensorSpec("w", "F32", (4,))
SPECS = (WIDE, SMALL, DEFAULT)


def study_of(**tables: Any) -> StudyFile:
    named = {"name": "mlp"}
    return StudyFile.model_validate(
        {
            "study": {"name": "toy", "sites": ["ash", "birch", "cedar"], "rounds": 1},
            "task": {"name": "tabular"},
            "model": named,
            "algorithm": {"name": "feddf"},
            "networks": {"wide": named, "small-2": named, "a": named},
            "assigned": {"birch": "small-2", "cedar": "wide"},
            **tables,
        }
    )


def test_a_networks_bundle_is_its_labels_place_in_the_alphabet() -> None:
    study = study_of()
    assert {label: bundle_of(study, label) for label in ("default", "a", "small-2", "wide")} == {
        "default": "model", "a": "network_0", "small-2": "network_1", "wide": "network_2",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("site", "key", "shape"), [("ash", "w", (4,)), ("birch", "network_0/w", (6,)), ("cedar", "network_1/w", (2,))]
)
def test_a_site_has_its_own_network_alone_and_calls_it_model(site: str, key: str, shape: tuple[int, ...]) -> None:
    study = study_of(networks={"b": {"name": "mlp"}, "a": {"name": "mlp"}}, assigned={"birch": "a", "cedar": "b"})
    assert own_tensors(study, site, SPECS) == {key: TensorSpec("w", "F32", shape)}
    digests = {spec.key: str(place) * 64 for place, spec in enumerate(SPECS)}
    found = own_manifest(study, site, Manifest(tuple(Entry(spec, digests[spec.key]) for spec in SPECS)))
    assert found.entries == (Entry(TensorSpec("w", "F32", shape), digests[key]),)


def test_an_initial_model_of_one_list_is_every_sites() -> None:
    alike = (TensorSpec("b", "F32", (1,)), TensorSpec("w", "F32", (2,), "control"))
    for study in (study_of(), study_of(networks={}, assigned={})):
        for site in study.study.sites:
            assert tuple(own_tensors(study, site, alike).items()) == (("b", alike[0]), ("control/w", alike[1]))


def test_a_network_that_the_initial_model_lacks_leaves_its_site_nothing() -> None:
    study = study_of()
    assert own_tensors(study, "cedar", SPECS) == {}
