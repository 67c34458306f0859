"""What fuzzing found at the coordinator's doors: each ends in an error of ours now."""

from pathlib import Path
from typing import Any

import pytest

from coordinator import state_directory as places
from coordinator.members.authority import Authority
from coordinator.state_directory import State
from tests.coordinator.conftest import Place
from wardround.errors import BadData, UsageProblem


@pytest.mark.parametrize(
    "request_",
    [
        {"command": "status"}, {"command": "status", "study": 1}, {"command": "status", "study": ["trial"]},
        {"command": "status", "study": "trial", "more": 1}, {"command": "follow"}, {"command": "follow", "study": {}},
        {"command": "receipts", "site": 7}, {"command": "invite", "site": "a"}, {"command": "sites", "study": "trial"},
        {"command": "invite", "site": "a", "expires_s": "3600"}, {"command": "invite", "site": "a", "expires_s": 2**80},
        {"command": "rollover", "site": "a", "ledger": None}, {"command": "create", "document": [], "initial": "x"},
        {"command": "create", "document": {}, "initial": 1}, {"command": "create", "document": {}, "initial": "x",
        "public_data": 1},
        {"command": ["status"]}, {},
    ],
    ids=str,
)  # fmt: skip
def test_a_command_that_is_not_of_its_form_is_refused(place: Place, request_: dict[str, Any]) -> None:
    """It was a TypeError, or an error of the database, and "the service failed"."""
    with pytest.raises(UsageProblem):
        place.coordinator.administration.run(request_, lambda item: None)


def test_damaged_keys_of_the_coordinator_are_named(tmp_path: Path) -> None:
    state = State(tmp_path / "state")
    places.create(state, "north", "127.0.0.1:9000", 1_780_000_000)
    key, certificate = state.authority / "key.pem", state.authority / "certificate.pem"
    whole = certificate.read_bytes()
    for path in (key, certificate, state.receipt_key_file):
        kept = path.read_bytes()
        for bad in (b"", kept[:80], kept + b"a" * 20_000, whole):
            if (path, bad) == (certificate, whole):
                continue
            path.write_bytes(bad)
            with pytest.raises(BadData, match=path.name):
                state.receipt_key() if path == state.receipt_key_file else Authority(state.authority, "north")
        path.write_bytes(kept)
