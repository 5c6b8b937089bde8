"""Training steps around a small model, run for all ranks in one process as the modules of `by_calls` are.

The batch is split over dp, and over tp where `BOTH` says so; each rank's loss is that of its rows. A step reduces
gradients by hand, or weights are sharded and their gradients reduced as FSDP does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from shardviz.dump.records.trace import STEP, LineRecord, LinesRecord, ValueRecord, of_value
from tests.contract.by_step import Step
from tests.contract.step_changes import AVG, S0, R
from tests.contract.taping import ALONE, Held, Tape, joined, numbers, put, summed

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardviz.layout.mesh import Mesh

ROWS, WIDTH, CLASSES = 16, 3, 4
WEIGHTS = {"first": (WIDTH + 1, WIDTH), "second": (CLASSES, WIDTH + 1), "bias": (CLASSES,)}
RATE = 0.5


@dataclass
class StepTape(Tape):
    """The calls of a step.

    Attributes:
        is_sharded: Whether weights and gradients are sharded over dp.
        params: The whole weights, of each rank.
        weights_held: Each rank's weights, or its parts of them.
        results: What the step leaves, by name.
    """

    is_sharded: bool = False
    params: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    weights_held: dict[str, Held] = field(default_factory=dict)
    results: dict[str, Held] = field(default_factory=dict)
    met: int = 0
    is_step = True

    def __post_init__(self) -> None:
        for at, (name, shape) in enumerate(WEIGHTS.items()):
            self.params[name] = [numbers(at, *shape).requires_grad_() for _ in self.mesh.ranks]

    @property
    def placements(self) -> tuple[str, str]:
        """Of weights and gradients."""
        return (S0, R) if self.is_sharded else (R, R)

    def reduced(self, given: Held, *, axis: str = "dp", mean: bool = False) -> Held:
        """Record a sum or a mean over ranks that is written into the tensor."""
        made = summed(self, given, backward="none", axis=axis, times=1 / self.mesh.axis_size(axis) if mean else 1)
        made.memory = given.memory
        return made

    def model(self, x: Held) -> Held:
        """Record a call of the model."""
        first, second, bias = (self.params[name] for name in WEIGHTS)
        parts = [
            functional.linear(torch.tanh(functional.linear(part, one)), two, three)
            for part, one, two, three in zip(x.parts, first, second, bias, strict=True)
        ]
        out = self._add(parts, f"output {self.met} 0")
        self.met += 1
        self._note("Sequential", (x,), [out], dict.fromkeys(self.mesh.ranks, ""), {}, is_collective=False)
        return out

    def backward(self, loss: Held) -> dict[str, Held]:
        """Record a backward; return the gradients."""
        if not self.is_whole:
            self._note("backward", (loss,), [], dict.fromkeys(self.mesh.ranks, ""), {}, is_collective=False)
        total = torch.stack([part.sum() for part in loss.parts]).sum()
        if total.requires_grad:
            torch.autograd.backward(total, retain_graph=True)
        gradients = {}
        for name, params in self.params.items() if total.requires_grad else ():
            parts = [param.grad.clone() for param in params if param.grad is not None]
            if self.is_sharded and not self.is_whole:
                mean = torch.stack(parts).mean(0)
                parts = self._cut(mean, self.placements)
            times = sum(held.origin.startswith(f"gradient {name}") for held in self.held)
            earlier = self.results.get(f"gradient {name}")
            held = self._add(parts, f"gradient {name}" + (f" {times + 1}" if times else ""), like=earlier)
            gradients[name] = self.results[f"gradient {name}"] = held
        return gradients

    def keep(self, name: str, held: Held) -> None:
        """Let a gradient be what a line made of it, for a later backward, too."""
        self.results[f"gradient {name}"] = held
        if not self.is_sharded:
            for param, part in zip(self.params[name], held.parts, strict=True):
                param.grad = part.detach().clone()

    def part_of(self, name: str) -> Held:
        """Return a weight, or a rank's part of it."""
        if name not in self.weights_held:
            whole = self.params[name][0].detach()
            self.weights_held[name] = self._add(self._cut(whole, self.placements), f"weight {name}")
        return self.weights_held[name]

    def step_records(self) -> dict[int, LinesRecord]:
        """Return what each rank writes of its lines."""
        results = tuple((name, held.number) for name, held in self.results.items())
        records = {}
        for at, rank in enumerate(self.mesh.ranks):
            values = [
                ValueRecord(
                    *(held.number, tuple(held.parts[at].shape), held.origin),
                    needs_grad=held.parts[at].requires_grad,
                    has_gradient=held.parts[at].grad is not None,
                    memory=held.memory,
                )
                for held in self.held
            ]
            lines: tuple[LineRecord, ...] = tuple(self.lines[rank])
            records[rank] = LinesRecord(
                STEP, lines, tuple(values), is_unsharded=self.is_whole, asked=STEP, results=results
            )
        return records


