"""One account of a study: all that changes what is computed here or leaves, before anybody approves it.

It is made from the whole of the study's document, leaf by leaf, so that a setting which somebody adds later stands in
it without a change here; then from what this site's own trainer says of the installed model, from this hospital's
policy, and from how far a consent goes. ``preview`` and ``approve`` print the same one; its digest is what is approved.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from site_agent.gateway.consent.facts import begins_with, size, trains
from site_agent.state import directory
from site_agent.state.directory import COUNTS, Offer, Shown
from wardround.signing import canonical

TAKES_PART = "Who takes part, how often and until when"
COMPUTED = "What is computed here, on this hospital's patients"
LEAVES = "What leaves this hospital, each round"
OWN = "Who else has a model of this site's alone"
STAYS = "What comes, and what stays here"
LIMITS = "How far this consent goes"
POLICY = "What this hospital's policy says"
OTHER = "Other settings of the study"
HEADINGS = (TAKES_PART, COMPUTED, LEAVES, OWN, STAYS, LIMITS, POLICY, OTHER)
UNDER = {  # where a setting stands, by the longest of these that its name begins with
    "study.": TAKES_PART, "study.seed": COMPUTED, "study.threads": COMPUTED, "task.": COMPUTED, "model.": COMPUTED,
    "networks.": COMPUTED, "assigned.": COMPUTED, "algorithm.": COMPUTED, "training.": COMPUTED,
    "checkpoints.": COMPUTED, "public_data.": COMPUTED, "reported.": LEAVES,
}  # fmt: skip
PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")
PLAIN_TEXT = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.:/+ -]*[A-Za-z0-9_])?|-?[0-9.]+(?:e[+-]?[0-9]+)?")
WORDS = ("none", "true", "false")  # what stands for no text
SHORT = 16  # hex digits of a digest that a person or script gives back: 64 bits
SHORTEST, LONGEST = -323, 308  # decimal exponents of a double
COUNT_BITS = {"exact": 53, "bucketed": 6, "uniform": 0}


@dataclass(frozen=True)
class Line:
    """``was`` is what stood there in the account before; None where it is the same, "" where nothing did."""

    name: str
    value: str
    was: str | None = None

    def sentence(self) -> str:
        """The change of this line."""
        return f"{self.name} {self.was} -> {self.value}" if self.was else f"{self.name} {self.value} is new"


@dataclass(frozen=True)
class Account:
    """``groups`` are (heading, lines); ``gone`` the lines of the account before that no line has any more; ``since``
    says which one that was, "" if there was none.
    """

    study: str
    revision: int
    study_digest: str
    title: str
    groups: tuple[tuple[str, tuple[Line, ...]], ...]
    gone: tuple[Line, ...] = ()
    since: str = ""

    @property
    def lines(self) -> dict[str, str]:
        return {line.name: line.value for _, lines in self.groups for line in lines}

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over all that it says, but for the marks of changes."""
        return canonical.digest(
            {"study": self.study, "revision": self.revision, "study_digest": self.study_digest, "lines": self.lines}
        )

    def shown(self) -> Shown:
        """As it is kept, for comparing later ones."""
        return Shown(self.digest, self.study_digest, self.revision, directory.now_text(), self.lines)

    def document(self) -> dict[str, Any]:
        """The same as JSON."""
        return {
            "study": self.study, "title": self.title, "revision": self.revision, "study_digest": self.study_digest,
            "digest": self.digest, "since": self.since,
            "groups": [
                {"heading": heading, "lines": [_as_json(line) for line in lines]} for heading, lines in self.groups
            ],
            "gone": [_as_json(line) for line in self.gone],
        }  # fmt: skip


