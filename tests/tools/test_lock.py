"""The locks of deploy/lock: every file has a hash, no index is named, and they are of what pyproject.toml asks."""

import re
import tomllib
from collections.abc import Iterator

import pytest

from tools import lock

REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?((?:[<>=]+[0-9.]+,?)*)$")


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def fits(version: str, bounds: str) -> bool:
    found = numbers(version)
    for sign, bound in re.findall(r"(>=|<|==)([0-9.]+)", bounds):
        wanted = numbers(bound)
        if not {">=": found >= wanted, "<": found < wanted, "==": found == wanted}[sign]:
            return False
    return True


def asked(extras: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    project = tomllib.loads((lock.ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]
    for text in wanted:
        found = REQUIREMENT.match(text)
        assert found, text
        yield found[1].lower(), found[2]


@pytest.mark.parametrize("name", lock.LOCKS)
def test_a_lock_is_of_what_we_ask_and_each_entry_has_its_hashes(name: str) -> None:
    text = (lock.FOLDER / name).read_text()
    pinned: dict[str, list[str]] = {}
    for package, version, _ in lock.entries(text):
        pinned.setdefault(package.lower(), []).append(version)
    for package, bounds in asked(lock.LOCKS[name]):
        if name == "site-cpu.txt" and package in lock.TORCH:
            assert package not in pinned
            continue
        assert package in pinned, f"{package} is not in {name}: `make lock`"
        assert all(fits(version, bounds) for version in pinned[package]), f"{package}: `make lock`"
    head, *rest = text.splitlines(keepends=True)
    assert head.startswith(f"# {lock.HEADS[name]}")
    assert "".join(lines for _, _, lines in lock.entries(text)) == "".join(rest)  # nothing stands there without a hash


def test_each_extra_is_in_a_lock_or_there_is_a_reason() -> None:
    project = tomllib.loads((lock.ROOT / "pyproject.toml").read_text())["project"]
    locked = {extra for extras in lock.LOCKS.values() for extra in extras}
    assert locked | lock.IN_NO_LOCK.keys() == project["optional-dependencies"].keys()
    assert not locked & lock.IN_NO_LOCK.keys()


def test_the_services_that_tell_traces_have_what_traces_need() -> None:
    for name in ("coordinator-service.txt", "gateway.txt"):
        pinned = {package for package, _, _ in lock.entries((lock.FOLDER / name).read_text())}
        assert {"opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"} <= pinned, name
        assert "opentelemetry-exporter-otlp-proto-grpc" not in pinned  # no second user of grpcio


def test_what_makes_our_wheel_is_locked_too() -> None:
    pinned = {package.lower(): version for package, version, _ in lock.entries((lock.FOLDER / lock.BUILD).read_text())}
    for text in lock.build_requirements():
        found = REQUIREMENT.match(text)
        assert found, text
        assert fits(pinned[found[1].lower()], found[2]), "`make lock`"


@pytest.mark.parametrize("name", [*lock.LOCKS, lock.BUILD])
def test_a_lock_names_no_index(name: str) -> None:
    assert not re.search(r"://|--(?:index|extra-index|find-links|trusted)", (lock.FOLDER / name).read_text())


def test_the_lock_without_cuda_leaves_what_only_cuda_needs_out() -> None:
    entry = "{}==1.0 \\\n    --hash=sha256:" + "ab" * 32 + "\n"
    text = "".join(entry.format(name) for name in ("torch", "nvidia-cublas", "cuda-toolkit", "triton", "numpy"))
    assert [name for name, _, _ in lock.entries(lock.lock("site-cpu.txt", text))] == ["numpy"]
    assert len(list(lock.entries(lock.lock("site.txt", text)))) == 5
