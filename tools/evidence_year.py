"""A year of a federation in an hour, on a clock that is moved: `python -m tools.evidence_year`.

Real processes (a coordinator, and for each of two sites a gateway and a trainer) over TLS. All of them, and the
commands that a person gives, see a wall clock that Debian's `libfaketime` moves; the monotonic clock is the machine's.
TLS reads the wall clock, so certificates end and are renewed by it. They live ten days. Each week the clock is moved by
3.9 days while everything runs, and every site must renew its certificate by itself. Then everything is stopped, the
clock is moved by 3.1 days, everything is started, and one round more of the one study of the year must close.

On the way an ``AGENDA`` is done: the database as the first version made it is upgraded in the middle of the study; the
root's key is taken away, an intermediate and then a new root come into service, and the old root is retired; the
programs get a new version in the order of the page about upgrades (they say another number, the code is the same); a
site is off for three weeks and comes back by the renewal window; and the clock goes on by twelve days while everything
runs, as on machines that were suspended. In the end the model must be that of the lab, with each receipted update, and
both verifiers must call each ledger consistent and complete. Prints a line for each week and a JSON line; exits 1 if
anything came out other than it should.
"""

import argparse
import datetime
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import sqlalchemy as sa
from cryptography import x509

from coordinator.requests import StopStudy
from coordinator.state_directory import State
from coordinator.storage import sqlite
from coordinator.study_answers import StudyStatus
from tools.faults import Disturbed, Plan, Stuck, Template, lab_digest
from tools.world import CommandFailed, World, command, wait_until
from wardround.records.schema import toml_bytes

LIBRARIES = ("/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/lib/faketime/libfaketimeMT.so.1")
LIFE_S = 10 * 86400  # of a certificate: at the seventh day it is renewed and good, at the fourth neither is due
RUNNING, STOPPED = datetime.timedelta(days=3.9), datetime.timedelta(days=3.1)  # of a week
SUSPENDED = datetime.timedelta(days=12)
RENEWED_S = 240  # of this machine, until every site has renewed
PASSPHRASE = "a passphrase of this year"
NEXT = "import wardround\nwardround.__version__ = {version!r}\n"  # run by Python's site module before the program

Act = Callable[["Year"], object]


def library() -> Path | None:
    """Debian's `libfaketime`, if it is installed."""
    found = [path for pattern in LIBRARIES for path in sorted(Path("/").glob(pattern[1:]))]
    return found[0] if found else None


class Clock:
    """A wall clock for the processes that have its ``environment``. It begins as the machine's, and goes as fast."""

    def __init__(self, file: Path) -> None:
        """Raises FileNotFoundError: there is no `libfaketime` here."""
        found = library()
        if found is None:
            raise FileNotFoundError("no libfaketime: `apt-get install libfaketime`, or your system's package")
        self._file = file
        self.ahead = datetime.timedelta()
        self.move(datetime.timedelta())
        self.environment = {
            "LD_PRELOAD": str(found), "FAKETIME_TIMESTAMP_FILE": str(file), "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1",
        }  # fmt: skip

    def move(self, by: datetime.timedelta) -> None:
        """Every process sees it at its next look."""
        self.ahead += by
        text = f"+{self.ahead.total_seconds():.0f}\n"
        fresh = self._file.with_suffix(".new")
        fresh.write_text(text)
        fresh.rename(self._file)

    def now(self) -> datetime.datetime:
        return datetime.datetime.now(datetime.UTC) + self.ahead


