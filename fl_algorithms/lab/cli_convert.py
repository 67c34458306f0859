"""`fl-lab convert`: a checkpoint of PyTorch as a safetensors file."""

from pathlib import Path

import safetensors.torch

from fl_algorithms.lab.convert import fitted, read_apart, renamed
from fl_algorithms.resolving import resolve
from wardround.cli import say
from wardround.errors import UsageProblem
from wardround.local import outputs
from wardround.records import study as study_file

SHOWN = 12  # names of a list


def run_convert(
    checkpoint: Path,
    out: Path,
    study: Path | None,
    prefix: str,
    settings: list[str] | None,
    variant: str,
    *,
    gray: bool,
    force: bool,
) -> None:
    """Write the tensors of ``checkpoint`` to ``out``, and say what became of each.

    Raises:
        UsageProblem: ``prefix`` beside a study, or ``gray`` without one.
        BadData: as ``read_apart`` and ``fitted``.
    """
    if study is not None and prefix:
        raise UsageProblem("--prefix is for a file without a study; with --study the names are the study's")
    if study is None and gray:
        raise UsageProblem("--gray needs --study, which says where one channel is wanted")
    outputs.file(out, force=force, keep=[checkpoint])
    resolved = (
        None if study is None else resolve(study_file.load(study, settings, variant), lab=True, source=study.name)
    )
    tensors = read_apart(checkpoint)
    made = renamed(tensors, prefix) if resolved is None else fitted(tensors, resolved, gray=gray)
    outputs.write(out, (safetensors.torch.save(made.tensors),), force=force, keep=[checkpoint], mode=0o644)
    say(f"{len(made.tensors)} tensors written to {out}")
    _list("as drawn", [f"{name} ({why})" for name, why in made.drawn.items()])
    _list("not used", list(made.unused))
    if study is not None:
        say(f"next: `fl-lab init {study} --out initial.safetensors --weights {out}` for what is shared, or")
        say(f"`site-agent data add ... --weights {out}` at a hospital for what stays there")


def _list(what: str, names: list[str]) -> None:
    for name in names[:SHOWN]:
        say(f"{what}: {name}")
    if len(names) > SHOWN:
        say(f"{what}: {len(names) - SHOWN} more")
