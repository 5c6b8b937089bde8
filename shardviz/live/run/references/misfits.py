"""What a checkpoint that the job opened has of a model, and the model does not hold.

A model that is loaded before it is sharded holds its values from then: its shards are in order, whatever the load did.
A tensor that the file has by name, and that is not equal to it there, was skipped, drawn again, averaged, trained,
scaled or put into another order. A job may mean most of these, so each is noted at its tensor, with what was seen.
A mix-up of kinds, or of layers of which the file has no others, is compared with the file, and so is one that was read
into copies which are gone (`lost`). A file that a second model of the job holds says nothing of the first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from shardviz.checkpoint.comparing.one_tensor.orders import name_change
from shardviz.dump.records.files import MEANT
from shardviz.errors import DumpError, ShardvizError
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.lookup.by_reference import cast_bits, claimed_slice, is_as_claimed
from shardviz.live.capture.stamp import bits_of_tensor, from_bits
from shardviz.live.compat.meshes import local_of
from shardviz.live.run.references.changes import Rounded, difference_text
from shardviz.live.run.references.sources import STATE_DICT
from shardviz.live.run.references.values import living_modules
from shardviz.reference.files import Entry, open_reference
from shardviz.reference.lookup import has_windows_of
from shardviz.reference.names import matched
from shardviz.relate.values import is_alike
from shardviz.text import counted, fold, listed, printable, starred

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from shardviz.live.claims.local import Local
    from shardviz.live.run.references.choosing import Candidate

MOST_NAMES = 4

SIMILAR = 0.5
"""The correlation of a shard with a file's values above which one was made of the other: cast, scaled or trained on."""

BY_CHANCE = 3.0
"""How many times what numbers that have nothing in common correlate by it must be at least: that is 1 / sqrt(n)."""

SURELY = 0.99
"""The correlation that is enough in a shard of a few elements, where chance may give any other."""

MOST_OF = 0.8
"""The part of a file's tensors that is unlike the model's where it holds none of them: chance makes some alike."""

MOST_COMPARED = 1 << 16
"""Elements of a shard that are compared for it."""

MOST_ORDERED = 1 << 24
"""Elements of all tensors whose order is named."""


State = Literal["unlike", "tied", "layer", "another", "changed", "similar", "partial", "reordered"]
STATES: tuple[State, ...] = get_args(State)
"""What a tensor is of an opened file's: what tells the most of it is last.

`unlike` anything in the file; `tied` to a tensor that holds what the file has of that one; of another `layer` of a file
that has more layers than the model; of `another` tensor of the file; `changed` by one rule for all elements; `similar`
to the file's values; `partial`, with some elements of the file's at their places; `reordered`."""


@dataclass(frozen=True, slots=True)
class Misfit:
    """A tensor whose given values differ from an opened file's.

    Attributes:
        at: The file's place among the tensor's candidates.
        state: What it is of the file's.
        holds: The name of the tensor that it is tied to, or whose elements it holds.
        how: The rule, the order or the part of its elements, in words; empty if unknown.
        apart: How far it is from the file's values, as a part of their size, if it is similar.
    """

    at: int
    state: State
    holds: str = ""
    how: str = ""
    apart: float = 0.0

    @property
    def weight(self) -> int:
        """The order of ranks' answers on a tensor: a similar part tells more than no match."""
        return STATES.index(self.state)


