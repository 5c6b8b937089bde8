"""`wrong-shape` and `wrong-placement`: labels that cannot be right whatever the numbers are.

The global shape and the element type must be the same on every rank, and the shape that of the unsharded model; the
placements must be the same on every rank of a mesh; the local shape must be the one that torch.chunk gives, level by
level. A label that is only contradicted by what the ranks hold (Replicate, but different) is found by `places`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.order.infer.explain import explain
from shardviz.check.order.infer.layout import axes_of_change
from shardviz.check.order.rules.foreign import count_ids
from shardviz.check.order.rules.places import shape_differs
from shardviz.errors import ShardvizError
from shardviz.explain.placement.labels import (
    AnotherChunking,
    GuessedGlobalShape,
    PaddedAfterBuild,
    RankDependentDtype,
    RankDependentPlacements,
    ShardedOverDifferent,
)
from shardviz.explain.placement.order import Disorder, Scrambled
from shardviz.layout.layout import Layout
from shardviz.layout.mesh import Coord, ranks_by
from shardviz.layout.notation import write
from shardviz.layout.region import Region, indices
from shardviz.text import counted, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardviz.check.order.case import Case, LaidOut
    from shardviz.dump.dump import Tensor
    from shardviz.explain.finding import Finding

MOST_SHAPES = 3
"""So many wrong shapes are named, each with its ranks; of more, how many more there are."""


def check_global_shape(laid_out: LaidOut, tensor: Tensor, name: str) -> Iterator[Finding]:
    """Yield ranks whose DTensor's global shape differs from the unsharded or the usual one."""
    shapes = Counter(shard.body.shape for shard in tensor.shards.values() if shard.layout)
    stamp = laid_out.dump.stamps.get(name)
    if not shapes or (len(shapes) == 1 and (stamp is None or stamp.shape in shapes)):
        return
    expected = stamp.shape if stamp else shapes.most_common(1)[0][0]
    odd_shapes = {shard.rank: shard.body.shape for shard in tensor.shards.values() if shard.body.shape != expected}
    rank = next(iter(odd_shapes))
    named = [f"{list(shape)} on {named_ranks(ranks)}" for shape, ranks in ranks_by(odd_shapes.items()).items()]
    more = [counted(len(named) - MOST_SHAPES, "more shape")] if len(named) > MOST_SHAPES else []
    shapes_text = " and ".join([*named[:MOST_SHAPES], *more])
    whose = "the unsharded model has" if stamp else "most ranks have"
    claimed = tensor.shards[rank].layout
    cause, held = _cause_of_shape(laid_out, tensor, name, claimed, expected)
    yield cause.finding(
        name,
        tuple(odd_shapes),
        f"{len(odd_shapes):,} of {len(tensor.shards):,} ranks see a different global shape: "
        f"{shapes_text}, {whose} {list(expected)}",
        claimed=write(claimed) if claimed is not None else "",
        held=held,
    )


def _cause_of_shape(
    laid_out: LaidOut, tensor: Tensor, name: str, claimed: Layout | None, expected: tuple[int, ...]
) -> tuple[Disorder, str]:
    """Return why a tensor has a wrong global shape, and what is held of the expected one."""
    stride = tuple(math.prod(expected[dim + 1 :]) for dim in range(len(expected)))
    if mixed := _sharded_over_different(laid_out, tensor, name, expected):
        return mixed, ""
    guessed = GuessedGlobalShape(expected, stride)
    try:
        case = _relabeled_case(laid_out, tensor, name, claimed, expected)
        return _held_in_shape(case, tensor.shape, guessed) if case is not None else (guessed, "")
    except ShardvizError:  # ids that cannot be laid out: only the shape is reported
        return guessed, ""


def _sharded_over_different(
    laid_out: LaidOut, tensor: Tensor, name: str, expected: tuple[int, ...]
) -> ShardedOverDifferent | None:
    """Return the cause if FSDP shards over an axis along which its inputs differ."""
    mesh = laid_out.dump.files.mesh
    wrappers = [wrapper for record in laid_out.dump.files.ranks.values() for wrapper in record.wrappers or ()]
    over = [{*wrapper.ranks} for wrapper in wrappers if wrapper.kind == "fsdp" and name in wrapper.names]
    offsets: dict[Coord, tuple[int, ...]] = {}
    for rank, shard in tensor.shards.items() if over else ():
        claimed = shard.layout.region_of_rank(rank) if shard.layout is not None else None
        if claimed is None or shard.held is None or len(shard.held.dims) != len(expected) or rank not in mesh:
            return None
        if claimed.size == 0 and shard.held.size == 0:
            continue
        if claimed.shape != shard.held.shape or any(len(ranges) != 1 for ranges in (*claimed.dims, *shard.held.dims)):
            return None
        starts = zip(shard.held.dims, claimed.dims, strict=True)
        offsets[mesh.coord_of(rank)] = tuple(held[0][0] - claimed_ranges[0][0] for held, claimed_ranges in starts)
    differing = axes_of_change(mesh, offsets) if offsets else []
    groups = [{*group} for axis in differing for group in mesh.groups(axis) if {*group} & {*tensor.shards}]
    is_over = all(any(group <= ranks for ranks in over) for group in groups)
    return ShardedOverDifferent(tuple(differing)) if differing and is_over else None


