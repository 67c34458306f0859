"""The hospital's pages as blocks: what waits and what left, and the whole account of a study beside its button.

Judges only. What a form sends names what was shown: the account's digest, or the update's.
"""

from collections.abc import Iterator, Sequence
from urllib.parse import quote

from site_agent.audit.left import Decision, Left, Update
from site_agent.gateway.consent.account import SHORT, Line
from site_agent.gateway.consent.facts import size
from site_agent.gateway.consent.preview import Preview
from site_agent.gateway.consent.rows import StudyRow
from site_agent.gateway.policy_requests import Proposed
from site_agent.gateway.requests import Waiting
from site_agent.page.source import Here
from wardround.pages.blocks import Answer, Block, Claim, Facts, Field, Form, Grid, Heading, Links, Page, Paragraph, Tone
from wardround.terminal import many

ABOUT = "On this machine only"
ENDED = ("finished", "stopped", "failed")
NEW = ("offered", "changed")
MOST_DAYS = 60
MOST_DECISIONS = 50


def home_page(here: Here, today: str) -> Page:
    """What waits for a person, what left today, and every study.

    Args:
        today: the day by UTC, as the ledger counts, such as "2026-01-31".
    """
    return Page(f"Site {here.site.site}", ABOUT, tuple(_home(here, today)))


def _home(here: Here, today: str) -> Iterator[Block]:
    held = [row for row in here.studies if row.state == "held"]
    new = [row for row in here.studies if row.state in NEW]
    updates = here.left.of_day(today)
    summaries = sum(at.startswith(today) for at, _ in here.left.summaries)
    waits = [many(len(held), "update waits", "updates wait") + " to be released"] if held else []
    waits += ["a change of the policy waits for a further person"] if here.proposed.sha256 else []
    waits += [many(len(new), "study waits", "studies wait") + " to be looked at"] if new else []
    left = f"{many(len(updates), 'update')}, {size(sum(update.bytes for update in updates))}" if updates else "nothing"
    if summaries:
        left += f"; {many(summaries, 'summary', 'summaries')} of columns"
    yield Answer(
        "open" if waits else "good", f"{'; '.join(waits) or 'Nothing waits for a person'}.", "",
        (Claim("Left today", "plain", f"{left} (by UTC, {today})"), *_claims(here)),
    )  # fmt: skip
    if held:
        yield Heading("What waits to be released")
        so_far = {row.id: here.left.endorsed.get((row.id, row.round), ("", ()))[1] for row in held}
        columns = ("study", "round", "of", *(("released so far by",) if any(so_far.values()) else ()))
        waiting = ((row.id, str(row.round), str(row.rounds), _and(so_far[row.id])) for row in held)
        yield Grid(
            columns, tuple(row[: len(columns)] for row in waiting), numbers=(1, 2),
            links=tuple(f"/studies/{quote(row.id)}/rounds/{row.round}" for row in held),
        )  # fmt: skip
    if here.proposed.sha256:
        yield Heading("What waits to be agreed to")
        yield Links((("The change of the policy", "/policy"),))
    yield Heading("What left today")
    yield from _updates(updates, "Nothing left today.")
    yield Heading("Studies")
    if not here.studies:
        yield Paragraph("The coordinator offers no study to this site yet.")
        return
    rows = tuple(
        (
            row.id, row.state, f"{min(row.round, row.rounds)} of {row.rounds}", row.data or "", row.approved_by or "",
            "; ".join(row.changes),
        )
        for row in here.studies
    )  # fmt: skip
    columns = ("study", "state", "round", "data", "approved by", "changed since")
    yield Grid(columns, rows, numbers=(), links=tuple(f"/studies/{quote(row.id)}" for row in here.studies))


def _claims(here: Here) -> Iterator[Claim]:
    service = here.service
    if service is None:
        yield Claim("Agent", "bad", "does not run: nothing leaves, and nothing can be decided")
        return
    there = f"the coordinator at {here.site.address}"
    yield Claim(
        "Connection", "good" if service.connected else "open",
        f"{there} is connected" if service.connected else f"{there} is not reached; the agent tries again",
    )  # fmt: skip
    problem = service.trainer_problem
    yield Claim("Trainer", "bad" if problem else "good", f"does not answer: {problem}" if problem else "answers")
    if not here.has_policy:
        yield Claim("Policy", "open", "there is none: nothing may leave")
    if service.certificate_fork_since:
        yield Claim(
            "Keys", "bad",
            f"somebody else holds this site's keys, or this machine was copied: since {service.certificate_fork_since}",
        )  # fmt: skip


def left_page(left: Left, day: str, today: str) -> Page:
    """What left on a day, and the days on which something did. ``day``: "" for today."""
    return Page("What left", ABOUT, tuple(_left(left, day or today)))


