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

from shardviz.check.order.advice import CATALOGUE
from shardviz.check.order.infer.explain import explain
from shardviz.check.order.rules.ids.counts import count_ids
from shardviz.check.order.rules.ids.places import shape_differs
from shardviz.errors import ShardvizError
from shardviz.explain.finding import Finding
from shardviz.layout.layout import Layout
from shardviz.layout.notation import write
from shardviz.text import counted, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.check.order.case import Case
    from shardviz.check.order.laid_out import LaidOut
    from shardviz.dump.dump import Tensor

MOST_SHAPES = 3
"""So many wrong shapes are named, each with its ranks; of more, how many more there are."""

FROM_LOCAL = "DTensor.from_local takes the local shape times the ranks for the global shape"


def check_global_shape(laid_out: LaidOut, tensor: Tensor, name: str) -> Iterator[Finding]:
    """Yield ranks whose global shape differs from the unsharded model's, or from most ranks'; DTensors only."""
    shapes = Counter(shard.body.shape for shard in tensor.shards.values() if shard.layout)
    stamp = laid_out.dump.stamps.get(name)
    if not shapes or (len(shapes) == 1 and (stamp is None or stamp.shape in shapes)):
        return
    wanted = stamp.shape if stamp else shapes.most_common(1)[0][0]
    others = {shard.rank: shard.body.shape for shard in tensor.shards.values() if shard.body.shape != wanted}
    rank = next(iter(others))
    shapes_of = {shape: [at for at, own in others.items() if own == shape] for shape in dict.fromkeys(others.values())}
    named = [f"{list(shape)} on {named_ranks(ranks)}" for shape, ranks in shapes_of.items()]
    more = [counted(len(named) - MOST_SHAPES, "more shape")] if len(named) > MOST_SHAPES else []
    seen = " and ".join([*named[:MOST_SHAPES], *more])
    whose = "the unsharded model has" if stamp else "most ranks have"
    claimed = tensor.shards[rank].layout
    yield replace(
        _with_label(laid_out, tensor, name, claimed, wanted),
        tensor=name,
        ranks=tuple(others),
        sentence=f"{len(others):,} of {len(tensor.shards):,} ranks see a different global shape: {seen}, "
        f"where {whose} {list(wanted)}",
        claimed=write(claimed) if claimed is not None else "",
    )


def _with_label(
    laid_out: LaidOut, tensor: Tensor, name: str, claimed: Layout | None, wanted: tuple[int, ...]
) -> Finding:
    """Return what is held of a tensor of the wanted shape, and what to give from_local for it."""
    strides = tuple(math.prod(wanted[dim + 1 :]) for dim in range(len(wanted)))
    shape = f"give from_local shape={wanted} and stride={strides}"
    found = Finding("wrong-shape", "error", "", (), "", cause=FROM_LOCAL)
    try:
        case = _relabelled(laid_out, tensor, name, claimed, wanted)
        held = _held(case, tensor.shape, shape) if case is not None else None
    except ShardvizError:  # ids that cannot be laid out: only the shape is reported
        held = None
    if held is None:
        return replace(found, fix=f"{shape}, or use distribute_tensor on the whole tensor")
    text, cause, fix = held
    return replace(found, held=text, cause=cause, fix=fix)


def _relabelled(
    laid_out: LaidOut, tensor: Tensor, name: str, claimed: Layout | None, wanted: tuple[int, ...]
) -> Case | None:
    """Return the case as if the placements had been given with the wanted shape; None where that cannot be."""
    placements = claimed.placements() if claimed is not None and claimed.flat is None else None
    cases = laid_out.cases(tensor, name, claims=False) if name in laid_out.dump.stamps else ()
    if placements is None or len(cases) != 1 or len(wanted) != len(tensor.shape):
        return None
    return replace(cases[0], claimed=Layout.from_placements(cases[0].mesh, wanted, placements))


