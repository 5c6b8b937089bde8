"""One tensor over all ranks: the ranks' records of the same name laid side by side, identical layers kept together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from shardviz.dump.arrays.ids import ID_NONE, MAX_ELEMENTS, expand_runs, most_ids, own_ids, whole_ids
from shardviz.dump.pause import collector_paused
from shardviz.dump.read import DIGEST_LENGTH, layout_of, mesh_of
from shardviz.dump.records.base import MAX_NUMBER
from shardviz.errors import DumpError
from shardviz.layout.region import Region
from shardviz.text import Fold, fold, natural_key, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from shardviz.dump.read import DumpFiles
    from shardviz.dump.records.base import Moment, Role
    from shardviz.dump.records.files import RankRecord
    from shardviz.dump.records.tensors import Body, LayoutRecord, Stamp, TensorRecord
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh

__all__ = ["ID_NONE", "MAX_ELEMENTS", "Dump", "Shard", "Tensor", "dump_of", "expand_runs"]


@dataclass(frozen=True)
class Shard:
    """What one rank holds of a tensor.

    Attributes:
        rank: The global rank.
        body: Its record.
        layout: What its placements claim; None for a plain tensor.
        digests: For every name of the fold, 16 hex digits of the bytes' hash; empty where none was taken.
    """

    rank: int
    body: Body
    layout: Layout | None
    digests: str = ""

    @cached_property
    def held(self) -> Region | None:
        """The region that it holds, where the ids are a product of ranges in every dim."""
        return Region(self.body.held) if self.body.held is not None else None

    def digest(self, index: int) -> str:
        """Return the digest of the fold's name number `index`; empty where none was taken."""
        return self.digests[index * DIGEST_LENGTH : (index + 1) * DIGEST_LENGTH]


