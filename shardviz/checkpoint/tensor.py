"""A tensor that values are compared with, wherever they come from: stored, made of others, or filled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardviz.layout.region import Region


class Entry(Protocol):
    """One tensor whose values are known: stored in a checkpoint, made of what is, or what a stamp fills."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> str:
        """Its dtype, by torch's name."""

    @property
    def bits(self) -> NDArray[Any]:
        """Its values as unsigned integers."""

    def read(self, region: Region) -> NDArray[Any]:
        """Return the values of a part, in the region's order."""


class Tensor(Entry, Protocol):
    """One that has a name."""

    @property
    def name(self) -> str:
        """Its name."""
