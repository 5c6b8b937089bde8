"""The numbers of a tensor as text: small ones only, equal ones once."""

from shardviz.dump.dump import Shard, Tensor
from shardviz.dump.records.tensors import Body
from shardviz.picture.text.tables.values import MOST_BLOCKS, MOST_NUMBERS, value_lines
from shardviz.picture.text.terminal import Terminal
from shardviz.text import Fold


def _tensor(values, shape):
    bodies = {rank: Body("activation", "step", shape, shape, "float64", values=one) for rank, one in enumerate(values)}
    return Tensor(Fold("x"), "activation", "step", {rank: Shard(rank, body, None) for rank, body in bodies.items()})


def _lines(values, shape, **more):
    return [line.plain.rstrip() for line in value_lines(_tensor(values, shape), Terminal(60), **more)]


def test_ranks_with_the_same_numbers_are_one_block_and_rows_are_rows():
    assert _lines([[[1.0, 20.5], [3.0, 4.0]], [[1.0, 20.5], [3.0, 4.0]], [[0.0, "nan"], [7.0, 8.0]]], (2, 2)) == [
        "   ranks  values",
        "   0-1       1  20.5",
        "             3     4",
        "   2        0  nan",
        "            7    8",
    ]


def test_a_number_alone_and_no_numbers_are_reported():
    assert _lines([3], ()) == ["   ranks  values", "   0      3"]
    assert _lines([[]], (0,)) == ["   ranks  values", "   0      nothing"]


def test_more_numbers_than_can_be_read_are_not_shown():
    assert not _lines([[0.0] * (MOST_NUMBERS + 1)], (MOST_NUMBERS + 1,))
    assert not _lines([None], (2,))


def test_more_ranks_than_fit_are_counted_and_shown_when_asked_for():
    many = [[float(rank)] for rank in range(MOST_BLOCKS + 4)]
    assert _lines(many, (1,))[-1] == "   and 4 more sets of ranks: --all"
    assert len(_lines(many, (1,), all_ranks=True)) == MOST_BLOCKS + 5


def test_a_row_wider_than_the_terminal_is_cut():
    (_, row) = _lines([[1.25] * 64], (64,))
    assert len(row) <= 60
    assert row.endswith(" ...")
