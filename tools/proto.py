"""Generate the stubs beside the .proto files, or (``--check``) say whether those checked in are what they give."""

import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent / "proto"
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def generate(out: Path) -> None:
    sources = sorted(str(path) for path in ROOT.glob("wardround/v1/*.proto"))
    well_known = str(resources.files("grpc_tools") / "_proto")
    options = [f"-I{ROOT}", f"-I{well_known}", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    if protoc.main(["protoc", *options, *sources]) != 0:
        sys.exit("error: protoc refused the .proto files")


def stubs(folder: Path) -> dict[str, str]:
    found = (path for suffix in SUFFIXES for path in folder.glob(f"wardround/v1/*{suffix}"))
    return {path.name: path.read_text() for path in found}


def main() -> None:
    if "--check" not in sys.argv[1:]:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = stubs(Path(folder))
    present = stubs(ROOT)
    different = sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))
    if different:
        sys.exit(f"error: these stubs are not what the .proto files give: {', '.join(different)}\nhint: `make proto`")
    print(f"{len(fresh)} stubs are what the .proto files give")


if __name__ == "__main__":
    main()