@dataclass
class Tally:
    """What the year had, and what of it was wrong."""

    weeks: int = 0
    starts: int = 0
    renewals: int = 0
    by_window: int = 0
    rounds: int = 0
    events: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Year:
    """A federation, its clock, and who of its sites is off."""

    def __init__(
        self,
        template: Template,
        agenda: Mapping[int, Sequence[Act]],
        restarted: Sequence[str] = ("coordinator", "gateway", "trainer"),
    ) -> None:
        """``restarted``: the parts that are, each week."""
        self.plan = template.plan
        self.study = template.plan.study_names[0]
        self.tally = Tally()
        self.off: set[str] = set()
        self.week = 0
        self._template = template
        self._agenda, self._restarted = agenda, restarted
        self.world = Disturbed(template.copy(), template.plan)
        self.folder = self.world.state
        self.clock = Clock(self.folder / "clock")
        self.world.environment = self.clock.environment
        (self.folder / "passphrase.txt").write_text(PASSPHRASE)

    def run(self, weeks: int, ends: float = float("inf"), first: int = 1) -> Tally:
        """The weeks from ``first`` to ``weeks``, and the judgement.

        Args:
            ends: when no further week begins, by the monotonic clock.
            first: of a later week, what its successors need of those before it is done at once.
        """
        world = self.world
        try:
            self.clock.move(STOPPED)  # since the sites joined
            self._start()
            for self.week in range(1, first):
                for act in self._agenda.get(self.week, ()):
                    if act in NEEDED_LATER:
                        self.act(act)
            for number in range(first, weeks + 1):
                if time.monotonic() > ends:
                    break
                began, self.week = time.monotonic(), number
                self._week(number)
                self.tally.weeks += 1
                done = self.tally.events[-1] if number in self._agenda else ""
                said = f"week {number}, {self.clock.now():%F}: {self.tally.renewals} renewals, round {self._round()}"
                print(f"{said}, {time.monotonic() - began:.0f} s {done}", file=sys.stderr, flush=True)
            self._judge()
        except (Stuck, TimeoutError, CommandFailed) as failure:
            self.tally.wrong.append(str(failure))
        finally:
            world.__exit__()
        return self.tally

    def _week(self, number: int) -> None:
        self.later(RUNNING)
        self._stop()
        self.clock.move(STOPPED)
        acts = self._agenda.get(number, ())
        for act in acts:
            if act in WHILE_STOPPED:
                self.act(act)
        self._start()
        for act in acts:
            if act not in WHILE_STOPPED:
                self.act(act)
        if not self.off:
            self._another_round()

    def later(self, by: datetime.timedelta) -> None:
        """It is later while everything runs, and each site that is on renews its certificate, if it is due by then."""
        shown = {site: self.certificate(site) for site in self._on}
        self.clock.move(by)
        before = {site: one.serial_number for site, one in shown.items() if self._is_due(one)}
        wait_until(lambda: self._all_renewed(before), f"every site renews by {self.clock.now():%F}", RENEWED_S)
        self.tally.renewals += len(before)

    def _is_due(self, shown: x509.Certificate) -> bool:
        """Whether a certificate is past the half of its life and what may be added to that by chance."""
        life = shown.not_valid_after_utc - shown.not_valid_before_utc
        return self.clock.now() > shown.not_valid_before_utc + life * 0.55

    def act(self, act: Act) -> None:
        """Do it, and note that it was done."""
        act(self)
        self.tally.events.append(f"{self.week}: {(act.__doc__ or act.__name__).splitlines()[0]}")

    @property
    def _on(self) -> list[str]:
        return [site for site in self.plan.names if site not in self.off]

    def certificate(self, site: str) -> x509.Certificate:
        return x509.load_pem_x509_certificate((self.folder / site / "identity" / "certificate.pem").read_bytes())

    def _all_renewed(self, before: Mapping[str, int]) -> bool:
        self.world.tend()
        return all(self.certificate(site).serial_number != serial for site, serial in before.items())

    def units(self) -> list[str]:
        """Those of the sites that are on, and the coordinator."""
        return [unit for unit in self.world.all_units if unit.partition(":")[2] not in self.off]

    def _start(self) -> None:
        missing = [unit for unit in self.units() if unit not in self.world.units]
        for unit in missing:
            self.world.spawn(unit)
        for unit in missing:
            self.world.units[unit].wait_line("ready", 120)
            self.tally.starts += 1

    def _stop(self) -> None:
        for unit in sorted(self.world.units, key=lambda name: name == "coordinator"):
            if unit.partition(":")[0] not in self._restarted:
                continue
            code = self.world.stop(unit)
            if code:
                self.tally.wrong.append(f"{unit} was stopped and ended with {code}: {self.world.tail(unit)}")

    def _round(self) -> int:
        status = self.world.look(self.study)
        return status.round if status is not None else 0

    def _another_round(self) -> None:
        """The round under way closes, with every site; a study that paused is continued, as an operator would."""
        before = self.world.until(self.study, lambda status: status.round >= 1).round
        self.world.until(self.study, lambda status: status.round > before)

    def ask_root(self, words: str) -> None:
        """A command about the authority with files in this folder, at the coordinator or where the root's file is."""
        line = [str(self.folder / word) if "." in word else word for word in shlex.split(words)]
        if line[1] in ("sign", "new-root"):
            command("coordinator", *line, environment=self.clock.environment)
        else:
            self.world.ask_coordinator(*line)

    def say_version(self, unit: str, version: str) -> None:
        """From its next start on, ``unit`` and its children say this version."""
        folder = self.folder / f"version-{version}"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(NEXT.format(version=version))
        self.world.environments[unit] = {"PYTHONPATH": str(folder)}

    def _judge(self) -> None:
        world, tally = self.world, self.tally
        self._another_round()
        world.ask(StopStudy(study=self.study), StudyStatus)
        closed = world.report(self.study).rounds_closed
        tally.rounds = max(row.round for row in closed)
        digests = {tally.rounds: lab_digest(self._template, tally.rounds)}
        tally.wrong += [text for text in world.judge(self.study, digests) if not text.startswith("it is stopped")]
        for site in self.plan.names:
            entries = [row for row in world.entries(site) if row["type"] == "identity"]
            renewed = sum(row["event"] == "renewed" for row in entries)
            if renewed < tally.weeks - 4:
                tally.wrong.append(f"{site} has renewed {renewed} times in {tally.weeks} weeks")


