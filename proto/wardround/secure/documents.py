"""The states of an attempt as plain JSON: what a site and the coordinator keep on disk between two messages.

A site's document holds its secrets: it lies where only the gateway's user reads, and in no backup.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from wardround.errors import BadData
from wardround.secure.coordinator import Attempt
from wardround.secure.policy import Pledge, Pledges
from wardround.secure.rules import Rules
from wardround.secure.site import SiteRound
from wardround.secure.statements import Context, Keys, Roster
from wardround.signing.dsse import Envelope

Value = TypeVar("Value")


def site_document(state: SiteRound) -> dict[str, object]:
    return {
        "context": state.context.document(),
        "root": state.root.hex(),
        "peers": [one.document() for one in state.peers],
        "group": list(state.group),
        "received": {site: ciphertext.hex() for site, ciphertext in state.received.items()},
        "submission": state.submission,
        "chosen": list(state.chosen),
        "chosen_digest": state.chosen_digest,
        "opened": state.opened,
    }


def site_from_document(document: Any) -> SiteRound:
    """Raises BadData: not a state that ``site_document`` gave."""

    def state() -> SiteRound:
        fields = dict(document)
        return SiteRound(
            Context.from_document(fields.pop("context")),
            bytes.fromhex(fields.pop("root")),
            tuple(Keys.from_document(one) for one in fields.pop("peers")),
            tuple(fields.pop("group")),
            {site: bytes.fromhex(text) for site, text in fields.pop("received").items()},
            chosen=tuple(fields.pop("chosen")),
            **fields,
        )

    return _read(state, "the state of a round of secure aggregation")


def pledges_document(pledges: Pledges) -> list[dict[str, object]]:
    return [asdict(one) for one in pledges.signed]


def pledges_from_document(document: Any) -> Pledges:
    """Raises BadData: not what ``pledges_document`` gave. Without its pledges a site signs nothing."""
    return _read(
        lambda: Pledges(tuple(Pledge(**{**one, "sites": tuple(one["sites"])}) for one in document)),
        "the list of the sets that were signed",
    )


def attempt_document(state: Attempt) -> dict[str, object]:
    return {
        "context": state.context.document(),
        "roster": {site: key.hex() for site, key in state.roster.members},
        "rules": asdict(state.rules),
        "peers": list(state.peers),
        "dealt": {
            dealer: {site: one.hex() for site, one in ciphertexts.items()}
            for dealer, ciphertexts in state.dealt.items()
        },
        "group": list(state.group),
        "chosen": list(state.chosen),
        **{name: _envelopes_document(getattr(state, name)) for name in ENVELOPES},
    }


def attempt_from_document(document: Any) -> Attempt:
    """Raises BadData: not a state that ``attempt_document`` gave."""

    def state() -> Attempt:
        return Attempt(
            Context.from_document(document["context"]),
            Roster.of({site: bytes.fromhex(key) for site, key in document["roster"].items()}),
            Rules(**document["rules"]),
            peers=tuple(document["peers"]),
            dealt={
                dealer: {site: bytes.fromhex(one) for site, one in ciphertexts.items()}
                for dealer, ciphertexts in document["dealt"].items()
            },
            group=tuple(document["group"]),
            chosen=tuple(document["chosen"]),
            **{name: _envelopes_from(document[name]) for name in ENVELOPES},
        )

    return _read(state, "the state of an attempt of secure aggregation")


ENVELOPES = ("keys", "submissions", "agreements", "openings")


def _envelopes_document(envelopes: Mapping[str, Envelope]) -> dict[str, object]:
    return {site: envelope.document() for site, envelope in envelopes.items()}


def _envelopes_from(document: Any) -> dict[str, Envelope]:
    return {site: Envelope.from_document(one) for site, one in document.items()}


def _read(state: Callable[[], Value], what: str) -> Value:
    try:
        return state()
    except (KeyError, TypeError, ValueError, AttributeError):
        raise BadData(f"{what} is damaged") from None