def _relabeled_case(
    laid_out: LaidOut, tensor: Tensor, name: str, claimed: Layout | None, expected: tuple[int, ...]
) -> Case | None:
    """Return the case with placements over the expected shape; None if that is impossible."""
    placements = claimed.placements() if claimed is not None and claimed.flat is None else None
    cases = laid_out.cases(tensor, name, claims=False) if name in laid_out.dump.stamps else ()
    if placements is None or len(cases) != 1 or len(expected) != len(tensor.shape):
        return None
    return replace(cases[0], claimed=Layout.from_placements(cases[0].mesh, expected, placements))


def _held_in_shape(case: Case, shape: tuple[int, ...], guessed: GuessedGlobalShape) -> tuple[Disorder, str]:
    """Return why a case in the wanted shape had another one, and what is held in the wanted one."""
    if case.as_claimed:
        return replace(guessed, is_placed=True), case.claimed_text
    if _is_padded(case, shape):
        return PaddedAfterBuild(case.shape, shape), ""
    fit = explain(case)[0]
    if isinstance(fit.cause, Scrambled):
        return guessed, ""
    return replace(guessed, disorder=fit.cause), fit.held


def is_padded_in_place(laid_out: LaidOut, tensor: Tensor, name: str) -> bool:
    """Whether zeros pad a tensor's dims, and ranks hold both as their placements claim."""
    stamp, shapes = laid_out.dump.stamps.get(name), {shard.body.shape for shard in tensor.shards.values()}
    claims = {shard.layout for shard in tensor.shards.values()}
    shape, claimed = next(iter(shapes), ()), next(iter(claims), None)
    is_one = stamp is not None and claimed is not None and len(shapes) == len(claims) == 1 and claimed.flat is None
    if not is_one or stamp is None or claimed is None or claimed.partial or len(shape) != len(stamp.shape):
        return False
    if shape == stamp.shape or any(length < size for length, size in zip(shape, stamp.shape, strict=True)):
        return False
    try:
        case = next(iter(laid_out.cases(tensor, name, claims=False)))
        held = {coord: (case.local_ids(coord), claimed.region(coord)) for coord in case.shards}
    except ShardvizError:
        return False
    return all(
        ids.shape == region.shape and np.array_equal(ids, _padded_ids(region, stamp.shape))
        for ids, region in held.values()
    )


def _padded_ids(region: Region, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the ids of a part of a tensor that zeros follow along its dims: 0 for padding."""
    places = np.ix_(*map(indices, region.dims))
    within = np.ones(region.shape, bool)
    ids = np.zeros(region.shape, np.int64)
    for place, size in zip(places, shape, strict=True):
        within &= place < size
        ids = ids * size + place
    return np.where(within, ids + 1, 0)


def _is_padded(case: Case, shape: tuple[int, ...]) -> bool:
    """Whether a larger shape than the model's has zeros and all of the tensor's elements."""
    sides = zip(shape, case.shape, strict=False)
    larger = len(shape) == len(case.shape) and all(length >= size for length, size in sides)
    least = min((int(ids.min()) for ids in case.ids.values() if ids.size), default=-1)
    return larger and least == 0 and count_ids(case).least > 0


def check_dtype(tensor: Tensor) -> Iterator[Finding]:
    """Yield ranks whose element type differs from that of most ranks."""
    dtype_of = {rank: shard.body.dtype for rank, shard in tensor.shards.items() if 0 not in shard.body.local_shape}
    dtypes = Counter(dtype_of.values())
    if len(dtypes) <= 1:
        return
    usual = dtypes.most_common(1)[0][0]
    odd_dtypes = {rank: dtype for rank, dtype in dtype_of.items() if dtype != usual}
    rank, dtype = next(iter(odd_dtypes.items()))
    yield RankDependentDtype(usual).finding(
        tensor.names[0],
        tuple(odd_dtypes),
        f"{len(odd_dtypes):,} of {len(tensor.shards):,} ranks have a different dtype: {dtype} on rank {rank}; "
        f"most ranks have {usual}",
    )


def check_label(case: Case) -> Iterator[Finding]:
    """Yield ranks that disagree on placements, and local shapes that placements cannot give."""
    if case.claimed is None:
        return
    claims = Counter(shard.layout for shard in case.shards.values())
    if len({layout.chains + layout.partial for layout in claims if layout}) > 1:
        yield _disagreement(case)
    wrong = shape_differs(case)
    if wrong and case.held is None:
        assert case.claimed is not None
        coord = wrong[0]
        shape, expected = case.shards[coord].body.local_shape, case.claimed.region(coord).shape
        whole = not case.claimed.split_axes
        fit = explain(case)[0]
        named = not isinstance(fit.cause, Scrambled)
        finding = case.finding(
            fit.cause if named else AnotherChunking(),
            map(case.rank, wrong),
            f"{len(wrong):,} of {len(case.shards):,} ranks have a local shape that does not match their placements: "
            f"{list(shape)} on rank {case.rank(coord)}, but {case.claimed_text} gives {list(expected)}"
            + (fit.clause if named else ""),
            kind="wrong-placement" if whole else "wrong-shape",
            held=fit.held if named else "",
        )
        yield replace(finding, refs=())


def _disagreement(case: Case) -> Finding:
    odd_layouts = {shard.rank: shard.layout for shard in case.shards.values() if shard.layout != case.claimed}
    rank, layout = next(iter(odd_layouts.items()))
    odd = write(layout) if layout else "nothing"
    text = f"{len(odd_layouts):,} of {len(case.shards):,} ranks claim a different layout: {odd} on rank {rank}"
    return case.finding(RankDependentPlacements(), odd_layouts, f"{text}; most claim {case.claimed_text}")
