"""What `fl-lab run --out OUT` keeps, one folder for each seed; and what a later process reads of it.

    OUT/run.json                                what was asked for, and the command
    OUT/seed-N/result.json                      digests, versions, scores by site and checkpoint: the run is whole
    OUT/seed-N/curves.csv, steps.csv            as ``fl_algorithms.lab.curves`` says
    OUT/seed-N/models/shared.safetensors        what the coordinator keeps at the end
    OUT/seed-N/models/SITE/KIND.safetensors     a checkpoint; beside it preprocessing.json, which new rows need
    OUT/seed-N/state.safetensors                while it is under way: the run after some round

Each file is whole or not there. A state says how long the curves were when it was written, so what a killed process
wrote after it is cut off. Importing this needs no torch.
"""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_algorithms.lab.curves import Curves, Point, Step, header, read_points, read_steps, written
from wardround.errors import BadData
from wardround.local import durable

if TYPE_CHECKING:
    from fl_algorithms.lab.federation import Outcome, RunState
    from fl_algorithms.tasks.base import SiteData

FORMAT = 1
RUN, RESULT, STATE, MODELS, PREPROCESSING = (
    "run.json",
    "result.json",
    "state.safetensors",
    "models",
    "preprocessing.json",
)
SHARED = "shared.safetensors"
TABLES: tuple[tuple[str, type[Point] | type[Step]], ...] = (("curves.csv", Point), ("steps.csv", Step))
SPARE = 9  # times what the last state took to write, before the next one: at most a tenth of the time goes there


def seed_folder(out: Path, seed: int) -> Path:
    return out / f"seed-{seed}"


@dataclass
class SeedFolder:
    """The folder of one seed, for the process that runs it."""

    path: Path
    clock: Callable[[], float] = time.monotonic
    _saved: float | None = None  # when the last state was whole
    _took: float = 0.0

    def resume(self, note: Mapping[str, Any]) -> "RunState | None":
        """The run after the last round that was kept, and the curves cut to it; None: it begins at its first round.

        Args:
            note: what the state must have been made of.

        Raises:
            BadData: it was made of something else, or cannot be read.
        """
        from fl_algorithms.lab.run_state import from_document

        if not (self.path / STATE).is_file():
            self.begin()
            return None
        state, found = from_document(self.path / STATE)
        refuse_other(found["made_of"], note, self.path)
        for name, _ in TABLES:
            with (self.path / name).open("r+b") as file:
                file.truncate(found["sizes"][name])
        return state

    def begin(self) -> None:
        """At the first round, whatever was kept before."""
        durable.make_folder(self.path)
        durable.remove(self.path / STATE)
        for name, kind in TABLES:
            durable.write_file(self.path / name, header(kind))

    def keep(self, curves: Curves, note: Mapping[str, Any], make: "Callable[[], RunState]") -> None:
        """Write the state after a round, if little enough time goes into that; then the curves are empty."""
        from fl_algorithms.lab.run_state import to_document

        begun = self.clock()
        if self._saved is not None and begun - self._saved < SPARE * self._took:
            return
        sizes = self._add(curves)
        durable.write_file(self.path / STATE, to_document(make(), {"made_of": dict(note), "sizes": sizes}))
        self._saved = self.clock()
        self._took = self._saved - begun

    def finish(
        self, result: Mapping[str, Any], curves: Curves, outcome: "Outcome", data: "Mapping[str, SiteData]"
    ) -> None:
        """Write the models and the result, which says that all is there; then the state goes."""
        import safetensors.torch

        self._add(curves)
        models = self.path / MODELS
        durable.make_folder(models)
        if outcome.shared:
            durable.write_file(models / SHARED, safetensors.torch.save(outcome.shared))
        for site, kinds in sorted(outcome.checkpoints.items()):
            durable.make_folder(models / site)
            fitted = json.dumps(dict(data[site].preprocessing), indent=1, ensure_ascii=False)
            durable.write_file(models / site / PREPROCESSING, fitted.encode())
            for kind, checkpoint in sorted(kinds.items()):
                durable.write_file(models / site / f"{kind}.safetensors", safetensors.torch.save(checkpoint.tensors))
        durable.write_file(self.path / RESULT, as_json(result))
        durable.remove(self.path / STATE)

    def _add(self, curves: Curves) -> dict[str, int]:
        """Add the curves to their files, durably, and empty them. Returns how long the files are."""
        for (name, _), text in zip(TABLES, (written(curves.points), written(curves.steps)), strict=True):
            with closing(durable.AppendFile(self.path / name, tail=0)) as file:
                file.append(text)
        curves.points.clear()
        curves.steps.clear()
        return {name: (self.path / name).stat().st_size for name, _ in TABLES}


def result_of(folder: Path) -> dict[str, Any] | None:
    """A seed's result; None where its run is not whole.

    Raises:
        BadData: the file cannot be read.
    """
    return read(folder / RESULT) if (folder / RESULT).is_file() else None


def curves_of(folder: Path) -> Curves:
    """The curves of a seed whose run is whole."""
    points, steps = ((folder / name).read_text() for name, _ in TABLES)
    return Curves(read_points(points), read_steps(steps))


def seeds_of(out: Path) -> list[int]:
    """Whose run is whole."""
    return sorted(int(path.parent.name.removeprefix("seed-")) for path in out.glob(f"seed-*/{RESULT}"))


def read(path: Path) -> dict[str, Any]:
    """A JSON file that `fl-lab run` wrote.

    Raises:
        BadData: it is none.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise BadData(f"{path}: {error.strerror}") from None
    except ValueError:
        raise BadData(f"{path}: not JSON", hint="remove its folder, then run `fl-lab run` again") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise BadData(f"{path}: not a file of this version of `fl-lab run`", hint="use another --out")
    return content


def refuse_other(held: Mapping[str, Any], wanted: Mapping[str, Any], out: Path) -> None:
    """Raises BadData: what is kept in ``out`` was made of something else."""
    plain = json.loads(json.dumps(wanted))
    if held != plain:
        raise BadData(
            f"{out} holds a run of something else: {difference(dict(held), plain)}",
            hint="use another --out, or the study, data and versions as they were",
        )


def as_json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False).encode()


def difference(old: Any, new: Any, where: str = "") -> str:
    """The first place where two documents differ, old against new."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            if old.get(key) != new.get(key):
                return difference(old.get(key), new.get(key), f"{where}.{key}" if where else key)
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        number = next(number for number, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1])
        return difference(old[number], new[number], f"{where}[{number}]")
    return f"{where} was {_brief(old)}, is now {_brief(new)}"


def _brief(value: Any) -> str:
    if value is None:
        return "not there"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
