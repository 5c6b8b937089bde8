"""A trainer and an engine as serving libraries have them, and what loaders get wrong: fused q, k, v, experts, heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

    Tensors = dict[str, torch.Tensor]

HEADS, KV, HEAD, WIDTH, INNER, VOCAB, EXPERTS = 8, 2, 4, 24, 20, 30, 4
LAYERS = ("layers.0.", "layers.1.")
HIT = LAYERS[1]

MAP = {
    "*.qkv.weight": "cat(*.q.weight, *.k.weight, *.v.weight)",
    "*.qkv.bias": "cat(*.q.bias, *.k.bias, *.v.bias)",
    "*.gate_up.weight": "cat(*.gate.weight, *.up.weight)",
    "*.glu.weight": "interleave(*.gate.weight, *.up.weight, 0)",
    "*.w13": "stack(cat(*.experts.*.w1, *.experts.*.w3))",
    "*.w2": "stack(*.experts.*.w2)",
    "*.c_attn.weight": "transpose(*.conv.weight)",
}
LAYOUTS = {
    "*.qkv.bias": "[*/tp]",
    "*.qkv.*": "[*/tp, *]",
    "*.gate_up.weight": "[*/tp, *]",
    "*.glu.weight": "[*/tp, *]",
    "*.o.weight": "[*, */tp]",
    "*.down.weight": "[*, */tp]",
    "*.w13": "[*, */2/tp, *]",
    "*.w2": "[*, *, */tp]",
    "*.c_attn.weight": "[*, */tp]",
    "embed.weight": "[*/tp, *]",
    "lm_head.weight": "[*/tp, *]",
    "*norm.weight": "[*]",
}


def wholes() -> Tensors:
    """Return the trainer's weights, whole."""
    generator = torch.Generator().manual_seed(1)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    found = {"embed.weight": made(VOCAB, WIDTH), "lm_head.weight": made(VOCAB, WIDTH), "norm.weight": made(WIDTH)}
    for layer in LAYERS:
        for name, heads in (("q", HEADS), ("k", KV), ("v", KV)):
            found[f"{layer}{name}.weight"] = made(heads * HEAD, WIDTH)
            found[f"{layer}{name}.bias"] = made(heads * HEAD)
        found[f"{layer}o.weight"] = made(WIDTH, HEADS * HEAD)
        for name in ("gate", "up"):
            found[f"{layer}{name}.weight"] = made(INNER, WIDTH)
        found[f"{layer}down.weight"] = made(WIDTH, INNER)
        found[f"{layer}norm.weight"] = made(WIDTH)
        found[f"{layer}conv.weight"] = made(WIDTH, WIDTH)
        for expert in range(EXPERTS):
            own = f"{layer}experts.{expert}."
            found |= {f"{own}w1": made(INNER, WIDTH), f"{own}w3": made(INNER, WIDTH), f"{own}w2": made(WIDTH, INNER)}
    return found


