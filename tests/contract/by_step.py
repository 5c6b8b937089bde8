"""`python -m tests.contract.by_step`: the room `results`, of one training step's numbers, made by rule.

A dump has two or three gradients, an output, a loss and weights with an optimizer's state before and after the step.
One of them, or all of a role, is changed: by a factor, an order, a reduction that is missing or was made twice, zeros,
NaN, another part or tensor. Every change is made in each role, and layouts, meshes and what is right beside it take
turns.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass, field
from itertools import chain, count, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from shardviz.dump.arrays import hash_of
from shardviz.dump.records.files import RankRecord, RunRecord
from shardviz.dump.records.step import NoiseRecord, StageRecord, of_loss_term, of_micro_batch
from shardviz.dump.records.tensors import Body, FragmentRecord, LayoutRecord, MeshRecord, Stamp, TensorRecord
from shardviz.dump.write import prepare_folder, write_rank, write_run
from shardviz.layout.layout import Layout
from shardviz.layout.mesh import Mesh, parse_mesh
from shardviz.layout.notation import parse
from shardviz.layout.placements import parse_placement
from tests.check.records import add_values, change_rank, change_run, read_rank
from tests.contract import store
from tests.contract.choosing import chosen
from tests.contract.judge import IN_MEMORY, judge_room, record
from tests.contract.step_changes import (
    AVG,
    LAYOUTS,
    MESHES,
    MOST_ALIKE,
    ROLES,
    S0,
    SHAPE,
    VECTOR,
    Place,
    R,
    changes,
    each,
    times,
)
from tests.dumps import Made, make_dump

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    Array = NDArray[Any]
    Held = dict[int, Array]
    Change = Callable[["Place", Held], Held]

ROOM = "results"


@dataclass
class Step:
    """A step's dump in the making."""

    mesh: Mesh
    bodies: dict[int, list[Body]] = field(default_factory=dict)
    tensors: dict[int, list[TensorRecord]] = field(default_factory=dict)
    layouts: list[LayoutRecord] = field(default_factory=list)
    stamps: list[Stamp] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    of_ranks: dict[int, dict[str, Any]] = field(default_factory=dict)

    def hold(self, rank: int, name: str, shape: tuple[int, ...], *spans: tuple[tuple[int, int], ...]) -> None:
        """Add which part of a stamped plain tensor a rank was seen to hold: the ranges of each dim."""
        local = tuple(sum(stop - start for start, stop in ranges) for ranges in spans)
        bodies = self.bodies.setdefault(rank, [])
        bodies.append(Body("param", "stamped", shape, local, "float32", held=spans))
        self.tensors.setdefault(rank, []).append(TensorRecord(name, len(bodies) - 1))

    def put(
        self,
        role: Any,
        name: str,
        moment: Any,
        held: Held,
        layout: Layout | None = None,
        *,
        dtype: str = "float32",
        written: bool = True,
    ) -> None:
        """Add what ranks have of a tensor: its values, or the hash of them alone."""
        index = None
        if layout is not None:
            placements = layout.placements()
            assert placements is not None
            claim = LayoutRecord(0, tuple(map(str, placements)), layout.shape)
            self.layouts.append(claim)
            index = self.layouts.index(claim)
        for rank, part in held.items():
            with np.errstate(over="ignore"):
                values = np.array(part, dtype)
            whole = layout.tensor_shape if layout is not None else values.shape
            bodies = self.bodies.setdefault(rank, [])
            bodies.append(
                Body(
                    *(role, moment, whole, values.shape, dtype),
                    layout=index,
                    values=_listed(values) if written else None,
                    constant=values.size > 0 and not np.ptp(values + 0),  # of truths, too
                )
            )
            digest = hash_of(values, dtype, values.shape)
            self.tensors.setdefault(rank, []).append(TensorRecord(name, len(bodies) - 1, digests=digest))

    def write(self, folder: Path) -> Path:
        """Write the dump."""
        record_ = MeshRecord(self.mesh.axes, self.mesh.shape, self.mesh.ranks)
        prepare_folder(folder, force=True)
        write_run(folder, RunRecord(1, "test", "none", self.mesh.size, mesh=record_, stamps=tuple(self.stamps)))
        for rank in self.mesh.ranks:
            write_rank(
                folder,
                RankRecord(
                    *(1, rank, self.mesh.size, "testhost"),
                    meshes=(record_,),
                    layouts=tuple(self.layouts),
                    bodies=tuple(self.bodies.get(rank, ())),
                    tensors=tuple(self.tensors.get(rank, ())),
                    **self.fields,
                    **self.of_ranks.get(rank, {}),
                ),
            )
        return folder


