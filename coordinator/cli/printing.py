"""A study's status and report as text on stdout, and tables."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coordinator.answers import StudyList
    from coordinator.study_answers import AttemptReport, SiteFit, SiteStatus, StudyFits, StudyReport, StudyStatus


LATE = "late"
STEPS = {
    "keys": "the sites tell their keys",
    "shares": "the sites deal shares of their masks",
    "training": "the sites train, and send masked vectors",
    "agreement": "the set is chosen, and its sites sign it; it waits until enough have",
    "opening": "enough sites have signed the set, and open its sum; it waits until enough have",
}


def print_progress(status: "StudyStatus") -> None:
    """One line that says how the study stands."""
    where = "closing" if status.closing else f"round {status.round}/{status.rounds}"
    attempt = f" (attempt {status.attempt})" if status.attempt > 1 else ""
    sites = "  ".join(f"{name}: {site.state}" for name, site in status.sites.items())
    print(f"{status.state}  {where}{attempt}  {sites}", flush=True)


def print_status(status: "StudyStatus") -> None:
    """The study, its sites in a table, and what is not as the sites expect."""
    from wardround.records.assignment import ATTEMPTS_APPROVED

    best = f"; best global model: round {status.best.round}" if status.best else ""
    print(f"{status.id} (revision {status.revision}): {status.state}, round {status.round} of {status.rounds}{best}")
    if status.why:
        print(status.why)
    if status.deadline:
        print(f"the round ends when all have answered, or at {status.deadline}")
    if status.step:
        missing = f"; not yet: {', '.join(status.awaited)}" if status.awaited else ""
        print(f"secure aggregation: {STEPS[status.step]}{missing}")
    print(f"study {status.study_digest}\nmodel {status.model_digest}")
    heads = ("site", "approved", "data", "state", "rounds", "seconds", "code")
    print_table(heads, [_site(name, site, status.rounds) for name, site in status.sites.items()])
    for name, site in status.sites.items():
        if site.evaluates and site.rounds_evaluated:
            print(f"has judged the model that a round began with: {name} in {_rounds(site.rounds_evaluated)}")
        if site.rounds_left_out:
            print(f"accepted and left out of the model: {name} in {_rounds(site.rounds_left_out)}")
        if site.rounds_capped:
            print(f"counted for less than its rows: {name} in {_rounds(site.rounds_capped)}")
        if site.rounds_late:
            print(f"did not answer in time: {name} in {_rounds(site.rounds_late)}")
        if site.expects_to_be_late:
            print(f"expects to be late: {name}, which expects to have trained at {site.expected}")
        if site.always_late:
            print(
                f"always late: {name}, in each of its last rounds; ask its people why, and give rounds more time "
                "(`round_deadline_s`) or do without it (`quorum`): `coordinator study edit`"
            )
        elif site.slow:
            print(f"slow: {name}, which takes {site.seconds:.0f} s a round, more than twice as long as the others do")
        if reasons := {why: count for why, count in site.absences.items() if why != LATE}:
            print(f"not in the model: {name}: {', '.join(f'{why}, {_times(count)}' for why, count in reasons.items())}")
    if spent := [name for name, site in status.sites.items() if site.attempts_spent]:
        print(f"consents spent: {', '.join(spent)} approved {ATTEMPTS_APPROVED} attempts at a round, and decline more")
        print(f"`coordinator study renew {status.id}` begins a new revision, which each site approves")
    if status.incomplete:
        print(f"not in every round: {', '.join(status.incomplete)}")


def _site(name: str, site: "SiteStatus", rounds: int) -> tuple[str, ...]:
    seconds = "" if site.seconds is None else f"{site.seconds:.1f}"
    approved = "yes" if site.ready else "no"
    contributed = "evaluates" if site.evaluates else f"{len(site.rounds_contributed)}/{rounds}"
    return name, approved, _data(site.fit), site.state, contributed, seconds, site.code


def _data(fit: "SiteFit | None") -> str:
    if fit is None:
        return ""
    return f"fits, {fit.rows}" if fit.fits else "does not fit"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def print_studies(studies: "StudyList") -> None:
    """The list, and why the paused ones are."""
    rows = [
        (
            row.id, str(row.revision), "archived" if row.archived else row.state, f"{row.round}/{row.rounds}",
            f"{row.approved}/{row.sites}", row.title,
        )
        for row in studies.studies
    ]  # fmt: skip
    print_table(("study", "revision", "state", "rounds", "approved", "title"), rows)
    for row in studies.studies:
        if row.why:
            print(f"{row.id}: {row.why}")


def print_fits(fits: "StudyFits") -> None:
    """Each site's word, and how many have given one."""
    print_table(("site", "data", "rows", "said"), [(name, *_fit(site)) for name, site in fits.sites.items()])
    said = [site for site in fits.sites.values() if site is not None]
    silent = len(fits.sites) - len(said)
    print(f"{sum(site.fits for site in said)} of {len(fits.sites)} sites fit, {silent} have not said")
    if fits.counts != "exact":
        print(f"numbers of rows are {fits.counts}, as the study says")


def _fit(site: "SiteFit | None") -> tuple[str, str, str]:
    if site is None:
        return "not said", "", ""
    return ("fits", str(site.rows), site.said) if site.fits else ("does not fit", "", site.said)


def print_report(report: "StudyReport") -> None:
    """The status, the limits, and every attempt at every round in a table."""
    print_status(report)
    for limit in report.limits:
        print(f"limit: {limit}")
    if report.best_rule:
        print(f"best global model: {report.best_rule}")
    print_table(("round", "outcome", "contributed", "did not", "seconds"), [_attempt(row) for row in report.attempts])


def print_table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], width: int | None = None) -> None:
    """A table on stdout; ``width``: how wide it may be where nobody looks at a terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*heads, box=box.SIMPLE_HEAD)
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(*row)
    Console(
        width=None if sys.stdout.isatty() else width, markup=False, highlight=False, emoji=False, soft_wrap=True
    ).print(table)


def _attempt(row: "AttemptReport") -> tuple[str, ...]:
    return (
        "closing" if row.closing else f"{row.round}.{row.attempt}",
        row.outcome,
        " ".join(row.contributors),
        " ".join(site for site in row.asked if site not in row.contributors),
        "" if row.seconds is None else f"{row.seconds:.2f}",
    )


def _rounds(numbers: Sequence[int]) -> str:
    return f"round {numbers[0]}" if len(numbers) == 1 else f"rounds {', '.join(map(str, numbers))}"
