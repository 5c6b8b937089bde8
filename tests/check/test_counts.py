"""Ids that are lost or held too often, and ids that are not the tensor's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.check.checking import arange, check_made, kinds
from tests.dumps import Made

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    Spans = Sequence[tuple[int, int]]


def cut(spans: Spans, rows: int, columns: int = 2) -> Made:
    """Return a plain tensor of which each rank has a span of the rows."""
    ids = {rank: arange(rows, columns)[start:stop] for rank, (start, stop) in enumerate(spans)}
    return Made(None, ids=ids, shape=(rows, columns))


BLOCKS = ((0, 2), (1, 3), (3, 5), (4, 6))
"""The blocks of eight that twelve rows of each of four ranks lie in."""


@pytest.mark.parametrize(
    ("mesh", "name", "held", "finer"),
    [
        ("tp=4", "up.scale", cut(BLOCKS, 6), {"up.weight": "[48/tp, 2]"}),
        ("tp=4", "up.scale", cut(BLOCKS, 6), {"up.weight": "[2, 48/tp]"}),
        ("tp=4", "up.scale", cut(((0, 2), (1, 3), (2, 4), (3, 5)), 5), {"up.weight": "[40/tp, 2]"}),
        ("tp=4", "up.scale", cut(BLOCKS, 6), {"up.weight": cut(((0, 12), (12, 24), (24, 36), (36, 48)), 48)}),
        ("dp=2,tp=4", "up.scale", cut((*BLOCKS, *BLOCKS), 6), {"up.weight": "[48/tp, 2]"}),
        ("tp=2", "attn.k.weight", cut(((0, 8), (4, 12)), 12), {"attn.q.weight": "[24/tp, 2]"}),
    ],
)
def test_blocks_that_parts_of_a_finer_tensor_share_are_right(
    tmp_path: Path, mesh: str, name: str, held: Made, finer: dict[str, Made | str]
) -> None:
    assert kinds(check_made(tmp_path, mesh, {**finer, name: held})) == []


@pytest.mark.parametrize(
    ("mesh", "name", "held", "finer"),
    [
        ("tp=4", "up.scale", cut(BLOCKS, 6), {}),
        ("tp=4", "up.scale", cut(BLOCKS, 6), {"up.bias": "[6/tp]"}),
        ("tp=4", "up.scale", cut(BLOCKS, 6), {"other.layers.up.weight": "[48/tp, 2]"}),
        ("tp=4", "up.scale", cut(((0, 2), (2, 4), (3, 5), (4, 6)), 6), {"up.weight": "[48/tp, 2]"}),
        ("tp=2", "up.scale", cut(((0, 5), (1, 6)), 6), {"up.weight": "[48/tp, 2]"}),
        ("tp=4", "up.scale", cut((BLOCKS[1], BLOCKS[0], *BLOCKS[2:]), 6), {"up.weight": "[48/tp, 2]"}),
    ],
)
def test_parts_that_overlap_otherwise_are_found(
    tmp_path: Path, mesh: str, name: str, held: Made, finer: dict[str, Made | str]
) -> None:
    report = check_made(tmp_path, mesh, {**finer, name: held})
    assert report.findings
    assert {finding.tensor for finding in report.findings} == {name}
