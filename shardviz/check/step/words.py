"""Numbers and claims of a step, as findings say them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.layout.notation import write

if TYPE_CHECKING:
    from shardviz.check.step.compared import Compared


WHAT = {"grad": "gradient", "output": "output", "scalar": "value"}
"""Roles, as sentences call them."""


def number(value: float) -> str:
    """Return a number in at most five digits that matter."""
    return f"{value:.5g}"


def claimed_text(one: Compared) -> str:
    """Return what is claimed of a tensor, in the notation, with the axes along which copies are equal."""
    return write(one.claimed, equal=True) if one.claimed else ""
