"""Pairing of two checkpoints' tensors: by a map, by names, by wrappers and prefixes.

If most names differ, a map is chosen: one that knows the names, or one that fits the contents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from shardviz.checkpoint.by_content.families import REPRESENTATIVES, lines_of, rules_from
from shardviz.checkpoint.by_content.inferring import pair_by_content, with_groups_of_heads
from shardviz.checkpoint.comparing.equality import agree, is_same
from shardviz.checkpoint.comparing.outcome import Outcome
from shardviz.checkpoint.live_job.job import Job
from shardviz.checkpoint.maps.families import family_of, find_map, numbers_beside
from shardviz.checkpoint.maps.language import VARIABLES, names_in
from shardviz.checkpoint.maps.mapped_tensors import (
    MappedTensor,
    Op,
    leaves,
    padding_text,
    unused_texts,
    without_padding,
)
from shardviz.checkpoint.maps.matching import NUMBER, apply, is_turned, named_tensors, pattern_of
from shardviz.checkpoint.maps.numbering import starred
from shardviz.checkpoint.optimizer import IN_BUCKETS, is_bucket, state_names, state_of
from shardviz.errors import DumpError, ShardvizError
from shardviz.reference.names import matched
from shardviz.relate.casts import is_whole
from shardviz.text import counted, listed, printable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from shardviz.checkpoint.by_content.families import FamilyMatch
    from shardviz.checkpoint.maps.language import Expression, Rule
    from shardviz.checkpoint.maps.matching import MapResult, NamedTensors
    from shardviz.checkpoint.records import Checkpoint, Tensor

    Side = Checkpoint | Job
    """One side of a comparison: a checkpoint, or a job's dump."""

FEW = 4
"""Tensors in which a number is looked for that no settings have."""

USUAL_HEAD = 128
SMALLEST_HEAD = 4
"""With two rows for each head nothing is exchanged: any conversion that leaves rotary out would fit."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two tensors that should have the same values.

    Attributes:
        name: What the pair is called.
        first: The first checkpoint's; None if it has none.
        lacking: Why one of them cannot be made, as a map says.
        is_mapped: Whether a map says that one is the other under a different name.
    """

    name: str
    first: Tensor | None
    second: Tensor | None
    lacking: str = ""
    is_mapped: bool = False

    @property
    def other_name(self) -> str:
        """What the other side has in the place of the name: a tensor's name, or how it is made."""
        made_side = next((side for side in (self.first, self.second) if isinstance(side, MappedTensor)), None)
        return made_side.text if made_side is not None else self.second.name if self.second is not None else ""

    @property
    def sides(self) -> tuple[Tensor | None, Tensor | None]:
        """The first and the second."""
        return self.first, self.second

    @property
    def both(self) -> tuple[Tensor, Tensor]:
        """The first and the second of a pair that has both."""
        assert self.first is not None
        assert self.second is not None
        return self.first, self.second

    def trimmed(self) -> Pair:
        """Return it without the padding at the ends of both."""
        first, second = self.both
        if isinstance(first, MappedTensor):
            first, second = without_padding(first, second)
        elif isinstance(second, MappedTensor):
            second, first = without_padding(second, first)
        return self if first is self.first or second is self.second else replace(self, first=first, second=second)


@dataclass(frozen=True, slots=True)
class Pairs:
    """The tensors of two checkpoints, paired, with those that only one has.

    Attributes:
        lonely: What one of them has.
        notes: What the names were taken for, and what was left out.
        lines: The lines of a map that were found by content.
        open: What became of tensors whose content several have, so that none is compared with one of them.
        is_mapped: Whether a map was found, by the names or by content.
        guessed: Functions and numbers of the map that the values alone suggest: `cat`, `kv_heads = 2`.
    """

    both: tuple[Pair, ...]
    lonely: tuple[Pair, ...]
    notes: tuple[str, ...]
    lines: tuple[str, ...] = ()
    open: tuple[Outcome, ...] = ()
    is_mapped: bool = False
    guessed: tuple[str, ...] = ()


