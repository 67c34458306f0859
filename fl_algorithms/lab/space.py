"""What a search may try: for each key of a study a list of values, or a range, as TOML has it.

    training.batch_size = [4, 8, 16]
    training.learning_rate = { low = 1e-4, high = 1e-1, log = true }
    training.local_steps = { low = 10, high = 200 }          two whole numbers: whole numbers alone

Importing this needs no torch.
"""

import itertools
import math
import tomllib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, model_validator

from fl_algorithms.streams import stream_seed
from wardround.errors import BadData, UsageProblem
from wardround.records.schema import Strict, check

TUNABLE = ("model", "algorithm", "training")
DIGITS = 4  # of a number that is drawn, so that a person can write it

Value = bool | int | float | str | tuple[int, ...]
Settings = dict[str, Value]  # "training.learning_rate" -> 0.1


class Range(Strict):
    """Numbers from ``low`` to ``high``, both included; whole ones where both ends are whole.

    Drawn evenly, or with ``log`` so that each factor of ten is as likely as the next.
    """

    low: int | float
    high: int | float
    log: bool = False

    @model_validator(mode="after")
    def _ordered(self) -> "Range":
        if not self.low < self.high:
            raise ValueError(f"`low` is {self.low}, which is not below `high`, {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"with `log` both ends are above 0, `low` is {self.low}")
        return self

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def at(self, place: float) -> int | float:
        """The number at ``place`` of the range, 0 to 1."""
        low, high = (self.low, self.high) if not self.whole else (self.low - 0.5, self.high + 0.5)
        if self.log:
            found = math.exp(math.log(low) + place * (math.log(high) - math.log(low)))
        else:
            found = low + place * (high - low)
        return self.rounded(found)

    def rounded(self, value: float) -> int | float:
        """``value`` as it is written in a study: whole, or with four digits, inside the range."""
        if self.whole:
            return int(min(self.high, max(self.low, round(value))))
        return float(min(self.high, max(self.low, float(f"{value:.{DIGITS}g}"))))


def _range(written: Any) -> Any:
    """A table as a range, with its own fault in place of "neither a list nor a range"."""
    if not isinstance(written, dict):
        return written
    try:
        return check(Range, written, "range")
    except BadData as error:
        raise ValueError(error.message.removeprefix("range: ")) from None


Among = Annotated[tuple[Value, ...] | Range, BeforeValidator(_range)]
Space = Mapping[str, Among]  # the key of a study -> what is tried


def refuse_unfit(space: Mapping[str, Among]) -> None:
    """Raises ValueError: a key cannot be tuned, or has no list of values."""
    for key, among in space.items():
        table, dot, _ = key.partition(".")
        if not dot or table not in TUNABLE:
            raise ValueError(f"{key!r} is no key of {', '.join(f'[{name}]' for name in TUNABLE)}")
        if not isinstance(among, Range) and (not among or any(among.count(value) > 1 for value in among)):
            raise ValueError(f"{key!r} needs a list of values, each once")


class _Over(Strict):
    over: dict[str, Among]

    @model_validator(mode="after")
    def _fit(self) -> "_Over":
        refuse_unfit(self.over)
        return self


def parse(texts: Sequence[str]) -> dict[str, Among]:
    """The space of ``--over KEY=VALUES`` options.

    Raises:
        UsageProblem: one is no key with a list or a range; or a key stands twice.
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, written = text.partition("=")
        key = key.strip()
        if key in found:
            raise UsageProblem(f"--over {key} stands twice")
        try:
            found[key] = tomllib.loads(f"value = {written.strip()}")["value"]
        except (tomllib.TOMLDecodeError, RecursionError, ValueError):
            found[key] = None
        if not equals or not isinstance(found[key], list | dict):
            raise UsageProblem(
                f"--over {text[:80]!r} is not TABLE.KEY=[VALUE, ...] or TABLE.KEY={{ low = A, high = B }}",
                hint="as in --over 'training.learning_rate={ low = 1e-4, high = 0.1, log = true }'",
            )
    try:
        return check(_Over, {"over": found}, "--over").over
    except BadData as error:
        raise UsageProblem(error.message, hint=error.hint) from None


def grid(space: Space) -> list[Settings]:
    """Every combination, the last key's values fastest; one empty one of an empty space.

    Raises:
        UsageProblem: a key has a range.
    """
    for key, among in space.items():
        if isinstance(among, Range):
            raise UsageProblem(
                f"a grid tries every value, and `{key}` has a range of them",
                hint="give a list of values, or search at random",
            )
    lists = [among for among in space.values() if not isinstance(among, Range)]
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*lists)]


def drawn(space: Space, seed: int, number: int) -> Settings:
    """Draw ``number`` of a random search: each key from a stream of its own, so that another key changes none."""
    return {key: _drawn(among, stream_seed(seed, key, number, "search")) for key, among in space.items()}


def document(space: Space) -> dict[str, Any]:
    """As plain JSON."""
    return {
        key: among.model_dump() if isinstance(among, Range) else [_plain(value) for value in among]
        for key, among in space.items()
    }


def _drawn(among: Among, chance: int) -> Value:
    """``chance``: 63 bits, every number as likely."""
    return among.at(chance / 2**63) if isinstance(among, Range) else among[chance % len(among)]


def _plain(value: Value) -> Any:
    return list(value) if isinstance(value, tuple) else value
