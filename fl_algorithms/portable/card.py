"""A model card as a Markdown page: where a model comes from, who took part, how good it is, what is not known.

The card as JSON is what counts; this says the same. Every text that a stranger wrote is made plain. No torch.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from wardround.terminal import escaped

MODEL_FILE, CARD_FILE, PAGE_FILE = "model.safetensors", "card.json", "MODEL_CARD.md"
STUDY_FILE, PREPROCESSING_FILE = "study.json", "preprocessing.json"
PROGRAM_FILE, PREDICT_FILE, ONNX_FILE = "model.py", "predict.py", "model.onnx"
MARKUP = re.compile(r"([\\`*_{}\[\]<>|#~])")
Rounds = Mapping[str, Sequence[int]]  # by site
MANY = 12  # rounds that are listed one by one

ALWAYS = (
    "Scores are of the sites and rows named above, and of no others: they say nothing of another hospital's patients.",
    "Weights can reveal facts of the rows that they were learned from. Exporting does not make them anonymous.",
    "It is no medical device, and nobody has judged here whether it may be used for patients.",
)
FILES = {
    MODEL_FILE: "the weights: read without running code",
    CARD_FILE: "this card, for programs",
    STUDY_FILE: "the study as it was resolved: architecture, columns and their meaning, settings",
    PREPROCESSING_FILE: "how rows are scaled and outputs read; computed from patients of this site",
    PROGRAM_FILE: "the network in plain PyTorch",
    PREDICT_FILE: "`python predict.py NEW.csv PREDICTIONS.csv`, for rows in the study's own columns, codes and units",
    ONNX_FILE: "network and weights as ONNX: input `x`, output `logits`",
}
LOADER = """\
```python
from safetensors.torch import load_file
from model import Model
model = Model()
model.load_state_dict(load_file("model.safetensors"))
logits = model(x)
```"""


def page(
    title: str,
    facts: Mapping[str, object],
    scores: Sequence[Mapping[str, object]],
    participation: Sequence[str],
    lineage: Sequence[Mapping[str, object]] = (),
    limits: Sequence[str] = (),
) -> str:
    """The page.

    Args:
        facts: name -> value, in their order; what is empty is left out.
        scores, lineage: rows of tables, all with the same keys.
        participation: sentences.
        limits: sentences, before those that hold for every model.
    """
    parts = [f"# {plain(title)}", "\n".join(_facts(facts)), "## Who took part"]
    parts.append("\n".join(f"- {plain(sentence)}" for sentence in participation))
    if lineage:
        parts += ["## How it came about", _table(lineage)]
    parts += ["## How good it is", _table(scores) if scores else "No score of this model is known here."]
    parts += ["## Limits", "\n".join(f"- {plain(sentence)}" for sentence in (*limits, *ALWAYS))]
    described = "\n".join(f"- `{name}`: {what}" for name, what in FILES.items())
    parts += ["## Files", f"As far as they are beside this page:\n\n{described}"]
    parts += ["## Loading it", f"With `model.py`, torch and safetensors, and nothing of Wardround:\n\n{LOADER}"]
    return "\n\n".join(parts) + "\n"


def took_part(
    rounds: int, contributors: Rounds | None, capped: Rounds, left_out: Rounds, evaluators: Collection[str] = ()
) -> list[str]:
    """A sentence for each site: in which of the rounds it is, and where it counted for less or not at all.

    Args:
        rounds: how many made this model.
        contributors: None where it is not known here.
        evaluators: the sites that train nothing.
    """
    if contributors is None:
        return ["Which sites contributed to which round is not known here before the study has ended."]
    sentences = []
    for site, all_numbers in sorted(contributors.items()):
        if site in evaluators:
            sentences.append(f"{site}: evaluates; nothing was trained there, and nothing of it is in the model")
            continue
        numbers = [number for number in all_numbers if number <= rounds]
        without = [number for number in range(1, rounds + 1) if number not in numbers]
        text = f"{site}: in {len(numbers)} of {rounds} rounds"
        text += f", not in {_listed(without)}" if numbers and without else ""
        for what, others in (("counted for less than its rows", capped), ("was left out as an outlier", left_out)):
            if some := [number for number in others.get(site, ()) if number <= rounds]:
                text += f"; {what} in {_listed(some)}"
        sentences.append(text)
    return sentences


def plain(text: str) -> str:
    """Text as Markdown shows it: no control character, no markup."""
    return MARKUP.sub(r"\\\1", escaped(str(text)))


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:MANY]))
    return f"round {shown}" if len(numbers) == 1 else f"rounds {shown}{' and more' if len(numbers) > MANY else ''}"


def _facts(facts: Mapping[str, object]) -> Iterator[str]:
    for name, value in facts.items():
        if value not in ("", None):
            yield f"- {plain(name)}: {plain(str(value))}"


def _table(rows: Sequence[Mapping[str, object]]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [["not known" if value is None else plain(str(value)) for value in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
