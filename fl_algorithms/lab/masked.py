"""A round's sum in the lab by the whole protocol of secure aggregation: keys, shares, masks, signatures, opening.

Every site's part and the coordinator's run in this process, one after the other, with fresh keys. The sum is the same
integers as without masks; what it costs is seen, and that it works with a study's own tensors.
"""

import os
from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fl_algorithms.server.secure_sums import Sum, Vector, of_site
from fl_algorithms.study import ResolvedStudy
from wardround.secure import coordinator, site
from wardround.secure.layout import ELEMENTS, Layout, digests, masked
from wardround.secure.policy import Pledges, Policy
from wardround.secure.site import Party
from wardround.secure.statements import Context, Roster
from wardround.secure.sums import Summing, Unmasking
from wardround.signing import canonical


class MaskedRounds:
    """The sites of a run, with their keys and what each of them has signed."""

    def __init__(self, study: ResolvedStudy) -> None:
        section, names = study.secure_aggregation, study.study.sites
        assert section is not None
        self._rules = section.rules(len(names))
        keys = {name: Ed25519PrivateKey.generate() for name in names}
        self._roster = Roster.of({name: key.public_key().public_bytes_raw() for name, key in keys.items()})
        known = frozenset(self._roster.fingerprint(name) for name in names)
        policy = Policy(known, section.colluding + 2, section.colluding + 1, section.colluding)
        self._parties = {name: Party(name, key, self._roster, self._rules, policy) for name, key in keys.items()}
        self._study = canonical.digest(study.document())
        self._pledges: dict[str, Pledges] = {}

    def add(self, layout: Layout, vectors: Sequence[Vector], round_number: int, base: str) -> Sum:
        """The sum of the vectors of a round's sites. ``base``: digest (hex) of the model that it begins with.

        Raises:
            BadData: as ``secure_sums.added``.
            TryAgain: fewer sites than the threshold.
        """
        context = Context("lab", self._study, self._roster.digest, round_number, 1, base, layout.digest)
        attempt = coordinator.Attempt(context, self._roster, self._rules)
        states, sent = {}, {}
        for one in vectors:
            states[one.site], envelope = site.begin(self._parties[one.site], context, os.urandom(32))
            attempt = coordinator.keys(attempt, one.site, envelope)
        attempt = coordinator.close_keys(attempt)
        for name in attempt.peers:
            states[name], dealt = site.shares(self._parties[name], states[name], attempt.shown_keys())
            attempt = coordinator.shares(attempt, name, dealt)
        attempt = coordinator.close_shares(attempt)
        for one in vectors:
            party = self._parties[one.site]
            state = site.join(party, states[one.site], attempt.shares_for(one.site))
            with of_site(one.site):
                own = layout.numbers(one.weight, one.metrics)
                sent[one.site] = list(masked(layout, one.deltas.block, one.weight, own, site.masks(party, state)))
            states[one.site], envelope = site.submit(party, state, digests(sent[one.site]))
            attempt = coordinator.submission(attempt, one.site, envelope)
        attempt = coordinator.choose(attempt)
        for name in attempt.chosen:
            states[name], self._pledges[name], envelope = site.agree(
                self._parties[name], states[name], attempt.shown_set(), self._pledges.get(name, Pledges())
            )
            attempt = coordinator.agreement(attempt, name, envelope)
        for name in attempt.chosen:
            states[name], envelope = site.open_(self._parties[name], states[name], attempt.shown_agreements())
            attempt = coordinator.opening(attempt, name, envelope)
        opened, _ = coordinator.unmasking(attempt)
        summing = Summing(layout, Unmasking.of(opened, attempt.members, attempt.chosen))
        total = np.zeros(layout.elements, np.uint32)
        for index in range(layout.blocks):
            first = index * ELEMENTS
            total[first : first + ELEMENTS] = summing.tensors(index, [sent[name][index] for name in attempt.chosen])
        return Sum(layout, total, summing.numbers([sent[name][-1] for name in attempt.chosen]))