def _listed(values: Array) -> Any:
    if values.dtype.kind == "f" and np.isfinite(values).all():
        return values.astype(str).astype(np.float64).tolist()  # no more digits than its type has
    return np.where(np.isfinite(values), values.astype(object), values.astype(str)).tolist()


BESIDE = (
    *("alone", "right gradients", "right outputs", "all gradients alike", "loss alike", "loss wrong", "no loss"),
    *("no reference", "no gradient of one", "narrow", "micro-batches", "terms of the loss", "no batch axis", "stamped"),
)
"""What is beside the tensor that is changed."""


@dataclass
class Scene:
    """A step of which one tensor, or all gradients, are changed.

    Attributes:
        mesh: The mesh.
        role: Of what is changed.
        placements: Of gradients, and of what is changed, along the last two axes.
        change: What is done to it.
        beside: What is beside it.
        of_step: Whether it is the optimizer's step of a weight that is changed, and not the weight.
    """

    mesh: Mesh
    role: str
    placements: tuple[str, ...] | None
    change: Change
    beside: str
    of_step: bool
    step: Step = field(init=False)
    weights: dict[str, Array] = field(init=False)
    gradients: dict[str, Array] = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng(8)
        names = ("up.weight", "down.weight", "head.weight")
        self.step = Step(self.mesh)
        self.weights = {name: random.standard_normal(SHAPE) for name in names}
        self.gradients = {name: random.standard_normal(SHAPE) for name in names}

    @property
    def names(self) -> list[str]:
        """The weights of the model."""
        return list(self.weights)[: 1 if self.beside == "alone" else 3]

    def made(self) -> Step:
        """Return the step."""
        has_output = self.role == "output" or self.beside not in ("alone", "loss wrong")
        self._add_gradients()
        if has_output:
            is_changed = self.role == "output"
            claim = self.placements if is_changed else (S0, R)
            self._add("output", "output", self.weights["up.weight"] * 2, claim, is_changed=is_changed)
        self._add_logged()
        if self.role in ("param", "optim", "buffer"):
            self._add_update()
        if self.beside != "no reference":
            self.step.put("param", "norm.bias", "reference", {0: VECTOR})
        self._add_rest()
        return self.step

    def _add(
        self,
        role: str,
        name: str,
        wanted: Array,
        claim: tuple[str, ...] | None,
        *,
        is_changed: bool,
        is_after: bool = False,
        start: Array | None = None,
    ) -> None:
        """Add a tensor, changed or as it should be, or of which the way from a start is changed."""
        placements = (*(R,) * (self.mesh.ndim - 2), *(claim or (R, R)))
        layout = Layout.from_placements(self.mesh, wanted.shape, tuple(map(parse_placement, placements)))
        moved = wanted if start is None else wanted - start
        other = self.gradients["down.weight"] if wanted.shape == SHAPE else moved * 2 + 1
        place = Place(self.mesh, layout, moved, other)
        held = place.cut(moved)
        if is_changed:
            with np.errstate(all="ignore"):
                held = self.change(place, held)
        if start is not None:
            held = {rank: part + place.cut(start)[rank] for rank, part in held.items()}
        self.step.put(role, name, "step", held, layout if claim is not None else None)
        if self.beside != "no reference":
            self.step.put(role, name, "updated" if is_after else "reference", {0: wanted})

    def _add_gradients(self) -> None:
        for name in self.names:
            is_changed = self.role == "grad" and (name == self.names[0] or self.beside == "all gradients alike")
            if self.beside != "no gradient of one" or name != self.names[-1]:
                self._add("grad", name, self.gradients[name], self.placements, is_changed=is_changed)
            else:
                self.step.put("grad", name, "reference", {0: self.gradients[name]})

    def _add_logged(self) -> None:
        average = (AVG, R) if self.beside != "no batch axis" else (R, R)
        is_wrong = self.role == "loss" or self.beside in ("loss alike", "loss wrong")
        if self.beside != "no loss":
            self._add("scalar", "loss", np.array(2.5), average, is_changed=is_wrong)
        if self.role == "grad_norm" or self.beside == "right outputs":
            norm = np.linalg.norm([np.linalg.norm(self.gradients[name]) for name in self.names])
            claim = (R, R) if self.placements is not None else None
            self._add("scalar", "grad_norm", np.array(norm), claim, is_changed=self.role == "grad_norm")

    def _add_update(self) -> None:
        """Add weights, states and buffers after the optimizer's step."""
        claim, first = self.placements, self.names[0]
        for name in self.names:
            before, gradient = self.weights[name], self.gradients[name]
            is_changed = self.role == "param" and name == first
            self.step.put("param", name, "reference", {0: before})
            start = before if is_changed and self.of_step else None
            after = before - 0.1 * gradient
            self._add("param", name, after, claim, is_changed=is_changed, is_after=True, start=start)
            if self.role == "optim":
                moment = 0.9 * self.gradients["head.weight"][::-1] + 0.1 * gradient
                state = f"{name}.exp_avg"
                self._add("optim", state, moment, claim, is_changed=name == first, is_after=True)
        if self.role == "buffer":
            mean = self.gradients[first][:, 0]
            self._add("buffer", "norm.running_mean", mean, (R, R), is_changed=True, is_after=True)

    def _add_rest(self) -> None:
        """Add what some steps have besides."""
        step, names = self.step, self.names
        if self.beside == "narrow":
            noise = tuple(NoiseRecord("grad", name, 0.01, 0.003) for name in names)
            step.fields = {"narrowed_to": ("bfloat16",), "narrow_sums": ("bfloat16",), "noise": noise}
        for name in names:
            first = 0.4 * self.gradients[name] + 0.3 * np.sin(self.gradients[name] * 9)
            for at, part in enumerate((first, self.gradients[name] - first)):
                if self.beside == "micro-batches":
                    step.put("activation", of_micro_batch(name, at), "reference", {0: part * 2})
                if self.beside == "terms of the loss":
                    step.put("activation", of_loss_term(name, at), "reference", {0: part})
        if self.beside == "micro-batches":
            step.fields = {"schedule": tuple(StageRecord(0, at, back) for at in (0, 1) for back in (False, True))}
        if self.beside == "stamped":
            step.stamps = [Stamp(name, 1 + 100 * at, SHAPE) for at, name in enumerate(names)]
            step.stamps[2] = Stamp(names[2], 1, SHAPE, tied_to=names[0])


