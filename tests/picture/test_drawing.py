"""Blocks are compared with the layouts laid out element by element."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardviz.layout.mesh import parse_mesh
from shardviz.layout.notation import parse
from shardviz.picture.model.drawing import Budget, draw
from shardviz.picture.model.holders import Holders, mask_of
from shardviz.picture.model.labels import ranks_label, shared_coords
from shardviz.picture.model.sides import Sides
from shardviz.picture.model.subject import of_layout
from tests.lanes import cases

if TYPE_CHECKING:
    from shardviz.layout.layout import Layout

MESH = parse_mesh("fsdp=2,tp=3")
CHAINS = ["", "/fsdp", "/tp", "/tp/fsdp", "/fsdp/tp", "/3/tp", "/2/fsdp"]
BUDGETS = [Budget(), Budget(4, 4), Budget(5, 3), Budget(8, 8)]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    sizes = draw(st.lists(st.integers(1, 14), min_size=1, max_size=3))
    split = draw(st.integers(0, len(sizes) - 1))
    dims = [f"{size}{draw(st.sampled_from(CHAINS))}" if dim == split else str(size) for dim, size in enumerate(sizes)]
    return parse(f"[{', '.join(dims)}]").layout(MESH)


def both_sides(claimed: Layout, held: Layout) -> Sides:
    regions: dict = {}
    for shift, layout in ((0, claimed), (6, held)):
        for rank, region in layout.regions():
            if region.size:
                regions[region] = regions.get(region, 0) | 1 << rank + shift
    shape = (1,) * (2 - len(claimed.shape)) + claimed.shape
    return Sides(Holders(shape, regions, {}), 6, True, True)


def by_element(layout: Layout) -> np.ndarray:
    masks = np.zeros(layout.shape, object)
    for rank, region in layout.regions():
        masks.ravel()[region.flat_ids(layout.shape).ravel()] |= 1 << rank
    return masks.reshape((1,) * (2 - len(layout.shape)) + layout.shape)


@given(st.data())
@cases(150)
def test_every_block_says_who_holds_its_elements_and_whether_that_is_as_claimed(data: st.DataObject) -> None:
    claimed = data.draw(layouts())
    chain = data.draw(st.sampled_from(CHAINS))
    held = parse(f"[{claimed.shape[0]}{chain}{''.join(f', {size}' for size in claimed.shape[1:])}]").layout(MESH)
    budget = data.draw(st.sampled_from(BUDGETS))
    drawing = draw(both_sides(claimed, held), claimed.shape, budget)
    one, other = by_element(claimed), by_element(held)
    drawn = tuple(one.ndim - len(claimed.shape) + dim for dim in drawing.drawn)
    rows, cols = drawn if len(drawn) == 2 else (0, 1)
    for panel in drawing.panels:
        assert len(panel.rows) <= budget.rows
        assert len(panel.cols) <= budget.cols
        for i, row in enumerate(panel.rows):
            for j, col in enumerate(panel.cols):
                at = [slice(None)] * one.ndim
                at[rows], at[cols] = slice(row.start, row.stop), slice(col.start, col.stop)
                for dim, span in panel.at:
                    at[dim] = slice(span.start, span.stop)
                in_one, in_other = one[tuple(at)].ravel(), other[tuple(at)].ravel()
                assert panel.claimed[i][j].ranks == np.bitwise_or.reduce(in_one)
                assert panel.held[i][j].ranks == np.bitwise_or.reduce(in_other)
                assert panel.claimed[i][j].is_mixed == (len(set(in_one)) > 1)
                assert panel.differs[i][j] == (in_one != in_other).any()


@given(layouts(), st.sampled_from(BUDGETS))
@cases(100)
def test_spans_cover_each_drawn_dim_once_and_count_the_parts_that_are_not_shown(layout: Layout, budget: Budget) -> None:
    sides = of_layout(layout).sides
    whole = draw(sides, layout.shape, Budget(1000, 1000))
    for panel, full in zip(draw(sides, layout.shape, budget).panels, whole.panels, strict=False):
        for spans, all_spans in ((panel.rows, full.rows), (panel.cols, full.cols)):
            assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
            assert spans[-1].stop == all_spans[-1].stop
            assert sum(span.parts for span in spans) == len(all_spans)


def test_the_first_difference_is_shown_wherever_it_is() -> None:
    mesh = parse_mesh("tp=64")
    regions = {
        region: 1 << rank | 1 << (64 + (rank ^ (rank >= 40)))
        for rank, region in parse("[64/tp, 2]").layout(mesh).regions()
    }
    sides = Sides(Holders((64, 2), regions, {}), 64, True, True)
    (panel,) = draw(sides, (64, 2), Budget(rows=10)).panels
    shown = [
        row.start for row, differs in zip(panel.rows, panel.differs, strict=True) if row.parts == 1 and any(differs)
    ]
    assert shown[:2] == [40, 41]


def test_ranks_are_named_by_number_then_by_coordinate_then_counted() -> None:
    mesh = parse_mesh("fsdp=16,tp=4")
    column = mask_of(range(1, 64, 4))
    assert ranks_label(mask_of([0, 1, 2, 9]), mesh, 20) == "0-2,9"
    assert ranks_label(column, mesh, 20) == "tp=1"
    assert ranks_label(column, None, 20) == "16 ranks"
    assert ranks_label(mask_of([*range(1, 64, 4), 2]), mesh, 5) == "17r"
    assert ranks_label(0, mesh, 20) == "nobody"


def test_shared_coordinates_are_given_only_where_they_are_exact() -> None:
    mesh = parse_mesh("a=2,b=3,c=2")
    assert shared_coords(mask_of(range(12)), mesh) == "all ranks"
    assert shared_coords(mask_of([0, 2, 4]), mesh) == "a=0 c=0"
    assert shared_coords(mask_of([0, 1, 4, 5]), mesh) == "a=0 b=0,2"
    assert shared_coords(mask_of([0, 3]), mesh) == ""
    assert shared_coords(mask_of([0, 12]), mesh) == ""
