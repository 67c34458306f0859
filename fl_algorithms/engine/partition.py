"""Which tensors of a study a site uploads, downloads and keeps private; and the networks as they start."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from fl_algorithms import registry
from fl_algorithms.engine.algorithm import Algorithm, algorithm_of, study_network
from fl_algorithms.engine.encoding import rest_specs
from fl_algorithms.engine.training import Networks, seeded
from fl_algorithms.models import checks
from fl_algorithms.rows import COORDINATOR
from fl_algorithms.server.aggregator import server_aggregator
from fl_algorithms.streams import stream_seed
from fl_algorithms.study import ResolvedStudy, SiteStudy
from fl_algorithms.tasks.base import Task
from wardround.errors import BadData
from wardround.records.architectures import bundle_of
from wardround.records.study import DEFAULT_NETWORK
from wardround.tensors.manifests import MODEL, TensorSpec

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


PARAMETERS_TOLD = 12  # in a hint
UNLIKE_HINT = (
    "methods for different networks: mhpflgb, whose shared network is its own; lgfedavg, where the heads are alike; "
    "feddf and pfeddf, which distil one into another"
)


@dataclass(frozen=True)
class PrivateTensor:
    """A tensor that never leaves, and why."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    why: str


@dataclass(frozen=True)
class Partition:
    """Every tensor of a study at a site.

    Attributes:
        upload: what leaves, in the study's encoding and in the order of the payload.
        private: networks' and the method's own.
        download: what is downloaded before each round, in the order of the payload.
        exposure, personalized: as in ``fl_algorithms.rows.MethodRow``; "" where the method as it is set exposes
            nothing.
        parameters: numbers in the parameters of all the method's networks, as `fl-lab size` counts them.
    """

    upload: tuple[TensorSpec, ...]
    private: tuple[PrivateTensor, ...]
    download: tuple[TensorSpec, ...]
    exposure: str
    parameters: int
    personalized: str = ""


def describe(study: ResolvedStudy, site: str, chosen: str = "") -> Partition:
    """What ``site`` uploads in a resolved study, what it downloads and what never leaves it. Needs torch, no data.

    Args:
        chosen: the label of the network that the site itself chose, if any.

    Raises:
        BadData: two networks of the study share different tensors, and the method does not take that or the site chose
            another than its own; or the site only evaluates, and part of the network stays at each site; or as
            ``build``.
    """
    unlike, assigned = has_heterogeneous_networks(study), study.label_of(site)
    if unlike and study.label_of(site, chosen) != assigned:
        raise BadData(
            f"algorithm `{study.method.name}` averages each network by itself, so this site trains the one that the "
            f"study gives it, `{assigned}`, and not `{chosen}`",
            hint="take `network` out of the data's entry in data.toml, or ask the study's author to assign the other",
        )
    alone = unlike and [study.label_of(other) for other in study.study.sites].count(assigned) == 1
    own = study.at(site, chosen)
    algorithm = algorithm_of(own)
    networks = build(own, task_of(own), algorithm, site)
    upload = upload_specs(own, algorithm, networks)
    download = download_specs(own, upload)
    brought = {spec.key for spec in (*upload, *download)}
    kept = tuple(
        PrivateTensor(spec.name, spec.dtype, spec.shape, spec.bytes, f"kept by {study.method.name}")
        for spec in algorithm.keeps(networks, own)
    )
    of_networks = tuple(
        PrivateTensor(
            key, DTYPES[tensor.dtype], tuple(tensor.shape), tensor.nbytes, _why_private(tensor, study.method.name)
        )
        for key, tensor in sorted(all_tensors(networks).items())
        if key not in brought
    )
    beside = _trained_alone(own, site) if own.trains_alone else ()
    evaluates = site in study.study.evaluators
    if evaluates:
        _refuse_partial(study, networks, brought)
        upload = ()
    encoding = own.encoding
    rest = tuple(
        PrivateTensor(f"rest/{spec.key}", spec.dtype, spec.shape, spec.bytes, "what an update leaves out, for the next")
        for spec in (rest_specs(encoding, upload) if encoding.keeps_rest else ())
    )
    parameters = sum(one.numel() for network in networks.values() for one in network.parameters())
    exposure, personalized = study.exposure, study.personalized
    if alone and not exposure:  # the mean of one site's network is that network
        exposure, personalized = COORDINATOR, "the site's own network, which no other site trains"
    leaves = encoding.encoding.sent(upload)
    return Partition(leaves, of_networks + kept + rest + beside, download, exposure, parameters, personalized)


