"""What a checkpoint says of a job's tensor where a map makes the checkpoint's tensors of the job's: put back into it.

`qkv = cat(q, k, v)` gives q its part of qkv; `q = split(qkv, 3, 0)` gives qkv a part of itself. Nothing is read before
it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.checkpoint.beside.job import Live
from shardviz.checkpoint.maps.functions import FUNCTIONS
from shardviz.checkpoint.maps.made import Op, leaves, parts_of
from shardviz.errors import DumpError
from shardviz.layout.dtypes import itemsize
from shardviz.relate.values import part_of
from shardviz.text import listed, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from shardviz.checkpoint.maps.made import Made, Node
    from shardviz.checkpoint.tensor import Tensor
    from shardviz.layout.region import Region

MAX_NAMES = 3


@dataclass(frozen=True, eq=False)
class Given:
    """A job's tensor as a checkpoint gives it, by tensors that are made of it.

    Attributes:
        live: The job's tensor.
        sources: How each of the checkpoint's tensors is made of it and others, and the tensor.
    """

    live: Live
    sources: tuple[tuple[Made, Tensor], ...]

    @property
    def name(self) -> str:
        """The checkpoint's tensors that have it."""
        return listed((printable(one.name) for _, one in self.sources), MAX_NAMES)

    @property
    def shape(self) -> tuple[int, ...]:
        """The job's shape."""
        return self.live.shape

    @property
    def dtype(self) -> str:
        """Its dtype in the checkpoint.

        Raises:
            DumpError: There are several.
        """
        dtypes = sorted({one.dtype for _, one in self.sources})
        if len(dtypes) > 1:
            raise DumpError(f"{self.name} are {' and '.join(dtypes)}", "save its parts in one type")
        return dtypes[0]

    @property
    def bits(self) -> NDArray[Any]:
        """Its values as unsigned integers.

        Raises:
            DumpError: The map does not give all of it, or a tensor has another shape.
        """
        whole = np.zeros(self.shape, f"<u{itemsize(self.dtype)}")
        seen = np.zeros(self.shape, bool)
        for made, tensor in self.sources:
            if made.shape != tensor.shape:
                text = f"{printable(tensor.name)} is {list(tensor.shape)}, and {made.name} makes {list(made.shape)}"
                raise DumpError(text, f"see {made.where}")
            for part, at in _parts_in(made.node, tensor.bits, self.live):
                _target(whole, at)[...] = part
                _target(seen, at)[...] = True
        if not seen.all():
            lost = int(seen.size - seen.sum())
            raise DumpError(
                f"{lost:,} of its {seen.size:,} elements are in no tensor of the checkpoint, as the map says"
            )
        return whole

    def read(self, region: Region) -> NDArray[Any]:
        """Return the values of a part, in the region's order."""
        return part_of(self.bits, region)


def _parts_in(node: Node, bits: NDArray[Any], live: Live) -> Iterator[tuple[NDArray[Any], Node]]:
    """Yield the parts of an array that a node makes and that are of one tensor, each with what it is of that."""
    for part, at in parts_of(node, bits):
        if next(leaves(at)) is live:
            yield part, at


def _target(whole: NDArray[Any], node: Node) -> NDArray[Any]:
    """Return the view of a tensor's array that a node takes of it.

    Raises:
        DumpError: It is not a view: what was joined is taken apart again.
    """
    if not isinstance(node, Op):
        return whole
    taken = FUNCTIONS[node.function].taken
    if taken is None:
        raise DumpError(f"{node} cannot be put back into a tensor of the job", "write the map the other way round")
    return taken(_target(whole, node.parts[0]), node.numbers)


def given_of(made: Iterable[tuple[Made, Tensor]]) -> dict[str, Given]:
    """Return the job's tensors that a checkpoint's are made of, by name.

    Args:
        made: How each of the checkpoint's tensors is made, and the tensor.
    """
    sources: dict[Live, list[tuple[Made, Tensor]]] = {}
    for mapped, stored in made:
        for leaf in dict.fromkeys(leaves(mapped.node)):
            if isinstance(leaf, Live):
                sources.setdefault(leaf, []).append((mapped, stored))
    return {live.name: Given(live, tuple(of_live)) for live, of_live in sources.items()}
