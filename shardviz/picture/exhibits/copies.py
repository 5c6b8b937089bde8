"""Exhibits that compare ranks: differing copies, foreign names, mismatched shapes, layouts."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.case import claimed_dims
from shardviz.check.order.rules.foreign import owners_of
from shardviz.check.ranks import differing
from shardviz.check.values.copies import Copies
from shardviz.errors import ShardvizError
from shardviz.layout.mesh import ranks_by
from shardviz.layout.notation import write
from shardviz.layout.region import Region, index_of
from shardviz.picture.exhibits.exhibit import MOST_CELLS, MOST_ROWS, Cell, Exhibit, Row, exhibit, plain, title_of
from shardviz.picture.model.palette import WRONG

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.check.order.case import LaidOut
    from shardviz.dump.dump import Dump, Shard, Tensor
    from shardviz.explain.finding import Finding
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh


LOCAL = "local index"
"""The head of rows whose columns are counted within a shard, not within the tensor."""

DIGEST = 8
"""Characters of a digest that are shown if the dump has no values."""


def differing_copies(dump: Dump, finding: Finding) -> Exhibit | None:
    """Return the differing copies of each part, around the first element that differs."""
    pair = next((pair for pair in finding.pairs if isinstance(pair, Copies)), None)
    return _side_by_side(dump, finding.tensor, pair.alike, pair.index) if pair is not None and pair.groups else None


def repeated_shards(dump: Dump, finding: Finding) -> Exhibit | None:
    """Return the first values of each shard beside the part that it claims."""
    tensor = next((one for one in dump.named(finding.tensor) if one.moment in ("initial", "step")), None)
    if tensor is None or tensor.claimed is None:
        return None
    at, claimed = tensor.index(finding.tensor), claimed_dims(tensor.claimed)
    mesh = dump.files.mesh
    alike = ranks_by(  # copies of one part are equal by right
        (rank, (str(Region(claimed[rank])) if rank in claimed else "", shard.digest(at)))
        for rank, shard in tensor.shards.items()
    )
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
    """List the copies of each part below each other as far as there is room; count the others."""
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
    """Return a row for each distinct copy of a part; differences from the first are marked."""
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
    """Return a few values from an element on; the digest if the dump has nothing else."""
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


def broken_tie(dump: Dump, finding: Finding) -> Exhibit | None:
    """Show that a broken tie shared storage before sharding, and which ranks have two tensors."""
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


HEADS_OF_NUMBERS = ("", "on the mesh", "number in its group")


def absent_ranks(dump: Dump, finding: Finding) -> Exhibit | None:
    """List the ranks without a file or without a shard of a tensor, above those that have one.

    None if the finding names no ranks, because no rank has the tensor.
    """
    if not finding.ranks:
        return None
    if not finding.tensor:
        there = sorted(set(dump.files.ranks) - set(finding.ranks))
        has = "a damaged file" if set(finding.ranks) & set(dump.files.damaged) else "no file"
        return _beside_those(dump.files.mesh, None, finding.ranks, (has, "a file"), there)
    named = (one for one in dump.named(finding.tensor) if not set(one.shards) & set(finding.ranks))
    tensor = next(named, None)
    layout = next((layout for layout in tensor.claims if layout is not None), None) if tensor is not None else None
    if tensor is None or layout is None:
        return None
    return _beside_those(layout.mesh, layout, finding.ranks, ("no shard", "a shard"), sorted(tensor.shards))


def _beside_those(
    mesh: Mesh, layout: Layout | None, missing: tuple[int, ...], words: tuple[str, str], there: list[int]
) -> Exhibit | None:
    """List the first ranks that lack something above a row for all ranks that have it."""
    rows = [
        Row(
            title_of([rank]),
            (Cell(mesh.label(rank) if rank in mesh else ""), Cell(_part(layout, rank)), Cell(words[0], is_wrong=True)),
        )
        for rank in missing[: MOST_ROWS * 2]
    ]
    others = f"the other {len(there):,} ranks" if len(there) > 1 else title_of(there) if there else ""
    last = [Row(others, (Cell(""), Cell(""), Cell(words[1], is_right=True)), count=len(there))] if there else []
    heads = ("", "on the mesh", "should hold", "has")
    left_out = len(missing) - len(rows)
    return exhibit("what ranks left in the dump", heads, [*rows, *last], left_out, sums_up=bool(last), noun="rank")


def _part(layout: Layout | None, rank: int) -> str:
    return str(layout.region_of_rank(rank)) if layout is not None and rank in layout.mesh else ""


def name_owners(dump: Dump, finding: Finding, cases: LaidOut) -> Exhibit | None:
    """Show which unsharded tensor each rank has under a name, if each has a whole one."""
    tensor = dump.stamped.get(finding.tensor)
    for case in cases.cases(tensor, finding.tensor) if tensor is not None else ():
        if not all(owners_of(case).values()):
            continue
        by_owner = ranks_by(owners_of(case).items())
        rows = [
            Row(title_of(ranks, case.mesh), (Cell(owner, owner != finding.tensor),), len(ranks))
            for owner, ranks in by_owner.items()
        ]
        return exhibit(f"what ranks have as {finding.tensor}", ("", "in the unsharded model"), rows, noun="rank")
    return None


def local_shapes(dump: Dump, finding: Finding) -> Exhibit | None:
    """Show expected and actual local shapes; None if all match."""
    tensor = dump.first_captured.get(finding.tensor)
    if tensor is None:
        return None
    by_shapes = _by_shapes(tensor)
    stamp = dump.stamps.get(finding.tensor)
    usual = Counter({whole: len(ranks) for (whole, _, _), ranks in by_shapes.items()}).most_common(1)
    wanted = str(list(stamp.shape)) if stamp is not None else usual[0][0] if usual else ""
    rows = [
        Row(
            title_of(ranks, dump.files.mesh),
            (Cell(whole, whole != wanted), Cell(due), Cell(has, has != due)),
            len(ranks),
        )
        for (whole, due, has), ranks in by_shapes.items()
    ]
    if not any(cell.is_wrong for row in rows for cell in row.cells):
        return None
    if stamp is not None:
        rows.append(Row("unsharded model", plain((wanted,))))
    heads = ("", "tensor claimed", "so its shard is", "shard held")
    return exhibit("shapes", heads, rows, sums_up=stamp is not None, noun="rank")


def _by_shapes(tensor: Tensor) -> dict[tuple[str, str, str], list[int]]:
    """Group ranks by (claimed global shape, expected local shape, actual local shape)."""
    by_shapes: dict[tuple[str, str, str], list[int]] = {}
    for rank, shard in tensor.shards.items():
        if shard.layout is not None and rank in shard.layout.mesh:
            due = shard.layout.region_of_rank(rank).shape
            whole, has = shard.layout.shape, shard.body.local_shape
            by_shapes.setdefault((str(list(whole)), str(list(due)), str(list(has))), []).append(rank)
    return by_shapes


def claimed_layouts(dump: Dump, finding: Finding) -> Exhibit | None:
    """Return the layouts that ranks claim; None if they all claim the same."""
    tensor = dump.first_captured.get(finding.tensor)
    shards = tensor.shards.items() if tensor is not None else ()
    by_claim = ranks_by((rank, "nothing" if shard.layout is None else write(shard.layout)) for rank, shard in shards)
    if len(by_claim) < 2:
        return None
    usual = max(by_claim, key=lambda text: len(by_claim[text]))
    rows = [
        Row(title_of(ranks, dump.files.mesh), (Cell(text, text != usual),), len(ranks))
        for text, ranks in by_claim.items()
    ]
    return exhibit("the layout that each rank claims", ("", "claims"), rows, noun="rank")


def numbers_in_groups(dump: Dump, finding: Finding) -> Exhibit | None:
    """Return the coordinates of ranks next to their numbers in the groups along the same axis."""
    rows = []
    for (record, axis), places in differing(dump).items():
        by_place = ranks_by(places.items() if tuple(sorted(places)) == finding.ranks else ())
        name = record.axes[axis]
        rows += [
            Row(
                title_of(ranks, dump.files.mesh),
                (Cell(f"{name}={position}"), Cell(str(number), is_wrong=True)),
                len(ranks),
            )
            for (position, number), ranks in by_place.items()
        ]
    return exhibit("where ranks are on the mesh, and their numbers in its groups", HEADS_OF_NUMBERS, rows, noun="rank")
