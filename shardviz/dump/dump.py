"""All tensors of a dump, by moment, role and name or what a user gives of it, with ids and values of each rank."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from shardviz.dump.arrays import ID_NONE, expand_runs, most_ids, own_ids, whole_ids
from shardviz.dump.read import layout_of, mesh_of
from shardviz.dump.records.base import DIGEST_LENGTH, MAX_NUMBER
from shardviz.dump.tensor import Shard, Tensor, with_whole_layouts
from shardviz.errors import DumpError, ShardvizError
from shardviz.groups import in_groups, the_only
from shardviz.machine import collector_paused
from shardviz.text import Fold, fold, folded_names, natural_key, nearest, printable, starred

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.dump.read import DumpFiles
    from shardviz.dump.records.base import Moment
    from shardviz.dump.records.files import RankRecord
    from shardviz.dump.records.step import NoiseRecord
    from shardviz.dump.records.tensors import LayoutRecord, Stamp, TensorRecord
    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh


Place = tuple[str, str, str, str]
Layouts = dict[int, list["Layout"]]
"""The layouts that ranks claim, each built once: ranks share them."""


def side_by_side(files: DumpFiles) -> list[Tensor]:
    """Group records by name; names that every rank folds alike stay together unexpanded."""
    if files.planned is not None:
        from shardviz.dump.plan import tensors_of

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


__all__ = ["Dump", "Shard", "Tensor", "dump_of"]


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
        """The last id of any stamped tensor; `MAX_NUMBER` if none was stamped."""
        return max((stamp.last for stamp in self.files.run.stamps), default=MAX_NUMBER)

    @cached_property
    def id_owners(self) -> tuple[list[int], list[str]]:
        """First ids of all non-empty stamped tensors, rising, and their names; ties count once."""
        owners = sorted(
            (stamp.first, stamp.name) for stamp in self.files.run.stamps if math.prod(stamp.shape) and not stamp.tied_to
        )
        return [first for first, _ in owners], [name for _, name in owners]

    def owner(self, model_id: int) -> str:
        """Return the name of the tensor that an id of the model belongs to."""
        firsts, names = self.id_owners
        return names[bisect_right(firsts, model_id) - 1]

    def at(self, moment: Moment) -> Sequence[Tensor]:
        """Return the tensors captured at one moment."""
        return self._by_moment.get(moment, ())

    @cached_property
    def _by_moment(self) -> Mapping[Moment, Sequence[Tensor]]:
        return in_groups((tensor.moment, tensor) for tensor in self.tensors)

    def named(self, name: str) -> Sequence[Tensor]:
        """Return the tensors of a name, of every moment and role."""
        return self._by_name.get(name, ())

    @cached_property
    def _by_name(self) -> Mapping[str, Sequence[Tensor]]:
        return in_groups((name, tensor) for tensor in self.tensors for name in tensor.names)

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
        """Stamped parameters of which no rank has ids left: all zeros, or all other values."""
        contents: dict[str, Literal["zeros", "values"]] = {}
        for tensor in self.at("stamped"):
            bodies = [shard.body for shard in tensor.shards.values()] if tensor.role == "param" else []
            runs = (run for body in bodies if 0 not in body.local_shape for run in body.runs or ((None, 0, 0),))
            first = the_only({run[0] for run in runs})
            if first in (0, ID_NONE):
                contents.update(dict.fromkeys(tensor.names, "values" if first else "zeros"))
        return contents

    @cached_property
    def all_without_ids(self) -> Literal["", "zeros", "values", "mixed"]:
        """What all stamped parameters hold instead of ids; empty if any has its ids."""
        params = {name for tensor in self.at("stamped") if tensor.role == "param" for name in tensor.names}
        if not params or params != self.without_ids.keys():
            return ""
        held = set(self.without_ids.values())
        return held.pop() if len(held) == 1 else "mixed"

    @cached_property
    def ties(self) -> Mapping[str, Sequence[str]]:
        """Names that share their storage with others on a rank, each with all of these names."""
        return {name: group for record, _ in self.files.alike() for group in record.tied for name in group}

    @cached_property
    def first_captured(self) -> Mapping[str, Tensor]:
        """Every tensor by name, as it was captured first."""
        tensors: dict[str, Tensor] = {}
        for tensor in self.tensors:
            for name in tensor.names:
                tensors.setdefault(name, tensor)
        return tensors

    @cached_property
    def noises(self) -> Mapping[tuple[str, str], NoiseRecord]:
        """Rounding noise of each result of a step, by role and name; empty for a step in float64."""
        records = self.files.ranks[0].noise if 0 in self.files.ranks else ()
        return {(record.role, record.name): record for record in records}

    def vectors(self, shape: tuple[int, ...]) -> tuple[Sequence[str], NDArray[np.float64]]:
        """Return the unsharded model's vectors of a shape: their names, and a row of values each.

        Raises:
            DumpError: The dump does not have the values.
        """
        if shape not in self._vectors:
            params = self.by_name("reference", "param").items() if len(shape) == 1 else ()
            values = {name: self.values(tensor.first, name) for name, tensor in params if tensor.shape == shape}
            self._vectors[shape] = list(values), np.array([*values.values()]).reshape(-1, *shape)
        return self._vectors[shape]

    @cached_property
    def _vectors(self) -> dict[tuple[int, ...], tuple[Sequence[str], NDArray[np.float64]]]:
        return {}

    @cached_property
    def _by_role(self) -> dict[tuple[Moment, str], dict[str, Tensor]]:
        by_role: dict[tuple[Moment, str], dict[str, Tensor]] = {}
        for tensor in self.tensors:
            by_role.setdefault((tensor.moment, tensor.role), {}).update(dict.fromkeys(tensor.names, tensor))
        return by_role

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
        """Return the ids that a shard holds, counted from 1 within its tensor.

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
        body = shard.body
        if body.runs is None and not body.dense:
            raise DumpError(f"{printable(name)}: rank {shard.rank} has no ids in the dump")
        ids = self.dense(shard, name) if body.runs is None else expand_runs(body.runs).reshape(body.local_shape)
        return own_ids(whole_ids(ids, self.last_id), self.first_ids.get(name, 1), math.prod(shape))

    def dense(self, shard: Shard, name: str) -> NDArray[np.generic]:
        """Return the values in the safetensors file, in the local shape.

        Raises:
            DumpError: The file does not have them, or is damaged.
        """
        body = shard.body
        return self.files.dense(shard.rank, f"{body.moment}/{body.role}/{name}", body.local_shape)