def _refuse_partial(study: ResolvedStudy, networks: Networks, brought: Collection[str]) -> None:
    """Raises BadData: a parameter of the network is not downloaded, so that nobody could judge the whole of it."""
    for slot, network in networks.items():
        for name, _ in network.named_parameters():
            key = name if slot == MODEL else f"{slot}/{name}"
            if key not in brought:
                raise BadData(
                    f"this site only evaluates, and in algorithm `{study.method.name}` tensor `{key}` of the network "
                    "stays at each site: there is no whole model to judge",
                    hint="ask the study's author for a method that shares the whole network, as fedavg",
                )


def _trained_alone(study: SiteStudy, site: str) -> tuple[PrivateTensor, ...]:
    alone = study.alone()
    tensors = all_tensors(build(alone, task_of(alone), algorithm_of(alone), site))
    return tuple(
        PrivateTensor(
            f"alone/{key}", DTYPES[tensor.dtype], tuple(tensor.shape), tensor.nbytes, "trained beside the federation"
        )
        for key, tensor in sorted(tensors.items())
    )


def initial_model(study: ResolvedStudy) -> dict[str, Tensor]:
    """The uploaded tensors before the first round, by name as in a safetensors file, in the order of the payload.

    Of a study with several networks, those of the default one; where these upload different tensors, those of each that
    a site trains, as ``wardround.records.architectures`` says.

    Raises:
        BadData: as ``describe``.
    """
    if not has_heterogeneous_networks(study):
        return _shared_of(study.at(""))
    found: dict[str, Tensor] = {}
    for label in {study.label_of(site) for site in study.study.sites}:
        bundle = bundle_of(study.file, label)
        own = _shared_of(study.at("", label))
        found |= {key if bundle == MODEL else f"{bundle}/{key}": tensor for key, tensor in own.items()}
    return dict(sorted(found.items()))


