"""Tensors found under a different name: renumbered layers or experts, ties, transposed matrices, renamed in part."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.checkpoint.comparing.equality import ContentIndex, readable_bits
from shardviz.checkpoint.comparing.one_tensor.orders import cause_of_order, name_change
from shardviz.checkpoint.comparing.outcome import KEPT, SIDES, with_replaced
from shardviz.checkpoint.findings import are_embeddings
from shardviz.checkpoint.maps.mapped_tensors import MappedTensor, leaves
from shardviz.checkpoint.maps.numbering import find_renumberings, star_shared_numbers
from shardviz.checkpoint.optimizer import KEYS as STATES
from shardviz.checkpoint.records import StoredTensor
from shardviz.errors import DumpError
from shardviz.explain.checkpoints.conversion import (
    HeadOverwritten,
    OneSidedTie,
    RenamedInPart,
    RenumberedLayers,
    UnsavedHead,
)
from shardviz.explain.checkpoints.maps import ExchangedNames
from shardviz.explain.placement.content import LocalNumbering
from shardviz.explain.testing.transfers import StateByNumber
from shardviz.reference.names import WRAPPED, WRAPPERS
from shardviz.relate.values import is_alike
from shardviz.text import counted, folded_names, printable

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from shardviz.checkpoint.comparing.outcome import Outcome, Outcomes
    from shardviz.checkpoint.comparing.pairs import Pair
    from shardviz.checkpoint.maps.numbering import Renumbering
    from shardviz.checkpoint.records import Tensor
    from shardviz.explain.cause import Cause


MAX_NUMBERS = 8
"""Numbers of layers that are named."""

LEAST_MOVED = 4
"""Layers that must have moved for their order to be that of chunks."""

MATRIX = 2
"""Dims of a matrix."""

MAX_NAMED = 3
"""Names that a note has at most."""

LAYER = re.compile(r".*\.[0-9]+\.")
"""What stands before the name of a tensor in its layer."""

OF_LIBRARIES = frozenset(word for wrapper in (*WRAPPERS, *WRAPPED) for word in wrapper.split(".") if word)


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
    names = {outcome.name: source.name for outcome, source in placed if source is not None}
    exchanged = [(_exchanged(outcome, names), pair) for outcome, pair in placed_outcomes]
    return with_ties(_with_numbers(exchanged, names))


def _exchanged(outcome: Outcome, sources: Mapping[str, str]) -> Outcome:
    """Return an outcome; of two tensors that changed places, with the words in which their names differ."""
    source = sources.get(outcome.name)
    if source is None or sources.get(source) != outcome.name:
        return outcome
    names = sorted((outcome.name, source))
    words = [word.rstrip(".") for word in changed_words(*names)]
    are_of_layer = LAYER.match(source) and all(f".{word}." in name for word, name in zip(words, names, strict=True))
    if not all(words) or any(word.replace(".", "").isdigit() for word in words):
        words, are_of_layer = names, None
    first, second = map(printable, words)
    cause = ExchangedNames(tuple(words), bool(are_of_layer))
    return outcome.became("moved", f"{first} and {second} changed places", cause)


def _with_numbers(outcomes: Outcomes, sources: Mapping[str, str]) -> Outcomes:
    """Explain renumbered layers: all tensors of a number have those of a different number."""
    moved = {name: source for name, source in sources.items() if source != name}
    kept = [pair for outcome, pair in outcomes if moved and outcome.verdict in KEPT]
    # Norms that are all ones are equal in every layer, wherever it is now.
    kept_names = {pair.name for pair in kept if pair.first is None or not _is_constant(pair.first)}
    renumberings = list(find_renumberings(moved, kept_names))
    words = {name: _explain_renumbering(one, outcomes) for one in renumberings for name in one.names}
    return [
        (outcome.became("moved", *words[outcome.name]) if outcome.name in words else outcome, pair)
        for outcome, pair in outcomes
    ]


def _is_constant(tensor: Tensor) -> bool:
    """Whether all elements of a tensor are the same number."""
    bits = readable_bits(tensor)
    return bits is not None and is_alike(bits)


def _explain_renumbering(renumbering: Renumbering, outcomes: Outcomes) -> tuple[str, Cause | None]:
    """Return what became of layers or experts, and why."""
    what, few = renumbering.what, [*renumbering.numbers.items()][:MAX_NUMBERS]
    more = ", ..." if len(renumbering.numbers) > len(few) else ""
    second_numbers, first_numbers = (" ".join(str(pair[at]) for pair in few) for at in (0, 1))
    why = f"{what} {second_numbers}{more} of the second are {what} {first_numbers}{more} of the first"
    if len(few) == 1:
        why = f"{what}.{second_numbers} of the second is {what}.{first_numbers} of the first"
    if all(name.rpartition(".")[2] in STATES for name in renumbering.names):
        return f"of the optimizer's states, {why}", StateByNumber()
    if renumbering.is_again:
        is_local = len({second - first for first, second in renumbering.numbers.items()}) == 1 and len(few) > 1
        cause = LocalNumbering(what, is_saved=True) if is_local else None
        return f"{why}, which it has elsewhere, too", cause
    every = re.compile(rf"(?:^|\.){re.escape(what)}\.([0-9]+)\.")
    numbers = [int(match[1]) for outcome, _ in outcomes if (match := every.search(outcome.name))]
    is_clear = len(renumbering.numbers) >= LEAST_MOVED and "expert" not in what  # two may just have changed places
    chunks = _chunks_of_stages(renumbering.numbers, max(numbers, default=0) + 1) if is_clear else ""
    return why, RenumberedLayers(what, chunks)


def _chunks_of_stages(numbers: Mapping[int, int], total: int) -> str:
    """Say which stages' chunks were put one behind the other, if that renumbers layers so; empty if it does not."""
    order = [numbers.get(number, number) for number in range(total)]
    for size in (size for size in range(1, total // 4 + 1) if not total % size):
        layers = np.arange(total).reshape(-1, size)
        for stages in (stages for stages in range(2, len(layers) // 2 + 1) if not len(layers) % stages):
            by_stage = layers.reshape(-1, stages, size).swapaxes(0, 1).ravel()
            chunks = f"{len(layers) // stages} chunks of {counted(size, 'layer')}"
            if order == by_stage.tolist():
                return f"the {chunks} of each of {stages} stages"
    return ""


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
        name = star_shared_numbers(source.name, outcome.name)
        is_copy = id(source) in where.kept and are_embeddings(outcome.name, source.name)
        is_lost = is_copy and pair.first is not None and not any(where.theirs.equal_to(pair.first))
        cause = HeadOverwritten(name) if is_lost else None
        return outcome.became("moved", f"the second has here the first's {name}", cause), source
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
    at = int(outcome.verdict == "added")
    tensor = pair.sides[at]
    assert tensor is not None, "only the other side lacks it"
    twins = (one for one in sides[at].equal_to(tensor) if one.dtype == tensor.dtype)
    if (twin := next(twins, None)) is None:  # a master is no copy of the weight that is rounded from it
        return _note_untied_head(outcome, tensor, sides[at])
    words = f"{outcome.why}: a copy of the {SIDES[at]}'s {printable(twin.name)}"
    return outcome.became("tied", words, other=twin.name)


def _is_head(name: str, kept: str) -> bool:
    """Whether a lost weight is named like an output embedding, and a kept one like an input's."""
    words = name.rpartition(".")[0].rpartition(".")[2], kept.rpartition(".")[0].rpartition(".")[2]
    return are_embeddings(name, kept) or ("head" in words[0] and "emb" in words[1])


def _note_untied_head(outcome: Outcome, tensor: Tensor, side: ContentIndex) -> Outcome:
    """Note that a lost head isn't a copy of the embedding, the only tensor of its shape."""
    like = side.by_shape.get(tensor.shape, [])
    if outcome.verdict != "missing" or len(tensor.shape) != MATRIX or len(like) != 1:
        return outcome
    if tensor.dtype != like[0].dtype or not _is_head(outcome.name, like[0].name):
        return outcome
    words = f"{outcome.why}; it is not a copy of {printable(like[0].name)}, which has its shape"
    return outcome.became("missing", words, UnsavedHead())


def with_transposes(outcomes: Outcomes) -> Outcomes:
    """Pair each matrix that only the first has with one that only the second has, if that is it transposed."""
    added: dict[object, list[Pair]] = defaultdict(list)
    for outcome, pair in outcomes:
        if outcome.verdict == "added" and (key := _key(pair.second)) is not None:
            added[key].append(pair)
    joined: dict[int, tuple[Outcome, Pair]] = {}
    taken: set[int] = set()
    for outcome, pair in outcomes:
        key = _key(pair.first, turned=True) if outcome.verdict == "missing" and added else None
        matching = [one for one in added.get(key, ()) if id(one) not in taken and _is_transposed(pair, one)]
        if len(matching) == 1:
            taken.add(id(matching[0]))
            joined[id(pair)] = _turned(outcome, replace(pair, second=matching[0].second))
    kept = ((outcome, pair) for outcome, pair in outcomes if id(pair) not in taken)
    return [joined.get(id(pair), (outcome, pair)) for outcome, pair in kept]


def untransposed_notes(outcomes: Outcomes) -> list[str]:
    """Name the square matrices that keep their dims, while all other matrices of their layer are transposed."""
    layers: dict[str, list[tuple[str, bool, bool]]] = defaultdict(list)
    for outcome, pair in outcomes:
        layer = LAYER.match(pair.name)
        if layer is None or pair.first is None or pair.second is None or len(pair.first.shape) != MATRIX:
            continue
        shapes = tuple(pair.first.shape), tuple(pair.second.shape)
        is_square = shapes[0][0] == shapes[0][1]
        is_turned = outcome.verdict == "permuted" if is_square else shapes[0] == shapes[1][::-1]
        layers[layer[0]].append((pair.name, is_square, is_turned))
    kept = [
        name
        for matrices in layers.values()
        if sum(not is_square for _, is_square, _ in matrices) > 1
        and all(is_turned for _, is_square, is_turned in matrices if not is_square)
        for name, is_square, is_turned in matrices
        if is_square and not is_turned
    ]
    are = "it is square" if len(kept) == 1 else "they are square"
    also = f"not transposed, although all other matrices of the layer are: {are}, so that no shape shows it"
    return [f"{folded_names(kept, MAX_NAMED)}: {also}"] if kept else []


def _key(tensor: Tensor | None, *, turned: bool = False) -> object:
    """Return what a matrix has in common with its equals: shape, element type, first row; None if it is one number."""
    if not isinstance(tensor, StoredTensor) or len(tensor.shape) != MATRIX:
        return None
    try:
        bits = tensor.bits.T if turned else tensor.bits
    except (DumpError, OSError):
        return None
    return None if is_alike(bits) else (bits.shape, tensor.dtype, bits[:1].tobytes())


def _is_transposed(pair: Pair, other: Pair) -> bool:
    """Whether a matrix of the second is one of the first with its key, transposed."""
    first, second = replace(pair, second=other.second).both
    return bool(np.array_equal(first.bits.T, second.bits))


def _turned(outcome: Outcome, pair: Pair) -> tuple[Outcome, Pair]:
    first, second = pair.both
    order, cause = name_change(first.bits, second.bits), cause_of_order(first.bits, second.bits)
    return outcome.became("permuted", order, cause, other=second.name), pair


def changed_words(name: str, other: str) -> tuple[str, str]:
    """Return the words of a name that a second name lacks, and what the second has in their place.

    Example:
        >>> changed_words("model.embed.weight", "model.module.embed.weight")
        ('', 'module.')
    """
    first, second = name.split("."), other.split(".")
    shared = min(len(first), len(second))
    begin = next((at for at in range(shared) if first[at] != second[at]), shared)
    end = next((at for at in range(shared - begin) if first[-1 - at] != second[-1 - at]), shared - begin)
    lost, new = first[begin : len(first) - end], second[begin : len(second) - end]
    return "".join(f"{word}." for word in lost), "".join(f"{word}." for word in new)


def with_renamed(outcomes: Outcomes, *, by_content: bool) -> Outcomes:
    """Report equal tensors under other names if most names are equal.

    A map says which name is meant, unless it was made by content: then names are a difference as any other.
    """
    both = [one for one in outcomes if _has_plain_sides(one[1]) and (by_content or not one[1].is_mapped)]
    renamed = [(one, pair) for one, pair in both if one.verdict == "equal" and len(set(_names(pair))) > 1]
    same = sum(len(set(_names(pair))) == 1 for _, pair in both)
    if len(renamed) >= same:
        return outcomes
    return with_replaced(outcomes, {id(pair): _as_renamed(one, pair, same) for one, pair in renamed})


def _has_plain_sides(pair: Pair) -> bool:
    return not any(side is None or isinstance(side, MappedTensor) for side in pair.sides)


def _names(pair: Pair) -> tuple[str, str]:
    first, second = pair.both
    return first.name, second.name


def _as_renamed(outcome: Outcome, pair: Pair, same: int) -> Outcome:
    lost, new = map(printable, changed_words(*_names(pair)))
    has = f"{new} in its name" if not lost else f"{new} in the place of {lost}" if new else f"no {lost} in its name"
    why = f"equal, but the second has {has}; {counted(same, 'other name')} {'is' if same == 1 else 'are'} the same"
    is_wrapper = bool(lost or new) and {word for word in f"{lost}{new}".split(".") if word} <= OF_LIBRARIES
    return outcome.became("renamed", why, RenamedInPart(lost or new, is_wrapper))


def rename_notes(pairs: Iterable[Pair]) -> list[str]:
    """Say what most names have more on one side, if most names differ by the same words."""
    names = [_names(pair) for pair in pairs if _has_plain_sides(pair)]
    changes = Counter(changed_words(*both) for both in names if both[0] != both[1])
    if not changes:
        return []
    (lost, new), count = changes.most_common(1)[0]
    if (lost and new) or 2 * count <= len(names):
        return []
    has = f"the second has {printable(new)}" if new else f"the first has {printable(lost)}"
    compared = f"{counted(len(names), 'name')} by which tensors are compared"
    return [f"names: {has} in {count:,} of {compared}; a load by name needs equal names"]
