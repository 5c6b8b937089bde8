"""A tensor that values are compared with, wherever they come from: stored, made of others, or filled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from shardviz.relate.values import part_of

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


@dataclass(frozen=True)
class Held:
    """Values in memory.

    Attributes:
        name: What they are called.
        dtype: Their element type.
        bits: They as unsigned integers.
    """

    name: str
    dtype: str
    bits: NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Their shape."""
        return tuple(self.bits.shape)

    def read(self, region: Region) -> NDArray[Any]:
        """Return the values of a part, in the region's order."""
        return part_of(self.bits, region)
