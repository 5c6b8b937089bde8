"""Numbers and axes as sentences have them."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from shardviz.explain.cause import Cause


def number(value: float) -> str:
    """Return a number in at most five digits that matter."""
    return f"{value:.5g}"


def times_text(factor: Fraction | float) -> str:
    """Return a factor as a sentence has it: `2 times`, `1/2 of`, `0.98765 times`."""
    if not isinstance(factor, Fraction):
        return f"{number(factor)} times"
    return f"{factor.numerator} times" if factor.denominator == 1 else f"{factor} of"


def over_axes(template: str, axes: str) -> str:
    """Return a template as it is, or without its axes if there are none."""
    return template if axes else template.replace(" over {axes}", "")


@dataclass(frozen=True)
class SizeOfAxes(Cause, abstract=True):
    """A cause that names axes only if their size is its number: its field `axes` is empty otherwise."""

    @property
    def cause(self) -> str:
        """The cause, without its axes if there are none."""
        return over_axes(self.why, vars(self)["axes"]).format_map(vars(self))

    @property
    def fix(self) -> str:
        """The fix, without its axes if there are none."""
        return over_axes(self.how, vars(self)["axes"]).format_map(vars(self))
