"""Names: layers fold into one line and unfold into the same names; strangers' names are safe to print."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardviz.text import (
    counted,
    cut_at_comma,
    cut_at_number,
    did_you_mean,
    fold,
    join_numbers,
    listed,
    natural_key,
    nearest,
    printable,
    range_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PARTS = st.sampled_from(["layers", "0", "1", "2", "10", "01", "wq", "weight", "²", "٣", "", "9" * 20, "a1"])
NAMES = st.lists(PARTS, min_size=1, max_size=5).map(".".join) | st.text(max_size=8)


@given(st.lists(st.tuples(NAMES, st.integers(0, 2)), unique_by=lambda named: named[0]))
def test_what_is_folded_unfolds_into_the_same_names_with_the_same_keys(named: list[tuple[str, int]]):
    unfolded = [(name, key) for folded, key in fold(named) for name in folded.names()]
    assert sorted(unfolded) == sorted(named)
    assert all(len(folded) == len(folded.names()) for folded, _ in fold(named))


def test_identical_layers_are_one_line():
    names = [f"layers.{index}.wq.weight" for index in range(32)]
    (folded,) = [str(folded) for folded, _ in fold((name, 0) for name in names)]
    assert folded == "layers.[0-31].wq.weight"


def test_a_layer_with_another_key_splits_off_and_the_rest_stay_together():
    named = [(f"layers.{index}.w", index == 3) for index in range(8)]
    assert [(str(folded), key) for folded, key in fold(named)] == [
        ("layers.[0-2,4-7].w", False),
        ("layers.3.w", True),
    ]


def test_a_folded_name_names_every_layer_since_lockfiles_are_read_back():
    (folded,) = [folded for folded, _ in fold((f"layers.{index}.w", 0) for index in range(0, 40, 2))]
    assert str(folded) == f"layers.[{','.join(map(str, range(0, 40, 2)))}].w"


def test_folds_come_in_the_order_of_their_first_names():
    named = [(name, 0) for name in ("embed", "layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b", "head")]
    assert [str(folded) for folded, _ in fold(named)] == ["embed", "layers.[0-1].a", "layers.[0-1].b", "head"]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("layers.12.experts.3.w", ("layers.", 12, ".experts.3.w")),
        ("3", ("", 3, "")),
        ("w1", ("w1", None, "")),
        ("layers.01.w", ("layers.01.w", None, "")),
        ("layers.٣.w", ("layers.٣.w", None, "")),
        ("layers." + "9" * 19, ("layers." + "9" * 19, None, "")),
    ],
)
def test_only_a_plain_number_of_its_own_is_folded(name: str, parts: tuple[str, int | None, str]):
    assert cut_at_number(name) == parts


def test_layer_two_comes_before_layer_ten():
    names = ["layers.10.w", "layers.2.w", "embed", "layers.2.b", "²"]
    assert sorted(names, key=natural_key) == ["embed", "layers.2.b", "layers.2.w", "layers.10.w", "²"]


@given(st.lists(NAMES))
def test_any_names_can_be_sorted(names: list[str]):
    assert sorted(sorted(names, key=natural_key)) == sorted(names)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("layers.0.wq", "layers.0.wq"),
        ("größe", "größe"),
        ("a\x1b[31mb", "a\\u001b[31mb"),
        ("a\nb\tc", "a\\u000ab\\u0009c"),
        ("a\u202eb", "a\\u202eb"),
        ("a\u200bb\u00adc\u2060", "a\\u200bb\\u00adc\\u2060"),
        ("a\U000e0041b", "a\\ue0041b"),
        ("a\ud800b", "a\\ud800b"),
    ],
)
def test_what_a_terminal_would_obey_or_hide_is_spelled_out(name: str, shown: str):
    assert printable(name) == shown


@given(st.text())
def test_whatever_is_printable_stays_and_the_rest_becomes_it(name: str):
    assert printable(name).isprintable()
    assert name == printable(name) or not name.isprintable()


@pytest.mark.parametrize(
    ("things", "text"),
    [
        ((), ""),
        ((0, 1), "0, 1"),
        (range(3), "0, 1, 2"),
        (range(4), "0, 1, 2, ..."),
        ((f"rank {rank}" for rank in range(10**9)), "rank 0, rank 1, rank 2, ..."),
    ],
)
def test_a_list_has_dots_only_where_more_come(things: Iterable[object], text: str) -> None:
    assert listed(things, 3) == text


@pytest.mark.parametrize(("most", "text"), [(11, "0-3,8,12-15"), (10, "0-3,8,..."), (6, "0-3,8,..."), (5, "0-3,...")])
def test_ranks_in_numbers_are_cut_between_two_of_them(most: int, text: str) -> None:
    assert cut_at_comma("0-3,8,12-15", most) == text


def test_a_list_is_cut_with_the_blanks_that_it_has() -> None:
    assert cut_at_comma("layers.0.w1, layers.0.w2, norm", 26) == "layers.0.w1, layers.0.w2, ..."


def test_one_thing_is_no_plural() -> None:
    assert [counted(number, "rank") for number in (0, 1, 1024)] == ["0 ranks", "1 rank", "1,024 ranks"]


def test_ranks_in_a_row_are_written_as_a_range() -> None:
    assert join_numbers([7, 2, 0, 1]) == "0-2, 7"
    assert join_numbers([0, 1, 3], ",") == "0-1,3"
    assert join_numbers([]) == ""


def test_a_misspelt_word_gets_the_known_one_and_another_word_nothing() -> None:
    assert did_you_mean("chek", ("check", "show")) == "did you mean check?"
    assert did_you_mean("laiers.0", ("layers.0\x1b", "embed")) == "did you mean layers.0\\u001b?"
    assert did_you_mean("xyzzy", ("check", "show")) == ""
    assert nearest("frok", ("fork",), cutoff=0.8) is None


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        (range(4), "0-3"),
        ([0, 1, 2, 7], "0-2, 7"),
        (range(0, 1024, 8), "0…1016 step 8"),
        ([number for first in range(0, 1024, 8) for number in range(first, first + 4)], "0-3…1016-1019 step 8"),
        ([0, 2, 4], "0, 2, 4"),
        ([1, 2, *range(10, 60, 10)], "1-2, 10…50 step 10"),
        ([*range(0, 60, 10), 51], "0…40 step 10, 50-51"),
        ([0, 3, 4, 9, 11, 20, 26, 33, 47, 60, 61], "0, 3-4, 9, 11, 20, 26, … (11 in all)"),
        ([], ""),
    ],
)
def test_numbers_are_written_as_ranges_with_steps_and_never_as_a_long_list(numbers: Iterable[int], text: str):
    assert join_numbers(numbers) == text


@given(st.sets(st.integers(0, 60)))
def test_numbers_that_are_all_written_are_those_that_were_given(numbers: set[int]):
    text = join_numbers(numbers)
    if "in all" in text:
        assert f"({len(numbers)} in all)" in text
    else:
        assert sorted(number for piece in text.split(", ") if piece for number in meant(piece)) == sorted(numbers)


def meant(piece: str) -> list[int]:
    """Return the numbers of a piece as a reader understands it."""
    ends, _, step = piece.partition(" step ")
    firsts = [part.split("-") for part in ends.split("…")]
    length = int(firsts[0][-1]) - int(firsts[0][0]) + 1
    starts = range(int(firsts[0][0]), int(firsts[-1][0]) + 1, int(step or 1)) if step else [int(firsts[0][0])]
    return [number for start in starts for number in range(start, start + length)]


@pytest.mark.parametrize(
    ("positions", "text"), [([3], "3"), (range(128), "0…127"), ([4, 5], "4…5"), ([0, 2], "0,2"), ([0, 1, 5], "0-1,5")]
)
def test_positions_along_an_axis_are_a_range(positions: Sequence[int], text: str):
    assert range_text(positions) == text
