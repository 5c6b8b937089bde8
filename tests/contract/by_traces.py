"""`python -m tests.contract.by_traces`: the room `traces`, of steps whose ranks say what each module got and returned.

A model of two layers and a head; seeds draw which sides of which calls are not the unsharded model's, on all ranks or
on the last one, what is so in the other layer too, and what reads the same tensor. Where values stand beside, they are
changed as results are in `step_changes`. The output is wrong, or gradients of some weights are.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.dump.records.step import StageRecord
from shardviz.dump.records.tensors import Stamp
from shardviz.dump.records.trace import PointRecord, of_point
from shardviz.layout.layout import Layout
from shardviz.layout.notation import write
from shardviz.layout.placements import parse_placement
from tests.contract import store
from tests.contract.by_step import Step, role_of
from tests.contract.choosing import chosen
from tests.contract.judge import IN_MEMORY, judge_room, record
from tests.contract.step_changes import AVG, MESHES, S0, S1, SHAPE, SUM, VECTOR, Place, R, changes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardviz.dump.records.trace import What

    Array = NDArray[Any]

ROOM = "traces"
MOST_ALIKE = 1
SEEDS = 260
MESH = MESHES[0]
TYPES = {"q": "Linear", "o": "Linear", "attn": "Attention", "mlp": "Linear", "head": "Linear", "": "Model"}
CALLS = (
    *(f"layers.{at}{name}" for at in (0, 1) for name in (".attn.q", ".attn.o", ".attn", ".mlp", "")),
    *("head", ""),
)
"""The calls in the order in which they end."""
WEIGHTS = tuple(f"layers.{at}.{name}.weight" for at in (0, 1) for name in ("attn.q", "mlp"))
FORWARD: tuple[What, What] = ("input", "output")
BACKWARD: tuple[What, What] = ("gradient of output", "gradient of input")
STATES = ("odd", "odd", "odd", "pending", "moved", "repeated", "cut", "none", "right")
LAYOUTS = ((R, R), (R, S0), (R, S1), (S0, R))
FIRST_CHANGES = dict(changes(MESH))


@dataclass
class Trace:
    """What ranks say of every call, drawn by a seed.

    Attributes:
        draw: Draws.
        states: The state of each side of each call, on the ranks that differ.
        layouts: The placements of each.
    """

    draw: random.Random
    states: dict[tuple[str, What], str] = field(default_factory=dict)
    layouts: dict[tuple[str, What], tuple[str, str]] = field(default_factory=dict)
    changed: list[tuple[str, What]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in CALLS:
            for side in (*FORWARD, *BACKWARD):
                self.states[name, side] = "right"
                self.layouts[name, side] = LAYOUTS[0]
        self.is_backward = self.draw.random() < 0.5
        for _ in range(self.draw.choice((1, 1, 1, 2, 3))):
            self._go_wrong(self.draw.choice(CALLS[:-1]))
        if self.draw.random() < 0.2:
            name, side = self.draw.choice(CALLS), self.draw.choice((*FORWARD, *BACKWARD))
            self.layouts[name, side] = self.draw.choice(LAYOUTS)
        if self.draw.random() < 0.15:
            self.layouts |= dict.fromkeys(self.layouts, LAYOUTS[1])
        self.on_all, self.with_term = self.draw.random() < 0.7, self.draw.random() < 0.35
        self.term = self.draw.choice(("input", "layers.0.mlp", "layers.1.attn", "layers.0.attn.q"))
        self.times = self.draw.choice((-2, -1, -1, 1, 2))

    def _go_wrong(self, name: str) -> None:
        """Let a side of a call be wrong, and maybe all that comes of it, and the same call of the other layer."""
        sides = BACKWARD if self.is_backward else FORWARD
        side, state = self.draw.choice((sides[1], sides[1], sides[0])), self.draw.choice(STATES)
        if state in ("cut", "none") and not self.is_backward:
            state = "odd"
        names = [name]
        if self.draw.random() < 0.2 and name.startswith("layers."):
            names.append(name.replace("layers.0", "layers.1"))
        for each in names:
            self.states[each, side] = state
            self.changed.append((each, side))
        if self.draw.random() < 0.65:
            self._spread(name, side, state, sides)

    def _spread(self, name: str, side: What, state: str, sides: tuple[What, What]) -> None:
        """Let what is computed of a wrong side be wrong, too."""
        at, later = CALLS.index(name), "odd" if state not in ("cut", "none") else state
        until = self.draw.choice((len(CALLS), len(CALLS), at + 3))
        around = {".".join(name.split(".")[:count]) for count in range(1, name.count(".") + 1)} | {""}
        for number, other in enumerate(CALLS):
            if self.is_backward and number < at and not other.startswith(f"{name}."):
                self.states[other, sides[0]] = self.states[other, sides[1]] = later
            elif self.is_backward and other in around:
                self.states[other, sides[1]] = later
            elif not self.is_backward and at < number < until:
                self.states[other, sides[1]] = later
                if other not in around:
                    self.states[other, sides[0]] = later
        if side == sides[0] and not self.is_backward:
            self.states[name, sides[1]] = later

    def points(self, rank: int) -> tuple[PointRecord, ...]:
        """Return what a rank says."""
        points = []
        for order, name in enumerate(CALLS):
            for side in (*FORWARD, *BACKWARD):
                state = self.states[name, side]
                if state != "right" and not self.on_all and rank != MESH.size - 1:
                    state = "right"
                placements = LAYOUTS[0] if state not in ("right", "pending") else self.layouts[name, side]
                claim = (R, SUM) if state == "pending" else placements
                layout = Layout.from_placements(MESH, SHAPE, tuple(map(parse_placement, claim)))
                is_added = self.with_term and state == "odd" and side in ("output", "gradient of input")
                points.append(
                    PointRecord(
                        *(name, side, order, state),
                        tensor=self._tensor(order, side),
                        layout=write(layout) if state in ("right", "pending") else "",
                        type=TYPES.get(name.rpartition(".")[2], "Block"),
                        added=self.term if is_added else "",
                        times=self.times if is_added else 0,
                    )
                )
        return tuple(points)

    def _tensor(self, order: int, side: What) -> int:
        """Return the number of a tensor: an input is what the call before returned, or what the layer was given."""
        if side.endswith("output"):
            return order + 1
        name = CALLS[order]
        first = next(at for at, other in enumerate(CALLS) if not name or other == name or other.startswith(f"{name}."))
        return first


def with_values(step: Step, trace: Trace, draw: random.Random) -> None:
    """Add what ranks have at the first wrong places, changed."""
    change = FIRST_CHANGES[draw.choice(sorted(FIRST_CHANGES))]
    for at, (name, side) in enumerate(trace.changed):
        whole = np.random.default_rng(30 + at).standard_normal(SHAPE)
        layout = Layout.from_placements(MESH, SHAPE, tuple(map(parse_placement, trace.layouts[name, side])))
        place = Place(MESH, layout, whole, whole[::-1] + 1)
        called = of_point(name, side, 0, 0)
        with np.errstate(all="ignore"):
            step.put("activation", called, "step", change(place, place.cut(whole)))
        step.put("activation", called, "reference", {0: whole})


def with_results(step: Step, trace: Trace, draw: random.Random) -> None:
    """Add an output, a loss and gradients: what the trace says is wrong comes out wrong."""
    numbers = np.random.default_rng(40)
    average = Layout.from_placements(MESH, (), tuple(map(parse_placement, (AVG, R))))
    plain = Layout.from_placements(MESH, SHAPE, tuple(map(parse_placement, (R, R))))
    output, is_lost = numbers.standard_normal(SHAPE), draw.random() < 0.15
    wrong = output if trace.is_backward else output + np.sin(9 * output)
    if not is_lost:
        step.put("output", "output", "step", dict.fromkeys(MESH.ranks, wrong), plain)
        step.put("output", "output", "reference", {0: output})
    loss = 2.5 if trace.is_backward else 2.25
    step.put("scalar", "loss", "step", dict.fromkeys(MESH.ranks, np.array(loss)), average)
    step.put("scalar", "loss", "reference", {0: np.array(2.5)})
    way = draw.choice(("odd", "odd", "twice", "terms", "half", "right"))
    for name in WEIGHTS:
        whole, module = numbers.standard_normal(SHAPE), name.removesuffix(".weight")
        is_wrong = any(trace.states[module, side] not in ("right", "pending") for side in BACKWARD)
        is_wrong = is_wrong or not trace.is_backward or any(module == changed for changed, _ in trace.changed)
        held = dict.fromkeys(MESH.ranks, whole)
        if is_wrong and way != "right":
            ways = {"odd": whole + np.cos(7 * whole), "twice": whole * 2, "half": whole / 2}
            held = {rank: ways.get(way, whole * (0.25, 0.75)[rank % 2]) for rank in MESH.ranks}
        step.put("grad", name, "step", held, plain)
        step.put("grad", name, "reference", {0: whole})
    step.put("param", "norm.bias", "reference", {0: VECTOR})


def cases() -> Iterator[tuple[str, Step]]:
    """Yield a step for each seed."""
    for seed in range(SEEDS):
        draw = random.Random(f"trace {seed}")
        trace, step = Trace(draw), Step(MESH)
        with_results(step, trace, draw)
        if draw.random() < 0.75:
            with_values(step, trace, draw)
        step.of_ranks = {rank: {"trace": trace.points(rank)} for rank in MESH.ranks}
        if draw.random() < 0.1:
            step.fields = {"schedule": tuple(StageRecord(0, at) for at in (0, 1))}
        if draw.random() < 0.2:
            for at, name in enumerate(WEIGHTS):
                step.stamps.append(Stamp(name, 1 + 100 * at, SHAPE))
                spans = ((6, 12), (0, 6)) if trace.changed and name.startswith(trace.changed[0][0]) else ((0, 12),)
                for rank in MESH.ranks:
                    step.hold(rank, name, SHAPE, spans, ((0, 6),))
        first = ", ".join(f"{name or 'the model'} {side}" for name, side in trace.changed)
        yield f"{'backward' if trace.is_backward else 'forward'} {seed}: {first}", step


def main() -> None:
    """Make the room, judge it, and keep what is judged in many ways."""
    room = store.Room(ROOM)
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        for at, (name, step) in enumerate(cases()):
            with contextlib.suppress(ValueError, IndexError):  # some changes need other shapes
                room.add(name, ("check", "{0}"), [store.files_of(step.write(Path(folder, f"{at}.shardviz")))])
        room.keep(chosen(judge_room(room), MOST_ALIKE, role_of))
    record(room)


if __name__ == "__main__":
    main()
