"""Copies of parameters that a script makes and steps by its own code, in parameters' place.

Mixed precision steps a copy of each parameter in float32, ZeRO by hand a part of one, or this rank's part of all of
them in one row. Nothing but their values says of which elements they are copies, so they are looked up by these. If the
values don't agree, as of copies from before a broadcast, their shapes and order say it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import distributed
from torch.utils.weak import WeakIdKeyDictionary

from shardviz.dump.records.tensors import FlatRecord
from shardviz.groups import in_groups
from shardviz.live.capture.meshes import of_flat_param
from shardviz.live.claims.local import FlatParam, Local
from shardviz.live.compat.meshes import local_of
from shardviz.live.compat.worlds import groups_here

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

Stretch = tuple[int, int, int, int]
"""The number of a parameter, the first of its elements, where it is in a row, and how many elements are."""

MAX_PADDING = 1 << 10
"""A row of parameters is made longer by no more elements, so that ranks' parts are equal."""
LEAST_PART = 0.5
"""So large a part of what optimizers step must be copies of the parameters, or none of it counts as one."""
ROUNDINGS, LEAST_STALE = 2.0, 0.1
"""A copy has other values if so large a part of it is farther off than so many roundings of the parameter's."""
OF_DATA = "dp", "data", "zero", "fsdp"
"""What groups are called along which optimizers are divided."""
HEAD = 8
"""So many elements are compared before all are."""
MAX_WALKS = 8
"""So many ways to take a row as parameters one behind the other are looked at."""
MAX_STARTS = 64
"""At so many places of a parameter a part may begin with the value that is there."""


@dataclass(frozen=True, slots=True)
class Copied:
    """Elements of a parameter that are a stretch of what an optimizer steps.

    Attributes:
        stepped: What it steps.
        at: The first element of the stretch.
        start: The first element of the flattened parameter.
        size: The number of elements.
        ranks: The ranks that the parameter's elements are divided among, in the group's order; empty if several groups
            may divide them, None if it was not looked for.
    """

    stepped: ref[torch.Tensor]
    at: int
    start: int
    size: int
    ranks: tuple[int, ...] | None = None

    @property
    def memory(self) -> int:
        """The identity of what is stepped."""
        return id(self.stepped())

    @property
    def numel(self) -> int:
        """How many elements are stepped together."""
        stepped = self.stepped()
        return 0 if stepped is None else stepped.numel()


_COPIES: Any = WeakIdKeyDictionary()  # of parameters: what was found of each
_INCOMPLETE: Any = WeakIdKeyDictionary()  # parameters of models of which something stepped is a copy of nothing known


def stand_ins(parameter: torch.Tensor) -> Iterator[object]:
    """Yield the copies that are stepped in a parameter's place."""
    for copied in _COPIES.get(parameter, ()):
        stepped = copied.stepped()
        if stepped is not None:
            yield stepped


def gradients(weights: Mapping[torch.Tensor, Local], stepper: object, stepped: Collection[int]) -> Iterator[Local]:
    """Yield this rank's part of the gradients of parameters whose copies are stepped now."""
    for parameter, weight in weights.items():
        yield from _placed(parameter, weight, "grad", lambda tensor: tensor.grad if id(tensor) in stepped else None)


def states(weights: Mapping[torch.Tensor, Local], kept: Mapping[Any, Mapping[str, torch.Tensor]]) -> Iterator[Local]:
    """Yield this rank's part of what an optimizer keeps of parameters' copies, under names such as `up.weight.exp_avg`.

    Args:
        kept: The optimizer's `state`.
    """
    for parameter, weight in weights.items():
        of_copies = [kept.get(stepped, {}) for stepped in stand_ins(parameter)]
        for kind in dict.fromkeys(kind for of_copy in of_copies for kind in of_copy):
            named = replace(weight, name=f"{weight.name}.{kind}")
            yield from _placed(parameter, named, "optim", partial(_state_of, kept, kind))


def _state_of(kept: Mapping[Any, Mapping[str, torch.Tensor]], kind: str, tensor: torch.Tensor) -> torch.Tensor | None:
    return kept.get(tensor, {}).get(kind)


def has_copies(parameters: Collection[torch.Tensor]) -> bool:
    """Whether copies of some parameters are stepped in their place."""
    return any(parameter in _COPIES for parameter in parameters)


