"""Tensors found under a different name: renumbered layers or experts, ties, fused weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.comparing.equality import ContentIndex
from shardviz.checkpoint.findings import are_embeddings
from shardviz.checkpoint.maps.mapped_tensors import MappedTensor, leaves
from shardviz.checkpoint.maps.numbering import find_renumberings, star_shared_numbers
from shardviz.checkpoint.records import StoredTensor
from shardviz.errors import DumpError
from shardviz.explain.checkpoints.conversion import OneSidedTie, RenumberedLayers, UnsavedHead
from shardviz.explain.placement.content import LocalNumbering
from shardviz.reference.windows import line_hashes
from shardviz.text import listed, printable

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.checkpoint.comparing.outcome import Outcome
    from shardviz.checkpoint.comparing.pairs import Pair
    from shardviz.checkpoint.maps.numbering import Renumbering
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
class _BothSides:
    """The tensors of both checkpoints, by value, with those that have lost their name.

    Attributes:
        mine: The first's tensors, by what is in them.
        theirs: The second's.
        lost: Those of the first that the second lacks by their names.
        kept: Those of both that are where they were.
    """

    mine: ContentIndex
    theirs: ContentIndex
    lost: frozenset[int]
    kept: Container[int]


def with_moved(outcomes: Outcomes) -> Outcomes:
    """Find tensors whose values another name has."""
    first_contents = ContentIndex.of(_tensors_and_parts(pair.first for _, pair in outcomes))
    second_contents = ContentIndex.of(_tensors_and_parts(pair.second for _, pair in outcomes))
    where = _BothSides(
        first_contents,
        second_contents,
        frozenset(id(pair.first) for outcome, pair in outcomes if outcome.verdict == "missing"),
        {id(side) for outcome, pair in outcomes if outcome.verdict in (*KEPT, "tied") for side in pair.sides},
    )
    placed = [_explain_exchange(outcome, pair, where) for outcome, pair in outcomes]
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
    """Explain renumbered layers: all tensors of a number have those of a different number."""
    kept_names = {outcome.name for outcome, _ in outcomes if outcome.verdict in KEPT}
    moved = {name: source for name, source in sources.items() if source != name}
    words = {name: _explain_renumbering(one) for one in find_renumberings(moved, kept_names) for name in one.names}
    return [
        (outcome.became("moved", *words[outcome.name]) if outcome.name in words else outcome, pair)
        for outcome, pair in outcomes
    ]


def _explain_renumbering(renumbering: Renumbering) -> tuple[str, Cause | None]:
    """Return what became of layers or experts, and why."""
    what, few = renumbering.what, [*renumbering.numbers.items()][:MAX_NUMBERS]
    more = ", ..." if len(renumbering.numbers) > len(few) else ""
    second_numbers, first_numbers = (" ".join(str(pair[at]) for pair in few) for at in (0, 1))
    why = f"{what} {second_numbers}{more} of the second are {what} {first_numbers}{more} of the first"
    if len(few) == 1:
        why = f"{what}.{second_numbers} of the second is {what}.{first_numbers} of the first"
    if renumbering.is_again:
        is_local = len({second - first for first, second in renumbering.numbers.items()}) == 1 and len(few) > 1
        cause = LocalNumbering(what, is_saved=True) if is_local else None
        return f"{why}, which it has elsewhere, too", cause
    return why, RenumberedLayers(what)


def _tensors_and_parts(tensors: Iterable[Tensor | None]) -> Iterator[Tensor]:
    """Yield tensors, and those that they are made of."""
    for tensor in tensors:
        if tensor is not None:
            yield tensor
            yield from leaves(tensor.node) if isinstance(tensor, MappedTensor) else ()


def _explain_exchange(outcome: Outcome, pair: Pair, where: _BothSides) -> tuple[Outcome, Tensor | None]:
    """Return what became of a tensor, and the first's tensor that the second has in its place."""
    if outcome.verdict not in ("other", "added") or pair.second is None:
        return outcome, None
    sources = [one for one in where.mine.equal_to(pair.second) if one is not pair.first]
    if outcome.verdict == "added":
        sources = [one for one in sources if id(one) not in where.kept]
    if sources:
        source = min(sources, key=lambda one: id(one) not in where.lost)
        words = f"the second has here the first's {star_shared_numbers(source.name, outcome.name)}"
        return outcome.became("moved", words), source
    return (_explain_lost_name(outcome, pair, where) if outcome.verdict == "other" else outcome), None


def _explain_lost_name(outcome: Outcome, pair: Pair, where: _BothSides) -> Outcome:
    """Say where the second has a tensor of the first: under a new name, or in a tied copy."""
    targets = [] if pair.first is None else [one for one in where.theirs.equal_to(pair.first) if one is not pair.second]
    if not targets:
        return outcome
    target = min(targets, key=lambda one: id(one) in where.kept)
    name = star_shared_numbers(target.name, outcome.name)
    if id(target) not in where.kept or not are_embeddings(outcome.name, target.name):
        return outcome.became("moved", f"the first has here the second's {name}")
    why = f"{outcome.why}; in the first it is a copy of {name}, which did not change"
    return outcome.became("other", why, OneSidedTie())


