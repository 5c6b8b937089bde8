"""What a checkpoint that the job opened has of a model, and the model does not hold.

A model that is loaded before it is sharded holds its values from then: its shards are in order, whatever the load did.
Where other tensors hold what the file has of them, those that hold nothing of it were skipped, or drawn again; one that
holds what the file has under the name of another kind of weight was mixed up. Where no tensor holds anything of a file
that has most of the model, the load was lost. A job may mean most of these, so they are noted. A mix-up of kinds, or of
layers of which the file has no others, is compared with the file, and so is one that was read into copies which are
gone (`lost`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import TYPE_CHECKING, Literal

import torch

from shardviz.errors import DumpError, ShardvizError
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.lookup.by_reference import cast_bits, claimed_slice, is_as_claimed
from shardviz.live.capture.stamp import bits_of_tensor, from_bits
from shardviz.reference.files import open_reference
from shardviz.reference.lookup import has_windows_of
from shardviz.reference.names import matched
from shardviz.relate.values import is_alike
from shardviz.text import counted, fold, listed, printable, starred

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from shardviz.live.capture.locals import Local
    from shardviz.live.run.references.choosing import Candidate
    from shardviz.reference.files import Entry

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


@dataclass(frozen=True, slots=True)
class Misfit:
    """A tensor whose values from before sharding differ from an opened file's.

    Attributes:
        at: The file's place among the tensor's candidates.
        state: `similar` to the file's values, of `another` tensor of the file, of another `layer` of a file that has
            more layers than the model, `unlike` anything in it, or `tied` to a tensor that holds what the file has of
            that one.
        holds: The name of that other tensor, or its own where its elements are in another order.
    """

    at: int
    state: Literal["similar", "another", "layer", "unlike", "tied"]
    holds: str = ""

    @property
    def weight(self) -> tuple[bool, bool]:
        """The order of ranks' answers on a tensor: a similar part tells more than no match."""
        return self.state == "similar", self.state in ("another", "layer")


def misfits(
    of_all: Mapping[str, list[Candidate]], held: Collection[str], used: Collection[Path], locals_: Sequence[Local]
) -> dict[str, Misfit]:
    """Return loaded tensors that no rank holds as a file has them. Every rank calls this.

    Args:
        of_all: What any rank knows of each tensor, the same on all ranks.
        held: The tensors that some rank holds as a file has them, which are none of these.
        used: The files that some tensor is held of.
        locals_: The tensors of this rank.
    """
    of_files: dict[Path, dict[str, Entry]] = {path: {} for path in used}
    for name, some in of_all.items():
        for candidate in some:
            if candidate.path in of_files:
                of_files[candidate.path][name] = candidate.entry
    misfits_here: dict[str, Misfit] = {}
    tied = {local.values.data_ptr(): local.name for local in locals_ if local.name in held and local.values.numel()}
    for local in locals_:
        some = of_all.get(local.name, [])
        at = _file_of(local, some, used)
        if at is None or local.name in held:
            continue
        if local.values.data_ptr() in tied:
            misfits_here[local.name] = Misfit(at, "tied", tied[local.values.data_ptr()])
        elif _was_loaded_before(local, some):
            misfit = _misfit(local, at, some[at].entry, of_files.get(some[at].path, {}))
            is_same_kind = starred(misfit.holds) == starred(local.name)
            may_be_meant = is_same_kind and _has_more(some[at].path, local.name, of_all)
            misfits_here[local.name] = replace(misfit, state="layer") if may_be_meant else misfit
    by_name: dict[str, Misfit] = {}
    for of_rank in of_all_ranks(misfits_here):
        for name, misfit in of_rank.items():
            by_name[name] = max(by_name.get(name, misfit), misfit, key=lambda candidate: candidate.weight)
    return by_name


def is_mixed_up(name: str, misfit: Misfit) -> bool:
    """Whether a tensor holds what a file has under another name, and cannot mean it.

    Example:
        >>> is_mixed_up("layers.0.wq", Misfit(0, "another", "layers.0.wk"))
        True
        >>> is_mixed_up("layers.0.wq", Misfit(0, "another", "layers.0.wq")), is_mixed_up("wq", Misfit(0, "layer", "wk"))
        (False, False)
    """
    return misfit.state == "another" and misfit.holds != name


