"""The bench's own judgement: what is beyond a count, and the table that people read."""

import pytest

from bench import counts, line
from bench.table import table


def test_no_encoding_takes_more_bytes_for_a_parameter_than_it_may() -> None:
    found = counts.bytes_up()
    assert counts.beyond(found) == []
    assert found["bytes up for a parameter, bfloat16"] == 2.0  # half, exactly
    assert found.keys() <= counts.MOST.keys()


def test_a_count_that_grew_is_told_with_where_its_bound_stands() -> None:
    grown = {"bytes up for a parameter, float32": 4.5}
    (sentence,) = counts.beyond(grown)
    assert sentence == "bytes up for a parameter, float32: 4.5, at most 4 is expected; bench/counts.py has the table"


def test_the_table_has_a_row_for_each_round_and_says_what_was_left_out() -> None:
    round_ = {"bench": "round", "payload": "152", "encoding": "float32", "sites": 4, "seconds": 0.1, "ratio": 12.0}
    skipped = {"bench": "flower", "payload": "152", "sites": 4, "skipped": "`pip install flwr` failed"}
    text = table([round_, skipped])
    assert "| round, 152 | 4 | 0.1 | 12.0 | – | – | – | – | – |" in text
    assert "bench flower, payload 152, sites 4, skipped `pip install flwr` failed" in text


def test_how_full_a_line_is_counts_from_the_first_byte_of_the_longest_transfer_to_its_last() -> None:
    rate, samples, carried = 1000.0, list[tuple[float, int]](), 0
    speeds = [(40, 1), (200, 900), (60, 2), (30, 1000), (40, 0)]  # samples, bytes a second: between transfers it pings
    for count, speed in speeds:
        for _ in range(count):
            samples.append((len(samples) / 20, carried))
            carried += speed // 20
    seconds, moved = line.longest(samples, rate)
    assert seconds == pytest.approx(10, abs=0.1)
    assert moved / seconds == pytest.approx(900)
    assert line.longest(samples[:20], rate) == (1.0, 0)