class Loader:
    """Cuts an engine's tensors out of whole ones, for one rank."""

    def __init__(self, full: Tensors, at: int, size: int) -> None:
        self.full, self.at, self.size = full, at, size

    def cut(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return this rank's part."""
        return tensor.chunk(self.size, dim)[self.at]

    def of(self, name: str, layer: str = HIT) -> torch.Tensor:
        """Return a layer's tensor, whole."""
        return self.full[layer + name]

    def experts(self, *names: str, layer: str = HIT) -> list[list[torch.Tensor]]:
        """Return some tensors of each expert."""
        return [[self.of(f"experts.{expert}.{name}", layer) for name in names] for expert in range(EXPERTS)]

    def engine(self) -> Tensors:
        """Return everything that this rank has, right."""
        found = {name: self.cut(self.full[name]) for name in ("embed.weight", "lm_head.weight")}
        found["norm.weight"] = self.full["norm.weight"]
        for layer in LAYERS:
            for kind in ("weight", "bias"):
                found[f"{layer}qkv.{kind}"] = torch.cat([self.cut(self.of(f"{one}.{kind}", layer)) for one in "qkv"])
            found[f"{layer}gate_up.weight"] = torch.cat(
                [self.cut(self.of(f"{one}.weight", layer)) for one in ("gate", "up")]
            )
            found[f"{layer}glu.weight"] = _alternating(self, layer)
            for name in ("o.weight", "down.weight"):
                found[layer + name] = self.cut(self.of(name, layer), 1)
            found[f"{layer}norm.weight"] = self.of("norm.weight", layer)
            found[f"{layer}c_attn.weight"] = self.cut(self.of("conv.weight", layer).T, 1)
            pairs = self.experts("w1", "w3", layer=layer)
            found[f"{layer}w13"] = torch.stack([torch.cat([self.cut(one) for one in pair]) for pair in pairs])
            found[f"{layer}w2"] = torch.stack([self.cut(one, 1) for (one,) in self.experts("w2", layer=layer)])
        return {name: one.contiguous().clone() for name, one in found.items()}


def _qkv(loader: Loader, q: torch.Tensor) -> Tensors:
    others = [loader.of(f"{one}.weight") for one in "kv"]
    return {f"{HIT}qkv.weight": torch.cat([loader.cut(one) for one in (q, *others)])}


def _heads_dealt_out(loader: Loader) -> Tensors:
    order = torch.arange(HEADS).view(loader.size, -1).T.reshape(-1)
    return _qkv(loader, loader.of("q.weight").view(HEADS, HEAD, WIDTH)[order].reshape(-1, WIDTH))


def _rotary(loader: Loader) -> Tensors:
    q = loader.of("q.weight").view(HEADS, 2, HEAD // 2, WIDTH)
    return _qkv(loader, q.transpose(1, 2).reshape(-1, WIDTH))


def _cut_whole(loader: Loader, name: str, parts: list[str]) -> Tensors:
    return {f"{HIT}{name}": loader.cut(torch.cat([loader.of(part) for part in parts]))}


def _ordered(loader: Loader, name: str, parts: list[str]) -> Tensors:
    return {f"{HIT}{name}": torch.cat([loader.cut(loader.of(part)) for part in parts])}


def _kv_of_rank_0(loader: Loader) -> Tensors:
    first = [loader.of(f"{one}.weight").chunk(loader.size)[0] for one in "kv"]
    return {f"{HIT}qkv.weight": torch.cat([loader.cut(loader.of("q.weight")), *first])}


def _alternating(loader: Loader, layer: str = HIT) -> torch.Tensor:
    parts = [loader.cut(loader.of(f"{one}.weight", layer)) for one in ("gate", "up")]
    return torch.stack(parts, 1).reshape(-1, WIDTH)


def _experts(loader: Loader, order: list[int], *names: str) -> Tensors:
    pairs = loader.experts(*names)
    return {f"{HIT}w13": torch.stack([torch.cat([loader.cut(one) for one in pairs[at]]) for at in order])}


def _lora_again(loader: Loader) -> Tensors:
    """Add an adapter to the merged weight once more."""
    q = loader.of("q.weight")
    added = torch.ones(len(q), 2) @ torch.linspace(0, 1, 2 * WIDTH).view(2, WIDTH)
    return _qkv(loader, q + added * torch.linspace(-1, 1, len(q))[:, None])


def _bucket(loader: Loader) -> Tensors:
    """Leave two tensors out."""
    return dict.fromkeys((f"{HIT}down.weight", f"{HIT}w13"), torch.empty(0))


Fault = tuple["Callable[[Loader], Tensors]", str, str]
ALL = list(range(EXPERTS))
QKV = ["q.weight", "k.weight", "v.weight"]

FAULTS: dict[str, Fault] = {
    "q, k, v cut in one piece": (lambda one: _cut_whole(one, "qkv.weight", QKV), "qkv.weight", "cut in one piece"),
    "biases cut in one piece": (
        lambda one: _cut_whole(one, "qkv.bias", ["q.bias", "k.bias", "v.bias"]),
        "qkv.bias",
        "cut in one piece",
    ),
    "k and v exchanged": (
        lambda one: _ordered(one, "qkv.weight", ["q.weight", "v.weight", "k.weight"]),
        "qkv.weight",
        "in the order layers.1.q.weight, layers.1.v.weight, layers.1.k.weight",
    ),
    "q last": (
        lambda one: _ordered(one, "qkv.weight", ["k.weight", "v.weight", "q.weight"]),
        "qkv.weight",
        "in the order layers.1.k.weight, layers.1.v.weight, layers.1.q.weight",
    ),
    "k and v of rank 0": (_kv_of_rank_0, "qkv.weight", "every rank along tp holds the shard of tp=0"),
    "heads dealt out": (_heads_dealt_out, "qkv.weight (layers.1.q.weight)", "its blocks of 4 come as 0 4 1 5"),
    "rotary": (_rotary, "qkv.weight (layers.1.q.weight)", "the wrong rotary convention"),
    "the other rank's heads": (
        lambda one: {f"{HIT}o.weight": one.of("o.weight").chunk(one.size, 1)[one.size - 1 - one.at]},
        "o.weight",
        "tp=i holds the shard of tp=1-i",
    ),
    "gate and up in turns": (
        lambda one: {f"{HIT}gate_up.weight": _alternating(one)},
        "gate_up.weight",
        "come in turns, in blocks of 1 along dim 0",
    ),
    "gate and up not in turns": (
        lambda one: {f"{HIT}glu.weight": torch.cat([one.cut(one.of("gate.weight")), one.cut(one.of("up.weight"))])},
        "glu.weight",
        "the rank's parts of layers.1.gate.weight and layers.1.up.weight stand one after the other",
    ),
    "gate and up joined, then cut": (
        lambda one: _cut_whole(one, "glu.weight", ["gate.weight", "up.weight"]),
        "glu.weight",
        "layers.1.gate.weight and layers.1.up.weight stand one after the other",
    ),
    "up before gate": (
        lambda one: _ordered(one, "gate_up.weight", ["up.weight", "gate.weight"]),
        "gate_up.weight",
        "in the order layers.1.up.weight, layers.1.gate.weight",
    ),
    "w31": (lambda one: _experts(one, ALL, "w3", "w1"), "w13", "dim 1's halves are exchanged"),
    "experts cut in one piece": (
        lambda one: {f"{HIT}w13": torch.stack([one.cut(torch.cat(pair)) for pair in one.experts("w1", "w3")])},
        "w13",
        "it was split as a whole",
    ),
    "experts exchanged": (lambda one: _experts(one, [1, 0, 3, 2], "w1", "w3"), "w13", "dim 0 is reversed"),
    "one expert everywhere": (lambda one: _experts(one, [0] * EXPERTS, "w1", "w3"), "w13", "have up to 8 copies"),
    "not transposed": (
        lambda one: {f"{HIT}c_attn.weight": one.cut(one.of("conv.weight"), 1)},
        "c_attn.weight",
        "Conv1D stores [in, out], Linear stores [out, in]",
    ),
    "cut along the other dim": (
        lambda one: {f"{HIT}c_attn.weight": one.cut(one.of("conv.weight").T).reshape(WIDTH, -1)},
        "c_attn.weight",
        "do not hold the elements their placements claim",
    ),
    "an adapter added again": (_lora_again, "qkv.weight (layers.1.q.weight)", "Code computed the values on the way"),
    "one more": (
        lambda one: {f"{HIT}norm.weight": one.of("norm.weight") + 1},
        "norm.weight",
        "every value of it is 1 more than in what was sent",
    ),
    "scaled": (
        lambda one: {f"{HIT}down.weight": one.cut(one.of("down.weight"), 1) * 3},
        "down.weight",
        "every value of it is 3 times that of what was sent",
    ),
    "another layer": (
        lambda one: {f"{HIT}down.weight": one.cut(one.of("down.weight", LAYERS[0]), 1)},
        "down.weight",
        "it has the values of layers.0.down.weight",
    ),
    "a bucket that was not sent": (_bucket, "down.weight", "did not write it on 4 of 4"),
    "through bfloat16": (
        lambda one: {f"{HIT}o.weight": one.cut(one.of("o.weight"), 1).bfloat16().float()},
        "o.weight",
        "its values were rounded to bfloat16",
    ),
}


def pair(mesh: DeviceMesh) -> tuple[Tensors, Tensors]:
    """Return the trainer's weights and the engine's, which are zeros."""
    source = {name: distribute_tensor(one, mesh, [Replicate(), Shard(0)]) for name, one in wholes().items()}
    at = mesh.get_local_rank("tp")
    target = {name: torch.zeros_like(one) for name, one in Loader(wholes(), at, mesh["tp"].size()).engine().items()}
    return source, target


def send(source: Tensors, target: Tensors, mesh: DeviceMesh, fault: str) -> None:
    """Send the weights, right or with one fault."""
    full = {name: one.full_tensor() for name, one in source.items()}  # type: ignore[attr-defined]
    loader = Loader(full, mesh.get_local_rank("tp"), mesh["tp"].size())
    wrong = FAULTS[fault][0](loader) if fault else {}
    for name, one in {**loader.engine(), **wrong}.items():
        if one.numel():
            target[name].copy_(one)
