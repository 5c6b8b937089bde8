"""The batch of a step: the axes over which it is split, this rank's part of it, and its positions of a sequence.

Context parallel splits tokens, not weights, and may reorder them; labels and masks must be split in the same way. A
probe may define:

    sequence(mesh)             by name, the positions that this rank has: the result of passing torch.arange(length)
                               through the code that splits the batch. Labels are the positions of the tokens to
                               predict: {"labels": (positions, {"offset": 1, "ignore": -100})} says that the label of a
                               token is the next one, and that -100 stands where there is none
    SEQUENCE                   the dim that is the same sequence, by pattern over the names of parameters and buffers
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from shardviz.dump.records.tensors import Stamp
from shardviz.errors import ProbeError
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.claims.local import Local
from shardviz.live.compat.meshes import local_of
from shardviz.live.step.running import tensors_in
from shardviz.relate.tolerance import SINGLE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.layout.mesh import Mesh
    from shardviz.live.capture.capture import Capture
    from shardviz.live.capture.stamp import Stamped


Batch = tuple[Any, ...]

DATA_AXES = ("dp", "ddp", "data", "fsdp", "hsdp", "replicate", "shard")
"""Prefixes of the names of mesh axes over which training splits its batch."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a step runs on.

    Attributes:
        build: Builds the unsharded model, with the values from which the sharded one starts.
        axes: The axes over which the batch is split, with the dims that they split.
        parts: The number of equal parts of its rows.
        dim: The dim that has the rows.
    """

    build: Callable[[], nn.Module]
    axes: Mapping[str, int]
    batch: Batch
    parts: int
    dim: int


def batch_axes(probe: ModuleType, mesh: Mesh) -> dict[str, int]:
    """Return the axes over which the batch is split, outermost first, each with the dim that it splits.

    Raises:
        MeshError: The mesh has no such axis.
        ProbeError: A dim is not a whole number from 0.
    """
    named = getattr(probe, "BATCH_AXES", ())
    axes = dict(named) if isinstance(named, Mapping) else dict.fromkeys(named, 0)
    for axis, dim in axes.items():
        mesh.axis_index(axis)
        if type(dim) is not int or dim < 0:
            raise ProbeError(
                f"BATCH_AXES splits dim {dim!r} over {axis}", "count dims from 0: BATCH_AXES = {'dp': 0, 'cp': 1}"
            )
    return axes


def whole_batch(probe: ModuleType, axes: Mapping[str, int], mesh: Mesh, *, double: bool = True) -> Batch:
    """Return the probe's batch, in float64 or as it is, the same on every rank.

    What is beyond a multiple of a dim's parts is dropped: a mean over unequal parts is not the mean of the whole.

    Raises:
        ProbeError: There are fewer rows than parts.
    """
    torch.manual_seed(1)
    batch = probe.batch()
    if batch is None:
        raise ProbeError("batch() returned None", "return a tensor, or a tuple or dict of the model's arguments")
    return whole_parts(tuple(batch) if isinstance(batch, tuple | list) else (batch,), axes, mesh, double=double)


def whole_parts(batch: Batch, axes: Mapping[str, int], mesh: Mesh, *, double: bool = False) -> Batch:
    """Return a batch without what is beyond a multiple of a dim's parts.

    Raises:
        ProbeError: There are fewer rows than parts.
    """
    counts = num_parts(axes, mesh)
    return tuple(each(part, lambda tensor: _whole(tensor, counts, double=double)) for part in batch)


def num_parts(axes: Mapping[str, int], mesh: Mesh) -> dict[int, int]:
    """Return the number of parts of every dim that axes split."""
    counts: dict[int, int] = {}
    for axis, dim in axes.items():
        counts[dim] = counts.get(dim, 1) * mesh.axis_size(axis)
    return counts


def row_axes(axes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes that share out whole rows; others split rows, as for a sequence.

    These are the axes of dim 0; if there are none, those that are named like data parallelism.
    """
    by_name = [dim for axis, dim in axes.items() if axis.startswith(DATA_AXES)]
    dim = 0 if 0 in axes.values() or not by_name else by_name[0]
    return tuple(axis for axis in axes if axes[axis] == dim)


