"""What the coordinator tells Prometheus: the table of its metrics, and their values when they are asked for.

A label is the name of a study or a site, or a word of a closed list. No number that a site reported is told, no path
and no digest. docs/metrics.md lists them; a test compares.
"""

import datetime
import shutil
from collections import Counter
from collections.abc import Iterator

import sqlalchemy as sa

from coordinator.administration import Administration
from coordinator.answers import SiteList
from coordinator.context import Context
from coordinator.storage import tables
from coordinator.study_answers import StudyStatus
from wardround import __version__
from wardround.signing.certificates import not_after
from wardround.web.monitoring import Metric, Values

INFO = Metric("wardround_coordinator_info", "gauge", "1; the version is a label", ("version",))
STUDIES = Metric("wardround_coordinator_studies", "gauge", "Studies by state", ("state",))
ROUND = Metric("wardround_coordinator_study_round", "gauge", "The round that a study is in", ("study",))
ROUNDS = Metric("wardround_coordinator_study_rounds", "gauge", "How many rounds a study has", ("study",))
ATTEMPT = Metric("wardround_coordinator_study_attempt", "gauge", "The attempt at the round", ("study",))
READY = Metric("wardround_coordinator_study_sites_ready", "gauge", "Sites that approved a study", ("study",))
LATE = Metric(
    "wardround_coordinator_study_sites_late", "gauge", "Sites of a study that are late or expect to be", ("study",)
)
DEADLINE = Metric(
    "wardround_coordinator_round_deadline_timestamp_seconds", "gauge", "When the open round ends at the latest",
    ("study",),
)  # fmt: skip
ROUND_SECONDS = Metric(
    "wardround_coordinator_round_seconds", "gauge", "How long the newest closed round of a study took", ("study",)
)
CLOSED = Metric(
    "wardround_coordinator_rounds_total", "counter", "Attempts at rounds by outcome", ("study", "outcome")
)  # fmt: skip
UPLOADS = Metric(
    "wardround_coordinator_uploads_total", "counter", "Uploads by decision and code", ("study", "decision", "code")
)
BYTES = Metric("wardround_coordinator_upload_bytes_total", "counter", "Payload of accepted uploads", ("study",))
SITES = Metric("wardround_coordinator_sites", "gauge", "Sites by state", ("state",))
CONNECTED = Metric("wardround_coordinator_site_connected", "gauge", "1 while a site is connected", ("site",))
SEEN = Metric(
    "wardround_coordinator_site_last_seen_timestamp_seconds", "gauge", "When a site last connected or disconnected",
    ("site",),
)  # fmt: skip
SITE_EXPIRES = Metric(
    "wardround_coordinator_site_certificate_expiry_timestamp_seconds", "gauge", "When a site's certificate ends",
    ("site",),
)  # fmt: skip
COPIED = Metric("wardround_coordinator_site_key_copied", "gauge", "1 where two machines hold a site's keys", ("site",))
WAITING = Metric("wardround_coordinator_proposals_waiting", "gauge", "Commands that wait for a second person")
EXPIRES = Metric(
    "wardround_coordinator_authority_expiry_timestamp_seconds", "gauge",
    "When the certificate that signs the sites' certificates ends",
)  # fmt: skip
DATABASE = Metric("wardround_coordinator_database_bytes", "gauge", "The size of the database's file")
FREE = Metric("wardround_coordinator_disk_free_bytes", "gauge", "What is free where the state directory lies")
METRICS = (
    INFO, STUDIES, ROUND, ROUNDS, ATTEMPT, READY, LATE, DEADLINE, ROUND_SECONDS, CLOSED, UPLOADS, BYTES, SITES,
    CONNECTED, SEEN, SITE_EXPIRES, COPIED, WAITING, EXPIRES, DATABASE, FREE,
)  # fmt: skip
THERE = ("connected", "ready")


def families(administration: Administration, context: Context) -> Iterator[tuple[Metric, Values]]:
    """Each metric with its values now."""
    rows = administration.studies.listed(archived=False).studies
    yield INFO, {(__version__,): 1}
    yield STUDIES, {(state,): count for state, count in Counter(row.state for row in rows).items()}
    yield from _of_studies([administration.studies.status(row.id) for row in rows])
    yield from _of_uploads(context, {row.id for row in rows})
    yield from _of_sites(administration.sites())
    yield WAITING, {(): len(administration.waiting().waiting)}
    yield EXPIRES, {(): not_after(context.authority.signing.certificate).timestamp()}
    database = context.state.database
    yield DATABASE, ({(): database.stat().st_size} if database.exists() else {})
    yield FREE, {(): shutil.disk_usage(context.state.root).free}


def _of_studies(statuses: list[StudyStatus]) -> Iterator[tuple[Metric, Values]]:
    yield ROUND, {(status.id,): status.round for status in statuses}
    yield ROUNDS, {(status.id,): status.rounds for status in statuses}
    yield ATTEMPT, {(status.id,): status.attempt for status in statuses}
    yield READY, {(status.id,): sum(site.ready for site in status.sites.values()) for status in statuses}
    yield (
        LATE,
        {
            (status.id,): sum(site.always_late or site.expects_to_be_late for site in status.sites.values())
            for status in statuses
        },
    )
    yield DEADLINE, {(status.id,): _seconds(status.deadline) for status in statuses if status.deadline}


def _of_uploads(context: Context, studies: set[str]) -> Iterator[tuple[Metric, Values]]:
    """From the database: rounds and uploads of all revisions, and of archived studies no more."""
    uploads, rounds = tables.Upload, tables.Round
    last = sa.select(rounds.study, sa.func.max(rounds.closed_s).label("closed_s")).group_by(rounds.study).subquery()
    with context.store.read() as session:
        ended = session.execute(
            sa.select(rounds.study, rounds.outcome, sa.func.count()).where(rounds.closed_s.is_not(None))
            .group_by(rounds.study, rounds.outcome)
        ).all()  # fmt: skip
        newest = session.execute(
            sa.select(rounds.study, rounds.closed_s - rounds.opened_s).join(
                last, (last.c.study == rounds.study) & (last.c.closed_s == rounds.closed_s)
            )
        ).all()
        decided = session.execute(
            sa.select(
                uploads.study, uploads.decision, uploads.code, sa.func.count(), sa.func.sum(uploads.payload_bytes)
            ).group_by(uploads.study, uploads.decision, uploads.code)
        ).all()  # fmt: skip
    yield ROUND_SECONDS, {(study,): seconds or 0.0 for study, seconds in newest if study in studies}
    yield CLOSED, {(study, outcome or "open"): count for study, outcome, count in ended if study in studies}
    known = [row for row in decided if row[0] in studies]
    yield UPLOADS, {(study, decision or "open", code or ""): count for study, decision, code, count, _ in known}
    yield BYTES, {(study,): size or 0 for study, decision, _, _, size in known if decision == "accepted"}


def _of_sites(sites: SiteList) -> Iterator[tuple[Metric, Values]]:
    rows = [row for row in sites.sites if row.state not in ("invited", "revoked")]
    yield SITES, {(state,): count for state, count in Counter(row.state for row in sites.sites).items()}
    yield CONNECTED, {(row.site,): row.state in THERE for row in rows}
    yield SEEN, {(row.site,): _seconds(row.last_seen) for row in rows if row.last_seen}
    yield SITE_EXPIRES, {(row.site,): _seconds(row.certificate_expires) for row in rows if row.certificate_expires}
    yield COPIED, {(row.site,): bool(row.certificate_fork_since or row.copied_since) for row in rows}


def _seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()