def specs_of(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """What such an initial model holds, in its order."""
    parts = {key: key.rpartition("/") for key in tensors}
    return tuple(
        TensorSpec(name, DTYPES[tensors[key].dtype], tuple(tensors[key].shape), bundle or MODEL)
        for key, (bundle, _, name) in parts.items()
    )


def _shared_of(study: SiteStudy) -> dict[str, Tensor]:
    algorithm = algorithm_of(study)
    networks = build(study, task_of(study), algorithm, site="")
    tensors = all_tensors(networks)
    return {
        spec.key: tensors[spec.key].detach().clone() if spec.key in tensors else torch.zeros(spec.shape)
        for spec in upload_specs(study, algorithm, networks)
    }


def has_heterogeneous_networks(study: ResolvedStudy) -> bool:
    """Whether the study's networks upload different tensors, which only some methods can work with.

    Raises:
        BadData: this one cannot; naming the first network and tensor that differ.
    """
    if not study.networks:
        return False
    shared: dict[str, dict[str, TensorSpec]] = {}
    for label, one in study.each_network().items():
        algorithm = algorithm_of(one)
        upload = upload_specs(one, algorithm, build(one, task_of(one), algorithm, site=""))
        shared[label] = {spec.key: spec for spec in upload}
    default = shared.pop(DEFAULT_NETWORK)
    for label, uploaded in shared.items():
        differing = next(
            (key for key in sorted(default.keys() | uploaded.keys()) if default.get(key) != uploaded.get(key)), None
        )
        if differing is not None and study.method.row.heterogeneous:
            return True
        if differing is not None:
            ours, theirs = (
                f"`{differing}` {list(t[differing].shape)}" if differing in t else f"no `{differing}`"
                for t in (uploaded, default)
            )
            theirs = (
                theirs
                if differing not in uploaded or differing not in default
                else f"it as {list(default[differing].shape)}"
            )
            raise BadData(
                f"network `{label}` of [networks] shares {ours}, the default network shares {theirs}; algorithm "
                f"`{study.method.name}` needs one architecture",
                hint=UNLIKE_HINT,
            )
    return False


def task_of(study: ResolvedStudy) -> Task:
    """The study's task, ready to read data. Images are of the size that the default network sees."""
    settings = study.at("").task.settings
    task: Task = registry.load(study.task.row.implementation)(settings)
    return task


def task_at(study: ResolvedStudy, task: Task, site: str) -> Task:
    """The study's ``task`` as ``site`` reads its data: of another size where its own network sees images at one."""
    own = task_of(study.at(site))
    return task if own.input_shape == task.input_shape else own


def build(study: SiteStudy, task: Task, algorithm: Algorithm, site: str) -> dict[str, nn.Module]:
    """The networks of [model] as they start: shared parts equal everywhere, private parts the site's own.

    ``site = ""`` gives what all sites have in common.

    Raises:
        BadData: a pattern in [algorithm] chooses nothing of the networks, no parameter leaves, or a network is not one
            that a study can use.
    """
    networks = _draw(study, task, algorithm, "")
    shared = {spec.key for spec in upload_specs(study, algorithm, networks)}
    _refuse_idle_settings(study, algorithm, networks, shared)
    if not site or study.training.init_private == "common" or all_tensors(networks).keys() <= shared:
        return networks
    again = _draw(study, task, algorithm, site)
    for slot, network in networks.items():
        checks.refuse_unlike(network, again[slot], study.model.name)
    own = all_tensors(again)
    with torch.no_grad():
        for key, tensor in all_tensors(networks).items():
            if key not in shared:
                tensor.copy_(own[key])
    return networks


def _refuse_idle_settings(study: SiteStudy, algorithm: Algorithm, networks: Networks, shared: Collection[str]) -> None:
    settings = study.method.settings
    names = {
        name if slot == MODEL else f"{slot}/{name}": name
        for slot, network in networks.items()
        for name, parameter in network.named_parameters()
        if parameter.requires_grad
    }
    head = settings.head_patterns
    tuned = settings.fine_tuning.train if settings.fine_tuning is not None else ()
    for key, patterns in (("head", head), ("fine_tuning.train", tuned)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names.values()):
                raise BadData(
                    f"`{key}` in [algorithm] has `{pattern[:60]}`, which no parameter of model `{study.model.name}` is "
                    "called",
                    hint=f"there are: {', '.join(sorted(set(names.values()))[:PARAMETERS_TOLD])}",
                )
    if algorithm.shares and not names.keys() & set(shared) and not study.method.row.lab_only:
        raise BadData(
            f"algorithm `{study.method.name}` as it is set shares no parameter of model `{study.model.name}`",
            hint="`head` in [algorithm] takes all of them" if head else "",
        )


def _draw(study: SiteStudy, task: Task, algorithm: Algorithm, site: str) -> dict[str, nn.Module]:
    networks = {}
    for slot, builder in algorithm.slots.items():
        purpose = "init" if builder is study_network else f"init.{slot}"
        with seeded(stream_seed(study.study.seed, site, 0, purpose)):
            networks[slot] = builder(study, task).eval()
        checks.refuse_unusable(networks[slot], study.model.name)
    return networks


def all_tensors(networks: Networks) -> dict[str, Tensor]:
    """Every parameter and buffer, live; those of the slot "model" by their own name, others as "SLOT/NAME"."""
    return {
        name if slot == MODEL else f"{slot}/{name}": tensor
        for slot, network in networks.items()
        for name, tensor in network.state_dict().items()
    }


def upload_specs(study: SiteStudy, algorithm: Algorithm, networks: Networks) -> tuple[TensorSpec, ...]:
    """What a site uploads, in the order in which safetensors writes float32 tensors: by key."""
    specs = [
        TensorSpec(name, DTYPES[tensor.dtype], tuple(tensor.shape), share.bundle)
        for share in algorithm.shares
        for name, tensor in share.tensors(networks).items()
    ]
    return tuple(sorted((*specs, *algorithm.extras(networks, study)), key=lambda spec: spec.key))


def download_specs(study: SiteStudy, upload: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """What is downloaded before each round, in the order of the payload."""
    return server_aggregator(study, upload).download if upload else ()


def _why_private(tensor: Tensor, algorithm: str) -> str:
    if not tensor.dtype.is_floating_point:
        return "an integer buffer never travels"
    return f"private in {algorithm}"


def restore(live: Mapping[str, Tensor], values: Mapping[str, Tensor], source: str) -> None:
    """Copy ``values`` into ``live``, which must have the same names, shapes and dtypes."""
    if live.keys() != values.keys():
        odd = sorted(live.keys() ^ values.keys())[0]
        where = "is missing" if odd in live else "belongs to no tensor of this network"
        raise BadData(f"{source} does not fit the study's network: `{odd}` {where}")
    with torch.no_grad():
        for name, tensor in live.items():
            found = values[name]
            if found.shape != tensor.shape or found.dtype != tensor.dtype:
                raise BadData(
                    f"{source} does not fit the study's network: `{name}` is {DTYPES.get(found.dtype, '?')} "
                    f"{list(found.shape)}, the network's is {DTYPES[tensor.dtype]} {list(tensor.shape)}"
                )
            tensor.copy_(found)