def misfits(
    of_all: Mapping[str, list[Candidate]], held: Collection[str], used: Collection[Path], locals_: Sequence[Local]
) -> dict[str, Misfit]:
    """Return loaded tensors that no rank holds as a file has them. Every rank calls this.

    Args:
        of_all: What any rank knows of each tensor, the same on all ranks.
        held: The tensors that some rank holds as a file has them, which are none of these.
        used: The files that some tensor is held of.
    """
    of_files: dict[Path, dict[str, Entry]] = {path: {} for path in used}
    for name, some in of_all.items():
        for candidate in some:
            if candidate.path in of_files:
                of_files[candidate.path][name] = candidate.entry
    misfits_here: dict[str, Misfit] = {}
    tied = {local.values.data_ptr(): local.name for local in locals_ if local.name in held and local.values.numel()}
    orders = _Orders()
    for local in locals_:
        some = of_all.get(local.name, [])
        at = _file_of(local, some, used)
        if at is None or local.name in held:
            continue
        if local.values.data_ptr() in tied:
            misfits_here[local.name] = Misfit(at, "tied", tied[local.values.data_ptr()])
        elif (given := _given_values(local, some)) is not None:
            neighbors = of_files.get(some[at].path, {})
            misfit = _misfit_as_stored_or_rounded(local, at, given, some[at].entry, neighbors, orders)
            is_layer = misfit is not None and starred(misfit.holds) == starred(local.name)
            if misfit is not None and is_layer and _has_more(some[at].path, local.name, of_all):
                misfit = replace(misfit, state="layer")
            if misfit is not None:
                misfits_here[local.name] = misfit
    second = _in_second_model(misfits_here, of_all, used, locals_)
    by_name: dict[str, Misfit] = {}
    of_ranks = of_all_ranks((misfits_here, second))
    elsewhere = {path for _, paths in of_ranks for path in paths}
    for of_rank, _ in of_ranks:
        for name, misfit in of_rank.items():
            if of_all[name][misfit.at].path not in elsewhere:
                by_name[name] = max(by_name.get(name, misfit), misfit, key=lambda candidate: candidate.weight)
    return by_name


def is_mixed_up(misfit: Misfit) -> bool:
    """Whether a tensor holds what a file has under another name, and cannot mean it.

    Example:
        >>> is_mixed_up(Misfit(0, "another", "layers.0.wk"))
        True
        >>> is_mixed_up(Misfit(0, "reordered")), is_mixed_up(Misfit(0, "layer", "layers.7.wq"))
        (False, False)
    """
    return misfit.state == "another"


def lost(
    misfits: Mapping[str, Misfit],
    of_all: Mapping[str, list[Candidate]],
    used: Counter[Path],
    discarded: Mapping[Path, Collection[str]],
) -> set[str]:
    """Return tensors read into copies that are gone, if the model has nothing of the file.

    Args:
        used: How many tensors are held of each file.
        discarded: What was read from each file into tensors that are gone, by the model's names.
    """
    names: set[str] = set()
    for file, some in _misfits_by_file(misfits, of_all).items():
        read = discarded.get(file, ())
        if not used[file] and _is_unlike(some.values()) and all(name in read for name in some):
            names |= {name for name, misfit in some.items() if misfit.state == "unlike"}
    return names


def _misfits_by_file(
    misfits: Mapping[str, Misfit], of_all: Mapping[str, list[Candidate]]
) -> dict[Path, dict[str, Misfit]]:
    by_file: dict[Path, dict[str, Misfit]] = defaultdict(dict)
    for name, misfit in misfits.items():
        by_file[of_all[name][misfit.at].path][name] = misfit
    return by_file


def notes_on(
    misfits: Mapping[str, Misfit], of_all: Mapping[str, list[Candidate]], used: Counter[Path]
) -> dict[str, str]:
    """Return a note on each tensor that the model does not hold as an opened file has it.

    A file of which nothing is held counts if it has half of the model's tensors by name.

    Args:
        used: How many tensors are held of each file.
    """
    notes: dict[str, str] = {}
    for file, some in _misfits_by_file(misfits, of_all).items():
        has = sum(
            any(candidate.is_guess and candidate.path == file for candidate in of_tensor)
            for of_tensor in of_all.values()
        )
        if used[file]:
            rest = f"{counted(used[file], 'tensor')} of the model {'is' if used[file] == 1 else 'are'} as there"
        else:
            rest = f"no tensor of the model is as there, and it has {has} of {len(of_all)} by name"
        if used[file] or 2 * has >= len(of_all):
            similar = [misfit.apart for misfit in some.values() if misfit.state == "similar"]
            apart = (
                " to ".join(dict.fromkeys(f"{100 * size:.2g}%" for size in (min(similar), max(similar))))
                if similar
                else ""
            )
            begin = f"{MEANT}the job opened {printable(file.name)}, and"
            notes |= {name: f"{begin} {_what_of(misfit, apart)}; {rest}" for name, misfit in some.items()}
    return notes


