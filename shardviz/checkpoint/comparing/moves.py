"""Tensors whose values stand under another name: layers or experts renumbered, ties saved twice, parts put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.comparing.equality import Contents
from shardviz.checkpoint.findings import are_embeddings
from shardviz.checkpoint.maps.mapped_tensors import Made, leaves
from shardviz.checkpoint.maps.numbering import against, renumbered
from shardviz.checkpoint.records import Saved
from shardviz.errors import DumpError
from shardviz.explain.content import LocalNumbering
from shardviz.explain.conversion import OneSidedTie, RenumberedLayers, UnsavedHead
from shardviz.reference.windows import line_hashes
from shardviz.text import listed, printable

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.checkpoint.comparing.outcome import Outcome
    from shardviz.checkpoint.comparing.pairs import Pair
    from shardviz.checkpoint.maps.numbering import Renumbered
    from shardviz.checkpoint.records import Tensor
    from shardviz.explain.cause import Cause

    Outcomes = list[tuple[Outcome, Pair]]

MAX_NUMBERS = 8
"""Numbers of layers that are named."""

MAX_PARTS = 4
"""Parts of a fused tensor that are named."""

KEPT = ("equal", "cast")
"""Verdicts on tensors that are where they were."""

MAX_CANDIDATES = 8
"""Parts with the same first line that are tried."""

_Key = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class _Whereabouts:
    """Where both sides have what.

    Attributes:
        mine: The first's tensors, by what is in them.
        theirs: The second's.
        lost: Those of the first that the second lacks by their names.
        kept: Those of both that are where they were.
    """

    mine: Contents
    theirs: Contents
    lost: frozenset[int]
    kept: Container[int]


def with_moved(outcomes: Outcomes) -> Outcomes:
    """Find tensors whose values another name has."""
    if not any(outcome.verdict in ("other", "missing", "added") for outcome, _ in outcomes):
        return outcomes
    first_contents = Contents.of(_with_parts(pair.first for _, pair in outcomes))
    second_contents = Contents.of(_with_parts(pair.second for _, pair in outcomes))
    where = _Whereabouts(
        first_contents,
        second_contents,
        frozenset(id(pair.first) for outcome, pair in outcomes if outcome.verdict == "missing"),
        {id(side) for outcome, pair in outcomes if outcome.verdict in (*KEPT, "tied") for side in pair.sides},
    )
    placed = [_placed(outcome, pair, where) for outcome, pair in outcomes]
    sources = {id(source) for _, source in placed if source is not None}
    placed_outcomes = [
        (outcome, pair)
        for (outcome, source), (_, pair) in zip(placed, outcomes, strict=True)
        if outcome.verdict != "missing" or id(pair.first) not in sources
    ]
    return with_ties(
        _with_numbers(placed_outcomes, {one.name: source.name for one, source in placed if source is not None})
    )


def _with_numbers(outcomes: Outcomes, sources: Mapping[str, str]) -> Outcomes:
    """Say that layers or experts are renumbered if all tensors of a number have the values of another number."""
    kept_names = {outcome.name for outcome, _ in outcomes if outcome.verdict in KEPT}
    moved = {name: source for name, source in sources.items() if source != name}
    words = {name: _in_words(one) for one in renumbered(moved, kept_names) for name in one.names}
    return [
        (outcome.became("moved", *words[outcome.name]) if outcome.name in words else outcome, pair)
        for outcome, pair in outcomes
    ]


def _in_words(renumbering: Renumbered) -> tuple[str, Cause]:
    """Return what became of layers or experts, and why."""
    what, few = renumbering.what, [*renumbering.numbers.items()][:MAX_NUMBERS]
    more = ", ..." if len(renumbering.numbers) > len(few) else ""
    second_numbers, first_numbers = (" ".join(str(pair[at]) for pair in few) for at in (0, 1))
    why = f"{what} {second_numbers}{more} of the second are {what} {first_numbers}{more} of the first"
    if len(few) == 1:
        why = f"{what}.{second_numbers} of the second is {what}.{first_numbers} of the first"
    if renumbering.is_again:
        return f"{why}, which it has elsewhere, too", LocalNumbering(what, is_saved=True)
    return why, RenumberedLayers(what)


def _with_parts(tensors: Iterable[Tensor | None]) -> Iterator[Tensor]:
    """Yield tensors, and those that they are made of."""
    for tensor in tensors:
        if tensor is not None:
            yield tensor
            yield from leaves(tensor.node) if isinstance(tensor, Made) else ()


def _placed(outcome: Outcome, pair: Pair, where: _Whereabouts) -> tuple[Outcome, Tensor | None]:
    """Return what became of a tensor, and the first's tensor that the second has in its place."""
    if outcome.verdict not in ("other", "added") or pair.second is None:
        return outcome, None
    sources = [one for one in where.mine.equal_to(pair.second) if one is not pair.first]
    if outcome.verdict == "added":
        sources = [one for one in sources if id(one) not in where.kept]
    if sources:
        source = min(sources, key=lambda one: id(one) not in where.lost)
        words = f"the second has here the first's {against(source.name, outcome.name)}"
        return outcome.became("moved", words), source
    return (_gone(outcome, pair, where) if outcome.verdict == "other" else outcome), None


def _gone(outcome: Outcome, pair: Pair, where: _Whereabouts) -> Outcome:
    """Say where the second has a tensor of the first: under a new name, or in a tied copy."""
    targets = [] if pair.first is None else [one for one in where.theirs.equal_to(pair.first) if one is not pair.second]
    if not targets:
        return outcome
    target = min(targets, key=lambda one: id(one) in where.kept)
    name = against(target.name, outcome.name)
    if id(target) not in where.kept or not are_embeddings(outcome.name, target.name):
        return outcome.became("moved", f"the first has here the second's {name}")
    why = f"{outcome.why}; in the first it is a copy of {name}, which did not change"
    return outcome.became("other", why, OneSidedTie())


