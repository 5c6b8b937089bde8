"""The numbers of a tensor as text: small ones only, equal ones once."""

from dataclasses import replace

from shardviz.dump.dump import Shard, Tensor
from shardviz.dump.records.tensors import Body
from shardviz.picture.text.ranks import MOST_BLOCKS, MOST_NUMBERS, value_lines
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


def test_a_row_wider_than_the_terminal_says_which_columns_are_shown():
    heading, row = _lines([[1.25] * 64], (64,))
    assert len(row) <= 60
    assert heading.endswith("values, columns 0-7 of 64")


def test_the_column_that_is_wrong_is_shown_and_marked_however_narrow_the_terminal():
    right, wrong = [float(at) for at in range(30)], [float(at) for at in range(30)]
    wrong[27] = 99.0
    lines = _lines([right, right, wrong, right], (30,), named={2})
    heading, innocent, guilty = lines
    assert heading.startswith("   ranks  values, columns 0-")
    assert heading.endswith(", 27 of 30")
    assert innocent.startswith("   0-1,3 ")
    assert "✗" not in innocent
    assert guilty.startswith("✗  2 ")
    assert guilty.count("✗") == 2
    assert guilty.endswith("✗99")


def test_shards_that_differ_by_right_are_not_marked():
    lines = _lines([[1.0], [2.0], [3.0]], (1,), named={1, 2}, parts={0: "[0:1]", 1: "[1:2]", 2: "[1:2]"})
    assert [line.count("✗") for line in lines] == [0, 0, 1, 1], "no rank that is right has the part of ranks 1 and 2"


def test_numbers_that_differ_in_late_digits_are_written_in_as_many_as_tell_them_apart():
    (_, right, wrong) = _lines([[1.0], [1.0000001]], (1,), named={1})
    assert right.split() == ["0", "1"]
    assert wrong.split() == ["✗", "1", "✗1.0000001"]
    assert _lines([[1.0], [1.0000001]], (1,)) == ["   ranks  values", "   0-1    1"], "nothing points at a rank"


def test_a_rank_without_the_columns_that_are_shown_has_an_ellipsis():
    bodies = {rank: Body("param", "step", (16,), (16,), "float64", values=[0.5] * 16) for rank in range(15)}
    bodies[15] = Body("param", "step", (1,), (1,), "float64", values=[0.5])
    tensor = Tensor(Fold("x"), "param", "step", {rank: Shard(rank, body, None) for rank, body in bodies.items()})
    heading, many, one = (text.plain.rstrip() for text in value_lines(tensor, Terminal(60)))
    assert heading.endswith("columns 1-10 of 16")
    assert many.split() == ["0-14", *["0.5"] * 10]
    assert one.split() == ["15", "…"]


def test_one_set_of_ranks_that_does_not_fit_is_one():
    assert _lines([[float(rank)] for rank in range(MOST_BLOCKS + 1)], (1,))[-1] == "   and 1 more set of ranks: --all"


def test_the_gradient_is_named():
    tensor = replace(_tensor([[1.0]], (1,)), role="grad")
    assert value_lines(tensor, Terminal(60))[0].plain == "   ranks  values of the gradient"
