"""Where every element went: build, stamp, shard and capture, again with fills if sharding casts to a narrow dtype.

torch's own reassembly is run only on sound shards: gloo aborts the process on misshapen ones.

Ranks make some buffers again when the model is sharded, as slopes of their own heads or statistics of a new module.
What is made of a count or a number has no ids of the filled model, or those of other tensors by chance. Which part a
rank has shows in its values: the one that the model had there before it was filled, by placements that fit all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from shardviz.layout.layout import Layout, placements_of
from shardviz.live.capture import describe
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.capture import Part
from shardviz.live.capture.describe import ids_of
from shardviz.live.capture.lookup.by_reference import Known, add_by_reference
from shardviz.live.capture.meshes import plain_mesh
from shardviz.live.capture.stamp import Stamped, exact_bits, inexact, is_readable, named_tensors, stamp
from shardviz.live.claims.local import Local
from shardviz.live.claims.registry import local_tensors, unwrapped
from shardviz.live.compat.meshes import placement_of, whole_of
from shardviz.live.compat.modules import clean_name
from shardviz.relate.tolerance import SINGLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.dump.records.tensors import Stamp
    from shardviz.layout.mesh import Mesh
    from shardviz.layout.region import Region
    from shardviz.live.capture.capture import Capture
    from shardviz.live.capture.pipeline_parts import PipelinePart
    from shardviz.live.capture.stamp import Before
    from shardviz.live.claims.local import Local


@dataclass(frozen=True)
class Sharding:
    """How to build and shard a model, as often as is needed.

    Attributes:
        build: Builds the unsharded model, with the same tensors every time.
        parallelize: Returns it sharded.
    """

    build: Callable[[], nn.Module]
    parallelize: Callable[[nn.Module], nn.Module]
    mesh: Mesh

    def stamped(self, bits: int = 64) -> tuple[nn.Module, Stamped]:
        """Build, stamp and shard; in float64 if the model's own dtypes are too narrow for whole ids."""
        model = self.build()
        if not _holds_ids(model):
            model = model.double()
        stamped = stamp(model, bits)
        return self.parallelize(model), stamped


def capture_passes(capture: Capture, sharding: Sharding, pipeline_part: PipelinePart) -> Stamped:
    """Capture where every element went, and torch's own reassembly. Every rank calls this.

    Args:
        pipeline_part: This rank's part of the model; without stamps, the whole model is built on all ranks.

    Returns:
        The result of stamping.
    """
    model, stamped = sharding.stamped()
    capture.stamps = {stamp.name: stamp for stamp in pipeline_part.stamps or stamped.stamps}
    locals_ = _with_values(capture, pipeline_part.of_stage(local_tensors(unwrapped(model), sharding.mesh)))
    exact_bits_here = min((exact_bits(local.values.dtype) or 64 for local in locals_), default=64)
    of_all = of_all_ranks((exact_bits_here, stamped.last))  # every rank shards in every pass, whatever its stage needs
    bits, last = min(bits for bits, _ in of_all), max(last for _, last in of_all)
    if last >= 2**bits:
        del model, locals_
        model, stamped = sharding.stamped(bits)
        locals_ = _with_values(capture, pipeline_part.of_stage(local_tensors(unwrapped(model), sharding.mesh)))
    add_ids(capture, locals_, stamped, pipeline_part, sharding.mesh)
    if last >= 2**bits:
        capture.not_checked.append(("", NO_IDS))
    else:
        _gather(capture, model, last, pipeline_part)
    return stamped


def _with_values(capture: Capture, locals_: Iterable[Local]) -> list[Local]:
    """Return the tensors with values after sharding, noting those that are filled later."""
    locals_ = list(locals_)
    capture.not_checked += [
        (local.name, FILLED_LATER) for local in locals_ if local.values.is_meta and not local.unknown
    ]
    return [local for local in locals_ if not local.values.is_meta]


