"""Comparison of two checkpoints of any format: tensors equal, cast, reordered, or different.

Two tensors are in memory at a time. Names are matched as a reference's are: by a map, wrappers, one beginning. Objects
other than tensors, such as a step or a learning rate, are compared by value.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from shardviz.check.report import NotChecked
from shardviz.checkpoint.comparing.all_tensors.common import with_common_cause, with_roundings, with_summed_replicas
from shardviz.checkpoint.comparing.all_tensors.lonely import lonely_outcomes, with_lost_states, with_masters
from shardviz.checkpoint.comparing.all_tensors.moves import (
    rename_notes,
    untransposed_notes,
    with_moved,
    with_renamed,
    with_transposes,
)
from shardviz.checkpoint.comparing.all_tensors.rows import with_fused, with_rows_placed
from shardviz.checkpoint.comparing.all_tensors.steps import with_left_over
from shardviz.checkpoint.comparing.equality import ContentIndex, agree, can_cast, narrower
from shardviz.checkpoint.comparing.map_choice import with_map
from shardviz.checkpoint.comparing.objects import compare_objects
from shardviz.checkpoint.comparing.one_tensor.changes import change_of, lost_to_zero, overflown
from shardviz.checkpoint.comparing.one_tensor.eight_bits import judge_scaled, judge_unscaled
from shardviz.checkpoint.comparing.one_tensor.lengths import with_parts
from shardviz.checkpoint.comparing.outcome import SIDES, Comparison, Outcome, Verdict
from shardviz.checkpoint.comparing.pairs import padding_notes, pair_tensors
from shardviz.checkpoint.findings import check_second_set
from shardviz.checkpoint.maps.families import family_of
from shardviz.checkpoint.maps.mapped_tensors import PAD, MappedTensor, Op
from shardviz.checkpoint.maps.wrong import explain_slip
from shardviz.errors import DumpError, ShardvizError
from shardviz.explain.checkpoints.conversion import LostInFloat16, OverflowInFloat16
from shardviz.relate.casts import is_narrower
from shardviz.text import listed, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardviz.checkpoint.comparing.pairs import Pair, Pairs, Side
    from shardviz.checkpoint.maps.language import Rule
    from shardviz.checkpoint.maps.mapped_tensors import Node
    from shardviz.checkpoint.records import Checkpoint, Tensor

__all__ = ["Comparison", "Outcome", "Verdict", "compare_checkpoints"]

ADAPTER = ".lora_"
"""What stands in the names of all tensors of an adapter."""

LONELY = 4
"""Where one in this many tensors is in one checkpoint only, or under another name, a map may be meant."""


WRITE_A_MAP = (
    "if names correspond, say how with --map FILE, in lines such as `layers.*.wq.* = model.layers.*.self_attn.q_proj.*`"
)

NAMES = "names: "


def compare_checkpoints(
    before: Checkpoint,
    after: Checkpoint,
    rules: Sequence[Rule] = (),
    progress: Callable[[int, int], object] = lambda done, of: None,
    also: Sequence[Checkpoint] = (),
) -> Comparison:
    """Compare all tensors of two checkpoints.

    Args:
        rules: The lines of a map.
        progress: Called with the tensors compared, and their number.
        also: Checkpoints of other steps, besides those next to the two.

    Raises:
        ShardvizError: They have no tensor in common, or a line of the map fits none.
    """
    pairs = pair_tensors(before, after, rules)
    pairs = pairs if rules else with_map(pairs, before, after)
    refuse_strangers(pairs, before, after, "name or its values")
    judged = with_lost_states(with_parts(_compared(pairs, (before, after), progress)))
    summed = with_summed_replicas(with_left_over(judged, before, after, also))
    common = with_common_cause(with_renamed(summed, by_content=bool(pairs.lines)))
    results = with_roundings(common)
    outcomes = (*(outcome for outcome, _ in results), *pairs.open)
    objects, notes = compare_objects(before, after, renamed=bool(rules or pairs.notes or pairs.is_mapped))
    more = () if rules or (pairs.is_mapped and not pairs.lines) else hint(before, after, outcomes)
    padded = {pair.name for outcome, pair in results if outcome.verdict == "padded"}
    is_told = pairs.is_mapped or any(note.startswith(NAMES) for note in pairs.notes)
    names = [] if rules or is_told else rename_notes(pairs.both)
    notes = [*padding_notes(pairs.both, padded), *untransposed_notes(results), *notes]
    notes = [*pairs.notes, *names, *notes, *more]
    second = (_of_second_set(checkpoint, side) for checkpoint, side in zip((before, after), SIDES, strict=True))
    return Comparison((*outcomes, *objects, *filter(None, second)), tuple(notes), pairs.lines, pairs.guessed)


def _compared(
    pairs: Pairs, checkpoints: tuple[Checkpoint, Checkpoint], progress: Callable[[int, int], object]
) -> list[tuple[Outcome, Pair]]:
    """Return each tensor's outcome, alone or by comparison with all tensors of both sides."""
    tensors = checkpoints[0].tensors, checkpoints[1].tensors
    sides = ContentIndex.of(tensors[0].values()), ContentIndex.of(tensors[1].values())
    results: list[tuple[Outcome, Pair]] = []
    scales: set[str] = set()
    whole: dict[int, Pair] = {}
    for done, pair in enumerate(pairs.both):
        progress(done, len(pairs.both))
        cut = pair.trimmed()  # what is looked for under other names has no padding
        if (by_scale := judge_scaled(pair, tensors)) is not None:
            scales.add(by_scale[1])
        outcome = judge_unscaled(_outcome(pair, cut, sides), pair) if by_scale is None else by_scale[0]
        results.append((_but_for_ranks(outcome, pair, checkpoints), cut))
        whole[id(cut)] = pair
    lonely = [pair for pair in pairs.lonely if pair.name not in scales]
    results += lonely_outcomes(lonely, checkpoints)
    placed = with_rows_placed(with_fused(with_transposes(with_moved(with_masters(results)))))
    return [(outcome, whole.get(id(pair), pair)) for outcome, pair in placed]


