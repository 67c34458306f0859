"""Predict from a table with an exported model. Needs torch and safetensors; nothing of Wardround.

    python predict.py NEW.csv PREDICTIONS.csv

In a program: ``Predictor(folder).predict(rows)``; a row is a dictionary of texts by the study's column names. Rows are
in the study's own columns, codes and units. Beside this file: ``model.py`` and ``model.safetensors`` (the network),
``study.json`` (what its columns mean) and ``preprocessing.json`` (their scale, fitted where the model was made).
"""

import csv
import datetime
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

EPSILON, FARTHEST_INPUT, FARTHEST_RISK, LARGEST = 1e-9, 1e6, 50.0, 1e100
YES, NO = {"yes", "y", "true", "t", "1"}, {"no", "n", "false", "f", "0"}
NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
CODE = re.compile(r"([+-]?)([0-9]+)(?:\.([0-9]*))?")
DATE = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})(?:[T ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]+)?)?(?:Z|[+-][0-9]{2}:?[0-9]{2})?)?"
)
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
DAYS_A_YEAR = 365.25

Row = Mapping[str, str]
Table = dict[str, Any]  # as JSON has it


class Predictor:
    """An exported model with its study and its scale."""

    def __init__(self, folder: str | Path = ".") -> None:
        folder = Path(folder)
        self.task: Table = json.loads((folder / "study.json").read_text())["task"]
        fitted = json.loads((folder / "preprocessing.json").read_text())
        self.inputs, self.outputs = fitted["inputs"], fitted["outputs"]
        self.model = _network(folder)
        self.blanks = {token.strip().casefold() for token in self.task["missing"]["tokens"]}

    def prepare(self, rows: Sequence[Row]) -> tuple[Tensor, list[int]]:
        """The rows as the network is fed them, float32 (n, inputs), and which rows these are: a study may drop rows
        that lack a value.

        Raises:
            ValueError: a row is not what the study needs; it is named by its place, from 0.
        """
        made, places = [], []
        for place, row in enumerate(rows):
            values = {}
            for feature in self.task["features"]:
                try:
                    values[feature["name"]] = self._value(feature, row)
                except (KeyError, ValueError) as error:
                    raise ValueError(f"row {place}, column {feature['name']}: {error}") from None
            gaps = [name for name, value in values.items() if math.isnan(value)]
            unfilled = set(gaps) - set(self.task["missing"]["indicators"])
            if unfilled and self.task["missing"]["policy"] != "drop_row":
                raise ValueError(f"row {place}, column {min(unfilled)}: no value")
            if not unfilled:
                made.append(self._encoded(values, gaps))
                places.append(place)
        x = torch.tensor(made, dtype=torch.float64).reshape(len(made), len(self.inputs["mean"]))
        mean, std = (
            torch.tensor([float(text) for text in self.inputs[key]], dtype=torch.float64) for key in ("mean", "std")
        )
        scaled = (x - mean) / (std + EPSILON)
        scaled[:, std == 0] = 0.0
        return scaled.clamp(-FARTHEST_INPUT, FARTHEST_INPUT).float(), places

    def predict(self, rows: Sequence[Row]) -> tuple[list[str], list[list[str | float]], list[int]]:
        """The columns' names, a list for each row, and which rows these are. Raises as ``prepare``."""
        x, places = self.prepare(rows)
        with torch.no_grad():
            logits = self.model(x).double() if len(x) else torch.zeros(0, 1, dtype=torch.float64)
        header, predicted = self._judged(logits)
        return header, predicted, places

    def _value(self, feature: Table, row: Row) -> float:
        """A number, a category's place, or nan where there is none."""
        kind, cell = feature["kind"], row[feature["name"]].strip()
        if cell.casefold() in self.blanks:
            return math.nan
        if kind == "categorical":
            levels = [_level(text) for text in feature["categories"]]
            if _level(cell) not in levels and "other" not in feature:
                raise ValueError("a category that the study does not know")
            return float(levels.index(_level(cell if _level(cell) in levels else feature["other"])))
        if kind == "boolean":
            word = _level(cell).casefold()
            if word not in YES | NO:
                raise ValueError("neither yes nor no")
            return 1.0 if word in YES else 0.0
        value = self._span(feature, cell, row) if kind == "date" else _number(cell)
        low, high = (float(feature.get(key) or sign) for key, sign in (("low", "-inf"), ("high", "inf")))
        if value < low or value > high:
            if feature.get("outside") != "missing":
                raise ValueError("a number outside of the study's range")
            return math.nan
        return value

    def _span(self, feature: Table, cell: str, row: Row) -> float:
        """The time from a date to another, in the feature's unit."""
        until = feature["until"]
        if not DATE.fullmatch(until):
            until = row[until].strip()
        if until.casefold() in self.blanks:
            return math.nan
        days = float(_day(until) - _day(cell))
        return days if feature.get("unit") == "days" else days / DAYS_A_YEAR

    def _encoded(self, values: Mapping[str, float], gaps: Sequence[str]) -> list[float]:
        """The inputs before they are scaled, gaps filled and told."""
        numbers: list[float] = []
        for feature in self.task["features"]:
            name, value = feature["name"], values[feature["name"]]
            if feature["kind"] != "categorical":
                numbers.append(float(self.inputs["medians"][name]) if math.isnan(value) else value)
                continue
            levels = [_level(text) for text in feature["categories"]]
            place = levels.index(self.inputs["commonest"][name]) if math.isnan(value) else int(value)
            numbers += [float(place == other) for other in range(1, len(levels))]
        return numbers + [float(name in gaps) for name in self.task["missing"]["indicators"]]

    def _judged(self, logits: Tensor) -> tuple[list[str], list[list[str | float]]]:
        """What the network's outputs mean, by the study's task."""
        task, fit = self.task, self.outputs
        if task["name"] == "regression":
            numbers = logits.squeeze(1) * float(task["std"]) + float(task["mean"])
            return ["predicted"], [[f"{value:.7g}"] for value in numbers.tolist()]
        if task["name"] == "multilabel":
            limits = [float(text) for text in fit.get("thresholds", ["0.5"] * len(task["labels"]))]
            header = [text for name in task["labels"] for text in (f"predicted_{name}", f"probability_{name}")]
            rows = [
                [cell for value, limit in zip(row, limits, strict=True) for cell in ("01"[value >= limit], value)]
                for row in torch.sigmoid(logits).tolist()
            ]
            return header, rows
        if task["name"] == "survival":
            return self._survival(logits.squeeze(1))
        classes = task["classes"]
        header = ["predicted", *(f"probability_{name}" for name in classes)]
        if task["name"] == "ordinal":
            probabilities = _ordinal(logits)
        elif len(classes) == 2:
            positive = torch.sigmoid(logits.squeeze(1))
            probabilities = torch.stack((1 - positive, positive), dim=1)
        else:
            probabilities = torch.softmax(logits, dim=1)
        places = probabilities.argmax(dim=1)
        if task["name"] != "ordinal" and len(classes) == 2:
            places = (probabilities[:, 1] >= float(fit.get("threshold", 0.5))).long()
        return header, [[classes[place], *row] for place, row in zip(places, probabilities.tolist(), strict=True)]

    def _survival(self, risk: Tensor) -> tuple[list[str], list[list[str | float]]]:
        if "center" not in self.outputs:
            raise ValueError("this export has no baseline hazard, so survival cannot be predicted from it")
        relative = torch.exp((risk - float(self.outputs["center"])).clamp(-FARTHEST_RISK, FARTHEST_RISK))
        cumulative = torch.tensor([float(text) for text in self.outputs["cumulative_hazard"]], dtype=torch.float64)
        survival = torch.exp(-torch.outer(relative, cumulative))
        header = ["relative_hazard", *(f"survival_{float(horizon):g}" for horizon in self.task["horizons"])]
        return header, [
            [f"{hazard:.6g}", *row] for hazard, row in zip(relative.tolist(), survival.tolist(), strict=True)
        ]


