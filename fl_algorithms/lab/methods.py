"""`fl-lab methods`: the registry of methods for people. Reads rows, settings and docstrings; imports no torch."""

import ast
import difflib
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fl_algorithms import registry
from fl_algorithms.lab.keys import Key, keys, written
from fl_algorithms.rows import SITES, MethodRow
from fl_algorithms.server.rules.rows import RULES, takes_rule
from fl_algorithms.server.secure_study import why_single
from wardround.errors import UsageProblem

MEAN = "fl_algorithms.server.mean:mean"
SHOWN = {
    "": "no site's own model is shown to anyone",
    "coordinator": "the coordinator keeps apart {}",
    "sites": "the coordinator keeps apart {}, and sends it to other sites",
}


def overview() -> list[dict[str, Any]]:
    """Every method: what a hospital asks first."""
    return [_facts(row) for row in registry.METHODS.values()]


def rules() -> list[dict[str, str]]:
    """Every rule that may stand in place of the mean."""
    return [
        {
            "name": row.name,
            "title": row.title,
            "needs": row.needs,
            "tolerates": row.tolerates,
            "rows": "yes" if row.weighted else "no",
            "paper": row.paper,
        }
        for row in RULES.values()
    ]


def card(name: str) -> dict[str, Any]:
    """One method: its facts, how it works, its settings and what it combines with.

    Raises:
        UsageProblem: there is none of that name.
    """
    row = registry.METHODS.get(name)
    if row is None:
        raise UsageProblem(f"there is no method `{name[:60]}`", hint=_nearest(name))
    return {
        **_facts(row),
        "about": _about(row),
        "server": _server(row),
        "combines_with": _combinations(row),
        "settings": [_setting(key) for key in keys(row.settings)],
    }


def print_overview(rows: Iterable[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "method", "what leaves", "what stays", "needs", "single models", "sums alone")
    for row in rows:
        title = f"{row['title']} (lab only)" if row["lab_only"] else row["title"]
        needs = "; ".join(row["needs"]) or "–"
        table.add_row(row["name"], title, row["upload"], row["private"], needs, row["exposure"] or "–", sums_alone(row))
    console = Console(highlight=False, markup=False)
    console.print(table)
    robust = Table("rule", "in place of the mean", "needs updates", "tolerates bad sites", "rows count", "paper")
    for rule in rules():
        robust.add_row(*rule.values())
    console.print("rules of [aggregation], for the methods whose coordinator takes a mean; f is `bad_sites`")
    console.print(robust)
    console.print("next: `fl-lab methods NAME` for its settings and how it works")


def sums_alone(row: Mapping[str, Any]) -> str:
    """Whether secure aggregation goes with a method: its coordinator then learns sums alone."""
    return "no" if row["single_updates"] else "–" if row["upload"] == "nothing" else "yes"


def print_card(card: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    console.print(f"{card['title']} (`{card['name']}`){', only in the lab' if card['lab_only'] else ''}")
    console.print(card["about"])
    facts = Table.grid(padding=(0, 2))
    for what, text in (
        ("paper", card["paper"]),
        ("leaves", card["upload"]),
        ("stays", card["private"]),
        ("single models", SHOWN[card["exposure"]].format(card["personalized"])),
        ("needs", "; ".join(card["needs"]) or "nothing particular"),
        ("differs from the paper in", card["differs"] or "nothing that is known"),
        ("coordinator", card["server"]),
        ("secure aggregation", f"no: {card['single_updates']}" if card["single_updates"] else sums_alone(card)),
        ("combines with", "; ".join(card["combines_with"]) or "nothing"),
    ):
        facts.add_row(what, text)
    console.print(facts)
    for optional, heading in ((False, "setting of [algorithm]"), (True, "where its table is given")):
        settings = [setting for setting in card["settings"] if setting["optional"] is optional]
        if settings:
            table = Table(heading, "default", "range", "meaning")
            for setting in settings:
                needed = ", needed" if setting["needed"] else ""
                default, allowed = written(setting["default"]), setting["range"] + needed
                table.add_row(setting["key"], default, allowed, setting["meaning"])
            console.print(table)
    console.print(f"next: `fl-lab run STUDY.toml --data DIR --set algorithm.name={card['name']}`")


def _facts(row: MethodRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "title": row.title,
        "paper": row.paper,
        "upload": row.upload,
        "private": row.private,
        "needs": _needs(row),
        "single_updates": why_single(row),
        "exposure": row.exposure,
        "personalized": row.personalized,
        "differs": row.differs,
        "one_global_model": row.one_global_model,
        "lab_only": row.lab_only,
    }


def _setting(key: Key) -> dict[str, Any]:
    return {
        "key": key.name,
        "default": key.default,
        "range": key.range,
        "needed": key.needed,
        "optional": key.optional,
        "meaning": key.meaning,
    }


def _needs(row: MethodRow) -> list[str]:
    needs = [f"a network with {need}" for need in sorted(row.needs)]
    if row.plain_sgd:
        needs.append("plain SGD at the sites")
    if row.same_start:
        needs.append('`init_private = "common"`, its default')
    if row.validation:
        needs.append("validation rows, for the method itself")
    if row.public_data:
        holder = "every site" if row.public_data == SITES else "the coordinator"
        needs.append(f"a public data set at {holder}: [public_data]")
    return needs


def _combinations(row: MethodRow) -> list[str]:
    """What the method's settings let be added to it."""
    fields = row.settings.model_fields
    found = []
    if "server" in fields:
        default = fields["server"].get_default(call_default_factory=True)
        found.append(
            "a server optimizer after the mean: [algorithm.server]"
            if default is None
            else f"its server optimizer is {default.optimizer}: [algorithm.server]"
        )
    if "soup" in fields:
        made_of_it = fields["soup"].get_default(call_default_factory=True) is not None
        found.append(f"{'its' if made_of_it else 'a'} soup of the shared parameters: [algorithm.soup]")
    if takes_rule(row):
        found.append("a robust rule in place of the mean: [aggregation]")
    if "fine_tuning" in fields:
        found.append("fine-tuning at the end: [algorithm.fine_tuning]")
    return found


def _about(row: MethodRow) -> str:
    """The first paragraph of the method's own client, else of the one that it shares with another."""
    own = f"fl_algorithms.methods.{row.name}.client"
    return _first_paragraph(own if _source(own) is not None else _module(row.client))


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name, registry.METHODS, n=1)
    return f"did you mean `{close[0]}`?" if close else "`fl-lab methods` lists them"


def _server(row: MethodRow) -> str:
    if row.upload == "nothing":
        return "none: nothing is sent"
    return "the mean, weighted by rows" if row.server == MEAN else _first_paragraph(_module(row.server))


def _module(implementation: str) -> str:
    return implementation.partition(":")[0]


def _first_paragraph(module: str) -> str:
    source = _source(module)
    docstring = "" if source is None else ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def _source(module: str) -> Path | None:
    """The module's file, without importing it."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # nor is there the package that it would be in
        return None
    return Path(found.origin) if found is not None and found.origin is not None else None
