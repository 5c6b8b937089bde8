"""Masks and biases of attention that are made for other queries or keys than those that they meet.

Under context parallelism a rank has some of the queries, and keys come in the order in which they are gathered. Scores
are numbers of their own, so they say which queries and keys they are of: the unsharded model's mask has a part for
these. Any other mask is wrong, and so is what it is made of, back to the positions that are counted in another order.

In a ring, keys come block by block: a rank runs the unsharded model's one line once for each block.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, product
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.step.lines.calls import ADDITIONS, Call, Lines, Value
from shardviz.check.step.lines.exchanges import COPIES, MATRIX_PRODUCTS
from shardviz.check.step.lines.fault import Fault, at, fault_at, given_fault, reached
from shardviz.check.step.lines.states import States
from shardviz.explain.step.line_rows import BlockNotPassedOn, MisplacedMask, UnweightedJoin, ValuesInOtherOrder
from shardviz.groups import walk
from shardviz.relate.factors import over
from shardviz.relate.orders import places_of
from shardviz.relate.tolerance import STEP
from shardviz.relate.values import finite_magnitude
from shardviz.text import listed, spans_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.dump.records.trace import FrameRecord

    Array = NDArray[np.float64]
    Places = tuple[list[int], list[int]]
    """Where the last two dims of a rank's scores stand in the whole: its queries, and its keys."""

MASKING = ("masked_fill", "masked_fill_", "where", "add", "add_", "iadd", "sub", "mul")
"""Functions that give scores a mask or a bias."""

HIDDEN = -1e4
"""A score that is at most this has no weight: masks are this, or less."""

POWERS = ("exp", "exp_", "logsumexp")
"""Functions by which code writes out a softmax."""

ATTENTION = "scaled_dot_product_attention"

SHAPES = ("transpose", "permute", "unflatten", "flatten", "view", "reshape", "unsqueeze", "contiguous", "T", "mT")
"""Functions that leave slices in their order."""

MAX_LEADS = 64
"""Batch rows and heads of the whole in which those of a rank are looked for."""

MAX_CALLS = 16
"""Of more calls that may mask scores the first are looked at."""

MAX_ROUNDS = 64
"""Of more blocks of a ring the first are looked at."""

MAX_LISTED = 4


def values_order_fault(states: States) -> Fault | None:
    """Return the line that gives an attention its values in another order than its keys, or its keys in another."""
    for call in states.lines.calls:
        if call.function != ATTENTION or len(call.inputs) < 3:
            continue
        orders = [_order_of_slices(states, value) for value in call.inputs[1:3]]
        in_order = [order == sorted(order) for order in orders]
        if not all(orders) or orders[0] == orders[1] or not any(in_order):
            continue
        moved = in_order.index(False)
        source = _made_in(states, call.inputs[1 + moved])
        name = ("keys", "values")[moved]
        place = source.place if source is not None else call.place
        at_slice, of_whole = next((at, place) for at, place in enumerate(orders[moved]) if at != place)
        sentence = (
            f"{reached(call)} gets the {name} in another order than the sequence's, slice {at_slice} of which is slice "
            f"{of_whole} of the unsharded model's, and the {('keys', 'values')[1 - moved]} in the sequence's"
        )
        cause = ValuesInOtherOrder(call.place, call.function, name, place)
        return fault_at(call, sentence, cause)
    return None


def _order_of_slices(states: States, value: Value) -> list[int]:
    """Return where the keys or values of the first rank stand in the whole's sequence; nothing unless it has all."""
    whole, held = states.reference_of(value), states.held(value)
    if whole is None or not held or held[min(held)].shape != whole.shape:
        return []
    found = places_of(held[min(held)], whole, STEP * finite_magnitude(whole))
    is_known = found is not None and found[0] == whole.ndim - 2 and sorted(found[1]) == list(range(whole.shape[-2]))
    return found[1].tolist() if found is not None and is_known else []


def _made_in(states: States, value: Value) -> Call | None:
    """Return the call that gives the numbers of a tensor their order, before all that only changes its shape."""
    maker = states.lines.producer(value)
    while maker is not None and maker.function in SHAPES and maker.inputs:
        before = states.lines.producer(maker.inputs[0])
        if before is None:
            return maker
        maker = before
    return maker


def mask_fault(states: States, calls: Sequence[Call]) -> Fault | None:
    """Return the line of the positions by which scores of other queries or keys are masked; None without proof.

    Args:
        calls: The calls whose results are no part of the unsharded model's.
    """
    masking = (call for call in calls if call.function == ATTENTION or _is_of_scores(states.lines, call))
    return next(filter(None, (_fault_of(states, call) for call in islice(masking, MAX_CALLS))), None)


