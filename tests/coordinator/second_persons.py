"""A coordinator some of whose commands need a second person, and the people who give them."""

from typing import Any

from coordinator.second_person import SecondPerson
from coordinator.state_directory import write_config
from tests.coordinator.conftest import Place

ANNA = {"name": "anna", "uid": 5001, "source": "sudo"}
BERT = {"name": "bert", "uid": 5002, "source": "sudo"}
CARL = {"name": "carl", "uid": 5003, "source": "polkit"}
SERVICE = {"name": "wardround", "uid": 0, "source": "account"}


def configure(place: Place, second: SecondPerson | None) -> None:
    """Let the place's commands need a second person, as after an edit of its configuration and a restart."""
    config = place.state.config()
    write_config(place.state, config.model_copy(update={"second_person": second}))
    place.restart()


def two(place: Place, *acts: str, lapse_s: int = 3600) -> None:
    """``configure`` with some commands; with all of the defaults where none is given."""
    configure(place, SecondPerson(acts=acts, lapse_s=lapse_s) if acts else SecondPerson(lapse_s=lapse_s))


def waiting(place: Place) -> list[dict[str, Any]]:
    return list(place.ask("waiting")["waiting"])