def upgrade_database(year: Year) -> None:
    """the database as the first version made it, upgraded in the middle of the study"""
    as_the_first_version_left_it(State(year.world.coordinator_state))
    year.world.ask_coordinator("upgrade")
    if not (year.world.coordinator_state / "coordinator-0001.db").exists():
        year.tally.wrong.append("the upgrade kept no copy of the database")


def export_root(year: Year) -> None:
    """the root's key taken away"""
    year.ask_root("authority export-root --out root.pem --passphrase passphrase.txt")


def new_intermediate(year: Year) -> None:
    """a new intermediate"""
    year.ask_root("authority request --out request.pem --force")
    year.ask_root(
        "authority sign --root root.pem --passphrase passphrase.txt --request request.pem --out service.pem --force"
    )
    year.ask_root("authority install service.pem")


def new_root(year: Year) -> None:
    """a new root and its intermediate"""
    year.ask_root("authority new-root --root root.pem --passphrase passphrase.txt --out newer.pem")
    (year.folder / "newer.pem").rename(year.folder / "root.pem")
    new_intermediate(year)


def retire_root(year: Year) -> None:
    """the old root retired"""
    wait_until(
        lambda: _is_retired(year), "each site has a certificate of the new root, and the old one goes", RENEWED_S
    )


def _is_retired(year: Year) -> bool:
    try:
        year.ask_root("authority retire")
    except CommandFailed as failed:
        if "have not renewed their certificate" not in str(failed):
            raise
        year.world.tend()
        return False
    return True


def switch_off(year: Year) -> None:
    """a site goes off"""
    year.off.add(year.plan.names[-1])


def switch_on(year: Year) -> None:
    """the site is back, its certificate ended, and renews by the window"""
    (site,) = year.off
    if year.certificate(site).not_valid_after_utc > year.clock.now():
        year.tally.wrong.append(f"{site} was off for less than the life of its certificate")
    year.off.clear()
    year.tally.by_window += 1


