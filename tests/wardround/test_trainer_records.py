"""What gateway and trainer send each other: each request and answer survives it, anything else is refused.

Examples are drawn from each class's own fields and bounds, so that a new request or answer is drawn too.
"""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from tests.drawn_records import JSON, of
from wardround.errors import BadData, CannotWrite, NeedsPerson, TryAgain, UsageProblem, WardroundError
from wardround.local import frames
from wardround.records import trainer
from wardround.records.trainer.failures import own_code

ANSWERS = sorted({form.answer_class() for form in trainer.COMMANDS.values()}, key=lambda form: form.__name__)
OTHERS = (trainer.Progress, trainer.Hello, trainer.Failure)


def sent(document: Any) -> Any:
    """The same after it was a line on a socket."""
    return frames.parsed(json.dumps(document, separators=(",", ":")).encode() + b"\n")


@pytest.mark.parametrize("form", trainer.COMMANDS.values(), ids=trainer.COMMANDS)
@settings(max_examples=25)
@given(st.data())
def test_a_request_survives_being_sent(form: type[trainer.AnyRequest], data: st.DataObject) -> None:
    request = form.model_validate(data.draw(of(form)))
    again = trainer.request_from(sent(request.to_document()))
    assert again == request
    assert type(again) is form


@pytest.mark.parametrize("form", [*ANSWERS, *OTHERS], ids=lambda form: form.__name__)
@settings(max_examples=25)
@given(st.data())
def test_an_answer_survives_being_sent(form: type[BaseModel], data: st.DataObject) -> None:
    answer = form.model_validate(data.draw(of(form)))
    assert form.model_validate(sent(answer.model_dump())) == answer


@pytest.mark.parametrize("form", [trainer.Train, trainer.Describe, trainer.Abort])
@settings(max_examples=25)
@given(JSON)
def test_any_json_is_an_answer_or_breaks_the_protocol(form: type[trainer.AnyRequest], document: object) -> None:
    request = form.model_construct()
    with contextlib.suppress(trainer.BrokenProtocol):
        assert request.answer_from(document).to_document() == document


@given(JSON | st.dictionaries(st.just("command"), st.sampled_from([*trainer.COMMANDS, "fly"]), min_size=1))
def test_any_json_is_a_request_or_of_another_release(document: object) -> None:
    with contextlib.suppress(TryAgain):
        assert trainer.request_from(document).to_document() == document


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"command": "fly"}, 'the trainer knows no request "fly"'),
        ([], 'the trainer knows no request ""'),
        ({"command": "commit", "study": "s", "revision": 1}, 'not a request `commit` to the trainer: "round": missing'),
        (
            {"command": "commit", "study": "s", "revision": 1, "round": "1"},
            'not a request `commit` to the trainer: "round": int_type',
        ),
        ({"command": "status", "now": True}, 'not a request `status` to the trainer: "now": extra_forbidden'),
        ({"command": "abort"}, 'not a request `abort` to the trainer: "study_digest": missing'),
    ],
    ids=lambda value: None if isinstance(value, str) else json.dumps(value),
)
def test_a_request_of_another_form_is_refused_by_its_field(document: object, message: str) -> None:
    with pytest.raises(TryAgain) as refused:
        trainer.request_from(document)
    assert refused.value.message == message
    assert refused.value.hint == "gateway and trainer must be of the same release; start both again"


def test_a_request_that_cannot_be_made_is_an_error_of_ours() -> None:
    with pytest.raises(BadData, match='not a request `export` to the trainer: "out": string_unicode'):
        trainer.Export(study="heart", checkpoint="latest", out="/srv/\udcff")


@settings(max_examples=25)
@given(of(trainer.Hello), of(trainer.Progress), of(trainer.Failure))
def test_a_reply_of_a_worker_survives_being_sent(hello: object, progress: object, failure: object) -> None:
    for form, document in ((trainer.Hello, hello), (trainer.Progress, progress), (trainer.Failure, failure)):
        reply = form.model_validate(document)
        assert trainer.reply_from(sent(trainer.reply_document(reply))) == reply
    assert trainer.reply_from(sent(trainer.reply_document(trainer.Alive()))) == trainer.Alive()
    answer = trainer.Device(device="cpu")
    assert trainer.reply_from(sent(trainer.reply_document(answer))) == trainer.Result(answer.to_document())


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "a reply of 0 kinds"),
        ({"result": {}, "progress": {}}, "a reply of 2 kinds"),
        ({"fly": {}}, 'a reply of kind "fly"'),
        ({"hello": {"isolation": "strong", "missing": []}}, 'its first words: "isolation": literal_error'),
        ({"progress": {"step": -1, "steps": 1}}, 'its progress: "step": greater_than_equal'),
        ({"error": {}}, 'its failure: "message": missing'),
        ({"alive": {"well": True}}, 'its beat: "well": extra_forbidden'),
    ],
    ids=json.dumps,
)
def test_a_reply_of_another_form_breaks_the_protocol(document: dict[str, Any], message: str) -> None:
    with pytest.raises(trainer.BrokenProtocol) as refused:
        trainer.reply_from(document)
    assert refused.value.message == f"the trainer broke its protocol: {message}"


def test_a_request_knows_the_class_of_its_answer() -> None:
    assert trainer.Train.answer_class() is trainer.Trained
    assert trainer.Validate.answer_class() is trainer.Validated
    assert trainer.GetStatus.answer_class() is trainer.Status
    described = trainer.Describe(study={}, site="north").answer_class()
    assert (described, described.max_parts, trainer.Done.max_parts) == (trainer.Described, 600_000, 20_000)


@pytest.mark.parametrize("kind", [WardroundError, UsageProblem, BadData, CannotWrite, TryAgain, NeedsPerson])
@pytest.mark.parametrize("code", ["", "DECLINED_DATA_CHANGED", "DECLINED_RESOURCES", "SITE_REVOKED"])
def test_a_failure_keeps_its_kind_and_only_codes_of_a_trainer(kind: type[WardroundError], code: str) -> None:
    error = kind("no room", hint="make some", code=code)
    back = trainer.error_from(sent(trainer.Failure.of(error).model_dump()))
    assert (type(back), back.message, back.hint) == (kind, "no room", "make some")
    assert back.code == (code if code in trainer.CODES.values() else trainer.TRAINING_FAILED)
    assert own_code(error) in trainer.CODES


def test_a_failures_words_are_shown_as_the_trainers() -> None:
    shown = trainer.marked(BadData("no column `x`\x1b[2J", hint="look"))
    assert shown.message == 'the trainer says: "no column `x`\\x1b[2J"'
    assert shown.hint == 'the trainer adds: "look"'


def test_a_failure_always_says_something() -> None:
    """A trainer that gives no reason would leave an empty line in the log, and nothing for a person to look for."""
    empty = {"message": "", "hint": "", "exit_code": 65, "code": "data_changed"}
    assert isinstance(trainer.error_from(empty), trainer.BrokenProtocol)
    assert trainer.Failure.of(BadData("")).message == "it failed without saying why"
