"""Tensors whose order nobody can check, and master copies of weights.

A buffer that every rank computes again (rotary frequencies, a mask) has no ids left, and the same numbers everywhere. A
plain tensor that is zero on some ranks and whole on others is either a term of a sum that one rank adds, as the bias of
a row-wise layer, or a copy that was never written: the ids do not show which. That copies agree and that shards differ
says nothing about where their elements belong, so that no such tensor may be called in order.

If a step is wrong for no reason that a rule knows, they are the first thing to look at. What is wrong with them shows
in the output, which names the first odd module instead. As long as the step is right, they are right.

The ids of a master copy in an optimizer's flat buffer are the places of its values in the weight that the job holds:
every disagreement is one between the two. Where the weight itself is wrong, that is the finding.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from shardviz.check.report import NotChecked, findings_in
from shardviz.check.values.copies import flat_values, is_constant
from shardviz.dump.records.base import WEIGHTS
from shardviz.errors import ShardvizError
from shardviz.explain.checkpoints.states import MisplacedMaster, RankDependentOffsets, StaleMaster
from shardviz.explain.finding import Finding
from shardviz.explain.placement.content import PlaceholderLeft
from shardviz.explain.placement.whole_run import OtherNumbersInBuffer, UncheckedWeights
from shardviz.relate.tolerance import SINGLE
from shardviz.relate.values import error_of
from shardviz.text import counted, listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from collections.abc import Set as AbstractSet

    from numpy.typing import NDArray

    from shardviz.check.order.case import Case, LaidOut
    from shardviz.dump.dump import Dump, Tensor
    from shardviz.layout.mesh import Coord


def check_recomputed(case: Case) -> Iterator[NotChecked]:
    """Yield a buffer that every rank computed again: it has no order to check."""
    if _is_whole_in_shape(case) and _is_computed_alike(case, case.ids):
        why = "every rank computes it again after the model is filled, with equal results: a step compares its values"
        yield NotChecked(case.name, why, "order")


def check_filled(case: Case) -> Iterator[Finding]:
    """Yield a weight that is one number on all ranks and differs in the unsharded model, if other weights have ids."""
    records = case.dump.files.ranks
    ranks = sorted(shard.rank for shard in case.shards.values() if 0 not in shard.body.local_shape)
    initial = case.initial
    is_filled = bool(ranks) and all(rank in records and case.name in records[rank].filled for rank in ranks)
    if not is_filled or initial is None or not _have_ids(case.dump):
        return
    numbers = {number for shard in initial.shards.values() for number in (flat_values(shard) or ())}
    if len(numbers) <= 1 and numbers != {0.0}:  # zeros have causes of their own
        value = f"{numbers.pop():g}" if numbers else "one number"
        sentence = f"every element is {value} on {named_ranks(ranks, MAX_LISTED)}; in the unsharded model they differ"
        yield case.finding(PlaceholderLeft(), ranks, sentence, held="one number everywhere")


def _have_ids(dump: Dump) -> bool:
    """Whether some weights have ids of the stamped model; a weight that is one number shows none."""
    names = dump.by_name("stamped", "param").keys() - dump.without_ids.keys()
    initial = (dump.find("initial", "param", name) for name in names)
    return any(tensor is not None and not all(map(is_constant, tensor.shards.values())) for tensor in initial)


def check_redrawn(case: Case) -> Iterator[NotChecked]:
    """Yield a tensor that every rank wrote after sharding: only its own values can be judged.

    They are compared as copies and as shards, and by a step. Where only some ranks have lost their ids, or values are
    not finite, it is `foreign`.
    """
    if not case.dump.files.run.reference and _is_written_everywhere(case) and _has_finite_values(case):
        why = (
            "the order of its elements: drawn, loaded or computed once the model was filled with ids, on every rank, "
            "so that none are left; copies and shards are compared by value"
        )
        yield NotChecked(case.name, why, "order")


def _is_written_everywhere(case: Case) -> bool:
    """Whether no rank has ids: other values everywhere, or one number among drawn weights."""
    coords = [coord for coord, shard in case.shards.items() if 0 not in shard.body.local_shape]
    numbers = set().union(*(_numbers(case, coord) for coord in coords))
    if numbers == {-1}:
        is_part = any(shard.body.local_shape != case.shape for shard in case.shards.values())
        return case.claimed is not None or case.tensor.role == "param" or is_part
    drawn = "values" in case.dump.without_ids.values() and case.tensor.role == "param"
    return len(numbers) == 1 and case.numel > 1 and drawn


def _numbers(case: Case, coord: Coord) -> set[int]:
    """Return the ids that a coordinate has, no more than two of them."""
    if coord in case.ids:
        ids = case.ids[coord]
        return {int(ids.min()), int(ids.max())}
    dims = case.regions[coord].dims
    first = np.ravel_multi_index([ranges[0][0] for ranges in dims], case.shape) if dims else 0
    last = np.ravel_multi_index([ranges[-1][1] - 1 for ranges in dims], case.shape) if dims else 0
    return {int(first) + 1, int(last) + 1, *({0} if any(len(set(ranges)) > 1 for ranges in dims) else ())}


def _has_finite_values(case: Case) -> bool:
    """Whether the model's own values were captured and are all finite."""
    initial = case.initial
    if initial is None:
        return False
    values = (flat_values(shard) for shard in initial.shards.values())
    return all(isinstance(number, float | int) and math.isfinite(number) for of in values for number in of or ())


