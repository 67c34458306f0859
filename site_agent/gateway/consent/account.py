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
from typing import Annotated, Any, ClassVar, Self

from pydantic import ConfigDict, JsonValue, PlainSerializer

from site_agent.gateway.consent.facts import begins_with, number, size, trains
from site_agent.gateway.estimate import BITS, MINUTES, MOST_TOLD
from site_agent.state import codec
from site_agent.state.codec import STRICT
from site_agent.state.consent import Shown, exposed
from site_agent.state.directory import now_text
from site_agent.state.offer import Offer, StudyDocument, aggregation_in
from site_agent.state.tensors import specs_from
from wardround.records.secure_round import roster_of, rules_of
from wardround.records.study import ReportedSection
from wardround.records.trainer import Described, PrivateTensor
from wardround.signing import canonical
from wardround.tensors.manifests import TensorSpec

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
    "checkpoints.": COMPUTED, "public_data.": COMPUTED, "plugins.": COMPUTED, "reported.": LEAVES,
    "encoding.": LEAVES,
}  # fmt: skip
PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")
PLAIN_TEXT = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.:/+ -]*[A-Za-z0-9_])?|-?[0-9.]+(?:e[+-]?[0-9]+)?")
WORDS = ("none", "true", "false")  # what stands for no text
EVALUATES = "evaluates: judges each round's model on all of its rows, and trains nothing"
ROSTER = "secure_aggregation.roster."
SHORT = 16  # hex digits of a digest that a person or script gives back: 64 bits
SHORTEST, LONGEST = -323, 308  # decimal exponents of a double
TIME_LEFT = (
    f"how long it will still take, one of {len(MINUTES)} lengths, told at most {MOST_TOLD} times: at most {BITS} bits "
    "a round"
)
COUNT_BITS = {"exact": 53, "bucketed": 6, "uniform": 0}


@dataclass(frozen=True)
class Line:
    """One line. ``was`` is what stood there in the account before; None where it is the same, "" where nothing did."""

    name: str
    value: str
    was: str | None = None

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    def sentence(self) -> str:
        """The change of this line."""
        return f"{self.name} {self.was} -> {self.value}" if self.was else f"{self.name} {self.value} is new"

    def document(self) -> dict[str, str]:
        """As JSON; without ``was`` where it is None."""
        return {"name": self.name, "value": self.value, **({} if self.was is None else {"was": self.was})}


Lines = tuple[Annotated[Line, PlainSerializer(Line.document)], ...]


@dataclass(frozen=True)
class Group:
    """Lines under one heading."""

    heading: str
    lines: Lines

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class Account:
    """All that a study computes here and takes out.

    Attributes:
        gone: the lines of the account before that no line has any more.
        since: which account that was, "approved" or "shown" and when; "" if there was none.
    """

    study: str
    revision: int
    study_digest: str
    title: str
    groups: tuple[Group, ...]
    gone: Lines = ()
    since: str = ""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    @property
    def lines(self) -> dict[str, str]:
        return {line.name: line.value for group in self.groups for line in group.lines}

    @property
    def changed(self) -> tuple[Line, ...]:
        """The lines that are new or have another value than before."""
        return tuple(line for group in self.groups for line in group.lines if line.was is not None)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over all that it says, but for the marks of changes."""
        return canonical.digest(
            {"study": self.study, "revision": self.revision, "study_digest": self.study_digest, "lines": self.lines}
        )

    def shown(self) -> Shown:
        """As it is kept, for comparing later ones."""
        return Shown(self.digest, self.study_digest, self.revision, now_text(), self.lines)

    def document(self) -> dict[str, Any]:
        """As JSON, with its digest."""
        return {**codec.to_document(self), "digest": self.digest}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Raises ValueError: it is no account."""
        return codec.from_document(cls, {key: value for key, value in document.items() if key != "digest"})


