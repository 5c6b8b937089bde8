"""The ranks' records of the same name laid side by side, identical layers kept together."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from shardviz.dump.read import layout_of, mesh_of
from shardviz.dump.records.base import DIGEST_LENGTH
from shardviz.dump.tensor import Shard, Tensor
from shardviz.text import Fold, fold

if TYPE_CHECKING:
    from shardviz.dump.read import DumpFiles
    from shardviz.dump.records.files import RankRecord
    from shardviz.dump.records.tensors import LayoutRecord, TensorRecord
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh

Place = tuple[str, str, str, str]
Layouts = dict[int, list["Layout"]]
"""The layouts that ranks claim, each built once: ranks share them."""


def side_by_side(files: DumpFiles) -> list[Tensor]:
    """Group records by name; names that every rank folds alike stay together unexpanded."""
    if files.planned is not None:
        from shardviz.dump.plan.shards import tensors_of

        return tensors_of(files.planned)
    places: dict[Place, dict[int, list[TensorRecord]]] = {}
    for rank, record in files.ranks.items():
        for tensor in record.tensors:
            body = record.bodies[tensor.body]
            place = (tensor.name, tensor.suffix, body.role, body.moment)
            places.setdefault(place, {}).setdefault(rank, []).append(tensor)
    layouts = {rank: _layouts(record) for rank, record in files.ranks.items()}
    tensors: list[Tensor] = []
    for (prefix, suffix, _, _), by_rank in places.items():
        first = next(iter(by_rank.values()))[0]
        if all(len(records) == 1 and records[0].numbers == first.numbers for records in by_rank.values()):
            whole = {rank: (records[0], records[0].digests) for rank, records in by_rank.items()}
            tensors.append(_tensor(files, layouts, Fold(prefix, first.numbers, suffix), whole))
        else:
            tensors += _regrouped(files, layouts, by_rank)
    return tensors


def _regrouped(files: DumpFiles, layouts: Layouts, by_rank: dict[int, list[TensorRecord]]) -> list[Tensor]:
    """Expand names that ranks fold differently, and fold those with equal bodies again."""
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
