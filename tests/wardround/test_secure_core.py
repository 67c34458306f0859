"""The arithmetic of secure aggregation: quantizer, secret sharing, keys, masks, blocks and their digests."""

import tracemalloc
from math import ldexp

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import reference
from wardround.errors import BadData
from wardround.secure import shamir
from wardround.secure.keys import Secrets, agreed, commitment, derive, public_of
from wardround.secure.layout import BLOCK, ELEMENTS, NUMBERS, TENSORS, Layout, digests, masked
from wardround.secure.masking import PIECE, Mask, Masks
from wardround.secure.quantizing import BeyondRange, Quantizer, added, fixed, number_bits, numbers, range_for, signed
from wardround.secure.rules import Rules, default_threshold
from wardround.secure.sums import chance_to_miss
from wardround.tensors.manifests import TensorSpec

VALUES = st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=40)


# Rules


@pytest.mark.parametrize(
    ("sites", "threshold", "most"), [(3, 3, 1), (4, 3, 1), (5, 4, 2), (6, 5, 3), (8, 6, 3), (50, 34, 17)]
)
def test_the_default_threshold_and_how_many_colluding_sites_it_stands(sites: int, threshold: int, most: int) -> None:
    assert default_threshold(sites) == threshold
    assert Rules.of(sites, None, 1).most == most


@given(st.integers(3, 40), st.data())
def test_two_different_sets_never_both_gather_the_threshold_of_honest_signatures(n: int, data: st.DataObject) -> None:
    """Derived again: each of the n - c honest sites signs one set, each of the c others signs both."""
    t, c = data.draw(st.integers(1, n)), data.draw(st.integers(1, n))
    both_possible = any(first + c >= t and (n - c - first) + c >= t for first in range(max(0, n - c) + 1))
    try:
        Rules(n, t, c)
    except BadData:
        return
    assert not both_possible
    assert t - c >= 2


@pytest.mark.parametrize(
    ("rules", "message", "hint"),
    [
        ((2, 2, 1), "secure aggregation is for 3 to 255 sites, the study has 2", ""),
        ((4, 5, 1), "`threshold` is 5, and the study has 4 sites", ""),
        (
            (4, 3, 0),
            "`colluding` is 0, and every member sees what it may check, so at least 1 is counted",
            "`colluding = 1` in [secure_aggregation]",
        ),
        (
            (4, 2, 1),
            "a threshold of 2 of 4 sites does not stand 1 that collude: two different sets could both be opened, or a "
            "sum holds fewer than two others; it stands -1",
            "`threshold` of at least 3, more sites, or a smaller `colluding`",
        ),
    ],
    ids=["two sites", "threshold too high", "nobody colludes", "threshold too low"],
)
def test_rules_that_do_not_hold_together_are_refused(rules: tuple[int, int, int], message: str, hint: str) -> None:
    with pytest.raises(BadData) as error:
        Rules(*rules)
    assert (error.value.message, error.value.hint) == (message, hint)


# Quantizer


@given(VALUES, st.integers(0, 1000))
def test_a_quantized_value_is_the_product_rounded_once_half_to_even(values: list[float], weight: int) -> None:
    quantizer = Quantizer(8, 4.0, 1000)
    found = quantizer.quantized(np.array(values, np.float32), weight).view(np.int32).tolist()
    assert found == [reference.fixed_point(value, weight, quantizer.bits) for value in values]


def test_a_half_is_rounded_to_the_even_neighbor() -> None:
    quantizer = Quantizer(1, 2.0**29, 1)
    assert quantizer.bits == 1
    found = quantizer.quantized(np.array([0.25, 0.75, 1.25, -0.25, -0.75], np.float32), 1)
    assert found.view(np.int32).tolist() == [0, 2, 2, 0, -2]


@given(st.integers(1, 255), st.floats(1e-6, 1e6), st.integers(1, 2**24))
def test_a_sum_over_all_sites_never_wraps_and_the_scale_is_as_fine_as_that_allows(
    n: int, limit: float, weight: int
) -> None:
    quantizer = Quantizer(n, limit, weight)
    largest = reference.fixed_point(limit, weight, quantizer.bits)
    assert n * largest < 2**31
    assert quantizer.bits == 64 or n * (largest * 2 - 1) > 2**31 - 1 - 2 * n


