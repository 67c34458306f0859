"""``coordinator doctor``: what keeps the federation from being served, each with its fix."""

import typer

from coordinator.cli.asking import ask, refuse_no_coordinator
from coordinator.cli.options import State
from wardround.cli import Json
from wardround.errors import NeedsPerson


def doctor(state: State, json: Json = False) -> None:
    """Look for what keeps the federation from being served: cause and fix, a line each. Changes nothing. Exits 78 if
    there is a problem.
    """
    from coordinator.answers import SiteList, StudyList
    from coordinator.member_answers import AuthorityStatus
    from coordinator.requests import ListSites, ListStudies, ShowAuthority

    refuse_no_coordinator(state)
    from coordinator.doctor import Answers, examine
    from coordinator.state_directory import State as Place
    from wardround.checkup import has_problem, shown

    answers = Answers(
        lambda: ask(state, ListSites(), SiteList),
        lambda: ask(state, ListStudies(archived=False), StudyList),
        lambda: ask(state, ShowAuthority(), AuthorityStatus),
    )
    if has_problem(list(shown(examine(Place(state), answers), json=json))):
        raise typer.Exit(NeedsPerson.exit_code)
