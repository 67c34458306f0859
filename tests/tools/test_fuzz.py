"""The fuzzer finds what is planted, makes the same case again, and finds nothing at any door in some thousand cases."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tools.fuzz import formats, mutate, pool, targets, wire
from tools.fuzz.engine import Door, Finding, Runner, Target, Uncoded, case, scratch
from tools.fuzz.examples import SiteFiles
from wardround.errors import BadData, WardroundError
from wardround.local import frames
from wardround.records.invitation import Invitation
from wardround.records.receipts import Receipt
from wardround.signing import canonical, dsse
from wardround.v1 import federation_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
CASES = 30  # of each target here; `make fuzz` runs on


def found(take: Callable[[bytes], object], cases: int = 1, **more: object) -> list[Finding]:
    """What the engine says of a door with one example."""
    door = Door([b"example"], mutate.BYTES, take, **more)  # type: ignore[arg-type]
    runner = Runner(Target("planted", "", lambda folder: door), door, seed=1)
    return [finding for finding in runner.run(range(cases)) if finding is not None]


def raising(error: BaseException) -> Callable[[bytes], object]:
    def take(data: bytes) -> None:
        raise error

    return take


def test_a_door_that_raises_what_is_not_ours_is_found() -> None:
    (finding, *_) = found(raising(KeyError("round")))
    assert (finding.kind, finding.number) == ("crash", 0)
    assert "KeyError" in finding.detail
    assert finding.command() == "python -m tools.fuzz --target planted --seed 1 --case 0"


def test_an_error_without_an_exit_code_of_its_own_is_found() -> None:
    assert [one.kind for one in found(raising(WardroundError("the service failed")))] == ["uncoded"]
    assert [one.kind for one in found(raising(Uncoded("INTERNAL: the coordinator failed")))] == ["uncoded"]


def test_a_message_without_end_is_found() -> None:
    error = BadData("no")
    error.message = "a" * 100_000  # what the class itself would cut
    assert [one.kind for one in found(raising(error))] == ["broken"]


def test_an_example_that_is_refused_is_found_for_then_nothing_behind_the_door_is_reached() -> None:
    assert [one.kind for one in found(raising(BadData("no")))] == ["seed"]
    assert found(raising(BadData("no")), refusals=frozenset({0})) == []


def test_a_door_that_hangs_is_found_and_ended() -> None:
    def spin(data: bytes) -> None:
        while True:
            pass

    began = time.process_time()
    assert [one.kind for one in found(spin)] == ["hang"]
    assert time.process_time() - began < 10


def test_a_door_that_eats_memory_is_found() -> None:
    def eat(data: bytes) -> int:
        return len(bytearray(200 * 1024 * 1024))

    def keep(data: bytes) -> None:
        kept.append(bytearray(b"x" * 4 * 1024 * 1024))

    kept: list[bytearray] = []
    assert [one.kind for one in found(eat)] == ["memory"]
    assert "were kept over cases" in found(keep, cases=60)[-1].detail


def test_a_process_that_dies_is_found_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """``PLANTED`` makes the worker's door end its process at the third case."""
    monkeypatch.setenv("WARDROUND_FUZZ_PLANTED", "1")
    jobs: Iterator[pool.Job] = iter([pool.Job("planted.death", 1, 0, 6)])
    workers = pool.Pool(1)
    try:
        results = workers.run(lambda: next(jobs, None), lambda results: None)
    finally:
        workers.close()
    (finding,) = results.findings.values()
    assert (finding.kind, finding.number) == ("died", 2)
    assert results.cases == 6


