"""What a study would take out of the hospital, and what it leaves there: the table a person reads before approving."""

from typing import Any

from site_agent.state import directory
from site_agent.state.directory import Consent, Journal, Offer, study_state

SHOWN_NAMES = 6
WORKED_ON = ("approved", "running", "paused", "training")  # states of a study that goes on, or would


def exposed(exposure: str, apart: str) -> str:
    """Who else has what is this site's own, as a sentence; "" where nobody has."""
    said = directory.exposed(exposure, apart)
    return f"{said[0].upper()}{said[1:]}." if exposure else ""


def trains(described: dict[str, Any]) -> str:
    """Which network this site trains, and how large it is, as a sentence."""
    label = f" `{described['network']}`" if described["network"] else ""
    return f"This site trains network{label} {described['model']}: {described['parameters']} parameters"


def begins_with(weights: dict[str, Any]) -> str:
    """What a file of weights gives to the tensors that stay here, as a sentence."""
    said = f"{weights['used']} of the tensors that stay here begin with the weights of SHA-256 {weights['digest']}"
    for what, names in (("not in the file", weights["drawn"]), ("in it and not used", weights["unused"])):
        if names:
            more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
            said += f"; {what}: {', '.join(names[:SHOWN_NAMES])}{more}"
    return f"{said}. The file is read once, before this site's first round"


def facts(offer: Offer, described: dict[str, Any]) -> dict[str, Any]:
    """What scripts ask of a study by name; ``account`` has all of it. ``described`` is what the trainer says."""
    told = offer.document["reported"]
    return {
        "sites": offer.document["study"]["sites"],
        "algorithm": offer.document["algorithm"]["name"],
        "rounds": offer.rounds,
        "bytes_per_round": sum(row["bytes"] for row in offer.leaves),
        "leaves": offer.leaves,
        "metrics": offer.metrics,
        "metric_digits": told["digits"],
        "counts": told["counts"],
        "comes": described["comes"],
        "exposure": described["exposure"],
        "apart": described["apart"],
        "stays": described["stays"],
        "network": described["network"],
        "model": described["model"],
        "parameters": described["parameters"],
        "weights": described["weights"],
    }


def row(offer: Offer, consent: Consent | None, journal: Journal, changes: list[str]) -> dict[str, Any]:
    """One study's line in `studies` and `status`. ``changes`` says in words what changed since it was approved."""
    standing = study_state(offer, consent, journal)
    if changes and standing in WORKED_ON:
        standing = "changed"
    round_ = journal.round if journal.study_digest == offer.digest else 0
    if standing != "held":  # the closing numbers come after the last round; held, they are released by their own number
        round_ = min(round_, offer.rounds)
    return {
        "id": offer.study,
        "title": offer.document["study"]["title"],
        "state": standing,
        "round": round_,
        "rounds": offer.rounds,
        "revision": offer.revision,
        "study_digest": offer.digest,
        "approved_by": consent.approved_by["name"] if consent is not None else None,
        "data": consent.data["name"] if consent is not None else None,
        "changes": changes,
    }


def policy_row(decision: Any) -> dict[str, Any]:
    """A policy's decision on one thing as JSON."""
    return {"what": decision.what, "allowed": decision.allowed, "rule": decision.rule}


def size(count: int) -> str:
    """Bytes as a person reads them: "608 B", "44.7 MiB"."""
    amount, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while amount >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{count} B" if units[0] == "B" else f"{amount:.1f} {units[0]}"
