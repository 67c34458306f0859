"""TOML that people write and read.

Reading gives frozen models, with errors that name the key and suggest the right one.
"""

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError

from wardround.errors import BadData
from wardround.signing import canonical

Model = TypeVar("Model", bound=BaseModel)


class Strict(BaseModel):
    """A table of a file: frozen, unknown keys refused, no nan or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of ``path``.

    Raises:
        BadData: it cannot be read or is not TOML; the message has the line.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}") from None
    try:
        return parse_toml(data)
    except BadData as error:
        raise BadData(f"{path}: {error.message}") from None


def parse_toml(data: bytes) -> dict[str, Any]:
    """The tables in ``data``.

    Raises:
        BadData: not UTF-8 text, not TOML (the message has the line), or nested too deeply.
    """
    try:
        tables = tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise BadData("not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise BadData(f"not TOML: {error}") from None
    except (RecursionError, ValueError) as error:  # ValueError: a number of thousands of digits
        raise BadData(f"not TOML: {str(error)[:200]}") from None
    canonical.refuse_deep(tables)
    return tables


def toml_bytes(tables: Mapping[str, Any]) -> bytes:
    """``tables`` as a TOML file.

    Raises:
        BadData: a text is not Unicode: a path whose bytes are no UTF-8.
    """
    try:
        return tomli_w.dumps(tables).encode()
    except UnicodeEncodeError:
        raise BadData("a text that is not UTF-8 cannot be written as TOML") from None


def toml_value(value: Any) -> str:
    """``value`` as TOML has it after the equals sign, on one line."""
    if isinstance(value, list):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").removesuffix("\n")


def check(model: type[Model], data: Any, source: str, table: str = "") -> Model:
    """``data`` as a ``model``.

    Args:
        source: the file, for the message.
        table: the table inside the file that ``data`` is, "" for the whole file.

    Raises:
        BadData: the first fault, as "study.toml: unknown key `learing_rate` in [training]".
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _explain(error, model, source, table) from None


def _explain(error: ValidationError, model: type[BaseModel], source: str, table: str) -> BadData:
    faults = error.errors(include_url=False, include_context=False)
    # A key that is misspelt is told before the one that is therefore missing.
    first = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    path = [part for part in first["loc"] if isinstance(part, str)]
    *tables, key = [*([table] if table else []), *path] or [""]
    inside = f" in [{'.'.join(tables)}]" if tables else ""
    if first["type"] == "extra_forbidden":
        known = _keys_at(model, path[:-1])
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"known keys there: {', '.join(sorted(known))}"
        return BadData(f"{source}: unknown key `{key}`{inside}", hint=hint)
    where = f"`{key}`{inside}"
    if _table_at(model, path) is not None:  # the fault is in a table as a whole, not in one of its keys
        where = f"[{'.'.join([*tables, key])}]" if key else ""
    if first["type"] == "missing":
        return BadData(f"{source}: {where} is missing")
    if first["type"] in ("model_type", "model_attributes_type"):
        return BadData(f"{source}: {where or 'the whole of it'} is not a table")
    said = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return BadData(f"{source}: {where}: {said}" if where else f"{source}: {said}")
    found = first.get("input")
    shown = f", found {found!r}" if isinstance(found, str | int | float | bool) and len(repr(found)) <= 60 else ""
    return BadData(f"{source}: {where}: {said[0].lower()}{said[1:]}{shown}")


def _keys_at(model: type[BaseModel], path: list[str]) -> list[str]:
    """The keys of the table that ``path`` leads to."""
    inner = _table_at(model, path)
    return list((inner or model).model_fields)


def _table_at(model: type[BaseModel], path: list[str]) -> type[BaseModel] | None:
    """The model of the table that ``path`` leads to; None if it leads to a key."""
    for part in path:
        field = model.model_fields.get(part)
        annotation = field.annotation if field else None
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        inner = next((item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel)), None)
        if inner is None:
            return None
        model = inner
    return model
