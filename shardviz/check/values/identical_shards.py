"""`identical-shards`: a tensor's parts have bitwise equal values: one seed on every rank.

Only values that were drawn can tell: a tensor of one number (a bias of zeros, a norm of ones), of NaN alone, of one
element a shard, or of an integer dtype is passed over, and so is one whose parts repeated each other before sharding.
Along an axis, every line of shards of one shape must repeat itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.order.cases import claimed_dims
from shardviz.check.values.copies import is_constant
from shardviz.dump.digests import hash_of_nan
from shardviz.explain.checkpoints.states import SameOptimizerFile
from shardviz.explain.placement.values import RepeatedDraw
from shardviz.layout.notation import write

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.dump.dump import Dump, Shard, Tensor
    from shardviz.explain.finding import Finding
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Coord

Lines = list[list["Shard"]]


def check_identical_shards(dump: Dump) -> Iterator[Finding]:
    """Yield tensors of the model before stamping whose shards repeat each other."""
    for tensor in dump.at("initial"):
        if "float" not in tensor.dtype and "complex" not in tensor.dtype:
            continue
        for layout in tensor.claims:
            if layout is not None and layout.split_axes:
                findings = _check(tensor, layout)
                yield from (finding for finding in findings if not _are_as_built(dump, tensor, finding.tensor))


def _are_as_built(dump: Dump, tensor: Tensor, name: str) -> bool:
    """Whether every rank has its part of unsharded values that themselves repeat."""
    return all(rank in dump.files.ranks and name in dump.files.ranks[rank].as_built for rank in tensor.shards)


def _check(tensor: Tensor, layout: Layout) -> Iterator[Finding]:
    repeated: dict[int, list[str]] = {}
    for axis in layout.split_axes:
        if _first_line_differs(tensor, layout, axis):
            continue
        lines = _lines(tensor, layout, axis)
        if lines and not any(is_constant(shard) for shard in lines[0]):
            for index in _equal_names(lines, len(tensor.names)):
                repeated.setdefault(index, []).append(axis)
    for index, axes in repeated.items():
        along = " and ".join(axes)
        cause = (
            SameOptimizerFile()
            if tensor.role == "optim"
            else RepeatedDraw(along, tensor.first.body.device.startswith("cpu"))
        )
        yield cause.finding(
            tensor.names[index],
            tuple(tensor.shards),
            f"different shards along {along} hold bitwise the same {list(tensor.first.body.local_shape)} values: "
            "the whole tensor repeats one shard",
            claimed=write(layout),
            held=f"the same values along {along}",
        )


def _first_line_differs(tensor: Tensor, layout: Layout, axis: str) -> bool:
    """Whether an axis's first two shards have one shape but no digest in common."""
    shards = [tensor.shards[rank] for rank in layout.mesh.groups(axis)[0][:2] if rank in tensor.shards]
    if len(shards) < 2 or shards[0].body.local_shape != shards[1].body.local_shape or not shards[0].digests:
        return False
    return all(shards[0].digest(index) != shards[1].digest(index) for index in range(len(tensor.names)))


def _lines(tensor: Tensor, layout: Layout, axis: str) -> Lines:
    """Return the distinct shards along an axis, all else equal, of the first one's shape."""
    mesh, column = layout.mesh, layout.mesh.axis_index(axis)
    claimed = claimed_dims(layout)
    lines: dict[Coord, dict[object, Shard]] = {}
    for coord, rank in zip(mesh.coords(), mesh.ranks, strict=True):
        shard = tensor.shards.get(rank)
        if shard is None or not shard.digests or 0 in shard.body.local_shape:
            continue
        line = lines.setdefault((*coord[:column], *coord[column + 1 :]), {})
        first = next(iter(line.values()), shard)
        if shard.body.local_shape == first.body.local_shape:
            line.setdefault(claimed[rank], shard)
    return [list(line.values()) for line in lines.values() if len(line) > 1]


def _equal_names(lines: Lines, num_names: int) -> Iterator[int]:
    """Yield the indices of a fold's names whose shards are equal along every line."""
    first, second = lines[0][:2]
    for index in range(num_names):
        digest = first.digest(index)
        if digest != second.digest(index) or digest == hash_of_nan(first.body.dtype, first.body.local_shape):
            continue
        if all(len({shard.digest(index) for shard in line}) == 1 for line in lines):
            yield index
