"""`python -m tests.contract.by_records`: the room `noted`, of steps in which ranks note more than numbers.

What reduces gradients by itself and by how much it divides, sums that nothing reads, reductions of the loss, casts to
float8, collectives; and numbers that few steps have: of complex weights, of outputs of three dims, of padded words.
"""

from __future__ import annotations

import tempfile
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardviz.dump.records.step import CallRecord, CastRecord, NoiseRecord, ReductionRecord, UnreadRecord, WrapperRecord
from shardviz.dump.records.trace import FrameRecord
from shardviz.layout.layout import Layout
from shardviz.layout.placements import parse_placement
from tests.contract import store
from tests.contract.by_step import CHANGES_OF_FIRST, Scene, Step, role_of
from tests.contract.choosing import chosen
from tests.contract.judge import IN_MEMORY, judge_room, record
from tests.contract.step_changes import AVG, MESHES, S0, S1, SHAPE, SUM, R, each, plus, times

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from shardviz.dump.records.step import Wrapper

    Array = NDArray[Any]

ROOM = "noted"
MESH = MESHES[0]
MOST_ALIKE = 3
LINE = FrameRecord("train.py", 7, "forward", "funcol.all_reduce(y, 'sum', group)")
NOISES = (1e-6, 1e-5, 3e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.2)
"""How far rounding was seen to take an output: less than a step is allowed, about as much, and more."""
EVERYONE, ALONG_DP, ALONG_TP = ((0, 1, 2, 3),), ((0, 2), (1, 3)), ((0, 1), (2, 3))


def wrapped() -> Iterator[tuple[str, Step]]:
    """Yield gradients with a factor, and what reduces them by itself."""
    ways = {"all": EVERYONE, "dp": ALONG_DP, "tp": ALONG_TP}
    claims = ((S0, R), (S0, S0), (R, S0), (R, R), None)
    factors = (2, 4, 0.5, 0.25)
    for (over, groups), claim, factor, divides in product(ways.items(), claims, factors, (None, 1.0, 2.0, 4.0)):
        for kind, beside in (("fsdp", "all gradients alike"), ("ddp", "alone")):
            if kind == "ddp" and divides is not None:
                continue
            scene = Scene(MESH, "grad", claim, each(times(factor)), beside, of_step=False)
            step = scene.made()
            for rank in MESH.ranks:
                group = next(group for group in groups if rank in group)
                step.of_ranks[rank] = {"wrappers": (WrapperRecord(kind, group, tuple(scene.names), divides),)}
            yield f"grad times {factor} under {kind} over {over}, divided by {divides}, {claim}, {beside}", step
    for factor, is_own, kind in product((2, 0.4), (True, False), ("fsdp", "ddp")):
        scene = Scene(MESH, "grad", (R, R), each(times(factor)), "all gradients alike", of_step=False)
        step = scene.made()
        wrapper = WrapperRecord(kind, MESH.ranks, tuple(scene.names), None)
        step.of_ranks = {rank: {"wrappers": (wrapper,), "is_own_step": is_own} for rank in MESH.ranks}
        yield f"grad times {factor} under {kind}, the probe's own step {is_own}", step
    for factor, divides, others in product((4, 0.25), (1.0, 4.0), (1.0, 4.0)):
        scene = Scene(MESH, "grad", (S0, S0), each(times(factor)), "right outputs", of_step=False)
        step = scene.made()
        wrong, *right = scene.names
        of_all = (
            WrapperRecord("fsdp", MESH.ranks, (wrong,), divides),
            WrapperRecord("fsdp", MESH.ranks, tuple(right), others),
        )
        step.of_ranks = {rank: {"wrappers": of_all} for rank in MESH.ranks}
        yield f"grad times {factor} under fsdp, divided by {divides}, others by {others}", step


def unreduced() -> Iterator[tuple[str, Step]]:
    """Yield gradients that each rank has a term of, or whole, and the wrapper that has their parameters."""
    kinds: tuple[Wrapper, ...] = ("ddp", "bypassed", "unfrozen", "no_sync")
    for kind, change in product(kinds, ("a term each along dp", "right")):
        changed = each(times(1)) if change == "right" else CHANGES_OF_FIRST[change]
        scene = Scene(MESH, "grad", (R, R), changed, "right outputs", of_step=False)
        step = scene.made()
        step.of_ranks = {
            rank: {"wrappers": (WrapperRecord(kind, MESH.ranks, tuple(scene.names)),)} for rank in MESH.ranks
        }
        yield f"unreduced grad, {change}, under {kind}", step


