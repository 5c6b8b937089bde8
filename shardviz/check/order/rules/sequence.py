"""`sequence-order`: tensors of one sequence that are split in different orders.

Tokens, labels, positions and masks are read index by index: a rank must have the same positions of all of them. Which
tensors share a sequence is declared (`sequence(mesh)` and `SEQUENCE` in a probe) and never guessed. Their positions are
compared rank by rank with those that most of them have. One that is whole on every rank is looked up by position and
has no order of its own; one that is split finer or coarser cannot be compared.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from shardviz.check.order.infer import infer_layout
from shardviz.check.order.infer.splits import explain_splits
from shardviz.check.report import NotChecked
from shardviz.errors import ShardvizError
from shardviz.explain.placement.order import Disorder, SequenceOrderDiffers, SequenceRestart, SequenceShift
from shardviz.layout.layout import Layout
from shardviz.layout.notation import write
from shardviz.layout.region import Ranges, Region, indices, length
from shardviz.relate.relations import RankPair
from shardviz.text import listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from shardviz.check.order.case import LaidOut
    from shardviz.dump.dump import Dump, Tensor
    from shardviz.explain.finding import Finding
    from shardviz.layout.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Order:
    """Which positions of the sequence each rank has of one tensor.

    Attributes:
        held: The positions by rank, as they lie in memory.
        leads: Whether others are held against it if as many are ordered in one way as in another.
    """

    name: str
    size: int
    held: Mapping[int, Ranges]
    leads: bool

    @property
    def is_split(self) -> bool:
        """Whether some rank has another part than all of the sequence in its own order."""
        return any(ranges != ((0, self.size),) for ranges in self.held.values())


@dataclass(frozen=True)
class PairOfOrders(RankPair):
    """A tensor's positions of a sequence and those of the tensor that it is held against.

    Attributes:
        tensor: The order of the tensor.
        usual: The order that is wanted.
    """

    tensor: Order
    usual: Order

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have both, rising."""
        return tuple(sorted(self.tensor.held.keys() & self.usual.held.keys()))

    def wanted_of(self, rank: int) -> NDArray[np.int64]:
        """Return the positions that a rank should have."""
        return indices(self.usual.held[rank])

    def held_of(self, rank: int) -> NDArray[np.int64]:
        """Return the positions that a rank has."""
        return indices(self.tensor.held[rank])


def check_sequence(laid_out: LaidOut) -> Iterator[Finding | NotChecked]:
    """Yield tensors whose positions on a rank differ from the rest of their sequence."""
    outcomes = list(_orders(laid_out))
    yield from (result for result in outcomes if isinstance(result, NotChecked))
    orders = [order for order in outcomes if isinstance(order, Order) and order.is_split]
    if len(orders) < 2:
        return
    times = Counter(_signature(order) for order in orders)
    usual = max(orders, key=lambda order: (times[_signature(order)], order.leads))
    for order in orders:
        shared_ranks = [rank for rank in sorted(order.held) if rank in usual.held]
        wrong = tuple(rank for rank in shared_ranks if order.held[rank] != usual.held[rank])
        counts = {rank: (length(order.held[rank]), length(usual.held[rank])) for rank in wrong}
        uneven = next((rank for rank, (count, usual_count) in counts.items() if count != usual_count), None)
        if order.size != usual.size:
            yield NotChecked(
                order.name, f"its {order.size} positions are not the {usual.size} of {usual.name}", "order"
            )
        elif uneven is not None:
            count, usual_count = counts[uneven]
            yield NotChecked(
                order.name, f"rank {uneven} has {count} positions of it and {usual_count} of {usual.name}", "order"
            )
        elif wrong:
            yield _finding(laid_out.dump, order, usual, wrong)