def each(batch_part: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a part of a batch with every tensor in it changed, also inside a dict."""
    if isinstance(batch_part, Mapping):
        return {key: each(value, change) for key, value in batch_part.items()}
    return change(batch_part) if torch.is_tensor(batch_part) else batch_part


def _whole(tensor: torch.Tensor, counts: Mapping[int, int], *, double: bool) -> torch.Tensor:
    for dim, parts in counts.items():
        if has_dim(tensor, dim):
            size = tensor.shape[dim]
            if size < parts:
                rows = "row" if dim == 0 else f"element in dim {dim}"
                many = rows.replace("row", "rows").replace("element", "elements")
                raise ProbeError(
                    f"the batch has {size} {rows if size == 1 else many} for {parts} ranks",
                    f"return at least {parts} {many}",
                )
            tensor = tensor.narrow(dim, 0, size // parts * parts)
    return tensor.double() if double and tensor.is_floating_point() else tensor


def has_dim(tensor: torch.Tensor, dim: int) -> bool:
    """Whether a tensor of a batch is split along a dim: one that lacks it, or that is broadcast along it, is not."""
    return tensor.ndim > dim and (dim == 0 or tensor.shape[dim] > 1)


def axes_of_one_batch(probe: ModuleType, mesh: Mesh, outputs: Sequence[torch.Tensor]) -> tuple[str, ...]:
    """Return axes named like data parallelism whose ranks saw the same batch. Every rank calls this.

    Ranks that see the same batch have the same gradients, reduced or not, so a missing reduction would not show.
    Without BATCH_AXES every rank is given the whole batch. A step of its own may still cut it: outputs then differ.

    Args:
        outputs: What the model returned on this rank, run by run.
    """
    if hasattr(probe, "BATCH_AXES"):
        return ()
    axes = tuple(axis for axis in mesh.long_axes if axis.startswith(DATA_AXES))
    if not axes:
        return ()
    norms = of_all_ranks([float(torch.linalg.vector_norm(local_of(output).abs().double())) for output in outputs])
    groups = {axis: [[norms[rank] for rank in group] for group in mesh.groups(axis)] for axis in axes}
    return tuple(axis for axis in axes if all(map(_are_equal, groups[axis])))


def _are_equal(norms: Sequence[Sequence[float]]) -> bool:
    """Whether ranks that ran the model alike have outputs of the same norms."""
    return all(
        abs(left - right) <= SINGLE * max(abs(left), abs(right))
        for of_run in zip(*norms, strict=False)
        for left, right in pairwise(of_run)
    )


def own_batch(batch: Batch, axes: Mapping[str, int], mesh: DeviceMesh) -> Batch:
    """Return this rank's part of the batch: in each dim that of its coordinate on the dim's axes, outermost first.

    It is on the device of the mesh.
    """
    for dim in dict.fromkeys(axes.values()):
        parts, position = 1, 0
        for axis in (axis for axis in axes if axes[axis] == dim):
            size = mesh[axis].size()
            parts, position = parts * size, position * size + mesh.get_local_rank(axis)
        batch = part_of(batch, position, parts, dim)
    return tuple(each(element, lambda tensor: tensor.to(mesh.device_type)) for element in batch)


def part_of(batch: Batch, number: int, parts: int, dim: int = 0) -> Batch:
    """Return one of several equal parts of a batch, by default of its rows."""
    return tuple(
        each(element, lambda tensor: tensor.chunk(parts, dim)[number] if has_dim(tensor, dim) else tensor)
        for element in batch
    )


def in_turns(batch: Batch, parts: int, turns: int) -> Batch | None:
    """Reorder a batch's rows: each of its micro-batches then has the same micro-batch of every part.

    Args:
        turns: How many micro-batches the batch is cut into, and each part.

    Returns:
        The batch; None if a micro-batch of a part has no whole number of rows.
    """
    sizes = [len(tensor) for tensor in tensors_in(batch) if tensor.ndim]
    if turns > 1 and any(size % (parts * turns) for size in sizes):
        return None

    def dealt(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.ndim:
            return tensor
        return tensor.reshape(parts, turns, -1, *tensor.shape[1:]).transpose(0, 1).flatten(0, 2)

    return tuple(each(element, dealt) for element in batch) if turns > 1 else batch


def as_written(batch: Batch) -> Any:
    """Return a batch as the probe wrote it: a batch of one tensor is passed as that tensor."""
    return batch[0] if len(batch) == 1 else batch


def add_sequence(stamped: Stamped, probe: ModuleType, mesh: DeviceMesh, capture: Capture) -> Stamped:
    """Capture the positions that this rank has, as ids. Every rank calls this.

    Args:
        stamped: The model's stamps; the ids of positions follow them.

    Returns:
        The stamps, plus one for every name, as long as the sequence.

    Raises:
        ProbeError: `sequence(mesh)` did not return positions, or used the name of one of the model's tensors.
    """
    if not hasattr(probe, "sequence"):
        return stamped
    rows = _rows(probe.sequence(mesh))
    length = max(of_all_ranks(_highest(rows))) + 1
    positions = {name: row.positions(length) for name, row in rows.items()}
    positions |= {name: _filled(name, rows[name], positions, rows, length, capture) for name in rows}
    stamps = {stamp.name: stamp for stamp in stamped.stamps}
    first = max((stamp.first + torch.Size(stamp.shape).numel() for stamp in stamped.stamps), default=1)
    for name, held in positions.items():
        if name in stamps:
            raise ProbeError(
                f"sequence(mesh) returned {name!r}, which is the name of a tensor in the model", "choose another name"
            )
        stamps[name] = Stamp(name, first, (length,), "activation")
        capture.stamps = stamps
        capture.add_ids(Local(name, "activation", (length,), held), (held + first).cpu().numpy())
        first += length
    return replace(stamped, stamps=tuple(stamps.values()))


def sequence_dims(probe: ModuleType, stamped: Stamped) -> dict[str, int]:
    """Return the dim that is the sequence, by pattern over the names of stamped tensors."""
    dims = {stamp.name: 0 for stamp in stamped.stamps if stamp.role == "activation"}
    return dims | getattr(probe, "SEQUENCE", {})


@dataclass(frozen=True)
class Row:
    """What a rank has along the sequence under one name.

    Attributes:
        held: The positions, as the probe returned them.
        offset: How many positions further it looks: 1 for labels, which are the next tokens.
        ignore: The number that stands where it has no position.
    """

    held: torch.Tensor
    offset: int = 0
    ignore: int | None = None

    @property
    def is_label(self) -> bool:
        """Whether it is about other positions than those at which it stands."""
        return self.offset != 0 or self.ignore is not None

    @property
    def ignored(self) -> torch.Tensor:
        """Where it has no position."""
        return torch.zeros_like(self.held, dtype=torch.bool) if self.ignore is None else self.held == self.ignore

    def positions(self, length: int) -> torch.Tensor:
        """Return the positions at which it stands; they wrap around the ends as in torch.roll."""
        return (self.held - self.offset) % length if self.offset else self.held


def _highest(rows: Mapping[str, Row]) -> int:
    """Return the last position that this rank has; labels count only if nothing else says how long all is."""
    plain = [row.held for row in rows.values() if not row.is_label]
    of = plain or [row.held[~row.ignored] - row.offset for row in rows.values()]
    return max((int(held.max()) for held in of if held.numel()), default=-1)


def _filled(
    name: str, row: Row, positions: Mapping[str, torch.Tensor], rows: Mapping[str, Row], length: int, capture: Capture
) -> torch.Tensor:
    """Return a row's positions, with those of the neighboring tokens if it has none.

    A label is rightly missing if its token is at the end of the sequence; any other is reported as unchecked.
    """
    if not bool(row.ignored.any()):
        return positions[name]
    neighbor = next((one for one in rows if not rows[one].is_label and len(rows[one].held) == len(row.held)), None)
    if neighbor is None:
        capture.not_checked.append((name, f"its order along the sequence: it has no input that isn't {row.ignore}"))
        return torch.where(row.ignored, 0, positions[name])
    substitutes = positions[neighbor]
    expected = substitutes[row.ignored & (substitutes + row.offset >= 0) & (substitutes + row.offset < length)]
    if len(expected):
        what = (
            f"{len(expected)} of its {len(substitutes)} elements: {row.ignore} stands where the sequence has position"
        )
        capture.not_checked.append((name, f"{what} {int(expected[0]) + row.offset}"))
    return torch.where(row.ignored, substitutes, positions[name])


def _rows(returned: Any) -> dict[str, Row]:
    """Return the probe's sequence rows, labels after the tensors that they are compared with."""
    if not isinstance(returned, dict):
        raise ProbeError(
            f"sequence(mesh) returned {type(returned).__name__}", "return a dictionary of positions by name"
        )
    rows = {name: _row(name, held) for name, held in returned.items()}
    return dict(sorted(rows.items(), key=lambda item: item[1].is_label))


def _row(name: str, returned: Any) -> Row:
    """Return positions as a row of whole numbers, from 0 if nothing else is given."""
    held, options = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if (
        not isinstance(options, dict)
        or options.keys() - {"offset", "ignore"}
        or any(type(one) is not int for one in options.values())
    ):
        raise ProbeError(
            f"sequence(mesh) returned {options!r} with the positions of {name!r}",
            'say what labels are by whole numbers: (positions, {"offset": 1, "ignore": -100})',
        )
    if not torch.is_tensor(held) or held.is_floating_point() or held.numel() != max(held.shape, default=0):
        what = f"{held.dtype}{list(held.shape)}" if torch.is_tensor(held) else type(held).__name__
        raise ProbeError(
            f"sequence(mesh) returned {what} as {name!r}",
            "pass torch.arange(length) through your split of the batch, and return the result",
        )
    row = Row(held.detach().flatten().to(torch.int64), **options)
    real = row.held[~row.ignored]
    if real.numel() and int(real.min()) < 0:
        hint = "positions count from 0; for labels, name the value of a missing label: {'ignore': -100}"
        raise ProbeError(f"sequence(mesh) returned position {int(real.min())} in {name!r}", hint)
    return row