def pair_tensors(before: Side, after: Side, rules: Sequence[Rule]) -> Pairs:
    """Return which tensors of two checkpoints are compared.

    Args:
        rules: The map; either checkpoint may be the one that its left sides name.

    Raises:
        ShardvizError: A rule of the map fits nothing, or its tensors do not fit each other.
    """
    patterns = [name for rule in rules for name in (rule.left, *names_in(rule.right))]
    first, second = (named_tensors(str(one.path), one.tensors, patterns) for one in (before, after))
    turned = {rule: _is_turned(rule, first, second) for rule in rules}
    forth, back = ([rule for rule in rules if turned[rule] is way] for way in (False, True))
    settings = numbers_beside((before.folder, after.folder))
    numbers = dict(settings)
    notes = [*_find_out(numbers, forth, first, second), *_find_out(numbers, back, second, first)]
    completed = _all_pairs(before, after, apply(forth, first, second, numbers), apply(back, second, first, numbers))
    pairs = _without_counters(replace(completed, notes=(*notes, *completed.notes)), (before, after))
    states = [side.states if isinstance(side, Job) else state_names(side) for side in (before, after)]
    completed = _without_states(_without_buckets(pairs), states)
    return replace(completed, guessed=tuple(f"{name} = {numbers[name]}" for name in numbers if name not in settings))


def _is_turned(rule: Rule, first: NamedTensors, second: NamedTensors) -> bool:
    """Whether a rule makes the second checkpoint's tensors, judged by names, then by shapes."""
    if is_turned(rule, first.tensors, second.tensors):
        return True
    return not _makes_shape(rule, first, second) and _makes_shape(rule, second, first)


def _makes_shape(rule: Rule, left: NamedTensors, right: NamedTensors) -> bool:
    """Whether a rule makes a tensor of one side, and of its shape, of those of the other side."""
    return any(
        left.tensors[name].shape == one.shape for name, one in islice(_apply_rules([rule], left, right, {}), FEW)
    )


def _find_out(numbers: dict[str, int], rules: Sequence[Rule], left: NamedTensors, right: NamedTensors) -> Iterator[str]:
    """Find out the numbers that no settings have; yield what was taken for them."""
    for unknown in sorted({one for rule in rules for one in _variables_in(rule.right)} - set(numbers)):
        number, is_found = _number(unknown, rules, left, right, numbers)
        if number:
            numbers[unknown] = number
            how = "it fits the contents" if is_found else "none fits the contents"
            yield f"{unknown} is taken to be {number}: no config.json next to either says, and {how}"


def _variables_in(expression: Expression | None) -> Iterator[str]:
    for operand in getattr(expression, "operands", ()):
        yield from _variables_in(operand)
    yield from (one for one in getattr(expression, "numbers", ()) if one in VARIABLES)


def _number(
    unknown: str, rules: Sequence[Rule], left: NamedTensors, right: NamedTensors, numbers: Mapping[str, int]
) -> tuple[int, bool]:
    """Find the number that makes a few tensors equal; else the usual one if it fits; else 0."""
    rules_with = [rule for rule in rules if unknown in _variables_in(rule.right)]
    fits = {
        one: _apply_rules(rules_with, left, right, {**numbers, unknown: one})
        for one in _candidates(unknown, rules_with, left)
    }
    for number, tensors in fits.items():
        if any(is_same(left.tensors[name], one) for name, one in islice(tensors, FEW)):
            return number, True
    most = max(map(len, fits.values()), default=0)
    usual = [number for number, made in fits.items() if len(made) == most > 0 and unknown == "head_dim"]
    return max((number for number in usual if number <= USUAL_HEAD), default=0), False


def _candidates(unknown: str, rules: Sequence[Rule], left: NamedTensors) -> list[int]:
    names = (name for name in left.tensors if any(pattern_of(rule.left).fullmatch(name) for rule in rules))
    rows = {left.tensors[name].shape[0] for name in names if left.tensors[name].shape}
    step, first = (2, SMALLEST_HEAD) if unknown == "head_dim" else (1, 1)
    return sorted({one for row in rows for one in range(first, min(row, 4096) + 1, step) if row % one == 0})