def account(
    offer: Offer, described: Described, policy: Mapping[str, str], attempts: int,
    before: Shown | None = None, since: str = "", site: str = "", known: frozenset[str] = frozenset(),
) -> Account:  # fmt: skip
    """The account of ``offer``.

    Args:
        described: what this site's trainer says of the installed model.
        policy: lines about this hospital's policy.
        attempts: how often each round may be asked for.
        before: what was approved or shown last, and ``since`` what that was, in words.
        site: this one's name. known: fingerprints of the keys of those that people here know.
    """
    lines: dict[str, list[tuple[str, str]]] = {heading: [] for heading in HEADINGS}
    for name, value in settings(offer.document).items():
        if name.startswith(ROSTER):
            continue  # each member stands below, by the fingerprint that people compare
        lines[_heading(name)].append((name, value))
    lines[TAKES_PART] += _members(offer, site, known)
    lines[COMPUTED].append(("this site", trains(described).removeprefix("This site ")))
    if not offer.upload:
        lines[COMPUTED][-1] = ("this site", EVALUATES)
    if offer.encoding.encoding.is_lossy:
        lines[LEAVES].append(("values", offer.encoding.sentence))
    lines[LEAVES] += [*_tensors("leaves", offer.upload), *_sums(offer), *_numbers(offer)]
    lines[OWN].append(("own model", exposed(described.exposure, described.personalized)))
    lines[STAYS] += _stays(offer, described)
    lines[LIMITS] += _limits(offer, attempts)
    if made := aggregation_in(offer.document):
        lines[OTHER].append(("bad sites", made))
    lines[POLICY] += [(f"policy.{name}", value) for name, value in policy.items()]
    old = before.lines if before is not None else None
    groups = tuple(Group(heading, _marked(under, old)) for heading, under in lines.items() if under)
    new = {line.name for group in groups for line in group.lines}
    gone = tuple(Line(name, "", value) for name, value in (old or {}).items() if name not in new)
    title = offer.title and _text(offer.title)
    return Account(offer.study, offer.revision, offer.digest, title, groups, gone, since)


def changes(account: Account) -> list[str]:
    """What stands in it otherwise than before, line by line."""
    return [line.sentence() for line in account.changed] + [f"{line.name} {line.was} is gone" for line in account.gone]


def settings(document: StudyDocument) -> dict[str, str]:
    """Every leaf of a study's document: its name, with the tables that it stands in, and its value as text."""
    return dict(_leaves(document, ""))


def setting_changes(before: StudyDocument, after: StudyDocument) -> list[str]:
    """What one study's document says otherwise than another, setting by setting."""
    old, new = settings(before), settings(after)
    changed = [Line(name, value, old.get(name, "")) for name, value in new.items() if old.get(name) != value]
    return [line.sentence() for line in changed] + [
        f"{name} {value} is gone" for name, value in old.items() if name not in new
    ]


def attempt_bits(reported: ReportedSection) -> list[tuple[str, str, int]]:
    """What each number beside the tensors can carry, each attempt: its name, form in words, and bits, rounded up."""
    numbers = []
    for name in reported.metrics:
        low, high = reported.ranges.get(name, (None, None))
        form = "any number" if low is None and high is None else f"from {low} to {high}"
        numbers.append((name, f"{form}, {reported.digits} digits", number_bits(reported.digits, low, high)))
    bits = COUNT_BITS[reported.counts]
    return numbers + [(name, reported.counts, bits) for name in ("rows trained", "rows validated")]


def number_bits(digits: int, low: float | None = None, high: float | None = None) -> int:
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
    prefixes = [prefix for prefix in UNDER if name.startswith(prefix)]
    return UNDER[max(prefixes, key=len)] if prefixes else OTHER


def _marked(under: Sequence[tuple[str, str]], old: Mapping[str, str] | None) -> tuple[Line, ...]:
    if old is None:
        return tuple(Line(name, value) for name, value in under)
    return tuple(Line(name, value, None if old.get(name) == value else old.get(name, "")) for name, value in under)


def _tensors(what: str, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, str]]:
    for spec in specs:
        bundle = f"{spec.bundle}/" if spec.bundle else ""
        yield f"{what} {bundle}{_key(spec.name, dots=True)}", _form(spec)


def _private(tensors: Sequence[PrivateTensor]) -> Iterator[tuple[str, str]]:
    for tensor in tensors:
        yield f"stays {_key(tensor.name, dots=True)}", f"{_form(tensor)}: {tensor.why}"


def _form(tensor: TensorSpec | PrivateTensor) -> str:
    shape = "x".join(str(length) for length in tensor.shape) or "one number"
    return f"{tensor.dtype} {shape}, {size(tensor.bytes)}"


def _sums(offer: Offer) -> list[tuple[str, str]]:
    if not offer.upload:
        return [("leaves in all", "no tensor, ever: this site reports the numbers below, and nothing else")]
    an_attempt = sum(spec.bytes for spec in offer.upload)
    in_all = f"{size(an_attempt * offer.rounds)} in all with one attempt at each"
    sums = f"{len(offer.upload)} tensors, {size(an_attempt)} each attempt, {offer.rounds} rounds: {in_all}"
    return [("leaves in all", sums), ("seen by", seen_by(offer))]


