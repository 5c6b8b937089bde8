"""Random trainers and engines: meshes, layouts, names and fusions drawn at random, and a sync with one fault, or none.

The sync is written out here, with torch alone: it gathers the source's weights, makes the engine's of them and cuts
those. What a fault does to which rows of which rank is worked out by comparing with the sync that has none.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardviz.live.compat.meshes import quiet_redistribution

if TYPE_CHECKING:
    from collections.abc import Callable

FAULTS = (
    "stale",
    "stale rows",
    "swapped",
    "other rank's",
    "parts exchanged",
    "shifted",
    "rounded",
    "zeros",
    "reversed",
)
Tensors = dict[str, torch.Tensor]


@dataclass
class Pair:
    """A trainer and an engine.

    Attributes:
        source: The trainer's weights on this rank, None where it has none.
        target: The engine's on this rank.
        map: What the engine's are made of.
        layouts: How its plain tensors are cut.
        mesh: Its mesh.
        cut: Returns this rank's part of an engine's tensor, from the whole of the trainer's.
        splits: By engine's tensor, the dim that is cut, or None.
        resized: By engine's tensor, the rows that it has of a vocabulary, more or fewer than the trainer.
        wrong: The fault's tensor, rank and true rows by part, once it was made.
    """

    source: Tensors | None
    target: Tensors | None
    map: dict[str, str]
    layouts: dict[str, str]
    mesh: DeviceMesh
    made: dict[str, list[str]]
    splits: dict[str, int | None]
    dtensors: bool
    wholes: Tensors
    resized: dict[str, int] = field(default_factory=dict)
    wrong: dict[str, object] = field(default_factory=dict)

    def parts(self, name: str) -> list[torch.Tensor]:
        """Return this rank's part of each tensor that an engine's tensor is made of."""
        tensors = [self.whole(name, one) for one in self.made[name]]
        if self.dtensors:
            return [_part(torch.cat(tensors), self.splits[name], self.mesh)]
        return [_part(one, self.splits[name], self.mesh) for one in tensors]

    def whole(self, name: str, one: str) -> torch.Tensor:
        """Return a trainer's tensor with as many rows as the engine has: with padding, or without."""
        whole = self.wholes[one]
        more = self.resized.get(name, len(whole)) - len(whole)
        return (
            torch.cat([whole, whole.new_full((more, *whole.shape[1:]), 7.5)])
            if more > 0
            else whole[: len(whole) + more]
        )

    def right(self, name: str) -> torch.Tensor:
        """Return what this rank should have."""
        return torch.cat(self.parts(name)) if self.made[name] else torch.empty(0)


def _part(whole: torch.Tensor, dim: int | None, mesh: DeviceMesh, coord: int | None = None) -> torch.Tensor:
    if dim is None:
        return whole
    at = mesh.get_local_rank("tp") if coord is None else coord
    chunks = whole.chunk(mesh.shape[1], dim)
    return chunks[at] if at < len(chunks) else whole.narrow(dim, 0, 0)


def drawn(seed: int) -> Pair:
    """Draw a pair. Every rank calls this, and draws the same."""
    rng = random.Random(seed)
    world = distributed.get_world_size()
    torch.manual_seed(seed)
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float32])
    layers, width, inner = rng.randint(1, 2), rng.choice([16, 24]), rng.choice([16, 32, 40])
    wholes: Tensors = {
        "embed": torch.randn(rng.choice([32, 17]), width, dtype=dtype),
        "norm": torch.randn(width, dtype=dtype),
    }
    for layer in range(layers):
        for name, rows in (("q", 32), ("k", 16), ("v", 16), ("gate", inner), ("up", inner)):
            wholes[f"layers.{layer}.{name}"] = torch.randn(rows, width, dtype=dtype)
        wholes[f"layers.{layer}.o"] = torch.randn(width, 32, dtype=dtype)
        wholes[f"layers.{layer}.down"] = torch.randn(width, inner, dtype=dtype)
    source = _sharded(wholes, rng, world)
    return _engine(wholes, source, rng, layers, world)


