"""The page of a study's report: the answer first, and participation as it was."""

import html
from typing import Any

import pytest

from coordinator.studies.page import StudyFacts, page
from coordinator.study_answers import StudyReport

EVIL = '<script>alert(1)</script>"\u202e\x1b]0;x\x07{{ 7777 * 7 }}'
DIGEST = "ab" * 32


def attempt(number: int, answers: dict[str, str], **changes: Any) -> dict[str, Any]:
    """One attempt: ``answers`` says what each site that answered did, and its code."""
    given = {}
    for site, text in answers.items():
        kind, _, code = text.partition(" ")
        given[site] = {"answer": kind, "code": code, "tensor": ""}
    return {
        "round": number, "attempt": 1, "closing": False, "outcome": "closed", "asked": ["alpha", "bravo", "charlie"],
        "opened": "2026-01-01T00:00:00Z", "closed": "2026-01-01T00:00:01Z", "unanswered": [], "base_digest": DIGEST,
        "norms": {}, "limits": {},
        "contributors": [site for site, text in answers.items() if text == "accepted"], "answers": given,
        "seconds": 1.5, "val_loss": 1 / number, "model_digest": DIGEST, "shares": {"alpha": 0.5, "bravo": 0.5},
        "capped": [], "left_out": {}, **changes,
    }  # fmt: skip


def site(contributed: list[int], **changes: Any) -> dict[str, Any]:
    return {
        "state": "accepted", "code": "", "ready": True, "rounds_contributed": contributed, "rounds_left_out": [],
        "rounds_capped": [], "bytes_received": 64, "refused": [], **changes,
    }  # fmt: skip


def report(**changes: Any) -> StudyReport:
    """Two rounds of three sites: all sites in both, and finished."""
    everyone = dict.fromkeys(("alpha", "bravo", "charlie"), "accepted")
    document = {
        "id": "trial", "title": "A trial", "state": "finished", "why": "", "round": 2, "rounds": 2, "revision": 1,
        "federation": "north", "told_at": "2026-01-02T03:04:05Z", "created": "2026-01-01T00:00:00Z",
        "best": {"round": 1, "val_loss": 0.5, "digest": DIGEST}, "limits": ["a limit"], "algorithm": "fedavg",
        "model": "mlp", "quorum": 2, "tensors": [{"name": "w", "dtype": "F32", "shape": [4]}] * 2,
        "bytes_per_update": 64, "study_digest": DIGEST,
        "initial_digest": DIGEST, "model_digest": DIGEST, "attempt": 1, "closing": True, "incomplete": [],
        "best_rule": "the smallest mean loss", "rounds_closed": [], "study": {},
        "sites": {name: site([1, 2]) for name in everyone},
        "attempts": [attempt(1, everyone), attempt(2, everyone), attempt(3, everyone, closing=True)],
        **changes,
    }  # fmt: skip
    return StudyReport.from_document(document)


def text_of(made: StudyReport) -> str:
    return html.unescape(page(made))


def marks(text: str, name: str) -> str:
    """A site's row of marks."""
    start = f"<tr><td>{name}</td><td>"
    row = text.partition("Who took part")[2].partition(start)[2].partition("</td></tr>")[0]
    return row.replace("</td><td>", "|")


def test_a_whole_study_says_so_first() -> None:
    text = text_of(report())
    assert '<section class="answer good"' in text
    assert '<p class="said">Finished: 2 of 2 rounds, 3 of 3 sites in every one.</p>' in text
    assert "As of 2026-01-02T03:04:05Z." in text
    assert "3 of 3 sites in every model" in text
    assert "the smallest mean loss" in text
    assert "Not in every round" not in text
    assert text.index('class="said"') < text.index("<dl") < text.index("<table")
    assert marks(text, "alpha") == "●|●|✓"


def test_a_site_that_was_accepted_and_left_out_is_not_in_that_model() -> None:
    sites = {"alpha": site([1, 2]), "bravo": site([1, 2], rounds_left_out=[2]), "charlie": site([1, 2])}
    answers = dict.fromkeys(sites, "accepted")
    rounds = [attempt(1, answers), attempt(2, answers, left_out={"bravo": "its norm is 9, the limit 3"})]
    text = text_of(report(sites=sites, attempts=rounds))
    assert "Finished: 2 of 2 rounds, 2 of 3 sites in every one." in text
    assert "Not in every round: bravo." in text
    assert '<section class="answer open"' in text
    assert "2 of 3 sites in every model; bravo in 1 of 2" in text
    assert "bravo: accepted and left out, its norm is 9, the limit 3" in text
    assert "0 refused, 1 accepted and left out" in text
    assert (marks(text, "alpha"), marks(text, "bravo")) == ("●|●", "●|○")


