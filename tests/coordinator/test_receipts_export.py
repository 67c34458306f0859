"""The coordinator's side of the account: held updates, receipts handed out, ledgers that shrank or forked."""

import hashlib
import json
import os
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.coordinator.conftest import Place
from tests.coordinator.fake_site import FakeSite, Ledger, delta
from wardround import __version__
from wardround.errors import BadData
from wardround.records.messages import envelope_from
from wardround.records.receipt_copy import COPY_TYPE, Statement
from wardround.records.receipts import EMPTY_HEAD, Receipt
from wardround.signing import canonical, dsse
from wardround.signing.dsse import Envelope
from wardround.v1 import federation_pb2 as pb

ONE = {"sites": ["a"], "quorum": 1}


def begin(place: Place) -> tuple[FakeSite, Any]:
    (site,) = place.begin(**ONE)
    return site, site.next_assignment()


def offer(site: FakeSite, assignment: Any) -> Receipt:
    """Upload a right update for ``assignment``, with the site's ledger as it is."""
    update = delta(site.name, assignment.round, site.specs(assignment.study))
    receipt = site.send(site.opening(assignment, update), update.payload)
    assert receipt is not None
    return receipt


def exported(place: Place, site: str) -> tuple[list[dict[str, Any]], Statement]:
    """The receipts, and the signed statement at their end."""
    lines: list[dict[str, Any]] = []
    answer = place.coordinator.administration.run({"command": "receipts", "site": site}, lines.append)
    assert answer["receipts"] == len(lines) - 1
    said = dsse.verify(Envelope.from_document(lines[-1]), COPY_TYPE, place.state.receipt_key().public_key())
    return lines[:-1], Statement.from_document(said)


def test_a_coordinator_that_is_down_hands_out_the_same_receipts(place: Place, tmp_path: Path) -> None:
    site, assignment = begin(place)
    offer(site, assignment)
    lines, said = exported(place, "a")
    assert lines
    place.coordinator.stop()
    out = tmp_path / "receipts.jsonl"
    line = [Path(sys.executable).parent / "coordinator", "receipts", "a", "--out", out, "--state", place.state.root]
    subprocess.run(line, check=True, capture_output=True, timeout=60)
    place.serve()
    *rows, last = out.read_bytes().splitlines()
    assert rows == [canonical.dumps(row) for row in lines]
    again = Statement.from_document(json.loads(json.loads(last)["payload"]))
    assert again == replace(said, time=again.time)


def test_a_held_update_is_shown_and_may_still_come(place: Place) -> None:
    site, assignment = begin(place)
    site.declare(assignment.study, pb.HELD, round=assignment.round, attempt=assignment.attempt)
    status = place.status()
    assert (status["state"], status["sites"]["a"]["state"]) == ("running", "held")
    site.answer(assignment)
    place.until(lambda status: status["round"] == 2)


def test_a_hold_of_another_round_changes_nothing(place: Place) -> None:
    site, assignment = begin(place)
    site.declare(assignment.study, pb.HELD, round=assignment.round + 1, attempt=1)
    assert place.status()["sites"]["a"]["state"] == "training"


def test_accepted_and_refused_uploads_are_handed_out_in_the_order_of_their_chain(place: Place) -> None:
    site, assignment = begin(place)
    wrong = delta("a", assignment.round, site.specs(assignment.study)[:1])
    refused = site.send(site.opening(assignment, wrong), b"")
    assert refused is not None
    assert refused.code == "MANIFEST_NAMES"
    again = site.next_assignment()
    assert site.answer(again).decision == "accepted"
    lines, said = exported(place, "a")
    found = [Receipt.verified(Envelope.from_document(line), site.receipt_key) for line in lines]
    assert found == site.receipts
    previous = EMPTY_HEAD
    for line in lines:
        assert json.loads(line["payload"])["previous"] == previous
        previous = hashlib.sha256(line["payload"].encode()).hexdigest()
    assert (said.site, said.receipts, said.last, said.earlier) == ("a", 2, previous, 0)
    assert {receipt.ledger_key for receipt in found} == {said.ledger_key}


