"""Blocks are compared with the layouts laid out element by element; boxes have lines where neighbors differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardviz.layout.mesh import parse_mesh
from shardviz.layout.notation import parse
from shardviz.picture.model.drawing import Budget, draw
from shardviz.picture.model.holders import Holders, mask_of
from shardviz.picture.model.mesh import rank_labels, ranks_label
from shardviz.picture.model.palette import Coloring
from shardviz.picture.model.sides import Sides
from shardviz.picture.model.subject import of_layout
from shardviz.picture.text.panels import CellBlocks, paint_boxes
from tests.lanes import cases

if TYPE_CHECKING:
    from shardviz.layout.layout import Layout
    from shardviz.picture.model.drawing import Span

MESH = parse_mesh("fsdp=2,tp=3")
CHAINS = ["", "/fsdp", "/tp", "/tp/fsdp", "/fsdp/tp", "/3/tp", "/2/fsdp"]
BUDGETS = [Budget(), Budget(4, 4), Budget(5, 3), Budget(8, 8)]


@st.composite
def layouts(draw: st.DrawFn, max_dims: int = 3) -> Layout:
    sizes = draw(st.lists(st.integers(1, 14), min_size=1, max_size=max_dims))
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
    rows, cols = drawn if len(drawn) == 2 else (1, 0)
    assert drawing.panels
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
    panels = draw(sides, layout.shape, budget).panels
    assert panels
    for panel, full in zip(panels, whole.panels, strict=False):  # slices that do not fit are left out
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


def by_grid(*axes: str) -> Coloring:
    return Coloring(parse_mesh("fsdp=16,tp=4"), axes)


def test_ranks_are_named_by_number_then_by_coordinate_then_counted() -> None:
    column = mask_of(range(1, 64, 4))
    assert ranks_label(mask_of([0, 1, 2, 9]), by_grid(), 20) == "0-2,9"
    assert ranks_label(column, by_grid(), 20) == "tp=1"
    assert ranks_label(column, Coloring(), 20) == "1…61 step 4"
    assert ranks_label(column, Coloring(), 8) == "16 ranks"
    assert ranks_label(mask_of([*range(1, 64, 4), 2]), by_grid(), 5) == "…"
    assert ranks_label(0, by_grid(), 20) == "nobody"


def test_a_block_of_many_parts_is_named_from_the_outer_split_inwards() -> None:
    column, row = mask_of(range(1, 64, 4)), mask_of(range(8, 12))
    assert ranks_label(column, by_grid("tp", "fsdp"), 30, many=True) == "tp=1 ▸ fsdp 0…15"
    assert ranks_label(row, by_grid("fsdp", "tp"), 30, many=True) == "fsdp=2 ▸ tp 0…3"
    assert ranks_label(mask_of(range(64)), by_grid("tp", "fsdp"), 30, many=True) == "tp 0…3 ▸ fsdp 0…15"
    assert ranks_label(column, by_grid("tp", "fsdp"), 10, many=True) == "tp=1"
    assert ranks_label(mask_of([0, 5]), by_grid("tp", "fsdp"), 30, many=True) == "0,5", "they are not a product"


def test_a_handful_of_ranks_is_named_by_its_numbers_also_where_they_are_a_product() -> None:
    assert ranks_label(mask_of([8, 9]), by_grid("fsdp", "tp"), 30, many=True) == "8-9"
    assert ranks_label(mask_of([0, 4, 8]), by_grid("fsdp", "tp"), 30, many=True) == "0,4,8"


def test_axes_along_which_a_block_is_copied_are_left_out() -> None:
    coloring = Coloring(parse_mesh("dp=2,fsdp=4,tp=2"), ("tp", "fsdp"))
    block = mask_of([rank for rank in range(16) if rank % 2])
    assert ranks_label(block, coloring, 40, many=True) == "tp=1 ▸ fsdp 0…3"


def test_shared_coordinates_are_given_only_where_they_are_exact() -> None:
    coloring = Coloring(parse_mesh("a=2,b=3,c=2"))

    def in_full(*ranks: int) -> set[str]:
        return {label for label in rank_labels(mask_of(ranks), coloring) if "=" in label or label == "all ranks"}

    assert in_full(*range(12)) == {"all ranks"}
    assert in_full(0, 2, 4) == {"a=0 c=0"}
    assert in_full(0, 1, 4, 5) == {"a=0 b=0,2"}
    assert in_full(0, 3) == in_full(0, 12) == set()


def nested(mesh: str, layout: str, rows: int) -> list[Span]:
    subject = of_layout(parse(layout).layout(parse_mesh(mesh)))
    (panel,) = draw(subject.sides, subject.shape, Budget(rows=rows)).panels
    return list(panel.rows)


def test_one_block_of_the_outer_split_is_opened_and_the_others_are_folded() -> None:
    rows = nested("fsdp=16,tp=4", "[640/tp/fsdp, 4]", 12)
    assert [str(span) for span in rows if span.is_block] == ["160:320", "320:480", "480:640"]
    assert [span.parts for span in rows if span.is_block] == [16, 16, 16]
    opened = [span for span in rows if not span.is_block]
    assert [str(span) for span in opened[:3]] == ["0:10", "10:20", "20:30"]
    assert sum(span.parts for span in opened) == 16
    assert len(rows) == 12


def test_too_many_blocks_are_joined_between_the_first_and_the_last() -> None:
    rows = nested("fsdp=16,tp=4", "[640/fsdp/tp, 4]", 12)
    assert [str(span) for span in rows[:4]] == ["0:10", "10:20", "20:30", "30:40"], "the first block is opened"
    assert [span.parts for span in rows if span.is_block] == [4] * (len(rows) - 5)
    (left_out,) = [span for span in rows if span.parts > 1 and not span.is_block]
    assert left_out.parts == 64 - 4 - 4 * (len(rows) - 5)


def test_segments_of_a_fused_weight_are_blocks() -> None:
    rows = nested("tp=16", "[480/3/tp, 4]", 10)
    assert [str(span) for span in rows if span.is_block] == ["160:320", "320:480"]


def test_parts_that_fit_are_not_folded() -> None:
    assert not any(span.is_block for span in nested("fsdp=16,tp=4", "[640/tp/fsdp, 4]", 64))
    assert not any(span.is_block for span in nested("tp=64", "[64/tp, 4]", 12)), "one split has no blocks"


def test_the_block_with_the_first_difference_is_the_one_that_is_opened() -> None:
    mesh = parse_mesh("fsdp=16,tp=4")
    layout = parse("[640/tp/fsdp, 4]").layout(mesh)
    swapped = {2 + 4 * 5: 2 + 4 * 6, 2 + 4 * 6: 2 + 4 * 5}
    regions = {region: 1 << rank | 1 << (64 + swapped.get(rank, rank)) for rank, region in layout.regions()}
    sides = Sides(Holders((640, 4), regions, {}), 64, True, True, mesh, axes=("tp", "fsdp"))
    (panel,) = draw(sides, (640, 4), Budget(rows=12)).panels
    assert [str(span) for span in panel.rows if span.is_block] == ["0:160", "160:320", "480:640"]
    shown = [span.start for span, differs in zip(panel.rows, panel.differs, strict=True) if any(differs)]
    assert shown[:2] == [370, 380]


@given(layouts(max_dims=1), st.sampled_from(BUDGETS))
@cases(50)
def test_a_line_is_drawn_downwards(layout: Layout, budget: Budget) -> None:
    (panel,) = draw(of_layout(layout).sides, layout.shape, budget).panels
    assert (panel.rows[-1].stop, len(panel.cols)) == (layout.shape[0], 1)


def _rows(boxes):
    return ["".join(row) for row in boxes.chars.tolist()]


def test_equal_neighbors_are_one_box():
    boxes = paint_boxes(np.array([[0, 1], [0, 0]]), CellBlocks.of_sizes([1, 1]), CellBlocks.of_sizes([2, 3]))
    assert _rows(boxes) == ["┌──┬───┐", "│  │   │", "│  └───┤", "│      │", "└──────┘"]


def test_rows_that_are_not_ruled_stand_close():
    boxes = paint_boxes(np.array([[0], [1]]), CellBlocks.of_sizes([1, 1], ruled=False), CellBlocks.of_sizes([1]))
    assert _rows(boxes) == ["┌─┐", "│ │", "│ │", "└─┘"]


def test_a_label_stands_in_the_middle_of_its_room():
    boxes = paint_boxes(np.array([[0]]), CellBlocks.of_sizes([1]), CellBlocks.of_sizes([8]))
    boxes.write_centred(1, 1, 8, "tp=1")
    assert _rows(boxes)[1] == "│  tp=1  │"


def test_a_label_is_cut_at_the_edge_of_the_picture():
    boxes = paint_boxes(np.array([[0]]), CellBlocks.of_sizes([1]), CellBlocks.of_sizes([3]))
    boxes.write(1, -2, "12345678")
    assert _rows(boxes)[1] == "34567"
