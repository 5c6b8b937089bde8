"""`python -m tests.contract.by_module`: the room `modules`, of steps with what their modules return, made by rule.

The output is wrong, and the modules before it return what is right, another order, the same rows everywhere, terms or
nothing of the unsharded model's; plain weights lie in rising, falling or dealt parts; layers of a pipeline stand on
their stages or elsewhere; gradients of weights on different ranks are their own, mixed, or those of a tied name.
"""

from __future__ import annotations

import tempfile
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.dump.records.step import StageRecord, of_loss_term, of_micro_batch
from shardviz.dump.records.tensors import Stamp
from shardviz.layout.layout import Layout
from shardviz.layout.mesh import parse_mesh
from shardviz.layout.placements import parse_placement
from tests.contract import store
from tests.contract.by_step import Step, role_of
from tests.contract.choosing import chosen
from tests.contract.judge import IN_MEMORY, judge_room, record
from tests.contract.step_changes import AVG, MOST_ALIKE, S0, S1, SUM, VECTOR, R

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    Array = NDArray[Any]

ROOM = "modules"
MESH = parse_mesh("dp=2,tp=2")
TOKENS, FEATURES = 8, 6
MODULES = ("embed", "layers.0", "layers.1", "head")
CLAIMS = {"right": (R, S0), "columns": (R, S1), "pending": (R, SUM), "batch": (S0, R)}
"""States of an output that its placements say."""
PARTS: dict[str, Callable[[Array, int], Array]] = {
    "whole": lambda whole, _: whole,
    "rows": lambda whole, at: np.split(whole, 2)[at],
    "head-tail": lambda whole, at: np.concatenate([np.split(whole, 4)[at], np.split(whole, 4)[3 - at]]),
    "same rows": lambda whole, _: whole[: TOKENS // 2],
    "rows twice": lambda whole, _: np.concatenate([whole[: TOKENS // 2]] * 2),
    "part": lambda whole, at: np.split(whole, 2, 1)[at],
    "odd": lambda whole, at: whole + np.sin(np.arange(TOKENS))[:, None] * (at + 1),
    "odd in half": lambda whole, at: whole + (np.arange(TOKENS) >= TOKENS // 2)[:, None] * (1.5 + at),
    "odd rows": lambda whole, at: np.split(whole + np.sin(np.arange(TOKENS))[:, None], 2)[at],
}
"""What a rank at a place along tp has of a module's output that claims nothing."""
OUTPUTS: dict[str, Callable[[Array, int], Array]] = {
    **{name: PARTS[name] for name in ("odd", "odd in half", "rows twice")},
    "reversed": lambda whole, _: whole[::-1],
    "halved beside a vector": lambda whole, _: (whole - VECTOR) / 2 + VECTOR,
    "twice beside a vector": lambda whole, _: (whole - VECTOR) * 2 + VECTOR,
    "terms beside a vector": lambda whole, at: (whole - VECTOR) * (0.25, 0.75)[at] + VECTOR,
    "terms in a row": lambda whole, _: np.concatenate([whole * 0.25, whole * 0.75]),
    "terms side by side": lambda whole, _: np.concatenate([whole - 1, np.ones_like(whole)], 1),
    "odd on one": lambda whole, at: whole + at,
}
"""What ranks return in place of the model's output."""


def weights(way: str) -> Iterator[tuple[str, tuple[int, ...], list[tuple[tuple[int, int], ...]]]]:
    """Yield plain weights: the name, the shape, and the ranges of the first dim along tp."""
    rise, fall = [((0, 4),), ((4, 8),)], [((4, 8),), ((0, 4),)]
    dealt, same = [((0, 2), (4, 6)), ((2, 4), (6, 8))], [((0, 4),)] * 2
    every = [tuple((at, at + 1) for at in range(first, 8, 2)) for first in (0, 1)]
    first = {"rise": rise, "fall": fall, "dealt": dealt, "same": same, "in turn": every}[way.partition(" of ")[0]]
    shape = (8, 6, 4) if way.endswith("experts") else (8, 6)
    yield "layers.0.weight", shape, first
    yield "layers.1.weight", (8, 6), rise
    if way.endswith("fused"):
        yield "head.weight", (6, 4), [((0, 6),)] * 2


def with_outputs(step: Step, states: tuple[str, ...], output: str, claim: tuple[str, str]) -> None:
    """Add what each module returns, and an output that is wrong."""
    random = np.random.default_rng(3)
    mesh = step.mesh
    for module, state in zip(MODULES, states, strict=True):
        whole = random.standard_normal((TOKENS, FEATURES))
        step.put("activation", module, "reference", {0: whole})
        if state in CLAIMS:
            layout = Layout.from_placements(mesh, whole.shape, tuple(map(parse_placement, CLAIMS[state])))
            held = {rank: layout.region_of_rank(rank).flat_ids(whole.shape) for rank in mesh.ranks}
            step.put("activation", module, "step", {rank: whole.ravel()[ids] for rank, ids in held.items()}, layout)
        else:
            step.put("activation", module, "step", {rank: PARTS[state](whole, rank % 2) for rank in mesh.ranks})
    whole = random.standard_normal((TOKENS, FEATURES))
    step.put("output", "output", "reference", {0: whole})
    step.put("param", "head.bias", "reference", {0: VECTOR})
    held = {rank: OUTPUTS[output](whole, rank % 2) for rank in mesh.ranks}
    layout = Layout.from_placements(mesh, held[0].shape, tuple(map(parse_placement, (R, R))))
    if claim == (S0, R):
        held = {rank: np.split(part, 2)[rank // 2] for rank, part in held.items()}
        layout = Layout.from_placements(mesh, layout.shape, tuple(map(parse_placement, claim)))
    step.put("output", "output", "step", held, layout)
    number = Layout.from_placements(mesh, (), tuple(map(parse_placement, (AVG, R))))
    step.put("scalar", "loss", "step", dict.fromkeys(mesh.ranks, np.array(2.5)), number)
    step.put("scalar", "loss", "reference", {0: np.array(2.25)})


def forward() -> Iterator[tuple[str, Step]]:
    """Yield steps with a wrong output, by what modules return and where plain weights lie."""
    states, ways = (*CLAIMS, *PARTS), ("rise", "fall", "dealt", "same", "in turn", "rise of fused", "dealt of fused")
    outputs = list(OUTPUTS)
    for number, (second, third) in enumerate(product(states, states)):
        output, way = outputs[number % len(outputs)], ways[number % len(ways)]
        step, claim = Step(MESH), ((R, R), (S0, R))[number % 2]
        first, last = ("right", "rows", "whole")[number % 3], ("odd", "part", "pending", "same rows")[number % 4]
        with_outputs(step, (first, second, third, last), output, claim)
        for at, (name, shape, ranges) in enumerate(weights(way)):
            step.stamps.append(Stamp(name, 1 + 1000 * at, shape))
            for rank in MESH.ranks if number % 5 else ():
                step.hold(rank, name, shape, ranges[rank % 2], *[((0, size),) for size in shape[1:]])
        if number % 7 == 3:
            step.fields = {"schedule": tuple(StageRecord(0, at) for at in (0, 1))}
        yield f"{first}, {second}, {third}, {last}, weights {way}: {output} {' '.join(claim)}", step


def experts() -> Iterator[tuple[str, Step]]:
    """Yield steps in which the rows of some experts are wrong."""
    for way, right, count in product(("rise", "in turn", "dealt"), ((0, 7), (0,), (), (0, 2, 5, 7)), (8, 4)):
        step, random = Step(MESH), np.random.default_rng(5)
        scores, whole = random.standard_normal((TOKENS, count)), random.standard_normal((TOKENS, FEATURES))
        scores[np.arange(TOKENS), np.arange(TOKENS) % count] += 9
        layout = Layout.from_placements(MESH, scores.shape, tuple(map(parse_placement, (R, R))))
        step.put("activation", "router", "reference", {0: scores})
        step.put("activation", "router", "step", dict.fromkeys(MESH.ranks, scores), layout)
        step.put("output", "output", "reference", {0: whole})
        is_wrong = ~np.isin(scores.argmax(1), right)
        layout = Layout.from_placements(MESH, whole.shape, tuple(map(parse_placement, (R, R))))
        step.put("output", "output", "step", dict.fromkeys(MESH.ranks, whole + is_wrong[:, None]), layout)
        for name, shape, ranges in list(weights(f"{way} of experts"))[:1]:
            step.stamps.append(Stamp(name, 1, shape))
            for rank in MESH.ranks:
                step.hold(rank, name, shape, ranges[rank % 2], *[((0, size),) for size in shape[1:]])
        yield f"experts {way}, right {right} of {count}", step


def stages() -> Iterator[tuple[str, Step]]:
    """Yield pipelines whose layers stand on their stages, on others, on several or on none."""
    mesh = parse_mesh("pp=4,tp=2")
    ways: dict[str, tuple[tuple[int, ...], ...]] = {
        "in order": ((0,), (1,), (2,), (3,)),
        "two exchanged": ((0,), (2,), (1,), (3,)),
        "backwards": ((3,), (2,), (1,), (0,)),
        "one twice": ((0,), (0, 1), (2,), (3,)),
        "one on none": ((0,), (1,), (), (3,)),
        "all on the first": ((0, 1, 2, 3), (), (), ()),
        "in a loop": ((0, 4), (1, 5), (2, 6), (3, 7)),
        "in a V": ((0, 7), (1, 6), (2, 5), (3, 4)),
        "in pairs": ((0, 1), (2, 3), (4, 5), (6, 7)),
        "a loop with two exchanged": ((0, 5), (1, 4), (2, 6), (3, 7)),
    }
    runs = {"no schedule": None, "a stage each": (1, 0), "two stages, a loop": (2, 0), "two stages, a V": (2, 1)}
    for (way, layers), (run, stage) in product(ways.items(), runs.items()):
        step, random = Step(mesh), np.random.default_rng(6)
        count = 1 + max(chain.from_iterable(layers))
        step.stamps = [Stamp(f"layers.{at}.weight", 1 + 100 * at, (4, 4)) for at in range(count)]
        for rank in mesh.ranks:
            coord = rank // 2
            for layer in layers[coord]:
                step.hold(rank, f"layers.{layer}.weight", (4, 4), ((0, 4),), ((0, 4),))
            if stage is not None:
                numbers = (coord, (7 - coord) if stage[1] else coord + 4)[: stage[0]]
                step.of_ranks[rank] = {"schedule": tuple(StageRecord(number, 0) for number in numbers)}
        whole = random.standard_normal((TOKENS, FEATURES))
        holders = [rank for rank in mesh.ranks if rank // 2 == (0 if run.endswith("V") else 3)]
        step.put("output", "output", "reference", {0: whole})
        layout = Layout.from_placements(mesh, whole.shape, tuple(map(parse_placement, (R, R))))
        step.put("output", "output", "step", dict.fromkeys(holders, whole[::-1] * 1.1), layout)
        yield f"stages {way}, {run}", step


def gradients() -> Iterator[tuple[str, Step]]:
    """Yield gradients of weights on different ranks of a pipeline: their own, mixed, shared, or of a tied name."""
    mesh, random = parse_mesh("pp=2,tp=2"), np.random.default_rng(7)
    wanted = {name: random.standard_normal((8, 4)) for name in ("embed.weight", "head.weight")}
    wanted["head.weight"] = wanted["embed.weight"].copy()  # both are the gradient of the one weight that they were
    own = {"embed.weight": 0.3 * np.cos(9 * wanted["embed.weight"])}
    own["head.weight"] = wanted["head.weight"] - own["embed.weight"]
    ways: dict[str, Callable[[str], Array]] = {
        "of its own use": own.__getitem__,
        "averaged": lambda name: wanted[name] / 2,
        "of the other use": lambda name: own["head.weight" if name == "embed.weight" else "embed.weight"],
        "equal and of none": lambda _: np.sin(wanted["embed.weight"] * 3),
        "twice": lambda name: wanted[name] * 2,
        "of its own use, doubled": lambda name: own[name] * 2,
    }
    for (way, value), tied, rows in product(ways.items(), (True, False), ("rows", "columns", "whole", "others")):
        step = Step(mesh)
        for at, name in enumerate(wanted):
            first, owner = (1, "embed.weight") if at and tied else (1 + 100 * at, "")
            step.stamps.append(Stamp(name, first, (8, 4), tied_to=owner))
            step.put("grad", name, "reference", {0: wanted[name]})
            claims = {"rows": (R, S0), "columns": (R, S1), "whole": (R, R), "others": ((R, S0), (R, S1))[at]}
            layout = Layout.from_placements(mesh, (8, 4), tuple(map(parse_placement, claims[rows])))
            values = value(name)
            held = {rank: layout.region_of_rank(rank).flat_ids((8, 4)) for rank in mesh.ranks if rank // 2 == at}
            parts = {rank: values.ravel()[ids] for rank, ids in held.items()}
            if rows == "others" and way == "equal and of none":
                parts = {rank: np.resize(values.ravel()[:16], part.shape) for rank, part in parts.items()}
            step.put("grad", name, "step", parts, layout)
        yield f"two names {way}, {'tied' if tied else 'of two weights'}, {rows}", step


def terms() -> Iterator[tuple[str, Step]]:
    """Yield gradients in which micro-batches, or terms of the loss, count too often or not at all."""
    counts = ((1, 0), (0, 1), (2, 1), (2, 0), (1, 3), (1, 1, 0), (0, 0, 1), (3, 2, 1), (4, 2, 1), (2, 0, 1), (1, 1, 1))
    for weights_, of, how in product(counts, ("micro-batches", "terms"), ("all", "one", "one rank", "with output")):
        step, random = Step(MESH), np.random.default_rng(9)
        layout = Layout.from_placements(MESH, (8, 6), tuple(map(parse_placement, (R, S0))))
        for at, name in enumerate(("up.weight", "down.weight", "norm.weight")):
            parts = [random.standard_normal((8, 6)) for _ in weights_]
            divisor = len(weights_) if of == "micro-batches" else 1
            reaches = [1.0 if of == "micro-batches" or at < 2 or number else 0.0 for number in range(len(weights_))]
            parts = [part * reach for part, reach in zip(parts, reaches, strict=True)]
            whole = sum(parts, np.zeros((8, 6))) / divisor
            wrong = sum((part * by for part, by in zip(parts, weights_, strict=True)), np.zeros((8, 6))) / divisor
            if how == "one" and at:
                wrong = whole
            name_of = of_micro_batch if of == "micro-batches" else of_loss_term
            for number, part in enumerate(parts):
                step.put("activation", name_of(name, number), "reference", {0: part})
            step.put("grad", name, "reference", {0: whole})
            ids = {rank: layout.region(MESH.coord_of(rank)).flat_ids((8, 6)) for rank in MESH.ranks}
            is_wrong = {rank: how != "one rank" or rank == 3 for rank in ids}
            held = {rank: (wrong if is_wrong[rank] else whole).ravel()[own] for rank, own in ids.items()}
            step.put("grad", name, "step", held, layout)
        number_of = Layout.from_placements(MESH, (), tuple(map(parse_placement, (AVG, R))))
        step.put("scalar", "loss", "step", dict.fromkeys(MESH.ranks, np.array(2.5)), number_of)
        step.put("scalar", "loss", "reference", {0: np.array(2.5 if how != "one" else 2.0)})
        if how == "with output":
            output = random.standard_normal((4, 6))
            claim = Layout.from_placements(MESH, (4, 6), tuple(map(parse_placement, (R, R))))
            step.put("output", "output", "step", dict.fromkeys(MESH.ranks, output + 1), claim)
            step.put("output", "output", "reference", {0: output})
        if of == "micro-batches":
            step.fields = {"schedule": tuple(StageRecord(0, at) for at in range(len(weights_)))}
        yield f"{of} {weights_} times, {how}", step


def main() -> None:
    """Make the room, judge it, and keep what is judged in many ways."""
    room = store.Room(ROOM)
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        for at, (name, step) in enumerate(chain(forward(), experts(), stages(), gradients(), terms())):
            room.add(name, ("check", "{0}"), [store.files_of(step.write(Path(folder, f"{at}.shardviz")))])
    room.keep(chosen(judge_room(room), MOST_ALIKE, role_of))
    record(room)


if __name__ == "__main__":
    main()