@given(st.lists(VALUES.filter(lambda row: len(row) >= 2), min_size=2, max_size=6), st.randoms())
def test_a_sum_of_integers_is_the_same_in_every_order(rows: list[list[float]], chance: object) -> None:
    quantizer = Quantizer(8, 4.0, 1000)
    width = min(map(len, rows))
    vectors = [quantizer.quantized(np.array(row[:width], np.float32), 7) for row in rows]
    shuffled = list(vectors)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert added(vectors).tolist() == added(shuffled).tolist()


def test_the_mean_is_within_half_a_step_of_each_site() -> None:
    quantizer, chance = Quantizer(4, 4.0, 1000), np.random.default_rng(1)
    rows = [chance.uniform(-4, 4, 1000).astype(np.float32) for _ in range(4)]
    weights = [1000, 3, 77, 500]
    total = added([quantizer.quantized(row, weight) for row, weight in zip(rows, weights, strict=True)])
    exact = sum(row.astype(np.float64) * weight for row, weight in zip(rows, weights, strict=True)) / sum(weights)
    assert np.abs(quantizer.mean(total, sum(weights)) - exact).max() <= 4 * quantizer.step / 2 / sum(weights)


@pytest.mark.parametrize("value", [4.5, -np.inf, np.nan])
def test_what_is_beyond_the_range_is_refused_with_the_range_that_would_hold_it(value: float) -> None:
    with pytest.raises(BeyondRange) as error:
        Quantizer(4, 4.0, 10).quantized(np.array([0.0, value], np.float32), 1)
    if value == 4.5:
        assert error.value.message == "a value of size 4.5 is beyond the study's range of 4"
        assert error.value.hint == "`range = 16` in [secure_aggregation] would hold it"
    assert range_for(4.5) == 16


def test_a_weight_that_the_study_does_not_take_is_refused() -> None:
    with pytest.raises(BadData, match="a weight of 11 rows, the study takes 0 to 10"):
        Quantizer(4, 4.0, 10).quantized(np.zeros(1, np.float32), 11)
    with pytest.raises(BadData, match="have no quantizer: the range is above 0, a weight is 1 to 16777216"):
        Quantizer(4, 4.0, 2**24 + 1)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8), st.integers(1, 10**6))
def test_numbers_are_summed_exactly_in_their_larger_ring(values: list[float], rows: int) -> None:
    bits = number_bits(8, 1e6 * 10**6)
    encoded = [fixed(value * rows, bits) for value in values]
    total = np.zeros(1, np.uint64)
    for one in encoded:
        total += numbers([one])
    assert signed(total) == (sum(encoded),)


# Shamir


def test_the_published_test_vector_of_secret_sharing_in_gf_256() -> None:
    """draft-mcgrew-tss-03, section 9: secret 7465737400, M = 2, N = 2. r_1 follows from the first share."""
    secret, first, second = (bytes.fromhex(text) for text in ("7465737400", "B9FA07E185", "F5409B4511"))
    assert shamir.combine({1: first, 2: second}) == secret
    r_1 = bytes(a ^ b for a, b in zip(secret, first, strict=True))
    assert [shamir.share(secret, [r_1], point) for point in (1, 2)] == [first, second]


@given(st.binary(min_size=1, max_size=33), st.integers(1, 6), st.data())
def test_shares_are_those_of_the_slow_reference_and_any_threshold_of_them_gives_the_secret(
    secret: bytes, t: int, data: st.DataObject
) -> None:
    coefficients = [data.draw(st.binary(min_size=len(secret), max_size=len(secret))) for _ in range(t - 1)]
    points = data.draw(st.lists(st.integers(1, 255), min_size=t, max_size=t, unique=True))
    shares = {point: shamir.share(secret, coefficients, point) for point in points}
    assert shares == {point: reference.gf256_share(secret, coefficients, point) for point in points}
    assert shamir.combine(shares) == reference.gf256_secret(shares) == secret


