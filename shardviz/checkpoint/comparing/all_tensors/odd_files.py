"""Checkpoints of other steps in the same folder, and tensors that differ just where one file has them.

That file is of another save, for training changes all parts.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from shardviz.checkpoint.comparing.equality import equal, is_same, narrower
from shardviz.checkpoint.comparing.outcome import NOT_COMPARED, SIDES
from shardviz.checkpoint.maps.mapped_tensors import MappedTensor, Op
from shardviz.checkpoint.open import is_checkpoint, open_checkpoint
from shardviz.checkpoint.records import StoredTensor
from shardviz.errors import DumpError
from shardviz.explain.checkpoints.files import FileOfAnotherSave, FileOnEitherSide, OddFile, WholeFileDiffers
from shardviz.relate.casts import cast
from shardviz.relate.values import is_alike
from shardviz.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from shardviz.checkpoint.comparing.outcome import Outcome, Outcomes
    from shardviz.checkpoint.comparing.pairs import Pair
    from shardviz.checkpoint.maps.mapped_tensors import Node
    from shardviz.checkpoint.records import Checkpoint, Tensor
    from shardviz.layout.region import Region

MAX_SIBLINGS = 8
"""Checkpoints of other steps that are looked at, the nearest ones first."""

LEVELS = 2
"""Folders above a checkpoint whose names may have its step: `checkpoint-100/model`."""

MAX_ENTRIES = 4096

_STEP = re.compile(
    r"((?:.*(?:step|checkpoint|ckpt|iter|iteration|epoch)[-_=.]?)?)([0-9]{1,18})([^0-9]*)", re.IGNORECASE
)
"""A name that counts steps: `checkpoint-100`, `iter_0001000`, `1000`; not `exp2`, which is another run."""


def siblings(path: Path) -> list[Path]:
    """Return the checkpoints of other steps: only the last number of a path's name differs.

    Example:
        >>> siblings(Path("runs/checkpoint-200"))  # doctest: +SKIP
        [PosixPath('runs/checkpoint-100'), PosixPath('runs/checkpoint-300')]
    """
    path = path.absolute()
    for folder in (path, *path.parents)[:LEVELS]:
        if (step := _STEP.fullmatch(folder.name)) is None:
            continue
        number, rest = int(step[2]), path.relative_to(folder)
        near = sorted(_other_steps(folder, step), key=lambda pair: abs(pair[0] - number))
        there = [other / rest for _, other in near if is_checkpoint(other / rest)]
        if there:
            return there[:MAX_SIBLINGS]
    return []


def _other_steps(folder: Path, step: re.Match[str]) -> Iterator[tuple[int, Path]]:
    try:
        names = [one.name for _, one in zip(range(MAX_ENTRIES), folder.parent.iterdir(), strict=False)]
    except OSError:
        return
    for name in names:
        other = _STEP.fullmatch(name)
        if other is not None and name != folder.name and (other[1], other[3]) == (step[1], step[3]):
            yield int(other[2]), folder.parent / name


def open_steps(paths: Iterable[Path], but: Iterable[Path]) -> list[Checkpoint]:
    """Open what can be opened of some checkpoints, but for those that are compared."""
    compared = {path.absolute() for path in but}
    checkpoints = []
    for path in paths:
        if path.absolute() not in compared:
            try:
                checkpoints.append(open_checkpoint(path))
            except (DumpError, OSError):  # of another step; nothing depends on it
                continue
    return checkpoints


def number_of(path: Path, reference: Path) -> int | None:
    """Return a checkpoint's step, the number that differs from a reference path, or None.

    Example:
        >>> from pathlib import Path
        >>> number_of(Path("runs/checkpoint-100/model"), reference=Path("runs/checkpoint-200/model"))
        100
    """
    path, reference = path.absolute(), reference.absolute()
    for folder, other in islice(zip((path, *path.parents), (reference, *reference.parents), strict=False), LEVELS):
        steps = [_STEP.fullmatch(one.name) for one in (folder, other)]
        if steps[0] is not None and steps[1] is not None:
            is_series = folder.parent == other.parent and path.relative_to(folder) == reference.relative_to(other)
            return int(steps[0][2]) if is_series and steps[0].group(1, 3) == steps[1].group(1, 3) else None
    return None


def steps_with(
    pair: Pair, of_first: Iterable[Checkpoint], of_second: Iterable[Checkpoint]
) -> tuple[int, tuple[Checkpoint, ...]] | None:
    """Return which side of a pair (0 or 1) has other steps' values, and those checkpoints.

    Args:
        of_first: Checkpoints of other steps with the first one's names.
        of_second: And with the second one's.
    """
    first, second = pair.both
    if is_alike(first.bits) or is_alike(second.bits):
        return None
    for which, own, held, steps in ((1, first, second, of_first), (0, second, first, of_second)):
        found = tuple(step for step in steps if has_values_of(step, own, held))
        if found:
            return which, found
    return None


def has_values_of(step: Checkpoint, tensor: Tensor, held: Tensor) -> bool:
    """Whether another step has some values under the name of a tensor."""
    there = tensor_in(step, tensor)
    return there is not None and is_same(there, held)


def tensor_in(step: Checkpoint, tensor: Tensor) -> Tensor | None:
    """Return the same tensor of another step; None if that lacks it or has another shape."""
    if not isinstance(tensor, MappedTensor):
        found = step.tensors.get(tensor.name)
        return found if found is not None and found.shape == tensor.shape else None
    node = _node_in(step, tensor.node)
    return replace(tensor, node=node) if isinstance(node, Op) else None


def _node_in(step: Checkpoint, node: Node) -> Node | None:
    if not isinstance(node, Op):
        return tensor_in(step, node)
    parts = [_node_in(step, part) for part in node.parts]
    return (
        None
        if any(part is None for part in parts)
        else replace(node, parts=tuple(part for part in parts if part is not None))
    )


FEWEST = 2
"""Tensors that one file cuts into equal and different parts: a single one may be an embedding with unused rows."""

SAME = ("equal", "tied")


def with_odd_file(outcomes: Outcomes, others: tuple[Sequence[Checkpoint], Sequence[Checkpoint]]) -> Outcomes:
    """Say that tensors differ in one file alone, and the step of that file.

    Args:
        others: Checkpoints of other steps, with the first's names and with the second's.
    """
    compared = [(outcome, pair) for outcome, pair in outcomes if outcome.verdict not in NOT_COMPARED]
    sides = [odd_file(at, (_files(outcome, pair, at) for outcome, pair in compared)) for at in (1, 0)]
    odd = [side for side in sides if side is not None]
    if not odd:
        return outcomes
    return [
        (_name_odd_file(outcome, pair, odd, others) if outcome.is_open else outcome, pair) for outcome, pair in outcomes
    ]


def odd_file(at: int, parts: Iterable[tuple[set[str], set[str]]]) -> OddFile | None:
    """Return the only file in which tensors differ, or the only one in which none does.

    Args:
        at: The side.
        parts: For each tensor the files that have equal parts of it, and those that have different ones.
    """
    same: Counter[str] = Counter()
    odd: Counter[str] = Counter()
    cut: Counter[str] = Counter()
    for equal_in, odd_in in parts:
        same.update(equal_in)
        odd.update(odd_in)
        cut.update({*equal_in, *odd_in} if equal_in and odd_in else ())
    files = {*same, *odd}
    name = _only_odd_file(same, odd)
    if name is None or cut[name] < FEWEST:
        return None
    return OddFile(at, name, name in odd, same[name] + odd[name], odd[name], len(files) - 1)


def _only_odd_file(same: Counter[str], odd: Counter[str]) -> str | None:
    """Return the one file with all differences, or with none, unlike the others."""
    if len(odd) == 1:
        name = next(iter(odd))
        return name if odd[name] > same[name] else None
    without = [name for name in same if name not in odd]
    return without[0] if len(without) == 1 and all(odd[name] > same[name] for name in odd) else None


def _files(outcome: Outcome, pair: Pair, at: int) -> tuple[set[str], set[str]]:
    """Return the files that have equal parts of a tensor, and those that have different ones."""
    tensor, opposite = pair.sides[at], pair.sides[1 - at]
    if not isinstance(tensor, StoredTensor) or opposite is None:
        return set(), set()
    if outcome.verdict in SAME:
        return set(tensor.files), set()
    return files_of(tensor, opposite)


def files_of(tensor: StoredTensor, opposite: Tensor) -> tuple[set[str], set[str]]:
    """Return the files with parts equal to a second tensor's, and those with different parts."""
    if tensor.shape != opposite.shape:
        return set(), set(tensor.files)
    parts: dict[bool, set[str]] = {True: set(), False: set()}
    for chunk in tensor.chunks:
        if chunk.place is not None:
            parts[_is_same(tensor, opposite, chunk.region)].add(chunk.place.file)
    return parts[True], parts[False]


