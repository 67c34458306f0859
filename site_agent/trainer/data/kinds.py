"""The ways in which a hospital's data may lie, and what goes together. Judges names only: no file is touched."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from wardround.errors import UsageProblem


@dataclass(frozen=True)
class Kind:
    """One way.

    Attributes:
        needs: what must be named; the first is what tells this kind from others.
        may: what else may be.
        wants: of those, what must then be named too.
    """

    name: str
    needs: tuple[str, ...]
    may: tuple[str, ...]
    wants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


TABLE = Kind("a table", ("table", "label"), ("test",))
ARRAYS = Kind("arrays", ("arrays",), ("test_arrays", "label", "patient"))
LABELLED = Kind(
    "images with labels", ("images", "labels"), ("test_images", "test_labels", "label", "image", "patient"),
    {"test_images": ("test_labels",), "test_labels": ("test_images",)},
)  # fmt: skip
MASKED = Kind(
    "images with masks", ("images", "masks"),
    ("labels", "test_images", "test_masks", "test_labels", "image", "patient"),
    {
        "test_images": ("test_masks",), "test_masks": ("test_images",), "test_labels": ("test_images", "labels"),
        "image": ("labels",), "patient": ("labels",),
    },
)  # fmt: skip
KINDS = (TABLE, ARRAYS, LABELLED, MASKED)
PATHS = (
    "table", "test", "arrays", "test_arrays",
    "images", "labels", "masks", "test_images", "test_labels", "test_masks",
)  # fmt: skip
COLUMNS = ("label", "image", "patient")
PREDICTABLE = ("table", "images", "arrays")  # what may hold rows or images to be predicted
EXAMPLES = (
    "`--table FILE.csv --label COLUMN`, `--images DIR --labels FILE.csv`, `--images DIR --masks DIR` or "
    "`--arrays FILE.npz`"
)


def option(name: str) -> str:
    """A name as a person gives it in a command."""
    return f"`--{name.replace('_', '-')}`"


def key(name: str) -> str:
    """A name as data.toml has it."""
    return f"`{name}`"


def kind_of(given: Collection[str], say: Callable[[str], str] = option) -> Kind:
    """The one kind that ``given``, names of ``PATHS`` and ``COLUMNS``, makes.

    Raises:
        UsageProblem: it makes none, or a mixture; the message has the first fault.
    """
    # 1. One thing that says which kind it is.
    heads = [name for name in ("table", "arrays", "images") if name in given]
    if not heads:
        orphan = next((name for name in PATHS if name in given), None)
        if orphan is None:
            raise UsageProblem("no data is named", hint=EXAMPLES)
        parent = next(kind.needs[0] for kind in KINDS if orphan in (*kind.needs, *kind.may))
        raise UsageProblem(f"{say(orphan)} needs {say(parent)} beside it", hint=EXAMPLES)
    if len(heads) > 1:
        raise UsageProblem(
            f"{' and '.join(map(say, heads))} do not go together", hint="give each its own name, or leave one out"
        )
    # 2. What kind that is.
    if heads == ["images"] and not {"labels", "masks"} & set(given):
        raise UsageProblem(f"{say('images')} needs {say('labels')} or {say('masks')} beside it", hint=EXAMPLES)
    kind = next(kind for kind in (TABLE, ARRAYS, MASKED, LABELLED) if set(kind.needs[:1] + _second(kind)) <= set(given))
    # 3. What it needs, and nothing that is not its own.
    for name in kind.needs:
        if name not in given:
            raise UsageProblem(f"{say(kind.needs[0])} needs {say(name)} beside it", hint=EXAMPLES)
    for name in (*PATHS, *COLUMNS):
        if name in given and name not in (*kind.needs, *kind.may):
            own = ", ".join(map(say, (*kind.needs, *kind.may)))
            raise UsageProblem(f"{say(name)} does not go with {kind.name}", hint=f"what goes: {own}")
    # 4. Pairs.
    for name, others in kind.wants.items():
        for other in others:
            if name in given and other not in given:
                raise UsageProblem(f"{say(name)} needs {say(other)} beside it")
    if kind is MASKED and {"labels", "test_images"} <= set(given) and "test_labels" not in given:
        raise UsageProblem(
            f"{say('test_images')} needs {say('test_labels')} beside it, because {say('labels')} is given",
            hint="both tables say who the patients are",
        )
    return kind


def _second(kind: Kind) -> tuple[str, ...]:
    """What tells ``MASKED`` from ``LABELLED``."""
    return ("masks",) if kind is MASKED else ()
