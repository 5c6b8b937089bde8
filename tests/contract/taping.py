"""What ranks write of a module's lines: a program of tensor calls is run for all ranks in one process, and unsharded.

A `Tape` records each call with the line of the program that makes it. torch follows the numbers of all ranks as one
graph, so a collective's backward is that of the sums that it is written with. `dump_of` writes both sides as a dump.
"""

from __future__ import annotations

import linecache
import math
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shardviz.dump.records.trace import (
    FrameRecord,
    LineRecord,
    LinesRecord,
    PointRecord,
    ValueRecord,
    of_point,
    of_value,
)
from shardviz.layout.layout import Layout
from shardviz.layout.mesh import parse_mesh
from shardviz.layout.notation import write
from shardviz.layout.placements import parse_placement
from tests.contract.by_step import Step
from tests.contract.step_changes import AVG, R

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from shardviz.dump.records.trace import What
    from shardviz.layout.mesh import Mesh

    Program = Callable[["Tape"], "Held"]

ALONE = parse_mesh("tp=1")
MODULE = "block"
NEAR = 1e-5


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """Return numbers of few digits, always the same ones."""
    return torch.as_tensor(np.random.default_rng(seed).standard_normal(shape).round(3), dtype=torch.float32)


@dataclass(eq=False)
class Held:
    """A tensor on all ranks.

    Attributes:
        parts: Each rank's part.
        number: Its number in the records.
        origin: Where it comes from, if not from a call.
        placements: What a DTensor says.
        memory: In which memory it stands; 0 if that is not known, as in a module.
    """

    parts: list[torch.Tensor]
    number: int
    origin: str = ""
    placements: str = ""
    memory: int = 0