def _is_same(tensor: Tensor, opposite: Tensor, region: Region) -> bool:
    """Whether two tensors have the same values in one part, after a cast if their types differ."""
    narrow = narrower(tensor.dtype, opposite.dtype)
    try:
        tensor_bits, opposite_bits = (cast(one.read(region), one.dtype, narrow) for one in (tensor, opposite))
    except DumpError:
        return False
    return tensor_bits is not None and opposite_bits is not None and equal(tensor_bits, opposite_bits)


def _name_odd_file(
    outcome: Outcome, pair: Pair, sides: list[OddFile], others: Sequence[Sequence[Checkpoint]]
) -> Outcome:
    """Name the odd file; if both sides have one, the step with its values decides."""
    for odd in sides:
        step = next((step for at in (0, 1) for step in others[at] if _is_from(step, pair, odd, at)), None)
        if odd.differs and step is not None:
            side, opposite = SIDES[odd.at], SIDES[1 - odd.at]
            why = f"{outcome.why}; the {side} has there what {printable(str(step.path))} has"
            return outcome.became("stale", why, FileOfAnotherSave(odd, side, opposite, printable(step.path.name)))
    odd, names = sides[0], (SIDES[sides[0].at], SIDES[1 - sides[0].at])
    if not odd.differs or len(sides) == 1 or not sides[1].differs:
        return outcome.became("other", outcome.why, FileOfAnotherSave(odd, *names))
    return outcome.became("other", outcome.why, FileOnEitherSide(odd, *names, sides[1].file))


