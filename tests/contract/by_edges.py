"""`python -m tests.contract.by_edges`: the room `edges`, of what few dumps have: plans, ids that were rounded, gaps.

Plans beside what is intended; ids that went through a narrower type; global shapes that differ from rank to rank;
gathered tensors of other shapes; sequences of other lengths; tensors near a limit; a wrong term of a loss; names under
which a second tensor's elements are.
"""

from __future__ import annotations

import tempfile
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import structs

from shardviz.dump.records.files import PlanRecord
from shardviz.dump.records.step import WrapperRecord, of_loss_term
from shardviz.dump.records.tensors import Body, GatherRecord, LayoutRecord, Stamp, TensorRecord
from shardviz.dump.write import PLAN_FILE, rank_file, write_plan
from shardviz.layout.mesh import parse_mesh
from shardviz.layout.notation import parse
from shardviz.relate.casts import rounded
from tests.check.records import add_values, change_rank, change_run, read_rank
from tests.contract import store
from tests.contract.by_step import Step
from tests.contract.judge import IN_MEMORY, record
from tests.dumps import Made, make_dump
from tests.plans import make_plan

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

ROOM = "edges"
TWO = parse_mesh("fsdp=2,tp=2")
EP = parse_mesh("ep=2,fsdp=2")


def add_plans(room: store.Room, folder: Path) -> None:
    """Add plans with what is intended of them, and two beside each other."""
    stage = {"a.weight": ("[8/fsdp, 4]", TWO), "b.weight": ("[6, 4/tp]", TWO), "c.bias": ("[6]", TWO)}
    intentions: dict[str, dict[str, str]] = {
        "nothing": {},
        "as planned": {"a.weight": "[8/fsdp, 4]"},
        "all": {"a.weight": "[8/fsdp, 4]", "b.weight": "[6, 4/tp]", "c.bias": "[6]"},
        "another axis": {"a.weight": "[8/tp, 4]", "c.bias": "[6/tp]"},
        "a name that none has": {"d.*": "[8/tp, 4]"},
    }
    plans: dict[str, Path] = {}
    for name, intended in intentions.items():
        plans[name] = make_plan(folder / f"p{len(plans)}.shardviz", TWO, [stage])
        change_run(plans[name], intended=intended)
        room.add(f"a plan, {name} intended", ("check", "{0}"), [store.files_of(plans[name])])
    for local in ((4, 3), (3, 4), (8, 4)):
        path = make_plan(folder / f"p{len(plans)}.shardviz", TWO, [stage])
        plans[f"{local}"] = path
        _with_local_shape(path, local)
        room.add(f"a plan in which a rank holds {local}", ("check", "{0}"), [store.files_of(path)])
        change_run(path, intended={"a.weight": "[8/fsdp, 4]"})
        room.add(f"a plan in which a rank holds {local}, as intended", ("check", "{0}"), [store.files_of(path)])
    stages = make_plan(folder / "stages.shardviz", parse_mesh("pp=2,tp=2"), [{}, {}])
    fewer = make_plan(folder / "fewer.shardviz", TWO, [dict(list(stage.items())[:2])])
    dump = make_dump(folder / "dump.shardviz", TWO, {"a.weight": "[8/fsdp, 4]", "b.weight": "[6, 4/tp]"})
    sides = {"a plan": plans["nothing"], "a plan of stages": stages, "a plan of fewer": fewer, "a dump": dump}
    for (left, first), (right, second) in product(sides.items(), sides.items()):
        if left != right:
            files = [store.files_of(first), store.files_of(second)]
            room.add(f"{left} beside {right}", ("diff", "{0}", "{1}"), files)
    header = b'{"a.weight":{"dtype":"F32","shape":[8,4],"data_offsets":[0,128]}}'
    saved = folder / "a.safetensors"
    saved.write_bytes(len(header).to_bytes(8, "little") + header + bytes(128))
    for name, path in sides.items():
        files = [store.files_of(path), store.files_of(saved)]
        room.add(f"{name} beside a checkpoint", ("diff", "{0}", "{1}.safetensors"), files)


def _with_local_shape(path: Path, local: tuple[int, ...]) -> None:
    """Change the local shape that the first tensor of a plan has."""
    plan = msgspec.json.decode((path / PLAN_FILE).read_bytes(), type=PlanRecord)
    parts = []
    for part in plan.parts:
        first, *others = part.record.bodies
        bodies = (structs.replace(first, local_shape=local), *others)
        parts.append(structs.replace(part, record=structs.replace(part.record, bodies=bodies)))
    write_plan(path, structs.replace(plan, parts=tuple(parts)))


