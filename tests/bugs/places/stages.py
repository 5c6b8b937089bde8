"""A pipeline of two stages and four layers, three micro-batches."""

from __future__ import annotations

from tests.bugs.pipeline import MICRO
from tests.bugs.places.fault import NOTHING, Fault, Program

PIPELINE = Program(
    "blocks, PP with micro-batches",
    "pp=2",
    MICRO.replace("def batch():\n    return torch.randn(24, 8)", "def batch():\n    return torch.randn(12, 8)")
    + '''
_parallelize = parallelize


def parallelize(model, mesh):
    _parallelize(model, mesh)
    for name, layer in model.layers.items():
        if name == "1":
            spoil(layer, mesh)


def spoil(layer, mesh):
    """Leave everything as it is."""

''',
)

FAULTS = (
    Fault(
        "an output doubled in a middle layer",
        PIPELINE,
        ((NOTHING, "    layer.linear.register_forward_hook(lambda module, inputs, output: output * 2)\n"),),
        ("layers.1.linear",),
        ("2 times",),
    ),
    Fault(
        "the gradient that is sent back divided twice",
        PIPELINE,
        (
            (
                "        distributed.send(x.grad, dst=ranks[stage - 1])",
                "        distributed.send(x.grad / PARTS, dst=ranks[stage - 1])",
            ),
        ),
        ("layers.1", "layers.2"),
        ("1/3|divided by 3", "backward"),
    ),
    Fault(
        "an activation that a stage adds only where it is first",
        PIPELINE,
        ((NOTHING, "    layer.forward = lambda x: torch.tanh(layer.linear(x))\n"),),
        ("layers.1",),
        ("layers.1",),
    ),
    Fault(
        "nothing flows back through a middle layer",
        PIPELINE,
        ((NOTHING, "    layer.linear.register_forward_hook(lambda module, inputs, output: output.detach())\n"),),
        ("layers.1.linear",),
        ("cut|detach|nothing flows back",),
    ),
)
