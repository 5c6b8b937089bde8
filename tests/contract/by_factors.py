"""`python -m tests.contract.by_factors`: the room `factors`, of results that are the wanted ones times numbers.

Gradients, of which all, some or one have a factor, on all ranks, on one or on each another, with what may divide them
and what is known of the batch; norms that were put together in every wrong way, and clipped by; functions of a loss
that were taken before its mean, each with numbers that they are not defined for; replays of narrow gradients.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.dump.records.step import NoiseRecord, WrapperRecord, of_replay
from shardviz.dump.records.tensors import Stamp
from shardviz.layout.layout import Layout
from shardviz.layout.mesh import parse_mesh
from shardviz.layout.placements import parse_placement
from tests.contract import store
from tests.contract.by_step import Step, role_of
from tests.contract.choosing import chosen
from tests.contract.judge import IN_MEMORY, judge_room, record
from tests.contract.step_changes import AVG, S0, S1, R

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from shardviz.layout.mesh import Mesh

    Array = NDArray[Any]
    Held = dict[int, Array]

ROOM = "factors"
MOST_ALIKE = 1
MESHES = tuple(map(parse_mesh, ("dp=2,tp=2", "dp=2,tp=3", "dp=4,tp=2")))
SHAPE = (12, 4)
NAMES = ("layers.0.up.weight", "layers.0.down.weight", "head.weight")
CLAIMS: tuple[tuple[str, str] | None, ...] = ((R, R), (R, S0), (S0, R), (S0, S1), None)
FACTORS = (
    *(2.0, 0.5, 4.0, 1 / 3, 6.0, 1.37, 0.73, 15.9, 16.0, 24.0, 1024.0),
    *(1.0015, 1.003, 0.997, 1024.002, -2.0, 0.0),
)
WHO: Mapping[str, Callable[[int, float, int], float]] = {
    "all": lambda _, factor, __: factor,
    "the last": lambda rank, factor, count: factor if rank == count - 1 else 1.0,
    "all but the first": lambda rank, factor, _: factor if rank else 1.0,
    "each its own": lambda rank, factor, _: factor * (1 + rank / 8),
    "two of them": lambda rank, factor, _: (1.0, factor, 1.0, factor * (1 + 3e-5))[rank % 4],
}
OTHERS = ("alike", "right", "zero", "of another factor", "alone", "tied", "one alike")
LOSSES = ("right", "of the factor", "zero", "wrong", "absent", "no batch axis")


@dataclass
class Gradients:
    """A step's gradients.

    Attributes:
        mesh: The mesh.
        claim: The placements of all; None for plain tensors.
        others: What is beside the first.
        loss: What the loss is.
    """

    mesh: Mesh
    claim: tuple[str, str] | None
    others: str = "alike"
    loss: str = "right"

    def __post_init__(self) -> None:
        numbers = np.random.default_rng(12)
        self.names = NAMES[: 1 if self.others == "alone" else 3]
        self.wanted = {name: numbers.standard_normal(SHAPE) for name in self.names}
        if self.others == "zero":
            self.wanted[NAMES[2]] *= 0
        if self.others == "tied":
            self.wanted[NAMES[2]] = self.wanted[NAMES[0]]
        self.step = Step(self.mesh)

    def cut(self, whole: Array) -> tuple[Held, Layout]:
        """Return each rank's part."""
        placements = tuple(map(parse_placement, self.claim or (R, R)))
        layout = Layout.from_placements(self.mesh, whole.shape, placements)
        return {rank: whole.ravel()[region.flat_ids(whole.shape)] for rank, region in layout.regions()}, layout

    def made(self, factor: Callable[[int], float], of_loss: float = 1.0) -> Step:
        """Return the step in which each rank has its parts times a number."""
        for at, (name, whole) in enumerate(self.wanted.items()):
            held, layout = self.cut(whole)
            is_alike = not at or self.others in ("alike", "zero", "tied") or (self.others == "one alike" and at == 1)
            by = factor if is_alike else (lambda _: 3.0 if self.others == "of another factor" else 1.0)
            parts = {rank: part * by(rank) for rank, part in held.items()}
            self.step.put("grad", name, "step", parts, layout if self.claim else None, dtype="float64")
            self.step.put("grad", name, "reference", {0: whole}, dtype="float64")
        if self.others == "tied":
            for at, name in enumerate(NAMES):
                owner, number = (NAMES[0], 0) if at == 2 else ("", at)
                self.step.stamps.append(Stamp(name, 1 + 100 * number, SHAPE, tied_to=owner))
        if self.loss != "absent":
            wanted = 0.0 if self.loss == "zero" else 2.5
            held_loss = wanted * of_loss if self.loss == "of the factor" else wanted + 0.2 * (self.loss == "wrong")
            self.log("loss", wanted, dict.fromkeys(self.mesh.ranks, held_loss), is_mean=self.loss != "no batch axis")
        return self.step

    def log(self, name: str, wanted: float, held: Mapping[int, float], *, is_mean: bool = False) -> None:
        """Add a number that ranks log."""
        layout = Layout.from_placements(self.mesh, (), tuple(map(parse_placement, (AVG if is_mean else R, R))))
        parts = {rank: np.array(value) for rank, value in held.items()}
        self.step.put("scalar", name, "step", parts, layout, dtype="float64")
        self.step.put("scalar", name, "reference", {0: np.array(wanted)}, dtype="float64")


