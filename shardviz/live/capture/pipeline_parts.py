"""A pipeline's stages in one dump: their ranks have different tensors, not replicas.

If every stage was built and stamped by itself, ids start at 1 on each, and names may repeat. In the dump, ids continue
from stage to stage, and if two stages use the same name, all names get their stage's coordinate in front:
`pp=1.0.weight`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from torch import distributed

from shardviz.errors import ShardvizError
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.meshes import Claim, without_axes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from numpy.typing import NDArray

    from shardviz.dump.records.tensors import Stamp
    from shardviz.layout.mesh import Coord, Mesh
    from shardviz.live.claims.local import Local


@dataclass(frozen=True)
class PipelinePart:
    """This rank's part of the model, and how the dump names and numbers it.

    Attributes:
        axes: The mesh axes along which ranks have different layers.
        stamps: The stamped tensors of all stages, as the dump names and numbers them.
        prefix: The prefix of the names of this rank's tensors.
        shift: The number added to its ids.
    """

    axes: tuple[str, ...] = ()
    stamps: tuple[Stamp, ...] = ()
    prefix: str = ""
    shift: int = 0

    def of_stage(self, locals_: Iterable[Local]) -> list[Local]:
        """Return this rank's tensors as in the dump: named, with no claim along stage axes."""
        rank = distributed.get_rank() if self.axes else 0

        def at_stage(claim: Claim | None) -> Claim | None:
            return claim and without_axes(claim, self.axes, rank)

        return [
            replace(
                local, name=self.prefix + local.name, claim=at_stage(local.claim), grad_claim=at_stage(local.grad_claim)
            )
            for local in locals_
        ]

    def renamed(self, pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return notes about tensors, `(name, text)`, with the dump's names."""
        return [(self.prefix + name, text) for name, text in pairs]

    def shifted(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return this rank's ids as the dump's; 0 and `ID_NONE` stay as they are."""
        return np.where(ids > 0, ids + self.shift, ids) if self.shift else ids


@dataclass(frozen=True)
class _StageMessage:
    """A rank's message to the others; only the first rank of each stage sends all of it.

    Attributes:
        names: The tensors that it has now.
    """

    digest: str
    stamps: tuple[Stamp, ...] = ()
    names: tuple[str, ...] = ()


def agree(mesh: Mesh, axes: Sequence[str], stamps: Sequence[Stamp], names: Collection[str]) -> PipelinePart:
    """Return this rank's part of the model, as all ranks agree. Every rank calls this.

    Args:
        axes: Its axes along which ranks have different layers.
        stamps: This rank's stamps, of the whole model or of its own stage; empty if nothing was stamped.

    Raises:
        MeshError: The mesh has no such axis.
        ShardvizError: Ranks of one stage stamped different tensors.
    """
    columns = [mesh.axis_index(axis) for axis in axes]
    rank = distributed.get_rank()
    digest = hashlib.blake2b(msgspec.json.encode(tuple(stamps)), digest_size=16).hexdigest()
    speaks = rank in _first_ranks(mesh, columns).values()
    of_all = of_all_ranks(_StageMessage(digest, tuple(stamps), tuple(names)) if speaks else _StageMessage(digest))
    sent_by = {stage: of_all[first] for stage, first in _first_ranks(mesh, columns).items()}
    _refuse_other_stamps(mesh, columns, axes, of_all)
    if rank not in mesh or not _are_stamped_separately(list(sent_by.values())):
        return PipelinePart(tuple(axes), tuple(stamps))
    return _renumbered_part(axes, sent_by, _stage_of(mesh, columns, rank))


def _stage_of(mesh: Mesh, columns: list[int], rank: int) -> Coord:
    return tuple(mesh.coord_of(rank)[column] for column in columns)


def _first_ranks(mesh: Mesh, columns: list[int]) -> dict[Coord, int]:
    """Return the first rank of every stage, by the stage's coordinates."""
    first: dict[Coord, int] = {}
    for rank in mesh.ranks:
        first.setdefault(_stage_of(mesh, columns, rank), rank)
    return dict(sorted(first.items()))


def _refuse_other_stamps(mesh: Mesh, columns: list[int], axes: Sequence[str], of_all: list[_StageMessage]) -> None:
    """Raise if ranks of one stage stamped different tensors: ids would then show no place."""
    firsts = _first_ranks(mesh, columns)
    for rank in mesh.ranks:
        first = firsts[_stage_of(mesh, columns, rank)]
        if of_all[rank].digest != of_all[first].digest:
            stage = ", ".join(f"{axis}={at}" for axis, at in zip(axes, _stage_of(mesh, columns, rank), strict=True))
            where = f", both at {stage}," if axes else ""
            other_axes = [axis for axis in mesh.axes if axis not in axes]
            raise ShardvizError(
                f"ranks {first} and {rank}{where} stamped tensors with different names or shapes",
                "if ranks have different layers, as in a pipeline, name the axes along which layers differ, from "
                f"{', '.join(other_axes)}: stage_axes=({other_axes[0]!r},)",
            )


def _are_stamped_separately(sent_by: list[_StageMessage]) -> bool:
    """Whether every stage stamped itself: stamps differ, or no stage lost a stamped tensor.

    If the model was stamped as a whole, a stage has only a part of the stamped tensors left.
    """
    return len(sent_by) > 1 and (
        len({message.digest for message in sent_by}) > 1
        or all({s.name for s in message.stamps} <= set(message.names) for message in sent_by)
    )


def _renumbered_part(axes: Sequence[str], sent_by: dict[Coord, _StageMessage], own_coord: Coord) -> PipelinePart:
    uses = Counter(name for sent in sent_by.values() for name in {*sent.names, *(stamp.name for stamp in sent.stamps)})
    clash = any(count > 1 for count in uses.values())
    parts, total = {}, 0
    for at, sent in sent_by.items():
        prefix = "".join(f"{axis}={position}." for axis, position in zip(axes, at, strict=True)) if clash else ""
        parts[at] = PipelinePart(
            tuple(axes), tuple(_shifted_stamp(stamp, prefix, total) for stamp in sent.stamps), prefix, total
        )
        total = max((stamp.last for stamp in parts[at].stamps), default=total)
    return replace(parts[own_coord], stamps=tuple(chain.from_iterable(stage.stamps for stage in parts.values())))


def _shifted_stamp(stamp: Stamp, prefix: str, shift: int) -> Stamp:
    tied_to = prefix + stamp.tied_to if stamp.tied_to else ""
    return msgspec.structs.replace(stamp, name=prefix + stamp.name, first=stamp.first + shift, tied_to=tied_to)
