"""Copies side by side, where they must be equal and are not, and shards that are equal where they must differ."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.laid_out import claimed_dims
from shardviz.check.values.copies import Copies
from shardviz.errors import ShardvizError
from shardviz.layout.region import Region, index_of
from shardviz.picture.exhibits.exhibit import MOST_CELLS, MOST_ROWS, Cell, Exhibit, Row, exhibit, plain, title_of
from shardviz.picture.model.palette import WRONG

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.dump.dump import Dump, Shard
    from shardviz.explain.finding import Finding

LOCAL = "local index"
"""The head of rows whose columns are counted within a shard, not within the tensor."""

DIGEST = 8
"""Characters of a digest that are shown where the dump has no values."""


def differing_copies(dump: Dump, finding: Finding) -> Exhibit | None:
    """Return the copies of each part of a tensor, around the first element that differs, those of most ranks first."""
    pair = next((pair for pair in finding.pairs if isinstance(pair, Copies)), None)
    return _side_by_side(dump, finding.tensor, pair.alike, pair.index) if pair is not None and pair.groups else None


def repeated_shards(dump: Dump, finding: Finding) -> Exhibit | None:
    """Return the first values of each shard beside the part that it claims."""
    tensor = next((one for one in dump.named(finding.tensor) if one.moment in ("initial", "step")), None)
    if tensor is None or tensor.claimed is None:
        return None
    at, claimed = tensor.index(finding.tensor), claimed_dims(tensor.claimed)
    mesh = dump.files.mesh
    alike: dict[tuple[str, str], list[int]] = {}  # copies of one part are equal by right
    for rank, shard in tensor.shards.items():
        part = str(Region(claimed[rank])) if rank in claimed else ""
        alike.setdefault((part, shard.digest(at)), []).append(rank)
    parts = Counter(digest for _, digest in alike)
    order = sorted(alike.items(), key=lambda one: parts[one[0][1]] < 2)
    most = MOST_ROWS // 2 if len(parts) == 1 and len(order) > MOST_ROWS else MOST_ROWS + 1
    rows = list[Row]()
    for (part, digest), ranks in order[:most]:
        texts = _texts(dump, tensor.shards[ranks[0]], finding.tensor, at, 0)
        cells = (Cell(part), *(Cell(text, parts[digest] > 1) for text in texts))
        rows.append(Row(title_of(ranks, mesh), cells, len(ranks)))
    heads = _heads(dump, tensor.first, finding.tensor, 0)
    caption = f"the first values of each shard: {WRONG} marks values of a different shard"
    left_out = sum(len(ranks) for _, ranks in order[most:])
    rest = "all with these values" if len(parts) == 1 else ""
    return exhibit(caption, (LOCAL, "claims", *heads), rows, left_out, noun="rank", rest=rest)


def _side_by_side(dump: Dump, name: str, groups: list[list[list[Shard]]], at: int) -> Exhibit | None:
    """Lay the copies of each part below each other, as far as there is room, and count the others."""
    first = groups[0][0][0]
    begin = _first_difference(dump, name, first, groups[0][1][0])
    rows, left_out = list[Row](), 0
    for group in groups:
        if len(rows) < MOST_ROWS:
            rows += _copy_rows(dump, name, group, at, begin)
        else:
            left_out += sum(map(len, group))
    heads = (LOCAL if _is_split(dump, first, name) else "", *_heads(dump, first, name, begin))
    each = ", part by part" if len(groups) > 1 else ""
    return exhibit(f"copies that must be equal{each}", heads, rows, left_out, noun="rank")


def _is_split(dump: Dump, shard: Shard, name: str) -> bool:
    """Whether a shard is less than the whole tensor, so that its indices are not the tensor's."""
    stamp = dump.stamps.get(name)
    whole = shard.layout.shape if shard.layout is not None else stamp.shape if stamp is not None else ()
    return tuple(shard.body.local_shape) != tuple(whole or shard.body.local_shape)


def _copy_rows(dump: Dump, name: str, group: list[list[Shard]], at: int, begin: int) -> list[Row]:
    """Return a row for each set of alike copies of one part, what differs from the first one's marked."""
    texts = [_texts(dump, shards[0], name, at, begin) for shards in group]
    return [
        Row(
            title_of([shard.rank for shard in shards], dump.files.mesh),
            tuple(Cell(text, text != due) for text, due in zip(row_texts, texts[0], strict=False)),
            len(shards),
            is_apart=shards is group[0],
        )
        for shards, row_texts in zip(group, texts, strict=True)
    ]


def _first_difference(dump: Dump, name: str, shard: Shard, other: Shard) -> int:
    ours, theirs = _values(dump, shard, name), _values(dump, other, name)
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return 0
    return int(np.argmax((ours != theirs).ravel()))


def _values(dump: Dump, shard: Shard, name: str) -> NDArray[np.float64] | None:
    try:
        return dump.values(shard, name)
    except ShardvizError:
        return None  # complex numbers, or a digest only


def _texts(dump: Dump, shard: Shard, name: str, at: int, begin: int) -> list[str]:
    """Return a few values from an element on; the digest where the dump has nothing else."""
    values = _values(dump, shard, name)
    if values is None:
        return [shard.digest(at)[:DIGEST]]
    return [f"{value:.6g}" for value in values.ravel()[begin : begin + MOST_CELLS].tolist()]


def _heads(dump: Dump, shard: Shard, name: str, begin: int) -> list[str]:
    values = _values(dump, shard, name)
    if values is None:
        return ["digest"]
    last = min(begin + MOST_CELLS, values.size)
    return [str(index_of(element, values.shape)) for element in range(begin, last)]


def untied(dump: Dump, finding: Finding) -> Exhibit | None:
    """Return the names of a broken tie before sharding, and on the ranks that have two tensors now."""
    stamp = dump.stamps.get(finding.tensor)
    if stamp is None or not stamp.tied_to:
        return None
    names = (stamp.tied_to, stamp.name)
    tied = [rank for rank in dump.files.ranks if rank not in finding.ranks]
    mesh = dump.files.mesh
    rows = [
        Row("before sharding", plain(("storage A", "storage A"))),
        *([Row(title_of(tied, mesh), plain(("storage A", "storage A")))] if tied else []),
        Row(title_of(finding.ranks, mesh), (Cell("storage A"), Cell("storage B", is_wrong=True))),
    ]
    return exhibit("whose storage each name has", ("", *names), rows)
