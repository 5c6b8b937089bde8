"""Master copies and moments in an optimizer's flat buffers, as tensors of the dump.

A master copy must be its weight, before any cast: its values are looked up in the weight that the job itself holds, and
no other reference is needed. Which elements a rank says it has is its claim. Every rank calls what is here.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed, nn

from shardviz.dump.records.tensors import FlatRecord, FragmentRecord, Stamp
from shardviz.layout.region import Region
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.lookup.by_reference import ALIKE, Known, place_of
from shardviz.live.capture.meshes import of_flat_param
from shardviz.live.capture.stamp import bits_of_tensor, dtype_name
from shardviz.live.claims import registry
from shardviz.live.claims.deepspeed import MASTER, Fragment
from shardviz.live.claims.hooks import Made
from shardviz.live.claims.local import FlatParam, Local
from shardviz.live.compat.tensors import bytes_of
from shardviz.reference.lookup import MIN_WINDOW, UNPLACED, WINDOW, LineTable, locate, only_place
from shardviz.relate.values import is_alike

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.layout.mesh import Mesh
    from shardviz.live.capture.capture import Capture
    from shardviz.live.capture.pipeline_parts import PipelinePart
MAX_SAMPLES = 8
"""Windows of a fragment that are looked for in another weight, before all of them are."""

NARROW = 2
"""Bytes of dtypes so narrow that eight neighbors may be equal by chance."""

MAX_TRACED = 8
"""Fragments of a rank whose elements are looked for in all weights."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a rank says of its fragment of a parameter, for the others.

    Attributes:
        ranks: The ranks that the parameter is divided among.
        start: The first element that it has.
        size: How many it has.
        offset: The parameter's first element in the buffers laid end to end; None if it has no fragment.
        part: The elements of its buffer.
        differs: Whether its fragment is not what the same elements of the weight are.
        states: The kinds of states that it has.
        buffer: The number of its buffer, and the elements of that.
    """

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    size: int
    offset: int | None
    part: int
    differs: bool
    states: tuple[str, ...]
    buffer: tuple[int, int]


@dataclass
class Tracer:
    """Finds the weight of a fragment's elements by a search of all weights, for a few fragments.

    Attributes:
        wholes: The weights by their master copies' names.
        firsts: The first ids of the master copies.
        num_left: How many more fragments are traced.
    """

    wholes: Mapping[str, Made]
    firsts: Mapping[str, int]
    num_left: int = MAX_TRACED

    def traced(self, name: str, bits: NDArray[Any], ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ids completed by those of other weights."""
        lost = np.flatnonzero(ids <= 0)
        if len(lost) < MIN_WINDOW or not self.num_left:
            return ids
        self.num_left -= 1
        width = MIN_WINDOW if bits.itemsize > NARROW else min(WINDOW, len(lost))
        samples = [bits[at : at + width] for at in lost[np.linspace(0, len(lost) - width, MAX_SAMPLES, dtype=int)]]
        for weight, whole in self.wholes.items():
            flat = whole.bits.reshape(-1)
            if weight != name and flat.dtype == bits.dtype and flat.size >= width and _has_any(flat, samples):
                places = locate(bits, flat, singly=False)
                ids = np.where((ids <= 0) & (places != UNPLACED), places + self.firsts[weight] - 1, ids)
        return ids


def _has_any(flat: NDArray[Any], samples: list[NDArray[Any]]) -> bool:
    return any(
        only_place(LineTable(flat[None], len(sample)), sample) >= 0 for sample in samples if len(sample) >= MIN_WINDOW
    )


def add_masters(capture: Capture, engine: nn.Module, mesh: Mesh, pipeline_part: PipelinePart) -> None:
    """Record this rank's master copies and moments; nothing if no rank has any."""
    masters = {pipeline_part.prefix + master.name: master for master in registry.fragments(engine)}
    of_all = of_all_ranks({name: _claim_of(master) for name, master in masters.items()})
    names = list(dict.fromkeys(name for of_rank in of_all for name in of_rank))
    if not names:
        return
    stamps = _stamps(capture, of_all, names)
    capture.stamps = {**capture.stamps, **stamps}
    model_stamps = Known(stamps, {})
    wholes = {f"{name}.{MASTER}": _entry(master, master.weight) for name, master in masters.items() if master.is_whole}
    _add_buffers(capture, masters.values(), of_all, mesh)
    tracer = Tracer(wholes, {name: stamp.first for name, stamp in stamps.items()})
    for name in (name for name in names if name in masters):
        master = masters[name]
        peers = {rank: of_all[rank][name] for rank in master.ranks if name in of_all[rank]}
        local = _add(capture, name, master, peers, mesh)
        if any(peer.differs for peer in peers.values()):
            whole = wholes.get(local.name) or _entry(master, _gather_weight(master))
            _place(capture, local, master, replace(model_stamps, entries={local.name: whole}), tracer)
        else:
            _add_claimed(capture, local, master)


def _claim_of(master: Fragment) -> Claim:
    weight = master.weight[master.start : master.start + master.size] if master.is_whole else master.weight
    has_shape = weight.shape == master.values.shape
    differs = not (has_shape and torch.equal(bytes_of(master.values.to(weight.dtype)), bytes_of(weight)))
    place = master.start, master.size, master.offset, master.part
    return Claim(master.ranks, master.shape, *place, differs, tuple(master.states), _buffer(master))


