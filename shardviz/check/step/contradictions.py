"""Findings before numbers are compared: errors, contradictory shapes, absent gradients.

Three rules for `.grad` that is None if the unsharded model has a gradient: on some ranks only; on every rank, because
nothing flows back to it; on every rank, because FSDP keeps it for a later backward, which is right until an optimizer
steps without it. A gradient of zeros may as well be None, and a step that leaves no gradient at all has cleared them.

In gradients that are zero in the unsharded model's step, too, a missing reduction does not show: the gradient of one
LoRA matrix while the other is zero, and those of all behind a scale that starts at zero.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shardviz.check.report import NotChecked
from shardviz.check.step.comparison import Compared, whole_of
from shardviz.explain.step.gradients import CutGraph, GradientOnSomeRanks, ReductionSwitchedOff
from shardviz.explain.step.losses import PaddingRead
from shardviz.explain.step.raised import (
    BackwardOfLossParallel,
    CollectiveOfDtensor,
    CutHeads,
    MixedDtensor,
    ShardedModelRaises,
    UnequalParts,
    UnevenShapes,
    UnlikeSizes,
    UnlikeSplits,
    UnsupportedSharding,
    ViewOfWhole,
)
from shardviz.explain.step.whole_step import (
    CopiesSideBySide,
    DifferentOutput,
    PartLabeledWhole,
    SplitTwice,
    UncheckedLabel,
)
from shardviz.explain.templates import number
from shardviz.layout.mesh import ranks_by
from shardviz.layout.notation import write
from shardviz.text import counted, folded_names, listed, named_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardviz.check.step.evidence import Evidence
    from shardviz.dump.dump import Dump
    from shardviz.dump.records.step import RaisedRecord
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding

MAX_LISTED = 8
MOST_WEIGHTS = 2
"""So many tensors of a module are named with their layouts."""
MOST_RANKS_OR_DIMS = 4
"""Smaller numbers in the text of an error are mostly dims or ranks."""
MOST_ZERO = 4
"""Parameters that are named whose gradient is zero throughout."""

NONE_ANYWHERE = "its gradient: .grad is None on every rank after the step"
HELD_NOWHERE = "its gradient: no rank has a tensor of this name"


def check_raised(dump: Dump) -> Iterator[Finding]:
    """Yield the errors that only the sharded model raised."""
    errors = ((rank, raised) for rank, record in dump.files.ranks.items() for raised in record.raised)
    for raised, ranks in ranks_by(errors).items():
        layouts = _weights_of(dump, raised.module)
        cause = _cause(dump, raised, has_weights=bool(layouts))
        sentence = f"the sharded model's {raised.what} raises, and the unsharded model's does not: {raised.error}"
        text = f"{sentence.rstrip('.')}; {layouts}" if layouts else sentence
        yield cause.finding("", tuple(ranks), text)


OF_SIZES = "sizes?|shapes?|divisible|divide|dimensions?|mat1 and mat2|out of (range|bounds)"

CAUSES: tuple[tuple[re.Pattern[str], type[ShardedModelRaises]], ...] = (
    (
        re.compile(r"(nll_loss_backward|_log_softmax_backward)\S* got mixed torch\.Tensor and DTensor"),
        BackwardOfLossParallel,
    ),
    (re.compile(r"mixed torch\.Tensor and DTensor"), MixedDtensor),
    (re.compile(r"Operator _?c10d[\w.]* does not have a sharding"), CollectiveOfDtensor),
    (re.compile(r"sharding (strategy|rule|prop)", re.IGNORECASE), UnsupportedSharding),
    (re.compile(rf"\b({OF_SIZES})\b", re.IGNORECASE), UnevenShapes),
)
"""The cause by what an exception speaks of; the first that fits counts."""

VIEW = re.compile(r"shape '\[([-\d, ]+)\]' is invalid for input of size (\d+)")
HEADS = re.compile(r"([\d, ]+), -1, (\d+)")
UNFLATTEN = re.compile(r"Provided sizes \[-1, (\d+)\] don't multiply up to the size of dim \d+ \((\d+)\)")
PRODUCT = re.compile("same reduction dim|mat1 and mat2")

UNLIKE_SIZES = tuple(
    re.compile(pattern)
    for pattern in (
        r"size of tensor a \((?P<first>\d+)\) must match the size of tensor b \((?P<second>\d+)\)",
        r"mat1 and mat2 shapes cannot be multiplied \(\d+x(?P<first>\d+) and (?P<second>\d+)x\d+\)",
        r"same reduction dim, but got \[.*?(?P<first>\d+)\] X \[(?P<second>\d+), \d+\]",
        r"batch2 tensor to be: \[(?P<first>\d+), (\d+)\] but got: \[(?P<second>\d+), \2\]",
        r"batch2 tensor to be: \[(\d+), (?P<first>\d+)\] but got: \[\1, (?P<second>\d+)\]",
        r"expanded size of the tensor \((?P<first>\d+)\) must match the existing size \((?P<second>\d+)\)",
        r"Expected size (?P<first>\d+) but got size (?P<second>\d+) for tensor number",
        r"Expected input batch_size \((?P<first>\d+)\) to match target batch_size \((?P<second>\d+)\)",
    )
)
"""How torch says that two sizes differ."""


def _cause(dump: Dump, raised: RaisedRecord, *, has_weights: bool) -> ShardedModelRaises:
    """Return the cause of an error by the sizes that it speaks of, or else by its words.

    Args:
        has_weights: Whether the module has weights in whose forward it was raised.
    """
    error = raised.error
    if (of_parts := _unequal_parts(dump, raised) or _cut_heads(error)) is not None:
        return of_parts
    if has_weights and PRODUCT.search(error):
        return UnlikeSplits()
    by_words = (cause() for words, cause in CAUSES if words.search(error))
    return _ratio_of_sizes(dump, error) or next(by_words, ShardedModelRaises())


def _ratio_of_sizes(dump: Dump, error: str) -> ShardedModelRaises | None:
    """Return the cause of an error with two sizes if an axis makes one of the other."""
    view = VIEW.search(error)
    match = next(filter(None, (words.search(error) for words in UNLIKE_SIZES)), None)
    if view is not None and "-1" not in view[1]:
        less, more = int(view[2]), math.prod(map(int, view[1].split(", ")))
    elif match is not None:
        less, more = sorted((int(match["first"]), int(match["second"])))
    else:
        return None
    mesh = dump.files.mesh
    axes = " or ".join(axis for axis in mesh.axes if 0 < less < more == less * mesh.axis_size(axis))
    cause = ViewOfWhole if view is not None else UnlikeSizes
    return cause(less, more, more // less, axes) if axes else None


def _unequal_parts(dump: Dump, raised: RaisedRecord) -> UnequalParts | None:
    """Return the dim whose unequal parts an error is about: it has the size of the first, or of as many of these.

    Of an error in a module, only the tensors of that module count.
    """
    text = raised.error.rpartition(": ")[2]
    if re.search(r"size|shape|dim\b", text) is None:
        return None
    sizes = {*map(int, re.findall(r"\d+", text)), *_last_sizes(text)}
    for tensor in dump.tensors:
        layout = tensor.claimed
        is_within = not raised.module or any(name.startswith(f"{raised.module}.") for name in tensor.names)
        if tensor.moment != "stamped" or layout is None or not is_within:
            continue
        for length, chain in zip(layout.shape, layout.chains, strict=True):
            ranks = dump.files.mesh.axis_size(str(chain[0])) if len(chain) == 1 else 1
            first = -(-length // ranks)
            if ranks * first != length and first > MOST_RANKS_OR_DIMS and {first, ranks * first} & sizes:
                parts = (max(min(first, length - first * rank), 0) for rank in range(ranks))
                return UnequalParts(length, str(chain[0]), listed(parts, MAX_LISTED))
    return None


def _last_sizes(error: str) -> Iterator[int]:
    """Yield what a tensor that cannot be viewed has behind the first dims of the view, if these are its own."""
    if (view := VIEW.search(error)) is None:
        return
    size = int(view[2])
    for dim in map(int, view[1].split(", ")):
        if dim < 1 or size % dim:
            return
        size //= dim
        yield size


def _cut_heads(error: str) -> CutHeads | None:
    """Return the size of heads, the last of a view's, of which a rank has no whole number."""
    if match := UNFLATTEN.search(error):
        size, held = map(int, match.groups())
        return CutHeads(held, size)
    if (view := VIEW.search(error)) is None or (match := HEADS.fullmatch(view[1])) is None:
        return None
    held, rest = divmod(int(view[2]), math.prod(map(int, match[1].split(", "))))
    size = int(match[2])
    return CutHeads(held, size) if not rest and held % size else None


