"""Names that are other tensors on other ranks, shards of another shape than claimed, ranks without a number or file."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from shardviz.check.order.rules.foreign import owners_of
from shardviz.check.whole.rank_order import differing
from shardviz.layout.notation import write
from shardviz.picture.exhibits.exhibit import MOST_ROWS, Cell, Exhibit, Row, exhibit, plain, title_of

if TYPE_CHECKING:
    from shardviz.check.order.laid_out import LaidOut
    from shardviz.dump.dump import Dump, Tensor
    from shardviz.explain.finding import Finding
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh

HEADS_OF_NUMBERS = ("", "on the mesh", "number in its group")


def absent_ranks(dump: Dump, finding: Finding) -> Exhibit | None:
    """Return the ranks without a file, or without a shard of a tensor, beside those that have one.

    None if the finding names no ranks: no rank has the tensor then.
    """
    if not finding.ranks:
        return None
    if not finding.tensor:
        there = sorted(set(dump.files.ranks) - set(finding.ranks))
        has = "a damaged file" if set(finding.ranks) & set(dump.files.damaged) else "no file"
        return _beside_those(dump.files.mesh, None, finding.ranks, (has, "a file"), there)
    tensor = _tensor_without(dump, finding)
    layout = next((layout for layout in tensor.claims if layout is not None), None) if tensor is not None else None
    if tensor is None or layout is None:
        return None
    return _beside_those(layout.mesh, layout, finding.ranks, ("no shard", "a shard"), sorted(tensor.shards))


def _tensor_without(dump: Dump, finding: Finding) -> Tensor | None:
    return next((tensor for tensor in dump.named(finding.tensor) if not set(tensor.shards) & set(finding.ranks)), None)


def _beside_those(
    mesh: Mesh, layout: Layout | None, missing: tuple[int, ...], words: tuple[str, str], there: list[int]
) -> Exhibit | None:
    """Lay the first ranks that lack something above all that have it; the last row is always shown."""
    rows = [
        Row(title_of([rank]), (Cell(_place(mesh, rank)), Cell(_part(layout, rank)), Cell(words[0], is_wrong=True)))
        for rank in missing[: MOST_ROWS * 2]
    ]
    others = f"the other {len(there):,} ranks" if len(there) > 1 else title_of(there) if there else ""
    last = [Row(others, (Cell(""), Cell(""), Cell(words[1], is_right=True)), count=len(there))] if there else []
    heads = ("", "on the mesh", "should hold", "has")
    left_out = len(missing) - len(rows)
    return exhibit("what ranks left in the dump", heads, [*rows, *last], left_out, sums_up=bool(last), noun="rank")


def _place(mesh: Mesh, rank: int) -> str:
    if rank not in mesh:
        return ""
    return ", ".join(f"{axis}={position}" for axis, position in zip(mesh.axes, mesh.coord_of(rank), strict=True))


def _part(layout: Layout | None, rank: int) -> str:
    return str(layout.region(layout.mesh.coord_of(rank))) if layout is not None and rank in layout.mesh else ""


def owners(dump: Dump, finding: Finding, cases: LaidOut) -> Exhibit | None:
    """Return which tensor of the unsharded model each rank has under a name, where each has a whole one."""
    tensor = dump.stamped.get(finding.tensor)
    for case in cases.cases(tensor, finding.tensor) if tensor is not None else ():
        by_owner: dict[str, list[int]] = {}
        if not all(owners_of(case).values()):
            continue
        for rank, owner in owners_of(case).items():
            by_owner.setdefault(owner, []).append(rank)
        rows = [
            Row(title_of(ranks, case.mesh), (Cell(owner, owner != finding.tensor),), len(ranks))
            for owner, ranks in by_owner.items()
        ]
        return exhibit(f"what ranks have as {finding.tensor}", ("", "in the unsharded model"), rows, noun="rank")
    return None


def shapes(dump: Dump, finding: Finding) -> Exhibit | None:
    """Return the local shapes that placements give, next to those that ranks have; None if none is wrong."""
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
    """Return the ranks by the tensor's shape that they claim, that of their shard by it, and that of what they hold."""
    by_shapes: dict[tuple[str, str, str], list[int]] = {}
    for rank, shard in tensor.shards.items():
        if shard.layout is not None and rank in shard.layout.mesh:
            due = shard.layout.region(shard.layout.mesh.coord_of(rank)).shape
            whole, has = shard.layout.shape, shard.body.local_shape
            by_shapes.setdefault((str(list(whole)), str(list(due)), str(list(has))), []).append(rank)
    return by_shapes


def claims(dump: Dump, finding: Finding) -> Exhibit | None:
    """Return the layouts that ranks claim; None if they all claim the same."""
    tensor = dump.first_captured.get(finding.tensor)
    by_claim: dict[str, list[int]] = {}
    for rank, shard in tensor.shards.items() if tensor is not None else ():
        by_claim.setdefault(write(shard.layout) if shard.layout is not None else "nothing", []).append(rank)
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
        by_place: dict[tuple[int, int], list[int]] = {}
        for rank, place in places.items() if tuple(sorted(places)) == finding.ranks else ():
            by_place.setdefault(place, []).append(rank)
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