def suspend(year: Year) -> None:
    """every machine suspended for longer than the life of a certificate"""
    year.later(SUSPENDED)
    year.clock.move(STOPPED)  # so that the next week is like the others


def prepare(world: World) -> None:
    """Certificates of ten days."""
    config = State(world.coordinator_state).config_file
    config.write_bytes(config.read_bytes() + b"\n" + toml_bytes({"certificates": {"life_s": LIFE_S}}))


def newer_coordinator(year: Year) -> None:
    """the coordinator is one minor version newer"""
    year.say_version("coordinator", "0.2.0")


def newer_sites(year: Year) -> None:
    """the sites are upgraded too"""
    for site in year.plan.names:
        for part in ("gateway", "trainer"):
            year.say_version(f"{part}:{site}", "0.2.0")


NEEDED_LATER = (export_root,)  # what later weeks begin with
WHILE_STOPPED = (upgrade_database, newer_coordinator, newer_sites, switch_off, switch_on)
AGENDA: Mapping[int, Sequence[Act]] = {
    3: (upgrade_database,), 6: (export_root,), 9: (newer_coordinator,), 11: (newer_sites,), 14: (new_intermediate,),
    20: (switch_off,), 23: (switch_on,), 26: (suspend,), 30: (new_root,), 32: (retire_root,), 40: (switch_off,),
    42: (switch_on,), 48: (new_intermediate,),
}  # fmt: skip
SHORT: Mapping[int, Sequence[Act]] = {1: (upgrade_database, export_root, new_root, suspend, retire_root)}


def as_the_first_version_left_it(state: State) -> None:
    """Give a state directory the tables of the first migration, with the rows that fit them, and no second copies."""
    newer = state.database.with_name("newer.db")
    for suffix in ("", "-wal", "-shm"):
        if (path := Path(f"{state.database}{suffix}")).exists():
            path.rename(f"{newer}{suffix}")
    sqlite.migrate(state.database, "0001")
    engine = sa.create_engine(f"sqlite:///{state.database}")
    with engine.begin() as connection:
        names = sa.inspect(connection).get_table_names()
        connection.exec_driver_sql(f"ATTACH DATABASE '{newer}' AS newer")
        for name in names:
            if name != "alembic_version":
                columns = ", ".join(f'"{column["name"]}"' for column in sa.inspect(connection).get_columns(name))
                connection.exec_driver_sql(f"INSERT INTO {name} ({columns}) SELECT {columns} FROM newer.{name}")
    engine.dispose()
    for suffix in ("", "-wal", "-shm"):
        Path(f"{newer}{suffix}").unlink(missing_ok=True)
    shutil.rmtree(state.blobs / "spare")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.evidence_year", description=__doc__)
    parser.add_argument("--weeks", type=int, default=52, help="the last of them")
    parser.add_argument("--first", type=int, default=1, help="begin with this week, so that a year is run in pieces")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no further week after this time")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="copy the state of a year that failed here")
    chosen = parser.parse_args()
    if library() is None:
        raise SystemExit(
            "error: libfaketime is not here\nhint: `apt-get install libfaketime`, or your system's package"
        )
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="wardround-year-") as folder:
        year = Year(Template(Path(folder), Plan(sites=2, rounds=20_000), prepare), AGENDA)
        tally = year.run(chosen.weeks, began + 60 * chosen.minutes, chosen.first)
        if tally.wrong and chosen.keep is not None:
            print(f"kept in {year.world.retain(chosen.keep)}", file=sys.stderr)
    print(json.dumps({
        "evidence": "year", "first": chosen.first, **vars(tally),
        "load": os.getloadavg()[2], "wall_s": round(time.monotonic() - began),
    }))  # fmt: skip
    sys.exit(bool(tally.wrong))


if __name__ == "__main__":
    main()