def test_a_case_is_made_again_from_target_seed_and_number() -> None:
    code = (
        "import hashlib, sys, tempfile; from pathlib import Path\n"
        "from tools.fuzz.targets import BY_NAME; from tools.fuzz.engine import case\n"
        "target = BY_NAME['coordinator.upload']\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    door = target.opens(Path(folder))\n"
        "    made = [case(door, target.name, 7, number) for number in range(300)]\n"
        "    print(hashlib.sha256(b''.join(made)).hexdigest())\n"
    )
    said = {
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(said) == 1


@pytest.mark.parametrize(
    "mutator",
    [
        mutate.BYTES, mutate.JSON_LINES, mutate.in_json, mutate.of_frames(mutate.in_json), formats.in_toml,
        formats.in_csv,
        formats.in_der, formats.in_pem, formats.in_safetensors, formats.of_tar(lambda name: mutate.in_json),
        wire.in_message(pb.UploadRequest.DESCRIPTOR),
    ],
)  # fmt: skip
def test_no_mutator_fails_whatever_it_is_given(mutator: mutate.Mutator) -> None:
    site = SiteFiles()
    tar = formats.tar_of([("ledger/000001.jsonl", b"{}\n"), ("MANIFEST.json", b"{}")])
    examples = [b"", b"\xff", b'{"a":[1,{"b":"c"}]}', site.policy, site.authority.pem, tar, mutate.frames([b"{}", b""]),
                pb.UploadRequest(inquire=pb.UploadInquire(upload_id=b"i" * 16)).SerializeToString()]  # fmt: skip
    random = Random(1)
    made = [mutator(random, random.choice(examples)) for _ in range(400)]
    assert len(set(made)) > 100


@pytest.fixture(scope="module")
def doors() -> Iterator[dict[str, Door]]:
    with tempfile.TemporaryDirectory(dir=scratch()) as root:
        opened = {}
        for target in targets.TARGETS:
            folder = Path(root) / target.name
            folder.mkdir()
            opened[target.name] = target.opens(folder)
        yield opened
        for door in opened.values():
            door.close()


@pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")
@pytest.mark.parametrize("target", targets.TARGETS, ids=lambda target: target.name)
def test_nothing_is_found_at_any_door(doors: dict[str, Door], target: Target) -> None:
    """A short run of what `make fuzz` does, with its own seed; the examples themselves are the first cases."""
    runner = Runner(target, doors[target.name], seed=2026)
    findings = [finding for finding in runner.run(range(CASES)) if finding is not None]
    assert not findings, "\n".join(f"{one.command()}\n{one.detail}" for one in findings)
    assert runner.tally.cases == CASES


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
INNER = LEAVES | st.lists(LEAVES) | st.dictionaries(st.text(), LEAVES)
VALUES = INNER | st.lists(INNER) | st.dictionaries(st.text() | st.sampled_from(["ledger", "payload", "message"]), INNER)
SHORT = settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@seed(1)
@SHORT
@given(VALUES)
def test_any_json_value_is_a_control_answer_or_refused(value: object) -> None:
    try:
        error = frames.failure_from(value)
    except BadData:
        return
    assert isinstance(error, WardroundError)


@seed(1)
@SHORT
@given(VALUES)
def test_any_json_value_is_an_envelope_and_a_receipt_or_refused(value: object) -> None:
    for read in (dsse.Envelope.from_document, Receipt.from_document):
        with contextlib.suppress(BadData):
            read(value)


@seed(1)
@SHORT
@given(st.binary() | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_canonical_json_or_refused(data: bytes) -> None:
    try:
        value = canonical.loads(data)
    except BadData:
        return
    assert canonical.dumps(value) == data


@seed(1)
@SHORT
@given(st.text() | st.text().map(lambda text: "wr1." + text))
def test_any_text_is_an_invitation_or_refused(text: str) -> None:
    with pytest.raises(BadData):
        Invitation.decode(text)


@seed(1)
@SHORT
@given(
    st.sampled_from([target.name for target in targets.TARGETS]),
    st.integers(CASES, 10**9),
)
def test_a_case_of_any_number_is_taken_or_refused(doors: dict[str, Door], name: str, number: int) -> None:
    target = targets.BY_NAME[name]
    runner = Runner(target, doors[name], seed=3)
    assert [finding for finding in runner.run([number]) if finding is not None] == []


def test_the_command_prints_its_table_and_ends_with_0(tmp_path: Path) -> None:
    line = [
        sys.executable,
        "-m",
        "tools.fuzz",
        "--target",
        "canonical",
        "--target",
        "invitation",
        "--cases",
        "200",
    ]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert "200 cases of 2 targets" in done.stdout
    assert "0 findings" in done.stdout
    shown = subprocess.run(
        [*line[:3], "--target", "canonical", "--case", "12"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0
    assert "bytes:" in shown.stdout


def test_every_case_is_at_most_as_large_as_grpc_lets_through() -> None:
    door = Door([b"a" * 100], lambda random, data: data * 1_000_000, len)
    assert len(case(door, "x", 1, 5)) == mutate.LARGEST