def _weights_of(dump: Dump, module: str) -> str:
    """Say how a module's own tensors are split."""
    layouts = {
        name: write(tensor.claimed)
        for tensor in dump.tensors
        for name in tensor.names
        if module and name.rpartition(".")[0] == module and tensor.claimed and tensor.moment == "stamped"
    }
    return listed([f"{name} is {layout}" for name, layout in layouts.items()], MOST_WEIGHTS)


def check_result_shape(comparison: Compared) -> Finding | None:
    """Return the finding if a result's shape differs from the unsharded model's, or from the one its label gives."""
    if comparison.claimed is None or comparison.claimed.flat:
        return None
    what, held, expected = comparison.what, list(comparison.claimed.shape), list(comparison.wanted.shape)
    if held != expected:
        cause = _of_sizes(comparison, held, expected)
        if isinstance(cause, PaddingRead):
            behind = (*(slice(None),) * cause.dim, slice(cause.size, None))
            if all(bool(np.isneginf(values[behind]).all()) for values in comparison.values.values()):
                return None  # as logits are before a softmax that leaves the padding out
        sentence = f"the {what} is {held} over all ranks, {comparison.whose} is {expected}"
        return comparison.finding(cause, sentence, tuple(sorted(comparison.values)))
    wrong = [rank for rank, values in comparison.values.items() if values.shape != comparison.regions[rank].shape]
    if not wrong:
        return None
    rank = min(wrong)
    shapes = list(comparison.values[rank].shape), list(comparison.regions[rank].shape)
    sentence = f"the {what} is {shapes[0]} on rank {rank}; its placements give {shapes[1]}"
    return comparison.finding(UncheckedLabel(), sentence, tuple(sorted(wrong)))


