"""Two checkpoints side by side, of whatever formats: each tensor equal, cast, in another order, another's, or other.

Two tensors are in memory at a time. Names are matched as a reference's are: by patterns, wrappers, one beginning.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardviz.checkpoint.casts import cast, is_narrower
from shardviz.checkpoint.fused import find_fused
from shardviz.checkpoint.optimizer import state_names
from shardviz.checkpoint.orders import name_change
from shardviz.errors import DumpError, ShardvizError
from shardviz.layout.region import index_of
from shardviz.reference.lookup import is_alike
from shardviz.reference.names import Matching, matched, renamed
from shardviz.text import counted, listed, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from numpy.typing import NDArray

    from shardviz.checkpoint.records import Checkpoint, Saved

Verdict = Literal["equal", "tied", "cast", "permuted", "moved", "missing", "added", "other", "not-compared"]
"""What became of a tensor: `moved` has the content of a tensor of another name, `tied` is saved once in one of them."""

MAX_PARTS = 4
"""Parts of a fused tensor that are named."""

DIFFERENT: tuple[Verdict, ...] = ("cast", "permuted", "moved", "missing", "added", "other")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one tensor.

    Attributes:
        name: Its name in the first checkpoint, or in the second where only that has it.
        other: Its name in the second; empty where that has none.
        verdict: What became of it.
        why: That in words, with the numbers.
    """

    name: str
    other: str
    verdict: Verdict
    why: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What became of every tensor of two checkpoints.

    Attributes:
        outcomes: One for each tensor, in the first checkpoint's order.
        notes: What the names were taken for, and what was left out.
    """

    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...]

    @property
    def counts(self) -> Counter[str]:
        """How many tensors have each verdict."""
        return Counter(one.verdict for one in self.outcomes)

    @property
    def differs(self) -> bool:
        """Whether anything is different."""
        return any(one.verdict in DIFFERENT for one in self.outcomes)

    @property
    def compared(self) -> int:
        """How many tensors were looked at in both."""
        return sum(one.verdict not in ("missing", "added", "not-compared") for one in self.outcomes)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `shardviz diff --format json` prints."""
        return {"schema": 1, "tensors": [asdict(one) for one in self.outcomes], "notes": list(self.notes)}