def test_fewer_shares_than_the_threshold_go_with_every_secret() -> None:
    """Of t - 1 shares each secret is as likely: for each there is one polynomial through them."""
    given_, seen = {1: b"\x17", 2: b"\x99"}, set()
    for third in range(256):
        seen.add(shamir.combine({**given_, 3: bytes([third])}))
    assert len(seen) == 256


@pytest.mark.parametrize("shares", [{}, {0: b"a"}, {256: b"a"}, {1: b"a", 2: b"ab"}])
def test_what_is_no_share_is_refused(shares: dict[int, bytes]) -> None:
    with pytest.raises(BadData, match="points from 1 to 255 and equal lengths"):
        shamir.combine(shares)


# Keys


def test_every_purpose_has_bytes_of_its_own() -> None:
    secrets, other = Secrets(b"r" * 32, "aa"), Secrets(b"r" * 32, "ab")
    found = [secrets.mask_key, secrets.share_key, secrets.self_mask, other.mask_key, other.share_key, other.self_mask]
    found += [*secrets.coefficients("mask-key", 4), *secrets.coefficients("self-mask", 4)]
    assert len(set(found)) == len(found)
    assert derive(b"x" * 32, "a", "b") != derive(b"x" * 32, "ab")
    assert commitment(secrets.self_mask, "aa") != commitment(secrets.self_mask, "ab")


def test_two_sites_agree_and_a_key_whose_outcome_everybody_knows_is_refused() -> None:
    one, other = b"1" * 32, b"2" * 32
    assert agreed(one, public_of(other)) == agreed(other, public_of(one))
    for bad in ("00" * 32, "00", "zz"):
        with pytest.raises(BadData, match="is none of X25519"):
            agreed(one, bad)


def test_secrets_are_never_printed_and_erased_ones_give_nothing() -> None:
    assert "r" * 4 not in repr(Secrets(b"r" * 32, "c0ffee"))
    assert "s" * 4 not in repr(Mask(b"s" * 32, 1))
    with pytest.raises(BadData, match="the secrets of this round are erased"):
        Secrets(b"", "c0ffee")


# Masks


def stream(seed: bytes, size: int) -> bytes:
    return Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor().update(bytes(size))


@given(st.integers(1, 300), st.integers(0, 300), st.lists(st.sampled_from([1, -1]), max_size=4))
def test_masks_from_any_place_on_are_those_of_the_slow_reference(size: int, first: int, signs: list[int]) -> None:
    streams = [(stream(bytes([place]) * 32, 4 * (first + size)), sign) for place, sign in enumerate(signs)]
    values = np.arange(first + size, dtype=np.uint32)
    part = values[first:].copy()
    Masks([Mask(bytes([place]) * 32, sign) for place, sign in enumerate(signs)]).add(part, first)
    assert part.tolist() == reference.masked_vector(values.tolist(), streams, 32)[first:]


def test_the_larger_ring_and_pieces_longer_than_a_piece() -> None:
    count = PIECE // 8 + 3
    values = np.zeros(count, np.uint64)
    Masks([Mask(b"k" * 32, -1)]).add(values)
    expected = reference.masked_vector([0] * count, [(stream(b"k" * 32, 8 * count), -1)], 64)
    assert values.tolist() == expected


@given(st.permutations(range(4)))
def test_blocks_may_be_masked_in_any_order(order: list[int]) -> None:
    whole, pieces, masks = np.zeros(400, np.uint32), np.zeros(400, np.uint32), [Mask(b"q" * 32, 1), Mask(b"p" * 32, -1)]
    Masks(masks).add(whole)
    in_pieces = Masks(masks)
    for place in order:
        in_pieces.add(pieces[place * 100 : place * 100 + 100], place * 100)
    assert pieces.tolist() == whole.tolist()


# Layout


def layout(elements: int = 10) -> Layout:
    specs = [TensorSpec("a", "F32", (elements - 3,)), TensorSpec("b", "F32", (3,))]
    return Layout.of(Quantizer(4, 1.0, 100), specs, {"val_loss": 10.0, "auc": 1.0}, 100)


@given(st.integers(0, 10), st.integers(0, 10))
def test_the_spans_of_a_piece_cover_it_once_and_in_order(first: int, count: int) -> None:
    count = min(count, 10 - first)
    flat = [("a", i) for i in range(7)] + [("b", i) for i in range(3)]
    found = [(key, start + i) for key, start, some in layout().spans(first, count) for i in range(some)]
    assert found == flat[first : first + count]


