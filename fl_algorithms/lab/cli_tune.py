"""`fl-lab tune`: what it asks, and what it says at its end. Importing this loads no torch and no pydantic."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fl_algorithms.engine.hardware import DeviceName, Hardware
from wardround.cli import INTERRUPTED, say
from wardround.errors import UsageProblem
from wardround.local import outputs

if TYPE_CHECKING:
    from fl_algorithms.lab.search import Found

DEFAULT_TRIALS = 20
SHOWN = 10  # trials in the table


def tune(
    study: Annotated[Path, typer.Argument(metavar="STUDY.toml", help="The study file.")],
    data: Annotated[Path, typer.Option("--data", metavar="DIR", help="One folder for each site.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE.json", help="Where every trial is kept; called again, it goes on.")
    ],
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over", metavar="KEY=VALUES",
            help="What is tried: a list, or a range as { low = 1e-4, high = 0.1, log = true }; repeatable.",
        ),
    ] = None,
    search: Annotated[
        Literal["grid", "random", "optuna"], typer.Option(help="Every combination, at random, or by Optuna.")
    ] = "random",
    trials: Annotated[
        int, typer.Option(min=0, max=10_000, help="How many settings are tried; 0: all of a grid, else 20.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of the search's own draws.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Runs of each, with seeds that no report has.")] = 3,
    jobs: Annotated[int | None, typer.Option(min=1, help="Worker processes, in place of one a core.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Holds in every trial; repeatable.")
    ] = None,
    variant: Annotated[str, typer.Option("--variant", metavar="NAME", help="Use [variants.NAME] of the file.")] = "",
    device: Annotated[DeviceName, typer.Option(help="Where to train; auto is CUDA where there is one.")] = "cpu",
    force: Annotated[bool, typer.Option("--force", help="Begin anew where the file is of another search.")] = False,
) -> None:  # fmt: skip
    """Search a study's settings on validation loss. No test row is read."""
    from fl_algorithms.lab import search as searching
    from fl_algorithms.lab import space
    from fl_algorithms.lab.executors import cores
    from wardround.records.schema import toml_value

    if not over:
        raise UsageProblem(
            "nothing to try: there is no --over",
            hint="as in --over 'training.learning_rate={ low = 1e-4, high = 0.1, log = true }'",
        )
    wanted = trials or (0 if search == "grid" else DEFAULT_TRIALS)
    asked = searching.Asked(
        study, tuple(setting or []), variant, space.parse(over), search, wanted, seed, seeds
    )  # fmt: skip
    outputs.file(out, force=True, keep=[study, data])
    if force:
        out.unlink(missing_ok=True)
    found = searching.search(asked, data, out, jobs=jobs or cores(), hardware=Hardware(device, 0))
    if found.interrupted:
        say(f"stopped: {len(found.trials)} trials are done and kept in {out}; the same command goes on")
        raise typer.Exit(INTERRUPTED)
    _print_ranked(found)
    best = found.best
    if best is None:
        say(f"no trial has a finite validation loss; {out} says why")
        raise typer.Exit(1)
    words = ["fl-lab", "run", str(study), "--data", str(data)]
    words += [word for one in setting or [] for word in ("--set", one)] + (["--variant", variant] if variant else [])
    words += [word for key, value in best.settings.items() for word in ("--set", f"{key}={toml_value(value)}")]
    say(f"every trial is in {out}; chosen on the validation loss of {best.kind}, test rows were not read")
    say(f"next: `{shlex.join(words)}`")


def _print_ranked(found: "Found") -> None:
    from rich.console import Console
    from rich.table import Table

    from wardround.records.schema import toml_value

    keys = list(found.trials[0].settings)
    table = Table("", "trial", *keys, title="Validation loss, the lowest first", title_justify="left")
    table.add_column("loss", justify="right")
    for place, trial in enumerate(found.ranked[:SHOWN], start=1):
        values = (toml_value(value) for value in trial.settings.values())
        table.add_row(str(place), str(trial.number + 1), *values, f"{trial.val_loss:.6g}")
    Console(highlight=False, markup=False).print(table)
