"""A transformer with grouped heads, rotary positions and gated MLPs under FSDP2 and tensor parallel."""

from __future__ import annotations

from tests.bugs.pairs.llama import LLAMA
from tests.bugs.places.by_hand import BY_HAND_TP
from tests.bugs.places.fault import NOTHING, OTHER_RANK, Fault, Program

TEXT = (
    OTHER_RANK
    + LLAMA.replace("4, 24, 2, 20, 8, 8", "4, 24, 3, 20, 8, 4").replace(
        "rotated(q), rotated(k), v", "rotated(q), self.turned(k), v"
    )
    + '''
def plan():
    column, row = ColwiseParallel, RowwiseParallel
    attention = {f"attn.{name}": column() for name in ("wq", "wk", "wv")} | {"attn.wo": row()}
    return attention | {"mlp.gate": column(), "mlp.up": column(), "mlp.down": row()}


def parallelize(model, mesh):
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], plan())
    whole = {"input_layouts": Replicate(), "output_layouts": Replicate()}
    parallelize_module(model, mesh["tp"], {"embed": RowwiseParallel(**whole), "head": ColwiseParallel(**whole)})
    spoil(model.layers[1], mesh)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["fsdp"])
    fully_shard(model, mesh=mesh["fsdp"])


def spoil(layer, mesh):
    """Leave everything as it is."""

'''
).replace(
    "        return self.wo(found",
    "        return self.wo(found",
)
TEXT = TEXT.replace(
    "class Attention(nn.Module):\n",
    "class Attention(nn.Module):\n    def turned(self, x):\n        return rotated(x)\n\n",
)

LLAMA_TP = Program("llama, FSDP2 + TP", "fsdp=2,tp=2", TEXT)


def _hooked(module: str, output: str) -> tuple[tuple[str, str], ...]:
    return ((NOTHING, f"    layer.{module}.register_forward_hook(lambda module, inputs, output: {output})\n"),)


FAULTS = (
    Fault(
        "keys of the second rank turned by other angles",
        LLAMA_TP,
        ((NOTHING, "    layer.attn.turned = lambda x: rotated(x if mesh.get_local_rank('tp') == 0 else x.flip(2))\n"),),
        ("layers.1.attn",),
        ("attn",),
        ("not summed",),
    ),
    Fault(
        "gates of another rank's columns",
        LLAMA_TP,
        (
            (
                NOTHING,
                "    other = Other.of(mesh.get_group('tp'))\n"
                "    layer.mlp.gate.register_forward_hook(lambda module, inputs, output: other(output))\n",
            ),
        ),
        ("layers.1.mlp.gate",),
        ("tp",),
    ),
    Fault(
        "gradients of a gated MLP halved in backward",
        LLAMA_TP,
        _hooked("mlp.down", "output / 2 + output.detach() / 2"),
        ("layers.1.mlp.down",),
        ("1/2", "backward"),
    ),
    Fault(
        "a norm whose output is multiplied",
        LLAMA_TP,
        _hooked("norm2", "output * 1.5"),
        ("layers.1.norm2",),
        ("3/2|1.5",),
    ),
    Fault(
        "values that nothing flows back to on one rank",
        BY_HAND_TP,
        _hooked("attn.v", "output if mesh.get_local_rank('tp') == 0 else output.detach()"),
        ("layers.1.attn.v",),
        ("cut|detach|nothing flows back",),
    ),
)