@dataclass
class Tape:
    """The calls of a program on the ranks of a mesh.

    Attributes:
        mesh: The mesh; of the unsharded model one of one rank.
        bug: What is wrong about the program; empty for the unsharded model and for the right twin.
        shares: How many ranks share a tensor along tp, in the sharded model.
    """

    mesh: Mesh
    bug: str = ""
    shares: int = 1
    program: Program | None = None
    held: list[Held] = field(default_factory=list)
    lines: dict[int, list[LineRecord]] = field(default_factory=dict)
    weights: dict[str, tuple[Held, tuple[str, ...]]] = field(default_factory=dict)
    given: list[tuple[Held, tuple[str, ...]]] = field(default_factory=list)

    is_step = False
    """Whether it is a step around the model."""

    @property
    def is_whole(self) -> bool:
        """Whether it is the unsharded model's."""
        return self.mesh is ALONE

    @property
    def ways(self) -> int:
        """How many ranks share a tensor along tp."""
        return self.mesh.axis_size("tp")

    def run(self, program: Program) -> Held:
        """Run a program."""
        self.program = program
        self.lines = {rank: [] for rank in self.mesh.ranks}
        return program(self)

    def place(self, rank: int) -> int:
        """Return a rank's place along tp."""
        return self.mesh.coord_of(rank)[self.mesh.axes.index("tp")]

    def is_wrong(self, *bugs: str) -> bool:
        """Whether the program has one of some bugs."""
        return self.bug in bugs

    def _add(
        self, parts: Sequence[torch.Tensor], origin: str = "", placements: str = "", like: Held | None = None
    ) -> Held:
        """Number a tensor, in the memory of another one or, in a step, in a new one."""
        for part in parts:
            if part.requires_grad and not part.is_leaf:
                part.retain_grad()
        memory = like.memory if like is not None else len(self.held) + 1 if self.is_step else 0
        self.held.append(Held(list(parts), len(self.held), origin, placements, memory))
        return self.held[-1]

    def layout(self, shape: Sequence[int], placements: tuple[str, ...]) -> Layout:
        """Return a layout on the mesh: what is said of the batch's axis, if the mesh has one, and of tp."""
        texts = placements[-self.mesh.ndim :]
        return Layout.from_placements(self.mesh, tuple(shape), tuple(map(parse_placement, texts)))

    def _cut(self, whole: torch.Tensor, placements: tuple[str, ...]) -> list[torch.Tensor]:
        if self.is_whole:
            return [whole.clone()]
        layout = self.layout(whole.shape, placements)
        regions = [layout.region_of_rank(rank) for rank in self.mesh.ranks]
        parts = [whole.ravel()[torch.as_tensor(region.flat_ids(tuple(whole.shape)))] for region in regions]
        return [part.reshape(region.shape).clone() for part, region in zip(parts, regions, strict=True)]

    def outside(self, parts: Sequence[torch.Tensor]) -> Held:
        """Return what no call of the module's makes, but a hook."""
        return self._add(parts)

    def input(self, whole: torch.Tensor, *placements: str) -> Held:
        """Return what the module is given."""
        parts = [part.requires_grad_(whole.is_floating_point()) for part in self._cut(whole, placements)]
        held = self._add(parts, f"input {len(self.given)}")
        self.given.append((held, placements))
        return held

    def weight(self, name: str, whole: torch.Tensor, *placements: str, is_dealt: bool = False) -> Held:
        """Return a weight; one that is dealt out in another order has no gradient in the dump."""
        held = self._add([part.requires_grad_() for part in self._cut(whole, placements)], f"weight {name}")
        if not is_dealt:
            self.weights[name] = held, placements
        return held

    def call(
        self,
        function: str,
        compute: Callable[..., torch.Tensor],
        *given: Held,
        numbers: str | Callable[[int], str] = "",
        by_place: bool = False,
        placements: str = "",
        into: Held | None = None,
    ) -> Held:
        """Record a call that each rank makes of its own parts.

        Args:
            function: What is called.
            compute: What it does, given a rank's parts, and before them its place along tp if that is asked for.
            given: The tensors.
            numbers: The numbers among its arguments, or what gives them for a place along tp.
            by_place: Whether it computes by the rank's place.
            placements: What the result says, of a DTensor.
            into: The tensor that it writes into.
        """
        parts = []
        for at, rank in enumerate(self.mesh.ranks):
            of_rank = [held.parts[at] for held in given]
            parts.append(compute(self.place(rank), *of_rank) if by_place else compute(*of_rank))
        made = self._add(parts, "", placements, into)
        texts = {rank: numbers if isinstance(numbers, str) else numbers(self.place(rank)) for rank in self.mesh.ranks}
        self._note(function, given, [made], texts, {}, is_collective=False)
        return made

    def cut(
        self, function: str, compute: Callable[[torch.Tensor], Sequence[torch.Tensor]], given: Held, numbers: str
    ) -> list[Held]:
        """Record a call that takes a tensor apart."""
        made = [self._add(list(parts)) for parts in zip(*map(compute, given.parts), strict=True)]
        self._note(function, (given,), made, dict.fromkeys(self.mesh.ranks, numbers), {}, is_collective=False)
        return made

    def exchange(
        self,
        function: str,
        compute: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
        given: Held,
        *,
        axis: str = "tp",
        into: Held | None = None,
    ) -> Held:
        """Record a collective of the groups along an axis; the unsharded model makes none.

        Args:
            function: What is called.
            compute: What becomes of the parts of a group.
            given: The tensor.
            axis: The axis.
            into: The memory that it writes into.
        """
        if self.is_whole:
            return given
        parts = dict(zip(self.mesh.ranks, given.parts, strict=True))
        ranks = {rank: self.mesh.group_of(rank, axis) for rank in self.mesh.ranks}
        for group in dict.fromkeys(ranks.values()):
            parts |= dict(zip(group, compute([parts[rank] for rank in group]), strict=True))
        made = self._add([parts[rank] for rank in self.mesh.ranks])
        sources = (given,) if into is None else (given, into)
        self._note(function, sources, [made], dict.fromkeys(ranks, ""), ranks, is_collective=True)
        return made

    def _note(
        self,
        function: str,
        given: Sequence[Held],
        made: Sequence[Held],
        numbers: dict[int, str],
        ranks: dict[int, tuple[int, ...]],
        *,
        is_collective: bool,
    ) -> None:
        frames = self._frames(sys._getframe(2))  # who called the method that notes it
        sides = tuple(held.number for held in given), tuple(held.number for held in made)
        for rank in self.mesh.ranks:
            own = len(frames) - 1 if self.is_step else 0
            line = LineRecord(0, function, frames, own, *sides, ranks.get(rank, ()), is_collective, numbers[rank])
            self.lines[rank].append(line)

    def _frames(self, frame: FrameType | None) -> tuple[FrameRecord, ...]:
        """Return the lines that lead from the program to a call; lines are counted from their function's first."""
        frames: list[FrameRecord] = []
        code = getattr(self.program, "__code__", None)
        while frame is not None:
            source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            number = frame.f_lineno - frame.f_code.co_firstlineno
            frames.insert(0, FrameRecord(f"{frame.f_code.co_name}.py", number, frame.f_code.co_name, source))
            if frame.f_code is code:
                break
            frame = frame.f_back
        return tuple(frames)

    def records(self, returned: Held, module: str) -> dict[int, LinesRecord]:
        """Return what each rank writes of its lines."""
        records = {}
        for at, rank in enumerate(self.mesh.ranks):
            values = [
                ValueRecord(
                    *(held.number, tuple(held.parts[at].shape), held.origin),
                    needs_grad=held.parts[at].requires_grad,
                    placements=held.placements,
                    has_gradient=held.parts[at].grad is not None,
                    memory=held.memory,
                )
                for held in self.held
            ]
            lines, back = tuple(self.lines[rank]), ((returned.number,),)
            records[rank] = LinesRecord(module, lines, tuple(values), back, is_unsharded=self.is_whole, asked=module)
        return records


