"""Every command that our commands propose can be pasted as it stands, through a session as a person has it."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.wardround.test_outputs import all_commands
from tools.world import BIN, World

pytestmark = pytest.mark.system
STUDY = """\
[study]
name = "paste-me"
sites = ["north"]
quorum = 1
rounds = 1
[task]
name = "tabular"
label = "ill"
features = ["age"]
classes = ["no", "yes"]
[model]
name = "mlp"
hidden = [4]
[algorithm]
name = "fedavg"
[training]
local_steps = 1
batch_size = 4
"""
PLACES = {  # what a person puts in
    "NAME": "patients", "SITE": "north", "FILE.csv": "t.csv", "COLUMN": "ill", "STUDY": "paste-me", "DIR": "d",
    "NEW.csv": "t.csv", "PREDICTIONS.csv": "p.csv", "FILE": "f", "ID": "paste-me", "HOST:PORT": "127.0.0.1:1",
}  # fmt: skip
QUOTED = re.compile(r"`((?:site-agent|coordinator|fl-lab) [^`]*)`")


def proposed(text: str) -> list[str]:
    """The commands in the `next:` and `hint:` lines."""
    lines = [line for line in text.splitlines() if re.search(r"\b(next|then|hint): |waits: ", line)]
    return [command for line in lines for command in QUOTED.findall(line)]


def parse(command: str) -> dict[str, Any]:
    """What our own program makes of the words; a usage error fails the test."""
    words = [PLACES.get(word, word) for word in shlex.split(command)]
    found = all_commands()
    depth = next(depth for depth in range(len(words), 0, -1) if " ".join(words[:depth]) in found)
    context = found[" ".join(words[:depth])].make_context(words[0], words[depth:])
    return dict(context.params)


def give(program: str, *words: str | Path, stdin: str | None = None) -> tuple[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WARDROUND_")}
    done = subprocess.run(
        [BIN / program, *map(str, words)], input=stdin, capture_output=True, text=True, timeout=120, check=False,
        env=environment,
    )  # fmt: skip
    return done.stdout, done.stderr


@pytest.mark.chaos
def test_what_is_proposed_next_can_be_pasted(world: World, tmp_path: Path) -> None:
    site, coordinator = world.state / "a site's", world.coordinator_state
    table, study = tmp_path / "t.csv", tmp_path / "study.toml"
    table.write_text("age,ill\n" + "".join(f"{40 + number},{'yes' if number % 2 else 'no'}\n" for number in range(40)))
    study.write_text(STUDY)
    world.init()
    world.serve()
    invitation, _ = give("coordinator", "invite", "north", "--state", coordinator)
    name = "paste-me"
    session: list[tuple[str, list[str | Path], str | None]] = [
        ("site-agent", ["join", "--invitation", "-"], invitation),
        ("site-agent", ["studies"], None),  # none yet
        ("site-agent", ["data", "list"], None),
        ("site-agent", ["data", "add", "patients", "--table", table, "--label", "ill"], None),
        ("coordinator", ["study", "create", study], None),
        ("site-agent", ["studies"], None),
        ("site-agent", ["preview", name], None),
        ("site-agent", ["run"], None),  # from here on the commands ask the service, whose worker has its torch already
        ("site-agent", ["approve", name, "--data", "patients"], None),  # no policy yet
        ("site-agent", ["policy", "draft", name], None),
        ("site-agent", ["policy", "draft", name], None),  # there is one
        ("site-agent", ["policy", "draft", name, "--out", tmp_path / "another one.toml"], None),
        ("site-agent", ["policy", "check"], None),
        ("site-agent", ["policy", "explain", name], None),
        ("site-agent", ["preview", name, "--data", "patients"], None),
        ("site-agent", ["data", "check", "patients", "--study", name], None),
        ("site-agent", ["approve", name, "--data", "patients"], None),
        ("site-agent", ["approve", "other", "--data", "patients"], None),
        ("site-agent", ["models", "list", name], None),
        ("site-agent", ["status"], None),
        ("site-agent", ["audit", "show"], None),
        ("site-agent", ["audit", "verify"], None),
        ("coordinator", ["study", "start", name], None),
        ("coordinator", ["study", "status", name], None),
        ("coordinator", ["study", "report", "nothing"], None),
        ("coordinator", ["receipts", "north", "--out", tmp_path / "receipts.jsonl"], None),
        ("coordinator", ["revoke", "north"], None),
        ("site-agent", ["withdraw", name], None),
    ]
    seen: list[str] = []
    for program, words, stdin in session:
        state = site if program == "site-agent" else coordinator
        if words == ["run"]:
            world.run_agent(site.name)
            continue
        for command in proposed("\n".join(give(program, *words, "--state", state, stdin=stdin))):
            if command.split()[0] != program:  # for people at another machine, whose --state nobody here knows
                command += " --state /there"
            params = parse(command)
            if command.split()[0] == program and "state" in params and params.get("ledger") is None:
                assert params["state"] == state, command
            seen.append(command)
    assert len(seen) > 20
    assert {command.split()[0] for command in seen} == {"site-agent", "coordinator"}


def test_where_the_environment_says_the_state_nothing_is_repeated(world: World) -> None:
    environment = {**os.environ, "WARDROUND_STATE": str(world.coordinator_state)}
    line = [BIN / "coordinator", "init", "--federation", "f", "--address", "127.0.0.1:1"]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert proposed(done.stderr) == ["coordinator serve", "coordinator invite SITE"]


def test_the_table_of_commands_finds_those_without_a_state() -> None:
    """What ``wardround.cli.pasted`` leaves alone is what has no --state."""
    from wardround.cli import STATELESS

    without = {
        words
        for words, one in all_commands().items()
        if not words.startswith("fl-lab") and not any("--state" in param.opts for param in one.params)
    }
    assert without | {"site-agent --version"} == set(STATELESS)
