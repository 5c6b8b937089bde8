"""Right programs with habits that look like faults: frozen layers, shared modules, cuts and scales on purpose."""

from __future__ import annotations

from tests.bugs.places.by_hand import BY_HAND_TP
from tests.bugs.places.fault import Program
from tests.bugs.places.later.llama import LLAMA_TP


def _llama(name: str, *edits: tuple[str, str]) -> Program:
    return Program(f"llama, {name}", "fsdp=2,tp=2", LLAMA_TP.source(edits))


def _by_hand(name: str, *edits: tuple[str, str]) -> Program:
    return Program(f"TP by hand, {name}", "dp=2,tp=2", BY_HAND_TP.source(edits))


RUN = '            x = checkpoint(layer, x, use_reentrant=RECOMPUTED == "reentrant") if RECOMPUTED else layer(x)\n'
BUILT = "def build():\n    return Llama()\n"
BUILT_BY_HAND = "def build():\n    return Transformer()\n"
LEFT = "        return x + self.mlp(self.norm2(x))\n\n\nclass Transformer"
LAYER = "        x = x + self.attn(self.norm1(x))\n        return x + self.mlp(self.norm2(x))\n"

TWINS = (
    _llama(
        "the first layer frozen",
        (BUILT, "def build():\n    model = Llama()\n    model.layers[0].requires_grad_(False)\n    return model\n"),
    ),
    _llama(
        "embedding and first norms frozen",
        (BUILT, "def build():\n    model = Llama()\n    model.embed.requires_grad_(False)\n    return model\n"),
    ),
    _llama(
        "recomputed, reentrant",
        ('RECOMPUTED, MIXED, RESHARD = False, "",', 'RECOMPUTED, MIXED, RESHARD = False, "reentrant",'),
    ),
    _llama(
        "recomputed", ('RECOMPUTED, MIXED, RESHARD = False, "",', 'RECOMPUTED, MIXED, RESHARD = False, "once more",')
    ),
    _llama("a layer called twice", (RUN, "            x = layer(layer(x))\n")),
    _llama(
        "layers in another order than their names",
        ("for layer in self.layers:\n            x", "for layer in reversed(self.layers):\n            x"),
    ),
    _llama(
        "a layer whose gate is detached",
        ("functional.silu(self.gate(x)) *", "functional.silu(self.gate(x)).detach() *"),
    ),
    _llama(
        "gradients scaled on purpose",
        (LAYER, LAYER.replace("self.mlp(self.norm2(x))", "half(self.mlp(self.norm2(x)))")),
        ("class Block(", "def half(x):\n    return x / 2 + x.detach() / 2\n\n\nclass Block("),
    ),
    _llama(
        "compiled attention",
        (
            "    spoil(model.layers[1], mesh)\n",
            "    for layer in model.layers:\n        layer.mlp = torch.compile(layer.mlp, backend='eager')\n",
        ),
    ),
    _by_hand(
        "layers that return dictionaries and None",
        (
            LAYER,
            LAYER.replace("return x +", "x = x +") + "        return {'x': x, 'cache': None, 'seen': [x.detach()]}\n",
        ),
        ("            x = layer(x)\n", "            x = layer(x)['x']\n"),
    ),
    _by_hand(
        "layers that return dataclasses",
        (LAYER, LAYER.replace("return x +", "x = x +") + "        return Result(x, None)\n"),
        ("            x = layer(x)\n", "            x = layer(x).x\n"),
        (
            "class Layer(",
            "import dataclasses\n\n\n"
            "@dataclasses.dataclass\nclass Result:\n    x: torch.Tensor\n    cache: object\n\n\n"
            "class Layer(",
        ),
    ),
    _by_hand(
        "residuals in place",
        (
            LAYER,
            "        x = x.clone()\n        x += self.attn(self.norm1(x.clone()))\n"
            "        x += self.mlp(self.norm2(x.clone()))\n        return x\n",
        ),
    ),
    _by_hand(
        "a layer that is not called",
        (
            BUILT_BY_HAND,
            "def build():\n    model = Transformer()\n    model.spare = nn.Linear(3, 3)\n    return model\n",
        ),
    ),
    _by_hand(
        "one layer for all",
        ("for number in range(LAYERS)})", "for number in range(1)})"),
        (
            "        for layer in self.layers.values():\n            x = layer(x)\n",
            "        for _ in range(LAYERS):\n            x = self.layers['0'](x)\n",
        ),
        ('    spoil(model.layers["1"], mesh)\n', ""),
    ),
    _by_hand(
        "inputs by name",
        ("self.attn(self.norm1(x))", "self.attn(x=self.norm1(x))"),
        ("self.mlp(self.norm2(x))", "self.mlp(x=self.norm2(x))"),
    ),
)
