"""Calls of a step's modules, in the unsharded model's order, with all ranks' judgments; which modules ranks share."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING

from shardviz.groups import in_groups

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shardviz.check.step.trace.traces import OfRank
    from shardviz.dump.dump import Dump
    from shardviz.dump.records.trace import Again, PointRecord, State, What

BADNESS: Mapping[State, int] = {
    "right": 0,
    "moved": 1,
    "pending": 2,
    "repeated": 3,
    "cut": 4,
    "none": 5,
    "odd": 6,
}
"""How bad a state is; ranks may have different ones, and the worst counts."""
WORST_GOOD = BADNESS["pending"]

NUMBER = re.compile(r"\d+")


@dataclass
class Call:
    """One call of a module.

    Attributes:
        module: Its name; empty for the model itself.
        order: When it ended in the unsharded model.
        points: What ranks wrote of it.
    """

    module: str
    number: int
    order: int
    points: dict[int, list[PointRecord]] = field(default_factory=dict)

    def state(self, what: What) -> State | None:
        """Return the worst state of a side on any rank; None if nothing is known of it."""
        return self._states.get(what)

    @cached_property
    def _states(self) -> Mapping[What, State]:
        states: dict[What, State] = {}
        for what, state in {(point.what, point.state) for own in self.points.values() for point in own}:
            states[what] = max(states.get(what, state), state, key=BADNESS.__getitem__)
        return states

    @cached_property
    def type(self) -> str:
        """The module's class."""
        return next((point.type for own in self.points.values() for point in own), "")

    @property
    def has_overwritten_input(self) -> bool:
        """Whether something wrote into what it was given before its backward."""
        points = (point for own in self.points.values() for point in own)
        return any(point.is_overwritten and point.what == "input" for point in points)

    @property
    def is_without_graph(self) -> bool:
        """Whether gradients were switched off in it on some rank, and not in the unsharded model."""
        return any(point.is_without_graph for own in self.points.values() for point in own)

    @property
    def again(self) -> Again:
        """What differed on some rank as backward ran it again, and not in the unsharded model."""
        return next((point.again for own in self.points.values() for point in own if point.again), "")

    def is_bad(self, what: What) -> bool:
        """Whether a side is not the unsharded model's."""
        state = self.state(what)
        return state is not None and BADNESS[state] > WORST_GOOD

    def is_good(self, what: What) -> bool:
        """Whether a side is the unsharded model's."""
        state = self.state(what)
        return state is not None and BADNESS[state] <= WORST_GOOD

    def tensors(self, what: What, *states: State) -> set[tuple[int, int]]:
        """Return the tensors of a side, by rank and number; only those in some states if states are given."""
        return {
            (rank, point.tensor)
            for rank, points in self.points.items()
            for point in points
            if point.what == what and (not states or point.state in states)
        }

    def point(self, what: What, *states: State) -> PointRecord | None:
        """Return the first point of a side, in one of the states if these are given."""
        points = (point for own in self.points.values() for point in own if point.what == what)
        return next((point for point in points if not states or point.state in states), None)