def _buffer(master: Fragment) -> tuple[int, int]:
    return master.buffer, next((len(state) for state in master.buffers.values()), 0)


def _add_buffers(capture: Capture, masters: Iterable[Fragment], of_all: list[dict[str, Claim]], mesh: Mesh) -> None:
    """Record the states of the whole buffers that all ranks of a group have."""
    on = [{claim.buffer for claim in of_rank.values()} for of_rank in of_all]
    for number, master in {master.buffer: master for master in masters if master.buffers}.items():
        _, size = _buffer(master)
        if all((number, size) in on[rank] for rank in master.ranks):
            whole = (size * len(master.ranks),)
            for kind, state in master.buffers.items():
                flat = FlatParam.in_buffers("", whole, master.ranks, state, size)
                local = Local(f"optimizer.buffer{number}.{kind}", "optim", whole, state, of_flat_param(flat, mesh))
                capture.add_values(local, "initial")


def _stamps(capture: Capture, of_all: list[dict[str, Claim]], names: Iterable[str]) -> dict[str, Stamp]:
    """Return the ids of all master copies, behind those of the model's own tensors."""
    first = max((stamp.last for stamp in capture.stamps.values()), default=0) + 1
    stamps: dict[str, Stamp] = {}
    for name in names:
        shape = next(of_rank[name].shape for of_rank in of_all if name in of_rank)
        called = f"{name}.{MASTER}"
        stamps[called] = Stamp(called, first, shape, "optim")
        first += math.prod(shape)
    return stamps


def _add(capture: Capture, name: str, master: Fragment, peers: Mapping[int, Claim], mesh: Mesh) -> Local:
    """Record a master copy's values and moments, with their places in all ranks' buffers."""
    offset, part_size = _usual_place(peers)
    claim, flat = None, None
    if part_size:
        flat = FlatRecord(master.shape, offset), part_size * len(master.ranks)
        param = FlatParam.in_buffers(name, master.shape, master.ranks, master.values, part_size, offset)
        claim = of_flat_param(param, mesh)
    local = Local(f"{name}.{MASTER}", "optim", master.shape, master.values, claim, flat)
    capture.add_values(local, "initial")
    kinds = next((peer.states for peer in peers.values() if peer.states), ())
    for kind in kinds:
        values = master.states.get(kind, master.values[:0])
        capture.add_values(replace(local, name=f"{name}.{kind}", values=values), "initial")
    if not all(_fitting(peers, offset, part_size)):
        own_claim = peers[distributed.get_rank()]
        capture.fragments.append(FragmentRecord(local.name, master.ranks, own_claim.start, own_claim.size))
    return local


def _usual_place(peers: Mapping[int, Claim]) -> tuple[int, int]:
    """Return a parameter's usual offset in the joined buffers, and the size of one buffer."""
    places = Counter((claim.offset, claim.part) for claim in peers.values() if claim.offset is not None and claim.part)
    fits = [
        (sum(_fitting(peers, offset or 0, part)), count, offset or 0, part) for (offset, part), count in places.items()
    ]
    _, _, offset, part_size = max(fits, default=(0, 0, 0, 0))
    return max(offset, 0), part_size


def _fitting(peers: Mapping[int, Claim], offset: int, part_size: int) -> Iterator[bool]:
    """Yield for each rank whether it says that it has what its buffer has room for, no more and no less."""
    for rank, claim in peers.items():
        begin = claim.ranks.index(rank) * part_size - offset
        start, stop = max(begin, 0), min(begin + part_size, math.prod(claim.shape))
        yield claim.size == max(stop - start, 0) and (not claim.size or claim.start == start)


def _entry(master: Fragment, weight: torch.Tensor) -> Made:
    return Made(dtype_name(weight.dtype), master.shape, lambda: weight)


def _gather_weight(master: Fragment) -> torch.Tensor:
    """Return a flattened weight that ranks have parts of. Every rank of its group calls this."""
    padded = torch.zeros(master.part, dtype=master.weight.dtype, device=master.weight.device)
    padded[: master.weight.numel()] = master.weight
    parts = [torch.empty_like(padded) for _ in master.ranks]
    distributed.all_gather(parts, padded, group=master.group)
    return torch.cat(parts)[: master.numel]


def _place(capture: Capture, local: Local, master: Fragment, sources: Known, tracer: Tracer) -> None:
    """Record which elements a master copy has, of its own weight or of another."""
    values = master.values.to(master.weight.dtype)
    ids, claimed = place_of(replace(local, values=values), sources)
    if ids is not None:
        capture.add_ids(local, tracer.traced(local.name, bits_of_tensor(values), ids))
    elif claimed is not None:
        capture.add_region(local, claimed)
    else:
        capture.not_checked.append((local.name, ALIKE))


def _add_claimed(capture: Capture, local: Local, master: Fragment) -> None:
    """Record that a master copy has the weight's elements that the rank claims."""
    of = master.weight if master.is_whole else master.values
    if 1 < master.size < master.numel and is_alike(bits_of_tensor(of)):
        capture.not_checked.append((local.name, ALIKE))
    else:
        capture.add_region(local, Region((((master.start, master.start + master.size),) if master.size else (),)))