def ring_mask_fault(states: States) -> Fault | None:
    """Return the line of the positions by which a block of a ring is masked as another one; None without proof."""
    lines = states.lines
    looped = States(states.dump, replace(lines, wanted=dict(lines.wanted)))
    masking: list[Call] = []
    for calls, of_whole in lines.rounds.values():
        if not of_whole or len(calls) <= len(of_whole) or len(calls) % len(of_whole):
            continue
        for number, call in enumerate(calls):
            whole = of_whole[number % len(of_whole)]
            for values, numbers in ((call.outputs, whole.outputs), (call.inputs, whole.inputs)):
                pairs = zip(values, numbers, strict=True) if len(values) == len(numbers) else ()
                for value, wanted in pairs:
                    looped.lines.wanted.setdefault(value, wanted)
        masking += [call for call in calls if call.function in MASKING and _is_of_scores(lines, call)]
    combined = (call for call in masking if _has_mask(looped, call))
    faults = (_fault_of(looped, call, in_ring=True) for call in islice(combined, MAX_ROUNDS))
    return next(filter(None, faults), None)


def same_block_fault(states: States) -> Fault | None:
    """Return the line that multiplies by the same block in every round of a ring: no round passes it on."""
    for calls, of_whole in states.lines.rounds.values():
        is_by_weight = any(states.lines.weight_name(value) for value in calls[0].inputs)
        if is_by_weight or not 0 < len(of_whole) < len(calls) or calls[0].function not in MATRIX_PRODUCTS:
            continue
        given = [[states.held(value) for value in call.inputs] for call in calls]
        first, others = given[0], given[1:]
        is_own = any(not np.array_equal(array, next(iter(held.values()))) for held in first for array in held.values())
        if is_own and all(all(map(_are_equal, first, other)) for other in others):
            line = calls[0].inner_line
            sentence = f"{at(line)} multiplies the same numbers in all {len(calls)} rounds"
            return fault_at(calls[0], sentence, BlockNotPassedOn(line.place, len(calls)))
    return None


def unweighted_fault(states: States) -> Fault | None:
    """Return the line that joins ranks' softmax-weighted sums in some way, if their own masses would join them rightly.

    A softmax over a rank's own scores is right if the results are joined later, by the sums of exponentials.
    """
    for call in states.lines.calls:
        scores = call.inputs[0] if call.function == "softmax" and call.whole and call.inputs else None
        layout = states.forward(scores).layout if scores is not None else None
        axes = [axis for axis in layout.chains[-1] if isinstance(axis, str)] if layout is not None else []
        product = next((reader for reader in states.lines.after(call) if reader.function in MATRIX_PRODUCTS), None)
        if scores is None or len(axes) != 1 or product is None or not _are_joined(states, scores, product, axes[0]):
            continue
        joining = next((later for later in states.lines.following(product) if later.first.ranks), None)
        if joining is None or _is_made_again(states, product):
            continue
        sentence = (
            f"{reached(joining, call.line)} joins what {at(call.line)} weights by a softmax of each rank's scores"
        )
        return fault_at(joining, sentence, UnweightedJoin(joining.place, call.place, axes[0]))
    return None


def _is_made_again(states: States, product: Call) -> bool:
    """Whether what comes of a product on every rank is the unsharded model's result of it: ranks join it rightly."""
    whole, later = states.reference_of(product.outputs[0]), states.lines.derived(product)
    values = (states.held(made) for made in later if made not in product.outputs)
    return whole is not None and any(held and all(_is_near(array, whole) for array in held.values()) for held in values)


def _are_joined(states: States, scores: Value, product: Call, axis: str) -> bool:
    """Whether ranks' weighted sums, each times its sum of exponentials, make the unsharded model's."""
    whole, held = states.reference_of(product.outputs[0]), states.held(product.outputs[0])
    of_scores = states.held(scores)
    if whole is None or not held or held.keys() != of_scores.keys():
        return False
    top = max((float(array.max()) for array in of_scores.values() if array.size), default=0.0)
    with np.errstate(all="ignore"):  # a rank may have no keys that count
        masses = {rank: np.exp(array - top).sum(-1, keepdims=True) for rank, array in of_scores.items()}
        if any(array.shape != whole.shape or masses[rank].ndim != array.ndim for rank, array in held.items()):
            return False
        above = over(axis, "sum", {rank: array * masses[rank] for rank, array in held.items()}, states.mesh)
        below = over(axis, "sum", masses, states.mesh)
        is_near = all(_is_near(above[rank] / below[rank], whole) for rank in above.keys() & below.keys())
    return above.keys() == held.keys() and is_near and not any(_is_near(array, whole) for array in held.values())


