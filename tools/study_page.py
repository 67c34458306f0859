"""Writes docs/study-file.md from the classes that check a study; a test compares. ``python -m tools.study_page``"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import BaseModel

from fl_algorithms.lab.keys import Key, keys
from fl_algorithms.methods.distillation import DistillationSettings
from fl_algorithms.methods.settings import HeadSettings, MeanSettings, MethodSettings, ServerSettings
from fl_algorithms.registry import METHODS, MODELS, TASKS
from fl_algorithms.settings.images import PixelSettings
from fl_algorithms.settings.libraries import LIBRARIES
from fl_algorithms.settings.tabular import TableSettings
from wardround.records import study

PAGE = Path(__file__).resolve().parents[1] / "docs" / "study-file.md"
HEAD = """# The study file: every key

This page is for whoever writes a study file, and for hospitals that read one. It lists each table and key, with its
range, its default and its meaning. `python -m tools.study_page` writes it from the classes that check the file.
Terms: [glossary](glossary.md). How to run one: [researchers.md](researchers.md).

A study file is TOML. The lab and the federation read the same one. `fl-lab run` and `coordinator study check` refuse a
key that does not exist, and name the nearest one. `--set TABLE.KEY=VALUE` changes a key for one run.

```toml
[study]
name = "heart-disease"
sites = ["cleveland", "hungarian", "switzerland", "va"]
rounds = 15

[task]
name = "tabular"
features = ["age", { name = "cp", kind = "categorical", categories = ["1", "2", "3", "4"] }]
label = "num"
classes = ["0", "1"]

[model]
name = "fenda"

[algorithm]
name = "fenda"

[training]
learning_rate = 0.005
batch_size = 4
local_steps = 100
```

In the tables below, – is a key without a default: it is left out, or, where the range says *needed*, it must be there.
A key in a table inside a table has both names: `training.schedule.kind` is `kind` in `[training.schedule]`.
`features[].name` is `name` in each of the tables of the list `features`.
"""
TAIL = """
## [networks.X] and [assigned]

`[networks.X]` has the keys of `[model]`: another network that sites may train, called X. `[assigned]` has a line
`SITE = "X"` for each site that trains it; the others train `[model]`.
[Different architectures](researchers.md#different-architectures-at-different-hospitals).

## [variants.X]

Whole tables that replace the ones above: `[variants.fedavg.algorithm]` replaces `[algorithm]` when the variant `fedavg`
is chosen, by `--variant fedavg`, or by `--set algorithm.name=fedavg`.
"""
SECTIONS = (
    ("study", study.StudySection),
    ("training", study.TrainingSection),
    ("checkpoints", study.CheckpointSection),
    ("reported", study.ReportedSection),
    ("limits", study.LimitsSection),
    ("aggregation", study.AggregationSection),
    ("encoding", study.EncodingSection),
    ("secure_aggregation", study.SecureAggregationSection),
    ("public_data", study.PublicDataSection),
    ("plugins.X", study.PluginSection),
)


def page() -> str:
    sections = dict(SECTIONS)
    return "".join(
        (
            HEAD,
            *_section("[study]", "study", sections.pop("study")),
            *_tasks(),
            *_networks(),
            *_methods(),
            *(part for name, table in sections.items() for part in _section(f"[{name}]", name, table)),
            TAIL,
        )
    )


def _section(title: str, prefix: str, table: type[BaseModel]) -> Iterator[str]:
    yield f"\n## {title}\n\n{_first(table)}\n\n"
    yield from _rows(prefix, keys(table))


def _named(table: str, what: str, more: str) -> str:
    return f"\n## [{table}]\n\n`name` is one of the {what}, or of a [plug-in](plugins.md). More: [{more}]({more}).\n"


def _tasks() -> Iterator[str]:
    yield _named("task", "tasks below", "tasks.md")
    yield from _group("Every table", "task", TableSettings)
    yield from _group("Every image or volume", "task", PixelSettings)
    for name, row in TASKS.items():
        yield from _group(f"`{name}`", "task", row.settings, TableSettings, PixelSettings)


def _networks() -> Iterator[str]:
    yield _named("model", "networks below", "networks.md")
    alike: dict[type[BaseModel], list[str]] = {}
    for name, row in MODELS.items():
        alike.setdefault(row.settings, []).append(f"`{name}`")
    for prefix, library in LIBRARIES.items():
        alike.setdefault(library.settings, []).append(f"`{prefix}:NAME`")
    for table, names in alike.items():
        yield from _group(", ".join(names), "model", table)


def _methods() -> Iterator[str]:
    yield _named("algorithm", "methods below", "methods.md")
    shared = (MethodSettings, ServerSettings, MeanSettings, HeadSettings, DistillationSettings)
    yield from _group("Every method", "algorithm", MethodSettings)
    for title, table, lower in (
        ("Methods whose coordinator averages", ServerSettings, (MethodSettings,)),
        ("Of these, methods that predict with what they share", MeanSettings, (ServerSettings,)),
        ("Of these, methods that divide the network", HeadSettings, (MeanSettings,)),
        ("Methods that exchange predictions", DistillationSettings, (MethodSettings,)),
    ):
        names = ", ".join(f"`{name}`" for name, row in METHODS.items() if issubclass(row.settings, table))
        yield from _group(title, "algorithm", table, *lower, about=f"{names}.")
    for name, row in METHODS.items():
        if row.settings not in shared:
            yield from _group(f"`{name}`", "algorithm", row.settings, *shared, about=f"{row.title}: {row.paper}.")


def _group(title: str, prefix: str, table: type[BaseModel], *shared: type[BaseModel], about: str = "") -> Iterator[str]:
    """The keys of ``table`` that it does not have from one of ``shared`` as they are there."""
    above = {(key.name, key.written, key.range) for other in shared if issubclass(table, other) for key in keys(other)}
    own = [key for key in keys(table) if (key.name, key.written, key.range) not in above]
    if own:
        yield f"\n### {title}\n\n{about or _first(table)}\n\n"
        yield from _rows(prefix, own)


def _rows(prefix: str, found: Iterable[Key]) -> Iterator[str]:
    yield "| key | range | default | meaning |\n|---|---|---|---|\n"
    for key in found:
        allowed = f"{key.range}, *needed*" if key.needed else key.range
        default = "–" if key.default is None else f"`{key.written}`"
        yield f"| `{prefix}.{key.name}` | {allowed} | {default} | {_cell(key.meaning)} |\n"


def _first(table: type[BaseModel]) -> str:
    """The first paragraph of what the code says of the table."""
    said = " ".join((table.__doc__ or "").partition("\n\n")[0].replace("``", "`").split())
    return said if said.endswith(".") else f"{said}."


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