def add_ids(
    capture: Capture, locals_: Sequence[Local], stamped: Stamped, pipeline_part: PipelinePart, mesh: Mesh | None
) -> int:
    """Record the ids of a stamped and sharded model, or the reason why a cast lost them. Every rank calls this.

    Args:
        locals_: This rank's tensors, with the dump's names.

    Returns:
        How many tensors lost their ids.
    """
    locals_ = _without_own(capture, locals_, stamped, pipeline_part, mesh) if mesh is not None else locals_
    fills = {pipeline_part.prefix + name: fill for name, fill in stamped.fills.items()}
    add_by_reference(
        capture, [local for local in locals_ if local.name in fills], Known(capture.stamps, fills, is_stamped=True)
    )
    rounded = {}
    in_parts = _add_made(capture, locals_, stamped, pipeline_part)
    for local in (local for local in locals_ if local.name not in in_parts):
        bits = exact_bits(local.values.dtype)
        if local.name in fills or not bits:
            continue
        if stamped.last >= 2**bits and local.name in capture.stamps:
            rounded[local.name] = inexact(stamped.last, local.values.dtype)
        else:
            capture.add_ids(local, pipeline_part.shifted(describe.ids_of(local.values, stamped.last)))
    capture.not_applied += pipeline_part.renamed(stamped.not_applied)
    _add_without_ids(capture, locals_, stamped, pipeline_part)
    capture.not_checked += rounded.items()
    return len(rounded)


def _add_made(
    capture: Capture, locals_: Sequence[Local], stamped: Stamped, pipeline_part: PipelinePart
) -> frozenset[str]:
    """Record of which stamped parameters new ones have elements, and return those recorded as their parts.

    A rank has none of these under its own name: numbers of a new parameter may be ids by chance. All ranks record the
    parts, or none does. Every rank calls this.
    """
    names = {local.name for local in locals_}
    new = {local.name for local in locals_ if local.role == "param" and local.flat is None} - capture.stamps.keys()
    found: dict[str, tuple[Local, NDArray[np.int64], list[Part | None]]] = {}
    for local in locals_:
        is_new = local.name in new and local.values.is_floating_point()
        ids = pipeline_part.shifted(describe.ids_of(local.values, stamped.last)) if is_new else np.zeros(0, np.int64)
        sources = describe.sources_of(ids, capture.stamps.values())
        if sources and names.isdisjoint(sources):
            capture.made_of.append((local.name, sources))
            found[local.name] = local, ids, [Part.find(ids, capture.stamps[source]) for source in sources]
    of_all = of_all_ranks({name: all(parts) for name, (_, _, parts) in found.items()})
    whole = [name for name in found if all(of_rank.get(name, True) for of_rank in of_all)]
    for name in whole:
        local, ids, parts = found[name]
        capture.add_parts(local, [part for part in parts if part is not None], ids)
    return frozenset(whole)


def _without_own(
    capture: Capture, locals_: Sequence[Local], stamped: Stamped, pipeline_part: PipelinePart, mesh: Mesh
) -> list[Local]:
    """Return the tensors but the buffers that ranks made again, whose places are recorded by their values."""
    exact = (stamp for stamp in stamped.stamps if stamp.name not in stamped.fills)
    stamps = {pipeline_part.prefix + stamp.name: stamp for stamp in exact}
    filled = {stamp.name for stamp in stamped.stamps}
    before = {pipeline_part.prefix + name: buffer for name, buffer in stamped.buffers.items() if name in filled}
    own = own_buffers(before, locals_, stamps, mesh, capture.rank)
    for local in locals_:
        region, why = own.get(local.name, (None, ""))
        if region is not None:
            capture.add_region(local, region)
        if why:
            capture.not_checked.append((local.name, why))
            capture.without_ids.append(local.name)
    return [local for local in locals_ if local.name not in own]