def compare_checkpoints(
    before: Checkpoint,
    after: Checkpoint,
    names: Mapping[str, str] | None = None,
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> Comparison:
    """Compare all tensors of two checkpoints.

    Args:
        before: The first.
        after: The second.
        names: The second's names where they differ, by pattern over the first's.
        progress: Called with the tensors compared, and their number.

    Raises:
        ShardvizError: They have no tensor in common, or a pattern fits none.
    """
    other_of, notes = _pairs(before, after, names or {})
    if not other_of and before.tensors and after.tensors:
        some, others = (listed(map(printable, sorted(one.tensors)), 3) for one in (before, after))
        raise ShardvizError(
            f"no tensor of {before.path} is in {after.path} by its name: the first has {some}, the second {others}",
            "say how names correspond, with --map FILE: lines `layers.*.wq.* = model.layers.*.self_attn.q_proj.*`",
        )
    outcomes: list[Outcome] = []
    for done, (name, other) in enumerate(other_of.items()):
        progress(done, len(other_of))
        outcomes.append(_outcome(before.tensors[name], after.tensors[other]))
    lonely, left_out = _lonely(before, after, other_of)
    outcomes = _with_fused(_with_moved([*outcomes, *lonely], before, after), before, after)
    return Comparison(tuple(outcomes), (*notes, *left_out))


def _pairs(before: Checkpoint, after: Checkpoint, names: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the second's name for each of the first's that it has, and what they were taken for."""
    known_as = renamed(before.tensors, names)
    there = matched(list(known_as.values()), after.tensors)
    back = matched(list(after.tensors), list(known_as.values()))
    found, how, by = _better(there, back, before, after)
    pairs = {name: found[known] for name, known in known_as.items() if known in found}
    return pairs, (f"names: {by} has {how}* where the other has *",) if how else ()


def _better(
    there: Matching, back: Matching, before: Checkpoint, after: Checkpoint
) -> tuple[Mapping[str, str], str, str]:
    """Return the matching of more names: the words that are before all names may be on either side."""
    if len(back.names) > len(there.names):
        return {known: other for other, known in back.names.items()}, back.before, before.path.name
    return there.names, there.before, after.path.name


def _lonely(before: Checkpoint, after: Checkpoint, pairs: Mapping[str, str]) -> tuple[list[Outcome], list[str]]:
    """Return the tensors that only one has; optimizer state is left out where the other has none at all."""
    states, others = state_names(before), state_names(after)
    taken = set(pairs.values())
    missing = [name for name in before.tensors if name not in pairs]
    added = [name for name in after.tensors if name not in taken]
    notes = []
    if states and not others:
        missing = [name for name in missing if name not in states]
        notes.append(f"not compared: {counted(len(states), 'tensor')} of optimizer state, which only the first has")
    if others and not states:
        added = [name for name in added if name not in others]
        notes.append(f"not compared: {counted(len(others), 'tensor')} of optimizer state, which only the second has")
    found = [Outcome(name, "", "missing", "only the first has it") for name in missing]
    return found + [Outcome(name, "", "added", "only the second has it") for name in added], notes


def _outcome(one: Saved, other: Saved) -> Outcome:
    try:
        verdict, why = _verdict(one, other)
    except DumpError as error:
        verdict, why = "not-compared", error.message
    return Outcome(one.name, other.name, verdict, why)


def _verdict(one: Saved, other: Saved) -> tuple[Verdict, str]:
    mine, theirs = one.bits, other.bits
    if one.dtype == other.dtype and one.shape == other.shape and np.array_equal(mine, theirs):
        return "equal", ""
    types = f"{one.dtype} and {other.dtype}"
    same = one.dtype == other.dtype
    if not same:
        narrow = one.dtype if is_narrower(one.dtype, other.dtype) else other.dtype
        own, their = cast(mine, one.dtype, narrow), cast(theirs, other.dtype, narrow)
        if own is None or their is None:
            return "not-compared", f"it is {types}, and how one is rounded to the other is not known"
        mine, theirs = own, their
    if one.shape == other.shape and np.array_equal(mine, theirs):
        return "cast", f"{one.dtype} became {other.dtype}, the values are equal after the cast"
    if change := name_change(mine, theirs, (other, one)):
        return "permuted", change if same else f"{change}; {types}"
    return "other", _numbers(one, other, mine, theirs)


def _numbers(one: Saved, other: Saved, mine: NDArray[Any], theirs: NDArray[Any]) -> str:
    if one.shape != other.shape:
        return f"{one.dtype}{list(one.shape)} became {other.dtype}{list(other.shape)}"
    different = mine != theirs
    at = int(np.argmax(different))
    where = index_of(at, one.shape)
    alike = "; all values of the second are alike" if is_alike(theirs) and theirs.size > 1 else ""
    return f"{int(different.sum()):,} of {one.size:,} elements differ, the first at {where}{alike}"


def _with_moved(outcomes: list[Outcome], before: Checkpoint, after: Checkpoint) -> list[Outcome]:
    """Find tensors whose content another name has: layers or experts renumbered, other names, ties saved twice."""
    lost = {one.name for one in outcomes if one.verdict == "missing"}
    new = {one.name for one in outcomes if one.verdict == "added"}
    here = [one.other or one.name for one in outcomes if one.verdict in ("other", "added")]
    if not lost and not here:
        return outcomes
    facts = {_facts(after.tensors[name]) for name in here}
    mine = _by_content(before, facts | {_facts(before.tensors[name]) for name in lost})
    theirs = _by_content(after, facts)
    kept = [one for one in outcomes if one.verdict in ("equal", "cast")]
    whole = {one.name for one in kept}, {one.other for one in kept}
    found = [_explained(one, mine, theirs, (lost, new), whole) for one in outcomes]
    moved = {source for one, source in found if one.verdict == "moved"}
    return [one for one, _ in found if one.verdict != "missing" or one.name not in moved]


def _with_fused(outcomes: list[Outcome], before: Checkpoint, after: Checkpoint) -> list[Outcome]:
    """Put together tensors that only one checkpoint has, where the other has the same lines in one tensor."""
    lost = [before.tensors[one.name] for one in outcomes if one.verdict == "missing"]
    new = [after.tensors[one.name] for one in outcomes if one.verdict == "added"]
    fused, split = find_fused(lost, new), find_fused(new, lost)
    parts = {("missing", name) for names in fused.values() for name in names}
    parts |= {("added", name) for names in split.values() for name in names}
    found = []
    for one in outcomes:
        if one.verdict == "added" and one.name in fused:
            words = f"one after the other, the first's {listed(map(printable, fused[one.name]), MAX_PARTS)}"
            found.append(Outcome(one.name, one.name, "moved", words))
        elif one.verdict == "missing" and one.name in split:
            words = (
                f"the second has it in parts, one after the other: {listed(map(printable, split[one.name]), MAX_PARTS)}"
            )
            found.append(Outcome(one.name, "", "moved", words))
        elif (one.verdict, one.name) not in parts:
            found.append(one)
    return found


def _explained(
    one: Outcome,
    mine: _Contents,
    theirs: _Contents,
    lonely: tuple[set[str], set[str]],
    whole: tuple[set[str], set[str]],
) -> tuple[Outcome, str]:
    """Return what became of a tensor, and the tensor of the first that the second has in its place."""
    name = one.other or one.name
    if one.verdict in ("other", "added"):
        sources = [source for source in mine.of(theirs.digests.get(name, "")) if source != one.name]
        sources.sort(key=lambda source: source not in lonely[0])
        if sources and (one.verdict == "other" or sources[0] in lonely[0]):
            words = f"the second has here the first's {printable(sources[0])}"
            return Outcome(one.name, name, "moved", words), sources[0]
    if one.verdict in ("missing", "added"):
        own, same = (mine, whole[0]) if one.verdict == "missing" else (theirs, whole[1])
        twins = [twin for twin in own.of(own.digests.get(one.name, "")) if twin in same]
        if twins:
            side = "first" if one.verdict == "missing" else "second"
            return Outcome(one.name, twins[0], "tied", f"{one.why}: a copy of the {side}'s {printable(twins[0])}"), ""
    return one, ""


@dataclass(frozen=True)
class _Contents:
    """Some tensors of a checkpoint by a hash of their bits.

    Attributes:
        digests: The hash of each; those whose values are all alike are left out.
        names: The tensors of each hash.
    """

    digests: Mapping[str, str]
    names: Mapping[str, list[str]]

    def of(self, digest: str) -> list[str]:
        """Return the tensors of a hash; none of an empty one."""
        return list(self.names.get(digest, ())) if digest else []


def _facts(tensor: Saved) -> tuple[tuple[int, ...], str]:
    return tensor.shape, tensor.dtype


def _by_content(checkpoint: Checkpoint, facts: Collection[tuple[tuple[int, ...], str]]) -> _Contents:
    """Hash the tensors of some shapes and types."""
    tensors = [one for one in checkpoint.tensors.values() if _facts(one) in facts]
    digests = {one.name: digest for one in tensors if (digest := _digest(one))}
    names: dict[str, list[str]] = {}
    for name, digest in digests.items():
        names.setdefault(digest, []).append(name)
    return _Contents(digests, names)


def _digest(tensor: Saved) -> str:
    """Return a hash of a tensor's bits; empty where they are all alike, or cannot be read."""
    try:
        bits = tensor.bits
    except DumpError:
        return ""
    if is_alike(bits):
        return ""
    return hashlib.blake2b(np.ascontiguousarray(bits).data, digest_size=16).hexdigest()


def notable(comparison: Comparison) -> str:
    """Return how many tensors have each verdict, in words."""
    counts = comparison.counts
    return listed((f"{counts[one]:,} {one}" for one in ("equal", "tied", *DIFFERENT, "not-compared") if counts[one]), 9)