def _of_sizes(comparison: Compared, held: list[int], expected: list[int]) -> Cause:
    """Return the cause of a result that is larger or smaller than the unsharded model's."""
    if padding := _padding_of(comparison, held, expected):
        return padding
    mesh = comparison.mesh
    sizes = {axis: mesh.axis_size(axis) for axis in mesh.long_axes}
    sides = zip(held, expected, strict=True) if len(held) == len(expected) else ()
    for dim, (length, reference_length) in enumerate(sides):
        larger = [axis for axis, size in sizes.items() if length == reference_length * size]
        smaller = [axis for axis, size in sizes.items() if length * size == reference_length]
        if larger:
            return CopiesSideBySide(dim, length, " or ".join(larger), sizes[larger[0]], reference_length)
        if smaller:
            chain = comparison.claimed.chains[dim] if comparison.claimed is not None else ()
            split, size = [axis for axis in smaller if axis in chain], sizes[smaller[0]]
            if split:
                return SplitTwice(dim, split[0], length, size, reference_length)
            return PartLabeledWhole(dim, length, " or ".join(smaller), size, reference_length)
    return DifferentOutput()


def _padding_of(comparison: Compared, held: list[int], expected: list[int]) -> Cause | None:
    """Return the cause of a result that is the unsharded model's and goes on behind it along one dim."""
    longer = [dim for dim, sizes in enumerate(zip(held, expected, strict=False)) if sizes[0] > sizes[1]]
    is_one = len(held) == len(expected) and len(longer) == 1 and comparison.role == "output"
    if not is_one or any(own < wanted for own, wanted in zip(held, expected, strict=True)):
        return None
    wanted = comparison.wanted
    cut = [values[tuple(map(slice, expected))] for values in comparison.values.values()]
    is_whole = all(values.shape == wanted.shape and comparison.near(values, wanted) for values in cut)
    dim = longer[0]
    if not is_whole or held[dim] % expected[dim] == 0:  # copies side by side
        return None
    return PaddingRead(dim, expected[dim], held[dim], is_returned=True)


