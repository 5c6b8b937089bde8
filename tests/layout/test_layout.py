"""The oracle by itself: what it refuses, and that every way of spelling a layout comes back as the same regions."""

from __future__ import annotations

import math
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardviz.errors import LayoutError, MeshError
from shardviz.layout.layout import FlatView, Layout
from shardviz.layout.mesh import Mesh, parse_mesh
from shardviz.layout.notation import parse, write
from shardviz.layout.placements import Partial, Placement, Replicate, Shard, StridedShard, parse_placement, spell
from shardviz.layout.region import Region
from shardviz.layout.splits import JOIN
from tests.lanes import cases
from tests.layout.layouts import layouts, placed

MESH = parse_mesh("fsdp=2,tp=4")


@cases(600)
@given(placed())
def test_what_torch_can_say_comes_back_from_the_layout_in_words_that_mean_the_same(
    case: tuple[Mesh, tuple[int, ...], tuple[Placement, ...]],
):
    mesh, shape, placements = case
    layout = Layout.from_placements(mesh, shape, placements)
    spelled = layout.placements()
    assert spelled is not None
    assert Layout.from_placements(mesh, shape, spelled).same_regions(layout)
    assert [p for p in spelled if isinstance(p, Partial)] == [p for p in placements if isinstance(p, Partial)]


@cases(300)
@given(layouts())
def test_a_layout_that_torch_spells_means_what_torch_reads(layout: Layout):
    spelled = layout.placements()
    if spelled is not None:
        again = Layout.from_placements(layout.mesh, layout.shape, spelled, layout.flat)
        assert list(again.regions()) == list(layout.regions())


@given(layouts())
def test_copies_aside_every_element_is_held_once(layout: Layout):
    numel = math.prod(layout.index_shape)
    held: Counter[int] = Counter()
    for _, region in layout.regions():
        held.update(region.flat_ids(layout.index_shape).ravel().tolist())
    split = math.prod(layout.mesh.axis_size(axis) for axis in layout.split_axes)
    copies = layout.mesh.size // split
    assert held == Counter(dict.fromkeys(range(numel), copies))


@given(layouts(), layouts())
def test_the_same_regions_are_those_that_are_equal_everywhere(one: Layout, other: Layout):
    moved = Layout(one.mesh, other.shape, ((),) * len(other.shape))
    for a, b in ((one, other), (one, moved), (one, one)):
        everywhere = a.mesh == b.mesh and a.index_shape == b.index_shape and list(a.regions()) == list(b.regions())
        assert a.same_regions(b) == b.same_regions(a) == everywhere


@given(layouts())
def test_what_is_worked_out_for_all_ranks_at_once_is_what_each_holds(layout: Layout):
    assert list(layout.regions()) == [(rank, layout.region_of_rank(rank)) for rank in layout.mesh.ranks]


@given(layouts())
def test_holders_name_every_rank_once(layout: Layout):
    holders = layout.holders()
    assert sorted(rank for ranks in holders.values() for rank in ranks) == sorted(layout.mesh.ranks)
    assert all(layout.region_of_rank(rank) == region for region in holders for rank in holders[region])


@given(st.integers(1, 8), st.sampled_from([(2, 4), (3, 2), (2, 2, 2), (2, 1, 3)]))
def test_an_even_size_needs_no_comparison_of_chains(times: int, shape: tuple[int, ...]):
    """The shortcut for even splits: FSDP over what was split before it, however many levels, reads as nesting."""
    mesh = Mesh(("a", "b", "c")[: len(shape)], shape)
    factors = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    label = [StridedShard(0, factor) if factor > 1 else Shard(0) for factor in factors]
    size = times * math.prod(shape)
    layout = Layout.from_placements(mesh, (size,), label)
    literal = Layout(mesh, (size,), (_literal(mesh, factors),))
    assert layout.same_regions(literal)
    assert JOIN not in layout.chains[0]


