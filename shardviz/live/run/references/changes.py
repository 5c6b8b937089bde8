"""What a job changed since it had the values that a model is compared with.

Weights that were drawn again are left out. Where all elements of a tensor follow one rule, a factor, a number or the
type, the reason says which: whether the rule was meant is the job's business, as weights are scaled on purpose, and
scales of quantized ones are forgotten. float32 weights that went through a narrower type are not the file's, bit by
bit, but each shows its place.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import torch

from shardviz.dump.arrays import ID_NONE
from shardviz.errors import DumpError
from shardviz.layout.dtypes import HALVES
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.lookup.by_reference import Sift, cast_bits, claimed_slice, stored_slice
from shardviz.live.capture.stamp import bits_of_tensor, dtype_name, from_bits
from shardviz.live.run.references.values import NAME, Kept
from shardviz.relate.casts import cast, line_between, rounding_between
from shardviz.relate.relations import Offset, Scaled
from shardviz.relate.tolerance import ROUNDINGS_OF_RULE
from shardviz.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from shardviz.layout.region import Region
    from shardviz.live.claims.local import Local
    from shardviz.live.run.references.choosing import Candidate, Chosen
    from shardviz.reference.files import Entry

LEAST = 8
"""Elements that a rule needs: a few numbers may follow any rule by chance."""


def difference_text(local: Local, stored_entry: Entry) -> str:
    """Return how a shard differs from its claimed slice, as half a sentence; empty if unknown."""
    if local.values.is_meta or not local.values.dtype.is_floating_point or local.values.numel() < LEAST:
        return ""
    try:
        bits = stored_slice(local, stored_entry)
    except (DumpError, OSError):  # not readable here: the look-up of the tensor says so
        return ""
    stored = getattr(torch, stored_entry.dtype, None)
    if bits is None or stored is None or not stored.is_floating_point:
        return ""
    return _dtype_text(local.values.detach().cpu(), from_bits(bits, stored)) or _number_text(
        local, bits, stored_entry.dtype
    )


def _number_text(local: Local, bits: NDArray[Any], stored: str) -> str:
    """Return the factor, or the number, by which all elements differ."""
    dtype = dtype_name(local.values.dtype)
    before = cast(bits, stored, dtype)
    after = bits_of_tensor(local.values)
    relation = line_between(before, after, dtype, ROUNDINGS_OF_RULE) if before is not None else None
    if isinstance(relation, Scaled):
        return f"each element is {relation.factor:.4g} times what it has there: a scale was applied, or left out"
    if isinstance(relation, Offset):
        sign = "+" if relation.number > 0 else "-"
        return f"each element is what it has there {sign} {abs(relation.number):.4g}"
    return ""


def _dtype_text(held: torch.Tensor, stored: torch.Tensor) -> str:
    """Return the dtype that the file's bytes were read as, cast afterwards or not."""
    for taken in (getattr(torch, name) for name in HALVES):
        is_another = taken != stored.dtype and taken.itemsize == stored.dtype.itemsize
        if is_another and torch.equal(stored.view(taken).to(held.dtype).nan_to_num(), held.nan_to_num()):
            was, now = (str(dtype).removeprefix("torch.") for dtype in (stored.dtype, taken))
            return f"its bytes there, which are {was}, were read as {now}"
    return ""


WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Rounded:
    """A tensor of a file as it is in a narrower element type.

    Attributes:
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
    """Return tensors that some rank holds rounded, with file and dtype. Every rank calls this.

    Args:
        of_all: What any rank knows of each tensor that no rank holds as it is, the same on all ranks.
    """
    roundings: dict[str, tuple[int, str]] = {}
    for local in locals_:
        is_wide = local.values.dtype in WIDE and not local.values.is_meta and local.values.numel()
        for at, candidate in enumerate(of_all.get(local.name, []) if is_wide else []):
            if candidate.is_guess and (dtype := _rounding(local, candidate.entry)):
                roundings.setdefault(local.name, (at, dtype))
    return {name: rounding for of_rank in of_all_ranks(roundings) for name, rounding in of_rank.items()}


def _rounding(local: Local, stored_entry: Entry) -> str:
    """Return the type to which a shard's claimed slice was rounded; empty if it wasn't."""
    try:
        bits = claimed_slice(local, stored_entry)
    except (DumpError, OSError):  # not readable here: the look-up of the tensor says so
        return ""
    dtype = dtype_name(local.values.dtype)
    relation = rounding_between(bits, dtype, bits_of_tensor(local.values), dtype, HALVES) if bits is not None else None
    return relation.dtype if relation is not None else ""


def all_rounded(
    of_all: Mapping[str, list[Candidate]], unknown: Collection[str], rounded: Mapping[str, tuple[int, str]]
) -> dict[str, list[Candidate]]:
    """Return all candidates, rounded to the dtype in which some rank holds a file's tensors.

    Args:
        unknown: The tensors that no rank holds as a file has them.
        rounded: Those of them that some rank holds rounded.
    """
    dtypes = {of_all[name][at].path: dtype for name, (at, dtype) in rounded.items()}
    return {
        name: [
            replace(candidate, entry=Rounded(candidate.entry, dtypes[candidate.path]))
            if name in unknown and candidate.path in dtypes
            else candidate
            for candidate in some
        ]
        for name, some in of_all.items()
    }


def notes_on_rounding(of_all: Mapping[str, list[Candidate]], rounded: Mapping[str, tuple[int, str]]) -> list[str]:
    """Return a note on each file whose values are held rounded."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for name, (at, dtype) in rounded.items():
        counts[of_all[name][at].path.name, dtype] += 1
    return [
        f"whether {counted(count, 'tensor')} of {printable(file)} {'was' if count == 1 else 'were'} to be rounded: the "
        f"model holds what {dtype} can hold of the values, in a wider type"
        for (file, dtype), count in counts.items()
    ]