def _orders(laid_out: LaidOut) -> Iterator[Order | NotChecked]:
    dump = laid_out.dump
    unseen = set(dump.files.run.sequence)
    for tensor in dump.at("stamped"):
        for name in tensor.names:
            pattern = next((text for text in dump.files.run.sequence if fnmatchcase(name, text)), None)
            if pattern is not None:
                unseen.discard(pattern)
                yield _order(laid_out, tensor, name, dump.files.run.sequence[pattern])
    why = "no tensor that shares a sequence has this name"
    yield from (NotChecked(pattern, why, "order") for pattern in sorted(unseen))


def _order(laid_out: LaidOut, tensor: Tensor, name: str, dim: int) -> Order | NotChecked:
    held: dict[int, Ranges] = {}
    try:
        for case in laid_out.cases(tensor, name):
            if dim >= len(case.shape):
                return NotChecked(name, f"its order along the sequence: it has no dim {dim}", "order")
            if case.ids:
                return NotChecked(name, f"its order along the sequence: dim {dim} is not a list of positions", "order")
            held |= {case.rank(coord): region.dims[dim] for coord, region in case.regions.items()}
            size = case.shape[dim]
    except ShardvizError as error:
        return NotChecked(name, error.message, "order")
    return Order(name, size, held, tensor.role == "activation")


def _signature(order: Order) -> tuple[tuple[int, Ranges], ...]:
    return tuple(sorted(order.held.items()))


def _finding(dump: Dump, order: Order, usual: Order, wrong: tuple[int, ...]) -> Finding:
    rank = wrong[0]
    here, there = _ranges_text(order.held[rank]), _ranges_text(usual.held[rank])
    finding = _cause(order, usual).finding(
        order.name,
        wrong,
        f"{len(wrong):,} of {len(order.held):,} ranks hold different positions of the sequence here than in "
        f"{usual.name}: rank {rank} has {here}, {usual.name} has {there}",
        held=_split_text(dump.files.mesh, order),
        intended=f"as {usual.name}: {_split_text(dump.files.mesh, usual)}",
    )
    return finding.seen_in(PairOfOrders(order, usual))


def _cause(order: Order, usual: Order) -> Disorder:
    """Return why a tensor has other positions than the others of its sequence.

    Labels are the next tokens: their positions are compared with the tokens' less their offset.
    """
    if shift := _shift(order, usual):
        return SequenceShift(order.name, shift)
    same = len(order.held) > 1 and len(set(order.held.values())) == 1
    return (SequenceRestart if same else SequenceOrderDiffers)(order.name, usual.name)


def _shift(order: Order, usual: Order) -> int:
    """Return the distance that all positions are shifted by on all ranks; 0 if they are not.

    A shift by a whole part, or more, is one between ranks. If labels are missing, at the end of the sequence, the
    dump has the usual positions.
    """
    pairs = [(order.held[rank], usual.held[rank]) for rank in order.held if rank in usual.held]
    shifts = Counter(int(shift) for here, there in pairs for shift in (indices(here) - indices(there)) % order.size)
    shortest = min((length(here) for here, _ in pairs), default=0)
    shift = max(shifts, key=lambda by: shifts[by], default=0)
    stays = shifts[0] if shift else 0
    is_one = shifts[shift] + stays == shifts.total()
    shift = shift - order.size if shift > order.size // 2 else shift
    return shift if is_one and stays < shifts.total() / 2 and abs(shift) < shortest else 0


def _ranges_text(ranges: Ranges) -> str:
    return str(Region((ranges,)))


def _split_text(mesh: Mesh, order: Order) -> str:
    """Say how the sequence is split: in the notation, by its rule, or rank by rank."""
    regions = {mesh.coord_of(rank): Region((ranges,)) for rank, ranges in order.held.items() if rank in mesh}
    layout = infer_layout(mesh, (order.size,), regions)
    if layout is not None:
        return write(layout)
    for axis in mesh.axes:
        for split in explain_splits(Layout(mesh, (order.size,), ((axis,),)), regions):
            return split.held
    if len(set(order.held.values())) == 1:
        return f"every rank {_ranges_text(next(iter(order.held.values())))}"
    return listed(f"rank {rank} {_ranges_text(ranges)}" for rank, ranges in sorted(order.held.items()))
