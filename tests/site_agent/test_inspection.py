"""How far a look at images is, which takes minutes where there are many."""

from pathlib import Path

from PIL import Image

from site_agent.trainer.data.inspection import inspect
from wardround.records.trainer import DataFiles


def test_each_image_is_counted_when_its_header_and_when_its_bytes_were_read(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(3):
        Image.new("L", (4, 4), number).save(folder / f"{number}.png")
    labels = tmp_path / "labels.csv"
    labels.write_text("image,label\n0.png,a\n1.png,b\n2.png,a\n")
    steps: list[tuple[int, int]] = []
    found = inspect(DataFiles(images=str(folder), labels=str(labels)), lambda done, of: steps.append((done, of)))
    assert found.rows == 3
    assert steps == [(1, 3), (2, 3), (3, 3)] * 2
    assert inspect(DataFiles(images=str(folder), labels=str(labels))).digest == found.digest