def with_ties(outcomes: Outcomes) -> Outcomes:
    """Find tensors that one side lacks and that are copies of what both have."""
    kept_pairs = [pair for outcome, pair in outcomes if outcome.verdict in KEPT]
    sides = [
        ContentIndex.of(filter(None, (pair.first for pair in kept_pairs))),
        ContentIndex.of(filter(None, (pair.second for pair in kept_pairs))),
    ]
    return [(_explain_tie(outcome, pair, sides), pair) for outcome, pair in outcomes]


def _explain_tie(outcome: Outcome, pair: Pair, sides: Sequence[ContentIndex]) -> Outcome:
    if outcome.verdict not in ("missing", "added"):
        return outcome
    at = outcome.verdict == "added"
    tensor = pair.second if at else pair.first
    twins = (one for one in sides[at].equal_to(tensor) if one.dtype == tensor.dtype) if tensor is not None else iter(())
    if (twin := next(twins, None)) is None:  # a master is no copy of the weight that is rounded from it
        return _note_untied_head(outcome, tensor, sides[at])
    side = "second" if at else "first"
    return outcome.became("tied", f"{outcome.why}: a copy of the {side}'s {printable(twin.name)}", other=twin.name)


def _is_head(name: str, kept: str) -> bool:
    """Whether a lost weight is named like an output embedding, and a kept one like an input's."""
    words = name.rpartition(".")[0].rpartition(".")[2], kept.rpartition(".")[0].rpartition(".")[2]
    return are_embeddings(name, kept) or ("head" in words[0] and "emb" in words[1])


def _note_untied_head(outcome: Outcome, tensor: Tensor | None, side: ContentIndex) -> Outcome:
    """Note that a lost head isn't a copy of the embedding, the only tensor of its shape."""
    like = side.by_shape.get(tensor.shape, []) if tensor is not None and len(tensor.shape) == 2 else []
    if len(like) != 1 or tensor is None or tensor.dtype != like[0].dtype or outcome.verdict != "missing":
        return outcome
    if not _is_head(outcome.name, like[0].name):
        return outcome
    words = f"{outcome.why}; it is not a copy of {printable(like[0].name)}, which has its shape"
    return outcome.became("missing", words, UnsavedHead())


def with_fused(outcomes: Outcomes) -> Outcomes:
    """Match tensors that only one checkpoint has with one tensor that has the same lines."""
    lost = [
        pair.first
        for outcome, pair in outcomes
        if outcome.verdict == "missing" and isinstance(pair.first, StoredTensor)
    ]
    new = [
        pair.second
        for outcome, pair in outcomes
        if outcome.verdict == "added" and isinstance(pair.second, StoredTensor)
    ]
    fused, split = find_fused(lost, new), find_fused(new, lost)
    parts = {name for names in (*fused.values(), *split.values()) for name in names}
    remaining: Outcomes = []
    for outcome, pair in outcomes:
        if outcome.name in fused:
            words = f"one after the other, the first's {_parts(fused[outcome.name])}"
            remaining.append((outcome.became("moved", words, other=outcome.name), pair))
        elif outcome.name in split:
            words = f"the second has it in parts, one after the other: {_parts(split[outcome.name])}"
            remaining.append((outcome.became("moved", words), pair))
        elif outcome.name not in parts:
            remaining.append((outcome, pair))
    return remaining


def _parts(names: list[str]) -> str:
    return listed(map(printable, names), MAX_PARTS)


def find_fused(parts: Iterable[StoredTensor], wholes: Iterable[StoredTensor]) -> dict[str, list[str]]:
    """Return tensors that concatenate others along dim 0, with those tensors' names in order."""
    by_key: dict[_Key, list[StoredTensor]] = {}
    for candidate in parts:
        if (key := next(_line_keys(candidate, 1), None)) is not None:
            by_key.setdefault(key, []).append(candidate)
    fused: dict[str, list[str]] = {}
    taken: set[str] = set()
    for whole in wholes if by_key else ():
        names = _tiling(whole, by_key, taken)
        if len(names) > 1:
            fused[whole.name] = names
            taken.update(names)
    return fused


def lines_of(tensor: StoredTensor) -> NDArray[Any]:
    """Return a tensor's bits as lines along its last dim; a vector's as single values."""
    return tensor.bits.reshape(-1, tensor.shape[-1] if len(tensor.shape) > 1 else 1)


def _line_keys(tensor: StoredTensor, most: int | None = None) -> Iterator[_Key]:
    """Yield what stands for each of a tensor's lines; nothing if it cannot be read."""
    if not tensor.shape or not tensor.size:
        return
    try:
        lines = lines_of(tensor)[:most]
    except DumpError:
        return
    yield from ((tensor.dtype, lines.shape[1], hashed) for hashed in line_hashes(lines).tolist())


def _tiling(whole: StoredTensor, by_key: dict[_Key, list[StoredTensor]], taken: set[str]) -> list[str]:
    """Return the parts that a tensor is made of, in order; none if any of its lines is of none."""
    keys = list(_line_keys(whole))
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
