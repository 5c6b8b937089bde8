"""Any healthy dump is quiet, and any tensor that is not where it is claimed is found: generated ones."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardviz.check.order.infer.layout import holds, infer_layout
from shardviz.check.run import check_dump
from shardviz.layout.layout import Layout
from shardviz.layout.notation import write
from tests.dumps import Made, make_dump
from tests.lanes import cases
from tests.layout.layouts import layouts, placed, placed_whole

if TYPE_CHECKING:
    from shardviz.check.report import Report
    from shardviz.layout.mesh import Mesh
    from shardviz.layout.placements import Placement

Placed = tuple["Mesh", tuple[int, ...], tuple["Placement", ...]]


def checked(mesh: Mesh, **tensors: Made | str) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        return check_dump(make_dump(Path(folder) / "a.shardviz", mesh, tensors))


@cases(40)
@given(placed())
def test_what_holds_what_it_claims_is_quiet(made: Placed) -> None:
    mesh, shape, placements = made
    layout = Layout.from_placements(mesh, shape, placements)
    report = checked(mesh, w=write(layout), v="[3]")
    assert (report.findings, report.not_checked) == ((), ())


@cases(60)
@given(placed_whole(), st.data())
def test_what_holds_another_layout_than_it_claims_is_found(made: Placed, data: st.DataObject) -> None:
    mesh, shape, placements = made
    claimed = Layout.from_placements(mesh, shape, placements)
    held = Layout.from_placements(mesh, shape, data.draw(st.permutations(placements)))
    wrong = not holds(claimed, {coord: held.region(coord) for coord in mesh.coords()})
    report = checked(mesh, w=Made(write(claimed), held=write(held)))
    assert bool(report.findings) == wrong, report
    assert not report.not_checked


@cases(40)
@given(placed_whole(), st.integers(0, 1 << 32))
def test_elements_exchanged_between_any_two_places_are_found(made: Placed, seed: int) -> None:
    mesh, shape, placements = made
    layout = Layout.from_placements(mesh, shape, placements)
    size = int(np.prod(shape))
    content = np.arange(1, size + 1)
    one, other = np.random.default_rng(seed).choice(size, 2, replace=False)
    content[[one, other]] = content[[other, one]]
    ids = {rank: content[region.flat_ids(shape)] for rank, region in layout.regions()}
    report = checked(mesh, w=Made(write(layout), ids=ids))
    assert [finding.kind for finding in report.findings] in (["misordered"], ["misordered-within-shard"])


@cases(150)
@given(layouts())
def test_any_layout_of_the_notation_is_inferred_from_what_ranks_hold(layout: Layout) -> None:
    held = {coord: layout.region(coord) for coord in layout.mesh.coords()}
    if layout.flat is None:
        found = infer_layout(layout.mesh, layout.shape, held)
        assert found is not None, write(layout)
        assert holds(found, held)
