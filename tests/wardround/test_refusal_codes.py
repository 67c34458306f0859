"""Every code that crosses the wire is asserted somewhere: a code that no test reads is a promise that nobody keeps."""

import re
from pathlib import Path

import pytest

from wardround.v1 import federation_pb2 as pb

TESTS = Path(__file__).resolve().parents[1]
CODES = [name for name in pb.RefusalCode.DESCRIPTOR.values_by_name if name != "REFUSAL_UNSPECIFIED"]


@pytest.fixture(scope="module")
def functions() -> list[str]:
    """The text of every test function of the tree, its table of cases included, but for this file's."""
    files = [path for path in TESTS.rglob("test_*.py") if path != Path(__file__)]
    return [text for path in files for text in re.split(r"\n\n\n(?=@|def |class )", path.read_text())]


@pytest.mark.parametrize("code", CODES)
def test_every_refusal_code_is_asserted_by_a_test(functions: list[str], code: str) -> None:
    named = re.compile(rf"\b{code}\b")
    checks = re.compile(r"\bassert\b|pytest\.raises|wait_declared|declined\(")
    assert any(named.search(text) and checks.search(text) for text in functions), f"no test reads {code}"
