"""What a stamped copy has: each tensor's fill, or why it keeps its values.

Weights get a fill of their own name. Integers wider than a byte, bytes and flags are kept: they are positions, counters
and packed or encoded data, which a loader reads before anything is computed. Tied weights that a checkpoint stores
twice get one fill, since a loader that ties them again keeps one of the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardviz.errors import DumpError
from shardviz.layout.dtypes import itemsize
from shardviz.relate.values import is_alike
from shardviz.stamping.fill import Fill, can_fill
from shardviz.text import bytes_text, counted, listed, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardviz.reference.files import Entry


SAMPLE = 4096
"""Elements by which tensors that may be equal are found, before all are compared."""

MOST_LISTED = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """What a stamped copy has.

    Attributes:
        fills: The fills by name.
        kept: The names of tensors that keep their values.
        tied: The other names whose fill is another tensor's, each with that tensor.
        nbytes: Bytes of all tensors.
    """

    fills: Mapping[str, Fill]
    kept: tuple[str, ...]
    tied: Mapping[str, str]
    nbytes: int

    def summary(self) -> list[str]:
        """Say in lines what is stamped and what is not."""
        lines = [f"{counted(len(self.fills), 'tensor')} stamped, {bytes_text(self.nbytes)}"]
        if self.tied:
            pairs = (f"{printable(name)} as {printable(other)}" for name, other in self.tied.items())
            lines.append(f"equal in the original, and so in the copy: {listed(pairs, MOST_LISTED)}")
        if self.kept:
            names = listed(map(printable, self.kept), MOST_LISTED)
            lines.append(f"{counted(len(self.kept), 'tensor')} kept: integers and flags may be indices: {names}")
        return lines


def is_weight(dtype: str) -> bool:
    """Whether tensors of a dtype are stamped."""
    return can_fill(dtype) and ("float" in dtype or dtype == "int8")


def plan(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], tied: Mapping[str, str], where: str, salt: str = ""
) -> Plan:
    """Return what the stamped copy of tensors has.

    Args:
        tensors: Dtype and shape by name.
        tied: Names whose content is another one's, each with that name.
        where: What they are of, for messages.
        salt: As for `Fill`.

    Raises:
        DumpError: None of them can be stamped.
    """
    fills = {
        name: Fill(tied.get(name, name), shape, dtype, salt)
        for name, (dtype, shape) in tensors.items()
        if is_weight(dtype)
    }
    if not fills:
        types = listed(sorted({dtype for dtype, _ in tensors.values()}), MOST_LISTED)
        what = f"only {types}, which are not stamped" if tensors else "no tensors"
        raise DumpError(f"{where} has {what}", "give a checkpoint or a model that has weights")
    nbytes = sum(int(math.prod(shape)) * max(1, itemsize(dtype)) for dtype, shape in tensors.values())
    kept = tuple(name for name in tensors if name not in fills)
    return Plan(fills, kept, {name: other for name, other in tied.items() if name in fills}, nbytes)


def equal_ones(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Return the names of a checkpoint whose content is that of a tensor before them, each with that name.

    Tensors of one value throughout are equal by chance, as norms of ones are: they are not among them.
    """
    alike: dict[object, list[str]] = {}
    for name, entry in entries.items():
        if is_weight(entry.dtype) and 0 not in entry.shape:
            sample = entry.bits.reshape(-1)[:SAMPLE]
            if len(sample) > 1 and not is_alike(sample):
                alike.setdefault((entry.dtype, entry.shape, sample.tobytes()), []).append(name)
    found: dict[str, str] = {}
    for names in alike.values():
        found.update(_equal_among(names, entries))
    return found


def _equal_among(names: Iterable[str], entries: Mapping[str, Entry]) -> dict[str, str]:
    firsts: list[str] = []
    found: dict[str, str] = {}
    for name in names:
        same = next((first for first in firsts if np.array_equal(entries[first].bits, entries[name].bits)), None)
        if same is None:
            firsts.append(name)
        else:
            found[name] = same
    return found
