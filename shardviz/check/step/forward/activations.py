"""Module outputs in the order of execution, each related to the unsharded model's.

Placements say it of most. Of the others rank 0 has the unsharded model's values: a module may return the features
whose rows its weight has, or slices in another order than coordinates are in (head-tail order of context parallel).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from shardviz.check.step.comparison import whole_of
from shardviz.dump.records.trace import is_point
from shardviz.layout.region import indices
from shardviz.relate.orders import places_of
from shardviz.text import Fold

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from shardviz.dump.dump import Dump, Shard
    from shardviz.relate.sides import Rounding

State = Literal["right", "pending", "part", "reordered", "repeated", "odd"]
"""`part`: the features that its weight has; `reordered`: every slice once on some rank; `repeated`: some slices on no
rank; `pending`: terms of a sum; `odd`: nothing of the unsharded model's."""


@dataclass(frozen=True)
class Activation:
    """The output of one module on every rank that ran it.

    Attributes:
        name: The module.
        state: What it is of the unsharded model's.
        dim: The dim whose slices were found, if they were looked for.
        places: For each rank, where the slices that it has stand in the whole; -1 for those that do not.
    """

    name: str
    state: State
    dim: int = -1
    places: Mapping[int, NDArray[np.int64]] | None = None


@dataclass(frozen=True)
class Activations:
    """Every module's output.

    Attributes:
        dump: The dump.
        rounding: What the step allows for rounding.
    """

    dump: Dump
    rounding: Rounding

    @cached_property
    def order(self) -> Mapping[int, list[str]]:
        """The modules that each rank ran, in order."""
        return {
            rank: [
                name
                for tensor in record.tensors
                if (record.bodies[tensor.body].role, record.bodies[tensor.body].moment) == ("activation", "step")
                for name in Fold(tensor.name, tensor.numbers, tensor.suffix).names()
                if not is_point(name)
            ]
            for rank, record in self.dump.files.ranks.items()
        }

    @cached_property
    def by_name(self) -> Mapping[str, Activation]:
        """Every module's output, by name."""
        return {name: self._of(name) for name in dict.fromkeys(name for names in self.order.values() for name in names)}

    @cached_property
    def first_odd(self) -> tuple[list[Activation], Activation | None]:
        """The first module, on the lowest rank that has one, whose output is not right; with those before it there."""
        for names in self.order.values():
            for index, name in enumerate(names):
                if self._is_odd(name, names[index + 1 :]):
                    return [self.by_name[before] for before in names[:index]], self.by_name[name]
        return [], None

    def _is_odd(self, name: str, later: list[str]) -> bool:
        """Whether a module's output is wrong; of a module that runs on micro-batches only the first one is there."""
        activation = self.by_name[name]
        if activation.state != "repeated" or activation.places is None:
            return activation.state in ("repeated", "odd")
        repeated = (one for one in map(self.by_name.__getitem__, later) if one.state == "repeated")
        return not self.in_micro_batches and not any(_alike(activation.places, one.places or {}) for one in repeated)

    @cached_property
    def num_micro_batches(self) -> int:
        """How many micro-batches the stages of a pipeline ran; 1 if there are no stages."""
        return 1 + max((run.microbatch for one in self.dump.files.ranks.values() for run in one.schedule), default=0)

    @cached_property
    def in_micro_batches(self) -> bool:
        """Whether stages ran several micro-batches."""
        return self.num_micro_batches > 1

    def is_split(self, name: str, axis: str) -> bool:
        """Whether ranks along an axis have different parts of a module's output, as far as is known."""
        layout = self.dump.by_name("step", "activation")[name].claimed
        return layout is None or any(axis in chain for chain in layout.chains)

    def _of(self, name: str) -> Activation:
        tensor = self.dump.by_name("step", "activation")[name]
        layouts = [shard.layout for shard in tensor.shards.values()]
        if all(layout is not None for layout in layouts):
            pending = any(layout.partial for layout in layouts if layout is not None)
            return Activation(name, "pending" if pending else "right")
        whole = whole_of(self.dump, "activation", name)
        return Activation(name, "odd") if whole is None else self._beside(name, tensor.shards, whole)

    def _beside(self, name: str, shards: Mapping[int, Shard], whole: NDArray[np.float64]) -> Activation:
        """Locate every rank's values in the unsharded model's output of a module."""
        near = self.rounding.tolerance(whole, gradient=False)
        places, dims, cut = {}, set(), False
        for rank, shard in shards.items():
            values = self.dump.values(shard, name)
            expected = self._features(name, rank, values, whole)
            cut |= expected is not whole
            if values.shape == expected.shape and bool(np.all(np.abs(values - expected) <= near)):
                places[rank] = np.arange(len(values))
                dims.add(0)
                continue
            location = places_of(values, expected, near)
            if location is None:
                return Activation(name, "odd")
            dims.add(location[0])
            places[rank] = location[1]
        if len(dims) != 1:
            return Activation(name, "odd")
        dim = dims.pop()
        return Activation(name, _state(places, whole.shape[dim], cut=cut), dim, places)

    def _features(
        self, name: str, rank: int, values: NDArray[np.float64], whole: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the whole with the features alone whose rows the module's plain weight has on a rank."""
        stamped = self.dump.stamped.get(f"{name}.weight")
        held = stamped.shards[rank].held if stamped is not None and rank in stamped.shards else None
        if held is None or values.ndim != whole.ndim or stamped is None or stamped.shape[0] != whole.shape[-1]:
            return whole
        columns = indices(held.dims[0])
        return whole[..., columns] if values.shape[-1] == len(columns) != whole.shape[-1] else whole


def _alike(left: Mapping[int, NDArray[np.int64]], right: Mapping[int, NDArray[np.int64]]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[rank], right[rank]) for rank in left)


def _state(places: Mapping[int, NDArray[np.int64]], size: int, *, cut: bool) -> State:
    every = np.concatenate(list(places.values()))
    if np.any(every < 0):
        return "odd"
    counts = np.bincount(every, minlength=size)
    if np.any(counts == 0) or any(len(set(own.tolist())) < len(own) for own in places.values()):
        return "repeated"
    return "part" if cut else "reordered"
