"""A line of a ledger: its place in the chain, the entry that stands there, and its form on disk.

On disk a line is the canonical JSON of one object, which holds ``v``, ``seq``, ``ts``, ``type`` and ``prev`` beside the
entry's own fields. docs/auditors.md says the same in words; the second verifier was written by that page.
"""

import re
from dataclasses import dataclass
from typing import Any, get_args

from wardround.errors import BadData
from wardround.records.ledger import form
from wardround.records.ledger.entries import Entry, UnknownEntry
from wardround.records.ledger.form import WRONG
from wardround.signing import canonical

COMMON = ("v", "seq", "ts", "type", "prev")
_COMMON = frozenset(COMMON)
TYPES: dict[str, Any] = {kind.type: kind for kind in get_args(Entry) if kind is not UnknownEntry}
FORMS = {name: form.form_of(kind) for name, kind in TYPES.items()}
JUDGED: dict[str, form.Converter] = {"seq": form.count, "ts": form.text, "prev": form.digest}  # in any line
for _form in FORMS.values():
    JUDGED |= {name: _form.converters[name] for name in _form.judged}
_CONVERTERS = {name: {**known.converters, **JUDGED} for name, known in FORMS.items()}
_TYPE = re.compile("[a-z][a-z_]{0,31}")


@dataclass(frozen=True)
class Line:
    """``seq`` counts from 0; ``ts`` is the time by this site's clock; ``prev`` is the head before this line (hex)."""

    seq: int
    ts: str
    prev: str
    entry: Entry

    @property
    def type(self) -> str:
        """The type as it stands on disk, also one of a later version."""
        return self.entry.unknown_type if isinstance(self.entry, UnknownEntry) else self.entry.type

    def document(self) -> dict[str, Any]:
        """The object whose canonical JSON is the line on disk."""
        own = {"v": 1, "seq": self.seq, "ts": self.ts, "type": self.type, "prev": self.prev}
        fields = dict(self.entry.more) if isinstance(self.entry, UnknownEntry) else self.entry.document()
        return {**fields, **own}

    def encoded(self) -> bytes:
        """The line on disk, without its newline.

        Raises:
            BadData: no verifier would take it: a value has no canonical form, or a field has not its form.
        """
        data = canonical.dumps(self.document())
        if Line.from_document(canonical.loads(data)) != self:
            raise BadData(f"a `{self.type}` entry that is read back as another one")
        return data

    @classmethod
    def from_document(cls, document: Any) -> "Line":
        """The line in an object that was read from canonical JSON.

        Raises:
            BadData: it is no line of a ledger, or one of its fields has not its form.
        """
        kind = document.get("type") if isinstance(document, dict) and document.get("v") == 1 else None
        if not isinstance(kind, str) or not _TYPE.fullmatch(kind):
            raise BadData("it is no record")
        known = FORMS.get(kind, form.NOTHING)
        for name in (*COMMON, *known.needed):
            if name not in document:
                raise BadData(f"it does not have the form of a `{kind}` record: no {name}")
        attributes, converters = known.attributes, _CONVERTERS.get(kind, JUDGED)
        values: dict[str, Any] = {}
        more: dict[str, object] = {}
        for name, value in document.items():
            made = converters[name](value) if name in converters else WRONG
            if made is WRONG and name in JUDGED:
                raise BadData(f"it does not have the form of a `{kind}` record: {name}")
            if name in attributes and made is not WRONG:
                values[attributes[name]] = made
            elif name not in _COMMON:
                more[name] = value
        entry = TYPES[kind](more=more, **values) if kind in TYPES else UnknownEntry(unknown_type=kind, more=more)
        return cls(document["seq"], document["ts"], document["prev"], entry)
