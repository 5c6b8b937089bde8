"""One labelled box as SVG, of a map of blocks or of a mesh: a colour, the ranks in it, a mark where it differs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.picture.markup import element, words

if TYPE_CHECKING:
    from collections.abc import Sequence

CHAR = 7.3
"""Pixels of a character at the size that boxes are labelled in."""

MOST_CLASSES = 8
"""Ranks that the element of a box names at most; a page lights up everything that these ranks hold."""


@dataclass(frozen=True, slots=True)
class Place:
    """The pixels that a box takes, with the gap around it."""

    left: int
    top: int
    width: int
    height: int


def tile(place: Place, label: str, tooltip: str, *, colour: object, ranks: Sequence[int], differs: bool) -> str:
    """Draw a box.

    Args:
        place: Where it is.
        label: What is written in it, with the sign of what is wrong where it differs.
        tooltip: What is shown when the mouse is over it.
        colour: The name of its colour in the style sheet.
        ranks: The ranks that it is about.
        differs: Whether it is marked as not as claimed.
    """
    box = {"x": place.left + 1, "y": place.top + 1, "width": place.width - 2, "height": place.height - 2, "rx": 2}
    return element(
        "g",
        element("title", words(tooltip)),
        element("rect", **box, class_=f"sv-b sv-f{colour}"),
        element("rect", **box, class_="sv-hatch") if differs else "",
        element(
            "text",
            words(label),
            x=place.left + place.width // 2,
            y=place.top + place.height // 2 + 4,
            class_=f"sv-l sv-t{colour}" + (" sv-d" if differs else ""),
        ),
        class_=classes_of(ranks),
    )


def classes_of(ranks: Sequence[int]) -> str | None:
    """Return the classes that name a box's ranks; None where they are too many."""
    return " ".join(f"sv-r{rank}" for rank in ranks) or None if len(ranks) <= MOST_CLASSES else None