BOTH = "one axis of two"
"""The mistake in which the batch is split over both axes."""


def batch(r: StepTape) -> tuple[Held, Held]:
    """Return the rank's rows and targets."""
    splits = (S0, S0) if r.is_wrong(BOTH) else (S0, R)
    return r.input(numbers(11, ROWS, WIDTH), *splits), r.input(numbers(12, ROWS, CLASSES), *splits)


def loss(r: StepTape, x: Held, target: Held) -> Held:
    """Return a mean of squares."""
    diff = r.call("sub", torch.sub, r.model(x), target)
    square = r.call("square", torch.square, diff)
    if r.is_wrong("own count"):
        count = r.call("sum", lambda part: (part > 0).float().sum(), target)
        return r.call("div", torch.div, r.call("sum", torch.sum, square), count)
    if r.is_wrong("another number"):
        square = r.call("mul", lambda part: part * 1.25, square, numbers="1.25")
    if r.is_wrong("summed before the backward") and not r.is_whole:
        mean = r.call("mean", torch.mean, square)
        mean = r.call("div", lambda part: part / r.mesh.axis_size("dp"), mean, numbers=str(r.mesh.axis_size("dp")))
        return summed(r, mean, axis="dp")
    if r.is_wrong("the largest of own rows"):
        largest = r.call("max", torch.max, square)
        square = r.call("div", torch.div, square, largest)
    return r.call("mean", torch.mean, square)


def by_hand(r: StepTape) -> None:
    """Run backward, and average each gradient over dp."""
    x, target = batch(r)
    made = loss(r, x, target)
    r.results["loss"] = made
    if r.is_whole:
        r.backward(made)
        return
    scaled = (
        r.call("mul", lambda part: part * 64, made, numbers="64.0") if r.is_wrong("scaled", "another scale") else made
    )
    if r.is_wrong("backward of another number"):
        scaled = r.call("mul", lambda part: part * 2, made, numbers="2.0")
    gradients = r.backward(scaled)
    size = r.mesh.axis_size("dp")
    for name, held in gradients.items() if not r.is_wrong("nothing reduced") else ():
        if r.is_wrong("the last one left") and name == "bias":
            continue
        g = held
        if r.is_wrong("a copy reduced"):
            g = r.call("clone", torch.clone, g)
        if r.is_wrong("the largest of ranks") and name == "second":
            g = r.exchange("all_reduce", lambda parts: [torch.stack(parts).amax(0)] * len(parts), g, axis="dp")
            g.memory = held.memory
        g = r.reduced(g, mean=r.is_wrong("a mean and a division"))
        if r.is_wrong("a weight added") and name == "second":
            g = r.call("add_", lambda part, by: part + 0.125 * by, g, r.part_of(name), numbers="0.125", into=g)
        if r.is_wrong("made of another") and name == "first":
            g = r.call("ones_like", torch.ones_like, gradients["second"])
            g = r.call("expand", lambda part: part.sum().expand(WIDTH + 1, WIDTH) / 4, g, into=held)
        if r.is_wrong("reduced twice") and name == "first":
            g = r.reduced(g)
        divisor = size * 2 if r.is_wrong("divided by another number") else size
        is_undivided = r.is_wrong("no division") or (r.is_wrong("one not divided") and name == "second")
        if not is_undivided:
            g = r.call("div_", lambda part, by=divisor: part / by, g, numbers=str(divisor), into=g)
        if r.is_wrong("scaled", "another scale"):
            by = 32.0 if r.is_wrong("another scale") else 64.0
            g = r.call("div_", lambda part, of=by: part / of, g, numbers=str(by), into=g)
        if r.is_wrong("one gradient negated") and name == "second":
            g = r.call("mul_", lambda part: part * -1, g, numbers="-1", into=g)
        if r.is_wrong("written from another") and name == "bias":
            g = r.call("copy_", lambda _, part: part * 1, g, gradients["bias"], into=g)
        if r.is_wrong("rounded to steps") and name == "first":
            g = r.call("round_", lambda part: (part * 4).round() / 4, g, into=g)
        if not r.is_wrong("a copy reduced"):
            r.keep(name, g)


