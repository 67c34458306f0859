"""The study file of the tools that measure: one column, two classes, plain averaging, and whatever else is asked."""

import json
from collections.abc import Sequence
from pathlib import Path

TASK = """
[task]
name = "tabular"
label = "y"
classes = ["0", "1"]
features = [{ name = "x", kind = "numeric" }]

[algorithm]
name = "fedavg"
"""
NO_TRAINING = "local_steps = 0\nbatch_size = 8"

SECURE = """
[reported]
counts = "uniform"

[limits]
norm_multiple = 0

[secure_aggregation]
range = 16.0
"""


def study_text(
    name: str, sites: Sequence[str], rounds: int, *, model: str, training: str = NO_TRAINING, more: str = "",
    tables: str = "",
) -> str:  # fmt: skip
    """A study as TOML.

    Args:
        model, training: the lines of [model] and [training].
        more: further lines of [study]. tables: further tables.
    """
    study = f"[study]\nname = {json.dumps(name)}\nsites = {json.dumps(list(sites))}\nrounds = {rounds}\n{more}\n"
    return f"{study}{TASK}\n[model]\n{model}\n\n[training]\n{training}\n{tables}"


def tiny_table(folder: Path) -> Path:
    """A new folder with a table of twenty made-up rows for such a study."""
    folder.mkdir(parents=True)
    (folder / "train.csv").write_text("x,y\n" + "".join(f"{index % 7},{index % 2}\n" for index in range(20)))
    return folder