def dump_of(files: DumpFiles) -> Dump:
    """Lay the ranks of a dump side by side.

    Example:
        dump = dump_of(read_files("tp_fsdp-2x4.shardviz"))
        for name, tensor in find_tensors(dump, "*.weight"):
            print(name, {rank: str(shard.held) for rank, shard in tensor.shards.items()})
    """
    with collector_paused():
        tensors = with_whole_layouts(side_by_side(files), files.run.stamps)
        return Dump(files, sorted(tensors, key=_order(files)))


def _order(files: DumpFiles) -> Callable[[Tensor], tuple[object, ...]]:
    moments = ("stamped", "initial", "step", "reference", "updated", "training", "next")
    position = {stamp.name: index for index, stamp in enumerate(files.run.stamps)}

    def key(tensor: Tensor) -> tuple[object, ...]:
        """Sort by moment, then as the model has them."""
        name = tensor.fold.prefix if not tensor.fold.numbers else tensor.names[0]
        return moments.index(tensor.moment), position.get(name, len(position)), tensor.role, natural_key(name)

    return key


MOST_CANDIDATES = 5
"""Names with one end that are written out."""


def find_tensors(dump: Dump, pattern: str) -> list[tuple[str, Tensor]]:
    """Find tensors by exact name, by a pattern with `*`, or by a unique end of a name.

    Returns:
        Names with their tensors, each name once, as it was captured first.

    Raises:
        ShardvizError: No name fits, or the end of a name fits several.

    Example:
        find_tensors(dump, "layers.0.up.weight")
        find_tensors(dump, "up.weight")  # the one whose name ends so
        find_tensors(dump, "layers.*.bias")
    """
    by_name = dump.first_captured
    return [(name, by_name[name]) for name in find_names(by_name, pattern, "the dump")]


def find_names(names: Collection[str], pattern: str, where: str) -> list[str]:
    """Find names as `find_tensors` does.

    Args:
        names: All names.
        pattern: A whole name, a pattern with `*`, or the end of a name.
        where: What has them, for the error.

    Raises:
        ShardvizError: No name fits, or the end of a name fits several.
    """
    if pattern in names:
        return [pattern]
    if is_pattern(pattern):
        matching = [name for name in names if matches_pattern(name, pattern)]
    else:
        matching = [name for name in names if name.endswith(f".{pattern}")]
        if len(matching) > 1:
            hint = f"write more of the name, as in {printable(matching[0])}, or '*.{pattern}' for all of them"
            raise ShardvizError(ambiguity(matching, pattern), hint)
    if not matching:
        raise ShardvizError(f"{where} has no tensor {pattern!r}", hint_at_name(pattern, list(names)))
    return matching


def ambiguity(names: Sequence[str], end: str) -> str:
    """Say which names end alike, identical layers as one."""
    return f"{len(names):,} tensors end in {end!r}: {printable(folded_names(names, MOST_CANDIDATES))}"


def hint_at_name(name: str, names: Sequence[str]) -> str:
    """Return a hint at the likeliest name or pattern, such as "did you mean up.weight?"."""
    close = _pattern_meant(name, names) if is_pattern(name) else None
    if not any(char in name for char in "*?"):  # brackets may be a part of the name
        close = close or _name_meant(name, names)
    return f"did you mean {printable(close)}?" if close else f"it has {_some_names(names) or 'none that can be read'}"


def is_pattern(name: str) -> bool:
    """Whether a name stands for all that it matches, as `fnmatch` does."""
    return any(char in name for char in "*?[")


def matches_pattern(name: str, pattern: str) -> bool:
    """Whether a name equals a pattern or matches it; names may contain brackets."""
    return name == pattern or fnmatchcase(name, pattern)


def _name_meant(name: str, names: Sequence[str]) -> str | None:
    of_module = [known for known in names if f".{name}." in f".{known}"]
    by_end = {known.rpartition(".")[2]: known for known in reversed(names)}
    return next(iter(of_module), None) or nearest(name, names) or by_end.get(nearest(name, by_end) or "")


def _pattern_meant(pattern: str, names: Sequence[str]) -> str | None:
    """Return the nearest pattern that matches a name, or None."""
    before, dot, _ = pattern.rpartition(".")
    by_star = (f"{before}{dot}{name.rpartition('.')[2]}" for name in names)
    patterns = [*dict.fromkeys((*by_star, *map(starred, names)))]
    fitting = [one for one in patterns if any(matches_pattern(name, one) for name in names)]
    return nearest(pattern, fitting)


def _some_names(names: Sequence[str]) -> str:
    nonempty = [name for name in names if name]
    shown = ", ".join(map(printable, nonempty[:3]))
    return shown if len(nonempty) <= 3 else f"{shown} and {len(nonempty) - 3:,} more"
