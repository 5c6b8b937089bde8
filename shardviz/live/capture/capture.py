"""Capture: record the tensors that this rank holds, in the form of the dump's records.

A `Capture` collects one rank's tensors at several moments and becomes its `RankRecord`.
"""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from shardviz.dump.records.base import SCHEMA, Moment
from shardviz.dump.records.files import RankRecord, RunRecord
from shardviz.dump.records.tensors import Body, GatherRecord, LayoutRecord, MeshRecord, Position, TensorRecord
from shardviz.layout.mesh import Mesh
from shardviz.live.capture import describe
from shardviz.live.capture.meshes import plain_mesh
from shardviz.live.capture.stamp import dtype_name, named_tensors, tied_names
from shardviz.live.claims.registry import unwrapped
from shardviz.live.job import VALUES_LIMIT
from shardviz.text import fold, listed
from shardviz.versions import package_version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.dump.records.step import (
        CallRecord,
        CastRecord,
        ClipRecord,
        CollectiveRecord,
        GivenRecord,
        MaskRecord,
        MoveRecord,
        NoiseRecord,
        OptionsRecord,
        RaisedRecord,
        ReductionRecord,
        StageRecord,
        UnreadRecord,
        WrapperRecord,
    )
    from shardviz.dump.records.tensors import FragmentRecord, SentRecord, Stamp
    from shardviz.dump.records.trace import ArgumentRecord, KeptRecord, LinesRecord, PointRecord, SketchRecord
    from shardviz.layout.region import Region
    from shardviz.live.claims.local import Local


GATHER = "full_tensor"
"""The function of torch by which a whole tensor is gathered."""

MAX_LISTED = 4
"""At most so many tensors are listed of which another one has elements."""


@dataclass(frozen=True)
class Part:
    """The slices of a tensor that are elements of one stamped tensor.

    Attributes:
        source: The stamped tensor.
        slices: Their numbers.
        shape: The stamped tensor's shape.
    """

    source: str
    dim: int
    slices: torch.Tensor
    shape: tuple[int, ...]

    @classmethod
    def find(cls, ids: NDArray[np.int64], stamp: Stamp) -> Part | None:
        """Return the slices that have a stamped tensor's ids; None if these aren't whole slices of one dim."""
        is_of = (ids >= stamp.first) & (ids <= stamp.last)
        for dim in range(ids.ndim if ids.ndim == len(stamp.shape) else 0):
            others = tuple(other for other in range(ids.ndim) if other != dim)
            slices = np.flatnonzero(is_of.all(others))
            if np.array_equal(slices, np.flatnonzero(is_of.any(others))):
                return cls(stamp.name, dim, torch.from_numpy(slices), stamp.shape)
        return None

    def of(self, local: Local) -> Local:
        """Return the slices as a tensor of the stamped one's name."""
        at = self.slices.to(local.values.device)
        grad = None if local.grad is None else local.grad.index_select(self.dim, at)
        values = local.values.index_select(self.dim, at)
        return replace(local, name=self.source, shape=self.shape, values=values, grad=grad, claim=None, grad_claim=None)