def account(
    offer: Offer, described: Mapping[str, Any], policy: Mapping[str, str], attempts: int,
    before: Shown | None = None, since: str = "",
) -> Account:  # fmt: skip
    """The account of ``offer``.

    Args:
        described: what this site's trainer says of the installed model.
        policy: lines about this hospital's policy.
        attempts: how often each round may be asked for.
        before: what was approved or shown last, and ``since`` what that was, in words.
    """
    lines: dict[str, list[tuple[str, str]]] = {heading: [] for heading in HEADINGS}
    for name, value in settings(offer.document).items():
        lines[_heading(name)].append((name, value))
    lines[COMPUTED].append(("this site", trains(dict(described)).removeprefix("This site ")))
    lines[LEAVES] += [*_tensors("leaves", offer.leaves), *_sums(offer), *_numbers(offer)]
    lines[OWN].append(("own model", directory.exposed(described["exposure"], described["apart"])))
    lines[STAYS] += _staying(offer, described)
    lines[LIMITS] += _limits(offer, attempts)
    lines[POLICY] += [(f"policy.{name}", value) for name, value in policy.items()]
    old = before.lines if before is not None else None
    groups = tuple((heading, _marked(found, old)) for heading, found in lines.items() if found)
    new = {line.name for _, found in groups for line in found}
    gone = tuple(Line(name, "", value) for name, value in (old or {}).items() if name not in new)
    title = offer.document["study"]["title"]
    return Account(offer.study, offer.revision, offer.digest, title and _text(title), groups, gone, since)


def changes(account: Account) -> list[str]:
    """What stands in it otherwise than before, line by line."""
    found = [line.sentence() for _, lines in account.groups for line in lines if line.was is not None]
    return found + [f"{line.name} {line.was} is gone" for line in account.gone]


def settings(document: Mapping[str, Any]) -> dict[str, str]:
    """Every leaf of a study's document: its name, with the tables that it stands in, and its value as text."""
    return dict(_leaves(document, ""))


def setting_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What one study's document says otherwise than another, setting by setting."""
    old, new = settings(before), settings(after)
    found = [Line(name, value, old.get(name, "")).sentence() for name, value in new.items() if old.get(name) != value]
    return found + [f"{name} {value} is gone" for name, value in old.items() if name not in new]