def check_zeros(case: Case) -> Iterator[NotChecked]:
    """Yield a plain tensor that is zero on some ranks and whole on the others."""
    if _is_whole_in_shape(case) and case.regions and not any(map(np.any, case.ids.values())):
        ranks = sorted(map(case.rank, case.ids))
        why = (
            f"{len(ranks):,} of {len(case.shards):,} ranks hold only zeros (rank {ranks[0]} first) where the others "
            "hold all of it: terms of a sum, or copies that were never written"
        )
        yield NotChecked(case.name, why, "values")


def _is_whole_in_shape(case: Case) -> bool:
    """Whether a plain tensor has its whole shape on every rank, and values that aren't ids."""
    if case.claimed is not None or case.absent or not case.ids:
        return False
    return all(shard.body.local_shape == case.shape for shard in case.shards.values())


def _is_computed_alike(case: Case, ids: Mapping[Coord, NDArray[np.int64]]) -> bool:
    """Whether all ranks have equal numbers, stamped and original, that aren't all ids."""
    first = next(iter(ids.values()))
    initial = case.dump.find("initial", "buffer", case.name)
    alike = all(np.array_equal(first, local_ids) for local_ids in ids.values())
    if case.regions or not alike or not np.any(first == -1):
        return False
    if initial is None:  # a captured job has the stamped model only, whose other values a dump does not tell apart
        return case.tensor.role == "buffer" and not case.dump.files.run.reference
    return initial.is_equal_on_ranks(case.name)


WHY = (
    "placement: it has no ids and no reference; give its checkpoint (shardviz run --reference, or reference= of "
    "shardviz.capture), or stamp the model before it is sharded"
)

COMPLEX = (
    "placement: it has no reference, and no stamp is complex; copies of it are compared. If a checkpoint has it, give "
    "that (shardviz run --reference, or reference= of shardviz.capture)"
)


def check_unplaced(dump: Dump, explained: AbstractSet[str]) -> Iterator[NotChecked]:
    """Yield weights without ids, except those of one element, those already reported, and those made of others."""
    made = {name for record in dump.files.ranks.values() for name, _ in record.made_of}
    weights = [tensor for tensor in dump.at("stamped") if tensor.role in WEIGHTS]
    stamped = {name for tensor in weights for name in tensor.names}
    for tensor in dump.at("initial"):
        if tensor.role in WEIGHTS and math.prod(tensor.shape) > 1 and not (stamped and _is_whole(tensor)):
            why = COMPLEX if tensor.dtype.startswith("complex") else WHY
            yield from (
                NotChecked(name, why, "order") for name in tensor.names if name not in stamped | explained | made
            )


def _is_whole(tensor: Tensor) -> bool:
    """Whether every rank has all of a plain tensor; if stamped, its dtype cannot hold ids."""
    shards = tensor.shards.values()
    return all(shard.layout is None and shard.body.local_shape == tensor.shape for shard in shards)


MAX_LISTED = 3


RECOMPUTED = "computed again on every rank once the model was built", "numbers with the unsharded model's"
ZERO = "zero on some ranks only", "use: is it a term of a sum over ranks, or a copy to be broadcast"
"""What is odd about a weight that could not be checked, and what of it to compare."""


