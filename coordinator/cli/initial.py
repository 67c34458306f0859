"""A study's initial model, made by ``fl-lab init`` in a process of its own: this one stays without torch."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from wardround.errors import BadData, NeedsPerson

INITIAL_S = 600
LAB = "from fl_algorithms.lab.cli import main; main()"  # `fl-lab`, wherever its script was installed


def has_torch() -> bool:
    """Whether torch is installed here."""
    return find_spec("torch") is not None


def make_initial(file: Path, folder: Path, settings: list[str] | None) -> Path:
    """Have the lab make the initial tensors of the study in ``file``; the path of the safetensors file in ``folder``.

    Raises:
        NeedsPerson: torch is not installed here.
        BadData: the lab could not make them; the message is the lab's.
    """
    by_hand = (
        f"on a machine with torch: `fl-lab init {file.name} --out initial.safetensors`; "
        "then here: `--initial initial.safetensors`"
    )
    if not has_torch():
        raise NeedsPerson("making a study's initial model needs torch, which is not installed here", hint=by_hand)
    folder.chmod(0o755)  # the service that reads it may be another user; nothing in it is secret
    out = folder / "initial.safetensors"
    line = [sys.executable, "-P", "-c", LAB, "init", str(file.resolve()), "--out", str(out)]
    for setting in settings or []:
        line += ["--set", setting]
    try:
        done = subprocess.run(
            line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=INITIAL_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise BadData(f"`fl-lab init {file.name}` did not end in {INITIAL_S} s", hint=by_hand) from None
    if done.returncode != 0 or not out.exists():
        error = line_after("error: ", done.stderr) or f"exit code {done.returncode}"
        raise BadData(f"`fl-lab init {file.name}` failed: {error}", hint=line_after("hint: ", done.stderr) or by_hand)
    out.chmod(0o644)
    return out


def line_after(start: str, text: str) -> str:
    """What follows ``start`` on the first line that begins with it; "" if none does."""
    return next((line.removeprefix(start) for line in text.splitlines() if line.startswith(start)), "")