def _is_from(step: Checkpoint, pair: Pair, odd: OddFile, at: int) -> bool:
    """Whether a different step has the odd file's values of a tensor."""
    held, named = pair.sides[odd.at], pair.sides[at]
    there = None if named is None else tensor_in(step, named)
    if there is None or not isinstance(held, StoredTensor) or there.shape != held.shape:
        return False
    regions = [chunk.region for chunk in held.chunks if chunk.place is not None and chunk.place.file == odd.name]
    return bool(regions) and all(_is_same(held, there, region) for region in regions)


def with_whole_file(outcomes: Outcomes) -> Outcomes:
    """Say of tensors that differ that they are all those of one file."""
    for at in (1, 0):
        name, small = _whole_file(outcomes, at)
        if name:
            whole = WholeFileDiffers(printable(name), SIDES[at], small)
            return [(_of_whole_file(outcome, whole), pair) for outcome, pair in outcomes]
    return outcomes


def _whole_file(outcomes: Outcomes, at: int) -> tuple[str, int]:
    """Return the one file with all tensors that differ, and how many in it don't; else empty.

    Equal scales and biases in it say nothing: they may be all ones or zeros in every save.
    """
    same: Counter[str] = Counter()
    small: Counter[str] = Counter()
    odd: Counter[str] = Counter()
    for outcome, pair in outcomes:
        tensor = pair.sides[at]
        if outcome.verdict in NOT_COMPARED or not isinstance(tensor, StoredTensor):
            continue
        if len(tensor.files) != 1 or not (_differs(outcome) or outcome.verdict in (*SAME, "cast")):
            return "", 0
        counts = odd if _differs(outcome) else same if len(tensor.shape) > 1 else small
        counts[tensor.files[0]] += 1
    name = next(iter(odd), "")
    is_whole = len(odd) == 1 and odd[name] >= FEWEST and not same[name] and same.total() >= FEWEST
    return (name, small[name]) if is_whole else ("", 0)


def _differs(outcome: Outcome) -> bool:
    return outcome.is_open or outcome.verdict == "stale"


def _of_whole_file(outcome: Outcome, whole: WholeFileDiffers) -> Outcome:
    if not _differs(outcome):
        return outcome
    return outcome.became(outcome.verdict, outcome.why, replace(whole, rest=outcome.explanation or whole.rest))
