"""Make a dump and check it in one call, for the tests of the families."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.run import check_dump
from shardviz.layout.mesh import Mesh, parse_mesh
from shardviz.layout.notation import parse
from tests.dumps import Made, make_dump

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from shardviz.check.report import Report
    from shardviz.explain.finding import Finding
    from shardviz.layout.layout import Layout


def check_made(path: Path, mesh: str | Mesh, tensors: Mapping[str, Made | str]) -> Report:
    grid = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    return check_dump(make_dump(path / "made.shardviz", grid, tensors))


def only(report: Report) -> Finding:
    assert len(report.findings) == 1, report.findings
    return report.findings[0]


def kinds(report: Report) -> list[str]:
    return [finding.kind for finding in report.findings]


def shards_of(content: NDArray[np.int64], claimed: str, mesh: str) -> dict[int, NDArray[np.int64]]:
    """Cut an array of ids as a claimed layout says, one part a rank."""
    layout: Layout = parse(claimed).layout(parse_mesh(mesh))
    flat = content.ravel()
    return {rank: flat[region.flat_ids(layout.shape)] for rank, region in layout.regions()}


def arange(*shape: int) -> NDArray[np.int64]:
    """Return ids from 1 in the given shape."""
    return np.arange(1, int(np.prod(shape)) + 1).reshape(shape)


def reordered(content: NDArray[np.int64], claimed: str, mesh: str) -> Made:
    """Return a tensor that claims a layout but is the shards of `content`."""
    return Made(claimed, ids=shards_of(content, claimed, mesh))