INITIAL = (
    *("times 1", "last rank's halved", "last rank's zero", "own values along dp", "own values along tp", "all NaN"),
    *("the first's along tp", "the first's along dp", "constant", "noise 1e-07", "infinite on the last rank"),
    *("last rank's a row less", "last rank's missing", "each rank's times its number"),
)
"""What is done to the values that a tensor has before the step."""
CHANGES_OF_FIRST = dict(changes(MESHES[0]))


def cases() -> Iterator[tuple[str, Step]]:
    """Yield every change in every role, with layouts, meshes and what is beside it in turn."""
    turn = count()
    for role in ROLES:
        for number, name in enumerate(dict(changes(MESHES[0]))):
            for again in range(2):
                at = next(turn)
                mesh, beside = MESHES[(at + again) % len(MESHES)], BESIDE[(3 * at + again) % len(BESIDE)]
                placements = LAYOUTS[(2 * number + 5 * again) % len(LAYOUTS)]
                scene = Scene(mesh, role, placements, dict(changes(mesh))[name], beside, of_step=again == 0)
                layout = "plain" if placements is None else " ".join(placements)
                size = "x".join(map(str, mesh.shape))
                with contextlib.suppress(ValueError, IndexError):  # a number has no rows
                    yield f"{role} {name}, {layout}, {beside}, {size}", scene.made()
    for role, name, placements in product(("grad", "output", "loss", "grad_norm"), INITIAL[1:], ((R, R), (R, S0))):
        scene = Scene(MESHES[0], role, placements, CHANGES_OF_FIRST[name], "no reference", of_step=False)
        with contextlib.suppress(ValueError, IndexError):
            yield f"{role} {name}, {' '.join(placements)}, no reference, copies", scene.made()


