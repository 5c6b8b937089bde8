"""Dumps of any size, made without torch: tensors, ranks, findings, and the modules and calls of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from shardviz.dump.arrays import hash_of, sketch
from shardviz.dump.records.files import RankRecord, RunRecord
from shardviz.dump.records.step import CollectiveRecord
from shardviz.dump.records.tensors import Body, LayoutRecord, MeshRecord, TensorRecord
from shardviz.dump.records.trace import KeptRecord, PointRecord, SketchRecord, of_point
from shardviz.dump.write import TRACE_FOLDER, prepare_folder, rank_file, write_rank, write_run
from shardviz.layout.mesh import Mesh, parse_mesh
from tests.dumps import Made, make_dump

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

SIDES = ("input", "output", "gradient of input", "gradient of output")
FOUR = Mesh(("dp", "tp"), (2, 2))
COPIES = ("Replicate()", "Replicate()")


def tensors(path: Path, num: int) -> None:
    """Write tensors of as many shapes, all of them right."""
    make_dump(
        path, parse_mesh("fsdp=2,tp=2"), {f"part{at}.weight": f"[{4 * (at + 1)}/tp/fsdp, 4]" for at in range(num)}
    )


def layers(path: Path, num: int) -> None:
    """Write layers that are alike."""
    parts = {"up": "[16/tp/fsdp, 8]", "down": "[8/fsdp, 16/tp]", "norm": "[8]", "bias": "[16/tp]"}
    made = {f"layers.{at}.{part}.weight": layout for at in range(num) for part, layout in parts.items()}
    make_dump(path, parse_mesh("fsdp=2,tp=2"), made)


def ranks(path: Path, num: int) -> None:
    """Write a small model on many ranks."""
    size = 8 * num
    parts = {"up": f"[{size}/tp/fsdp, 8]", "down": f"[{size}/fsdp, 8/tp]", "norm": f"[{size}]"}
    make_dump(
        path, parse_mesh(f"fsdp={num // 4},tp=4"), {f"layers.{at}.{one}": parts[one] for at in (0, 1) for one in parts}
    )


def ranks_found(path: Path, num: int) -> None:
    """Write a model on many ranks that loaded its rows in the order of other axes."""
    size = 8 * num
    wrong = Made(f"[{size}/fsdp/tp, 8]", f"[{size}/tp/fsdp, 8]")
    make_dump(path, parse_mesh(f"fsdp={num // 4},tp=4"), {f"layers.{at}.up": wrong for at in (0, 1)})


def ranks_lost(path: Path, num: int) -> None:
    """Write a model on many ranks, half of whose files are damaged or missing."""
    ranks(path, num)
    for rank in range(0, num, 2):
        file = path / rank_file(rank)
        content = file.read_bytes()
        file.unlink()
        if rank % 4:
            file.write_bytes(content[: len(content) // 2])


def alike(path: Path, num: int) -> None:
    """Write tensors that are wrong for one reason, which is one finding."""
    shapes = {f"part{at}.weight": f"[{4 * (at + 1)}" for at in range(num)}
    make_dump(
        path,
        parse_mesh("fsdp=2,tp=2"),
        {name: Made(f"{n}/fsdp/tp, 4]", f"{n}/tp/fsdp, 4]") for name, n in shapes.items()},
    )


def apart(path: Path, num: int) -> None:
    """Write tensors each of which is wrong in its own way: its elements stand in an order that no rule explains."""
    random = np.random.default_rng(0)
    made = {}
    for at in range(num):
        mixed = 1 + random.permutation(32).reshape(2, 2, 8)
        made[f"part{at}.weight"] = Made("[4/tp, 8]", ids={rank: mixed[rank % 2] for rank in range(4)})
    make_dump(path, parse_mesh("fsdp=2,tp=2"), made)


def of_other_tensors(path: Path, num: int) -> None:
    """Write tensors each of which but the last holds the elements of the next one."""
    mesh = parse_mesh("fsdp=2,tp=2")
    own = np.arange(1, 33).reshape(2, 2, 8)
    made = {}
    for at in range(num):
        other = 32 * (at < num - 1)
        made[f"part{at}.weight"] = Made("[4/tp, 8]", ids={rank: own[rank % 2] + other for rank in range(4)})
    make_dump(path, mesh, made)


def never_written(path: Path, num: int) -> None:
    """Write tensors that hold zeros on all ranks, but one that is right."""
    zeros = np.zeros((2, 8), np.int64)
    made: dict[str, Made | str] = {
        f"part{at}.weight": Made("[4/tp, 8]", ids=dict.fromkeys(range(4), zeros)) for at in range(num)
    }
    make_dump(path, parse_mesh("fsdp=2,tp=2"), made | {"last.weight": "[4/tp, 8]"})


def on_one_tensor(path: Path, num: int) -> None:
    """Write one tensor that is wrong on each rank in its own way."""
    random = np.random.default_rng(0)
    size = 4 * num
    ids = {rank: 1 + random.permutation(size * 2)[:8].reshape(4, 2) for rank in range(num)}
    make_dump(path, Mesh(("dp",), (num,)), {"weight": Made(f"[{size}/dp, 2]", ids=ids), "bias": f"[{size}/dp]"})


def copies_apart(path: Path, num: int) -> None:
    """Write tensors whose copies differ between all ranks."""
    path = make_dump(path, FOUR, {})

    def values(name: str, rank: int) -> np.ndarray:
        return np.random.default_rng([len(name), rank, int(name[5:])]).normal(size=(2, 4)).astype(np.float32)

    _with_values(path, FOUR, [f"other{at}" for at in range(num)], values)


def _with_values(path: Path, mesh: Mesh, names: list[str], values: Callable[[str, int], np.ndarray]) -> None:
    """Add copies of tensors to every rank, with their numbers and digests."""
    for rank in mesh.ranks:
        file = path / rank_file(rank)
        record = msgspec.json.decode(file.read_bytes(), type=RankRecord)
        held = {name: values(name, rank) for name in names}
        bodies = tuple(
            Body("param", "initial", one.shape, one.shape, "float32", layout=0, values=one.tolist())
            for one in held.values()
        )
        named = tuple(
            TensorRecord(name, at, digests=hash_of(one, "float32", one.shape))
            for at, (name, one) in enumerate(held.items())
        )
        layout = LayoutRecord(0, COPIES, (2, 4))
        write_rank(path, msgspec.structs.replace(record, layouts=(layout,), bodies=bodies, tensors=named))


def names_of_modules(num: int) -> list[str]:
    """Return modules of a model, ten in each layer."""
    return [f"layers.{at // 10}.part{at % 10}" for at in range(num)]


def trace(path: Path, num: int, odd_from: int | None = None) -> None:
    """Write the step of a model, each module called once; from a module on all of them are wrong."""
    places = [(name, 0) for name in names_of_modules(num)]
    _trace(path, places, num if odd_from is None else odd_from)


def trace_found(path: Path, num: int) -> None:
    """Write a step whose modules are wrong from the middle on."""
    trace(path, num, num // 2)


def calls(path: Path, num: int) -> None:
    """Write a step that calls one module many times."""
    _trace(path, [("shared", call) for call in range(num)], num)


def calls_found(path: Path, num: int) -> None:
    """Write a step that calls one module many times, wrong from the middle on."""
    _trace(path, [("shared", call) for call in range(num)], num // 2)


def _trace(path: Path, places: list[tuple[str, int]], odd_from: int) -> None:
    mesh = MeshRecord(FOUR.axes, FOUR.shape, FOUR.ranks)
    prepare_folder(path, force=True)
    write_run(path, RunRecord(1, "test", "none", FOUR.size, mesh=mesh, probe="test"))
    random = np.random.default_rng(0)
    sketches = tuple(
        SketchRecord(name, side, "float32", (8, 16), sketch(random.normal(size=(8, 16))), order, call)
        for order, (name, call) in enumerate(places)
        for side in SIDES
    )
    points = tuple(
        PointRecord(
            name,
            side,
            order,
            "odd" if order >= odd_from else "right",
            call,
            tensor=2 * order + number,
            layout="" if order >= odd_from else "[8/dp, 16/tp]",
            type="Linear",
        )
        for order, (name, call) in enumerate(places)
        for number, side in enumerate(SIDES)
    )
    sent = tuple(CollectiveRecord("all_reduce", ("tp",), 2, name, bytes=4096) for name, call in places if not call)
    for rank in FOUR.ranks:
        named, bodies = _output(is_first=rank == 0, off=float(odd_from < len(places)))
        record = RankRecord(
            1, rank, FOUR.size, "test", (mesh,), layouts=(LayoutRecord(0, COPIES, (2, 4)),), bodies=bodies
        )
        kept = sketches if rank == 0 else ()
        write_rank(path, msgspec.structs.replace(record, tensors=named, trace=points, sketches=kept, collectives=sent))


def _output(*, is_first: bool, off: float) -> tuple[tuple[TensorRecord, ...], tuple[Body, ...]]:
    """Return the output of a step, and on one rank the unsharded model's, which is off."""
    values = [[1.0 + off * 0.3, -2.0, 0.5, 3.0 + off], [0.25, 1.5 - off, -1.0, 2.0]]
    wanted = [[1.0, -2.0, 0.5, 3.0], [0.25, 1.5, -1.0, 2.0]]
    bodies = [Body("output", "step", (2, 4), (2, 4), "float32", layout=0, values=values)]
    if is_first:
        bodies.append(Body("output", "reference", (2, 4), (2, 4), "float32", values=wanted))
    return tuple(TensorRecord("output", at) for at in range(len(bodies))), tuple(bodies)


