"""Numbers and axes as sentences have them."""

from __future__ import annotations

from fractions import Fraction


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
