"""`python -m tests.contract.by_update`: the room `updates`, of optimizers that step parts of weights like whole ones.

Six optimizers step three weights, each rightly or with a slip: by what a part alone says, by another rate, without the
last elements, with more decay, twice. The states that they keep begin from zeros, are another rank's, or stand in
another order; some have fewer numbers than their weight. What the unsharded model has beside it takes turns. Buffers
are of each rank's own rows, and reduced in every way or read as they are; weights are left out by optimizers of some
ranks, sent or not, and copies part.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.dump.records.step import CollectiveRecord, WrapperRecord
from shardviz.layout.layout import Layout
from shardviz.layout.placements import parse_placement
from tests.contract import store
from tests.contract.by_step import Step, role_of
from tests.contract.choosing import chosen
from tests.contract.judge import IN_MEMORY, judge_room, record
from tests.contract.step_changes import AVG, MESHES, MOST_ALIKE, S0, S1, SHAPE, Place, R

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


BUFFERS: Mapping[str, Callable[[Array, Array, int, int], Array]] = {
    "rightly": lambda due, _, __, ___: due,
    "to average": lambda due, _, dp, ___: due + (dp - 0.5) * np.cos(due),
    "to sum": lambda due, _, dp, ___: due / 2 + (dp - 0.5) * np.cos(due),
    "to take the most": lambda due, _, dp, ___: due - dp * np.abs(np.sin(9 * due)),
    "to take the least": lambda due, _, dp, ___: due + dp * np.abs(np.sin(9 * due)),
    "to take the most of one": lambda due, _, dp, ___: due - dp * (np.arange(due.size) == 0).reshape(due.shape),
    "to add": lambda due, old, dp, ___: old / 2 + (due - old / 2) * (0.25 + 0.5 * dp),
    "to add, off": lambda due, old, dp, ___: old / 2 + (due - old / 2) * (0.25 + 0.5 * dp) + 0.1 * np.sin(7 * due),
    "its own": lambda due, _, dp, ___: due + dp,
    "its own along tp": lambda due, _, __, tp: due + tp,
    "its own along both": lambda due, _, dp, tp: due + tp + 2 * dp,
    "twice": lambda due, _, __, ___: due * 2,
    "half": lambda due, _, __, ___: due / 2,
    "a little off": lambda due, _, __, ___: due + 3e-8,
    "more off": lambda due, _, __, ___: due + 3e-6,
    "NaN": lambda due, _, dp, ___: due * (np.nan if dp else 1.0),
}
"""What a rank has of a buffer after the step, by what is due, what was before, and its place along both axes."""


def buffers() -> Iterator[tuple[str, Step]]:
    """Yield steps after which ranks have a buffer of their own rows, or a wrong one."""
    sizes = {"one": (), "three": (3,), "twelve": (12,), "tiny": (12,), "whole numbers": (12,)}
    for at, (way, (size, shape), average) in enumerate(product(BUFFERS, sizes.items(), (True, False))):
        update = Update(MESHES[0], (R, R), "SGD", "rightly", "alone")
        step, random = update.made(), np.random.default_rng(31)
        mean = Layout.from_placements(MESHES[0], (), tuple(map(parse_placement, (AVG if average else R, R))))
        step.put("scalar", "loss", "step", dict.fromkeys(MESHES[0].ranks, np.array(2.5)), mean)
        step.put("scalar", "loss", "reference", {0: np.array(2.5)})
        due, old = random.standard_normal(shape) * (1e-8 if size == "tiny" else 1), random.standard_normal(shape)
        dtype = "int64" if size == "whole numbers" else "float32"
        if dtype == "int64":
            due, old = np.round(due * 10), np.round(old * 10)
        held = {rank: BUFFERS[way](due, old, rank // 2, rank % 2) for rank in MESHES[0].ranks}
        place = Layout.from_placements(MESHES[0], shape, tuple(map(parse_placement, (R, R))))
        name = "norm.running_mean"
        step.put("buffer", name, "step", held, place if at % 3 else None, dtype=dtype)
        step.put("buffer", name, "updated", {0: due}, dtype=dtype)
        if at % 4:
            step.put("buffer", name, "reference", {0: old}, dtype=dtype)
        beside = "norm.running_var" if at % 5 else "other.running_var"
        step.put("buffer", beside, "step", dict.fromkeys(held, np.ones(3)), None)
        step.put("buffer", beside, "updated", {0: np.ones(3)})
        notes: tuple[dict[str, Any], ...] = (
            *({}, {"not_saved": (name,)}, {"read_buffers": (name,)}, {"read_buffers": (beside,)}),
            {"read_buffers": (name,), "wrappers": (WrapperRecord("ddp", (0, 1, 2, 3), NAMES[:1]),)},
            {"read_buffers": (name,), "not_saved": (name,)},
        )
        step.fields = notes[(at + at // 6) % len(notes)]
        yield f"buffer {way}, {size}, {'averaged' if average else 'no batch'}, {at}", step


LEFT = (
    *("moved", "still", "still on the last rank", "still on some", "moved in two ways", "moved on one alone"),
    *("moved by another rate on the last rank", "smaller on the last rank"),
)
"""What becomes of a weight."""


def left_out() -> Iterator[tuple[str, Step]]:
    """Yield steps of weights that no optimizer steps, or those of some ranks, and of copies that part."""
    lists = ((), (0, 1, 2, 3), (3,), (1, 3), (0,))
    trained = ("all", "none", "zero", "no update")
    for at, (way, ranks, which) in enumerate(product(LEFT, lists, trained)):
        mesh, claim = MESHES[0], LAYOUTS[(at + at // 6) % len(LAYOUTS)]
        update, random = Update(mesh, claim, "SGD", "rightly", "alone"), np.random.default_rng(33)
        step, names = update.step, NAMES[: 1 + at % 3]
        for number, name in enumerate(names):
            weight, gradient = random.standard_normal(SHAPE), random.standard_normal(SHAPE)
            place = update.place(weight)
            after = weight - 0.1 * gradient
            start, end = place.cut(weight), place.cut(after)
            odd = place.cut(after + 0.1 * np.sin(9 * gradient))
            ways: dict[str, Callable[[int, Any, Any, Any], Array]] = {
                "moved": lambda _, __, end, ___: end,
                "still": lambda _, start, __, ___: start,
                "still on the last rank": lambda rank, start, end, _: start if rank == 3 else end,
                "still on some": lambda rank, start, end, _: start if rank % 2 else end,
                "moved in two ways": lambda rank, _, end, odd: odd if rank % 2 else end,
                "moved on one alone": lambda rank, start, end, _: end if rank == 0 else start,
                "moved by another rate on the last rank": lambda rank, start, end, _: (
                    start + (end - start) * (2 if rank == 3 else 1)
                ),
                "smaller on the last rank": lambda rank, _, end, __: end[:-1] if rank == 3 else end,
            }
            used = way if not number or at % 2 else "moved"
            held = {rank: ways[used](rank, start[rank], end[rank], odd[rank]) for rank in mesh.ranks}
            step.put("param", name, "step", held, place.layout, dtype="float64")
            step.put("param", name, "reference", {0: weight}, dtype="float64")
            if which in ("all", "zero"):
                update.put("grad", name, "reference", gradient * (which == "all" or number > 0))
            if which != "no update":
                step.put("param", name, "updated", {0: after}, dtype="float64")
            if at % 5 == 2:
                states = {rank: part + (rank % 2) for rank, part in place.cut(gradient).items()}
                step.put("optim", f"{name}.exp_avg", "step", states, place.layout)
                step.put("optim", f"{name}.exp_avg", "updated", {0: gradient})
        step.of_ranks = {rank: {"not_stepped": names[: 1 + at % 2]} for rank in ranks}
        if at % 7 == 3:
            step.fields = {"collectives": (CollectiveRecord("broadcast", ("dp",), 2),)}
        yield f"left {way}, not stepped by {ranks}, gradients {which}, {' '.join(claim)}, {len(names)}", step


def divided() -> Iterator[tuple[str, Step]]:
    """Yield steps in which rank 0 steps two of three weights for all ranks; what it sends of the first goes wrong."""
    random, ways = np.random.default_rng(34), ("arrives", "is overwritten", "is not sent")
    for way, claim in product(ways, LAYOUTS[::5]):
        update = Update(MESHES[0], claim, "SGD", "rightly", "alone")
        for name in NAMES:
            weight, gradient = random.standard_normal(SHAPE), random.standard_normal(SHAPE)
            place, after = update.place(weight), weight - 0.1 * gradient
            start, end = place.cut(weight), place.cut(after)
            used = way if name == NAMES[0] else "arrives"
            moves = {"arrives": MESHES[0].ranks, "is not sent": (0,), "is overwritten": ()}[used]
            held = {rank: (end if rank in moves else start)[rank] for rank in start}
            update.put("param", name, "updated", after, held)
            update.put("grad", name, "reference", gradient)
            update.step.put("param", name, "reference", {0: weight}, dtype="float64")
        update.step.of_ranks = {rank: {"not_stepped": NAMES[1:2] if rank == 0 else NAMES} for rank in MESHES[0].ranks}
        update.step.of_ranks[1] = {"not_stepped": (NAMES[0], NAMES[2])}
        yield f"divided, the first {way}, {' '.join(claim)}", update.step


def skipped() -> Iterator[tuple[str, Step]]:
    """Yield steps that some ranks take and others leave out, in a model whose optimizer steps, or leaves it out."""
    takers = ((), (0,), (1, 2), (0, 1, 2, 3))
    for is_due, takes, claim in product((True, False), takers, ((R, S0), (S0, S1), (S1, R))):
        mesh, random = MESHES[0], np.random.default_rng(35)
        update = Update(mesh, claim, "SGD", "rightly", "another weight rightly")
        for name in NAMES:
            weight, gradient = random.standard_normal(SHAPE), random.standard_normal(SHAPE)
            after = weight - 0.1 * gradient
            start, end = update.place(weight).cut(weight), update.place(weight).cut(after)
            held = {rank: end[rank] if rank in takes else start[rank] for rank in mesh.ranks}
            update.put("grad", name, "reference", gradient)
            update.put("param", name, "updated", after if is_due else weight, held)
            update.step.put("param", name, "reference", {0: weight}, dtype="float64")
        update.step.fields = {} if is_due else {"not_due": NAMES}
        word = "takes" if is_due else "leaves out"
        yield f"the unsharded model {word} a step that {takes} take, {' '.join(claim)}", update.step


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
        for at, (name, step) in enumerate(chain(cases(), buffers(), left_out(), skipped(), divided())):
            room.add(name, ("check", "{0}"), [store.files_of(step.write(Path(folder, f"{at}.shardviz")))])
        room.keep(chosen(judge_room(room), MOST_ALIKE, role_of))
    record(room)


if __name__ == "__main__":
    main()
