"""Which map two checkpoints are compared by where many of their names differ and none is given: found by content."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardviz.checkpoint.by_content.inferring import inferred
from shardviz.checkpoint.by_content.writing import lines_of, rules_from
from shardviz.checkpoint.comparing.outcome import Outcome
from shardviz.checkpoint.comparing.pairs import paired
from shardviz.checkpoint.maps.families import family_of, find_map
from shardviz.checkpoint.optimizer import state_of

if TYPE_CHECKING:
    from shardviz.checkpoint.comparing.pairs import Pairs
    from shardviz.checkpoint.records import Checkpoint


@dataclass(frozen=True)
class Named:
    """Which tensors are compared, and why those.

    Attributes:
        pairs: Them.
        notes: The map that knows the names, or how many lines were found by content.
        lines: The lines of a map that were found by content.
        open: What became of tensors whose content several have, so that none is compared with one of them.
        is_mapped: Whether a map was found.
    """

    pairs: Pairs
    notes: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    open: tuple[Outcome, ...] = ()
    is_mapped: bool = False


def with_map(pairs: Pairs, before: Checkpoint, after: Checkpoint) -> Named:
    """Return which tensors are compared: by their names, by the map that knows these, or by what is in them.

    Args:
        pairs: What is compared by name.
        before: The first checkpoint.
        after: The second.
    """
    sides = [pair.one for pair in pairs.lonely], [pair.other for pair in pairs.lonely]
    first, second = ([one for one in side if one is not None] for side in sides)
    num_named = sum(state_of(pair.name) is None for pair in pairs.both)
    if min(sum(state_of(one.name) is None for one in side) for side in (first, second)) <= num_named:
        return Named(pairs)  # most have one name: another name is a difference
    if family := family_of(before.tensors, after.tensors):
        note = f"names: --map {family} knows them, and is used"
        return Named(paired(before, after, find_map(family)), (note,), is_mapped=True)
    found = inferred(first, second)
    lines = lines_of(found.choices, (before.tensors, after.tensors))
    again = paired(before, after, rules_from(lines)) if lines else pairs
    is_open = [pair.name in found.ambiguous for pair in again.lonely]
    left = tuple(pair for pair, one in zip(again.lonely, is_open, strict=True) if not one)
    open_ = [pair.name for pair, one in zip(again.lonely, is_open, strict=True) if one]
    outcomes = tuple(Outcome(name, "", "not-compared", found.ambiguous[name]) for name in open_)
    return Named(replace(again, lonely=left), (), tuple(map(str, lines)), outcomes, is_mapped=bool(lines))
