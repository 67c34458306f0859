"""The bench's own judgement: what is beyond a count, and the table that people read."""

from bench import counts
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
