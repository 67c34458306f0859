"""From a state directory of the first version, in the middle of a study, to this version: what an operator does."""

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from coordinator.cli.main import app
from coordinator.storage.database import Store
from coordinator.storage.schema import newest_schema
from tests.coordinator.conftest import SITES, Place
from tests.coordinator.test_restore import answer_all
from tests.coordinator.test_rounds import expected_model, model_bytes
from tools.evidence_year import as_the_first_version_left_it
from wardround.errors import NeedsPerson


def test_a_study_goes_on_after_the_upgrade_and_nobody_joins_or_approves_again(place: Place) -> None:
    sites = place.begin(rounds=3)
    answer_all(sites)
    place.until(lambda status: status["round"] == 2)
    first = sites[0].answer(sites[0].next_assignment())  # of round 2, whose others come after the upgrade
    before = place.status()
    place.coordinator.stop()
    as_the_first_version_left_it(place.state)

    with pytest.raises(NeedsPerson, match=f"has schema 0001, this program needs {newest_schema()}") as refusal:
        place.serve()
    assert refusal.value.hint == f"`coordinator upgrade --state {place.state.root}` changes it, and keeps a copy of it"
    done = CliRunner().invoke(app, ["upgrade", "--state", str(place.state.root)])
    assert done.exit_code == 0, done.output
    kept = place.state.root / "coordinator-0001.db"
    assert done.output.splitlines() == [
        f"the database as it was is kept as {kept}", f"{place.state.database} is ready for this version",
    ]  # fmt: skip

    place.serve()
    assert course(place.status()) == course(before)
    for site in sites:
        site.watch_again()
    for site in sites[1:]:
        assert site.answer(site.next_assignment()).decision == "accepted"
    place.until(lambda status: status["round"] == 3)
    answer_all(sites)
    place.until(lambda status: status["closing"])
    assert model_bytes(place) == expected_model([SITES] * 3)
    chain = [envelope.payload for envelope in place.coordinator.uploads.receipts.copy("alpha")]
    assert len(chain) == 4  # three receipts of one chain, and the statement
    assert first.receipt_id.encode() in b"".join(chain)


def course(status: dict[str, Any]) -> list[object]:
    """What of a status is the same whenever it is asked for."""
    sites = {site: (row["state"], row["ready"], row["rounds_contributed"]) for site, row in status["sites"].items()}
    return [status[key] for key in ("state", "round", "attempt", "revision", "study_digest", "model_digest")] + [sites]


def test_the_way_back_is_the_kept_copy(place: Place) -> None:
    """The older program finds its database as it left it."""
    place.begin(rounds=1)
    place.coordinator.stop()
    as_the_first_version_left_it(place.state)
    rows = rows_of(place.state.database)
    assert CliRunner().invoke(app, ["upgrade", "--state", str(place.state.root)]).exit_code == 0
    assert rows_of(place.state.root / "coordinator-0001.db") == rows
    place.serve()


def rows_of(path: Path) -> dict[str, list[tuple[object, ...]]]:
    store = Store(path)
    try:
        with store.read() as session:
            connection = session.connection()
            names = sa.inspect(connection).get_table_names()
            return {name: [tuple(row) for row in connection.exec_driver_sql(f"SELECT * FROM {name}")] for name in names}
    finally:
        store.close()