def forget(parameters: Iterable[torch.Tensor]) -> None:
    """Take nothing for a copy of some parameters any more."""
    for parameter in parameters:
        _COPIES.pop(parameter, None)
        _INCOMPLETE.pop(parameter, None)


def is_stale(parameter: torch.Tensor) -> bool | None:
    """Whether the copies of a parameter have other values than it has, but for rounding; None if it has no copies."""
    row, answers = local_of(parameter.detach()).flatten(), []
    for copied in _COPIES.get(parameter, ()):
        stepped = copied.stepped()
        if stepped is not None and copied.size:
            held = row[copied.start : copied.start + copied.size].float()
            copy = local_of(stepped.detach()).flatten()[copied.at : copied.at + copied.size].to(held.device).float()
            near = ROUNDINGS * torch.finfo(row.dtype).eps * torch.maximum(held.abs(), copy.abs())
            answers.append(bool(((held - copy).abs() > near).float().mean() > LEAST_STALE))
    return any(answers) if answers else None


def unknown(parameter: torch.Tensor) -> bool:
    """Whether a parameter may have a copy that was not recognized."""
    return parameter not in _COPIES and parameter in _INCOMPLETE


def _placed(
    parameter: torch.Tensor, weight: Local, role: Any, values_of: Callable[[torch.Tensor], torch.Tensor | None]
) -> Iterator[Local]:
    """Yield what belongs to the copies of a parameter, each placed as its elements are in the whole."""
    for copied in _COPIES.get(parameter, ()):
        stepped = copied.stepped()
        values = values_of(stepped) if stepped is not None else None
        if stepped is None or not torch.is_tensor(values) or values.numel() != stepped.numel():
            continue
        stretch = local_of(values.detach()).flatten()[copied.at : copied.at + copied.size]
        ranks = copied.ranks or ()
        is_own = copied.size == stepped.numel() or len(ranks) == 1 or not distributed.is_initialized()
        if copied.size == local_of(parameter).numel() and is_own:
            yield replace(weight, role=role, values=stretch.view(weight.values.shape), grad=None)
            return
        if len(ranks) < distributed.get_world_size() or weight.claim is not None:
            continue  # it would be a part of a part
        offset = _place_in(ranks) * stepped.numel() + copied.at - copied.start
        shape = tuple(parameter.shape)
        param = FlatParam.in_buffers(weight.name, shape, ranks, values.detach().flatten(), stepped.numel(), offset)
        flat = FlatRecord(shape, offset), param.total
        yield Local(weight.name, role, shape, stretch, of_flat_param(param, None, "dp"), flat)


# Looking them up


def link(parameters: Sequence[torch.Tensor], stepped: Sequence[torch.Tensor]) -> bool:
    """Find of which parameters the tensors that optimizers step are copies.

    Args:
        parameters: Those of a model that are trained.
        stepped: What optimizers step that is no parameter of a model.

    Returns:
        Whether most are copies of these.
    """
    search = _Search(parameters)
    left = [tensor for tensor in stepped if not search.add(tensor)]
    if left and not search.add_by_shape(left):
        found = sum(tensor.numel() for tensor in stepped) - sum(tensor.numel() for tensor in left)
        if found < LEAST_PART * sum(tensor.numel() for tensor in stepped):
            return False
        for parameter in parameters:
            _INCOMPLETE[parameter] = True
    ranks = search.sharing()
    for parameter, copies in zip(parameters, search.copies, strict=True):
        if copies:
            _COPIES[parameter] = tuple(
                replace(copied, ranks=ranks) if copied.ranks is None else copied for copied in copies
            )
    return any(search.copies)


def _jumps(stretches: Sequence[Stretch]) -> int:
    """Return how often a row goes on with a parameter that isn't the next one."""
    return sum(later[0] != earlier[0] + 1 for earlier, later in pairwise(stretches))


