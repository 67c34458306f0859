"""What the lab's coordinator has of a round under secure aggregation: sums, with the protocol's masks or without."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fl_algorithms.engine.session import RoundResult
from fl_algorithms.lab.masked import MaskedRounds
from fl_algorithms.rows import VAL_LOSS
from fl_algorithms.server.aggregator import ServerAggregator
from fl_algorithms.server.combining import Combined
from fl_algorithms.server.limits import Account
from fl_algorithms.server.mean import InMemory
from fl_algorithms.server.secure_sums import Sum, added, largest_value, layout_of, vector
from fl_algorithms.study import ResolvedStudy
from wardround.errors import BadData
from wardround.secure.quantizing import range_for


@dataclass(frozen=True)
class Summed:
    """A round's sum. ``largest``: the largest size of a value in an update, which the coordinator does not know."""

    sum: Sum
    largest: float

    @property
    def combined(self) -> Combined:
        return self.sum.combined

    @property
    def account(self) -> Account:
        """Of single updates nothing is known."""
        return Account(largest=self.largest)

    @property
    def losses(self) -> list[tuple[str, int]]:
        """The validation loss over all sites, as of one; none where no site reports one."""
        loss = self.sum.numbers.metrics.get(VAL_LOSS)
        return [] if loss is None else [(repr(loss), 1)]


class RoundSums:
    """Adds up what the sites of a run send. ``masked``: with the whole protocol; the sums are the same."""

    def __init__(self, study: ResolvedStudy, aggregator: ServerAggregator, *, masked: bool) -> None:
        self._study, self._aggregator = study, aggregator
        self._masked = MaskedRounds(study) if masked else None

    def of(self, round_number: int, base: str, results: Mapping[str, RoundResult]) -> Summed | None:
        """The sum of a round; of the closing one, of metrics alone. None without secure aggregation.

        Args:
            base: digest (hex) of the model that the round began with.

        Raises:
            BadData: a site's value is beyond the study's range, or its rows beyond the largest weight.
        """
        study, aggregator = self._study, self._aggregator
        if study.secure_aggregation is None:
            return None
        closing = round_number > study.study.rounds
        specs, vectors = () if closing else aggregator.upload, []
        for site, result in sorted(results.items()):
            deltas = InMemory({spec.key: result.uplink[spec.bundle][spec.name].numpy() for spec in specs})
            examples = 0 if closing else result.num_examples
            vectors.append(vector(study, aggregator, site, deltas, examples, result.metrics, result.num_validation))
        layout = layout_of(study, aggregator, specs)
        try:
            if self._masked is None:
                found = added(layout, vectors)
            else:
                found = self._masked.add(layout, vectors, round_number, base)
        except BadData as error:
            raise BadData(f"round {round_number}: {error.message}", hint=error.hint) from None
        return Summed(found, largest_value(layout, vectors))


def range_summary(study: ResolvedStudy, accounts: Sequence[Account]) -> str:
    """Which `range` this run would have needed, as a sentence; "" without secure aggregation."""
    section = study.secure_aggregation
    if section is None:
        return ""
    largest = max((account.largest for account in accounts), default=0.0)
    return (
        f"the largest value of an update was {largest:.3g}, `range` in [secure_aggregation] is {section.range:g}; "
        f"{range_for(largest):g} would have room for one twice as large"
    )