def _what_of(misfit: Misfit, apart: str) -> str:
    """Return what a tensor is of an opened file's, as a clause."""
    if misfit.state == "similar":
        return (
            f"these values are near the file's but not equal (off by {apart} of their size): they were not loaded, "
            "or were trained or averaged since"
        )
    if misfit.state == "unlike":
        return "these values are not in it: they were not loaded, or were drawn again"
    if misfit.state == "tied":
        return f"this tensor is tied to {printable(misfit.holds)}, while the file has two different tensors"
    if misfit.state == "layer":
        return f"it has these values as {printable(misfit.holds)}"
    if misfit.state == "reordered":
        order = f": {misfit.how}" if misfit.how else ""
        return f"these are its elements in another order{order}"
    return misfit.how


def _is_unlike(some: Collection[Misfit]) -> bool:
    """Whether tensors hold nothing of a file, apart from likeness by chance."""
    states = Counter(misfit.state for misfit in some)
    return not states["another"] + states["layer"] and states["unlike"] >= MOST_OF * len(some)


def notes_on_mixtures(
    of_all: Mapping[str, list[Candidate]], fits: Mapping[str, Collection[int]], used: Collection[Path]
) -> list[str]:
    """Note each pair of files with the same tensors if the model holds some from each.

    One that was loaded over the other, be it a part of the model, leaves no tensor that it has as the other has it.

    Args:
        fits: The files whose values each tensor holds, by their places among its candidates.
    """
    instead: dict[tuple[Path, Path], list[str]] = defaultdict(list)
    for name, places in fits.items():
        files = {of_all[name][at].path for at in places}
        shape = of_all[name][min(places)].entry.shape
        alternatives = {
            candidate.path
            for candidate in of_all[name]
            if candidate.is_guess and candidate.entry.shape == shape and candidate.path in used
        }
        for pair in product(files, alternatives - files):
            instead[pair].append(name)
    return [
        f"whether {printable(first.name)} and {printable(second.name)} are mixed on purpose: both have these tensors, "
        f"and the model holds {_names(names)} of the first, {_names(instead[second, first])} of the second"
        for (first, second), names in instead.items()
        if first < second and (second, first) in instead
    ]


def _names(names: Iterable[str]) -> str:
    return listed((printable(str(folded)) for folded, _ in fold((name, None) for name in names)), MOST_NAMES)


def _has_more(file: Path, name: str, model: Collection[str]) -> bool:
    """Whether a file has more tensors of a name's kind than the model, which may skip layers."""
    try:
        stored = open_reference(file).entries
    except (ShardvizError, OSError):  # not readable here
        return True
    names = matched(model, stored).names
    kind = starred(names.get(name, name))
    return any(starred(stored_name) == kind for stored_name in stored.keys() - set(names.values()))


def _file_of(local: Local, some: Sequence[Candidate], used: Collection[Path]) -> int | None:
    """Return the index of a tensor's likely file: preferably one of which others are held."""
    fits = [at for at, candidate in enumerate(some) if candidate.is_guess and candidate.entry.shape == local.shape]
    return next((at for at in fits if some[at].path in used), next(iter(fits), None))


def is_given(candidate: Candidate) -> bool:
    """Whether a candidate is what the model was given, whatever file it is from: before it was sharded, or whole."""
    return not candidate.is_guess and (candidate.is_snapshot or candidate.path == STATE_DICT)


def _given_values(local: Local, some: Iterable[Candidate]) -> Entry | None:
    """Return the whole tensor that a shard is of as the job gave it to torch; None if it has other values since."""
    given = next((candidate.entry for candidate in some if is_given(candidate)), None)
    return None if given is None or local.values.is_meta or not is_as_claimed(local, given) else given


class _Orders:
    """Names orders of whole tensors, as long as they are not too many."""

    def __init__(self) -> None:
        self._left = MOST_ORDERED

    def misfit(self, at: int, stored: NDArray[Any], given: NDArray[Any]) -> Misfit:
        """Return what a tensor is of a file's, some elements of which it has."""
        self._left -= given.size
        if self._left >= 0 and (order := name_change(stored, given)):
            return Misfit(at, "reordered", how=order)
        equal = int((stored == given).sum())
        if equal:
            how = f"{given.size - equal:,} of these {given.size:,} elements are not as there"
            return Misfit(at, "partial", how=how)
        return Misfit(at, "reordered")