@dataclass(frozen=True)
class Calls:
    """All calls of a step, in order.

    Attributes:
        in_order: The calls as they ended.
    """

    in_order: tuple[Call, ...]

    @staticmethod
    def of(dump: Dump) -> Calls:
        """Read what the ranks of a dump wrote."""
        calls: dict[tuple[str, int], Call] = {}
        for record, ranks in dump.files.alike():
            for point in record.trace:
                call = calls.setdefault((point.module, point.call), Call(point.module, point.call, point.order))
                for rank in ranks:
                    call.points.setdefault(rank, []).append(point)
        return Calls(tuple(sorted(calls.values(), key=lambda call: call.order)))

    @cached_property
    def by_module(self) -> Mapping[str, Sequence[Call]]:
        """The calls of every module."""
        return in_groups((call.module, call) for call in self.in_order)

    def call_of(self, point: PointRecord) -> Call:
        """Return the call that a point is of."""
        return next(call for call in self.by_module[point.module] if call.number == point.call)

    def around(self, call: Call) -> Iterator[Call]:
        """Yield the calls that a call is made in, innermost first, as far as anything is known of them."""
        for name in enclosing(call.module):
            outer = next((one for one in self.by_module.get(name, ()) if one.order > call.order), None)
            if outer is not None:
                yield outer

    def within(self, call: Call) -> list[Call]:
        """Return the calls made in a call, in order."""
        first = max((one.order for one in self.by_module[call.module] if one.order < call.order), default=-1)
        return [one for one in self.in_order if first < one.order < call.order and is_within(one.module, call.module)]

    def is_contained(self, call: Call, what: What) -> bool:
        """Whether what is bad there does not get out of a call around it: that one's side is the unsharded model's."""
        return any(outer.is_good(what) for outer in self.around(call))

    def alike(self, call: Call) -> list[Call]:
        """Return the same module's calls in other layers: one class, names that differ in numbers."""
        layers = self._layers[NUMBER.sub("*", call.module), call.number, call.type]
        return [one for one in layers if one.module != call.module]

    @cached_property
    def _layers(self) -> Mapping[tuple[str, int, str], Sequence[Call]]:
        """The calls of modules of one class whose names differ in numbers only."""
        return in_groups(((NUMBER.sub("*", call.module), call.number, call.type), call) for call in self.in_order)

    def is_unlike_others(self, call: Call, what: What) -> bool:
        """Whether a side is right in another layer, and in this call's state in none."""
        states = {one.state(what) for one in self.alike(call)}
        return "right" in states and call.state(what) not in states

    def is_habit(self, call: Call, what: What) -> bool:
        """Whether another layer has the same side in the same bad state, and nothing comes of it there."""
        leaving: What = "gradient of input" if what.startswith("gradient") else "output"
        state = call.state(what)
        return any(one.state(what) == state and self.is_contained(one, leaving) for one in self.alike(call))


def enclosing(module: str) -> Iterator[str]:
    """Yield the names that a module's name lies within, the longest first, down to the model itself."""
    while module:
        module = module.rpartition(".")[0]
        yield module


def is_within(module: str, outer: str) -> bool:
    """Whether a module's name lies within another's."""
    return module != outer and (not outer or module.startswith(f"{outer}."))


def is_pipeline(ranks: Mapping[int, OfRank]) -> bool:
    """Whether ranks run other modules of the model, as stages do; experts of their own don't count."""
    parted = _parted(_inside_of(ranks))
    shared = [{name for name in own.counts if not _is_in_any(name, parted)} for own in ranks.values()]
    return "" in parted or any(names != shared[0] for names in shared)


def parted_modules(ranks: Mapping[int, OfRank]) -> frozenset[str]:
    """Return the modules whose calls on ranks are not calls of one module, because each rank runs other parts of it.

    On a stage of a pipeline such a module, as the model itself, takes or returns what lies between two stages. A list
    of experts takes the tokens of those that the rank has.
    """
    inside = _inside_of(ranks)
    parted = _parted(inside)
    if "" in parted:
        return parted
    of_modules = {name: {of[name] for of in inside.values() if name in of} for name in parted}
    apart = {
        name for name, of in of_modules.items() if any(one.isdisjoint(other) for one, other in combinations(of, 2))
    }
    return frozenset({*apart, *([""] if is_pipeline(ranks) else [])})


def _is_in_any(name: str, modules: Iterable[str]) -> bool:
    return any(is_within(name, module) for module in modules)


def _parted(inside: Mapping[int, Mapping[str, frozenset[str]]]) -> frozenset[str]:
    """Return the modules in which two ranks each run a module that the other lacks, and those of such modules alone."""
    every = {name for of_rank in inside.values() for name in of_rank}
    sets = {name: {of[name] for of in inside.values() if name in of} for name in every}
    parted = {
        name for name, of in sets.items() if any(one - other and other - one for one, other in combinations(of, 2))
    }
    while wrappers := {
        name for name in every - parted if any(of.get(name) and of[name] <= parted for of in inside.values())
    }:
        parted |= wrappers
    return frozenset(parted)


def _inside_of(ranks: Mapping[int, OfRank]) -> dict[int, dict[str, frozenset[str]]]:
    return {rank: _inside(own.counts) for rank, own in ranks.items()}


def _inside(names: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return the modules that are directly in each module, of those that were called."""
    inside: dict[str, set[str]] = {name: set() for name in ("", *names)}
    for name in inside:
        around = name
        while around:
            around = around.rpartition(".")[0]
            if around in inside:
                inside[around].add(name)
                break
    return {name: frozenset(of) for name, of in inside.items()}


def with_first_module(first: str, ranks: Mapping[int, OfRank]) -> dict[int, OfRank]:
    """Return the ranks that call the model's first module: others aren't given the batch."""
    return {rank: own for rank, own in ranks.items() if first in own.counts} if is_pipeline(ranks) else dict(ranks)
