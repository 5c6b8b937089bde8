"""Tensors that a loader merged or renamed: stacked experts, gate and up, fused q, k and v.

A stamped copy shows of each value which tensor it comes from, so that no converter's rules have to be known. What ranks
hold says which tensors are in a merged one, and in which order; that they are whole and side by side, each number of
their names one place further, is what a merge is. Where ranks differ in it, the others are wrong. A converter that has
two of them the wrong way round on all ranks alike cannot be seen from within.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shardviz.checkpoint.maps.mapped_tensors import MappedTensor, leaves
from shardviz.dump.records.tensors import Stamp
from shardviz.errors import DumpError
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.lookup.by_reference import Known, Wanted, cast_bits, is_as_claimed
from shardviz.live.capture.stamp import bits_of_tensor
from shardviz.relate.values import part_of
from shardviz.text import listed, printable, starred

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.dump.records.base import Role
    from shardviz.layout.region import Region
    from shardviz.live.claims.local import Local
    from shardviz.reference.files import Entry, Reference

BLOCKS = 8
"""Places of a shard at which is looked what it is made of."""

BLOCK = 16
"""Lines that are looked at in each place."""

NEIGHBORS = 4
"""Values that are looked up together: two such pieces are not found by chance, and a shard of a bias has two."""

MOST_PARTS = 4
"""Tensors of different names in one: more orders of them are not tried."""


_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Merged:
    """Tensors of a reference side by side.

    Attributes:
        rows: The tensors: a row for each number in their names, in it one for each name.
        dim: The dim of theirs along which those of a row are laid side by side.
        stacked: Whether rows are laid on each other, along a new first dim.
        transposed: Whether each was transposed.
    """

    rows: tuple[tuple[Entry, ...], ...]
    dim: int
    stacked: bool
    transposed: bool

    @property
    def dtype(self) -> str:
        """Their dtype."""
        return self.rows[0][0].dtype

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of them all together."""
        inner = list(_shape(self.rows[0][0], transposed=self.transposed))
        inner[self.dim] = sum(_shape(entry, transposed=self.transposed)[self.dim] for entry in self.rows[0])
        return (len(self.rows), *inner) if self.stacked else tuple(inner)

    @property
    def bits(self) -> NDArray[Any]:
        """Their values as unsigned integers."""
        rows = [
            np.concatenate([source.bits.T if self.transposed else source.bits for source in row], self.dim)
            for row in self.rows
        ]
        return np.stack(rows) if self.stacked else rows[0]

    def read(self, region: Region) -> NDArray[Any]:
        """Return the values of a part, in the region's order."""
        return part_of(self.bits, region)


@dataclass(frozen=True)
class Recipe:
    """What a merged tensor is made of, the same in every layer.

    Attributes:
        parts: The names of its tensors, with `*` for every number.
        transposed: Whether each was transposed.
    """

    parts: tuple[str, ...]
    transposed: bool = False


def with_merged(
    sources_known: Known, reference: Reference, lookups: Mapping[str, Wanted], locals_: Sequence[Local]
) -> Known:
    """Add tensors that a loader merged from a stamped reference's. Every rank calls this."""
    used = {id(entry) for entry in sources_known.entries.values()}
    used |= {
        id(part)
        for entry in sources_known.entries.values()
        if isinstance(entry, MappedTensor)
        for part in leaves(entry.node)
    }
    sources = {name: entry for name, entry in reference.entries.items() if id(entry) not in used}
    locals_by_name = {local.name: local for local in locals_}
    recipes: dict[str, Recipe | None] = {}
    by_name: dict[str, Merged] = {}
    for name, tensor in lookups.items() if sources else ():
        if name in sources_known.entries:
            continue
        family = starred(name)
        if family not in recipes:
            recipes[family] = _recipe(name, tensor.shape, sources, locals_by_name.get(name))
            _print_recipe(family, recipes[family])
        recipe = recipes[family]
        merged = _compose(name, tensor.shape, sources, recipe) if recipe else None
        if merged is not None:
            by_name[name] = merged
    return _join(sources_known, by_name, lookups, sources)


def _join(
    sources_known: Known, by_name: Mapping[str, Merged], lookups: Mapping[str, Wanted], sources: Mapping[str, Entry]
) -> Known:
    stamps = dict(sources_known.stamps)
    for name in by_name:
        role: Role = "buffer" if lookups[name].role == "buffer" else "param"
        first = max((stamp.last for stamp in stamps.values()), default=0) + 1
        stamps[name] = Stamp(name, first, lookups[name].shape, role)
    used = {id(entry) for merged in by_name.values() for row in merged.rows for entry in row}
    before = next((start for name, entry in sources_known.entries.items() if (start := _prefix_of(name, entry))), "")
    unused_names = [name for name, entry in sources.items() if id(entry) not in used]
    unused = [printable(name) for name in unused_names if name.startswith(before)]
    not_checked = [(name, why) for name, why in sources_known.not_checked if name not in by_name]
    if unused:
        what = f"{len(unused)} tensors of the stamped copy, which no tensor of the model is by its name or holds"
        not_checked.append(("", f"{what}: {listed(unused)}"))
    return replace(
        sources_known, stamps=stamps, entries={**sources_known.entries, **by_name}, not_checked=tuple(not_checked)
    )


def _prefix_of(name: str, stored: Entry) -> str:
    """Return the prefix of the model's names in a reference; other prefixes are the optimizer's."""
    known_as = getattr(stored, "name", name)
    return str(known_as.removesuffix(name)) if known_as.endswith(f".{name}") else ""


