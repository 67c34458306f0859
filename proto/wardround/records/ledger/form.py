"""How a record class and its JSON object become each other, by the types that its fields have.

A field without a default must be there and have its form. One with a default may be missing, and is None then. What an
object holds besides is kept in ``more`` and written again as it was.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType
from typing import Annotated, Any, Self, TypeVar, get_args, get_origin

from wardround.errors import BadData

Digest = Annotated[str, "64 lower-case hexadecimal digits"]
Unjudged = Annotated[str, "text; on disk it may have any value, for no verifier judges it"]
WRONG: Any = object()  # a converter's answer for a value that has not its form
Converter = Callable[[Any], Any]  # from a JSON value to a field's, or WRONG
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Record:
    """``more``: the fields that this version does not know, as they stood on disk."""

    more: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def from_document(cls, document: Any) -> Self:
        """The record in a JSON object.

        Raises:
            BadData: it is no object, or one of its needed fields has not its form.
        """
        record = decoded(cls, document)
        if record is WRONG:
            raise BadData(f"it does not have the form of {cls.__doc__}")
        return record

    def document(self) -> dict[str, Any]:
        """The JSON object as it stands on disk."""
        return encoded(self)


AnyRecord = TypeVar("AnyRecord", bound=Record)


@dataclass(frozen=True)
class Form:
    """A record class's fields by their names on disk.

    ``needed`` must be there. ``judged``: those that a verifier holds to their form wherever they stand in a line.
    """

    attributes: Mapping[str, str]
    converters: Mapping[str, Converter]
    needed: tuple[str, ...]
    judged: frozenset[str]


_FORMS: dict[object, Form] = {}
NOTHING = Form({}, {}, (), frozenset())  # of a type that this version does not know


def form_of(record_class: type[Record]) -> Form:
    """The form of a record class."""
    form = _FORMS.get(record_class)
    return form if form is not None else _FORMS.setdefault(record_class, _read_form(record_class))


def _read_form(record_class: type[Record]) -> Form:
    attributes, converters, needed, judged = {}, {}, [], set()
    for item in fields(record_class):
        if item.name == "more":
            continue
        name, kind = item.name.removesuffix("_"), _without_none(item.type)
        attributes[name], converters[name] = item.name, _converter(kind)
        if item.default is MISSING:
            needed.append(name)
        if kind != Unjudged:
            judged.add(name)
    return Form(attributes, converters, tuple(needed), frozenset(judged))


def decoded(record_class: type[AnyRecord], document: Any) -> AnyRecord:
    """The record in a JSON object; ``WRONG`` if it is no object, or one of its needed fields has not its form."""
    if not isinstance(document, dict):
        return WRONG  # type: ignore[no-any-return]
    form = form_of(record_class)
    attributes, converters = form.attributes, form.converters
    values: dict[str, Any] = {}
    more: dict[str, object] = {}
    for name, value in document.items():
        made = converters[name](value) if name in converters else WRONG
        if made is WRONG:
            more[name] = value
        else:
            values[attributes[name]] = made
    for name in form.needed:
        if attributes[name] not in values:
            return WRONG  # type: ignore[no-any-return]
    return record_class(more=more, **values)


def encoded(record: Record, names: Iterable[str] | None = None) -> dict[str, Any]:
    """The JSON object of a record; with ``names``, of its fields only these, as far as it has them."""
    more, attributes = record.more, form_of(type(record)).attributes
    document: dict[str, Any] = {}
    for name in (*attributes, *more) if names is None else names:
        value = getattr(record, attributes[name]) if name in attributes else None
        if value is not None:
            document[name] = _plain(value)
        elif name in more:
            document[name] = more[name]
    return document


def text(value: Any) -> Any:
    return value if isinstance(value, str) else WRONG


def count(value: Any) -> Any:
    return value if type(value) is int and value >= 0 else WRONG


def digest(value: Any) -> Any:
    return value if isinstance(value, str) and _DIGEST.fullmatch(value) is not None else WRONG


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return encoded(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _without_none(kind: Any) -> Any:
    """``kind`` of a field that is ``kind | None``."""
    kinds = [choice for choice in get_args(kind) if choice is not NoneType]
    return kinds[0] if NoneType in get_args(kind) else kind


def _converter(kind: Any) -> Converter:
    if get_origin(kind) is tuple:
        return _list_of(_converter(get_args(kind)[0]))
    if isinstance(kind, type) and issubclass(kind, Record):
        return lambda value: decoded(kind, value)
    return {str: text, int: count, Digest: digest, Unjudged: text}[kind]


def _list_of(convert: Converter) -> Converter:
    def converted(value: Any) -> Any:
        if not isinstance(value, list):
            return WRONG
        made = tuple(map(convert, value))
        return WRONG if WRONG in made else made

    return converted