def check_no_gradient(evidence: Evidence) -> Iterator[Finding | NotChecked]:
    """Yield what is known of parameters without a gradient, on some ranks or on all."""
    dump = evidence.dump
    for finding in check_absent_gradients(dump):
        comparison = evidence.gradients.get(finding.tensor)
        yield finding.seen_in(comparison) if comparison is not None else finding
    absent = list(evidence.without_gradient)
    yield from _held_back(evidence, [name for name in absent if name in evidence.held_back])
    remaining = [name for name in absent if name not in evidence.held_back]
    cut = [name for name in remaining if is_due(dump, name) and _holders(dump, name)]
    is_judged = bool(evidence.gradients) and not any(
        one.wrong for one in evidence.results if one.role == "output" or one.name == "loss" if not one.incomparable
    )
    if cut and is_judged:
        more = f", as it is for {counted(len(cut) - 1, 'other')} ({listed(cut[1:], MAX_LISTED)})" if cut[1:] else ""
        text = f"no rank has a gradient of it after the step (.grad is None){more}, and the unsharded model has"
        first, *others = (CutGraph().finding(name, _holders(dump, name), text) for name in cut)
        yield replace(first, others=tuple(others))
        remaining = [name for name in remaining if name not in cut]
    for name in remaining:
        yield NotChecked(name, NONE_ANYWHERE if _holders(dump, name) else HELD_NOWHERE, "step")


def check_absent_gradients(dump: Dump) -> Iterator[Finding]:
    """Yield parameters without a gradient on some of the ranks that hold a part of them."""
    for name, tensor in dump.by_name("step", "grad").items():
        missing = (rank for rank in _holders(dump, name) if rank not in tensor.shards)
        absent = tuple(rank for rank in missing if rank in dump.files.ranks)
        if absent and is_due(dump, name):
            yield GradientOnSomeRanks().finding(
                name,
                absent,
                f"{len(absent):,} of {len(absent) + len(tensor.shards):,} ranks that hold it have no gradient after "
                f"the step (.grad is None): {named_ranks(absent, MAX_LISTED)}",
            )


def _holders(dump: Dump, name: str) -> tuple[int, ...]:
    """Return the ranks that hold elements of a weight."""
    weight = dump.find("initial", "param", name) or dump.find("stamped", "param", name)
    if weight is None:
        return ()
    return tuple(rank for rank, shard in weight.shards.items() if math.prod(shard.body.local_shape))


def is_due(dump: Dump, name: str) -> bool:
    """Whether the unsharded model has a gradient that is not zero everywhere; or none is known."""
    gradient = whole_of(dump, "grad", name)
    return gradient is None or bool(np.any(gradient))


def _held_back(evidence: Evidence, names: Sequence[str]) -> Iterator[Finding | NotChecked]:
    """Yield what is known of parameters without a gradient because FSDP holds it back.

    A step of one backward may be the first micro-batch of several. If an optimizer stepped, or if the step ran several
    micro-batches, no later backward reduces the gradient.
    """
    if not names:
        return
    is_stepped = any(tensor.role == "param" for tensor in evidence.dump.at("step"))
    if not is_stepped and evidence.num_runs < 2:
        why = "its gradient: FSDP keeps it for a later backward (set_requires_gradient_sync or set_requires_all_reduce)"
        yield from (NotChecked(name, why, "step") for name in names)
        return
    when = "the optimizer steps while" if is_stepped else f"after the {evidence.num_runs} micro-batches of the step"
    sentence = f"{when} .grad is None on every rank: FSDP holds the gradient back"
    for name in names:
        yield ReductionSwitchedOff().finding(name, _holders(evidence.dump, name), sentence)


def check_held_back(evidence: Evidence, result: Compared) -> Finding | None:
    """Return the finding if a gradient is wrong because FSDP still holds a part of it back."""
    if result.name not in evidence.held_back:
        return None
    far = f"the gradient is off by up to {number(result.farthest)}: after the step FSDP holds a part of it back"
    return result.finding(ReductionSwitchedOff(), far, kind="wrong-value")


def check_zero_gradients(dump: Dump, earlier: Sequence[Finding]) -> Iterator[NotChecked]:
    """Report once the parameters whose gradient shows nothing on several ranks, without those of earlier findings."""
    earlier_names = {finding.tensor for finding in earlier}
    of_ranks = dump.by_name("step", "grad")
    on_several = {name for name, gradient in of_ranks.items() if len(gradient.shards) > 1} - earlier_names
    wholes = dump.by_name("reference", "grad").items()
    names = [name for name, whole in wholes if name in on_several and not np.any(dump.values(whole.first, name))]
    if names:
        whose = folded_names(names, MOST_ZERO)
        text = "'s gradient: it is" if len(names) == 1 else f": their {len(names)} gradients are"
        why = f"{whose}{text} zero in every element, so a missing or repeated reduction would not show"
        yield NotChecked("", why, "step")