def gradients(path: Path, num: int) -> None:
    """Write a step of as many gradients beside the unsharded model's, each wrong in its own way."""
    _gradients(path, num, lambda whole, random: whole + random.normal(size=whole.shape))


def gradients_halved(path: Path, num: int) -> None:
    """Write a step whose gradients are half of the unsharded model's."""
    _gradients(path, num, lambda whole, random: 0.5 * whole)


def gradients_right(path: Path, num: int) -> None:
    """Write a step whose gradients are those of the unsharded model."""
    _gradients(path, num, lambda whole, random: whole)


def _gradients(path: Path, num: int, held: Callable[[np.ndarray, np.random.Generator], np.ndarray]) -> None:
    mesh = MeshRecord(FOUR.axes, FOUR.shape, FOUR.ranks)
    prepare_folder(path, force=True)
    write_run(path, RunRecord(1, "test", "none", FOUR.size, mesh=mesh, probe="test"))
    random = np.random.default_rng(0)
    wanted = [random.normal(size=(4, 4)) for _ in range(num)]
    had = [held(whole, random) for whole in wanted]
    for rank in FOUR.ranks:
        bodies = [Body("grad", "step", (4, 4), (4, 4), "float64", layout=0, values=one.tolist()) for one in had]
        if rank == 0:
            bodies += [Body("grad", "reference", (4, 4), (4, 4), "float64", values=one.tolist()) for one in wanted]
        named = tuple(TensorRecord(f"{_part(at % num)}.weight", at) for at in range(len(bodies)))
        layouts = (LayoutRecord(0, COPIES, (4, 4)),)
        write_rank(path, RankRecord(1, rank, 4, "test", (mesh,), layouts=layouts, bodies=tuple(bodies), tensors=named))