def _are_equal(held: Mapping[int, Array], other: Mapping[int, Array]) -> bool:
    return bool(held) and held.keys() == other.keys() and all(np.array_equal(held[rank], other[rank]) for rank in held)


def _has_mask(states: States, call: Call) -> bool:
    """Whether a call combines scores with a number for each query and key that is made of positions alone."""
    shapes = [whole.shape[-2:] for value in call.inputs if (whole := states.reference_of(value)) is not None]
    if len(shapes) < 2 or len({*shapes}) > 1 or len(shapes[0]) < 2 or min(shapes[0]) < 2:
        return False
    mask = _places_of_call(states, call)[1]
    sources = [value for maker in states.lines.makers(mask) for value in maker.inputs] if mask is not None else []
    return not any(states.lines.origin(value).startswith("input") and not states.is_index(value) for value in sources)


def _are_all(places: Places, whole: Array) -> bool:
    """Whether a rank has all queries and keys of a mask, in order: then positions are not what is wrong with it."""
    return whole.ndim > 1 and all(own == [*range(size)] for own, size in zip(places, whole.shape[-2:], strict=True))


def _fault_of(states: States, call: Call, *, in_ring: bool = False) -> Fault | None:
    places, mask = _places_of_call(states, call)
    hidden = _hidden_later(states, call) if mask is not None and places else {}
    wrong = [rank for rank in places if mask and _is_like(states, mask, rank, places[rank], hidden) is False]
    whole = states.reference_of(mask) if mask is not None else None
    unlike = [rank for rank in wrong if whole is None or not _are_all(places[rank], whole)]
    maker = states.lines.producer(mask) if mask is not None and unlike else None
    if mask is None or maker is None:
        return None
    if not in_ring and (as_it_is := _given_as_it_is(states.lines, mask)) is not None:
        return given_fault(*as_it_is) if not states.lines.is_cut else None
    changing: FrameRecord | None = None
    while not maker.counts_by_rank:
        before = next((value for value in maker.inputs if _is_unlike(states, value, places)), None)
        earlier = states.lines.producer(before) if before is not None else None
        if earlier is None:
            break
        changing = changing or (maker.inner_line if _is_update(states.lines, maker) else None)
        maker = earlier
    if not in_ring and not maker.counts_by_rank:  # what it is made of first is made of may be wrong, too
        makers, given = _makers_of_unlike(states, call, places)
        if given is not None:
            return given_fault(given) if not states.lines.is_cut else None
        maker = min([maker, *makers], key=lambda earlier: earlier.order)
    rank, first = unlike[0], maker.inner_line
    of, taken = _counted(states, mask, maker, rank, places) or _taken(states, mask, rank, places[rank])
    what, verb = ("bias", "biases") if call.function in (*ADDITIONS, "sub") else ("mask", "masks")
    has = f"rank {rank} {verb} {of} {spans(places[rank][of == 'keys'])} of the whole"
    takes = f"the {what} takes them as {spans(taken)}" if taken else f"the {what} isn't that of these"
    changes = f", as {at(changing, first)} changes it in each round" if changing is not None else ""
    sentence = f"{reached(maker)} is the first wrong line: {has}, and {takes}{changes}"
    applies = f"{at(call.inner_line, first)} applies the {what}"
    place, reader = first.place, call.inner_line.place
    updated = changing.place if changing is not None else ""
    cause = MisplacedMask(place, reader, of, in_ring, updated=updated)
    return fault_at(maker, f"{sentence}; {applies}", cause)


def _given_as_it_is(lines: Lines, mask: Value) -> tuple[Call, str] | None:
    """Return the call that reads a mask which the module is given, and which input that is; None if it makes it."""
    makers = list(lines.makers(mask))
    if any(len(maker.inputs) != 1 or maker.first.ranks or maker.counts_by_rank for maker in makers):
        return None
    origin = lines.origin(makers[-1].inputs[0]) if makers else ""
    return (makers[-1], origin) if origin.startswith("input") else None