def test_a_site_gets_the_copy_of_its_own_receipts_over_its_own_connection(place: Place) -> None:
    site, assignment = begin(place)
    site.answer(assignment)
    pages = list(site.federation.Receipts(pb.ReceiptsRequest(agent_version=__version__), timeout=20))
    lines, said = exported(place, "a")
    got = [envelope_from(message).document() for page in pages for message in page.envelopes]
    assert got[:-1] == lines
    again = Statement.from_document(json.loads(got[-1]["payload"]))
    assert again == replace(said, time=again.time)


def test_receipts_of_an_earlier_enrolment_are_counted_and_not_in_the_copy(place: Place) -> None:
    site, assignment = begin(place)
    site.answer(assignment)
    _, before = exported(place, "a")
    place.join("a")
    lines, said = exported(place, "a")
    assert (lines, said.receipts, said.last, said.earlier) == ([], 0, EMPTY_HEAD, 1)
    assert said.ledger_key != before.ledger_key


def test_the_same_upload_gets_the_same_receipt_byte_for_byte(place: Place) -> None:
    site, assignment = begin(place)
    update, upload_id = delta("a", 1, site.specs("trial")), uuid.uuid4().bytes
    site.send(site.opening(assignment, update, upload_id), update.payload)
    first = site.inquire(upload_id).receipt
    site.send(site.opening_again(assignment, update, upload_id), update.payload)
    assert site.inquire(upload_id).receipt == first
    assert exported(place, "a")[1].receipts == 1


def test_the_command_writes_canonical_lines_that_an_auditor_can_read(place: Place, tmp_path: Path) -> None:
    site, assignment = begin(place)
    site.answer(assignment)
    out = tmp_path / "receipts.jsonl"
    line = [sys.executable, "-m", "coordinator.cli.main", "receipts", "a", "--out", str(out), "--state"]
    done = subprocess.run([*line, str(place.state.root)], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert f"1 receipts of site `a`, and a signed statement of their number, written to {out}" in done.stderr
    rows = out.read_bytes().splitlines()
    assert len(rows) == 2
    assert [canonical.dumps(canonical.loads(row)) for row in rows] == rows


def test_receipts_of_an_unknown_site_are_refused_with_the_known_ones(place: Place) -> None:
    place.join("a")
    with pytest.raises(BadData, match="no site `b` has enrolled here") as refused:
        exported(place, "b")
    assert refused.value.hint == "sites here: a"


def test_a_ledger_of_yesterday_is_refused_as_rolled_back(place: Place) -> None:
    site, assignment = begin(place)
    site.answer(assignment)
    site.ledger.hashes.clear()
    site.ledger.witnessed = 0
    receipt = offer(site, site.next_assignment())
    assert (receipt.decision, receipt.code, receipt.ledger) == ("refused", "LEDGER_ROLLBACK", None)


def test_a_cloned_agent_that_goes_its_own_way_is_refused_as_a_fork(place: Place) -> None:
    site, assignment = begin(place)
    original = list(site.ledger.hashes)
    site.answer(assignment)
    site.ledger.hashes[:] = [*original, *(hashlib.sha256(b"%d" % n).digest() for n in range(9))]
    site.ledger.witnessed = 0
    receipt = offer(site, site.next_assignment())
    assert (receipt.decision, receipt.code) == ("refused", "LEDGER_FORK")


def test_a_new_ledger_counts_after_the_operator_confirmed_it_and_the_old_one_never_again(place: Place) -> None:
    site, assignment = begin(place)
    site.answer(assignment)
    old = site.ledger
    site.ledger = new = Ledger(old.key)
    assert offer(site, site.next_assignment()).code == "LEDGER_FORK"
    answer = place.ask("rollover", site="a", ledger=new.ledger_id)
    assert answer == {"site": "a", "ledger": new.ledger_id, "before": old.ledger_id}
    assert offer(site, site.next_assignment()).decision == "accepted"
    with pytest.raises(BadData, match="was seen before: a site cannot go back to it") as refused:
        place.ask("rollover", site="a", ledger=old.ledger_id)
    assert "`site-agent audit rollover`" in refused.value.hint


def test_a_rollover_wants_an_enrolled_site_and_an_id(place: Place) -> None:
    place.join("a")
    with pytest.raises(BadData, match="'yes' is not a ledger's id: 32 hex digits"):
        place.ask("rollover", site="a", ledger="yes")
    with pytest.raises(BadData, match="no site `b` has enrolled here"):
        place.ask("rollover", site="b", ledger="0" * 32)