def _network(folder: Path) -> torch.nn.Module:
    import importlib.util

    from safetensors.torch import load_file

    spec = importlib.util.spec_from_file_location("model", folder / "model.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(folder / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model: torch.nn.Module = module.Model()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model


def _number(cell: str) -> float:
    if not NUMBER.fullmatch(cell) or abs(float(cell)) > LARGEST:
        raise ValueError("no number of a measurement")
    return float(cell)


def _day(cell: str) -> int:
    found = DATE.fullmatch(cell)
    if found is None:
        raise ValueError("no date of the form YYYY-MM-DD")
    return datetime.date.fromisoformat(found[1]).toordinal()


def _level(text: str) -> str:
    """A category as two are compared: "3", "3.0" and " 3 " are all "3"."""
    text = text.strip()
    found = CODE.fullmatch(text)
    if found is None:
        return text
    whole, part = found[2].lstrip("0") or "0", (found[3] or "").rstrip("0")
    written = f"{whole}.{part}" if part else whole
    return f"-{written}" if found[1] == "-" and written != "0" else written


def _ordinal(o: Tensor) -> Tensor:
    """The probabilities of ordered classes, (n, classes), of a cumulative link model."""
    gaps = torch.nn.functional.softplus(o[:, 1:])
    z = torch.cat([o[:, :1], o[:, :1] - gaps.cumsum(dim=1)], dim=1)
    above = torch.nn.functional.logsigmoid
    between = above(z[:, :-1]) + above(-z[:, 1:]) + torch.log(-torch.expm1(-gaps))
    return torch.cat([above(-z[:, :1]), between, above(z[:, -1:])], dim=1).exp()


def _inert(text: str) -> str:
    """A name of the study's as a cell that no spreadsheet runs: on one line, and not as a formula."""
    text = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
    return f"'{text}" if text.startswith(FORMULA) and not NUMBER.fullmatch(text) else text


def main(table: str, out: str) -> None:
    """Write a line for each row: where it begins in the table, and what the model says of it."""
    lines, rows = [], []
    with Path(table).open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        header = [name.strip() for name in next(reader)]
        begins = reader.line_num + 1
        for cells in reader:
            if cells:
                rows.append(dict(zip(header, cells, strict=True)))
                lines.append(begins)
            begins = reader.line_num + 1
    names, predicted, places = Predictor(Path(__file__).parent).predict(rows)
    with Path(out).open("x", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["line", *map(_inert, names)])
        for place, row in zip(places, predicted, strict=True):
            writer.writerow([lines[place], *(_inert(cell) if isinstance(cell, str) else f"{cell:.6f}" for cell in row)])


if __name__ == "__main__":
    main(*sys.argv[1:])