def _makers_of_unlike(states: States, call: Call, places: Mapping[int, Places]) -> tuple[list[Call], Call | None]:
    """Return the calls that make what a mask is made of, as far as it is not that of a rank's queries or keys.

    Returns:
        The calls; and the one that reads such numbers which the module is given, None if there is none.
    """
    makers: list[Call] = []
    waiting = [call]
    while waiting:
        current = waiting.pop(0)
        for value in (value for value in current.inputs if _is_unlike(states, value, places)):
            maker = states.lines.producer(value)
            if maker is None and states.lines.origin(value).startswith("input"):
                return makers, current
            if maker is not None and maker not in makers:
                makers.append(maker)
                waiting += [] if maker.counts_by_rank else [maker]
    return makers, None


def _hidden_later(states: States, call: Call) -> dict[int, NDArray[np.bool_]]:
    """Return which scores of a rank a later mask hides in all heads: what is added to these does not count."""
    last = call
    while later := [reader for reader in states.lines.after(last) if reader.function in MASKING]:
        last = later[0]
    if last is call or not (call.outputs and last.outputs):
        return {}
    before, after = states.held(call.outputs[0]), states.held(last.outputs[0])
    hidden = {rank: (array <= HIDDEN) & (before[rank] > HIDDEN) for rank, array in after.items() if rank in before}
    return {rank: np.all(array, tuple(range(array.ndim - 2))) for rank, array in hidden.items()}


def _is_update(lines: Lines, call: Call) -> bool:
    """Whether a call changes a variable of a loop: its line makes what it reads, too, or what reads its result."""
    key = lines.key_of(call.first)
    return any(lines.key_of(other.first) == key for other in (*lines.before(call), *lines.after(call)))


def _is_of_scores(lines: Lines, call: Call) -> bool:
    """Whether a call masks what a softmax is taken of, also one that is written out."""
    masked = walk([call], lambda made: lines.after(made) if made.function in (*MASKING, *COPIES) else [])
    return any("softmax" in made.function or made.function in POWERS for made in masked)


def _places_of_call(states: States, call: Call) -> tuple[dict[int, Places], Value | None]:
    """Return each rank's queries and keys of a call that masks scores, with the mask; empty if they aren't certain."""
    if call.function == ATTENTION and len(call.inputs) == 4:
        queries, keys = (_places(states, value) for value in call.inputs[:2])
        return {rank: (queries[rank][0], keys[rank][0]) for rank in queries if rank in keys}, call.inputs[3]
    if call.function not in MASKING or len(call.inputs) < 2:
        return {}, None
    scores, mask = sorted(call.inputs, key=lambda value: -_variety(states, value))[:2]
    is_made_of_scores = any(scores in maker.inputs for maker in states.lines.makers(mask))  # as their maximum is
    return ({}, None) if is_made_of_scores else (_places(states, scores), mask)


def _variety(states: States, value: Value) -> int:
    """Return how many different numbers the first rank has of a tensor."""
    return max((len(np.unique(array)) for array in list(states.held(value).values())[:1]), default=0)


def _places(states: States, value: Value) -> dict[int, Places]:
    """Return where the last two dims of a tensor stand in the whole on every rank; empty if that isn't certain."""
    whole, held = states.reference_of(value), states.held(value)
    if whole is None or whole.ndim < 2 or any(array.ndim != whole.ndim or not array.size for array in held.values()):
        return {}
    leads = whole.reshape(-1, *whole.shape[-2:])[:MAX_LEADS]
    places_of = {
        rank: next(filter(None, (_places_in(lead, array[(0,) * (array.ndim - 2)]) for lead in leads)), None)
        for rank, array in held.items()
    }
    return {rank: places for rank, places in places_of.items() if places is not None} if all(places_of.values()) else {}