def _add_without_ids(capture: Capture, locals_: Sequence[Local], stamped: Stamped, pipeline_part: PipelinePart) -> None:
    """Record why tensors have no ids, except whole ones, whose elements have only one place."""
    whole = {
        local.name
        for local in locals_
        if local.claim is None and local.shape == stamped.shapes.get(local.name.removeprefix(pipeline_part.prefix))
    }
    unstamped = [(name, why) for name, why in pipeline_part.renamed(stamped.not_stamped) if name not in whole]
    capture.not_checked += unstamped
    capture.without_ids += [name for name, _ in unstamped]


def _gather(capture: Capture, model: nn.Module, last: int, pipeline_part: PipelinePart) -> None:
    """Let torch reassemble every DTensor, for comparison with shardviz's own reassembly."""
    sharded = {
        pipeline_part.prefix + clean_name(name): tensor
        for _, name, tensor in named_tensors(unwrapped(model))
        if isinstance(tensor, DTensor) and exact_bits(tensor.dtype) and not tensor.is_meta
    }
    sharded = {name: tensor for name, tensor in sharded.items() if name in capture.stamps}
    refused = _refusals(sharded)
    for name, tensor in sharded.items():
        if name in refused:
            capture.not_checked.append((name, f"full_tensor was not run: {refused[name]}"))
            continue
        try:
            full = whole_of(tensor).detach()
        except Exception as error:
            capture.add_gather_error(name, error)
        else:
            capture.add_gathered(name, pipeline_part.shifted(describe.ids_of(full, last)))


def _holds_ids(model: nn.Module) -> bool:
    tensors = [tensor for _, _, tensor in named_tensors(model) if tensor.is_floating_point()]
    bits = min((exact_bits(tensor.dtype) for tensor in tensors), default=64)
    numel: int = sum(tensor.numel() for _, _, tensor in named_tensors(model))
    return bool(numel < 2**bits)


Described = dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]]
"""By name: the reason not to gather a rank's tensor, the ranks of its mesh, and the global shape on that rank."""

FILLED_LATER = (
    "the order of its elements: it is on the meta device after sharding, and initialize() fills it; copies and shards "
    "are compared by value"
)
"""Why a tensor that `initialize` fills has no ids."""

NO_IDS = "full_tensor: a dtype of the sharded model cannot hold ids, so weights were filled with other values"
"""Why torch's own reassembly is not run."""

MAX_ELEMENTS = 1 << 26
"""Tensors with more elements than this are not gathered on every rank."""


