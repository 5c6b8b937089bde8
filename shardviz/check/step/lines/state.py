"""What ranks have of a tensor, in relation to the unsharded model's, and how that is said."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from shardviz.layout.notation import write
from shardviz.relate.relations import Chain, Filled, Located, Pending, Permuted, Reassigned, Rounded, Scaled
from shardviz.relate.tolerance import EXACT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardviz.layout.layout import Layout
    from shardviz.layout.mesh import Mesh

Moved = Literal["", "order", "rank"]
MOVED: Mapping[Moved, str] = {
    "": "a rearranged or shifted part of",
    "order": "a reordered part of",
    "rank": "a different rank's part of",
}
Kind = Literal["right", "terms", "other", "none", "missing", "unknown"]

MAX_RATIO = 512
"""A number that is a multiple of another by a ratio of larger numbers is another number."""


@dataclass(frozen=True)
class State:
    """What ranks have of a tensor.

    Attributes:
        kind: `right`, the parts of a layout; `terms` of a sum over an axis; `other`, something was done to the values;
            `none`, nothing explains them; `missing`, no gradient came; `unknown`, there is nothing to compare with.
        layout: The layout of `right` and `terms`; None if they are of a buffer that several tensors were joined in.
        axes: The axes of the sum.
        factor: What the values are multiplied by, if that is all that is `other` about them.
        op: The reduction that is pending, if it is not a sum: `avg` for the terms of a mean.
        moved: Where numbers stand, if that is all that is `other` about them: in another `order`, or on another `rank`.
    """

    kind: Kind
    layout: Layout | None = None
    axes: tuple[str, ...] = ()
    factor: float = 1.0
    op: str = ""
    moved: Moved = ""

    @property
    def is_wrong(self) -> bool:
        """Whether values are there and are not the unsharded model's."""
        return self.kind in ("other", "none", "missing")

    @property
    def is_known(self) -> bool:
        """Whether they are the unsharded model's, or terms of it."""
        return self.kind in ("right", "terms")

    @property
    def split_layout(self) -> str:
        """The layout of which a rank has its part; empty if it has the whole, or something else."""
        layout = self.layout if self.kind == "right" else None
        return write(layout) if layout is not None and layout.split_axes else ""

    @property
    def text(self) -> str:
        """What a rank has, in a few words."""
        over = f" over {', '.join(self.axes)}" if self.axes else ""
        if self.kind == "right" and self.layout is None:
            return "its parts of several tensors"
        if self.kind == "right":
            return f"its part of {self.split_layout}" if self.split_layout else "the whole"
        if self.kind == "terms":
            return f"one term of a {'mean' if self.op == 'avg' else 'sum'}{over}"
        if self.kind == "other":
            if self.op:
                return f"one term of a {'mean' if self.op == 'avg' else self.op}{over}"
            what = f"{self.factor:.5g} times" if self.factor != 1 else MOVED[self.moved]
            return f"{what} the unsharded model's result{f', in terms of a sum{over}' if over else ''}"
        if self.kind == "none" and self.axes:
            return f"one term of a sum{over}; the unsharded model has the sum"
        words = {"none": "no part of the unsharded model's result", "missing": "no gradient", "unknown": "not compared"}
        return words[self.kind]


UNKNOWN = State("unknown")


def words_of(states: Sequence[State]) -> str:
    """Say what a call is given, identical states once: `the whole and its parts of [12, 8/tp] and [6, 8/tp]`."""
    layouts = dict.fromkeys(state.split_layout for state in states if state.split_layout)
    parts = [f"its part{'s' if len(layouts) > 1 else ''} of {' and '.join(layouts)}"] if layouts else []
    texts = [*dict.fromkeys(state.text for state in states if not state.split_layout), *parts]
    return f"{', '.join(texts[:-1])} and {texts[-1]}" if texts[1:] else "".join(texts)


def state_of(chain: Chain | None, mesh: Mesh, mean_axes: frozenset[str], *, is_number: bool) -> State:
    """Return what ranks have by a chain; the terms of a mean are right along axes that split the batch."""
    if chain is None:
        return State("none")
    layout = next((link.layout for link in chain if isinstance(link, Located)), None)
    axes = tuple(link.axis for link in chain if isinstance(link, Pending))
    links = [link for link in chain if not isinstance(link, Located | Pending | Rounded)]
    if any(isinstance(link, Filled) for link in links):
        return State("none")
    ops = [link.op for link in chain if isinstance(link, Pending) and link.op != "sum"]
    if layout is None or links:
        only = links[0] if len(links) == 1 and layout is not None else None
        factor = only.factor if isinstance(only, Scaled) else 1.0
        is_mean = bool(axes) and not ops and math.isclose(factor, mesh.size_over(axes), rel_tol=EXACT)
        if is_mean and mean_axes >= set(axes):
            return State("terms", layout, axes, op="avg")
        if is_number and Fraction(factor).limit_denominator(MAX_RATIO) != Fraction(factor).limit_denominator(1 << 20):
            return State("none")  # any number is some multiple of another
        moved: Moved = "order" if isinstance(only, Permuted) else "rank" if isinstance(only, Reassigned) else ""
        return State("other", layout, axes, factor, moved=moved)
    if ops:
        return State("other", layout, axes, op=ops[0])
    return State("terms" if axes else "right", layout, axes)
