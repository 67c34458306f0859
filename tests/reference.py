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


# Personal and regularised methods


def proximal_term(w: Vector, anchor: Vector, mu: float) -> float:
    """mu/2 ||w - anchor||^2. Li et al. 2020, equation 2."""
    return mu / 2 * sum((a - b) ** 2 for a, b in zip(w, anchor, strict=True))


def proximal_gradient(w: Vector, anchor: Vector, mu: float) -> Vector:
    return [mu * (a - b) for a, b in zip(w, anchor, strict=True)]


def logistic_gradient(w: Vector, bias: float, rows: list[Vector], labels: list[int]) -> Vector:
    """Of the mean cross-entropy of logistic regression: by each weight, then by the bias."""
    errors = [1 / (1 + exp(-linear(x, [w], [bias])[0])) - y for x, y in zip(rows, labels, strict=True)]
    by_weight = [sum(e * x[place] for e, x in zip(errors, rows, strict=True)) / len(rows) for place in range(len(w))]
    return [*by_weight, sum(errors) / len(rows)]


def ditto_step(v: Vector, theta: Vector, gradient: Vector, rate: float, lam: float) -> Vector:
    """v - eta (grad L(v) + lambda (v - theta)). Li et al. 2021, Algorithm 1."""
    return [a - rate * (g + lam * (a - b)) for a, b, g in zip(v, theta, gradient, strict=True)]


def mixed_logistic_gradients(
    alpha: float, v: Vector, w: Vector, rows: list[Vector], labels: list[int]
) -> tuple[Vector, Vector]:
    """Of the mean cross-entropy of alpha p_v + (1 - alpha) p_w, logistic regressions, by v and by w; biases last."""
    by_v, by_w = [0.0] * len(v), [0.0] * len(w)
    for x, y in zip(rows, labels, strict=True):
        p_v, p_w = (1 / (1 + exp(-linear(x, [one[:-1]], [one[-1]])[0])) for one in (v, w))
        p = alpha * p_v + (1 - alpha) * p_w
        slope = (-1 / p if y else 1 / (1 - p)) / len(rows)
        for place, value in enumerate([*x, 1.0]):
            by_v[place] += slope * alpha * p_v * (1 - p_v) * value
            by_w[place] += slope * (1 - alpha) * p_w * (1 - p_w) * value
    return by_v, by_w


def apfl_alpha(
    alpha: float, rate: float, v: Vector, w: Vector, gradient_v: Vector, gradient_w: Vector
) -> tuple[float, float]:
    """Alpha's gradient and the alpha after it, as the authors' code has them for mixed outputs."""
    g = 0.02 * alpha
    for a, b, of_a, of_b in zip(v, w, gradient_v, gradient_w, strict=True):
        g += (a - b) * (alpha * of_a + (1 - alpha) * of_b)
    return g, min(1.0, max(0.0, alpha - rate * g))


def cosine(one: Vector, other: Vector) -> float:
    def norm(x: Vector) -> float:
        return sum(value**2 for value in x) ** 0.5

    return sum(a * b for a, b in zip(one, other, strict=True)) / (norm(one) * norm(other))


def model_contrast(z: Vector, z_global: Vector, z_previous: Vector, temperature: float) -> float:
    """Of one row. Li et al. 2021, equation 3."""
    toward = exp(cosine(z, z_global) / temperature)
    return -log(toward / (toward + exp(cosine(z, z_previous) / temperature)))


# Server aggregators beside the mean


def server_steps(
    optimizer: str,
    x: float,
    deltas: Callable[[float], float],
    rounds: int,
    eta: float,
    b1: float,
    b2: float,
    tau: float,
    v_0: float | None = None,
) -> float:
    """One weight after ``rounds`` steps of a server optimizer on ``deltas(x)``. Reddi et al. 2021, Algorithm 2."""
    m, v = 0.0, tau**2 if v_0 is None else v_0
    for _ in range(rounds):
        delta = deltas(x)
        if optimizer == "momentum":
            m = b1 * m + delta
            x += eta * m
            continue
        m = b1 * m + (1 - b1) * delta
        if optimizer == "adam":
            v = b2 * v + (1 - b2) * delta**2
        elif optimizer == "yogi":
            sign = (v > delta**2) - (v < delta**2)
            v = v - (1 - b2) * delta**2 * sign
        else:
            v = v + delta**2
        x += eta * m / (v**0.5 + tau)
    return x


