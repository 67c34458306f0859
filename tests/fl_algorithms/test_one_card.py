"""What docs/decisions/0013-one-site-several-gpus.md says of torch.distributed behind the trainer's filter."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from datetime import timedelta
from site_agent.trainer.isolation import seccomp

if not seccomp.install():
    sys.exit(77)
import torch.distributed as distributed

store = distributed.FileStore(sys.argv[1], 1)
store.set("key", "value")
print("FileStore", store.get("key").decode())
for name, begin in {
    "TCPStore": lambda: distributed.TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=5)),
    "gloo": lambda: distributed.init_process_group("gloo", store=store, rank=0, world_size=1),
}.items():
    try:
        begin()
        print(name, "works")
    except RuntimeError:
        print(name, "refused")
"""


@pytest.mark.chaos
def test_processes_of_a_trainer_find_each_other_by_a_file_and_have_no_way_to_talk(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path / "store")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 77:
        pytest.skip("the kernel has no such filter")
    assert done.stdout.splitlines() == ["FileStore value", "TCPStore refused", "gloo refused"], done.stderr
