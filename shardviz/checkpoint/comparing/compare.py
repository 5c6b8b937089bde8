"""Comparison of two checkpoints of any format: tensors equal, cast, reordered, or different.

Two tensors are in memory at a time. Names are matched as a reference's are: by a map, wrappers, one beginning. Objects
other than tensors, such as a step or a learning rate, are compared by value.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardviz.check.report import NotChecked
from shardviz.checkpoint.comparing.all_tensors.common import with_common_cause, with_roundings, with_summed_replicas
from shardviz.checkpoint.comparing.all_tensors.lonely import (
    lonely_outcomes,
    with_fused,
    with_lost_states,
    with_masters,
    with_rows_placed,
)
from shardviz.checkpoint.comparing.all_tensors.moves import (
    rename_notes,
    untransposed_notes,
    with_moved,
    with_renamed,
    with_transposes,
)
from shardviz.checkpoint.comparing.all_tensors.steps import with_left_over
from shardviz.checkpoint.comparing.equality import ContentIndex, agree, can_cast, narrower
from shardviz.checkpoint.comparing.one_tensor.changes import change_of, lost_to_zero, overflown
from shardviz.checkpoint.comparing.one_tensor.eight_bits import judge_scaled, judge_unscaled
from shardviz.checkpoint.comparing.one_tensor.lengths import with_parts
from shardviz.checkpoint.comparing.outcome import SIDES, Comparison, Outcome, Verdict
from shardviz.checkpoint.comparing.pairs import padding_notes, pair_tensors, with_map
from shardviz.checkpoint.findings import check_second_set
from shardviz.checkpoint.formats.archive import read_object
from shardviz.checkpoint.formats.torch_file import BY_ITSELF
from shardviz.checkpoint.maps.families import family_of
from shardviz.checkpoint.maps.mapped_tensors import PAD, MappedTensor, Op
from shardviz.checkpoint.maps.wrong import explain_slip
from shardviz.checkpoint.optimizer import is_setting, state_names
from shardviz.checkpoint.records import DamagedFileError, refuse_cut
from shardviz.errors import DumpError, ShardvizError
from shardviz.explain.checkpoints.conversion import LostInFloat16, OverflowInFloat16
from shardviz.relate.casts import is_narrower
from shardviz.text import counted, listed, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from shardviz.checkpoint.comparing.pairs import Pair, Pairs, Side
    from shardviz.checkpoint.maps.language import Rule
    from shardviz.checkpoint.maps.mapped_tensors import Node
    from shardviz.checkpoint.records import Checkpoint, Tensor

GROUP_LISTS = ("params", "param_names")
"""The lists of an optimizer's group that have an entry for each of its parameters."""

LONGEST = 60
"""Characters of a value that are shown."""


PIECE = "/shard_"
"""Megatron saves objects in pieces, whose names have their number: another mesh has other ones."""


def compare_objects(before: Checkpoint, after: Checkpoint, *, renamed: bool) -> tuple[list[Outcome], list[str]]:
    """Return what became of objects that differ, and notes on those that are not compared.

    Args:
        renamed: Whether names of the first stand for others of the second: then an object may have another name, too.
    """
    shared_names = [name for name in _object_names(before) if name in _object_names(after)]
    outcomes = [outcome for name in shared_names if (outcome := _compared_object(name, before, after)) is not None]
    notes: list[str] = []
    for at, (checkpoint, counterpart) in enumerate(((before, after), (after, before))):
        lone = [name for name in _object_names(checkpoint) if name not in _object_names(counterpart)]
        lost = [] if renamed or not shared_names else list(_lost_objects(lone, counterpart))
        side = ("first", "second")[at]
        outcomes += [
            Outcome(name, "", "added" if at else "missing", f"only the {side} has it, an object") for name in lost
        ]
        unnamed = [name for name in lone if name not in lost]
        if unnamed:
            some = listed(map(printable, unnamed))
            notes.append(f"not compared: {counted(len(unnamed), 'object')} that only the {side} has, such as {some}")
    if files := list(dict.fromkeys([*before.unread, *after.unread])):
        some = listed(map(printable, files))
        notes.append(f"not compared: files next to the weights ({some}): {BY_ITSELF}")
    return outcomes, notes


