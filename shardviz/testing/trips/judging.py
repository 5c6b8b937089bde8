"""What each rank received, compared with what it should have: its own part, old values, or something else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed

from shardviz.check.run import report_on
from shardviz.checkpoint.comparing.changed.numbers import shifted
from shardviz.dump.records.tensors import Stamp
from shardviz.layout.region import indices
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.lookup.by_reference import add_by_reference, cast_bits
from shardviz.live.capture.lookup.known import Known
from shardviz.live.capture.meshes import plain_mesh, without_axes
from shardviz.live.capture.stamp import Stamped, bits_of_tensor, dtype_name
from shardviz.reference.lookup import FEW_EQUAL
from shardviz.relate.stored import rounding_between
from shardviz.relate.values import is_alike, part_of
from shardviz.testing.assertions.gathering import gather
from shardviz.testing.trips.filling import part_of_entry, region_of
from shardviz.text import join_numbers, listed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Literal

    from numpy.typing import NDArray
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.checkpoint.comparing.outcome import Change
    from shardviz.explain.finding import Finding
    from shardviz.layout.mesh import Mesh
    from shardviz.layout.region import Region
    from shardviz.live.capture.capture import Capture
    from shardviz.live.capture.locals import Local
    from shardviz.reference.files import Entry
    from shardviz.testing.trips.mapping import Padded

    Fate = Literal["right", "kept", "rounded", "dtype", "zeros", "shape", "swapped", "other"]

NARROWER = {
    "float64": ("float32", "bfloat16", "float16"),
    "float32": ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
    "bfloat16": ("float8_e4m3fn", "float8_e5m2"),
    "float16": ("bfloat16", "float8_e4m3fn", "float8_e5m2"),
}
"""The dtypes through which values may have gone on their way, by the type that they have."""
PLACED = "what was sent"
"""What ids stand for, in the words of findings."""


@dataclass(frozen=True)
class Target:
    """What one tensor should have after it was received.

    Attributes:
        entry: What was sent.
        old: Returns what this rank had before; None if that is not known.
        dtype: The dtype that it must have; empty if it may have another, as an engine may.
        also: What it may have as well: that of a tensor which it shares its storage with here and did not there.
        padding: Which of its elements a map says are padding; None if it says so of none.
        padded: Returns how this rank's own part was padded, where a map pads the whole.
    """

    entry: Entry
    old: Callable[[], NDArray[Any] | None] | None = None
    dtype: str = ""
    also: tuple[Entry, ...] = ()
    padding: Callable[[], NDArray[np.bool_]] | None = None
    padded: Callable[[], Padded | None] | None = None


@dataclass(frozen=True)
class Part:
    """What became of one rank's part of a tensor.

    Attributes:
        rank: The rank.
        fate: What became of it.
        rows: The rows that are wrong, counted in the whole tensor, as text; empty if all of the part is.
        why: The dtype that values went through, the shape that it has instead, the tensor whose part it has, or
            the number that all values are where that is not zero.
        wrong: How many elements are wrong.
        size: How many it has.
        padded: How its own part was padded, where a map pads the whole; None if it was not.
        change: What was done to all of its values, and why; None if that is not one thing.
    """

    rank: int
    fate: Fate
    rows: str = ""
    why: str = ""
    wrong: int = 0
    size: int = 0
    padded: Padded | None = None
    change: Change | None = None

    @property
    def text(self) -> str:
        """The rank and its wrong rows: `rank 3 rows 4-7`."""
        return f"rank {self.rank} {self.rows}".rstrip()


def part_received(local: Local, target: Target, rank: int) -> Part:
    """Return what became of this rank's part of a tensor."""
    if tuple(target.entry.shape) != local.shape:
        return Part(rank, "shape", why=f"{list(local.shape)}, not {list(target.entry.shape)}")
    dtype = dtype_name(local.values.dtype)
    if target.dtype and dtype != target.dtype:
        return Part(rank, "dtype", why=dtype, wrong=local.values.numel(), size=local.values.numel())
    got = bits_of_tensor(local.values)
    parts = [_wanted(local, entry) for entry in (target.entry, *target.also)]
    wanted = parts[0]
    if wanted is None:
        return Part(rank, "shape", why=f"{list(got.shape)} on this rank, which its placements do not give it")
    if any(one is not None and np.array_equal(one, got) for one in parts):
        return Part(rank, "right", size=got.size)
    wrong = wanted != got
    region = region_of(local)
    if target.padding is not None and region is not None:
        wrong &= ~part_of(target.padding(), region)
    rows = rows_text(wrong, region) if region is not None and not local.flat else ""
    fate, why = _fate(local, target, got, wrong)
    padded = target.padded() if target.padded is not None else None
    change = shifted(wanted, got, dtype, ("what was sent", "it")) if fate == "other" else None
    return Part(rank, fate, rows, why, int(wrong.sum()), got.size, padded, change)


def _wanted(local: Local, entry: Entry) -> NDArray[Any] | None:
    part = part_of_entry(local, entry)
    return None if part is None else cast_bits(part, entry.dtype, local.values.dtype)