def dump_of(program: Program, mesh: Mesh, bug: str, returned: tuple[str, ...]) -> Step:
    """Return the dump of a program with a bug, beside the same program unsharded.

    Args:
        program: What the module does.
        mesh: The mesh.
        bug: What is wrong; empty for the right twin.
        returned: The placements that what it returns has.
    """
    shares = mesh.axis_size("tp")
    whole, tape, step = Tape(ALONE, shares=shares), Tape(mesh, bug, shares), Step(mesh)
    wanted, made = whole.run(program), tape.run(program)
    weighted = torch.as_tensor(np.random.default_rng(1).standard_normal(wanted.parts[0].shape), dtype=torch.float32)
    loss = (wanted.parts[0] * weighted).sum()
    torch.autograd.backward(loss)
    due = tape._cut(weighted, returned)
    losses = [
        (part * like if part.shape == like.shape else part).sum() for part, like in zip(made.parts, due, strict=True)
    ]
    torch.autograd.backward(torch.stack(losses).sum())

    by_rank, unsharded = tape.records(made, MODULE), whole.records(wanted, MODULE)
    step.of_ranks = {
        rank: {"lines": (record, *([unsharded[0]] if rank == 0 else []))} for rank, record in by_rank.items()
    }
    for side, moment in ((whole, "reference"), (tape, "step")):
        for held in side.held:
            parts = dict(zip(side.mesh.ranks, held.parts, strict=True))
            put(step, "activation", of_value(MODULE, held.number), moment, parts)
            gradients = {rank: part.grad for rank, part in parts.items() if part.grad is not None}
            put(step, "activation", of_value(MODULE, held.number, gradient=True), moment, gradients)
    _put_points(step, tape, whole, made, wanted, returned)
    put(step, "output", "output", "reference", {0: wanted.parts[0]})
    claim = tape.layout(wanted.parts[0].shape, returned)
    shapes = [claim.region_of_rank(rank).shape for rank in mesh.ranks]
    is_due = shapes == [tuple(part.shape) for part in made.parts]
    put(step, "output", "output", "step", dict(zip(mesh.ranks, made.parts, strict=True)), claim if is_due else None)
    _put_results(step, tape, whole, losses, loss, returned)
    return step


def put(step: Step, role: Any, name: str, moment: Any, parts: Any, layout: Layout | None = None) -> None:
    """Add what ranks have of a tensor, if any has."""
    held = {rank: np.asarray(part.detach().numpy()) for rank, part in parts.items()}
    if held:
        step.put(role, name, moment, held, layout, dtype=str(next(iter(held.values())).dtype))


def _put_results(
    step: Step, tape: Tape, whole: Tape, losses: list[torch.Tensor], loss: torch.Tensor, returned: tuple[str, ...]
) -> None:
    """Add the loss, a mean over the axes that split what the module returns, and gradients reduced over these."""
    mesh, splits = tape.mesh, dict(zip(("dp", "tp"), returned, strict=True))
    axes = [axis for axis in mesh.axes if splits[axis].startswith("Shard")]
    size = math.prod(map(mesh.axis_size, axes))
    layout = tape.layout((), tuple(AVG if splits[axis].startswith("Shard") else R for axis in splits))
    put(step, "scalar", "loss", "step", dict(zip(mesh.ranks, torch.stack(losses) * size, strict=True)), layout)
    put(step, "scalar", "loss", "reference", {0: loss})
    for name, (held, placements) in tape.weights.items():
        wanted = whole.weights[name][0].parts[0].grad
        parts = {rank: part.grad for rank, part in zip(mesh.ranks, held.parts, strict=True) if part.grad is not None}
        if wanted is None or len(parts) < mesh.size:
            continue
        for axis in (axis for axis in axes if dict(zip(("dp", "tp"), placements, strict=True))[axis] == R):
            groups = {rank: mesh.group_of(rank, axis) for rank in mesh.ranks}
            parts = {rank: torch.stack([parts[other] for other in group]).sum(0) for rank, group in groups.items()}
        put(step, "grad", f"{MODULE}.{name}", "step", parts, tape.layout(wanted.shape, placements))
        put(step, "grad", f"{MODULE}.{name}", "reference", {0: wanted})