def _refusals(tensors: Mapping[str, DTensor]) -> dict[str, str]:
    """Return why tensors must not be gathered, the same on all ranks. Every rank calls this."""
    refusals_here = {
        name: (_reason(tensor), plain_mesh(tensor.device_mesh).ranks, tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    of_all = of_all_ranks(refusals_here)
    refusals = {name: reason for of_rank in reversed(of_all) for name, (reason, _, _) in of_rank.items() if reason}
    return _shape_refusals(of_all) | refusals


def _shape_refusals(of_all: list[Described]) -> dict[str, str]:
    """Return the tensors whose global shape differs between two ranks of one mesh."""
    first: dict[tuple[str, tuple[int, ...]], tuple[int, tuple[int, ...]]] = {}
    mismatches: dict[str, str] = {}
    for rank, described in enumerate(of_all):
        for name, (_, ranks, shape) in described.items():
            at, first_shape = first.setdefault((name, ranks), (rank, shape))
            if first_shape != shape:
                mismatches.setdefault(name, f"rank {at} sees shape {list(first_shape)}, rank {rank} sees {list(shape)}")
    return mismatches


def _reason(tensor: DTensor) -> str:
    if any(placement.is_partial() for placement in tensor.placements):
        return "a sum is pending"
    if tensor.numel() > MAX_ELEMENTS:
        return f"its {tensor.numel():,} elements exceed the limit of {MAX_ELEMENTS:,}"
    mesh = plain_mesh(tensor.device_mesh)
    rank = distributed.get_rank()
    if rank not in mesh:
        return ""
    claimed = Layout.from_placements(mesh, tuple(tensor.shape), [placement_of(p) for p in tensor.placements])
    expected, local = claimed.region_of_rank(rank).shape, tuple(tensor.to_local().shape)
    if expected != local:
        return f"rank {rank}'s shard is {list(local)}, and its placements claim {list(expected)}"
    return ""


NO_PART = (
    "the order of its elements: each rank makes it again when the model is sharded, in a different shape, and it is no "
    "part of what was built; a step compares what comes of it"
)
SAVED = (
    "the order of its elements: each rank makes it again when the model is sharded, as it was built; what a checkpoint "
    "had in it before would be lost"
)


def own_buffers(
    before: Mapping[str, Before], locals_: Iterable[Local], stamps: Mapping[str, Stamp], mesh: Mesh, rank: int
) -> dict[str, tuple[Region | None, str]]:
    """Return the plain buffers of a filled model that were made again. Every rank calls this.

    They are the parts of the values before, or have another shape, numbers and no id of their own on all ranks. Zeros
    may be memory that nothing was written to.

    Args:
        before: The model's buffers before it was filled.
        stamps: Of those that were filled with ids.

    Returns:
        By name the part of the buffer before that this rank has, None if it is none; and why its place is not checked,
        empty if its values show it.
    """
    here = {local.name: local.values.cpu() for local in locals_ if _is_plain_buffer(local, before)}
    fitting = {name: _fitting(before[name].values, values, mesh, rank) for name, values in here.items()}
    made = {name for name, values in here.items() if _has_no_id(values, before[name].values, stamps.get(name))}
    of_all = of_all_ranks({name: (set(regions), name in made) for name, regions in fitting.items()})
    own: dict[str, tuple[Region | None, str]] = {}
    for name, regions in fitting.items():
        of_ranks = [of_rank[name] for of_rank in of_all if name in of_rank]
        shared = set.intersection(*(placements for placements, _ in of_ranks))
        region = next((region for placements, region in regions.items() if placements in shared), None)
        if region is not None:
            own[name] = region, SAVED if before[name].is_saved else ""
        elif all(is_made for _, is_made in of_ranks):
            own[name] = None, NO_PART
    return own


def _is_plain_buffer(local: Local, before: Mapping[str, Before]) -> bool:
    is_plain = local.role == "buffer" and local.claim is None and is_readable(local.values)
    return is_plain and local.name in before and local.values.ndim == before[local.name].values.ndim


def _fitting(whole: torch.Tensor, values: torch.Tensor, mesh: Mesh, rank: int) -> dict[tuple[str, ...], Region]:
    """Return the parts of a whole that a tensor has the values of, by the placements that give them to a rank."""
    shape = tuple(whole.shape)
    is_part: dict[Region, bool] = {}  # axes of one rank give the same part by several placements
    fitting = {}
    for placements, region in placements_of(shape, tuple(values.shape), mesh, rank):
        if region not in is_part:
            of_whole = whole
            for dim, ranges in enumerate(region.dims if values.shape != whole.shape else ()):
                of_whole = torch.cat([of_whole.narrow(dim, start, stop - start) for start, stop in ranges], dim)
            is_part[region] = _is_equal(of_whole, values)
        if is_part[region]:
            fitting[tuple(map(str, placements))] = region
    return fitting


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.is_floating_point() != second.is_floating_point() or first.is_complex() != second.is_complex():
        return False
    if not first.is_floating_point():
        return torch.equal(first.long(), second.long()) if not first.is_complex() else torch.equal(first, second)
    return torch.allclose(first.double(), second.double(), rtol=SINGLE, atol=0, equal_nan=True)


def _has_no_id(values: torch.Tensor, whole: torch.Tensor, stamp: Stamp | None) -> bool:
    """Whether a tensor has another shape than the whole, numbers, and no id of the whole's elements."""
    if stamp is None or values.shape == whole.shape or not bool(values.any()):
        return False
    ids = ids_of(values, stamp.last)
    return not np.any((ids >= stamp.first) & (ids <= stamp.last))