def micro_batches(r: StepTape) -> None:
    """Run two micro-batches one after the other, and average gradients over both and over dp."""
    x, target = batch(r)
    if r.is_whole:
        r.results["loss"] = loss(r, x, target)
        r.backward(r.results["loss"])
        return
    halves = [r.call("chunk", lambda part, at=at: part.chunk(2)[at], x, numbers="2") for at in range(2)]
    targets = [r.call("chunk", lambda part, at=at: part.chunk(2)[at], target, numbers="2") for at in range(2)]
    if r.is_wrong("targets of another"):
        targets.reverse()
    total = None
    for number, (half, of_half) in enumerate(zip(halves, targets, strict=True)):
        made = loss(r, half, of_half)
        if not r.is_wrong("not divided by their number", "divided afterwards"):
            made = r.call("div", lambda part: part / 2, made, numbers="2")
        gradients = r.backward(made)
        part = r.call("detach", torch.detach, made)
        total = part if total is None else r.call("add", torch.add, total, part)
        if number == 0 and r.is_wrong("reduced after each"):
            for name, held in gradients.items():
                r.keep(name, r.reduced(held))
    assert total is not None
    if r.is_wrong("not divided by their number", "divided afterwards"):
        total = r.call("div", lambda part: part / 2, total, numbers="2")
    r.results["loss"] = total
    divisor = r.mesh.axis_size("dp") * (2 if r.is_wrong("divided afterwards") else 1)
    for name, held in list(gradients.items()):
        g = r.reduced(held)
        r.keep(name, r.call("div_", lambda part, by=divisor: part / by, g, numbers=str(divisor), into=g))


def update(r: StepTape) -> None:
    """Step each weight by its gradient, times a ratio of norms."""
    x, target = batch(r)
    r.results["loss"] = loss(r, x, target)
    for name, held in r.backward(r.results["loss"]).items():
        r.results[f"stepped gradient {name}"] = held
        g, weight = held, r.part_of(name)
        norms = [norm(r, weight), norm(r, g)]
        trust = r.call("div", torch.div, *norms)
        if r.is_wrong("another rate") and not r.is_whole:
            g = r.call("mul", lambda part: part * 2, g, numbers="2.0")
        if r.is_wrong("centered by part"):
            mean = r.call("mean", torch.mean, g)
            if not r.is_whole and name != "first":
                mean = summed(r, mean, axis="dp", times=1 / r.mesh.axis_size("dp"), backward="none")
            g = r.call("sub", torch.sub, g, mean)
        moved = r.call("mul", torch.mul, g, trust)
        stepped = r.call("add_", lambda part, by: part - RATE * by, weight, moved, numbers=f"-{RATE}", into=weight)
        r.results[f"stepped {name}"] = stepped


def norm(r: StepTape, held: Held) -> Held:
    """Return a norm over all parts."""
    square = r.call("sum", torch.sum, r.call("square", torch.square, held))
    if not (r.is_whole or r.is_wrong("norms of shards") or not r.is_sharded):
        square = summed(r, square, axis="dp", backward="none")
    return r.call("sqrt", torch.sqrt, square)


def gathered_loss(r: StepTape) -> None:
    """Gather all rows before the loss, whose backward is to sum."""
    x, target = batch(r)
    out = r.model(x)
    if not r.is_whole:
        backward = "none" if r.is_wrong("no gradient") else "part" if r.is_wrong("own part alone") else "sum"
        out, target = (joined(r, one, 0, axis="dp", backward=backward) for one in (out, target))
        if r.is_wrong("rows backwards"):
            out = r.call("flip", lambda part: part.flip(0), out, numbers="0")
    made = r.call("mean", torch.mean, r.call("square", torch.square, r.call("sub", torch.sub, out, target)))
    r.results["loss"] = made
    gradients = r.backward(made)
    for name, held in gradients.items() if not r.is_whole else ():
        g = r.reduced(held)
        if not r.is_wrong("own part alone"):
            size = r.mesh.axis_size("dp")
            g = r.call("div_", lambda part, by=size: part / by, g, numbers=str(size), into=g)
        r.keep(name, g)


