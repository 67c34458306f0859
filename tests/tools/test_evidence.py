"""What the measurements of crash safety conclude from what they saw: each can fail."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from coordinator.study_answers import AttemptReport
from tools import (
    demo,
    evidence_crowd,
    evidence_line,
    evidence_secure,
    evidence_soak,
    evidence_stops,
    evidence_syscalls,
    strace,
)
from tools.bad_line import BadLine
from tools.faults import Plan, astray, size_of
from tools.strace import Call

TRACE = """\
7 fsync(3</elsewhere/x>) = 0
7 openat(AT_FDCWD</>, "/s/journal/.t.json.7.9.tmp", O_WRONLY|O_CREAT|O_EXCL, 0600) = 4</s/journal/.t.json.7.9.tmp>
7 openat(AT_FDCWD</>, "/s/policy.toml", O_RDONLY) = 5</s/policy.toml>
8 fsync(4</s/blobs/0123456789abcdef.safetensors> <unfinished ...>
7 rename("/s/journal/.t.json.7.9.tmp", "/s/journal/t.json") = 0
8 <... fsync resumed>) = 0
7 fsync(6</s/journal>) = 0
"""


def test_the_calls_that_change_a_state_are_found_and_counted_for_each_thread(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text(TRACE)
    assert list(strace.durable_calls(trace, Path("/s"))) == [
        Call("openat", 1, "journal/.t.json.tmp"),
        Call("fsync", 1, "blobs/#.safetensors"),
        Call("rename", 1, "journal/.t.json.tmp"),
        Call("fsync", 2, "journal"),
    ]


@pytest.mark.parametrize(
    ("killed", "text", "hit"),
    [
        pytest.param(0, "7 fsync(6</s/ledger/1.jsonl>) = -1 EIO (INJECTED)\n", "ledger/#.jsonl", id="whole line"),
        pytest.param(
            0, "7 fsync(6</s/journal> <unfinished ...>\n8 write(2</s/x>) = 1\n7 <... fsync resumed>) = -1 EIO "
            "(INJECTED)\n", "journal", id="a line in two",
        ),
        pytest.param(0, "7 write(5<anon_inode:[eventfd]>, 8) = -1 EIO (INJECTED)\n", "", id="not the state"),
        pytest.param(
            0, "7 fsync(6</s/a>) = 0\n7 fsync(5</elsewhere/b>) = -1 EIO (INJECTED)\n", "", id="the state just before",
        ),
        pytest.param(
            7, "8 fsync(5</s/old>) = 0\n7 fsync(6</s/journal> <unfinished ...>\n8 fsync(5</s/new> <unfinished ...>\n"
            "7 <... fsync resumed>) = ?\n7 +++ killed by SIGKILL +++\n", "journal", id="killed",
        ),
        pytest.param(7, "7 fsync(6</s/a>) = 0 (DELAYED)\n7 +++ killed by SIGKILL +++\n", "", id="killed too late"),
        pytest.param(0, "7 fsync(6</s/a>) = 0\n7 +++ killed by SIGKILL +++\n", "", id="killed by another"),
    ],
)  # fmt: skip
def test_what_was_met_is_read_from_the_trace(tmp_path: Path, killed: int, text: str, hit: str) -> None:
    trace = tmp_path / "trace"
    trace.write_text(text)
    assert strace.failed(trace) == ({7} if "INJECTED" in text else set())
    assert strace.hit(trace, Path("/s"), {killed} if killed else set()) == hit


def test_a_short_run_begins_with_one_call_of_each_kind() -> None:
    calls = [Call("fsync", 1, "a"), Call("fsync", 2, "a"), Call("fsync", 3, "b"), Call("rename", 2, "a")]
    assert evidence_syscalls._unlike_first(calls) == [
        Call("fsync", 1, "a"), Call("rename", 2, "a"), Call("fsync", 3, "b"), Call("fsync", 2, "a"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "thread"),
    [
        pytest.param("7 fsync(3</s/a>) = 0\n7 fsync(3</s/b>", 7, id="the end of the record"),
        pytest.param(
            "7 fsync(3</s/a>) = 0\n7 fsync(3</s/b> <unfinished ...>\n8 fsync(4</s/c>) = 0\n", 7, id="another came after"
        ),
        pytest.param("7 fsync(3</s/a>) = 0\n7 fsync(3</s/b>) = 0 (DELAYED)\n", None, id="it has gone on"),
        pytest.param(
            "7 fsync(3</s/a>) = 0\n7 fsync(3</s/b> <unfinished ...>\n7 <... fsync resumed>) = 0\n", None, id="back"
        ),
        pytest.param("7 fsync(3</s/a>) = 0\n8 fsync(3</s/b>", None, id="the first of its thread"),
    ],
)
def test_the_call_that_is_held_is_read_from_the_trace(tmp_path: Path, text: str, thread: int | None) -> None:
    trace = tmp_path / "trace"
    assert strace.held(trace, 2) is None
    trace.write_text(text)
    assert strace.held(trace, 2) == thread


def noted(rounds: int, kib: float, descriptors: int, seconds: float) -> evidence_soak.Note:
    held = {unit: {"kib": int(kib), "descriptors": descriptors, "threads": 9} for unit in evidence_soak.UNITS}
    return evidence_soak.Note(rounds, seconds, held, {"coordinator": 4000 * rounds})


def test_a_soak_that_keeps_what_it_has_is_well() -> None:
    found = evidence_soak.drift([noted(100 * n, 1000, 20, 0.2) for n in range(1, 31)])
    assert evidence_soak.verdict(found) == []
    assert found["coordinator bytes a round"] == 4000


@pytest.mark.parametrize(
    ("grown", "said"),
    [
        pytest.param(lambda n: noted(100 * n, 1000 + 4 * n, 20, 0.2), "KiB and has", id="memory"),
        pytest.param(lambda n: noted(100 * n, 1000, 20 + n // 2, 0.2), "descriptors and has", id="descriptors"),
        pytest.param(lambda n: noted(100 * n, 1000, 20, 0.2 + n / 100), "a round took", id="time"),
    ],
)
def test_a_soak_that_drifts_is_told(grown: object, said: str) -> None:
    assert callable(grown)
    wrong = evidence_soak.verdict(evidence_soak.drift([grown(n) for n in range(1, 31)]))
    assert wrong
    assert all(said in text for text in wrong)


def stretch(seconds: float, descriptors: int) -> evidence_crowd.Stretch:
    return evidence_crowd.Stretch("", (seconds,) * 20, {"kib": 100_000, "descriptors": descriptors})


def test_a_crowd_that_slows_others_or_leaves_descriptors_is_told() -> None:
    calm, slow = stretch(0.2, 20), stretch(0.5, 1500)
    left = {"kib": 100_500, "descriptors": 21}
    assert evidence_crowd.verdict([calm, stretch(0.3, 1500), calm], left) == []
    assert evidence_crowd.verdict([calm, slow, calm], left) == ["the 95th percentile is 2.50 times that in peace"]
    assert evidence_crowd.verdict([calm, calm, calm], {"kib": 200_000, "descriptors": 900}) == [
        "900 descriptors are left of 20 before", "200000 KiB are left of 100000 before",
    ]  # fmt: skip


def test_a_line_is_made_bad_in_four_ways_one_after_the_other() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, BadLine(f"127.0.0.1:{server.getsockname()[1]}") as line:
        phases = evidence_line.Phases(line, rounds=8, cut_bytes=1000, deaf_s=0)
        ways = []
        for number in (1, 3, 5, 7, 8):
            phases.at(number)
            ways.append((line.cut_bytes, line.delay_s, line.bytes_a_second))
        assert ways == [(1000, 0, None), (1000, 0.3, None), (None, 0, 200_000), *[(None, 0, None)] * 2]
        assert phases.deaf == 1


def test_sent_again_is_what_was_carried_beyond_the_updates_for_each_cut() -> None:
    came = evidence_line.Came(20, 1.0, cuts=4, deaf=2, carried_up=2_000_000, payload=1_000_000, wrong=[])
    assert came.again_per_cut == pytest.approx((2_000_000 - 1_005_000) / 4)


def test_a_plan_writes_a_study_for_each_name() -> None:
    plan = Plan(sites=3, studies=2)
    assert plan.study_names == ("trial-01", "trial-02")
    text = plan.study_file("trial-02")
    assert 'sites = ["alpha", "bravo", "charlie"]' in text
    assert "quorum = 3" in text


def test_the_size_of_a_folder_is_that_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"12345")
    (tmp_path / "c").write_bytes(b"678")
    assert size_of(tmp_path) == 8


def test_the_bytes_beside_a_masked_update_grow_with_the_sites_and_not_with_the_update() -> None:
    """Of each site: its keys, a share from and to each other, and the signed statements of all."""
    few, more, longer = (evidence_secure.measure(sites, elements) for sites, elements in ((3, 10), (6, 10), (3, 500)))
    assert few.beside < more.beside < 2.5 * few.beside
    assert longer.beside == few.beside
    cost = evidence_secure.Cost(site_s=0.5, coordinator_s=0.25, hash_s=0.125, beside=2000, peak=2**26)
    assert evidence_secure.row(4, 250_000, cost) == (
        "| 4 | 1.0 MiB | 2,000 B (0.20%) | 0.50 s | 0.25 s | 0.12 s | 64 MiB |"
    )


@pytest.mark.parametrize(
    ("verdict", "agrees"),
    [
        ({"ok": True, "uploads": 5, "accepted": 4, "refused": 0, "compared": 4}, True),  # one never arrived
        ({"ok": True, "uploads": 5, "accepted": 4, "refused": 1, "compared": 5}, True),
        ({"ok": True, "uploads": 5, "accepted": 4, "refused": 1, "compared": 4}, False),
        ({"ok": False, "reason": "changed"}, False),
    ],
)
def test_receipts_agree_if_the_coordinator_has_one_for_each_upload_that_it_decided_on(
    verdict: dict[str, object], agrees: bool
) -> None:
    assert demo.receipts_agree(verdict) is agrees


def test_a_receipted_update_that_is_in_no_model_is_named() -> None:
    def closed(digest: str) -> AttemptReport:
        answer = SimpleNamespace(update_digest=digest)
        return cast(AttemptReport, SimpleNamespace(answers={"alpha": answer}))

    wrong = astray("alpha", [(1, "a"), (2, "b"), (3, "c")], {1: closed("a"), 2: closed("other")})
    assert wrong == [
        f"alpha has a receipt for an update of round {number} that is not in its model" for number in (2, 3)
    ]


def test_how_long_programs_took_to_end_is_told_for_each_part() -> None:
    tally = evidence_stops.Tally()
    for number in range(1, 22):
        tally.seconds["gateway"].append(number / 10)
    tally.seconds["coordinator"].append(0.25)
    assert tally.percentiles() == {"coordinator": [0.25, 0.25, 0.25], "gateway": [1.1, 2.0, 2.1]}
    assert tally.total == 22