def _literal(mesh: Mesh, factors: list[int]) -> tuple[str | int, ...]:
    chain = [link for factor, axis in zip(factors, mesh.axes, strict=True) for link in (JOIN, factor, axis)]
    return tuple(chain[1:])


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("[12/tp, 12]", "(Replicate(), Shard(0))"),
        ("[12/fsdp/tp, 12]", "(Shard(0), Shard(0))"),
        ("[12/tp/fsdp, 12]", "(_StridedShard(0, split_factor=4), Shard(0))"),
        ("[24/3/tp, 8]", "(Replicate(), _StridedShard(0, split_factor=3))"),
        ("[24/3/tp/fsdp, 8]", "(_StridedShard(0, split_factor=12), _StridedShard(0, split_factor=3))"),
        ("[24/3/fsdp/tp, 8]", "(_StridedShard(0, split_factor=3), _StridedShard(0, split_factor=3))"),
        ("[12, 12] =fsdp", "(Replicate(), Replicate())"),
        ("[12, 12] +tp", "(Replicate(), Partial())"),
        ("[12/fsdp, 12] +tp:max", "(Shard(0), Partial('max'))"),
        ("[12/tp, 12/fsdp]", "(Shard(1), Shard(0))"),
        ("[(9/2/fsdp)/tp]", "(_StridedShard(0, split_factor=2), Shard(0))"),
        ("[(9/2/fsdp/tp)]", "(_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=2))"),
        ("[(12/fsdp)/tp]", "(Shard(0), Shard(0))"),
        ("[(12/tp)/fsdp]", "(_StridedShard(0, split_factor=4), Shard(0))"),
        ("[12/tp/3]", "(Replicate(), Shard(0))"),
        ("[12/3]", "(Replicate(), Replicate())"),
        ("[flat(10, 10)/fsdp]", "(Shard(0), Replicate())"),
        ("[]", "(Replicate(), Replicate())"),
    ],
)
def test_a_layout_is_spelled_as_torch_does(text: str, spelled: str):
    placements = parse(text).layout(MESH).placements()
    assert placements is not None
    assert spell(placements) == spelled


def test_uneven_segments_that_torch_cannot_say_have_no_spelling():
    assert parse("[(9/2/tp)/fsdp]").layout(MESH).placements() is None


def test_the_original_bug_is_two_layouts_of_one_label():
    claimed = Layout.from_placements(MESH, (12, 12), (Shard(0), Shard(0)))
    held = Layout.from_placements(MESH, (12, 12), (StridedShard(0, 4), Shard(0)))
    assert (write(claimed), write(held)) == ("[12/fsdp/tp, 12]", "[12/tp/fsdp, 12]")
    assert not claimed.same_regions(held)


def test_a_flat_parameter_is_its_own_stretch_of_the_concatenation():
    """FSDP1 splits a 10 x 10 weight over four ranks into four shards of 25."""
    layout = parse("[flat(10, 10)/tp]").layout(MESH)
    assert [region.size for _, region in layout.regions()] == [25] * 8
    stretch = Layout(MESH, (40,), (("tp",),), flat=FlatView((3, 5), 12))
    ids = [region.flat_ids(stretch.index_shape).tolist() for _, region in stretch.regions()][:4]
    assert ids == [[], list(range(8)), list(range(8, 15)), []]
    assert np.concatenate(ids).tolist() == list(range(15))


def test_a_flat_parameter_that_is_not_split_is_the_same_wherever_it_stands():
    one = Layout(MESH, (100,), ((),), flat=FlatView((10, 10)))
    other = Layout(MESH, (300,), ((),), flat=FlatView((10, 10), 150))
    assert one.same_regions(other)