def _held(case: Case, shape: tuple[int, ...], fix: str) -> tuple[str, str, str] | None:
    """Return what is held in the wanted shape, the cause and the fix; None where nothing fits."""
    if case.as_claimed:
        return case.claimed_text, FROM_LOCAL, fix
    if _is_padded(case, shape):
        cause = f"It was padded from {list(case.shape)} to {list(shape)} after the model was built"
        return "", cause, "pad in build(), before weights are stamped and saved in that shape, or cut the padding off"
    fits = explain(case)[0]
    if fits.name == "scrambled":
        return None
    return fits.held, f"{CATALOGUE[fits.name].cause}; {FROM_LOCAL}", f"{fix}; {fits.fix}"


def _is_padded(case: Case, shape: tuple[int, ...]) -> bool:
    """Whether a larger shape than the model's comes with zeros and all of the tensor's own elements."""
    larger = len(shape) == len(case.shape) and all(own >= size for own, size in zip(shape, case.shape, strict=True))
    zeros = any((ids == 0).any() for ids in case.ids.values())
    return larger and zeros and not any((ids < 0).any() for ids in case.ids.values()) and count_ids(case).least > 0


def check_dtype(tensor: Tensor) -> Iterator[Finding]:
    """Yield ranks whose element type differs from that of most ranks."""
    own = {rank: shard.body.dtype for rank, shard in tensor.shards.items() if 0 not in shard.body.local_shape}
    dtypes = Counter(own.values())
    if len(dtypes) <= 1:
        return
    usual = dtypes.most_common(1)[0][0]
    others = {rank: dtype for rank, dtype in own.items() if dtype != usual}
    rank, dtype = next(iter(others.items()))
    yield Finding(
        "wrong-shape",
        "error",
        tensor.names[0],
        tuple(others),
        f"{len(others):,} of {len(tensor.shards):,} ranks have a different element type: {dtype} on rank {rank}, where "
        f"most ranks have {usual}",
        cause="The tensor was cast, or loaded, by a rule that depends on the rank",
        fix=f"cast to torch.{usual} on every rank before the model is sharded",
    )


def check_label(case: Case) -> Iterator[Finding]:
    """Yield ranks of one mesh that disagree on the placements, and local shapes that the placements cannot give."""
    if case.claimed is None:
        return
    claims = Counter(shard.layout for shard in case.shards.values())
    if len({layout.chains + layout.partial for layout in claims if layout}) > 1:
        yield _disagreeing(case)
    wrong = shape_differs(case)
    if wrong and case.held is None:
        yield _wrong_local_shape(case)


def _disagreeing(case: Case) -> Finding:
    others = {shard.rank: shard.layout for shard in case.shards.values() if shard.layout != case.claimed}
    rank, layout = next(iter(others.items()))
    own = write(layout) if layout else "nothing"
    return Finding(
        "wrong-placement",
        "error",
        case.name,
        tuple(others),
        f"{len(others):,} of {len(case.shards):,} ranks claim a different layout: {own} on rank {rank}, where most "
        f"claim {case.claimed_text}",
        claimed=case.claimed_text,
        cause="The placements were chosen by a rule that depends on the rank",
        fix="give every rank of the mesh the same placements",
    )


def _wrong_local_shape(case: Case) -> Finding:
    assert case.claimed is not None
    wrong = shape_differs(case)
    coord = wrong[0]
    own, wanted = case.shards[coord].body.local_shape, case.claimed.region(coord).shape
    whole = not case.claimed.split_axes
    fits = explain(case)[0]
    named = fits.name != "scrambled"
    return Finding(
        "wrong-placement" if whole else "wrong-shape",
        "error",
        case.name,
        tuple(sorted(case.rank(coord) for coord in wrong)),
        f"{len(wrong):,} of {len(case.shards):,} ranks have a local shape that does not match their placements: "
        f"{list(own)} on rank {case.rank(coord)}, where {case.claimed_text} gives {list(wanted)}"
        + (f": {fits.sentence}" if named else ""),
        claimed=case.claimed_text,
        held=fits.held if named else "",
        cause=CATALOGUE[fits.name].cause
        if named
        else "The shards were cut by another rule than torch.chunk, which "
        "gives full chunks first and the remainder last",
        fix=fits.fix if named else "cut the shards with torch.chunk or distribute_tensor",
    )
