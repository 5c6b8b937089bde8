"""Two sides that call the same functions from different lines: the sharded code was written anew.

A loss over a split vocabulary has lines of its own, and none of them is the unsharded model's. Followed backwards from
a wrong result, both sides still call the same functions, with one operand that differs. Where they part, the rank may
have what that operand lacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.step.lines.calls import ADDITIONS
from shardviz.check.step.lines.fault import Fault, at
from shardviz.check.step.lines.operands import NEAR, PRODUCTS, CallsOfRank
from shardviz.explain.step.lines import LACKS, OtherOperand
from shardviz.layout.layout import placements_of
from shardviz.relate.values import error_of, part_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardviz.check.step.lines.states import States
    from shardviz.dump.records.trace import FrameRecord, LineRecord


def parallel_fault(states: States) -> Fault | None:
    """Return the line that reads a tensor without a term or factor of the unsharded model's; None without proof."""
    lines = states.lines
    for value in (value for value, _ in lines.returned):
        if states.placed(value).is_wrong and value in lines.wanted:
            sides = [_Sides(states, rank) for rank, _ in value]
            of_ranks = [set(side.lacking(at, lines.wanted[value])) for side, (_, at) in zip(sides, value, strict=True)]
            if shared := set.intersection(*of_ranks):
                line, cause = min(shared, key=lambda each: LACKS.index(each[1].lack))
                function = cause.function
                sentence = (
                    f"{at(line)} is the first wrong line: what {function} reads there, the unsharded model's "
                    f"{function} reads with {cause.source} as a further {cause.lack}"
                )
                return Fault(line, function, sentence, cause)
    return None


class _Sides:
    """One rank's calls, and the unsharded model's."""

    def __init__(self, states: States, rank: int) -> None:
        self._states, self._rank = states, rank
        self._calls = CallsOfRank(states, rank)
        self._whole_maker = {made: line for line in reversed(states.lines.unsharded.lines) for made in line.outputs}

    def lacking(self, number: int, wanted: int) -> Iterator[tuple[FrameRecord, OtherOperand]]:
        """Yield what the last operand lacks that differs on the way back from a result, with the line that reads it."""
        reader, seen = None, set[int]()
        while number not in seen:
            seen.add(number)
            line, whole = self._calls.maker.get(number), self._whole_maker.get(wanted)
            unlike = self._unlike(line, whole) if line is not None and whole is not None else []
            if len(unlike) != 1:
                break
            (number, wanted), reader = unlike[0], line
        held, due = self._calls.array(number), self._states.whole(wanted)
        if reader is None or held is None or due is None or held.shape != due.shape:
            return
        frame = reader.frames[reader.innermost]
        for lack, source in self._calls.lacks(held, due, {number}, min(reader.outputs)):
            if lack in ("term", "factor"):  # what was right before an operand is no proof that the reader is at fault
                yield frame, OtherOperand(frame.place, reader.function, lack, source)

    def _unlike(self, line: LineRecord, whole: LineRecord) -> list[tuple[int, int]]:
        """Return the operands of a function that differ from those of the unsharded model's call of it."""
        if line.function != whole.function or len(line.inputs) != len(whole.inputs) or line.numbers != whole.numbers:
            return []
        is_either_way = line.function in (*ADDITIONS, *PRODUCTS)
        orders = [whole.inputs, whole.inputs[::-1]] if is_either_way else [whole.inputs]
        return min((self._differing(line.inputs, inputs) for inputs in orders), key=len)

    def _differing(self, numbers: Sequence[int], wholes: Sequence[int]) -> list[tuple[int, int]]:
        return [pair for pair in zip(numbers, wholes, strict=True) if not self._is_equal(*pair)]

    def _is_equal(self, number: int, whole: int) -> bool:
        held, expected = self._calls.array(number), self._states.whole(whole)
        if held is None or expected is None or held.ndim != expected.ndim:
            return False
        regions = placements_of(expected.shape, held.shape, self._states.mesh, self._rank)
        return any(error_of(held, part_of(expected, region)) <= NEAR for _, region in regions)
