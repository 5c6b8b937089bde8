"""Tensors whose values stand under another name: layers or experts renumbered, ties saved twice, parts put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.checkpoint.comparing.contents import Contents
from shardviz.checkpoint.comparing.fused import find_fused
from shardviz.checkpoint.maps.made import Made, leaves
from shardviz.checkpoint.maps.numbering import against, renumbered
from shardviz.checkpoint.records import Saved
from shardviz.text import listed, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shardviz.checkpoint.comparing.outcome import Outcome
    from shardviz.checkpoint.comparing.pairs import Pair
    from shardviz.checkpoint.maps.numbering import Renumbered
    from shardviz.checkpoint.tensor import Tensor

    Found = list[tuple[Outcome, Pair]]

MAX_NUMBERS = 8
"""Numbers of layers that are named."""

MAX_PARTS = 4
"""Parts of a fused tensor that are named."""


def with_moved(found: Found) -> Found:
    """Find tensors whose values another name has."""
    if not any(outcome.verdict in ("other", "missing", "added") for outcome, _ in found):
        return found
    mine = Contents.of(_with_parts(pair.one for _, pair in found))
    theirs = Contents.of(_with_parts(pair.other for _, pair in found))
    lost = {id(pair.one) for outcome, pair in found if outcome.verdict == "missing"}
    placed = [_placed(outcome, pair, mine, theirs, lost) for outcome, pair in found]
    sources = {id(source) for _, source in placed if source is not None}
    left = [
        (outcome, pair)
        for (outcome, source), (_, pair) in zip(placed, found, strict=True)
        if outcome.verdict != "missing" or id(pair.one) not in sources
    ]
    return with_ties(_with_numbers(left, {one.name: source.name for one, source in placed if source is not None}))


def _with_numbers(found: Found, sources: Mapping[str, str]) -> Found:
    """Say that layers or experts are numbered otherwise, where all tensors of a number are another number's."""
    kept = {outcome.name for outcome, _ in found if outcome.verdict in ("equal", "cast")}
    moved = {name: source for name, source in sources.items() if source != name}
    words = {name: _in_words(one) for one in renumbered(moved, kept) for name in one.names}
    return [
        (outcome.became("moved", *words[outcome.name]) if outcome.name in words else outcome, pair)
        for outcome, pair in found
    ]


def _in_words(one: Renumbered) -> tuple[str, str, str]:
    """Return what became of layers or experts, the cause and the fix."""
    what, few = one.what, [*one.numbers.items()][:MAX_NUMBERS]
    more = ", ..." if len(one.numbers) > len(few) else ""
    mine, theirs = (" ".join(str(pair[at]) for pair in few) for at in (0, 1))
    why = f"{what} {mine}{more} of the second are {what} {theirs}{more} of the first"
    if one.is_again:
        cause = f"Some {what} were written several times and others not at all, as where ranks count their own from 0."
        return f"{why}, which it has elsewhere, too", cause, f"number {what} over all ranks"
    return why, f"The numbers of {what} were changed.", f"number {what} as the first does"


def _with_parts(tensors: Iterable[Tensor | None]) -> Iterator[Tensor]:
    """Yield tensors, and those that they are made of."""
    for tensor in tensors:
        if tensor is not None:
            yield tensor
            yield from leaves(tensor.node) if isinstance(tensor, Made) else ()


def _placed(
    outcome: Outcome, pair: Pair, mine: Contents, theirs: Contents, lost: set[int]
) -> tuple[Outcome, Tensor | None]:
    """Return what became of a tensor, and the lost tensor of the first that the second has in its place."""
    if outcome.verdict not in ("other", "added") or pair.other is None:
        return outcome, None
    sources = sorted(
        (one for one in mine.equal_to(pair.other) if one is not pair.one), key=lambda one: id(one) not in lost
    )
    if sources and (outcome.verdict == "other" or id(sources[0]) in lost):
        words = f"the second has here the first's {against(sources[0].name, outcome.name)}"
        return outcome.became("moved", words), sources[0]
    if outcome.verdict == "other" and pair.one is not None:
        target = next((one for one in theirs.equal_to(pair.one) if one is not pair.other), None)
        if target is not None:
            return outcome.became(
                "moved", f"the first has here the second's {against(target.name, outcome.name)}"
            ), None
    return outcome, None


def with_ties(found: Found) -> Found:
    """Find tensors that one side lacks and that are copies of what both have."""
    kept = [pair for outcome, pair in found if outcome.verdict in ("equal", "cast")]
    if not any(outcome.verdict in ("missing", "added") for outcome, _ in found):
        return found
    sides = [
        Contents.of(filter(None, (pair.one for pair in kept))),
        Contents.of(filter(None, (pair.other for pair in kept))),
    ]
    return [(_tied(outcome, pair, sides), pair) for outcome, pair in found]


def _tied(outcome: Outcome, pair: Pair, sides: Sequence[Contents]) -> Outcome:
    if outcome.verdict not in ("missing", "added"):
        return outcome
    at = outcome.verdict == "added"
    own = pair.other if at else pair.one
    twins = (one for one in sides[at].equal_to(own) if one.dtype == own.dtype) if own is not None else iter(())
    if (twin := next(twins, None)) is None:  # a master is no copy of the weight that is rounded from it
        return _untied(outcome, own, sides[at])
    side = "second" if at else "first"
    return outcome.became("tied", f"{outcome.why}: a copy of the {side}'s {printable(twin.name)}", other=twin.name)


def _untied(outcome: Outcome, own: Tensor | None, side: Contents) -> Outcome:
    """Note that a lost matrix is not a copy of the one tensor that has its shape, as a head has its embedding's."""
    like = side.by_shape.get(own.shape, []) if own is not None and len(own.shape) == 2 else []
    if len(like) != 1 or own is None or own.dtype != like[0].dtype or outcome.verdict != "missing":
        return outcome
    words = f"{outcome.why}; it is not a copy of {printable(like[0].name)}, which has its shape"
    return outcome.became("missing", words, "", "write it too: a loader makes it up, or ties it to the other")


def with_fused(found: Found) -> Found:
    """Put together tensors that only one checkpoint has, where the other has the same lines in one tensor."""
    lost = [pair.one for outcome, pair in found if outcome.verdict == "missing" and isinstance(pair.one, Saved)]
    new = [pair.other for outcome, pair in found if outcome.verdict == "added" and isinstance(pair.other, Saved)]
    fused, split = find_fused(lost, new), find_fused(new, lost)
    parts = {("missing", name) for names in fused.values() for name in names}
    parts |= {("added", name) for names in split.values() for name in names}
    left: Found = []
    for outcome, pair in found:
        if outcome.verdict == "added" and outcome.name in fused:
            words = f"one after the other, the first's {_parts(fused[outcome.name])}"
            left.append((outcome.became("moved", words, other=outcome.name), pair))
        elif outcome.verdict == "missing" and outcome.name in split:
            words = f"the second has it in parts, one after the other: {_parts(split[outcome.name])}"
            left.append((outcome.became("moved", words), pair))
        elif (outcome.verdict, outcome.name) not in parts:
            left.append((outcome, pair))
    return left


def _parts(names: list[str]) -> str:
    return listed(map(printable, names), MAX_PARTS)
