"""A step of a model that draws random numbers in training: no other step can be compared, but its copies must agree.

All ranks are seeded alike before it. Ranks along an axis that does not split the batch and that hold copies of an
output or a gradient must have drawn the same numbers for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.check.step.compared import laid_out, ranks_by_part, rounding_of
from shardviz.check.step.words import WHAT, apart_text, claimed_text
from shardviz.check.values.copies import with_copies
from shardviz.explain.step import DifferentMasks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardviz.check.step.compared import Compared
    from shardviz.dump.dump import Dump
    from shardviz.dump.records.base import Moment
    from shardviz.explain.finding import Finding

ROLES = ("output", "scalar", "grad")
"""Causes before what is computed from them."""


def check_training(dump: Dump) -> Iterator[Finding]:
    """Yield the first of output, loss and gradients whose copies differ after a step in training mode."""
    for role in ROLES:
        in_eval = {one.name: one for one in _of_role(dump, role, "step")}
        apart = [
            one
            for one in _of_role(dump, role, "training")
            if not one.incomparable and one.copies_differ_along and _has_equal_copies(in_eval.get(one.name))
        ]
        if apart:
            finding, tensor = _finding(apart[0], len(apart) - 1), dump.find("training", role, apart[0].name)
            yield with_copies(finding, dump, tensor) if tensor is not None else finding
            return


def _has_equal_copies(one: Compared | None) -> bool:
    """Whether copies agreed in `eval()`: else another finding names the cause."""
    return one is not None and not one.incomparable and not one.copies_differ_along


def _of_role(dump: Dump, role: str, moment: Moment) -> Iterator[Compared]:
    rounding = rounding_of(dump)
    for tensor in dump.at(moment):
        for name in tensor.names if tensor.role == role else ():
            reference = dump.find("reference", role, name)
            if reference is not None:
                yield laid_out(dump, tensor, name, dump.values(reference.first, name), rounding)


def _finding(one: Compared, others: int) -> Finding:
    along = " and ".join(one.copies_differ_along)
    groups = ((ranks[0], rank) for ranks in ranks_by_part(one) for rank in ranks[1:])
    low, high, worst = max(one.neighbours_apart(groups), key=lambda pair: pair[2])
    more = f"; so do those of {others} other{'s' * (others > 1)}" if others else ""
    return DifferentMasks(along).finding(
        one.name,
        tuple(sorted(one.values)),
        f"copies of the {WHAT[one.role]} differ along {along} in training mode, which draws random numbers: "
        f"{apart_text(low, high, worst)}; in eval() they are equal{more}",
        claimed=claimed_text(one),
        held=f"different values along {along}",
    )