def _part(at: int) -> str:
    return f"layers.{at // 10}.part{at % 10}"


def job(path: Path, num: int, odd_from: int | None = None) -> None:
    """Write the step of a job on one rank as it was followed, with the values of each module."""
    _job(path, [(name, 0) for name in names_of_modules(num)], num if odd_from is None else odd_from)


def job_found(path: Path, num: int) -> None:
    """Write a job whose modules are wrong from the middle on."""
    job(path, num, num // 2)


def job_calls(path: Path, num: int) -> None:
    """Write a job that calls one module many times."""
    _job(path, [("shared", call) for call in range(num)], num)


def job_calls_found(path: Path, num: int) -> None:
    """Write a job that calls one module many times, wrong from the middle on."""
    _job(path, [("shared", call) for call in range(num)], num // 2)


def weights_of_job(num: int) -> dict[str, NDArray[np.float64]]:
    """Return a weight of each module of a job."""
    weights = np.random.default_rng(2).normal(size=(num, 4, 4))
    return {f"{name}.weight": weight for name, weight in zip(names_of_modules(num), weights, strict=True)}


def _job(path: Path, places: Iterable[tuple[str, int]], odd_from: int) -> None:
    """Write a job of one rank: a weight of each module, and the step that was followed."""
    places = list(places)
    modules = list(dict.fromkeys(name for name, _ in places))
    weights = weights_of_job(len(modules)).values()
    for folder, moment in ((path, "initial"), (path / TRACE_FOLDER, "step")):
        prepare_folder(folder, force=True)
        write_run(folder, RunRecord(1, "test", "none", 1))
        named = [TensorRecord(f"{name}.weight", at) for at, name in enumerate(modules)]
        bodies = [Body("param", moment, (4, 4), (4, 4), "float64", values=one.tolist()) for one in weights]
        kept: list[KeptRecord] = []
        if moment == "step":
            kept = list(_kept(places, odd_from, named, bodies))
        write_rank(folder, RankRecord(1, 0, 1, "test", bodies=tuple(bodies), tensors=tuple(named), kept=tuple(kept)))


def _kept(
    places: Iterable[tuple[str, int]], odd_from: int, named: list[TensorRecord], bodies: list[Body]
) -> Iterator[KeptRecord]:
    """Yield what was kept at each place, and add its values."""
    random, other = np.random.default_rng(0), np.random.default_rng(1)
    for order, (name, call) in enumerate([*places, ("", 0)]):
        for number, side in enumerate(SIDES):
            is_odd = order >= odd_from and (name or number == 1)
            values = random.normal(size=(4, 4)) + (other.normal(size=(4, 4)) if is_odd else 0.0)
            named.append(TensorRecord(of_point(name, side, call, 0), len(bodies)))
            bodies.append(Body("activation", "step", (4, 4), (4, 4), "float64", values=values.tolist()))
            yield KeptRecord(name, side, order, call, tensor=4 * order + number, needs_grad=True, type="Linear")