@pytest.mark.parametrize(
    ("shape", "placements", "message"),
    [
        ((4,), (Shard(0),), "1 placement for a mesh of 2 axes (fsdp=2, tp=4)"),
        ((4,), (Shard(1), Replicate()), "Shard(1) on a tensor of 1 dim"),
        ((4,), (Shard(-1), Replicate()), "Shard(-1) on a tensor of 1 dim"),
        ((), (Shard(0), Replicate()), "Shard(0) on a tensor of 0 dims"),
        (
            (4,),
            (StridedShard(0, 0), Replicate()),
            "_StridedShard(0, split_factor=0): a split factor is 1 to 65,536",
        ),
        (
            (4,),
            (StridedShard(0, 10**9), Replicate()),
            "_StridedShard(0, split_factor=1000000000): a split factor is 1 to 65,536",
        ),
        ((-4,), (Replicate(), Replicate()), "a dim has size -4, expected 0 or more"),
    ],
)
def test_placements_that_do_not_fit_are_refused(
    shape: tuple[int, ...], placements: tuple[Placement, ...], message: str
):
    with pytest.raises(LayoutError) as caught:
        Layout.from_placements(MESH, shape, placements)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("[12/tp/tp]", "axis tp is used 2 times in one layout"),
        ("[12/tp, 12/tp]", "axis tp is used 2 times in one layout"),
        ("[12/tp] +tp", "axis tp is used 2 times in one layout"),
        ("[12/tp] =tp", "axis tp is marked as equal, but is also split or pending"),
        ("[12] +tp =tp", "axis tp is marked as equal, but is also split or pending"),
        ("[12/65537/tp]", "a dim is cut into 65,537 segments, expected 1 to 65,536"),
        ("[12/300/300/tp]", "a dim is cut into 90,000 segments, expected 1 to 65,536"),
        ("[flat(10, 10) at 1 of 100/tp]", "100 elements at 1 do not lie within a concatenation of shape [100]"),
        ("[flat(10, 10) at 0 of 0]", "100 elements at 0 do not lie within a concatenation of shape [0]"),
    ],
)
def test_layouts_that_cannot_be_are_refused(layout: str, message: str):
    with pytest.raises(LayoutError) as caught:
        parse(layout).layout(MESH)
    assert caught.value.message == message


def test_an_axis_that_the_mesh_does_not_have_is_refused():
    with pytest.raises(MeshError) as caught:
        parse("[12/pp]").layout(MESH)
    assert caught.value.message == "mesh (fsdp=2, tp=4) has no axis 'pp'"


def test_one_chain_a_dim():
    with pytest.raises(LayoutError) as caught:
        Layout(MESH, (4, 4), ((),))
    assert caught.value.message == "1 chains of splits for a tensor of 2 dims"


def test_a_split_factor_that_a_chain_would_need_but_no_label_may_have_is_no_spelling():
    mesh = parse_mesh("fsdp=2,a=512,b=512")
    assert Layout(mesh, (1 << 20,), (("a", "b", "fsdp"),)).placements() is None


def test_labels_on_a_great_mesh_are_read_in_no_time_even_where_nothing_divides():
    mesh = parse_mesh("a=1024,b=512")
    started = time.process_time()
    for size in range(1_000_003, 1_000_023):
        layout = Layout.from_placements(mesh, (size,), (StridedShard(0, 512), Shard(0)))
        assert layout.region((0, 0)).size > 0
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize("text", ["Shard(0)", "Replicate()", "Partial()", "Partial('max')"])
def test_a_placement_is_read_as_it_is_written(text: str):
    assert str(parse_placement(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "Shard()", "Shard(-1)", "Shard(٣)", "Shard(99999)", "Partial('foo')", "_StridedShard(0)", "Shard(0) ", "S(0)"],
)
def test_what_is_no_placement_is_reported(text: str):
    with pytest.raises(LayoutError) as caught:
        parse_placement(text)
    assert caught.value.message == f"{text!r} is not a placement"
    assert caught.value.hint == "Replicate(), Shard(0), _StridedShard(0, split_factor=2) or Partial()"


def test_regions_of_an_empty_shard_keep_the_other_dims():
    layout = parse("[2/tp, 3]").layout(MESH)
    assert layout.region((0, 3)) == Region(((), ((0, 3),)))
    assert layout.region((0, 3)).shape == (0, 3)
