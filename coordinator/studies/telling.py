"""What a study's next step means for those outside: the sites that are connected, and the worker that aggregates."""

import logging
from collections.abc import Collection

from coordinator.studies import events, secure_rounds
from coordinator.studies.aggregations import Aggregations
from coordinator.studies.assignments import Assignments
from coordinator.studies.state import ENDED, Round
from coordinator.studies.streams import Stream, Streams
from coordinator.studies.study import Study
from wardround.local import traces

log = logging.getLogger("coordinator.studies.engine")


def greet(stream: Stream, site: str, studies: Collection[Study], assignments: Assignments) -> None:
    """What a site that has connected is sent: its studies, what each asks of it, and what it was shown of a sum."""
    own = [study for study in studies if site in study.rules.sites]
    for study in own:
        if study.state.phase not in ENDED:
            stream.put(study)
    for study in own:
        if assignment := assignments.of(study, site):
            stream.put(assignment)
        for item in secure_rounds.shown(study, site):
            stream.put(item)


def heard(before: Study, event: events.Event) -> None:
    """What an answer ends: the time in which its site was asked."""
    if isinstance(event, events.Answered) and before.state.round is not None:
        traces.end(before.name, before.state.round.number, event.site, event.answer.kind)


def act(
    study: Study, action: events.Action, streams: Streams, assignments: Assignments, aggregations: Aggregations
) -> None:
    """Do what an action says, after it is durable."""
    match action:
        case events.Opened(one):
            log.info("%s: %s, attempt %d: %s", study.name, _which(one), one.attempt, ", ".join(one.asked))
            traces.begin(traces.ROUND, study.name, one.number)
            for site in one.unanswered:
                traces.begin("offered", study.name, one.number, site)
                streams.push(site, assignments.of(study, site))
        case events.Entered(one):
            log.info("%s: round %d, attempt %d: %s", study.name, one.number, one.attempt, one.step)
            for site in one.group:
                for item in secure_rounds.shown(study, site)[-1:]:
                    streams.push(site, item)
        case events.Resumed(one):
            log.info("%s: round %d, attempt %d goes on: %s", study.name, one.number, one.attempt, one.step)
            for site in one.group:
                for item in secure_rounds.shown(study, site):
                    streams.push(site, item)
        case events.Aggregate(one):
            aggregations.submit(study, one)
        case events.Closed(one, outcome):
            log.info("%s: %s, attempt %d: %s", study.name, _which(one), one.attempt, outcome)
            traces.end(study.name, one.number, outcome=outcome)
        case events.Tell(phase):
            log.info("%s: %s", study.name, f"{phase}: {study.state.why}" if study.state.why else phase)
            for site in study.state.ready:
                streams.push(site, assignments.of(study, site))


def _which(attempt: Round) -> str:
    """A round as people count: the one after the last is the closing one."""
    return "closing round" if attempt.closing else f"round {attempt.number}"