def _recipe(name: str, shape: tuple[int, ...], sources: Mapping[str, Entry], local: Local | None) -> Recipe | None:
    """Return which of the reference's tensors ranks hold in one tensor; None if none."""
    numbers = _numbers(name)
    near = {
        source_name: entry for source_name, entry in sources.items() if _numbers(source_name)[: len(numbers)] == numbers
    }
    of_all = of_all_ranks(_readable_parts_in(local, near) if local is not None else [])
    parts = list(
        dict.fromkeys(part for parts_of_rank in sorted(of_all, key=len, reverse=True) for part in parts_of_rank)
    )
    if not 0 < len(parts) <= MOST_PARTS:
        return None
    recipes = [Recipe(order, turned) for turned in (False, True) for order in permutations(parts)]
    fitting = [
        (candidate, merged) for candidate in recipes if (merged := _compose(name, shape, near, candidate)) is not None
    ]
    right = of_all_ranks([local is not None and is_as_claimed(local, merged) for _, merged in fitting])
    scores = [sum(column) for column in zip(*right, strict=True)]
    return fitting[scores.index(max(scores))][0] if fitting else None


def _readable_parts_in(local: Local, sources: Mapping[str, Entry]) -> list[str]:
    """Return the parts of a shard; none if this rank cannot read the copy."""
    try:
        return _parts_in(local, sources)
    except (DumpError, OSError):
        return []


def _parts_in(local: Local, sources: Mapping[str, Entry]) -> list[str]:
    """Return the source names, without numbers, of a shard's pieces, in their order."""
    bits = bits_of_tensor(local.values)
    if not bits.size or not bits.ndim:
        return []
    samples = [_sample(bits), *([_sample(bits[0])] if bits.ndim > 2 else [])]
    firsts: dict[str, tuple[int, int]] = {}
    for source_name, stored in sources.items():
        whole = cast_bits(stored.bits, stored.dtype, local.values.dtype)
        lines = whole.reshape(-1, whole.shape[-1] if whole.ndim else 1)
        pieces = np.concatenate([_pieces(lines).ravel(), _pieces(lines.T).ravel()])
        for which, sample in enumerate(samples):
            at = np.flatnonzero(np.isin(_pieces(sample), pieces))
            if len(at) > 1:
                starred_name, place = starred(source_name), (-which, int(at[0]))
                firsts[starred_name] = min(firsts.get(starred_name, place), place)
    return sorted(firsts, key=lambda part: firsts[part])


def _pieces(lines: NDArray[Any]) -> NDArray[np.uint64]:
    """Number every few neighbors of each line: in a stamped copy these are nearly unique."""
    count = max(0, lines.shape[1] - NEIGHBORS + 1)
    numbers = np.zeros((len(lines), count), np.uint64)
    for offset in range(NEIGHBORS):
        numbers = numbers * _FACTOR + lines[:, offset : offset + count]
    return numbers


def _sample(bits: NDArray[Any]) -> NDArray[Any]:
    """Return some blocks of a shard's lines."""
    lines = bits.reshape(-1, bits.shape[-1])
    starts = np.unique(np.linspace(0, max(0, len(lines) - BLOCK), BLOCKS).astype(np.int64))
    rows = np.unique(np.minimum(starts[:, None] + np.arange(BLOCK), len(lines) - 1))
    block: NDArray[Any] = lines[rows]
    return block


def _compose(name: str, shape: tuple[int, ...], sources: Mapping[str, Entry], recipe: Recipe) -> Merged | None:
    """Return the tensors of a recipe side by side in a shape; None if they do not fit."""
    prefix = _numbers(name)
    columns = []
    for starred_name in recipe.parts:
        named = {
            _numbers(source_name): entry
            for source_name, entry in sources.items()
            if starred(source_name) == starred_name
        }
        columns.append([named[numbers] for numbers in sorted(named) if numbers[: len(prefix)] == prefix])
    count = len(columns[0])
    shapes = [_shape(entry, transposed=recipe.transposed) for column in columns for entry in column]
    if not count or any(len(column) != count for column in columns) or (recipe.transposed and len(shapes[0]) != 2):
        return None
    rows = tuple(zip(*columns, strict=True))
    stacked = len(shapes[0]) == len(shape) - 1
    if len(shapes[0]) != len(shape) - stacked or (count > 1 and not stacked):
        return None
    for dim in range(len(shapes[0])):
        merged = Merged(rows, dim, stacked, recipe.transposed)
        if merged.shape == shape and _is_even(rows, dim, transposed=recipe.transposed):
            return merged
    return None


def _is_even(rows: Iterable[Sequence[Entry]], dim: int, *, transposed: bool) -> bool:
    """Whether tensors fit side by side: shapes equal but for one dim, and equal in every row."""
    shapes = [[list(_shape(entry, transposed=transposed)) for entry in row] for row in rows]
    other_sizes = {tuple(size for at, size in enumerate(shape) if at != dim) for row in shapes for shape in row}
    return len(other_sizes) == 1 and all(row == shapes[0] for row in shapes)


def _shape(source: Entry, *, transposed: bool) -> tuple[int, ...]:
    return source.shape[::-1] if transposed else source.shape


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".") if part.isdecimal())


def _print_recipe(family: str, recipe: Recipe | None) -> None:
    """Print, once in a job, what a tensor was found to be made of."""
    if recipe is not None and torch.distributed.get_rank() == 0:
        parts = listed(map(printable, recipe.parts), MOST_PARTS)
        print(f"shardviz: {printable(family)} is made of {parts}", file=sys.stderr)