def test_the_place_of_a_tensor_is_where_its_first_element_stands() -> None:
    assert (layout().place("a"), layout().place("b"), layout().elements, layout().blocks) == (0, 7, 10, 1)
    with pytest.raises(BadData, match="`c` is no tensor of these vectors"):
        layout().place("c")


def test_numbers_say_the_weights_and_the_mean_of_each_metric_over_the_sites_that_have_it() -> None:
    form = layout()
    total = form.numbers(30, {"val_loss": (2.0, 10), "auc": (0.5, 10)}) + form.numbers(70, {"val_loss": (1.0, 30)})
    assert form.read_numbers(total).weight == 100
    assert form.read_numbers(total).metrics == {"auc": 0.5, "val_loss": 1.25}
    with pytest.raises(BadData, match="metric `auc` on 10 rows: the study takes a size up to 1, on 100 rows"):
        form.numbers(1, {"auc": (1.5, 10)})


def test_a_vector_with_other_tensors_metrics_or_scale_has_another_digest() -> None:
    quantizer, specs = Quantizer(4, 1.0, 100), [TensorSpec("a", "F32", (7,))]
    found = {
        Layout.of(quantizer, specs, {}, 1).digest,
        Layout.of(quantizer, [TensorSpec("a", "F32", (8,))], {}, 1).digest,
        Layout.of(quantizer, specs, {"auc": 1.0}, 1).digest,
        Layout.of(Quantizer(4, 2.0, 100), specs, {}, 1).digest,
    }
    assert len(found) == 4


def test_a_masked_vector_says_nothing_without_its_masks_and_is_itself_with_them() -> None:
    form, held = layout(), {"a": np.linspace(-1, 1, 7, dtype=np.float32), "b": np.zeros(3, np.float32)}
    own = form.numbers(9, {})
    masks = {TENSORS: [Mask(b"m" * 32, 1)], NUMBERS: [Mask(b"n" * 32, -1)]}
    blocks = list(masked(form, lambda key, start, count: held[key][start : start + count], 9, own, masks))
    plain = form.quantized(lambda key, start, count: held[key][start : start + count], 9, 0, 10)
    tensors, rest = np.frombuffer(blocks[0], "<u4").copy(), np.frombuffer(blocks[1], "<u8").copy()
    assert not set(tensors.tolist()) & set(plain.tolist())
    Masks([mask.undone for mask in masks[TENSORS]]).add(tensors)
    Masks([mask.undone for mask in masks[NUMBERS]]).add(rest)
    assert tensors.tolist() == plain.tolist()
    assert rest.tolist() == own.tolist()
    assert len(digests(blocks).digests) == form.blocks + 1


def test_masking_holds_a_few_blocks_whatever_the_length_of_the_vector() -> None:
    """Seen with a vector of 64 MiB, of which no more than 16 are ever held."""
    elements = 16 * ELEMENTS * 4
    form = Layout.of(Quantizer(8, 1.0, 100), [TensorSpec("a", "F32", (elements,))], {}, 1)
    own, masks = form.numbers(1, {}), {label: [Mask(b"m" * 32, 1), Mask(b"o" * 32, -1)] for label in (TENSORS, NUMBERS)}
    tracemalloc.start()
    size = sum(map(len, masked(form, lambda key, start, count: np.zeros(count, np.float32), 1, own, masks)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == 4 * elements + 8
    assert peak < 16 * BLOCK


# Checks


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 12))
def test_the_chance_to_miss_an_altered_block_is_that_of_drawing_without_putting_back(b: int, bad: int, k: int) -> None:
    from math import comb

    bad, k = min(bad, b), min(k, b)
    assert chance_to_miss(b, bad, k) == pytest.approx(comb(b - bad, k) / comb(b, k))
    assert chance_to_miss(b, bad, k, members=3) == pytest.approx((comb(b - bad, k) / comb(b, k)) ** 3)


def test_the_step_is_a_power_of_two() -> None:
    assert Quantizer(4, 1.0, 1).step == ldexp(1.0, -Quantizer(4, 1.0, 1).bits)