def _sharded(wholes: Tensors, rng: random.Random, world: int) -> Tensors | None:
    """Shard the trainer's weights on a mesh of the world's first ranks."""
    shape = rng.choice(
        [shape for shape in ((world,), (2, world // 2), (world // 2,), (1,), (world // 2, 2)) if 0 not in shape]
    )
    size = int(torch.tensor(shape).prod())
    mesh = DeviceMesh("cpu", torch.arange(size).reshape(shape), mesh_dim_names=("a", "b")[: len(shape)])
    plans = {
        name: [rng.choice([Replicate(), Shard(0), Shard(one.ndim - 1)]) for _ in shape] for name, one in wholes.items()
    }
    if distributed.get_rank() >= size:
        return None
    return {name: distribute_tensor(one.clone(), mesh, plans[name]) for name, one in wholes.items()}


def _engine(wholes: Tensors, source: Tensors | None, rng: random.Random, layers: int, world: int) -> Pair:
    size = rng.choice([one for one in (1, 2, 4) if one <= world])
    copies = rng.choice([one for one in (1, 2) if one * size <= world])
    first = rng.choice([0, world - size * copies])
    grid = torch.arange(first, first + size * copies).reshape(copies, size)
    mesh = DeviceMesh("cpu", grid, mesh_dim_names=("dp", "tp"))
    dtensors, fused, renamed = rng.random() < 0.4, rng.random() < 0.7, rng.random() < 0.5
    before = "model." if renamed else ""
    made = {f"{before}embed": ["embed"], f"{before}norm": ["norm"]}
    splits: dict[str, int | None] = {f"{before}embed": 0, f"{before}norm": None}
    for layer in range(layers):
        own = f"layers.{layer}."
        groups = (
            {"qkv": ["q", "k", "v"], "gate_up": ["gate", "up"]}
            if fused
            else {one: [one] for one in ("q", "k", "v", "gate", "up")}
        )
        groups |= {"o": ["o"], "down": ["down"]}
        for name, parts in groups.items():
            made[f"{before}{own}{name}"] = [own + part for part in parts]
            splits[f"{before}{own}{name}"] = 1 if name in ("o", "down") else 0
    rules = {name: f"cat({', '.join(parts)}, 0)" if len(parts) > 1 else parts[0] for name, parts in made.items()}
    layouts = {name: _notation(wholes[made[name][0]].ndim, dim) for name, dim in splits.items()}
    pair = Pair(source, None, rules, {} if dtensors else layouts, mesh, made, splits, dtensors, wholes)
    _resize(pair, f"{before}embed", rng)
    if distributed.get_rank() in grid:
        pair.target = {name: _empty(pair, name) for name in made}
    return pair


def _resize(pair: Pair, name: str, rng: random.Random) -> None:
    """Let the engine have a padded vocabulary, or the trainer, or neither."""
    rows, size = len(pair.wholes["embed"]), pair.mesh.shape[1]
    kind = rng.choice(["", "pad", "slice"])
    if kind == "pad":
        pair.resized[name] = (rows // size + 1) * size
        pair.map[name] = f"pad(embed, {pair.resized[name]})"
    elif kind == "slice":
        pair.resized[name] = rows - 1
        pair.map[name] = f"slice(embed, 0, {rows - 1})"


def _notation(ndim: int, dim: int | None) -> str:
    return "[" + ", ".join("*/tp" if at == dim else "*" for at in range(ndim)) + "]"


def _empty(pair: Pair, name: str) -> torch.Tensor:
    local = torch.zeros_like(pair.right(name))
    if not pair.dtensors:
        return local
    dim, whole = pair.splits[name], torch.cat([pair.whole(name, one) for one in pair.made[name]])
    placements = [Replicate(), Replicate() if dim is None else Shard(dim)]
    return DTensor.from_local(local, pair.mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def sync(pair: Pair, fault: str = "", seed: int = 0) -> Callable[[], None]:
    """Return the function that sends the weights, with one fault on one rank."""
    rng = random.Random(seed)
    ranks = sorted(pair.mesh.mesh.flatten().tolist())
    hit, name = rng.choice(ranks), ""
    names = [one for one in pair.made if _can(pair, fault, one)]
    if fault:
        name = rng.choice(names) if names else ""

    def send() -> None:
        for one, whole in list(pair.wholes.items()):
            sent = whole.clone()
            if pair.source is not None:
                with quiet_redistribution():
                    sent = pair.source[one].full_tensor()
            distributed.broadcast(sent, src=0)
            pair.wholes[one] = sent
        if pair.target is None:
            return
        for one, tensor in pair.target.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            right = pair.right(one)
            value = right
            if one == name and distributed.get_rank() == hit:
                value = _broken(pair, one, fault, local.clone())
                pair.wrong = pair.wrong or {"name": one, "rank": hit, "rows": _rows(pair, one, value != right)}
            local.copy_(value)

    return send


def _can(pair: Pair, fault: str, name: str) -> bool:
    """Whether a fault changes a tensor: by shapes alone, so that all ranks agree."""
    size, shape = pair.mesh.shape[1], pair.whole(name, pair.made[name][0]).shape
    if fault == "other rank's":
        dim = pair.splits[name]
        return dim is not None and size > 1 and shape[dim] % size == 0
    if fault == "parts exchanged":
        parts = [pair.wholes[one].shape for one in pair.made[name]]
        return len(parts) > 1 and parts[-1] == parts[-2] and not pair.dtensors
    if fault == "swapped":
        return bool(_twin(pair, name))
    if fault == "rounded":
        return pair.wholes["norm"].dtype == torch.float32
    return shape[0] >= 2 * size  # every rank has two rows or more


def _twin(pair: Pair, name: str) -> str:
    """Return another of the engine's tensors that is cut alike."""

    def shape(one: str) -> tuple[list[torch.Size], int | None]:
        return [pair.whole(one, part).shape for part in pair.made[one]], pair.splits[one]

    return next((one for one in pair.made if one != name and shape(one) == shape(name)), "")


def _broken(pair: Pair, name: str, fault: str, before: torch.Tensor) -> torch.Tensor:
    right = pair.right(name)
    if fault == "stale":
        return before
    if fault == "stale rows":
        return torch.cat([right[:1], before[1:2], right[2:]])
    if fault == "swapped":
        return pair.right(_twin(pair, name))
    if fault == "other rank's":
        other = (pair.mesh.get_local_rank("tp") + 1) % pair.mesh.shape[1]
        parts = [pair.whole(name, one) for one in pair.made[name]]
        parts = [torch.cat(parts)] if pair.dtensors else parts
        return torch.cat([_part(one, pair.splits[name], pair.mesh, other) for one in parts])
    if fault == "parts exchanged":
        *others, one, other = pair.parts(name)
        return torch.cat([*others, other, one])
    return {
        "shifted": right.roll(1, 0),
        "rounded": right.bfloat16().to(right.dtype),
        "zeros": torch.zeros_like(right),
        "reversed": right.flip(0),
    }[fault]


def _rows(pair: Pair, name: str, wrong: torch.Tensor) -> dict[str, list[int]]:
    """Return the wrong rows by the tensor that they are of, counted in that: the trainer's, or a DTensor's own."""
    found: dict[str, list[int]] = {}
    start, at, count = 0, pair.mesh.get_local_rank("tp"), pair.mesh.shape[1]
    wholes = {one: pair.whole(name, one) for one in pair.made[name]}
    if pair.dtensors or pair.splits[name] != 0:
        wholes = {name: torch.cat(list(wholes.values()))}
    for one, whole in wholes.items():
        first = 0
        size = len(whole)
        if pair.splits[name] == 0:
            step = -(-size // count)
            first = min(at * step, size)
            size = min(step, size - first)
        rows = wrong[start : start + size].flatten(1).any(1) if wrong.ndim > 1 else wrong[start : start + size]
        numbers = [first + row for row in rows.nonzero().flatten().tolist()]
        if numbers := [row for row in numbers if name not in pair.resized or row < len(pair.wholes["embed"])]:
            found[one] = numbers
        start += size
    return found
