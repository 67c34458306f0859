"""What became of each site in a study's rounds, of studies with more rounds than are read at a time."""

import json
import random
import tracemalloc

from coordinator.storage import tables
from coordinator.storage.database import Store
from coordinator.studies import course
from coordinator.studies.course import course_of
from coordinator.studies.state import Kind, Outcome
from coordinator.studies.study import Study, new_study
from fl_algorithms.server.limits import Account
from fl_algorithms.study import ResolvedStudy
from tests.coordinator.conftest import study_document
from tests.coordinator.test_database import store
from wardround.records.study import StudyFile
from wardround.tensors.manifests import Entry, Manifest, TensorSpec

__all__ = ["store"]
SITES = ("alpha", "bravo", "charlie")


def a_study() -> Study:
    manifest = Manifest((Entry(TensorSpec("w", "F32", (1,)), "ab" * 32),))
    return new_study(ResolvedStudy(StudyFile.model_validate(study_document(sites=SITES))), manifest, 1, 0)


def written(store: Store, study: Study, rounds: int, seed: int = 1) -> list[tables.Round]:
    """Rounds that went in all ways in which a round can."""
    draw = random.Random(seed)
    kinds = (Kind.ACCEPTED, Kind.ACCEPTED, Kind.EVALUATED, Kind.DECLINED, Kind.REFUSED)
    made = []
    with store.write() as session:
        for digest in (study.initial, "ab" * 32, "cd" * 32):
            session.add(tables.Model(digest=digest, manifest="[]", made_s=0))
        session.flush()
        session.add(study.row())
        for number in range(1, rounds + 1):
            for attempt in range(1, draw.choice((2, 2, 3))):
                answers = {site: [draw.choice(kinds).value, "", ""] for site in SITES if draw.random() < 0.9}
                account = Account(
                    left_out=dict.fromkeys(draw.sample(SITES, draw.choice((0, 0, 1))), "why"),
                    capped=tuple(draw.sample(SITES, draw.choice((0, 1)))),
                )
                row = tables.Round(
                    study=study.name, revision=1, number=number, attempt=attempt, closing=number == rounds,
                    asked=json.dumps(SITES), base="ab" * 32, opened_s=1.0, closed_s=2.0,
                    outcome=draw.choice(tuple(Outcome)).value, answers=json.dumps(answers), model="cd" * 32,
                    account=json.dumps(account.document()),
                )  # fmt: skip
                session.add(row)
                made.append(row)
    return made


def test_read_in_parts_it_says_what_it_says_of_all_rounds_at_once(store: Store) -> None:
    study = a_study()
    with store.read() as session:
        whole = course_of(session, study)  # of no round
    rows = written(store, study, course.AT_ONCE * 2 + 7)
    whole.take(rows)
    with store.read() as session:
        found = course_of(session, study)
    assert found == whole
    closed = [row for row in rows if row.outcome == Outcome.CLOSED]
    for site in SITES:
        kinds = [
            (row.number, row.closing, json.loads(row.answers or "")[site][0])
            for row in closed
            if site in (row.answers or "")
        ]
        assert found.contributed[site] == [
            number for number, closing, kind in kinds if kind == "accepted" and not closing
        ]
        assert found.evaluated[site] == [number for number, _, kind in kinds if kind == "evaluated"]
        out = [row.number for row in closed if site in json.loads(row.account or "")["left_out"] and not row.closing]
        assert found.left_out[site] == out
    assert any(found.capped.values())
    assert any(found.absent.values())
    assert any(missed for late in found.late.values() for missed in late.values())


def test_of_a_long_study_a_hundred_attempts_are_in_memory(store: Store) -> None:
    """Else a coordinator's memory grows with each round for as long as somebody looks at the study's status."""
    study = a_study()
    written(store, study, 3000)
    most = []
    for _ in range(2):  # the first prepares the statement
        tracemalloc.start()
        with store.read() as session:
            course_of(session, study)
        most.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert most[-1] < 3_000_000  # 10 MB with all of them
