"""`python -m tests.contract.by_update`: the room `updates`, of optimizers that step parts of weights like whole ones.

Six optimizers step three weights, each rightly or with a slip: by what a part alone says, by another rate, without the
last elements, with more decay, twice. The states that they keep begin from zeros, are another rank's, or stand in
another order; some have fewer numbers than their weight. What the unsharded model has beside it takes turns.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.layout.layout import Layout
from shardviz.layout.placements import parse_placement
from tests.contract import store
from tests.contract.by_step import Step, role_of
from tests.contract.choosing import chosen
from tests.contract.judge import IN_MEMORY, judge_room, record
from tests.contract.step_changes import MESHES, MOST_ALIKE, S0, S1, SHAPE, Place, R

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.layout.mesh import Mesh

    Array = NDArray[Any]
    Held = dict[int, Array]

ROOM = "updates"
LAYOUTS = ((R, S0), (R, S1), (S0, R), (S0, S0), (S0, S1), (R, R))
NAMES = ("up.weight", "down.weight", "head.weight")


def orthogonal(gradient: Array) -> Array:
    """Return the orthogonal matrix that is nearest to a gradient, as Muon takes it."""
    left, _, right = np.linalg.svd(gradient, full_matrices=False)
    return np.asarray(left @ right)


def norm(values: Array) -> float:
    """Return the norm of values, 1 if they are zeros."""
    return float(np.linalg.norm(values)) or 1.0


OPTIMIZERS: Mapping[str, Callable[[Array, Array], Array]] = {
    "SGD": lambda gradient, _: -0.1 * gradient,
    "orthogonal": lambda gradient, _: -0.1 * orthogonal(gradient),
    "by rows": lambda gradient, _: -0.1 * gradient / np.sqrt(np.square(gradient).mean(1, keepdims=True)),
    "by columns": lambda gradient, _: -0.1 * gradient / np.sqrt(np.square(gradient).mean(0, keepdims=True)),
    "by its norm": lambda gradient, _: -gradient / norm(gradient),
    "by the weight's norm": lambda gradient, weight: -0.01 * gradient * norm(weight),
    "by both norms": lambda gradient, weight: -0.1 * gradient * norm(weight) / norm(gradient),
}
"""What each adds to a weight, by its gradient and what it was."""

FACTORS = {"twice": 2.0, "three times": 3.0, "at another rate": 1.37, "backwards": -1.0, "not at all": 0.0}
SLIPS = (
    *("rightly", "by its part", "by its part on the last rank", "by the norm of copies", *FACTORS, "at own rates"),
    *("without the last element", "without three elements", "with more decay", "with less decay"),
    *("with more decay on the last rank", "before its sum", "with noise"),
)
BESIDE = (
    *("alone", "another weight rightly", "other settings", "another rate", "no gradient", "no gradient of it"),
    *("no start", "others alike", "small gradients", "small rows", "another group", "another group of small gradients"),
)
"""What is beside the weight, or missing."""


@dataclass
class Update:
    """A step of an optimizer.

    Attributes:
        mesh: The mesh.
        placements: Of weights, along the last two axes.
        optimizer: The optimizer.
        slip: What it does wrongly to the first weight.
        beside: What is beside it.
    """

    mesh: Mesh
    placements: tuple[str, ...]
    optimizer: str
    slip: str
    beside: str

    def __post_init__(self) -> None:
        random = np.random.default_rng(21)
        names = NAMES[:1] if self.beside == "alone" else NAMES
        self.weights = {name: random.standard_normal(SHAPE) for name in names}
        self.gradients = {name: random.standard_normal(SHAPE) for name in names}
        if "small gradients" in self.beside:
            self.gradients["up.weight"] *= 1e-12
        if self.beside == "small rows":
            self.gradients["up.weight"][5:] *= 1e-12
        self.step = Step(self.mesh)

    def put(self, role: str, name: str, moment: str, wanted: Array, held: Held | None = None) -> None:
        """Add a tensor as ranks have it, and as the unsharded model has it."""
        place = self.place(wanted)
        self.step.put(role, name, "step", place.cut(wanted) if held is None else held, place.layout, dtype="float64")
        self.step.put(role, name, moment, {0: wanted}, dtype="float64")

    def place(self, whole: Array) -> Place:
        """Return where a tensor is: as the weights, or whole on all ranks if it has other dims."""
        own = self.placements if whole.ndim == len(SHAPE) else (R, R)
        claims = tuple(map(parse_placement, (*(R,) * (self.mesh.ndim - 2), *own)))
        return Place(self.mesh, Layout.from_placements(self.mesh, whole.shape, claims), whole, whole)

    def made(self) -> Step:
        """Return the step, with weights after it."""
        self.step.put("param", "norm.bias", "reference", {0: np.ones(6)})
        for name, gradient in self.gradients.items():
            is_first = name == "up.weight"
            if self.beside != "no gradient" and not (is_first and self.beside == "no gradient of it"):
                self.put("grad", name, "reference", gradient)
            elif is_first:
                self.step.put("grad", name, "step", self.place(gradient).cut(gradient), self.place(gradient).layout)
            if self.beside != "no start":
                self.step.put("param", name, "reference", {0: self.weights[name]}, dtype="float64")
            due = OPTIMIZERS[self.optimizer](gradient, self.weights[name])
            after, held = self.weights[name] + due, None
            if is_first or self.beside == "others alike":
                held = self.slipped(name, due)
            self.put("param", name, "updated", after, held)
        if self.beside in ("other settings", "another rate"):
            word = "lr of group 0" if self.beside == "another rate" else "weight_decay of group 0"
            self.step.fields = {"other_settings": (f"{word} is 0.1, and 0.2 in the unsharded model",)}
        if self.beside.startswith("another group"):
            self.step.fields = {"other_options": (("up.weight", "lr", "0.1", "0.2"),)}
        return self.step

    def slipped(self, name: str, due: Array) -> Held:
        """Return what ranks have of a weight after a step that went wrong."""
        weight, gradient, slip, last = self.weights[name], self.gradients[name], self.slip, max(self.mesh.ranks)
        place = self.place(weight)
        start, steps, parts = place.cut(weight), place.cut(due), place.cut(gradient)
        of_parts = {rank: OPTIMIZERS[self.optimizer](part, start[rank]) for rank, part in parts.items()}
        ways: dict[str, Callable[[int], Array]] = {
            "by its part": lambda rank: of_parts[rank],
            "by its part on the last rank": lambda rank: of_parts[rank] if rank == last else steps[rank],
            "by the norm of copies": lambda rank: steps[rank] / np.sqrt(self.mesh.shape[-1]),
            "at own rates": lambda rank: steps[rank] * (1 + rank),
            "with more decay": lambda rank: steps[rank] - 0.02 * start[rank],
            "with less decay": lambda rank: steps[rank] + 0.02 * start[rank],
            "with more decay on the last rank": lambda rank: steps[rank] - 0.02 * start[rank] * (rank == last),
            "before its sum": lambda rank: steps[rank] - 0.05 * np.cos(9 * parts[rank] + rank),
            "with noise": lambda rank: steps[rank] + 0.03 * np.sin(7 * parts[rank]),
        }
        if slip.startswith("without"):
            count = 3 if "three" in slip else 1
            still = np.arange(due.size) < due.size - count
            return place.cut(weight + due * still.reshape(due.shape))
        way = ways.get(slip, lambda rank: steps[rank] * FACTORS.get(slip, 1.0))
        return {rank: start[rank] + way(rank) for rank in start}


STATES: Mapping[str, Callable[[Array], Array]] = {
    "exp_avg": lambda gradient: 0.1 * gradient,
    "exp_avg_sq": lambda gradient: 0.001 * np.square(gradient),
    "momentum_buffer": lambda gradient: gradient,
    "exp_avg_sq_row": lambda gradient: 0.01 * np.square(gradient).mean(1),
    "exp_avg_sq_col": lambda gradient: 0.01 * np.square(gradient).mean(0),
    "step": lambda _: np.array(3.0),
}
"""What the first step leaves in each state, by the gradient."""

OF_STATES = (
    *(
        "rightly",
        "from zeros",
        "doubled",
        "of another weight",
        "of another rank",
        "reversed",
        "constant",
        "a step more",
    ),
    *("zeros on the last rank", "of the square", "with noise", "NaN"),
)


def states_of(update: Update, kind: str, slip: str) -> Step:
    """Return a step with a state of each weight, that of the first with a slip."""
    update.made()
    for name, gradient in update.gradients.items():
        first = STATES[kind](gradient)
        wanted = first + 0.9 * np.cos(5 * first)
        held = None
        if slip != "rightly" and name == "up.weight":
            place, other = update.place(wanted), STATES[kind](update.gradients[[*update.gradients][-1]])
            held = slipped_state(slip, *(place.cut(whole) for whole in (wanted, first, other)))
        update.put("optim", f"{name}.{kind}", "updated", wanted, held)
    return update.step


def slipped_state(slip: str, held: Held, first: Held, other: Held) -> Held:
    """Return what ranks have of a state, by what is due, what begins from zeros, and what another weight has."""
    ranks = sorted(held)
    ways: dict[str, Callable[[int], Array]] = {
        "from zeros": lambda rank: first[rank],
        "doubled": lambda rank: held[rank] * 2,
        "of another weight": lambda rank: other[rank],
        "of another rank": lambda rank: held[ranks[ranks.index(rank) - 1]],
        "reversed": lambda rank: held[rank][::-1],
        "constant": lambda rank: np.ones_like(held[rank]),
        "a step more": lambda rank: held[rank] + 1,
        "zeros on the last rank": lambda rank: held[rank] * (rank < ranks[-1]),
        "of the square": lambda rank: np.square(held[rank]),
        "with noise": lambda rank: held[rank] + 0.01 * np.sin(7 * held[rank]),
        "NaN": lambda rank: held[rank] * np.nan,
    }
    return {rank: ways[slip](rank) for rank in ranks}


def cases() -> Iterator[tuple[str, Step]]:
    """Yield every optimizer with every slip, and every state with its slips; all else in turn."""
    for at, (optimizer, slip, again) in enumerate(product(OPTIMIZERS, SLIPS, range(2))):
        mesh, placements = MESHES[at % 3], LAYOUTS[(at + at // 7) % len(LAYOUTS)]
        beside = "another weight rightly" if again else BESIDE[(at // 2) % len(BESIDE)]
        update = Update(mesh, placements, optimizer, slip, beside)
        yield f"weight {optimizer} {slip}, {' '.join(placements)}, {beside}, {mesh.size}", update.made()
    for at, (kind, slip) in enumerate([*product(STATES, OF_STATES)] * 2):
        mesh, placements = MESHES[at % 3], LAYOUTS[(at + at // 7) % len(LAYOUTS)]
        beside = BESIDE[(at + at // 5) % len(BESIDE)]
        update = Update(mesh, placements, "SGD", "rightly", beside)
        with contextlib.suppress(ValueError, IndexError):  # a number has no rows
            yield f"state {kind} {slip}, {' '.join(placements)}, {beside}, {mesh.size}", states_of(update, kind, slip)


def main() -> None:
    """Make the room, judge it, and keep what is judged in many ways."""
    room = store.Room(ROOM)
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder, np.errstate(all="ignore"):
        for at, (name, step) in enumerate(cases()):
            room.add(name, ("check", "{0}"), [store.files_of(step.write(Path(folder, f"{at}.shardviz")))])
        room.keep(chosen(judge_room(room), MOST_ALIKE, role_of))
    record(room)


if __name__ == "__main__":
    main()