@dataclass(frozen=True)
class Tensor:
    """One tensor over all ranks, or several layers' whose records are the same on every rank.

    Attributes:
        fold: Its name, or the folded names of identical layers.
        role: What it is to the model.
        moment: When it was captured.
        shards: What each rank holds, by rank, rising; in a plan made when it is asked for.
    """

    fold: Fold
    role: Role
    moment: Moment
    shards: Mapping[int, Shard]

    @property
    def name(self) -> str:
        """The name, or the folded names: `layers.[0-31].wq.weight`."""
        return str(self.fold)

    @cached_property
    def names(self) -> list[str]:
        """Every name."""
        return self.fold.names()

    @property
    def first(self) -> Shard:
        """The shard of the lowest rank that has the tensor."""
        return next(iter(self.shards.values()))

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape, as the lowest rank sees it."""
        return self.first.body.shape

    @property
    def dtype(self) -> str:
        """The element type, as the lowest rank sees it."""
        return self.first.body.dtype

    @property
    def claimed(self) -> Layout | None:
        """The layout that the placements claim on the lowest rank; None for a plain tensor."""
        return self.first.layout

    @cached_property
    def distinct(self) -> list[Shard]:
        """One shard for each claim and each shape of a part, by rank, rising."""
        found: dict[tuple[int, tuple[int, ...]], Shard] = {}
        for shard in self.shards.values():
            found.setdefault((id(shard.layout), shard.body.local_shape), shard)
        return list(found.values())

    @cached_property
    def by_claim(self) -> dict[Layout | None, list[Shard]]:
        """The shards by what they claim: more than one key where ranks disagree or meshes are disjoint."""
        groups: dict[Layout | None, list[Shard]] = {}
        for shard in self.shards.values():
            groups.setdefault(shard.layout, []).append(shard)
        return groups


@dataclass(frozen=True)
class Dump:
    """Every tensor of a dump.

    Attributes:
        files: What was read, without damaged files.
        tensors: In model order, the stamped ones first.
    """

    files: DumpFiles
    tensors: list[Tensor]

    @cached_property
    def stamps(self) -> dict[str, Stamp]:
        """The stamped tensors by name."""
        return {stamp.name: stamp for stamp in self.files.run.stamps}

    @cached_property
    def first_ids(self) -> dict[str, int]:
        """The first id of every stamped tensor."""
        return {name: stamp.first for name, stamp in self.stamps.items()}

    @cached_property
    def last_id(self) -> int:
        """The last id of any stamped tensor; `MAX_NUMBER` where none was stamped."""
        return max((stamp.last for stamp in self.files.run.stamps), default=MAX_NUMBER)

    @cached_property
    def id_owners(self) -> tuple[list[int], list[str]]:
        """The first ids of all stamped tensors that have elements, rising, and whose they are: ties count once."""
        own = sorted(
            (stamp.first, stamp.name) for stamp in self.files.run.stamps if math.prod(stamp.shape) and not stamp.tied_to
        )
        return [first for first, _ in own], [name for _, name in own]

    def at(self, moment: Moment) -> list[Tensor]:
        """Return the tensors captured at one moment."""
        return [tensor for tensor in self.tensors if tensor.moment == moment]

    def find(self, moment: Moment, role: str, name: str) -> Tensor | None:
        """Return the tensor of a name, if it was captured at that moment."""
        return self.by_name(moment, role).get(name)

    def by_name(self, moment: Moment, role: str) -> Mapping[str, Tensor]:
        """Return the tensors of one role that were captured at one moment, by name."""
        return self._by_role.get((moment, role), {})

    @cached_property
    def stamped(self) -> Mapping[str, Tensor]:
        """The tensors that were captured with their ids, by name."""
        return {name: tensor for tensor in self.at("stamped") for name in tensor.names}

    @cached_property
    def without_ids(self) -> Mapping[str, Literal["zeros", "values"]]:
        """Stamped parameters whose ids no rank holds any more: all are zero, or all are other values."""
        found: dict[str, Literal["zeros", "values"]] = {}
        for tensor in self.at("stamped"):
            first = _first_of_runs(tensor) if tensor.role == "param" else None
            if first in (0, ID_NONE):
                found.update(dict.fromkeys(tensor.names, "values" if first else "zeros"))
        return found

    @cached_property
    def first_captured(self) -> Mapping[str, Tensor]:
        """Every tensor by name, as it was captured first."""
        found: dict[str, Tensor] = {}
        for tensor in self.tensors:
            for name in tensor.names:
                found.setdefault(name, tensor)
        return found

    @cached_property
    def _by_role(self) -> dict[tuple[Moment, str], dict[str, Tensor]]:
        found: dict[tuple[Moment, str], dict[str, Tensor]] = {}
        for tensor in self.tensors:
            found.setdefault((tensor.moment, tensor.role), {}).update(dict.fromkeys(tensor.names, tensor))
        return found

    def values(self, shard: Shard, name: str) -> NDArray[np.float64]:
        """Return the values that a shard holds, in float64 and the local shape.

        Raises:
            DumpError: The dump does not have the values, or they are not numbers of the local shape.
        """
        body = shard.body
        if body.dense:
            raw: object = self.dense(shard, name)
        elif body.values is not None:
            raw = body.values
        else:
            raise DumpError(f"{printable(name)}: rank {shard.rank} has no values in the dump")
        try:
            return np.asarray(raw, dtype=np.float64).reshape(body.local_shape)
        except (TypeError, ValueError) as error:
            raise DumpError(
                f"{printable(name)}: rank {shard.rank} has values that are not of shape {list(body.local_shape)}"
            ) from error

    def local_ids(self, shard: Shard, name: str) -> NDArray[np.int64]:
        """Return the ids that a shard holds, counted from 1 within its own tensor where they are its own.

        Returns:
            An array of the local shape. Elements of other tensors, zeros and values that are not ids are all <= 0:
            0 for zero, `ID_NONE` for no id, `-1 - id` for the id of another tensor.

        Raises:
            DumpError: The dump does not have the ids, or they are too many to lay out.
        """
        size = math.prod(shard.body.local_shape)
        most = most_ids(len(self.files.ranks), dense=shard.body.dense)
        if size > most:
            raise DumpError(f"{printable(name)}: rank {shard.rank} holds {size:,} ids, more than {most:,}")
        shape = self.stamps[name].shape if name in self.stamps else shard.body.shape
        if shard.held is not None:
            flat = shard.layout is not None and shard.layout.flat is not None
            return shard.held.flat_ids((math.prod(shape),) if flat else shape) + 1
        return own_ids(self._model_ids(shard, name), self.first_ids.get(name, 1), math.prod(shape))

    def _model_ids(self, shard: Shard, name: str) -> NDArray[np.int64]:
        body = shard.body
        if body.runs is not None:
            return expand_runs(body.runs).reshape(body.local_shape)
        if body.dense:
            return whole_ids(self.dense(shard, name), self.last_id)
        raise DumpError(f"{printable(name)}: rank {shard.rank} has no ids in the dump")

    def dense(self, shard: Shard, name: str) -> NDArray[np.generic]:
        """Return the values in the safetensors file, in the local shape.

        Raises:
            DumpError: The file does not have them, or is damaged.
        """
        body = shard.body
        return self.files.dense(shard.rank, f"{body.moment}/{body.role}/{name}", body.local_shape)


def _first_of_runs(tensor: Tensor) -> int | None:
    """Return the id with which all runs of a tensor's ids begin on all ranks; None where they differ."""
    bodies = [shard.body for shard in tensor.shards.values() if 0 not in shard.body.local_shape]
    found = {run[0] for body in bodies for run in body.runs or ((None, 0, 0),)}
    return found.pop() if len(found) == 1 else None