def _fate(local: Local, target: Target, got: NDArray[Any], wrong: NDArray[np.bool_]) -> tuple[Fate, str]:
    old = target.old() if target.old is not None else None
    if local.values.dtype == torch.bool and not wrong.all():
        return "other", ""  # of two values one is the old one
    if old is not None and old.shape == got.shape and int((old[wrong] == got[wrong]).sum()) >= _most(wrong):
        return "kept", ""
    own, part = dtype_name(local.values.dtype), part_of_entry(local, target.entry)
    sent, narrower = target.entry.dtype, NARROWER.get(own, ())
    if part is not None and (relation := rounding_between(part, sent, got, own, narrower)) is not None:
        return "rounded", relation.dtype
    if not got[wrong].any():
        return "zeros", ""
    if got.size > 1 and is_alike(got) and wrong.all():
        return "zeros", f"{local.values.reshape(-1)[0].item():g}"
    return "other", ""


def _most(wrong: NDArray[np.bool_]) -> float:
    """How many of the wrong elements must be the old ones: of narrow values some are equal by chance."""
    return max(1.0, (1 - FEW_EQUAL) * int(wrong.sum()))


def rows_text(wrong: NDArray[np.bool_], region: Region) -> str:
    """Return the wrong rows of a part as the whole tensor counts them, and the columns if only some are wrong.

    Example:
        >>> from shardviz.layout.region import Region
        >>> rows_text(np.array([[False, True], [False, True]]), Region((((4, 6),), ((0, 2),))))
        'rows 4-5, columns 1'
    """
    if not wrong.ndim:
        return ""
    words = ("rows", "columns") if wrong.ndim == 2 else tuple(f"dim {dim} at" for dim in range(wrong.ndim))
    words = ("rows",) if wrong.ndim == 1 else words
    texts = []
    for dim, word in enumerate(words):
        others = tuple(other for other in range(wrong.ndim) if other != dim)
        hit = wrong.any(axis=others) if others else wrong
        if dim == 0 or not hit.all():
            texts.append(f"{word} {join_numbers(indices(region.dims[dim])[hit].tolist())}")
    return ", ".join(texts)


def parts_of_all(locals_: Mapping[str, Local], targets: Mapping[str, Target]) -> dict[str, list[Part]]:
    """Return what became of every rank's part of every tensor. Every rank of the world calls this."""
    rank = distributed.get_rank()
    mine = {name: part_received(local, targets[name], rank) for name, local in locals_.items() if name in targets}
    for name, part in mine.items():
        if part.fate == "other" and (whose := _owner(locals_[name], targets)):
            mine[name] = replace(part, fate="swapped", why=whose)
    parts: dict[str, list[Part]] = {}
    for of_rank in of_all_ranks(mine):
        for name, part in of_rank.items():
            parts.setdefault(name, []).append(part)
    return parts


def _owner(local: Local, targets: Mapping[str, Target]) -> str:
    """Return the other tensor whose part a rank has in place of its part of this one; empty if there is none."""
    got = bits_of_tensor(local.values)
    for name, target in targets.items():
        if name != local.name and tuple(target.entry.shape) == local.shape:
            other = _wanted(local, target.entry)
            if other is not None and np.array_equal(other, got):
                return name
    return ""


def places(
    locals_: Mapping[str, Local],
    targets: Mapping[str, Target],
    names: Sequence[str],
    mesh: DeviceMesh | None,
    reference: str = PLACED,
) -> list[Finding]:
    """Return findings that locate the wrong elements of some tensors. Every rank of the world calls this.

    Args:
        locals_: What this rank has.
        targets: What it should have; the others' elements are looked for in these too.
        names: The tensors to look at.
        mesh: The mesh of the job.
        reference: What was sent, in words.
    """
    known = _known({name: target for name, target in targets.items() if target.entry.dtype != "bool"})
    dropped = _stage_axes(locals_, mesh)
    rank = distributed.get_rank()
    tensors = [
        replace(one, role="param", claim=one.claim and without_axes(one.claim, dropped, rank))
        for name in names
        if (one := locals_.get(name)) is not None and name in known.stamps  # of flags nothing can be said
    ]

    def add(seen: Capture) -> None:
        add_by_reference(seen, tensors, known)

    dump = gather(add, mesh, Stamped(tuple(known.stamps.values())), reference)
    report = report_on(dump)
    each = [placed for finding in report.findings for placed in finding.each]
    findings = [finding for finding in each if finding.tensor in names and finding.kind not in ("incomplete", "untied")]
    same = {
        (finding.tensor, finding.held or finding.kind): finding for finding in reversed(findings)
    }  # what is twice somewhere is missing too
    return [finding for finding in findings if same[finding.tensor, finding.held or finding.kind] is finding]


def _known(targets: Mapping[str, Target]) -> Known:
    stamps: dict[str, Stamp] = {}
    first = 1
    for name, target in targets.items():
        stamps[name] = Stamp(name, first, tuple(target.entry.shape), "param")
        first += int(np.prod(target.entry.shape))
    return Known(stamps, {name: target.entry for name, target in targets.items()}, is_stamped=True)


def _stage_axes(locals_: Mapping[str, Local], mesh: DeviceMesh | None) -> list[str]:
    """Return the axes along which ranks have different tensors, as the stages of a pipeline have."""
    if mesh is None:
        return []
    of_all = of_all_ranks(frozenset(locals_))
    plain: Mesh = plain_mesh(mesh)
    return [
        axis for axis in plain.axes if any(len({of_all[rank] for rank in group}) > 1 for group in plain.groups(axis))
    ]


def with_parts(finding: Finding, parts: Sequence[Part]) -> Finding:
    """Return a finding of exactly the ranks whose parts are wrong, with the rows of each."""
    wrong = [part for part in parts if part.fate != "right"]
    where = listed((part.text for part in wrong), 4)
    return replace(finding, ranks=tuple(part.rank for part in wrong), details=(*finding.details, f"wrong: {where}"))
