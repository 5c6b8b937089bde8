"""Parameters in the flat buffers of DeepSpeed's ZeRO: their bytes in each rank's file.

Under stages 1 and 2 a group's parameters lie one behind the other, and ranks have parts of the whole; under stage 3
each parameter is divided among the ranks, and each rank's parts lie one behind the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from shardviz.checkpoint.formats.pickle_reader import PickledObject
from shardviz.checkpoint.records import ByteRange, Chunk, Problem
from shardviz.errors import DumpError
from shardviz.explain.checkpoints.files import MissingZeroFile, MixedZeroFiles, RoundRobinGradients
from shardviz.layout.dtypes import itemsize
from shardviz.text import counted, listed, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardviz.checkpoint.formats.archive import Archive, FileTensor

Box = tuple[tuple[int, ...], tuple[int, ...], int]
"""The offsets and sizes of a box, and the number of elements of the stretch before it."""

MASTER = "fp32"
Shapes = dict[str, tuple[int, ...]]


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that a stretch of a flattened tensor consists of, in order.

    Args:
        start: The first element of the stretch.
        stop: The element behind it.

    Example:
        >>> list(boxes((3, 4), 2, 9))
        [((0, 2), (1, 2), 0), ((1, 0), (1, 4), 2), ((2, 0), (1, 1), 6)]
    """
    at = start
    while at < stop:
        offsets, sizes = _box(shape, at, stop - at)
        yield offsets, sizes, at - start
        at += math.prod(sizes)