def with_suspects(
    of_step: Iterable[Finding | NotChecked], laid_out: LaidOut, weights: Iterable[Finding]
) -> list[Finding | NotChecked]:
    """Return a step's results with the weights to look at first in those that no rule explains.

    Args:
        weights: What was found of the weights: the step of a model that lacks some shows nothing.
    """
    results = list(of_step)
    if not any(map(_is_unexplained, results)):
        return results
    incomplete = (finding for finding in weights if finding.kind == "incomplete" and not finding.ranks)
    if absent := [finding.tensor for finding in incomplete if finding.tensor]:
        why = f"the step: its numbers come from a model without {listed(absent)}"
        explained = [result for result in results if result.tensor and not _is_unexplained(result)]
        return [*explained, NotChecked("", why, "step")]
    suspects = dict(_suspects(laid_out))
    others = (_other_numbers(laid_out.dump, name) for name, is_recomputed in suspects.items() if is_recomputed)
    other = next((cause for cause in others if cause is not None), None)
    odd = tuple((name, *(RECOMPUTED if is_recomputed else ZERO)) for name, is_recomputed in suspects.items())
    return [
        result.because(other or UncheckedWeights(odd, result.explanation))
        if suspects and _is_unexplained(result)
        else result
        for result in results
    ]


def _other_numbers(dump: Dump, name: str) -> OtherNumbersInBuffer | None:
    """Return the cause if a buffer that is computed again has other numbers than the unsharded model's."""
    sides = _before_step(dump, name)
    if sides is None or error_of(*sides) <= SINGLE:
        return None
    held, wanted = sides
    at = np.unravel_index(np.argmax(np.nan_to_num(np.abs(held - wanted), nan=np.inf)), held.shape)
    return OtherNumbersInBuffer(name, float(held[at]), float(wanted[at]))


