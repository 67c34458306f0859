"""The dashboard's pages as blocks, from the service's answers. Judges only: no socket, no clock but the one given."""

import datetime
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from urllib.parse import quote

from coordinator.answers import SiteList, SiteRow, StudyRow
from coordinator.journal_records import WaitingList
from coordinator.studies.metrics import metrics_of
from coordinator.studies.page import blocks_of
from coordinator.study_answers import StudyFits, StudyReport, StudyStatus
from wardround.pages.blocks import Answer, Block, Claim, Grid, Heading, Page, Paragraph, Tone
from wardround.terminal import many

ENDS_SOON = datetime.timedelta(hours=36)  # a certificate of a week is renewed when half of it is over
IN_WORDS = {"created": "not started", "waiting": "waits for its sites"}


def studies_page(
    rows: Iterable[StudyRow], statuses: Mapping[str, StudyStatus], sites: SiteList, waiting: WaitingList
) -> Page:
    """All studies, and what needs a person."""
    listed = list(rows)
    return Page("Studies", "Coordinator", tuple(_studies(listed, statuses, sites, waiting)))


def _studies(
    rows: list[StudyRow], statuses: Mapping[str, StudyStatus], sites: SiteList, waiting: WaitingList
) -> Iterator[Block]:
    paused = [row.id for row in rows if row.state == "paused"]
    running = sum(row.state == "running" for row in rows)
    said = f"{many(len(rows), 'study', 'studies')}, {running} running" if rows else "No study yet"
    if paused:
        said += f"; paused: {', '.join(paused)}"
    tone: Tone = "bad" if paused else "good" if running else "plain"
    why = "; ".join(f"{name}: {statuses[name].why}" for name in paused if name in statuses)
    enrolled = [row for row in sites.sites if row.state not in ("invited", "revoked")]
    there = [row for row in enrolled if row.state in ("connected", "ready")]
    yield Answer(
        tone, f"{said}.", why, (
            Claim(
                "Sites", "good" if enrolled and len(there) == len(enrolled) else "open",
                f"{len(there)} of {len(enrolled)} are connected",
            ),
            _late_claim(statuses.values()),
            _incomplete_claim(statuses.values()),
            *_second_person_claim(waiting),
        ),
    )  # fmt: skip
    if waiting.waiting:
        yield Heading("Waits for a second person")
        yield Grid(
            ("command", "proposed by", "until", "line"),
            tuple((row.what, row.by, _minute(row.until), str(row.proposal)) for row in waiting.waiting), numbers=(3,),
        )  # fmt: skip
        yield Paragraph("Somebody with another login gives the same command: see `coordinator second-person list`.")
        yield Heading("All studies")
    if rows:
        columns = ("study", "state", "round", "ready", "in this round", "round ends at the latest")
        yield Grid(
            columns, tuple(_study_row(row, statuses.get(row.id)) for row in rows), numbers=(),
            links=tuple(f"/studies/{quote(row.id)}" for row in rows),
        )  # fmt: skip
    else:
        yield Paragraph("`coordinator study create FILE` offers one to its sites.")


def _study_row(row: StudyRow, status: StudyStatus | None) -> tuple[str, ...]:
    state = IN_WORDS.get(row.state, row.state)
    if status is None:
        return row.id, state, f"{row.round} of {row.rounds}", "", "", ""
    ready = sum(site.ready for site in status.sites.values())
    where = "closing" if status.closing else f"{status.round} of {status.rounds}"
    attempt = f", attempt {status.attempt}" if status.attempt > 1 else ""
    return (
        row.id, state, where + attempt, f"{ready} of {len(status.sites)}", _by_state(status), _minute(status.deadline),
    )  # fmt: skip


def _by_state(status: StudyStatus) -> str:
    """Which sites are in which state: "accepted: alpha, bravo; training: charlie"."""
    if status.state != "running":
        return ""
    states: dict[str, list[str]] = {}
    for name, site in status.sites.items():
        states.setdefault(f"{site.state} {site.code}".strip(), []).append(name)
    return "; ".join(f"{state}: {', '.join(names)}" for state, names in states.items())