def _left(left: Left, day: str) -> Iterator[Block]:
    days = sorted({update.at[:10] for update in left.updates.values()}, reverse=True)
    updates = left.of_day(day)
    text = f"{many(len(updates), 'update')} left on {day}" if updates else f"Nothing left on {day}"
    yield Answer(
        "plain", f"{text}.", "By UTC, as the ledger counts; `site-agent audit verify` says whether it is whole."
    )
    yield from _updates(updates, "")
    decisions = [decision for decision in reversed(left.decisions) if decision.at.startswith(day)]
    if decisions:
        yield Heading("Held, released, rejected or blocked that day")
        yield Grid(
            ("time", "study", "round", "what", "why, by whom"), tuple(map(_decision, decisions[:MOST_DECISIONS])),
            numbers=(),
        )  # fmt: skip
    if days:
        yield Heading("Other days")
        yield Links(tuple((name, f"/left?day={quote(name)}") for name in days[:MOST_DAYS]))


def _updates(updates: Sequence[Update], none: str) -> Iterator[Block]:
    if not updates:
        if none:
            yield Paragraph(none)
        return
    columns = ("time", "study", "round", "tensors", "payload", "numbers", "tries", "coordinator's answer")
    rows = tuple(
        (
            f"{update.at[11:16]} UTC", update.study, "closing" if update.closing else str(update.round),
            str(update.tensors), size(update.bytes), str(update.numbers), str(update.tries),
            update.answer or "none yet: counts as left",
        )
        for update in updates
    )  # fmt: skip
    yield Grid(columns, rows, numbers=(3, 4, 5, 6))


def _decision(decision: Decision) -> tuple[str, ...]:
    return f"{decision.at[11:16]} UTC", decision.study, decision.round, decision.what, decision.why


def study_page(preview: Preview, row: StudyRow, endorsed: Sequence[str], *, may_decide: bool) -> Page:
    """The whole account of a study as it is offered now, and what can be decided about it.

    Args:
        endorsed: who approved it so far, where the policy wants more people.
    """
    blocks = (*_study(preview, row, endorsed), *_decide(preview, row, endorsed, may_decide=may_decide))
    return Page(f"Study {preview.account.study}", ABOUT, blocks)


def _study(preview: Preview, row: StudyRow, endorsed: Sequence[str]) -> Iterator[Block]:
    account = preview.account
    tones: dict[str, Tone] = {"offered": "open", "changed": "bad", "held": "open", "withdrawn": "plain"}
    yield Answer(
        tones.get(row.state, "good"), f"{_state(row)}.", "; ".join(row.changes),
        (Claim("Study's digest", "plain", f"{account.study_digest[:SHORT]}, revision {account.revision}"),),
    )  # fmt: skip
    if account.title:
        yield Paragraph(f"Its title: {account.title}")
    if endorsed:
        so_far = f"Approved so far by {_and(endorsed)}. The policy wants more people; nothing leaves before."
        yield Paragraph(so_far, warning=True)
    if row.state == "held":
        yield Links(((f"Round {row.round} waits to be released", f"/studies/{quote(row.id)}/rounds/{row.round}"),))
    if account.since:
        yield from _changed(preview)
    for group in account.groups:
        yield Heading(group.heading)
        yield Grid(("what", "value"), tuple(map(_line, group.lines)), 2)


def _state(row: StudyRow) -> str:
    approved = f"Approved by {row.approved_by}" if row.approved_by else "Approved"
    words = {
        "offered": "Offered to this site; nobody approved it", "changed": "Changed since it was approved: it waits",
        "withdrawn": "Withdrawn: nothing of it leaves", "approved": approved,
        "held": f"{approved}; round {row.round} waits to be released",
    }  # fmt: skip
    return words.get(row.state, f"{approved}, and {row.state}")


def _changed(preview: Preview) -> Iterator[Block]:
    account = preview.account
    what, when = account.since.split()
    yield Heading(f"What changed since it was {what}, {when[:16].replace('T', ' ')} UTC")
    lines = [*account.changed, *account.gone]
    if lines:
        rows = tuple((line.name, line.was or "(new)", line.value or "gone") for line in lines)
        yield Grid(("what", "before", "now"), rows, 3)
    else:
        yield Paragraph("Nothing.")


def _line(line: Line) -> tuple[str, str]:
    if line.was is None:
        return line.name, line.value
    return line.name, f"{line.was} -> {line.value}" if line.was else f"(new) {line.value}"