def _places_in(whole: Array, held: Array) -> Places | None:
    """Return which rows and columns of a matrix another one has, each number of which stands once in the matrix."""
    if not (np.abs(whole - held[0, 0]) <= STEP * float(np.abs(whole).max())).any():
        return None
    order = np.argsort(whole, axis=None)
    numbers = whole.ravel()[order]
    above = np.searchsorted(numbers, held).clip(0, numbers.size - 1)
    below = (above - 1).clip(0)
    at = order[np.where(np.abs(numbers[below] - held) < np.abs(numbers[above] - held), below, above)]
    rows = [int(np.bincount(row).argmax()) for row in at // whole.shape[1]]
    columns = [int(np.bincount(column).argmax()) for column in (at % whole.shape[1]).T]
    is_part = len({*rows}) == len(rows) and len({*columns}) == len(columns)
    return (rows, columns) if is_part and _is_near(held, whole[np.ix_(rows, columns)]) else None


def _is_near(held: Array, due: Array) -> bool:
    """Whether two arrays are equal but for rounding; infinite numbers are, if both have them."""
    largest = finite_magnitude(due)
    return held.shape == due.shape and bool(np.isclose(held, due, rtol=0.0, atol=STEP * largest).all())


def _is_unlike(states: States, value: Value, places: Mapping[int, Places]) -> bool:
    """Whether a tensor is not that of the queries and keys that some rank has."""
    return any(_is_like(states, value, rank, places[rank]) is False for rank in places)


def _is_like(
    states: States,
    value: Value,
    rank: int,
    places: Places,
    hidden: Mapping[int, NDArray[np.bool_]] = MappingProxyType({}),
) -> bool | None:
    """Whether a rank's tensor is that of some queries and keys; None if it has neither, or isn't compared.

    Args:
        places: Its queries and keys.
        hidden: Scores of each rank whose mask or bias does not count.
    """
    whole, held = states.reference_of(value), states.held(value).get(rank)
    parts = [] if whole is None or held is None else list(_parts(whole, held.shape, places))
    if not parts or held is None:
        return None
    no_score = hidden.get(rank)
    if no_score is None or no_score.shape != held.shape[-2:]:
        return any(_is_near(held, part) for part in parts)
    return any(_is_near(np.where(no_score, 0.0, held), np.where(no_score, 0.0, part)) for part in parts)


def _parts(whole: Array, shape: Sequence[int], places: Places) -> Iterator[Array]:
    """Yield what some queries and keys have of a tensor, for each way in which its dims may be of them by their sizes.

    The last dim is one of keys, and the one before of queries, if the sizes allow that.
    """
    if len(shape) != whole.ndim or tuple(shape[:-2]) != whole.shape[:-2]:
        return
    ways: list[list[list[int] | None]] = []
    for size, whole_size in zip(shape, whole.shape, strict=True):
        of_size = [numbers for numbers in places if len(numbers) == size > 1 and max(numbers) < whole_size]
        ways.append([*of_size] if of_size else [None] if size == whole_size else [])
    if len(ways) > 1 and all(numbers in ways[dim] for dim, numbers in zip((-2, -1), places, strict=True)):
        ways[-2:] = [[numbers] for numbers in places]
    for way in product(*ways):
        part = whole
        for dim, numbers in enumerate(way):
            part = part if numbers is None else part.take(numbers, dim)
        if any(numbers is not None for numbers in way):
            yield part


def _counted(
    states: States, mask: Value, maker: Call, rank: int, places: Mapping[int, Places]
) -> tuple[str, list[int]] | None:
    """Return whose positions a call counts wrongly, and the rank's, if every rank's mask is that of its positions."""
    out = maker.outputs[0] if len(maker.outputs) == 1 and states.is_index(maker.outputs[0]) else None
    held = states.held(out) if out is not None else {}
    counted = {rank: list(map(int, array.ravel())) for rank, array in held.items() if min(array.shape, default=0) > 0}
    for side, of in ((1, "keys"), (0, "queries")):
        taken = {rank: (keys, own[1 - side]) for rank, own in places.items() if (keys := counted.get(rank)) is not None}
        if len(taken) == len(places) and all(len(taken[own][0]) == len(places[own][side]) for own in places):
            masked = {own: (other, new) if side else (new, other) for own, (new, other) in taken.items()}
            if all(_is_like(states, mask, own, masked[own]) for own in places):
                return of, taken[rank][0]
    return None


def _taken(states: States, mask: Value, rank: int, places: Places) -> tuple[str, list[int]]:
    """Return whether the mask is made for other queries or keys, and for which; empty if for none in a usual order.

    Keys of another rank may be taken for those of the rank's queries.
    """
    as_block = [places[0]] if len(places[0]) == len(places[1]) else []
    for queries, keys in product(_orders(places[0]), [*_orders(places[1]), *as_block]):
        if _is_like(states, mask, rank, (queries, keys)):
            return ("keys", keys) if keys != places[1] else ("queries", queries)
    return "keys", []


def _orders(numbers: list[int]) -> Iterator[list[int]]:
    """Yield some positions, and other ones that as many may be taken for: in order, and counted from 0."""
    yield from (numbers, sorted(numbers), [*range(len(numbers))])


def spans(numbers: Sequence[int]) -> str:
    """Write positions in their order: `0-3, 12-15 and 4-11`."""
    named = (f"{start}-{stop - 1}" if stop > start + 1 else f"{start}" for start, stop in spans_of(numbers))
    return listed(named, MAX_LISTED)