def with_ties(outcomes: Outcomes) -> Outcomes:
    """Find tensors that one side lacks and that are copies of what both have."""
    kept_pairs = [pair for outcome, pair in outcomes if outcome.verdict in KEPT]
    if not any(outcome.verdict in ("missing", "added") for outcome, _ in outcomes):
        return outcomes
    sides = [
        Contents.of(filter(None, (pair.first for pair in kept_pairs))),
        Contents.of(filter(None, (pair.second for pair in kept_pairs))),
    ]
    return [(_tied(outcome, pair, sides), pair) for outcome, pair in outcomes]


def _tied(outcome: Outcome, pair: Pair, sides: Sequence[Contents]) -> Outcome:
    if outcome.verdict not in ("missing", "added"):
        return outcome
    at = outcome.verdict == "added"
    tensor = pair.second if at else pair.first
    twins = (one for one in sides[at].equal_to(tensor) if one.dtype == tensor.dtype) if tensor is not None else iter(())
    if (twin := next(twins, None)) is None:  # a master is no copy of the weight that is rounded from it
        return _untied(outcome, tensor, sides[at])
    side = "second" if at else "first"
    return outcome.became("tied", f"{outcome.why}: a copy of the {side}'s {printable(twin.name)}", other=twin.name)


def _is_head(name: str, kept: str) -> bool:
    """Whether a weight that is lost is called an output embedding, and one that is kept an input embedding."""
    words = name.rpartition(".")[0].rpartition(".")[2], kept.rpartition(".")[0].rpartition(".")[2]
    return are_embeddings(name, kept) or ("head" in words[0] and "emb" in words[1])


def _untied(outcome: Outcome, tensor: Tensor | None, side: Contents) -> Outcome:
    """Note that a lost matrix is not a copy of the one tensor that has its shape, such as a head of its embedding."""
    like = side.by_shape.get(tensor.shape, []) if tensor is not None and len(tensor.shape) == 2 else []
    if len(like) != 1 or tensor is None or tensor.dtype != like[0].dtype or outcome.verdict != "missing":
        return outcome
    if not _is_head(outcome.name, like[0].name):
        return outcome
    words = f"{outcome.why}; it is not a copy of {printable(like[0].name)}, which has its shape"
    return outcome.became("missing", words, UnsavedHead())


def with_fused(outcomes: Outcomes) -> Outcomes:
    """Put together tensors that only one checkpoint has if the other has the same lines in one tensor."""
    lost = [pair.first for outcome, pair in outcomes if outcome.verdict == "missing" and isinstance(pair.first, Saved)]
    new = [pair.second for outcome, pair in outcomes if outcome.verdict == "added" and isinstance(pair.second, Saved)]
    fused, split = find_fused(lost, new), find_fused(new, lost)
    parts = {("missing", name) for names in fused.values() for name in names}
    parts |= {("added", name) for names in split.values() for name in names}
    remaining: Outcomes = []
    for outcome, pair in outcomes:
        if outcome.verdict == "added" and outcome.name in fused:
            words = f"one after the other, the first's {_parts(fused[outcome.name])}"
            remaining.append((outcome.became("moved", words, other=outcome.name), pair))
        elif outcome.verdict == "missing" and outcome.name in split:
            words = f"the second has it in parts, one after the other: {_parts(split[outcome.name])}"
            remaining.append((outcome.became("moved", words), pair))
        elif (outcome.verdict, outcome.name) not in parts:
            remaining.append((outcome, pair))
    return remaining


def _parts(names: list[str]) -> str:
    return listed(map(printable, names), MAX_PARTS)


def find_fused(parts: Iterable[Saved], wholes: Iterable[Saved]) -> dict[str, list[str]]:
    """Return tensors that concatenate others along dim 0, with those tensors' names in order."""
    by_key: dict[_Key, list[Saved]] = {}
    for candidate in parts:
        if (key := next(_keys(candidate, 1), None)) is not None:
            by_key.setdefault(key, []).append(candidate)
    fused: dict[str, list[str]] = {}
    taken: set[str] = set()
    for whole in wholes if by_key else ():
        names = _tiled(whole, by_key, taken)
        if len(names) > 1:
            fused[whole.name] = names
            taken.update(names)
    return fused


def lines_of(tensor: Saved) -> NDArray[Any]:
    """Return a tensor's bits as lines along its last dim; single values where that is its only dim."""
    return tensor.bits.reshape(-1, tensor.shape[-1] if len(tensor.shape) > 1 else 1)


def _keys(tensor: Saved, most: int | None = None) -> Iterator[_Key]:
    """Yield what stands for each of a tensor's lines; nothing if it cannot be read."""
    if not tensor.shape or not tensor.size:
        return
    try:
        lines = lines_of(tensor)[:most]
    except DumpError:
        return
    yield from ((tensor.dtype, lines.shape[1], hashed) for hashed in line_hashes(lines).tolist())


def _tiled(whole: Saved, by_key: dict[_Key, list[Saved]], taken: set[str]) -> list[str]:
    """Return the parts that a tensor is made of, in order; none if any of its lines is of none."""
    keys = list(_keys(whole))
    names: list[str] = []
    at = 0
    while at < len(keys):
        candidates = [part for part in by_key.get(keys[at], ()) if part.name not in taken and part.name not in names]
        behind, few = lines_of(whole)[at:], candidates[:MAX_CANDIDATES]
        candidate = next((part for part in few if np.array_equal(behind[: len(lines_of(part))], lines_of(part))), None)
        if candidate is None:
            return []
        names.append(candidate.name)
        at += len(lines_of(candidate))
    return names