def test_refusals_caps_declines_and_silence_are_told_apart() -> None:
    sites = {
        "alpha": site([1], rounds_capped=[1]),
        "bravo": site([], refused=[{"round": 1, "attempt": 1, "code": "TENSOR_NOT_FINITE", "tensor": "w"}]),
        "charlie": site([]),
    }
    rounds = [
        attempt(1, {"alpha": "accepted", "bravo": "refused TENSOR_NOT_FINITE"}, capped=["alpha"]),
        attempt(2, {"alpha": "accepted", "bravo": "declined DECLINED_DATA_CHANGED"}, outcome="failed"),
    ]
    text = text_of(report(sites=sites, attempts=rounds, state="paused", why="the quorum was missed"))
    assert '<section class="answer bad"' in text
    assert "Paused in round 2 of 2." in text
    assert "the quorum was missed. " in text
    assert "alpha in round 1" in text
    assert "1 refused, 0 accepted and left out" in text
    assert "alpha (counts for 0.5, less than its rows)" in text
    assert "bravo: refused TENSOR_NOT_FINITE; charlie: no answer" in text
    running = text_of(
        report(sites=sites, attempts=[attempt(1, {"alpha": "accepted"}, outcome="open")], state="running")
    )
    assert "bravo: no answer yet; charlie: no answer yet" in running
    assert [marks(text, name) for name in sites] == ["◐|○", "✕|–", "?|?"]  # an attempt that failed made no model


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("created", "Created; it has not been started."),
        ("waiting", "Waiting for its sites to be ready."),
        ("running", "Running: round 2 of 2."),
        ("stopped", "Stopped after 0 of 2 rounds."),
    ],
)
def test_a_study_without_a_model_claims_no_participation(state: str, said: str) -> None:
    sites = {name: site([]) for name in ("alpha", "bravo", "charlie")}
    text = text_of(report(state=state, sites=sites, attempts=[], best=None))
    assert f'<p class="said">{said}</p>' in text
    assert "no round has a model yet" in text
    assert "Too few rounds have reported a loss that can be drawn." in text
    assert "<svg" not in text


def test_a_round_that_was_tried_again_has_one_point_and_the_best_model_a_ring() -> None:
    rounds = [
        attempt(1, {}, val_loss=0.9, outcome="failed"), attempt(1, {}, attempt=2, val_loss=0.8),
        attempt(2, {}, val_loss=0.5), attempt(3, {}, val_loss=0.6, closing=True),
    ]  # fmt: skip
    facts = page(report(attempts=rounds))
    assert facts.count("<circle") == 3
    assert '<circle class="series marked"' in facts
    assert "The ring is the best global model, round 1." in facts
    assert '<th scope="col">1.2</th>' in facts


def test_many_rounds_have_no_table_of_marks() -> None:
    rounds = [attempt(number, {"alpha": "accepted"}) for number in range(1, 60)]
    assert "Who took part in which round" not in page(report(attempts=rounds))


def test_names_of_strangers_are_text_on_the_page() -> None:
    answers = {EVIL: "accepted", "bravo": f"declined {EVIL}"}
    rows = [attempt(1, answers, asked=[EVIL, "bravo"], capped=[EVIL], shares={EVIL: 0.5}, left_out={"bravo": EVIL})]
    refused = [{"round": 1, "attempt": 1, "code": EVIL, "tensor": EVIL}]
    made = report(
        id=EVIL, title=EVIL, why=EVIL, federation=EVIL, limits=[EVIL], model=EVIL, attempts=rows,
        sites={EVIL: site([1], code=EVIL, refused=refused), "bravo": site([])},
    )  # fmt: skip
    shown = page(made)
    assert shown.count("&lt;script&gt;") > 10
    assert not any(never in shown for never in ("<script", "\u202e", "\x1b", "\x07", "54439"))


def test_the_facts_are_those_of_the_report() -> None:
    facts = StudyFacts.from_report(report(title=""))
    assert (facts.title, facts.closed, facts.absent, facts.best) == ("trial", [1, 2], [], (1, 0.5))
