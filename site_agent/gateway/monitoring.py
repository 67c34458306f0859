"""What a site tells Prometheus on its own machine: the table of its metrics, and their values when they are asked for.

A label is a study's name or a word of a closed list; a value is a count, a size of what left, or a time. Nothing of the
data is told, no number that was reported, no path and no digest. docs/metrics.md lists them; a test compares.
"""

import datetime
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator

from site_agent.audit.left import LedgerReader, Left
from site_agent.gateway.consent.rows import StudyRow, study_rows
from site_agent.gateway.enrolment.identity import Identity
from site_agent.gateway.service_requests import ServiceStatus
from site_agent.state.directory import SiteState
from wardround import __version__
from wardround.signing.certificates import Name
from wardround.web.monitoring import Metric, Values

INFO = Metric("wardround_site_info", "gauge", "1; the version is a label", ("version",))
CONNECTED = Metric("wardround_site_connected", "gauge", "1 while the coordinator is connected")
TRAINER = Metric("wardround_site_trainer_answers", "gauge", "1 while the trainer answers, or is not this service's")
COPIED = Metric("wardround_site_key_copied", "gauge", "1 where two machines hold this site's keys")
EXPIRES = Metric("wardround_site_certificate_expiry_timestamp_seconds", "gauge", "When this site's certificate ends")
POLICY = Metric("wardround_site_policy", "gauge", "1 where there is a policy; without one nothing may leave")
STUDIES = Metric("wardround_site_studies", "gauge", "Studies by state, as `site-agent studies` has it", ("state",))
ROUND = Metric("wardround_site_study_round", "gauge", "The last round of a study that was begun here", ("study",))
ROUNDS = Metric("wardround_site_study_rounds", "gauge", "How many rounds a study has", ("study",))
WAITS = Metric("wardround_site_waits_for_release", "gauge", "1 where an update waits for a person", ("study",))
UPDATES = Metric("wardround_site_updates_total", "counter", "Updates that left, or may have", ("study",))
BYTES = Metric("wardround_site_update_bytes_total", "counter", "Their payload, sent once", ("study",))
ANSWERS = Metric(
    "wardround_site_receipts_total", "counter", "The coordinator's answers to updates", ("study", "decision")
)
AGAIN = Metric("wardround_site_updates_sent_again", "gauge", "Updates that were sent more than once")
NEWEST = Metric("wardround_site_last_update_timestamp_seconds", "gauge", "When an update last left", ("study",))
DECISIONS = Metric(
    "wardround_site_decisions_total", "counter", "Updates held, released, rejected or blocked here",
    ("study", "decision"),
)  # fmt: skip
SUMMARIES = Metric("wardround_site_summaries_total", "counter", "Summaries of columns that left")
CONTROL = Metric("wardround_site_control_bytes_total", "counter", "Messages beside the payload of updates")
LINES = Metric("wardround_site_ledger_lines", "gauge", "Lines of the ledger")
FREE = Metric("wardround_site_disk_free_bytes", "gauge", "What is free where the state directory lies")
METRICS = (
    INFO, CONNECTED, TRAINER, COPIED, EXPIRES, POLICY, STUDIES, ROUND, ROUNDS, WAITS, UPDATES, BYTES, ANSWERS, AGAIN,
    NEWEST, DECISIONS, SUMMARIES, CONTROL, LINES, FREE,
)  # fmt: skip


class Monitoring:
    """The metrics of one site. ``status``: how its service runs. Safe to use from several threads."""

    def __init__(self, state: SiteState, status: Callable[[], ServiceStatus]) -> None:
        self._state = state
        self._status = status
        self._ledger = LedgerReader(state.ledger)
        self._lock = threading.Lock()

    def is_ready(self) -> bool:
        """Whether the coordinator is connected and the trainer answers."""
        status = self._status()
        return status.connected and not status.trainer_problem

    def families(self) -> Iterator[tuple[Metric, Values]]:
        """Each metric with its values now."""
        status, site = self._status(), self._state.site()
        rows = study_rows(self._state, Name(site.federation, "coordinator").uri, ask_trainer=False)
        yield INFO, {(__version__,): 1}
        yield CONNECTED, {(): status.connected}
        yield TRAINER, {(): not status.trainer_problem}
        yield COPIED, {(): bool(status.certificate_fork_since)}
        yield EXPIRES, {(): Identity(self._state.identity).certificate().not_valid_after_utc.timestamp()}
        yield POLICY, {(): self._state.policy.exists()}
        yield from _of_studies(rows)
        with self._lock:
            yield from _of_ledger(self._ledger.read())
        yield FREE, {(): shutil.disk_usage(self._state.root).free}


def _of_studies(rows: list[StudyRow]) -> Iterator[tuple[Metric, Values]]:
    yield STUDIES, {(state,): count for state, count in Counter(row.state for row in rows).items()}
    yield ROUND, {(row.id,): row.round for row in rows}
    yield ROUNDS, {(row.id,): row.rounds for row in rows}
    yield WAITS, {(row.id,): row.state == "held" for row in rows}


def _of_ledger(left: Left) -> Iterator[tuple[Metric, Values]]:
    updates = left.updates.values()
    answers = Counter((update.study, update.answer.partition(" ")[0] or "none") for update in updates)
    sizes: Counter[str] = Counter()
    for update in updates:
        sizes[update.study] += update.bytes
    yield UPDATES, {(study,): count for study, count in Counter(update.study for update in updates).items()}
    yield BYTES, {(study,): size for study, size in sizes.items()}
    yield ANSWERS, {(study, answer): count for (study, answer), count in answers.items()}
    yield AGAIN, {(): sum(update.tries > 1 for update in updates)}
    yield NEWEST, {(update.study,): _seconds(update.at) for update in updates}
    yield DECISIONS, {(study, what): count for (study, what), count in left.decided.items()}
    yield SUMMARIES, {(): len(left.summaries)}
    yield CONTROL, {(): left.control_bytes}
    yield LINES, {(): left.lines}


def _seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()