def unread() -> Iterator[tuple[str, Step]]:
    """Yield results that lack a sum, and a sum that nothing reads."""
    for role, claim, axis in product(("output", "grad"), ((R, R), (S0, R), (R, S0), None), ("dp", "tp")):
        for axes, is_forward, gradient in product((("dp",), ("tp",), ("dp", "tp")), (True, False), ("", "up.weight")):
            scene = Scene(MESH, role, claim, CHANGES_OF_FIRST[f"a term each along {axis}"], "no loss", of_step=False)
            step = scene.made()
            step.of_ranks = {0: {"unread": (UnreadRecord("all_reduce", axes, LINE, gradient, is_forward),)}}
            yield f"{role} a term along {axis}, {claim}, unread {axes} {is_forward} {gradient}", step


def reduced() -> Iterator[tuple[str, Step]]:
    """Yield wrong losses of right outputs, and the reductions that make them."""
    for factor, count, dtype, size in product((1.3, 1.0), (1, 3), ("float32", "int64"), (12, 6)):
        for axes in (("tp",), ("dp",)):
            scene = Scene(MESH, "loss", (R, S0), each(times(factor)), "right outputs", of_step=False)
            step = scene.made()
            records = (ReductionRecord(axes, dtype, size, count),)
            step.of_ranks = {rank: {"reductions": records} for rank in MESH.ranks}
            yield f"loss times {factor}, {count} reductions of {size} {dtype} over {axes}", step
    output = Scene(MESH, "loss", (R, R), each(times(1)), "right outputs", of_step=False).weights["up.weight"] * 2
    sums = np.logaddexp.accumulate(output.astype(np.float32).astype(np.float64), axis=-1)
    for kept in range(1, output.shape[-1]):
        for sign in (1, -1):
            excess = float(np.mean(sums[:, -1] - sums[:, kept - 1])) * sign
            scene = Scene(MESH, "loss", (R, R), each(plus(excess)), "right outputs", of_step=False)
            yield f"loss of {kept} words, off by {sign}", scene.made()
    for factor in (1.001, 1.004, 1.01, 1.02, 0.99, 2.0):  # the loss may have the factor of the gradients
        for of_loss in (factor, 1.0):
            scene = Scene(MESH, "grad", (R, R), each(times(factor)), "all gradients alike", of_step=False)
            step = scene.made()
            step.fields = {"narrowed_to": ("bfloat16",), "narrow_sums": ("bfloat16",)}
            wanted = np.array(2.5)
            step.put("scalar", "loss_of_all", "step", dict.fromkeys(MESH.ranks, wanted * of_loss))
            step.put("scalar", "loss_of_all", "reference", {0: wanted})
            yield f"grad times {factor} in bfloat16, a number times {of_loss}", step


def rounded() -> Iterator[tuple[str, Step]]:
    """Yield gradients and a loss with a factor near 1, and a number that is summed to make them."""
    for factor, dtype, size in product((0.9978, 1.0004, 1.02), ("bfloat16", "int64"), (1, 12)):
        for of_loss in (factor, 1.0, 1.3):
            scene = Scene(MESH, "grad", (R, R), each(times(factor)), "no loss", of_step=False)
            for name in scene.names[1:]:
                del scene.weights[name]
            step = scene.made()
            step.put("scalar", "loss", "step", dict.fromkeys(MESH.ranks, np.array(2.5 * of_loss)))
            step.put("scalar", "loss", "reference", {0: np.array(2.5)})
            step.of_ranks = {rank: {"reductions": (ReductionRecord(("dp",), dtype, size),)} for rank in MESH.ranks}
            yield f"rounded: grad times {factor}, loss times {of_loss}, {size} {dtype} summed", step


def gathered() -> Iterator[tuple[str, Step]]:
    """Yield weights after a step, and those whose gathered copy the optimizer wrote to."""
    for factor, names in product((1.0, 1.2), ((), ("up.weight",), ("down.weight",))):
        step = Scene(MESH, "param", (S0, S0), each(times(factor)), "right outputs", of_step=False).made()
        step.of_ranks = {rank: {"written_gathered": names} for rank in MESH.ranks}
        yield f"weight times {factor}, written while gathered: {names}", step


def casts() -> Iterator[tuple[str, Step]]:
    """Yield wrong outputs of casts to float8, each with its scale."""
    whole = CastRecord("up", "float8_e4m3fn", 72, 448.0, unsharded=True)
    for size, largest, count, axis in product((36, 18, 72), (448.0, 301.5), (0, 1, 2), ("dp", "tp")):
        scene = Scene(
            MESH, "output", (R, R), CHANGES_OF_FIRST[f"own values along {axis}"], "right gradients", of_step=False
        )
        step = scene.made()
        own = (CastRecord("up", "float8_e4m3fn", size, largest),) * count
        step.of_ranks = {rank: {"casts": (*own, *([whole] if rank == 0 else ()))} for rank in MESH.ranks}
        yield f"output own values along {axis}, {count} casts of {size} to {largest}", step