def seen_by(offer: Offer) -> str:
    """What the coordinator will see of an update, as a sentence."""
    if not offer.is_secure:
        return "the coordinator, each update in clear until the round's model is durable: no secure aggregation"
    least = rules_of(offer.file).threshold
    return (
        f"the coordinator, as the sum over at least {least} hospitals, with the numbers below; never this hospital's "
        "own update. Every member may check the sum, and learns from it the sum of the others"
    )


def _members(offer: Offer, site: str, known: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Each member of a study with secure aggregation, by the fingerprint of its key."""
    if not offer.is_secure:
        return
    roster = roster_of(offer.file)
    for member in roster.sites:
        mark = roster.fingerprint(member)
        who = "this site" if member == site else "known to people here" if mark in known else "nobody here knows it"
        yield f"member {member}", f"{mark}: {who}"


def _numbers(offer: Offer) -> list[tuple[str, str]]:
    numbers = attempt_bits(offer.reported)
    in_all = (
        f"{len(numbers)} numbers beside the tensors, each attempt at a round and at the closing one: "
        f"at most {sum(bits for _, _, bits in numbers)} bits each attempt"
    )
    lines = [
        *((f"number {name}", f"{form}: at most {bits} bits") for name, form, bits in numbers),
        ("numbers in all", in_all),
    ]
    if not offer.is_secure:
        lines.append(("numbers of a long round", TIME_LEFT))
    return lines


def _stays(offer: Offer, described: Described) -> list[tuple[str, str]]:
    download = specs_from(described.download)
    same = download == offer.upload
    what = "the same tensors" if same else f"{len(download)} tensors"
    lines = [("comes in all", f"{what}, {size(sum(spec.bytes for spec in download))}, before each round")]
    lines += [] if same else _tensors("comes", download)
    lines += _private(tuple(described.private))
    if described.weights is not None:
        lines.append(("weights", begins_with(described.weights)))
    return [
        *lines,
        ("stays in all", "patients' records, the optimizer's state, the tensors above and every checkpoint"),
    ]


def _limits(offer: Offer, attempts: int) -> list[tuple[str, str]]:
    return [
        ("revision", f"{offer.revision} alone"),
        ("rounds", f"1 to {offer.rounds}, forward only, and one closing round that tells numbers alone")
        if offer.upload
        else ("rounds", f"1 to {offer.rounds} and the closing one, forward only: each tells numbers alone"),
        ("attempts", f"at most {attempts} at each round, all from one model"),
    ]


def _leaves(value: JsonValue, name: str) -> Iterator[tuple[str, str]]:
    """Tables and lists of tables are gone into; a list of plain values is one leaf, and so is a flat table in one."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{_key(key)}" if name else _key(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value, 1):
            row = _row(item)
            yield from [(f"{name}[{index}]", row)] if row else _leaves(item, f"{name}[{index}]")
    else:
        yield name, _value(value)


def _row(item: JsonValue) -> str:
    """A table without tables in it on one line; "" where it is none."""
    if not isinstance(item, dict) or any(isinstance(value, dict) for value in item.values()):
        return ""
    lists = {key: value for key, value in item.items() if isinstance(value, list) and value}
    if any(isinstance(value, dict) for values in lists.values() for value in values):
        return ""
    return ", ".join(
        f"{_key(key)} [{_value(value)}]" if key in lists else f"{_key(key)} {_value(value)}"
        for key, value in sorted(item.items(), key=lambda pair: pair[0] != "name")
    )


def _key(key: str, *, dots: bool = False) -> str:
    plain = PLAIN_KEY.fullmatch(key.replace(".", "_") if dots else key)
    return key if plain else _quoted(key)


def _value(value: JsonValue) -> str:
    if value is None or value == {}:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(f"[{_value(item)}]" if isinstance(item, list) else _value(item) for item in value) or "none"
    if isinstance(value, int):
        return number(value)
    return _text(value) if isinstance(value, str) else str(value)


def _text(text: str) -> str:
    """A text as it stands where it is plain; else in quotes, so that it can pass for no other line or value."""
    return text if PLAIN_TEXT.fullmatch(text) and text not in WORDS else _quoted(text)


def _quoted(text: str) -> str:
    """In quotes, without a character that a terminal would act on or that changes the order of the others."""
    written = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in written)
