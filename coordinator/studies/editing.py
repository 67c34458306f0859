"""What an edited study says otherwise, and who must approve it again. Judges only."""

from collections.abc import Iterator, Sequence

from pydantic import JsonValue

from coordinator.studies.study import Study
from fl_algorithms.resolving import resolve
from fl_algorithms.study import ResolvedStudy
from wardround.errors import BadData, UsageProblem
from wardround.records.schema import check
from wardround.records.settings import CHOSEN_FIRST, apply, read_settings
from wardround.records.study import StudyFile

SHARED_BY = ("task", "model", "networks", "assigned", "algorithm")  # tables that decide which tensors are shared
MOST_TEXT = 80  # characters of a value
ABSENT = "nothing"


def with_settings(document: object, settings: Sequence[str]) -> ResolvedStudy:
    """The study of a document with ``TABLE.KEY=VALUE`` settings, resolved again.

    Raises:
        BadData: it is no study any more.
        UsageProblem: a setting is not of that form, or names another algorithm.
    """
    study = StudyFile.from_document(document)
    pairs = read_settings(settings)
    if any((table, key) == CHOSEN_FIRST for table, key, _ in pairs):
        raise UsageProblem(
            "another algorithm has other settings: write them into a study file",
            hint=f"`coordinator study edit {study.study.name} FILE`",
        )
    tables = study.document()
    apply(pairs, tables, study.study.name)
    return resolve(check(StudyFile, tables, study.study.name), source=study.study.name)


def shares_otherwise(before: ResolvedStudy, after: ResolvedStudy) -> bool:
    """Whether the two may share different tensors, so that the present model is no beginning for the other."""
    old, new = before.document(), after.document()
    return any(old.get(table) != new.get(table) for table in SHARED_BY)


def changes(before: ResolvedStudy, after: ResolvedStudy) -> tuple[str, ...]:
    """Each setting that is another in ``after``, as ``study.rounds: 20 -> 30``."""
    old, new = dict(_leaves(before.document(), "")), dict(_leaves(after.document(), ""))
    names = [*new, *(name for name in old if name not in new)]
    return tuple(
        f"{name}: {old.get(name, ABSENT)} -> {new.get(name, ABSENT)}"
        for name in names
        if old.get(name) != new.get(name)
    )


def refuse_unfit(present: Study, after: ResolvedStudy) -> None:
    """Raises BadData: it is a study of another name, or the same as the present one."""
    if after.study.name != present.name:
        raise BadData(
            f"the file is of study `{after.study.name}`, not `{present.name}`",
            hint="`coordinator study create FILE` offers it",
        )
    if not changes(present.resolved, after):
        raise BadData(
            f"study `{present.name}` says exactly this at revision {present.revision}: there is nothing to change",
            hint=f"`coordinator study renew {present.name}` begins it anew from its newest model",
        )


def _leaves(value: JsonValue, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value, 1):
            yield from _leaves(item, f"{name}[{number}]")
    else:
        yield name, _text(value)


def _text(value: JsonValue) -> str:
    if isinstance(value, list):
        text = ", ".join(_text(item) for item in value) or "none"
    elif isinstance(value, bool):
        text = str(value).lower()
    else:
        text = "none" if value is None or value == {} else str(value)
    return text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 1] + "…"
