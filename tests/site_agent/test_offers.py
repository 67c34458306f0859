"""How many offers are kept: what makes room, what never does, and what is said of the rest."""

from site_agent.gateway.consent.offers import (
    MAX_BYTES,
    MAX_OFFERS,
    MAX_TOTAL_BYTES,
    Kept,
    room_for,
)

OFFERED, APPROVED, ENDED = Kept(100, False, False), Kept(100, True, False), Kept(100, False, True)


def kept(count: int, kind: Kept = OFFERED) -> dict[str, Kept]:
    return {f"study-{number}": kind for number in range(count)}


def test_the_last_offer_that_fits_is_kept_and_the_next_is_not() -> None:
    assert room_for("new", 100, kept(MAX_OFFERS - 1)) == ([], "")
    dropped, why = room_for("new", 100, kept(MAX_OFFERS))
    assert (dropped, why) == (
        [],
        f"64 offers of 6400 bytes are kept that nobody approved, and at most 64 of {16 << 20} are",
    )


def test_what_was_approved_is_not_counted_and_never_makes_room() -> None:
    assert room_for("new", 100, kept(1000, APPROVED)) == ([], "")
    assert room_for("study-7", 100, {**kept(MAX_OFFERS), "study-7": APPROVED}) == ([], "")


def test_a_revision_takes_the_place_of_the_offer_before_it() -> None:
    assert room_for("study-7", 100, kept(MAX_OFFERS)) == ([], "")


def test_the_oldest_study_that_is_over_makes_room() -> None:
    found = {**kept(MAX_OFFERS - 2), "over": ENDED, "over too": ENDED}
    assert room_for("new", 100, found) == (["over"], "")


def test_one_offer_and_all_together_are_bounded_in_bytes() -> None:
    assert room_for("new", MAX_BYTES, {}) == ([], "")
    assert room_for("new", MAX_BYTES + 1, {})[1] == f"it has {MAX_BYTES + 1} bytes, and an offer may have {MAX_BYTES}"
    assert room_for("new", 101, {"large": Kept(MAX_TOTAL_BYTES - 100, False, False)})[1]
