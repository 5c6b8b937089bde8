"""Faults of experts, convolutions, context parallel and pipelines."""

from __future__ import annotations

from tests.bugs.places.convolution import CONVOLUTION
from tests.bugs.places.experts import EXPERTS
from tests.bugs.places.fault import NOTHING, Fault, Program
from tests.bugs.places.later.shared_experts import SHARED
from tests.bugs.places.later.stages import STAGES_DP
from tests.bugs.places.sequence import SEQUENCE
from tests.bugs.places.stages import PIPELINE


def _spoiled(name: str, program: Program, call: str, place: str | tuple[str, ...], *words: str) -> Fault:
    places = (place,) if isinstance(place, str) else place
    return Fault(name, program, ((NOTHING, f"    {call}\n"),), places, words)


UNNORMALIZED = """def gates(x):
        best, which = moe.router(x).softmax(-1).topk(2)
        return torch.zeros(*x.shape[:-1], EXPERTS, dtype=x.dtype).scatter(-1, which, best)
    moe.gates = gates"""

SECOND_LOST = (
    "moe.weighed = lambda gates: moe.entered(gates * (gates >= gates.amax(-1, keepdim=True)) if moe.first else gates)"
)

FEWER = """forward, calls = layer.forward, []
    layer.forward = lambda x: (calls.append(1), forward(x) if len(calls) % PARTS or len(calls) > PARTS else x)[1]"""

FAULTS = (
    _spoiled("gates of two experts that are not normalized", SHARED, UNNORMALIZED, "layers.1.moe", "moe"),
    _spoiled("the second expert of a token left out on one rank", SHARED, SECOND_LOST, "layers.1.moe", "moe"),
    _spoiled(
        "a shared expert halved",
        SHARED,
        "moe.shared.register_forward_hook(lambda module, inputs, output: output / 2)",
        "layers.1.moe.shared",
        "1/2",
    ),
    _spoiled(
        "gradients of different experts summed",
        SHARED,
        "moe.weight.register_hook(lambda grad: all_reduce(grad, group=moe.group))",
        "layers.1.moe",
        "ep",
    ),
    _spoiled(
        "a router's gradient on one rank only",
        SHARED,
        "moe.router.weight.register_hook(lambda grad: grad * (moe.first == 0))",
        "layers.1.moe.router",
        "ep",
    ),
    _spoiled(
        "tokens put back one place too far",
        EXPERTS,
        "moe.put_back = lambda tokens, order: tokens[order.argsort()].roll(1, 0)",
        "layers.1.moe",
        "order",
    ),
    _spoiled(
        "images padded around",
        CONVOLUTION,
        "layer.conv.padding_mode = 'circular'",
        "layers.1.conv",
        "conv",
    ),
    _spoiled(
        "channels in another order",
        CONVOLUTION,
        "layer.conv.register_forward_hook(lambda module, inputs, output: output.flip(1))",
        "layers.1.conv",
        "order",
    ),
    _spoiled(
        "images mirrored on one replica",
        CONVOLUTION,
        "layer.conv.register_forward_hook(lambda module, inputs, output: "
        "output.flip(-1) if mesh.get_local_rank('replicate') else output)",
        "layers.1.conv",
        "conv",
    ),
    _spoiled(
        "a mask that begins a token too late on later ranks",
        SEQUENCE,
        "first = layer.attn.first; layer.attn.first = lambda x: first(x) + (first(x) > 0)",
        "layers.1.attn",
        "cp",
    ),
    _spoiled(
        "tokens of each rank in reverse",
        SEQUENCE,
        "layer.norm.register_forward_hook(lambda module, inputs, output: output.flip(1))",
        "layers.1.norm",
        "order",
    ),
    Fault(
        "positions of one layer not reduced",
        SEQUENCE,
        (
            (
                "    distributed.all_reduce(grad)\n",
                "    name != 'layers.1.pos.table' and distributed.all_reduce(grad)\n",
            ),
        ),
        ("layers.1.pos",),
        ("sum|reduce",),
    ),
    _spoiled("a layer that the last micro-batch skips", PIPELINE, FEWER, "layers.1", "layers.1"),
    Fault(
        "what is sent to the next stage halved",
        STAGES_DP,
        (("distributed.send(output.detach(), ", "distributed.send(output.detach() / 2, "),),
        ("layers.1", "layers.2"),
        ("1/2", "stage"),
    ),
    _spoiled(
        "a bias whose gradient one micro-batch gives",
        PIPELINE,
        "calls = []; layer.linear.bias.register_hook(lambda grad: grad * (calls.append(1) or len(calls) == PARTS))",
        "layers.1.linear",
        "linear",
    ),
)
