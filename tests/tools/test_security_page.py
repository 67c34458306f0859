"""docs/security.md says what the code does: its tables are made from the tests, its names exist."""

import re
from pathlib import Path

from tools.security_page import PAGE, PARTIES, attacks, page

ROOT = Path(__file__).resolve().parents[2]
PATH = re.compile(r"`((?:site_agent|coordinator|fl_algorithms|proto|tools|tests|deploy|docs)/[\w./-]*\w)(?:::(\w+))?`")


def test_the_tables_of_attacks_are_those_of_the_tests() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "write it again: `python -m tools.security_page`"


def test_every_file_and_test_that_the_page_names_exists() -> None:
    named = PATH.findall(PAGE.read_text(encoding="utf-8"))
    assert named
    for path, name in named:
        assert (ROOT / path).exists(), path
        if name:
            assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{name}"


def test_every_attack_says_what_it_does_and_stands_with_a_party() -> None:
    for attack in attacks():
        assert attack.party in PARTIES, attack.party
        assert attack.told, attack.name


def test_no_two_attacks_have_one_name() -> None:
    names = [attack.name for attack in attacks()]
    assert len(set(names)) == len(names)