def own_ids(claim: str, mesh: str = "fsdp=2,tp=2") -> dict[int, NDArray[np.int64]]:
    """Return the ids that each rank holds if it holds what it claims."""
    layout = parse(claim).layout(parse_mesh(mesh))
    shape = layout.tensor_shape
    return {rank: layout.region_of_rank(rank).flat_ids(shape) + 1 for rank in layout.mesh.ranks}


def through(dtype: str, first: int, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ids that went through a narrower type, in a model in which the first one is another number."""
    there = rounded(ids + (first - 1), dtype).astype(np.int64) - (first - 1)
    return np.where(there > 0, there, -1 - (there + first - 1))


def without(ids: NDArray[np.int64], kept: int, number: int) -> NDArray[np.int64]:
    """Return ids of which all but the first few are a number."""
    return np.where(np.arange(ids.size).reshape(ids.shape) < kept, ids, number)


def of_ids() -> Iterator[tuple[str, Mapping[str, Made | str], dict[str, Any]]]:
    """Yield dumps of ids that are not those claimed: the tensors, and fields of the run."""
    for dtype, shape, before in product(("bfloat16", "float16"), ("64/tp, 8", "128, 64/tp", "2/tp, 2"), (0, 1200)):
        claim = f"[{shape}]"
        ids = {rank: through(dtype, before + 1, own) for rank, own in own_ids(claim).items()}
        some = {rank: ids[rank] for rank in (0, 1)}
        first: dict[str, Made | str] = {"a": f"[{before // 2}, 2]"} if before else {}
        more: dict[str, Made | str] = {"b": "[40, 40]"}
        name = f"{claim} behind {before}, {dtype}"
        yield f"{name} on all ranks", {**first, "w": Made(claim, ids=ids), **more}, {}
        yield f"{name} on two ranks", {**first, "w": Made(claim, ids=some), **more}, {}
        plain = Made(None, ids=ids | own_ids("[2, 2]") if "2/tp" in shape else ids, shape=(2, 2))
        yield f"{name}, plain", {**first, "w": plain if "2/tp" in shape else Made(claim, ids=some), **more}, {}
    claim = "[8/fsdp/tp, 4]"
    for reference, zero in product(("ref.safetensors", ""), (-1, 0)):
        own = own_ids(claim)
        for part, ranks in (("a rank's", (3,)), ("two ranks'", (1, 3)), ("all", (0, 1, 2, 3))):
            for how, kept in (("gone", 0), ("half gone", 4), ("nearly gone", 1)):
                ids = {rank: without(own[rank], kept, zero) for rank in ranks}
                tensors: dict[str, Made | str] = {"w": Made(claim, ids=ids), "v": "[8/fsdp, 4]"}
                yield f"{part} ids {how}, {zero}, reference {reference or 'none'}", tensors, {"reference": reference}


def add_ids(room: store.Room, folder: Path) -> None:
    """Add dumps of ids that are not those claimed."""
    for at, (name, tensors, fields) in enumerate(of_ids()):
        path = make_dump(folder / f"ids{at}.shardviz", TWO, tensors)
        change_run(path, **fields)
        room.add(name, ("check", "{0}"), [store.files_of(path)])


def add_shapes(room: store.Room, folder: Path) -> None:
    """Add tensors whose global shape is another one on some ranks, or that of each part."""
    wrong: dict[str, dict[int, tuple[int, ...]]] = {
        "two": {1: (9, 4), 2: (7, 4)},
        "four": {0: (9, 4), 1: (7, 4), 2: (5, 4), 3: (3, 4)},
        "a dim less": {1: (8,)},
    }
    for name, shapes in wrong.items():
        path = make_dump(folder / f"s{len(room.cases)}.shardviz", TWO, {"w": "[8/fsdp, 4]", "v": "[4, 4]"})
        for rank, shape in shapes.items():
            _with_shape(path, rank, shape, ("Shard(0)", "Replicate()"))
        room.add(f"{name} wrong global shapes", ("check", "{0}"), [store.files_of(path)])
    wrapped: dict[str, tuple[tuple[int, ...], ...]] = {
        "all": ((0, 1, 2, 3),),
        "along ep": ((0, 2), (1, 3)),
        "along fsdp": ((0, 1), (2, 3)),
        "nobody": (),
    }
    ways = ("[8/ep/fsdp, 4]", "[8/fsdp/ep, 4]", "[8/fsdp, 4]", "[8, 4/fsdp]")
    for (name, groups), held in product(wrapped.items(), ways):
        path = make_dump(folder / f"s{len(room.cases)}.shardviz", EP, {"experts.w": held, "v": "[4, 4]"})
        for rank in EP.ranks:
            _with_shape(path, rank, (4, 4), ("Replicate()", "Shard(0)"))
            wrappers = tuple(WrapperRecord("fsdp", group, ("experts.w",)) for group in groups if rank in group)
            change_rank(path, rank, wrappers=wrappers)
        room.add(f"experts held as {held}, sharded over {name}", ("check", "{0}"), [store.files_of(path)])


def _with_shape(path: Path, rank: int, shape: tuple[int, ...], placements: tuple[str, ...]) -> None:
    """Let a rank's first tensor have another global shape."""
    record_ = read_rank(path, rank)
    first, *others = record_.bodies
    layouts = (*record_.layouts, LayoutRecord(0, placements, shape))
    body = structs.replace(first, shape=shape, layout=len(layouts) - 1)
    change_rank(path, rank, layouts=layouts, bodies=(body, *others))


def add_gathered(room: store.Room, folder: Path) -> None:
    """Add what torch's collectives gave back: of other shapes, too much, or of tensors without a claim."""
    numel, all_dims = 32, (((0, 8),), ((0, 4),))
    got: dict[str, dict[str, Any]] = {
        "in order": {"held": all_dims},
        "of a dim less": {"held": (((0, 32),),)},
        "half": {"held": (((0, 4),), ((0, 4),))},
        "reversed": {"held": (((4, 8), (0, 4)), ((0, 4),))},
        "runs in order": {"runs": ((1, 1, numel),)},
        "padded": {"runs": ((1, 1, numel), (0, 0, 4))},
        "padding alone": {"runs": ((0, 0, numel),)},
        "too much": {"runs": ((1, 0, 1 << 27),)},
        "of another tensor": {"runs": ((numel + 1, 1, 16),)},
        "an error": {"error": "RuntimeError"},
    }
    claims = {
        "split": Made("[8/tp, 4]"),
        "plain": Made(None, shape=(8, 4)),
        "reversed": Made("[8/tp, 4]", "[8/fsdp, 4]"),
    }
    for (how, fields), (claimed, made), ranks in product(got.items(), claims.items(), ((0, 1, 2, 3), (2,))):
        path = make_dump(folder / f"g{len(room.cases)}.shardviz", TWO, {"w": made, "v": "[4, 4]"})
        for rank in ranks:
            change_rank(path, rank, gathered=(GatherRecord("w", "full_tensor", **fields),))
        room.add(f"gathered {how}, {claimed}, on {ranks}", ("check", "{0}"), [store.files_of(path)])
    for name in ("u", "w"):  # a name that nothing has, and a tensor that ranks lay out in two ways
        path = make_dump(folder / f"g{len(room.cases)}.shardviz", TWO, {"w": "[8/tp, 4]"})
        _with_shape(path, 3, (8, 4), ("Replicate()", "Replicate()"))
        change_rank(path, 0, gathered=(GatherRecord(name, "full_tensor", held=all_dims),))
        change_rank(path, 1, gathered=(GatherRecord(name, "full_tensor", held=(((4, 8), (0, 4)), ((0, 4),))),))
        room.add(f"gathered {name}, and another layout on the last rank", ("check", "{0}"), [store.files_of(path)])


def add_sequences(room: store.Room, folder: Path) -> None:
    """Add tensors that share a sequence: of other lengths, in other orders, and of other numbers of positions."""
    for second in ("[8/tp, 2]", "[16/tp, 2]", "[8/fsdp, 2]", "[8, 2]", "[9/tp, 2]", "[2, 8/tp]"):
        for third in ("[8/tp, 3]", "[8/fsdp, 3]"):
            path = make_dump(folder / f"q{len(room.cases)}.shardviz", TWO, {"a": "[8/tp, 3]", "b": second, "c": third})
            change_run(path, sequence={"a": 0, "b": 0, "c": 0})
            room.add(f"a sequence, {second} and {third}", ("check", "{0}"), [store.files_of(path)])


def add_stamped_jobs(room: store.Room, folder: Path) -> None:
    """Add dumps with ids and values beside checkpoints: what ranks hold is claimed, seen by its ids, or neither."""
    whole = np.random.default_rng(1).standard_normal((8, 4)).astype(np.float32)
    saved = {"the same": whole, "rows turned": whole[::-1], "another": whole + 1, "one element off": whole.copy()}
    saved["one element off"][5, 2] = 9
    ways = {
        "as claimed": ("[8/fsdp/tp, 4]", "[8/fsdp/tp, 4]"),
        "in another order": ("[8/fsdp/tp, 4]", "[8/tp/fsdp, 4]"),
        "plain": (None, "[8/fsdp/tp, 4]"),
        "plain columns": (None, "[8, 4/tp]"),
        "copies": ("[8, 4]", "[8, 4]"),
    }
    for (way, (claimed, held)), (what, there), written in product(ways.items(), saved.items(), (True, False)):
        path = make_dump(folder / f"j{len(room.cases)}.shardviz", TWO, {"w": Made(claimed, held), "v": "[4, 4]"})
        parts = {rank: whole.ravel()[ids - 1] for rank, ids in own_ids(held).items()}
        add_values(path, "w", claimed, parts, written=written)
        file = folder / f"j{len(room.cases)}.safetensors"
        header = b'{"w":{"dtype":"F32","shape":[8,4],"data_offsets":[0,128]}}'
        file.write_bytes(len(header).to_bytes(8, "little") + header + np.ascontiguousarray(there).tobytes())
        name, every = f"{way} with ids, {what} saved, {written}", store.files_of(path)
        fewer = {one: content for one, content in every.items() if one != rank_file(3)}
        for files, which in ((every, ""), (fewer, ", a rank less")):
            room.add(f"{name}{which}", ("diff", "{0}", "{1}.safetensors"), [files, store.files_of(file)])


def add_terms(room: store.Room, folder: Path) -> None:
    """Add a wrong loss of which one term is wrong: gradients that it reaches are wrong, and no other."""
    reaches: dict[str, tuple[tuple[int, ...], ...]] = {
        "its own each": ((0,), (1,), (2,)),
        "the first alone": ((0,), (0, 1), (1, 2)),
        "the first with others": ((0, 1), (0, 2), (1, 2)),
        "all": ((0, 1, 2),) * 3,
        "two in one": ((0, 1), (2,), (2,)),
        "none in the last": ((0, 1), (1, 2), ()),
    }
    layout = parse("[8/tp, 6]").layout(TWO)
    for (way, reach), odd, (how, loss) in product(
        reaches.items(), range(3), (("odd", 2.25), ("twice", 2.25), ("twice", 2.5))
    ):
        step, numbers = Step(TWO), np.random.default_rng(15)
        for name, of_name in zip(("up.weight", "down.weight", "norm.weight"), reach, strict=True):
            parts = [numbers.standard_normal((8, 6)) * (at in of_name) for at in range(3)]
            whole = sum(parts, np.zeros((8, 6)))
            wrong = whole + (np.sin(9 * parts[odd]) if how == "odd" else parts[odd])
            for at, part in enumerate(parts):
                step.put("activation", of_loss_term(name, at), "reference", {0: part})
            step.put("grad", name, "reference", {0: whole})
            held = {rank: wrong.ravel()[region.flat_ids((8, 6))] for rank, region in layout.regions()}
            step.put("grad", name, "step", held, layout)
        step.put("activation", of_loss_term("loss", odd), "reference", {0: np.array(0.5)})
        step.put("scalar", "loss", "step", dict.fromkeys(TWO.ranks, np.array(loss)))
        step.put("scalar", "loss", "reference", {0: np.array(2.5)})
        path = step.write(folder / f"t{len(room.cases)}.shardviz")
        room.add(f"term {odd} {how}, reached: {way}, loss {loss}", ("check", "{0}"), [store.files_of(path)])


def add_copied_names(room: store.Room, folder: Path) -> None:
    """Add tensors that hold a second tensor's elements, everywhere or not, with others of its shape and role beside."""
    names = ("a.weight", "b.weight", "c.weight")
    thirds = (("[4, 8]", 4), ("[8, 4]", 4), ("[8, 4]", 1))
    ways = product(thirds, range(3), ("param", "buffer"), (("b",), ("b", "c"), ("a",)))
    for (third, num_ranks), whose, role, odd in ways:
        path = make_dump(
            folder / f"n{len(room.cases)}.shardviz", TWO, dict(zip(names, ("[8, 4]", "[8, 4]", third), strict=True))
        )
        for rank in TWO.ranks:
            written = read_rank(path, rank)
            bodies = [structs.replace(body, role=role) for body in written.bodies]  # type: ignore[arg-type]
            for tensor in written.tensors if rank < num_ranks else ():
                if tensor.name[0] in odd:
                    runs = ((1 + 32 * whose, 1, 32),)
                    bodies[tensor.body] = structs.replace(bodies[tensor.body], held=None, runs=runs)
            change_rank(path, rank, bodies=tuple(bodies))
        name = f"{role}s {', '.join(odd)} with {names[whose]} on {num_ranks} ranks, c is {third}"
        room.add(name, ("check", "{0}"), [store.files_of(path)])


def add_noted(room: store.Room, folder: Path) -> None:
    """Add weights whose key a load skipped, parameters that were replaced, and a file that was damaged."""
    own, claim = own_ids("[8/fsdp/tp, 4]"), "[8/fsdp/tp, 4]"
    keys = ("0.w", "model.0.w", "w", "0._checkpoint_wrapped_module.w", "module.0.w.module")
    for key, number, reference in product(keys, (-1, 0), ("ref.safetensors", "")):
        gone = {rank: np.full_like(ids, number) for rank, ids in own.items()}
        path = make_dump(folder / f"k{len(room.cases)}.shardviz", TWO, {"0.w": Made(claim, ids=gone), "v": "[8, 4]"})
        change_run(path, reference=reference)
        for rank in TWO.ranks:
            change_rank(path, rank, skipped_keys=(("0.w", key),))
        name = f"0.w of {number}s, skipped as {key}, reference {reference or 'none'}"
        room.add(name, ("check", "{0}"), [store.files_of(path)])
    for replaced, ranks in product((("0.w",), ("0.w", "v"), ("none",)), ((0, 1, 2, 3), (1,))):
        path = make_dump(folder / f"k{len(room.cases)}.shardviz", TWO, {"0.w": claim, "v": "[8, 4]"})
        for rank in ranks:
            change_rank(path, rank, replaced=replaced)
        room.add(f"{', '.join(replaced)} replaced on {ranks}", ("check", "{0}"), [store.files_of(path)])
    for at in (-30, 60):
        path = make_dump(folder / f"k{len(room.cases)}.shardviz", TWO, {"0.w": claim, "v": "[8, 4]"})
        content = bytearray((path / rank_file(3)).read_bytes())
        content[at] ^= 1
        (path / rank_file(3)).write_bytes(content)
        room.add(f"a byte at {at} was damaged", ("check", "{0}"), [store.files_of(path)])


def add_suspects(room: store.Room, folder: Path) -> None:
    """Add a wrong output beside tensors that nobody could check: computed again, or zero on some ranks."""
    whole = np.random.default_rng(3).standard_normal((8, 6))
    ways = {"computed again": ("buffer", TWO.ranks, -1), "zero on some ranks": ("param", (1, 3), 0)}
    for (way, (role, ranks, number)), off in product(ways.items(), (0.0, 0.5)):
        step = Step(TWO)
        step.stamps = [Stamp("freq", 1, (4,))]
        for rank in TWO.ranks:
            runs = ((number, 0, 4),) if rank in ranks else ((1, 1, 4),)
            bodies = step.bodies.setdefault(rank, [])
            bodies.append(Body(role, "stamped", (4,), (4,), "float32", runs=runs))
            step.tensors.setdefault(rank, []).append(TensorRecord("freq", len(bodies) - 1))
        if role == "buffer":
            step.put("buffer", "freq", "initial", dict.fromkeys(TWO.ranks, np.arange(4.0)))
        step.put("output", "output", "step", dict.fromkeys(TWO.ranks, whole + off * np.sin(9 * whole)))
        step.put("output", "output", "reference", {0: whole})
        path = step.write(folder / f"u{len(room.cases)}.shardviz")
        room.add(f"an output off by {off} beside freq, {way}", ("check", "{0}"), [store.files_of(path)])


ADDED = (
    *(add_plans, add_ids, add_shapes, add_gathered, add_sequences, add_stamped_jobs),
    *(add_terms, add_copied_names, add_noted, add_suspects),
)


def main() -> None:
    """Make the room, and judge it."""
    room = store.Room(ROOM)
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        for add in ADDED:
            add(room, Path(folder))
    record(room)


if __name__ == "__main__":
    main()
