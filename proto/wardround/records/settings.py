"""``--set TABLE.KEY=VALUE``: settings that a person changes on the command line, in a study's tables."""

import tomllib
from collections.abc import Iterable
from typing import Any

from wardround.errors import BadData, UsageProblem
from wardround.signing import canonical

Setting = tuple[str, str, Any]  # a table, a key in it (with dots, of tables in that), and a value
CHOSEN_FIRST = ("algorithm", "name")  # it decides which other settings there are; ``apply`` leaves it to the caller


def read_settings(texts: Iterable[str]) -> list[Setting]:
    """The settings, each from its text; a value is TOML, or else a text without quotes.

    Raises:
        UsageProblem: one is not ``TABLE.KEY=VALUE``, or its value cannot be read.
    """
    return [_setting(text) for text in texts]


def apply(settings: Iterable[Setting], tables: dict[str, Any], source: str) -> None:
    """Write the settings into the tables of ``source``. Raises BadData: a setting goes through what is no table."""
    for table, key, value in settings:
        if (table, key) == CHOSEN_FIRST:
            continue
        held: Any = tables
        *parents, last = table, *key.split(".")
        for parent in parents:
            held = held.setdefault(parent, {})
            if not isinstance(held, dict):
                raise BadData(f"{source}: [{table}] is not a table")
        held[last] = value


def _setting(text: str) -> Setting:
    name, equals, value = text.partition("=")
    table, dot, key = name.strip().partition(".")
    if not (equals and dot and table and key):
        raise UsageProblem(f"--set {text!r} is not TABLE.KEY=VALUE", hint="as in --set training.learning_rate=0.01")
    try:
        parsed = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return table, key, value.strip()
    except (RecursionError, ValueError):  # too deep, or a number of thousands of digits
        raise UsageProblem(f"--set {name.strip()[:80]}: its value cannot be read") from None
    try:
        canonical.refuse_deep(parsed)
    except BadData as error:
        raise UsageProblem(f"--set {name.strip()[:80]}: {error.message}") from None
    return table, key, parsed