def _late_claim(statuses: Iterable[StudyStatus]) -> Claim:
    late = sorted({
        f"{name} in {status.id}"
        for status in statuses
        for name, site in status.sites.items()
        if site.always_late or site.expects_to_be_late
    })  # fmt: skip
    return Claim("Late", "open" if late else "good", ", ".join(late) or "no site is late, or expects to be")


def _second_person_claim(waiting: WaitingList) -> Iterator[Claim]:
    """One where some commands need a second person."""
    if waiting.waiting:
        yield Claim("Second person", "open", many(len(waiting.waiting), "command waits", "commands wait"))
    elif waiting.needed_for:
        yield Claim("Second person", "good", "no command waits for one")


def _incomplete_claim(statuses: Iterable[StudyStatus]) -> Claim:
    without = [f"{status.id} without {', '.join(status.incomplete)}" for status in statuses if status.incomplete]
    return Claim(
        "Finished studies", "open" if without else "good",
        f"in some rounds, {'; '.join(without)}" if without else "none lacks a site in any round",
    )  # fmt: skip


def study_page(report: StudyReport, fits: StudyFits) -> Page:
    """One study: its report as it stands now, and whose data fits."""
    made = blocks_of(report, metrics_of(report))
    said = {name: fit for name, fit in fits.sites.items() if fit is not None}
    if not said:
        return replace(made, about=f"Study {report.id}")
    rows = tuple(
        (name, "fits" if fit.fits else "does not fit", str(fit.rows) if fit.fits else "", _minute(fit.said))
        for name, fit in said.items()
    )
    blocks = (
        *made.blocks,
        Heading("Whose data fits"),
        Grid(("site", "data", f"rows, {fits.counts}", "said"), rows, numbers=(2,)),
    )
    return replace(made, about=f"Study {report.id}", blocks=blocks)


def sites_page(sites: SiteList, now: datetime.datetime) -> Page:
    """Every site, its certificate and its keys."""
    return Page("Sites and certificates", "Coordinator", tuple(_sites(sites, now)))


def _sites(sites: SiteList, now: datetime.datetime) -> Iterator[Block]:
    rows = [row for row in sites.sites if row.state != "revoked"]
    enrolled = [row for row in rows if row.state != "invited"]
    there = [row for row in enrolled if row.state in ("connected", "ready")]
    copied = [row.site for row in sites.sites if row.certificate_fork_since or row.copied_since]
    ending = [row.site for row in enrolled if _ends_soon(row, now)]
    tone: Tone = "bad" if copied else "open" if ending or len(there) < len(enrolled) else "good"
    said = f"{len(there)} of {many(len(enrolled), 'site')} connected" if enrolled else "No site has joined yet"
    yield Answer(
        tone, f"{said}.", "", (
            Claim(
                "Keys", "bad" if copied else "good",
                f"two machines hold the keys of {', '.join(copied)}" if copied else "no key was seen at two machines",
            ),
            Claim(
                "Certificates", "open" if ending else "good",
                f"end within 36 hours: {', '.join(ending)}" if ending else "each is renewed in time",
            ),
        ),
    )  # fmt: skip
    if sites.sites:
        columns = ("site", "state", "last seen", "certificate ends", "ledger key")
        yield Grid(columns, tuple(map(_site_row, sites.sites)), numbers=(), codes=(4,))
        yield Paragraph(f"Receipts are signed with the key of fingerprint {sites.receipt_key}.", faint=True)


def _site_row(row: SiteRow) -> tuple[str, ...]:
    warning = "; two machines hold its keys" if row.certificate_fork_since or row.copied_since else ""
    return (
        row.site, row.state + warning, _minute(row.last_seen), _minute(row.certificate_expires), row.ledger_key or "",
    )  # fmt: skip


def _ends_soon(row: SiteRow, now: datetime.datetime) -> bool:
    if row.certificate_expires is None:
        return False
    return datetime.datetime.fromisoformat(row.certificate_expires) - now < ENDS_SOON


def _minute(text: str | None) -> str:
    """A time as people read it: to the minute, UTC."""
    return f"{text[:10]} {text[11:16]} UTC" if text else ""
