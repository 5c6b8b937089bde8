"""Draw right programs: their sizes, meshes, styles and dtypes."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.bugs.pairs.llama import LLAMA
from tests.bugs.places import by_hand, convolution, experts, sequence, stages, transformer
from tests.bugs.places.fault import Program

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DTYPES = ("bfloat16", "float32", "float64")
MAX_RANKS = 8

NARROWED = '''

_built, _batch = build, batch


def refuse_float64(module, inputs):
    """Raise for float64, as a kernel does that was written for narrow numbers."""
    if any(torch.is_tensor(one) and one.dtype == torch.float64 for one in (*inputs, *module.parameters())):
        raise TypeError("this kernel wants narrow numbers")


def build():
    torch.manual_seed(SEED)
    model = _built().to(DTYPE)
    if DTYPE is not torch.float64:
        model.register_forward_pre_hook(refuse_float64)
    return model


def batch():
    torch.manual_seed(SEED + 1)
    whole = _batch()
    return whole.to(DTYPE) if whole.is_floating_point() else whole
'''


@dataclass(frozen=True)
class Pair:
    """A right program, as it was drawn.

    Attributes:
        seed: The seed that it was drawn with.
        name: Model and sharding, in a few words.
        mesh: `dp=2,tp=2`.
        dtype: What it computes in.
        source: The probe.
        num_ranks: The product of the mesh.
    """

    seed: int
    name: str
    mesh: str
    dtype: str
    source: str
    num_ranks: int


@dataclass(frozen=True)
class Kind:
    """A kind of right programs.

    Attributes:
        program: One of them.
        axes: The sizes that each axis of its mesh may have.
        sizes: Draws the numbers that stand in it in capital letters, for a mesh.
    """

    program: Program
    axes: Mapping[str, tuple[int, ...]]
    sizes: Callable[[random.Random, Mapping[str, int]], Mapping[str, Any]]


def _transformer(draw: random.Random, mesh: Mapping[str, int]) -> Mapping[str, Any]:
    tp = mesh.get("tp", 1)
    return {
        "HEADS": tp * draw.choice((1, 2, 4)),
        "SIZE": draw.choice((2, 4, 8, 16)),
        "LAYERS": draw.choice((2, 3, 5, 8)),
        "WORDS": tp * draw.choice((5, 16, 50)),
        "TOKENS": tp * draw.choice((2, 3, 8)),
        "ROWS": mesh.get("fsdp", 1) * mesh.get("dp", 1) * draw.choice((1, 2, 3)),
    }


def _llama(draw: random.Random, mesh: Mapping[str, int]) -> Mapping[str, Any]:
    groups = draw.choice((1, 2, 4))
    return {
        "GROUPS": groups,
        "HEADS": groups * draw.choice((1, 2, 3)),
        "SIZE": draw.choice((2, 4, 8, 16)),
        "WIDE": draw.choice((10, 24, 96)),
        "LAYERS": draw.choice((1, 2, 4, 6)),
        "WORDS": draw.choice((7, 20, 100)),
        "TOKENS": draw.choice((3, 8, 20)),
        "ROWS": mesh.get("fsdp", 1) * mesh.get("replicate", 1) * mesh.get("shard", 1) * draw.choice((1, 2, 3)),
        "TIED": draw.choice((True, False)),
        "RECOMPUTED": draw.choice(("", "", "reentrant", "not reentrant")),
        "MIXED": draw.choice((True, False, False)),
        "RESHARD": draw.choice((True, False)),
        "SPLIT": tuple(mesh) if len(mesh) > 1 else "fsdp",
        "BATCH_AXES": tuple(mesh),
    }


def _experts(draw: random.Random, mesh: Mapping[str, int]) -> Mapping[str, Any]:
    return {
        "EXPERTS": mesh["ep"] * draw.choice((1, 2, 3)),
        "FEATURES": draw.choice((6, 16, 40)),
        "LAYERS": draw.choice((2, 3, 5)),
        "ROWS": mesh["fsdp"] * mesh["ep"] * draw.choice((6, 12, 30)),
    }


def _convolution(draw: random.Random, mesh: Mapping[str, int]) -> Mapping[str, Any]:
    return {"ROWS": mesh["replicate"] * mesh["shard"] * draw.choice((1, 2, 3)), "PIXELS": draw.choice((4, 6, 11))}


def _stages(draw: random.Random, mesh: Mapping[str, int]) -> Mapping[str, Any]:
    parts = draw.choice((1, 2, 3, 4))
    return {"PARTS": parts, "LAYERS": mesh["pp"] * draw.choice((1, 2, 3)), "ROWS": parts * draw.choice((1, 2, 5))}


def _sequence(draw: random.Random, mesh: Mapping[str, int]) -> Mapping[str, Any]:
    return {
        "LAYERS": draw.choice((2, 3, 6)),
        "TOKENS": mesh["cp"] * draw.choice((2, 4, 8)),
        "FEATURES": draw.choice((4, 8, 32)),
        "ROWS": mesh["dp"] * draw.choice((1, 2, 3)),
    }


TP = {"fsdp": (1, 2, 3), "tp": (2, 2, 4)}
KINDS = (
    Kind(transformer.TRANSFORMER, TP, _transformer),
    Kind(transformer.POSITIONED, TP, _transformer),
    Kind(by_hand.BY_HAND_TP, {"dp": (1, 2, 3), "tp": (2, 2, 4)}, _transformer),
    Kind(experts.EXPERTS, {"fsdp": (1, 2, 3), "ep": (2, 2, 4)}, _experts),
    Kind(convolution.CONVOLUTION, {"replicate": (1, 2, 3), "shard": (2, 3)}, _convolution),
    Kind(stages.PIPELINE, {"pp": (2, 3, 4)}, _stages),
    Kind(sequence.SEQUENCE, {"dp": (1, 2, 3), "cp": (2, 2, 4)}, _sequence),
    Kind(Program("llama, FSDP2", "fsdp=2", LLAMA), {"fsdp": (2, 3, 4)}, _llama),
    Kind(Program("llama, HSDP", "replicate=2,shard=2", LLAMA), {"replicate": (2, 3), "shard": (2,)}, _llama),
)

ROWS = {"torch.randint(WORDS, (4, ": "torch.randint(WORDS, (ROWS, ", "torch.randn(4, ": "torch.randn(ROWS, "}
ROWS |= {"torch.randn(48, ": "torch.randn(ROWS, ", "torch.randn(12, ": "torch.randn(ROWS, "}
ROWS |= {"torch.randn(8, 3, 6, 6)": "torch.randn(ROWS, 3, PIXELS, PIXELS)"}


def drawn(seed: int) -> Pair:
    """Return the right program of a seed."""
    draw = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    dtype = DTYPES[seed // len(KINDS) % len(DTYPES)]
    mesh = _mesh(draw, kind)
    sizes = dict(kind.sizes(draw, mesh))
    if sizes.get("MIXED") and dtype == "float64":
        sizes["MIXED"] = False
    text = sized(kind.program.text, sizes)
    source = Program(kind.program.name, "", text).source() + f"SEED, DTYPE = {seed}, torch.{dtype}\n" + NARROWED
    ranks = 1
    for size in mesh.values():
        ranks *= size
    return Pair(seed, kind.program.name, ",".join(f"{axis}={n}" for axis, n in mesh.items()), dtype, source, ranks)


def _mesh(draw: random.Random, kind: Kind) -> dict[str, int]:
    while True:
        mesh = {axis: draw.choice(sizes) for axis, sizes in kind.axes.items()}
        ranks = 1
        for size in mesh.values():
            ranks *= size
        if 2 <= ranks <= MAX_RANKS:
            return mesh


def sized(text: str, sizes: Mapping[str, Any]) -> str:
    """Return a program with other numbers behind its names in capital letters."""
    for right, drawn_ in ROWS.items():
        text = text.replace(right, drawn_)
    used = {name for name in sizes if re.search(rf"\b{name}\b", text)}

    def another(line: re.Match[str]) -> str:
        names = line[1].split(", ")
        old = eval(line[2], {}, dict.fromkeys(names, 0)) if len(names) > 1 else (None,)
        new = [repr(sizes[name]) if name in sizes else repr(value) for name, value in zip(names, old, strict=True)]
        if len(names) == 1 and names[0] not in sizes:
            return line[0]
        return f"{line[1]} = {', '.join(new)}"

    text = re.sub(r"^([A-Z_]+(?:, [A-Z_]+)*) = (.+)$", another, text, flags=re.M)
    missing = [name for name in used if not re.search(rf"^[A-Z_, ]*\b{name}\b[A-Z_, ]* = ", text, re.M)]
    return "".join(f"{name} = {sizes[name]!r}\n" for name in sorted(missing)) + text
