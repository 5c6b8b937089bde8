"""Right programs that look like these faults."""

from __future__ import annotations

from tests.bugs.places.by_hand import BY_HAND_TP
from tests.bugs.places.convolution import CONVOLUTION
from tests.bugs.places.experts import EXPERTS
from tests.bugs.places.fault import NOTHING, Program
from tests.bugs.places.later.llama import LLAMA_TP
from tests.bugs.places.later.shared_experts import SHARED
from tests.bugs.places.sequence import SEQUENCE
from tests.bugs.places.stages import PIPELINE
from tests.bugs.places.unseen.state_space import STATE_SPACE


def _twin(program: Program, name: str, *edits: tuple[str, str]) -> Program:
    return Program(f"{program.name}, {name}", program.mesh, program.source(edits))


BUILT_LLAMA = "def build():\n    return Llama()\n"
LAYER = "        x = x + self.attn(self.norm1(x))\n        return x + self.mlp(self.norm2(x))\n"

TWINS = (
    _twin(
        LLAMA_TP,
        "a tied head",
        (
            '    parallelize_module(model, mesh["tp"], {"embed": RowwiseParallel(**whole), '
            '"head": ColwiseParallel(**whole)})\n',
            "",
        ),
        ('= False, "", False, True', '= True, "", False, True'),
    ),
    _twin(
        LLAMA_TP,
        "a part whose output is unused",
        (
            BUILT_LLAMA,
            "def build():\n    model = Llama()\n    model.layers[0].probe = nn.Linear(FEATURES, 2, bias=False)\n"
            "    return model\n",
        ),
        (
            "        x = x + self.attn(self.norm1(x))\n",
            "        x = x + self.attn(self.norm1(x))\n"
            "        if hasattr(self, 'probe'):\n            self.probe(x.detach())\n",
        ),
    ),
    _twin(
        LLAMA_TP,
        "a loss scaled by tokens",
        (
            "    return functional.cross_entropy(model(words)[:, :-1].flatten(0, 1).float(), words[:, 1:].flatten())",
            "    found = model(words)[:, :-1].flatten(0, 1).float()\n"
            "    total = functional.cross_entropy(found, words[:, 1:].flatten(), reduction='sum')\n"
            "    return total / (words.numel() - len(words))",
        ),
    ),
    _twin(
        BY_HAND_TP,
        "two micro-batches",
        (
            "    loss = model(rows).square().mean()\n    loss.backward()\n",
            "    parts = []\n    for part in rows.chunk(2):\n        parts.append(model(part).square().mean() / 2)\n"
            "        parts[-1].backward()\n    loss = sum(parts)\n",
        ),
    ),
    _twin(
        BY_HAND_TP,
        "in place and recomputed",
        (
            "            x = layer(x)\n",
            "            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)\n",
        ),
        (
            LAYER,
            LAYER.replace("return x + self.mlp(self.norm2(x))", "x.add_(self.mlp(self.norm2(x)))\n        return x"),
        ),
        ("BATCH_AXES", "import torch.utils.checkpoint\n\nBATCH_AXES"),
    ),
    _twin(
        BY_HAND_TP,
        "keys that are values, too",
        (
            "        q, k, v = self.norm(self.q(x)), self.k(x), self.v(x)\n",
            "        q, k, v = self.norm(self.q(x)), self.k(x), self.k(x)\n",
        ),
    ),
    _twin(
        SHARED,
        "a shared expert called twice",
        ("return self.left(own) + self.shared(x)", "return self.left(own) + self.shared(self.shared(x))"),
    ),
    _twin(
        SHARED,
        "gates scaled on purpose",
        (
            "    def weighed(self, gates):\n        return self.entered(gates)",
            "    def weighed(self, gates):\n        return self.entered(gates * 2.5)",
        ),
    ),
    _twin(
        EXPERTS,
        "a compiled mix",
        (
            "    spoil(model",
            "    for layer in model.layers.values():\n"
            "        layer.mix = torch.compile(layer.mix, backend='eager')\n    spoil(model",
        ),
    ),
    _twin(
        CONVOLUTION,
        "circular padding everywhere",
        ("3, padding=1, bias=False", "3, padding=1, padding_mode='circular', bias=False"),
    ),
    _twin(
        CONVOLUTION,
        "a frozen convolution",
        (
            "def build():\n    return Network()",
            "def build():\n    model = Network()\n    model.layers[0].conv.requires_grad_(False)\n    return model",
        ),
    ),
    _twin(SEQUENCE, "a layer called twice", ("            x = layer(x)\n", "            x = layer(layer(x))\n")),
    _twin(
        PIPELINE,
        "a bias that is not trained",
        (NOTHING, "    layer.linear.weight.register_hook(lambda grad: grad * 1)\n"),
    ),
    _twin(
        STATE_SPACE,
        "a state that is lost on purpose",
        ("        return state\n", "        return state * (at != TOKENS // 2)\n"),
    ),
    _twin(
        STATE_SPACE,
        "recomputed",
        (
            "            x = layer(x)\n",
            "            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)\n",
        ),
        ("BATCH_AXES", "import torch.utils.checkpoint\n\nBATCH_AXES"),
    ),
)
