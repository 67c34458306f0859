"""Documents of a strict record, drawn from its fields and their bounds, for round trips of codecs."""

from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st
from pydantic import BaseModel, JsonValue

from wardround.records.trainer import fields

ASCII = st.characters(codec="ascii")
PLAIN = st.text(st.characters(categories=["L", "N", "P", "Zs"]), max_size=40)
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    fields.Count: st.integers(0, fields.BIG), fields.Reported: st.integers(-fields.BIG, fields.BIG),
    fields.Words: st.text(max_size=fields.MOST_SHOWN + 5), fields.Place: PLAIN, fields.Value: PLAIN,
    fields.Dtype: st.sampled_from(["F32", "I64", "BOOL"]), fields.Bundle: PLAIN, fields.UserName: PLAIN,
    fields.Path: st.text(max_size=40), fields.Name: st.text(max_size=40), fields.SiteName: st.text(max_size=40),
    bool: st.booleans(), float: st.floats(allow_nan=False, allow_infinity=False), int: st.integers(0, 9),
    type(None): st.none(),
}  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=5,
)


def drawn(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type, within its bounds."""
    if kind in BY_TYPE:
        return BY_TYPE[kind]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return of(kind)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        bounds = [bound for info in kind.__metadata__ for bound in getattr(info, "metadata", ())]
        pattern = next((bound.pattern for bound in bounds if getattr(bound, "pattern", None)), None)
        least = max((bound.min_length for bound in bounds if hasattr(bound, "min_length")), default=0)
        if least and inner[0] is str and pattern is None:
            return st.text(min_size=least, max_size=20)
        return drawn(inner[0]) if pattern is None else st.from_regex(pattern, fullmatch=True, alphabet=ASCII)
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (list, tuple):
        return st.lists(drawn(inner[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(drawn(inner[0]), JSON if inner[1] is JsonValue else drawn(inner[1]), max_size=3)
    if origin is Union or type(kind).__name__ == "UnionType":
        return st.one_of(*map(drawn, inner))
    if kind is str:
        return st.text(max_size=20)
    raise AssertionError(f"no values of {kind}")


@cache
def of(form: type[BaseModel]) -> st.SearchStrategy[Any]:
    """Documents of a record."""
    hints = get_type_hints(form, include_extras=True)
    return st.fixed_dictionaries({name: drawn(hints[name]) for name in form.model_fields})
