"""A fit: a cause in the catalogue that fits everything that the ranks hold of a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardviz.explain.placement.order import Disorder
    from shardviz.layout.layout import Layout


@dataclass(frozen=True, slots=True)
class Fit:
    """One cause that fits.

    Attributes:
        cause: What happened to the tensor, and its fix.
        sentence: What it means here, with the numbers in it; empty if the cause says it all.
        held: Where the elements are: in the notation if it has a word for it, in words otherwise.
        layout: The held layout, if the notation has one.
        details: Clauses that follow the sentence.
    """

    cause: Disorder
    sentence: str
    held: str
    layout: Layout | None = None
    details: tuple[str, ...] = ()

    @property
    def clause(self) -> str:
        """How a finding's sentence ends that has this cause."""
        return f": {self.sentence}" if self.sentence else ""
