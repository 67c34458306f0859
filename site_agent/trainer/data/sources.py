"""Where a hospital's data is, and what it was when a person named it. No torch.

``STATE/data.toml`` has one table per name. Its paths never leave the hospital, and the gateway never reads it.

    [patients]
    table = "/srv/registry/train.csv"
    label = "disease"
    test = "/srv/registry/test.csv"
    digest = "9f2c..."

    [lesions]
    images = "/srv/dermoscopy/images"
    labels = "/srv/dermoscopy/labels.csv"
    patient = "lesion"
    digest = "04be..."
    network = "small"
    weights = "/srv/models/small.safetensors"

The last two may be left out: the label of the network that this hospital trains on the data, where a study has several,
and the file that the tensors which stay here begin with.
"""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from fl_algorithms.study import ResolvedStudy
from fl_algorithms.tasks.public_data import require_public_data
from fl_algorithms.tasks.source import Source, files_digest
from fl_algorithms.tasks.tables.table import data_digest
from site_agent.trainer.data import layouts
from wardround.errors import BadData, UsageProblem, WardroundError
from wardround.local import durable
from wardround.records.schema import Strict, check, read_toml, toml_bytes
from wardround.records.study import NETWORK_LABEL

DATA_CHANGED, DATA_INVALID = "DECLINED_DATA_CHANGED", "DECLINED_DATA_INVALID"
FILE_MODE = 0o640  # the trainer's user reads it through the group
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_BLOCK = 1 << 20


class DataSource(Strict):
    """What a hospital trains on: absolute paths in one of ``layouts.LAYOUTS``, columns, and the digest at ``data add``.

    Attributes:
        mapping: the file that says how this site's table becomes the study's; a part of the data's digest.
        label, image, patient: columns of this site's tables, or arrays; "" for the study's own.
        public_data: this site's copy of the public data set of the studies trained with this data.
        weights: what the private tensors begin with; no part of the data's digest, for the consent has its own.
        network: the label of a network that the study allows; "" for the one that it assigns.
    """

    table: str | None = None
    test: str | None = None
    arrays: str | None = None
    test_arrays: str | None = None
    images: str | None = None
    labels: str | None = None
    masks: str | None = None
    test_images: str | None = None
    test_labels: str | None = None
    test_masks: str | None = None
    files: str | None = None
    test_files: str | None = None
    mapping: str | None = None
    label: str = ""
    image: str = ""
    patient: str = ""
    public_data: str | None = None
    weights: str | None = None
    digest: str = Field(pattern=r"[0-9a-f]{64}")
    network: str = Field(default="", pattern=rf"^({NETWORK_LABEL.pattern})?$")

    @model_validator(mode="after")
    def _one_layout(self) -> Self:
        try:
            layouts.layout_of(self._given(), layouts.key)
        except UsageProblem as problem:
            raise ValueError(problem.message) from None
        return self

    @property
    def layout(self) -> layouts.Layout:
        return layouts.layout_of(self._given())

    @property
    def paths(self) -> dict[str, Path]:
        """What is named, by key."""
        return {name: Path(value) for name in layouts.PATHS if (value := getattr(self, name)) is not None}

    @property
    def everything(self) -> list[Path]:
        """What is named, the public data set and the weights too."""
        beside = [Path(text) for text in (self.public_data, self.weights) if text is not None]
        return [*self.paths.values(), *beside]

    @property
    def source(self) -> Source:
        """The same, as a task takes it."""
        roles = {"test" if name == "test_arrays" else name: path for name, path in self.paths.items()}
        return Source(roles, self.label, self.patient, self.image)

    def entry(self) -> dict[str, str]:
        """Its entry in data.toml: what is named, by key."""
        return {key: value for key, value in self.model_dump().items() if value}

    def _given(self) -> list[str]:
        return [name for name in (*layouts.PATHS, *layouts.COLUMNS) if getattr(self, name)]


def sources(state: Path) -> dict[str, DataSource]:
    """What has a name here, by name; {} before the first.

    Raises:
        BadData: data.toml is not what ``add`` writes; the message has the key.
    """
    path = state / "data.toml"
    if not path.exists():
        return {}
    return {name: check(DataSource, table, path.name, name) for name, table in read_toml(path).items()}


def protected(state: Path) -> list[Path]:
    """What nothing that a person asks for is written onto: the state directory, and the data that has a name there."""
    try:
        named = [path for source in sources(state).values() for path in source.everything]
    except WardroundError:
        named = []  # a user who may not read where the data is, or nobody can: the data is not this user's to write
    return [state, *named]


def source(state: Path, name: str) -> DataSource:
    """The data called ``name``.

    Raises:
        UsageProblem: there is none of that name.
    """
    known = sources(state)
    if name not in known:
        raise UsageProblem(
            f"no data is called `{name[:80]}` here",
            hint=f"there is: {', '.join(sorted(known))}"
            if known
            else f"`site-agent data add NAME` with {layouts.EXAMPLES}",
            code=DATA_INVALID,
        )
    return known[name]