def _apply_rules(
    rules: Sequence[Rule], left: NamedTensors, right: NamedTensors, numbers: Mapping[str, int]
) -> list[tuple[str, MappedTensor]]:
    try:
        made_tensors = apply(rules, left, right, numbers, strict=False).made
    except ShardvizError:
        return []
    short = {full: name for name, full in left.full.items()}
    return [(short[name], tensor) for name, tensor in made_tensors.items()]


def _all_pairs(before: Side, after: Side, forth: MapResult, back: MapResult) -> Pairs:
    """Return the pairs of a map, and of the names that it says nothing of."""
    from_maps = [Pair(name, before.tensors[name], one) for name, one in forth.made.items()]
    from_maps += [Pair(name, one, after.tensors[name]) for name, one in back.made.items()]
    taken = _settled_names(forth, back), _settled_names(back, forth)
    known_as = {name: name for name in before.tensors if name not in taken[0]}
    known_as |= {other: name for name, other in back.known_as.items() if other in known_as}
    known_as |= {name: other for name, other in forth.known_as.items() if name in known_as}
    free = [name for name in after.tensors if name not in taken[1]]
    renamed, how = _by_names(known_as, free, after)
    by_name = (
        Pair(name, before.tensors[name], after.tensors[other], is_mapped=known_as[name] != name)
        for name, other in renamed.items()
    )
    matches = [*from_maps, *by_name]
    lonely = [
        Pair(name, tensor, None, forth.lacking.get(name, ""))
        for name, tensor in before.tensors.items()
        if name not in renamed and (name not in taken[0] or name in forth.lacking)
    ]
    used = set(renamed.values())
    lonely += [
        Pair(name, None, tensor, back.lacking.get(name, ""))
        for name, tensor in after.tensors.items()
        if name not in used and (name not in taken[1] or name in back.lacking)
    ]
    place = {name: at for at, name in enumerate([*before.tensors, *after.tensors])}
    return Pairs(tuple(sorted(matches, key=lambda pair: place[pair.name])), tuple(lonely), how)


def _settled_names(mapped: MapResult, other: MapResult) -> set[str]:
    """Return the names that a map has settled on one side: made, used or left out."""
    parts = {leaf.name for one in other.made.values() for leaf in leaves(one.node)}
    return {*mapped.made, *mapped.lacking, *mapped.left_alone, *other.right_alone, *parts}