def lost(
    misfits: Mapping[str, Misfit],
    of_all: Mapping[str, list[Candidate]],
    used: Counter[Path],
    discarded: Mapping[Path, Collection[str]],
) -> set[str]:
    """Return tensors read into copies that are gone, if the model has nothing of the file.

    Args:
        misfits: The tensors that are not held as a file has them.
        of_all: What any rank knows of each tensor of the model.
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


def notes_on(misfits: Mapping[str, Misfit], of_all: Mapping[str, list[Candidate]], used: Counter[Path]) -> list[str]:
    """Return a note on each file whose tensors the model does not hold as the file has them.

    Args:
        misfits: The tensors.
        of_all: What any rank knows of each tensor of the model.
        used: How many tensors are held of each file.
    """
    notes: list[str] = []
    for file, some in _misfits_by_file(misfits, of_all).items():
        has = sum(
            any(candidate.is_guess and candidate.path == file for candidate in of_tensor)
            for of_tensor in of_all.values()
        )
        if used[file]:
            notes += _partial_file_notes(file, some, used[file])
        elif 2 * has >= len(of_all) and _is_unlike(some.values()):
            notes.append(
                f"whether {printable(file.name)} was to be loaded: the job opened it, it has {has} of the model's "
                f"{counted(len(of_all), 'tensor')} by name, and the model holds none of what it has"
            )
    return notes


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
        of_all: What any rank knows of each tensor of the model.
        fits: The files that each tensor is held of, by their places among its candidates.
        used: The files that tensors are held of.
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
        f"whether {printable(first.name)} and {printable(second.name)} were to be mixed: both have these tensors, and "
        f"the model holds {_names(names)} of the first, {_names(instead[second, first])} of the second"
        for (first, second), names in instead.items()
        if first < second and (second, first) in instead
    ]


def _partial_file_notes(file: Path, some: Mapping[str, Misfit], num_used: int) -> Iterator[str]:
    """Yield the notes on a file, other tensors of which the model holds."""
    name = printable(file.name)
    unlike = [tensor for tensor, misfit in some.items() if misfit.state == "unlike"]
    if unlike:
        hold, have = "holds" if num_used == 1 else "hold", "has" if len(unlike) == 1 else "have"
        yield (
            f"whether all of {name} was to be loaded: {counted(num_used, 'tensor')} {hold} what it has of them, but "
            f"{_names(unlike)} {have} the values from before sharding, which are not in it"
        )
    for tensor, holds in ((tensor, misfit.holds) for tensor, misfit in some.items() if misfit.state == "tied"):
        yield (
            f"whether {printable(tensor)} should be tied: the job has it as {printable(holds)}, and {name} has two "
            "different tensors under these names"
        )
    misplaced = {tensor: misfit.holds for tensor, misfit in some.items() if misfit.state in ("another", "layer")}
    for tensor, holds in islice(misplaced.items(), MOST_NAMES):
        what = "its elements in another order" if tensor == holds else f"what {name} has as {printable(holds)}"
        held = f"{printable(tensor)} holds {what}, already before it was sharded"
        yield f"whether {name} was loaded as it was meant: {held}"
    if len(misplaced) > MOST_NAMES:
        more = counted(len(misplaced) - MOST_NAMES, "more tensor")
        yield f"whether {name} was loaded as it was meant: {more} held other elements than those of their names"


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


def _was_loaded_before(local: Local, some: Iterable[Candidate]) -> bool:
    """Whether a shard has its values from before sharding, and these tell it from another."""
    before = next((candidate for candidate in some if not candidate.is_guess and candidate.is_snapshot), None)
    if before is None or local.values.is_meta or is_alike(bits_of_tensor(local.values)):
        return False
    return is_as_claimed(local, before.entry)


def _misfit(local: Local, at: int, stored: Entry, neighbors: Mapping[str, Entry]) -> Misfit:
    """Return how a shard is related to its own tensor in a file, or to neighbors of its shape."""
    try:
        if _is_similar(local, stored):
            return Misfit(at, "similar")
        for name in (local.name, *neighbors) if neighbors else ():
            neighbor = neighbors[name]
            if neighbor.shape == local.shape and _has_some_of(local, neighbor):
                return Misfit(at, "another", name)
    except (DumpError, OSError):  # a file that this rank cannot read gives no note
        return Misfit(at, "similar")
    return Misfit(at, "unlike")


def _is_similar(local: Local, stored: Entry) -> bool:
    """Whether a shard correlates with the slice that it claims, which a new draw would not.

    Means are taken away first, as they show nothing: the weights of any two norms are near 1.
    """
    bits = claimed_slice(local, stored)
    if bits is None or not local.values.dtype.is_floating_point:
        return True
    expected = from_bits(bits, local.values.dtype).reshape(-1)[:MOST_COMPARED].double()
    actual = local.values.detach().cpu().reshape(-1)[:MOST_COMPARED].double()
    enough = min(max(SIMILAR, BY_CHANCE * len(actual) ** -0.5), SURELY)
    return bool(
        torch.nn.functional.cosine_similarity(actual - actual.mean(), expected - expected.mean(), dim=0).abs() > enough
    )


def _has_some_of(local: Local, entry: Entry) -> bool:
    whole = cast_bits(entry.bits, entry.dtype, local.values.dtype)
    return has_windows_of(bits_of_tensor(local.values), whole.reshape(-1) if local.flat else whole)
