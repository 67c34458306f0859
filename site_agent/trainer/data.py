"""Where a hospital's tables are, and what they were when a person named them. No torch.

``STATE/data.toml`` has one table per name. Its paths never leave the hospital, and the gateway never reads it.

    [patients]
    table = "/srv/registry/train.csv"
    label = "disease"
    test = "/srv/registry/test.csv"
    digest = "9f2c..."
"""

import csv
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from fl_algorithms.tasks.common import require_common
from fl_algorithms.tasks.source import Source
from fl_algorithms.tasks.table import data_digest, read_table
from wardround import durable
from wardround.errors import BadData, UsageProblem
from wardround.schema import Strict, check, read_toml
from wardround.study import StudyFile

DATA_CHANGED, DATA_INVALID = "DECLINED_DATA_CHANGED", "DECLINED_DATA_INVALID"
FILE_MODE = 0o640  # the trainer's user reads it through the group
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_BLOCK = 1 << 20


class DataSource(Strict):
    """A table that a hospital trains on: absolute paths, and the digest that ``data add`` found."""

    table: str
    label: str = Field(min_length=1)
    test: str | None = None
    common: str | None = None  # this site's copy of the common set of the studies trained with this data
    digest: str = Field(pattern=r"[0-9a-f]{64}")

    @property
    def table_path(self) -> Path:
        return Path(self.table)

    @property
    def test_path(self) -> Path | None:
        return None if self.test is None else Path(self.test)

    @property
    def files(self) -> Source:
        """The same, as a task takes it."""
        test = {} if self.test is None else {"test": Path(self.test)}
        return Source({"table": self.table_path, **test}, self.label)


@dataclass(frozen=True)
class Inspection:
    """What can be said of a table without a study."""

    digest: str
    rows: int
    test_rows: int | None
    columns: int


def sources(state: Path) -> dict[str, DataSource]:
    """The named tables, by name; {} before the first.

    Raises:
        BadData: data.toml is not what ``add`` writes; the message has the key.
    """
    path = state / "data.toml"
    if not path.exists():
        return {}
    return {name: check(DataSource, table, path.name, name) for name, table in read_toml(path).items()}


def source(state: Path, name: str) -> DataSource:
    """The table called ``name``.

    Raises:
        UsageProblem: there is none of that name.
    """
    known = sources(state)
    if name not in known:
        raise UsageProblem(
            f"no data is called `{name[:80]}` here",
            hint=f"there is: {', '.join(sorted(known))}"
            if known
            else "`site-agent data add NAME --table FILE.csv --label COLUMN`",
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
    if name in known and added.common is None:
        added = added.model_copy(update={"common": known[name].common})
    if name in known and known[name] != added and not replace:
        raise UsageProblem(
            f"data `{name}` is already {known[name].table}",
            hint="add `--replace` if this is meant; studies approved with the old table must then be approved again",
        )
    tables = [_as_toml(key, item) for key, item in sorted({**known, name: added}.items())]
    durable.write_file(state / "data.toml", "\n".join(tables).encode(), mode=FILE_MODE)


def name_common(state: Path, name: str, path: Path) -> None:
    """Write into data.toml that ``path`` is the common set of the studies trained with data ``name``.

    Raises:
        UsageProblem: there is no data of that name.
    """
    named = source(state, name).model_copy(update={"common": str(path)})
    add(state, name, named, replace=True)


def inspect(table: Path, test: Path | None, label: str) -> Inspection:
    """Read the files as CSV with that label column.

    Raises:
        BadData: they are not; the message has file, line and column, never a value.
    """
    read = read_table(table, [label])
    tested = None if test is None else read_table(test, [label])
    digest = data_digest(read.sha256, None if tested is None else tested.sha256, label)
    return Inspection(digest, len(read), None if tested is None else len(tested), _width(table))


def digest_now(named: DataSource) -> str:
    """The digest of the files as they are at this moment.

    Raises:
        BadData: one cannot be read.
    """
    test = named.test_path
    return data_digest(_sha256(named.table_path), None if test is None else _sha256(test), named.label)


def must_be_approved(study: str, name: str, approved: str, found: str) -> None:
    """Refuse a table other than the approved one. Both digests are hex.

    Raises:
        BadData: they differ.
    """
    if found != approved:
        raise BadData(
            f"data `{name}` is not the table that was approved for study `{study}`: "
            f"its digest is {found[:12]}…, {approved[:12]}… was approved",
            hint=f"`site-agent approve {study} --data {name}` if the change is meant",
            code=DATA_CHANGED,
        )


def common_of(study: StudyFile, name: str, named: DataSource) -> Path:
    """This site's copy of the study's common set, which must be the study's as it lies there now.

    Raises:
        BadData: none is named, it cannot be read, or its digest is not the study's.
    """
    how = f"get the set from whoever leads the study, then `site-agent data common {name} PATH`"
    if named.common is None:
        raise BadData(
            f"study `{study.study.name}` needs its common set, and data `{name}` names none",
            hint=how,
            code=DATA_INVALID,
        )
    try:
        require_common(study, Path(named.common), how)
    except BadData as error:
        raise BadData(error.message, hint=error.hint or how, code=DATA_CHANGED) from None
    return Path(named.common)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}", code=DATA_INVALID) from None
    return digest.hexdigest()


def _width(table: Path) -> int:
    """How many columns the header names; ``read_table`` has found the file to be CSV."""
    with table.open(encoding="utf-8-sig", newline="") as file:
        return len(next(row for row in csv.reader(file) if row))


def _as_toml(name: str, named: DataSource) -> str:
    rows = {
        "table": named.table, "test": named.test, "common": named.common, "label": named.label, "digest": named.digest
    }  # fmt: skip
    lines = [f"{key} = {_quoted(value)}" for key, value in rows.items() if value is not None]
    return "\n".join([f"[{name}]", *lines, ""])


def _quoted(text: str) -> str:
    """A TOML basic string. Control characters become escapes, the rest stands as it is."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else _escape(c) for c in escaped) + '"'


def _escape(character: str) -> str:
    number = ord(character)
    if 0xD800 <= number <= 0xDFFF:
        raise UsageProblem("a path that is not UTF-8 cannot be kept in data.toml", hint="rename the file or its folder")
    return f"\\u{number:04X}" if number <= 0xFFFF else f"\\U{number:08X}"
