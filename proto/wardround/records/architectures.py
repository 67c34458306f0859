"""Where sites train different architectures: which tensors of a study's initial model belong to which site.

The initial model then holds every network that a site trains, each in a bundle of its own: that of [model] in "model",
that of [networks.X] in "network_K", where X is the K-th label in alphabetical order, from 0. A site uploads and
downloads its own network alone, in the bundle "model". An initial model without such bundles is the same for all sites.
"""

from collections.abc import Sequence
from dataclasses import replace

from wardround.records.study import DEFAULT_NETWORK, StudyFile
from wardround.tensors.manifests import MODEL, Manifest, TensorSpec


def bundle_of(study: StudyFile, label: str) -> str:
    """The bundle of an initial model that holds the network of this label."""
    return MODEL if label == DEFAULT_NETWORK else f"network_{sorted(study.networks).index(label)}"


def own_tensors(study: StudyFile, site: str, specs: Sequence[TensorSpec]) -> dict[str, TensorSpec]:
    """The tensors of ``site`` among those of an initial model, in their order: key there -> the site's own spec."""
    bundles = {bundle_of(study, label) for label in study.networks}
    if not any(spec.bundle in bundles for spec in specs):
        return {spec.key: spec for spec in specs}
    own = bundle_of(study, study.assigned.get(site, DEFAULT_NETWORK))
    return {spec.key: replace(spec, bundle=MODEL) for spec in specs if spec.bundle == own}


def uploaded(study: StudyFile, site: str, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """What every update of ``site`` holds: its own tensors, in the study's encoding; nothing where it only evaluates.

    Raises:
        BadData: the encoding cannot write these.
    """
    return study.encoding.encoding.sent(encoded_of(study, site, specs))


def encoded_of(study: StudyFile, site: str, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The float32 tensors that an update of ``site`` says the values of."""
    return () if site in study.study.evaluators else tuple(own_tensors(study, site, specs).values())


def own_manifest(study: StudyFile, site: str, initial: Manifest) -> Manifest:
    """The manifest of what ``site`` shares, with the initial model's values; empty where it only evaluates."""
    own = {} if site in study.study.evaluators else own_tensors(study, site, initial.specs)
    entries = [entry for entry in initial.entries if entry.spec.key in own]
    return Manifest(tuple(replace(entry, spec=own[entry.spec.key]) for entry in entries))
