"""Writes the locks of deploy/lock: every package of a deployment with its version and the SHA-256 of its files.

    python -m tools.lock            (`make lock`; asks the package index that pip and uv are set up with)

Each is what `pip install --require-hashes` takes. None names an index: whoever installs has one, or a folder of wheels,
and the hashes hold wherever a file comes from. Of PyTorch, `site-cpu.txt` has what it needs and not itself: the build
without CUDA is in an index of its own, and has other hashes.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "deploy" / "lock"
OLDEST_PYTHON = "3.11"
SITE_EXTRAS = ("site", "dicom", "monai", "onnx")
SERVICE_EXTRAS = ("dashboard", "oidc", "metrics", "otel", "postgres")
GATEWAY_EXTRAS = ("metrics", "otel", "sbom")  # `audit pack` wants the bill of software
BUILD = "build.txt"
LOCKS: dict[str, tuple[str, ...]] = {
    "coordinator.txt": (), "coordinator-service.txt": SERVICE_EXTRAS, "site.txt": SITE_EXTRAS,
    "site-cpu.txt": SITE_EXTRAS, "gateway.txt": GATEWAY_EXTRAS,
}  # fmt: skip
IN_NO_LOCK = {
    "objects": "each kind of store needs a package of its own beside it",
    "survival": "a task that few sites have", "timm": "a task that few sites have",
    "lab": "a researcher's", "optuna": "a researcher's", "mlflow": "a researcher's", "tensorboard": "a researcher's",
    "ray": "a researcher's",
}  # fmt: skip
ONLY_CUDA = re.compile(r"(nvidia-.*|cuda-.*|triton)")
TORCH = ("torch", "torchvision")
ENTRY = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)[^\n]*\\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", re.MULTILINE)
HEADS = {
    "coordinator.txt": "A coordinator or an auditor.",
    "gateway.txt": (
        "A gateway without the trainer, with metrics, traces and the bill of software that `audit pack` writes."
    ),
    "coordinator-service.txt": (
        "A coordinator with its dashboard, log-ins with OpenID Connect, metrics, traces and PostgreSQL."
    ),
    BUILD: "What makes our own wheel of a checkout, as pyproject.toml's [build-system] asks.",
    "site.txt": "A site with PyTorch as the index has it: with CUDA on Linux.",
    "site-cpu.txt": "A site without CUDA: install PyTorch's build for the CPU beside it (docs/install.md).",
}


def compiled(*options: str, source: str = "pyproject.toml", text: str | None = None) -> str:
    """What the index has now for requirements, by uv. Raises CalledProcessError: it fits nothing.

    Args:
        source: a file that asks for them, or "-" for ``text``.
    """
    words = ["--generate-hashes", "--no-emit-index-url", "--no-emit-find-links", "--no-annotate", "--no-header"]
    words += ["--universal", "--python-version", OLDEST_PYTHON, "--quiet"]
    line = [sys.executable, "-m", "uv", "pip", "compile", source, *words, *options]
    return subprocess.run(line, check=True, capture_output=True, text=True, cwd=ROOT, input=text).stdout


def build_requirements() -> list[str]:
    """What makes our wheel."""
    asked: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    return asked


def entries(text: str) -> Iterator[tuple[str, str, str]]:
    """Name, version and lines of each package of a lock."""
    for found in ENTRY.finditer(text):
        yield found[1], found[2], found[0]


def lock(name: str, text: str) -> str:
    """The file ``name`` of what was compiled."""
    kept = [
        lines
        for package, _, lines in entries(text)
        if name != "site-cpu.txt" or not (package in TORCH or ONLY_CUDA.fullmatch(package))
    ]
    head = f"# {HEADS[name]} Written by `make lock`: use it with `pip install --require-hashes`.\n"
    return head + "".join(kept)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    found = {name: compiled(*(f"--extra={extra}" for extra in extras)) for name, extras in LOCKS.items()}
    found[BUILD] = compiled(source="-", text="\n".join(build_requirements()))
    for name, said in found.items():
        text = lock(name, said)
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(f"{FOLDER / name}: {len(list(entries(text)))} packages")


if __name__ == "__main__":
    main()