def attempt_bits(told: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """What each number beside the tensors can carry, each attempt: its name, form in words, and bits, rounded up."""
    ranges = told.get("ranges") or {}
    found = []
    for name in told["metrics"]:
        low, high = ranges.get(name) or (None, None)
        form = "any number" if low is None and high is None else f"from {_value(low)} to {_value(high)}"
        found.append((name, f"{form}, {told['digits']} digits", number_bits(told["digits"], low, high)))
    bits = COUNT_BITS[told["counts"]]
    return found + [(name, f"{told['counts']}", bits) for name in ("rows trained", "rows validated")]


def number_bits(digits: int, low: Any = None, high: Any = None) -> int:
    """How many bits a decimal of so many significant digits from ``low`` to ``high`` can carry, rounded up.

    "null", and the two ways to write zero, are counted; None is without a bound, but for that of a double.
    """
    furthest = Fraction(10) ** (LONGEST + 1)
    least = Fraction(str(low)) if low is not None else -furthest
    most = Fraction(str(high)) if high is not None else furthest
    count = 1 + (2 if least <= 0 <= most else 0)
    count += _decimals(digits, max(least, Fraction(0)), most) + _decimals(digits, max(-most, Fraction(0)), -least)
    return math.ceil(math.log2(count))


def _decimals(digits: int, low: Fraction, high: Fraction) -> int:
    """How many numbers above zero of ``digits`` significant digits lie from ``low`` to ``high``."""
    if high <= 0:
        return 0
    count = 0
    for exponent in range(SHORTEST, LONGEST + 1):
        unit = Fraction(10) ** (exponent - digits + 1)
        first, last = max(10 ** (digits - 1), math.ceil(low / unit)), min(10**digits - 1, math.floor(high / unit))
        count += max(0, last - first + 1)
    return count


def _heading(name: str) -> str:
    known = [prefix for prefix in UNDER if name.startswith(prefix)]
    return UNDER[max(known, key=len)] if known else OTHER


def _marked(found: Sequence[tuple[str, str]], old: Mapping[str, str] | None) -> tuple[Line, ...]:
    if old is None:
        return tuple(Line(name, value) for name, value in found)
    return tuple(Line(name, value, None if old.get(name) == value else old.get(name, "")) for name, value in found)


def _tensors(what: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for row in rows:
        bundle = f"{row['bundle']}/" if row.get("bundle") else ""
        why = f": {row['why']}" if row.get("why") else ""
        shape = "x".join(str(length) for length in row["shape"]) or "one number"
        yield f"{what} {bundle}{_key(row['name'], dots=True)}", f"{row['dtype']} {shape}, {size(row['bytes'])}{why}"


def _sums(offer: Offer) -> list[tuple[str, str]]:
    an_attempt = sum(row["bytes"] for row in offer.leaves)
    in_all = f"{size(an_attempt * offer.rounds)} in all with one attempt at each"
    sums = f"{len(offer.leaves)} tensors, {size(an_attempt)} each attempt, {offer.rounds} rounds: {in_all}"
    seen = "the coordinator, each update in clear until the round's model is durable: no secure aggregation"
    return [("leaves in all", sums), ("seen by", seen)]


def _numbers(offer: Offer) -> list[tuple[str, str]]:
    found = attempt_bits(offer.document["reported"])
    in_all = (
        f"{len(offer.metrics) + COUNTS} numbers beside the tensors, each attempt at a round and at the closing one: "
        f"at most {sum(bits for _, _, bits in found)} bits each attempt"
    )
    return [
        *((f"number {name}", f"{form}: at most {bits} bits") for name, form, bits in found),
        ("numbers in all", in_all),
    ]


def _staying(offer: Offer, described: Mapping[str, Any]) -> list[tuple[str, str]]:
    comes = described["comes"]
    same = comes == offer.leaves
    down = "the same tensors" if same else f"{len(comes)} tensors"
    found = [("comes in all", f"{down}, {size(sum(row['bytes'] for row in comes))}, before each round")]
    found += [] if same else _tensors("comes", comes)
    found += _tensors("stays", described["stays"])
    if described["weights"] is not None:
        found.append(("weights", begins_with(described["weights"])))
    return [
        *found,
        ("stays in all", "patients' records, the optimizer's state, the tensors above and every checkpoint"),
    ]


def _limits(offer: Offer, attempts: int) -> list[tuple[str, str]]:
    return [
        ("revision", f"{offer.revision} alone"),
        ("rounds", f"1 to {offer.rounds}, forward only, and one closing round that tells numbers alone"),
        ("attempts", f"at most {attempts} at each round, all from one model"),
    ]


def _leaves(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Tables and lists of tables are gone into; a list of plain values is one leaf, and so is a flat table in one."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{_key(key)}" if name else _key(key))
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value, 1):
            row = _row(item)
            yield from [(f"{name}[{index}]", row)] if row else _leaves(item, f"{name}[{index}]")
    else:
        yield name, _value(value)


def _row(item: Any) -> str:
    """A table without tables in it on one line; "" where it is none."""
    if not isinstance(item, Mapping) or any(isinstance(value, Mapping) for value in item.values()):
        return ""
    lists = {key for key, value in item.items() if isinstance(value, list | tuple) and value}
    if any(isinstance(value, Mapping) for key in lists for value in item[key]):
        return ""
    return ", ".join(
        f"{_key(key)} [{_value(value)}]" if key in lists else f"{_key(key)} {_value(value)}"
        for key, value in sorted(item.items(), key=lambda pair: pair[0] != "name")
    )


def _key(key: str, *, dots: bool = False) -> str:
    plain = PLAIN_KEY.fullmatch(key.replace(".", "_") if dots else key)
    return key if plain else _quoted(key)


def _value(value: Any) -> str:
    if value is None or value == {}:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(f"[{_value(item)}]" if isinstance(item, list) else _value(item) for item in value) or "none"
    return _text(value) if isinstance(value, str) else str(value)


def _text(text: str) -> str:
    """A text as it stands where it is plain; else in quotes, so that it can pass for no other line or value."""
    return text if PLAIN_TEXT.fullmatch(text) and text not in WORDS else _quoted(text)


def _quoted(text: str) -> str:
    """In quotes, without a character that a terminal would act on or that changes the order of the others."""
    written = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in written)


def _as_json(line: Line) -> dict[str, str]:
    return {"name": line.name, "value": line.value, **({} if line.was is None else {"was": line.was})}
