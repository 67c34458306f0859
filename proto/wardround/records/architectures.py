"""Where sites train unlike networks: which tensors of a study's initial model are whose.

The initial model then holds every network that a site trains, each in a bundle of its own: that of [model] in "model",
that of [networks.X] in "network_K", where X is the K-th label in the order of the alphabet, from 0. What a site sends
and downloads is its network alone, in "model". An initial model without such bundles is every site's as it is.
"""

from collections.abc import Sequence
from dataclasses import replace

from wardround.records.study import DEFAULT_NETWORK, StudyFile
from wardround.tensors.manifests import MODEL, Manifest, TensorSpec


def bundle_of(study: StudyFile, label: str) -> str:
    """Where the network of that label lies in an initial model of unlike networks."""
    return MODEL if label == DEFAULT_NETWORK else f"network_{sorted(study.networks).index(label)}"


def own_tensors(study: StudyFile, site: str, specs: Sequence[TensorSpec]) -> dict[str, TensorSpec]:
    """Of an initial model's tensors those of ``site``, in their order: key there -> what the site calls it."""
    apart = {bundle_of(study, label) for label in study.networks}
    if not any(spec.bundle in apart for spec in specs):
        return {spec.key: spec for spec in specs}
    own = bundle_of(study, study.assigned.get(site, DEFAULT_NETWORK))
    return {spec.key: replace(spec, bundle=MODEL) for spec in specs if spec.bundle == own}


def own_part(study: StudyFile, site: str, initial: Manifest) -> Manifest:
    """The part of an initial model that is of ``site``, as it calls it."""
    own = own_tensors(study, site, initial.specs)
    entries = [entry for entry in initial.entries if entry.spec.key in own]
    return Manifest(tuple(replace(entry, spec=own[entry.spec.key]) for entry in entries))