@dataclass
class Capture:
    """Everything that is captured on one rank, collected moment by moment.

    What is not described here becomes the field of that name in the rank's record.

    Attributes:
        values_limit: Local tensors of at most this many elements are written out.
        dense: The arrays that go into a file beside the record, by `moment/role/name`, each of the local shape.
        run_id: What names the run in all of its files.
    """

    rank: int
    num_ranks: int
    stamps: Mapping[str, Stamp] = field(default_factory=dict)
    values_limit: int = VALUES_LIMIT
    dense: dict[str, NDArray[np.generic]] = field(default_factory=dict)
    not_checked: list[tuple[str, str]] = field(default_factory=list)
    without_ids: list[str] = field(default_factory=list)
    not_applied: list[tuple[str, str]] = field(default_factory=list)
    collectives: list[CollectiveRecord] = field(default_factory=list)
    reductions: list[ReductionRecord] = field(default_factory=list)
    moves: list[MoveRecord] = field(default_factory=list)
    casts: list[CastRecord] = field(default_factory=list)
    unread: list[UnreadRecord] = field(default_factory=list)
    schedule: list[StageRecord] = field(default_factory=list)
    stages: list[int] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)
    runs: int = 0
    is_own_step: bool | None = None
    steps_before: int = 0
    narrowed_to: set[torch.dtype] = field(default_factory=set)
    narrow_sums: set[torch.dtype] = field(default_factory=set)
    raised: list[RaisedRecord] = field(default_factory=list)
    held_back: list[str] = field(default_factory=list)
    kept_gradients: list[str] = field(default_factory=list)
    module_settings: dict[str, dict[str, str]] = field(default_factory=dict)
    wrappers: list[WrapperRecord] | None = None
    masks: list[MaskRecord] = field(default_factory=list)
    noise: list[NoiseRecord] = field(default_factory=list)
    given: list[GivenRecord] = field(default_factory=list)
    trace: list[PointRecord] = field(default_factory=list)
    sketches: list[SketchRecord] = field(default_factory=list)
    kept: list[KeptRecord] = field(default_factory=list)
    arguments: list[ArgumentRecord] = field(default_factory=list)
    lines: list[LinesRecord] = field(default_factory=list)
    buffers_beside: list[str] = field(default_factory=list)
    stepped_copies: list[str] = field(default_factory=list)
    stale_copies: list[str] = field(default_factory=list)
    not_stepped: list[str] = field(default_factory=list)
    not_saved: list[str] = field(default_factory=list)
    read_buffers: list[str] = field(default_factory=list)
    written_buffers: list[tuple[str, str]] = field(default_factory=list)
    kept_buffers: list[str] = field(default_factory=list)
    other_settings: list[str] = field(default_factory=list)
    other_options: list[tuple[str, str, str, str]] = field(default_factory=list)
    options: list[OptionsRecord] = field(default_factory=list)
    clips: list[ClipRecord] = field(default_factory=list)
    as_built: list[str] = field(default_factory=list)
    made_of: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    not_due: list[str] = field(default_factory=list)
    written_gathered: list[str] = field(default_factory=list)
    fragments: list[FragmentRecord] = field(default_factory=list)
    filled: list[str] = field(default_factory=list)
    unwritten: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    skipped_keys: list[tuple[str, str]] = field(default_factory=list)
    rounded: list[tuple[str, str, str]] = field(default_factory=list)
    sent: list[SentRecord] = field(default_factory=list)
    run_id: str = ""
    _meshes: dict[MeshRecord, int] = field(default_factory=dict)
    _positions: dict[int, Position] = field(default_factory=dict)
    _layouts: dict[LayoutRecord, int] = field(default_factory=dict)
    _bodies: dict[Any, int] = field(default_factory=dict)
    _tensors: list[tuple[str, int, str]] = field(default_factory=list)
    _tied: set[tuple[str, ...]] = field(default_factory=set)
    _gathered: list[GatherRecord] = field(default_factory=list)
    _parts: dict[str, Sequence[Part]] = field(default_factory=dict)
    _body_list: list[Body] = field(default_factory=list)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of all meshes that were seen so far."""
        return tuple(dict.fromkeys(axis for mesh in self._meshes for axis in mesh.axes))

    def add_mesh(self, device_mesh: DeviceMesh) -> None:
        """Record this rank's place on a mesh: its coordinate, and its rank in each axis's group."""
        coord = device_mesh.get_coordinate()
        index = self._mesh(plain_mesh(device_mesh))
        if coord is not None:
            groups = [device_mesh.get_group(axis) for axis in range(device_mesh.ndim)]
            self._positions[index] = Position(index, tuple(coord), tuple(distributed.get_rank(g) for g in groups))

    def add_group(self, axis: str, ranks: tuple[int, ...]) -> None:
        """Record a process group that this rank is in, as a mesh of one axis."""
        self._mesh(Mesh((axis,), (len(ranks),), ranks))

    def add_meshes(self, model: nn.Module) -> None:
        """Record this rank's place on every mesh that the model's parameters are on."""
        for mesh in {tensor.device_mesh for _, _, tensor in named_tensors(model) if isinstance(tensor, DTensor)}:
            self.add_mesh(mesh)

    def add_values(self, local: Local, moment: Moment) -> None:
        """Record a tensor's own values: a digest, and the values if few or needed for comparison."""
        if local.unknown:
            self.not_checked.append((local.name, local.unknown))
        if local.values.is_meta:
            self._add(local.name, self._body(local, moment), "")
            return
        small = local.values.numel() <= self.values_limit
        dense = not small and moment in ("step", "reference", "updated", "training", "next")
        constant = local.is_constant
        values = describe.nested(local.values) if small else None
        body = self._body(local, moment, values=values, constant=constant, dense=dense)
        if dense:
            self.dense[f"{moment}/{local.role}/{local.name}"] = describe.as_numpy(local.values)
        self._add(local.name, body, describe.digest(local.values))

    def add_ids(self, local: Local, ids: NDArray[np.int64]) -> None:
        """Record a stamped tensor's ids."""
        stamp = self.stamps.get(local.name)
        if stamp is None:
            sources = dict(self.made_of).get(local.name, ())
            has = f"; it has elements of {listed(sources, MAX_LISTED)}" if sources else ""
            why = f"it was not stamped: the unsharded model has no tensor of this name{has}"
            self.not_checked.append((local.name, why))
            return
        held = describe.as_ranges(ids, stamp, (math.prod(stamp.shape),) if local.flat else stamp.shape)
        runs = None if held is not None else describe.as_runs(ids)
        whole = local if local.claim else replace(local, shape=stamp.shape)
        body = self._body(whole, "stamped", held=held, runs=runs, dense=held is None and runs is None)
        if body.dense:
            self.dense[f"stamped/{local.role}/{local.name}"] = ids
        self._add(local.name, body, "")

    def add_parts(self, local: Local, parts: Sequence[Part], ids: NDArray[np.int64]) -> None:
        """Record what a tensor has of several, under the names of these."""
        self._parts[local.name] = parts
        for part in parts:
            self.add_ids(part.of(local), ids.take(part.slices.numpy(), part.dim))

    def in_parts(self, locals_: Iterable[Local]) -> Iterator[Local]:
        """Yield tensors, and in place of one that has elements of several its parts, under the names of these."""
        for local in locals_:
            parts = self._parts.get(local.name, ())
            yield from [part.of(local) for part in parts] or [local]

    def add_region(self, local: Local, region: Region) -> None:
        """Record a tensor's region of its own elements, in order, without writing ids out."""
        if max(map(len, region.dims), default=0) > describe.MAX_RANGES:
            stamp = self.stamps[local.name]
            shape = (math.prod(stamp.shape),) if local.flat else stamp.shape
            self.add_ids(local, region.flat_ids(shape) + stamp.first)
            return
        whole = local if local.claim else replace(local, shape=self.stamps[local.name].shape)
        self._add(local.name, self._body(whole, "stamped", held=region.dims), "")

    def add_gathered(self, name: str, ids: NDArray[np.int64]) -> None:
        """Record the ids that torch's `full_tensor` returned for a stamped tensor."""
        stamp = self.stamps[name]
        held = describe.as_ranges(ids, stamp, stamp.shape)
        runs = describe.as_runs(ids) if held is None else None
        if held is None and runs is None:
            self.not_checked.append((name, f"{GATHER} returned ids in more than {describe.MAX_RUNS:,} runs"))
        else:
            self._gathered.append(GatherRecord(name, GATHER, held, runs))

    def add_gather_error(self, name: str, error: Exception) -> None:
        """Record that torch's `full_tensor` raised."""
        line = str(error).strip().partition("\n")[0]
        self._gathered.append(GatherRecord(name, GATHER, error=f"{type(error).__name__}: {line}"))

    def add_ties(self, model: nn.Module, prefix: str = "") -> None:
        """Record which names share storage on this rank, each with a prefix."""
        self._tied |= set(tied_names(unwrapped(model), prefix))

    def record(self) -> RankRecord:
        """Return everything captured as this rank's record."""
        digests: dict[tuple[str, int], str] = {(name, body): digest for name, body, digest in self._tensors}
        folded = fold((name, body) for name, body, _ in self._tensors)
        collected = ((name, getattr(self, name)) for name in RankRecord.__struct_fields__ if hasattr(self, name))
        fields: dict[str, Any] = {name: tuple(kept) if isinstance(kept, list) else kept for name, kept in collected} | {
            "schema": SCHEMA,
            "hostname": socket.gethostname(),
            "meshes": tuple(self._meshes),
            "positions": tuple(self._positions.values()),
            "layouts": tuple(self._layouts),
            "bodies": tuple(self._body_list),
            "tensors": tuple(
                TensorRecord(f.prefix, body, f.numbers, f.suffix, "".join(digests[name, body] for name in f.names()))
                for f, body in folded
            ),
            "tied": tuple(sorted(self._tied)),
            "gathered": tuple(self._gathered),
            "not_checked": tuple(dict.fromkeys(self.not_checked)),
            "without_ids": tuple(dict.fromkeys(self.without_ids)),
            "narrowed_to": tuple(sorted(map(dtype_name, self.narrowed_to))),
            "narrow_sums": tuple(sorted(map(dtype_name, self.narrow_sums))),
            "not_applied": tuple(dict.fromkeys(self.not_applied)),
        }
        return RankRecord(**fields)

    def _add(self, name: str, body: Body, digest: str) -> None:
        key = repr(body)
        if key not in self._bodies:
            self._bodies[key] = len(self._body_list)
            self._body_list.append(body)
        self._tensors.append((name, self._bodies[key], digest))

    def _body(self, local: Local, moment: Moment, **content: Any) -> Body:
        return Body(
            role=local.role,
            moment=moment,
            shape=local.shape,
            local_shape=tuple(local.values.shape),
            dtype=dtype_name(local.values.dtype),
            device=str(local.values.device),
            layout=self._layout(local),
            assumed=local.assumed,
            grad=None if local.role != "param" else "none" if local.grad is None else "here",
            **content,
        )

    def _layout(self, local: Local) -> int | None:
        if local.claim is None:
            return None
        mesh, placements = local.claim
        flat = local.flat[0] if local.flat else None
        record = LayoutRecord(self._mesh(mesh), tuple(map(str, placements)), local.claimed_shape, flat, local.own_axes)
        return self._layouts.setdefault(record, len(self._layouts))

    def _mesh(self, mesh: Mesh) -> int:
        record = MeshRecord(mesh.axes, mesh.shape, mesh.ranks)
        return self._meshes.setdefault(record, len(self._meshes))


def run_record(
    num_ranks: int,
    mesh: Mesh | None,
    command: tuple[str, ...] = (),
    *,
    run_id: str = "",
    probe: str = "",
    reference: str = "",
    stamps: tuple[Stamp, ...] = (),
    intended: Mapping[str, str] | None = None,
    sequence: Mapping[str, int] | None = None,
) -> RunRecord:
    """Return the facts about the whole run, for `run.json`."""
    return RunRecord(
        schema=SCHEMA,
        shardviz=package_version("shardviz"),
        torch=package_version("torch"),
        num_ranks=num_ranks,
        command=command,
        mesh=None if mesh is None else MeshRecord(mesh.axes, mesh.shape, mesh.ranks),
        run_id=run_id,
        probe=probe,
        reference=reference,
        stamps=stamps,
        intended=dict(intended or {}),
        sequence=dict(sequence or {}),
    )