def fomo_mix(own: Vector, peers: list[Vector], own_loss: float, losses: Vector, guard: float) -> tuple[Vector, Vector]:
    """The raw weights, and the model they give: sum_n w_n theta_n, w normalised. Zhang et al. 2021, equations 3, 4."""
    raw = [
        (own_loss - loss) / (sum((a - b) ** 2 for a, b in zip(peer, own, strict=True)) ** 0.5 + guard)
        for peer, loss in zip(peers, losses, strict=True)
    ]
    positive = [max(weight, 0.0) for weight in raw]
    if not sum(positive):
        return raw, own
    return raw, [
        sum(weight * value for weight, value in zip(positive, column, strict=True)) / sum(positive)
        for column in zip(*peers, strict=True)
    ]


def soft_pull(models: list[Vector], lam: Fraction) -> list[list[Fraction]]:
    """lam of the own model and 1 - lam of the mean of the others. Xu et al. 2022, SoftPull."""
    pulled = []
    for own, model in enumerate(models):
        others = [other for place, other in enumerate(models) if place != own]
        pulled.append(
            [
                lam * Fraction(value) + (1 - lam) * sum(Fraction(other[place]) for other in others) / len(others)
                for place, value in enumerate(model)
            ]
        )
    return pulled


# Evaluation protocol


def hessian(function: Callable[[Vector], float], at: Vector, step: float = 1e-4) -> list[Vector]:
    """All second derivatives by central differences of the values alone."""
    n = len(at)

    def moved(*moves: tuple[int, float]) -> float:
        point = list(at)
        for position, by in moves:
            point[position] += by
        return function(point)

    return [
        [
            (
                moved((i, step), (j, step))
                - moved((i, step), (j, -step))
                - moved((i, -step), (j, step))
                + moved((i, -step), (j, -step))
            )
            / (4 * step * step)
            for j in range(n)
        ]
        for i in range(n)
    ]


def entropy_of_softmax(logits: Vector) -> float:
    """-sum p log p, in nats."""
    total = sum(exp(logit) for logit in logits)
    return -sum(exp(logit) / total * log(exp(logit) / total) for logit in logits)


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


# Different networks at different sites


Plane = list[Vector]  # rows of pixels


