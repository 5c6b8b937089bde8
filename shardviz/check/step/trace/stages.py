"""Which modules ranks share: stages of a pipeline, and ranks with experts of their own, run other modules."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from shardviz.check.step.trace.calls import is_within

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardviz.check.step.trace.traces import OfRank


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
