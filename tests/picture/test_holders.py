"""Windows of holders are compared with the layouts laid out element by element."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardviz.dump.dump import dump_of
from shardviz.dump.read import read_files
from shardviz.layout.layout import Layout
from shardviz.layout.mesh import parse_mesh
from shardviz.layout.notation import parse
from shardviz.picture.model.by_layout import LayoutHolders, is_whole
from shardviz.picture.model.drawing import nest
from shardviz.picture.model.holders import Holders, Plane, mask_of, ranks_in_words, ranks_of, ranks_text
from shardviz.picture.model.sides import Sides, sides_of
from tests.dumps import Made, make_dump
from tests.lanes import cases
from tests.layout.layouts import layouts
from tests.plans import make_plan

MESH = parse_mesh("fsdp=2,tp=3")
LAYOUTS = [
    "[7, 5]",
    "[7/tp, 5]",
    "[7/tp/fsdp, 5]",
    "[12/fsdp/tp, 4]",
    "[7/fsdp, 5/tp]",
    "[9/3/tp, 4]",
    "[1/fsdp, 4]",
    "[5/tp]",
    "[]",
    "[4, 3/tp, 5/fsdp]",
    "[flat(5, 3)/fsdp/tp]",
    "[flat(4, 2) at 3 of 18/tp]",
]


def holders_of(text: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Holders, dict[tuple[int, ...], int]]:
    path = make_dump(tmp_path_factory.mktemp("dump") / "d.shardviz", MESH, {"w": text})
    dump = dump_of(read_files(path))
    sides = sides_of(dump, dump.tensors[0])
    layout = parse(text).layout(MESH)
    masks = np.zeros(sides.holders.shape, object)
    for rank, region in layout.regions():
        masks.ravel()[region.flat_ids(layout.index_shape).ravel()] |= 1 << rank | 1 << sides.shift + rank
    return sides.holders, dict(np.ndenumerate(masks))


@pytest.mark.parametrize("text", LAYOUTS)
def test_every_element_has_the_ranks_that_the_layout_gives_it(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    holders, masks = holders_of(text, tmp_path_factory)
    assert {index: holders.at(index) for index in masks} == masks


@pytest.mark.parametrize("text", [text for text in LAYOUTS if "flat" not in text])
@given(data=st.data())
@cases(20)
def test_a_cell_of_many_elements_knows_all_the_holders_that_its_elements_have(
    text: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    holders, masks = holders_of(text, tmp_path_factory)
    dims = data.draw(st.permutations(range(len(holders.shape))))
    plane = Plane(dims[0], dims[1], tuple(data.draw(st.integers(0, size - 1)) for size in holders.shape))
    rows, cols = (data.draw(spans(holders.shape[dim])) for dim in dims[:2])
    window = holders.window(plane, rows, cols)
    for i, row in enumerate(rows):
        for j, col in enumerate(cols):
            cell = []
            for y in range(*row):
                for x in range(*col):
                    index = list(plane.at)
                    index[plane.rows], index[plane.cols] = y, x
                    cell.append(masks[tuple(index)])
            assert window.masks[window.codes[i, j]] == set(cell)


@st.composite
def spans(draw: st.DrawFn, size: int) -> np.ndarray:
    found = draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(1, size)), min_size=1, max_size=4))
    return np.array([(min(a, b - 1), max(a + 1, b)) for a, b in found], np.int64)


def test_scattered_ids_are_drawn_where_they_are(tmp_path_factory: pytest.TempPathFactory) -> None:
    ids = {0: np.array([[6, 1], [3, 0]]), 1: np.array([[2, 5], [-1, 4]])}
    path = make_dump(
        tmp_path_factory.mktemp("dump") / "d.shardviz", parse_mesh("tp=2"), {"w": Made("[3, 2/tp]", ids=ids)}
    )
    dump = dump_of(read_files(path))
    sides = sides_of(dump, dump.tensors[0])
    assert [sides.at(index).held for index in np.ndindex(3, 2)] == [1, 2, 1, 2, 2, 1]


def test_a_rank_whose_file_is_missing_is_marked_but_not_as_in_another_place(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = make_dump(tmp_path_factory.mktemp("dump") / "d.shardviz", parse_mesh("tp=3"), {"w": "[6/tp, 2]"})
    (path / "rank_00001.json").unlink()
    dump = dump_of(read_files(path))
    sides = sides_of(dump, dump.tensors[0])
    assert [ranks_text(sides.at((row, 0)).claimed) for row in (0, 2, 4)] == ["0", "1", "2"]
    assert [ranks_text(sides.at((row, 0)).held) for row in (0, 2, 4)] == ["0", "1", "2"]
    assert [sides.at((row, 0)).is_wrong for row in (0, 2, 4)] == [False, True, False]
    assert not any(sides.at((row, 0)).different for row in (0, 2, 4))


def test_a_cell_of_many_elements_is_different_if_any_of_them_is(tmp_path_factory: pytest.TempPathFactory) -> None:
    swapped = Made("[12/fsdp/tp, 12]", "[12/tp/fsdp, 12]")
    path = make_dump(tmp_path_factory.mktemp("dump") / "d.shardviz", parse_mesh("fsdp=2,tp=2"), {"w": swapped})
    dump = dump_of(read_files(path))
    sides = sides_of(dump, dump.tensors[0])
    rows = np.array([[0, 12], [0, 3], [2, 4], [9, 12]])
    window = sides.holders.window(Plane(0, 1, (0, 0)), rows, np.array([[0, 12]]))
    assert [sides.cell(window.masks[code]).different for code in window.codes[:, 0]] == [True, False, True, False]


@given(layouts(), st.data())
@cases(200)
def test_by_a_layout_alone_a_cell_has_the_ranks_that_its_regions_have(layout: Layout, data: st.DataObject) -> None:
    assume(layout.flat is None and all(layout.shape))
    shape, shift = (1,) * (2 - len(layout.shape)) + layout.shape, layout.mesh.size
    own = data.draw(st.sampled_from([*map(frozenset, (layout.mesh.ranks, *layout.mesh.groups(*layout.split_axes)))]))
    assert is_whole(layout, own)
    regions = {region: mask_of(own & {*ranks}) for region, ranks in layout.holders().items() if all(region.dims)}
    one, other = LayoutHolders.of(layout, own), Holders(shape, regions, {})
    assert dict(one.regions) == regions
    dims = data.draw(st.permutations(range(len(shape))))
    plane = Plane(dims[0], dims[1], tuple(data.draw(st.integers(0, size - 1)) for size in shape))
    rows, cols = (data.draw(spans(shape[dim])) for dim in dims[:2])
    cells = []
    for holders in (one, other):
        sides = Sides(holders, shift, has_claimed=True, has_held=False, mesh=layout.mesh, axes=layout.nested_axes)
        window = holders.window(plane, rows, cols)
        cells.append([[sides.cell(window.masks[code]) for code in line] for line in window.codes.tolist()])
        cells.append([holders.edges(dim).tolist() for dim in range(len(shape))])
        cells.append([[level.tolist() for level in nest(sides, dim)] for dim in range(len(shape))])
    assert cells[:3] == cells[3:]


def test_ranks_that_lack_a_part_of_a_layout_do_not_hold_it_whole() -> None:
    layout = parse("[12/tp, 4]").layout(MESH)
    assert is_whole(layout, frozenset({0, 1, 2}))
    assert not is_whole(layout, frozenset({0, 1, 3, 4})), "tp=2 is missing"
    assert not is_whole(layout, frozenset({0, 1, 2, 3})), "no product of positions"
    assert is_whole(parse("[4, 4]").layout(MESH), frozenset({4}))
    assert not is_whole(parse("[4, 4]").layout(MESH), frozenset({9})), "none of them is on the mesh"
    assert not is_whole(parse("[flat(4, 2)/tp]").layout(MESH), frozenset(MESH.ranks))


def test_a_plan_of_many_parts_has_no_set_of_ranks_for_each_before_it_is_asked(tmp_path: Path) -> None:
    mesh = parse_mesh("fsdp=2048,tp=8")
    path = make_plan(tmp_path / "many", mesh, [{"w": ("[131072/tp/fsdp, 64]", mesh)}])
    dump = dump_of(read_files(path))
    tracemalloc.start()
    sides = sides_of(dump, dump.tensors[0])
    cell = sides.cell(sides.holders.window(Plane(0, 1, (0, 0)), np.array([[0, 16384]]), np.array([[0, 64]])).masks[0])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert ranks_text(cell.claimed) == "0…16376 step 8"
    assert cell.claimed_mixed
    assert peak < 16 << 20, "the sets alone would be 32 MiB"


def test_ranks_are_written_as_spans() -> None:
    assert ranks_text(mask_of([0, 1, 2, 5, 7, 8])) == "0-2,5,7-8"
    assert ranks_of(mask_of([3, 1000])) == (3, 1000)
    assert [ranks_in_words(ranks) for ranks in ((3,), (0, 1, 2, 8))] == ["rank 3", "ranks 0-2,8"]
    assert ranks_in_words(range(0, 2048, 2), 20) == "ranks 0…2046 step 2"
    assert ranks_in_words(range(0, 2048, 2), 10) == "1,024 ranks", "a range is not cut in two"
    assert ranks_in_words([0, 3, 7, 8, 20], 6) == "ranks 0,3,..."