class _Search:
    """Parameters, and what has been found of each."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.rows = [local_of(parameter.detach()).flatten() for parameter in parameters]
        self.shapes = [tuple(local_of(parameter.detach()).shape) for parameter in parameters]
        self.copies: list[list[Copied]] = [[] for _ in parameters]
        self._last = -1

    def add(self, tensor: torch.Tensor) -> bool:
        """Look one stepped tensor up by its values."""
        shape, row = tuple(local_of(tensor.detach()).shape), local_of(tensor.detach()).flatten()
        every = [*range(self._last + 1, len(self.rows)), *range(self._last + 1)]
        order = [at for at in every if not self.copies[at]]
        for at in order:
            if self.shapes[at] == shape and self._agree(row, 0, at, 0) == len(row):
                self._keep([(at, 0, 0, len(row))], tensor)
                return True
        for at in order if len(shape) == 1 else ():
            groups = [ranks for ranks in _groups() if self._is_part(row, at, _place_in(ranks) * len(row), len(ranks))]
            if groups:
                start = _place_in(groups[0]) * len(row)
                size = max(min(len(row), len(self.rows[at]) - start), 0)
                self._keep([(at, start, 0, size)], tensor, _likeliest(groups))
                return True
        stretches, groups = self._dealt(row) if len(shape) == 1 else ([], [])
        stretches = stretches or (self._walk(row) if len(shape) == 1 else None) or []
        self._keep(stretches, tensor, _likeliest(groups))
        return bool(stretches)

    def add_by_shape(self, left: Sequence[torch.Tensor]) -> bool:
        """Take tensors in their order if they have the parameters' shapes, or one row their length, and no values."""
        free = [at for at, copies in enumerate(self.copies) if not copies]
        shapes = [tuple(tensor.shape) for tensor in left]
        if sorted(self.shapes[at] for at in free) == sorted(shapes):
            places = in_groups((self.shapes[at], at) for at in free)
            for tensor, shape in zip(left, shapes, strict=True):
                at = places[shape].pop(0)
                self._keep([(at, 0, 0, len(self.rows[at]))], tensor)
            return True
        sizes = [len(self.rows[at]) for at in free]
        if len(shapes) == 1 and shapes[0] == (sum(sizes),):
            begins = [sum(sizes[:index]) for index in range(len(sizes))]
            self._keep([(at, 0, begin, size) for at, begin, size in zip(free, begins, sizes, strict=True)], left[0])
            return True
        return False

    def _keep(self, stretches: Sequence[Stretch], tensor: torch.Tensor, ranks: tuple[int, ...] | None = None) -> None:
        for at, start, begin, size in stretches:
            if size > 0:
                self.copies[at].append(Copied(ref(tensor), begin, start, size, ranks))
            self._last = at

    def _agree(self, row: torch.Tensor, begin: int, at: int, start: int) -> int:
        """Return how many elements of a row are a parameter's, up to the end of either; 0 if one of them differs."""
        size = min(len(row) - begin, len(self.rows[at]) - start)
        if size <= 0:
            return 0
        for count in (min(size, HEAD), size):  # most that differ do so at once
            held = self.rows[at][start : start + count]
            if not torch.equal(row[begin : begin + count].to(held.device, held.dtype), held):
                return 0
        return size

    def _is_part(self, row: torch.Tensor, at: int, start: int, count: int) -> bool:
        """Whether a row is a part of a parameter that is cut into so many, filled up with zeros."""
        whole = len(self.rows[at])
        size = max(min(len(row), whole - start), 0)
        is_as_long = 0 < len(row) < whole and -(-whole // count) == len(row)
        return is_as_long and not row[size:].any() and (not size or self._agree(row, 0, at, start) == size)

    def sharing(self) -> tuple[int, ...]:
        """Return the ranks that parts are dealt out to: those to whose parts all elements go, with the least left."""
        sizes: dict[int, int] = {}
        every = 0
        for row, copies in zip(self.rows, self.copies, strict=True):
            is_whole = any(each.size == len(row) == each.numel for each in copies)
            every += 0 if is_whole else len(row)
            sizes |= {each.memory: each.numel for each in copies if not is_whole}
        size = sum(sizes.values())
        enough = [ranks for ranks in _groups() if size * len(ranks) >= every] if size else []
        return min(enough, key=len, default=())

    def _walk(self, row: torch.Tensor) -> list[Stretch] | None:
        """Return the stretches of parameters that a row has one behind the other; None if it's no such row.

        Where a row begins with equal numbers, as in a norm's bias, that may be in several parameters. It must then go
        on with the next ones, and do so in one way.
        """
        walks = (walk for first, start in self._starts(row) if (walk := self._walk_on(row, first, start)))
        found = list(islice(walks, MAX_WALKS))
        in_order = [walk for walk in found if not _jumps(walk)]
        best = in_order if len(found) > 1 else found
        return best[0] if len(best) == 1 else None

    def _dealt(self, row: torch.Tensor) -> tuple[list[Stretch], list[tuple[int, ...]]]:
        """Return the stretches of this rank's part of a row of all parameters, of all matrices, or of the others.

        Returns:
            The stretches, and the groups of ranks that may have the other parts; empty if it is no such part.
        """
        every = range(len(self.rows))
        matrices = [at for at in every if len(self.shapes[at]) > 1]
        for members in (list(every), matrices, [at for at in every if at not in matrices]):
            total = sum(len(self.rows[at]) for at in members)
            fitting = [ranks for ranks in _groups() or [(0,)] if 0 <= len(row) * len(ranks) - total <= MAX_PADDING]
            cuts = [(ranks, self._cut(members, _place_in(ranks) * len(row), len(row))) for ranks in fitting if total]
            cuts = [(ranks, stretches) for ranks, stretches in cuts if self._holds(row, stretches)]
            if cuts:  # of those with the least padding
                size = min(len(ranks) for ranks, _ in cuts)
                likely = [cut for cut in cuts if len(cut[0]) == size]
                return likely[0][1], [ranks for ranks, _ in likely]
        return [], []

    def _cut(self, members: Sequence[int], begin: int, size: int) -> list[Stretch]:
        """Return the stretches between two places of a row of parameters."""
        stretches, offset = [], 0
        for at in members:
            low, high = max(begin, offset), min(begin + size, offset + len(self.rows[at]))
            if low < high:
                stretches.append((at, low - offset, low - begin, high - low))
            offset += len(self.rows[at])
        return stretches

    def _holds(self, row: torch.Tensor, stretches: Sequence[Stretch]) -> bool:
        """Whether a row has these stretches, and zeros behind them."""
        end = sum(size for *_, size in stretches)
        return not row[end:].any() and all(
            self._agree(row[: begin + size], begin, at, start) == size for at, start, begin, size in stretches
        )

    def _starts(self, row: torch.Tensor) -> Iterator[tuple[int, int]]:
        """Yield the parameters, and places in them, at which a row may begin."""
        after = max(self._last, 0)
        for first in (*range(after, len(self.rows)), *range(after)) if len(row) else ():
            begins = row[:1].to(self.rows[first].device, self.rows[first].dtype)
            for start in (self.rows[first] == begins).nonzero().flatten()[:MAX_STARTS].tolist():
                yield first, start

    def _walk_on(self, row: torch.Tensor, first: int, start: int) -> list[Stretch] | None:
        at, end = first, self._agree(row, 0, first, start)
        stretches = [(first, start, 0, end)]
        if not end:
            return None
        while end < len(row):
            is_padding = len(row) - end <= MAX_PADDING and not row[end:].any()
            order = [*range(at + 1, len(self.rows)), *range(at)][: 1 if is_padding else None]
            following = next(((each, n) for each in order if (n := self._agree(row, end, each, 0))), None)
            if following is None or (is_padding and following[0] != at + 1):
                return stretches if is_padding else None
            at, size = following
            stretches.append((at, 0, end, size))
            end += size
        return stretches


def _groups() -> list[tuple[int, ...]]:
    """Return the groups of ranks that this rank is in, first itself and all."""
    if not distributed.is_initialized():
        return []
    alone, every = (distributed.get_rank(),), tuple(range(distributed.get_world_size()))
    return list(dict.fromkeys([alone, every, *(ranks for _, ranks in groups_here())]))


def _likeliest(groups: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the only group of some, or that which is called one of data; empty if several may be it."""
    if len(groups) <= 1:
        return groups[0] if groups else None
    called = {ranks: name for name, ranks in groups_here()}
    of_data = [ranks for ranks in groups if any(word in called.get(ranks, "") for word in OF_DATA)]
    return of_data[0] if len(of_data) == 1 else ()


def _place_in(ranks: Sequence[int]) -> int:
    """Return the number of this rank in a group."""
    return ranks.index(distributed.get_rank()) if distributed.is_initialized() else 0