def gaussian_blur(plane: Plane, size: int, sigma: float) -> Plane:
    """Each pixel's weighted mean over a square of ``size``, with zeros beyond the edges."""
    reach = range(-(size // 2), size // 2 + 1)
    weight = {(a, b): exp(-(a * a + b * b) / (2 * sigma**2)) for a in reach for b in reach}
    total = sum(weight.values())
    height, width = len(plane), len(plane[0])
    return [
        [
            sum(
                w * plane[row + a][column + b]
                for (a, b), w in weight.items()
                if 0 <= row + a < height and 0 <= column + b < width
            )
            / total
            for column in range(width)
        ]
        for row in range(height)
    ]


def calibrated(
    features: list[Plane],
    own: list[Plane],
    others: list[list[Plane]],
    kernels: list[tuple[list[Plane], float]],
    size: int,
    sigma: float,
) -> list[Plane]:
    """LC-Fed's correction of one image, pixel by pixel: for each output a 3x3 convolution of features brought out where
    the others' probabilities differ from the own ones, beside features brought out where the own ones are high.

    Args:
        own, others: logits, one plane for each output. kernels: of each output, (2 * features planes of 3x3, bias).
    """
    rows, columns = range(len(own[0])), range(len(own[0][0]))

    def probability(logits: list[Plane], output: int, r: int, c: int) -> float:
        if len(logits) == 1:
            return 1 / (1 + exp(-logits[0][r][c]))
        return exp(logits[output][r][c]) / sum(exp(plane[r][c]) for plane in logits)

    answers = []
    for output, (weights, bias) in enumerate(kernels):
        p = [[probability(own, output, r, c) for c in columns] for r in rows]
        apart = [
            [(sum((probability(o, output, r, c) - p[r][c]) ** 2 for o in others) / len(others)) ** 0.5 for c in columns]
            for r in rows
        ]
        largest = max(max(row) for row in apart)
        u = [[value / largest for value in row] for row in apart]
        inputs = []
        for soft in (gaussian_blur(u, size, sigma), gaussian_blur(p, size, sigma)):
            inputs += [[[plane[r][c] * soft[r][c] + plane[r][c] for c in columns] for r in rows] for plane in features]
        answers.append(
            [
                [
                    bias
                    + sum(
                        weight[a][b] * plane[r + a - 1][c + b - 1]
                        for weight, plane in zip(weights, inputs, strict=True)
                        for a in range(3)
                        for b in range(3)
                        if r + a - 1 in rows and c + b - 1 in columns
                    )
                    for c in columns
                ]
                for r in rows
            ]
        )
    return answers


# Methods that use a public data set


def era(rows: list[Vector], temperature: float) -> list[Vector]:
    """softmax(qbar / T) of each row. Itahara et al. 2023, section 3.2."""
    raised = [[exp(value / temperature) for value in row] for row in rows]
    return [[value / sum(row) for value in row] for row in raised]


def coefficient_loss(c: Vector, predictions: list[Vector], i: int, rho: float) -> float:
    """MSE(p_i, sum_j c_j p_j) + rho MSE(c, 1/N). Zhang et al. 2021."""
    mixed = [sum(weight * p[k] for weight, p in zip(c, predictions, strict=True)) for k in range(len(predictions[0]))]
    data = sum((one - other) ** 2 for one, other in zip(mixed, predictions[i], strict=True)) / len(mixed)
    return data + rho * sum((weight - 1 / len(c)) ** 2 for weight in c) / len(c)


def released_coefficients(c: list[Vector], predictions: list[Vector], rho: float, sharpness: float) -> list[Vector]:
    """All rows of c after a round of the code released with KT-pFL, as its loops go: github.com/cugzj/KT-pFL."""
    moved, h = [], 1e-6
    for i, row in enumerate(c):
        gradient = []
        for j in range(len(row)):
            up, down = ([w + (k == j) * sign * h for k, w in enumerate(row)] for sign in (1, -1))
            losses = [coefficient_loss(values, predictions, i, rho) for values in (up, down)]
            gradient.append((losses[0] - losses[1]) / (2 * h))
        size, rate = sum(abs(g) for g in gradient) / len(row), 1.0
        for _ in range(5):
            if size > 0.01:
                size, rate = size / 5, rate / 5
            if size < 0.01:
                size, rate = size * 5, rate * 5
        raised = [exp(sharpness * (w - rate * g)) for w, g in zip(row, gradient, strict=True)]
        moved.append([value / sum(raised) for value in raised])
    return moved


def on_simplex(values: Vector) -> Vector:
    """The nearest point of the simplex: the threshold by bisection."""
    low, high = min(values) - 1, max(values)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(max(v - middle, 0) for v in values) > 1 else (low, middle)
    return [max(value - low, 0) for value in values]


# One site's say


def capped_shares(counts: list[int], most: Fraction) -> list[Fraction]:
    """Each site's share: the highest level such that nobody is above ``most``, the others in proportion, by bisection.

    Of n sites none can be held below 1 / n.
    """
    if len(counts) < 3 or most >= 1:
        return [Fraction(count, sum(counts)) for count in counts]
    if most * len(counts) <= 1:
        return [Fraction(1, len(counts))] * len(counts)
    low, high = Fraction(0), Fraction(max(counts))  # nobody weighs more than the level; at the right one shares fit
    for _ in range(200):
        level = (low + high) / 2
        weights = [min(Fraction(count), level) for count in counts]
        low, high = (level, high) if max(weights) <= most * sum(weights) else (low, level)
    weights = [min(Fraction(count), low) for count in counts]
    return [weight / sum(weights) for weight in weights]


# Robust rules in place of the mean, in exact arithmetic where there is no root


def median_of(values: list[Fraction]) -> Fraction:
    """The middle one, or the mean of the middle two."""
    ordered = sorted(values)
    while len(ordered) > 2:
        ordered = ordered[1:-1]
    return sum(ordered, Fraction(0)) / len(ordered)


def trimmed_mean_of(values: list[Fraction], f: int) -> Fraction:
    """Without the f smallest and f largest, taken away one after another. Yin et al. 2018, definition 2."""
    left = list(values)
    for _ in range(f):
        left.remove(max(left))
        left.remove(min(left))
    return sum(left, Fraction(0)) / len(left)


def krum_scores(updates: list[list[Fraction]], f: int) -> list[Fraction]:
    """Blanchard et al. 2017, section 4."""
    scores = []
    for place, own in enumerate(updates):
        others = [update for other, update in enumerate(updates) if other != place]
        distances = [sum(((a - b) ** 2 for a, b in zip(own, other, strict=True)), Fraction(0)) for other in others]
        scores.append(sum(sorted(distances)[: len(updates) - f - 2], Fraction(0)))
    return scores


def clipped_mean_of(updates: list[tuple[int, Vector]], most: float) -> Vector:
    """Each update shortened to the norm ``most``, and their mean by rows. Sun et al. 2019, section 4."""
    rows = sum(n for n, _ in updates)
    shortened = []
    for n, update in updates:
        norm = sum(value**2 for value in update) ** 0.5
        shortened.append([n / rows * value / max(1.0, norm / most) for value in update])
    return [sum(column) for column in zip(*shortened, strict=True)]


def sum_of_distances(point: Vector, updates: list[Vector]) -> float:
    """What the geometric median makes smallest. Pillutla et al. 2022, equation 4."""
    return sum(sum((a - b) ** 2 for a, b in zip(point, update, strict=True)) ** 0.5 for update in updates)


def geometric_median_of(updates: list[Vector]) -> Vector:
    """By looking around with ever smaller steps, along each axis."""
    best = [sum(column) / len(updates) for column in zip(*updates, strict=True)]
    step = max(abs(value) for update in updates for value in update) or 1.0
    while step > 1e-10:
        moves = [
            [value + (sign * step if axis == place else 0.0) for place, value in enumerate(best)]
            for axis in range(len(best))
            for sign in (-1, 1)
        ]
        nearest = min(moves, key=lambda point: sum_of_distances(point, updates))
        if sum_of_distances(nearest, updates) < sum_of_distances(best, updates):
            best = nearest
        else:
            step /= 2
    return best


# Secure aggregation


def gf256_times(a: int, b: int) -> int:
    """The product of two bytes in GF(256) with x^8 + x^4 + x^3 + x + 1, bit by bit. FIPS 197, section 4.2."""
    product = 0
    for _ in range(8):
        if b & 1:
            product ^= a
        a, b = (a << 1) ^ (0x11B if a & 0x80 else 0), b >> 1
    return product


def gf256_share(secret: bytes, coefficients: list[bytes], point: int) -> bytes:
    """s + r_1 x + r_2 x^2 + ..., each power by itself. Shamir 1979."""
    share = bytearray(secret)
    power = 1
    for coefficient in coefficients:
        power = gf256_times(power, point)
        for place, value in enumerate(coefficient):
            share[place] ^= gf256_times(value, power)
    return bytes(share)


def gf256_secret(shares: dict[int, bytes]) -> bytes:
    """Lagrange's polynomial at 0; the inverse of a byte is its 254th power."""

    def inverse(a: int) -> int:
        result = 1
        for _ in range(254):
            result = gf256_times(result, a)
        return result

    secret = bytearray(len(next(iter(shares.values()))))
    for x, share in shares.items():
        weight = 1
        for other in shares:
            if other != x:
                weight = gf256_times(weight, gf256_times(other, inverse(other ^ x)))
        for place, value in enumerate(share):
            secret[place] ^= gf256_times(value, weight)
    return bytes(secret)


def fixed_point(value: float, weight: int, bits: int) -> int:
    """round(value * weight * 2^bits), half to even, with fractions."""
    return round(Fraction(value) * weight * Fraction(2) ** bits)


def masked_vector(values: list[int], streams: list[tuple[bytes, int]], bits: int) -> list[int]:
    """values + sum of sign * stream, mod 2^bits, an element at a time; streams are bytes, little endian."""
    width = bits // 8
    return [
        (
            value
            + sum(
                sign * int.from_bytes(stream[place * width : (place + 1) * width], "little") for stream, sign in streams
            )
        )
        % 2**bits
        for place, value in enumerate(values)
    ]