WRITTEN = "its values were written after it was sharded: no rank holds any of the values from before"
AGAIN = "every rank computed it again after it was sharded, with equal results"
DIFFERED = (
    "ranks had different values from the start, as without a seed or with one per rank, so the order of elements "
    "cannot be checked; seed or load alike on all ranks to have it checked"
)

FEW = 0.1
"""The part of a tensor's elements that may be found in its old values by chance."""


def sifting(
    kept_values: Mapping[str, Kept], chosen: Chosen, locals_: Sequence[Local], moments: Sequence[Local]
) -> Sift:
    """Return a function that finds tensors written since they had their reference values.

    If no rank holds any old value of a tensor, it was written, and nothing more is known of it. If some ranks hold old
    values and others do not, that is a finding, unless they had different ones from the start. Buffers that have other
    values than before, the same on every rank, were computed again. Every rank calls this.

    Args:
        kept_values: What is known of the model's tensors from before they were sharded.
    """
    snapshots = chosen.snapshots
    samples = {name: kept.sample for name, kept in kept_values.items() if name in chosen.before}
    equal = _equal_buffers(locals_)
    locals_by_name = {local.name: local for local in (*locals_, *moments)}

    def sift(places: Mapping[str, NDArray[np.int64] | None]) -> dict[str, str]:
        states = {name: _state_of(ids) for name, ids in places.items() if name in snapshots}
        # Compared with what another machine's rank had, a shard says nothing of the first rank's values.
        states |= {name: min(states[name], Found.SOME) for name in states.keys() & chosen.elsewhere}
        of_all = of_all_ranks((states, samples))
        changed = (name for name, ids in places.items() if ids is not None and name in snapshots)
        not_known = dict.fromkeys((name for name in changed if name in equal), AGAIN)
        written: list[str] = []
        for name in sorted({name for states_there, _ in of_all for name in states_there} - not_known.keys()):
            lost = {
                of_rank.get(name)
                for of_name, of_rank in of_all
                if of_name.get(name, Found.AS_CLAIMED) is not Found.AS_CLAIMED
            }
            first = next((of_rank[name] for _, of_rank in of_all if of_rank.get(name) is not None), None)
            if lost - {None, first}:
                not_known[name] = DIFFERED
            elif not any(states_there.get(name) for states_there, _ in of_all):  # NONE is false
                written.append(name)
        opened = {
            name: f"the job opened {printable(snapshots[name].name)}, and"
            for name in written
            if str(snapshots[name]) != NAME
        }
        rules = _rules(locals_by_name, chosen.reference.entries, opened)
        nothing = "no rank holds any of the values that it has there"
        return (
            not_known
            | dict.fromkeys(written, WRITTEN)
            | {name: f"{what} {rules.get(name, nothing)}" for name, what in opened.items()}
        )

    return sift


def _rules(tensors: Mapping[str, Local], entries: Mapping[str, Entry], names: Iterable[str]) -> dict[str, str]:
    """Return how tensors differ from a reference, if all ranks agree. Every rank calls this."""
    rules_here = {
        name: difference_text(tensors[name], entries[name])
        for name in names
        if name in tensors and tensors[name].values.numel()
    }
    by_name: dict[str, set[str]] = {}
    for of_rank in of_all_ranks(rules_here):
        for name, text in of_rank.items():
            by_name.setdefault(name, set()).add(text)
    return {name: texts.pop() for name, texts in by_name.items() if len(texts) == 1 and texts != {""}}


class Found(IntEnum):
    """How much of its tensor's old values a shard has."""

    NONE = 0
    SOME = 1
    AS_CLAIMED = 2


def _state_of(ids: NDArray[np.int64] | None) -> Found:
    if ids is None:
        return Found.AS_CLAIMED
    return Found.SOME if bool(np.mean((ids != ID_NONE) & (ids != 0)) > FEW) else Found.NONE


def _equal_buffers(locals_: Iterable[Local]) -> frozenset[str]:
    """Return unclaimed buffers that are bitwise equal on all ranks. Every rank calls this."""
    sums = {
        local.name: crc32(bits_of_tensor(local.values).tobytes())
        for local in locals_
        if local.role == "buffer" and local.claim is None and not local.values.is_meta
    }
    first, *more_sums = of_all_ranks(sums)
    return frozenset(
        name for name, checksum in first.items() if all(sums_there.get(name) == checksum for sums_there in more_sums)
    )
