"""Values that went through a narrower element type on their way from a file: float32 weights that bfloat16 could hold.

They are not the file's, bit by bit, but each shows its place all the same.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from shardviz.errors import DumpError
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.lookup.by_reference import cast_bits, claimed_slice
from shardviz.live.capture.stamp import bits_of_tensor, dtype_name
from shardviz.relate.stored import rounding_between
from shardviz.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from numpy.typing import NDArray

    from shardviz.layout.region import Region
    from shardviz.live.capture.locals import Local
    from shardviz.live.run.known.choosing import Candidate
    from shardviz.reference.files import Entry

NARROW = ("bfloat16", "float16")
WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Rounded:
    """A tensor of a file as it is in a narrower element type.

    Attributes:
        entry: The tensor.
        dtype: The narrower type.
    """

    entry: Entry
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.entry.shape

    @property
    def bits(self) -> NDArray[Any]:
        """Its bits as unsigned integers."""
        return cast_bits(self.entry.bits, self.entry.dtype, getattr(torch, self.dtype))

    def read(self, region: Region) -> NDArray[Any]:
        """Return the bits of a part, in the region's order."""
        return cast_bits(self.entry.read(region), self.entry.dtype, getattr(torch, self.dtype))


def rounded_files(of_all: Mapping[str, list[Candidate]], locals_: Iterable[Local]) -> dict[str, tuple[int, str]]:
    """Return the tensors that some rank holds rounded, with the file's place and the type. Every rank calls this.

    Args:
        of_all: What any rank knows of each tensor that no rank holds as it is, the same on all ranks.
        locals_: The tensors of this rank.
    """
    mine: dict[str, tuple[int, str]] = {}
    for local in locals_:
        is_wide = local.values.dtype in WIDE and not local.values.is_meta and local.values.numel()
        for at, one in enumerate(of_all.get(local.name, []) if is_wide else []):
            if one.is_guess and (dtype := _rounding(local, one.entry)):
                mine.setdefault(local.name, (at, dtype))
    return {name: one for of_rank in of_all_ranks(mine) for name, one in of_rank.items()}


def _rounding(local: Local, entry: Entry) -> str:
    """Return the type to which a shard has the values of the slice that it claims rounded; empty for none."""
    try:
        bits = claimed_slice(local, entry)
    except (DumpError, OSError):  # not readable here: the look-up of the tensor says so
        return ""
    dtype = dtype_name(local.values.dtype)
    relation = rounding_between(bits, dtype, bits_of_tensor(local.values), dtype, NARROW) if bits is not None else None
    return relation.dtype if relation is not None else ""


def all_rounded(
    of_all: Mapping[str, list[Candidate]], unknown: Collection[str], found: Mapping[str, tuple[int, str]]
) -> dict[str, list[Candidate]]:
    """Return what is known of each tensor, files rounded for those that no rank holds: a loader rounds all of them.

    Args:
        of_all: What any rank knows of each tensor.
        unknown: The tensors that no rank holds as a file has them.
        found: Those of them that some rank holds rounded.
    """
    dtypes = {of_all[name][at].path: dtype for name, (at, dtype) in found.items()}
    return {
        name: [
            replace(one, entry=Rounded(one.entry, dtypes[one.path])) if name in unknown and one.path in dtypes else one
            for one in some
        ]
        for name, some in of_all.items()
    }


def notes_on_rounding(of_all: Mapping[str, list[Candidate]], found: Mapping[str, tuple[int, str]]) -> list[str]:
    """Return a note on each file whose values are held rounded."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for name, (at, dtype) in found.items():
        counts[of_all[name][at].path.name, dtype] += 1
    return [
        f"whether {counted(count, 'tensor')} of {printable(file)} {'was' if count == 1 else 'were'} to be rounded: the "
        f"model holds what {dtype} can hold of the values, in a wider type"
        for (file, dtype), count in counts.items()
    ]
