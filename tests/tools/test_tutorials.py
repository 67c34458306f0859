"""What the tutorials tell their readers can be followed: each page parses, and the short ones are followed here."""

import re
from pathlib import Path

import pytest

from tests.tools.test_docs import unknown_of
from tools.tutorials import DOCS, TOLD_ADDRESS, Answer, Reader, Step, TutorialFailed, steps
from tools.world import free_port

PAGES = sorted(path.stem for path in DOCS.glob("tutorial-*.md"))
OURS = re.compile(r"(?:^|-u \S+ |bin/)((?:coordinator|site-agent|fl-lab) .*)")


@pytest.mark.parametrize("page", PAGES)
def test_each_command_of_a_tutorial_exists_with_its_options(page: str) -> None:
    typed = [line for step in steps((DOCS / f"{page}.md").read_text()) for line in step.lines]
    commands = [found[1] for line in typed if (found := OURS.search(re.split(r" > |;| \|\| ", line)[0]))]
    assert commands
    assert {command: unknown for command in commands if (unknown := unknown_of(command))} == {}


def test_a_step_is_a_block_with_what_is_answered_and_seen_after_it() -> None:
    page = (
        "Say this:\n\n```sh one stays\nfirst\nsecond\n```\n\n| it asks | you answer |\n|---|---|\n| `Who?` | `me` |\n"
        "| `Where?` | **Enter** |\n| `Word: ` | the line in `a/b` |\n\n```text\nready …\n```\n\n"
        "```sh two install\npip\n```\n"
        "```toml\nnot = 'typed'\n```\n"
    )
    answers = (Answer("Who?", "me"), Answer("Where?"), Answer("Word: ", file="a/b"))
    assert steps(page) == [
        Step("one", ("first", "second"), stays=True, answers=answers, shown=("ready …",)),
        Step("two", ("pip",), installs=True),
    ]


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("```sh\nls\n```\n", "a block names no terminal"),
        ("```text\nready\n```\n", "nothing was typed before"),
        ("```sh a\nls\n```\n\n| it asks | you answer |\n|---|---|\n| `Who?` | whoever |\n", "nobody can answer"),
    ],
)
def test_what_nobody_could_follow_is_refused(page: str, said: str) -> None:
    with pytest.raises(TutorialFailed, match=said):
        steps(page)


def test_a_line_that_fails_or_shows_something_else_is_found(tmp_path: Path) -> None:
    with Reader(tmp_path) as reader:
        reader.do(Step("a", ("name=kept", "cat > file <<'END'", "a line", "END")))
        reader.do(Step("a", ('echo "$name"; cat file',), shown=("kept", "a l…")))
        reader.do(Step("a", ("read answer; echo got $answer",), answers=(Answer("", "this"),), shown=("got this",)))
        with pytest.raises(TutorialFailed, match="`false` ended with 1"):
            reader.do(Step("a", ("false",)))
        with pytest.raises(TutorialFailed, match="does not show 'something else'"):
            reader.do(Step("a", ("echo something",), shown=("something else",)))
        reader.do(Step("b", ("echo ready; exec sleep 60",), stays=True, shown=("ready",)))
        reader.do(Step("c", ("exit",), ends=True))
        assert set(reader.terminals) == {"a", "b"}


@pytest.mark.chaos
@pytest.mark.system
def test_the_first_federation_and_the_first_audit_work_as_written(tmp_path: Path) -> None:
    """One after the other, as their readers follow them."""
    with Reader(tmp_path / "home", {TOLD_ADDRESS: f"127.0.0.1:{free_port()}"}) as reader:
        reader.follow("tutorial-federation")
        reader.follow("tutorial-audit")


@pytest.mark.chaos
@pytest.mark.system
def test_the_first_study_and_the_first_network_work_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install` goes into a folder of the test's, without an index."""
    packages = str(tmp_path / "packages")
    for name, value in {"TARGET": packages, "NO_INDEX": "1", "NO_BUILD_ISOLATION": "0"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("PYTHONPATH", packages)
    with Reader(tmp_path / "home") as reader:
        reader.follow("tutorial-csv")
        reader.follow("tutorial-network")
