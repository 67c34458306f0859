"""The keys of a study file's tables for people: type, range, default and meaning. Reads settings' classes and their
source; imports no torch.

What a key means stands beside it in the code: under ``Attributes:`` of its class, or as the comment of its line.
"""

import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

WORDS = {"integer": "whole number", "number": "number", "boolean": "true or false", "string": "text"}
BOUNDS = (("minimum", "at least"), ("exclusiveMinimum", "above"), ("maximum", "at most"), ("exclusiveMaximum", "below"))
ENTRY = re.compile(r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {8,}.*)*)", re.MULTILINE)
FIELD = re.compile(r"^    (\w+): ")


@dataclass(frozen=True)
class Key:
    """One key of a table; ``name`` is with those of the tables that it is in.

    Attributes:
        table: the class that has it.
        optional: the table that it is in may be left out.
        inner: the class of the table that it is, or of each of its tables.
    """

    name: str
    table: type[BaseModel]
    default: Any
    range: str
    needed: bool
    optional: bool
    inner: type[BaseModel] | None = None

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def meaning(self) -> str:
        """What the code says that it means; "" for nothing."""
        said = next((found for kind in self.table.__mro__ if (found := _said(kind).get(self.last))), "")
        if not said and self.inner is not None:
            said = (inspect.getdoc(self.inner) or "").partition("\n\n")[0]
        sentence = " ".join(said.replace("None:", "left out:").split())
        return sentence if sentence.endswith("...") else sentence.removesuffix(".")

    @property
    def written(self) -> str:
        """The default as it stands in a study file; a default of None is a key that is left out."""
        return written(self.default)


def keys(table: type[BaseModel]) -> Iterator[Key]:
    """Those of ``table`` and of the tables in it, in the order of the code."""
    yield from _keys(table, {}, "", optional=False)


def _keys(table: type[BaseModel], given: Mapping[str, Any], prefix: str, *, optional: bool) -> Iterator[Key]:
    schema = table.model_json_schema()
    for name, field in table.model_fields.items():
        described = schema["properties"].get(name, {})
        default = given.get(name, described.get("default", _made(field)))
        inner, many = _table_inside(field.annotation), described.get("type") in ("array", "object")
        if inner is None or not issubclass(inner, BaseModel) or not inner.model_fields or _is_open(inner):
            yield Key(prefix + name, table, default, _range(described, schema), field.is_required(), optional)
        else:
            left_out = optional or (not field.is_required() and not default)
            inside = default if isinstance(default, Mapping) else {}
            yield Key(prefix + name, table, None, "tables" if many else "a table", field.is_required(), left_out, inner)
            yield from _keys(inner, inside, f"{prefix}{name}{'[]' if many else ''}.", optional=left_out)


def _made(field: FieldInfo) -> Any:
    """The table that a field makes where none is given, as JSON has it; None where it makes none."""
    made = field.get_default(call_default_factory=True) if field.default_factory else None
    return made.model_dump(mode="json") if isinstance(made, BaseModel) else None


def _is_open(table: type[BaseModel]) -> bool:
    """Whether it takes keys that it does not name: another table's."""
    return table.model_config.get("extra") == "allow"


def _table_inside(annotation: Any) -> type[BaseModel] | None:
    """The table that a key is, or holds many of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for each in get_args(annotation) if (found := _table_inside(each)) is not None), None)


def _range(described: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    options = [option for option in described.get("anyOf", [described]) if option.get("type") != "null"]
    return " or ".join(_one_range(option, schema) for option in options)


def _one_range(option: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    if "$ref" in option:
        return "a table"
    if "enum" in option:
        return ", ".join(map(str, option["enum"]))
    if "const" in option:
        return str(option["const"])
    if option.get("type") == "array":
        if "prefixItems" in option:
            return f"{len(option['prefixItems'])} of: {_range(option['prefixItems'][0], schema)}"
        items = option.get("items") or {}
        return f"a list of {_range(items, schema)}" if items else "a list"
    if option.get("type") == "object":
        items = option.get("additionalProperties")
        return f"names with {_range(items, schema)}" if isinstance(items, Mapping) and items else "a table"
    said = [WORDS.get(str(option.get("type")), str(option.get("type", "anything")))]
    said += [f"{word} {_number(option[bound])}" for bound, word in BOUNDS if bound in option]
    return ", ".join(said)


def _number(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:.12g}"


def written(value: Any) -> str:
    """A default as it stands in a study file; None is a key that is left out."""
    if value is None:
        return "–"
    return str(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


@cache
def _said(table: type[BaseModel]) -> Mapping[str, str]:
    """What the class itself says of its keys."""
    if "model_fields" not in dir(table) or table is BaseModel:
        return {}
    lines = textwrap.dedent(inspect.getsource(table)).splitlines()
    said = _commented(lines)
    attributes = inspect.cleandoc(table.__doc__ or "").partition("Attributes:\n")[2]
    for names, text in ENTRY.findall(attributes):
        said |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return said


def _commented(lines: list[str]) -> dict[str, str]:
    """The comment on each field's line or lines; else that of the lines above it."""
    said, above, field, depth = dict[str, str](), list[str](), "", 0
    for line in lines:
        code, mark, comment = _divided(line)
        if not depth and mark and not code.strip():
            above.append(comment)
            continue
        if not depth:
            begun = FIELD.match(line)
            field = begun[1] if begun else ""
            if field and above:
                said[field] = " ".join(above)
            above = []
        depth += sum(code.count(one) for one in "([{") - sum(code.count(one) for one in ")]}")
        if field and mark and not comment.startswith(("type:", "noqa", "fmt:")):
            said[field] = comment.partition("  # ")[0]
    return said


def _divided(line: str) -> tuple[str, str, str]:
    """A line's code, "#" if it has a comment, and the comment."""
    quote = ""
    for place, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character == "#":
            return line[:place], "#", line[place + 1 :].strip()
    return line, "", ""