def initial() -> Iterator[tuple[str, Step]]:
    """Yield tensors before the step, which nothing is compared with but their copies and their other shards."""
    kinds = product(("param", "buffer", "optim"), (*LAYOUTS[:6], None), INITIAL)
    for at, (role, placements, name) in enumerate(kinds):
        mesh, dtype = MESHES[at % 3], ("float32", "float32", "float64", "int64", "float16")[at % 5]
        claims = (*(R,) * (mesh.ndim - 2), *(placements or (R, R)))
        layout = Layout.from_placements(mesh, SHAPE, tuple(map(parse_placement, claims)))
        whole = np.random.default_rng(at % 4).standard_normal(SHAPE) * (10 if dtype == "int64" else 1)
        place, step = Place(mesh, layout, whole, whole * 2), Step(mesh)
        with np.errstate(all="ignore"):
            held = (dict(changes(mesh)) | {"times 1": each(times(1))})[name](place, place.cut(whole))
        if dtype == "int64" and not all(np.isfinite(part).all() for part in held.values()):
            continue
        for tensor, parts in {"w": held, "v": place.cut(whole + 3)}.items():
            called = f"{tensor}.exp_avg" if role == "optim" else tensor
            claim, written = layout if placements is not None else None, at % 4 < 3
            step.put(role, called, "initial", parts, claim, dtype=dtype, written=written)
            step.stamps += [Stamp(tensor, 1 + 100 * len(step.stamps), SHAPE)] * (at % 2)
        shown = "values" if written else "hashes"
        yield f"initial {role} {name}, {placements or 'plain'}, {dtype}, {shown}, {mesh.size} ranks", step


