"""The ways in which a hospital's data may lie, and what goes together. Judges names only: no file is touched."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from wardround.errors import UsageProblem


@dataclass(frozen=True)
class Layout:
    """One way in which data may lie.

    Attributes:
        needs: what must be named; the first is what tells this layout from others.
        may: what else may be.
        wants: of those, what must then be named too.
    """

    name: str
    needs: tuple[str, ...]
    may: tuple[str, ...]
    wants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


TABLE = Layout("a table", ("table", "label"), ("test", "mapping", "patient"))
ARRAYS = Layout("arrays", ("arrays",), ("test_arrays", "label", "patient"))
LABELLED = Layout(
    "images with labels", ("images", "labels"), ("test_images", "test_labels", "label", "image", "patient"),
    {"test_images": ("test_labels",), "test_labels": ("test_images",)},
)  # fmt: skip
MASKED = Layout(
    "images with masks", ("images", "masks"),
    ("labels", "test_images", "test_masks", "test_labels", "image", "patient"),
    {
        "test_images": ("test_masks",), "test_masks": ("test_images",), "test_labels": ("test_images", "labels"),
        "image": ("labels",), "patient": ("labels",),
    },
)  # fmt: skip
OWN = Layout("files of a plug-in's own", ("files",), ("test_files",))
LAYOUTS = (TABLE, ARRAYS, LABELLED, MASKED, OWN)
PATHS = (
    "table", "test", "arrays", "test_arrays",
    "images", "labels", "masks", "test_images", "test_labels", "test_masks", "mapping",
    "files", "test_files",
)  # fmt: skip
COLUMNS = ("label", "image", "patient")
PREDICTABLE = ("table", "images", "arrays", "files")  # what may hold rows or images to be predicted
EXAMPLES = (
    "`--table FILE.csv --label COLUMN`, `--images DIR --labels FILE.csv`, `--images DIR --masks DIR`, "
    "`--arrays FILE.npz`, or for a plug-in `--files PATH`"
)


def option(name: str) -> str:
    """A name as a person gives it in a command."""
    return f"`--{name.replace('_', '-')}`"


def key(name: str) -> str:
    """A name as data.toml has it."""
    return f"`{name}`"


def layout_of(given: Collection[str], say: Callable[[str], str] = option) -> Layout:
    """The one layout that ``given``, names of ``PATHS`` and ``COLUMNS``, makes.

    Raises:
        UsageProblem: it makes none, or a mixture; the message has the first fault.
    """
    # 1. One thing that says which layout it is.
    heads = [name for name in ("table", "arrays", "images", "files") if name in given]
    if not heads:
        orphan = next((name for name in PATHS if name in given), None)
        if orphan is None:
            raise UsageProblem("no data is named", hint=EXAMPLES)
        parent = next(layout.needs[0] for layout in LAYOUTS if orphan in (*layout.needs, *layout.may))
        raise UsageProblem(f"{say(orphan)} needs {say(parent)} beside it", hint=EXAMPLES)
    if len(heads) > 1:
        raise UsageProblem(
            f"{' and '.join(map(say, heads))} do not go together", hint="give each its own name, or leave one out"
        )
    # 2. Which layout that is.
    if heads == ["images"] and not {"labels", "masks"} & set(given):
        raise UsageProblem(f"{say('images')} needs {say('labels')} or {say('masks')} beside it", hint=EXAMPLES)
    layout = next(
        layout
        for layout in (TABLE, ARRAYS, MASKED, LABELLED, OWN)
        if set(layout.needs[:1] + _second(layout)) <= set(given)
    )
    # 3. What it needs, and nothing that is not its own.
    for name in layout.needs:
        if name not in given:
            raise UsageProblem(f"{say(layout.needs[0])} needs {say(name)} beside it", hint=EXAMPLES)
    for name in (*PATHS, *COLUMNS):
        if name in given and name not in (*layout.needs, *layout.may):
            own = ", ".join(map(say, (*layout.needs, *layout.may)))
            raise UsageProblem(f"{say(name)} does not go with {layout.name}", hint=f"what goes: {own}")
    # 4. Pairs.
    for name, others in layout.wants.items():
        for other in others:
            if name in given and other not in given:
                raise UsageProblem(f"{say(name)} needs {say(other)} beside it")
    if layout is MASKED and {"labels", "test_images"} <= set(given) and "test_labels" not in given:
        raise UsageProblem(
            f"{say('test_images')} needs {say('test_labels')} beside it, because {say('labels')} is given",
            hint="both tables say who the patients are",
        )
    return layout


def _second(layout: Layout) -> tuple[str, ...]:
    """What tells ``MASKED`` from ``LABELLED``."""
    return ("masks",) if layout is MASKED else ()
