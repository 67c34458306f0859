"""One hospital's numbers, planted, and looked for in all that a coordinator has: files, database, memory."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.coordinator.conftest import SITES, study_document
from tests.coordinator.fake_site import FakeSite, Update, delta, write_initial
from tests.coordinator.secure_site import RANGE, Member, train
from tools.world import World
from wardround.signing import canonical

LOSS = "0.314159265"
pytestmark = pytest.mark.chaos


def planted(site: str, specs: object) -> Update:
    """What one hospital sends: values that stand nowhere else."""
    made = delta(site, 1, specs)  # type: ignore[arg-type]
    return Update(made.tensors, (("val_loss", LOSS),), made.num_examples, made.num_validation)


def needles(update: Update) -> dict[str, bytes]:
    (_, bias), (_, weight) = update.tensors
    wide = np.frombuffer(weight, "<f4").astype("<f8").tobytes()
    return {"loss": LOSS.encode(), "bias": bias, "weight": weight, "as float64": wide}


def found_in_files(folder: Path, wanted: dict[str, bytes]) -> set[str]:
    texts = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    return {name for name, needle in wanted.items() if any(needle in text for text in texts)}


def memory_of(pid: int) -> Iterator[bytes]:
    """Every readable piece of a process's memory, as a core image has it."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in lines:
            place, rights, *_ = line.split()
            if not rights.startswith("rw") or "[v" in line:
                continue
            begin, end = (int(number, 16) for number in place.split("-"))
            try:
                memory.seek(begin)
                yield memory.read(end - begin)
            except OSError:
                continue  # guard pages of a stack


def found_in_memory(pid: int, wanted: dict[str, bytes]) -> set[str]:
    found = set()
    for piece in memory_of(pid):
        found |= {name for name, needle in wanted.items() if needle in piece}
    return found


def pid_of(world: World) -> int:
    assert world.coordinator is not None
    return world.coordinator.process.pid


def begun(world: World, folder: Path, **study: object) -> list[FakeSite]:
    """A coordinator in a process of its own, and sites that speak its protocol from here."""
    write_initial(folder / "initial.safetensors")
    world.init()
    world.serve()
    sites = [FakeSite(world.ask_coordinator("invite", site).strip()) for site in SITES]
    for site in sites:
        site.watch()
    document = study_document(rounds=1, **study)
    document["reported"]["digits"] = 9
    (folder / "trial.json").write_bytes(canonical.dumps(document))
    world.ask_coordinator("study", "create", folder / "trial.json", "--initial", folder / "initial.safetensors")
    for site in sites:
        site.declare("trial")
    world.ask_coordinator("study", "start", "trial")
    return sites


@pytest.mark.attack(promise="P12", refused_by="proto/wardround/secure/masking.py")
def test_without_secure_aggregation_the_search_finds_one_hospitals_numbers(tmp_path: Path) -> None:
    """So that a search that finds nothing says something: what one hospital sends is in files and memory without it."""
    with World(tmp_path, "north") as world:
        sites = begun(world, tmp_path)
        update = planted("alpha", sites[0].specs("trial"))
        assert sites[0].answer(sites[0].next_assignment(), update).decision == "accepted"
        wanted = needles(update)
        assert {"loss", "weight"} <= found_in_files(world.coordinator_state, wanted)
        assert found_in_memory(pid_of(world), wanted)
        for site in sites:
            site.close()


@pytest.mark.attack(promise="P12", refused_by="proto/wardround/secure/masking.py")
def test_with_secure_aggregation_they_are_nowhere_in_its_files_its_database_and_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files, database and memory of a coordinator, before the sum is made and after."""
    with World(tmp_path, "north") as world:
        sites = begun(world, tmp_path, secure_aggregation={"range": RANGE, "largest_weight": 1000})
        members = [Member(site, "trial") for site in sites]
        update = planted("alpha", members[0].offer.initial_model.specs)
        monkeypatch.setattr(members[0], "update", lambda: update)
        wanted = needles(update)
        train(members)
        assert not found_in_files(world.coordinator_state, wanted)
        assert not found_in_memory(pid_of(world), wanted)
        for member in members:
            member.agree()
        for member in members:
            member.open()
        assert members[0].fake.next_assignment().HasField("validate")  # the sum is made
        assert not found_in_files(world.coordinator_state, wanted)
        assert not found_in_memory(pid_of(world), wanted)
        for site in sites:
            site.close()