def add(state: Path, name: str, added: DataSource, *, replace: bool) -> None:
    """Write ``added`` into data.toml under ``name``, durably.

    Raises:
        UsageProblem: the name is of another form, or taken and not to be replaced.
    """
    if not NAME.fullmatch(name):
        raise UsageProblem(f"{name[:80]!r} is not a name of 1 to 64 of A-Z, a-z, 0-9, _ and -")
    known = sources(state)
    if name in known and added.public_data is None:
        added = added.model_copy(update={"public_data": known[name].public_data})
    if name in known and known[name] != added and not replace:
        raise UsageProblem(
            f"data `{name}` is already {next(iter(known[name].paths.values()))}",
            hint="add `--replace` if this is meant; studies approved with the old data must then be approved again",
        )
    tables = {key: item.entry() for key, item in sorted({**known, name: added}.items())}
    try:
        data = toml_bytes(tables)
    except BadData:
        raise UsageProblem(
            "a path that is not UTF-8 cannot be kept in data.toml", hint="rename the file or its folder"
        ) from None
    durable.write_file(state / "data.toml", data, mode=FILE_MODE)


def name_public_data(state: Path, name: str, path: Path) -> None:
    """Write into data.toml that ``path`` is the public data set of the studies trained with data ``name``.

    Raises:
        UsageProblem: there is no data of that name.
    """
    named = source(state, name).model_copy(update={"public_data": str(path)})
    add(state, name, named, replace=True)


def name_mapping(state: Path, name: str, path: Path, digest: str) -> None:
    """Write into data.toml that ``path`` is the mapping of data ``name``, whose digest is then ``digest``.

    Raises:
        UsageProblem: there is no data of that name.
    """
    named = source(state, name).model_copy(update={"mapping": str(path), "digest": digest})
    add(state, name, named, replace=True)


def digest_now(named: DataSource, tell: Callable[[int, int], object] = lambda done, of: None) -> str:
    """The digest of the files as they are at this moment.

    Args:
        tell: of images, called after each file of a folder, with how many were read, and of how many.

    Raises:
        BadData: one cannot be read.
    """
    if named.layout is layouts.TABLE:
        digests = {role: _sha256(path) for role, path in named.paths.items()}
        return data_digest(
            digests["table"], digests.get("test"), named.label,
            patient=named.patient, mapping_sha256=digests.get("mapping"),
        )  # fmt: skip
    from fl_algorithms.tasks.images.sets import source_digest

    try:
        return files_digest(named.source) if named.layout is layouts.OWN else source_digest(named.source, tell)
    except BadData as error:
        raise BadData(error.message, hint=error.hint, code=DATA_INVALID) from None


def weights_now(named: DataSource) -> str:
    """The digest of the file of weights as it is at this moment; "" where none is named. Raises BadData as above."""
    return "" if named.weights is None else _sha256(Path(named.weights))


def refuse_other_data(study: str, name: str, approved: str, now: str) -> None:
    """Refuse data other than the approved. Both digests are hex.

    Raises:
        BadData: they differ.
    """
    if now != approved:
        raise BadData(
            f"data `{name}` is not what was approved for study `{study}`: "
            f"its digest is {now[:12]}…, {approved[:12]}… was approved",
            hint=f"`site-agent approve {study} --data {name}` if the change is meant",
            code=DATA_CHANGED,
        )


def refuse_other_network(study: str, name: str, approved: str, now: str) -> None:
    """Refuse to train another network of the study than the approved one.

    Raises:
        BadData: the labels differ.
    """
    if now != approved:
        raise BadData(
            f"network `{now}` of study `{study}` is what `{name}` would train; `{approved}` was approved",
            hint=f"`site-agent approve {study} --data {name}` if the change is meant",
            code=DATA_CHANGED,
        )


def refuse_other_weights(study: str, name: str, approved: str, now: str) -> None:
    """Refuse to begin with other weights than the approved ones. Digests are hex; "" is for none.

    Raises:
        BadData: they differ.
    """
    if now != approved:
        shown = f"digest {now[:12]}…" if now else "none"
        was = f"{approved[:12]}…" if approved else "none"
        raise BadData(
            f"the weights that data `{name}` names are not what was approved for study `{study}`: {shown}, {was} was "
            "approved",
            hint=f"`site-agent approve {study} --data {name}` if the change is meant",
            code=DATA_CHANGED,
        )


def public_data_of(study: ResolvedStudy, name: str, named: DataSource) -> Path:
    """This site's copy of the study's public data set, which must be the study's as it lies there now.

    Raises:
        BadData: none is named, it cannot be read, or its digest is not the study's.
    """
    how = f"get the set from whoever leads the study, then `site-agent data public-data {name} PATH`"
    if named.public_data is None:
        raise BadData(
            f"study `{study.study.name}` needs its public data set, and data `{name}` names none",
            hint=how,
            code=DATA_INVALID,
        )
    try:
        require_public_data(study, Path(named.public_data), how)
    except BadData as error:
        raise BadData(error.message, hint=error.hint or how, code=DATA_CHANGED) from None
    return Path(named.public_data)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}", code=DATA_INVALID) from None
    return digest.hexdigest()
