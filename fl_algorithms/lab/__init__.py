"""A federation in one process, to compare methods before a hospital is asked: suites, protocol, report, example data.

    from fl_algorithms.lab import Federation, compare, load, run

are for notebooks; ``fl_algorithms.lab.api`` has them, and is imported when one of them is first asked for.

Imports all of ``fl_algorithms``; its commands import torch only when they run. Refuses to mix runs of different data or
versions.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl_algorithms.lab.api import Comparison, Result, compare, load, run
    from fl_algorithms.lab.own import Federation
    from fl_algorithms.lab.participation import Participation

__all__ = ["Comparison", "Federation", "Participation", "Result", "compare", "load", "run"]
_MODULES = {"Federation": "own", "Participation": "participation"}  # the others: api


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
