"""What changed between a study that was approved or shown and the one that is offered, in words."""

from collections.abc import Sequence

from site_agent.gateway.consent.account import Account, Line, setting_changes
from site_agent.state.consent import Consent, Shown, TrainedData, exposed
from site_agent.state.offer import Offer
from wardround.records.trainer import Described
from wardround.tensors.manifests import TensorSpec

OWN_SENTENCES = ("reported.metrics ", "reported.counts ")  # settings whose change has a sentence of its own


def differences(consent: Consent, offer: Offer, described: Described | None = None) -> list[str]:
    """What changed between the approved study and the offered one, one sentence each; empty if nothing did.

    Args:
        described: what the trainer says of the offered study, where it was asked; without it, who has this site's own
            model is not compared.
    """
    if (consent.study_digest, consent.revision) == (offer.digest, offer.revision):
        return []
    changes = [f"revision {offer.revision}, approved was {consent.revision}"]
    if described is not None:
        now, was = exposed(described.exposure, described.personalized), exposed(consent.exposure, consent.personalized)
        changes += [f"now {now}; approved was: {was}"] if now != was else []
    changes += tensor_differences(consent.upload, offer.upload)
    changes += [f"metric `{name}` would now leave" for name in offer.metrics if name not in consent.metrics]
    changes += [f"metric `{name}` would no longer leave" for name in consent.metrics if name not in offer.metrics]
    if offer.reported.counts != consent.counts:
        changes.append(f"counts would be reported {offer.reported.counts}, approved was {consent.counts}")
    settings = setting_changes(consent.document, offer.document)
    changes += [change for change in settings if not change.startswith(OWN_SENTENCES)]
    if len(changes) == 1 and consent.study_digest != offer.digest:
        changes.append("the same settings, tensors and numbers; its initial model is another")
    return changes


def data_differences(before: TrainedData, now: TrainedData) -> list[str]:
    """What a site would train on otherwise than approved, one sentence each."""
    changes = []
    if (before.name, before.digest) != (now.name, now.digest):
        changes.append(f"the data is `{now.name}`, {now.digest[:12]}…")
    if before.network and before.network != now.network:
        changes.append(f"this site trains network `{now.network or 'default'}`, approved was `{before.network}`")
    if before.weights != now.weights:
        changes.append(f"its own tensors begin with {_weights(now)}, approved was: {_weights(before)}")
    return changes


def since_shown(last: Shown, account: Account) -> list[str]:
    """What changed between an account that was shown and another one, line by line; never nothing if anything did."""
    now = account.lines
    changes = [f"revision {last.revision} -> {account.revision}"] if last.revision != account.revision else []
    changes += [
        Line(name, now[name], last.lines.get(name, "")).sentence() for name in now if last.lines.get(name) != now[name]
    ]
    changes += [f"{name} {value} is gone" for name, value in last.lines.items() if name not in now]
    return changes or [f"the initial model, of digest {last.study_digest[:12]}… -> {account.study_digest[:12]}…"]


def tensor_differences(before: Sequence[TensorSpec], after: Sequence[TensorSpec]) -> list[str]:
    """Which tensors were added, are gone or have another form, one sentence each."""
    old, new = {spec.key: spec for spec in before}, {spec.key: spec for spec in after}
    changes = [f"`{spec.name}` is added ({_form(spec)})" for key, spec in new.items() if key not in old]
    changes += [f"`{spec.name}` is gone ({_form(spec)})" for key, spec in old.items() if key not in new]
    return changes + [
        f"`{spec.name}` is {_form(spec)}, was {_form(old[key])}"
        for key, spec in new.items()
        if key in old and _form(spec) != _form(old[key])
    ]


def _weights(data: TrainedData) -> str:
    return f"the weights {data.weights[:12]}…" if data.weights else "what the study's seed draws"


def _form(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"
