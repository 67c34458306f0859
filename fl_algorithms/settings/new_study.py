"""A whole study file as text, for a person to edit: [task] as drafted, and every other table with what it decides.

Nothing here reads a table. What a line says of a default is compared with the settings by a test.
"""

from collections.abc import Sequence

from fl_algorithms.settings.drafting import DraftColumn, task_text
from wardround.records.schema import toml_value

STUDY = """\
[study]
name = {name}
title = ""                   # one line for people: what the study is for
sites = {sites}{sites_note}
rounds = 20                  # after which the study has finished
# quorum = 2                 # so many updates close a round at its deadline; without it, every site's are needed
round_deadline_s = 3600      # how long a round waits for its sites at most, in seconds
# deadlines = "measured"     # a round waits as long as its slowest site needed before; or "fixed"
start_deadline_s = 604800    # how long the study waits, once started, until its sites have approved: 7 days
seed = 1                     # of everything that is drawn: initial weights, validation rows, batches

"""
REST = """
[model]                      # what is trained; others: docs/networks.md
name = "mlp"
hidden = []                  # the widths of its hidden layers; [] is logistic regression, [32] one layer of 32

[algorithm]                  # how the sites train together; others, and what leaves in each: docs/methods.md
name = "fedavg"              # the mean of all tensors; "fedprox" for unlike sites, "ditto" for one's own model

[training]                   # at each site, in each round
optimizer = "adamw"          # or "sgd", "adam"
learning_rate = 0.01
batch_size = 32              # rows of a step
local_epochs = 1             # passes over the site's rows; or local_steps

[checkpoints]
validation_fraction = 0.2    # of a site's rows: they choose the best model, and are never trained on

[reported]                   # the numbers that leave beside the tensors
metrics = {metrics}
digits = 4                   # significant digits of each
counts = "exact"             # of rows; "bucketed" tells the power of two below, "uniform" nothing

[limits]                     # how much one site may move the model
max_weight = 0.5             # of the mean, where three or more sites take part
"""
HEAD = """\
# A study file, drafted from {source}: read each line and edit it. `coordinator study check FILE` says what is wrong,
# and docs/study-file.md has every key. The hospitals read this file: nothing of a patient belongs in it.

"""


def study_text(
    columns: Sequence[DraftColumn], source: str, *, name: str, sites: Sequence[str] = (), label: str = "",
    patient: str = "",
) -> str:  # fmt: skip
    """A study file of a tabular task.

    Args:
        columns: of the table, what is to be predicted among them.
        source: from what it is drafted, in words.
        name: of the study. sites: who takes part; empty leaves that to the person, as an empty ``label`` does.
    """
    study = STUDY.format(
        name=toml_value(name), sites=toml_value(list(sites)),
        sites_note="" if sites else "                   # the sites' names, as they were invited",
    )  # fmt: skip
    task = task_text(columns, source, label=label, patient=patient)
    metrics = toml_value(["val_loss", "accuracy"] if label else ["val_loss"])
    return HEAD.format(source=source) + study + task + REST.format(metrics=metrics)
