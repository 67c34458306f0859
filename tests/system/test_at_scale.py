"""Short runs of what `docs/evidence.md` has at length: kills, system calls that fail, a full disk, and a year."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools import evidence_disk, evidence_kills, evidence_syscalls, evidence_year, strace
from tools.faults import Plan, Template, lab_digest

pytestmark = [pytest.mark.system, pytest.mark.chaos]

ROUNDS = 24
needs_strace = pytest.mark.skipif(not strace.available(), reason="no strace, or no right to trace")


@dataclass(frozen=True)
class Prepared:
    """Two hospitals at rest, and the last model of their study as the lab makes it."""

    template: Template
    digests: dict[int, str]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    template = Template(tmp_path_factory.mktemp("scale"), Plan(sites=2, rounds=ROUNDS))
    return Prepared(template, {ROUNDS: lab_digest(template)})


def test_killed_at_random_every_part_goes_on_to_the_same_model(prepared: Prepared) -> None:
    tally = evidence_kills.campaign(prepared.template, prepared.digests, kills=6, most=6, seed=1)
    assert (tally.wrong, tally.total) == ([], 6)


@needs_strace
def test_a_durable_call_of_a_gateway_that_fails_or_is_the_last_costs_no_update(prepared: Prepared) -> None:
    campaign = evidence_syscalls.Campaign(prepared.template, "gateway")
    tally = campaign.run(["EIO", "SIGKILL"], every=50, most=2)
    assert (tally.wrong, tally.trials) == ([], 4)
    assert sum(tally.reached.values()) > 0


@pytest.mark.skipif(not evidence_disk.available(), reason="no right to mount a tmpfs")
def test_a_coordinators_disk_that_is_full_in_the_middle_of_a_round_costs_no_update(prepared: Prepared) -> None:
    tally = evidence_disk.filled(prepared.template, prepared.digests, "coordinator", times=1, seed=1)
    assert (tally.wrong, tally.times) == ([], 1)


@pytest.mark.skipif(
    evidence_year.library() is None and not os.environ.get("CI"), reason="no libfaketime: the clock cannot be moved"
)
def test_certificates_and_the_authority_go_on_over_weeks_on_a_clock_that_is_moved(prepared: Prepared) -> None:
    """The database is upgraded, the root leaves, a new one comes, all machines are suspended for longer than the life
    of a certificate, the old root goes; then rounds."""
    year = evidence_year.Year(prepared.template, evidence_year.SHORT, restarted=("coordinator", "gateway"))
    tally = year.run(weeks=1)
    assert tally.wrong == []
    assert (tally.renewals, len(tally.events), tally.rounds > 0) == (4, len(evidence_year.SHORT[1]), True)


@needs_strace
def test_a_kill_meets_the_call_that_is_aimed_at_and_not_the_first_alone(tmp_path: Path) -> None:
    """With `--seccomp-bpf` some releases of strace send a signal at the first call of its kind and at no other; so the
    call is held, and the process is killed from here. What traces it goes on with the others."""
    child = "import os\nwith open('file', 'wb') as file:\n for _ in range(5): os.fsync(file.fileno())"
    program = f"import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', {child!r}]).returncode)"
    trace = tmp_path / "trace"
    words = strace.words(trace, f"fsync:{strace.FAULTS['SIGKILL']}:when=3", ("fsync",))
    with strace.kill_at(trace, 3) as killed:
        done = subprocess.run(
            [*words, sys.executable, "-c", program], cwd=tmp_path, timeout=60, check=False, capture_output=True
        )
    text = trace.read_text()
    assert (done.returncode, done.stdout) == (0, b"-9\n")
    assert (text.count("fsync("), text.count(" = 0")) == (3, 2)
    assert strace.hit(trace, tmp_path, killed) == "file"
