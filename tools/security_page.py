"""Writes the tables of attacks in docs/security.md from tests/attacks/; a test compares.

    python -m tools.security_page

The prose of the page is written by hand; between its two marks stands what the tests say of themselves.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "security.md"
ATTACKS = ROOT / "tests" / "attacks"
BEGIN, END = "<!-- attacks: begin -->", "<!-- attacks: end -->"
PARTIES = {
    "test_coordinator": "A malicious coordinator",
    "test_member": "A malicious member, or a thief of its credentials",
    "test_trainer": "A trainer whose code was taken over",
    "test_plugin": "Code of others: who makes a plug-in, changes one after it was approved, or names one",
    "test_statistics": "Figures of tables: who asks for too much, tells what is not so, or lets leave what nobody saw",
    "test_secure_aggregation": "A malicious coordinator and colluding members, against secure aggregation over a "
    "simulated network",
    "test_secure_gateway": "A malicious coordinator against the gateways of hospitals with secure aggregation",
    "test_secure_memory": "A coordinator that looks for one hospital's numbers in all that it has",
    "test_insider": "An insider who edits the ledger afterwards",
    "test_operator": "Whoever may write in the coordinator's database, or give it commands",
    "test_other_user": "Another user of the hospital's machine",
    "test_network": "The network between",
    "test_browser": "Another page in the browser of whoever is logged in, or whoever finds the port of a page",
    "test_fault": "A fault, or a race",
}


@dataclass(frozen=True)
class Attack:
    """One test of tests/attacks: its name without ``test_``, and what it says of itself."""

    party: str
    name: str
    promise: str
    refused_by: str
    told: str


def attacks() -> list[Attack]:
    """Every attack, in the order of the files' names and of the tests in them."""
    return [attack for path in sorted(ATTACKS.glob("test_*.py")) for attack in _in(path)]


def _in(path: Path) -> list[Attack]:
    found, constants = [], {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            constants[ast.unparse(node.targets[0])] = str(node.value.value)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marker = _marker(node, constants)
            told = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            name = node.name.removeprefix("test_")
            found.append(Attack(path.stem, name, marker["promise"], marker["refused_by"], told))
    return found


def _marker(node: ast.FunctionDef, constants: dict[str, str]) -> dict[str, str]:
    """The keywords of a test's ``@pytest.mark.attack``. Raises ValueError: it wears none."""
    for call in node.decorator_list:
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "attack":
            said = {str(word.arg): word.value for word in call.keywords}
            return {
                key: constants[value.id] if isinstance(value, ast.Name) else str(ast.literal_eval(value))
                for key, value in said.items()
            }
    raise ValueError(f"{node.name} wears no @pytest.mark.attack")


def tables() -> str:
    """A table for each party."""
    said = []
    for party, title in PARTIES.items():
        rows = [attack for attack in attacks() if attack.party == party]
        if not rows:
            continue
        said.append(
            f"\n### {title}\n\n`tests/attacks/{party}.py`\n\n| attack | promise | refused by | what it does |\n"
        )
        said.append("|---|---|---|---|\n")
        for row in rows:
            told = row.told.replace("|", "\\|")
            said.append(f"| `{row.name}` | {row.promise} | `{row.refused_by}` | {told} |\n")
    return "".join(said)


def page(text: str) -> str:
    """``text`` with its tables as they are now."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n{tables()}\n{END}", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