def called() -> Iterator[tuple[str, Step]]:
    """Yield collectives with what ranks had before and after."""
    before = {rank: np.arange(4.0) + rank for rank in MESH.ranks}
    total = {rank: np.sum([before[0], before[1]], axis=0) for rank in (0, 1)}
    results = {"right": total, "a term": {0: before[0], 1: total[1]}, "of other ranks": {0: total[0][:2], 1: total[1]}}
    for op, (what, after) in product(("all_reduce", "send_recv", "an_op_of_ours", "broadcast"), results.items()):
        step = Scene(MESH, "grad", (R, R), each(times(1)), "right outputs", of_step=False).made()
        step.put("activation", "comm.before", "step", {rank: before[rank] for rank in (0, 1)})
        step.put("activation", "comm", "step", after)
        step.of_ranks = {rank: {"calls": (CallRecord("comm", op, (0, 1)),)} for rank in (0, 1)}
        yield f"a call of {op}, {what}", step


def odd() -> Iterator[tuple[str, Step]]:
    """Yield numbers that few steps have."""
    for change in (0.0, 0.25):
        step = Scene(MESH, "param", (R, R), each(times(1)), "right outputs", of_step=False).made()
        turns = np.linspace(1, 2, 6) * (1 + 2j)
        held = {rank: turns + (change if rank == 3 else 0) for rank in MESH.ranks}
        for moment, values in (("reference", {0: turns}), ("step", held), ("updated", {0: turns})):
            step.put("buffer", "rope.turns", moment, values, dtype="complex64", written=False)
        yield f"buffer of complex numbers, off by {change}", step
    shape = (2, 6, 32)
    whole = np.random.default_rng(5).standard_normal(shape)
    for placements in ((R, R), (R, S0), (R, S1), (R, "Shard(2)"), ("Shard(2)", R), (S0, R), (AVG, R), (SUM, R)):
        claim = tuple(map(parse_placement, placements))
        layout = Layout.from_placements(MESH, shape, claim)
        for name in ("own statistics", "zero", "half", "flat"):
            step = Scene(MESH, "grad", (R, R), each(times(1)), "no loss", of_step=False).made()
            held = {}
            for rank, region in layout.regions():
                part = whole.ravel()[region.flat_ids(shape)]
                held[rank] = _odd(name, part)
            step.put("output", "logits", "step", held, layout if name != "flat" else None)
            step.put("output", "logits", "reference", {0: whole})
            yield f"output of three dims, {name}, {placements}", step


def _odd(name: str, part: Array) -> Array:
    """Return what a rank has in place of its part."""
    if name == "own statistics":
        return np.asarray((part - part.mean(-1, keepdims=True)) / part.std(-1, keepdims=True))
    if name == "flat":
        return part.reshape(-1)
    return part * (0.0 if name == "zero" else 0.5)


def measured() -> Iterator[tuple[str, Step]]:
    """Yield outputs that are off by a little, beside how far one rounding of all inputs was seen to take them."""
    for noise, times_noise, narrow in product(NOISES, (0.5, 3, 5), ((), ("bfloat16",))):
        off = noise * times_noise * np.cos(np.arange(SHAPE[1]))
        change = each(lambda part, off=off: part + off[: part.shape[1]])
        step = Scene(MESH, "output", (R, S0), change, "right gradients", of_step=False).made()
        records = (NoiseRecord("output", "output", noise, noise),)
        step.fields = {"noise": records, "narrowed_to": narrow, "narrow_sums": narrow}
        yield f"measured: output off by {times_noise} times {noise:g}, in {narrow or 'float32'}", step


def main() -> None:
    """Make the room, judge it, and keep what is judged in many ways."""
    room = store.Room(ROOM)
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        for at, (name, step) in enumerate(
            chain(wrapped(), unread(), reduced(), casts(), called(), odd(), rounded(), gathered())
        ):
            room.add(name, ("check", "{0}"), [store.files_of(step.write(Path(folder, f"{at}.shardviz")))])
        room.keep(chosen(judge_room(room), MOST_ALIKE, role_of))
        for at, (name, step) in enumerate(chain(unreduced(), measured())):
            room.add(name, ("check", "{0}"), [store.files_of(step.write(Path(folder, f"m{at}.shardviz")))])
    record(room)


if __name__ == "__main__":
    main()