def records() -> Iterator[tuple[str, Mapping[str, Made | str], dict[str, Any], dict[int, dict[str, Any]]]]:
    """Yield what ranks say of stamped tensors: the tensors, fields of the run, and fields of each rank's record."""
    two: dict[str, Made | str] = {name: Made("[8/fsdp, 4]") for name in ("a.weight", "b.weight")}
    for ranks in ((1,), (0, 1)):
        for names in (("b.weight",), ("a.weight", "b.weight"), ("c.weight",)):
            yield f"{' '.join(names)} unwritten on {ranks}", two, {}, {rank: {"unwritten": names} for rank in ranks}
            fields: dict[int, dict[str, Any]]
            fields = {rank: {"not_applied": tuple((name, "it is a view") for name in names)} for rank in ranks}
            yield f"{' '.join(names)} not filled on {ranks}", two, {}, fields
    stamps = (Stamp("a.fp32", 1, (5, 7), role="optim"), Stamp("b.fp32", 36, (20,), role="optim"))
    flat: dict[str, str] = {"a.fp32": "[flat(5, 7) at 0 of 60/fsdp]", "b.fp32": "[flat(20) at 35 of 60/fsdp]"}
    ids = {"late": np.array([32, 33, 34, 35, -1]), "of another weight": np.arange(36, 41), "zeros": np.zeros(5, int)}
    ids |= {"right": np.arange(31, 36), "no ids": np.full(5, -1), "half zeros": np.array([31, 32, 0, 0, 0])}
    for what, held in ids.items():
        masters: dict[str, Made | str] = {"a.fp32": Made(flat["a.fp32"], ids={1: held}), "b.fp32": flat["b.fp32"]}
        yield f"a master copy, {what}", masters, {"stamps": stamps}, {}
        first = {"a.fp32": Made(flat["a.fp32"], ids={0: np.zeros(30, int), 1: held}), "b.fp32": flat["b.fp32"]}
        yield f"a master copy, {what}, and zeros on the first rank", first, {"stamps": stamps}, {}
    for ranks in ((1,), (0, 1)):  # what is not found beside a misplaced one, on its rank or on another
        zeros = {rank: np.zeros((0, 20)[rank], int) for rank in ranks}
        both: dict[str, Made | str] = {"a.fp32": Made(flat["a.fp32"], ids={1: ids["late"]})}
        both["b.fp32"] = Made(flat["b.fp32"], ids=zeros)
        yield f"a master copy, late, and zeros in another on {ranks}", both, {"stamps": stamps}, {}
    for spans in (((0, 30), (25, 10)), ((0, 20), (25, 10)), ((0, 30), (30, 7)), ((0, 30), (30, 4)), ((0, 30), (30, 5))):
        fields = {rank: {"fragments": (FragmentRecord("a.fp32", (0, 1), *span),)} for rank, span in enumerate(spans)}
        yield f"master copies that say {spans}", dict(flat), {"stamps": stamps}, fields


def add_records(room: store.Room, folder: Path) -> None:
    """Add what ranks say of stamped tensors; master copies are tensors of the optimizer."""
    for at, (name, made, of_run, of_ranks) in enumerate(records()):
        path = make_dump(folder / f"r{at}.shardviz", parse_mesh("fsdp=2"), made)
        change_run(path, **of_run)
        for rank in (0, 1):
            bodies = read_rank(path, rank).bodies
            as_state = tuple(structs.replace(body, role="optim") for body in bodies) if of_run else bodies
            change_rank(path, rank, bodies=as_state, **of_ranks.get(rank, {}))
        room.add(name, ("check", "{0}"), [store.files_of(path)])
    for role, claim, same in product(("param", "optim"), ("[8/fsdp, 4]", "[8, 4/fsdp]", "[8, 4]"), (True, False)):
        path = make_dump(folder / f"i{len(room.cases)}.shardviz", parse_mesh("fsdp=2"), {"w": claim})
        whole, layout = np.random.default_rng(2).standard_normal((8, 4)), parse(claim).layout(parse_mesh("fsdp=2"))
        parts = {rank: layout.region((rank,)).flat_ids((8, 4)) for rank in (0, 1)}
        values = {rank: whole.ravel()[parts[0 if same else rank]].astype(np.float32) for rank in parts}
        add_values(path, "w.exp_avg" if role == "optim" else "w", claim, values, role=role)  # type: ignore[arg-type]
        room.add(
            f"{role} {claim}, {'the same' if same else 'its own'} on each rank",
            ("check", "{0}"),
            [store.files_of(path)],
        )


def role_of(name: str) -> str:
    """Return the first word of a case's name: the role of what is changed."""
    return name.partition(" ")[0]


def main() -> None:
    """Make the room, judge it, and keep what is judged in many ways."""
    room = store.Room(ROOM)
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        for at, (name, step) in enumerate(chain(cases(), initial())):
            room.add(name, ("check", "{0}"), [store.files_of(step.write(Path(folder, f"{at}.shardviz")))])
        room.keep(chosen(judge_room(room), MOST_ALIKE, role_of))
        add_records(room, Path(folder))
    record(room)


if __name__ == "__main__":
    main()