def _object_names(checkpoint: Checkpoint) -> dict[str, None]:
    return dict.fromkeys([*checkpoint.objects, *checkpoint.values])


def _lost_objects(names: Collection[str], second: Checkpoint) -> Iterator[str]:
    """Yield the objects that the second checkpoint lacks: no pieces; settings only with states."""
    has_states = bool(state_names(second))
    for name in names:
        if PIECE not in name and (has_states or not is_setting(name)):
            yield name


def _compared_object(name: str, before: Checkpoint, after: Checkpoint) -> Outcome | None:
    """Return what became of an object that both have; None if it is the same."""
    if _bytes_of(before, name) == _bytes_of(after, name) is not None:
        return None
    outcome = Outcome(name, name, "other")
    try:
        old, new = _value_of(before, name), _value_of(after, name)
    except DamagedFileError as error:
        return outcome.failed(error)
    except DumpError as error:
        return outcome.became("not-compared", f"an object whose bytes differ: {error.message}")
    if _has_types(old) or _has_types(new):
        differs = ", whose bytes differ" if name in before.objects and name in after.objects else ""
        return outcome.became("not-compared", f"an object with more than plain values{differs}")
    if old == new or repr(old) == repr(new):
        return None
    if _with_sorted_names(name, old, before) == _with_sorted_names(name, new, after):
        return None
    return outcome.became("other", f"{_short_text(old)} became {_short_text(new)}")


def _with_sorted_names(name: str, value: Any, checkpoint: Checkpoint) -> Any:
    """Return an object whose lists of an optimizer group's parameters are sorted, if they have names.

    A state that has its parameter's name belongs to it at every place of the list. Numbers count places.
    """
    head, _, key = name.rpartition(".")
    if key not in GROUP_LISTS or not is_setting(name):
        return _with_sorted_groups(value)
    params = f"{head}.params"
    has_params = params in checkpoint.values or params in checkpoint.objects
    group = {"params": _value_of(checkpoint, params) if has_params else (), key: value}
    return _with_sorted_groups(group)[key]


def _with_sorted_groups(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_with_sorted_groups, value))
    if type(value) is not dict:
        return value
    is_named = _are_names(value.get("params"))
    return {
        key: sorted(item) if is_named and key in GROUP_LISTS and _are_names(item) else _with_sorted_groups(item)
        for key, item in value.items()
    }


def _are_names(value: Any) -> bool:
    return type(value) in (list, tuple) and bool(value) and all(type(name) is str for name in value)


def _bytes_of(checkpoint: Checkpoint, name: str) -> bytes | None:
    place = checkpoint.objects.get(name)
    try:
        if place is None:
            return None
        with (checkpoint.folder / place.file).open("rb") as file:
            file.seek(place.start)
            return file.read(place.size)
    except OSError:
        return None


def _value_of(checkpoint: Checkpoint, name: str) -> Any:
    if name in checkpoint.values:
        return checkpoint.values[name]
    place = checkpoint.objects[name]
    refuse_cut(checkpoint.folder, place, name)
    return read_object(checkpoint.folder / place.file, place.start, place.size, name)


def _has_types(value: Any) -> bool:
    """Whether an object has more than numbers, words, lists and dicts."""
    if type(value) in (list, tuple):
        return any(map(_has_types, value))
    if type(value) is dict:
        return any(_has_types(one) for pair in value.items() for one in pair)
    return type(value) not in (int, float, str, bool, bytes, type(None))


def _short_text(value: Any) -> str:
    text = printable(repr(value))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


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
