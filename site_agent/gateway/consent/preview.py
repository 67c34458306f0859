"""What `site-agent preview` shows: the account of a study, and its facts by name for scripts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from site_agent.gateway.consent.account import Account
from site_agent.gateway.consent.facts import Facts
from site_agent.state import codec

OF_ACCOUNT = ("study", "revision", "study_digest", "title", "groups", "gone", "since", "digest")


@dataclass(frozen=True)
class Preview:
    """A study as it is offered now.

    Attributes:
        data: the name of the data whose network and weights are shown; "" where none was named.
        has_policy: whether this site has a policy.
    """

    account: Account
    facts: Facts
    data: str
    has_policy: bool

    def document(self) -> dict[str, Any]:
        """As one JSON object, without tables for the account and the facts."""
        facts = codec.to_document(self.facts)
        return {**facts, **self.account.document(), "data": self.data, "policy": self.has_policy}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Raises ValueError: it is no preview."""
        others = {key: value for key, value in document.items() if key not in (*OF_ACCOUNT, "data", "policy")}
        account = Account.from_document({key: document[key] for key in OF_ACCOUNT if key in document})
        return cls(account, codec.from_document(Facts, others), str(document["data"]), bool(document["policy"]))
