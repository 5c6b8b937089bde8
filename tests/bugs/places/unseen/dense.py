"""Faults of transformers: under FSDP2 and tensor parallel, by torch's styles or by hand."""

from __future__ import annotations

from tests.bugs.places.by_hand import BY_HAND_TP
from tests.bugs.places.fault import NOTHING, Fault, Program
from tests.bugs.places.later.llama import LLAMA_TP
from tests.bugs.places.transformer import TRANSFORMER


def _spoiled(
    name: str, program: Program, call: str, place: str, *words: str, more: tuple[tuple[str, str], ...] = ()
) -> Fault:
    return Fault(name, program, (*more, (NOTHING, f"    {call}\n")), (place,), words)


def _hooked(name: str, program: Program, module: str, output: str, *words: str) -> Fault:
    call = f"layer.{module}.register_forward_hook(lambda module, inputs, output: {output})"
    return _spoiled(name, program, call, f"layers.1.{module}", *words)


SCALED = (
    ("self.turned(k), v, is_causal=True)", "self.turned(k), v, is_causal=True, scale=self.scale)"),
    ("    def turned(self, x):\n", "    scale = None\n\n    def turned(self, x):\n"),
)

FAULTS = (
    _hooked("columns of an MLP in another order", TRANSFORMER, "mlp.up", "output.flip(-1)", "order"),
    _hooked(
        "another activation on one rank",
        LLAMA_TP,
        "mlp.up",
        "output if mesh.get_local_rank('tp') == 0 else output.abs()",
        "mlp.up",
    ),
    _spoiled("softmax of another scale", LLAMA_TP, "layer.attn.scale = 1.0", "layers.1.attn", "attn", more=SCALED),
    _spoiled(
        "angles that begin a token later",
        LLAMA_TP,
        "layer.attn.turned = lambda x: rotated(functional.pad(x, (0, 0, 1, 0)))[..., 1:, :]",
        "layers.1.attn",
        "attn",
    ),
    _spoiled("another epsilon in a norm", LLAMA_TP, "layer.norm1.eps = 0.5", "layers.1.norm1", "norm1"),
    _hooked(
        "gradients of queries lost by half", LLAMA_TP, "attn.wq", "(output + output.detach()) / 2", "1/2", "backward"
    ),
    Fault(
        "an embedding multiplied once more",
        LLAMA_TP,
        (
            (NOTHING, NOTHING),
            (
                "    spoil(model.layers[1], mesh)\n",
                "    model.embed.register_forward_hook(lambda module, inputs, output: output * 4)\n",
            ),
        ),
        ("embed",),
        ("4 times",),
    ),
    _spoiled(
        "gradients of queries three times",
        BY_HAND_TP,
        "layer.attn.q.weight.register_hook(lambda grad: grad * 3)",
        "layers.1.attn.q",
        "3 times",
    ),
    _spoiled(
        "an MLP that adds what it was given",
        BY_HAND_TP,
        "layer.mlp.register_forward_hook(lambda module, inputs, output: output + inputs[0])",
        "layers.1.mlp",
        "input",
    ),
    _spoiled(
        "a sum in backward taken twice",
        BY_HAND_TP,
        "entered = layer.attn.entered; layer.attn.entered = lambda x: entered(entered(x))",
        "layers.1.attn",
        "2 times",
        "backward",
    ),
    _spoiled(
        "columns of a projection in another order",
        BY_HAND_TP,
        "layer.attn.o.weight.data = layer.attn.o.weight.data.flip(1)",
        "layers.1.attn.o",
        "order|misordered|reversed",
    ),
    _spoiled(
        "a norm's gradient on one rank only",
        BY_HAND_TP,
        "layer.norm2.weight.register_hook(lambda grad: grad * (mesh.get_local_rank('tp') == 0))",
        "layers.1.norm2",
        "tp",
    ),
    _spoiled(
        "noise that each rank draws for itself",
        BY_HAND_TP,
        "noise = torch.randn(FEATURES, generator=torch.Generator().manual_seed(mesh.get_local_rank('tp'))) / 9; "
        "layer.norm2.register_forward_hook(lambda module, inputs, output: output + noise.to(output.dtype))",
        "layers.1.norm2",
        "norm2",
    ),
    _spoiled(
        "a residual that nothing flows back through",
        BY_HAND_TP,
        "layer.forward = lambda x: (y := x.detach() + layer.attn(layer.norm1(x))) + layer.mlp(layer.norm2(y))",
        "layers.1",
        "backward",
    ),
)