def with_factors() -> Iterator[tuple[str, Step]]:
    """Yield gradients with a factor."""
    for at, (factor, who, others) in enumerate(product(FACTORS, WHO, OTHERS)):
        mesh, claim = MESHES[at % len(MESHES)], CLAIMS[(at + at // 7) % len(CLAIMS)]
        loss = LOSSES[(at + at // 5) % len(LOSSES)]
        gradients = Gradients(mesh, claim, others, loss)
        step = gradients.made(lambda rank, of=factor, way=who, size=mesh.size: WHO[way](rank, of, size), factor)
        divides = (None, None, 1.0, 2.0, 4.0)[at % 5]
        for rank in mesh.ranks if at % 3 == 0 else ():
            wrapper = WrapperRecord(("fsdp", "ddp")[at % 2], mesh.group_of(rank, "dp"), gradients.names[:2], divides)
            step.of_ranks[rank] = {"wrappers": (wrapper,)}
        yield f"grad times {factor:g}, {who}, {others}, loss {loss}, {claim}, {mesh}, {divides}", step


NORMS: tuple[str, ...] = ("squares", "mean", "sum", "of the first", "not at all")


def norm_over(mesh: Mesh, parts: Mapping[int, float], axes: tuple[str, ...], way: str) -> dict[int, float]:
    """Return the norm that each rank logs, of each rank's own sum of squares."""
    norms = {}
    for rank in mesh.ranks:
        group = {rank}
        for axis in axes:
            group = {other for one in group for other in mesh.group_of(one, axis)}
        squares = [parts[other] for other in sorted(group)]
        roots = np.sqrt(squares)
        ways = {"squares": np.sqrt(sum(squares)), "mean": roots.mean(), "sum": roots.sum(), "of the first": roots[0]}
        norms[rank] = float(ways.get(way, np.sqrt(parts[rank])))
    return norms


def norms() -> Iterator[tuple[str, Step]]:
    """Yield norms that were put together in every way, logged and clipped by."""
    over: tuple[tuple[str, ...], ...] = (("dp",), ("tp",), ("dp", "tp"), ())
    for at, (way, axes, claim, kind) in enumerate(product(NORMS, over, CLAIMS, ("logged", "clipped", "both"))):
        gradients = Gradients(MESHES[at % 2], claim, ("alike", "tied", "alone")[at % 3])
        whole = float(np.sqrt(sum(np.square(own).sum() for own in gradients.wanted.values())))
        cut = [gradients.cut(own)[0] for own in gradients.wanted.values()]
        squares = {rank: float(sum(np.square(part[rank]).sum() for part in cut)) for rank in gradients.mesh.ranks}
        wrong = norm_over(gradients.mesh, squares, axes, way)
        to = 1.0 if at % 4 else 0.37
        step = gradients.made(lambda rank, of=wrong, to=to, on=kind: to / (of[rank] or 1.0) if on != "logged" else 1.0)
        if kind != "clipped":
            gradients.log("grad_norm", whole, wrong if kind == "logged" else dict.fromkeys(wrong, whole))
        yield f"norm {way} over {axes}, {kind}, to {to}, {claim}, {gradients.others}", step
    for at, (to, claim, eps) in enumerate(product((1.0, 0.5, 0.123, 10.0), CLAIMS, (0.0, 1e-6, 1e-3))):
        gradients = Gradients(MESHES[0], claim, ("alike", "tied", "alone", "zero")[at % 4])
        whole = float(np.sqrt(sum(np.square(own).sum() for own in gradients.wanted.values())))
        step = gradients.made(lambda _, by=to / (whole + eps): by)
        gradients.log("grad_norm", whole, dict.fromkeys(MESHES[0].ranks, to if at % 2 else whole))
        yield f"norm clipped to {to}, {eps}, {claim}, {gradients.others}", step


FUNCTIONS: Mapping[str, Callable[[Array], Array]] = {
    **{"exp": np.exp, "log": np.log, "log2": np.log2, "sqrt": np.sqrt, "square": np.square},
    **{"1 / x": np.reciprocal, "exp2": np.exp2, "cube": lambda values: values**3},
}


def functions() -> Iterator[tuple[str, Step]]:
    """Yield a logged function of the loss, before its mean over ranks, over other axes, or of some ranks."""
    spreads = {"positive": (2.0, 3.0), "of both signs": (-1.0, 2.0), "zero": (0.0, 0.0), "large": (600.0, 900.0)}
    for at, ((name, function), (which, both)) in enumerate(product(FUNCTIONS.items(), spreads.items())):
        ways = ("before the mean", "on the last rank", "over nothing", "of another loss")
        for way in ways if which == "positive" else ways[:1]:
            gradients = Gradients(MESHES[0], (R, R), "right", ("absent", "no batch axis")[way == "over nothing"])
            step = gradients.made(lambda _: 1.0)
            own = {rank: both[rank // 2] for rank in gradients.mesh.ranks}
            if way != "over nothing":
                gradients.log("loss", sum(both) / 2, own, is_mean=True)
            mean = float(np.mean([function(np.array(value)) for value in both]))
            right = float(function(np.array(sum(both) / 2)))
            held = dict.fromkeys(own, mean if way != "of another loss" else mean * 1.01)
            if way == "on the last rank":
                held |= dict.fromkeys(list(own)[:-1], right)
            gradients.log("logged", right, held)
            yield f"function {name} {way}, {which} {at}", step


REPLAYS: Mapping[str, Callable[[Array], Array]] = {
    "right": lambda whole: whole,
    "a little off": lambda whole: whole + 0.01 * np.sin(9 * whole),
    "far off": lambda whole: whole + 0.5 * np.sin(9 * whole),
    "zero": lambda whole: whole * 0,
    "of another shape": lambda whole: whole.T,
}
"""What a module's own activations give of its weight's gradient."""


def replayed() -> Iterator[tuple[str, Step]]:
    """Yield gradients in bfloat16 that are off by a small factor from what their module's activations give."""
    factors, sizes = (1.02, 0.985, 1.006, 1.012, 1.3), ((12, 4), (3, 4))
    for at, (factor, count, way, shape) in enumerate(product(factors, (1, 2, 3, 4), REPLAYS, sizes)):
        gradients, numbers = Gradients(MESHES[0], CLAIMS[at % 4], "alone", LOSSES[at % 6]), np.random.default_rng(14)
        step, names = gradients.step, [f"layers.{number}.weight" for number in range(count)]
        for number, name in enumerate(names):
            whole = numbers.standard_normal(shape)
            by = factor if not number or at % 3 == 0 else 1.0
            held, layout = gradients.cut(whole * by)
            step.put("grad", name, "step", held, layout)
            step.put("grad", name, "reference", {0: whole})
            if number < 3 or at % 2:
                step.put("activation", of_replay(name), "reference", {0: REPLAYS[way](whole)})
        noise = tuple(NoiseRecord("grad", name, 0.05, 0.02) for name in names)
        step.fields = {"narrowed_to": ("bfloat16",), "noise": noise} if at % 7 else {}
        yield f"replay times {factor}, {count}, {way}, {shape}, {at}", step


def group_of(name: str) -> str:
    """Return the role of what is changed; of a function, also which one it is."""
    return name.partition(",")[0] if name.startswith("function") else role_of(name)


def main() -> None:
    """Make the room, judge it, and keep what is judged in many ways."""
    room = store.Room(ROOM)
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder, np.errstate(all="ignore"):
        for at, (name, step) in enumerate(chain(with_factors(), norms(), functions(), replayed())):
            room.add(name, ("check", "{0}"), [store.files_of(step.write(Path(folder, f"{at}.shardviz")))])
        room.keep(chosen(judge_room(room, processes=0), MOST_ALIKE, group_of))
    record(room)


if __name__ == "__main__":
    main()