def _box(shape: tuple[int, ...], at: int, most: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the largest box that begins at an element and is at most so many elements in a row."""
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offsets = tuple(at // step % size for step, size in zip(steps, shape, strict=True))
    dim = next((dim for dim, step in enumerate(steps) if at % step == 0 and step <= most), len(shape))
    if dim == len(shape):
        return offsets, (1,) * len(shape)
    length = min(most // steps[dim], shape[dim] - offsets[dim])
    return offsets, (1,) * dim + (length,) + shape[dim + 1 :]


@dataclass(frozen=True)
class RankFile:
    """One data-parallel rank's optimizer file.

    Attributes:
        stage: The stage of ZeRO; 0 if it does not say.
        world: The number of ranks that it says there are; 0 if it does not.
        buffers: Each group's buffers by what they are of: `fp32`, `exp_avg`.
        paddings: The elements behind each parameter of each group.
        links: Where it says that its fragment of a parameter is, in each group: start and number.
    """

    file: str
    stage: int
    world: int
    buffers: list[dict[str, FileTensor]]
    paddings: list[list[int]]
    links: list[dict[str, tuple[int, int]]]

    @classmethod
    def read(cls, archive: Archive, file: str) -> RankFile:
        """Take the buffers of a file out of what was read of it.

        Raises:
            DumpError: It has no optimizer state, or of another shape.
        """
        state = archive.tree.get("optimizer_state_dict") if type(archive.tree) is dict else None
        if type(state) is not dict:
            raise DumpError(f"{archive.path} has no optimizer_state_dict", "copy the checkpoint again")
        masters = state.get("single_partition_of_fp32_groups")
        masters = masters if type(masters) is list else state.get("fp32_flat_groups")
        if type(masters) is not list:
            raise DumpError(
                f"{archive.path} has neither single_partition_of_fp32_groups nor fp32_flat_groups",
                "give a checkpoint of ZeRO stage 1, 2 or 3",
            )
        inner = state.get("base_optimizer_state") or state.get("optimizer_state_dict")
        states = inner.get("state") if type(inner) is dict else None
        buffers = [
            _buffers(archive, master, states.get(number) if type(states) is dict else None)
            for number, master in enumerate(masters)
        ]
        links = [_links(one) for one in _as_list(state.get("param_slice_mappings"))]
        paddings = [_ints(one) for one in _as_list(state.get("param_alignment_paddings"))]
        return cls(file, _stage(state), _count(state), buffers, paddings, links)


@dataclass
class Unflattened:
    """The tensors in all ranks' buffers.

    Attributes:
        tensors: By parameter and kind: the shape, the dtype and the chunks.
    """

    tensors: dict[tuple[str, str], tuple[tuple[int, ...], str, list[Chunk]]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def lay_out(
    ranks: Mapping[int, RankFile], groups: Sequence[Shapes], world: int, models: Sequence[int] | None
) -> Unflattened:
    """Lay the buffers of ranks back into parameters.

    Args:
        ranks: The optimizer files by rank.
        groups: The shapes of the parameters of each group, in order.
        world: The number of ranks that the model's file says there are.
        models: The ranks whose model files are there, where each rank has one.
    """
    unflattened = Unflattened()
    unflattened.problems += _missing(ranks, world, models)
    if not ranks:
        return unflattened
    odd = next((one for one in ranks.values() if len(one.buffers) != len(groups) and one.stage != 3), None)
    if odd is not None:
        has = counted(len(odd.buffers), "buffer")
        text = f"{printable(odd.file)} has {has}, param_shapes {counted(len(groups), 'group')}"
        unflattened.problems.append(Problem("", text, MixedZeroFiles()))
        return unflattened
    if any(one.stage == 3 for one in ranks.values()):
        _lay_out_3(unflattened, ranks, groups, world)
        return unflattened
    for number, shapes in enumerate(groups):
        _lay_out_2(unflattened, ranks, shapes, number, world)
    return unflattened


def _missing(ranks: Mapping[int, RankFile], world: int, models: Sequence[int] | None) -> Iterator[Problem]:
    """Yield files of ranks that are not there, or are of another number of ranks."""
    if not ranks:
        text = "no zero_pp_rank_*_optim_states.pt: masters and moments are missing"
        yield Problem("", text, MissingZeroFile())
        return
    every = range(min(world, 1 << 16))
    for what, there in (("optimizer", ranks), ("model", every if models is None else models)):
        if gone := [rank for rank in every if rank not in there]:
            text = f"{len(gone):,} of {world:,} ranks have no {what} file: {listed(gone, 8)}"
            yield Problem("", text, MissingZeroFile())
    others = {one.file: one.world for one in ranks.values() if one.world not in (0, world)}
    extra = [one.file for rank, one in ranks.items() if rank >= world]
    if others or extra:
        file = next(iter(others), extra[0] if extra else "")
        says = f"says that there are {others[file]} ranks" if others else f"is of a rank beyond the {world} there are"
        text = f"{printable(file)} {says}, the model's file {world}"
        yield Problem("", text, MixedZeroFiles(), "incomplete")


def _lay_out_2(
    unflattened: Unflattened, ranks: Mapping[int, RankFile], shapes: Shapes, number: int, world: int
) -> None:
    """Lay out a group of stage 1 or 2: parameters in a row, cut evenly over the ranks."""
    lengths = {rank: {kind: one.shape[0] for kind, one in file.buffers[number].items()} for rank, file in ranks.items()}
    part_size = max((length for kinds in lengths.values() for length in kinds.values()), default=0)
    paddings = next((file.paddings[number] for file in ranks.values() if len(file.paddings) > number), [])
    places = _places(shapes, paddings)
    expected = sum(math.prod(shape) for shape in shapes.values()) + sum(paddings)
    has = sum(kinds.get(MASTER, 0) for kinds in lengths.values())
    if len(ranks) >= world and not 0 <= has - expected < 2 * world + part_size * (has > expected):
        text = f"group {number} has {has:,} elements in its ranks' buffers, and {expected:,} in param_shapes"
        unflattened.problems.append(Problem("", text, MixedZeroFiles()))
        return
    for rank, file in ranks.items():
        for kind, stored in file.buffers[number].items():
            for name, (at, shape) in places.items():
                start = max(rank * part_size, at)
                stop = min(rank * part_size + stored.shape[0], at + math.prod(shape))
                if start < stop:
                    where = ByteRange(file.file, stored.start + (start - rank * part_size) * itemsize(stored.dtype), 0)
                    chunks = chunks_of(shape, start - at, stop - at, where, stored.dtype)
                    unflattened.tensors.setdefault((name, kind), (shape, stored.dtype, []))[2].extend(chunks)
        unflattened.problems += _unlike_fragments(file, number, rank * part_size, part_size, places)


def _places(shapes: Shapes, paddings: Sequence[int]) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return the offset of each parameter in a group's buffer, with its shape."""
    at, places = 0, {}
    for index, (name, shape) in enumerate(shapes.items()):
        places[name] = at, shape
        at += math.prod(shape) + (paddings[index] if index < len(paddings) else 0)
    return places


def _unlike_fragments(
    file: RankFile, number: int, begin: int, part_size: int, places: Mapping[str, tuple[int, tuple[int, ...]]]
) -> Iterator[Problem]:
    """Yield the first fragment whose link contradicts the order of the parameters."""
    links = file.links[number] if len(file.links) > number else {}
    for name, (start, size) in links.items():
        at, shape = places.get(name, (0, ()))
        expected = max(at, begin) - begin, min(at + math.prod(shape), begin + part_size) - max(at, begin)
        if name in places and expected != (start, size):
            has = f"elements {expected[0]} to {expected[0] + expected[1] - 1}" if expected[1] > 0 else "no elements"
            text = (
                f"{printable(file.file)} links its fragment to elements {start} to {start + size - 1} of group {number}"
            )
            text += f", and param_shapes give it {has} there"
            yield Problem(name, text, RoundRobinGradients())


def _lay_out_3(unflattened: Unflattened, ranks: Mapping[int, RankFile], groups: Sequence[Shapes], world: int) -> None:
    """Lay out stage 3: each parameter is cut over the ranks, and a rank's parts are in a row."""
    shapes = {name: shape for one in groups for name, shape in one.items()}
    expected = sum(-(-math.prod(shape) // world) for shape in shapes.values())
    for rank, file in ranks.items():
        for kind in dict.fromkeys(kind for one in file.buffers for kind in one):
            spans = [one[kind] for one in file.buffers if kind in one]
            has = sum(stored.shape[0] for stored in spans)
            if has != expected:
                elements = f"{has:,} elements of {kind}"
                text = f"{printable(file.file)} has {elements}, and its part of param_shapes is {expected:,}"
                unflattened.problems.append(Problem("", text, MixedZeroFiles()))
                continue
            _lay_out_rank(unflattened, (rank, world), file.file, kind, spans, shapes)


def _lay_out_rank(
    unflattened: Unflattened, at: tuple[int, int], file: str, kind: str, spans: Sequence[FileTensor], shapes: Shapes
) -> None:
    """Lay out one rank's buffers of a kind, which parameters may reach across."""
    rank, world = at
    ends = list(accumulate(stored.shape[0] for stored in spans))
    position, index = 0, 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        part_size = -(-size // world)
        first, done = rank * part_size, 0
        while done < part_size:
            while ends[index] <= position:
                index += 1
            stored, begin = spans[index], ends[index] - spans[index].shape[0]
            length = min(part_size - done, ends[index] - position)
            start, stop = min(first + done, size), min(first + done + length, size)
            where = ByteRange(file, stored.start + (position - begin) * itemsize(stored.dtype), 0)
            chunks = chunks_of(shape, start, stop, where, stored.dtype)
            unflattened.tensors.setdefault((name, kind), (shape, stored.dtype, []))[2].extend(chunks)
            position, done = position + length, done + length


def chunks_of(shape: tuple[int, ...], start: int, stop: int, where: ByteRange, dtype: str) -> list[Chunk]:
    """Return the chunks that a stretch of a flattened tensor consists of.

    Args:
        start: The stretch's first element.
        stop: The element behind it.
        where: The file, and the byte at which the stretch begins.
    """
    width = itemsize(dtype)
    return [
        Chunk(offsets, sizes, ByteRange(where.file, where.start + before * width, math.prod(sizes) * width), dtype)
        for offsets, sizes, before in boxes(shape, start, stop)
    ]


def _buffers(archive: Archive, master: Any, states: Any) -> dict[str, FileTensor]:
    """Return the flat buffers of a group: its master weights and its optimizer states."""
    buffers = {}
    for kind, pickled in {MASTER: master, **(states if type(states) is dict else {})}.items():
        stored = archive.tensor(pickled, str(kind)) if type(kind) is str else None
        if stored is not None and len(stored.shape) == 1 and stored.strides == (1,) and itemsize(stored.dtype):
            buffers[printable(kind)] = stored
    return buffers


def _links(value: Any) -> dict[str, tuple[int, int]]:
    links = {}
    for name, pickled in value.items() if type(value) is dict else ():
        start, size = (
            (pickled.field("start"), pickled.field("numel")) if type(pickled) is PickledObject else (None, None)
        )
        if type(name) is str and type(start) is int and type(size) is int:
            links[name] = start, size
    return links


def _as_list(value: Any) -> list[Any]:
    return value if type(value) is list else []


def _ints(value: Any) -> list[int]:
    return [one if type(one) is int and 0 <= one < 1 << 20 else 0 for one in _as_list(value)]


STAGES = ("disabled", "optimizer_states", "gradients", "weights")
"""DeepSpeed's names of its stages."""


def _stage(state: dict[str, Any]) -> int:
    pickled = state.get("zero_stage")
    stage = (
        pickled.args[0] if type(pickled) is PickledObject and type(pickled.args) is tuple and pickled.args else pickled
    )
    stage = STAGES.index(stage) if stage in STAGES else stage  # as some Pythons pickle it
    return stage if type(stage) is int else 0


def _count(state: dict[str, Any]) -> int:
    counts = state.get("partition_count")
    most = max((one for one in counts if type(one) is int), default=0) if type(counts) is list else counts
    return most if type(most) is int else 0