def split_loss(r: StepTape) -> None:
    """Take the loss of the rank's classes, summed over tp."""
    x, target = batch(r)
    out, size = r.model(x), CLASSES // r.ways
    both = []
    for held in (out, target):
        both.append(
            r.call(
                "narrow",
                lambda place, part: part[:, place * size :][:, :size],
                held,
                numbers=lambda place: f"1 {place * size} {size}",
                by_place=True,
            )
        )
    square = r.call("square", torch.square, r.call("sub", torch.sub, *both))
    if r.is_wrong("own mean"):
        r.results["loss"] = r.call("mean", torch.mean, square)
    else:
        total = r.call("sum", torch.sum, square)
        count = ROWS // (r.mesh.size // r.ways) * CLASSES
        made = r.call("div", lambda part: part / count, total, numbers=str(count))
        r.results["loss"] = made if r.is_whole or r.is_wrong("no sum") else summed(r, made)
    gradients = r.backward(r.results["loss"])
    for name, held in gradients.items() if not r.is_whole else ():
        g = held if r.is_wrong("gradients not summed") else r.reduced(held, axis="tp")
        g = r.reduced(g)
        size_of = r.mesh.axis_size("dp")
        r.keep(name, r.call("div_", lambda part, by=size_of: part / by, g, numbers=str(size_of), into=g))


STEPS: dict[Callable[[StepTape], None], tuple[bool, tuple[Callable[..., Held], ...]]] = {
    by_hand: (False, (loss,)),
    micro_batches: (False, (loss,)),
    update: (True, (norm,)),
    gathered_loss: (False, ()),
    split_loss: (False, ()),
}
"""The steps: whether weights are sharded, and the functions whose mistakes each may have."""


def step_of(program: Callable[[StepTape], None], mesh: Mesh, bug: str) -> Step:
    """Return the dump of a step with a mistake, beside the unsharded model's."""
    is_sharded, _ = STEPS[program]
    whole, tape, step = StepTape(ALONE), StepTape(mesh, bug, is_sharded=is_sharded), Step(mesh)
    for side in (whole, tape):
        side.run(program)  # type: ignore[arg-type]
    by_rank, unsharded = tape.step_records(), whole.step_records()
    step.of_ranks = {
        rank: {"lines": (record, *([unsharded[0]] if rank == 0 else []))} for rank, record in by_rank.items()
    }
    for side, moment in ((whole, "reference"), (tape, "step")):
        for held in side.held:
            parts = dict(zip(side.mesh.ranks, held.parts, strict=True))
            put(step, "activation", of_value(STEP, held.number), moment, parts)
            gradients = {rank: part.grad for rank, part in parts.items() if part.grad is not None}
            put(step, "activation", of_value(STEP, held.number, gradient=True), moment, gradients)
        outputs = [held.parts for held in side.held if held.origin.startswith("output")]
        joint = {rank: torch.cat([parts[at] for parts in outputs]) for at, rank in enumerate(side.mesh.ranks)}
        claim = tape.layout((ROWS, CLASSES), (S0, S0 if bug == BOTH else R))
        put(step, "output", "output", moment, joint, claim if side is tape else None)
        for name, held in side.results.items():
            parts = dict(zip(side.mesh.ranks, held.parts, strict=True))
            if name == "loss":
                layout = tape.layout((), (AVG, AVG if bug == BOTH else R))
                put(step, "scalar", "loss", moment, parts, layout if side is tape else None)
            elif name.startswith("gradient "):
                layout = tape.layout(whole.results[name].parts[0].shape, tape.placements)
                put(step, "grad", name.removeprefix("gradient "), moment, parts, layout if side is tape else None)
            elif not name.startswith("stepped gradient "):
                layout = tape.layout(whole.results[name].parts[0].shape, tape.placements)
                weight = name.removeprefix("stepped ")
                put(
                    step,
                    "param",
                    weight,
                    "step" if side is tape else "updated",
                    parts,
                    layout if side is tape else None,
                )
                if side is whole:
                    put(step, "param", weight, "reference", {0: whole.params[weight][0]})
    return step