def _decide(preview: Preview, row: StudyRow, endorsed: Sequence[str], *, may_decide: bool) -> Iterator[Block]:
    account, path = preview.account, f"/studies/{quote(row.id)}"
    yield Heading("Decide")
    yield Facts((("Digest of this account", account.digest),), codes=True)
    if row.state in ENDED:
        yield Paragraph(f"This study is {row.state}: there is nothing left to decide.")
        return
    yield Form(path, "Show the account for this data", (Field("data", "The data's name", preview.data),), asks=True)
    if not may_decide:
        yield Paragraph("You may look, and decide nothing.")
        return
    if not preview.has_policy:
        yield Paragraph(f"There is no policy yet: `site-agent policy draft {row.id}`, to say what may leave.")
    elif preview.data:
        yield Form(
            f"{path}/approve", f'Approve exactly this for the data "{preview.data}"',
            (Field("data", value=preview.data, hidden=True), Field("digest", value=account.digest, hidden=True)),
            note="Everything above is what you approve, and nothing else. If anything changes, the agent stops.",
        )  # fmt: skip
    if row.approved_by and row.state != "withdrawn":
        yield Form(
            f"{path}/withdraw", "Withdraw: nothing more of this study leaves",
            note="It takes effect at once, also in the middle of a round.", tone="bad",
        )  # fmt: skip
    elif endorsed:
        yield Form(f"{path}/withdraw", f"Take back what {_and(endorsed)} approved", tone="bad")


def waiting_page(waiting: Waiting, *, may_decide: bool) -> Page:
    """An update that waits for a person: all that would leave."""
    return Page(
        f"Round {waiting.round} of {waiting.study} waits", ABOUT, tuple(_waiting(waiting, may_decide=may_decide))
    )


def _waiting(waiting: Waiting, *, may_decide: bool) -> Iterator[Block]:
    yield Answer("open", f"It would take out {size(waiting.payload_bytes)} in {many(len(waiting.tensors), 'tensor')}.")
    numbers = tuple(sorted(waiting.metrics.items()))
    yield Facts((
        ("Study", f"{waiting.study}, revision {waiting.revision}, round {waiting.round}"),
        *numbers,
        ("Training rows, as reported", str(waiting.num_examples)),
        ("Validation rows, as reported", str(waiting.num_validation)),
    ))  # fmt: skip
    if waiting.tensors:
        columns = ("tensor", "type", "shape", "bytes", "L2 norm", "largest")
        rows = tuple(
            (
                row.name, row.dtype, " × ".join(map(str, row.shape)) or "1", str(row.bytes), _rounded(row.l2),
                _rounded(row.max_abs),
            )
            for row in waiting.tensors
        )  # fmt: skip
        yield Grid(columns, rows, numbers=(3, 4, 5), codes=(0,))
    yield Facts((("Digest of this update", waiting.update),), codes=True)
    if waiting.persons > 1:
        wanted = f"The policy wants {waiting.persons} different people to release it"
        if waiting.endorsed:
            so_far = f"Released so far by {_and(waiting.endorsed)}. {wanted}; nothing leaves before."
            yield Paragraph(so_far, warning=True)
        else:
            yield Paragraph(f"{wanted}.")
    if not may_decide:
        yield Paragraph("You may look, and decide nothing.")
        return
    path = f"/studies/{quote(waiting.study)}/rounds/{waiting.round}"
    shown = (Field("update", value=waiting.update, hidden=True),)
    last = len(waiting.endorsed) + 1 >= waiting.persons
    label = "Release: it leaves" if last else "Release: it waits for another person"
    yield Form(f"{path}/release", label, shown, note="Exactly this update leaves, once.")
    yield Form(
        f"{path}/reject", "Reject: it stays here", shown, note="The round goes on without this site.", tone="bad"
    )


def policy_page(proposed: Proposed, *, may_decide: bool) -> Page:
    """The change of the policy that waits for further people."""
    return Page("The policy", ABOUT, tuple(_policy(proposed, may_decide=may_decide)))


def _policy(proposed: Proposed, *, may_decide: bool) -> Iterator[Block]:
    if not proposed.sha256:
        yield Answer("good", "No change of the policy waits for a person.")
        return
    yield Answer(
        "open", f"A change waits for another person: agreed to by {_and(proposed.by)}; {proposed.persons} must.",
        "What is in force stays until all have agreed.",
    )  # fmt: skip
    yield Heading("What it says otherwise")
    yield Grid(("change",), tuple((change,) for change in proposed.changes), numbers=())
    yield Facts((("Digest of the proposed policy", proposed.sha256), ("In force now", proposed.before)), codes=True)
    if not may_decide:
        yield Paragraph("You may look, and decide nothing.")
        return
    shown = (Field("sha256", value=proposed.sha256, hidden=True),)
    yield Form("/policy/agree", "Agree to this change", shown, note="Exactly this policy, and nothing else.")
    yield Form("/policy/take-back", "Take it back: what is in force stays", shown, tone="bad")


def _and(names: Sequence[str]) -> str:
    return " and ".join(names)


def _rounded(decimal: str | None) -> str:
    return f"{float(decimal):.6g}" if decimal is not None else ""
