"""What may be imported where: the contract's classes at the borders alone, and no circle inside the gateway."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("proto/wardround", "coordinator", "site_agent", "fl_algorithms")
CONTRACT = "wardround.v1"
SPEAK_PROTOBUF = (
    "proto/wardround/v1/", "proto/wardround/records/", "proto/wardround/rpc.py",
    "coordinator/servicers", "coordinator/calls.py", "coordinator/messages.py", "site_agent/gateway/connection/",
)  # fmt: skip


def modules() -> Iterator[Path]:
    for source in SOURCES:
        yield from sorted((ROOT / source).rglob("*.py"))


def imported(source: str) -> set[str]:
    """Every module that a module may mean by its imports; ``from a import b`` means ``a`` and ``a.b``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_the_contracts_classes_are_imported_at_the_borders_alone() -> None:
    """Behind them, a record is passed inward: nobody else knows how a message is laid out."""
    importers = {
        path.relative_to(ROOT).as_posix()
        for path in modules()
        if any(name.startswith(CONTRACT) for name in imported(path.read_text(encoding="utf-8")))
    }
    assert {"proto/wardround/records/offer.py", "coordinator/servicers.py"} <= importers
    assert {path for path in importers if not path.startswith(SPEAK_PROTOBUF)} == set()


def graph(package: str) -> dict[str, set[str]]:
    """The imports between a package's modules."""
    paths = {
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__"): path
        for path in sorted((ROOT / package.replace(".", "/")).rglob("*.py"))
    }
    return {
        name: (imported(path.read_text(encoding="utf-8")) & paths.keys()) - {name, package}
        for name, path in paths.items()
    }


def test_no_module_of_the_gateway_imports_itself_by_way_of_others() -> None:
    order = list(TopologicalSorter(graph("site_agent.gateway")).static_order())
    assert order.index("site_agent.gateway.connection.client") < order.index("site_agent.gateway.exit.egress")
    assert order.index("site_agent.gateway.exit.egress") < order.index("site_agent.gateway.agent")


def test_no_room_of_the_gateway_imports_itself_by_way_of_others() -> None:
    """A room is a package of the gateway, or a module beside the packages."""
    rooms: dict[str, set[str]] = {}
    for module, needed in graph("site_agent.gateway").items():
        room = module.removeprefix("site_agent.gateway").lstrip(".").partition(".")[0]
        rooms.setdefault(room, set()).update({name.split(".")[2] for name in needed} - {room})
    order = list(TopologicalSorter(rooms).static_order())
    assert order.index("policy") < order.index("exit") < order.index("agent")


def test_the_search_finds_imports_and_circles() -> None:
    assert imported("import a.b\nfrom c import d\ndef f():\n    from wardround.v1 import x_pb2") == {
        "a.b", "c", "c.d", "wardround.v1", "wardround.v1.x_pb2",
    }  # fmt: skip
    with pytest.raises(CycleError):
        list(TopologicalSorter({"a": {"b"}, "b": {"c"}, "c": {"a"}}).static_order())