def _by_names(
    known_as: Mapping[str, str], others: Sequence[str], second: Side
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Match names; the words that are before all names may be on either side."""
    there = matched(list(known_as.values()), others)
    pairs = {name: there.names[known] for name, known in known_as.items() if known in there.names}
    if not there.before:
        return pairs, ()
    num_behind = sum(other.startswith(there.before) for other in pairs.values())
    which = "every name" if num_behind == len(pairs) else f"{num_behind:,} of {len(pairs):,} names"
    return pairs, (f"names: {second.path.name} has {there.before} before {which}, the other doesn't",)


def padding_notes(pairs: Iterable[Pair], padded: Collection[str] = ()) -> list[str]:
    """Say what isn't compared because the map calls it padding or doesn't use it.

    Args:
        padded: The names of those that are padded elsewhere than the map says: all of them is compared.
    """
    sides = [(pair.name, side) for pair in pairs for side in pair.sides if side is not None]
    notes: dict[str, None] = {}
    for name, side in sides:
        if name not in padded and isinstance(side, MappedTensor) and (text := padding_text(side.node)):
            notes[f"{starred(printable(name))}: padded: {text} are not compared"] = None
    unused = unused_texts(side.node if isinstance(side, MappedTensor) else side for _, side in sides)
    return [
        *notes,
        *dict.fromkeys(f"{starred(one)} are in nothing that the map makes, and not compared" for one in unused),
    ]


def _without_counters(pairs: Pairs, sides: tuple[Side, Side]) -> Pairs:
    """Leave out top-level integers, such as a step, that only one side saved with its model."""
    counters = [one for one in pairs.lonely if _is_counter(one, sides)]
    if not pairs.both:
        return pairs
    lonely = tuple(one for one in pairs.lonely if one not in counters)
    notes = list(pairs.notes)
    for at, which in enumerate(("first", "second")):
        if counter_names := [printable(one.name) for one in counters if one.sides[at] is not None]:
            what = counted(len(counter_names), "number")
            notes.append(f"not compared: {what} next to the model that only the {which} has: {listed(counter_names)}")
    return Pairs(pairs.both, lonely, tuple(notes))


def _is_counter(pair: Pair, sides: tuple[Side, Side]) -> bool:
    """Whether a whole number stands next to a side's models, whose names all have more levels."""
    at, tensor = (0, pair.first) if pair.first is not None else (1, pair.second)
    is_number = tensor is not None and not tensor.shape and "." not in pair.name and is_whole(tensor.dtype)
    return is_number and sum("." not in name for name in sides[at].tensors) < len(sides[at].tensors) / 2


def _without_buckets(pairs: Pairs) -> Pairs:
    """Leave out buckets that don't match, and the other side's states by parameter."""
    odd = [one for one in pairs.lonely if is_bucket(one.name)]
    odd += [
        pair
        for pair in pairs.both
        if is_bucket(pair.name) and pair.first and pair.second and pair.first.shape != pair.second.shape
    ]
    if not odd:
        return pairs
    sides = {one.first is None for one in odd}
    named = [one for one in pairs.lonely if state_of(one.name) and (one.first is not None) in sides]
    more = f" and {counted(len(named), 'state')} by parameter" if named else ""
    note = f"not compared: optimizer state in {counted(len(odd), 'bucket')}{more}: {IN_BUCKETS}"
    left_out = {id(one) for one in (*odd, *named)}
    matches, lonely = (tuple(one for one in some if id(one) not in left_out) for some in (pairs.both, pairs.lonely))
    return Pairs(matches, lonely, (*pairs.notes, note))


def _without_states(pairs: Pairs, states: list[frozenset[str]]) -> Pairs:
    """Leave optimizer state out where one side has none at all."""
    matches, lonely, notes = pairs.both, list(pairs.lonely), pairs.notes
    for at, which in enumerate(("first", "second")):
        if states[at] and not states[1 - at]:
            lonely = [one for one in lonely if one.name not in states[at] or one.sides[at] is None]
            what = counted(len(states[at]), "tensor")
            notes = (*notes, f"not compared: {what} of optimizer state, which only the {which} has")
    owners = [[parts[0] for name in names if (parts := state_of(name)) is not None] for names in states]
    numbered = [bool(some) and all(map(str.isdigit, some)) for some in owners]  # as an optimizer's own state_dict does
    if all(states) and numbered[0] != numbered[1]:
        lonely = [one for one in lonely if one.name not in states[one.first is None]]
        which, naming = ("first", "second")[:: 1 if numbered[0] else -1]
        notes = (*notes, f"not compared: optimizer state: the {which} numbers its parameters, the {naming} names them")
    return Pairs(matches, tuple(lonely), notes)


FEWEST_LAYERS = 3
"""Layers that show a map if most names are equal: with fewer, no layer is the odd one."""

STACKED = 3
"""Dims of a tensor that has all experts of a layer."""


def with_map(pairs: Pairs, before: Checkpoint, after: Checkpoint) -> Pairs:
    """Pair the tensors to compare: by names, by a map that knows these, or by contents."""
    sides = [pair.first for pair in pairs.lonely], [pair.second for pair in pairs.lonely]
    first, second = ([one for one in side if one is not None] for side in sides)
    num_named = sum(state_of(pair.name) is None for pair in pairs.both)
    if min(sum(state_of(one.name) is None for one in side) for side in (first, second)) <= num_named:
        return _with_map_of_layers(pairs, before, after)  # most have one name: another name is a difference
    if family := family_of(before.tensors, after.tensors):
        again = _with_turned_experts(pair_tensors(before, after, find_map(family)))
        return replace(again, notes=(f"names: --map {family} knows them, and is used", *again.notes), is_mapped=True)
    choices, ambiguous = pair_by_content(first, second)
    again = _with_choices(pairs, choices, before, after)
    undecided, outcomes = [], []
    for pair in again.lonely:
        if why := ambiguous.get(pair.name):
            outcomes.append(Outcome(pair.name, "", "not-compared", why))
        else:
            undecided.append(pair)
    return replace(again, lonely=tuple(undecided), open=tuple(outcomes))


def _with_choices(pairs: Pairs, choices: Sequence[FamilyMatch], before: Checkpoint, after: Checkpoint) -> Pairs:
    """Pair the tensors by the map that choices by content are; the same pairs if there are none."""
    choices = with_groups_of_heads(choices, numbers_beside((before.folder, after.folder)))
    lines = lines_of(choices, (before.tensors, after.tensors))
    if not lines:
        return pairs
    functions = tuple(dict.fromkeys(name for choice in choices for name in choice.functions))
    again = pair_tensors(before, after, rules_from(lines))
    return replace(again, lines=tuple(map(str, lines)), is_mapped=True, guessed=functions)


def _with_map_of_layers(pairs: Pairs, before: Checkpoint, after: Checkpoint) -> Pairs:
    """Pair leftover names by content if each layer's tensor is joined, split or transformed.

    A new name alone is a difference, and so are new numbers of layers.
    """
    first, second = ([tensor for pair in pairs.lonely if (tensor := pair.sides[at]) is not None] for at in (0, 1))
    if min(len(first), len(second)) < FEWEST_LAYERS:
        return pairs
    paired_patterns = {NUMBER.sub("*", pair.name) for pair in pairs.both}
    choices = [one for one in pair_by_content(first, second)[0] if _is_of_layers(one, paired_patterns)]
    return _with_choices(pairs, choices, before, after)


def _is_of_layers(choice: FamilyMatch, paired_patterns: Collection[str]) -> bool:
    """Whether a choice transforms every layer's tensor of a name, with equal layer numbers."""
    every = [choice.whole, *(link.family for link in choice.recipe.links)]
    layers = {numbers[0] for numbers in choice.whole.members if numbers}
    is_whole = len(layers) >= FEWEST_LAYERS and not any(family.pattern in paired_patterns for family in every)
    return is_whole and "(" in choice.recipe.text() and all(link.is_direct for link in choice.recipe.links)


def _with_turned_experts(pairs: Pairs) -> Pairs:
    """Transpose the stacked experts that a map makes if those of most layers are transposed.

    Formats store them as (in, out) or (out, in). A matrix is as the map says: one that all layers have transposed is a
    difference.
    """
    layers: dict[str, list[Pair]] = {}
    for pair in pairs.both:
        if len(pair.both[0].shape) == STACKED and any(isinstance(side, MappedTensor) for side in pair.sides):
            layers.setdefault(starred(pair.name), []).append(pair)
    turned: dict[str, Pair] = {}
    notes: list[str] = []
    for name, some in layers.items():
        looked_at = some[:: max(1, len(some) // REPRESENTATIVES)]
        if len(some) >= FEWEST_LAYERS and 2 * sum(map(_is_transposed, looked_at)) > len(looked_at):
            turned |= {pair.name: _with_transposed(pair) for pair in some}
            line = f"{printable(name)} = {printable(turned[some[0].name].other_name)}"
            notes.append(f"names: most layers have experts transposed, which is taken as meant: {line}")
    pairs_turned = tuple(turned.get(pair.name, pair) for pair in pairs.both)
    return replace(pairs, both=pairs_turned, notes=(*notes, *pairs.notes))


def _is_transposed(pair: Pair) -> bool:
    """Whether the first expert of a pair is equal only if what the map makes is transposed."""
    try:
        straight, turned = (tuple(map(_first_of, one.both)) for one in (pair, _with_transposed(pair)))
        return not agree(*straight) and agree(*turned)
    except DumpError:
        return False


def _first_of(tensor: Tensor) -> MappedTensor:
    node = Op("take", (tensor.node if isinstance(tensor, MappedTensor) else tensor,), (0, 0))
    return MappedTensor(node, node.shape, tensor.name)


def _with_transposed(pair: Pair) -> Pair:
    first, second = (_transposed(side) if isinstance(side, MappedTensor) else side for side in pair.both)
    return replace(pair, first=first, second=second)


def _transposed(made: MappedTensor) -> MappedTensor:
    node = Op("transpose", (made.node,))
    return replace(made, node=node, shape=node.shape, text=f"transpose({made.text})")