def _before_step(dump: Dump, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return a buffer's numbers before the step and the unsharded model's; None if the dump lacks either."""
    tensors = dump.find("initial", "buffer", name), dump.find("reference", "buffer", name)
    try:
        held, wanted = (np.asarray(dump.values(one.first, name), np.float64) for one in tensors if one is not None)
    except (ShardvizError, ValueError):  # of a large tensor a dump has no numbers
        return None
    return (held, wanted) if held.shape == wanted.shape else None


def _is_unexplained(result: Finding | NotChecked) -> TypeGuard[Finding]:
    return isinstance(result, Finding) and result.kind == "wrong-value" and result.generic


def _suspects(laid_out: LaidOut) -> Iterator[tuple[str, bool]]:
    """Yield unchecked plain tensors' names, and whether every rank computes them again: others are zero on some."""
    for tensor in laid_out.dump.at("stamped"):
        for name in tensor.names if tensor.claimed is None else ():
            try:
                cases = laid_out.cases(tensor, name)
            except ShardvizError:  # it is not checked for that reason already
                continue
            if any(any(check_recomputed(case)) for case in cases):
                if (sides := _before_step(laid_out.dump, name)) is None or error_of(*sides) > SINGLE:
                    yield name, True
            elif any(any(check_zeros(case)) for case in cases):
                yield name, False


MOST_RANKS = 4
MASTER = ".fp32"
"""How the names of master copies end."""


def is_master(dump: Dump, name: str) -> bool:
    """Whether a tensor with ids is a master copy: neither a weight nor a moment."""
    stamp = dump.stamps.get(name)
    return stamp is not None and stamp.role == "optim" and name.endswith(MASTER)


def check_master(case: Case) -> Iterator[Finding]:
    """Yield findings if a master copy has elements of a different place, or a different weight."""
    wrong = {coord: ids for coord in case.shards if (ids := _wrong_ids(case, coord)) is not None}
    if not wrong:
        return
    texts = {case.rank(coord): _held_text(case, coord, ids) for coord, ids in wrong.items()}
    elsewhere = {rank: text for rank, text in texts.items() if text}
    ranks = tuple(texts)
    of = f"{len(ranks):,} of {len(case.shards):,} ranks"
    if elsewhere:
        sentence = "; ".join(f"rank {rank} has {text}" for rank, text in sorted(elsewhere.items())[:MOST_RANKS])
        text = f"{of} do not have the elements in the master copy that they claim: {sentence}"
        yield case.finding(MisplacedMaster(), ranks, text)
        return
    lost = sum(int(np.count_nonzero(ids != _expected_ids(case, coord))) for coord, ids in wrong.items())
    text = f"cast to its dtype, {lost:,} of {counted(case.numel, 'element')} differ from it"
    yield case.finding(StaleMaster(), ranks, f"the master copy on {of} is not the weight's: {text}")


def _wrong_ids(case: Case, coord: Coord) -> NDArray[np.int64] | None:
    """Return a coordinate's ids; None if they are those that it claims."""
    ids = case.local_ids(coord).ravel()
    return None if np.array_equal(ids, _expected_ids(case, coord)) else ids


def _expected_ids(case: Case, coord: Coord) -> NDArray[np.int64]:
    """Return the ids that a coordinate claims, as many as it has; without a claim those from 1."""
    size = case.local_ids(coord).size
    return np.resize(case.claimed_ids(coord) if case.claimed is not None else np.arange(1, size + 1), size)


def _held_text(case: Case, coord: Coord, ids: NDArray[np.int64]) -> str:
    """Say which elements a shard mostly has instead, of the weight or a different one."""
    expected = _expected_ids(case, coord)
    moved, is_foreign = (ids != expected) & (ids > 0), ids < -1
    half = np.count_nonzero(ids != expected) / 2
    if moved.sum() >= half and moved.any():
        at = int(np.argmax(moved))
        return f"element {ids[at] - 1} of it but says that it has element {expected[at] - 1}"
    if is_foreign.sum() >= half and is_foreign.any():
        at = int(np.argmax(is_foreign))
        name, element = case.owner(-1 - int(ids[at]))
        return f"element {element} of {name} but says that it has element {expected[at] - 1} of this one"
    return ""


def of_masters(dump: Dump, results: list[Finding | NotChecked]) -> list[Finding | NotChecked]:
    """Return what was found, without master copies whose weights are wrong themselves.

    On ranks that have some elsewhere, those that are not found are taken to be elsewhere too: they are in the
    same buffers, and cut where the buffers end.
    """
    findings = findings_in(results)
    wrong = {finding.tensor for finding in findings}
    moved = {rank for finding in findings if isinstance(finding.explanation, MisplacedMaster) for rank in finding.ranks}
    return [
        outcome.because(MisplacedMaster()) if _is_stale(outcome) and moved & set(outcome.ranks) else outcome
        for outcome in results
        if not (is_master(dump, outcome.tensor) and outcome.tensor.rpartition(".")[0] in wrong)
    ]


def _is_stale(result: Finding | NotChecked) -> TypeGuard[Finding]:
    return isinstance(result, Finding) and isinstance(result.explanation, StaleMaster)


def check_fragments(dump: Dump) -> Iterator[Finding]:
    """Yield tensors that ranks do not divide among themselves, by what each says that it has."""
    spans_of: dict[str, dict[int, tuple[int, int]]] = {}
    for rank, record in dump.files.ranks.items():
        for fragment in record.fragments:
            spans_of.setdefault(fragment.name, {})[rank] = fragment.start, fragment.size
    for name, spans in spans_of.items():
        if name in dump.stamps:
            numel = dump.stamps[name].last - dump.stamps[name].first + 1
            parts = [f"{_span(start, size)} on rank {rank}" for rank, (start, size) in sorted(spans.items()) if size]
            wrong = _gaps_text(spans, numel)
            yield RankDependentOffsets().finding(
                name,
                tuple(sorted(spans)),
                f"ranks say that they have {listed(parts, MOST_RANKS)} of its {counted(numel, 'element')}: {wrong}",
            )


def _span(start: int, size: int) -> str:
    return f"element {start}" if size == 1 else f"elements {start} to {start + size - 1}"


def _gaps_text(spans: dict[int, tuple[int, int]], numel: int) -> str:
    """Say what of a tensor no rank has, or several have, or is not in it."""
    end, faults = 0, []
    for start, size in sorted(span for span in spans.values() if span[1]):
        if start > end:
            faults.append(f"{_span(end, start - end)} on none")
        elif start < end:
            faults.append(f"{_span(start, end - start)} on several")
        end = max(end, start + size)
    if end > numel:
        faults.append(f"{_span(numel, end - numel)} not in it")
    elif end < numel:
        faults.append(f"{_span(end, numel - end)} on none")
    return listed(faults, MOST_RANKS) or "their buffers have room for other parts of it"
