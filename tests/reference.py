"""Slow, obvious versions of the formulas, written apart from the code that they judge. Append only."""

from collections.abc import Callable
from fractions import Fraction
from math import exp, log

Vector = list[float]


def weighted_mean(base: Vector, updates: list[tuple[int, Vector]]) -> list[Fraction]:
    """base + sum(n_i delta_i) / sum(n_i), without any rounding. McMahan et al. 2017, Algorithm 1."""
    total = sum(n for n, _ in updates)
    return [
        Fraction(value) + sum(n * Fraction(delta[position]) for n, delta in updates) / total
        for position, value in enumerate(base)
    ]


def linear(x: Vector, weight: list[Vector], bias: Vector) -> Vector:
    """One row through a linear layer."""
    return [sum(w * v for w, v in zip(row, x, strict=True)) + b for row, b in zip(weight, bias, strict=True)]


def relu(x: Vector) -> Vector:
    return [max(0.0, value) for value in x]


def fenda_logits(x: Vector, parameters: dict[str, list[Vector] | Vector]) -> Vector:
    """g([f_shared(x); f_private(x)]) with one hidden layer each. FENDA-FL 2023, equation 1."""
    shared = relu(linear(x, parameters["shared_weight"], parameters["shared_bias"]))  # type: ignore[arg-type]
    private = relu(linear(x, parameters["private_weight"], parameters["private_bias"]))  # type: ignore[arg-type]
    return linear(shared + private, parameters["head_weight"], parameters["head_bias"])  # type: ignore[arg-type]


def soup_choice(
    accepted: list[Vector], global_: Vector, local: Vector, score_of: Callable[[list[Fraction]], float]
) -> tuple[list[Vector], list[Fraction]]:
    """One soup round with the whole list of accepted globals: the list after it, and the patched local model.

    Chen et al. 2023, Algorithm 1, lines 5 to 10: the mean of the soup's models and the local one, with and without this
    round's global model.
    """
    without = _mean([*accepted, local])
    with_it = _mean([*accepted, global_, local])
    if score_of(with_it) >= score_of(without):
        return [*accepted, global_], with_it
    return accepted, without


def _mean(models: list[Vector]) -> list[Fraction]:
    return [
        sum((Fraction(value) for value in column), Fraction(0)) / len(models) for column in zip(*models, strict=True)
    ]


def binary_loss(logit: float, y: int) -> float:
    """Cross-entropy of the sigmoid of one logit."""
    probability = 1 / (1 + exp(-logit))
    return -log(probability if y == 1 else 1 - probability)


def mean_of_batch_means(losses: Vector, batch_size: int) -> float:
    """Every batch counts alike, a short last one too."""
    batches = [losses[start : start + batch_size] for start in range(0, len(losses), batch_size)]
    return sum(sum(batch) / len(batch) for batch in batches) / len(batches)


# Images and masks


def splitmix_uniform(seed: int, place: int, draws: int) -> Vector:
    """Draws 1, 2, ... of a row: SplitMix64's finaliser of a counter. Steele, Lea, Flood 2014, Figure 16."""

    def mixed(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    row = mixed((seed + golden * (place + 1)) % 2**64)
    return [(mixed((row + golden * draw) % 2**64) >> 11) / 2**53 for draw in range(1, draws + 1)]


def focal_loss(probabilities: Vector, y: int, gamma: float) -> float:
    """(1 - p)^gamma (-log p) of the true class. Lin et al. 2017, equation 4."""
    p = probabilities[y]
    return (1 - p) ** gamma * -log(p)


def dice_of_image(predicted: list[int], y: list[int], classes: int) -> float:
    """Pixels one by one: the mean over the foreground classes of 2 |A and B| / (|A| + |B|), 1 where both are empty."""
    scores = []
    for place in range(1, classes):
        ours = {i for i, value in enumerate(predicted) if value == place}
        theirs = {i for i, value in enumerate(y) if value == place}
        scores.append(2 * len(ours & theirs) / (len(ours) + len(theirs)) if ours or theirs else 1.0)
    return sum(scores) / len(scores)


def soft_dice_loss(probabilities: list[Vector], y: list[int], classes: int) -> float:
    """1 minus the mean over the foreground classes of (2 sum(p t) + 1) / (sum(p) + sum(t) + 1); rows are pixels."""
    scores = []
    for place in range(1, classes):
        overlap = sum(row[place] for row, value in zip(probabilities, y, strict=True) if value == place)
        total = sum(row[place] for row in probabilities) + y.count(place)
        scores.append((2 * overlap + 1) / (total + 1))
    return 1 - sum(scores) / len(scores)