def _put_points(step: Step, tape: Tape, whole: Tape, made: Held, wanted: Held, returned: tuple[str, ...]) -> None:
    """Add what ranks say of the module's inputs and outputs, and of the model, which does nothing else."""
    sides: list[tuple[Held, Held, tuple[str, ...], What, int]] = [
        (held, whole.given[at][0], placements, "input", at) for at, (held, placements) in enumerate(tape.given)
    ]
    sides.append((made, wanted, returned, "output", 0))
    points: dict[int, list[PointRecord]] = {rank: [] for rank in tape.mesh.ranks}
    for held, due, placements, what, index in sides:
        for is_gradient in (False, True):
            side: What = f"gradient of {what}" if is_gradient else what  # type: ignore[assignment]
            own = {
                rank: part.grad if is_gradient else part for rank, part in zip(tape.mesh.ranks, held.parts, strict=True)
            }
            parts = {rank: part for rank, part in own.items() if part is not None}
            there = due.parts[0].grad if is_gradient else due.parts[0]
            if there is None or len(parts) < len(own):
                continue
            put(step, "activation", of_point(MODULE, side, 0, index), "step", parts)
            put(step, "activation", of_point(MODULE, side, 0, index), "reference", {0: there})
            layout, expected = tape.layout(there.shape, placements), tape._cut(there.detach(), placements)
            for (rank, part), like in zip(parts.items(), expected, strict=True):
                is_right = part.shape == like.shape and torch.allclose(part.float(), like.float(), 1e-4, NEAR)
                state = "right" if is_right else "odd"
                text = write(layout) if is_right else ""
                for module, order in ((MODULE, 0), ("", 1)):
                    kind = "Block" if module else "Model"
                    point = PointRecord(module, side, order, index=index, state=state, layout=text, type=kind)  # type: ignore[arg-type]
                    points[rank].append(point)
    for rank, of_rank in points.items():
        step.of_ranks[rank]["trace"] = tuple(of_rank)


# What ranks do with each other


def copied(r: Tape, x: Held) -> Held:
    """Return the whole for a part's use: backward sums what comes back."""
    if r.is_whole:
        return x
    return r.exchange("Copy", lambda parts: [part.detach() + _kept(parts) for part in parts], x)


def _kept(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return zeros whose gradient goes to every part."""
    return torch.stack([part - part.detach() for part in parts]).sum(0)


def summed(r: Tape, x: Held, *, backward: str = "copy", axis: str = "tp", times: float = 1, name: str = "") -> Held:
    """Return the sum over ranks, whose backward hands on the gradient, sums it, or stops it."""

    def compute(parts: list[torch.Tensor]) -> list[torch.Tensor]:
        total = torch.stack(parts).sum(0) * times
        if backward == "sum":
            return [total.clone() for _ in parts]
        return [total.detach() + (0 if backward == "none" else part - part.detach()) for part in parts]

    return r.exchange(name or "all_reduce", compute, x, axis=axis)


def joined(
    r: Tape,
    x: Held,
    dim: int,
    *,
    order: int = 1,
    backward: str = "sum",
    into: Held | None = None,
    axis: str = "tp",
) -> Held:
    """Return all parts along a dim; backward sums each part's gradients, or takes the rank's own."""

    def compute(parts: list[torch.Tensor]) -> list[torch.Tensor]:
        if backward == "sum":
            return [torch.cat(parts[::order], dim) for _ in parts]
        fixed = [part.detach() for part in parts]
        return [
            torch.cat([*fixed[:at], part if backward == "part" else fixed[at], *fixed[at + 1 :]][::order], dim)
            for at, part in enumerate(parts)
        ]

    return r.exchange("all_gather_into_tensor", compute, x, into=into, axis=axis)


def swapped(r: Tape, x: Held, *, backward: str = "") -> Held:
    """Return the rows that other ranks send: of each rank one stretch; backward may not send them back, or a mean."""

    def compute(parts: list[torch.Tensor]) -> list[torch.Tensor]:
        rows = [part.chunk(len(parts)) for part in parts]
        sent = [torch.cat([of_rank[at] for of_rank in rows]) for at in range(len(parts))]
        if backward == "back":
            return [made.detach() + part - part.detach() for made, part in zip(sent, parts, strict=True)]
        times = 1 / len(parts) if backward == "mean" else 1
        return [made.detach() + times * (made - made.detach()) for made in sent]

    return r.exchange("all_to_all_single", compute, x)


def moved(r: Tape, x: Held) -> Held:
    """Return what the next rank has."""
    return r.exchange("batch_isend_irecv", lambda parts: [*parts[1:], parts[0]], x)
