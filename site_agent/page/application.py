"""The page's addresses: what is shown, and what a form asks of the running agent, in the name of who logged in."""

import datetime
import logging
from pathlib import Path

from site_agent.gateway import requests
from site_agent.gateway.consent.facts import exposed
from site_agent.gateway.policy_requests import GetProposed, TakeBackPolicy
from site_agent.page import pages
from site_agent.page.source import Source
from site_agent.state.directory import SiteState
from site_agent.state.person import at_page
from wardround.errors import NeedsPerson, UsageProblem
from wardround.pages.blocks import Page
from wardround.web.application import Application, Moved, View, Visit
from wardround.web.live import Live
from wardround.web.passwords import Users
from wardround.web.serving import Place, serve

SECTIONS = (("Site", "/"), ("What left", "/left"))
log = logging.getLogger(__name__)


def users_file(state: Path) -> Path:
    """Who may log in."""
    return state / "page" / "users.json"


class Actions:
    """What the addresses do."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def home(self, visit: Visit) -> Page:
        return pages.home_page(self._source.here(), _today())

    def left(self, visit: Visit) -> Page:
        return pages.left_page(self._source.left(), visit.query.get("day", "")[:10], _today())

    def study(self, visit: Visit) -> Page:
        """The account, as `site-agent preview` makes it; from now on it counts as shown."""
        name = visit.path["study"]
        row = self._source.row(name)
        if row is None:
            raise UsageProblem(f"no study `{name[:64]}` has been offered to this site")
        preview = self._source.ask(requests.GetPreview(name, visit.query.get("data", "")))
        endorsed = self._source.endorsed(name)
        return pages.study_page(preview, row, endorsed, may_decide=visit.user.may == "decide")

    def approve(self, visit: Visit) -> Moved:
        """Exactly what was shown: the agent refuses another digest."""
        study, data = visit.path["study"], visit.form.get("data", "")
        warnings: list[str] = []
        before = self._source.endorsed(study)
        try:
            approved = self._source.ask(
                requests.Approve(study, data, visit.form.get("digest", ""), at_page(visit.user.name)), warnings.append
            )
        except NeedsPerson as error:
            if self._source.endorsed(study) == before:
                raise
            return Moved("/", _sentence(error))  # kept; others must approve too
        log.info("`%s` approved study `%s`", visit.user.name, study)
        said = [f"Study {study} approved by {visit.user.name} for `{data}`, {approved.rows} rows"]
        said += [exposed(approved.exposure, approved.personalized)] if approved.exposure else []
        said += [] if approved.reported else ["the coordinator is told at the next connection"]
        said += [line for line in warnings if line.startswith(("warning", "changed"))]
        return Moved("/", "; ".join(said) + ".")

    def withdraw(self, visit: Visit) -> Moved:
        study = visit.path["study"]
        withdrawn = self._source.ask(requests.Withdraw(study, at_page(visit.user.name)))
        log.info("`%s` withdrew study `%s`", visit.user.name, study)
        later = "" if withdrawn.reported else " The coordinator is told at the next connection."
        return Moved("/", f"Study {study} withdrawn by {visit.user.name}: nothing more of it leaves.{later}")

    def waiting(self, visit: Visit) -> Page:
        answer = self._source.ask(requests.GetWaiting(visit.path["study"], int(visit.path["round"])))
        return pages.waiting_page(answer, may_decide=visit.user.may == "decide")

    def policy(self, visit: Visit) -> Page:
        return pages.policy_page(self._source.ask(GetProposed()), may_decide=visit.user.may == "decide")

    def agree(self, visit: Visit) -> Moved:
        """To exactly the policy that was shown."""
        proposed, person = self._source.ask(GetProposed()), at_page(visit.user.name)
        if not proposed.sha256 or proposed.sha256 != visit.form.get("sha256", ""):
            raise NeedsPerson("another change of the policy waits than the one that was shown", hint="look again")
        try:
            put = self._source.ask(requests.PutPolicy(proposed.text, proposed.before, person))
        except NeedsPerson as error:
            if self._source.ask(GetProposed()) == proposed:
                raise
            return Moved("/policy", _sentence(error))  # kept; others must agree too
        log.info("`%s` agreed to policy %s", person.name, put.sha256[:12])
        return Moved("/", f"Policy {put.sha256[:12]}… is in force, agreed to by {person.name} last.")

    def take_back(self, visit: Visit) -> Moved:
        person = at_page(visit.user.name)
        self._source.ask(TakeBackPolicy(visit.form.get("sha256", ""), person))
        log.info("`%s` took back the change of the policy that waited", person.name)
        return Moved("/", f"The change was taken back by {person.name}: the policy in force stays.")

    def release(self, visit: Visit) -> Moved:
        return self._decide(visit, "released", "It leaves now.")

    def reject(self, visit: Visit) -> Moved:
        return self._decide(visit, "rejected", "The coordinator is told.")

    def _decide(self, visit: Visit, decision: requests.ReleaseDecision, then: str) -> Moved:
        study, round_ = visit.path["study"], int(visit.path["round"])
        look = requests.GetWaiting(study, round_)
        before = self._source.ask(look)
        try:
            decided = self._source.ask(
                requests.Decide(study, round_, decision, visit.form.get("update", ""), at_page(visit.user.name))
            )
        except NeedsPerson as error:
            if self._source.ask(look).endorsed == before.endorsed:
                raise
            return Moved("/", _sentence(error))  # kept; others must release it too
        log.info("`%s` %s round %s of study `%s`", visit.user.name, decision, round_, study)
        then = then if decided.goes_on else "The agent does it when the coordinator asks for this round again."
        return Moved("/", f"Round {round_} of {study} {decision} by {visit.user.name}. {then}")


def application(site: str, source: Source, users: Users, live: Live) -> Application:
    """The page of one site."""
    act = Actions(source)
    study, round_ = "/studies/{study}", "/studies/{study}/rounds/{round:int}"
    views = (
        View("/", act.home),
        View("/left", act.left, "/left"),
        View(study, act.study, live=False),
        View(f"{study}/approve", act.approve, method="POST", decides=True),
        View(f"{study}/withdraw", act.withdraw, method="POST", decides=True),
        View(round_, act.waiting, live=False),
        View(f"{round_}/release", act.release, method="POST", decides=True),
        View(f"{round_}/reject", act.reject, method="POST", decides=True),
        View("/policy", act.policy, live=False),
        View("/policy/agree", act.agree, method="POST", decides=True),
        View("/policy/take-back", act.take_back, method="POST", decides=True),
    )
    return Application(
        f"Wardround · {site}", "wardround-site", SECTIONS, views, users, live,
        is_ready=lambda: source.service() is not None, add_user="site-agent page user add NAME",
    )  # fmt: skip


def run(state: SiteState, place: Place) -> None:
    """Serve the page until SIGTERM. The agent need not run: the page says that it does not.

    Raises:
        NeedsPerson: no site here, or one that left.
        Unavailable: it cannot listen there.
    """
    live = Live()
    source = Source(state, live)
    source.watch()
    try:
        serve(place, application(state.site().site, source, Users(users_file(state.root)), live), live)
    finally:
        source.end()


def _sentence(error: NeedsPerson) -> str:
    return f"{error.message[:1].upper()}{error.message[1:]}."


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()