def _misfit(
    local: Local, at: int, given: Entry, stored: Entry, neighbors: Mapping[str, Entry], orders: _Orders
) -> Misfit | None:
    """Return how a shard is related to its own tensor in a file, or to neighbors of its shape."""
    dtype = local.values.dtype
    try:
        if how := difference_text(local, stored):
            return Misfit(at, "changed", how=how)
        if is_alike(bits_of_tensor(local.values)):
            return Misfit(at, "unlike") if claimed_slice(local, stored) is not None else None
        if stored.shape == given.shape and _has_some_of(local, stored):
            return orders.misfit(at, *(cast_bits(entry.bits, entry.dtype, dtype) for entry in (stored, given)))
        likeness = _likeness(local, stored)
        if likeness is None or likeness.is_similar:
            return None if likeness is None else Misfit(at, "similar", apart=likeness.apart)
        for name, neighbor in neighbors.items():
            if name != local.name and neighbor.shape == local.shape and _has_some_of(local, neighbor):
                return Misfit(at, "another", name)
    except (DumpError, OSError):  # a file that this rank cannot read gives no note
        return None
    return Misfit(at, "unlike")


def _misfit_as_stored_or_rounded(
    local: Local, at: int, given: Entry, stored: Entry, neighbors: Mapping[str, Entry], orders: _Orders
) -> Misfit | None:
    """Return the same; if other tensors of the file were rounded, as it is rounded or else as it is there."""
    misfit = _misfit(local, at, given, stored, neighbors, orders)
    if misfit is None or misfit.state not in ("unlike", "similar") or not isinstance(stored, Rounded):
        return misfit
    return _misfit(local, at, given, stored.entry, neighbors, orders)


class _Likeness(NamedTuple):
    """Whether a shard correlates with a file's values, and how far it is from them, relative to their size."""

    is_similar: bool
    apart: float


def _likeness(local: Local, stored: Entry) -> _Likeness | None:
    """Compare a shard with the slice that it claims, which a new draw would not be like; None if that is no slice.

    Means are taken away first, as they show nothing: the weights of any two norms are near 1.
    """
    bits = claimed_slice(local, stored)
    if bits is None:
        return None
    if not local.values.dtype.is_floating_point:
        return _Likeness(False, 0.0)
    expected = from_bits(bits, local.values.dtype).reshape(-1)[:MOST_COMPARED].double()
    actual = local.values.detach().cpu().reshape(-1)[:MOST_COMPARED].double()
    enough = min(max(SIMILAR, BY_CHANCE * len(actual) ** -0.5), SURELY)
    likeness = torch.nn.functional.cosine_similarity(actual - actual.mean(), expected - expected.mean(), dim=0)
    return _Likeness(bool(likeness.abs() > enough), float((actual - expected).norm() / expected.norm()))


def _in_second_model(
    misfits_here: Mapping[str, Misfit],
    of_all: Mapping[str, list[Candidate]],
    used: Collection[Path],
    locals_: Sequence[Local],
) -> set[Path]:
    """Return files of which this model holds nothing, and a second one of this process does: a teacher's, for one."""
    by_name = {local.name: local for local in locals_}
    memory = {local.values.data_ptr() for local in locals_}
    models: set[Path] = set()
    for file, some in _misfits_by_file(misfits_here, of_all).items():
        if file in used:
            continue
        largest = max((by_name[name] for name in some), key=lambda local: local.values.numel())
        entry, dtype = of_all[largest.name][some[largest.name].at].entry, largest.values.dtype
        parts = [cast_bits(entry.bits, entry.dtype, dtype), claimed_slice(largest, entry)]
        tensors = [local_of(parameter) for module in living_modules() for parameter in module.parameters(recurse=False)]
        of_more = [tensor for tensor in tensors if not tensor.is_meta and tensor.data_ptr() not in memory]
        if any(_has_bits(tensor, bits) for tensor in of_more if tensor.dtype == dtype for bits in parts):
            models.add(file)
    return models


def _has_bits(tensor: torch.Tensor, bits: NDArray[Any] | None) -> bool:
    if bits is None or tuple(tensor.shape) != bits.shape:
        return False
    return np.array_equal(bits, bits_of_tensor(tensor))


def _has_some_of(local: Local, entry: Entry) -> bool:
    whole = cast_bits(entry.bits, entry.dtype, local.values.dtype)
    return has_windows_of(bits_of_tensor(local.values), whole.reshape(-1) if local.flat else whole)
