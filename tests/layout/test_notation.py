"""The notation: every layout is written so that it reads back as itself; every mistake is shown at its column."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardviz.errors import NotationError, ShardvizError
from shardviz.layout.layout import Layout
from shardviz.layout.mesh import parse_mesh
from shardviz.layout.notation import parse, write
from shardviz.layout.placements import Partial, Shard, StridedShard
from tests.lanes import cases
from tests.layout.layouts import layouts

MESH = parse_mesh("fsdp=2,tp=4")
HINT = "write it as [12/tp/fsdp, 12]: each dim's size, then the axes that split it, outermost first"


@cases(600)
@given(layouts(), st.sampled_from(["", "float32", "bfloat16"]), st.booleans())
def test_what_is_written_reads_back_as_the_same_layout(layout: Layout, dtype: str, equal: bool):
    text = write(layout, dtype, equal=equal)
    pattern = parse(text)
    assert str(pattern) == text
    again = pattern.layout(layout.mesh)
    assert (again.shape, again.partial, again.flat) == (layout.shape, layout.partial, layout.flat)
    assert again.same_regions(layout)
    assert again.chains == layout.chains


@given(layouts())
def test_a_pattern_matches_the_layout_that_it_was_written_from(layout: Layout):
    pattern = parse(write(layout, equal=True))
    assert pattern.matches(layout)
    assert pattern.matches(pattern.layout(layout.mesh))


@given(layouts(), layouts())
def test_a_pattern_matches_where_regions_and_pending_sums_are_the_same_and_nowhere_else(one: Layout, other: Layout):
    other = Layout(one.mesh, one.shape, other.chains, (), one.flat) if _fits(one, other) else one
    same = one.same_regions(other) and set(one.partial) == set(other.partial)
    assert parse(write(one)).matches(other) == parse(write(other)).matches(one) == same


def _fits(one: Layout, other: Layout) -> bool:
    return len(one.shape) == len(other.shape) and set(other.split_axes) <= set(one.mesh.axes) and one.flat is None


@pytest.mark.parametrize(
    ("pattern", "layout", "matches"),
    [
        ("[*/tp/fsdp, *]", "[12/tp/fsdp, 12]", True),
        ("[*/tp/fsdp, *]", "[12/fsdp/tp, 12]", False),
        ("[*/fsdp/tp, *]", "[12/tp/fsdp, 12]", False),
        ("[*/tp, *]", "[12/tp, 7] =fsdp", True),
        ("[12, *]", "[13, 7]", False),
        ("[*, *]", "[13]", False),
        ("[*, *] +tp", "[13, 3]", False),
        ("[*, *]", "[13, 3] +tp", False),
        ("[*] +tp:max", "[13] +tp", False),
        ("[* /tp ]", "[1/tp]", True),
        ("[*/fsdp, *]", "[1/fsdp, 3]", True),
        ("[flat(10, 10)/fsdp]", "[flat(10, 10) at 0 of 100/fsdp]", True),
        ("[flat(10, 10)/fsdp]", "[flat(10, 10) at 40 of 200/fsdp]", False),
        ("[10, 10]", "[flat(10, 10)]", False),
        ("[]", "[]", True),
    ],
)
def test_a_star_stands_for_any_size_and_everything_else_for_itself(pattern: str, layout: str, matches: bool):
    assert parse(pattern).matches(parse(layout).layout(MESH)) == matches


def test_an_element_type_is_compared_where_both_name_one():
    layout = parse("[12/tp]").layout(MESH)
    assert parse("float32[*/tp]").matches(layout, "float32")
    assert parse("torch.float32[*/tp]").matches(layout, "float32")
    assert parse("float32[*/tp]").matches(layout)
    assert parse("[*/tp]").matches(layout, "bfloat16")
    assert not parse("float32[*/tp]").matches(layout, "bfloat16")


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("float32[12/tp/fsdp, 12]", "float32[12/tp/fsdp, 12]"),
        (" [ 12 / tp,12 ] =fsdp+ tp : max", "[12/tp, 12] =fsdp +tp:max"),
        ("[12,]", "[12]"),
        ("[]", "[]"),
        ("[012]", "[12]"),
        ("[((12/tp))/fsdp]", "[(12/tp)/fsdp]"),
        ("[(12)/tp]", "[(12)/tp]"),
        ("[((9/2/a)/b)/c]", "[((9/2/a)/b)/c]"),
        ("[flat(10, 10)/fsdp]", "[flat(10, 10)/fsdp]"),
        ("[flat() at 3 of 8/fsdp]", "[flat() at 3 of 8/fsdp]"),
        ("[12/flat]", "[12/flat]"),
        ("torch.float8_e4m3fn[12/at]", "float8_e4m3fn[12/at]"),
    ],
)
def test_spaces_and_idle_parentheses_are_free(text: str, written: str):
    assert str(parse(text)) == written


@pytest.mark.parametrize(
    ("placements", "text"),
    [
        ((StridedShard(0, 4), Shard(0)), "float32[12/tp/fsdp, 12]"),
        ((Shard(0), Shard(0)), "float32[12/fsdp/tp, 12]"),
        ((Partial(), Shard(1)), "float32[12, 12/tp] +fsdp"),
        ((Shard(1), Partial("avg")), "float32[12, 12/fsdp] +tp:avg"),
    ],
)
def test_placements_are_written_with_their_element_type(placements: tuple[Shard, ...], text: str):
    assert write(Layout.from_placements(MESH, (12, 12), placements), "float32") == text


def test_copies_are_named_where_it_helps():
    assert write(Layout.replicated(MESH, (12, 12)), equal=True) == "[12, 12] =fsdp =tp"


@pytest.mark.parametrize(
    ("text", "wanted", "column", "found"),
    [
        ("", "'[' or a dtype", 1, "the end"),
        ("12]", "'[' or a dtype", 1, "'12]'"),
        ("float32", "'['", 8, "the end"),
        ("float32 12]", "'['", 9, "'12]'"),
        ("[12", "',' or ']'", 4, "the end"),
        ("[12  ", "',' or ']'", 6, "the end"),
        ("[12 13]", "',' or ']'", 5, "'13]'"),
        ("[12;]", "',' or ']'", 4, "';]'"),
        ("[,]", "a number", 2, "',]'"),
        ("[-1]", "a number", 2, "'-1]'"),
        ("[tp/12]", "a number", 2, "'tp/12]'"),
        ("[²]", "a number", 2, "'²]'"),
        ("[٣]", "a number", 2, "'٣]'"),
        ("[12/]", "an axis or a number", 5, "']'"),
        ("[12/tp.a]", "an axis or a number", 5, "'tp.a]'"),
        ("[12/0]", "an axis, or a number from 1", 5, "'0]'"),
        ("[12/ 00/tp]", "an axis, or a number from 1", 6, "'00/tp]'"),
        ("[1234567890123456789]", "a number of at most 18 digits", 2, "'123456789012'"),
        ("[(12/tp]", "')'", 8, "']'"),
        ("[12)]", "',' or ']'", 4, "')]'"),
        ("[12]]", "'=' or '+'", 5, "']'"),
        ("[12] tp", "'=' or '+'", 6, "'tp'"),
        ("[12] =", "an axis", 7, "the end"),
        ("[12] +3", "an axis", 7, "'3'"),
        (
            "[12] +tp:foo",
            "one of sum, avg, max, min, product, band, bor, bxor, premul_sum",
            10,
            "'foo'",
        ),
        ("[flat]", "'('", 6, "']'"),
        ("[flat(3]", "',' or ')'", 8, "']'"),
        ("[flat(*)]", "a number", 7, "'*)]'"),
        ("[flat(3) at 4]", "'of'", 14, "']'"),
        ("[flat(3) of 4]", "']'", 10, "'of 4]'"),
        ("[flat(3), 4]", "']'", 9, "', 4]'"),
        ("[12,\n 13\n 14]", "',' or ']'", 11, "'14]'"),
    ],
)
def test_a_mistake_is_shown_at_its_column(text: str, wanted: str, column: int, found: str):
    with pytest.raises(NotationError) as caught:
        parse(text)
    assert caught.value.message == f"layout {text!r}: expected {wanted} at column {column}, found {found}"
    assert caught.value.hint == HINT


def test_a_star_needs_a_shape():
    with pytest.raises(NotationError) as caught:
        parse("[*/tp]").layout(MESH)
    assert caught.value.message == "a layout with * needs the shape of a tensor"
    assert caught.value.hint == "write the sizes, as in [12/tp, 12]"


@pytest.mark.parametrize("text", ["[*/tp, 3]", "[flat(3, 4)/tp]"])
def test_a_shape_that_does_not_fit_is_reported(text: str):
    with pytest.raises(NotationError) as caught:
        parse(text).layout(MESH, (12, 4))
    assert caught.value.message == f"layout {text} does not fit a tensor of shape [12, 4]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" + "1," * 33 + "]", f"layout '[{'1,' * 33}]' has 33 dims, more than 32"),
        ("[" + " " * 5000 + "]", f"layout '[{' ' * 79}'... has 5,002 characters, more than 4,096"),
    ],
)
def test_layouts_beyond_all_measure_are_reported_shortly(text: str, message: str):
    with pytest.raises(NotationError) as caught:
        parse(text)
    assert caught.value.message == message


@cases(1000)
@given(
    st.text(st.sampled_from("[]()/,*=+:. 0123tpfsdpflatatof\n²٣"), max_size=40)
    | st.lists(
        st.sampled_from(["[", "]", "(", ")", "/", ",", "*", "=", "+", ":", "12", "0", "tp", "flat", "at", "of", "max"]),
        max_size=24,
    ).map(" ".join)
    | st.text()
)
@example("[" + "(" * 4000)
@example("[12" + "/tp" * 1000 + "]")
@example("(" * 10_000)
def test_any_text_is_a_layout_or_an_error_of_shardviz(text: str):
    try:
        pattern = parse(text)
    except NotationError:
        return
    assert str(parse(str(pattern))) == str(pattern)
    try:
        pattern.layout(MESH).region((0, 0))
    except ShardvizError:
        return


@pytest.mark.parametrize(
    "piece", ["(", ")", "12/", "/tp", "=tp ", "9", " ", "x", "[", "*", "+tp:max ", "1,", "flat(", "²", "\n"]
)
def test_the_time_to_refuse_a_text_does_not_grow_with_it_beyond_a_page(piece: str):
    started = time.process_time()
    for head in ("", "[", "[12", "[12]", "[flat("):
        with pytest.raises(NotationError):
            parse(head + piece * (1_000_000 // len(piece)))
        with pytest.raises(NotationError):
            parse(head + (piece * 4000)[: 4000 - len(head)] + "\0")
    assert time.process_time() - started < 0.5