def refuse_strangers(pairs: Pairs, before: Side, after: Side, by: str = "name") -> None:
    """Refuse two sides that have tensors, and none in common.

    Args:
        by: What of a tensor was looked for.

    Raises:
        ShardvizError: They are such; its message has some names of each side.
    """
    if pairs.both or not before.tensors or not after.tensors:
        return
    some, others = (listed(map(printable, sorted(one.tensors))) for one in (before, after))
    family = family_of(before.tensors, after.tensors)
    hint = WRITE_A_MAP
    if adapter := next((one for one in (before, after) if all(ADAPTER in name for name in one.tensors)), None):
        hint = f"{adapter.path} is an adapter: to check a merge, shardviz diff BASE MERGED --also {adapter.path}"
    raise ShardvizError(
        f"no tensor of {before.path} is in {after.path} by its {by}: the first has {some}, the second {others}",
        f"--map {family} knows these names" if family else hint,
    )


def hint(before: Side, after: Side, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Suggest `--map` if many names are on one side only: a map that knows them, or a new one."""
    verdicts = [outcome.verdict for outcome in outcomes]
    lonely = sum(verdict in ("missing", "added", "moved") for verdict in verdicts)
    if lonely <= len(outcomes) / LONELY:
        return ()
    if family := family_of(before.tensors, after.tensors):
        return (f"--map {family} knows these names",)
    return (WRITE_A_MAP,) if {"missing", "added"} <= set(verdicts) else ()


def _of_second_set(checkpoint: Checkpoint, side: str) -> Outcome | None:
    """Return a difference for a second set of other values in one side of a comparison."""
    finding = check_second_set(checkpoint)
    if finding is None or isinstance(finding, NotChecked):
        return None
    outcome = Outcome(printable(checkpoint.second_set), "", "other")
    return outcome.became("other", f"in the {side}, {finding.summary}", finding.explanation)


def _but_for_ranks(outcome: Outcome, pair: Pair, checkpoints: tuple[Checkpoint, Checkpoint]) -> Outcome:
    """Return an outcome; not compared if one side has only a rank's part of the tensor."""
    for at, checkpoint in enumerate(checkpoints):
        part, whole = pair.both[at].shape, pair.both[1 - at].shape
        if checkpoint.ranks and math.prod(part) * len(checkpoint.ranks) == math.prod(whole):
            why = f"the {SIDES[at]} has one rank's part of it, of {len(checkpoint.ranks)}: join the ranks' files first"
            return outcome.became("not-compared", why)
    return outcome


def _outcome(pair: Pair, cut: Pair, sides: tuple[ContentIndex, ContentIndex]) -> Outcome:
    """Return what became of a tensor; `cut` is the pair without its padding."""
    is_made = isinstance(pair.first, MappedTensor) or isinstance(pair.second, MappedTensor)
    outcome = Outcome(pair.name, pair.other_name, "equal", is_made=is_made)
    try:
        return _compare_pair(outcome, pair, cut, sides)
    except DumpError as error:
        return outcome.failed(error)


def _compare_pair(outcome: Outcome, pair: Pair, cut: Pair, sides: tuple[ContentIndex, ContentIndex]) -> Outcome:
    tensor, second = pair.both
    if not can_cast(tensor.dtype, second.dtype):
        why = f"it is {tensor.dtype} and {second.dtype}, and how one is rounded to the other is not known"
        return outcome.became("not-compared", why)
    if agree(tensor, second):
        return outcome if tensor.dtype == second.dtype else _cast(outcome, tensor, second)
    if (padded := _padded_otherwise(outcome, tensor, second)) is not None:
        return padded
    tensor, second = cut.both
    for at, (mapped, held) in enumerate(((tensor, second), (second, tensor))):
        if isinstance(mapped, MappedTensor) and (instead := explain_slip(outcome, mapped, held, sides[at])) is not None:
            return replace(instead, why=f"in the {SIDES[1 - at]}, {instead.why}")
    return change_of(outcome, tensor, second)


def _padded_otherwise(outcome: Outcome, before: Tensor, after: Tensor) -> Outcome | None:
    """Return how a tensor was padded if the map pads its end; None if it was not padded."""
    inner = _inner(before), _inner(after)
    if inner == (before, after) or isinstance(inner[0], Op) or isinstance(inner[1], Op):
        return None
    change = change_of(outcome, inner[0], inner[1])
    return change if change.verdict == "padded" else None


def _inner(side: Tensor) -> Node:
    return side.node.parts[0] if isinstance(side, MappedTensor) and side.node.function == PAD else side


def _cast(outcome: Outcome, before: Tensor, after: Tensor) -> Outcome:
    """Say what types a tensor has, and that a cast made values infinite, or zero, if it did."""
    why = f"{before.dtype} became {after.dtype}, the values are equal after the cast"
    wide = after if is_narrower(before.dtype, after.dtype) else before
    narrow = narrower(before.dtype, after.dtype)
    if lost := overflown(wide.bits, wide.dtype, narrow) if narrow == "float16" else "":
        return outcome.became("cast", f"{why}; {lost}", OverflowInFloat16(narrow))
    if lost := lost_to_zero(wide.bits, wide.dtype, narrow) if narrow == "float16" else "":
        return outcome.became("cast", f"{before.dtype} became {after.dtype}, and {lost}", LostInFloat16(narrow))
    return outcome.became("cast", why)