def dump_of(files: DumpFiles) -> Dump:
    """Lay the ranks of a dump side by side.

    Example:
        dump = dump_of(read_files("tp_fsdp-2x4.shardviz"))
        for name, tensor in find_tensors(dump, "*.weight"):
            print(name, {rank: str(shard.held) for rank, shard in tensor.shards.items()})
    """
    with collector_paused():
        return Dump(files, sorted(_tensors(files), key=_order(files)))


def _order(files: DumpFiles) -> Callable[[Tensor], tuple[object, ...]]:
    moments = ("stamped", "initial", "step", "reference", "updated", "training")
    position = {stamp.name: index for index, stamp in enumerate(files.run.stamps)}

    def key(tensor: Tensor) -> tuple[object, ...]:
        """Sort by moment, then as the model has them."""
        name = tensor.fold.prefix if not tensor.fold.numbers else tensor.names[0]
        return moments.index(tensor.moment), position.get(name, len(position)), tensor.role, natural_key(name)

    return key


Place = tuple[str, str, str, str]
Layouts = dict[int, list["Layout"]]
"""The layouts that ranks claim, each built once: ranks share them."""


def _tensors(files: DumpFiles) -> list[Tensor]:
    """Group records by name; names that every rank folds alike stay together unexpanded."""
    if files.planned is not None:
        from shardviz.plan.tensors import tensors_of

        return tensors_of(files.planned)
    places: dict[Place, dict[int, list[TensorRecord]]] = {}
    for rank, record in files.ranks.items():
        for tensor in record.tensors:
            body = record.bodies[tensor.body]
            place = (tensor.name, tensor.suffix, body.role, body.moment)
            places.setdefault(place, {}).setdefault(rank, []).append(tensor)
    layouts = {rank: _layouts(record) for rank, record in files.ranks.items()}
    found: list[Tensor] = []
    for (prefix, suffix, _, _), by_rank in places.items():
        first = next(iter(by_rank.values()))[0]
        if all(len(records) == 1 and records[0].numbers == first.numbers for records in by_rank.values()):
            whole = {rank: (records[0], records[0].digests) for rank, records in by_rank.items()}
            found.append(_tensor(files, layouts, Fold(prefix, first.numbers, suffix), whole))
        else:
            found += _regrouped(files, layouts, by_rank)
    return found


def _regrouped(files: DumpFiles, layouts: Layouts, by_rank: dict[int, list[TensorRecord]]) -> list[Tensor]:
    """Expand names that ranks fold differently, and fold again those with the same bodies on the same ranks."""
    by_name: dict[str, dict[int, tuple[TensorRecord, str]]] = {}
    for rank, records in by_rank.items():
        for record in records:
            for index, name in enumerate(Fold(record.name, record.numbers, record.suffix).names()):
                digest = record.digests[index * DIGEST_LENGTH : (index + 1) * DIGEST_LENGTH]
                by_name.setdefault(name, {})[rank] = (record, digest)
    keyed = [
        (name, tuple((rank, record.body, bool(digest)) for rank, (record, digest) in of.items()))
        for name, of in by_name.items()
    ]
    tensors = []
    for folded, bodies in fold(keyed):
        members = [by_name[name] for name in folded.names()]
        together = {rank: (members[0][rank][0], "".join(member[rank][1] for member in members)) for rank, *_ in bodies}
        tensors.append(_tensor(files, layouts, folded, together))
    return tensors


def _tensor(files: DumpFiles, layouts: Layouts, folded: Fold, records: dict[int, tuple[TensorRecord, str]]) -> Tensor:
    shards = {}
    for rank in sorted(records):
        tensor, digests = records[rank]
        body = files.ranks[rank].bodies[tensor.body]
        shards[rank] = Shard(rank, body, None if body.layout is None else layouts[rank][body.layout], digests)
    first = next(iter(shards.values())).body
    return Tensor(folded, first.role, first.moment, shards)


def _layouts(record: RankRecord) -> list[Layout]:
    meshes = [mesh_of(mesh) for mesh in record.meshes]
    return [_layout(claim, meshes[claim.mesh]) for claim in record.layouts]


@lru_cache(maxsize=4096)
def _layout(record: LayoutRecord, mesh: Mesh) -> Layout:
    return layout_of(record, mesh)
