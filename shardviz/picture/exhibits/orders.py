"""Elements in another order than expected, position by position: along a shard, or along a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.rules.sequence import positions_of
from shardviz.layout.region import Region
from shardviz.picture.exhibits.exhibit import MOST_ROWS, Cell, Exhibit, Row, exhibit, plain, title_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.check.finding import Finding
    from shardviz.check.order.case import Case
    from shardviz.check.order.laid_out import LaidOut
    from shardviz.dump.dump import Dump
    from shardviz.layout.mesh import Coord

MOST_POSITIONS = 12
MOST_SHARDS = 32
"""Shards that are looked at for one that is out of order."""

MAX_ELEMENTS = 1 << 20
"""Larger shards are not laid out element by element for a picture."""


def along_shards(dump: Dump, finding: Finding, cases: LaidOut) -> Exhibit | None:
    """Return the indices that local positions should hold and do hold, where a shard is not in rising order.

    Blocks on the wrong ranks are seen on the map; this is for what the map cannot show, the order within a shard.
    """
    tensor = dump.stamped.get(finding.tensor)
    for case in cases.cases(tensor, finding.tensor) if tensor is not None else ():
        lines = {coord: line for coord in list(case.shards)[:MOST_SHARDS] if (line := _line(case, coord)) is not None}
        if any(np.any(np.diff(held) < 0) for _, _, held in lines.values()):
            return _positions(case, lines)
    return None


Line = tuple[int, "NDArray[np.int64]", "NDArray[np.int64]"]
"""The dim, and along it the indices that a shard should hold and holds."""


def _line(case: Case, coord: Coord) -> Line | None:
    """Return the dim along which a shard first differs, through the first element that does."""
    if case.claimed is None or case.claimed.flat is not None:
        return None
    due = case.claimed.region(coord)
    if due.size > MAX_ELEMENTS or due.shape != case.shards[coord].body.local_shape:
        return None
    claimed, held = due.flat_ids(case.shape), case.local_ids(coord) - 1
    differs = (claimed != held) & (held >= 0)
    if claimed.shape != held.shape or not differs.any():
        return None
    at = np.unravel_index(int(np.argmax(differs)), claimed.shape)
    places = [np.unravel_index(ids[at], case.shape) for ids in (claimed, held)]
    dim = next(dim for dim, pair in enumerate(zip(*places, strict=True)) if pair[0] != pair[1])
    through = tuple(slice(None) if other == dim else index for other, index in enumerate(at))
    along = [np.unravel_index(np.maximum(ids[through], 0), case.shape)[dim] for ids in (claimed, held)]
    return dim, along[0], along[1]


def _positions(case: Case, lines: dict[Coord, Line]) -> Exhibit | None:
    dim = next(iter(lines.values()))[0]
    rows = []
    for coord, (_, claimed, held) in list(lines.items())[: MOST_ROWS // 2]:
        pairs = list(zip(claimed[:MOST_POSITIONS].tolist(), held[:MOST_POSITIONS].tolist(), strict=True))
        rows.append(Row(f"{title_of([case.rank(coord)])} should hold", plain(due for due, _ in pairs)))
        rows.append(Row("holds", tuple(Cell(str(has), has != due) for due, has in pairs)))
    count = max(len(row.cells) for row in rows)
    heads = [str(position) for position in range(count)]
    return exhibit(f"the index along dim {dim} that each local position has", ("position", *heads), rows)


def along_sequence(finding: Finding, cases: LaidOut) -> Exhibit | None:
    """Return the positions of a sequence that each rank has of this tensor, and of the one that it is held against."""
    found = positions_of(cases)
    own = next((one for one in found if one.name == finding.tensor), None)
    usual = next((one for one in found if finding.intended.startswith(f"as {one.name}:")), None)
    if own is None or usual is None:
        return None
    rows = []
    for rank in sorted(own.held.keys() & usual.held.keys()):
        due, has = (str(Region((one.held[rank],))) for one in (usual, own))
        rows.append(Row(title_of([rank]), (Cell(due), Cell(has, rank in finding.ranks))))
    rows.sort(key=lambda row: not row.cells[-1].is_wrong)
    return exhibit("positions along the sequence", ("", usual.name, own.name), rows)
